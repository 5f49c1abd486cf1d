"""What "the same" means: exactly, as a choice, or within the error that plain low precision makes anyway.

The comparisons read numpy arrays and torch tensors alike and report the worst place.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


def numpy_array(value: Any) -> np.ndarray:
    """The value as a numpy array; a torch float that numpy lacks is widened."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return value.double().numpy() if value.is_floating_point() else value.numpy()
    return np.asarray(value)


def kind(value: Any) -> str:
    """The bare dtype name."""
    return str(value.dtype).removeprefix("torch.")


def assert_same(actual: Any, expected: Any, name: str = "value") -> None:
    """Both are the same record, list, array or number: type, dtype, shape and every element. NaN equals NaN."""
    if hasattr(expected, "_fields"):
        assert type(actual).__name__ == type(expected).__name__, f"{name}: {type(actual)} is not {type(expected)}"
        assert actual._fields == expected._fields, f"{name}: fields {actual._fields}, expected {expected._fields}"
        for field, mine, theirs in zip(expected._fields, actual, expected, strict=True):
            assert_same(mine, theirs, f"{name}.{field}")
    elif isinstance(expected, (list, tuple)):
        assert isinstance(actual, (list, tuple)), f"{name}: {type(actual).__name__} is no sequence"
        assert len(actual) == len(expected), f"{name}: {len(actual)} items, expected {len(expected)}"
        for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_same(mine, theirs, f"{name}[{i}]")
    elif hasattr(expected, "dtype"):
        assert_same_array(actual, expected, name)
    else:
        assert type(actual) is type(expected), f"{name}: {type(actual).__name__}, expected {type(expected).__name__}"
        assert actual == expected, f"{name}: {actual!r}, expected {expected!r}"


def assert_same_array(actual: Any, expected: Any, name: str) -> None:
    """Same dtype, shape and elements."""
    assert hasattr(actual, "dtype"), f"{name}: {type(actual).__name__} is no array"
    assert kind(actual) == kind(expected), f"{name}: dtype {kind(actual)}, expected {kind(expected)}"
    mine, theirs = numpy_array(actual), numpy_array(expected)
    assert mine.shape == theirs.shape, f"{name}: shape {mine.shape}, expected {theirs.shape}"
    different = (mine != theirs) & ~((mine != mine) & (theirs != theirs))
    if np.any(different):
        at = first_index(different)
        count = int(np.count_nonzero(different))
        raise AssertionError(f"{name}{list(at)}: {mine[at]}, expected {theirs[at]} ({count} of {mine.size} differ)")


