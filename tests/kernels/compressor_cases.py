"""Launches of the compressor: windows in the ring, among the step's rows and across both, rings that begin anew."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from dsacp_npu.kernels.compressor import TILES, entry_constants, entry_key, pooled_entries_kernel
from dsacp_npu.kernels.compressor_state import TILES as STATE_TILES
from dsacp_npu.kernels.compressor_state import state_constants, state_key, updated_state_kernel
from dsacp_ref import compressor as ref
from dsacp_ref.rope import rope_frequencies, rope_table
from dsacp_ref.visibility import pool_row_starts
from tests.compare import assert_same, assert_within_budget
from tests.kernels.case import Case
from tests.mirror.common import int32, to_numpy, to_torch

Lengths = list[tuple[int, int]]  # (tokens before, new tokens) of each request; negative before for a padded graph slot
EPS = 1e-6
BEYOND = 2  # rows, entries and rings in memory after those of the launch


def step_of(
    lengths: Lengths, width: int, ring_rows: int, unseen: float
) -> tuple[ref.ProjectedRows, ref.CompressorState, np.ndarray, np.ndarray]:
    """Random rows, rings with the last rows before them and something unseen elsewhere, offsets, starts."""
    rng = np.random.default_rng(len(lengths) * width + ring_rows)
    loc = int32(0, *np.cumsum([new for _, new in lengths]))
    rows = rng.standard_normal((2, int(loc[-1]) + BEYOND, width)).astype("f4")
    rows[:, loc[-1] :] = unseen
    rings = np.full((2, len(lengths), ring_rows, width), unseen, "f4")
    for request, (before, _) in enumerate(lengths):
        for position in range(max(before - ring_rows, 0), before):
            rings[:, request, position % ring_rows] = rng.standard_normal((2, width))
    starts = int32(*(before for before, _ in lengths))
    # Counts of a ring's last user mean nothing to a request that starts.
    fresh = starts <= 0
    held, ends = int32(*np.where(fresh, 70, starts - ring_rows).clip(0)), int32(*np.where(fresh, 75, starts))
    return ref.ProjectedRows(*rows), ref.CompressorState(*rings, held, ends), loc, starts


def unpooled_as_nan(
    rows: ref.ProjectedRows,
    state: ref.CompressorState,
    loc: np.ndarray,
    starts: np.ndarray,
    ratio: int,
    overlap: bool,
) -> None:
    """Write NaN where no entry of the step pools from."""
    first = pool_row_starts(np.maximum(starts, 0), ratio, overlap=overlap)
    for request, (start, length) in enumerate(zip(starts.tolist(), np.diff(loc).tolist(), strict=True)):
        done = (start + length) // ratio * ratio if start >= 0 else start
        for part in (*rows, *state[:2]):
            if part.ndim == 2:
                part[loc[request] + max(done - start, 0) : loc[request + 1]] = np.nan
            else:
                for position in range(max(start - part.shape[1], 0), min(first[request], start)):
                    part[request, position % part.shape[1]] = np.nan


def pooling(
    channels: int,
    ratio: int,
    windows: int,
    lengths: Lengths,
    *,
    pairs: int = 32,
    spare: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """The step's entries backwards, so that those for which there is none come first; NaN wherever none pools."""
    step = step_of(lengths, windows * channels, windows * ratio + spare, np.nan)
    unpooled_as_nan(*step, ratio, windows == 2)
    rows, state, loc, starts = step
    plan = ref.emitted_entries(loc, starts, ratio, num_rows=len(rows.kv))
    requests, indices = plan.entry_requests[::-1].copy(), plan.entry_indices[::-1].copy()
    weight = 1 + np.random.default_rng(ratio).standard_normal(channels).astype("f4") / 4
    frequencies = rope_frequencies(10000.0, 2 * pairs) if pairs else ()
    table = rope_table(np.where(requests < 0, 0, indices * ratio).astype("i4"), frequencies)
    out = torch.full((len(requests) + BEYOND, channels), 77, dtype=dtype)
    memory = to_torch((rows, state, requests, indices, loc, starts))

    def expected(kind: str) -> np.ndarray:
        given = to_numpy((rows, requests, indices, loc, starts, state, weight), kind)
        return ref.pooled_entries(*given, frequencies, compress_ratio=ratio, eps=EPS)

    def check() -> None:
        exact, plain = expected("float64"), torch.from_numpy(expected("float32")).to(dtype)
        assert_within_budget(out[: len(requests)], exact, plain, "entries")
        assert_same(out[: len(requests)][requests < 0], torch.zeros_like(out[: len(requests)][requests < 0]), "none")
        assert_same(out[len(requests) :], torch.full_like(out[len(requests) :], 77), "beyond the entries")
        assert_same(memory, to_torch((rows, state, requests, indices, loc, starts)), "what is only read")

    (kv, score), (ring_kv, ring_score, *_), *integers = memory
    names = ("entry_requests_ptr", "entry_indices_ptr", "query_start_loc_ptr", "num_computed_tokens_ptr")
    return Case(
        kernel=pooled_entries_kernel,
        arguments={
            "kv_ptr": kv,
            "score_ptr": score,
            "ring_kv_ptr": ring_kv,
            "ring_score_ptr": ring_score,
            **dict(zip(names, integers, strict=True)),
            "norm_weight_ptr": torch.from_numpy(weight),
            "cos_ptr": torch.from_numpy(np.repeat(table.cos, 2, axis=1)),
            "sin_ptr": torch.from_numpy(np.stack([-table.sin, table.sin], axis=-1).reshape(len(requests), -1)),
            "out_ptr": out,
            "num_entries": len(requests),
            "ring_rows": windows * ratio + spare,
            "compress_ratio": ratio,
            "eps": EPS,
        },
        constexprs=entry_constants(channels, pairs, windows, TILES["a2"][entry_key(channels, ratio)]),
        programs=2,
        check=check,
    )


