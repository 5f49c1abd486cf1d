"""What makes the mirror a mirror, for every module that has a twin: found by looking, so it grows by itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
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
SHARED = {"dsacp_ref.spec", "dsacp_ref.config", "dsacp_ref.mla_config", "dsacp_ref.prefill"}
TOOLS = (
    "__main__.py",
    "commands",
    "planning",
    "plots",
    "validation",
)  # what stands on the definition, not on the mirror
WORDS = {"dsacp_npu._tensors", "dsacp_ref.spec"}  # what the emulator may take from elsewhere
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


# What alone a function of the mirror that runs a layer may take beyond the reference's parameters.
backend_parameter = ("backend", inspect.Parameter.KEYWORD_ONLY, None, "Backend | None")


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
        mine = parameters(mirror)
        if module in ("layer", "block", "mla_layer", "mla_stack") and backend_parameter in mine:
            assert mine[-2] == backend_parameter, "`backend` comes last"
            mine.remove(backend_parameter)
        assert mine == parameters(reference)
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


def in_place() -> list[tuple[str, str]]:
    """(module, name) of everything that writes into its argument."""
    names = [(module, importlib.import_module(f"dsacp_npu.{module}").__all__) for module in TWINS]
    return [(module, name) for module, public_names in names for name in public_names if name.endswith("_")]


@pytest.mark.parametrize(("module", "name"), in_place())
def test_what_writes_in_place_has_a_pure_twin(module: str, name: str) -> None:
    """Same module, same signature; listed after all that writes nothing."""
    mirror = importlib.import_module(f"dsacp_npu.{module}")
    assert parameters(getattr(mirror, name)) == parameters(getattr(mirror, name.removesuffix("_")))
    pure = [other for other in mirror.__all__ if not other.endswith("_")]
    assert mirror.__all__[: len(pure)] == pure


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
        if path.relative_to(NPU).parts[0] not in TOOLS:
            theirs = {name for name in imported(path) if name.split(".")[0] == "dsacp_ref"}
            assert theirs <= SHARED, f"{path} imports {sorted(theirs - SHARED)}"


# A module of the mirror imports only from modules to its left; those of one group may meet.
ARROW = [
    {"partition"},
    {"extents"},
    {"visibility"},
    {"paging", "rope", "quant", "fp8", "compressor", "indexer", "attention"},
    {"mla"},
    {"exchange"},
    {"cann", "triton_ops"},
    {"backend"},
    {"layer"},
    {"block"},
    {"mla_layer"},
    {"mla_stack"},
    {"distributed"},
    {"distributed_block", "distributed_mla"},
    {"caches", "parallel"},
    {"mla_caches"},
    {"loading"},
    {"step", "module"},
    {"mla_step", "mla_module"},
    {"rows", "drafts"},
]
RANK = {name: place for place, group in enumerate(ARROW) for name in group}


@pytest.mark.parametrize("module", sorted(name for name in RANK if (NPU / f"{name}.py").exists()))
def test_a_module_imports_only_what_stands_before_it(module: str) -> None:
    """Names that start with an underscore are parts of the modules that import them."""
    for name in imported(NPU / f"{module}.py"):
        package, _, other = name.partition(".")
        if package == "dsacp_npu" and not other.startswith("_"):
            assert RANK[other.split(".")[0]] <= RANK[module], f"{module} imports {name}"


def test_the_emulator_computes_by_itself() -> None:
    """It takes no arithmetic from the mirror or the reference, or it could not show their mistakes."""
    for path in (NPU / "emulator").glob("*.py"):
        theirs = {name for name in imported(path) if name.split(".")[0] in ("dsacp_ref", "dsacp_npu")}
        assert all(name.startswith("dsacp_npu.emulator") or name in WORDS for name in theirs), (path, theirs)


def test_the_reference_knows_nothing_of_the_mirror() -> None:
    for path in REF.rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"dsacp_npu", "torch", "torch_npu", "triton"}, path


def in_a_fresh_process(program: str) -> None:
    """Run a program that fails by itself. torch must not load the device package of the machine on its own."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def importable() -> list[str]:
    """Every module of the mirror but its tools, and the parts that are loaded at the point of use."""
    late = {
        *(path for tool in TOOLS for path in NPU.glob(f"{tool}/*.py")),
        *NPU.glob("integrations/_*.py"),
        *NPU.glob("kernels/**/*.py"),
        *NPU.glob("_triton_*.py"),
    }
    paths = [path for path in NPU.rglob("*.py") if path not in late and not path.stem.startswith("__")]
    return sorted(".".join(path.relative_to(NPU.parent).with_suffix("").parts) for path in paths)


@pytest.mark.slow
def test_importing_stays_light() -> None:
    """The package alone brings no torch, its twins none of what they may use later."""
    in_a_fresh_process(f"""
import sys
import dsacp_npu
heavy = {{"torch", "torch_npu", "triton", "transformers"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
for name in {importable()}:
    __import__(name)
heavy -= {{"torch"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
""")


@pytest.mark.slow
def test_a_twin_loads_nothing_of_the_reference_but_words() -> None:
    in_a_fresh_process(f"""
import sys
for name in {importable()}:
    __import__(name)
theirs = {{name for name in sys.modules if name.split(".")[0] == "dsacp_ref"}}
assert theirs <= {SHARED | {"dsacp_ref"}}, theirs
""")


def test_without_torch_every_module_names_the_command_that_helps() -> None:
    in_a_fresh_process(f"""
import sys
sys.modules["torch"] = None
import dsacp_npu, dsacp_ref
assert dsacp_ref.local_extents
silent = []
for name in {importable()}:
    try:
        __import__(name)
    except ImportError as error:
        if "pip install 'dsacp[torch]'" not in str(error):
            silent.append(f"{{name}}: {{error}}")
assert not silent, silent
""")
