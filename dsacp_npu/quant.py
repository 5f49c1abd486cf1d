"""Mirror of `dsacp_ref.quant` over torch. Runs on the device of its arguments and never waits for it.

Every rounding is the reference's, so codes and products are too, bit for bit; only the order of a float sum is free,
over the heads of a score and over the channels of a norm. bfloat16 and float16 vectors are coded from float32.
"""

from __future__ import annotations

from typing import NamedTuple

from dsacp_npu._tensors import (
    FLOATS,
    LOW_PRECISION,
    Float,
    check_floats,
    check_tensor,
    check_torch,
    computing_dtype,
    torch,
    values_known,
)
from dsacp_npu._tiles import KEY_BLOCK, KEY_TILE, head_hits, head_sums, whole_tiles
from dsacp_npu.compressor import rms_norm
from dsacp_ref.spec import UnsupportedError, check_choice, check_number, check_record, contract_error

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
FLOAT16_MAX = 65504.0
EXACT_CHANNELS = 1024  # so many products of two int8 sum up exactly in float32
EXACT_WIDTH = (2**31 - 1) // 128**2  # and so many within int32
SCORED_NUMBERS = 1 << 21  # numbers scored at a time, a key and head each


class QuantizedVectors(NamedTuple):
    """Mirror of `dsacp_ref.quant.QuantizedVectors`."""

    values: torch.Tensor
    scales: torch.Tensor


def quantized_int8(x: Float) -> QuantizedVectors:
    """Mirror of `dsacp_ref.quant.quantized_int8`.

    Limits: bfloat16 and float16 go by way of float32.
    """
    return coded_vectors("x", x)


def coded_vectors(name: str, x: Float) -> QuantizedVectors:
    """The vectors of an argument of this name in int8."""
    amax = magnitudes(name, x)
    if values_known(x) and not (scales_of(amax) <= FLOAT16_MAX).all():
        raise contract_error(name, "be finite, with scales that float16 holds", float(amax.max()), "norm it first")
    values, scales = codes(x, amax)
    return QuantizedVectors(values, scales.to(torch.float16))


def magnitudes(name: str, x: Float) -> torch.Tensor:
    """The largest magnitude of each vector of an argument of this name in float32; infinite beyond float32."""
    check_vectors(name, x)
    return x.abs().amax(dim=-1).float()


def check_vectors(name: str, x: Float) -> None:
    """Refuse what is no array of vectors with at least one channel."""
    check_torch(name, x)
    if not hasattr(x, "shape") or len(x.shape) < 1 or x.shape[-1] < 1:
        got = tuple(x.shape) if hasattr(x, "shape") else type(x).__name__
        raise contract_error(name, "have shape [..., d] with d >= 1", got)
    check_floats(name, x, tuple(x.shape))


def scales_of(amax: torch.Tensor) -> torch.Tensor:
    """The float32 scales of vectors of these largest magnitudes."""
    # Over a tensor: some devices divide by a plain number as they multiply by its rounded inverse.
    return amax / torch.full_like(amax, INT8_MAX)


def codes(x: Float, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales) of finite vectors of these largest magnitudes."""
    scales = scales_of(amax)
    safe = torch.where(scales > 0, scales, 1.0)[..., None]
    return (x.float() / safe).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales


def dequantized_int8(coded: QuantizedVectors) -> torch.Tensor:
    """Mirror of `dsacp_ref.quant.dequantized_int8`."""
    values, scales = checked_codes("coded", coded)
    return values.float() * scales.float()[..., None]


def checked_codes(name: str, coded: QuantizedVectors) -> QuantizedVectors:
    """The codes, once values and scales are found to fit."""
    check_record(name, coded, QuantizedVectors)
    values, scales = coded
    check_tensor(f"{name}.values", values, ("int8",), tuple(getattr(values, "shape", ())))
    check_tensor(f"{name}.scales", scales, ("float16",), tuple(values.shape[:-1]), "one scale a vector")
    return coded


def int8_index_scores(
    index_q: QuantizedVectors, index_weights: torch.Tensor, index_keys: QuantizedVectors
) -> torch.Tensor:
    """Mirror of `dsacp_ref.quant.int8_index_scores`.

    Limits: vectors of up to 1024 channels, whose products float32 sums up exactly.
    """
    q, q_scales = checked_codes("index_q", index_q)
    k, k_scales = checked_codes("index_keys", index_keys)
    if q.ndim != 3 or k.ndim != 2 or q.shape[2] != k.shape[1]:
        raise contract_error(
            "index_q", "hold [tokens, heads, d] against keys [keys, d]", f"{list(q.shape)} and {list(k.shape)}"
        )
    check_tensor("index_weights", index_weights, ("float16",), tuple(q_scales.shape), "one weight a head")
    (num_tokens, num_heads, _), num_keys = q.shape, len(k)
    if 0 in (num_tokens, num_heads, num_keys):
        return q_scales.new_zeros(num_tokens, num_keys, dtype=torch.float32)
    keys = QuantizedVectors(whole_tiles(k, 0, KEY_TILE), whole_tiles(k_scales, 0, KEY_TILE))
    step = max(1, SCORED_NUMBERS // (num_heads * min(len(keys.values), KEY_BLOCK)))
    scores = []
    for start in range(0, num_tokens, step):
        queries = slice(start, start + step)
        some = QuantizedVectors(q[queries], q_scales[queries])
        scores.append(coded_scores(some, index_weights[queries], keys))
    return torch.cat(scores)[:, :num_keys]


def coded_scores(q: QuantizedVectors, weights: torch.Tensor, keys: QuantizedVectors) -> torch.Tensor:
    """The scores of whole tiles of keys, [keys, d] or [tokens, keys, d]: float32 [tokens, keys]."""
    if q.values.shape[2] > EXACT_CHANNELS:
        raise UnsupportedError(
            f"int8 index scores must have vectors of at most {EXACT_CHANNELS} channels, got {q.values.shape[2]}; "
            "the sums of more are not exact in float32"
        )
    gains = (weights * q.scales).float()
    queries, parts = q.values.float(), []
    for first in range(0, keys.values.shape[-2], KEY_BLOCK):
        some = keys.values[..., first : first + KEY_BLOCK, :].float()
        hits = (head_hits(queries, some) * (1 / 1024)).to(torch.float16)
        parts.append(head_sums(gains, hits.float()))
    return torch.cat(parts, dim=1) * keys.scales.float()


class QuantizedRows(NamedTuple):
    """Mirror of `dsacp_ref.quant.QuantizedRows`."""

    values: torch.Tensor
    scales: torch.Tensor


class QuantizedWeight(NamedTuple):
    """Mirror of `dsacp_ref.quant.QuantizedWeight`."""

    values: torch.Tensor
    scales: torch.Tensor


def quantized_rows(x: Float) -> QuantizedRows:
    """Mirror of `dsacp_ref.quant.quantized_rows`.

    Limits: bfloat16 and float16 go by way of float32. Only values that can be read are found to be finite.
    """
    check_floats("x", x, ("num_tokens", "in"))
    return QuantizedRows(*coded_rows("x", x))


def quantized_weight(weight: Float) -> QuantizedWeight:
    """Mirror of `dsacp_ref.quant.quantized_weight`.

    Limits: as `quantized_rows`.
    """
    check_floats("weight", weight, ("out", "in"))
    return QuantizedWeight(*coded_rows("weight", weight))


def coded_rows(name: str, x: Float) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales) of the vectors of an argument of this name."""
    amax = magnitudes(name, x)
    check_codable(name, amax)
    return codes(x, amax)


