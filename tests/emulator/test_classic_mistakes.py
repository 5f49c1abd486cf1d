"""The mistakes that engines have made: each is caught by an error, or by the numbers beside those of the right call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsacp_npu.emulator import OperatorError, OutOfRangeError, StaleMetadataError
from tests.compare import assert_same
from tests.emulator.common import (
    attend,
    attention_case,
    attention_metadata,
    compress,
    compressor_case,
    indexer_case,
    indexer_metadata,
    int32,
    positions_of,
    select,
)

# One request of 145 tokens on two ranks: rank 0 has rows 0..72, rank 1 rows 73..144.
SPLIT, TOTAL = 73, 145


def rank_0(case: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The rows of rank 0, with its own query lengths; key lengths are left to the caller."""
    return {**case, **{name: case[name][:SPLIT] for name in names if name in case}}


def attention_on_rank_0(ratio: int) -> tuple[dict[str, Any], torch.Tensor]:
    """(the right call on rank 0, the rows it must give)."""
    case = attention_case(ratio, [TOTAL], [TOTAL])
    local = rank_0(case, ("q", "cmp_sparse_indices"))
    return {**local, "cu_seqlens_q": int32(0, SPLIT), "seqused_kv": int32(SPLIT)}, attend(case)[:SPLIT]


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_the_right_call_on_a_rank_gives_its_rows(ratio: int) -> None:
    local, want = attention_on_rank_0(ratio)
    assert_same(attend(local), want)


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_global_key_lengths_with_local_queries(ratio: int) -> None:
    """Queries are right-aligned to the keys: row 0 of rank 0 is taken for position 72."""
    local, want = attention_on_rank_0(ratio)
    wrong = {**local, "seqused_kv": int32(TOTAL)}
    if ratio == 4:  # more entries are visible than the index rows hold
        with pytest.raises(OutOfRangeError, match="cmp_sparse_indices, request 0, position 0: entry -1"):
            attend(wrong)
    else:
        assert not torch.allclose(attend(wrong)[0].float(), want[0].float(), atol=0.1)


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_global_query_lengths_with_local_queries(ratio: int) -> None:
    local, _ = attention_on_rank_0(ratio)
    with pytest.raises(
        OutOfRangeError, match="q, request 0, position 144: cu_seqlens_q ends at 145, but q has 73 rows"
    ):
        attend(local, cu_seqlens_q=int32(0, TOTAL))


def test_global_lengths_in_the_indexer() -> None:
    case = indexer_case([TOTAL], [TOTAL])
    local = rank_0(case, ("query", "weights", "query_dequant_scale"))
    right = {**local, "actual_seq_lengths_query": int32(SPLIT), "actual_seq_lengths_key": int32(SPLIT)}
    assert_same(select(right), select(case)[:SPLIT])
    with pytest.raises(OutOfRangeError, match="query, request 0, position 144"):
        select(local)
    out = select({**right, "actual_seq_lengths_key": int32(TOTAL)})
    assert (out[0] >= 0).sum() == 18  # row 0 stands at position 0 and sees none
    assert (select(right)[0] == -1).all()


def test_attention_offsets_without_the_leading_zero() -> None:
    """Two requests become one, or the rows before the first offset belong to nobody."""
    case = attention_case(1, [3, 2], [9, 20])
    for offsets in (int32(3, 5), int32(3, 5, 5)):
        with pytest.raises(OperatorError, match="cu_seqlens_q must start at 0, got"):
            attend(case, cu_seqlens_q=offsets, metadata=attention_metadata(case))
    one = attention_case(1, [3], [9])
    with pytest.raises(OperatorError, match="cu_seqlens_q must start at 0"):
        attention_metadata(one, cu_seqlens_q=int32(3))


def test_compressor_lengths_where_offsets_are_due() -> None:
    case = compressor_case(4, [12, 8], [0, 0])
    with pytest.raises(OperatorError, match="cu_seqlens must start at 0, got"):
        compress(case, cu_seqlens=int32(12, 8))
    with pytest.raises(OperatorError, match="cu_seqlens must start at 0"):
        compress(case, cu_seqlens=int32(12, 20))


def test_indexer_offsets_with_a_zero_too_many() -> None:
    """The indexer takes both forms, so a leading zero in a list of the shorter length passes for an empty request."""
    case = indexer_case([3, 2], [40, 60])
    right = select(case)
    assert_same(select(case, actual_seq_lengths_query=int32(0, 3, 5)), right)
    cut = int32(0, 3, 5)[:2]  # [0, 3]: request 0 without queries, request 1 with those of request 0
    with pytest.raises(StaleMetadataError, match=r"query lengths\[0\] 3, got 0"):
        select(case, actual_seq_lengths_query=cut, metadata=indexer_metadata(case))
    assert not torch.equal(select(case, actual_seq_lengths_query=cut), right)
    with pytest.raises(OperatorError, match="actual_seq_lengths_query must have shape"):
        select(case, actual_seq_lengths_query=int32(5))


def test_compressed_key_lengths_in_the_indexer() -> None:
    """The operator divides by the ratio itself."""
    case = indexer_case([1], [400])
    assert (select(case)[0] >= 0).sum() == 100
    assert (select(case, actual_seq_lengths_key=int32(100))[0] >= 0).sum() == 25


def test_indexer_metadata_that_is_not_localised() -> None:
    """Two ranks, one request of 64 tokens; rank 1 has 32 rows and all keys."""
    whole = indexer_case([64], [64])
    local = {name: whole[name][32:] for name in ("query", "weights", "query_dequant_scale")}
    right = {**whole, **local, "actual_seq_lengths_query": int32(32)}
    with pytest.raises(StaleMetadataError, match=r"query lengths\[0\] 64, got 32.*rows stay uncomputed"):
        select(right, metadata=indexer_metadata(whole))
    out = select(right)
    assert_same(out, select(whole)[32:])
    assert sorted(out[31][out[31] >= 0].tolist()) == list(range(16))


