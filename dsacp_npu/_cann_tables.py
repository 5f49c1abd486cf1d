"""Checks of block tables before an operator reads through them, where tables and lengths can be read.

An operator takes a wrong table for a right one: it reads another request's rows, or faults.
"""

from __future__ import annotations

from dsacp_npu._tensors import Float, Int32, values_known
from dsacp_npu.extents import query_rows
from dsacp_npu.paging import check_slots, slot_mapping
from dsacp_npu.partition import counted
from dsacp_npu.visibility import window_starts

__all__ = ["check_chosen", "check_entries", "check_window"]


def check_window(
    positions: Int32, swa_cache: Float, swa_block_table: Int32, cu_seqlens_q: Int32, window_size: int
) -> None:
    """Refuse a table that does not reach a key of a window: the operator would read what lies elsewhere."""
    starts = window_starts(positions, window_size)
    if not values_known(positions, swa_block_table) or len(positions) == 0:
        return
    widest = max(int((positions - starts).max()) + 1, 0)
    window = starts[:, None] + counted(widest, positions)
    window = window.masked_fill(window > positions[:, None], -1)
    rows = query_rows(cu_seqlens_q, num_rows=len(positions))
    slots = slot_mapping(window, rows, swa_block_table, swa_cache.shape[1])
    check_slots(slots, swa_cache.shape[0] * swa_cache.shape[1])


def check_entries(
    seqused_kv: Int32, cu_seqlens_q: Int32, cmp_cache: Float, cmp_block_table: Int32, compress_ratio: int
) -> None:
    """Refuse a table that does not reach an entry that some query sees."""
    if not values_known(seqused_kv, cu_seqlens_q, cmp_block_table) or len(seqused_kv) == 0:
        return
    read = (seqused_kv // compress_ratio).masked_fill(cu_seqlens_q[1:] == cu_seqlens_q[:-1], 0)
    entries = counted(int(read.max()), read).expand(len(read), -1)
    entries = entries.masked_fill(entries >= read[:, None], -1)
    slots = slot_mapping(entries, counted(len(read), read), cmp_block_table, cmp_cache.shape[1])
    check_slots(slots, cmp_cache.shape[0] * cmp_cache.shape[1])


def check_chosen(topk_indices: Int32, cu_seqlens_q: Int32, cmp_cache: Float, cmp_block_table: Int32) -> None:
    """Refuse a table that does not reach a chosen entry."""
    if values_known(topk_indices, cu_seqlens_q, cmp_block_table):
        rows = query_rows(cu_seqlens_q, num_rows=len(topk_indices))
        slots = slot_mapping(topk_indices, rows, cmp_block_table, cmp_cache.shape[1])
        check_slots(slots, cmp_cache.shape[0] * cmp_cache.shape[1])
