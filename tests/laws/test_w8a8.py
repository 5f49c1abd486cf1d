"""W8A8 projections: codes and products against the oracle's, one number at a time; bounds from the scales alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsacp_ref.compressor import rms_norm
from dsacp_ref.quant import (
    QuantizedRows,
    QuantizedWeight,
    quant_matmul,
    quantized_rows,
    quantized_weight,
    rms_norm_quantized,
)
from tests.compare import assert_same
from tests.maths_strategies import dtypes, normal, seeds
from tests.oracles import compressor as norm_oracle
from tests.oracles import quant as oracle
from tests.strategies import read_only

HALF_ULP = 2.0**-24  # of one float32 rounding, relative to the result
WIDTHS = st.integers(1, 6)


@st.composite
def matrices(draw: st.DrawFn, columns: st.SearchStrategy[int] = WIDTHS) -> np.ndarray:
    """Rows of all magnitudes and of halves of a step; rows of zeros, and none, among them."""
    rng = np.random.default_rng(draw(seeds))
    shape = draw(st.integers(0, 4)), draw(columns)
    x = rng.standard_normal(shape) if draw(st.booleans()) else rng.integers(-254, 255, shape) / 2
    x = x * 10.0 ** rng.integers(-9, 10, (shape[0], 1)) * (rng.random((shape[0], 1)) < 0.8)
    return read_only(x.astype(draw(dtypes)))


@st.composite
def factors(draw: st.DrawFn) -> tuple[QuantizedRows, QuantizedWeight]:
    """Any int8 at all, -128 and full range often; positive scales, some 0."""
    rng = np.random.default_rng(draw(seeds))
    num_tokens, num_channels, width = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 40))
    low, high = draw(st.sampled_from([(-128, 128), (-127, 128), (-128, -126), (126, 128), (-1, 2)]))

    def coded(count: int) -> tuple[np.ndarray, np.ndarray]:
        scales = 10.0 ** rng.integers(-9, 10, count) * rng.random(count) * (rng.random(count) < 0.8)
        values = rng.integers(low, high, (count, width), dtype=np.int8)
        return read_only(values), read_only(scales.astype(np.float32))

    return QuantizedRows(*coded(num_tokens)), QuantizedWeight(*coded(num_channels))


def oracle_product(rows: QuantizedRows, weight: QuantizedWeight) -> np.ndarray:
    product = np.zeros((len(rows.values), len(weight.values)), np.float32)
    for t, o in np.ndindex(product.shape):
        left, right = (rows.values[t].tolist(), rows.scales[t]), (weight.values[o].tolist(), weight.scales[o])
        product[t, o] = oracle.quant_product(*left, *right)
    return product


# --- codes ---


@given(matrices())
@example(np.array([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0]]))
def test_codes_are_the_oracles_exactly(x: np.ndarray) -> None:
    """Of the rows of a step and of the output channels of a matrix, by the same rule."""
    rows = quantized_rows(x)
    assert (rows.values.dtype, rows.scales.dtype) == (np.int8, np.float32)
    assert (rows.values.shape, rows.scales.shape) == (x.shape, x.shape[:1])
    for row in range(len(x)):
        values, scale = oracle.encode_row(x[row].tolist())
        assert rows.values[row].tolist() == values
        assert_same(rows.scales[row], scale)
    assert_same(quantized_weight(x), QuantizedWeight(*rows))


def code_error(scales: np.ndarray) -> np.ndarray:
    """How far a code may be from its number: half a step, and three float32 roundings of up to 127 steps.

    Rounded are the number, the quotient by the scale, and the scale, past which the largest number may lie.
    """
    return scales.astype(np.float64) * (0.5 + 3 * 127 * HALF_ULP * (1 + HALF_ULP))


@given(matrices())
def test_a_code_is_half_a_step_from_its_number(x: np.ndarray) -> None:
    rows = quantized_rows(x)
    decoded = rows.values.astype(np.float64) * rows.scales[:, None]
    assert (np.abs(decoded - x) <= code_error(rows.scales)[:, None]).all()


@given(matrices(), st.integers(-20, 20))
def test_rows_times_a_power_of_two_have_the_same_values(x: np.ndarray, power: int) -> None:
    rows, scaled = quantized_rows(x), quantized_rows(x * x.dtype.type(2.0**power))
    assert_same(scaled, QuantizedRows(rows.values, rows.scales * np.float32(2.0**power)))


@given(matrices())
def test_a_row_is_coded_by_itself_alone(x: np.ndarray) -> None:
    rows = quantized_rows(x)
    assert_same(quantized_rows(x[:1]), QuantizedRows(rows.values[:1], rows.scales[:1]))
    assert_same(quantized_rows(-x), QuantizedRows(-rows.values, rows.scales))


# --- products ---


@given(factors(), st.sampled_from(["float32", "float64"]))
def test_products_are_the_oracles_exactly(drawn: tuple[QuantizedRows, QuantizedWeight], dtype: str) -> None:
    """In either dtype: the last cast is all that differs."""
    assert_same(quant_matmul(*drawn, dtype=dtype), oracle_product(*drawn).astype(dtype))


@given(factors(), st.integers(0, 4), st.integers(0, 4))
def test_products_in_chunks_are_the_whole(drawn: tuple[QuantizedRows, QuantizedWeight], row: int, channel: int) -> None:
    """Of tokens and of output channels, wherever they are cut, also at an end."""
    rows, weight = drawn
    tokens = [QuantizedRows(*(part[some] for part in rows)) for some in (slice(row), slice(row, None))]
    channels = [QuantizedWeight(*(part[some] for part in weight)) for some in (slice(channel), slice(channel, None))]
    parts = [[quant_matmul(left, right, dtype="float32") for right in channels] for left in tokens]
    assert_same(np.block(parts), quant_matmul(*drawn, dtype="float32"))


@given(factors(), st.integers(-20, 20))
def test_products_are_linear_in_the_scales(drawn: tuple[QuantizedRows, QuantizedWeight], power: int) -> None:
    """Exactly so for powers of two; a zero scale gives zeros."""
    rows, weight = drawn
    factor, product = np.float32(2.0**power), quant_matmul(rows, weight, dtype="float32")
    assert_same(quant_matmul(rows._replace(scales=rows.scales * factor), weight, dtype="float32"), product * factor)
    assert_same(quant_matmul(rows, weight._replace(scales=weight.scales * factor), dtype="float32"), product * factor)
    assert not product[rows.scales == 0].any()
    assert not product[:, weight.scales == 0].any()


@given(factors())
def test_products_are_odd_in_either_factor(drawn: tuple[QuantizedRows, QuantizedWeight]) -> None:
    rows, weight = (part._replace(values=part.values.clip(-127)) for part in drawn)
    product = quant_matmul(rows, weight, dtype="float32")
    assert_same(quant_matmul(rows._replace(values=-rows.values), weight, dtype="float32"), -product)
    assert_same(quant_matmul(rows, weight._replace(values=-weight.values), dtype="float32"), -product)


@pytest.mark.parametrize("row", [-128, -127, 127])
@pytest.mark.parametrize("channel", [-128, -127, 127])
def test_the_widest_sums_do_not_wrap(row: int, channel: int) -> None:
    """-128 is no code of ours, but it is an int8: 131072 products of -128 and -128 are 2**31."""
    ones = np.ones(1, np.float32)
    rows = QuantizedRows(np.full((1, 131071), row, np.int8), ones)
    weight = QuantizedWeight(np.full((1, 131071), channel, np.int8), ones)
    assert quant_matmul(rows, weight, dtype="float64").tolist() == [[float(np.float32(131071 * row * channel))]]


@st.composite
def projections(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Rows and a matrix, narrow ones often: the fewer numbers a sum has, the less they hide one another's error."""
    columns = draw(st.sampled_from([1, 1, 2, 3, 64]))
    return draw(matrices(st.just(columns))), draw(matrices(st.just(columns)))


