"""One layer over latents against the slow oracle, however its requests are cut, and over ranks against one device."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from dsacp_ref import mla_layer as layer_module
from dsacp_ref.config import SPLITS
from dsacp_ref.extents import LocalExtents
from dsacp_ref.fp8 import decoded_latents
from dsacp_ref.mla_layer import MLACache, mla_attention_layer, mla_over_ranks
from dsacp_ref.partition import partition_tokens
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_double, assert_same, assert_same_selection, assert_within_budget, scoring_noise
from tests.layer_strategies import as_sets, cached_rows
from tests.maths_strategies import int32, seeds
from tests.mla_strategies import (
    SMALL,
    Cut,
    Run,
    World,
    frequencies_of,
    one_device,
    oracle_config,
    oracle_layer,
    oracle_weights,
    over_ranks,
    plain_outputs,
    plain_scores,
    request_rows,
    run,
    world_of,
    worlds,
)
from tests.oracles import compressor
from tests.oracles import mla as oracle
from tests.strategies import EVERY_SPLIT, FLAT_SPLITS, fewer, read_only

Case = tuple[World, list[list[int]]]


def whole(world: World) -> list[list[int]]:
    """Everything in one step."""
    return [world.lengths]


def assert_close_runs(actual: Run, expected: Run) -> None:
    """Selections exactly, outputs to float64 rounding."""
    assert_same(actual.topk, expected.topk)
    for request, (mine, due) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        assert_double(mine, due, f"request {request}")


# --- against the oracle ---


def assert_oracle(world: World, got: Run) -> None:
    """Keys, choices and outputs of every request, in this order."""
    for request, x in enumerate(world.x):
        if len(x) == 0:
            continue
        due = oracle_layer(world, request)
        cached = request_rows(got.cache, world, request)
        for part, keys in zip(cached, zip(*due.keys, strict=True), strict=True):
            assert_double(part, np.array(keys), f"keys of request {request}")
        assert_same(got.topk[request], int32(due.chosen), f"choice of request {request}")
        error = np.abs(got.outputs[request] - np.array(due.outputs)).max()
        assert error <= 1e-11 * np.abs(due.outputs).max(), f"request {request}: {error}"


@given(worlds())
def test_the_layer_is_the_oracle_however_it_is_cut(case: Case) -> None:
    world, steps = case
    assert_oracle(world, run(world, steps))


def test_ragged_requests_with_single_tokens_between() -> None:
    """One request has nothing, one starts late."""
    world = world_of(np.random.default_rng(1), [31, 0, 17, 8])
    assert_oracle(world, run(world, [[5, 0, 3, 0], [1, 0, 0, 0], [9, 0, 13, 4], [1, 0, 1, 3], [15, 0, 0, 1]]))


def test_decode_from_the_first_token_on() -> None:
    world = world_of(np.random.default_rng(2), [15])
    assert_oracle(world, run(world, [[1]] * 15))


def test_a_step_behind_a_prefix_is_the_oracles_step() -> None:
    """The oracle makes the earlier tokens' keys from their rows; the layer finds them in its cache."""
    world = world_of(np.random.default_rng(3), [13, 6, 9])
    got = run(world, [[8, 6, 0], [5, 0, 9]])
    constants = oracle_config(world.config)
    for request, due in enumerate(oracle.batch(world.x, [8, 6, 0], oracle_weights(world.weights), constants)):
        computed = len(world.x[request]) - len(due.outputs)
        assert_same(got.topk[request][computed:], int32(due.chosen).reshape(-1, SMALL.index_topk))
        assert_double(got.outputs[request][computed:], np.array(due.outputs).reshape(-1, SMALL.hidden_size))


