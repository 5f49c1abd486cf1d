"""The three paged forms of attention behind one signature, their oracle, and their plain computation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsacp_ref.attention import AttentionOutput, all_entries_attention, selected_attention, window_attention
from tests import plain
from tests.maths_strategies import Call, Paged
from tests.oracles import attention as oracle
from tests.strategies import read_only


def window(call: Call) -> AttentionOutput:
    return window_attention(call.q, *call.swa_args, *call.row_args, window_size=call.window, softmax_scale=call.scale)


def all_entries(call: Call) -> AttentionOutput:
    return all_entries_attention(
        call.q,
        *call.swa_args,
        *call.cmp_args,
        *call.row_args,
        compress_ratio=call.ratio,
        window_size=call.window,
        softmax_scale=call.scale,
    )


def selected(call: Call) -> AttentionOutput:
    return selected_attention(
        call.q,
        *call.swa_args,
        *call.cmp_args,
        call.topk,
        *call.row_args,
        compress_ratio=call.ratio,
        window_size=call.window,
        softmax_scale=call.scale,
    )


FORMS: dict[str, Callable[[Call], AttentionOutput]] = {
    "window": window,
    "all_entries": all_entries,
    "selected": selected,
}


def seen(call: Call, form: str, query: int) -> tuple[int, list[int], list[int]] | None:
    """(operator row, raw positions, entries) that a query attends to; None without keys."""
    place = call.places[query]
    if place is None:
        return None
    row, position = place
    entries = {
        "window": list,
        "all_entries": lambda: oracle.visible_entries(position, call.ratio),
        "selected": lambda: [int(entry) for entry in call.topk[query] if entry >= 0],
    }[form]()
    return row, oracle.window_positions(position, call.window), entries


def key_rows(call: Call, form: str, query: int) -> np.ndarray:
    """The rows themselves."""
    view = seen(call, form, query)
    if view is None:
        return np.empty((0, call.q.shape[2]), call.q.dtype)
    row, raw, entries = view
    return np.concatenate([call.raw[row][raw], call.entries[row][entries]])


def expected(call: Call, form: str) -> AttentionOutput:
    """Oracle, float64."""
    found = [oracle.attend(q, key_rows(call, form, i), call.sink, call.scale) for i, q in enumerate(call.q)]
    out = np.array([out for out, _ in found]).reshape(call.q.shape)
    return AttentionOutput(out, np.array([lse for _, lse in found]).reshape(call.q.shape[:2]))


def plain_orders(
    q: np.ndarray, rows: list[np.ndarray], sink: np.ndarray, scale: float, count: int = 4
) -> list[AttentionOutput]:
    """The plain computation of each query over rows of its own, its sums over channels and keys in several orders."""
    rng, d = np.random.default_rng(0), q.shape[2]
    orders = []
    for channels in (np.arange(d), *(rng.permutation(d) for _ in range(count - 1))):
        out, lse = np.empty_like(q), np.empty(q.shape[:2], q.dtype)
        for query, (one, keys) in enumerate(zip(q, rows, strict=True)):
            keys = rng.permutation(keys) if orders else keys
            out[query][:, channels], lse[query] = plain.attention(one[:, channels], keys[:, channels], sink, scale)
        orders.append(AttentionOutput(out, lse))
    return orders


def plainly(call: Call, form: str, count: int = 4) -> list[AttentionOutput]:
    """Plain computation in the call's dtype, in several orders."""
    rows = [key_rows(call, form, query) for query in range(len(call.q))]
    return plain_orders(call.q, rows, call.sink, call.scale, count)


def rewritten(side: Paged, requests: list[np.ndarray]) -> Paged:
    """The paged cache holding other rows at the same slots."""
    cache = side.cache.copy()
    flat = cache.reshape(-1, *cache.shape[2:])
    for slots, rows in zip(side.slots, requests, strict=True):
        for slot, row in zip(slots, rows, strict=True):
            flat[slot] = row
    return side._replace(cache=read_only(cache))


def with_rows(call: Call, raw: list[np.ndarray] | None = None, entries: list[np.ndarray] | None = None) -> Call:
    """The call over other raw rows or entries."""
    raw, entries = call.raw if raw is None else raw, call.entries if entries is None else entries
    return call._replace(raw=raw, entries=entries, swa=rewritten(call.swa, raw), cmp=rewritten(call.cmp, entries))
