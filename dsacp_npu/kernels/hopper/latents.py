"""V3.2's attention over chosen latents on a Hopper GPU: roles, order and signals of `hopper.attention`.

Same arguments and same meaning as the portable kernel. A key is a latent, in four chunks of 128 channels, and a rope
key, which comes with the last chunk and is scored after it. From then on nobody needs the rope keys of a tile, and its
weights lie in their place: both are 64 x 64 numbers. Who fetches waits for all four chunks of the tile before, and the
side that reads its weights gives chunks back once it has, so they need no signal of their own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsacp_npu.kernels.hopper.attention import (
    HIDDEN,
    LN2,
    caught_up,
    handed_over,
    other_values,
    own_values,
    scores_begun,
    shrunk,
    values_added,
    weights_of,
)
from dsacp_npu.kernels.hopper.fetch import (
    FREE,
    FULL,
    QUERY_FREE,
    QUERY_FULL,
    SCORED,
    SIGNALS,
    WEIGHED,
    chunk_copied,
    in_turn,
)

__all__ = ["latents_hopper_kernel"]


@gluon.jit
def list_of(query, slot_ptr, count_ptr, list_stride, BK: gl.constexpr):
    """Where a query's list lies, and its tiles."""
    return slot_ptr + query.to(gl.int64) * list_stride, (gl.load(count_ptr + query) + BK - 1) // BK


@gluon.jit
def tile_copied(SIDE: gl.constexpr, phase, shared, rows, lanes, rope_lanes, latent_ptr, rope_ptr, D: gl.constexpr):
    """Latents and rope keys of a tile on their way to shared memory, chunk by chunk as it is free."""
    keys, ropes, signals = shared
    DC: gl.constexpr = keys.shape[2]
    for i in gl.static_range(3):
        chunk_copied(
            in_turn(i, SIDE), phase, 4 * SIDE + in_turn(i, SIDE), keys, signals, rows, lanes, latent_ptr, D, DC
        )
    last: gl.constexpr = 4 * SIDE + 3
    mbarrier.wait(signals.index(FREE + last), phase)
    async_copy.async_copy_global_to_shared(keys.index(last), latent_ptr + 3 * DC + rows[:, None] * D + lanes[None, :])
    rope_rows = rope_ptr + rows[:, None] * ropes.shape[2] + rope_lanes[None, :]
    async_copy.async_copy_global_to_shared(ropes.index(SIDE), rope_rows)
    async_copy.mbarrier_arrive(signals.index(FULL + last), increment_count=False)


