"""Partitions against tokens dealt out one at a time: who owns a row, in which order, and the way back."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.partition import (
    Partition,
    converted_rows,
    interleave_lengths,
    interleave_local_indices,
    interleave_owners,
    local_rows,
    local_token_indices,
    padded_restore_indices,
    partition_tokens,
    rank_pieces,
    restored_rows,
    round_robin_lengths,
)
from tests.oracles import splits as oracle
from tests.strategies import EVERY_SPLIT, Batch, Step, batches, cp_sizes, cuts, each, fewer, steps, token_rows

EQUAL_ROWS = ("contiguous", "zigzag_padded", "round_robin", "round_robin_page(3)")
CORNERS = {
    "no request": Batch([], []),
    "no token": Batch([0, 0], [0, 4]),
    "one token": Batch([1], [1]),
    "fewer tokens than ranks": Batch([2, 0, 1], [2, 3, 9]),
    "not divisible": Batch([5, 8, 1], [5, 9, 1]),
    "graph slots": Batch([3, 4, 4], [7, 0, 0]),
}


def partition_of(step: Step) -> Partition:
    return partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)


def gathered(rows: np.ndarray, partition: Partition) -> np.ndarray:
    """What a collective returns: every rank's rows, laid end to end."""
    return np.concatenate([local_rows(rows, partition, rank) for rank in range(len(partition.token_indices))])


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


# --- which rows a rank owns -------------------------------------------------------------------------------------------


def assert_rows_as_dealt(step: Step) -> None:
    want = oracle.owned_tokens(step.batch.query_lens, step.cp_size, step.split, step.num_input_tokens)
    for rank in range(step.cp_size):
        got = local_token_indices(step.batch.query_start_loc, step.cp_size, rank, **step.cut)
        assert_same(got, np.array(want[rank], np.int32))


@fewer(4)
@given(cuts())
def test_every_rank_holds_the_rows_dealt_to_it(every: list[Step]) -> None:
    for step in each(every):
        assert_rows_as_dealt(step)


@pytest.mark.parametrize("split", EVERY_SPLIT)
@pytest.mark.parametrize("batch", CORNERS.values(), ids=CORNERS)
def test_every_rank_holds_the_rows_dealt_to_it_at_the_corners(batch: Batch, split: str) -> None:
    for cp_size in range(1, 9):
        assert_rows_as_dealt(Step(batch, cp_size, split, None))
        if split in ("contiguous", "round_robin"):
            assert_rows_as_dealt(Step(batch, cp_size, split, batch.num_tokens + 9))


@fewer(4)
@given(cuts())
def test_a_partition_holds_the_rows_of_every_rank(every: list[Step]) -> None:
    for step in each(every):
        rows = partition_of(step).token_indices
        assert len(rows) == step.cp_size
        for rank in range(step.cp_size):
            assert_same(rows[rank], local_token_indices(step.batch.query_start_loc, step.cp_size, rank, **step.cut))


@fewer(4)
@given(cuts())
def test_every_real_token_is_owned_exactly_once(every: list[Step]) -> None:
    for step in each(every):
        owned = Counter(np.concatenate(partition_of(step).token_indices).tolist())
        owned.pop(-1, None)
        assert owned == Counter(range(step.batch.num_tokens))


@fewer(4)
@given(cuts())
def test_pieces_spell_out_the_rows(every: list[Step]) -> None:
    for step in each(every):
        query_start_loc = step.batch.query_start_loc
        for rank in range(step.cp_size):
            pieces = rank_pieces(query_start_loc, step.cp_size, rank, **step.cut)
            assert {field.dtype for field in pieces} == {np.dtype(np.int32)}
            rows: list[int] = []
            for request, start, end, num_rows in zip(*map(np.ndarray.tolist, pieces), strict=True):
                first = int(query_start_loc[request]) if request >= 0 else 0
                tokens = list(range(first + start, first + end))
                rows += tokens + [-1] * (num_rows - len(tokens))
            got = local_token_indices(query_start_loc, step.cp_size, rank, **step.cut)
            if step.split == "contiguous":  # the tail of the stream lies in no request, so in no piece
                assert (got[len(rows) :] == -1).all()
                got = got[: len(rows)]
            assert got.tolist() == rows


