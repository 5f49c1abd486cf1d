"""One DeepSeek-V3.2 attention layer: on one device, and the same layer over ranks whose rows stay scattered.

::

    own rows -> latents, rope keys, index keys -> gather, uneven counts -> token order -> caches, in full
             -> queries -> index scores -> own picks -> attention -> wo -> own rows

Every rank ends a step with the keys of all tokens, because a request that decodes, or a chunk that goes on, may be
anyone's. The split decides only who computes what; no result depends on it. Caches are state: they come in and go out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.compressor import rms_norm
from dsacp_ref.exchange import check_group, check_sequence, gathered_in_order
from dsacp_ref.extents import (
    FLOATS,
    Float,
    LocalExtents,
    check_batch,
    local_extents,
    token_positions,
    token_requests,
)
from dsacp_ref.fp8 import FP8Vectors, encoded_latents, quantized_fp8
from dsacp_ref.indexer import (
    check_index_cache,
    coded_keys,
    index_head_weights,
    lightning_indexer,
    parts_of,
    with_parts,
)
from dsacp_ref.layer import with_pad_rows
from dsacp_ref.mla import (
    LatentKeys,
    UInt8,
    absorbed_queries,
    check_latent_cache,
    latent_attention,
    latent_keys,
    latent_queries,
    mla_frequencies,
    token_index_keys,
    token_index_queries,
    value_heads,
)
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.paging import block_table_rows, scattered_rows, slot_mapping
from dsacp_ref.partition import Int32, partition_tokens
from dsacp_ref.quant import QuantizedVectors, quantized_int8
from dsacp_ref.rope import RopeTable, rope_table
from dsacp_ref.spec import (
    UnsupportedError,
    check_array,
    check_bool,
    check_choice,
    check_int,
    check_record,
    contract_error,
)

__all__ = [
    "MLABatch",
    "MLACache",
    "MLAIndexerWeights",
    "MLAOutput",
    "MLARanksOutput",
    "MLAWeights",
    "empty_mla_cache",
    "mla_attention_layer",
    "mla_over_ranks",
]

INDEX_NORM_EPS = 1e-6  # of the index keys' LayerNorm; a constant of the model, not a key of its configuration


class MLAIndexerWeights(NamedTuple):
    """The indexer of one layer, by the checkpoint's names.

    Fields:
        wq_b: float[index_n_heads * index_head_dim, q_lora_rank].
        wk: float[index_head_dim, hidden].
        k_norm: float[index_head_dim], of the LayerNorm.
        k_norm_bias: float[index_head_dim].
        weights_proj: float[index_n_heads, hidden].

    >>> MLAIndexerWeights._fields[:2]
    ('wq_b', 'wk')
    """

    wq_b: Float
    wk: Float
    k_norm: Float
    k_norm_bias: Float
    weights_proj: Float


class MLAWeights(NamedTuple):
    """One layer's weights, all heads.

    Fields:
        wq_a: float[q_lora_rank, hidden].
        q_norm: float[q_lora_rank].
        wq_b: float[num_heads * (nope_head_dim + rope_head_dim), q_lora_rank].
        wkv_a: float[kv_lora_rank + rope_head_dim, hidden].
        kv_norm: float[kv_lora_rank].
        w_uk: float[num_heads, nope_head_dim, kv_lora_rank], the first rows of each head in the checkpoint's wkv_b.
        w_uv: float[num_heads, v_head_dim, kv_lora_rank], the rows after them.
        wo: float[hidden, num_heads * v_head_dim].
        indexer: MLAIndexerWeights.

    >>> MLAWeights._fields[:3]
    ('wq_a', 'q_norm', 'wq_b')
    """

    wq_a: Float
    q_norm: Float
    wq_b: Float
    wkv_a: Float
    kv_norm: Float
    w_uk: Float
    w_uv: Float
    wo: Float
    indexer: MLAIndexerWeights


class MLACache(NamedTuple):
    """What one layer keeps between steps, on one rank; all parts share a block table.

    Fields:
        latent_cache: float[num_blocks, block_size, kv_lora_rank]; or uint8[num_blocks, block_size, row bytes], with
            the rope keys (`encoded_latents`).
        rope_cache: float[num_blocks, block_size, rope_head_dim]; None with latents in bytes.
        index_cache: float[num_blocks, block_size, index_head_dim], rotated; or FP8Vectors or QuantizedVectors.

    >>> MLACache._fields
    ('latent_cache', 'rope_cache', 'index_cache')
    """

    latent_cache: Float | UInt8
    rope_cache: Float | None
    index_cache: Float | FP8Vectors | QuantizedVectors


class MLABatch(NamedTuple):
    """One step's requests, global: the same on every rank.

    Fields:
        query_start_loc: int32[num_reqs + 1], tokens, query offsets, first 0.
        seq_lens: int32[num_reqs], tokens, all keys with this step's; 0 for a padded graph slot.
        block_table: int32[num_reqs, max_blocks], by position.

    >>> MLABatch._fields
    ('query_start_loc', 'seq_lens', 'block_table')
    """

    query_start_loc: Int32
    seq_lens: Int32
    block_table: Int32


class MLAOutput(NamedTuple):
    """One step of a layer on one device.

    Fields:
        output: float[num_tokens, hidden]; zero for rows that belong to no request.
        topk_indices: int32[num_tokens, index_topk], the tokens that each query chose.
        cache: MLACache after the step.

    >>> MLAOutput._fields
    ('output', 'topk_indices', 'cache')
    """

    output: Float
    topk_indices: Int32
    cache: MLACache


class MLARanksOutput(NamedTuple):
    """One step of a layer over ranks; every field has one item a rank.

    Fields:
        outputs: float[local rows, hidden], zero in pad rows.
        topk_indices: int32[local rows, index_topk], -1 in pad rows.
        caches: MLACache after the step.

    >>> MLARanksOutput._fields
    ('outputs', 'topk_indices', 'caches')
    """

    outputs: list[Float]
    topk_indices: list[Int32]
    caches: list[MLACache]


class TokenKeys(NamedTuple):
    """What new tokens put into the caches."""

    keys: LatentKeys
    index_keys: Float


def empty_mla_cache(
    config: MLAConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: str,
    fp8: bool = False,
    int8_index_cache: bool = False,
) -> MLACache:
    """The cache of a layer before its first step.

    Args:
        config: MLAConfig, for widths.
        num_blocks: int, >= 0.
        block_size: int, tokens per block, >= 1.
        dtype: ``"float32"`` or ``"float64"``, of the layer's rows.
        fp8: bool; True keeps latents as `encoded_latents` does, and index keys as FP8Vectors.
        int8_index_cache: bool; True keeps index keys as QuantizedVectors; not together with ``fp8``.

    Returns:
        MLACache: zeros.

    Raises:
        ContractError: a value does not hold.
        ImportError: ``fp8`` without `ml_dtypes`.

    Source: ours.

    >>> from dsacp_ref.mla_config import v32
    >>> empty_mla_cache(v32(), num_blocks=3, block_size=4, dtype="float32").latent_cache.shape
    (3, 4, 512)
    """
    check_record("config", config, MLAConfig)
    blocks = check_int("num_blocks", num_blocks, 0), check_int("block_size", block_size, 1)
    check_choice("dtype", dtype, FLOATS)
    both = check_bool("fp8", fp8), check_bool("int8_index_cache", int8_index_cache)
    if all(both):
        raise contract_error("int8_index_cache", "be False with fp8", True, "index keys are kept in one of the two")
    widths = (config.kv_lora_rank, config.rope_head_dim, config.index_head_dim)
    latents, rope_keys, index_keys = (np.zeros((*blocks, width), dtype) for width in widths)
    if fp8:
        return MLACache(encoded_latents(latents, rope_keys), None, quantized_fp8(index_keys))
    return MLACache(latents, rope_keys, quantized_int8(index_keys) if int8_index_cache else index_keys)


# --- the pieces of a layer ---


def table_of(tokens: Int32, batch: MLABatch, config: MLAConfig) -> RopeTable:
    """The RoPE rows of these flat tokens."""
    positions = token_positions(tokens, batch.query_start_loc, batch.seq_lens)
    return rope_table(positions, mla_frequencies(config))


def token_keys(x: Float, table: RopeTable, weights: MLAWeights, config: MLAConfig) -> TokenKeys:
    """What these rows' tokens put into the caches."""
    indexer = weights.indexer
    return TokenKeys(
        latent_keys(x, weights.wkv_a, weights.kv_norm, *table, eps=config.rms_norm_eps),
        token_index_keys(x, indexer.wk, indexer.k_norm, indexer.k_norm_bias, *table, eps=INDEX_NORM_EPS),
    )


