"""Send and receive buffers of the exchange between heads and tokens: the two outer axes swapped, rows kept whole."""

from itertools import product

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation
from dsacp_npu.kernels.paging import column_tile, tile_constants, tiles

__all__ = ["TILES", "compilations", "exchange_kernel"]

# By words of a rank's share of a row.
TILES = {"a2": tiles(16384, 64), "a5": tiles(16384, 64), "cuda": tiles(4096, 64, num_warps=4)}


@triton.jit(do_not_specialize=["num_rows"])
def exchange_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PACK: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
):
    """x [num_rows, RANKS, WIDTH] as [RANKS, num_rows, WIDTH] with PACK, and back without. The words hold anything."""
    column_blocks: tl.constexpr = (WIDTH + COLUMN_TILE - 1) // COLUMN_TILE
    row_stride: tl.constexpr = RANKS * WIDTH
    places = tl.arange(0, ROW_TILE)
    columns = tl.arange(0, COLUMN_TILE)
    num_tasks = (num_rows + ROW_TILE - 1) // ROW_TILE * (RANKS * column_blocks)
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        row = task // (RANKS * column_blocks) * ROW_TILE
        rank = task // column_blocks % RANKS
        first = task % column_blocks * COLUMN_TILE
        there = (places < num_rows - row)[:, None]
        if WIDTH % COLUMN_TILE != 0:
            there = there & (columns < WIDTH - first)[None, :]
        row_start = tl.cast(row, tl.int64) * row_stride + rank * WIDTH + first
        rank_start = (tl.cast(rank, tl.int64) * num_rows + row) * WIDTH + first
        by_row = row_start + places[:, None] * row_stride + columns[None, :]
        by_rank = rank_start + places[:, None] * WIDTH + columns[None, :]
        if PACK:
            tl.store(out_ptr + by_rank, tl.load(x_ptr + by_row, mask=there), mask=there)
        else:
            tl.store(out_ptr + by_row, tl.load(x_ptr + by_rank, mask=there), mask=there)


def compilations(family: str) -> list[Compilation]:
    """Every tile, both ways; shares of heads of 512 bfloat16 channels, for every group that divides 64 heads."""
    shares = [(ranks, 64 // ranks * 256) for ranks in (1, 2, 4, 8, 16, 32, 64)]
    words = product([*shares, (3, 33), (3, 1), (2, 100), (5, 1500)], ("i32",))
    halves = product(((3, 33), (3, 1), (2, 1500)), ("fp16", "i8"))
    return [
        Compilation(
            f"exchange/{ranks} ranks x {width} {word} {'pack' if pack else 'unpack'}",
            exchange_kernel,
            {"x_ptr": f"*{word}", "out_ptr": f"*{word}", "num_rows": "i32"},
            {"RANKS": ranks, "WIDTH": width, "PACK": pack, **tile_constants(TILES[family][column_tile(width)])},
        )
        for (ranks, width), word in (*words, *halves)
        for pack in (True, False)
    ]
