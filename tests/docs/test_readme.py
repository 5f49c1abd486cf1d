"""What README shows is what happens."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
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


def test_console_snippets_print_what_they_show() -> None:
    snippets = re.findall(r"^```console\n\$ python (.*?)\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert snippets
    for command, shown in snippets:
        result = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=True)
        assert result.stdout.rstrip() == shown.rstrip()


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
