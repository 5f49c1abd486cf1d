"""Attention by `npu_sparse_attn_sharedkv`: window, all entries, selected entries; paged keys and packed ones."""

from __future__ import annotations

from dsacp_npu._cann_tables import check_chosen, check_entries, check_window
from dsacp_npu._operators import check_dtype, check_limit, check_multiple, in_float32, operator
from dsacp_npu._tensors import Float, Int32, check_tensor, dtype_name, first_true, torch, values_known
from dsacp_npu.attention import AttentionOutput, check_cache, check_table, check_topk, checked_call, checked_queries
from dsacp_npu.extents import check_extents, check_offsets, checked_offsets, query_positions
from dsacp_npu.partition import counted
from dsacp_npu.visibility import visible_entries
from dsacp_ref.spec import INT32_MAX, UnsupportedError, check_int, contract_error

__all__ = [
    "all_entries_attention",
    "attention_metadata",
    "packed_attention",
    "selected_attention",
    "window_attention",
]

OPERATOR, METADATA = "npu_sparse_attn_sharedkv", "npu_sparse_attn_sharedkv_metadata"
HEAD_DIM = 512
RATIOS = (4, 128)
TOPKS = (512, 1024)
WINDOW_MASK, ENTRY_MASK = 4, 3  # a band; right-down causal on entries


def attention_metadata(
    cu_seqlens_q: Int32,
    seqused_kv: Int32 | None,
    *,
    num_heads: int,
    compress_ratio: int,
    window_size: int,
    index_topk: int = 0,
    kv_start_loc: Int32 | None = None,
) -> Int32:
    """How the operator shares a step's rows among its cores: one tensor for all layers of a ratio.

    Args:
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        seqused_kv: int32[rows], tokens, key extent of each row; None with packed keys.
        num_heads: int, query heads of this rank.
        compress_ratio: int, 1 for the window alone, else 4 or 128.
        window_size: int, tokens, keys visible including the query itself.
        index_topk: int, width of the selection; 0 where there is none.
        kv_start_loc: int32[rows + 1], tokens, offsets of packed keys; None with paged keys.

    Returns:
        int32[1024]: for calls with these very lengths; with others rows would stay uncomputed without a word.

    Raises:
        ContractError: a shape or dtype does not hold.
        UnsupportedError: a size that the operator does not take, or no such operator.

    Source: operator npu_sparse_attn_sharedkv_metadata.
    """
    check_offsets("cu_seqlens_q", cu_seqlens_q)
    if kv_start_loc is None:
        check_extents(cu_seqlens_q, seqused_kv)  # type: ignore[arg-type]  # None is refused there
    else:
        check_tensor("kv_start_loc", kv_start_loc, ("int32",), tuple(cu_seqlens_q.shape), "one offset an operator row")
    check_multiple("attention_metadata", "num_heads", num_heads, 4, 4, 128)
    check_limit("attention_metadata", "compress_ratio", compress_ratio, (1, *RATIOS))
    check_limit("attention_metadata", "index_topk", index_topk, (0, *TOPKS))
    window_size = check_int("window_size", window_size, 1, INT32_MAX)
    entry_start_loc = None
    if kv_start_loc is not None and compress_ratio > 1:
        entry_start_loc = entry_offsets(kv_start_loc, compress_ratio)
    return metadata_of(
        cu_seqlens_q, seqused_kv, kv_start_loc, entry_start_loc, num_heads, compress_ratio, window_size, index_topk
    )


