"""The rows that a rank has after the ranks have exchanged theirs: needs the dumps of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsacp_npu.validation.attended import float_finding
from dsacp_npu.validation.core import Cause, Check, Fault, Finding, explained
from dsacp_npu.validation.floats import budget_of, rounded
from dsacp_npu.validation.lengths import LAYOUT
from dsacp_npu.validation.view import Array, Place, Skipped, View
from dsacp_ref.partition import restored_rows
from dsacp_ref.spec import check_array, contract_error

__all__ = ["CHECKS", "collected_finding"]

NEEDS = (*LAYOUT, "output")
TITLE = "the rows of all tokens in order, or the rank's own, put together from what the ranks have"


def shares(view: View, name: str) -> list[Array]:
    """A tensor of every rank."""
    missing = [rank for rank in range(view.cp_size) if name not in view.ranks.get(rank, {})]
    if missing:
        raise Skipped(f"{name} of rank {', '.join(map(str, missing))}")
    width = view.got("output").shape[1]
    found = [view.ranks[rank][name].array.astype(np.float64) for rank in range(view.cp_size)]
    for rank, rows in enumerate(found):
        check_array(name, rows, ("float64",), ("rows", width), f"rank {rank}, as wide as output")
    return found


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
        tokens = view.partition.token_indices
        self.flat = np.concatenate(tokens)
        self.starts = np.cumsum([0, *map(len, tokens)])
        self.summed = "partial_output" in view.tensors
        if self.summed:
            self.parts = shares(view, "partial_output")
            for part in self.parts:
                if len(part) != len(self.flat):
                    hint = "the ranks' rows end to end, each with its pad rows"
                    raise contract_error("partial_output", f"have {len(self.flat)} rows", len(part), hint)
            self.rows = np.sum(self.parts, axis=0)
        else:
            self.parts = gathered(view)
            self.rows = np.concatenate(self.parts)

    def taken(self, rows: Array, like: int, *, whole: bool) -> Array:
        """All tokens in order up to so many rows, or this rank's own."""
        view = self.view
        if whole:
            tokens = restored_rows(rows, view.partition)
            pads = np.zeros((max(like - len(tokens), 0), rows.shape[1]))
            return np.concatenate([tokens, pads])
        return rows[self.starts[view.cp_rank] : self.starts[view.cp_rank + 1]]

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
    if "local_output" not in view.tensors and "partial_output" not in view.tensors:
        raise Skipped("local_output or partial_output")
    got, sources = view.got("output").astype(np.float64), view.once("sources", Sources)
    whole = is_whole(view, got)
    real = np.arange(len(got)) < view.num_tokens if whole else view.tokens >= 0
    due = sources.taken(sources.rows, len(got), whole=whole)
    dtype = view.settings.get("dtype", view.tensors["output"].dtype)
    plains = sources.plains(dtype, len(got), whole=whole)
    if not whole and len(got) == len(view.own) < len(view.tokens):
        due, plains, real = due[real], [plain[real] for plain in plains], real[real]
    if got.shape != due.shape:
        size, causes = int(due.size), shape_causes(view, got)
        shapes = f"shape {list(due.shape)}", f"shape {list(got.shape)}"
        return Finding("collected", "output", view.cp_rank, None, None, (), *shapes, size, size, causes)
    largest = max((float(np.nan_to_num(np.abs(part)).max(initial=0)) for part in sources.parts), default=0.0)
    budget = budget_of(due, plains, dtype, largest if sources.summed else 0.0)
    return float_finding(view, CHECK, got, due, budget, real)


def is_whole(view: View, got: Array) -> bool:
    """Whether an output holds all tokens, or this rank's own; with one rank that is the same."""
    if "rows" in view.settings:
        return bool(view.settings["rows"] == "full")
    padded = view.num_tokens if view.num_input_tokens is None else view.num_input_tokens
    whole, own = len(got) in (view.num_tokens, padded), len(got) in (len(view.tokens), len(view.own))
    if whole and own and view.cp_size > 1:
        raise Skipped("rows")
    return not own


def shape_causes(view: View, got: Array) -> tuple[Cause, ...]:
    """The faults that give an output of another shape."""
    return explained(
        view,
        CHECK,
        got,
        lambda made: made.shape == got.shape and np.allclose(made, got, rtol=1e-2, atol=1e-6),
        lambda made: False,
    )


def place(view: View, index: tuple[int, ...]) -> Place:
    """Of a row of all tokens, or of the rank's own."""
    got = view.got("output")
    if is_whole(view, got):
        return view.place_of_token(index[0])
    return view.place_of_row(index) if len(got) == len(view.tokens) else view.place_of_own(index)


# --- faults ---

Form = Callable[["Sources", Array, bool], "Array | list[Array] | None"]


def made_by(form: Form) -> Callable[[View, Array], Array | list[Array] | None]:
    """A fault from what the ranks have, what was got, and whether that holds all tokens."""

    def made(view: View, got: Array) -> Array | list[Array] | None:
        return form(view.once("sources", Sources), got, is_whole(view, got))

    return made


def cut(values: Array, got: Array) -> Array:
    """As many rows as were got: what an implementation does with a buffer of tokens."""
    missing = max(len(got) - len(values), 0)
    return np.concatenate([values, np.zeros((missing, values.shape[1]))])[: len(got)]


def rank_major(sources: Sources, got: Array, whole: bool) -> Array | None:
    """Rows rank after rank, without pad rows."""
    return cut(sources.rows[sources.flat >= 0], got) if whole else None


def pads_kept(sources: Sources, got: Array, whole: bool) -> Array | None:
    """Rows rank after rank, with pad rows."""
    if not whole or (sources.flat >= 0).all():
        return None
    return sources.rows if len(got) == len(sources.rows) else cut(sources.rows, got)


def without_a_rank(sources: Sources, got: Array, whole: bool) -> list[Array]:
    """The output that lacks one rank's share; and a sum that was never made."""
    forms = []
    for rank in range(sources.view.cp_size if sources.view.cp_size > 1 else 0):
        rows = sources.rows.copy()
        if sources.summed:
            rows -= sources.parts[rank]
        else:
            rows[sources.starts[rank] : sources.starts[rank + 1]] = 0
        forms.append(sources.taken(rows, len(got), whole=whole))
    if sources.summed and forms:
        forms.append(sources.taken(sources.parts[sources.view.cp_rank], len(got), whole=whole))
    return forms


def other_tokens(sources: Sources, got: Array, whole: bool) -> Array | None:
    """Each rank's summand of its own rows, added row by row although they are rows of different tokens."""
    if not sources.summed or whole:
        return None
    total = np.zeros_like(got)
    for rank, part in enumerate(sources.parts):
        total += cut(part[sources.starts[rank] : sources.starts[rank + 1]], got)
    return total


def backwards(sources: Sources, got: Array, whole: bool) -> Array | None:
    """The ranks' rows from the last rank to the first."""
    if sources.summed or len(set(np.diff(sources.starts).tolist())) > 1:
        return None
    return sources.taken(np.concatenate(sources.parts[::-1]), len(got), whole=whole)


CHECK = Check(
    "collected",
    "output",
    TITLE,
    NEEDS,
    lambda view: view.got("output"),
    lambda view, index: place(view, index),
    (
        Fault("pad_rows_kept", made_by(pads_kept)),
        Fault("order_not_restored", made_by(rank_major)),
        Fault("rank_missing", made_by(without_a_rank)),
        Fault("other_tokens_summed", made_by(other_tokens)),
        Fault("ranks_in_other_order", made_by(backwards)),
    ),
    local=False,
)
CHECKS = (CHECK,)