def first_index(mask: np.ndarray) -> tuple[int, ...]:
    """Where a mask is first True."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


def ulp(magnitude: float, dtype: str) -> float:
    """The distance to the next number of this dtype at this magnitude, subnormals aside."""
    return 0.0 if magnitude == 0 else math.ldexp(1.0, math.frexp(magnitude)[1] - 1 - MANTISSA_BITS[dtype])


def scoring_noise(scores64: np.ndarray, low_precision: Any) -> np.ndarray:
    """Per row, the gap that two float64 scores need before low precision must agree on their order.

    Each of the two may be off by the budget of `assert_within_budget`: twice the plain error, plus two ulps.
    """
    low, dtype = numpy_array(low_precision).astype(np.float64), kind(low_precision)
    noise = np.zeros(len(scores64))
    for row, (exact, plain) in enumerate(zip(scores64, low, strict=True)):
        finite = np.isfinite(exact)
        if finite.any():
            error = float(np.abs(plain[finite] - exact[finite]).max())
            noise[row] = 2 * (2 * error + 2 * ulp(float(np.abs(exact[finite]).max()), dtype))
    return noise


def assert_same_selection(actual: Any, expected: Any, scores64: np.ndarray, noise: Any, name: str = "topk") -> None:
    """Every row chose the same set, or swapped entries only where float64 cannot tell their scores apart.

    Both are [rows, k], valid entries first, then -1; ``noise`` is one number, or one a row (`scoring_noise`). NaN
    counts as -inf, as in the rule of the choice.
    """
    assert kind(actual) == kind(expected), f"{name}: dtype {kind(actual)}, expected {kind(expected)}"
    mine, theirs = numpy_array(actual), numpy_array(expected)
    assert mine.shape == theirs.shape, f"{name}: shape {mine.shape}, expected {theirs.shape}"
    gaps = np.broadcast_to(np.asarray(noise, np.float64), (len(mine),))
    for row, (got, want) in enumerate(zip(mine, theirs, strict=True)):
        chosen, due = got[got >= 0].tolist(), want[want >= 0].tolist()
        where = f"{name}[{row}] {got.tolist()}, expected {want.tolist()}"
        assert got.tolist() == chosen + [-1] * (len(got) - len(chosen)), f"{where}: -1 comes last, and nothing below it"
        assert len(set(chosen)) == len(chosen), f"{where}: an entry twice"
        assert len(chosen) == len(due), f"{where}: {len(chosen)} entries, expected {len(due)}"
        gained, lost = sorted(set(chosen) - set(due)), sorted(set(due) - set(chosen))
        assert all(entry < scores64.shape[1] for entry in gained), f"{where}: no such entry"
        for new in gained:
            for old in lost:
                a, b = (-np.inf if np.isnan(scores64[row, i]) else scores64[row, i] for i in (new, old))
                close = a == b or abs(a - b) < gaps[row]
                assert close, f"{where}: entry {new} scores {a}, entry {old} {b}, noise {gaps[row]}"


def assert_within_budget(actual: Any, oracle64: Any, low_precision: Any, name: str = "value") -> None:
    """The error is at most twice what the plain low-precision computation makes, plus two ulps of the output.

    inf and NaN sit where the oracle's do. Then two errors are bounded, against float64: the Frobenius norm, relative to
    the oracle's; and the largest, relative to the oracle's largest value. ``low_precision`` may be a list: the plain
    computation in several orders of summation, of which the worst counts. One number can be right by luck.
    """
    dtype = kind(actual)
    mine, exact = (numpy_array(value).astype(np.float64) for value in (actual, oracle64))
    plains = low_precision if isinstance(low_precision, list) else [low_precision]
    for plain in plains:
        assert dtype == kind(plain), f"{name}: dtype {dtype}, the plain computation has {kind(plain)}"
    lows = [numpy_array(plain).astype(np.float64) for plain in plains]
    assert mine.shape == exact.shape, f"{name}: shape {mine.shape}, expected {exact.shape}"
    for what, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        different = test(mine) != test(exact)
        if different.any():
            at = first_index(different)
            raise AssertionError(f"{name}{list(at)}: {mine[at]}, expected {exact[at]}: {what} sits elsewhere")
    finite = np.isfinite(exact)
    for low in lows:
        assert low.shape == exact.shape, f"{name}: the plain computation has shape {low.shape}, expected {exact.shape}"
        assert np.isfinite(low[finite]).all(), f"{name}: the plain computation is not finite where the oracle is"
    if not finite.any():
        return
    target = np.where(finite, exact, 0)
    error, *plain_errors = (np.where(finite, value - target, 0) for value in (mine, *lows))
    at = first_index(np.abs(error) == np.abs(error).max())
    told = [float(low[at]) for low in lows]
    for what, size in (
        ("largest", lambda x: float(np.abs(x).max())),
        ("Frobenius", lambda x: float(np.linalg.norm(x))),
    ):
        plain_size, scale = max(map(size, plain_errors)), size(target)
        budget = 2 * plain_size + 2 * ulp(scale, dtype)
        assert size(error) <= budget, (
            f"{name}: {what} error {size(error):.3g} over budget {budget:.3g} (plain {dtype} {plain_size:.3g}, scale "
            f"{scale:.3g}); worst at {list(at)}: {mine[at]}, expected {exact[at]}, plain {told}"
        )


def assert_double(actual: np.ndarray, oracle64: Any, name: str = "value") -> None:
    """A float64 result equals the oracle's to 1e-12 of its largest value; inf and NaN sit where the oracle's do."""
    exact = np.asarray(oracle64, np.float64).reshape(actual.shape)
    assert actual.dtype == np.float64, f"{name}: dtype {actual.dtype}"
    finite = np.isfinite(exact)
    assert_same(np.where(finite, 0, actual), np.where(finite, 0, exact), name)
    error = np.abs(np.where(finite, actual - np.where(finite, exact, 0), 0))
    if error.size and not error.max() <= 1e-12 * np.abs(exact[finite]).max(initial=0):
        at = first_index(~(error <= 1e-12 * np.abs(exact[finite]).max(initial=0)))
        raise AssertionError(f"{name}{list(at)}: {actual[at]}, expected {exact[at]}")
