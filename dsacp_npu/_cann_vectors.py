"""Row-wise operators: partial rotation, index queries, int8 rows and products, the output projection, cache writes."""

from __future__ import annotations

from dsacp_npu._operators import HALVES, check_dtype, check_limit, in_float32, limit_error, operator
from dsacp_npu._tensors import FLOATS as WIDE_FLOATS
from dsacp_npu._tensors import Float, Int32, check_floats, torch
from dsacp_npu.indexer import hadamard
from dsacp_npu.paging import check_writes, spread
from dsacp_npu.quant import QuantizedRows, QuantizedWeight, check_finite, check_normable, check_product
from dsacp_ref.spec import check_choice, check_int, contract_error

__all__ = [
    "apply_inverse_rope",
    "apply_rope",
    "index_queries",
    "projected_output",
    "quant_matmul",
    "quantized_rows",
    "rms_norm_quantized",
    "scattered_rows_",
]

ROPE_HEAD_DIM, INDEX_HEAD_DIM = 64, 128
FLOATS = ("float32", "bfloat16", "float16")
MATMUL_WIDTH = 65535  # npu_quant_matmul takes no matrix that is wider, on either axis


def apply_rope(x: Float, cos: Float, sin: Float) -> Float:
    """`dsacp_ref.rope.apply_rope` by the operator, on a copy."""
    return turned("apply_rope", x, cos, sin)


def apply_inverse_rope(x: Float, cos: Float, sin: Float) -> Float:
    """`dsacp_ref.rope.apply_inverse_rope` by the operator, on a copy: the same with -sin."""
    check_floats("sin", sin, ("num_tokens", "rope_head_dim / 2"))
    return turned("apply_inverse_rope", x, cos, -sin)


def turned(function: str, x: Float, cos: Float, sin: Float) -> Float:
    """A copy of x whose last pairs are rotated."""
    if not hasattr(x, "shape") or len(x.shape) < 2:
        got = list(x.shape) if hasattr(x, "shape") else type(x).__name__
        raise contract_error("x", "have shape [num_tokens, ..., head_dim]", got)
    check_floats("x", x, tuple(x.shape))
    check_floats("cos", cos, (x.shape[0], "rope_head_dim / 2"), "one row of the table a token")
    check_floats("sin", sin, tuple(cos.shape), "cos and sin are one table")
    width = 2 * cos.shape[1]
    if width > x.shape[-1]:
        raise contract_error("x", f"have at least {width} channels", x.shape[-1], "the table has one column a pair")
    check_dtype(function, "x", x, FLOATS)
    check_limit(function, "rope_head_dim", width, (ROPE_HEAD_DIM,))
    tables = [
        in_float32(function, name, half).repeat_interleave(2, dim=1)[:, None, None]
        for name, half in (("cos", cos), ("sin", sin))
    ]
    out = x.clone(memory_format=torch.contiguous_format)  # storage of its own: the operator writes in place
    if out.numel() > 0:
        rows = out.view(x.shape[0], 1, -1, x.shape[-1])
        operator("inplace_partial_rotary_mul")(rows, *tables, "interleave", [x.shape[-1] - width, x.shape[-1]])
    return out


