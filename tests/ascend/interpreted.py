"""One tiny kernel for each fault of the interpreter, and what it gives: as a program, without the repairs, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="no triton-ascend: make ascend")
tl = triton.language

SIDE = 16


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, SIDE: tl.constexpr):
    """A matrix product of bf16."""
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def cast_kernel(source_ptr, out_ptr, COUNT: tl.constexpr):
    """A copy, cast to the type of the output."""
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, tl.load(source_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def square_kernel(source_ptr, out_ptr, COUNT: tl.constexpr):
    """Squares, in the type of the input."""
    at = tl.arange(0, COUNT)
    source = tl.load(source_ptr + at)
    tl.store(out_ptr + at, (source * source).to(tl.float32))


@triton.jit
def row_sum_kernel(source_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of each row."""
    row = tl.arange(0, ROWS)
    source = tl.load(source_ptr + row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    tl.store(out_ptr + row, tl.sum(source, axis=1))


@triton.jit
def running_sum_kernel(source_ptr, out_ptr, COUNT: tl.constexpr):
    """Running sums."""
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, tl.cumsum(tl.load(source_ptr + at), axis=0))


@triton.jit
def truth_sum_kernel(source_ptr, out_ptr, COUNT: tl.constexpr):
    """How many are positive, summed in int1."""
    positive = tl.load(source_ptr + tl.arange(0, COUNT)) > 0
    tl.store(out_ptr, tl.sum(positive, axis=0).to(tl.int32))


@triton.jit
def larger_kernel(source_ptr, out_ptr, COUNT: tl.constexpr):
    """The larger of each number and zero; and the largest of all, in the last place."""
    at = tl.arange(0, COUNT)
    source = tl.load(source_ptr + at)
    tl.store(out_ptr + at, tl.maximum(source, 0.0))
    tl.store(out_ptr + COUNT, tl.max(source, axis=0))


@triton.jit
def task_kernel(out_ptr, tasks):
    """One, for every task of a loop over the grid."""
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        tl.store(out_ptr + task, 1)


@triton.jit
def infinite_kernel(source_ptr, out_ptr, COUNT: tl.constexpr):
    """Each number less itself."""
    at = tl.arange(0, COUNT)
    source = tl.load(source_ptr + at)
    tl.store(out_ptr + at, source - source)


@triton.jit
def sorted_kernel(source_ptr, out_ptr, COUNT: tl.constexpr):
    """Largest first."""
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, tl.sort(tl.load(source_ptr + at), descending=True))


@triton.jit
def topk_kernel(source_ptr, out_ptr, COUNT: tl.constexpr, K: tl.constexpr):
    """The K largest, largest first."""
    source = tl.load(source_ptr + tl.arange(0, COUNT))
    tl.store(out_ptr + tl.arange(0, K), tl.topk(source, K))


@triton.jit
def gathered_kernel(source_ptr, out_ptr, COUNT: tl.constexpr):
    """Back to front, by a gather."""
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, tl.gather(tl.load(source_ptr + at), COUNT - 1 - at, 0))


@triton.jit
def sliced_kernel(source_ptr, out_ptr, COUNT: tl.constexpr, HALF: tl.constexpr):
    """The two halves swapped, by slices; the last number, by its place, behind them."""
    at = tl.arange(0, COUNT)
    source = tl.load(source_ptr + at)
    swapped = tl.insert_slice(source, tl.extract_slice(source, (HALF,), (HALF,), (1,)), (0,), (HALF,), (1,))
    swapped = tl.insert_slice(swapped, tl.extract_slice(source, (0,), (HALF,), (1,)), (HALF,), (HALF,), (1,))
    tl.compile_hint(swapped, "hint")
    tl.store(out_ptr + at, swapped)
    tl.store(out_ptr + COUNT, tl.get_element(source, (COUNT - 1,)))


@triton.jit
def parallel_kernel(out_ptr, COUNT: tl.constexpr):
    """One, for every turn of a parallel loop."""
    for turn in tl.parallel(0, COUNT):
        tl.store(out_ptr + turn, 1)


