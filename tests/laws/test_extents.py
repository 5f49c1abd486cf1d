"""Operator rows against tokens walked one at a time: an operator that aligns right must land on the true positions."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.extents import (
    CPLocalMetadata,
    LocalExtents,
    build_cp_local_metadata,
    local_extents,
    query_positions,
    query_rows,
    token_positions,
    token_requests,
)
from tests.oracles import extents as oracle
from tests.oracles import splits
from tests.strategies import Batch, Step, batches, cp_sizes, cuts, each, fewer, int32, read_only, steps

EMPTY_EXTENTS = ("zero", "prefix")
empty_extents = st.sampled_from(EMPTY_EXTENTS)
WAYS = ({"empty_extent": "zero"}, {"empty_extent": "prefix"}, {"causal": False})
PER_REQUEST = ("contiguous_request", "zigzag", "zigzag_ceil", "zigzag_padded", "round_robin_page(2)")
NINE_QUERIES = int32(0, 1, 3, 6, 10, 15, 21, 28, 36, 45)
NINE_KEYS = int32(*range(1, 10))


def extents_of(step: Step, cp_rank: int, **how: object) -> LocalExtents:
    return local_extents(step.batch.query_start_loc, step.batch.key_lens, step.cp_size, cp_rank, **step.cut, **how)


def every_rank(step: Step, **how: object) -> list[LocalExtents]:
    return [extents_of(step, rank, **how) for rank in range(step.cp_size)]


def real_tokens(step: Step) -> list[list[int]]:
    """Each rank's real tokens in local order."""
    owned = splits.owned_tokens(step.batch.query_lens, step.cp_size, step.split, step.num_input_tokens)
    return [[token for token in rows if token >= 0] for rows in owned]


def place(batch: Batch, token: int) -> tuple[int, int]:
    """(request, position), -1 where there is none."""
    request, position = oracle.token_place(batch.query_lens, batch.seq_lens, token)
    return (-1 if request is None else request, -1 if position is None else position)


def ends_by_walking(q_len: int, cp_size: int, split: str) -> list[list[int]]:
    """For each rank, the queries of one request that lie before the end of each of the rank's rows."""
    if split == "contiguous_request":
        share = splits.smallest_share(q_len, cp_size)
        return [[sum(offset < share * (rank + 1) for offset in range(q_len))] for rank in range(cp_size)]
    if split.startswith("zigzag"):
        sizes = splits.zigzag_block_sizes if split == "zigzag" else splits.zigzag_ceil_block_sizes
        ends = list(accumulate(sizes(q_len, cp_size)))
        return [[ends[rank], ends[2 * cp_size - 1 - rank]] for rank in range(cp_size)]
    turns = splits.smallest_share(splits.smallest_share(q_len, 2), cp_size)
    pages = [[turn * cp_size + rank for turn in range(turns)] for rank in range(cp_size)]
    return [[sum(offset < 2 * page + 2 for offset in range(q_len)) for page in of_rank] for of_rank in pages]


# --- the alignment rule -----------------------------------------------------------------------------------------------


@fewer(4)
@given(cuts(), empty_extents)
def test_right_aligned_queries_stand_at_their_true_positions(every: list[Step], empty_extent: str) -> None:
    """The whole alignment rule: what the operator believes of each local query is what the request says."""
    for step in each(every):
        for local, tokens in zip(every_rank(step, empty_extent=empty_extent), real_tokens(step), strict=True):
            got = query_positions(local.cu_seqlens_q, local.seqused_kv, num_rows=len(tokens))
            assert got.dtype == np.int32
            assert got.tolist() == [place(step.batch, token)[1] for token in tokens]


@fewer(4)
@given(cuts(), empty_extents)
def test_a_row_reads_the_request_of_its_queries(every: list[Step], empty_extent: str) -> None:
    for step in each(every):
        for local, tokens in zip(every_rank(step, empty_extent=empty_extent), real_tokens(step), strict=True):
            rows = query_rows(local.cu_seqlens_q, num_rows=len(tokens))
            assert local.request_indices[rows].tolist() == [place(step.batch, token)[0] for token in tokens]


