"""Functions of backend `triton` that work row by row: rotation, paged caches, buffers of the heads/tokens exchange.

Rows that only move are handed to the kernels as words of 4, 2 or 1 bytes: any dtype will do, and keeps every bit.
"""

from __future__ import annotations

from dsacp_npu import exchange, paging, rope
from dsacp_npu._tensors import Float, Int32, check_floats, check_tensor, dtype_name, torch, values_known
from dsacp_npu._triton_launch import check_runs, programs_for, tile_for
from dsacp_npu.kernels import exchange as exchange_kernels
from dsacp_npu.kernels import paging as paging_kernels
from dsacp_npu.kernels import rope as rope_kernels
from dsacp_ref.spec import INT32_MAX, UnsupportedError, check_int

__all__ = [
    "apply_half_rope",
    "apply_inverse_rope",
    "apply_inverse_rope_",
    "apply_rope",
    "apply_rope_",
    "gathered_rows",
    "packed_heads",
    "scattered_rows",
    "scattered_rows_",
    "slot_mapping",
    "unpacked_heads",
]

FLOATS = ("float32", "bfloat16", "float16")
WORDS = {4: torch.int32, 2: torch.float16, 1: torch.int8}
WAVES = 64  # programs a multiprocessor of a GPU: enough rows in flight to fill its memory
ROW_WAVES = 32  # where a program moves one row at a time


def limit_error(function: str, name: str, requirement: str, got: object) -> UnsupportedError:
    """What a kernel does not take, by name."""
    return UnsupportedError(f"{function} on triton: {name} must {requirement}, got {got}; use backend 'torch'")


def apply_rope(x: Float, cos: Float, sin: Float) -> Float:
    """`dsacp_ref.rope.apply_rope`, in one pass. Limits: a float32 table, and no float64."""
    return turned("apply_rope", x, cos, sin, inverse=False)


def apply_half_rope(x: Float, cos: Float, sin: Float) -> Float:
    """`dsacp_ref.rope.apply_half_rope`, in one pass. Limits: a float32 table, and no float64."""
    return turned("apply_half_rope", x, cos, sin, inverse=False, halves=True)


def apply_inverse_rope(x: Float, cos: Float, sin: Float) -> Float:
    """`dsacp_ref.rope.apply_inverse_rope`, in one pass. Limits: a float32 table, and no float64."""
    check_floats("sin", sin, ("num_tokens", "rope_head_dim / 2"))
    return turned("apply_inverse_rope", x, cos, sin, inverse=True)


def apply_rope_(x: Float, cos: Float, sin: Float) -> Float:
    """`apply_rope`, written into x, which is returned; it must be contiguous."""
    return turned_("apply_rope_", x, cos, sin, inverse=False)


def apply_inverse_rope_(x: Float, cos: Float, sin: Float) -> Float:
    """`apply_inverse_rope`, written into x, which is returned; it must be contiguous."""
    check_floats("sin", sin, ("num_tokens", "rope_head_dim / 2"))
    return turned_("apply_inverse_rope_", x, cos, sin, inverse=True)


def turned(function: str, x: Float, cos: Float, sin: Float, *, inverse: bool, halves: bool = False) -> Float:
    """A copy of x whose last pairs are rotated, or whose first channels are as two halves."""
    check_turn(function, x, cos, sin)
    if cos.shape[1] == 0:
        return x.clone()
    source = x.contiguous()
    out = torch.empty_like(source)
    launch_rope(source, cos, sin, out, inverse=inverse, halves=halves)
    return out


def turned_(function: str, x: Float, cos: Float, sin: Float, *, inverse: bool) -> Float:
    """x, its last pairs rotated in place."""
    check_turn(function, x, cos, sin)
    if not x.is_contiguous():
        raise limit_error(function, "x", "be contiguous", f"strides {x.stride()}")
    if cos.shape[1] > 0:
        launch_rope(x, cos, sin, x, inverse=inverse)
    return x


def check_turn(function: str, x: Float, cos: Float, sin: Float) -> None:
    """Refuse what the mirror refuses, in its words, and dtypes that the kernel does not take."""
    rope.check_turn(x, cos, sin)
    check_runs(x)
    if dtype_name(x) not in FLOATS:
        raise limit_error(function, "x", f"have dtype {' or '.join(FLOATS)}", dtype_name(x))
    for name, half in (("cos", cos), ("sin", sin)):
        if dtype_name(half) != "float32":
            raise limit_error(function, name, "have dtype float32", dtype_name(half))


