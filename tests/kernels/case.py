"""One launch of one kernel, with everything that is needed to see whether it computed the right thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
}


class Case(NamedTuple):
    """A launch. Cases are made anew for each run, because a kernel writes into its arguments.

    Fields:
        kernel: the function under ``triton.jit``.
        arguments: every argument that is not a constexpr, in the kernel's order: contiguous tensors, ints, floats.
        constexprs: every other argument.
        programs: the size of the grid.
        check: asserts that the arguments hold what they should once the kernel has run.
    """

    kernel: Any
    arguments: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    programs: int
    check: Callable[[], None]


def signature_of(case: Case) -> dict[str, str]:
    """The types of a case's arguments, in the compiler's words."""
    return {name: type_of(value) for name, value in case.arguments.items()}


def type_of(value: Any) -> str:
    """The type of one argument."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
