"""Public faults of 32-bit arithmetic: large counts are computed right or refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.extents import build_cp_local_metadata, local_extents, query_positions, token_positions
from dsacp_ref.paging import slot_mapping
from dsacp_ref.partition import interleave_lengths, interleave_local_indices, interleave_owners, rank_pieces
from dsacp_ref.spec import ContractError
from dsacp_ref.visibility import visible_entries, window_starts
from tests.oracles import splits as oracle
from tests.strategies import cp_sizes, int32

INT32_MAX = 2**31 - 1


def test_offsets_beyond_int32_are_refused() -> None:
    """NVIDIA-NeMo/Automodel#3802: width 46341, element (46340, 46340) does not fit, the last of row 46339 does."""
    rows, request = int32(46340), int32(0)
    assert 46340 * 46341 + 46340 == 2_147_488_280 > INT32_MAX
    with pytest.raises(ContractError, match=r"^block_table must give slots below 2\*\*31, got 46340;"):
        slot_mapping(rows, request, np.repeat(np.int32([[46340]]), 2, axis=1), 46341)
    got = slot_mapping(rows, request, np.repeat(np.int32([[46339]]), 2, axis=1), 46341)
    assert got.tolist() == [46339 * 46341 + 46340]


def large(cp_size: int) -> st.SearchStrategy[int]:
    """Token counts up to the largest that a group can cut, which is drawn often."""
    most = INT32_MAX - 2 * cp_size
    return st.one_of(st.integers(most - 40, most), st.integers(0, most))


@given(st.integers(0, 2), cp_sizes, st.data())
@pytest.mark.parametrize("split", ["contiguous", "contiguous_request", "zigzag", "zigzag_ceil", "zigzag_padded"])
def test_large_counts_are_right_in_every_piece(split: str, prefix: int, cp_size: int, data: st.DataObject) -> None:
    """NVIDIA-NeMo/Automodel#3802, the kind: one request of up to 2**31 tokens, against exact integers."""
    query_len = data.draw(large(cp_size))
    blocks = 2 * cp_size if split.startswith("zigzag") else cp_size
    share, longer = divmod(query_len, blocks) if split == "zigzag" else (-(-query_len // blocks), 0)
    rank = data.draw(st.integers(0, cp_size - 1))
    mine = (rank, blocks - 1 - rank) if split.startswith("zigzag") else (rank,)
    starts = [min(share * block + min(block, longer), query_len) for block in mine]
    ends = [min(share * (block + 1) + min(block + 1, longer), query_len) for block in mine]
    local = local_extents(int32(0, query_len), int32(query_len + prefix), cp_size, rank, split=split)
    assert np.diff(local.cu_seqlens_q).tolist() == [end - start for start, end in zip(starts, ends, strict=True)]
    want = [prefix + end if end > start else 0 for start, end in zip(starts, ends, strict=True)]
    assert local.seqused_kv.tolist() == want


@given(st.integers(2**28, INT32_MAX), cp_sizes, st.data())
def test_large_pages_are_right(page_size: int, cp_size: int, data: st.DataObject) -> None:
    """NVIDIA-NeMo/Automodel#3802: the end of a page may lie beyond int32."""
    query_len = data.draw(large(cp_size))
    rank = data.draw(st.integers(0, cp_size - 1))
    pieces = rank_pieces(int32(0, query_len), cp_size, rank, split=f"round_robin_page({page_size})")
    turns = oracle.smallest_share(oracle.smallest_share(query_len, page_size), cp_size)
    pages = [turn * cp_size + rank for turn in range(turns)]
    assert pieces.piece_starts.tolist() == [min(page * page_size, query_len) for page in pages]
    assert pieces.piece_ends.tolist() == [min((page + 1) * page_size, query_len) for page in pages]


@given(st.integers(0, INT32_MAX - 1), st.integers(1, INT32_MAX), st.integers(1, INT32_MAX))
def test_large_positions_see_the_right_rows(position: int, window_size: int, compress_ratio: int) -> None:
    """NVIDIA-NeMo/Automodel#3802."""
    assert window_starts(int32(position), window_size).tolist() == [max(0, position - window_size + 1)]
    assert visible_entries(int32(position), compress_ratio).tolist() == [(position + 1) // compress_ratio]
    assert query_positions(int32(0, 1), int32(position + 1), num_rows=1).tolist() == [position]
    assert token_positions(int32(0), int32(0, 1), int32(position + 1)).tolist() == [position]


@given(st.integers(0, INT32_MAX), cp_sizes, st.data())
def test_large_positions_are_spread_right(position: int, cp_size: int, data: st.DataObject) -> None:
    """NVIDIA-NeMo/Automodel#3802: any granule that fits in 32 bits with its group."""
    granule = data.draw(st.integers(1, INT32_MAX // cp_size))
    turn, place = divmod(position, granule)
    assert interleave_owners(int32(position), cp_size, granule).tolist() == [turn % cp_size]
    local = turn // cp_size * granule + place
    assert interleave_local_indices(int32(position), cp_size, granule).tolist() == [local]
    shares = [int(interleave_lengths(int32(position), cp_size, rank, granule)[0]) for rank in range(cp_size)]
    assert sum(shares) == position
    assert shares[turn % cp_size] == local


def test_packed_key_offsets_beyond_int32_are_refused() -> None:
    """NVIDIA-NeMo/Automodel#3802: two extents of 2**30 sum to 2**31; one token less fits."""
    with pytest.raises(ContractError, match=re.escape("local_seq_lens must sum to less than 2**31, got 2147483648")):
        build_cp_local_metadata(int32(0, 1, 2), int32(2**30, 2**30), 1, 0, None, None)
    fits = build_cp_local_metadata(int32(0, 1, 2), int32(2**30, 2**30 - 1), 1, 0, None, None)
    assert fits.local_kv_start_loc[-1] == INT32_MAX
