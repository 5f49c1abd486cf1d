"""Attention of backend `triton`: the mirror's three paged forms, over lists of slots and one kernel.

Where no bound of the logits is given, a running maximum keeps the softmax in range; with one it is left out, which is
sooner on a GPU and spares an NPU from moving its sums between matrix and vector unit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsacp_npu import attention as mirror
from dsacp_npu._tensors import Float, Int32, check_floats, check_tensor, dtype_name, torch, values_known
from dsacp_npu._triton_attention_slots import (
    EntrySlots,
    KeySlots,
    Pages,
    attention_lists,
    chosen_slots,
    entry_slots,
    pages_of,
    window_slots,
)
from dsacp_npu._triton_launch import check_runs, family_of, has_hopper, programs_for, tile_for
from dsacp_npu._triton_metadata import query_rows_and_positions
from dsacp_npu.attention import AttentionOutput, Side
from dsacp_npu.extents import check_extents, check_offsets
from dsacp_npu.kernels.attention import attention_kernel, switches
from dsacp_npu.kernels.attention_tiles import HEAD_DIMS, TILES, tile_key
from dsacp_npu.paging import check_slots, slot_mapping
from dsacp_npu.triton_ops import LOGIT_LIMIT
from dsacp_npu.visibility import visible_entries
from dsacp_ref.spec import INT32_MAX, UnsupportedError, check_int, check_number, contract_error

__all__ = [
    "EntrySlots",
    "KeySlots",
    "Pages",
    "all_entries_attention",
    "attention_lists",
    "entry_slots",
    "pages_of",
    "selected_attention",
    "window_attention",
]

LOG2_E = 1.4426950408889634
FEW_HEADS, HOPPER_DIM, HOPPER_TILE = 16, 512, 64


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
    logit_bound: float | None = None,
    slots: KeySlots | None = None,
) -> AttentionOutput:
    """`dsacp_npu.attention.window_attention` in one kernel, for bfloat16 and float16.

    Args:
        logit_bound: number that no ``|softmax_scale * q . row|`` exceeds; up to 70 the running maximum is left out. Of
            V4, queries have norm 22.6 and keys at most 22.6 times the largest norm weight ``w``: the bound is
            ``22.6 * w`` with ``head_dim ** -0.5``. Sinks are below 70 as well then. No value is looked at; beyond the
            bound, sums may overflow. None: any logits.
        slots: KeySlots that `attention_lists` made of this step's tables, of use if the cache's pages lie as it took
            them to lie; None: made here.

    Raises:
        UnsupportedError: a dtype, head_dim, device or strides without a kernel; a bound beyond 70, or one for float16.
    """
    rows, positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale, slots)
    mirror.check_table("swa_block_table", swa_block_table, seqused_kv)
    window_size = check_int("window_size", window_size, 1, INT32_MAX)
    if values_known(q, positions, cu_seqlens_q):
        window = mirror.window_side(positions, swa_cache, swa_block_table, window_size)
        check_ranges(q, positions, cu_seqlens_q, [window])
    check_kernel(q, logit_bound)
    windows = windows_of(slots, rows, positions, swa_cache, swa_block_table, window_size)
    return attended(q, swa_cache, windows, swa_cache, None, attn_sink, softmax_scale, logit_bound)


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
    logit_bound: float | None = None,
    slots: KeySlots | None = None,
    entries: EntrySlots | None = None,
) -> AttentionOutput:
    """`dsacp_npu.attention.all_entries_attention` in one kernel; bound and slots as in `window_attention`.

    Args:
        entries: EntrySlots that `attention_lists` made of this step's tables, as ``slots``; None: made here.
    """
    rows, positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale, slots)
    mirror.check_cache("cmp_cache", cmp_cache, q)
    mirror.check_table("swa_block_table", swa_block_table, seqused_kv)
    mirror.check_table("cmp_block_table", cmp_block_table, seqused_kv)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1)
    window_size = check_int("window_size", window_size, 1, INT32_MAX)
    if values_known(q, positions, cu_seqlens_q):
        window = mirror.window_side(positions, swa_cache, swa_block_table, window_size)
        num_visible = visible_entries(positions, compress_ratio)
        room = cmp_block_table.shape[1] * cmp_cache.shape[1]
        seen = Side(cmp_cache, cmp_block_table, torch.zeros_like(num_visible), num_visible, room)
        check_ranges(q, positions, cu_seqlens_q, [window, seen])
    check_kernel(q, logit_bound)
    pages = pages_of("cmp_cache", cmp_cache)
    if entries is not None:
        check_entries(entries, (len(seqused_kv), "width"), len(q))
    windows = windows_of(slots, rows, positions, swa_cache, swa_block_table, window_size)
    listed = entries
    if listed is None or listed.pages != pages:
        listed = entry_slots(positions, seqused_kv, cmp_block_table, compress_ratio, pages)
    return attended(q, swa_cache, windows, cmp_cache, listed, attn_sink, softmax_scale, logit_bound)


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
    logit_bound: float | None = None,
    slots: KeySlots | None = None,
) -> AttentionOutput:
    """`dsacp_npu.attention.selected_attention` in one kernel; bound and slots as in `window_attention`.

    Limits: pages of the compressed cache hold a power of two of entries.
    """
    rows, positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale, slots)
    mirror.check_cache("cmp_cache", cmp_cache, q)
    mirror.check_table("swa_block_table", swa_block_table, seqused_kv)
    mirror.check_table("cmp_block_table", cmp_block_table, seqused_kv)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1, INT32_MAX)
    check_tensor("topk_indices", topk_indices, ("int32",), (len(q), "index_topk"), "one list a query")
    window_size = check_int("window_size", window_size, 1, INT32_MAX)
    if values_known(q, rows, positions, topk_indices):
        mirror.check_topk(topk_indices, visible_entries(positions, compress_ratio))
        window = mirror.window_side(positions, swa_cache, swa_block_table, window_size)
        check_choices(q, rows, window, topk_indices, cmp_cache, cmp_block_table)
    check_kernel(q, logit_bound)
    pages = pages_of("cmp_cache", cmp_cache)
    windows = windows_of(slots, rows, positions, swa_cache, swa_block_table, window_size)
    entries = chosen_slots(rows, positions, topk_indices, cmp_block_table, pages)
    return attended(q, swa_cache, windows, cmp_cache, entries, attn_sink, softmax_scale, logit_bound)


def checked_call(
    q: Float,
    swa_cache: Float,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    attn_sink: Float,
    softmax_scale: float,
    slots: KeySlots | None,
) -> tuple[Int32, Int32]:
    """Row and position of every query, once what all three forms share is found legal. A step's slots have them."""
    _, num_heads, _ = mirror.checked_queries(q, softmax_scale)
    mirror.check_cache("swa_cache", swa_cache, q)
    check_floats("attn_sink", attn_sink, (num_heads,), "one sink a query head; slice it with the heads")
    if slots is None:
        return query_rows_and_positions(cu_seqlens_q, seqused_kv, num_rows=len(q))
    check_offsets("cu_seqlens_q", cu_seqlens_q)
    check_extents(cu_seqlens_q, seqused_kv)
    check_tensor("slots.positions", slots.positions, ("int32",), (len(q),), "slots of another step?")
    return slots.rows, slots.positions


