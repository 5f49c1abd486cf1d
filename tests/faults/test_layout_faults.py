"""Public faults in groups, orders and ownership: the smallest input that exposes each, and its kind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.config import topology
from dsacp_ref.extents import build_cp_local_metadata, local_extents, token_positions
from dsacp_ref.paging import slot_mapping
from dsacp_ref.partition import (
    converted_rows,
    interleave_lengths,
    interleave_local_indices,
    interleave_owners,
    local_rows,
    local_token_indices,
    partition_tokens,
    rank_pieces,
    restored_rows,
)
from dsacp_ref.spec import ContractError
from tests.oracles import splits as oracle
from tests.strategies import Step, cp_sizes, cuts, each, fewer, int32

# --- group, order and restore -----------------------------------------------------------------------------------------


def test_the_group_that_splits_is_the_group_that_gathers() -> None:
    """sgl-project/sglang#24560: world 8, attention TP 1, CP 8, 16 tokens: 2 rows a rank, and 16 again."""
    grid = [topology(8, rank=rank, cp_size=8, tp_size=1) for rank in range(8)]
    assert {place.tp_size for place in grid} == {1}
    partition = partition_tokens(int32(0, 16), grid[0].cp_size)
    rows = np.arange(16)
    sent = [local_rows(rows, partition, place.cp_rank) for place in grid]
    assert [len(share) for share in sent] == [2] * 8
    np.testing.assert_array_equal(restored_rows(np.concatenate(sent), partition), rows)
    with pytest.raises(ContractError, match=r"^gathered must have 16 rows, got 2; the ranks' rows end to end"):
        restored_rows(sent[0], partition)  # gathered over the TP group of one


def test_a_gather_over_more_ranks_than_the_split_is_refused() -> None:
    """xLLM-AI/xllm#1997: cp_size 2 in a group of 4, 8 tokens."""
    with pytest.raises(ContractError, match=r"independent cp_size 2 mismatches a group of 4$"):
        topology(4, rank=0, cp_size=2, enable_dsa_cp=True)
    partition = partition_tokens(int32(0, 8), 2)
    share = local_rows(np.arange(8), partition, 0)
    with pytest.raises(ContractError, match=r"^gathered must have 8 rows, got 16;"):
        restored_rows(np.concatenate([share] * 4), partition)


@fewer(4)
@given(cuts(), st.integers(0, 12))
def test_a_gather_over_another_number_of_ranks_is_refused(every: list[Step], members: int) -> None:
    """sgl-project/sglang#24560 and xLLM-AI/xllm#1997, the kind: equal shares, other group."""
    for step in each(every):
        partition = partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)
        share, total = len(partition.token_indices[0]), sum(map(len, partition.token_indices))
        if share * members != total:
            with pytest.raises(ContractError, match=f"^gathered must have {total} rows, got {share * members};"):
                restored_rows(np.zeros(share * members), partition)


@pytest.mark.parametrize("rank", range(8))
def test_a_group_is_in_rank_order(rank: int) -> None:
    """sgl-project/sglang#24560, the kind: a rank's place in the group is the slice it owns."""
    for grid in (topology(8, rank=rank, cp_size=4), topology(8, rank=rank, dp_size=2, enable_dsa_cp=True)):
        assert grid.cp_group[grid.cp_rank] == rank
        assert len(grid.cp_group) == grid.cp_size == 4
        assert list(grid.cp_group) == sorted(grid.cp_group)


def test_a_selected_token_is_found_in_the_padded_layout() -> None:
    """xLLM-AI/xllm cp_input_partition: lengths 5 and 8 give chunks of 2, 8 rows a rank; token 12 is row 7, not 5."""
    partition = partition_tokens(int32(0, 5, 13), 2, split="zigzag_padded")
    assert [len(rows) for rows in partition.token_indices] == [8, 8]
    assert partition.restore_indices[12] == 7
    assert partition_tokens(int32(0, 5, 13), 2, split="zigzag_ceil").restore_indices[12] == 5


