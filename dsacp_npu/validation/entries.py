"""The compressor: what it is told, the entries that a step completes, and their slots."""

from __future__ import annotations

import numpy as np

from dsacp_npu.validation.core import Check, Fault
from dsacp_npu.validation.lengths import row_lengths, without_prefix
from dsacp_npu.validation.slots import BLOCK_SIZES, other_tables
from dsacp_npu.validation.view import Array, Place, View
from dsacp_ref.compressor import EntryPlan, emitted_entries
from dsacp_ref.paging import slot_mapping
from dsacp_ref.partition import Int32

__all__ = ["CHECKS"]


def plan(view: View) -> EntryPlan:
    """The entries that the step completes, without unused capacity."""
    made = emitted_entries(
        view.query_start_loc, view.computed, view.setting("compress_ratio"), num_rows=view.num_tokens
    )
    count = int(made.entry_start_loc[-1])
    return EntryPlan(made.entry_requests[:count], made.entry_indices[:count], made.entry_start_loc)


def to_capacity(values: Array, capacity: int) -> Array:
    """Values of entries, and -1 up to a buffer's capacity."""
    return np.concatenate([values, np.full(max(capacity - len(values), 0), -1, np.int32)]).astype(np.int32)


def due_entries(name: str, view: View) -> Array:
    """A field of the plan, as long as what was got."""
    return to_capacity(getattr(plan(view), name), len(view.got(name)))


def due_slots(view: View) -> Int32:
    """The slot of each completed entry."""
    made = plan(view)
    return entry_slots(view, made.entry_indices, made)


def entry_slots(
    view: View, logical: Array, made: EntryPlan, *, size: int | None = None, table: Int32 | None = None
) -> Int32:
    """Slots of these logical rows, as many as what was got."""
    table = view.got("cmp_block_table") if table is None else table
    size = view.setting("cmp_block_size") if size is None else size
    return to_capacity(
        slot_mapping(logical.astype(np.int32), made.entry_requests, table, size), len(view.got("entry_slots"))
    )


def place_of_entry(view: View, index: tuple[int, ...]) -> Place:
    """The request of a completed entry, and the token that completes it."""
    made = plan(view)
    if index[0] >= len(made.entry_requests):
        return Place()
    request, entry = int(made.entry_requests[index[0]]), int(made.entry_indices[index[0]])
    last = (entry + 1) * int(view.setting("compress_ratio")) - 1
    return Place(request, int(view.query_start_loc[request] + last - view.computed[request]))


# --- what the compressor is told ---


def local_lengths(view: View) -> Array:
    """The rank's queries of each request."""
    lengths = np.zeros(view.num_reqs, np.int64)
    real = view.extents.request_indices >= 0
    np.add.at(lengths, view.extents.request_indices[real], row_lengths(view)[real])
    return lengths


def local_offsets(view: View) -> Array:
    """Their offsets."""
    return np.concatenate([[0], np.cumsum(local_lengths(view))])


def local_starts(view: View, got: Array) -> Array:
    """Where the rank's first piece of each request starts."""
    extents, requests, lengths = view.extents.seqused_kv, view.extents.request_indices, row_lengths(view)
    starts = view.computed.astype(np.int64)
    for row in np.flatnonzero(lengths > 0)[::-1]:
        starts[requests[row]] = extents[row] - lengths[row]
    return starts


OFFSET_FAULTS = (
    Fault("leading_zero_missing", lambda view, got: view.query_start_loc[1:]),
    Fault("lengths_not_cumulative", lambda view, got: view.query_lens),
    Fault("local_query_offsets", lambda view, got: view.extents.cu_seqlens_q),
    Fault("local_query_offsets", lambda view, got: local_offsets(view)),
    Fault("offsets_of_keys", lambda view, got: np.concatenate([[0], np.cumsum(view.seq_lens)])),
    Fault("offsets_of_keys", lambda view, got: np.concatenate([[0], np.cumsum(view.extents.seqused_kv)])),
)


def due_starts(view: View) -> Int32:
    """Tokens before the step; whatever is not above 0 will do in a padded graph slot."""
    return view.computed


