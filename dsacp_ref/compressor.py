"""Raw hidden rows -> compressed entries, with the state that chunks hand on.

An entry pools the tokens of its window by a softmax over tokens, apart for every channel. With *overlap* (DeepSeek-V4
at ratio 4) projections are twice as wide, [Ca | Cb]; an entry pools the Ca halves of the window before and the Cb
halves of its own::

    compress_ratio 4, overlap     tokens    0 1 2 3   4 5 6 7   8 9 ..
                                  entry 0   b b b b                           (nothing before: 4 slots)
                                  entry 1   a a a a   b b b b
                                  entry 2             a a a a   b b ..        exists once token 11 does

Then RMS norm, then RoPE at the position of the window's *first* token. Between chunks a request hands on its open
window and, with overlap, the window before: a ring of projected rows, position p in row ``p % num_rows``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dsacp_ref.extents import FLOATS, Float, check_offsets
from dsacp_ref.partition import Int32, requests_of_tokens
from dsacp_ref.rope import apply_rope, rope_table
from dsacp_ref.spec import INT32_MAX, check_array, check_int, check_number, check_record, contract_error
from dsacp_ref.visibility import pool_row_starts

__all__ = [
    "CompressedEntries",
    "Compression",
    "CompressorState",
    "CompressorWeights",
    "EntryPlan",
    "ProjectedRows",
    "compress",
    "compressed_entries",
    "emitted_entries",
    "empty_state",
    "pooled_entries",
    "projected_rows",
    "rms_norm",
    "rolled_back_state",
    "updated_state",
]

POOLED_NUMBERS = 1 << 21  # numbers gathered at a time while pooling: memory stays flat in tokens


class CompressorWeights(NamedTuple):
    """One compressor; c is 2 with overlap, else 1.

    Fields:
        wkv: float[c * d, hidden], value projection, rows Ca then Cb.
        wgate: float[c * d, hidden], score projection, rows Ca then Cb.
        ape: float[compress_ratio, c * d], score bias by the token's place in its window.
        norm_weight: float[d].

    >>> CompressorWeights._fields
    ('wkv', 'wgate', 'ape', 'norm_weight')
    """

    wkv: Float
    wgate: Float
    ape: Float
    norm_weight: Float


class CompressorState(NamedTuple):
    """What each request hands on: a ring of its last projected rows.

    Fields:
        kv: float[num_reqs, num_rows, c * d], position p in row ``p % num_rows``.
        score: float[num_reqs, num_rows, c * d], with the bias added.
        held_start: int32[num_reqs], tokens, first position that the ring still holds.
        num_tokens: int32[num_reqs], tokens, one past the last.

    >>> CompressorState._fields
    ('kv', 'score', 'held_start', 'num_tokens')
    """

    kv: Float
    score: Float
    held_start: Int32
    num_tokens: Int32


class ProjectedRows(NamedTuple):
    """Both projections of raw rows.

    Fields:
        kv: float[num_tokens, c * d].
        score: float[num_tokens, c * d], with the bias added.

    >>> ProjectedRows._fields
    ('kv', 'score')
    """

    kv: Float
    score: Float


class EntryPlan(NamedTuple):
    """The entries that a step completes, packed, requests in order.

    Fields:
        entry_requests: int32[capacity], request; -1 beyond the last.
        entry_indices: int32[capacity], number of the entry within its request; -1 beyond the last.
        entry_start_loc: int32[num_reqs + 1], entries, offsets of each request's.

    >>> EntryPlan._fields
    ('entry_requests', 'entry_indices', 'entry_start_loc')
    """

    entry_requests: Int32
    entry_indices: Int32
    entry_start_loc: Int32


class CompressedEntries(NamedTuple):
    """The entries of a step and where they belong.

    Fields:
        entries: float[capacity, d]; zeros beyond the last.
        entry_requests: int32[capacity], request; -1 beyond the last.
        entry_indices: int32[capacity], number of the entry within its request; -1 beyond the last.
        entry_start_loc: int32[num_reqs + 1], entries, offsets of each request's.

    >>> CompressedEntries._fields[0]
    'entries'
    """

    entries: Float
    entry_requests: Int32
    entry_indices: Int32
    entry_start_loc: Int32


class Compression(NamedTuple):
    """One step of a compressor: entries out, state on.

    Fields:
        compressed: CompressedEntries.
        state: CompressorState after the step.

    >>> Compression._fields
    ('compressed', 'state')
    """

    compressed: CompressedEntries
    state: CompressorState


def rms_norm(x: Float, weight: Float | None, eps: float) -> Float:
    """The vectors divided by their root mean square, times a weight per channel where there is one.

    Args:
        x: float32 or float64 [..., d].
        weight: float[d], or None for no weight (the per-head query norm).
        eps: number, added to the mean square, >= 0.

    Returns:
        dtype of ``x``, same shape.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: DeepSeek-V4 inference model.

    >>> rms_norm(np.array([[3.0, 4.0]]), None, 0.0).round(4).tolist()
    [[0.8485, 1.1314]]
    """
    check_array("x", x, FLOATS, (*getattr(x, "shape", ())[:-1], "d"))
    check_int("d", x.shape[-1], 1)
    eps = check_number("eps", eps, at_least=0.0)
    scaled: Float = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    if weight is None:
        return scaled
    check_array("weight", weight, FLOATS, (x.shape[-1],), "one weight a channel")
    return scaled * weight.astype(x.dtype)


def empty_state(weights: CompressorWeights, num_reqs: int, *, num_rows: int | None = None) -> CompressorState:
    """The state of requests that have seen no token.

    Args:
        weights: CompressorWeights, for width, ratio and dtype.
        num_reqs: int, requests, >= 0.
        num_rows: int, ring rows per request, at least the rows that one entry pools (8 at ratio 4 with overlap, 128
            at ratio 128), which is also the default; k more rows allow a rollback of k tokens at any time.

    Returns:
        CompressorState: zeros, holding nothing.

    Raises:
        ContractError: a ring too short to pool from.

    Source: DeepSeek-V4 inference model, kv_state and score_state.

    >>> weights = CompressorWeights(np.zeros((6, 5)), np.zeros((6, 5)), np.zeros((4, 6)), np.ones(3))
    >>> empty_state(weights, 2).kv.shape
    (2, 8, 6)
    """
    width, ratio = checked_weights(weights)
    least = width // len(weights.norm_weight) * ratio
    num_rows = least if num_rows is None else check_int("num_rows", num_rows, least, hint="an entry pools that many")
    num_reqs = check_int("num_reqs", num_reqs, 0)
    ring = np.zeros((num_reqs, num_rows, width), weights.wkv.dtype)
    nothing = np.zeros(num_reqs, np.int32)
    return CompressorState(ring, ring.copy(), nothing, nothing.copy())


def checked_weights(weights: CompressorWeights) -> tuple[int, int]:
    """Projection width and compress ratio, once the four shapes are found to fit."""
    check_record("weights", weights, CompressorWeights)
    check_array("wkv", weights.wkv, FLOATS, ("c * d", "hidden"))
    check_array("wgate", weights.wgate, FLOATS, weights.wkv.shape, "like wkv")
    width = weights.wkv.shape[0]
    check_array("ape", weights.ape, FLOATS, ("compress_ratio", width), "one bias a place in the window")
    check_array("norm_weight", weights.norm_weight, FLOATS, ("d",))
    d = weights.norm_weight.shape[0]
    if d < 1 or width not in (d, 2 * d):
        raise contract_error("wkv", f"have {d} or, with overlap, {2 * d} rows", width, f"norm_weight has {d} channels")
    check_int("compress_ratio", weights.ape.shape[0], 1)
    return width, weights.ape.shape[0]


def projected_rows(x: Float, positions: Int32, weights: CompressorWeights) -> ProjectedRows:
    """Both projections of raw rows, the score with its bias by place in the window.

    Args:
        x: float32 or float64 [num_tokens, hidden], the block input after its norm.
        positions: int32[num_tokens], tokens, absolute positions; a row at -1 is never pooled.
        weights: CompressorWeights.

    Returns:
        ProjectedRows: dtype of ``x`` [num_tokens, c * d] each.

    Raises:
        ContractError: a shape or dtype above does not hold.

    Source: DeepSeek-V4 inference model: k = Wkv x, s = Wgate x + ape[position mod ratio], float32 throughout.

    >>> weights = CompressorWeights(np.ones((1, 1)), np.ones((1, 1)), np.array([[0.0], [10.0]]), np.ones(1))
    >>> projected_rows(np.array([[1.0], [2.0]]), np.array([4, 5], np.int32), weights).score.tolist()
    [[1.0], [12.0]]
    """
    _, ratio = checked_weights(weights)
    check_array("x", x, FLOATS, ("num_tokens", weights.wkv.shape[1]), "hidden size of wkv")
    check_array("positions", positions, ("int32",), (len(x),), "one a row of x")
    if (positions < -1).any():
        raise contract_error("positions", "be -1 or a position", int(positions.min()), "-1 alone marks a pad row")
    bias = weights.ape[positions % np.int32(ratio)]
    return ProjectedRows(x @ weights.wkv.T.astype(x.dtype), x @ weights.wgate.T.astype(x.dtype) + bias.astype(x.dtype))


def emitted_entries(
    query_start_loc: Int32, num_computed_tokens: Int32, compress_ratio: int, *, num_rows: int
) -> EntryPlan:
    """The entries whose last token is among each request's new tokens.

    ::

        compress_ratio 4     3 tokens before, 6 new: positions 3 .. 8      last tokens 3 and 7: entries 0 and 1

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, first 0.
        num_computed_tokens: int32[num_reqs], tokens before this step; negative for a padded graph slot, which
            completes nothing.
        compress_ratio: int, tokens per entry, >= 1.
        num_rows: int, rows of the input, >= ``query_start_loc[-1]``; sets the capacity
            ``min(num_rows, num_rows // compress_ratio + num_reqs)``, which always suffices.

    Returns:
        EntryPlan: ``(start + length) // ratio - start // ratio`` entries a request.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: operator compressor, its row count and padding; vllm-ascend compressor_metadata.

    >>> plan = emitted_entries(np.array([0, 6], np.int32), np.array([3], np.int32), 4, num_rows=6)
    >>> plan.entry_indices.tolist(), plan.entry_start_loc.tolist()
    ([0, 1], [0, 2])
    """
    lengths = checked_lengths(query_start_loc, num_computed_tokens, num_rows)
    ratio = np.int32(check_int("compress_ratio", compress_ratio, 1, INT32_MAX))
    starts = np.maximum(num_computed_tokens, 0)
    first = starts // ratio
    count = np.where(num_computed_tokens < 0, 0, (starts + lengths) // ratio - first)
    entry_start_loc = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
    capacity = min(num_rows, num_rows // compress_ratio + len(lengths))
    rows = np.arange(capacity, dtype=np.int32)
    requests = requests_of_tokens(rows, entry_start_loc)
    if len(lengths) == 0:
        return EntryPlan(requests, requests, entry_start_loc)
    indices = np.where(requests < 0, np.int32(-1), first[requests] + rows - entry_start_loc[requests])
    return EntryPlan(requests, indices, entry_start_loc)


def checked_lengths(query_start_loc: Int32, num_computed_tokens: Int32, num_rows: int) -> Int32:
    """New tokens per request, once the offsets are found to be those of the rows."""
    check_offsets("query_start_loc", query_start_loc)
    num_rows = check_int("num_rows", num_rows, 0, INT32_MAX)
    num_reqs = len(query_start_loc) - 1
    check_array("num_computed_tokens", num_computed_tokens, ("int32",), (num_reqs,), "one entry per request")
    if query_start_loc[-1] > num_rows:
        raise contract_error(
            "query_start_loc",
            f"end at or before the {num_rows} rows it indexes",
            int(query_start_loc[-1]),
            "the compressor's rows are global: local rows need local offsets",
        )
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    too_long = np.maximum(num_computed_tokens, 0).astype(np.int64) + lengths > INT32_MAX
    if too_long.any():
        raise contract_error("num_computed_tokens", "keep positions below 2**31", int(num_computed_tokens.max()))
    return lengths


def compressed_entries(
    rows: ProjectedRows,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    norm_weight: Float,
    frequencies: Sequence[float],
    *,
    compress_ratio: int,
    eps: float,
) -> CompressedEntries:
    """The entries that this step's rows complete, pooled from them and from the state.

    Args:
        rows: ProjectedRows of all new tokens, [num_tokens, c * d].
        query_start_loc: int32[num_reqs + 1], tokens, offsets of each request's rows.
        num_computed_tokens: int32[num_reqs], tokens before this step; negative for a padded graph slot.
        state: CompressorState before this step, one ring a request. Not read where a request starts at 0.
        norm_weight: float[d].
        frequencies: rope_head_dim / 2 floats (see `rope_table`); the last 2 * len channels turn.
        compress_ratio: int, tokens per entry, >= 1.
        eps: number, of the RMS norm.

    Returns:
        CompressedEntries: dtype of ``rows`` [capacity, d], capacity as in `emitted_entries`.

    Raises:
        ContractError: a shape, dtype or value above does not hold, or the state is not that of the token before.

    Source: DeepSeek-V4 inference model; operator compressor, without its cache write.

    >>> rows = ProjectedRows(np.array([[2.0], [4.0], [9.0]]), np.zeros((3, 1)))
    >>> weights = CompressorWeights(np.ones((1, 1)), np.ones((1, 1)), np.zeros((2, 1)), np.ones(1))
    >>> loc, none, state = np.array([0, 3], np.int32), np.zeros(1, np.int32), empty_state(weights, 1)
    >>> compressed_entries(rows, loc, none, state, np.array([7.0]), (), compress_ratio=2, eps=0.0).entries.tolist()
    [[7.0], [0.0]]
    """
    num_rows = check_projected(rows)
    plan = emitted_entries(query_start_loc, num_computed_tokens, compress_ratio, num_rows=num_rows)
    entries = pooled_entries(
        rows,
        plan.entry_requests,
        plan.entry_indices,
        query_start_loc,
        num_computed_tokens,
        state,
        norm_weight,
        frequencies,
        compress_ratio=compress_ratio,
        eps=eps,
    )
    return CompressedEntries(entries, *plan)


def pooled_entries(
    rows: ProjectedRows,
    entry_requests: Int32,
    entry_indices: Int32,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    norm_weight: Float,
    frequencies: Sequence[float],
    *,
    compress_ratio: int,
    eps: float,
) -> Float:
    """Chosen ones of the entries that this step's rows complete; only the rows they pool are read.

    A rank that owns part of the entries calls this with its own rows and the halo in place, the rest unknown.

    Args:
        rows: ProjectedRows of all new tokens, [num_tokens, c * d].
        entry_requests: int32[num_entries], request; -1 for none.
        entry_indices: int32[num_entries], number of the entry within its request; -1 for none.
        query_start_loc: int32[num_reqs + 1], tokens, offsets of each request's rows.
        num_computed_tokens: int32[num_reqs], tokens before this step; negative for a padded graph slot.
        state: CompressorState before this step, one ring a request. Not read where a request starts at 0.
        norm_weight: float[d].
        frequencies: rope_head_dim / 2 floats (see `rope_table`); the last 2 * len channels turn.
        compress_ratio: int, tokens per entry, >= 1.
        eps: number, of the RMS norm.

    Returns:
        dtype of ``rows`` [num_entries, d]; zeros where there is none.

    Raises:
        ContractError: a shape, dtype or value above does not hold, an entry is not completed by this step, or the
            state is not that of the token before.

    Source: DeepSeek-V4 inference model, pooling, norm, RoPE.

    >>> rows = ProjectedRows(np.array([[2.0], [-4.0], [np.nan]]), np.zeros((3, 1)))
    >>> weights = CompressorWeights(np.ones((1, 1)), np.ones((1, 1)), np.zeros((2, 1)), np.ones(1))
    >>> loc, zero, state = np.array([0, 3], np.int32), np.zeros(1, np.int32), empty_state(weights, 1)
    >>> pooled_entries(rows, zero, zero, loc, zero, state, np.ones(1), (), compress_ratio=2, eps=0.0).tolist()
    [[-1.0]]
    """
    num_rows = check_projected(rows)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1, INT32_MAX // 2)
    eps = check_number("eps", eps, at_least=0.0)
    check_array("norm_weight", norm_weight, FLOATS, ("d",))
    overlap = check_state(state, rows, norm_weight, compress_ratio)
    lengths = checked_lengths(query_start_loc, num_computed_tokens, num_rows)
    check_continues(state, query_start_loc, num_computed_tokens, compress_ratio, overlap)
    check_completed(entry_requests, entry_indices, lengths, num_computed_tokens, compress_ratio)

    wanted = np.flatnonzero(entry_requests >= 0)
    entries = np.zeros((len(entry_requests), len(norm_weight)), rows.kv.dtype)
    slots = (2 if overlap else 1) * compress_ratio
    step = max(1, POOLED_NUMBERS // (slots * len(norm_weight)))
    for start in range(0, len(wanted), step):
        part = wanted[start : start + step]
        requests, indices = entry_requests[part], entry_indices[part]
        kv, score = pooled_slots(
            rows, state, query_start_loc, num_computed_tokens, requests, indices, compress_ratio, overlap
        )
        normed = rms_norm(softmax_mean(kv, score), norm_weight, eps)
        entries[part] = apply_rope(normed, *rope_table(indices * np.int32(compress_ratio), frequencies))
    return entries


def check_completed(
    entry_requests: Int32, entry_indices: Int32, lengths: Int32, num_computed_tokens: Int32, compress_ratio: int
) -> None:
    """Refuse an entry whose last token is not among the step's."""
    check_array("entry_requests", entry_requests, ("int32",), ("num_entries",))
    check_array("entry_indices", entry_indices, ("int32",), entry_requests.shape, "one a request number")
    wanted = entry_requests >= 0
    if not wanted.any():
        return
    requests, indices = entry_requests[wanted], entry_indices[wanted]
    if int(requests.max()) >= len(lengths):
        raise contract_error("entry_requests", f"be below {len(lengths)}", int(requests.max()))
    starts = num_computed_tokens[requests]
    ratio = np.int32(compress_ratio)
    outside = (indices < starts // ratio) | (indices >= (starts + lengths[requests]) // ratio) | (starts < 0)
    if outside.any():
        at = int(outside.argmax())
        raise contract_error(
            "entry_indices",
            "name entries that this step completes",
            f"entry {int(indices[at])} of request {int(requests[at])}",
            f"its new positions are {int(starts[at])} to {int(starts[at] + lengths[requests][at]) - 1}",
        )


def check_projected(rows: ProjectedRows) -> int:
    """The number of rows, once both projections are found alike."""
    check_record("rows", rows, ProjectedRows)
    check_array("rows.kv", rows.kv, FLOATS, ("num_tokens", "c * d"))
    check_array("rows.score", rows.score, (str(rows.kv.dtype),), rows.kv.shape, "like rows.kv")
    return len(rows.kv)


def check_state(state: CompressorState, rows: ProjectedRows, norm_weight: Float, compress_ratio: int) -> bool:
    """Whether entries overlap, once the ring is found to fit the rows."""
    width: int = rows.kv.shape[1]
    d = len(norm_weight)
    if d < 1 or width not in (d, 2 * d):
        raise contract_error("rows.kv", f"have {d} or, with overlap, {2 * d} columns", width, f"norm_weight has {d}")
    check_rings(state, rows)
    least = width // d * compress_ratio
    if state.kv.shape[1] < least:
        raise contract_error("state.kv", f"hold at least {least} rows a request", state.kv.shape[1], "use empty_state")
    return width == 2 * d


def check_rings(state: CompressorState, rows: ProjectedRows) -> None:
    """Refuse rings that could not take up these rows."""
    check_record("state", state, CompressorState)
    dtype, width = str(rows.kv.dtype), rows.kv.shape[1]
    check_array("state.kv", state.kv, (dtype,), ("num_reqs", "num_rows", width), "like rows.kv")
    check_array("state.score", state.score, (dtype,), state.kv.shape, "like state.kv")
    check_int("state.kv rows", state.kv.shape[1], 1, hint="use empty_state")
    for name, value in (("state.held_start", state.held_start), ("state.num_tokens", state.num_tokens)):
        check_array(name, value, ("int32",), (len(state.kv),), "one entry per request")


def check_continues(
    state: CompressorState, query_start_loc: Int32, num_computed_tokens: Int32, compress_ratio: int, overlap: bool
) -> None:
    """Refuse a state that does not hold what comes before this step: zeros would pass for tokens."""
    num_reqs = len(num_computed_tokens)
    if len(state.num_tokens) != num_reqs:
        raise contract_error("state", f"hold {num_reqs} requests", len(state.num_tokens), "one ring a request")
    going_on = (query_start_loc[1:] > query_start_loc[:-1]) & (num_computed_tokens > 0)
    needed = pool_row_starts(np.maximum(num_computed_tokens, 0), compress_ratio, overlap=overlap)
    bad = going_on & ((state.num_tokens != num_computed_tokens) | (state.held_start > needed))
    if bad.any():
        request = int(bad.argmax())
        raise contract_error(
            "state",
            f"hold rows {int(needed[request])} to {int(num_computed_tokens[request])} of request {request}",
            f"rows {int(state.held_start[request])} to {int(state.num_tokens[request])}",
            "keep the state with the prefix, or restart the request at 0",
        )


def pooled_slots(
    rows: ProjectedRows,
    state: CompressorState,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    requests: Int32,
    indices: Int32,
    compress_ratio: int,
    overlap: bool,
) -> tuple[Float, Float]:
    """Values and scores of every slot of these entries, [entries, slots, d]."""
    first_window = indices - 1 if overlap else indices
    num_slots = (2 if overlap else 1) * compress_ratio
    positions = first_window[:, None] * np.int64(compress_ratio) + np.arange(num_slots)
    starts = num_computed_tokens[requests][:, None]
    new = positions >= starts
    new_row = np.where(new, query_start_loc[requests][:, None] + positions - starts, 0)
    ring_row = positions % state.kv.shape[1]

    def from_both(new_values: Float, ring_values: Float) -> Float:
        ring = ring_values[requests[:, None], ring_row]
        values: Float = np.where(new[..., None], new_values[new_row], ring)
        if not overlap:
            return values
        d = values.shape[-1] // 2
        return np.concatenate([values[:, :compress_ratio, :d], values[:, compress_ratio:, d:]], axis=1)

    kv, score = from_both(rows.kv, state.kv), from_both(rows.score, state.score)
    absent = positions < 0  # there is no window before the first: weight exactly 0, whatever the ring holds
    kv[absent], score[absent] = 0, -np.inf
    return kv, score


def softmax_mean(kv: Float, score: Float) -> Float:
    """The softmax-weighted mean over slots (axis 1), apart for every channel."""
    weights = np.exp(score - score.max(axis=1, keepdims=True))
    mean: Float = (weights * kv).sum(axis=1) / weights.sum(axis=1)
    return mean


def updated_state(
    rows: ProjectedRows, query_start_loc: Int32, num_computed_tokens: Int32, state: CompressorState
) -> CompressorState:
    """The state after this step's rows.

    Args:
        rows: ProjectedRows of all new tokens, [num_tokens, c * d].
        query_start_loc: int32[num_reqs + 1], tokens, offsets of each request's rows.
        num_computed_tokens: int32[num_reqs], tokens before this step; negative for a padded graph slot.
        state: CompressorState before this step; not changed.

    Returns:
        CompressorState: unchanged for requests without new tokens and for padded slots; a request that starts at 0
        forgets what its ring held.

    Raises:
        ContractError: a shape or dtype does not hold, or a ring does not end where the step starts.

    Source: DeepSeek-V4 inference model; xLLM and vllm-ascend keep the same rows by raw position.

    >>> weights = CompressorWeights(np.ones((1, 1)), np.ones((1, 1)), np.zeros((2, 1)), np.ones(1))
    >>> rows = ProjectedRows(np.array([[2.0], [4.0], [9.0]]), np.zeros((3, 1)))
    >>> state = updated_state(rows, np.array([0, 3], np.int32), np.zeros(1, np.int32), empty_state(weights, 1))
    >>> state.kv.ravel().tolist(), state.held_start.tolist(), state.num_tokens.tolist()
    ([9.0, 4.0], [1], [3])
    """
    num_tokens = check_projected(rows)
    check_rings(state, rows)
    lengths = checked_lengths(query_start_loc, num_computed_tokens, num_tokens)
    check_continues(state, query_start_loc, num_computed_tokens, 1, False)
    live = (lengths > 0) & (num_computed_tokens >= 0)
    ends = np.where(live, num_computed_tokens + lengths, state.num_tokens)
    num_rows = state.kv.shape[1]
    ring_rows = np.arange(num_rows, dtype=np.int32)
    # The last position below `end` that falls on each ring row; new if this step brought it.
    last = ends[:, None] - 1 - (ends[:, None] - 1 - ring_rows) % num_rows
    new = live[:, None] & (last >= np.maximum(num_computed_tokens, 0)[:, None])
    source = query_start_loc[:-1, None] + last - num_computed_tokens[:, None]
    kv, score = state.kv.copy(), state.score.copy()
    kv[new], score[new] = rows.kv[source[new]], rows.score[source[new]]
    held = np.where(num_computed_tokens > 0, state.held_start, 0)
    held_start = np.where(live, np.maximum(held, ends - num_rows), state.held_start)
    return CompressorState(kv, score, held_start.astype(np.int32), ends.astype(np.int32))


def rolled_back_state(
    state: CompressorState, num_tokens: Int32, *, compress_ratio: int, overlap: bool
) -> CompressorState:
    """The state with its last tokens taken back, as when speculative tokens are rejected.

    Args:
        state: CompressorState after the rejected tokens.
        num_tokens: int32[num_reqs], tokens to keep, at most what each ring ends at.
        compress_ratio: int, tokens per entry, >= 1.
        overlap: bool, whether entries also pool the window before.

    Returns:
        CompressorState: ends at ``num_tokens``; entries from ``num_tokens // compress_ratio`` on are void.

    Raises:
        ContractError: a shape or dtype does not hold, or the ring no longer holds the rows to go on from: it needs as
            many spare rows as tokens that may be rejected (`empty_state`'s ``num_rows``).

    Source: the rollback rule of speculative decoding over DeepSeek-V4's state.

    >>> ring, start, end = np.zeros((1, 2, 1)), np.array([3], np.int32), np.array([5], np.int32)
    >>> state = CompressorState(ring, ring, start, end)
    >>> rolled_back_state(state, np.array([4], np.int32), compress_ratio=2, overlap=False).num_tokens.tolist()
    [4]
    """
    check_record("state", state, CompressorState)
    for name, value in (("state.held_start", state.held_start), ("state.num_tokens", state.num_tokens)):
        check_array(name, value, ("int32",), (len(state.kv),), "one entry per request")
    check_array("num_tokens", num_tokens, ("int32",), state.num_tokens.shape, "one entry per request")
    if (num_tokens < 0).any() or (num_tokens > state.num_tokens).any():
        raise contract_error(
            "num_tokens", f"be in 0 .. {state.num_tokens.tolist()}", num_tokens.tolist(), "a rollback only takes back"
        )
    needed = pool_row_starts(num_tokens, compress_ratio, overlap=overlap)
    lost = (state.held_start > needed) & (num_tokens > needed)
    if lost.any():
        request = int(lost.argmax())
        raise contract_error(
            "state",
            f"still hold rows {int(needed[request])} to {int(num_tokens[request])} of request {request}",
            f"rows from {int(state.held_start[request])}",
            "give empty_state as many spare num_rows as tokens may be rejected",
        )
    return state._replace(num_tokens=num_tokens.copy(), held_start=np.minimum(state.held_start, num_tokens))


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
    """One step of a compressor over raw rows: project, pool what is complete, hand the state on.

    Args:
        x: float32 or float64 [num_tokens, hidden], new rows of all requests; rows beyond ``query_start_loc[-1]`` are
            padding.
        weights: CompressorWeights.
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, first 0.
        num_computed_tokens: int32[num_reqs], tokens before this step; negative for a padded graph slot.
        state: CompressorState before this step, in the dtype of ``x``.
        frequencies: rope_head_dim / 2 floats (see `rope_table`).
        eps: number, of the RMS norm.

    Returns:
        Compression: compressed, state. The result does not depend on how a request is cut into steps.

    Raises:
        ContractError: a shape, dtype or value above does not hold, or the state is not that of the token before.

    Source: DeepSeek-V4 inference model; operator compressor.

    >>> weights = CompressorWeights(np.eye(2), np.eye(2), np.zeros((2, 2)), np.ones(2))
    >>> x = np.array([[1.0, -1.0], [1.0, -1.0], [5.0, 5.0]])
    >>> loc, none, state = np.array([0, 3], np.int32), np.zeros(1, np.int32), empty_state(weights, 1)
    >>> step = compress(x, weights, loc, none, state, (), eps=0.0)
    >>> step.compressed.entries.tolist(), step.compressed.entry_start_loc.tolist(), step.state.num_tokens.tolist()
    ([[1.0, -1.0], [0.0, 0.0]], [0, 1], [3])
    """
    check_array("x", x, FLOATS, ("num_tokens", "hidden"))
    positions = row_positions(query_start_loc, num_computed_tokens, len(x))
    rows = projected_rows(x, positions, weights)
    compressed = compressed_entries(
        rows,
        query_start_loc,
        num_computed_tokens,
        state,
        weights.norm_weight,
        frequencies,
        compress_ratio=weights.ape.shape[0],
        eps=eps,
    )
    return Compression(compressed, updated_state(rows, query_start_loc, num_computed_tokens, state))


def row_positions(query_start_loc: Int32, num_computed_tokens: Int32, num_rows: int) -> Int32:
    """The absolute position of each row of a step; -1 for padding."""
    checked_lengths(query_start_loc, num_computed_tokens, num_rows)
    tokens = np.arange(num_rows, dtype=np.int32)
    requests = requests_of_tokens(tokens, query_start_loc)
    if len(num_computed_tokens) == 0:
        return requests
    positions = num_computed_tokens[requests] + tokens - query_start_loc[requests]
    return np.where((requests >= 0) & (num_computed_tokens[requests] >= 0), positions, np.int32(-1))