def moving(width: int, ring_rows: int, lengths: Lengths) -> Case:
    """Rows into rings that hold a number wherever nothing came from a token, so that every move shows."""
    rows, state, loc, starts = step_of(lengths, width, ring_rows, 77.0)
    memory = to_torch(state)
    rings = memory._replace(kv=with_more(memory.kv), score=with_more(memory.score))

    def check() -> None:
        want = to_torch(ref.updated_state(rows, loc, starts, state))
        got = rings._replace(kv=rings.kv[: len(lengths)], score=rings.score[: len(lengths)])
        assert_same(got, want, "state")
        beyond = rings.kv[len(lengths) :], rings.score[len(lengths) :]
        assert_same(beyond, tuple(torch.full_like(part, 55) for part in beyond), "beyond the requests")

    return Case(
        kernel=updated_state_kernel,
        arguments={
            "kv_ptr": torch.from_numpy(rows.kv),
            "score_ptr": torch.from_numpy(rows.score),
            "query_start_loc_ptr": torch.from_numpy(loc),
            "num_computed_tokens_ptr": torch.from_numpy(starts),
            "ring_kv_ptr": rings.kv,
            "ring_score_ptr": rings.score,
            "held_start_ptr": rings.held_start,
            "num_tokens_ptr": rings.num_tokens,
            "num_reqs": len(lengths),
            "ring_rows": ring_rows,
        },
        constexprs=state_constants(width, STATE_TILES["a2"][state_key(width)]),
        programs=2,
        check=check,
    )


def with_more(ring: torch.Tensor) -> torch.Tensor:
    """The rings, and some more that nobody may touch."""
    return torch.cat([ring, torch.full_like(ring[:1].expand(BEYOND, -1, -1), 55)])


# A start, a window across ring and step, decode that completes an entry and one that does not, a long prefix, rest,
# a padded slot.
MIXED = [(0, 9), (5, 6), (7, 1), (9, 1), (1003, 30), (6, 0), (-2, 3)]
LONG = [(100, 160), (0, 130), (383, 1), (-1, 2)]

CASES: dict[str, Callable[[], Case]] = {
    "pool 4 with overlap": partial(pooling, 512, 4, 2, MIXED),
    "pool 4 with overlap, wide": partial(pooling, 512, 4, 2, MIXED, dtype=torch.float32),
    "pool 4 with overlap, spare rows": partial(pooling, 512, 4, 2, MIXED, spare=3, dtype=torch.float32),
    "pool index entries": partial(pooling, 128, 4, 2, MIXED, dtype=torch.float16),
    "pool 128": partial(pooling, 512, 128, 1, LONG),
    "pool 128, spare rows": partial(pooling, 512, 128, 1, LONG, spare=5, dtype=torch.float32),
    "pool 20 with overlap, nothing turns": partial(pooling, 64, 20, 2, LONG, pairs=0, dtype=torch.float32),
    "pool 1": partial(pooling, 64, 1, 1, MIXED, dtype=torch.float32),
    "pool 5 with overlap, all turns": partial(pooling, 64, 5, 2, MIXED, spare=1, dtype=torch.float32),
    "pool nothing": partial(pooling, 128, 4, 2, [(1, 2), (4, 0)]),
    "state of index entries": partial(moving, 256, 8, MIXED),
    "state with overlap": partial(moving, 1024, 8, MIXED),
    "state with spare rows": partial(moving, 1024, 11, MIXED),
    "state of long windows": partial(moving, 512, 128, LONG),
    "state of 24 columns": partial(moving, 24, 3, MIXED),
}
