"""Blocks, experts and last rows with a process for every rank give what one process gives that plays all ranks."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref import block as ref
from dsacp_ref.layer import LayerOutput
from dsacp_ref.partition import local_rows, partition_tokens
from tests.block_strategies import Stack, expert_of, stack_of, step_inputs
from tests.compare import assert_same
from tests.distributed.pool import run
from tests.layer_strategies import CSA, EVERY_KIND, HCA, SMALL, WINDOW, Cut, config_for, legal_cut
from tests.maths_strategies import int32, normal, seeds
from tests.mirror.common import compare_floats, to_torch
from tests.strategies import EVERY_SPLIT, fewer

pytestmark = pytest.mark.xdist_group("processes")

WORK = "tests.distributed.block_work"
EXPERTS = ("whole", "split", "sliced")
KEYS = {"full": ("replicate", "gather_kv"), "scattered": ("gather_hidden", "gather_compressed")}


class Plan(NamedTuple):
    """One call on all ranks, and what every rank is due, by the definition in one process."""

    function: str
    own: list[tuple[Any, ...]]  # each rank's arguments before the group
    known: tuple[Any, ...]  # what follows the group, the same on all
    options: dict[str, Any]
    due: list[Any]

    def call(self, rank: int) -> tuple[str, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        """One rank's part."""
        return self.function, to_torch(self.own[rank]), to_torch(self.known), self.options


def found_by(size: int, plans: list[Plan]) -> list[list[Any]]:
    """Every rank's results of these calls."""
    return run(size, f"{WORK}:calls", [([plan.call(rank) for plan in plans],) for rank in range(size)], timeout=300)


def assert_processes_agree(size: int, plans: list[Plan]) -> None:
    """Every rank's result of these calls, to rounding; with full rows the same bits on all."""
    found = found_by(size, plans)
    for i, plan in enumerate(plans):
        for rank, due in enumerate(plan.due):
            compare_floats(found[rank][i], due, due, f"{plan.function} {i} rank {rank}")
            if plan.options.get("rows") == "full":
                assert torch.equal(found[rank][i].output, found[0][i].output), "ranks hold different bits"


def steps_of(stack: Stack, new: list[list[int]], cut: Cut, idle: tuple[int, ...] = ()) -> list[Plan]:
    """Every block of every step over ranks, each on the rows and caches that the definition has before it."""
    plans: list[Plan] = []
    done, caches = [0] * len(new[0]), [[cache] * cut.cp_size for cache in stack.caches]
    for counts in new:
        ends = [a + b for a, b in zip(done, counts, strict=True)]
        stream, _, num_rows = step_inputs(stack, done, ends, cut, idle)
        for layer, (world, weights) in enumerate(zip(stack.worlds, stack.weights, strict=True)):
            shared = (world.step(done, ends, idle=idle)[1], world.config)
            options = {"compress_ratio": world.kind.ratio, "num_input_tokens": num_rows, "experts": stack.experts}
            options |= cut.modes
            out = ref.block_over_ranks(stream, weights, caches[layer], *shared, **options)
            own = [(x, weights, cache, *shared) for x, cache in zip(stream, caches[layer], strict=True)]
            due = [LayerOutput(*parts) for parts in zip(*out, strict=True)]
            name = "block_over_ranks_" if len(plans) % 2 else "block_over_ranks"
            plans.append(Plan(name, own, (), options, due))
            stream, caches[layer] = out.outputs, out.caches
        done = ends
    return plans


@pytest.mark.parametrize("size", [2, 4])
def test_a_stack_in_every_way(size: int) -> None:
    """Prefill, a decode row and a padded graph slot; fewer tokens than ranks in one step."""
    plans = []
    for i, (rows, experts) in enumerate(product(KEYS, EXPERTS)):
        output_mode = ("replicated_weight", "all_to_all")[i % 2]
        cut = Cut(size, ("zigzag", "contiguous")[i % 2], rows, KEYS[rows][i % 2], output_mode, padding=3 * (i % 2))
        rng = np.random.default_rng(i)
        config = config_for(rng, SMALL, cut)
        stack = stack_of(rng, [13, 9], [CSA, HCA], inter=8, experts=experts, limit=0.5, config=config)
        plans += steps_of(stack, [[12, 8], [1, 1]], cut, idle=(1,))
    assert_processes_agree(size, plans)


