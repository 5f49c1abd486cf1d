"""Triton, from one place: the language that the kernels are written in, and what to do where it is missing."""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        f"the kernels are written in Triton ({error}); for an Ascend NPU or a CPU use triton-ascend, in an environment "
        "of its own (make ascend), on an NVIDIA GPU pip install triton"
    ) from error

__all__ = ["tl", "triton"]
