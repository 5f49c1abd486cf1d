"""One whole attention layer on one request from position 0, step by step in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tests.oracles import attention, compressor, indexer, rope


def layer(
    x: ArrayLike,
    weights: Mapping[str, ArrayLike],
    config: Mapping[str, Any],
    ratio: int,
    given: Sequence[Iterable[int]] | None = None,
) -> tuple[list[list[float]], list[set[int]]]:
    """(outputs [L][hidden], the set of entries each token attends) for the normed block inputs x [L, hidden].

    weights: wq_a [q_lora, hidden], q_norm [q_lora], wq_b [H*D, q_lora], wkv [D, hidden], kv_norm [D], attn_sink [H],
      wo_a [G, o_lora, H/G*D], wo_b [hidden, G*o_lora];
      ratio > 1: cmp_wkv, cmp_wgate [c*D, hidden], cmp_ape [ratio, c*D], cmp_norm [D], with c = 2 for ratio 4, else 1;
      ratio 4: idx_wq_b [Hi*Di, q_lora], idx_weights_proj [Hi, hidden], idx_cmp_wkv, idx_cmp_wgate [2*Di, hidden],
      idx_cmp_ape [4, 2*Di], idx_cmp_norm [Di].
    config: num_heads, head_dim, rope_head_dim, o_groups, window_size, index_n_heads, index_head_dim, index_topk, eps,
      freqs (the fp32 frequencies of this layer, rope_head_dim / 2 of them).
    ratio 0 or 1 is the window only, ratio 4 the window and selected entries, any other the window and all visible ones.
    given: per token the entries to attend instead of the layer's own choice; -1 in it is no entry.
    """
    w = _float64(weights)
    freqs, eps = config["freqs"], config["eps"]
    if 2 * len(freqs) != config["rope_head_dim"]:
        raise ValueError("one frequency per pair of rope channels")
    rows = np.asarray(x, dtype=np.float64)
    raw = []
    for p, row in enumerate(rows):
        raw.append(rope.rotate(compressor.rms_norm(np.dot(w["wkv"], row), w["kv_norm"], eps), p, freqs))
    entries = _entries(rows, w, "cmp", config, ratio) if ratio > 1 else []
    scores = index_scores(x, weights, config) if ratio == 4 and given is None else None

    outputs, selections = [], []
    for p, row in enumerate(rows):
        visible = attention.visible_entries(p, ratio) if ratio > 1 else []
        if given is not None:
            chosen = {int(entry) for entry in given[p]} - {-1}
        elif scores is not None:
            chosen = set(indexer.select(scores[p], len(visible), config["index_topk"])) - {-1}
        else:
            chosen = set(visible)
        if not chosen <= set(visible):
            raise ValueError("a given entry is not visible to its query")
        seen = [raw[t] for t in attention.window_positions(p, config["window_size"])]
        seen += [entries[entry] for entry in sorted(chosen)]
        out, _ = attention.attend(_query(row, p, w, config), seen, w["attn_sink"], 1.0 / math.sqrt(config["head_dim"]))
        outputs.append(_projected(out, p, w, config))
        selections.append(chosen)
    return outputs, selections


def index_scores(x: ArrayLike, weights: Mapping[str, ArrayLike], config: Mapping[str, Any]) -> list[list[float]]:
    """Scores of the entries visible to each token of a ratio-4 layer: one list per token, one number per entry."""
    w = _float64(weights)
    rows = np.asarray(x, dtype=np.float64)
    num_heads, width = config["index_n_heads"], config["index_head_dim"]
    keys = [indexer.hadamard(entry) for entry in _entries(rows, w, "idx_cmp", config, 4)]
    scores = []
    for p, row in enumerate(rows):
        flat = np.dot(w["idx_wq_b"], _low_rank_query(row, w, config))
        heads = [rope.rotate(flat[h * width : (h + 1) * width], p, config["freqs"]) for h in range(num_heads)]
        heads = [indexer.hadamard(head) for head in heads]
        gains = np.dot(w["idx_weights_proj"], row) / math.sqrt(width) / math.sqrt(num_heads)
        scores.append([indexer.score(heads, gains, keys[entry]) for entry in attention.visible_entries(p, 4)])
    return scores


def _float64(weights: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}


def _entries(
    rows: np.ndarray, w: dict[str, np.ndarray], kind: str, config: Mapping[str, Any], ratio: int
) -> list[list[float]]:
    parts = [w[f"{kind}_{name}"] for name in ("wkv", "wgate", "ape", "norm")]
    return compressor.entries(rows, *parts, ratio, ratio == 4, config["eps"], config["freqs"])


def _low_rank_query(row: np.ndarray, w: dict[str, np.ndarray], config: Mapping[str, Any]) -> list[float]:
    return compressor.rms_norm(np.dot(w["wq_a"], row), w["q_norm"], config["eps"])


def _query(row: np.ndarray, p: int, w: dict[str, np.ndarray], config: Mapping[str, Any]) -> list[list[float]]:
    """Heads of one query: projected, each normed over its own channels without a weight, then rotated."""
    flat = np.dot(w["wq_b"], _low_rank_query(row, w, config))
    width = config["head_dim"]
    heads = [flat[h * width : (h + 1) * width] for h in range(config["num_heads"])]
    return [rope.rotate(compressor.rms_norm(head, None, config["eps"]), p, config["freqs"]) for head in heads]


def _projected(out: list[list[float]], p: int, w: dict[str, np.ndarray], config: Mapping[str, Any]) -> list[float]:
    """One output row: heads rotated back, projected group by group, then together."""
    heads = [rope.rotate_back(head, p, config["freqs"]) for head in out]
    heads_per_group = config["num_heads"] // config["o_groups"]
    low_rank: list[float] = []
    for group in range(config["o_groups"]):
        wide: list[float] = []
        for head in heads[group * heads_per_group : (group + 1) * heads_per_group]:
            wide += head
        low_rank += [float(value) for value in np.dot(w["wo_a"][group], wide)]
    return [float(value) for value in np.dot(w["wo_b"], low_rank)]
