"""The lightning indexer: rotation and scores against the oracle, and a choice that is exact under its tie rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsacp_ref.indexer import (
    hadamard,
    index_head_weights,
    index_queries,
    index_scores,
    lightning_indexer,
    selected_entries,
)
from dsacp_ref.rope import rope_table
from tests import plain
from tests.compare import assert_double, assert_same, assert_same_selection, assert_within_budget, scoring_noise
from tests.maths_strategies import dtypes, index_calls, int32, normal, seeds
from tests.oracles import indexer as oracle
from tests.oracles import rope as rope_oracle
from tests.strategies import read_only

# Rotation.


@given(seeds, st.integers(0, 6), st.sampled_from([(), (0,), (3,), (2, 2)]))
def test_hadamard_is_the_recursive_oracles(seed, log2, shape):
    x = normal(np.random.default_rng(seed), *shape, 2**log2)
    matrix = np.array([oracle.hadamard(row) for row in np.eye(2**log2)])
    single = x.astype(np.float32)
    exact = np.array([oracle.hadamard(single[i].tolist()) for i in np.ndindex(shape)]).reshape(x.shape)
    assert_double(hadamard(single.astype(np.float64)), exact)
    assert_within_budget(hadamard(single), exact, single @ matrix.astype(np.float32))


@given(seeds, st.integers(0, 7), dtypes)
def test_hadamard_is_its_own_inverse_and_keeps_products(seed, log2, dtype):
    x = normal(np.random.default_rng(seed), 3, 2**log2, dtype=dtype)
    rotated = hadamard(x)
    assert rotated.dtype == dtype
    tolerance = 20 * np.finfo(dtype).eps * np.linalg.norm(x)
    assert np.abs(hadamard(rotated) - x).max() <= tolerance
    assert np.abs(rotated @ rotated.T - x @ x.T).max() <= tolerance * np.linalg.norm(x)


def test_hadamard_rows_are_signs_in_sylvester_order():
    assert_same(
        np.sign(hadamard(np.eye(4))), np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1.0]])
    )


@given(seeds, st.integers(0, 3), st.integers(1, 3), st.integers(0, 3), st.data())
def test_index_queries_are_projected_then_turned_then_rotated(seed, num_tokens, num_heads, log2, data):
    rng, d = np.random.default_rng(seed), 2**log2
    qr, wq_b = normal(rng, num_tokens, 5), normal(rng, num_heads * d, 5)
    at = data.draw(st.lists(st.integers(0, 10**6), min_size=num_tokens, max_size=num_tokens))
    freqs = [np.float32(0.3**i) for i in range(data.draw(st.integers(0, d // 2)))]
    got = index_queries(qr, wq_b, *rope_table(int32(at), [float(f) for f in freqs]), index_head_dim=d)
    want = np.zeros((num_tokens, num_heads, d))
    for t, h in np.ndindex(num_tokens, num_heads):
        want[t, h] = oracle.hadamard(rope_oracle.rotate(wq_b[h * d : (h + 1) * d] @ qr[t], at[t], freqs))
    # The table itself may be one float32 step off.
    assert np.abs(got - want).max(initial=0) <= 4 * 2.0**-23 * np.abs(want).max(initial=0)


@given(seeds, st.integers(0, 3), st.integers(1, 4), st.sampled_from([1, 4, 128]))
def test_head_weights_carry_both_scales_once(seed, num_tokens, num_heads, d):
    rng = np.random.default_rng(seed)
    x, weights = normal(rng, num_tokens, 6), normal(rng, num_heads, 6)
    want = [[float(w @ row) / math.sqrt(d) / math.sqrt(num_heads) for w in weights] for row in x]
    assert_double(index_head_weights(x, weights, index_head_dim=d), np.array(want).reshape(num_tokens, num_heads))


# Scores.


@st.composite
def scorings(draw, dtype=np.float64, most: int = 5):
    rng = np.random.default_rng(draw(seeds))
    num_tokens, num_keys = draw(st.integers(0, most)), draw(st.integers(0, most))
    num_heads, d = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 8]))
    return (
        normal(rng, num_tokens, num_heads, d, dtype=dtype),
        normal(rng, num_tokens, num_heads, dtype=dtype),
        normal(rng, num_keys, d, dtype=dtype),
    )


def oracle_scores(q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return np.array([[oracle.score(heads, w, k) for k in keys] for heads, w in zip(q, weights, strict=True)]).reshape(
        len(q), len(keys)
    )


@given(scorings())
def test_scores_are_the_oracles(case):
    assert_double(index_scores(*case), oracle_scores(*case))


@given(scorings(np.float32))
def test_float32_scores_are_within_budget(case):
    assert_within_budget(index_scores(*case), oracle_scores(*case), plain.index_scores(*case))


def test_scores_at_the_models_own_sizes_are_within_budget():
    rng = np.random.default_rng(0)
    case = [normal(rng, *shape, dtype=np.float32) for shape in ((3, 64, 128), (3, 64), (40, 128))]
    wide = [part.astype(np.float64) for part in case]
    assert_within_budget(index_scores(*case), plain.index_scores(*wide), plain.index_scores(*case))


@given(scorings(most=45), st.sampled_from([np.float32, np.float64]), seeds)
def test_a_score_is_the_same_number_wherever_it_stands(case, dtype, seed):
    """vllm-ascend#15053: the last bit must not depend on the slice, or ties and near ties are settled by it."""
    q, weights, keys = (part.astype(dtype) for part in case)
    scores, rng = index_scores(q, weights, keys), np.random.default_rng(seed)
    rows, columns = (np.sort(rng.integers(0, n + 1, 2)) for n in scores.shape)
    part = slice(*rows), slice(*columns)
    assert_same(index_scores(q[part[0]], weights[part[0]], np.asfortranarray(keys)[part[1]]), scores[part])
    order = rng.permutation(len(keys))
    assert_same(index_scores(q, weights, keys[order]), scores[:, order])


