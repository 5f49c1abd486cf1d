"""``python -m dsacp_npu parity``: does every way to run a layer over ranks give what one device gives?

`ABOUT` says what a cell is, and what is compared; it is the end of the command's help.
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

from dsacp_npu.commands import parity_cann, parity_v32
from dsacp_npu.commands import parity_table as table
from dsacp_npu.commands.parity_cells import all_cells, covering_set, in_order, parsed_cell
from dsacp_npu.commands.parity_engines import BACKENDS, DEFINITION, MODELS, Way, device_of, operators_of
from dsacp_npu.commands.parity_geometry import GeometryResult, geometry
from dsacp_npu.commands.parity_results import FAIL, CellResult, DeviceResult, cell_result, device_result
from dsacp_npu.commands.parity_runs import Reference, reference
from dsacp_npu.commands.parity_scenarios import PLANS, Plan
from dsacp_npu.commands.parity_trace import drawn_steps, named_step, plan
from dsacp_npu.commands.progress import followed
from dsacp_ref.spec import UnsupportedError, check_int, contract_error

BATCHES = 10
EXAMPLES = """\
examples:
  %(prog)s                              a covering set of the grid, about 150 cells
  %(prog)s --full                       every cell, 27,216: about an hour on 2 cores
  %(prog)s --short                      about 50 cells: 2 to 4 ranks, every two values once
  %(prog)s --cell ratio=4,ranks=3,split=zigzag,rows=full,keys=gather_kv,output=all_to_all,scenario=inside
  %(prog)s --trace requests.csv         batches drawn from the lengths of a real service
  %(prog)s --backend torch              the layer of dsacp_npu in the place of the definition
  %(prog)s --backend cann               the same on operators: emulated, in bfloat16
  %(prog)s --processes                  every rank a process, over gloo; torch, or --backend cann
  %(prog)s --everything --short         all of these, in turn: what `make parity` runs
  %(prog)s --model v32                  a stack of DeepSeek-V3.2 blocks; all options go with it
"""
ABOUT = """\
A cell is a compress ratio, a number of ranks, a split rule, what ranks hold between layers, how the key side and how
the output travel, and a scenario: one long prompt, many short ones, prefix hits, chunks that end inside windows or on
them, decode among prefill, padded slots. Each is run step by step with caches that live on, and compared with one
device in float64 (within the error of float32) and with the attention of transformers' deepseek_v4. Combinations that
the design refuses are cells too: they must be refused, and by name.

With --backend cann the sizes are those that the operators take, the scenarios are few ("chunks" behind long prefixes,
"prefill"), and the measure is the error of torch in bfloat16 on one device. What the operators have no form for must be
refused, and by name. No NPU is involved: the operators are emulated, so this shows that the contract is kept, no more.

With --model v32 a cell is a split rule, a number of ranks, whole or shared experts, the cache's codes and a scenario. A
stack of three blocks runs from token ids to logits, in float64, with caches that live on; hidden rows, logits and all
caches of every rank are compared with one device, and the definition's layers with the attention of transformers'
deepseek_v32. With --backend cann a layer alone runs, in bfloat16 and in sizes that the operators take.