@given(worlds(dtype=np.float32))
@fewer(2)
def test_float32_stays_within_twice_the_plain_error(case: Case) -> None:
    """Selections where float64 can tell the scores apart; outputs given the same selection."""
    world, steps = case
    got = run(world, steps)
    weights, constants = oracle_weights(world.weights), oracle_config(world.config)
    for request, x in enumerate(world.x):
        if len(x) == 0:
            continue
        due = oracle_layer(world, request)
        exact, low = np.full((len(x), len(x)), -np.inf), plain_scores(x, weights, constants)
        for p, scores in enumerate(due.scores):
            exact[p, : p + 1] = scores
        noise = scoring_noise(exact, low)
        assert_same_selection(got.topk[request], int32(due.chosen), exact, noise, f"request {request}")
    assert_within_budget(np.concatenate(got.outputs), oracle_outputs(world, got.topk), plain_outputs(world, got.topk))


def oracle_outputs(world: World, topk: list[np.ndarray]) -> np.ndarray:
    """All requests' outputs over the tokens chosen."""
    parts = [oracle_layer(world, request, given=picks).outputs for request, picks in enumerate(topk) if len(picks)]
    return np.array([row for part in parts for row in part]).reshape(-1, world.config.hidden_size)


# --- what must not matter ---


@given(worlds())
def test_cutting_a_request_into_steps_changes_nothing(case: Case) -> None:
    world, steps = case
    cut, at_once = run(world, steps), run(world, whole(world))
    assert_close_runs(cut, at_once)
    for mine, due in zip(cut.cache, at_once.cache, strict=True):
        assert_double(mine, due)


@given(worlds(), seeds)
@fewer(2)
def test_blocks_and_tables_are_only_places(case: Case, seed: int) -> None:
    """The same rows in other blocks of another size: the same bits."""
    world, steps = case
    rng = np.random.default_rng(seed)
    options = {"config": world.config, "weights": world.weights, "x": world.x, "block_size": int(rng.integers(1, 7))}
    here, there = run(world, steps), run(world_of(rng, world.lengths, **options), steps)
    assert_same(there.topk, here.topk)
    assert_same(there.outputs, here.outputs)


@given(worlds(), st.randoms(use_true_random=False))
@fewer(2)
def test_the_order_of_requests_changes_nothing(case: Case, random) -> None:
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
    for mine, due in zip(cache, expected.cache, strict=True):
        assert_double(mine, due)


@given(worlds(), st.data())
@fewer(2)
def test_later_tokens_never_change_earlier_outputs(case: Case, data: st.DataObject) -> None:
    """NaN in every later row of the same step: the earlier rows keep their choice and their output."""
    world, _ = case
    cuts = [data.draw(st.integers(0, length)) for length in world.lengths]
    future = []
    for rows, cut in zip(world.x, cuts, strict=True):
        changed = rows.copy()
        changed[cut:] = np.nan
        future.append(read_only(changed))
    before, after = run(world, whole(world)), run(world._replace(x=future), whole(world))
    for request, cut in enumerate(cuts):
        assert_same(after.topk[request][:cut], before.topk[request][:cut])
        assert_double(after.outputs[request][:cut], before.outputs[request][:cut], f"request {request}")


@given(worlds(), st.lists(st.integers(1, 4), max_size=3), st.integers(0, 3))
@fewer(2)
def test_padded_slots_and_rows_of_nobody_change_nothing(case: Case, idle: list[int], beyond: int) -> None:
    """Their rows are NaN and their tables garbage; `run` sees that they come out as zeros and -1."""
    world, steps = case
    padded, bare = run(world, steps, idle=idle, beyond=beyond), run(world, steps)
    assert_close_runs(padded, bare)
    for mine, due in zip(padded.cache, bare.cache, strict=True):
        assert_double(mine, due)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
@pytest.mark.parametrize("idle", [[], [2, 1]], ids=str)
def test_a_step_without_tokens(lengths: list[int], idle: list[int]) -> None:
    world = world_of(np.random.default_rng(3), lengths)
    x, batch = world.step(lengths, lengths, idle=idle)
    output, topk, cache = one_device(world)(x, batch, world.cache)
    assert_same(output, np.zeros((sum(idle), SMALL.hidden_size)))
    assert_same(topk, np.full((sum(idle), SMALL.index_topk), -1, np.int32))
    assert_same(cache, world.cache)