def metadata_of(
    cu_seqlens_q: Int32,
    seqused_kv: Int32 | None,
    kv_start_loc: Int32 | None,
    entry_start_loc: Int32 | None,
    num_heads: int,
    compress_ratio: int,
    window_size: int,
    index_topk: int,
) -> Int32:
    """The operator's call, checked before."""
    metadata: Int32 = operator(METADATA)(
        num_heads_q=num_heads,
        num_heads_kv=1,
        head_dim=HEAD_DIM,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_ori_kv=kv_start_loc,
        cu_seqlens_cmp_kv=entry_start_loc,
        seqused_q=None,
        seqused_kv=seqused_kv,
        batch_size=len(cu_seqlens_q) - 1,
        max_seqlen_q=0,  # both are read only where no lengths are given
        max_seqlen_kv=0,
        ori_topk=0,
        cmp_topk=index_topk,
        cmp_ratio=compress_ratio,
        ori_mask_mode=WINDOW_MASK,
        cmp_mask_mode=ENTRY_MASK,
        ori_win_left=window_size - 1,
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_ND" if kv_start_loc is None else "TND",
        has_ori_kv=True,
        has_cmp_kv=compress_ratio > 1,
        device=str(cu_seqlens_q.device),
    )
    return metadata


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
    metadata: Int32 | None = None,
) -> AttentionOutput:
    """`dsacp_ref.attention.window_attention` by the operator; its lse is None: the operator does not give it.

    ``metadata`` is an `attention_metadata` of this step at ratio 1, made here when it is not given.
    """
    positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale)
    check_table("swa_block_table", swa_block_table, seqused_kv)
    check_sizes("window_attention", q, swa_cache=swa_cache)
    check_window(positions, swa_cache, swa_block_table, cu_seqlens_q, window_size)
    return over_pages(
        "window_attention",
        q,
        positions,
        (swa_cache, swa_block_table),
        None,
        None,
        (cu_seqlens_q, seqused_kv),
        attn_sink,
        1,
        window_size,
        softmax_scale,
        metadata,
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
    metadata: Int32 | None = None,
) -> AttentionOutput:
    """`dsacp_ref.attention.all_entries_attention` by the operator; its lse is None.

    ``metadata`` is an `attention_metadata` of this step at the ratio, without a selection.
    """
    positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale)
    check_cache("cmp_cache", cmp_cache, q)
    check_table("swa_block_table", swa_block_table, seqused_kv)
    check_table("cmp_block_table", cmp_block_table, seqused_kv)
    check_sizes("all_entries_attention", q, swa_cache=swa_cache, cmp_cache=cmp_cache)
    check_limit("all_entries_attention", "compress_ratio", compress_ratio, RATIOS)
    check_window(positions, swa_cache, swa_block_table, cu_seqlens_q, window_size)
    check_entries(seqused_kv, cu_seqlens_q, cmp_cache, cmp_block_table, compress_ratio)
    return over_pages(
        "all_entries_attention",
        q,
        positions,
        (swa_cache, swa_block_table),
        (cmp_cache, cmp_block_table),
        None,
        (cu_seqlens_q, seqused_kv),
        attn_sink,
        compress_ratio,
        window_size,
        softmax_scale,
        metadata,
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
    metadata: Int32 | None = None,
) -> AttentionOutput:
    """`dsacp_ref.attention.selected_attention` by the operator; its lse is None.

    Every row of ``topk_indices`` starts with as many entries as its query may have: the operator multiplies over that
    many columns and does not skip -1 among them. ``metadata`` is an `attention_metadata` of this step at the ratio and
    width.
    """
    positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale)
    check_cache("cmp_cache", cmp_cache, q)
    check_table("swa_block_table", swa_block_table, seqused_kv)
    check_table("cmp_block_table", cmp_block_table, seqused_kv)
    num_visible = visible_entries(positions, compress_ratio)
    check_topk(topk_indices, num_visible)
    check_sizes("selected_attention", q, swa_cache=swa_cache, cmp_cache=cmp_cache)
    check_limit("selected_attention", "compress_ratio", compress_ratio, RATIOS)
    check_limit("selected_attention", "index_topk", topk_indices.shape[1], TOPKS)
    check_prefix(topk_indices, num_visible)
    check_window(positions, swa_cache, swa_block_table, cu_seqlens_q, window_size)
    check_chosen(topk_indices, cu_seqlens_q, cmp_cache, cmp_block_table)
    return over_pages(
        "selected_attention",
        q,
        positions,
        (swa_cache, swa_block_table),
        (cmp_cache, cmp_block_table),
        topk_indices,
        (cu_seqlens_q, seqused_kv),
        attn_sink,
        compress_ratio,
        window_size,
        softmax_scale,
        metadata,
    )


