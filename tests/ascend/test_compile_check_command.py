"""`compile-check` from the command line: a kernel of one's own, the project's, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dsacp_npu.__main__ import main
from dsacp_npu.commands import compile_check as command
from tests.ascend.conftest import kernels_or_skip

kernels = kernels_or_skip()
OWN = [
    *("compile-check", "--own", f"{Path(__file__).with_name('kernels.py')}:add_rows_kernel"),
    *("--signature", "*fp32, *fp32, *fp32, i32", "--constexpr", "COLS=512"),
]


class Made(NamedTuple):
    """As the project's kernels list themselves."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, int]


class Listed:
    """A module of kernels."""

    @staticmethod
    def compilations(family: str) -> list[Made]:
        types = {"x": "*i32", "out": "*i32", "n": "i32"}
        blocks = {"a2": (64, 128), "a5": (256,)}[family]
        sums = [Made(f"running sum/{block}", kernels.running_sum_kernel, types, {"BLOCK": block}) for block in blocks]
        return [*sums, Made("total/64", kernels.total_kernel, types, {"BLOCK": 64})]


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What the command prints."""
    assert main(words) == code
    out: str = capsys.readouterr().out
    return out


def test_a_kernel_of_a_file_on_every_default_target(capsys) -> None:
    out = printed(capsys, *OWN, "--constexpr", "ROWS=4")
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("add_rows_kernel")]
    assert [row[1] for row in rows] == list(command.DEFAULT_TARGETS)
    assert all(row[2:4] == ["ok,", "vector"] for row in rows)
    assert [row[4].partition("/")[2] for row in rows] == ["192", "192", "248"]
    assert "3 compilations, 0 failed; KiB of one core; triton-ascend 3.2.0, ascendnpu-ir 1.2.0" in out


def test_a_kernel_of_a_module_that_fails(capsys) -> None:
    words = [word.replace(str(Path(__file__).with_name("kernels.py")), "tests.ascend.kernels") for word in OWN]
    out = printed(capsys, *words, "--constexpr", "ROWS=128", "--target", "Ascend910B3", code=1)
    assert "overflow" in out
    assert "512 > 192" in out
    assert "add_rows_kernel on Ascend910B3 failed in the compiler:" in out
    assert "1 compilations, 1 failed" in out


def test_json_is_a_list_of_plain_objects(capsys) -> None:
    (row,) = json.loads(printed(capsys, *OWN, "--constexpr", "ROWS=128", "--target", "Ascend910B3", "--json", code=1))
    assert (row["name"], row["ok"], row["stage"]) == ("add_rows_kernel", False, "compiler")
    assert row["overflow"] == {"ub": {"need": 512 << 10, "have": 192 << 10}}
    assert row["constexprs"] == {"COLS": 512, "ROWS": 128}
    assert row["versions"] == {"triton-ascend": "3.2.0", "ascendnpu-ir": "1.2.0"}
    assert "texts" not in row


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small kernels in the place of the project's."""
    monkeypatch.setattr(command, "kernel_modules", lambda: iter([Listed]))


@pytest.mark.usefixtures("listed")
def test_the_kernels_of_the_family_of_each_target(capsys) -> None:
    rows = json.loads(printed(capsys, "compile-check", "--json"))
    assert [(row["name"], row["target"]) for row in rows] == [
        ("running sum/64", "Ascend910B3"),
        ("running sum/64", "Ascend910_9391"),
        ("running sum/128", "Ascend910B3"),
        ("running sum/128", "Ascend910_9391"),
        ("running sum/256", "Ascend950PR_9579"),
        ("total/64", "Ascend910B3"),
        ("total/64", "Ascend910_9391"),
        ("total/64", "Ascend950PR_9579"),
    ]
    assert [lint["name"] for lint in rows[0]["lints"]] == ["scalar_loop"]


@pytest.mark.usefixtures("listed")
def test_kernels_by_part_of_their_name_and_in_short(capsys) -> None:
    out = printed(capsys, "compile-check", "--kernel", "sum", "--target", "Ascend910B3", "--short")
    (row,) = [line for line in out.splitlines() if line.strip().startswith("running sum")]
    assert "2 compilations" in row
    assert "1/192" in row
    assert "scalar_loop" in row
    assert "total" not in out
    assert "scalar_loop: writes a tile element by element" in out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command says of a call that cannot work."""
    assert main(["compile-check", *words]) == 2
    text: str = capsys.readouterr().err
    return text


@pytest.mark.usefixtures("listed")
def test_calls_that_cannot_work(capsys) -> None:
    assert "there are running sum, total" in refused(capsys, "--kernel", "product")
    assert "target" in refused(capsys, "--target", "Ascend1")
    assert "a type for each of x, y, out, num_tasks" in refused(capsys, *OWN[1:3], *OWN[5:], "--constexpr", "ROWS=4")
    assert "NAME=VALUE" in refused(capsys, *OWN[1:5], "--constexpr", "ROWS")
    assert "a kernel of that module" in refused(capsys, "--own", "tests.ascend.kernels:none")
    assert "no file nowhere.py" in refused(capsys, "--own", "nowhere.py:kernel")


def test_the_project_lists_its_kernels() -> None:
    names = {module.__name__.rpartition(".")[2] for module in command.kernel_modules()}
    assert "rope" in names
    assert not {name for name in names if name.startswith("_")}


@pytest.mark.parametrize("text", ["A=8", "A=True", "A=None", "A=0.5", "A=row", "A='8'"])
def test_values_of_constexprs(text: str) -> None:
    values = {"8": 8, "True": True, "None": None, "0.5": 0.5, "row": "row", "'8'": "8"}
    assert command.constant(text) == ("A", values[text[2:]])
