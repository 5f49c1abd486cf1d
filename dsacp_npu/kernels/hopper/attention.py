"""Attention over lists of slots on a Hopper GPU, its warps in three roles: two that compute, one that fetches.

Same arguments and same meaning as the portable kernel. One program a multiprocessor; a task is 64 heads of a query.
The first consumer scores the even tiles of 64 keys, the second the odd ones, and both take the weights of both tiles
to their own half of the channels. So weights, not scores, cross shared memory, and softmax of one runs beside matrix
products of the other. Weights come out of turn: ``scores A, scores B, values A, values B``, ``A`` being the even tile.

A tile lies in four chunks of 128 channels, each of which is fetched again as soon as nobody needs it. Tiles of the
next query, and the query itself, arrive while the last one is finished.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsacp_npu.kernels.hopper.fetch import (
    FREE,
    FULL,
    QUERY_FREE,
    QUERY_FULL,
    SCORED,
    SIGNALS,
    WEIGHED,
    fetch,
    in_turn,
    lists_of,
    slots_of,
)

__all__ = ["attention_hopper_kernel"]

HIDDEN = gl.constexpr(-1.0e30)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def scores_begun(queries, keys, signals, phase, zero, SIDE: gl.constexpr, layout: gl.constexpr):
    """Scores of this side's tile, begun as soon as chunks arrive.

    ``zero`` is a 0 that the compiler cannot know: else it keeps descriptors of all chunks in registers, and spills.
    """
    BH: gl.constexpr = queries.shape[1]
    BK: gl.constexpr = keys.shape[1]
    logits = gl.zeros([BH, BK], gl.float32, layout)
    for i in gl.static_range(4):
        chunk = queries.index(zero + in_turn(i, SIDE))
        mbarrier.wait(signals.index(FULL + 4 * SIDE + in_turn(i, SIDE)), phase)
        fence_async_shared()
        tile_chunk = keys.index(zero + 4 * SIDE + in_turn(i, SIDE))
        logits = warpgroup_mma(chunk, tile_chunk.permute((1, 0)), logits, use_acc=i > 0, is_async=True)
    return logits


@gluon.jit
def weights_of(logits, slots, scale, total, highest, FIXED: gl.constexpr):
    """Weights of a tile, their sums, the highest logit, and what earlier sums shrink by."""
    logits = logits * scale + gl.where(slots >= 0, 0.0, HIDDEN)[None, :]
    if FIXED:
        weights = gl.exp2(logits)
        shrink = total
    else:
        risen = gl.maximum(highest, gl.max(logits, 1))
        weights = gl.exp2(logits - risen[:, None])
        shrink = gl.exp2(highest - risen)
        highest = risen
        total = total * shrink
    return weights, total + gl.sum(weights, 1), highest, shrink


@gluon.jit
def shrunk(sum0, sum1, shrink):
    """Sums of values after the highest logit rose."""
    rows = gl.convert_layout(shrink, gl.SliceLayout(1, sum0.type.layout))[:, None]
    return sum0 * rows, sum1 * rows


@gluon.jit
def own_values(short, sum0, sum1, place: gl.constexpr, keys):
    """Sums of values with this side's tile begun, whose weights lie in registers."""
    operand = gl.convert_layout(short, gl.DotOperandLayout(0, sum0.type.layout, 2))
    sum0 = warpgroup_mma(operand, keys.index(place), sum0, is_async=True)
    sum1 = warpgroup_mma(operand, keys.index(place + 1), sum1, is_async=True)
    return sum0, sum1


@gluon.jit
def other_values(sum0, sum1, phase, place: gl.constexpr, SIDE: gl.constexpr, weights_smem, keys, signals):
    """Sums of values with the other side's tile begun."""
    mbarrier.wait(signals.index(FULL + place), phase)
    mbarrier.wait(signals.index(FULL + place + 1), phase)
    fence_async_shared()
    sum0 = warpgroup_mma(weights_smem.index(1 - SIDE), keys.index(place), sum0, is_async=True)
    sum1 = warpgroup_mma(weights_smem.index(1 - SIDE), keys.index(place + 1), sum1, is_async=True)
    return sum0, sum1