def packed_attention(
    q: Float,
    keys: Float,
    attn_sink: Float,
    cu_seqlens_q: Int32,
    kv_start_loc: Int32,
    *,
    window_size: int,
    softmax_scale: float,
    entries: Float | None = None,
    topk_indices: Int32 | None = None,
    compress_ratio: int = 1,
    metadata: Int32 | None = None,
) -> AttentionOutput:
    """Attention over keys that lie packed, one row's after the other's, without pages.

    Args:
        q: bfloat16 or float16 [num_queries, num_heads, 512].
        keys: dtype of ``q`` [num_keys, 512], raw rows; each operator row's from its position 0 on.
        attn_sink: float32[num_heads].
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        kv_start_loc: int32[rows + 1], tokens, offsets of the rows' keys: ``local_kv_start_loc`` of
            `build_cp_local_metadata`.
        window_size: int, tokens, keys visible including the query itself, >= 1.
        softmax_scale: number, > 0.
        entries: dtype of ``q`` [num_entries, 512], ``extent // compress_ratio`` a row, packed likewise; None for none.
        topk_indices: int32[num_queries, index_topk] as in `selected_attention`; None attends to all visible entries.
        compress_ratio: int, 1 without entries, else 4 or 128.
        metadata: an `attention_metadata` of this step with ``kv_start_loc``; made here when it is not given.

    Returns:
        AttentionOutput: 0 for queries beyond ``cu_seqlens_q[-1]`` and of rows without keys; lse is None.

    Raises:
        ContractError: a shape, dtype or value does not hold, or there are fewer rows than the offsets name.
        UnsupportedError: a size that the operator does not take, or no such operator.

    Source: operator npu_sparse_attn_sharedkv with layout_kv TND, which its code takes and its page leaves out.
    """
    _, num_heads, head_dim = checked_queries(q, softmax_scale)
    check_tensor("keys", keys, (dtype_name(q),), ("num_keys", head_dim), "as wide as the queries")
    check_tensor("attn_sink", attn_sink, (dtype_name(attn_sink),), (num_heads,), "one sink a query head")
    check_offsets("cu_seqlens_q", cu_seqlens_q)
    check_offsets("kv_start_loc", kv_start_loc)
    check_tensor("kv_start_loc", kv_start_loc, ("int32",), tuple(cu_seqlens_q.shape), "one offset an operator row")
    extents = kv_start_loc[1:] - kv_start_loc[:-1]
    positions = query_positions(cu_seqlens_q, extents, num_rows=len(q))
    check_sizes("packed_attention", q)
    check_limit("packed_attention", "compress_ratio", compress_ratio, RATIOS if entries is not None else (1,))
    check_filled("kv_start_loc", kv_start_loc, keys)
    window_size = check_int("window_size", window_size, 1, INT32_MAX)
    entry_start_loc = None
    if entries is not None:
        check_tensor("entries", entries, (dtype_name(q),), ("num_entries", head_dim), "as wide as the queries")
        entry_start_loc = entry_offsets(kv_start_loc, compress_ratio)
        check_filled("the offsets of entries", entry_start_loc, entries)
    if topk_indices is not None:
        if entries is None:
            raise contract_error("topk_indices", "come with entries", "no entries", "they are numbers of entries")
        check_topk(topk_indices, visible_entries(positions, compress_ratio))
        check_limit("packed_attention", "index_topk", topk_indices.shape[1], TOPKS)
        check_prefix(topk_indices, visible_entries(positions, compress_ratio))
    if 0 in (len(q), len(extents), len(keys)):
        return AttentionOutput(torch.zeros_like(q), None)  # type: ignore[arg-type]
    if entries is not None and len(entries) == 0:
        entries = entry_start_loc = topk_indices = metadata = None
        compress_ratio = 1
    if metadata is None:
        width = 0 if topk_indices is None else topk_indices.shape[1]
        metadata = metadata_of(
            cu_seqlens_q, None, kv_start_loc, entry_start_loc, num_heads, compress_ratio, window_size, width
        )
    return attended(
        q,
        positions,
        (keys[:, None], None),
        (None, None) if entries is None else (entries[:, None], None),
        topk_indices,
        (cu_seqlens_q, None, kv_start_loc, entry_start_loc),
        in_float32("packed_attention", "attn_sink", attn_sink),
        compress_ratio,
        window_size,
        softmax_scale,
        metadata,
    )