def test_what_comes_out_shares_no_memory_with_what_went_in() -> None:
    world = world_of(np.random.default_rng(4), [9, 6])
    x, batch = world.step([0, 0], [9, 6])
    before = [part.tobytes() for part in world.cache]
    out = mla_attention_layer(x, world.weights, world.cache, batch, SMALL)
    assert [part.tobytes() for part in world.cache] == before
    for mine, theirs in zip(out.cache, world.cache, strict=True):
        assert not np.shares_memory(mine, theirs)


# --- the choice ---


@given(worlds(max_steps=1), st.data())
@fewer(2)
def test_a_given_selection_is_used_instead(case: Case, data: st.DataObject) -> None:
    """In any order, with -1 anywhere in a row, and rows of nothing but -1."""
    world, _ = case
    rng = np.random.default_rng(data.draw(seeds))
    x, batch = world.step([0] * len(world.x), world.lengths)
    own = mla_attention_layer(x, world.weights, world.cache, batch, world.config)
    given_topk = np.full((len(x), world.config.index_topk), -1, np.int32)
    positions = [p for length in world.lengths for p in range(length)]
    for row, p in zip(given_topk, positions, strict=True):
        chosen = rng.permutation(p + 1)[: rng.integers(0, len(row) + 1)]
        row[rng.permutation(len(row))[: len(chosen)]] = chosen
    got = mla_attention_layer(x, world.weights, world.cache, batch, world.config, given_topk=read_only(given_topk))
    assert_same(got.topk_indices, given_topk)
    assert_same(got.cache, own.cache)
    at = 0
    for request, length in enumerate(world.lengths):
        rows = slice(at, at + length)
        due = oracle_layer(world, request, given=given_topk[rows]).outputs if length else []
        assert_double(got.output[rows], np.array(due).reshape(length, world.config.hidden_size), f"request {request}")
        at += length
    again = mla_attention_layer(x, world.weights, world.cache, batch, world.config, given_topk=own.topk_indices)
    assert_same(again.output, own.output)


@given(worlds(rope_factor=4.0, mscale_all_dim=1.0))
@fewer(2)
def test_mscale_moves_the_logits_and_nothing_else(case: Case) -> None:
    """Choices and caches keep their bits; the logits grow as a factor on the queries' side would make them grow."""
    world, steps = case
    config = replace(world.config, mscale_all_dim=0.25)
    here, there = run(world, steps), run(world._replace(config=config), steps)
    assert_same(there.topk, here.topk)
    assert_same(there.cache, here.cache)
    ratio = world.config.softmax_scale / config.softmax_scale
    assert ratio == pytest.approx(((0.1 * np.log(4) + 1) / (0.025 * np.log(4) + 1)) ** 2)
    louder = world.weights._replace(wq_b=read_only(world.weights.wq_b * ratio))
    assert_close_runs(run(world._replace(config=config, weights=louder), steps), here)


def test_mscale_is_seen_in_the_output() -> None:
    world = world_of(np.random.default_rng(5), [12])
    quiet = world._replace(config=replace(SMALL, mscale_all_dim=0.25))
    here, there = run(world, whole(world)).outputs[0], run(quiet, whole(world)).outputs[0]
    assert np.abs(here[1:] - there[1:]).max() > 1e-3
    assert_double(here[:1], there[:1])  # one token alone has all the weight at any scale


def test_the_first_tokens_see_all_there_is() -> None:
    """As long as a query sees no more than index_topk tokens, the choice is all of them."""
    world = world_of(np.random.default_rng(6), [8], config=replace(SMALL, index_topk=5))
    got = run(world, whole(world))
    assert as_sets(got.topk[0])[:5] == [set(range(p + 1)) for p in range(5)]
    dense = run(world._replace(config=replace(SMALL, index_topk=8)), whole(world))
    assert_double(got.outputs[0][:5], dense.outputs[0][:5])
    assert np.abs(got.outputs[0][5:] - dense.outputs[0][5:]).max() > 1e-3


# --- over ranks ---


