"""One DeepSeek-V4 attention layer: on one device, and the same layer over ``cp_size`` ranks.

::

    x -> wq_a, norm -> qr -> wq_b, head norm, RoPE -> q ---------------------.
     \\                 \\-> index queries -> scores -> top-k -> entries -----+-> attention -> inverse RoPE -> o_proj
      \\-> wkv, norm, RoPE -> window cache ----------------------------------|
       \\-> compressors -> entry cache, index cache -------------------------'

The query side runs on a rank's own rows with local extents; the key side ends up complete on every rank. Which rows
travel, and when, is the choice of ``rows``, ``key_mode`` and ``output_mode``; the result does not depend on it.

Caches are state: they come in and go out, and nothing else is kept between steps. ``x`` is the block's input after its
norm; residual, experts and the rest of the block are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.attention import AttentionOutput, all_entries_attention, selected_attention, window_attention
from dsacp_ref.compressor import (
    CompressorState,
    CompressorWeights,
    ProjectedRows,
    checked_weights,
    emitted_entries,
    empty_state,
    pooled_entries,
    projected_rows,
    rms_norm,
    updated_state,
)
from dsacp_ref.config import AttentionConfig, check_combination
from dsacp_ref.exchange import (
    all_gather,
    all_reduce,
    check_sequence,
    gathered_in_order,
    head_shards,
    reduce_scatter,
    requested_rows,
)
from dsacp_ref.extents import (
    FLOATS,
    CPLocalMetadata,
    Float,
    LocalExtents,
    build_cp_local_metadata,
    check_batch,
    local_extents,
    token_positions,
    token_requests,
)
from dsacp_ref.indexer import (
    IndexerWeights,
    cached_entries,
    hadamard,
    index_head_weights,
    index_queries,
    lightning_indexer,
)
from dsacp_ref.paging import block_table_rows, scattered_rows, slot_mapping
from dsacp_ref.partition import Int32, Partition, inverse_of, partition_tokens, restored_rows
from dsacp_ref.quant import QuantizedVectors
from dsacp_ref.rope import apply_inverse_rope, apply_rope, rope_frequencies, rope_table, yarn_frequencies
from dsacp_ref.spec import INT32_MAX, check_array, check_bool, check_choice, check_int, check_record, contract_error
from dsacp_ref.visibility import pool_row_starts, window_starts

__all__ = [
    "KeyRows",
    "LayerBatch",
    "LayerCache",
    "LayerOutput",
    "LayerWeights",
    "RanksOutput",
    "attention_layer",
    "draft_batches",
    "draft_metadata",
    "empty_cache",
    "head_parallel_layer",
    "layer_frequencies",
    "layer_over_ranks",
    "projected_output",
    "uses_context_parallel",
]

Row = TypeVar("Row", bound=np.generic)


class LayerWeights(NamedTuple):
    """One layer's weights, all heads and groups.

    Fields:
        wq_a: float[q_lora_rank, hidden].
        q_norm: float[q_lora_rank].
        wq_b: float[num_heads * head_dim, q_lora_rank].
        wkv: float[head_dim, hidden].
        kv_norm: float[head_dim].
        attn_sink: float[num_heads].
        wo_a: float[o_groups, o_lora_rank, num_heads / o_groups * head_dim].
        wo_b: float[hidden, o_groups * o_lora_rank].
        compressor: CompressorWeights with d = head_dim; None in a window-only layer.
        indexer: IndexerWeights; None in a layer that attends to all visible entries.

    >>> LayerWeights._fields[:3]
    ('wq_a', 'q_norm', 'wq_b')
    """

    wq_a: Float
    q_norm: Float
    wq_b: Float
    wkv: Float
    kv_norm: Float
    attn_sink: Float
    wo_a: Float
    wo_b: Float
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


class LayerCache(NamedTuple):
    """What one layer keeps between steps, on one rank. Parts that a layer does not have are empty.

    Fields:
        swa_cache: float[num_blocks, block_size, head_dim], raw keys.
        cmp_cache: float[num_cmp_blocks, cmp_block_size, head_dim], entries.
        index_cache: float[num_cmp_blocks, cmp_block_size, index_head_dim], index keys, rotated; or QuantizedVectors.
        cmp_state: CompressorState, one ring a state slot.
        index_state: CompressorState of the indexer's compressor.

    >>> LayerCache._fields[:2]
    ('swa_cache', 'cmp_cache')
    """

    swa_cache: Float
    cmp_cache: Float
    index_cache: Float | QuantizedVectors
    cmp_state: CompressorState
    index_state: CompressorState


class LayerBatch(NamedTuple):
    """One step's requests, global: the same on every rank.

    Fields:
        query_start_loc: int32[num_reqs + 1], tokens, query offsets, first 0.
        seq_lens: int32[num_reqs], tokens, all keys with this step's; 0 for a padded graph slot.
        swa_block_table: int32[num_reqs, max_blocks], by raw position.
        cmp_block_table: int32[num_reqs, max_cmp_blocks], by entry.
        state_indices: int32[num_reqs], the state slot of each request, distinct.

    >>> LayerBatch._fields[:2]
    ('query_start_loc', 'seq_lens')
    """

    query_start_loc: Int32
    seq_lens: Int32
    swa_block_table: Int32
    cmp_block_table: Int32
    state_indices: Int32


class KeyRows(NamedTuple):
    """What the key side of new rows is made of, before caches and pooling.

    Fields:
        kv: float[num_tokens, head_dim], raw keys, normed and turned.
        cmp_rows: ProjectedRows of the compressor, 0 wide without one.
        index_rows: ProjectedRows of the indexer's compressor, 0 wide without one.

    >>> KeyRows._fields
    ('kv', 'cmp_rows', 'index_rows')
    """

    kv: Float
    cmp_rows: ProjectedRows
    index_rows: ProjectedRows


class LayerOutput(NamedTuple):
    """One step of a layer on one device.

    Fields:
        output: float[num_tokens, hidden]; zero for rows that belong to no request.
        topk_indices: int32[num_tokens, index_topk], what each query chose; 0 wide without an indexer.
        cache: LayerCache after the step.

    >>> LayerOutput._fields
    ('output', 'topk_indices', 'cache')
    """

    output: Float
    topk_indices: Int32
    cache: LayerCache


class RanksOutput(NamedTuple):
    """One step of a layer over ranks; every field has one item a rank.

    Fields:
        outputs: float[num_tokens, hidden] each with rows ``"full"``; float[local rows, hidden] with ``"scattered"``.
        topk_indices: int32[local rows, index_topk], -1 in pad rows; 0 wide without an indexer.
        caches: LayerCache after the step.

    >>> RanksOutput._fields
    ('outputs', 'topk_indices', 'caches')
    """

    outputs: list[Float]
    topk_indices: list[Int32]
    caches: list[LayerCache]


class Rows(NamedTuple):
    """Some tokens of a step, with what follows from their place."""

    tokens: Int32
    requests: Int32
    positions: Int32


# --- the pieces of a layer ---


def layer_frequencies(config: AttentionConfig, compress_ratio: int) -> tuple[float, ...]:
    """The frequencies of a layer's one RoPE table: plain in window-only layers, YaRN in those with entries.

    Args:
        config: AttentionConfig.
        compress_ratio: int, 1 for a window-only layer.

    Returns:
        tuple of rope_head_dim / 2 floats. Queries, raw keys, entries, index queries and index keys of the layer share
        them.

    Raises:
        ContractError: no such ratio.

    Source: DeepSeek-V4 inference model; vllm-ascend and xLLM apply YaRN to window-only layers too, which differs by
        up to 0.037 rad over a window.

    >>> from dsacp_ref.config import v4_flash
    >>> layer_frequencies(v4_flash(), 1)[16] == rope_frequencies(10000.0, 64)[16]
    True
    """
    check_record("config", config, AttentionConfig)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1)
    if compress_ratio == 1:
        return rope_frequencies(config.rope_theta, config.rope_head_dim)
    if config.rope_factor == 1:
        return rope_frequencies(config.compress_rope_theta, config.rope_head_dim)
    return yarn_frequencies(
        config.compress_rope_theta,
        config.rope_head_dim,
        factor=config.rope_factor,
        beta_fast=config.rope_beta_fast,
        beta_slow=config.rope_beta_slow,
        original_max_position=config.rope_original_max_position,
    )


def rows_of(tokens: Int32, batch: LayerBatch) -> Rows:
    """Request and position of these flat tokens."""
    return Rows(
        tokens,
        token_requests(tokens, batch.query_start_loc),
        token_positions(tokens, batch.query_start_loc, batch.seq_lens),
    )


def num_computed_tokens(batch: LayerBatch) -> Int32:
    """Tokens of each request before this step; negative for a padded graph slot."""
    return batch.seq_lens - (batch.query_start_loc[1:] - batch.query_start_loc[:-1])


def query_latent(x: Float, weights: LayerWeights, config: AttentionConfig) -> Float:
    """The query latent after its norm: it feeds the heads and the indexer."""
    return rms_norm(x @ weights.wq_a.T.astype(x.dtype), weights.q_norm, config.rms_norm_eps)


def head_queries(qr: Float, wq_b: Float, rows: Rows, config: AttentionConfig, frequencies: Sequence[float]) -> Float:
    """The queries of as many heads as ``wq_b`` has, each normed over its channels, then turned."""
    heads = (qr @ wq_b.T.astype(qr.dtype)).reshape(len(qr), len(wq_b) // config.head_dim, config.head_dim)
    return apply_rope(rms_norm(heads, None, config.rms_norm_eps), *rope_table(rows.positions, frequencies))


def key_rows(
    x: Float, rows: Rows, weights: LayerWeights, config: AttentionConfig, frequencies: Sequence[float]
) -> KeyRows:
    """The projections of the key side for some rows."""
    kv = rms_norm(x @ weights.wkv.T.astype(x.dtype), weights.kv_norm, config.rms_norm_eps)
    nothing = ProjectedRows(np.zeros((len(x), 0), x.dtype), np.zeros((len(x), 0), x.dtype))
    return KeyRows(
        apply_rope(kv, *rope_table(rows.positions, frequencies)),
        projected_rows(x, rows.positions, weights.compressor) if weights.compressor else nothing,
        projected_rows(x, rows.positions, weights.indexer.compressor) if weights.indexer else nothing,
    )


def packed(keys: KeyRows) -> Float:
    """All of a row's key side in one row, so that one exchange carries it."""
    return np.concatenate([keys.kv, *keys.cmp_rows, *keys.index_rows], axis=1)


