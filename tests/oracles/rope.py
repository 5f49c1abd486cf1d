"""Rotary embedding of one vector: fp32 angles by definition, everything after the fp32 table in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def frequencies(theta: float, rope_dim: int, yarn: dict[str, float] | None = None) -> list[np.float32]:
    """One frequency per channel pair, computed in float64 and rounded once to fp32.

    `yarn` has the keys factor, beta_fast, beta_slow, original; it changes frequencies only, never the amplitude.
    """
    table = [theta ** (-2.0 * i / rope_dim) for i in range(rope_dim // 2)]
    if yarn is not None:
        low, high = yarn_range(theta, rope_dim, yarn)
        for i, frequency in enumerate(table):
            # 0: fast channel, keeps its frequency. 1: slow channel, stretched by the whole factor.
            slow = min(max((i - low) / (high - low), 0.0), 1.0)
            table[i] = frequency / yarn["factor"] * slow + frequency * (1.0 - slow)
    return [np.float32(frequency) for frequency in table]


def yarn_range(theta: float, rope_dim: int, yarn: dict[str, float]) -> tuple[float, float]:
    """First and last channel pair of the YaRN ramp."""

    def pair_that_turns(turns: float) -> float:
        # Solve original * theta^(-2i/R) = 2 pi turns for i.
        return rope_dim * math.log(yarn["original"] / (2.0 * math.pi * turns)) / (2.0 * math.log(theta))

    low = float(max(math.floor(pair_that_turns(yarn["beta_fast"])), 0))
    high = float(min(math.ceil(pair_that_turns(yarn["beta_slow"])), rope_dim - 1))
    return (low, high + 0.001) if low == high else (low, high)


def cos_sin(position: int, frequency: np.float32) -> tuple[float, float]:
    """The fp32 table entry, as two float64 numbers: cos and sin of the fp32 product of fp32 position and frequency."""
    angle = np.float32(position) * np.float32(frequency)
    return float(np.float32(math.cos(float(angle)))), float(np.float32(math.sin(float(angle))))


def rotate(vector: Sequence[float], position: int, freqs: Sequence[np.float32]) -> list[float]:
    """Turn the adjacent pairs of the last 2 * len(freqs) channels by position * frequency."""
    return _turned(vector, position, freqs, 1.0)


def rotate_back(vector: Sequence[float], position: int, freqs: Sequence[np.float32]) -> list[float]:
    """The inverse of `rotate`: the same table with the sine negated."""
    return _turned(vector, position, freqs, -1.0)


def _turned(vector: Sequence[float], position: int, freqs: Sequence[np.float32], direction: float) -> list[float]:
    turned = [float(channel) for channel in vector]
    first = len(turned) - 2 * len(freqs)
    for i, frequency in enumerate(freqs):
        cos, sin = cos_sin(position, frequency)
        sin = direction * sin
        a, b = turned[first + 2 * i], turned[first + 2 * i + 1]
        turned[first + 2 * i] = a * cos - b * sin
        turned[first + 2 * i + 1] = b * cos + a * sin
    return turned
