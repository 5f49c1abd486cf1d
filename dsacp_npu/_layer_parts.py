"""The pieces that a layer is made of, on the device of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from dsacp_npu import attention, compressor, indexer, quant, rope
from dsacp_npu._geometry import Geometry, Kind, Queries, num_computed_tokens, with_tensors
from dsacp_npu._layer_records import KeyRows, LayerBatch, LayerCache, LayerWeights
from dsacp_npu._tensors import Float, Int32, check_floats, dtype_name, torch
from dsacp_npu.compressor import CompressorState, CompressorWeights, EntryPlan, ProjectedRows
from dsacp_npu.indexer import index_head_weights, parts_of, stored_keys
from dsacp_npu.paging import check_writes, scattered_rows_
from dsacp_npu.quant import QuantizedRows, QuantizedWeight
from dsacp_ref.spec import contract_error


class Torch:
    """The functions of a layer that a backend may replace, as torch code of the mirror."""

    apply_rope = staticmethod(rope.apply_rope)
    apply_inverse_rope = staticmethod(rope.apply_inverse_rope)
    compress_ = staticmethod(compressor.compress_)
    projected_rows = staticmethod(compressor.projected_rows)
    rms_norm = staticmethod(compressor.rms_norm)
    pooled_entries = staticmethod(compressor.pooled_entries)
    updated_state_ = staticmethod(compressor.updated_state_)
    hadamard = staticmethod(indexer.hadamard)
    index_queries = staticmethod(indexer.index_queries)
    lightning_indexer = staticmethod(indexer.lightning_indexer)
    window_attention = staticmethod(attention.window_attention)
    all_entries_attention = staticmethod(attention.all_entries_attention)
    selected_attention = staticmethod(attention.selected_attention)
    scattered_rows_ = staticmethod(scattered_rows_)
    quantized_rows = staticmethod(quant.quantized_rows)
    rms_norm_quantized = staticmethod(quant.rms_norm_quantized)
    quant_matmul = staticmethod(quant.quant_matmul)

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
        return low_rank_rows(out, wo_a) @ wo_b.T.to(out.dtype)


class Call(NamedTuple):
    """One layer of a kind, with the weights that this rank uses in this step.

    Fields:
        kind: Kind.
        weights: LayerWeights: wq_b and attn_sink of as many heads as ``kind.config`` has; wo_a and wo_b of the groups
            that this rank projects, or keeps to be gathered.
        logit_bound: float, which no logit of the layer exceeds in size, for a backend that has a form of attention
            without a running maximum; None where it is not known, or not asked for.
    """

    kind: Kind
    weights: LayerWeights
    logit_bound: float | None = None


class Coded(NamedTuple):
    """Rows in int8, coded once for all projections that share them.

    Fields:
        rows: QuantizedRows.
        dtype: str, of the rows that were coded; products come out in it.
    """

    rows: QuantizedRows
    dtype: str


class KeySide(NamedTuple):
    """All that a step puts into a cache, computed before anything is written.

    Fields:
        kv: raw keys, one for each of the geometry's ``swa_slots``.
        entries, index_entries: of the geometry's entries; None where the layer has none.
        cmp_state, index_state: the rings of the batch's requests after the step.
    """

    kv: Float
    entries: Float | None = None
    index_entries: Float | None = None
    cmp_state: CompressorState | None = None
    index_state: CompressorState | None = None


def own_or_mirrors(name: str, call: Call) -> Callable[..., Float]:
    """The backend's function of this name if it has one, the mirror's otherwise: no operator is made for these."""
    ops = call.kind.ops
    function: Callable[..., Float] = getattr(ops if name in getattr(ops, "functions", {}) else Torch, name)
    return function


def normed(x: Float, weight: Float | None, call: Call) -> Float:
    """The rows over their root mean square, times the weight where there is one."""
    return own_or_mirrors("rms_norm", call)(x, weight, call.kind.config.rms_norm_eps)


def rotated_keys(x: Float, call: Call) -> Float:
    """Index entries as the cache keeps them, rotated as the queries are."""
    return own_or_mirrors("hadamard", call)(x)


# --- projections ---


def low_rank_rows(out: Float, wo_a: Float) -> Float:
    """Every group's heads projected, the groups side by side."""
    groups, lora, width = wo_a.shape
    grouped = out.reshape(len(out), groups, width).transpose(0, 1)
    return (grouped @ wo_a.transpose(1, 2).to(out.dtype)).transpose(0, 1).reshape(len(out), groups * lora)