def unpacked(rows: Float, like: KeyRows) -> KeyRows:
    """The way back from `packed`."""
    widths = [part.shape[1] for part in (like.kv, *like.cmp_rows, *like.index_rows)]
    kv, cmp_kv, cmp_score, index_kv, index_score = np.split(rows, np.cumsum(widths)[:-1], axis=1)
    return KeyRows(kv, ProjectedRows(cmp_kv, cmp_score), ProjectedRows(index_kv, index_score))


def states_of(state: CompressorState, indices: Int32) -> CompressorState:
    """The rings of these state slots."""
    return CompressorState(
        state.kv[indices], state.score[indices], state.held_start[indices], state.num_tokens[indices]
    )


def with_states(state: CompressorState, indices: Int32, new: CompressorState) -> CompressorState:
    """All rings, those of these slots replaced."""

    def replaced(old_part: NDArray[Row], new_part: NDArray[Row]) -> NDArray[Row]:
        part = old_part.copy()
        part[indices] = new_part
        return part

    return CompressorState(
        replaced(state.kv, new.kv),
        replaced(state.score, new.score),
        replaced(state.held_start, new.held_start),
        replaced(state.num_tokens, new.num_tokens),
    )


def step_entries(
    projected: ProjectedRows,
    compressor: CompressorWeights,
    state: CompressorState,
    batch: LayerBatch,
    config: AttentionConfig,
    frequencies: Sequence[float],
    chosen: Int32 | None = None,
) -> Float:
    """The entries that the step completes, or chosen ones of them by their place in the step's plan."""
    computed = num_computed_tokens(batch)
    plan = emitted_entries(batch.query_start_loc, computed, len(compressor.ape), num_rows=len(projected.kv))
    every = np.arange(int(plan.entry_start_loc[-1]), dtype=np.int32)
    wanted = every if chosen is None else chosen
    return pooled_entries(
        projected,
        plan.entry_requests[wanted],
        plan.entry_indices[wanted],
        batch.query_start_loc,
        computed,
        states_of(state, batch.state_indices),
        compressor.norm_weight,
        frequencies,
        compress_ratio=len(compressor.ape),
        eps=config.rms_norm_eps,
    )


def with_window_rows(cache: LayerCache, kv: Float, rows: Rows, batch: LayerBatch) -> LayerCache:
    """The cache with the raw keys of these rows written."""
    slots = slot_mapping(rows.positions, rows.requests, batch.swa_block_table, cache.swa_cache.shape[1])
    return cache._replace(swa_cache=scattered_rows(cache.swa_cache, kv, slots))


def with_entries(
    cache: LayerCache, entries: Float, index_entries: Float | None, batch: LayerBatch, compress_ratio: int
) -> LayerCache:
    """The cache with all entries of the step, and their index keys, written."""
    num_rows = int(batch.query_start_loc[-1])
    plan = emitted_entries(batch.query_start_loc, num_computed_tokens(batch), compress_ratio, num_rows=num_rows)
    count = int(plan.entry_start_loc[-1])
    slots = slot_mapping(
        plan.entry_indices[:count], plan.entry_requests[:count], batch.cmp_block_table, cache.cmp_cache.shape[1]
    )
    cache = cache._replace(cmp_cache=scattered_rows(cache.cmp_cache, entries, slots))
    if index_entries is None:
        return cache
    return cache._replace(index_cache=cached_entries(cache.index_cache, hadamard(index_entries), slots))