def stored_rows(new: TokenKeys, tokens: Int32, cache: MLACache, batch: MLABatch) -> list[NDArray[Any]]:
    """What these flat tokens put into the caches, one array for each of `cache_parts`, coded where that holds codes."""
    # What belongs to no request may be anything, and fits no code then; it is not written either.
    live = (token_positions(tokens, batch.query_start_loc, batch.seq_lens) >= 0)[:, None]
    latent, rope_key, index_keys = (np.where(live, part, part.dtype.type(0)) for part in (*new.keys, new.index_keys))
    keys = [encoded_latents(latent, rope_key)] if cache.rope_cache is None else [latent, rope_key]
    return [*keys, *coded_keys(index_keys, cache.index_cache)]


def cache_parts(cache: MLACache) -> list[NDArray[Any]]:
    """The arrays of a cache, all by block and row."""
    latents = [cache.latent_cache] if cache.rope_cache is None else [cache.latent_cache, cache.rope_cache]
    return [*latents, *parts_of(cache.index_cache)]


def with_rows(cache: MLACache, rows: Sequence[NDArray[Any]], tokens: Int32, batch: MLABatch) -> MLACache:
    """The cache with these rows of these flat tokens written; what belongs to no request is not."""
    positions = token_positions(tokens, batch.query_start_loc, batch.seq_lens)
    requests = token_requests(tokens, batch.query_start_loc)
    slots = slot_mapping(positions, requests, batch.block_table, cache.latent_cache.shape[1])
    parts = [scattered_rows(part, values, slots) for part, values in zip(cache_parts(cache), rows, strict=True)]
    if cache.rope_cache is None:
        return MLACache(parts[0], None, with_parts(cache.index_cache, parts[1:]))
    return MLACache(parts[0], parts[1], with_parts(cache.index_cache, parts[2:]))


