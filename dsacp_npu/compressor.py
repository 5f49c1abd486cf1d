"""Mirror of `dsacp_ref.compressor` over torch. Runs on the device of its arguments and never waits for it.

How many entries a step completes depends on values, so every row up to the capacity is computed and the rest zeroed.
With bfloat16 or float16 input everything is computed in float32, the projections included: projected rows and state
are float32, so that a state does not depend on how a prompt was cut into steps. Only the entries that `compress` hands
out are rounded to the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dsacp_npu._tensors import (
    FLOATS,
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
from dsacp_npu._tiles import in_blocks
from dsacp_npu.extents import check_offsets
from dsacp_npu.partition import counted, requests_of_tokens
from dsacp_npu.rope import apply_rope, rope_table
from dsacp_npu.visibility import pool_row_starts
from dsacp_ref.spec import INT32_MAX, check_int, check_number, check_record, contract_error

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
    "updated_state_",
    "compress_",
]

POOLED_NUMBERS = 1 << 24  # numbers gathered at a time while pooling: memory stays flat in tokens


class CompressorWeights(NamedTuple):
    """Mirror of `dsacp_ref.compressor.CompressorWeights`."""

    wkv: Float
    wgate: Float
    ape: Float
    norm_weight: Float


class CompressorState(NamedTuple):
    """Mirror of `dsacp_ref.compressor.CompressorState`."""

    kv: Float
    score: Float
    held_start: Int32
    num_tokens: Int32


class ProjectedRows(NamedTuple):
    """Mirror of `dsacp_ref.compressor.ProjectedRows`."""

    kv: Float
    score: Float


class EntryPlan(NamedTuple):
    """Mirror of `dsacp_ref.compressor.EntryPlan`."""

    entry_requests: Int32
    entry_indices: Int32
    entry_start_loc: Int32


class CompressedEntries(NamedTuple):
    """Mirror of `dsacp_ref.compressor.CompressedEntries`."""

    entries: Float
    entry_requests: Int32
    entry_indices: Int32
    entry_start_loc: Int32


class Compression(NamedTuple):
    """Mirror of `dsacp_ref.compressor.Compression`."""

    compressed: CompressedEntries
    state: CompressorState


def rms_norm(x: Float, weight: Float | None, eps: float) -> Float:
    """Mirror of `dsacp_ref.compressor.rms_norm`."""
    check_floats("x", x, (*getattr(x, "shape", ())[:-1], "d"))
    check_int("d", x.shape[-1], 1)
    eps = check_number("eps", eps, at_least=0.0)
    if weight is not None:
        check_floats("weight", weight, (x.shape[-1],), "one weight a channel")

    def normed(rows: Float) -> Float:
        wide = rows.to(computing_dtype(x.dtype))
        scaled = wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
        return (scaled if weight is None else scaled * weight.to(wide.dtype)).to(x.dtype)

    return in_blocks(normed, x)


def empty_state(weights: CompressorWeights, num_reqs: int, *, num_rows: int | None = None) -> CompressorState:
    """Mirror of `dsacp_ref.compressor.empty_state`. The rings of short weights are float32."""
    width, ratio = checked_weights(weights)
    least = width // len(weights.norm_weight) * ratio
    num_rows = least if num_rows is None else check_int("num_rows", num_rows, least, hint="an entry pools that many")
    num_reqs = check_int("num_reqs", num_reqs, 0)
    ring = weights.wkv.new_zeros(num_reqs, num_rows, width, dtype=computing_dtype(weights.wkv.dtype))
    nothing = ring.new_zeros(num_reqs, dtype=torch.int32)
    return CompressorState(ring, ring.clone(), nothing, nothing.clone())


def checked_weights(weights: CompressorWeights) -> tuple[int, int]:
    """Projection width and compress ratio, once the four shapes are found to fit."""
    check_record("weights", weights, CompressorWeights)
    check_floats("wkv", weights.wkv, ("c * d", "hidden"))
    check_floats("wgate", weights.wgate, tuple(weights.wkv.shape), "like wkv")
    width = weights.wkv.shape[0]
    check_floats("ape", weights.ape, ("compress_ratio", width), "one bias a place in the window")
    check_floats("norm_weight", weights.norm_weight, ("d",))
    d = weights.norm_weight.shape[0]
    if d < 1 or width not in (d, 2 * d):
        raise contract_error("wkv", f"have {d} or, with overlap, {2 * d} rows", width, f"norm_weight has {d} channels")
    check_int("compress_ratio", weights.ape.shape[0], 1)
    return width, weights.ape.shape[0]


def projected_rows(x: Float, positions: Int32, weights: CompressorWeights) -> ProjectedRows:
    """Mirror of `dsacp_ref.compressor.projected_rows`.

    The products of short numbers are exact in float32, so a float32 product is what a kernel gives that takes short
    numbers and does not round its sums: the operator's way, and the cheapest that every device of torch has.
    """
    _, ratio = checked_weights(weights)
    check_floats("x", x, ("num_tokens", weights.wkv.shape[1]), "hidden size of wkv")
    check_tensor("positions", positions, ("int32",), (len(x),), "one a row of x")
    if values_known(positions) and (positions < -1).any():
        raise contract_error("positions", "be -1 or a position", int(positions.min()), "-1 alone marks a pad row")
    dtype = computing_dtype(x.dtype)
    wide = x.to(dtype)
    bias = weights.ape.to(dtype)[positions % ratio]
    return ProjectedRows(wide @ weights.wkv.T.to(dtype), wide @ weights.wgate.T.to(dtype) + bias)


def emitted_entries(
    query_start_loc: Int32, num_computed_tokens: Int32, compress_ratio: int, *, num_rows: int
) -> EntryPlan:
    """Mirror of `dsacp_ref.compressor.emitted_entries`."""
    lengths = checked_lengths(query_start_loc, num_computed_tokens, num_rows)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1, INT32_MAX)
    starts = num_computed_tokens.clamp(min=0)
    first = starts // compress_ratio
    count = ((starts + lengths) // compress_ratio - first).masked_fill(num_computed_tokens < 0, 0)
    entry_start_loc = torch.cat([count.new_zeros(1), count.cumsum(0, dtype=torch.int32)])
    capacity = min(num_rows, num_rows // compress_ratio + len(lengths))
    rows = counted(capacity, lengths)
    requests = requests_of_tokens(rows, entry_start_loc)
    if len(lengths) == 0:
        return EntryPlan(requests, requests.clone(), entry_start_loc)
    indices = first[requests] + rows - entry_start_loc[requests]
    return EntryPlan(requests, indices.masked_fill(requests < 0, -1), entry_start_loc)


def checked_lengths(query_start_loc: Int32, num_computed_tokens: Int32, num_rows: int) -> Int32:
    """New tokens per request, once the offsets are found to be those of the rows."""
    check_offsets("query_start_loc", query_start_loc)
    num_rows = check_int("num_rows", num_rows, 0, INT32_MAX)
    num_reqs = len(query_start_loc) - 1
    check_tensor("num_computed_tokens", num_computed_tokens, ("int32",), (num_reqs,), "one entry per request")
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    if not values_known(query_start_loc, num_computed_tokens):
        return lengths
    if query_start_loc[-1] > num_rows:
        raise contract_error(
            "query_start_loc",
            f"end at or before the {num_rows} rows it indexes",
            int(query_start_loc[-1]),
            "the compressor's rows are global: local rows need local offsets",
        )
    if (num_computed_tokens.clamp(min=0).long() + lengths > INT32_MAX).any():
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
    """Mirror of `dsacp_ref.compressor.compressed_entries`."""
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
    """Mirror of `dsacp_ref.compressor.pooled_entries`.

    Limits: rows that ask for no entry are computed too, and zeroed.
    """
    lengths = query_start_loc, num_computed_tokens
    compress_ratio, eps, overlap = checked_pooling(
        rows, entry_requests, entry_indices, *lengths, state, norm_weight, compress_ratio, eps
    )
    num_entries, d = len(entry_requests), len(norm_weight)
    if 0 in (num_entries, len(rows.kv), len(num_computed_tokens)):  # nothing to pool from
        return rows.kv.new_zeros(num_entries, d)
    unwanted = entry_requests < 0  # these pool entry 0 of request 0, or whatever lies there, and are zeroed
    entry_requests, entry_indices = entry_requests.clamp(min=0), entry_indices.masked_fill(unwanted, 0)
    slots = (2 if overlap else 1) * compress_ratio
    step = max(1, POOLED_NUMBERS // (slots * d))
    pooled = []
    for start in range(0, num_entries, step):
        requests, indices = entry_requests[start : start + step], entry_indices[start : start + step]
        kv, score = pooled_slots(
            rows, state, query_start_loc, num_computed_tokens, requests, indices, compress_ratio, overlap
        )
        pooled.append(softmax_mean(kv, score))
    normed = rms_norm(torch.cat(pooled), norm_weight, eps)
    entries = apply_rope(normed, *rope_table(entry_indices * compress_ratio, frequencies))
    return entries.masked_fill(unwanted[:, None], 0)


def checked_pooling(
    rows: ProjectedRows,
    entry_requests: Int32,
    entry_indices: Int32,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    norm_weight: Float,
    compress_ratio: int,
    eps: float,
) -> tuple[int, float, bool]:
    """Ratio, eps, and whether entries overlap, once all that is pooled from is found to belong together."""
    num_rows = check_projected(rows)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1, INT32_MAX // 2)
    eps = check_number("eps", eps, at_least=0.0)
    check_floats("norm_weight", norm_weight, ("d",))
    overlap = check_state(state, rows, norm_weight, compress_ratio)
    lengths = checked_lengths(query_start_loc, num_computed_tokens, num_rows)
    check_continues(state, query_start_loc, num_computed_tokens, compress_ratio, overlap)
    check_completed(entry_requests, entry_indices, lengths, num_computed_tokens, compress_ratio)
    return compress_ratio, eps, overlap


def check_completed(
    entry_requests: Int32, entry_indices: Int32, lengths: Int32, num_computed_tokens: Int32, compress_ratio: int
) -> None:
    """Refuse an entry whose last token is not among the step's."""
    check_tensor("entry_requests", entry_requests, ("int32",), ("num_entries",))
    check_tensor("entry_indices", entry_indices, ("int32",), tuple(entry_requests.shape), "one a request number")
    if not values_known(entry_requests, entry_indices, lengths, num_computed_tokens):
        return
    wanted = entry_requests >= 0
    if not wanted.any():
        return
    requests, indices = entry_requests[wanted], entry_indices[wanted]
    if int(requests.max()) >= len(lengths):
        raise contract_error("entry_requests", f"be below {len(lengths)}", int(requests.max()))
    starts = num_computed_tokens[requests]
    ends = starts + lengths[requests]
    outside = (indices < starts // compress_ratio) | (indices >= ends // compress_ratio) | (starts < 0)
    if outside.any():
        at = first_true(outside)
        raise contract_error(
            "entry_indices",
            "name entries that this step completes",
            f"entry {int(indices[at])} of request {int(requests[at])}",
            f"its new positions are {int(starts[at])} to {int(ends[at]) - 1}",
        )


def check_projected(rows: ProjectedRows) -> int:
    """The number of rows, once both projections are found alike."""
    check_record("rows", rows, ProjectedRows)
    check_tensor("rows.kv", rows.kv, FLOATS, ("num_tokens", "c * d"))
    check_tensor("rows.score", rows.score, (dtype_name(rows.kv),), tuple(rows.kv.shape), "like rows.kv")
    return len(rows.kv)


def check_state(state: CompressorState, rows: ProjectedRows, norm_weight: Float, compress_ratio: int) -> bool:
    """Whether entries overlap, once the ring is found to fit the rows."""
    width, d = rows.kv.shape[1], len(norm_weight)
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
    dtypes, width = (dtype_name(rows.kv),), rows.kv.shape[1]
    check_tensor("state.kv", state.kv, dtypes, ("num_reqs", "num_rows", width), "like rows.kv")
    check_tensor("state.score", state.score, dtypes, tuple(state.kv.shape), "like state.kv")
    check_int("state.kv rows", state.kv.shape[1], 1, hint="use empty_state")
    check_ends(state)


def check_ends(state: CompressorState) -> None:
    """Refuse a state whose counts are not one a ring."""
    for name, value in (("state.held_start", state.held_start), ("state.num_tokens", state.num_tokens)):
        check_tensor(name, value, ("int32",), (len(state.kv),), "one entry per request")


def check_continues(
    state: CompressorState, query_start_loc: Int32, num_computed_tokens: Int32, compress_ratio: int, overlap: bool
) -> None:
    """Refuse a state that does not hold what comes before this step: zeros would pass for tokens."""
    num_reqs = len(num_computed_tokens)
    if len(state.num_tokens) != num_reqs:
        raise contract_error("state", f"hold {num_reqs} requests", len(state.num_tokens), "one ring a request")
    if not values_known(query_start_loc, num_computed_tokens, state.held_start, state.num_tokens):
        return
    going_on = (query_start_loc[1:] > query_start_loc[:-1]) & (num_computed_tokens > 0)
    needed = pool_row_starts(num_computed_tokens.clamp(min=0), compress_ratio, overlap=overlap)
    bad = going_on & ((state.num_tokens != num_computed_tokens) | (state.held_start > needed))
    if bad.any():
        request = first_true(bad)
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
    positions = first_window[:, None] * compress_ratio + counted(num_slots, indices)
    from_start = positions - num_computed_tokens[requests][:, None]  # negative: a row that the state holds
    new = from_start >= 0
    new_row = (query_start_loc[requests][:, None] + from_start).clamp(0, len(rows.kv) - 1)
    ring_row = positions % state.kv.shape[1]

    def from_both(new_values: Float, ring_values: Float) -> Float:
        ring = ring_values[requests[:, None], ring_row]
        values = torch.where(new[..., None], new_values[new_row], ring)
        if not overlap:
            return values
        d = values.shape[-1] // 2
        return torch.cat([values[:, :compress_ratio, :d], values[:, compress_ratio:, d:]], dim=1)

    absent = (positions < 0)[..., None]  # no window before the first: weight exactly 0, whatever the ring holds
    kv, score = from_both(rows.kv, state.kv), from_both(rows.score, state.score)
    return kv.masked_fill(absent, 0), score.masked_fill(absent, -torch.inf)


def softmax_mean(kv: Float, score: Float) -> Float:
    """The softmax-weighted mean over slots (axis 1), apart for every channel."""
    weights = torch.exp(score - score.amax(dim=1, keepdim=True))
    return (weights * kv).sum(dim=1) / weights.sum(dim=1)


def updated_state(
    rows: ProjectedRows, query_start_loc: Int32, num_computed_tokens: Int32, state: CompressorState
) -> CompressorState:
    """Mirror of `dsacp_ref.compressor.updated_state`."""
    num_tokens = check_projected(rows)
    check_rings(state, rows)
    lengths = checked_lengths(query_start_loc, num_computed_tokens, num_tokens)
    check_continues(state, query_start_loc, num_computed_tokens, 1, False)
    if num_tokens == 0:
        return CompressorState(*(field.clone() for field in state))
    live = (lengths > 0) & (num_computed_tokens >= 0)
    ends = torch.where(live, num_computed_tokens + lengths, state.num_tokens)
    num_rows = state.kv.shape[1]
    # The last position below `end` that falls on each ring row; new if this step brought it.
    last = ends[:, None] - 1 - (ends[:, None] - 1 - counted(num_rows, ends)) % num_rows
    new = (live[:, None] & (last >= num_computed_tokens.clamp(min=0)[:, None]))[..., None]
    source = (query_start_loc[:-1, None] + (last - num_computed_tokens[:, None])).clamp(0, num_tokens - 1)
    held = state.held_start.masked_fill(num_computed_tokens <= 0, 0)
    return CompressorState(
        torch.where(new, rows.kv[source], state.kv),
        torch.where(new, rows.score[source], state.score),
        torch.where(live, torch.maximum(held, ends - num_rows), state.held_start),
        ends,
    )


def updated_state_(
    rows: ProjectedRows, query_start_loc: Int32, num_computed_tokens: Int32, state: CompressorState
) -> CompressorState:
    """`updated_state`, written into the state, which is returned."""
    return written_state(state, updated_state(rows, query_start_loc, num_computed_tokens, state))


def written_state(state: CompressorState, after: CompressorState) -> CompressorState:
    """The same tensors, holding what comes after. Not before all is computed: lengths may be the state's own counts."""
    for field, values in zip(state, after, strict=True):
        field.copy_(values)
    return state


def rolled_back_state(
    state: CompressorState, num_tokens: Int32, *, compress_ratio: int, overlap: bool
) -> CompressorState:
    """Mirror of `dsacp_ref.compressor.rolled_back_state`."""
    check_ends(state)
    check_tensor("num_tokens", num_tokens, ("int32",), tuple(state.num_tokens.shape), "one entry per request")
    known = values_known(num_tokens, state.held_start, state.num_tokens)
    if known and ((num_tokens < 0).any() or (num_tokens > state.num_tokens).any()):
        raise contract_error(
            "num_tokens", f"be in 0 .. {state.num_tokens.tolist()}", num_tokens.tolist(), "a rollback only takes back"
        )
    needed = pool_row_starts(num_tokens, compress_ratio, overlap=overlap)
    lost = (state.held_start > needed) & (num_tokens > needed)
    if known and lost.any():
        request = first_true(lost)
        raise contract_error(
            "state",
            f"still hold rows {int(needed[request])} to {int(num_tokens[request])} of request {request}",
            f"rows from {int(state.held_start[request])}",
            "give empty_state as many spare num_rows as tokens may be rejected",
        )
    held_start = torch.minimum(state.held_start, num_tokens)
    return CompressorState(state.kv, state.score, held_start, num_tokens.clone())


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
    """Mirror of `dsacp_ref.compressor.compress`. The entries are in the dtype of `x`, the state is wide."""
    check_floats("x", x, ("num_tokens", "hidden"))
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
    compressed = compressed._replace(entries=compressed.entries.to(x.dtype))
    return Compression(compressed, updated_state(rows, query_start_loc, num_computed_tokens, state))


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


def row_positions(query_start_loc: Int32, num_computed_tokens: Int32, num_rows: int) -> Int32:
    """The absolute position of each row of a step; -1 for padding."""
    checked_lengths(query_start_loc, num_computed_tokens, num_rows)
    tokens = counted(num_rows, query_start_loc)
    requests = requests_of_tokens(tokens, query_start_loc)
    if len(num_computed_tokens) == 0:
        return requests
    before = num_computed_tokens[requests]
    return (before + tokens - query_start_loc[requests]).masked_fill((requests < 0) | (before < 0), -1)
