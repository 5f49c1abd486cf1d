"""Public faults in lengths, padding, prefixes, visibility: the smallest input that exposes each, and its kind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.compressor import emitted_entries
from dsacp_ref.extents import local_extents, query_positions, query_rows, token_positions, token_requests
from dsacp_ref.partition import local_rows, local_token_indices, partition_tokens, restored_rows
from dsacp_ref.spec import ContractError
from dsacp_ref.visibility import entry_mask, owned_entries, visible_entries
from tests.strategies import EVERY_SPLIT, Batch, Step, batches, cuts, each, fewer, int32, read_only, steps


def rows_of(query_lens: list[int], seq_lens: list[int], cp_size: int, rank: int, **cut: object) -> tuple[list, list]:
    """(cu_seqlens_q, seqused_kv) of one rank."""
    batch = Batch(query_lens, seq_lens)
    local = local_extents(batch.query_start_loc, batch.key_lens, cp_size, rank, **cut)
    return local.cu_seqlens_q.tolist(), local.seqused_kv.tolist()


# --- local rows with global lengths, or the reverse -------------------------------------------------------------------


def test_a_global_key_length_would_move_the_queries_of_all_ranks_but_the_last() -> None:
    """xLLM-AI/xllm#2097: 145 tokens on 2 ranks."""
    assert rows_of([145], [145], 2, 0, split="contiguous_request") == ([0, 73], [73])
    assert rows_of([145], [145], 2, 1, split="contiguous_request") == ([0, 72], [145])
    right = query_positions(int32(0, 73), int32(73), num_rows=73)
    wrong = query_positions(int32(0, 73), int32(145), num_rows=73)
    assert (right[0], wrong[0]) == (0, 72)
    assert visible_entries(right[:1], 4).tolist() == [0]
    assert visible_entries(wrong[:1], 4).tolist() == [18]


@fewer(4)
@given(cuts())
def test_only_the_last_query_of_a_request_sees_all_its_keys(every: list[Step]) -> None:
    """xLLM-AI/xllm#2097, the kind: an extent is as long as the request on exactly one rank."""
    for step in each(every):
        batch = step.batch
        full = [0] * len(batch.query_lens)
        for rank in range(step.cp_size):
            local = local_extents(batch.query_start_loc, batch.key_lens, step.cp_size, rank, **step.cut)
            for request, extent in zip(local.request_indices.tolist(), local.seqused_kv.tolist(), strict=True):
                if request >= 0 and extent == batch.seq_lens[request] > 0:
                    full[request] += 1
        assert full == [int(min(lens) > 0) for lens in zip(batch.query_lens, batch.seq_lens, strict=True)]


def test_indexer_lengths_fit_the_rows_they_serve() -> None:
    """xLLM-AI/xllm#1997, indexer metadata: row 31 of rank 1 may select entries 0..15, row 0 entries 0..7."""
    assert rows_of([64], [64], 2, 1) == ([0, 32], [64])
    visible = visible_entries(query_positions(int32(0, 32), int32(64), num_rows=32), 4)
    assert (visible[0], visible[31]) == (8, 16)


@fewer(4)
@given(cuts(), st.sampled_from([1, 2, 4]))
def test_the_last_row_of_an_extent_may_select_every_entry_of_it(every: list[Step], compress_ratio: int) -> None:
    """xLLM-AI/xllm#1997, the kind: one set of entries 0 .. n-1 that grows with the row, never one repeated position."""
    for step in each(every):
        batch = step.batch
        for rank in range(step.cp_size):
            local = local_extents(batch.query_start_loc, batch.key_lens, step.cp_size, rank, **step.cut)
            positions = query_positions(local.cu_seqlens_q, local.seqused_kv, num_rows=int(local.cu_seqlens_q[-1]))
            visible = visible_entries(positions, compress_ratio)
            for row, extent in enumerate(local.seqused_kv.tolist()):
                of_row = visible[local.cu_seqlens_q[row] : local.cu_seqlens_q[row + 1]]
                if extent:
                    assert of_row[-1] == extent // compress_ratio
                    assert np.isin(np.diff(of_row), (0, 1)).all()


