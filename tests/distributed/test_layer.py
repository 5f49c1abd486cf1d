"""The whole layer with a process for every rank gives what one process gives that plays all ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref import layer as ref
from dsacp_ref.config import SPLITS
from dsacp_ref.partition import partition_tokens
from dsacp_ref.spec import UnsupportedError
from tests.distributed.pool import run
from tests.layer_strategies import CSA, EVERY_KIND, KINDS, SMALL, Cut, Kind, World, legal_cut, world_of, worlds
from tests.maths_strategies import seeds
from tests.mirror.common import compare_floats, to_torch
from tests.strategies import fewer

pytestmark = pytest.mark.xdist_group("processes")

OUTPUTS = ("all_to_all", "gather_weight", "replicated_weight")
KEYS = {
    "full": ("replicate", "gather_kv", "gather_compressed"),
    "scattered": ("gather_hidden", "gather_kv", "gather_compressed"),
}


class Step(NamedTuple):
    """One step over ranks."""

    world: World
    cut: Cut
    x: np.ndarray
    batch: ref.LayerBatch
    caches: list[ref.LayerCache]

    @property
    def options(self) -> dict[str, Any]:
        return {
            "compress_ratio": self.world.kind.ratio,
            "num_input_tokens": len(self.x) + self.cut.padding if self.cut.padding else None,
            **self.cut.modes,
        }

    @property
    def inputs(self) -> list[np.ndarray]:
        """What each rank holds; NaN where there is no token."""
        rows = np.concatenate([self.x, np.full((self.cut.padding + 1, self.x.shape[1]), np.nan)])
        if self.cut.rows == "full":
            return [rows[:-1]] * self.cut.cp_size
        partition = partition_tokens(
            self.batch.query_start_loc,
            self.cut.cp_size,
            split=self.cut.split,
            num_input_tokens=self.options["num_input_tokens"],
        )
        return [rows[np.where(tokens < 0, len(self.x), tokens)] for tokens in partition.token_indices]

    def reference(self) -> ref.RanksOutput:
        """All ranks in one process, by the definition."""
        shared = (self.world.weights, self.caches, self.batch, self.world.config)
        return ref.layer_over_ranks(self.inputs, *shared, **self.options)

    def call(self, rank: int, in_place: bool = False) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """One rank's part."""
        shared = (self.world.weights, self.caches[rank], self.batch, self.world.config)
        name = "layer_over_ranks_" if in_place else "layer_over_ranks"
        return name, to_torch((self.inputs[rank], *shared)), self.options


def steps_of(world: World, chunks: list[list[int]], cut: Cut, idle: tuple[int, ...] = ()) -> list[Step]:
    """Every step, each over the caches that the definition has after the one before."""
    caches, done, steps = [world.cache] * cut.cp_size, [0] * len(world.x), []
    for new in chunks:
        ends = [a + b for a, b in zip(done, new, strict=True)]
        step = Step(world, cut, *world.step(done, ends, idle=idle), caches)
        steps.append(step)
        caches, done = step.reference().caches, ends
    return steps


def assert_processes_agree(size: int, steps: list[Step]) -> None:
    """Every rank's output, selection and cache; rows that only move, exactly."""
    in_place = [bool(i % 2) for i in range(len(steps))]
    found = run(
        size,
        "tests.distributed.work:layers",
        [([step.call(rank, there) for step, there in zip(steps, in_place, strict=True)],) for rank in range(size)],
        timeout=300,
    )
    for i, step in enumerate(steps):
        want = step.reference()
        for rank in range(size):
            got = found[rank][i]
            due = ref.LayerOutput(want.outputs[rank], want.topk_indices[rank], want.caches[rank])
            compare_floats(got, due, due, f"step {i} {step.cut} rank {rank}")
            if step.cut.rows == "full":
                assert torch.equal(got.output, found[0][i].output), "ranks hold different bits"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"ratio {kind.ratio}")