def assert_ranks_equal_one_device(world: World, steps: list[list[int]], cut: Cut, idle: tuple[int, ...] = ()) -> None:
    """Choices exactly; outputs and caches to float64 rounding, and every rank's cache the same bits as rank 0's."""
    due = run(world, steps, idle=idle)
    got = run(world, steps, over_ranks(world, cut), idle=idle)
    assert_close_runs(got, due)
    caches = got.cache if isinstance(got.cache, list) else [world.cache] * cut.cp_size
    assert len(caches) == cut.cp_size
    for rank, cache in enumerate(caches):
        assert_same(cache, caches[0], f"rank {rank}")
        for part, theirs in zip(cache, due.cache, strict=True):
            assert_double(part, theirs, f"rank {rank}")


@given(worlds(), st.lists(st.integers(1, 4), max_size=2), st.data())
@fewer(2)
def test_ranks_equal_one_device(case: Case, idle: list[int], data: st.DataObject) -> None:
    """Every rule on the same requests and steps, in groups of 1 to 4."""
    world, steps = case
    for name in SPLITS:
        split = f"{name}({data.draw(st.integers(1, 5))})" if name == "round_robin_page" else name
        padding = data.draw(st.sampled_from([0, 0, 1, 6])) if split in FLAT_SPLITS else 0
        cut = Cut(data.draw(st.integers(1, 4)), split, padding)
        note(repr(cut))
        assert_ranks_equal_one_device(world, steps, cut, tuple(idle))


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_every_rule_and_group_with_prefixes_and_empty_requests(split: str, cp_size: int) -> None:
    """A long first chunk, an idle request, single tokens, a late request, and fewer tokens than ranks."""
    world = world_of(np.random.default_rng(cp_size), [23, 0, 12, 5])
    steps = [[17, 0, 7, 0], [1, 0, 1, 0], [0, 0, 1, 0], [5, 0, 3, 5]]
    assert_ranks_equal_one_device(world, steps, Cut(cp_size, split), (2,))


@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_caches_are_one_devices_to_the_last_bit_where_rows_are(split: str) -> None:
    """With weights, inputs and eps that leave no rounding in the projections, every rank's cache is exactly the same.

    Small integers, projected and normed before the exchange: a sum over channels has no order then.
    """
    rng = np.random.default_rng(9)
    world = world_of(rng, [11, 6])
    whole_numbers = [read_only(rng.integers(-3, 4, rows.shape).astype(np.float64)) for rows in world.x]
    rounded = world.weights._replace(
        wkv_a=read_only(np.round(2 * world.weights.wkv_a)),
        indexer=world.weights.indexer._replace(wk=read_only(np.round(2 * world.weights.indexer.wk))),
    )
    world = world._replace(x=whole_numbers, weights=rounded)
    due = run(world, [[7, 6], [4, 0]])
    for cp_size in (1, 2, 3, 4):
        got = run(world, [[7, 6], [4, 0]], over_ranks(world, Cut(cp_size, split)))
        assert_same(got.cache, [due.cache] * cp_size)


@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_three_tokens_over_more_ranks(split: str) -> None:
    world = world_of(np.random.default_rng(0), [8])
    for cp_size in (2, 5, 8):
        assert_ranks_equal_one_device(world, [[3], [1], [0], [4]], Cut(cp_size, split))


@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_a_step_without_tokens_over_ranks(split: str) -> None:
    for lengths, idle in (([], ()), ([0, 0], ()), ([0], (3,))):
        world = world_of(np.random.default_rng(1), lengths)
        got = run(world, [lengths], over_ranks(world, Cut(2, split)), idle=idle)
        assert_same(got.cache, [world.cache] * 2)


def test_every_rank_goes_on_from_its_own_cache() -> None:
    """What lies in blocks that no request has is the rank's own and stays."""
    world = world_of(np.random.default_rng(12), [9, 4])
    spare = [b for b in range(len(world.cache.latent_cache)) if b not in world.table[:2]]

    def marked(rank: int) -> MLACache:
        parts = [part.copy() for part in world.cache]
        for part in parts:
            part[spare] = rank
        return MLACache(*map(read_only, parts))

    x, batch = world.step([0, 0], world.lengths)
    partition = partition_tokens(batch.query_start_loc, 3, split="zigzag")
    shards, caches = [x[tokens] for tokens in partition.token_indices], [marked(rank) for rank in range(3)]
    for kept_keys in ("all", "own"):
        out = mla_over_ranks(shards, world.weights, caches, batch, SMALL, split="zigzag", kept_keys=kept_keys)
        for rank, cache in enumerate(out.caches):
            for part in cache:
                assert (part[spare] == rank).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("split", ["contiguous", "contiguous_request"])
