"""What the indexer chose, as sets: swaps are accepted where scores are closer than the scoring precision can tell."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsacp_npu.validation.core import Check, Fault, Finding, explained, finding_at
from dsacp_npu.validation.lengths import LAYOUT, positions_of_global_extents, without_prefix
from dsacp_npu.validation.scores import Scores, cache_block_size, chosen, differing_rows, scores_of, visible
from dsacp_npu.validation.view import Array, Skipped, View
from dsacp_ref.indexer import hadamard
from dsacp_ref.paging import slot_mapping
from dsacp_ref.partition import Int32

__all__ = ["CHECKS", "seen_globally", "selection_finding"]

NEEDS = (*LAYOUT, "compress_ratio")
TITLE = "each query chose the best of the entries that it sees"


def selection_finding(view: View) -> tuple[Finding | None, str]:
    """The first query whose choice is not its best entries, with causes; or a note on swaps and places of -1."""
    got, num_visible = chosen(view), visible(view)
    width = width_of(view)
    scores = scores_of(view)
    if scores is not None:
        due = scores.choice(num_visible, width)
        wrong = differing_rows(got, due, scores)
    else:
        due, wrong = likely(got, num_visible, width)
    if not wrong.any():
        note = "" if scores is None else swaps(view, got, due)
        return None, note or misplaced(view, got)
    causes = explained(
        view,
        CHECK,
        got,
        lambda made: made.ndim == 2 and not differing_rows(got, made, scores).any(),
        lambda made: scores is not None and not differing_rows(made, due, scores).any(),
    )
    row = int(np.flatnonzero(wrong)[0])
    found = finding_at(view, CHECK, wrong, due, got, causes, len(wrong), (row,))
    expected = told_set(due[row]) if scores is not None else legal(num_visible[row], width)
    return Finding(**{**found.__dict__, "expected": expected, "got": got[row].tolist()}), ""


def due_of(view: View) -> Array:
    """The right choice from another rank's, or another layout's, point of view."""
    found = scores_of(view)
    if found is None:
        raise Skipped("index_q")
    return found.choice(visible(view), width_of(view))


def width_of(view: View) -> int:
    """How many entries are chosen."""
    return int(view.settings.get("index_topk", view.got("topk_indices").shape[1]))


def told_set(row: Int32) -> list[int]:
    """The entries of a choice, best first."""
    return [int(entry) for entry in row if entry >= 0]


def legal(num_visible: int, width: int) -> str:
    """What a choice must be, where scores are not known."""
    return f"{min(int(num_visible), int(width))} distinct entries below {int(num_visible)}"


def likely(got: Int32, num_visible: Int32, width: int) -> tuple[Int32, Array]:
    """Where scores are not known: the same, but for rows that no scores could give."""
    ordered = np.sort(got, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    outside = ((got < -1) | (got >= num_visible[:, None])).any(axis=1)
    count = (got >= 0).sum(axis=1) != np.minimum(num_visible, width)
    return got, twice | outside | count


def swaps(view: View, got: Int32, due: Int32) -> str:
    """A note on rows that chose other entries of the same score."""
    rows = differing_rows(got, due, None).sum()
    if not rows:
        return ""
    return f"topk_indices, rank {view.cp_rank}: {rows} queries chose other entries whose scores are as good"


def misplaced(view: View, got: Int32) -> str:
    """A note on lanes of -1 before an entry, which operators do not take."""
    behind = (got[:, 1:] >= 0) & (got[:, :-1] < 0)
    if not behind.any():
        return ""
    return f"topk_indices, rank {view.cp_rank}: -1 stands before entries; CANN's operators want it behind them"


# --- faults ---

Bound = Callable[[View], Array]


def seeing(bound: Bound) -> Callable[[View, Array], Array | None]:
    """The choice among so many entries; without scores, what was got if it could be one."""

    def made(view: View, got: Array) -> Array | None:
        seen, scores = np.maximum(bound(view), 0).astype(np.int32), scores_of(view)
        if scores is not None:
            return scores.choice(seen, width_of(view))
        _, wrong = likely(got, np.minimum(seen, totals(view)), width_of(view))
        return None if wrong.any() else got

    return made


def scored(change: Callable[[Scores], Array]) -> Callable[[View, Array], Array | None]:
    """The choice by other scores."""

    def made(view: View, got: Array) -> Array | None:
        scores = scores_of(view)
        return None if scores is None else scores.choice(visible(view), width_of(view), change(scores))

    return made


def renamed(change: Callable[[View, Int32], Array]) -> Callable[[View, Array], Array | None]:
    """The right choice with every entry as another number."""

    def made(view: View, got: Array) -> Array | None:
        due = due_of(view)
        return np.where(due >= 0, change(view, due), -1)

    return made


def cleared(view: View, got: Array) -> Array | None:
    """What was got, if it is right in the lanes that count."""
    seen, scores = visible(view), scores_of(view)
    read = np.where(np.arange(got.shape[1]) < np.minimum(seen, width_of(view))[:, None], got, -1)
    if scores is None:
        return None if likely(read, seen, width_of(view))[1].any() else got
    return None if differing_rows(read, due_of(view), scores).any() else got


def collapsed(view: View, got: Array) -> Array | None:
    """What was got, if it is one entry over and over although there are others."""
    entries = got[got >= 0]
    return got if len(entries) > 1 and (entries == entries[0]).all() and (visible(view) > 1).any() else None


def doubled(view: View, got: Array) -> Array | None:
    """What was got, if rows have an entry twice, and every entry could be one of theirs."""
    ordered = np.sort(got, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    inside = (got >= -1) & (got < visible(view)[:, None])
    return got if twice.any() and inside.all() and collapsed(view, got) is None else None


def garbage(view: View, got: Array) -> Array | None:
    """What was got, if it names entries that no request has, and not because they are counted in another way."""
    if not ((got < -1) | (got >= totals(view)[:, None])).any() or cleared(view, got) is not None:
        return None
    for change in (packed, through_table, as_tokens):
        if scores_of(view) is not None and not differing_rows(got, renamed(change)(view, got), None).any():
            return None
    return got


def fewer(view: View, got: Array) -> Array | None:
    """What was got, if rows have room for more of the entries that they see."""
    seen = visible(view)
    count, due = (got >= 0).sum(axis=1), np.minimum(seen, width_of(view))
    inside = ((got >= -1) & (got < seen[:, None])).all()
    return got if inside and (count <= due).all() and (count < due).any() else None


def of_last(view: View, got: Array) -> Array | None:
    """Each request's last choice on this rank, for all of its queries."""
    requests, due = view.requests_of(view.own), due_of(view)
    return due[[np.flatnonzero(requests == request)[-1] for request in requests]]


