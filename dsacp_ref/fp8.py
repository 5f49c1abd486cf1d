"""FP8 codecs: index keys and queries with their score, and whole cache rows in bytes, V3.2's latents and V4's keys.

A number of FP8 (e4m3) has a sign, 4 bits of exponent and 3 of fraction: steps of an eighth and finer, at most 448, no
infinity. Channels that share a scale are a *group*; the scale brings the largest of them to 448, or near it::

    codec             group           scale of a group                           stored as
    index vectors     the vector      amax / 448                                 float32
    V3.2's latents    128 channels    amax / 448                                 float32
    V4's keys         64 channels     smallest power of two >= amax / 448        its exponent + 127, a byte (E8M0)

Every step is one float32 operation, rounded half to even, so the same bytes come out on every machine. Below 2**-107
the numbers of a group, or the products of its codes and its scale, could be subnormal, which some devices take for 0:
there ``amax / 448`` is 0 everywhere, and the group is coded as zeros. V4's scale has a floor of its own.

The bytes are little endian. numpy has no FP8 and no bfloat16: `ml_dtypes` brings them, when first asked for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.extents import FLOATS, Float
from dsacp_ref.quant import check_codable, magnitudes
from dsacp_ref.spec import check_array, check_choice, check_int, check_record, contract_error

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

Bytes = NDArray[np.uint8]
Single = NDArray[np.float32]

E4M3_MAX = 448.0
SMALLEST_AMAX = 2.0**-107  # of a vector or a latent's group; below, it is coded as zeros
KEY_AMAX_FLOOR = 1e-4  # of a group of V4's keys
LATENT_GROUP = 128
KEY_GROUP = 64
KEY_LAYOUTS = ("gpu", "ascend")
SCALE_BIAS = 127
QUERY_BLOCK = 32  # queries scored at a time
KEY_BLOCK = 1024  # keys scored at a time


class FP8Vectors(NamedTuple):
    """Vectors in FP8 with one scale each.

    Fields:
        values: float8_e4m3fn[..., d].
        scales: float32[...], what a code of 1 stands for; 0 for a vector that is coded as zeros.

    >>> FP8Vectors._fields
    ('values', 'scales')
    """

    values: NDArray[Any]
    scales: NDArray[np.float32]


def quantized_fp8(x: Float) -> FP8Vectors:
    """The vectors in FP8, each scaled by its own largest magnitude.

    ::

        x  [ 0.5  -1.0  0.3 ]    scale 1/448    values [ 224  -448  128 ]     (134.4 lies between 128 and 144)

    Args:
        x: float32 or float64 [..., d], finite in float32.

    Returns:
        FP8Vectors: values of ``x / scale`` in float32, rounded half to even.

    Raises:
        ContractError: dtype or shape, or a value that is not finite.
        ImportError: ml_dtypes is missing.

    Source: index queries and keys of DeepSeek-V3.2; operators of Ascend 950, one float32 scale a token and head.

    >>> coded = quantized_fp8(np.array([[0.5, -1.0, 0.3], [0.0, 0.0, 0.0]]))
    >>> coded.values.astype(float).tolist(), [f"{s:.6f}" for s in coded.scales]
    ([[224.0, -448.0, 128.0], [0.0, 0.0, 0.0]], ['0.002232', '0.000000'])
    """
    return fp8_vectors("x", x)


def fp8_vectors(name: str, x: Float) -> FP8Vectors:
    """The vectors of an argument of this name in FP8."""
    rows = finite_rows(name, x)
    scales = exact_scales(rows)
    return FP8Vectors(codes(rows, scales), scales)


def finite_rows(name: str, x: Float) -> Single:
    """The vectors of an argument of this name in float32, once they are found to be finite there."""
    check_codable(name, magnitudes(name, x))
    rows: Single = x.astype(np.float32)
    return rows


def exact_scales(groups: Single) -> Single:
    """The scales that bring the largest magnitude of each group to 448; 0 where that is too small."""
    amax = np.abs(groups).max(axis=-1)
    return np.where(amax < np.float32(SMALLEST_AMAX), np.float32(0), amax / np.float32(E4M3_MAX))


def codes(groups: Single, scales: Single) -> NDArray[Any]:
    """The groups over their scales, in FP8. No quotient is beyond 448 but for a rounding, so none is cut."""
    safe = np.where(scales > 0, scales, np.float32(1))[..., None]
    return (groups / safe).astype(narrow_floats().float8_e4m3fn)


def narrow_floats() -> Any:
    """The package that brings FP8 and bfloat16 to numpy."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"FP8 in numpy needs ml_dtypes ({error}); pip install 'dsacp[fp8]'") from error
    return ml_dtypes


