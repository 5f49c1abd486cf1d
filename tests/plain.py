"""The plain low-precision computation of the float functions: what `assert_within_budget` measures an error against.

Textbook array code in the dtype of its inputs, one query or one entry at a time; no package code.
"""

from __future__ import annotations

import numpy as np


def attention(q: np.ndarray, rows: np.ndarray, sinks: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """(out [H, D], lse [H]) of one query [H, D] over rows [n, D]."""
    dtype = q.dtype.type
    if len(rows) == 0:
        return np.zeros_like(q), np.full(len(q), -np.inf, q.dtype)
    logits = q @ rows.T * dtype(scale)
    highest = np.maximum(logits.max(axis=1), sinks)
    weights = np.exp(logits - highest[:, None])
    out = weights @ rows / (weights.sum(axis=1) + np.exp(sinks - highest))[:, None]
    largest = logits.max(axis=1)
    return out, largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))


def merged(outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.floating]:
    """(out [D], lse) of one query and head from parts [n, D] with keys, lses [n]."""
    weights = np.exp(lses - lses.max())
    return weights @ outs / weights.sum(), lses.max() + np.log(weights.sum())


def entry(k: np.ndarray, score: np.ndarray, norm_weight: np.ndarray, eps: float) -> np.ndarray:
    """One pooled and normed entry [d], before its rotation, from slots [n, d]."""
    weights = np.exp(score - score.max(axis=0))
    pooled = (weights * k).sum(axis=0) / weights.sum(axis=0)
    return pooled / np.sqrt((pooled * pooled).mean() + k.dtype.type(eps)) * norm_weight


def rotated(vector: np.ndarray, position: int, freqs: list[np.float32]) -> np.ndarray:
    """The last pairs of one vector turned."""
    out = vector.copy()
    first = len(vector) - 2 * len(freqs)
    for i, frequency in enumerate(freqs):
        angle = np.float32(position) * np.float32(frequency)
        cos, sin = vector.dtype.type(np.cos(angle)), vector.dtype.type(np.sin(angle))
        a, b = vector[first + 2 * i], vector[first + 2 * i + 1]
        out[first + 2 * i], out[first + 2 * i + 1] = a * cos - b * sin, b * cos + a * sin
    return out


def entries(x, wkv, wgate, ape, norm_weight, ratio, overlap, eps, freqs) -> np.ndarray:
    """All entries [n, d] of one request from position 0; arguments as the oracle's."""
    d = len(norm_weight)
    k, score = x @ wkv.T, x @ wgate.T + ape[np.arange(len(x)) % ratio]
    found = []
    for first in range(0, len(x) - ratio + 1, ratio):
        own, before = slice(first, first + ratio), slice(max(first - ratio, 0), first)
        half = slice(d, 2 * d) if overlap else slice(0, d)
        slots, weights = k[own, half], score[own, half]
        if overlap:
            slots = np.concatenate([k[before, :d], slots])
            weights = np.concatenate([score[before, :d], weights])
        found.append(rotated(entry(slots, weights, norm_weight, eps), first, freqs))
    return np.array(found, x.dtype).reshape(-1, d)


def index_scores(q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[T, n] from q [T, H, D], weights [T, H], keys [n, D]."""
    return np.einsum("th,thk->tk", weights, np.maximum(np.einsum("thd,kd->thk", q, keys), 0))
