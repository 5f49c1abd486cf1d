"""The compressor's entries, pooled from the step's rows and from the rings of rows before.

The rows that a window pools are consecutive positions, so they lie in at most three runs of memory: in the ring up to
its end, in the ring from its start, among the step's rows. A run is read tile by tile under a running softmax, each
row once; runs of no rows cost nothing, and what lies outside of a run is never read.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation

__all__ = [
    "TILES",
    "Tile",
    "compilations",
    "entry_constants",
    "entry_key",
    "gpu",
    "least",
    "pooled_entries_kernel",
]

UNSEEN = tl.constexpr(-1e30)  # the score of no row: below all others, and no NaN where all of a tile is that


class Tile(NamedTuple):
    """How a device works through something.

    Fields:
        rows: int, rows at a time.
        waves: int, programs a multiprocessor of a GPU; an NPU has one a core.
        options: how a GPU's program is built; nothing for an NPU.
    """

    rows: int
    waves: int = 1
    options: Mapping[str, int] = MappingProxyType({})


def gpu(rows: int, waves: int, num_warps: int) -> Tile:
    """A tile of a GPU."""
    return Tile(rows, waves, MappingProxyType({"num_warps": num_warps, "num_stages": 2}))


# The most channels that an entry may have, and how long its windows are: a ratio below 16 is pooled as 4 is, one from
# 16 on as 128 is.
NPU_TILES = {(128, 4): Tile(4), (128, 128): Tile(16), (512, 4): Tile(4), (512, 128): Tile(8)}
TILES = {
    "a2": NPU_TILES,
    "a5": NPU_TILES,
    "cuda": {
        (128, 4): gpu(4, 16, 1),
        (128, 128): gpu(16, 8, 2),
        (512, 4): gpu(4, 4, 4),
        (512, 128): gpu(8, 4, 4),
    },
}


def entry_key(channels: int, compress_ratio: int) -> tuple[int, int]:
    """What `TILES` has a tile by, for entries of so many channels at this ratio."""
    return least(channels, (128, 512)), 4 if compress_ratio < 16 else 128


def least(size: int, sizes: tuple[int, ...]) -> int:
    """The least of the sizes that is not below this one; itself where none is, and then there is no tile."""
    return min((each for each in sizes if each >= size), default=size)


def entry_constants(channels: int, pairs: int, windows: int, tile: Tile) -> dict[str, int]:
    """The constexprs of `pooled_entries_kernel`."""
    return {"D": channels, "PAIRS": pairs, "WINDOWS": windows, "ROWS": tile.rows}


@triton.jit
def tile_of(place, compress_ratio, ROWS: tl.constexpr):
    """The tile that holds a place among an entry's rows; tiles begin anew with each window."""
    return place // compress_ratio * ((compress_ratio + ROWS - 1) // ROWS) + place % compress_ratio // ROWS


@triton.jit
def tiles_between(first, end, compress_ratio, ROWS: tl.constexpr):
    """How many tiles hold the places from `first` up to `end`."""
    count = tile_of(end - 1, compress_ratio, ROWS) - tile_of(first, compress_ratio, ROWS) + 1
    return tl.where(first < end, count, 0)


