"""The choice of entries by the int8 indexer operator of A2 and A3, and of tokens by those of V3.2."""

from __future__ import annotations

from dsacp_npu._index_calls import IndexCall, check_call, check_index_cache, check_queries, index_call, slots_of_rows
from dsacp_npu._operators import (
    check_contiguous,
    check_dtype,
    check_limit,
    check_multiple,
    find_operator,
    has_argument,
    limit_error,
    operator,
)
from dsacp_npu._tensors import Float, Int32, torch, values_known
from dsacp_npu.extents import check_extents, check_offsets, query_positions
from dsacp_npu.quant import QuantizedVectors
from dsacp_npu.visibility import visible_entries
from dsacp_ref.spec import INT32_MAX, check_int, contract_error

__all__ = ["indexer_metadata", "lightning_indexer"]

OPERATORS = ("npu_vllm_quant_lightning_indexer", "npu_quant_lightning_indexer")
NEEDED = "cmp_ratio"  # torch_npu has an operator of the second name that knows no compressed keys
TOKENS, CODED_TOKENS = "npu_lightning_indexer", "npu_lightning_indexer_quant"  # V3.2's: one key a token, no metadata
METADATA = ("npu_vllm_quant_lightning_indexer_metadata", "npu_quant_lightning_indexer_metadata")
HEADS, WIDTH, MOST = 64, 128, 2048
RATIOS = (1, 4, 128)
CAUSAL = 3  # right-down, in entries
NO_LIMIT = 2**63 - 1


def indexer_metadata(
    cu_seqlens_q: Int32, seqused_kv: Int32, *, num_heads: int, compress_ratio: int, index_topk: int
) -> Int32:
    """How the operator shares a step's rows among its cores: one tensor for all layers with an indexer.

    Args:
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        seqused_kv: int32[rows], raw tokens, key extent of each row.
        num_heads: int, index heads.
        compress_ratio: int, tokens per entry.
        index_topk: int, entries to choose.

    Returns:
        int32[1024]: for calls with these very lengths.

    Raises:
        ContractError: a shape or dtype does not hold.
        UnsupportedError: a size that the operator does not take, or no such operator.

    Source: operator npu_vllm_quant_lightning_indexer_metadata.
    """
    check_offsets("cu_seqlens_q", cu_seqlens_q)
    check_extents(cu_seqlens_q, seqused_kv)
    check_sizes("indexer_metadata", num_heads, compress_ratio, index_topk)
    metadata: Int32 = operator(*METADATA)(
        num_heads_q=num_heads,
        num_heads_k=1,
        head_dim=WIDTH,
        query_quant_mode=0,
        key_quant_mode=0,
        actual_seq_lengths_query=cu_seqlens_q[1:],
        actual_seq_lengths_key=seqused_kv,
        batch_size=len(seqused_kv),
        max_seqlen_q=0,  # both are read only where no lengths are given
        max_seqlen_k=0,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=index_topk,
        sparse_mode=CAUSAL,
        pre_tokens=NO_LIMIT,
        next_tokens=NO_LIMIT,
        cmp_ratio=compress_ratio,
        device=str(cu_seqlens_q.device),
    )
    return metadata


def lightning_indexer(
    index_q: Float,
    index_weights: Float,
    index_cache: Float | QuantizedVectors,
    cmp_block_table: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    *,
    compress_ratio: int,
    index_topk: int,
    metadata: Int32 | None = None,
) -> Int32:
    """`dsacp_ref.indexer.lightning_indexer` by an operator: over int8 keys at any ratio, over floats at ratio 1.

    Queries are coded by the rule of `quantized_int8`, as the reference codes them, and not by npu_dynamic_quant, whose
    roundings are not specified; weights are rounded to float16. ``metadata`` is an `indexer_metadata` of this step,
    made here when it is not given. Over float keys, which are tokens, the operator computes with queries and weights as
    they are and takes no metadata; where a score is NaN its order is undefined. int8 keys of tokens go to
    npu_lightning_indexer_quant where only that is there.
    """
    if isinstance(index_cache, torch.Tensor) and compress_ratio == 1:
        if metadata is not None:
            raise contract_error("metadata", "be None with an index_cache of floats", "a tensor", "nothing reads it")
        return tokens_from_floats(
            index_q,
            index_weights,
            index_cache,
            cmp_block_table,
            cu_seqlens_q,
            seqused_kv,
            compress_ratio=compress_ratio,
            index_topk=index_topk,
        )
    if not isinstance(index_cache, QuantizedVectors):
        got = type(index_cache).__name__
        rule = "hold int8 codes (QuantizedVectors), or floats at compress_ratio 1"
        raise limit_error("lightning_indexer", "index_cache", rule, got)
    check_queries(index_q, index_weights, "num_queries")
    keys, scales = index_cache
    check_index_cache(index_cache, "int8", index_q.shape[2], "as the queries")
    check_sizes("lightning_indexer", index_q.shape[1], compress_ratio, index_topk)
    check_limit("lightning_indexer", "index_head_dim", index_q.shape[2], (WIDTH,))
    check_multiple("lightning_indexer", "block size of index_cache", keys.shape[1], 16, 16, 1024)
    call = index_call(
        index_q,
        index_weights,
        index_cache,
        cmp_block_table,
        cu_seqlens_q,
        seqused_kv,
        compress_ratio=compress_ratio,
        index_topk=index_topk,
    )
    if 0 in (len(index_q), len(seqused_kv), len(keys), cmp_block_table.shape[1]):
        return call.num_visible.new_full((len(index_q), call.index_topk), -1)
    # Without its leading zero: with it the operator has to guess which form it got.
    lengths = cu_seqlens_q[1:], seqused_kv
    cache = QuantizedVectors(keys.unsqueeze(2), scales.unsqueeze(2))
    if compress_ratio == 1 and not find_operator(*OPERATORS, needing=NEEDED)[1] and find_operator(CODED_TOKENS)[1]:
        chosen = tokens_from_codes(call, cache, lengths)
    else:
        if metadata is None:
            metadata = indexer_metadata(
                cu_seqlens_q, seqused_kv, num_heads=HEADS, compress_ratio=compress_ratio, index_topk=call.index_topk
            )
        chosen = chosen_by_operator(
            call.queries,  # type: ignore[arg-type]  # coded, as the cache is
            call.weights,
            cache,
            cmp_block_table,
            lengths,
            compress_ratio,
            call.index_topk,
            metadata,
        )
    return chosen.masked_fill((call.num_visible == 0)[:, None], -1)


