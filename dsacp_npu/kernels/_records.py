"""What a kernel says of itself, for the compile check and the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["FAMILIES", "Compilation"]

# Families of targets with tile tables of their own: A2 and A3 are planned alike by the Ascend compiler.
FAMILIES = ("a2", "a5", "cuda")


class Compilation(NamedTuple):
    """One way in which a kernel is compiled.

    Fields:
        name: str, the concept and what sets this one apart: ``"rope/64 heads"``.
        kernel: the function under ``triton.jit``.
        signature: every argument that is not a constexpr, in order, with its type: ``"*bf16"``, ``"i32"``, ``"fp32"``.
        constexprs: every other argument with its value.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