@triton.jit
def with_tile(
    top,
    weight,
    total,
    kv_ptr,
    score_ptr,
    tile,
    first,
    end,
    compress_ratio,
    D: tl.constexpr,
    WINDOWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The running softmax of each channel after the rows of a tile whose places are from `first` up to `end`."""
    tiles = (compress_ratio + ROWS - 1) // ROWS
    window = tile // tiles
    start = tile % tiles * ROWS
    slots = tl.arange(0, ROWS)
    place = window * compress_ratio + start
    low = first - place
    high = tl.minimum(end - place, compress_ratio - start)
    seen = ((slots >= low) & (slots < high))[:, None]
    at = place.to(tl.int64) * (WINDOWS * D) + window * D
    inside = slots[:, None] * (WINDOWS * D) + tl.arange(0, D)[None, :]
    score = tl.load(score_ptr + at + inside, mask=seen, other=UNSEEN)
    kv = tl.load(kv_ptr + at + inside, mask=seen, other=0.0)
    highest = tl.maximum(tl.max(score, 0), top, propagate_nan=tl.PropagateNan.ALL)
    shares = tl.exp(score - highest[None, :])
    kept = tl.exp(top - highest)
    weight = weight * kept + tl.sum(shares, 0)
    total = total * kept + tl.sum(shares * kv, 0)
    return highest, weight, total


@triton.jit
def pooled_row(
    kv_ptr,
    score_ptr,
    ring_kv_ptr,
    ring_score_ptr,
    request,
    index,
    before,
    first_row,
    ring_rows,
    compress_ratio,
    D: tl.constexpr,
    WINDOWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The softmax-weighted mean of an entry's rows; zeros for none."""
    top = tl.full([D], UNSEEN, tl.float32)
    weight = tl.zeros([D], tl.float32)
    total = tl.zeros([D], tl.float32)
    # Places count from the first row of the window before, where there are two windows; entry 0 has none before.
    origin = (index - (WINDOWS - 1)) * compress_ratio
    end = tl.where(request < 0, 0, WINDOWS * compress_ratio)
    first = tl.minimum(tl.maximum(-origin, 0), end)
    held = tl.minimum(tl.maximum(before - origin, first), end)
    lap = (origin + first) // ring_rows * ring_rows
    turn = tl.minimum(lap + ring_rows - origin, held)  # where the ring begins anew
    straight = tiles_between(first, turn, compress_ratio, ROWS)
    wrapped = tiles_between(turn, held, compress_ratio, ROWS)
    ring = (tl.maximum(request, 0).to(tl.int64) * ring_rows + origin - lap) * (WINDOWS * D)
    for step in range(straight + wrapped):
        again = step >= straight
        begin = tl.where(again, turn, first)
        at = ring - tl.where(again, ring_rows, 0).to(tl.int64) * (WINDOWS * D)
        top, weight, total = with_tile(
            top,
            weight,
            total,
            ring_kv_ptr + at,
            ring_score_ptr + at,
            tile_of(begin, compress_ratio, ROWS) + step - tl.where(again, straight, 0),
            begin,
            tl.where(again, held, turn),
            compress_ratio,
            D,
            WINDOWS,
            ROWS,
        )
    at = (first_row + origin - before).to(tl.int64) * (WINDOWS * D)
    fresh = tile_of(held, compress_ratio, ROWS)
    for tile in range(fresh, fresh + tiles_between(held, end, compress_ratio, ROWS)):
        top, weight, total = with_tile(
            top, weight, total, kv_ptr + at, score_ptr + at, tile, held, end, compress_ratio, D, WINDOWS, ROWS
        )
    return tl.where(request < 0, 0.0, total / tl.where(request < 0, 1.0, weight))


@triton.jit(do_not_specialize=["num_entries", "ring_rows", "compress_ratio", "eps"])
def pooled_entries_kernel(
    kv_ptr,
    score_ptr,
    ring_kv_ptr,
    ring_score_ptr,
    entry_requests_ptr,
    entry_indices_ptr,
    query_start_loc_ptr,
    num_computed_tokens_ptr,
    norm_weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_entries,
    ring_rows,
    compress_ratio,
    eps,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    WINDOWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Entries [num_entries, D] of rows [., WINDOWS * D] float32: pooled, normed, their last PAIRS pairs turned.

    The table [num_entries, 2 * PAIRS] has the cosine of a pair twice, and its sine with both signs. NaN in a row that
    an entry pools is in the entry; what no entry pools is not read. Scores lie above -1e30, or are -inf. D is a power
    of two: where channels are masked the adapter crashes, not always, on the store. A pair's other half comes by a
    gather: where one is split off, the A2 compiler lays out every tile of the loops by pairs, and none fits.
    """
    PLAIN: tl.constexpr = D - 2 * PAIRS
    channels = tl.arange(0, D)
    partners = channels + 1 - 2 * (channels & 1)
    turning = channels >= PLAIN
    weight = tl.load(norm_weight_ptr + channels).to(tl.float32)
    for entry in range(tl.program_id(0), num_entries, tl.num_programs(0)):
        request = tl.load(entry_requests_ptr + entry)
        values = pooled_row(
            kv_ptr,
            score_ptr,
            ring_kv_ptr,
            ring_score_ptr,
            request,
            tl.load(entry_indices_ptr + entry),
            tl.load(num_computed_tokens_ptr + tl.maximum(request, 0)),
            tl.load(query_start_loc_ptr + tl.maximum(request, 0)),
            ring_rows,
            compress_ratio,
            D,
            WINDOWS,
            ROWS,
        )
        values = values / tl.sqrt(tl.sum(values * values, 0) / D + eps) * weight
        if PAIRS > 0:
            at = tl.cast(entry, tl.int64) * (2 * PAIRS) - PLAIN
            cos = tl.load(cos_ptr + at + channels, mask=turning, other=1.0)
            sin = tl.load(sin_ptr + at + channels, mask=turning, other=0.0)
            turned = values * cos + tl.gather(values, partners, 0) * sin
            values = tl.where(turning, turned, values)
        out = out_ptr + tl.cast(entry, tl.int64) * D
        tl.store(out + channels, values.to(out_ptr.dtype.element_ty))


SIGNATURE = {
    **dict.fromkeys(("kv_ptr", "score_ptr", "ring_kv_ptr", "ring_score_ptr"), "*fp32"),
    **dict.fromkeys(("entry_requests_ptr", "entry_indices_ptr", "query_start_loc_ptr"), "*i32"),
    "num_computed_tokens_ptr": "*i32",
    **dict.fromkeys(("norm_weight_ptr", "cos_ptr", "sin_ptr", "out_ptr"), "*fp32"),
    **dict.fromkeys(("num_entries", "ring_rows", "compress_ratio"), "i32"),
    "eps": "fp32",
}


def compilations(family: str) -> list[Compilation]:
    """What the compressors of DeepSeek-V4 compile, with and without channels that turn."""
    tiles, made = TILES[family], []
    for channels, ratio, windows in ((512, 4, 2), (512, 128, 1), (128, 4, 2), (128, 128, 1)):
        for pairs, kind in ((32, "*bf16"), (32, "*fp32"), (0, "*bf16")):
            name = f"compressor/{channels} channels, ratio {ratio}, {pairs} pairs, {kind[1:]}"
            constants = entry_constants(channels, pairs, windows, tiles[entry_key(channels, ratio)])
            signature = SIGNATURE | {"norm_weight_ptr": kind, "out_ptr": kind}
            made.append(Compilation(name, pooled_entries_kernel, signature, constants))
    return made