def launch_rope(x: Float, cos: Float, sin: Float, out: Float, *, inverse: bool, halves: bool = False) -> None:
    """Turn contiguous x into out, which may be x."""
    if x.numel() == 0:
        return
    num_tokens, width, pairs = len(x), x.shape[-1], cos.shape[1]
    heads = x.numel() // (num_tokens * width)
    key = rope_kernels.key_of(pairs, x.element_size())
    tile = tile_for(rope_kernels.TILES, x, "apply_rope", key)
    options = {name: value for name, value in tile.items() if name != "rows"}
    form = {"inverse": inverse, "copy": out is not x, "halves": halves}
    constants = rope_kernels.constants_of(heads, width, pairs, tile["rows"], **form)
    tasks = blocks(num_tokens, constants["TOKEN_TILE"]) * blocks(heads, constants["HEAD_TILE"])
    grid = (min(tasks, programs_for(x, cube=False, waves=WAVES)),)
    rope_kernels.rope_kernel[grid](x, cos.contiguous(), sin.contiguous(), out, num_tokens, **constants, **options)


def scattered_rows(cache: torch.Tensor, rows: torch.Tensor, slots: Int32) -> torch.Tensor:
    """`dsacp_ref.paging.scattered_rows`, into a copy of the cache."""
    paging.check_writes(cache, rows, slots)
    check_runs(cache)
    return written("scattered_rows", cache.clone(memory_format=torch.contiguous_format), rows, slots)


def scattered_rows_(cache: torch.Tensor, rows: torch.Tensor, slots: Int32) -> torch.Tensor:
    """`scattered_rows`, written into the cache, which is returned. Limits: those of `paged_words`."""
    paging.check_writes(cache, rows, slots)
    check_runs(cache)
    return written("scattered_rows_", cache, rows, slots)


def written(function: str, cache: torch.Tensor, rows: torch.Tensor, slots: Int32) -> torch.Tensor:
    """The cache, with the rows written into it."""
    if 0 in (len(slots), cache.numel()):
        return cache
    source = rows.contiguous()
    if source.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr():
        source = source.clone()  # the cache's own rows, which others may overwrite before they are read
    words, layout = paged_words(function, cache, source)
    tile = tile_for(paging_kernels.SCATTER_TILES, cache, function, paging_kernels.column_tile(layout["WIDTH"]))
    grid = (min(len(slots), programs_for(cache, cube=False, waves=ROW_WAVES)),)
    paging_kernels.scatter_kernel[grid](
        words, source.view(-1).view(words.dtype), slots.contiguous(), len(slots), **layout, **tile
    )
    return cache


def gathered_rows(cache: torch.Tensor, slots: Int32) -> torch.Tensor:
    """`dsacp_ref.paging.gathered_rows`. Limits: those of `paged_words`."""
    flat = paging.flat_cache(cache)
    paging.check_slots(slots, len(flat))
    check_runs(cache)
    shape = (*slots.shape, *flat.shape[1:])
    if len(flat) == 0:
        return cache.new_zeros(shape)
    out = cache.new_empty(shape)
    if out.numel() == 0:
        return out
    words, layout = paged_words("gathered_rows", cache, out)
    width = layout["WIDTH"]
    tile = tile_for(paging_kernels.GATHER_TILES, cache, "gathered_rows", paging_kernels.inner_column_tile(width))
    tasks = blocks(slots.numel(), tile["ROW_TILE"]) * blocks(width, tile["COLUMN_TILE"])
    grid = (min(tasks, programs_for(cache, cube=False, waves=WAVES)),)
    paging_kernels.gather_kernel[grid](
        words, slots.contiguous(), out.view(-1).view(words.dtype), slots.numel(), **layout, **tile
    )
    return out


def paged_words(function: str, cache: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, int]]:
    """The cache as words [num_blocks, block_size, width], and the kernels' constants for how they lie.

    Limits: the numbers of a row lie side by side; slots lie evenly through the cache, or a block holds a power of two.
    """
    if not cache[0, 0].is_contiguous():
        raise limit_error(function, "cache", "have contiguous rows", f"strides {cache.stride()}")
    num_blocks, block_size, width = cache.shape[0], cache.shape[1], cache[0, 0].numel()
    block_stride, slot_stride = cache.stride()[:2]
    even = num_blocks == 1 or block_stride == block_size * slot_stride
    if not even and block_size & (block_size - 1):
        raise limit_error(function, "block_size", "be a power of two where blocks do not follow each other", block_size)
    item = cache.element_size()
    word = word_size(cache, rows, *(item * count for count in (width, block_stride, slot_stride)))
    words = cache.as_strided((num_blocks, block_size, width), (block_stride, slot_stride, 1)).view(WORDS[word])
    layout = {
        "WIDTH": item * width // word,
        "SLOT_STRIDE": item * slot_stride // word,
        "BLOCK_STRIDE": item * block_stride // word,
        "BLOCK_SHIFT": -1 if even else block_size.bit_length() - 1,
    }
    return words, layout


def word_size(first: torch.Tensor, second: torch.Tensor, *sizes: int) -> int:
    """The bytes of the longest word in which both tensors can be read, where all these sizes are whole words."""
    starts = (tensor.storage_offset() * tensor.element_size() for tensor in (first, second))
    divided = [*sizes, *starts]
    return next(word for word in WORDS if not any(size % word for size in divided))


