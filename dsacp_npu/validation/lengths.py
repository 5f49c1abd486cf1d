"""Which rows a rank has, and the lengths that its operators get."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.validation.core import Check, Fault
from dsacp_npu.validation.view import Array, View
from dsacp_ref.config import split_rule
from dsacp_ref.partition import Int32, rank_pieces

__all__ = ["CHECKS"]

LAYOUT = ("cp_size", "split")


def piece_ends(view: View) -> Int32:
    """The end of each operator row's piece within its request's new tokens."""
    pieces = rank_pieces(
        view.query_start_loc, view.cp_size, view.cp_rank, split=view.split, num_input_tokens=view.num_input_tokens
    )
    return pieces.piece_ends[: len(view.extents.seqused_kv)]


def row_lengths(view: View) -> Int32:
    """Queries of each operator row."""
    return np.diff(view.extents.cu_seqlens_q)


def of_rows(values: NDArray[Any], view: View) -> NDArray[Any]:
    """A value a request, for each operator row."""
    requests = view.extents.request_indices
    if len(values) == 0:
        return np.zeros(len(requests), np.int32)
    return np.where(requests >= 0, values[requests], 0)


def without_prefix(view: View) -> View:
    """The step of an implementation that forgets what was computed before."""
    return view.seen_as(seq_lens=np.where(view.seq_lens > 0, view.query_lens, 0).astype(np.int32))


def with_padded_queries(view: View) -> View:
    """The step of an implementation that takes padded query lengths from the prefix, which it floors at 0."""
    granule = view.cp_size * (2 if split_rule(view.split).name.startswith("zigzag") else 1)
    padding = -view.query_lens % granule
    prefix = np.maximum(view.computed - padding, 0)
    return view.seen_as(seq_lens=np.where(view.seq_lens > 0, prefix + view.query_lens, 0).astype(np.int32))


def positions_of_global_extents(view: View) -> NDArray[Any]:
    """Where an operator believes own queries to be that were given the whole request's length."""
    loc = view.extents.cu_seqlens_q
    rows = np.repeat(np.arange(len(loc) - 1), np.diff(loc))
    return of_rows(view.seq_lens, view)[rows] - (loc[rows + 1] - np.arange(len(rows)))


# --- query lengths ---


def compacted(view: View, got: Array) -> Array:
    """Offsets without the rows that have no queries."""
    lengths = row_lengths(view)
    return np.concatenate([[0], np.cumsum(lengths[lengths > 0])])


def with_pads_as_queries(view: View, got: Array) -> Array:
    """Offsets whose last row takes the rank's pad rows."""
    loc = view.extents.cu_seqlens_q.copy()
    loc[-1:] = len(view.tokens)
    return loc


def one_row_a_request(view: View, got: Array) -> Array:
    """Offsets of a rank's queries of each request, however many pieces they are."""
    lengths = np.zeros(view.num_reqs, np.int64)
    real = view.extents.request_indices >= 0
    np.add.at(lengths, view.extents.request_indices[real], row_lengths(view)[real])
    return np.concatenate([[0], np.cumsum(lengths)])


QUERY_FAULTS = (
    Fault("leading_zero_missing", lambda view, got: view.extents.cu_seqlens_q[1:]),
    Fault("lengths_not_cumulative", lambda view, got: row_lengths(view)),
    Fault("lengths_not_cumulative", lambda view, got: np.concatenate([[0], row_lengths(view)])),
    Fault("global_query_offsets", lambda view, got: view.query_start_loc),
    Fault("rows_compacted", compacted),
    Fault("row_a_request", one_row_a_request),
    Fault("pads_counted_as_queries", with_pads_as_queries),
    Fault("offsets_of_keys", lambda view, got: np.concatenate([[0], np.cumsum(view.extents.seqused_kv)])),
)

# --- key extents ---


def whole_lengths(view: View, got: Array) -> Array:
    """Every row's request, whole."""
    return of_rows(view.seq_lens, view)


