"""The Hadamard rotation of index vectors over a Triton kernel."""

from __future__ import annotations

import math

from dsacp_npu._tensors import Float, torch
from dsacp_npu._triton_launch import programs_for, tile_for
from dsacp_npu.indexer import check_rotation
from dsacp_npu.kernels.hadamard import TILES, hadamard_constants, hadamard_kernel
from dsacp_ref.spec import UnsupportedError

__all__ = ["hadamard"]


def hadamard(x: Float) -> Float:
    """`dsacp_ref.indexer.hadamard` by a kernel. Limits: no float64; vectors of 32, 64 or 128 channels."""
    check_rotation(x)
    d = x.shape[-1]
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
