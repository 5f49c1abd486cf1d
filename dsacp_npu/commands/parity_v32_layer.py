"""One layer of V3.2 alone on one device: in several precisions, and beside the attention of transformers.

A stack shows no choices; here they are seen, and compared as sets. The rows that a layer gets are the ones that the
other model's block got, in the steps of the scenario and from paged caches, where the other took a request whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dsacp_npu.commands.parity_caches import with_dtype
from dsacp_npu.commands.parity_compare import MismatchError, Place, scoring_noise, swapped_rows
from dsacp_npu.commands.parity_v32_caches import Layers, fresh_layers, guarded_step
from dsacp_npu.commands.parity_v32_outside import BlockRun, model_blocks
from dsacp_npu.commands.parity_v32_scenarios import StackScenario, StackStep
from dsacp_npu.commands.parity_v32_weights import CONFIG, stack_weights
from dsacp_ref.indexer import index_head_weights, index_scores
from dsacp_ref.mla import mla_frequencies, token_index_queries
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.mla_layer import MLACache, MLAOutput, MLAWeights, mla_attention_layer
from dsacp_ref.paging import gathered_rows, slot_mapping
from dsacp_ref.rope import rope_table

# Against transformers no budget can be computed, because there is no float64 run of it: its norms and its indexer are
# float32. Outputs of 7 to 11 are less than 1e-5 off; eps 1e-3 in the place of 1e-6 moves 1e-3, YaRN's details move 0.2.
THEIRS_LIMIT = 2e-5


class Rows(NamedTuple):
    """What a scenario gives, step by step, and leaves behind.

    Fields:
        hidden: per step, float[tokens, hidden]: after the last norm, or a layer's output.
        logits: per step, float[num_reqs, vocab]; none of a layer alone.
        caches: one MLACache a layer, after the last step.
    """

    hidden: list[np.ndarray]
    logits: list[np.ndarray]
    caches: Layers


class Choices(NamedTuple):
    """What one layer chose in a scenario.

    Fields:
        topk: per step, int32[tokens, index_topk].
        scores: per step, float[tokens, keys], NaN where a token does not see the key.
    """

    topk: list[np.ndarray]
    scores: list[np.ndarray]


def one_layer(
    scenario: StackScenario,
    streams: dict[str, np.ndarray],
    weights: MLAWeights,
    config: MLAConfig,
    start: MLACache,
    given: Sequence[np.ndarray] | None = None,
    *,
    run_layer: Callable[..., MLAOutput] = mla_attention_layer,
    stored: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> tuple[Rows, Choices]:
    """One layer alone on one device; with a selection per step when it is given.

    ``streams`` are the hidden rows of every request; ``run_layer`` makes a step, and ``stored`` rounds index queries
    and weights as it stores them.
    """
    rows, choices, dtype = Rows([], [], [start]), Choices([], []), weights.wq_a.dtype
    for i, step in enumerate(scenario.steps):
        x = by_step(step, streams, np.nan).astype(dtype)

        def run(caches: Layers, i: int = i, step: StackStep = step, x: np.ndarray = x) -> tuple[Layers, MLAOutput]:
            chosen = given[i] if given else None
            out = run_layer(x, weights, caches[0], step.batch, config, given_topk=chosen)
            return [out.cache], out

        caches, out = guarded_step(step, rows.caches, run)
        rows.hidden.append(out.output)
        choices.topk.append(out.topk_indices)
        choices.scores.append(layer_scores(step, x, out.cache, weights, config, stored))
        rows = rows._replace(caches=caches)
    return rows, choices


def layer_scores(
    step: StackStep,
    x: np.ndarray,
    cache: MLACache,
    weights: MLAWeights,
    config: MLAConfig,
    stored: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """The index score of every key that each row sees after the step, else NaN."""
    requests, positions = step.tokens()
    seq_lens = step.batch.seq_lens.tolist()
    scores = np.full((len(x), max(seq_lens, default=0)), np.nan, x.dtype)
    d, keys = config.index_head_dim, cache.index_cache
    assert isinstance(keys, np.ndarray)  # no codes: with those, choices are not looked at
    for request, seq_len in enumerate(seq_lens):
        rows = np.flatnonzero(requests == request)
        if not len(rows):
            continue
        places = positions[rows].astype(np.int32)
        table = rope_table(places, mla_frequencies(config))
        latent = stored(query_latent(x[rows], weights, config))
        q = stored(token_index_queries(latent, weights.indexer.wq_b, *table, index_head_dim=d))
        heads = stored(index_head_weights(x[rows], weights.indexer.weights_proj, index_head_dim=d))
        tokens = np.arange(seq_len, dtype=np.int32)
        owner = np.full(seq_len, request, np.int32)
        slots = slot_mapping(tokens, owner, step.batch.block_table, keys.shape[1])
        found = index_scores(q, heads, gathered_rows(keys, slots).astype(x.dtype))
        scores[rows, :seq_len] = np.where(tokens <= places[:, None], found, np.nan)
    return scores


def query_latent(x: np.ndarray, weights: MLAWeights, config: MLAConfig) -> np.ndarray:
    """What a layer's queries are projected from."""
    projected = x @ weights.wq_a.T.astype(x.dtype)
    square = np.mean(projected * projected, axis=1, keepdims=True) + config.rms_norm_eps
    normed: np.ndarray = (projected / np.sqrt(square) * weights.q_norm).astype(x.dtype)
    return normed


