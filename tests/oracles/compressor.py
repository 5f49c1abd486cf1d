"""Compressed entries of one whole request, fed token by token and pooled channel by channel in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from tests.oracles import rope


def rms_norm(vector: Sequence[float], weight: Sequence[float] | None, eps: float) -> list[float]:
    """vector / sqrt(mean square + eps), times the weight if there is one."""
    mean_square = sum(float(channel) * float(channel) for channel in vector) / len(vector)
    size = math.sqrt(mean_square + eps)
    if weight is None:
        return [float(channel) / size for channel in vector]
    return [float(channel) / size * float(gain) for channel, gain in zip(vector, weight, strict=True)]


def pooled(slots: list[tuple[float, float]]) -> float:
    """Softmax-weighted mean of one channel; a slot is (k, score)."""
    largest = max(score for _, score in slots)
    weights = [math.exp(score - largest) for _, score in slots]
    return sum(weight * k for weight, (k, _) in zip(weights, slots, strict=True)) / sum(weights)


def entries(
    x_rows: ArrayLike,
    wkv: ArrayLike,
    wgate: ArrayLike,
    ape: ArrayLike,
    norm_weight: ArrayLike,
    ratio: int,
    overlap: bool,
    norm_eps: float,
    freqs: Sequence[np.float32],
) -> list[list[float]]:
    """All entries of a request that starts at position 0: one per complete window of `ratio` tokens.

    wkv and wgate are [c*d, hidden], ape [ratio, c*d], norm_weight [d]; c is 2 with overlap (first half of the channels
    goes to the next entry, second half to the own one), else 1.
    """
    key_weight, gate_weight = np.asarray(wkv, dtype=np.float64), np.asarray(wgate, dtype=np.float64)
    bias, gain = np.asarray(ape, dtype=np.float64), np.asarray(norm_weight, dtype=np.float64)
    width = len(gain)
    keys: list[np.ndarray] = []
    scores: list[np.ndarray] = []
    result: list[list[float]] = []
    for token, x in enumerate(np.asarray(x_rows, dtype=np.float64)):
        keys.append(np.dot(key_weight, x))
        scores.append(np.dot(gate_weight, x) + bias[token % ratio])
        if (token + 1) % ratio != 0:
            continue
        first = token + 1 - ratio
        entry = []
        for channel in range(width):
            slots = []
            if overlap:
                # The window before gives its first half. Before window 0 there is nothing, so there are no such slots.
                for earlier in range(max(first - ratio, 0), first):
                    slots.append((float(keys[earlier][channel]), float(scores[earlier][channel])))
            own = channel + width if overlap else channel
            for current in range(first, token + 1):
                slots.append((float(keys[current][own]), float(scores[current][own])))
            entry.append(pooled(slots))
        result.append(rope.rotate(rms_norm(entry, gain, norm_eps), first, freqs))
    return result
