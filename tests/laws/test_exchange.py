"""The collectives against loops over ranks and rows: uneven groups, ranks without rows, the group that must be one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsacp_ref import exchange
from dsacp_ref.config import SPLITS
from dsacp_ref.exchange import (
    all_gather,
    all_reduce,
    all_to_all,
    gathered_in_order,
    head_shards,
    reduce_scatter,
    requested_rows,
    token_shards,
)
from dsacp_ref.partition import local_rows, partition_tokens, restored_rows
from dsacp_ref.spec import ContractError
from tests.compare import assert_same
from tests.layer_strategies import frozen
from tests.maths_strategies import int32
from tests.strategies import Step, cp_sizes, cuts, each, fewer, read_only, steps, token_rows

row_counts = st.lists(st.one_of(st.just(0), st.integers(0, 5)), min_size=1, max_size=8)


def numbered(counts: list[int], *shape: int, dtype: Any = np.float64) -> list[np.ndarray]:
    """Shards of these row counts; no number appears twice, none is 0."""
    ends = np.cumsum(counts)
    flat = np.arange(1, 1 + int(ends[-1]) * int(np.prod(shape)), dtype=dtype).reshape(int(ends[-1]), *shape)
    return frozen([flat[end - count : end].copy() for count, end in zip(counts, ends, strict=True)])


@st.composite
def uneven(draw: st.DrawFn) -> list[np.ndarray]:
    """Ranks with different row counts, often 0, of any row shape and dtype."""
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]))
    return numbered(draw(row_counts), *shape, dtype=draw(st.sampled_from([np.int32, np.float32, np.float64])))


@st.composite
def equal(draw: st.DrawFn) -> tuple[list[np.ndarray], list[int]]:
    """Ranks that hold summands of the same rows, and how many rows each keeps."""
    counts = draw(row_counts)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (sum(counts), *draw(st.sampled_from([(), (3,), (2, 2)])))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return [read_only(rng.standard_normal(shape).astype(dtype)) for _ in counts], counts


# --- against loops ---


@given(uneven())
def test_all_gather_lays_the_ranks_end_to_end(shards: list[np.ndarray]) -> None:
    rows = [row for shard in shards for row in shard]
    due = np.array(rows, shards[0].dtype).reshape(len(rows), *shards[0].shape[1:])
    assert_same(all_gather(shards), [due] * len(shards))


@given(equal())
def test_all_reduce_adds_in_rank_order(case: tuple[list[np.ndarray], list[int]]) -> None:
    shards, _ = case
    due = np.zeros(shards[0].shape, shards[0].dtype)
    for place in np.ndindex(due.shape):
        total = shards[0][place]
        for shard in shards[1:]:
            total = total + shard[place]
        due[place] = total
    assert_same(all_reduce(shards), [due] * len(shards))


@given(equal())
def test_reduce_scatter_keeps_the_own_rows_and_all_gather_undoes_it(case: tuple[list[np.ndarray], list[int]]) -> None:
    shards, counts = case
    kept = reduce_scatter(shards, counts)
    total, at = all_reduce(shards)[0], 0
    for rank, count in enumerate(counts):
        assert_same(kept[rank], total[at : at + count], f"rank {rank}")
        at += count
    assert_same(all_gather(kept), all_reduce(shards))


@given(cp_sizes, st.data())
def test_all_to_all_is_a_transpose_and_its_own_inverse(cp_size: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 3), min_size=cp_size**2, max_size=cp_size**2))
    flat = numbered(counts, 2)
    blocks = [flat[source * cp_size : (source + 1) * cp_size] for source in range(cp_size)]
    received = all_to_all(blocks)
    for source in range(cp_size):
        for destination in range(cp_size):
            assert_same(received[destination][source], blocks[source][destination])
    assert_same(all_to_all(received), blocks)


@given(row_counts, st.integers(1, 3), st.integers(1, 3))
def test_head_shards_hold_every_row_of_a_share_of_heads(counts: list[int], per_rank: int, head_dim: int) -> None:
    size = len(counts)
    shards = numbered(counts, size * per_rank, head_dim)
    got = head_shards(shards)
    for rank in range(size):
        rows = [shards[source][row] for source in range(size) for row in range(counts[source])]
        due = [[row[head] for head in range(rank * per_rank, (rank + 1) * per_rank)] for row in rows]
        assert_same(got[rank], np.array(due, np.float64).reshape(sum(counts), per_rank, head_dim), f"rank {rank}")


@given(row_counts, st.integers(1, 3), st.integers(1, 3))
@example([0, 0, 0], 1, 1)
@example([0, 3, 0], 2, 2)
def test_head_shards_and_token_shards_undo_each_other(counts: list[int], per_rank: int, head_dim: int) -> None:
    by_tokens = numbered(counts, len(counts) * per_rank, head_dim)
    by_heads = head_shards(by_tokens)
    assert_same(token_shards(by_heads, counts), by_tokens)
    assert_same(head_shards(token_shards(by_heads, counts)), by_heads)


@given(cuts(), st.data())
@fewer(4)
def test_rows_come_back_in_token_order_for_every_split(every_split: list[Step], data: st.DataObject) -> None:
    """Pad rows travel along and are dropped, whatever they hold."""
    rows = data.draw(token_rows(every_split[0].batch.num_tokens))
    for step in each(every_split):
        partition = partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)
        shards = []
        for rank, tokens in enumerate(partition.token_indices):
            shard = local_rows(rows, partition, rank)
            shard[tokens < 0] = -77
            shards.append(read_only(shard))
        assert_same(gathered_in_order(shards, partition), [rows] * step.cp_size)


@given(steps(), st.data())
def test_a_rank_gets_the_rows_it_asked_for(step: Step, data: st.DataObject) -> None:
    """In the order asked for, the same token twice, from itself, or nothing."""
    partition = partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)
    num_tokens = step.batch.num_tokens
    rows = data.draw(token_rows(num_tokens))
    tokens = st.lists(st.integers(0, num_tokens - 1), max_size=6) if num_tokens else st.just([])
    wanted = [int32(data.draw(tokens)) for _ in range(step.cp_size)]
    got = requested_rows([local_rows(rows, partition, rank) for rank in range(step.cp_size)], partition, wanted)
    for rank, asked in enumerate(wanted):
        due = np.array([rows[token] for token in asked.tolist()], rows.dtype)
        assert_same(got[rank], due.reshape(len(asked), *rows.shape[1:]), f"rank {rank}")


@given(uneven())
def test_nothing_that_comes_out_is_shared(shards: list[np.ndarray]) -> None:
    """A rank that writes into its result writes into no other rank's, and into no input."""
    for results in (all_gather(shards), reduce_scatter([np.ones((3, 2))] * 2, [1, 2]), all_reduce([np.ones(3)] * 3)):
        for rank, result in enumerate(results):
            others = [*results[:rank], *results[rank + 1 :], *shards]
            assert not any(np.shares_memory(result, other) for other in others)


