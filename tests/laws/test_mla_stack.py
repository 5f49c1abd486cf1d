"""A stack over latents against the slow oracle, and over ranks against one device; what goes in, and what comes out."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from dsacp_ref.compressor import rms_norm
from dsacp_ref.config import SPLITS
from dsacp_ref.mla_stack import (
    LocalInputs,
    local_inputs,
    mla_block,
    mla_block_over_ranks,
    mla_decoder_stack,
    mla_stack_over_ranks,
    rows_argmax,
    vocab_argmax,
)
from dsacp_ref.partition import local_rows, partition_tokens
from tests.compare import assert_double, assert_same, assert_within_budget
from tests.layer_strategies import cached_rows, chunkings, frozen
from tests.maths_strategies import int32, seeds
from tests.mla_strategies import (
    SMALL,
    Cut,
    StackRun,
    StackWorld,
    configs,
    oracle_stack,
    plain_stack,
    run_stack,
    stack_over_ranks,
    stack_world_of,
)
from tests.oracles import extents, splits
from tests.oracles import mla_stack as oracle
from tests.strategies import EVERY_SPLIT, FLAT_SPLITS, Batch, Step, cuts, each, fewer, read_only

EXPERTS = ("whole", "split", "sliced")
INTER = 12  # every group of 1 to 4 ranks divides it
Case = tuple[StackWorld, list[list[int]]]


@st.composite
def stacks(draw: st.DrawFn, *, num_layers: int = 2, max_steps: int = 3) -> Case:
    """A stack, and a way to feed it: empty requests, late ones, single tokens, chunks behind a prefix."""
    steps = draw(chunkings(1, max_steps=max_steps))
    stack = stack_world_of(
        np.random.default_rng(draw(seeds)),
        [sum(new) for new in zip(*steps, strict=True)],
        num_layers=num_layers,
        inter=INTER,
        config=draw(configs()),
        block_size=draw(st.integers(1, 5)),
    )
    return stack, steps


# --- one device ---


def assert_near(got: np.ndarray, due: list, name: str) -> None:
    """Equal to rounding that grew from layer to layer."""
    error = np.abs(got - np.array(due)).max()
    assert error <= 1e-11 * np.abs(due).max(), f"{name}: {error}"


def assert_oracle(stack: StackWorld, steps: list[list[int]], got: StackRun) -> None:
    """Hidden rows, every step's logits, and what every layer's cache holds in the end."""
    for request, ids in enumerate(stack.token_ids):
        ends = list(accumulate(new[request] for new in steps))
        due = oracle_stack(stack, request)
        if len(ids):
            assert_near(got.hidden[request], due.hidden, f"request {request}")
            for cache, keys in zip(got.caches, due.keys, strict=True):
                for part, own in zip(cache, zip(*keys, strict=True), strict=True):
                    rows = cached_rows(part, stack.world.table[request], 0, len(ids))
                    assert_near(rows, own, f"keys of request {request}")
        for new, end, logits in zip(steps, ends, got.logits, strict=True):
            if new[request]:
                assert_near(logits[request], due.logits[end - 1], f"logits of request {request}")
            else:
                assert not logits[request].any()


@given(stacks())
@fewer(5)
def test_a_stack_is_the_oracle_however_it_is_cut(case: Case) -> None:
    stack, steps = case
    assert_oracle(stack, steps, run_stack(stack, steps))


def test_three_layers_with_prefixes_late_requests_and_decode() -> None:
    steps = [[5, 0, 3, 0], [1, 0, 0, 0], [3, 0, 4, 2], [1, 0, 1, 1]]
    stack = stack_world_of(np.random.default_rng(1), [10, 0, 8, 3], inter=INTER)
    got = run_stack(stack, steps, idle=(2,))
    assert all(not logits[4].any() for logits in got.logits), "a padded graph slot has no logits"
    assert_oracle(stack, steps, got._replace(logits=[logits[:4] for logits in got.logits]))


def test_a_stack_is_its_blocks_between_an_embedding_and_a_norm() -> None:
    """The same bits, on one device and over ranks; and what each block chose is the oracle's choice."""
    stack = stack_world_of(np.random.default_rng(2), [9, 6], inter=INTER)
    ids, batch = stack.step([0, 0], [9, 6])
    weights, caches = stack.weights, stack.caches
    due = mla_decoder_stack(ids, weights, caches, batch, SMALL)
    x, oracles = weights.embed[ids], [oracle_stack(stack, request) for request in range(2)]
    for layer, block in enumerate(weights.blocks):
        out = mla_block(read_only(x), block, caches[layer], batch, SMALL)
        chosen = [chosen for own in oracles for chosen in own.chosen[layer]]
        assert_same(out.topk_indices, int32(chosen), f"layer {layer}")
        assert_same(out.cache, due.caches[layer])
        x = out.output
    assert_same(due.hidden, rms_norm(x, weights.norm, SMALL.rms_norm_eps))
    assert_same(due.logits, due.hidden[[8, 14]] @ weights.head.T)

    for experts in EXPERTS:
        over = mla_stack_over_ranks(ids, weights, [caches] * 2, batch, SMALL, split="zigzag", experts=experts)
        partition = partition_tokens(batch.query_start_loc, 2, split="zigzag")
        stream = [weights.embed[local_rows(ids, partition, rank)] for rank in range(2)]
        for layer, block in enumerate(weights.blocks):
            step = mla_block_over_ranks(
                frozen(stream), block, [caches[layer]] * 2, batch, SMALL, split="zigzag", experts=experts
            )
            stream = step.outputs
            assert_same(step.caches, [own[layer] for own in over.caches])
        assert_same(over.hidden, [rms_norm(rows, weights.norm, SMALL.rms_norm_eps) for rows in stream])


