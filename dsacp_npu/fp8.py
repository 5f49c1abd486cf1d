"""Mirror of `dsacp_ref.fp8` over torch. Runs on the device of its arguments and never waits for it.

Every rounding is the reference's, so codes and bytes are too, bit for bit; only the order of a float32 sum is free,
over the channels and the heads of a score. bfloat16 and float16 vectors are coded from float32.
"""

from __future__ import annotations

from typing import NamedTuple

from dsacp_npu._tensors import (
    FLOATS,
    LOW_PRECISION,
    Float,
    check_tensor,
    dtype_name,
    torch,
    values_known,
)
from dsacp_npu._tiles import KEY_BLOCK, KEY_TILE, head_hits, head_sums, whole_tiles
from dsacp_npu.quant import SCORED_NUMBERS, check_finite
from dsacp_ref.spec import check_choice, check_int, check_record, contract_error

__all__ = [
    "FP8Vectors",
    "decoded_keys",
    "decoded_latents",
    "dequantized_fp8",
    "encoded_keys",
    "encoded_latents",
    "fp8_index_scores",
    "quantized_fp8",
]

E4M3_MAX = 448.0
SMALLEST_AMAX = 2.0**-107  # of a vector or a latent's group; below, it is coded as zeros
KEY_AMAX_FLOOR = 1e-4  # of a group of V4's keys
LATENT_GROUP = 128
KEY_GROUP = 64
KEY_LAYOUTS = ("gpu", "ascend")
SCALE_BIAS = 127
FRACTION_BITS = 23  # of float32, below its exponent


class FP8Vectors(NamedTuple):
    """Mirror of `dsacp_ref.fp8.FP8Vectors`."""

    values: torch.Tensor
    scales: torch.Tensor


def quantized_fp8(x: Float) -> FP8Vectors:
    """Mirror of `dsacp_ref.fp8.quantized_fp8`.

    Limits: bfloat16 and float16 go by way of float32. Only values that can be read are found to be finite.
    """
    return fp8_vectors("x", x)


def fp8_vectors(name: str, x: Float) -> FP8Vectors:
    """The vectors of an argument of this name in FP8."""
    rows = finite_rows(name, x)
    scales = exact_scales(rows)
    return FP8Vectors(codes(rows, scales), scales)


def finite_rows(name: str, x: Float) -> torch.Tensor:
    """The vectors of an argument of this name in float32, found to be finite there if they can be read."""
    check_finite(name, x)
    return x.float()


def exact_scales(groups: torch.Tensor) -> torch.Tensor:
    """The scales that bring the largest magnitude of each group to 448; 0 where that is too small."""
    amax = groups.abs().amax(dim=-1)
    # Over a tensor: some devices divide by a plain number as they multiply by its rounded inverse.
    return (amax / torch.full_like(amax, E4M3_MAX)).masked_fill(amax < SMALLEST_AMAX, 0)


