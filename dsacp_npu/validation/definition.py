"""Attention of a rank's queries by the definition, given the selection of the dump; and what the dtype loses of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsacp_npu.validation.floats import rounded
from dsacp_npu.validation.scores import check_reach, chosen
from dsacp_npu.validation.view import Array, Skipped, View
from dsacp_ref.attention import apply_sink, gathered_attention, window_indices
from dsacp_ref.paging import check_slots, slot_mapping
from dsacp_ref.partition import Int32
from dsacp_ref.spec import check_array
from dsacp_ref.visibility import visible_entries

__all__ = ["INDEXED_RATIO", "Definition", "Lists", "definition_of"]

INDEXED_RATIO = 4  # layers of this ratio choose among their entries
QUERIES = 64  # computed at a time
FEW = 1 << 16  # numbers


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
        self.q = view.own_queries("q", ("num_heads", "head_dim"))
        self.sink = view.got("attn_sink").astype(np.float64)
        check_array("attn_sink", self.sink, ("float64",), self.q.shape[1:2], "one sink a head of q")
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
        most = int(num_visible.max(initial=0))
        check_reach(self.view, most, self.view.got("cmp_cache").shape[1])
        entries = np.arange(most, dtype=np.int32)
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
            rule = ("num_blocks", "block_size", self.q.shape[2])
            check_array(f"{name}_cache", cache, (str(cache.dtype),), rule, "rows as wide as q")
            flat = cache.reshape(-1, cache.shape[-1])
            check_slots(where, len(flat), f"{name}_block_table", f"it leads outside of {name}_cache")
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
        """The textbook computation in a dtype; few numbers may be right by luck, so keys are added up both ways."""
        orders = (False, True) if self.out.size < FEW else (False,)
        return [self.in_dtype(dtype, backwards=backwards) for backwards in orders]

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


def definition_of(view: View) -> Definition:
    """The definition's attention, worked out once."""
    return view.once("attention", Definition)
