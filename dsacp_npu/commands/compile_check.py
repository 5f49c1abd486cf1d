"""`compile-check`: Triton kernels under the public part of the Ascend compiler, without an NPU and without CANN.

Shows what each kernel takes of the chip's on-chip memory, and what it will be slow or inexact at. Checks every kernel
of this project, or one of your own. Needs triton-ascend and ascendnpu-ir, in an environment of their own.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dsacp_npu.commands.progress import followed
from dsacp_ref.spec import check_choice, contract_error

if TYPE_CHECKING:  # it needs torch, which --help does without
    from dsacp_npu.ascend import CompileReport

DEFAULT_TARGETS = ("Ascend910B3", "Ascend910_9391", "Ascend950PR_9579")
HINT = "an A2 is Ascend910B3, an A3 Ascend910_9391, an A5 Ascend950PR_9579"
INSTALL = "make ascend in a checkout, or pip install 'dsacp[ascend]' in an environment of its own"
SPACES = ("ub", "l1", "l0c")
COLUMNS = ("kernel", "tile", "target", "result", "UB", "L1", "L0C", "retries", "findings", "s")
EXAMPLES = """\
examples:
  %(prog)s --short                         a row for each kernel and chip
  %(prog)s --kernel attention --target Ascend910B3
  %(prog)s --own my_kernels.py:add_kernel --signature '*fp32,*fp32,i32' --constexpr BLOCK=1024

UB, L1 and L0C are KiB of a core, used/there; in a row that failed, needed > there. The exit code is 1 if a kernel
failed. It needs the environment that `make ascend` makes: .venv-ascend/bin/python -m dsacp_npu compile-check
"""


class Job(NamedTuple):
    """One kernel to compile for one chip."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    target: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.epilog = EXAMPLES
    what = parser.add_argument_group("what is compiled")
    target = f"chips; default: {', '.join(DEFAULT_TARGETS)}"
    what.add_argument("--target", nargs="+", metavar="CHIP", help=target)
    what.add_argument("--kernel", nargs="+", metavar="NAME", help="only those with this in their name")
    own = parser.add_argument_group("a kernel of your own")
    own.add_argument("--own", metavar="MODULE:KERNEL", help="this kernel instead; MODULE may be a .py file")
    types = "types of its arguments that are no constexprs, in order: '*bf16,i32,fp32'"
    own.add_argument("--signature", metavar="TYPES", default="", help=types)
    constant = "value of one of its constexprs, as often as needed"
    own.add_argument("--constexpr", action="append", metavar="NAME=VALUE", default=[], help=constant)
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--short", action="store_true", help="one row a kernel and target: the most of its tiles")
    shown.add_argument("--json", action="store_true", help="a list of objects, for a program")


def run(args: argparse.Namespace) -> int:
    """Compile, and print."""
    try:
        from dsacp_npu.ascend import TARGETS, compile_check
        from dsacp_npu.ascend.toolchain import triton_ascend
    except ImportError as error:  # without torch; what else is missing should not be found out one by one
        raise ImportError(f"compile-check needs torch and triton-ascend ({error.__cause__}); {INSTALL}") from error

    targets = args.target or DEFAULT_TARGETS
    for target in targets:
        check_choice("--target", target, tuple(TARGETS), HINT)
    triton_ascend()  # before kernels are imported, which need it too but cannot say as well what to do
    jobs = own_jobs(args, targets) if args.own else project_jobs(args.kernel, targets)
    reports = [
        compile_check(job.kernel, job.signature, job.constexprs, target=job.target)
        for job in followed(jobs, len(jobs), "compilations")
    ]
    if args.json:
        print(
            json.dumps([plain(job, report) for job, report in zip(jobs, reports, strict=True)], indent=2, default=str)
        )
    else:
        show(jobs, reports, short=args.short)
    return 0 if all(report.ok for report in reports) else 1


# --- what to compile ---


def project_jobs(parts: Sequence[str] | None, targets: Sequence[str]) -> list[Job]:
    """Every compilation of the project's kernels whose name has one of the parts, for every target."""
    from dsacp_npu.ascend.lowering import is_a5

    modules = list(kernel_modules())
    jobs = [
        Job(found.name, found.kernel, found.signature, found.constexprs, target)
        for target in targets
        for module in modules
        for found in module.compilations("a5" if is_a5(target) else "a2")
    ]
    known = ", ".join(sorted({kernel_of(job) for job in jobs}))
    for part in parts or ():
        if not any(part in job.name for job in jobs):
            raise contract_error("kernel", "be part of the name of a kernel", repr(part), f"there are {known}")
    chosen = [job for job in jobs if parts is None or any(part in job.name for part in parts)]
    # One compilation for all targets side by side, in the order in which its kernel lists them.
    order = {name: place for place, name in enumerate(dict.fromkeys(job.name for job in jobs))}
    return sorted(chosen, key=lambda job: (kernel_of(job), order[job.name]))


def kernel_of(job: Job) -> str:
    """The first word of a compilation's name: the concept, without what sets it apart."""
    return job.name.partition("/")[0]


def kernel_modules() -> Iterator[Any]:
    """The modules of kernels that list their compilations."""
    package = import_module("dsacp_npu.kernels")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            found = import_module(f"dsacp_npu.kernels.{module.name}")
            if hasattr(found, "compilations"):
                yield found


