"""The compile check sees what a kernel does wrong, each on a kernel that does only that."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsacp_npu.ascend import EXPLANATIONS, TARGETS, CompileReport, compile_check, lowering, toolchain
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.ascend.conftest import kernels_or_skip

kernels = kernels_or_skip()

A2, A3, A5 = "Ascend910B3", "Ascend910_9391", "Ascend950PR_9579"
every_target = pytest.mark.parametrize("target", [A2, A3, A5])
KIB = 1024


def checked(name: str, types: str, target: str = A2, *, multibuffer: bool = True, **constexprs: int) -> CompileReport:
    """The report on one of the small kernels, whose other arguments have these types in order."""
    kernel = getattr(kernels, name)
    names = [argument for argument in kernel.arg_names if argument not in constexprs]
    signature = dict(zip(names, types.split(), strict=True))
    return compile_check(kernel, signature, constexprs, target=target, multibuffer=multibuffer)


def counts(report: CompileReport) -> dict[str, int]:
    """How often each finding is there, but for crashes, which come and go."""
    assert all(lint.text == EXPLANATIONS[lint.name] for lint in report.lints)
    return {lint.name: lint.times for lint in report.lints if lint.name != "crashed"}


def added(target: str = A2, *, rows: int, multibuffer: bool = True) -> CompileReport:
    """A sum of two tiles of 512 columns."""
    types = "*fp32 *fp32 *fp32 i32"
    return checked("add_rows_kernel", types, target, ROWS=rows, COLS=512, multibuffer=multibuffer)


@every_target
def test_a_kernel_that_fits(target: str) -> None:
    report = added(target, rows=4)
    assert report.ok
    assert (report.stage, report.mix, report.error) == ("done", "vector", "")
    assert (report.kernel, report.target) == ("add_rows_kernel", target)
    assert not report.overflow
    assert not report.retries
    assert counts(report) == {}
    # Two tiles of 8 KiB are loaded, all of them twice for loads ahead; the sum takes the place of one, or its own.
    assert 4 * 8 * KIB <= report.planned["ub"] <= 6 * 8 * KIB
    assert report.planned["l1"] == report.planned["l0c"] == 0
    assert 0 < report.seconds < 60


@every_target
def test_every_level_can_be_read(target: str) -> None:
    texts = added(target, rows=4).texts
    assert "tt.load" in texts.ttir
    assert "func.func @add_rows_kernel" in texts.linalg
    assert "tt.load" not in texts.linalg
    assert "func.func @add_rows_kernel" in texts.hfusion
    assert "pointer_cast" not in texts.hfusion
    assert "pointer_cast" in texts.hivm
    assert texts.hivm.count("\nmodule") <= 1
    assert "IR Dump" not in texts.log
    assert "texts" not in repr(added(target, rows=4))


def test_hfusion_alone_is_the_same_text() -> None:
    texts = added(rows=4).texts
    assert lowering.hfusion_of(texts.linalg, A2) == texts.hfusion


@every_target
def test_what_is_there_is_what_the_table_of_chips_says(target: str) -> None:
    report, chip = added(target, rows=4), TARGETS[target]
    header = f'"CUBE_CORE_COUNT", {chip.cube_cores} : i32>, #dlti.dl_entry<"VECTOR_CORE_COUNT", {chip.vector_cores} :'
    assert header in report.texts.hivm
    assert report.available == {"ub": chip.ub, "l1": chip.l1, "l0c": chip.l0c}


def test_a2_and_a3_are_planned_alike() -> None:
    for name, types, sizes in (
        ("add_rows_kernel", "*fp32 *fp32 *fp32 i32", {"ROWS": 8, "COLS": 256}),
        ("attention_kernel", "*bf16 *bf16 *bf16 i32", {"ROWS": 32, "KEYS": 64, "WIDTH": 128}),
    ):
        assert checked(name, types, A2, **sizes).planned == checked(name, types, A3, **sizes).planned


@every_target
def test_a_tile_that_does_not_fit(target: str) -> None:
    report = added(target, rows=128)
    assert not report.ok
    assert report.stage == "compiler"
    assert set(report.overflow) == {"ub"}
    need, have = report.overflow["ub"]
    assert need > have == report.available["ub"]
    assert need >= 2 * 128 * 512 * 4
    assert report.planned == {}
    assert "ub overflow" in report.error
    assert report.texts.hfusion
    assert not report.texts.hivm


def test_the_accumulator_that_does_not_fit() -> None:
    report = checked("attention_kernel", "*bf16 *bf16 *bf16 i32", ROWS=256, KEYS=256, WIDTH=512)
    need, have = report.overflow["l0c"]
    assert need > have == 128 * KIB


def test_what_was_given_up_to_fit() -> None:
    report = added(rows=32)
    assert report.ok
    assert any("enable-auto-multi-buffer to false" in note for note in report.retries)
    assert counts(report)["retries"] == len(report.retries)
    single = added(rows=32, multibuffer=False)
    assert single.ok
    assert not single.retries
    assert single.planned == report.planned


def test_a_space_that_is_nearly_full() -> None:
    report = added(rows=16)
    assert report.planned["ub"] > 0.95 * report.available["ub"]
    assert counts(report) == {"nearly_full": 1}


@every_target
def test_a_product_uses_the_cube_and_its_memory(target: str) -> None:
    report = checked("attention_kernel", "*bf16 *bf16 *bf16 i32", target, ROWS=32, KEYS=64, WIDTH=128)
    assert report.ok
    assert report.mix == "mixed"
    assert report.planned["l0c"] >= 32 * 128 * 4
    assert report.planned["l1"] >= (32 + 64) * 128 * 2


def test_an_idle_vector_core() -> None:
    columns = checked("column_sums_kernel", "*bf16 *bf16 *fp32 i32", ROWS=64, KEYS=64, WIDTH=128)
    assert counts(columns) == {"idle_vector_core": 1}
    rows = checked("similarity_kernel", "*bf16 *bf16 *fp32", ROWS=64, KEYS=64, WIDTH=128)
    assert rows.ok
    assert counts(rows) == {}


def test_an_idle_vector_core_on_a5() -> None:
    report = checked("column_sums_kernel", "*bf16 *bf16 *fp32 i32", A5, ROWS=64, KEYS=64, WIDTH=128)
    assert counts(report) == {"idle_vector_core": 1}


def test_a_division_of_integers_that_is_one_of_floats() -> None:
    types = "*i32 *i32 *i32 i32"
    assert counts(checked("divide_kernel", types, BLOCK=128)) == {"inexact_division": 1}
    assert counts(checked("divide_kernel", types, A5, BLOCK=128)) == {}  # which divides integers
    assert counts(checked("average_kernel", "*i32 *i32 *fp32 i32", BLOCK=128)) == {}  # which means floats


def test_scalar_loops() -> None:
    assert counts(checked("remainder_kernel", "*i32 *i32 *i32 i32", BLOCK=128)) == {"scalar_loop": 1}
    assert counts(checked("running_sum_kernel", "*i32 *i32 i32", BLOCK=128)) == {"scalar_loop": 1}


@every_target
def test_one_scalar_is_no_loop(target: str) -> None:
    assert counts(checked("total_kernel", "*i32 *i32 i32", target, BLOCK=128)) == {}


@every_target
def test_elements_one_by_one(target: str) -> None:
    report = checked("pick_elements_kernel", "*fp32 *i32 *fp32", target, BLOCK=128)
    assert counts(report) == {"scalar_loop": 1, "element_access": 1}
    assert counts(checked("pick_rows_kernel", "*fp32 *i32 *fp32", target, ROWS=16, COLS=128)) == {}


def test_what_is_no_triton() -> None:
    report = checked("unequal_shapes_kernel", "*fp32 *fp32", ROWS=16, COLS=32)
    assert not report.ok
    assert report.stage == "front end"
    assert "incompatible dimensions" in report.error
    assert report.texts.ttir == report.mix == ""
    assert report.available["ub"] == 192 * KIB


@every_target
def test_what_the_adapter_refuses(target: str) -> None:
    report = checked("swap_pairs_kernel", "*fp32 *fp32 i32", target, HEADS=16, WIDTH=128, TAIL=32)
    assert not report.ok
    assert report.stage == "adapter"
    assert "Assertion" in report.error
    assert "#5 0x" not in report.error
    assert report.texts.ttir
    assert report.texts.linalg == ""


def test_a_crash_that_does_not_repeat_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run, results = toolchain.ran, [toolchain.Ran(-6, "", "Assertion `lucky' failed."), None]
    monkeypatch.setattr(toolchain, "ran", lambda *args, **kwargs: results.pop(0) or run(*args, **kwargs))
    report = added(rows=4)
    assert report.ok
    assert "crashed" in {lint.name for lint in report.lints}


def test_an_adapter_that_crashes_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ascend = toolchain.triton_ascend()
    run, crashes = ascend.ttir_to_linalg, [subprocess.CalledProcessError(-6, "adapter", stderr=b"") for _ in range(2)]

    def unlucky(*args: Any, **kwargs: Any) -> str:
        if crashes:
            raise crashes.pop()
        return run(*args, **kwargs)

    monkeypatch.setattr(ascend, "ttir_to_linalg", unlucky)
    report = added(rows=4)
    assert report.ok
    assert {lint.name: lint.times for lint in report.lints}["crashed"] >= 2


def test_a_crash_that_repeats_is_a_failure_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "ran", lambda *args, **kwargs: toolchain.Ran(-6, "", "x: Assertion `y' failed."))
    report = added(rows=4)
    assert (report.ok, report.stage, report.error) == (False, "compiler", "x: Assertion `y' failed.")
    assert report.overflow == {}


def test_a_tool_that_does_not_end() -> None:
    done = toolchain.ran(["sleep", "60"], timeout=0.1)
    assert done.status == 124
    assert "sleep did not end within 0.1 s" in done.errors


def test_wrong_calls_are_refused() -> None:
    kernel, types = kernels.total_kernel, {"x": "*i32", "out": "*i32", "n": "i32"}
    with pytest.raises(ContractError, match="target"):
        compile_check(kernel, types, {"BLOCK": 128}, target="Ascend310")
    with pytest.raises(ContractError, match="every argument of the kernel once: x, out, n, BLOCK"):
        compile_check(kernel, types, {})
    with pytest.raises(ContractError, match=r"function under triton\.jit"):
        compile_check(print, types, {"BLOCK": 128})


def test_versions_are_told() -> None:
    assert added(rows=4).versions == {"triton-ascend": "3.2.0", "ascendnpu-ir": "1.2.0"}


def test_a_process_that_interprets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedError, match="process of its own, without TRITON_INTERPRET"):
        added(rows=4)


def without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """As if a module were not installed."""
    found: Any = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == module else found(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)


@pytest.mark.parametrize(("module", "package"), [("triton", "triton-ascend"), ("ascendnpuir", "ascendnpu-ir")])
def test_a_missing_package_is_named_with_the_command(monkeypatch, module: str, package: str) -> None:
    without(monkeypatch, module)
    with pytest.raises(ImportError, match=rf"{package} is not installed; pip install 'dsacp\[ascend\]' .*make ascend"):
        added(rows=4)


def test_another_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("triton"), "__version__", "3.6.0")
    with pytest.raises(ImportError, match=r"triton is 3\.6\.0, not triton-ascend 3\.2\.0; pip install"):
        added(rows=4)


def test_two_packages_in_one_directory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.backends.ascend.compiler", None)
    with pytest.raises(ImportError, match="installed but not triton-ascend"):
        added(rows=4)


def test_a_missing_tool_of_mlir_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnsupportedError, match="mlir-opt-19 is not on PATH; apt-get install mlir-19-tools"):
        toolchain.mlir("mlir-opt")


def test_a_broken_package_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="ascendnpu-ir has no tool; reinstall"):
        toolchain.existing(tmp_path / "tool", "ascendnpu-ir")
