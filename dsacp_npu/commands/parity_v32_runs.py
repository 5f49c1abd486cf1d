"""Running a scenario of `parity --model v32`: on one device in two precisions, and over ranks in a cell's way.

::

    exact    the stack on one device, float64     \\
    plain    the same in float32                    } a StackReference: once for a scenario and kind of cache
    layers   each layer alone, beside transformers /
    over ranks   the stack in float64, caches of every layer on every rank: once for a cell

Cells run in float64, where only one in a billion choices or FP8 codes is too close to tell: so a stack, which shows no
choices, is compared through its caches, codes bit for bit, and one wrong choice moves everything behind it. What
float64 may lose is told by what float32 loses on one device, scaled down to float64's grain.

`parity_v32_cann` makes the reference for layers in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from dsacp_npu.commands.parity_caches import with_dtype
from dsacp_npu.commands.parity_compare import GRAINS
from dsacp_npu.commands.parity_engines import Way
from dsacp_npu.commands.parity_scenarios import Plan
from dsacp_npu.commands.parity_v32_caches import Layers, fresh_layers, guarded_step
from dsacp_npu.commands.parity_v32_cells import StackCell
from dsacp_npu.commands.parity_v32_engines import stack_over_ranks
from dsacp_npu.commands.parity_v32_layer import Choices, LayerCheck, Rows, layer_check
from dsacp_npu.commands.parity_v32_scenarios import StackScenario, StackStep, stack_scenario
from dsacp_npu.commands.parity_v32_weights import CONFIG, stack_weights
from dsacp_ref.config import split_rule
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.mla_layer import MLAWeights
from dsacp_ref.mla_stack import StackOutput, StackWeights, mla_decoder_stack
from dsacp_ref.partition import partition_tokens


class StackReference(NamedTuple):
    """What every cell of a scenario and a kind of cache is compared with.

    Fields:
        scenario: StackScenario.
        cache: ``"float"`` or ``"fp8"``.
        weights: StackWeights in float64; of a layer in bfloat16, MLAWeights in float32 that bfloat16 has.
        exact, plain: Rows in float64, and as the plain precision gives them.
        config: MLAConfig.
        way: in which the cells run.
        start: caches before the first step, the same for every run.
        checked: LayerCheck; None where transformers is not compared with.
        choices, noise, swaps, streams: of a layer in bfloat16: the exact Choices, see `scoring_noise`, rows in which
            the mirror chooses otherwise, and each request's hidden rows.
    """

    scenario: StackScenario
    cache: str
    weights: StackWeights | MLAWeights
    exact: Rows
    plain: Rows
    config: MLAConfig
    way: Way
    start: Layers
    checked: LayerCheck | None = None
    choices: Choices | None = None
    noise: float = 0.0
    swaps: int = 0
    streams: dict[str, np.ndarray] | None = None


def stack_reference(plan: Plan, cache: str, seed: int, way: Way) -> StackReference:
    """All that the cells of one scenario and kind of cache are compared with.

    Transformers is compared with by the definition, and once: over caches of numbers, which it has. It is needed there.
    """
    weights = stack_weights(seed)
    made = stack_scenario(plan, seed=seed)
    wide = with_dtype(weights, np.float64)
    sizes = (CONFIG, len(weights.blocks), made.num_blocks, made.block_size)
    start, single = (fresh_layers(*sizes, dtype, cache) for dtype in ("float64", "float32"))
    exact = one_device(made, wide, CONFIG, start)
    own = one_device(made, weights, CONFIG, single)
    checked = layer_check(made, seed) if cache == "float" and way.backend == "numpy" else None
    return StackReference(made, cache, wide, exact, own, CONFIG, way, start, checked)


# --- one device ---


def one_device(scenario: StackScenario, weights: StackWeights, config: MLAConfig, start: Layers) -> Rows:
    """The stack on one device, in the precision of the weights."""
    rows = Rows([], [], start)
    for step in scenario.steps:

        def run(caches: Layers, step: StackStep = step) -> tuple[Layers, StackOutput]:
            out = mla_decoder_stack(step.token_ids, weights, caches, step.batch, config)
            return out.caches, out

        caches, out = guarded_step(step, rows.caches, run)
        rows.hidden.append(out.hidden)
        rows.logits.append(out.logits)
        rows = rows._replace(caches=caches)
    return rows


# --- over ranks ---


class RankRows(NamedTuple):
    """One step over ranks, in the order of the step.

    Fields:
        hidden: float[tokens, hidden], put together from all ranks.
        owners: int[tokens], the rank that each row is from.
        logits: per rank, float[num_reqs, vocab].
        swapped: rows in which another selection was accepted, where choices are known.
    """

    hidden: np.ndarray
    owners: np.ndarray
    logits: list[np.ndarray]
    swapped: int = 0


def ranks_run(
    cell: StackCell,
    reference: StackReference,
    run_step: Callable[[StackCell, StackReference, int, list[Layers]], tuple[RankRows, list[Layers]]],
) -> tuple[list[RankRows], list[Layers]]:
    """Every step of the scenario over ranks, and each rank's caches after the last."""
    per_rank, steps = [reference.start] * cell.ranks, []
    for i, step in enumerate(reference.scenario.steps):

        def run(flat: Layers, i: int = i) -> tuple[Layers, RankRows]:
            layers = len(flat) // cell.ranks
            rows, after = run_step(cell, reference, i, [flat[r : r + layers] for r in range(0, len(flat), layers)])
            return list(chain.from_iterable(after)), rows

        after, rows = guarded_step(step, list(chain.from_iterable(per_rank)), run)
        layers = len(reference.start)
        per_rank = [after[r : r + layers] for r in range(0, len(after), layers)]
        steps.append(rows)
    return steps, per_rank