@fewer(4)
@given(cuts())
def test_a_row_sees_keys_up_to_its_last_query_and_no_more(every: list[Step]) -> None:
    for step in each(every):
        for local, tokens in zip(every_rank(step), real_tokens(step), strict=True):
            want = [
                place(step.batch, tokens[end - 1])[1] + 1 if end > start else 0
                for start, end in zip(local.cu_seqlens_q[:-1].tolist(), local.cu_seqlens_q[1:].tolist(), strict=True)
            ]
            assert local.seqused_kv.tolist() == want


@fewer(4)
@given(cuts(), st.sampled_from(WAYS))
def test_extents_are_int32_and_their_shapes_agree(every: list[Step], way: dict[str, object]) -> None:
    for step in each(every):
        for local in every_rank(step, **way):
            assert {field.dtype for field in local} == {np.dtype(np.int32)}
            assert local.cu_seqlens_q.shape == (len(local.seqused_kv) + 1,)
            assert local.request_indices.shape == local.seqused_kv.shape


@pytest.mark.parametrize("way", WAYS, ids=str)
@fewer(4)
@given(cuts())
def test_no_extent_is_negative_or_longer_than_its_request(way: dict[str, object], every: list[Step]) -> None:
    """So a graph slot, which has no keys, and a pad row, which has no request, read nothing."""
    for step in each(every):
        for local in every_rank(step, **way):
            for request, extent in zip(local.request_indices.tolist(), local.seqused_kv.tolist(), strict=True):
                keys = step.batch.seq_lens[request] if request >= 0 else 0
                assert 0 <= extent <= keys


@fewer(4)
@given(cuts())
def test_query_lengths_sum_to_the_share_of_the_rank(every: list[Step]) -> None:
    for step in each(every):
        for local, tokens in zip(every_rank(step), real_tokens(step), strict=True):
            assert local.cu_seqlens_q[0] == 0
            assert (np.diff(local.cu_seqlens_q) >= 0).all()
            assert local.cu_seqlens_q[-1] == len(tokens)


@fewer(4)
@given(cuts())
def test_every_rank_has_the_same_number_of_operator_rows(every: list[Step]) -> None:
    for step in each(every):
        assert len({len(local.seqused_kv) for local in every_rank(step)}) == 1


@given(steps(split=st.just("contiguous")))
def test_contiguous_keeps_one_row_a_request(step: Step) -> None:
    for local in every_rank(step):
        assert local.request_indices.tolist() == list(range(len(step.batch.query_lens)))


@given(batches(), st.sampled_from(["contiguous", "contiguous_request"]))
def test_one_rank_gets_the_batch_back(batch: Batch, split: str) -> None:
    local = local_extents(batch.query_start_loc, batch.key_lens, 1, 0, split=split)
    assert local.cu_seqlens_q.tolist() == batch.query_start_loc.tolist()
    assert local.seqused_kv.tolist() == [
        seq_len if query_len else 0 for query_len, seq_len in zip(batch.query_lens, batch.seq_lens, strict=True)
    ]


# --- rows without queries, and rows that see everything ---------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_pad_row_reads_nothing(way: dict[str, object]) -> None:
    """3 queries behind 6 cached keys, round robin over 2 ranks: rank 1 holds token 1 and a pad row."""
    local = local_extents(int32(0, 3), int32(9), 2, 1, split="round_robin", **way)
    assert local.request_indices.tolist() == [0, -1]
    assert local.seqused_kv.tolist() == [9 if way == {"causal": False} else 8, 0]


