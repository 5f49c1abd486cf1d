"""The indexers over tokens: their choice against a loop over numbers, and every edge of theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsacp_npu.emulator import POISON, OperatorError, OutOfRangeError
from tests.compare import assert_same
from tests.emulator.common import indexer_case, int32, ops, positions_of, select, select_tokens, token_case
from tests.oracles.indexer import score
from tests.oracles.indexer import select as oracle_select

CASE = token_case([2, 3], [40, 90])
NAMESPACES = ("_C_ascend", "npu")


def whole(case: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """The call with small integers for numbers: every sum is exact, in any order, and many scores are equal."""
    generator = torch.Generator().manual_seed(seed)

    def small(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randint(-2, 3, tensor.shape, generator=generator).to(tensor.dtype)

    return {**case, **{name: small(case[name]) for name in ("query", "key", "weights")}}


def expected(case: dict[str, Any], queries: list[int], keys: list[int], *, causal: bool = True) -> list[list[int]]:
    """What each query row must choose, from scores made one number at a time."""
    requests = [request for request, count in enumerate(queries) for _ in range(count)]
    block_size, chosen = case["key"].shape[1], []
    for row, (request, position) in enumerate(zip(requests, positions_of(queries, keys), strict=True)):
        scores = []
        for token in range(max(position + 1, 0) if causal else keys[request]):
            block = int(case["block_table"][request, token // block_size])
            key = case["key"][block, token % block_size, 0].tolist()
            scores.append(score(case["query"][row].tolist(), case["weights"][row].tolist(), key))
        chosen.append(oracle_select(scores, len(scores), case["sparse_count"]))
    return chosen


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("topk", "block_size"), [(64, 16), (5, 32)])
def test_the_choice(namespace: str, dtype: torch.dtype, topk: int, block_size: int) -> None:
    queries, keys = [2, 1, 3], [14, 33, 3]
    case = whole(token_case(queries, keys, topk=topk, block_size=block_size, dtype=dtype))
    assert select_tokens(case, namespace).tolist() == expected(case, queries, keys)


def test_mode_0_sees_all_tokens() -> None:
    case = whole(token_case([3], [20]))
    out = select_tokens(case, sparse_mode=0)
    assert out.tolist() == expected(case, [3], [20], causal=False)
    assert [int((row >= 0).sum()) for row in select_tokens(case)] == [18, 19, 20]


def test_scores_keep_their_sign() -> None:
    """The relu is over dots; a negative weight makes a negative score, which is still chosen from."""
    case = token_case([1], [3], topk=3)
    case["query"][:], case["weights"][:] = 1, -1
    for token, size in enumerate((1.0, -1.0, 2.0)):
        case["key"][int(case["block_table"][0, 0]), token] = size
    assert select_tokens(case).tolist() == [[1, 0, 2]]


def test_rows_that_see_nothing_are_all_minus_one() -> None:
    """Without keys, and before position 0."""
    out = select_tokens(token_case([2, 3], [0, 2]))
    assert (out[:3] == -1).all()
    assert [int((row >= 0).sum()) for row in out] == [0, 0, 0, 1, 2]


def test_requests_without_queries_and_padding_rows() -> None:
    """Skipped requests are not looked up; padding rows are not written."""
    case = token_case([2, 3], [40, 90], padding=2)
    table = torch.cat([case["block_table"][:1], torch.full_like(case["block_table"][:1], -9), case["block_table"][1:]])
    more = {"actual_seq_lengths_query": int32(2, 2, 5), "actual_seq_lengths_key": int32(40, 7777, 90)}
    out = select_tokens(case, **more, block_table=table)
    assert_same(out[:5], select_tokens(case)[:5])
    assert (out[5:] == POISON).all()


def test_a_nan_score_leaves_the_row_undefined() -> None:
    case = token_case([2], [40])
    case["query"][0] = torch.nan
    out = select_tokens(case)
    assert (out[0, :39] == POISON).all()
    assert sorted(out[1, :40].tolist()) == list(range(40))


def test_padded_queries() -> None:
    case = token_case([2, 2], [40, 90])
    padded = {**case, "layout_query": "BSND", "actual_seq_lengths_query": None}
    for name in ("query", "weights"):
        padded[name] = case[name].reshape(2, 2, *case[name].shape[1:])
    want = select_tokens(case)
    assert_same(select_tokens(padded), want)
    assert_same(select_tokens(padded, actual_seq_lengths_query=int32(2, 2)), want)
    with pytest.raises(OperatorError, match=r"must all be 2, got \[2, 1\]; use TND"):
        select_tokens(padded, actual_seq_lengths_query=int32(2, 1))


def test_the_coded_form_chooses_as_the_int8_operator_does() -> None:
    case = indexer_case([2, 3], [40, 90], ratio=1, topk=64)
    want = select(case)
    coded = {name: value for name, value in case.items() if name != "cmp_ratio"}
    function = ops().npu_lightning_indexer_quant
    assert_same(function(**coded).flatten(0, 1), want)
    for pattern, change in (
        (r"npu_lightning_indexer_quant: actual_seq_lengths_query must have shape \[2\], got \[3\]", int32(0, 2, 5)),
        ("npu_lightning_indexer_quant: actual_seq_lengths_query must be given", None),
    ):
        with pytest.raises(OperatorError, match=pattern):
            function(**{**coded, "actual_seq_lengths_query": change})
    with pytest.raises(OperatorError, match="query_quant_mode must be one of 0, got 1"):
        function(**coded, query_quant_mode=1)
    with pytest.raises(OperatorError, match=r"query must have dtype torch\.int8"):
        function(**{**coded, "query": coded["query"].half()})
    with pytest.raises(OperatorError, match="actual_seq_lengths_key must be given"):
        function(**{**coded, "actual_seq_lengths_key": None})


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("layout_key must be one of PA_BSND, got TND", {"layout_key": "TND"}),
        ("layout_query must be one of TND, BSND", {"layout_query": "PA_BSND"}),
        ("sparse_count must be in 1..2048, got 3072", {"sparse_count": 3072}),
        ("sparse_count must be in 1..2048, got 0", {"sparse_count": 0}),
        ("sparse_mode must be one of 0, 3, got 4", {"sparse_mode": 4}),
        ("pre_tokens", {"pre_tokens": 128}),
        ("next_tokens", {"next_tokens": 0}),
        ("return_value must be one of False", {"return_value": True}),
        ("block_table must be given", {"block_table": None}),
        ("actual_seq_lengths_key must be given", {"actual_seq_lengths_key": None}),
        ("actual_seq_lengths_query must be given", {"actual_seq_lengths_query": None}),
        (r"actual_seq_lengths_query must have shape \[2\]", {"actual_seq_lengths_query": int32(5)}),
        ("must never fall", {"actual_seq_lengths_query": int32(4, 2)}),
        (
            r"actual_seq_lengths_query must name at least one request, got \[0\]; skip the call",
            {"actual_seq_lengths_query": int32(), "actual_seq_lengths_key": int32(), "block_table": int32()[:, None]},
        ),
    ],
)
def test_a_bad_argument_is_refused(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(OperatorError, match=pattern):
        select_tokens(CASE, **changes)


BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize(
    ("pattern", "name", "shape", "dtype"),
    [
        (r"query must have shape \[5, 64, 128\]", "query", (5, 32, 128), BFLOAT16),
        (r"query must have shape \[5, 64, 128\]", "query", (5, 64, 64), BFLOAT16),
        ("query must have dtype torch.bfloat16 or torch.float16", "query", (5, 64, 128), torch.float32),
        (r"query must have no empty axis, got \[0, 64, 128\]; skip the call", "query", (0, 64, 128), BFLOAT16),
        (r"key must have no empty axis, got \[0, 16, 1, 128\]; skip the call", "key", (0, 16, 1, 128), BFLOAT16),
        ("key must have dtype torch.bfloat16", "key", (12, 16, 1, 128), torch.float16),
        ("key must have shape", "key", (12, 16, 128), BFLOAT16),
        ("key block size must be a multiple of 16", "key", (12, 8, 1, 128), BFLOAT16),
        ("key block size must be a multiple of 16", "key", (1, 1040, 1, 128), BFLOAT16),
        ("weights must have dtype torch.bfloat16", "weights", (5, 64), torch.float32),
        ("weights must have shape", "weights", (5, 64, 1), BFLOAT16),
        (r"block_table must have shape \[2, columns\]", "block_table", (3, 9), torch.int32),
    ],
)
def test_a_bad_shape_or_dtype_is_refused(pattern: str, name: str, shape: Any, dtype: torch.dtype) -> None:
    empty = {"weights": CASE["weights"][:0]} if shape[0] == 0 and name == "query" else {}
    with pytest.raises(OperatorError, match=pattern):
        select_tokens(CASE, **{**empty, name: torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize("name", ["query", "key", "weights"])
def test_gaps_are_refused(name: str) -> None:
    apart = torch.stack([CASE[name], CASE[name]], dim=1)[:, 0]
    with pytest.raises(OperatorError, match=f"{name} must be contiguous"):
        select_tokens(CASE, **{name: apart})


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("query, request 1, position 5: actual_seq_lengths_query ends at 6", {"actual_seq_lengths_query": int32(2, 6)}),
        ("actual_seq_lengths_key, request 0, position -4", {"actual_seq_lengths_key": int32(-4, 90)}),
        (
            "key, request 0, position 0: block_table names block 999, and",
            {"block_table": torch.full((2, 7), 999).int()},
        ),
        ("key, request 0, position 0: block_table names block -1, and", {"block_table": torch.full((2, 7), -1).int()}),
    ],
)
def test_out_of_range(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(OutOfRangeError, match=pattern):
        select_tokens(CASE, **changes)


# The mistakes of callers. One request of 145 tokens on two ranks: rank 0 has rows 0..72.
SPLIT, TOTAL = 73, 145


def test_lengths_with_the_leading_zero() -> None:
    with pytest.raises(OperatorError, match=r"must have shape \[2\], got \[3\]; prefix sums without the leading 0"):
        select_tokens(CASE, actual_seq_lengths_query=int32(0, 2, 5))
    out = select_tokens(CASE, actual_seq_lengths_query=int32(0, 2))  # the last offset dropped in its place
    assert (out[2:] == POISON).all()


def test_a_table_that_is_too_short() -> None:
    with pytest.raises(OutOfRangeError, match="key, request 1, position 64: needs column 4 of block_table") as refusal:
        select_tokens(CASE, block_table=CASE["block_table"][:, :4].contiguous())
    assert (refusal.value.tensor, refusal.value.request, refusal.value.position) == ("key", 1, 64)


def test_the_lengths_of_the_whole_request_on_a_rank() -> None:
    """Queries are right-aligned to the keys: row 0 of rank 0 is taken for position 72."""
    case = token_case([TOTAL], [TOTAL], topk=128)
    local = {**case, "query": case["query"][:SPLIT], "weights": case["weights"][:SPLIT]}
    right = {**local, "actual_seq_lengths_query": int32(SPLIT), "actual_seq_lengths_key": int32(SPLIT)}
    assert_same(select_tokens(right), select_tokens(case)[:SPLIT])
    with pytest.raises(OutOfRangeError, match="query, request 0, position 144"):
        select_tokens(local)
    out = select_tokens({**right, "actual_seq_lengths_key": int32(TOTAL)})
    assert int((out[0] >= 0).sum()) == TOTAL - SPLIT + 1
    assert int((select_tokens(right)[0] >= 0).sum()) == 1
