"""The schema strings of the emulated operators, exactly as the real libraries define them.

Read from vllm-ascend 182b75e (`_C_ascend`), torch_npu 2.14.0 (`npu`) and xLLM 87e8d6e (the two-state compressor).
Keyword names are the contract: a call that fits these strings fits the real operators.
"""

__all__ = ["SCHEMAS", "TWO_STATE_COMPRESSOR", "schemas_of"]

SCHEMAS: dict[str, tuple[str, ...]] = {
    "_C_ascend": (
        (
            "npu_sparse_attn_sharedkv(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None, "
            "Tensor? ori_sparse_indices=None, Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, "
            "Tensor? cmp_block_table=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, "
            "Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_kv=None, Tensor? sinks=None, "
            "Tensor? metadata=None, float softmax_scale=0, int cmp_ratio=0, int ori_mask_mode=4, "
            'int cmp_mask_mode=3, int ori_win_left=128, int ori_win_right=0, str layout_q="BSND", '
            'str layout_kv="PA_ND", bool return_softmax_lse=False) -> (Tensor out, Tensor softmax_lse)'
        ),
        (
            "npu_sparse_attn_sharedkv_metadata(int num_heads_q, int num_heads_kv, int head_dim, "
            "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, "
            "Tensor? seqused_q=None, Tensor? seqused_kv=None, int batch_size=0, int max_seqlen_q=0, "
            "int max_seqlen_kv=0, int ori_topk=0, int cmp_topk=0, int cmp_ratio=4, int ori_mask_mode=4, "
            'int cmp_mask_mode=3, int ori_win_left=128, int ori_win_right=0, str layout_q="BSND", '
            'str layout_kv="PA_ND", bool has_ori_kv=True, bool has_cmp_kv=True, '
            'str device="npu") -> (Tensor metadata)'
        ),
        (
            "npu_vllm_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
            "Tensor key_dequant_scale, int query_quant_mode=0, int key_quant_mode=0, "
            "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
            'Tensor? metadata=None, str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, '
            "int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, "
            "int cmp_ratio=1, bool return_value=False) -> (Tensor sparse_indices, Tensor sparse_values)"
        ),
        (
            "npu_vllm_quant_lightning_indexer_metadata(int num_heads_q, int num_heads_k, int head_dim, "
            "int query_quant_mode, int key_quant_mode, Tensor? actual_seq_lengths_query=None, "
            "Tensor? actual_seq_lengths_key=None, int batch_size=0, int max_seqlen_q=0, int max_seqlen_k=0, "
            'str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, '
            "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int cmp_ratio=1, "
            'str device="npu") -> (Tensor metadata)'
        ),
        (
            "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
            "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
            'str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, '
            "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, bool return_value=False) -> "
            "(Tensor sparse_indices, Tensor sparse_values)"
        ),
        (
            "npu_lightning_indexer_quant(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
            "Tensor key_dequant_scale, *, Tensor? actual_seq_lengths_query=None, "
            "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, int query_quant_mode=0, "
            "int key_quant_mode=0, str layout_query='BSND', str layout_key='BSND', int sparse_count=2048, "
            "int sparse_mode=3) -> Tensor"
        ),
        (
            "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
            "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
            "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
            "int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', int sparse_mode=3, "
            "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=2, "
            "bool return_softmax_lse=False) -> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)"
        ),
        (
            "compressor(Tensor x, Tensor wkv, Tensor wgate, Tensor(a!) state_cache, Tensor ape, Tensor norm_weight, "
            "Tensor rope_sin, Tensor rope_cos, Tensor? state_block_table, Tensor? cu_seqlens, Tensor? seqused, "
            "Tensor? start_pos, int rope_head_dim, int cmp_ratio, int coff, float norm_eps, int rotary_mode, "
            "int cache_mode) -> Tensor"
        ),
        (
            "compressor_metadata(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, Tensor start_pos, "
            "Tensor kv_block_table, int kv_block_size, int slot_mapping_format, int compress_ratio, "
            "int num_compressed_tokens, int num_reqs_actual) -> (Tensor, Tensor, Tensor)"
        ),
        "inplace_partial_rotary_mul(Tensor(a!) x, Tensor r1, Tensor r2, str rotary_mode, int[] partial_slice) -> ()",
        (
            "npu_rms_norm_dynamic_quant(Tensor x, Tensor gamma, Tensor? smooth_scale=None, Tensor? beta=None, "
            "float epsilon=1e-6) -> (Tensor y_out, Tensor scale_out)"
        ),
        "npu_scatter_nd_update_v2(Tensor(a!) var, Tensor indices, Tensor update) -> ()",
    ),
    "npu": (
        (
            "npu_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
            "Tensor key_dequant_scale, int query_quant_mode, int key_quant_mode, *, "
            "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
            'str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, '
            "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int? query_dtype=None, "
            "int? key_dtype=None) -> Tensor"
        ),
        (
            "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
            "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
            'str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, '
            "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, bool return_value=False) -> "
            "(Tensor, Tensor)"
        ),
        (
            "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
            "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
            "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
            'int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, '
            "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=0, "
            "bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)"
        ),
        (
            "npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None, "
            "int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1) -> Tensor"
        ),
        (
            "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, "
            "Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, int? x2_dtype=None, "
            "int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, "
            "Tensor? y_scale=None) -> Tensor"
        ),
        (
            "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
            'int? dst_type=None, str quant_mode="pertoken", float dst_type_max=0.0) -> (Tensor, Tensor)'
        ),
        "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
        "npu_scatter_nd_update_(Tensor(a!) self, Tensor indices, Tensor updates) -> Tensor(a!)",
    ),
}

# The older form of `_C_ascend.compressor`: keys and scores in two states, each with its block table.
TWO_STATE_COMPRESSOR = (
    "compressor(Tensor x, Tensor wkv, Tensor wgate, Tensor(a!) kv_state, Tensor(b!) score_state, Tensor ape, "
    "Tensor norm_weight, Tensor rope_sin, Tensor rope_cos, Tensor? kv_block_table, Tensor? score_block_table, "
    "Tensor? cu_seqlens, Tensor? seqused, Tensor? start_pos, int rope_head_dim, int cmp_ratio, int coff, "
    "float norm_eps, int rotary_mode, bool enable_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def schemas_of(namespace: str, *, compressor: str) -> tuple[str, ...]:
    """The schemas of a namespace, with one of the two forms of the compressor: "current" or "two_state"."""
    if compressor == "current":
        return SCHEMAS[namespace]
    return tuple(TWO_STATE_COMPRESSOR if text.startswith("compressor(") else text for text in SCHEMAS[namespace])
