"""The Hadamard rotation of index vectors: times a matrix of signs that the kernel makes itself, or by its factors.

A matrix engine multiplies by all signs at once; they are exact in every dtype, so 16-bit vectors are multiplied as they
are: exact products, summed in float32, scaled and rounded once. The factors add and subtract pairs in float32, which is
for devices that multiply float32 slowly, or would leave a vector core idle beside the matrix engine.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation

__all__ = ["TILES", "Tile", "compilations", "hadamard_constants", "hadamard_kernel"]

WIDTHS = (32, 64, 128)


class Tile(NamedTuple):
    """How a device rotates vectors.

    Fields:
        rows: vectors at a time.
        at_once: whether they are multiplied by the whole matrix, or by its factors one after another.
        waves: programs a multiprocessor of a GPU.
        options: launch options of a GPU.
    """

    rows: int
    at_once: bool
    waves: int = 1
    options: Mapping[str, int] = MappingProxyType({})


def gpu(rows: int, at_once: bool, waves: int) -> Tile:
    """A tile of a GPU."""
    return Tile(rows, at_once, waves, MappingProxyType({"num_warps": 4, "num_stages": 2}))


# By the channels of a vector and the bytes of a number.
TILES: dict[str, dict[tuple[int, int], Tile]] = {
    "a2": {(width, size): Tile(64, True) for width in WIDTHS for size in (2, 4)},
    "a5": {(width, size): Tile(2048 // width, False) for width in WIDTHS for size in (2, 4)},
    "cuda": {(width, 2): gpu(64, True, 3) for width in WIDTHS} | {(width, 4): gpu(16, False, 8) for width in WIDTHS},
}


@triton.jit
def sylvester_signs(D: tl.constexpr, dtype: tl.constexpr):
    """The matrix [D, D] of at most 256 rows: -1 where the numbers of row and column share an odd count of bits."""
    places = tl.arange(0, D)
    bits = places[:, None] & places[None, :]
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return (1 - 2 * (bits & 1)).to(tl.float32).to(dtype)


@triton.jit
def by_factors(x, FACTORS: tl.constexpr):
    """x [rows, 2**FACTORS] times the matrix: each factor sums neighbours into the front half, and subtracts behind."""
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    for _ in tl.static_range(FACTORS):
        even, odd = tl.split(tl.reshape(x, [rows, width // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), [rows, width])
    return x


@triton.jit(do_not_specialize=["num_rows", "scale"])
def hadamard_kernel(x_ptr, out_ptr, num_rows, scale, D: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr):
    """out = x [num_rows, D] times the Sylvester matrix, times scale; rounded once.

    Args:
        FACTORS: log2(D) to multiply by the factors; 0 to multiply by the matrix at once, whatever D is.

    NaN makes its row NaN, and no other. D is a power of two from 16 to 256.
    """
    channels = tl.arange(0, D)
    slots = tl.arange(0, ROWS)
    inside = slots[:, None] * D + channels[None, :]
    if FACTORS == 0:
        matrix = sylvester_signs(D, x_ptr.dtype.element_ty)
    for tile in range(tl.program_id(0), (num_rows + ROWS - 1) // ROWS, tl.num_programs(0)):
        here = (slots < num_rows - tile * ROWS)[:, None]
        at = tl.cast(tile, tl.int64) * (ROWS * D)
        x = tl.load(x_ptr + at + inside, mask=here, other=0.0)
        rotated = tl.dot(x, matrix, input_precision="ieee") if FACTORS == 0 else by_factors(x.to(tl.float32), FACTORS)
        tl.store(out_ptr + at + inside, (rotated * scale).to(out_ptr.dtype.element_ty), mask=here)


def hadamard_constants(channels: int, tile: Tile) -> dict[str, int]:
    """The constexprs of `hadamard_kernel`."""
    return {"D": channels, "FACTORS": 0 if tile.at_once else channels.bit_length() - 1, "ROWS": tile.rows}


def compilations(family: str) -> list[Compilation]:
    """Every width in every dtype."""
    made = []
    for (width, size), tile in TILES[family].items():
        for kind in ("fp32",) if size == 4 else ("bf16", "fp16"):
            signature = {"x_ptr": f"*{kind}", "out_ptr": f"*{kind}", "num_rows": "i32", "scale": "fp32"}
            name = f"hadamard/{width} channels, {kind}"
            made.append(Compilation(name, hadamard_kernel, signature, hadamard_constants(width, tile)))
    return made
