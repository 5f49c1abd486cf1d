"""Launches of attention over lists and of what makes the lists: few heads and many, gaps, queries without keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from dsacp_npu.kernels.attention import attention_kernel, switches
from dsacp_npu.kernels.attention_slots import chosen_slots_kernel, entry_slots_kernel, window_slots_kernel
from dsacp_npu.kernels.attention_tiles import TILES, tile_key
from tests.compare import assert_same, assert_within_budget
from tests.kernels.case import Case
from tests.laws.attention_forms import FORMS, key_rows, plain_orders, with_rows
from tests.maths_strategies import Call, call_of

ROWS = [(2, 50), (1, 0), (3, 3), (0, 4), (1, 200)]
WIDTH = 128
UNTOUCHED = 77


def slot(side: Any, row: int, logical: int) -> int:
    """The slot of a logical row of an operator row."""
    return side.slots[row][logical]


def window_lists(call: Call) -> np.ndarray:
    """What `window_slots_kernel` is to write."""
    lists = np.full((len(call.q), WIDTH), UNTOUCHED, np.int32)
    for query, place in enumerate(call.places):
        if place is not None:
            row, position = place
            seen = range(max(0, position - call.window + 1), position + 1)
            lists[query] = ~np.int32(slot(call.swa, row, position))
            lists[query, : len(seen)] = [slot(call.swa, row, each) for each in seen]
    return lists


def chosen_lists(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """What `chosen_slots_kernel` is to write: lists, and how much of each is used."""
    lists, counts = np.full((len(call.q), WIDTH), UNTOUCHED, np.int32), np.zeros(len(call.q), np.int32)
    for query, place in enumerate(call.places):
        chosen = call.topk[query]
        if place is not None and (chosen >= 0).any():
            lists[query] = ~np.int32(slot(call.cmp, place[0], int(chosen.max())))
            for column in np.flatnonzero(chosen >= 0).tolist():
                lists[query, column] = slot(call.cmp, place[0], int(chosen[column]))
                counts[query] = column + 1
    return lists, counts


def entry_lists(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """What `entry_slots_kernel` is to write, a list an operator row; and how many entries each query sees."""
    lists = np.full((len(call.seqused_kv), WIDTH), UNTOUCHED, np.int32)
    for row, slots in enumerate(call.cmp.slots):
        lists[row, : len(slots)] = slots
    counts = [0 if place is None else (place[1] + 1) // call.ratio for place in call.places]
    return lists, np.array(counts, np.int32)


def places(call: Call) -> dict[str, torch.Tensor]:
    """Operator row and position of every query."""
    found = np.array([(-1, -1) if place is None else place for place in call.places], np.int32).reshape(-1, 2)
    return {"row_ptr": torch.from_numpy(found[:, 0].copy()), "position_ptr": torch.from_numpy(found[:, 1].copy())}


def short(call: Call, dtype: torch.dtype) -> Call:
    """The call with numbers that the dtype holds."""

    def held(array: np.ndarray) -> np.ndarray:
        return torch.tensor(array).to(dtype).double().numpy()

    call = with_rows(call, [held(rows) for rows in call.raw], [held(rows) for rows in call.entries])
    return call._replace(q=held(call.q), sink=held(call.sink))


def attending(
    form: str,
    heads: int,
    *,
    bound: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 64,
    family: str = "a2",
    wide: bool = False,
    **sizes: Any,
) -> Case:
    """One form over lists of rows, every other one NaN."""
    options = {"ratio": 4, "window": 37, "index_topk": 9, "swa_block": 16, "cmp_block": 4, "beyond": 1, **sizes}
    call = call_of(np.random.default_rng(heads), ROWS, num_heads=heads, head_dim=head_dim, **options)
    call = short(call, dtype)
    lists, counts = {"window": lambda _: (None, None), "selected": chosen_lists, "all_entries": entry_lists}[form](call)
    window = torch.from_numpy(window_lists(call))
    q, swa, cmp = (torch.tensor(each).to(dtype) for each in (call.q, call.swa.cache, call.cmp.cache))
    out, lse = torch.full_like(q, UNTOUCHED), torch.full(q.shape[:2], UNTOUCHED, dtype=torch.float32)

    def check() -> None:
        exact = FORMS[form](call)
        rows = [key_rows(call, form, query).astype(np.float32) for query in range(len(call.q))]
        plain = plain_orders(call.q.astype(np.float32), rows, call.sink.astype(np.float32), call.scale)
        rounded = [torch.from_numpy(each.out).to(dtype) for each in plain]
        assert_within_budget(out, exact.out, rounded, "out")
        assert_within_budget(lse, exact.lse, [each.lse for each in plain], "lse")

    tile = TILES[family][tile_key(heads, bound)]
    base = np.log2(np.e) if family == "cuda" else 1.0
    return Case(
        kernel=attention_kernel,
        arguments={
            "q_ptr": q,
            "swa_ptr": swa,
            "cmp_ptr": cmp,
            "window_ptr": window,
            "entry_ptr": window if lists is None else torch.from_numpy(lists),
            **places(call),
            "count_ptr": torch.from_numpy(np.zeros(len(q), np.int32) if counts is None else counts),
            "sink_ptr": torch.from_numpy(call.sink).float(),
            "out_ptr": out,
            "lse_ptr": lse,
            "num_tasks": len(q) * -(-heads // tile.heads),
            "entry_stride": WIDTH,
            "scale": float(call.scale * base),
        },
        constexprs=switches(
            family,
            tile,
            H=heads,
            D=head_dim,
            WINDOW=call.window,
            WIDTH=WIDTH,
            ENTRIES={"window": "none", "selected": "selected", "all_entries": "all"}[form],
            FIXED=bound is not None,
            WIDE=wide,
        ),
        programs=2,
        check=check,
    )


def listing_windows(page: int, window: int, *, pitch: int = 0) -> Case:
    """Lists of windows; pages may lie apart."""
    pitch = pitch or page
    call = call_of(np.random.default_rng(page), ROWS, ratio=4, window=window, swa_block=page, beyond=1)
    slots = torch.full((len(call.q), WIDTH), UNTOUCHED, dtype=torch.int32)
    want = window_lists(call)

    def check() -> None:
        absent = want < 0
        packed = np.where(absent, ~want, want)
        apart = packed // page * pitch + packed % page
        apart[[place is None for place in call.places]] = UNTOUCHED
        assert_same(slots, np.where(absent, ~apart, apart).astype(np.int32))

    return Case(
        kernel=window_slots_kernel,
        arguments={
            "table_ptr": torch.tensor(call.swa.table),
            **places(call),
            "slots_ptr": slots,
            "num_queries": len(call.q),
            "table_stride": call.swa.table.shape[1],
        },
        constexprs={"WINDOW": window, "WIDTH": WIDTH, "PAGE": page, "PITCH": pitch},
        programs=2,
        check=check,
    )


def listing_choices(page: int, index_topk: int, blocks: int) -> Case:
    """Lists of chosen entries, -1 among them."""
    sizes = {"ratio": 4, "window": 5, "index_topk": index_topk, "cmp_block": page, "beyond": 1}
    call = call_of(np.random.default_rng(page), ROWS, **sizes)
    slots = torch.full((len(call.q), WIDTH), UNTOUCHED, dtype=torch.int32)
    counts = torch.full((len(call.q),), UNTOUCHED, dtype=torch.int32)

    def check() -> None:
        want, used = chosen_lists(call)
        assert_same(slots, want)
        assert_same(counts, used)

    return Case(
        kernel=chosen_slots_kernel,
        arguments={
            "table_ptr": torch.tensor(call.cmp.table),
            **places(call),
            "chosen_ptr": torch.tensor(call.topk),
            "slots_ptr": slots,
            "count_ptr": counts,
            "num_queries": len(call.q),
            "table_stride": call.cmp.table.shape[1],
        },
        constexprs={
            "CHOSEN": index_topk,
            "WIDTH": WIDTH,
            "SHIFT": page.bit_length() - 1,
            "PITCH": page,
            "BLOCKS": blocks,
        },
        programs=2,
        check=check,
    )


def listing_entries(page: int, lanes: int, pages: int) -> Case:
    """Lists of all entries of every operator row; what lies behind them is not looked at."""
    call = call_of(np.random.default_rng(page), ROWS, ratio=4, window=5, cmp_block=page)
    slots = torch.full((len(ROWS), WIDTH), UNTOUCHED, dtype=torch.int32)

    def check() -> None:
        want, _ = entry_lists(call)
        for row, used in enumerate(call.seqused_kv.tolist()):
            assert_same(slots[row, : used // 4], want[row, : used // 4])
            behind = -(-(used // 4) // page) * page
            assert_same(slots[row, behind:], want[row, behind:])

    blocks = call.cmp.table.shape[1]
    return Case(
        kernel=entry_slots_kernel,
        arguments={
            "table_ptr": torch.tensor(call.cmp.table),
            "seqused_ptr": torch.tensor(call.seqused_kv),
            "slots_ptr": slots,
            "num_rows": len(ROWS),
            "num_parts": -(-blocks // pages),
            "table_stride": blocks,
            "slots_stride": WIDTH,
            "ratio": 4,
        },
        constexprs={"PAGES": pages, "PAGE": page, "PITCH": page, "LANES": lanes},
        programs=2,
        check=check,
    )


CASES: dict[str, Callable[[], Case]] = {
    "window": partial(attending, "window", 8),
    "window, bounded": partial(attending, "window", 64, bound=70.0),
    "selected": partial(attending, "selected", 8),
    "selected, bounded": partial(attending, "selected", 64, bound=70.0),
    "selected, 3 heads, 32 channels": partial(attending, "selected", 3, bound=70.0, head_dim=32),
    "selected, float16": partial(attending, "selected", 16, dtype=torch.float16),
    "selected, 40 heads, wide": partial(attending, "selected", 40, bound=70.0, wide=True),
    "selected, 512 channels": partial(attending, "selected", 32, bound=70.0, head_dim=512),
    "selected, 512 channels in quarters": partial(attending, "selected", 40, head_dim=512),
    "all entries, 512 channels in quarters": partial(attending, "all_entries", 32, head_dim=512),
    "all entries": partial(attending, "all_entries", 20),
    "all entries, bounded": partial(attending, "all_entries", 20, bound=70.0),
    "all entries, A5": partial(attending, "all_entries", 64, family="a5"),
    "windows of 37 in pages of 16": partial(listing_windows, 16, 37),
    "windows of 128 in pages of 5": partial(listing_windows, 5, 128),
    "windows of 5 in pages of 128 apart": partial(listing_windows, 128, 5, pitch=200),
    "choices in pages of 4": partial(listing_choices, 4, 9, 16),
    "choices in pages of 1, element by element": partial(listing_choices, 1, 7, 0),
    "entries in pages of 3": partial(listing_entries, 3, 4, 8),
    "entries in pages of 1": partial(listing_entries, 1, 1, 32),
}
