"""`dsacp_npu.exchange` gives what `dsacp_ref.exchange` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import dsacp_npu.exchange
from dsacp_ref.partition import local_rows, partition_tokens
from dsacp_ref.spec import ContractError
from tests.mirror import common
from tests.mirror.common import (
    TORCH_DTYPES,
    WAYS,
    Case,
    assert_floats_mirror,
    assert_mirrors,
    assert_refusal_mirrors,
    assert_runs_without_values,
    case,
    int32,
    to_torch,
)
from tests.strategies import Step, steps

ROW_DTYPES = ("bool", "uint8", "int32", "int64", "float16", "float32", "float64")
counts_of_ranks = st.lists(st.one_of(st.just(0), st.integers(0, 5)), min_size=1, max_size=8)
row_shapes = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
seeds = st.integers(0, 2**32 - 1)


def numbered(counts: list[int], *shape: int, dtype: str = "float64") -> tuple[np.ndarray, ...]:
    """Shards of these row counts; their rows are not alike. A tuple, so that the conversions see the arrays in it."""
    total = sum(counts)
    flat = np.arange(1, 1 + total * int(np.prod(shape))).astype(dtype).reshape(total, *shape)
    return tuple(np.split(flat, np.cumsum(counts)[:-1]))


def summands(counts: list[int], seed: int, *shape: int, dtype: str = "float64") -> tuple[np.ndarray, ...]:
    """One array of all ranks' rows a rank."""
    rng = np.random.default_rng(seed)
    return tuple((50 * rng.standard_normal((sum(counts), *shape))).astype(dtype) for _ in counts)


def shards_of(step: Step, *shape: int, dtype: str = "float64") -> tuple[tuple[np.ndarray, ...], Any]:
    """The ranks' rows of a step, with garbage in the pad rows, and their partition."""
    partition = partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)
    rows = numbered([step.batch.num_tokens], *shape, dtype=dtype)[0]
    shards = []
    for rank, tokens in enumerate(partition.token_indices):
        shards.append(local_rows(rows, partition, rank))
        shards[-1][tokens < 0] = 77
    return tuple(shards), partition


# --- against the reference ---


@given(counts_of_ranks, row_shapes, st.sampled_from(ROW_DTYPES))
def test_all_gather_mirrors(counts, shape, dtype) -> None:
    assert_mirrors("exchange", "all_gather", numbered(counts, *shape, dtype=dtype))


@given(counts_of_ranks, seeds, row_shapes, st.sampled_from(("uint8", "int32", "float32", "float64")))
def test_all_reduce_mirrors(counts, seed, shape, dtype) -> None:
    """Exactly, for the order of the sum is the same."""
    assert_mirrors("exchange", "all_reduce", summands(counts, seed, *shape, dtype=dtype))


@given(counts_of_ranks, seeds, row_shapes, st.sampled_from(("int32", "float32", "float64")))
def test_reduce_scatter_mirrors(counts, seed, shape, dtype) -> None:
    assert_mirrors("exchange", "reduce_scatter", summands(counts, seed, *shape, dtype=dtype), counts)


@given(st.data(), st.integers(1, 8), st.sampled_from(ROW_DTYPES))
def test_all_to_all_mirrors(data, cp_size, dtype) -> None:
    """Blocks of any shapes, scalars among them."""
    shapes = st.one_of(row_shapes, st.lists(st.integers(0, 2), max_size=3).map(tuple))
    table = data.draw(st.lists(shapes, min_size=cp_size**2, max_size=cp_size**2))
    blocks = [np.full(shape, place).astype(dtype) for place, shape in enumerate(table)]
    assert_mirrors(
        "exchange", "all_to_all", tuple(tuple(blocks[rank * cp_size :][:cp_size]) for rank in range(cp_size))
    )


@given(counts_of_ranks, st.integers(1, 3), st.integers(0, 3), st.sampled_from(ROW_DTYPES))
@example([0, 0, 0], 1, 1, "float32")
def test_head_shards_mirrors(counts, per_rank, head_dim, dtype) -> None:
    assert_mirrors("exchange", "head_shards", numbered(counts, len(counts) * per_rank, head_dim, dtype=dtype))


@given(counts_of_ranks, seeds, st.integers(0, 3), st.integers(0, 3), st.sampled_from(ROW_DTYPES))
@example([0, 0, 0], 0, 1, 1, "float32")
def test_token_shards_mirrors(counts, seed, per_rank, head_dim, dtype) -> None:
    shards = summands(counts, seed, per_rank, head_dim, dtype=dtype)
    assert_mirrors("exchange", "token_shards", shards, [np.int64(count) for count in counts])


