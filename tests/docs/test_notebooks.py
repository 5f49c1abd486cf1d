"""Every notebook runs from its first cell, gives what it shows, and ends with asserts."""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

from tests.docs.notebook_runs import NOTEBOOKS, executed, normalised

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
SOMEBODYS_PATH = re.compile(r"(?<![\w.])/(?:work|tmp|home|root|Users|mnt|var)/|[A-Z]:\\\\")
MEAN_DIFFERENCE = 2.0  # of 255: another version of matplotlib or freetype, but no other picture

pytestmark = pytest.mark.skipif(
    not NOTEBOOKS.exists(), reason="notebooks/ is missing: the tests run beside an installed wheel"
)
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: Any) -> str:
    """The text that a cell leaves behind, without what a picture says of itself as text."""
    texts = [output.get("text", "") for output in cell.outputs]
    texts += [
        output.data.get("text/plain", "") for output in cell.outputs if "data" in output and not pictures([output])
    ]
    return "\n".join(texts)


def pictures(outputs: list[Any]) -> list[np.ndarray]:
    from PIL import Image

    kept = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), np.int16) for data in kept]


def same_text(first: str, second: str) -> bool:
    """The same words and the same numbers, those to two digits: last digits differ between machines."""
    words = [re.sub(r"[ ─━═-]+", " ", NUMBER.sub("#", text)) for text in (first, second)]
    numbers = zip(NUMBER.findall(first), NUMBER.findall(second), strict=False)
    return words[0] == words[1] and all(
        math.isclose(float(one), float(other), rel_tol=0.02, abs_tol=1e-12) for one, other in numbers
    )


@pytest.mark.slow
@each_notebook
def test_a_notebook_gives_what_it_shows(path: Path) -> None:
    kept, fresh = nbformat.read(path, as_version=4), executed(path)
    for old, new in zip(code_cells(kept), code_cells(fresh), strict=True):
        assert [output.output_type for output in old.outputs] == [output.output_type for output in new.outputs], (
            f"run: make notebooks; at:\n{old.source}"
        )
        assert same_text(shown(old), shown(new)), f"run: make notebooks; shown {shown(old)!r}, now {shown(new)!r}"
        for before, now in zip(pictures(old.outputs), pictures(new.outputs), strict=True):
            assert np.abs(np.subtract(before.shape, now.shape)).max() <= 4, f"run: make notebooks; at:\n{old.source}"
            height, width = np.minimum(before.shape, now.shape)[:2]
            difference = np.abs(before[:height, :width] - now[:height, :width]).mean()
            assert difference < MEAN_DIFFERENCE, f"run: make notebooks; at:\n{old.source}"


@each_notebook
def test_a_notebook_ends_with_asserts(path: Path) -> None:
    assert re.search(r"^\s*assert ", code_cells(nbformat.read(path, as_version=4))[-1].source, re.MULTILINE)


@each_notebook
def test_a_notebook_is_kept_as_it_was_executed(path: Path) -> None:
    """Without warnings and errors, and without what differs from machine to machine."""
    notebook = nbformat.read(path, as_version=4)
    assert normalised(nbformat.read(path, as_version=4)) == notebook, "run: make notebooks"
    nbformat.validate(notebook)
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert not SOMEBODYS_PATH.search("\n".join([cell.source for cell in notebook.cells] + [str(outputs)]))
    assert path.stat().st_size < 1_500_000


@each_notebook
def test_a_notebook_has_something_to_say(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown"
    assert re.match(rf"# {int(path.stem[:2])}\. \S", cells[0].source), "its title begins with its number"
    assert sum(cell.cell_type == "markdown" for cell in cells) >= len(cells) / 3


def test_numbers_may_differ_in_their_last_digits_and_words_may_not() -> None:
    assert same_text("error 1.234e-16 of 12", "error 1.235e-16 of 12")
    assert not same_text("error 1.2 of 12", "error 1.5 of 12")
    assert not same_text("error 1.2", "error 1.2 of 12")
    assert not same_text("error 1.2", "value 1.2")
