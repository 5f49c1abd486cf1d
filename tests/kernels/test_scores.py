"""The index scores of backend `triton` against the reference, and their refusals against the mirror's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import _triton_scores as scores
from dsacp_npu import indexer, quant
from dsacp_npu.kernels.scores import HEADS, WIDTH
from dsacp_npu.quant import QuantizedVectors
from dsacp_ref import indexer as ref
from dsacp_ref import quant as ref_quant
from dsacp_ref.extents import query_positions, query_rows
from dsacp_ref.spec import ContractError, UnsupportedError
from dsacp_ref.visibility import visible_entries
from tests.cann.common import rank_rows
from tests.compare import assert_same, assert_within_budget
from tests.kernels.scores_cases import UNTOUCHED, exact_and_plain, first_rows
from tests.maths_strategies import int32, normal, paged, seeds
from tests.mirror.common import case, to_numpy, to_torch, untouched
from tests.mirror.test_indexer import REFUSED
from tests.mirror.test_quant import REFUSED as REFUSED_CODES
from tests.strategies import fewer

HALVES = st.sampled_from(["bfloat16", "float16"])
KINDS = st.sampled_from(["bfloat16", "float16", "int8"])
# Blocks longer than the longest tile, as long as a tile, and shorter than the shortest.
BLOCK_SIZES = st.sampled_from([128, 64, 32, 16, 8, 1])
NUM_KEYS = st.one_of(st.integers(0, 6), st.sampled_from([64, 130]))


@given(seeds, st.integers(0, 6), NUM_KEYS, HALVES)
@fewer(5)
def test_scores_are_within_budget(seed: int, num_tokens: int, num_keys: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    shapes = (num_tokens, HEADS, WIDTH), (num_tokens, HEADS), (num_keys, WIDTH)
    args = to_torch(tuple(normal(rng, *shape) for shape in shapes), dtype)
    got = untouched(scores.index_scores, args, {})
    exact, plain = (ref.index_scores(*to_numpy(args, each)) for each in ("float64", "float32"))
    assert_within_budget(got, exact, [plain, indexer.index_scores(*args)], "scores")


@given(seeds, st.integers(0, 6), NUM_KEYS)
@fewer(5)
def test_int8_scores_differ_by_the_order_of_one_sum(seed: int, num_tokens: int, num_keys: int) -> None:
    """Over the heads, in float32: a rounding a head, of the sum of magnitudes."""
    rng = np.random.default_rng(seed)
    q = ref_quant.quantized_int8(normal(rng, num_tokens, HEADS, WIDTH))
    keys = ref_quant.quantized_int8(normal(rng, num_keys, WIDTH) * (rng.random((num_keys, 1)) < 0.8))
    weights = normal(rng, num_tokens, HEADS, scale=0.1, dtype=np.float16)
    want, size = (ref_quant.int8_index_scores(q, gains, keys) for gains in (weights, np.abs(weights)))
    got = untouched(scores.int8_index_scores, to_torch((q, weights, keys)), {})
    assert (got.dtype, got.shape) == (torch.float32, want.shape)
    assert (np.abs(got.numpy().astype(np.float64) - want) <= HEADS * 2.0**-23 * size).all()


def test_products_of_full_range_are_exact() -> None:
    """-128 is no code of ours, but it is an int8."""
    q = ref_quant.QuantizedVectors(np.full((1, HEADS, WIDTH), -128, np.int8), np.ones((1, HEADS), np.float16))
    keys = ref_quant.QuantizedVectors(np.full((3, WIDTH), -128, np.int8), np.ones(3, np.float16))
    keys.values[1, 0], keys.values[2, 0] = -127, 127
    weights = np.full((1, HEADS), -0.5, np.float16)
    got = scores.int8_index_scores(*to_torch((q, weights, keys)))
    assert_same(got, ref_quant.int8_index_scores(q, weights, keys))


def test_nan_and_infinity_come_out_where_the_mirror_has_them() -> None:
    generator = torch.Generator().manual_seed(0)
    q, weights, keys = (torch.randn(*shape, generator=generator) for shape in ((3, 64, 128), (3, 64), (9, 128)))
    q[1, 5, 7], keys[2, 3], keys[4, 0], keys[6, :2] = torch.nan, torch.nan, torch.inf, torch.tensor([torch.inf, -1e9])
    args = tuple(part.bfloat16() for part in (q, weights, keys))
    got, want = scores.index_scores(*args), indexer.index_scores(*args)
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(test(got), test(want)), test


class PagedScoring(NamedTuple):
    """Queries of operator rows and their keys in a paged cache, poisoned where nobody may look."""

    q: Any
    weights: torch.Tensor
    keys: list[Any]  # of each operator row, as the reference takes them
    cache: Any
    table: torch.Tensor
    rows: torch.Tensor
    visible: torch.Tensor

    @property
    def args(self) -> tuple[Any, ...]:
        return self.q, self.weights, self.cache, self.table, self.rows, self.visible


def paged_scoring(rows: list[tuple[int, int]], kind: str, ratio: int, block_size: int, seed: int) -> PagedScoring:
    """The scoring of these operator rows, two queries behind them."""
    rng = np.random.default_rng(seed)
    keys = [normal(rng, used // ratio, WIDTH) for _, used in rows]
    loc, used = int32([0, *np.cumsum([length for length, _ in rows])]), int32([extent for _, extent in rows])
    num_queries = int(loc[-1]) + 2
    q, weights = normal(rng, num_queries, HEADS, WIDTH), normal(rng, num_queries, HEADS)
    if kind == "int8":
        each = [ref_quant.quantized_int8(mine) for mine in keys]
        sides = [
            paged(np.random.default_rng(seed), [part[i] for part in each], block_size, poison)
            for i, poison in enumerate((99, np.nan))
        ]
        cache = QuantizedVectors(*(torch.tensor(side.cache) for side in sides))
        tensors = to_torch(ref_quant.quantized_int8(q)), torch.tensor(weights.astype(np.float16))
        table = sides[0].table
    else:
        side = paged(rng, keys, block_size)
        cache, *tensors = to_torch((side.cache, q, weights), kind)
        each = [to_numpy(to_torch(mine, kind), "float32") for mine in keys]
        table = side.table
    places = query_rows(loc, num_rows=num_queries)
    visible = visible_entries(query_positions(loc, used, num_rows=num_queries), ratio)
    return PagedScoring(*tensors, each, cache, *to_torch((table, places, visible)))


def scored(call: PagedScoring, first: int, count: int) -> torch.Tensor:
    """The buffer of a slice."""
    out = torch.full((count, scores.score_columns(call.cache, call.table)), UNTOUCHED)
    untouched(lambda *args: scores.index_scores_slice(*args, first, count, out), call.args, {})
    return out


@given(rank_rows(st.integers(0, 300)), KINDS, st.sampled_from([1, 4, 128]), BLOCK_SIZES, seeds, st.data())
@fewer(3)
def test_a_slice_of_queries_is_scored_as_by_the_reference(rows, kind, ratio, block_size, seed, data) -> None:
    """Every query's visible entries; -inf, or nothing, behind them; nothing for a query without a row."""
    if not rows:
        return
    call = paged_scoring(rows, kind, ratio, block_size, seed)
    first = data.draw(st.integers(0, len(call.rows)))
    count = data.draw(st.integers(0, len(call.rows) - first))
    out, found = scored(call, first, count).numpy(), []
    q, weights = to_numpy((call.q, call.weights), "float16" if kind == "int8" else "float32")
    for query in range(first, first + count):
        got, row, seen = out[query - first], int(call.rows[query]), int(call.visible[query])
        assert set(got[seen:].tolist()) <= {-np.inf, UNTOUCHED}
        if seen:
            mine = slice(query, query + 1)
            keys = first_rows(call.keys[row], slice(seen))
            found.append((got[:seen], *(part[0] for part in exact_and_plain(first_rows(q, mine), weights[mine], keys))))
        if row < 0:
            assert (got == UNTOUCHED).all()
    if found:
        got, exact, plain = (np.concatenate(column) for column in zip(*found, strict=True))
        assert_within_budget(got, exact, plain.astype(np.float32), "scores")


