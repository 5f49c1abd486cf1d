"""What is compared, and what explains a difference.

A cause is found by testing hypotheses: each known fault is a function that computes what an implementation with this
fault would have produced from the same step. It is named when that is what was got, and differs from what is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from dsacp_npu.validation.kinds import KINDS
from dsacp_npu.validation.view import Array, Place, Skipped, View, other_layouts
from dsacp_ref.spec import ContractError

__all__ = [
    "Cause",
    "Check",
    "Fault",
    "Finding",
    "cause",
    "exact_finding",
    "explained",
    "finding_at",
    "fits",
    "same",
    "told",
]

SHOWN = 12  # numbers of a list in a text


@dataclass(frozen=True)
class Cause:
    """A known fault that gives exactly what was got.

    Args:
        kind: str, a key of `kinds.KINDS`.
        sentence, fix: str.
        detail: str, which of several forms of it; may be empty.
    """

    kind: str
    sentence: str
    fix: str
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """Where a tensor of one rank first parts from the definition.

    Args:
        check: str, its name.
        tensor: str, ours.
        rank: int.
        request, token: of the first differing element; None where there is none.
        index: its place in the tensor; empty where shapes differ.
        expected, got: the two numbers, or the two shapes in words.
        differing, size: how many elements differ, of how many that count.
        causes: tuple of Cause; empty for none of the known kinds.
    """

    check: str
    tensor: str
    rank: int
    request: int | None
    token: int | None
    index: tuple[int, ...]
    expected: Any
    got: Any
    differing: int
    size: int
    causes: tuple[Cause, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no NaN and no infinities: words there."""
        found = asdict(self) | {"index": list(self.index), "causes": [asdict(cause) for cause in self.causes]}
        for name in ("expected", "got"):
            if isinstance(found[name], float) and not math.isfinite(found[name]):
                found[name] = str(found[name])
        return found


class Fault(NamedTuple):
    """A known fault of one check.

    Fields:
        kind: str, a key of `kinds.KINDS`.
        made: what an implementation with the fault gives, from the step and what was got: an array, or a list of the
            forms that it may take; None where the fault has no meaning.
    """

    kind: str
    made: Callable[[View, Array], Array | list[Array] | None]


class Check(NamedTuple):
    """One tensor beside its definition.

    Fields:
        name: str.
        tensor: str, the tensor that is compared.
        title: str, a sentence for people.
        needs: names of tensors and settings without which it is skipped.
        expected: what is right.
        place: where an element belongs.
        faults: tuple of Fault, likely ones first.
        free: a mask of elements that may be anything; None for none.
        local: bool, whether what is right depends on the rank, so that another layout may explain it.
    """

    name: str
    tensor: str
    title: str
    needs: tuple[str, ...]
    expected: Callable[[View], Array]
    place: Callable[[View, tuple[int, ...]], Place]
    faults: tuple[Fault, ...] = ()
    free: Callable[[View], Array] | None = None
    local: bool = True


def same(got: Array, due: Array, free: Array | None) -> bool:
    """Whether two arrays of integers are the same where it counts."""
    if got.shape != due.shape:
        return False
    different = got != due
    return not (different & ~free if free is not None and free.shape == different.shape else different).any()


def exact_finding(view: View, check: Check) -> Finding | None:
    """Where an integer tensor first differs, and what explains it; None where it is right."""
    got, due = view.got(check.tensor), check.expected(view)
    free = check.free(view) if check.free is not None else None
    if same(got, due, free):
        return None

    def equal(candidate: Array) -> bool:
        return same(got, candidate, free if candidate.shape == due.shape else None)

    def right(candidate: Array) -> bool:
        return same(candidate, due, free)

    causes = explained(view, check, got, equal, right)
    if got.shape != due.shape:
        return shape_finding(view, check, got, due, causes)
    different = got != due if free is None else (got != due) & ~free
    return finding_at(
        view, check, different, due, got, causes, int(different.size - (0 if free is None else free.sum()))
    )


def finding_at(
    view: View,
    check: Check,
    different: Array,
    due: Array,
    got: Array,
    causes: tuple[Cause, ...],
    size: int,
    index: tuple[int, ...] | None = None,
) -> Finding:
    """The finding at the first differing element, or at a given one."""
    if index is None:
        index = tuple(int(i) for i in np.argwhere(different)[0])
    place = check.place(view, index)
    return Finding(
        check.name,
        check.tensor,
        view.cp_rank,
        *place,
        index,
        due[index].item() if due[index].ndim == 0 else due[index].tolist(),
        got[index].item() if got[index].ndim == 0 else got[index].tolist(),
        int(np.count_nonzero(different)),
        size,
        causes,
    )


def shape_finding(view: View, check: Check, got: Array, due: Array, causes: tuple[Cause, ...]) -> Finding:
    """The finding of a tensor of another shape."""
    size = int(due.size)
    place = Place()
    if got.ndim == due.ndim == 1 and len(got) and len(due):
        most = min(len(got), len(due))
        apart = np.flatnonzero(got[:most] != due[:most])
        place = check.place(view, (int(apart[0]) if len(apart) else most,))
    return Finding(check.name, check.tensor, view.cp_rank, *place, (), told(due), told(got), size, size, causes)


def told(array: Array) -> str:
    """An array in a few words."""
    if array.ndim != 1 or array.dtype.kind == "f":
        return f"shape {list(array.shape)}"
    numbers = " ".join(map(str, array[:SHOWN].tolist()))
    return f"{len(array)} numbers: {numbers}{' ...' if len(array) > SHOWN else ''}"


Test = Callable[[Array], bool]


def explained(view: View, check: Check, got: Array, equal: Test, right: Test) -> tuple[Cause, ...]:
    """The known faults that give what was got. Another layout is named only where no fault of the check explains it."""
    found: dict[str, Cause] = {}
    for fault in check.faults:
        if fault.kind not in found and fits(lambda f=fault: f.made(view, got), equal, right):
            found[fault.kind] = cause(fault.kind)
    if found or not check.local:
        return tuple(found.values())
    details: dict[str, list[str]] = {}
    for kind, detail, other in other_layouts(view):
        if fits(lambda v=other: check.expected(v), equal, right):
            details.setdefault(kind, []).append(detail)
    return tuple(cause(kind, ", ".join(dict.fromkeys(words))) for kind, words in details.items())


def fits(made: Callable[[], Array | list[Array] | None], equal: Test, right: Test) -> bool:
    """Whether a hypothesis can be computed, gives what was got, and is not what is right."""
    try:
        candidate = made()
    except (ContractError, IndexError, Skipped, ValueError):
        return False  # an implementation with this fault would have failed instead
    forms = candidate if isinstance(candidate, list) else [] if candidate is None else [candidate]
    return any(equal(form) and not right(form) for form in forms)


def cause(kind: str, detail: str = "") -> Cause:
    """The cause of a kind."""
    return Cause(kind, KINDS[kind].sentence, KINDS[kind].fix, detail)
