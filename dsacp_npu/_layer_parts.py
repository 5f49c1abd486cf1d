"""The pieces that a layer is made of, on the device of their arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dsacp_npu import attention, compressor, indexer, rope
from dsacp_npu._layer_records import KeyRows, LayerBatch, LayerCache, LayerWeights, Rows
from dsacp_npu._tensors import Float, Int32, check_floats, torch, values_known
from dsacp_npu.compressor import CompressorState, CompressorWeights, EntryPlan, ProjectedRows, emitted_entries, rms_norm
from dsacp_npu.extents import LocalExtents, token_positions, token_requests
from dsacp_npu.indexer import index_head_weights, parts_of, stored_keys
from dsacp_npu.paging import block_table_rows, check_writes, scattered_rows_, slot_mapping
from dsacp_npu.partition import counted
from dsacp_npu.rope import rope_table
from dsacp_ref.config import AttentionConfig
from dsacp_ref.spec import contract_error


class Torch:
    """The functions of a layer that a backend may replace, as torch code of the mirror."""

    apply_rope = staticmethod(rope.apply_rope)
    apply_inverse_rope = staticmethod(rope.apply_inverse_rope)
    compress_ = staticmethod(compressor.compress_)
    projected_rows = staticmethod(compressor.projected_rows)
    pooled_entries = staticmethod(compressor.pooled_entries)
    updated_state_ = staticmethod(compressor.updated_state_)
    index_queries = staticmethod(indexer.index_queries)
    lightning_indexer = staticmethod(indexer.lightning_indexer)
    window_attention = staticmethod(attention.window_attention)
    all_entries_attention = staticmethod(attention.all_entries_attention)
    selected_attention = staticmethod(attention.selected_attention)
    scattered_rows_ = staticmethod(scattered_rows_)

    @staticmethod
    def projected_output(out: Float, wo_a: Float, wo_b: Float) -> Float:
        """Grouped low-rank projection, then the joint one."""
        check_floats("out", out, ("num_tokens", "num_heads", "head_dim"))
        check_floats("wo_a", wo_a, ("o_groups", "o_lora_rank", "group_width"))
        groups, lora, width = wo_a.shape
        if groups * width != out.shape[1] * out.shape[2]:
            raise contract_error(
                "wo_a",
                f"take the {out.shape[1]} heads of {out.shape[2]} channels of out",
                f"{groups} groups of {width}",
                "cut wo_a and wo_b to the groups of these heads",
            )
        check_floats("wo_b", wo_b, ("hidden", groups * lora), "o_groups * o_lora_rank columns")
        grouped = out.reshape(len(out), groups, width).transpose(0, 1)
        low = (grouped @ wo_a.transpose(1, 2).to(out.dtype)).transpose(0, 1).reshape(len(out), groups * lora)
        return low @ wo_b.T.to(out.dtype)


class Call(NamedTuple):
    """What is the same for all rows of a step: constants, weights and the functions to use."""

    weights: LayerWeights
    config: AttentionConfig
    frequencies: Sequence[float]
    ops: Any

    @property
    def ratio(self) -> int:
        """Tokens of an entry."""
        return len(self.weights.compressor.ape) if self.weights.compressor else 1


class KeySide(NamedTuple):
    """All that a step puts into a cache, computed before anything is written.

    Fields:
        kv, rows: raw keys, and the Rows they belong to.
        plan: EntryPlan of the entries; None without a compressor.
        entries, index_entries: what they hold; None where the layer has none.
        cmp_state, index_state: the rings of the batch's requests after the step.
    """

    kv: Float
    rows: Rows
    plan: EntryPlan | None = None
    entries: Float | None = None
    index_entries: Float | None = None
    cmp_state: CompressorState | None = None
    index_state: CompressorState | None = None


def rows_of(tokens: Int32, batch: LayerBatch) -> Rows:
    """Request and position of these flat tokens."""
    return Rows(
        tokens,
        token_requests(tokens, batch.query_start_loc),
        token_positions(tokens, batch.query_start_loc, batch.seq_lens),
    )


def num_computed_tokens(batch: LayerBatch) -> Int32:
    """Tokens of each request before this step; negative for a padded graph slot."""
    return batch.seq_lens - (batch.query_start_loc[1:] - batch.query_start_loc[:-1])


def whole_extents(batch: LayerBatch) -> LocalExtents:
    """The operator rows of one device: one a request."""
    return LocalExtents(batch.query_start_loc, batch.seq_lens, counted(len(batch.seq_lens), batch.seq_lens))


# --- the query side ---


def query_latent(x: Float, call: Call) -> Float:
    """The query latent after its norm: it feeds the heads and the indexer."""
    return rms_norm(x @ call.weights.wq_a.T.to(x.dtype), call.weights.q_norm, call.config.rms_norm_eps)


def head_queries(qr: Float, wq_b: Float, table: tuple[Float, Float], call: Call) -> Float:
    """The queries of as many heads as ``wq_b`` has, each normed over its channels, then turned."""
    head_dim = call.config.head_dim
    heads = (qr @ wq_b.T.to(qr.dtype)).reshape(len(qr), len(wq_b) // head_dim, head_dim)
    return call.ops.apply_rope(rms_norm(heads, None, call.config.rms_norm_eps), *table)


def chosen_entries(
    x: Float,
    qr: Float,
    table: tuple[Float, Float],
    cache: LayerCache,
    extents: LocalExtents,
    batch: LayerBatch,
    call: Call,
) -> Int32:
    """What the indexer chooses for some rows; 0 wide in a layer without one."""
    weights, config = call.weights, call.config
    if weights.indexer is None:
        return extents.cu_seqlens_q.new_zeros(len(x), 0)
    d = config.index_head_dim
    return call.ops.lightning_indexer(
        call.ops.index_queries(qr, weights.indexer.wq_b, *table, index_head_dim=d),
        index_head_weights(x, weights.indexer.weights_proj, index_head_dim=d),
        cache.index_cache,
        block_table_rows(batch.cmp_block_table, extents.request_indices),
        extents.cu_seqlens_q,
        extents.seqused_kv,
        compress_ratio=call.ratio,
        index_topk=config.index_topk,
    )


def attended(
    q: Float,
    topk_indices: Int32,
    attn_sink: Float,
    cache: LayerCache,
    extents: LocalExtents,
    batch: LayerBatch,
    call: Call,
) -> Float:
    """Attention of some rows in the form that the layer's ratio asks for."""
    swa = (cache.swa_cache, block_table_rows(batch.swa_block_table, extents.request_indices))
    lengths = (extents.cu_seqlens_q, extents.seqused_kv, attn_sink)
    sizes = {"window_size": call.config.window_size, "softmax_scale": 1 / math.sqrt(call.config.head_dim)}
    if call.weights.compressor is None:
        return call.ops.window_attention(q, *swa, *lengths, **sizes).out
    cmp = (cache.cmp_cache, block_table_rows(batch.cmp_block_table, extents.request_indices))
    sizes["compress_ratio"] = call.ratio
    if call.weights.indexer is None:
        return call.ops.all_entries_attention(q, *swa, *cmp, *lengths, **sizes).out
    return call.ops.selected_attention(q, *swa, *cmp, topk_indices, *lengths, **sizes).out


