"""Launches of the rotation: head counts of the model, shares that fill no tile, both directions and both forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from dsacp_npu.kernels.rope import TILES, constants_of, key_of, rope_kernel
from dsacp_ref.rope import apply_inverse_rope, apply_rope
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
        table, plain = (cos[:tokens].numpy(), sin[:tokens].numpy()), width - 2 * pairs
        function = apply_inverse_rope if inverse else apply_rope
        source = numpy_array(before[:tokens])
        with np.errstate(invalid="ignore"):
            exact = function(source, *(part.astype(np.float64) for part in table))
            rounded = torch.from_numpy(function(source.astype(np.float32), *table)).to(dtype)
        assert_within_budget(out[:tokens, :, plain:], exact[:, :, plain:], rounded[:, :, plain:])
        assert_same(out[:tokens, :, :plain], before[:tokens, :, :plain], "channels that do not turn")
        assert_same(out[tokens:], untouched, "beyond the tokens")

    rows = TILES["a2"][key_of(pairs, x.element_size())]["rows"]
    return Case(
        kernel=rope_kernel,
        arguments={"x_ptr": x, "cos_ptr": cos, "sin_ptr": sin, "out_ptr": out, "num_tokens": tokens},
        constexprs=constants_of(heads, width, pairs, rows, inverse=inverse, copy=copy),
        programs=2,
        check=check,
    )


CASES: dict[str, Callable[[], Case]] = {
    "keys": partial(turning, 37, 1, 512, 32, torch.bfloat16),
    "keys in float32": partial(turning, 37, 1, 512, 32, torch.float32),
    "8 heads": partial(turning, 5, 8, 512, 32, torch.bfloat16),
    "16 heads in place": partial(turning, 3, 16, 512, 32, torch.float16, copy=False),
    "32 heads back": partial(turning, 2, 32, 512, 32, torch.bfloat16, inverse=True),
    "64 heads back in place": partial(turning, 3, 64, 512, 32, torch.bfloat16, inverse=True, copy=False),
    "64 index heads": partial(turning, 2, 64, 128, 32, torch.bfloat16),
    "128 heads": partial(turning, 1, 128, 512, 32, torch.bfloat16),
    "40 heads of 576 in float32": partial(turning, 2, 40, 576, 32, torch.float32),
    "5 heads, 3 pairs of 20 channels": partial(turning, 9, 5, 20, 3, torch.bfloat16),
    "whole heads": partial(turning, 4, 3, 64, 32, torch.float16, inverse=True),
    "one pair": partial(turning, 4, 2, 3, 1, torch.float32),
    "no tokens": partial(turning, 0, 8, 64, 8, torch.bfloat16),
}
