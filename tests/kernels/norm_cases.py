"""Launches of the RMS norm: with weights and without, rows that fill no tile, widths that are no power of two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from dsacp_npu.kernels.norm import TILES, norm_constants, norm_key, rms_norm_kernel
from dsacp_ref.compressor import rms_norm
from tests.compare import assert_same, assert_within_budget, numpy_array
from tests.kernels.case import Case

EPS = 1e-6


def norming(rows: int, channels: int, dtype: torch.dtype, *, weighted: bool = True) -> Case:
    """Random rows, one with a NaN, one of zeros, and one more in memory than the launch may touch."""
    torch.manual_seed(rows * channels)
    x = torch.randn(rows + 1, channels, dtype=torch.float64).to(dtype)
    x[rows // 2], x[0, -1] = 0, torch.nan
    weight = (1 + torch.randn(channels, dtype=torch.float64) / 4).to(dtype)
    out = torch.full_like(x, 77)

    def check() -> None:
        source, scale = numpy_array(x[:rows]), numpy_array(weight) if weighted else None
        with np.errstate(invalid="ignore"):
            exact = rms_norm(*as_kind("float64", source, scale), EPS)
            plains = [rms_norm(*as_kind("float32", source, scale), EPS), in_order(*as_kind("float32", source, scale))]
        assert_within_budget(out[:rows], exact, [torch.from_numpy(plain).to(dtype) for plain in plains], "norm")
        assert_same(out[rows:], torch.full_like(out[rows:], 77), "beyond the rows")

    return Case(
        kernel=rms_norm_kernel,
        arguments={
            "x_ptr": x,
            "weight_ptr": weight,
            "out_ptr": out,
            "num_rows": rows,
            "eps": EPS,
        },
        constexprs=norm_constants(channels, weighted, TILES["a2"][norm_key(channels)]),
        programs=2,
        check=check,
    )


def as_kind(kind: str, *arrays: np.ndarray | None) -> list[np.ndarray | None]:
    """The arrays in this dtype, for those that there are."""
    return [array if array is None else array.astype(kind) for array in arrays]


def in_order(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """The norm with its sum taken from one channel to the next, as lowered kernels do; numpy adds in pairs."""
    squares = np.cumsum(x * x, axis=-1)[:, -1:]
    return x / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(EPS)) * (1 if weight is None else weight)


CASES: dict[str, Callable[[], Case]] = {
    "heads": partial(norming, 70, 512, torch.bfloat16, weighted=False),
    "keys in float32": partial(norming, 5, 512, torch.float32),
    "low-rank queries": partial(norming, 9, 1536, torch.bfloat16),
    "hidden rows": partial(norming, 3, 7168, torch.float16),
    "7 channels": partial(norming, 40, 7, torch.float32, weighted=False),
}
