"""The house's one arrow of imports, and what a fresh process may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dsacp_ref

PACKAGE = Path(dsacp_ref.__file__).parent
# A module imports only from modules to its left; those of one group may meet.
ARROW = [
    {"spec", "config", "mla_config", "prefill", "_arguments"},
    {"partition"},
    {"extents"},
    {"visibility"},
    {"paging", "rope", "quant", "fp8", "compressor", "indexer", "attention"},
    {"mla"},
    {"exchange"},
    {"layer"},
    {"block"},
    {"mla_layer"},
    {"mla_stack"},
    {"__init__", "__main__"},
]
RANK = {name: place for place, group in enumerate(ARROW) for name in group}


def imported(module: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {
                f"{node.module}.{alias.name}" if node.module == "dsacp_ref" else str(node.module)
                for alias in node.names
            }
    return names


@pytest.mark.parametrize("module", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_only_what_stands_before_it(module: Path) -> None:
    for name in imported(module):
        if name.startswith("dsacp_ref."):
            assert RANK[name.split(".")[1]] <= RANK[module.stem], f"{module.stem} imports {name}"
        else:
            root = name.split(".")[0]
            own = {"fp8": {"ml_dtypes"}, "__main__": {"dsacp_ref"}}  # the latter for the version
            allowed = {"numpy", "__future__"} | own.get(module.stem, set())
            assert root in allowed or root in sys.stdlib_module_names, f"{module.stem} imports {name}"


def test_no_two_modules_import_each_other() -> None:
    edges = {
        module.stem: {name.split(".")[1] for name in imported(module) if name.startswith("dsacp_ref.")}
        for module in PACKAGE.glob("*.py")
        if module.stem not in ("__init__", "__main__")
    }
    done: set[str] = set()
    while ready := {name for name, needs in edges.items() if name not in done and needs <= done}:
        done |= ready
    assert done == set(edges), f"a circle among {sorted(set(edges) - done)}"


@pytest.mark.parametrize("package", ["dsacp_ref", "dsacp_npu"])
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    heavy = {"torch", "torch_npu", "triton", "transformers", "rich", "hypothesis", "einops", "ml_dtypes", "matplotlib"}
    code = f"import sys, {package}\nheavy = {heavy} & set(sys.modules)\nsys.exit(', '.join(sorted(heavy)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_names_of_the_reference_are_found_when_asked_for() -> None:
    """The package alone loads no module of it, nor numpy; then every way to ask gives the module's own object."""
    code = """
import sys, dsacp_ref
loaded = [name for name in sys.modules if name.startswith("dsacp_ref.") or name in ("numpy", "importlib.metadata")]
assert not loaded, loaded
from dsacp_ref import local_extents
assert "dsacp_ref.layer" not in sys.modules
assert local_extents is dsacp_ref.extents.local_extents
assert dsacp_ref.layer is sys.modules["dsacp_ref.layer"]
for name in dsacp_ref.__all__:
    assert name in dir(dsacp_ref) and getattr(dsacp_ref, name) is not None
names = {}
exec("from dsacp_ref import *", names)
assert set(dsacp_ref.__all__) <= set(names)
assert dsacp_ref.__version__
assert not hasattr(dsacp_ref, "nonsense") and not hasattr(dsacp_ref, "__wrapped__")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
