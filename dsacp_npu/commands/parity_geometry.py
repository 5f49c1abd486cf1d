"""Who owns which token, at real lengths: exact checks of every split, and how even its work is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dsacp_npu.commands.parity_cells import RANKS, SPLITS
from dsacp_npu.commands.parity_trace import DrawnStep
from dsacp_ref.config import v4_flash
from dsacp_ref.extents import build_cp_local_metadata, local_extents, query_positions
from dsacp_ref.mla_config import v32
from dsacp_ref.partition import partition_tokens


class GeometryResult(NamedTuple):
    """One split over some ranks in one step.

    Fields:
        text: what is wrong; empty when all is right.
        attended: keys that the busiest rank attends to, over the mean: window and chosen entries of a V4 layer of
            ratio 4, or the tokens that V3.2 chooses.
        scored: likewise, what it scores to choose them.
    """

    step: str
    split: str
    ranks: int
    text: str
    attended: float
    scored: float


def geometry(step: DrawnStep, model: str = "v4") -> list[GeometryResult]:
    """Every split over every number of ranks."""
    return [geometry_result(step, split, ranks, model) for split in SPLITS for ranks in RANKS]


def geometry_result(step: DrawnStep, split: str, ranks: int, model: str = "v4") -> GeometryResult:
    """One split, compared with positions counted out request by request."""
    query_start_loc, seq_lens = step.arrays()
    requests = np.repeat(np.arange(len(step.shares)), [share.new for share in step.shares])
    positions = np.concatenate([np.arange(s.computed, s.computed + s.new) for s in step.shares])
    try:
        wrong = list(wrong_geometry(query_start_loc, seq_lens, split, ranks, requests, positions))
        owned = partition_tokens(query_start_loc, ranks, split=split).token_indices
    except Exception as error:
        return GeometryResult(step.name, split, ranks, f"{type(error).__name__}: {error}", 0.0, 0.0)
    if model == "v32":
        entries = positions + 1
        keys = np.minimum(entries, v32().index_topk)
    else:
        flash = v4_flash()
        entries = (positions + 1) // 4
        keys = np.minimum(positions + 1, flash.window_size) + np.minimum(entries, flash.index_topk)

    def imbalance(work: np.ndarray) -> float:
        shares = [float(work[tokens[tokens >= 0]].sum()) for tokens in owned]
        return max(shares) / max(sum(shares) / ranks, 1e-30)

    return GeometryResult(step.name, split, ranks, "; ".join(wrong[:2]), imbalance(keys), imbalance(entries))


def wrong_geometry(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    split: str,
    ranks: int,
    requests: np.ndarray,
    positions: np.ndarray,
) -> Iterator[str]:
    """What is wrong with ownership, restore order, extents or the proposal's metadata."""
    partition = partition_tokens(query_start_loc, ranks, split=split)
    every = np.arange(len(positions))
    gathered = np.concatenate(partition.token_indices)
    if not np.array_equal(np.sort(gathered[gathered >= 0]), every):
        yield "some token has no owner or two"
    if not np.array_equal(gathered[partition.restore_indices], every):
        yield "restore_indices do not put the tokens in order"
    for rank, tokens in enumerate(partition.token_indices):
        extents = local_extents(query_start_loc, seq_lens, ranks, rank, split=split)
        real = tokens[tokens >= 0]
        believed = query_positions(extents.cu_seqlens_q, extents.seqused_kv, num_rows=len(real))
        if not np.array_equal(believed, positions[real]):
            yield f"rank {rank}: extents put queries at other positions"
        if not np.array_equal(np.repeat(extents.request_indices, np.diff(extents.cu_seqlens_q)), requests[real]):
            yield f"rank {rank}: rows belong to other requests"
        if split == "contiguous":
            local = build_cp_local_metadata(query_start_loc, seq_lens, ranks, rank, None, None)
            if not (
                np.array_equal(local.local_query_start_loc, extents.cu_seqlens_q)
                and np.array_equal(local.local_seq_lens, extents.seqused_kv)
                and np.array_equal(local.local_kv_start_loc, np.cumsum([0, *extents.seqused_kv]))
            ):
                yield f"rank {rank}: build_cp_local_metadata and local_extents differ"
