"""What every picture shares: colours, style, the sheet, the file. `dsacp_npu.plots` says more."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsacp_ref.spec import check_int, contract_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dsacp_npu.plots._canvas import Canvas

# CIELAB lightness 90, 80, 70, 60, 50, 40, 28, 12; warm and cool in turn.
PALETTE = ("#f6e46d", "#62d4fc", "#e59c3b", "#0c9eba", "#c65235", "#0960a6", "#6b295d", "#14212a")
PICKS = ((5,), (2, 5), (0, 3, 5), (0, 2, 3, 5), (0, 2, 3, 5, 7), (0, 1, 2, 4, 5, 7), (0, 1, 2, 3, 4, 5, 7), range(8))
INK, PAPER, MUTED = "#222222", "#ffffff", "#dddddd"
SUFFIXES = (".png", ".svg", ".pdf")


def canvas(width: float, height: float) -> Canvas:
    """An empty sheet of this many inches, for a drawing of your own; draw inside ``with style():``.

    >>> canvas(4, 2).get_size_inches().tolist()
    [4.0, 2.0]
    """
    return drawing().Canvas(width, height)


def style() -> AbstractContextManager[Any]:
    """matplotlib's settings for our pictures, for the length of a ``with`` block."""
    return drawing().style()


def drawing() -> Any:
    """The module that needs matplotlib."""
    try:
        from dsacp_npu.plots import _canvas
    except ModuleNotFoundError as error:
        raise ImportError(f"pictures are drawn with matplotlib ({error}); pip install 'dsacp[plot]'") from error
    return _canvas


def saved(figure: Figure, path: str | Path) -> Path:
    """The picture as a file, .png, .svg or .pdf; the same picture is the same bytes.

    >>> saved(canvas(1, 1), "picture.jpeg")
    Traceback (most recent call last):
    dsacp_ref.spec.ContractError: path must end in .png, .svg or .pdf, got 'picture.jpeg'; the ending chooses the format
    """
    path = checked_path(path)
    figure.save(path, path.suffix[1:].lower())  # type: ignore[attr-defined]  # of our own sheet
    return path


def checked_path(path: str | Path, name: str = "path") -> Path:
    """A path whose ending names a format."""
    if Path(path).suffix.lower() not in SUFFIXES:
        rule = f"end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise contract_error(name, rule, repr(str(path)), "the ending chooses the format")
    return Path(path)


def rank_colors(cp_size: int) -> list[str]:
    """One colour a rank, light to dark; beyond eight ranks the steps between are small, and their order is kept.

    >>> rank_colors(2)
    ['#e59c3b', '#0960a6']
    """
    cp_size = check_int("cp_size", cp_size, 1)
    if cp_size <= len(PALETTE):
        return [PALETTE[index] for index in PICKS[cp_size - 1]]
    # Mixed as light mixes: then every step is a step towards dark.
    known = np.array([linear(color) for color in PALETTE])
    places = np.linspace(0, len(PALETTE) - 1, cp_size)
    mixed = [np.interp(places, np.arange(len(PALETTE)), known[:, channel]) for channel in range(3)]
    return [hexadecimal(color) for color in zip(*mixed, strict=True)]


def rgb(color: str) -> tuple[float, float, float]:
    """Red, green and blue of ``#rrggbb``, from 0 to 1."""
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return red, green, blue


def linear(color: str) -> tuple[float, ...]:
    """The light in each channel of a colour: what a screen sends out."""
    return tuple(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in rgb(color))


def hexadecimal(light: Sequence[float]) -> str:
    """The way back from `linear`."""
    channels = [12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055 for value in light]
    return "#" + "".join(f"{round(255 * value):02x}" for value in channels)


def luminance(color: str) -> float:
    """How light a colour is, from 0 to 1: what is left of it in grey."""
    red, green, blue = linear(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def text_color(color: str) -> str:
    """Ink or paper, whichever reads better on this colour.

    >>> text_color("#ffffff"), text_color("#14212a")
    ('#222222', '#ffffff')
    """
    return INK if luminance(color) > 0.2 else PAPER
