"""Tiles of the attention kernel by family of targets: those that passed the compile check, and what each costs."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ENTRIES_A_TASK",
    "HEAD_DIMS",
    "LARGEST_LIST",
    "LARGEST_TABLE",
    "LIST_MULTIPLE",
    "TILES",
    "Tile",
    "counted",
    "tile_key",
]

LIST_MULTIPLE = 128  # lists are stored in multiples of it, of which every tile of keys is a divisor
LARGEST_LIST = 4096  # of one query: it is held on the chip at once
LARGEST_TABLE = 8192  # blocks of a table row that is held on the chip at once
ENTRIES_A_TASK = 1024  # of one operator row, listed at once
HEAD_DIMS = (32, 64, 128, 256, 512)  # that the tiles were checked for


class Tile(NamedTuple):
    """How one program cuts its work.

    Fields:
        heads: int, query heads at a time; fewer are padded.
        keys: int, keys at a time.
        parts: int, 1, 2 or 4, in how many parts channels are held; 4 of 512 channels only.
        one_loop: bool, whether window and entries share one loop.
        warps, stages: int, launch options of a GPU; 0 elsewhere.
        waves: int, programs a multiprocessor of a GPU; 0 is one program a task.
    """

    heads: int
    keys: int
    parts: int = 1
    one_loop: bool = False
    warps: int = 0
    stages: int = 0
    waves: int = 1


def on_gpu(heads: int, warps: int, *, waves: int = 0, one_loop: bool = True) -> Tile:
    """A tile of a GPU: 64 keys, channels in halves, two stages."""
    return Tile(heads, 64, 2, one_loop, warps, 2, waves)


# By heads, of which more are several blocks, and by form of the softmax. On A2 sums of 64 heads do not fit beside their
# scores, and those of 32 are rescaled a quarter of the channels at a time.
TILES: dict[str, dict[tuple[int, str], Tile]] = {
    "a2": {
        (16, "fixed"): Tile(16, 64),
        (16, "online"): Tile(16, 64),
        (32, "fixed"): Tile(32, 64),
        (32, "online"): Tile(32, 32, 4),
        (64, "fixed"): Tile(32, 64),
        (64, "online"): Tile(32, 32, 4),
    },
    "a5": {
        (16, "fixed"): Tile(16, 64),
        (16, "online"): Tile(16, 64),
        (32, "fixed"): Tile(32, 64),
        (32, "online"): Tile(32, 64),
        (64, "fixed"): Tile(32, 64),
        (64, "online"): Tile(32, 64),
    },
    "cuda": {
        (16, "fixed"): on_gpu(16, 4, one_loop=False),
        (16, "online"): on_gpu(16, 4, one_loop=False),
        (32, "fixed"): on_gpu(32, 4),
        (32, "online"): on_gpu(32, 4),
        (64, "fixed"): on_gpu(64, 8, waves=1),
        (64, "online"): on_gpu(64, 8, waves=1),
    },
}


def tile_key(num_heads: int, logit_bound: float | None) -> tuple[int, str]:
    """What the tables are asked for."""
    heads = 16 if num_heads <= 16 else 32 if num_heads <= 32 else 64
    return heads, "online" if logit_bound is None else "fixed"


def counted(tile: Tile, num_heads: int, num_keys: int, *, head_dim: int = 512) -> tuple[int, int]:
    """Bytes moved from and to memory, and floating-point operations of matrix products, of one query.

    Queries and outputs once, keys once a head block. Padded heads cost operations, no bytes.
    """
    blocks = -(-num_heads // tile.heads)
    moved = 2 * head_dim * (2 * num_heads + blocks * num_keys)
    return moved, 4 * blocks * tile.heads * head_dim * num_keys
