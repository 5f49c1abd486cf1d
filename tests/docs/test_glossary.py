"""The glossary and the code use the same words."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import dsacp_ref
from dsacp_npu import triton_ops

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"
NEVER_ALONE = {"indices", "lens", "offsets", "mask", "metadata", "info"}
# Words of plain Python; these are about words, files and flags, not about data.
PLAIN_MODULES = {"dsacp_ref.spec", "dsacp_ref.config", "dsacp_ref.mla_config", "dsacp_ref.prefill"}

# What is beyond the mirror and made for model code.
PLAIN_WORDS = {"name", "tensor", "tensors", "shape", "shapes", "index", "other", "slot", "steps", "tokens", "by_ratio"}
PLAIN_WORDS |= {"kind", "fixed", "geometry", "path"}
MODULE_PARTS = ("parallel", "caches", "loading", "step", "module", "rows", "drafts")
MODULE_PARTS += ("mla_caches", "mla_step", "mla_module", "record")

pytestmark = pytest.mark.skipif(
    not GLOSSARY.exists(), reason="docs/ is missing: the tests run beside an installed wheel"
)


def glossary_names() -> set[str]:
    first_cells = re.findall(r"^\| (`.*?) \|", GLOSSARY.read_text(), re.MULTILINE)
    return {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


def public_functions() -> list[str]:
    return [
        name
        for name in dsacp_ref.__all__
        if inspect.isfunction(getattr(dsacp_ref, name)) and getattr(dsacp_ref, name).__module__ not in PLAIN_MODULES
    ]


@pytest.mark.parametrize("name", public_functions())
def test_every_argument_is_in_the_glossary(name: str) -> None:
    arguments = set(inspect.signature(getattr(dsacp_ref, name)).parameters)
    assert arguments <= glossary_names(), f"add to docs/glossary.md: {sorted(arguments - glossary_names())}"
    assert not arguments & NEVER_ALONE


def parts_of_the_module() -> list[tuple[str, Any]]:
    """Every public function of the module's parts, and every public method of their classes."""
    found = []
    for part in MODULE_PARTS:
        module = importlib.import_module(f"dsacp_npu.{part}")
        for name in module.__all__:
            value = getattr(module, name)
            members = inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else [(name, value)]
            found += [
                (f"{part}.{name}.{member}", function)
                for member, function in members
                if inspect.isfunction(function)
                and function.__module__.startswith("dsacp_npu.")  # a torch module inherits more
                and (member == "__init__" or not member.startswith("_"))
            ]
    return found


def words_of(function: Any) -> set[str]:
    """The names of its parameters, without those that a private caller hands in."""
    return {name for name in inspect.signature(function).parameters if name != "self"}


@pytest.mark.parametrize("function", [function for _, function in parts_of_the_module()], ids=lambda f: f.__qualname__)
def test_every_argument_of_the_module_is_in_the_glossary(function: Any) -> None:
    unknown = words_of(function) - glossary_names() - PLAIN_WORDS
    assert not unknown, f"add to docs/glossary.md: {sorted(unknown)}"
    assert not words_of(function) & NEVER_ALONE


def arguments_over_kernels() -> dict[str, set[str]]:
    """The arguments of every function of backend `triton`, read from source: Triton may not be installed."""
    found = {}
    for path in sorted(Path(triton_ops.__file__).parent.glob("_triton_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in triton_ops.FUNCTIONS:
                found[node.name] = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    return found


@pytest.mark.parametrize("name", sorted(triton_ops.FUNCTIONS))
def test_every_argument_over_kernels_is_in_the_glossary(name: str) -> None:
    unknown = arguments_over_kernels().get(name, set()) - glossary_names()
    assert not unknown, f"add to docs/glossary.md: {sorted(unknown)}"


def test_every_name_of_the_glossary_is_used() -> None:
    used: set[str] = {name for _, function in parts_of_the_module() for name in words_of(function)}
    used |= set().union(*arguments_over_kernels().values())
    used.add("ranks")  # of `dsacp_npu.distributed`
    for name in dsacp_ref.__all__:
        value = getattr(dsacp_ref, name)
        if inspect.isfunction(value):
            used |= {name, *inspect.signature(value).parameters}
        used |= set(getattr(value, "_fields", ())) | set(getattr(value, "__dataclass_fields__", ()))
    assert glossary_names() <= used, f"no function or record uses {sorted(glossary_names() - used)}"
