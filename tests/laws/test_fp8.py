"""FP8: every code and byte against the oracle's, rows against bytes written by hand, and the choice from such keys."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsacp_ref import fp8
from dsacp_ref.exchange import gathered_in_order
from dsacp_ref.fp8 import (
    FP8Vectors,
    decoded_keys,
    decoded_latents,
    dequantized_fp8,
    encoded_keys,
    encoded_latents,
    fp8_index_scores,
    latent_row_bytes,
    quantized_fp8,
)
from dsacp_ref.indexer import lightning_indexer, select_qli, selected_entries
from dsacp_ref.paging import gathered_rows, scattered_rows
from dsacp_ref.partition import local_rows, partition_tokens
from tests.compare import assert_same, assert_same_selection
from tests.errors.test_maths_errors import LEGAL
from tests.maths_strategies import IndexCall, dtypes, index_calls, int32, normal, seeds
from tests.oracles import fp8 as oracle
from tests.oracles import indexer as indexer_oracle
from tests.strategies import cp_sizes, read_only, splits

LAYOUTS = ("gpu", "ascend")
layouts = st.sampled_from(LAYOUTS)


def codes_of(values: np.ndarray) -> np.ndarray:
    """The bytes of FP8 numbers."""
    return values.view(np.uint8)


def fp8_numbers(codes: Any) -> np.ndarray:
    """FP8 numbers of these bytes."""
    return np.asarray(codes, np.uint8).view(fp8.narrow_floats().float8_e4m3fn)


def numbers(rng: np.random.Generator, *shape: int, power: int = 0) -> np.ndarray:
    """Numbers of several magnitudes, halves of a step and zeros among them."""
    kind = rng.integers(0, 4)
    steps = np.array(oracle.MAGNITUDES)
    drawn = [
        rng.standard_normal(shape),
        rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 1, shape),
        rng.choice((steps[1:] + steps[:-1]) / 2, shape) * rng.choice([-1.0, 1.0], shape),
        rng.choice([0.0, -0.0, 1.0, 448.0, 232.0, 1e-3], shape),
    ][kind]
    return drawn * 10.0**power


@st.composite
def vectors(draw) -> np.ndarray:
    """Vectors of all magnitudes, zero vectors among them."""
    rng = np.random.default_rng(draw(seeds))
    shape = (*draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)])), draw(st.integers(1, 6)))
    x = numbers(rng, *shape, power=draw(st.sampled_from([0, 0, -40, -33, -32, -20, 20, 35])))
    return read_only((x * (rng.random(shape[:-1])[..., None] < 0.8)).astype(draw(dtypes)))


# Codes.


def test_the_oracle_lists_the_format() -> None:
    """Corners of e4m3 from its definition."""
    assert oracle.code_value(0x01) == 2.0**-9
    assert oracle.code_value(0x08) == 2.0**-6
    assert oracle.code_value(0x38) == 1.0
    assert oracle.code_value(0x7E) == 448.0
    assert oracle.code_value(0xFE) == -448.0
    assert np.isnan(oracle.code_value(0x7F))
    assert [oracle.nearest_code(value) for value in (1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, -0.0)] == [
        0x38,
        0x3A,
        0x00,
        0x02,
        0x80,
    ]


def test_every_code_stands_for_what_the_format_says() -> None:
    got = dequantized_fp8(FP8Vectors(fp8_numbers(range(256)), np.array(1, np.float32)))
    assert_same(got, np.array([oracle.code_value(code) for code in range(256)], np.float32))


@given(vectors())
def test_codes_are_the_oracles_exactly(x) -> None:
    coded = quantized_fp8(x)
    assert (coded.values.shape, coded.scales.shape) == (x.shape, x.shape[:-1])
    assert (str(coded.values.dtype), coded.scales.dtype) == ("float8_e4m3fn", np.float32)
    for index in np.ndindex(x.shape[:-1]):
        values, scale = oracle.encode(x[index].tolist())
        assert codes_of(coded.values[index]).tolist() == values
        assert_same(coded.scales[index], scale)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=6), st.booleans())
@example([448.0, 1.0625, 1.1875, 232.0, 240.0, 2.0**-10, 3 * 2.0**-10], False)
@example([448.0, 1.0625 + 1e-12], True)  # float32 first: 1.0625 then, a tie
@example([2.0**-107], False)
@example([float(np.nextafter(np.float32(2.0**-107), np.float32(0)))], False)
@example([627 * 2.0**-149], False)  # a subnormal scale would be half of what it must be
@example([0.0, -0.0], True)
def test_any_vector_gets_the_oracles_codes(x, double) -> None:
    coded = quantized_fp8(np.array(x, np.float64 if double else np.float32))
    values, scale = oracle.encode(x)
    assert codes_of(coded.values).tolist() == values
    assert_same(coded.scales[()], scale)


def test_every_midpoint_and_its_neighbours_are_rounded_as_the_oracle_does() -> None:
    """With 448 beside them the scale is 1, so the numbers themselves are rounded."""
    steps = np.array(oracle.MAGNITUDES, np.float32)
    middles = (steps[1:] + steps[:-1]) / 2
    sides = [np.nextafter(middles, np.float32(side)) for side in (0, 500)]
    x = np.concatenate([steps, middles, *sides])
    x = np.concatenate([x, -x])
    coded = quantized_fp8(np.stack([x, np.full_like(x, 448)], axis=-1))
    assert (coded.scales == 1).all()
    assert codes_of(coded.values)[:, 0].tolist() == [oracle.nearest_code(value) for value in x.tolist()]


@given(vectors())
def test_decoding_is_the_oracles_exactly(x) -> None:
    coded = quantized_fp8(x)
    got = dequantized_fp8(coded)
    assert got.dtype == np.float32
    for index in np.ndindex(x.shape[:-1]):
        want = oracle.decode(codes_of(coded.values[index]).tolist(), coded.scales[index])
        assert_same(got[index], np.array(want, np.float32))


# A coded number is off by half a step at most: 2**-4 of the power of two below it, and 2**-10 of the scale below the
# smallest number with a leading bit. Measured over 10**6 normal numbers in vectors of 128: at most 0.0588 of the
# number, which is 1/17, half a step of 17 sixteenths; 2**-10 of the scale; 2.6e-2 of all in the root mean square.
HALF_STEP, HALF_SMALLEST = 2.0**-4, 2.0**-10
FLOAT32 = 1 + 2.0**-22  # the division and the product round once each


def allowed_error(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Half a step at each number of groups with these scales; all of a group whose scale is 0."""
    half = np.maximum(HALF_STEP * np.abs(x), HALF_SMALLEST * scales[..., None].astype(np.float64))
    return np.where(scales[..., None] > 0, half, np.abs(x))


