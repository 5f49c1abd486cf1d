"""Mirror of `dsacp_ref.extents` over torch.

Everything here runs on the device of its arguments and never waits for it: the number of rows comes from shapes and
from ``num_input_tokens``. On the CPU it may be read from the offsets instead, and the lengths of the contiguous split
are computed on numpy views, by the same lines: an operation on few numbers costs a fraction of one of torch's there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dsacp_npu._tensors import Float, Int32, check_floats, check_tensor, dtype_name, first_true, torch, values_known
from dsacp_npu.partition import (
    Pieces,
    check_query_start_loc,
    checked_offsets_on_host,
    checked_ranks,
    counted,
    first_on_host,
    is_row,
    padded_known_count,
    padded_token_count,
    pieces_of_rule,
    requests_of_tokens,
)
from dsacp_ref.config import split_rule
from dsacp_ref.spec import INT32_MAX, check_bool, check_choice, check_int, contract_error

__all__ = [
    "CPLocalMetadata",
    "LocalExtents",
    "build_cp_local_metadata",
    "local_extents",
    "query_positions",
    "query_rows",
    "token_positions",
    "token_requests",
]

EMPTY_EXTENTS = ("zero", "prefix")

# Parsing a rule is plain Python on a constant: a compiler takes the result instead of tracing the parser.
constant_split_rule = torch.compiler.assume_constant_result(split_rule)  # type: ignore[no-untyped-call]


class LocalExtents(NamedTuple):
    """Mirror of `dsacp_ref.extents.LocalExtents`."""

    cu_seqlens_q: Int32
    seqused_kv: Int32
    request_indices: Int32


class CPLocalMetadata(NamedTuple):
    """Mirror of `dsacp_ref.extents.CPLocalMetadata`."""

    local_query_start_loc: Int32
    local_seq_lens: Int32
    local_kv_start_loc: Int32
    local_start: int
    local_end: int
    tokens_per_rank: int
    num_tokens_pad: int
    local_cos: Float
    local_sin: Float


def check_batch(query_start_loc: Int32, seq_lens: Int32) -> None:
    """Refuse a batch whose lengths cannot be: too few keys for the queries, or counts that overflow."""
    checked_on_host(query_start_loc, seq_lens)


def checked_on_host(query_start_loc: Int32, seq_lens: Int32) -> tuple[Any, Any] | None:
    """Both as numpy views, once they are found to be a batch; None where values are not known."""
    offsets = checked_offsets_on_host(query_start_loc)
    num_reqs = query_start_loc.shape[0] - 1
    if not is_row(seq_lens, num_reqs):
        hint = f"one entry per request (query_start_loc has {num_reqs + 1} entries)"
        check_tensor("seq_lens", seq_lens, ("int32",), (num_reqs,), hint)
    if offsets is None or not values_known(seq_lens):
        return None
    key_counts = seq_lens.numpy()
    check_key_counts(offsets[1:] - offsets[:-1], key_counts)
    return offsets, key_counts


def check_key_counts(query_lens: Any, seq_lens: Any) -> None:
    """Refuse requests with fewer keys than queries, from both lengths as numpy arrays."""
    short = seq_lens < query_lens  # query lengths are not negative, so this finds negative counts too
    request = first_on_host(short)
    if request is not None:  # maybe a padded slot only
        request = first_on_host(short & (seq_lens != 0))
    if request is not None:
        raise contract_error(
            "seq_lens",
            "be 0 (padded slot) or at least the request's query length",
            f"{seq_lens[request]} keys for {query_lens[request]} queries of request {request}",
            "seq_lens counts all keys of the request, this step's tokens included",
        )


def checked_offsets(name: str, lengths: Int32) -> Int32:
    """``[0] + cumsum(lengths)`` in int32, refused when the sum does not fit."""
    offsets = torch.cat([lengths.new_zeros(1), lengths]).cumsum(0, dtype=torch.int32)
    if values_known(offsets):
        check_sums(name, offsets.numpy(), lengths)
    return offsets


def check_sums(name: str, offsets: Any, lengths: Any) -> None:
    """Refuse int32 sums that went beyond int32; the first one that did is negative."""
    if first_on_host(offsets < 0) is not None:
        total = sum(lengths.tolist())
        raise contract_error(name, "sum to less than 2**31", total, "split the batch: offsets are int32")


def check_extent_rule(causal: bool, empty_extent: str) -> None:
    """Refuse words for the extents that mean nothing, or nothing together."""
    check_choice("empty_extent", empty_extent, EMPTY_EXTENTS)
    if not check_bool("causal", causal) and empty_extent == "prefix":
        raise contract_error(
            "empty_extent", "be 'zero' when causal is False", repr(empty_extent), "a draft row without queries reads 0"
        )


def as_tensor(row: Any) -> Int32:
    """A numpy row computed on the host, as what callers get; a tensor as it is."""
    return row if isinstance(row, torch.Tensor) else torch.from_numpy(row)


def clipped_offsets(query_start_loc: Any, low: int, high: int) -> Any:
    """The offsets within a slice."""
    if isinstance(query_start_loc, torch.Tensor):
        return query_start_loc.clamp(low, high)
    return np.minimum(np.maximum(query_start_loc, low), high)  # sooner than `np.clip`


def contiguous_extents(
    query_start_loc: Any, seq_lens: Any, local_start: int, local_end: int, *, causal: bool, empty_extent: str
) -> tuple[Any, Any]:
    """``cu_seqlens_q`` and ``seqused_kv`` of one slice of the flat stream: the rows of `contiguous_pieces`, sooner.

    Tensors or numpy arrays: what is written here means the same for both. The rank's query lengths are differences of
    clipped offsets, so their running sum is the clipped offsets again.
    """
    check_extent_rule(causal, empty_extent)
    clipped = clipped_offsets(query_start_loc, local_start, local_end)
    lower, upper = clipped[:-1], clipped[1:]
    cu_seqlens_q = clipped - clipped[:1]
    if not causal:
        return cu_seqlens_q, seq_lens * (upper > lower)
    behind = query_start_loc[1:] - upper  # tokens behind the slice lie in the future of all that is in it
    if empty_extent == "prefix":  # negative for a request before the slice, beyond its length for one behind it
        behind = behind.clip(min=0).clip(max=query_start_loc[1:] - query_start_loc[:-1])
    seqused_kv = seq_lens - behind
    counted_rows = seqused_kv > 0  # a padded slot has fewer keys than queries
    if empty_extent == "zero":
        counted_rows = counted_rows & (upper > lower)
    return cu_seqlens_q, seqused_kv * counted_rows


def extents_of_pieces(
    pieces: Pieces, query_start_loc: Int32, seq_lens: Int32, *, causal: bool, empty_extent: str
) -> LocalExtents:
    """The operator row of every piece."""
    check_extent_rule(causal, empty_extent)
    query_lens = pieces.piece_ends - pieces.piece_starts
    cu_seqlens_q = checked_offsets("query lengths", query_lens)
    if len(seq_lens) == 0:
        return LocalExtents(cu_seqlens_q, torch.zeros_like(query_lens), pieces.request_indices)
    if causal:
        # Keys behind the piece lie in its future. A padded slot computes to at most 0: it has fewer keys than queries.
        num_computed_tokens = seq_lens - (query_start_loc[1:] - query_start_loc[:-1])
        seqused_kv = (num_computed_tokens[pieces.request_indices] + pieces.piece_ends).clamp(min=0)
    else:
        seqused_kv = seq_lens[pieces.request_indices]
    counts = query_lens > 0 if empty_extent == "zero" else pieces.request_indices >= 0
    return LocalExtents(cu_seqlens_q, seqused_kv * counts, pieces.request_indices)


def local_extents(
    query_start_loc: Int32,
    seq_lens: Int32,
    cp_size: int,
    cp_rank: int,
    *,
    split: str = "contiguous",
    num_input_tokens: int | None = None,
    causal: bool = True,
    empty_extent: str = "zero",
) -> LocalExtents:
    """Mirror of `dsacp_ref.extents.local_extents`.

    Limits: on a device or while compiling, `contiguous` and `round_robin` need ``num_input_tokens``, and
    `round_robin_page` is refused because its row count depends on the lengths.
    """
    rows = checked_on_host(query_start_loc, seq_lens) or (query_start_loc, seq_lens)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    rule = constant_split_rule(split)
    if rule.name == "contiguous":
        num_rows = padded_token_count(query_start_loc, cp_size, rule, num_input_tokens) // cp_size
        bounds = num_rows * cp_rank, num_rows * (cp_rank + 1)
        cu_seqlens_q, seqused_kv = contiguous_extents(*rows, *bounds, causal=causal, empty_extent=empty_extent)
        return LocalExtents(as_tensor(cu_seqlens_q), as_tensor(seqused_kv), counted(len(seq_lens), seq_lens))
    pieces = pieces_of_rule(query_start_loc, cp_size, cp_rank, rule, num_input_tokens)
    return extents_of_pieces(pieces, query_start_loc, seq_lens, causal=causal, empty_extent=empty_extent)


def token_requests(token_indices: Int32, query_start_loc: Int32) -> Int32:
    """Mirror of `dsacp_ref.extents.token_requests`."""
    check_tensor("token_indices", token_indices, ("int32",), ("num_rows",))
    check_query_start_loc(query_start_loc)
    return requests_of_tokens(token_indices, query_start_loc)


def token_positions(token_indices: Int32, query_start_loc: Int32, seq_lens: Int32) -> Int32:
    """Mirror of `dsacp_ref.extents.token_positions`."""
    check_batch(query_start_loc, seq_lens)
    requests = token_requests(token_indices, query_start_loc)
    if len(seq_lens) == 0:
        return requests
    positions = seq_lens[requests] - (query_start_loc[requests + 1] - token_indices)
    return positions.masked_fill((requests < 0) | (seq_lens[requests] <= 0), -1)


def query_rows(cu_seqlens_q: Int32, *, num_rows: int) -> Int32:
    """Mirror of `dsacp_ref.extents.query_rows`."""
    check_offsets("cu_seqlens_q", cu_seqlens_q)
    least = int(cu_seqlens_q[-1]) if values_known(cu_seqlens_q) else 0
    num_rows = check_int("num_rows", num_rows, least, INT32_MAX, "cu_seqlens_q is local to the queries")
    return requests_of_tokens(counted(num_rows, cu_seqlens_q), cu_seqlens_q)


def query_positions(cu_seqlens_q: Int32, seqused_kv: Int32, *, num_rows: int) -> Int32:
    """Mirror of `dsacp_ref.extents.query_positions`."""
    rows = query_rows(cu_seqlens_q, num_rows=num_rows)
    check_extents(cu_seqlens_q, seqused_kv)
    if len(seqused_kv) == 0:
        return rows
    positions = seqused_kv[rows] - (cu_seqlens_q[rows + 1] - counted(num_rows, rows))
    return positions.masked_fill((rows < 0) | (seqused_kv[rows] <= 0), -1)


def check_offsets(name: str, offsets: Int32) -> None:
    """Refuse cumulative offsets without their leading zero, or that decrease."""
    check_tensor(name, offsets, ("int32",), ("rows + 1",))
    known = values_known(offsets)
    if len(offsets) == 0 or (known and offsets[0] != 0):
        raise contract_error(name, "start at 0", offsets[:1].tolist(), "prepend the leading zero")
    if known and (offsets[1:] < offsets[:-1]).any():
        raise contract_error(name, "not decrease", offsets.tolist(), "it is cumulative, not one length a row")


def check_extents(cu_seqlens_q: Int32, seqused_kv: Int32) -> None:
    """Refuse an extent that is shorter than its row's queries."""
    num_rows = len(cu_seqlens_q) - 1
    check_tensor("seqused_kv", seqused_kv, ("int32",), (num_rows,), f"cu_seqlens_q has {num_rows + 1} entries")
    if not values_known(cu_seqlens_q, seqused_kv):
        return
    query_lens = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    bad = (seqused_kv < 0) | ((seqused_kv > 0) & (seqused_kv < query_lens))
    if bad.any():
        row = first_true(bad)
        raise contract_error(
            "seqused_kv",
            "be 0 or at least the row's query length",
            f"{int(seqused_kv[row])} keys for {int(query_lens[row])} queries of row {row}",
            "an extent is right-aligned: it ends with the row's last query",
        )


