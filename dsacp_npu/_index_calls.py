"""The indexer over a paged cache: a call checked as a whole, then scored and chosen from in one of two ways.

A cache is one tensor of floats, or a record of codes and their scales; `CODECS` says what goes with which record.

Which keys a query may see depends on values. Where they are known, the queries of an operator row share its keys, cut
at the last one that is seen; elsewhere every query gathers all that its table has room for. Both score in whole tiles,
so they give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from dsacp_npu._tensors import (
    Float,
    Int32,
    check_floats,
    check_tensor,
    computing_dtype,
    dtype_name,
    first_true,
    torch,
    values_known,
)
from dsacp_npu._tiles import KEY_BLOCK, KEY_TILE, head_hits, head_sums
from dsacp_npu.extents import query_positions, query_rows
from dsacp_npu.fp8 import FP8Vectors, fp8_vectors
from dsacp_npu.fp8 import coded_scores as fp8_scores
from dsacp_npu.paging import check_slots, gathered_rows, slot_mapping
from dsacp_npu.partition import counted
from dsacp_npu.quant import SCORED_NUMBERS, QuantizedVectors, coded_vectors
from dsacp_npu.quant import coded_scores as int8_scores
from dsacp_npu.visibility import visible_entries
from dsacp_ref.spec import INT32_MAX, check_int, contract_error

NARROWING = 4  # entries a chosen one from which finding the best few is cheaper than sorting all
GATHERED_NUMBERS = 1 << 24  # numbers of keys, or scores of heads, gathered at a time

IndexKeys = Float | QuantizedVectors | FP8Vectors


class Codec(NamedTuple):
    """How index keys of one coded kind are made, what they are made of, and how queries are scored against them."""

    name: str
    values: str  # dtypes
    scales: str  # and that of the head weights
    vectors: Callable[[str, Float], Any]
    scores: Callable[..., Float]  # against whole tiles of keys


CODECS: dict[type, Codec] = {
    QuantizedVectors: Codec("int8", "int8", "float16", coded_vectors, int8_scores),
    FP8Vectors: Codec("FP8", "float8_e4m3fn", "float32", fp8_vectors, fp8_scores),
}


class IndexCall(NamedTuple):
    """A call of the indexer, checked: what is scored, and where each query's keys lie."""

    queries: IndexKeys  # of the computing dtype, or coded
    weights: Float
    num_visible: Int32
    rows: Int32  # the operator row of each query
    row_slots: list[tuple[slice, Int32]] | None  # queries and slots of each row that chooses, where values are known
    block_table: Int32
    block_size: int
    index_topk: int


def check_queries(index_q: Float, index_weights: Float, axis: str = "num_tokens") -> None:
    """Refuse queries and weights that do not fit each other."""
    check_floats("index_q", index_q, (axis, "index_n_heads", "index_head_dim"))
    check_tensor("index_weights", index_weights, (dtype_name(index_q),), tuple(index_q.shape[:2]), "one weight a head")


def index_call(
    index_q: Float,
    index_weights: Float,
    index_cache: IndexKeys,
    cmp_block_table: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    *,
    compress_ratio: int,
    index_topk: int,
) -> IndexCall:
    """Everything that can be refused, checked, without a look at a key."""
    block_size = check_call(index_q, index_weights, index_cache, cmp_block_table, seqused_kv)
    positions = query_positions(cu_seqlens_q, seqused_kv, num_rows=len(index_q))
    num_visible = visible_entries(positions, compress_ratio)
    index_topk = check_int("index_topk", index_topk, 1, INT32_MAX)
    queries, weights = index_q.detach(), index_weights.detach()
    if type(index_cache) in CODECS:
        queries, weights = coded_queries(queries, weights, num_visible, type(index_cache))
    else:
        dtype = computing_dtype(index_q.dtype)
        queries, weights = queries.to(dtype), weights.to(dtype)
    rows = query_rows(cu_seqlens_q, num_rows=len(index_q))
    row_slots = None
    if values_known(index_q, cmp_block_table, cu_seqlens_q, seqused_kv):
        num_slots = parts_of(index_cache)[0].shape[0] * block_size
        row_slots = slots_of_rows(num_visible, cmp_block_table, cu_seqlens_q, block_size, num_slots)
    return IndexCall(queries, weights, num_visible, rows, row_slots, cmp_block_table, block_size, index_topk)


