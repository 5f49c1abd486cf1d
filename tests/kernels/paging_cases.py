"""Launches that write, read and find rows of a paged cache: NaN beside what is read, absent rows, blocks apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from dsacp_npu.kernels.paging import (
    GATHER_TILES,
    MAPPING_TILES,
    SCATTER_TILES,
    column_tile,
    gather_kernel,
    inner_column_tile,
    scatter_kernel,
    slot_mapping_kernel,
)
from dsacp_ref.paging import gathered_rows, scattered_rows, slot_mapping
from tests.compare import assert_same
from tests.kernels.case import Case

BLOCKS, BLOCK_SIZE = 5, 8


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Numbers of this dtype, NaN among the floats."""
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, shape).to(dtype)
    return torch.where(torch.rand(shape) < 0.1, torch.nan, torch.randn(shape)).to(dtype)


def paged(width: int, dtype: torch.dtype, apart: bool) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Memory, the cache in it, and the layout: every other block of the memory where blocks lie apart."""
    memory = numbers(dtype, BLOCKS, 2 if apart else 1, BLOCK_SIZE, width)
    cache = memory[:, 0]
    block_stride, slot_stride, _ = cache.stride()
    shift = BLOCK_SIZE.bit_length() - 1 if apart else -1
    layout = {"WIDTH": width, "SLOT_STRIDE": slot_stride, "BLOCK_STRIDE": block_stride, "BLOCK_SHIFT": shift}
    return memory, cache, layout


def slots_of(count: int, absent: float) -> torch.Tensor:
    """Distinct slots, some of them absent."""
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:count].to(torch.int32)
    return torch.where(torch.rand(count) < absent, -1, slots)


def scattering(width: int, dtype: torch.dtype, *, count: int = 21, absent: float = 0.3, apart: bool = False) -> Case:
    """Rows into a cache; what lies between its blocks stays."""
    torch.manual_seed(width)
    memory, cache, layout = paged(width, dtype, apart)
    rows, slots, before = numbers(dtype, count, width), slots_of(count, absent), memory.clone()

    def check() -> None:
        want = scattered_rows(before[:, 0].numpy(), rows.numpy(), slots.numpy())
        assert_same(cache, want)
        assert_same(memory[:, 1:], before[:, 1:], "between the blocks")

    return Case(
        kernel=scatter_kernel,
        arguments={"cache_ptr": memory, "rows_ptr": rows, "slots_ptr": slots, "num_rows": count},
        constexprs={**layout, **SCATTER_TILES["a2"][column_tile(width)]},
        programs=2,
        check=check,
    )


def gathering(width: int, dtype: torch.dtype, *, count: int = 21, absent: float = 0.3, apart: bool = False) -> Case:
    """Rows out of a cache; slot 0 holds NaN or -1, which no absent row may show."""
    torch.manual_seed(width)
    memory, cache, layout = paged(width, dtype, apart)
    slots, out = slots_of(count, absent), torch.full((count + 1, width), 77, dtype=dtype)
    cache[0, 0] = torch.nan if dtype.is_floating_point else -1

    def check() -> None:
        assert_same(out[:count], gathered_rows(cache.numpy(), slots.numpy()))
        assert (out[count] == 77).all(), "beyond the rows"

    return Case(
        kernel=gather_kernel,
        arguments={"cache_ptr": memory, "slots_ptr": slots, "out_ptr": out, "num_rows": count},
        constexprs={**layout, **GATHER_TILES["a2"][inner_column_tile(width)]},
        programs=2,
        check=check,
    )


def mapping(block_size: int, shape: tuple[int, ...]) -> Case:
    """Logical rows of three requests through a table with garbage beyond its used part."""
    rng = np.random.default_rng(block_size)
    lengths = [3 * block_size, 1, 2 * block_size - 1]
    table = np.full((3, 4), -7, np.int32)
    for request, blocks in enumerate(np.split(rng.permutation(6).astype(np.int32), [3, 4])):
        table[request, : len(blocks)] = blocks
    requests = rng.integers(-1, 3, shape[0]).astype(np.int32)
    logical = np.full(shape, -1, np.int32)
    for row, request in enumerate(requests):
        if request >= 0:
            logical[row] = rng.integers(-1, lengths[request], shape[1:])
    out = torch.full(shape, 77, dtype=torch.int32)
    count, columns = shape[0], int(np.prod(shape[1:]))

    def check() -> None:
        assert_same(out, slot_mapping(logical, requests, table, block_size))

    inputs = (torch.from_numpy(part) for part in (logical, requests, table))
    pointers = dict(zip(("logical_ptr", "requests_ptr", "table_ptr"), inputs, strict=True))
    return Case(
        kernel=slot_mapping_kernel,
        arguments={**pointers, "out_ptr": out, "num_rows": count, "num_columns": columns, "max_blocks": 4},
        constexprs={"BLOCK_SHIFT": block_size.bit_length() - 1, **MAPPING_TILES["a2"][columns > 1]},
        programs=2,
        check=check,
    )


CASES: dict[str, Callable[[], Case]] = {
    "write keys": partial(scattering, 256, torch.int32),
    "write half words": partial(scattering, 33, torch.float16),
    "write bytes": partial(scattering, 136, torch.int8),
    "write scales": partial(scattering, 1, torch.float16),
    "write wide rows": partial(scattering, 1500, torch.int32, count=5),
    "write nothing": partial(scattering, 24, torch.int32, absent=1.0),
    "write no rows": partial(scattering, 24, torch.int32, count=0),
    "write blocks that lie apart": partial(scattering, 24, torch.int32, apart=True),
    "read keys": partial(gathering, 256, torch.int32),
    "read half words": partial(gathering, 33, torch.float16),
    "read bytes": partial(gathering, 136, torch.int8),
    "read scales": partial(gathering, 1, torch.float16),
    "read wide rows": partial(gathering, 1500, torch.int32, count=5),
    "read nothing": partial(gathering, 24, torch.int32, absent=1.0),
    "read no rows": partial(gathering, 24, torch.int32, count=0),
    "read blocks that lie apart": partial(gathering, 24, torch.int32, apart=True),
    "slots of tokens": partial(mapping, 16, (300,)),
    "slots of chosen entries": partial(mapping, 64, (5, 300)),
    "slots of single rows": partial(mapping, 1, (7, 2, 3)),
    "slots of no rows": partial(mapping, 16, (0, 3)),
}