def dequantized_fp8(coded: FP8Vectors) -> NDArray[np.float32]:
    """The vectors that the codes stand for.

    Args:
        coded: FP8Vectors.

    Returns:
        float32[..., d]: each value times its scale, rounded once.

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: as `quantized_fp8`.

    >>> dequantized_fp8(quantized_fp8(np.array([[56.0, -448.0, 1.0625]]))).tolist()
    [[56.0, -448.0, 1.0]]
    """
    return decoded(*checked_codes("coded", coded))


def decoded(values: NDArray[Any], scales: Single) -> Single:
    """Values times scales in float32. Bytes that no encoder wrote give what they give, infinity and NaN among it."""
    with np.errstate(over="ignore", invalid="ignore"):
        product: Single = values.astype(np.float32) * scales[..., None]
    return product


def checked_codes(name: str, coded: FP8Vectors) -> FP8Vectors:
    """The codes, once values and scales are found to fit."""
    check_record(name, coded, FP8Vectors)
    values, scales = coded
    check_array(f"{name}.values", values, ("float8_e4m3fn",), getattr(values, "shape", ()))
    check_array(f"{name}.scales", scales, ("float32",), values.shape[:-1], "one scale a vector")
    return coded


def fp8_index_scores(
    index_q: FP8Vectors, index_weights: NDArray[np.float32], index_keys: FP8Vectors
) -> NDArray[np.float32]:
    """The index scores of queries and keys in FP8.

    ::

        relu(q . k)           exact, then float32
        weight * q_scale      float32
        sum over heads        float32, from the first to the last, then times k_scale

    Args:
        index_q: FP8Vectors, values float8_e4m3fn[num_tokens, index_n_heads, d], scales [num_tokens, index_n_heads].
        index_weights: float32[num_tokens, index_n_heads], signed head weights.
        index_keys: FP8Vectors, values float8_e4m3fn[num_keys, d], scales [num_keys].

    Returns:
        float32[num_tokens, num_keys].

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: DeepSeek-V3.2 inference model, fp8_index; DeepGEMM fp8_mqa_logits, whose query scale is in the weights.

    >>> q, k = quantized_fp8(np.array([[[0.0, 448.0]]])), quantized_fp8(np.array([[5.0, 448.0], [5.0, -448.0]]))
    >>> fp8_index_scores(q, np.ones((1, 1), np.float32), k).tolist()
    [[200704.0, 0.0]]
    """
    q, q_scales = checked_codes("index_q", index_q)
    k, k_scales = checked_codes("index_keys", index_keys)
    if q.ndim != 3 or k.ndim != 2 or q.shape[2] != k.shape[1]:
        raise contract_error(
            "index_q", "hold [tokens, heads, d] against keys [keys, d]", f"{list(q.shape)} and {list(k.shape)}"
        )
    check_array("index_weights", index_weights, ("float32",), q_scales.shape, "one weight a head")
    num_heads, d = q.shape[1:]
    gains, keys = index_weights * q_scales, k.astype(np.float64)
    scores = np.empty((len(q), len(k)), np.float32)
    for first in range(0, len(q), QUERY_BLOCK):
        queries = q[first : first + QUERY_BLOCK].astype(np.float64).reshape(-1, d)
        for start in range(0, len(k), KEY_BLOCK):
            some = keys[start : start + KEY_BLOCK]
            # A product of two codes is a multiple of 2**-18 below 2**18. float64 sums up a hundred thousand of them
            # exactly, in whatever order, so equal keys score equally wherever they stand.
            hits = np.maximum(queries @ some.T, 0).astype(np.float32)
            block = slice(first, first + QUERY_BLOCK), slice(start, start + KEY_BLOCK)
            scores[block] = head_sums(gains[block[0]], hits.reshape(-1, max(num_heads, 1), len(some)))
    return scores * k_scales