def where_queried(values: NDArray[Any], view: View) -> NDArray[Any]:
    """Values of rows with queries; what is right in others."""
    return np.where(row_lengths(view) > 0, values, view.extents.seqused_kv)


def extents_of_last_piece(view: View, got: Array) -> Array:
    """The extent of a request's last piece on this rank, for all of its pieces."""
    extents, requests = view.extents.seqused_kv, view.extents.request_indices
    highest = np.zeros(view.num_reqs, np.int32)
    np.maximum.at(highest, requests[requests >= 0], extents[requests >= 0])
    return where_queried(of_rows(highest, view), view)


def unfloored(view: View, got: Array) -> Array:
    """Extents that were not floored at 0 where a padded slot has rows here."""
    behind = of_rows(view.query_lens, view) - piece_ends(view)
    raw = of_rows(view.seq_lens, view) - behind
    return np.where(row_lengths(view) > 0, raw, view.extents.seqused_kv)


def with_padded_slots(view: View, got: Array) -> Array:
    """Padded slots counted as requests that start now."""
    filled = np.where(view.seq_lens == 0, view.query_lens, view.seq_lens).astype(np.int32)
    return view.seen_as(seq_lens=filled).extents.seqused_kv


def in_entries(view: View, got: Array) -> Array:
    """Extents in entries."""
    return view.extents.seqused_kv // view.setting("compress_ratio")


def other_convention(view: View, empty_extent: str) -> Array | None:
    """The extents of rows without queries as others have them."""
    if view.empty_extent == empty_extent or not view.causal:
        return None
    return view.seen_as(empty_extent=empty_extent).extents.seqused_kv


EXTENT_FAULTS = (
    Fault("global_key_length", whole_lengths),
    Fault("global_key_length", lambda view, got: view.seq_lens),
    Fault("extent_not_reduced", lambda view, got: where_queried(whole_lengths(view, got), view)),
    Fault("one_extent_a_request", extents_of_last_piece),
    Fault("prefix_lost", lambda view, got: without_prefix(view).extents.seqused_kv),
    Fault("padding_in_prefix", lambda view, got: with_padded_queries(view).extents.seqused_kv),
    Fault("aligned_left", lambda view, got: row_lengths(view)),
    Fault("negative_extent", unfloored),
    Fault("padded_slot_extent", with_padded_slots),
    Fault("extent_in_entries", in_entries),
    Fault("empty_rows_prefix", lambda view, got: other_convention(view, "prefix")),
    Fault("empty_rows_zero", lambda view, got: other_convention(view, "zero")),
    Fault("offsets_for_lengths", lambda view, got: np.concatenate([[0], np.cumsum(view.extents.seqused_kv)])),
    Fault("offsets_for_lengths", lambda view, got: np.cumsum(view.extents.seqused_kv)),
    Fault("rows_compacted", lambda view, got: view.extents.seqused_kv[row_lengths(view) > 0]),
)

CHECKS = (
    Check(
        "local_rows",
        "token_indices",
        "each local row holds the token that the split gives it",
        LAYOUT,
        lambda view: view.tokens,
        View.place_of_row,
    ),
    Check(
        "query_lengths",
        "cu_seqlens_q",
        "the offsets of the rank's own queries, one operator row a piece",
        LAYOUT,
        lambda view: view.extents.cu_seqlens_q,
        View.place_of_offset,
        QUERY_FAULTS,
    ),
    Check(
        "row_requests",
        "request_indices",
        "the request of each operator row",
        LAYOUT,
        lambda view: view.extents.request_indices,
        View.place_of_operator_row,
        (
            Fault("row_a_request", lambda view, got: np.arange(view.num_reqs)),
            Fault("rows_compacted", lambda view, got: view.extents.request_indices[row_lengths(view) > 0]),
        ),
    ),
    Check(
        "key_extents",
        "seqused_kv",
        "the right-aligned extent of each operator row",
        LAYOUT,
        lambda view: view.extents.seqused_kv,
        View.place_of_operator_row,
        EXTENT_FAULTS,
    ),
)
