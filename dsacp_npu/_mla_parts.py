"""The pieces of a V3.2 layer: where the rows of a step lie, what is made of them, and one rank's program.

What all layers share is in an `MLAGeometry`, made once a step; what a layer is, in an `MLACall`. A program is a
generator that yields each collective it needs (`_rank_layer`), so that one process plays all ranks by the same lines
that a rank of a process group runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dsacp_npu import compressor, indexer, mla, rope
from dsacp_npu._geometry import moved, with_tensors
from dsacp_npu._index_calls import CODECS, parts_of
from dsacp_npu._mla_records import MLABatch, MLACache, MLAOutput, MLAWeights
from dsacp_npu._rank_layer import Exchanged, LocalRows, Program, packed, unpacked
from dsacp_npu._tensors import Float, Int32, computing_dtype, torch
from dsacp_npu.extents import LocalExtents, local_extents, token_positions, token_requests
from dsacp_npu.fp8 import encoded_latents
from dsacp_npu.indexer import index_head_weights, index_heads
from dsacp_npu.mla import absorbed_queries, layer_norm, value_heads
from dsacp_npu.paging import block_table_rows, check_writes, scattered_rows_, slot_mapping
from dsacp_npu.partition import Partition, counted
from dsacp_npu.rope import RopeTable, rope_table
from dsacp_ref.mla_config import MLAConfig

INDEX_NORM_EPS = 1e-6  # of the index keys' LayerNorm; a constant of the model, not a key of its configuration


class Torch:
    """The functions of a layer that a backend may replace, as torch code of the mirror."""

    apply_rope = staticmethod(rope.apply_rope)
    apply_half_rope = staticmethod(rope.apply_half_rope)
    hadamard = staticmethod(indexer.hadamard)
    lightning_indexer = staticmethod(indexer.lightning_indexer)
    latent_attention = staticmethod(mla.latent_attention)
    rms_norm = staticmethod(compressor.rms_norm)
    scattered_rows_ = staticmethod(scattered_rows_)


class MLACall(NamedTuple):
    """One layer with its weights.

    Fields:
        config: MLAConfig.
        weights: MLAWeights.
        ops: the functions to use.
    """

    config: MLAConfig
    weights: MLAWeights
    ops: Any


class MLAQueries(NamedTuple):
    """The rows whose queries a rank takes, as operators get them.

    Fields:
        tokens: int32[rows], global tokens.
        table: RopeTable of their positions.
        extents: LocalExtents, one operator row a run of queries.
        block_table: int32[operator rows, max blocks].
    """

    tokens: Int32
    table: RopeTable
    extents: LocalExtents
    block_table: Int32


class MLAGeometry(NamedTuple):
    """One rank's step, for all layers.

    Fields:
        batch: MLABatch.
        table: RopeTable of the rows whose keys this rank projects, pad rows included.
        own_slots: int32[rows], where the keys of these rows go, -1 for none.
        slots: int32[num_tokens], where the keys of all tokens go.
        queries: MLAQueries.
    """

    batch: MLABatch
    table: RopeTable
    own_slots: Int32
    slots: Int32
    queries: MLAQueries


class MLARankStep(NamedTuple):
    """A step over ranks as one of them sees it, for all layers.

    Fields:
        partition: Partition of the tokens, on the host, the same on every rank.
        cp_rank: int.
        local: LocalRows.
        geometry: MLAGeometry.
    """

    partition: Partition
    cp_rank: int
    local: LocalRows
    geometry: MLAGeometry


def own_or_mirrors(name: str, ops: Any) -> Callable[..., Float]:
    """The backend's function of this name if it has one, the mirror's otherwise: no operator is made for these."""
    function: Callable[..., Float] = getattr(ops if name in getattr(ops, "functions", {}) else Torch, name)
    return function


# --- geometry ---


def whole_mla_geometry(batch: MLABatch, num_rows: int, block_size: int, frequencies: Sequence[float]) -> MLAGeometry:
    """The step of a device that has all rows."""
    tokens = counted(num_rows, batch.seq_lens)
    extents = LocalExtents(batch.query_start_loc, batch.seq_lens, counted(len(batch.seq_lens), batch.seq_lens))
    queries = queries_of(tokens, extents, batch, frequencies)
    slots = slots_of(tokens, batch, block_size)
    return MLAGeometry(batch, queries.table, slots, slots, queries)


def queries_of(tokens: Int32, extents: LocalExtents, batch: MLABatch, frequencies: Sequence[float]) -> MLAQueries:
    """What operators get for these tokens' queries."""
    table = block_table_rows(batch.block_table, extents.request_indices)
    return MLAQueries(tokens, table_of(tokens, batch, frequencies), extents, table)