def test_a_window_of_128_to_the_left() -> None:
    """The binding's default: it counts the query itself, so the model's window is 127."""
    case = attention_case(1, [1], [200])
    right = attend(case)
    one_more = attend(case, ori_win_left=128)
    assert not torch.equal(right, one_more)
    left_out = {name: value for name, value in case.items() if name != "ori_win_left"}
    assert_same(attend(left_out), one_more)
    with pytest.raises(StaleMetadataError, match="ori_win_left 128, got 127"):
        attend(case, metadata=attention_metadata(left_out))
    short = attention_case(1, [1], [128])  # too short to tell
    assert_same(attend(short), attend(short, ori_win_left=128))


def test_a_missing_sink_or_scale() -> None:
    case = attention_case(1, [2], [30])
    with pytest.raises(OperatorError, match="sinks must be given"):
        attend(case, sinks=None)
    assert not torch.allclose(attend(case, sinks=torch.zeros(4)).float(), attend(case).float(), atol=1e-2)
    assert not torch.allclose(attend(case, softmax_scale=0.0).float(), attend(case).float(), atol=1e-2)


def test_block_id_0_in_a_state_table_stores_nothing() -> None:
    """The next chunk then pools whatever block 0 holds."""
    case = compressor_case(4, [6], [0])
    tail = compressor_case(4, [2], [6])
    entries = []
    for first_block in (int(case["state_block_table"][0, 0]), 0):
        table = case["state_block_table"].clone()
        table[0, 0] = first_block
        state = case["state_cache"].clone()
        compress(case, state_cache=state, state_block_table=table)
        assert torch.equal(state, case["state_cache"]) == (first_block == 0)
        entries.append(
            compress(
                {**tail, **{n: case[n] for n in ("wkv", "wgate", "ape")}}, state_cache=state, state_block_table=table
            )
        )
    assert not torch.allclose(entries[0][0].float(), entries[1][0].float(), atol=0.1)


def test_block_id_0_in_a_key_table_is_read() -> None:
    """Nothing protects the null page: its rows count as keys."""
    case = attention_case(1, [1], [20])
    table = case["ori_block_table"].clone()
    table[0, 0] = 0
    assert not torch.equal(attend(case, ori_block_table=table), attend(case))


def test_minus_one_in_a_state_table() -> None:
    case = compressor_case(4, [6], [0])
    case["state_block_table"][0, 0] = -1
    with pytest.raises(OutOfRangeError, match=r"state_cache, request 0, position 0: state_block_table names block -1"):
        compress(case)


def test_draft_metadata_that_is_not_localised() -> None:
    """Two requests of 4 draft tokens, key lengths 9 and 6, two ranks: rank 0 has the first request's rows."""
    whole = attention_case(1, [4, 4], [9, 6])
    local = {**whole, "q": whole["q"][:4], "cu_seqlens_q": int32(0, 4, 4), "seqused_kv": int32(9, 0)}
    assert_same(attend(local), attend(whole)[:4])
    with pytest.raises(StaleMetadataError, match=r"query lengths\[1\] 4, got 0; key lengths\[1\] 6, got 0"):
        attend(local, metadata=attention_metadata(whole))
    with pytest.raises(OutOfRangeError, match="q, request 1, position 7: cu_seqlens_q ends at 8, but q has 4 rows"):
        attend(local, cu_seqlens_q=int32(0, 4, 8), metadata=attention_metadata(whole), seqused_kv=int32(9, 6))


def test_draft_steps_that_share_a_length_buffer() -> None:
    """Metadata of step 0, read after the buffer was moved on to step 2."""
    lengths = int32(10)
    case = attention_case(1, [1], [12], block_size=16)
    step_0 = {**case, "seqused_kv": lengths}
    metadata = attention_metadata(step_0)
    lengths += 2
    with pytest.raises(StaleMetadataError, match=r"key lengths\[0\] 10, got 12"):
        attend(step_0, metadata=metadata)


def test_minus_one_inside_the_index_prefix() -> None:
    """Valid entries come first; behind them -1 is ignored, between them it is no mask."""
    case = attention_case(4, [1], [41])
    picks = case["cmp_sparse_indices"].clone()
    picks[0, 0, :10] = torch.tensor([-1, *range(9)])
    with pytest.raises(
        OutOfRangeError, match="cmp_sparse_indices, request 0, position 0: entry -1 of 10, within the used"
    ):
        attend(case, cmp_sparse_indices=picks)


def test_slots_instead_of_entry_numbers_in_the_indices() -> None:
    case = attention_case(4, [1], [41])
    slots = case["cmp_sparse_indices"] + int(case["cmp_block_table"][0, 0]) * 16
    with pytest.raises(OutOfRangeError, match="cmp_sparse_indices, request 0, position 0"):
        attend(case, cmp_sparse_indices=slots)


@pytest.mark.parametrize("what", ["next step", "other batch", "other heads"])
def test_stale_metadata(what: str) -> None:
    case = attention_case(128, [1, 1], [200, 50])
    other = {
        "next step": {**case, "seqused_kv": int32(201, 51)},
        "other batch": attention_case(128, [1], [200]),
        "other heads": attention_case(128, [1, 1], [200, 50], heads=8),
    }[what]
    with pytest.raises(StaleMetadataError, match="rows stay uncomputed"):
        attend(case, metadata=attention_metadata(other))


def test_positions_are_what_these_tests_think() -> None:
    assert positions_of([2, 1], [5, 9]) == [3, 4, 8]
