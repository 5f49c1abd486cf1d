"""The launchers of `dsacp_npu._triton_metadata` give what `dsacp_ref.extents` gives, for any number of requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsacp_npu.extents
import dsacp_ref.extents
from dsacp_npu import _triton_launch, _triton_metadata
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.compare import assert_same
from tests.mirror.common import Case, case, int32, to_torch, untouched
from tests.mirror.test_extents import LENS, LOC, REFUSED, UNKNOWN_SIZE
from tests.strategies import EVERY_SPLIT, batches, cp_sizes, cuts, each, fewer, padded_counts

WORDS = [(True, "zero"), (True, "prefix"), (False, "zero")]
FUNCTIONS = [name for name in _triton_metadata.__all__ if name in dsacp_ref.extents.__all__]
# Where a block of requests is full, and where the running sums go on in a second and a third.
MANY = (1023, 1024, 1025, 2049)


def outcome(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The refusal, by type and text, or the result."""
    try:
        return None, function(*args, **kwargs)
    except (ContractError, UnsupportedError) as error:
        return (type(error), str(error)), None


def assert_launches(name: str, *args: Any, **kwargs: Any) -> None:
    """The launcher and the reference give exactly the same result, or refuse with the same text."""
    refused, want = outcome(getattr(dsacp_ref.extents, name), *args, **kwargs)
    args, kwargs = to_torch(args), to_torch(kwargs)
    mine, got = outcome(untouched, getattr(_triton_metadata, name), args, kwargs)
    assert mine == refused
    assert_same(got, want, name)


def assert_launches_unread(name: str, *args: Any, **kwargs: Any) -> None:
    """The launcher and the mirror give the same result, or refuse with the same text, where no value may be read."""
    args, kwargs = to_torch(args), to_torch(kwargs)
    with mock.patch("dsacp_npu._tensors.readable", return_value=False):
        refused, want = outcome(getattr(dsacp_npu.extents, name), *args, **kwargs)
        mine, got = outcome(getattr(_triton_metadata, name), *args, **kwargs)
    assert mine == refused
    assert_same(got, want, name)


@given(cuts(), st.integers(0, 7), st.sampled_from(WORDS))
@fewer(6)
def test_local_extents(every_split, rank, words) -> None:
    causal, empty_extent = words
    for step in each(every_split):
        args = (step.batch.query_start_loc, step.batch.key_lens, step.cp_size, rank % step.cp_size)
        assert_launches("local_extents", *args, **step.cut, causal=causal, empty_extent=empty_extent)


@given(cuts(), st.integers(0, 7), st.sampled_from(WORDS))
@fewer(10)
def test_local_extents_as_on_a_device(every_split, rank, words) -> None:
    causal, empty_extent = words
    for step in each(every_split):
        args = (step.batch.query_start_loc, step.batch.key_lens, step.cp_size, rank % step.cp_size)
        assert_launches_unread("local_extents", *args, **step.cut, causal=causal, empty_extent=empty_extent)


@given(
    st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 9)), max_size=4),
    st.integers(1, 3),
    st.sampled_from(EVERY_SPLIT),
    st.one_of(st.none(), st.integers(0, 12)),
)
def test_local_extents_on_any_integers(rows, cp_size, split, padded) -> None:
    """Many of these are refused, by the same check."""
    loc, lens = int32(0, *(row[0] for row in rows)), int32(*(row[1] for row in rows))
    assert_launches("local_extents", loc, lens, cp_size, 0, split=split, num_input_tokens=padded)