@given(KINDS, st.sampled_from([64, 8]), seeds, st.data())
@fewer(5)
def test_a_score_is_the_same_number_in_any_slice(kind, block_size, seed, data) -> None:
    """Whichever queries share its block: a choice must not depend on the rank that makes it."""
    call = paged_scoring([(5, 90), (1, 20), (3, 60)], kind, 1, block_size, seed)
    whole = scored(call, 0, len(call.rows))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(call.rows) - 1), max_size=3)))
    bounds = [0, *cuts, len(call.rows)]
    parts = torch.cat([scored(call, start, stop - start) for start, stop in pairwise(bounds)])
    for query, seen in enumerate(call.visible.tolist()):
        assert_same(parts[query, :seen], whole[query, :seen], f"scores[{query}]")


def test_a_visible_nan_counts_as_minus_infinity() -> None:
    call = paged_scoring([(4, 160)], "bfloat16", 4, 16, 0)
    cache, slot = call.cache.clone(), int(call.table[0, 1]) * 16 + 3
    cache.view(-1, WIDTH)[slot, 9] = torch.nan
    got, want = scored(call._replace(cache=cache), 0, 4), scored(call, 0, 4)
    assert (got[:, 19] == -torch.inf).all()
    want[:, 19] = -torch.inf
    assert_same(got, want)


