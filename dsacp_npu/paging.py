"""Mirror of `dsacp_ref.paging` over torch. Runs on the device of its arguments and never waits for it.

Which rows hold -1 depends on values, so every row is looked up or written: what must not count reads slot 0 and is
masked, or writes a second time what another row writes.
"""

from __future__ import annotations

from dsacp_npu._tensors import Int32, check_tensor, check_torch, dtype_name, first_true, torch, values_known
from dsacp_ref.spec import INT32_MAX, check_int, contract_error

__all__ = ["block_table_rows", "gathered_rows", "scattered_rows", "slot_mapping", "scattered_rows_"]


def slot_mapping(logical_indices: Int32, request_indices: Int32, block_table: Int32, block_size: int) -> Int32:
    """Mirror of `dsacp_ref.paging.slot_mapping`."""
    block_size = check_int("block_size", block_size, 1, INT32_MAX)
    check_tensor("block_table", block_table, ("int32",), ("num_reqs", "max_blocks"))
    check_tensor("request_indices", request_indices, ("int32",), ("num_rows",))
    shape = getattr(logical_indices, "shape", ())
    check_tensor("logical_indices", logical_indices, ("int32",), (len(request_indices), *shape[1:]))
    requests = request_indices.reshape(-1, *(1,) * (logical_indices.ndim - 1)).expand(shape)
    known = values_known(logical_indices, request_indices, block_table)
    if known and (logical_indices < -1).any():
        raise contract_error("logical_indices", "be -1 or a row", int(logical_indices.min()), "-1 alone means none")
    used = logical_indices >= 0
    column = logical_indices // block_size
    if known:
        check_reached(used, logical_indices, requests, column, block_table, block_size)
    if block_table.numel() == 0:
        return torch.full_like(logical_indices, -1)
    # Only rows that ask for nothing read elsewhere: a wrong index of a real one is not hidden from the device.
    block = block_table[requests.masked_fill(~used, 0), column.masked_fill(~used, 0)]
    if known:
        check_named(used, logical_indices, requests, block, block_size)
    return (block * block_size + logical_indices % block_size).masked_fill(~used, -1)


def check_reached(
    used: torch.Tensor, logical: Int32, requests: Int32, column: Int32, block_table: Int32, block_size: int
) -> None:
    """Refuse rows beyond the table."""
    num_reqs, max_blocks = block_table.shape
    outside = used & ((requests < 0) | (requests >= num_reqs) | (column >= max_blocks))
    if outside.any():
        at = first_true(outside.flatten())
        raise contract_error(
            "block_table",
            f"reach row {int(logical.flatten()[at])} of request {int(requests.flatten()[at])}",
            f"{num_reqs} requests of {max_blocks} blocks of {block_size}",
            "allocate the block before it is used",
        )


def check_named(used: torch.Tensor, logical: Int32, requests: Int32, block: Int32, block_size: int) -> None:
    """Refuse rows for which the table holds no block id, or one whose slots int32 cannot count."""
    unnamed = used & (block < 0)
    if unnamed.any():
        at = first_true(unnamed.flatten())
        raise contract_error(
            "block_table",
            f"name a block for row {int(logical.flatten()[at])} of request {int(requests.flatten()[at])}",
            int(block.flatten()[at]),
            "the used part of a table holds block ids only",
        )
    largest = int(block.masked_fill(~used, -1).max()) if block.numel() else -1
    if largest > INT32_MAX // block_size - 1:
        raise contract_error("block_table", "give slots below 2**31", largest, "garbage in the used part?")


def gathered_rows(cache: torch.Tensor, slots: Int32) -> torch.Tensor:
    """Mirror of `dsacp_ref.paging.gathered_rows`."""
    flat = flat_cache(cache)
    check_slots(slots, len(flat))
    shape = (*slots.shape, *flat.shape[1:])
    if len(flat) == 0:
        return cache.new_zeros(shape)
    absent = slots < 0
    rows = flat.index_select(0, slots.masked_fill(absent, 0).flatten()).reshape(shape)
    return rows.masked_fill(spread(absent, rows), 0)


