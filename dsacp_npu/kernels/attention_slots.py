"""The lists that attention reads: slots of each query's window, of its chosen entries, and of all entries of a row.

What is not a key is the complement ``~slot`` of a row that the query sees: `attention` says what for. A window begins
with the first position that it has, and a query without keys has none at all. ``PITCH`` counts rows from one page of a
cache to the next: pages may lie apart.
"""

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation
from dsacp_npu.kernels.attention_tiles import ENTRIES_A_TASK, LARGEST_TABLE

__all__ = ["chosen_slots_kernel", "compilations", "entry_slots_kernel", "window_slots_kernel"]


@triton.jit(do_not_specialize=["num_queries", "table_stride"])
def window_slots_kernel(
    table_ptr,
    row_ptr,
    position_ptr,
    slots_ptr,
    num_queries,
    table_stride,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PITCH: tl.constexpr,
):
    """Slots of the window of one query a task, through the pages that it touches; behind it, the query's own.

    Nothing is written for a query without keys. Limits: slots fit int32.
    """
    lanes = tl.arange(0, WIDTH)
    for query in range(tl.program_id(0), num_queries, tl.num_programs(0)):
        position = tl.load(position_ptr + query)
        if position >= 0:
            row_base = table_ptr + tl.load(row_ptr + query).to(tl.int64) * table_stride
            first = position - tl.minimum(position, WINDOW - 1)
            own_page = position // PAGE
            own = tl.load(row_base + own_page) * PITCH + (position - own_page * PAGE)
            slots = tl.full([WIDTH], -1, tl.int32) - own
            for page in range(first // PAGE, own_page + 1):
                within = first - page * PAGE + lanes
                here = (within >= 0) & (within < PAGE) & (lanes <= position - first)
                slots = tl.where(here, tl.load(row_base + page) * PITCH + within, slots)
            tl.store(slots_ptr + tl.cast(query, tl.int64) * WIDTH + lanes, slots)


@triton.jit(do_not_specialize=["num_queries", "table_stride"])
def chosen_slots_kernel(
    table_ptr,
    row_ptr,
    position_ptr,
    chosen_ptr,
    slots_ptr,
    count_ptr,
    num_queries,
    table_stride,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Slots of the entries that one query a task chose, and how many columns hold them all.

    -1 may stand anywhere. With ``BLOCKS`` a table row of at most so many blocks is read as a whole and looked up on the
    chip: an NPU would load element by element. It does not gather integers, so block ids pose as floats. Limits: pages
    of ``2 ** SHIFT`` entries; slots fit int32.
    """
    lanes = tl.arange(0, WIDTH)
    for query in range(tl.program_id(0), num_queries, tl.num_programs(0)):
        row = tl.load(row_ptr + query)
        chosen = tl.load(chosen_ptr + tl.cast(query, tl.int64) * CHOSEN + lanes, mask=lanes < CHOSEN, other=-1)
        count = tl.max(tl.where(chosen >= 0, lanes + 1, 0), 0)
        largest = tl.max(chosen, 0)
        if tl.load(position_ptr + query) < 0:
            count = 0
        tl.store(count_ptr + query, count)
        if count > 0:
            row_base = table_ptr + tl.cast(row, tl.int64) * table_stride
            used = tl.where(chosen >= 0, chosen, largest)
            if BLOCKS:
                pages = tl.arange(0, BLOCKS)
                row_blocks = tl.load(row_base + pages, mask=pages < table_stride, other=0).to(tl.float32, bitcast=True)
                block = tl.gather(row_blocks, used >> SHIFT, 0).to(tl.int32, bitcast=True)
            else:
                block = tl.load(row_base + (used >> SHIFT))
            slots = block * PITCH + (used & ((1 << SHIFT) - 1))
            slots = tl.where(chosen >= 0, slots, -1 - slots)
            tl.store(slots_ptr + tl.cast(query, tl.int64) * WIDTH + lanes, slots)


@triton.jit(do_not_specialize=["num_rows", "num_parts", "table_stride", "slots_stride"])
def entry_slots_kernel(
    table_ptr,
    seqused_ptr,
    slots_ptr,
    num_rows,
    num_parts,
    table_stride,
    slots_stride,
    ratio,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    PITCH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Slots of all entries of an operator row, ``PAGES`` pages a task, as far as the row's keys reach."""
    pages = tl.arange(0, PAGES)
    lanes = tl.arange(0, LANES)
    for task in range(tl.program_id(0), num_rows * num_parts, tl.num_programs(0)):
        row = task // num_parts
        first = (task % num_parts) * PAGES
        behind = (tl.load(seqused_ptr + row) // ratio + PAGE - 1) // PAGE - first
        if behind > 0:
            row_base = table_ptr + tl.cast(row, tl.int64) * table_stride
            blocks = tl.load(row_base + first + pages, mask=pages < behind, other=0)
            slots = blocks[:, None] * PITCH + lanes[None, :]
            base = slots_ptr + tl.cast(row, tl.int64) * slots_stride + first * PAGE
            real = (pages[:, None] < behind) & (lanes[None, :] < PAGE)
            tl.store(base + pages[:, None] * PAGE + lanes[None, :], slots, mask=real)


def compilations(family: str) -> list[Compilation]:
    """Pages of 128 tokens and of what they compress to, and of other sizes; both ways to look a table up."""
    lists = {"table_ptr": "*i32", "row_ptr": "*i32", "position_ptr": "*i32"}
    sizes = {"num_queries": "i32", "table_stride": "i32"}
    window = {**lists, "slots_ptr": "*i32", **sizes}
    chosen = {**lists, "chosen_ptr": "*i32", "slots_ptr": "*i32", "count_ptr": "*i32", **sizes}
    counts = ("num_rows", "num_parts", "table_stride", "slots_stride", "ratio")
    every = {"table_ptr": "*i32", "seqused_ptr": "*i32", "slots_ptr": "*i32", **dict.fromkeys(counts, "i32")}
    found = [
        Compilation(
            f"window slots/pages of {page}",
            window_slots_kernel,
            window,
            {"WINDOW": 128, "WIDTH": 128, "PAGE": page, "PITCH": page},
        )
        for page in (128, 16, 5)
    ]
    found += [
        Compilation(
            f"chosen slots/{count} of {blocks or 'any number of'} blocks",
            chosen_slots_kernel,
            chosen,
            {"CHOSEN": count, "WIDTH": 1024 if count > 512 else 512, "SHIFT": 5, "PITCH": 32, "BLOCKS": blocks},
        )
        for count in (512, 1000)
        for blocks in ((0,) if family == "cuda" else (0, 16, LARGEST_TABLE))
    ]
    return found + [
        Compilation(
            f"entry slots/pages of {page}",
            entry_slots_kernel,
            every,
            {"PAGES": ENTRIES_A_TASK // lanes, "PAGE": page, "PITCH": page, "LANES": lanes},
        )
        for page, lanes in ((1, 1), (32, 32), (3, 4))
    ]
