"""The lists of slots that the attention kernel reads: of windows, of chosen entries, of all entries of a row.

A list of windows serves every layer whose raw keys lie alike, and so does one of all entries: a step makes them once
and hands them to its layers.
"""

from __future__ import annotations

from typing import NamedTuple

from dsacp_npu._tensors import Float, Int32, torch
from dsacp_npu._triton_launch import check_runs, family_of, programs_for
from dsacp_npu._triton_metadata import query_rows_and_positions
from dsacp_npu.attention import check_table
from dsacp_npu.kernels.attention_slots import chosen_slots_kernel, entry_slots_kernel, window_slots_kernel
from dsacp_npu.kernels.attention_tiles import ENTRIES_A_TASK, LARGEST_LIST, LARGEST_TABLE, LIST_MULTIPLE
from dsacp_npu.visibility import visible_entries
from dsacp_ref.spec import INT32_MAX, UnsupportedError, check_int

__all__ = [
    "EntrySlots",
    "KeySlots",
    "Pages",
    "attention_lists",
    "chosen_slots",
    "entry_slots",
    "pages_of",
    "window_slots",
]


class Pages(NamedTuple):
    """How the rows of a cache lie.

    Fields:
        size: int, rows a page.
        pitch: int, rows from one page to the next, what lies between them included.
    """

    size: int
    pitch: int


class KeySlots(NamedTuple):
    """Where every query of a step stands, and the slots of its window.

    Fields:
        rows: int32[num_queries], operator row of each query, -1 for none.
        positions: int32[num_queries], -1 without keys.
        window: int32[num_queries, width], slots of the window, first position first, and ``~slot`` of the query's own
            behind it; anything where the position is -1.
        window_size: int, tokens.
        pages: Pages, of the cache whose rows the slots count.
    """

    rows: Int32
    positions: Int32
    window: Int32
    window_size: int
    pages: Pages


class EntrySlots(NamedTuple):
    """Slots of entries.

    Fields:
        kind: str, "selected": a list a query, ``~slot`` where it chose nothing; "all": a list an operator row.
        slots: int32[num_queries or rows, width].
        counts: int32[num_queries], how much of its list each query reads.
        pages: Pages, of the cache whose rows the slots count.
    """

    kind: str
    slots: Int32
    counts: Int32
    pages: Pages


def attention_lists(
    swa_block_table: Int32,
    cmp_block_table: Int32 | None,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    *,
    num_queries: int,
    block_sizes: tuple[int, int],
    window_size: int,
    compress_ratio: int,
) -> dict[str, KeySlots | EntrySlots]:
    """The lists that all layers of a ratio share in a step, by the argument of attention that takes them.

    Args:
        swa_block_table: int32[rows, max_blocks], by raw position, one row an operator row.
        cmp_block_table: int32[rows, max_cmp_blocks], by entry, in layers that attend to all entries; None in others.
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        seqused_kv: int32[rows], tokens, key extent of each row: 0, or at least the row's query length.
        num_queries: int, queries of the step, those beyond ``cu_seqlens_q[-1]`` included.
        block_sizes: (int, int), rows of a page of raw keys, and of entries. Pages lie side by side: attention makes
            the lists of other caches itself.
        window_size: int, tokens, >= 1.
        compress_ratio: int, tokens per entry, >= 1.

    Returns:
        dict: ``slots``, KeySlots; ``entries``, EntrySlots, where there is a ``cmp_block_table``.

    Raises:
        ContractError: a shape or dtype does not hold. Table values are checked by the attention that reads the lists.
        UnsupportedError: no kernel runs there.
    """
    rows, positions = query_rows_and_positions(cu_seqlens_q, seqused_kv, num_rows=num_queries)
    check_table("swa_block_table", swa_block_table, seqused_kv)
    window_size = check_int("window_size", window_size, 1, INT32_MAX)
    check_runs(swa_block_table)
    pages, cmp_pages = (Pages(size, size) for size in block_sizes)
    lists: dict[str, KeySlots | EntrySlots] = {
        "slots": window_slots(rows, positions, swa_block_table, window_size, pages)
    }
    if cmp_block_table is not None:
        check_table("cmp_block_table", cmp_block_table, seqused_kv)
        lists["entries"] = entry_slots(positions, seqused_kv, cmp_block_table, compress_ratio, cmp_pages)
    return lists


def window_slots(rows: Int32, positions: Int32, block_table: Int32, window_size: int, pages: Pages) -> KeySlots:
    """The slots of every window, from arguments that are known to be right."""
    widest = max(1, min(window_size, block_table.shape[1] * pages.size))  # no position is beyond the table
    window = positions.new_empty(len(positions), list_width("a window", widest))
    if window.numel():
        window_slots_kernel[(vector_programs(positions, len(positions)),)](
            block_table.contiguous(),
            rows,
            positions,
            window,
            len(positions),
            block_table.shape[1],
            WINDOW=widest,
            WIDTH=window.shape[1],
            PAGE=pages.size,
            PITCH=pages.pitch,
        )
    return KeySlots(rows, positions, window, window_size, pages)