def test_rows_behind_the_requests_change_nothing() -> None:
    """On one device the token ids may go on; their rows come out zero, whatever their embedding is."""
    stack = stack_world_of(np.random.default_rng(3), [6])
    ids, batch = stack.step([0], [6], beyond=3)
    due = mla_decoder_stack(ids[:6], stack.weights, stack.caches, batch, SMALL)
    got = mla_decoder_stack(ids, stack.weights, stack.caches, batch, SMALL)
    assert_same(got.logits, due.logits)
    assert_same(got.caches, due.caches)
    assert_same(got.hidden[:6], due.hidden)
    assert not got.hidden[6:].any()


# --- over ranks ---


def assert_same_run(got: StackRun, due: StackRun, cp_size: int) -> None:
    """Rows, logits and caches to float64 rounding; every rank's caches the same bits as rank 0's."""
    for request, (mine, theirs) in enumerate(zip(got.hidden, due.hidden, strict=True)):
        assert_double(mine, theirs, f"hidden of request {request}")
    for step, (mine, theirs) in enumerate(zip(got.logits, due.logits, strict=True)):
        assert_double(mine, theirs, f"logits of step {step}")
    assert len(got.caches) == cp_size
    for rank, caches in enumerate(got.caches):
        assert_same(caches, got.caches[0], f"caches of rank {rank}")
    for mine, theirs in zip(got.caches[0], due.caches, strict=True):
        for part, own in zip(mine, theirs, strict=True):
            assert_double(part, own)


@given(stacks(), st.lists(st.integers(1, 4), max_size=2), st.data())
@fewer(10)
def test_ranks_equal_one_device(case: Case, idle: list[int], data: st.DataObject) -> None:
    """Every rule on the same requests and steps, in groups of 1 to 4; rows of nobody are NaN before the first layer."""
    stack, steps = case
    due = run_stack(stack, steps, idle=idle)
    for name in SPLITS:
        split = f"{name}({data.draw(st.integers(1, 5))})" if name == "round_robin_page" else name
        padding = data.draw(st.sampled_from([0, 0, 1, 6])) if split in FLAT_SPLITS else 0
        cut, experts = Cut(data.draw(st.integers(1, 4)), split, padding), data.draw(st.sampled_from(EXPERTS))
        note(f"{cut!r} experts {experts}")
        assert_same_run(run_stack(stack, steps, stack_over_ranks(stack, cut, experts), idle), due, cut.cp_size)


@pytest.mark.slow
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_every_rule_and_group_with_prefixes_and_empty_requests(split: str, cp_size: int) -> None:
    """Steps of 11, 2, 1 and 6 tokens: some have fewer tokens than ranks, and all but the first stand behind a prefix.

    A padded graph slot of 2 rows follows; where a rule takes padding, 3 rows more.
    """
    stack = stack_world_of(np.random.default_rng(cp_size), [12, 0, 7, 2], inter=INTER)
    steps = [[8, 0, 3, 0], [1, 0, 1, 0], [0, 0, 1, 0], [3, 0, 2, 2]]
    due = run_stack(stack, steps, idle=(2,))
    cut = Cut(cp_size, split, 3 if split in FLAT_SPLITS else 0)
    for experts in EXPERTS:
        assert_same_run(run_stack(stack, steps, stack_over_ranks(stack, cut, experts), (2,)), due, cp_size)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("split", EVERY_SPLIT)