def test_draft_metadata_are_local_like_the_draft_queries() -> None:
    """xLLM-AI/xllm#1997, MTP: two draft requests of 4 tokens."""
    assert rows_of([4, 4], [9, 6], 2, 0) == ([0, 4, 4], [9, 0])
    assert rows_of([4, 4], [9, 6], 2, 1) == ([0, 0, 4], [0, 6])
    assert rows_of([4, 4], [9, 6], 2, 1, causal=False) == ([0, 0, 4], [0, 6])


def test_query_offsets_end_at_the_local_row_count() -> None:
    """sgl-project/sglang#38603: 10 tokens on 4 ranks are 3, 3, 2, 2."""
    ends = [rows_of([10], [10], 4, rank, split="round_robin")[0][-1] for rank in range(4)]
    assert ends == [3, 3, 2, 2]


@fewer(4)
@given(cuts(), st.booleans())
def test_query_offsets_never_reach_beyond_the_local_buffer(every: list[Step], causal: bool) -> None:
    """sgl-project/sglang#38603 and xLLM-AI/xllm#1997, the kind: the offsets of all ranks sum to the real count."""
    for step in each(every):
        batch, ends = step.batch, 0
        for rank in range(step.cp_size):
            local = local_extents(batch.query_start_loc, batch.key_lens, step.cp_size, rank, **step.cut, causal=causal)
            rows = local_token_indices(batch.query_start_loc, step.cp_size, rank, **step.cut)
            assert local.cu_seqlens_q[-1] == np.count_nonzero(rows >= 0) <= len(rows)
            ends += int(local.cu_seqlens_q[-1])
        assert ends == batch.num_tokens


def test_packed_documents_are_cut_to_their_local_causal_range() -> None:
    """mindspore-ai/hyper-parallel#55: documents of 5 and 3 on 2 ranks; rows 4..7 are 1 and 3 queries."""
    assert rows_of([5, 3], [5, 3], 2, 1) == ([0, 1, 4], [5, 3])
    assert rows_of([5, 3], [5, 3], 2, 0) == ([0, 4, 4], [4, 0])


# --- padding and zero-length slots ------------------------------------------------------------------------------------


def test_a_graph_slot_across_a_rank_border_gets_no_negative_extent() -> None:
    """vllm-project/vllm-ascend#12840: slots 15, 16, 17 own 4, 4, 2 of rank 6's rows and read nothing."""
    cu_seqlens_q, seqused_kv = rows_of([4] * 20, [5] * 9 + [0] * 11, 8, 6)
    assert cu_seqlens_q == [0] * 16 + [4, 8, 10, 10, 10]
    assert seqused_kv == [0] * 20


@fewer(4)
@given(cuts(), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(["zero", "prefix"]))
def test_graph_slots_count_their_rows_and_see_nothing(every: list[Step], slots: list[int], empty_extent: str) -> None:
    """vllm-project/vllm-ascend#12840, the kind, under every split."""
    for step in each(every):
        batch = Batch([*step.batch.query_lens, *slots], [*step.batch.seq_lens, *[0] * len(slots)])
        own_rows = 0
        for rank in range(step.cp_size):
            local = local_extents(
                batch.query_start_loc, batch.key_lens, step.cp_size, rank, split=step.split, empty_extent=empty_extent
            )
            slot_rows = local.request_indices >= len(step.batch.query_lens)
            assert (local.seqused_kv >= 0).all()
            assert (local.seqused_kv[slot_rows] == 0).all()
            own_rows += int(np.diff(local.cu_seqlens_q)[slot_rows].sum())
        assert own_rows == sum(slots)


