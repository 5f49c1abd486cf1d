"""The rows that a rank has after the ranks have exchanged theirs: needs the dumps of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsacp_npu.validation.attended import float_finding
from dsacp_npu.validation.core import Array, Cause, Check, Fault, Finding, Place, Skipped, View, explained
from dsacp_npu.validation.floats import budget_of, rounded
from dsacp_npu.validation.lengths import LAYOUT
from dsacp_ref.partition import restored_rows
from dsacp_ref.spec import contract_error

__all__ = ["CHECKS", "collected_finding"]

NEEDS = (*LAYOUT, "output")
TITLE = "the rows of all tokens in order, or the rank's own, put together from what the ranks have"


def shares(view: View, name: str) -> list[Array]:
    """A tensor of every rank."""
    missing = [rank for rank in range(view.cp_size) if name not in view.ranks.get(rank, {})]
    if missing:
        raise Skipped(f"{name} of rank {', '.join(map(str, missing))}")
    return [view.ranks[rank][name].array.astype(np.float64) for rank in range(view.cp_size)]


def gathered(view: View) -> list[Array]:
    """Every rank's finished rows, pad rows zero."""
    found = []
    for rank, rows in enumerate(shares(view, "local_output")):
        tokens = view.partition.token_indices[rank]
        real = tokens >= 0
        if len(rows) not in (len(tokens), int(real.sum())):
            hint = f"rank {rank} has {int(real.sum())} tokens"
            raise contract_error("local_output", f"have {len(tokens)} rows with pad rows", len(rows), hint)
        if len(rows) == len(tokens):
            found.append(rows)
            continue
        whole = np.zeros((len(tokens), rows.shape[1]))
        whole[real] = rows
        found.append(whole)
    return found


class Sources:
    """What an output is put together from: finished rows of each rank, or summands of all rows.

    Args:
        view: View.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.summed = "partial_output" in view.tensors
        if self.summed:
            self.parts = shares(view, "partial_output")
            self.rows = self.total(self.parts)
            total = sum(len(tokens) for tokens in view.partition.token_indices)
            for part in self.parts:
                if len(part) != total:
                    hint = "the ranks' rows end to end, each with its pad rows"
                    raise contract_error("partial_output", f"have {total} rows", len(part), hint)
        else:
            self.parts = gathered(view)
            self.rows = np.concatenate(self.parts)

    def total(self, parts: list[Array]) -> Array:
        """The sum of summands, in float64."""
        return np.sum(parts, axis=0) if parts else np.zeros((0, 0))

    def taken(self, rows: Array, like: int, *, whole: bool) -> Array:
        """All tokens in order up to so many rows, or this rank's own."""
        view = self.view
        if whole:
            tokens = restored_rows(rows, view.partition)
            pads = np.zeros((max(like - len(tokens), 0), rows.shape[1]))
            return np.concatenate([tokens, pads])
        starts = np.cumsum([0, *(len(tokens) for tokens in view.partition.token_indices)])
        return rows[starts[view.cp_rank] : starts[view.cp_rank + 1]]

    def plains(self, dtype: str, like: int, *, whole: bool) -> list[Array]:
        """The sum in the dtype, in the order of the ranks and against it."""
        if not self.summed:
            return [rounded(self.taken(self.rows, like, whole=whole), dtype)]
        found = []
        for parts in (self.parts, self.parts[::-1]):
            total = np.zeros_like(self.rows)
            for part in parts:
                total = rounded(total + part, dtype)
            found.append(self.taken(total, like, whole=whole))
        return found


def collected_finding(view: View) -> Finding | None:
    """Where a rank's output first parts from what the ranks brought."""
    got, sources = view.got("output").astype(np.float64), Sources(view)
    if "local_output" not in view.tensors and "partial_output" not in view.tensors:
        raise Skipped("local_output or partial_output")
    own, whole = len(view.tokens), is_whole(view, got)
    due = sources.taken(sources.rows, len(got), whole=whole)
    if not whole and len(got) != own and len(got) == len(view.own):
        due = due[view.tokens >= 0]
    check = Check(
        "collected",
        "output",
        TITLE,
        NEEDS,
        lambda other: other.got("output"),
        place_of(whole),
        faults(sources),
        local=False,
    )
    if got.shape != due.shape:
        size = int(due.size)
        causes = shape_causes(view, check, got)
        shapes = f"shape {list(due.shape)}", f"shape {list(got.shape)}"
        return Finding("collected", "output", view.cp_rank, None, None, (), *shapes, size, size, causes)
    real = np.arange(len(got)) < view.num_tokens if whole else (view.tokens >= 0)[: len(got)]
    if len(got) == len(view.own) and not whole:
        real = np.ones(len(got), bool)
    dtype = view.settings.get("dtype", view.tensors["output"].dtype)
    plains = [plain[: len(due)] for plain in sources.plains(dtype, len(got), whole=whole)]
    plains = [plain if plain.shape == due.shape else due for plain in plains]
    largest = max((float(np.nan_to_num(np.abs(part)).max(initial=0)) for part in sources.parts), default=0.0)
    budget = budget_of(due, plains, dtype, largest if sources.summed else 0.0)
    return float_finding(view, check, got, due, budget, real)