def padded_and_not_above(view: View) -> Array:
    """Padded graph slots whose start is at most 0."""
    got = view.got("num_computed_tokens")
    if got.shape != view.seq_lens.shape:
        return np.zeros(view.num_reqs, bool)
    return (view.seq_lens == 0) & (got <= 0)


START_FAULTS = (
    Fault("starts_at_zero", lambda view, got: np.where(view.seq_lens > 0, 0, np.minimum(got, 0))),
    Fault("start_is_local", local_starts),
    Fault("start_is_end", lambda view, got: view.seq_lens),
    Fault("lengths_not_cumulative", lambda view, got: view.query_lens),
)


# --- entries ---


def made_by(field: str, loc: Array, starts: Array, view: View, ratio: int | None = None) -> Array | None:
    """A field of the plan that other offsets and starts give."""
    ratio = view.setting("compress_ratio") if ratio is None else ratio
    made = emitted_entries(loc.astype(np.int32), starts.astype(np.int32), ratio, num_rows=view.num_tokens)
    count = int(made.entry_start_loc[-1])
    if field == "entry_start_loc":
        return made.entry_start_loc
    return to_capacity(getattr(made, field)[:count], len(view.got(field)))


def counted(field: str, counts: Array, first: Array, view: View) -> Array | None:
    """A field of a plan of so many entries a request, from a first one on."""
    loc = np.concatenate([[0], np.cumsum(counts)])
    if field == "entry_start_loc":
        return loc
    requests = np.repeat(np.arange(len(counts)), counts)
    if field == "entry_requests":
        return to_capacity(requests, len(view.got(field)))
    indices = np.arange(loc[-1]) - loc[requests] + first[requests]
    return to_capacity(indices, len(view.got(field)))


