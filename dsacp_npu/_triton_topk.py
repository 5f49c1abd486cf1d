"""The choice of `dsacp_npu.indexer.selected_entries`, by Triton kernels: exact, ties and NaN among them.

How a family of devices chooses is in `WAYS`. On a GPU two kernels do all of it. On an NPU a kernel decides which are
chosen; torch's own top-k then finds their indices and its stable sort orders them, because a kernel would scan,
scatter and sort one element at a time there.
"""

from __future__ import annotations

from collections.abc import Callable

from dsacp_npu._tensors import Float, Int32, torch
from dsacp_npu._triton_launch import family_of, programs_for, tile_for
from dsacp_npu.indexer import checked_selection
from dsacp_npu.kernels.topk import CHUNKS, TILES, candidates_kernel, chosen_scores_kernel, sorted_kernel
from dsacp_npu.partition import counted
from dsacp_ref.spec import INT32_MAX, UnsupportedError

__all__ = ["chosen_of_slice", "selected_entries"]

SCRATCH_NUMBERS = 1 << 26  # scores that are copied at a time on the way of thresholds


def selected_entries(scores: Float, num_visible: Int32, index_topk: int) -> Int32:
    """Mirror of `dsacp_ref.indexer.selected_entries`.

    Limits: not in float64; fewer than 2^31 - 2^16 entries.
    """
    index_topk = checked_selection(scores, num_visible, index_topk)
    num_tokens, num_entries = scores.shape
    if scores.dtype == torch.float64:
        raise UnsupportedError("backend 'triton' chooses by float32 scores, not by float64; use backend 'torch'")
    if num_entries >= INT32_MAX - (1 << 16):
        raise UnsupportedError(f"backend 'triton' counts entries in int32, not {num_entries}; use backend 'torch'")
    chosen = num_visible.new_empty(num_tokens, index_topk)
    chosen_of_slice(scores.detach().float(), num_visible, index_topk, chosen)
    return chosen


def chosen_of_slice(scores: Float, num_visible: Int32, index_topk: int, out: Int32) -> None:
    """Writes the choice of each row of float32 scores into ``out``, int32 [rows, index_topk], nothing checked.

    Scores and ``out`` may be slices of wider rows, ``out`` with its columns side by side. What lies at or beyond
    ``num_visible`` is not read.
    """
    num_rows, num_entries = scores.shape
    width = min(index_topk, num_entries)
    out[:, width:] = -1
    if num_rows and width:
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        WAYS[family_of(scores)](scores, num_visible.contiguous(), width, out)


def by_candidates(scores: Float, num_visible: Int32, k: int, out: Int32) -> None:
    """The way of a GPU: candidates above a bound, cut down to k and sorted, by a program a row.

    Scratch: 16 bytes for each entry of the tile's width and row. Wider than the widest tile, the way of an NPU.
    """
    widths = [width for width in TILES["cuda"] if width >= k]
    if not widths:
        by_thresholds(scores, num_visible, k, out)
        return
    tile = tile_for(TILES, scores, "the top-k", widths[0])
    (num_rows, num_entries), width = scores.shape, widths[0]
    found = out.new_empty(num_rows, 2 * width)
    pairs = out.new_empty(num_rows, width, dtype=torch.int64)
    candidates_kernel[(num_rows,)](
        scores,
        num_visible,
        found,
        pairs,
        scores.stride(0),
        num_entries,
        k,
        ROWS=tile["ROWS"],
        GROUPS=2 * width,
        **tile["candidates"],
    )
    sorted_kernel[(num_rows,)](pairs, num_visible, out, out.stride(0), num_entries, k, WIDTH=width, **tile["sorted"])


def by_thresholds(scores: Float, num_visible: Int32, k: int, out: Int32) -> None:
    """The way of an NPU: scores but the chosen ones made -inf, some rows at a time; then torch's top-k finds those."""
    num_rows, num_entries = scores.shape
    step = max(1, SCRATCH_NUMBERS // num_entries)
    for start in range(0, num_rows, step):
        block = slice(start, min(start + step, num_rows))
        visible = num_visible[block]
        columns = chosen_scores(scores[block], visible, k).topk(k, dim=1).indices
        out[block, :k] = in_order(scores[block], visible, columns)


def chosen_scores(scores: Float, num_visible: Int32, k: int) -> Float:
    """The scores, -inf but for the k best of a row; chosen ones are finite or inf."""
    num_rows, num_entries = scores.shape
    kept = scores.new_empty(num_rows, num_entries)
    held = num_entries <= CHUNKS[family_of(scores)][True]["CHUNK"]
    tile = tile_for(CHUNKS, scores, "the top-k's threshold", held)
    chosen_scores_kernel[(programs_for(scores, cube=False, waves=4),)](
        scores, num_visible, kept, scores.stride(0), num_entries, num_rows, k, HELD=held, **tile
    )
    return kept


def in_order(scores: Float, num_visible: Int32, columns: torch.Tensor) -> torch.Tensor:
    """The first columns of a row, as many as are visible, by (score descending, index ascending), then -1."""
    hidden = counted(columns.shape[1], columns) >= num_visible[:, None]
    ascending = columns.masked_fill(hidden, scores.shape[1]).sort(dim=1).values  # those that are hidden stay behind
    gain = scores.gather(1, ascending.clamp(max=scores.shape[1] - 1))
    gain = gain.masked_fill(hidden | gain.isnan(), -torch.inf)
    return ascending.gather(1, gain.sort(dim=1, descending=True, stable=True).indices).int().masked_fill(hidden, -1)


WAYS: dict[str, Callable[[Float, Int32, int, Int32], None]] = {
    "a2": by_thresholds,
    "a5": by_thresholds,
    "cuda": by_candidates,
}
