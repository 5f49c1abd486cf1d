"""Scores of the lightning indexer: what every query thinks of every entry it may see, for a slice of queries.

Keys are the rows of the product and the heads of a few queries its columns, so that a tile of keys serves them all and
the sum over heads runs along the last axis::

    keys [BN, WIDTH] . heads^T [WIDTH, BQ * HEADS]  ->  relu, times weights  ->  [BN, BQ, HEADS]  ->  sum  ->  [BQ, BN]

Turned around before they are masked, the sums lie as an Ascend vector core wants them: entries along the last axis.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation

__all__ = ["CODECS", "HEADS", "ONE_BLOCK", "TILES", "WIDTH", "Tile", "compilations", "scores_kernel", "tile_within"]

HEADS, WIDTH = 64, 128  # the sizes that the tiles were checked for
ONE_BLOCK = 24  # log2 of a block that holds any row of entries: so many are told apart in float32
CODECS = {"bf16": "float", "fp16": "float", "i8": "int8", "fp8e4nv": "fp8"}  # of queries and keys of these types


class Tile(NamedTuple):
    """What a program works on at a time, and how it is launched.

    Fields:
        queries: queries that share a tile of keys.
        keys: keys of a tile.
        waves: programs a multiprocessor of a GPU; 0 is one program a task.
        options: launch options of a GPU.
    """

    queries: int
    keys: int
    waves: int = 1
    options: Mapping[str, int] = MappingProxyType({})


# Per type of queries and keys and by whether the queries of a row stand together or alone: tiles from the longest on.
ASCEND_TILES = {
    (kind, together): tuple(Tile(4 if together else 1, keys) for keys in (64, 32, 16))
    for kind in ("bf16", "fp16", "i8")
    for together in (True, False)
}
PIPELINED = MappingProxyType({"num_warps": 4, "num_stages": 3})
SHALLOW = MappingProxyType({"num_warps": 4, "num_stages": 2})
TILES: dict[str, dict[tuple[str, bool], tuple[Tile, ...]]] = {
    "a2": ASCEND_TILES,
    "a5": ASCEND_TILES,
    # A program a task: as many as fit run side by side, and one's arithmetic hides another's sums.
    "cuda": {
        **{(kind, False): (Tile(1, 64, 0, PIPELINED),) for kind in CODECS},
        **{(kind, True): (Tile(2, 64, 0, SHALLOW),) for kind in ("bf16", "fp16")},
        ("i8", True): (Tile(2, 64, 0, PIPELINED),),
        ("fp8e4nv", True): (Tile(2, 128, 0, PIPELINED), Tile(2, 64, 0, PIPELINED)),
    },
}


def tile_within(tiles: tuple[Tile, ...], block_size: int) -> Tile:
    """The longest tile that lies within a block, or the shortest."""
    return next((tile for tile in tiles if tile.keys <= block_size), tiles[-1])


@triton.jit
def run_in_block(rows_ptr, start, stop, row, BQ: tl.constexpr):
    """(first query, number) of the queries of one operator row within a block: they stand side by side."""
    first = start
    size = 0
    for i in tl.static_range(BQ):
        if start + i < stop:
            other = tl.load(rows_ptr + start + i)
            first += ((other >= 0) & (other < row)).to(tl.int32)
            size += (other == row).to(tl.int32)
    return first, size


@triton.jit
def last_row_of_block(rows_ptr, start, stop, BQ: tl.constexpr):
    """The last operator row that has a query within a block; -1 without any."""
    last = tl.load(rows_ptr + start)
    for i in tl.static_range(1, BQ):
        if start + i < stop:
            last = tl.maximum(last, tl.load(rows_ptr + start + i))
    return last


@triton.jit
def blocks_of_tile(table, n, last, BN: tl.constexpr, BLOCK_SHIFT: tl.constexpr):
    """The block of a tile of keys from n on that lies within one, or else the block of each key.

    Keys that nobody sees are read from the block of the last that is seen: what the table holds behind that need not be
    a block.
    """
    entries = n
    if BN > 1 << BLOCK_SHIFT:
        entries += tl.arange(0, BN)
    return tl.load(table + (tl.maximum(tl.minimum(entries, last - 1), 0) >> BLOCK_SHIFT))


@triton.jit
def slots_of_tile(blocks, n, BN: tl.constexpr, BLOCK_SHIFT: tl.constexpr, WIDE: tl.constexpr):
    """(slot, offsets) of the keys of a tile in these blocks: their sums are the rows of the cache where they lie."""
    keys = tl.arange(0, BN)
    if BN <= 1 << BLOCK_SHIFT:
        slot = (blocks.to(tl.int64) << BLOCK_SHIFT) + (n & ((1 << BLOCK_SHIFT) - 1))
        offsets = keys
    else:
        slot = 0
        offsets = (blocks << BLOCK_SHIFT) + ((n + keys) & ((1 << BLOCK_SHIFT) - 1))
        if WIDE:
            offsets = offsets.to(tl.int64)
    return slot, offsets


@triton.jit
def head_gains(weights_ptr, q_scales_ptr, heads, valid, CODEC: tl.constexpr):
    """What the hits of each head count: its weight, times the scale of its query where queries are coded."""
    gains = tl.load(weights_ptr + heads, mask=valid, other=0.0).to(tl.float32)
    if CODEC != "float":
        gains *= tl.load(q_scales_ptr + heads, mask=valid, other=0.0).to(tl.float32)
    if CODEC == "int8":
        gains = gains.to(tl.float16).to(tl.float32)  # of two float16, so this rounds as their product in float16 does
    return gains


@triton.jit
def weighted_hits(dots, gains, CODEC: tl.constexpr):
    """The products after relu, weighted. NaN stays NaN."""
    hits = tl.maximum(dots.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)
    if CODEC == "int8":
        hits = (hits * (1 / 1024)).to(tl.float16).to(tl.float32)
    return hits * gains[None, :]


@triton.jit(do_not_specialize=["first", "count", "num_splits", "table_stride"])
def scores_kernel(
    q_ptr,
    q_scales_ptr,
    weights_ptr,
    keys_ptr,
    key_scales_ptr,
    table_ptr,
    rows_ptr,
    visible_ptr,
    out_ptr,
    first,
    count,
    num_splits,
    table_stride,
    out_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    CODEC: tl.constexpr,
    RANKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Scores of the queries [first, first + count) into rows 0 to count - 1 of out.

    A task is a block of BQ queries and one of num_splits shares of the key tiles, taken in turn; the queries of each
    operator row in it are served together. A row of out is written in whole tiles of BN entries up to the last entry
    that its neighbours in the block see: -inf for entries that the query does not see, nothing behind those tiles.

    Args:
        q_ptr: [num_queries, HEADS, WIDTH], of the keys' type.
        q_scales_ptr: [num_queries, HEADS], or None without a codec.
        weights_ptr: [num_queries, HEADS].
        keys_ptr: [num_blocks, 2**BLOCK_SHIFT, WIDTH].
        key_scales_ptr: [num_blocks, 2**BLOCK_SHIFT], or None.
        table_ptr: int32[operator rows, table_stride], blocks of each operator row.
        rows_ptr: int32[num_queries], operator row of each query, not decreasing; then -1.
        visible_ptr: int32[num_queries], entries seen, not decreasing within a row, at most 2**24.
        out_ptr: float32[count, out_stride].
        CODEC: "float"; "int8", with the roundings of the int8 operator; "fp8", scales multiplied in.
        RANKED: a NaN is written as -inf, which is how it counts in a choice.
        WIDE: the cache has 2**31 numbers or more.

    NaN in a key or query makes its scores NaN; NaN in a key that a query does not see leaves no trace. With blocks
    shorter than a tile, an Ascend core looks the table up entry by entry, in a scalar loop.
    """
    queries = tl.arange(0, BQ)
    heads = tl.arange(0, BQ * HEADS)
    channels = tl.arange(0, WIDTH)
    stop = first + count
    for task in range(tl.program_id(0), (count + BQ - 1) // BQ * num_splits, tl.num_programs(0)):
        start = first + task // num_splits * BQ
        lowest = tl.maximum(tl.load(rows_ptr + start), 0)
        for row in range(lowest, last_row_of_block(rows_ptr, start, stop, BQ) + 1):
            t, size = run_in_block(rows_ptr, start, stop, row, BQ)
            last = 0
            if size > 0:
                last = tl.load(visible_ptr + t + size - 1)
            mine = queries < size
            valid = heads < size * HEADS
            head = t.to(tl.int64) * HEADS
            q = tl.load(
                q_ptr + head * WIDTH + heads[:, None] * WIDTH + channels[None, :], mask=valid[:, None], other=0.0
            )
            q_scales = q_scales_ptr
            if CODEC != "float":
                q_scales = q_scales_ptr + head
            gains = head_gains(weights_ptr + head, q_scales, heads, valid, CODEC)
            # Compared in float32, which holds every number of an entry exactly (ONE_BLOCK).
            if BQ == 1:
                visible = tl.full([1], last, tl.float32)
            else:
                visible = tl.load(visible_ptr + t + queries, mask=mine, other=0).to(tl.float32)
            out = out_ptr + (t - first).to(tl.int64) * out_stride
            table = table_ptr + row * table_stride
            stride = num_splits * BN
            share = task % num_splits * BN
            # The table is asked a turn ahead: a GPU that has to wait for it fetches keys less far ahead.
            blocks = blocks_of_tile(table, share, last, BN, BLOCK_SHIFT)
            for n in range(share, last, stride):
                slot, offsets = slots_of_tile(blocks, n, BN, BLOCK_SHIFT, WIDE)
                blocks = blocks_of_tile(table, n + stride, last, BN, BLOCK_SHIFT)
                keys = tl.load(keys_ptr + slot * WIDTH + offsets[:, None] * WIDTH + channels[None, :])
                weighted = weighted_hits(tl.dot(keys, tl.trans(q)), gains, CODEC)
                scores = tl.trans(tl.sum(tl.reshape(weighted, [BN, BQ, HEADS]), 2))
                if CODEC != "float":
                    scores *= tl.load(key_scales_ptr + slot + offsets).to(tl.float32)[None, :]
                entries = n + tl.arange(0, BN)
                shown = entries.to(tl.float32)[None, :] < visible[:, None]
                if RANKED:
                    shown = shown & (scores == scores)
                scores = tl.where(shown, scores, float("-inf"))
                tl.store(out + queries[:, None] * out_stride + entries[None, :], scores, mask=mine[:, None])


def compilations(family: str) -> list[Compilation]:
    """Every tile in blocks that hold it, the shortest also across blocks, the longest for plain scores in one block."""
    found = []
    for (kind, together), tiles in TILES[family].items():
        found += [compilation(kind, tile, tile.keys.bit_length() - 1) for tile in tiles]
        found += [compilation(kind, tiles[-1], tiles[-1].keys.bit_length() - 2, wide=wide) for wide in (False, True)]
        if together:
            found.append(compilation(kind, tiles[0], ONE_BLOCK, ranked=False))
    return found


def compilation(kind: str, tile: Tile, block_shift: int, *, ranked: bool = True, wide: bool = False) -> Compilation:
    """One way in which the scores are launched."""
    codec = CODECS[kind]
    weights, scales = {"float": (kind, None), "int8": ("fp16", "fp16"), "fp8": ("fp32", "fp32")}[codec]
    pointers = {
        "q_ptr": kind,
        "q_scales_ptr": scales,
        "weights_ptr": weights,
        "keys_ptr": kind,
        "key_scales_ptr": scales,
        "table_ptr": "i32",
        "rows_ptr": "i32",
        "visible_ptr": "i32",
        "out_ptr": "fp32",
    }
    counts = ("first", "count", "num_splits", "table_stride", "out_stride")
    switches = {
        "HEADS": HEADS,
        "WIDTH": WIDTH,
        "BQ": tile.queries,
        "BN": tile.keys,
        "BLOCK_SHIFT": block_shift,
        "CODEC": codec,
        "RANKED": ranked,
        "WIDE": wide,
    }
    absent = {name: None for name, kind in pointers.items() if kind is None}
    words = (
        f"scores/{kind} {tile.queries}x{tile.keys}",
        f"blocks of {1 << block_shift}",
        "ranked" * ranked,
        "wide" * wide,
    )
    return Compilation(
        " ".join(filter(None, words)),
        scores_kernel,
        {name: f"*{kind}" for name, kind in pointers.items() if kind} | dict.fromkeys(counts, "i32"),
        absent | switches,
    )