@pytest.mark.parametrize("lengths", [[], [0], [1], [2, 0]], ids=str)
def test_ranks_without_rows_take_part(lengths: list[int], split: str, experts: str) -> None:
    stack = stack_world_of(np.random.default_rng(4), lengths, num_layers=2, inter=INTER)
    got = run_stack(stack, [lengths], stack_over_ranks(stack, Cut(4, split), experts))
    assert_same_run(got, run_stack(stack, [lengths]), 4)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_every_layer_chooses_what_one_device_chooses(split: str, experts: str) -> None:
    """The stream goes from block to block; NaN in the pad rows of each goes nowhere."""
    stack = stack_world_of(np.random.default_rng(5), [14, 0, 6], inter=INTER)
    ids, batch = stack.step([0, 0, 0], [14, 0, 6], idle=(3,))
    x = stack.weights.embed[ids]
    partition = partition_tokens(batch.query_start_loc, 3, split=split)
    stream = [x[tokens] for tokens in partition.token_indices]
    for layer, block in enumerate(stack.weights.blocks):
        cache = stack.caches[layer]
        due = mla_block(read_only(x), block, cache, batch, SMALL)
        for rows, tokens in zip(stream, partition.token_indices, strict=True):
            rows[tokens < 0] = np.nan
        got = mla_block_over_ranks(frozen(stream), block, [cache] * 3, batch, SMALL, split=split, experts=experts)
        for rows, chosen, tokens in zip(got.outputs, got.topk_indices, partition.token_indices, strict=True):
            real = tokens >= 0
            assert_same(chosen[real], due.topk_indices[tokens[real]], f"choice of layer {layer}")
            assert_double(rows[real], due.output[tokens[real]], f"layer {layer}")
            assert not rows[~real].any()
            assert (chosen[~real] == -1).all()
        x, stream = due.output, [rows.copy() for rows in got.outputs]


def dense(dtype: type) -> StackWorld:
    """Queries that see all before them, so that no choice depends on the dtype."""
    return stack_world_of(np.random.default_rng(6), [11, 5], config=replace(SMALL, index_topk=12), dtype=dtype)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_float32_stays_within_twice_the_plain_error(split: str, experts: str) -> None:
    """Hidden rows and logits, on one device and over ranks, prefill and a step behind it."""
    stack, steps = dense(np.float32), [[9, 5], [2, 0]]
    runs = {"one device": run_stack(stack, steps)}
    for cp_size in (2, 3):
        runs[f"{cp_size} ranks"] = run_stack(stack, steps, stack_over_ranks(stack, Cut(cp_size, split), experts))
    for request, end in enumerate((9, 5)):
        due, low = oracle_stack(stack, request), plain_stack(stack, request)
        for name, got in runs.items():
            assert_within_budget(got.hidden[request], np.array(due.hidden), low[0], f"{name}, hidden {request}")
            exact, plain = np.array(due.logits), low[1]
            rows = [got.logits[0][request], got.logits[1][request]][: 2 - request]
            last = [end - 1, end + 1][: 2 - request]
            assert_within_budget(np.array(rows), exact[last], plain[last], f"{name}, logits {request}")


@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_own_keys_give_the_same_step_and_leave_it_at_that(split: str) -> None:
    """Every layer attends to all keys before it forgets them; each rank's caches then hold its own tokens only."""
    stack = stack_world_of(np.random.default_rng(7), [9, 4])
    due = run_stack(stack, [[9, 4]])
    got = run_stack(stack, [[9, 4]], stack_over_ranks(stack, Cut(3, split, kept_keys="own"), "sliced"))
    for mine, theirs in zip((*got.hidden, *got.logits), (*due.hidden, *due.logits), strict=True):
        assert_double(mine, theirs)
    _, batch = stack.step([0, 0], [9, 4])
    partition = partition_tokens(batch.query_start_loc, 3, split=split)
    for caches, tokens in zip(got.caches, partition.token_indices, strict=True):
        for own, everyones in zip(caches, due.caches, strict=True):
            written = ~np.isnan(own.latent_cache).any(axis=2)
            assert np.count_nonzero(written) == np.count_nonzero(tokens >= 0)
            for part, whole in zip(own, everyones, strict=True):
                assert_double(part[written], whole[written])