@pytest.mark.parametrize("num_slots", [1, 4])
def test_an_idle_dummy_step_is_legal_and_points_nowhere(num_slots: int) -> None:
    """vllm-project/vllm-ascend#9818: no real token, some padded ones."""
    loc, keys = np.arange(num_slots + 1, dtype=np.int32), np.zeros(num_slots, np.int32)
    tokens = np.arange(num_slots, dtype=np.int32)
    assert token_positions(tokens, loc, keys).tolist() == [-1] * num_slots
    assert token_positions(tokens, int32(0, num_slots), int32(0)).tolist() == [-1] * num_slots
    assert rows_of([], [], 2, 0, num_input_tokens=num_slots) == ([0], [])
    assert local_token_indices(int32(0), 2, 0, num_input_tokens=4).tolist() == [-1, -1]


@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_ranks_without_queries_take_part(split: str) -> None:
    """vllm-project/vllm-ascend#17097, HYGON-AI/sglang-das#393: 3 tokens on 8 ranks."""
    partition = partition_tokens(int32(0, 3), 8, split=split)
    assert len(partition.token_indices) == 8
    rows = read_only(np.arange(1.0, 4.0))
    sent = np.concatenate([local_rows(rows, partition, rank) for rank in range(8)])
    np.testing.assert_array_equal(restored_rows(sent, partition), rows)
    assert len({len(local_extents(int32(0, 3), int32(3), 8, rank, split=split).seqused_kv) for rank in range(8)}) == 1


def test_three_tokens_on_eight_ranks_see_one_two_and_three_keys() -> None:
    """vllm-project/vllm-ascend#17097."""
    assert [rows_of([3], [3], 8, rank)[1] for rank in range(8)] == [[1], [2], [3], [0], [0], [0], [0], [0]]


def test_a_short_request_keeps_its_row_in_the_offsets() -> None:
    """vllm-project/vllm-ascend#11807: nothing is compacted away, so row 2 stays request 2."""
    local = local_extents(int32(0, 128, 128, 256), int32(128, 7, 128), 1, 0)
    assert local.cu_seqlens_q.tolist() == [0, 128, 128, 256]
    assert local.request_indices.tolist() == [0, 1, 2]
    assert np.flatnonzero(np.diff(local.cu_seqlens_q)).tolist() == [0, 2]


def test_queries_padded_to_a_capture_size_belong_to_no_row() -> None:
    """ROCm/ATOM#1595: 342 real tokens, 352 rows; both ways out, and metadata of another length is refused."""
    assert query_rows(int32(*range(343)), num_rows=352).tolist() == [*range(342), *[-1] * 10]
    ones = Batch([1] * 342, [7] * 342)
    local = local_extents(ones.query_start_loc, ones.key_lens, 1, 0, split="round_robin", num_input_tokens=352)
    assert len(local.cu_seqlens_q) == len(local.seqused_kv) + 1 == 353
    assert np.diff(local.cu_seqlens_q).tolist() == [1] * 342 + [0] * 10
    assert local.seqused_kv.tolist() == [7] * 342 + [0] * 10
    with pytest.raises(ContractError, match=r"^seqused_kv must have shape \[352\], got \[342\]"):
        query_positions(local.cu_seqlens_q, local.seqused_kv[:342], num_rows=352)


@given(steps(split=st.sampled_from(["contiguous", "round_robin"])), st.integers(0, 12))
def test_padding_a_stream_moves_no_real_position(step: Step, padding: int) -> None:
    """ROCm/ATOM#1595, the kind: pad rows have no request and no position, on whichever rank they lie."""
    batch = step.batch
    partition = partition_tokens(
        batch.query_start_loc, step.cp_size, split=step.split, num_input_tokens=batch.num_tokens + padding
    )
    tokens = np.concatenate(partition.token_indices)
    requests = token_requests(tokens, batch.query_start_loc)
    positions = token_positions(tokens, batch.query_start_loc, batch.key_lens)
    assert (requests[tokens < 0] == -1).all()
    assert (positions[tokens < 0] == -1).all()
    every = np.arange(batch.num_tokens, dtype=np.int32)
    want = token_positions(every, batch.query_start_loc, batch.key_lens)
    np.testing.assert_array_equal(positions[partition.restore_indices], want)