@given(scorings(most=40), dtypes)
def test_equal_keys_score_equally(case, dtype):
    q, weights, keys = (part.astype(dtype) for part in case)
    scores = index_scores(q, weights, np.repeat(keys[:1], 13, axis=0))
    assert_same(scores, np.repeat(scores[:, :1], scores.shape[1], axis=1))


def test_blocks_of_queries_and_keys_are_joined_without_a_seam():
    rng = np.random.default_rng(0)
    q, weights, keys = normal(rng, 70, 2, 4), normal(rng, 70, 2), normal(rng, 2100, 4)
    assert_double(index_scores(q, weights, keys), plain.index_scores(q, weights, keys))


# The choice.

grid = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, math.nan, math.inf, -math.inf])


@st.composite
def choices(draw):
    """(scores, num_visible, index_topk): ties, NaN and infinities on purpose; NaN also where nothing may be read."""
    num_tokens, num_entries = draw(st.integers(0, 4)), draw(st.integers(0, 9))
    dtype = draw(dtypes)
    floats = st.floats(width=32 if dtype == np.float32 else 64)
    row = st.lists(draw(st.sampled_from([grid, floats])), min_size=num_entries, max_size=num_entries)
    scores = draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))
    visible = draw(st.lists(st.integers(0, num_entries), min_size=num_tokens, max_size=num_tokens))
    array = np.array(scores, dtype).reshape(num_tokens, num_entries)
    return read_only(array), int32(visible), draw(st.integers(1, 11))


@given(choices())
@example((np.full((1, 12), 0.0), int32([12]), 5))
@example((np.array([[np.nan, 1, -np.inf, np.nan]]), int32([4]), 4))
@example((np.array([[np.nan] * 10, [1.0] * 4 + [np.nan] + [0.0] * 5]), int32([10, 10]), 4))
@example((np.array([[-np.inf, -np.inf, 5.0, 5.0]]), int32([2]), 3))
def test_the_choice_is_the_oracles_exactly(case):
    scores, num_visible, index_topk = case
    want = [
        oracle.select(row, visible, index_topk)
        for row, visible in zip(scores.tolist(), num_visible.tolist(), strict=True)
    ]
    assert_same(selected_entries(scores, num_visible, index_topk), int32(want).reshape(len(scores), index_topk))


@given(choices())
def test_exactly_as_many_distinct_visible_entries_as_there_can_be(case):
    scores, num_visible, index_topk = case
    for row, visible in zip(
        selected_entries(scores, num_visible, index_topk).tolist(), num_visible.tolist(), strict=True
    ):
        count = min(index_topk, visible)
        assert row[count:] == [-1] * (index_topk - count)
        assert len(set(row[:count])) == count
        assert all(0 <= entry < visible for entry in row[:count])


