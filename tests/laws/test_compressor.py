"""Compressed entries against the token-by-token oracle: any ratio, any chunking, any state handed on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.compressor import (
    ProjectedRows,
    compress,
    compressed_entries,
    emitted_entries,
    empty_state,
    pooled_entries,
    projected_rows,
    rms_norm,
)
from dsacp_ref.spec import ContractError
from tests.compare import assert_double, assert_same, assert_within_budget
from tests.laws.compressor_runs import (
    hidden_rows,
    oracle_entries,
    plain_entries,
    poisoned,
    run,
    weights_of,
)
from tests.maths_strategies import chunkings, compressor_of, compressors, fewer, int32, normal, seeds
from tests.oracles import compressor as oracle


@st.composite
def runs(draw, dtype=np.float64):
    """(compressor, hidden rows of each request, steps)."""
    made = draw(compressors(dtype))
    steps = draw(chunkings(made.ratio))
    lengths = np.sum(steps, axis=0).tolist()
    return made, hidden_rows(made, np.random.default_rng(draw(seeds)), lengths), steps


@given(runs())
def test_entries_in_any_chunking_are_the_oracles(case):
    made, requests, steps = case
    for got, x in zip(run(made, requests, steps)[0], requests, strict=True):
        assert_double(got, oracle_entries(made, x), "entries")


@given(runs(np.float32))
def test_float32_entries_in_any_chunking_are_within_budget(case):
    made, requests, steps = case
    got = np.concatenate(run(made, requests, steps)[0])
    want = np.concatenate([oracle_entries(made, x) for x in requests])
    assert_within_budget(got, want, np.concatenate([plain_entries(made, x) for x in requests]), "entries")


@given(runs())
def test_the_state_is_all_that_is_needed_and_nothing_else_is_read(case):
    """Between steps, NaN in every number of every ring that no later entry pools, other requests' rings included."""
    made, requests, steps = case
    got, _ = run(made, requests, steps, between=poisoned)
    assert_same(got, run(made, requests, steps)[0])


@fewer
@given(runs(), st.integers(0, 5))
def test_padding_rows_behind_the_last_request_change_nothing(case, pad_rows):
    made, requests, steps = case
    for got, want in zip(run(made, requests, steps, pad_rows=pad_rows)[0], run(made, requests, steps)[0], strict=True):
        assert_double(got, want)