@fewer(4)
@given(cuts())
def test_the_conventions_differ_only_in_rows_without_queries(every: list[Step]) -> None:
    for step in each(every):
        for zero, prefix in zip(every_rank(step), every_rank(step, empty_extent="prefix"), strict=True):
            empty = np.diff(zero.cu_seqlens_q) == 0
            assert (zero.seqused_kv[empty] == 0).all()
            assert zero.seqused_kv[~empty].tolist() == prefix.seqused_kv[~empty].tolist()
            assert zero.cu_seqlens_q.tolist() == prefix.cu_seqlens_q.tolist()


@pytest.mark.parametrize("split", PER_REQUEST)
@given(batches(), cp_sizes)
def test_prefix_rows_see_all_that_lies_before_their_end(split: str, batch: Batch, cp_size: int) -> None:
    for rank in range(cp_size):
        want = []
        for query_len, seq_len in zip(batch.query_lens, batch.seq_lens, strict=True):
            for end in ends_by_walking(query_len, cp_size, split)[rank]:
                want.append(seq_len - query_len + end if seq_len else 0)
        local = local_extents(batch.query_start_loc, batch.key_lens, cp_size, rank, split=split, empty_extent="prefix")
        assert local.seqused_kv.tolist() == want


@fewer(4)
@given(cuts())
def test_without_causality_every_query_sees_the_whole_request(every: list[Step]) -> None:
    for step in each(every):
        for local in every_rank(step, causal=False):
            want = [
                step.batch.seq_lens[request] if query_len else 0
                for request, query_len in zip(local.request_indices.tolist(), np.diff(local.cu_seqlens_q), strict=True)
            ]
            assert local.seqused_kv.tolist() == want


# --- tokens and queries -----------------------------------------------------------------------------------------------


@given(batches())
def test_a_token_knows_its_request_and_position(batch: Batch) -> None:
    """Pad rows and rows beyond the last request among them."""
    tokens = np.arange(-1, batch.num_tokens + 3, dtype=np.int32)
    requests = token_requests(tokens, batch.query_start_loc)
    positions = token_positions(tokens, batch.query_start_loc, batch.key_lens)
    assert requests.dtype == positions.dtype == np.int32
    places = [place(batch, token) for token in tokens.tolist()]
    assert list(zip(requests.tolist(), positions.tolist(), strict=True)) == places


@fewer(4)
@given(cuts(), st.integers(0, 5))
def test_queries_beyond_the_last_row_belong_to_no_row(every: list[Step], more: int) -> None:
    for step in each(every):
        local = extents_of(step, step.cp_size - 1)
        count = int(local.cu_seqlens_q[-1])
        want = [row for row, length in enumerate(np.diff(local.cu_seqlens_q)) for _ in range(length)]
        assert query_rows(local.cu_seqlens_q, num_rows=count + more).tolist() == want + [-1] * more
        positions = query_positions(local.cu_seqlens_q, local.seqused_kv, num_rows=count + more)
        assert positions[count:].tolist() == [-1] * more


@given(batches())
def test_query_positions_equal_a_walk_over_the_rows(batch: Batch) -> None:
    """A row with more extent than queries, one with none, one without queries: any legal operator rows."""
    got = query_positions(batch.query_start_loc, batch.key_lens, num_rows=batch.num_tokens)
    want = oracle.positions_of_rows(batch.query_start_loc.tolist(), batch.seq_lens)
    assert got.tolist() == [-1 if position is None else position for position in want]


# --- the proposal's function ------------------------------------------------------------------------------------------


def lengths_of(local: CPLocalMetadata) -> tuple[list[int], list[int], list[int]]:
    assert {local.local_query_start_loc.dtype, local.local_seq_lens.dtype, local.local_kv_start_loc.dtype} == {
        np.dtype(np.int32)
    }
    return local.local_query_start_loc.tolist(), local.local_seq_lens.tolist(), local.local_kv_start_loc.tolist()


