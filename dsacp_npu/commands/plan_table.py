"""The tables of `plan`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsacp_npu.commands.plan_rows import PARTS, shown_of, words
from dsacp_npu.planning.choice import Plan
from dsacp_npu.planning.costs import GB, Cost, Planner
from dsacp_npu.planning.replay import Replay

if TYPE_CHECKING:
    from dsacp_npu.commands.plan import Answer

try:
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise ImportError("plan prints its tables with rich; pip install rich, or use --json") from error

WIDTH = 110  # columns of a sentence
ASSUMED = (
    "Assumed: tokens go to all experts alike, experts lie over all ranks, nothing overlaps with an exchange, and the "
    "chip's rates hold at every size (docs/planning.md). --json has every figure's source."
)


def show_plan(answer: Answer, num_ranks: int, *, everything: bool) -> None:
    """A plan's schemes, the layers of the best one beside plain TP, and what follows."""
    plan: Plan = answer.plan
    console = console_of()
    batch, tp = plan.batch, plan.tensor_parallel
    requests = f"{len(batch.query_lens)} request{'s' * (len(batch.query_lens) > 1)}"
    console.print(
        f"{answer.planner.model.name} on {num_ranks} x {plan.chip.name}, {answer.planner.precision_name}: {requests}, "
        f"{batch.num_tokens:,} new tokens, {sum(batch.computed):,} cached",
        style="bold",
    )
    shown = plan.costs if everything else shown_of(plan)
    heading = ("s:", "x TP:", "uneven:", "GB in:", "peak:", "scheme")
    table(console, heading, [scheme_row(cost, plan, tp) for cost in shown])
    for cost in (plan.best, *([tp] if tp is not None and tp is not plan.best else [])):
        console.print(f"\n{words(cost.scheme)}, a layer of each kind", style="bold")
        heading = ("kind", "layers:", "ms:", *(f"{part}:" for part in PARTS), "TFLOP:", "MB in:", "uneven:")
        table(console, heading, layer_rows(cost))
    console.print()
    for note in notes(answer, everything):
        print(textwrap.fill(note, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def scheme_row(cost: Cost, plan: Plan, tp: Cost | None) -> tuple[str, ...]:
    """One scheme."""
    gain = f"{tp.seconds / cost.seconds:.2f}" if tp else "-"
    note = "" if plan.fits(cost) else f": does not fit into {plan.chip.memory:g} GB"
    numbers = (f"{cost.seconds:.3f}", gain, f"{cost.imbalance:.2f}", f"{cost.received / GB:.1f}")
    return (*numbers, f"{cost.memory.total / GB:.1f}", words(cost.scheme) + note)


def layer_rows(cost: Cost) -> list[tuple[str, ...]]:
    """Every kind of layer, and all layers together."""
    rows = []
    for layer in cost.layers:
        slowest = int(layer.compute.argmax())
        at = {name: float(seconds[slowest]) for name, seconds in layer.parts.items()}
        parts = [sum(at.get(name, 0.0) for name in names) for names in PARTS.values()]
        parts[-1] = layer.exchange
        cells = [f"{1e3 * seconds:.2f}" if seconds else "-" for seconds in parts]
        amounts = (f"{layer.flop.max() / 1e12:.2f}", f"{layer.received / 1e6:.1f}", f"{layer.imbalance:.2f}")
        rows.append((layer.name, str(layer.num_layers), f"{1e3 * layer.seconds:.2f}", *cells, *amounts))
    by_part = cost.seconds_by_part()
    sums = [sum(by_part.get(name, 0.0) for name in names) for names in PARTS.values()]
    sums[-1] = by_part["exchange"]
    flop = sum(layer.num_layers * int(layer.flop.max()) for layer in cost.layers)
    amounts = (f"{flop / 1e12:.0f}", f"{cost.received / 1e6:.0f}", f"{cost.imbalance:.2f}")
    rows.append(("all", "", f"{1e3 * cost.seconds:.1f}", *(f"{1e3 * seconds:.1f}" for seconds in sums), *amounts))
    return rows


def notes(answer: Answer, everything: bool) -> list[str]:
    """What follows from the plan, in sentences."""
    plan: Plan = answer.plan
    best, lines = plan.best, []
    memory = best.memory
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in memory._asdict().items())
    lines.append(f"Best: {words(best.scheme)}: {best.seconds:.3f} s, the largest part {best.bound()}.")
    lines.append(f"It takes {memory.total / GB:.1f} of {plan.chip.memory:g} GB at its peak: {parts}.")
    if answer.pays_from:
        lines.append(f"Splitting tokens over all ranks beats plain TP from {answer.pays_from:,} tokens of one request.")
    even = answer.break_even
    if even:
        lines.append(
            f"gather_weight beats all_to_all from {told(even.seconds)} tokens of one request; by bytes from "
            f"{told(even.num_bytes)}, of the heads' exchange alone from {told(even.heads_alone)}."
        )
    large = sum(not plan.fits(cost) for cost in plan.costs)
    if everything:
        lines += [f"Refused: {words(scheme)}: {reason}." for scheme, reason in plan.refused]
    else:
        counts = f"{len(plan.costs)} schemes were compared, {large} do not fit, {len(plan.refused)} are refused"
        lines.append(f"{counts}; --all lists them.")
    return [*lines, ASSUMED]


def told(tokens: int | None) -> str:
    """A break-even in words."""
    return f"{tokens:,}" if tokens else "no number of"


def show_replay(replay: Replay, planner: Planner, num_ranks: int, cut: str) -> None:
    """Every fixed scheme over the whole trace, and choosing for each step; ``cut``: how it was cut into steps."""
    console = console_of()
    console.print(
        f"{planner.model.name} on {num_ranks} x {planner.chip.name}, {planner.precision_name}: "
        f"{len(replay.tokens):,} steps, {int(replay.tokens.sum()):,} new tokens ({cut})",
        style="bold",
    )
    best, order = replay.best, np.argsort(replay.fixed, kind="stable")
    rows = []
    for index in order.tolist():
        scheme, seconds = replay.schemes[index], replay.seconds[:, index]
        numbers = (*replay_numbers(seconds, best), share(replay.chosen == index))
        rows.append((*numbers, words(scheme)))
    rows.append((*replay_numbers(best, best), "", "the best for each step"))
    heading = ("s:", "x chosen:", "p50 s:", "p99 s:", "best in:", "scheme")
    table(console, heading, rows)
    print("\n" + textwrap.fill(ASSUMED, WIDTH, subsequent_indent="  "))


def replay_numbers(seconds: Any, best: Any) -> tuple[str, ...]:
    """Seconds in all, over the best choice, of the middle step and of one of the slowest."""
    if not math.isfinite(float(seconds.sum())):
        return ("does not fit", "-", "-", "-")
    middle, late = np.percentile(seconds, [50, 99])
    return f"{seconds.sum():.1f}", f"{seconds.sum() / best.sum():.3f}", f"{middle:.3f}", f"{late:.3f}"


def share(mask: Any) -> str:
    """A part of the steps in percent."""
    return f"{100 * float(mask.mean()):.1f} %"


def console_of() -> Console:
    """Where tables go, as wide as they are: a row in two lines is no row, and a file has no width."""
    return Console(width=200, highlight=False, markup=False, soft_wrap=True)


def table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows under their heading; a column is right-aligned when its name ends in a colon, which is not shown."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        shown.add_column(column.rstrip(":"), justify="right" if column.endswith(":") else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    with console.capture() as drawn:
        console.print(shown)
    for line in drawn.get().splitlines():  # without the blanks that fill the last column
        print(line.rstrip())