@fewer(20)
@given(seed=seeds, size=st.integers(2, 4), kind=st.sampled_from(EVERY_KIND))
def test_any_step_in_any_way(seed: int, size: int, kind: Any) -> None:
    rng = np.random.default_rng(seed)
    plans = []
    for experts in EXPERTS:
        cut = legal_cut(rng, kind.ratio)._replace(cp_size=size)
        lengths = [int(length) for length in rng.integers(0, 12, 2)]
        config = config_for(rng, SMALL, cut)
        stack = stack_of(rng, lengths, [kind], inter=12, experts=experts, config=config)
        plans += steps_of(stack, [lengths], cut)
    assert_processes_agree(size, plans)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_experts_and_last_rows_of_every_split(size: int) -> None:
    """Uneven and empty ranks, requests without new tokens; rows that only move, exactly."""
    rng = np.random.default_rng(size)
    weights, plans, moves = expert_of(rng, 6, 4, limit=0.5), [], []
    for split, lengths in product(EVERY_SPLIT, ([5, 0, 8], [1], [0], [])):
        loc = int32(np.cumsum([0, *lengths]))
        partition = partition_tokens(loc, size, split=split)
        x = normal(rng, sum(lengths), 4)
        shards = [local_rows(x, partition, rank) for rank in range(size)]
        for shard, tokens in zip(shards, partition.token_indices, strict=True):
            shard[tokens < 0] = np.nan
        for experts in EXPERTS:
            due = ref.experts_over_ranks(shards, weights, partition, experts=experts)
            own = [(shard, weights) for shard in shards]
            plans.append(Plan("experts_over_ranks", own, (partition,), {"experts": experts}, due))
        for function in (ref.last_rows, ref.gathered_last_rows):
            due = function(shards, partition, loc)
            moves.append(Plan(function.__name__, [(shard,) for shard in shards], (partition, loc), {}, due))
    assert_processes_agree(size, plans)
    found = found_by(size, moves)
    for i, plan in enumerate(moves):
        for rank, due in enumerate(plan.due):
            assert_same(found[rank][i], due, f"{plan.function} {i} rank {rank}")


def test_what_travels() -> None:
    """Whole experts and last rows on their owners: nothing. Shared experts: out and back. Last rows to all: once."""
    loc = int32([0, 5])
    partition = partition_tokens(loc, 2)
    weights = expert_of(np.random.default_rng(0), 6, 4)
    own = to_torch((np.ones((3, 4)),))
    with_weights = (*own, to_torch(weights))
    known = to_torch((partition, loc))
    for call, due in (
        (("experts_over_ranks", with_weights, known[:1], {"experts": "whole"}), []),
        (("experts_over_ranks", with_weights, known[:1], {"experts": "split"}), ["all_gather", "reduce_scatter"]),
        (("experts_over_ranks", with_weights, known[:1], {"experts": "sliced"}), ["all_gather", "all_reduce"]),
        (("last_rows", own, known, {}), []),
        (("gathered_last_rows", own, known, {}), ["all_gather"]),
    ):
        assert run(2, f"{WORK}:collectives", [(call,)] * 2) == [due] * 2


def test_refusals_are_those_of_one_process() -> None:
    """On all ranks, before any of them sends; the next call works."""
    loc = int32([0, 5])
    partition = to_torch(partition_tokens(loc, 2))
    weights = to_torch(expert_of(np.random.default_rng(0), 5, 4))
    (shard,) = to_torch((np.ones((3, 4)),))
    three = to_torch(partition_tokens(loc, 3))
    stack = stack_of(np.random.default_rng(1), [5], [WINDOW], inter=5, experts="split")
    world = stack.worlds[0]
    x, batch = world.step([0], [5])
    step = (*to_torch((x, stack.weights[0], world.cache, batch)), SMALL)
    uneven = (
        "UnsupportedError: cp_size must divide the 5 rows of w1 unless experts is 'whole', got 2; use experts='whole'"
    )
    other = (
        "ContractError: shards must come from the 3 ranks of the partition, got 2 ranks; "
        "split and gather over the same group"
    )
    (bad_loc,) = to_torch((int32([0, 4]),))
    cases = [
        (("experts_over_ranks", (shard, weights), (partition,), {"experts": "split"}), uneven),
        (("block_over_ranks_", step, (), {"compress_ratio": 1, "experts": "split"}), uneven),
        (("experts_over_ranks", (shard, weights), (three,), {}), other),
        (("last_rows", (shard,), (three, to_torch((loc,))[0]), {}), other),
        (
            ("gathered_last_rows", (shard,), (partition, bad_loc), {}),
            "ContractError: query_start_loc must end at the 5 tokens of the partition, got 4; build both from the same "
            "lengths",
        ),
        (
            ("experts_over_ranks", (shard, weights), (partition,), {"experts": "Split"}),
            "ContractError: experts must be one of 'whole', 'split', 'sliced', got 'Split'",
        ),
    ]
    good = ("experts_over_ranks", (shard, weights), (partition,), {"experts": "whole"})
    found = run(2, f"{WORK}:calls", [([*(call for call, _ in cases), good],)] * 2)
    for mine in found:
        assert mine[:-1] == [text for _, text in cases]
        assert mine[-1].shape == (3, 4)
