"""Index scores and top-k of one query: a recursive Hadamard rotation, a sum over heads, one sort."""

from __future__ import annotations

import math
from collections.abc import Sequence


def hadamard(vector: Sequence[float]) -> list[float]:
    """vector times the Sylvester matrix H_2n = [[H_n, H_n], [H_n, -H_n]], over sqrt of the length."""
    return [channel / math.sqrt(len(vector)) for channel in _sylvester_product([float(c) for c in vector])]


def _sylvester_product(vector: list[float]) -> list[float]:
    if len(vector) == 1:
        return vector
    if len(vector) % 2 != 0:
        raise ValueError("the length is not a power of two")
    half = len(vector) // 2
    top, bottom = _sylvester_product(vector[:half]), _sylvester_product(vector[half:])
    return [a + b for a, b in zip(top, bottom, strict=True)] + [a - b for a, b in zip(top, bottom, strict=True)]


def score(iq_heads: Sequence[Sequence[float]], weights: Sequence[float], key: Sequence[float]) -> float:
    """Sum over heads of weight * relu(head . key); the weights are signed and already scaled."""
    total = 0.0
    for head, weight in zip(iq_heads, weights, strict=True):
        dot = sum(float(a) * float(b) for a, b in zip(head, key, strict=True))
        if dot < 0.0:  # written so that NaN stays NaN
            dot = 0.0
        total += float(weight) * dot
    return total


def select(scores: Sequence[float], visible: int, k: int) -> list[int]:
    """The min(k, visible) best of the first `visible` entries, best first, lower index first in a tie; then -1 up to k.

    A NaN score counts as -inf, and such an entry can still be selected.
    """
    ranked = []
    for entry in range(visible):
        value = float(scores[entry])
        ranked.append((math.inf if math.isnan(value) else -value, entry))
    ranked.sort()
    chosen = [entry for _, entry in ranked[:k]]
    return chosen + [-1] * (k - len(chosen))
