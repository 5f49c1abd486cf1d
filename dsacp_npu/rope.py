"""Mirror of `dsacp_ref.rope` over torch. Runs on the device of its arguments and never waits for it.

bfloat16 and float16 vectors turn in float32 and are rounded once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dsacp_npu._tensors import Float, Int32, check_floats, check_tensor, computing_dtype, torch, values_known
from dsacp_npu._tiles import in_blocks
from dsacp_ref.spec import check_int, check_number, contract_error

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
    """Mirror of `dsacp_ref.rope.RopeTable`."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_frequencies(theta: float, rope_head_dim: int) -> tuple[float, ...]:
    """Mirror of `dsacp_ref.rope.rope_frequencies`."""
    return float32_values(exact_frequencies(theta, rope_head_dim))


def exact_frequencies(theta: float, rope_head_dim: int) -> list[float]:
    """The plain frequencies before rounding."""
    theta = check_number("theta", theta, above=1.0)
    rope_head_dim = check_int("rope_head_dim", rope_head_dim, 2)
    if rope_head_dim % 2:
        raise contract_error("rope_head_dim", "be even", rope_head_dim, "channels turn in pairs")
    return [theta ** (-2 * i / rope_head_dim) for i in range(rope_head_dim // 2)]


def float32_values(numbers: Iterable[float]) -> tuple[float, ...]:
    """The numbers rounded to float32; without tensors, so that a default device or fake mode does not matter."""
    return tuple(array("f", numbers))


def yarn_frequencies(
    theta: float,
    rope_head_dim: int,
    *,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_position: int,
) -> tuple[float, ...]:
    """Mirror of `dsacp_ref.rope.yarn_frequencies`."""
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
    return float32_values(f / factor * share + f * (1 - share) for f, share in zip(plain, stretched, strict=True))


def rope_table(positions: Int32, frequencies: Sequence[float]) -> RopeTable:
    """Mirror of `dsacp_ref.rope.rope_table`.

    Limits: the device must have float64 cosines. A float32 tensor of frequencies that lies there already takes one
    multiplication; a tuple takes one for each, because copying it there would wait for the device.
    """
    check_tensor("positions", positions, ("int32",), ("num_tokens",))
    if values_known(positions) and (positions < -1).any():
        raise contract_error("positions", "be -1 or a position", int(positions.min()), "-1 alone marks a pad row")
    float_positions = positions.clamp(min=0).to(torch.float32)[:, None]
    if isinstance(frequencies, torch.Tensor):
        angles = float_positions * frequencies.to(torch.float32)
    else:
        columns = [float_positions * check_number("frequencies", f) for f in frequencies]
        angles = torch.cat([float_positions[:, :0], *columns], dim=1)
    wide = angles.to(torch.float64)  # so that every platform rounds cos and sin of the angle alike
    return RopeTable(wide.cos().to(torch.float32), wide.sin().to(torch.float32))


def apply_rope(x: Float, cos: Float, sin: Float) -> Float:
    """Mirror of `dsacp_ref.rope.apply_rope`."""
    return turned(x, cos, sin)


def apply_inverse_rope(x: Float, cos: Float, sin: Float) -> Float:
    """Mirror of `dsacp_ref.rope.apply_inverse_rope`."""
    check_floats("sin", sin, ("num_tokens", "rope_head_dim / 2"))
    return turned(x, cos, -sin)


def apply_half_rope(x: Float, cos: Float, sin: Float) -> Float:
    """Mirror of `dsacp_ref.rope.apply_half_rope`."""
    check_turn(x, cos, sin)
    if cos.shape[1] == 0:
        return x.clone()
    return in_blocks(with_turned_halves, x, cos, sin)


def turned(x: Float, cos: Float, sin: Float) -> Float:
    """A copy of x whose last pairs are rotated."""
    check_turn(x, cos, sin)
    if cos.shape[1] == 0:
        return x.clone()
    return in_blocks(with_turned_pairs, x, cos, sin)


def check_turn(x: Float, cos: Float, sin: Float) -> None:
    """Refuse vectors and tables that do not fit each other."""
    if not hasattr(x, "shape") or len(x.shape) < 2:
        got = list(x.shape) if hasattr(x, "shape") else type(x).__name__
        raise contract_error("x", "have shape [num_tokens, ..., head_dim]", got)
    check_floats("x", x, tuple(x.shape))
    check_floats("cos", cos, (x.shape[0], "rope_head_dim / 2"), "one row of the table a token")
    check_floats("sin", sin, tuple(cos.shape), "cos and sin are one table")
    width = 2 * cos.shape[1]
    if width > x.shape[-1]:
        raise contract_error("x", f"have at least {width} channels", x.shape[-1], "the table has one column a pair")


def with_turned_pairs(x: Float, cos: Float, sin: Float) -> Float:
    """The rows, their last pairs rotated."""
    width = 2 * cos.shape[1]
    c, s = along(x, cos), along(x, sin)
    plain, pairs = x[..., :-width], x[..., -width:].to(c.dtype)
    even, odd = pairs[..., 0::2], pairs[..., 1::2]
    turned_pairs = torch.stack([even * c - odd * s, odd * c + even * s], dim=-1).flatten(-2)
    return torch.cat([plain, turned_pairs.to(x.dtype)], dim=-1)


def with_turned_halves(x: Float, cos: Float, sin: Float) -> Float:
    """The rows, their first channels rotated, each with the one half of them further on."""
    columns = cos.shape[1]
    c, s = along(x, cos), along(x, sin)
    first, second = x[..., :columns].to(c.dtype), x[..., columns : 2 * columns].to(c.dtype)
    turned_halves = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
    return torch.cat([turned_halves.to(x.dtype), x[..., 2 * columns :]], dim=-1)


def along(x: Float, table: Float) -> Float:
    """The table laid along the axes of x, in the dtype to compute in."""
    rows = (x.shape[0],) + (1,) * (x.ndim - 2) + (table.shape[1],)
    return table.reshape(rows).to(computing_dtype(x.dtype))
