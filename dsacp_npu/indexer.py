"""Mirror of `dsacp_ref.indexer` over torch. Runs on the device of its arguments and never waits for it.

Which keys a query may see depends on values. Where they are known, the queries of an operator row share its keys, cut
at the last one that is seen; elsewhere every query gathers all that its table has room for. Both score in whole tiles
(`_tiles`), so they give the same numbers. bfloat16 and float16 are computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dsacp_npu._index_calls import (
    CODECS,
    IndexCall,
    IndexKeys,
    best_entries,
    check_index_cache,
    check_queries,
    chosen_entries,
    index_call,
    parts_of,
    query_block,
    tile_scores,
    with_parts,
)
from dsacp_npu._tensors import (
    Float,
    Int32,
    check_floats,
    check_tensor,
    check_torch,
    computing_dtype,
    dtype_name,
    torch,
    values_known,
)
from dsacp_npu._tiles import KEY_TILE, in_blocks, whole_tiles
from dsacp_npu.compressor import CompressorState, CompressorWeights, compress, written_state
from dsacp_npu.extents import check_extents, check_offsets
from dsacp_npu.fp8 import FP8Vectors
from dsacp_npu.paging import block_table_rows, check_writes, slot_mapping, written
from dsacp_npu.quant import QuantizedVectors
from dsacp_npu.rope import apply_rope
from dsacp_ref.spec import INT32_MAX, check_int, check_record, contract_error

__all__ = [
    "IndexSelection",
    "IndexerWeights",
    "hadamard",
    "index_head_weights",
    "index_queries",
    "index_scores",
    "lightning_indexer",
    "select_qli",
    "selected_entries",
    "select_qli_",
]


class IndexerWeights(NamedTuple):
    """Mirror of `dsacp_ref.indexer.IndexerWeights`."""

    wq_b: Float
    weights_proj: Float
    compressor: CompressorWeights


class IndexSelection(NamedTuple):
    """Mirror of `dsacp_ref.indexer.IndexSelection`."""

    topk_indices: Int32
    index_cache: Float | QuantizedVectors | FP8Vectors
    state: CompressorState


def hadamard(x: Float) -> Float:
    """Mirror of `dsacp_ref.indexer.hadamard`."""
    check_rotation(x)
    return in_blocks(rotated, x)


def check_rotation(x: Float) -> None:
    """Refuse vectors that no Sylvester matrix fits."""
    check_torch("x", x)
    d = x.shape[-1] if getattr(x, "shape", ()) else 0
    if d < 1 or d & (d - 1):
        raise contract_error("x", "have a power of two as its last size", d, "the Sylvester matrix has no other sizes")
    check_floats("x", x, tuple(x.shape))


def rotated(x: Float) -> Float:
    """The vectors times the Sylvester matrix, by its factors, over the root of their width."""
    d = x.shape[-1]
    out = x.to(computing_dtype(x.dtype))
    span = 1
    while span < d:
        low, high = out.reshape(*x.shape[:-1], d // (2 * span), 2, span).unbind(-2)
        out = torch.stack([low + high, low - high], dim=-2).reshape(x.shape)
        span *= 2
    return (out * (1 / math.sqrt(d))).to(x.dtype)


def index_queries(qr: Float, wq_b: Float, cos: Float, sin: Float, *, index_head_dim: int) -> Float:
    """Mirror of `dsacp_ref.indexer.index_queries`."""
    # No array of all heads outlives the call that takes it: they are the largest of a layer with an indexer.
    return hadamard(apply_rope(index_heads(qr, wq_b, index_head_dim), cos, sin)).to(qr.dtype)


def index_heads(qr: Float, wq_b: Float, index_head_dim: int) -> Float:
    """The heads of the index queries before they turn, wide."""
    check_floats("qr", qr, ("num_tokens", "q_lora_rank"))
    check_floats("wq_b", wq_b, ("index_n_heads * index_head_dim", qr.shape[1]), "as wide as the query latent")
    index_head_dim = check_int("index_head_dim", index_head_dim, 1)
    if len(wq_b) % index_head_dim:
        raise contract_error("wq_b", f"have a multiple of {index_head_dim} rows", len(wq_b), "one block a head")
    dtype = computing_dtype(qr.dtype)
    return (qr.to(dtype) @ wq_b.T.to(dtype)).reshape(len(qr), len(wq_b) // index_head_dim, index_head_dim)


def index_head_weights(x: Float, weights_proj: Float, *, index_head_dim: int) -> Float:
    """Mirror of `dsacp_ref.indexer.index_head_weights`."""
    check_floats("x", x, ("num_tokens", "hidden"))
    check_floats("weights_proj", weights_proj, ("index_n_heads", x.shape[1]), "as wide as x")
    dtype = computing_dtype(x.dtype)
    scale = 1 / math.sqrt(check_int("index_head_dim", index_head_dim, 1) * len(weights_proj))
    return (x.to(dtype) @ weights_proj.T.to(dtype) * scale).to(x.dtype)


def index_scores(index_q: Float, index_weights: Float, index_keys: Float) -> Float:
    """Mirror of `dsacp_ref.indexer.index_scores`. The scores of short numbers are float32."""
    check_queries(index_q, index_weights)
    dtypes = (dtype_name(index_q),)
    check_tensor("index_keys", index_keys, dtypes, ("num_keys", index_q.shape[2]), "as wide as the queries")
    dtype = computing_dtype(index_q.dtype)
    num_tokens, num_heads, _ = index_q.shape
    if 0 in (index_q.numel(), len(index_keys)):
        return index_q.new_zeros(num_tokens, len(index_keys), dtype=dtype)
    keys = whole_tiles(index_keys.to(dtype), 0, KEY_TILE)
    q, weights = index_q.to(dtype), index_weights.to(dtype)
    step = query_block(num_heads, len(keys))
    blocks = [slice(start, start + step) for start in range(0, num_tokens, step)]
    return torch.cat([tile_scores(q[block], weights[block], keys) for block in blocks])[:, : len(index_keys)]


def selected_entries(scores: Float, num_visible: Int32, index_topk: int) -> Int32:
    """Mirror of `dsacp_ref.indexer.selected_entries`."""
    return best_entries(scores, num_visible, checked_selection(scores, num_visible, index_topk))


def checked_selection(scores: Float, num_visible: Int32, index_topk: int) -> int:
    """How many entries to choose, once scores and counts are found to fit each other."""
    check_floats("scores", scores, ("num_tokens", "num_entries"))
    check_tensor("num_visible", num_visible, ("int32",), tuple(scores.shape[:1]), "one count a query")
    index_topk = check_int("index_topk", index_topk, 1, INT32_MAX)
    num_entries = scores.shape[1]
    if values_known(num_visible) and ((num_visible < 0) | (num_visible > num_entries)).any():
        raise contract_error(
            "num_visible", f"be in [0, {num_entries}]", num_visible.tolist(), "scores has a column each"
        )
    return index_topk


def lightning_indexer(
    index_q: Float,
    index_weights: Float,
    index_cache: Float | QuantizedVectors | FP8Vectors,
    cmp_block_table: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    *,
    compress_ratio: int,
    index_topk: int,
) -> Int32:
    """Mirror of `dsacp_ref.indexer.lightning_indexer`.

    Limits: where values are not known, each query gathers as many keys as its table has room for, so keep tables
    narrow; vectors in int8 have up to 1024 channels.
    """
    call = index_call(
        index_q,
        index_weights,
        index_cache,
        cmp_block_table,
        cu_seqlens_q,
        seqused_kv,
        compress_ratio=compress_ratio,
        index_topk=index_topk,
    )
    return chosen_entries(call, index_cache)


class PreparedStep(NamedTuple):
    """A step that can no longer be refused: what to write, and the call that then chooses."""

    keys: tuple[torch.Tensor, ...]  # for each part of the cache
    slots: Int32
    state: CompressorState
    call: IndexCall


def select_qli(
    x: Float,
    qr: Float,
    cos: Float,
    sin: Float,
    weights: IndexerWeights,
    index_cache: Float | QuantizedVectors | FP8Vectors,
    cmp_block_table: Int32,
    state: CompressorState,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    request_indices: Int32,
    num_computed_tokens: Int32,
    frequencies: Sequence[float],
    *,
    index_topk: int,
    eps: float,
    compress_x: Float | None = None,
    compress_cu_seqlens: Int32 | None = None,
) -> IndexSelection:
    """Mirror of `dsacp_ref.indexer.select_qli`. The state is wide, as the compressor's."""
    step = prepared_step(
        x,
        qr,
        cos,
        sin,
        weights,
        index_cache,
        cmp_block_table,
        state,
        cu_seqlens_q,
        seqused_kv,
        request_indices,
        num_computed_tokens,
        frequencies,
        index_topk=index_topk,
        eps=eps,
        compress_x=compress_x,
        compress_cu_seqlens=compress_cu_seqlens,
    )
    cache = with_parts(index_cache, [part.clone() for part in parts_of(index_cache)])
    return IndexSelection(written_and_chosen(step, cache), cache, step.state)


