"""docs/kernels.md: the kernel of one's own that it shows compiles, and fails, as it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dsacp_npu.__main__ import main
from tests.ascend.conftest import kernels_or_skip

kernels_or_skip()
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="docs/ is missing: the tests run beside an installed wheel")


def untimed(text: str) -> list[list[str]]:
    """The words of every line, without the seconds at the end of a row and without rules, whose length is a table's."""
    lines = [re.sub(r" \d+\.\d$", "", line.rstrip()) for line in text.splitlines() if not set(line) <= set("─ ")]
    return [line.split() for line in lines]


def test_the_shown_runs_print_what_they_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text()
    source = re.search(r"`row_sums.py`:\n\n```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert source is not None
    (tmp_path / "row_sums.py").write_text(source[1])
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"^```console\n\$ python -m dsacp_npu (.*?)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(shown) == 2
    for (command, output), code in zip(shown, (0, 1), strict=True):
        assert main(shlex.split(command)) == code
        assert untimed(capsys.readouterr().out) == untimed(output)