Exit code 0: all cells passed. 1: some did not; each prints a line that repeats it. 2: the call cannot work.
"""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
EVERYTHING = (DEFINITION, Way("torch"), Way("cann"), Way("torch", processes=True), Way("cann", processes=True))

# By scenario and ratio, of V3.2 by scenario and kind of cache: cells that share a reference.
Groups = Mapping[tuple[str, Any], list[Any]]
Made = Reference | parity_v32.StackReference
Device = DeviceResult | parity_v32.StackDeviceResult
Result = CellResult | Device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    ways = parser.add_argument_group("what runs")
    ways.add_argument("--model", choices=MODELS, default="v4", help="a V4 layer, or a stack of V3.2's (default: v4)")
    what = ways.add_mutually_exclusive_group()
    what.add_argument("--backend", choices=BACKENDS, help="run dsacp_npu.layer with it (default: the definition)")
    words = "the definition and both backends, in one process and over processes"
    what.add_argument("--everything", action="store_true", help=words)
    ways.add_argument("--processes", action="store_true", help="every rank a process, over gloo (default: torch)")
    cells = parser.add_argument_group("which cells")
    which = cells.add_mutually_exclusive_group()
    which.add_argument("--full", action="store_true", help="every cell of the grid, not a covering set")
    which.add_argument("--short", action="store_true", help="a smaller covering set, of fewer ranks and scenarios")
    which.add_argument("--cell", metavar="TEXT", help="this cell alone: ratio=4,ranks=3,split=zigzag,...")
    cells.add_argument("--trace", metavar="FILE", help="batches from real lengths: CSV, or Mooncake's JSON lines")
    cells.add_argument("--batches", type=int, metavar="N", help=f"steps to draw from the trace (default: {BATCHES})")
    how = parser.add_argument_group("how")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, rows and choices (default: 0)")
    how.add_argument("--jobs", type=int, metavar="N", help="processes (default: one for each core)")
    parser.epilog = f"{EXAMPLES}\n{ABOUT}"


def run(args: argparse.Namespace) -> int:
    """Run what is asked for, print it, and return the exit code."""
    table.console()  # what is missing is told before any work
    check_int("--seed", args.seed, 0)
    jobs = check_int("--jobs", (os.cpu_count() or 1) if args.jobs is None else args.jobs, 1)
    if args.trace is None and args.batches is not None:
        raise contract_error("--batches", "come with --trace", args.batches)
    start = time.perf_counter()
    ways = asked_for(args)
    failures = 0
    for way in ways:
        if len(ways) > 1 or way != DEFINITION:
            table.show_heading(way)
        try:
            device_of(way)
        except UnsupportedError as error:  # of what could not run in any cell
            if len(ways) == 1:
                raise
            print(f"\n  not run: {error}")
        else:
            failures += run_way(args, way, 1 if args.cell is not None else jobs)
    if len(ways) > 1:
        verdict = f"{failures} failed" if failures else "all passed"
        print(f"\nEverything: {verdict}, {time.perf_counter() - start:.0f} s")
    return 1 if failures else 0


def asked_for(args: argparse.Namespace) -> tuple[Way, ...]:
    """The ways to run, once the options are found to go together."""
    if args.everything:
        for name in ("processes", "cell", "trace"):
            if getattr(args, name):
                raise contract_error("--everything", f"not come with --{name}", "both", "run one backend with it")
        return tuple(way._replace(model=args.model) for way in EVERYTHING)
    if args.backend == "cann" and args.trace is not None:
        hint = "emulated operators are too slow for such steps; use --backend torch"
        raise contract_error("--trace", "not come with --backend cann", "both", hint)
    return (Way(args.backend or ("torch" if args.processes else "numpy"), args.processes, args.model),)


def run_way(args: argparse.Namespace, way: Way, jobs: int) -> int:
    """Run one way, print it, and return the number of failures."""
    start = time.perf_counter()
    geometries: list[GeometryResult] = []
    plans: Mapping[str, Plan]
    if args.trace is not None:
        plans, geometries = traced(args)
    else:
        plans = plans_of(way)
    stack = way.model == "v32"
    chosen = chosen_cells(args, list(plans), way)
    cells: list[Any] = parity_v32.in_order(chosen) if stack else in_order(chosen)
    groups: dict[tuple[str, Any], list[Any]] = {}
    for cell in cells:
        kind = parity_v32.group_of(cell, way) if stack else cell.ratio
        groups.setdefault((cell.scenario, kind), []).append(cell)
    results = list(followed(results_of(plans, groups, args.seed, jobs, way), len(groups) + len(cells), "parity"))

    devices: list[Any] = [result for result in results if not isinstance(result, CellResult)]
    order = {cell: i for i, cell in enumerate(cells)}
    ranks = sorted((result for result in results if isinstance(result, CellResult)), key=lambda r: order[r.cell])
    if geometries:
        table.show_geometry(geometries, way.model)
    if stack:
        parity_v32.show(devices, ranks, way)
    else:
        show = table.show_half_devices if way.dtype == "bfloat16" else table.show_devices
        show(devices)
        table.show_cells(ranks, way)
    repeat = f"python -m dsacp_npu parity{way.flags}" + (f" --trace {shlex.quote(args.trace)}" if args.trace else "")
    heading = "" if way == DEFINITION else way.heading
    cell_of = parity_v32.cell_of if stack else table.v4_cell
    failures = table.show_summary(geometries, devices, ranks, repeat, args.seed, heading, cell_of)
    workers = "a process for every rank" if way.processes else f"processes {jobs}"
    print(f"  time          {time.perf_counter() - start:.0f} s, {workers}")
    print(f"  versions      {table.versions()}", flush=True)
    return failures


def plans_of(way: Way) -> Mapping[str, Plan]:
    """The scenarios, by name."""
    if way.model == "v32":
        return parity_v32.plans_of(way)
    return parity_cann.PLANS if way.backend == "cann" else PLANS


def chosen_cells(args: argparse.Namespace, scenarios: Sequence[str], way: Way) -> list[Any]:
    """The cells to run."""
    if way.model == "v32":
        return parity_v32.chosen_cells(args, scenarios, way)
    if args.cell is not None:
        return [parsed_cell(args.cell, scenarios)]
    if args.full:
        return all_cells(scenarios, way.backend)
    return covering_set(scenarios, args.seed, way.backend, short=args.short)


def traced(args: argparse.Namespace) -> tuple[dict[str, Plan], list[GeometryResult]]:
    """The plans of the drawn steps, and their geometry."""
    if args.full:
        raise contract_error("--full", "not come with --trace", "both", "draw more steps with --batches")
    if args.cell is not None:
        parsed: Any = parity_v32.parsed_cell if args.model == "v32" else parsed_cell
        steps = [named_step(args.trace, parsed(args.cell, None).scenario)]
    else:
        count = check_int("--batches", BATCHES if args.batches is None else args.batches, 1)
        steps = drawn_steps(args.trace, count, args.seed)
    results = [r for step in followed(steps, len(steps), "geometry") for r in geometry(step, args.model)]
    table.show_steps(steps)
    return {step.name: plan(step) for step in steps}, results


# --- running ---


def results_of(
    plans: Mapping[str, Plan], groups: Groups, seed: int, jobs: int, way: Way = DEFINITION
) -> Iterator[Result]:
    """The result of every group's reference and of every cell, as they come."""
    if way.processes:
        yield from results_over_processes(plans, groups, seed, jobs, way)
        return
    if jobs == 1:
        with operators_of(way):
            for (name, ratio), cells in groups.items():
                yield from judged(cells, *reference_result(plans[name], ratio, seed, way))
        return
    with single_threaded_children(), ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting: dict[Future[tuple[Device, Made | None]], list[Any]] = {}
        for (name, ratio), cells in groups.items():
            waiting[pool.submit(reference_result, plans[name], ratio, seed, way)] = cells
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


