"""Attention over chosen latents by `npu_sparse_flash_attention`: the absorbed form, from paged caches."""

from __future__ import annotations

from dsacp_npu._cann_tables import check_chosen
from dsacp_npu._operators import check_contiguous, check_dtype, check_limit, check_multiple, limit_error, operator
from dsacp_npu._tensors import Float, Int32, dtype_name, first_true, torch, values_known
from dsacp_npu.attention import TOKENS, AttentionOutput, check_table, check_topk
from dsacp_npu.extents import query_positions
from dsacp_npu.mla import UInt8, check_latent_cache, check_latent_queries

__all__ = ["latent_attention"]

OPERATOR, CODED = "npu_sparse_flash_attention", "npu_kv_quant_sparse_flash_attention"
KV_LORA_RANK, ROPE_HEAD_DIM, MOST = 512, 64, 2048
HEAD_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
CAUSAL, ABSORBED = 3, 2
NO_LIMIT = 2**63 - 1


def latent_attention(
    q_latent: Float,
    q_rope: Float,
    latent_cache: Float | UInt8,
    rope_cache: Float | None,
    block_table: Int32,
    topk_indices: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    *,
    softmax_scale: float,
) -> AttentionOutput:
    """`dsacp_ref.mla.latent_attention` by the operator; its lse is None, as sources differ on who may ask for it.

    -1 may stand anywhere in a row of ``topk_indices``: it is moved behind the tokens, where the operator wants it.
    Caches in bytes are refused: the layout that their operator reads is not known.
    """
    check_latent_queries("q_latent", q_latent, q_rope, softmax_scale)
    widths = q_latent.shape[2], q_rope.shape[2]
    check_latent_cache(latent_cache, rope_cache, *widths, dtype_name(q_latent))
    positions = query_positions(cu_seqlens_q, seqused_kv, num_rows=len(q_latent))
    check_table("block_table", block_table, seqused_kv)
    check_topk(topk_indices, positions + 1, TOKENS)
    if rope_cache is None:
        rule = f"hold floats beside a rope_cache; bytes would go to {CODED}, whose layout is not established"
        raise limit_error("latent_attention", "latent_cache", rule, dtype_name(latent_cache))
    check_chosen(topk_indices, cu_seqlens_q, latent_cache, block_table)
    check_sizes(q_latent, q_rope, latent_cache, rope_cache, topk_indices)
    check_reach(cu_seqlens_q, seqused_kv, block_table, latent_cache.shape[1])
    empty = (len(q_latent), len(seqused_kv), len(latent_cache), block_table.shape[1], topk_indices.shape[1])
    if 0 in empty:
        return AttentionOutput(torch.zeros_like(q_latent), None)  # type: ignore[arg-type]
    latents = latent_cache.unsqueeze(2)
    out, _, _ = operator(OPERATOR)(
        q_latent.contiguous(),
        latents,
        latents,  # key and value are the same data, and must be
        tokens_first(topk_indices).unsqueeze(1),
        float(softmax_scale),
        block_table=block_table,
        actual_seq_lengths_query=cu_seqlens_q[1:],  # without its leading zero: with it there would be a request more
        actual_seq_lengths_kv=seqused_kv,
        query_rope=q_rope.contiguous(),
        key_rope=rope_cache.unsqueeze(2),
        sparse_block_size=1,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=CAUSAL,
        pre_tokens=NO_LIMIT,
        next_tokens=NO_LIMIT,
        attention_mode=ABSORBED,
        return_softmax_lse=False,
    )
    nothing = (positions < 0) | (topk_indices < 0).all(dim=1)  # not written, or undefined
    return AttentionOutput(out.masked_fill(nothing[:, None, None], 0), None)  # type: ignore[arg-type]


def tokens_first(topk_indices: Int32) -> Int32:
    """The same lists with -1 behind all tokens, whose order stays."""
    num_queries, width = topk_indices.shape
    there = topk_indices >= 0
    places = (there.cumsum(dim=1) - 1).masked_fill(~there, width)  # one place more, for all that is no token
    lists = topk_indices.new_full((num_queries, width + 1), -1)
    return lists.scatter_(1, places, topk_indices)[:, :width].contiguous()


def check_sizes(q_latent: Float, q_rope: Float, latent_cache: Float, rope_cache: Float, topk_indices: Int32) -> None:
    """Refuse what the operator has no form for."""
    function = "latent_attention"
    check_dtype(function, "q_latent", q_latent)
    check_limit(function, "kv_lora_rank", q_latent.shape[2], (KV_LORA_RANK,))
    check_limit(function, "rope_head_dim", q_rope.shape[2], (ROPE_HEAD_DIM,))
    check_limit(function, "num_heads", q_latent.shape[1], HEAD_COUNTS)
    check_multiple(function, "block size of latent_cache", latent_cache.shape[1], 16, 16, 1024)
    check_contiguous(function, "latent_cache", latent_cache)
    check_contiguous(function, "rope_cache", rope_cache)
    if topk_indices.shape[1] > MOST:
        raise limit_error(function, "index_topk", f"be in 0..{MOST}", topk_indices.shape[1])


def check_reach(cu_seqlens_q: Int32, seqused_kv: Int32, block_table: Int32, block_size: int) -> None:
    """Refuse a table without a column for every page of an extent: legal where nothing chosen lies there."""
    if not values_known(cu_seqlens_q, seqused_kv, block_table):
        return
    room = block_table.shape[1] * block_size
    beyond = (seqused_kv > room) & (cu_seqlens_q[1:] > cu_seqlens_q[:-1])
    if beyond.any():
        row = first_true(beyond)
        rule = f"have a column for each page of the {int(seqused_kv[row])} tokens of row {row}"
        raise limit_error("latent_attention", "block_table", rule, f"{block_table.shape[1]} columns")
