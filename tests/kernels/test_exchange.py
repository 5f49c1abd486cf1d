"""Send and receive buffers of backend `triton` against the exchange that the reference defines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import _triton_rows as rows
from dsacp_npu import exchange
from dsacp_ref import exchange as ref
from dsacp_ref.spec import ContractError
from tests.compare import assert_same
from tests.mirror.common import untouched
from tests.mirror.test_exchange import counts_of_ranks, numbered
from tests.strategies import fewer

DTYPES = st.sampled_from(["uint8", "int32", "int64", "float16", "float32", "float64"])


@given(counts_of_ranks, st.integers(1, 3), st.sampled_from([0, 1, 3, 64]), DTYPES)
@fewer(3)
def test_packed_rows_make_the_shards_of_heads(counts: list[int], per_rank: int, head_dim: int, dtype: str) -> None:
    """Every rank sends block r to rank r, and lays what it receives end to end; row counts may differ."""
    shards = numbered(counts, len(counts) * per_rank, head_dim, dtype=dtype)
    sent = [untouched(rows.packed_heads, (torch.tensor(shard), len(counts)), {}) for shard in shards]
    for rank, want in enumerate(ref.head_shards(shards)):
        assert_same(torch.cat([blocks[rank] for blocks in sent]), want)


@given(counts_of_ranks, st.integers(1, 3), st.sampled_from([0, 1, 3, 64]), DTYPES)
@fewer(3)
def test_unpacked_blocks_are_the_shards_of_tokens(counts: list[int], per_rank: int, head_dim: int, dtype: str) -> None:
    shards = ref.head_shards(numbered(counts, len(counts) * per_rank, head_dim, dtype=dtype))
    for rank, want in enumerate(ref.token_shards(shards, counts)):
        received = torch.stack([torch.tensor(shard).split(counts)[rank] for shard in shards])
        assert_same(untouched(rows.unpacked_heads, (received,), {}), want)


@given(st.integers(0, 9), st.sampled_from([1, 2, 4]), st.integers(1, 40))
@fewer(5)
def test_one_undoes_the_other(num_rows: int, cp_size: int, head_dim: int) -> None:
    x = torch.randn(num_rows, 8, head_dim).bfloat16()
    for view in (x, x.flip(0), torch.cat([x, x], dim=2)[..., 1 : head_dim + 1]):
        packed = rows.packed_heads(view, cp_size)
        assert packed.is_contiguous()
        assert torch.equal(rows.unpacked_heads(packed), view)


def test_it_refuses_in_the_words_of_the_mirror() -> None:
    for bad in (torch.zeros(3, 4, 5), torch.zeros(3, 4), torch.zeros(3, 0, 5)):
        with pytest.raises(ContractError) as theirs:
            exchange.head_shards([bad] * 3)
        with pytest.raises(ContractError) as mine:
            rows.packed_heads(bad, 3)
        assert str(mine.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        ("packed_heads", (torch.zeros(3, 4, 5), 0), "cp_size must be"),
        ("packed_heads", ([1.0], 1), "shards must be arrays with a row axis"),
        ("unpacked_heads", (torch.zeros(3, 4, 5),), "blocks must have shape"),
        ("unpacked_heads", (3,), "be arrays with a row axis"),
    ],
)
def test_what_it_refuses(function: str, args: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        getattr(rows, function)(*args)
