"""Draft (MTP) layers beside a target model: what they are handed, and what a verify step leaves.

::

    target     rows of its step --------------- handed_rows --.
    token ids  shifted_tokens (global) -------- own_rows -----+-> draft step 0 -> last_rows -> draft step 1 -> ...
    lengths    draft_steps: metadata of each step, its own ---'
    verify     1 + k tokens a request by heads -> accepted_counts -> kept_tokens, Caches.roll_back of both

A draft layer is a `DSAttention` whose ``layer_idx`` is at least ``config.num_hidden_layers``, with `Caches` of its own.
The rest of a draft block (norms, the projection of embedding and hidden state, experts, the head) is the caller's.

Token ids are shifted before a step is split, never on a rank: the id that follows a rank's last row is on another rank.
Drafts are causal here; lengths of a block-parallel draft are `dsacp_npu.layer.draft_metadata` with ``causal=False``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dsacp_npu import distributed
from dsacp_npu._geometry import rows_of
from dsacp_npu._ranks import Ranks
from dsacp_npu._tensors import Float, Int32, check_host, check_tensor, dtype_name, first_true, torch
from dsacp_npu.caches import Caches
from dsacp_npu.layer import draft_batches
from dsacp_npu.parallel import Parallel
from dsacp_npu.partition import Partition, check_query_start_loc, check_rows, counted, spread_rows
from dsacp_npu.step import StepMetadata, check_layers, metadata_of_batches
from dsacp_ref.spec import check_int, check_record, contract_error

if TYPE_CHECKING:
    from dsacp_npu.module import DSAttention

__all__ = [
    "accepted_counts",
    "draft_steps",
    "handed_rows",
    "kept_tokens",
    "rows_everywhere",
    "shifted_tokens",
]

TOKEN_IDS = ("int32", "int64")


class Apart(NamedTuple):
    """Ranks that hold different rows of a step, and which."""

    ranks: Ranks
    partition: Partition


# --- before a draft step ---


def draft_steps(
    layers: Sequence[DSAttention],
    caches: Caches,
    new_tokens: Mapping[Any, int],
    num_steps: int,
    *,
    num_input_tokens: int | None = None,
    decode_query_len: int = 1,
) -> tuple[StepMetadata, ...]:
    """The metadata of every draft step, planned before the first one runs; no two steps share a tensor.

    Step 0 takes the target's tokens. Every later step takes one token of each request that has any, and runs by heads.
    Room is made for all of them: run or give up all steps before the next step over these caches is planned. What
    later steps wrote was made without the target's hidden states: roll it back before the next step 0.

    Args:
        layers: the draft layers that run in each of these steps, built alike.
        caches: Caches of these layers alone.
        new_tokens: for each request, in the target's order, an int >= 0: its tokens in step 0.
        num_steps: int >= 1, draft steps; as many tokens are drafted a request.
        num_input_tokens: int or None, rows of hidden states that an engine pads step 0 to.
        decode_query_len: int >= 1, tokens, of step 0 as of the target's step (`dsacp_npu.step.step_metadata`).

    Returns:
        one StepMetadata a step.

    Raises:
        ContractError: layers that were not built alike, a request, a count or a size that does not hold, or no room.
            Nothing was changed then.

    Source: vllm-ascend dsa_cp keeps one buffer per draft step; xLLM pull request 1997.
    """
    check_layers(layers)
    check_record("caches", caches, Caches)
    by_layer = {layer.layer_idx: caches[layer.layer_idx].tensors for layer in layers}
    num_steps = check_int("num_steps", num_steps, 1)
    if not isinstance(new_tokens, Mapping):
        raise contract_error("new_tokens", "be a mapping from requests to counts", type(new_tokens).__name__)
    counts = {request: check_int(f"new_tokens[{request!r}]", count, 0) for request, count in new_tokens.items()}
    later = {request: num_steps - 1 if count else 0 for request, count in counts.items()}
    ahead = caches.batches({request: count + later[request] for request, count in counts.items()})
    first = torch.tensor([0, *counts.values()], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = next(iter(ahead.values())).seq_lens - torch.tensor([*later.values()], dtype=torch.int32)
    return tuple(
        metadata_of_batches(
            layers,
            by_layer,
            {ratio: batch._replace(query_start_loc=offsets, seq_lens=ends) for ratio, batch in ahead.items()},
            num_input_tokens=None if step else num_input_tokens,
            decode_query_len=1 if step else decode_query_len,
            requests=tuple(counts),
            plan=caches.plan,
        )
        for step, (offsets, ends) in enumerate(draft_batches(first, seq_lens, num_steps))
    )


def shifted_tokens(token_ids: torch.Tensor, query_start_loc: Int32, next_tokens: torch.Tensor) -> torch.Tensor:
    """The token ids that a draft's step 0 takes with the target's hidden states: each request's, one to the left.

    Args:
        token_ids: int32 or int64 [num_tokens], the target's, of the whole step before it is split.
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, on the host.
        next_tokens: like token_ids, [num_reqs]: what follows each request's last token, just sampled, or the next one
            of its prompt. Not read for a request without tokens.

    Returns:
        array like token_ids; `dsacp_npu.rows.own_rows` takes a rank's part.

    Raises:
        ContractError: a shape or dtype that does not hold, as of ids that were split already.
        UnsupportedError: offsets on a device.

    Source: NVIDIA-NeMo/Automodel pull request 3543: rolled locally, a rank's last row gets its own first id.

    >>> ids, offsets = torch.tensor([5, 6, 7, 1, 2]), torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> shifted_tokens(ids, offsets, torch.tensor([8, 3])).tolist()
    [6, 7, 8, 2, 3]
    """
    check_offsets(query_start_loc)
    hint = "the ids of the whole step: shift them first, then take own_rows of them"
    check_tensor("token_ids", token_ids, TOKEN_IDS, (int(query_start_loc[-1]),), hint)
    check_tensor("next_tokens", next_tokens, (dtype_name(token_ids),), (len(query_start_loc) - 1,), "one a request")
    has_tokens = (query_start_loc[1:] > query_start_loc[:-1]).nonzero()[:, 0]
    shifted = token_ids.roll(-1)
    ends = query_start_loc[1:][has_tokens] - 1
    shifted[ends.to(shifted.device)] = next_tokens[has_tokens.to(next_tokens.device)]
    return shifted


# --- rows and ranks ---


def rows_everywhere(hidden_states: torch.Tensor, step: StepMetadata, parallel: Parallel, tokens: Int32) -> torch.Tensor:
    """The rows of some tokens, on every rank: what a head needs of a step that prefills and verifies at once.

    For each request's last row alone there is `dsacp_npu.rows.last_rows`.

    Args:
        hidden_states: any dtype [step.num_rows, ...], this rank's rows of the step.
        step: StepMetadata.
        parallel: Parallel of the layers that ran it.
        tokens: int32[count], tokens of the step, the same on every rank, on the host.

    Returns:
        array [count, ...], in the order asked for. Rows travel only where ranks hold different ones, and then only
        these, in one all-to-all.

    Raises:
        ContractError: rows that are not the step's, another group than the step was made for, or no such token.
        UnsupportedError: tokens on a device.

    Source: xLLM cp_input_partition: indices of selected rows belong to the whole step, not to a rank's rows.
    """
    apart = apart_of(step, parallel)
    check_rows("hidden_states", hidden_states, step.num_rows, "this rank's rows of the step")
    check_tokens("tokens", tokens, step.num_tokens)
    if apart is None:
        return hidden_states[tokens.to(hidden_states.device)]
    return distributed.requested_rows(hidden_states, *apart, [tokens] * parallel.cp_size)


def handed_rows(
    hidden_states: Float, source: StepMetadata, target: StepMetadata, parallel: Parallel, *, tokens: Int32 | None = None
) -> Float:
    """The target's hidden rows as a draft's step 0 has them.

    Rows that lie as they should are handed on as they are; else those that are missing travel, in one all-to-all.

    Args:
        hidden_states: float [source.num_rows, ...], this rank's rows.
        source: StepMetadata of the step that made them.
        target: StepMetadata of the step that takes them.
        parallel: Parallel of the layers of both.
        tokens: int32[target.num_tokens], on the host: which token of source each of target is, as from `kept_tokens`;
            None where both have the same.

    Returns:
        float [target.num_rows, ...].

    Raises:
        ContractError: rows that are not those of source, steps whose tokens are not the same ones of the same requests
            at the same positions, or another group than they were made for.
        UnsupportedError: tokens on a device.

    Source: xLLM pull request 1997, aux_hidden_states; verl-project/verl#7297.
    """
    check_record("target", target, StepMetadata)
    apart = apart_of(source, parallel)
    check_rows("hidden_states", hidden_states, source.num_rows, "this rank's rows of source")
    given = counted(source.num_tokens, source.token_indices) if tokens is None else tokens
    check_tokens("tokens", given, source.num_tokens)
    check_same_tokens(source, target, given)
    layouts = layout_of(source, parallel), layout_of(target, parallel)
    if tokens is None and all(torch.equal(*pair) for pair in zip(*layouts, strict=True)):
        return hidden_states
    wanted = [given[rows[rows >= 0]] for rows in layouts[1]]
    mine = target.token_indices
    if apart is None:
        return spread_rows(hidden_states, spread_rows(given, mine).masked_fill(mine < 0, -1))
    found = distributed.requested_rows(hidden_states, *apart, wanted)
    place = ((mine >= 0).cumsum(0) - 1).masked_fill(mine < 0, -1)
    return spread_rows(found, place)


# --- after a verify step ---


def accepted_counts(draft_tokens: torch.Tensor, target_tokens: torch.Tensor) -> torch.Tensor:
    """How many drafts of each request the target would have chosen itself, up to the first that it would not.

    The new tokens of a request are the first ``1 + count`` of ``target_tokens``: the accepted drafts, and one more.

    Args:
        draft_tokens: int32 or int64 [num_reqs, k]; -1 where a request has fewer drafts.
        target_tokens: like it, [num_reqs, 1 + k]: what the target chooses after the token that was sampled last, and
            after each draft.

    Returns:
        int64[num_reqs]. Does not wait for a device.

    Raises:
        ContractError: shapes or dtypes that do not hold.

    >>> drafts, chosen = torch.tensor([[4, 5], [4, 5], [4, -1]]), torch.tensor([[4, 5, 6], [3, 5, 6], [4, 0, 0]])
    >>> accepted_counts(drafts, chosen).tolist()
    [2, 0, 1]
    """
    check_tensor("draft_tokens", draft_tokens, TOKEN_IDS, ("num_reqs", "k"))
    num_reqs, k = draft_tokens.shape
    hint = "one choice more than there are drafts"
    check_tensor("target_tokens", target_tokens, (dtype_name(draft_tokens),), (num_reqs, k + 1), hint)
    same = (draft_tokens == target_tokens[:, :k]) & (draft_tokens >= 0)
    return same.long().cumprod(1).sum(1)


def kept_tokens(query_start_loc: Int32, num_kept: Int32) -> Int32:
    """The tokens of a step that stay: the first of each request. A draft's next step 0 takes these.

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets of the step, on the host.
        num_kept: int32[num_reqs], tokens, on the host: 1 and the accepted drafts of a request that verifies, all of one
            that prefills.

    Returns:
        int32[sum of num_kept], flat tokens of the step.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        UnsupportedError: lengths on a device.

    >>> kept_tokens(torch.tensor([0, 3, 3, 6], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)).tolist()
    [0, 1, 3]
    """
    check_offsets(query_start_loc)
    check_tensor("num_kept", num_kept, ("int32",), (len(query_start_loc) - 1,), "one count a request")
    check_host("num_kept", num_kept)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    wrong = (num_kept < 0) | (num_kept > query_lens)
    if wrong.any():
        request = first_true(wrong)
        rule = f"be in [0, {int(query_lens[request])}] for request {request}, which has so many tokens in the step"
        raise contract_error("num_kept", rule, int(num_kept[request]))
    within = counted(int(query_start_loc[-1]), num_kept) - query_start_loc[:-1].repeat_interleave(query_lens)
    return (within < num_kept.repeat_interleave(query_lens)).nonzero()[:, 0].int()


# --- parts ---


def apart_of(step: StepMetadata, parallel: Parallel) -> Apart | None:
    """Who holds which rows of the step; None where every rank has all."""
    check_record("step", step, StepMetadata)
    check_record("parallel", parallel, Parallel)
    if step.partition is None:
        return None
    due = len(step.partition.token_indices)
    if parallel.cp is None or parallel.cp_size != due:
        hint = "hand in the Parallel of the layers"
        raise contract_error("parallel", f"have the {due} ranks that the step is split over", parallel.cp_size, hint)
    return Apart(parallel.cp, step.partition) if parallel.options.dsa_cp_rows == "scattered" else None


def layout_of(step: StepMetadata, parallel: Parallel) -> Sequence[Int32]:
    """The token in each row of every rank, -1 in pad rows: alike on all ranks, so that all of them agree what to do."""
    apart = apart_of(step, parallel)
    return [step.token_indices] * parallel.cp_size if apart is None else apart.partition.token_indices


def places_of(step: StepMetadata) -> dict[str, Int32]:
    """Request and position of every token of the step."""
    batch = next(iter(step.batches.values()))
    rows = rows_of(counted(step.num_tokens, batch.seq_lens), batch)
    return {"request": rows.requests, "position": rows.positions}


def check_offsets(query_start_loc: Int32) -> None:
    """Refuse offsets that are none, and those that would have to be fetched from a device."""
    check_query_start_loc(query_start_loc)
    check_host("query_start_loc", query_start_loc)


def check_tokens(name: str, tokens: Int32, num_tokens: int) -> None:
    """Refuse what names no tokens of the step."""
    check_tensor(name, tokens, ("int32",), ("count",), "flat tokens of the whole step")
    check_host(name, tokens)
    wrong = (tokens < 0) | (tokens >= num_tokens)
    if wrong.any():
        raise contract_error(name, f"name tokens in [0, {num_tokens})", int(tokens[first_true(wrong)]))


def check_same_tokens(source: StepMetadata, target: StepMetadata, tokens: Int32) -> None:
    """Refuse hidden rows that would be handed to other tokens than those they were made of."""
    if source.requests != target.requests:
        got, hint = f"{list(target.requests)} after {list(source.requests)}", "plan both from one mapping's order"
        raise contract_error("target", "have the requests of source in their order", got, hint)
    if len(tokens) != target.num_tokens:
        hint = "name a token of source for each of target, see kept_tokens"
        raise contract_error("target", f"have {len(tokens)} tokens, as handed on", target.num_tokens, hint)
    made_of, taken_by = places_of(source), places_of(target)
    for what, places in made_of.items():
        different = places[tokens] != taken_by[what]
        if different.any():
            token = first_true(different)
            rule = f"have {what} {int(places[tokens[token]])} for token {token}, as in source"
            hint = "roll the draft's caches back to where the target's step began; tokens are in the target's order"
            raise contract_error("target", rule, int(taken_by[what][token]), hint)
