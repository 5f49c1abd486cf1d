"""Small kernels that each show one thing to the execution of lowered kernels."""

import pytest

triton = pytest.importorskip("triton", reason="no triton-ascend: make ascend")
tl = triton.language


@triton.jit
def double_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """out = 2 x on the first places, blocks shared by the programs."""
    for block in range(tl.program_id(0), (count + BLOCK - 1) // BLOCK, tl.num_programs(0)):
        places = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + places, mask=places < count, other=0.0)
        tl.store(out_ptr + places, 2.0 * x, mask=places < count)


@triton.jit
def double_one_too_many_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """The same in one block, with a mask that is one too long."""
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < count, other=0.0)
    tl.store(out_ptr + places, 2.0 * x, mask=places <= count)


@triton.jit
def double_in_front_kernel(x_ptr, out_ptr, count, early, BLOCK: tl.constexpr):
    """The same, some places early."""
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < count, other=0.0)
    tl.store(out_ptr + places - early, 2.0 * x, mask=places < count)


@triton.jit
def scaled_kernel(x_ptr, out_ptr, factor, shift, BLOCK: tl.constexpr):
    """out = factor x + shift in bf16: scalars of both kinds."""
    places = tl.arange(0, BLOCK)
    scaled = factor * tl.load(x_ptr + places).to(tl.float32) + shift
    tl.store(out_ptr + places, scaled.to(tl.bfloat16))


@triton.jit
def divided_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """x // 64 of int32, as a division and as a shift."""
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places)
    tl.store(out_ptr + places, x // 64)
    tl.store(out_ptr + BLOCK + places, x >> 6)


@triton.jit
def rounded_kernel(x_ptr, whole_ptr, out_ptr, BLOCK: tl.constexpr):
    """Floor, ceiling and truncation; where x is NaN, 0."""
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places)
    known = tl.where(x != x, 0.0, x)
    tl.store(out_ptr + places, tl.floor(known))
    tl.store(out_ptr + BLOCK + places, tl.ceil(known))
    tl.store(whole_ptr + places, known.to(tl.int32))


@triton.jit
def larger_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """The larger of x and 0: without NaN, and with."""
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places)
    tl.store(out_ptr + places, tl.maximum(x, 0.0))
    tl.store(out_ptr + BLOCK + places, tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def running_sums_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Running sums down the columns, and backwards along the rows."""
    places = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + places)
    tl.store(out_ptr + places, tl.cumsum(x, axis=0))
    tl.store(out_ptr + ROWS * COLUMNS + places, tl.cumsum(x, axis=1, reverse=True))


@triton.jit
def sorted_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Every row sorted, up and down."""
    places = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + places)
    tl.store(out_ptr + places, tl.sort(x))
    tl.store(out_ptr + ROWS * COLUMNS + places, tl.sort(x, descending=True))


@triton.jit
def gathered_kernel(x_ptr, index_ptr, out_ptr, BLOCK: tl.constexpr):
    """x by its index, and back to front."""
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places)
    tl.store(out_ptr + places, tl.gather(x, tl.load(index_ptr + places), 0))
    tl.store(out_ptr + BLOCK + places, tl.flip(x))


@triton.jit
def paired_kernel(x_ptr, out_ptr, PAIRS: tl.constexpr):
    """The two of every pair swapped."""
    places = tl.arange(0, 2 * PAIRS)
    even, odd = tl.split(tl.reshape(tl.load(x_ptr + places), (PAIRS, 2)))
    tl.store(out_ptr + places, tl.interleave(odd, even))


@triton.jit
def largest_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """The place of the largest."""
    tl.store(out_ptr, tl.argmax(tl.load(x_ptr + tl.arange(0, BLOCK)), axis=0))
