"""`dsacp_npu.quant` gives what `dsacp_ref.quant` gives, bit for bit but for the order of a sum over heads."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import dsacp_npu.quant
from dsacp_ref import quant as ref
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_same, assert_within_budget
from tests.laws.test_quant import oracle_scores
from tests.laws.test_w8a8 import factors, matrices
from tests.maths_strategies import normal, seeds
from tests.mirror.common import (
    TORCH_DTYPES,
    WAYS,
    Case,
    assert_mirrors,
    assert_refusal_mirrors,
    assert_runs_without_values,
    case,
    to_numpy,
    to_torch,
)


def unreadable(wanted: bool):
    """Values as on a device, where no function may look at them."""
    return patch("dsacp_npu._tensors.readable", lambda tensor: not wanted)


@st.composite
def vectors(draw) -> np.ndarray:
    """Vectors of all magnitudes; zero vectors, halves of a step and scales below float16 among them."""
    rng = np.random.default_rng(draw(seeds))
    shape = (*draw(st.sampled_from([(), (1,), (7,), (2, 2), (0,)])), draw(st.sampled_from([1, 3, 8, 40])))
    x = rng.standard_normal(shape) if draw(st.booleans()) else rng.integers(-254, 255, shape) / 2
    x *= 10.0 ** draw(st.integers(-42, 6)) if draw(st.booleans()) else 1
    return (np.clip(x, -8e6, 8e6) * (rng.random(shape[:-1])[..., None] < 0.8)).astype(np.float64)


@given(vectors(), st.sampled_from(["float64", "float32"]), st.booleans())
@example(np.array([[127, 0.5, 1.5, -2.5]]), "float32", False)
def test_quantized_int8_mirrors(x, dtype, on_a_device) -> None:
    with unreadable(on_a_device):
        assert_mirrors("quant", "quantized_int8", x.astype(dtype))


@given(vectors(), st.sampled_from(["bfloat16", "float16"]), st.booleans())
def test_short_vectors_are_coded_from_float32(x, dtype, on_a_device) -> None:
    x = to_torch(np.clip(x, -6e4, 6e4), dtype)
    with unreadable(on_a_device):
        got = dsacp_npu.quant.quantized_int8(x)
    assert_same(got, ref.quantized_int8(to_numpy(x, "float32")))


@given(vectors(), st.booleans())
def test_dequantized_int8_mirrors(x, on_a_device) -> None:
    values, scales = ref.quantized_int8(x)
    with unreadable(on_a_device):
        assert_mirrors("quant", "dequantized_int8", ref.QuantizedVectors(values, np.asarray(scales)))


@st.composite
def scorings(draw) -> tuple:
    """(queries, weights, keys) in codes, more keys than a tile among them, zero vectors too."""
    rng = np.random.default_rng(draw(seeds))
    num_tokens, num_keys = draw(st.integers(0, 5)), draw(st.one_of(st.integers(0, 6), st.sampled_from([192, 200])))
    num_heads, d = draw(st.sampled_from([0, 1, 2, 3, 33])), draw(st.sampled_from([1, 3, 8, 128]))
    q = normal(rng, num_tokens, num_heads, d, scale=draw(st.sampled_from([0.1, 1, 30])))
    k = normal(rng, num_keys, d) * (rng.random((num_keys, 1)) < 0.8)
    weights = normal(rng, num_tokens, num_heads, scale=0.1, dtype=np.float16)
    return ref.quantized_int8(q), weights, ref.quantized_int8(k)


@given(scorings(), st.booleans())
def test_int8_index_scores_mirrors(scoring, on_a_device) -> None:
    """Only the order of the float32 sum over heads is free: a rounding a head, of the sum of magnitudes."""
    q, weights, keys = scoring
    want, size = ref.int8_index_scores(*scoring), ref.int8_index_scores(q, np.abs(weights), keys)
    with unreadable(on_a_device):
        got = dsacp_npu.quant.int8_index_scores(*to_torch(scoring))
    assert (got.dtype, got.shape) == (torch.float32, want.shape)
    assert (np.abs(got.numpy().astype(np.float64) - want) <= weights.shape[1] * 2.0**-23 * size).all()
    one = [ref.QuantizedVectors(q.values[:, :1], q.scales[:, :1]), weights[:, :1], keys]
    assert_same(dsacp_npu.quant.int8_index_scores(*to_torch(tuple(one))), ref.int8_index_scores(*one))


@given(matrices(), st.booleans())
def test_quantized_rows_mirrors(x, on_a_device) -> None:
    with unreadable(on_a_device):
        assert_mirrors("quant", "quantized_rows", x)


@given(matrices(), st.booleans())
def test_quantized_weight_mirrors(weight, on_a_device) -> None:
    with unreadable(on_a_device):
        assert_mirrors("quant", "quantized_weight", weight)


@given(matrices(), seeds, st.booleans())
def test_rms_norm_quantized_mirrors(x, seed, on_a_device) -> None:
    """In float64, where two norms may differ in the order of their sums: a scale by a rounding, a code at a half."""
    x, weight = x.astype(np.float64), normal(np.random.default_rng(seed), x.shape[1])
    want = ref.rms_norm_quantized(x, weight, 1e-6)
    with unreadable(on_a_device):
        got = to_numpy(dsacp_npu.quant.rms_norm_quantized(*to_torch((x, weight)), 1e-6), "float32")
    assert (got.values.dtype, got.values.shape) == (np.int8, x.shape)
    assert (np.abs(got.scales - want.scales) <= 2 * np.spacing(want.scales)).all()
    scales = np.where(want.scales > 0, want.scales, 1).astype(np.float64)[:, None]
    steps = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-6) * weight / scales
    assert (np.abs(got.values - steps) <= 0.5 + 127 * 6 * 2.0**-24).all()


@given(factors(), st.sampled_from(["float32", "float64"]), st.booleans())
def test_quant_matmul_mirrors(drawn, dtype, on_a_device) -> None:
    with unreadable(on_a_device):
        assert_mirrors("quant", "quant_matmul", *drawn, dtype=dtype)


def test_scores_at_the_models_own_sizes_are_within_budget() -> None:
    rng = np.random.default_rng(0)
    q, keys = (ref.quantized_int8(normal(rng, *shape)) for shape in ((3, 64, 128), (40, 128)))
    weights = normal(rng, 3, 64, scale=0.01, dtype=np.float16)
    gains, scales = (weights * q.scales).astype(np.float64), keys.scales.astype(np.float64)
    dots = np.einsum("thd,kd->thk", q.values.astype(np.int64), keys.values.astype(np.int64))
    exact = np.einsum("th,thk->tk", gains, (np.maximum(dots, 0) / 1024).astype(np.float16).astype(np.float64)) * scales
    got = dsacp_npu.quant.int8_index_scores(*to_torch((q, weights, keys)))
    assert_within_budget(got, exact, [ref.int8_index_scores(q, weights, keys), oracle_scores(q, weights, keys)])


def test_dot_products_of_full_range_are_exact() -> None:
    """-128 is no code of ours, but it is an int8."""
    for d in (128, 1024):
        q = ref.QuantizedVectors(np.full((1, 1, d), -128, np.int8), np.ones((1, 1), np.float16))
        keys = ref.QuantizedVectors(np.full((3, d), -128, np.int8), np.ones(3, np.float16))
        keys.values[1, 0], keys.values[2, 0] = -127, 127
        assert_mirrors("quant", "int8_index_scores", q, np.ones((1, 1), np.float16), keys)


def test_wider_vectors_are_refused() -> None:
    q = dsacp_npu.quant.quantized_int8(torch.ones(1, 1, 1025))
    keys = dsacp_npu.quant.quantized_int8(torch.ones(2, 1025))
    with pytest.raises(UnsupportedError, match="at most 1024 channels, got 1025"):
        dsacp_npu.quant.int8_index_scores(q, torch.ones(1, 1, dtype=torch.float16), keys)


@given(seeds, st.integers(1, 40), st.integers(1, 250), st.sampled_from([1, 2, 5, 64]))
def test_equal_keys_score_equally_and_a_row_scores_the_same_in_any_slice(seed, num_tokens, num_keys, num_heads) -> None:
    rng = np.random.default_rng(seed)
    q, key = (to_torch(ref.quantized_int8(normal(rng, *shape))) for shape in ((num_tokens, num_heads, 8), (1, 8)))
    weights = torch.tensor(normal(rng, num_tokens, num_heads, dtype=np.float16))
    keys = dsacp_npu.quant.QuantizedVectors(*(part.repeat_interleave(num_keys, 0) for part in key))
    scores = dsacp_npu.quant.int8_index_scores(q, weights, keys)
    assert_same(scores, scores[:, :1].expand_as(scores))
    row, width = int(rng.integers(num_tokens)), int(rng.integers(num_keys)) + 1
    alone = dsacp_npu.quant.QuantizedVectors(*(part[row : row + 1] for part in q))
    fewer = dsacp_npu.quant.QuantizedVectors(*(part[:width] for part in keys))
    got = dsacp_npu.quant.int8_index_scores(alone, weights[row : row + 1], fewer)
    assert_same(got, scores[row : row + 1, :width])


def test_scoring_in_parts_changes_nothing(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    q, keys = (to_torch(ref.quantized_int8(normal(rng, *shape))) for shape in ((9, 2, 8), (500, 8)))
    weights = torch.tensor(normal(rng, 9, 2, dtype=np.float16))
    whole = dsacp_npu.quant.int8_index_scores(q, weights, keys)
    monkeypatch.setattr(dsacp_npu.quant, "SCORED_NUMBERS", 1000)
    monkeypatch.setattr(dsacp_npu.quant, "KEY_BLOCK", 192)
    assert_same(dsacp_npu.quant.int8_index_scores(q, weights, keys), whole)


X = np.array([[0.5, -1, 0.25], [0, 0, 0]])
CODES, WEIGHTS = ref.quantized_int8(X), np.ones((1, 2), np.float16)
Q_CODES = ref.quantized_int8(X[None])
ROWS, CODED = ref.quantized_rows(X), ref.quantized_weight(X[:1])

STATIC = [
    case("quantized_int8", X),
    case("quantized_int8", X[:0]),
    case("dequantized_int8", CODES),
    case("int8_index_scores", Q_CODES, WEIGHTS, CODES),
    case("int8_index_scores", ref.quantized_int8(X[:0, None]), WEIGHTS[:0, :1], CODES),
    case("quantized_rows", X),
    case("quantized_rows", X[:0]),
    case("quantized_weight", X),
    case("rms_norm_quantized", X, X[0], 1e-6),
    case("quant_matmul", ROWS, CODED, dtype="float32"),
    case("quant_matmul", ref.quantized_rows(X[:0]), CODED, dtype="float64"),
    case("quant_matmul", ROWS, ref.quantized_weight(X[:0]), dtype="float32"),
]
REFUSED = [
    case("quantized_int8", X[:, :0]),
    case("quantized_int8", np.array(0.5)),
    case("quantized_int8", X.tolist()),
    case("quantized_int8", X > 0),
    case("quantized_int8", np.array([[1.0, np.nan]])),
    case("quantized_int8", np.array([[1.0, -np.inf]])),
    case("quantized_int8", np.array([[1e300]])),
    case("quantized_int8", np.array([127 * 65536.0])),
    case("dequantized_int8", None),
    case("dequantized_int8", CODES._replace(values=X)),
    case("dequantized_int8", CODES._replace(scales=X[0])),
    case("dequantized_int8", CODES._replace(scales=CODES.scales[:1])),
    case("int8_index_scores", CODES, WEIGHTS, CODES),
    case("int8_index_scores", Q_CODES, WEIGHTS, Q_CODES),
    case("int8_index_scores", Q_CODES, WEIGHTS, ref.quantized_int8(X[:, :2])),
    case("int8_index_scores", Q_CODES, WEIGHTS.astype(np.float32), CODES),
    case("int8_index_scores", Q_CODES, WEIGHTS[:, :1], CODES),
    case("int8_index_scores", None, WEIGHTS, CODES),
    case("int8_index_scores", Q_CODES, WEIGHTS, CODES._replace(scales=X[0])),
]


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.function)
def test_refusals_mirror(bad: Case) -> None:
    assert_refusal_mirrors("quant", bad)


def test_a_numpy_array_is_refused() -> None:
    with pytest.raises(ValueError, match="x must be a torch tensor, got ndarray"):
        dsacp_npu.quant.quantized_int8(X)


@pytest.mark.parametrize("call", STATIC, ids=lambda call: call.function)
@pytest.mark.parametrize("way", WAYS)
def test_runs_without_values(call: Case, way: str) -> None:
    assert_runs_without_values("quant", way, call)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_codes_have_one_form_whatever_they_are_made_of(dtype: str) -> None:
    coded = dsacp_npu.quant.quantized_int8(to_torch(X, dtype))
    assert (coded.values.dtype, coded.scales.dtype) == (torch.int8, torch.float16)