def query_side(
    x: Float,
    rows: Rows,
    cache: LayerCache,
    extents: LocalExtents,
    batch: LayerBatch,
    call: Call,
    wq_b: Float,
    attn_sink: Float,
    topk_indices: Int32 | None,
) -> tuple[Float, Int32]:
    """Attention output of some rows, turned back, for the heads of ``wq_b``; and the entries it used."""
    qr = query_latent(x, call)
    table = rope_table(rows.positions, call.frequencies)
    if topk_indices is None:
        topk_indices = chosen_entries(x, qr, table, cache, extents, batch, call)
    q = head_queries(qr, wq_b, table, call)
    out = attended(q, topk_indices, attn_sink, cache, extents, batch, call)
    return call.ops.apply_inverse_rope(out, *table), topk_indices


def share_of(weight: Float, rank: int, cp_size: int) -> Float:
    """One rank's share of a weight whose first axis goes by head."""
    size = len(weight) // cp_size
    return weight[rank * size : (rank + 1) * size]


def share_of_output(out: Float, call: Call, rank: int, cp_size: int) -> Float:
    """The summand of the layer's output that one rank's heads make: column-parallel wo_a, row-parallel wo_b."""
    wo_a, wo_b = call.weights.wo_a, call.weights.wo_b
    return call.ops.projected_output(out, share_of(wo_a, rank, cp_size), share_of(wo_b.T, rank, cp_size).T)


# --- the key side ---


def raw_keys(x: Float, rows: Rows, call: Call) -> Float:
    """The raw keys of some rows, normed and turned."""
    kv = rms_norm(x @ call.weights.wkv.T.to(x.dtype), call.weights.kv_norm, call.config.rms_norm_eps)
    return call.ops.apply_rope(kv, *rope_table(rows.positions, call.frequencies))


def key_rows(x: Float, rows: Rows, call: Call) -> KeyRows:
    """The projections of the key side for some rows."""
    nothing = ProjectedRows(x.new_zeros(len(x), 0), x.new_zeros(len(x), 0))
    weights, project = call.weights, call.ops.projected_rows
    return KeyRows(
        raw_keys(x, rows, call),
        project(x, rows.positions, weights.compressor) if weights.compressor else nothing,
        project(x, rows.positions, weights.indexer.compressor) if weights.indexer else nothing,
    )


def states_of(state: CompressorState, indices: Int32) -> CompressorState:
    """The rings of these state slots, in memory of their own."""
    return CompressorState(*(part[indices] for part in state))