def projection_source(x: Float, call: Call) -> Float | Coded:
    """What wq_a and wkv project of these rows: the rows, or their codes where the weights are int8."""
    if not isinstance(call.weights.wkv, QuantizedWeight):
        return x
    return Coded(call.kind.ops.quantized_rows(x), dtype_name(x))


def taken(source: Float | Coded, indices: torch.Tensor) -> Float | Coded:
    """Some of the rows."""
    if isinstance(source, Coded):
        return Coded(QuantizedRows(*(part[indices] for part in source.rows)), source.dtype)
    return source[indices]


def product(source: Float | Coded, weight: Float | QuantizedWeight, call: Call) -> Float:
    """The rows times the weight, transposed."""
    if isinstance(weight, QuantizedWeight):
        assert isinstance(source, Coded)  # a layer's weights are int8 all together
        return call.kind.ops.quant_matmul(source.rows, weight, dtype=source.dtype)
    return source @ weight.T.to(source.dtype)


def output_rows(out: Float, wo_a: Float, wo_b: Float | QuantizedWeight, call: Call) -> Float:
    """The output that these groups make of their heads' attention."""
    ops = call.kind.ops
    if isinstance(wo_b, QuantizedWeight):
        return ops.quant_matmul(ops.quantized_rows(low_rank_rows(out, wo_a)), wo_b, dtype=dtype_name(out))
    return ops.projected_output(out, wo_a, wo_b)


# --- the query side ---


def query_latent(source: Float | Coded, call: Call) -> Float | Coded:
    """The query latent after its norm: it feeds the heads and the indexer."""
    qr, weight = product(source, call.weights.wq_a, call), call.weights.q_norm
    if isinstance(source, Coded):
        rows = call.kind.ops.rms_norm_quantized(qr, weight, call.kind.config.rms_norm_eps)
        return Coded(rows, source.dtype)
    return normed(qr, weight, call)


def head_queries(qr: Float | Coded, table: tuple[Float, Float], call: Call) -> Float:
    """The queries of as many heads as the weights have, each normed over its channels, then turned."""
    # No array of all heads outlives the call that takes it: they are the largest of a layer.
    heads = normed(by_head(product(qr, call.weights.wq_b, call), call.kind.config.head_dim), None, call)
    return call.kind.ops.apply_rope(heads, *table)