def with_carried_state(cache: LayerCache, keys: KeyRows, batch: LayerBatch, weights: LayerWeights) -> LayerCache:
    """The cache with the compressor states after the step."""
    computed = num_computed_tokens(batch)

    def carried(projected: ProjectedRows, state: CompressorState) -> CompressorState:
        old = states_of(state, batch.state_indices)
        new = updated_state(projected, batch.query_start_loc, computed, old)
        return with_states(state, batch.state_indices, new)

    if weights.compressor:
        cache = cache._replace(cmp_state=carried(keys.cmp_rows, cache.cmp_state))
    if weights.indexer:
        cache = cache._replace(index_state=carried(keys.index_rows, cache.index_state))
    return cache


def with_keys(
    cache: LayerCache,
    keys: KeyRows,
    batch: LayerBatch,
    weights: LayerWeights,
    config: AttentionConfig,
    frequencies: Sequence[float],
) -> LayerCache:
    """The cache after a step whose key side is known for every token."""
    tokens = np.arange(len(keys.kv), dtype=np.int32)
    cache = with_window_rows(cache, keys.kv, rows_of(tokens, batch), batch)
    if weights.compressor:
        entries = step_entries(keys.cmp_rows, weights.compressor, cache.cmp_state, batch, config, frequencies)
        index_entries = None
        if weights.indexer:
            index = weights.indexer.compressor
            index_entries = step_entries(keys.index_rows, index, cache.index_state, batch, config, frequencies)
        cache = with_entries(cache, entries, index_entries, batch, len(weights.compressor.ape))
    return with_carried_state(cache, keys, batch, weights)


def chosen_entries(
    x: Float,
    qr: Float,
    rows: Rows,
    cache: LayerCache,
    extents: LocalExtents,
    batch: LayerBatch,
    weights: LayerWeights,
    config: AttentionConfig,
    frequencies: Sequence[float],
) -> Int32:
    """What the indexer chooses for some rows; 0 wide in a layer without one."""
    if weights.indexer is None or weights.compressor is None:
        return np.zeros((len(x), 0), np.int32)
    index_head_dim = config.index_head_dim
    return lightning_indexer(
        index_queries(
            qr, weights.indexer.wq_b, *rope_table(rows.positions, frequencies), index_head_dim=index_head_dim
        ),
        index_head_weights(x, weights.indexer.weights_proj, index_head_dim=index_head_dim),
        cache.index_cache,
        block_table_rows(batch.cmp_block_table, extents.request_indices),
        extents.cu_seqlens_q,
        extents.seqused_kv,
        compress_ratio=len(weights.compressor.ape),
        index_topk=config.index_topk,
    )


def attended(
    q: Float,
    topk_indices: Int32,
    attn_sink: Float,
    cache: LayerCache,
    extents: LocalExtents,
    batch: LayerBatch,
    weights: LayerWeights,
    config: AttentionConfig,
) -> AttentionOutput:
    """Attention of some rows in the form that the layer's ratio asks for."""
    softmax_scale = 1 / math.sqrt(config.head_dim)
    swa_table = block_table_rows(batch.swa_block_table, extents.request_indices)
    lengths = (extents.cu_seqlens_q, extents.seqused_kv)
    window = config.window_size
    if weights.compressor is None:
        return window_attention(
            q, cache.swa_cache, swa_table, *lengths, attn_sink, window_size=window, softmax_scale=softmax_scale
        )
    cmp_table = block_table_rows(batch.cmp_block_table, extents.request_indices)
    caches = (cache.swa_cache, swa_table, cache.cmp_cache, cmp_table)
    ratio = len(weights.compressor.ape)
    if weights.indexer is None:
        return all_entries_attention(
            q, *caches, *lengths, attn_sink, compress_ratio=ratio, window_size=window, softmax_scale=softmax_scale
        )
    return selected_attention(
        q,
        *caches,
        topk_indices,
        *lengths,
        attn_sink,
        compress_ratio=ratio,
        window_size=window,
        softmax_scale=softmax_scale,
    )


def projected_output(out: Float, wo_a: Float, wo_b: Float) -> Float:
    """The layer's output from attention outputs turned back: grouped low-rank projection, then the joint one.

    With a share of the heads, and the matching groups of both weights, the result is that share's summand.

    Args:
        out: float32 or float64 [num_tokens, num_heads, head_dim]; consecutive heads form a group.
        wo_a: float[o_groups, o_lora_rank, num_heads / o_groups * head_dim].
        wo_b: float[hidden, o_groups * o_lora_rank].

    Returns:
        dtype of ``out`` [num_tokens, hidden].

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: DeepSeek-V4 inference model; operator npu_transpose_batchmatmul, then a row-parallel matmul.

    >>> projected_output(np.array([[[2.0], [3.0]]]), np.ones((2, 1, 1)), np.array([[10.0, 1.0]])).tolist()
    [[23.0]]
    """
    check_array("out", out, FLOATS, ("num_tokens", "num_heads", "head_dim"))
    check_array("wo_a", wo_a, FLOATS, ("o_groups", "o_lora_rank", "group_width"))
    groups, lora, width = wo_a.shape
    if groups * width != out.shape[1] * out.shape[2]:
        raise contract_error(
            "wo_a",
            f"take the {out.shape[1]} heads of {out.shape[2]} channels of out",
            f"{groups} groups of {width}",
            "cut wo_a and wo_b to the groups of these heads",
        )
    check_array("wo_b", wo_b, FLOATS, ("hidden", groups * lora), "o_groups * o_lora_rank columns")
    grouped = out.reshape(len(out), groups, width).swapaxes(0, 1)
    low = (grouped @ wo_a.swapaxes(1, 2).astype(out.dtype)).swapaxes(0, 1).reshape(len(out), groups * lora)
    output: Float = low @ wo_b.T.astype(out.dtype)
    return output


