"""Blocks over ranks are blocks on one device, scattered from the first row to the last; and the last rows are found."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from dsacp_ref.block import (
    ExpertWeights,
    decoder_block,
    expert_output,
    expert_share,
    experts_over_ranks,
    gathered_last_rows,
    last_rows,
)
from dsacp_ref.compressor import rms_norm
from dsacp_ref.exchange import gathered_in_order
from dsacp_ref.partition import local_rows, partition_tokens
from tests.block_strategies import (
    LIMITS,
    Shards,
    Stack,
    expert_of,
    one_device_step,
    oracle_blocks,
    stack_of,
    stacks_over_ranks,
    step_over_ranks,
)
from tests.compare import assert_double, assert_same, assert_within_budget
from tests.layer_checks import assert_same_cache
from tests.layer_strategies import CSA, HCA, KINDS, SMALL, WINDOW, Cut, Kind, chunkings, frozen
from tests.maths_strategies import int32, normal, seeds
from tests.oracles import block as oracle
from tests.oracles import splits
from tests.strategies import Step, cuts, each, fewer, read_only, steps, token_rows

EXPERTS = ("whole", "split", "sliced")

# --- experts ---


@given(seeds, st.integers(0, 5), st.integers(0, 7), st.integers(1, 6), st.sampled_from(LIMITS))
def test_an_expert_is_the_oracle(seed: int, num_rows: int, inter: int, hidden: int, limit: float | None) -> None:
    rng = np.random.default_rng(seed)
    weights, x = expert_of(rng, inter, hidden, limit=limit), normal(rng, num_rows, hidden, scale=3.0)
    due = [oracle.expert(row, *weights) for row in x.tolist()]
    assert_double(expert_output(x, weights), np.array(due).reshape(num_rows, hidden))


@given(seeds, st.integers(1, 5), st.sampled_from(LIMITS))
def test_float32_stays_within_twice_the_plain_error(seed: int, num_rows: int, limit: float | None) -> None:
    rng = np.random.default_rng(seed)
    weights, x = expert_of(rng, 7, 6, np.float32, limit), normal(rng, num_rows, 6, dtype=np.float32)
    gate, up = x @ weights.w1.T, x @ weights.w3.T
    if limit is not None:
        gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    plain = (gate / (1 + np.exp(-gate)) * up) @ weights.w2.T
    due = [oracle.expert(row, *weights) for row in x.tolist()]
    assert_within_budget(expert_output(x, weights), np.array(due), plain)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gates_far_from_zero_neither_overflow_nor_turn_to_nan(dtype: type) -> None:
    ones = ExpertWeights(*(np.ones((1, 1), dtype) for _ in range(3)))
    x = read_only(np.array([[-1e4], [-800.0], [800.0], [1e4]], dtype))
    assert_same(expert_output(x, ones), np.array([[0], [0], [640000.0], [1e8]], dtype))


@pytest.mark.parametrize("limit", [0.5, 10.0])
def test_an_expert_is_transformers_shared_expert(limit: float) -> None:
    torch = pytest.importorskip("torch", reason="torch is missing: pip install 'dsacp[dev]'")
    theirs = pytest.importorskip(
        "transformers.models.deepseek_v4.modeling_deepseek_v4",
        reason="transformers with deepseek_v4 is missing: pip install 'dsacp[dev]'",
    )
    from transformers.models.deepseek_v4 import DeepseekV4Config

    rng = np.random.default_rng(0)
    weights, x = expert_of(rng, 6, 5, limit=limit), normal(rng, 9, 5, scale=8.0)
    sizes = {"hidden_size": 5, "intermediate_size": 6, "moe_intermediate_size": 6, "swiglu_limit": limit}
    mlp = theirs.DeepseekV4MLP(DeepseekV4Config(**sizes)).double()
    with torch.no_grad():
        for part, name in ((mlp.gate_proj, "w1"), (mlp.up_proj, "w3"), (mlp.down_proj, "w2")):
            part.weight.copy_(torch.tensor(getattr(weights, name)))
        due = mlp(torch.tensor(x)).numpy()
    assert (x @ weights.w1.T > limit).any(), "the limit must be met"
    assert_double(expert_output(x, weights), due)


@given(seeds, st.integers(1, 8), st.integers(0, 3), st.sampled_from(LIMITS))
def test_the_shares_of_an_expert_add_up_to_it(seed: int, cp_size: int, per_rank: int, limit: float | None) -> None:
    """And cut it up: no channel twice, none left out."""
    rng = np.random.default_rng(seed)
    weights, x = expert_of(rng, cp_size * per_rank, 4, limit=limit), normal(rng, 3, 4)
    shares = [expert_share(weights, rank, cp_size) for rank in range(cp_size)]
    for name, axis in (("w1", 0), ("w3", 0), ("w2", 1)):
        assert_same(np.concatenate([getattr(share, name) for share in shares], axis), getattr(weights, name))
    assert {share.swiglu_limit for share in shares} == {limit}
    assert_double(sum(expert_output(x, share) for share in shares), expert_output(x, weights))


@given(cuts(), seeds, st.sampled_from(LIMITS))
@fewer(4)
def test_experts_over_ranks_are_the_oracle_for_every_split(
    every_split: list[Step], seed: int, limit: float | None
) -> None:
    """Uneven and empty ranks; what pad rows hold goes nowhere, and they come back zero."""
    rng = np.random.default_rng(seed)
    for step in each(every_split):
        weights = expert_of(rng, 2 * step.cp_size, 3, limit=limit)
        x = normal(rng, step.batch.num_tokens, 3)
        due = np.array([oracle.expert(row, *weights) for row in x.tolist()]).reshape(x.shape)
        partition = partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)
        shards = [local_rows(x, partition, rank) for rank in range(step.cp_size)]
        for shard, tokens in zip(shards, partition.token_indices, strict=True):
            shard[tokens < 0] = np.nan
        found = {mode: experts_over_ranks(frozen(shards), weights, partition, experts=mode) for mode in EXPERTS}
        assert_same(found["sliced"], found["split"])  # the same sum, of which a rank keeps the same rows
        for experts, got in found.items():
            for rank, rows in enumerate(got):
                assert_double(rows, local_rows(due, partition, rank), f"{experts}, rank {rank}")
                assert not rows[partition.token_indices[rank] < 0].any()


# --- the block ---


@given(steps(), seeds)
def test_norm_and_residual_of_own_rows_are_own_rows_of_the_whole(step: Step, seed: int) -> None:
    """To the bit: this is why nothing travels between layers."""
    rng = np.random.default_rng(seed)
    x, y = (normal(rng, step.batch.num_tokens, 5) for _ in range(2))
    gain = normal(rng, 5)
    whole = rms_norm(x + y, gain, 1e-6)
    partition = partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)
    for rank in range(step.cp_size):
        own = local_rows(x, partition, rank) + local_rows(y, partition, rank)
        assert_same(rms_norm(own, gain, 1e-6), local_rows(whole, partition, rank))


@pytest.mark.parametrize("kinds", [(WINDOW, CSA), (CSA, HCA)], ids=str)
@given(seed=seeds, new=chunkings(4), limit=st.sampled_from(LIMITS))
@fewer(5)
def test_a_stack_is_the_oracle_however_it_is_cut(
    kinds: tuple[Kind, ...], seed: int, new: list[list[int]], limit: float | None
) -> None:
    stack = stack_of(np.random.default_rng(seed), [sum(part) for part in zip(*new, strict=True)], kinds, limit=limit)
    world, done, caches = stack.worlds[0], [0] * len(new[0]), stack.caches
    outputs: list[list[np.ndarray]] = [[] for _ in done]
    for counts in new:
        ends = [a + b for a, b in zip(done, counts, strict=True)]
        x, _, caches = one_device_step(stack, done, ends, caches)
        for request, stop in enumerate(accumulate(counts)):
            outputs[request].append(x[stop - counts[request] : stop])
        done = ends
    for request, parts in enumerate(outputs):
        if world.lengths[request]:
            due = np.array(oracle.stack(world.x[request], oracle_blocks(stack)))
            error = np.abs(np.concatenate(parts) - due).max()
            assert error <= 1e-11 * np.abs(due).max(), f"request {request}: {error}"


def assert_ranks_equal(stack: Stack, new: list[list[int]], cut: Cut, idle: list[int]) -> None:
    """Every step of the stack over ranks against one device: rows, selections, every layer's caches, last rows."""
    done, caches = [0] * len(new[0]), stack.caches
    over: list[list] = [[cache] * cut.cp_size for cache in caches]
    for counts in new:
        ends = [a + b for a, b in zip(done, counts, strict=True)]
        due, due_topk, caches = one_device_step(stack, done, ends, caches, idle)
        got = step_over_ranks(stack, done, ends, over, cut, idle)
        over, done = got.caches, ends
        assert_rows(got, due, cut)
        for layer, chosen in enumerate(due_topk):
            for tokens, mine in zip(got.partition.token_indices, got.topk[layer], strict=True):
                assert_same(mine[tokens >= 0], chosen[tokens[tokens >= 0]], f"layer {layer}")
        if cut.rows == "scattered":
            loc = int32(np.cumsum([0, *counts, *idle]))
            last = np.zeros((len(loc) - 1, due.shape[1]))
            for request, count in enumerate([*counts, *idle]):
                if count:
                    last[request] = due[loc[request + 1] - 1]
            for rank, rows in enumerate(gathered_last_rows(got.outputs, got.partition, loc)):
                assert_double(rows, last, f"last rows on rank {rank}")
    for layer, world in enumerate(stack.worlds):
        for rank, cache in enumerate(over[layer]):
            assert_same_cache(world, cut, cache, caches[layer], f"layer {layer} rank {rank}")