# --- beside transformers ---


class LayerCheck(NamedTuple):
    """Every layer of the stack beside transformers', in one scenario.

    Fields:
        text: what is wrong; empty when nothing is.
        swaps, theirs_swaps: rows in which float32, and transformers, chose otherwise than float64.
        theirs: largest absolute difference from transformers, rows of another selection left out.
        given: the difference in all rows, given transformers' selection.
    """

    text: str = ""
    swaps: int = 0
    theirs: float = 0.0
    theirs_swaps: int = 0
    given: float = 0.0


def layer_check(scenario: StackScenario, seed: int) -> LayerCheck:
    """Our layers and transformers' on the same rows. Needs torch and transformers."""
    found = LayerCheck()
    recorded = {name: model_blocks(seed, ids) for name, ids in scenario.streams.items() if len(ids)}
    for layer, block in enumerate(stack_weights(seed).blocks):
        theirs = {name: blocks[layer] for name, blocks in recorded.items()}
        try:
            one = checked_layer(scenario, block.attention, theirs)
        except MismatchError as error:
            return found._replace(text=f"layer {layer}, {error}")
        counts = found.swaps + one.swaps, max(found.theirs, one.theirs), found.theirs_swaps + one.theirs_swaps
        found = LayerCheck("", *counts, max(found.given, one.given))
    return found


def checked_layer(scenario: StackScenario, weights: MLAWeights, theirs: dict[str, BlockRun]) -> LayerCheck:
    """One layer beside the runs of another one with its weights."""
    streams = {name: run.inputs for name, run in theirs.items()}
    sizes = (CONFIG, 1, scenario.num_blocks, scenario.block_size)
    wide, single = (fresh_layers(*sizes, dtype, "float")[0] for dtype in ("float64", "float32"))
    _, exact = one_layer(scenario, streams, with_dtype(weights, np.float64), CONFIG, wide)
    rows, own = one_layer(scenario, streams, weights, CONFIG, single)
    noise = scoring_noise(exact.scores, own.scores)
    topk = [by_step(step, {name: run.selections for name, run in theirs.items()}, -1) for step in scenario.steps]
    due = [by_step(step, {name: run.outputs for name, run in theirs.items()}, np.nan) for step in scenario.steps]
    swaps = accepted("one device in float32", own.topk, exact, noise)
    theirs_swaps = accepted("transformers", topk, exact, noise)
    same = [~other_sets(mine, chosen) for mine, chosen in zip(own.topk, topk, strict=True)]
    off, at = largest_difference(scenario, rows.hidden, due, same)
    given, given_at = off, at
    if not all(rows.all() for rows in same):
        told, _ = one_layer(scenario, streams, weights, CONFIG, single, topk)
        given, given_at = largest_difference(scenario, told.hidden, due, [np.ones_like(rows) for rows in same])
    if not max(off, given) < THEIRS_LIMIT:
        worst, place = max((off, at), (given, given_at), key=lambda pair: pair[0])
        raise MismatchError(f"one device is {worst:.3g} off transformers at {place}, allowed {THEIRS_LIMIT}")
    return LayerCheck("", sum(swaps), off, sum(theirs_swaps), given)


def by_step(step: StackStep, streams: dict[str, np.ndarray], nobody: float) -> np.ndarray:
    """The streams' rows of a step, and this value for graph slots."""
    first = next(iter(streams.values()))
    rows = np.full((len(step.token_ids), first.shape[1]), nobody, first.dtype)
    requests, positions = step.tokens()
    for request, name in enumerate(step.requests):
        mine = requests == request
        if mine.any():
            rows[mine] = streams[name][positions[mine]]
    return rows


def accepted(who: str, topk: Sequence[np.ndarray], exact: Choices, noise: float) -> list[int]:
    """In how many rows of each step another set than float64's was chosen, after all are found acceptable."""
    swaps = []
    for i, (chosen, due, scores) in enumerate(zip(topk, exact.topk, exact.scores, strict=True)):
        try:
            swaps.append(int(swapped_rows(chosen, due, scores, noise).sum()))
        except MismatchError as error:
            raise MismatchError(f"{who}, step {i}: {error}") from None
    return swaps


def other_sets(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """bool[rows]: where two selections are not the same set."""
    differ: np.ndarray = (np.sort(mine, axis=1) != np.sort(theirs, axis=1)).any(axis=1)
    return differ


def largest_difference(
    scenario: StackScenario, ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], compared: Sequence[np.ndarray]
) -> tuple[float, Place]:
    """The largest absolute difference in the rows that are compared and belong to somebody, and where."""
    worst, place = 0.0, Place(0, "-", 0, 0)
    for i, (step, mine, due, rows) in enumerate(zip(scenario.steps, ours, theirs, compared, strict=True)):
        requests, positions = step.tokens()
        difference = np.abs(mine - np.nan_to_num(due)).max(axis=1, initial=0)
        difference = np.where(rows & (requests >= 0), np.nan_to_num(difference, nan=np.inf), 0)
        if difference.max(initial=0) > worst:
            row = int(difference.argmax())
            worst, place = float(difference[row]), Place(0, step.requests[requests[row]], int(positions[row]), i)
    return worst, place
