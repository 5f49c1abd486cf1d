"""`dsacp_npu.partition` gives what `dsacp_ref.partition` gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import dsacp_npu.partition
from dsacp_ref.partition import partition_tokens
from dsacp_ref.spec import UnsupportedError
from tests.mirror.common import (
    WAYS,
    Case,
    assert_mirrors,
    assert_refusal_mirrors,
    assert_runs_without_values,
    case,
    int32,
    on_device,
    to_torch,
)
from tests.strategies import batches, cp_sizes, cuts, each, fewer, padded_counts, splits

ROW_DTYPES = ("bool", "int32", "int64", "float16", "float32", "float64")
LOC = int32(0, 3, 3, 8)
ROBIN, ZIGZAG = partition_tokens(LOC, 3, split="round_robin"), partition_tokens(LOC, 2, split="zigzag")

# Planning reads values, so these take CPU tensors only.
PLANNING = [
    case("rank_pieces", LOC, 2, 0),
    case("local_token_indices", LOC, 2, 0, split="round_robin_page(2)"),
    case("partition_tokens", LOC, 2, split="zigzag", num_input_tokens=8),
    case("round_robin_lengths", LOC, 2, 1),
]
ANYWHERE = [
    case("padded_restore_indices", ROBIN),
    case("local_rows", np.ones((8, 2), np.float32), ROBIN, 2),
    case("restored_rows", np.ones((9, 2), np.float32), ROBIN),
    case("converted_rows", np.arange(9.0), ROBIN, ZIGZAG),
    case("interleave_owners", LOC, 2, 3),
    case("interleave_local_indices", LOC, 2, 3),
    case("interleave_lengths", LOC, 2, 1, 3),
]

REFUSED = [
    case("rank_pieces", [0, 3], 1, 0),
    case("rank_pieces", LOC.astype(np.int64), 1, 0),
    case("rank_pieces", LOC[:, None], 1, 0),
    case("rank_pieces", int32(), 1, 0),
    case("rank_pieces", int32(1, 3), 1, 0),
    case("rank_pieces", int32(0, 5, 3), 1, 0),
    case("rank_pieces", int32(0, 2**31 - 1), 4, 0),
    case("rank_pieces", LOC, 0, 0),
    case("rank_pieces", LOC, 2.0, 0),
    case("rank_pieces", LOC, 2, 2),
    case("rank_pieces", LOC, 2, -1),
    case("rank_pieces", LOC, 2, 0, split="stripes"),
    case("rank_pieces", LOC, 2, 0, split="round_robin_page"),
    case("rank_pieces", LOC, 2, 0, num_input_tokens=7),
    case("rank_pieces", LOC, 2, 0, num_input_tokens="8"),
    case("rank_pieces", LOC, 2, 0, split="zigzag", num_input_tokens=9),
    case("local_token_indices", LOC, 2, 5),
    case("partition_tokens", LOC, True),
    case("partition_tokens", int32(0, 5, 3), 2),
    case("local_rows", np.ones(7), ROBIN, 0),
    case("local_rows", np.ones(8), ROBIN, 3),
    case("local_rows", 8, ROBIN, 0),
    case("restored_rows", np.ones(8), ROBIN),
    case("converted_rows", np.ones(8), ROBIN, ZIGZAG),
    case("converted_rows", np.ones(9), ROBIN, partition_tokens(int32(0, 7), 2)),
    case("interleave_owners", LOC.astype(np.int64), 2, 1),
    case("interleave_owners", 5, 2, 1),
    case("interleave_owners", int32(0, -2), 2, 1),
    case("interleave_owners", LOC, 0, 1),
    case("interleave_owners", LOC, 2, 0),
    case("interleave_local_indices", LOC, 2, 2**30),
    case("interleave_lengths", int32(-1), 2, 0, 1),
    case("interleave_lengths", LOC, 2, 2, 1),
    case("round_robin_lengths", [0, 3], 1, 0),
    case("round_robin_lengths", int32(1, 3), 1, 0),
    case("round_robin_lengths", int32(0, 5, 3), 1, 0),
    case("round_robin_lengths", LOC, 0, 0),
    case("round_robin_lengths", LOC, 2, 2),
]


@st.composite
def partitions(draw: st.DrawFn, batch=None):
    batch = batch or draw(batches())
    split, cp_size = draw(splits()), draw(cp_sizes)
    padded = draw(padded_counts(batch, split))
    return partition_tokens(batch.query_start_loc, cp_size, split=split, num_input_tokens=padded)


def filled(dtype: str, *shape: int) -> np.ndarray:
    """Rows that are not alike."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 100 - 50).astype(dtype)


@given(cuts(), st.integers(0, 7))
@fewer(4)
def test_rank_pieces_mirrors(every_split, rank) -> None:
    for step in each(every_split):
        args = (step.batch.query_start_loc, step.cp_size, rank % step.cp_size)
        assert_mirrors("partition", "rank_pieces", *args, **step.cut)


@given(st.lists(st.integers(-1, 9), max_size=4), st.integers(0, 3), st.integers(-1, 3), splits(), st.integers(0, 12))
def test_rank_pieces_mirrors_on_any_integers(loc, cp_size, rank, split, padded) -> None:
    """Most of these are refused, by the same check."""
    assert_mirrors("partition", "rank_pieces", int32(*loc), cp_size, rank, split=split, num_input_tokens=padded)


