"""The Hadamard rotation of index vectors over a Triton kernel."""

from __future__ import annotations

import math

from dsacp_npu._tensors import Float, check_floats, check_torch, torch
from dsacp_npu._triton_launch import programs_for, tile_for
from dsacp_npu.kernels.hadamard import TILES, hadamard_constants, hadamard_kernel
from dsacp_ref.spec import UnsupportedError, contract_error

__all__ = ["hadamard"]


def hadamard(x: Float) -> Float:
    """`dsacp_ref.indexer.hadamard` by a kernel. Limits: no float64; vectors of 32, 64 or 128 channels."""
    check_torch("x", x)
    d = x.shape[-1] if getattr(x, "shape", ()) else 0
    if d < 1 or d & (d - 1):
        raise contract_error("x", "have a power of two as its last size", d, "the Sylvester matrix has no other sizes")
    check_floats("x", x, tuple(x.shape))
    if x.dtype == torch.float64:
        raise UnsupportedError("backend 'triton' has no hadamard in float64; use backend 'torch'")
    tile = tile_for(TILES, x, "hadamard", (d, x.element_size()))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_rows = x.numel() // d
    if num_rows == 0:
        return out
    programs = programs_for(x, cube=tile.at_once, waves=tile.waves)
    hadamard_kernel[(min(-(-num_rows // tile.rows), programs),)](
        x.contiguous(), out, num_rows, 1 / math.sqrt(d), **hadamard_constants(d, tile), **tile.options
    )
    return out
