"""One layer on one device against the slow oracle, and what must not matter: cuts, order, places, padding, history."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.layer import LayerCache, attention_layer
from tests import plain_layer
from tests.compare import assert_double, assert_same, assert_same_selection, assert_within_budget, scoring_noise
from tests.layer_checks import arrays_of, assert_close_runs, whole
from tests.layer_strategies import (
    CSA,
    EVERY_KIND,
    HCA,
    KINDS,
    SMALL,
    WINDOW,
    Kind,
    Run,
    World,
    as_sets,
    one_device,
    oracle_config,
    oracle_layer,
    oracle_weights,
    run,
    world_of,
    worlds,
)
from tests.maths_strategies import seeds
from tests.oracles import layer as oracle
from tests.strategies import fewer, read_only

ORACLE_KINDS = (*KINDS, Kind(2, False, False), Kind(3, False, False))


# --- against the oracle ---


def assert_oracle(world: World, got: Run) -> None:
    for request in range(len(world.x)):
        due, chosen = oracle_layer(world, request)
        error = np.abs(got.outputs[request] - due).max(initial=0)
        assert error <= 1e-11 * np.abs(due).max(initial=0), f"request {request}: {error}"
        if world.kind.indexer:
            assert as_sets(got.topk[request]) == chosen


@given(worlds(kinds=ORACLE_KINDS))
@fewer(2)
def test_the_layer_is_the_oracle_however_it_is_cut(case: tuple[World, list[list[int]]]) -> None:
    world, steps = case
    assert_oracle(world, run(world, steps))


@pytest.mark.parametrize("kind", ORACLE_KINDS, ids=str)
def test_ragged_requests_with_single_tokens_between(kind: Kind) -> None:
    """Cuts inside, before, on and behind a window's end; one request has nothing, one starts late."""
    world = world_of(np.random.default_rng(1), [37, 0, 21, 8], kind=kind)
    steps = [[5, 0, 3, 0], [1, 0, 0, 0], [12, 0, 17, 4], [1, 0, 1, 3], [18, 0, 0, 1]]
    got = run(world, steps)
    assert_oracle(world, got)


@pytest.mark.parametrize("kind", ORACLE_KINDS, ids=str)
def test_decode_from_the_first_token_on(kind: Kind) -> None:
    world = world_of(np.random.default_rng(2), [19], kind=kind)
    assert_oracle(world, run(world, [[1]] * 19))


