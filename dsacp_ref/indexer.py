"""Lightning indexer: which compressed entries a query attends to.

Score of entry w for a query: the sum over index heads of ``weight * relu(q . k_w)``, weights signed. Selection, among
the n entries the query may see: exactly ``min(index_topk, n)`` distinct ones, by score descending, then index
ascending; NaN counts as -inf; places left over hold -1::

    index_topk 3, n 4      scores  0.5 nan 2.0 0.5 (9.9)      entry 4 is not visible yet
                           chosen  2 0 3

Queries and keys pass through a Hadamard rotation. It changes no exact score; it is there for the quantiser. A cache of
keys in int8 is chosen from as the operator of A2 and A3 does, by `int8_index_scores`; one of keys in FP8 by
`fp8_index_scores`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.compressor import CompressorState, CompressorWeights, compress
from dsacp_ref.extents import FLOATS, Float, check_extents, check_offsets, query_positions
from dsacp_ref.fp8 import FP8Vectors, fp8_index_scores, fp8_vectors
from dsacp_ref.paging import block_table_rows, gathered_rows, scattered_rows, slot_mapping
from dsacp_ref.partition import Int32
from dsacp_ref.quant import QuantizedVectors, coded_vectors, int8_index_scores
from dsacp_ref.rope import apply_rope
from dsacp_ref.spec import INT32_MAX, check_array, check_int, check_record, contract_error
from dsacp_ref.visibility import visible_entries

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
]

QUERY_BLOCK = 32  # queries scored at a time
KEY_BLOCK = 1024  # keys scored at a time: all heads of one block of both fit the cache
KEY_TILE = 64  # a multiple of what any BLAS kernel takes at once, as QUERY_BLOCK times the heads is

IndexKeys = Float | QuantizedVectors | FP8Vectors
Keys = TypeVar("Keys", bound=IndexKeys)


class IndexerWeights(NamedTuple):
    """The indexer of one layer.

    Fields:
        wq_b: float[index_n_heads * index_head_dim, q_lora_rank].
        weights_proj: float[index_n_heads, hidden].
        compressor: CompressorWeights with d = index_head_dim.

    >>> IndexerWeights._fields
    ('wq_b', 'weights_proj', 'compressor')
    """

    wq_b: Float
    weights_proj: Float
    compressor: CompressorWeights


class IndexSelection(NamedTuple):
    """One step of the indexer: what the queries chose, and the key side carried on.

    Fields:
        topk_indices: int32[num_queries, index_topk].
        index_cache: float[num_blocks, block_size, index_head_dim], or QuantizedVectors or FP8Vectors of that shape.
        state: CompressorState of the indexer's own compressor.

    >>> IndexSelection._fields
    ('topk_indices', 'index_cache', 'state')
    """

    topk_indices: Int32
    index_cache: Float | QuantizedVectors | FP8Vectors
    state: CompressorState


def hadamard(x: Float) -> Float:
    """The vectors times the Sylvester-ordered Hadamard matrix over the root of its size: orthonormal, its own inverse.

    ::

        H(1) = [1]     H(2n) = [ H(n)  H(n) ]
                               [ H(n) -H(n) ]

    Args:
        x: float32 or float64 [..., d], d a power of two.

    Returns:
        dtype of ``x``, same shape.

    Raises:
        ContractError: dtype, or a width that is no power of two.

    Source: DeepSeek-V4 inference model, rotate_activation.

    >>> hadamard(np.array([1.0, 0.0, 0.0, 0.0])).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    d = x.shape[-1] if getattr(x, "shape", ()) else 0
    if d < 1 or d & (d - 1):
        raise contract_error("x", "have a power of two as its last size", d, "the Sylvester matrix has no other sizes")
    check_array("x", x, FLOATS, x.shape)
    out = x
    span = 1
    while span < d:
        pairs = out.reshape(*x.shape[:-1], d // (2 * span), 2, span)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
        span *= 2
    rotated: Float = out * x.dtype.type(1 / math.sqrt(d))
    return rotated


def index_queries(qr: Float, wq_b: Float, cos: Float, sin: Float, *, index_head_dim: int) -> Float:
    """The index queries: projected from the query latent, turned, rotated.

    Args:
        qr: float32 or float64 [num_tokens, q_lora_rank], the query latent after its norm.
        wq_b: float[index_n_heads * index_head_dim, q_lora_rank].
        cos: float[num_tokens, rope_head_dim / 2], the layer's table at the queries' positions.
        sin: like ``cos``.
        index_head_dim: int, a power of two.

    Returns:
        dtype of ``qr`` [num_tokens, index_n_heads, index_head_dim].

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: DeepSeek-V4 inference model: no norm here; RoPE, then Hadamard.

    >>> index_queries(np.ones((1, 2)), np.eye(2), np.ones((1, 1)), np.zeros((1, 1)), index_head_dim=2).round(3).tolist()
    [[[1.414, 0.0]]]
    """
    return hadamard(apply_rope(index_heads(qr, wq_b, index_head_dim), cos, sin))


def index_heads(qr: Float, wq_b: Float, index_head_dim: int) -> Float:
    """The heads of the index queries before they turn."""
    check_array("qr", qr, FLOATS, ("num_tokens", "q_lora_rank"))
    check_array("wq_b", wq_b, FLOATS, ("index_n_heads * index_head_dim", qr.shape[1]), "as wide as the query latent")
    index_head_dim = check_int("index_head_dim", index_head_dim, 1)
    if len(wq_b) % index_head_dim:
        raise contract_error("wq_b", f"have a multiple of {index_head_dim} rows", len(wq_b), "one block a head")
    heads: Float = (qr @ wq_b.T.astype(qr.dtype)).reshape(len(qr), len(wq_b) // index_head_dim, index_head_dim)
    return heads


def index_head_weights(x: Float, weights_proj: Float, *, index_head_dim: int) -> Float:
    """The signed weight of each index head, both scale factors in it once.

    Args:
        x: float32 or float64 [num_tokens, hidden].
        weights_proj: float[index_n_heads, hidden].
        index_head_dim: int, >= 1.

    Returns:
        dtype of ``x`` [num_tokens, index_n_heads]: ``x Wp^T / sqrt(index_head_dim * index_n_heads)``.

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: DeepSeek-V4 inference model.

    >>> index_head_weights(np.array([[2.0]]), np.array([[-1.0], [1.0]]), index_head_dim=2).tolist()
    [[-1.0, 1.0]]
    """
    check_array("x", x, FLOATS, ("num_tokens", "hidden"))
    check_array("weights_proj", weights_proj, FLOATS, ("index_n_heads", x.shape[1]), "as wide as x")
    scale = 1 / math.sqrt(check_int("index_head_dim", index_head_dim, 1) * len(weights_proj))
    weights: Float = x @ weights_proj.T.astype(x.dtype) * x.dtype.type(scale)
    return weights


def index_scores(index_q: Float, index_weights: Float, index_keys: Float) -> Float:
    """The score of every key for every query, visible or not.

    Args:
        index_q: float32 or float64 [num_tokens, index_n_heads, index_head_dim].
        index_weights: dtype of ``index_q`` [num_tokens, index_n_heads], signed.
        index_keys: dtype of ``index_q`` [num_keys, index_head_dim].

    Returns:
        dtype of ``index_q`` [num_tokens, num_keys]: sum over heads of ``weight * relu(q . k)``.

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: DeepSeek-V4 inference model; no softmax, no bias, no position term.

    >>> q = np.array([[[1.0, 0.0], [0.0, 1.0]]])
    >>> index_scores(q, np.array([[1.0, -2.0]]), np.array([[3.0, 1.0], [-3.0, 1.0]])).tolist()
    [[1.0, -2.0]]
    """
    check_array("index_q", index_q, FLOATS, ("num_tokens", "index_n_heads", "index_head_dim"))
    dtype = (str(index_q.dtype),)
    check_array("index_weights", index_weights, dtype, index_q.shape[:2], "one weight a head")
    check_array("index_keys", index_keys, dtype, ("num_keys", index_q.shape[2]), "as wide as the queries")
    num_tokens, num_heads, d = index_q.shape
    num_keys = len(index_keys)
    scores = np.empty((num_tokens, num_keys), index_q.dtype)
    # Equal keys must score equally wherever they stand, or a row's choice depends on its neighbours. A matrix product
    # adds up in another order at its ragged edges, so it only gets whole tiles, filled up with zeros: OpenBLAS then
    # gives every place the same sum, which the laws check on the machine they run on.
    tiled_keys = padded_rows(index_keys, -(-num_keys // KEY_TILE) * KEY_TILE)
    buffer = np.empty(QUERY_BLOCK * num_heads * min(len(tiled_keys), KEY_BLOCK), index_q.dtype)
    for start in range(0, num_tokens, QUERY_BLOCK):
        queries = slice(start, min(start + QUERY_BLOCK, num_tokens))
        count = queries.stop - start
        q = padded_rows(index_q[queries], QUERY_BLOCK).reshape(-1, d)
        weights = padded_rows(index_weights[queries], QUERY_BLOCK)
        for first in range(0, num_keys, KEY_BLOCK):
            keys = tiled_keys[first : first + KEY_BLOCK]
            hits = buffer[: len(q) * len(keys)].reshape(len(q), len(keys))
            np.matmul(q, keys.T, out=hits)
            np.maximum(hits, 0, out=hits)
            block = np.einsum("th,thk->tk", weights, hits.reshape(QUERY_BLOCK, num_heads, len(keys)))
            scores[queries, first : first + KEY_BLOCK] = block[:count, : num_keys - first]
    return scores


def padded_rows(rows: Float, count: int) -> Float:
    """The rows, contiguous, followed by zero rows up to a count."""
    if len(rows) == count:
        return np.ascontiguousarray(rows)
    padded = np.zeros((count, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded


def selected_entries(scores: Float, num_visible: Int32, index_topk: int) -> Int32:
    """The entries that each query attends to, best first.

    Args:
        scores: float32 or float64 [num_tokens, num_entries]; what lies at or beyond ``num_visible`` is not read.
        num_visible: int32[num_tokens], entries that each query may see, in [0, num_entries].
        index_topk: int, entries to choose, >= 1.

    Returns:
        int32[num_tokens, index_topk]: exactly ``min(index_topk, num_visible)`` distinct entries by (score descending,
        index ascending), NaN as -inf; then -1.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: torch.topk's order is unspecified among ties, ours is not (vllm-ascend#15053, vllm#49896).

    >>> scores = np.array([[0.5, np.nan, 2.0, 0.5, 9.9]])
    >>> selected_entries(scores, np.array([4], np.int32), 3).tolist()
    [[2, 0, 3]]
    >>> selected_entries(scores, np.array([1], np.int32), 3).tolist()
    [[0, -1, -1]]
    """
    check_array("scores", scores, FLOATS, ("num_tokens", "num_entries"))
    check_array("num_visible", num_visible, ("int32",), scores.shape[:1], "one count a query")
    index_topk = check_int("index_topk", index_topk, 1, INT32_MAX)
    num_tokens, num_entries = scores.shape
    if (num_visible < 0).any() or (num_visible > num_entries).any():
        raise contract_error(
            "num_visible", f"be in [0, {num_entries}]", num_visible.tolist(), "scores has a column each"
        )
    width = min(index_topk, num_entries)
    chosen = np.full((num_tokens, index_topk), -1, np.int32)
    if width == 0 or num_tokens == 0:
        return chosen
    visible = np.arange(num_entries) < num_visible[:, None]
    # An order that sorts ascending: best score first, NaN with -inf, and what is not visible behind everything.
    cost = np.where(np.isnan(scores), np.inf, -scores)
    if width < num_entries:
        columns = smallest_columns(cost, visible, width)
    else:
        columns = np.broadcast_to(np.arange(num_entries), scores.shape)
    order = np.lexsort((np.take_along_axis(cost, columns, 1), ~np.take_along_axis(visible, columns, 1)), axis=1)
    best = np.take_along_axis(columns, order, 1)
    real = np.arange(width) < num_visible[:, None]
    chosen[:, :width] = np.where(real, best, -1)
    return chosen


def smallest_columns(cost: Float, visible: NDArray[np.bool_], width: int) -> Int32:
    """The ``width`` columns of least cost, lowest column first among equals, visible ones before all others."""
    # Not visible is dearer than +inf cost: count it apart, so that a visible NaN stays selectable.
    hidden_cost = np.where(visible, cost, np.inf)
    threshold = np.partition(hidden_cost, width - 1, axis=1)[:, width - 1 : width]
    sure = hidden_cost < threshold
    tied = (hidden_cost == threshold) & visible
    room = width - sure.sum(axis=1, keepdims=True)
    taken = sure | (tied & (np.cumsum(tied, axis=1) <= room))
    # Rows that see fewer than `width` entries are filled up with hidden columns, which the caller turns into -1.
    missing = width - taken.sum(axis=1, keepdims=True)
    if missing.any():
        spare = ~taken & ~visible
        taken |= spare & (np.cumsum(spare, axis=1) <= missing)
    return np.nonzero(taken)[1].reshape(-1, width).astype(np.int32)


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
    """The entries that each local query attends to, keys read from a paged cache: the operator's granularity.

    From a cache in int8 the choice is the int8 operator's: queries that see an entry are coded by `quantized_int8`,
    their weights cast to float16 by way of float32, and the scores are those of `int8_index_scores`. From one in FP8,
    queries are coded by `quantized_fp8`, weights cast to float32, and the scores are those of `fp8_index_scores`.

    Args:
        index_q: float32 or float64 [num_queries, index_n_heads, index_head_dim].
        index_weights: dtype of ``index_q`` [num_queries, index_n_heads], signed.
        index_cache: dtype of ``index_q`` [num_blocks, block_size, index_head_dim], a row an entry; or QuantizedVectors
            of values int8[num_blocks, block_size, index_head_dim] and scales float16[num_blocks, block_size]; or
            FP8Vectors of values float8_e4m3fn and scales float32 of these shapes.
        cmp_block_table: int32[rows, max_blocks], by entry, one row an operator row.
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        seqused_kv: int32[rows], raw tokens (not entries), key extent of each row.
        compress_ratio: int, tokens per entry, >= 1.
        index_topk: int, entries to choose, >= 1.

    Returns:
        int32[num_queries, index_topk]: entries within the request, best first, then -1. All -1 for queries beyond
        ``cu_seqlens_q[-1]`` and where the extent is 0.

    Raises:
        ContractError: a shape, dtype or value does not hold, the table does not reach a visible entry, or a query that
            sees one does not fit the code's scale, or its weights the dtype they are cast to.

    Source: operator npu_vllm_quant_lightning_indexer, sparse_mode 3; with float keys, without its int8. In FP8, the
        operators of Ascend 950.

    >>> cache = np.array([[[1.0], [3.0]], [[2.0], [9.0]]])  # blocks of 2 entries; the request has 3
    >>> table, loc, used = np.array([[0, 1]], np.int32), np.array([0, 2], np.int32), np.array([7], np.int32)
    >>> q, head_weights = np.ones((2, 1, 1)), np.ones((2, 1))
    >>> lightning_indexer(q, head_weights, cache, table, loc, used, compress_ratio=2, index_topk=2).tolist()
    [[1, 2], [1, 2]]
    """
    check_array("index_q", index_q, FLOATS, ("num_queries", "index_n_heads", "index_head_dim"))
    dtype = str(index_q.dtype)
    check_array("index_weights", index_weights, (dtype,), index_q.shape[:2], "one weight a head")
    block_size = check_index_cache(index_cache, dtype, index_q.shape[2], "as the queries")
    positions = query_positions(cu_seqlens_q, seqused_kv, num_rows=len(index_q))
    check_array(
        "cmp_block_table", cmp_block_table, ("int32",), (len(seqused_kv), "max_blocks"), "one row an operator row"
    )
    num_visible = visible_entries(positions, compress_ratio)
    chosen = np.full((len(index_q), check_int("index_topk", index_topk, 1, INT32_MAX)), -1, np.int32)
    scores_of = scorer(index_q, index_weights, index_cache, num_visible > 0)
    for row in np.flatnonzero(cu_seqlens_q[1:] > cu_seqlens_q[:-1]):
        start, stop = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
        num_entries = int(num_visible[stop - 1])
        if num_entries == 0:
            continue
        entries = np.arange(num_entries, dtype=np.int32)
        slots = slot_mapping(entries, np.full(num_entries, row, np.int32), cmp_block_table, block_size)
        for first in range(start, stop, QUERY_BLOCK):
            block = slice(first, min(first + QUERY_BLOCK, stop))
            scores = scores_of(block, slots[: num_visible[block.stop - 1]])
            chosen[block] = selected_entries(scores, num_visible[block], index_topk)
    return chosen


class Codec(NamedTuple):
    """How index keys of one coded kind are made, what they are made of, and how queries are scored against them."""

    name: str
    values: str  # dtypes
    scales: str  # and that of the head weights
    vectors: Callable[[str, Float], Any]
    scores: Callable[..., Float]


CODECS: dict[type, Codec] = {
    QuantizedVectors: Codec("int8", "int8", "float16", coded_vectors, int8_index_scores),
    FP8Vectors: Codec("FP8", "float8_e4m3fn", "float32", fp8_vectors, fp8_index_scores),
}


def check_index_cache(index_cache: IndexKeys, dtype: str, d: int, hint: str) -> int:
    """The block size, once the cache holds keys of this width: floats of this dtype, or codes and their scales."""
    if not isinstance(index_cache, (QuantizedVectors, FP8Vectors)):
        check_array("index_cache", index_cache, (dtype,), ("num_blocks", "block_size", d), hint)
        return int(index_cache.shape[1])
    codec, (values, scales) = CODECS[type(index_cache)], index_cache
    shape = ("num_blocks", "block_size", d)
    check_array("index_cache.values", values, (codec.values,), shape, "as wide as the queries")
    check_array("index_cache.scales", scales, (codec.scales,), values.shape[:2], "one scale a vector")
    return int(values.shape[1])


def scorer(
    index_q: Float,
    index_weights: Float,
    index_cache: IndexKeys,
    seeing: NDArray[np.bool_],
) -> Callable[[slice, Int32], Float]:
    """What scores a block of queries against the keys at some slots, in the cache's own precision."""
    if not isinstance(index_cache, (QuantizedVectors, FP8Vectors)):
        return lambda block, slots: index_scores(
            index_q[block], index_weights[block], gathered_rows(index_cache, slots)
        )
    kind = type(index_cache)
    codec = CODECS[kind]
    # What belongs to no query that chooses may be anything, and fits no code then.
    coded = codec.vectors("index_q", np.where(seeing[:, None, None], index_q, 0))
    weights = cast_weights(np.where(seeing[:, None], index_weights, 0), codec)

    def coded_scores(block: slice, slots: Int32) -> Float:
        keys = kind(*(gathered_rows(part, slots) for part in index_cache))
        return codec.scores(kind(*(part[block] for part in coded)), weights[block], keys)

    return coded_scores


def cast_weights(index_weights: Float, codec: Codec) -> Float:
    """The head weights as the codec's operator takes them, by way of float32."""
    with np.errstate(over="ignore"):  # refused below
        weights: Float = index_weights.astype(np.float32).astype(codec.scales)
    infinite = np.isinf(weights)
    if infinite.any():
        got = float(index_weights[infinite][0])
        rule = f"be of a size that {codec.scales} holds"
        raise contract_error("index_weights", rule, got, f"the {codec.name} operator's dtype")
    return weights


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
    """One step of the indexer: keys compressed and cached, then the queries' choice.

    With context parallelism the queries are one rank's and the key side is everybody's: ``compress_x`` and
    ``compress_cu_seqlens`` are then the whole stream, while ``x``, ``qr`` and the lengths stay local::

        queries   x, qr, cos, sin, cu_seqlens_q, seqused_kv, request_indices        local
        keys      compress_x, compress_cu_seqlens, num_computed_tokens, state       global

    Args:
        x: float32 or float64 [num_queries, hidden], rows of the queries.
        qr: dtype of ``x`` [num_queries, q_lora_rank], query latent after its norm.
        cos: float[num_queries, rope_head_dim / 2], the layer's table at the queries' positions.
        sin: like ``cos``.
        weights: IndexerWeights.
        index_cache: dtype of ``x`` [num_blocks, block_size, index_head_dim], or QuantizedVectors or FP8Vectors as in
            `lightning_indexer`; not changed.
        cmp_block_table: int32[num_reqs, max_blocks], by entry, one row a request.
        state: CompressorState of the indexer's compressor, before this step, one ring a request.
        cu_seqlens_q: int32[rows + 1], tokens, offsets of the operator rows' queries.
        seqused_kv: int32[rows], raw tokens, key extent of each row.
        request_indices: int32[rows], the request whose table the row reads; -1 for a pad row.
        num_computed_tokens: int32[num_reqs], tokens before this step, global; negative for a padded graph slot.
        frequencies: rope_head_dim / 2 floats of the layer (see `rope_table`).
        index_topk: int, entries to choose, >= 1.
        eps: number, of the compressor's RMS norm.
        compress_x: dtype of ``x`` [num_tokens, hidden], rows of the key side; None takes ``x``.
        compress_cu_seqlens: int32[num_reqs + 1], tokens, offsets of ``compress_x``; None takes ``cu_seqlens_q``.

    Returns:
        IndexSelection: topk_indices [num_queries, index_topk], index_cache, state.

    Raises:
        ContractError: a shape, dtype or value does not hold, or one of the two key-side arguments is missing.

    Source: xLLM #1997 select_qli; vllm-ascend _update_indexer_cache (full) and _indexer_select_topk (local).

    >>> IndexSelection._fields[0]
    'topk_indices'
    """
    check_record("weights", weights, IndexerWeights)
    check_record("state", state, CompressorState)
    if (compress_x is None) != (compress_cu_seqlens is None):
        raise contract_error(
            "compress_x and compress_cu_seqlens", "be given together", "one of the two", "rows and their own offsets"
        )
    key_rows = x if compress_x is None else compress_x
    key_loc = cu_seqlens_q if compress_cu_seqlens is None else compress_cu_seqlens
    check_array("x", x, FLOATS, ("num_queries", "hidden"))
    check_offsets("cu_seqlens_q", cu_seqlens_q)
    check_extents(cu_seqlens_q, seqused_kv)
    index_head_dim = len(weights.compressor.norm_weight)
    block_size = check_index_cache(index_cache, str(x.dtype), index_head_dim, "like x")
    check_array("cmp_block_table", cmp_block_table, ("int32",), ("num_reqs", "max_blocks"), "one row a request")
    step = compress(key_rows, weights.compressor, key_loc, num_computed_tokens, state, frequencies, eps=eps)
    slots = slot_mapping(step.compressed.entry_indices, step.compressed.entry_requests, cmp_block_table, block_size)
    cache = cached_entries(index_cache, hadamard(step.compressed.entries), slots)
    topk_indices = lightning_indexer(
        index_queries(qr, weights.wq_b, cos, sin, index_head_dim=index_head_dim),
        index_head_weights(x, weights.weights_proj, index_head_dim=index_head_dim),
        cache,
        block_table_rows(cmp_block_table, request_indices),
        cu_seqlens_q,
        seqused_kv,
        compress_ratio=weights.compressor.ape.shape[0],
        index_topk=index_topk,
    )
    return IndexSelection(topk_indices, cache, step.state)


def cached_entries(index_cache: Keys, keys: Float, slots: Int32) -> Keys:
    """The cache with these keys written, coded where it holds codes."""
    rows = coded_keys(keys, index_cache)
    written = [scattered_rows(*part, slots) for part in zip(parts_of(index_cache), rows, strict=True)]
    return with_parts(index_cache, written)


def coded_keys(keys: Float, like: IndexKeys) -> tuple[NDArray[Any], ...]:
    """The keys as such a cache holds them, one array for each of its parts."""
    codec = CODECS.get(type(like))
    return tuple(codec.vectors("index keys", keys)) if codec else (keys,)


def parts_of(index_cache: IndexKeys) -> tuple[NDArray[Any], ...]:
    """The arrays of a cache of index keys."""
    return tuple(index_cache) if isinstance(index_cache, (QuantizedVectors, FP8Vectors)) else (index_cache,)


def with_parts(like: Keys, parts: Sequence[NDArray[Any]]) -> Keys:
    """What `parts_of` would take apart into these parts."""
    made: Any = type(like)(*parts) if isinstance(like, (QuantizedVectors, FP8Vectors)) else parts[0]
    return made  # type: ignore[no-any-return]
