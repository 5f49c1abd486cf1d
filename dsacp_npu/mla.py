"""Mirror of `dsacp_ref.mla` over torch. Runs on the device of its arguments and never waits for it.

Every query gathers the latents that it chose, a few queries at a time. bfloat16 and float16 are computed in float32 and
rounded once; ``lse`` stays float32. Attention is for inference: what it gives carries no gradients.
"""

from __future__ import annotations

from typing import NamedTuple

from dsacp_npu._tensors import (
    Float,
    Int32,
    check_floats,
    check_tensor,
    computing_dtype,
    dtype_name,
    torch,
    values_known,
)
from dsacp_npu._tiles import in_blocks
from dsacp_npu.attention import TOKENS, AttentionOutput, attended, check_table, check_topk, checked_queries
from dsacp_npu.compressor import rms_norm
from dsacp_npu.extents import check_batch, query_positions, query_rows, token_positions, token_requests
from dsacp_npu.fp8 import decoded_latents, latent_row_bytes
from dsacp_npu.indexer import hadamard, index_heads
from dsacp_npu.paging import check_slots, gathered_rows, slot_mapping
from dsacp_npu.rope import apply_half_rope, apply_rope, rope_frequencies, yarn_frequencies
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import INT32_MAX, check_int, check_number, check_record, contract_error

__all__ = [
    "KeyRanges",
    "LatentKeys",
    "LatentQueries",
    "absorbed_queries",
    "causal_picks",
    "expanded_attention",
    "key_ranges",
    "latent_attention",
    "latent_keys",
    "latent_queries",
    "layer_norm",
    "mla_frequencies",
    "packed_topk",
    "paged_topk",
    "token_index_keys",
    "token_index_queries",
    "value_heads",
]

UInt8 = torch.Tensor
TAKEN_NUMBERS = 1 << 20  # numbers gathered at a time on a CPU: they stay in the cache until they are used
GATHERED_NUMBERS = 1 << 24  # and elsewhere: few blocks, or a traced program grows long


class LatentKeys(NamedTuple):
    """Mirror of `dsacp_ref.mla.LatentKeys`."""

    latent: Float
    rope_key: Float


class LatentQueries(NamedTuple):
    """Mirror of `dsacp_ref.mla.LatentQueries`."""

    q_nope: Float
    q_rope: Float


class KeyRanges(NamedTuple):
    """Mirror of `dsacp_ref.mla.KeyRanges`."""

    starts: Int32
    ends: Int32


# --- projections ---


def mla_frequencies(config: MLAConfig) -> tuple[float, ...]:
    """Mirror of `dsacp_ref.mla.mla_frequencies`."""
    check_record("config", config, MLAConfig)
    if config.rope_factor == 1:
        return rope_frequencies(config.rope_theta, config.rope_head_dim)
    return yarn_frequencies(
        config.rope_theta,
        config.rope_head_dim,
        factor=config.rope_factor,
        beta_fast=config.rope_beta_fast,
        beta_slow=config.rope_beta_slow,
        original_max_position=config.rope_original_max_position,
    )