@gluon.jit
def fetch(
    pointers,
    shared,
    num_tasks,
    list_stride,
    H: gl.constexpr,
    D: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Queries, latents and rope keys to shared memory, in the order of their use."""
    slot_ptr, count_ptr, q_ptr, q_rope_ptr, latent_ptr, rope_ptr = pointers
    queries, turned, keys, ropes, signals = shared
    BH: gl.constexpr = queries.shape[1]
    BK: gl.constexpr = keys.shape[1]
    DC: gl.constexpr = keys.shape[2]
    ROPE: gl.constexpr = ropes.shape[2]
    BLOCKS: gl.constexpr = (H + BH - 1) // BH
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, BK, gl.SliceLayout(1, layout))
    heads = gl.arange(0, BH, gl.SliceLayout(1, layout))
    lanes = gl.arange(0, DC, gl.SliceLayout(0, layout))
    rope_lanes = gl.arange(0, ROPE, gl.SliceLayout(0, layout))
    first = gl.program_id(0)
    evens = 0
    odds = 0
    turn = 0
    chosen, tiles = list_of(first // BLOCKS, slot_ptr, count_ptr, list_stride, BK)
    for task in range(first, num_tasks, gl.num_programs(0)):
        slots0 = gl.load(chosen + rows)
        slots1 = gl.load(chosen + gl.maximum(gl.minimum(1, tiles - 1), 0) * BK + rows)
        block_heads = task % BLOCKS * BH + heads
        if H % BH:
            block_heads = gl.minimum(block_heads, H - 1)
        first_head = (task // BLOCKS).to(gl.int64) * H
        q_block = q_ptr + first_head * D + block_heads[:, None] * D + lanes[None, :]
        mbarrier.wait(signals.index(QUERY_FREE), turn ^ 1)
        for c in gl.static_range(4):
            async_copy.async_copy_global_to_shared(queries.index(c), q_block + c * DC)
        turned_block = q_rope_ptr + first_head * ROPE + block_heads[:, None] * ROPE + rope_lanes[None, :]
        async_copy.async_copy_global_to_shared(turned, turned_block)
        async_copy.mbarrier_arrive(signals.index(QUERY_FULL), increment_count=False)
        turn ^= 1
        for tile in range(0, tiles, 2):
            rows0 = gl.maximum(slots0, -1 - slots0)
            rows1 = gl.maximum(slots1, -1 - slots1)
            if WIDE:
                rows0 = rows0.to(gl.int64)
                rows1 = rows1.to(gl.int64)
            last = gl.maximum(tiles - 1, 0)
            slots0 = gl.load(chosen + gl.minimum(tile + 2, last) * BK + rows)
            slots1 = gl.load(chosen + gl.minimum(tile + 3, last) * BK + rows)
            phase = (evens & 1) ^ 1
            tile_copied(0, phase, (keys, ropes, signals), rows0, lanes, rope_lanes, latent_ptr, rope_ptr, D)
            evens += 1
            if tile + 1 < tiles:
                phase = (odds & 1) ^ 1
                tile_copied(1, phase, (keys, ropes, signals), rows1, lanes, rope_lanes, latent_ptr, rope_ptr, D)
                odds += 1
        following = gl.minimum(task + gl.num_programs(0), num_tasks - 1)
        chosen, tiles = list_of(following // BLOCKS, slot_ptr, count_ptr, list_stride, BK)


@gluon.jit
def all_scores_begun(shared, phase, zero, SIDE: gl.constexpr, layout: gl.constexpr):
    """Scores of this side's tile, of latents and then of rope keys; ``zero`` as in `scores_begun`."""
    queries, turned, keys, ropes, _, signals = shared
    logits = scores_begun(queries, keys, signals, phase, zero, SIDE, layout)
    return warpgroup_mma(turned, ropes.index(SIDE).permute((1, 0)), logits, is_async=True)


@gluon.jit
def even_tile_added(tile, tiles, chosen, shared, evens, scale, sum0, sum1, total, highest):
    """Sums of values and weights and the highest logit with a tile of the first side, which hands its weights over."""
    _, _, keys, ropes, state_smem, signals = shared
    BK: gl.constexpr = keys.shape[1]
    s_layout: gl.constexpr = total.type.layout.parent
    logits = all_scores_begun(shared, evens & 1, evens >> 31, 0, s_layout)
    mbarrier.arrive(signals.index(SCORED), pred=tile + 1 < tiles)
    slots = gl.load(chosen + tile * BK + gl.arange(0, BK, gl.SliceLayout(0, s_layout)))
    logits = warpgroup_mma_wait(0, deps=[logits])
    # Its barrier, too, is needed: all four warps are through with the rope keys before weights are written there.
    mbarrier.arrive(signals.index(QUERY_FREE), pred=tile + 2 >= tiles)
    weights, total, highest, shrink = weights_of(logits, slots, scale, total, highest, False)
    short = weights.to(keys.dtype)
    handed_over(short, total, highest, ropes, state_smem, signals, 0, False)
    sum0, sum1 = shrunk(sum0, sum1, shrink)
    sum0, sum1 = own_values(short, sum0, sum1, 0, keys)
    sum0, sum1 = values_added(sum0, sum1, 0, signals)
    return sum0, sum1, total, highest


@gluon.jit
def consume(
    pointers,
    shared,
    num_tasks,
    list_stride,
    scale,
    SIDE: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
):
    """Half the channels of the output, scores of every other tile; the first side stores the lse as well."""
    slot_ptr, count_ptr, out_ptr, lse_ptr = pointers
    queries, _, keys, ropes, state_smem, signals = shared
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
    # 16 bytes a lane to store, as in `hopper.attention`.
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
    chosen, tiles = list_of(first // BLOCKS, slot_ptr, count_ptr, list_stride, BK)
    for task in range(first, num_tasks, gl.num_programs(0)):
        sum0 = gl.zeros([BH, DC], gl.float32, o_layout)
        sum1 = gl.zeros([BH, DC], gl.float32, o_layout)
        total = gl.zeros([BH], gl.float32, row_layout)
        highest = gl.full([BH], HIDDEN, gl.float32, row_layout)
        # Of the next task, so that nothing waits for memory between two of them.
        following = gl.minimum(task + gl.num_programs(0), num_tasks - 1)
        next_chosen, next_tiles = list_of(following // BLOCKS, slot_ptr, count_ptr, list_stride, BK)
        mbarrier.wait(signals.index(QUERY_FULL), turn)
        for tile in range(0, tiles - 1, 2):
            if SIDE:
                mbarrier.wait(signals.index(SCORED), odds & 1)
                logits = all_scores_begun(shared, odds & 1, odds >> 31, 1, s_layout)
                slots = gl.load(chosen + (tile + 1) * BK + lanes)
                # Only the five score products are under way: unless told, the compiler waits for them as well.
                sum0, sum1 = warpgroup_mma_wait(5, deps=[sum0, sum1])
                sum0, sum1, total, highest = caught_up(sum0, sum1, highest, evens & 1, state_smem, signals, 1, False)
                sum0, sum1 = other_values(sum0, sum1, evens & 1, OTHER, 1, ropes, keys, signals)
                logits = warpgroup_mma_wait(2, deps=[logits])
                mbarrier.arrive(signals.index(QUERY_FREE), pred=tile + 3 >= tiles)  # its barrier as in even tiles
                weights, total, highest, shrink = weights_of(logits, slots, scale, total, highest, False)
                short = weights.to(keys.dtype)
                handed_over(short, total, highest, ropes, state_smem, signals, 1, False)
                sum0, sum1 = values_added(sum0, sum1, OTHER, signals)
                sum0, sum1 = shrunk(sum0, sum1, shrink)
                sum0, sum1 = own_values(short, sum0, sum1, OWN, keys)
                sum0, sum1 = values_added(sum0, sum1, OWN, signals)
            else:
                sum0, sum1, total, highest = even_tile_added(
                    tile, tiles, chosen, shared, evens, scale, sum0, sum1, total, highest
                )
                sum0, sum1, total, highest = caught_up(sum0, sum1, highest, odds & 1, state_smem, signals, 0, False)
                sum0, sum1 = other_values(sum0, sum1, odds & 1, OTHER, 0, ropes, keys, signals)
                sum0, sum1 = values_added(sum0, sum1, OTHER, signals)
            evens += 1
            odds += 1
        if tiles % 2:
            if SIDE:
                mbarrier.arrive(signals.index(QUERY_FREE), pred=tiles == 1)
                sum0, sum1, total, highest = caught_up(sum0, sum1, highest, evens & 1, state_smem, signals, 1, False)
                sum0, sum1 = other_values(sum0, sum1, evens & 1, OTHER, 1, ropes, keys, signals)
                sum0, sum1 = values_added(sum0, sum1, OTHER, signals)
            else:
                sum0, sum1, total, highest = even_tile_added(
                    tiles - 1, tiles, chosen, shared, evens, scale, sum0, sum1, total, highest
                )
            evens += 1
        mbarrier.arrive(signals.index(QUERY_FREE), pred=tiles == 0)
        turn ^= 1
        first_head = (task // BLOCKS).to(gl.int64) * H
        if SIDE == 0:
            heads = task % BLOCKS * BH + gl.arange(0, BH, row_layout)
            lse = gl.where(total == 0, float("-inf"), highest * LN2 + gl.log(total))
            gl.store(lse_ptr + first_head + heads, lse, mask=heads < H if H % BH else None)
        sum0, sum1 = shrunk(sum0, sum1, 1.0 / gl.where(total == 0, 1.0, total))
        out = out_ptr + first_head * D + 2 * SIDE * DC + numbers
        out += task % BLOCKS * (BH * D)
        out_there = (task % BLOCKS * BH + out_heads < H)[:, None] if H % BH else None
        gl.store(out, gl.convert_layout(sum0.to(keys.dtype), out_layout), mask=out_there)
        gl.store(out + DC, gl.convert_layout(sum1.to(keys.dtype), out_layout), mask=out_there)
        chosen = next_chosen
        tiles = next_tiles


@gluon.jit(do_not_specialize=["num_tasks", "list_stride"])
def latents_hopper_kernel(
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
    H: gl.constexpr,
    BH: gl.constexpr,
    D: gl.constexpr,
    ROPE: gl.constexpr,
    BK: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Output and lse of one block of ``BH`` heads of one query a task, as the portable kernel has it.

    ``scale`` holds log2(e). NaN and inf in rows that a query chose reach all its heads as 0 * NaN does; others reach
    nothing. Limits: blocks of 64 heads, tiles of 64 keys, 512 channels and rope keys of 64, 4 warps at launch, one
    program a multiprocessor; fewer heads are padded.
    """
    DC: gl.constexpr = D // 4
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(dtype, [4, BH, DC], layout)
    turned = gl.allocate_shared_memory(dtype, [BH, ROPE], layout)
    keys = gl.allocate_shared_memory(dtype, [8, BK, DC], layout)
    ropes = gl.allocate_shared_memory(dtype, [2, BK, ROPE], layout)
    state_smem = gl.allocate_shared_memory(gl.float32, [4, BH], plain)
    signals = gl.allocate_shared_memory(gl.int64, [SIGNALS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(8):
        mbarrier.init(signals.index(FULL + i), count=128)
        mbarrier.init(signals.index(FREE + i), count=1)
    mbarrier.init(signals.index(QUERY_FULL), count=128)
    mbarrier.init(signals.index(QUERY_FREE), count=2)
    for i in gl.static_range(WEIGHED, SIGNALS):
        mbarrier.init(signals.index(i), count=1)
    shared = (queries, turned, keys, ropes, state_smem, signals)
    results = (slot_ptr, count_ptr, out_ptr, lse_ptr)
    sources = (slot_ptr, count_ptr, q_ptr, q_rope_ptr, latent_ptr, rope_ptr)
    gl.warp_specialize(
        [
            (consume, (results, shared, num_tasks, list_stride, scale, 0, H, D)),
            (consume, (results, shared, num_tasks, list_stride, scale, 1, H, D)),
            (fetch, (sources, (queries, turned, keys, ropes, signals), num_tasks, list_stride, H, D, WIDE)),
        ],
        [4, 4],
        [232, 40],
    )
