"""docs/mirror.md says what is there, and what it calls tested has its test."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from dsacp_npu._layer_parts import Torch
from dsacp_npu.commands import mirror

PAGE = Path(__file__).parents[2] / "docs" / "mirror.md"
TESTS = Path(__file__).parents[1]


def named_tests(*paths: Path) -> set[str]:
    """The names of all test functions in these files."""
    trees = (ast.parse(path.read_text()) for path in paths)
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


def functions_of(module: str) -> list[str]:
    """The public functions of a module of `dsacp_npu`."""
    found = mirror.module_if_there(module)
    return [name for name in mirror.public(found) if inspect.isfunction(getattr(found, name))]


@pytest.mark.skipif(not PAGE.parent.exists(), reason="docs/ is missing: the tests run beside an installed wheel")
def test_the_page_is_what_the_command_prints() -> None:
    assert PAGE.read_text() == mirror.page(), "run: python -m dsacp_npu mirror > docs/mirror.md"


def test_the_command_prints_the_page(capsys) -> None:
    assert mirror.run(None) == 0  # type: ignore[arg-type]
    assert capsys.readouterr().out == mirror.page() == mirror.page()


def test_every_status_is_one_of_the_words() -> None:
    cells = [
        line.split("|")[2:-1]
        for line in mirror.page().splitlines()
        if line.startswith("| `") and not line.startswith("| `dsacp_")
    ]
    statuses = {cell.strip() for row in cells for cell in row[-2:]}
    words = {mirror.TESTED, mirror.CONTRACT, mirror.COMPILED, mirror.ONCE, mirror.NOT_RUN, mirror.NONE}
    assert statuses <= words
    assert not [row for row in cells if mirror.TESTED in row[-1]], "nothing has run on an NPU"


@pytest.mark.parametrize("module", mirror.MODULES)
def test_every_public_name_of_the_reference_has_a_row(module: str) -> None:
    for name in import_module(f"dsacp_ref.{module}").__all__:
        assert f"\n| `{name}`" in mirror.page()


@pytest.mark.parametrize("module", mirror.MODULES)
def test_what_is_called_tested_has_a_property_test(module: str) -> None:
    tests = named_tests(TESTS / "mirror" / f"test_{module}.py")
    pure = [name for name in functions_of(module) if not name.endswith("_")]
    assert [name for name in pure if f"test_{name}_mirrors" not in tests] == []
    in_place = [name for name in functions_of(module) if name.endswith("_")]
    untested = [name for name in in_place if not any(test.startswith(f"test_{name}in_place") for test in tests)]
    assert untested == []


def attributes_in(name: str, *paths: Path) -> set[str]:
    """What the test functions with this word in their name take from modules, or call by their bare name."""
    trees = (ast.parse(path.read_text()) for path in paths)
    tests = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    inside = [part for test in tests if test.name.startswith("test_") and name in test.name for part in ast.walk(test)]
    return {part.attr for part in inside if isinstance(part, ast.Attribute)}


def test_what_is_called_contract_only_was_run_against_the_emulator() -> None:
    """In a test of its own name, or, for what prepares another call, in the test of that one."""
    files = list((TESTS / "cann").glob("test_*.py"))
    tests, called = named_tests(*files), attributes_in("_on_the_emulator", *files)
    layers = [
        name
        for module in ("layer", "block")
        for name in functions_of(module)
        if mirror.takes_backend(mirror.module_if_there(module), name)
    ]
    assert layers
    names = [*functions_of("cann"), *layers]
    own = {name: f"test_{name}in_place_" if name.endswith("_") else f"test_{name}_" for name in names}
    unrun = [
        name for name, start in own.items() if name not in called and not any(test.startswith(start) for test in tests)
    ]
    assert unrun == []


def test_what_runs_over_processes_was_run_there() -> None:
    """Workers are told what to call, so any word of these files counts."""
    texts = "\n".join(path.read_text() for path in (TESTS / "distributed").glob("*.py"))
    for module in mirror.DISTRIBUTED:
        assert [name for name in functions_of(module) if not re.search(rf"\b{name}\b", texts)] == []


def test_what_is_called_run_once_is_named_by_a_test_on_a_gpu_or_called_by_its_layers() -> None:
    """Beside `selected_entries`, whose choice the benchmark compares with the stable order, and `updated_state`, which
    `compress` calls."""
    text = (Path(__file__).parents[1] / "kernels" / "test_cuda.py").read_text()
    run = [line.split("`")[1] for line in mirror.page().splitlines() if f"| {mirror.ONCE} |" in line]
    called = {*vars(Torch), "selected_entries", "updated_state"}
    assert {"attention_layer", "window_attention"} <= set(run)
    assert [name for name in run if name not in text and name not in called] == []


def test_what_is_called_compiled_is_named_by_a_test_of_kernels() -> None:
    """Those tests run where Triton-Ascend is (`make ascend`); here only that they are there."""
    kernels = Path(__file__).parents[1] / "kernels"
    text = "\n".join(path.read_text() for path in sorted(kernels.glob("test_*.py")))
    compiled = [line.split("`")[1] for line in mirror.page().splitlines() if f"| {mirror.COMPILED} |" in line]
    assert len(compiled) > 30
    assert [name for name in compiled if name not in text] == []
