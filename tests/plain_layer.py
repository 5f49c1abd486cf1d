"""A whole layer as the plain low-precision computation: arguments as the oracle's, arithmetic in the dtype of x."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests import plain


def layer(
    x: np.ndarray, w: Mapping[str, np.ndarray], config: Mapping[str, Any], ratio: int, given: Sequence[set[int]]
) -> np.ndarray:
    """Outputs [L, hidden] of one request from position 0, each token attending the entries given for it."""
    freqs, eps, window = config["freqs"], config["eps"], config["window_size"]
    heads, head_dim, groups = config["num_heads"], config["head_dim"], config["o_groups"]
    kv = normed(x @ w["wkv"].T, eps) * w["kv_norm"]
    raw = np.stack([plain.rotated(row, p, freqs) for p, row in enumerate(kv)])
    entries = pooled(x, w, "cmp_", ratio, config) if ratio > 1 else raw[:0]
    q = normed((latent(x, w, eps) @ w["wq_b"].T).reshape(len(x), heads, head_dim), eps)
    outputs = []
    for p, mine in enumerate(q):
        seen = np.concatenate([raw[max(0, p - window + 1) : p + 1], entries[sorted(given[p])]])
        turned = np.stack([plain.rotated(head, p, freqs) for head in mine])
        out, _ = plain.attention(turned, seen, w["attn_sink"], 1 / np.sqrt(head_dim))
        back = np.stack([plain.rotated(head, p, [-f for f in freqs]) for head in out])
        low = [w["wo_a"][g] @ part for g, part in enumerate(back.reshape(groups, -1))]
        outputs.append(w["wo_b"] @ np.concatenate(low))
    return np.stack(outputs)


def index_scores(x: np.ndarray, w: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    """[L, entries] of a ratio-4 layer, without the Hadamard rotation: it changes no score."""
    heads, width, dtype = config["index_n_heads"], config["index_head_dim"], x.dtype.type
    flat = (latent(x, w, config["eps"]) @ w["idx_wq_b"].T).reshape(len(x), heads, width)
    q = np.stack([[plain.rotated(head, p, config["freqs"]) for head in row] for p, row in enumerate(flat)])
    gains = x @ w["idx_weights_proj"].T / np.sqrt(dtype(width * heads))
    return plain.index_scores(q, gains, pooled(x, w, "idx_cmp_", 4, config))


def normed(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + x.dtype.type(eps))


def latent(x: np.ndarray, w: Mapping[str, np.ndarray], eps: float) -> np.ndarray:
    return normed(x @ w["wq_a"].T, eps) * w["q_norm"]


def pooled(
    x: np.ndarray, w: Mapping[str, np.ndarray], prefix: str, ratio: int, config: Mapping[str, Any]
) -> np.ndarray:
    parts = [w[prefix + name] for name in ("wkv", "wgate", "ape", "norm")]
    return plain.entries(x, *parts, ratio, ratio == 4, config["eps"], config["freqs"])
