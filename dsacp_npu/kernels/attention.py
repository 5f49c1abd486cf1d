"""Attention of every query over lists of slots, with a sink: one vector a token is key and value of all heads.

A list holds slots of rows of a paged cache. What is not a key is the complement ``~slot`` of one that the query does
see: it is read, counts for nothing, and so no row is ever read that the query may not see. A NaN in such a row cannot
reach the output, and no load needs a mask.

Two forms of the softmax. ``FIXED`` sums ``exp(z)`` as it is: right while no ``|z|`` is beyond 70, and the sum of values
stays where the matrix unit left it. Otherwise a running maximum rescales it.
"""

from typing import Any

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation
from dsacp_npu.kernels.attention_tiles import HEAD_DIMS, TILES, Tile, tile_key

__all__ = ["attention_kernel", "compilations", "switches"]

HIDDEN: tl.constexpr = tl.constexpr(-1.0e30)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def exponential(x, BASE2: tl.constexpr):
    """``2 ** x`` or ``e ** x``: a GPU has an instruction for the first, an NPU for the second."""
    return tl.exp2(x) if BASE2 else tl.exp(x)


@triton.jit
def tile_added(
    slots,
    cache_ptr,
    q0,
    q1,
    q2,
    q3,
    sum0,
    sum1,
    sum2,
    sum3,
    total,
    highest,
    scale,
    D: tl.constexpr,
    FIXED: tl.constexpr,
    PARTS: tl.constexpr,
    BASE2: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Weighted sums of values, sums of weights, and the highest logit, with one tile of keys more."""
    DC: tl.constexpr = D // PARTS
    rows = tl.maximum(slots, -1 - slots)
    if WIDE:
        rows = rows.to(tl.int64)
    keys_ptr = cache_ptr + rows[:, None] * D + tl.arange(0, DC)[None, :]
    keys0 = tl.load(keys_ptr)
    if PARTS > 1:
        keys1 = tl.load(keys_ptr + DC)
    if PARTS > 2:
        keys2 = tl.load(keys_ptr + 2 * DC)
        keys3 = tl.load(keys_ptr + 3 * DC)
    logits = tl.dot(q0, tl.trans(keys0))
    if PARTS > 1:
        logits = tl.dot(q1, tl.trans(keys1), logits)
    if PARTS > 2:
        logits = tl.dot(q2, tl.trans(keys2), logits)
        logits = tl.dot(q3, tl.trans(keys3), logits)
    logits = logits * scale + tl.where(slots >= 0, 0.0, HIDDEN)[None, :]
    if FIXED:
        weights = exponential(logits, BASE2)
    else:
        risen = tl.maximum(highest, tl.max(logits, 1))
        weights = exponential(logits - risen[:, None], BASE2)
        shrink = exponential(highest - risen, BASE2)
        highest = risen
        total = total * shrink
        sum0 = sum0 * shrink[:, None]
        if PARTS > 1:
            sum1 = sum1 * shrink[:, None]
        if PARTS > 2:
            sum2 = sum2 * shrink[:, None]
            sum3 = sum3 * shrink[:, None]
    total += tl.sum(weights, 1)
    short = weights.to(keys0.dtype)
    sum0 = tl.dot(short, keys0, sum0)
    if PARTS > 1:
        sum1 = tl.dot(short, keys1, sum1)
    if PARTS > 2:
        sum2 = tl.dot(short, keys2, sum2)
        sum3 = tl.dot(short, keys3, sum3)
    return sum0, sum1, sum2, sum3, total, highest


@triton.jit
def share_and_lse(total, highest, sink, FIXED: tl.constexpr, BASE2: tl.constexpr):
    """What the sums of values are multiplied with, the sink being one more weight; and the lse without it.

    Without keys 1 and -inf: the sums are 0 then. A NaN in a total stays one.
    """
    sink = tl.where(sink < HIDDEN, HIDDEN, sink)  # -inf is no sink
    if FIXED:
        lse = tl.log(total)
        weight = total + tl.exp(sink)
    else:
        natural = highest * LN2 if BASE2 else highest
        lse = natural + tl.log(total)
        weight = total + tl.exp(sink - natural)
    return 1.0 / tl.where(total == 0, 1.0, weight), tl.where(total == 0, float("-inf"), lse)


@triton.jit(do_not_specialize=["num_tasks", "entry_stride"])
def attention_kernel(
    q_ptr,
    swa_ptr,
    cmp_ptr,
    window_ptr,
    entry_ptr,
    row_ptr,
    position_ptr,
    count_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    num_tasks,
    entry_stride,
    scale,
    H: tl.constexpr,
    BH: tl.constexpr,
    D: tl.constexpr,
    BK: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    ENTRIES: tl.constexpr,
    FIXED: tl.constexpr,
    PARTS: tl.constexpr,
    BASE2: tl.constexpr,
    WIDE: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Output and lse of one block of ``BH`` heads of one query a task.

    The query reads ``min(position + 1, WINDOW)`` places of its list ``window_ptr[query]`` of rows of the first cache,
    then ``count_ptr[query]`` of a list of the second: its own (``"selected"``), that of its operator row (``"all"``),
    or none. Lists are as wide as whole tiles of ``BK`` keys. ``scale`` holds log2(e) as well with ``BASE2``. NaN and
    inf in rows that a query sees reach all its heads as 0 * NaN does; others reach nothing.

    With ``ONE_LOOP`` both lists are one to the loop, whose loads then run ahead across the seam; the Ascend compiler
    takes no choice between two pointers. There one vector core of two idles: it fetches rows by list, which cannot be
    split over both. Limits: lists of int32 slots; with ``WIDE`` caches of 2 ** 31 numbers and more.
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
        first_number = tl.cast(query, tl.int64) * (H * D)
        numbers = heads[:, None] * D + tl.arange(0, DC)[None, :]
        q0 = tl.load(q_ptr + first_number + numbers, mask=all_there)
        q1 = tl.load(q_ptr + first_number + DC + numbers, mask=all_there) if PARTS > 1 else q0
        q2 = tl.load(q_ptr + first_number + 2 * DC + numbers, mask=all_there) if PARTS > 2 else q0
        q3 = tl.load(q_ptr + first_number + 3 * DC + numbers, mask=all_there) if PARTS > 2 else q0
        sum0 = tl.zeros([BH, DC], tl.float32)
        sum1 = tl.zeros([BH, DC], tl.float32) if PARTS > 1 else sum0
        sum2 = tl.zeros([BH, DC], tl.float32) if PARTS > 2 else sum0
        sum3 = tl.zeros([BH, DC], tl.float32) if PARTS > 2 else sum0
        total = tl.zeros([BH], tl.float32)
        highest = tl.full([BH], HIDDEN, tl.float32)
        in_window = tl.minimum(tl.load(position_ptr + query) + 1, WINDOW)
        window = window_ptr + tl.cast(query, tl.int64) * WIDTH
        if ENTRIES == "selected":
            entries = entry_ptr + tl.cast(query, tl.int64) * entry_stride
        if ENTRIES == "all":
            entries = entry_ptr + tl.cast(tl.maximum(tl.load(row_ptr + query), 0), tl.int64) * entry_stride
            seen = -1 - tl.load(entries)  # what stands for no key: read only if there is an entry
        if ENTRIES != "none":
            num_entries = tl.load(count_ptr + query)
        if ONE_LOOP and ENTRIES != "none":
            seam = (in_window + BK - 1) // BK * BK
            for start in tl.range(0, seam + num_entries, BK, num_stages=STAGES):
                near = start < seam
                slots = tl.load(tl.where(near, window + start, entries + (start - seam)) + lanes)
                if ENTRIES == "all":
                    slots = tl.where((lanes < seam + num_entries - start) | near, slots, seen)
                cache_ptr = tl.where(near, swa_ptr, cmp_ptr)
                sum0, sum1, sum2, sum3, total, highest = tile_added(
                    slots,
                    cache_ptr,
                    q0,
                    q1,
                    q2,
                    q3,
                    sum0,
                    sum1,
                    sum2,
                    sum3,
                    total,
                    highest,
                    scale,
                    D,
                    FIXED,
                    PARTS,
                    BASE2,
                    WIDE,
                )
        else:
            for start in tl.range(0, in_window, BK, num_stages=STAGES):
                slots = tl.load(window + start + lanes)
                sum0, sum1, sum2, sum3, total, highest = tile_added(
                    slots,
                    swa_ptr,
                    q0,
                    q1,
                    q2,
                    q3,
                    sum0,
                    sum1,
                    sum2,
                    sum3,
                    total,
                    highest,
                    scale,
                    D,
                    FIXED,
                    PARTS,
                    BASE2,
                    WIDE,
                )
            if ENTRIES != "none":
                for start in tl.range(0, num_entries, BK, num_stages=STAGES):
                    slots = tl.load(entries + start + lanes)
                    if ENTRIES == "all":
                        slots = tl.where(lanes < num_entries - start, slots, seen)
                    sum0, sum1, sum2, sum3, total, highest = tile_added(
                        slots,
                        cmp_ptr,
                        q0,
                        q1,
                        q2,
                        q3,
                        sum0,
                        sum1,
                        sum2,
                        sum3,
                        total,
                        highest,
                        scale,
                        D,
                        FIXED,
                        PARTS,
                        BASE2,
                        WIDE,
                    )
        share, lse = share_and_lse(total, highest, tl.load(sink_ptr + heads, mask=there), FIXED, BASE2)
        tl.store(lse_ptr + tl.cast(query, tl.int64) * H + heads, lse, mask=there)
        tl.store(out_ptr + first_number + numbers, (sum0 * share[:, None]).to(q0.dtype), mask=all_there)
        if PARTS > 1:
            tl.store(out_ptr + first_number + DC + numbers, (sum1 * share[:, None]).to(q0.dtype), mask=all_there)
        if PARTS > 2:
            tl.store(out_ptr + first_number + 2 * DC + numbers, (sum2 * share[:, None]).to(q0.dtype), mask=all_there)
            tl.store(out_ptr + first_number + 3 * DC + numbers, (sum3 * share[:, None]).to(q0.dtype), mask=all_there)


def switches(family: str, tile: Tile, **sizes: Any) -> dict[str, Any]:
    """The constexprs of a launch that follow from its family and tile, beside these sizes."""
    return {
        **sizes,
        "BH": tile.heads,
        "BK": tile.keys,
        "PARTS": 1 if tile.parts > 2 and sizes["D"] < HEAD_DIMS[-1] else tile.parts,  # a fourth of less is no row
        "BASE2": family == "cuda",
        "ONE_LOOP": tile.one_loop,
        "STAGES": max(1, tile.stages),
    }


def compilations(family: str) -> list[Compilation]:
    """Every head count in both forms, and for one of them every other switch."""
    found = []
    for num_heads in (8, 16, 32, 64, 128):
        for bound in (None, 70.0):
            lists = ("none", "selected", "all") if num_heads in (8, 64) else ("selected",)
            found += [compilation(family, num_heads, bound, entries) for entries in lists]
    found += [compilation(family, 64, bound, "selected", wide=True) for bound in (None, 70.0)]
    found += [compilation(family, 64, None, "selected", head_dim=head_dim) for head_dim in HEAD_DIMS[:-1]]
    return [*found, compilation(family, 64, None, "selected", dtype="fp16")]


def compilation(
    family: str,
    num_heads: int,
    bound: float | None,
    entries: str,
    *,
    wide: bool = False,
    dtype: str = "bf16",
    head_dim: int = 512,
) -> Compilation:
    """One of them, with a window of 128."""
    key = tile_key(num_heads, bound)
    types = {
        "q_ptr": dtype,
        "swa_ptr": dtype,
        "cmp_ptr": dtype,
        "window_ptr": "i32",
        "entry_ptr": "i32",
        "row_ptr": "i32",
        "position_ptr": "i32",
        "count_ptr": "i32",
        "sink_ptr": "fp32",
        "out_ptr": dtype,
        "lse_ptr": "fp32",
    }
    sizes = {"H": num_heads, "D": head_dim, "WINDOW": 128, "WIDTH": 128, "ENTRIES": entries, "FIXED": bound is not None}
    words = [f"{num_heads} heads", key[1], entries, *(["wide"] if wide else []), *([dtype] if dtype != "bf16" else [])]
    words += [f"{head_dim} channels"] if head_dim != 512 else []
    return Compilation(
        "attention/" + ", ".join(words),
        attention_kernel,
        {name: f"*{kind}" for name, kind in types.items()}
        | {"num_tasks": "i32", "entry_stride": "i32", "scale": "fp32"},
        switches(family, TILES[family][key], **sizes, WIDE=wide),
    )
