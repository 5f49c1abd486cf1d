"""`dsacp_npu.extents` gives what `dsacp_ref.extents` gives."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import dsacp_npu.extents
from dsacp_ref.config import SPLITS
from dsacp_ref.extents import local_extents
from dsacp_ref.partition import local_token_indices
from dsacp_ref.spec import UnsupportedError
from tests.mirror.common import (
    WAYS,
    Case,
    assert_floats_mirror,
    assert_mirrors,
    assert_refusal_mirrors,
    assert_runs_without_values,
    case,
    int32,
    on_device,
    to_torch,
)
from tests.strategies import batches, cp_sizes, cuts, each, fewer, padded_counts, splits

LOC, LENS = int32(0, 3, 3, 8, 10), int32(7, 2, 5, 0)
TABLE = np.linspace(0, 1, 24, dtype=np.float32).reshape(12, 2)

STATIC = [
    case("local_extents", LOC, LENS, 2, 1, num_input_tokens=13),
    case("local_extents", LOC, LENS, 2, 1, num_input_tokens=13, causal=False),
    case("local_extents", LOC, LENS, 2, 1, split="round-robin-split", num_input_tokens=10),
    *(
        case("local_extents", LOC, LENS, 3, 0, split=split, empty_extent="prefix")
        for split in ("contiguous_request", "zigzag", "zigzag_ceil", "zigzag_padded")
    ),
    case("local_extents", int32(0), int32(), 2, 0, split="zigzag"),
    case("build_cp_local_metadata", LOC, LENS, 2, 1, TABLE, TABLE),
    case("build_cp_local_metadata", LOC, LENS, 2, 1, None, None, num_input_tokens=12, causal=False),
    case("token_requests", int32(0, 4, -1, 9), LOC),
    case("token_positions", int32(0, 4, -1, 9), LOC, LENS),
    case("query_rows", LOC, num_rows=12),
    case("query_positions", LOC, LENS, num_rows=12),
]

# The same calls without what makes their sizes known.
UNKNOWN_SIZE = [
    case("local_extents", LOC, LENS, 2, 1),
    case("local_extents", LOC, LENS, 2, 1, split="round_robin"),
    case("build_cp_local_metadata", LOC, LENS, 2, 1, None, None),
]

REFUSED = [
    case("local_extents", LOC, LENS.astype(np.int64), 2, 0),
    case("local_extents", LOC, LENS[:2], 2, 0),
    case("local_extents", LOC, [7, 2, 5, 0], 2, 0),
    case("local_extents", LOC, int32(2, 2, 5, 0), 2, 0),
    case("local_extents", LOC, int32(7, -2, 5, 0), 2, 0),
    case("local_extents", LOC, LENS, 2, 2),
    case("local_extents", LOC, LENS, 2, 0, split="stripes"),
    case("local_extents", LOC, LENS, 2, 0, split=3),
    case("local_extents", LOC, LENS, 2, 0, num_input_tokens=9),
    case("local_extents", LOC, LENS, 2, 0, causal="no"),
    case("local_extents", LOC, LENS, 2, 0, empty_extent="none"),
    case("local_extents", LOC, LENS, 2, 0, empty_extent="prefix", causal=False),
    case("token_requests", np.zeros((2, 2), np.int32), LOC),
    case("token_requests", int32(0), int32(1)),
    case("token_positions", int32(0).astype(np.int16), LOC, LENS),
    case("token_positions", int32(0), LOC, int32(1, 0, 5, 0)),
    case("query_rows", int32(), num_rows=1),
    case("query_rows", int32(1, 2), num_rows=2),
    case("query_rows", int32(0, 3, 2), num_rows=3),
    case("query_rows", LOC, num_rows=9),
    case("query_rows", LOC, num_rows=2.5),
    case("query_positions", LOC, LENS[:1], num_rows=12),
    case("query_positions", LOC, int32(1, 0, 5, 0), num_rows=12),
    case("query_positions", LOC, int32(3, -1, 5, 0), num_rows=12),
    case("build_cp_local_metadata", LOC, LENS, 2, 0, TABLE, None),
    case("build_cp_local_metadata", LOC, LENS, 2, 0, TABLE[:9], TABLE[:9]),
    case("build_cp_local_metadata", LOC, LENS, 2, 0, TABLE, TABLE, num_input_tokens=11),
    case("build_cp_local_metadata", LOC, LENS, 2, 0, TABLE, TABLE, num_input_tokens=3),
    case("build_cp_local_metadata", LOC, LENS, 2, 0, TABLE, TABLE.astype(np.float64)),
    case("build_cp_local_metadata", LOC, LENS, 2, 0, TABLE.astype(int), TABLE),
    case("build_cp_local_metadata", LOC, LENS, 2, 0, TABLE[:, 0], TABLE),
    case("build_cp_local_metadata", LOC, LENS, 2, 0, None, None, empty_extent="prefix", causal=False),
    case("build_cp_local_metadata", int32(0, 1, 2), int32(2**31 - 1, 2**31 - 1), 1, 0, None, None),
]


@given(cuts(), st.integers(0, 7), st.sampled_from([(True, "zero"), (True, "prefix"), (False, "zero")]))
@fewer(3)
def test_local_extents_mirrors(every_split, rank, words) -> None:
    causal, empty_extent = words
    for step in each(every_split):
        args = (step.batch.query_start_loc, step.batch.key_lens, np.int64(step.cp_size), rank % step.cp_size)
        assert_mirrors("extents", "local_extents", *args, **step.cut, causal=causal, empty_extent=empty_extent)


@pytest.mark.parametrize("split", [*SPLITS[:-1], "round_robin_page(1)"])
def test_a_padded_slot_cut_between_ranks_mirrors(split) -> None:
    for cp_size in range(1, 5):
        for rank in range(cp_size):
            assert_mirrors("extents", "local_extents", LOC, LENS, cp_size, rank, split=split)


@given(
    st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 9)), max_size=4),
    st.integers(1, 3),
    splits(),
    st.one_of(st.none(), st.integers(0, 12)),
)
def test_local_extents_mirrors_on_any_integers(rows, cp_size, split, padded) -> None:
    """Many of these are refused, by the same check."""
    loc, lens = int32(0, *(row[0] for row in rows)), int32(*(row[1] for row in rows))
    assert_mirrors("extents", "local_extents", loc, lens, cp_size, 0, split=split, num_input_tokens=padded)


@given(st.data(), st.sampled_from(["float64", "float32", "bfloat16", "float16"]), st.integers(0, 3), st.booleans())
def test_build_cp_local_metadata_mirrors(data, dtype, width, causal) -> None:
    batch, cp_size = data.draw(batches()), data.draw(cp_sizes)
    rank, padded = data.draw(st.integers(0, cp_size - 1)), data.draw(padded_counts(batch, "contiguous"))
    most = batch.num_tokens + 5 if padded is None else padded
    rows = data.draw(st.integers(batch.num_tokens, most))
    table = None if data.draw(st.booleans()) else np.cos(np.arange(rows * width, dtype="float64")).reshape(rows, width)
    args = (batch.query_start_loc, batch.key_lens, cp_size, rank, table, table)
    empty = data.draw(st.sampled_from(["zero", "prefix"])) if causal else "zero"
    options = {"num_input_tokens": padded, "causal": causal, "empty_extent": empty}
    if table is None:  # the reference makes an empty float32 table then
        assert_mirrors("extents", "build_cp_local_metadata", *args, **options)
    else:
        assert_floats_mirror("extents", "build_cp_local_metadata", dtype, *args, **options)


@given(batches(), cp_sizes, st.integers(0, 7), st.sampled_from([(True, "zero"), (True, "prefix"), (False, "zero")]))
@fewer(3)
def test_contiguous_lengths_mirror_as_on_a_device(batch, cp_size, rank, words) -> None:
    """The lines that run on numpy views where values are known, over tensors."""
    args = (batch.query_start_loc, batch.key_lens, cp_size, rank % cp_size)
    options = {"num_input_tokens": batch.num_tokens, "causal": words[0], "empty_extent": words[1]}
    with mock.patch("dsacp_npu._tensors.readable", return_value=False):
        assert_mirrors("extents", "local_extents", *args, **options)
        assert_mirrors("extents", "build_cp_local_metadata", *args, None, None, **options)


TOKENS = st.lists(st.integers(-2, 40), max_size=8).map(lambda row: int32(*row))


@given(TOKENS, batches())
def test_token_requests_mirrors(tokens, batch) -> None:
    assert_mirrors("extents", "token_requests", tokens, batch.query_start_loc)


@given(cuts(), st.integers(0, 7), TOKENS)
@fewer(4)
def test_token_positions_mirrors(every_split, rank, any_tokens) -> None:
    for step in each(every_split):
        loc, lens = step.batch.query_start_loc, step.batch.key_lens
        local = local_token_indices(loc, step.cp_size, rank % step.cp_size, **step.cut)
        for tokens in (local, any_tokens):
            assert_mirrors("extents", "token_positions", tokens, loc, lens)


@given(batches(), st.integers(-1, 9))
def test_query_rows_mirrors(batch, beyond) -> None:
    assert_mirrors("extents", "query_rows", batch.query_start_loc, num_rows=batch.num_tokens + beyond)


@given(cuts(), st.integers(0, 7), st.integers(-1, 5))
@fewer(4)
def test_query_positions_mirrors(every_split, rank, beyond) -> None:
    for step in each(every_split):
        loc, lens = step.batch.query_start_loc, step.batch.key_lens
        local = local_extents(loc, lens, step.cp_size, rank % step.cp_size, **step.cut)
        num_rows = int(local.cu_seqlens_q[-1]) + beyond
        assert_mirrors("extents", "query_positions", local.cu_seqlens_q, local.seqused_kv, num_rows=num_rows)


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.function)
def test_refusals_mirror(bad: Case) -> None:
    assert_refusal_mirrors("extents", bad)


@pytest.mark.parametrize("call", STATIC, ids=lambda call: call.function)
@pytest.mark.parametrize("way", WAYS)
def test_runs_without_values(call: Case, way: str) -> None:
    assert_runs_without_values("extents", way, call)


@pytest.mark.parametrize("call", UNKNOWN_SIZE, ids=lambda call: call.function)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_sizes_are_not_read_from_values(call: Case, device: str) -> None:
    function = getattr(dsacp_npu.extents, call.function)
    with FakeTensorMode(), pytest.raises(UnsupportedError, match="num_input_tokens must be given for split"):
        function(*on_device(to_torch(call.args), device), **call.kwargs)


def test_pages_are_planned_on_the_host() -> None:
    loc, lens = on_device(to_torch((LOC, LENS)), "meta")
    with pytest.raises(UnsupportedError, match=r"'round_robin_page\(2\)' must be a CPU tensor, got a tensor on meta"):
        dsacp_npu.extents.local_extents(loc, lens, 2, 0, split="round_robin_page(2)", num_input_tokens=10)


@pytest.mark.parametrize("split", ["contiguous", "round_robin_page(2)"])
def test_sizes_are_not_read_while_compiling(split: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(dsacp_npu.extents.local_extents, fullgraph=True, backend="eager")
    why = "num_input_tokens must be given" if split == "contiguous" else "plan on the CPU"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=why):
        compiled(*to_torch((LOC, LENS)), 2, 0, split=split)