def check_ranges(q: Float, positions: Int32, cu_seqlens_q: Int32, sides: list[Side]) -> None:
    """Refuse tables that do not name every visible row, as the mirror does, from values that are known."""
    for row, block in mirror.query_blocks(positions, cu_seqlens_q, q.shape[1]):
        for piece in [piece for side in sides for piece in mirror.range_pieces(side, row, block)]:
            check_slots(piece.slots, piece.cache.shape[0] * piece.cache.shape[1])


def check_choices(
    q: Float, rows: Int32, window: Side, topk_indices: Int32, cmp_cache: Float, cmp_block_table: Int32
) -> None:
    """Refuse tables that do not name every row of a window or of a selection, from values that are known."""
    near = mirror.side_slots(window, rows, slice(0, len(q)))
    chosen = slot_mapping(topk_indices, rows, cmp_block_table, cmp_cache.shape[1])
    check_slots(near, window.cache.shape[0] * window.cache.shape[1])
    check_slots(chosen, cmp_cache.shape[0] * cmp_cache.shape[1])


def check_kernel(q: Float, logit_bound: float | None) -> None:
    """Refuse what is legal but has no kernel."""
    check_runs(q)
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"backend 'triton' attends in bfloat16 or float16, not {dtype_name(q)}; use backend 'torch'"
        )
    if q.shape[2] not in HEAD_DIMS:
        raise UnsupportedError(f"backend 'triton' has head_dim {HEAD_DIMS}, not {q.shape[2]}; use backend 'torch'")
    if logit_bound is None:
        return
    bound = check_number("logit_bound", logit_bound, above=0.0, hint="None leaves logits unbounded")
    if bound > LOGIT_LIMIT:
        raise UnsupportedError(
            f"without a running maximum logits stay within {LOGIT_LIMIT}, logit_bound is {bound}; "
            "give None to keep the maximum"
        )
    if q.dtype == torch.float16:
        raise UnsupportedError("float16 does not hold weights without a running maximum; give logit_bound None")


