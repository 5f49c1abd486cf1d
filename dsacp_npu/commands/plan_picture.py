"""The pictures of `plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsacp_npu import plots
from dsacp_npu.commands.plan_rows import PARTS, shown_of
from dsacp_npu.planning.costs import Cost
from dsacp_npu.planning.replay import Replay
from dsacp_npu.planning.schemes import Scheme, engine_of

if TYPE_CHECKING:
    from dsacp_npu.commands.plan import Answer


def draw_plan(path: str, answer: Answer, num_ranks: int) -> None:
    """The time of the schemes that the table shows, part by part."""
    plan = answer.plan
    costs = [cost for cost in shown_of(plan) if plan.fits(cost)]
    figure = plots.bars(
        [label_of(cost.scheme) for cost in costs],
        {part: [seconds_of(cost, part) for cost in costs] for part in PARTS},
        xlabel="seconds",
        title=f"{answer.planner.model.name}, {plan.batch.num_tokens:,} new tokens on {num_ranks} x {plan.chip.name}",
        number="{:.2f}",
    )
    plots.saved(figure, path)


def label_of(scheme: Scheme) -> str:
    """A scheme beside its bar: its engine, or all words in two lines, which leave the bars more room."""
    if engine := engine_of(scheme):
        return engine
    return f"{scheme.topology}, {scheme.split}, {scheme.rows}\n{scheme.key_mode}, {scheme.output_mode}"


def seconds_of(cost: Cost, part: str) -> float:
    """The seconds of one column of the table of layers."""
    found = cost.seconds_by_part()
    return sum(found.get(name, 0.0) for name in PARTS[part] or (part,))


def draw_replay(path: str, replay: Replay) -> None:
    """The time of all steps under each scheme, and of the best for each."""
    order = np.argsort(replay.fixed, kind="stable")
    order = order[np.isfinite(replay.fixed[order])]
    labels = ["best of each step", *(label_of(replay.schemes[index]) for index in order)]
    values = [float(replay.best.sum()), *(float(replay.fixed[index]) for index in order)]
    title = f"{len(replay.tokens):,} steps, {int(replay.tokens.sum()):,} new tokens"
    plots.saved(plots.bars(labels, values, xlabel="seconds of all steps", title=title, number="{:,.0f}"), path)