def test_one_rank_is_one_device_bit_for_bit(dtype: type, split: str) -> None:
    world = world_of(np.random.default_rng(2), [40, 0, 9], dtype=dtype)
    steps = [[33, 0, 2], [1, 0, 1], [6, 0, 6]]
    due, got = run(world, steps), run(world, steps, over_ranks(world, Cut(1, split)))
    assert_same(got.topk, due.topk)
    assert_same(got.outputs, due.outputs)
    assert_same(got.cache, [due.cache])


@given(worlds(dtype=np.float32, max_steps=2), st.sampled_from(EVERY_SPLIT), st.integers(2, 4))
@fewer(4)
def test_float32_ranks_stay_within_twice_the_plain_error(case: Case, split: str, cp_size: int) -> None:
    world, steps = case
    got = run(world, steps, over_ranks(world, Cut(cp_size, split)))
    assert_within_budget(np.concatenate(got.outputs), oracle_outputs(world, got.topk), plain_outputs(world, got.topk))


def test_a_given_selection_is_by_global_token() -> None:
    world = world_of(np.random.default_rng(7), [11, 5])
    x, batch = world.step([0, 0], world.lengths)
    rng = np.random.default_rng(0)
    given_topk = int32([[rng.integers(0, p + 1), -1, -1] for length in world.lengths for p in range(length)])
    due = mla_attention_layer(x, world.weights, world.cache, batch, SMALL, given_topk=given_topk)
    partition = partition_tokens(batch.query_start_loc, 3, split="zigzag")
    shards = [x[tokens] for tokens in partition.token_indices]
    caches = [world.cache] * 3
    out = mla_over_ranks(shards, world.weights, caches, batch, SMALL, split="zigzag", given_topk=given_topk)
    for tokens, output, topk in zip(partition.token_indices, out.outputs, out.topk_indices, strict=True):
        assert_same(topk, given_topk[tokens])
        assert_double(output, due.output[tokens])


def test_a_rank_whose_queries_saw_the_global_lengths_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local queries right-aligned in the whole request's keys stand at the wrong places."""
    right = layer_module.local_extents

    def wrong(query_start_loc, seq_lens, *args, **options) -> LocalExtents:
        found = right(query_start_loc, seq_lens, *args, **options)
        lengths = np.where(found.request_indices >= 0, seq_lens[found.request_indices], np.int32(0))
        return found._replace(seqused_kv=lengths)

    world = world_of(np.random.default_rng(8), [20])
    assert_ranks_equal_one_device(world, [[20]], Cut(2, "contiguous_request"))
    monkeypatch.setattr(layer_module, "local_extents", wrong)
    with pytest.raises(AssertionError):
        assert_ranks_equal_one_device(world, [[20]], Cut(2, "contiguous_request"))


# --- caches in codes ---

CODES = {"fp8": {"fp8": True}, "int8 index keys": {"int8_index_cache": True}}


def coded_world(codes: str) -> World:
    if codes == "fp8":
        pytest.importorskip("ml_dtypes")
    config = replace(SMALL, kv_lora_rank=128)
    return world_of(np.random.default_rng(11), [23, 0, 12], config=config, **CODES[codes])


@pytest.mark.parametrize("split", EVERY_SPLIT)
@pytest.mark.parametrize("codes", CODES)
def test_caches_in_codes_depend_on_neither_cuts_nor_ranks(codes: str, split: str) -> None:
    """A key is coded after the exchange and before it is attended to, wherever and whenever that is."""
    world = coded_world(codes)
    steps = [[17, 0, 7], [1, 0, 1], [5, 0, 4]]
    due = run(world, whole(world))
    assert_close_runs(run(world, steps), due)
    for cp_size in (1, 2, 3):
        got = run(world, steps, over_ranks(world, Cut(cp_size, split)))
        assert_close_runs(got, due)
        for cache in got.cache:
            assert_same(cache.index_cache, due.cache.index_cache)
            if codes == "fp8":
                assert_same(cache.latent_cache, due.cache.latent_cache)


