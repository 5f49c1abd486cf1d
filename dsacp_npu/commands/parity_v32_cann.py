"""`parity --model v32 --backend cann`: one layer on operators, in sizes that they take, in bfloat16.

::

    start   the cache that all runs are given: a prefix, as the mirror leaves it in bfloat16
    exact   one device, float64, from the same cache: the definition
    own     one device, bfloat16, the mirror
    plain   one device, bfloat16, the mirror, given the exact selection

The prefix is long enough that an indexer of 128 tokens leaves most out. No operator is in experts, norms and the
residual, so a layer is tried and not a stack; caches in FP8 have to be refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dsacp_npu.commands.parity_caches import with_dtype
from dsacp_npu.commands.parity_compare import MismatchError, scoring_noise, swapped_rows
from dsacp_npu.commands.parity_engines import Way, rounded
from dsacp_npu.commands.parity_scenarios import Plan
from dsacp_npu.commands.parity_v32_caches import Layers, fresh_layers
from dsacp_npu.commands.parity_v32_cells import StackCell
from dsacp_npu.commands.parity_v32_engines import layer_over_ranks, mirror_layer
from dsacp_npu.commands.parity_v32_layer import accepted, by_step, one_layer
from dsacp_npu.commands.parity_v32_runs import RankRows, StackReference, in_order, padded_rows
from dsacp_npu.commands.parity_v32_scenarios import StackScenario, stack_scenario
from dsacp_npu.commands.parity_v32_weights import layer_weights
from dsacp_ref.mla_config import v32
from dsacp_ref.mla_layer import MLACache, MLAOutput, MLARanksOutput, MLAWeights
from dsacp_ref.partition import partition_tokens

# Head sizes of latents and index heads are the released ones, and what the operators take.
CONFIG = replace(
    v32(),
    hidden_size=256,
    num_hidden_layers=1,
    num_heads=4,
    q_lora_rank=96,
    nope_head_dim=32,
    v_head_dim=32,
    index_topk=128,
)
BLOCK_SIZE = 32  # the operators take multiples of 16

LAYER_PLANS = {
    plan.name: plan
    for plan in (
        # Chunks behind a long prefix and a short one, and a new request; then decode rows among chunks with a padded
        # slot, and a step of decode rows alone: fewer than most ranks.
        Plan(
            name="chunks",
            before={"a": 301, "b": 50},
            steps=({"a": 9, "b": 8, "c": 6}, {"a": 1, "_1": 2, "b": 7, "c": 1}, {"a": 1, "b": 1, "c": 1}),
            padding=3,
        ),
        Plan(name="prefill", steps=({"a": 150, "b": 5},)),
    )
}


def layer_reference(plan: Plan, cache: str, seed: int, way: Way) -> StackReference:
    """All that the cells of one scenario and kind of cache are compared with. Needs torch."""
    weights = rounded(layer_weights(np.random.default_rng([seed, 32]), CONFIG), way.dtype)
    made = stack_scenario(plan, seed=seed, block_size=BLOCK_SIZE)
    streams = drawn_rows(made, seed, way)
    sizes = (CONFIG, 1, made.num_blocks, made.block_size)
    start = filled(made, streams, weights, fresh_layers(*sizes, "float32", "float")[0], way)
    wide = MLACache(*with_dtype(start, np.float64))

    def mirror(*args: Any, **options: Any) -> MLAOutput:
        return mirror_layer(way, *args, **options)

    def stored(values: np.ndarray) -> np.ndarray:
        made: np.ndarray = rounded(values, way.dtype)
        return made

    half: dict[str, Any] = {"run_layer": mirror, "stored": stored}
    exact, choices = one_layer(made, streams, with_dtype(weights, np.float64), CONFIG, wide)
    _, own = one_layer(made, streams, weights, CONFIG, start, **half)
    plain, _ = one_layer(made, streams, weights, CONFIG, start, choices.topk, **half)
    noise = scoring_noise(choices.scores, own.scores)
    swaps = sum(accepted("one device in bfloat16", own.topk, choices, noise))
    return StackReference(
        made,
        cache,
        weights,
        exact,
        plain,
        CONFIG,
        way,
        [start],
        choices=choices,
        noise=noise,
        swaps=swaps,
        streams=streams,
    )


def drawn_rows(made: StackScenario, seed: int, way: Way) -> dict[str, np.ndarray]:
    """The hidden rows of every request, with values that the way's dtype has."""
    rng = np.random.default_rng([seed, 33])
    shapes = {name: (len(ids), CONFIG.hidden_size) for name, ids in made.streams.items()}
    return {name: rounded(rng.standard_normal(shape, dtype=np.float32), way.dtype) for name, shape in shapes.items()}


def filled(
    made: StackScenario, streams: dict[str, np.ndarray], weights: MLAWeights, cache: MLACache, way: Way
) -> MLACache:
    """The cache before the first step: empty, or with what the plan's requests have had. It hangs on no choice."""
    if made.before is None:
        return cache
    x = by_step(made.before, streams, np.nan)
    nothing = np.full((len(x), CONFIG.index_topk), -1, np.int32)
    return mirror_layer(way, x, weights, cache, made.before.batch, CONFIG, given_topk=nothing).cache


# --- over ranks ---


def layer_step(
    cell: StackCell, reference: StackReference, i: int, caches: list[Layers]
) -> tuple[RankRows, list[Layers]]:
    """Step i of the layer over ranks, its selection compared with the exact one."""
    step, (choices, streams) = reference.scenario.steps[i], (reference.choices, reference.streams)
    assert choices is not None  # layer_reference made both
    assert streams is not None
    x, padded = by_step(step, streams, np.nan), padded_rows(cell, step)
    places = partition_tokens(
        step.batch.query_start_loc, cell.ranks, split=cell.split, num_input_tokens=padded
    ).token_indices
    shards = []
    for tokens in places:
        rows = np.full((len(tokens), x.shape[1]), np.nan, np.float32)
        rows[tokens >= 0] = x[tokens[tokens >= 0]]
        shards.append(rows)

    def run(given: np.ndarray | None) -> MLARanksOutput:
        own = [layers[0] for layers in caches]
        modes = {"split": cell.split, "num_input_tokens": padded, "given_topk": given}
        weights: Any = reference.weights
        return layer_over_ranks(reference.way, shards, weights, own, step.batch, reference.config, **modes)

    made = run(None)
    chosen = np.full_like(choices.topk[i], -2)
    for rank, (topk, tokens) in enumerate(zip(made.topk_indices, places, strict=True)):
        if len(topk) != len(tokens) or (topk[tokens < 0] != -1).any():
            raise MismatchError(f"rank {rank}, step {i}: the selection has no row a token, -1 in pad rows")
        chosen[tokens[tokens >= 0]] = topk[tokens >= 0]
    try:
        swapped = swapped_rows(chosen, choices.topk[i], choices.scores[i], reference.noise)
    except MismatchError as error:
        raise MismatchError(f"step {i}: {error}") from None
    if swapped.any():
        made = run(choices.topk[i])
    hidden, owners = in_order(made.outputs, places, len(x))
    return RankRows(hidden, owners, [], int(swapped.sum())), [[cache] for cache in made.caches]
