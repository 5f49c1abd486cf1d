"""The tables of `parity --model v32`, printed as the others are."""

from __future__ import annotations

from collections.abc import Sequence

from dsacp_npu.commands.parity_engines import Way
from dsacp_npu.commands.parity_geometry import GeometryResult
from dsacp_npu.commands.parity_results import CellResult
from dsacp_npu.commands.parity_table import HALF_DEVICE_LEGEND, show, show_results, small
from dsacp_npu.commands.parity_v32_cells import StackCell
from dsacp_npu.commands.parity_v32_results import StackDeviceResult

DEVICE_LEGEND = """\
float32  largest difference of the stack in float32 from float64, over the largest value; with FP8 also by codes that
         fall otherwise"""

THEIRS = ("swaps:", "theirs:", "swaps:", "given:")
THEIRS_LEGEND = """
swaps    rows of any layer in which float32, and transformers, choose other tokens than float64, of scores too close
         to tell
theirs   largest difference of any layer from transformers' deepseek_v32 where both choose the same tokens; given: in
         all rows, given its choice"""

CELL_LEGEND = """\
error   largest difference of hidden rows or logits from one device, over their largest value; all in float64, so that
        choices and FP8 codes are the same, and every rank's caches are compared with one device's in every place
budget  share of what float64 may lose: 16 times what one device in float32 loses, scaled down, and 16 ulps"""

HALF_LEGEND = """\
error   largest difference from one device in float64, over its largest value
budget  share of what bfloat16 may lose: twice what torch in bfloat16 on one device loses, and two ulps in one number
swaps   rows that chose other tokens, of scores that bfloat16 cannot tell apart"""


def show_stack_devices(results: Sequence[StackDeviceResult], way: Way) -> None:
    """One device: the plain precision against float64, and layers against transformers."""
    half = way.dtype == "bfloat16"
    columns = "cache scenario steps: requests: tokens:".split()
    compared = any(r.compared for r in results)
    columns += ["bfloat16:", "swaps:"] if half else ["float32:", *THEIRS] if compared else ["float32:"]
    rows = []
    for r in sorted(results, key=lambda r: (r.cache != "float", r.scenario)):
        theirs = (str(r.swaps), small(r.theirs), str(r.theirs_swaps), small(r.given)) if r.compared else ("",) * 4
        numbers = (small(r.plain), str(r.swaps)) if half else (small(r.plain), *theirs[: 4 * compared])
        counts = map(str, (r.steps, r.requests, r.tokens))
        rows.append((r.cache, r.scenario, *counts, *numbers, r.verdict))
    if half:
        legend = HALF_DEVICE_LEGEND.replace("entries", "tokens")
        show("One layer on one device in bfloat16 against float64", legend, [*columns, "result"], rows)
    else:
        title = "One device: the stack in float32" + ", and its layers against transformers" * compared
        show(title, DEVICE_LEGEND + THEIRS_LEGEND * compared, [*columns, "result"], rows)


def show_stack_cells(results: Sequence[CellResult], way: Way) -> None:
    """Ranks against one device."""
    half = way.dtype == "bfloat16"
    title = "One layer over ranks against one device" if half else "A stack of 3 blocks over ranks against one device"
    left_out = ("theirs:",) if half else ("theirs:", "swaps:")
    show_results(
        title, HALF_LEGEND if half else CELL_LEGEND, "split ranks: experts cache scenario".split(), results, left_out
    )


def stack_cell_of(result: GeometryResult | StackDeviceResult) -> StackCell:
    """A cell that may run, and whose call repeats this result too."""
    if isinstance(result, GeometryResult):
        return StackCell(result.split, result.ranks, "whole", "float", result.step)
    return StackCell("zigzag", 1, "whole", result.cache, result.scenario)