def tokens_from_floats(
    index_q: Float,
    index_weights: Float,
    index_cache: Float,
    block_table: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    *,
    compress_ratio: int,
    index_topk: int,
) -> Int32:
    """The choice among tokens whose keys are not coded."""
    block_size = check_call(index_q, index_weights, index_cache, block_table, seqused_kv)
    check_dtype("lightning_indexer", "index_q", index_q)
    check_sizes("lightning_indexer", index_q.shape[1], compress_ratio, index_topk)
    check_limit("lightning_indexer", "index_head_dim", index_q.shape[2], (WIDTH,))
    check_multiple("lightning_indexer", "block size of index_cache", block_size, 16, 16, 1024)
    check_contiguous("lightning_indexer", "index_cache", index_cache)
    positions = query_positions(cu_seqlens_q, seqused_kv, num_rows=len(index_q))
    num_visible = visible_entries(positions, compress_ratio)
    if values_known(index_q, block_table, cu_seqlens_q, seqused_kv):
        slots_of_rows(num_visible, block_table, cu_seqlens_q, block_size, len(index_cache) * block_size)
    if 0 in (len(index_q), len(seqused_kv), len(index_cache), block_table.shape[1]):
        return num_visible.new_full((len(index_q), index_topk), -1)
    indices, _ = operator(TOKENS)(
        index_q.detach().contiguous(),
        index_cache.unsqueeze(2),
        index_weights.detach().contiguous(),
        actual_seq_lengths_query=cu_seqlens_q[1:],  # without its leading zero: with it there would be a request more
        actual_seq_lengths_key=seqused_kv,
        block_table=block_table,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=index_topk,
        sparse_mode=CAUSAL,
        pre_tokens=NO_LIMIT,
        next_tokens=NO_LIMIT,
        return_value=False,
    )
    chosen: Int32 = indices.squeeze(1).masked_fill((num_visible == 0)[:, None], -1)
    return chosen


def tokens_from_codes(call: IndexCall, keys: QuantizedVectors, lengths: tuple[Int32, Int32]) -> Int32:
    """The choice among tokens whose keys are coded, by the operator that knows no ratio."""
    queries, weights = call.queries, call.weights
    chosen: Int32 = operator(CODED_TOKENS)(
        queries.values,
        keys.values,
        weights,
        queries.scales,  # type: ignore[union-attr]  # coded, as the cache is
        keys.scales,
        actual_seq_lengths_query=lengths[0],
        actual_seq_lengths_key=lengths[1],
        block_table=call.block_table,
        query_quant_mode=0,
        key_quant_mode=0,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=call.index_topk,
        sparse_mode=CAUSAL,
    )
    return chosen.squeeze(1)


def chosen_by_operator(
    queries: QuantizedVectors,
    weights: Float,
    keys: QuantizedVectors,
    block_table: Int32,
    lengths: tuple[Int32, Int32],
    compress_ratio: int,
    index_topk: int,
    metadata: Int32,
) -> Int32:
    """The operator's call, in whichever of its two forms is there."""
    function = operator(*OPERATORS, needing=NEEDED)
    found = find_operator(*OPERATORS, needing=NEEDED)
    extra = {"metadata": metadata} if has_argument(*found, "metadata") else {}
    if has_argument(*found, "return_value"):
        extra["return_value"] = False  # type: ignore[assignment]
    result = function(
        queries.values,
        keys.values,
        weights,
        queries.scales,
        keys.scales,
        query_quant_mode=0,
        key_quant_mode=0,
        actual_seq_lengths_query=lengths[0],
        actual_seq_lengths_key=lengths[1],
        block_table=block_table,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=index_topk,
        sparse_mode=CAUSAL,
        pre_tokens=NO_LIMIT,
        next_tokens=NO_LIMIT,
        cmp_ratio=compress_ratio,
        **extra,
    )
    indices = result[0] if isinstance(result, (tuple, list)) else result
    return indices.squeeze(1)  # type: ignore[no-any-return]


def check_sizes(function: str, num_heads: int, compress_ratio: int, index_topk: int) -> None:
    """Refuse what the operator has no form for."""
    check_limit(function, "index_n_heads", num_heads, (HEADS,))
    check_limit(function, "compress_ratio", compress_ratio, RATIOS)
    if check_int("index_topk", index_topk, 1, INT32_MAX) > MOST:
        raise limit_error(function, "index_topk", f"be in 1..{MOST}", index_topk)
