"""Where the rows of a step lie on one rank: what all layers of a ratio share, made once and used by each.

Nothing here depends on a layer's weights or on hidden states. `_layer_parts` computes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dsacp_npu._layer_records import LayerBatch, LayerCache, LayerWeights, Rows
from dsacp_npu._tensors import Int32, torch, values_known
from dsacp_npu.compressor import EntryPlan, emitted_entries
from dsacp_npu.extents import LocalExtents, token_positions, token_requests
from dsacp_npu.paging import block_table_rows, slot_mapping
from dsacp_npu.partition import counted
from dsacp_npu.rope import RopeTable, rope_table
from dsacp_ref.config import AttentionConfig


class Kind(NamedTuple):
    """What all layers of a ratio have in common on one rank.

    Fields:
        config: AttentionConfig, its heads and groups those that queries are made for here.
        ratio: int, tokens of an entry; 1 in window-only layers.
        overlap: bool, whether an entry reaches back into the window before its own.
        indexed: bool, whether an indexer chooses among the entries.
        frequencies: the floats of the one RoPE table.
        ops: the functions to use.
    """

    config: AttentionConfig
    ratio: int
    overlap: bool
    indexed: bool
    frequencies: Sequence[float]
    ops: Any


class Sizes(NamedTuple):
    """Rows of a block of raw keys, and of a block of entries."""

    block_size: int
    cmp_block_size: int


class Queries(NamedTuple):
    """The rows whose queries a rank takes, as operators get them.

    Fields:
        rows: Rows.
        table: RopeTable of their positions.
        extents: LocalExtents, one operator row a run of queries.
        swa_block_table, cmp_block_table: int32[operator rows, max blocks].
        attention, indexer: what the backend's operators want to know of the step beforehand; no entry where they do
            not ask.
    """

    rows: Rows
    table: RopeTable
    extents: LocalExtents
    swa_block_table: Int32
    cmp_block_table: Int32
    attention: dict[str, Any]
    indexer: dict[str, Any]


class Entries(NamedTuple):
    """The entries that a step completes, and where they go.

    Fields:
        plan: EntryPlan, without its unused capacity where that can be read.
        slots: int32[entries].
    """

    plan: EntryPlan
    slots: Int32


class Geometry(NamedTuple):
    """One rank's step, for all layers of a ratio.

    Fields:
        batch: LayerBatch.
        projected: Rows whose key side this rank projects.
        table: RopeTable of their positions.
        swa_slots: int32[rows], where the raw keys go that this rank comes to know, in the order it knows them.
        entries: Entries; None in window-only layers.
        queries: Queries.
    """

    batch: LayerBatch
    projected: Rows
    table: RopeTable
    swa_slots: Int32
    entries: Entries | None
    queries: Queries


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


def sizes_of(cache: LayerCache) -> Sizes:
    """The block sizes of a cache."""
    return Sizes(cache.swa_cache.shape[1], cache.cmp_cache.shape[1])


def kind_of(weights: LayerWeights, config: AttentionConfig, frequencies: Sequence[float], ops: Any) -> Kind:
    """The kind of a layer with these weights."""
    part = weights.compressor
    if part is None:
        return Kind(config, 1, overlap=False, indexed=False, frequencies=frequencies, ops=ops)
    overlap = len(part.wkv) > len(part.norm_weight)
    return Kind(config, len(part.ape), overlap, weights.indexer is not None, frequencies, ops)


def whole_extents(batch: LayerBatch) -> LocalExtents:
    """The operator rows of one device: one a request."""
    return LocalExtents(batch.query_start_loc, batch.seq_lens, counted(len(batch.seq_lens), batch.seq_lens))


def whole_geometry(batch: LayerBatch, num_rows: int, sizes: Sizes, kind: Kind, *, fixed: bool = False) -> Geometry:
    """The step of a device that has all rows. ``fixed`` keeps shapes that do not depend on lengths."""
    rows = rows_of(counted(num_rows, batch.seq_lens), batch)
    queries = queries_of(rows, whole_extents(batch), batch, sizes, kind)
    entries = entries_of(batch, num_rows, sizes, kind, fixed=fixed)
    return Geometry(batch, rows, queries.table, swa_slots(rows, batch, sizes), entries, queries)


def queries_of(rows: Rows, extents: LocalExtents, batch: LayerBatch, sizes: Sizes, kind: Kind) -> Queries:
    """What operators get for these rows' queries."""
    swa_table = block_table_rows(batch.swa_block_table, extents.request_indices)
    cmp_table = block_table_rows(batch.cmp_block_table, extents.request_indices)
    table = rope_table(rows.positions, kind.frequencies)
    queries = Queries(rows, table, extents, swa_table, cmp_table, {}, {})
    attention, indexer = operator_metadata(queries, sizes, kind)
    return queries._replace(attention=attention, indexer=indexer)