def test_every_output_and_key_mode(size: int, kind: Kind) -> None:
    """Prefill behind a prefix, a decode row and a padded graph slot; fewer tokens than ranks in one step."""
    world = world_of(np.random.default_rng(size), [21, 9], config=replace(SMALL, o_groups=4), kind=kind)
    steps = []
    for i, (rows, output) in enumerate(product(("full", "scattered"), OUTPUTS)):
        for j, keys in enumerate(KEYS[rows]):
            split = ("contiguous", "zigzag", "contiguous_request", f"round_robin_page({kind.ratio})")[(i + j) % 4]
            padding = 3 if split == "contiguous" else 0
            cut = Cut(size, split, rows, keys, output, padding)
            steps += steps_of(world, [[16, 8], [1, 0], [4, 1]], cut, idle=(1,))
    assert_processes_agree(size, steps)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"ratio {kind.ratio}")
def test_three_processes_share_48_heads_and_24_groups(kind: Kind) -> None:
    world = world_of(np.random.default_rng(3), [17, 5], config=replace(SMALL, num_heads=48, o_groups=24), kind=kind)
    steps = []
    for output, rows in product(OUTPUTS, ("full", "scattered")):
        steps += steps_of(world, [[12, 5], [5, 0]], Cut(3, "zigzag", rows, KEYS[rows][-1], output))
    assert_processes_agree(3, steps)


def test_three_processes_are_refused_where_three_does_not_divide() -> None:
    """All ranks refuse, by name, before any of them sends; the next step works."""
    world = world_of(np.random.default_rng(4), [9])
    x, batch = world.step([0], [9])
    cut = Cut(3, "contiguous", "full", "replicate", "all_to_all")
    bad = Step(world, cut, x, batch, [world.cache] * 3)
    with pytest.raises(UnsupportedError) as refusal:
        bad.reference()
    good = bad._replace(cut=cut._replace(output_mode="replicated_weight"))
    found = run(3, "tests.distributed.work:layers", [([bad.call(rank), good.call(rank)],) for rank in range(3)])
    want = good.reference()
    for rank in range(3):
        assert found[rank][0] == str(refusal.value)
        due = ref.LayerOutput(want.outputs[rank], want.topk_indices[rank], want.caches[rank])
        compare_floats(found[rank][1], due, due, f"rank {rank}")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_by_heads(size: int) -> None:
    """What decode runs: every rank takes all rows and its share of the heads."""
    world = world_of(np.random.default_rng(5), [9, 6], config=replace(SMALL, o_groups=4), kind=CSA)
    x, batch = world.step([0, 0], [9, 6], idle=(1,))
    shared = (world.weights, world.cache, batch, world.config)
    want = ref.head_parallel_layer(x, shared[0], [world.cache] * size, *shared[2:], compress_ratio=4)
    options = {"compress_ratio": 4}
    calls = [(name, to_torch((x, *shared)), options) for name in ("head_parallel_layer", "head_parallel_layer_")]
    found = run(size, "tests.distributed.work:layers", [(calls,)] * size)
    for rank in range(size):
        due = ref.LayerOutput(want.outputs[rank], want.topk_indices[rank], want.caches[rank])
        for got in found[rank]:
            compare_floats(got, due, due, f"rank {rank}")


@fewer(10)
@given(made=worlds(kinds=EVERY_KIND, max_steps=3, num_heads=12, o_groups=12), seed=seeds, size=st.integers(2, 4))
def test_any_world_in_any_way(made: tuple[World, list[list[int]]], seed: int, size: int) -> None:
    """Uneven and empty ranks, every split, padding, chunks."""
    world, chunks = made
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(4):
        cut = legal_cut(rng, world.kind.ratio)._replace(cp_size=size)
        steps += steps_of(world, chunks, cut)
    assert_processes_agree(size, steps)


def test_the_splits_drawn_above_are_all_there_are() -> None:
    drawn = {legal_cut(np.random.default_rng(seed), 1).split.split("(")[0] for seed in range(200)}
    assert drawn == set(SPLITS)
