"""The int8 codecs, the int8 score, the W8A8 product: every rounding of the operators by hand, one number at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def encode_row(x: Sequence[float]) -> tuple[list[int], np.float32]:
    """(values, scale) of one vector: fp32 scale = amax/127, values round-half-even(x/scale) in [-127, 127]."""
    row = [np.float32(channel) for channel in x]
    scale = np.float32(max((abs(channel) for channel in row), default=np.float32(0.0))) / np.float32(127.0)
    if scale == 0.0:
        return [0] * len(row), np.float32(0.0)
    values = []
    for channel in row:
        rounded = round(float(channel / scale))  # Python rounds halves to even
        values.append(min(max(rounded, -127), 127))
    return values, scale


def encode(x: Sequence[float]) -> tuple[list[int], np.float16]:
    """(values, scale) of one index vector: the values are made with the fp32 scale, which is stored as fp16 then."""
    values, scale = encode_row(x)
    return values, np.float16(scale)


def decode(values: Sequence[int], scale: np.float16) -> list[np.float32]:
    """values * scale in fp32."""
    return [np.float32(value) * np.float32(scale) for value in values]


def int8_score(
    q: Sequence[Sequence[int]],
    q_scales: Sequence[np.float16],
    k: Sequence[int],
    k_scale: np.float16,
    weights: Sequence[np.float16],
) -> np.float32:
    """Score of one key over 1024: fp16 relu, fp16 weight * q_scale, fp32 sum over heads in order, times k_scale."""
    total = np.float32(0.0)
    for head, q_scale, weight in zip(q, q_scales, weights, strict=True):
        dot = sum(int(a) * int(b) for a, b in zip(head, k, strict=True))
        similarity = np.float16(max(dot, 0) / 1024)
        gain = np.float16(np.float32(weight) * np.float32(q_scale))
        total = total + np.float32(similarity) * np.float32(gain)
    return total * np.float32(k_scale)


def quant_product(
    row: Sequence[int], row_scale: np.float32, channel: Sequence[int], channel_scale: np.float32
) -> np.float32:
    """One number of a W8A8 product: an exact sum; then in fp32, times the channel's scale, times the row's."""
    dot = sum(int(a) * int(b) for a, b in zip(row, channel, strict=True))
    assert -(2**31) <= dot < 2**31
    return np.float32(dot) * np.float32(channel_scale) * np.float32(row_scale)
