"""Whether a step is split: the scheduler's gate, the least number of tokens, and the fall-back to an unsplit step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.config import SPLITS, ParallelConfig, split_rule, topology
from dsacp_ref.layer import uses_context_parallel
from dsacp_ref.partition import partition_tokens, rank_pieces
from dsacp_ref.prefill import enough_tokens, may_add_request, step_split
from dsacp_ref.spec import ContractError
from tests.strategies import Batch, batches, splits

ZIGZAGS = ("zigzag", "zigzag_ceil", "zigzag_padded")
# Pages of one token, of a few, and so long that few requests have two.
SPLIT_TEXTS = [*SPLITS[:-1], "round_robin_page(1)", "round_robin_page(3)", "round_robin_page(8)"]
each_split = pytest.mark.parametrize("split", SPLIT_TEXTS)

IN_SEQ_SPLIT = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="in-seq-split", dsa_cp_profile="in_seq_split")
ZIGZAG = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="in-seq-split")
ROUND_ROBIN = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="round-robin-split")


def offsets(query_lens: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)


def every_rank_has_a_token(query_lens: list[int], cp_size: int, split: str) -> bool:
    """As the partition itself says; a pad row is no token."""
    rows = partition_tokens(offsets(query_lens), cp_size, split=split).token_indices
    return all(bool((tokens >= 0).any()) for tokens in rows)


def some_request_fills_every_block(query_lens: list[int], cp_size: int) -> bool:
    """Whether no rank has an empty block of some request, under `zigzag`."""
    ranks = [rank_pieces(offsets(query_lens), cp_size, rank, split="zigzag") for rank in range(cp_size)]
    filled = [pieces.piece_ends > pieces.piece_starts for pieces in ranks]
    return any(
        all(bool(has[pieces.request_indices == request].all()) for pieces, has in zip(ranks, filled, strict=True))
        for request in range(len(query_lens))
    )


def check_gate(query_lens: list[int], cp_size: int, split: str) -> None:
    """The law of `enough_tokens`, and that it refuses no more than its rule says."""
    got = enough_tokens(query_lens, cp_size, split)
    assert not got or every_rank_has_a_token(query_lens, cp_size, split), "a rank would be without rows"
    if cp_size == 1:
        assert got is False
    elif split in ZIGZAGS:
        assert got is some_request_fills_every_block(query_lens, cp_size)
    else:
        assert got is every_rank_has_a_token(query_lens, cp_size, split)


# --- enough tokens ---


@each_split
def test_no_rank_is_without_rows_for_any_one_request(split: str) -> None:
    """By trying: every length up to where the last length that does not do lies, on every small group."""
    for cp_size in range(1, 9):
        for query_len in range(70):
            check_gate([query_len], cp_size, split)


@each_split
def test_no_rank_is_without_rows_for_two_requests(split: str) -> None:
    for cp_size in (2, 3, 4):
        for first in range(11):
            for second in range(first, 11):
                check_gate([first, second], cp_size, split)


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 9), splits())
def test_no_rank_is_without_rows(query_lens: list[int], cp_size: int, split: str) -> None:
    check_gate(query_lens, cp_size, split)


@pytest.mark.parametrize(
    ("query_lens", "cp_size", "split", "enough"),
    [
        # Flat slices of ceil(n/R): as many tokens as ranks do, one more does not, and it goes on so for a while.
        ([4], 4, "contiguous", True),
        ([5], 4, "contiguous", False),
        ([9], 4, "contiguous", False),
        ([10], 4, "contiguous", True),
        ([2, 2], 4, "contiguous", True),
        ([2, 2], 4, "contiguous_request", False),
        ([9, 5, 4], 4, "contiguous_request", True),
        ([9, 5], 4, "contiguous_request", False),
        # One token a rank, of any requests.
        ([1, 0, 1, 1], 4, "round_robin", False),
        ([1, 1, 1, 1], 4, "round_robin", True),
        # Pages of one request; the last may be short.
        ([12], 4, "round_robin_page(4)", False),
        ([13], 4, "round_robin_page(4)", True),
        ([8, 8], 4, "round_robin_page(4)", False),
        # 2R blocks of one request.
        ([7], 4, "zigzag", False),
        ([8], 4, "zigzag", True),
        ([7, 7], 4, "zigzag", False),
        ([0, 7, 8], 4, "zigzag", True),
        ([9], 4, "zigzag_ceil", True),  # blocks 2, 2, 2, 2, 1, 0, 0, 0: three are empty, and no rank is
        ([9], 4, "zigzag_padded", True),
        ([7], 4, "zigzag_padded", False),
        # Nobody, or nobody to share with.
        ([], 2, "round_robin", False),
        ([0, 0], 2, "contiguous", False),
        ([0], 2, "contiguous_request", False),
        ([1000], 1, "round_robin", False),
        ([1000], 1, "zigzag", False),
        # Other words for the same rules.
        ([8], 4, "in-seq-split", True),
        ([7], 4, "in-seq-split", False),
        ([3], 4, "round-robin-split", False),
    ],
)
def test_enough_tokens_table(query_lens: list[int], cp_size: int, split: str, enough: bool) -> None:
    assert enough_tokens(query_lens, cp_size, split) is enough
    assert enough_tokens(tuple(query_lens), cp_size, split) is enough


@given(st.integers(0, 200), st.integers(1, 16))
def test_gates_of_sglang(tokens: int, cp_size: int) -> None:
    """in-seq-split: ``seq // (2 * cp) != 0`` and cp > 1; round-robin-split: tokens >= cp."""
    assert enough_tokens([tokens], cp_size, "in-seq-split") is (tokens // (2 * cp_size) != 0 and cp_size > 1)
    assert enough_tokens([tokens], cp_size, "round-robin-split") is (tokens >= cp_size > 1)


@given(st.lists(st.integers(0, 60), max_size=4), st.integers(2, 9), splits())
def test_more_requests_never_take_the_gate_away(query_lens: list[int], cp_size: int, split: str) -> None:
    """Except where slices are cut from the whole stream."""
    if split != "contiguous" and enough_tokens(query_lens, cp_size, split):
        assert enough_tokens([3, *query_lens, 1], cp_size, split)


# --- the scheduler's gate ---


@pytest.mark.parametrize("num_requests", range(5))
def test_in_seq_split_admits_one_request(num_requests: int) -> None:
    """The first rule: a second request is refused once the list of those that can run has one."""
    assert may_add_request(num_requests, IN_SEQ_SPLIT) is not (num_requests >= 1)


@pytest.mark.parametrize("num_requests", [0, 1, 2, 31, 4096])
def test_round_robin_split_admits_many(num_requests: int) -> None:
    """The rule since: only in-seq-split stops at one."""
    assert may_add_request(num_requests, ROUND_ROBIN)


@each_split
def test_without_the_profile_every_split_admits_many(split: str) -> None:
    """Zigzag as well: of many requests it is as well defined as of one."""
    parallel = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode=split)
    assert [may_add_request(n, parallel) for n in (0, 1, 2, 100)] == [True] * 4


