"""What backend `triton` computes, and where: function, the module that launches it, the kernel files behind it.

Names only, so that this can be read where Triton is not installed. `dsacp_npu.backend.get("triton")` loads the
functions. They have the names, arguments and results of `dsacp_ref`; what is legal but outside of a kernel's limits is
refused with `UnsupportedError`, never computed by other means. Matrix products of projections are torch's.
"""

from __future__ import annotations

__all__ = ["FUNCTIONS", "KERNEL_FILES", "LOGIT_LIMIT", "RUN_ON_GPU"]

# Up to this size of logits attention may do without a running maximum: neither exp of one, nor its sum over 2**20 keys,
# nor that times a key leaves float32.
LOGIT_LIMIT = 70.0

# The module of `dsacp_npu` that launches each function.
FUNCTIONS: dict[str, str] = {
    "all_entries_attention": "_triton_attention",
    "apply_half_rope": "_triton_rows",
    "apply_inverse_rope": "_triton_rows",
    "apply_inverse_rope_": "_triton_rows",
    "apply_rope": "_triton_rows",
    "apply_rope_": "_triton_rows",
    "attention_lists": "_triton_attention",
    "build_cp_local_metadata": "_triton_metadata",
    "compress": "_triton_compressor",
    "compress_": "_triton_compressor",
    "compressed_entries": "_triton_compressor",
    "gathered_rows": "_triton_rows",
    "hadamard": "_triton_hadamard",
    "index_queries": "_triton_indexer",
    "index_scores": "_triton_scores",
    "int8_index_scores": "_triton_scores",
    "latent_attention": "_triton_latents",
    "lightning_indexer": "_triton_indexer",
    "local_extents": "_triton_metadata",
    "packed_heads": "_triton_rows",
    "pooled_entries": "_triton_compressor",
    "projected_output": "_triton_indexer",
    "projected_rows": "_triton_compressor",
    "query_positions": "_triton_metadata",
    "query_rows": "_triton_metadata",
    "rms_norm": "_triton_compressor",
    "scattered_rows": "_triton_rows",
    "scattered_rows_": "_triton_rows",
    "selected_attention": "_triton_attention",
    "selected_entries": "_triton_topk",
    "slot_mapping": "_triton_rows",
    "unpacked_heads": "_triton_rows",
    "updated_state": "_triton_compressor",
    "updated_state_": "_triton_compressor",
    "window_attention": "_triton_attention",
}

# The files of `dsacp_npu.kernels` that each function launches from; none where torch's products are all there is.
KERNEL_FILES: dict[str, tuple[str, ...]] = {
    "all_entries_attention": ("queries", "attention_slots", "attention"),
    "apply_half_rope": ("rope",),
    "apply_inverse_rope": ("rope",),
    "apply_inverse_rope_": ("rope",),
    "apply_rope": ("rope",),
    "apply_rope_": ("rope",),
    "attention_lists": ("queries", "attention_slots"),
    "build_cp_local_metadata": ("metadata",),
    "compress": ("compressor", "compressor_state"),
    "compress_": ("compressor", "compressor_state"),
    "compressed_entries": ("compressor",),
    "gathered_rows": ("paging",),
    "hadamard": ("hadamard",),
    "index_queries": ("rope", "hadamard"),
    "index_scores": ("scores",),
    "int8_index_scores": ("scores",),
    "latent_attention": ("queries", "attention_slots", "latents"),
    "lightning_indexer": ("queries", "scores", "topk"),
    "local_extents": ("metadata",),
    "packed_heads": ("exchange",),
    "pooled_entries": ("compressor",),
    "projected_output": (),
    "projected_rows": (),
    "query_positions": ("queries",),
    "query_rows": ("queries",),
    "rms_norm": ("norm",),
    "scattered_rows": ("paging",),
    "scattered_rows_": ("paging",),
    "selected_attention": ("queries", "attention_slots", "attention"),
    "selected_entries": ("topk",),
    "slot_mapping": ("paging",),
    "unpacked_heads": ("exchange",),
    "updated_state": ("compressor_state",),
    "updated_state_": ("compressor_state",),
    "window_attention": ("queries", "attention_slots", "attention"),
}

# What has run on an NVIDIA GPU, by itself or in a layer there; of what takes this backend, three forms.
RUN_ON_GPU = frozenset(
    {*FUNCTIONS} - {"compressed_entries"} | {"attention_layer", "layer_over_ranks", "mla_stack_over_ranks"}
)