def attended(
    x: Float,
    table: RopeTable,
    cache: MLACache,
    extents: LocalExtents,
    batch: MLABatch,
    weights: MLAWeights,
    config: MLAConfig,
    given_topk: Int32 | None,
) -> tuple[Float, Int32]:
    """The layer's output for some rows, and what they chose."""
    qr = rms_norm(x @ weights.wq_a.T.astype(x.dtype), weights.q_norm, config.rms_norm_eps)
    rows = (block_table_rows(batch.block_table, extents.request_indices), extents.cu_seqlens_q, extents.seqused_kv)
    topk_indices = given_topk
    if topk_indices is None:
        d = config.index_head_dim
        topk_indices = lightning_indexer(
            token_index_queries(qr, weights.indexer.wq_b, *table, index_head_dim=d),
            index_head_weights(x, weights.indexer.weights_proj, index_head_dim=d),
            cache.index_cache,
            *rows,
            compress_ratio=1,
            index_topk=config.index_topk,
        )
    q_nope, q_rope = latent_queries(qr, weights.wq_b, *table, nope_head_dim=config.nope_head_dim)
    out = latent_attention(
        absorbed_queries(q_nope, weights.w_uk),
        q_rope,
        cache.latent_cache,
        cache.rope_cache,
        rows[0],
        topk_indices,
        *rows[1:],
        softmax_scale=config.softmax_scale,
    ).out
    values = value_heads(out, weights.w_uv)
    output: Float = values.reshape(len(x), weights.wo.shape[1]) @ weights.wo.T.astype(x.dtype)
    return output, topk_indices


# --- one device ---


def mla_attention_layer(
    x: Float,
    weights: MLAWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    *,
    given_topk: Int32 | None = None,
) -> MLAOutput:
    """One step of a layer on one device: prefill, chunks, decode and any mixture of them.

    Args:
        x: float32 or float64 [num_tokens, hidden], the block input after its norm; rows beyond
            ``batch.query_start_loc[-1]`` are padding.
        weights: MLAWeights.
        cache: MLACache before the step, in the dtype of ``x`` where it holds floats; not changed.
        batch: MLABatch.
        config: MLAConfig.
        given_topk: int32[num_tokens, index_topk], a selection to use instead of the indexer's; or None.

    Returns:
        MLAOutput: output [num_tokens, hidden], topk_indices, cache. Independent of how requests are cut into steps.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        ImportError: a cache in FP8 without `ml_dtypes`.

    Source: DeepSeek-V3.2 inference model; transformers' deepseek_v32 agrees to float32 rounding.

    >>> MLAOutput._fields[0]
    'output'
    """
    check_mla_weights(weights, config)
    check_array("x", x, FLOATS, ("num_tokens", config.hidden_size), "the block input after its norm")
    check_mla_step(str(x.dtype), len(x), batch, cache, config)
    check_given(given_topk, len(x), config)
    tokens = np.arange(len(x), dtype=np.int32)
    table = table_of(tokens, batch, config)
    new = token_keys(x, table, weights, config)
    cache = with_rows(cache, stored_rows(new, tokens, cache, batch), tokens, batch)
    extents = LocalExtents(batch.query_start_loc, batch.seq_lens, np.arange(len(batch.seq_lens), dtype=np.int32))
    output, topk_indices = attended(x, table, cache, extents, batch, weights, config, given_topk)
    return MLAOutput(output, topk_indices, cache)