@given(cuts(), st.integers(0, 7))
@fewer(4)
def test_local_token_indices_mirrors(every_split, rank) -> None:
    for step in each(every_split):
        args = (step.batch.query_start_loc, np.int64(step.cp_size), rank % step.cp_size)
        assert_mirrors("partition", "local_token_indices", *args, **step.cut)


@given(cuts())
@fewer(4)
def test_partition_tokens_mirrors(every_split) -> None:
    for step in each(every_split):
        assert_mirrors("partition", "partition_tokens", step.batch.query_start_loc, step.cp_size, **step.cut)


@given(partitions())
def test_padded_restore_indices_mirrors(partition) -> None:
    assert_mirrors("partition", "padded_restore_indices", partition)


@given(st.data(), st.sampled_from(ROW_DTYPES), st.lists(st.integers(0, 3), max_size=2))
def test_local_rows_mirrors(data, dtype, row) -> None:
    partition = data.draw(partitions())
    rank = data.draw(st.integers(0, len(partition.token_indices) - 1))
    assert_mirrors("partition", "local_rows", filled(dtype, len(partition.restore_indices), *row), partition, rank)


@given(partitions(), st.sampled_from(ROW_DTYPES), st.lists(st.integers(0, 3), max_size=2))
def test_restored_rows_mirrors(partition, dtype, row) -> None:
    total = sum(map(len, partition.token_indices))
    assert_mirrors("partition", "restored_rows", filled(dtype, total, *row), partition)


@given(st.data(), st.sampled_from(ROW_DTYPES), st.lists(st.integers(0, 3), max_size=2))
def test_converted_rows_mirrors(data, dtype, row) -> None:
    batch = data.draw(batches())
    source, target = data.draw(partitions(batch)), data.draw(partitions(batch))
    total = sum(map(len, source.token_indices))
    assert_mirrors("partition", "converted_rows", filled(dtype, total, *row), source, target)


@given(batches(), cp_sizes, st.integers(0, 7))
def test_round_robin_lengths_mirrors(batch, cp_size, rank) -> None:
    assert_mirrors("partition", "round_robin_lengths", batch.query_start_loc, np.int64(cp_size), rank % cp_size)


@pytest.mark.parametrize("rank", [0, 2**20 - 1])
def test_round_robin_lengths_count_beyond_int32(rank) -> None:
    """The last offset and the ranks add up to more than int32 holds."""
    assert_mirrors("partition", "round_robin_lengths", int32(0, 5, 2**31 - 1), 2**20, rank)


POSITIONS = st.lists(st.one_of(st.integers(-1, 40), st.just(2**31 - 1)), max_size=6).map(lambda row: int32(*row))


@given(POSITIONS, cp_sizes, st.integers(1, 5))
def test_interleave_owners_mirrors(positions, cp_size, size) -> None:
    assert_mirrors("partition", "interleave_owners", positions, np.int64(cp_size), size)
    assert_mirrors("partition", "interleave_owners", positions.reshape(-1, 1), cp_size, np.int32(size))


@given(POSITIONS, cp_sizes, st.integers(1, 5))
def test_interleave_local_indices_mirrors(positions, cp_size, size) -> None:
    assert_mirrors("partition", "interleave_local_indices", positions, np.int64(cp_size), size)


@given(POSITIONS, st.integers(1, 8), st.integers(0, 7), st.integers(1, 5))
def test_interleave_lengths_mirrors(lengths, cp_size, rank, size) -> None:
    assert_mirrors("partition", "interleave_lengths", np.maximum(lengths, 0), cp_size, rank % cp_size, size)


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.function)
def test_refusals_mirror(bad: Case) -> None:
    assert_refusal_mirrors("partition", bad)


@pytest.mark.parametrize("call", ANYWHERE, ids=lambda call: call.function)
@pytest.mark.parametrize("way", WAYS)
def test_runs_without_values(call: Case, way: str) -> None:
    assert_runs_without_values("partition", way, call)


@pytest.mark.parametrize("call", PLANNING, ids=lambda call: call.function)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_planning_is_refused_where_no_value_can_be_read(call: Case, device: str) -> None:
    plan = getattr(dsacp_npu.partition, call.function)
    with FakeTensorMode(), pytest.raises(UnsupportedError, match="plan on the CPU"):
        plan(*on_device(to_torch(call.args), device), **call.kwargs)


@pytest.mark.parametrize("call", PLANNING, ids=lambda call: call.function)
def test_planning_is_refused_while_compiling(call: Case) -> None:
    plan = getattr(dsacp_npu.partition, call.function)
    args = to_torch(call.args)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="plan on the CPU"):
        torch.compile(plan, fullgraph=True, backend="eager")(*args, **call.kwargs)


def test_rows_of_bfloat16_and_a_partition_on_another_device() -> None:
    partition = dsacp_npu.partition.partition_tokens(torch.tensor(LOC), 3)
    rows = torch.randn(8, 2).bfloat16()
    local = [dsacp_npu.partition.local_rows(rows, partition, rank) for rank in range(3)]
    assert torch.equal(dsacp_npu.partition.restored_rows(torch.cat(local), partition), rows)
    assert dsacp_npu.partition.local_rows(rows.to("meta"), partition, 1).device.type == "meta"


def test_numpy_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="query_start_loc must be a torch tensor, got ndarray"):
        dsacp_npu.partition.rank_pieces(LOC, 1, 0)
    with pytest.raises(ValueError, match="rows must be a torch tensor, got ndarray"):
        dsacp_npu.partition.local_rows(np.ones(8), to_torch(ROBIN), 0)
