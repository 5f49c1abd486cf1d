"""DeepSeek-V3.2's attention: latents that all heads share, and an indexer that chooses tokens.

::

    x -> wq_a, norm -> qr -> wq_b -> q_nope, q_rope (RoPE, interleaved) ---.
     \\                \\-> index queries -> scores -> top-k -> tokens ------+-> attention -> w_uv -> wo
      \\-> wkv_a -> latent (norm), rope key (RoPE) -> caches ---------------|
       \\-> wk, LayerNorm, RoPE (half-split), Hadamard -> index cache ------'

A token is kept as its latent, one rope key for all heads, and an index key. A head's key is ``[w_uk latent | rope
key]`` and its value is ``w_uv latent``. Both are linear in the latent, so ``w_uk`` may meet the query instead
(*absorbed*), and attention runs over latents as over one head's keys. There is no window, no sink and no entry of
several tokens: the indexer chooses among all tokens up to the query, which is `lightning_indexer` with compress_ratio
1, and the softmax runs over the chosen ones only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.attention import TOKENS, AttentionOutput, check_table, check_topk, checked_queries, gathered_from
from dsacp_ref.compressor import rms_norm
from dsacp_ref.extents import FLOATS, Float, check_batch, query_positions, query_rows, token_positions, token_requests
from dsacp_ref.fp8 import decoded_latents, latent_row_bytes
from dsacp_ref.indexer import hadamard, index_heads
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.paging import check_slots, flat_cache, slot_mapping
from dsacp_ref.partition import Int32
from dsacp_ref.rope import apply_half_rope, apply_rope, rope_frequencies, yarn_frequencies
from dsacp_ref.spec import INT32_MAX, check_array, check_int, check_number, check_record, contract_error

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

UInt8 = NDArray[np.uint8]


class LatentKeys(NamedTuple):
    """What is kept of tokens for attention.

    Fields:
        latent: float[num_tokens, kv_lora_rank], normed: keys and values of all heads.
        rope_key: float[num_tokens, rope_head_dim], turned: one for all heads.

    >>> LatentKeys._fields
    ('latent', 'rope_key')
    """

    latent: Float
    rope_key: Float


class LatentQueries(NamedTuple):
    """The two parts of every head's query.

    Fields:
        q_nope: float[num_tokens, num_heads, nope_head_dim].
        q_rope: float[num_tokens, num_heads, rope_head_dim], turned.

    >>> LatentQueries._fields
    ('q_nope', 'q_rope')
    """

    q_nope: Float
    q_rope: Float


class KeyRanges(NamedTuple):
    """Which keys each local row may see, the keys of all requests laid end to end.

    Fields:
        starts: int32[num_rows], keys, inclusive.
        ends: int32[num_rows], keys, exclusive; equal to the start where nothing is visible.

    >>> KeyRanges._fields
    ('starts', 'ends')
    """

    starts: Int32
    ends: Int32


# --- projections ---


def mla_frequencies(config: MLAConfig) -> tuple[float, ...]:
    """The frequencies of every layer's one RoPE table, for queries, rope keys and index vectors alike.

    Args:
        config: MLAConfig.

    Returns:
        tuple of rope_head_dim / 2 floats, radians a token; YaRN's, where rope_factor is above 1.

    Raises:
        ContractError: not an MLAConfig.

    Source: DeepSeek-V3.2 inference model; transformers' deepseek_v32.

    >>> from dsacp_ref.mla_config import v32
    >>> len(mla_frequencies(v32())), mla_frequencies(v32())[0]
    (32, 1.0)
    """
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
    """The vectors less their mean, divided by their standard deviation, times a weight and plus a bias per channel.

    Args:
        x: float32 or float64 [..., d].
        weight: float[d].
        bias: float[d].
        eps: number, added to the variance, >= 0.

    Returns:
        dtype of ``x``, same shape.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: the norm of V3.2's index keys; everything else in the model has RMS norms.

    >>> layer_norm(np.array([[1.0, 3.0]]), np.ones(2), np.array([0.0, 10.0]), 0.0).tolist()
    [[-1.0, 11.0]]
    """
    check_array("x", x, FLOATS, (*getattr(x, "shape", ())[:-1], "d"))
    d = check_int("d", x.shape[-1], 1)
    check_array("weight", weight, FLOATS, (d,), "one weight a channel")
    check_array("bias", bias, FLOATS, (d,), "one bias a channel")
    eps = check_number("eps", eps, at_least=0.0)
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + x.dtype.type(eps))
    normed: Float = centred / deviation * weight.astype(x.dtype) + bias.astype(x.dtype)
    return normed


def latent_keys(x: Float, wkv_a: Float, kv_norm: Float, cos: Float, sin: Float, *, eps: float) -> LatentKeys:
    """The latents and rope keys of some tokens.

    Args:
        x: float32 or float64 [num_tokens, hidden], the block input after its norm.
        wkv_a: float[kv_lora_rank + rope_head_dim, hidden], rows of the latent first.
        kv_norm: float[kv_lora_rank].
        cos: float[num_tokens, rope_head_dim / 2], the table at the tokens' positions.
        sin: like ``cos``.
        eps: number, of the RMS norm, which is over the latent alone.

    Returns:
        LatentKeys in the dtype of ``x``.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: DeepSeek-V3.2 inference model, wkv_a and kv_norm; RoPE in adjacent pairs.

    >>> keys = latent_keys(np.ones((1, 1)), np.array([[3.0], [4.0], [1.0], [0.0]]), np.ones(2), np.zeros((1, 1)),
    ...                    np.ones((1, 1)), eps=1e-6)
    >>> keys.latent.round(4).tolist(), keys.rope_key.tolist()
    ([[0.8485, 1.1314]], [[0.0, 1.0]])
    """
    check_array("x", x, FLOATS, ("num_tokens", "hidden"))
    check_array("cos", cos, FLOATS, (len(x), "rope_head_dim / 2"), "one row of the table a token")
    check_array("kv_norm", kv_norm, FLOATS, ("kv_lora_rank",))
    width = len(kv_norm) + 2 * cos.shape[1]
    check_array("wkv_a", wkv_a, FLOATS, (width, x.shape[1]), "kv_lora_rank + rope_head_dim rows")
    projected = x @ wkv_a.T.astype(x.dtype)
    latent = rms_norm(projected[:, : len(kv_norm)], kv_norm, eps)
    return LatentKeys(latent, apply_rope(projected[:, len(kv_norm) :], cos, sin))


def latent_queries(qr: Float, wq_b: Float, cos: Float, sin: Float, *, nope_head_dim: int) -> LatentQueries:
    """The queries of as many heads as ``wq_b`` has; no norm, unlike V4's.

    Args:
        qr: float32 or float64 [num_tokens, q_lora_rank], the query latent after its norm.
        wq_b: float[num_heads * (nope_head_dim + rope_head_dim), q_lora_rank]; a head is ``[nope | rope]``.
        cos: float[num_tokens, rope_head_dim / 2], the table at the queries' positions.
        sin: like ``cos``.
        nope_head_dim: int, channels of a head that do not turn, >= 1.

    Returns:
        LatentQueries in the dtype of ``qr``.

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: DeepSeek-V3.2 inference model, wq_b; RoPE in adjacent pairs.

    >>> latent_queries(np.ones((1, 1)), np.array([[5.0], [1.0], [0.0]]), np.zeros((1, 1)), np.ones((1, 1)),
    ...                nope_head_dim=1)
    LatentQueries(q_nope=array([[[5.]]]), q_rope=array([[[0., 1.]]]))
    """
    check_array("qr", qr, FLOATS, ("num_tokens", "q_lora_rank"))
    check_array("cos", cos, FLOATS, (len(qr), "rope_head_dim / 2"), "one row of the table a token")
    nope_head_dim = check_int("nope_head_dim", nope_head_dim, 1)
    check_array("wq_b", wq_b, FLOATS, ("num_heads * head width", qr.shape[1]), "as wide as the query latent")
    width = nope_head_dim + 2 * cos.shape[1]
    if len(wq_b) % width:
        raise contract_error("wq_b", f"have a multiple of {width} rows", len(wq_b), "nope and rope channels of a head")
    heads = (qr @ wq_b.T.astype(qr.dtype)).reshape(len(qr), len(wq_b) // width, width)
    return LatentQueries(heads[..., :nope_head_dim], apply_rope(heads[..., nope_head_dim:], cos, sin))


def absorbed_queries(q_nope: Float, w_uk: Float) -> Float:
    """The queries in the latents' own space, so that keys need not be made from latents.

    Args:
        q_nope: float32 or float64 [num_tokens, num_heads, nope_head_dim].
        w_uk: float[num_heads, nope_head_dim, kv_lora_rank], from latents to keys (rows of the checkpoint's wkv_b).

    Returns:
        dtype of ``q_nope`` [num_tokens, num_heads, kv_lora_rank]: ``q_nope . (w_uk latent)`` is its product with the
        latent.

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: DeepSeek-V2, the absorbed form of MLA.

    >>> absorbed_queries(np.array([[[2.0]]]), np.array([[[1.0, 10.0]]])).tolist()
    [[[2.0, 20.0]]]
    """
    check_array("q_nope", q_nope, FLOATS, ("num_tokens", "num_heads", "nope_head_dim"))
    check_array("w_uk", w_uk, FLOATS, (*q_nope.shape[1:], "kv_lora_rank"), "cut it with the heads")
    absorbed: Float = np.matmul(q_nope.swapaxes(0, 1), w_uk.astype(q_nope.dtype)).swapaxes(0, 1)
    return absorbed


def value_heads(out: Float, w_uv: Float) -> Float:
    """The heads' values from attention over latents: the other end of the absorbed form.

    Args:
        out: float32 or float64 [num_tokens, num_heads, kv_lora_rank], weighted latents.
        w_uv: float[num_heads, v_head_dim, kv_lora_rank], from latents to values (rows of the checkpoint's wkv_b).

    Returns:
        dtype of ``out`` [num_tokens, num_heads, v_head_dim].

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: DeepSeek-V2, the absorbed form of MLA.

    >>> value_heads(np.array([[[2.0, 20.0]]]), np.array([[[1.0, 0.5]]])).tolist()
    [[[12.0]]]
    """
    check_array("out", out, FLOATS, ("num_tokens", "num_heads", "kv_lora_rank"))
    check_array("w_uv", w_uv, FLOATS, (out.shape[1], "v_head_dim", out.shape[2]), "cut it with the heads")
    values: Float = np.matmul(out.swapaxes(0, 1), w_uv.swapaxes(1, 2).astype(out.dtype)).swapaxes(0, 1)
    return values


# --- the indexer's two sides ---


def token_index_keys(
    x: Float, wk: Float, k_norm: Float, k_norm_bias: Float, cos: Float, sin: Float, *, eps: float
) -> Float:
    """The index keys of some tokens: projected, layer-normed, turned, rotated.

    Args:
        x: float32 or float64 [num_tokens, hidden], the block input after its norm.
        wk: float[index_head_dim, hidden].
        k_norm, k_norm_bias: float[index_head_dim].
        cos: float[num_tokens, rope_head_dim / 2], the table at the tokens' positions.
        sin: like ``cos``.
        eps: number, of the LayerNorm.

    Returns:
        dtype of ``x`` [num_tokens, index_head_dim].

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: DeepSeek-V3.2's indexer: a LayerNorm with bias, RoPE on the first channels in halves, then Hadamard (which
        transformers leaves out: it changes no exact score).

    >>> one = np.ones((1, 1))
    >>> norm = np.ones(2), np.zeros(2)
    >>> token_index_keys(one, np.array([[1.0], [3.0]]), *norm, one, 0 * one, eps=0.0).round(4).tolist()
    [[0.0, -1.4142]]
    """
    check_array("x", x, FLOATS, ("num_tokens", "hidden"))
    check_array("wk", wk, FLOATS, ("index_head_dim", x.shape[1]), "as wide as x")
    keys = layer_norm(x @ wk.T.astype(x.dtype), k_norm, k_norm_bias, eps)
    return hadamard(apply_half_rope(keys, cos, sin))


def token_index_queries(qr: Float, wq_b: Float, cos: Float, sin: Float, *, index_head_dim: int) -> Float:
    """The index queries: projected from the query latent, turned on their first channels in halves, rotated.

    Args:
        qr: float32 or float64 [num_tokens, q_lora_rank], the query latent after its norm.
        wq_b: float[index_n_heads * index_head_dim, q_lora_rank], of the indexer.
        cos: float[num_tokens, rope_head_dim / 2], the table at the queries' positions.
        sin: like ``cos``.
        index_head_dim: int, a power of two.

    Returns:
        dtype of ``qr`` [num_tokens, index_n_heads, index_head_dim].

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: DeepSeek-V3.2's indexer.

    >>> one = np.ones((1, 1))
    >>> token_index_queries(np.ones((1, 2)), np.eye(2), one, 0 * one, index_head_dim=2).round(3).tolist()
    [[[1.414, 0.0]]]
    """
    return hadamard(apply_half_rope(index_heads(qr, wq_b, index_head_dim), cos, sin))


# --- key ranges and picks of a strided shard ---


def key_ranges(token_indices: Int32, query_start_loc: Int32, seq_lens: Int32) -> KeyRanges:
    """The keys that each local row may be scored against, the keys of all requests laid end to end.

    ::

        seq_lens 5 9       keys of request 0: 0..4    of request 1: 5..13
        round robin, rank 1 of 4, query_start_loc 0 5 8: tokens 1 5     positions 1 6     ranges [0,2) [5,12)

    A strided shard has no consecutive positions, so every row has a range of its own.

    Args:
        token_indices: int32[num_rows], flat global tokens of the local rows; -1 for a pad row.
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, non-decreasing from 0.
        seq_lens: int32[num_reqs], tokens, all keys of the request with this step's; they sum to less than 2**31.

    Returns:
        KeyRanges: empty for pad rows and padded graph slots.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: SGLang get_indexer_kvcache_range; the ``ks`` and ``ke`` of DeepGEMM's fp8_mqa_logits.

    >>> tokens, loc, lens = np.array([1, 5, -1], np.int32), np.array([0, 5, 8], np.int32), np.array([5, 9], np.int32)
    >>> ranges = key_ranges(tokens, loc, lens)
    >>> ranges.starts.tolist(), ranges.ends.tolist()
    ([0, 5, 0], [2, 12, 0])
    """
    check_batch(query_start_loc, seq_lens)
    first_keys = np.concatenate([[0], np.cumsum(seq_lens, dtype=np.int64)])
    if first_keys[-1] > INT32_MAX:
        raise contract_error("seq_lens", "sum to less than 2**31", int(first_keys[-1]), "ranges are int32")
    requests = token_requests(token_indices, query_start_loc)
    positions = token_positions(token_indices, query_start_loc, seq_lens)
    starts = np.where(positions >= 0, first_keys[requests], 0).astype(np.int32)
    return KeyRanges(starts, starts + positions + np.int32(1))


def packed_topk(topk_indices: Int32, starts: Int32) -> Int32:
    """The picks as rows of the requests' keys laid end to end.

    Args:
        topk_indices: int32[num_rows, index_topk], tokens within the request, -1 for none.
        starts: int32[num_rows], where each row's request starts (`key_ranges`).

    Returns:
        int32[num_rows, index_topk]: row of the packed keys, or -1.

    Raises:
        ContractError: a shape or dtype does not hold, or a row would lie beyond int32.

    Source: SGLang topk_transform, ragged.

    >>> packed_topk(np.array([[1, 0], [6, -1]], np.int32), np.array([0, 5], np.int32)).tolist()
    [[1, 0], [11, -1]]
    """
    check_array("topk_indices", topk_indices, ("int32",), ("num_rows", "index_topk"), "one list a row")
    check_array("starts", starts, ("int32",), (len(topk_indices),), "one start a row")
    rows = np.where(topk_indices >= 0, topk_indices.astype(np.int64) + starts[:, None], -1)
    if rows.max(initial=-1) > INT32_MAX:
        raise contract_error("starts", "give rows below 2**31", int(rows.max()), "packed rows are int32")
    return rows.astype(np.int32)


def paged_topk(topk_indices: Int32, request_indices: Int32, block_table: Int32, block_size: int) -> Int32:
    """The picks as slots of a paged cache.

    Args:
        topk_indices: int32[num_rows, index_topk], tokens within the request, -1 for none.
        request_indices: int32[num_rows], the request of each row; -1 where all of the row is none.
        block_table: int32[num_reqs, max_blocks], block ids.
        block_size: int, tokens per block, >= 1.

    Returns:
        int32[num_rows, index_topk]: slot, or -1.

    Raises:
        ContractError: a shape, dtype or value does not hold, or the table does not reach a pick.

    Source: SGLang topk_transform, paged.

    >>> table = np.array([[7, 2]], np.int32)
    >>> paged_topk(np.array([[5, 0, -1]], np.int32), np.zeros(1, np.int32), table, 4).tolist()
    [[9, 28, -1]]
    """
    check_array("topk_indices", topk_indices, ("int32",), ("num_rows", "index_topk"), "one list a row")
    return slot_mapping(topk_indices, request_indices, block_table, block_size)


def causal_picks(topk_indices: Int32, positions: Int32) -> Int32:
    """The picks without those beyond their query, as they come from a top-k that ran over all keys of a request.

    Args:
        topk_indices: int32[num_rows, index_topk], tokens within the request, -1 for none.
        positions: int32[num_rows], of each query; -1 where nothing is visible.

    Returns:
        int32[num_rows, index_topk]: -1 in place of a token after the query.

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: transformers' deepseek_v32, whose early rows pick masked keys that the causal mask then hides.

    >>> causal_picks(np.array([[3, 0, 1]], np.int32), np.array([1], np.int32)).tolist()
    [[-1, 0, 1]]
    """
    check_array("topk_indices", topk_indices, ("int32",), ("num_rows", "index_topk"), "one list a row")
    check_array("positions", positions, ("int32",), (len(topk_indices),), "one position a row")
    return np.where(topk_indices <= positions[:, None], topk_indices, np.int32(-1))


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
    """Attention over the chosen tokens' latents, read from paged caches: the absorbed form.

    ::

        logit = softmax_scale * (q_latent . latent + q_rope . rope_key)      out = sum of softmax(logit) * latent

    Args:
        q_latent: float32 or float64 [num_queries, num_heads, kv_lora_rank], see `absorbed_queries`.
        q_rope: dtype of ``q_latent`` [num_queries, num_heads, rope_head_dim], turned.
        latent_cache: dtype of ``q_latent`` [num_blocks, block_size, kv_lora_rank], one row a token; or
            uint8[num_blocks, block_size, row bytes] as `encoded_latents` writes them, rope keys included.
        rope_cache: dtype of ``q_latent`` [num_blocks, block_size, rope_head_dim]; None with a cache in bytes.
        block_table: int32[rows, max_blocks], by position, one row an operator row.
        topk_indices: int32[num_queries, index_topk], tokens within the request, distinct, not after the query; -1 is
            no token, wherever it stands. Order is free.
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        seqused_kv: int32[rows], tokens, key extent of each row: 0, or at least the row's query length.
        softmax_scale: number, > 0, `MLAConfig.softmax_scale`.

    Returns:
        AttentionOutput: out [num_queries, num_heads, kv_lora_rank]; 0 and -inf for queries beyond
        ``cu_seqlens_q[-1]``, where the extent is 0, and where nothing is chosen.

    Raises:
        ContractError: a shape, dtype or value does not hold: a token twice, or one after its query.
        ImportError: a cache in bytes without `ml_dtypes`.

    Source: DeepSeek-V3.2 inference model, absorbed; operator npu_sparse_flash_attention, attention_mode 2; FlashMLA.

    >>> latents, ropes, table = np.array([[[1.0], [3.0]]]), np.zeros((1, 2, 2)), np.array([[0]], np.int32)
    >>> loc, used, picks = np.array([0, 1], np.int32), np.array([2], np.int32), np.array([[1, -1, 0]], np.int32)
    >>> q = np.zeros((1, 1, 1)), np.zeros((1, 1, 2))
    >>> latent_attention(*q, latents, ropes, table, picks, loc, used, softmax_scale=1.0).out.tolist()
    [[[2.0]]]
    """
    check_latent_queries("q_latent", q_latent, q_rope, softmax_scale)
    kv_lora_rank = q_latent.shape[2]
    rows, picked = chosen_rows(
        q_rope, latent_cache, rope_cache, kv_lora_rank, block_table, topk_indices, cu_seqlens_q, seqused_kv
    )
    # A key is also what is added up; its rope channels are then left out.
    q = np.concatenate([q_latent, q_rope], axis=2)
    out, lse = gathered_from([np.concatenate(rows, axis=1)], [picked], q, None, softmax_scale)
    return AttentionOutput(out[..., :kv_lora_rank].copy(), lse)


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
    """Attention over the chosen tokens with keys and values made from their latents, head by head.

    It equals `value_heads` of `latent_attention` of `absorbed_queries`, up to rounding.

    Args:
        q_nope: float32 or float64 [num_queries, num_heads, nope_head_dim].
        q_rope: dtype of ``q_nope`` [num_queries, num_heads, rope_head_dim], turned.
        w_uk: float[num_heads, nope_head_dim, kv_lora_rank].
        w_uv: float[num_heads, v_head_dim, kv_lora_rank].
        latent_cache, rope_cache, block_table, topk_indices, cu_seqlens_q, seqused_kv, softmax_scale: as in
            `latent_attention`.

    Returns:
        AttentionOutput: out [num_queries, num_heads, v_head_dim].

    Raises:
        ContractError: a shape, dtype or value does not hold.
        ImportError: a cache in bytes without `ml_dtypes`.

    Source: DeepSeek-V3.2 inference model, prefill; transformers' deepseek_v32.

    >>> latents, ropes, table = np.array([[[1.0], [3.0]]]), np.zeros((1, 2, 2)), np.array([[0]], np.int32)
    >>> loc, used, picks = np.array([0, 1], np.int32), np.array([2], np.int32), np.array([[1, -1, 0]], np.int32)
    >>> q, w_uk, w_uv = (np.zeros((1, 1, 1)), np.zeros((1, 1, 2))), np.ones((1, 1, 1)), np.array([[[1.0], [10.0]]])
    >>> expanded_attention(*q, latents, ropes, w_uk, w_uv, table, picks, loc, used, softmax_scale=1.0).out.tolist()
    [[[2.0, 20.0]]]
    """
    check_latent_queries("q_nope", q_nope, q_rope, softmax_scale)
    check_array("w_uk", w_uk, FLOATS, (*q_nope.shape[1:], "kv_lora_rank"), "cut it with the heads")
    check_array("w_uv", w_uv, FLOATS, (len(w_uk), "v_head_dim", w_uk.shape[2]), "cut it with the heads")
    (latents, rope_keys), picked = chosen_rows(
        q_rope, latent_cache, rope_cache, w_uk.shape[2], block_table, topk_indices, cu_seqlens_q, seqused_kv
    )
    width = q_nope.shape[2] + q_rope.shape[2]
    out = np.empty((*q_nope.shape[:2], w_uv.shape[1]), q_nope.dtype)
    lse = np.empty(q_nope.shape[:2], q_nope.dtype)
    for head in range(len(w_uk)):
        keys = latents @ w_uk[head].T.astype(q_nope.dtype)
        values = latents @ w_uv[head].T.astype(q_nope.dtype)
        # Values stand behind the key that they belong to, where the query is zero.
        no_value = np.zeros((len(q_nope), values.shape[1]), q_nope.dtype)
        q = np.concatenate([q_nope[:, head], q_rope[:, head], no_value], axis=1)[:, None]
        rows = np.concatenate([keys, rope_keys, values], axis=1)
        head_out, head_lse = gathered_from([rows], [picked], q, None, softmax_scale)
        out[:, head], lse[:, head] = head_out[:, 0, width:], head_lse[:, 0]
    return AttentionOutput(out, lse)


def check_latent_queries(name: str, q: Float, q_rope: Float, softmax_scale: float) -> None:
    """Refuse two parts of queries that do not belong together."""
    check_array(name, q, FLOATS, ("num_queries", "num_heads", "width"))
    check_array("q_rope", q_rope, (str(q.dtype),), (*q.shape[:2], "rope_head_dim"), f"the other part of {name}")
    checked_queries(q, softmax_scale)


def chosen_rows(
    q_rope: Float,
    latent_cache: Float | UInt8,
    rope_cache: Float | None,
    kv_lora_rank: int,
    block_table: Int32,
    topk_indices: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
) -> tuple[tuple[Float, Float], Int32]:
    """The latents and rope keys of all tokens that any query chose, and each query's list among them."""
    num_queries, _, rope_head_dim = q_rope.shape
    dtype = str(q_rope.dtype)
    block_size = check_latent_cache(latent_cache, rope_cache, kv_lora_rank, rope_head_dim, dtype)
    positions = query_positions(cu_seqlens_q, seqused_kv, num_rows=num_queries)
    check_table("block_table", block_table, seqused_kv)
    check_topk(topk_indices, positions + np.int32(1), TOKENS)
    slots = slot_mapping(topk_indices, query_rows(cu_seqlens_q, num_rows=num_queries), block_table, block_size)
    check_slots(slots, latent_cache.shape[0] * block_size)
    used, places = np.unique(slots[slots >= 0], return_inverse=True)
    picked: Int32 = np.full(slots.shape, -1, np.int32)
    picked[slots >= 0] = places
    if rope_cache is None:
        coded: UInt8 = latent_cache  # type: ignore[assignment]  # as found above
        return decoded_latents(flat_cache(coded)[used], kv_lora_rank=kv_lora_rank, dtype=dtype), picked
    latents: Float = latent_cache  # type: ignore[assignment]  # as found above
    return (flat_cache(latents)[used], flat_cache(rope_cache)[used]), picked


def check_latent_cache(
    latent_cache: Float | UInt8, rope_cache: Float | None, kv_lora_rank: int, rope_head_dim: int, dtype: str
) -> int:
    """The block size, once the caches hold rows of this width: floats of this dtype in two, or bytes in one."""
    if rope_cache is None:
        row_bytes = latent_row_bytes(kv_lora_rank, rope_head_dim)
        check_array(
            "latent_cache", latent_cache, ("uint8",), ("num_blocks", "block_size", row_bytes), "without a rope_cache"
        )
        return int(latent_cache.shape[1])
    check_array("latent_cache", latent_cache, (dtype,), ("num_blocks", "block_size", kv_lora_rank), "as the queries")
    shape = (*latent_cache.shape[:2], rope_head_dim)
    check_array("rope_cache", rope_cache, (dtype,), shape, "the same blocks as latent_cache")
    return int(latent_cache.shape[1])