def assert_rows(got: Shards, due: np.ndarray, cut: Cut) -> None:
    """Each rank's residual stream, zero where nobody is."""
    for rank, (tokens, rows) in enumerate(zip(got.partition.token_indices, got.outputs, strict=True)):
        if cut.rows == "full":
            assert_double(rows[: len(due)], due, f"rank {rank}")
            assert_same(rows, got.outputs[0])
            assert not rows[len(due) :].any()
        else:
            assert_double(rows, local_rows(due, got.partition, rank), f"rank {rank}")
            assert not rows[tokens < 0].any()


@fewer(3)
@given(stacks_over_ranks(), st.lists(st.integers(1, 4), max_size=2), st.sampled_from(["split", "sliced"]))
def test_a_stack_over_ranks_equals_one_device(
    cases: list[tuple[Stack, list[list[int]], Cut]], idle: list[int], shared: str
) -> None:
    """Norm, attention, residual, norm, experts, residual, twice: what one block gives, the next one takes."""
    for stack, new, cut in cases:
        if stack.experts == "split":
            stack = stack._replace(experts=shared)
        note(f"{cut!r} experts {stack.experts}")
        assert_ranks_equal(stack, new, cut, idle)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("rows", ["full", "scattered"])
@pytest.mark.parametrize("lengths", [[], [0], [1], [3, 0]], ids=str)
def test_fewer_tokens_than_ranks(experts: str, rows: str, lengths: list[int]) -> None:
    """Ranks without rows take part, in a stack of all three kinds."""
    stack = stack_of(np.random.default_rng(0), lengths, KINDS, inter=8, experts=experts)
    key_mode = {"full": "replicate", "scattered": "gather_hidden"}[rows]
    cut = Cut(8, "contiguous", rows, key_mode, "replicated_weight")
    assert_ranks_equal(stack, [lengths], cut, [])