def slot_mapping(logical_indices: Int32, request_indices: Int32, block_table: Int32, block_size: int) -> Int32:
    """`dsacp_ref.paging.slot_mapping`. Limits: blocks of a power of two rows, below 2**31 indices and table entries."""
    block_size = check_int("block_size", block_size, 1, INT32_MAX)
    check_tensor("block_table", block_table, ("int32",), ("num_reqs", "max_blocks"))
    check_tensor("request_indices", request_indices, ("int32",), ("num_rows",))
    shape = getattr(logical_indices, "shape", ())
    check_tensor("logical_indices", logical_indices, ("int32",), (len(request_indices), *shape[1:]))
    if values_known(logical_indices, request_indices, block_table):
        paging.slot_mapping(logical_indices, request_indices, block_table, block_size)  # for what it refuses
    check_runs(logical_indices)
    if block_size & (block_size - 1):
        raise limit_error("slot_mapping", "block_size", "be a power of two", block_size)
    for name, indices in (("logical_indices", logical_indices), ("block_table", block_table)):
        if indices.numel() > INT32_MAX:
            raise limit_error("slot_mapping", name, "have fewer than 2**31 elements", indices.numel())
    out = torch.full_like(logical_indices, -1, memory_format=torch.contiguous_format)
    if 0 in (out.numel(), block_table.numel()):
        return out
    num_rows, num_columns = len(out), out.numel() // len(out)
    tile = tile_for(paging_kernels.MAPPING_TILES, out, "slot_mapping", num_columns > 1)
    tasks = blocks(num_rows, tile["ROW_TILE"]) * blocks(num_columns, tile["COLUMN_TILE"])
    grid = (min(tasks, programs_for(out, cube=False, waves=WAVES)),)
    indices = (part.contiguous() for part in (logical_indices, request_indices, block_table))
    sizes = (num_rows, num_columns, block_table.shape[1])
    shift = block_size.bit_length() - 1
    paging_kernels.slot_mapping_kernel[grid](*indices, out, *sizes, BLOCK_SHIFT=shift, **tile)
    return out


def packed_heads(rows: torch.Tensor, cp_size: int) -> torch.Tensor:
    """What a rank sends to each rank in `dsacp_npu.distributed.head_shards`: its rows, by shares of the heads.

    Args:
        rows: any dtype [rows, num_heads, head_dim]; ranks divide the heads.
        cp_size: int, the ranks.

    Returns:
        array [cp_size, rows, num_heads / cp_size, head_dim], contiguous: a send buffer of as many rows for every rank.

    Raises:
        ContractError: heads that ranks do not divide.
    """
    cp_size = check_int("cp_size", cp_size, 1)
    exchange.check_shard(rows, 0)
    exchange.check_heads(rows, cp_size)
    check_runs(rows)
    num_rows, num_heads, head_dim = rows.shape
    out = rows.new_empty(cp_size, num_rows, num_heads // cp_size, head_dim)
    launch_exchange(rows.contiguous(), out, num_rows, cp_size, pack=True)
    return out


def unpacked_heads(blocks: torch.Tensor) -> torch.Tensor:
    """All heads of a rank's rows, from what it received in `dsacp_npu.distributed.token_shards`; undoes `packed_heads`.

    Args:
        blocks: any dtype [cp_size, rows, num_heads / cp_size, head_dim].

    Returns:
        array [rows, num_heads, head_dim], contiguous.

    Raises:
        ContractError: not four axes.
    """
    exchange.check_shard(blocks, 0)
    check_tensor("blocks", blocks, (dtype_name(blocks),), ("cp_size", "rows", "heads", "head_dim"))
    check_runs(blocks)
    cp_size, num_rows, heads, head_dim = blocks.shape
    out = blocks.new_empty(num_rows, cp_size * heads, head_dim)
    launch_exchange(blocks.contiguous(), out, num_rows, cp_size, pack=False)
    return out


def launch_exchange(x: torch.Tensor, out: torch.Tensor, num_rows: int, cp_size: int, *, pack: bool) -> None:
    """Swap the axes of rows and ranks, contiguous on both sides."""
    if x.numel() == 0:
        return
    size = x.numel() // (num_rows * cp_size) * x.element_size()
    word = word_size(x, out, size)
    constants = {"RANKS": cp_size, "WIDTH": size // word, "PACK": pack}
    tile = tile_for(exchange_kernels.TILES, x, "exchange of heads", paging_kernels.column_tile(size // word))
    tasks = blocks(num_rows, tile["ROW_TILE"]) * cp_size * blocks(size // word, tile["COLUMN_TILE"])
    grid = (min(tasks, programs_for(x, cube=False, waves=WAVES)),)
    buffers = (part.view(-1).view(WORDS[word]) for part in (x, out))
    exchange_kernels.exchange_kernel[grid](*buffers, num_rows, **constants, **tile)


def blocks(count: int, size: int) -> int:
    """Blocks of this size that hold so many."""
    return -(-count // size)