@pytest.mark.parametrize("switch", [{"enable_dsa_cp": True}, {"cp_size": 2}, {}])
def test_the_profile_counts_where_context_parallelism_is_on(switch: dict[str, Any]) -> None:
    parallel = ParallelConfig(prefill_cp_mode="zigzag", dsa_cp_profile="in_seq_split", **switch)
    assert may_add_request(0, parallel)
    assert may_add_request(1, parallel) is (not switch)


@given(st.integers(0, 5), st.sampled_from([IN_SEQ_SPLIT, ZIGZAG, ROUND_ROBIN, ParallelConfig()]))
def test_a_batch_of_the_scheduler_is_not_turned_down_for_its_requests(more: int, parallel: ParallelConfig) -> None:
    """What one gate lets in, the other splits."""
    batch = [16]
    while len(batch) <= more and may_add_request(len(batch), parallel):
        batch.append(16)
    split = step_split(batch, [0] * len(batch), 4, parallel)
    assert (split is not None) is parallel.asks_for_cp
    assert len(batch) == (1 if parallel is IN_SEQ_SPLIT else more + 1)


# --- the fall-back ---


@given(
    batches(),
    st.integers(1, 6),
    splits(),
    st.sampled_from(["cp", "off"]),
    st.integers(1, 5),
    st.sampled_from(["on", "size", "no"]),
)
def test_a_step_splits_where_the_layer_would_and_every_rank_has_rows(
    batch: Batch, cp_size: int, split: str, mixed: str, decode_query_len: int, switch: str
) -> None:
    options = {"enable_dsa_cp": switch == "on", "cp_size": cp_size if switch == "size" else 1}
    parallel = ParallelConfig(prefill_cp_mode=split, dsa_cp_mixed=mixed, **options)
    computed = [total - new for new, total in zip(batch.query_lens, batch.seq_lens, strict=True)]
    got = step_split(batch.query_lens, computed, cp_size, parallel, decode_query_len=decode_query_len)
    by_layer = uses_context_parallel(
        batch.query_start_loc, batch.key_lens, mixed=mixed, decode_query_len=decode_query_len
    )
    if switch != "no" and enough_tokens(batch.query_lens, cp_size, split):
        assert got == (split if by_layer else None)
    else:
        assert got is None
    if got is not None:
        assert every_rank_has_a_token(batch.query_lens, cp_size, got)


