"""The operators that work row by row: partial rotary embedding, norms, int8 coding, scatters, the special products."""

from __future__ import annotations

from dsacp_npu._tensors import torch
from dsacp_npu.emulator.checks import HALVES, check_one_of, check_tensor, required
from dsacp_npu.emulator.errors import out_of_range, refusal

__all__ = [
    "dynamic_quant",
    "dynamic_quant_fake",
    "nothing_fake",
    "partial_rotary",
    "quant_matmul",
    "quant_matmul_fake",
    "rms_norm",
    "rms_norm_dynamic_quant",
    "rms_norm_dynamic_quant_fake",
    "rms_norm_fake",
    "scatter",
    "scatter_fake",
    "scatter_v2",
    "transpose_batchmatmul",
    "transpose_batchmatmul_fake",
]

FLOATS = (*HALVES, torch.float32)
ROTARY_MODES = ("half", "interleave", "quarter", "interleave-half")
INT8 = 1  # torch's number of the dtype
PRODUCTS = {5: torch.float16, 15: torch.bfloat16}  # what a coded product may be, by torch's numbers
WIDEST = 65535  # along the last axis of a factor of a coded product
Tensor = torch.Tensor


def partial_rotary(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, partial_slice: list[int]) -> None:
    """`inplace_partial_rotary_mul`: turn the adjacent pairs of a slice of channels, r1 = cos, r2 = sin.

    An unknown `rotary_mode` does nothing and says nothing, as on the device; a known one but "interleave" is refused.
    """
    operator = "inplace_partial_rotary_mul"
    if rotary_mode not in ROTARY_MODES:
        return
    check_one_of(operator, "rotary_mode", rotary_mode, ("interleave",), "the others are for other chips")
    check_tensor(operator, "x", x, FLOATS, ("B", "S", "N", "D"))
    if len(partial_slice) != 2 or not 0 <= partial_slice[0] < partial_slice[1] <= x.shape[3]:
        raise refusal(operator, "partial_slice", f"be [start, end] within {x.shape[3]} channels", partial_slice)
    start, end = partial_slice
    if (end - start) % 2 != 0:
        raise refusal(operator, "partial_slice", "span an even number of channels", partial_slice)
    dtypes = (x.dtype, torch.float32)
    check_tensor(operator, "r1", r1, dtypes, (x.shape[0], "S or 1", 1, end - start))
    check_tensor(operator, "r2", r2, (r1.dtype,), tuple(r1.shape))
    if r1.shape[1] not in (1, x.shape[1]):
        raise refusal(operator, "r1", f"have 1 or {x.shape[1]} rows along axis 1", r1.shape[1])
    if not x.is_contiguous():
        raise refusal(operator, "x", "be contiguous", f"strides {x.stride()}", "a copy would be turned, not x")
    part = x[..., start:end].float()
    turned = torch.stack([-part[..., 1::2], part[..., 0::2]], dim=-1).flatten(-2)
    x[..., start:end] = (part * r1.float() + turned * r2.float()).to(x.dtype)


def nothing_fake(**_: object) -> None:
    """Operators that only write into an argument."""


