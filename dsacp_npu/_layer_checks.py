"""What a layer refuses, in the reference's words, and in its order."""

from __future__ import annotations

from collections.abc import Mapping

from dsacp_npu._layer_records import LayerBatch, LayerCache, LayerWeights
from dsacp_npu._tensors import (
    Float,
    Int32,
    check_floats,
    check_tensor,
    computing_dtype,
    dtype_name,
    torch,
    values_known,
)
from dsacp_npu.attention import check_topk
from dsacp_npu.compressor import checked_weights
from dsacp_npu.extents import check_batch
from dsacp_npu.paging import check_slots, slot_mapping
from dsacp_npu.partition import Partition, counted
from dsacp_npu.quant import QuantizedVectors
from dsacp_npu.visibility import visible_entries
from dsacp_ref.config import AttentionConfig
from dsacp_ref.spec import check_int, check_record, contract_error


def check_weights(weights: LayerWeights, config: AttentionConfig, compress_ratio: int) -> None:
    """Refuse weights of another layer kind, or of another model."""
    check_record("weights", weights, LayerWeights)
    check_record("config", config, AttentionConfig)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1)
    heads, hidden, groups = config.num_heads, config.hidden_size, config.o_groups
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a": (config.q_lora_rank, hidden),
        "q_norm": (config.q_lora_rank,),
        "wq_b": (heads * config.head_dim, config.q_lora_rank),
        "wkv": (config.head_dim, hidden),
        "kv_norm": (config.head_dim,),
        "attn_sink": (heads,),
        "wo_a": (groups, config.o_lora_rank, heads // groups * config.head_dim),
        "wo_b": (hidden, groups * config.o_lora_rank),
    }
    for name, shape in shapes.items():
        check_floats(f"weights.{name}", getattr(weights, name), shape, "the shapes follow from config")
    if (weights.compressor is None) != (compress_ratio == 1):
        raise contract_error(
            "weights.compressor",
            "be there exactly when compress_ratio is above 1",
            f"{'none' if weights.compressor is None else 'one'} at compress_ratio {compress_ratio}",
            "compress_ratio 1 is a window-only layer",
        )
    compressors = [("weights.compressor", weights.compressor, config.head_dim)]
    if weights.indexer:
        if weights.compressor is None:
            raise contract_error("weights.indexer", "be None in a window-only layer", "one", "it chooses among entries")
        width = config.index_n_heads * config.index_head_dim
        check_floats("weights.indexer.wq_b", weights.indexer.wq_b, (width, config.q_lora_rank))
        check_floats("weights.indexer.weights_proj", weights.indexer.weights_proj, (config.index_n_heads, hidden))
        compressors.append(("weights.indexer.compressor", weights.indexer.compressor, config.index_head_dim))
    for name, compressor, d in compressors:
        if compressor is None:
            continue
        width, ratio = checked_weights(compressor)
        if ratio != compress_ratio or len(compressor.norm_weight) != d or compressor.wkv.shape[1] != hidden:
            raise contract_error(
                name,
                f"pool {compress_ratio} tokens of {hidden} into {d} channels",
                f"{ratio} tokens of {compressor.wkv.shape[1]} into {len(compressor.norm_weight)}",
                "ape has one row a token of the window",
            )


def check_step(x: Float, batch: LayerBatch, cache: LayerCache, weights: LayerWeights, config: AttentionConfig) -> None:
    """Refuse a step whose rows, tables, caches and state slots do not belong together."""
    check_record("batch", batch, LayerBatch)
    check_batch(batch.query_start_loc, batch.seq_lens)
    check_floats("x", x, ("num_tokens", config.hidden_size), "the block input after its norm")
    check_batch_tables(batch)
    check_batch_slots(batch, check_cache(cache, x, weights, config))
    if values_known(batch.query_start_loc) and len(x) < batch.query_start_loc[-1]:
        raise contract_error(
            "x", f"have at least {int(batch.query_start_loc[-1])} rows", len(x), "query_start_loc counts global rows"
        )


def check_batch_tables(batch: LayerBatch) -> None:
    """Refuse tables and state slots that are not one a request."""
    num_reqs = len(batch.seq_lens)
    check_tensor("batch.swa_block_table", batch.swa_block_table, ("int32",), (num_reqs, "max_blocks"))
    check_tensor("batch.cmp_block_table", batch.cmp_block_table, ("int32",), (num_reqs, "max_cmp_blocks"))
    check_tensor("batch.state_indices", batch.state_indices, ("int32",), (num_reqs,), "one slot a request")


def check_batch_slots(batch: LayerBatch, num_slots: int) -> None:
    """Refuse state slots that are shared, or that the cache does not have."""
    indices = batch.state_indices
    if values_known(indices) and (
        len(indices.unique()) != len(indices) or (indices < 0).any() or (indices >= num_slots).any()
    ):
        raise contract_error(
            "batch.state_indices", f"be distinct and in [0, {num_slots})", indices.tolist(), "one slot a request"
        )


