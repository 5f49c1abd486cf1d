"""Partial RoPE: the last channels of every head turn in neighbouring pairs, or the first ones as two halves.

The others stay or are copied.
"""

from itertools import product
from typing import Any

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation

__all__ = ["TILES", "compilations", "constants_of", "key_of", "rope_kernel"]

PLAIN_TILE = 512  # channels that are copied at a time

# (pairs that turn, rounded up to a power of two; bytes of a number): heads of tokens that turn at a time.
ASCEND = {
    (pairs, size): min(32, 1024 // pairs) * 2 // size for pairs in (1, 2, 4, 8, 16, 32, 64, 128) for size in (2, 4)
}
TILES: dict[str, dict[tuple[int, int], dict[str, int]]] = {
    "a2": {key: {"rows": rows} for key, rows in ASCEND.items()},
    "a5": {key: {"rows": rows} for key, rows in ASCEND.items()},
    "cuda": {key: {"rows": min(16, rows), "num_warps": 4} for key, rows in ASCEND.items()},
}


@triton.jit
def turned(x, cos, sin):
    """The pairs (2i, 2i + 1) of x [tokens, heads, 2 * pairs], turned by angle i of the token's row of the table.

    Numbers are rearranged in their own dtype: the A5 compiler asserts on float32 made from 64 channels of bfloat16.
    """
    tokens: tl.constexpr = x.shape[0]
    heads: tl.constexpr = x.shape[1]
    pairs: tl.constexpr = x.shape[2] // 2
    even, odd = tl.split(tl.reshape(x, [tokens, heads, pairs, 2]))
    a = even.to(tl.float32)
    b = odd.to(tl.float32)
    c = cos[:, None, :]
    s = sin[:, None, :]
    return tl.interleave((a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype))


@triton.jit(do_not_specialize=["num_tokens"])
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HALVES: tl.constexpr,
    INVERSE: tl.constexpr,
    COPY: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    PLAIN_TILE: tl.constexpr,
):
    """x [num_tokens, HEADS, WIDTH] with its last 2 * PAIRS channels turned, by a float32 table [num_tokens, PAIRS].

    With HALVES the first 2 * PAIRS turn, channel i with channel PAIRS + i. With COPY the plain channels are written as
    well; without, ``out_ptr`` is ``x_ptr`` and they are not touched. NaN and inf spread within their pair only. Any
    number of tokens, heads and channels: what a tile lacks is masked.
    """
    head_blocks: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    plain: tl.constexpr = WIDTH - 2 * PAIRS
    first_plain: tl.constexpr = 2 * PAIRS if HALVES else 0
    token_places = tl.arange(0, TOKEN_TILE)
    head_places = tl.arange(0, HEAD_TILE)
    pair_places = tl.arange(0, PAIR_TILE)
    turning_places = tl.arange(0, 2 * PAIR_TILE)
    rows = token_places[:, None] * (HEADS * WIDTH) + head_places[None, :] * WIDTH
    angles = token_places[:, None] * PAIRS + pair_places[None, :]
    num_tasks = (num_tokens + TOKEN_TILE - 1) // TOKEN_TILE * head_blocks
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        token = task // head_blocks * TOKEN_TILE
        head = task % head_blocks * HEAD_TILE
        start = tl.cast(token, tl.int64) * (HEADS * WIDTH) + head * WIDTH
        there = (token_places < num_tokens - token)[:, None]
        row_there = there
        if HEADS % HEAD_TILE != 0:
            row_there = there & (head_places < HEADS - head)[None, :]
        if COPY:
            for first in tl.static_range(0, plain, PLAIN_TILE):
                channels = first + tl.arange(0, PLAIN_TILE)
                copied = row_there[:, :, None]
                if plain - first < PLAIN_TILE:
                    copied = copied & (channels < plain)[None, None, :]
                places = start + first_plain + rows[:, :, None] + channels[None, None, :]
                tl.store(out_ptr + places, tl.load(x_ptr + places, mask=copied), mask=copied)
        known = there
        if PAIRS != PAIR_TILE:
            known = known & (pair_places < PAIRS)[None, :]
        table = tl.cast(token, tl.int64) * PAIRS + angles
        cos = tl.load(cos_ptr + table, mask=known, other=0.0)
        sin = tl.load(sin_ptr + table, mask=known, other=0.0)
        if INVERSE:
            sin = -sin
        turning = row_there[:, :, None]
        if HALVES:
            if PAIRS != PAIR_TILE:
                turning = turning & (pair_places < PAIRS)[None, None, :]
            places = start + rows[:, :, None] + pair_places[None, None, :]
            x = tl.load(x_ptr + places, mask=turning, other=0.0)
            a = x.to(tl.float32)
            b = tl.load(x_ptr + PAIRS + places, mask=turning, other=0.0).to(tl.float32)
            c = cos[:, None, :]
            s = sin[:, None, :]
            tl.store(out_ptr + places, (a * c - b * s).to(x.dtype), mask=turning)
            tl.store(out_ptr + PAIRS + places, (b * c + a * s).to(x.dtype), mask=turning)
        else:
            if PAIRS != PAIR_TILE:
                turning = turning & (turning_places < 2 * PAIRS)[None, None, :]
            places = start + plain + rows[:, :, None] + turning_places[None, None, :]
            x = tl.load(x_ptr + places, mask=turning, other=0.0)
            tl.store(out_ptr + places, turned(x, cos, sin), mask=turning)