@given(runs(), st.data())
def test_chosen_entries_read_only_the_rows_they_pool(case, data):
    """A rank that makes part of the entries knows its own rows and a halo; the rest may be NaN."""
    made, requests, _ = case
    weights, starts = weights_of(made), [len(x) // 2 for x in requests]
    _, state = run(made, [x[:n] for x, n in zip(requests, starts, strict=True)], [starts], between=poisoned)
    lengths = [len(x) - n for x, n in zip(requests, starts, strict=True)]
    loc = int32(np.concatenate([[0], np.cumsum(lengths)]))
    positions = int32([p for x, n in zip(requests, starts, strict=True) for p in range(n, len(x))])
    new = np.concatenate([x[n:] for x, n in zip(requests, starts, strict=True)])
    rows = projected_rows(new, positions, weights)
    plan = emitted_entries(loc, int32(starts), made.ratio, num_rows=len(new))
    count = int(plan.entry_start_loc[-1])
    chosen = data.draw(st.lists(st.integers(0, len(plan.entry_requests) - 1))) if count else []
    kv, score = np.full_like(rows.kv, np.nan), np.full_like(rows.score, np.nan)
    for at in chosen:
        b, w = int(plan.entry_requests[at]), int(plan.entry_indices[at])
        for p in range(max(made.ratio * (w - made.overlap), starts[b]), made.ratio * (w + 1) if b >= 0 else 0):
            token = loc[b] + p - starts[b]
            kv[token], score[token] = rows.kv[token], rows.score[token]
    options = {"compress_ratio": made.ratio, "eps": made.eps}
    before = (loc, int32(starts), state, weights.norm_weight, made.freqs)
    got = pooled_entries(
        ProjectedRows(kv, score), plan.entry_requests[chosen], plan.entry_indices[chosen], *before, **options
    )
    assert_same(got, compressed_entries(rows, *before, **options).entries[chosen])


@fewer
@given(runs())
def test_one_token_steps_equal_one_shot(case):
    made, requests, _ = case
    x = requests[0]
    one_shot, shot_state = run(made, [x], [[len(x)]])
    by_token, token_state = run(made, [x], [[1]] * len(x))
    assert_double(by_token[0], one_shot[0])
    assert_same(token_state.num_tokens, shot_state.num_tokens)
    assert_double(poisoned(token_state, made).kv, poisoned(shot_state, made).kv)
    assert_double(poisoned(token_state, made).score, poisoned(shot_state, made).score)


@given(runs())
def test_a_chunk_border_on_a_window_still_hands_the_window_before_on(case):
    made, requests, _ = case
    x = requests[0]
    windows = [[made.ratio]] * (len(x) // made.ratio) + [[len(x) % made.ratio]]
    assert_double(run(made, [x], windows, between=poisoned)[0][0], oracle_entries(made, x))


@fewer
@given(runs(), st.integers(0, 40))
def test_a_longer_ring_changes_nothing(case, spare):
    made, requests, steps = case
    weights = weights_of(made)
    least = len(made.weights[2]) * (2 if made.overlap else 1)
    state = empty_state(weights, len(requests), num_rows=least + spare)
    assert_same(run(made, requests, steps, state=state)[0], run(made, requests, steps)[0])


@fewer
@given(runs(), seeds)
def test_permuting_requests_permutes_their_entries(case, seed):
    made, requests, steps = case
    order = np.random.default_rng(seed).permutation(len(requests)).tolist()
    want, _ = run(made, requests, steps)
    got, _ = run(made, [requests[b] for b in order], [[step[b] for b in order] for step in steps])
    for mine, b in zip(got, order, strict=True):
        assert_double(mine, want[b])


@fewer
@given(runs())
def test_a_later_token_never_changes_an_earlier_entry(case):
    """Not even when it is NaN."""
    made, requests, steps = case
    want, _ = run(made, requests, steps)
    for b, x in enumerate(requests):
        for at in {0, len(x) // 2, len(x) - 1} & set(range(len(x))):
            poked = x.copy()
            poked[at] = np.nan
            got, _ = run(made, [*requests[:b], poked, *requests[b + 1 :]], steps)
            before = at // made.ratio
            assert_double(got[b][:before], want[b][:before])
            assert np.isnan(got[b][before : before + 1 + made.overlap]).all()
            assert_double(got[b][before + 1 + made.overlap :], want[b][before + 1 + made.overlap :])


@given(compressors(), st.integers(0, 3), seeds)
def test_a_bias_belongs_to_the_place_in_the_window(made, phase, seed):
    rng = np.random.default_rng(seed)
    x = hidden_rows(made, rng, [5])[0]
    positions = int32([-1, *(phase + np.arange(4))])
    kv, score = projected_rows(x, positions, weights_of(made))
    wkv, wgate, ape, _ = made.weights
    assert_double(kv, x @ wkv.T)
    assert_double(
        score[1:], np.array([wgate @ row + ape[p % made.ratio] for p, row in zip(positions[1:], x[1:], strict=True)])
    )


@given(seeds, st.sampled_from([(), (2,), (2, 3)]), st.integers(1, 5), st.booleans(), st.sampled_from([0.0, 1e-6, 1.0]))
def test_rms_norm_is_the_oracles(seed, shape, d, weighted, eps):
    rng = np.random.default_rng(seed)
    x, weight = normal(rng, *shape, d), normal(rng, d) if weighted else None
    want = [oracle.rms_norm(x[i].tolist(), None if weight is None else weight.tolist(), eps) for i in np.ndindex(shape)]
    assert_double(rms_norm(x, weight, eps), np.array(want).reshape(x.shape))


def test_rms_norm_keeps_the_dtype_of_its_input():
    assert rms_norm(np.ones((1, 2), np.float32), np.ones(2), 1e-6).dtype == np.float32


# Rows, capacity, zero-length requests, padded graph slots.


@st.composite
def lengths_of_steps(draw):
    """(new tokens, tokens before) of each request; a negative count before is a padded graph slot."""
    pairs = st.tuples(st.integers(0, 20), st.one_of(st.just(0), st.integers(0, 30), st.just(-3)))
    return draw(st.lists(pairs, max_size=5))


@given(lengths_of_steps(), st.integers(1, 9), st.integers(0, 6))
def test_a_step_completes_the_windows_whose_last_token_it_brings(pairs, ratio, pad):
    new = [n for n, _ in pairs]
    loc = int32(np.concatenate([[0], np.cumsum(new)]))
    num_rows = sum(new) + pad
    plan = emitted_entries(loc, int32([start for _, start in pairs]), ratio, num_rows=num_rows)
    want = []
    for b, (n, start) in enumerate(pairs):
        closing = [p for p in range(start, start + n) if start >= 0 and (p + 1) % ratio == 0]
        want += [(b, p // ratio) for p in closing]
        if start >= 0:
            assert len(closing) == (start + n) // ratio - start // ratio
    capacity = min(num_rows, num_rows // ratio + len(pairs))
    tail = [(-1, -1)] * (capacity - len(want))
    assert len(want) <= capacity, "the capacity always suffices"
    assert list(zip(plan.entry_requests.tolist(), plan.entry_indices.tolist(), strict=True)) == want + tail
    counts = [sum(1 for b, _ in want if b == request) for request in range(len(pairs))]
    assert_same(plan.entry_start_loc, int32(np.concatenate([[0], np.cumsum(counts)])))
    assert plan.entry_requests.dtype == plan.entry_indices.dtype == np.int32


@given(runs(), st.integers(1, 6))
def test_padded_graph_slots_complete_nothing_and_keep_their_state(case, slot_rows):
    """A slot without keys has fewer than no tokens before it; its rows count in the offsets, whatever they hold."""
    made, requests, _ = case
    weights = weights_of(made)
    lengths = [len(x) for x in requests] + [slot_rows]
    filled = hidden_rows(made, np.random.default_rng(0), [made.ratio + 1])[0]
    loc = int32(np.concatenate([[0], np.cumsum(lengths)]))
    _, old = run(made, [filled] * len(lengths), [[len(filled)] * len(lengths)])
    x = np.concatenate([*requests, np.full((slot_rows, filled.shape[1]), np.nan)])
    starts = int32([0] * len(requests) + [-slot_rows])
    compressed, state = compress(x, weights, loc, starts, old, made.freqs, eps=made.eps)
    want, want_state = run(made, requests, [lengths[:-1]])
    count = int(compressed.entry_start_loc[-1])
    assert compressed.entry_start_loc[-2] == count == sum(map(len, want))
    assert_double(compressed.entries[:count], np.concatenate(want))
    assert (compressed.entries[count:] == 0).all()
    assert_same([part[-1] for part in state], [part[-1] for part in old])
    stepped = [b for b, x in enumerate(requests) if len(x)]
    assert_same(state.num_tokens[stepped], want_state.num_tokens[stepped])


@fewer
@given(runs())
def test_a_request_without_new_tokens_keeps_its_state_bit_by_bit(case):
    made, requests, _ = case
    _, state = run(made, requests, [[len(x) for x in requests]])
    x = hidden_rows(made, np.random.default_rng(0), [3])[0]
    others = len(requests) - 1
    loc, starts = int32([0, 3] + [3] * others), state.num_tokens
    after = compress(x, weights_of(made), loc, starts, state, made.freqs, eps=made.eps).state
    assert_same([part[1:] for part in after], [part[1:] for part in state])


def test_an_empty_batch_gives_an_empty_step():
    made = compressor_of(np.random.default_rng(0), 4, True)
    weights = weights_of(made)
    step = compress(np.empty((0, 3)), weights, int32([0]), int32([]), empty_state(weights, 0), made.freqs, eps=1e-6)
    assert step.compressed.entries.shape == (0, 4)
    assert step.compressed.entry_start_loc.tolist() == [0]
    padded = compress(np.zeros((5, 3)), weights, int32([0]), int32([]), empty_state(weights, 0), made.freqs, eps=1e-6)
    assert padded.compressed.entry_requests.tolist() == [-1]


# Public faults.


@pytest.mark.parametrize("loc", [[0, 6, 10], [6, 4], [0, 6, 4, 20]], ids=["another step's", "lengths", "not ascending"])
def test_offsets_that_are_not_the_rows_are_refused(loc):
    """xLLM#2097: the compressor's offsets are cumulative, and those of the rows it gets."""
    made = compressor_of(np.random.default_rng(0), 4, True)
    weights = weights_of(made)
    with pytest.raises(ContractError):
        compress(
            np.zeros((5, 3)),
            weights,
            int32(loc),
            np.zeros(len(loc) - 1, np.int32),
            empty_state(weights, len(loc) - 1),
            (),
            eps=0.0,
        )


@pytest.mark.parametrize("overlap", [True, False])
def test_three_tokens_make_no_entry_and_four_make_one(overlap):
    """GDzhu01/vllm-ascend-deepseekv4#76."""
    made = compressor_of(np.random.default_rng(0), 4, overlap)
    x = hidden_rows(made, np.random.default_rng(1), [4])[0]
    assert run(made, [x[:3]], [[3]])[0][0].shape == (0, 4)
    got = run(made, [x], [[4]])[0][0]
    assert got.shape == (1, 4)
    assert_double(got, oracle_entries(made, x))


def test_zero_length_rows_complete_nothing():
    """sglang#35848: extends [5, 0, 3, 0] up to keys [133, 0, 128, 0] at ratio 128."""
    plan = emitted_entries(int32([0, 5, 5, 8, 8]), int32([128, 0, 125, 0]), 128, num_rows=8)
    assert plan.entry_start_loc.tolist() == [0, 0, 0, 1, 1]
    assert (plan.entry_requests[0], plan.entry_indices[0]) == (2, 0)


def test_the_first_window_is_pooled_without_one_before_it():
    """Absent slots weigh exactly nothing, even where every present score is very low."""
    made = compressor_of(np.random.default_rng(0), 4, True)
    wkv, wgate, ape, norm = made.weights
    low = made._replace(weights=(wkv, wgate, ape - 500, norm))
    x = hidden_rows(made, np.random.default_rng(1), [4])[0]
    assert_double(run(low, [x], [[4]])[0][0], oracle_entries(made, x))


@pytest.mark.parametrize(("ratio", "overlap", "length"), [(4, True, 18), (128, False, 300)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_entries_at_the_models_own_sizes(ratio, overlap, length, dtype):
    made = compressor_of(np.random.default_rng(0), ratio, overlap, hidden=16, d=512, pairs=32, dtype=dtype)
    x = hidden_rows(made, np.random.default_rng(1), [length])[0]
    cuts = [1, ratio - 1, ratio, length - 2 * ratio]
    got = run(made, [x], [[n] for n in cuts], between=poisoned)[0][0]
    assert len(got) == length // ratio
    assert_within_budget(got, oracle_entries(made, x), plain_entries(made, x), "entries")