@fewer(4)
@given(cuts())
def test_a_piece_stays_inside_its_request(every: list[Step]) -> None:
    for step in each(every):
        for rank in range(step.cp_size):
            pieces = rank_pieces(step.batch.query_start_loc, step.cp_size, rank, **step.cut)
            for request, start, end, num_rows in zip(*map(np.ndarray.tolist, pieces), strict=True):
                length = step.batch.query_lens[request] if request >= 0 else 0
                assert 0 <= start <= end <= length
                assert end - start <= num_rows


@fewer(4)
@given(cuts())
def test_every_rank_has_the_same_number_of_pieces(every: list[Step]) -> None:
    """So an operator runs with equal shapes on all ranks, empty ones too."""
    for step in each(every):
        loc = step.batch.query_start_loc
        counts = {len(rank_pieces(loc, step.cp_size, rank, **step.cut).piece_starts) for rank in range(step.cp_size)}
        assert len(counts) == 1


@fewer(4)
@given(batches())
def test_one_rank_holds_every_token_in_order(batch: Batch) -> None:
    every_token = np.arange(batch.num_tokens, dtype=np.int32)
    for split in EVERY_SPLIT:
        partition = partition_tokens(batch.query_start_loc, 1, split=split)
        (rows,) = partition.token_indices
        assert_same(rows[rows >= 0], every_token)
        if split not in ("zigzag_padded", "round_robin_page(3)"):  # these two round a request up even on one rank
            assert_same(rows, every_token)
            assert_same(partition.restore_indices, every_token)


@pytest.mark.parametrize(("alias", "name"), [("in-seq-split", "zigzag"), ("round-robin-split", "round_robin")])
def test_an_alias_cuts_like_its_rule(alias: str, name: str) -> None:
    loc = np.array([0, 5, 12], np.int32)
    for got, want in zip(
        partition_tokens(loc, 3, split=alias).token_indices,
        partition_tokens(loc, 3, split=name).token_indices,
        strict=True,
    ):
        assert_same(got, want)


# --- how many rows a rank owns ----------------------------------------------------------------------------------------


@fewer(2)
@given(batches(), cp_sizes)
def test_rules_that_pad_give_equal_rows(batch: Batch, cp_size: int) -> None:
    for split in EQUAL_ROWS:
        rows = partition_tokens(batch.query_start_loc, cp_size, split=split).token_indices
        assert len({len(of_rank) for of_rank in rows}) == 1


@given(steps(split=st.sampled_from(("contiguous", "round_robin"))))
def test_a_padded_stream_is_cut_into_its_smallest_equal_shares(step: Step) -> None:
    count = step.batch.num_tokens if step.num_input_tokens is None else step.num_input_tokens
    for rows in partition_of(step).token_indices:
        assert len(rows) == oracle.smallest_share(count, step.cp_size)


@fewer(2)
@given(batches(), cp_sizes)
def test_rules_that_do_not_pad_have_no_pad_row(batch: Batch, cp_size: int) -> None:
    for split in ("contiguous_request", "zigzag", "zigzag_ceil"):
        rows = np.concatenate(partition_tokens(batch.query_start_loc, cp_size, split=split).token_indices)
        assert (rows >= 0).all()
        assert len(rows) == batch.num_tokens


@given(batches(), cp_sizes)
def test_zigzag_blocks_differ_by_at_most_one_token(batch: Batch, cp_size: int) -> None:
    pieces = [rank_pieces(batch.query_start_loc, cp_size, rank, split="zigzag") for rank in range(cp_size)]
    for request in range(len(batch.query_lens)):
        blocks = np.array([p.piece_ends - p.piece_starts for p in pieces])[:, 2 * request : 2 * request + 2]
        assert blocks.max() - blocks.min() <= 1
        assert np.ptp(blocks.sum(axis=1)) <= 1


@given(batches(), cp_sizes)
def test_zigzag_ceil_and_zigzag_padded_own_the_same_tokens(batch: Batch, cp_size: int) -> None:
    for rank in range(cp_size):
        padded = local_token_indices(batch.query_start_loc, cp_size, rank, split="zigzag_padded")
        short = local_token_indices(batch.query_start_loc, cp_size, rank, split="zigzag_ceil")
        assert_same(padded[padded >= 0], short)


# --- one rank of a round robin, request by request --------------------------------------------------------------------


def running_rule(query_lens: list[int], cp_size: int, cp_rank: int) -> tuple[list[int], list[int]]:
    """(how many tokens of each request a rank holds, the carry behind each), from one request to the next."""
    held, carries, carry = [], [], 0
    for length in query_lens:
        current = length + carry
        mine = current // cp_size + (current % cp_size > cp_rank)
        carry = current - mine * cp_size
        held.append(mine)
        carries.append(carry)
    return held, carries


