"""Ascend's public compiler on any machine: whether a Triton kernel compiles for a chip, and what of the chip it takes.

No NPU and no CANN are needed. `compile_check` takes any kernel under ``triton.jit``, not only those of this project;
`lowered_function` executes on the CPU what the compiler made of it; `repair` puts right Triton-Ascend's interpreter.
"""

from dsacp_npu.ascend.check import CompileReport, Texts, compile_check
from dsacp_npu.ascend.execute import LoweredFunction, lowered_function
from dsacp_npu.ascend.interpreter import repair
from dsacp_npu.ascend.lints import EXPLANATIONS, Lint
from dsacp_npu.ascend.lowering import LoweringError
from dsacp_npu.ascend.plan import TARGETS, Chip

__all__ = [
    "EXPLANATIONS",
    "TARGETS",
    "Chip",
    "CompileReport",
    "Lint",
    "LoweredFunction",
    "LoweringError",
    "Texts",
    "compile_check",
    "lowered_function",
    "repair",
]
