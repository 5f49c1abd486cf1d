"""What `parity` prints: tables and a summary on stdout; colours on a terminal only."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any

import numpy as np

from dsacp_npu.commands.parity_cells import SPLITS, Cell
from dsacp_npu.commands.parity_compare import THEIRS_LIMIT
from dsacp_npu.commands.parity_engines import Way
from dsacp_npu.commands.parity_geometry import GeometryResult
from dsacp_npu.commands.parity_results import FAIL, OK, REFUSED, CellResult, DeviceResult
from dsacp_npu.commands.parity_trace import DrawnStep, divisor_of, scaled_lengths

WIDTH = 140  # columns of running text

HALF_LEGEND = """\
error   largest difference from one device in float64, over its largest value
budget  share of what bfloat16 may lose: twice what torch in bfloat16 on one device loses, and two ulps in one number;
        compressor states have those of float32
swaps   rows that chose other entries, of scores that int8 codes of rounded values cannot tell apart"""

CELL_LEGEND = f"""\
error   largest difference from one device in float64, over its largest value
budget  share of what float32 may lose: twice what one device in float32 loses, and two ulps
theirs  largest difference from transformers, {THEIRS_LIMIT} allowed
swaps   rows that chose other entries, of scores that float32 cannot tell apart"""

HALF_DEVICE_LEGEND = """\
bfloat16  largest difference of torch in bfloat16 from float64, over the largest value
swaps     rows in which it chooses other entries than float64, of scores too close to tell"""

DEVICE_LEGEND = """\
float32  largest difference of float32 from float64, over the largest value
theirs   largest difference from transformers where both choose the same entries; given: in all rows, given its choice
swaps    rows in which float32, and transformers, choose other entries than float64, of scores too close to tell"""


STEP_LEGEND = """\
new, before  tokens in the step and before it; of its requests, decoding have their prompt already
divided      every length is divided by this for the layer, which takes what stands under tokens; geometry takes all"""

GEOMETRY_LEGEND = """\
attended  keys that the busiest of so many ranks attends to, over the mean of the ranks: mean and worst step
scored    likewise, index keys that it scores (V4-Flash, ratio 4)
result    each token owned once, restored in order, at its true position; contiguous as the proposal has it"""


def console() -> Any:
    """Where rows go."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError("parity prints with rich; pip install rich") from error
    return Console(highlight=False, markup=False, soft_wrap=True)