def many(num_reqs: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of so many requests, with empty ones, prefix hits and padded slots."""
    random = np.random.default_rng(num_reqs)
    query_lens = random.integers(0, 6, num_reqs).astype(np.int32)
    prefixes = random.integers(0, 50, num_reqs, np.int32)
    seq_lens = np.where(np.arange(num_reqs) < num_reqs - 3, query_lens + prefixes, 0).astype(np.int32)
    return int32(0, *np.cumsum(query_lens)), seq_lens


@pytest.mark.parametrize("num_reqs", MANY)
@pytest.mark.parametrize("split", EVERY_SPLIT[:5])
def test_running_sums_go_on_from_block_to_block(split, num_reqs) -> None:
    for cp_rank in (0, 2):
        assert_launches("local_extents", *many(num_reqs), 3, cp_rank, split=split)


@pytest.mark.parametrize("split", EVERY_SPLIT[5:])
def test_runs_of_many_requests(split) -> None:
    assert_launches("local_extents", *many(300), 3, 2, split=split)
    loc, lens = int32(0, 2500, 2503, 7003), int32(2600, 3, 4500)
    assert_launches("local_extents", loc, lens, 2, 1, split=split.replace("(3)", "(1)"))


@pytest.mark.parametrize("split", [*EVERY_SPLIT[:5], f"round_robin_page({2**31 - 1})", "round_robin_page(700000001)"])
def test_counts_beyond_what_float32_holds(split) -> None:
    loc = int32(0, 1_500_000_001, 1_500_000_001, 2_000_000_003)
    lens = int32(1_500_000_001, 5, 1_111_111_111)
    for cp_size in (1, 3, 7):
        for empty_extent in ("zero", "prefix"):
            assert_launches("local_extents", loc, lens, cp_size, cp_size - 1, split=split, empty_extent=empty_extent)


@given(batches(max_query=40), cp_sizes)
@fewer(4)
def test_round_robin_needs_no_carry(batch, cp_size) -> None:
    """A request's share of a rank is what a running surplus over the requests gives: SGLang's computation."""
    for cp_rank in range(cp_size):
        args = (torch.tensor(batch.query_start_loc), torch.tensor(batch.key_lens), cp_size, cp_rank)
        requests = _triton_metadata.local_extents(*args, split="round_robin").request_indices
        got = np.bincount(requests[requests >= 0].numpy(), minlength=len(batch.query_lens))
        assert got.tolist() == list(carried_shares(batch.query_lens, cp_size, cp_rank))


def carried_shares(query_lens: list[int], cp_size: int, cp_rank: int) -> Iterator[int]:
    """Each request's tokens on a rank, with the tokens that the round before was short of carried on."""
    extra = 0
    for query_len in query_lens:
        current = query_len + extra
        mine = current // cp_size + (current % cp_size > cp_rank)
        extra = current - mine * cp_size
        yield mine


@given(st.data(), st.integers(0, 2), st.sampled_from(WORDS))
@fewer(4)
def test_build_cp_local_metadata(data, width, words) -> None:
    batch, cp_size = data.draw(batches()), data.draw(cp_sizes)
    rank, padded = data.draw(st.integers(0, cp_size - 1)), data.draw(padded_counts(batch, "contiguous"))
    rows = data.draw(st.integers(batch.num_tokens, batch.num_tokens + 5 if padded is None else padded))
    table = data.draw(st.sampled_from([None, np.cos(np.arange(rows * width, dtype="float64")).reshape(rows, width)]))
    args = (batch.query_start_loc, batch.key_lens, cp_size, rank, table, table)
    options = {"causal": words[0], "empty_extent": words[1]}
    assert_launches("build_cp_local_metadata", *args, num_input_tokens=padded, **options)
    assert_launches_unread("build_cp_local_metadata", *args, num_input_tokens=batch.num_tokens + 5, **options)


@pytest.mark.parametrize("num_reqs", MANY)
def test_key_starts_go_on_from_block_to_block(num_reqs) -> None:
    assert_launches("build_cp_local_metadata", *many(num_reqs), 2, 1, None, None)


@given(st.lists(st.sampled_from([1, 1, 1, 0, 2, 9, 70]), max_size=80), st.data(), st.integers(0, 30))
@fewer(2)
def test_queries(query_lens, data, beyond) -> None:
    prefixes = data.draw(st.lists(st.sampled_from([0, 3, -1]), min_size=len(query_lens), max_size=len(query_lens)))
    offsets = int32(0, *np.cumsum(query_lens, dtype=np.int32))
    extents = int32(*(0 if prefix < 0 else count + prefix for count, prefix in zip(query_lens, prefixes, strict=True)))
    num_rows = int(offsets[-1]) + beyond
    assert_launches("query_rows", offsets, num_rows=num_rows)
    assert_launches("query_positions", offsets, extents, num_rows=num_rows)
    assert_launches_unread("query_positions", offsets, extents, num_rows=num_rows)
    both = _triton_metadata.query_rows_and_positions(*to_torch((offsets, extents)), num_rows=num_rows)
    want = (dsacp_ref.extents.query_rows(offsets, num_rows=num_rows),)
    assert_same(both, (*want, dsacp_ref.extents.query_positions(offsets, extents, num_rows=num_rows)), "both")


@pytest.mark.parametrize("count", [31, 32, 33, 1024, 2500])
def test_queries_of_one_row_each(count) -> None:
    """A decoding step, and the rows of round robin: every task is one run."""
    assert_launches("query_positions", np.arange(count + 1, dtype=np.int32), int32(*range(count)), num_rows=count + 3)


@pytest.mark.parametrize("query_lens", [(5000,), (0, 2100, 1), (1, *[0] * 100, 3)])
def test_queries_of_long_and_of_empty_rows(query_lens) -> None:
    offsets = int32(0, *np.cumsum(query_lens))
    assert_launches("query_positions", offsets, int32(*query_lens) + np.int32(7), num_rows=int(offsets[-1]))


def test_queries_beyond_the_array_are_left_out_where_offsets_cannot_be_read() -> None:
    offsets, extents = to_torch((int32(0, 1, 2, 3, 30), int32(1, 2, 3, 40)))
    with mock.patch("dsacp_npu._tensors.readable", return_value=False):
        for count in (0, 2, 17):
            rows, positions = _triton_metadata.query_rows_and_positions(offsets, extents, num_rows=count)
            assert_same(rows, int32(*(min(query, 3) for query in range(count))), "rows")
            assert_same(positions, int32(*([0, 1, 2] + [query + 10 for query in range(3, 17)])[:count]), "positions")


def test_fewer_rows_than_tokens_where_offsets_cannot_be_read() -> None:
    """Nobody can refuse this there; no row beyond the last one is written."""
    for split in ("contiguous", "round_robin"):
        for count in range(6):
            assert_launches_unread("local_extents", LOC, LENS, 2, 1, split=split, num_input_tokens=count)


def test_strided_rows() -> None:
    loc, lens = torch.tensor(LOC).repeat_interleave(2)[::2], torch.tensor(LENS).repeat_interleave(3)[::3]
    for split in EVERY_SPLIT:
        got = _triton_metadata.local_extents(loc, lens, 2, 1, split=split)
        assert_same(got, dsacp_ref.extents.local_extents(LOC, LENS, 2, 1, split=split), split)
    got = _triton_metadata.query_positions(loc, lens, num_rows=12)
    assert_same(got, dsacp_ref.extents.query_positions(LOC, LENS, num_rows=12), "positions")


@pytest.mark.parametrize("bad", [bad for bad in REFUSED if bad.function in FUNCTIONS], ids=repr)
def test_refused_as_the_reference_refuses(bad: Case) -> None:
    refused, _ = outcome(getattr(dsacp_ref.extents, bad.function), *bad.args, **bad.kwargs)
    assert refused, "the reference takes this input"
    with mock.patch.object(_triton_metadata, "launch", wraps=_triton_metadata.launch) as launched:
        mine, _ = outcome(getattr(_triton_metadata, bad.function), *to_torch(bad.args), **to_torch(bad.kwargs))
    assert mine == refused
    assert not launched.called or "sum to less" in refused[1], "only sums are checked once they are there"


@pytest.mark.parametrize("call", [*UNKNOWN_SIZE, case("local_extents", LOC, LENS, 2, 1, split="round_robin_page(2)")])
def test_refused_on_a_device_as_the_mirror_refuses(call: Case) -> None:
    assert_launches_unread(call.function, *call.args, **call.kwargs)


def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    calls = [case("local_extents", LOC, LENS, 2, 1), case("build_cp_local_metadata", LOC, LENS, 2, 1, None, None)]
    calls += [case("query_rows", LOC, num_rows=12), case("query_positions", LOC, LENS, num_rows=12)]
    with mock.patch.object(_triton_launch, "interpreted", return_value=False):
        for call in calls:
            with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
                getattr(_triton_metadata, call.function)(*to_torch(call.args), **call.kwargs)


def test_one_launch_a_call() -> None:
    loc, lens = to_torch((LOC, LENS))
    with mock.patch.object(_triton_metadata, "launch", wraps=_triton_metadata.launch) as launched:
        for number, split in enumerate(EVERY_SPLIT, start=1):
            _triton_metadata.local_extents(loc, lens, 2, 1, split=split)
            assert launched.call_count == number
        _triton_metadata.build_cp_local_metadata(loc, lens, 2, 1, None, None)
        _triton_metadata.query_rows_and_positions(loc, lens, num_rows=12)
        assert launched.call_count == len(EVERY_SPLIT) + 2


def test_one_binary_serves_1_to_1024_requests() -> None:
    """By the key under which Triton's launcher keeps a binary; nothing is compiled, and no device is needed.

    In a process of its own: under the interpreter there is no such key.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.test_metadata"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == dict.fromkeys([*EVERY_SPLIT, "local metadata", "queries"], 1)


def keys_of_launches() -> dict[str, int]:
    """How many binaries every function makes Triton keep, over all ranks of 8 and 1 to 1024 requests."""
    from triton.backends.ascend.compiler import AscendBackend
    from triton.backends.compiler import GPUTarget

    backend, seen = AscendBackend(GPUTarget("npu", "Ascend910B3", 0)), set()

    def keep(kernel: Any, tile: str, programs: int, arguments: tuple[Any, ...], **switches: bool) -> None:
        if kernel.binder is None:
            kernel.create_binder(backend)
        sizes = _triton_metadata.TABLES["a2"][tile].sizes
        _, key, constexprs, _, options = kernel.binder(*arguments, **switches, **sizes)
        seen.add((kernel.fn.__name__, key, constexprs, str(options)))

    def count(function: Any, *args: Any, **kwargs: Any) -> int:
        seen.clear()
        for num_reqs in range(1, 1025):
            # Rows of one buffer, from an odd element on: their addresses are aligned in every way there is.
            buffer = torch.arange(3 * num_reqs + 8, dtype=torch.int32)
            offsets, lens = buffer[: num_reqs + 1], buffer[num_reqs + 1 : 2 * num_reqs + 1]
            function(offsets, lens, *args, num_reqs, **kwargs)
        return len(seen)

    def extents(offsets: Any, lens: Any, split: str, num_reqs: int) -> None:
        _triton_metadata.local_extents(offsets, lens, 8, num_reqs % 8, split=split)

    def metadata(offsets: Any, lens: Any, num_reqs: int) -> None:
        _triton_metadata.build_cp_local_metadata(offsets, lens, 8, num_reqs % 8, None, None)

    def queries(offsets: Any, lens: Any, num_reqs: int) -> None:
        _triton_metadata.query_rows_and_positions(offsets, lens, num_rows=num_reqs)

    with (
        mock.patch.object(_triton_launch, "interpreted", return_value=True),
        mock.patch.object(_triton_metadata, "launch", keep),
        mock.patch.object(_triton_metadata, "check_sums"),  # nothing fills the sums here
    ):
        counts = {split: count(extents, split) for split in EVERY_SPLIT}
        return {**counts, "local metadata": count(metadata), "queries": count(queries)}


if __name__ == "__main__":
    print(json.dumps(keys_of_launches()))
