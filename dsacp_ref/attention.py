"""Shared-KV attention over the window and compressed entries, with a sink; and merging partial results.

One vector a token is both key and value for every head. One softmax runs over the union of what a query sees::

    out = sum_j exp(z_j) row_j / (sum_j exp(z_j) + exp(sink))        z_j = softmax_scale * q . row_j

The sink has no value and is not a key: it is applied once, at the end. ``lse`` is the natural logarithm of the sum over
keys *without* the sink, -inf where nothing is visible (the output is 0 there, never NaN). So partial results merge by
their ``lse`` and the sink joins afterwards.

Rows right-align to their extents as in `extents`. An operator row of many queries is computed by dense blocks, one
matrix product for all heads of a block; chosen entries differ from query to query and are gathered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.extents import FLOATS, Float, query_positions, query_rows
from dsacp_ref.paging import check_slots, flat_cache, gathered_rows, slot_mapping
from dsacp_ref.partition import Int32
from dsacp_ref.spec import check_array, check_int, check_number, contract_error
from dsacp_ref.visibility import visible_entries, window_starts

__all__ = [
    "AttentionOutput",
    "all_entries_attention",
    "apply_sink",
    "gathered_attention",
    "merge_partials",
    "selected_attention",
    "window_attention",
]

QUERY_BLOCK = 32  # queries of one dense block
KEY_BLOCK = 1024  # keys of one dense block
GATHERED_NUMBERS = 1 << 20  # numbers gathered at a time: they stay in the cache until they are used


class AttentionOutput(NamedTuple):
    """What attention gives for each query and head.

    Fields:
        out: float[num_queries, num_heads, head_dim].
        lse: float[num_queries, num_heads], natural log-sum-exp over keys, without the sink; -inf if there are none.

    >>> AttentionOutput._fields
    ('out', 'lse')
    """

    out: Float
    lse: Float


def gathered_attention(q: Float, keys: Float, key_indices: Int32, *, softmax_scale: float) -> AttentionOutput:
    """Attention of each query over its own list of keys, without a sink.

    Args:
        q: float32 or float64 [num_queries, num_heads, head_dim].
        keys: dtype of ``q`` [num_keys, head_dim], both key and value.
        key_indices: int32[num_queries, width], rows of ``keys``; -1 is no key, wherever it stands.
        softmax_scale: number, > 0.

    Returns:
        AttentionOutput.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: the definition; every other function here equals it.

    >>> keys = np.array([[1.0], [3.0]])
    >>> both = gathered_attention(np.zeros((1, 1, 1)), keys, np.array([[-1, 0, 1]], np.int32), softmax_scale=1.0)
    >>> both.out.tolist(), both.lse.round(4).tolist()
    ([[[2.0]]], [[0.6931]])
    """
    num_queries, _, head_dim = checked_queries(q, softmax_scale)
    check_array("keys", keys, (str(q.dtype),), ("num_keys", head_dim), "as wide as the queries")
    check_array("key_indices", key_indices, ("int32",), (num_queries, "width"), "one list a query")
    check_slots(key_indices, len(keys), "key_indices", "keys has no such row")
    return gathered_from([keys], [key_indices], q, None, softmax_scale)


def gathered_from(
    sources: list[Float], indices: list[Int32], q: Float, attn_sink: Float | None, softmax_scale: float
) -> AttentionOutput:
    """Attention of each query over rows picked from several arrays, checked before."""
    num_queries, _, head_dim = q.shape
    out = np.empty(q.shape, q.dtype)
    lse = np.full(q.shape[:2], -np.inf, q.dtype)
    widest = sum(each.shape[1] for each in indices)
    step = max(1, GATHERED_NUMBERS // max(1, widest * head_dim))
    buffer = np.empty(min(step, num_queries) * widest * head_dim, q.dtype)
    for start in range(0, num_queries, step):
        part = slice(start, min(start + step, num_queries))
        # Columns that no query of the block uses cost nothing: early queries see few entries.
        lists = [each[part][:, (each[part] >= 0).any(axis=0)] for each in indices]
        picked = np.concatenate(lists, axis=1).astype(np.intp)
        if picked.shape[1] == 0:
            out[part] = 0
            continue
        bounds = np.cumsum([0, *(each.shape[1] for each in lists)])
        rows = buffer[: picked.size * head_dim].reshape(*picked.shape, head_dim)
        for own_picks, own_rows in zip(picked, rows, strict=True):
            for source, first, last in zip(sources, bounds, bounds[1:], strict=False):
                if last > first:
                    np.take(source, own_picks[first:last], axis=0, out=own_rows[first:last], mode="clip")
        # A key that is not there must not even meet a zero weight: 0 * NaN is NaN.
        absent = picked < 0
        if absent.any():
            rows[absent] = 0
        lse[part] = softmax_rows(q[part], rows, absent, attn_sink, softmax_scale, out[part])
    return AttentionOutput(out, lse)


def softmax_rows(
    q: Float, rows: Float, absent: NDArray[np.bool_], attn_sink: Float | None, softmax_scale: float, out: Float
) -> Float:
    """Attention of queries [t, H, D] over rows [t, n, D] of their own, or [n, D] in common: into ``out``; the lse."""
    in_common = rows.ndim == 2
    if in_common:
        logits, keys = (q.reshape(-1, q.shape[2]) @ rows.T).reshape(*q.shape[:2], len(rows)), 2
    else:
        # One product a query: a stacked product with a transposed operand would not go through BLAS. Keys by heads,
        # because BLAS prefers the long side first.
        logits, keys = np.empty((len(q), rows.shape[1], q.shape[1]), q.dtype), 1
        for one_query, own_rows, own_logits in zip(q, rows, logits, strict=True):
            np.matmul(own_rows, one_query.T, out=own_logits)
    logits *= q.dtype.type(softmax_scale)
    if absent.any():
        np.copyto(logits, -np.inf, where=np.expand_dims(absent, 3 - keys))
    highest = logits.max(axis=keys, keepdims=True)
    # Where nothing is visible the maximum is -inf; 0 in its place keeps -inf - -inf away.
    logits -= np.where(highest == -np.inf, q.dtype.type(0), highest)
    np.exp(logits, out=logits)
    total = logits.sum(axis=keys, keepdims=True)
    with np.errstate(divide="ignore"):
        lse: Float = (highest + np.log(total)).reshape(q.shape[:2])
    # The probabilities take the normalisation and the sink: they are fewer numbers than the output.
    share = 1 / np.where(total > 0, total, q.dtype.type(1))
    if attn_sink is not None:
        share *= share_beside_sink(lse, attn_sink).reshape(share.shape)
    logits *= share
    if in_common:
        np.matmul(logits.reshape(-1, len(rows)), rows, out=out.reshape(-1, q.shape[2]))
    else:
        for own_logits, own_rows, own_out in zip(logits, rows, out, strict=True):
            np.matmul(own_logits.T, own_rows, out=own_out)
    return lse


def checked_queries(q: Float, softmax_scale: float) -> tuple[int, int, int]:
    """The sizes of the query array."""
    check_array("q", q, FLOATS, ("num_queries", "num_heads", "head_dim"))
    check_number("softmax_scale", softmax_scale, above=0.0, hint="head_dim ** -0.5; the operator's default is not it")
    num_queries, num_heads, head_dim = q.shape
    check_int("num_heads", num_heads, 1)
    check_int("head_dim", head_dim, 1)
    return num_queries, num_heads, head_dim


def window_attention(
    q: Float,
    swa_cache: Float,
    swa_block_table: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    attn_sink: Float,
    *,
    window_size: int,
    softmax_scale: float,
) -> AttentionOutput:
    """Attention over the sliding window, raw keys read from a paged cache: layers of ratio 1.

    Args:
        q: float32 or float64 [num_queries, num_heads, head_dim].
        swa_cache: dtype of ``q`` [num_blocks, block_size, head_dim], one row a raw token.
        swa_block_table: int32[rows, max_blocks], by raw position, one row an operator row; read only in the window.
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        seqused_kv: int32[rows], tokens, key extent of each row: 0, or at least the row's query length.
        attn_sink: float[num_heads], logit of the sink; -inf for none.
        window_size: int, tokens, keys visible including the query itself, >= 1.
        softmax_scale: number, > 0.

    Returns:
        AttentionOutput: 0 and -inf for queries beyond ``cu_seqlens_q[-1]`` and where the extent is 0.

    Raises:
        ContractError: a shape, dtype or value does not hold, or a table does not reach a visible key.

    Source: DeepSeek-V4 inference model; operator npu_sparse_attn_sharedkv, SWA template.

    >>> cache, table = np.array([[[1.0], [3.0]]]), np.array([[0]], np.int32)
    >>> loc, used, sink = np.array([0, 1], np.int32), np.array([2], np.int32), np.array([0.0])
    >>> q = np.zeros((1, 1, 1))
    >>> window_attention(q, cache, table, loc, used, sink, window_size=2, softmax_scale=1.0).out.round(4).tolist()
    [[[1.3333]]]
    """
    positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale)
    check_table("swa_block_table", swa_block_table, seqused_kv)
    return dense_attention(
        q, positions, cu_seqlens_q, swa_cache, swa_block_table, None, None, attn_sink, 1, window_size, softmax_scale
    )


def all_entries_attention(
    q: Float,
    swa_cache: Float,
    swa_block_table: Int32,
    cmp_cache: Float,
    cmp_block_table: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    attn_sink: Float,
    *,
    compress_ratio: int,
    window_size: int,
    softmax_scale: float,
) -> AttentionOutput:
    """Attention over the window and every visible entry: layers of ratio 128.

    Args:
        q: float32 or float64 [num_queries, num_heads, head_dim].
        swa_cache: dtype of ``q`` [num_blocks, block_size, head_dim], one row a raw token.
        swa_block_table: int32[rows, max_blocks], by raw position, one row an operator row.
        cmp_cache: dtype of ``q`` [num_cmp_blocks, cmp_block_size, head_dim], one row an entry.
        cmp_block_table: int32[rows, max_cmp_blocks], by entry, one row an operator row.
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        seqused_kv: int32[rows], raw tokens, key extent of each row: 0, or at least the row's query length.
        attn_sink: float[num_heads], logit of the sink; -inf for none.
        compress_ratio: int, tokens per entry, >= 1.
        window_size: int, tokens, keys visible including the query itself, >= 1.
        softmax_scale: number, > 0.

    Returns:
        AttentionOutput: 0 and -inf for queries beyond ``cu_seqlens_q[-1]`` and where the extent is 0.

    Raises:
        ContractError: a shape, dtype or value does not hold, or a table does not reach a visible row.

    Source: DeepSeek-V4 inference model; operator npu_sparse_attn_sharedkv, CFA template.

    >>> swa, cmp = np.array([[[1.0], [3.0]]]), np.array([[[5.0]]])
    >>> table, loc, used = np.array([[0]], np.int32), np.array([0, 1], np.int32), np.array([2], np.int32)
    >>> all_entries_attention(
    ...     np.zeros((1, 1, 1)), swa, table, cmp, table, loc, used, np.array([-np.inf]),
    ...     compress_ratio=2, window_size=2, softmax_scale=1.0).out.tolist()
    [[[3.0]]]
    """
    positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale)
    check_cache("cmp_cache", cmp_cache, q)
    check_table("swa_block_table", swa_block_table, seqused_kv)
    check_table("cmp_block_table", cmp_block_table, seqused_kv)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1)
    return dense_attention(
        q,
        positions,
        cu_seqlens_q,
        swa_cache,
        swa_block_table,
        cmp_cache,
        cmp_block_table,
        attn_sink,
        compress_ratio,
        window_size,
        softmax_scale,
    )


def selected_attention(
    q: Float,
    swa_cache: Float,
    swa_block_table: Int32,
    cmp_cache: Float,
    cmp_block_table: Int32,
    topk_indices: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    attn_sink: Float,
    *,
    compress_ratio: int,
    window_size: int,
    softmax_scale: float,
) -> AttentionOutput:
    """Attention over the window and the entries that the indexer chose: layers of ratio 4.

    Args:
        q: float32 or float64 [num_queries, num_heads, head_dim].
        swa_cache: dtype of ``q`` [num_blocks, block_size, head_dim], one row a raw token.
        swa_block_table: int32[rows, max_blocks], by raw position, one row an operator row.
        cmp_cache: dtype of ``q`` [num_cmp_blocks, cmp_block_size, head_dim], one row an entry.
        cmp_block_table: int32[rows, max_cmp_blocks], by entry, one row an operator row.
        topk_indices: int32[num_queries, index_topk], entries within the request, distinct, visible to the query; -1
            is no entry, wherever it stands. Order is free.
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        seqused_kv: int32[rows], raw tokens, key extent of each row: 0, or at least the row's query length.
        attn_sink: float[num_heads], logit of the sink; -inf for none.
        compress_ratio: int, tokens per entry, >= 1.
        window_size: int, tokens, keys visible including the query itself, >= 1.
        softmax_scale: number, > 0.

    Returns:
        AttentionOutput: 0 and -inf for queries beyond ``cu_seqlens_q[-1]`` and where the extent is 0.

    Raises:
        ContractError: a shape, dtype or value does not hold: an entry twice, or one that its query may not see.

    Source: DeepSeek-V4 inference model; operator npu_sparse_attn_sharedkv, SCFA template. The operator does not take
        -1 before the last valid entry.

    >>> swa, cmp = np.array([[[1.0], [3.0]]]), np.array([[[5.0]]])
    >>> table, loc, used = np.array([[0]], np.int32), np.array([0, 1], np.int32), np.array([2], np.int32)
    >>> selected_attention(
    ...     np.zeros((1, 1, 1)), swa, table, cmp, table, np.array([[-1, 0]], np.int32), loc, used, np.array([-np.inf]),
    ...     compress_ratio=2, window_size=1, softmax_scale=1.0).out.tolist()
    [[[4.0]]]
    """
    positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale)
    check_cache("cmp_cache", cmp_cache, q)
    check_table("swa_block_table", swa_block_table, seqused_kv)
    check_table("cmp_block_table", cmp_block_table, seqused_kv)
    check_topk(topk_indices, visible_entries(positions, compress_ratio))
    rows = query_rows(cu_seqlens_q, num_rows=len(q))
    window = window_indices(positions, window_size)
    swa_slots = slot_mapping(window, rows, swa_block_table, swa_cache.shape[1])
    cmp_slots = slot_mapping(topk_indices, rows, cmp_block_table, cmp_cache.shape[1])
    sources = [flat_cache(swa_cache), flat_cache(cmp_cache)]
    check_slots(swa_slots, len(sources[0]))
    check_slots(cmp_slots, len(sources[1]))
    return gathered_from(sources, [swa_slots, cmp_slots], q, attn_sink, softmax_scale)


def checked_call(
    q: Float, swa_cache: Float, cu_seqlens_q: Int32, seqused_kv: Int32, attn_sink: Float, softmax_scale: float
) -> Int32:
    """The position of every query, once what all three forms share is found legal."""
    _, num_heads, _ = checked_queries(q, softmax_scale)
    check_cache("swa_cache", swa_cache, q)
    check_array("attn_sink", attn_sink, FLOATS, (num_heads,), "one sink a query head; slice it with the heads")
    return query_positions(cu_seqlens_q, seqused_kv, num_rows=len(q))


def check_cache(name: str, cache: Float, q: Float) -> None:
    """Refuse a cache of other rows than the queries can meet."""
    check_array(name, cache, (str(q.dtype),), ("num_blocks", "block_size", q.shape[2]), "rows as wide as the queries")


def check_table(name: str, block_table: Int32, seqused_kv: Int32) -> None:
    """Refuse a table that belongs to other rows: the batch's own table, where a rank's operator rows are meant."""
    check_array(name, block_table, ("int32",), (len(seqused_kv), "max_blocks"), "one row an operator row")


class Picks(NamedTuple):
    """What a selection is of, for error texts."""

    one: str
    many: str
    hint: str


ENTRIES = Picks("entry", "entries", "entries count within the request, and only complete ones are visible")
TOKENS = Picks("token", "tokens", "tokens count within the request, and none after the query is visible")


def check_topk(topk_indices: Int32, num_visible: Int32, picks: Picks = ENTRIES) -> None:
    """Refuse a pick that its query may not see, or that would count twice."""
    check_array("topk_indices", topk_indices, ("int32",), (len(num_visible), "index_topk"), "one list a query")
    wrong = (topk_indices < -1) | (topk_indices >= num_visible[:, None])
    if wrong.any():
        query = int(wrong.any(axis=1).argmax())
        raise contract_error(
            "topk_indices",
            f"be -1 or below the {int(num_visible[query])} {picks.many} that query {query} sees",
            int(topk_indices[query][wrong[query]][0]),
            picks.hint,
        )
    ordered = np.sort(topk_indices, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        query = int(twice.any(axis=1).argmax())
        raise contract_error(
            "topk_indices",
            "be distinct in a row",
            f"{picks.one} {int(ordered[query, 1:][twice[query]][0])} twice",
            f"query {query}",
        )


def window_indices(positions: Int32, window_size: int) -> Int32:
    """The window of each query as a list of raw positions, -1 where it is shorter than the widest."""
    starts = window_starts(positions, window_size)
    widest = int((positions - starts).max(initial=-1)) + 1
    window = starts[:, None] + np.arange(widest, dtype=np.int32)
    return np.where(window <= positions[:, None], window, np.int32(-1))


def dense_attention(
    q: Float,
    positions: Int32,
    cu_seqlens_q: Int32,
    swa_cache: Float,
    swa_block_table: Int32,
    cmp_cache: Float | None,
    cmp_block_table: Int32 | None,
    attn_sink: Float,
    compress_ratio: int,
    window_size: int,
    softmax_scale: float,
) -> AttentionOutput:
    """Window and all visible entries by blocks of consecutive queries."""
    out = np.empty(q.shape, q.dtype)
    lse = np.full(q.shape[:2], -np.inf, q.dtype)
    out[positions < 0] = 0  # queries of no row, or of one without keys; blocks write all others
    starts = window_starts(positions, window_size)
    num_visible = visible_entries(positions, compress_ratio) if cmp_cache is not None else np.zeros_like(positions)
    for row in np.flatnonzero(cu_seqlens_q[1:] > cu_seqlens_q[:-1]):
        start, stop = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
        if positions[start] < 0:
            continue
        for first in range(start, stop, QUERY_BLOCK):
            block = slice(first, min(first + QUERY_BLOCK, stop))
            last = block.stop - 1
            window = np.arange(starts[first], positions[last] + 1, dtype=np.int32)
            keys = logical_rows(swa_cache, swa_block_table, int(row), window)
            hidden = (window < starts[block, None]) | (window > positions[block, None])
            partials = []
            for lowest in range(0, max(1, int(num_visible[last])), KEY_BLOCK):
                if cmp_cache is not None and cmp_block_table is not None:
                    entries = np.arange(lowest, min(lowest + KEY_BLOCK, int(num_visible[last])), dtype=np.int32)
                    entry_rows = logical_rows(cmp_cache, cmp_block_table, int(row), entries)
                    hidden_entries = entries >= num_visible[block, None]
                    # The window joins the first entries: most layers then need one product and no merge.
                    keys = entry_rows if lowest else np.concatenate([keys, entry_rows])
                    hidden = hidden_entries if lowest else np.concatenate([hidden, hidden_entries], axis=1)
                if num_visible[last] <= KEY_BLOCK:
                    lse[block] = block_attention(q[block], keys, hidden, attn_sink, softmax_scale, out[block])
                else:
                    part = np.empty_like(out[block])
                    partials.append((part, block_attention(q[block], keys, hidden, None, softmax_scale, part)))
            if partials:
                merged, lse[block] = merge_partials(*map(np.stack, zip(*partials, strict=True)))
                out[block] = apply_sink(merged, lse[block], attn_sink)
    return AttentionOutput(out, lse)


def logical_rows(cache: Float, block_table: Int32, row: int, logical: Int32) -> Float:
    """Rows of one request, read through the operator row's block table."""
    return gathered_rows(
        cache, slot_mapping(logical, np.full(len(logical), row, np.int32), block_table, cache.shape[1])
    )