@given(choices())
def test_what_lies_beyond_the_visible_entries_is_not_read(case):
    scores, num_visible, index_topk = case
    hidden = np.arange(scores.shape[1]) >= num_visible[:, None]
    want = selected_entries(scores, num_visible, index_topk)
    for garbage in (np.nan, np.inf, -np.inf):
        assert_same(
            selected_entries(np.where(hidden, scores.dtype.type(garbage), scores), num_visible, index_topk), want
        )


@given(choices(), st.data())
def test_a_row_chooses_the_same_in_any_slice(case, data):
    scores, num_visible, index_topk = case
    first = data.draw(st.integers(0, len(scores)))
    stop = data.draw(st.integers(first, len(scores)))
    got = selected_entries(scores[first:stop], num_visible[first:stop], index_topk)
    assert_same(got, selected_entries(scores, num_visible, index_topk)[first:stop])


@given(choices())
def test_a_shorter_list_is_the_head_of_a_longer_one(case):
    scores, num_visible, index_topk = case
    longer = selected_entries(scores, num_visible, index_topk + 2)
    assert_same(selected_entries(scores, num_visible, index_topk), longer[:, :index_topk])


def test_no_query_of_a_long_tie_gets_an_unstable_order():
    scores = np.zeros((3, 3000))
    assert_same(selected_entries(scores, int32([3000, 2, 0]), 600)[0], int32(range(600)))


# Over a paged cache.