def layer_norm(x: Float, weight: Float, bias: Float, eps: float) -> Float:
    """Mirror of `dsacp_ref.mla.layer_norm`."""
    check_floats("x", x, (*getattr(x, "shape", ())[:-1], "d"))
    d = check_int("d", x.shape[-1], 1)
    check_floats("weight", weight, (d,), "one weight a channel")
    check_floats("bias", bias, (d,), "one bias a channel")
    eps = check_number("eps", eps, at_least=0.0)
    dtype = computing_dtype(x.dtype)

    def normed(rows: Float) -> Float:
        wide = rows.to(dtype)
        centred = wide - wide.mean(dim=-1, keepdim=True)
        deviation = (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()
        return (centred / deviation * weight.to(dtype) + bias.to(dtype)).to(x.dtype)

    return in_blocks(normed, x)


def latent_keys(x: Float, wkv_a: Float, kv_norm: Float, cos: Float, sin: Float, *, eps: float) -> LatentKeys:
    """Mirror of `dsacp_ref.mla.latent_keys`."""
    check_floats("x", x, ("num_tokens", "hidden"))
    check_floats("cos", cos, (len(x), "rope_head_dim / 2"), "one row of the table a token")
    check_floats("kv_norm", kv_norm, ("kv_lora_rank",))
    width = len(kv_norm) + 2 * cos.shape[1]
    check_floats("wkv_a", wkv_a, (width, x.shape[1]), "kv_lora_rank + rope_head_dim rows")
    projected = x @ wkv_a.T.to(x.dtype)
    latent = rms_norm(projected[:, : len(kv_norm)], kv_norm, eps)
    return LatentKeys(latent, apply_rope(projected[:, len(kv_norm) :], cos, sin))


def latent_queries(qr: Float, wq_b: Float, cos: Float, sin: Float, *, nope_head_dim: int) -> LatentQueries:
    """Mirror of `dsacp_ref.mla.latent_queries`."""
    check_floats("qr", qr, ("num_tokens", "q_lora_rank"))
    check_floats("cos", cos, (len(qr), "rope_head_dim / 2"), "one row of the table a token")
    nope_head_dim = check_int("nope_head_dim", nope_head_dim, 1)
    check_floats("wq_b", wq_b, ("num_heads * head width", qr.shape[1]), "as wide as the query latent")
    width = nope_head_dim + 2 * cos.shape[1]
    if len(wq_b) % width:
        raise contract_error("wq_b", f"have a multiple of {width} rows", len(wq_b), "nope and rope channels of a head")
    heads = (qr @ wq_b.T.to(qr.dtype)).reshape(len(qr), len(wq_b) // width, width)
    return LatentQueries(heads[..., :nope_head_dim], apply_rope(heads[..., nope_head_dim:], cos, sin))


def absorbed_queries(q_nope: Float, w_uk: Float) -> Float:
    """Mirror of `dsacp_ref.mla.absorbed_queries`."""
    check_floats("q_nope", q_nope, ("num_tokens", "num_heads", "nope_head_dim"))
    check_floats("w_uk", w_uk, (*q_nope.shape[1:], "kv_lora_rank"), "cut it with the heads")
    return (q_nope.transpose(0, 1) @ w_uk.to(q_nope.dtype)).transpose(0, 1)


def value_heads(out: Float, w_uv: Float) -> Float:
    """Mirror of `dsacp_ref.mla.value_heads`."""
    check_floats("out", out, ("num_tokens", "num_heads", "kv_lora_rank"))
    check_floats("w_uv", w_uv, (out.shape[1], "v_head_dim", out.shape[2]), "cut it with the heads")
    return (out.transpose(0, 1) @ w_uv.transpose(1, 2).to(out.dtype)).transpose(0, 1)


# --- the indexer's two sides ---


def token_index_keys(
    x: Float, wk: Float, k_norm: Float, k_norm_bias: Float, cos: Float, sin: Float, *, eps: float
) -> Float:
    """Mirror of `dsacp_ref.mla.token_index_keys`."""
    check_floats("x", x, ("num_tokens", "hidden"))
    check_floats("wk", wk, ("index_head_dim", x.shape[1]), "as wide as x")
    dtype = computing_dtype(x.dtype)
    keys = layer_norm(x.to(dtype) @ wk.T.to(dtype), k_norm, k_norm_bias, eps)
    return hadamard(apply_half_rope(keys, cos, sin)).to(x.dtype)


def token_index_queries(qr: Float, wq_b: Float, cos: Float, sin: Float, *, index_head_dim: int) -> Float:
    """Mirror of `dsacp_ref.mla.token_index_queries`."""
    return hadamard(apply_half_rope(index_heads(qr, wq_b, index_head_dim), cos, sin)).to(qr.dtype)


# --- key ranges and picks of a strided shard ---


def key_ranges(token_indices: Int32, query_start_loc: Int32, seq_lens: Int32) -> KeyRanges:
    """Mirror of `dsacp_ref.mla.key_ranges`."""
    check_batch(query_start_loc, seq_lens)
    first_keys = torch.cat([seq_lens.new_zeros(1, dtype=torch.int64), seq_lens.cumsum(0)])
    if values_known(first_keys) and first_keys[-1] > INT32_MAX:
        raise contract_error("seq_lens", "sum to less than 2**31", int(first_keys[-1]), "ranges are int32")
    requests = token_requests(token_indices, query_start_loc)
    positions = token_positions(token_indices, query_start_loc, seq_lens)
    blind = positions < 0
    starts = first_keys[requests.masked_fill(blind, 0)].masked_fill(blind, 0).int()
    return KeyRanges(starts, starts + positions + 1)


def packed_topk(topk_indices: Int32, starts: Int32) -> Int32:
    """Mirror of `dsacp_ref.mla.packed_topk`."""
    check_tensor("topk_indices", topk_indices, ("int32",), ("num_rows", "index_topk"), "one list a row")
    check_tensor("starts", starts, ("int32",), (len(topk_indices),), "one start a row")
    rows = torch.where(topk_indices >= 0, topk_indices.long() + starts[:, None], -1)
    if values_known(rows) and rows.numel() and rows.max() > INT32_MAX:
        raise contract_error("starts", "give rows below 2**31", int(rows.max()), "packed rows are int32")
    return rows.int()


def paged_topk(topk_indices: Int32, request_indices: Int32, block_table: Int32, block_size: int) -> Int32:
    """Mirror of `dsacp_ref.mla.paged_topk`."""
    check_tensor("topk_indices", topk_indices, ("int32",), ("num_rows", "index_topk"), "one list a row")
    return slot_mapping(topk_indices, request_indices, block_table, block_size)


def causal_picks(topk_indices: Int32, positions: Int32) -> Int32:
    """Mirror of `dsacp_ref.mla.causal_picks`."""
    check_tensor("topk_indices", topk_indices, ("int32",), ("num_rows", "index_topk"), "one list a row")
    check_tensor("positions", positions, ("int32",), (len(topk_indices),), "one position a row")
    return topk_indices.masked_fill(topk_indices > positions[:, None], -1)


# --- attention ---


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
    """Mirror of `dsacp_ref.mla.latent_attention`."""
    check_latent_queries("q_latent", q_latent, q_rope, softmax_scale)
    kv_lora_rank = q_latent.shape[2]
    slots = chosen_slots(
        q_rope, latent_cache, rope_cache, kv_lora_rank, block_table, topk_indices, cu_seqlens_q, seqused_kv
    )
    # A key is also what is added up; its rope channels are then left out.
    q = torch.cat([q_latent, q_rope], dim=2).detach()
    out, lse = q_latent.new_empty(q_latent.shape), q.new_empty(q.shape[:2], dtype=computing_dtype(q.dtype))
    for block, mine in query_blocks(slots, q.shape[2]):
        rows = torch.cat(rows_at(mine, latent_cache, rope_cache, kv_lora_rank, lse.dtype), dim=2)
        result, lse[block] = attended(q[block], rows, mine < 0, None, softmax_scale)
        out[block] = result[..., :kv_lora_rank]
    return AttentionOutput(out, lse)


def expanded_attention(
    q_nope: Float,
    q_rope: Float,
    latent_cache: Float | UInt8,
    rope_cache: Float | None,
    w_uk: Float,
    w_uv: Float,
    block_table: Int32,
    topk_indices: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    *,
    softmax_scale: float,
) -> AttentionOutput:
    """Mirror of `dsacp_ref.mla.expanded_attention`. Every query expands the latents that it chose."""
    check_latent_queries("q_nope", q_nope, q_rope, softmax_scale)
    check_floats("w_uk", w_uk, (*q_nope.shape[1:], "kv_lora_rank"), "cut it with the heads")
    check_floats("w_uv", w_uv, (len(w_uk), "v_head_dim", w_uk.shape[2]), "cut it with the heads")
    slots = chosen_slots(
        q_rope, latent_cache, rope_cache, w_uk.shape[2], block_table, topk_indices, cu_seqlens_q, seqused_kv
    )
    dtype, width = computing_dtype(q_nope.dtype), q_nope.shape[2] + q_rope.shape[2]
    out = q_nope.new_empty(*q_nope.shape[:2], w_uv.shape[1])
    lse = q_nope.new_empty(q_nope.shape[:2], dtype=dtype)
    # Values stand behind the key that they belong to, where the query is zero.
    q = torch.cat([q_nope, q_rope, torch.zeros_like(out)], dim=2).detach()
    for block, mine in query_blocks(slots, q.shape[2]):
        latents, rope_keys = rows_at(mine, latent_cache, rope_cache, w_uk.shape[2], dtype)
        for head in range(q.shape[1]):
            keys, values = (latents @ part[head].detach().T.to(dtype) for part in (w_uk, w_uv))
            rows = torch.cat([keys, rope_keys, values], dim=2)
            result, head_lse = attended(q[block, head, None], rows, mine < 0, None, softmax_scale)
            out[block, head], lse[block, head] = result[:, 0, width:].to(out.dtype), head_lse[:, 0]
    return AttentionOutput(out, lse)


def query_blocks(slots: Int32, width: int) -> list[tuple[slice, Int32]]:
    """Some queries at a time, with their slots; where these can be read, without columns that none of them uses."""
    known = values_known(slots)
    step = max(1, (TAKEN_NUMBERS if known else GATHERED_NUMBERS) // max(1, slots.shape[1] * width))
    blocks = []
    for start in range(0, len(slots), step):
        mine = slots[start : start + step]
        if known:
            mine = mine[:, (mine >= 0).any(dim=0)]  # early queries see few tokens
        blocks.append((slice(start, start + len(mine)), mine))
    return blocks


def rows_at(
    slots: Int32, latent_cache: Float | UInt8, rope_cache: Float | None, kv_lora_rank: int, dtype: torch.dtype
) -> tuple[Float, Float]:
    """The latents and rope keys at these slots in a dtype to compute in, zero where there is none."""
    rows = gathered_rows(latent_cache.detach(), slots)
    if rope_cache is None:
        return decoded_latents(rows, kv_lora_rank=kv_lora_rank, dtype=str(dtype).removeprefix("torch."))
    return rows.to(dtype), gathered_rows(rope_cache.detach(), slots).to(dtype)


def check_latent_queries(name: str, q: Float, q_rope: Float, softmax_scale: float) -> None:
    """Refuse two parts of queries that do not belong together."""
    check_floats(name, q, ("num_queries", "num_heads", "width"))
    shape = (*q.shape[:2], "rope_head_dim")
    check_tensor("q_rope", q_rope, (dtype_name(q),), shape, f"the other part of {name}")
    checked_queries(q, softmax_scale)


def chosen_slots(
    q_rope: Float,
    latent_cache: Float | UInt8,
    rope_cache: Float | None,
    kv_lora_rank: int,
    block_table: Int32,
    topk_indices: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
) -> Int32:
    """Where each query's tokens lie in the caches, once the call is found legal."""
    num_queries, _, rope_head_dim = q_rope.shape
    block_size = check_latent_cache(latent_cache, rope_cache, kv_lora_rank, rope_head_dim, dtype_name(q_rope))
    positions = query_positions(cu_seqlens_q, seqused_kv, num_rows=num_queries)
    check_table("block_table", block_table, seqused_kv)
    check_topk(topk_indices, positions + 1, TOKENS)
    slots = slot_mapping(topk_indices, query_rows(cu_seqlens_q, num_rows=num_queries), block_table, block_size)
    check_slots(slots, latent_cache.shape[0] * block_size)
    return slots


def check_latent_cache(
    latent_cache: Float | UInt8, rope_cache: Float | None, kv_lora_rank: int, rope_head_dim: int, dtype: str
) -> int:
    """The block size, once the caches hold rows of this width: floats of this dtype in two, or bytes in one."""
    if rope_cache is None:
        row_bytes = latent_row_bytes(kv_lora_rank, rope_head_dim)
        shape = ("num_blocks", "block_size", row_bytes)
        check_tensor("latent_cache", latent_cache, ("uint8",), shape, "without a rope_cache")
        return latent_cache.shape[1]
    shape = ("num_blocks", "block_size", kv_lora_rank)
    check_tensor("latent_cache", latent_cache, (dtype,), shape, "as the queries")
    shape = (*latent_cache.shape[:2], rope_head_dim)
    check_tensor("rope_cache", rope_cache, (dtype,), shape, "the same blocks as latent_cache")
    return latent_cache.shape[1]
