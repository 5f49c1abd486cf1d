"""The compressor's rings after a step: its last rows go where their positions say, and the counts with them."""

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation
from dsacp_npu.kernels.compressor import Tile, gpu, least

__all__ = ["TILES", "compilations", "state_constants", "state_key", "updated_state_kernel"]

# By the most columns that a ring may have.
NPU_TILES = {256: Tile(32), 512: Tile(16), 1024: Tile(8)}
TILES = {
    "a2": NPU_TILES,
    "a5": NPU_TILES,
    "cuda": {256: gpu(8, 4, 4), 512: gpu(8, 4, 4), 1024: gpu(8, 2, 8)},
}
SIGNATURE = {
    **dict.fromkeys(("kv_ptr", "score_ptr"), "*fp32"),
    **dict.fromkeys(("query_start_loc_ptr", "num_computed_tokens_ptr"), "*i32"),
    **dict.fromkeys(("ring_kv_ptr", "ring_score_ptr"), "*fp32"),
    **dict.fromkeys(("held_start_ptr", "num_tokens_ptr"), "*i32"),
    **dict.fromkeys(("num_reqs", "ring_rows"), "i32"),
}


def state_key(width: int) -> int:
    """What `TILES` has a tile by, for rings of so many columns."""
    return least(width, tuple(NPU_TILES))


def state_constants(width: int, tile: Tile) -> dict[str, int]:
    """The constexprs of `updated_state_kernel`."""
    return {"WIDTH": width, "SIZE": triton.next_power_of_2(width), "ROWS": tile.rows}


@triton.jit(do_not_specialize=["num_reqs", "ring_rows"])
def updated_state_kernel(
    kv_ptr,
    score_ptr,
    query_start_loc_ptr,
    num_computed_tokens_ptr,
    ring_kv_ptr,
    ring_score_ptr,
    held_start_ptr,
    num_tokens_ptr,
    num_reqs,
    ring_rows,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The rings [num_reqs, ring_rows, WIDTH] and their counts, after the step's rows; NaN is moved like any number.

    A request is one program's alone. `num_computed_tokens_ptr` must not be `num_tokens_ptr`: the warps of a program do
    not wait for each other.
    """
    slots = tl.arange(0, ROWS)
    channels = tl.arange(0, SIZE)
    inside = slots[:, None] * WIDTH + channels[None, :]
    for request in range(tl.program_id(0), num_reqs, tl.num_programs(0)):
        before = tl.load(num_computed_tokens_ptr + request)
        first_row = tl.load(query_start_loc_ptr + request)
        length = tl.load(query_start_loc_ptr + request + 1) - first_row
        live = (length > 0) & (before >= 0)
        count = tl.where(live, tl.minimum(length, ring_rows), 0)
        skipped = length - count  # rows that later ones of this step would overwrite
        place = tl.maximum(before + skipped, 0) % ring_rows
        straight = tl.minimum(count, ring_rows - place)
        straight_tiles = (straight + ROWS - 1) // ROWS
        wrapped_tiles = (count - straight + ROWS - 1) // ROWS
        for step in range(straight_tiles + wrapped_tiles):
            again = step >= straight_tiles
            start = tl.where(again, straight + (step - straight_tiles) * ROWS, step * ROWS)
            here = (slots < tl.where(again, count, straight) - start)[:, None] & (channels < WIDTH)[None, :]
            at = place + start - tl.where(again, ring_rows, 0)
            old = (first_row + skipped + start).to(tl.int64) * WIDTH
            new = (tl.cast(request, tl.int64) * ring_rows + at) * WIDTH
            tl.store(ring_kv_ptr + new + inside, tl.load(kv_ptr + old + inside, mask=here, other=0.0), mask=here)
            tl.store(ring_score_ptr + new + inside, tl.load(score_ptr + old + inside, mask=here, other=0.0), mask=here)
        end = before + length
        held = tl.load(held_start_ptr + request)
        held_now = tl.maximum(tl.where(before > 0, held, 0), end - ring_rows)
        tl.store(held_start_ptr + request, tl.where(live, held_now, held))
        tl.store(num_tokens_ptr + request, tl.where(live, end, tl.load(num_tokens_ptr + request)))


def compilations(family: str) -> list[Compilation]:
    """The rings of DeepSeek-V4: of index entries, of entries without overlap and with."""
    return [
        Compilation(f"compressor/state of {width}", updated_state_kernel, SIGNATURE, state_constants(width, tile))
        for width, tile in TILES[family].items()
    ]