@given(vectors())
def test_the_way_there_and_back_is_off_by_half_a_step(x) -> None:
    coded, exact = quantized_fp8(x), x.astype(np.float32).astype(np.float64)
    error = np.abs(dequantized_fp8(coded).astype(np.float64) - exact)
    assert (error <= allowed_error(exact, coded.scales) * FLOAT32).all()
    lost = (coded.scales == 0)[..., None]
    assert (np.abs(exact) < 2.0**-107)[np.broadcast_to(lost, x.shape)].all()


def test_the_measured_loss_is_that_of_the_format() -> None:
    """Not better and not worse than rounding to e4m3 must be."""
    x = normal(np.random.default_rng(0), 8192, 128, dtype=np.float32)
    coded = quantized_fp8(x)
    error = np.abs(dequantized_fp8(coded).astype(np.float64) - x)
    leading = np.abs(x) >= 2.0**-6 * coded.scales[:, None]
    assert 0.058 < (error[leading] / np.abs(x)[leading]).max() <= 1 / 17 * FLOAT32
    assert 0.9 * HALF_SMALLEST < (error / coded.scales[:, None])[~leading].max() <= HALF_SMALLEST * FLOAT32
    assert 2.5e-2 < np.sqrt((error**2).sum() / (x.astype(np.float64) ** 2).sum()) < 2.7e-2


@given(vectors())
def test_codes_are_symmetric_and_a_vector_is_coded_by_itself_alone(x) -> None:
    coded, mirrored = quantized_fp8(x), quantized_fp8(-x)
    assert_same(codes_of(mirrored.values), codes_of(coded.values) ^ np.uint8(0x80))
    assert_same(mirrored.scales, coded.scales)
    if x.ndim > 1 and len(x):
        alone = quantized_fp8(x[:1])
        assert_same(codes_of(alone.values), codes_of(coded.values[:1]))


@given(vectors())
def test_codes_are_a_fixed_point(x) -> None:
    """What was decoded is coded as it was."""
    coded = quantized_fp8(x)
    again = quantized_fp8(dequantized_fp8(coded))
    assert_same(codes_of(again.values), codes_of(coded.values))
    assert_same(again.scales, coded.scales)


# Scores.


@st.composite
def scored(draw) -> tuple[FP8Vectors, np.ndarray, FP8Vectors]:
    """(index_q, index_weights, index_keys): signed weights, zero vectors."""
    rng = np.random.default_rng(draw(seeds))
    num_tokens, num_heads, num_keys, d = (draw(st.integers(low, 4)) for low in (0, 0, 0, 1))
    q = numbers(rng, num_tokens, num_heads, d)
    k = numbers(rng, num_keys, d) * (rng.random((num_keys, 1)) < 0.8)
    weights = normal(rng, num_tokens, num_heads, scale=0.1, dtype=np.float32)
    return quantized_fp8(q), weights, quantized_fp8(k)