def dense_choice(call) -> np.ndarray:
    """The choice of each query from the unpaged keys of its request, by the definition."""
    chosen = np.full((len(call.q), call.index_topk), -1, np.int32)
    for query, place in enumerate(call.places):
        if place is not None:
            row, position = place
            keys = call.keys[row][: (position + 1) // call.ratio]
            one = slice(query, query + 1)
            scores = index_scores(call.q[one], call.weights[one], keys)
            chosen[one] = selected_entries(scores, int32([len(keys)]), call.index_topk)
    return chosen


@given(index_calls())
def test_paged_keys_are_chosen_as_dense_ones(call):
    """Keys that no query sees yet are NaN, tables are garbage beyond the used part, blocks are shuffled."""
    assert_same(lightning_indexer(*call.args, **call.options), dense_choice(call))


@given(index_calls(dtype=np.float64))
def test_the_paged_choice_is_the_oracles(call):
    got = lightning_indexer(*call.args, **call.options)
    for query, place in enumerate(call.places):
        if place is None:
            assert (got[query] == -1).all()
            continue
        keys = call.keys[place[0]][: (place[1] + 1) // call.ratio]
        scores = [oracle.score(call.q[query], call.weights[query], key) for key in keys]
        want = int32([oracle.select(scores, len(scores), call.index_topk)])
        exact = np.array([scores]).reshape(1, -1)
        assert_same_selection(got[query : query + 1], want, exact, 1e-14 * np.abs(exact).max(initial=1))


@given(index_calls(dtype=np.float32))
def test_the_float32_choice_differs_from_float64_in_near_ties_only(call):
    got = lightning_indexer(*call.args, **call.options)
    for query, place in enumerate(call.places):
        if place is not None:
            keys, one = call.keys[place[0]][: (place[1] + 1) // call.ratio], slice(query, query + 1)
            exact = oracle_scores(call.q[one], call.weights[one], keys)
            want = int32([oracle.select(exact[0], len(keys), call.index_topk)])
            noise = scoring_noise(exact, plain.index_scores(call.q[one], call.weights[one], keys))
            assert_same_selection(got[one], want, exact, noise)


@given(index_calls(), st.sampled_from([np.inf, -np.inf, 1e30, 0.0]))
def test_keys_that_are_not_visible_yet_change_nothing(call, garbage):
    cache = call.side.cache.copy()
    for row, used in enumerate(call.seqused_kv.tolist()):
        for slot in call.side.slots[row][used // call.ratio :]:
            cache.reshape(-1, cache.shape[2])[slot] = garbage
    got = lightning_indexer(*call._replace(side=call.side._replace(cache=read_only(cache))).args, **call.options)
    assert_same(got, lightning_indexer(*call.args, **call.options))


@given(index_calls(), seeds)
def test_renaming_blocks_changes_no_choice(call, seed):
    order = np.random.default_rng(seed).permutation(len(call.side.cache)).astype(np.int32)
    cache, table = np.empty_like(call.side.cache), call.side.table.copy()
    cache[order] = call.side.cache
    known = (table >= 0) & (table < len(order))
    table[known] = order[table[known]]
    moved = call._replace(side=call.side._replace(cache=read_only(cache), table=read_only(table)))
    assert_same(lightning_indexer(*moved.args, **call.options), lightning_indexer(*call.args, **call.options))


@given(index_calls())
def test_a_row_cut_in_two_chooses_the_same(call):
    """vllm-ascend#15053. Each query as an operator row of its own, right-aligned to its own extent."""
    whole = lightning_indexer(*call.args, **call.options)
    for query, place in enumerate(call.places):
        if place is not None:
            row, position = place
            one = slice(query, query + 1)
            got = lightning_indexer(
                call.q[one],
                call.weights[one],
                call.side.cache,
                call.side.table[row : row + 1],
                int32([0, 1]),
                int32([position + 1]),
                **call.options,
            )
            assert_same(got, whole[one])


@given(index_calls(unseen=0.0), st.data())
def test_a_nan_key_is_chosen_last_but_is_chosen(call, data):
    """vllm#49896."""
    used = call.seqused_kv.tolist()
    rows = [row for row in range(len(used)) if used[row] // call.ratio]
    if not rows:
        return
    row = data.draw(st.sampled_from(rows))
    entry = data.draw(st.integers(0, used[row] // call.ratio - 1))
    cache = call.side.cache.copy()
    cache.reshape(-1, cache.shape[2])[call.side.slots[row][entry]] = np.nan
    got = lightning_indexer(*call._replace(side=call.side._replace(cache=cache)).args, **call.options)
    for query, place in enumerate(call.places):
        if place is not None and place[0] == row:
            visible = (place[1] + 1) // call.ratio
            chosen = got[query][got[query] >= 0].tolist()
            assert len(set(chosen)) == len(chosen) == min(call.index_topk, visible)
            if entry < visible:
                assert (entry in chosen) == (visible <= call.index_topk)
                assert entry not in chosen or chosen[-1] == entry


# Public faults.


def one_request(
    keys: np.ndarray, num_queries: int, used: int, ratio: int, index_topk: int, first: int = 0
) -> np.ndarray:
    """Choices with one head, weight 1 and queries of 1, on rows ``first`` to the end of the request."""
    cache, table = keys.reshape(1, len(keys), -1), int32([[0]])
    rows = num_queries - first
    q = np.ones((rows, 1, cache.shape[2]))
    return lightning_indexer(
        q,
        np.ones((rows, 1)),
        cache,
        table,
        int32([0, rows]),
        int32([used]),
        compress_ratio=ratio,
        index_topk=index_topk,
    )


def test_twelve_equal_keys_are_chosen_lowest_first_in_any_slice():
    """vllm-ascend#15053."""
    keys = np.full((12, 3), 0.3)
    whole = one_request(keys, 8, 48, 4, 5)
    assert whole[-1].tolist() == [0, 1, 2, 3, 4]
    assert_same(one_request(keys, 8, 48, 4, 5, first=4), whole[4:])


def test_a_query_chooses_complete_entries_of_its_past_only():
    """transformers#45820."""
    got = one_request(np.arange(1.0, 5.0)[:, None], 16, 16, 4, 4)
    assert got[2].tolist() == [-1] * 4
    assert got[3].tolist() == [0, -1, -1, -1]
    assert got[7].tolist() == [1, 0, -1, -1]


def test_a_query_chooses_for_itself_alone():
    """transformers#45758."""
    keys = np.array([[2.0], [9.0]])
    got = one_request(keys, 8, 8, 4, 1)
    assert got[3].tolist() == [0]
    assert got[7].tolist() == [1]
    assert_same(one_request(np.array([[2.0], [-9.0]]), 8, 8, 4, 1)[:7], got[:7])


def test_a_local_slice_with_its_own_extent_chooses_all_it_sees():
    """xLLM#1997: rank 1 of 2, 32 of 64 rows, ratio 4, room for 16."""
    got = one_request(np.arange(16.0)[:, None], 32, 64, 4, 16)
    assert sorted(got[31].tolist()) == list(range(16))
    assert sorted(got[0][got[0] >= 0].tolist()) == list(range(8))


@pytest.mark.parametrize(("position", "count"), [(2, 0), (3, 1), (2050, 512), (2051, 512)])
def test_the_first_real_choice_of_v4_flash_is_at_position_2051(position, count):
    keys = np.arange(1.0, 514.0)[:, None]
    got = one_request(keys, 1, position + 1, 4, 512)[0]
    assert (got >= 0).sum() == count
    assert (sorted(got[:count].tolist()) == list(range(count))) == (position < 2051)