@given(projections())
def test_the_product_is_as_far_from_float64_as_its_codes_explain(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    """A sum of |x| dw + dx |w| + dx dw over the channels, d the error of a code; then three float32 roundings.

    The yardstick itself, a float64 sum, is off by a rounding a channel at most.
    """
    x, w = drawn
    rows, weight = quantized_rows(x), quantized_weight(w)
    x, w = x.astype(np.float64), w.astype(np.float64)
    dx, dw = code_error(rows.scales)[:, None], code_error(weight.scales)[None, :]
    codes = np.abs(x).sum(1)[:, None] * dw + dx * np.abs(w).sum(1)[None, :] + x.shape[1] * dx * dw
    got, exact = quant_matmul(rows, weight, dtype="float64"), x @ w.T
    rounding = 3 * HALF_ULP * (1 + 3 * HALF_ULP) * (np.abs(exact) + codes) + 2.0**-149
    yardstick = x.shape[1] * 2.0**-53 * (np.abs(x) @ np.abs(w).T)
    assert (np.abs(got - exact) <= codes + rounding + yardstick).all()


# --- norm and code ---


@given(matrices(), seeds, dtypes)
def test_norm_and_code_is_the_code_of_the_norm(x: np.ndarray, seed: int, dtype: type) -> None:
    weight = normal(np.random.default_rng(seed), x.shape[1], dtype=dtype)
    assert_same(rms_norm_quantized(x, weight, 1e-6), quantized_rows(rms_norm(x, weight, 1e-6)))


@given(matrices(), seeds)
def test_norm_and_code_is_the_oracles(x: np.ndarray, seed: int) -> None:
    """In float64 the norm is the oracle's to 1e-12, which float32 codes of it may turn into one more rounding."""
    x, weight = x.astype(np.float64), normal(np.random.default_rng(seed), x.shape[1])
    got = rms_norm_quantized(x, weight, 1e-6)
    want = np.array([norm_oracle.rms_norm(row.tolist(), weight.tolist(), 1e-6) for row in x]).reshape(x.shape)
    scales = np.array([oracle.encode_row(row)[1] for row in want.tolist()], np.float32)
    assert (np.abs(got.scales.astype(np.float64) - scales) <= 2 * HALF_ULP * scales).all()
    decoded = got.values.astype(np.float64) * got.scales[:, None]
    assert (np.abs(decoded - want) <= code_error(got.scales)[:, None] + 1e-12 * np.abs(want)).all()


@pytest.mark.parametrize("eps", [1e-6, 1.0])
def test_a_row_of_zeros_has_zero_codes_and_a_zero_scale_after_its_norm(eps: float) -> None:
    got = rms_norm_quantized(np.zeros((2, 3)), np.ones(3), eps)
    assert_same(got, QuantizedRows(np.zeros((2, 3), np.int8), np.zeros(2, np.float32)))