@given(steps(), row_shapes, st.sampled_from(ROW_DTYPES))
def test_gathered_in_order_mirrors(step, shape, dtype) -> None:
    assert_mirrors("exchange", "gathered_in_order", *shards_of(step, *shape, dtype=dtype))


@given(st.data(), steps(), row_shapes, st.sampled_from(ROW_DTYPES), st.booleans())
def test_requested_rows_mirrors(data, step, shape, dtype, on_a_device) -> None:
    """In the order asked for, the same token twice, from itself, or nothing; also where the lists cannot be read."""
    tokens = st.lists(st.integers(0, step.batch.num_tokens - 1), max_size=6) if step.batch.num_tokens else st.just([])
    wanted = tuple(int32(*data.draw(tokens)) for _ in range(step.cp_size))
    args = (*shards_of(step, *shape, dtype=dtype), wanted)
    if on_a_device:
        with patch("dsacp_npu._tensors.readable", lambda tensor: False):
            assert_mirrors("exchange", "requested_rows", *args)
    else:
        assert_mirrors("exchange", "requested_rows", *args)


# --- results as tuples, which the shared checks look into ---


def as_tuples(value: Any) -> Any:
    """Lists as tuples, inner ones too."""
    return tuple(as_tuples(item) for item in value) if isinstance(value, list) else value


@pytest.fixture(scope="module")
def tupled() -> Iterator[None]:
    """The functions of both packages, with tuples where they return lists."""
    pair = common.functions

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: as_tuples(function(*args, **kwargs))

    with patch.object(common, "functions", lambda *name: tuple(map(wrapped, pair(*name)))):
        yield


SPLIT = partition_tokens(int32(0, 3, 8), 3, split="round_robin")
OWN = numbered([3, 3, 3], 2)
WANTED = (int32(7, 0, 7), int32(), int32(3))

CALLS = [
    case("all_gather", numbered([3, 0, 2], 4, 1)),
    case("all_reduce", summands([3, 0, 2], 0, 2)),
    case("reduce_scatter", summands([3, 0, 2], 0, 2), [3, 0, 2]),
    case("all_to_all", tuple(numbered([rank, 0, 1], 2) for rank in range(3))),
    case("head_shards", numbered([3, 0, 2], 6, 1)),
    case("token_shards", summands([3, 0, 2], 0, 2, 3), [3, 0, 2]),
    case("gathered_in_order", OWN, SPLIT),
    case("requested_rows", OWN, SPLIT, WANTED),
]
MOVES = [call for call in CALLS if call.function not in ("all_reduce", "reduce_scatter")]


@pytest.mark.usefixtures("tupled")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.function)
@pytest.mark.parametrize("way", WAYS)
def test_runs_without_values(call: Case, way: str) -> None:
    assert_runs_without_values("exchange", way, call)


@pytest.mark.usefixtures("tupled")
@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
@given(counts_of_ranks, seeds)
def test_sums_in_every_dtype(dtype, counts, seed) -> None:
    """Short ones within the error of one rounding at the end."""
    shards = summands(counts, seed, 3)
    assert_floats_mirror("exchange", "all_reduce", dtype, shards)
    assert_floats_mirror("exchange", "reduce_scatter", dtype, shards, counts)


@pytest.mark.usefixtures("tupled")
@pytest.mark.parametrize("call", MOVES, ids=lambda call: call.function)
@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
def test_rows_move_unchanged_in_every_dtype(call: Case, dtype: str) -> None:
    assert_floats_mirror("exchange", call.function, dtype, *call.args)
    _, mirror = common.functions("exchange", call.function)
    got = common.tensors_of(mirror(*to_torch(call.args, dtype)))
    assert {tensor.dtype for tensor in got} == {TORCH_DTYPES[dtype]}


def test_a_partition_on_the_host_and_rows_elsewhere() -> None:
    shards, partition, wanted = to_torch((OWN, SPLIT, WANTED))
    rows = [shard.to("meta") for shard in shards]
    assert {got.device.type for got in dsacp_npu.exchange.gathered_in_order(rows, partition)} == {"meta"}
    assert {got.device.type for got in dsacp_npu.exchange.requested_rows(rows, partition, wanted)} == {"meta"}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.function)
def test_nothing_that_comes_out_is_shared(call: Case) -> None:
    """Also of one rank alone."""
    alone = case(call.function, call.args[0][:1], *call.args[1:])
    if call.function in ("reduce_scatter", "token_shards"):
        alone = case(call.function, call.args[0][:1], [5])
    elif call.function == "all_to_all":
        alone = case(call.function, ((np.ones(2),),))
    elif len(call.args) > 1:
        whole = partition_tokens(int32(0, 3), 1)
        alone = case(call.function, call.args[0][:1], whole, *((int32(0, 1, 2),) for _ in call.args[2:]))
    for made in (call, alone):
        args = to_torch(made.args)
        results = common.tensors_of(as_tuples(getattr(dsacp_npu.exchange, made.function)(*args)))
        places = [tensor.untyped_storage().data_ptr() for tensor in (*results, *common.tensors_of(args))]
        places = [place for place in places if place]  # nothing lies at 0: tensors without elements
        assert len(set(places)) == len(places)


