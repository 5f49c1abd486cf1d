"""Pictures that commands and notebooks share: for everybody's eyes, in grey too, and the same file every time.

===================  ==================================================================================
`partition_picture`  queries x keys of a batch, coloured by the rank that owns the query
`splits_picture`     the same for several split rules, side by side
`heat_map`           numbers by row and column, with what is not visible and what is chosen marked
`bars`, `lines`      values by label, and curves with their names at their ends
`canvas`, `style`    an empty sheet, and our settings for the length of a ``with`` block: for drawings of your own
`saved`              the picture as .png, .svg or .pdf; the same picture is the same bytes
===================  ==================================================================================

Each of them returns a matplotlib `Figure` that a notebook shows by itself. None touches pyplot or the caller's
settings. matplotlib is imported when something is drawn: ``pip install 'dsacp[plot]'``.

Colours go from light to dark with the rank and change between warm and cool, so neither grey nor colour-blind eyes
lose them; still, a number, label, hatch or marker says everything that a colour says.
"""

from dsacp_npu.plots._charts import bars, heat_map, lines
from dsacp_npu.plots._drawing import INK, MUTED, PALETTE, PAPER, canvas, rank_colors, saved, style, text_color
from dsacp_npu.plots._partition_picture import partition_picture, splits_picture
from dsacp_npu.plots._partition_rows import PictureRows, picture_rows, visibility

__all__ = [
    "INK",
    "MUTED",
    "PALETTE",
    "PAPER",
    "PictureRows",
    "bars",
    "canvas",
    "heat_map",
    "lines",
    "partition_picture",
    "picture_rows",
    "rank_colors",
    "saved",
    "splits_picture",
    "style",
    "text_color",
    "visibility",
]
