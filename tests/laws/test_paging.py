"""Paged caches against a dict from slot to row: the table alone defines the order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.paging import block_table_rows, gathered_rows, scattered_rows, slot_mapping
from dsacp_ref.spec import ContractError
from tests.compare import assert_same
from tests.maths_strategies import int32, normal, paged, seeds
from tests.oracles import paging as oracle
from tests.strategies import read_only


@st.composite
def filled(draw, *, block_size=None):
    """(rng, rows of each request, Paged): empty requests, shuffled blocks, garbage beyond the used part."""
    rng = np.random.default_rng(draw(seeds))
    rows = [normal(rng, n, 2) for n in draw(st.lists(st.integers(0, 9), max_size=4))]
    return rng, rows, paged(rng, rows, block_size or draw(st.integers(1, 5)))


def wanted(rng: np.random.Generator, rows: list[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """(logical rows, requests) to look up, -1 among them, only rows that exist."""
    logical, requests = [], []
    for _ in range(count):
        request = int(rng.integers(-1, len(rows)))
        exists = request >= 0 and len(rows[request]) > 0
        requests.append(request)
        logical.append(int(rng.integers(-1, len(rows[request]))) if exists else -1)
    return int32(logical), int32(requests)


@given(filled(), st.integers(0, 8))
def test_a_slot_is_what_the_table_says(case, count):
    rng, rows, side = case
    logical, requests = wanted(rng, rows, count)
    block_size = side.cache.shape[1]
    want = [
        oracle.slot(side.table[b].tolist(), i, block_size) if i >= 0 else -1
        for i, b in zip(logical.tolist(), requests.tolist(), strict=True)
    ]
    assert_same(slot_mapping(logical, requests, side.table, block_size), int32(want))


@given(filled(), st.integers(0, 5), st.integers(0, 3))
def test_a_row_of_logical_rows_maps_one_by_one(case, count, width):
    rng, rows, side = case
    block_size = side.cache.shape[1]
    requests = int32([int(rng.integers(0, len(rows))) if rows else -1 for _ in range(count)])
    logical = int32(
        [[int(rng.integers(-1, max(len(rows[b]), 0))) if rows else -1 for _ in range(width)] for b in requests]
    )
    logical = logical.reshape(count, width)
    got = slot_mapping(logical, requests, side.table, block_size)
    columns = [slot_mapping(read_only(logical[:, j].copy()), requests, side.table, block_size) for j in range(width)]
    assert_same(got, np.stack(columns, axis=1) if width else np.empty((count, 0), np.int32))


@given(filled())
def test_rows_come_back_in_logical_order(case):
    _, rows, side = case
    block_size = side.cache.shape[1]
    flat = side.cache.reshape(-1, *side.cache.shape[2:])
    for request, mine in enumerate(rows):
        everything = int32(range(len(mine)))
        slots = slot_mapping(everything, int32([request] * len(mine)), side.table, block_size)
        assert_same(gathered_rows(side.cache, slots), mine.reshape(len(mine), *side.cache.shape[2:]))
        assert len(oracle.read(dict(enumerate(flat)), side.table[request], range(len(mine)), block_size)) == len(mine)


@given(filled())
def test_no_two_rows_share_a_slot(case):
    _, rows, side = case
    slots = [
        slot_mapping(int32(range(len(mine))), int32([b] * len(mine)), side.table, side.cache.shape[1]).tolist()
        for b, mine in enumerate(rows)
    ]
    flat = [slot for mine in slots for slot in mine]
    assert len(set(flat)) == len(flat)
    assert slots == side.slots


@given(filled(), filled())
def test_raw_and_compressed_caches_have_block_sizes_of_their_own(one, other):
    """The same logical row lies elsewhere in a cache of other blocks; each is right by its own table."""
    for _, rows, side in (one, other):
        for request, mine in enumerate(rows):
            slots = slot_mapping(int32(range(len(mine))), int32([request] * len(mine)), side.table, side.cache.shape[1])
            assert slots.tolist() == side.slots[request]


@given(filled(), seeds)
def test_garbage_beyond_the_used_part_is_never_read(case, seed):
    _, rows, side = case
    block_size = side.cache.shape[1]
    other = side.table.copy()
    for request, mine in enumerate(rows):
        used = -(-len(mine) // block_size)
        other[request, used:] = np.random.default_rng(seed).integers(-(2**31), 2**31, other.shape[1] - used)
    for request, mine in enumerate(rows):
        logical, requests = int32(range(len(mine))), int32([request] * len(mine))
        assert_same(
            slot_mapping(logical, requests, other, block_size), slot_mapping(logical, requests, side.table, block_size)
        )


@given(filled(), seeds)
def test_renaming_blocks_moves_rows_and_changes_nothing(case, seed):
    _, rows, side = case
    order = np.random.default_rng(seed).permutation(len(side.cache)).astype(np.int32)
    moved = np.empty_like(side.cache)
    moved[order] = side.cache
    table = side.table.copy()
    for request, mine in enumerate(rows):
        used = -(-len(mine) // side.cache.shape[1])
        table[request, :used] = order[table[request, :used]]
        logical, requests = int32(range(len(mine))), int32([request] * len(mine))
        slots = slot_mapping(logical, requests, table, side.cache.shape[1])
        assert_same(gathered_rows(moved, slots), mine.reshape(len(mine), *side.cache.shape[2:]))


@st.composite
def writes(draw):
    """(cache, rows, slots): some rows skipped, slots distinct."""
    rng = np.random.default_rng(draw(seeds))
    cache = normal(rng, draw(st.integers(1, 3)), draw(st.integers(1, 4)), 2)
    count = draw(st.integers(0, cache.shape[0] * cache.shape[1]))
    slots = rng.permutation(cache.shape[0] * cache.shape[1])[:count]
    slots = np.where(rng.random(count) < 0.3, -1, slots)
    return cache, normal(rng, count, 2), int32(slots)


@given(writes())
def test_writing_is_a_dict_update_without_the_skipped_rows(case):
    cache, rows, slots = case
    model = dict(enumerate(cache.reshape(-1, 2).tolist()))
    model.update({slot: row for slot, row in zip(slots.tolist(), rows.tolist(), strict=True) if slot != -1})
    got = scattered_rows(cache, rows, slots)
    assert_same(got, np.array(list(model.values())).reshape(cache.shape))


@given(writes())
def test_what_was_written_is_read_back(case):
    cache, rows, slots = case
    got = gathered_rows(scattered_rows(cache, rows, slots), slots)
    assert_same(got, np.where((slots >= 0)[:, None], rows, 0.0))


@given(writes())
def test_writing_no_row_changes_nothing(case):
    cache, rows, slots = case
    assert_same(scattered_rows(cache, rows, np.full_like(slots, -1)), cache)


@given(st.sampled_from([np.float32, np.float16, np.int8]), st.sampled_from([(), (3,), (1, 4)]))
def test_caches_of_any_dtype_and_row_shape_are_moved_bit_by_bit(dtype, row):
    cache = read_only(np.arange(6 * int(np.prod(row))).astype(dtype).reshape(3, 2, *row))
    slots = int32([5, -1, 0])
    got = gathered_rows(cache, slots)
    assert_same(got, np.stack([cache[2, 1], np.zeros(row, dtype), cache[0, 0]]))
    assert_same(scattered_rows(cache, got, slots), cache)


def test_slots_of_any_shape_are_gathered():
    cache = read_only(np.arange(6.0).reshape(3, 2))
    assert gathered_rows(cache, int32([[5, -1], [0, 1]])).tolist() == [[5.0, 0.0], [0.0, 1.0]]
    assert gathered_rows(cache, np.empty((2, 0), np.int32)).shape == (2, 0)


@given(writes(), st.sampled_from(["twice", "below", "beyond"]))
def test_a_refused_write_leaves_the_cache_unchanged(case, fault):
    cache, _, _ = case
    num_slots = cache.shape[0] * cache.shape[1]
    slots = {"twice": [0, 0], "below": [0, -2], "beyond": [0, num_slots]}[fault]
    before = cache.copy()
    with pytest.raises(ContractError, match="slots must be"):
        scattered_rows(cache, normal(np.random.default_rng(0), 2, 2), int32(slots))
    assert_same(cache, before)


@pytest.mark.parametrize("slot", [6, -2, 2**31 - 1, -(2**31)])
def test_a_read_outside_the_cache_is_refused(slot):
    with pytest.raises(ContractError, match=r"slots must be -1 or in \[0, 6\)"):
        gathered_rows(np.zeros((3, 2)), int32([0, slot]))


@given(filled())
def test_operator_rows_read_their_requests_table(case):
    rng, rows, side = case
    requests = int32(rng.integers(-1, len(rows), 5) if rows else [-1] * 5)
    got = block_table_rows(side.table, requests)
    pad = np.full(side.table.shape[1], -1, np.int32)
    want = [pad if b < 0 else side.table[b] for b in requests.tolist()]
    assert_same(got, np.stack(want).astype(np.int32))


def test_a_rank_without_tokens_of_a_request_touches_nothing_of_it():
    """vllm-ascend#11807: local lengths [128, 0, 128]; compact row 1 is request 2, whose table it must read."""
    table = int32([[0, 1], [2, 3], [4, 5]])
    assert_same(block_table_rows(table, int32([0, 2])), int32([[0, 1], [4, 5]]))
    positions = int32([*range(128), *range(128)])
    slots = slot_mapping(positions, int32([0] * 128 + [2] * 128), table, 64)
    assert set((slots // 64).tolist()) == {0, 1, 4, 5}


def test_a_dummy_batch_after_a_finished_request_writes_nothing():
    """vllm-ascend#9816: no actual token, four padded ones."""
    cache = normal(np.random.default_rng(0), 4, 2, 3)
    slots = slot_mapping(int32([-1] * 4), int32([-1] * 4), np.zeros((2, 3), np.int32), 2)
    assert slots.tolist() == [-1] * 4
    assert_same(scattered_rows(cache, normal(np.random.default_rng(1), 4, 3), slots), cache)


def test_a_padded_row_of_the_table_is_null_in_every_column():
    """vllm#39643: only column 0 was cleared."""
    table = int32(np.arange(24).reshape(6, 4))
    assert_same(block_table_rows(table, int32([0, 1, -1, -1]))[2:], np.full((2, 4), -1, np.int32))


def test_a_slot_stays_an_exact_int32_at_the_top_of_the_range():
    top = 2**31 - 1
    assert slot_mapping(int32([127]), int32([0]), int32([[top // 128 - 1]]), 128).tolist() == [(top // 128) * 128 - 1]
    with pytest.raises(ContractError, match=r"slots below 2\*\*31"):
        slot_mapping(int32([0]), int32([0]), int32([[top // 128 + 1]]), 128)
