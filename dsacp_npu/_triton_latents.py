"""V3.2's attention over chosen latents, of backend `triton`: the lists of chosen slots, then one kernel."""

from __future__ import annotations

from typing import Any

from dsacp_npu import mla as mirror
from dsacp_npu._tensors import Float, Int32, check_tensor, dtype_name, torch, values_known
from dsacp_npu._triton_attention import HOPPER_TILE, LOG2_E, Launch, reach, takes_hopper
from dsacp_npu._triton_attention_slots import EntrySlots, Pages, chosen_slots, pages_of
from dsacp_npu._triton_launch import check_runs, family_of, programs_for, tile_for
from dsacp_npu._triton_metadata import query_rows_and_positions
from dsacp_npu.attention import TOKENS, AttentionOutput, check_table, check_topk
from dsacp_npu.kernels.latents import RANKS, ROPE_DIMS, TILES, latents_kernel, switches, tile_key
from dsacp_npu.paging import check_slots, slot_mapping
from dsacp_npu.visibility import visible_entries
from dsacp_ref.spec import INT32_MAX, UnsupportedError

__all__ = ["latent_attention"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HOPPER_ROPE = 64


def latent_attention(
    q_latent: Float,
    q_rope: Float,
    latent_cache: torch.Tensor,
    rope_cache: Float | None,
    block_table: Int32,
    topk_indices: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    *,
    softmax_scale: float,
) -> AttentionOutput:
    """`dsacp_npu.mla.latent_attention` in one kernel, over caches of floats.

    Limits: bfloat16, float16 or float32; latents of 16 to 512 and rope keys of 16, 32 or 64 channels; pages of a power
    of two, which lie alike in both caches; at most 4096 tokens a query.
    """
    mirror.check_latent_queries("q_latent", q_latent, q_rope, softmax_scale)
    (num_queries, _, rank), rope_dim = q_latent.shape, q_rope.shape[2]
    block_size = mirror.check_latent_cache(latent_cache, rope_cache, rank, rope_dim, dtype_name(q_latent))
    rows, positions = query_rows_and_positions(cu_seqlens_q, seqused_kv, num_rows=num_queries)
    check_table("block_table", block_table, seqused_kv)
    check_tensor("topk_indices", topk_indices, ("int32",), (num_queries, "index_topk"), "one list a query")
    if values_known(q_latent, rows, positions, topk_indices):
        check_topk(topk_indices, visible_entries(positions, 1), TOKENS)
        slots = slot_mapping(topk_indices, rows, block_table, block_size)
        check_slots(slots, latent_cache.shape[0] * block_size)
    if rope_cache is None:
        raise UnsupportedError("backend 'triton' reads latents that are floats, not bytes; use backend 'torch'")
    pages = check_kernel(q_latent, rope_dim, latent_cache, rope_cache)
    chosen = chosen_slots(rows, positions, topk_indices, block_table, pages)
    return attended(q_latent, q_rope, latent_cache, rope_cache, chosen, softmax_scale)


def check_kernel(q_latent: Float, rope_dim: int, latent_cache: Float, rope_cache: Float) -> Pages:
    """How the rows of both caches lie, once what is legal but has no kernel is refused."""
    check_runs(q_latent)
    if q_latent.dtype not in FLOATS:
        raise UnsupportedError(
            f"backend 'triton' attends to latents in bfloat16, float16 or float32, not {dtype_name(q_latent)}; "
            "use backend 'torch'"
        )
    for name, size, sizes in (("kv_lora_rank", q_latent.shape[2], RANKS), ("rope_head_dim", rope_dim, ROPE_DIMS)):
        if size not in sizes:
            raise UnsupportedError(f"backend 'triton' has {name} {sizes}, not {size}; use backend 'torch'")
    pages = pages_of("latent_cache", latent_cache)
    if pages != pages_of("rope_cache", rope_cache):
        raise UnsupportedError(
            "backend 'triton' finds a latent and its rope key by one slot, so pages must lie alike in both caches; got "
            f"strides {latent_cache.stride()} and {rope_cache.stride()}; use backend 'torch'"
        )
    return pages


def attended(
    q_latent: Float, q_rope: Float, latent_cache: Float, rope_cache: Float, chosen: EntrySlots, softmax_scale: float
) -> AttentionOutput:
    """Output and lse over the listed slots, from arguments that are known to be right."""
    q_latent, q_rope = q_latent.detach().contiguous(), q_rope.detach().contiguous()
    num_queries, num_heads, rank = q_latent.shape
    out, lse = torch.empty_like(q_latent), q_latent.new_empty(q_latent.shape[:2], dtype=torch.float32)
    wide = max(reach(latent_cache), reach(rope_cache)) > INT32_MAX
    sizes = {"H": num_heads, "D": rank, "ROPE": q_rope.shape[2], "WIDE": wide}
    hopper = takes_hopper(q_latent) and sizes["ROPE"] == HOPPER_ROPE
    launch = hopper_launch(q_latent, sizes) if hopper else portable_launch(q_latent, sizes)
    num_tasks = num_queries * -(-num_heads // launch.heads)
    if num_tasks == 0:
        return AttentionOutput(out, lse)
    launch.kernel[(min(launch.programs, num_tasks) if launch.programs else num_tasks,)](
        q_latent,
        q_rope,
        latent_cache.detach(),
        rope_cache.detach(),
        chosen.slots,
        chosen.counts,
        out,
        lse,
        num_tasks,
        chosen.slots.shape[1],
        softmax_scale * (LOG2_E if family_of(q_latent) == "cuda" else 1.0),
        **launch.constexprs,
        **launch.options,
    )
    return AttentionOutput(out, lse)


def portable_launch(q_latent: Float, sizes: dict[str, Any]) -> Launch:
    """The kernel that runs everywhere, with the tile of the device's family."""
    family = family_of(q_latent)
    tile = tile_for(TILES, q_latent, "attention over latents", tile_key(sizes["H"], q_latent.element_size()))
    programs = programs_for(q_latent, cube=True, waves=tile.waves) if tile.waves else 0
    options = {"num_warps": tile.warps, "num_stages": tile.stages} if family == "cuda" else {}
    return Launch(latents_kernel, tile.heads, programs, switches(family, tile, **sizes), options)


def hopper_launch(q_latent: Float, sizes: dict[str, Any]) -> Launch:
    """One program a multiprocessor, its warps in roles as in attention's."""
    from dsacp_npu.kernels.hopper.latents import latents_hopper_kernel

    constexprs = {**sizes, "BH": HOPPER_TILE, "BK": HOPPER_TILE}
    programs = programs_for(q_latent, cube=True)
    return Launch(latents_hopper_kernel, HOPPER_TILE, programs, constexprs, {"num_warps": 4})
