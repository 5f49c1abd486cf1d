"""CANN operators on the CPU, with the operators' own constraints and hard edges.

With them installed, the call path that runs on an Ascend NPU runs on a laptop, unchanged: the same schema strings in
the same namespaces, called with CPU tensors. Read from the operators' sources; never compared with an NPU here.

What happens at an edge:

* refused is refused: what a host check of the operator rejects is an `OperatorError` that names the rule;
* ignored is ignored, also where it looks useful;
* outside is an error: reads and writes beyond a table, a cache or a length are an `OutOfRangeError` that names tensor,
  request and position. On the device they are a memory fault, or another request's data;
* stale metadata is an error, a `StaleMetadataError`. On the device rows stay uncomputed, without a word;
* undefined is NaN: rows that the operator does not write, and results that depend on what happens to be there. Integers
  that nothing defines are `POISON`, which no cache has as an index.

Emulated:

=========== ========================================= ==================================================================
`_C_ascend` `npu_sparse_attn_sharedkv`                ratios 1, 4 and 128; TND and BSND queries; PA_ND, TND, BSND keys
`_C_ascend` `npu_sparse_attn_sharedkv_metadata`
`_C_ascend` `npu_vllm_quant_lightning_indexer`        int8 as on A2 and A3; TND and BSND queries, PA_BSND keys
`_C_ascend` `npu_vllm_quant_lightning_indexer_metadata`
`_C_ascend` `npu_lightning_indexer`                   bfloat16, float16; TND and BSND queries, PA_BSND keys
`_C_ascend` `npu_lightning_indexer_quant`             int8; TND and BSND queries, PA_BSND keys
`_C_ascend` `npu_sparse_flash_attention`              absorbed MLA with rope parts; TND and BSND queries, PA_BSND keys
`_C_ascend` `compressor`                              one state, or the older two states: ``install(compressor=...)``
`_C_ascend` `compressor_metadata`
`_C_ascend` `inplace_partial_rotary_mul`              "interleave"
`_C_ascend` `npu_rms_norm_dynamic_quant`
`_C_ascend` `npu_scatter_nd_update_v2`
`npu`       `npu_quant_lightning_indexer`             int8, PA_BSND keys
`npu`       `npu_lightning_indexer`                   as above
`npu`       `npu_sparse_flash_attention`              as above, without sinks
`npu`       `npu_transpose_batchmatmul`               without bias, scale and splitting
`npu`       `npu_quant_matmul`                        int8, a scale a row, into bfloat16 or float16, without bias
`npu`       `npu_dynamic_quant`                       per token into int8, without smoothing
`npu`       `npu_rms_norm`
`npu`       `npu_scatter_nd_update_`
=========== ========================================= ==================================================================

Not emulated: `npu_kv_quant_sparse_attn_sharedkv` and its metadata, `kv_compress_epilog`, `indexer_compress_epilog_v2`
(A5); `npu_kv_quant_sparse_flash_attention` (V3.2, FP8 caches); `npu_rotary_mul`, `npu_scatter_pa_kv_cache`.
"""

from dsacp_npu.emulator.errors import OperatorError, OutOfRangeError, StaleMetadataError
from dsacp_npu.emulator.indexer import POISON
from dsacp_npu.emulator.install import install, installed, real_library, remove

__all__ = [
    "POISON",
    "OperatorError",
    "OutOfRangeError",
    "StaleMetadataError",
    "install",
    "installed",
    "real_library",
    "remove",
]
