"""`docs/validate.md`: its tables are the code's, its example happens, and every kind of fault can be named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsacp_npu.validation.kinds import KINDS
from dsacp_npu.validation.page import BATCH_KINDS, TABLES, kinds_of_checks, with_tables

PAGE = Path(__file__).parents[2] / "docs" / "validate.md"
needs_page = pytest.mark.skipif(not PAGE.exists(), reason="docs/ is missing: the tests run beside an installed wheel")


@needs_page
def test_tables_are_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"<!-- table: (\w+) -->", text) == list(TABLES)
    assert with_tables(text) == text, "run python -m dsacp_npu.validation.page docs/validate.md"


@needs_page
def test_the_example_happens(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ((command, shown),) = re.findall(r"^```console\n\$ python (.*?)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    call = [sys.executable, *command.split()]
    result = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "")
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


def test_every_kind_can_be_named() -> None:
    assert all(kinds_of_checks().values()), [kind for kind, checks in kinds_of_checks().items() if not checks]
    for kind in KINDS.values():
        assert kind.sentence
        assert kind.fix


def test_the_causes_of_the_steps_lengths_are_all_listed() -> None:
    """They are looked for by hand, because nothing else can be computed without them."""
    source = Path(sys.modules["dsacp_npu.validation.batch"].__file__ or "").read_text(encoding="utf-8")
    assert set(re.findall(r'"(\w+)"', source)) & set(KINDS) == set(BATCH_KINDS)
