"""The indexers over tokens choose what the reference chooses at compress_ratio 1, of floats and of int8 keys."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import _cann_indexer, _operators, cann
from dsacp_npu import indexer as mirror
from dsacp_npu.fp8 import FP8Vectors
from dsacp_npu.quant import QuantizedVectors
from dsacp_ref import indexer as ref
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.cann.common import BLOCKS, HALVES, WAYS, assert_runs_without_values, rank_rows
from tests.cann.test_indexer import HEADS, PREFIXES, WIDTH, exact_call
from tests.compare import assert_same
from tests.maths_strategies import paged, seeds
from tests.mirror.common import case, int32, to_torch, untouched
from tests.strategies import fewer, read_only

pytestmark = pytest.mark.usefixtures("emulated")


def exact_floats(
    rng: np.random.Generator, rows: list[tuple[int, int]], *, block_size: int, beyond: int = 0
) -> tuple[Any, ...]:
    """A call on small integers, whose scores float32 sums up exactly in any order, so that every tie is one."""
    cu = int32(0, *np.cumsum([length for length, _ in rows]))
    num_queries = int(cu[-1]) + beyond
    q = rng.integers(-3, 4, (num_queries, HEADS, WIDTH)).astype(np.float64)
    weights = rng.choice([-1.0, -0.5, 0.5, 1.0, 2.0], (num_queries, HEADS))
    side = paged(rng, [rng.integers(-3, 4, (used, WIDTH)).astype(np.float64) for _, used in rows], block_size)
    cache = side.cache if rows else np.full((1, block_size, WIDTH), np.nan)
    used = int32(*(extent for _, extent in rows))
    return read_only(q), read_only(weights), read_only(cache), side.table, cu, used


@given(
    rank_rows(PREFIXES),
    st.sampled_from([1, 8, 512, 2048]),
    BLOCKS,
    st.sampled_from([0, 0, 2]),
    HALVES,
    st.booleans(),
    seeds,
)
@fewer(2)
def test_floats_on_the_emulator(
    rows: list[tuple[int, int]], index_topk: int, block_size: int, beyond: int, dtype: str, blind: bool, seed: int
) -> None:
    args = exact_floats(np.random.default_rng(seed), rows, block_size=block_size, beyond=beyond)
    options = {"compress_ratio": 1, "index_topk": index_topk}
    want = ref.lightning_indexer(*args, **options)
    tensors = to_torch(args, dtype)
    with mock.patch("dsacp_npu._tensors.readable", return_value=not blind):
        assert_same(untouched(cann.lightning_indexer, tensors, options), want)


@given(rank_rows(PREFIXES), st.sampled_from([8, 512]), BLOCKS, st.sampled_from([0, 2]), seeds)
@fewer(2)
def test_codes_where_only_the_operator_without_a_ratio_is_there(
    rows: list[tuple[int, int]], index_topk: int, block_size: int, beyond: int, seed: int
) -> None:
    args = exact_call(np.random.default_rng(seed), rows, ratio=1, block_size=block_size, beyond=beyond)
    options = {"compress_ratio": 1, "index_topk": index_topk}
    tensors = to_torch(args, "bfloat16")
    tensors = (*tensors[:2], QuantizedVectors(*to_torch(tuple(args[2]))), *tensors[3:])
    with without_ratios():
        got = untouched(cann.lightning_indexer, tensors, options)
    assert_same(got, ref.lightning_indexer(*args, **options))


def without_ratios() -> Any:
    """A library that has none of the operators that take cmp_ratio, nor their metadata."""
    return mock.patch.multiple(_cann_indexer, OPERATORS=("no_such_operator",), METADATA=("no_such_metadata",))


ARGS = exact_floats(np.random.default_rng(0), [(2, 60), (1, 0), (0, 0), (3, 40)], block_size=16, beyond=1)
TENSORS = to_torch(ARGS, "bfloat16")
OPTIONS = {"compress_ratio": 1, "index_topk": 32}
CODES = exact_call(np.random.default_rng(0), [(2, 60), (3, 40)], ratio=1, block_size=16)
CODES = (*to_torch(CODES[:2], "bfloat16"), QuantizedVectors(*to_torch(tuple(CODES[2]))), *to_torch(CODES[3:]))


@pytest.mark.parametrize("way", WAYS)
def test_it_runs_without_values(way: str) -> None:
    assert_runs_without_values(way, case("lightning_indexer", *TENSORS, **OPTIONS))
    with without_ratios():
        assert_runs_without_values(way, case("lightning_indexer", *CODES, **OPTIONS))


def test_the_last_of_several_queries_sees_most() -> None:
    """Of a rank's rows: queries are right-aligned to the extent, and the first sees no later token."""
    options = {"compress_ratio": 1, "index_topk": 64}
    want = ref.lightning_indexer(*ARGS, **options)
    assert [int((row >= 0).sum()) for row in want] == [59, 60, 0, 38, 39, 40, 0]
    assert_same(cann.lightning_indexer(*TENSORS, **options), want)


def test_codes_go_to_the_operator_with_a_ratio_where_it_is_there() -> None:
    with mock.patch.object(_cann_indexer, "tokens_from_codes", side_effect=AssertionError("called")):
        assert cann.lightning_indexer(*CODES, **OPTIONS).shape == (5, 32)