def results_over_processes(
    plans: Mapping[str, Plan], groups: Groups, seed: int, jobs: int, way: Way
) -> Iterator[Result]:
    """The same where every rank is a process: one cell after the other; with several jobs, one makes references."""
    from dsacp_npu.commands.parity_processes import close_all

    try:
        if jobs == 1:
            for (name, ratio), cells in groups.items():
                yield from judged(cells, *reference_result(plans[name], ratio, seed, way))
            return
        with single_threaded_children(), ProcessPoolExecutor(1, get_context("spawn")) as pool:
            calls = [pool.submit(reference_result, plans[name], ratio, seed, way) for name, ratio in groups]
            try:
                for call, cells in zip(calls, groups.values(), strict=True):
                    yield from judged(cells, *call.result())
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        close_all()


def judged(cells: Sequence[Any], result: Device, made: Made | None) -> Iterator[Result]:
    """A group's results, as they come."""
    yield result
    for cell in cells:
        yield from cell_results([cell], made)


def reference_result(plan: Plan, ratio: Any, seed: int, way: Way = DEFINITION) -> tuple[Device, Made | None]:
    """A group's reference and how it compares with transformers; no reference where one device breaks down."""
    if way.model == "v32":
        return parity_v32.reference_result(plan, ratio, seed, way)
    start = time.perf_counter()
    try:
        make = parity_cann.reference if way.backend == "cann" else reference
        made = make(plan, ratio, seed, way)
        return device_result(made)._replace(seconds=time.perf_counter() - start), made
    except ImportError:
        raise
    except Exception as error:
        return DeviceResult(plan.name, ratio, FAIL, f"{type(error).__name__}: {error}"), None


def cell_results(cells: Sequence[Any], made: Made | None) -> list[CellResult]:
    """Some cells of one group."""
    if made is None:
        return [CellResult(cell, FAIL, "one device broke down, there is nothing to compare with") for cell in cells]
    if isinstance(made, parity_v32.StackReference):
        return [parity_v32.cell_result(cell, made) for cell in cells]
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
