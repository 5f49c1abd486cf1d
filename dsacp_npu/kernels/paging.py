"""Paged caches: rows written and read by slot, as words that may hold anything; and the slots of logical rows."""

from itertools import product

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation

__all__ = [
    "GATHER_TILES",
    "MAPPING_TILES",
    "SCATTER_TILES",
    "column_tile",
    "compilations",
    "gather_kernel",
    "inner_column_tile",
    "scatter_kernel",
    "slot_mapping_kernel",
    "tile_constants",
    "tiles",
]

COLUMNS = tuple(1 << power for power in range(11))  # words of a row that move at a time


def tiles(words: int, most_rows: int, **options: int) -> dict[int, dict[str, int]]:
    """By words of a row: as many rows as make up so many words."""
    return {
        columns: {"ROW_TILE": min(words // columns, most_rows), "COLUMN_TILE": columns, **options}
        for columns in COLUMNS
    }


SCATTER_TILES: dict[str, dict[int, dict[str, int]]] = {
    "a2": {columns: {"COLUMN_TILE": columns} for columns in COLUMNS},
    "a5": {columns: {"COLUMN_TILE": columns} for columns in COLUMNS},
    "cuda": {columns: {"COLUMN_TILE": columns, "num_warps": 2 if columns > 256 else 1} for columns in COLUMNS},
}
GATHER_TILES = {"a2": tiles(4096, 64), "a5": tiles(4096, 64), "cuda": tiles(4096, 256, num_warps=4)}
# By whether a row of logical rows holds one or many.
MAPPING = {False: {"ROW_TILE": 256, "COLUMN_TILE": 1}, True: {"ROW_TILE": 1, "COLUMN_TILE": 256}}
MAPPING_TILES = {
    "a2": MAPPING,
    "a5": MAPPING,
    "cuda": {many: {**tile, "num_warps": 4} for many, tile in MAPPING.items()},
}


@triton.jit
def slot_offsets(slots, SLOT_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, BLOCK_SHIFT: tl.constexpr):
    """Where the rows of these slots begin: evenly apart with BLOCK_SHIFT -1, else in blocks of ``1 << BLOCK_SHIFT``."""
    if BLOCK_SHIFT < 0:
        offsets = slots.to(tl.int64) * SLOT_STRIDE
    else:
        places = slots & ((1 << BLOCK_SHIFT) - 1)
        offsets = (slots >> BLOCK_SHIFT).to(tl.int64) * BLOCK_STRIDE + places.to(tl.int64) * SLOT_STRIDE
    return offsets


@triton.jit(do_not_specialize=["num_rows"])
def scatter_kernel(
    cache_ptr,
    rows_ptr,
    slots_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
):
    """Rows [num_rows, WIDTH] written into a cache at their slots; a row whose slot is -1 is neither read nor written.

    One row at a time: of a tile that scatters under a mask the Ascend compiler makes a loop over single numbers, of a
    row whose slot is a scalar two copies. Slots are distinct, so the order does not matter.
    """
    columns = tl.arange(0, COLUMN_TILE)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        slot = tl.load(slots_ptr + row)
        if slot >= 0:
            target = cache_ptr + slot_offsets(slot, SLOT_STRIDE, BLOCK_STRIDE, BLOCK_SHIFT)
            source = rows_ptr + tl.cast(row, tl.int64) * WIDTH
            for first in tl.static_range(0, WIDTH, COLUMN_TILE):
                there = columns < WIDTH - first
                tl.store(target + first + columns, tl.load(source + first + columns, mask=there), mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def gather_kernel(
    cache_ptr,
    slots_ptr,
    out_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
):
    """The cache rows [num_rows, WIDTH] at these slots, zeros where a slot is -1, whatever the cache holds.

    The Ascend compiler reads whole tiles of every slot and masks them afterwards. So an absent slot becomes slot 0,
    which must exist, and a row that is no multiple of COLUMN_TILE (at most WIDTH) ends with a tile that overlaps the
    one before: both write the same. Each row is a copy of its own there: slow below 512 bytes, and a scalar loop below
    32 bytes, which no tile avoids because the slots are data.
    """
    column_blocks: tl.constexpr = (WIDTH + COLUMN_TILE - 1) // COLUMN_TILE
    places = tl.arange(0, ROW_TILE)
    columns = tl.arange(0, COLUMN_TILE)
    num_tasks = (num_rows + ROW_TILE - 1) // ROW_TILE * column_blocks
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        row = task // column_blocks * ROW_TILE
        first = task % column_blocks * COLUMN_TILE
        if WIDTH % COLUMN_TILE != 0:
            first = tl.minimum(first, WIDTH - COLUMN_TILE)
        there = places < num_rows - row
        slots = tl.load(slots_ptr + row + places, mask=there, other=-1)
        source = slot_offsets(tl.maximum(slots, 0), SLOT_STRIDE, BLOCK_STRIDE, BLOCK_SHIFT)
        read = cache_ptr + first + source[:, None] + columns[None, :]
        values = tl.load(read, mask=(slots >= 0)[:, None], other=0)
        target = tl.cast(row, tl.int64) * WIDTH + first + places[:, None] * WIDTH + columns[None, :]
        tl.store(out_ptr + target, values, mask=there[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_columns", "max_blocks"])
def slot_mapping_kernel(
    logical_ptr,
    requests_ptr,
    table_ptr,
    out_ptr,
    num_rows,
    num_columns,
    max_blocks,
    BLOCK_SHIFT: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
):
    """The slots of logical rows [num_rows, num_columns] of one request a row; -1 where the logical row is -1.

    What asks for nothing reads the first block of the first request, which must exist. The table is read number by
    number, a scalar loop on Ascend.
    """
    row_places = tl.arange(0, ROW_TILE)
    column_places = tl.arange(0, COLUMN_TILE)
    column_blocks = (num_columns + COLUMN_TILE - 1) // COLUMN_TILE
    num_tasks = (num_rows + ROW_TILE - 1) // ROW_TILE * column_blocks
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        row = task // column_blocks * ROW_TILE
        first = task % column_blocks * COLUMN_TILE
        row_there = row_places < num_rows - row
        there = row_there[:, None] & (column_places < num_columns - first)[None, :]
        places = row * num_columns + first + row_places[:, None] * num_columns + column_places[None, :]
        logical = tl.load(logical_ptr + places, mask=there, other=-1)
        requests = tl.load(requests_ptr + row + row_places, mask=row_there, other=0)
        used = logical >= 0
        wanted = tl.maximum(logical, 0)
        starts = tl.maximum(requests, 0) * max_blocks
        blocks = tl.load(table_ptr + starts[:, None] + (wanted >> BLOCK_SHIFT), mask=used, other=0)
        slots = (blocks << BLOCK_SHIFT) + (wanted & ((1 << BLOCK_SHIFT) - 1))
        tl.store(out_ptr + places, tl.where(used, slots, -1), mask=there)


def column_tile(width: int) -> int:
    """The key of the tile for rows of so many words: one that holds a row, or the largest."""
    return min(triton.next_power_of_2(width), COLUMNS[-1])


def inner_column_tile(width: int) -> int:
    """The key of the tile for rows of so many words where no tile may reach beyond its row."""
    return min(1 << (width.bit_length() - 1), COLUMNS[-1])


def compilations(family: str) -> list[Compilation]:
    """Rows of every tile, rows that fill none, in words of every size; blocks that lie apart; both mappings."""
    even = [*product((*COLUMNS, 24, 33, 136, 1500), ("i32",)), *product((1, 33, 256, 1500), ("fp16", "i8"))]
    apart = [(256, "i32"), (33, "i8"), (1, "fp16")]
    found = []
    for (width, word), shift in [*product(even, (-1,)), *product(apart, (7,))]:
        found += [scatter_compilation(family, width, word, shift), gather_compilation(family, width, word, shift)]
    return found + [mapping_compilation(family, many, shift) for many in (False, True) for shift in (0, 7)]


def layout(width: int, shift: int) -> dict[str, int]:
    """The constexprs of a cache with blocks of 128 rows, which lie apart where they are found by a shift."""
    return {
        "WIDTH": width,
        "SLOT_STRIDE": width,
        "BLOCK_STRIDE": 128 * width * (1 if shift < 0 else 2),
        "BLOCK_SHIFT": shift,
    }


def scatter_compilation(family: str, width: int, word: str, shift: int) -> Compilation:
    """Writing rows."""
    signature = {"cache_ptr": f"*{word}", "rows_ptr": f"*{word}", "slots_ptr": "*i32", "num_rows": "i32"}
    constants = {**layout(width, shift), **tile_constants(SCATTER_TILES[family][column_tile(width)])}
    return Compilation(f"scatter/{width} {word} shift {shift}", scatter_kernel, signature, constants)


def gather_compilation(family: str, width: int, word: str, shift: int) -> Compilation:
    """Reading rows."""
    signature = {"cache_ptr": f"*{word}", "slots_ptr": "*i32", "out_ptr": f"*{word}", "num_rows": "i32"}
    constants = {**layout(width, shift), **tile_constants(GATHER_TILES[family][inner_column_tile(width)])}
    return Compilation(f"gather/{width} {word} shift {shift}", gather_kernel, signature, constants)


def mapping_compilation(family: str, many: bool, shift: int) -> Compilation:
    """Finding slots."""
    pointers = dict.fromkeys(("logical_ptr", "requests_ptr", "table_ptr", "out_ptr"), "*i32")
    sizes = dict.fromkeys(("num_rows", "num_columns", "max_blocks"), "i32")
    constants = {"BLOCK_SHIFT": shift, **tile_constants(MAPPING_TILES[family][many])}
    name = f"slot_mapping/{'many' if many else 'one'} a row shift {shift}"
    return Compilation(name, slot_mapping_kernel, {**pointers, **sizes}, constants)


def tile_constants(tile: dict[str, int]) -> dict[str, int]:
    """What of a tile is a constexpr; the rest are options of a launch."""
    return {name: value for name, value in tile.items() if name.isupper()}
