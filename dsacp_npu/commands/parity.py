"""``python -m dsacp_npu parity``: does every way to run a layer over ranks give what one device gives?

::

    python -m dsacp_npu parity                          a covering set of the grid, about 150 cells
    python -m dsacp_npu parity --full                   every cell, 27,216: about an hour on 2 cores
    python -m dsacp_npu parity --cell ratio=4,...       one cell, as a failing row prints it
    python -m dsacp_npu parity --trace requests.csv     batches drawn from the lengths of a real service

A cell is a compress ratio, a number of ranks, a split rule, what ranks hold between layers, how the key side and how
the output travel, and a scenario: one long prompt, many short ones, prefix hits, chunks that end inside windows or on
them, decode among prefill, padded slots. Each is run step by step with caches that live on, and compared with one
device in float64 (within the error of float32) and with the attention of transformers' deepseek_v4. Combinations that
the design refuses are cells too: they must be refused, and by name.

Exit code 0: all cells passed. 1: some did not; each prints a line that repeats it. 2: the call cannot work.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from dsacp_npu.commands import parity_table as table
from dsacp_npu.commands.parity_cells import Cell, all_cells, covering_set, in_order, parsed_cell
from dsacp_npu.commands.parity_geometry import GeometryResult, geometry
from dsacp_npu.commands.parity_results import FAIL, CellResult, DeviceResult, cell_result, device_result
from dsacp_npu.commands.parity_runs import Reference, reference
from dsacp_npu.commands.parity_scenarios import PLANS, Plan
from dsacp_npu.commands.parity_trace import drawn_steps, named_step, plan
from dsacp_ref.spec import check_int, contract_error

BATCHES = 10
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Groups = dict[tuple[str, int], list[Cell]]  # by scenario and ratio: cells that share a reference
Result = CellResult | DeviceResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--full", action="store_true", help="every cell of the grid, not a covering set")
    which.add_argument("--cell", metavar="TEXT", help="this cell alone: ratio=4,ranks=3,split=zigzag,...")
    parser.add_argument("--trace", metavar="FILE", help="batches from real lengths: CSV, or Mooncake's JSON lines")
    parser.add_argument("--batches", type=int, metavar="N", help=f"steps to draw from the trace (default: {BATCHES})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, rows and choices (default: 0)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one for each core)")
    parser.epilog = __doc__


def run(args: argparse.Namespace) -> int:
    """Run what is asked for, print it, and return the exit code."""
    start = time.perf_counter()
    check_int("--seed", args.seed, 0)
    jobs = check_int("--jobs", (os.cpu_count() or 1) if args.jobs is None else args.jobs, 1)
    if args.cell is not None:
        jobs = 1
    geometries: list[GeometryResult] = []
    if args.trace is None:
        if args.batches is not None:
            raise contract_error("--batches", "come with --trace", args.batches)
        plans: Mapping[str, Plan] = PLANS
        cells = chosen_cells(args, list(PLANS))
    else:
        plans, geometries = traced(args)
        cells = chosen_cells(args, list(plans))
    groups: Groups = {}
    for cell in in_order(cells):
        groups.setdefault((cell.scenario, cell.ratio), []).append(cell)
    total = len(groups) + len(cells)
    results = list(table.followed(results_of(plans, groups, args.seed, jobs), total, "parity"))

    devices = [result for result in results if isinstance(result, DeviceResult)]
    order = {cell: i for i, cell in enumerate(in_order(cells))}
    ranks = sorted((result for result in results if isinstance(result, CellResult)), key=lambda r: order[r.cell])
    if geometries:
        table.show_geometry(geometries)
    table.show_devices(devices)
    table.show_cells(ranks)
    repeat = "python -m dsacp_npu parity" + (f" --trace {shlex.quote(args.trace)}" if args.trace else "")
    failures = table.show_summary(geometries, devices, ranks, repeat, args.seed)
    print(f"  time          {time.perf_counter() - start:.0f} s, processes {jobs}")
    print(f"  versions      {table.versions()}")
    return 1 if failures else 0


def chosen_cells(args: argparse.Namespace, scenarios: Sequence[str]) -> list[Cell]:
    """The cells to run."""
    if args.cell is not None:
        return [parsed_cell(args.cell, scenarios)]
    return all_cells(scenarios) if args.full else covering_set(scenarios, args.seed)


def traced(args: argparse.Namespace) -> tuple[dict[str, Plan], list[GeometryResult]]:
    """The plans of the drawn steps, and their geometry."""
    if args.full:
        raise contract_error("--full", "not come with --trace", "both", "draw more steps with --batches")
    if args.cell is not None:
        steps = [named_step(args.trace, parsed_cell(args.cell, None).scenario)]
    else:
        count = check_int("--batches", BATCHES if args.batches is None else args.batches, 1)
        steps = drawn_steps(args.trace, count, args.seed)
    results = [result for step in table.followed(steps, len(steps), "geometry") for result in geometry(step)]
    table.show_steps(steps)
    return {step.name: plan(step) for step in steps}, results


# --- running ---


def results_of(plans: Mapping[str, Plan], groups: Groups, seed: int, jobs: int) -> Iterator[Result]:
    """The result of every group's reference and of every cell, as they come."""
    if jobs == 1:
        for (name, ratio), cells in groups.items():
            result, made = reference_result(plans[name], ratio, seed)
            yield result
            yield from cell_results(cells, made)
        return
    with single_threaded_children(), ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting: dict[Future[tuple[DeviceResult, Reference | None]], list[Cell]] = {}
        for (name, ratio), cells in groups.items():
            waiting[pool.submit(reference_result, plans[name], ratio, seed)] = cells
        running: set[Future[list[CellResult]]] = set()
        try:
            while waiting or running:
                pending: set[Future[Any]] = {*waiting, *running}
                done = wait(pending, return_when=FIRST_COMPLETED).done
                for ended in running & done:
                    yield from ended.result()
                running -= done
                for made_here in waiting.keys() & done:
                    cells = waiting.pop(made_here)
                    result, made = made_here.result()
                    yield result
                    size = 1 + len(cells) // 16  # the reference travels with every call
                    running |= {
                        pool.submit(cell_results, cells[i : i + size], made) for i in range(0, len(cells), size)
                    }
        finally:
            pool.shutdown(cancel_futures=True)


def reference_result(plan: Plan, ratio: int, seed: int) -> tuple[DeviceResult, Reference | None]:
    """A group's reference and how it compares with transformers; no reference where one device breaks down."""
    start = time.perf_counter()
    try:
        made = reference(plan, ratio, seed)
        return device_result(made)._replace(seconds=time.perf_counter() - start), made
    except ImportError:
        raise
    except Exception as error:
        return DeviceResult(plan.name, ratio, FAIL, f"{type(error).__name__}: {error}"), None


def cell_results(cells: Sequence[Cell], made: Reference | None) -> list[CellResult]:
    """Some cells of one group."""
    if made is None:
        return [CellResult(cell, FAIL, "one device broke down, there is nothing to compare with") for cell in cells]
    return [cell_result(cell, made) for cell in cells]


@contextmanager
def single_threaded_children() -> Iterator[None]:
    """The environment for processes that share the cores: one thread each."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
