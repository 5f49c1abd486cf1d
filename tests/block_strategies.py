"""Stacks of decoder blocks around the layer's worlds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from dsacp_ref.block import BlockWeights, ExpertWeights, block_over_ranks, decoder_block
from dsacp_ref.layer import LayerCache
from dsacp_ref.partition import Partition, partition_tokens
from tests.layer_strategies import (
    EVERY_KIND,
    SMALL,
    Cut,
    Kind,
    World,
    chunkings,
    config_for,
    frozen,
    legal_cut,
    oracle_config,
    oracle_weights,
    world_of,
)
from tests.maths_strategies import seeds
from tests.strategies import read_only

LIMITS = (None, 0.5, 10.0)


def expert_of(
    rng: np.random.Generator, inter: int, hidden: int, dtype: Any = np.float64, limit: float | None = None
) -> ExpertWeights:
    """Weights wide enough that gates open and close, and a low limit is met."""

    def matrix(*shape: int) -> np.ndarray:
        return (1.5 * rng.standard_normal(shape) / np.sqrt(max(shape[-1], 1))).astype(dtype)

    return frozen(ExpertWeights(matrix(inter, hidden), matrix(inter, hidden), matrix(hidden, inter), limit))


class Stack(NamedTuple):
    """Some requests, whole, and blocks with room for them: all layers see the same requests."""

    worlds: list[World]
    weights: list[BlockWeights]
    experts: str

    @property
    def caches(self) -> list[LayerCache]:
        """Every layer's, before the first step."""
        return [world.cache for world in self.worlds]


def stack_of(
    rng: np.random.Generator,
    lengths: Sequence[int],
    kinds: Sequence[Kind],
    *,
    inter: int = 6,
    experts: str = "whole",
    limit: float | None = None,
    **options: Any,
) -> Stack:
    """A block of each kind over the same requests, every layer with weights, tables and caches of its own."""
    first = world_of(rng, lengths, kind=kinds[0], **options)
    worlds = [first, *(world_of(rng, lengths, kind=kind, x=first.x, **options) for kind in kinds[1:])]
    hidden, dtype = first.config.hidden_size, first.cache.swa_cache.dtype

    def gain() -> np.ndarray:
        return read_only((1 + 0.3 * rng.standard_normal(hidden)).astype(dtype))

    weights = [
        BlockWeights(gain(), world.weights, gain(), expert_of(rng, inter, hidden, dtype, limit)) for world in worlds
    ]
    return Stack(worlds, weights, experts)


def oracle_blocks(stack: Stack) -> list[dict[str, Any]]:
    """The blocks as the oracle takes them."""
    return [
        {
            "attn_norm": weights.attn_norm,
            "attention": oracle_weights(weights.attention),
            "config": oracle_config(world.config, world.kind.ratio),
            "ratio": world.kind.ratio,
            "ffn_norm": weights.ffn_norm,
            "expert": weights.experts,
        }
        for world, weights in zip(stack.worlds, stack.weights, strict=True)
    ]


class Shards(NamedTuple):
    """One step of a whole stack over ranks."""

    partition: Partition
    outputs: list[np.ndarray]
    topk: list[list[np.ndarray]]  # of every layer, of every rank
    caches: list[list[LayerCache]]


def one_device_step(
    stack: Stack, starts: Sequence[int], ends: Sequence[int], caches: list[LayerCache], idle: Sequence[int] = ()
) -> tuple[np.ndarray, list[np.ndarray], list[LayerCache]]:
    """The residual stream after all blocks, every layer's selection and cache."""
    x, topk, after = stack.worlds[0].step(starts, ends, idle=idle)[0], [], []
    for world, weights, cache in zip(stack.worlds, stack.weights, caches, strict=True):
        batch = world.step(starts, ends, idle=idle)[1]
        out = decoder_block(read_only(x), weights, cache, batch, world.config, compress_ratio=world.kind.ratio)
        x = out.output
        topk.append(out.topk_indices)
        after.append(frozen(out.cache))
    return x, topk, after


def step_inputs(
    stack: Stack, starts: Sequence[int], ends: Sequence[int], cut: Cut, idle: Sequence[int] = ()
) -> tuple[list[np.ndarray], Partition, int | None]:
    """What every rank holds before the first block, NaN where there is no request; the layout; the padded rows."""
    x, batch = stack.worlds[0].step(starts, ends, idle=idle)
    num_rows = len(x) + cut.padding if cut.padding else None
    partition = partition_tokens(batch.query_start_loc, cut.cp_size, split=cut.split, num_input_tokens=num_rows)
    padded = np.concatenate([x, np.full((cut.padding + 1, x.shape[1]), np.nan, x.dtype)])
    if cut.rows == "full":
        return frozen([padded[: len(x) + cut.padding].copy()] * cut.cp_size), partition, num_rows
    return (
        frozen([padded[np.where(tokens < 0, len(x), tokens)] for tokens in partition.token_indices]),
        partition,
        num_rows,
    )


def step_over_ranks(
    stack: Stack,
    starts: Sequence[int],
    ends: Sequence[int],
    caches: list[list[LayerCache]],
    cut: Cut,
    idle: Sequence[int] = (),
) -> Shards:
    """The blocks one after the other: what one gives is what the next one takes."""
    stream, partition, num_rows = step_inputs(stack, starts, ends, cut, idle)
    topk, after = [], []
    for world, weights, own in zip(stack.worlds, stack.weights, caches, strict=True):
        out = block_over_ranks(
            stream,
            weights,
            own,
            world.step(starts, ends, idle=idle)[1],
            world.config,
            compress_ratio=world.kind.ratio,
            experts=stack.experts,
            num_input_tokens=num_rows,
            **cut.modes,
        )
        stream = frozen(out.outputs)
        topk.append(out.topk_indices)
        after.append(frozen(out.caches))
    return Shards(partition, stream, topk, after)


@st.composite
def stacks_over_ranks(
    draw: st.DrawFn, *, num_cuts: int = 3, num_blocks: int = 2, max_steps: int = 3
) -> list[tuple[Stack, list[list[int]], Cut]]:
    """The same requests and steps under several combinations, each with heads and experts that its ranks can share."""
    kinds = draw(st.lists(st.sampled_from(EVERY_KIND), min_size=num_blocks, max_size=num_blocks))
    steps = draw(chunkings(kinds[0].ratio, max_steps=max_steps))
    rng = np.random.default_rng(draw(seeds))
    cases = []
    for _ in range(num_cuts):
        cut = legal_cut(rng, math.lcm(*(kind.ratio for kind in kinds)))
        experts = ("whole", "split", "sliced")[int(rng.integers(3))]
        inter = int(rng.integers(1, 8)) if experts == "whole" else cut.cp_size * int(rng.integers(1, 3))
        stack = stack_of(
            rng,
            [sum(new) for new in zip(*steps, strict=True)],
            kinds,
            inter=inter,
            experts=experts,
            limit=LIMITS[int(rng.integers(3))],
            config=config_for(rng, SMALL, cut),
        )
        cases.append((stack, steps, cut))
    return cases