def test_requests_without_new_tokens_complete_no_entry() -> None:
    """sgl-project/sglang#35848: from 128 to 133 nothing, from 125 to 128 entry 0, nothing for the empty ones."""
    plan = emitted_entries(int32(0, 5, 5, 8, 8), int32(128, 0, 125, 0), 128, num_rows=8)
    assert plan.entry_start_loc.tolist() == [0, 0, 0, 1, 1]
    assert plan.entry_indices[:1].tolist() == [0]


@given(batches(), st.sampled_from([1, 2, 4]))
def test_a_step_completes_what_its_last_query_sees_and_its_prefix_did_not(batch: Batch, compress_ratio: int) -> None:
    """sgl-project/sglang#35848, GDzhu01/vllm-ascend-deepseekv4#76, the kind: rows counted from visible entries."""
    prefixes = [keys - queries for queries, keys in zip(batch.query_lens, batch.seq_lens, strict=True)]
    plan = emitted_entries(batch.query_start_loc, int32(*prefixes), compress_ratio, num_rows=batch.num_tokens)
    last = visible_entries(batch.key_lens - np.int32(1), compress_ratio)
    before = visible_entries(np.maximum(int32(*prefixes), 0) - np.int32(1), compress_ratio)
    want = np.where(batch.key_lens > 0, last - before, 0)
    assert np.diff(plan.entry_start_loc).tolist() == want.tolist()


# --- prefix and positions ---------------------------------------------------------------------------------------------


def test_a_cached_prefix_survives_a_length_that_is_no_multiple_of_the_blocks() -> None:
    """sgl-project/sglang#23415: 1 cached token, 3670 new, zigzag over 4 ranks: blocks of 459 (6) and 458 (2)."""
    got = [rows_of([3670], [3671], 4, rank, split="zigzag")[1] for rank in range(4)]
    assert got == [[460, 3671], [919, 3213], [1378, 2755], [1837, 2296]]


@fewer(4)
@given(cuts(), st.integers(1, 50))
def test_a_longer_prefix_lengthens_every_extent_by_as_much(every: list[Step], more: int) -> None:
    """sgl-project/sglang#23415, the kind: padding never eats the prefix."""
    for step in each(every):
        batch = step.batch
        longer = batch.key_lens + np.int32(more) * (batch.key_lens > 0)
        for rank in range(step.cp_size):
            short = local_extents(batch.query_start_loc, batch.key_lens, step.cp_size, rank, **step.cut)
            long = local_extents(batch.query_start_loc, longer, step.cp_size, rank, **step.cut)
            want = np.where(short.seqused_kv > 0, short.seqused_kv + more, 0)
            assert long.seqused_kv.tolist() == want.tolist()
            assert long.cu_seqlens_q.tolist() == short.cu_seqlens_q.tolist()


def test_positions_are_split_with_the_hidden_rows() -> None:
    """sgl-project/sglang#19367: rank 3 of 4 holds tokens 3 and 7, at positions 3 and 7, in target and draft."""
    partition = partition_tokens(int32(0, 8), 4, split="round_robin")
    hidden, positions = read_only(np.ones((8, 5))), np.arange(8, dtype=np.int32)
    assert local_rows(positions, partition, 3).tolist() == [3, 7]
    assert len(local_rows(hidden, partition, 3)) == len(local_rows(positions, partition, 3)) == 2


