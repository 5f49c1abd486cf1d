"""Choosing from a cache of int8 keys: the operator's codes, weights and scores, by loops over single numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.compressor import compress
from dsacp_ref.indexer import hadamard, lightning_indexer, select_qli
from dsacp_ref.quant import QuantizedVectors, quantized_int8
from dsacp_ref.spec import ContractError
from tests.compare import assert_same, assert_same_selection
from tests.errors.test_maths_errors import LEGAL
from tests.maths_strategies import IndexCall, index_calls, int32
from tests.oracles import indexer as indexer_oracle
from tests.oracles import quant as oracle
from tests.strategies import read_only


def coded_cache(call: IndexCall, unseen: int = 77) -> QuantizedVectors:
    """The call's cache in int8, another code where it holds what no query may read."""
    known = np.isfinite(call.side.cache).all(axis=-1)
    coded = quantized_int8(np.where(known[..., None], call.side.cache, 0))
    return QuantizedVectors(
        read_only(np.where(known[..., None], coded.values, np.int8(unseen))),
        read_only(np.where(known, coded.scales, np.float16(unseen * 100))),
    )


def int8_args(call: IndexCall, **changed: np.ndarray) -> tuple:
    """The arguments of the call, with int8 keys; what no query owns is NaN."""
    idle = [query for query, place in enumerate(call.places) if place is None or place[1] + 1 < call.ratio]
    q, weights = call.q.copy(), call.weights.copy()
    q[idle], weights[idle] = np.nan, np.nan
    return q, weights, coded_cache(call), *call.args[3:]


def oracle_row(call: IndexCall, query: int, row: int, visible: int) -> tuple[list[float], float]:
    """The int8 scores of the entries that a query sees, and the size of the sums they come from."""
    heads = [oracle.encode(head.tolist()) for head in call.q[query]]
    weights = [np.float16(np.float32(weight)) for weight in call.weights[query]]
    scores, largest = [], 0.0
    for key in call.keys[row][:visible]:
        code, scale = oracle.encode(key.tolist())
        values, scales = [values for values, _ in heads], [scale for _, scale in heads]
        scores.append(float(oracle.int8_score(values, scales, code, scale, weights)))
        size = oracle.int8_score(values, scales, code, scale, [abs(weight) for weight in weights])
        largest = max(largest, float(size))
    return scores, largest


@given(index_calls())
def test_the_choice_from_int8_keys_is_the_oracles(call) -> None:
    """Queries that choose nothing are NaN and fit no code; keys beyond the visible ones are other codes."""
    got = lightning_indexer(*int8_args(call), **call.options)
    assert got.shape == (len(call.q), call.index_topk)
    for query, place in enumerate(call.places):
        if place is None:
            assert (got[query] == -1).all()
            continue
        visible = (place[1] + 1) // call.ratio
        scores, size = oracle_row(call, query, place[0], visible)
        want = int32([indexer_oracle.select(scores, visible, call.index_topk)])
        # Only the order of the float32 sum over heads is free: a rounding a head, of the sum of magnitudes.
        noise = 2 * call.q.shape[1] * 2.0**-23 * size
        assert_same_selection(got[query : query + 1], want, np.array([scores]).reshape(1, -1), noise)


@given(index_calls(), st.integers(-127, 127))
def test_codes_that_are_not_visible_yet_change_nothing(call, unseen) -> None:
    args = list(int8_args(call))
    want = lightning_indexer(*args, **call.options)
    args[2] = coded_cache(call, unseen)
    assert_same(lightning_indexer(*args, **call.options), want)


@given(index_calls())
def test_a_row_cut_in_two_chooses_the_same_from_int8(call) -> None:
    args = int8_args(call)
    whole = lightning_indexer(*args, **call.options)
    for query, place in enumerate(call.places):
        if place is not None:
            one = slice(query, query + 1)
            table, extent = call.side.table[place[0] : place[0] + 1], int32([place[1] + 1])
            got = lightning_indexer(args[0][one], args[1][one], args[2], table, int32([0, 1]), extent, **call.options)
            assert_same(got, whole[one])


STEP = LEGAL[select_qli]
EMPTY = QuantizedVectors(read_only(np.full((3, 2, 4), 9, np.int8)), read_only(np.full((3, 2), 9, np.float16)))


def test_a_step_codes_the_rotated_entries_and_chooses_from_the_codes() -> None:
    got, plain = select_qli(**{**STEP, "index_cache": EMPTY}), select_qli(**STEP)
    assert_same(got.state, plain.state)
    written = (plain.index_cache != STEP["index_cache"]).any(axis=-1)
    assert written.any()
    coded = quantized_int8(plain.index_cache)
    assert_same(got.index_cache.values, np.where(written[..., None], coded.values, EMPTY.values))
    assert_same(got.index_cache.scales, np.where(written, coded.scales, EMPTY.scales))
    rows = compress(
        STEP["compress_x"],
        STEP["weights"].compressor,
        STEP["compress_cu_seqlens"],
        STEP["num_computed_tokens"],
        STEP["state"],
        STEP["frequencies"],
        eps=STEP["eps"],
    ).compressed
    block, place = divmod(int(STEP["cmp_block_table"][1, 0]) * 2, 2)
    second = quantized_int8(hadamard(rows.entries[int(rows.entry_start_loc[1])]))  # entry 0 of request 1
    assert_same(got.index_cache.values[block, place], second.values)
    assert got.topk_indices.shape == plain.topk_indices.shape


CALL = LEGAL[lightning_indexer]
CODED = QuantizedVectors(np.ones((2, 2, 3), np.int8), np.ones((2, 2), np.float16))
Q = CALL["index_q"]


def spoiled(array: np.ndarray, value: float) -> np.ndarray:
    bad = array.copy()
    bad[2, 1] = value
    return bad


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"index_cache": CODED._replace(values=CODED.values.astype(np.int16))},
            "index_cache.values must have dtype int8, got int16; cast index_cache.values first",
        ),
        (
            {"index_cache": CODED._replace(values=CODED.values[:, :, :2])},
            "index_cache.values must have shape [num_blocks, block_size, 3], got [2, 2, 2]; as wide as the queries",
        ),
        (
            {"index_cache": CODED._replace(scales=CODED.scales.astype(np.float32))},
            "index_cache.scales must have dtype float16, got float32; cast index_cache.scales first",
        ),
        (
            {"index_cache": CODED._replace(scales=CODED.scales[:, :1])},
            "index_cache.scales must have shape [2, 2], got [2, 1]; one scale a vector",
        ),
        ({"index_cache": tuple(CODED)}, "index_cache must be an array, got tuple; dtype float64"),
        (
            {"index_cache": CODED, "index_q": spoiled(Q, np.inf)},
            "index_q must be finite, with scales that float16 holds, got inf; norm it first",
        ),
        (
            {"index_cache": CODED, "index_weights": spoiled(CALL["index_weights"], -1e5)},
            "index_weights must be of a size that float16 holds, got -100000.0; the int8 operator's dtype",
        ),
    ],
)
def test_what_int8_does_not_hold_is_refused(changed, text) -> None:
    with pytest.raises(ContractError) as caught:
        lightning_indexer(**{**CALL, **changed})
    assert str(caught.value) == text


def test_a_legal_int8_call_is_legal() -> None:
    assert lightning_indexer(**{**CALL, "index_cache": CODED}).tolist() == [[0, -1], [0, 1], [0, 1], [0, -1]]