# --- over ranks ---


def mla_over_ranks(
    shards: Sequence[Float],
    weights: MLAWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    *,
    split: str = "zigzag",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    given_topk: Int32 | None = None,
) -> MLARanksOutput:
    """One step of a layer over ranks that hold own rows only; the result is that of one device.

    What travels are the keys of own rows: latents, rope keys and index keys, as the caches hold them, so FP8 is half
    the bytes of bfloat16. Weights are whole on every rank.

    Args:
        shards: float32 or float64 [local rows, hidden], one per rank, laid out by the split, pad rows included.
        weights: MLAWeights, all heads.
        caches: one MLACache per rank, before the step; not changed.
        batch: MLABatch, global, the same on every rank.
        config: MLAConfig.
        split: str, a rule of `SPLITS`: SGLang's in-seq-split is ``"zigzag"``, its round-robin-split ``"round_robin"``.
        num_input_tokens: int or None, rows of the padded stream (see `rank_pieces`).
        kept_keys: ``"all"``: every rank's cache ends complete. ``"own"``: a rank writes the keys of its own rows only,
            after it has attended to all of them; then no later step can go on, so no request may have earlier tokens.
        given_topk: int32[num_tokens, index_topk] by global token, a selection to use instead of the indexer's; or
            None.

    Returns:
        MLARanksOutput: each rank's own rows.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        UnsupportedError: ``"own"`` behind computed tokens, of which no rank has all keys.
        ImportError: a cache in FP8 without `ml_dtypes`.

    Source: SGLang #12065 (in-seq-split) and #13959 (round-robin-split): cp_all_gather_rerange_output of latent and
        index keys. Both write the keys in full; ``"own"`` is what notes on them say.

    >>> MLARanksOutput._fields[0]
    'outputs'
    """
    check_mla_weights(weights, config)
    check_sequence("shards", shards)
    check_sequence("caches", caches)
    cp_size = check_int("cp_size", len(shards), 1, hint="one shard a rank")
    if len(caches) != cp_size:
        raise contract_error("caches", f"hold one cache for each of {cp_size} ranks", len(caches))
    check_record("batch", batch, MLABatch)
    check_batch(batch.query_start_loc, batch.seq_lens)
    partition = partition_tokens(batch.query_start_loc, cp_size, split=split, num_input_tokens=num_input_tokens)
    check_kept_keys(kept_keys, batch)
    check_group(shards, partition)
    check_array("shards", shards[0], FLOATS, ("local_rows", config.hidden_size), "the block input after its norm")
    num_tokens = len(partition.restore_indices)
    for cache in caches:
        check_mla_step(str(shards[0].dtype), num_tokens, batch, cache, config)
    check_alike(caches)
    check_given(given_topk, num_tokens, config)

    places = partition.token_indices
    # Pad rows hold anything; zero keeps it from meeting arithmetic.
    own = [np.where((tokens >= 0)[:, None], x, x.dtype.type(0)) for x, tokens in zip(shards, places, strict=True)]
    tables = [table_of(tokens, batch, config) for tokens in places]
    stored = [
        stored_rows(token_keys(x, table, weights, config), tokens, cache, batch)
        for x, table, tokens, cache in zip(own, tables, places, caches, strict=True)
    ]
    gathered = [gathered_in_order(part_of_ranks, partition) for part_of_ranks in zip(*stored, strict=True)]
    everything = np.arange(num_tokens, dtype=np.int32)
    full = [
        with_rows(cache, rows, everything, batch)
        for cache, rows in zip(caches, zip(*gathered, strict=True), strict=True)
    ]
    outputs, topks = [], []
    for rank, (x, table, tokens, cache) in enumerate(zip(own, tables, places, full, strict=True)):
        extents = local_extents(
            batch.query_start_loc, batch.seq_lens, cp_size, rank, split=split, num_input_tokens=num_input_tokens
        )
        # Operators take queries without the pad rows that some rules put between pieces.
        real = tokens >= 0
        chosen = None if given_topk is None else given_topk[tokens[real]]
        real_table = RopeTable(*(part[real] for part in table))
        output, topk_indices = attended(x[real], real_table, cache, extents, batch, weights, config, chosen)
        outputs.append(with_pad_rows(output, real, 0))
        topks.append(with_pad_rows(topk_indices, real, -1))
    if kept_keys == "own":
        full = [
            with_rows(cache, rows, tokens, batch) for cache, rows, tokens in zip(caches, stored, places, strict=True)
        ]
    return MLARanksOutput(outputs, topks, full)