def chosen_slots(rows: Int32, positions: Int32, chosen: Int32, block_table: Int32, pages: Pages) -> EntrySlots:
    """The slots of what every query chose, from arguments that are known to be right."""
    if pages.size & (pages.size - 1):
        raise UnsupportedError(
            f"backend 'triton' looks chosen entries up in pages of a power of two, not of {pages.size} entries; "
            "use backend 'torch'"
        )
    num_queries, index_topk = chosen.shape
    counts = positions.new_empty(num_queries)
    slots = positions.new_empty(num_queries, list_width("a selection", index_topk))
    if index_topk == 0:
        counts.zero_()
    elif num_queries:
        chosen = chosen.contiguous()
        chosen_slots_kernel[(vector_programs(positions, num_queries),)](
            block_table.contiguous(),
            rows,
            positions,
            chosen,
            slots,
            counts,
            num_queries,
            block_table.shape[1],
            CHOSEN=index_topk,
            WIDTH=slots.shape[1],
            SHIFT=pages.size.bit_length() - 1,
            PITCH=pages.pitch,
            BLOCKS=table_on_chip(block_table),
        )
    return EntrySlots("selected", slots, counts, pages)


def table_on_chip(block_table: Int32) -> int:
    """How long a table row is read as a whole, 0 where elements are loaded one by one: on a GPU, or if it is longer."""
    if family_of(block_table) == "cuda":
        return 0
    width = 1 << max(4, (block_table.shape[1] - 1).bit_length())
    return width if width <= LARGEST_TABLE else 0


def entry_slots(
    positions: Int32, seqused_kv: Int32, cmp_block_table: Int32, compress_ratio: int, pages: Pages
) -> EntrySlots:
    """The slots of all entries of every operator row, and how many each query sees.

    Args:
        positions: int32[num_queries], as in `KeySlots`.
        seqused_kv: int32[rows], raw tokens, key extent of each row.
        cmp_block_table: int32[rows, max_cmp_blocks], by entry, one row an operator row.
        compress_ratio: int, tokens per entry, >= 1.
        pages: Pages of the layers' caches: `pages_of`.
    """
    num_rows, max_blocks = cmp_block_table.shape
    lanes = 1 << (pages.size - 1).bit_length()
    at_once = max(1, ENTRIES_A_TASK // lanes)
    parts = -(-max_blocks // at_once)
    width = -(-max_blocks * pages.size // LIST_MULTIPLE) * LIST_MULTIPLE
    slots = positions.new_empty(num_rows, width)
    if slots.numel():
        entry_slots_kernel[(vector_programs(positions, num_rows * parts),)](
            cmp_block_table.contiguous(),
            seqused_kv,
            slots,
            num_rows,
            parts,
            max_blocks,
            width,
            compress_ratio,
            PAGES=at_once,
            PAGE=pages.size,
            PITCH=pages.pitch,
            LANES=lanes,
        )
    return EntrySlots("all", slots, visible_entries(positions, compress_ratio), pages)


def pages_of(name: str, cache: Float) -> Pages:
    """How the rows of a cache lie; refused unless they lie whole, and pages a whole number of rows apart."""
    num_blocks, size, head_dim = cache.shape
    page, row, channel = cache.stride()
    one_row = head_dim if size <= 1 else row
    one_page = page if num_blocks > 1 else size * head_dim
    if cache.numel() and ((head_dim > 1 and channel != 1) or one_row != head_dim or one_page % head_dim):
        raise UnsupportedError(
            f"backend 'triton' reads rows of {head_dim} numbers side by side, {name} has strides {cache.stride()}; "
            "make it contiguous, or use backend 'torch'"
        )
    return Pages(size, one_page // head_dim if cache.numel() else size)


def list_width(what: str, count: int) -> int:
    """How wide a list is stored: whole tiles of keys."""
    width = max(LIST_MULTIPLE, 1 << (count - 1).bit_length() if count else 0)
    if width > LARGEST_LIST:
        raise UnsupportedError(
            f"backend 'triton' lists at most {LARGEST_LIST} keys of {what}, not {count}; use 'torch'"
        )
    return width


def vector_programs(tensor: torch.Tensor, num_tasks: int) -> int:
    """Programs of a kernel without matrix products: many a multiprocessor, and no more than there are tasks."""
    return min(num_tasks, programs_for(tensor, cube=False, waves=16))
