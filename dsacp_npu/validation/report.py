"""All checks of a dump in the order of data flow, so that the first finding is where an engine parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsacp_npu.validation import attended, batch, collected, entries, lengths, positions, selection, slots
from dsacp_npu.validation.core import Check, Finding, exact_finding, fits, same
from dsacp_npu.validation.definition import INDEXED_RATIO
from dsacp_npu.validation.reading import Dump
from dsacp_npu.validation.view import Skipped, View
from dsacp_ref.partition import Int32
from dsacp_ref.spec import ContractError

__all__ = ["CHECKS", "Report", "Result", "checks_in_order", "examined"]

Compared = Callable[[View], tuple[list[Finding], str]]


@dataclass(frozen=True)
class Result:
    """What became of one check on one rank.

    Args:
        check: str, its name.
        rank: int.
        status: ``"right"``, ``"differs"`` or ``"skipped"``.
        missing: names without which it was skipped.
    """

    check: str
    rank: int
    status: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What came of a dump.

    Args:
        results: every check on every rank, in the order of data flow.
        findings: in the same order.
        notes: what is right and yet worth a word.
        unknown: names that no check knows.
    """

    results: tuple[Result, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def compared(self) -> int:
        """How many comparisons were made."""
        return sum(result.status != "skipped" for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "right": not self.findings,
            "first": self.findings[0].check if self.findings else None,
            "findings": [finding.as_dict() for finding in self.findings],
            "results": [
                {"check": each.check, "rank": each.rank, "status": each.status, "missing": list(each.missing)}
                for each in self.results
            ],
            "notes": list(self.notes),
            "unknown": list(self.unknown),
        }


def examined(dump: Dump) -> Report:
    """Every check on every rank.

    Args:
        dump: Dump, as `reading.read_dump` returns it.

    Returns:
        Report.

    Raises:
        ContractError: settings with which the step cannot be cut.
    """
    batch_lengths, findings = batch.batch_of(dump)
    results, notes = [batch_result(dump, rank, findings) for rank in dump.ranks], list(dump.notes)
    views = {} if batch_lengths is None else {rank: view_of(dump, rank, batch_lengths) for rank in dump.ranks}
    for check, compared in CHECKS:
        found_here: list[Finding] = []
        for rank in dump.ranks:
            if not due(check, dump, rank):
                continue
            missing = missing_of(check, dump, rank, views)
            if missing:
                results.append(Result(check.name, rank, "skipped", missing))
                continue
            result, found, note = outcome(check, compared, views[rank])
            results.append(result)
            found_here += found
            notes += [note] if note else []
        right = [views[result.rank] for result in results if result.check == check.name and result.status == "right"]
        findings += in_common(found_here, check, right)
    return Report(tuple(results), tuple(findings), tuple(dict.fromkeys(notes)), dump.unknown)


def in_common(findings: list[Finding], check: Check, right: list[View]) -> list[Finding]:
    """The findings of one check with the causes that explain all ranks, where there are such: ranks run one code.

    Of several, those are kept that give what is right on the ranks where nothing differs.
    """
    kinds = [[cause.kind for cause in finding.causes] for finding in findings if finding.causes]
    shared = [kind for kind in (kinds[0] if kinds else []) if all(kind in other for other in kinds)]
    kept = [kind for kind in shared if all(gives_right(check, kind, view) for view in right)] or shared
    if not kept:
        return findings
    return [
        replace(finding, causes=tuple(cause for cause in finding.causes if cause.kind in kept)) for finding in findings
    ]


def gives_right(check: Check, kind: str, view: View) -> bool:
    """Whether an implementation with a fault would be right on this rank; of floats, that is not asked."""
    got = view.got(check.tensor)
    if got.dtype.kind == "f" or check in selection.CHECKS:
        return True
    made = [fault.made for fault in check.faults if fault.kind == kind]
    if not made:  # another layout
        return True
    due, free = check.expected(view), check.free(view) if check.free is not None else None
    return any(fits(lambda m=each: m(view, got), lambda a: same(a, due, free), lambda _: False) for each in made)


def batch_result(dump: Dump, rank: int, findings: list[Finding]) -> Result:
    """What became of the step's own lengths."""
    missing = tuple(name for name in ("query_start_loc", "seq_lens") if name not in dump.ranks[rank])
    if missing:
        return Result(batch.NAME, rank, "skipped", missing)
    differs = any(finding.rank == rank for finding in findings)
    return Result(batch.NAME, rank, "differs" if differs else "right")


def view_of(dump: Dump, rank: int, batch_lengths: tuple[Int32, Int32]) -> View:
    """One rank beside the step; a step that cannot be cut as the settings say is refused."""
    view = View(
        *batch_lengths,
        cp_size=dump.settings.get("cp_size", 1),
        cp_rank=rank if "cp_size" in dump.settings else 0,
        split=dump.settings.get("split", "contiguous"),
        num_input_tokens=dump.settings.get("num_input_tokens"),
        causal=dump.settings["causal"],
        empty_extent=dump.settings["empty_extent"],
        settings=dump.settings,
        tensors=dump.ranks[rank],
        ranks=dump.ranks,
    )
    _ = view.tokens, view.extents  # refused here, if at all
    return view


def due(check: Check, dump: Dump, rank: int) -> bool:
    """Whether the layer has what is compared: one without entries has no table of them, and few choose among them."""
    ratio = dump.settings.get("compress_ratio")
    if ratio is None or check.tensor in dump.ranks[rank]:
        return True
    if check in selection.CHECKS:
        return bool(ratio == INDEXED_RATIO)
    return bool(ratio > 1) or check.tensor not in OF_ENTRIES


def missing_of(check: Check, dump: Dump, rank: int, views: dict[int, View]) -> tuple[str, ...]:
    """What a check lacks on a rank; the tensor that it compares comes first."""
    there = dump.ranks[rank].keys() | dump.settings.keys()
    if not views:
        return ("query_start_loc", "seq_lens")
    return tuple(dict.fromkeys(name for name in (check.tensor, *check.needs) if name not in there))


def outcome(check: Check, compared: Compared, view: View) -> tuple[Result, list[Finding], str]:
    """The result of one comparison; what cannot be compared because it breaks a contract is a finding too."""
    try:
        with np.errstate(all="ignore"):  # a dump may hold NaN and infinities, and what they give is compared like all
            found, note = compared(view)
    except Skipped as skipped:
        return Result(check.name, view.cp_rank, "skipped", (str(skipped),)), [], ""
    except ContractError as error:
        size = int(view.got(check.tensor).size)
        found = [Finding(check.name, check.tensor, view.cp_rank, None, None, (), str(error), "", size, size, ())]
        note = ""
    return Result(check.name, view.cp_rank, "differs" if found else "right"), found, note


# --- the checks ---


def exact(check: Check) -> Compared:
    """A comparison of integers."""

    def compared(view: View) -> tuple[list[Finding], str]:
        found = exact_finding(view, check)
        return [found] if found else [], ""

    return compared


def rope(check: positions.RopeCheck) -> tuple[Check, Compared]:
    """A comparison of two tables."""

    def compared(view: View) -> tuple[list[Finding], str]:
        found, note = positions.rope_finding(view, check)
        return [found] if found else [], note

    needs = (check.tensors[1], *check.needs)
    return positions.as_check(check, needs), compared


def selected(view: View) -> tuple[list[Finding], str]:
    """A comparison of choices."""
    found, note = selection.selection_finding(view)
    return [found] if found else [], note


def attended_to(view: View) -> tuple[list[Finding], str]:
    """A comparison of attention output, and of its lse."""
    return attended.attention_findings(view), ""


def gathered(view: View) -> tuple[list[Finding], str]:
    """A comparison of what all ranks have together."""
    found = collected.collected_finding(view)
    return [found] if found else [], ""


CHECKS: tuple[tuple[Check, Compared], ...] = (
    *((check, exact(check)) for check in lengths.CHECKS),
    *((check, exact(check)) for check in positions.CHECKS),
    *(rope(check) for check in positions.ROPE_CHECKS),
    *((check, exact(check)) for check in slots.CHECKS),
    *((check, exact(check)) for check in entries.CHECKS),
    *((check, selected) for check in selection.CHECKS),
    *((check, attended_to) for check in attended.CHECKS),
    *((check, gathered) for check in collected.CHECKS),
)


OF_ENTRIES = {check.tensor for check in entries.CHECKS} - {"num_computed_tokens"} | {"cmp_block_table_rows"}


def checks_in_order() -> Iterator[Check]:
    """Every check, that of the step itself first."""
    yield batch.CHECK
    for check, _ in CHECKS:
        yield check
