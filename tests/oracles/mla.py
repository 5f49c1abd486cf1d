"""DeepSeek-V3.2's attention over latents, one request, token, head and key at a time in float64.

Keys and values are written out for every head: nothing is absorbed. A request is its whole history; what a step before
this one computed is the same function of the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tests.oracles import compressor, indexer, rope

LAYER_NORM_EPS = 1e-6


def layer_norm(vector: Sequence[float], weight: Sequence[float], bias: Sequence[float], eps: float) -> list[float]:
    """Mean taken off, divided by the root of the variance plus eps, times the weight, plus the bias."""
    mean = sum(float(channel) for channel in vector) / len(vector)
    variance = sum((float(channel) - mean) ** 2 for channel in vector) / len(vector)
    size = math.sqrt(variance + eps)
    return [
        (float(channel) - mean) / size * float(gain) + float(shift)
        for channel, gain, shift in zip(vector, weight, bias, strict=True)
    ]


def half_rotate(vector: Sequence[float], position: int, freqs: Sequence[np.float32]) -> list[float]:
    """Turn channel i with channel i + len(freqs), both among the first 2 * len(freqs); the others stay."""
    turned = [float(channel) for channel in vector]
    half = len(freqs)
    for i, frequency in enumerate(freqs):
        cos, sin = rope.cos_sin(position, frequency)
        first, second = turned[i], turned[i + half]
        turned[i] = cos * first - sin * second
        turned[i + half] = sin * first + cos * second
    return turned


def sylvester(size: int) -> list[list[float]]:
    """The Hadamard matrix whose sign counts the bits that row and column have in common, over the root of its size."""
    if size < 1 or bin(size).count("1") != 1:
        raise ValueError("the size is not a power of two")
    return [[(-1.0) ** bin(row & column).count("1") / math.sqrt(size) for column in range(size)] for row in range(size)]


def hadamard(vector: Sequence[float]) -> list[float]:
    """The vector times the Hadamard matrix of its size."""
    return [dot(row, vector) for row in sylvester(len(vector))]


def softmax_scale(nope_head_dim: int, rope_head_dim: int, factor: float, mscale_all_dim: float) -> float:
    """One over the root of a key's width, times YaRN's amplitude twice: once for the query, once for the key."""
    amplitude = 1.0
    if factor > 1:
        amplitude += 0.1 * mscale_all_dim * math.log(factor)
    return amplitude * amplitude / math.sqrt(nope_head_dim + rope_head_dim)


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """The sum of products, from the left."""
    total = 0.0
    for left, right in zip(a, b, strict=True):
        total += float(left) * float(right)
    return total


class Keys(NamedTuple):
    """What the cache holds of one token."""

    latent: list[float]
    rope_key: list[float]
    index_key: list[float]


def latent_key(
    row: np.ndarray, position: int, wkv_a: np.ndarray, kv_norm: Sequence[float], freqs: Sequence[np.float32], eps: float
) -> tuple[list[float], list[float]]:
    """(normed latent, turned rope key) of one token: the first channels of one projection, and the last ones."""
    both = np.dot(wkv_a, row)
    rank = len(kv_norm)
    return compressor.rms_norm(both[:rank], kv_norm, eps), rope.rotate(both[rank:], position, freqs)


def query_heads(
    qr: Sequence[float], position: int, wq_b: np.ndarray, nope_head_dim: int, freqs: Sequence[np.float32]
) -> list[tuple[list[float], list[float]]]:
    """(plain part, turned part) of every head of one query."""
    flat = np.dot(wq_b, qr)
    width = nope_head_dim + 2 * len(freqs)
    heads = []
    for first in range(0, len(flat), width):
        plain, turning = flat[first : first + nope_head_dim], flat[first + nope_head_dim : first + width]
        heads.append(([float(channel) for channel in plain], rope.rotate(turning, position, freqs)))
    return heads


def token_index_key(
    row: np.ndarray,
    position: int,
    wk: np.ndarray,
    k_norm: Sequence[float],
    k_norm_bias: Sequence[float],
    freqs: Sequence[np.float32],
) -> list[float]:
    """The index key of one token."""
    return hadamard(half_rotate(layer_norm(np.dot(wk, row), k_norm, k_norm_bias, LAYER_NORM_EPS), position, freqs))


def token_index_heads(
    qr: Sequence[float], position: int, wq_b: np.ndarray, width: int, freqs: Sequence[np.float32]
) -> list[list[float]]:
    """The index heads of one query."""
    flat = np.dot(wq_b, qr)
    return [hadamard(half_rotate(flat[h : h + width], position, freqs)) for h in range(0, len(flat), width)]


def attend(
    heads: Sequence[tuple[Sequence[float], Sequence[float]]],
    keys: Sequence[tuple[Sequence[float], Sequence[float]]],
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    scale: float,
) -> tuple[list[list[float]], list[float]]:
    """(out [H][v_head_dim], lse [H]) of one query over the latents and rope keys that it chose, and over no other.

    Each head has its own keys and values, made of the latents; the rope key is the same for all heads.
    """
    up_keys, up_values = np.asarray(w_uk, np.float64), np.asarray(w_uv, np.float64)
    out, lse = [], []
    for (plain, turned), up_key, up_value in zip(heads, up_keys, up_values, strict=True):
        logits, values = [], []
        for latent, rope_key in keys:
            logits.append(scale * (dot(plain, np.dot(up_key, latent)) + dot(turned, rope_key)))
            values.append(np.dot(up_value, latent))
        mixed = [0.0] * len(up_value)
        if not logits:
            out.append(mixed)
            lse.append(-math.inf)
            continue
        highest = max(logits)
        weights = [math.exp(logit - highest) for logit in logits]
        total = sum(weights)
        for weight, value in zip(weights, values, strict=True):
            for channel, number in enumerate(value):
                mixed[channel] += weight / total * float(number)
        out.append(mixed)
        lse.append(highest + math.log(total))
    return out, lse


class Layer(NamedTuple):
    """One layer on one request: for every token of the step its output, choice and scores, and all tokens' keys."""

    outputs: list[list[float]]
    chosen: list[list[int]]
    scores: list[list[float]]
    keys: list[Keys]


