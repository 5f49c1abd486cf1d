"""The one sheet that every picture is drawn on. Importing this module imports matplotlib; `dsacp_npu.plots` waits."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI, NOTEBOOK_DPI = 160, 110
STYLE = {
    "axes.edgecolor": "#444444",
    "axes.labelcolor": "#222222",
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "figure.dpi": 100,
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "font.family": "DejaVu Sans",  # matplotlib brings it, so a picture looks the same everywhere
    "font.size": 9,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "svg.hashsalt": "dsacp",
    "text.color": "#222222",
    "xtick.color": "#444444",
    "xtick.labelsize": 8,
    "ytick.color": "#444444",
    "ytick.labelsize": 8,
}
# What a file says about when and by which version it was made: left out, so that one picture is one file.
METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def style() -> AbstractContextManager[Any]:
    """matplotlib's settings for our pictures, until the block ends; whatever the user had set outside comes back."""
    # The defaults but for the backend: whoever sets that one loads a window system.
    defaults = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
    return matplotlib.rc_context(defaults | STYLE)


class Canvas(Figure):
    """A figure outside pyplot's list: nothing to close, no window, and a notebook shows it as it is."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(self)

    def save(self, path: Path | io.BytesIO, kind: str, dpi: int = DPI) -> None:
        """Write one format, the same bytes for the same drawing."""
        with style():
            self.draw_without_rendering()
            layout = self.get_layout_engine()
            self.set_layout_engine("none")
            for axes in self.axes:  # the solver's last bits differ from run to run, and an .svg names clips by them
                axes.set_position([round(float(bound), 6) for bound in axes.get_position().bounds])
            self.savefig(path, format=kind, dpi=dpi, metadata=METADATA[kind])
            self.set_layout_engine(layout)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.save(buffer, "png", NOTEBOOK_DPI)
        return buffer.getvalue()