def test_what_comes_out_shares_no_memory_with_what_went_in() -> None:
    stack = stack_world_of(np.random.default_rng(8), [7, 2], num_layers=2, inter=INTER)
    ids, batch = stack.step([0, 0], [7, 2])
    before = [part.tobytes() for part in stack.world.cache]
    one = mla_decoder_stack(ids, stack.weights, stack.caches, batch, SMALL)
    for experts in EXPERTS:
        over = mla_stack_over_ranks(ids, stack.weights, [stack.caches] * 2, batch, SMALL, experts=experts)
        assert not np.shares_memory(*over.logits)
        assert not np.shares_memory(*over.hidden)
        for caches in (one.caches, *over.caches):
            for cache in caches:
                for mine, theirs in zip(cache, stack.world.cache, strict=True):
                    assert not np.shares_memory(mine, theirs)
    assert [part.tobytes() for part in stack.world.cache] == before


# --- the way in ---


def next_tokens(ids: np.ndarray, batch: Batch) -> np.ndarray:
    """What each token is to predict: its follower in the request; the last of a request has none."""
    labels, first = np.full(len(ids), -100, np.int32), 0
    for count in batch.query_lens:
        for token in range(first, first + count - 1):
            labels[token] = ids[token + 1]
        first += count
    return read_only(labels)


def inputs_of(step: Step, ids: np.ndarray, labels: np.ndarray) -> list[LocalInputs]:
    """Every rank's part."""
    batch = step.batch
    partition = partition_tokens(batch.query_start_loc, step.cp_size, **step.cut)
    args = (ids, labels, batch.query_start_loc, batch.key_lens, partition)
    return [local_inputs(*args, rank) for rank in range(step.cp_size)]


@given(cuts())
@fewer(4)
def test_token_position_and_label_of_a_local_row_are_of_one_token(every: list[Step]) -> None:
    """Every rule, uneven and empty ranks, prefixes, graph slots, graph padding; no two tokens have the same id."""
    for step in each(every):
        ids = read_only(np.arange(100, 100 + step.batch.num_tokens, dtype=np.int32))
        labels = next_tokens(ids, step.batch)
        owned = splits.owned_tokens(step.batch.query_lens, step.cp_size, step.split, step.num_input_tokens)
        lengths = step.batch.query_lens, step.batch.seq_lens
        for rank, (got, tokens) in enumerate(zip(inputs_of(step, ids, labels), owned, strict=True)):
            positions = [extents.token_place(*lengths, token)[1] for token in tokens]
            due = LocalInputs(
                int32([ids[token] if token >= 0 else 0 for token in tokens]),
                int32([-1 if place is None else place for place in positions]),
                int32([labels[token] if token >= 0 else -100 for token in tokens]),
            )
            assert_same(got, due, f"rank {rank}")


@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_labels_shifted_after_the_cut_are_other_labels(split: str) -> None:
    """The follower of a local row may lie on another rank, or further down: the next local row is another token."""
    batch, ids = Batch([8, 5], [8, 9]), np.arange(100, 113, dtype=np.int32)
    step, wrong_ones = Step(batch, 2, split, None), 0
    for mine in inputs_of(step, ids, next_tokens(ids, batch)):
        predicted = mine.labels != -100
        assert (mine.labels[predicted] == mine.token_ids[predicted] + 1).all()
        shifted_late = np.append(mine.token_ids[1:], np.int32(-100))
        wrong_ones += np.count_nonzero(shifted_late[predicted] != mine.labels[predicted])
    assert wrong_ones >= 1
    if split == "round_robin":
        assert wrong_ones == 11  # all that have a follower


# --- the way out ---


def some_logits(rng: np.random.Generator, num_rows: int, vocab: int, dtype: type) -> np.ndarray:
    """Few numbers, so that highest ones are often equal; NaN and -inf among them, and rows of nothing else."""
    values = np.array([-np.inf, np.nan, -1.0, 0.0, 1.0, 2.0, np.inf], dtype)
    logits = rng.choice(values[: rng.integers(3, 8)], (num_rows, vocab))
    kinds = rng.integers(0, 6, num_rows)
    logits[kinds == 0] = -np.inf
    logits[kinds == 1] = np.nan
    return read_only(logits)


