"""Finding the operators of an Ascend library, and saying what is missing or what they do not take.

An operator is looked up by namespace and name at the moment it is called: which library carries it differs by version.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from dsacp_npu._tensors import Float, dtype_name, torch
from dsacp_ref.spec import UnsupportedError

__all__ = ["NAMESPACES", "find_operator", "has_argument", "operator"]

NAMESPACES = ("_C_ascend", "npu", "custom")
FIX = (
    "install torch_npu and load vllm-ascend's operator library, or call dsacp_npu.emulator.install() on a machine "
    "without an NPU"
)
HALVES = ("bfloat16", "float16")

device_package: dict[str, str] = {}  # what importing torch_npu came to, once it was tried


def import_device_package() -> str:
    """Import torch_npu where it is installed, once; what came of it, for an error text."""
    if "torch_npu" not in device_package:
        device_package["torch_npu"] = "torch_npu is not installed"
        if importlib.util.find_spec("torch_npu") is not None:
            try:
                importlib.import_module("torch_npu")
                device_package["torch_npu"] = "torch_npu is loaded"
            except Exception as error:  # a driver or library that is missing shows in many ways
                device_package["torch_npu"] = f"importing torch_npu failed: {error!r}"
    return device_package["torch_npu"]


def namespace_of(name: str) -> str:
    """The first namespace that has the operator; empty if none has."""
    for namespace in NAMESPACES:
        if hasattr(getattr(torch.ops, namespace), name):
            return namespace
    return ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def find_operator(*names: str, needing: str = "") -> tuple[str, str]:
    """Namespace and name of the first of these operators that is there (and has an argument); else two empty words."""
    for attempt in (0, 1):
        for name in names:
            namespace = namespace_of(name)
            if namespace and (not needing or needing in argument_names(namespace, name)):
                return namespace, name
        if attempt == 0:
            import_device_package()
    return "", ""


def argument_names(namespace: str, name: str) -> list[str]:
    """The argument names in the schema of an operator that is there."""
    return [argument.name for argument in getattr(getattr(torch.ops, namespace), name).default._schema.arguments]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_argument(namespace: str, name: str, argument: str) -> bool:
    """Whether the operator that was found takes this argument."""
    return argument in argument_names(namespace, name)


def operator(*names: str, needing: str = "") -> Any:
    """The first of these operators that is there, refused by name when none is."""
    namespace, name = find_operator(*names, needing=needing)
    if not name:
        having = f" with argument {needing}" if needing else ""
        raise UnsupportedError(
            f"operator {' or '.join(names)}{having} is not in {', '.join(NAMESPACES)}; {import_device_package()}; {FIX}"
        )
    return getattr(getattr(torch.ops, namespace), name)


def limit_error(function: str, name: str, rule: str, got: object) -> UnsupportedError:
    """The error for a call that is legal, but that the function's operator does not take."""
    return UnsupportedError(f"{function} on cann: {name} must {rule}, got {got}; use the torch backend for it")


def check_limit(function: str, name: str, value: int, allowed: Iterable[int]) -> None:
    """Refuse a size that the operator has not."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise limit_error(function, name, f"be {' or '.join(map(str, allowed))}", value)


def check_dtype(function: str, name: str, tensor: Float, dtypes: tuple[str, ...] = HALVES) -> None:
    """Refuse a dtype that the operator does not compute in."""
    if dtype_name(tensor) not in dtypes:
        raise limit_error(function, name, f"have dtype {' or '.join(dtypes)}", dtype_name(tensor))


def check_multiple(function: str, name: str, value: int, step: int, least: int, most: int) -> None:
    """Refuse a size that is no multiple, or lies outside the operator's range."""
    if value % step or not least <= value <= most:
        raise limit_error(function, name, f"be a multiple of {step} in {least}..{most}", value)


def check_contiguous(function: str, name: str, cache: Float) -> None:
    """Refuse a cache with gaps or turned axes, where the operator takes none: a copy of all of it would be hidden."""
    if not cache.is_contiguous():
        raise limit_error(function, name, "be contiguous", f"strides {cache.stride()}")


def in_float32(function: str, name: str, tensor: Float) -> Float:
    """The float32 tensor that the operator takes; shorter floats widen exactly, float64 would lose digits unasked."""
    check_dtype(function, name, tensor, ("float32", *HALVES))
    return tensor.to(torch.float32)