def head_sums(gains: Single, hits: Single) -> Single:
    """The sum over heads of gains [tokens, heads] times hits [tokens, heads, keys], added head by head."""
    total = np.zeros((len(gains), hits.shape[2]), np.float32)
    for head in range(gains.shape[1]):
        total += gains[:, head, None] * hits[:, head]
    return total


class RowPlaces(NamedTuple):
    """Where the parts of a cache row lie; what is in none of them is padding, and zero."""

    values: slice
    scales: slice
    rope: slice
    num_bytes: int


def encoded_latents(latent: Float, rope_key: Float) -> NDArray[np.uint8]:
    """Rows of V3.2's latent cache: the latent in FP8, its scales, and the rope key in bfloat16.

    ::

        512 latent channels, 64 rope channels

        byte  0            512                528                656
              | 512 values | 4 scales float32 | 64 rope bfloat16 |

    Args:
        latent: float32 or float64 [..., kv_lora_rank], finite in float32; kv_lora_rank a multiple of 128.
        rope_key: dtype of ``latent`` [..., rope_head_dim], finite in bfloat16.

    Returns:
        uint8[..., kv_lora_rank + 4 * kv_lora_rank / 128 + 2 * rope_head_dim].

    Raises:
        ContractError: dtype or shape, or a value that is not finite.
        ImportError: ml_dtypes is missing.

    Source: FlashMLA's FP8 cache of V3.2, 656 bytes a token.

    >>> rows = encoded_latents(np.full((1, 128), 448.0), np.array([[1.0, -2.0]]))
    >>> rows.shape, rows[0, :2].tolist(), rows[0, 128:].tolist()  # 448 is 0x7e; then 1.0 twice, and -2.0
    ((1, 136), [126, 126], [0, 0, 128, 63, 128, 63, 0, 192])
    """
    rows = finite_rows("latent", latent)
    width = rows.shape[-1]
    if width % LATENT_GROUP:
        raise contract_error("latent", f"have a multiple of {LATENT_GROUP} channels", width, "a scale for so many")
    shape = (*rows.shape[:-1], "rope_head_dim")
    check_array("rope_key", rope_key, (str(latent.dtype),), shape, "one rope key a latent")
    groups = rows.reshape(*rows.shape[:-1], width // LATENT_GROUP, LATENT_GROUP)
    scales = exact_scales(groups)
    places = latent_places(width, rope_key.shape[-1])
    rope = rope_bytes("rope_key", rope_key)
    return packed(places, codes(groups, scales).reshape(rows.shape), bytes_of(scales.astype("<f4")), rope)


def decoded_latents(rows: NDArray[np.uint8], *, kv_lora_rank: int, dtype: str) -> tuple[Float, Float]:
    """The latents and rope keys that rows of V3.2's cache stand for.

    Args:
        rows: uint8[..., row bytes], as `encoded_latents` lays them out; bytes 0 stand for zeros.
        kv_lora_rank: int, channels of the latent, a multiple of 128.
        dtype: str, of both results: ``"float32"`` or ``"float64"``; the products are float32 for both.

    Returns:
        (float[..., kv_lora_rank], float[..., rope_head_dim]).

    Raises:
        ContractError: dtype, or bytes that are too few or no whole channels.
        ImportError: ml_dtypes is missing.

    Source: as `encoded_latents`.

    >>> rows = encoded_latents(np.full((1, 128), -3.0), np.array([[1.0, 1.01]]))
    >>> latent, rope_key = decoded_latents(rows, kv_lora_rank=128, dtype="float64")
    >>> latent[0, :2].tolist(), rope_key.tolist()
    ([-3.0, -3.0], [[1.0, 1.0078125]])
    """
    check_rows(rows)
    check_choice("dtype", dtype, FLOATS)
    least = latent_row_bytes(kv_lora_rank, 0)
    rope_head_dim, odd = divmod(rows.shape[-1] - least, 2)
    if rope_head_dim < 1 or odd:
        rule = f"have {least} bytes and 2 more for each rope channel"
        raise contract_error("rows", rule, rows.shape[-1], "as encoded_latents lays them out")
    places = latent_places(kv_lora_rank, rope_head_dim)
    scales = np.ascontiguousarray(rows[..., places.scales]).view("<f4").astype(np.float32)
    return decoded_values(rows, places, scales, LATENT_GROUP).astype(dtype), decoded_rope(rows, places).astype(dtype)


def encoded_keys(kv: Float, *, rope_head_dim: int, layout: str) -> NDArray[np.uint8]:
    """Rows of V4's cache: a key's leading channels in FP8 with scales that are powers of two, its rope in bfloat16.

    ::

        448 leading channels, 64 rope channels

        "gpu"       byte  0            448                576             583   584
                          | 448 values | 64 rope bfloat16 | 7 scale bytes | pad |
        "ascend"    byte  0                  128          576             583   640
                          | 64 rope bfloat16 | 448 values | 7 scale bytes | pad |

    The scale bytes are padded to a multiple of 8, or the row to one of 128. Every row is whole here; a page of the GPU
    kernels has the same bytes with the scales of all its rows behind the rest of them.

    Args:
        kv: float32 or float64 [..., head_dim], the rope channels last, finite in float32, and in bfloat16 those of the
            rope; the other channels a multiple of 64.
        rope_head_dim: int, rope channels, >= 1.
        layout: str, ``"gpu"`` or ``"ascend"``.

    Returns:
        uint8[..., row bytes].

    Raises:
        ContractError: dtype, shape or layout, or a value that is not finite.
        ImportError: ml_dtypes is missing.

    Source: DeepSeek-V4 inference model, act_quant with amax of at least 1e-4; FlashMLA; operators of Ascend 950,
        kv_compress_epilog and npu_kv_quant_sparse_attn_sharedkv. Neither operator was run here.

    >>> rows = encoded_keys(np.array([448.0] * 64 + [1.0, -2.0]), rope_head_dim=2, layout="gpu")
    >>> rows.shape, rows[62:].tolist()  # 448 is 0x7e; then the rope, and 2**0
    ((76,), [126, 126, 128, 63, 0, 192, 127, 0, 0, 0, 0, 0, 0, 0])
    """
    rows = finite_rows("kv", kv)
    places = key_places(rows.shape[-1], rope_head_dim, layout, "kv")
    leading, rope = rows[..., :-rope_head_dim], rows[..., -rope_head_dim:]
    groups = leading.reshape(*leading.shape[:-1], leading.shape[-1] // KEY_GROUP, KEY_GROUP)
    exponents = power_exponents(np.abs(groups).max(axis=-1))
    values = codes(groups, np.ldexp(np.float32(1), exponents)).reshape(leading.shape)
    scales = (exponents + SCALE_BIAS).astype(np.uint8)
    return packed(places, values, scales, rope_bytes("the rope channels of kv", rope))


def decoded_keys(rows: NDArray[np.uint8], *, head_dim: int, rope_head_dim: int, layout: str, dtype: str) -> Float:
    """The keys that rows of V4's cache stand for.

    Args:
        rows: uint8[..., row bytes], as `encoded_keys` lays them out; bytes 0 stand for zeros, padding is not read.
        head_dim: int, channels of a key, rope included.
        rope_head_dim: int, rope channels, >= 1.
        layout: str, ``"gpu"`` or ``"ascend"``.
        dtype: str, of the keys: ``"float32"`` or ``"float64"``.

    Returns:
        float[..., head_dim].

    Raises:
        ContractError: dtype, sizes or layout.
        ImportError: ml_dtypes is missing.

    Source: as `encoded_keys`.

    >>> rows = encoded_keys(np.array([[3.0] * 64 + [1.01]]), rope_head_dim=1, layout="ascend")
    >>> decoded_keys(rows, head_dim=65, rope_head_dim=1, layout="ascend", dtype="float64")[0, 63:].tolist()
    [3.0, 1.0078125]
    """
    check_rows(rows)
    head_dim = check_int("head_dim", head_dim, 1)
    places = key_places(head_dim, rope_head_dim, layout, "head_dim")
    check_choice("dtype", dtype, FLOATS)
    if rows.shape[-1] != places.num_bytes:
        rule = f"have {places.num_bytes} bytes a row"
        raise contract_error("rows", rule, rows.shape[-1], "as encoded_keys lays them out")
    scales = np.ascontiguousarray(rows[..., places.scales]).view(narrow_floats().float8_e8m0fnu).astype(np.float32)
    leading = decoded_values(rows, places, scales, KEY_GROUP)
    return np.concatenate([leading, decoded_rope(rows, places)], axis=-1).astype(dtype)


def power_exponents(amax: Single) -> NDArray[np.int32]:
    """The exponents of the smallest powers of two that, times 448, reach these magnitudes; never below the floor's."""
    fraction, exponent = np.frexp(np.maximum(amax, np.float32(KEY_AMAX_FLOOR)))
    exponents: NDArray[np.int32] = exponent - 9 + (fraction > 0.875)  # 448 is 0.875 * 2**9
    return exponents


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


def packed(places: RowPlaces, values: NDArray[Any], scales: Bytes, rope: Bytes) -> Bytes:
    """The parts, each in its place."""
    rows = np.zeros((*values.shape[:-1], places.num_bytes), np.uint8)
    rows[..., places.values] = bytes_of(values)
    rows[..., places.scales] = scales
    rows[..., places.rope] = rope
    return rows


def bytes_of(array: NDArray[Any]) -> Bytes:
    """The bytes of the numbers, one after another along the last axis."""
    return np.ascontiguousarray(array).view(np.uint8)


def rope_bytes(name: str, rope: Float) -> Bytes:
    """The rope channels of an argument of this name in bfloat16, by way of float32."""
    check_codable(name, magnitudes(name, rope))
    short = rope.astype(np.float32).astype(narrow_floats().bfloat16)
    largest = np.abs(short.astype(np.float32)).max(initial=0)
    if np.isinf(largest):
        raise contract_error(name, "be finite in bfloat16", float(largest), "its largest number is 3.39e38")
    return bytes_of(short.view(np.uint16).astype("<u2"))


def check_rows(rows: Bytes) -> None:
    """Refuse what are no rows of bytes."""
    shape = getattr(rows, "shape", ())
    check_array("rows", rows, ("uint8",), shape if shape else ("row bytes",))


def decoded_values(rows: Bytes, places: RowPlaces, scales: Single, group: int) -> Single:
    """The channels in FP8, times the scales of their groups."""
    values = np.ascontiguousarray(rows[..., places.values]).view(narrow_floats().float8_e4m3fn)
    return decoded(values.reshape(*scales.shape, group), scales).reshape(values.shape)


def decoded_rope(rows: Bytes, places: RowPlaces) -> Single:
    """The rope channels in float32."""
    bits = np.ascontiguousarray(rows[..., places.rope]).view("<u2").astype(np.uint16)
    rope: Single = bits.view(narrow_floats().bfloat16).astype(np.float32)
    return rope
