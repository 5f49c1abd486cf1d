"""`python -m dsacp_npu explain --plot`: draws the call that it explains, and says what it cannot draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsacp_npu import plots
from dsacp_npu.__main__ import main
from dsacp_npu.commands import explain

BATCH = "--query-lens 12 6 --computed 4 0 --cp-size 4 --split zigzag"


def explained(options: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["explain", *options.split()])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "PNG"])
def test_the_picture_comes_with_the_table(suffix: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / f"batch.{suffix}"
    code, with_picture, err = explained(f"{BATCH} --plot {path}", capsys)
    assert (code, err) == (0, "")
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    assert with_picture == explained(BATCH, capsys)[1]


def test_json_stays_json(tmp_path: Path, capsys) -> None:
    _, out, _ = explained(f"{BATCH} --json --plot {tmp_path / 'batch.png'}", capsys)
    assert json.loads(out)["num_tokens"] == 18


def test_every_option_is_drawn(tmp_path: Path, monkeypatch) -> None:
    drawn: dict[str, Any] = {}

    def picture(query_start_loc: np.ndarray, seq_lens: np.ndarray, cp_size: int, **options: Any) -> Any:
        drawn.update(options, query_start_loc=query_start_loc.tolist(), seq_lens=seq_lens.tolist(), cp_size=cp_size)
        return plots.canvas(1, 1)

    monkeypatch.setattr(explain.plots, "partition_picture", picture)
    words = f"--query-lens 5 --computed 4 --cp-size 2 --num-input-tokens 7 --rank 1 --plot {tmp_path / 'batch.png'}"
    assert main(["explain", *words.split(), "--non-causal"]) == 0
    assert drawn == {
        "query_start_loc": [0, 5],
        "seq_lens": [9],
        "cp_size": 2,
        "split": "contiguous",
        "num_input_tokens": 7,
        "causal": False,
        "compress_ratio": None,
        "cp_rank": 1,
    }
    assert main(["explain", *words.split(), "--compress-ratio", "4"]) == 0
    assert drawn["compress_ratio"] == 4


@pytest.mark.parametrize(
    "options, words",
    [
        ("--query-lens 3 --cp-size 2 --plot batch.gif", "--plot must end in .png, .svg or .pdf, got 'batch.gif'"),
        ("--query-lens 3 --cp-size 2 --plot batch", "--plot must end in .png, .svg or .pdf, got 'batch'"),
        ("--query-lens --cp-size 2 --plot batch.png", "the batch must have a token to be drawn, got an empty one"),
        ("--query-lens 0 --computed 4 --cp-size 2 --plot batch.png", "the batch must have a token to be drawn"),
        ("--query-lens 3 --cp-size 600 --plot batch.png", "more ranks cannot be told apart"),
        ("--query-lens 3 --cp-size 2 --rank 2 --plot batch.png", "cp_rank must be an int in [0, 1], got 2"),
        ("--query-lens 3 --cp-size 2 --plot missing/batch.png", "no file or folder missing/batch.png, seen from"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(options: str, words: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = explained(options, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("dsacp_npu explain: error: ")
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_says_what_plot_does(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    text = capsys.readouterr().out
    assert "--plot FILE" in text
    assert "--plot batch.png" in text, "and shows it"