@given(steps(split=st.just("contiguous")), st.data(), empty_extents, st.booleans())
def test_local_lengths_equal_the_walk(step: Step, data: st.DataObject, empty_extent: str, causal: bool) -> None:
    batch, count = step.batch, step.num_input_tokens
    rank = data.draw(st.integers(0, step.cp_size - 1))
    how = {"num_input_tokens": count, "causal": causal, "empty_extent": empty_extent if causal else "zero"}
    local = build_cp_local_metadata(batch.query_start_loc, batch.key_lens, step.cp_size, rank, None, None, **how)
    want = oracle.contiguous_local_lengths(batch.query_lens, batch.seq_lens, step.cp_size, rank, **how)
    assert lengths_of(local) == want


@given(steps(split=st.just("contiguous")))
def test_the_ranks_cut_the_padded_stream_into_equal_slices(step: Step) -> None:
    batch = step.batch
    count = batch.num_tokens if step.num_input_tokens is None else step.num_input_tokens
    share = splits.smallest_share(count, step.cp_size)
    for rank in range(step.cp_size):
        local = build_cp_local_metadata(
            batch.query_start_loc, batch.key_lens, step.cp_size, rank, None, None, num_input_tokens=count
        )
        got = (local.local_start, local.local_end, local.tokens_per_rank, local.num_tokens_pad)
        assert got == (share * rank, share * (rank + 1), share, share * step.cp_size)
        assert {type(number) for number in got} == {int}


@given(batches(), cp_sizes, st.sampled_from([np.float32, np.float64]), st.integers(0, 3), st.data())
def test_tables_are_cut_like_the_tokens(
    batch: Batch, cp_size: int, dtype: type, width: int, data: st.DataObject
) -> None:
    """Rows for padding may be there or not; what is not there turns nothing: cos 1, sin 0."""
    num_rows = batch.num_tokens + data.draw(st.integers(0, 9))
    count = data.draw(st.one_of(st.none(), st.integers(num_rows, num_rows + 9)))
    cos = read_only(np.arange(2, 2 + num_rows * width).reshape(num_rows, width).astype(dtype))
    sin = read_only(-cos)
    share = splits.smallest_share(num_rows if count is None else count, cp_size)
    ones, zeros = np.ones((share * cp_size, width), dtype), np.zeros((share * cp_size, width), dtype)
    ones[:num_rows], zeros[:num_rows] = cos, sin
    for rank in range(cp_size):
        local = build_cp_local_metadata(
            batch.query_start_loc, batch.key_lens, cp_size, rank, cos, sin, num_input_tokens=count
        )
        mine = slice(share * rank, share * (rank + 1))
        for got, want in ((local.local_cos, ones[mine]), (local.local_sin, zeros[mine])):
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, want)


@given(batches(), cp_sizes)
def test_without_tables_the_local_tables_have_no_columns(batch: Batch, cp_size: int) -> None:
    local = build_cp_local_metadata(batch.query_start_loc, batch.key_lens, cp_size, 0, None, None)
    assert local.local_cos.shape == local.local_sin.shape == (local.tokens_per_rank, 0)


@given(steps(split=st.just("contiguous")), empty_extents)
def test_the_metadata_are_the_contiguous_extents(step: Step, empty_extent: str) -> None:
    for rank, local in enumerate(every_rank(step, empty_extent=empty_extent)):
        metadata = build_cp_local_metadata(
            step.batch.query_start_loc,
            step.batch.key_lens,
            step.cp_size,
            rank,
            None,
            None,
            num_input_tokens=step.num_input_tokens,
            empty_extent=empty_extent,
        )
        assert lengths_of(metadata)[:2] == (local.cu_seqlens_q.tolist(), local.seqused_kv.tolist())


# --- the proposal's unit tests, by their names ------------------------------------------------------------------------


def nine_requests(cp_size: int, cp_rank: int) -> tuple[list[int], list[int], list[int]]:
    return lengths_of(build_cp_local_metadata(NINE_QUERIES, NINE_KEYS, cp_size, cp_rank, None, None))


