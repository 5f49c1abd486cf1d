"""Rank r of `dsacp_npu.distributed` holds what `dsacp_npu.exchange` gives for rank r, over 1 to 4 processes.

Hypothesis draws whole lists of calls, which go to the workers in one message.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import distributed, exchange
from dsacp_npu.distributed import Ranks
from dsacp_npu.partition import Partition, local_rows, partition_tokens
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.compare import assert_same
from tests.distributed.pool import run
from tests.mirror.common import int32, to_torch
from tests.strategies import fewer, steps

pytestmark = pytest.mark.xdist_group("processes")
WORK = "tests.distributed.work"

DTYPES = st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.int64]
)
ROWS = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
each_size = pytest.mark.parametrize("size", [1, 2, 3, 4])


class Call(NamedTuple):
    """One collective: what each rank puts in, what all know, and what each must get."""

    name: str
    own: list[tuple[Any, ...]]
    known: tuple[Any, ...]
    due: list[Any]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """Small integers: every sum of a few is exact in every dtype, whatever its order."""
    count = int(np.prod(shape))
    return ((torch.arange(start, start + count) * 7 + start) % 31).to(dtype).reshape(shape)


def shards_of(counts: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows of every rank; where there are two axes they are not contiguous."""
    shards = [numbers((count, *shape), dtype, 11 * rank) for rank, count in enumerate(counts)]
    return [shard.transpose(0, -1).contiguous().transpose(0, -1) for shard in shards]


@st.composite
def calls(draw: st.DrawFn, size: int) -> Call:
    """Any collective with any counts: uneven, 0 on some ranks, 0 on all."""
    name = draw(st.sampled_from(exchange.__all__))
    dtype = draw(DTYPES)
    counts = draw(st.lists(st.one_of(st.just(0), st.integers(0, 4)), min_size=size, max_size=size))
    shape = draw(ROWS)
    if name == "all_to_all":
        return table_call(draw, size, dtype)
    if name in ("gathered_in_order", "requested_rows"):
        return partition_call(draw, name, size, shape, dtype)
    if name in ("head_shards", "token_shards"):
        heads = draw(st.integers(1, 2))
        shape = (heads * size if name == "head_shards" else heads, draw(st.integers(0, 2)))
    if name in ("all_reduce", "reduce_scatter", "token_shards"):
        shards = shards_of([sum(counts)] * size, shape, dtype)
    else:
        shards = shards_of(counts, shape, dtype)
    known = () if name == "all_reduce" else (counts,)
    asked = () if name in ("all_gather", "head_shards") else known
    return Call(name, [(shard,) for shard in shards], known, getattr(exchange, name)(shards, *asked))


def table_call(draw: st.DrawFn, size: int, dtype: torch.dtype) -> Call:
    """Blocks of any shapes, scalars among them."""
    shape = st.one_of(ROWS, st.lists(st.integers(0, 3), max_size=3).map(tuple))
    blocks = [[numbers(draw(shape), dtype, 5 * i + j) for j in range(size)] for i in range(size)]
    shapes = [[tuple(blocks[i][j].shape) for i in range(size)] for j in range(size)]
    own = [(blocks[rank],) for rank in range(size)]
    return Call("all_to_all", own, tuple(shapes), exchange.all_to_all(blocks))


