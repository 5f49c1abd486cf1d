"""The int8 indexers: their choice against a loop over numbers, and every edge of theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsacp_npu.emulator import POISON, OperatorError, OutOfRangeError, StaleMetadataError
from tests.compare import assert_same
from tests.emulator.common import indexer_case, indexer_metadata, int32, ops, positions_of, select
from tests.oracles.indexer import select as oracle_select
from tests.oracles.quant import int8_score

CASE = indexer_case([2, 3], [40, 300])


def expected(case: dict[str, Any], queries: list[int], keys: list[int]) -> list[list[int]]:
    """What each query row must choose, from scores made one number at a time."""
    requests = [request for request, count in enumerate(queries) for _ in range(count)]
    ratio, k = case["cmp_ratio"], case["sparse_count"]
    chosen = []
    for row, (request, position) in enumerate(zip(requests, positions_of(queries, keys), strict=True)):
        scores = []
        for entry in range(max((position + 1) // ratio, 0)):
            block, place = int(case["block_table"][request, entry // 16]), entry % 16
            scores.append(
                int8_score(
                    case["query"][row].tolist(),
                    case["query_dequant_scale"][row].numpy(),
                    case["key"][block, place, 0].tolist(),
                    case["key_dequant_scale"][block, place, 0].numpy(),
                    case["weights"][row].numpy(),
                )
            )
        chosen.append(oracle_select(scores, len(scores), k))
    return chosen


@pytest.mark.parametrize(("ratio", "topk"), [(4, 512), (4, 6), (1, 8), (128, 4), (2, 3)])
def test_the_choice(ratio: int, topk: int) -> None:
    """Every rounding of the operator decides here: the order must be the same, not just the set."""
    case = indexer_case([2, 1, 3], [14, 65, 2], ratio=ratio, topk=topk)
    assert select(case).tolist() == expected(case, [2, 1, 3], [14, 65, 2])


def test_lengths_with_the_leading_zero_are_detected() -> None:
    with_zero = int32(0, 2, 5)
    want = select(CASE)
    assert_same(select(CASE, actual_seq_lengths_query=with_zero), want)
    assert_same(select(CASE, actual_seq_lengths_query=with_zero, metadata=indexer_metadata(CASE)), want)


def test_mode_0_sees_all_entries() -> None:
    case = indexer_case([3], [40], topk=16)
    out = select(case, sparse_mode=0)
    assert all(sorted(row[row >= 0].tolist()) == list(range(10)) for row in out)
    assert [int((row >= 0).sum()) for row in select(case)] == [9, 9, 10]


def test_ties_go_to_the_lower_entry() -> None:
    case = indexer_case([1], [48], topk=5)
    case["key"][:] = case["key"][1, 0]
    case["key_dequant_scale"][:] = 0.5
    assert select(case)[0].tolist() == [0, 1, 2, 3, 4]


def test_similarities_are_rounded_to_float16() -> None:
    """Two keys whose dots over 1024, 1100.1 and 1100.3, are one number in float16: a tie."""
    case = indexer_case([1], [8])
    case["query"][:], case["weights"][:], case["key_dequant_scale"][:] = 127, 1, 0.5
    first, second = case["key"][int(case["block_table"][0, 0]), :2, 0]
    first[:], second[:] = 69, 69
    first[:38], second[:40] = 70, 70
    assert select(case)[0, :2].tolist() == [0, 1]
    second[:] = 70
    assert select(case)[0, :2].tolist() == [1, 0]


def test_rows_that_see_nothing_are_all_minus_one() -> None:
    out = select(indexer_case([2, 2, 1], [2, 0, 1]))
    assert (out == -1).all()


def test_requests_without_queries_and_padding_rows() -> None:
    """Skipped requests are not looked up; padding rows are not written."""
    case = indexer_case([2, 3], [40, 300], padding=2)
    table = torch.cat([case["block_table"][:1], torch.full_like(case["block_table"][:1], -9), case["block_table"][1:]])
    more = {"actual_seq_lengths_query": int32(2, 2, 5), "actual_seq_lengths_key": int32(40, 7777, 300)}
    out = select(case, **more, block_table=table)
    assert_same(out[:5], select(case)[:5])
    assert (out[5:] == POISON).all()


def test_nan_scores_leave_the_order_undefined() -> None:
    """A weight that leaves float16 once it is scaled; a score of 0 times infinity."""
    case = indexer_case([2], [40])
    case["weights"][0] = 60000
    case["query_dequant_scale"][0] = 8
    case["key"][:] = 0
    out = select(case)
    assert (out[0, :9] == POISON).all()
    assert (out[0, 9:] == -1).all()
    assert sorted(out[1, :10].tolist()) == list(range(10))


def test_padded_queries() -> None:
    case = indexer_case([2, 2], [40, 300])
    want = select(case)
    padded = {**case, "layout_query": "BSND", "actual_seq_lengths_query": None}
    for name in ("query", "weights", "query_dequant_scale"):
        padded[name] = case[name].reshape(2, 2, *case[name].shape[1:])
    metadata = indexer_metadata(padded, max_seqlen_q=2)
    assert_same(select(padded, metadata=metadata), want)


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("layout_key must be one of PA_BSND, got BSND", {"layout_key": "BSND"}),
        ("layout_query must be one of TND, BSND", {"layout_query": "PA_BSND"}),
        ("cmp_ratio must be one of", {"cmp_ratio": 3}),
        ("cmp_ratio must be one of", {"cmp_ratio": 256}),
        ("sparse_count must be in 1..2048, got 2049", {"sparse_count": 2049}),
        ("sparse_count must be in 1..2048, got 0", {"sparse_count": 0}),
        ("sparse_mode must be one of 0, 3, got 4", {"sparse_mode": 4}),
        ("query_quant_mode", {"query_quant_mode": 1}),
        ("key_quant_mode", {"key_quant_mode": 1}),
        ("pre_tokens", {"pre_tokens": 128}),
        ("next_tokens", {"next_tokens": 0}),
        ("return_value must be one of False", {"return_value": True}),
        ("metadata must be given", {"metadata": None}),
        ("block_table must be given", {"block_table": None}),
        ("actual_seq_lengths_key must be given", {"actual_seq_lengths_key": None}),
        ("actual_seq_lengths_query must be given", {"actual_seq_lengths_query": None}),
        (r"actual_seq_lengths_query must have shape \[2\]", {"actual_seq_lengths_query": int32(5)}),
        ("must start at 0", {"actual_seq_lengths_query": int32(1, 2, 5)}),
        ("must never fall", {"actual_seq_lengths_query": int32(4, 2)}),
    ],
)
def test_a_bad_argument_is_refused(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(OperatorError, match=pattern):
        select(CASE, **{"metadata": indexer_metadata(CASE), **changes})


@pytest.mark.parametrize(
    ("pattern", "name", "shape", "dtype"),
    [
        (r"query must have shape \[5, 64, 128\]", "query", (5, 32, 128), torch.int8),  # V4.1 has 32 index heads
        (r"query must have shape \[5, 64, 128\]", "query", (5, 64, 64), torch.int8),
        ("query must have dtype torch.int8", "query", (5, 64, 128), torch.float16),
        ("query must have no empty axis.*skip the call", "query", (0, 64, 128), torch.int8),
        ("key must have no empty axis.*skip the call", "key", (0, 16, 1, 128), torch.int8),
        ("key must have shape", "key", (30, 16, 128), torch.int8),
        ("key block size must be a multiple of 16", "key", (30, 8, 1, 128), torch.int8),
        ("weights must have dtype torch.float16", "weights", (5, 64), torch.float32),
        ("weights must have shape", "weights", (5, 1, 64), torch.float16),
        ("query_dequant_scale must have shape", "query_dequant_scale", (5, 64, 1), torch.float16),
        ("key_dequant_scale must have shape", "key_dequant_scale", (30, 16, 1, 1), torch.float16),
        (r"block_table must have shape \[2, columns\]", "block_table", (3, 9), torch.int32),
    ],
)
def test_a_bad_shape_or_dtype_is_refused(pattern: str, name: str, shape: Any, dtype: torch.dtype) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    rows = {other: CASE[other][:0] for other in ("weights", "query_dequant_scale")} if shape[0] == 0 else {}
    with pytest.raises(OperatorError, match=pattern):
        select(CASE, **{"metadata": indexer_metadata(CASE), **(rows if name == "query" else {}), name: tensor})


def test_keys_may_lie_apart_block_by_block_only() -> None:
    wide = torch.stack([CASE["key"], CASE["key"]], dim=1)
    assert_same(select(CASE, key=wide[:, 0]), select(CASE))
    with pytest.raises(OperatorError, match="key must be contiguous within a block"):
        select(CASE, key=torch.stack([CASE["key"], CASE["key"]], dim=2)[:, :, 0])


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("query, request 1, position 5: actual_seq_lengths_query ends at 6", {"actual_seq_lengths_query": int32(2, 6)}),
        (
            "key, request 1, position 96: needs column 6 of block_table, which has 6",
            {"actual_seq_lengths_key": int32(40, 400)},
        ),
        ("actual_seq_lengths_key, request 0, position -4", {"actual_seq_lengths_key": int32(-4, 300)}),
        (
            "key, request 0, position 0: block_table names block 999, and",
            {"block_table": torch.full((2, 5), 999).int()},
        ),
        ("key, request 0, position 0: block_table names block -1, and", {"block_table": torch.full((2, 5), -1).int()}),
    ],
)
def test_out_of_range(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(OutOfRangeError, match=pattern):
        select(CASE, **changes)


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        (r"key lengths\[0\] 44, got 40", {"actual_seq_lengths_key": int32(44, 300)}),
        (r"query lengths\[0\] 1, got 2", {"actual_seq_lengths_query": int32(1, 5)}),
        ("sparse_count 256, got 512", {"sparse_count": 256}),
        ("sparse_mode 0, got 3", {"sparse_mode": 0}),
        ("cmp_ratio 1, got 4", {"cmp_ratio": 1}),
    ],
)
def test_stale_metadata_says_what_differs(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(StaleMetadataError, match=pattern):
        select(CASE, metadata=indexer_metadata(CASE, **changes))


def test_zeros_are_stale_metadata() -> None:
    with pytest.raises(StaleMetadataError, match="all zeros"):
        select(CASE, metadata=torch.zeros(1024, dtype=torch.int32))


def test_metadata_refuses_what_it_cannot_read() -> None:
    for pattern, changes in (
        ("layout_key", {"layout_key": "BSND"}),
        ("must be given", {"actual_seq_lengths_key": None}),
    ):
        with pytest.raises(OperatorError, match=pattern):
            indexer_metadata(CASE, **changes)


def test_the_plain_operator_has_one_key_a_token() -> None:
    case = indexer_case([2, 3], [40, 90], ratio=1, topk=64)
    want = select(case)
    plain = {name: value for name, value in case.items() if name != "cmp_ratio"}
    function = ops("npu").npu_quant_lightning_indexer
    assert_same(function(**plain, query_quant_mode=0, key_quant_mode=0).flatten(0, 1), want)
    with pytest.raises(OperatorError, match="query_dtype must be one of None"):
        function(**plain, query_quant_mode=0, key_quant_mode=0, query_dtype=1)