def codes(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The groups over their scales, in FP8."""
    safe = torch.where(scales > 0, scales, 1.0)[..., None]
    return (groups / safe).to(torch.float8_e4m3fn)


def dequantized_fp8(coded: FP8Vectors) -> torch.Tensor:
    """Mirror of `dsacp_ref.fp8.dequantized_fp8`."""
    values, scales = checked_codes("coded", coded)
    return values.float() * scales[..., None]


def checked_codes(name: str, coded: FP8Vectors) -> FP8Vectors:
    """The codes, once values and scales are found to fit."""
    check_record(name, coded, FP8Vectors)
    values, scales = coded
    check_tensor(f"{name}.values", values, ("float8_e4m3fn",), tuple(getattr(values, "shape", ())))
    check_tensor(f"{name}.scales", scales, ("float32",), tuple(values.shape[:-1]), "one scale a vector")
    return coded


def fp8_index_scores(index_q: FP8Vectors, index_weights: torch.Tensor, index_keys: FP8Vectors) -> torch.Tensor:
    """Mirror of `dsacp_ref.fp8.fp8_index_scores`. Products are summed up in float32."""
    q, q_scales = checked_codes("index_q", index_q)
    k, k_scales = checked_codes("index_keys", index_keys)
    if q.ndim != 3 or k.ndim != 2 or q.shape[2] != k.shape[1]:
        raise contract_error(
            "index_q", "hold [tokens, heads, d] against keys [keys, d]", f"{list(q.shape)} and {list(k.shape)}"
        )
    check_tensor("index_weights", index_weights, ("float32",), tuple(q_scales.shape), "one weight a head")
    (num_tokens, num_heads, _), num_keys = q.shape, len(k)
    if 0 in (num_tokens, num_heads, num_keys):
        return q_scales.new_zeros(num_tokens, num_keys)
    keys = FP8Vectors(whole_tiles(k, 0, KEY_TILE), whole_tiles(k_scales, 0, KEY_TILE))
    step = max(1, SCORED_NUMBERS // (num_heads * min(len(keys.values), KEY_BLOCK)))
    scores = []
    for start in range(0, num_tokens, step):
        queries = slice(start, start + step)
        scores.append(coded_scores(FP8Vectors(q[queries], q_scales[queries]), index_weights[queries], keys))
    return torch.cat(scores)[:, :num_keys]


def coded_scores(q: FP8Vectors, weights: torch.Tensor, keys: FP8Vectors) -> torch.Tensor:
    """The scores of whole tiles of keys, [keys, d] or [tokens, keys, d]: float32 [tokens, keys]."""
    gains = weights * q.scales
    queries, parts = q.values.float(), []
    for first in range(0, keys.values.shape[-2], KEY_BLOCK):
        some = keys.values[..., first : first + KEY_BLOCK, :].float()
        parts.append(head_sums(gains, head_hits(queries, some)))
    return torch.cat(parts, dim=1) * keys.scales


class RowPlaces(NamedTuple):
    """Where the parts of a cache row lie; what is in none of them is padding, and zero."""

    values: slice
    scales: slice
    rope: slice
    num_bytes: int


def encoded_latents(latent: Float, rope_key: Float) -> torch.Tensor:
    """Mirror of `dsacp_ref.fp8.encoded_latents`.

    Limits: as `quantized_fp8`.
    """
    rows = finite_rows("latent", latent)
    width = rows.shape[-1]
    if width % LATENT_GROUP:
        raise contract_error("latent", f"have a multiple of {LATENT_GROUP} channels", width, "a scale for so many")
    shape = (*rows.shape[:-1], "rope_head_dim")
    check_tensor("rope_key", rope_key, (dtype_name(latent),), shape, "one rope key a latent")
    groups = rows.reshape(*rows.shape[:-1], width // LATENT_GROUP, LATENT_GROUP)
    scales = exact_scales(groups)
    places = latent_places(width, rope_key.shape[-1])
    rope = rope_bytes("rope_key", rope_key)
    return packed(places, codes(groups, scales).reshape(rows.shape), bytes_of(scales), rope)


def decoded_latents(rows: torch.Tensor, *, kv_lora_rank: int, dtype: str) -> tuple[Float, Float]:
    """Mirror of `dsacp_ref.fp8.decoded_latents`.

    Limits: the results may also be bfloat16 or float16.
    """
    check_rows(rows)
    check_choice("dtype", dtype, (*FLOATS, *LOW_PRECISION))
    least = latent_row_bytes(kv_lora_rank, 0)
    rope_head_dim, odd = divmod(rows.shape[-1] - least, 2)
    if rope_head_dim < 1 or odd:
        rule = f"have {least} bytes and 2 more for each rope channel"
        raise contract_error("rows", rule, rows.shape[-1], "as encoded_latents lays them out")
    places = latent_places(kv_lora_rank, rope_head_dim)
    scales = numbers(rows[..., places.scales], torch.float32)
    latent, rope_key = decoded_values(rows, places, scales, LATENT_GROUP), decoded_rope(rows, places)
    return latent.to(getattr(torch, dtype)), rope_key.to(getattr(torch, dtype))


def encoded_keys(kv: Float, *, rope_head_dim: int, layout: str) -> torch.Tensor:
    """Mirror of `dsacp_ref.fp8.encoded_keys`.

    Limits: as `quantized_fp8`.
    """
    rows = finite_rows("kv", kv)
    places = key_places(rows.shape[-1], rope_head_dim, layout, "kv")
    leading, rope = rows[..., :-rope_head_dim], rows[..., -rope_head_dim:]
    groups = leading.reshape(*leading.shape[:-1], leading.shape[-1] // KEY_GROUP, KEY_GROUP)
    biased = power_bytes(groups.abs().amax(dim=-1))
    values = codes(groups, powers(biased)).reshape(leading.shape)
    return packed(places, values, biased, rope_bytes("the rope channels of kv", rope))


def decoded_keys(rows: torch.Tensor, *, head_dim: int, rope_head_dim: int, layout: str, dtype: str) -> Float:
    """Mirror of `dsacp_ref.fp8.decoded_keys`.

    Limits: the keys may also be bfloat16 or float16.
    """
    check_rows(rows)
    head_dim = check_int("head_dim", head_dim, 1)
    places = key_places(head_dim, rope_head_dim, layout, "head_dim")
    check_choice("dtype", dtype, (*FLOATS, *LOW_PRECISION))
    if rows.shape[-1] != places.num_bytes:
        rule = f"have {places.num_bytes} bytes a row"
        raise contract_error("rows", rule, rows.shape[-1], "as encoded_keys lays them out")
    leading = decoded_values(rows, places, powers(rows[..., places.scales]), KEY_GROUP)
    return torch.cat([leading, decoded_rope(rows, places)], dim=-1).to(getattr(torch, dtype))


def power_bytes(amax: torch.Tensor) -> torch.Tensor:
    """The biased exponents of the smallest powers of two that, times 448, reach these magnitudes, as bytes."""
    bits = amax.clamp(min=KEY_AMAX_FLOOR).view(torch.int32)
    # 448 is 1.75 * 2**8, and 1.75 a fraction of 0b11 and zeros.
    biased, beyond = bits >> FRACTION_BITS, (bits & (1 << FRACTION_BITS) - 1) > 3 << (FRACTION_BITS - 2)
    return (biased - 8 + beyond).to(torch.uint8)


def powers(biased: torch.Tensor) -> torch.Tensor:
    """The powers of two in float32 that bytes of E8M0 stand for; 255 is NaN, and 0 is half the smallest normal."""
    bits = biased.int() << FRACTION_BITS
    bits = torch.where(biased == 0, 1 << (FRACTION_BITS - 1), bits)
    return bits.view(torch.float32).masked_fill(biased == 255, torch.nan)


def latent_row_bytes(kv_lora_rank: int, rope_head_dim: int) -> int:
    """The bytes of a latent's row."""
    kv_lora_rank = check_int("kv_lora_rank", kv_lora_rank, 1)
    if kv_lora_rank % LATENT_GROUP:
        rule = f"be a multiple of {LATENT_GROUP}"
        raise contract_error("kv_lora_rank", rule, kv_lora_rank, "a scale for so many channels")
    return latent_places(kv_lora_rank, rope_head_dim).num_bytes


def latent_places(width: int, rope_head_dim: int) -> RowPlaces:
    """Where the parts of a latent's row lie."""
    scales = width + 4 * (width // LATENT_GROUP)
    end = scales + 2 * rope_head_dim
    return RowPlaces(slice(0, width), slice(width, scales), slice(scales, end), end)


def key_places(head_dim: int, rope_head_dim: int, layout: str, name: str) -> RowPlaces:
    """Where the parts of a key's row lie; the argument of this name has the channels."""
    rope_head_dim = check_int("rope_head_dim", rope_head_dim, 1)
    check_choice("layout", layout, KEY_LAYOUTS)
    width = head_dim - rope_head_dim
    if width < 1 or width % KEY_GROUP:
        rule = f"leave a multiple of {KEY_GROUP} channels beside {rope_head_dim} of rope"
        raise contract_error(name, rule, width, "a scale for so many")
    rope, groups = 2 * rope_head_dim, width // KEY_GROUP
    scales = slice(width + rope, width + rope + groups)
    if layout == "gpu":
        return RowPlaces(slice(0, width), scales, slice(width, width + rope), scales.start + padded(groups, 8))
    return RowPlaces(slice(rope, rope + width), scales, slice(0, rope), padded(scales.stop, 128))


def padded(count: int, multiple: int) -> int:
    """The count, up to a multiple."""
    return -(-count // multiple) * multiple


def packed(places: RowPlaces, values: torch.Tensor, scales: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """The parts, each in its place."""
    rows = scales.new_zeros(*values.shape[:-1], places.num_bytes)
    rows[..., places.values] = bytes_of(values)
    rows[..., places.scales] = scales
    rows[..., places.rope] = rope
    return rows


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the numbers, one after another along the last axis, as the machine has them: little endian."""
    return packed_numbers(tensor).view(torch.uint8)


def numbers(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a dtype that lie in bytes."""
    return packed_numbers(rows).view(dtype)


def packed_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without gaps, where numbers are aligned. `contiguous` would keep the strides of axes that hold one."""
    return tensor.clone(memory_format=torch.contiguous_format)


def rope_bytes(name: str, rope: Float) -> torch.Tensor:
    """The rope channels of an argument of this name in bfloat16, by way of float32."""
    check_finite(name, rope)
    short = rope.float().to(torch.bfloat16)
    if values_known(short) and short.isinf().any():
        raise contract_error(name, "be finite in bfloat16", torch.inf, "its largest number is 3.39e38")
    return bytes_of(short)


def check_rows(rows: torch.Tensor) -> None:
    """Refuse what are no rows of bytes."""
    shape = tuple(getattr(rows, "shape", ()))
    check_tensor("rows", rows, ("uint8",), shape if shape else ("row bytes",))


def decoded_values(rows: torch.Tensor, places: RowPlaces, scales: torch.Tensor, group: int) -> torch.Tensor:
    """The channels in FP8, times the scales of their groups."""
    values = rows[..., places.values].view(torch.float8_e4m3fn).float()
    return (values.reshape(*scales.shape, group) * scales[..., None]).reshape(values.shape)


def decoded_rope(rows: torch.Tensor, places: RowPlaces) -> torch.Tensor:
    """The rope channels in float32."""
    return numbers(rows[..., places.rope], torch.bfloat16).float()