def scattered_rows(cache: torch.Tensor, rows: torch.Tensor, slots: Int32) -> torch.Tensor:
    """Mirror of `dsacp_ref.paging.scattered_rows`."""
    check_writes(cache, rows, slots)
    return written(cache.clone(), rows, slots)


def scattered_rows_(cache: torch.Tensor, rows: torch.Tensor, slots: Int32) -> torch.Tensor:
    """`scattered_rows`, written into the cache, which is returned."""
    check_writes(cache, rows, slots)
    return written(cache, rows, slots)


def check_writes(cache: torch.Tensor, rows: torch.Tensor, slots: Int32) -> None:
    """Refuse rows that do not fit the cache, and slots that it does not have or that two rows claim."""
    check_cache(cache)
    num_slots = cache.shape[0] * cache.shape[1]
    check_tensor("slots", slots, ("int32",), ("num_rows",))
    shape = (len(slots), *cache.shape[2:])
    check_tensor("rows", rows, (dtype_name(cache),), shape, "one row a slot, as the cache's rows")
    check_slots(slots, num_slots)
    if values_known(slots):
        values, counts = slots[slots >= 0].unique(return_counts=True)
        if (counts > 1).any():
            raise contract_error("slots", "be distinct", f"slot {int(values[counts > 1][0])} twice", "one row a slot")


def written(cache: torch.Tensor, rows: torch.Tensor, slots: Int32) -> torch.Tensor:
    """The cache, with the rows written into it.

    Rows to skip do again what the first real one does; without any, all write what slot 0 holds already.
    """
    if len(slots) == 0 or cache.shape[0] * cache.shape[1] == 0:
        return cache
    real = slots >= 0
    first = real.int().argmax(dim=0, keepdim=True)
    repeated = torch.where(spread(real[first], rows), rows[first], cache[:1, 0])
    targets = torch.where(real, slots, slots[first].clamp(min=0))
    values = torch.where(spread(real, rows), rows, repeated)
    block_size = cache.shape[1]
    return cache.index_put_((targets // block_size, targets % block_size), values)


def spread(mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The mask of rows with axes for what a row holds."""
    return mask.reshape(*mask.shape, *(1,) * (rows.ndim - mask.ndim))


def block_table_rows(block_table: Int32, request_indices: Int32) -> Int32:
    """Mirror of `dsacp_ref.paging.block_table_rows`."""
    check_tensor("block_table", block_table, ("int32",), ("num_reqs", "max_blocks"))
    check_tensor("request_indices", request_indices, ("int32",), ("num_rows",))
    num_reqs, max_blocks = block_table.shape
    if values_known(request_indices) and ((request_indices >= num_reqs) | (request_indices < -1)).any():
        raise contract_error(
            "request_indices",
            f"be -1 or below {num_reqs}",
            request_indices.tolist(),
            "the table has one row a request",
        )
    if num_reqs == 0:
        return block_table.new_full((len(request_indices), max_blocks), -1)
    pad = request_indices < 0
    return block_table[request_indices.masked_fill(pad, 0)].masked_fill(pad[:, None], -1)


def flat_cache(cache: torch.Tensor) -> torch.Tensor:
    """The cache as one row a slot; copied if its blocks lie apart."""
    check_cache(cache)
    return cache.reshape(cache.shape[0] * cache.shape[1], *cache.shape[2:])


def check_cache(cache: torch.Tensor) -> None:
    """Refuse what is no paged cache."""
    check_torch("cache", cache)
    if not hasattr(cache, "shape") or len(cache.shape) < 2:
        got = tuple(cache.shape) if hasattr(cache, "shape") else type(cache)
        raise contract_error("cache", "have shape [num_blocks, block_size, ...]", got)


def check_slots(slots: Int32, num_slots: int, name: str = "slots", hint: str = "the cache has no such row") -> None:
    """Refuse slots outside the cache."""
    check_tensor(name, slots, ("int32",), tuple(getattr(slots, "shape", ())))
    if not values_known(slots):
        return
    outside = (slots < -1) | (slots >= num_slots)
    if outside.any():
        raise contract_error(name, f"be -1 or in [0, {num_slots})", int(slots[outside][0]), hint)