def test_entries_have_no_operator_without_a_ratio() -> None:
    wanted = "operator no_such_operator with argument cmp_ratio is not in|operator no_such_metadata is not in"
    with without_ratios(), pytest.raises(UnsupportedError, match=wanted):
        cann.lightning_indexer(*CODES, compress_ratio=4, index_topk=8)


def test_a_missing_operator_is_named() -> None:
    with mock.patch.object(_operators, "NAMESPACES", ()):
        with pytest.raises(UnsupportedError, match="operator npu_lightning_indexer is not in"):
            cann.lightning_indexer(*TENSORS, **OPTIONS)
        with pytest.raises(UnsupportedError, match="operator npu_vllm_quant_lightning_indexer_metadata or"):
            cann.lightning_indexer(*CODES, **OPTIONS)


def test_torch_npus_operator_does_as_well() -> None:
    want = cann.lightning_indexer(*TENSORS, **OPTIONS)
    with mock.patch.object(_operators, "NAMESPACES", ("npu",)):
        assert_same(cann.lightning_indexer(*TENSORS, **OPTIONS), want)


def test_queries_that_lie_apart_are_copied_together() -> None:
    apart = [torch.stack([part, part], dim=2)[:, :, 0] for part in TENSORS[:2]]
    assert not any(part.is_contiguous() for part in apart)
    assert_same(cann.lightning_indexer(*apart, *TENSORS[2:], **OPTIONS), cann.lightning_indexer(*TENSORS, **OPTIONS))


def changed(at: int, value: Any) -> tuple[Any, ...]:
    return (*TENSORS[:at], value, *TENSORS[at + 1 :])


Q, WEIGHTS, KEYS, TABLE, CU, USED = TENSORS
LIMITS = [
    ("index_cache must hold int8 codes .* or floats at compress_ratio 1, got Tensor", TENSORS, {"compress_ratio": 4}),
    ("index_cache must hold int8 codes .*, got FP8Vectors", changed(2, FP8Vectors(KEYS, KEYS[..., 0])), {}),
    ("index_q must have dtype bfloat16 or float16, got float32", to_torch(ARGS, "float32"), {}),
    ("index_n_heads must be 64, got 32", (Q[:, :32], WEIGHTS[:, :32], *TENSORS[2:]), {}),
    (r"index_topk must be in 1\.\.2048, got 2049", TENSORS, {"index_topk": 2049}),
    ("index_head_dim must be 128, got 64", (Q[..., :64], WEIGHTS, KEYS[..., :64], *TENSORS[3:]), {}),
    ("block size of index_cache must be a multiple of 16", changed(2, KEYS[:, :8]), {}),
    ("index_cache must be contiguous", changed(2, torch.stack([KEYS, KEYS], dim=1)[:, 0]), {}),
]


@pytest.mark.parametrize(("words", "args", "change"), LIMITS, ids=range(len(LIMITS)))
def test_a_limit_is_named(words: str, args: Any, change: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match=f"lightning_indexer on cann: {words}"):
        cann.lightning_indexer(*args, **{**OPTIONS, **change})


BROKEN = [
    changed(3, TABLE[:, :2]),
    changed(3, TABLE[:2]),
    changed(3, torch.full_like(TABLE, -1)),
    changed(5, torch.tensor([60, 0, 0, 2], dtype=torch.int32)),
    changed(4, CU + 1),
    changed(1, WEIGHTS[:, :3]),
    changed(2, KEYS.float()),
    changed(2, KEYS[:2]),
]


@pytest.mark.parametrize("args", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_contract_has_the_words_of_the_mirror(args: Any) -> None:
    with pytest.raises(ContractError) as theirs:
        mirror.lightning_indexer(*args, **OPTIONS)
    with pytest.raises(ContractError) as mine:
        cann.lightning_indexer(*args, **OPTIONS)
    assert str(mine.value) == str(theirs.value)


def test_metadata_without_a_reader_is_refused() -> None:
    metadata = cann.indexer_metadata(CU, USED, num_heads=HEADS, **OPTIONS)
    with pytest.raises(ContractError, match="metadata must be None with an index_cache of floats, got a tensor"):
        cann.lightning_indexer(*TENSORS, **OPTIONS, metadata=metadata)


def test_nothing_to_choose_from_needs_no_operator() -> None:
    no_rows, nobody = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with mock.patch("dsacp_npu._cann_indexer.operator", side_effect=AssertionError("called")):
        for args, length in (
            ((Q[:0], WEIGHTS[:0], KEYS, TABLE[:0], nobody, no_rows), 0),
            ((Q, WEIGHTS, KEYS, TABLE[:0], nobody, no_rows), 7),
            ((Q, WEIGHTS, KEYS[:0], TABLE, CU, USED * 0), 7),
            ((Q, WEIGHTS, KEYS, TABLE[:, :0], CU, USED * 0), 7),
        ):
            got = cann.lightning_indexer(*args, **OPTIONS)
            assert torch.equal(got, torch.full((length, 32), -1, dtype=torch.int32))