@pytest.mark.parametrize(
    "bad",
    [bad for bad in (*REFUSED, *REFUSED_CODES) if bad.function in ("index_scores", "int8_index_scores")],
    ids=lambda bad: bad.function,
)
def test_it_refuses_in_the_words_of_the_mirror(bad: Any) -> None:
    args = to_torch(bad.args)
    mirror = indexer if bad.function == "index_scores" else quant
    with pytest.raises(ContractError) as theirs:
        getattr(mirror, bad.function)(*args)
    with pytest.raises(ContractError) as mine:
        getattr(scores, bad.function)(*args)
    assert str(mine.value) == str(theirs.value)


Q, GAINS = torch.ones(2, HEADS, WIDTH, dtype=torch.bfloat16), torch.ones(2, HEADS, dtype=torch.bfloat16)
KEYS = torch.ones(3, WIDTH, dtype=torch.bfloat16)
FEW = QuantizedVectors(torch.ones(2, 8, WIDTH, dtype=torch.int8), torch.ones(2, 8, dtype=torch.float16))
LIMITS = [
    (case("index_scores", Q[:, :8], GAINS[:, :8], KEYS), "64 index heads of 128 channels, got 8 of 128"),
    (case("index_scores", Q[..., :64], GAINS, KEYS[:, :64]), "64 index heads of 128 channels, got 64 of 64"),
    (case("index_scores", Q.float(), GAINS.float(), KEYS.float()), "of bfloat16, float16, int8, .*, got float32"),
    (case("index_scores", Q, GAINS, KEYS[:1].expand((1 << 24) + 1, -1)), "16777216 entries .*, got room for 16777217"),
    (
        case(
            "int8_index_scores",
            FEW,
            FEW.scales,
            QuantizedVectors(FEW.values[0], FEW.scales[0]),
        ),
        "64 index heads of 128 channels, got 8 of 128",
    ),
]


@pytest.mark.parametrize("call, words", LIMITS, ids=[words for _, words in LIMITS])
def test_beyond_its_limits_it_refuses_by_name(call: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        getattr(scores, call.function)(*call.args)


@pytest.mark.parametrize(
    "kind, change, words",
    [
        ("bfloat16", lambda cache: cache[:, :12].contiguous(), "blocks of a power of two, got blocks of 12"),
        ("bfloat16", lambda cache: cache.repeat(1, 1, 2)[..., ::2], "without gaps, got strides"),
        ("int8", lambda cache: cache._replace(scales=cache.scales.repeat(1, 2)[:, ::2]), "without gaps, got strides"),
        ("bfloat16", lambda cache: cache.float(), "got float32"),
    ],
)
def test_a_cache_that_the_kernel_cannot_read_is_refused(kind: str, change: Any, words: str) -> None:
    call = paged_scoring([(4, 160)], kind, 4, 16, 0)
    out = torch.full((4, 64), UNTOUCHED)
    with pytest.raises(UnsupportedError, match=words):
        scores.index_scores_slice(*call._replace(cache=change(call.cache)).args, 0, 4, out)
    assert (out == UNTOUCHED).all()