def build_cp_local_metadata(
    query_start_loc: Int32,
    seq_lens: Int32,
    cp_size: int,
    cp_rank: int,
    full_cos: Float | None,
    full_sin: Float | None,
    *,
    num_input_tokens: int | None = None,
    causal: bool = True,
    empty_extent: str = "zero",
) -> CPLocalMetadata:
    """Mirror of `dsacp_ref.extents.build_cp_local_metadata`.

    Limits: on a device or while compiling it needs the tables or ``num_input_tokens``.
    """
    rows = checked_on_host(query_start_loc, seq_lens)
    tables = full_cos, full_sin
    bounds = slice_bounds(query_start_loc, rows, cp_size, cp_rank, *tables, num_input_tokens)
    local_start, local_end = bounds[:2]
    cu_seqlens_q, seqused_kv = contiguous_extents(
        *(rows or (query_start_loc, seq_lens)), local_start, local_end, causal=causal, empty_extent=empty_extent
    )
    kv_start_loc = cu_seqlens_q * 0
    kv_start_loc[1:] = seqused_kv.cumsum(0, dtype=seqused_kv.dtype)
    if rows is not None:
        check_sums("local_seq_lens", kv_start_loc, seqused_kv)
    lengths = as_tensor(cu_seqlens_q), as_tensor(seqused_kv), as_tensor(kv_start_loc)
    return CPLocalMetadata(*lengths, *bounds, *local_tables(*tables, local_start, local_end, query_start_loc))


