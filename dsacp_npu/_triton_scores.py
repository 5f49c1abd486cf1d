"""Index scores over Triton: as functions of the mirror, and a slice of queries at a time from a paged cache.

A step's scores, all at once, would be the largest array of a model, so a choice is made from slices: the caller sizes
one buffer from numbers that the host has, scores some queries into it, chooses, and goes on. Nothing here waits.
"""

from __future__ import annotations

from typing import NamedTuple

from dsacp_npu._index_calls import check_queries, parts_of
from dsacp_npu._tensors import Float, Int32, check_tensor, computing_dtype, dtype_name, torch
from dsacp_npu._triton_launch import programs_for, tile_for
from dsacp_npu.kernels.scores import CODECS, HEADS, ONE_BLOCK, TILES, WIDTH, Tile, scores_kernel, tile_within
from dsacp_npu.quant import QuantizedVectors, checked_codes
from dsacp_ref.spec import UnsupportedError, contract_error

__all__ = ["index_scores", "index_scores_slice", "int8_index_scores", "score_columns"]

KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv"}
WIDE_NUMBERS = 1 << 31  # of a cache, from which on an offset does not fit int32
TASKS_A_PROGRAM = 4  # to be had by sharing out keys where queries are few
TILES_A_TASK = 4  # at least, for queries are loaded anew
RESIDENT = 3  # programs that a multiprocessor of a GPU runs at a time


def index_scores(index_q: Float, index_weights: Float, index_keys: Float) -> Float:
    """`dsacp_npu.indexer.index_scores` by the kernel.

    Limits: bfloat16 or float16; 64 heads of 128 channels; at most 2**24 keys.
    """
    check_queries(index_q, index_weights)
    dtypes = (dtype_name(index_q),)
    check_tensor("index_keys", index_keys, dtypes, ("num_keys", index_q.shape[2]), "as wide as the queries")
    if 0 in (index_q.numel(), len(index_keys)):
        return index_q.new_zeros(len(index_q), len(index_keys), dtype=computing_dtype(index_q.dtype))
    return dense_scores(index_q, index_weights, index_keys)


def int8_index_scores(
    index_q: QuantizedVectors, index_weights: torch.Tensor, index_keys: QuantizedVectors
) -> torch.Tensor:
    """`dsacp_npu.quant.int8_index_scores` by the kernel.

    Limits: 64 heads of 128 channels; at most 2**24 keys.
    """
    q, q_scales = checked_codes("index_q", index_q)
    keys, _ = checked_codes("index_keys", index_keys)
    if q.ndim != 3 or keys.ndim != 2 or q.shape[2] != keys.shape[1]:
        raise contract_error(
            "index_q", "hold [tokens, heads, d] against keys [keys, d]", f"{list(q.shape)} and {list(keys.shape)}"
        )
    check_tensor("index_weights", index_weights, ("float16",), tuple(q_scales.shape), "one weight a head")
    if 0 in (*q.shape[:2], len(keys)):
        return q_scales.new_zeros(len(q), len(keys), dtype=torch.float32)
    return dense_scores(index_q, index_weights, index_keys)