def empty_cache(
    weights: LayerWeights,
    *,
    num_blocks: int,
    block_size: int,
    num_cmp_blocks: int,
    cmp_block_size: int,
    num_slots: int,
    spare_rows: int = 0,
    int8_index_cache: bool = False,
) -> LayerCache:
    """The cache of a layer before its first step.

    Args:
        weights: LayerWeights, for widths, ratio and dtype.
        num_blocks: int, blocks of the raw key cache, >= 0.
        block_size: int, raw tokens per block, >= 1.
        num_cmp_blocks: int, blocks of the entry caches, >= 0; not used without a compressor.
        cmp_block_size: int, entries per block, >= 1.
        num_slots: int, state slots, at least the requests of any step.
        spare_rows: int, ring rows beyond what pooling needs: as many tokens as may be rolled back.
        int8_index_cache: bool; True keeps index keys as QuantizedVectors, so that the int8 operator's choice is made.

    Returns:
        LayerCache: zeros.

    Raises:
        ContractError: a value does not hold.

    Source: ours; block sizes of raw and compressed caches are independent.

    >>> weights = LayerWeights(*[np.zeros((2, 2))] * 8, None, None)
    >>> sizes = {"num_blocks": 3, "block_size": 4, "num_cmp_blocks": 0, "cmp_block_size": 1, "num_slots": 1}
    >>> empty_cache(weights, **sizes).swa_cache.shape
    (3, 4, 2)
    """
    check_record("weights", weights, LayerWeights)
    num_blocks, num_cmp_blocks = check_int("num_blocks", num_blocks, 0), check_int("num_cmp_blocks", num_cmp_blocks, 0)
    block_size, cmp_block_size = check_int("block_size", block_size, 1), check_int("cmp_block_size", cmp_block_size, 1)
    num_slots, spare_rows = check_int("num_slots", num_slots, 0), check_int("spare_rows", spare_rows, 0)
    check_bool("int8_index_cache", int8_index_cache)
    check_array("weights.wkv", weights.wkv, FLOATS, ("head_dim", "hidden"))
    dtype, head_dim = weights.wkv.dtype, weights.wkv.shape[0]

    def parts(compressor: CompressorWeights | None) -> tuple[Float, CompressorState]:
        if compressor is None:
            ring, count = np.zeros((num_slots, spare_rows, 0), dtype), np.zeros(num_slots, np.int32)
            return np.zeros((0, cmp_block_size, 0), dtype), CompressorState(ring, ring.copy(), count, count.copy())
        width, ratio = checked_weights(compressor)
        d = len(compressor.norm_weight)
        state = empty_state(compressor, num_slots, num_rows=width // d * ratio + spare_rows)
        return np.zeros((num_cmp_blocks, cmp_block_size, d), dtype), state

    cmp_cache, cmp_state = parts(weights.compressor)
    index_keys, index_state = parts(weights.indexer.compressor if weights.indexer else None)
    index_cache: Float | QuantizedVectors = index_keys
    if int8_index_cache:
        index_cache = QuantizedVectors(index_keys.astype(np.int8), np.zeros(index_keys.shape[:2], np.float16))
    swa_cache = np.zeros((num_blocks, block_size, head_dim), dtype)
    return LayerCache(swa_cache, cmp_cache, index_cache, cmp_state, index_state)


# --- checks ---


def check_weights(weights: LayerWeights, config: AttentionConfig, compress_ratio: int) -> None:
    """Refuse weights of another layer kind, or of another model."""
    check_record("weights", weights, LayerWeights)
    check_record("config", config, AttentionConfig)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1)
    heads, hidden, groups = config.num_heads, config.hidden_size, config.o_groups
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a": (config.q_lora_rank, hidden),
        "q_norm": (config.q_lora_rank,),
        "wq_b": (heads * config.head_dim, config.q_lora_rank),
        "wkv": (config.head_dim, hidden),
        "kv_norm": (config.head_dim,),
        "attn_sink": (heads,),
        "wo_a": (groups, config.o_lora_rank, heads // groups * config.head_dim),
        "wo_b": (hidden, groups * config.o_lora_rank),
    }
    for name, shape in shapes.items():
        check_array(f"weights.{name}", getattr(weights, name), FLOATS, shape, "the shapes follow from config")
    if (weights.compressor is None) != (compress_ratio == 1):
        raise contract_error(
            "weights.compressor",
            "be there exactly when compress_ratio is above 1",
            f"{'none' if weights.compressor is None else 'one'} at compress_ratio {compress_ratio}",
            "compress_ratio 1 is a window-only layer",
        )
    compressors = [("weights.compressor", weights.compressor, config.head_dim)]
    if weights.indexer:
        if weights.compressor is None:
            raise contract_error("weights.indexer", "be None in a window-only layer", "one", "it chooses among entries")
        width = config.index_n_heads * config.index_head_dim
        check_array("weights.indexer.wq_b", weights.indexer.wq_b, FLOATS, (width, config.q_lora_rank))
        check_array(
            "weights.indexer.weights_proj", weights.indexer.weights_proj, FLOATS, (config.index_n_heads, hidden)
        )
        compressors.append(("weights.indexer.compressor", weights.indexer.compressor, config.index_head_dim))
    for name, compressor, d in compressors:
        if compressor is None:
            continue
        width, ratio = checked_weights(compressor)
        if ratio != compress_ratio or len(compressor.norm_weight) != d or compressor.wkv.shape[1] != hidden:
            raise contract_error(
                name,
                f"pool {compress_ratio} tokens of {hidden} into {d} channels",
                f"{ratio} tokens of {compressor.wkv.shape[1]} into {len(compressor.norm_weight)}",
                "ape has one row a token of the window",
            )


def check_step(x: Float, batch: LayerBatch, cache: LayerCache, weights: LayerWeights, config: AttentionConfig) -> None:
    """Refuse a step whose rows, tables, caches and state slots do not belong together."""
    check_record("batch", batch, LayerBatch)
    check_batch(batch.query_start_loc, batch.seq_lens)
    num_reqs = len(batch.seq_lens)
    check_array("x", x, FLOATS, ("num_tokens", config.hidden_size), "the block input after its norm")
    check_array("batch.swa_block_table", batch.swa_block_table, ("int32",), (num_reqs, "max_blocks"))
    check_array("batch.cmp_block_table", batch.cmp_block_table, ("int32",), (num_reqs, "max_cmp_blocks"))
    check_array("batch.state_indices", batch.state_indices, ("int32",), (num_reqs,), "one slot a request")
    num_slots = check_cache(cache, (str(x.dtype),), weights, config)
    indices = batch.state_indices
    if len(np.unique(indices)) != num_reqs or (indices < 0).any() or (indices >= num_slots).any():
        raise contract_error(
            "batch.state_indices", f"be distinct and in [0, {num_slots})", indices.tolist(), "one slot a request"
        )
    if len(x) < batch.query_start_loc[-1]:
        raise contract_error(
            "x", f"have at least {int(batch.query_start_loc[-1])} rows", len(x), "query_start_loc counts global rows"
        )


def check_cache(cache: LayerCache, dtype: tuple[str], weights: LayerWeights, config: AttentionConfig) -> int:
    """The number of state slots, once every part that the layer has is found to fit the others."""
    check_record("cache", cache, LayerCache)
    check_array("cache.swa_cache", cache.swa_cache, dtype, ("num_blocks", "block_size", config.head_dim))
    check_array("cache.cmp_state.num_tokens", cache.cmp_state.num_tokens, ("int32",), ("num_slots",))
    num_slots = len(cache.cmp_state.num_tokens)
    blocks: tuple[int | str, int | str] = ("num_cmp_blocks", "cmp_block_size")
    for name, entries, state, compressor in (
        ("cmp", cache.cmp_cache, cache.cmp_state, weights.compressor),
        ("index", cache.index_cache, cache.index_state, weights.indexer.compressor if weights.indexer else None),
    ):
        if name == "index" and compressor is None:
            continue
        width, d = (checked_weights(compressor)[0], len(compressor.norm_weight)) if compressor else (0, 0)
        blocks = check_entries(f"cache.{name}_cache", entries, dtype, (*blocks, d))
        check_array(f"cache.{name}_state.kv", state.kv, dtype, (num_slots, "num_rows", width), "use empty_cache")
        check_array(f"cache.{name}_state.score", state.score, dtype, state.kv.shape, "use empty_cache")
        for part in ("held_start", "num_tokens"):
            counts = getattr(state, part)
            check_array(f"cache.{name}_state.{part}", counts, ("int32",), (num_slots,), "one a state slot")
    return num_slots


