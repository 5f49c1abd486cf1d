"""Implementations of the same functions by name: an object to hand to a layer. Refuse, never fall back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from dsacp_npu._tensors import torch
from dsacp_ref.spec import UnsupportedError, check_choice

__all__ = ["BACKENDS", "Backend", "get"]

BACKENDS = ("torch", "cann", "triton")
MODULES = (
    "partition",
    "extents",
    "visibility",
    "paging",
    "rope",
    "quant",
    "fp8",
    "compressor",
    "indexer",
    "attention",
    "mla",
    "exchange",
    "layer",
    "block",
    "mla_layer",
    "mla_stack",
)


class Backend:
    """Functions under the reference's names, from one implementation; cannot be changed.

    Any other public name of the reference raises UnsupportedError, which names backend and function.

    Fields:
        name: str, the name that `get` takes.
        functions: mapping of function name to function.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]

    def __init__(self, name: str, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Every function is also an attribute."""
        values = {**functions, "name": name, "functions": MappingProxyType(dict(functions))}
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)

    def __getattr__(self, name: str) -> NoReturn:
        """What is not among the functions: refused if the reference has it, unknown if it has not."""
        if not name.startswith("_") and name in public_names():
            supported = ", ".join(sorted(self.functions))
            raise UnsupportedError(f"backend {self.name!r} has no {name}; it supports {supported}")
        raise AttributeError(f"backend has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refused."""
        raise AttributeError(f"a backend cannot be changed: {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        """Refused."""
        raise AttributeError(f"a backend cannot be changed: {name!r}")

    def __repr__(self) -> str:
        """As it is asked for."""
        return f"backend.get({self.name!r})"


made: dict[str, Backend] = {}  # one object a name, so that compiled code can rely on it


def get(name: str) -> Backend:
    """The backend of this name.

    Args:
        name: ``"torch"`` (the mirror itself, any device), ``"cann"`` (operators of an Ascend NPU, or the emulator's) or
            ``"triton"`` (kernels for an Ascend NPU and an NVIDIA GPU; on a CPU in Triton's interpreter).

    Returns:
        Backend: ``"cann"`` also where no operator is there; each call then refuses by the operator's name.

    Raises:
        ContractError: no such backend.
        ImportError: ``"triton"`` where Triton is not installed, with the command that helps.

    >>> get("torch").name
    'torch'
    """
    prepare(name)
    return made[name]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def prepare(name: str) -> None:
    """Make the backend of this name once. A compiler takes that as done, and reads what was made."""
    check_choice("backend", name, BACKENDS)
    if name not in made:
        made[name] = Backend(name, FUNCTIONS_OF[name]())


def mirror_functions() -> dict[str, Callable[..., Any]]:
    """Every public function of the mirror."""
    found = {}
    for module in MODULES:
        mirror = importlib.import_module(f"dsacp_npu.{module}")
        found.update({name: getattr(mirror, name) for name in mirror.__all__ if is_function(getattr(mirror, name))})
    return found


def cann_functions() -> dict[str, Callable[..., Any]]:
    """Every function over operators."""
    cann = importlib.import_module("dsacp_npu.cann")
    return {name: getattr(cann, name) for name in cann.OPERATORS}


def triton_functions() -> dict[str, Callable[..., Any]]:
    """Every function over kernels."""
    functions = importlib.import_module("dsacp_npu.triton_ops").FUNCTIONS
    return {name: getattr(importlib.import_module(f"dsacp_npu.{file}"), name) for name, file in functions.items()}


def is_function(value: object) -> bool:
    """Whether a public name is a function, not a record or a constant."""
    return callable(value) and not isinstance(value, type)


FUNCTIONS_OF = {"torch": mirror_functions, "cann": cann_functions, "triton": triton_functions}


def public_names() -> set[str]:
    """Every public name of the mirror: the reference's, and the in-place forms."""
    return {name for module in MODULES for name in importlib.import_module(f"dsacp_npu.{module}").__all__}