def own_jobs(args: argparse.Namespace, targets: Sequence[str]) -> list[Job]:
    """A kernel from anywhere, with its arguments from the command line, for every target."""
    place, _, name = args.own.rpartition(":")
    kernel = getattr(module_at(place), name, None)
    if kernel is None:
        raise contract_error("--own", "be MODULE:KERNEL, a kernel of that module", args.own)
    constexprs = dict(constant(text) for text in args.constexpr)
    types = [word.strip() for word in args.signature.split(",") if word.strip()]
    names = [argument for argument in getattr(kernel, "arg_names", ()) if argument not in constexprs]
    if len(types) != len(names):
        rule = f"have a type for each of {', '.join(names) or 'no arguments'}"
        raise contract_error("--signature", rule, args.signature, "the others are given by --constexpr NAME=VALUE")
    return [Job(name, kernel, dict(zip(names, types, strict=True)), constexprs, target) for target in targets]


def module_at(place: str) -> Any:
    """A module by its name, or by the path of its file."""
    if not place.endswith(".py"):
        return import_module(place)
    if not Path(place).is_file():
        raise FileNotFoundError(f"no file {place}")
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def constant(text: str) -> tuple[str, Any]:
    """Name and value of a constexpr: a number, a bool or None; anything else is text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise contract_error("--constexpr", "be NAME=VALUE", text)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


# --- what came out ---


def plain(job: Job, report: CompileReport) -> dict[str, Any]:
    """One result as plain values, without the texts."""
    return {
        "name": job.name,
        "kernel": report.kernel,
        "constexprs": dict(job.constexprs),
        "target": report.target,
        "ok": report.ok,
        "stage": report.stage,
        "mix": report.mix,
        "planned": dict(report.planned),
        "available": dict(report.available),
        "overflow": {space: {"need": need, "have": have} for space, (need, have) in report.overflow.items()},
        "retries": list(report.retries),
        "lints": [lint._asdict() for lint in report.lints],
        "error": report.error,
        "seconds": round(report.seconds, 3),
        "versions": dict(report.versions),
    }


def show(jobs: Sequence[Job], reports: Sequence[CompileReport], *, short: bool) -> None:
    """The table, why what failed failed, what the findings mean, and what ran."""
    from dsacp_npu.ascend import EXPLANATIONS

    pairs = list(zip(jobs, reports, strict=True))
    print_table(short_rows(pairs) if short else [cells(job, report) for job, report in pairs])
    for job, report in pairs:
        if not report.ok:
            print(f"\n{job.name} on {report.target} failed in the {report.stage}:")
            print("\n".join(f"  {line}" for line in report.error.splitlines()))
    found = {lint.name for report in reports for lint in report.lints}
    if found:
        print("\n" + "\n".join(f"{name}: {text}" for name, text in EXPLANATIONS.items() if name in found))
    failures = sum(not report.ok for report in reports)
    print(f"\n{len(reports)} compilations, {failures} failed; KiB of one core; {of_versions()}")


def short_rows(pairs: Sequence[tuple[Job, CompileReport]]) -> list[tuple[str, ...]]:
    """A row for all compilations of one kernel for one target: the most that any of them takes."""
    groups: dict[tuple[str, str], list[CompileReport]] = {}
    for job, report in pairs:
        groups.setdefault((kernel_of(job), job.target), []).append(report)
    rows = []
    for (kernel, target), reports in groups.items():
        failures = sum(not report.ok for report in reports)
        most = [max(reports, key=lambda report: report.planned.get(space, 0)) for space in SPACES]
        rows.append(
            (
                kernel,
                f"{len(reports)} compilations",
                target,
                f"{failures} failed" if failures else "ok",
                *(space_cell(report, space) for report, space in zip(most, SPACES, strict=True)),
                str(sum(bool(report.retries) for report in reports) or ""),
                ", ".join(sorted({lint.name for report in reports for lint in report.lints} - {"retries"})),
                f"{sum(report.seconds for report in reports):.1f}",
            )
        )
    return rows


def cells(job: Job, report: CompileReport) -> tuple[str, ...]:
    """One row."""
    kernel, _, tile = job.name.partition("/")
    result = (f"ok, {report.mix}" if report.ok else "overflow" if report.overflow else report.stage).rstrip(", ")
    spaces = [space_cell(report, space) for space in SPACES]
    findings = ", ".join(
        lint.name if lint.times == 1 else f"{lint.times} {lint.name}" for lint in report.lints if lint.name != "retries"
    )
    retries = str(len(report.retries) or "")
    return kernel, tile, report.target, result, *spaces, retries, findings, f"{report.seconds:.1f}"


def space_cell(report: CompileReport, space: str) -> str:
    """KiB used of the KiB there; needed > there, if that was too much; empty if none is used."""
    if space in report.overflow:
        need, have = report.overflow[space]
        return f"{kib(need)} > {kib(have)}"
    used = report.planned.get(space, 0)
    return f"{kib(used)}/{kib(report.available[space])}" if used else ""


def kib(size: int) -> str:
    """Bytes in KiB, rounded up, so that nothing looks as if it fitted."""
    return str(-(-size // 1024))


def of_versions() -> str:
    """What compiled."""
    from dsacp_npu.ascend.toolchain import versions

    return ", ".join(f"{name} {version}" for name, version in versions().items())


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """By rich where it is installed, which the compiler's environment need not have; else in plain columns."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
        for row in (COLUMNS, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column in ("kernel", "target"))
    for row in rows:
        table.add_row(*row)
    # Into a file or a pipe it is as wide as it is: a folded row cannot be searched.
    width = None if sys.stdout.isatty() else 500
    Console(highlight=False, markup=False, width=width).print(table)