def table_of(tokens: Int32, batch: MLABatch, frequencies: Sequence[float]) -> RopeTable:
    """The RoPE rows of these tokens."""
    return rope_table(token_positions(tokens, batch.query_start_loc, batch.seq_lens), frequencies)


def slots_of(tokens: Int32, batch: MLABatch, block_size: int) -> Int32:
    """Where the keys of these tokens go; -1 for what belongs to no request."""
    positions = token_positions(tokens, batch.query_start_loc, batch.seq_lens)
    return slot_mapping(positions, token_requests(tokens, batch.query_start_loc), batch.block_table, block_size)


def mla_rank_step(
    batch: MLABatch,
    partition: Partition,
    cp_rank: int,
    split: str,
    num_input_tokens: int | None,
    block_size: int,
    frequencies: Sequence[float],
    device: torch.device,
) -> MLARankStep:
    """One rank's step: what it holds, projects and writes, found on the host and moved to its device."""
    tokens = partition.token_indices[cp_rank]
    real = tokens >= 0
    real_rows = real.nonzero()[:, 0]
    spread = (real.cumsum(0) - 1).masked_fill(~real, -1).int()
    extents = local_extents(
        batch.query_start_loc,
        batch.seq_lens,
        len(partition.token_indices),
        cp_rank,
        split=split,
        num_input_tokens=num_input_tokens,
    )
    local = LocalRows(tokens, real_rows, spread, len(real_rows) < len(tokens), tokens[:0])
    own_slots = slots_of(tokens, batch, block_size)
    slots = slots_of(counted(len(partition.restore_indices), tokens), batch, block_size)
    local, batch, extents, own_slots, slots = moved((local, batch, extents, own_slots, slots), device)
    # Operators take queries without the pad rows that some rules put between pieces.
    queries = queries_of(local.tokens[local.real], extents, batch, frequencies)
    geometry = MLAGeometry(batch, table_of(local.tokens, batch, frequencies), own_slots, slots, queries)
    return MLARankStep(partition, cp_rank, local, geometry)


# --- the key side ---


def token_rows(x: Float, table: RopeTable, call: MLACall) -> tuple[Float, Float, Float]:
    """Latents, rope keys and index keys of some rows, in their dtype."""
    config, weights, ops = call.config, call.weights, call.ops
    projected = x @ weights.wkv_a.T.to(x.dtype)
    rank = config.kv_lora_rank
    latent = own_or_mirrors("rms_norm", ops)(projected[:, :rank].contiguous(), weights.kv_norm, config.rms_norm_eps)
    rope_key = ops.apply_rope(projected[:, rank:].contiguous(), *table)
    dtype, part = computing_dtype(x.dtype), weights.indexer
    keys = layer_norm(x.to(dtype) @ part.wk.T.to(dtype), part.k_norm, part.k_norm_bias, INDEX_NORM_EPS)
    return latent, rope_key, rotated(keys, table, ops).to(x.dtype)


def rotated(vectors: Float, table: RopeTable, ops: Any) -> Float:
    """Index vectors, turned and rotated."""
    return own_or_mirrors("hadamard", ops)(own_or_mirrors("apply_half_rope", ops)(vectors, *table))


def stored_rows(x: Float, table: RopeTable, own_slots: Int32, cache: MLACache, call: MLACall) -> list[torch.Tensor]:
    """What some rows put into the caches, one tensor for each of `cache_parts`, coded where that holds codes."""
    # What is not written may be anything, and fits no code then.
    nowhere = (own_slots < 0)[:, None]
    latent, rope_key, index_keys = (part.masked_fill(nowhere, 0) for part in token_rows(x, table, call))
    keys = (encoded_latents(latent, rope_key),) if cache.rope_cache is None else (latent, rope_key)
    codec = CODECS.get(type(cache.index_cache))
    index_rows = parts_of(codec.vectors("index keys", index_keys) if codec else index_keys)
    return [part.reshape(len(x), part.shape[1:].numel()) for part in (*keys, *index_rows)]


def cache_parts(cache: MLACache) -> list[torch.Tensor]:
    """The tensors of a cache, FP8 as bytes: all by block and row."""
    rope = [] if cache.rope_cache is None else [cache.rope_cache]
    return [cache.latent_cache, *rope, *parts_of(cache.index_cache)]


