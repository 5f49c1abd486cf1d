"""What README shows is what happens."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(
    not README.exists(), reason="README.md is missing: the tests run beside an installed wheel"
)


def test_python_snippets_run() -> None:
    results = doctest.testfile(str(README), module_relative=False)
    assert results.attempted > 0
    assert results.failed == 0


def test_the_first_twelve_lines_run_and_say_true() -> None:
    """As they are pasted, in a process that has no torch."""
    code = re.search(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)[1]  # type: ignore[index]
    assert len([line for line in code.splitlines() if line]) == 12
    assert code.endswith("  # True\n")
    alone = "import sys\nsys.modules['torch'] = None\n" + code
    done = subprocess.run([sys.executable, "-"], input=alone, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_three_hops_lead_from_an_idea_to_its_proof() -> None:
    table = README.read_text().partition("| idea | docstring | law |")[2].partition("\n\n")[0]
    rows = [row.split("|")[2:4] for row in table.splitlines()[2:]]
    assert len(rows) >= 4
    for docstring, law in rows:
        path, name = re.findall(r"`(.*?)`", docstring)
        function = getattr(import_module(path.removesuffix(".py").replace("/", ".")), name)
        assert inspect.getdoc(function)
        assert name in (ROOT / law.strip(" `")).read_text()


def test_every_module_has_a_row() -> None:
    text = README.read_text()
    for module in (ROOT / "dsacp_ref").glob("[a-z]*.py"):
        assert f"`{module.stem}`" in text, module.stem


def test_a_twin_is_claimed_exactly_where_there_is_one() -> None:
    table = README.read_text().partition("| module of `dsacp_ref` |")[2].partition("\n\n")[0]
    for row in re.findall(r"^\| `.*\|$", table, re.MULTILINE):
        names, twin = re.findall(r"`(\w+)`", row.split("|")[1]), row.split("|")[-2].strip()
        for name in names:
            exists = (ROOT / "dsacp_npu" / f"{name}.py").exists()
            assert twin == "(shared)" or exists == (twin == "torch, tested here"), name