def is_whole(view: View, got: Array) -> bool:
    """Whether an output holds all tokens, or this rank's own; with one rank that is the same."""
    if "rows" in view.settings:
        return bool(view.settings["rows"] == "full")
    padded = view.num_tokens if view.num_input_tokens is None else view.num_input_tokens
    whole, own = len(got) in (view.num_tokens, padded), len(got) in (len(view.tokens), len(view.own))
    if whole and own and view.cp_size > 1:
        raise Skipped("rows")
    return not own


def shape_causes(view: View, check: Check, got: Array) -> tuple[Cause, ...]:
    """The faults that give an output of another shape."""
    return explained(
        view,
        check,
        got,
        lambda made: made.shape == got.shape and np.allclose(made, got, rtol=1e-2, atol=1e-6),
        lambda made: False,
    )


def place_of(whole: bool) -> Callable[[View, tuple[int, ...]], Place]:
    """Of a row of all tokens, or of the rank's own."""

    def place(view: View, index: tuple[int, ...]) -> Place:
        return view.place_of_token(index[0]) if whole else view.place_of_row(index)

    return place


def faults(sources: Sources) -> tuple[Fault, ...]:
    """The known faults of putting rows together."""
    view, rows = sources.view, sources.rows
    partition = view.partition
    counts = [len(tokens) for tokens in partition.token_indices]
    flat = np.concatenate([*partition.token_indices, np.zeros(0, np.int32)])

    def cut(values: Array, got: Array) -> Array:
        """As many rows as were got: what an implementation does with a buffer of tokens."""
        if len(values) < len(got):
            values = np.concatenate([values, np.zeros((len(got) - len(values), values.shape[1]))])
        return values[: len(got)]

    def whole(got: Array) -> bool:
        return is_whole(view, got)

    def rank_major(view: View, got: Array) -> Array | None:
        return cut(rows[flat >= 0], got) if whole(got) else None

    def pads_kept(view: View, got: Array) -> Array | None:
        if not whole(got) or (flat >= 0).all():
            return None
        return rows if len(got) == len(rows) else cut(rows, got)

    def without(rank: int) -> Array:
        if sources.summed:
            return sources.total([part for i, part in enumerate(sources.parts) if i != rank])
        kept = rows.copy()
        start = sum(counts[:rank])
        kept[start : start + counts[rank]] = 0
        return kept

    def missing(view: View, got: Array) -> Array | None:
        for rank in range(view.cp_size):
            made = sources.taken(without(rank), len(got), whole=whole(got))
            if made.shape == got.shape and view.cp_size > 1 and np.allclose(made, got, rtol=1e-3, atol=1e-6):
                return made
        return None

    def alone(view: View, got: Array) -> Array | None:
        """A sum that was never made: this rank's summand alone."""
        if not sources.summed or view.cp_size < 2:
            return None
        return sources.taken(sources.parts[view.cp_rank], len(got), whole=whole(got))

    def other_tokens(view: View, got: Array) -> Array | None:
        """Each rank's summand of its own rows, added row by row although they are rows of different tokens."""
        if not sources.summed or whole(got):
            return None
        starts = np.cumsum([0, *counts])
        total = np.zeros_like(got)
        for rank, part in enumerate(sources.parts):
            own = part[starts[rank] : starts[rank + 1]]
            if len(own) < len(total):
                own = np.concatenate([own, np.zeros((len(total) - len(own), own.shape[1]))])
            total += own[: len(total)]
        return total

    def backwards(view: View, got: Array) -> Array | None:
        if sources.summed or len(set(counts)) > 1:
            return None
        return sources.taken(np.concatenate(sources.parts[::-1]), len(got), whole=whole(got))

    return (
        Fault("pad_rows_kept", pads_kept),
        Fault("order_not_restored", rank_major),
        Fault("rank_missing", missing),
        Fault("rank_missing", alone),
        Fault("other_tokens_summed", other_tokens),
        Fault("ranks_in_other_order", backwards),
    )


CHECKS = (Check("collected", "output", TITLE, NEEDS, lambda view: view.got("output"), View.place_of_row),)
