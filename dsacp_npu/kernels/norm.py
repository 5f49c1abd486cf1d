"""The RMS norm of rows: of hidden rows and low-rank queries with weights, of query heads without."""

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation
from dsacp_npu.kernels.compressor import Tile, gpu, least

__all__ = ["TILES", "compilations", "norm_constants", "norm_key", "rms_norm_kernel"]

# By the most channels that a row may have.
NPU_TILES = {512: Tile(16), 1024: Tile(8), 2048: Tile(4), 4096: Tile(2), 8192: Tile(1)}
TILES = {
    "a2": NPU_TILES,
    "a5": NPU_TILES,
    "cuda": {channels: gpu(8192 // channels, 64, 4) for channels in NPU_TILES},
}
SIGNATURE = {**dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16"), "num_rows": "i32", "eps": "fp32"}


def norm_key(channels: int) -> int:
    """What `TILES` has a tile by, for the norm of so many channels."""
    return least(channels, tuple(NPU_TILES))


def norm_constants(channels: int, weighted: bool, tile: Tile) -> dict[str, int]:
    """The constexprs of `rms_norm_kernel`."""
    return {"D": channels, "SIZE": triton.next_power_of_2(channels), "WEIGHTED": weighted, "ROWS": tile.rows}


@triton.jit(do_not_specialize=["num_rows", "eps"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows [num_rows, D] over their root mean square, times a weight a channel where there is one.

    NaN makes its row NaN. Without weights `weight_ptr` is not read.
    """
    channels = tl.arange(0, SIZE)
    slots = tl.arange(0, ROWS)
    inside = slots[:, None] * D + channels[None, :]
    if WEIGHTED:
        weight = tl.load(weight_ptr + channels, mask=channels < D, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), (num_rows + ROWS - 1) // ROWS, tl.num_programs(0)):
        here = (slots < num_rows - tile * ROWS)[:, None] & (channels < D)[None, :]
        at = tl.cast(tile, tl.int64) * (ROWS * D)
        x = tl.load(x_ptr + at + inside, mask=here, other=0.0).to(tl.float32)
        normed = x / tl.sqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        if WEIGHTED:
            normed = normed * weight[None, :]
        tl.store(out_ptr + at + inside, normed.to(out_ptr.dtype.element_ty), mask=here)


def compilations(family: str) -> list[Compilation]:
    """The norms of DeepSeek-V4's layers."""
    made = []
    for channels, weighted in ((512, False), (512, True), (1024, True), (1536, True), (4096, True), (7168, True)):
        for kind in ("*bf16", "*fp32"):
            name = f"norm/{channels} channels{', weighted' * weighted}, {kind[1:]}"
            constants = norm_constants(channels, weighted, TILES[family][norm_key(channels)])
            signature = SIGNATURE | dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), kind)
            made.append(Compilation(name, rms_norm_kernel, signature, constants))
    return made