def check_codable(name: str, amax: torch.Tensor) -> None:
    """Refuse vectors of an argument of this name that no float32 scale fits, where that can be read."""
    if values_known(amax) and not amax.isfinite().all():
        raise contract_error(name, "be finite in float32", float(amax.max()), "inf and NaN have no code")


def check_finite(name: str, x: Float) -> None:
    """Refuse vectors that have no codes; nothing is computed where values cannot be read."""
    check_vectors(name, x)
    if values_known(x):
        check_codable(name, magnitudes(name, x))


def check_normable(x: Float, weight: Float, eps: float) -> float:
    """eps, once rows and weights are found to give a norm that has codes."""
    check_floats("x", x, ("num_tokens", "d"))
    check_finite("x", x)
    check_floats("weight", weight, (x.shape[1],), "one weight a channel")
    return check_number("eps", eps, above=0.0)


def rms_norm_quantized(x: Float, weight: Float, eps: float) -> QuantizedRows:
    """Mirror of `dsacp_ref.quant.rms_norm_quantized`.

    Limits: as `quantized_rows`; the norm of short rows is coded as float32 has it.
    """
    eps = check_normable(x, weight, eps)
    return QuantizedRows(*coded_rows("the norm of x", rms_norm(x.to(computing_dtype(x.dtype)), weight, eps)))


def quant_matmul(rows: QuantizedRows, weight: QuantizedWeight, *, dtype: str) -> Float:
    """Mirror of `dsacp_ref.quant.quant_matmul`.

    Limits: the output may also be bfloat16 or float16.
    """
    check_product(rows, weight)
    check_choice("dtype", dtype, (*FLOATS, *LOW_PRECISION))
    dots = exact_dots(rows.values, weight.values).float()
    return (dots * weight.scales * rows.scales[:, None]).to(getattr(torch, dtype))


def check_product(rows: QuantizedRows, weight: QuantizedWeight) -> None:
    """Refuse factors that do not fit, or whose sums may leave int32."""
    check_record("rows", rows, QuantizedRows)
    check_record("weight", weight, QuantizedWeight)
    check_tensor("rows.values", rows.values, ("int8",), ("num_tokens", "in"))
    check_tensor("rows.scales", rows.scales, ("float32",), tuple(rows.values.shape[:1]), "one scale a token")
    width = rows.values.shape[1]
    check_tensor("weight.values", weight.values, ("int8",), ("out", width), "as wide as the rows")
    check_tensor("weight.scales", weight.scales, ("float32",), (len(weight.values),), "one scale an output channel")
    if not 1 <= width <= EXACT_WIDTH:
        raise contract_error("rows.values", f"have 1 to {EXACT_WIDTH} channels", width, "wider sums may leave int32")


def exact_dots(rows: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """The int32 products [rows, channels] of int8 vectors: no device multiplies int8 by a public name of torch.

    A slice is exact in float32, in any order of its sum, and where a device multiplies in TF32 or HF32.
    """
    dots = rows.new_zeros(len(rows), len(channels), dtype=torch.int32)
    for first in range(0, rows.shape[1], EXACT_CHANNELS):
        some = slice(first, first + EXACT_CHANNELS)
        dots += (rows[:, some].float() @ channels[:, some].float().T).int()
    return dots
