"""The pictures of README and docs are what `make pictures` draws."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from dsacp_npu.__main__ import main

ROOT = Path(__file__).parents[2]
MAKEFILE = ROOT / "Makefile"
PICTURES = ROOT / "docs" / "pictures"
# Other versions of matplotlib and freetype round glyphs and edges a little otherwise; another batch, or other colours,
# is far beyond this.
MEAN_DIFFERENCE = 1.0  # of 255

pytestmark = pytest.mark.skipif(
    not PICTURES.exists() or not MAKEFILE.exists(), reason="docs/ is missing: the tests run beside an installed wheel"
)


def commands() -> dict[str, list[str]]:
    """The words that draw each picture, from the Makefile."""
    recipe = MAKEFILE.read_text().partition("\npictures:")[2].partition("\n\n")[0]
    lines = re.findall(r"^\t\$\(BIN\)/python -m dsacp_npu (.*--plot (\S+)) > /dev/null$", recipe, re.MULTILINE)
    assert len(lines) == recipe.count("\t"), "every line of the recipe draws"
    return {Path(path).name: shlex.split(words) for words, path in lines}


def pixels(data: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int16)


def test_every_picture_has_its_command() -> None:
    assert set(commands()) == {path.name for path in PICTURES.iterdir()}


@pytest.mark.parametrize("name", commands() if MAKEFILE.exists() else [])
def test_a_picture_is_what_its_command_draws(name: str, tmp_path: Path, capsys) -> None:
    words = commands()[name]
    assert words[-1] == f"docs/pictures/{name}"
    path = tmp_path / name
    assert main([*words[:-1], str(path)]) == 0
    drawn, kept = pixels(path.read_bytes()), pixels((PICTURES / name).read_bytes())
    assert drawn.shape == kept.shape, "run: make pictures"
    assert np.abs(drawn - kept).mean() < MEAN_DIFFERENCE, "run: make pictures"


def test_another_batch_would_be_noticed(tmp_path: Path, capsys) -> None:
    words = commands()["partition.png"]
    path = tmp_path / "other.png"
    other = [{"zigzag": "zigzag_ceil"}.get(word, word) for word in words[:-1]]
    assert main([*other, str(path)]) == 0
    drawn, kept = pixels(path.read_bytes()), pixels((PICTURES / "partition.png").read_bytes())
    assert drawn.shape == kept.shape
    assert np.abs(drawn - kept).mean() > 3 * MEAN_DIFFERENCE