@gluon.jit
def values_added(sum0, sum1, place: gl.constexpr, signals):
    """Sums of values once they are there; the chunks are given back one after the other."""
    sum0 = warpgroup_mma_wait(1, deps=[sum0])
    mbarrier.arrive(signals.index(FREE + place))
    sum1 = warpgroup_mma_wait(0, deps=[sum1])
    mbarrier.arrive(signals.index(FREE + place + 1))
    return sum0, sum1


@gluon.jit
def handed_over(short, total, highest, weights_smem, state_smem, signals, SIDE: gl.constexpr, FIXED: gl.constexpr):
    """Weights of this side's tile to the other side, with the sum of all weights so far and the highest logit."""
    weights_smem.index(SIDE).store(short)
    state_smem.index(SIDE).store(total)
    if not FIXED:
        state_smem.index(2 + SIDE).store(highest)
    fence_async_shared()
    mbarrier.arrive(signals.index(WEIGHED + SIDE))


@gluon.jit
def caught_up(sum0, sum1, highest, phase, state_smem, signals, SIDE: gl.constexpr, FIXED: gl.constexpr):
    """Sums of values, sum of weights and highest logit, once the other side has weighed its tile."""
    mbarrier.wait(signals.index(WEIGHED + 1 - SIDE), phase)
    total = state_smem.index(1 - SIDE).load(highest.type.layout)
    if not FIXED:
        risen = state_smem.index(3 - SIDE).load(highest.type.layout)
        sum0, sum1 = shrunk(sum0, sum1, gl.exp2(highest - risen))
        highest = risen
    return sum0, sum1, total, highest


@gluon.jit
def even_tile_added(
    tile,
    tiles,
    lists,
    shared,
    evens,
    scale,
    sum0,
    sum1,
    total,
    highest,
    ENTRIES: gl.constexpr,
    FIXED: gl.constexpr,
):
    """Sums of values and weights and the highest logit with a tile of the first side, which hands its weights over."""
    queries, keys, weights_smem, state_smem, signals = shared
    BK: gl.constexpr = keys.shape[1]
    s_layout: gl.constexpr = total.type.layout.parent
    logits = scores_begun(queries, keys, signals, evens & 1, evens >> 31, 0, s_layout)
    mbarrier.arrive(signals.index(SCORED), pred=tile + 1 < tiles)
    slots = slots_of(tile, lists, gl.arange(0, BK, gl.SliceLayout(0, s_layout)), BK, ENTRIES)
    logits = warpgroup_mma_wait(0, deps=[logits])
    mbarrier.arrive(signals.index(QUERY_FREE), pred=tile + 2 >= tiles)
    weights, total, highest, shrink = weights_of(logits, slots, scale, total, highest, FIXED)
    short = weights.to(keys.dtype)
    handed_over(short, total, highest, weights_smem, state_smem, signals, 0, FIXED)
    if not FIXED:
        sum0, sum1 = shrunk(sum0, sum1, shrink)
    sum0, sum1 = own_values(short, sum0, sum1, 0, keys)
    sum0, sum1 = values_added(sum0, sum1, 0, signals)
    return sum0, sum1, total, highest