def oracle_scores(q: FP8Vectors, weights: np.ndarray, keys: FP8Vectors) -> np.ndarray:
    scores = np.zeros((len(q.values), len(keys.values)), np.float32)
    heads, key_codes = codes_of(q.values).tolist(), codes_of(keys.values).tolist()
    for t, k in np.ndindex(scores.shape):
        scores[t, k] = oracle.score(heads[t], q.scales[t], key_codes[k], keys.scales[k], weights[t])
    return scores


@given(scored())
def test_scores_are_the_oracles_exactly(case) -> None:
    assert_same(fp8_index_scores(*case), oracle_scores(*case))


def test_scores_at_the_models_own_sizes_are_the_oracles_exactly() -> None:
    """64 heads of 128 channels, more queries and keys than are scored at a time."""
    rng = np.random.default_rng(0)
    q, keys = quantized_fp8(normal(rng, 33, 64, 128)), quantized_fp8(normal(rng, 1030, 128))
    weights = normal(rng, 33, 64, dtype=np.float32)
    got = fp8_index_scores(q, weights, keys)
    for t, k in ((0, 0), (31, 1023), (32, 1024), (32, 1029)):
        one = FP8Vectors(q.values[t : t + 1], q.scales[t : t + 1])
        key = FP8Vectors(keys.values[k : k + 1], keys.scales[k : k + 1])
        assert_same(got[t : t + 1, k : k + 1], oracle_scores(one, weights[t : t + 1], key))


@given(seeds, st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 2, 5, 64]))
def test_equal_keys_score_equally_and_a_row_scores_the_same_in_any_slice(seed, num_tokens, num_keys, num_heads) -> None:
    """Otherwise the tie rule would mean nothing, and a choice would depend on how the queries were cut."""
    rng = np.random.default_rng(seed)
    q, key = quantized_fp8(normal(rng, num_tokens, num_heads, 8)), quantized_fp8(normal(rng, 1, 8))
    weights = normal(rng, num_tokens, num_heads, dtype=np.float32)
    keys = FP8Vectors(*(np.repeat(part, num_keys, axis=0) for part in key))
    scores = fp8_index_scores(q, weights, keys)
    assert_same(scores, np.repeat(scores[:, :1], num_keys, axis=1))
    row, width = int(rng.integers(num_tokens)), int(rng.integers(num_keys)) + 1
    alone = FP8Vectors(*(part[row : row + 1] for part in q))
    fewer = FP8Vectors(*(part[:width] for part in keys))
    assert_same(fp8_index_scores(alone, weights[row : row + 1], fewer), scores[row : row + 1, :width])


def test_a_key_that_is_nan_scores_nan_and_counts_last() -> None:
    q = quantized_fp8(np.ones((1, 1, 2)))
    keys = FP8Vectors(fp8_numbers([[0x7F, 0x38], [0x38, 0x38]]), np.ones(2, np.float32))
    scores = fp8_index_scores(q, np.ones((1, 1), np.float32), keys)
    assert np.isnan(scores[0, 0])
    assert_same(selected_entries(scores, int32([2]), 2), int32([[1, 0]]))


# Rows in bytes, written by hand from the description of their layout.


def hand_scales(channels: np.ndarray, group: int) -> list[float]:
    """amax / 448 of groups, in float32."""
    return [float(np.float32(np.abs(part).max()) / np.float32(448)) for part in channels.reshape(-1, group)]


def hand_codes(channels: np.ndarray, scales: list[float]) -> bytes:
    """The bytes of groups over their scales."""
    parts = channels.astype(np.float32).reshape(len(scales), -1)
    return bytes(
        oracle.nearest_code(number / np.float32(scale))
        for part, scale in zip(parts, scales, strict=True)
        for number in part
    )


def hand_rope(rope: np.ndarray) -> bytes:
    return b"".join(oracle.bfloat16_bytes(number) for number in rope.tolist())


def hand_latent_row(latent: np.ndarray, rope_key: np.ndarray) -> bytes:
    """512 codes, four little-endian float32 scales of 128 channels, 64 bfloat16."""
    scales = hand_scales(latent, 128)
    return hand_codes(latent, scales) + struct.pack("<4f", *scales) + hand_rope(rope_key)


