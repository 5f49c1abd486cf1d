"""`validate`: tensors that another engine dumped beside the definition, and where the two first part.

The comparison itself is `dsacp_npu.validation`. Only the table needs rich.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from dsacp_npu.commands.progress import waiting
from dsacp_npu.validation.core import Finding
from dsacp_npu.validation.kinds import KINDS
from dsacp_npu.validation.reading import Dump, read_dump, setting_value
from dsacp_npu.validation.report import Report, checks_in_order, examined
from dsacp_npu.validation.schema import SETTINGS, rope_settings
from dsacp_ref.config import AttentionConfig, v4_flash, v4_pro
from dsacp_ref.spec import contract_error

PRESETS = {"v4-flash": v4_flash, "v4-pro": v4_pro}
NARROWEST = 120  # columns of a table that no terminal bounds

EPILOG = """\
names of tensors and settings, what is compared and every cause that can be named: docs/validate.md

examples:
  python -m dsacp_npu validate rank0.npz rank1.npz
  python -m dsacp_npu validate all_ranks.safetensors --config v4-flash --compress-ratio 4
  python -m dsacp_npu validate dump.pt --cp-size 8 --split zigzag --set block_size=128 --json

exit code: 0 nothing differs, 1 something does, 2 nothing could be compared
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.epilog = EPILOG
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="npz, safetensors or torch files: one a rank, or all")
    parser.add_argument("--config", help="v4-flash, v4-pro or a config.json: window, top-k, softmax scale and RoPE")
    parser.add_argument("--cp-size", type=int, help="ranks that share the tokens")
    parser.add_argument("--split", help="the rule that cuts them, such as contiguous or zigzag")
    parser.add_argument("--compress-ratio", type=int, help="raw tokens an entry, of the dumped layer")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting that the files leave out"
    )
    parser.add_argument("--all", action="store_true", help="show every rank's finding, not only the first of a check")
    parser.add_argument("--json", action="store_true", help="print it for a program")


def run(args: argparse.Namespace) -> int:
    """Read, compare, and print; 1 if something differs."""
    dump = read_dump(args.dumps, options_of(args))
    with waiting("comparing with the definition"):
        report = examined(dump)
    if not report.compared:
        lacking = sorted({name for result in report.results for name in result.missing})
        raise contract_error("dump", "hold something to compare", "nothing", f"missing: {', '.join(lacking)}")
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        show(dump, report, every=args.all)
    return 1 if report.findings else 0


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the command line; those of a model's constants give way to those that are named."""
    options = constants(args.config) if args.config else {}
    for name in ("cp_size", "split", "compress_ratio"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    known = [setting.name for setting in SETTINGS if setting.name != "cp_rank"]
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise contract_error("--set", f"be NAME=VALUE with a name of {', '.join(known)}", repr(text))
        options[name] = setting_value(name, name, value)
    return options


def constants(text: str) -> dict[str, Any]:
    """What checks need of a model's constants."""
    config = PRESETS[text]() if text in PRESETS else AttentionConfig.from_json_file(text)
    found = {"window_size": config.window_size, "index_topk": config.index_topk}
    return found | {"softmax_scale": 1 / math.sqrt(config.head_dim)} | rope_settings(config)


# --- tables ---


def show(dump: Dump, report: Report, *, every: bool) -> None:
    """The report as a table, with what explains each finding."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise ImportError("validate prints its table with rich; pip install rich, or use --json") from error
    width = None if sys.stdout.isatty() else NARROWEST
    console = Console(highlight=False, markup=False, width=width)
    console.print(headline(dump, report))
    shown = list(report.findings) if every else first_of_each(report.findings)
    if shown:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in (
            "check",
            "tensor",
            "rank",
            "request",
            "token",
            "at",
            "expected",
            "got",
            "differ",
            "likely cause",
        ):
            table.add_column(column, overflow="fold")
        for finding in shown:
            table.add_row(*row_of(finding, report, every=every))
        console.print(table)
        for kind in dict.fromkeys(cause.kind for finding in shown for cause in finding.causes):
            source = f" ({KINDS[kind].source})" if KINDS[kind].source else ""
            told = f"{kind}: {KINDS[kind].sentence}{source}\n  fix: {KINDS[kind].fix}"
            console.print(told, soft_wrap=True)
        if any(not finding.causes for finding in shown):
            console.print("none of the known kinds: no fault of docs/validate.md gives what was got")
    for title, lines in lists(report):
        console.print(f"{title}:")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)


def headline(dump: Dump, report: Report) -> str:
    """What was compared, and what came of it."""
    settings = dump.settings
    words = [f"rank {', '.join(map(str, dump.ranks))}"]
    words += [f"{name} {settings[name]}" for name in ("cp_size", "split", "compress_ratio") if name in settings]
    differ = sum(result.status == "differs" for result in report.results)
    text = f"{'; '.join(words)}\n{report.compared} comparisons, {differ} differ"
    if report.findings:
        first = report.findings[0]
        text += f"; they first part at {first.check}: {first.tensor} of rank {first.rank}"
    return text


def first_of_each(findings: tuple[Finding, ...]) -> list[Finding]:
    """The first finding of every check."""
    return list({finding.check: finding for finding in reversed(findings)}.values())[::-1]


def row_of(finding: Finding, report: Report, *, every: bool) -> list[str]:
    """A finding in words."""
    ranks = sorted({other.rank for other in report.findings if other.check == finding.check})
    rank = str(finding.rank) if every or len(ranks) == 1 else f"{finding.rank} (of {', '.join(map(str, ranks))})"
    causes = [cause.kind + (f": {cause.detail}" if cause.detail else "") for cause in finding.causes]
    return [
        finding.check,
        finding.tensor,
        rank,
        "" if finding.request is None else str(finding.request),
        "" if finding.token is None else str(finding.token),
        ", ".join(map(str, finding.index)),
        shortly(finding.expected),
        shortly(finding.got),
        f"{finding.differing} of {finding.size}",
        "\n".join(causes) or "none of the known kinds",
    ]


def shortly(value: Any) -> str:
    """A number, or a list of them, in few characters."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"{' '.join(map(str, value[:8]))}{' ...' if len(value) > 8 else ''}"
    return str(value)


def lists(report: Report) -> list[tuple[str, list[str]]]:
    """What was not compared, and what is to be said besides."""
    compared = {check.name: check.tensor for check in checks_in_order()}
    skipped: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for result in report.results:
        if result.status == "skipped":
            skipped.setdefault((result.check, result.missing), []).append(result.rank)
    everywhere = sorted({result.rank for result in report.results})
    absent, lacking = [], []
    for (check, missing), ranks in skipped.items():
        if ranks == everywhere and missing[0] == compared[check]:
            absent.append(missing[0])
        else:
            lacking.append(f"{check}: no {', '.join(missing)}{'' if ranks == everywhere else f' on rank {ranks}'}")
    titled = [
        ("not in the dump, so not compared", [", ".join(absent)] if absent else []),
        ("skipped", lacking),
        ("notes", list(report.notes)),
        ("not known", list(report.unknown)),
    ]
    return [(title, lines) for title, lines in titled if lines]
