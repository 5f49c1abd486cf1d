"""Launches that pack and unpack the buffers of the heads/tokens exchange."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from dsacp_npu.kernels.exchange import TILES, exchange_kernel
from dsacp_npu.kernels.paging import column_tile
from tests.compare import assert_same
from tests.kernels.case import Case


def exchanging(rows: int, ranks: int, width: int, dtype: torch.dtype, *, pack: bool) -> Case:
    """Every word its own number, as far as its dtype goes."""
    shape = (rows, ranks, width) if pack else (ranks, rows, width)
    x = torch.arange(rows * ranks * width).remainder(127).to(dtype).reshape(shape)
    out = torch.full((x.numel() + 3,), 77, dtype=dtype)

    def check() -> None:
        assert_same(out[: x.numel()], x.transpose(0, 1).reshape(-1))
        assert (out[x.numel() :] == 77).all(), "beyond the buffer"

    return Case(
        kernel=exchange_kernel,
        arguments={"x_ptr": x, "out_ptr": out, "num_rows": rows},
        constexprs={"RANKS": ranks, "WIDTH": width, "PACK": pack, **TILES["a2"][column_tile(width)]},
        programs=2,
        check=check,
    )


CASES: dict[str, Callable[[], Case]] = {
    f"{'pack' if pack else 'unpack'} {name}": partial(exchanging, *sizes, pack=pack)
    for name, sizes in {
        "8 heads of 512": (19, 8, 2048, torch.int32),
        "shares that fill no tile": (5, 3, 1500, torch.int32),
        "half words": (70, 2, 33, torch.float16),
        "bytes": (9, 5, 7, torch.int8),
        "one number": (70, 3, 1, torch.int32),
        "for one rank": (3, 1, 256, torch.int32),
        "no rows": (0, 4, 8, torch.int32),
    }.items()
    for pack in (True, False)
}
