"""Rows, keys and scores of every rank under a split, in closed form over its runs of positions.

A rank owns runs: tokens of one request at consecutive positions. What their queries see are sums over positions that
have closed forms, so a prompt of a million tokens costs no more than one of a thousand, unless it is dealt out token
by token. The runs are the definition's (`dsacp_ref.partition.rank_pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.planning.models import LayerKind
from dsacp_ref.partition import rank_pieces
from dsacp_ref.spec import INT32_MAX, check_int, contract_error

__all__ = ["Batch", "Runs", "Shares", "batch_of", "shares_of"]

Int64 = NDArray[np.int64]


class Batch(NamedTuple):
    """The lengths of one prefill step.

    Fields:
        query_lens: ints >= 1, new tokens of each request.
        computed: ints >= 0, tokens of each that caches hold already.
    """

    query_lens: tuple[int, ...]
    computed: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.query_lens)

    @property
    def seq_lens(self) -> list[int]:
        """All tokens of each request after the step."""
        return [new + before for new, before in zip(self.query_lens, self.computed, strict=True)]


def batch_of(query_lens: Sequence[int], computed: Sequence[int] | None = None) -> Batch:
    """The batch of these lengths.

    Args:
        query_lens: ints >= 1, new tokens of each request; at least one request.
        computed: ints >= 0, cached tokens of each; None for none.

    Returns:
        Batch.

    Raises:
        ContractError: no request, a length out of range, or not one number of cached tokens a request.

    >>> batch_of([5, 3], [4, 0]).seq_lens
    [9, 3]
    """
    lengths = tuple(check_int("query_lens", length, 1, INT32_MAX) for length in query_lens)
    if not lengths:
        raise contract_error("query_lens", "hold at least one request", "none")
    before = tuple(check_int("computed", count, 0, INT32_MAX) for count in computed or [0] * len(lengths))
    if len(before) != len(lengths):
        raise contract_error("computed", f"have {len(lengths)} entries", len(before), "one per request")
    batch = Batch(lengths, before)
    check_int("tokens of the batch", batch.num_tokens, 1, INT32_MAX)
    check_int("seq_lens", max(batch.seq_lens), 1, INT32_MAX, "it is query_lens plus computed")
    return batch


class Runs(NamedTuple):
    """One rank's runs of tokens, in order of the stream; empty ones are left out.

    Fields:
        starts, stops: int64[runs], flat tokens of the step, half-open.
        positions: int64[runs], of each run's first token in its request.
        firsts: int64[runs], the flat token that each run's request begins with.
    """

    starts: Int64
    stops: Int64
    positions: Int64
    firsts: Int64

    @property
    def ends(self) -> Int64:
        """int64[runs], the position behind each run."""
        return self.positions + self.stops - self.starts


class Shares:
    """What every rank has of a step under one split."""

    def __init__(self, batch: Batch, cp_size: int, split: str) -> None:
        self.batch, self.cp_size, self.split = batch, cp_size, split
        loc = np.cumsum([0, *batch.query_lens]).astype(np.int32)
        self.request_ends: Int64 = loc[1:].astype(np.int64)
        computed, self.runs, rows = np.array(batch.computed, np.int64), [], []
        for cp_rank in range(cp_size):
            pieces = rank_pieces(loc, cp_size, cp_rank, split=split)
            rows.append(int(pieces.piece_rows.sum(dtype=np.int64)))
            live = pieces.piece_ends > pieces.piece_starts
            requests, starts, ends = (part[live] for part in pieces[:3])
            firsts = self.request_ends[requests] - np.array(batch.query_lens, np.int64)[requests]
            self.runs.append(Runs(firsts + starts, firsts + ends, computed[requests] + starts, firsts))
        # The flat stream ends in rows that are no tokens, and no piece of a request either.
        if split == "contiguous":
            rows = [-(-batch.num_tokens // cp_size)] * cp_size
        self.rows: Int64 = np.array(rows, np.int64)
        self._known: dict[LayerKind, dict[str, Int64]] = {}

    @cached_property
    def tokens(self) -> Int64:
        """int64[cp_size]: tokens of every rank, pad rows not counted."""
        return np.array([int((runs.stops - runs.starts).sum()) for runs in self.runs], np.int64)

    @property
    def most_rows(self) -> int:
        """Rows of the largest rank: what rows are padded to when they travel."""
        return int(self.rows.max())

    def keys(self, kind: LayerKind) -> Int64:
        """int64[cp_size]: keys and entries that the queries of every rank attend to."""
        return self._of(kind, "keys", attended)

    def scores(self, kind: LayerKind) -> Int64:
        """int64[cp_size]: keys or entries that the queries of every rank are scored against."""
        return self._of(kind, "scores", scored)

    def entries(self, kind: LayerKind) -> Int64:
        """int64[cp_size]: entries of the step that every rank completes: those whose last token it owns."""
        ratio = kind.compress_ratio
        return self._of(kind, "entries", lambda runs, _: int((runs.ends // ratio - runs.positions // ratio).sum()))

    def window_halo(self, kind: LayerKind) -> Int64:
        """int64[cp_size]: tokens of others whose raw keys every rank needs, for its windows and to go on from."""

        def wanted(runs: Runs, _: LayerKind) -> int:
            starts = np.concatenate([runs.starts - (kind.window - 1), self._carried(kind.window - 1)])
            stops = np.concatenate([runs.stops, self.request_ends])
            firsts = np.concatenate([runs.firsts, self._request_starts()])
            return foreign(np.maximum(starts, firsts), stops, runs)

        return self._of(kind, "window_halo", wanted)

    def pool_halo(self, kind: LayerKind) -> Int64:
        """int64[cp_size]: tokens of others whose projections every rank needs, for its entries and to go on from."""
        ratio = kind.compress_ratio

        def wanted(runs: Runs, _: LayerKind) -> int:
            first = -(-(runs.positions + 1) // ratio) * ratio - 1  # the first position that closes an entry
            last = runs.ends // ratio * ratio - 1
            closes = last >= first
            origin = runs.starts - runs.positions
            starts = np.concatenate([(origin + first - (kind.pool_rows - 1))[closes], self._carried(kind.pool_rows)])
            stops = np.concatenate([(origin + last + 1)[closes], self.request_ends])
            firsts = np.concatenate([runs.firsts[closes], self._request_starts()])
            return foreign(np.maximum(starts, firsts), stops, runs)

        return self._of(kind, "pool_halo", wanted)

    def _request_starts(self) -> Int64:
        return np.concatenate([np.zeros(1, np.int64), self.request_ends[:-1]])

    def _carried(self, rows: int) -> Int64:
        """Where the rows of every request begin that the next step goes on from."""
        return self.request_ends - rows

    def _of(self, kind: LayerKind, name: str, counted: Callable[[Runs, LayerKind], int]) -> Int64:
        """A count of every rank, made once for all schemes that share the split."""
        known = self._known.setdefault(kind, {})
        if name not in known:
            known[name] = np.array([counted(runs, kind) for runs in self.runs], np.int64)
        return known[name]


def shares_of(batch: Batch, cp_size: int, split: str) -> Shares:
    """What every rank has of a step.

    Args:
        batch: Batch.
        cp_size: int >= 1, ranks that split the tokens.
        split: str, the rule.

    Returns:
        Shares.

    Raises:
        ContractError: no such rule or number of ranks.

    >>> shares_of(batch_of([8]), 2, "zigzag").tokens.tolist()
    [4, 4]
    """
    return Shares(batch, cp_size, split)


# --- sums over positions ---


def capped_sum(counts: Int64, most: int) -> Int64:
    """The sum of min(i, most) over i = 1 .. n, for each n."""
    low = np.minimum(counts, most)
    return low * (low + 1) // 2 + (counts - low) * most


def entries_sum(counts: Int64, ratio: int) -> Int64:
    """The sum of i // ratio over i = 1 .. n, for each n."""
    whole, rest = np.divmod(counts, ratio)
    return ratio * (whole * (whole - 1) // 2) + whole * (rest + 1)


def capped_entries_sum(counts: Int64, ratio: int, most: int) -> Int64:
    """The sum of min(i // ratio, most) over i = 1 .. n, for each n."""
    low = np.minimum(counts, most * ratio)
    return entries_sum(low, ratio) + (counts - low) * most


def between(runs: Runs, sums: Callable[..., Int64], *args: int) -> int:
    """The sum over the positions of all runs, from the sums up to a position."""
    return int((sums(runs.ends, *args) - sums(runs.positions, *args)).sum())


def attended(runs: Runs, kind: LayerKind) -> int:
    """Keys and entries that the queries of some runs attend to."""
    if kind.is_latent:
        return between(runs, capped_sum, kind.top_k)
    found = between(runs, capped_sum, kind.window)
    if kind.compress_ratio == 1:
        return found
    if kind.top_k:
        return found + between(runs, capped_entries_sum, kind.compress_ratio, kind.top_k)
    return found + between(runs, entries_sum, kind.compress_ratio)


def scored(runs: Runs, kind: LayerKind) -> int:
    """Keys or entries that the queries of some runs are scored against."""
    return between(runs, entries_sum, kind.compress_ratio) if kind.indexed else 0


def foreign(starts: Int64, stops: Int64, runs: Runs) -> int:
    """Tokens in any of some intervals that are in none of a rank's runs."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    starts = np.concatenate([starts[:1], np.maximum(starts[1:], stops[:-1])])  # each token in one interval only
    stops = np.maximum(starts, stops)
    return int((stops - starts).sum() - (owned_before(stops, runs) - owned_before(starts, runs)).sum())


def owned_before(tokens: Int64, runs: Runs) -> Int64:
    """How many of a rank's tokens come before each token."""
    lengths = np.concatenate([np.zeros(1, np.int64), np.cumsum(runs.stops - runs.starts)])
    place = np.searchsorted(runs.starts, tokens, side="right")
    inside = np.where(place > 0, runs.stops[place - 1], 0) if len(runs.stops) else np.zeros_like(tokens)
    return lengths[place] - np.maximum(inside - tokens, 0) * (place > 0)