def layer(
    x: ArrayLike,
    num_computed: int,
    weights: Mapping[str, ArrayLike],
    config: Mapping[str, Any],
    given: Sequence[Iterable[int]] | None = None,
) -> Layer:
    """One layer on the tokens from num_computed on of a request whose rows, from position 0, are x [L, hidden].

    weights: wq_a [q_lora, hidden], q_norm [q_lora], wq_b [H*(nope + rope), q_lora], wkv_a [kv_lora + rope, hidden],
      kv_norm [kv_lora], w_uk [H, nope, kv_lora], w_uv [H, v, kv_lora], wo [hidden, H*v]; idx_wq_b [Hi*Di, q_lora],
      idx_wk [Di, hidden], idx_k_norm, idx_k_norm_bias [Di], idx_weights_proj [Hi, hidden].
    config: nope_head_dim, rope_head_dim, index_n_heads, index_head_dim, index_topk, eps, rope_factor, mscale_all_dim,
      freqs (fp32, rope_head_dim / 2 of them).
    given: per token of the step the tokens to attend to instead of its own choice; -1 in it is no token.
    """
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    freqs, eps, width = config["freqs"], config["eps"], config["index_head_dim"]
    if 2 * len(freqs) != config["rope_head_dim"]:
        raise ValueError("one frequency per pair of rope channels")
    scale = softmax_scale(
        config["nope_head_dim"], config["rope_head_dim"], config["rope_factor"], config["mscale_all_dim"]
    )
    rows = np.asarray(x, dtype=np.float64)
    keys = []
    for p, row in enumerate(rows):
        index_key = token_index_key(row, p, w["idx_wk"], w["idx_k_norm"], w["idx_k_norm_bias"], freqs)
        keys.append(Keys(*latent_key(row, p, w["wkv_a"], w["kv_norm"], freqs, eps), index_key))

    done = Layer([], [], [], keys)
    for p in range(num_computed, len(rows)):
        qr = compressor.rms_norm(np.dot(w["wq_a"], rows[p]), w["q_norm"], eps)
        index_heads = token_index_heads(qr, p, w["idx_wq_b"], width, freqs)
        gains = np.dot(w["idx_weights_proj"], rows[p]) / math.sqrt(config["index_n_heads"]) / math.sqrt(width)
        # A token sees itself and what came before it.
        scores = [indexer.score(index_heads, gains, keys[s].index_key) for s in range(p + 1)]
        chosen = indexer.select(scores, p + 1, config["index_topk"])
        if given is not None:
            chosen = [int(token) for token in given[p - num_computed]]
        seen = sorted(set(chosen) - {-1})
        if seen and not 0 <= seen[0] <= seen[-1] <= p:
            raise ValueError("a given token is not visible to its query")
        heads = query_heads(qr, p, w["wq_b"], config["nope_head_dim"], freqs)
        out, _ = attend(heads, [keys[s][:2] for s in seen], w["w_uk"], w["w_uv"], scale)
        joined = [value for head in out for value in head]
        done.outputs.append([float(value) for value in np.dot(w["wo"], joined)])
        done.chosen.append(chosen)
        done.scores.append(scores)
    return done


def batch(
    histories: Sequence[ArrayLike],
    num_computed: Sequence[int],
    weights: Mapping[str, ArrayLike],
    config: Mapping[str, Any],
) -> list[Layer]:
    """Every request of a step by itself: none sees another's tokens."""
    return [layer(x, computed, weights, config) for x, computed in zip(histories, num_computed, strict=True)]
