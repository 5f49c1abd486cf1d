"""Attention of every query over the latents that it chose, each key and value of all heads, a rope key beside it.

A token's latent meets the queries that `absorbed_queries` took into its space, its rope key their turned channels; what
comes out is a sum of latents. Lists hold slots of both caches, whose pages lie alike, and are those of `attention`:
what is not a key is the complement ``~slot`` of one that the query chose. It is read, counts for nothing, and so no row
is ever read that the query did not choose, and no load needs a mask.
"""

from itertools import product
from typing import Any

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation
from dsacp_npu.kernels.attention import HIDDEN, LN2, exponential
from dsacp_npu.kernels.attention_slots import chosen_slots_kernel
from dsacp_npu.kernels.attention_tiles import LARGEST_TABLE, Tile

__all__ = ["RANKS", "ROPE_DIMS", "TILES", "compilations", "latents_kernel", "switches", "tile_key"]

RANKS = (16, 32, 64, 128, 256, 512)  # widths of a latent that the tiles were checked for
ROPE_DIMS = (16, 32, 64)  # and of a rope key
LEAST_HALVED = 256  # shorter latents are whole where a tile holds them in halves

# By heads, of which more are several blocks, and by bytes of a number.
TILES: dict[str, dict[tuple[int, int], Tile]] = {
    "a2": {
        (16, 2): Tile(16, 64),
        (32, 2): Tile(32, 64, 2),
        (64, 2): Tile(32, 64, 2),
        (16, 4): Tile(16, 32),
        (32, 4): Tile(32, 32, 2),
        (64, 4): Tile(32, 32, 2),
    },
    "a5": {
        (16, 2): Tile(16, 64),
        (32, 2): Tile(32, 32),
        (64, 2): Tile(32, 32),
        (16, 4): Tile(16, 32),
        (32, 4): Tile(32, 32),
        (64, 4): Tile(32, 32),
    },
    "cuda": {
        (16, 2): Tile(16, 64, 2, warps=4, stages=2, waves=0),
        (32, 2): Tile(32, 64, 2, warps=8, stages=2, waves=0),
        (64, 2): Tile(64, 64, 2, warps=8, stages=2),
        **{(heads, 4): Tile(16, 16, warps=4, stages=2, waves=0) for heads in (16, 32, 64)},
    },
}