@fewer(4)
@given(cuts())
def test_every_local_row_has_one_position(every: list[Step]) -> None:
    """sgl-project/sglang#19367, the kind: positions made from a rank's tokens equal positions cut like its rows."""
    for step in each(every):
        batch, partition = step.batch, partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)
        every = np.arange(batch.num_tokens, dtype=np.int32)
        positions = token_positions(every, batch.query_start_loc, batch.key_lens)
        for rank, tokens in enumerate(partition.token_indices):
            made = token_positions(tokens, batch.query_start_loc, batch.key_lens)
            cut = local_rows(positions, partition, rank)
            assert made.shape == cut.shape == tokens.shape
            assert made[tokens >= 0].tolist() == cut[tokens >= 0].tolist()


def test_a_strided_shard_has_no_consecutive_positions() -> None:
    """sgl-project/sglang#28463: extends 5 and 3 behind prefixes 0 and 6, rank 1 of 4."""
    loc, keys = int32(0, 5, 8), int32(5, 9)
    tokens = local_token_indices(loc, 4, 1, split="round_robin")
    assert tokens.tolist() == [1, 5]
    assert token_requests(tokens, loc).tolist() == [0, 1]
    assert token_positions(tokens, loc, keys).tolist() == [1, 6]
    local = local_extents(loc, keys, 4, 1, split="round_robin")
    assert local.seqused_kv.tolist() == [2, 7]
    assert query_positions(local.cu_seqlens_q, local.seqused_kv, num_rows=2).tolist() == [1, 6]


def test_positions_padded_before_the_split_are_refused() -> None:
    """sgl-project/sglang#19820: 3670 tokens, 3672 positions; trimmed they fit, and the shares sum to the input."""
    partition = partition_tokens(int32(0, 3670), 4)
    positions = np.arange(3672, dtype=np.int32)
    with pytest.raises(ContractError, match=r"^rows must have 3670 rows, got 3672; one row a token of the partition"):
        local_rows(positions, partition, 0)
    shares = [local_rows(positions[:3670], partition, rank) for rank in range(4)]
    assert [len(share) for share in shares] == [918] * 4  # padded after the split
    assert sum(np.count_nonzero(tokens >= 0) for tokens in partition.token_indices) == 3670


@fewer(4)
@given(cuts(), st.integers(-3, 3).filter(bool))
def test_an_array_of_another_length_is_never_cut(every: list[Step], off: int) -> None:
    """sgl-project/sglang#19820, the kind."""
    for step in each(every):
        partition = partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)
        count = max(step.batch.num_tokens + off, 0)
        if count != step.batch.num_tokens:
            with pytest.raises(ContractError, match=f"^rows must have {step.batch.num_tokens} rows, got {count};"):
                local_rows(np.zeros(count), partition, 0)


# --- visibility of compressed entries ---------------------------------------------------------------------------------


def test_a_query_does_not_see_its_own_unfinished_entry() -> None:
    """vllm-project/tpu-inference#3536, sgl-project/sglang-jax#1607."""
    assert visible_entries(np.arange(9, dtype=np.int32), 4).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


@given(st.integers(0, 300), st.sampled_from([1, 2, 4, 128]))
def test_a_visible_entry_lies_wholly_in_the_past_of_its_query(position: int, compress_ratio: int) -> None:
    """vllm-project/tpu-inference#3536, the kind."""
    for entry, seen in enumerate(entry_mask(int32(position), position + 2, compress_ratio)[0].tolist()):
        assert seen == (max(range(entry * compress_ratio, (entry + 1) * compress_ratio)) <= position)


def test_the_fourth_token_completes_the_first_entry() -> None:
    """GDzhu01/vllm-ascend-deepseekv4#76."""
    for num_tokens, count in ((3, 0), (4, 1)):
        plan = emitted_entries(int32(0, num_tokens), int32(0), 4, num_rows=num_tokens)
        assert plan.entry_start_loc.tolist() == [0, count]
        first, stop = owned_entries(int32(0), int32(num_tokens), 4)
        assert int(stop[0] - first[0]) == count
