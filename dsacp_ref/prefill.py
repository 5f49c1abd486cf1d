"""Whether a step is split over ranks at all: what a scheduler and a worker decide before there is any row.

::

    a scheduler adds a request                         may_add_request
    a step comes: is context parallelism on?       no  ->  unsplit
      is there anything but decode?                no  ->  unsplit       (dsa_cp_mixed off: any decode  ->  unsplit)
      one request, where the profile wants one?    no  ->  unsplit
      has every rank something to do?              no  ->  unsplit       enough_tokens
      the configured rule                                                step_split

Plain Python over host lengths, so both packages read the same decisions, and ranks that know the same lengths decide
alike. An unsplit step is right with any lengths; these are rules of thumb for speed, except where a profile limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsacp_ref.config import ParallelConfig, split_rule
from dsacp_ref.spec import check_int, check_record, contract_error

__all__ = ["enough_tokens", "may_add_request", "step_split"]


def may_add_request(num_requests: int, parallel: ParallelConfig) -> bool:
    """Whether a scheduler may put one more request into the prefill batch that it is making.

    Every split rule here cuts any number of requests. Only the profile of the first zigzag mode stops at one.

    Args:
        num_requests: int >= 0, requests that are in the batch already.
        parallel: ParallelConfig.

    Returns:
        bool. Always true without a profile, and where nobody asks for context parallelism.

    Raises:
        ContractError: a wrong type, or a negative count.

    Source: SGLang ``schedule_policy``, before and after #13959: first every split stopped at one request, then
        ``in-seq-split`` alone.

    >>> old = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="in-seq-split", dsa_cp_profile="in_seq_split")
    >>> new = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="round-robin-split")
    >>> [may_add_request(n, old) for n in (0, 1, 2)], [may_add_request(n, new) for n in (0, 1, 2)]
    ([True, False, False], [True, True, True])
    """
    num_requests = check_int("num_requests", num_requests, 0)
    check_record("parallel", parallel, ParallelConfig)
    return within_limit(num_requests + 1, parallel)


def enough_tokens(query_lens: Sequence[int], cp_size: int, split: str) -> bool:
    """Whether a step has tokens enough to be worth a split: if so, no rank is without rows.

    ::

        a step of requests with q new tokens, n together, over R ranks
        round_robin            n >= R                                                            exact
        contiguous             n > (R - 1) * ceil(n/R)          the last slice has a token       exact
        contiguous_request     the same of some request's q                                      exact
        round_robin_page(P)    some request has R pages, the last perhaps short                  exact
        zigzag, _ceil, _padded some q >= 2R

    Slices of ``ceil(n/R)`` run out early: 5 tokens over 4 ranks are 2, 2, 1, 0, so ``n >= R`` would not do. The zigzag
    rules ask for more than a row a rank: from 2R tokens on each of the 2R blocks of `zigzag` has one. Of `zigzag_ceil`
    and `zigzag_padded` trailing blocks can be empty all the same (5 tokens over 2 ranks are 2, 2, 1, 0), but then their
    ranks have the blocks in front.

    Args:
        query_lens: ints >= 0, tokens, each request's new ones; a padded graph slot's count, as its rows do.
        cp_size: int >= 1, ranks that share the stream.
        split: str, a rule as `split_rule` reads it.

    Returns:
        bool. False for one rank: there is nothing to split. Padding behind the last request is not thought of: a flat
        slice of a longer stream is longer, and the last ones may hold padding alone.

    Raises:
        ContractError: a wrong type, a negative length, no such rule.

    Source: SGLang ``can_cp_split`` (zigzag of one request: ``q // (2R) != 0``; round robin: tokens >= ranks); the rules
        of `dsacp_ref.partition.rank_pieces` for the others.

    >>> [enough_tokens([5], 4, split) for split in ("round_robin", "contiguous", "zigzag")]
    [True, False, False]
    >>> enough_tokens([3, 8], 4, "zigzag"), enough_tokens([3, 5], 4, "zigzag"), enough_tokens([8], 1, "zigzag")
    (True, False, False)
    """
    lengths = counts_of("query_lens", query_lens, 0)
    cp_size = check_int("cp_size", cp_size, 1)
    rule = split_rule(split)
    if cp_size == 1:
        return False
    if rule.name == "round_robin":
        return sum(lengths) >= cp_size
    if rule.name == "contiguous":
        return fills_every_slice(sum(lengths), cp_size)
    if rule.name == "contiguous_request":
        return any(fills_every_slice(length, cp_size) for length in lengths)
    if rule.name == "round_robin_page":
        return any(-(-length // rule.page_size) >= cp_size for length in lengths)
    return any(length >= 2 * cp_size for length in lengths)


def step_split(
    query_lens: Sequence[int],
    num_computed_tokens: Sequence[int],
    cp_size: int,
    parallel: ParallelConfig,
    *,
    decode_query_len: int = 1,
) -> str | None:
    """The split rule that a step runs with, or None for a step that every rank runs whole.

    Args:
        query_lens: ints >= 0, tokens, each request's new ones.
        num_computed_tokens: ints, tokens, what each request has cached; minus its query length in a padded graph slot,
            which is nobody's prefill or decode.
        cp_size: int >= 1, ranks that share the stream: ``Topology.cp_size``, with ``enable_dsa_cp`` the TP size.
        parallel: ParallelConfig; its ``cp_size`` is 1 or this one.
        decode_query_len: int >= 1, tokens; a request with cached tokens and at most this many new ones decodes.

    Returns:
        str, ``prefill_cp_mode`` by its own name; or None: context parallelism is off or has one rank; nobody prefills;
        somebody decodes and ``dsa_cp_mixed`` is ``off``; there are too few tokens (`enough_tokens`); or the profile
        wants one request and more have new tokens.

    Raises:
        ContractError: a wrong type, a value out of range, lists of two lengths, or an independent ``cp_size``.

    Source: SGLang ``can_cp_split``, ``nsa_use_prefill_cp``; `dsacp_ref.layer.uses_context_parallel` for decode.

    >>> options = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="round-robin-split")
    >>> step_split([6, 1], [0, 9], 4, options), step_split([1, 1], [5, 9], 2, options), step_split([3], [0], 4, options)
    ('round_robin', None, None)
    """
    lengths = counts_of("query_lens", query_lens, 0)
    computed = counts_of("num_computed_tokens", num_computed_tokens, None)
    check_computed(lengths, computed)
    check_record("parallel", parallel, ParallelConfig)
    cp_size = check_int("cp_size", cp_size, 1)
    if parallel.cp_size not in (1, cp_size):
        hint = "the size of the group that splits tokens; with enable_dsa_cp that is the TP group"
        raise contract_error("cp_size", f"be the configured {parallel.cp_size}", cp_size, hint)
    decode_query_len = check_int("decode_query_len", decode_query_len, 1)
    # A request is real when it has queries and keys; a padded graph slot has queries only.
    real = [(new, cached) for new, cached in zip(lengths, computed, strict=True) if new and cached > -new]
    decodes = sum(1 for new, cached in real if cached > 0 and new <= decode_query_len)
    prefills = len(real) - decodes
    if not parallel.asks_for_cp or not prefills or (decodes and parallel.dsa_cp_mixed == "off"):
        return None
    if not within_limit(sum(1 for new in lengths if new), parallel):
        return None
    return parallel.prefill_cp_mode if enough_tokens(lengths, cp_size, parallel.prefill_cp_mode) else None


# --- parts ---


def within_limit(num_requests: int, parallel: ParallelConfig) -> bool:
    """Whether a profile allows so many requests in a batch."""
    limit: int | None = parallel.forced_settings().get("max_running_requests")
    return limit is None or num_requests <= limit


def fills_every_slice(num_tokens: int, num_slices: int) -> bool:
    """Whether the last of so many slices of ``ceil(num_tokens / num_slices)`` has a token, and so each before it."""
    return (num_slices - 1) * -(-num_tokens // num_slices) < num_tokens


def counts_of(name: str, values: Sequence[int], minimum: int | None) -> list[int]:
    """The numbers as Python ints; arrays are refused, because on a device each would be waited for."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise contract_error(name, "be a list of ints", type(values).__name__, "one a request; of an array, tolist()")
    return [check_int(f"{name}[{place}]", value, minimum) for place, value in enumerate(values)]


def check_computed(lengths: list[int], computed: list[int]) -> None:
    """Refuse cached counts that are not one a request, and a request with fewer keys than queries."""
    if len(computed) != len(lengths):
        raise contract_error("num_computed_tokens", f"have {len(lengths)} entries, as query_lens", len(computed))
    for place, (new, cached) in enumerate(zip(lengths, computed, strict=True)):
        if cached < 0 and cached != -new:
            rule = f"be >= 0, or {-new} for a padded graph slot"
            raise contract_error(f"num_computed_tokens[{place}]", rule, cached)