@gluon.jit
def consume(
    pointers,
    shared,
    num_tasks,
    entry_stride,
    scale,
    SIDE: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    WINDOW: gl.constexpr,
    WIDTH: gl.constexpr,
    ENTRIES: gl.constexpr,
    FIXED: gl.constexpr,
):
    """Half the channels of the output, scores of every other tile; the first side stores the lse as well."""
    source, sink_ptr, out_ptr, lse_ptr = pointers
    queries, keys, weights_smem, state_smem, signals = shared
    BH: gl.constexpr = queries.shape[1]
    BK: gl.constexpr = keys.shape[1]
    DC: gl.constexpr = keys.shape[2]
    BLOCKS: gl.constexpr = (H + BH - 1) // BH
    OWN: gl.constexpr = 4 * SIDE + 2 * SIDE
    OTHER: gl.constexpr = 4 * (1 - SIDE) + 2 * SIDE
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DC, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    lanes = gl.arange(0, BK, gl.SliceLayout(0, s_layout))
    # 16 bytes a lane to store: lanes of four trade what the matrix unit left with each of them.
    out_layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[BH, DC],
    )
    out_heads = gl.arange(0, BH, gl.SliceLayout(1, out_layout))
    numbers = out_heads[:, None] * D + gl.arange(0, DC, gl.SliceLayout(0, out_layout))[None, :]
    first = gl.program_id(0)
    evens = 0
    odds = 0
    turn = 0
    lists, tiles = lists_of(first // BLOCKS, source, entry_stride, WINDOW, WIDTH, BK, ENTRIES)
    for task in range(first, num_tasks, gl.num_programs(0)):
        sum0 = gl.zeros([BH, DC], gl.float32, o_layout)
        sum1 = gl.zeros([BH, DC], gl.float32, o_layout)
        total = gl.zeros([BH], gl.float32, row_layout)
        highest = gl.full([BH], HIDDEN, gl.float32, row_layout)
        # Of the next task, so that nothing waits for memory between two of them.
        following = gl.minimum(task + gl.num_programs(0), num_tasks - 1)
        next_lists, next_tiles = lists_of(following // BLOCKS, source, entry_stride, WINDOW, WIDTH, BK, ENTRIES)
        heads = task % BLOCKS * BH + gl.arange(0, BH, row_layout)
        there = heads < H if H % BH else None
        sink = gl.load(sink_ptr + heads, mask=there)
        mbarrier.wait(signals.index(QUERY_FULL), turn)
        # From a 0 that the compiler cannot know: a loop of at most one turn it would spread out, and spill.
        for tile in range(evens >> 31 if ENTRIES == "none" else 0, tiles - 1, 2):
            if SIDE:
                mbarrier.wait(signals.index(SCORED), odds & 1)
                logits = scores_begun(queries, keys, signals, odds & 1, odds >> 31, 1, s_layout)
                slots = slots_of(tile + 1, lists, lanes, BK, ENTRIES)
                sum0, sum1, total, highest = caught_up(sum0, sum1, highest, evens & 1, state_smem, signals, 1, FIXED)
                sum0, sum1 = other_values(sum0, sum1, evens & 1, OTHER, 1, weights_smem, keys, signals)
                logits = warpgroup_mma_wait(2, deps=[logits])
                mbarrier.arrive(signals.index(QUERY_FREE), pred=tile + 3 >= tiles)
                weights, total, highest, shrink = weights_of(logits, slots, scale, total, highest, FIXED)
                short = weights.to(keys.dtype)
                handed_over(short, total, highest, weights_smem, state_smem, signals, 1, FIXED)
                sum0, sum1 = values_added(sum0, sum1, OTHER, signals)
                if not FIXED:
                    sum0, sum1 = shrunk(sum0, sum1, shrink)
                sum0, sum1 = own_values(short, sum0, sum1, OWN, keys)
                sum0, sum1 = values_added(sum0, sum1, OWN, signals)
            else:
                sum0, sum1, total, highest = even_tile_added(
                    tile, tiles, lists, shared, evens, scale, sum0, sum1, total, highest, ENTRIES, FIXED
                )
                sum0, sum1, total, highest = caught_up(sum0, sum1, highest, odds & 1, state_smem, signals, 0, FIXED)
                sum0, sum1 = other_values(sum0, sum1, odds & 1, OTHER, 0, weights_smem, keys, signals)
                sum0, sum1 = values_added(sum0, sum1, OTHER, signals)
            evens += 1
            odds += 1
        if tiles % 2:
            if SIDE:
                mbarrier.arrive(signals.index(QUERY_FREE), pred=tiles == 1)
                sum0, sum1, total, highest = caught_up(sum0, sum1, highest, evens & 1, state_smem, signals, 1, FIXED)
                sum0, sum1 = other_values(sum0, sum1, evens & 1, OTHER, 1, weights_smem, keys, signals)
                sum0, sum1 = values_added(sum0, sum1, OTHER, signals)
            else:
                sum0, sum1, total, highest = even_tile_added(
                    tiles - 1, tiles, lists, shared, evens, scale, sum0, sum1, total, highest, ENTRIES, FIXED
                )
            evens += 1
        mbarrier.arrive(signals.index(QUERY_FREE), pred=tiles == 0)
        turn ^= 1
        share, lse = share_and_lse(total, highest, sink, FIXED)
        if SIDE == 0:
            gl.store(lse_ptr + (task // BLOCKS).to(gl.int64) * H + heads, lse, mask=there)
        sum0, sum1 = shrunk(sum0, sum1, share)
        out = out_ptr + (task // BLOCKS).to(gl.int64) * (H * D) + 2 * SIDE * DC + numbers
        out += task % BLOCKS * (BH * D)
        out_there = (task % BLOCKS * BH + out_heads < H)[:, None] if H % BH else None
        gl.store(out, gl.convert_layout(sum0.to(keys.dtype), out_layout), mask=out_there)
        gl.store(out + DC, gl.convert_layout(sum1.to(keys.dtype), out_layout), mask=out_there)
        lists = next_lists
        tiles = next_tiles


@gluon.jit
def share_and_lse(total, highest, sink, FIXED: gl.constexpr):
    """What sums of values are multiplied with, the sink being one more weight; and the lse without it."""
    sink = gl.where(sink < HIDDEN, HIDDEN, sink)
    natural = gl.full_like(total, 0.0) if FIXED else highest * LN2
    weight = total + gl.exp(sink - natural)
    lse = gl.where(total == 0, float("-inf"), natural + gl.log(total))
    return 1.0 / gl.where(total == 0, 1.0, weight), lse


@gluon.jit(do_not_specialize=["num_tasks", "entry_stride"])
def attention_hopper_kernel(
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
    H: gl.constexpr,
    BH: gl.constexpr,
    D: gl.constexpr,
    BK: gl.constexpr,
    WINDOW: gl.constexpr,
    WIDTH: gl.constexpr,
    ENTRIES: gl.constexpr,
    FIXED: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Output and lse of one block of ``BH`` heads of one query a task, as the portable kernel has it.

    ``scale`` holds log2(e). NaN and inf in rows that a query sees reach all its heads as 0 * NaN does; others reach
    nothing. Limits: blocks of 64 heads, tiles of 64 keys, 512 channels, 4 warps at launch, one program a
    multiprocessor; fewer heads are padded.
    """
    DC: gl.constexpr = D // 4
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(dtype, [4, BH, DC], layout)
    keys = gl.allocate_shared_memory(dtype, [8, BK, DC], layout)
    weights_smem = gl.allocate_shared_memory(dtype, [2, BH, BK], layout)
    state_smem = gl.allocate_shared_memory(gl.float32, [4, BH], plain)
    signals = gl.allocate_shared_memory(gl.int64, [SIGNALS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(8):
        mbarrier.init(signals.index(FULL + i), count=128)
        mbarrier.init(signals.index(FREE + i), count=1)
    mbarrier.init(signals.index(QUERY_FULL), count=128)
    mbarrier.init(signals.index(QUERY_FREE), count=2)
    for i in gl.static_range(WEIGHED, SIGNALS):
        mbarrier.init(signals.index(i), count=1)
    source = (window_ptr, entry_ptr, row_ptr, position_ptr, count_ptr)
    results = (source, sink_ptr, out_ptr, lse_ptr)
    shared = (queries, keys, weights_smem, state_smem, signals)
    gl.warp_specialize(
        [
            (consume, (results, shared, num_tasks, entry_stride, scale, 0, H, D, WINDOW, WIDTH, ENTRIES, FIXED)),
            (consume, (results, shared, num_tasks, entry_stride, scale, 1, H, D, WINDOW, WIDTH, ENTRIES, FIXED)),
            (
                fetch,
                (
                    (source, q_ptr, swa_ptr, cmp_ptr),
                    (queries, keys, signals),
                    num_tasks,
                    entry_stride,
                    H,
                    D,
                    WINDOW,
                    WIDTH,
                    ENTRIES,
                    WIDE,
                ),
            ),
        ],
        [4, 4],
        [232, 40],
    )
