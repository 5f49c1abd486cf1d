"""Codecs that operators need: int8 index keys and queries with their score, and int8 projections (W8A8).

A vector is stored as int8 values and one scale, ``amax / 127``; symmetric, no zero point. Score and product repeat the
operators' roundings step by step: a selection made from int8 can only be compared with the same int8 selection. The
scales of index vectors are float16, those of projections, of which each token and each output channel has one, float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.compressor import rms_norm
from dsacp_ref.extents import FLOATS, Float
from dsacp_ref.spec import check_array, check_choice, check_number, check_record, contract_error

__all__ = [
    "QuantizedRows",
    "QuantizedVectors",
    "QuantizedWeight",
    "dequantized_int8",
    "int8_index_scores",
    "quant_matmul",
    "quantized_int8",
    "quantized_rows",
    "quantized_weight",
    "rms_norm_quantized",
]

INT8_MAX = 127
EXACT_WIDTH = (2**31 - 1) // 128**2  # so many products of any two int8 sum up within int32


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
    amax = magnitudes(name, x)
    if not (amax / np.float32(INT8_MAX) <= np.finfo(np.float16).max).all():
        raise contract_error(name, "be finite, with scales that float16 holds", float(amax.max()), "norm it first")
    values, scales = codes(x, amax)
    return QuantizedVectors(values, scales.astype(np.float16))


def magnitudes(name: str, x: Float) -> NDArray[np.float32]:
    """The largest magnitude of each vector of an argument of this name; infinite beyond float32."""
    if not hasattr(x, "shape") or len(x.shape) < 1 or x.shape[-1] < 1:
        raise contract_error(name, "have shape [..., d] with d >= 1", getattr(x, "shape", type(x).__name__))
    check_array(name, x, FLOATS, x.shape)
    with np.errstate(over="ignore"):  # refused by whoever asks
        return np.abs(x).max(axis=-1).astype(np.float32)  # type: ignore[no-any-return]


def codes(x: Float, amax: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(values, scales) of finite vectors of these largest magnitudes."""
    scales = amax / np.float32(INT8_MAX)
    safe = np.where(scales > 0, scales, np.float32(1))[..., None]
    values = np.clip(np.rint(x.astype(np.float32) / safe), -INT8_MAX, INT8_MAX).astype(np.int8)
    return values, scales


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


class QuantizedRows(NamedTuple):
    """The rows of a step in int8 with one scale a token, for a product that takes both.

    Fields:
        values: int8[num_tokens, in].
        scales: float32[num_tokens], step of one unit; 0 for a row of zeros.

    >>> QuantizedRows._fields
    ('values', 'scales')
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float32]


class QuantizedWeight(NamedTuple):
    """A matrix in int8 with one scale an output channel.

    Fields:
        values: int8[out, in].
        scales: float32[out], step of one unit; 0 for a channel of zeros.

    >>> QuantizedWeight._fields
    ('values', 'scales')
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float32]


def quantized_rows(x: Float) -> QuantizedRows:
    """The rows in int8, each scaled by its own largest magnitude.

    ::

        x  [ 0.5  -1.0  0.25 ]    scale 1/127    values [ 64  -127  32 ]     (63.5 rounds to even)

    Args:
        x: float32 or float64 [num_tokens, in], finite in float32, with at least one channel.

    Returns:
        QuantizedRows: values rounded half to even with the float32 scale.

    Raises:
        ContractError: dtype or shape, or a value that is not finite.

    Source: vllm-ascend W8A8; operator npu_dynamic_quant, per token.

    >>> coded = quantized_rows(np.array([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]))
    >>> coded.values.tolist(), [f"{s:.6f}" for s in coded.scales]
    ([[64, -127, 32], [0, 0, 0]], ['0.007874', '0.000000'])
    """
    check_array("x", x, FLOATS, ("num_tokens", "in"))
    return QuantizedRows(*coded_rows("x", x))