def totals(view: View) -> Array:
    """All entries of each own query's request, future ones included."""
    requests = view.requests_of(view.own)
    return (view.seq_lens // view.setting("compress_ratio"))[requests] if len(requests) else requests


def seen_globally(view: View) -> Array:
    """What local queries see when they are aligned to the end of the whole request."""
    return (np.maximum(positions_of_global_extents(view), -1) + 1) // view.setting("compress_ratio")


def packed(view: View, due: Int32) -> Array:
    """Entries counted through all requests."""
    before = np.concatenate([[0], np.cumsum(view.seq_lens // view.setting("compress_ratio"))])
    return due + before[view.requests_of(view.own)][:, None]


def through_table(view: View, due: Int32) -> Array:
    """Slots of the entries."""
    return slot_mapping(due, view.requests_of(view.own), view.got("cmp_block_table"), cache_block_size(view))


def as_tokens(view: View, due: Int32) -> Array:
    """First tokens of the entries."""
    return due * view.setting("compress_ratio")


FAULTS = (
    Fault(
        "own_unfinished_entry",
        seeing(lambda view: view.positions_of(view.own) // view.setting("compress_ratio") + 1),
    ),
    Fault("future_entries", seeing(totals)),
    Fault("global_mask", seeing(seen_globally)),
    Fault("prefix_lost", seeing(lambda view: visible(without_prefix(view)))),
    Fault("collapsed", collapsed),
    Fault("packed_entries", renamed(packed)),
    Fault("physical_slots", renamed(through_table)),
    Fault("entries_as_tokens", renamed(as_tokens)),
    Fault("lanes_not_cleared", cleared),
    Fault("entry_twice", doubled),
    Fault("garbage_entries", garbage),
    Fault("choices_of_one_query", of_last),
    Fault("relu_missing", scored(lambda scores: scores.of(scores.index_q, scores.weights, relu=False))),
    Fault("query_not_rotated", scored(lambda scores: scores.of(hadamard(scores.index_q), scores.weights))),
    Fault("weights_unsigned", scored(lambda scores: scores.of(scores.index_q, np.abs(scores.weights)))),
    Fault("worst_chosen", scored(lambda scores: -scores.exact)),
    Fault("too_few_entries", fewer),
)
CHECK = Check("selection", "topk_indices", TITLE, NEEDS, due_of, View.place_of_own, FAULTS)
CHECKS = (CHECK,)
