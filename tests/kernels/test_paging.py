"""Paged caches of backend `triton` against the reference, and their refusals against the mirror's."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import _triton_rows as rows
from dsacp_npu import paging
from dsacp_ref import paging as ref
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.compare import assert_same
from tests.mirror.common import to_torch, untouched
from tests.mirror.test_paging import REFUSED, TABLE, lookups, writes
from tests.strategies import fewer

FUNCTIONS = ("slot_mapping", "gathered_rows", "scattered_rows")
ON_A_DEVICE = "dsacp_npu._tensors.readable"


def int32(*values: int) -> torch.Tensor:
    """A row of integers."""
    return torch.tensor(values, dtype=torch.int32)


@given(lookups(), st.booleans())
@fewer(2)
def test_slot_mapping_as_the_reference(lookup: tuple[Any, ...], on_a_device: bool) -> None:
    """Any table whose blocks hold a power of two; other blocks are refused by their size."""
    args, block_size = lookup, lookup[3]
    with patch(ON_A_DEVICE, lambda tensor: not on_a_device):
        if block_size & (block_size - 1):
            with pytest.raises(UnsupportedError, match=f"block_size must be a power of two, got {block_size}"):
                rows.slot_mapping(*to_torch(args))
        else:
            assert_same(untouched(rows.slot_mapping, to_torch(args), {}), ref.slot_mapping(*args))


@given(writes(), st.booleans(), st.booleans())
@fewer(2)
def test_gathered_rows_as_the_reference(write: tuple[np.ndarray, ...], on_a_device: bool, in_pairs: bool) -> None:
    cache, _, slots = write
    slots = slots[:, None] if in_pairs else slots
    with patch(ON_A_DEVICE, lambda tensor: not on_a_device):
        assert_same(untouched(rows.gathered_rows, to_torch((cache, slots)), {}), ref.gathered_rows(cache, slots))


@given(writes(), st.booleans())
@fewer(2)
def test_scattered_rows_as_the_reference(write: tuple[np.ndarray, ...], on_a_device: bool) -> None:
    """In a copy, and in the cache itself."""
    args, want = to_torch(write), ref.scattered_rows(*write)
    with patch(ON_A_DEVICE, lambda tensor: not on_a_device):
        assert_same(untouched(rows.scattered_rows, args, {}), want)
        assert rows.scattered_rows_(*args) is args[0]
    assert_same(args[0], want)


# A cache [5, 4, 6] in memory that it shares with others.
LAYOUTS = {
    "layer by layer in each block": lambda: torch.full((5, 3, 4, 6), 7.0)[:, 1],
    "wider slots": lambda: torch.full((5, 4, 9), 7.0)[..., 3:],
    "wider slots of odd bytes": lambda: torch.full((5, 4, 7), 7, dtype=torch.int8)[..., 1:],
    "one block": lambda: torch.full((2, 3, 4, 6), 7.0)[:1, 1],
    "from an odd half": lambda: torch.full((121,), 7.0, dtype=torch.float16)[1:].view(5, 4, 6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
def test_a_cache_may_share_its_memory(layout: str, dtype: torch.dtype) -> None:
    cache = LAYOUTS[layout]()
    memory = torch.empty_strided((cache.untyped_storage().nbytes() // cache.element_size(),), (1,), dtype=dtype)
    cache = memory.fill_(1).as_strided(cache.shape, cache.stride(), cache.storage_offset())
    slots = int32(len(cache) * 4 - 1, -1, 0, 2)
    new = torch.arange(24).reshape(4, 6).to(dtype)
    want, others = paging.scattered_rows(cache.clone(), new, slots), memory.clone()
    others.as_strided(cache.shape, cache.stride(), cache.storage_offset()).copy_(want)
    rows.scattered_rows_(cache, new, slots)
    assert_same(memory.float(), others.float())
    assert_same(rows.gathered_rows(cache, slots).float(), paging.gathered_rows(cache, slots).float())


def test_rows_may_be_the_caches_own() -> None:
    cache = torch.arange(6.0).reshape(3, 2)
    rows.scattered_rows_(cache, cache.flatten(), int32(1, 2, 3, 4, 5, 0))
    assert cache.flatten().tolist() == [5, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("bad", [bad for bad in REFUSED if bad.function in FUNCTIONS], ids=lambda bad: bad.function)
def test_it_refuses_in_the_words_of_the_mirror(bad: Any) -> None:
    """The cache stays as it was."""
    names = [bad.function] + ["scattered_rows_"] * (bad.function == "scattered_rows")
    for name in names:
        args = to_torch(bad.args)
        with pytest.raises(ContractError) as theirs:
            getattr(paging, bad.function)(*args)
        with pytest.raises(ContractError) as mine:
            untouched(getattr(rows, name), args, {})
        assert str(mine.value) == str(theirs.value)
        assert_same(args[0], to_torch(bad.args)[0])


THREE = torch.zeros(4, 2, 3, 5)[:, 0]
LIMITS = [
    ("scattered_rows_", "cache must have contiguous rows", (torch.zeros(2, 4, 3).mT, torch.ones(1, 4), int32(0))),
    ("gathered_rows", "cache must have contiguous rows", (torch.zeros(2, 4, 3).mT, int32(0))),
    ("scattered_rows_", "block_size must be a power of two where", (THREE, torch.ones(1, 5), int32(0))),
    ("gathered_rows", "block_size must be a power of two where", (THREE, int32(0))),
    ("slot_mapping", "block_size must be a power of two", (int32(3), int32(0), torch.from_numpy(TABLE), 3)),
]


@pytest.mark.parametrize(("function", "words", "args"), LIMITS, ids=range(len(LIMITS)))
def test_a_limit_is_named(function: str, words: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(UnsupportedError, match=f"{function} on triton: {words}"):
        untouched(getattr(rows, function), args, {})
