"""Launches of the index scores: rows of every kind, short blocks, int8, and everything unseen poisoned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dsacp_npu.kernels.scores import HEADS, ONE_BLOCK, WIDTH, scores_kernel
from dsacp_ref.extents import query_positions, query_rows
from dsacp_ref.indexer import index_scores
from dsacp_ref.quant import QuantizedVectors, int8_index_scores, quantized_int8
from dsacp_ref.visibility import visible_entries
from tests.compare import assert_same, assert_within_budget
from tests.kernels.case import Case
from tests.maths_strategies import Paged, int32, normal, paged

UNTOUCHED = 12345.0
RATIO = 4
# Queries and key extent of each operator row: a chunk behind a prefix, none, a padded slot, decode, a prompt's start.
MIXED = [(6, 190), (0, 40), (2, 0), (1, 161), (7, 7)]


def short_floats(dtype: torch.dtype, array: np.ndarray) -> torch.Tensor:
    """The array in a torch dtype that numpy may lack."""
    return torch.from_numpy(np.array(array, np.float32)).to(dtype)


def written_columns(place: int, rows: np.ndarray, visible: np.ndarray, tile: tuple[int, int], end: int) -> int:
    """How far the row of a query is written: whole tiles up to the last entry its neighbours see."""
    start = place // tile[0] * tile[0]
    seen = [int(visible[i]) for i in range(start, min(start + tile[0], end)) if rows[i] == rows[place]]
    return -(-max(seen) // tile[1]) * tile[1]


def exact_and_plain(q: Any, weights: np.ndarray, keys: Any) -> tuple[np.ndarray, np.ndarray]:
    """The scores in float64, of int8 behind the roundings that it must make; and as float32 has them."""
    if isinstance(keys, QuantizedVectors):
        dots = np.einsum("thd,kd->thk", q.values.astype(np.float64), keys.values)
        hits = (np.maximum(dots, 0) / 1024).astype(np.float16).astype(np.float64)
        gains = (weights * q.scales).astype(np.float64)
        exact = np.einsum("th,thk->tk", gains, hits) * keys.scales.astype(np.float64)
        return exact, int8_index_scores(q, weights, keys)
    exact = index_scores(*(part.astype(np.float64) for part in (q, weights, keys)))
    return exact, index_scores(q, weights, keys)


def first_rows(part: Any, rows: slice) -> Any:
    """Some rows of plain or coded vectors."""
    return QuantizedVectors(*(each[rows] for each in part)) if isinstance(part, QuantizedVectors) else part[rows]


def ranked_case(
    dtype: torch.dtype,
    tile: tuple[int, int],
    block_size: int,
    *,
    rows: list[tuple[int, int]] = MIXED,
    cut: tuple[int, int] = (0, 0),
    num_splits: int = 1,
    wide: bool = False,
    nan_key: bool = False,
) -> Case:
    """Scores of a slice of a step's queries: all but so many at its beginning and at its end."""
    rng = np.random.default_rng(0)
    keys = [normal(rng, used // RATIO, WIDTH) for _, used in rows]
    loc = int32([0, *np.cumsum([length for length, _ in rows])])
    used = int32([extent for _, extent in rows])
    num_queries = int(loc[-1]) + 2  # two belong to no row
    numbers = normal(rng, num_queries, HEADS, WIDTH), normal(rng, num_queries, HEADS)
    if nan_key:
        keys[0] = keys[0].copy()
        keys[0][3, 5] = np.nan
    query_row = query_rows(loc, num_rows=num_queries)
    visible = visible_entries(query_positions(loc, used, num_rows=num_queries), RATIO)
    first, count = cut[0], num_queries - sum(cut)
    width = -(-max(map(len, keys)) // tile[1]) * tile[1]
    out = torch.full((count, width), UNTOUCHED)
    if dtype == torch.int8:
        parts, tensors, side = coded_parts(numbers, keys, block_size, rng)
    else:
        q, weights = (short_floats(dtype, part) for part in numbers)
        side = paged(rng, keys, block_size)
        tensors = {
            "q_ptr": q,
            "weights_ptr": weights,
            "keys_ptr": short_floats(dtype, side.cache),
        }
        parts = q.float().numpy(), weights.float().numpy(), [short_floats(dtype, each).float().numpy() for each in keys]

    def check() -> None:
        """Every row of the buffer: scores, -inf up to the end of a tile, and nothing behind it."""
        q, weights, each = parts
        found = []
        for place in range(first, first + count):
            got, row, seen = out[place - first].numpy(), int(query_row[place]), int(visible[place])
            last = written_columns(place - first, query_row[first:], visible[first:], tile, count) if row >= 0 else 0
            assert_same(got[last:], np.full(width - last, UNTOUCHED, np.float32), f"untouched[{place}]")
            assert_same(got[seen:last], np.full(last - seen, -np.inf, np.float32), f"hidden[{place}]")
            if seen:
                mine = slice(place, place + 1)
                pair = exact_and_plain(first_rows(q, mine), weights[mine], first_rows(each[row], slice(seen)))
                found.append((got[:seen], *(np.where(np.isnan(scores), -np.inf, scores)[0] for scores in pair)))
        got, exact, plain = (np.concatenate(column) for column in zip(*found, strict=True))
        finite = np.isfinite(exact)  # a NaN is -inf: found to sit where it should, then left out of the errors
        assert_same(got[~finite], plain[~finite].astype(np.float32), "NaN")
        assert_within_budget(got[finite], exact[finite], plain[finite].astype(np.float32), "scores")

    arguments = {
        **tensors,
        "table_ptr": torch.from_numpy(np.array(side.table)),
        "rows_ptr": torch.from_numpy(np.array(query_row)),
        "visible_ptr": torch.from_numpy(np.array(visible)),
        "out_ptr": out,
        "first": first,
        "count": count,
        "num_splits": num_splits,
        "table_stride": side.table.shape[1],
        "out_stride": width,
    }
    return scores_case(arguments, dtype, tile, block_size.bit_length() - 1, True, wide, check)


def coded_parts(numbers: Any, keys: list[np.ndarray], block_size: int, rng: np.random.Generator) -> Any:
    """(queries, weights and keys of the reference; the kernel's; where they lie), in int8."""
    q, weights = quantized_int8(numbers[0]), numbers[1].astype(np.float16)
    each = [quantized_int8(mine) for mine in keys]
    seed = int(rng.integers(1 << 30))
    side = paged(np.random.default_rng(seed), [mine.values for mine in each], block_size, poison=99)
    scales: Paged = paged(np.random.default_rng(seed), [mine.scales for mine in each], block_size)
    tensors = {
        "q_ptr": torch.from_numpy(q.values),
        "q_scales_ptr": torch.from_numpy(q.scales),
        "weights_ptr": torch.from_numpy(weights),
        "keys_ptr": torch.from_numpy(np.array(side.cache)),
        "key_scales_ptr": torch.from_numpy(np.array(scales.cache)),
    }
    return (q, weights, each), tensors, side


def plain_case(tile: tuple[int, int]) -> Case:
    """Every query against every key, a NaN among them, in one block."""
    rng, num_queries, num_keys = np.random.default_rng(1), 5, 3 * tile[1]
    q, weights, keys = (
        short_floats(torch.bfloat16, normal(rng, *shape))
        for shape in ((num_queries, HEADS, WIDTH), (num_queries, HEADS), (num_keys, WIDTH))
    )
    keys[7, 3] = torch.nan
    seen = num_keys - 5
    out = torch.full((num_queries, num_keys), UNTOUCHED)

    def check() -> None:
        """The scores as they come, -inf behind the last key."""
        exact, plain = exact_and_plain(*(part.float().numpy() for part in (q, weights, keys[:seen])))
        assert_same(out[:, seen:].numpy(), np.full((num_queries, num_keys - seen), -np.inf, np.float32), "hidden")
        assert_same(np.isnan(out[:, :seen].numpy()), np.isnan(exact), "NaN")
        real = ~np.isnan(exact[0])
        assert_within_budget(out[:, :seen][:, real], exact[:, real], plain[:, real], "scores")

    arguments = {
        "q_ptr": q,
        "weights_ptr": weights,
        "keys_ptr": keys,
        "table_ptr": torch.zeros(1, 1, dtype=torch.int32),
        "rows_ptr": torch.zeros(num_queries, dtype=torch.int32),
        "visible_ptr": torch.full((num_queries,), seen, dtype=torch.int32),
        "out_ptr": out,
        "first": 0,
        "count": num_queries,
        "num_splits": 2,
        "table_stride": 1,
        "out_stride": num_keys,
    }
    return scores_case(arguments, torch.bfloat16, tile, ONE_BLOCK, False, False, check)


def scores_case(
    arguments: dict[str, Any],
    dtype: torch.dtype,
    tile: tuple[int, int],
    block_shift: int,
    ranked: bool,
    wide: bool,
    check: Callable[[], None],
) -> Case:
    """The launch, its arguments in the kernel's order; scales that are not there are constants."""
    absent = {name: None for name in ("q_scales_ptr", "key_scales_ptr") if name not in arguments}
    switches = {
        "HEADS": HEADS,
        "WIDTH": WIDTH,
        "BQ": tile[0],
        "BN": tile[1],
        "BLOCK_SHIFT": block_shift,
        "CODEC": "int8" if dtype == torch.int8 else "float",
        "RANKED": ranked,
        "WIDE": wide,
    }
    in_order = {name: arguments[name] for name in scores_kernel.arg_names if name in arguments}
    return Case(scores_kernel, in_order, absent | switches, 2, check)


CASES: dict[str, Callable[[], Case]] = {
    "bf16 in blocks": lambda: ranked_case(torch.bfloat16, (4, 16), 32),
    "fp16, a slice, keys shared out": lambda: ranked_case(torch.float16, (4, 32), 32, cut=(3, 1), num_splits=2),
    "bf16 in blocks shorter than a tile": lambda: ranked_case(torch.bfloat16, (4, 16), 4),
    "bf16, offsets in int64": lambda: ranked_case(torch.bfloat16, (1, 16), 2, rows=MIXED[2:], wide=True),
    "bf16, a query alone, a NaN": lambda: ranked_case(torch.bfloat16, (1, 64), 64, cut=(0, 9), nan_key=True),
    "int8 in blocks": lambda: ranked_case(torch.int8, (4, 16), 16),
    "int8 in blocks shorter than a tile": lambda: ranked_case(torch.int8, (4, 16), 8, cut=(1, 4)),
    "bf16 plain": lambda: plain_case((4, 16)),
}
