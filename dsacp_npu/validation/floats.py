"""How far floats may be off: twice what the plain computation in the same dtype loses, plus two ulps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Budget", "apart", "budget_of", "rounded", "scoring_noise", "ulp"]

Array = NDArray[Any]
MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
DOUBLE = 1e-12


def rounded(values: Array, dtype: str) -> Array:
    """The nearest numbers of a dtype, as float64."""
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
        return np.where(np.isfinite(values), nearest, values).astype(np.float64)
    with np.errstate(over="ignore"):
        return values.astype(dtype).astype(np.float64)


def ulp(magnitude: float, dtype: str) -> float:
    """The distance to the next number of a dtype."""
    if magnitude == 0 or not math.isfinite(magnitude):
        return 0.0
    return math.ldexp(1.0, math.frexp(magnitude)[1] - 1 - MANTISSA_BITS[dtype])


class Budget(NamedTuple):
    """What two errors may be: of the number that is furthest off, and of all together."""

    largest: float
    norm: float


def budget_of(exact: Array, plains: list[Array], dtype: str, scale: float = 0.0) -> Budget:
    """Twice the worst plain error, plus two ulps of the largest number, and of the norm.

    Args:
        exact: float64, what is right.
        plains: the plain computation in the dtype, in several orders: one may be right by luck.
        dtype: str, what the tensor was computed in.
        scale: the largest number that was added up on the way: sums that cancel are no more exact than that.
    """
    finite = np.isfinite(exact)
    errors = [np.where(finite, plain - np.where(finite, exact, 0), 0) for plain in plains]
    target = np.where(finite, exact, 0)
    scale = max(float(np.abs(target).max(initial=0)), scale)
    norm = max(float(np.linalg.norm(target)), scale)
    if dtype == "float64":  # what is right is no more exact than that itself
        return Budget(DOUBLE * scale, DOUBLE * norm)
    return Budget(
        2 * max(float(np.abs(error).max(initial=0)) for error in errors) + 2 * ulp(scale, dtype),
        2 * max(float(np.linalg.norm(error)) for error in errors) + 2 * ulp(norm, dtype),
    )


def apart(got: Array, due: Array, budget: Budget) -> Array:
    """Which numbers are too far off; NaN and infinities sit where they are due."""
    finite = np.isfinite(due)
    with np.errstate(invalid="ignore"):
        special = ~finite & ~((got == due) | (np.isnan(got) & np.isnan(due)))
        error = np.where(finite, np.abs(got - np.where(finite, due, 0)), 0)
    wrong = special | ~(error <= budget.largest)
    if not wrong.any() and not np.linalg.norm(error) <= budget.norm:
        wrong = error == error.max()
    return wrong


def scoring_noise(exact: Array, plain: Array, dtype: str) -> Array:
    """Per row, the gap that two exact scores need before their order must be seen in a dtype.

    Each of the two may be off by twice what the plain computation loses in the row, plus two ulps.
    """
    finite = np.isfinite(exact) & np.isfinite(plain)
    error = np.where(finite, np.abs(np.where(finite, plain, 0) - np.where(finite, exact, 0)), 0).max(axis=1, initial=0)
    largest = np.where(finite, np.abs(exact), 0).max(axis=1, initial=0)
    return 2 * (2 * error + 2 * np.array([ulp(float(size), dtype) for size in largest]))