def operator_metadata(queries: Queries, sizes: Sizes, kind: Kind) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the backend's attention and indexer want to know of the step beforehand, by argument name."""
    functions, extents = getattr(kind.ops, "functions", {}), queries.extents
    if "attention_lists" in functions:
        lists = kind.ops.attention_lists(
            queries.swa_block_table,
            queries.cmp_block_table if kind.ratio > 1 and not kind.indexed else None,
            extents.cu_seqlens_q,
            extents.seqused_kv,
            num_queries=len(queries.rows.positions),
            block_sizes=sizes,
            window_size=kind.config.window_size,
            compress_ratio=kind.ratio,
        )
        return lists, {}
    if "attention_metadata" not in functions or len(extents.seqused_kv) == 0:
        return {}, {}
    lengths, config = (extents.cu_seqlens_q, extents.seqused_kv), kind.config
    topk = {"index_topk": config.index_topk} if kind.indexed else {}
    sizes = {"compress_ratio": kind.ratio, **topk}
    attention = kind.ops.attention_metadata(
        *lengths, num_heads=config.num_heads, window_size=config.window_size, **sizes
    )
    if not kind.indexed:
        return {"metadata": attention}, {}
    indexer = kind.ops.indexer_metadata(*lengths, num_heads=config.index_n_heads, **sizes)
    return {"metadata": attention}, {"metadata": indexer}


def swa_slots(rows: Rows, batch: LayerBatch, sizes: Sizes) -> Int32:
    """Where the raw keys of these rows go."""
    return slot_mapping(rows.positions, rows.requests, batch.swa_block_table, sizes.block_size)


def entries_of(batch: LayerBatch, num_rows: int, sizes: Sizes, kind: Kind, *, fixed: bool = False) -> Entries | None:
    """The entries that the step completes; None in window-only layers."""
    if kind.ratio == 1:
        return None
    plan = emitted_entries(batch.query_start_loc, num_computed_tokens(batch), kind.ratio, num_rows=num_rows)
    if not fixed:
        plan = used_part(plan)
    slots = slot_mapping(plan.entry_indices, plan.entry_requests, batch.cmp_block_table, sizes.cmp_block_size)
    return Entries(plan, slots)


def used_part(plan: EntryPlan) -> EntryPlan:
    """The plan without its unused capacity where that can be read; elsewhere all of it, -1 where unused."""
    if not values_known(plan.entry_start_loc):
        return plan
    count = int(plan.entry_start_loc[-1])
    return plan._replace(entry_requests=plan.entry_requests[:count], entry_indices=plan.entry_indices[:count])


def moved(value: Any, device: torch.device) -> Any:
    """Records, lists and mappings with their tensors on a device."""
    return with_tensors(value, lambda tensor: tensor.to(device))


def with_tensors(value: Any, change: Any) -> Any:
    """The same nest of records, tuples, lists and mappings, every tensor replaced by what ``change`` makes of it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_tensors(part, change) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(part, change) for part in value)
    return value