def check_entries(
    name: str, entries: Float | QuantizedVectors, dtype: tuple[str], shape: tuple[int | str, ...]
) -> tuple[int, int]:
    """The blocks of an entry cache and their size, once it has this shape; index keys may be int8."""
    hint = "entries and index keys share a block table"
    if name == "cache.index_cache" and isinstance(entries, QuantizedVectors):
        check_array(f"{name}.values", entries.values, ("int8",), shape, hint)
        num_blocks, block_size = entries.values.shape[:2]
        check_array(f"{name}.scales", entries.scales, ("float16",), (num_blocks, block_size), "one scale a vector")
        return num_blocks, block_size
    floats: Float = entries  # type: ignore[assignment]  # anything else is refused here
    check_array(name, floats, dtype, shape, hint)
    return floats.shape[0], floats.shape[1]


def check_given(given_topk: Int32 | None, num_rows: int, weights: LayerWeights, config: AttentionConfig) -> None:
    """Refuse a handed-in selection where there is nothing to select, or of another shape."""
    if given_topk is None:
        return
    if weights.indexer is None:
        raise contract_error("given_topk", "be None in a layer without an indexer", "a selection")
    check_array("given_topk", given_topk, ("int32",), (num_rows, config.index_topk), "one row a token of x")


# --- one device ---


def attention_layer(
    x: Float,
    weights: LayerWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    given_topk: Int32 | None = None,
) -> LayerOutput:
    """One step of a layer on one device: prefill, chunks, decode and any mixture of them.

    Args:
        x: float32 or float64 [num_tokens, hidden], the block input after its norm; rows beyond
            ``batch.query_start_loc[-1]`` are padding.
        weights: LayerWeights.
        cache: LayerCache before the step, in the dtype of ``x``; not changed.
        batch: LayerBatch.
        config: AttentionConfig.
        compress_ratio: int, 1 for a window-only layer.
        given_topk: int32[num_tokens, index_topk], a selection to use instead of the indexer's, to compare outputs
            given the same selection; None lets the indexer choose.

    Returns:
        LayerOutput: output [num_tokens, hidden], topk_indices, cache. Independent of how requests are cut into steps.

    Raises:
        ContractError: a shape, dtype or value does not hold, or a request goes on from state that is not there.

    Source: DeepSeek-V4 inference model; transformers' deepseek_v4 agrees to float32 rounding.

    >>> LayerOutput._fields[0]
    'output'
    """
    check_weights(weights, config, compress_ratio)
    check_step(x, batch, cache, weights, config)
    check_given(given_topk, len(x), weights, config)
    frequencies = layer_frequencies(config, compress_ratio)
    rows = rows_of(np.arange(len(x), dtype=np.int32), batch)
    cache = with_keys(cache, key_rows(x, rows, weights, config, frequencies), batch, weights, config, frequencies)
    extents = LocalExtents(batch.query_start_loc, batch.seq_lens, np.arange(len(batch.seq_lens), dtype=np.int32))
    qr = query_latent(x, weights, config)
    topk_indices = given_topk
    if topk_indices is None:
        topk_indices = chosen_entries(x, qr, rows, cache, extents, batch, weights, config, frequencies)
    q = head_queries(qr, weights.wq_b, rows, config, frequencies)
    out = attended(q, topk_indices, weights.attn_sink, cache, extents, batch, weights, config).out
    turned_back = apply_inverse_rope(out, *rope_table(rows.positions, frequencies))
    return LayerOutput(projected_output(turned_back, weights.wo_a, weights.wo_b), topk_indices, cache)


# --- over ranks ---


def uses_context_parallel(
    query_start_loc: Int32, seq_lens: Int32, *, mixed: str = "cp", decode_query_len: int = 1
) -> bool:
    """Whether a step splits its tokens over ranks, or runs by heads.

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, first 0.
        seq_lens: int32[num_reqs], tokens, all keys with this step's; 0 for a padded graph slot.
        mixed: ``"cp"``: decode rows are part of the stream unless the step has nothing else. ``"off"``: any decode row
            turns context parallelism off for the step.
        decode_query_len: int, tokens; a request with cached tokens and at most this many new ones decodes.

    Returns:
        bool. A step without a real query does not split.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: vllm-ascend dsa_cp (``"cp"``); xLLM #2097, no_decode (``"off"``).

    >>> step = np.array([0, 6, 7], np.int32), np.array([6, 9], np.int32)
    >>> uses_context_parallel(*step), uses_context_parallel(*step, mixed="off")
    (True, False)
    """
    check_batch(query_start_loc, seq_lens)
    check_choice("mixed", mixed, ("cp", "off"))
    decode_query_len = check_int("decode_query_len", decode_query_len, 1)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    real = (query_lens > 0) & (seq_lens > 0)
    decodes = real & (seq_lens > query_lens) & (query_lens <= decode_query_len)
    prefills = bool((real & ~decodes).any())
    return prefills and not (mixed == "off" and bool(decodes.any()))


def head_parallel_layer(
    x: Float,
    weights: LayerWeights,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
) -> RanksOutput:
    """One step by heads: every rank takes all rows and its share of the heads, as decode does.

    Args:
        x: float32 or float64 [num_tokens, hidden], the same on every rank.
        weights: LayerWeights, all heads; rank r uses the r-th share of heads and groups.
        caches: one LayerCache per rank, before the step; not changed.
        batch: LayerBatch.
        config: AttentionConfig; ranks divide heads and o_groups.
        compress_ratio: int, 1 for a window-only layer.

    Returns:
        RanksOutput: the whole output [num_tokens, hidden] on every rank.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        UnsupportedError: ranks that do not divide heads and o_groups.

    Source: tensor-parallel attention; with context parallelism on, decode and prefill that does not use it run so.

    >>> RanksOutput._fields[0]
    'outputs'
    """
    check_sequence("caches", caches)
    cp_size = check_int("cp_size", len(caches), 1, hint="one cache a rank")
    check_record("config", config, AttentionConfig)
    check_combination(
        split="contiguous",
        rows="full",
        key_mode="replicate",
        output_mode="all_to_all",
        compress_ratio=compress_ratio,
        cp_size=cp_size,
        num_heads=config.num_heads,
        o_groups=config.o_groups,
    )
    check_weights(weights, config, compress_ratio)
    for cache in caches:
        check_step(x, batch, cache, weights, config)
    frequencies = layer_frequencies(config, compress_ratio)
    rows = rows_of(np.arange(len(x), dtype=np.int32), batch)
    extents = LocalExtents(batch.query_start_loc, batch.seq_lens, np.arange(len(batch.seq_lens), dtype=np.int32))
    partials, topks, new_caches = [], [], []
    for rank, old_cache in enumerate(caches):
        keys = key_rows(x, rows, weights, config, frequencies)
        cache = with_keys(old_cache, keys, batch, weights, config, frequencies)
        qr = query_latent(x, weights, config)
        topk_indices = chosen_entries(x, qr, rows, cache, extents, batch, weights, config, frequencies)
        wq_b = share_of(weights.wq_b, rank, cp_size)
        sink = share_of(weights.attn_sink, rank, cp_size)
        q = head_queries(qr, wq_b, rows, config, frequencies)
        out = attended(q, topk_indices, sink, cache, extents, batch, weights, config).out
        turned_back = apply_inverse_rope(out, *rope_table(rows.positions, frequencies))
        partials.append(share_of_output(turned_back, weights, rank, cp_size))
        topks.append(topk_indices)
        new_caches.append(cache)
    return RanksOutput(all_reduce(partials), topks, new_caches)