def select_qli_(
    x: Float,
    qr: Float,
    cos: Float,
    sin: Float,
    weights: IndexerWeights,
    index_cache: Float | QuantizedVectors | FP8Vectors,
    cmp_block_table: Int32,
    state: CompressorState,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    request_indices: Int32,
    num_computed_tokens: Int32,
    frequencies: Sequence[float],
    *,
    index_topk: int,
    eps: float,
    compress_x: Float | None = None,
    compress_cu_seqlens: Int32 | None = None,
) -> IndexSelection:
    """`select_qli`, with cache and state written into its arguments, which are returned beside the choice."""
    step = prepared_step(
        x,
        qr,
        cos,
        sin,
        weights,
        index_cache,
        cmp_block_table,
        state,
        cu_seqlens_q,
        seqused_kv,
        request_indices,
        num_computed_tokens,
        frequencies,
        index_topk=index_topk,
        eps=eps,
        compress_x=compress_x,
        compress_cu_seqlens=compress_cu_seqlens,
    )
    chosen = written_and_chosen(step, index_cache)
    return IndexSelection(chosen, index_cache, written_state(state, step.state))


def prepared_step(
    x: Float,
    qr: Float,
    cos: Float,
    sin: Float,
    weights: IndexerWeights,
    index_cache: Float | QuantizedVectors | FP8Vectors,
    cmp_block_table: Int32,
    state: CompressorState,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    request_indices: Int32,
    num_computed_tokens: Int32,
    frequencies: Sequence[float],
    *,
    index_topk: int,
    eps: float,
    compress_x: Float | None,
    compress_cu_seqlens: Int32 | None,
) -> PreparedStep:
    """All of a step but its writes and its choice, which reads what is written. Every check is among it."""
    check_record("weights", weights, IndexerWeights)
    check_record("state", state, CompressorState)
    if (compress_x is None) != (compress_cu_seqlens is None):
        raise contract_error(
            "compress_x and compress_cu_seqlens", "be given together", "one of the two", "rows and their own offsets"
        )
    key_rows = x if compress_x is None else compress_x
    key_loc = cu_seqlens_q if compress_cu_seqlens is None else compress_cu_seqlens
    check_floats("x", x, ("num_queries", "hidden"))
    check_offsets("cu_seqlens_q", cu_seqlens_q)
    check_extents(cu_seqlens_q, seqused_kv)
    index_head_dim = len(weights.compressor.norm_weight)
    block_size = check_index_cache(index_cache, dtype_name(x), index_head_dim, "like x")
    check_tensor("cmp_block_table", cmp_block_table, ("int32",), ("num_reqs", "max_blocks"), "one row a request")
    entries, after = compress(key_rows, weights.compressor, key_loc, num_computed_tokens, state, frequencies, eps=eps)
    slots = slot_mapping(entries.entry_indices, entries.entry_requests, cmp_block_table, block_size)
    keys = stored_keys(index_cache, hadamard(entries.entries), slots)
    call = index_call(
        index_queries(qr, weights.wq_b, cos, sin, index_head_dim=index_head_dim),
        index_head_weights(x, weights.weights_proj, index_head_dim=index_head_dim),
        index_cache,
        block_table_rows(cmp_block_table, request_indices),
        cu_seqlens_q,
        seqused_kv,
        compress_ratio=weights.compressor.ape.shape[0],
        index_topk=index_topk,
    )
    return PreparedStep(keys, slots, after, call)


def stored_keys(index_cache: IndexKeys, keys: Float, slots: Int32) -> tuple[torch.Tensor, ...]:
    """The keys as the cache holds them, one tensor for each of its parts, found to fit."""
    codec = CODECS.get(type(index_cache))
    rows = parts_of(codec.vectors("index keys", keys) if codec else keys)
    for part, values in zip(parts_of(index_cache), rows, strict=True):
        check_writes(part, values, slots)
    return rows


def written_and_chosen(step: PreparedStep, index_cache: IndexKeys) -> Int32:
    """The keys written into the cache, and what the queries choose from it."""
    for part, rows in zip(parts_of(index_cache), step.keys, strict=True):
        written(part, rows, step.slots)
    return chosen_entries(step.call, index_cache)