def check_cache(cache: LayerCache, x: Float, weights: LayerWeights, config: AttentionConfig) -> int:
    """The number of state slots, once every part that the layer has is found to fit the others."""
    check_record("cache", cache, LayerCache)
    dtype = (dtype_name(x),)
    wide = ("float64" if computing_dtype(x.dtype) == torch.float64 else "float32",)
    check_tensor("cache.swa_cache", cache.swa_cache, dtype, ("num_blocks", "block_size", config.head_dim))
    check_tensor("cache.cmp_state.num_tokens", cache.cmp_state.num_tokens, ("int32",), ("num_slots",))
    num_slots = len(cache.cmp_state.num_tokens)
    blocks: tuple[int | str, int | str] = ("num_cmp_blocks", "cmp_block_size")
    for name, entries, state, compressor in (
        ("cmp", cache.cmp_cache, cache.cmp_state, weights.compressor),
        ("index", cache.index_cache, cache.index_state, weights.indexer.compressor if weights.indexer else None),
    ):
        if name == "index" and compressor is None:
            continue
        width, d = (checked_weights(compressor)[0], len(compressor.norm_weight)) if compressor else (0, 0)
        blocks = check_entries(f"cache.{name}_cache", entries, dtype, (*blocks, d))
        check_tensor(f"cache.{name}_state.kv", state.kv, wide, (num_slots, "num_rows", width), "use empty_cache")
        check_tensor(f"cache.{name}_state.score", state.score, wide, tuple(state.kv.shape), "use empty_cache")
        for part in ("held_start", "num_tokens"):
            counts = getattr(state, part)
            check_tensor(f"cache.{name}_state.{part}", counts, ("int32",), (num_slots,), "one a state slot")
    return num_slots


def check_entries(
    name: str, entries: Float | QuantizedVectors, dtype: tuple[str], shape: tuple[int | str, ...]
) -> tuple[int, int]:
    """The blocks of an entry cache and their size, once it has this shape; index keys may be int8."""
    hint = "entries and index keys share a block table"
    if name == "cache.index_cache" and isinstance(entries, QuantizedVectors):
        check_tensor(f"{name}.values", entries.values, ("int8",), shape, hint)
        blocks = tuple(entries.values.shape[:2])
        check_tensor(f"{name}.scales", entries.scales, ("float16",), blocks, "one scale a vector")
        return blocks
    check_tensor(name, entries, dtype, shape, hint)
    return tuple(entries.shape[:2])


def check_given(given_topk: Int32 | None, num_rows: int, weights: LayerWeights, config: AttentionConfig) -> None:
    """Refuse a handed-in selection where there is nothing to select, or of another shape."""
    if given_topk is None:
        return
    if weights.indexer is None:
        raise contract_error("given_topk", "be None in a layer without an indexer", "a selection")
    check_tensor("given_topk", given_topk, ("int32",), (num_rows, config.index_topk), "one row a token of x")


def check_inputs(inputs: Mapping[int, Float], partition: Partition, rows: str) -> None:
    """Refuse inputs, by rank, that are not laid out as the split and the rows between layers say."""
    first = next(iter(inputs.values()))
    for rank, x in inputs.items():
        check_floats("inputs", x, ("num_rows", "hidden"), f"rank {rank}")
        shape = (len(first) if rows == "full" else "num_rows", first.shape[1])
        check_tensor("inputs", x, (dtype_name(first),), shape, f"rank {rank} must be like rank 0")
        needed = len(partition.restore_indices) if rows == "full" else len(partition.token_indices[rank])
        if len(x) < needed or (rows == "scattered" and len(x) > needed):
            raise contract_error(
                "inputs", f"have {needed} rows on rank {rank} with rows {rows!r}", len(x), "the split says which rows"
            )


def check_reads(
    positions: Int32,
    batch: LayerBatch,
    cache: LayerCache,
    given_topk: Int32 | None,
    compress_ratio: int,
    config: AttentionConfig,
) -> None:
    """Refuse tables and selections that attention could not read: in place, it would find out after the writes."""
    if not values_known(positions, *batch):
        return
    lengths = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    real = (batch.seq_lens > 0) & (lengths > 0)
    first = (batch.seq_lens - lengths - (config.window_size - 1)).clamp(min=0)
    check_range(first, batch.seq_lens, real, batch.swa_block_table, cache.swa_cache)
    if compress_ratio == 1:
        return
    entries = batch.seq_lens // compress_ratio
    check_range(torch.zeros_like(first), entries, real, batch.cmp_block_table, cache.cmp_cache)
    if given_topk is not None and values_known(given_topk):
        check_topk(given_topk[: len(positions)], visible_entries(positions, compress_ratio))


def check_range(starts: Int32, ends: Int32, real: torch.Tensor, block_table: Int32, cache: Float) -> None:
    """Refuse a table that does not lead to rows [start, end) of these requests."""
    counts = (ends - starts).clamp(min=0) * real
    requests = counted(len(counts), counts).repeat_interleave(counts)
    before = counts.cumsum(0) - counts
    rows = counted(len(requests), counts) - before[requests] + starts[requests]
    slots = slot_mapping(rows.int(), requests, block_table, cache.shape[1])
    check_slots(slots, cache.shape[0] * cache.shape[1])
