"""Launches of the rotation in halves: the index vectors of V3.2, shares that fill no tile, in place and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from dsacp_npu.kernels.rope import TILES, constants_of, key_of, rope_kernel
from dsacp_ref.rope import apply_half_rope
from tests.compare import assert_same, assert_within_budget, numpy_array
from tests.kernels.case import Case


def turning(
    tokens: int, heads: int, width: int, pairs: int, dtype: torch.dtype, *, inverse: bool = False, copy: bool = True
) -> Case:
    """Random vectors with a NaN and an infinity in one head, two tokens more in memory than the launch may touch."""
    torch.manual_seed(tokens * heads + width)
    x = torch.randn(tokens + 2, heads, width, dtype=torch.float64).to(dtype)
    x[0, -1, -1], x[0, -1, 0] = torch.nan, torch.inf
    angles = torch.rand(tokens + 2, pairs, dtype=torch.float64) * 7
    cos, sin = angles.cos().float(), angles.sin().float()
    out = torch.full_like(x, 77) if copy else x
    before, untouched = x.clone(), out[tokens:].clone()

    def check() -> None:
        table = cos[:tokens].numpy(), sin[:tokens].numpy() * np.float32(-1 if inverse else 1)
        source, turned = numpy_array(before[:tokens]), slice(0, 2 * pairs)
        with np.errstate(invalid="ignore"):
            exact = apply_half_rope(source, *(part.astype(np.float64) for part in table))
            rounded = torch.from_numpy(apply_half_rope(source.astype(np.float32), *table)).to(dtype)
        assert_within_budget(out[:tokens, :, turned], exact[:, :, turned], rounded[:, :, turned])
        assert_same(out[:tokens, :, 2 * pairs :], before[:tokens, :, 2 * pairs :], "channels that do not turn")
        assert_same(out[tokens:], untouched, "beyond the tokens")

    rows = TILES["a2"][key_of(pairs, x.element_size())]["rows"]
    return Case(
        kernel=rope_kernel,
        arguments={"x_ptr": x, "cos_ptr": cos, "sin_ptr": sin, "out_ptr": out, "num_tokens": tokens},
        constexprs=constants_of(heads, width, pairs, rows, inverse=inverse, copy=copy, halves=True),
        programs=2,
        check=check,
    )


CASES: dict[str, Callable[[], Case]] = {
    "index keys": partial(turning, 37, 1, 128, 32, torch.bfloat16),
    "index keys in float32": partial(turning, 37, 1, 128, 32, torch.float32),
    "64 index heads": partial(turning, 2, 64, 128, 32, torch.bfloat16),
    "5 heads, 3 pairs of 20 channels in place": partial(turning, 9, 5, 20, 3, torch.float16, copy=False),
    "whole heads back": partial(turning, 4, 3, 64, 32, torch.bfloat16, inverse=True),
    "long heads": partial(turning, 2, 3, 600, 8, torch.float32),
}