def slice_bounds(
    query_start_loc: Int32,
    known: tuple[Any, Any] | None,
    cp_size: int,
    cp_rank: int,
    full_cos: Float | None,
    full_sin: Float | None,
    num_input_tokens: int | None,
) -> tuple[int, int, int, int]:
    """Start, end and size of the rank's slice of the stream, and the stream's, once ranks, count and tables fit it.

    ``known`` holds the offsets on the host, or is None.
    """
    num_tokens = None if known is None else int(known[0][-1])
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    rule = constant_split_rule("contiguous")

    def padded(count: int | None) -> int:
        if num_tokens is None:
            return padded_token_count(query_start_loc, cp_size, rule, count)
        return padded_known_count(num_tokens, cp_size, rule, count)

    if num_input_tokens is not None:  # a wrong count is named as such, not as tables that do not fit it
        padded(num_input_tokens)
    cos_rows = check_tables(full_cos, full_sin, num_tokens or 0, num_input_tokens)
    num_tokens_pad = padded(cos_rows if num_input_tokens is None else num_input_tokens)
    tokens_per_rank = num_tokens_pad // cp_size
    local_start = cp_rank * tokens_per_rank
    return local_start, local_start + tokens_per_rank, tokens_per_rank, num_tokens_pad


def local_tables(
    full_cos: Float | None, full_sin: Float | None, local_start: int, local_end: int, like: torch.Tensor
) -> tuple[Float, Float]:
    """The slice's rows of both tables; without tables none of them has a column."""
    count = local_end - local_start
    if full_cos is None or full_sin is None:
        nothing = like.new_empty(count, 0, dtype=torch.float32)
        return nothing, nothing
    return table_rows(full_cos, local_start, count, 1.0), table_rows(full_sin, local_start, count, 0.0)