def test_rows_of_nobody_come_out_zero_on_one_device() -> None:
    """Padded graph slots and rows behind them hold NaN."""
    stack = stack_of(np.random.default_rng(1), [5], [CSA])
    world = stack.worlds[0]
    x, batch = world.step([0], [5], idle=[2], beyond=1)
    bare = decoder_block(x[:5], stack.weights[0], world.cache, world.step([0], [5])[1], SMALL, compress_ratio=4)
    out = decoder_block(x, stack.weights[0], world.cache, batch, SMALL, compress_ratio=4)
    assert_double(out.output[:5], bare.output)
    assert not out.output[5:].any()


def test_what_comes_out_shares_no_memory_with_what_went_in() -> None:
    stack = stack_of(np.random.default_rng(2), [5], [WINDOW])
    world = stack.worlds[0]
    x, batch = world.step([0], [5])
    out = decoder_block(x, stack.weights[0], world.cache, batch, SMALL, compress_ratio=1)
    assert not np.shares_memory(out.output, x)
    partition = partition_tokens(int32([0, 5]), 1)
    for experts in EXPERTS:
        (rows,) = experts_over_ranks([x], stack.weights[0].experts, partition, experts=experts)
        assert not np.shares_memory(rows, x)
    ranks = partition_tokens(int32([0, 5]), 2)
    shards = [local_rows(x, ranks, rank) for rank in range(2)]
    first, second = gathered_last_rows(shards, ranks, int32([0, 5]))
    assert not np.shares_memory(first, second)
    assert not any(np.shares_memory(rows, shard) for rows in (first, second) for shard in shards)
    assert not any(
        np.shares_memory(own.rows, shard) for own in last_rows(shards, ranks, int32([0, 5])) for shard in shards
    )