def share_of(weight: Float, rank: int, cp_size: int) -> Float:
    """One rank's share of a weight whose first axis goes by head."""
    size = len(weight) // cp_size
    return weight[rank * size : (rank + 1) * size]


def share_of_output(out: Float, weights: LayerWeights, rank: int, cp_size: int) -> Float:
    """The summand of the layer's output that one rank's heads make: column-parallel wo_a, row-parallel wo_b."""
    return projected_output(out, share_of(weights.wo_a, rank, cp_size), share_of(weights.wo_b.T, rank, cp_size).T)


def layer_over_ranks(
    inputs: Sequence[Float],
    weights: LayerWeights,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    split: str = "contiguous",
    rows: str = "full",
    key_mode: str = "replicate",
    output_mode: str = "all_to_all",
    num_input_tokens: int | None = None,
    given_topk: Int32 | None = None,
) -> RanksOutput:
    """One step of a layer over ranks; the result is that of one device.

    ::

        key_mode            what each rank projects    what travels
        replicate           all rows                   nothing
        gather_hidden       all rows                   hidden rows, before
        gather_kv           own rows                   raw keys and both compressors' projections
        gather_compressed   own rows                   a halo of rows, entries and index keys

        output_mode         what travels                              o_proj
        all_to_all          attention output, heads for tokens        this rank's groups, then a sum over ranks
        gather_weight       shards of wo_a and wo_b                   own rows, all groups
        replicated_weight   nothing                                   own rows, all groups

    Args:
        inputs: one array per rank. Rows ``"full"``: float32 or float64 [num_tokens, hidden] each. ``"scattered"``:
            [local rows, hidden], laid out by the split, pad rows included.
        weights: LayerWeights, all heads and groups; each rank uses what its modes give it.
        caches: one LayerCache per rank, before the step; not changed. After the step every rank holds what the next
            step needs; with gather_compressed, raw keys only of the rows it read and of the last window,
            and of as many rows before it as the rings have to spare.
        batch: LayerBatch, global, the same on every rank.
        config: AttentionConfig.
        compress_ratio: int, 1 for a window-only layer.
        split: str, a rule of `SPLITS`.
        rows: ``"full"`` or ``"scattered"``: what ranks hold between layers.
        key_mode: ``"replicate"``, ``"gather_hidden"``, ``"gather_kv"`` or ``"gather_compressed"``.
        output_mode: ``"all_to_all"``, ``"gather_weight"`` or ``"replicated_weight"``.
        num_input_tokens: int or None, rows of the padded stream (see `rank_pieces`).
        given_topk: int32[num_tokens, index_topk] by global token, a selection to use instead of the indexer's; or
            None.

    Returns:
        RanksOutput.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        UnsupportedError: a combination that cannot work, by name (`check_combination`).

    Source: xLLM #1997 and vllm-ascend dsa_cp (contiguous, full, replicate, all_to_all: the default); xLLM #2097
        (gather_hidden); SGLang (gather_kv, replicated_weight); vllm-ascend prefill (gather_weight).

    >>> RanksOutput._fields[2]
    'caches'
    """
    check_sequence("inputs", inputs)
    check_sequence("caches", caches)
    cp_size = check_int("cp_size", len(inputs), 1, hint="one input a rank")
    if len(caches) != cp_size:
        raise contract_error("caches", f"hold one cache for each of {cp_size} ranks", len(caches))
    check_record("config", config, AttentionConfig)
    check_combination(
        split=split,
        rows=rows,
        key_mode=key_mode,
        output_mode=output_mode,
        compress_ratio=compress_ratio,
        cp_size=cp_size,
        num_heads=config.num_heads,
        o_groups=config.o_groups,
    )
    check_weights(weights, config, compress_ratio)
    check_record("batch", batch, LayerBatch)
    check_batch(batch.query_start_loc, batch.seq_lens)
    partition = partition_tokens(batch.query_start_loc, cp_size, split=split, num_input_tokens=num_input_tokens)
    num_tokens = len(partition.restore_indices)
    stream = own_rows(inputs, partition, rows)
    for local, cache in zip(stream, caches, strict=True):
        check_step(np.zeros((num_tokens, *local.shape[1:]), local.dtype), batch, cache, weights, config)
    num_stream_rows = len(inputs[0]) if rows == "full" else num_tokens
    check_given(given_topk, num_stream_rows, weights, config)
    frequencies = layer_frequencies(config, compress_ratio)
    places = [rows_of(tokens, batch) for tokens in partition.token_indices]

    new_caches = caches_over_ranks(
        inputs, stream, places, partition, caches, batch, weights, config, frequencies, key_mode
    )
    outs, topks = [], []
    for rank, (x, place, cache) in enumerate(zip(stream, places, new_caches, strict=True)):
        extents = local_extents(
            batch.query_start_loc, batch.seq_lens, cp_size, rank, split=split, num_input_tokens=num_input_tokens
        )
        # Operators take queries without the pad rows that some rules put between pieces.
        real = place.tokens >= 0
        x_real, place_real = x[real], Rows(*(part[real] for part in place))
        qr = query_latent(x_real, weights, config)
        if given_topk is not None:
            chosen = given_topk[place_real.tokens]
        else:
            chosen = chosen_entries(x_real, qr, place_real, cache, extents, batch, weights, config, frequencies)
        q = head_queries(qr, weights.wq_b, place_real, config, frequencies)
        out = attended(q, chosen, weights.attn_sink, cache, extents, batch, weights, config).out
        turned_back = apply_inverse_rope(out, *rope_table(place_real.positions, frequencies))
        outs.append(with_pad_rows(turned_back, real, 0))
        topks.append(with_pad_rows(chosen, real, -1))
    outputs = outputs_of_ranks(outs, weights, partition, rows, output_mode, num_stream_rows)
    return RanksOutput(outputs, topks, new_caches)


