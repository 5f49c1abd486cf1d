"""`doctor` tells what is here and what is not, and never stops because something is missing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsacp_npu import cann, emulator
from dsacp_npu.__main__ import main
from dsacp_npu.commands import doctor

# By import_module: `install` is a function of the package as well.
REAL = importlib.import_module("dsacp_npu.emulator.install").real_library()
pytestmark = pytest.mark.skipif(REAL is not None, reason="the operators of a real library are here")


@pytest.fixture(autouse=True)
def operators_taken_away_again() -> Iterator[None]:
    """A command's process ends with it; the tests' does not."""
    yield
    emulator.remove()


def in_json(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """What the command prints for programs."""
    assert main(["doctor", "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def row(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The row of this name."""
    return next(row for row in rows if row["name"] == name)


def test_versions_are_the_installed_ones(capsys) -> None:
    import numpy

    versions = in_json(capsys)["versions"]
    assert row(versions, "numpy")["version"] == numpy.__version__
    assert row(versions, "torch_npu")["version"] is None
    assert all(row["needed_for"] for row in versions)


def test_without_operators_cann_says_what_is_missing(capsys) -> None:
    found = in_json(capsys)
    backend = row(found["backends"], "cann")
    assert not backend["usable"]
    assert "torch_npu is not installed" in backend["note"]
    assert "no operator found" in backend["note"]
    assert "emulator can be installed here" in backend["note"]
    assert row(found["devices"], "npu") == {"name": "npu", "count": 0, "note": "torch_npu is not installed"}
    assert {function for row in found["operators"] for function in row["refused"]} == set(cann.OPERATORS)


def test_the_emulated_operators_are_marked(capsys) -> None:
    found = in_json(capsys, "--emulator")
    backend = row(found["backends"], "cann")
    assert backend["usable"]
    assert "every operator found" in backend["note"]
    assert "no NPU is used" in backend["note"]
    assert all(row["emulated"] and row["found_in"] and not row["refused"] for row in found["operators"])
    assert row(found["devices"], "npu")["count"] == 0


def test_every_function_of_cann_names_its_operators() -> None:
    functions = [name for name in cann.__all__ if callable(getattr(cann, name)) and name[0].islower()]
    assert sorted(cann.OPERATORS) == sorted(functions)


def test_one_missing_operator_refuses_its_functions_only(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "found_operator", lambda name: ("", "") if name == "compressor" else ("npu", name))
    operators = doctor.operators_of(cann, emulated=False)
    assert [row["name"] for row in operators if row["refused"]] == ["compressor"]
    assert doctor.operator_words(operators) == ["refused, for want of operators: compress, compress_"]


@pytest.mark.parametrize("emulated", [False, True])
def test_tables_show_every_package_and_operator(capsys, monkeypatch, emulated) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", *["--emulator"] * emulated]) == 0
    text = capsys.readouterr().out
    words = [*doctor.PACKAGES, *(name for names in cann.OPERATORS.values() for name in names), "cpu", "cuda", "npu"]
    assert [word for word in words if word not in text] == []
    assert ("(emulated)" in text) == emulated
    assert (" missing " in text) != emulated
    assert "make ascend" in text


class Kind:
    """Devices of one kind, as torch lists them."""

    def __init__(self, *names: str, error: str = "") -> None:
        self.names, self.error = names, error

    def is_available(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return bool(self.names)

    def device_count(self) -> int:
        return len(self.names)

    def get_device_name(self, index: int) -> str:
        return self.names[index]


@pytest.mark.parametrize(
    ("kind", "count", "note"),
    [
        (Kind("A3", "A3"), 2, "A3"),
        (Kind(), 0, "no device found"),
        (Kind(error="driver too old"), 0, "RuntimeError: driver too old"),
    ],
)
def test_devices_are_counted_or_told_why_not(kind, count, note) -> None:
    assert doctor.counted("npu", kind, "no device found") == {"name": "npu", "count": count, "note": note}


def doctor_after(program: str, folder: Path) -> dict[str, Any]:
    """The command in a fresh process that ran a program first, with a folder of packages."""
    code = f"import sys\n{program}\nfrom dsacp_npu.__main__ import main\nsys.exit(main(['doctor', '--json']))"
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_device_package_that_fails_is_told_not_fatal(tmp_path) -> None:
    """Also where torch would load it by itself, as the real one asks for."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise OSError('libascendcl.so: cannot open')\n")
    about = tmp_path / "torch_npu-2.14.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.14.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    found = doctor_after("", tmp_path)
    assert row(found["versions"], "torch_npu")["version"] == "2.14.0"
    told = "importing torch_npu failed: OSError: libascendcl.so: cannot open"
    assert row(found["devices"], "npu")["note"] == told
    assert told in row(found["backends"], "cann")["note"]
    assert row(found["backends"], "torch")["usable"]


def test_without_torch_it_says_so(tmp_path) -> None:
    found = doctor_after("sys.modules['torch'] = None", tmp_path)
    assert [row["usable"] for row in found["backends"]] == [False, False, False]
    assert {row["note"] for row in found["devices"]} == {"torch is not installed"}
    assert found["operators"] == []
