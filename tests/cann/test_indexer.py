"""The int8 indexer over the operator chooses what the int8 reference chooses, given the same codes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import cann
from dsacp_npu import indexer as mirror
from dsacp_npu.quant import QuantizedVectors
from dsacp_ref import indexer as ref
from dsacp_ref.quant import QuantizedVectors as Codes
from dsacp_ref.rope import rope_frequencies, rope_table
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.cann.common import BLOCKS, WAYS, assert_runs_without_values, rank_rows
from tests.compare import assert_same, assert_within_budget
from tests.maths_strategies import normal, paged, seeds
from tests.mirror.common import case, int32, to_numpy, to_torch, untouched
from tests.strategies import fewer, read_only

pytestmark = pytest.mark.usefixtures("emulated")

HEADS, WIDTH = 64, 128
SHORT = st.one_of(st.just(0), st.integers(0, 300))
PREFIXES = st.one_of(st.integers(2040, 2300), SHORT)  # from 2051 on 512 places are a real choice


def exact_call(
    rng: np.random.Generator, rows: list[tuple[int, int]], *, ratio: int, block_size: int, beyond: int = 0
) -> tuple[Any, ...]:
    """A call on integers whose scores float32 sums up exactly in any order, so that every tie is one."""
    cu = int32(0, *np.cumsum([length for length, _ in rows]))
    num_queries = int(cu[-1]) + beyond
    q = rng.integers(-3, 4, (num_queries, HEADS, WIDTH)).astype(np.float64)
    q[:, :, 0] = 127  # every vector's largest: a scale of exactly 1, and no part in any score
    weights = rng.choice([-1.0, -0.5, 0.5, 1.0, 2.0], (num_queries, HEADS))
    keys = [rng.integers(-3, 4, (used // ratio, WIDTH)).astype(np.int8) for _, used in rows]
    for mine in keys:
        mine[:, 0] = 0
    side = paged(rng, keys, block_size, poison=99)
    values = side.cache if rows else np.zeros((1, block_size, WIDTH), np.int8)
    scales = rng.choice([0.5, 1.0, 1.0, 3.0], values.shape[:2]).astype(np.float16)
    used = int32(*(extent for _, extent in rows))
    return read_only(q), read_only(weights), Codes(values, read_only(scales)), side.table, cu, used


@given(
    rank_rows(PREFIXES),
    st.sampled_from([1, 4, 4, 4, 128]),
    st.sampled_from([1, 8, 512, 1024]),
    BLOCKS,
    st.sampled_from([0, 0, 2]),
    st.booleans(),
    seeds,
)
@fewer(2)
def test_lightning_indexer_on_the_emulator(
    rows: list[tuple[int, int]], ratio: int, index_topk: int, block_size: int, beyond: int, blind: bool, seed: int
) -> None:
    args = exact_call(np.random.default_rng(seed), rows, ratio=ratio, block_size=block_size, beyond=beyond)
    options = {"compress_ratio": ratio, "index_topk": index_topk}
    want = ref.lightning_indexer(*args, **options)
    tensors = to_torch(args, "bfloat16")
    tensors = (*tensors[:2], QuantizedVectors(*to_torch(tuple(args[2]))), *tensors[3:])
    extra = {}
    if len(args[0]) and rows:
        extra["metadata"] = cann.indexer_metadata(*tensors[4:], num_heads=HEADS, **options)
    with mock.patch("dsacp_npu._tensors.readable", return_value=not blind):
        assert_same(untouched(cann.lightning_indexer, tensors, options), want)
        assert_same(cann.lightning_indexer(*tensors, **options, **extra), want)


@given(st.sampled_from([64, 8]), st.integers(0, 3), st.sampled_from(["bfloat16", "float16"]), seeds)
@fewer(2)
def test_index_queries_on_the_emulator(num_heads: int, num_tokens: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    positions = rng.integers(-1, 10**6, num_tokens).astype(np.int32)
    qr, wq_b = normal(rng, num_tokens, 32), normal(rng, num_heads * WIDTH, 32, scale=32**-0.5)
    table = to_torch(tuple(rope_table(positions, rope_frequencies(1e4, 64))))
    args = (*to_torch((qr, wq_b), dtype), *table)
    got = untouched(cann.index_queries, args, {"index_head_dim": WIDTH})
    want = mirror.index_queries(*args, index_head_dim=WIDTH)
    assert_same(got.dtype, want.dtype)
    if num_tokens:
        # The mirror rounds at the same places, so it is the plain computation.
        assert_within_budget(got, ref.index_queries(*to_numpy(args, "float64"), index_head_dim=WIDTH), want)


ARGS = exact_call(np.random.default_rng(0), [(2, 2060), (1, 0), (0, 0), (3, 40)], ratio=4, block_size=16, beyond=1)
TENSORS = to_torch(ARGS, "bfloat16")
TENSORS = (*TENSORS[:2], QuantizedVectors(*to_torch(tuple(ARGS[2]))), *TENSORS[3:])
OPTIONS = {"compress_ratio": 4, "index_topk": 512}


@pytest.mark.parametrize("way", WAYS)
def test_it_runs_without_values(way: str) -> None:
    assert_runs_without_values(way, case("lightning_indexer", *TENSORS, **OPTIONS))
    assert_runs_without_values(way, case("indexer_metadata", *TENSORS[4:], num_heads=64, **OPTIONS))
    rope = to_torch(tuple(rope_table(int32(0, 7), rope_frequencies(1e4, 64))))
    args = (torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(128, 8, dtype=torch.bfloat16), *rope)
    assert_runs_without_values(way, case("index_queries", *args, index_head_dim=128))


def changed(at: int, value: Any) -> tuple[Any, ...]:
    return (*TENSORS[:at], value, *TENSORS[at + 1 :])


CACHE = TENSORS[2]
LIMITS = [
    ("index_cache must hold int8 codes", changed(2, CACHE.values.bfloat16()), OPTIONS),
    ("index_n_heads must be 64, got 32", (TENSORS[0][:, :32], TENSORS[1][:, :32], *TENSORS[2:]), OPTIONS),
    ("compress_ratio must be 1 or 4 or 128, got 8", TENSORS, {**OPTIONS, "compress_ratio": 8}),
    (r"index_topk must be in 1\.\.2048, got 2049", TENSORS, {**OPTIONS, "index_topk": 2049}),
    (
        "index_head_dim must be 128, got 64",
        (TENSORS[0][..., :64], TENSORS[1], QuantizedVectors(CACHE.values[..., :64], CACHE.scales), *TENSORS[3:]),
        OPTIONS,
    ),
    (
        "block size of index_cache must be a multiple of 16",
        changed(2, QuantizedVectors(CACHE.values[:, :8], CACHE.scales[:, :8])),
        OPTIONS,
    ),
]


@pytest.mark.parametrize(("words", "args", "options"), LIMITS, ids=range(len(LIMITS)))
def test_a_limit_is_named(words: str, args: Any, options: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match=f"lightning_indexer on cann: {words}"):
        cann.lightning_indexer(*args, **options)


BROKEN = [
    changed(3, TENSORS[3][:, :20]),
    changed(3, TENSORS[3][:2]),
    changed(5, torch.tensor([2060, 0, 0, 2], dtype=torch.int32)),
    changed(4, TENSORS[4] + 1),
    changed(1, TENSORS[1][:, :3]),
]


@pytest.mark.parametrize("args", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_contract_has_the_words_of_the_mirror(args: Any) -> None:
    with pytest.raises(ContractError) as theirs:
        mirror.lightning_indexer(*args, **OPTIONS)
    with pytest.raises(ContractError) as mine:
        cann.lightning_indexer(*args, **OPTIONS)
    assert str(mine.value) == str(theirs.value)


def test_nothing_to_choose_from_needs_no_operator() -> None:
    no_rows = torch.zeros(0, dtype=torch.int32)
    nobody = torch.zeros(1, dtype=torch.int32)
    unseen = (TENSORS[4], torch.zeros_like(TENSORS[5]))
    empty = QuantizedVectors(CACHE.values[:0], CACHE.scales[:0])
    with mock.patch("dsacp_npu._cann_indexer.operator", side_effect=AssertionError("called")):
        for args, length in (
            ((TENSORS[0][:0], TENSORS[1][:0], CACHE, TENSORS[3][:0], nobody, no_rows), 0),
            ((*TENSORS[:3], TENSORS[3][:0], nobody, no_rows), 7),
            ((*TENSORS[:2], empty, TENSORS[3], *unseen), 7),
            ((*TENSORS[:3], TENSORS[3][:, :0], *unseen), 7),
        ):
            got = cann.lightning_indexer(*args, **OPTIONS)
            assert torch.equal(got, torch.full((length, 512), -1, dtype=torch.int32))