def entry_offsets(kv_start_loc: Int32, compress_ratio: int) -> Int32:
    """Offsets of packed entries: a row of n keys has ``n // compress_ratio``."""
    return checked_offsets("entries", (kv_start_loc[1:] - kv_start_loc[:-1]) // compress_ratio)


def over_pages(
    function: str,
    q: Float,
    positions: Int32,
    swa: tuple[Float, Int32],
    cmp: tuple[Float, Int32] | None,
    topk_indices: Int32 | None,
    lengths: tuple[Int32, Int32],
    attn_sink: Float,
    compress_ratio: int,
    window_size: int,
    softmax_scale: float,
    metadata: Int32 | None,
) -> AttentionOutput:
    """The call over paged keys, once it is legal; what the operator refuses as empty is answered here."""
    sink = in_float32(function, "attn_sink", attn_sink)
    cu_seqlens_q, seqused_kv = lengths
    if len(q) == 0 or len(seqused_kv) == 0 or empty_pages(swa):
        return AttentionOutput(torch.zeros_like(q), None)  # type: ignore[arg-type]
    if cmp is not None and empty_pages(cmp):  # no entry is visible: the window alone, by the form without entries
        cmp = topk_indices = metadata = None
        compress_ratio = 1
    if metadata is None:
        width = 0 if topk_indices is None else topk_indices.shape[1]
        metadata = metadata_of(cu_seqlens_q, seqused_kv, None, None, q.shape[1], compress_ratio, window_size, width)
    return attended(
        q,
        positions,
        (swa[0].unsqueeze(2), swa[1]),
        (None, None) if cmp is None else (cmp[0].unsqueeze(2), cmp[1]),
        topk_indices,
        (cu_seqlens_q, seqused_kv, None, None),
        sink,
        compress_ratio,
        window_size,
        softmax_scale,
        metadata,
    )


def empty_pages(pages: tuple[Float, Int32]) -> bool:
    """Whether no row can lie in this cache, or be found through this table."""
    cache, block_table = pages
    return len(cache) == 0 or block_table.shape[1] == 0


def attended(
    q: Float,
    positions: Int32,
    ori: tuple[Float, Int32 | None],
    cmp: tuple[Float | None, Int32 | None],
    topk_indices: Int32 | None,
    lengths: tuple[Int32, Int32 | None, Int32 | None, Int32 | None],
    sink: Float,
    compress_ratio: int,
    window_size: int,
    softmax_scale: float,
    metadata: Int32,
) -> AttentionOutput:
    """The operator's call, and 0 where it leaves what memory held before."""
    cu_seqlens_q, seqused_kv, kv_start_loc, entry_start_loc = lengths
    out, _ = operator(OPERATOR)(
        q,
        ori_kv=ori[0],
        cmp_kv=cmp[0],
        ori_sparse_indices=None,
        cmp_sparse_indices=None if topk_indices is None else topk_indices.unsqueeze(1),
        ori_block_table=ori[1],
        cmp_block_table=cmp[1],
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_ori_kv=kv_start_loc,
        cu_seqlens_cmp_kv=entry_start_loc,
        seqused_q=None,
        seqused_kv=seqused_kv,
        sinks=sink,
        metadata=metadata,
        softmax_scale=softmax_scale,
        cmp_ratio=compress_ratio,
        ori_mask_mode=WINDOW_MASK,
        cmp_mask_mode=ENTRY_MASK,
        ori_win_left=window_size - 1,
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_ND" if kv_start_loc is None else "TND",
        return_softmax_lse=False,
    )
    return AttentionOutput(out.masked_fill((positions < 0)[:, None, None], 0), None)  # type: ignore[arg-type]


def check_sizes(function: str, q: Float, **caches: Float) -> None:
    """Refuse what the operator has no form for."""
    check_dtype(function, "q", q)
    check_limit(function, "head_dim", q.shape[2], (HEAD_DIM,))
    check_multiple(function, "num_heads", q.shape[1], 4, 4, 128)
    for name, cache in caches.items():
        check_multiple(function, f"block size of {name}", cache.shape[1], 16, 16, 1024)


def check_prefix(topk_indices: Int32, num_visible: Int32) -> None:
    """Refuse -1 before the last entry that the operator reads: legal in a selection, but no mask to the operator."""
    if not values_known(topk_indices, num_visible) or topk_indices.numel() == 0:
        return
    width = topk_indices.shape[1]
    gap = (topk_indices < 0) & (counted(width, topk_indices) < num_visible[:, None])
    if gap.any():
        query = first_true(gap.any(dim=1))
        raise UnsupportedError(
            f"selected_attention on cann: topk_indices must name {min(width, int(num_visible[query]))} entries before "
            f"its first -1 for query {query}, got -1 in column {first_true(gap[query])}; the operator does not mask "
            "it, so choose that many (the indexer does), or use the torch backend"
        )


def check_filled(name: str, start_loc: Int32, rows: Float) -> None:
    """Refuse offsets beyond the rows that are there."""
    if values_known(start_loc) and int(start_loc[-1]) > len(rows):
        raise contract_error(name, f"end at or before the {len(rows)} rows it indexes", int(start_loc[-1]))
