"""The int8 codec and score, every rounding against the oracle's, done one number at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsacp_ref.indexer import selected_entries
from dsacp_ref.quant import QuantizedVectors, dequantized_int8, int8_index_scores, quantized_int8
from tests.compare import assert_same
from tests.maths_strategies import dtypes, int32, normal, seeds
from tests.oracles import indexer as indexer_oracle
from tests.oracles import quant as oracle
from tests.strategies import read_only

channels = st.floats(-8e6, 8e6, width=32)


@st.composite
def vectors(draw):
    """Vectors of all magnitudes, zero vectors and equal channels among them."""
    rng = np.random.default_rng(draw(seeds))
    shape = (*draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)])), draw(st.integers(1, 6)))
    x = rng.standard_normal(shape) * 10.0 ** draw(st.integers(-9, 6)) * (rng.random(shape[:-1])[..., None] < 0.8)
    return read_only(x.astype(draw(dtypes)))


@given(vectors())
def test_codes_are_the_oracles_exactly(x):
    coded = quantized_int8(x)
    assert coded.values.shape == x.shape
    assert coded.scales.shape == x.shape[:-1]
    assert (coded.values.dtype, coded.scales.dtype) == (np.int8, np.float16)
    for index in np.ndindex(x.shape[:-1]):
        values, scale = oracle.encode(x[index].tolist())
        assert coded.values[index].tolist() == values
        assert_same(coded.scales[index], scale)


@given(st.lists(channels, min_size=1, max_size=6))
@example([0.5, -1.0, 0.25])  # 63.5 rounds to even
@example([127.0, 0.5, 1.5, 2.5, -0.5])
@example([0.0, -0.0])
def test_any_vector_gets_the_oracles_codes(x):
    coded = quantized_int8(np.array(x, np.float32))
    values, scale = oracle.encode(x)
    assert coded.values.tolist() == values
    assert_same(coded.scales[()], scale)


@given(vectors())
def test_decoding_is_the_oracles_exactly(x):
    coded = quantized_int8(x)
    got = dequantized_int8(coded)
    assert got.dtype == np.float32
    for index in np.ndindex(x.shape[:-1]):
        want = oracle.decode(coded.values[index].tolist(), coded.scales[index])
        assert_same(got[index], np.array(want, np.float32))


@given(vectors())
def test_the_way_there_and_back_is_off_by_half_a_step(x):
    """Half a step of the float32 scale, plus what storing the scale in float16 adds at this value."""
    coded = quantized_int8(x)
    scale = np.abs(x).max(axis=-1, keepdims=True, initial=0).astype(np.float64) / 127
    stored = np.abs(coded.scales[..., None].astype(np.float64) - scale)
    allowed = (0.5 * scale + np.abs(coded.values.astype(np.float64)) * stored) * (1 + 1e-5)
    assert (np.abs(dequantized_int8(coded).astype(np.float64) - x) <= allowed).all()


@given(vectors())
def test_where_float16_holds_the_scale_exactly_half_a_step_is_all(x):
    scales = np.maximum(quantized_int8(x).scales.astype(np.float32), np.float32(2**-14))
    top = np.broadcast_to((scales * 127)[..., None], (*x.shape[:-1], 1))
    exact = np.concatenate([np.clip(x, -top, top).astype(np.float32), top.astype(np.float32)], axis=-1)
    coded = quantized_int8(exact)
    assert_same(coded.scales.astype(np.float32), scales)
    error = np.abs(dequantized_int8(coded).astype(np.float64) - exact)
    assert (error <= 0.5 * scales[..., None].astype(np.float64) * (1 + 1e-5)).all()


@given(vectors())
def test_the_largest_channel_takes_the_whole_range_and_none_exceeds_it(x):
    values = quantized_int8(x).values.astype(int)
    assert (np.abs(values) <= 127).all()
    nonzero = (np.abs(x.astype(np.float32)) > 1e-30).any(axis=-1)
    assert (np.abs(values).max(axis=-1, initial=0)[nonzero] == 127).all()


@given(vectors())
def test_codes_are_symmetric(x):
    coded, mirrored = quantized_int8(x), quantized_int8(-x)
    assert_same(mirrored, QuantizedVectors(-coded.values, coded.scales))


@given(vectors())
def test_a_vector_is_coded_by_itself_alone(x):
    if x.ndim > 1 and len(x):
        coded, alone = quantized_int8(x), quantized_int8(x[:1])
        assert_same(alone, QuantizedVectors(coded.values[:1], coded.scales[:1]))


@st.composite
def scored(draw):
    """(index_q, index_weights, index_keys) in the operator's dtypes; signed weights, zero vectors."""
    rng = np.random.default_rng(draw(seeds))
    num_tokens, num_heads, num_keys, d = (draw(st.integers(low, 4)) for low in (0, 1, 0, 1))
    q = normal(rng, num_tokens, num_heads, d, scale=draw(st.sampled_from([0.1, 1, 30])))
    k = normal(rng, num_keys, d) * (rng.random((num_keys, 1)) < 0.8)
    weights = normal(rng, num_tokens, num_heads, scale=0.1, dtype=np.float16)
    return quantized_int8(q), weights, quantized_int8(read_only(k))