def quantized_weight(weight: Float) -> QuantizedWeight:
    """The matrix in int8, each output channel scaled by its own largest magnitude.

    Args:
        weight: float32 or float64 [out, in], finite in float32, with at least one column.

    Returns:
        QuantizedWeight: values rounded half to even with the float32 scale.

    Raises:
        ContractError: dtype or shape, or a value that is not finite.

    Source: W8A8 checkpoints for Ascend, symmetric per output channel.

    >>> quantized_weight(np.array([[2.0, -254.0], [127.0, 2.5]])).values.tolist()
    [[1, -127], [127, 2]]
    """
    check_array("weight", weight, FLOATS, ("out", "in"))
    return QuantizedWeight(*coded_rows("weight", weight))


def coded_rows(name: str, x: Float) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(values, scales) of the vectors of an argument of this name."""
    amax = magnitudes(name, x)
    check_codable(name, amax)
    return codes(x, amax)


def check_codable(name: str, amax: NDArray[np.float32]) -> None:
    """Refuse vectors of an argument of this name that no float32 scale fits."""
    if not np.isfinite(amax).all():
        raise contract_error(name, "be finite in float32", float(amax.max()), "inf and NaN have no code")


def rms_norm_quantized(x: Float, weight: Float, eps: float) -> QuantizedRows:
    """The rows after their RMS norm in int8, with no rounding between norm and code.

    Args:
        x: float32 or float64 [num_tokens, d], finite.
        weight: float[d].
        eps: number, added to the mean square, > 0.

    Returns:
        QuantizedRows: `quantized_rows` of the norm.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: operator npu_rms_norm_dynamic_quant, as vllm-ascend codes the query latent.

    >>> rms_norm_quantized(np.array([[3.0, 4.0]]), np.ones(2), 1e-6).values.tolist()
    [[95, 127]]
    """
    check_array("x", x, FLOATS, ("num_tokens", "d"))
    check_codable("x", magnitudes("x", x))
    check_array("weight", weight, FLOATS, (x.shape[1],), "one weight a channel")
    eps = check_number("eps", eps, above=0.0)
    return QuantizedRows(*coded_rows("the norm of x", rms_norm(x, weight, eps)))


def quant_matmul(rows: QuantizedRows, weight: QuantizedWeight, *, dtype: str) -> Float:
    """The product of coded rows with a coded matrix, as the operator computes it, roundings included.

    ::

        rows . channel                        exact in int32, then float32
        times channel scale, then row scale   float32
        output                                one cast

    Args:
        rows: QuantizedRows, values int8[num_tokens, in], 1 <= in <= 131071.
        weight: QuantizedWeight, values int8[out, in].
        dtype: str, of the output: ``"float32"`` or ``"float64"``; the computation is the same for both.

    Returns:
        float[num_tokens, out] of this dtype.

    Raises:
        ContractError: a shape or dtype does not hold, or sums may leave int32.

    Source: operator npu_quant_matmul with pertoken_scale, from its description; not run on an NPU here.

    >>> rows = QuantizedRows(np.array([[2, -1]], np.int8), np.array([0.5], np.float32))
    >>> weight = QuantizedWeight(np.array([[3, 4], [5, 0]], np.int8), np.array([1.0, 0.25], np.float32))
    >>> quant_matmul(rows, weight, dtype="float32").tolist()
    [[1.0, 1.25]]
    """
    check_product(rows, weight)
    check_choice("dtype", dtype, FLOATS)
    dots = rows.values.astype(np.int32) @ weight.values.T.astype(np.int32)
    output: Float = (dots.astype(np.float32) * weight.scales * rows.scales[:, None]).astype(dtype)
    return output


def check_product(rows: QuantizedRows, weight: QuantizedWeight) -> None:
    """Refuse factors that do not fit, or whose sums may leave int32."""
    check_record("rows", rows, QuantizedRows)
    check_record("weight", weight, QuantizedWeight)
    check_array("rows.values", rows.values, ("int8",), ("num_tokens", "in"))
    check_array("rows.scales", rows.scales, ("float32",), rows.values.shape[:1], "one scale a token")
    width = rows.values.shape[1]
    check_array("weight.values", weight.values, ("int8",), ("out", width), "as wide as the rows")
    check_array("weight.scales", weight.scales, ("float32",), weight.values.shape[:1], "one scale an output channel")
    if not 1 <= width <= EXACT_WIDTH:
        raise contract_error("rows.values", f"have 1 to {EXACT_WIDTH} channels", width, "wider sums may leave int32")
