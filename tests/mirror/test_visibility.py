"""`dsacp_npu.visibility` gives what `dsacp_ref.visibility` gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mirror.common import (
    WAYS,
    Case,
    assert_mirrors,
    assert_refusal_mirrors,
    assert_runs_without_values,
    case,
    int32,
)

MAX = 2**31 - 1
POSITIONS = st.lists(st.one_of(st.integers(-2, 40), st.sampled_from([MAX - 1, MAX])), max_size=6).map(
    lambda row: int32(*row)
)
SIZES = st.one_of(st.integers(1, 9), st.sampled_from([128, MAX // 2, MAX]))
HERE = int32(-1, 0, 5, 7)

STATIC = [
    case("window_starts", HERE, 3),
    case("visible_entries", HERE, 4),
    case("window_mask", HERE, 9, 3),
    case("entry_mask", HERE, 2, 4),
    case("owned_entries", HERE[1:3], HERE[2:], 4),
    case("pool_row_starts", HERE[1:], 4, overlap=True),
    case("pool_row_starts", HERE[1:], 4, overlap=False),
]
REFUSED = [
    case("window_starts", HERE.astype(np.int64), 3),
    case("window_starts", HERE[:, None], 3),
    case("window_starts", HERE, 0),
    case("window_starts", int32(0, -2), 1),
    case("visible_entries", HERE, 2.0),
    case("visible_entries", int32(MAX), 1),
    case("window_mask", HERE, -1, 3),
    case("entry_mask", HERE, True, 3),
    case("owned_entries", HERE, HERE[:2], 4),
    case("owned_entries", int32(0, 5), int32(3, 4), 4),
    case("owned_entries", int32(0, -5), int32(3, 4), 4),
    case("owned_entries", int32(0), int32(3), 0),
    case("pool_row_starts", HERE, 4, overlap=True),
    case("pool_row_starts", HERE[1:], 4, overlap="yes"),
    case("pool_row_starts", HERE[1:], MAX, overlap=True),
]


@given(POSITIONS, SIZES)
def test_window_starts_mirrors(positions, window_size) -> None:
    assert_mirrors("visibility", "window_starts", positions, window_size)


@given(POSITIONS, SIZES)
def test_visible_entries_mirrors(positions, compress_ratio) -> None:
    assert_mirrors("visibility", "visible_entries", positions, compress_ratio)


@given(POSITIONS, st.integers(0, 12), SIZES)
def test_window_mask_mirrors(positions, num_keys, window_size) -> None:
    assert_mirrors("visibility", "window_mask", positions, num_keys, window_size)


@given(POSITIONS, st.integers(0, 12), SIZES)
def test_entry_mask_mirrors(positions, num_entries, compress_ratio) -> None:
    assert_mirrors("visibility", "entry_mask", positions, num_entries, compress_ratio)


@given(st.lists(st.tuples(st.integers(-1, 40), st.integers(0, 9)), max_size=5), SIZES)
def test_owned_entries_mirrors(runs, compress_ratio) -> None:
    starts, ends = int32(*(run[0] for run in runs)), int32(*(sum(run) for run in runs))
    assert_mirrors("visibility", "owned_entries", starts, ends, compress_ratio)


@given(POSITIONS, SIZES, st.booleans())
def test_pool_row_starts_mirrors(positions, compress_ratio, overlap) -> None:
    assert_mirrors("visibility", "pool_row_starts", positions, compress_ratio, overlap=overlap)


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.function)
def test_refusals_mirror(bad: Case) -> None:
    assert_refusal_mirrors("visibility", bad)


@pytest.mark.parametrize("call", STATIC, ids=lambda call: call.function)
@pytest.mark.parametrize("way", WAYS)
def test_runs_without_values(call: Case, way: str) -> None:
    assert_runs_without_values("visibility", way, call)