@given(batches(), st.integers(1, 4), st.sampled_from(["cp", "off"]), st.integers(1, 5))
def test_the_profile_splits_a_step_of_one_request_alone(
    batch: Batch, cp_size: int, mixed: str, decode_query_len: int
) -> None:
    own = {"enable_dsa_cp": True, "prefill_cp_mode": "zigzag", "dsa_cp_mixed": mixed}
    computed = [total - new for new, total in zip(batch.query_lens, batch.seq_lens, strict=True)]
    with_profile, without = (
        step_split(
            batch.query_lens, computed, cp_size, ParallelConfig(**own, **more), decode_query_len=decode_query_len
        )
        for more in ({"dsa_cp_profile": "in_seq_split"}, {})
    )
    assert with_profile == (without if sum(new > 0 for new in batch.query_lens) <= 1 else None)


@pytest.mark.parametrize(
    ("query_lens", "computed", "cp_size", "parallel", "expected"),
    [
        ([8], [0], 4, ZIGZAG, "zigzag"),
        ([8], [100], 4, ZIGZAG, "zigzag"),  # a later chunk, or behind a cached prefix
        ([7], [0], 4, ZIGZAG, None),  # a block would be empty
        ([8], [0], 1, ZIGZAG, None),  # the switch is on, the group has one rank
        ([8, 8], [0, 0], 4, ZIGZAG, "zigzag"),
        ([8, 8], [0, 0], 4, IN_SEQ_SPLIT, None),
        ([8], [0], 4, IN_SEQ_SPLIT, "zigzag"),
        ([8, 0], [0, 5], 4, IN_SEQ_SPLIT, "zigzag"),  # a request without new tokens is not in the step
        ([8, 1], [0, 9], 4, IN_SEQ_SPLIT, None),
        ([8, 2], [0, -2], 4, IN_SEQ_SPLIT, None),  # the rows of a padded slot are rows of a second request
        ([2, 2], [0, 0], 4, ROUND_ROBIN, "round_robin"),
        ([2, 1], [0, 0], 4, ROUND_ROBIN, None),
        ([2, 2], [0, -2], 4, ROUND_ROBIN, "round_robin"),  # a padded slot's rows count
        ([4], [-4], 4, ROUND_ROBIN, None),  # but it is nobody
        ([1] * 8, [9] * 8, 4, ROUND_ROBIN, None),  # decode only
        ([1] * 8, [0] * 8, 4, ROUND_ROBIN, "round_robin"),  # prompts of one token
        ([6, 1], [0, 9], 4, ROUND_ROBIN, "round_robin"),  # mixed
        ([6, 1], [0, 9], 4, ParallelConfig(enable_dsa_cp=True, dsa_cp_mixed="off"), None),
        ([6, 0], [0, 9], 4, ParallelConfig(enable_dsa_cp=True, dsa_cp_mixed="off"), None),  # contiguous: 2, 2, 2, 0
        ([8, 0], [0, 9], 4, ParallelConfig(enable_dsa_cp=True, dsa_cp_mixed="off"), "contiguous"),
        ([8], [0], 4, ParallelConfig(), None),  # off
        ([8], [0], 4, ParallelConfig(cp_size=4), "contiguous"),  # an independent group
        ([8], [0], 4, ParallelConfig(enable_dsa_cp=True, cp_size=4), "contiguous"),
        ([], [], 4, ROUND_ROBIN, None),
        ([0, 0], [3, 0], 4, ROUND_ROBIN, None),
    ],
)
def test_step_split_table(
    query_lens: list[int], computed: list[int], cp_size: int, parallel: ParallelConfig, expected: str | None
) -> None:
    before = list(query_lens), list(computed)
    assert step_split(query_lens, computed, cp_size, parallel) == expected
    assert (query_lens, computed) == before
    if expected is not None:
        assert str(split_rule(expected)) == expected


def test_verify_steps_decode_up_to_their_length() -> None:
    for decode_query_len, expected in ((1, "round_robin"), (3, "round_robin"), (4, None), (9, None)):
        assert step_split([4, 4], [9, 30], 4, ROUND_ROBIN, decode_query_len=decode_query_len) == expected