def stack_step(
    cell: StackCell, reference: StackReference, i: int, caches: list[Layers]
) -> tuple[RankRows, list[Layers]]:
    """Step i of the stack over ranks in the cell's way."""
    step = reference.scenario.steps[i]
    rows = padded_rows(cell, step)
    made = stack_over_ranks(
        reference.way,
        step.token_ids,
        reference.weights,  # type: ignore[arg-type]  # a stack's, out of stack_reference
        caches,
        step.batch,
        reference.config,
        split=cell.split,
        experts=cell.experts,
        num_input_tokens=rows,
    )
    tokens = partition_tokens(step.batch.query_start_loc, cell.ranks, split=cell.split, num_input_tokens=rows)
    hidden, owners = in_order(made.hidden, tokens.token_indices, len(step.token_ids))
    return RankRows(hidden, owners, made.logits), made.caches


def padded_rows(cell: StackCell, step: StackStep) -> int | None:
    """The rows of the stream with its padding, for the two rules that cut a padded stream."""
    return step.num_rows if split_rule(cell.split).name in ("contiguous", "round_robin") else None


def in_order(
    parts: Sequence[np.ndarray], tokens: Sequence[np.ndarray], num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The ranks' rows in the order of the step, and who had them; NaN, which no budget allows, where a pad row is not
    0, and where nobody had one."""
    rows = np.full((num_tokens, parts[0].shape[1]), np.nan, parts[0].dtype)
    owners = np.zeros(num_tokens, np.int64)
    for rank, (part, places) in enumerate(zip(parts, tokens, strict=True)):
        real = places >= 0
        rows[places[real]] = part[real] if not part[~real].any() else np.nan
        owners[places[real]] = rank
    return rows, owners


def float64_budget(exact: np.ndarray, single: np.ndarray) -> np.ndarray:
    """What float32 gives, with its error scaled down to float64's grain."""
    scaled: np.ndarray = exact + (single - exact) * GRAINS["float64"]
    return scaled