def windows_of(
    slots: KeySlots | None,
    rows: Int32,
    positions: Int32,
    swa_cache: Float,
    swa_block_table: Int32,
    window_size: int,
) -> KeySlots:
    """The slots of every window: the step's, if the cache's pages lie as they say, or made here."""
    pages = pages_of("swa_cache", swa_cache)
    if slots is not None and slots.window_size != window_size:
        hint = "one KeySlots serves the layers of one window, for one step"
        raise contract_error("slots", f"be of window_size {window_size}", slots.window_size, hint)
    if slots is None or slots.pages != pages:
        return window_slots(rows, positions, swa_block_table, window_size, pages)
    return slots


def check_entries(entries: EntrySlots, shape: tuple[int | str, ...], num_queries: int) -> None:
    """Refuse lists of entries that belong to another call."""
    if entries.kind != "all":
        raise contract_error("entries", "list all entries", repr(entries.kind), "attention_lists makes them")
    check_tensor("entries.slots", entries.slots, ("int32",), shape, "one list an operator row")
    check_tensor("entries.counts", entries.counts, ("int32",), (num_queries,), "one count a query")


def attended(
    q: Float,
    swa_cache: Float,
    windows: KeySlots,
    cmp_cache: Float,
    entries: EntrySlots | None,
    attn_sink: Float,
    softmax_scale: float,
    logit_bound: float | None,
) -> AttentionOutput:
    """Output and lse over the listed slots. A cache without entries may be any."""
    num_queries, num_heads, head_dim = q.shape
    q = q.detach().contiguous()
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if entries is not None and entries.slots.numel() == 0:
        entries = None
    sizes = {
        "H": num_heads,
        "D": head_dim,
        "WINDOW": min(windows.window_size, windows.window.shape[1]),
        "WIDTH": windows.window.shape[1],
        "ENTRIES": "none" if entries is None else entries.kind,
        "FIXED": logit_bound is not None,
        "WIDE": max(reach(swa_cache), reach(cmp_cache)) > INT32_MAX,
    }
    launch = hopper_launch(q, sizes) if takes_hopper(q) else portable_launch(q, logit_bound, sizes)
    num_tasks = num_queries * -(-num_heads // launch.heads)
    if num_tasks == 0:
        return AttentionOutput(out, lse)
    launch.kernel[(min(launch.programs, num_tasks) if launch.programs else num_tasks,)](
        q,
        swa_cache.detach(),
        cmp_cache.detach(),
        windows.window,
        windows.window if entries is None else entries.slots,
        windows.rows,
        windows.positions,
        windows.positions if entries is None else entries.counts,
        attn_sink.detach().to(torch.float32).contiguous(),
        out,
        lse,
        num_tasks,
        0 if entries is None else entries.slots.shape[1],
        softmax_scale * (LOG2_E if family_of(q) == "cuda" else 1.0),
        **launch.constexprs,
        **launch.options,
    )
    return AttentionOutput(out, lse)


class Launch(NamedTuple):
    """A kernel of attention and how it is launched.

    Fields:
        kernel: the function under ``jit``; both take the same arguments.
        heads: int, query heads of a task.
        programs: int, at most so many; 0 is one a task.
        constexprs, options: of the launch.
    """

    kernel: Any
    heads: int
    programs: int
    constexprs: dict[str, Any]
    options: dict[str, int]


def portable_launch(q: Float, logit_bound: float | None, sizes: dict[str, Any]) -> Launch:
    """The kernel that runs everywhere, with the tile of the device's family."""
    family = family_of(q)
    tile = tile_for(TILES, q, "attention", tile_key(q.shape[1], logit_bound))
    programs = programs_for(q, cube=True, waves=tile.waves) if tile.waves else 0
    options = {"num_warps": tile.warps, "num_stages": tile.stages} if family == "cuda" else {}
    return Launch(attention_kernel, tile.heads, programs, switches(family, tile, **sizes), options)


def takes_hopper(q: Float) -> bool:
    """Whether the kernel whose warps have roles serves these queries: on a Hopper GPU, more than 16 heads of 512.

    Its tasks are 64 heads; with 16 or fewer the portable kernel's small tile is sooner. It has not run in float16.
    """
    fits = q.dtype == torch.bfloat16 and q.shape[1] > FEW_HEADS and q.shape[2] == HOPPER_DIM
    return fits and q.device.type == "cuda" and has_hopper(q.device.index)


def hopper_launch(q: Float, sizes: dict[str, Any]) -> Launch:
    """One program a multiprocessor, four warps that fetch and two times four that compute."""
    from dsacp_npu.kernels.hopper.attention import attention_hopper_kernel

    constexprs = {**sizes, "BH": HOPPER_TILE, "BK": HOPPER_TILE}
    return Launch(attention_hopper_kernel, HOPPER_TILE, programs_for(q, cube=True), constexprs, {"num_warps": 4})


def reach(cache: Float) -> int:
    """The numbers from the first of a cache to its last."""
    return cache.shape[0] * cache.stride(0)
