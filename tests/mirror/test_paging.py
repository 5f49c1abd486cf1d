"""`dsacp_npu.paging` gives what `dsacp_ref.paging` gives."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import dsacp_npu.paging
from dsacp_ref import paging as ref
from tests.compare import assert_same
from tests.maths_strategies import normal, paged, seeds
from tests.mirror.common import (
    WAYS,
    Case,
    assert_mirrors,
    assert_refusal_mirrors,
    assert_runs_without_values,
    case,
    int32,
    on_device,
    outcome,
    tensors_of,
    to_torch,
)

ON_A_DEVICE = "dsacp_npu._tensors.readable"
MOST = 2**31 - 1


def unreadable(wanted: bool):
    """Values as on a device, where no function may look at them."""
    return patch(ON_A_DEVICE, lambda tensor: not wanted)


@st.composite
def lookups(draw) -> tuple[np.ndarray, ...]:
    """(logical rows of any shape, requests, block table, block size): garbage beyond the used part, -1 anywhere."""
    rng = np.random.default_rng(draw(seeds))
    lengths = draw(st.lists(st.integers(0, 9), max_size=4))
    side = paged(rng, [normal(rng, n, 2) for n in lengths], draw(st.integers(1, 5)))
    count, shape = draw(st.integers(0, 6)), draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
    requests = rng.integers(-1, len(lengths), count).astype(np.int32)
    logical = np.full((count, *shape), -1, np.int32)
    for row, request in enumerate(requests.tolist()):
        if request >= 0 and lengths[request]:
            logical[row] = rng.integers(-1, lengths[request], shape)
    return logical, requests, side.table, side.cache.shape[1]


@given(lookups(), st.booleans())
def test_slot_mapping_mirrors(lookup, on_a_device) -> None:
    with unreadable(on_a_device):
        assert_mirrors("paging", "slot_mapping", *lookup)


integers = st.one_of(st.integers(-3, 7), st.sampled_from([MOST, -MOST - 1, 2**30]))


@given(
    st.lists(st.tuples(integers, integers), max_size=4),
    st.integers(0, 2),
    st.lists(integers, min_size=6, max_size=6),
    st.one_of(st.integers(-1, 5), st.sampled_from([2**30, MOST])),
    st.booleans(),
)
def test_slot_mapping_mirrors_on_any_integers(rows, num_reqs, blocks, block_size, in_pairs) -> None:
    logical, requests = int32(*(row[0] for row in rows)), int32(*(row[1] for row in rows))
    table = int32(*blocks[: 3 * num_reqs]).reshape(num_reqs, 3)
    logical = np.stack([np.full_like(logical, -1), logical], axis=1) if in_pairs else logical
    assert_mirrors("paging", "slot_mapping", logical, requests, table, block_size)


@st.composite
def writes(draw) -> tuple[np.ndarray, ...]:
    """(cache, rows, slots): caches of any dtype and row shape, without slots too; rows that are not to be written."""
    rng = np.random.default_rng(draw(seeds))
    shape = draw(st.integers(0, 3)), draw(st.integers(0, 4)), *draw(st.sampled_from([(), (3,), (1, 2), (0,)]))
    dtype = draw(st.sampled_from([np.float64, np.float32, np.float16, np.int8, np.int32, np.bool_]))
    skipped = draw(st.sampled_from([0.0, 0.3, 1.0]))
    num_slots = shape[0] * shape[1]
    slots = rng.permutation(num_slots)[: draw(st.integers(0, num_slots))]
    slots = np.concatenate([np.where(rng.random(len(slots)) < skipped, -1, slots), [-1] * draw(st.integers(0, 2))])
    slots = rng.permutation(slots).astype(np.int32)
    cache = rng.integers(-99, 99, shape).astype(dtype)
    rows = rng.integers(-99, 99, (len(slots), *shape[2:])).astype(dtype)
    if cache.dtype.kind == "f":
        cache[rng.random(shape) < 0.2] = np.nan
        rows[slots < 0] = np.nan
    return cache, rows, slots


@given(writes(), st.booleans(), st.booleans())
def test_gathered_rows_mirrors(write, on_a_device, in_pairs) -> None:
    """The NaN of slot 0 does not come through a slot of -1."""
    cache, _, slots = write
    with unreadable(on_a_device):
        assert_mirrors("paging", "gathered_rows", cache, slots[:, None] if in_pairs else slots)


@given(writes(), st.booleans())
def test_scattered_rows_mirrors(write, on_a_device) -> None:
    with unreadable(on_a_device):
        assert_mirrors("paging", "scattered_rows", *write)


@given(writes(), st.lists(st.integers(-3, 13), min_size=40, max_size=40))
def test_scattered_rows_mirrors_on_any_slots(write, slots) -> None:
    cache, rows, _ = write
    assert_mirrors("paging", "scattered_rows", cache, rows, int32(*slots[: len(rows)]))


@given(writes(), st.booleans(), st.booleans())
def test_scattered_rows_in_place(write, on_a_device, strided) -> None:
    """The pure twin's result, in the cache's own memory, also where its slots do not lie side by side."""
    cache, rows, slots = to_torch(write)
    mine = torch.stack([cache, cache], dim=-1)[..., 0] if strided else cache.clone()
    with unreadable(on_a_device):
        want = dsacp_npu.paging.scattered_rows(cache, rows, slots)
        assert dsacp_npu.paging.scattered_rows_(mine, rows, slots) is mine
    assert_same(mine, want)
    assert (rows._version, slots._version) == (0, 0)


def test_rows_may_be_the_caches_own() -> None:
    cache, slots = torch.arange(6.0).reshape(3, 2), torch.tensor([1, 2, 3, 4, 5, 0], dtype=torch.int32)
    dsacp_npu.paging.scattered_rows_(cache, cache.flatten(), slots)
    assert cache.flatten().tolist() == [5, 0, 1, 2, 3, 4]


@given(st.lists(st.integers(-2, 4), max_size=5), st.integers(0, 3), st.integers(0, 3))
def test_block_table_rows_mirrors(requests, num_reqs, max_blocks) -> None:
    table = np.arange(num_reqs * max_blocks, dtype=np.int32).reshape(num_reqs, max_blocks)
    assert_mirrors("paging", "block_table_rows", table, int32(*requests))
    with unreadable(True):
        known = int32(*(request for request in requests if -1 <= request < num_reqs))
        assert_mirrors("paging", "block_table_rows", table, known)


TABLE, CACHE = np.array([[4, 0, 2], [3, -1, -1]], np.int32), np.arange(30.0).reshape(5, 2, 3)
ROWS = CACHE[0] + 0.5

STATIC = [
    case("slot_mapping", int32(4, -1), int32(0, -1), TABLE, 2),
    case("slot_mapping", int32(4, -1, 1, 0).reshape(2, 2), int32(0, 1), TABLE, 2),
    case("slot_mapping", int32(-1), int32(-1), TABLE[:0], 2),
    case("gathered_rows", CACHE, int32(9, -1)),
    case("gathered_rows", CACHE[:0], int32(-1)),
    case("scattered_rows", CACHE, ROWS, int32(9, -1)),
    case("scattered_rows", CACHE, ROWS, int32(-1, -1)),
    case("scattered_rows", CACHE, ROWS[:0], int32()),
    case("block_table_rows", TABLE, int32(1, -1)),
    case("block_table_rows", TABLE[:0], int32(-1)),
]

REFUSED = [
    case("slot_mapping", int32(4), int32(0), TABLE, 0),
    case("slot_mapping", int32(4), int32(0), TABLE, 2.0),
    case("slot_mapping", int32(4), int32(0), TABLE[0], 2),
    case("slot_mapping", int32(4), TABLE, TABLE, 2),
    case("slot_mapping", int32(4, 4), int32(0), TABLE, 2),
    case("slot_mapping", [4], int32(0), TABLE, 2),
    case("slot_mapping", int32(4).astype(np.int64), int32(0), TABLE, 2),
    case("slot_mapping", int32(4, -2), int32(0, -1), TABLE, 2),
    case("slot_mapping", int32(-1, 6), int32(-1, 0), TABLE, 2),
    case("slot_mapping", int32(4), int32(2), TABLE, 2),
    case("slot_mapping", int32(4), int32(-1), TABLE, 2),
    case("slot_mapping", int32(0), int32(0), TABLE[:0], 2),
    case("slot_mapping", int32(-1, 0, 2, 4).reshape(2, 2), int32(0, 1), TABLE, 2),
    case("slot_mapping", int32(0), int32(0), TABLE, MOST),
    case("gathered_rows", CACHE[0, 0], int32(0)),
    case("gathered_rows", [CACHE], int32(0)),
    case("gathered_rows", CACHE, [0]),
    case("gathered_rows", CACHE, np.zeros(2, np.int64)),
    case("gathered_rows", CACHE, int32(0, 10, -2)),
    case("gathered_rows", CACHE[:0], int32(-1, 0)),
    case("scattered_rows", CACHE[0, 0], ROWS, int32(0, 1)),
    case("scattered_rows", CACHE, ROWS, int32(0, 1).reshape(1, 2)),
    case("scattered_rows", CACHE, ROWS[:1], int32(0, 1)),
    case("scattered_rows", CACHE, ROWS.astype(np.float32), int32(0, 1)),
    case("scattered_rows", CACHE, ROWS.tolist(), int32(0, 1)),
    case("scattered_rows", CACHE, ROWS, int32(9, -2)),
    case("scattered_rows", CACHE, ROWS, int32(9, 10)),
    case("scattered_rows", CACHE, ROWS, int32(9, 9)),
    case("block_table_rows", TABLE[0], int32(0)),
    case("block_table_rows", TABLE, TABLE),
    case("block_table_rows", TABLE, int32(0, 2)),
    case("block_table_rows", TABLE, int32(-2)),
]


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.function)
def test_refusals_mirror(bad: Case) -> None:
    assert_refusal_mirrors("paging", bad)


@pytest.mark.parametrize("name", ["gathered_rows", "scattered_rows"])
def test_a_numpy_cache_is_refused(name: str) -> None:
    args: tuple[Any, ...] = (CACHE, *to_torch((ROWS, int32(0, 1))))
    args = args if name == "scattered_rows" else (CACHE, args[2])
    text, _ = outcome(lambda: getattr(dsacp_npu.paging, name)(*args))
    assert text == "cache must be a torch tensor, got ndarray; dsacp_ref is for numpy arrays"


@pytest.mark.parametrize("bad", [bad for bad in REFUSED if bad.function == "scattered_rows"], ids=lambda _: "")
def test_a_refused_write_leaves_the_cache_as_it_was(bad: Case) -> None:
    args = to_torch(bad.args)
    before = [(tensor._version, tensor.clone()) for tensor in tensors_of(args)]
    got, _ = outcome(lambda: dsacp_npu.paging.scattered_rows_(*args))
    want, _ = outcome(lambda: ref.scattered_rows(*bad.args))
    assert got == want != ""
    for tensor, (version, copy) in zip(tensors_of(args), before, strict=True):
        assert tensor._version == version
        assert_same(tensor, copy)


@pytest.mark.parametrize("call", STATIC, ids=lambda call: call.function)
@pytest.mark.parametrize("way", WAYS)
def test_runs_without_values(call: Case, way: str) -> None:
    assert_runs_without_values("paging", way, call)


@pytest.mark.parametrize("way", WAYS)
def test_in_place_runs_without_values(way: str) -> None:
    """As above, with a cache of its own, since it is written to."""
    args, write = to_torch((CACHE, ROWS, int32(-1, 9))), dsacp_npu.paging.scattered_rows_
    want = dsacp_npu.paging.scattered_rows(*args)
    if way == "compiled":
        torch._dynamo.reset()
        assert_same(torch.compile(write, fullgraph=True, backend="aot_eager", dynamic=False)(*args), want)
        assert_same(args[0], want)
        return
    with FakeTensorMode() if way.startswith("fake") else nullcontext():
        got = write(*on_device(args, "cpu" if way == "fake" else "meta"))
    assert (got.dtype, got.shape) == (want.dtype, want.shape)


def test_zeroed_rows_leave_no_nan_in_gradients() -> None:
    cache = torch.full((1, 2, 3), torch.nan, requires_grad=True)
    dsacp_npu.paging.gathered_rows(cache, torch.tensor([-1, -1], dtype=torch.int32)).sum().backward()
    assert torch.isfinite(cache.grad).all()