# --- refusals ---

EIGHT = partition_tokens(int32(0, 16), 8)
REFUSED = [
    *(
        case(name, (), *more)
        for name, *more in (
            ["all_gather"],
            ["all_reduce"],
            ["reduce_scatter", []],
            ["all_to_all"],
            ["head_shards"],
            ["token_shards", []],
            ["gathered_in_order", EIGHT],
            ["requested_rows", EIGHT, ()],
        )
    ),
    case("all_gather", 3),
    case("all_gather", (np.ones(3), 4)),
    case("all_gather", (np.ones((3, 2)), np.ones((3, 1)))),
    case("all_gather", (np.ones(3), np.ones(3, np.float32))),
    case("all_reduce", (np.ones(3), np.ones(2))),
    case("all_reduce", (np.ones(3), np.ones(3, np.float16))),
    case("reduce_scatter", (np.ones(3), np.ones(3)), [1, 1]),
    case("reduce_scatter", (np.ones(3), np.ones(3)), [3]),
    case("reduce_scatter", (np.ones(3), np.ones(3)), [4, -1]),
    case("reduce_scatter", (np.ones(3), np.ones(3)), [1.5, 1.5]),
    case("reduce_scatter", (np.ones(3), np.ones(2)), [1, 2]),
    case("all_to_all", 2),
    case("all_to_all", ((np.ones(1),), (np.ones(1), np.ones(1)))),
    case("all_to_all", (1,)),
    case("all_to_all", ((7,),)),
    case("head_shards", (np.ones((1, 3, 2)), np.ones((1, 3, 2)))),
    case("head_shards", (np.ones((1, 0, 2)),)),
    case("head_shards", (np.ones((1, 2)),)),
    case("head_shards", (np.ones((1, 2, 2)), np.ones((1, 4, 2)))),
    case("token_shards", (np.ones((2, 2)),), [2]),
    case("token_shards", (np.ones((2, 1, 2)), np.ones((2, 1, 2))), [1, 2]),
    case("token_shards", (np.ones((2, 1, 2)), np.ones((1, 1, 2))), [1, 1]),
    case("gathered_in_order", OWN, None),
    case("gathered_in_order", OWN, EIGHT),
    case("gathered_in_order", numbered([3, 2, 3], 2), SPLIT),
    case("requested_rows", OWN, EIGHT, WANTED),
    case("requested_rows", numbered([3, 2, 3], 2), SPLIT, WANTED),
    case("requested_rows", OWN, SPLIT, None),
    case("requested_rows", OWN, SPLIT, WANTED[:2]),
    case("requested_rows", OWN, SPLIT, (*WANTED[:2], np.zeros(1, np.int64))),
    case("requested_rows", OWN, SPLIT, (*WANTED[:2], np.zeros((1, 1), np.int32))),
    case("requested_rows", OWN, SPLIT, (*WANTED[:2], int32(8))),
    case("requested_rows", OWN, SPLIT, (int32(0, -1), *WANTED[1:])),
]


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.function)
def test_refusals_mirror(bad: Case) -> None:
    assert_refusal_mirrors("exchange", bad)


def test_one_tensor_is_no_list_of_shards_and_a_number_has_no_rows() -> None:
    """The texts name the type, which is another one here."""
    one = torch.ones(2, 2)
    for call, text in (
        (lambda: dsacp_npu.exchange.all_gather(one), "shards must be a list with one item a rank, got Tensor"),
        (
            lambda: dsacp_npu.exchange.all_gather([one[0, 0]]),
            "shards must be arrays with a row axis, got Tensor; rank 0",
        ),
        (lambda: dsacp_npu.exchange.all_to_all([one, one]), "blocks must be a list with one item a rank, got Tensor"),
    ):
        with pytest.raises(ContractError, match=f"^{text}$"):
            call()


def test_numpy_arrays_are_refused() -> None:
    with pytest.raises(ContractError, match="shards must be a torch tensor, got ndarray"):
        dsacp_npu.exchange.all_gather([np.ones(2)])
    with pytest.raises(ContractError, match="blocks must be a torch tensor, got ndarray"):
        dsacp_npu.exchange.all_to_all([[np.ones(2)]])
    shards, partition = to_torch((OWN, SPLIT))
    with pytest.raises(ContractError, match="wanted must be a torch tensor, got ndarray"):
        dsacp_npu.exchange.requested_rows(shards, partition, WANTED)