def entry_faults(field: str) -> tuple[Fault, ...]:
    """The faults of a field of the plan."""

    def of_new_tokens(view: View, got: Array) -> Array | None:
        ratio = view.setting("compress_ratio")
        live = view.seq_lens > 0
        first = np.maximum(view.computed, 0) // ratio
        return counted(field, np.where(live, view.query_lens // ratio, 0), first, view)

    def from_zero(view: View, got: Array) -> Array | None:
        starts = np.where(view.seq_lens > 0, 0, -1)
        return made_by(field, view.query_start_loc, starts, view)

    def late(view: View, got: Array) -> Array | None:
        ratio, live = view.setting("compress_ratio"), view.seq_lens > 0
        start, end = np.maximum(view.computed - 1, 0), np.maximum(view.seq_lens - 1, 0)
        counts = np.where(live & (view.query_lens > 0), end // ratio - start // ratio, 0)
        return counted(field, counts, start // ratio, view)

    def rounded_up(view: View, got: Array) -> Array | None:
        ratio, live = view.setting("compress_ratio"), view.seq_lens > 0
        first = np.maximum(view.computed, 0) // ratio
        counts = np.where(live & (view.query_lens > 0), -(-view.seq_lens // ratio) - first, 0)
        return counted(field, counts, first, view)

    return (
        Fault("entries_of_own_rows", lambda view, got: made_by(field, local_offsets(view), view.computed, view)),
        Fault(
            "entries_of_own_rows", lambda view, got: made_by(field, local_offsets(view), local_starts(view, got), view)
        ),
        Fault("starts_at_zero", from_zero),
        Fault("entries_of_new_tokens", of_new_tokens),
        Fault("entries_one_late", late),
        Fault("entries_rounded_up", rounded_up),
        Fault(
            "leading_zero_missing",
            lambda view, got: plan(view).entry_start_loc[1:] if field == "entry_start_loc" else None,
        ),
        Fault(
            "lengths_not_cumulative",
            lambda view, got: np.diff(plan(view).entry_start_loc) if field == "entry_start_loc" else None,
        ),
    )


# --- slots of entries ---


def neighbours(view: View, got: Array) -> Array | None:
    """Slots of the entry behind, or before."""
    made = plan(view)
    for shift in (1, -1):
        try:
            slots = entry_slots(view, made.entry_indices + shift, made)
        except ValueError:
            continue
        if np.array_equal(slots, got):
            return slots
    return None


def at_token_rows(view: View, got: Array) -> Array | None:
    """Slots of an entry's first or last token in the table of entries, or in that of raw keys."""
    made, ratio = plan(view), view.setting("compress_ratio")
    raw = view.tensors.get("swa_block_table")
    sizes = [view.setting("cmp_block_size"), view.settings.get("block_size")]
    for table, size in ((view.got("cmp_block_table"), sizes[0]), (None if raw is None else raw.array, sizes[1])):
        for logical in (made.entry_indices * ratio, (made.entry_indices + 1) * ratio - 1):
            try:
                slots = entry_slots(view, logical, made, table=table, size=size)
            except ValueError:
                continue
            if np.array_equal(slots, got):
                return slots
    return None


def another_size(view: View, got: Array) -> Array | None:
    """Slots with another block size, the raw keys' first."""
    made = plan(view)
    for size in (view.settings.get("block_size", 1), *BLOCK_SIZES):
        try:
            slots = entry_slots(view, made.entry_indices, made, size=size)
        except ValueError:
            continue
        if size != view.setting("cmp_block_size") and np.array_equal(slots, got):
            return slots
    return None


def another_table(view: View, got: Array) -> Array | None:
    """Slots through the table of the request before or behind."""
    made = plan(view)
    for table in other_tables(view.got("cmp_block_table"), view.num_reqs):
        try:
            slots = entry_slots(view, made.entry_indices, made, table=table)
        except ValueError:
            continue
        if np.array_equal(slots, got):
            return slots
    return None


def stale(view: View, got: Array) -> Array | None:
    """What is right for entries, and what was got behind the last."""
    right = due_slots(view)
    return np.where(right < 0, got, right) if got.shape == right.shape else None


def from_zero(view: View, got: Array) -> Array:
    """Slots of entries that are counted from 0 in every step."""
    made = plan(view)
    first = made.entry_start_loc[made.entry_requests]
    return entry_slots(view, np.arange(len(made.entry_indices)) - first, made)


SLOT_FAULTS = (
    Fault("stale_slots", stale),
    Fault("entry_off_by_one", neighbours),
    Fault("entries_at_token_rows", at_token_rows),
    Fault("prefix_lost", from_zero),
    Fault("prefix_lost", lambda view, got: due_slots(without_prefix(view))),
    Fault("other_block_size", another_size),
    Fault("table_of_another_request", another_table),
)
FIELDS = {
    "entry_start_loc": ("entry_offsets", "how many entries each request completes", View.place_of_offset),
    "entry_requests": ("entry_requests", "the request of each completed entry", place_of_entry),
    "entry_indices": ("entries", "the number of each completed entry", place_of_entry),
}


def offset_place(view: View, index: tuple[int, ...]) -> Place:
    """Of the request that an offset ends."""
    return view.place_of_request((max(index[0] - 1, 0),))


CHECKS = (
    Check(
        "compressor_offsets",
        "compress_cu_seqlens",
        "the compressor gets the offsets of all tokens",
        (),
        lambda view: view.query_start_loc,
        offset_place,
        OFFSET_FAULTS,
        local=False,
    ),
    Check(
        "compressor_starts",
        "num_computed_tokens",
        "the compressor starts where each request's tokens before the step end",
        (),
        due_starts,
        View.place_of_request,
        START_FAULTS,
        padded_and_not_above,
        local=False,
    ),
    *(
        Check(
            name,
            field,
            title,
            ("compress_ratio",),
            (lambda view: plan(view).entry_start_loc)
            if field == "entry_start_loc"
            else (lambda view, f=field: due_entries(f, view)),
            offset_place if field == "entry_start_loc" else place,
            entry_faults(field),
            local=False,
        )
        for field, (name, title, place) in FIELDS.items()
    ),
    Check(
        "entry_slots",
        "entry_slots",
        "the slot of each completed entry, -1 beyond the last",
        ("compress_ratio", "cmp_block_table", "cmp_block_size"),
        due_slots,
        place_of_entry,
        SLOT_FAULTS,
        local=False,
    ),
)
