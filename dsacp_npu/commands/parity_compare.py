"""What `parity` calls equal: integers exactly, selections as sets, floats within the error that float32 makes anyway.

A budget is twice the error of the plain float32 computation on one device, both against float64, plus two ulps of the
largest value; it holds for the largest error and for the Frobenius norm. In bfloat16 the plain computation and the
ulps of the largest error are of bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LISTED = 16  # entries of a selection that a text shows

# Ulps of float32 in an ulp of each dtype. Of float64 it is eight ulps: no wider run is there to compare with, so both
# that are compared are off, and what float32 loses over a few rows is a rough measure of what float64 loses there.
GRAINS: dict[str, float] = {"float64": 2.0**-26, "float32": 1, "bfloat16": 2**16}

# Against transformers no budget can be computed, because there is no float64 run of it. It agrees with float64 to 1e-5
# at output scales of 4 to 7, which our weights also give, and the weakest wrong detail that we know of moves 2e-3.
THEIRS_LIMIT = 2e-5


class MismatchError(Exception):
    """Something differs; the text says what and where."""


class Place(NamedTuple):
    """A row of output: which rank held it, and which token of which request it belongs to, in which step."""

    rank: int
    request: str
    token: int
    step: int

    def __str__(self) -> str:
        return f"rank {self.rank}, request {self.request}, token {self.token} (step {self.step})"


class Error(NamedTuple):
    """The largest error of an array: relative to its largest value, as a share of the budget, and in which row."""

    size: float
    share: float
    row: int


def ulp(magnitude: float) -> float:
    """The distance between float32 numbers at this magnitude."""
    return float(np.spacing(np.float32(magnitude)))


def error_of(actual: np.ndarray, exact: np.ndarray, plain: np.ndarray, grain: float = 1) -> Error:
    """The error of float32 results against float64 ones, where those are finite; NaN is an infinite error.

    Args:
        actual: float32[rows, ...], what is judged.
        exact: float64, same shape.
        plain: float32, same shape, one device.
        grain: ulps of float32 in one of the numbers that are judged, see `GRAINS`; in the norm roundings even out.

    >>> error_of(np.float32([[1.5]]), np.float64([[1.5]]), np.float32([[1.5]]))
    Error(size=0.0, share=0.0, row=0)
    """
    if exact.size == 0:
        return Error(0.0, 0.0, 0)
    finite = np.isfinite(exact)
    scale, norm = (
        float(np.abs(exact, where=finite, out=np.zeros(exact.shape)).max()),
        float(np.linalg.norm(exact[finite])),
    )
    error = np.abs(np.where(finite, actual - exact, 0))
    error[np.isnan(error)] = np.inf
    plain_error = np.where(finite, plain - exact, 0)
    largest = float(error.max())
    shares = [
        largest / (2 * float(np.abs(plain_error).max()) + 2 * grain * ulp(scale)),
        float(np.linalg.norm(error)) / (2 * float(np.linalg.norm(plain_error)) + 2 * ulp(norm)),
    ]
    row = int(error.reshape(len(error), -1).max(axis=1).argmax())
    return Error(largest / scale if scale else largest, max(shares), row)


def scoring_noise(exact: Sequence[np.ndarray], plain: Sequence[np.ndarray]) -> float:
    """The gap that two float64 scores need before float32 must agree on their order.

    In another order of summation each of the two may be off by what a budget allows: twice the largest error of plain
    float32 scoring in the scenario, plus two ulps of the largest score.
    """
    noise = 0.0
    for high, low in zip(exact, plain, strict=True):
        seen = np.isfinite(high)
        if seen.any():
            noise = max(
                noise, 4 * float(np.abs(low[seen] - high[seen]).max()) + 4 * ulp(float(np.abs(high[seen]).max()))
            )
    return noise


def listed(numbers: np.ndarray) -> str:
    """A row of a selection, cut where it is long."""
    return str(numbers.tolist()) if len(numbers) <= LISTED else f"[{', '.join(map(str, numbers[:LISTED]))}, ...]"


def swapped_rows(actual: np.ndarray, expected: np.ndarray, scores: np.ndarray, noise: float) -> np.ndarray:
    """In which rows another set was chosen, after every swap is found to be one that float32 cannot tell.

    Args:
        actual, expected: int32[rows, index_topk], entries, then -1.
        scores: float64[rows, entries], NaN where a row does not see the entry.
        noise: as `scoring_noise` gives it.

    Returns:
        bool[rows].

    Raises:
        MismatchError: naming the row as ``row N``.

    >>> scores = np.array([[3.0, 2.0, 2.0 + 1e-9, 1.0]])
    >>> swapped_rows(np.int32([[0, 1]]), np.int32([[2, 0]]), scores, 1e-6)
    array([ True])
    """
    if actual.dtype != np.int32 or actual.shape != expected.shape:
        raise MismatchError(f"selection is {actual.dtype} {list(actual.shape)}, expected int32 {list(expected.shape)}")
    swapped = (np.sort(actual, axis=1) != np.sort(expected, axis=1)).any(axis=1)
    trailing = (actual[:, 1:] >= 0) & (actual[:, :-1] < 0)
    for row in np.flatnonzero(swapped | trailing.any(axis=1)).tolist():
        got, due = set(actual[row].tolist()) - {-1}, set(expected[row].tolist()) - {-1}
        said = f"row {row} chose {listed(actual[row])}, expected {listed(expected[row])}"
        if trailing[row].any() or (actual[row] >= 0).sum() != len(got) or len(got) != len(due):
            raise MismatchError(f"{said}: as many distinct entries, then -1")
        for new in got - due:
            if not 0 <= new < scores.shape[1] or math.isnan(scores[row, new]):
                raise MismatchError(f"{said}: entry {new} is not visible")
            gaps = {old: abs(float(scores[row, new] - scores[row, old])) for old in due - got}
            if max(gaps.values()) > noise:
                raise MismatchError(f"{said}: scores of {new} and {max(gaps, key=gaps.__getitem__)} differ clearly")
    return swapped
