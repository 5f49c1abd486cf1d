"""What the fetching warps of the Hopper attention kernel do: lists read, queries and rows copied to shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

__all__ = [
    "FREE",
    "FULL",
    "QUERY_FREE",
    "QUERY_FULL",
    "SCORED",
    "SIGNALS",
    "WEIGHED",
    "fetch",
    "in_turn",
    "lists_of",
    "slots_of",
]

# Signals in shared memory: of chunk c of tile A and B (4 + c), of the query, of either side's weights, of scores.
FULL = gl.constexpr(0)
FREE = gl.constexpr(8)
QUERY_FULL = gl.constexpr(16)
QUERY_FREE = gl.constexpr(17)
WEIGHED = gl.constexpr(18)
SCORED = gl.constexpr(20)
SIGNALS = gl.constexpr(21)


@gluon.constexpr_function
def in_turn(i, side):
    """The chunk of a tile that is used as number ``i``: the one that was given back then."""
    return i // 2 + i % 2 * 2 if side else i


@gluon.jit
def lists_of(
    query, source, entry_stride, WINDOW: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, ENTRIES: gl.constexpr
):
    """Where a query's two lists lie, how many places of each it reads, what stands for no entry; and its tiles."""
    window_ptr, entry_ptr, row_ptr, position_ptr, count_ptr = source
    in_window = gl.minimum(gl.load(position_ptr + query) + 1, WINDOW)
    window = window_ptr + query.to(gl.int64) * WIDTH
    entries = window
    num_entries = in_window * 0
    seen = num_entries
    if ENTRIES == "selected":
        entries = entry_ptr + query.to(gl.int64) * entry_stride
    if ENTRIES == "all":
        entries = entry_ptr + gl.maximum(gl.load(row_ptr + query), 0).to(gl.int64) * entry_stride
        seen = -1 - gl.load(entries)
    if ENTRIES != "none":
        num_entries = gl.load(count_ptr + query)
    tiles = (in_window + BK - 1) // BK + (num_entries + BK - 1) // BK
    return (window, entries, in_window, num_entries, seen), tiles


@gluon.jit
def slots_of(tile, lists, lanes, BK: gl.constexpr, ENTRIES: gl.constexpr):
    """Slots of one tile of keys, those of the window first."""
    window, entries, in_window, num_entries, seen = lists
    if ENTRIES == "none":
        slots = gl.load(window + tile * BK + lanes)
    else:
        in_first = (in_window + BK - 1) // BK
        near = tile < in_first
        start = gl.where(near, tile, tile - in_first) * BK
        slots = gl.load(gl.where(near, window, entries) + start + lanes)
        if ENTRIES == "all":
            slots = gl.where((lanes < num_entries - start) | near, slots, seen)
    return slots


@gluon.jit
def chunk_copied(chunk, phase, place, keys, signals, rows, lanes, cache_ptr, D: gl.constexpr, DC: gl.constexpr):
    """Rows of a tile in one chunk of channels on their way to shared memory, once that is free."""
    mbarrier.wait(signals.index(FREE + place), phase)
    async_copy.async_copy_global_to_shared(
        keys.index(place), cache_ptr + chunk * DC + rows[:, None] * D + lanes[None, :]
    )
    async_copy.mbarrier_arrive(signals.index(FULL + place), increment_count=False)


@gluon.jit
def fetch(
    pointers,
    shared,
    num_tasks,
    entry_stride,
    H: gl.constexpr,
    D: gl.constexpr,
    WINDOW: gl.constexpr,
    WIDTH: gl.constexpr,
    ENTRIES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Queries and rows of caches to shared memory, in the order of their use."""
    source, q_ptr, swa_ptr, cmp_ptr = pointers
    queries, keys, signals = shared
    BH: gl.constexpr = queries.shape[1]
    BK: gl.constexpr = keys.shape[1]
    DC: gl.constexpr = keys.shape[2]
    BLOCKS: gl.constexpr = (H + BH - 1) // BH
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, BK, gl.SliceLayout(1, layout))
    heads = gl.arange(0, BH, gl.SliceLayout(1, layout))
    lanes = gl.arange(0, DC, gl.SliceLayout(0, layout))
    first = gl.program_id(0)
    evens = 0
    odds = 0
    turn = 0
    lists, tiles = lists_of(first // BLOCKS, source, entry_stride, WINDOW, WIDTH, BK, ENTRIES)
    for task in range(first, num_tasks, gl.num_programs(0)):
        slots0 = slots_of(0, lists, rows, BK, ENTRIES)
        slots1 = slots_of(gl.maximum(gl.minimum(1, tiles - 1), 0), lists, rows, BK, ENTRIES)
        block_heads = task % BLOCKS * BH + heads
        if H % BH:
            block_heads = gl.minimum(block_heads, H - 1)
        q_block = q_ptr + (task // BLOCKS).to(gl.int64) * (H * D) + block_heads[:, None] * D + lanes[None, :]
        mbarrier.wait(signals.index(QUERY_FREE), turn ^ 1)
        for c in gl.static_range(4):
            async_copy.async_copy_global_to_shared(queries.index(c), q_block + c * DC)
        async_copy.mbarrier_arrive(signals.index(QUERY_FULL), increment_count=False)
        turn ^= 1
        for tile in range(0, tiles, 2):
            rows0 = gl.maximum(slots0, -1 - slots0)
            rows1 = gl.maximum(slots1, -1 - slots1)
            if WIDE:
                rows0 = rows0.to(gl.int64)
                rows1 = rows1.to(gl.int64)
            cache0 = swa_ptr if ENTRIES == "none" else gl.where(tile * BK < lists[2], swa_ptr, cmp_ptr)
            cache1 = swa_ptr if ENTRIES == "none" else gl.where(tile * BK + BK < lists[2], swa_ptr, cmp_ptr)
            last = gl.maximum(tiles - 1, 0)
            slots0 = slots_of(gl.minimum(tile + 2, last), lists, rows, BK, ENTRIES)
            slots1 = slots_of(gl.minimum(tile + 3, last), lists, rows, BK, ENTRIES)
            phase = (evens & 1) ^ 1
            for i in gl.static_range(4):
                chunk_copied(in_turn(i, 0), phase, in_turn(i, 0), keys, signals, rows0, lanes, cache0, D, DC)
            evens += 1
            if tile + 1 < tiles:
                phase = (odds & 1) ^ 1
                for i in gl.static_range(4):
                    chunk_copied(in_turn(i, 1), phase, 4 + in_turn(i, 1), keys, signals, rows1, lanes, cache1, D, DC)
                odds += 1
        following = gl.minimum(task + gl.num_programs(0), num_tasks - 1)
        lists, tiles = lists_of(following // BLOCKS, source, entry_stride, WINDOW, WIDTH, BK, ENTRIES)