def block_attention(
    q: Float, keys: Float, hidden: NDArray[np.bool_], attn_sink: Float | None, softmax_scale: float, out: Float
) -> Float:
    """Attention of a block of queries over keys they have in common, some hidden from some: into ``out``; the lse."""
    bad = np.logical_not(np.isfinite(keys).all(axis=1))
    if hidden.any() and bad.any():
        # A hidden NaN would reach every query of the block as 0 * NaN. Without it the others keep their bits, and those
        # that do see it are computed by themselves.
        lse = softmax_rows(q, np.where(bad[:, None], q.dtype.type(0), keys), hidden, attn_sink, softmax_scale, out)
        seeing = (bad & ~hidden).any(axis=1)
        picked = np.where(hidden, np.int32(-1), np.arange(len(keys), dtype=np.int32))[seeing]
        out[seeing], lse[seeing] = gathered_from([keys], [picked], q[seeing], attn_sink, softmax_scale)
        return lse
    return softmax_rows(q, keys, hidden, attn_sink, softmax_scale, out)


def merge_partials(outs: Float, lses: Float) -> AttentionOutput:
    """Attention over the union of disjoint key sets, from the results over each of them without a sink.

    ::

        weight of a part = exp(lse_part - max lse);  a part without keys has weight 0 and is not looked at

    Args:
        outs: float32 or float64 [num_parts, num_queries, num_heads, head_dim].
        lses: dtype of ``outs`` [num_parts, num_queries, num_heads], -inf where the part has no key.

    Returns:
        AttentionOutput: 0 and -inf where no part has a key.

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: FlashAttention's combine; the cases of ROCm/ATOM#1832 (empty owner) and vllm#43809 (sink once).

    >>> outs, lses = np.array([[[[1.0]]], [[[np.nan]]]]), np.array([[[0.0]], [[-np.inf]]])
    >>> merge_partials(outs, lses).out.tolist()
    [[[1.0]]]
    """
    check_array("outs", outs, FLOATS, ("num_parts", "num_queries", "num_heads", "head_dim"))
    check_array("lses", lses, (str(outs.dtype),), outs.shape[:3], "one number a part, query and head")
    check_int("num_parts", len(outs), 1)
    highest = lses.max(axis=0)
    weights = np.exp(lses - np.where(highest == -np.inf, outs.dtype.type(0), highest))
    total = weights.sum(axis=0)
    shares = weights / np.where(total > 0, total, outs.dtype.type(1))
    out = np.zeros(outs.shape[1:], outs.dtype)
    for share, part in zip(shares, outs, strict=True):
        out += np.where(share[..., None] == 0, outs.dtype.type(0), share[..., None] * part)
    with np.errstate(divide="ignore"):
        return AttentionOutput(out, highest + np.log(total))