def check_call(
    index_q: Float,
    index_weights: Float,
    index_cache: IndexKeys,
    cmp_block_table: Int32,
    seqused_kv: Int32,
) -> int:
    """The block size of the cache, once shapes and dtypes are found to fit each other."""
    check_queries(index_q, index_weights, "num_queries")
    block_size = check_index_cache(index_cache, dtype_name(index_q), index_q.shape[2], "as the queries")
    check_tensor(
        "cmp_block_table", cmp_block_table, ("int32",), (len(seqused_kv), "max_blocks"), "one row an operator row"
    )
    return block_size


def coded_queries(
    queries: Float, weights: Float, num_visible: Int32, kind: type
) -> tuple[QuantizedVectors | FP8Vectors, Float]:
    """Queries and head weights as a cache of coded keys is scored with them."""
    codec = CODECS[kind]
    blind = num_visible == 0  # what belongs to no query that chooses may be anything, and fits no code then
    coded = codec.vectors("index_q", queries.masked_fill(blind[:, None, None], 0))
    return coded, cast_weights(weights.masked_fill(blind[:, None], 0), codec)


def check_index_cache(index_cache: IndexKeys, dtype: str, d: int, hint: str) -> int:
    """The block size, once the cache holds keys of this width: floats of this dtype, or codes and their scales."""
    shape = ("num_blocks", "block_size", d)
    if type(index_cache) not in CODECS:
        check_tensor("index_cache", index_cache, (dtype,), shape, hint)
        return index_cache.shape[1]
    codec, (values, scales) = CODECS[type(index_cache)], index_cache
    check_tensor("index_cache.values", values, (codec.values,), shape, "as wide as the queries")
    check_tensor("index_cache.scales", scales, (codec.scales,), tuple(values.shape[:2]), "one scale a vector")
    return values.shape[1]


def cast_weights(index_weights: Float, codec: Codec) -> Float:
    """The head weights as the codec's operator takes them, by way of float32."""
    weights = index_weights.float().to(getattr(torch, codec.scales))
    infinite = weights.isinf()
    if values_known(infinite) and infinite.any():
        got = float(index_weights.flatten()[first_true(infinite.flatten())])
        rule = f"be of a size that {codec.scales} holds"
        raise contract_error("index_weights", rule, got, f"the {codec.name} operator's dtype")
    return weights


def slots_of_rows(
    num_visible: Int32, block_table: Int32, cu_seqlens_q: Int32, block_size: int, num_slots: int
) -> list[tuple[slice, Int32]]:
    """Queries and slots of the visible entries, for every operator row that sees any. On the host."""
    found, offsets = [], cu_seqlens_q.tolist()
    for row, (start, stop) in enumerate(pairwise(offsets)):
        num_entries = int(num_visible[stop - 1]) if stop > start else 0
        if num_entries:
            entries = counted(num_entries, block_table)
            slots = slot_mapping(entries, torch.full_like(entries, row), block_table, block_size)
            check_slots(slots, num_slots)
            found.append((slice(start, stop), slots))
    return found


def chosen_entries(call: IndexCall, index_cache: IndexKeys) -> Int32:
    """The choice of a checked call."""
    if 0 in (len(call.num_visible), len(call.block_table)):
        return call.num_visible.new_full((len(call.num_visible), call.index_topk), -1)
    return from_shared_keys(call, index_cache) if call.row_slots is not None else from_own_keys(call, index_cache)


