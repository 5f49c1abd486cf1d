"""Paged caches: block tables, slots, and moving rows in and out by slot.

A cache is ``[num_blocks, block_size, ...]``. Logical row i of a request (a raw position, or an entry) lies in block
``block_table[request, i // block_size]`` at place ``i % block_size``; its *slot* counts rows through the whole cache::

    block_size 4, block_table[request] = [7, 2, ...]      logical row  0 .. 3     4 .. 7
                                                          slot         28 .. 31   8 .. 11

Only the table defines the order. What it holds beyond the used part (-1, 0, garbage) is never read.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.partition import Int32
from dsacp_ref.spec import INT32_MAX, check_array, check_int, contract_error

__all__ = ["block_table_rows", "gathered_rows", "scattered_rows", "slot_mapping"]

Row = TypeVar("Row", bound=np.generic)


def slot_mapping(logical_indices: Int32, request_indices: Int32, block_table: Int32, block_size: int) -> Int32:
    """The physical slot of each logical row: of tokens to write, of window keys, of selected entries.

    Args:
        logical_indices: int32[num_rows, ...], rows of the request: positions, or entries (``topk_indices``); -1 for
            none.
        request_indices: int32[num_rows], the request (row of ``block_table``); -1 where all of the row is none.
        block_table: int32[num_reqs, max_blocks], block ids; read only where a logical row points.
        block_size: int, rows per block, >= 1.

    Returns:
        int32[num_rows, ...]: slot, or -1 for none.

    Raises:
        ContractError: a shape or dtype above does not hold, a row lies beyond the table, or the table names no block
            for it.

    Source: vLLM slot_mapping; operators read ``table[b, w // bs]``.

    >>> slot_mapping(np.array([0, 5, -1], np.int32), np.zeros(3, np.int32), np.array([[7, 2]], np.int32), 4).tolist()
    [28, 9, -1]
    """
    block_size = check_int("block_size", block_size, 1, INT32_MAX)
    check_array("block_table", block_table, ("int32",), ("num_reqs", "max_blocks"))
    check_array("request_indices", request_indices, ("int32",), ("num_rows",))
    shape = getattr(logical_indices, "shape", ())
    check_array("logical_indices", logical_indices, ("int32",), (len(request_indices), *shape[1:]))
    requests = np.broadcast_to(request_indices.reshape(-1, *(1,) * (logical_indices.ndim - 1)), shape)
    if (logical_indices < -1).any():
        raise contract_error("logical_indices", "be -1 or a row", int(logical_indices.min()), "-1 alone means none")
    used = logical_indices >= 0
    slots = np.full(shape, -1, np.int32)
    if not used.any():
        return slots
    request, logical = requests[used], logical_indices[used]
    column = logical // np.int32(block_size)
    outside = (request < 0) | (request >= block_table.shape[0]) | (column >= block_table.shape[1])
    if outside.any():
        at = int(outside.argmax())
        raise contract_error(
            "block_table",
            f"reach row {int(logical[at])} of request {int(request[at])}",
            f"{block_table.shape[0]} requests of {block_table.shape[1]} blocks of {block_size}",
            "allocate the block before it is used",
        )
    block = block_table[request, column]
    if (block < 0).any():
        at = int((block < 0).argmax())
        raise contract_error(
            "block_table",
            f"name a block for row {int(logical[at])} of request {int(request[at])}",
            int(block[at]),
            "the used part of a table holds block ids only",
        )
    if int(block.max()) > INT32_MAX // block_size - 1:
        raise contract_error("block_table", "give slots below 2**31", int(block.max()), "garbage in the used part?")
    slots[used] = block * np.int32(block_size) + logical % np.int32(block_size)
    return slots


def gathered_rows(cache: NDArray[Row], slots: Int32) -> NDArray[Row]:
    """The cache rows at these slots; zeros where the slot is -1.

    Args:
        cache: any dtype [num_blocks, block_size, ...].
        slots: int32[...], slots, -1 for none.

    Returns:
        dtype of ``cache`` [..., row shape].

    Raises:
        ContractError: a dtype does not hold, or a slot lies outside the cache.

    Source: ours.

    >>> gathered_rows(np.arange(6).reshape(3, 2), np.array([5, -1, 0], np.int32)).tolist()
    [5, 0, 0]
    """
    flat = flat_cache(cache)
    check_slots(slots, len(flat))
    rows = np.zeros((*slots.shape, *flat.shape[1:]), cache.dtype)
    rows[slots >= 0] = flat[slots[slots >= 0]]
    return rows


def scattered_rows(cache: NDArray[Row], rows: NDArray[Row], slots: Int32) -> NDArray[Row]:
    """The cache with these rows written; a row whose slot is -1 is not.

    Args:
        cache: any dtype [num_blocks, block_size, ...]; not changed.
        rows: dtype of ``cache`` [num_rows, row shape].
        slots: int32[num_rows], distinct slots, -1 for rows that are not to be written.

    Returns:
        like ``cache``.

    Raises:
        ContractError: a shape or dtype does not hold, a slot lies outside the cache, or two rows claim one slot. The
            cache is never half written.

    Source: vLLM reshape_and_cache; a padded row must be a no-op (vllm-ascend#9818).

    >>> scattered_rows(np.zeros((2, 2)), np.array([5.0, 6.0]), np.array([3, -1], np.int32)).tolist()
    [[0.0, 0.0], [0.0, 5.0]]
    """
    flat = flat_cache(cache)
    check_array("slots", slots, ("int32",), ("num_rows",))
    check_array("rows", rows, (str(cache.dtype),), (len(slots), *flat.shape[1:]), "one row a slot, as the cache's rows")
    check_slots(slots, len(flat))
    written = slots >= 0
    target = slots[written]
    if len(np.unique(target)) != len(target):
        values, counts = np.unique(target, return_counts=True)
        raise contract_error("slots", "be distinct", f"slot {int(values[counts > 1][0])} twice", "one row a slot")
    out = flat.copy()
    out[target] = rows[written]
    return out.reshape(cache.shape)


def block_table_rows(block_table: Int32, request_indices: Int32) -> Int32:
    """The block table with one row per operator row.

    An operator reads row b of the table for its row b. Rules with several rows a request repeat the request's row.

    Args:
        block_table: int32[num_reqs, max_blocks], block ids.
        request_indices: int32[num_rows], the request of each operator row; -1 for a pad row.

    Returns:
        int32[num_rows, max_blocks]: all -1 for a pad row.

    Raises:
        ContractError: a shape or dtype does not hold, or there is no such request.

    Source: vllm-ascend zigzag rows share a table; SGLang page_table[bs_idx].

    >>> block_table_rows(np.array([[4, 5], [6, 7]], np.int32), np.array([1, 1, -1], np.int32)).tolist()
    [[6, 7], [6, 7], [-1, -1]]
    """
    check_array("block_table", block_table, ("int32",), ("num_reqs", "max_blocks"))
    check_array("request_indices", request_indices, ("int32",), ("num_rows",))
    if (request_indices >= block_table.shape[0]).any() or (request_indices < -1).any():
        raise contract_error(
            "request_indices",
            f"be -1 or below {block_table.shape[0]}",
            request_indices.tolist(),
            "the table has one row a request",
        )
    rows = np.full((len(request_indices), block_table.shape[1]), -1, np.int32)
    real = request_indices >= 0
    rows[real] = block_table[request_indices[real]]
    return rows


def flat_cache(cache: NDArray[Row]) -> NDArray[Row]:
    """The cache as one row a slot."""
    if not hasattr(cache, "shape") or len(cache.shape) < 2:
        raise contract_error("cache", "have shape [num_blocks, block_size, ...]", getattr(cache, "shape", type(cache)))
    return cache.reshape(cache.shape[0] * cache.shape[1], *cache.shape[2:])


def check_slots(slots: Int32, num_slots: int, name: str = "slots", hint: str = "the cache has no such row") -> None:
    """Refuse slots outside the cache: what hardware answers with an out-of-range fault, or with another's data."""
    check_array(name, slots, ("int32",), getattr(slots, "shape", ()))
    outside = (slots < -1) | (slots >= num_slots)
    if outside.any():
        raise contract_error(name, f"be -1 or in [0, {num_slots})", int(slots[outside].ravel()[0]), hint)