@triton.jit
def tile_added(
    slots,
    latent_ptr,
    rope_ptr,
    q0,
    q1,
    q_rope,
    sum0,
    sum1,
    total,
    highest,
    scale,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    PARTS: tl.constexpr,
    BASE2: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Weighted sums of latents, sums of weights, and the highest logit, with one tile of keys more."""
    DC: tl.constexpr = D // PARTS
    rows = tl.maximum(slots, -1 - slots)
    if WIDE:
        rows = rows.to(tl.int64)
    rope_keys = tl.load(rope_ptr + rows[:, None] * ROPE + tl.arange(0, ROPE)[None, :])
    part_ptr = latent_ptr + rows[:, None] * D + tl.arange(0, DC)[None, :]
    part0 = tl.load(part_ptr)
    if PARTS > 1:
        part1 = tl.load(part_ptr + DC)
    logits = tl.dot(q_rope, tl.trans(rope_keys), input_precision="ieee")
    logits = tl.dot(q0, tl.trans(part0), logits, input_precision="ieee")
    if PARTS > 1:
        logits = tl.dot(q1, tl.trans(part1), logits, input_precision="ieee")
    logits = logits * scale + tl.where(slots >= 0, 0.0, HIDDEN)[None, :]
    risen = tl.maximum(highest, tl.max(logits, 1))
    weights = exponential(logits - risen[:, None], BASE2)
    shrink = exponential(highest - risen, BASE2)
    total = total * shrink + tl.sum(weights, 1)
    short = weights.to(part0.dtype)
    sum0 = tl.dot(short, part0, sum0 * shrink[:, None], input_precision="ieee")
    if PARTS > 1:
        sum1 = tl.dot(short, part1, sum1 * shrink[:, None], input_precision="ieee")
    return sum0, sum1, total, risen


@triton.jit(do_not_specialize=["num_tasks", "list_stride"])
def latents_kernel(
    q_ptr,
    q_rope_ptr,
    latent_ptr,
    rope_ptr,
    slot_ptr,
    count_ptr,
    out_ptr,
    lse_ptr,
    num_tasks,
    list_stride,
    scale,
    H: tl.constexpr,
    BH: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    BASE2: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Output and lse of one block of ``BH`` heads of one query a task, over ``count_ptr[query]`` places of its list.

    Lists are as wide as whole tiles of ``BK`` keys. ``scale`` holds log2(e) as well with ``BASE2``. NaN and inf in rows
    that a query chose reach all its heads as 0 * NaN does; others reach nothing. A query that chose nothing gets 0 and
    -inf. On an NPU one vector core of two idles: it fetches rows by list, which cannot be split over both. Limits:
    lists of int32 slots; with ``WIDE`` caches of 2 ** 31 numbers and more.
    """
    BLOCKS: tl.constexpr = (H + BH - 1) // BH
    DC: tl.constexpr = D // PARTS
    lanes = tl.arange(0, BK)
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        query = task // BLOCKS
        heads = task % BLOCKS * BH + tl.arange(0, BH)
        # Heads that pad a tile hold anything: no row of a product depends on another, and they are not stored.
        there = heads < H if H % BH else None
        all_there = there[:, None] if H % BH else None
        first_head = tl.cast(query, tl.int64) * H
        numbers = heads[:, None] * D + tl.arange(0, DC)[None, :]
        q_part_ptr = q_ptr + first_head * D + numbers
        q0 = tl.load(q_part_ptr, mask=all_there)
        q1 = tl.load(q_part_ptr + DC, mask=all_there) if PARTS > 1 else q0
        turned = heads[:, None] * ROPE + tl.arange(0, ROPE)[None, :]
        q_rope = tl.load(q_rope_ptr + first_head * ROPE + turned, mask=all_there)
        sum0 = tl.zeros([BH, DC], tl.float32)
        sum1 = tl.zeros([BH, DC], tl.float32) if PARTS > 1 else sum0
        total = tl.zeros([BH], tl.float32)
        highest = tl.full([BH], HIDDEN, tl.float32)
        chosen = slot_ptr + tl.cast(query, tl.int64) * list_stride
        for start in tl.range(0, tl.load(count_ptr + query), BK, num_stages=STAGES):
            slots = tl.load(chosen + start + lanes)
            sum0, sum1, total, highest = tile_added(
                slots,
                latent_ptr,
                rope_ptr,
                q0,
                q1,
                q_rope,
                sum0,
                sum1,
                total,
                highest,
                scale,
                D,
                ROPE,
                PARTS,
                BASE2,
                WIDE,
            )
        share = 1.0 / tl.where(total == 0, 1.0, total)  # without keys sums are 0; a NaN in a total stays one
        natural = highest * LN2 if BASE2 else highest
        lse = tl.where(total == 0, float("-inf"), natural + tl.log(total))
        tl.store(lse_ptr + first_head + heads, lse, mask=there)
        out_part_ptr = out_ptr + first_head * D + numbers
        tl.store(out_part_ptr, (sum0 * share[:, None]).to(q0.dtype), mask=all_there)
        if PARTS > 1:
            tl.store(out_part_ptr + DC, (sum1 * share[:, None]).to(q0.dtype), mask=all_there)


def tile_key(num_heads: int, size: int) -> tuple[int, int]:
    """What the tables are asked for: heads, and bytes of a number."""
    return 16 if num_heads <= 16 else 32 if num_heads <= 32 else 64, size


def switches(family: str, tile: Tile, **sizes: Any) -> dict[str, Any]:
    """The constexprs of a launch that follow from its family and tile, beside these sizes."""
    return {
        **sizes,
        "BH": tile.heads,
        "BK": tile.keys,
        "PARTS": tile.parts if sizes["D"] >= LEAST_HALVED else 1,
        "BASE2": family == "cuda",
        "STAGES": max(1, tile.stages),
    }


def compilations(family: str) -> list[Compilation]:
    """Every head count in bf16 and fp32, for one of them every other switch; and the lists, which are long here."""
    found = [compilation(family, heads, dtype) for heads, dtype in product((8, 16, 32, 64, 128), ("bf16", "fp32"))]
    found += [compilation(family, 128, dtype, wide=True) for dtype in ("bf16", "fp32")]
    found += [compilation(family, 128, "bf16", rank=rank) for rank in RANKS[:-1]]
    found += [compilation(family, 128, "bf16", rope=rope) for rope in ROPE_DIMS[:-1]]
    found.append(compilation(family, 128, "fp16"))
    lists = ("table_ptr", "row_ptr", "position_ptr", "chosen_ptr", "slots_ptr", "count_ptr")
    return found + [
        Compilation(
            f"chosen slots/2048 of {blocks or 'any number of'} blocks",
            chosen_slots_kernel,
            {**dict.fromkeys(lists, "*i32"), "num_queries": "i32", "table_stride": "i32"},
            {"CHOSEN": 2048, "WIDTH": 2048, "SHIFT": 6, "PITCH": 64, "BLOCKS": blocks},
        )
        for blocks in ((0,) if family == "cuda" else (0, LARGEST_TABLE))
    ]


def compilation(
    family: str, num_heads: int, dtype: str, *, rank: int = 512, rope: int = 64, wide: bool = False
) -> Compilation:
    """One of them."""
    tile = TILES[family][tile_key(num_heads, 4 if dtype == "fp32" else 2)]
    floats = dict.fromkeys(("q_ptr", "q_rope_ptr", "latent_ptr", "rope_ptr"), f"*{dtype}")
    words = [f"{num_heads} heads", f"{rank} + {rope} channels", dtype, *(["wide"] if wide else [])]
    return Compilation(
        "latents/" + ", ".join(words),
        latents_kernel,
        {
            **floats,
            "slot_ptr": "*i32",
            "count_ptr": "*i32",
            "out_ptr": f"*{dtype}",
            "lse_ptr": "*fp32",
            "num_tasks": "i32",
            "list_stride": "i32",
            "scale": "fp32",
        },
        switches(family, tile, H=num_heads, D=rank, ROPE=rope, WIDE=wide),
    )
