"""What makes the mirror a mirror, for every module that has a twin: found by looking, so it grows by itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import dsacp_npu
import dsacp_ref

REF, NPU = (Path(str(package.__file__)).parent for package in (dsacp_ref, dsacp_npu))
SHARED = {"dsacp_ref.spec", "dsacp_ref.config"}
TWINS = sorted(path.stem for path in NPU.glob("[a-z]*.py") if (REF / path.name).exists())


def public(module: str) -> list[tuple[str, Any, Any]]:
    """(name, reference object, mirror object) of every public name of a module."""
    reference, mirror = (importlib.import_module(f"{package}.{module}") for package in ("dsacp_ref", "dsacp_npu"))
    return [(name, getattr(reference, name), getattr(mirror, name, None)) for name in reference.__all__]


PUBLIC = [(module, *names) for module in TWINS for names in public(module)]
NAMES = [f"{module}.{name}" for module, name, *_ in PUBLIC]
each_name = pytest.mark.parametrize(("module", "name", "reference", "mirror"), PUBLIC, ids=NAMES)


def words(annotation: object) -> str:
    """An annotation as text, arrays and tensors alike."""
    return re.sub(r"NDArray\[[\w.]+\]|torch\.Tensor", "Tensor", str(annotation))


def parameters(function: Any) -> list[tuple[Any, ...]]:
    """Name, kind, default and annotation of every parameter, and what is returned."""
    signature = inspect.signature(function)
    found = [(p.name, p.kind, p.default, words(p.annotation)) for p in signature.parameters.values()]
    return [*found, words(signature.return_annotation)]


def test_there_are_twins() -> None:
    assert {"partition", "extents", "visibility", "rope", "compressor"} <= set(TWINS)


@pytest.mark.parametrize("module", TWINS)
def test_the_twin_has_the_same_public_names(module: str) -> None:
    """More are allowed only for functions that write into their argument; their names end in an underscore."""
    theirs, mine = (importlib.import_module(f"{package}.{module}").__all__ for package in ("dsacp_ref", "dsacp_npu"))
    assert [name for name in mine if not name.endswith("_")] == theirs


@each_name
def test_the_same_signature_fields_or_value(module: str, name: str, reference: Any, mirror: Any) -> None:
    if inspect.isfunction(reference):
        assert parameters(mirror) == parameters(reference)
    elif hasattr(reference, "_fields"):
        assert (mirror._fields, mirror._field_defaults) == (reference._fields, reference._field_defaults)
        assert [words(kind) for kind in mirror.__annotations__.values()] == [
            words(kind) for kind in reference.__annotations__.values()
        ]
    elif is_dataclass(reference):
        assert [(f.name, words(f.type), f.default) for f in fields(mirror)] == [
            (f.name, words(f.type), f.default) for f in fields(reference)
        ]
    else:
        assert mirror == reference


@each_name
def test_the_docstring_points_at_the_reference(module: str, name: str, reference: Any, mirror: Any) -> None:
    if callable(reference) and reference is not mirror:
        assert mirror.__doc__.startswith(f"Mirror of `dsacp_ref.{module}.{name}`.")


@pytest.mark.parametrize("module", TWINS)
def test_every_function_has_a_property_test(module: str) -> None:
    tree = ast.parse((Path(__file__).parent / f"test_{module}.py").read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    due = {f"test_{name}_mirrors" for name, reference, _ in public(module) if inspect.isfunction(reference)}
    assert due <= tests


def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            package = node.module in ("dsacp_ref", "dsacp_npu")
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if package else {str(node.module)}
    return found


def test_only_words_are_shared() -> None:
    """The mirror takes no arithmetic from the reference, or one mistake would hide the other."""
    for path in NPU.rglob("*.py"):
        if "commands" not in path.relative_to(NPU).parts:
            theirs = {name for name in imported(path) if name.split(".")[0] == "dsacp_ref"}
            assert theirs <= SHARED, f"{path} imports {sorted(theirs - SHARED)}"


def test_the_reference_knows_nothing_of_the_mirror() -> None:
    for path in REF.rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"dsacp_npu", "torch", "torch_npu", "triton"}, path


def test_importing_stays_light() -> None:
    """In a fresh process: the package alone brings no torch, its twins none of what they may use later."""
    # torch loads the device package of the machine by itself, unless it is told not to.
    program = f"""
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import dsacp_npu
heavy = {{"torch", "torch_npu", "triton", "transformers"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
for name in {TWINS}:
    __import__("dsacp_npu." + name)
heavy -= {{"torch"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