# --- padding, order, and empty ranks ---

ORDERED = ("contiguous",)  # the rules whose ranks, laid end to end, are the stream


@pytest.mark.parametrize("split", [rule if rule != "round_robin_page" else "round_robin_page(2)" for rule in SPLITS])
def test_cutting_the_padding_alone_restores_the_order_of_a_contiguous_split_only(split: str) -> None:
    """Two requests, so that even slices of each request interleave on the ranks."""
    loc, cp_size = int32([0, 5, 12]), 3
    partition = partition_tokens(loc, cp_size, split=split)
    rows = read_only(np.arange(1.0, 1 + 12 * 6).reshape(12, 6, 1))
    shards = [local_rows(rows, partition, rank) for rank in range(cp_size)]
    for rank, share in enumerate(head_shards(shards)):
        due = rows[:, 2 * rank : 2 * rank + 2]
        assert_same(restored_rows(share, partition), due)
        real = np.concatenate(partition.token_indices) >= 0
        only_cut = share[real]
        assert np.array_equal(only_cut, due) == (split in ORDERED)
        assert np.array_equal(np.sort(only_cut, axis=None), np.sort(due, axis=None))


@pytest.mark.parametrize("split", [rule if rule != "round_robin_page" else "round_robin_page(1)" for rule in SPLITS])
def test_three_tokens_over_eight_ranks(split: str) -> None:
    """vllm-ascend#17097: a rank without rows takes part in every exchange."""
    partition = partition_tokens(int32([0, 3]), 8, split=split)
    rows = read_only(np.arange(1.0, 25.0).reshape(3, 8, 1))
    shards = [local_rows(rows, partition, rank) for rank in range(8)]
    counts = [len(shard) for shard in shards]
    assert_same(gathered_in_order(shards, partition), [rows] * 8)
    by_heads = head_shards(shards)
    assert_same(
        [restored_rows(share, partition) for share in by_heads], [rows[:, head : head + 1] for head in range(8)]
    )
    assert_same(token_shards(by_heads, counts), shards)
    assert [len(kept) for kept in reduce_scatter(all_gather(shards), counts)] == counts
    asked = [int32([2, 0])] + [int32([])] * 7
    assert_same(requested_rows(shards, partition, asked)[0], rows[[2, 0]])


