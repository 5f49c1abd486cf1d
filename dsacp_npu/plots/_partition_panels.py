"""The panels of a partition's picture: strip of ranks, keys, entries, work."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.plots._drawing import INK, MUTED, PAPER, rank_colors, rgb, text_color
from dsacp_npu.plots._partition_rows import Int32, PictureRows, visibility
from dsacp_ref.visibility import visible_entries

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_PIXELS = 1100  # of the raster, each way: a picture of any batch is made in about a second
CELLS = 64  # rows and keys up to which cells are told apart
MOST_BOXES = 96  # outlines that can still be told apart
MOST_NUMBERS = 40
MOST_NAMES = 24


def shades(cp_size: int, cp_rank: int | None) -> NDArray[np.float64]:
    """Red, green and blue of each rank, grey for the ranks that are not asked for."""
    colors = [color if cp_rank in (None, rank) else MUTED for rank, color in enumerate(rank_colors(cp_size))]
    return np.array([rgb(color) for color in colors])


def sampled(count: int) -> NDArray[np.int64]:
    """The middles of as many equal runs as a raster has lines: every index of a small range."""
    size = min(count, MOST_PIXELS)
    return ((2 * np.arange(size) + 1) * count) // (2 * size)


def raster(rows: PictureRows, counts: Int32, num_columns: int, shade: Any, window_size: int | None) -> Any:
    """Red, green and blue of every cell: rows see columns up to these last ones."""
    picked, columns = sampled(len(counts)), sampled(num_columns).astype(np.int32)
    state = visibility(counts[picked], columns, window_size=window_size)
    weight = np.array([0.0, 0.22, 1.0])[state][:, :, None]
    return 1 - weight * (1 - shade[rows.owners[picked]][:, None, :])


def draw_cells(axes: Axes, image: Any, num_rows: int, num_columns: int, most_ticks: int = 20) -> None:
    """The raster, with cells told apart where they are few."""
    axes.imshow(image, extent=(0, num_columns, num_rows, 0), aspect="auto", interpolation="nearest")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_yticks([])
    if num_rows <= CELLS and num_columns <= CELLS:
        axes.hlines(np.arange(1, num_rows), 0, num_columns, color=PAPER, linewidth=0.7, zorder=1)
        axes.vlines(np.arange(1, num_columns), 0, num_rows, color=PAPER, linewidth=0.7, zorder=1)
    if num_columns <= most_ticks:
        axes.set_xticks(np.arange(num_columns) + 0.5, range(num_columns))
    else:
        axes.xaxis.get_major_locator().set_params(nbins=4, integer=True)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="x", length=0)


def request_ranges(rows: PictureRows) -> list[tuple[int, int, int]]:
    """First picture row, end and request of each request that has rows, and of pad rows of no request (-1)."""
    changes = np.flatnonzero(np.diff(rows.request_indices)) + 1
    bounds = [0, *changes.tolist(), len(rows.owners)]
    return [(first, end, int(rows.request_indices[first])) for first, end in pairwise(bounds)]


def draw_borders(axes: Axes, rows: PictureRows, width: float) -> None:
    """Lines between requests, where they are few enough to be told apart."""
    borders = [first for first, _, _ in request_ranges(rows)[1:]]
    if len(borders) <= MOST_BOXES:
        axes.hlines(borders, 0, width, color=PAPER, linewidth=2.4)
        axes.hlines(borders, 0, width, color=INK, linewidth=0.8)


def draw_keys(
    axes: Axes,
    rows: PictureRows,
    query_start_loc: Int32,
    seq_lens: Int32,
    cp_size: int,
    window_size: int | None,
    cp_rank: int | None,
    *,
    plain: bool = False,
) -> None:
    """Keys that each query sees; operator rows outlined; cached keys hatched."""
    from matplotlib.patches import Rectangle

    num_rows, num_keys = len(rows.owners), max(1, int(seq_lens.max()))
    image = raster(rows, rows.last_keys, num_keys, shades(cp_size, cp_rank), window_size)
    draw_cells(axes, image, num_rows, num_keys, most_ticks=10 if plain else 20)
    ranges = request_ranges(rows)
    computed = seq_lens - np.diff(query_start_loc)
    if len(ranges) <= MOST_BOXES:
        for first, end, request in ranges:
            if request >= 0 and computed[request] > 0 and seq_lens[request] > 0:
                cached, count = int(computed[request]), int((rows.token_indices[first:end] >= 0).sum())
                # A white texture leaves the ranks' colours as they are.
                look = {"fill": False, "hatch": "////", "edgecolor": (1, 1, 1, 0.75), "linewidth": 0}
                axes.add_patch(Rectangle((0, first), cached, count, **look))
                axes.vlines(cached, first, first + count, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    draw_borders(axes, rows, num_keys)
    draw_pads(axes, rows, num_keys, named=not plain)
    boxes = rows.boxes if cp_rank is None else rows.boxes[rows.boxes[:, 3] == cp_rank]
    boxes = boxes[boxes[:, 2] > 0]
    if len(boxes) <= MOST_BOXES:
        for first, count, extent, _ in boxes.tolist():
            look = {"fill": False, "edgecolor": INK, "linewidth": 0.9, "clip_on": False, "zorder": 3}
            axes.add_patch(Rectangle((0, first), extent, count, **look))
    if not plain and len(boxes) <= MOST_NUMBERS and num_rows <= CELLS:
        for first, count, extent, _ in boxes.tolist():
            axes.text(extent + 0.012 * num_keys, first + count / 2, f"{extent:,}", va="center", fontsize=7.5)
    axes.set_xlabel("key position")


def draw_pads(axes: Axes, rows: PictureRows, width: float, *, named: bool) -> None:
    """Pad rows, and rows of a graph slot: there, and without keys."""
    from matplotlib.patches import Rectangle

    blank = rows.last_keys < 0
    kind = np.where(blank, rows.request_indices, -2)
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(kind)) + 1, [len(kind)]])
    runs = [(first, end) for first, end in pairwise(bounds.tolist()) if blank[first]]
    if len(runs) > MOST_BOXES:
        return
    for first, end in runs:
        look = {"fill": False, "hatch": "xxx", "edgecolor": "#bbbbbb", "linewidth": 0}
        axes.add_patch(Rectangle((0, first), width, end - first, **look))
        if named and end - first >= len(blank) / MOST_NUMBERS:
            kinds = {"pad" if token < 0 else "graph slot" for token in rows.token_indices[first:end].tolist()}
            label = " and ".join(sorted(kinds)) + ": no keys"
            paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2}
            axes.text(width / 2, (first + end) / 2, label, ha="center", va="center", fontsize=7.5, bbox=paper)


def draw_strip(
    axes: Axes, rows: PictureRows, query_start_loc: Int32, seq_lens: Int32, cp_size: int, cp_rank: int | None
) -> None:
    """The rank of each row, as a colour and, where there is room, as a number; names of the requests beside it."""
    num_rows = len(rows.owners)
    shade = shades(cp_size, cp_rank)
    image = shade[rows.owners[sampled(num_rows)]][:, None, :]
    axes.imshow(image, extent=(0, 1, num_rows, 0), aspect="auto", interpolation="nearest")
    draw_borders(axes, rows, 1)
    runs = np.flatnonzero(np.diff(rows.owners, prepend=-1) | np.diff(rows.request_indices, prepend=-2))
    ends = np.append(runs[1:], num_rows)
    if len(runs) <= CELLS:
        axes.hlines(runs[1:], 0, 1, color=PAPER, linewidth=0.7, zorder=1)
    tall = ends - runs >= num_rows / MOST_NUMBERS
    colors = rank_colors(cp_size)
    for first, end in zip(runs[tall].tolist(), ends[tall].tolist(), strict=True):
        rank = int(rows.owners[first])
        color = text_color(colors[rank] if cp_rank in (None, rank) else MUTED)
        axes.text(0.5, (first + end) / 2, f"{rank}", ha="center", va="center", fontsize=7.5, color=color)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set(xticks=[], yticks=[], xlabel="rank")
    names = [(first, end, request) for first, end, request in request_ranges(rows) if request >= 0]
    wide = [each for each in names if each[1] - each[0] >= num_rows / MOST_NAMES]
    for first, end, request in wide:
        new = int(query_start_loc[request + 1] - query_start_loc[request])
        cached = int(seq_lens[request]) - new
        label = f"request {request}"
        if end - first >= num_rows / 8:
            label += f"\n{new:,} new" + f"\n{cached:,} cached" * (cached > 0)
        axes.text(-0.25, (first + end) / 2, label, ha="right", va="center", fontsize=8)
    if not wide:
        axes.set_ylabel(f"{num_rows:,} rows of {len(names):,} requests")


def draw_entries(
    axes: Axes, rows: PictureRows, num_entries: int, compress_ratio: int, cp_size: int, cp_rank: int | None
) -> None:
    """Compressed entries that each query may see."""
    counts = visible_entries(rows.last_keys, compress_ratio)
    shade = shades(cp_size, cp_rank)
    draw_cells(axes, raster(rows, counts - 1, num_entries, shade, None), len(rows.owners), num_entries)
    draw_borders(axes, rows, num_entries)
    draw_pads(axes, rows, num_entries, named=False)
    axes.set_xlabel("entry")
    axes.set_title(f"1 for {compress_ratio} tokens", fontsize=8.5)


def draw_work(
    axes: Axes, work: NDArray[np.int64], cp_size: int, cp_rank: int | None, compress_ratio: int | None, places: float
) -> None:
    """How much each rank's queries see, in bars that leave room for at least so many."""
    colors = [color if cp_rank in (None, rank) else MUTED for rank, color in enumerate(rank_colors(cp_size))]
    axes.barh(np.arange(cp_size), work, color=colors, height=0.82 if cp_size <= 32 else 1.0)
    axes.set_ylim(max(cp_size, places) - 0.5, -0.5)
    step = -(-cp_size // 16)
    axes.set_yticks(range(0, cp_size, step), [f"rank {rank}" for rank in range(0, cp_size, step)])
    axes.tick_params(axis="y", length=0)
    if cp_size <= 16:
        for rank, value in enumerate(work.tolist()):
            axes.annotate(f"{value:,}", (value, rank), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.set_xticks([])
    axes.set_xlim(0, max(1, work.max()) * 1.02)
    words = "keys seen" if compress_ratio is None else "keys and entries seen"
    axes.set_title(f"{words}\n(largest {unevenness(work):.2f} × mean)", fontsize=8.5)


def unevenness(work: NDArray[np.int64]) -> float:
    """The largest share of the work over the mean one; 1 where there is none."""
    return float(work.max() / work.mean()) if work.any() else 1.0


def draw_shares(axes: Axes, work: NDArray[np.int64], cp_size: int) -> None:
    """The ranks' work side by side, and the mean as a line."""
    axes.bar(np.arange(cp_size), work, color=rank_colors(cp_size), width=0.85)
    axes.axhline(work.mean(), color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    axes.set_xticks(range(cp_size) if cp_size <= 16 else [0, cp_size - 1])
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"rank   (largest {unevenness(work):.2f} × mean)", fontsize=8)
