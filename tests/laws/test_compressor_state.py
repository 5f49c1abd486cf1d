"""The state between chunks: restarted slots, states that do not fit, and tokens taken back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.compressor import (
    CompressorState,
    compress,
    compressed_entries,
    empty_state,
    projected_rows,
    rolled_back_state,
    updated_state,
)
from dsacp_ref.spec import ContractError
from tests.compare import assert_double, assert_same
from tests.laws.compressor_runs import hidden_rows, kept, oracle_entries, poisoned, pooled_later, run, weights_of
from tests.maths_strategies import Compressor, compressor_of, compressors, int32, seeds


def step(made: Compressor, x: np.ndarray, start: int, state: CompressorState):
    """One request, one chunk."""
    return compress(x, weights_of(made), int32([0, len(x)]), int32([start]), state, made.freqs, eps=made.eps)


def entries_of(compressed) -> np.ndarray:
    return compressed.entries[: int(compressed.entry_start_loc[-1])]


@st.composite
def one_request(draw, *, longest: int = 3):
    """(compressor, rng, two lengths)."""
    made = draw(compressors())
    rng = np.random.default_rng(draw(seeds))
    lengths = st.integers(0, longest * made.ratio + 2)
    return made, rng, draw(lengths), draw(lengths)


@given(one_request())
def test_a_reused_slot_that_starts_at_zero_never_reads_stale_rows(case):
    made, rng, old_length, length = case
    old, x = hidden_rows(made, rng, [old_length, length])
    _, stale = run(made, [old], [[old_length]])
    stale = stale._replace(kv=np.full_like(stale.kv, np.nan), score=np.full_like(stale.score, np.nan))
    first = len(x) // 2
    compressed, state = step(made, x[:first], 0, kept(stale, made))
    if first:
        assert (state.held_start[0], state.num_tokens[0]) == (max(0, first - state.kv.shape[1]), first)
    else:
        state = empty_state(weights_of(made), 1)  # nothing came, so nothing was forgotten
    rest, _ = step(made, x[first:], first, state)
    assert_double(np.concatenate([entries_of(compressed), entries_of(rest)]), oracle_entries(made, x))


@given(one_request(), st.integers(1, 5))
def test_a_state_of_another_length_is_refused(case, off):
    made, rng, length, _ = case
    x, more = hidden_rows(made, rng, [length, 2])
    _, state = run(made, [x], [[length]])
    for start in {length + off, max(length - off, 1)} - {length}:
        with pytest.raises(ContractError, match="state must hold rows"):
            step(made, more, start, state)


@given(one_request())
def test_a_state_that_lost_a_needed_row_is_refused(case):
    """Zeros would pass for tokens; a prefix without its state is an error."""
    made, rng, length, _ = case
    x, more = hidden_rows(made, rng, [length, 1])
    _, state = run(made, [x], [[length]])
    needed = pooled_later(length, made.ratio, made.overlap)
    if not needed:
        return
    exact = state._replace(held_start=int32([needed[0]]))
    assert_double(
        entries_of(step(made, more, length, exact).compressed), entries_of(step(made, more, length, state).compressed)
    )
    with pytest.raises(ContractError, match="keep the state with the prefix"):
        step(made, more, length, state._replace(held_start=int32([needed[0] + 1])))


def test_an_empty_state_does_not_stand_in_for_a_prefix():
    made = compressor_of(np.random.default_rng(0), 4, True)
    with pytest.raises(ContractError, match=r"state must hold rows 0 to 6 of request 0, got rows 0 to 0; keep"):
        step(made, np.zeros((2, 3)), 6, empty_state(weights_of(made), 1))


@pytest.mark.parametrize(("ratio", "length"), [(128, 128), (128, 256)])
def test_at_a_window_border_without_overlap_no_row_is_needed(ratio, length):
    made = compressor_of(np.random.default_rng(0), ratio, False)
    x = hidden_rows(made, np.random.default_rng(1), [length + ratio])[0]
    _, state = run(made, [x[:length]], [[length]], between=poisoned)
    assert np.isnan(state.kv).all()
    got = entries_of(step(made, x[length:], length, state).compressed)
    assert_double(got, oracle_entries(made, x)[length // ratio :])


@given(one_request(), st.integers(0, 9))
def test_the_ring_holds_the_last_rows_at_their_position_modulo_its_length(case, spare):
    made, rng, first, second = case
    x = hidden_rows(made, rng, [first + second])[0]
    weights = weights_of(made)
    least = made.ratio * (2 if made.overlap else 1)
    _, state = run(made, [x], [[first], [second]], state=empty_state(weights, 1, num_rows=least + spare))
    kv, score = projected_rows(x, int32(range(len(x))), weights)
    assert state.held_start[0] == max(0, len(x) - (least + spare))
    for p in range(int(state.held_start[0]), len(x)):
        assert_double(state.kv[0, p % (least + spare)], kv[p])
        assert_double(state.score[0, p % (least + spare)], score[p])


@given(one_request())
def test_pooling_and_updating_apart_equal_one_step(case):
    """Ranks that project their own rows gather both projections and go on from there."""
    made, rng, first, second = case
    x = hidden_rows(made, rng, [first + second])[0]
    weights = weights_of(made)
    _, state = run(made, [x[:first]], [[first]])
    whole = step(made, x[first:], first, state)
    rows = projected_rows(x[first:], int32(range(first, len(x))), weights)
    loc, starts = int32([0, second]), int32([first])
    apart = compressed_entries(
        rows, loc, starts, state, weights.norm_weight, made.freqs, compress_ratio=made.ratio, eps=made.eps
    )
    assert_same(apart, whole.compressed)
    assert_same(updated_state(rows, loc, starts, state), whole.state)


# Rollback: rejected speculative tokens.


@given(one_request(), st.data())
def test_a_rollback_equals_never_having_seen_the_tokens(case, data):
    made, rng, length, more = case
    taken_back = data.draw(st.integers(0, length))
    least = made.ratio * (2 if made.overlap else 1)
    x, other = hidden_rows(made, rng, [length, more])
    _, state = run(made, [x], [[length]], state=empty_state(weights_of(made), 1, num_rows=least + taken_back))
    left = length - taken_back
    back = rolled_back_state(state, int32([left]), compress_ratio=made.ratio, overlap=made.overlap)
    got = entries_of(step(made, other, left, poisoned(back, made)).compressed)
    assert_double(got, oracle_entries(made, np.concatenate([x[:left], other]))[left // made.ratio :])


@given(one_request(), st.integers(0, 6))
def test_a_rollback_is_refused_exactly_when_the_ring_lost_a_needed_row(case, spare):
    made, rng, length, _ = case
    num_rows = made.ratio * (2 if made.overlap else 1) + spare
    x = hidden_rows(made, rng, [length])[0]
    _, state = run(made, [x], [[length]], state=empty_state(weights_of(made), 1, num_rows=num_rows))
    held = set(range(max(0, length - num_rows), length))
    for left in range(length + 1):
        if set(pooled_later(left, made.ratio, made.overlap)) <= held:
            back = rolled_back_state(state, int32([left]), compress_ratio=made.ratio, overlap=made.overlap)
            assert back.num_tokens.tolist() == [left]
        else:
            with pytest.raises(ContractError, match="spare num_rows"):
                rolled_back_state(state, int32([left]), compress_ratio=made.ratio, overlap=made.overlap)


def test_a_ring_without_spare_rows_cannot_roll_back_over_a_closed_window():
    made = compressor_of(np.random.default_rng(0), 4, True)
    x = hidden_rows(made, np.random.default_rng(1), [13])[0]
    for length, refused in (
        (12, False),
        (13, True),
    ):  # 11 tokens go on from rows 4 to 10; 8 rows hold 4 or 5 to the end
        _, state = run(made, [x[:length]], [[length]])
        if refused:
            with pytest.raises(ContractError, match="still hold rows 4 to 11 of request 0, got rows from 5"):
                rolled_back_state(state, int32([11]), compress_ratio=4, overlap=True)
        else:
            assert rolled_back_state(state, int32([11]), compress_ratio=4, overlap=True).num_tokens.tolist() == [11]


@given(compressors(), st.lists(st.integers(-6, 6), min_size=1, max_size=8), seeds)
def test_any_series_of_steps_and_rollbacks_equals_the_tokens_that_stayed(made, moves, seed):
    """A model of a request: a list of tokens that grows and shrinks; every entry made must be of that list."""
    rng = np.random.default_rng(seed)
    weights = weights_of(made)
    state = empty_state(weights, 1, num_rows=made.ratio * (2 if made.overlap else 1) + 6 * len(moves))
    tokens = np.empty((0, made.weights[0].shape[1]))
    entries = np.empty((0, len(weights.norm_weight)))
    for move in moves:
        if move < 0:
            left = max(0, len(tokens) + move)
            state = rolled_back_state(state, int32([left]), compress_ratio=made.ratio, overlap=made.overlap)
            tokens, entries = tokens[:left], entries[: left // made.ratio]
        else:
            new = hidden_rows(made, rng, [move])[0]
            compressed, state = step(made, new, len(tokens), kept(state, made))
            tokens, entries = np.concatenate([tokens, new]), np.concatenate([entries, entries_of(compressed)])
    assert_double(entries, oracle_entries(made, tokens))


@given(one_request())
def test_a_rollback_leaves_other_requests_alone(case):
    made, rng, length, other = case
    x, y = hidden_rows(made, rng, [length, other])
    _, state = run(made, [x, y], [[length, other]])
    back = rolled_back_state(state, int32([0, other]), compress_ratio=made.ratio, overlap=made.overlap)
    assert_same([part[1] for part in back], [part[1] for part in state])