def assert_lengths(query_lens: list[int], cp_size: int) -> list[list[int]]:
    """Every rank's lengths and carries follow the rule; what each rank holds of each request."""
    loc = np.cumsum([0, *query_lens]).astype(np.int32)
    of_ranks = []
    for rank in range(cp_size):
        held, carries = running_rule(query_lens, cp_size, rank)
        present = [request for request, count in enumerate(held) if count]
        got = round_robin_lengths(loc, cp_size, rank)
        assert_same(got.request_indices, np.array(present, np.int32))
        assert_same(got.query_lens, np.array([held[request] for request in present], np.int32))
        assert_same(got.carries, np.array(carries, np.int32))
        of_ranks.append(held)
    return of_ranks


@given(batches(), cp_sizes)
def test_round_robin_lengths_are_counted_in_the_partition(batch: Batch, cp_size: int) -> None:
    """Request by request, without listing tokens; requests of which a rank has none are left out."""
    held = assert_lengths(batch.query_lens, cp_size)
    loc = batch.query_start_loc
    partition = partition_tokens(loc, cp_size, split="round_robin")
    for rank, tokens in enumerate(partition.token_indices):
        counts = [int(((tokens >= first) & (tokens < stop)).sum()) for first, stop in itertools.pairwise(loc.tolist())]
        assert held[rank] == counts
        got = round_robin_lengths(loc, cp_size, rank)
        assert (got.query_lens >= 1).all()
        assert sum(got.query_lens.tolist()) == np.count_nonzero(tokens >= 0)
    assert [sum(counts) for counts in zip(*held, strict=True)] == batch.query_lens


def test_a_carry_is_negative_once_a_rank_has_had_its_turn() -> None:
    """Requests of 1 token: the first is rank 0's, which then has to wait for three others."""
    lengths = round_robin_lengths(np.arange(6, dtype=np.int32), 4, 0)
    assert lengths.carries.tolist() == [-3, -2, -1, 0, -3]
    assert lengths.request_indices.tolist() == [0, 4]
    assert round_robin_lengths(np.arange(6, dtype=np.int32), 4, 3).carries.tolist() == [1, 2, 3, 0, 1]
    assert assert_lengths([1] * 5, 4) == [[1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 7, 8, 4096])
@pytest.mark.parametrize(
    "query_lens",
    [[2**31 - 1], [2**31 - 2, 0, 1], [1, 2**30, 0, 2**30 - 2], [0, 2**31 - 4096, 4094]],
    ids=str,
)
def test_round_robin_lengths_at_the_end_of_int32(query_lens: list[int], cp_size: int) -> None:
    """No sum on the way there passes it."""
    loc = np.cumsum([0, *query_lens]).astype(np.int32)
    ranks = range(cp_size) if cp_size < 10 else (0, 1, cp_size // 2, cp_size - 2, cp_size - 1)
    for rank in ranks:
        held, carries = running_rule(query_lens, cp_size, rank)
        got = round_robin_lengths(loc, cp_size, rank)
        assert got.request_indices.tolist() == [request for request, count in enumerate(held) if count]
        assert got.query_lens.tolist() == [count for count in held if count]
        assert got.carries.tolist() == carries


# --- there and back ---------------------------------------------------------------------------------------------------


@fewer(4)
@given(cuts(), st.data())
def test_restoring_a_gather_gives_the_rows_back(every: list[Step], data: st.DataObject) -> None:
    for step in each(every):
        rows, partition = data.draw(token_rows(step.batch.num_tokens)), partition_of(step)
        assert partition.restore_indices.dtype == np.int32
        assert_same(restored_rows(gathered(rows, partition), partition), rows)


@fewer(4)
@given(cuts(), st.data())
def test_restoring_a_padded_gather_gives_the_rows_back(every: list[Step], data: st.DataObject) -> None:
    """Collectives that take equal shapes only: every rank sends as many rows as the largest."""
    for step in each(every):
        rows, partition = data.draw(token_rows(step.batch.num_tokens)), partition_of(step)
        most = max(map(len, partition.token_indices))
        sent = np.zeros((step.cp_size, most, *rows.shape[1:]), rows.dtype)
        for rank, own in enumerate(partition.token_indices):
            sent[rank, : len(own)] = local_rows(rows, partition, rank)
        restore = padded_restore_indices(partition)
        assert restore.dtype == np.int32
        assert_same(np.concatenate(sent)[restore], rows)


@fewer(4)
@given(cuts(), st.data())
def test_local_rows_are_the_owned_rows_and_zero_where_there_is_none(every: list[Step], data: st.DataObject) -> None:
    for step in each(every):
        rows, partition = data.draw(token_rows(step.batch.num_tokens)), partition_of(step)
        for rank, own in enumerate(partition.token_indices):
            want = np.zeros((len(own), *rows.shape[1:]), rows.dtype)
            for row, token in enumerate(own.tolist()):
                if token >= 0:
                    want[row] = rows[token]
            assert_same(local_rows(rows, partition, rank), want)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(EVERY_SPLIT, EVERY_SPLIT)))
