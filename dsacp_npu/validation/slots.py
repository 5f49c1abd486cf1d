"""Block tables as operators get them, and the slots that raw keys are written to."""

from __future__ import annotations

import numpy as np

from dsacp_npu.validation.core import Check, Fault
from dsacp_npu.validation.lengths import LAYOUT, row_lengths, without_prefix
from dsacp_npu.validation.view import Array, View
from dsacp_ref.paging import block_table_rows, slot_mapping
from dsacp_ref.partition import Int32, interleave_local_indices, interleave_owners

__all__ = ["CHECKS", "another_block_size", "other_tables"]

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def due_slots(view: View) -> Int32:
    """The slot of every token, -1 in rows of none."""
    return slots_at(view, view.positions_of(view.everything))


def slots_at(view: View, where: Int32, *, size: int | None = None, table: Int32 | None = None) -> Int32:
    """The slots of these logical rows of all tokens, and -1 up to the rows that there are."""
    table = view.got("swa_block_table") if table is None else table
    size = view.setting("block_size") if size is None else size
    requests = view.requests_of(view.everything)
    # A row beyond the last token belongs to no request; how many there are is the engine's to say.
    rows = max(len(view.got("slot_mapping")), view.num_tokens)
    slots = np.full(rows, -1, np.int32)
    slots[: view.num_tokens] = slot_mapping(where, np.where(where >= 0, requests, -1).astype(np.int32), table, size)
    return slots


def other_tables(table: Int32, num_reqs: int) -> list[Int32]:
    """The table with its rows moved against the requests."""
    return [np.roll(table, shift, axis=0) for shift in (1, -1)] if num_reqs > 1 else []


def another_block_size(view: View, got: Array) -> Array | None:
    """Slots with each other block size that gives what was got."""
    own = view.setting("block_size")
    where = view.positions_of(view.everything)
    # Every size is tried against what was got, so that one fault stands for all of them.
    for size in sorted({*BLOCK_SIZES, view.settings.get("cmp_block_size", 1)} - {own}):
        try:
            slots = slots_at(view, where, size=size)
        except ValueError:
            continue  # the table does not reach as far with blocks of this size
        if np.array_equal(slots, got):
            return slots
    return None


def another_request(view: View, got: Array) -> Array | None:
    """Slots through the table of the request before or behind."""
    where = view.positions_of(view.everything)
    for table in other_tables(view.got("swa_block_table"), view.num_reqs):
        try:
            slots = slots_at(view, where, table=table)
        except ValueError:
            continue
        if np.array_equal(slots, got):
            return slots
    return None


def mapped_twice(view: View, got: Array) -> Array:
    """Slots taken for positions and mapped again."""
    return slots_at(view, due_slots(view)[: view.num_tokens])


def sharded(view: View, got: Array) -> Array | None:
    """The slots that this rank would have if each token's key lay with its owner."""
    right = due_slots(view)
    for size in sorted({1, view.settings.get("block_size", 1)}):
        for values in (right, np.concatenate([view.positions_of(view.everything), right[view.num_tokens :]])):
            local = interleave_local_indices(values.astype(np.int32), view.cp_size, size)
            mine = interleave_owners(values.astype(np.int32), view.cp_size, size) == view.cp_rank
            for made in (np.where(mine, local, -1), local[mine]):
                if made.shape == got.shape and np.array_equal(made, got):
                    return made
    return None


def own_tokens_only(view: View, got: Array) -> Array:
    """Slots of this rank's tokens, in their place or alone."""
    right = due_slots(view)
    if len(got) != len(right):
        local = np.full(len(got), -1, np.int32)
        slots = np.where(view.tokens >= 0, right[view.tokens], -1)
        slots = slots if len(got) == len(slots) else slots[view.tokens >= 0]
        local[: len(slots)] = slots[: len(local)]
        return local
    kept = np.zeros(len(right), bool)
    kept[view.own] = True
    return np.where(kept, right, -1)


def with_stale_rows(view: View, got: Array) -> Array | None:
    """What is right for tokens, and what was got in rows that belong to none."""
    right = due_slots(view)
    if got.shape != right.shape:
        return None
    return np.where(right < 0, got, right)


SLOT_FAULTS = (
    Fault("stale_slots", with_stale_rows),
    Fault("own_slots_only", own_tokens_only),
    Fault("slots_mapped_twice", mapped_twice),
    Fault("slots_of_sharded_cache", sharded),
    Fault("prefix_lost", lambda view, got: due_slots(without_prefix(view))),
    Fault("slots_of_flat_tokens", lambda view, got: slots_at(view, view.everything)),
    Fault("other_block_size", another_block_size),
    Fault("table_of_another_request", another_request),
)


# --- tables ---


def table_check(name: str, title: str, unit: str) -> Check:
    """The check of the table of raw keys, or of entries, as an operator gets it."""
    source, tensor = f"{name}_block_table", f"{name}_block_table_rows"
    size = "block_size" if name == "swa" else "cmp_block_size"

    def due(view: View) -> Array:
        rows = block_table_rows(view.got(source), view.extents.request_indices)
        width = view.got(tensor).shape[1]
        if width > rows.shape[1]:
            rows = np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1)
        elif free_of(view, rows)[:, width:].all():
            rows = rows[:, :width]
        return rows

    def free_of(view: View, rows: Array) -> Array:
        ratio = view.setting("compress_ratio") if name == "cmp" else 1
        used = -(-(view.extents.seqused_kv // ratio) // view.setting(size))
        return (np.arange(rows.shape[1]) >= used[:, None]) | (row_lengths(view) == 0)[:, None]

    def of_batch(view: View, got: Array) -> Array:
        return view.got(source)

    def of_another(view: View, got: Array) -> Array | None:
        for table in other_tables(view.got(source), view.num_reqs):
            made = block_table_rows(table, view.extents.request_indices)
            if made.shape == got.shape and not ((made != got) & ~free_of(view, made)).any():
                return made
        return None

    needs = (*LAYOUT, source, size, *(("compress_ratio",) if name == "cmp" else ()))
    faults = (Fault("rows_of_batch", of_batch), Fault("table_of_another_request", of_another))
    return Check(
        f"{name}_tables",
        tensor,
        f"each operator row has the {unit} table of its request",
        needs,
        due,
        View.place_of_operator_row,
        faults,
        lambda view: free_of(view, due(view)),
    )


CHECKS = (
    table_check("swa", "raw keys", "block"),
    table_check("cmp", "entries", "entry"),
    Check(
        "slots",
        "slot_mapping",
        "the slot of every token's raw key, on every rank; -1 in rows of no token",
        ("swa_block_table", "block_size"),
        due_slots,
        lambda view, index: view.place_of_token(index[0]),
        SLOT_FAULTS,
        local=False,
    ),
)