def numpys(logits: np.ndarray) -> np.ndarray:
    """numpy's argmax, NaN below everything."""
    return np.where(np.isnan(logits), -np.inf, logits).argmax(axis=1).astype(np.int32)


@given(cuts(), seeds, st.sampled_from([np.float32, np.float64]))
@fewer(4)
def test_argmax_of_scattered_rows_is_that_of_all_rows(every: list[Step], seed: int, dtype: type) -> None:
    """On every rank, for every rule; what pad rows hold is not looked at, requests without new tokens have none."""
    rng = np.random.default_rng(seed)
    for step in each(every):
        loc = step.batch.query_start_loc
        logits = some_logits(rng, step.batch.num_tokens, 5, dtype)
        partition = partition_tokens(loc, step.cp_size, **step.cut)
        shards = [local_rows(logits, partition, rank) for rank in range(step.cp_size)]
        for shard, tokens in zip(shards, partition.token_indices, strict=True):
            shard[tokens < 0] = np.inf
        everywhere = numpys(logits)
        due = [everywhere[loc[i + 1] - 1] if new else -1 for i, new in enumerate(step.batch.query_lens)]
        assert_same(rows_argmax(frozen(shards), partition, loc), [int32(due)] * step.cp_size)
        slow = [oracle.first_highest(row) for row in logits.tolist()]
        assert everywhere.tolist() == slow


@given(seeds, st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 5), st.booleans())
def test_argmax_of_a_split_vocabulary_is_that_of_all_of_it(
    seed: int, widths: list[int], num_rows: int, double: bool
) -> None:
    """Shares of unequal width; of equal logits on several ranks the lowest token wins."""
    dtype = np.float64 if double else np.float32
    logits = some_logits(np.random.default_rng(seed), num_rows, sum(widths), dtype)
    shares = np.split(logits, np.cumsum(widths)[:-1], axis=1)
    due = int32([oracle.first_highest(row) for row in logits.tolist()])
    assert_same(due, numpys(logits))
    assert_same(vocab_argmax(shares), [due] * len(widths))


def test_argmax_at_its_corners() -> None:
    """Ties inside a share, between shares, -0 and 0; rows of -inf and of NaN alone choose token 0."""
    nan, inf = math.nan, math.inf
    rows = [
        ([1, 3, 3, 3], 1),
        ([-inf, -inf, -inf, -inf], 0),
        ([nan, nan, nan, nan], 0),
        ([nan, -inf, nan, -inf], 0),
        ([nan, nan, nan, -5], 3),
        ([-0.0, 0.0, nan, -0.0], 0),
        ([nan, inf, 9, inf], 1),
    ]
    logits, due = np.array([row for row, _ in rows], np.float64), int32([token for _, token in rows])
    for widths in ([4], [1, 3], [2, 2], [3, 1], [1, 1, 1, 1]):
        for found in vocab_argmax(np.split(logits, np.cumsum(widths)[:-1], axis=1)):
            assert_same(found, due)
    loc = np.arange(len(rows) + 1, dtype=np.int32)
    partition = partition_tokens(loc, 3, split="round_robin")
    shards = [local_rows(logits, partition, rank) for rank in range(3)]
    assert_same(rows_argmax(shards, partition, loc), [due] * 3)


@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_argmax_where_rows_lie_is_that_of_the_stacks_logits(split: str) -> None:
    """Each rank's own hidden rows through the head, or all last rows through each rank's share of the head."""
    stack = stack_world_of(np.random.default_rng(9), [9, 0, 5])
    ids, batch = stack.step([0, 0, 0], [9, 0, 5])
    head = stack.weights.head
    due = mla_decoder_stack(ids, stack.weights, stack.caches, batch, SMALL).logits.argmax(axis=1).astype(np.int32)
    out = mla_stack_over_ranks(ids, stack.weights, [stack.caches] * 3, batch, SMALL, split=split)
    partition = partition_tokens(batch.query_start_loc, 3, split=split)
    by_rows = rows_argmax([rows @ head.T for rows in out.hidden], partition, batch.query_start_loc)
    assert_same(by_rows, [int32([due[0], -1, due[2]])] * 3)
    by_vocab = vocab_argmax(np.split(out.logits[0], [2, 7], axis=1))
    assert_same(by_vocab, [due] * 3)