@given(worlds(kinds=ORACLE_KINDS, dtype=np.float32))
@fewer(3)
def test_float32_stays_within_twice_the_plain_error(case: tuple[World, list[list[int]]]) -> None:
    """Outputs are compared given the same selection; selections where float64 can tell the scores apart."""
    world, steps = case
    got = run(world, steps)
    ratio = world.kind.ratio
    weights, constants = oracle_weights(world.weights), oracle_config(world.config, ratio)
    for request, x in enumerate(world.x):
        if len(x) == 0:
            continue
        visible = [set(range((p + 1) // ratio)) if ratio > 1 else set() for p in range(len(x))]
        chosen = as_sets(got.topk[request]) if world.kind.indexer else visible
        due, _ = oracle_layer(world, request, [np.array(sorted(row), np.int32) for row in chosen])
        low = plain_layer.layer(x, weights, constants, ratio, chosen)
        assert_within_budget(got.outputs[request], due, low, f"request {request}")
        if world.kind.indexer:
            assert_float32_choice(world, x, got.topk[request])


def assert_float32_choice(world: World, x: np.ndarray, topk: np.ndarray) -> None:
    weights, constants = oracle_weights(world.weights), oracle_config(world.config, world.kind.ratio)
    low = plain_layer.index_scores(x, weights, constants)
    exact = np.full(low.shape, -np.inf)
    for p, row in enumerate(oracle.index_scores(x, weights, constants)):
        exact[p, : len(row)] = row
    due = np.full(topk.shape, -1, np.int32)
    for p, row in enumerate(exact):
        best = sorted(range((p + 1) // world.kind.ratio), key=lambda w, row=row: (-row[w], w))[: topk.shape[1]]
        due[p, : len(best)] = best
    assert_same_selection(topk, due, exact, scoring_noise(exact, low))


# --- what must not matter ---


@given(worlds(kinds=EVERY_KIND))
def test_cutting_a_request_into_steps_changes_nothing(case: tuple[World, list[list[int]]]) -> None:
    world, steps = case
    assert_close_runs(run(world, steps), run(world, whole(world)))


@given(worlds(kinds=EVERY_KIND), st.randoms(use_true_random=False))
@fewer(2)
def test_the_order_of_requests_changes_nothing(case: tuple[World, list[list[int]]], random) -> None:
    world, _ = case
    order = list(range(len(world.x)))
    random.shuffle(order)
    expected = run(world, whole(world))
    x, batch = world.step([0] * len(order), world.lengths, order=order)
    output, topk, cache = one_device(world)(x, batch, world.cache)
    at = 0
    for request in order:
        rows = slice(at, at + world.lengths[request])
        assert_double(output[rows], expected.outputs[request], f"request {request}")
        assert_same(topk[rows], expected.topk[request])
        at = rows.stop
    assert_same(cache.cmp_state.num_tokens, expected.cache.cmp_state.num_tokens)


@given(worlds(kinds=EVERY_KIND), seeds)
@fewer(2)
def test_blocks_tables_and_state_slots_are_only_places(case: tuple[World, list[list[int]]], seed: int) -> None:
    """The same rows in other blocks, of other sizes, and in other slots: the same bits."""
    world, steps = case
    rng = np.random.default_rng(seed)
    elsewhere = world_of(
        rng,
        world.lengths,
        config=world.config,
        kind=world.kind,
        swa_block=int(rng.integers(1, 7)),
        cmp_block=int(rng.integers(1, 7)),
        weights=world.weights,
        x=world.x,
    )
    here, there = run(world, steps), run(elsewhere, steps)
    assert_same(there.outputs, here.outputs)
    assert_same(there.topk, here.topk)


@given(worlds(kinds=EVERY_KIND), st.data())
@fewer(2)
def test_later_tokens_never_change_earlier_outputs(case: tuple[World, list[list[int]]], data: st.DataObject) -> None:
    """NaN in every later row, in one step: the earlier rows keep their bits (transformers#45820, #45758)."""
    world, _ = case
    cuts = [data.draw(st.integers(0, length)) for length in world.lengths]
    future = []
    for rows, cut in zip(world.x, cuts, strict=True):
        changed = rows.copy()
        changed[cut:] = np.nan
        future.append(read_only(changed))
    before, after = run(world, whole(world)), run(world._replace(x=future), whole(world))
    for request, cut in enumerate(cuts):
        assert_same(after.outputs[request][:cut], before.outputs[request][:cut], f"request {request}")
        assert_same(after.topk[request][:cut], before.topk[request][:cut])


@given(worlds(kinds=EVERY_KIND), st.lists(st.integers(1, 4), max_size=3), st.integers(0, 3))
@fewer(2)
def test_padded_slots_and_rows_of_nobody_are_zero_and_change_nothing(
    case: tuple[World, list[list[int]]], idle: list[int], beyond: int
) -> None:
    """Their rows are NaN and their tables garbage."""
    world, steps = case
    padding = sum(idle) + beyond
    seen = []

    def watched(x: np.ndarray, batch, cache: LayerCache):
        output, topk, cache = one_device(world)(x, batch, cache)
        seen.append((output[len(output) - padding :], topk[len(topk) - padding :]))
        return output, topk, cache

    padded, bare = run(world, steps, watched, idle=idle, beyond=beyond), run(world, steps)
    assert_close_runs(padded, bare)
    for output, topk in seen:
        assert output.shape[0] == padding
        assert not output.any()
        assert (topk == -1).all()
    for mine, due in zip(arrays_of(padded.cache), arrays_of(bare.cache), strict=True):
        assert_double(mine.astype(np.float64), due.astype(np.float64), "cache")


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
@pytest.mark.parametrize("idle", [[], [2, 1]], ids=str)
def test_a_step_without_tokens(kind: Kind, lengths: list[int], idle: list[int]) -> None:
    """vllm-ascend#9818: an idle step, padded or not, touches nothing."""
    world = world_of(np.random.default_rng(3), lengths, kind=kind)
    x, batch = world.step(lengths, lengths, idle=idle)
    output, topk, cache = one_device(world)(x, batch, world.cache)
    assert_same(output, np.zeros((sum(idle), SMALL.hidden_size)))
    assert_same(topk, np.full((sum(idle), SMALL.index_topk if kind.indexer else 0), -1, np.int32))
    assert_same(cache, world.cache)


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
def test_what_comes_out_shares_no_memory_with_what_went_in(kind: Kind) -> None:
    world = world_of(np.random.default_rng(4), [9, 6], kind=kind)
    x, batch = world.step([0, 0], [9, 6])
    before = [part.tobytes() for part in arrays_of(world.cache)]
    out = attention_layer(x, world.weights, world.cache, batch, SMALL, compress_ratio=kind.ratio)
    assert [part.tobytes() for part in arrays_of(world.cache)] == before
    changed = {"swa_cache"} | ({"cmp_cache", "cmp_state"} if kind.ratio > 1 else set())
    for name in changed | ({"index_cache", "index_state"} if kind.indexer else set()):
        new, old = getattr(out.cache, name), getattr(world.cache, name)
        for mine, theirs in zip(*[(part,) if name.endswith("cache") else part for part in (new, old)], strict=True):
            assert not np.shares_memory(mine, theirs), name


# --- the choice ---


@given(worlds(kinds=[CSA], max_steps=1), st.data())
@fewer(2)
def test_a_given_selection_is_used_instead(case: tuple[World, list[list[int]]], data: st.DataObject) -> None:
    """In any order, with -1 anywhere in a row."""
    world, _ = case
    rng = np.random.default_rng(data.draw(seeds))
    x, batch = world.step([0] * len(world.x), world.lengths)
    own = attention_layer(x, world.weights, world.cache, batch, world.config, compress_ratio=4)
    given_topk = np.full((len(x), world.config.index_topk), -1, np.int32)
    positions = [p for length in world.lengths for p in range(length)]
    for row, p in zip(given_topk, positions, strict=True):
        chosen = rng.permutation((p + 1) // 4)[: rng.integers(0, len(row) + 1)]
        row[rng.permutation(len(row))[: len(chosen)]] = chosen
    options = {"compress_ratio": 4, "given_topk": read_only(given_topk)}
    got = attention_layer(x, world.weights, world.cache, batch, world.config, **options)
    assert_same(got.topk_indices, given_topk)
    assert_same(got.cache, own.cache)
    at = 0
    for request, length in enumerate(world.lengths):
        due, _ = oracle_layer(world, request, given_topk[at : at + length])
        assert_double(got.output[at : at + length], due, f"request {request}")
        at += length
    again = attention_layer(
        x, world.weights, world.cache, batch, world.config, compress_ratio=4, given_topk=own.topk_indices
    )
    assert_same(again.output, own.output)


@pytest.mark.parametrize("kind", [CSA, Kind(2, True, True), Kind(5, False, True)], ids=str)
def test_choosing_every_entry_is_attending_to_all(kind: Kind) -> None:
    world = world_of(np.random.default_rng(6), [33, 14], kind=kind, config=replace(SMALL, index_topk=40))
    every = world._replace(weights=world.weights._replace(indexer=None), kind=kind._replace(indexer=False))
    chosen, dense = run(world, [[20, 9], [13, 5]]), run(every, [[20, 9], [13, 5]])
    for mine, due in zip(chosen.outputs, dense.outputs, strict=True):
        assert_double(mine, due)


@pytest.mark.parametrize("kind", [CSA, HCA, Kind(3, True, False)], ids=str)
def test_before_the_first_entry_the_layer_is_window_only(kind: Kind) -> None:
    """With the compressed layers' own rotary table: here both layers have the same one."""
    config = replace(SMALL, rope_factor=1.0, compress_rope_theta=SMALL.rope_theta)
    length = kind.ratio - 1
    world = world_of(np.random.default_rng(7), [length], kind=kind, config=config)
    bare = world.weights._replace(compressor=None, indexer=None)
    window = world_of(np.random.default_rng(7), [length], kind=WINDOW, config=config, weights=bare, x=world.x)
    got = run(world, [[1]] * length)
    assert_double(got.outputs[0], run(window, [[length]]).outputs[0])
    assert (got.topk[0] == -1).all()


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
def test_an_overwhelming_sink_leaves_nothing_and_none_leaves_plain_softmax(kind: Kind) -> None:
    world = world_of(np.random.default_rng(8), [21], kind=kind)

    def with_sink(value: float) -> np.ndarray:
        sink = np.full(SMALL.num_heads, value)
        return run(world._replace(weights=world.weights._replace(attn_sink=sink)), [[21]]).outputs[0]

    assert np.abs(with_sink(1e4)).max() == 0
    none, faint = with_sink(-np.inf), with_sink(-1e4)
    assert np.isfinite(none).all()
    assert_double(faint, none)
