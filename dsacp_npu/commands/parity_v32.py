"""What `parity --model v32` runs in the place of V4's layer: names for the pieces, which lie in files beside this."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from dsacp_npu.commands.parity_engines import Way
from dsacp_npu.commands.parity_results import CellResult
from dsacp_npu.commands.parity_scenarios import Plan
from dsacp_npu.commands.parity_v32_cann import LAYER_PLANS
from dsacp_npu.commands.parity_v32_cells import StackCell, all_stack_cells, stack_covering_set
from dsacp_npu.commands.parity_v32_cells import parsed_stack_cell as parsed_cell
from dsacp_npu.commands.parity_v32_cells import stack_cells_in_order as in_order
from dsacp_npu.commands.parity_v32_results import StackDeviceResult
from dsacp_npu.commands.parity_v32_results import stack_cell_result as cell_result
from dsacp_npu.commands.parity_v32_results import stack_reference_result as reference_result
from dsacp_npu.commands.parity_v32_runs import StackReference
from dsacp_npu.commands.parity_v32_scenarios import STACK_PLANS
from dsacp_npu.commands.parity_v32_table import show_stack_cells, show_stack_devices
from dsacp_npu.commands.parity_v32_table import stack_cell_of as cell_of

__all__ = [
    "StackDeviceResult",
    "StackReference",
    "cell_of",
    "cell_result",
    "chosen_cells",
    "group_of",
    "in_order",
    "parsed_cell",
    "plans_of",
    "reference_result",
    "show",
]


def plans_of(way: Way) -> Mapping[str, Plan]:
    """The scenarios, by name."""
    return LAYER_PLANS if way.backend == "cann" else STACK_PLANS


def chosen_cells(args: argparse.Namespace, scenarios: Sequence[str], way: Way) -> list[StackCell]:
    """The cells to run."""
    if args.cell is not None:
        return [parsed_cell(args.cell, scenarios, way.backend)]
    if args.full:
        return all_stack_cells(scenarios, way.backend)
    return stack_covering_set(scenarios, args.seed, way.backend, short=args.short)


def group_of(cell: StackCell, way: Way) -> str:
    """The kind of cache of the reference that a cell needs; on cann, others than of numbers are only refused."""
    return "float" if way.backend == "cann" else cell.cache


def show(devices: Sequence[StackDeviceResult], cells: Sequence[CellResult], way: Way) -> None:
    """Both tables."""
    show_stack_devices(devices, way)
    show_stack_cells(cells, way)