def test_experts_split_over_ranks_sum_over_the_same_tokens() -> None:
    """xLLM#2097: gather, run, reduce, shard again. Summing over ranks that hold other tokens gives f0(a) + f1(b)."""
    rng = np.random.default_rng(0)
    up, down = rng.standard_normal((6, 4)), rng.standard_normal((4, 6))
    x = rng.standard_normal((5, 4))

    def expert(rows: np.ndarray, rank: int) -> np.ndarray:
        mine = slice(3 * rank, 3 * rank + 3)
        return np.maximum(rows @ up[mine].T, 0) @ down[:, mine].T

    due = expert(x, 0) + expert(x, 1)
    partition = partition_tokens(int32([0, 5]), 2)
    own = [local_rows(x, partition, rank) for rank in range(2)]  # 3 + 2 rows and a pad row
    everything = gathered_in_order(own, partition)
    assert np.allclose(
        np.concatenate(reduce_scatter([expert(rows, rank) for rank, rows in enumerate(everything)], [3, 2])), due
    )
    wrong = all_reduce([expert(rows, rank) for rank, rows in enumerate(own)])[0]
    assert np.allclose(wrong, expert(own[0], 0) + expert(own[1], 1))
    assert not np.allclose(wrong, due[:3])


# --- the group ---

SIXTEEN = partition_tokens(int32([0, 16]), 8)


def test_rows_split_over_eight_ranks_come_back_from_eight() -> None:
    """sglang#24560: 16 tokens, 2 rows a rank, gathered back to 16."""
    shards = numbered([2] * 8, 3)
    assert_same(gathered_in_order(shards, SIXTEEN), [np.concatenate(shards)] * 8)


@pytest.mark.parametrize("world", [1, 4, 16])
def test_another_group_than_the_one_that_split_is_refused(world: int) -> None:
    """sglang#24560, xLLM#1997: the gather group has another size than the split."""
    shards = numbered([2] * world, 3)
    text = (
        f"shards must come from the 8 ranks of the partition, got {world} ranks; split and gather over the same group"
    )
    for call in (
        lambda: gathered_in_order(shards, SIXTEEN),
        lambda: requested_rows(shards, SIXTEEN, [int32([])] * world),
    ):
        with pytest.raises(ContractError, match=f"^{re.escape(text)}$"):
            call()


@pytest.mark.parametrize("function", exchange.__all__)
def test_no_ranks_are_no_group(function: str) -> None:
    more = {
        "reduce_scatter": ([],),
        "token_shards": ([],),
        "gathered_in_order": (SIXTEEN,),
        "requested_rows": (SIXTEEN, []),
    }
    with pytest.raises(ContractError, match=r"^cp_size must be an int >= 1, got 0"):
        getattr(exchange, function)([], *more.get(function, ()))
