"""Choices of the indexer: what is read of them, the scores behind them, and when two of them are the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.validation.floats import rounded, scoring_noise
from dsacp_npu.validation.view import Array, View
from dsacp_ref.indexer import check_index_cache, index_scores, scorer, selected_entries
from dsacp_ref.paging import check_slots, slot_mapping
from dsacp_ref.partition import Int32
from dsacp_ref.quant import QuantizedVectors
from dsacp_ref.spec import contract_error
from dsacp_ref.visibility import visible_entries

__all__ = ["Scores", "cache_block_size", "check_reach", "chosen", "differing_rows", "scores_of", "visible"]


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
    lengths = view.own_queries("topk_length", ())
    return np.where(np.arange(lanes.shape[1]) < lengths[:, None], lanes, np.int32(-1))


def check_reach(view: View, num_entries: int, size: int) -> None:
    """Refuse a table of entries that is too short for what a query sees, before room is made for all that it sees."""
    columns = view.got("cmp_block_table").shape[1]
    if num_entries > columns * size:
        rule = f"reach the {num_entries} entries that a query sees"
        raise contract_error("cmp_block_table", rule, f"{columns} blocks of {size}", "are seq_lens right?")


class Scores:
    """The scores of every entry that a rank's queries could be given, with what they may be off by.

    Args:
        view: View.
        longest: entries of the longest request, future ones included.
    """

    def __init__(self, view: View) -> None:
        self.view, self.requests = view, view.requests_of(view.own)
        self.totals = np.maximum(view.seq_lens, 0) // view.setting("compress_ratio")
        check_reach(view, int(visible(view).max(initial=0)), cache_block_size(view))
        # Entries of the future may have no block yet; those that a table cannot name are nobody's choice.
        self.totals = np.minimum(self.totals, view.got("cmp_block_table").shape[1] * cache_block_size(view))
        self.longest = int(self.totals.max(initial=0))
        self.index_q = view.own_queries("index_q", ("index_n_heads", "index_head_dim"))
        self.weights = view.own_queries("index_weights", self.index_q.shape[1:2])
        self.dtype = view.settings.get("dtype", view.tensors["index_q"].dtype)
        self.cache: Any
        if "index_cache" in view.tensors:
            self.cache = view.got("index_cache").astype(np.float64)
        else:
            self.cache = QuantizedVectors(view.got("index_cache.values"), view.got("index_cache.scales"))
            self.dtype = "float32"
        check_index_cache(self.cache, "float64", self.index_q.shape[2], "as the index queries")
        self.num_slots = math.prod((self.cache if "index_cache" in view.tensors else self.cache.values).shape[:2])
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
                    check_slots(slots, self.num_slots, "cmp_block_table", "it leads outside of the index cache")
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
    return view.once("scores", made_scores)


def made_scores(view: View) -> Scores | None:
    """The same, worked out."""
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
