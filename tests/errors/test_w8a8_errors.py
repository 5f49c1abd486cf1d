"""Bad rows, matrices and codes of W8A8 projections are refused, in the same words by both packages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dsacp_npu.quant
from dsacp_ref import quant
from dsacp_ref.quant import QuantizedRows, QuantizedVectors, QuantizedWeight
from dsacp_ref.spec import ContractError
from tests.maths_strategies import normal
from tests.mirror.common import to_torch

RNG = np.random.default_rng(0)
X, WEIGHT, GAINS = normal(RNG, 2, 3), normal(RNG, 4, 3), normal(RNG, 3)
ROWS, CODED = quant.quantized_rows(X), quant.quantized_weight(WEIGHT)
NO_CODE = "inf and NaN have no code"


def with_bad(value: float) -> np.ndarray:
    """Rows of which one number is this one."""
    bad = X.copy()
    bad[1, 2] = value
    return bad


FAULTS: list[tuple[str, tuple[Any, ...], str]] = [
    ("quantized_rows", (X.tolist(),), "x must be an array, got list; dtype float32 or float64"),
    ("quantized_rows", (X[0],), "x must have shape [num_tokens, in], got [3]"),
    ("quantized_rows", (X[None],), "x must have shape [num_tokens, in], got [1, 2, 3]"),
    ("quantized_rows", (X[:, :0],), "x must have shape [..., d] with d >= 1, got (2, 0)"),
    ("quantized_rows", (X.astype(np.int32),), "x must have dtype float32 or float64, got int32; cast x first"),
    ("quantized_rows", (with_bad(np.nan),), f"x must be finite in float32, got nan; {NO_CODE}"),
    ("quantized_rows", (with_bad(-np.inf),), f"x must be finite in float32, got inf; {NO_CODE}"),
    ("quantized_rows", (with_bad(1e39),), f"x must be finite in float32, got inf; {NO_CODE}"),
    ("quantized_weight", (None,), "weight must be an array, got NoneType; dtype float32 or float64"),
    ("quantized_weight", (GAINS,), "weight must have shape [out, in], got [3]"),
    ("quantized_weight", (X[:, :0],), "weight must have shape [..., d] with d >= 1, got (2, 0)"),
    (
        "quantized_weight",
        (CODED.values,),
        "weight must have dtype float32 or float64, got int8; cast weight first",
    ),
    ("quantized_weight", (with_bad(np.nan),), f"weight must be finite in float32, got nan; {NO_CODE}"),
    ("rms_norm_quantized", (X[0], GAINS, 1e-6), "x must have shape [num_tokens, d], got [3]"),
    ("rms_norm_quantized", (with_bad(np.inf), GAINS, 1e-6), f"x must be finite in float32, got inf; {NO_CODE}"),
    ("rms_norm_quantized", (X, None, 1e-6), "weight must be an array, got NoneType; dtype float32 or float64"),
    ("rms_norm_quantized", (X, GAINS[:2], 1e-6), "weight must have shape [3], got [2]; one weight a channel"),
    ("rms_norm_quantized", (X, GAINS, 0.0), "eps must be a finite number > 0.0, got 0.0"),
    ("rms_norm_quantized", (X, GAINS, None), "eps must be a finite number > 0.0, got NoneType None"),
    (
        "rms_norm_quantized",
        (X, with_bad(np.nan)[1], 1e-6),
        f"the norm of x must be finite in float32, got nan; {NO_CODE}",
    ),
    ("quant_matmul", (CODED, CODED), "rows must be of type QuantizedRows, got QuantizedWeight"),
    ("quant_matmul", (ROWS, ROWS), "weight must be of type QuantizedWeight, got QuantizedRows"),
    ("quant_matmul", (ROWS, WEIGHT), "weight must be of type QuantizedWeight, got "),  # ends in the array's own type
    (
        "quant_matmul",
        (QuantizedVectors(*ROWS), CODED),
        "rows must be of type QuantizedRows, got QuantizedVectors",
    ),
    (
        "quant_matmul",
        (ROWS._replace(values=X), CODED),
        "rows.values must have dtype int8, got float64; cast rows.values first",
    ),
    (
        "quant_matmul",
        (ROWS._replace(values=ROWS.values[0]), CODED),
        "rows.values must have shape [num_tokens, in], got [3]",
    ),
    (
        "quant_matmul",
        (ROWS._replace(scales=ROWS.scales[:1]), CODED),
        "rows.scales must have shape [2], got [1]; one scale a token",
    ),
    (
        "quant_matmul",
        (ROWS._replace(scales=ROWS.scales.astype(np.float16)), CODED),
        "rows.scales must have dtype float32, got float16; cast rows.scales first",
    ),
    (
        "quant_matmul",
        (ROWS, CODED._replace(values=CODED.values.T)),
        "weight.values must have shape [out, 3], got [3, 4]; as wide as the rows",
    ),
    (
        "quant_matmul",
        (ROWS, CODED._replace(values=CODED.values.astype(np.uint8))),
        "weight.values must have dtype int8, got uint8; cast weight.values first",
    ),
    (
        "quant_matmul",
        (ROWS, CODED._replace(scales=CODED.scales[:, None])),
        "weight.scales must have shape [4], got [4, 1]; one scale an output channel",
    ),
    (
        "quant_matmul",
        (ROWS, CODED._replace(scales=CODED.scales.astype(np.float64))),
        "weight.scales must have dtype float32, got float64; cast weight.scales first",
    ),
]


def refusal(package: Any, function: str, args: tuple[Any, ...]) -> str:
    """The text with which a package refuses a call."""
    options = {"dtype": "float32"} if function == "quant_matmul" else {}
    with pytest.raises(ContractError) as caught:
        getattr(package, function)(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize(("function", "args", "text"), FAULTS, ids=range(len(FAULTS)))
def test_a_fault_is_named_in_a_sentence(function: str, args: tuple[Any, ...], text: str) -> None:
    theirs, mine = refusal(quant, function, args), refusal(dsacp_npu.quant, function, to_torch(args))
    if text.endswith("got "):
        assert (theirs, mine) == (f"{text}ndarray", f"{text}Tensor")
    else:
        assert theirs == text
        assert mine == text


@pytest.mark.parametrize("width", [0, 131072])
def test_sums_that_may_leave_int32_are_refused(width: int) -> None:
    """131072 products of -128 and -128 are 2**31; no product at all is no projection."""
    rows = QuantizedRows(np.ones((1, width), np.int8), np.ones(1, np.float32))
    args = rows, QuantizedWeight(*rows)
    text = f"rows.values must have 1 to 131071 channels, got {width}; wider sums may leave int32"
    assert refusal(quant, "quant_matmul", args) == text
    assert refusal(dsacp_npu.quant, "quant_matmul", to_torch(args)) == text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "", None, np.float32])
def test_the_reference_gives_wide_floats_only(dtype: Any) -> None:
    with pytest.raises(ContractError) as caught:
        quant.quant_matmul(ROWS, CODED, dtype=dtype)
    assert str(caught.value) == f"dtype must be one of 'float32', 'float64', got {dtype!r}"


@pytest.mark.parametrize("dtype", ["int8", "half", None])
def test_the_mirror_gives_floats_only(dtype: Any) -> None:
    with pytest.raises(ContractError) as caught:
        dsacp_npu.quant.quant_matmul(*to_torch((ROWS, CODED)), dtype=dtype)
    choices = "'float32', 'float64', 'bfloat16', 'float16'"
    assert str(caught.value) == f"dtype must be one of {choices}, got {dtype!r}"


@pytest.mark.parametrize(("function", "args"), [("quantized_rows", (X,)), ("rms_norm_quantized", (X, GAINS, 1e-6))])
def test_the_mirror_takes_no_numpy_array(function: str, args: tuple[Any, ...]) -> None:
    text = refusal(dsacp_npu.quant, function, args)
    assert text == "x must be a torch tensor, got ndarray; dsacp_ref is for numpy arrays"
