"""Visibility against sets of positions: what a query sees, and what a rank needs to make its share of the entries."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.visibility import (
    entry_mask,
    owned_entries,
    pool_row_starts,
    visible_entries,
    window_mask,
    window_starts,
)
from tests.oracles import attention as oracle
from tests.strategies import int32

ratios = st.one_of(st.sampled_from([1, 2, 4, 128]), st.integers(1, 9))
windows = st.one_of(st.sampled_from([1, 2, 128]), st.integers(1, 12))
place = st.one_of(st.integers(0, 40), st.sampled_from([126, 127, 128, 129, 255, 256]))
positions_lists = st.lists(st.one_of(st.just(-1), place), max_size=8)


def needed_rows(position: int, ratio: int, *, overlap: bool) -> set[int]:
    """Raw rows before ``position`` that the entries completed at or after it pool over."""
    rows = set()
    for entry in range(position // ratio + 3):  # entries further on need nothing from the past
        last = ratio * entry + ratio - 1
        first = ratio * (entry - 1) if overlap else ratio * entry
        if last >= position:
            rows |= {row for row in range(max(first, 0), last + 1) if row < position}
    return rows


# --- what a query sees ------------------------------------------------------------------------------------------------


@given(positions_lists, windows)
def test_the_window_starts_at_the_first_visible_key(positions: list[int], window_size: int) -> None:
    got = window_starts(int32(*positions), window_size)
    assert got.dtype == np.int32
    assert got.tolist() == [min(oracle.window_positions(p, window_size), default=0) for p in positions]


@given(positions_lists, windows, st.integers(0, 60))
def test_the_window_mask_marks_the_visible_keys(positions: list[int], window_size: int, num_keys: int) -> None:
    mask = window_mask(int32(*positions), num_keys, window_size)
    assert mask.dtype == np.bool_
    assert mask.shape == (len(positions), num_keys)
    for row, position in enumerate(positions):
        seen = [key for key in oracle.window_positions(position, window_size) if key < num_keys]
        assert np.flatnonzero(mask[row]).tolist() == seen


@given(positions_lists, ratios)
def test_visible_entries_are_the_first_n(positions: list[int], compress_ratio: int) -> None:
    counts = visible_entries(int32(*positions), compress_ratio)
    assert counts.dtype == np.int32
    for position, count in zip(positions, counts.tolist(), strict=True):
        assert oracle.visible_entries(position, compress_ratio) == list(range(count))


@given(positions_lists, ratios, st.integers(0, 20))
def test_the_entry_mask_marks_the_visible_entries(positions: list[int], compress_ratio: int, num_entries: int) -> None:
    mask = entry_mask(int32(*positions), num_entries, compress_ratio)
    assert mask.dtype == np.bool_
    assert mask.shape == (len(positions), num_entries)
    for row, position in enumerate(positions):
        seen = [entry for entry in oracle.visible_entries(position, compress_ratio) if entry < num_entries]
        assert np.flatnonzero(mask[row]).tolist() == seen


@given(place, windows, ratios)
def test_a_query_sees_itself_in_the_window(position: int, window_size: int, compress_ratio: int) -> None:
    assert window_starts(int32(position), window_size)[0] <= position
    assert entry_mask(int32(position), position + 1, 1).all()


@given(place, ratios)
def test_an_entry_appears_with_its_last_token(position: int, compress_ratio: int) -> None:
    before, after = visible_entries(int32(position - 1, position), compress_ratio).tolist()
    assert after - before == ((position + 1) % compress_ratio == 0)


# --- who makes an entry -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), ratios)
def test_runs_that_tile_a_request_own_every_complete_entry_once(lengths: list[int], compress_ratio: int) -> None:
    ends = np.cumsum(lengths)
    first, stop = owned_entries(int32(*(ends - lengths).tolist()), int32(*ends.tolist()), compress_ratio)
    assert first.dtype == stop.dtype == np.int32
    owned = [entry for begin, end in zip(first.tolist(), stop.tolist(), strict=True) for entry in range(begin, end)]
    assert owned == oracle.visible_entries(int(ends[-1]) - 1, compress_ratio)


@given(st.integers(0, 40), st.integers(0, 20), ratios)
def test_an_entry_belongs_to_the_run_of_its_last_token(start: int, length: int, compress_ratio: int) -> None:
    first, stop = owned_entries(int32(start), int32(start + length), compress_ratio)
    last_tokens = {compress_ratio * entry + compress_ratio - 1: entry for entry in range(61)}
    inside = [entry for last, entry in last_tokens.items() if start <= last < start + length]
    assert list(range(int(first[0]), int(stop[0]))) == inside


@given(place, ratios, st.booleans())
def test_pooling_needs_the_rows_from_the_start_and_none_before(position: int, ratio: int, overlap: bool) -> None:
    start = int(pool_row_starts(int32(position), ratio, overlap=overlap)[0])
    needed = needed_rows(position, ratio, overlap=overlap)
    assert needed <= set(range(start, position))
    assert start in needed or start == position


@given(st.lists(place, max_size=8), ratios, st.booleans())
def test_pooling_reaches_back_less_than_the_windows_of_one_entry(
    positions: list[int], ratio: int, overlap: bool
) -> None:
    starts = pool_row_starts(int32(*positions), ratio, overlap=overlap)
    assert starts.dtype == np.int32
    for position, start in zip(positions, starts.tolist(), strict=True):
        assert 0 <= start <= position
        assert position - start <= (2 * ratio - 1 if overlap else ratio - 1)


def test_the_bounds_on_pool_rows_are_reached() -> None:
    assert pool_row_starts(int32(7), 4, overlap=True).tolist() == [0]
    assert pool_row_starts(int32(7), 4, overlap=False).tolist() == [4]