@fewer(12)
@given(batches(), cp_sizes, cp_sizes, st.data())
def test_rows_convert_between_every_pair_of_rules(
    source: str, target: str, batch: Batch, from_size: int, to_size: int, data: st.DataObject
) -> None:
    rows = data.draw(token_rows(batch.num_tokens))
    first = partition_tokens(batch.query_start_loc, from_size, split=source)
    second = partition_tokens(batch.query_start_loc, to_size, split=target)
    there = converted_rows(gathered(rows, first), first, second)
    assert_same(there, gathered(rows, second))
    assert_same(converted_rows(there, second, first), gathered(rows, first))


@fewer(4)
@given(cuts(), st.data())
def test_what_stands_in_pad_rows_is_never_read(every: list[Step], data: st.DataObject) -> None:
    for step in each(every):
        rows, partition = data.draw(token_rows(step.batch.num_tokens)), partition_of(step)
        dirty = gathered(rows, partition)
        dirty[np.concatenate(partition.token_indices) < 0] = 99
        assert_same(restored_rows(dirty, partition), rows)
        assert_same(converted_rows(dirty, partition, partition), gathered(rows, partition))


# --- which rank stores a key in decode --------------------------------------------------------------------------------

keys = st.lists(st.one_of(st.just(-1), st.integers(0, 60)), max_size=12).map(lambda x: np.array(x, np.int32))
granules = st.integers(1, 9)


@given(keys, cp_sizes, granules)
def test_a_key_belongs_to_the_rank_whose_turn_it_is(positions: np.ndarray, cp_size: int, granule: int) -> None:
    want = [oracle.kv_owner(x, cp_size, granule) if x >= 0 else -1 for x in positions.tolist()]
    assert_same(interleave_owners(positions, cp_size, granule), np.array(want, np.int32))


@given(keys, cp_sizes, granules)
def test_a_key_stands_behind_the_earlier_keys_of_its_owner(positions: np.ndarray, cp_size: int, granule: int) -> None:
    want = [oracle.kv_local_index(x, cp_size, granule) if x >= 0 else -1 for x in positions.tolist()]
    assert_same(interleave_local_indices(positions, cp_size, granule), np.array(want, np.int32))


@given(st.lists(st.integers(0, 60), max_size=8), cp_sizes, granules)
def test_a_rank_stores_the_keys_that_counting_finds(lengths: list[int], cp_size: int, granule: int) -> None:
    bounds = np.array(lengths, np.int32)
    shares = [interleave_lengths(bounds, cp_size, rank, granule) for rank in range(cp_size)]
    for rank, share in enumerate(shares):
        assert_same(share, np.array([oracle.kv_local_length(n, cp_size, rank, granule) for n in lengths], np.int32))
    assert_same(sum(shares, np.zeros_like(bounds)), bounds)


@given(st.integers(0, 60), cp_sizes, granules)
def test_local_lengths_count_the_owned_local_indices(length: int, cp_size: int, granule: int) -> None:
    positions = np.arange(length, dtype=np.int32)
    owners = interleave_owners(positions, cp_size, granule)
    local = interleave_local_indices(positions, cp_size, granule)
    for rank in range(cp_size):
        share = int(interleave_lengths(np.array([length], np.int32), cp_size, rank, granule)[0])
        assert local[owners == rank].tolist() == list(range(share))


@given(st.lists(st.integers(-1, 60), min_size=6, max_size=6), cp_sizes, granules)
def test_selections_keep_their_shape(flat: list[int], cp_size: int, granule: int) -> None:
    """The rows of a top-k are mapped elementwise, -1 in place."""
    topk = np.array(flat, np.int32)
    for mapped in (interleave_owners, interleave_local_indices):
        assert_same(mapped(topk.reshape(2, 3), cp_size, granule), mapped(topk, cp_size, granule).reshape(2, 3))
