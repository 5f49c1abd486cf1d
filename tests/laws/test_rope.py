"""Rotary embedding: the table is exactly the defined one, and a rotation is a rotation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsacp_ref.config import v4_flash
from dsacp_ref.rope import RopeTable, apply_inverse_rope, apply_rope, rope_frequencies, rope_table, yarn_frequencies
from tests.compare import assert_double, assert_same
from tests.maths_strategies import dtypes, int32, normal, seeds
from tests.oracles import rope as oracle
from tests.strategies import read_only

V4_YARN = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position": 65536}
FAR = 1_000_000
positions = st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 1), st.sampled_from([256, 257, FAR, 2**24 + 1]))
bases = st.sampled_from([2.0, 10000.0, 160000.0])


@given(theta=bases, pairs=st.integers(1, 40))
def test_plain_frequencies_are_the_oracles_fp32_numbers(theta, pairs):
    assert rope_frequencies(theta, 2 * pairs) == tuple(map(float, oracle.frequencies(theta, 2 * pairs)))


@given(
    theta=bases,
    pairs=st.integers(1, 40),
    factor=st.sampled_from([0.5, 1, 4, 16.0]),
    beta_fast=st.sampled_from([1, 2.5, 32]),
    beta_slow=st.sampled_from([0.5, 1, 8]),
    original=st.sampled_from([1, 100, 65536]),
)
@example(theta=2.0, pairs=1, factor=4, beta_fast=1, beta_slow=1, original=6)  # a ramp of no length
def test_yarn_frequencies_are_the_oracles_fp32_numbers(theta, pairs, factor, beta_fast, beta_slow, original):
    names = {"factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow}
    got = yarn_frequencies(theta, 2 * pairs, **names, original_max_position=original)
    assert got == tuple(map(float, oracle.frequencies(theta, 2 * pairs, {**names, "original": original})))


def test_the_published_check_values_hold_to_fp32_rounding():
    want = {
        14: 5.286856317e-3,
        15: 3.635538584e-3,
        16: 2.265625e-3,
        20: 2.969777783e-4,
        24: 1.953125e-5,
        25: 5.372312671e-6,
        31: 5.680529037e-7,
    }
    got = yarn_frequencies(160000.0, 64, **V4_YARN)
    for i, value in want.items():
        assert abs(got[i] - value) <= 0.5 * np.spacing(np.float32(value)) + 1e-9 * value, i


def test_fast_pairs_are_kept_and_slow_ones_divided():
    plain, yarn = rope_frequencies(160000.0, 64), yarn_frequencies(160000.0, 64, **V4_YARN)
    assert yarn[:16] == plain[:16]
    assert yarn[25:] == tuple(f / 16 for f in plain[25:])
    assert all(slow < yarn[i] < plain[i] for i, slow in enumerate(f / 16 for f in plain) if 15 < i < 25)


def test_the_checkpoint_constants_give_those_frequencies():
    config = v4_flash()
    names = {
        "factor": config.rope_factor,
        "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow,
        "original_max_position": config.rope_original_max_position,
    }
    got = yarn_frequencies(config.compress_rope_theta, config.rope_head_dim, **names)
    assert got == yarn_frequencies(160000.0, 64, **V4_YARN)
    assert rope_frequencies(config.rope_theta, config.rope_head_dim) == rope_frequencies(10000.0, 64)


@given(position=positions, pairs=st.integers(1, 32), theta=bases)
@example(position=FAR, pairs=32, theta=10000.0)
@example(position=FAR, pairs=32, theta=160000.0)
def test_the_table_is_cos_and_sin_of_the_fp32_product(position, pairs, theta):
    frequencies = rope_frequencies(theta, 2 * pairs)
    table = rope_table(int32([position]), frequencies)
    assert table.cos.dtype == table.sin.dtype == np.float32
    want = np.array([oracle.cos_sin(position, np.float32(f)) for f in frequencies], np.float32)
    for got, exact in ((table.cos[0], want[:, 0]), (table.sin[0], want[:, 1])):
        assert (np.abs(got.astype(np.float64) - exact) <= 2 * np.spacing(np.abs(exact))).all()


@given(position=positions, pairs=st.integers(1, 32))
def test_the_table_keeps_amplitude_one_at_any_position(position, pairs):
    table = rope_table(int32([position]), yarn_frequencies(160000.0, 2 * pairs, **V4_YARN))
    squares = table.cos.astype(np.float64) ** 2 + table.sin.astype(np.float64) ** 2
    assert np.abs(squares - 1).max() < 1e-6


@pytest.mark.parametrize(("position", "neighbour"), [(257, 256), (2049, 2048), (FAR, FAR - 1), (2**24, 2**24 - 1)])
def test_positions_are_not_cast_to_16_bits(position, neighbour):
    table = rope_table(int32([position, neighbour]), (1.0,))
    assert abs(float(table.cos[0, 0] - table.cos[1, 0])) > 1e-2


def test_a_float64_angle_is_not_the_definition():
    """At a million tokens the two differ by far more than rounding, so the definition must name one."""
    frequencies = rope_frequencies(10000.0, 64)
    table = rope_table(int32([999_999]), frequencies)
    assert np.abs(table.cos[0] - np.cos(999_999 * np.array(frequencies))).max() > 1e-3


@given(pairs=st.integers(0, 8), at=st.lists(st.sampled_from([-1, 0, 5]), max_size=5))
def test_a_pad_row_gets_the_identity(pairs, at):
    table = rope_table(int32(at), tuple(0.5**i for i in range(pairs)))
    assert table.cos.shape == table.sin.shape == (len(at), pairs)
    pad = [i for i, position in enumerate(at) if position < 0]
    assert_same(
        RopeTable(table.cos[pad], table.sin[pad]), rope_table(int32([0] * len(pad)), [0.5**i for i in range(pairs)])
    )
    assert (table.cos[pad] == 1).all()
    assert (table.sin[pad] == 0).all()


@st.composite
def rotations(draw, dtype=None):
    """Vectors [T, (H,) D], a table of some pairs, its positions and frequencies."""
    rng = np.random.default_rng(draw(seeds))
    num_tokens, pairs, plain = draw(st.integers(0, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 3))
    shape = (num_tokens, *draw(st.sampled_from([(), (1,), (2,), (2, 3)])), max(1, plain + 2 * pairs))
    at = draw(st.lists(positions, min_size=num_tokens, max_size=num_tokens))
    frequencies = tuple(float(np.float32(0.3**i)) for i in range(pairs))
    table = RopeTable(*map(read_only, rope_table(int32(at), frequencies)))
    return normal(rng, *shape, dtype=dtype or draw(dtypes)), table, at, frequencies


@given(rotations(np.float64), st.booleans())
def test_a_rotation_is_the_oracles_channel_by_channel(rotation, back):
    x, table, at, frequencies = rotation
    turn, slow = (apply_inverse_rope, oracle.rotate_back) if back else (apply_rope, oracle.rotate)
    got = turn(x, *table)
    assert got.shape == x.shape
    for token, position in enumerate(at):
        for index in np.ndindex(x.shape[1:-1]):
            want = np.array(slow(x[(token, *index)], position, [np.float32(f) for f in frequencies]))
            assert np.abs(got[(token, *index)] - want).max() <= 4 * 2.0**-24 * np.abs(x[(token, *index)]).max()


@given(rotations())
def test_the_inverse_undoes_the_rotation(rotation):
    x, table, _, _ = rotation
    again = apply_inverse_rope(apply_rope(x, *table), *table)
    assert again.dtype == x.dtype
    assert np.abs(again - x).max(initial=0) <= 1e-6 * np.abs(x).max(initial=0)


@given(rotations())
def test_channels_before_the_last_pairs_are_untouched(rotation):
    x, table, _, _ = rotation
    rotated = 2 * table.cos.shape[1]
    assert_same(apply_rope(x, *table)[..., : x.shape[-1] - rotated], x[..., : x.shape[-1] - rotated])


@given(rotations())
def test_every_adjacent_pair_keeps_its_norm(rotation):
    x, table, _, _ = rotation
    pairs = table.cos.shape[1]
    before, after = (
        v[..., v.shape[-1] - 2 * pairs :].reshape(*v.shape[:-1], pairs, 2) for v in (x, apply_rope(x, *table))
    )
    assert np.abs(np.hypot(*np.moveaxis(after, -1, 0)) - np.hypot(*np.moveaxis(before, -1, 0))).max(initial=0) < 1e-5


@given(rotations())
def test_a_pair_depends_on_itself_alone(rotation):
    x, table, _, _ = rotation
    pairs = table.cos.shape[1]
    for pair in range(pairs):
        poked = x.copy()
        at = x.shape[-1] - 2 * pairs + 2 * pair
        poked[..., at : at + 2] += 1
        changed = (apply_rope(poked, *table) != apply_rope(x, *table)).any(axis=tuple(range(x.ndim - 1)))
        assert set(np.flatnonzero(changed)) <= {at, at + 1}


@given(rotations())
def test_float64_vectors_meet_the_widened_float32_table(rotation):
    x, table, _, _ = rotation
    wide = x.astype(np.float64)
    widened = RopeTable(*(part.astype(np.float64) for part in table))
    assert_double(apply_rope(wide, *table), apply_rope(wide, *widened))


@given(rotations(np.float64))
def test_heads_of_a_token_turn_alike(rotation):
    x, table, _, _ = rotation
    heads = np.stack([x, x], axis=1)
    assert_same(apply_rope(heads, *table)[:, 1], apply_rope(x, *table))


def test_scores_depend_on_distance_only():
    """q at p against k at s gives the same product as both moved by one offset: what a rotary embedding is for."""
    rng = np.random.default_rng(0)
    q, k = normal(rng, 1, 8), normal(rng, 1, 8)
    frequencies = rope_frequencies(100.0, 8)

    def product(p: int, s: int) -> float:
        return float(
            (
                apply_rope(q, *rope_table(int32([p]), frequencies))
                @ apply_rope(k, *rope_table(int32([s]), frequencies)).T
            )[0, 0]
        )

    assert abs(product(9, 4) - product(109, 104)) < 1e-4
    assert abs(product(9, 4) - product(9, 5)) > 1e-2