def by_head(flat: Float, head_dim: int) -> Float:
    """The same numbers with an axis for heads."""
    return flat.reshape(len(flat), flat.shape[1] // head_dim, head_dim)


def index_queries(qr: Float | Coded, table: tuple[Float, Float], wq_b: Float | QuantizedWeight, call: Call) -> Float:
    """The queries of the index heads, turned and rotated."""
    d, ops = call.kind.config.index_head_dim, call.kind.ops
    if not isinstance(wq_b, QuantizedWeight):
        return ops.index_queries(qr, wq_b, *table, index_head_dim=d)
    return indexer.hadamard(ops.apply_rope(by_head(product(qr, wq_b, call), d), *table))


def chosen_entries(x: Float, qr: Float | Coded, queries: Queries, cache: LayerCache, call: Call) -> Int32:
    """What the indexer chooses for some rows; 0 wide in a layer without one."""
    config, ops, extents = call.kind.config, call.kind.ops, queries.extents
    weights = call.weights.indexer
    if weights is None:
        return extents.cu_seqlens_q.new_zeros(len(x), 0)
    return ops.lightning_indexer(
        index_queries(qr, queries.table, weights.wq_b, call),
        index_head_weights(x, weights.weights_proj, index_head_dim=config.index_head_dim),
        cache.index_cache,
        queries.cmp_block_table,
        extents.cu_seqlens_q,
        extents.seqused_kv,
        compress_ratio=call.kind.ratio,
        index_topk=config.index_topk,
        **queries.indexer,
    )


def attended(q: Float, topk_indices: Int32, queries: Queries, cache: LayerCache, call: Call) -> Float:
    """Attention of some rows in the form that the layer's ratio asks for."""
    config, ops, extents = call.kind.config, call.kind.ops, queries.extents
    swa = (cache.swa_cache, queries.swa_block_table)
    lengths = (extents.cu_seqlens_q, extents.seqused_kv, call.weights.attn_sink)
    sizes = {"window_size": config.window_size, "softmax_scale": 1 / math.sqrt(config.head_dim), **queries.attention}
    if call.logit_bound is not None:
        sizes["logit_bound"] = call.logit_bound
    if call.weights.compressor is None:
        return ops.window_attention(q, *swa, *lengths, **sizes).out
    cmp = (cache.cmp_cache, queries.cmp_block_table)
    sizes["compress_ratio"] = call.kind.ratio
    if call.weights.indexer is None:
        return ops.all_entries_attention(q, *swa, *cmp, *lengths, **sizes).out
    return ops.selected_attention(q, *swa, *cmp, topk_indices, *lengths, **sizes).out


def query_side(
    x: Float,
    source: Float | Coded,
    queries: Queries,
    cache: LayerCache,
    call: Call,
    topk_indices: Int32 | None,
) -> tuple[Float, Int32]:
    """Attention output of some rows, turned back; and the entries it used."""
    qr = query_latent(source, call)
    if topk_indices is None:
        topk_indices = chosen_entries(x, qr, queries, cache, call)
    out = attended(head_queries(qr, queries.table, call), topk_indices, queries, cache, call)
    return call.kind.ops.apply_inverse_rope(out, *queries.table), topk_indices


def share_of(weight: Float | QuantizedWeight, rank: int, cp_size: int) -> Float | QuantizedWeight:
    """One rank's share of a weight whose first axis goes by head."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedWeight(*(share_of(part, rank, cp_size) for part in weight))
    size = len(weight) // cp_size
    return weight[rank * size : (rank + 1) * size]


def share_of_columns(weight: Float | QuantizedWeight, rank: int, cp_size: int) -> Float | QuantizedWeight:
    """One rank's share of a weight whose second axis goes by group."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedWeight(share_of_columns(weight.values, rank, cp_size), weight.scales)
    return share_of(weight.T, rank, cp_size).T


def with_groups(weights: LayerWeights, rank: int, cp_size: int) -> LayerWeights:
    """The weights with one rank's share of the groups: column-parallel wo_a, row-parallel wo_b."""
    return weights._replace(
        wo_a=share_of(weights.wo_a, rank, cp_size), wo_b=share_of_columns(weights.wo_b, rank, cp_size)
    )


def with_heads(weights: LayerWeights, rank: int, cp_size: int) -> LayerWeights:
    """The weights with one rank's share of the heads."""
    return weights._replace(
        wq_b=share_of(weights.wq_b, rank, cp_size), attn_sink=share_of(weights.attn_sink, rank, cp_size)
    )


# --- the key side ---


def raw_keys(source: Float | Coded, table: tuple[Float, Float], call: Call) -> Float:
    """The raw keys of some rows, normed and turned."""
    kv = normed(product(source, call.weights.wkv, call), call.weights.kv_norm, call)
    return call.kind.ops.apply_rope(kv, *table)


def key_rows(x: Float, source: Float | Coded, geometry: Geometry, call: Call) -> KeyRows:
    """The projections of the key side for the rows that this rank projects."""
    nothing = ProjectedRows(x.new_zeros(len(x), 0), x.new_zeros(len(x), 0))
    weights, project, positions = call.weights, call.kind.ops.projected_rows, geometry.projected.positions
    return KeyRows(
        raw_keys(source, geometry.table, call),
        project(x, positions, weights.compressor) if weights.compressor else nothing,
        project(x, positions, weights.indexer.compressor) if weights.indexer else nothing,
    )


def states_of(state: CompressorState, indices: Int32) -> CompressorState:
    """The rings of these state slots, in memory of their own."""
    return CompressorState(*(part[indices] for part in state))


def side_of_hidden(x: Float, source: Float | Coded, geometry: Geometry, cache: LayerCache, call: Call) -> KeySide:
    """The key side from the hidden rows of every token."""
    weights, batch, entries = call.weights, geometry.batch, geometry.entries
    side = KeySide(raw_keys(source, geometry.table, call))
    if weights.compressor is None or entries is None:
        return side

    def compressed(part: CompressorWeights, state: CompressorState) -> tuple[Float, CompressorState]:
        done, after = call.kind.ops.compress_(
            x,
            part,
            batch.query_start_loc,
            num_computed_tokens(batch),
            states_of(state, batch.state_indices),
            call.kind.frequencies,
            eps=call.kind.config.rms_norm_eps,
        )
        return done.entries[: len(entries.slots)], after

    pooled, cmp_state = compressed(weights.compressor, cache.cmp_state)
    side = side._replace(entries=pooled, cmp_state=cmp_state)
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
    return call.kind.ops.pooled_entries(
        projected,
        plan.entry_requests,
        plan.entry_indices,
        batch.query_start_loc,
        num_computed_tokens(batch),
        states_of(state, batch.state_indices),
        part.norm_weight,
        call.kind.frequencies,
        compress_ratio=call.kind.ratio,
        eps=call.kind.config.rms_norm_eps,
    )


def carried_state(projected: ProjectedRows, state: CompressorState, batch: LayerBatch, call: Call) -> CompressorState:
    """The rings of the batch's requests after the step."""
    old = states_of(state, batch.state_indices)
    return call.kind.ops.updated_state_(projected, batch.query_start_loc, num_computed_tokens(batch), old)


def side_of_rows(keys: KeyRows, geometry: Geometry, cache: LayerCache, call: Call) -> KeySide:
    """The key side from the projections of every token."""
    weights, batch, entries = call.weights, geometry.batch, geometry.entries
    side = KeySide(keys.kv)
    if weights.compressor is None or entries is None:
        return side
    side = side._replace(
        entries=step_entries(keys.cmp_rows, weights.compressor, cache.cmp_state, entries.plan, batch, call),
        cmp_state=carried_state(keys.cmp_rows, cache.cmp_state, batch, call),
    )
    if weights.indexer is None:
        return side
    index = weights.indexer.compressor
    return side._replace(
        index_entries=step_entries(keys.index_rows, index, cache.index_state, entries.plan, batch, call),
        index_state=carried_state(keys.index_rows, cache.index_state, batch, call),
    )


def written_(cache: LayerCache, side: KeySide, geometry: Geometry, call: Call) -> LayerCache:
    """The cache with the step's key side written into it; everything is found to fit before the first write."""
    kv = side.kv.to(cache.swa_cache.dtype)
    writes = [(cache.swa_cache, kv, geometry.swa_slots)]
    check_writes(*writes[0])
    if geometry.entries is not None and side.entries is not None:
        slots = geometry.entries.slots
        writes.append((cache.cmp_cache, side.entries.to(cache.cmp_cache.dtype), slots))
        check_writes(*writes[-1])
        if side.index_entries is not None:
            index_keys = rotated_keys(side.index_entries.to(kv.dtype), call)
            stored = stored_keys(cache.index_cache, index_keys, slots)
            writes += [(part, rows, slots) for part, rows in zip(parts_of(cache.index_cache), stored, strict=True)]
    for part, rows, slots in writes:
        call.kind.ops.scattered_rows_(part, rows, slots)
    for state, after in ((cache.cmp_state, side.cmp_state), (cache.index_state, side.index_state)):
        for part, values in zip(state, after or (), strict=False):
            part[geometry.batch.state_indices] = values
    return cache


def one_device(
    x: Float, geometry: Geometry, cache: LayerCache, call: Call, given_topk: Int32 | None
) -> tuple[Float, Int32]:
    """A step of a device that has all rows, written into its cache: the output of the heads and groups that the
    weights have, and the chosen entries."""
    source = projection_source(x, call)
    written_(cache, side_of_hidden(x, source, geometry, cache, call), geometry, call)
    out, chosen = query_side(x, source, geometry.queries, cache, call, given_topk)
    return output_rows(out, call.weights.wo_a, call.weights.wo_b, call), chosen


def copied(cache: LayerCache) -> LayerCache:
    """The same cache in memory of its own."""
    copy: LayerCache = with_tensors(cache, torch.Tensor.clone)
    return copy