def written_(cache: MLACache, stored: Sequence[torch.Tensor], slots: Int32, call: MLACall) -> MLACache:
    """The cache with these rows written into it; everything is found to fit before the first write."""
    parts = cache_parts(cache)
    rows = [rows.reshape(len(slots), *part.shape[2:]) for part, rows in zip(parts, stored, strict=True)]
    for part, values in zip(parts, rows, strict=True):
        check_writes(part, values, slots)
    for part, values in zip(parts, rows, strict=True):
        call.ops.scattered_rows_(part, values, slots)
    return cache


# --- the query side ---


def query_side(
    x: Float, queries: MLAQueries, cache: MLACache, call: MLACall, topk_indices: Int32 | None
) -> tuple[Float, Int32]:
    """The layer's output for some rows, and what they chose."""
    config, weights, ops = call.config, call.weights, call.ops
    qr = own_or_mirrors("rms_norm", ops)(x @ weights.wq_a.T.to(x.dtype), weights.q_norm, config.rms_norm_eps)
    lengths = (queries.extents.cu_seqlens_q, queries.extents.seqused_kv)
    if topk_indices is None:
        topk_indices = chosen_tokens(x, qr, queries, cache, call)
    width = config.nope_head_dim + config.rope_head_dim
    heads = (qr @ weights.wq_b.T.to(qr.dtype)).reshape(len(qr), config.num_heads, width)
    q_rope = ops.apply_rope(heads[..., config.nope_head_dim :].contiguous(), *queries.table)
    out = ops.latent_attention(
        absorbed_queries(heads[..., : config.nope_head_dim], weights.w_uk),
        q_rope,
        cache.latent_cache,
        cache.rope_cache,
        queries.block_table,
        topk_indices,
        *lengths,
        softmax_scale=config.softmax_scale,
    ).out
    values = value_heads(out, weights.w_uv).reshape(len(x), weights.wo.shape[1])
    return values @ weights.wo.T.to(x.dtype), topk_indices


def chosen_tokens(x: Float, qr: Float, queries: MLAQueries, cache: MLACache, call: MLACall) -> Int32:
    """What the indexer chooses for some rows."""
    config, part, ops = call.config, call.weights.indexer, call.ops
    d = config.index_head_dim
    chosen: Int32 = ops.lightning_indexer(
        rotated(index_heads(qr, part.wq_b, d), queries.table, ops).to(qr.dtype),
        index_head_weights(x, part.weights_proj, index_head_dim=d),
        cache.index_cache,
        queries.block_table,
        queries.extents.cu_seqlens_q,
        queries.extents.seqused_kv,
        compress_ratio=1,
        index_topk=config.index_topk,
    )
    return chosen


# --- a step ---


def whole_step(x: Float, cache: MLACache, geometry: MLAGeometry, call: MLACall, given_topk: Int32 | None) -> MLAOutput:
    """The step of a device that has all rows; writes into its cache."""
    written_(cache, stored_rows(x, geometry.table, geometry.own_slots, cache, call), geometry.slots, call)
    output, chosen = query_side(x, geometry.queries, cache, call, given_topk)
    return MLAOutput(output, chosen, cache)


def mla_program(
    x: Float, cache: MLACache, step: MLARankStep, call: MLACall, given_topk: Int32 | None, *, kept_keys: str = "all"
) -> Program:
    """One rank's step; writes into its cache. Every check that can be made before is made before."""
    local, geometry = step.local, step.geometry
    # Rows travel as the cache holds them: codes are fewer bytes, and each is of one row alone.
    stored = stored_rows(x, geometry.table, geometry.own_slots, cache, call)
    gathered = yield Exchanged("gathered_in_order", packed(stored), (step.partition,))
    full = cache if kept_keys == "all" else copied(cache)
    written_(full, unpacked(gathered, stored), geometry.slots, call)
    chosen = None if given_topk is None else given_topk[geometry.queries.tokens]
    out, chosen = query_side(x[local.real] if local.padded else x, geometry.queries, full, call, chosen)
    if kept_keys == "own":
        written_(cache, stored, geometry.own_slots, call)
    topk_indices = local.with_pads(chosen).masked_fill((local.tokens < 0)[:, None], -1)
    return MLAOutput(local.with_pads(out), topk_indices, cache)


def copied(cache: MLACache) -> MLACache:
    """The same cache in memory of its own."""
    copy: MLACache = with_tensors(cache, torch.Tensor.clone)
    return copy