def index_queries(qr: Float, wq_b: Float, cos: Float, sin: Float, *, index_head_dim: int) -> Float:
    """`dsacp_ref.indexer.index_queries`, turned by the operator."""
    check_floats("qr", qr, ("num_tokens", "q_lora_rank"))
    check_floats("wq_b", wq_b, ("index_n_heads * index_head_dim", qr.shape[1]), "as wide as the query latent")
    index_head_dim = check_int("index_head_dim", index_head_dim, 1)
    if wq_b.shape[0] % index_head_dim:
        raise contract_error("wq_b", f"have a multiple of {index_head_dim} rows", wq_b.shape[0], "one block a head")
    check_limit("index_queries", "index_head_dim", index_head_dim, (INDEX_HEAD_DIM,))
    heads = (qr @ wq_b.T.to(qr.dtype)).reshape(len(qr), len(wq_b) // index_head_dim, index_head_dim)
    return hadamard(turned("index_queries", heads, cos, sin))


def projected_output(out: Float, wo_a: Float, wo_b: Float) -> Float:
    """`dsacp_ref.layer.projected_output`, its grouped product by the operator."""
    check_floats("out", out, ("num_tokens", "num_heads", "head_dim"))
    check_floats("wo_a", wo_a, ("o_groups", "o_lora_rank", "group_width"))
    groups, lora, width = wo_a.shape
    if groups * width != out.shape[1] * out.shape[2]:
        raise contract_error(
            "wo_a",
            f"take the {out.shape[1]} heads of {out.shape[2]} channels of out",
            f"{groups} groups of {width}",
            "cut wo_a and wo_b to the groups of these heads",
        )
    check_floats("wo_b", wo_b, ("hidden", groups * lora), "o_groups * o_lora_rank columns")
    check_dtype("projected_output", "out", out)
    if 0 in (out.numel(), wo_a.numel()):
        return out.new_zeros(len(out), wo_b.shape[0])
    low = operator("npu_transpose_batchmatmul")(
        out.reshape(len(out), groups, width),
        wo_a.transpose(1, 2).to(out.dtype).contiguous(),
        bias=None,
        scale=None,
        perm_x1=[1, 0, 2],
        perm_x2=[0, 1, 2],
        perm_y=[1, 0, 2],
        batch_split_factor=1,
    )
    return low.reshape(len(out), groups * lora) @ wo_b.T.to(out.dtype)  # type: ignore[no-any-return]


def quantized_rows(x: Float) -> QuantizedRows:
    """`dsacp_ref.quant.quantized_rows` by the operator, whose roundings are not specified: a code may differ by one."""
    check_floats("x", x, ("num_tokens", "in"))
    check_finite("x", x)
    check_dtype("quantized_rows", "x", x)
    if len(x) == 0:
        return no_rows(x)
    return QuantizedRows(*operator("npu_dynamic_quant")(x, dst_type=torch.int8))


def no_rows(x: Float) -> QuantizedRows:
    """The codes of rows that there are none of."""
    return QuantizedRows(x.new_empty(x.shape, dtype=torch.int8), x.new_empty(0, dtype=torch.float32))


def rms_norm_quantized(x: Float, weight: Float, eps: float) -> QuantizedRows:
    """`dsacp_ref.quant.rms_norm_quantized` by the operator; the weight goes to it in the dtype of the rows."""
    eps = check_normable(x, weight, eps)
    check_dtype("rms_norm_quantized", "x", x)
    if len(x) == 0:
        return no_rows(x)
    return QuantizedRows(*operator("npu_rms_norm_dynamic_quant")(x, weight.to(x.dtype), None, None, eps))


def quant_matmul(rows: QuantizedRows, weight: QuantizedWeight, *, dtype: str) -> Float:
    """`dsacp_ref.quant.quant_matmul` by the operator, in chunks of output channels where it takes no more at a time."""
    check_product(rows, weight)
    check_choice("dtype", dtype, (*WIDE_FLOATS, *HALVES))
    if dtype not in HALVES:
        raise limit_error("quant_matmul", "dtype", f"be {' or '.join(HALVES)}", dtype)
    (num_tokens, width), num_channels = rows.values.shape, len(weight.values)
    if width > MATMUL_WIDTH:
        raise limit_error("quant_matmul", "rows.values", f"have at most {MATMUL_WIDTH} channels", width)
    out_dtype = getattr(torch, dtype)
    if 0 in (num_tokens, num_channels):
        return rows.scales.new_zeros(num_tokens, num_channels, dtype=out_dtype)
    parts = (torch.split(part, MATMUL_WIDTH) for part in (weight.values, weight.scales))
    chunks = [
        operator("npu_quant_matmul")(
            rows.values.contiguous(),
            values.contiguous().T,  # a view: the operator reads a transposed matrix in place, and no other strides
            scales,
            pertoken_scale=rows.scales,
            output_dtype=out_dtype,  # left out it would be int8
        )
        for values, scales in zip(*parts, strict=True)
    ]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1)


def scattered_rows_(cache: torch.Tensor, rows: torch.Tensor, slots: Int32) -> torch.Tensor:
    """`dsacp_ref.paging.scattered_rows` by the operator, written into the cache, which is returned.

    A row without a slot repeats the write of a row that has one; where none has, a cache row is written over itself. So
    nothing hangs on what the operator makes of -1.
    """
    check_writes(cache, rows, slots)
    if 0 in (len(slots), cache.numel()):
        return cache
    if not cache[0].is_contiguous():
        raise limit_error("scattered_rows_", "cache", "be contiguous within a block", f"strides {cache.stride()}")
    there = slots >= 0
    first = there.int().argmax(dim=0, keepdim=True)  # the first row with a slot; row 0 if none has
    repeated = torch.where(spread(there[first], rows), rows[first], cache[:1, 0])
    targets = torch.where(there, slots, slots[first].clamp(min=0))
    places = torch.stack([targets // cache.shape[1], targets % cache.shape[1]], dim=1)
    operator("npu_scatter_nd_update_v2")(cache, places, torch.where(spread(there, rows), rows, repeated))
    return cache
