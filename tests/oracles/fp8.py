"""FP8 from its definition: all 256 codes listed, every rounding to the nearest of them, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def code_value(code: int) -> float:
    """What a byte of e4m3 stands for: 4 bits of exponent, bias 7, 3 of fraction; all ones is NaN, there is no inf."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code >> 3) & 15, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (8 + fraction) * 2.0 ** (exponent - 10)


MAGNITUDES = [code_value(code) for code in range(127)]  # ascending


def nearest_code(value: float) -> int:
    """The byte of the nearest code, the one with an even last bit where two are as near; 448 is never left."""
    size = abs(float(value))
    assert size < 464, "no code is that large"
    below = max(code for code in range(127) if MAGNITUDES[code] <= size)
    code = below
    if below < 126:
        middle = (MAGNITUDES[below] + MAGNITUDES[below + 1]) / 2
        if size > middle or (size == middle and below % 2 == 1):
            code = below + 1
    return code | (0x80 if math.copysign(1.0, float(value)) < 0 else 0)


def encode(x: Sequence[float]) -> tuple[list[int], np.float32]:
    """(bytes, scale) of one group: fp32 scale = amax / 448, 0 below 2**-107; bytes of x / scale in fp32."""
    group = [np.float32(channel) for channel in x]
    amax = max(abs(channel) for channel in group)
    scale = amax / np.float32(448.0) if amax >= np.float32(2.0**-107) else np.float32(0.0)
    return [nearest_code(channel / scale if scale else channel) for channel in group], scale


def decode(codes: Sequence[int], scale: np.float32) -> list[np.float32]:
    """value * scale in fp32."""
    return [np.float32(code_value(code)) * np.float32(scale) for code in codes]


def power_exponent(x: Sequence[float]) -> int:
    """k of the smallest 2**k with 448 * 2**k >= amax, amax at least fp32's 1e-4: found by trying them all."""
    amax = max(float(np.float32(1e-4)), *(abs(float(np.float32(channel))) for channel in x))
    return min(k for k in range(-127, 128) if math.ldexp(448.0, k) >= amax)


def encode_power(x: Sequence[float]) -> tuple[list[int], int]:
    """(bytes, scale byte) of one group whose scale is a power of two."""
    exponent = power_exponent(x)
    return [nearest_code(math.ldexp(float(np.float32(channel)), -exponent)) for channel in x], exponent + 127


def bfloat16_bytes(x: float) -> bytes:
    """The two bytes of the nearest number with 8 significant bits, of at least 2**-133 a step, half to even."""
    value = float(np.float32(x))
    exponent = max(math.frexp(value)[1] - 8, -133)
    rounded = round(math.ldexp(value, -exponent))  # Python rounds halves to even
    number = np.float32(math.copysign(math.ldexp(abs(rounded), exponent), value))
    low_first = number.astype("<f4").tobytes()
    assert low_first[:2] == b"\0\0"
    return low_first[2:]


def score(
    q: Sequence[Sequence[int]],
    q_scales: Sequence[np.float32],
    k: Sequence[int],
    k_scale: np.float32,
    weights: Sequence[np.float32],
) -> np.float32:
    """Score of one key: an exact dot; in fp32, relu, times weight * q_scale, summed head by head, times k_scale."""
    total = np.float32(0.0)
    for head, q_scale, weight in zip(q, q_scales, weights, strict=True):
        # Codes count in steps of 2**-9, so that integers hold every product and sum.
        dot = sum(round(code_value(a) * 512) * round(code_value(b) * 512) for a, b in zip(head, k, strict=True))
        hit = np.float32(math.ldexp(max(dot, 0), -18))
        total = np.float32(total + np.float32(weight) * np.float32(q_scale) * hit)
    return total * np.float32(k_scale)
