"""Codecs that operators need: int8 index keys and queries, and the int8 index score as the operator computes it.

A vector is stored as int8 values and one scale, ``amax / 127``; symmetric, no zero point. The score repeats the
operator's roundings step by step, because a selection made from int8 can only be compared with the same int8 selection.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.extents import FLOATS, Float
from dsacp_ref.spec import check_array, check_record, contract_error

__all__ = ["QuantizedVectors", "dequantized_int8", "int8_index_scores", "quantized_int8"]

INT8_MAX = 127


class QuantizedVectors(NamedTuple):
    """Vectors in int8 with one scale each.

    Fields:
        values: int8[..., d].
        scales: float16[...], step of one unit; 0 for a zero vector.

    >>> QuantizedVectors._fields
    ('values', 'scales')
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float16]


def quantized_int8(x: Float) -> QuantizedVectors:
    """The vectors in int8, each scaled by its own largest magnitude.

    ::

        x  [ 0.5  -1.0  0.25 ]    scale 1/127    values [ 64  -127  32 ]     (63.5 rounds to even)

    Args:
        x: float32 or float64 [..., d], finite, largest magnitude of a vector below 127 * 65504.

    Returns:
        QuantizedVectors: values rounded half to even with the float32 scale, which is then stored in float16.

    Raises:
        ContractError: dtype or shape, or a value that is not finite or too large for the scale's float16.

    Source: vllm-ascend npu_dynamic_quant of index queries and keys; operator npu_vllm_quant_lightning_indexer.

    >>> coded = quantized_int8(np.array([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]))
    >>> coded.values.tolist(), [f"{s:.6f}" for s in coded.scales]
    ([[64, -127, 32], [0, 0, 0]], ['0.007874', '0.000000'])
    """
    return coded_vectors("x", x)


def coded_vectors(name: str, x: Float) -> QuantizedVectors:
    """The vectors of an argument of this name in int8."""
    if not hasattr(x, "shape") or len(x.shape) < 1 or x.shape[-1] < 1:
        raise contract_error(name, "have shape [..., d] with d >= 1", getattr(x, "shape", type(x).__name__))
    check_array(name, x, FLOATS, x.shape)
    with np.errstate(over="ignore"):  # refused below
        amax = np.abs(x).max(axis=-1).astype(np.float32)
    scales = amax / np.float32(INT8_MAX)
    if not np.isfinite(scales).all() or (scales > np.finfo(np.float16).max).any():
        raise contract_error(name, "be finite, with scales that float16 holds", float(amax.max()), "norm it first")
    safe = np.where(scales > 0, scales, np.float32(1))[..., None]
    values = np.clip(np.rint(x.astype(np.float32) / safe), -INT8_MAX, INT8_MAX).astype(np.int8)
    return QuantizedVectors(values, scales.astype(np.float16))


def dequantized_int8(coded: QuantizedVectors) -> NDArray[np.float32]:
    """The vectors that the codes stand for.

    Args:
        coded: QuantizedVectors.

    Returns:
        float32[..., d].

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: as `quantized_int8`.

    >>> dequantized_int8(QuantizedVectors(np.array([[4, -8]], np.int8), np.array([0.5], np.float16))).tolist()
    [[2.0, -4.0]]
    """
    values, scales = checked_codes("coded", coded)
    return values.astype(np.float32) * scales.astype(np.float32)[..., None]


def checked_codes(name: str, coded: QuantizedVectors) -> QuantizedVectors:
    """The codes, once values and scales are found to fit."""
    check_record(name, coded, QuantizedVectors)
    values, scales = coded
    check_array(f"{name}.values", values, ("int8",), getattr(values, "shape", ()))
    check_array(f"{name}.scales", scales, ("float16",), values.shape[:-1], "one scale a vector")
    return coded


def int8_index_scores(
    index_q: QuantizedVectors, index_weights: NDArray[np.float16], index_keys: QuantizedVectors
) -> NDArray[np.float32]:
    """The index scores as the int8 operator of A2 and A3 computes them, roundings included.

    ::

        relu(q . k) / 1024      exact in int32, then float16
        weight * q_scale        float16
        sum over heads          float32, then times k_scale

    The factor 1/1024 is part of every score: it changes no order.

    Args:
        index_q: QuantizedVectors, values int8[num_tokens, index_n_heads, d], scales [num_tokens, index_n_heads].
        index_weights: float16[num_tokens, index_n_heads], signed head weights.
        index_keys: QuantizedVectors, values int8[num_keys, d], scales [num_keys].

    Returns:
        float32[num_tokens, num_keys].

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: operator npu_vllm_quant_lightning_indexer, read from its kernel; not run on an NPU here.

    >>> q = QuantizedVectors(np.array([[[64, 0]]], np.int8), np.array([[0.5]], np.float16))
    >>> k = QuantizedVectors(np.array([[32, 5], [-32, 5]], np.int8), np.array([1.0, 1.0], np.float16))
    >>> int8_index_scores(q, np.array([[1.0]], np.float16), k).tolist()
    [[1.0, 0.0]]
    """
    q, q_scales = checked_codes("index_q", index_q)
    k, k_scales = checked_codes("index_keys", index_keys)
    if q.ndim != 3 or k.ndim != 2 or q.shape[2] != k.shape[1]:
        raise contract_error(
            "index_q", "hold [tokens, heads, d] against keys [keys, d]", f"{list(q.shape)} and {list(k.shape)}"
        )
    check_array("index_weights", index_weights, ("float16",), q_scales.shape, "one weight a head")
    dots = np.einsum("thd,kd->thk", q, k, dtype=np.int32, casting="safe")
    hits = (np.maximum(dots, 0) / np.float32(1024)).astype(np.float16)
    weights = index_weights * q_scales
    weighted = np.einsum("th,thk->tk", weights.astype(np.float32), hits.astype(np.float32))
    scores: NDArray[np.float32] = weighted * k_scales.astype(np.float32)
    return scores