def test_layout_names_decide_the_rows() -> None:
    """verl-project/verl#7297: 8 tokens on 2 ranks."""
    assert local_token_indices(int32(0, 8), 2, 0, split="contiguous").tolist() == [0, 1, 2, 3]
    assert local_token_indices(int32(0, 8), 2, 0, split="zigzag").tolist() == [0, 1, 6, 7]


@fewer(4)
@given(cuts())
def test_every_per_token_array_is_cut_alike(every: list[Step]) -> None:
    """verl-project/verl#7297, the kind: hidden rows, labels and replayed experts of a token meet on one row."""
    for step in each(every):
        partition = partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)
        labels = np.arange(1, step.batch.num_tokens + 1)
        hidden, experts = labels[:, None] * np.ones(3), labels[:, None, None] * np.ones((1, 2, 2), np.int32)
        for rank in range(step.cp_size):
            own = local_rows(labels, partition, rank)
            np.testing.assert_array_equal(local_rows(hidden, partition, rank), own[:, None] * np.ones(3))
            np.testing.assert_array_equal(local_rows(experts, partition, rank), own[:, None, None] * np.ones((1, 2, 2)))


@given(st.integers(16, 40), st.integers(2, 8))
def test_rows_of_another_layout_need_converting(num_tokens: int, cp_size: int) -> None:
    """verl-project/verl#7297: restored as what they are not, they are scrambled; converted, right."""
    loc, rows = int32(0, num_tokens), np.arange(num_tokens)
    zigzag = partition_tokens(loc, cp_size, split="zigzag")
    contiguous = partition_tokens(loc, cp_size, split="contiguous_request")
    sent = np.concatenate([local_rows(rows, zigzag, rank) for rank in range(cp_size)])
    assert restored_rows(sent, contiguous).tolist() != rows.tolist()
    assert restored_rows(converted_rows(sent, zigzag, contiguous), contiguous).tolist() == rows.tolist()


# --- draft state ------------------------------------------------------------------------------------------------------


def test_metadata_of_a_draft_step_outlive_the_next_step() -> None:
    """vllm-project/vllm-ascend#10878: steps with 10, 11, 12 keys from one buffer; step 0 still reads 10."""
    loc, buffer = np.array([0, 1], np.int32), np.array([10], np.int32)
    built = []
    for keys in (10, 11, 12):
        buffer[:] = keys
        built.append(build_cp_local_metadata(loc, buffer, 1, 0, None, None))
    loc[:] = 0
    assert [step.local_seq_lens.tolist() for step in built] == [[10], [11], [12]]
    assert built[0].local_query_start_loc.tolist() == [0, 1]


@fewer(4)
@given(cuts(), st.booleans())
def test_results_share_no_memory_with_the_inputs(every: list[Step], causal: bool) -> None:
    """vllm-project/vllm-ascend#10878, the kind."""
    for step in each(every):
        loc, keys = step.batch.query_start_loc, step.batch.key_lens
        table = np.ones((step.batch.num_tokens, 1), np.float32)
        results = [
            *rank_pieces(loc, step.cp_size, 0, **step.cut),
            *partition_tokens(loc, step.cp_size, **step.cut).token_indices,
            *local_extents(loc, keys, step.cp_size, 0, **step.cut, causal=causal),
            token_positions(np.arange(3, dtype=np.int32), loc, keys),
        ]
        metadata = build_cp_local_metadata(loc, keys, step.cp_size, 0, table, table, causal=causal)
        results += [field for field in metadata if isinstance(field, np.ndarray)]
        for result in results:
            assert not any(np.shares_memory(result, given_array) for given_array in (loc, keys, table))


# --- keys spread over ranks in decode ---------------------------------------------------------------------------------


def test_each_global_bound_is_localised() -> None:
    """vllm-project/vllm#46076: 3 tokens that end at 10 keys on 2 ranks; rank 1 sees 4, 4, 5, not 3, 4, 5."""
    assert interleave_lengths(int32(8, 9, 10), 2, 1, 1).tolist() == [4, 4, 5]
    assert interleave_lengths(int32(8, 9, 10), 2, 0, 1).tolist() == [4, 5, 5]