def numbers(count: int = 256) -> torch.Tensor:
    """Normal numbers, always the same."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def bf16_product() -> list[float]:
    """Sums of 16 products of ones."""
    ones = torch.ones(SIDE, SIDE, dtype=torch.bfloat16)
    out = torch.zeros(SIDE, SIDE)
    product_kernel[(1,)](ones, ones, out, SIDE)
    return [out.min().item(), out.max().item()]


def bf16_rounding() -> int:
    """How many of 256 numbers are rounded to another bf16 than torch does."""
    source, out = numbers(), torch.zeros(256, dtype=torch.bfloat16)
    cast_kernel[(1,)](source, out, 256)
    return int((out != source.to(torch.bfloat16)).sum())


def bf16_from_int() -> int:
    """How many of 16 integers become another bf16 number."""
    source, out = torch.arange(16, dtype=torch.int32), torch.zeros(16, dtype=torch.bfloat16)
    cast_kernel[(1,)](source, out, 16)
    return int((out != source.to(torch.bfloat16)).sum())


def bf16_square() -> int:
    """How many of 256 squares are wrong by more than bf16 rounds."""
    source, out = numbers().to(torch.bfloat16), torch.zeros(256)
    square_kernel[(1,)](source, out, 256)
    return int(((out - source.float() ** 2).abs() > 0.01 * source.float() ** 2).sum())


def int32_sum() -> list[int]:
    """Four sums of four ones, and the number behind them, which nobody should write."""
    out = torch.full((8,), 7, dtype=torch.int32)
    row_sum_kernel[(1,)](torch.ones(4, 4, dtype=torch.int32), out, 4, 4)
    return out[:5].tolist()


def int32_running_sum() -> list[int]:
    """Running sums of four ones, and the number behind them."""
    out = torch.full((8,), 7, dtype=torch.int32)
    running_sum_kernel[(1,)](torch.ones(4, dtype=torch.int32), out, 4)
    return out[:5].tolist()


def int1_sum() -> int:
    """How many of four are positive, summed in int1."""
    out = torch.zeros(2, dtype=torch.int32)
    truth_sum_kernel[(1,)](torch.ones(4), out, 4)
    return int(out[0])


def larger() -> list[bool]:
    """Whether NaN lost against zero; whether the largest of all is a number."""
    source, out = torch.tensor([1.0, float("nan"), -1.0, 2.0]), torch.zeros(5)
    larger_kernel[(1,)](source, out, 4)
    return (out[[1, 4]] == torch.tensor([0.0, 2.0])).tolist()


def task_loop() -> list[int]:
    """Five tasks on two programs."""
    out = torch.zeros(5, dtype=torch.int32)
    task_kernel[(2,)](out, 5)
    return out.tolist()


def infinite() -> bool:
    """Whether inf - inf is NaN, where warnings are errors."""
    import warnings

    out = torch.zeros(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infinite_kernel[(1,)](torch.full((4,), float("inf")), out, 4)
    return bool(out.isnan().all())


def descending() -> bool:
    """Whether the numbers come largest first."""
    source, out = numbers(), torch.zeros(256)
    sorted_kernel[(1,)](source, out, 256)
    return torch.equal(out, source.sort(descending=True).values)


def largest() -> bool:
    """Whether the 16 largest come largest first."""
    source, out = numbers(), torch.zeros(16)
    topk_kernel[(1,)](source, out, 256, 16)
    return torch.equal(out, source.topk(16).values)


def gathered() -> bool:
    """Whether the numbers come back to front."""
    source, out = numbers(), torch.zeros(256)
    gathered_kernel[(1,)](source, out, 256)
    return torch.equal(out, source.flip(0))


def sliced() -> bool:
    """Whether the halves are swapped, with the last number behind them."""
    source, out = numbers(), torch.zeros(257)
    sliced_kernel[(1,)](source, out, 256, 128)
    return torch.equal(out, torch.cat([source.roll(128), source[-1:]]))


def parallel() -> list[int]:
    """Four turns of a parallel loop."""
    out = torch.zeros(4, dtype=torch.int32)
    parallel_kernel[(1,)](out, 4)
    return out.tolist()


RIGHT: dict[Callable[[], Any], Any] = {
    bf16_product: [16.0, 16.0],
    bf16_rounding: 0,
    bf16_from_int: 0,
    bf16_square: "arithmetic on bf16 outside of tl.dot",
    int32_sum: [4, 4, 4, 4, 7],
    int32_running_sum: [1, 2, 3, 4, 7],
    int1_sum: "a sum of int1 wraps around",
    larger: [True, True],
    task_loop: [1] * 5,
    infinite: True,
    descending: True,
    largest: True,
    gathered: True,
    sliced: True,
    parallel: [1] * 4,
}


def seen(function: Callable[[], Any]) -> Any:
    """What the function gives, or the text of what it raises."""
    try:
        return function()
    except Exception as error:
        return str(error)


if __name__ == "__main__":
    print(json.dumps({function.__name__: seen(function) for function in RIGHT}))
