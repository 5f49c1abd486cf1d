"""What one query sees, and its attention over exactly those rows, one head and one row at a time in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence


def window_positions(p: int, window_size: int) -> list[int]:
    """Raw positions that a query at p sees: itself and the window_size - 1 before it, as far as they exist."""
    return [t for t in range(p + 1) if p - t < window_size]


def visible_entries(p: int, ratio: int) -> list[int]:
    """Entries whose last raw token is not in the future of a query at p."""
    visible = []
    for entry in range(p + 1):
        last_token = ratio * entry + ratio - 1
        if last_token <= p:
            visible.append(entry)
    return visible


def attend(
    q_heads: Sequence[Sequence[float]], rows: Sequence[Sequence[float]], sinks: Sequence[float] | None, scale: float
) -> tuple[list[list[float]], list[float]]:
    """(out [H][D], lse [H]) of one query over rows that are key and value at once; lse leaves the sink out.

    sinks=None means no sink. Without rows the output is zero and lse is -inf.
    """
    out, lse = [], []
    for h, head in enumerate(q_heads):
        sink = -math.inf if sinks is None else float(sinks[h])
        logits = [scale * sum(float(a) * float(b) for a, b in zip(head, row, strict=True)) for row in rows]
        highest = max([sink, *logits])
        if highest == -math.inf:
            out.append([0.0] * len(head))
            lse.append(-math.inf)
            continue
        weights = [math.exp(logit - highest) for logit in logits]
        total = sum(weights) + math.exp(sink - highest)
        mixed = [0.0] * len(head)
        for weight, row in zip(weights, rows, strict=True):
            for channel, value in enumerate(row):
                mixed[channel] += weight * float(value) / total
        out.append(mixed)
        lse.append(_log_sum_exp(logits))
    return out, lse


def _log_sum_exp(logits: list[float]) -> float:
    # Shifted by its own maximum, not by the sink's: the sum must not underflow under a large sink.
    highest = max(logits, default=-math.inf)
    if highest == -math.inf:
        return -math.inf
    return highest + math.log(sum(math.exp(logit - highest) for logit in logits))
