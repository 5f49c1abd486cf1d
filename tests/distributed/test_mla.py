"""V3.2 layers, blocks and stacks with a process for every rank give what one process gives that plays all ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from dsacp_ref import mla_layer as ref_layer
from dsacp_ref import mla_stack as ref
from dsacp_ref.mla_layer import MLAOutput
from dsacp_ref.partition import local_rows, partition_tokens
from tests.compare import assert_double, assert_same
from tests.distributed.pool import run
from tests.layer_strategies import frozen
from tests.maths_strategies import int32
from tests.mirror.common import compare_floats, to_torch
from tests.mla_strategies import SMALL, StackWorld, stack_world_of
from tests.strategies import EVERY_SPLIT

pytestmark = pytest.mark.xdist_group("processes")

WORK = "tests.distributed.mla_work"
EXPERTS = ("whole", "split", "sliced")
Call = tuple[str, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]


def called(size: int, function: str, wanted: list[list[Call]]) -> list[list[Any]]:
    """Every rank's results of its calls, whose arrays go as tensors."""
    return run(size, f"{WORK}:{function}", [(to_torch(calls),) for calls in wanted], timeout=300)


# --- a stack, step after step ---


def due_steps(stack: StackWorld, steps: list[list[int]], idle: tuple[int, ...]) -> list[tuple[Any, Any, Any]]:
    """(token ids, batch, what one device gives) of every step."""
    done, caches, found = [0] * len(stack.token_ids), stack.caches, []
    for new in steps:
        ends = [a + b for a, b in zip(done, new, strict=True)]
        ids, batch = stack.step(done, ends, idle=idle)
        out = ref.mla_decoder_stack(ids, stack.weights, caches, batch, stack.world.config)
        found.append((ids, batch, out))
        done, caches = ends, frozen(out.caches)
    return found


def assert_steps(size: int, stack: StackWorld, steps: list[list[int]], idle: tuple[int, ...], **options: Any) -> None:
    """Every rank's rows, logits and caches of every step; the caches the same bits on all ranks."""
    due = due_steps(stack, steps, idle)
    plan = [(*to_torch((ids, batch)), options) for ids, batch, _ in due]
    args = (*to_torch((stack.weights, stack.caches)), stack.world.config, plan)
    found = run(size, f"{WORK}:stack_steps", [args] * size, timeout=300)
    for step, (_, batch, one) in enumerate(due):
        partition = partition_tokens(batch.query_start_loc, size, split=options["split"])
        for rank, mine in enumerate(found):
            hidden, logits, caches = mine[step]
            where = f"step {step} rank {rank}"
            assert_double(hidden.numpy(), local_rows(one.hidden, partition, rank), where)
            assert_double(logits.numpy(), one.logits, where)
            for own, everyones, theirs in zip(caches, one.caches, found[0][step][2], strict=True):
                for part, whole, first in zip(own, everyones, theirs, strict=True):
                    assert_double(part.numpy(), whole, where)
                    assert_same(part, first, where)


@pytest.mark.parametrize(("split", "experts"), list(product(("zigzag", "round_robin"), EXPERTS)))
@pytest.mark.parametrize("size", [2, 4])
def test_three_layers_over_processes(size: int, split: str, experts: str) -> None:
    """Several requests, one of them empty, a graph slot; chunks behind a prefix, decode, a step of one token.

    The last step leaves ranks without rows. Every second step is written in place.
    """
    stack = stack_world_of(np.random.default_rng(size), [13, 0, 9])
    assert_steps(size, stack, [[7, 0, 5], [5, 0, 3], [1, 0, 1]], (1,), split=split, experts=experts)
    assert_steps(size, stack, [[3, 0, 0], [1, 0, 0], [0, 0, 0]], (), split=split, experts=experts)


@pytest.mark.parametrize("split", [split for split in EVERY_SPLIT if split not in ("zigzag", "round_robin")])
def test_the_other_rules_over_three_processes(split: str) -> None:
    stack = stack_world_of(np.random.default_rng(3), [8, 5], num_layers=2)
    assert_steps(3, stack, [[6, 5], [2, 0]], (), split=split, experts="split")


# --- a layer and a block ---


