"""Partial rotary embedding: the last channels of a vector turn, in adjacent pairs, with its position.

The table is part of the definition: frequencies in float64 rounded once to float32; angle = float32(position) times
float32(frequency), in float32; cos and sin of that, rounded to float32. A float64 angle differs by up to 0.05 rad near
a million tokens, so float64 callers take this table and widen it. YaRN changes the frequencies only; cos and sin keep
amplitude 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.extents import FLOATS, Float
from dsacp_ref.partition import Int32
from dsacp_ref.spec import check_array, check_int, check_number, contract_error

__all__ = [
    "RopeTable",
    "apply_half_rope",
    "apply_inverse_rope",
    "apply_rope",
    "rope_frequencies",
    "rope_table",
    "yarn_frequencies",
]


class RopeTable(NamedTuple):
    """Cosines and sines, one row a token, one column a pair of channels.

    Fields:
        cos: float32[num_tokens, rope_head_dim / 2].
        sin: float32[num_tokens, rope_head_dim / 2].

    >>> RopeTable._fields
    ('cos', 'sin')
    """

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


def rope_frequencies(theta: float, rope_head_dim: int) -> tuple[float, ...]:
    """The plain frequencies ``theta ** (-2i / rope_head_dim)``, for window-only layers.

    Args:
        theta: number, base, > 1.
        rope_head_dim: int, rotated channels, even, >= 2.

    Returns:
        tuple of rope_head_dim / 2 floats, radians a token, each a float32 value.

    Raises:
        ContractError: a value above does not hold.

    Source: DeepSeek-V4 inference model; `rope_theta` of the checkpoint.

    >>> rope_frequencies(10000.0, 4)
    (1.0, 0.009999999776482582)
    """
    return tuple(float(np.float32(f)) for f in exact_frequencies(theta, rope_head_dim))


def exact_frequencies(theta: float, rope_head_dim: int) -> list[float]:
    """The plain frequencies before rounding."""
    theta = check_number("theta", theta, above=1.0)
    rope_head_dim = check_int("rope_head_dim", rope_head_dim, 2)
    if rope_head_dim % 2:
        raise contract_error("rope_head_dim", "be even", rope_head_dim, "channels turn in pairs")
    return [theta ** (-2 * i / rope_head_dim) for i in range(rope_head_dim // 2)]


def yarn_frequencies(
    theta: float,
    rope_head_dim: int,
    *,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_position: int,
) -> tuple[float, ...]:
    """The frequencies of layers with compressed entries: slow pairs stretched by ``factor``, fast ones kept.

    ::

        pair   0 ........ lo ........ hi ........ R/2 - 1
               kept       ramp        divided by factor

    Args:
        theta: number, base, > 1 (`compress_rope_theta` of the checkpoint).
        rope_head_dim: int, rotated channels, even, >= 2.
        factor: number, stretch, > 0.
        beta_fast: number, turns over the original length above which a pair is kept, > 0.
        beta_slow: number, turns below which a pair is stretched, > 0.
        original_max_position: int, tokens, length before the stretch, >= 1.

    Returns:
        tuple of rope_head_dim / 2 floats, radians a token, each a float32 value.

    Raises:
        ContractError: a value above does not hold.

    Source: YaRN, arXiv 2309.00071, without its amplitude; DeepSeek-V4 inference model.

    >>> f = yarn_frequencies(160000.0, 64, factor=16, beta_fast=32, beta_slow=1, original_max_position=65536)
    >>> [f"{f[i]:.9e}" for i in (14, 15, 16, 31)]
    ['5.286856089e-03', '3.635538509e-03', '2.265624935e-03', '5.680528830e-07']
    """
    plain = exact_frequencies(theta, rope_head_dim)
    factor = check_number("factor", factor, above=0.0)
    beta_fast = check_number("beta_fast", beta_fast, above=0.0)
    beta_slow = check_number("beta_slow", beta_slow, above=0.0)
    original_max_position = check_int("original_max_position", original_max_position, 1)

    def pair_with_turns(turns: float) -> float:
        return rope_head_dim * math.log(original_max_position / (2 * math.pi * turns)) / (2 * math.log(theta))

    lo = float(max(math.floor(pair_with_turns(beta_fast)), 0))
    hi = float(min(math.ceil(pair_with_turns(beta_slow)), rope_head_dim - 1))
    if lo == hi:
        hi += 0.001
    stretched = [min(max((i - lo) / (hi - lo), 0.0), 1.0) for i in range(len(plain))]
    return tuple(
        float(np.float32(f / factor * share + f * (1 - share))) for f, share in zip(plain, stretched, strict=True)
    )


def rope_table(positions: Int32, frequencies: Sequence[float]) -> RopeTable:
    """The rows of the table for these positions.

    Args:
        positions: int32[num_tokens], tokens, absolute positions; -1 (a pad row) gives the identity, cos 1 and sin 0.
        frequencies: rope_head_dim / 2 floats, radians a token, as `rope_frequencies` and `yarn_frequencies` give them.

    Returns:
        RopeTable: float32 [num_tokens, rope_head_dim / 2] each.

    Raises:
        ContractError: a shape or dtype above does not hold.

    Source: the definition of the table, above. Positions are never cast below 32 bits (vllm-ascend#9739).

    >>> table = rope_table(np.array([0, 1, -1], np.int32), (1.0,))
    >>> [f"{c:.4f}" for c in table.cos[:, 0]], [f"{s:.4f}" for s in table.sin[:, 0]]
    (['1.0000', '0.5403', '1.0000'], ['0.0000', '0.8415', '0.0000'])
    """
    check_array("positions", positions, ("int32",), ("num_tokens",))
    if (positions < -1).any():
        raise contract_error("positions", "be -1 or a position", int(positions.min()), "-1 alone marks a pad row")
    steps = np.array([check_number("frequencies", f) for f in frequencies], np.float32)
    angles = np.maximum(positions, 0).astype(np.float32)[:, None] * steps
    wide = angles.astype(np.float64)  # so that every platform rounds cos and sin of the angle alike
    return RopeTable(np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32))


def apply_rope(x: Float, cos: Float, sin: Float) -> Float:
    """The vectors with their last channels turned forward, pair (2i, 2i+1) by angle i.

    ::

        channels of a head     [ plain .................. | a0 b0 a1 b1 ... ]
        turned                                              a cos - b sin, b cos + a sin

    Args:
        x: float32 or float64 [num_tokens, ..., head_dim], head_dim >= 2 * the table's columns.
        cos: float32 or float64 [num_tokens, rope_head_dim / 2], one row a token.
        sin: like ``cos``.

    Returns:
        dtype of ``x``, same shape.

    Raises:
        ContractError: a shape or dtype above does not hold.

    Source: DeepSeek-V4 inference model; operator inplace_partial_rotary_mul, mode "interleave".

    >>> table = rope_table(np.array([1], np.int32), (1.0,))
    >>> apply_rope(np.array([[7.0, 1.0, 0.0]]), *table).round(4).tolist()
    [[7.0, 0.5403, 0.8415]]
    """
    return turned(x, cos, sin)


def apply_inverse_rope(x: Float, cos: Float, sin: Float) -> Float:
    """The vectors with their last channels turned back, as attention outputs need because keys are also values.

    Args:
        x: float32 or float64 [num_tokens, ..., head_dim], head_dim >= 2 * the table's columns.
        cos: float32 or float64 [num_tokens, rope_head_dim / 2], one row a token.
        sin: like ``cos``.

    Returns:
        dtype of ``x``, same shape.

    Raises:
        ContractError: a shape or dtype above does not hold.

    Source: as `apply_rope`, with the sine negated.

    >>> table = rope_table(np.array([3], np.int32), (1.0,))
    >>> x = np.array([[7.0, 1.0, 2.0]])
    >>> bool(np.allclose(apply_inverse_rope(apply_rope(x, *table), *table), x))
    True
    """
    check_array("sin", sin, FLOATS, ("num_tokens", "rope_head_dim / 2"))
    return turned(x, cos, -sin)


def apply_half_rope(x: Float, cos: Float, sin: Float) -> Float:
    """The vectors with their first channels turned forward, pair (i, i + columns) by angle i: V3.2's index vectors.

    ::

        channels of a vector   [ a0 a1 .. | b0 b1 .. | plain .......... ]
        turned                   a cos - b sin, b cos + a sin

    Args:
        x: float32 or float64 [num_tokens, ..., head_dim], head_dim >= 2 * the table's columns.
        cos: float32 or float64 [num_tokens, rope_head_dim / 2], one row a token.
        sin: like ``cos``.

    Returns:
        dtype of ``x``, same shape.

    Raises:
        ContractError: a shape or dtype above does not hold.

    Source: DeepSeek-V3.2's indexer, which pairs and places channels unlike its queries and keys; operator
        npu_rotary_mul, mode "half".

    >>> table = rope_table(np.array([1], np.int32), (1.0,))
    >>> apply_half_rope(np.array([[1.0, 0.0, 7.0]]), *table).round(4).tolist()
    [[0.5403, 0.8415, 7.0]]
    """
    columns, c, s = checked_turn(x, cos, sin)
    out = x.copy()
    first, second = x[..., :columns], x[..., columns : 2 * columns]
    out[..., :columns] = first * c - second * s
    out[..., columns : 2 * columns] = second * c + first * s
    return out


def turned(x: Float, cos: Float, sin: Float) -> Float:
    """A copy of x whose last pairs are rotated."""
    columns, c, s = checked_turn(x, cos, sin)
    width = 2 * columns
    out = x.copy()
    if width == 0:
        return out
    even, odd = x[..., -width::2], x[..., x.shape[-1] - width + 1 :: 2]
    out[..., -width::2] = even * c - odd * s
    out[..., x.shape[-1] - width + 1 :: 2] = odd * c + even * s
    return out


def checked_turn(x: Float, cos: Float, sin: Float) -> tuple[int, Float, Float]:
    """The table's columns, and its rows laid along the axes of x, once they are found to fit."""
    if not hasattr(x, "shape") or len(x.shape) < 2:
        got = list(x.shape) if hasattr(x, "shape") else type(x).__name__
        raise contract_error("x", "have shape [num_tokens, ..., head_dim]", got)
    check_array("x", x, FLOATS, x.shape)
    check_array("cos", cos, FLOATS, (x.shape[0], "rope_head_dim / 2"), "one row of the table a token")
    check_array("sin", sin, FLOATS, cos.shape, "cos and sin are one table")
    width = 2 * cos.shape[1]
    if width > x.shape[-1]:
        raise contract_error("x", f"have at least {width} channels", x.shape[-1], "the table has one column a pair")
    rows = (x.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[1],)
    return cos.shape[1], cos.reshape(rows).astype(x.dtype), sin.reshape(rows).astype(x.dtype)