def test_keys_in_fp8_are_attended_as_the_numbers_that_they_stand_for() -> None:
    world = coded_world("fp8")
    got = run(world, whole(world))
    w, config, freqs = world.weights, world.config, frequencies_of(world.config)
    for request, x in enumerate(world.x):
        rows = cached_rows(got.cache.latent_cache, world.table[request], 0, len(x))
        keys = list(zip(*decoded_latents(rows, kv_lora_rank=128, dtype="float64"), strict=True)) if len(x) else []
        for p, row in enumerate(x):
            qr = compressor.rms_norm(np.dot(w.wq_a, row), w.q_norm, config.rms_norm_eps)
            heads = oracle.query_heads(qr, p, w.wq_b, config.nope_head_dim, freqs)
            seen = [keys[token] for token in got.topk[request][p] if token >= 0]
            assert len(seen) == min(p + 1, config.index_topk)
            out, _ = oracle.attend(heads, seen, w.w_uk, w.w_uv, config.softmax_scale)
            assert_double(got.outputs[request][p], np.dot(w.wo, np.concatenate(out)))


# --- own keys only ---


def written_slots(before: MLACache, after: MLACache) -> list[set[int]]:
    """The slots that hold numbers now and held NaN before, of each part."""
    found = []
    for old, new in zip(before, after, strict=True):
        fresh = np.isnan(old).all(axis=2) & ~np.isnan(new).any(axis=2)
        assert (np.isnan(new).any(axis=2) == np.isnan(new).all(axis=2)).all()
        found.append(set(np.flatnonzero(fresh.ravel()).tolist()))
    return found


@given(worlds(max_steps=1), st.sampled_from(EVERY_SPLIT), st.integers(1, 4), st.lists(st.integers(1, 3), max_size=1))
@fewer(2)
def test_own_keys_are_written_and_no_others(case: Case, split: str, cp_size: int, idle: list[int]) -> None:
    """Outputs and choices are those of keys everywhere: a rank attends to all of them before it forgets."""
    world, steps = case
    note(f"{split} {cp_size}")
    due = run(world, steps, idle=idle)
    got = run(world, steps, over_ranks(world, Cut(cp_size, split, kept_keys="own")), idle=idle)
    assert_close_runs(got, due)
    _, batch = world.step([0] * len(world.x), world.lengths, idle=idle)
    block_size = world.cache.latent_cache.shape[1]
    places = [(request, p) for request, length in enumerate(world.lengths) for p in range(length)]
    slots = [world.table[r][p // block_size] * block_size + p % block_size for r, p in places]
    partition = partition_tokens(batch.query_start_loc, cp_size, split=split)
    for cache, tokens in zip(got.cache, partition.token_indices, strict=True):
        mine = {int(slots[token]) for token in tokens.tolist() if 0 <= token < len(slots)}
        assert written_slots(world.cache, cache) == [mine] * 3
        for part, theirs in zip(cache, due.cache, strict=True):
            known = ~np.isnan(part)
            assert_double(np.where(known, part, 0), np.where(known, theirs, 0))


def test_own_keys_behind_computed_tokens_are_refused() -> None:
    """No rank has the earlier tokens' keys, so nobody can go on."""
    world = world_of(np.random.default_rng(10), [9, 5])
    text = (
        "kept_keys must be 'all' where a request has earlier tokens, got 'own' with 3 of request 1; ranks that keep "
        "own keys only cannot go on: chunks and decode need all keys"
    )
    with pytest.raises(UnsupportedError, match=f"^{re.escape(text)}$"):
        run(world, [[0, 3], [9, 2]], over_ranks(world, Cut(2, kept_keys="own")))
    run(world, [[9, 5]], over_ranks(world, Cut(2, kept_keys="own")))
