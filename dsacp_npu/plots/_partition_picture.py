"""A partition drawn: queries x keys, each query in the colour of the rank that owns it.

::

    strip     keys                                   entries            work
    rank of   coloured where the query sees the key, the same for what  keys and entries
    each row  operator rows outlined to their extent  is compressed      that each rank's queries see
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dsacp_npu.plots._drawing import canvas, style
from dsacp_npu.plots._partition_panels import MOST_BOXES, draw_entries, draw_keys, draw_shares, draw_strip, draw_work
from dsacp_npu.plots._partition_rows import Int32, PictureRows, keys_seen, picture_rows
from dsacp_ref.config import split_rule
from dsacp_ref.extents import check_batch
from dsacp_ref.partition import checked_ranks
from dsacp_ref.spec import check_int, contract_error
from dsacp_ref.visibility import visible_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS = 512


def partition_picture(
    query_start_loc: Int32,
    seq_lens: Int32,
    cp_size: int,
    *,
    split: str = "contiguous",
    num_input_tokens: int | None = None,
    causal: bool = True,
    window_size: int | None = None,
    compress_ratio: int | None = None,
    cp_rank: int | None = None,
) -> Figure:
    """Who owns which query, and the keys that it sees.

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, first 0; at least one token.
        seq_lens: int32[num_reqs], tokens, all keys of the request with this step's; 0 for a padded graph slot.
        cp_size: int, ranks that share the stream, >= 1.
        split: str, a rule of `SPLITS`.
        num_input_tokens: int or None, rows of the padded stream (see `rank_pieces`).
        causal: bool; False gives every row with queries its whole request.
        window_size: int or None, tokens; keys before the window are then pale.
        compress_ratio: int or None, tokens per entry; the entries that a query may see are then drawn beside its keys.
        cp_rank: int or None, the one rank to show in colour.

    Returns:
        Figure: a notebook shows it, `saved` writes it.

    Raises:
        ContractError: a value does not hold, or there is nothing to draw.

    >>> figure = partition_picture(np.array([0, 5], np.int32), np.array([9], np.int32), 2, split="zigzag")
    >>> [axes.get_xlabel() for axes in figure.axes]
    ['rank', 'key position', '']
    """
    rows = drawable_rows(query_start_loc, seq_lens, cp_size, split, num_input_tokens, causal)
    if not causal and (window_size, compress_ratio) != (None, None):
        hint = "which keys and entries a window leaves a query is a causal rule"
        raise contract_error("window_size and compress_ratio", "be left out when causal is False", "one of them", hint)
    if cp_rank is not None:
        cp_rank = checked_ranks(cp_size, cp_rank)[1]
    num_entries = 0 if compress_ratio is None else int(visible_entries(rows.last_keys, compress_ratio).max())
    with style():
        height = picture_height(len(rows.owners), cp_size)
        figure = canvas(8.6, height + 1.0)
        columns = ["strip", "keys", *["entries"] * (num_entries > 0), "work"]
        widths = {"strip": 0.28, "keys": 5.0 - 1.3 * (num_entries > 0), "entries": 1.3, "work": 1.45}
        grid = figure.subplots(1, len(columns), width_ratios=[widths[name] for name in columns])
        axes = dict(zip(columns, np.atleast_1d(grid), strict=True))
        draw_strip(axes["strip"], rows, query_start_loc, seq_lens, cp_size, cp_rank)
        draw_keys(axes["keys"], rows, query_start_loc, seq_lens, cp_size, window_size, cp_rank)
        if compress_ratio is not None and num_entries > 0:
            draw_entries(axes["entries"], rows, num_entries, compress_ratio, cp_size, cp_rank)
        work = keys_seen(rows, cp_size, window_size=window_size, compress_ratio=compress_ratio)
        draw_work(axes["work"], work, cp_size, cp_rank, compress_ratio, places=3.6 * height)
        title = f"{split_rule(split)}, cp_size {cp_size}: {counted(rows, query_start_loc, seq_lens)}"
        figure.suptitle(title, x=0.01, ha="left")
        legend = legend_words(rows, query_start_loc, seq_lens, window_size)
        figure.supxlabel(legend, x=0.01, ha="left", fontsize=8.5)
    return figure


def splits_picture(
    query_start_loc: Int32, seq_lens: Int32, cp_size: int, splits: Sequence[str], *, window_size: int | None = None
) -> Figure:
    """One batch under several split rules, side by side, with each rank's share of the keys seen below.

    Args:
        query_start_loc, seq_lens, cp_size, window_size: as in `partition_picture`.
        splits: rules of `SPLITS`, at least one.

    Raises:
        ContractError: a value does not hold, or there is nothing to draw.

    >>> loc, lens = np.array([0, 5], np.int32), np.array([9], np.int32)
    >>> [axes.get_title("left") for axes in splits_picture(loc, lens, 2, ["contiguous", "zigzag"]).axes[:2]]
    ['contiguous', 'zigzag']
    """
    if not splits:
        raise contract_error("splits", "name at least one rule", "none")
    pictures = [drawable_rows(query_start_loc, seq_lens, cp_size, split, None, True) for split in splits]
    works = [keys_seen(rows, cp_size, window_size=window_size, compress_ratio=None) for rows in pictures]
    across = min(4, len(splits))
    lines = -(-len(splits) // across)
    with style():
        figure = canvas(2.3 * across + 0.3, lines * 3.3)
        # A picture and its balance stand on top of each other, line by line.
        grid = figure.subplots(2 * lines, across, squeeze=False, height_ratios=[3, 0.8] * lines)
        uppers, lowers = grid[::2].ravel(), grid[1::2].ravel()
        for split, rows, work, upper, lower in zip(splits, pictures, works, uppers, lowers, strict=False):
            draw_keys(upper, rows, query_start_loc, seq_lens, cp_size, window_size, None, plain=True)
            upper.set_title(str(split_rule(split)))
            draw_shares(lower, work, cp_size)
        for spare in (*uppers[len(splits) :], *lowers[len(splits) :]):
            spare.remove()
        for line in range(lines):
            grid[2 * line, 0].set_ylabel("query")
            grid[2 * line + 1, 0].set_ylabel("keys\nseen")
    return figure


def drawable_rows(
    query_start_loc: Int32, seq_lens: Int32, cp_size: int, split: str, num_input_tokens: int | None, causal: bool
) -> PictureRows:
    """The rows of a batch that has any."""
    check_batch(query_start_loc, seq_lens)
    check_int("cp_size", cp_size, 1, MOST_RANKS, "more ranks cannot be told apart")
    rows = picture_rows(
        query_start_loc, seq_lens, cp_size, split=split, num_input_tokens=num_input_tokens, causal=causal
    )
    if not len(rows.owners) or not len(seq_lens):
        raise contract_error("the batch", "have a token to be drawn", "an empty one", "a picture's rows are queries")
    return rows


def picture_height(num_rows: int, cp_size: int) -> float:
    """Inches for rows and for the bars beside them."""
    return float(min(6.2, max(2.1, 0.17 * num_rows, 0.2 * min(cp_size, 16))))


def counted(rows: PictureRows, query_start_loc: Int32, seq_lens: Int32) -> str:
    """What the batch is, in a few words."""
    num_tokens, num_reqs = int(query_start_loc[-1]), len(seq_lens)
    cached = int(np.maximum(seq_lens - np.diff(query_start_loc), 0)[seq_lens > 0].sum())
    words = [f"{num_reqs} request{'s' * (num_reqs != 1)}", f"{num_tokens:,} new token{'s' * (num_tokens != 1)}"]
    words += [f"{cached:,} cached"] * (cached > 0)
    pad = len(rows.owners) - num_tokens
    return ", ".join(words + [f"{pad:,} pad row{'s' * (pad != 1)}"] * (pad > 0))


def legend_words(rows: PictureRows, query_start_loc: Int32, seq_lens: Int32, window_size: int | None) -> str:
    """What the marks mean, as far as they are there."""
    words = ["Each row is a query in its rank's colour, as far as it sees keys"]
    words += [f"pale: before its window of {window_size}"] * (window_size is not None)
    words += ["hatched: cached"] * bool((seq_lens > np.diff(query_start_loc)).any())
    words += ["outlined: an operator row, to its key extent"] * (len(rows.boxes) <= MOST_BOXES)
    return textwrap.fill(";  ".join(words) + ".", 130)
