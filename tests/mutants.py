"""One detail of the layer broken at a time: what a comparison with another implementation must be able to see.

Each mutant patches one reference function. Beside it stands what it moves, as largest error over the output's largest
value, per ratio: measured on an implementation of its own, at the released head sizes, 520 tokens in ragged chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from dsacp_ref import attention, compressor, indexer, layer, rope
from dsacp_ref.compressor import ProjectedRows
from dsacp_ref.config import AttentionConfig

RATIOS = (1, 4, 128)


class Mutant(NamedTuple):
    """How to break the layer, and what that is known to move."""

    break_it: Callable[[pytest.MonkeyPatch, AttentionConfig, int], None]
    known: dict[int, float]  # by ratio, where the detail exists


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, *known: float | None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a mutant under its name, with its known effect at ratios 1, 4 and 128."""

    def enter(break_it: Callable[..., None]) -> Callable[..., None]:
        numbers = {ratio: number for ratio, number in zip(RATIOS, known, strict=True) if number is not None}
        MUTANTS[name] = Mutant(break_it, numbers)
        return break_it

    return enter


def wrapped(patch: pytest.MonkeyPatch, module: Any, name: str, change: Callable[..., Any]) -> None:
    """module.name(*args) becomes change(the old function, *args)."""
    right = getattr(module, name)
    patch.setattr(module, name, lambda *args, **options: change(right, *args, **options))


# --- what a query sees ---


@mutant("window 127 instead of 128", 9.0e-2, 2.6e-2, 3.1e-2)
def narrow_window(patch, config, ratio):
    wrapped(patch, attention, "window_starts", lambda right, positions, size: right(positions, size - 1))


@mutant("window 129", 5.7e-2, 3.1e-2, 2.7e-2)
def wide_window(patch, config, ratio):
    wrapped(patch, attention, "window_starts", lambda right, positions, size: right(positions, size + 1))