def oracle_scores(q: QuantizedVectors, weights: np.ndarray, keys: QuantizedVectors) -> np.ndarray:
    scores = np.zeros((len(q.values), len(keys.values)), np.float32)
    for t, k in np.ndindex(scores.shape):
        scores[t, k] = oracle.int8_score(
            q.values[t].tolist(), q.scales[t], keys.values[k].tolist(), keys.scales[k], weights[t]
        )
    return scores


@given(scored())
def test_scores_are_the_oracles_up_to_the_last_bit_of_the_head_sum(case):
    q, weights, keys = case
    got, want = int8_index_scores(q, weights, keys), oracle_scores(q, weights, keys)
    assert got.shape == want.shape
    assert got.dtype == np.float32
    # Only the order of the float32 sum over heads is free: a rounding a head, of the sum of magnitudes.
    size = oracle_scores(q, np.abs(weights), keys)
    assert (np.abs(got.astype(np.float64) - want) <= q.scales.shape[1] * 2.0**-23 * size).all()


@given(scored())
def test_one_head_scores_exactly_as_the_oracle(case):
    q, weights, keys = case
    one = QuantizedVectors(q.values[:, :1], q.scales[:, :1])
    assert_same(int8_index_scores(one, weights[:, :1], keys), oracle_scores(one, weights[:, :1], keys))


@given(scored(), st.integers(1, 4))
def test_a_choice_from_int8_is_compared_with_int8(case, index_topk):
    """Rounding to int8 reorders close scores, so the float choice is no yardstick; the oracle's int8 scores are."""
    q, weights, keys = case
    scores = int8_index_scores(q, weights, keys)
    got = selected_entries(scores, int32([scores.shape[1]] * len(scores)), index_topk)
    want = [indexer_oracle.select(row, scores.shape[1], index_topk) for row in scores.tolist()]
    assert_same(got, int32(want).reshape(len(scores), index_topk))


def test_the_widest_dot_product_does_not_wrap():
    """127 * 127 * 128 is beyond int16, and 128 channels at full range are beyond float16's integers."""
    full = QuantizedVectors(np.full((1, 1, 128), 127, np.int8), np.ones((1, 1), np.float16))
    keys = QuantizedVectors(np.full((1, 128), 127, np.int8), np.ones(1, np.float16))
    got = int8_index_scores(full, np.ones((1, 1), np.float16), keys)
    assert got.tolist() == [[float(np.float16(127 * 127 * 128 / 1024))]]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_negative_dot_product_scores_zero_whatever_the_weight(sign):
    q = QuantizedVectors(np.array([[[-3]]], np.int8), np.ones((1, 1), np.float16))
    keys = QuantizedVectors(np.array([[5]], np.int8), np.ones(1, np.float16))
    assert int8_index_scores(q, np.array([[sign]], np.float16), keys).tolist() == [[0.0]]


@given(seeds, st.integers(1, 40), st.integers(1, 40), st.integers(1, 5))
def test_equal_keys_score_equally_and_a_row_scores_the_same_in_any_slice(seed, num_tokens, num_keys, num_heads):
    """Otherwise the tie rule would mean nothing, and a choice would depend on how the queries were cut."""
    rng = np.random.default_rng(seed)
    q, key = quantized_int8(normal(rng, num_tokens, num_heads, 8)), quantized_int8(normal(rng, 1, 8))
    weights = normal(rng, num_tokens, num_heads, dtype=np.float16)
    keys = QuantizedVectors(*(np.repeat(part, num_keys, axis=0) for part in key))
    scores = int8_index_scores(q, weights, keys)
    assert_same(scores, np.repeat(scores[:, :1], num_keys, axis=1))
    row, width = int(rng.integers(num_tokens)), int(rng.integers(num_keys)) + 1
    alone = QuantizedVectors(q.values[row : row + 1], q.scales[row : row + 1])
    fewer = QuantizedVectors(keys.values[:width], keys.scales[:width])
    assert_same(int8_index_scores(alone, weights[row : row + 1], fewer), scores[row : row + 1, :width])
