"""Bars, curves and heat maps, named where they stand instead of in a legend where that can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsacp_npu.plots._drawing import INK, PALETTE, PAPER, canvas, style
from dsacp_ref.spec import check_choice, contract_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = tuple(PALETTE[index] for index in (5, 4, 3, 6, 2, 7))  # none too pale for a thin line
MARKERS, DASHES = "osD^vP", ("-", "--", "-.", ":")
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "++")
LOGS = ("", "x", "y", "xy")


def bars(
    labels: Sequence[str],
    values: Sequence[float] | Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    title: str = "",
    colors: Sequence[str] | None = None,
    number: str = "{:,.3g}",
) -> Figure:
    """Values by label, as bars with their numbers; several named parts of each value are stacked.

    Args:
        labels: one a bar, first on top.
        values: one a label, >= 0; or for each part its name and one value a label.
        xlabel: what is counted, with its unit.
        title: str.
        colors: one a bar, such as `rank_colors`; None for our own. Stacked parts have their own.
        number: how a number is written, for ``str.format``.

    Raises:
        ContractError: counts that do not fit each other.

    >>> bars(["rank 0", "rank 1"], {"weights": [4, 4], "caches": [3, 2]}, xlabel="GiB").axes[0].get_xlabel()
    'GiB'
    """
    parts = values if isinstance(values, Mapping) else {"": values}
    for name, part in parts.items():
        checked_length(f"values {name!r}" if name else "values", part, len(labels), "one a label")
    if colors is not None:
        checked_length("colors", colors, len(labels), "one a label")
    checked_series("values", parts, HATCHES)
    places = np.arange(len(labels))
    with style():
        figure = canvas(7.0, 0.9 + 0.28 * len(labels) + 0.25 * (len(parts) > 1))
        axes: Axes = figure.subplots()
        left = np.zeros(len(labels))
        for (name, part), color, hatch in zip(parts.items(), SERIES, HATCHES, strict=False):
            face = colors if colors is not None and len(parts) == 1 else color
            widths = np.asarray(part, float)
            axes.barh(places, widths, left=left, height=0.72, color=face, hatch=hatch, edgecolor=PAPER, label=name)
            left += widths
        for place, total in zip(places, left, strict=True):
            text = number.format(total)
            axes.annotate(text, (total, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set(xlabel=xlabel, xlim=(0, max(float(left.max(initial=0)), 1e-30) * 1.12), ylim=(len(labels) - 0.5, -0.5))
        axes.set_yticks(places, labels)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        if len(parts) > 1:
            figure.legend(loc="outside lower right", ncols=len(parts))  # above, it would meet a long title
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def lines(
    x: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    log: str = "",
) -> Figure:
    """Curves over common points, each with its marker and dashes, and its name at its end.

    Args:
        x: the points, ascending.
        curves: for each curve its name and one value a point; NaN where there is none. At most six.
        xlabel, ylabel: what is counted, with its unit.
        title: str.
        log: the axes that count in powers: ``""``, ``"x"``, ``"y"`` or ``"xy"``; x in powers of 2, y of 10.

    Raises:
        ContractError: counts that do not fit each other, or an unknown word.

    >>> figure = lines([1, 2, 4], {"zigzag": [1, 1, 1], "contiguous": [1, 1.5, 1.8]}, xlabel="ranks", ylabel="x mean")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['zigzag', 'contiguous']
    """
    check_choice("log", log, LOGS)
    checked_series("curves", curves, MARKERS)
    for name, values in curves.items():
        checked_length(f"curves {name!r}", values, len(x), "one value a point of x")
    with style():
        figure = canvas(7.0, 3.6)
        axes: Axes = figure.subplots()
        for index, (name, values) in enumerate(curves.items()):
            look = {"color": SERIES[index], "marker": MARKERS[index], "linestyle": DASHES[index % len(DASHES)]}
            axes.plot(x, np.asarray(values, float), markersize=5, linewidth=1.6, label=name, **look)
        if "x" in log:
            axes.set_xscale("log", base=2)
            axes.set_xticks(x, [short(value) for value in x])  # the points themselves, not powers
        if "y" in log:
            axes.set_yscale("log")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
        axes.set_axisbelow(True)
        name_ends(axes, x, curves)
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def short(number: float) -> str:
    """A number on an axis: 131072 is 128k, as one says of tokens.

    >>> short(1), short(1536), short(131072), short(2**20), short(1000)
    ('1', '1536', '128k', '1M', '1000')
    """
    for unit, sign in ((1 << 20, "M"), (1 << 10, "k")):
        if number and number % unit == 0:
            return f"{number // unit:g}{sign}"
    return f"{number:g}"


def name_ends(axes: Axes, x: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    """The name of each curve beside its last point, moved apart where two would touch."""
    to_axes = axes.transData + axes.transAxes.inverted()
    places = {}
    for name, values in curves.items():
        there = np.flatnonzero(np.isfinite(np.asarray(values, float)))
        if len(there):
            places[name] = float(to_axes.transform((x[there[-1]], values[there[-1]]))[1])
    gap, lowest = 0.075, -np.inf
    shifted = {}
    for name in sorted(places, key=places.__getitem__):
        shifted[name] = lowest = max(min(places[name], 1.0), lowest + gap)
    over = max(0.0, max(shifted.values(), default=0.0) - 1.0)  # a crowd at the top moves down together
    for index, name in enumerate(curves):
        if name in shifted:
            axes.text(1.02, shifted[name] - over, name, transform=axes.transAxes, color=SERIES[index], va="center")


def heat_map(
    values: Any,
    *,
    xlabel: str,
    ylabel: str,
    value_label: str,
    title: str = "",
    num_visible: Any = None,
    chosen: Any = None,
) -> Figure:
    """Numbers by row and column; what a row may not see is left white, what it has chosen carries a dot.

    Args:
        values: float[rows, columns].
        xlabel, ylabel, value_label: what columns, rows and numbers are.
        title: str.
        num_visible: int[rows], the leading columns that each row may see; None for all.
        chosen: int[rows, k], columns that each row has chosen, -1 for none, such as `selected_entries` gives; or None.

    Raises:
        ContractError: shapes that do not fit each other.

    >>> heat_map(np.eye(2), xlabel="entry", ylabel="query", value_label="score").axes[0].get_ylabel()
    'query'
    """
    values = np.asarray(values, float)
    if values.ndim != 2 or not values.size:
        raise contract_error("values", "have rows and columns", list(values.shape), "one number a cell")
    num_rows, num_columns = values.shape
    shown = values
    if num_visible is not None:
        checked_length("num_visible", num_visible, num_rows, "one a row")
        shown = np.where(np.arange(num_columns) < np.asarray(num_visible)[:, None], values, np.nan)
    with style():
        figure = canvas(7.6, min(6.0, max(2.4, 1.0 + 0.16 * num_rows)))
        axes: Axes = figure.subplots()
        image = axes.imshow(shown, cmap="cividis", aspect="auto", interpolation="nearest")
        if num_visible is not None:
            limit = np.repeat(np.asarray(num_visible, float), 2) - 0.5
            edges = np.repeat(np.arange(num_rows + 1), 2)[1:-1] - 0.5
            axes.plot(limit, edges, color=INK, linewidth=1.0)
        if chosen is not None:
            chosen = np.asarray(chosen)
            checked_length("chosen", chosen, num_rows, "one list a row")
            rows, places = np.nonzero(chosen >= 0)
            size = min(36.0, 9000 / max(num_rows * num_columns, 1) + 6)
            axes.scatter(chosen[rows, places], rows, s=size, facecolor=PAPER, edgecolor=INK, linewidth=0.8)
        axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(-0.5, num_columns - 0.5), ylim=(num_rows - 0.5, -0.5))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
        bar = figure.colorbar(image, ax=axes, label=value_label, shrink=0.85, pad=0.02)
        bar.outline.set_visible(False)
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def checked_length(name: str, values: Any, length: int, hint: str) -> None:
    """Refuse another number of values than there is room for."""
    if len(values) != length:
        raise contract_error(name, f"have {length} entries", len(values), hint)


def checked_series(name: str, series: Mapping[str, Any], signs: Sequence[str]) -> None:
    """Refuse more series than can be told apart."""
    if not 1 <= len(series) <= len(signs):
        raise contract_error(name, f"be 1 to {len(signs)} series", len(series), "more cannot be told apart: draw two")