def used_part(plan: EntryPlan) -> EntryPlan:
    """The plan without its unused capacity where that can be read; elsewhere all of it, -1 where unused."""
    if not values_known(plan.entry_start_loc):
        return plan
    count = int(plan.entry_start_loc[-1])
    return plan._replace(entry_requests=plan.entry_requests[:count], entry_indices=plan.entry_indices[:count])


def step_plan(batch: LayerBatch, compress_ratio: int, num_rows: int) -> EntryPlan:
    """The entries that the step completes."""
    return used_part(
        emitted_entries(batch.query_start_loc, num_computed_tokens(batch), compress_ratio, num_rows=num_rows)
    )


def side_of_hidden(x: Float, rows: Rows, cache: LayerCache, batch: LayerBatch, call: Call) -> KeySide:
    """The key side from the hidden rows of every token."""
    weights = call.weights
    side = KeySide(raw_keys(x, rows, call), rows)
    if weights.compressor is None:
        return side
    plan = step_plan(batch, call.ratio, len(x))

    def compressed(part: CompressorWeights, state: CompressorState) -> tuple[Float, CompressorState]:
        done, after = call.ops.compress_(
            x,
            part,
            batch.query_start_loc,
            num_computed_tokens(batch),
            states_of(state, batch.state_indices),
            call.frequencies,
            eps=call.config.rms_norm_eps,
        )
        return done.entries[: len(plan.entry_requests)], after

    entries, cmp_state = compressed(weights.compressor, cache.cmp_state)
    side = side._replace(plan=plan, entries=entries, cmp_state=cmp_state)
    if weights.indexer is None:
        return side
    index_entries, index_state = compressed(weights.indexer.compressor, cache.index_state)
    return side._replace(index_entries=index_entries, index_state=index_state)


def step_entries(
    projected: ProjectedRows,
    part: CompressorWeights,
    state: CompressorState,
    plan: EntryPlan,
    batch: LayerBatch,
    call: Call,
) -> Float:
    """These entries of the step, from the projections of its rows."""
    return call.ops.pooled_entries(
        projected,
        plan.entry_requests,
        plan.entry_indices,
        batch.query_start_loc,
        num_computed_tokens(batch),
        states_of(state, batch.state_indices),
        part.norm_weight,
        call.frequencies,
        compress_ratio=len(part.ape),
        eps=call.config.rms_norm_eps,
    )


def carried_state(projected: ProjectedRows, state: CompressorState, batch: LayerBatch, call: Call) -> CompressorState:
    """The rings of the batch's requests after the step."""
    old = states_of(state, batch.state_indices)
    return call.ops.updated_state_(projected, batch.query_start_loc, num_computed_tokens(batch), old)


def side_of_rows(keys: KeyRows, rows: Rows, cache: LayerCache, batch: LayerBatch, call: Call) -> KeySide:
    """The key side from the projections of every token."""
    weights = call.weights
    side = KeySide(keys.kv, rows)
    if weights.compressor is None:
        return side
    plan = step_plan(batch, call.ratio, len(keys.kv))
    side = side._replace(
        plan=plan,
        entries=step_entries(keys.cmp_rows, weights.compressor, cache.cmp_state, plan, batch, call),
        cmp_state=carried_state(keys.cmp_rows, cache.cmp_state, batch, call),
    )
    if weights.indexer is None:
        return side
    return side._replace(
        index_entries=step_entries(keys.index_rows, weights.indexer.compressor, cache.index_state, plan, batch, call),
        index_state=carried_state(keys.index_rows, cache.index_state, batch, call),
    )


def written_(cache: LayerCache, side: KeySide, batch: LayerBatch, call: Call) -> LayerCache:
    """The cache with the step's key side written into it; everything is found to fit before the first write."""
    swa_slots = slot_mapping(side.rows.positions, side.rows.requests, batch.swa_block_table, cache.swa_cache.shape[1])
    kv = side.kv.to(cache.swa_cache.dtype)
    writes = [(cache.swa_cache, kv, swa_slots)]
    check_writes(*writes[0])
    if side.plan is not None and side.entries is not None:
        entry_rows = (side.plan.entry_indices, side.plan.entry_requests)
        slots = slot_mapping(*entry_rows, batch.cmp_block_table, cache.cmp_cache.shape[1])
        writes.append((cache.cmp_cache, side.entries.to(cache.cmp_cache.dtype), slots))
        check_writes(*writes[-1])
        if side.index_entries is not None:
            index_keys = indexer.hadamard(side.index_entries.to(kv.dtype))
            stored = stored_keys(cache.index_cache, index_keys, slots)
            writes += [(part, rows, slots) for part, rows in zip(parts_of(cache.index_cache), stored, strict=True)]
    for part, rows, slots in writes:
        call.ops.scattered_rows_(part, rows, slots)
    for state, after in ((cache.cmp_state, side.cmp_state), (cache.index_state, side.index_state)):
        for part, values in zip(state, after or (), strict=False):
            part[batch.state_indices] = values
    return cache


def copied(cache: LayerCache) -> LayerCache:
    """The same cache in memory of its own."""

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else type(value)(*map(copy, value))

    return copy(cache)
