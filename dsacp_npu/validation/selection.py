"""What the indexer chose, as sets: swaps are accepted where scores are closer than the scoring precision can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.validation.core import Array, Check, Fault, Finding, Skipped, View, explained, finding_at
from dsacp_npu.validation.floats import rounded, scoring_noise
from dsacp_npu.validation.lengths import LAYOUT, of_rows, without_prefix
from dsacp_ref.indexer import hadamard, index_scores, scorer, selected_entries
from dsacp_ref.paging import slot_mapping
from dsacp_ref.partition import Int32
from dsacp_ref.quant import QuantizedVectors
from dsacp_ref.spec import contract_error
from dsacp_ref.visibility import visible_entries

__all__ = ["CHECKS", "chosen", "selection_finding", "visible"]

NEEDS = (*LAYOUT, "compress_ratio")
TITLE = "each query chose the best of the entries that it sees"


def visible(view: View) -> Int32:
    """The entries that each own query sees."""
    return visible_entries(view.positions_of(view.own), view.setting("compress_ratio"))


def chosen(view: View) -> Int32:
    """The lanes of every own query that are read, -1 in others."""
    lanes = view.own_rows("topk_indices")
    if len(lanes) != len(view.own):
        rule = f"have {len(view.own)} rows, or {len(view.tokens)} with pad rows"
        raise contract_error("topk_indices", rule, len(lanes), "one list a query of this rank")
    if "topk_length" not in view.tensors:
        return lanes
    return np.where(np.arange(lanes.shape[1]) < view.own_rows("topk_length")[:, None], lanes, np.int32(-1))


class Scores:
    """The scores of every entry that a rank's queries could be given, with what they may be off by.

    Args:
        view: View.
        longest: entries of the longest request, future ones included.
    """

    def __init__(self, view: View) -> None:
        self.view, self.requests = view, view.requests_of(view.own)
        self.totals = np.maximum(view.seq_lens, 0) // view.setting("compress_ratio")
        self.longest = int(self.totals.max(initial=0))
        self.index_q, self.weights = (view.own_rows(name).astype(np.float64) for name in ("index_q", "index_weights"))
        self.dtype = view.settings.get("dtype", view.tensors["index_q"].dtype)
        self.cache: Any
        if "index_cache" in view.tensors:
            self.cache = view.got("index_cache").astype(np.float64)
        else:
            self.cache = QuantizedVectors(view.got("index_cache.values"), view.got("index_cache.scales"))
            self.dtype = "float32"
        self.exact = self.of(self.index_q, self.weights)
        plain = self.plain() if self.dtype in ("bfloat16", "float16") or "index_cache" in view.tensors else self.exact
        self.noise = scoring_noise(self.exact, plain, self.dtype)

    def of(self, index_q: Array, weights: Array, *, relu: bool = True) -> Array:
        """Scores [queries, longest], NaN where a request has no such entry."""

        def scored(block: NDArray[np.intp], slots: Int32) -> Array:
            if isinstance(self.cache, QuantizedVectors):
                seeing = np.ones(len(block), bool)
                scores = scorer(index_q[block], weights[block], self.cache, seeing)(slice(None), slots)
                return scores.astype(np.float64)
            keys = self.cache.reshape(-1, self.cache.shape[-1])[slots]
            if relu:
                return index_scores(index_q[block], weights[block], keys)
            return np.einsum("th,thd,kd->tk", weights[block], index_q[block], keys)

        return self.by_request(scored)

    def plain(self) -> Array:
        """The same in the dtype of the dump."""
        q, weights, cache = (rounded(part, self.dtype) for part in (self.index_q, self.weights, self.cache))

        def scored(block: NDArray[np.intp], slots: Int32) -> Array:
            keys = cache.reshape(-1, cache.shape[-1])[slots]
            kind = "float32" if self.dtype in ("bfloat16", "float16") else self.dtype
            hits = np.maximum(np.einsum("thd,kd->thk", q[block].astype(kind), keys.astype(kind)), 0)
            hits = rounded(hits.astype(np.float64), self.dtype)
            return np.einsum("th,thk->tk", weights[block].astype(kind), hits.astype(kind)).astype(np.float64)

        return self.by_request(scored)

    def by_request(self, scored: Callable[[NDArray[np.intp], Int32], Array]) -> Array:
        """Scores of each request's queries against its entries."""
        view = self.view
        table, size = view.got("cmp_block_table"), cache_block_size(view)
        out = np.full((len(view.own), self.longest), np.nan)
        with np.errstate(invalid="ignore"):
            for request in np.unique(self.requests):
                block = np.flatnonzero(self.requests == request)
                entries = np.arange(self.totals[request], dtype=np.int32)
                if len(entries):
                    slots = slot_mapping(entries, np.full(len(entries), request, np.int32), table, size)
                    out[block, : len(entries)] = scored(block, slots)
        return out

    def choice(self, num_visible: Int32, width: int, scores: Array | None = None) -> Int32:
        """The best entries of so many visible ones."""
        scores = self.exact if scores is None else scores
        most = np.minimum(num_visible, self.totals[self.requests] if len(self.requests) else 0).astype(np.int32)
        return selected_entries(scores, most, width)