@pytest.mark.parametrize("kept_keys", ["all", "own"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_layer_and_a_block_of_every_split(size: int, kept_keys: str) -> None:
    """Pure and in place, with the indexer's choice and a given one; a rank's own caches, NaN in pad rows."""
    stack = stack_world_of(np.random.default_rng(5), [7, 0, 4], num_layers=1)
    world, block = stack.world, stack.weights.blocks[0]
    x, batch = world.step([0, 0, 0], [7, 0, 4], idle=(2,))
    given_topk = np.where(x[:, :1] >= 0, int32([[0, -1, -1]]), -1).astype(np.int32)
    wanted: list[list[Call]] = [[] for _ in range(size)]
    due: list[list[MLAOutput]] = []
    for place, (split, given) in enumerate(product(EVERY_SPLIT, (None, given_topk))):
        partition = partition_tokens(batch.query_start_loc, size, split=split)
        shards = [local_rows(x, partition, rank) for rank in range(size)]
        for shard, tokens in zip(shards, partition.token_indices, strict=True):
            shard[tokens < 0] = np.nan
        options = {"split": split, "kept_keys": kept_keys, "given_topk": given}
        shared = ([world.cache] * size, batch, SMALL)
        for name, function, weights, more in (
            ("mla_over_ranks", ref_layer.mla_over_ranks, block.attention, {}),
            ("mla_block_over_ranks", ref.mla_block_over_ranks, block, {"experts": EXPERTS[place % 3]}),
        ):
            out = function(shards, weights, *shared, **options, **more)
            due.append([MLAOutput(*parts) for parts in zip(*out, strict=True)])
            for rank, own in enumerate(wanted):
                call = (shards[rank], weights, world.cache, batch, SMALL)
                own.append((name + "_" * (place % 2), call, (), options | more))
    for rank, mine in enumerate(called(size, "calls", wanted)):
        for got, expected, call in zip(mine, due, wanted[rank], strict=True):
            compare_floats(got, expected[rank], expected[rank], f"{call[0]} {call[3]} rank {rank}")


# --- the way out ---


@pytest.mark.parametrize("size", [2, 4])
def test_argmax_where_logits_lie(size: int) -> None:
    """Ties between ranks, NaN, rows of -inf; ranks without rows, requests without tokens, shares of unequal width."""
    rng = np.random.default_rng(size)
    wanted: list[list[Call]] = [[] for _ in range(size)]
    due = []
    for split, lengths in product(EVERY_SPLIT, ([5, 0, 8], [1], [0])):
        loc = int32(np.cumsum([0, *lengths]))
        partition = partition_tokens(loc, size, split=split)
        logits = rng.choice([-np.inf, np.nan, 0.0, 1.0], (sum(lengths), 6))
        shards = [local_rows(logits, partition, rank) for rank in range(size)]
        due.append(ref.rows_argmax(shards, partition, loc))
        for rank, own in enumerate(wanted):
            own.append(("rows_argmax", (shards[rank],), (partition, loc), {}))
    for num_rows in (0, 1, 7):
        widths = [1 + rank % 3 for rank in range(size)]
        logits = rng.choice([-np.inf, np.nan, 0.0, 1.0], (num_rows, sum(widths)))
        shares = np.split(logits, np.cumsum(widths)[:-1], axis=1)
        due.append(ref.vocab_argmax(shares))
        for rank, own in enumerate(wanted):
            own.append(("vocab_argmax", (shares[rank],), (widths,), {}))
    for rank, mine in enumerate(called(size, "calls", wanted)):
        for got, expected in zip(mine, due, strict=True):
            assert_same(got, expected[rank], f"rank {rank}")


# --- what travels ---


def test_what_travels() -> None:
    """Keys once a layer; rows of experts out and back, where ranks share them; last rows or token ids once."""
    stack = stack_world_of(np.random.default_rng(6), [5])
    world, block = stack.world, stack.weights.blocks[0]
    x, batch = world.step([0], [5])
    ids, _ = stack.step([0], [5])
    partition = partition_tokens(batch.query_start_loc, 2, split="zigzag")
    shards = [local_rows(x, partition, rank) for rank in range(2)]
    back = {"whole": [], "split": ["all_gather", "reduce_scatter"], "sliced": ["all_gather", "all_reduce"]}
    wanted: list[list[Call]] = [[], []]
    due = []
    for rank, own in enumerate(wanted):
        step = (batch, SMALL)
        own.append(("mla_over_ranks_", (shards[rank], block.attention, world.cache, *step), (), {}))
        own.append(
            ("mla_over_ranks", (shards[rank], block.attention, world.cache, *step), (), {"kept_keys": "own"}),
        )
        for experts in EXPERTS:
            options = {"experts": experts}
            own.append(("mla_block_over_ranks_", (shards[rank], block, world.cache, *step), (), options))
            own.append(("mla_stack_over_ranks", (ids, stack.weights, stack.caches, *step), (), options))
        own.append(("rows_argmax", (shards[rank],), (partition, batch.query_start_loc), {}))
        own.append(("vocab_argmax", (np.ones((3, 2 + rank)),), ([2, 3],), {}))
    due += [["all_gather"], ["all_gather"]]
    for experts in EXPERTS:
        due += [["all_gather", *back[experts]], ["all_gather", *back[experts]] * 3 + ["all_gather"]]
    due += [["all_gather"], ["all_gather", "all_gather"]]
    assert called(2, "collectives", wanted) == [due] * 2


def test_a_rank_without_rows_makes_the_same_collectives() -> None:
    """One token on four ranks: three hold nothing, or a pad row."""
    stack = stack_world_of(np.random.default_rng(7), [1], num_layers=2)
    ids, batch = stack.step([0], [1])
    wanted: list[Call] = [
        (
            "mla_stack_over_ranks",
            (ids, stack.weights, stack.caches, batch, SMALL),
            (),
            {"split": split, "experts": mode},
        )
        for split, mode in product(("zigzag", "round_robin"), EXPERTS)
    ]
    found = called(4, "collectives", [wanted] * 4)
    assert found == [found[0]] * 4
    assert [len(made) for made in found[0]] == [3, 7, 7] * 2


# --- refusals ---


def refused_calls(cp_rank: int) -> list[tuple[Call, str]]:
    """What is refused on two ranks, and the text."""
    stack = stack_world_of(np.random.default_rng(8), [5], num_layers=2)
    uneven = stack_world_of(np.random.default_rng(8), [5], num_layers=1, inter=5)
    block, five = stack.weights.blocks[0], uneven.weights.blocks[0]
    ids, batch = stack.step([0], [5])
    loc, rest = batch.query_start_loc, (batch, SMALL)
    behind = (batch._replace(seq_lens=int32([8])), SMALL)
    two, three = (partition_tokens(loc, size, split="zigzag") for size in (2, 3))
    shard = np.zeros((len(two.token_indices[cp_rank]), SMALL.hidden_size))
    cache, whole, own = stack.world.cache, (stack.weights, stack.caches), {"kept_keys": "own"}
    forgotten = (
        "UnsupportedError: kept_keys must be 'all' where a request has earlier tokens, got 'own' with 3 of request 0; "
        "ranks that keep own keys only cannot go on: chunks and decode need all keys"
    )
    shares = (
        "UnsupportedError: cp_size must divide the 5 rows of w1 unless experts is 'whole', got 2; use experts='whole'"
    )
    unknown = "ContractError: experts must be one of 'whole', 'split', 'sliced', got 'Whole'"
    return [
        (("mla_over_ranks", (shard, block.attention, cache, *behind), (), own), forgotten),
        (("mla_block_over_ranks_", (shard, block, cache, *behind), (), own), forgotten),
        (("mla_stack_over_ranks", (ids, *whole, *behind), (), own), forgotten),
        (("mla_block_over_ranks", (shard, five, cache, *rest), (), {"experts": "split"}), shares),
        (("mla_stack_over_ranks_", (ids, uneven.weights, uneven.caches, *rest), (), {"experts": "sliced"}), shares),
        (("mla_stack_over_ranks", (ids, *whole, *rest), (), {"experts": "Whole"}), unknown),
        (
            ("mla_stack_over_ranks", (int32([1, 2, 3, 4, 11]), *whole, *rest), (), {}),
            "ContractError: token_ids must be in [0, 11), got 11; embed has one row a token id",
        ),
        (
            ("mla_stack_over_ranks", (ids[:4], *whole, *rest), (), {}),
            "ContractError: token_ids must have 5 rows, got 4; one a token of the step",
        ),
        (
            ("mla_stack_over_ranks", (ids, stack.weights, stack.caches[:1], *rest), (), {}),
            "ContractError: caches must hold one cache for each of 2 layers, got 1",
        ),
        (
            ("rows_argmax", (shard,), (three, loc), {}),
            "ContractError: shards must come from the 3 ranks of the partition, got 2 ranks; "
            "split and gather over the same group",
        ),
        (
            ("rows_argmax", (shard,), (two, int32([0, 4])), {}),
            "ContractError: query_start_loc must end at the 5 tokens of the partition, got 4; build both from the same "
            "lengths",
        ),
        (
            ("vocab_argmax", (np.ones((3, 4)),), ([4, 4, 4],), {}),
            f"ContractError: vocab_sizes must hold a share for each of 2 ranks, and 4 for rank {cp_rank}, "
            "got [4, 4, 4]; as the head's weights are cut",
        ),
    ]


def test_all_ranks_refuse_alike() -> None:
    """What all of them share, before any of them sends; the next call works."""
    stack = stack_world_of(np.random.default_rng(8), [5], num_layers=2)
    ids, batch = stack.step([0], [5])
    good: Call = ("mla_stack_over_ranks", (ids, stack.weights, stack.caches, batch, SMALL), (), {})
    cases = [refused_calls(rank) for rank in range(2)]
    found = called(2, "calls", [[*(call for call, _ in mine), good] for mine in cases])
    for mine, due in zip(found, cases, strict=True):
        assert mine[:-1] == [text for _, text in due]
        assert mine[-1].logits.shape == (1, len(stack.weights.embed))


def test_the_definition_refuses_in_the_same_words() -> None:
    """What a process refuses of a stack, one process that plays all ranks refuses."""
    uneven = stack_world_of(np.random.default_rng(9), [5], num_layers=1, inter=5)
    ids, batch = uneven.step([0], [5])
    with pytest.raises(NotImplementedError) as refused:
        ref.mla_stack_over_ranks(ids, uneven.weights, [uneven.caches] * 2, batch, SMALL, experts="split")
    call: Call = ("mla_stack_over_ranks", (ids, uneven.weights, uneven.caches, batch, SMALL), (), {"experts": "split"})
    for (text,) in called(2, "calls", [[call]] * 2):
        assert text == f"UnsupportedError: {refused.value}"
