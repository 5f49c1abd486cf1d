"""Attention output and lse of a rank's queries, given the selection that the dump has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsacp_npu.validation.core import Check, Fault, Finding, explained, finding_at
from dsacp_npu.validation.definition import Definition, Lists, definition_of
from dsacp_npu.validation.floats import Budget, apart, budget_of
from dsacp_npu.validation.lengths import LAYOUT, positions_of_global_extents
from dsacp_npu.validation.selection import seen_globally
from dsacp_npu.validation.view import Array, Skipped, View
from dsacp_ref.partition import Int32
from dsacp_ref.rope import apply_inverse_rope
from dsacp_ref.visibility import visible_entries

__all__ = ["CHECKS", "LSE_FAULTS", "attention_findings", "float_finding"]

NEEDS = (*LAYOUT, "compress_ratio", "window_size", "softmax_scale", "q", "swa_cache", "swa_block_table", "attn_sink")


def attention_findings(view: View) -> list[Finding]:
    """Where `out`, and `lse` if it is there, first parts from the definition."""
    definition = definition_of(view)
    dtype = view.settings.get("dtype", view.tensors["out"].dtype)
    plains = definition.plain(dtype)
    found = [part_finding(view, name, definition, plains, dtype) for name in ("out", "lse") if name in view.tensors]
    return [finding for finding in found if finding is not None]


def part_finding(
    view: View, name: str, definition: Definition, plains: list[tuple[Array, Array]], dtype: str
) -> Finding | None:
    """Where one of the two first parts from the definition."""
    due = definition.lse if name == "lse" else definition.out
    got, check = view.own_rows(name).astype(np.float64), LSE if name == "lse" else OUT
    if got.shape != due.shape:
        size = int(due.size)
        shapes = f"shape {list(due.shape)}", f"shape {list(got.shape)}"
        return Finding(check.name, name, view.cp_rank, None, None, (), *shapes, size, size, ())
    part = name == "lse"
    budget = budget_of(due, [parts[part] for parts in plains], dtype, definition.largest[part])
    return float_finding(view, check, got, due, budget)


def float_finding(
    view: View, check: Check, got: Array, due: Array, budget: Budget, rows: Array | None = None
) -> Finding | None:
    """Where floats first differ by more than the budget, with causes. ``rows`` says which of them count."""

    def differing(made: Array, other: Array) -> Array:
        wrong = apart(made, other, budget)
        return wrong if rows is None else wrong & rows.reshape(-1, *(1,) * (wrong.ndim - 1))

    wrong = differing(got, due)
    if not wrong.any():
        return None
    causes = explained(
        view,
        check,
        got,
        lambda made: made.shape == got.shape and not differing(got, made).any(),
        lambda made: made.shape == due.shape and not differing(made, due).any(),
    )
    return finding_at(view, check, wrong, due, got, causes, int(due.size))


# --- faults: what other lists, scales and sinks give ---

Made = Callable[[Definition], tuple[Array, Array]]


def with_lists(window: Callable[[Definition], Int32] | None, entries: Callable[[Definition], Int32] | None) -> Made:
    """Attention over other lists."""

    def made(definition: Definition) -> tuple[Array, Array]:
        lists = definition.lists
        return definition.attention(
            Lists(
                lists.window if window is None else window(definition),
                lists.entries if entries is None else entries(definition),
            )
        )

    return made


def with_sink(change: Callable[[Definition], Array]) -> Made:
    """Attention with other sinks."""
    return lambda definition: definition.attention(definition.lists, sink=change(definition))


def window_of(extra: int) -> Callable[[Definition], Int32]:
    """A window so much longer."""

    def made(definition: Definition) -> Int32:
        size = definition.view.setting("window_size") + extra
        return definition.window(size=size) if size > 0 else np.zeros((len(definition.q), 0), np.int32)

    return made


def globally_masked(definition: Definition) -> tuple[Array, Array]:
    """Attention of queries that are aligned to the end of the whole request."""
    where = np.maximum(positions_of_global_extents(definition.view), -1).astype(np.int32)
    entries = definition.lists.entries
    if "topk_indices" not in definition.view.tensors and definition.ratio > 1:
        entries = definition.all_entries(seen_globally(definition.view).astype(np.int32))
    return definition.attention(Lists(definition.window(where), entries))


def one_entry_more(definition: Definition) -> Int32:
    """All entries up to the query's own unfinished one, of those that exist."""
    if definition.ratio == 1 or "topk_indices" in definition.view.tensors:
        raise Skipped("entries")
    seen = np.where(definition.positions >= 0, definition.positions // definition.ratio + 1, 0)
    total = (definition.view.seq_lens // definition.ratio)[definition.requests]
    return definition.all_entries(np.minimum(seen, total).astype(np.int32))


def future_entries(definition: Definition) -> Int32:
    """All entries of the request."""
    if definition.ratio == 1:
        raise Skipped("entries")
    return definition.all_entries((definition.view.seq_lens // definition.ratio)[definition.requests])


def selection_ignored(definition: Definition) -> Int32:
    """All visible entries."""
    if definition.ratio == 1:
        raise Skipped("entries")
    return definition.all_entries(visible_entries(definition.positions, definition.ratio))


def entry_for_none(last: bool) -> Callable[[Definition], Int32]:
    """Lanes of -1 that read entry 0, or the last one."""

    def made(definition: Definition) -> Int32:
        lanes = definition.lists.entries
        total = (definition.view.seq_lens // max(definition.ratio, 1))[definition.requests]
        other = np.maximum(total - 1, 0)[:, None] if last else np.zeros((len(lanes), 1), np.int32)
        return np.where((lanes < 0) & (total > 0)[:, None], other, lanes).astype(np.int32)

    return made


def past_length(definition: Definition) -> Int32:
    """All lanes, whatever topk_length says."""
    definition.view.got("topk_length")
    return definition.view.own_rows("topk_indices")


def no_window(definition: Definition) -> Int32:
    """No raw key at all."""
    return np.zeros((len(definition.q), 0), np.int32)


def no_entries(definition: Definition) -> Int32:
    """No entry at all."""
    return np.zeros((len(definition.q), 0), np.int32)


MADE: tuple[tuple[str, Made], ...] = (
    ("window_one_short", with_lists(window_of(-1), None)),
    ("window_one_long", with_lists(window_of(1), None)),
    ("global_mask", globally_masked),
    ("scale_missing", lambda definition: definition.attention(definition.lists, scale=1.0)),
    ("own_unfinished_entry", with_lists(None, one_entry_more)),
    ("future_entries", with_lists(None, future_entries)),
    ("selection_ignored", with_lists(None, selection_ignored)),
    ("lanes_past_length_used", with_lists(None, past_length)),
    ("no_entry_lanes_used", with_lists(None, entry_for_none(False))),
    ("no_entry_lanes_used", with_lists(None, entry_for_none(True))),
    ("entries_missing", with_lists(None, no_entries)),
    ("window_missing", with_lists(no_window, None)),
)


# --- faults of one of the two ---


def out_of(made: Made) -> Callable[[View, Array], Array]:
    """The output of a fault."""
    return lambda view, got: made(definition_of(view))[0]


def lse_of(made: Made) -> Callable[[View, Array], Array]:
    """The lse of a fault."""
    return lambda view, got: made(definition_of(view))[1]


def turned_back(view: View, got: Array) -> Array:
    """The output after the inverse RoPE."""
    cos, sin = (view.own_rows(name).astype(np.float64) for name in ("cos", "sin"))
    if cos.shape[1] == view.setting("rope_head_dim"):  # columns that lie twice side by side
        cos, sin = cos[:, ::2], sin[:, ::2]
    return apply_inverse_rope(definition_of(view).out, cos, sin)


def of_neighbours(view: View, got: Array) -> list[Array]:
    """Rows moved by one, either way; what stands at the border is anything."""
    due, forms = definition_of(view).out, []
    for shift in (1, -1):
        inner = slice(1, None) if shift > 0 else slice(None, -1)
        form = got.copy()
        form[inner] = np.roll(due, shift, axis=0)[inner]
        forms.append(form)
    return forms if len(due) > 2 else []


def with_nan(part: str) -> Callable[[View, Array], Array | None]:
    """What is right, but NaN where that was got."""

    def made(view: View, got: Array) -> Array | None:
        due = getattr(definition_of(view), part)
        return np.where(np.isnan(got), got, due) if np.isnan(got).any() else None

    return made


def keyless(part: str) -> Callable[[View, Array], Array | None]:
    """What is right, but anything in rows that see nothing."""

    def made(view: View, got: Array) -> Array | None:
        definition = definition_of(view)
        none = definition.lse == -np.inf
        due = getattr(definition, part)
        return np.where(none.reshape(*none.shape, *(1,) * (due.ndim - 2)), got, due) if none.any() else None

    return made


def ranks_of_sink(definition: Definition) -> Array:
    """Sinks of partial results that were merged with theirs: as many of each as there are ranks."""
    return definition.sink + np.log(definition.view.cp_size)


OUT_FAULTS = (
    Fault("sink_missing", out_of(with_sink(lambda found: np.full_like(found.sink, -np.inf)))),
    Fault("sink_once_a_rank", out_of(with_sink(ranks_of_sink))),
    Fault("sink_scaled", out_of(with_sink(lambda found: found.sink * found.scale))),
    Fault("nan_rows", with_nan("out")),
    Fault("rows_without_keys", keyless("out")),
    Fault("turned_back_already", turned_back),
    Fault("rows_of_neighbours", of_neighbours),
    *(Fault(kind, out_of(made)) for kind, made in MADE),
)
LSE_FAULTS = (
    Fault("lse_base_two", lambda view, got: definition_of(view).lse / np.log(2)),
    Fault("lse_with_sink", lambda view, got: np.logaddexp(definition_of(view).lse, definition_of(view).sink)),
    Fault("nan_rows", with_nan("lse")),
    Fault("rows_without_keys", keyless("lse")),
    *(Fault(kind, lse_of(made)) for kind, made in MADE),
)
OUT = Check(
    "attention",
    "out",
    "attention over window and entries, given the selection of the dump; and its lse, if it is there",
    NEEDS,
    lambda view: definition_of(view).out,
    View.place_of_own,
    OUT_FAULTS,
)
LSE = OUT._replace(tensor="lse", expected=lambda view: definition_of(view).lse, faults=LSE_FAULTS)
CHECKS = (OUT,)