def caches_over_ranks(
    inputs: Sequence[Float],
    stream: Sequence[Float],
    places: Sequence[Rows],
    partition: Partition,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    weights: LayerWeights,
    config: AttentionConfig,
    frequencies: Sequence[float],
    key_mode: str,
) -> list[LayerCache]:
    """Every rank's cache after the step: the key side, complete everywhere."""
    if key_mode in ("gather_kv", "gather_compressed"):
        own = [key_rows(x, place, weights, config, frequencies) for x, place in zip(stream, places, strict=True)]
        if key_mode == "gather_compressed":
            ring_rows = max(cache.cmp_state.kv.shape[1] for cache in caches)
            known = known_keys(own, places, partition, batch, weights, config, ring_rows)
            return caches_from_own_entries(known, partition, caches, batch, weights, config, frequencies)
        gathered = gathered_in_order([packed(keys) for keys in own], partition)
        keys_of_ranks = [unpacked(rows, own[0]) for rows in gathered]
    else:
        num_tokens = len(partition.restore_indices)
        everything = rows_of(np.arange(num_tokens, dtype=np.int32), batch)
        whole = [x[:num_tokens] for x in inputs] if key_mode == "replicate" else gathered_in_order(stream, partition)
        keys_of_ranks = [key_rows(x, everything, weights, config, frequencies) for x in whole]
    return [
        with_keys(cache, keys, batch, weights, config, frequencies)
        for cache, keys in zip(caches, keys_of_ranks, strict=True)
    ]


def own_rows(inputs: Sequence[Float], partition: Partition, rows: str) -> list[Float]:
    """Every rank's own rows, pad rows zero."""
    shards = []
    for rank, (x, tokens) in enumerate(zip(inputs, partition.token_indices, strict=True)):
        check_array("inputs", x, FLOATS, ("num_rows", "hidden"), f"rank {rank}")
        shape = (len(inputs[0]) if rows == "full" else "num_rows", inputs[0].shape[1])
        check_array("inputs", x, (str(inputs[0].dtype),), shape, f"rank {rank} must be like rank 0")
        needed = len(partition.restore_indices) if rows == "full" else len(tokens)
        if len(x) < needed or (rows == "scattered" and len(x) > needed):
            raise contract_error(
                "inputs", f"have {needed} rows on rank {rank} with rows {rows!r}", len(x), "the split says which rows"
            )
        shard = np.zeros((len(tokens), x.shape[1]), x.dtype)
        shard[tokens >= 0] = x[tokens[tokens >= 0]] if rows == "full" else x[tokens >= 0]
        shards.append(shard)
    return shards


def with_pad_rows(rows: NDArray[Row], real: NDArray[np.bool_], fill: int) -> NDArray[Row]:
    """The rows spread over a rank's local rows, ``fill`` in its pad rows."""
    spread = np.full((len(real), *rows.shape[1:]), fill, rows.dtype)
    spread[real] = rows
    return spread


def known_keys(
    own: Sequence[KeyRows],
    places: Sequence[Rows],
    partition: Partition,
    batch: LayerBatch,
    weights: LayerWeights,
    config: AttentionConfig,
    ring_rows: int,
) -> list[tuple[KeyRows, Int32]]:
    """The key side that each rank knows after the halo exchange, and the tokens whose raw keys it knows.

    A rank knows its own rows, the raw keys that its windows reach back to, the projections that its entries reach back
    to, and what the next step goes on from. Every row that it does not know is NaN, which proves that none is read.
    """
    compressor = weights.compressor
    in_windows = [window_tokens(place, batch, compressor, config.window_size, ring_rows) for place in places]
    kv = known_rows([keys.kv for keys in own], places, partition, in_windows)
    tokens = [
        np.union1d(place.tokens[place.tokens >= 0], halo).astype(np.int32)
        for place, halo in zip(places, in_windows, strict=True)
    ]
    pooled = [pooled_tokens(place, batch, compressor, ring_rows) for place in places]
    projections = known_rows([packed(keys) for keys in own], places, partition, pooled)
    return [
        (unpacked(rows, own[0])._replace(kv=raw), known)
        for rows, raw, known in zip(projections, kv, tokens, strict=True)
    ]


def known_rows(
    shards: Sequence[Float], places: Sequence[Rows], partition: Partition, wanted: Sequence[Int32]
) -> list[Float]:
    """Every rank's rows by token: its own and those that it wants of others; NaN where it knows nothing."""
    known = []
    for place, shard, halo, tokens in zip(
        places, shards, requested_rows(shards, partition, wanted), wanted, strict=True
    ):
        rows = np.full((len(partition.restore_indices), shard.shape[1]), np.nan, shard.dtype)
        rows[place.tokens[place.tokens >= 0]] = shard[place.tokens >= 0]
        rows[tokens] = halo
        known.append(rows)
    return known


def window_tokens(
    place: Rows, batch: LayerBatch, compressor: CompressorWeights | None, window_size: int, ring_rows: int
) -> Int32:
    """The new tokens of other ranks whose raw keys one rank needs.

    ::

        window of each own query | the last window of every request, and as far as a rollback may go before it
    """
    own = place.positions >= 0
    tokens, positions = place.tokens[own], place.positions[own]
    starts = tokens - (positions - window_starts(positions, window_size))
    spare_rows = ring_rows - (num_pooled_rows(compressor) if compressor else 0)
    return needed_tokens(starts, tokens, place.requests[own], window_size - 1 + spare_rows, place, batch)


def pooled_tokens(place: Rows, batch: LayerBatch, compressor: CompressorWeights | None, ring_rows: int) -> Int32:
    """The new tokens of other ranks whose projections one rank needs.

    ::

        rows of each entry whose last token is own | the last rows of every request, which the next step pools
    """
    if compressor is None:
        return np.zeros(0, np.int32)
    ratio = len(compressor.ape)
    closing = (place.positions >= 0) & ((place.positions + 1) % ratio == 0)
    tokens, positions = place.tokens[closing], place.positions[closing]
    reach = pool_row_starts(positions, ratio, overlap=num_pooled_rows(compressor) > ratio)
    return needed_tokens(tokens - (positions - reach), tokens, place.requests[closing], ring_rows, place, batch)


def num_pooled_rows(compressor: CompressorWeights) -> int:
    """The rows that an entry is made of."""
    return len(compressor.wkv) // len(compressor.norm_weight) * len(compressor.ape)


def needed_tokens(
    starts: Int32, last_tokens: Int32, requests: Int32, carried: int, place: Rows, batch: LayerBatch
) -> Int32:
    """The tokens from each start to its last one, and so many last ones of every request; those of other ranks."""
    first_token = batch.query_start_loc[:-1]
    live = (batch.seq_lens > 0) & (batch.query_start_loc[1:] > first_token)
    ends = batch.query_start_loc[1:][live]
    starts = np.concatenate([starts, ends - carried])
    owners = np.concatenate([requests, np.flatnonzero(live)])
    starts = np.maximum(starts, first_token[owners])  # what lies before the step is in the caches already
    stops = np.concatenate([last_tokens + 1, ends])
    depth = np.zeros(int(batch.query_start_loc[-1]) + 1, np.int64)
    np.add.at(depth, starts, 1)
    np.add.at(depth, stops, -1)
    needed = np.cumsum(depth)[:-1] > 0
    needed[place.tokens[place.tokens >= 0]] = False
    return np.flatnonzero(needed).astype(np.int32)