def partition_call(draw: st.DrawFn, name: str, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Call:
    """Rows of any split, with garbage in the pad rows."""
    step = draw(steps())._replace(cp_size=size)
    partition = partition_tokens(to_torch(step.batch.query_start_loc), size, **step.cut)
    rows = numbers((step.batch.num_tokens, *shape), dtype)
    shards = [local_rows(rows, partition, rank) for rank in range(size)]
    for shard, tokens in zip(shards, partition.token_indices, strict=True):
        shard[tokens < 0] = 77
    known: tuple[Any, ...] = (partition,)
    if name == "requested_rows":
        tokens = st.lists(st.integers(0, len(rows) - 1), max_size=6) if len(rows) else st.just([])
        known += ([to_torch(int32(*draw(tokens))) for _ in range(size)],)
    return Call(name, [(shard,) for shard in shards], known, getattr(exchange, name)(shards, *known))


def exchanged(size: int, batch: list[Call]) -> list[list[Any]]:
    """What each rank gets, call by call."""
    tasks = []
    for rank in range(size):
        mine = [(c.name, c.own[rank], (c.known[rank],) if c.name == "all_to_all" else c.known) for c in batch]
        tasks.append((mine,))
    return run(size, f"{WORK}:exchanges", tasks)


# --- against the list of all shards ---


@each_size
@fewer(2)
@given(st.data())
def test_every_rank_gets_what_the_list_says(size: int, data: st.DataObject) -> None:
    batch = data.draw(st.lists(calls(size), min_size=4, max_size=16))
    for rank, results in enumerate(exchanged(size, batch)):
        for call, got in zip(batch, results, strict=True):
            assert_same(got, call.due[rank], f"{call.name} on rank {rank} of {size}")


EPSILON = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@each_size
def test_sums_agree_to_rounding_and_on_all_ranks(size: int) -> None:
    """Each of cp_size - 1 additions rounds by half an epsilon of what it gives; the list's sum rounds too."""
    generator = torch.Generator().manual_seed(size)
    batch = []
    for dtype in EPSILON:
        shards = [torch.randn(7, 33, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]
        counts = [7, 0, 0, 0][:size] if size < 3 else [3, 0, 4, 0][:size]
        batch.append(Call("all_reduce", [(shard,) for shard in shards], (), exchange.all_reduce(shards)))
        due = exchange.reduce_scatter(shards, counts)
        batch.append(Call("reduce_scatter", [(shard,) for shard in shards], (counts,), due))
    results = exchanged(size, batch)
    for place, call in enumerate(batch):
        (first,), *_ = call.own
        most = sum(float(shard.abs().max()) for (shard,) in call.own)
        budget = size * EPSILON[first.dtype] * most
        for rank in range(size):
            got = results[rank][place]
            assert (got.dtype, got.shape) == (first.dtype, call.due[rank].shape)
            assert ((got.double() - call.due[rank].double()).abs() <= budget).all(), f"{call.name} {first.dtype}"
            if call.name == "all_reduce":
                assert torch.equal(got, results[0][place])


@each_size
def test_there_and_back_again_and_nothing_of_the_input_is_written(size: int) -> None:
    counts = [3, 0, 2, 1][:size]
    shards = shards_of(counts, (2 * size, 3), torch.bfloat16)
    by_heads = run(size, f"{WORK}:unwritten", [("head_shards", shard, counts) for shard in shards])
    by_tokens = run(size, f"{WORK}:unwritten", [("token_shards", shard, counts) for shard in by_heads])
    assert_same(by_tokens, shards)
    kept = run(size, f"{WORK}:unwritten", [("reduce_scatter", numbers((sum(counts), 2), torch.int32), counts)] * size)
    assert_same(torch.cat(kept), numbers((sum(counts), 2), torch.int32) * size)


def test_only_wanted_rows_move() -> None:
    """What is sent is counted at the transport: 2 rows of 5 numbers, wherever they go."""
    partition = partition_tokens(torch.tensor([0, 40], dtype=torch.int32), 4)
    wanted = [to_torch(int32(*tokens)) for tokens in ([39], [], [0], [])]
    rows = numbers((40, 5), torch.float32)
    args = [(local_rows(rows, partition, rank), partition, wanted) for rank in range(4)]
    sent = run(4, f"{WORK}:numbers_sent", args)
    assert sent == [5, 0, 0, 5]


# --- refusals, before anything is sent ---

HERE = Ranks(None, 2, 1)
SPLIT = partition_tokens(torch.tensor([0, 5], dtype=torch.int32), 2)
ONES = torch.ones(3, 2)
THREE = torch.ones(2, 3, 1)
BAD_RANKS = [
    (name, (ONES, None, *more))
    for name, more in (
        ("all_gather", ([3, 3],)),
        ("all_reduce", ()),
        ("reduce_scatter", ([3, 0],)),
        ("head_shards", ([3, 3],)),
        ("token_shards", ([3, 0],)),
        ("gathered_in_order", (SPLIT,)),
        ("requested_rows", (SPLIT, [])),
    )
] + [("all_to_all", ([ONES, ONES], None, [(3, 2)] * 2))]


@pytest.mark.parametrize(("name", "args"), BAD_RANKS, ids=[name for name, _ in BAD_RANKS])
def test_ranks_are_ranks(name: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(ContractError, match=r"^ranks must be of type Ranks, got NoneType$"):
        getattr(distributed, name)(*args)


def wants(*tokens: int) -> list[torch.Tensor]:
    """Rank 0 asks for nothing, rank 1 for these."""
    return [to_torch(int32()), to_torch(int32(*tokens))]


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("all_gather", (ONES, [3]), "rows_per_rank must hold one count for each of 2 ranks, got [3]"),
        ("all_gather", (ONES, [3, -1]), "rows_per_rank must be an int >= 0, got -1"),
        ("all_gather", (ONES, [3, 2]), "shards must have 2 rows on rank 1, got 3; the other ranks expect what"),
        ("all_gather", (ONES.numpy(), [3, 3]), "shards must be a torch tensor, got ndarray"),
        ("all_gather", (torch.tensor(1.0), [3, 3]), "shards must be arrays with a row axis, got Tensor; rank 1"),
        ("all_reduce", (3,), "shards must be arrays with a row axis, got int; rank 1"),
        ("reduce_scatter", (ONES, [2, 2]), "rows_per_rank must split 3 rows over 2 ranks, got [2, 2]"),
        ("reduce_scatter", (ONES, [3]), "rows_per_rank must split 3 rows over 2 ranks, got [3]"),
        ("head_shards", (THREE, [2, 2]), "shards must have [rows, heads, head_dim] with heads a multiple of cp_size 2"),
        ("head_shards", (THREE, [2, 1]), "shards must have 1 rows on rank 1, got 2"),
        ("token_shards", (THREE, [2, 2]), "rows_per_rank must split 2 rows over 2 ranks, got [2, 2]"),
        ("token_shards", (ONES, [2, 1]), "shards must have shape [rows, heads, head_dim], got [3, 2]"),
        ("gathered_in_order", (ONES, None), "partition must be of type Partition, got NoneType"),
        ("gathered_in_order", (ONES[:2], SPLIT), "shards must have 3 rows on rank 1, got 2; pad rows travel"),
        ("requested_rows", (ONES, SPLIT, wants()[:1]), "wanted must hold one list for each of 2 ranks, got 1"),
        ("requested_rows", (ONES, SPLIT, wants(5)), "wanted must name tokens in [0, 5), got [5]"),
        ("all_to_all", ([ONES], [(3, 2)] * 2), "blocks must hold 2 blocks on every rank, got 1 on rank 1"),
        ("all_to_all", ([ONES, ONES], [(3, 2)]), "shapes must hold one shape for each of 2 ranks, got 1"),
        ("all_to_all", ([ONES, ONES], None), "shapes must be a list with one item a rank, got NoneType"),
        ("all_to_all", ([ONES, ONES], [(3, -2), (3, 2)]), "shapes must be an int >= 0, got -2"),
        ("all_to_all", ([ONES, ONES.int()], [(3, 2)] * 2), "blocks must be of one dtype, got float32 and int32"),
        ("all_to_all", ([ONES, ONES], [(3, 2), (6,)]), "shapes must have [3, 2] at this rank 1, got [6]"),
    ],
)
def test_refused_before_anything_is_sent(name: str, args: tuple[Any, ...], text: str) -> None:
    """There is no group here that could send."""
    with pytest.raises(ContractError, match="^" + re.escape(text)):
        getattr(distributed, name)(args[0], HERE, *args[1:])


def test_another_group_than_the_one_that_split_is_refused() -> None:
    """sglang#24560: 8 ranks split, 4 gather."""
    eight: Partition = partition_tokens(torch.tensor([0, 16], dtype=torch.int32), 8)
    text = r"^shards must come from the 8 ranks of the partition, got 2 ranks; split and gather over the same group$"
    for name, more in (("gathered_in_order", ()), ("requested_rows", (wants(),))):
        with pytest.raises(ContractError, match=text):
            getattr(distributed, name)(ONES, HERE, eight, *more)


def test_a_halo_is_planned_on_the_host() -> None:
    with pytest.raises(UnsupportedError, match=r"^wanted must be a CPU tensor, got a tensor on meta"):
        distributed.requested_rows(ONES, HERE, SPLIT, [tokens.to("meta") for tokens in wants()])
    away = SPLIT._replace(restore_indices=SPLIT.restore_indices.to("meta"))
    with pytest.raises(UnsupportedError, match=r"^partition must be a CPU tensor, got a tensor on meta"):
        distributed.requested_rows(ONES, HERE, away, wants())