# --- checks ---


def check_mla_weights(weights: MLAWeights, config: MLAConfig) -> None:
    """Refuse weights of another model."""
    check_record("weights", weights, MLAWeights)
    check_record("config", config, MLAConfig)
    check_record("weights.indexer", weights.indexer, MLAIndexerWeights)
    heads, hidden, lora = config.num_heads, config.hidden_size, config.kv_lora_rank
    d = config.index_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a": (config.q_lora_rank, hidden),
        "q_norm": (config.q_lora_rank,),
        "wq_b": (heads * (config.nope_head_dim + config.rope_head_dim), config.q_lora_rank),
        "wkv_a": (lora + config.rope_head_dim, hidden),
        "kv_norm": (lora,),
        "w_uk": (heads, config.nope_head_dim, lora),
        "w_uv": (heads, config.v_head_dim, lora),
        "wo": (hidden, heads * config.v_head_dim),
        "indexer.wq_b": (config.index_n_heads * d, config.q_lora_rank),
        "indexer.wk": (d, hidden),
        "indexer.k_norm": (d,),
        "indexer.k_norm_bias": (d,),
        "indexer.weights_proj": (config.index_n_heads, hidden),
    }
    for name, shape in shapes.items():
        owner, _, part = name.rpartition(".")
        weight = getattr(weights.indexer if owner else weights, part)
        check_array(f"weights.{name}", weight, FLOATS, shape, "the shapes follow from config")


def check_mla_step(dtype: str, num_rows: int, batch: MLABatch, cache: MLACache, config: MLAConfig) -> None:
    """Refuse a step whose rows, table and caches do not belong together."""
    check_record("batch", batch, MLABatch)
    check_batch(batch.query_start_loc, batch.seq_lens)
    shape = (len(batch.seq_lens), "max_blocks")
    check_array("batch.block_table", batch.block_table, ("int32",), shape, "one row a request")
    check_record("cache", cache, MLACache)
    check_latent_cache(cache.latent_cache, cache.rope_cache, config.kv_lora_rank, config.rope_head_dim, dtype)
    block_size = check_index_cache(cache.index_cache, dtype, config.index_head_dim, "of config")
    num_blocks = len(parts_of(cache.index_cache)[0])
    if (num_blocks, block_size) != cache.latent_cache.shape[:2]:
        blocks = "{} blocks of {}".format(*cache.latent_cache.shape[:2])
        got = f"{num_blocks} blocks of {block_size}"
        raise contract_error("cache.index_cache", f"have {blocks}", got, "one block table serves all parts")
    if num_rows < batch.query_start_loc[-1]:
        needed = int(batch.query_start_loc[-1])
        raise contract_error("x", f"have at least {needed} rows", num_rows, "query_start_loc counts global rows")


def check_alike(caches: Sequence[MLACache]) -> None:
    """Refuse ranks that keep their keys in different ways: rows travel as the caches hold them."""
    kinds = []
    for cache in caches:
        check_record("caches", cache, MLACache)
        latents = "floats" if cache.rope_cache is not None else "bytes"
        coded = isinstance(cache.index_cache, FP8Vectors | QuantizedVectors)
        index_keys = type(cache.index_cache).__name__ if coded else "floats"
        kinds.append(f"latents in {latents} and index keys in {index_keys}")
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            rule = f"be alike: rank 0 has {kinds[0]}"
            raise contract_error("caches", rule, f"{kind} on rank {rank}", "rows travel as the caches hold them")


def check_given(given_topk: Int32 | None, num_rows: int, config: MLAConfig) -> None:
    """Refuse a handed-in selection of another shape."""
    if given_topk is not None:
        check_array("given_topk", given_topk, ("int32",), (num_rows, config.index_topk), "one row a token of x")


def check_kept_keys(kept_keys: str, batch: MLABatch) -> None:
    """Refuse to go on from keys that nobody has."""
    check_choice("kept_keys", kept_keys, ("all", "own"))
    computed = batch.seq_lens - (batch.query_start_loc[1:] - batch.query_start_loc[:-1])
    if kept_keys == "own" and (computed > 0).any():
        request = int((computed > 0).argmax())
        raise UnsupportedError(
            f"kept_keys must be 'all' where a request has earlier tokens, got 'own' with {int(computed[request])} of "
            f"request {request}; ranks that keep own keys only cannot go on: chunks and decode need all keys"
        )
