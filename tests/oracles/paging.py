"""A paged cache as a dict from slot to row: the block table alone defines the order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

Row = TypeVar("Row")


def slot(block_table_row: Sequence[int], position: int, block_size: int) -> int:
    """The flat slot of a position (or entry): its page's block id times the block size, plus its place in the page."""
    if position < 0:
        raise ValueError("a negative position has no slot")
    page, place = 0, position
    while place >= block_size:
        page, place = page + 1, place - block_size
    block = int(block_table_row[page])
    if block < 0:
        raise ValueError("the page of this position is not allocated")
    return block * block_size + place


def read(
    cache: Mapping[int, Row], block_table_row: Sequence[int], positions: Sequence[int], block_size: int
) -> list[Row]:
    """The rows at the given positions; a slot that was never written is a KeyError."""
    return [cache[slot(block_table_row, position, block_size)] for position in positions]