# --- the end of the model ---


@given(cuts(), st.data())
@fewer(4)
def test_the_last_rows_are_where_the_oracle_finds_them(every_split: list[Step], data: st.DataObject) -> None:
    """For every split, uneven and empty ranks, requests without new tokens, padded graph slots, graph padding."""
    rows = data.draw(token_rows(every_split[0].batch.num_tokens))
    for step in each(every_split):
        loc = step.batch.query_start_loc
        partition = partition_tokens(loc, step.cp_size, **step.cut)
        owned = splits.owned_tokens(step.batch.query_lens, step.cp_size, step.split, step.num_input_tokens)
        shards = [local_rows(rows, partition, rank) for rank in range(step.cp_size)]
        found = last_rows(frozen(shards), partition, loc)
        for rank, places in enumerate(oracle.last_rows(step.batch.query_lens, owned)):
            assert_same(found[rank].request_indices, int32([request for request, _ in places]), f"rank {rank}")
            due = np.array([shards[rank][row] for _, row in places], rows.dtype)
            assert_same(found[rank].rows, due.reshape(len(places), *rows.shape[1:]), f"rank {rank}")


@given(cuts(), st.data())
@fewer(4)
def test_every_rank_gets_the_last_row_of_every_request(every_split: list[Step], data: st.DataObject) -> None:
    """The same as the last rows of the whole stream, gathered in order."""
    rows = data.draw(token_rows(every_split[0].batch.num_tokens))
    for step in each(every_split):
        loc = step.batch.query_start_loc
        partition = partition_tokens(loc, step.cp_size, **step.cut)
        shards = frozen([local_rows(rows, partition, rank) for rank in range(step.cp_size)])
        whole = gathered_in_order(shards, partition)[0]
        due = np.zeros((len(step.batch.query_lens), *rows.shape[1:]), rows.dtype)
        for request, query_len in enumerate(step.batch.query_lens):
            if query_len:
                due[request] = whole[loc[request + 1] - 1]
        assert_same(gathered_last_rows(shards, partition, loc), [due] * step.cp_size)