def caches_from_own_entries(
    known: Sequence[tuple[KeyRows, Int32]],
    partition: Partition,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    weights: LayerWeights,
    config: AttentionConfig,
    frequencies: Sequence[float],
) -> list[LayerCache]:
    """Every rank's cache after each rank has pooled the entries whose last token it owns."""
    new_caches = [
        with_window_rows(cache, keys.kv[tokens], rows_of(tokens, batch), batch)
        for cache, (keys, tokens) in zip(caches, known, strict=True)
    ]
    if weights.compressor:
        owned = entry_partition(partition, batch, len(weights.compressor.ape))

        def gathered(
            compressor: CompressorWeights, rows: list[ProjectedRows], states: list[CompressorState]
        ) -> list[Float]:
            shards = [
                step_entries(projected, compressor, state, batch, config, frequencies, chosen)
                for projected, state, chosen in zip(rows, states, owned.token_indices, strict=True)
            ]
            return gathered_in_order(shards, owned)

        entries = gathered(
            weights.compressor, [keys.cmp_rows for keys, _ in known], [cache.cmp_state for cache in caches]
        )
        index_entries: list[Float] | list[None] = [None] * len(caches)
        if weights.indexer:
            index_entries = gathered(
                weights.indexer.compressor,
                [keys.index_rows for keys, _ in known],
                [cache.index_state for cache in caches],
            )
        new_caches = [
            with_entries(cache, own, own_index, batch, len(weights.compressor.ape))
            for cache, own, own_index in zip(new_caches, entries, index_entries, strict=True)
        ]
    return [with_carried_state(cache, keys, batch, weights) for cache, (keys, _) in zip(new_caches, known, strict=True)]


def entry_partition(partition: Partition, batch: LayerBatch, compress_ratio: int) -> Partition:
    """The step's entries over ranks: each belongs to the owner of its last token."""
    computed = num_computed_tokens(batch)
    plan = emitted_entries(batch.query_start_loc, computed, compress_ratio, num_rows=len(partition.restore_indices))
    count = int(plan.entry_start_loc[-1])
    requests, indices = plan.entry_requests[:count], plan.entry_indices[:count]
    last_tokens = batch.query_start_loc[requests] + (indices + 1) * compress_ratio - 1 - computed[requests]
    owned = tuple(np.flatnonzero(np.isin(last_tokens, tokens)).astype(np.int32) for tokens in partition.token_indices)
    return Partition(owned, inverse_of(np.concatenate(owned), count))


def outputs_of_ranks(
    outs: Sequence[Float], weights: LayerWeights, partition: Partition, rows: str, output_mode: str, num_rows: int
) -> list[Float]:
    """Every rank's layer output from the attention outputs of all ranks' own rows."""
    cp_size = len(outs)
    if output_mode == "all_to_all":
        partials = [share_of_output(out, weights, rank, cp_size) for rank, out in enumerate(head_shards(outs))]
        if rows == "scattered":
            return reduce_scatter(partials, [len(out) for out in outs])
        outputs = all_reduce([restored_rows(partial, partition) for partial in partials])
    else:
        wo_a, wo_b = weights.wo_a, weights.wo_b
        if output_mode == "gather_weight":
            # Each rank keeps its groups; the full weights exist only while they are used.
            groups = np.array_split(np.arange(len(wo_a)), cp_size)
            columns = wo_b.T.reshape(len(wo_a), -1, wo_b.shape[0])
            wo_a = all_gather([weights.wo_a[group] for group in groups])[0]
            wo_b = all_gather([columns[group] for group in groups])[0].reshape(-1, wo_b.shape[0]).T
        own = [projected_output(out, wo_a, wo_b) for out in outs]
        if rows == "scattered":
            return own
        outputs = gathered_in_order(own, partition)
    return [with_pad_rows(output, np.arange(num_rows) < len(output), 0) for output in outputs]


# --- draft layers ---


def draft_batches(query_start_loc: Int32, seq_lens: Int32, num_steps: int) -> tuple[tuple[Int32, Int32], ...]:
    """The lengths of every draft step, each in arrays of its own.

    ::

        step 0    the target's tokens: its hidden states are handed in
        step i    one token for every request that has queries, one key more than the step before

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets of the first step, first 0.
        seq_lens: int32[num_reqs], tokens, all keys with the first step's; 0 for a padded graph slot.
        num_steps: int, draft steps, >= 1.

    Returns:
        one (query_start_loc, seq_lens) a step. Building a step changes none before it.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: DeepSeek-V4's MTP block: window-only attention, theta 10000; the case of vllm-ascend#10878.

    >>> steps = draft_batches(np.array([0, 4], np.int32), np.array([10], np.int32), 3)
    >>> [(loc.tolist(), lens.tolist()) for loc, lens in steps]
    [([0, 4], [10]), ([0, 1], [11]), ([0, 1], [12])]
    """
    check_batch(query_start_loc, seq_lens)
    num_steps = check_int("num_steps", num_steps, 1)
    active = query_start_loc[1:] > query_start_loc[:-1]
    longest = int((seq_lens * active).max(initial=0))
    if longest + num_steps - 1 > INT32_MAX:
        raise contract_error("num_steps", "keep seq_lens below 2**31", num_steps, f"a request has {longest} keys")
    steps = [(query_start_loc.copy(), seq_lens.copy())]
    for step in range(1, num_steps):
        one_each = np.concatenate([[0], np.cumsum(active)]).astype(np.int32)
        steps.append((one_each, seq_lens + np.int32(step) * (active & (seq_lens > 0))))
    return tuple(steps)


def draft_metadata(
    query_start_loc: Int32,
    seq_lens: Int32,
    cp_size: int,
    cp_rank: int,
    num_steps: int,
    frequencies: Sequence[float],
    *,
    causal: bool = True,
) -> tuple[CPLocalMetadata, ...]:
    """One rank's metadata of every draft step: lengths, offsets and RoPE rows local, nothing shared between steps.

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets of the first step, first 0.
        seq_lens: int32[num_reqs], tokens, all keys with the first step's; 0 for a padded graph slot.
        cp_size: int, ranks that share the stream, >= 1.
        cp_rank: int, this rank, in [0, cp_size).
        num_steps: int, draft steps, >= 1.
        frequencies: rope_head_dim / 2 floats of window-only layers (`layer_frequencies` at ratio 1).
        causal: bool; False for block-parallel drafts.

    Returns:
        one CPLocalMetadata a step.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: xLLM #1997, MTP; vllm-ascend dsa_cp keeps one RoPE buffer per draft step.

    >>> args = np.array([0, 4, 8], np.int32), np.array([9, 6], np.int32), 2
    >>> [[local.local_seq_lens.tolist() for local in draft_metadata(*args, rank, 2, (1.0,))] for rank in (0, 1)]
    [[[9, 0], [10, 0]], [[0, 6], [0, 7]]]
    """
    steps = []
    for loc, lens in draft_batches(query_start_loc, seq_lens, num_steps):
        positions = token_positions(np.arange(int(loc[-1]), dtype=np.int32), loc, lens)
        table = rope_table(positions, frequencies)
        steps.append(build_cp_local_metadata(loc, lens, cp_size, cp_rank, *table, causal=causal))
    return tuple(steps)