def hand_key_row(kv: np.ndarray, layout: str) -> bytes:
    """448 codes in seven groups of 64, seven bytes of exponent + 127, 64 bfloat16, padding."""
    exponents = [oracle.power_exponent(part.tolist()) for part in kv[:448].reshape(7, 64)]
    values, rope = hand_codes(kv[:448], [2.0**exponent for exponent in exponents]), hand_rope(kv[448:])
    scales = bytes(exponent + 127 for exponent in exponents)
    if layout == "gpu":
        return values + rope + scales + bytes(1)
    return rope + values + scales + bytes(57)


def uneven(seed: int, *shape: int) -> np.ndarray:
    """Numbers of which every 64 channels have another magnitude."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return x * np.repeat(3.0 ** np.arange(-4, -4 + shape[-1] // 64), 64)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_latent_row_is_656_bytes_as_described(dtype) -> None:
    latent, rope_key = uneven(0, 3, 512).astype(dtype), uneven(1, 3, 64).astype(dtype)
    rows = encoded_latents(latent, rope_key)
    assert (rows.dtype, rows.shape) == (np.uint8, (3, 656))
    assert latent_row_bytes(512, 64) == 656
    for row, *parts in zip(rows, latent, rope_key, strict=True):
        assert row.tobytes() == hand_latent_row(*parts)


@pytest.mark.parametrize(("layout", "num_bytes"), [("gpu", 584), ("ascend", 640)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_key_row_is_as_described(dtype, layout, num_bytes) -> None:
    kv = uneven(2, 3, 512).astype(dtype)
    rows = encoded_keys(kv, rope_head_dim=64, layout=layout)
    assert (rows.dtype, rows.shape) == (np.uint8, (3, num_bytes))
    for row, key in zip(rows, kv, strict=True):
        assert row.tobytes() == hand_key_row(key, layout)


def test_a_latent_row_of_plain_numbers_is_these_bytes() -> None:
    """Nothing computed: 448 is 0x7e, -1 is 0xb8, 1.0 in float32 is 00 00 80 3f, 2.0 in bfloat16 is 00 40."""
    latent = np.zeros(512)
    latent[[0, 1, 128, 256]] = 448, -1, 896, -224
    row = encoded_latents(latent, np.full(64, 2.0)).tobytes()
    assert row[:2] == b"\x7e\xb8"
    assert (row[128], row[256]) == (0x7E, 0xFE)
    assert row[512:528] == bytes.fromhex("0000803f 00000040 0000003f 00000000")
    assert row[528:] == b"\x00\x40" * 64
    assert row.count(0) == 656 - 4 - 4 - 64


@pytest.mark.parametrize(("layout", "values", "scales", "rope"), [("gpu", 0, 576, 448), ("ascend", 128, 576, 0)])
def test_a_key_row_of_plain_numbers_is_these_bytes(layout, values, scales, rope) -> None:
    """Scales 2**0, 2**1 for a hair more than 448, 2**-1, and 2**-22 at the floor; 7 bytes and zeros to the end."""
    kv = np.full(512, 2.0)
    kv[:448] = 0
    kv[[0, 64, 128, 192]] = 448, np.nextafter(np.float32(448), np.float32(449)), 224, 1e-4
    row = encoded_keys(kv, rope_head_dim=64, layout=layout).tobytes()
    # 448.00003 / 2 is nearest to 224; 224 / 0.5 is 448; 1e-4 * 2**22 is 419.4, nearest to 416.
    assert [row[values + 64 * group] for group in range(4)] == [0x7E, 0x76, 0x7E, 0x7D]
    assert row[scales : scales + 7] == bytes([127, 128, 126, 105, 105, 105, 105])
    assert row[rope : rope + 128] == b"\x00\x40" * 64
    assert not any(row[scales + 7 :])


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "scales big endian": lambda patch: patch.setattr(
        fp8, "bytes_of", lambda array, right=fp8.bytes_of: right(array.byteswap() if array.dtype.kind == "f" else array)
    ),
    "rope before values": lambda patch: patch.setattr(
        fp8,
        "latent_places",
        lambda width, rope: fp8.RowPlaces(
            slice(2 * rope, 2 * rope + width),
            slice(2 * rope + width, 2 * rope + width + width // 32),
            slice(0, 2 * rope),
            2 * rope + width + width // 32,
        ),
    ),
    "layouts swapped": lambda patch: patch.setattr(
        fp8,
        "key_places",
        lambda head_dim, rope, layout, name, right=fp8.key_places: right(
            head_dim, rope, "gpu" if layout == "ascend" else "ascend", name
        ),
    ),
    "floor of the power of two": lambda patch: patch.setattr(
        fp8, "power_exponents", lambda amax, right=fp8.power_exponents: right(amax) - 1
    ),
    "a power of two more than is needed": lambda patch: patch.setattr(
        fp8, "power_exponents", lambda amax, right=fp8.power_exponents: right(amax) + 1
    ),
    "no floor": lambda patch: patch.setattr(fp8, "KEY_AMAX_FLOOR", 1e-30),
    "scale / 240": lambda patch: patch.setattr(fp8, "E4M3_MAX", 240.0),
    "bias 126": lambda patch: patch.setattr(fp8, "SCALE_BIAS", 126),
    "latents in groups of 64": lambda patch: patch.setattr(fp8, "LATENT_GROUP", 64),
    "keys in groups of 32": lambda patch: patch.setattr(fp8, "KEY_GROUP", 32),
    "keys in one group": lambda patch: patch.setattr(fp8, "KEY_GROUP", 448),
}


def bytes_are_right() -> bool:
    """Whether rows are what the layouts say."""
    kv = uneven(2, 512)
    kv[:64] *= 1e-8  # below the floor
    latent, rope_key = uneven(0, 512), uneven(1, 64)
    return encoded_latents(latent, rope_key).tobytes() == hand_latent_row(latent, rope_key) and all(
        encoded_keys(kv, rope_head_dim=64, layout=layout).tobytes() == hand_key_row(kv, layout) for layout in LAYOUTS
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_the_layout_is_seen(name, monkeypatch) -> None:
    assert bytes_are_right()
    MUTANTS[name](monkeypatch)
    assert not bytes_are_right()


# There and back.


@st.composite
def latent_rows(draw) -> tuple[np.ndarray, np.ndarray]:
    """(latents, rope keys), groups of zeros and of all magnitudes among them."""
    rng, dtype = np.random.default_rng(draw(seeds)), draw(dtypes)
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]))
    groups, rope = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    latent = numbers(rng, *lead, groups, 128, power=draw(st.sampled_from([0, 0, -45, -33, -20, 30])))
    latent = latent * (rng.random((*lead, groups, 1)) < 0.8)
    rope_key = numbers(rng, *lead, rope, power=draw(st.sampled_from([0, -40, 30])))
    return read_only(latent.reshape(*lead, groups * 128).astype(dtype)), read_only(rope_key.astype(dtype))


@st.composite
def key_rows(draw) -> tuple[np.ndarray, dict[str, Any]]:
    """(keys, how they are laid out), groups of zeros and of all magnitudes among them."""
    rng, dtype = np.random.default_rng(draw(seeds)), draw(dtypes)
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]))
    groups, rope = draw(st.sampled_from([1, 2, 7, 9])), draw(st.integers(1, 3))
    leading = numbers(rng, *lead, groups, 64, power=draw(st.sampled_from([0, 0, -45, -5, 30])))
    leading = leading * 10.0 ** rng.integers(-3, 4, (*lead, groups, 1)) * (rng.random((*lead, groups, 1)) < 0.8)
    kv = np.concatenate([leading.reshape(*lead, groups * 64), numbers(rng, *lead, rope)], axis=-1)
    return read_only(kv.astype(dtype)), {"rope_head_dim": rope, "layout": draw(layouts)}


def decoded_to(rows: np.ndarray, kv: np.ndarray, how: dict[str, Any], dtype: str = "float64") -> np.ndarray:
    return decoded_keys(rows, head_dim=kv.shape[-1], dtype=dtype, **how)


@given(latent_rows())
def test_latents_are_coded_group_by_group(drawn) -> None:
    """The row is the oracle's; what is decoded is off by half a step, and its rope by half one of bfloat16."""
    latent, rope_key = drawn
    rows, width = encoded_latents(latent, rope_key), latent.shape[-1]
    assert rows.shape == (*latent.shape[:-1], latent_row_bytes(width, rope_key.shape[-1]))
    for index in np.ndindex(latent.shape[:-1]):
        coded = [oracle.encode(group.tolist()) for group in latent[index].reshape(-1, 128)]
        values, scales = (list(part) for part in zip(*coded, strict=True))
        want = b"".join([*map(bytes, values), struct.pack(f"<{len(scales)}f", *scales), hand_rope(rope_key[index])])
        assert rows[index].tobytes() == want
    got, got_rope = decoded_latents(rows, kv_lora_rank=width, dtype="float64")
    assert (got.dtype, got.shape, got_rope.shape) == (np.float64, latent.shape, rope_key.shape)
    exact = latent.astype(np.float32).astype(np.float64).reshape(*latent.shape[:-1], width // 128, 128)
    scales = np.frombuffer(np.ascontiguousarray(rows[..., width : width + width // 32]).tobytes(), "<f4")
    error = np.abs(got.reshape(exact.shape) - exact)
    assert (error <= allowed_error(exact, scales.reshape(exact.shape[:-1])) * FLOAT32).all()
    rope = rope_key.astype(np.float32).astype(np.float64)
    assert (np.abs(got_rope - rope) <= np.maximum(2.0**-8 * np.abs(rope), 2.0**-134)).all()


@given(key_rows())
def test_keys_are_coded_group_by_group(drawn) -> None:
    """Powers of two change no digit, so half a step is all, without a rounding more."""
    kv, how = drawn
    rows, rope = encoded_keys(kv, **how), how["rope_head_dim"]
    width = kv.shape[-1] - rope
    for index in np.ndindex(kv.shape[:-1]):
        coded = [oracle.encode_power(group.tolist()) for group in kv[index][:width].reshape(-1, 64)]
        values, scales = b"".join(bytes(part) for part, _ in coded), bytes(byte for _, byte in coded)
        ends = hand_rope(kv[index][width:])
        want = values + ends + scales if how["layout"] == "gpu" else ends + values + scales
        multiple = width + 2 * rope if how["layout"] == "gpu" else 0
        pad = -(len(want) - multiple) % (8 if how["layout"] == "gpu" else 128)
        assert rows[index].tobytes() == want + bytes(pad)
    got, exact = decoded_to(rows, kv, how), kv.astype(np.float32).astype(np.float64)
    assert got.shape == kv.shape
    groups = exact[..., :width].reshape(*kv.shape[:-1], width // 64, 64)
    floor = np.maximum(np.abs(groups).max(axis=-1), np.float32(1e-4))
    powers = 2.0 ** np.ceil(np.log2(floor / 448) - 1e-12)
    half = np.maximum(HALF_STEP * np.abs(groups), HALF_SMALLEST * powers[..., None])
    assert (np.abs(got[..., :width].reshape(groups.shape) - groups) <= half).all()
    assert (np.abs(got - exact)[..., width:] <= 2.0**-8 * np.abs(exact[..., width:])).all()


@given(latent_rows())
def test_a_latents_row_is_a_fixed_point(drawn) -> None:
    rows, sizes = encoded_latents(*drawn), {"kv_lora_rank": drawn[0].shape[-1]}
    for dtype in ("float32", "float64"):
        assert_same(encoded_latents(*decoded_latents(rows, dtype=dtype, **sizes)), rows)


@given(key_rows())
def test_a_keys_row_is_a_fixed_point_but_for_a_largest_code_of_224(drawn) -> None:
    """A group whose largest number lies just above 224 steps is rounded down to half of 448: half the step holds it
    as well, and is what a second coding takes. The numbers stay the same, and so do the bytes from there on."""
    kv, how = drawn
    rows = encoded_keys(kv, **how)
    for dtype in ("float32", "float64"):
        again = encoded_keys(decoded_to(rows, kv, how, dtype), **how)
        assert_same(decoded_to(again, kv, how, dtype), decoded_to(rows, kv, how, dtype))
        assert_same(encoded_keys(decoded_to(again, kv, how, dtype), **how), again)
        places = fp8.key_places(kv.shape[-1], how["rope_head_dim"], how["layout"], "kv")
        codes = rows[..., places.values].reshape(*again[..., places.scales].shape, 64) & 0x7F
        halved = (codes.max(axis=-1, initial=0) == 0x76) & (rows[..., places.scales] > 105)
        moved = again[..., places.scales] != rows[..., places.scales]
        assert_same(moved, halved)
        assert_same(again[~halved.any(axis=-1)], rows[~halved.any(axis=-1)])


def test_rows_of_zeros_stand_for_zeros() -> None:
    """As a gather of slots that are -1 gives them."""
    latent, rope_key = decoded_latents(np.zeros((2, 656), np.uint8), kv_lora_rank=512, dtype="float32")
    assert not latent.any()
    assert not rope_key.any()
    for layout, num_bytes in (("gpu", 584), ("ascend", 640)):
        how = {"head_dim": 512, "rope_head_dim": 64, "layout": layout, "dtype": "float32"}
        assert not decoded_keys(np.zeros((2, num_bytes), np.uint8), **how).any()


@given(seeds)
def test_bytes_that_nobody_wrote_are_decoded_without_a_word(seed) -> None:
    """Unused rows of a cache may hold anything; scale bytes of 255 are NaN."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (40, 656)).astype(np.uint8)
    decoded_latents(rows, kv_lora_rank=512, dtype="float32")
    how = {"head_dim": 512, "rope_head_dim": 64, "dtype": "float32"}
    got = decoded_keys(rows[:, :584], layout="gpu", **how)
    padded = decoded_keys(
        np.concatenate([rows[:, 448:576], rows[:, :448], rows[:, 576:]], 1)[:, :640], layout="ascend", **how
    )
    assert_same(padded, got)
    spoiled = rows[:, :584].copy()
    spoiled[:, 576] = 255
    spoiled[:, 583] ^= 255  # padding
    again = decoded_keys(spoiled, layout="gpu", **how)
    assert np.isnan(again[:, :64]).all()
    assert_same(again[:, 64:], got[:, 64:])


@pytest.mark.parametrize("rope", [1, 2])
def test_rows_that_lie_apart_are_coded_as_those_that_do_not(rope) -> None:
    x = normal(np.random.default_rng(0), 128 + rope, 5).T
    whole, how = np.ascontiguousarray(x), {"rope_head_dim": rope, "layout": "ascend"}
    assert_same(encoded_keys(x, **how), encoded_keys(whole.copy(), **how))
    rows = encoded_latents(x[:, :128], x[:, 128:])
    assert_same(rows, encoded_latents(whole[:, :128].copy(), whole[:, 128:].copy()))
    spread, sizes = np.stack([rows, rows], axis=-1)[..., 0], {"kv_lora_rank": 128, "dtype": "float32"}
    assert_same(decoded_latents(spread, **sizes), decoded_latents(rows, **sizes))
    coded, apart = quantized_fp8(whole), quantized_fp8(x)
    assert_same(codes_of(np.ascontiguousarray(apart.values)), codes_of(coded.values))


# Through caches and over ranks, like any other rows.


@given(latent_rows(), seeds)
def test_rows_go_through_a_paged_cache_unchanged(drawn, seed) -> None:
    rows = encoded_latents(*drawn)
    rows = rows.reshape(-1, rows.shape[-1])
    rng = np.random.default_rng(seed)
    cache = rng.integers(0, 256, (4, 3, rows.shape[1])).astype(np.uint8)
    slots = rng.permutation(12)[: len(rows)].astype(np.int32)
    written = scattered_rows(cache, rows, slots)
    assert_same(gathered_rows(written, slots), rows)
    got, _ = decoded_latents(gathered_rows(written, slots), kv_lora_rank=drawn[0].shape[-1], dtype="float32")
    want, _ = decoded_latents(rows, kv_lora_rank=drawn[0].shape[-1], dtype="float32")
    assert_same(got, want)


@given(seeds, cp_sizes, splits(), st.lists(st.integers(0, 5), max_size=3))
def test_coding_before_the_gather_is_coding_after_it(seed, cp_size, split, query_lens) -> None:
    """A row is coded by itself, so ranks send a third of the bytes and everybody holds the same cache."""
    rng = np.random.default_rng(seed)
    loc = int32(np.concatenate([[0], np.cumsum(query_lens)]))
    partition = partition_tokens(loc, cp_size, split=split)
    latent, rope_key = normal(rng, int(loc[-1]), 128), normal(rng, int(loc[-1]), 2)
    kv = normal(rng, int(loc[-1]), 66)
    how = {"rope_head_dim": 2, "layout": "ascend"}
    index_keys = normal(rng, int(loc[-1]), 8)
    shards = [
        [local_rows(rows, partition, rank) for rank in range(cp_size)] for rows in (latent, rope_key, kv, index_keys)
    ]
    before = gathered_in_order([encoded_latents(*parts) for parts in zip(*shards[:2], strict=True)], partition)
    keys = gathered_in_order([encoded_keys(part, **how) for part in shards[2]], partition)
    coded = [quantized_fp8(part) for part in shards[3]]
    gathered = [gathered_in_order(parts, partition) for parts in zip(*coded, strict=True)]
    want = quantized_fp8(index_keys)
    for rank in range(cp_size):
        assert_same(before[rank], encoded_latents(latent, rope_key))
        assert_same(keys[rank], encoded_keys(kv, **how))
        assert_same(codes_of(gathered[0][rank]), codes_of(want.values))
        assert_same(gathered[1][rank], want.scales)


# Choosing from a cache of FP8 keys.


def coded_cache(call: IndexCall, unseen: int = 0x7F) -> FP8Vectors:
    """The call's cache in FP8, another code, NaN by default, where it holds what no query may read."""
    known = np.isfinite(call.side.cache).all(axis=-1)
    coded = quantized_fp8(np.where(known[..., None], call.side.cache, 0))
    codes = np.where(known[..., None], codes_of(coded.values), np.uint8(unseen))
    return FP8Vectors(fp8_numbers(read_only(codes)), read_only(np.where(known, coded.scales, np.float32(np.inf))))


def fp8_args(call: IndexCall) -> tuple[Any, ...]:
    """The arguments of the call, with FP8 keys; what no query owns is NaN."""
    idle = [query for query, place in enumerate(call.places) if place is None or place[1] + 1 < call.ratio]
    q, weights = call.q.copy(), call.weights.copy()
    q[idle], weights[idle] = np.nan, np.nan
    return q, weights, coded_cache(call), *call.args[3:]


def oracle_row(call: IndexCall, query: int, row: int, visible: int) -> list[float]:
    """The FP8 scores of the entries that a query sees."""
    heads = [oracle.encode(head.tolist()) for head in call.q[query]]
    values, scales = [values for values, _ in heads], [scale for _, scale in heads]
    weights = [np.float32(weight) for weight in call.weights[query]]
    keys = [oracle.encode(key.tolist()) for key in call.keys[row][:visible]]
    return [float(oracle.score(values, scales, code, scale, weights)) for code, scale in keys]


@given(index_calls())
def test_the_choice_from_fp8_keys_is_the_oracles(call) -> None:
    """Exactly: no sum is free. Queries that choose nothing are NaN and fit no code."""
    args = fp8_args(call)
    got = lightning_indexer(*args, **call.options)
    assert got.shape == (len(call.q), call.index_topk)
    for query, place in enumerate(call.places):
        visible = 0 if place is None else (place[1] + 1) // call.ratio
        scores = oracle_row(call, query, place[0], visible) if place else []
        assert got[query].tolist() == indexer_oracle.select(scores, visible, call.index_topk)
    other = (*args[:2], coded_cache(call, 0x11), *args[3:])
    assert_same(lightning_indexer(*other, **call.options), got)


@given(index_calls())
def test_a_row_cut_in_two_chooses_the_same_from_fp8(call) -> None:
    args = fp8_args(call)
    whole = lightning_indexer(*args, **call.options)
    for query, place in enumerate(call.places):
        if place is not None:
            one = slice(query, query + 1)
            table, extent = call.side.table[place[0] : place[0] + 1], int32([place[1] + 1])
            got = lightning_indexer(args[0][one], args[1][one], args[2], table, int32([0, 1]), extent, **call.options)
            assert_same(got, whole[one])


def test_the_choice_from_fp8_is_near_that_from_floats() -> None:
    """Which entries change places is a matter of rounding: the float choice holds to a part in twenty of the scores."""
    rng = np.random.default_rng(0)
    q, weights, keys = normal(rng, 8, 16, 128), normal(rng, 8, 16), normal(rng, 1, 200, 128)
    rows = int32([[0]]), int32([0, 8]), int32([200])
    sizes = {"compress_ratio": 1, "index_topk": 50}
    exact = lightning_indexer(q, weights, keys, *rows, **sizes)
    got = lightning_indexer(q, weights, quantized_fp8(keys), *rows, **sizes)
    kept = [len(set(mine) & set(theirs)) for mine, theirs in zip(got.tolist(), exact.tolist(), strict=True)]
    assert min(kept) >= 45
    scores = np.einsum("th,thk->tk", weights, np.maximum(np.einsum("thd,kd->thk", q, keys[0]), 0))
    assert_same_selection(got, exact, scores, 0.05 * np.abs(scores).max(axis=1))


def test_a_step_codes_the_rotated_entries_and_chooses_from_the_codes() -> None:
    step = LEGAL[select_qli]
    empty = FP8Vectors(fp8_numbers(read_only(np.full((3, 2, 4), 0x11, np.uint8))), np.full((3, 2), 9, np.float32))
    got, plain = select_qli(**{**step, "index_cache": empty}), select_qli(**step)
    assert_same(got.state, plain.state)
    written = (plain.index_cache != step["index_cache"]).any(axis=-1)
    assert written.any()
    coded = quantized_fp8(plain.index_cache)
    want = np.where(written[..., None], codes_of(coded.values), codes_of(empty.values))
    assert_same(codes_of(got.index_cache.values), want)
    assert_same(got.index_cache.scales, np.where(written, coded.scales, empty.scales))
    assert (codes_of(empty.values) == 0x11).all()
    assert got.topk_indices.shape == plain.topk_indices.shape


def test_without_ml_dtypes_the_command_that_helps_is_named() -> None:
    """Everything else works: only numpy is needed until FP8 is asked for."""
    code = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
import dsacp_ref.fp8, dsacp_ref.indexer, dsacp_ref.quant
dsacp_ref.quant.quantized_int8(np.ones((1, 2)))
calls = [
    lambda: dsacp_ref.fp8.quantized_fp8(np.ones((1, 2))),
    lambda: dsacp_ref.fp8.encoded_latents(np.ones((1, 128)), np.ones((1, 2))),
    lambda: dsacp_ref.fp8.decoded_keys(
        np.zeros((1, 76), np.uint8), head_dim=66, rope_head_dim=2, layout="gpu", dtype="float32"
    ),
]
for call in calls:
    try:
        call()
    except ImportError as error:
        assert "pip install 'dsacp[fp8]'" in str(error), error
    else:
        raise AssertionError("nothing was missing")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