def rms_normed(operator: str, x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(normed rows, reciprocal root) in float32."""
    check_one_of(operator, "x dtype", x.dtype, FLOATS)
    if x.ndim == 0 or 0 in x.shape:
        raise refusal(operator, "x", "have no empty axis", list(x.shape), "skip the call")
    check_tensor(operator, "gamma", gamma, FLOATS, (x.shape[-1],))
    if not epsilon > 0:
        raise refusal(operator, "epsilon", "be > 0", epsilon)
    wide = x.float()
    reciprocal = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + epsilon)
    return wide * reciprocal * gamma.float(), reciprocal


def coded_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 values, float32 scale per row): symmetric, amax / 127, halves to even; a zero row has scale 0."""
    scale = rows.abs().amax(-1) / 127
    safe = torch.where(scale > 0, scale, 1.0)[..., None]
    return (rows / safe).round().clamp(-127, 127).to(torch.int8), scale


def rms_norm_dynamic_quant(
    x: Tensor, gamma: Tensor, smooth_scale: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """`npu_rms_norm_dynamic_quant`: norm and int8 coding without rounding in between."""
    operator = "npu_rms_norm_dynamic_quant"
    check_one_of(operator, "x dtype", x.dtype, HALVES)
    normed, _ = rms_normed(operator, x, gamma, epsilon)
    for name, extra in (("beta", beta), ("smooth_scale", smooth_scale)):
        if extra is not None:
            check_tensor(operator, name, extra, FLOATS, (x.shape[-1],))
            normed = normed + extra.float() if name == "beta" else normed * extra.float()
    return coded_int8(normed)


def rms_norm_dynamic_quant_fake(*, x: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of codes and scales."""
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


def rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """`npu_rms_norm`: (normed rows in the dtype of the input, reciprocal root [..., 1] in float32)."""
    normed, reciprocal = rms_normed("npu_rms_norm", self, gamma, epsilon)
    return normed.to(self.dtype), reciprocal


def rms_norm_fake(*, self: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of rows and roots."""
    return self.new_empty(self.shape), self.new_empty((*self.shape[:-1], 1), dtype=torch.float32)


def dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`npu_dynamic_quant`, per token into int8; its other types, modes and smoothing are not emulated."""
    operator = "npu_dynamic_quant"
    check_one_of(operator, "input dtype", input.dtype, HALVES)
    check_one_of(operator, "smooth_scales", smooth_scales, (None,), "not emulated")
    check_one_of(operator, "group_index", group_index, (None,), "not emulated")
    check_one_of(operator, "dst_type", dst_type, (None, INT8), "only int8 is emulated")
    check_one_of(operator, "quant_mode", quant_mode, ("pertoken",), "not emulated")
    check_one_of(operator, "dst_type_max", dst_type_max, (0.0,), "not emulated")
    if input.ndim == 0 or 0 in input.shape:
        raise refusal(operator, "input", "have no empty axis", list(input.shape), "skip the call")
    return coded_int8(input.float())


def dynamic_quant_fake(*, input: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of codes and scales."""
    return rms_norm_dynamic_quant_fake(x=input)


def scatter_v2(var: Tensor, indices: Tensor, update: Tensor) -> None:
    """`npu_scatter_nd_update_v2`: rows of `update` into `var` at `indices` [rows, k] of its first k axes."""
    scattered("npu_scatter_nd_update_v2", var, indices, update)


def scatter(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """`npu_scatter_nd_update_`: the same, returning its first argument."""
    scattered("npu_scatter_nd_update_", self, indices, updates)
    return self


def scatter_fake(*, self: Tensor, **_: object) -> Tensor:
    """The argument itself."""
    return self


def scattered(operator: str, var: Tensor, indices: Tensor, update: Tensor) -> None:
    """Write rows; a flat slot of -1 is skipped, as -1 or as (-1, last row). Other slots outside are errors.

    A slot that gets two different rows holds NaN afterwards (integers: the least): which one would stay is undefined.
    """
    check_tensor(operator, "indices", indices, (torch.int32, torch.int64), ("rows", "k"))
    count, k = indices.shape
    if not 1 <= k <= var.ndim:
        raise refusal(operator, "indices", f"name 1 to {var.ndim} axes of var", k)
    inner = var.shape[k:]
    if update.dtype != var.dtype or update.numel() != count * inner.numel() or (count and len(update) != count):
        raise refusal(operator, "update", f"be {var.dtype} [{count}, {', '.join(map(str, inner))}]", list(update.shape))
    places = indices.long()
    flat = torch.zeros(count, dtype=torch.long)
    for axis in range(k):
        flat = flat * var.shape[axis] + places[:, axis]
    outside = (flat != -1) & ((places < 0) | (places >= torch.tensor(var.shape[:k]))).any(1)
    if outside.any():
        row = int(outside.nonzero()[0, 0])
        why = f"slot {places[row].tolist()} is outside of {list(var.shape[:k])}"
        raise out_of_range(operator, "indices", -1, row, why)
    kept = flat != -1
    places, rows = places[kept], update.reshape(count, *inner)[kept]
    where = tuple(places[:, axis] for axis in range(k))
    var[where] = rows
    shape = (len(rows), inner.numel())
    lost = (var[where] != rows).reshape(shape).any(1) & ~rows.isnan().reshape(shape).any(1)
    if lost.any():
        poison = torch.nan if var.is_floating_point() else torch.iinfo(var.dtype).min
        var[tuple(axis[lost] for axis in where)] = poison


def transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """`npu_transpose_batchmatmul`: one product a group, rounded once. `bias`, `scale`, splitting: not emulated."""
    operator = "npu_transpose_batchmatmul"
    for name, value in (("bias", bias), ("scale", scale)):
        check_one_of(operator, name, value, (None,), "not emulated")
    check_one_of(operator, "batch_split_factor", batch_split_factor, (None, 1), "not emulated")
    check_tensor(operator, "input", input, FLOATS, ("T", "G", "K"))
    check_tensor(operator, "weight", weight, (input.dtype,), ("G", "K", "N"))
    first, second, last = permutations(perm_x1, perm_x2, perm_y)
    if first not in ((0, 1, 2), (1, 0, 2)):
        raise refusal(operator, "perm_x1", "be (0, 1, 2) or (1, 0, 2)", first)
    check_one_of(operator, "perm_x2", second, ((0, 1, 2),))
    check_one_of(operator, "perm_y", last, ((1, 0, 2),))
    rows = input.permute(first)
    if rows.shape[0] != weight.shape[0] or rows.shape[2] != weight.shape[1]:
        raise refusal(operator, "weight", f"have shape [{rows.shape[0]}, {rows.shape[2]}, N]", list(weight.shape))
    out = [left.float() @ right.float() for left, right in zip(rows, weight, strict=True)]
    return torch.stack(out).permute(last).contiguous().to(input.dtype)


def permutations(*given: list[int] | None) -> tuple[tuple[int, ...], ...]:
    """The three permutations, each as given or as the operator's own default."""
    defaults = ((1, 0, 2), (0, 1, 2), (1, 0, 2))
    return tuple(default if perm is None else tuple(perm) for perm, default in zip(given, defaults, strict=True))


def transpose_batchmatmul_fake(
    *,
    input: Tensor,
    weight: Tensor,
    perm_x1: list[int] | None,
    perm_x2: list[int] | None,
    perm_y: list[int] | None,
    **_: object,
) -> Tensor:
    """Shape and dtype of the product."""
    first, _second, last = permutations(perm_x1, perm_x2, perm_y)
    groups, rows, _width = (input.shape[axis] for axis in first)
    shape = (groups, rows, weight.shape[2])
    return input.new_empty([shape[axis] for axis in last])


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """`npu_quant_matmul` of two int8 matrices, a scale a row: ``x1 @ x2 * scale * pertoken_scale``, rounded once.

    The last axis of a factor is the one that lies last in memory, so the inner one of a transposed x2. Widths of 65536
    and more are refused on both of its axes: on the device they failed, and a call must not hang on a layout.
    """
    operator = "npu_quant_matmul"
    for name, value in (
        ("offset", offset),
        ("bias", bias),
        ("x1_dtype", x1_dtype),
        ("x2_dtype", x2_dtype),
        ("pertoken_scale_dtype", pertoken_scale_dtype),
        ("scale_dtype", scale_dtype),
        ("group_sizes", group_sizes),
        ("y_scale", y_scale),
    ):
        check_one_of(operator, name, value, (None,), "not emulated")
    if output_dtype not in PRODUCTS:
        kinds = " or ".join(map(str, PRODUCTS.values()))
        raise refusal(operator, "output_dtype", f"be {kinds}", output_dtype, "None is int8; others are not emulated")
    check_tensor(operator, "x1", x1, (torch.int8,), ("M", "K"))
    check_tensor(operator, "x2", x2, (torch.int8,), (x1.shape[1], "N"))
    check_factors(operator, x1, x2)
    rows = required(operator, "pertoken_scale", pertoken_scale, "one scale for all rows is not emulated")
    check_tensor(operator, "pertoken_scale", rows, (torch.float32,), (x1.shape[0],))
    dtype = PRODUCTS[output_dtype]
    scales = (torch.float32,) if dtype == torch.float16 else (torch.float32, torch.bfloat16)
    check_tensor(operator, "scale", scale, scales, ("N or 1",))
    if scale.shape[0] not in (1, x2.shape[1]):
        raise refusal(operator, "scale", f"have shape [{x2.shape[1]}] or [1]", list(scale.shape))
    dots = (x1.double() @ x2.double()).float()  # exact, then rounded as from int32
    product: Tensor = dots * scale.float() * rows[:, None]
    return product.to(dtype)


def check_factors(operator: str, x1: Tensor, x2: Tensor) -> None:
    """Refuse what is empty, too wide, or laid out otherwise than in rows or, x2 only, in columns."""
    for name, factor in (("x1", x1), ("x2", x2)):
        if 0 in factor.shape:
            raise refusal(operator, name, "have no empty axis", list(factor.shape), "skip the call")
        if factor.shape[1] > WIDEST:
            raise refusal(operator, name, f"have at most {WIDEST} columns", factor.shape[1], "call it in chunks")
    if not x1.is_contiguous():
        raise refusal(operator, "x1", "be contiguous", f"strides {x1.stride()}")
    if not x2.is_contiguous() and not x2.T.is_contiguous():
        raise refusal(operator, "x2", "be contiguous, or the transpose of what is", f"strides {x2.stride()}")


def quant_matmul_fake(*, x1: Tensor, x2: Tensor, output_dtype: int, **_: object) -> Tensor:
    """Shape and dtype of the product."""
    return x1.new_empty(x1.shape[0], x2.shape[1], dtype=PRODUCTS[output_dtype])