def cache_block_size(view: View) -> int:
    """Rows of a block of index keys."""
    name = "index_cache" if "index_cache" in view.tensors else "index_cache.values"
    return int(view.got(name).shape[1])


def scores_of(view: View) -> Scores | None:
    """The scores, or None where the dump has not what they are made of."""
    keys = "index_cache" in view.tensors or {"index_cache.values", "index_cache.scales"} <= view.tensors.keys()
    if not keys or not {"index_q", "index_weights", "cmp_block_table"} <= view.tensors.keys():
        return None
    return Scores(view)


def differing_rows(mine: Int32, theirs: Int32, scores: Scores | None) -> Array:
    """Rows that chose different sets, but for entries whose scores are too close to tell apart."""
    if mine.shape[0] != theirs.shape[0]:
        return np.ones(len(mine), bool)
    width = max(mine.shape[1], theirs.shape[1])
    sets = [
        np.sort(np.pad(lanes, ((0, 0), (0, width - lanes.shape[1])), constant_values=-1), axis=1)
        for lanes in (mine, theirs)
    ]
    wrong = (sets[0] != sets[1]).any(axis=1)
    for row in np.flatnonzero(wrong):
        wrong[row] = not swapped(mine[row], theirs[row], int(row), scores)
    return wrong


def swapped(mine: Int32, theirs: Int32, row: int, scores: Scores | None) -> bool:
    """Whether two choices differ by entries of scores that cannot be told apart."""
    got, due = mine[mine >= 0].tolist(), theirs[theirs >= 0].tolist()
    if scores is None or len(got) != len(due) or len(set(got)) != len(got):
        return False
    if max(got + due, default=0) >= scores.longest:
        return False
    gained, lost = list(set(got) - set(due)), list(set(due) - set(got))
    a, b = (np.nan_to_num(scores.exact[row, entries], nan=-np.inf) for entries in (gained, lost))
    with np.errstate(invalid="ignore"):
        gap = np.abs(a[:, None] - b[None, :])
        return bool(((a[:, None] == b[None, :]) | (gap < scores.noise[row])).all())


def selection_finding(view: View) -> tuple[Finding | None, str]:
    """The first query whose choice is not its best entries, with causes; or a note on swaps and places of -1."""
    got, num_visible = chosen(view), visible(view)
    width = view.settings.get("index_topk", got.shape[1])
    scores = scores_of(view)
    if scores is not None:
        due = scores.choice(num_visible, width)
        wrong = differing_rows(got, due, scores)
    else:
        due, wrong = likely(got, num_visible, width)
    check = Check(
        "selection", "topk_indices", TITLE, NEEDS, due_of, View.place_of_own, faults_of(scores, width), local=True
    )
    if not wrong.any():
        note = "" if scores is None else swaps(view, got, due)
        return None, note or misplaced(view, got)
    causes = explained(
        view,
        check,
        got,
        lambda made: made.ndim == 2 and not differing_rows(got, made, scores).any(),
        lambda made: scores is not None and not differing_rows(made, due, scores).any(),
    )
    row = int(np.flatnonzero(wrong)[0])
    found = finding_at(view, check, wrong, due, got, causes, len(wrong), (row,))
    expected = told_set(due[row]) if scores is not None else legal(num_visible[row], width)
    return Finding(**{**found.__dict__, "expected": expected, "got": got[row].tolist()}), ""


def due_of(view: View) -> Array:
    """The right choice from another rank's, or another layout's, point of view."""
    found = scores_of(view)
    if found is None:
        raise Skipped("index_q")
    return found.choice(visible(view), view.settings.get("index_topk", view.got("topk_indices").shape[1]))


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


