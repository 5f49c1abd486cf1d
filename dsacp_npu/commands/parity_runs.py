"""Running a `parity` scenario: on one device in two precisions, through transformers, and over ranks in a cell's way.

::

    exact    one device, float64            \\
    plain    one device, float32             } a Reference: once for a scenario and ratio
    theirs   transformers, float32          /
    over_ranks   float32, a cache a rank, compared with all three: once for a cell

`parity_cann` makes the Reference for cells in bfloat16, where the mirror on one device is the plain run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dsacp_npu.commands import outside
from dsacp_npu.commands.parity_caches import (
    foreign,
    fresh_cache,
    guarded,
    unguarded,
    with_block_copies,
    with_dtype,
    with_state_copies,
)
from dsacp_npu.commands.parity_cells import NUM_HEADS, O_GROUPS, Cell
from dsacp_npu.commands.parity_compare import MismatchError, scoring_noise, swapped_rows
from dsacp_npu.commands.parity_engines import DEFINITION, Way, engine
from dsacp_npu.commands.parity_scenarios import Plan, Scenario, Step, scenario, step_tokens
from dsacp_ref import layer
from dsacp_ref.config import AttentionConfig, split_rule
from dsacp_ref.indexer import index_head_weights, index_queries, index_scores
from dsacp_ref.layer import LayerCache, LayerOutput, LayerWeights, RanksOutput
from dsacp_ref.paging import gathered_rows, slot_mapping
from dsacp_ref.partition import Partition, partition_tokens
from dsacp_ref.quant import QuantizedVectors, int8_index_scores, quantized_int8
from dsacp_ref.rope import rope_table

# The window is shorter than most chunks, and a query chooses 6 of up to 80 entries.
CONFIG = replace(
    outside.SIZES["tiny"],
    hidden_size=64,
    num_heads=NUM_HEADS,
    o_groups=O_GROUPS,
    head_dim=32,
    o_lora_rank=8,
    index_n_heads=16,
    index_topk=6,
)


class Run(NamedTuple):
    """A scenario on one device.

    Fields:
        outputs: per step, float[rows, hidden].
        topk: per step, int32[rows, index_topk]; 0 wide without an indexer.
        scores: per step, float[rows, entries], NaN where a row does not see the entry.
        cache: after the last step.
    """

    outputs: list[np.ndarray]
    topk: list[np.ndarray]
    scores: list[np.ndarray]
    cache: LayerCache


class Reference(NamedTuple):
    """What every cell of a scenario is compared with.

    Fields:
        scenario, weights: Scenario, and LayerWeights in float32.
        exact: Run in float64.
        own: Run in float32.
        plain: Run in float32, given the exact selection.
        noise: of float32 scoring, see `scoring_noise`.
        theirs: per step, transformers' float32[rows, hidden], NaN in rows of no request; nothing in bfloat16.
        theirs_topk: per step, its int32[rows, index_topk], -1 in rows of no request; 0 wide without an indexer.
        config: of the layer.
        way: in which the cells run.
        start: the cache before the first step, the same for every run.
    """

    scenario: Scenario
    weights: LayerWeights
    exact: Run
    own: Run
    plain: Run
    noise: float
    theirs: list[np.ndarray]
    theirs_topk: list[np.ndarray]
    config: AttentionConfig
    way: Way
    start: LayerCache


# --- one device, and transformers ---


def reference(plan: Plan, ratio: int, seed: int, way: Way = DEFINITION) -> Reference:
    """All that the cells of one scenario are compared with. Needs torch and transformers."""
    layer_idx = CONFIG.compress_ratios.index(ratio)
    model = outside.build_model(CONFIG, seed=seed)
    weights = outside.reference_weights(outside.layer_weights(model, layer_idx))
    made = scenario(plan, ratio, hidden_size=CONFIG.hidden_size, seed=seed)
    start = fresh_cache(made, weights)
    exact = one_device(made, with_dtype(weights, np.float64), CONFIG, start)
    own = one_device(made, weights, CONFIG, start)
    plain = one_device(made, weights, CONFIG, start, exact.topk) if weights.indexer else own
    runs = {name: outside.block_output(model, layer_idx, rows) for name, rows in made.streams.items() if len(rows)}
    theirs, theirs_topk = [], []
    for step in made.steps:
        requests, positions = step_tokens(step)
        rows = np.full(step.x.shape, np.nan, np.float32)
        topk = np.full((len(rows), CONFIG.index_topk if weights.indexer else 0), -1, np.int32)
        for request, name in enumerate(step.requests):
            mine = requests == request
            if mine.any():
                rows[mine] = runs[name].outputs[positions[mine]]
                chosen = runs[name].selections
                if chosen is not None:
                    topk[mine] = chosen[positions[mine]]
        theirs.append(rows)
        theirs_topk.append(topk)
    noise = scoring_noise(exact.scores, own.scores)
    return Reference(made, weights, exact, own, plain, noise, theirs, theirs_topk, CONFIG, way, start)


def definition_layer(*args: Any, **options: Any) -> LayerOutput:
    """One step of the definition on one device."""
    return layer.attention_layer(*args, **options)


def unrounded(values: np.ndarray) -> np.ndarray:
    """The same values."""
    return values


def one_device(
    scenario: Scenario,
    weights: LayerWeights,
    config: AttentionConfig,
    start: LayerCache,
    given: Sequence[np.ndarray] | None = None,
    *,
    run_layer: Callable[..., LayerOutput] = definition_layer,
    stored: Callable[[np.ndarray], np.ndarray] = unrounded,
) -> Run:
    """The scenario on one device, in the precision of the weights; with a selection per step when it is given.

    ``run_layer`` makes a step; ``stored`` rounds index queries and weights as it stores them.
    """
    cache = with_dtype(start, weights.wkv.dtype.type)
    run = Run([], [], [], cache)
    for i, step in enumerate(scenario.steps):
        cache = with_block_copies(cache, step)
        masks = foreign(step, cache, scenario.ratio)
        out = run_layer(
            step.x.astype(weights.wkv.dtype),
            weights,
            guarded(cache, masks),
            step.batch,
            config,
            compress_ratio=scenario.ratio,
            given_topk=given[i] if given else None,
        )
        run.outputs.append(out.output)
        run.topk.append(out.topk_indices)
        run.scores.append(step_scores(step, out.cache, weights, config, scenario.ratio, stored))
        cache = with_state_copies(unguarded(out.cache, cache, masks), step)
    return run._replace(cache=cache)


def step_scores(
    step: Step,
    cache: LayerCache,
    weights: LayerWeights,
    config: AttentionConfig,
    ratio: int,
    stored: Callable[[np.ndarray], np.ndarray] = unrounded,
) -> np.ndarray:
    """The index score of every entry that each row sees after the step, else NaN; 0 wide without an indexer."""
    requests, positions = step_tokens(step)
    seq_lens = step.batch.seq_lens.tolist()
    width = max(seq_lens, default=0) // ratio if weights.indexer else 0
    dtype = weights.wkv.dtype
    scores = np.full((len(step.x), width), np.nan, dtype)
    if weights.indexer is None:
        return scores
    for request, seq_len in enumerate(seq_lens):
        rows = np.flatnonzero(requests == request)
        entries = np.arange(seq_len // ratio, dtype=np.int32)
        if not len(rows):
            continue
        x = step.x[rows].astype(dtype)
        table = rope_table(positions[rows].astype(np.int32), layer.layer_frequencies(config, ratio))
        d = config.index_head_dim
        latent = stored(layer.query_latent(x, weights, config))
        q = stored(index_queries(latent, weights.indexer.wq_b, *table, index_head_dim=d))
        head_weights = stored(index_head_weights(x, weights.indexer.weights_proj, index_head_dim=d))
        row_of_table = np.full(len(entries), request, np.int32)
        slots = slot_mapping(entries, row_of_table, step.batch.cmp_block_table, cache.cmp_cache.shape[1])
        seen = entries < (positions[rows, None] + 1) // ratio
        keys = cache.index_cache
        if isinstance(keys, QuantizedVectors):
            keys = QuantizedVectors(gathered_rows(keys.values, slots), gathered_rows(keys.scales, slots))
            all_scores = int8_index_scores(quantized_int8(q), head_weights.astype(np.float16), keys)
        else:
            all_scores = index_scores(q, head_weights, gathered_rows(keys, slots))
        scores[rows, : len(entries)] = np.where(seen, all_scores, np.nan)
    return scores


# --- over ranks ---


class RankStep(NamedTuple):
    """One step over ranks.

    Fields:
        result: RanksOutput, given the exact selection wherever a swap was accepted.
        tokens: per rank, int[rows], the step's row in each row of the output, -1 for a pad row; None when every rank
            holds all rows.
        swapped: bool[rows of the step], rows in which another selection was accepted.
        left_out: bool[rows of the step], rows whose output follows their own, swapped selection.
    """

    result: RanksOutput
    tokens: Sequence[np.ndarray] | None
    swapped: np.ndarray
    left_out: np.ndarray


def over_ranks(cell: Cell, reference: Reference) -> tuple[list[RankStep], list[LayerCache]]:
    """Every step of the scenario over ranks in the cell's way, and the ranks' caches after the last."""
    scenario = reference.scenario
    caches = [reference.start] * cell.ranks
    steps = []
    for i, step in enumerate(scenario.steps):
        caches = [with_block_copies(cache, step) for cache in caches]
        masks = foreign(step, caches[0], scenario.ratio)
        ranks = rank_step(cell, reference, i, [guarded(cache, masks) for cache in caches])
        after = zip(ranks.result.caches, caches, strict=True)
        caches = [with_state_copies(unguarded(cache, before, masks), step) for cache, before in after]
        steps.append(ranks)
    return steps, caches


def runs_by_heads(step: Step, cp_size: int, backend: str) -> bool:
    """Whether the step leaves the tokens whole: it only decodes, and the ranks divide the heads."""
    divides = NUM_HEADS % cp_size == 0 and O_GROUPS % cp_size == 0
    if backend == "cann":  # the operator takes 4 heads and their multiples
        divides = divides and NUM_HEADS // cp_size % 4 == 0
    return divides and not layer.uses_context_parallel(step.batch.query_start_loc, step.batch.seq_lens)


def rank_step(cell: Cell, reference: Reference, i: int, caches: list[LayerCache]) -> RankStep:
    """Step i over ranks, its selection compared with the exact one."""
    step, weights = reference.scenario.steps[i], reference.weights
    every = np.arange(len(step.x))
    if runs_by_heads(step, cell.ranks, reference.way.backend):
        run = engine(reference.way).by_heads
        by_heads = run(step.x, weights, caches, step.batch, reference.config, compress_ratio=cell.ratio)
        swapped = checked_selections(by_heads, [every] * cell.ranks, reference, i)
        return RankStep(by_heads, None, swapped, swapped)

    partition, inputs = rank_inputs(cell, step)
    result = run_layer(cell, reference, step, inputs, caches)
    swapped = checked_selections(result, partition.token_indices, reference, i)
    if swapped.any():
        rows = len(every) if cell.rows == "full" else int(step.batch.query_start_loc[-1])
        result = run_layer(cell, reference, step, inputs, caches, reference.exact.topk[i][:rows])
    tokens = None if cell.rows == "full" else partition.token_indices
    return RankStep(result, tokens, swapped, np.zeros(len(every), np.bool_))


def padded_rows(cell: Cell, step: Step) -> int | None:
    """The rows of the stream with its padding, for the two rules that cut a padded stream."""
    return len(step.x) if split_rule(cell.split).name in ("contiguous", "round_robin") else None


def rank_inputs(cell: Cell, step: Step) -> tuple[Partition, list[np.ndarray]]:
    """The split of the step, and what each rank holds before the layer, NaN in pad rows."""
    partition = partition_tokens(
        step.batch.query_start_loc, cell.ranks, split=cell.split, num_input_tokens=padded_rows(cell, step)
    )
    if cell.rows == "full":
        return partition, [step.x] * cell.ranks
    inputs = []
    for tokens in partition.token_indices:
        rows = np.full((len(tokens), step.x.shape[1]), np.nan, np.float32)
        rows[tokens >= 0] = step.x[tokens[tokens >= 0]]
        inputs.append(rows)
    return partition, inputs


def run_layer(
    cell: Cell,
    reference: Reference,
    step: Step,
    inputs: list[np.ndarray],
    caches: list[LayerCache],
    given_topk: np.ndarray | None = None,
) -> RanksOutput:
    """One step of the layer over ranks in the cell's way."""
    made: RanksOutput = engine(reference.way).over_ranks(
        inputs,
        reference.weights,
        caches,
        step.batch,
        reference.config,
        compress_ratio=cell.ratio,
        split=cell.split,
        rows=cell.rows,
        key_mode=cell.keys,
        output_mode=cell.output,
        num_input_tokens=padded_rows(cell, step),
        given_topk=given_topk,
    )
    return made


def checked_selections(result: RanksOutput, tokens: Sequence[np.ndarray], reference: Reference, i: int) -> np.ndarray:
    """In which rows of step i some rank chose another set than float64 did, after all are found acceptable."""
    expected, scores = reference.exact.topk[i], reference.exact.scores[i]
    swapped = np.zeros(len(expected), np.bool_)
    for rank, (topk, rows) in enumerate(zip(result.topk_indices, tokens, strict=True)):
        real = rows >= 0
        if len(topk) != len(rows) or (topk[~real] != -1).any():
            raise MismatchError(
                f"rank {rank}, step {i}: the selection has {len(topk)} rows for {len(rows)}, -1 in pad rows"
            )
        due = np.full((len(rows), expected.shape[1]), -1, np.int32)
        due[real] = expected[rows[real]]
        known = np.full((len(rows), scores.shape[1]), np.nan)
        known[real] = scores[rows[real]]
        try:
            different = swapped_rows(topk, due, known, reference.noise)
        except MismatchError as error:
            raise MismatchError(f"rank {rank}, step {i}, local {error}") from None
        swapped[rows[different]] = True
    return swapped
