"""Adapters to the operators of an Ascend NPU: our names and layouts on one side, operator names on the other.

The functions have the names, arguments and results of `dsacp_ref`; attention has no lse, which the operator does not
give. A call that is legal but outside of an operator's limits is refused with `UnsupportedError`, never computed by
other means; what an operator would refuse because it is empty is answered without it. Where lengths and tables can be
read (tests on a CPU), they are checked as the reference does. Contract only: tested against `dsacp_npu.emulator`.
"""

from __future__ import annotations

from dsacp_npu._cann_attention import (
    all_entries_attention,
    attention_metadata,
    packed_attention,
    selected_attention,
    window_attention,
)
from dsacp_npu._cann_compressor import EntryRows, compress, compress_, entry_rope_and_slots
from dsacp_npu._cann_indexer import indexer_metadata, lightning_indexer
from dsacp_npu._cann_latents import latent_attention
from dsacp_npu._cann_vectors import (
    apply_inverse_rope,
    apply_rope,
    index_queries,
    projected_output,
    quant_matmul,
    quantized_rows,
    rms_norm_quantized,
    scattered_rows_,
)

__all__ = [
    "OPERATORS",
    "EntryRows",
    "all_entries_attention",
    "apply_inverse_rope",
    "apply_rope",
    "attention_metadata",
    "compress",
    "compress_",
    "entry_rope_and_slots",
    "index_queries",
    "indexer_metadata",
    "latent_attention",
    "lightning_indexer",
    "packed_attention",
    "projected_output",
    "quant_matmul",
    "quantized_rows",
    "rms_norm_quantized",
    "scattered_rows_",
    "selected_attention",
    "window_attention",
]

ATTENTION = ("npu_sparse_attn_sharedkv", "npu_sparse_attn_sharedkv_metadata")
INDEXER = ("npu_vllm_quant_lightning_indexer", "npu_vllm_quant_lightning_indexer_metadata")

# The operators that each function calls. The indexer's may also go by the names npu_quant_lightning_indexer and
# npu_quant_lightning_indexer_metadata, where they take cmp_ratio; over tokens it is npu_lightning_indexer for floats,
# and npu_lightning_indexer_quant for int8 where the others are not there.
OPERATORS: dict[str, tuple[str, ...]] = {
    "all_entries_attention": ATTENTION,
    "apply_inverse_rope": ("inplace_partial_rotary_mul",),
    "apply_rope": ("inplace_partial_rotary_mul",),
    "attention_metadata": ATTENTION[1:],
    "compress": ("compressor",),
    "compress_": ("compressor",),
    "entry_rope_and_slots": ("compressor_metadata",),
    "index_queries": ("inplace_partial_rotary_mul",),
    "indexer_metadata": INDEXER[1:],
    "latent_attention": ("npu_sparse_flash_attention",),
    "lightning_indexer": INDEXER,
    "packed_attention": ATTENTION,
    "projected_output": ("npu_transpose_batchmatmul",),
    "quant_matmul": ("npu_quant_matmul",),
    "quantized_rows": ("npu_dynamic_quant",),
    "rms_norm_quantized": ("npu_rms_norm_dynamic_quant",),
    "scattered_rows_": ("npu_scatter_nd_update_v2",),
    "selected_attention": ATTENTION,
    "window_attention": ATTENTION,
}
