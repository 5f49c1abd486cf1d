"""What several operators check: dtypes, shapes, prefix sums, and every read from a paged or packed cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dsacp_npu._tensors import torch
from dsacp_npu.emulator.errors import out_of_range, refusal

__all__ = [
    "HALVES",
    "KeyRows",
    "check_block_size",
    "check_contiguous",
    "check_one_of",
    "check_tensor",
    "lengths_of",
    "prefix_sums",
    "required",
    "table_slots",
]

HALVES = (torch.bfloat16, torch.float16)


def check_one_of(operator: str, name: str, value: object, choices: Sequence[object], hint: str = "") -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise refusal(operator, name, f"be one of {', '.join(map(str, choices))}", value, hint)


def required(operator: str, name: str, tensor: torch.Tensor | None, hint: str = "") -> torch.Tensor:
    """The tensor, refused when it is missing."""
    if tensor is None:
        raise refusal(operator, name, "be given", None, hint)
    return tensor


def check_tensor(
    operator: str, name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | str]
) -> None:
    """Refuse another dtype or shape; a word in the shape stands for any size."""
    if tensor.dtype not in dtypes:
        raise refusal(operator, name, f"have dtype {' or '.join(map(str, dtypes))}", tensor.dtype)
    fits = len(shape) == tensor.ndim and all(
        isinstance(want, str) or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise refusal(operator, name, f"have shape [{', '.join(map(str, shape))}]", list(tensor.shape))


def check_block_size(operator: str, name: str, cache: torch.Tensor) -> None:
    """Refuse pages of another size than a multiple of 16 up to 1024, and gaps elsewhere than between pages."""
    rows = cache.shape[1]
    if rows % 16 != 0 or not 16 <= rows <= 1024:
        raise refusal(operator, f"{name} block size", "be a multiple of 16 in 16..1024", rows)
    if cache.shape[0] and not cache[0].is_contiguous():
        raise refusal(operator, name, "be contiguous within a block", f"strides {cache.stride()}")


def check_contiguous(operator: str, **tensors: torch.Tensor) -> None:
    """Refuse tensors with gaps or turned axes."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise refusal(operator, name, "be contiguous", f"strides {tensor.stride()}")


def prefix_sums(operator: str, name: str, sums: torch.Tensor, rows: int, of: str) -> list[int]:
    """The offsets as Python ints: from 0, never falling, and within the rows that they cut."""
    check_tensor(operator, name, sums, (torch.int32,), ("batch + 1",))
    offsets = [int(value) for value in sums.tolist()]
    if not offsets or offsets[0] != 0:
        raise refusal(operator, name, "start at 0", offsets[:1], "prefix sums of lengths, with the leading 0")
    for request, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise refusal(operator, name, "never fall", f"{start} then {end} at request {request}", "not lengths")
        if end > rows:
            why = f"{name} ends at {end}, but {of} has {rows} rows"
            raise out_of_range(operator, of, request, end - 1, f"{why}; local rows need local lengths")
    return offsets


def lengths_of(operator: str, name: str, lengths: torch.Tensor, batch: int) -> list[int]:
    """One length a request, as Python ints, none negative."""
    check_tensor(operator, name, lengths, (torch.int32,), (batch,))
    values = [int(value) for value in lengths.tolist()]
    for request, value in enumerate(values):
        if value < 0:
            raise out_of_range(operator, name, request, value, "a negative length")
    return values


def table_slots(
    operator: str,
    cache: tuple[str, torch.Tensor],
    table: tuple[str, torch.Tensor],
    request: int,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(block, place in the block) of positions of a request, once all of them lie inside table and cache."""
    (cache_name, pages), (table_name, blocks) = cache, table
    columns = positions // pages.shape[1]
    outside = columns >= blocks.shape[1]
    if outside.any():
        position = int(positions[outside][0])
        why = f"needs column {position // pages.shape[1]} of {table_name}, which has {blocks.shape[1]}"
        raise out_of_range(operator, cache_name, request, position, why)
    ids = blocks[request].long()[columns]
    outside = (ids < 0) | (ids >= pages.shape[0])
    if outside.any():
        position, block = int(positions[outside][0]), int(ids[outside][0])
        why = f"{table_name} names block {block}, and there are {pages.shape[0]}"
        raise out_of_range(operator, cache_name, request, position, why)
    return ids, positions % pages.shape[1]


@dataclass(frozen=True)
class KeyRows:
    """One cache of keys in one of the layouts PA_ND (pages), TND (packed) and BSND (a block a request)."""

    operator: str
    name: str
    cache: torch.Tensor
    layout: str
    table: tuple[str, torch.Tensor] | None = None
    starts: tuple[str, list[int]] | None = None

    def read(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        """The rows at these positions of a request, [len(positions), ...]; every one is checked."""
        if self.layout.startswith("PA_"):
            assert self.table is not None
            place = table_slots(self.operator, (self.name, self.cache), self.table, request, positions)
            return self.cache[place]
        if self.layout == "TND":
            assert self.starts is not None
            name, starts = self.starts
            start, held, of = starts[request], starts[request + 1] - starts[request], f"{name} gives it"
        else:
            start, held, of = 0, self.cache.shape[1], "the cache has"
        outside = positions >= held
        if outside.any():
            position = int(positions[outside][0])
            raise out_of_range(self.operator, self.name, request, position, f"{of} {held} rows")
        rows = self.cache if self.layout == "TND" else self.cache[request]
        return rows[start + positions]
