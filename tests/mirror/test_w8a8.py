"""W8A8 projections over torch: exact on any device, in any width, for any int8; short floats take one rounding."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsacp_npu.quant
from dsacp_npu.compressor import rms_norm
from dsacp_ref import quant as ref
from tests.compare import assert_same
from tests.laws.test_w8a8 import factors, matrices
from tests.maths_strategies import normal, seeds
from tests.mirror.common import TORCH_DTYPES, to_numpy, to_torch

HALVES = st.sampled_from(["bfloat16", "float16"])
HALF_ULP = 2.0**-24


def on_a_device(wanted: bool = True):
    """Values as on a device, where no function may look at them."""
    return patch("dsacp_npu._tensors.readable", lambda tensor: not wanted)


@given(matrices(), HALVES, st.booleans())
def test_short_rows_and_matrices_are_coded_from_float32(x, dtype, blind) -> None:
    x = to_torch(np.clip(x, -6e4, 6e4), dtype)
    with on_a_device(blind):
        rows, weight = dsacp_npu.quant.quantized_rows(x), dsacp_npu.quant.quantized_weight(x)
    assert_same(rows, ref.quantized_rows(to_numpy(x, "float32")))
    assert_same(weight, ref.quantized_weight(to_numpy(x, "float32")))


@given(factors(), st.sampled_from(sorted(TORCH_DTYPES)), st.booleans())
def test_a_product_has_one_cast(drawn, dtype, blind) -> None:
    """From the float32 of the reference, into every dtype."""
    with on_a_device(blind):
        got = dsacp_npu.quant.quant_matmul(*to_torch(drawn), dtype=dtype)
    assert_same(got, torch.tensor(ref.quant_matmul(*drawn, dtype="float32")).to(TORCH_DTYPES[dtype]))


@pytest.mark.parametrize("width", [1023, 1024, 1025, 3000, 131071])
def test_wide_sums_of_full_range_are_exact(width: int) -> None:
    """Beyond 1024 products float32 alone would not do: an odd sum of 2**24 and more is none of its numbers."""
    rng = np.random.default_rng(width)
    values = np.concatenate([rng.integers(-128, -119, (2, width)), np.full((1, width), -128)]).astype(np.int8)
    ones = np.ones(3, np.float32)
    dots = dsacp_npu.quant.exact_dots(*to_torch((values, values)))
    assert_same(dots, (values.astype(np.int64) @ values.T.astype(np.int64)).astype(np.int32))
    coded = ref.QuantizedRows(values, ones), ref.QuantizedWeight(values, ones)
    got = dsacp_npu.quant.quant_matmul(*to_torch(coded), dtype="float64")
    assert_same(got, ref.quant_matmul(*coded, dtype="float64"))


def test_norm_and_code_do_not_round_in_between() -> None:
    """The codes of a bfloat16 row are those of its float32 norm; rounded to bfloat16 first, some would be others."""
    x, weight = to_torch((normal(np.random.default_rng(0), 8, 64), np.ones(64)), "bfloat16")
    got = dsacp_npu.quant.rms_norm_quantized(x, weight, 1e-6)
    assert_same(got, dsacp_npu.quant.quantized_rows(rms_norm(x.float(), weight, 1e-6)))
    assert (got.values != dsacp_npu.quant.quantized_rows(rms_norm(x, weight, 1e-6)).values).any()


def norm_error(d: int) -> float:
    """The relative error of a float32 norm: d + 2 roundings under the root count half, then root, quotient, product."""
    return ((d + 2) / 2 + 3) * HALF_ULP * (1 + d * HALF_ULP)


@given(matrices(), HALVES, seeds, st.booleans())
def test_norm_and_code_of_short_rows_are_within_the_error_of_a_float32_norm(x, dtype, seed, blind) -> None:
    """Scales within norm and two more roundings; numbers within half a step and what the largest code magnifies."""
    gains = normal(np.random.default_rng(seed), x.shape[1])
    x, gains = to_torch((np.clip(x, -6e4, 6e4), gains), dtype)
    with on_a_device(blind):
        got = dsacp_npu.quant.rms_norm_quantized(x, gains, 1e-6)
    x, gains = to_numpy((x, gains), "float64")
    exact = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-6) * gains
    scales, error = np.abs(exact).max(axis=1) / 127, norm_error(x.shape[1])
    assert (np.abs(got.scales.numpy() - scales) <= (error + 2 * HALF_ULP) * scales).all()
    steps = got.values.numpy() - exact / np.where(scales > 0, scales, 1)[:, None]
    assert (np.abs(steps) <= 0.5 + 127 * (2 * error + 4 * HALF_ULP)).all()