def test_DocstringRank0() -> None:
    """Tokens 0..14 are the whole requests 0..4."""
    assert nine_requests(3, 0) == (
        [0, 1, 3, 6, 10, 15, 15, 15, 15, 15],
        [1, 2, 3, 4, 5, 0, 0, 0, 0],
        [0, 1, 3, 6, 10, 15, 15, 15, 15, 15],
    )


def test_DocstringRank1() -> None:
    """Tokens 15..29 are requests 5 and 6, and the first 2 of request 7: it sees 2 keys, not 8."""
    assert nine_requests(3, 1) == (
        [0, 0, 0, 0, 0, 0, 6, 13, 15, 15],
        [0, 0, 0, 0, 0, 6, 7, 2, 0],
        [0, 0, 0, 0, 0, 0, 6, 13, 15, 15],
    )


def test_DocstringRank2() -> None:
    """Tokens 30..44 are the last 6 of request 7, with all its 8 keys, and request 8."""
    assert nine_requests(3, 2) == (
        [0, 0, 0, 0, 0, 0, 0, 0, 6, 15],
        [0, 0, 0, 0, 0, 0, 0, 8, 9],
        [0, 0, 0, 0, 0, 0, 0, 0, 8, 17],
    )


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 7, 45, 64])
def test_RanksPartitionAllQueryTokens(cp_size: int) -> None:
    assert sum(nine_requests(cp_size, rank)[0][-1] for rank in range(cp_size)) == 45


@pytest.mark.parametrize("empty_extent", EMPTY_EXTENTS)
def test_CpSizeOneIsIdentity(empty_extent: str) -> None:
    cos = read_only(np.linspace(0.0, 1.0, 90, dtype=np.float32).reshape(45, 2))
    local = build_cp_local_metadata(NINE_QUERIES, NINE_KEYS, 1, 0, cos, cos, empty_extent=empty_extent)
    assert lengths_of(local) == (NINE_QUERIES.tolist(), NINE_KEYS.tolist(), NINE_QUERIES.tolist())
    assert local[3:7] == (0, 45, 45, 45)
    np.testing.assert_array_equal(local.local_cos, cos)
    np.testing.assert_array_equal(local.local_sin, cos)


def test_PaddingAndBoundaryCross() -> None:
    """2 cached keys + 4 new, and 5 new: 9 tokens padded to 10, request 1 lies across the border of token 5."""
    query_start_loc, seq_lens = np.array([0, 4, 9], np.int32), np.array([6, 5], np.int32)
    cos = read_only(np.full((9, 1), 0.5))
    first = build_cp_local_metadata(query_start_loc, seq_lens, 2, 0, cos, cos)
    second = build_cp_local_metadata(query_start_loc, seq_lens, 2, 1, cos, cos)
    assert lengths_of(first) == ([0, 4, 5], [6, 1], [0, 6, 7])
    assert lengths_of(second) == ([0, 0, 4], [0, 5], [0, 0, 5])
    assert first[3:7] == (0, 5, 5, 10)
    assert second[3:7] == (5, 10, 5, 10)
    assert second.local_cos.ravel().tolist() == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert second.local_sin.ravel().tolist() == [0.5, 0.5, 0.5, 0.5, 0.0]


def test_a_graph_slot_across_a_rank_border_reads_nothing() -> None:
    """80 tokens in 20 slots of 4, keys only in the first 9: rank 6 of 8 owns slots 15 and 16 and half of 17."""
    query_start_loc = np.arange(0, 84, 4, dtype=np.int32)
    seq_lens = np.array([9] * 9 + [0] * 11, np.int32)
    local = build_cp_local_metadata(query_start_loc, seq_lens, 8, 6, None, None)
    assert lengths_of(local) == ([0] * 16 + [4, 8, 10, 10, 10], [0] * 20, [0] * 21)
