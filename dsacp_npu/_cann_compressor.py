"""The compressor operator on the rings of `CompressorState`, and compressor_metadata.

The operator keeps projected rows in a paged cache by raw position. A ring becomes such a cache for one call::

    positions            0 ..... head | head ..............................
    of one request       old rows     | new rows, the last of which are kept; the others go to block 0: not stored

Only the place of the first new row within its window matters to the operator, so positions are counted from a window
boundary close before it, and the table is no longer than the step. A row that is read is never a row that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dsacp_npu._operators import (
    check_dtype,
    check_limit,
    check_multiple,
    find_operator,
    has_argument,
    in_float32,
    limit_error,
    operator,
)
from dsacp_npu._tensors import Float, Int32, check_floats, check_tensor, torch, values_known
from dsacp_npu.compressor import (
    CompressedEntries,
    Compression,
    CompressorState,
    CompressorWeights,
    ProjectedRows,
    check_continues,
    check_state,
    checked_lengths,
    checked_weights,
    emitted_entries,
    written_state,
)
from dsacp_npu.paging import slot_mapping
from dsacp_npu.partition import counted
from dsacp_npu.rope import rope_table
from dsacp_ref.spec import check_int, check_number

__all__ = ["EntryRows", "compress", "compress_", "entry_rope_and_slots"]

ROPE_HEAD_DIM = 64
INTERLEAVED, CONTINUOUS, FLAT_SLOTS = 2, 1, 1
TRIPLES = ((4, 2, 512), (4, 2, 128), (128, 1, 512))  # ratio, projections a row, entry width
BLOCK_SIZES = {4: 8, 128: 32}  # rows of a state block, as vllm-ascend has them beside key blocks of 128


class EntryRows(NamedTuple):
    """Where the entries of a step turn and lie.

    Fields:
        cos: float32[capacity, 32], table row of each entry's first token; 1 beyond the last.
        sin: float32[capacity, 32]; 0 beyond the last.
        slots: int32[capacity], slot in the entry cache; -1 beyond the last.
    """

    cos: Float
    sin: Float
    slots: Int32


class StatePages(NamedTuple):
    """A step's rings as the operator takes them.

    Fields:
        cache: float32[blocks, block_size, 2 * width], values then scores; block 0 holds nothing.
        block_table: int32[num_reqs, columns], by position from the request's window boundary.
        starts: int32[num_reqs], position of the first new row, counted from that boundary.
        shift: int32[num_reqs], the boundary's absolute position.
    """

    cache: Float
    block_table: Int32
    starts: Int32
    shift: Int32


def compress(
    x: Float,
    weights: CompressorWeights,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    frequencies: Sequence[float],
    *,
    eps: float,
) -> Compression:
    """`dsacp_ref.compressor.compress` by the operator, in its current or its older two-state form.

    The state is float32, as the operator keeps it. Weights go to the operator in the dtypes that it takes: projections
    and norm in that of ``x``, the bias in float32.
    """
    check_floats("x", x, ("num_tokens", "hidden"))
    lengths = checked_lengths(query_start_loc, num_computed_tokens, len(x))
    width, ratio = checked_weights(weights)
    check_floats("x", x, ("num_tokens", weights.wkv.shape[1]), "hidden size of wkv")
    eps = check_number("eps", eps, at_least=0.0)
    check_step_sizes(x, weights, frequencies)
    like_rows = x.new_empty(0, width, dtype=torch.float32)
    overlap = check_state(state, ProjectedRows(like_rows, like_rows), weights.norm_weight, ratio)
    check_continues(state, query_start_loc, num_computed_tokens, ratio, overlap)

    plan = emitted_entries(query_start_loc, num_computed_tokens, ratio, num_rows=len(x))
    if 0 in (len(x), len(lengths)):
        empty = x.new_zeros(len(plan.entry_requests), len(weights.norm_weight))
        return Compression(CompressedEntries(empty, *plan), CompressorState(*(field.clone() for field in state)))
    starts = num_computed_tokens.clamp(min=0)
    used = lengths.masked_fill(num_computed_tokens < 0, 0)  # a padded slot has rows, but nothing to say
    pages = state_pages(state, starts, used, ratio, overlap, len(x))
    table = rope_table(plan.entry_indices.clamp(min=0) * ratio, frequencies)
    cos, sin = (half.repeat_interleave(2, dim=1) for half in table)
    entries, cache = by_operator(x, weights, pages, (sin, cos), query_start_loc, used, eps)
    entries = entries[: len(plan.entry_requests)].masked_fill((plan.entry_requests < 0)[:, None], 0)
    after = ring_after(state, cache, pages, starts, used, num_computed_tokens)
    return Compression(CompressedEntries(entries, *plan), after)


def compress_(
    x: Float,
    weights: CompressorWeights,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    frequencies: Sequence[float],
    *,
    eps: float,
) -> Compression:
    """`compress`, with the state written into its argument, which is returned beside the entries."""
    compressed, after = compress(x, weights, query_start_loc, num_computed_tokens, state, frequencies, eps=eps)
    return Compression(compressed, written_state(state, after))


def check_step_sizes(x: Float, weights: CompressorWeights, frequencies: Sequence[float]) -> None:
    """Refuse what the operator has no form for."""
    check_dtype("compress", "x", x)
    check_multiple("compress", "hidden", x.shape[1], 512, 1024, 10240)
    ratio, d = weights.ape.shape[0], len(weights.norm_weight)
    triple = (ratio, weights.wkv.shape[0] // d, d)
    if triple not in TRIPLES:
        known = " or ".join(map(str, TRIPLES))
        raise limit_error("compress", "(compress_ratio, c, d)", f"be {known}", triple)
    check_limit("compress", "rope_head_dim", 2 * len(frequencies), (ROPE_HEAD_DIM,))


def state_pages(
    state: CompressorState, starts: Int32, used: Int32, ratio: int, overlap: bool, num_rows: int
) -> StatePages:
    """The rings as pages: old rows in place, room for the new rows that the rings will hold."""
    num_reqs, ring_rows, width = state.kv.shape
    block_size = BLOCK_SIZES[ratio]
    head = (2 if overlap else 1) * ratio  # rows before the first new one lie below this
    head_blocks, tail_blocks = head // block_size, -(-ring_rows // block_size) + 1
    per_request = head_blocks + tail_blocks
    # A first window differs from all others: it has none before it. So at most one window is kept before the start's.
    local = starts % ratio
    if overlap:
        local = local + ratio * (starts >= ratio).int()
    shift = starts - local

    column = counted(-(-(head + num_rows) // block_size), starts).expand(num_reqs, -1)
    last = ((local + used - 1) // block_size)[:, None]
    block = torch.where(column < head_blocks, column, head_blocks + (column - head_blocks) % tail_blocks)
    block = block + 1 + per_request * counted(num_reqs, starts)[:, None]
    stored = (column < head_blocks) | ((column > last - tail_blocks) & (column <= last))

    place = counted(head, starts)
    row = ((place + shift[:, None]) % ring_rows).long()[..., None].expand(-1, -1, width)
    old = torch.cat([state.kv.gather(1, row), state.score.gather(1, row)], dim=-1)
    old = old.masked_fill((place >= local[:, None])[..., None], 0)
    room = old.new_zeros(num_reqs, per_request * block_size - head, 2 * width)
    paged = torch.cat([old, room], dim=1).reshape(num_reqs * per_request, block_size, 2 * width)
    cache = torch.cat([paged.new_zeros(1, block_size, 2 * width), paged])
    return StatePages(cache, block.masked_fill(~stored, 0).int(), local, shift)


def by_operator(
    x: Float,
    weights: CompressorWeights,
    pages: StatePages,
    rope: tuple[Float, Float],
    query_start_loc: Int32,
    used: Int32,
    eps: float,
) -> tuple[Float, Float]:
    """The entries, and the cache after the step, from whichever form of the operator is there."""
    ratio, width = weights.ape.shape
    d = len(weights.norm_weight)
    function = operator("compressor")
    projections = (weights.wkv.to(x.dtype), weights.wgate.to(x.dtype))
    pooling = (weights.ape.to(torch.float32), weights.norm_weight.to(x.dtype), *rope)
    lengths = (query_start_loc, used, pages.starts)
    scalars = (ROPE_HEAD_DIM, ratio, width // d, eps, INTERLEAVED)
    if has_argument(*find_operator("compressor"), "state_cache"):
        cache = pages.cache
        entries = function(x, *projections, cache, *pooling, pages.block_table, *lengths, *scalars, CONTINUOUS)
        return entries, cache
    kv, score = pages.cache[..., :width].contiguous(), pages.cache[..., width:].contiguous()
    tables = (pages.block_table, pages.block_table)
    entries, *_ = function(x, *projections, kv, score, *pooling, *tables, *lengths, *scalars, False)
    return entries, torch.cat([kv, score], dim=-1)


def ring_after(
    state: CompressorState,
    cache: Float,
    pages: StatePages,
    starts: Int32,
    used: Int32,
    num_computed_tokens: Int32,
) -> CompressorState:
    """The rings with the rows that the operator stored; counts as `updated_state` has them."""
    ring_rows, width = state.kv.shape[1:]
    block_size = cache.shape[1]
    live = used > 0
    ends = torch.where(live, starts + used, state.num_tokens)
    # The last position below `end` that falls on each ring row; new if this step brought it.
    last = ends[:, None] - 1 - (ends[:, None] - 1 - counted(ring_rows, ends)) % ring_rows
    new = live[:, None] & (last >= starts[:, None])
    place = (last - pages.shift[:, None]).masked_fill(~new, 0)
    block = pages.block_table.gather(1, (place // block_size).long())
    stored = cache.reshape(-1, 2 * width)[(block * block_size + place % block_size).long()]
    held = state.held_start.masked_fill(num_computed_tokens <= 0, 0)
    return CompressorState(
        torch.where(new[..., None], stored[..., :width], state.kv),
        torch.where(new[..., None], stored[..., width:], state.score),
        torch.where(live, torch.maximum(held, ends - ring_rows), state.held_start),
        ends,
    )


def entry_rope_and_slots(
    cos: Float,
    sin: Float,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    cmp_block_table: Int32,
    *,
    block_size: int,
    compress_ratio: int,
    num_rows: int,
) -> EntryRows:
    """Table rows and cache slots of the entries that a step completes, for all layers of a ratio.

    Args:
        cos: float32[num_positions, 32], table by absolute position.
        sin: like ``cos``.
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, first 0.
        num_computed_tokens: int32[num_reqs], tokens before this step; negative for a padded graph slot.
        cmp_block_table: int32[num_reqs, max_blocks], by entry.
        block_size: int, entries per block.
        compress_ratio: int, tokens per entry.
        num_rows: int, rows of the step; sets the capacity as in `emitted_entries`.

    Returns:
        EntryRows: in the order of `emitted_entries`.

    Raises:
        ContractError: a shape, dtype or value does not hold, or the block table does not reach an entry.
        UnsupportedError: a table of another width, or no such operator.

    Source: operator compressor_metadata, slot format 1.
    """
    check_floats("cos", cos, ("num_positions", "rope_head_dim / 2"))
    check_floats("sin", sin, tuple(cos.shape), "cos and sin are one table")
    check_limit("entry_rope_and_slots", "rope_head_dim", 2 * cos.shape[1], (ROPE_HEAD_DIM,))
    block_size = check_int("block_size", block_size, 1)
    plan = emitted_entries(query_start_loc, num_computed_tokens, compress_ratio, num_rows=num_rows)
    num_reqs, capacity = len(num_computed_tokens), len(plan.entry_requests)
    check_tensor("cmp_block_table", cmp_block_table, ("int32",), (num_reqs, "max_blocks"), "one row a request")
    if values_known(plan.entry_indices, cmp_block_table):
        slot_mapping(plan.entry_indices, plan.entry_requests, cmp_block_table, block_size)
        highest = int(plan.entry_indices.max()) * compress_ratio if capacity else 0
        check_int("rows of cos", len(cos), highest + 1, hint="the table is by absolute position")
    cos, sin = (in_float32("entry_rope_and_slots", name, half) for name, half in (("cos", cos), ("sin", sin)))
    if capacity == 0 or num_reqs == 0:
        ones = cos.new_ones(capacity, cos.shape[1])
        return EntryRows(ones, torch.zeros_like(ones), plan.entry_indices.new_full((capacity,), -1))
    rows_cos, rows_sin, slots = operator("compressor_metadata")(
        cos.repeat_interleave(2, dim=1),
        sin.repeat_interleave(2, dim=1),
        query_start_loc,
        num_computed_tokens,
        cmp_block_table,
        block_size,
        FLAT_SLOTS,
        compress_ratio,
        capacity,
        num_reqs,
    )
    return EntryRows(rows_cos[:, 0, 0, 0::2], rows_sin[:, 0, 0, 0::2], slots.reshape(-1).to(torch.int32))