def faults_of(scores: Scores | None, width: int) -> tuple[Fault, ...]:
    """The known faults; those that need scores where there are none are left out."""

    def seeing(bound: Callable[[View], Array]) -> Callable[[View, Array], Array | None]:
        def made(view: View, got: Array) -> Array | None:
            seen = np.maximum(bound(view), 0).astype(np.int32)
            if scores is not None:
                return scores.choice(seen, width)
            _, wrong = likely(got, np.minimum(seen, totals(view)), width)
            return None if wrong.any() else got

        return made

    def scored(index_q: Callable[[Scores], Array], weights: Callable[[Scores], Array], **how: Any) -> Fault | Any:
        def made(view: View, got: Array) -> Array | None:
            if scores is None:
                return None
            return scores.choice(visible(view), width, scores.of(index_q(scores), weights(scores), **how))

        return made

    def plain_q(found: Scores) -> Array:
        return found.index_q

    def plain_weights(found: Scores) -> Array:
        return found.weights

    def mapped(change: Callable[[View, Int32], Array]) -> Callable[[View, Array], Array | None]:
        """Every entry as another number: found by undoing it, where scores are not known."""

        def made(view: View, got: Array) -> Array | None:
            if scores is None:
                return None
            due = scores.choice(visible(view), width)
            return np.where(due >= 0, change(view, due), -1)

        return made

    def worst(view: View, got: Array) -> Array | None:
        return None if scores is None else scores.choice(visible(view), width, -scores.exact)

    def cleared(view: View, got: Array) -> Array | None:
        """What was got, if it is right in the lanes that count."""
        seen = visible(view)
        read = np.where(np.arange(got.shape[1]) < np.minimum(seen, width)[:, None], got, -1)
        if scores is not None:
            ok = not differing_rows(read, scores.choice(seen, width), scores).any()
        else:
            ok = not likely(read, seen, width)[1].any()
        return got if ok else None

    def collapsed(view: View, got: Array) -> Array | None:
        entries = got[got >= 0]
        return got if len(entries) > 1 and (entries == entries[0]).all() and (visible(view) > 1).any() else None

    def doubled(view: View, got: Array) -> Array | None:
        seen = visible(view)
        ordered = np.sort(got, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        inside = (got >= -1) & (got < seen[:, None])
        return got if twice.any() and inside.all() and collapsed(view, got) is None else None

    def garbage(view: View, got: Array) -> Array | None:
        return got if ((got < -1) | (got >= totals(view)[:, None])).any() and not explained_outside(view, got) else None

    def explained_outside(view: View, got: Array) -> bool:
        made = [mapped(change)(view, got) for change in (packed, through_table, as_tokens)]
        made.append(cleared(view, got))
        return any(one is not None and not differing_rows(got, one, scores).any() for one in made)

    def fewer(view: View, got: Array) -> Array | None:
        seen = visible(view)
        count, due = (got >= 0).sum(axis=1), np.minimum(seen, width)
        inside = ((got >= -1) & (got < seen[:, None])).all()
        return got if inside and (count <= due).all() and (count < due).any() else None

    def of_last(view: View, got: Array) -> Array | None:
        if scores is None:
            return None
        due = scores.choice(visible(view), width)
        last = np.maximum.accumulate(np.where(np.r_[np.diff(scores.requests) != 0, True][::-1], np.arange(len(due)), 0))
        ends = {int(request): int(np.flatnonzero(scores.requests == request)[-1]) for request in scores.requests}
        return due[[ends[int(request)] for request in scores.requests]] if len(last) else None

    return (
        Fault(
            "own_unfinished_entry",
            seeing(lambda view: view.positions_of(view.own) // view.setting("compress_ratio") + 1),
        ),
        Fault("future_entries", seeing(totals)),
        Fault("global_mask", seeing(seen_globally)),
        Fault("prefix_lost", seeing(lambda view: visible(without_prefix(view)))),
        Fault("collapsed", collapsed),
        Fault("packed_entries", mapped(packed)),
        Fault("physical_slots", mapped(through_table)),
        Fault("entries_as_tokens", mapped(as_tokens)),
        Fault("lanes_not_cleared", cleared),
        Fault("entry_twice", doubled),
        Fault("garbage_entries", garbage),
        Fault("choices_of_one_query", of_last),
        Fault("relu_missing", scored(plain_q, plain_weights, relu=False)),
        Fault("query_not_rotated", scored(lambda found: hadamard(found.index_q), plain_weights)),
        Fault("weights_unsigned", scored(plain_q, lambda found: np.abs(found.weights))),
        Fault("worst_chosen", worst),
        Fault("too_few_entries", fewer),
    )


def totals(view: View) -> Array:
    """All entries of each own query's request, future ones included."""
    requests = view.requests_of(view.own)
    return (view.seq_lens // view.setting("compress_ratio"))[requests] if len(requests) else requests


def seen_globally(view: View) -> Array:
    """What local queries see when they are aligned to the end of the whole request."""
    loc = view.extents.cu_seqlens_q
    rows = np.repeat(np.arange(len(loc) - 1), np.diff(loc))
    lens = of_rows(view.seq_lens, view)
    where = lens[rows] - (loc[rows + 1] - np.arange(len(rows)))
    return (np.maximum(where, -1) + 1) // view.setting("compress_ratio")


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


CHECKS = (Check("selection", "topk_indices", TITLE, NEEDS, due_of, View.place_of_own, faults_of(None, 1)),)