@given(st.integers(1, 40), st.integers(1, 5), cp_sizes, st.integers(1, 5))
def test_bounds_of_several_tokens_come_from_their_own_global_bounds(
    seq_len: int, num_tokens: int, cp_size: int, interleave_size: int
) -> None:
    """vllm-project/vllm#46076, the kind: from bound to bound exactly the owner of the new key gains one."""
    bounds = np.maximum(np.arange(seq_len - num_tokens, seq_len + 1, dtype=np.int32), 0)
    shares = np.stack([interleave_lengths(bounds, cp_size, rank, interleave_size) for rank in range(cp_size)])
    for step, new_key in enumerate(bounds[:-1]):
        gained = np.zeros(cp_size, np.int32)
        if bounds[step + 1] > new_key:
            gained[oracle.kv_owner(int(new_key), cp_size, interleave_size)] = 1
        assert (shares[:, step + 1] - shares[:, step]).tolist() == gained.tolist()


@pytest.mark.parametrize(("interleave_size", "owned", "local"), [(1, [1, 5], [0, 2]), (4, [5], [1])])
def test_global_selections_are_filtered_before_the_local_table(
    interleave_size: int, owned: list[int], local: list[int]
) -> None:
    """vllm-project/vllm#54541: top-k 0, 1, 5, 8 on rank 1 of 2."""
    topk = int32(0, 1, 5, 8)
    mine = topk[interleave_owners(topk, 2, interleave_size) == 1]
    assert mine.tolist() == owned
    rows = interleave_local_indices(mine, 2, interleave_size)
    assert rows.tolist() == local
    table = np.array([[7, 3, 5]], np.int32)
    slots = slot_mapping(rows, np.zeros(len(rows), np.int32), table, 1)
    assert slots.tolist() == [[7, 3, 5][row] for row in local]


@given(st.lists(st.integers(-1, 40), max_size=12, unique=True), cp_sizes, st.integers(1, 5))
def test_every_selection_is_kept_by_exactly_one_rank(topk: list[int], cp_size: int, interleave_size: int) -> None:
    """vllm-project/vllm#54541, the kind: local rows stay inside the rank's keys, and -1 is nobody's."""
    selected = int32(*topk)
    owners = interleave_owners(selected, cp_size, interleave_size)
    rows = interleave_local_indices(selected, cp_size, interleave_size)
    kept = 0
    for rank in range(cp_size):
        share = int(interleave_lengths(int32(41), cp_size, rank, interleave_size)[0])
        mine = rows[owners == rank]
        assert ((mine >= 0) & (mine < share)).all()
        assert len(set(mine.tolist())) == len(mine)
        kept += len(mine)
    assert kept == sum(position >= 0 for position in topk)


def test_positions_become_local_rows_once() -> None:
    """xLLM-AI/xllm#1623: rank 0 of 2 stores positions 0, 2, 4, 6 in rows 0..3."""
    positions = np.arange(8, dtype=np.int32)
    mine = positions[interleave_owners(positions, 2, 1) == 0]
    assert mine.tolist() == [0, 2, 4, 6]
    assert interleave_local_indices(mine, 2, 1).tolist() == [0, 1, 2, 3]


@given(st.integers(1, 40), st.integers(2, 8), st.integers(1, 5))
def test_mapping_a_second_time_would_show(length: int, cp_size: int, interleave_size: int) -> None:
    """xLLM-AI/xllm#1623, the kind: once fills a rank's rows densely; twice makes rows collide as soon as one owns two
    runs, so a map that is applied twice cannot pass for one that is applied once."""
    positions = np.arange(length, dtype=np.int32)
    mine = positions[interleave_owners(positions, cp_size, interleave_size) == 0]
    once = interleave_local_indices(mine, cp_size, interleave_size)
    twice = interleave_local_indices(once, cp_size, interleave_size)
    assert once.tolist() == list(range(len(mine)))
    assert (len(set(twice.tolist())) < len(twice)) == (len(mine) > interleave_size)
