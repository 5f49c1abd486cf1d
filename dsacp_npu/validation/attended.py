"""Attention output and lse of a rank's queries, given the selection that the dump has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dsacp_npu.validation.core import Array, Check, Fault, Finding, Skipped, View, explained, finding_at
from dsacp_npu.validation.floats import Budget, apart, budget_of, rounded
from dsacp_npu.validation.lengths import LAYOUT, of_rows
from dsacp_npu.validation.selection import chosen, seen_globally
from dsacp_ref.attention import apply_sink, gathered_attention, window_indices
from dsacp_ref.paging import slot_mapping
from dsacp_ref.partition import Int32
from dsacp_ref.rope import apply_inverse_rope
from dsacp_ref.spec import contract_error
from dsacp_ref.visibility import visible_entries

__all__ = ["CHECKS", "Definition", "attention_findings"]

NEEDS = (*LAYOUT, "compress_ratio", "window_size", "softmax_scale", "q", "swa_cache", "swa_block_table", "attn_sink")
INDEXED_RATIO = 4  # layers of this ratio choose among their entries
QUERIES = 64  # computed at a time


class Lists(NamedTuple):
    """The keys of every query.

    Fields:
        window: int32[queries, width], raw positions; -1 for none.
        entries: int32[queries, width], entries; -1 for none.
    """

    window: Int32
    entries: Int32


class Keys(NamedTuple):
    """The rows that lists lead to: only those that are used.

    Fields:
        rows: float64[rows, head_dim].
        lists: int32[queries, width], rows; -1 for none.
    """

    rows: Array
    lists: Int32


class Definition:
    """Attention of a rank's own queries in float64, and in the plain low precision that measures the budget.

    Args:
        view: View.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.q, self.sink = view.own_rows("q").astype(np.float64), view.got("attn_sink").astype(np.float64)
        if len(self.q) != len(view.own):
            rule = f"have {len(view.own)} rows, or {len(view.tokens)} with pad rows"
            raise contract_error("q", rule, len(self.q), "one a query of this rank")
        self.requests, self.positions = view.requests_of(view.own), view.positions_of(view.own)
        self.scale = view.setting("softmax_scale")
        self.ratio = view.setting("compress_ratio")
        self.lists = Lists(self.window(), self.entries())
        self.out, self.lse = self.attention(self.lists)
        self.largest = [0.0, 0.0]  # number that out, and lse, are sums of; known after `plain`

    def window(self, positions: Int32 | None = None, size: int | None = None) -> Int32:
        """The raw positions of the window of each query."""
        positions = self.positions if positions is None else positions
        return window_indices(positions, self.view.setting("window_size") if size is None else size)

    def entries(self, positions: Int32 | None = None) -> Int32:
        """The entries of each query: chosen ones, or all that it sees."""
        if self.ratio == 1:
            return np.zeros((len(self.q), 0), np.int32)
        if "topk_indices" in self.view.tensors and self.view.got("topk_indices").shape[1]:
            lanes = chosen(self.view)
            # A choice that cannot be is a finding of its own; here only entries that exist are looked at.
            lens = (self.view.seq_lens // self.ratio)[self.requests] if len(lanes) else np.zeros(0, np.int32)
            return np.where(lanes < lens[:, None], lanes, np.int32(-1))
        if self.ratio == INDEXED_RATIO:
            raise Skipped("topk_indices")
        return self.all_entries(visible_entries(self.positions if positions is None else positions, self.ratio))

    def all_entries(self, num_visible: Int32) -> Int32:
        """The first so many entries of each query."""
        entries = np.arange(int(num_visible.max(initial=0)), dtype=np.int32)
        return np.where(entries < num_visible[:, None], entries, np.int32(-1))

    def keys(self, lists: Lists, first: int, last: int) -> Keys:
        """The rows that some queries' lists lead to."""
        parts, slots = [], []
        offset = 0
        for name, logical in (("swa", lists.window), ("cmp", lists.entries)):
            block = logical[first:last]
            if block.shape[1] == 0:
                continue
            cache = self.view.got(f"{name}_cache")
            table = self.view.got(f"{name}_block_table")
            where = slot_mapping(block, self.requests[first:last], table, cache.shape[1])
            flat = cache.reshape(-1, cache.shape[-1])
            if where.size and where.max() >= len(flat):
                hint = "the table leads outside of the cache"
                raise contract_error(
                    f"{name}_block_table", f"name blocks below {cache.shape[0]}", int(where.max()), hint
                )
            used, inverse = np.unique(where, return_inverse=True)
            inverse = inverse.reshape(where.shape).astype(np.int32)
            missing = len(used) > 0 and used[0] < 0
            parts.append(flat[used[1:] if missing else used].astype(np.float64))
            local = inverse - np.int32(missing)
            slots.append(np.where(where >= 0, local + np.int32(offset), np.int32(-1)).astype(np.int32))
            offset += len(parts[-1])
        if not parts:
            return Keys(np.zeros((1, self.q.shape[2])), np.full((last - first, 1), -1, np.int32))
        return Keys(np.concatenate(parts), np.concatenate(slots, axis=1))

    def attention(self, lists: Lists, *, sink: Array | None = None, scale: float | None = None) -> tuple[Array, Array]:
        """(out, lse) over these lists, sink joined."""
        out, lse = np.zeros_like(self.q), np.full(self.q.shape[:2], -np.inf)
        for first in range(0, len(self.q), QUERIES):
            last = min(first + QUERIES, len(self.q))
            rows, picked = self.keys(lists, first, last)
            found = gathered_attention(
                self.q[first:last], rows, picked, softmax_scale=self.scale if scale is None else scale
            )
            out[first:last] = apply_sink(found.out, found.lse, self.sink if sink is None else sink)
            lse[first:last] = found.lse
        return out, lse

    def plain(self, dtype: str) -> list[tuple[Array, Array]]:
        """The textbook computation in a dtype, keys in two orders."""
        return [self.in_dtype(dtype, backwards=backwards) for backwards in (False, True)]

    def in_dtype(self, dtype: str, *, backwards: bool) -> tuple[Array, Array]:
        """One textbook computation: every product, exponential and quotient rounded to the dtype."""
        kind = "float32" if dtype in ("bfloat16", "float16") else dtype
        self.largest = [0.0, 0.0]
        out, lse = np.zeros_like(self.q), np.full(self.q.shape[:2], -np.inf)
        sink = self.sink.astype(kind)[:, None]
        for query in range(len(self.q)):
            rows, picked = self.keys(self.lists, query, query + 1)
            own = picked[0][picked[0] >= 0]
            if len(own) == 0:
                continue
            values = rows[own[::-1] if backwards else own].astype(kind)
            logits = rounded((self.q[query].astype(kind) @ values.T) * np.asarray(self.scale, kind), dtype).astype(kind)
            for i, numbers in enumerate((values, logits)):
                self.largest[i] = max(self.largest[i], float(np.nan_to_num(np.abs(numbers)).max()))
            largest = logits.max(axis=1, keepdims=True)
            highest = np.maximum(largest, sink)
            weights = rounded(np.exp(logits - highest), dtype).astype(kind)
            total = weights.sum(axis=1, keepdims=True) + np.exp(sink - highest)
            out[query] = rounded((weights @ values) / total, dtype)
            sums = np.exp(logits - largest).sum(axis=1, keepdims=True)
            lse[query] = rounded(largest + np.log(sums), dtype)[:, 0]
        return out, lse


def attention_findings(view: View) -> list[Finding]:
    """Where `out`, and `lse` if it is there, first parts from the definition."""
    definition = Definition(view)
    dtype = view.settings.get("dtype", view.tensors["out"].dtype)
    plains = definition.plain(dtype)
    found = [part_finding(view, name, definition, plains, dtype) for name in ("out", "lse") if name in view.tensors]
    return [finding for finding in found if finding is not None]


def part_finding(
    view: View, name: str, definition: Definition, plains: list[tuple[Array, Array]], dtype: str
) -> Finding | None:
    """Where one of the two first parts from the definition."""
    due = definition.lse if name == "lse" else definition.out
    got, check = view.own_rows(name).astype(np.float64), check_of(name, definition)
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


def check_of(name: str, definition: Definition) -> Check:
    """The check of one of the two outputs."""
    part = int(name == "lse")
    faults = tuple(Fault(kind, made_part(made, part, definition)) for kind, made in MADE)
    special = (lse_faults if part else out_faults)(definition)
    title = "natural log-sum-exp over keys, without the sink" if part else "attention over window and entries"
    return Check(
        "attention",
        name,
        title,
        NEEDS,
        lambda view: due_part(view, part),
        View.place_of_own,
        (*special, *faults),
    )


def due_part(view: View, part: int) -> Array:
    """The right output from another layout's point of view."""
    return (lambda found: (found.out, found.lse))(Definition(view))[part]


Made = Callable[[Definition], tuple[Array, Array]]


def made_part(made: Made, part: int, definition: Definition) -> Callable[[View, Array], Array]:
    """One of the two outputs of a fault."""
    return lambda view, got: made(definition)[part]


# --- faults: what other lists, scales and sinks give ---


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


def global_positions(definition: Definition) -> Int32:
    """Where local queries stand for an operator that got the whole request's length."""
    view = definition.view
    loc = view.extents.cu_seqlens_q
    rows = np.repeat(np.arange(len(loc) - 1), np.diff(loc))
    return (of_rows(view.seq_lens, view)[rows] - (loc[rows + 1] - np.arange(len(rows)))).astype(np.int32)


def globally_masked(definition: Definition) -> tuple[Array, Array]:
    """Attention of queries that are aligned to the end of the whole request."""
    where = np.maximum(global_positions(definition), -1).astype(np.int32)
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


def out_faults(definition: Definition) -> tuple[Fault, ...]:
    """The faults of the output alone."""
    view, due = definition.view, definition.out

    def sink(change: Callable[[Definition], Array]) -> Callable[[View, Array], Array]:
        return lambda view, got: with_sink(change)(definition)[0]

    def turned_back(view: View, got: Array) -> Array | None:
        cos, sin = (view.own_rows(name).astype(np.float64) for name in ("cos", "sin"))
        pairs = view.setting("rope_head_dim") // 2
        if cos.shape[1] == 2 * pairs:
            cos, sin = cos[:, ::2], sin[:, ::2]
        return apply_inverse_rope(due, cos, sin)

    def with_nan(view: View, got: Array) -> Array | None:
        return np.where(np.isnan(got), got, due) if np.isnan(got).any() else None

    def keyless(view: View, got: Array) -> Array | None:
        none = (definition.lse == -np.inf)[..., None]
        return np.where(none, got, due) if none.any() else None

    def neighbours(view: View, got: Array) -> Array | None:
        for shift in (1, -1):
            moved = np.roll(due, shift, axis=0)
            inner = slice(1, None) if shift > 0 else slice(None, -1)
            made = got.copy()
            made[inner] = moved[inner]
            if len(due) > 2 and np.allclose(made, got, rtol=1e-2, atol=1e-2 * float(np.abs(due).max(initial=0))):
                return made
        return None

    ranks = float(np.log(view.cp_size))
    return (
        Fault("sink_missing", sink(lambda found: np.full_like(found.sink, -np.inf))),
        Fault("sink_once_a_rank", sink(lambda found: found.sink + ranks)),
        Fault("sink_scaled", sink(lambda found: found.sink * found.scale)),
        Fault("nan_rows", with_nan),
        Fault("rows_without_keys", keyless),
        Fault("turned_back_already", turned_back),
        Fault("rows_of_neighbours", neighbours),
    )


def lse_faults(definition: Definition) -> tuple[Fault, ...]:
    """The faults of the lse alone."""
    lse = definition.lse

    def with_nan(view: View, got: Array) -> Array | None:
        return np.where(np.isnan(got), got, lse) if np.isnan(got).any() else None

    def keyless(view: View, got: Array) -> Array | None:
        none = lse == -np.inf
        return np.where(none, got, lse) if none.any() else None

    return (
        Fault("lse_base_two", lambda view, got: lse / np.log(2)),
        Fault("lse_with_sink", lambda view, got: np.logaddexp(lse, definition.sink)),
        Fault("nan_rows", with_nan),
        Fault("rows_without_keys", keyless),
    )


def nothing(*_: Any) -> Array:
    """For the table of checks: `attention_findings` makes the comparison."""
    raise Skipped("q")


CHECKS = (
    Check(
        "attention",
        "out",
        "attention over window and entries, given the selection of the dump; and its lse, if it is there",
        NEEDS,
        nothing,
        View.place_of_own,
    ),
)