def shifted_visibility(patch, shift):
    for module in (attention, indexer):
        wrapped(patch, module, "visible_entries", lambda _, positions, r: (positions + np.int32(shift)) // np.int32(r))


@mutant("entry visible one token early", None, 4.8e-1, 2.0e-2)
def early(patch, config, ratio):
    shifted_visibility(patch, 2)


@mutant("entry visible one token late", None, 5.1e-1, 5.0e-2)
def late(patch, config, ratio):
    shifted_visibility(patch, 0)


# --- pooling ---


def entry_positions(patch, place):
    wrapped(patch, compressor, "rope_table", lambda right, positions, freqs: right(place(positions), freqs))


@mutant("entry RoPE at the window's last token", None, 8.7e-2, 6.0e-2)
def rope_at_last(patch, config, ratio):
    entry_positions(patch, lambda positions: positions + np.int32(ratio - 1))


@mutant("entry RoPE at index w", None, 1.4e-1, 3.3e-2)
def rope_at_index(patch, config, ratio):
    entry_positions(patch, lambda positions: positions // np.int32(ratio))


@mutant("entry without RoPE", None, 1.4e-1, 4.9e-2)
def rope_nowhere(patch, config, ratio):
    entry_positions(patch, np.zeros_like)


@mutant("Ca and Cb swapped", None, 9.9e-1, None)
def swapped(patch, config, ratio):
    def change(right, x, positions, weights):
        rows = right(x, positions, weights)
        return ProjectedRows(*(np.roll(part, len(weights.norm_weight), axis=1) for part in rows))

    wrapped(patch, layer, "projected_rows", change)


@mutant("no overlap", None, 4.1e-1, None)
def no_overlap(patch, config, ratio):
    def change(right, *args):
        kv, score = right(*args)
        score[:, :ratio] = -np.inf
        return kv, score

    wrapped(patch, compressor, "pooled_slots", change)


@mutant("first window: score 0 instead of -inf", None, 2.3e-1, None)
def zero_score(patch, config, ratio):
    def change(right, *args):
        kv, score = right(*args)
        return kv, np.where(np.isneginf(score), 0, score)

    wrapped(patch, compressor, "pooled_slots", change)


@mutant("no ape", None, 1.5e-1, 1.7e-2)
def no_ape(patch, config, ratio):
    def change(right, x, positions, weights):
        return right(x, positions, weights._replace(ape=np.zeros_like(weights.ape)))

    wrapped(patch, layer, "projected_rows", change)


@mutant("one softmax for all channels", None, 2.9e-1, 5.8e-2)
def one_softmax(patch, config, ratio):
    def change(right, kv, score):
        return right(kv, np.broadcast_to(score.mean(axis=2, keepdims=True), score.shape))

    wrapped(patch, compressor, "softmax_mean", change)


@mutant("no pool norm", None, 2.7e-1, 7.7e-2)
def no_pool_norm(patch, config, ratio):
    wrapped(patch, compressor, "rms_norm", lambda _, x, weight, eps: x)


@mutant("pool norm after RoPE", None, 8.9e-2, 5.5e-3)
def norm_after_rope(patch, config, ratio):
    right_norm, right_rope, kept = compressor.rms_norm, compressor.apply_rope, []

    def keep(x, weight, eps):
        kept[:] = [weight, eps]
        return x

    patch.setattr(compressor, "rms_norm", keep)
    patch.setattr(compressor, "apply_rope", lambda x, cos, sin: right_norm(right_rope(x, cos, sin), *kept))


# --- queries, rotation, sink ---


@mutant("no per-head q norm", 4.1e-1, 3.0e-1, 2.0e-1)
def no_q_norm(patch, config, ratio):
    wrapped(patch, layer, "rms_norm", lambda right, x, weight, eps: x if weight is None else right(x, weight, eps))


@mutant("q norm over all heads jointly", 3.1e-2, 2.2e-2, 1.4e-2)
def joint_q_norm(patch, config, ratio):
    def change(right, x, weight, eps):
        if weight is not None:
            return right(x, weight, eps)
        return right(x.reshape(len(x), -1), None, eps).reshape(x.shape)

    wrapped(patch, layer, "rms_norm", change)


def turned_otherwise(patch, first, second):
    """Pairs made of other channels; both slices count among all channels."""

    def change(_, x, cos, sin):
        rows = (len(x),) + (1,) * (x.ndim - 2) + (cos.shape[1],)
        c, s = cos.reshape(rows).astype(x.dtype), sin.reshape(rows).astype(x.dtype)
        out, a, b = x.copy(), x[..., first], x[..., second]
        out[..., first], out[..., second] = a * c - b * s, b * c + a * s
        return out

    wrapped(patch, rope, "turned", change)


@mutant("half-split RoPE pairs", 2.8e-1, 2.4e-1, 2.7e-1)
def half_split(patch, config, ratio):
    half = config.rope_head_dim // 2
    turned_otherwise(patch, slice(-2 * half, -half), slice(-half, None))


@mutant("RoPE on the first channels", 3.1e-1, 3.1e-1, 3.8e-1)
def first_channels(patch, config, ratio):
    width = config.rope_head_dim
    turned_otherwise(patch, slice(0, width, 2), slice(1, width, 2))


@mutant("no inverse RoPE on the output", 2.1e-1, 1.8e-1, 2.8e-1)
def no_inverse(patch, config, ratio):
    wrapped(patch, layer, "apply_inverse_rope", lambda _, out, cos, sin: out)


@mutant("no sink", 8.6e-1, 7.8e-1, 7.4e-1)
def no_sink(patch, config, ratio):
    wrapped(patch, attention, "share_beside_sink", lambda _, lse, sink: np.ones_like(lse))


@mutant("YaRN also on ratio 0", 2.8e-3, None, None)
def yarn_everywhere(patch, config, ratio):
    stretch = {
        "factor": config.rope_factor,
        "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow,
        "original_max_position": config.rope_original_max_position,
    }
    wrapped(patch, layer, "rope_frequencies", lambda _, theta, dim: rope.yarn_frequencies(theta, dim, **stretch))


@mutant("no YaRN on ratio > 0", None, 3.6e-2, 3.3e-3)
def no_yarn(patch, config, ratio):
    wrapped(patch, layer, "yarn_frequencies", lambda _, theta, dim, **stretch: rope.rope_frequencies(theta, dim))


@mutant("theta 10000 on ratio > 0", None, 1.8e-1, 2.0e-1)
def small_theta(patch, config, ratio):
    wrapped(patch, layer, "yarn_frequencies", lambda right, theta, dim, **stretch: right(10000.0, dim, **stretch))


@mutant("YaRN amplitude 1.277", 2.5e-1, 2.1e-1, 2.7e-1)
def amplitude(patch, config, ratio):
    def change(right, positions, freqs):
        return rope.RopeTable(*(part * np.float32(1.2773) for part in right(positions, freqs)))

    for module in (layer, compressor):
        wrapped(patch, module, "rope_table", change)


# --- the choice ---


@mutant("index q not rotated", None, 1.2e-1, None)
def plain_index_queries(patch, config, ratio):
    def change(right, qr, wq_b, cos, sin, **options):
        return right(qr, wq_b, np.ones_like(cos), np.zeros_like(sin), **options)

    wrapped(patch, layer, "index_queries", change)


@mutant("no relu in the index score", None, 7.7e-2, None)
def no_relu(patch, config, ratio):
    wrapped(patch, indexer, "index_scores", lambda _, q, w, k: np.einsum("thd,th,kd->tk", q, w, k, optimize=True))


@mutant("absolute index weights", None, 1.7e-1, None)
def absolute_weights(patch, config, ratio):
    wrapped(patch, layer, "index_head_weights", lambda right, *args, **options: np.abs(right(*args, **options)))


@mutant("top-k off by one", None, 3.5e-2, None)
def one_entry_less(patch, config, ratio):
    def change(right, *args, index_topk, **options):
        chosen = right(*args, index_topk=index_topk - 1, **options)
        return np.pad(chosen, ((0, 0), (0, 1)), constant_values=-1)

    wrapped(patch, layer, "lightning_indexer", change)