def from_shared_keys(call: IndexCall, index_cache: IndexKeys) -> Int32:
    """The choice where lengths are known: the queries of a row share its keys."""
    chosen = call.num_visible.new_full((len(call.num_visible), call.index_topk), -1)
    for queries, slots in call.row_slots or ():
        keys = tiles_at(index_cache, slots, call)
        step = query_block(call.weights.shape[1], len(slots))
        for start in range(queries.start, queries.stop, step):
            block = slice(start, min(start + step, queries.stop))
            seen = int(call.num_visible[block.stop - 1])
            scores = block_scores(call, block, some_of(keys, slice(-(-seen // KEY_TILE) * KEY_TILE)))
            chosen[block] = best_entries(scores[:, :seen], call.num_visible[block], call.index_topk)
    return chosen


def from_own_keys(call: IndexCall, index_cache: IndexKeys) -> Int32:
    """The choice where no length is known: every query gathers what its table has room for, masked."""
    (num_queries, num_heads), capacity = call.weights.shape, call.block_table.shape[1] * call.block_size
    if capacity == 0:
        return call.num_visible.new_full((num_queries, call.index_topk), -1)
    d = parts_of(call.queries)[0].shape[2]
    step = max(1, GATHERED_NUMBERS // (capacity * max(d, num_heads)))
    entries, chosen = counted(capacity, call.rows), []
    for start in range(0, num_queries, step):
        block = slice(start, start + step)
        visible = call.num_visible[block]
        wanted = torch.where(entries < visible[:, None], entries, -1)
        slots = slot_mapping(wanted, call.rows[block], call.block_table, call.block_size)
        scores = block_scores(call, block, tiles_at(index_cache, slots, call))
        chosen.append(best_entries(scores[:, :capacity], visible, call.index_topk))
    return torch.cat(chosen)


def tiles_at(index_cache: IndexKeys, slots: Int32, call: IndexCall) -> IndexKeys:
    """Whole tiles of the keys at these slots, [keys, d] or one such a query."""
    missing = -slots.shape[-1] % KEY_TILE
    slots = torch.cat([slots, slots.new_full((*slots.shape[:-1], missing), -1)], dim=-1)
    keys = with_parts(index_cache, [gathered_rows(part, slots) for part in parts_of(index_cache)])
    return keys if type(keys) in CODECS else keys.to(call.weights.dtype)


def parts_of(keys: IndexKeys) -> tuple[torch.Tensor, ...]:
    """The tensors of a cache, or of keys or queries; FP8 as bytes, which all devices can move."""
    if isinstance(keys, FP8Vectors):
        return keys.values.view(torch.uint8), keys.scales
    return tuple(keys) if isinstance(keys, QuantizedVectors) else (keys,)


def with_parts(like: IndexKeys, parts: Sequence[torch.Tensor]) -> IndexKeys:
    """What `parts_of` would take apart into these parts."""
    if isinstance(like, FP8Vectors):
        return FP8Vectors(parts[0].view(torch.float8_e4m3fn), parts[1])
    return QuantizedVectors(*parts) if isinstance(like, QuantizedVectors) else parts[0]


def some_of(keys: IndexKeys, rows: slice) -> IndexKeys:
    """Some of the keys or queries."""
    return with_parts(keys, [part[rows] for part in parts_of(keys)])


def block_scores(call: IndexCall, block: slice, keys: IndexKeys) -> Float:
    """The scores of a block of queries."""
    scores = CODECS[type(keys)].scores if type(keys) in CODECS else tile_scores
    return scores(some_of(call.queries, block), call.weights[block], keys)


def query_block(num_heads: int, num_keys: int) -> int:
    """Queries to score at a time."""
    return max(1, SCORED_NUMBERS // (max(1, num_heads) * min(num_keys, KEY_BLOCK)))


def tile_scores(q: Float, weights: Float, keys: Float) -> Float:
    """The scores of whole tiles of keys, [keys, d] or [tokens, keys, d]: [tokens, keys]."""
    parts = []
    for first in range(0, keys.shape[-2], KEY_BLOCK):
        parts.append(head_sums(weights, head_hits(q, keys[..., first : first + KEY_BLOCK, :])))
    return torch.cat(parts, dim=1)


def best_entries(scores: Float, num_visible: Int32, index_topk: int) -> Int32:
    """The choice: by a stable sort, so that the lower index comes first among equals.

    Visible entries come before hidden ones, so hidden ones of -inf also stay behind visible ones of -inf.
    """
    num_tokens, num_entries = scores.shape
    width = min(index_topk, num_entries)
    if 0 in (num_tokens, width):
        return num_visible.new_full((num_tokens, index_topk), -1)
    entries = counted(num_entries, scores)
    hidden = entries >= num_visible[:, None]
    gain = scores.masked_fill(hidden | scores.isnan(), -torch.inf)
    if width * NARROWING < num_entries:
        columns = best_columns(gain, width)
        best = columns.gather(1, gain.gather(1, columns).sort(dim=1, descending=True, stable=True).indices)
    else:
        best = gain.sort(dim=1, descending=True, stable=True).indices[:, :width]
    chosen = best.int().masked_fill(entries[:width] >= num_visible[:, None], -1)
    return torch.cat([chosen, chosen.new_full((num_tokens, index_topk - width), -1)], dim=1)


def best_columns(gain: Float, width: int) -> torch.Tensor:
    """The ``width`` columns of highest gain in ascending order, the lower ones among equals."""
    num_tokens, num_entries = gain.shape
    threshold = gain.topk(width, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    sure, tied = gain > threshold, gain == threshold
    room = width - sure.sum(dim=1, keepdim=True)
    taken = sure | (tied & (tied.cumsum(dim=1) <= room))
    place = (taken.cumsum(dim=1) - 1).masked_fill(~taken, width)  # one place more, for all that is not taken
    columns = place.new_zeros(num_tokens, width + 1)
    return columns.scatter_(1, place, counted(num_entries, gain).long().expand(num_tokens, -1))[:, :width]
