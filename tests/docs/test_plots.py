"""`dsacp_npu.plots`: what is drawn is what the definition says, all can tell it apart, files come out the same."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import plots
from dsacp_npu.plots._drawing import luminance, rgb
from dsacp_npu.plots._partition_picture import MOST_RANKS
from dsacp_npu.plots._partition_rows import keys_seen
from dsacp_ref import ContractError, entry_mask, local_extents, visible_entries, window_mask
from tests import strategies
from tests.oracles import splits as oracle
from tests.strategies import Batch

RULES = ("contiguous", "contiguous_request", "zigzag", "zigzag_ceil", "zigzag_padded", "round_robin")
LOC, LENS = np.array([0, 12, 18], np.int32), np.array([16, 6], np.int32)


# --- what is drawn ---------------------------------------------------------------------------------------------------


@given(strategies.batches(), st.integers(1, 5), st.sampled_from([*RULES, "round_robin_page(3)"]), st.booleans())
def test_rows_are_the_partition_in_the_order_of_the_paper(batch: Batch, cp_size: int, split: str, causal: bool) -> None:
    rows = plots.picture_rows(batch.query_start_loc, batch.key_lens, cp_size, split=split, causal=causal)
    held = oracle.owned_tokens(batch.query_lens, cp_size, split)
    owner = {token: rank for rank, tokens in enumerate(held) for token in tokens if token >= 0}
    real = rows.token_indices >= 0
    assert rows.token_indices[real].tolist() == list(range(batch.num_tokens))
    assert rows.owners[real].tolist() == [owner[token] for token in range(batch.num_tokens)]
    assert (np.diff(np.where(rows.request_indices < 0, 99, rows.request_indices)) >= 0).all(), "request by request"
    pad_is_last = [(np.diff(real[rows.request_indices == request].astype(int)) <= 0).all() for request in range(9)]
    assert all(pad_is_last), "a request's pad rows stand behind its tokens"
    pads = np.bincount(rows.owners[~real], minlength=cp_size).tolist()
    assert pads == [sum(token < 0 for token in tokens) for tokens in held]
    last_keys = []
    for query_len, seq_len in zip(batch.query_lens, batch.seq_lens, strict=True):
        for offset in range(query_len):
            last = seq_len - query_len + offset if causal else seq_len - 1
            last_keys.append(last if seq_len else -1)
    assert rows.last_keys[real].tolist() == last_keys
    assert (rows.last_keys[~real] == -1).all()


@given(strategies.batches(), st.integers(1, 5), st.sampled_from([*RULES, "round_robin_page(3)"]))
def test_boxes_are_the_operator_rows(batch: Batch, cp_size: int, split: str) -> None:
    rows = plots.picture_rows(batch.query_start_loc, batch.key_lens, cp_size, split=split)
    for rank in range(cp_size):
        extents = local_extents(batch.query_start_loc, batch.key_lens, cp_size, rank, split=split)
        told = zip(np.diff(extents.cu_seqlens_q).tolist(), extents.seqused_kv.tolist(), strict=True)
        drawn = [(count, extent) for _, count, extent, owner in rows.boxes.tolist() if owner == rank]
        assert sorted(drawn) == sorted(row for row in told if row[0])
    for first, count, extent, rank in rows.boxes.tolist():
        assert set(rows.owners[first : first + count].tolist()) == {rank}
        assert rows.last_keys[first + count - 1] == extent - 1, (
            "the last query of an operator row sees its whole extent"
        )


@given(st.lists(st.integers(-1, 30), max_size=12), st.integers(1, 40), st.integers(1, 33))
def test_cells_are_the_masks(last_keys: list[int], num_keys: int, window_size: int) -> None:
    positions, keys = np.array(last_keys, np.int32), np.arange(num_keys, dtype=np.int32)
    state = plots.visibility(positions, keys, window_size=window_size)
    assert ((state == 2) == window_mask(positions, num_keys, window_size)).all()
    assert ((state > 0) == (keys <= positions[:, None])).all()
    counts = visible_entries(positions, 4)
    assert ((plots.visibility(counts - 1, keys) == 2) == entry_mask(positions, num_keys, 4)).all()


def test_without_causality_a_query_sees_its_whole_request() -> None:
    figure = plots.partition_picture(LOC, LENS, 2, causal=False)
    colored = (np.asarray(figure.axes[1].images[0].get_array()) < 1).any(axis=2)
    assert colored.sum(axis=1).tolist() == [16] * 12 + [6] * 6


def test_work_is_a_count_of_masks() -> None:
    rows = plots.picture_rows(LOC, LENS, 3, split="zigzag_padded")
    for rank in range(3):
        seen = rows.last_keys[rows.owners == rank]
        expected = int(window_mask(seen, 16, 5).sum() + entry_mask(seen, 4, 4).sum())
        assert keys_seen(rows, 3, window_size=5, compress_ratio=4)[rank] == expected


def test_the_raster_of_a_small_picture_is_its_cells() -> None:
    figure = plots.partition_picture(LOC, LENS, 2, split="zigzag", window_size=3)
    image = np.asarray(figure.axes[1].images[0].get_array())
    colors = np.array([rgb(color) for color in plots.rank_colors(2)])
    rows = plots.picture_rows(LOC, LENS, 2, split="zigzag")
    state = plots.visibility(rows.last_keys, np.arange(16, dtype=np.int32), window_size=3)
    assert image.shape == (18, 16, 3)
    assert np.allclose(image[state == 2], colors[rows.owners].repeat((state == 2).sum(axis=1), axis=0))
    assert (image[state == 0] == 1).all()
    pale = image[state == 1]
    assert (pale < 1).any(axis=1).all()
    assert (pale > 0.5).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths, cp_size, split",
    [([100_000], 64, "round_robin"), ([60_000, 40_000], 512, "zigzag"), ([1] * 500, 12, "contiguous")],
)
def test_a_raster_is_bounded(lengths: list[int], cp_size: int, split: str, tmp_path: Path) -> None:
    query_start_loc = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    figure = plots.partition_picture(query_start_loc, np.array(lengths, np.int32), cp_size, split=split)
    assert all(max(image.get_array().shape) <= 1200 for axes in figure.axes for image in axes.images)
    assert sum(len(axes.texts) + len(axes.patches) for axes in figure.axes) < 1500
    assert plots.saved(figure, tmp_path / "big.png").stat().st_size < 500_000


# --- who can tell it apart -------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes (2009), severity 1, on linear light.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(color: str, blindness: str = "none") -> np.ndarray:
    """CIELAB of a colour as these eyes see it."""
    channels = np.array(rgb(color))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(BLINDNESS[blindness]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.array(to_xyz) @ linear / np.array([0.9505, 1.0, 1.089])
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("cp_size", range(1, 9))
def test_ranks_differ_in_grey(cp_size: int) -> None:
    light = [lab(color)[0] for color in plots.rank_colors(cp_size)]
    assert all(before - after >= 9 for before, after in pairwise(light)), "from light to dark"


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_ranks_differ_for_everybody(blindness: str) -> None:
    for first, second in combinations(plots.rank_colors(8), 2):
        assert np.linalg.norm(lab(first, blindness) - lab(second, blindness)) >= 18, (first, second)


@pytest.mark.parametrize("cp_size", [9, 16, 64, 500])
def test_many_ranks_go_from_light_to_dark(cp_size: int) -> None:
    light = [luminance(color) for color in plots.rank_colors(cp_size)]
    assert len(light) == cp_size
    assert all(before >= after - 0.004 for before, after in pairwise(light))
    assert light[0] > 0.7
    assert light[-1] < 0.1


@pytest.mark.parametrize("color", [*plots.PALETTE, plots.MUTED])
def test_numbers_can_be_read_on_every_colour(color: str) -> None:
    light, dark = sorted([luminance(color), luminance(plots.text_color(color))], reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4  # WCAG asks 4.5 of small print, 3 of large


def test_ranks_are_named_and_not_only_coloured() -> None:
    figure = plots.partition_picture(LOC, LENS, 4, split="zigzag")
    strip, keys, work = figure.axes
    numbers = [text.get_text() for text in strip.texts if text.get_text().isdigit()]
    assert "".join(numbers) == "012321001232", "one a run of tokens"
    assert [label.get_text() for label in work.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]
    extents = {text.get_text() for text in keys.texts}
    boxes = plots.picture_rows(LOC, LENS, 4, split="zigzag").boxes
    assert extents == {str(extent) for extent in boxes[:, 2].tolist()}
    many = plots.partition_picture(np.array([0, 6400], np.int32), np.array([6400], np.int32), 64, split="zigzag")
    assert len(many.axes[-1].get_yticklabels()) == 16


def test_curves_differ_in_more_than_colour() -> None:
    curves = plots.lines(range(3), {f"c{i}": [i, i, i] for i in range(6)}, xlabel="x", ylabel="y").axes[0].get_lines()
    assert len({(line.get_marker(), line.get_linestyle()) for line in curves}) == 6
    stacked = plots.bars(["a"], {f"p{i}": [1] for i in range(6)}, xlabel="n").axes[0].patches
    assert len({patch.get_hatch() for patch in stacked}) == 6


def test_names_at_the_ends_do_not_touch() -> None:
    figure = plots.lines([1, 2], {f"curve {i}": [1, 1 + i / 1000] for i in range(6)}, xlabel="x", ylabel="y")
    heights = sorted(text.get_position()[1] for text in figure.axes[0].texts)
    assert len(heights) == 6
    assert np.diff(heights).min() > 0.07
    assert heights[-1] <= 1.01


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_picture_is_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{turn}{suffix}" for turn in range(2)]
    for path in paths:
        plots.saved(plots.partition_picture(LOC, LENS, 2, compress_ratio=4), path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert b"matplotlib.org" not in first or suffix != ".png"


def test_a_picture_can_be_saved_again(tmp_path: Path) -> None:
    figure = plots.heat_map(np.eye(3), xlabel="entry", ylabel="query", value_label="score", title="Scores")
    first, second = (plots.saved(figure, tmp_path / name).read_bytes() for name in ("first.png", "second.png"))
    assert first == second


@pytest.mark.parametrize("name", ["picture.jpeg", "picture", "picture.png.txt"])
def test_an_unknown_ending_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"path must end in \.png, \.svg or \.pdf, got"):
        plots.saved(plots.canvas(1, 1), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_notebook_shows_a_picture_by_itself() -> None:
    assert plots.canvas(1, 1)._repr_png_().startswith(b"\x89PNG")


def test_settings_outside_stay_as_they_are() -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 31.0, "axes.grid": True}):
        before = dict(matplotlib.rcParams)
        figure = plots.partition_picture(LOC, LENS, 2)
        assert figure.axes[1].xaxis.label.get_fontsize() == 9, "ours inside"
        assert dict(matplotlib.rcParams) == before


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query_start_loc, seq_lens",
    [([0], []), ([0, 0, 0], [0, 0]), ([0, 0], [7])],
)
def test_nothing_to_draw_is_refused(query_start_loc: list[int], seq_lens: list[int]) -> None:
    with pytest.raises(ContractError, match="the batch must have a token to be drawn"):
        plots.partition_picture(np.array(query_start_loc, np.int32), np.array(seq_lens, np.int32), 2)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"cp_rank": 2}, r"cp_rank must be an int in \[0, 1\], got 2"),
        ({"split": "diagonal"}, "split must be one of"),
        ({"window_size": 0}, "window_size must be an int"),
        ({"compress_ratio": 0}, "compress_ratio must be an int"),
        ({"causal": False, "window_size": 3}, "must be left out when causal is False"),
        ({"num_input_tokens": 3}, "num_input_tokens must be"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict, text: str) -> None:
    with pytest.raises(ContractError, match=text):
        plots.partition_picture(LOC, LENS, 2, **options)


def test_more_ranks_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(ContractError, match=f"{MOST_RANKS}.*more ranks cannot be told apart"):
        plots.partition_picture(LOC, LENS, MOST_RANKS + 1)
    with pytest.raises(ContractError, match="splits must name at least one rule"):
        plots.splits_picture(LOC, LENS, 2, [])


@pytest.mark.parametrize(
    "draw, text",
    [
        (lambda: plots.bars(["a"], [1, 2], xlabel="n"), "values must have 1 entries, got 2; one a label"),
        (lambda: plots.bars(["a"], {}, xlabel="n"), "values must be 1 to 6 series, got 0"),
        (lambda: plots.bars(["a"], [1], xlabel="n", colors=[]), "colors must have 1 entries, got 0"),
        (lambda: plots.lines([1], {"c": []}, xlabel="", ylabel=""), "curves 'c' must have 1 entries, got 0"),
        (lambda: plots.lines([1], {"c": [1]}, xlabel="", ylabel="", log="z"), "log must be one of"),
        (lambda: plots.lines([1], {str(i): [1] for i in range(7)}, xlabel="", ylabel=""), "draw two"),
        (lambda: plots.heat_map([1], xlabel="", ylabel="", value_label=""), "values must have rows and columns"),
        (
            lambda: plots.heat_map([[1]], xlabel="", ylabel="", value_label="", num_visible=[1, 2]),
            "num_visible must have 1 entries, got 2; one a row",
        ),
    ],
)
def test_charts_refuse_what_does_not_fit(draw, text: str) -> None:
    with pytest.raises(ContractError, match=text):
        draw()


# --- what is loaded --------------------------------------------------------------------------------------------------


def test_a_heat_map_marks_what_is_chosen_and_hides_what_is_not_visible() -> None:
    scores, visible, chosen = np.arange(12.0).reshape(3, 4), [0, 2, 4], np.array([[-1, -1], [1, -1], [3, 0]])
    axes = plots.heat_map(scores, xlabel="", ylabel="", value_label="", num_visible=visible, chosen=chosen).axes[0]
    drawn = np.ma.filled(np.ma.masked_invalid(axes.images[0].get_array()), -1)
    assert drawn.tolist() == [[-1] * 4, [4, 5, -1, -1], [8, 9, 10, 11]]
    assert axes.collections[0].get_offsets().tolist() == [[1, 1], [3, 2], [0, 2]]


def test_nothing_heavy_is_loaded_before_something_is_drawn() -> None:
    heavy = {"matplotlib", "torch", "rich", "IPython", "PIL"}
    code = f"import sys, dsacp_npu.plots\nheavy = {heavy} & set(sys.modules)\nsys.exit(', '.join(sorted(heavy)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_pyplot_is_never_loaded() -> None:
    code = "import sys, numpy as np\nfrom dsacp_npu import plots\n"
    code += "plots.partition_picture(np.array([0, 3], np.int32), np.array([3], np.int32), 2)._repr_png_()\n"
    code += "sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    code = "import sys\nsys.modules['matplotlib'] = None\nfrom dsacp_npu import plots\nplots.canvas(1, 1)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: pictures are drawn with matplotlib" in result.stderr
    assert result.stderr.rstrip().endswith("pip install 'dsacp[plot]'")
