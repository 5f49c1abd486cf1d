"""What `parity --backend cann` compares with: sizes that the operators take, bfloat16, and int8 index keys.

::

    start   the cache that all runs are given: a prefix, as the mirror leaves it in bfloat16
    exact   one device, float64, from the same cache: the definition, with the int8 indexer's choice
    own     one device, bfloat16, the mirror
    plain   one device, bfloat16, the mirror, given the exact selection

What a step does is judged alone: its prefix is the same, code for code. Prefixes are long enough that an indexer of
512 entries leaves some out, and that layers of ratio 128 have entries.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dsacp_npu.commands.parity_caches import fresh_cache, with_dtype
from dsacp_npu.commands.parity_cells import NUM_HEADS, O_GROUPS
from dsacp_npu.commands.parity_compare import scoring_noise
from dsacp_npu.commands.parity_engines import Way, one_device_layer, rounded
from dsacp_npu.commands.parity_runs import Reference, one_device
from dsacp_npu.commands.parity_scenarios import Plan, Scenario, scenario
from dsacp_ref.compressor import CompressorWeights
from dsacp_ref.config import AttentionConfig, v4_flash
from dsacp_ref.indexer import IndexerWeights
from dsacp_ref.layer import LayerCache, LayerWeights

# Head sizes, index heads and width of the selection are the released ones, and what the operators take.
CONFIG = replace(
    v4_flash(),
    num_hidden_layers=3,
    compress_ratios=(1, 4, 128),
    hidden_size=1024,
    num_heads=NUM_HEADS,
    q_lora_rank=128,
    o_groups=O_GROUPS,
    o_lora_rank=32,
)
BLOCK_SIZE, CMP_BLOCK_SIZE = 32, 16  # the operators take multiples of 16

PLANS = {
    plan.name: plan
    for plan in (
        # Chunks behind prefixes: 650 entries, of which 512 are chosen; b ends an entry of 128 tokens in the first step,
        # c is new. Then decode rows among chunks with a padded slot, and a step of decode rows alone, by heads.
        Plan(
            name="chunks",
            before={"a": 2601, "b": 250},
            steps=({"a": 9, "b": 8, "c": 6}, {"a": 1, "_1": 2, "b": 7, "c": 1}, {"a": 1, "b": 1, "c": 1}),
            padding=3,
        ),
        # No prefix: a ends an entry of 128, and has a window behind it.
        Plan(name="prefill", steps=({"a": 135, "b": 5},)),
    )
}


def reference(plan: Plan, ratio: int, seed: int, way: Way) -> Reference:
    """All that the cells of one scenario are compared with. Needs torch."""
    weights = rounded(drawn_weights(ratio, seed), way.dtype)
    sizes = {"block_size": BLOCK_SIZE, "cmp_block_size": CMP_BLOCK_SIZE}
    made = rounded_rows(scenario(plan, ratio, hidden_size=CONFIG.hidden_size, seed=seed, **sizes), way.dtype)
    start = filled_cache(made, weights, way)

    def mirror(*args: object, **options: object) -> object:
        return one_device_layer(way, *args, **options)

    def stored(values: np.ndarray) -> np.ndarray:
        return rounded(values, way.dtype)

    half = {"run_layer": mirror, "stored": stored}
    exact = one_device(made, with_dtype(weights, np.float64), CONFIG, start)
    own = one_device(made, weights, CONFIG, start, **half)
    plain = one_device(made, weights, CONFIG, start, exact.topk, **half) if weights.indexer else own
    noise = scoring_noise(exact.scores, own.scores)
    return Reference(made, weights, exact, own, plain, noise, [], [], CONFIG, way, start)


def drawn_weights(ratio: int, seed: int) -> LayerWeights:
    """Random weights, wide enough that softmax, gates and top-k make real choices; as `outside` draws them."""
    rng = np.random.default_rng([seed, ratio])
    config, hidden, latent = CONFIG, CONFIG.hidden_size, CONFIG.q_lora_rank

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(1.5 / shape[-1] ** 0.5)

    def norm(width: int) -> np.ndarray:
        return 1 + np.float32(0.3) * rng.standard_normal(width, dtype=np.float32)

    def compressor(width: int) -> CompressorWeights:
        rows = (2 if ratio == 4 else 1) * width
        bias = rng.standard_normal((ratio, rows), dtype=np.float32)
        return CompressorWeights(matrix(rows, hidden), matrix(rows, hidden), bias, norm(width))

    indexer = None
    if ratio == 4:
        heads, width = config.index_n_heads, config.index_head_dim
        indexer = IndexerWeights(matrix(heads * width, latent), matrix(heads, hidden), compressor(width))
    return LayerWeights(
        matrix(latent, hidden),
        norm(latent),
        matrix(config.num_heads * config.head_dim, latent),
        matrix(config.head_dim, hidden),
        norm(config.head_dim),
        2 * rng.standard_normal(config.num_heads, dtype=np.float32),
        matrix(config.o_groups, config.o_lora_rank, config.num_heads // config.o_groups * config.head_dim),
        matrix(hidden, config.o_groups * config.o_lora_rank),
        compressor(config.head_dim) if ratio > 1 else None,
        indexer,
    )


def rounded_rows(made: Scenario, dtype: str) -> Scenario:
    """The scenario with hidden rows that have this dtype's values."""
    steps = [step and step._replace(x=rounded(step.x, dtype)) for step in (made.before, *made.steps)]
    streams = {name: rounded(rows, dtype) for name, rows in made.streams.items()}
    return made._replace(streams=streams, before=steps[0], steps=tuple(steps[1:]))


def filled_cache(made: Scenario, weights: LayerWeights, way: Way) -> LayerCache:
    """The cache before the first step: empty, or with what the plan's requests have had.

    A cache does not hang on queries, so they have one head here, and no choice.
    """
    cache = fresh_cache(made, weights, int8_index_cache=True)
    if made.before is None:
        return cache
    few: AttentionConfig = replace(CONFIG, num_heads=1, o_groups=1)
    cut = weights._replace(
        wq_b=weights.wq_b[: few.head_dim],
        attn_sink=weights.attn_sink[:1],
        wo_a=weights.wo_a[:1, :, : few.head_dim],
        wo_b=weights.wo_b[:, : few.o_lora_rank],
    )
    x, batch = made.before.x, made.before.batch
    nothing = np.full((len(x), few.index_topk), -1, np.int32) if weights.indexer else None
    filled = one_device_layer(way, x, cut, cache, batch, few, compress_ratio=made.ratio, given_topk=nothing)
    return filled.cache