def test_the_launch_line_of_round_robin_split() -> None:
    """8 ranks, round-robin-split, up to 32 running requests: nothing stops them, and 32 short prompts split."""
    words = "--tp 8 --enable-dsa-cp --prefill-cp-mode round-robin-split --max-running-requests 32".split()
    parallel, rest = ParallelConfig.from_flags(words)
    assert rest == "--tp 8 --max-running-requests 32".split()
    parallel.check_settings({"tp_size": 8, "max_running_requests": 32, "kv_cache_dtype": "fp8_e4m3"})
    assert all(may_add_request(n, parallel) for n in range(32))
    cp_size = topology(8, rank=0, enable_dsa_cp=parallel.enable_dsa_cp).cp_size
    assert step_split([3] * 32, [0] * 32, cp_size, parallel) == "round_robin"


# --- bad input ---

STEP: dict[str, Any] = {"query_lens": [8], "num_computed_tokens": [0], "cp_size": 4, "parallel": ZIGZAG}
TOKENS: dict[str, Any] = {"query_lens": [8], "cp_size": 4, "split": "zigzag"}
ADD: dict[str, Any] = {"num_requests": 0, "parallel": ZIGZAG}


@pytest.mark.parametrize(
    ("function", "legal", "change", "text"),
    [
        (may_add_request, ADD, {"num_requests": -1}, "num_requests must be an int >= 0, got -1"),
        (may_add_request, ADD, {"num_requests": 1.0}, "num_requests must be an int >= 0, got float 1.0"),
        (may_add_request, ADD, {"parallel": {}}, "parallel must be of type ParallelConfig, got dict"),
        (enough_tokens, TOKENS, {"query_lens": [8, -1]}, "query_lens[1] must be an int >= 0, got -1"),
        (enough_tokens, TOKENS, {"query_lens": [True]}, "query_lens[0] must be an int >= 0, got bool True"),
        (
            enough_tokens,
            TOKENS,
            {"query_lens": np.array([8])},
            "query_lens must be a list of ints, got ndarray; one a request; of an array, tolist()",
        ),
        (enough_tokens, TOKENS, {"query_lens": "88"}, "query_lens must be a list of ints, got str"),
        (enough_tokens, TOKENS, {"query_lens": 8}, "query_lens must be a list of ints, got int"),
        (enough_tokens, TOKENS, {"cp_size": 0}, "cp_size must be an int >= 1, got 0"),
        (enough_tokens, TOKENS, {"split": "head-tail"}, "split must be one of 'contiguous'"),
        (enough_tokens, TOKENS, {"cp_size": 1, "split": None}, "split must be a str, got NoneType None"),
        (enough_tokens, TOKENS, {"split": "round_robin_page"}, "split must carry a page size"),
        (step_split, STEP, {"query_lens": [-8]}, "query_lens[0] must be an int >= 0, got -8"),
        (step_split, STEP, {"query_lens": None}, "query_lens must be a list of ints, got NoneType"),
        (step_split, STEP, {"num_computed_tokens": ["0"]}, "num_computed_tokens[0] must be an int, got str '0'"),
        (
            step_split,
            STEP,
            {"num_computed_tokens": []},
            "num_computed_tokens must have 1 entries, as query_lens, got 0",
        ),
        (
            step_split,
            STEP,
            {"num_computed_tokens": [-7]},
            "num_computed_tokens[0] must be >= 0, or -8 for a padded graph slot, got -7",
        ),
        (step_split, STEP, {"num_computed_tokens": [-9]}, "num_computed_tokens[0] must be >= 0, or -8"),
        (step_split, STEP, {"cp_size": 0}, "cp_size must be an int >= 1, got 0"),
        (step_split, STEP, {"decode_query_len": 0}, "decode_query_len must be an int >= 1, got 0"),
        (step_split, STEP, {"parallel": "zigzag"}, "parallel must be of type ParallelConfig, got str"),
        # Tokens cut by one size and gathered over another group.
        (
            step_split,
            STEP,
            {"parallel": ParallelConfig(cp_size=2)},
            "cp_size must be the configured 2, got 4; the size of the group that splits tokens; "
            "with enable_dsa_cp that is the TP group",
        ),
        (
            step_split,
            STEP,
            {"cp_size": 1, "parallel": ParallelConfig(enable_dsa_cp=True, cp_size=2)},
            "cp_size must be the configured 2, got 1",
        ),
    ],
)
def test_bad_input(function: Callable[..., Any], legal: dict[str, Any], change: dict[str, Any], text: str) -> None:
    function(**legal)
    with pytest.raises(ContractError, match=f"^{re.escape(text)}"):
        function(**legal | change)


def test_bad_input_is_refused_where_the_answer_would_not_need_it() -> None:
    """Off, or one rank: a setting does not start to fail when it is turned on."""
    for change in ({"decode_query_len": 0}, {"num_computed_tokens": [0, 0]}, {"query_lens": [-1]}):
        with pytest.raises(ContractError):
            step_split(**STEP | {"parallel": ParallelConfig()} | change)