def show(title: str, legend: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table; a column is right-aligned when its name ends in a colon, which is not shown."""
    names = tuple(name.rstrip(":") for name in columns)
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    align = [str.rjust if name.endswith(":") else str.ljust for name in columns]
    lines = console()
    print(f"\n{title}\n")
    for row in (names, *rows):
        line = "  ".join(side(cell, width) for side, cell, width in zip(align, row, widths, strict=True))
        style = "bold" if row is names else "bold red" if row[-1] == FAIL else None
        lines.print(line.rstrip(), style=style)
    print("\n" + "\n".join(f"  {line}" for line in legend.splitlines()))


def small(value: float) -> str:
    """An error in few signs."""
    return f"{value:.1e}"


def show_heading(way: Way) -> None:
    """What the tables that follow are of."""
    print(f"\n=== {way.heading}", flush=True)


def show_half_devices(results: Sequence[DeviceResult]) -> None:
    """One device in bfloat16 against float64."""
    columns = "ratio: scenario steps: requests: tokens: bfloat16: swaps: result".split()
    rows = [
        (
            *(str(part) for part in (r.ratio, r.scenario, r.steps, r.requests, r.tokens)),
            *(small(r.plain), str(r.swaps), r.verdict),
        )
        for r in sorted(results, key=lambda r: (r.ratio, r.scenario))
    ]
    show("One device in bfloat16 against float64", HALF_DEVICE_LEGEND, columns, rows)


def show_devices(results: Sequence[DeviceResult]) -> None:
    """One device against transformers."""
    columns = "ratio: scenario steps: requests: tokens: float32: swaps: theirs: swaps: given: result".split()
    rows = [
        (
            *(str(part) for part in (r.ratio, r.scenario, r.steps, r.requests, r.tokens)),
            *(small(r.plain), str(r.swaps), small(r.theirs), str(r.theirs_swaps), small(r.given), r.verdict),
        )
        for r in sorted(results, key=lambda r: (r.ratio, r.scenario))
    ]
    show("One device against transformers", DEVICE_LEGEND, columns, rows)


def show_cells(results: Sequence[CellResult], way: Way) -> None:
    """Ranks against one device and transformers."""
    half = way.dtype == "bfloat16"
    title = "Ranks against one device" + ("" if half else " and against transformers")
    columns = "ratio: ranks: split rows keys output scenario".split()
    show_results(title, HALF_LEGEND if half else CELL_LEGEND, columns, results, ("theirs:",) if half else ())


NUMBERS = ("error:", "budget:", "theirs:", "swaps:")


def show_results(
    title: str, legend: str, columns: Sequence[str], results: Sequence[CellResult], left_out: Sequence[str]
) -> None:
    """A row for each cell, these of its numbers left out. Refusals are told below, each text once."""
    texts = list(dict.fromkeys(r.text for r in results if r.verdict == REFUSED))
    shown = [i for i, name in enumerate(NUMBERS) if name not in left_out]
    rows = []
    for r in results:
        numbers = ("", "", "", "")
        result = r.verdict
        if r.verdict == REFUSED:
            result = f"{r.verdict} ({texts.index(r.text) + 1})"
        elif r.share or r.verdict == OK:
            share = f"{r.share:.2f}" if r.share < 100 else f"{r.share:.0e}"
            numbers = small(r.error), share, small(r.theirs), str(r.swaps)
        rows.append((*map(str, r.cell), *(numbers[i] for i in shown), result))
    show(title, legend, [*columns, *(NUMBERS[i] for i in shown), "result"], rows)
    if texts:
        print("\n  refused, as they have to be:")
        for number, text in enumerate(texts, 1):
            print(textwrap.fill(text, WIDTH, initial_indent=f"  ({number}) ", subsequent_indent="      "))


def show_steps(steps: Sequence[DrawnStep]) -> None:
    """The steps drawn from a trace: real lengths, and what is left of them for the layer."""
    columns = "step requests: decoding: new: before: longest: divided: tokens:".split()
    rows = []
    for step in steps:
        computed, new = (sum(getattr(share, name) for share in step.shares) for name in ("computed", "new"))
        longest = max(share.computed + share.new for share in step.shares)
        decoding = sum(share.new == 1 and share.computed > 0 for share in step.shares)
        scaled = sum(map(sum, scaled_lengths(step, divisor_of(step)).values()))
        counts = (len(step.shares), decoding, new, computed, longest, divisor_of(step), scaled)
        rows.append((step.name, *map(str, counts)))
    show("Steps drawn from the trace", STEP_LEGEND, columns, rows)


def show_geometry(results: Sequence[GeometryResult], model: str = "v4") -> None:
    """Every split at real lengths: right or not, and how even the work is, over the steps."""
    sizes = sorted({r.ranks for r in results} - {1})
    works = [(work, size) for work in ("attended", "scored") for size in sizes]
    columns = ["split", *(f"{work} {size}:" if size == sizes[0] else f"{size}:" for work, size in works), "result"]
    rows = []
    for split in SPLITS:
        mine = [r for r in results if r.split == split]
        uneven = [[getattr(r, work) for r in mine if r.ranks == size] for work, size in works]
        verdict = FAIL if any(r.text for r in mine) else OK
        rows.append((split, *(f"{np.mean(ratios):.2f} {max(ratios):.2f}" for ratios in uneven), verdict))
    legend = GEOMETRY_LEGEND if model == "v4" else GEOMETRY_LEGEND.replace("V4-Flash, ratio 4", "V3.2")
    show("Every split at real lengths, over 2 ranks and more", legend, columns, rows)


MOST_TOLD = 20  # failures told in full


def show_summary(
    geometries: Sequence[GeometryResult],
    devices: Sequence[Any],
    cells: Sequence[CellResult],
    repeat: str,
    seed: int,
    heading: str = "",
    cell_of: Callable[..., object] | None = None,
) -> int:
    """The failures, each with the line that repeats it, then the sums. Returns the number of failures.

    ``cell_of`` names a cell that repeats what is not of one cell: V4's, unless another is given.
    """
    repeating = cell_of or v4_cell
    failures = [(f"{r.step}, {r.split} over {r.ranks} ranks: {r.text}", repeating(r)) for r in geometries if r.text]
    failures += [(f"{r.scenario}, {r.kind}: {r.text}", repeating(r)) for r in devices if r.verdict == FAIL]
    failures += [(f"{r.text}", r.cell) for r in cells if r.verdict == FAIL]
    if failures:
        print(f"\nFailures: {len(failures)}" + f", the first {MOST_TOLD}:" * (len(failures) > MOST_TOLD) + "\n")
    for text, cell in failures[:MOST_TOLD]:
        print(f"  {' '.join(text.split())}\n    {repeat} --cell {shlex.quote(str(cell))} --seed {seed}")

    passed, refused = ([r for r in cells if r.verdict == verdict] for verdict in (OK, REFUSED))
    failed = len(cells) - len(passed) - len(refused)
    print(f"\nSummary (seed {seed}){f', {heading}' if heading else ''}\n")
    if geometries:
        wrong = sum(bool(r.text) for r in geometries)
        print(f"  geometry      {len(geometries) - wrong} splits of a step right, {wrong} wrong")
    print(f"  cells         {len(passed)} ok, {len(refused)} refused as they have to be, {failed} failed")
    told = [r for r in cells if r.share]
    if told:
        worst = max(told, key=lambda r: r.share)
        print(f"  one device    worst {small(worst.error)}, {worst.share:.3g} of the budget, {worst.place}")
        print(f"{'':16}{worst.cell}")
        worst = max(told, key=lambda r: r.theirs)
    if told and worst.theirs:
        print(f"  transformers  worst {small(worst.theirs)}, {THEIRS_LIMIT} allowed, {worst.theirs_place}")
        print(f"{'':16}{worst.cell}")
    print(f"  selections    {sum(r.swaps for r in cells)} rows swapped entries of scores too close to tell")
    return len(failures)


def v4_cell(result: GeometryResult | DeviceResult) -> Cell:
    """A cell that may run, and whose call repeats this result too."""
    if isinstance(result, GeometryResult):
        return Cell(1, result.ranks, result.split, "full", "replicate", "replicated_weight", result.step)
    return Cell(result.ratio, 1, "contiguous", "full", "replicate", "replicated_weight", result.scenario)


def versions() -> str:
    """What ran."""
    words = [f"python {python_version()}"]
    for package in ("dsacp", "numpy", "torch", "transformers"):
        try:
            words.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            words.append(f"{package} not installed")
    return ", ".join(words)