def score_columns(index_cache: Float | QuantizedVectors, block_table: Int32) -> int:
    """How many columns a buffer for the scores against this cache needs: whole tiles of all that its table can name."""
    values = parts_of(index_cache)[0]
    longest = tiles_for(values, together=True)[0].keys
    return -(-block_table.shape[1] * values.shape[1] // longest) * longest


def index_scores_slice(
    queries: Float | QuantizedVectors,
    weights: torch.Tensor,
    index_cache: Float | QuantizedVectors,
    block_table: Int32,
    rows: Int32,
    num_visible: Int32,
    first: int,
    count: int,
    out: torch.Tensor,
) -> None:
    """The scores of the queries [first, first + count) against the cache's keys, into the first rows of ``out``.

    Row i holds query ``first + i``. Columns below ``num_visible[first + i]`` are its scores, NaN as -inf; the rest of
    the last tile that is written is -inf; what lies behind is not written, nor is the row of a query without a row.

    Args:
        queries: bfloat16 or float16 [num_queries, 64, 128]; or coded, scales [num_queries, 64]: int8 with float16, or
            on a GPU float8_e4m3fn with float32.
        weights: [num_queries, 64]: dtype of ``queries``; float16 for int8, float32 for float8.
        index_cache: [num_blocks, block_size, 128], contiguous, of the queries' kind; scales [num_blocks, block_size].
        block_table: int32[operator rows, max_blocks]; what is behind a row's visible entries is not read.
        rows: int32[num_queries], as `dsacp_npu.extents.query_rows` gives them.
        num_visible: int32[num_queries], not decreasing within an operator row; 0 where no row is.
        first: int, first query of the slice.
        count: int, queries of the slice.
        out: float32[>= count, >= score_columns(index_cache, block_table)], contiguous.

    Limits: a block size that is a power of two; a table that can name at most 2**24 entries.
    """
    q, values = parts_of(queries)[0], parts_of(index_cache)[0]
    block_size = values.shape[1]
    capacity = block_table.shape[1] * block_size
    check_sizes(q, capacity)
    check_blocks(index_cache)
    if 0 in (count, capacity, len(block_table)):
        return
    tile = tile_within(tiles_for(values, together=len(q) >= 2 * len(block_table)), block_size)
    call = Scoring(queries, weights, index_cache, block_table, rows, num_visible)
    launch(call, tile, first, count, out, block_shift=block_size.bit_length() - 1, ranked=True)


class Scoring(NamedTuple):
    """Queries and where their keys lie, as `index_scores_slice` takes them."""

    queries: Float | QuantizedVectors
    weights: torch.Tensor
    index_cache: Float | QuantizedVectors
    block_table: Int32
    rows: Int32
    num_visible: Int32


def dense_scores(
    queries: Float | QuantizedVectors, weights: torch.Tensor, index_keys: Float | QuantizedVectors
) -> torch.Tensor:
    """Every query against every key: keys as the one block of one operator row, NaN as it comes."""
    q, parts = parts_of(queries)[0], parts_of(index_keys)
    num_keys = len(parts[0])
    check_sizes(q, num_keys)
    tile = tiles_for(parts[0], together=True)[0]
    missing = -num_keys % tile.keys  # a tile is read as a whole
    block = [torch.cat([part, part.new_zeros(missing, *part.shape[1:])])[None] for part in parts]
    rows = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    out = torch.empty(len(q), num_keys + missing, dtype=torch.float32, device=q.device)
    cache = QuantizedVectors(*block) if len(block) == 2 else block[0]
    call = Scoring(queries, weights, cache, rows[:1, None], rows, torch.full_like(rows, num_keys))
    launch(call, tile, 0, len(q), out, block_shift=ONE_BLOCK, ranked=False)
    return out[:, :num_keys]


def launch(
    call: Scoring, tile: Tile, first: int, count: int, out: torch.Tensor, *, block_shift: int, ranked: bool
) -> None:
    """The kernel over as many programs as fill the device; keys are shared out where blocks of queries are fewer."""
    q, *q_scales = parts_of(call.queries)
    values, *scales = parts_of(call.index_cache)
    num_blocks = -(-count // tile.queries)
    programs = programs_for(out, cube=True, waves=tile.waves or RESIDENT)
    most = max(1, out.shape[1] // (tile.keys * TILES_A_TASK))
    num_splits = min(-(-TASKS_A_PROGRAM * programs // num_blocks), most)
    num_tasks = num_blocks * num_splits
    scores_kernel[(min(programs, num_tasks) if tile.waves else num_tasks,)](
        q.contiguous(),
        q_scales[0].contiguous() if q_scales else None,
        call.weights.contiguous(),
        values,
        scales[0] if scales else None,
        call.block_table.contiguous(),
        call.rows,
        call.num_visible,
        out,
        first,
        count,
        num_splits,
        call.block_table.shape[1],
        out.shape[1],
        HEADS=HEADS,
        WIDTH=WIDTH,
        BQ=tile.queries,
        BN=tile.keys,
        BLOCK_SHIFT=block_shift,
        CODEC=CODECS[KINDS[q.dtype]],
        RANKED=ranked,
        WIDE=values.numel() >= WIDE_NUMBERS,
        **tile.options,
    )


def check_sizes(q: torch.Tensor, num_entries: int) -> None:
    """Refuse what no tile was made for."""
    if q.shape[1:] != (HEADS, WIDTH):
        raise UnsupportedError(
            f"backend 'triton' scores {HEADS} index heads of {WIDTH} channels, got {q.shape[1]} of {q.shape[2]}; "
            "use backend 'torch'"
        )
    if num_entries > 1 << ONE_BLOCK:
        raise UnsupportedError(
            f"backend 'triton' scores at most {1 << ONE_BLOCK} entries of a query, got room for {num_entries}; "
            "use narrower tables, or backend 'torch'"
        )


def check_blocks(index_cache: Float | QuantizedVectors) -> None:
    """Refuse a cache whose rows no shift finds."""
    block_size = parts_of(index_cache)[0].shape[1]
    if block_size & (block_size - 1):
        raise UnsupportedError(
            f"backend 'triton' reads index keys in blocks of a power of two, got blocks of {block_size}; "
            "use backend 'torch' or 'cann'"
        )
    for part in parts_of(index_cache):
        if not part.is_contiguous():
            raise UnsupportedError(
                f"backend 'triton' reads index keys and scales that lie without gaps, got strides {part.stride()}; "
                "give each a tensor of its own, or use backend 'torch'"
            )


def tiles_for(keys: torch.Tensor, *, together: bool) -> tuple[Tile, ...]:
    """The tiles for keys of this dtype on their device, from the longest on."""
    if keys.dtype not in KINDS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in KINDS)
        raise UnsupportedError(
            f"backend 'triton' scores index keys of {names}, got {dtype_name(keys)}; use backend 'torch'"
        )
    tiles: tuple[Tile, ...] = tile_for(TILES, keys, "index scores", (KINDS[keys.dtype], together))
    return tiles