def apply_sink(out: Float, lse: Float, attn_sink: Float) -> Float:
    """The output with the sink in its denominator: once, after all parts are merged.

    Args:
        out: float32 or float64 [num_queries, num_heads, head_dim], without a sink.
        lse: dtype of ``out`` [num_queries, num_heads], natural, without the sink.
        attn_sink: float[num_heads], logit of the sink; -inf for none.

    Returns:
        dtype of ``out``, same shape: ``out / (1 + exp(sink - lse))``, 0 where nothing is visible.

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: DeepSeek-V4 inference model; the sink's logit is compared after scaling.

    >>> out = apply_sink(np.array([[[2.0]]]), np.log(np.array([[2.0]])), np.array([0.0]))
    >>> out.round(4).tolist()
    [[[1.3333]]]
    """
    check_array("out", out, FLOATS, ("num_queries", "num_heads", "head_dim"))
    check_array("lse", lse, (str(out.dtype),), out.shape[:2], "one number a query and head")
    check_array("attn_sink", attn_sink, FLOATS, (out.shape[1],), "one sink a query head; slice it with the heads")
    # What lies where no key is visible is not looked at: it may be NaN.
    return np.where((lse == -np.inf)[..., None], out.dtype.type(0), out * share_beside_sink(lse, attn_sink)[..., None])


def share_beside_sink(lse: Float, attn_sink: Float) -> Float:
    """What the sink leaves of the output: ``1 / (1 + exp(sink - lse))``."""
    sink = attn_sink.astype(lse.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        share = 1 / (1 + np.exp(sink - lse))
    # -inf - -inf is nothing to compute with: no key, no output; else no sink, nothing taken.
    return np.where(lse == -np.inf, lse.dtype.type(0), np.where(sink == -np.inf, lse.dtype.type(1), share))
