"""Mirror of `dsacp_ref.quant` over torch. Runs on the device of its arguments and never waits for it.

Every rounding is the reference's, so the codes are too, bit for bit; in a score only the order of the float32 sum over
heads is free. bfloat16 and float16 vectors are coded from float32.
"""

from __future__ import annotations

from typing import NamedTuple

from dsacp_npu._tensors import Float, check_floats, check_tensor, check_torch, torch, values_known
from dsacp_npu._tiles import KEY_BLOCK, KEY_TILE, head_hits, head_sums, whole_tiles
from dsacp_ref.spec import UnsupportedError, check_record, contract_error

__all__ = ["QuantizedVectors", "dequantized_int8", "int8_index_scores", "quantized_int8"]

INT8_MAX = 127
FLOAT16_MAX = 65504.0
EXACT_CHANNELS = 1024  # so many products of two int8 sum up exactly in float32
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
    check_torch(name, x)
    if not hasattr(x, "shape") or len(x.shape) < 1 or x.shape[-1] < 1:
        got = tuple(x.shape) if hasattr(x, "shape") else type(x).__name__
        raise contract_error(name, "have shape [..., d] with d >= 1", got)
    check_floats(name, x, tuple(x.shape))
    amax = x.abs().amax(dim=-1).float()
    # Over a tensor: some devices divide by a plain number as they multiply by its rounded inverse.
    scales = amax / torch.full_like(amax, INT8_MAX)
    if values_known(x) and not (scales <= FLOAT16_MAX).all():
        raise contract_error(name, "be finite, with scales that float16 holds", float(amax.max()), "norm it first")
    safe = torch.where(scales > 0, scales, 1.0)[..., None]
    values = (x.float() / safe).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return QuantizedVectors(values, scales.to(torch.float16))


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
