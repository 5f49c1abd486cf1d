"""The operator row and the position of every query, from an operator's offsets and extents.

Every count and address is an argument without specialisation, so one binary serves any number of rows.
"""

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation
from dsacp_npu.kernels.metadata import Tile, typed

__all__ = ["TILES", "compilations", "query_rows_kernel"]

QUERY_POINTERS = ("cu_seqlens_q_ptr", "seqused_kv_ptr", "rows_ptr", "positions_ptr")
QUERY_COUNTS = ("num_extents", "num_rows", "share")

ASCEND = {"queries": Tile({"ROWS": 32, "BLOCK": 1024}, {})}
TILES = {
    "a2": ASCEND,
    "a5": ASCEND,
    "cuda": {"queries": Tile({"ROWS": 8, "BLOCK": 128}, {"num_warps": 1})},
}


@triton.jit(do_not_specialize=[*QUERY_POINTERS, *QUERY_COUNTS])
def query_rows_kernel(
    cu_seqlens_q_ptr,
    seqused_kv_ptr,
    rows_ptr,
    positions_ptr,
    num_extents,
    num_rows,
    share,
    POSITIONS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The operator row of every query and, with POSITIONS, its position; -1 beyond the last row.

    A task is ROWS operator rows. If each of them has one query, as in decoding and under round robin, they are one run
    of queries, written at once; otherwise each row's queries are a run, written by ``share`` programs.
    """
    lane = tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    for task in range(tl.program_id(0), (num_extents + ROWS - 1) // ROWS * share, tl.num_programs(0)):
        block = task // share
        part = task - block * share
        first_row = block * ROWS
        row = first_row + rows
        inside = row < num_extents
        begin = tl.load(cu_seqlens_q_ptr + row, mask=inside, other=0)
        end = tl.load(cu_seqlens_q_ptr + row + 1, mask=inside, other=1)
        if tl.max(tl.abs(end - begin - 1), 0) == 0:
            if part == 0:
                query = tl.maximum(tl.load(cu_seqlens_q_ptr + first_row), 0) + rows
                inside = inside & (query < num_rows)
                tl.store(rows_ptr + query, row, mask=inside)
                if POSITIONS:
                    extent = tl.load(seqused_kv_ptr + row, mask=inside, other=0)
                    tl.store(positions_ptr + query, tl.maximum(extent, 0) - 1, mask=inside)
        else:
            for one in range(first_row, tl.minimum(first_row + ROWS, num_extents)):
                stop = tl.load(cu_seqlens_q_ptr + one + 1)
                stop_here = tl.minimum(stop, num_rows)
                extent = tl.load(seqused_kv_ptr + one) if POSITIONS else 0
                start = tl.maximum(tl.load(cu_seqlens_q_ptr + one), 0)
                for first in range(start + part * BLOCK, stop_here, share * BLOCK):
                    query = first + lane
                    tl.store(rows_ptr + query, lane * 0 + one, mask=query < stop_here)
                    if POSITIONS:
                        position = tl.where(extent > 0, query + (extent - stop), -1)
                        tl.store(positions_ptr + query, position, mask=query < stop_here)
    used = tl.maximum(tl.load(cu_seqlens_q_ptr + num_extents), 0)
    for first in range(used + tl.program_id(0) * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        query = first + lane
        tl.store(rows_ptr + query, lane * 0 - 1, mask=query < num_rows)
        if POSITIONS:
            tl.store(positions_ptr + query, lane * 0 - 1, mask=query < num_rows)


def compilations(family: str) -> list[Compilation]:
    """With and without positions."""
    signature, sizes = typed(QUERY_POINTERS, QUERY_COUNTS), TILES[family]["queries"].sizes
    return [
        Compilation(f"queries/{name}", query_rows_kernel, signature, {"POSITIONS": on, **sizes})
        for name, on in (("rows", False), ("rows and positions", True))
    ]