def check_tables(
    full_cos: Float | None, full_sin: Float | None, num_tokens: int, num_input_tokens: int | None
) -> int | None:
    """The number of rows of the RoPE tables, once they are found to fit each other and the stream."""
    if full_cos is None or full_sin is None:
        if full_cos is full_sin:
            return None
        raise contract_error("full_cos and full_sin", "be given together", "one of the two", "or None for both")
    check_floats("full_cos", full_cos, ("n", "rope_width"))
    check_tensor("full_sin", full_sin, (dtype_name(full_cos),), tuple(full_cos.shape), "cos and sin are one table")
    rows = full_cos.shape[0]
    if rows < num_tokens or (num_input_tokens is not None and rows > num_input_tokens):
        most = "" if num_input_tokens is None else f" and at most num_input_tokens {num_input_tokens}"
        raise contract_error(
            "full_cos",
            f"have one row per flat token, at least {num_tokens}{most}",
            rows,
            "the table is by token of the stream, not by position: gather it with the tokens' positions first",
        )
    return rows


def table_rows(table: Float, local_start: int, tokens_per_rank: int, beyond: float) -> Float:
    """The rank's rows of a RoPE table, filled up with the identity rotation."""
    missing = local_start + tokens_per_rank - table.shape[0]
    if missing <= 0:
        return table.narrow_copy(0, local_start, tokens_per_rank)  # the caller may fill the table anew
    rows = table[local_start:]
    return torch.cat([rows, table.new_full((tokens_per_rank - len(rows), table.shape[1]), beyond)])
