"""Launches of the Hadamard rotation: every width, at once and by factors, rows that fill no tile, a row with a NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from dsacp_npu.kernels.hadamard import TILES, hadamard_constants, hadamard_kernel
from dsacp_ref.indexer import hadamard
from tests.compare import assert_same, assert_within_budget, numpy_array
from tests.kernels.case import Case


def rotating(rows: int, channels: int, dtype: torch.dtype, family: str = "a2") -> Case:
    """Random vectors, one with a NaN, one with an infinity, and one more in memory than the launch may touch."""
    torch.manual_seed(rows * channels)
    x = torch.randn(rows + 1, channels, dtype=torch.float64).to(dtype)
    x[rows // 2, 1], x[0, -1] = torch.nan, -torch.inf
    out = torch.full_like(x, 77)

    def check() -> None:
        source = numpy_array(x[:rows]).astype("float32")
        plains = [torch.from_numpy(plain).to(dtype) for plain in (hadamard(source), in_order(source))]
        assert_within_budget(out[:rows], hadamard(source.astype("float64")), plains, "rotated")
        assert_same(out[rows:], torch.full_like(out[rows:], 77), "beyond the rows")

    return Case(
        kernel=hadamard_kernel,
        arguments={"x_ptr": x, "out_ptr": out, "num_rows": rows, "scale": channels**-0.5},
        constexprs=hadamard_constants(channels, TILES[family][channels, x.element_size()]),
        programs=2,
        check=check,
    )


def in_order(x: np.ndarray) -> np.ndarray:
    """The rotation in float32 with each sum taken from one channel to the next, as lowered products do."""
    d = x.shape[-1]
    signs = np.sign(hadamard(np.eye(d))).astype(np.float32)
    return np.cumsum(x[..., None] * signs, axis=-2)[..., -1, :] * np.float32(d**-0.5)


CASES: dict[str, Callable[[], Case]] = {
    "128 channels": partial(rotating, 150, 128, torch.bfloat16),
    "128 channels in float16": partial(rotating, 64, 128, torch.float16),
    "128 channels in float32": partial(rotating, 5, 128, torch.float32),
    "64 channels": partial(rotating, 70, 64, torch.bfloat16),
    "32 channels in float32": partial(rotating, 130, 32, torch.float32),
    "128 channels by factors": partial(rotating, 37, 128, torch.bfloat16, "a5"),
    "128 channels in float32 by factors": partial(rotating, 20, 128, torch.float32, "a5"),
    "64 channels in float16 by factors": partial(rotating, 33, 64, torch.float16, "a5"),
    "32 channels by factors": partial(rotating, 70, 32, torch.bfloat16, "a5"),
}