def key_of(pairs: int, size: int) -> tuple[int, int]:
    """What the tile depends on: the pairs that turn and the bytes of a number."""
    return triton.next_power_of_2(pairs), size


def constants_of(
    heads: int, width: int, pairs: int, rows: int, *, inverse: bool, copy: bool, halves: bool = False
) -> dict[str, int | bool]:
    """The constexprs of a launch, of a tile with so many rows, heads of one token first."""
    head_tile = min(triton.next_power_of_2(heads), rows)
    plain = max(width - 2 * pairs, 1)
    return {
        "HEADS": heads,
        "WIDTH": width,
        "PAIRS": pairs,
        "HALVES": halves,
        "INVERSE": inverse,
        "COPY": copy,
        "TOKEN_TILE": rows // head_tile,
        "HEAD_TILE": head_tile,
        "PAIR_TILE": triton.next_power_of_2(pairs),
        "PLAIN_TILE": min(triton.next_power_of_2(plain), PLAIN_TILE),
    }


def compilations(family: str) -> list[Compilation]:
    """Every head count of the model and of its shares, both head widths, both forms; every tile of other pairs.

    In halves the index vectors of V3.2, and every tile.
    """
    model = product((1, 8, 16, 32, 64, 128), ((512, 32), (128, 32)), ("bf16", "fp32"), (False, True))
    found = [compilation(family, heads, *widths, dtype, copy, False) for heads, widths, dtype, copy in model]
    for pairs, size in TILES[family]:
        found.append(compilation(family, 3, 2 * pairs + 7, pairs, "fp16" if size == 2 else "fp32", True, False))
    for heads, width, pairs in ((64, 512, 32), (5, 20, 3), (40, 576, 32)):
        found.append(compilation(family, heads, width, pairs, "fp16", True, True))
    for heads, dtype in product((1, 64), ("bf16", "fp32")):
        found.append(compilation(family, heads, 128, 32, dtype, True, False, halves=True))
    for pairs, size in TILES[family]:
        dtype = "fp16" if size == 2 else "fp32"
        found.append(compilation(family, 3, 2 * pairs + 7, pairs, dtype, True, False, halves=True))
    return found


def compilation(
    family: str, heads: int, width: int, pairs: int, dtype: str, copy: bool, inverse: bool, halves: bool = False
) -> Compilation:
    """One of them."""
    pointers: dict[str, Any] = {"x_ptr": f"*{dtype}", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "out_ptr": f"*{dtype}"}
    rows = TILES[family][key_of(pairs, 4 if dtype == "fp32" else 2)]["rows"]
    form = f"{'back' if inverse else 'forth'} {'copied' if copy else 'in place'}"
    return Compilation(
        f"rope/{heads} x {width}, {pairs} pairs {dtype} {form}{' in halves' if halves else ''}",
        rope_kernel,
        {**pointers, "num_tokens": "i32"},
        constants_of(heads, width, pairs, rows, inverse=inverse, copy=copy, halves=halves),
    )
