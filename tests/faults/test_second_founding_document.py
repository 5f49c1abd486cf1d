"""Every change that the second founding document lists, a test a row: what it says, and what is defined here.

The document describes SGLang's two prefill modes for DeepSeek-V3.2, in-seq-split and round-robin-split. Where the code
that it describes does otherwise, the definition here follows the code, and the test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsacp_ref import block as block_module
from dsacp_ref import mla_layer as layer_module
from dsacp_ref import mla_stack as stack_module
from dsacp_ref.block import expert_output, expert_share, experts_over_ranks
from dsacp_ref.compressor import rms_norm
from dsacp_ref.config import ParallelConfig, split_rule, topology
from dsacp_ref.exchange import all_gather, all_reduce, gathered_in_order
from dsacp_ref.extents import local_extents, query_positions, token_positions, token_requests
from dsacp_ref.indexer import index_scores, lightning_indexer, selected_entries
from dsacp_ref.mla import key_ranges, packed_topk, paged_topk
from dsacp_ref.mla_layer import MLARanksOutput, mla_attention_layer, mla_over_ranks, table_of, token_keys
from dsacp_ref.mla_stack import local_inputs, mla_decoder_stack, mla_stack_over_ranks, rows_argmax, vocab_argmax
from dsacp_ref.paging import flat_cache
from dsacp_ref.partition import (
    local_rows,
    local_token_indices,
    partition_tokens,
    rank_pieces,
    restored_rows,
    round_robin_lengths,
)
from dsacp_ref.prefill import may_add_request, step_split
from dsacp_ref.spec import UnsupportedError
from tests.block_strategies import expert_of
from tests.compare import assert_double, assert_same
from tests.maths_strategies import int32, normal
from tests.mla_strategies import SMALL, Cut, World, over_ranks, run, stack_world_of, world_of

IN_SEQ = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="in-seq-split", dsa_cp_profile="in_seq_split")
ROUND_ROBIN = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="round-robin-split")
MODES = ("in-seq-split", "round-robin-split")
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
EIGHT = partition_tokens(int32([0, 8]), 4, split="round_robin")  # the document's example: T0 .. T7 on four ranks


# --- A: options -------------------------------------------------------------------------------------------------------


def test_a_the_mode_is_one_of_two_words() -> None:
    """Says: a new option takes in-seq-split, which was the default, or round-robin-split.

    Here these are other names of two of the split rules, and the default is that of the first founding document.
    """
    assert [str(split_rule(mode)) for mode in MODES] == ["zigzag", "round_robin"]
    assert (IN_SEQ.prefill_cp_mode, ROUND_ROBIN.prefill_cp_mode) == ("zigzag", "round_robin")
    assert ParallelConfig().prefill_cp_mode == "contiguous"


def test_a_only_round_robin_is_free_of_forced_settings() -> None:
    """Says: unless the mode is round-robin-split, dense TP becomes 1, DeepEP is used, the cache is bf16, the batch 1.

    Here a profile forces them, and nothing silently: an engine that asks for other settings is refused. Which library
    moves rows to experts is the engine's.
    """
    assert IN_SEQ.forced_settings() == {
        "max_running_requests": 1,
        "kv_cache_dtype": "bfloat16",
        "moe_dense_tp_size": 1,
    }
    assert ROUND_ROBIN.forced_settings() == {}
    assert replace(IN_SEQ, dsa_cp_profile="none").forced_settings() == {}
    with pytest.raises(UnsupportedError, match="max_running_requests must be 1"):
        IN_SEQ.check_settings({"max_running_requests": 32})


def test_a_round_robin_takes_a_cache_in_fp8() -> None:
    """Says: the new mode lifts the ban on an FP8 KV cache.

    Here both modes take one: a key has the same codes on whichever rank it is made.
    """
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is missing: pip install 'dsacp[dev]'")
    world = world_of(np.random.default_rng(0), [9, 6], config=replace(SMALL, kv_lora_rank=128), fp8=True)
    due = run(world, [[9, 6]])
    for mode in MODES:
        got = run(world, [[9, 6]], over_ranks(world, Cut(2, mode)))
        assert_same(got.topk, due.topk)
        assert_same([cache.latent_cache for cache in got.cache], [due.cache.latent_cache] * 2)


# --- B: the split -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 10])
def test_b_token_t_goes_to_rank_t_modulo_the_ranks(num_tokens: int) -> None:
    """Says: a rank takes the rows arange(cp_rank, tokens, cp_size).

    Here the same, and a pad row where that gives one rank fewer rows than another.
    """
    for rank in range(4):
        rows = local_token_indices(int32([0, num_tokens]), 4, rank, split="round_robin")
        assert rows[rows >= 0].tolist() == np.arange(rank, num_tokens, 4).tolist()
        assert len(rows) == -(-num_tokens // 4)


def test_b_a_kernel_finds_the_lengths_and_requests_of_a_scattered_batch() -> None:
    """Says: a Triton kernel computes the shorter lengths, the batch indices and cu_seqlens of each GPU.

    Lengths 5, 2 and 3 on four ranks: rank 0 has two tokens of the first request, none of the second, one of the third.
    An operator row here is a single token, because local rows are not consecutive.
    """
    loc = int32([0, 5, 7, 10])
    lengths = round_robin_lengths(loc, 4, 0)
    assert (lengths.request_indices.tolist(), lengths.query_lens.tolist()) == ([0, 2], [2, 1])
    extents = local_extents(loc, int32([5, 2, 3]), 4, 0, split="round_robin")
    assert extents.request_indices.tolist() == np.repeat(lengths.request_indices, lengths.query_lens).tolist()
    assert extents.cu_seqlens_q.tolist() == [0, 1, 2, 3]
    assert extents.seqused_kv.tolist() == [1, 5, 2]  # tokens 0, 4 and 8: each sees up to itself


# --- C: attention -----------------------------------------------------------------------------------------------------


def indexed() -> tuple[World, np.ndarray, np.ndarray, np.ndarray]:
    """A layer after a step of 5 and 3 tokens behind prefixes of 0 and 6; index queries, their weights, all keys."""
    world = world_of(np.random.default_rng(1), [5, 9])
    cache = run(world, [[0, 6], [5, 3]]).cache
    rng = np.random.default_rng(2)
    q = normal(rng, 8, SMALL.index_n_heads, SMALL.index_head_dim)
    keys = [
        flat_cache(cache.index_cache)[[world.table[request][p // 4] * 4 + p % 4 for p in range(length)]]
        for request, length in enumerate(world.lengths)
    ]
    return world._replace(cache=cache), q, normal(rng, 8, SMALL.index_n_heads), np.concatenate(keys)


@pytest.mark.parametrize("cp_rank", range(4))
def test_c_every_scattered_row_has_its_own_range_of_keys(cp_rank: int) -> None:
    """Says: get_indexer_kvcache_range is adapted to the indices of round robin.

    Scores over each row's range of all keys, laid end to end, choose what the indexer chooses from pages.
    """
    world, q, weights, keys = indexed()
    loc, lens = int32([0, 5, 8]), int32([5, 9])
    tokens = local_token_indices(loc, 4, cp_rank, split="round_robin")
    ranges = key_ranges(tokens, loc, lens)
    scores, found = index_scores(q[tokens], weights[tokens], keys), []
    for row, (start, end) in enumerate(zip(*ranges, strict=True)):
        found.append(selected_entries(scores[row : row + 1, start:end], int32([end - start]), SMALL.index_topk)[0])
    extents = local_extents(loc, lens, 4, cp_rank, split="round_robin")
    table = world.table[extents.request_indices]
    due = lightning_indexer(
        q[tokens],
        weights[tokens],
        world.cache.index_cache,
        table,
        extents.cu_seqlens_q,
        extents.seqused_kv,
        compress_ratio=1,
        index_topk=SMALL.index_topk,
    )
    assert_same(np.stack(found), due)


def test_c_picks_become_rows_of_packed_keys_or_slots_of_pages() -> None:
    """Says: topk_transform is adapted to the indices of round robin.

    A pick is a token of its request; both transforms lead to that token's key, whichever rank the query is on.
    """
    world, _, _, keys = indexed()
    loc, lens = int32([0, 5, 8]), int32([5, 9])
    for rank in range(4):
        tokens = local_token_indices(loc, 4, rank, split="round_robin")
        ranges, requests = key_ranges(tokens, loc, lens), token_requests(tokens, loc)
        picks = int32([[0, end - start - 1, -1] for start, end in zip(*ranges, strict=True)])
        packed = packed_topk(picks, ranges.starts)
        paged = paged_topk(picks, requests, world.table, 4)
        assert_same(paged < 0, picks < 0)
        assert_same(packed < 0, picks < 0)
        assert_same(flat_cache(world.cache.index_cache)[paged[picks >= 0]], keys[packed[picks >= 0]])
        assert packed[:, 1].tolist() == (ranges.ends - 1).tolist()


def test_c_keys_are_gathered_and_rearranged_before_attention() -> None:
    """Says: rows are scattered before attention; keys and values are then collected by cp_all_gather_rerange_output.

    Here for both modes alike: what was gathered rank by rank comes back in token order.
    """
    rows = normal(np.random.default_rng(3), 13, 2)
    for mode in MODES:
        partition = partition_tokens(int32([0, 8, 13]), 4, split=mode)
        shards = [local_rows(rows, partition, rank) for rank in range(4)]
        assert_same(gathered_in_order(shards, partition), [rows] * 4)


def test_c_rearranging_a_round_robin_is_a_transpose() -> None:
    """Says: gather and rearrangement are optimised for round robin.

    The permutation of the definition is a transpose of ranks and turns; that of zigzag swaps blocks in the order
    0, 2, .., 2R - 2, 2R - 1, .., 3, 1 of the gathered ones.
    """
    gathered = np.concatenate(EIGHT.token_indices)
    assert_same(restored_rows(gathered, EIGHT), gathered.reshape(4, -1).T.ravel())
    zigzag = partition_tokens(int32([0, 16]), 4, split="zigzag")
    blocks = np.split(np.concatenate(zigzag.token_indices), 8)
    due = np.concatenate([blocks[i] for i in (0, 2, 4, 6, 7, 5, 3, 1)])
    assert_same(restored_rows(np.concatenate(zigzag.token_indices), zigzag), due)


# --- D: the scheduler -------------------------------------------------------------------------------------------------


def test_d_only_the_old_mode_stops_at_one_request() -> None:
    """Says: the gate on one running request now holds for in-seq-split alone.

    Here for its profile alone; more in tests/test_prefill.py.
    """
    assert [may_add_request(count, IN_SEQ) for count in (0, 1)] == [True, False]
    assert all(may_add_request(count, ROUND_ROBIN) for count in range(32))


# --- E: communication -------------------------------------------------------------------------------------------------


def test_e_scattered_and_full_rows_convert_differently_in_the_two_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says: conversion between scattered and full tensors differs between the modes.

    As the code has it: both gather before the experts; after them in-seq-split reduces and scatters in one, round robin
    reduces everywhere and takes a slice. Here either way goes with either split, to the same bits.
    """
    rng = np.random.default_rng(4)
    weights, x = expert_of(rng, 8, 4), normal(rng, 9, 4)
    for mode in MODES:
        partition = partition_tokens(int32([0, 9]), 4, split=mode)
        shards = [local_rows(x, partition, rank) for rank in range(4)]
        for experts, due in (("whole", []), ("split", ["reduce_scatter"]), ("sliced", ["all_reduce"])):
            made: list[str] = []
            with monkeypatch.context() as patch:
                noting(patch, block_module, COLLECTIVES, made)
                experts_over_ranks(shards, weights, partition, experts=experts)
            assert made == (["all_gather", *due] if due else [])
        split, sliced = (experts_over_ranks(shards, weights, partition, experts=way) for way in ("split", "sliced"))
        assert_same(sliced, split)
        for rank, rows in enumerate(sliced):
            assert_double(rows, local_rows(expert_output(x, weights), partition, rank))


def noting(monkeypatch: pytest.MonkeyPatch, module: object, names: tuple[str, ...], made: list[str]) -> None:
    """From here on, the module's functions of these names say that they were called."""
    for name in names:
        monkeypatch.setattr(module, name, noted(name, getattr(module, name), made))


def noted(name: str, right: Callable[..., Any], made: list[str]) -> Callable[..., Any]:
    """The function, which says that it was called."""

    def function(*args: Any, **options: Any) -> Any:
        made.append(name)
        return right(*args, **options)

    return function


def test_e_norm_and_residual_run_on_scattered_rows() -> None:
    """Says: in scattered mode layer norm and residual run where the rows are, which saves communication.

    To the bit what all rows would give; a rank without rows has nothing to add and nothing to norm.
    """
    rng = np.random.default_rng(5)
    x, y, gain = normal(rng, 3, 4), normal(rng, 3, 4), normal(rng, 4)
    whole = rms_norm(x + y, gain, 1e-6)
    for mode in MODES:
        partition = partition_tokens(int32([0, 3]), 4, split=mode)
        assert min((tokens >= 0).sum() for tokens in partition.token_indices) == 0
        for rank in range(4):
            own = local_rows(x, partition, rank) + local_rows(y, partition, rank)
            assert_same(rms_norm(own, gain, 1e-6), local_rows(whole, partition, rank))


# --- F: the model -----------------------------------------------------------------------------------------------------


def test_f_the_mode_of_a_step_is_asked_for_not_wired_in() -> None:
    """Says: fixed checks become nsa_use_prefill_cp(forward_batch), so that the model sees the mode of each step.

    Here one function decides from lengths that every rank has; decode and short steps run whole.
    """
    assert step_split([8], [0], 4, IN_SEQ) == "zigzag"
    assert step_split([2, 2], [0, 0], 4, ROUND_ROBIN) == "round_robin"
    assert [step_split([1, 1], [5, 9], 2, parallel) for parallel in (IN_SEQ, ROUND_ROBIN)] == [None, None]


def test_f_rows_are_split_at_the_input_and_gathered_in_experts_and_at_the_output() -> None:
    """Says: input layer, MoE layer and output layer call cp_split_and_rebuild_data or cp_all_gather_rerange_output.

    Here token ids are cut once; between layers nothing else is gathered than keys and, where ranks share them, rows of
    experts; of the last layer only each request's last row.
    """
    stack = stack_world_of(np.random.default_rng(6), [9, 4])
    ids, batch = stack.step([0, 0], [9, 4])
    due = mla_decoder_stack(ids, stack.weights, stack.caches, batch, SMALL)
    for mode in MODES:
        partition = partition_tokens(batch.query_start_loc, 4, split=mode)
        for experts in ("whole", "split", "sliced"):
            caches = [stack.caches] * 4
            got = mla_stack_over_ranks(ids, stack.weights, caches, batch, SMALL, split=mode, experts=experts)
            for rank in range(4):
                assert_double(got.hidden[rank], local_rows(due.hidden, partition, rank))
                assert_double(got.logits[rank], due.logits)


# --- how it is turned on ----------------------------------------------------------------------------------------------


def test_the_launch_line_is_understood() -> None:
    """Says: --tp 8, the switch for prefill context parallelism, the mode, and 32 running requests.

    Here by our names for the switch and the mode; the engine keeps its other words.
    """
    words = "--tp 8 --dp 1 --enable-dsa-cp --prefill-cp-mode round-robin-split --max-running-requests 32".split()
    parallel, rest = ParallelConfig.from_flags(words)
    assert (parallel.asks_for_cp, parallel.prefill_cp_mode) == (True, "round_robin")
    assert rest == "--tp 8 --dp 1 --max-running-requests 32".split()
    assert topology(8, rank=0, enable_dsa_cp=parallel.enable_dsa_cp).cp_size == 8


# --- 4, first part: the old mode and its one request ------------------------------------------------------------------


def test_in_seq_split_is_a_zigzag_and_not_plain_slices() -> None:
    """Says: of 8000 tokens on 8 ranks, rank 0 has 0 to 999, rank 1 has 1000 to 1999, and so on.

    The code has 2R blocks, of which a rank takes one from each end; the slices are the rule `contiguous` here.
    """
    loc = int32([0, 8000])
    for rank in range(8):
        slices = rank_pieces(loc, 8, rank, split="contiguous")
        assert (slices.piece_starts.tolist(), slices.piece_ends.tolist()) == ([1000 * rank], [1000 * rank + 1000])
        blocks = rank_pieces(loc, 8, rank, split="in-seq-split")
        assert blocks.piece_starts.tolist() == [500 * rank, 7500 - 500 * rank]
        assert (blocks.piece_ends - blocks.piece_starts).tolist() == [500, 500]


def seen_keys(query_lens: list[int], cp_size: int, split: str) -> list[int]:
    """How many keys the queries of each rank see together."""
    loc, lens = int32(np.cumsum([0, *query_lens])), int32(query_lens)
    work = []
    for rank in range(cp_size):
        positions = token_positions(local_token_indices(loc, cp_size, rank, split=split), loc, lens)
        work.append(int((positions.astype(np.int64) + 1).sum()))
    return work


def test_several_requests_are_no_uneven_load() -> None:
    """Says: with 8000, 800 and 5 tokens the split is uneven; of a request of 5 tokens only rank 0 has any.

    So it is for plain slices of each request: the last rank's queries see 15 times the keys of the first's. In zigzag
    and round robin no rank sees 1% more than another, and of 5 tokens five ranks have one each.
    """
    lengths = [8000, 800, 5]
    slices = seen_keys(lengths, 8, "contiguous_request")
    assert max(slices) > 14.9 * min(slices)
    for mode in MODES:
        work = seen_keys(lengths, 8, mode)
        assert max(work) < 1.01 * min(work)
    fifth = [local_token_indices(int32([0, 5]), 8, rank, split="in-seq-split").tolist() for rank in range(8)]
    assert fifth == [[0], [1], [2], [3], [4], [], [], []]


def test_several_requests_need_no_other_bookkeeping_than_one() -> None:
    """Says: with several requests one would have to know which request and position each local token of a rank has.

    That is what `token_requests`, `token_positions` and `local_extents` say, for every split alike; zigzag has two
    operator rows a request, round robin one a token.
    """
    loc, lens = int32([0, 5, 8]), int32([5, 9])
    for mode, rows in (("in-seq-split", 4), ("round-robin-split", 4)):
        tokens = local_token_indices(loc, 2, 1, split=mode)
        extents = local_extents(loc, lens, 2, 1, split=mode)
        assert len(extents.seqused_kv) == rows
        at = query_positions(extents.cu_seqlens_q, extents.seqused_kv, num_rows=len(tokens))
        assert_same(at, token_positions(tokens, loc, lens))
        owners = np.repeat(extents.request_indices, np.diff(extents.cu_seqlens_q))
        assert_same(owners, token_requests(tokens, loc))


# --- 4, second part: experts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_no_way_of_running_experts_belongs_to_one_mode(mode: str) -> None:
    """Says: the old mode depends on DeepEP; round robin suits fused MoE, whose weights are cut by TP.

    Here experts with all weights run on own rows, and shared ones on gathered rows, in either mode with one result.
    """
    rng = np.random.default_rng(7)
    weights, x = expert_of(rng, 8, 4), normal(rng, 11, 4)
    partition = partition_tokens(int32([0, 7, 11]), 4, split=mode)
    shards = [local_rows(x, partition, rank) for rank in range(4)]
    for experts in ("whole", "split", "sliced"):
        found = experts_over_ranks(shards, weights, partition, experts=experts)
        assert_double(gathered_in_order(found, partition)[0], expert_output(x, weights))


# --- 4, third part: the flow of a step --------------------------------------------------------------------------------


def test_flow_1_the_input_is_scattered_token_by_token() -> None:
    """Says: before the first layer rank 0 gets T0 and T4, rank 1 T1 and T5; ranks differ by one token at most.

    Positions and labels go the same way, and labels are shifted before: T5 is on another rank than T4.
    """
    assert [rows.tolist() for rows in EIGHT.token_indices] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    ids, loc = np.arange(10, 18, dtype=np.int32), int32([0, 8])
    own = local_inputs(ids, int32([*ids[1:], -100]), loc, int32([8]), EIGHT, 0)
    assert [part.tolist() for part in own] == [[10, 14], [0, 4], [11, 15]]
    for lengths in ([7, 1, 0, 5], [1], [3, 3, 3]):
        partition = partition_tokens(int32(np.cumsum([0, *lengths])), 4, split="round_robin")
        counts = [int((tokens >= 0).sum()) for tokens in partition.token_indices]
        assert max(counts) - min(counts) <= 1


def test_flow_2_experts_on_own_rows_need_all_weights_or_all_rows() -> None:
    """Says: a rank runs the MLP on T0 and T4 alone, with no communication, or the usual TP all-reduce.

    The first holds where a rank has all weights. An all-reduce of ranks that hold different tokens would add summands
    of T0 to summands of T1: shared experts need the rows gathered first, as the code does.
    """
    rng = np.random.default_rng(8)
    weights, x = expert_of(rng, 8, 4), normal(rng, 8, 4)
    shards = [local_rows(x, EIGHT, rank) for rank in range(4)]
    due = expert_output(x, weights)
    for rank, rows in enumerate(experts_over_ranks(shards, weights, EIGHT, experts="whole")):
        assert_same(rows, expert_output(shards[rank], weights))
        assert_double(rows, due[[rank, rank + 4]])
    wrong = all_reduce([expert_output(rows, expert_share(weights, rank, 4)) for rank, rows in enumerate(shards)])
    assert np.abs(wrong[0] - due[[0, 4]]).max() > 0.1
    for rank, rows in enumerate(experts_over_ranks(shards, weights, EIGHT, experts="sliced")):
        assert_double(rows, due[[rank, rank + 4]])


def eight() -> tuple[World, np.ndarray, object]:
    """A layer, and a step of the document's eight tokens."""
    world = world_of(np.random.default_rng(9), [8])
    return world, *world.step([0], [8])


def rows_over_ranks(world: World, x: np.ndarray, batch: object, **options: object) -> MLARanksOutput:
    """The step over four ranks, round robin."""
    shards = [local_rows(x, EIGHT, rank) for rank in range(4)]
    return mla_over_ranks(shards, world.weights, [world.cache] * 4, batch, SMALL, split="round-robin-split", **options)


def test_flow_3a_a_rank_projects_its_own_tokens() -> None:
    """Says: rank 0 computes queries, keys and values of T0 and T4.

    Keys are a latent, a rope key and an index key here; they take the true positions 0 and 4.
    """
    world, x, batch = eight()
    everything = np.arange(8, dtype=np.int32)
    due = token_keys(x, table_of(everything, batch, SMALL), world.weights, SMALL)
    for rank, tokens in enumerate(EIGHT.token_indices):
        own = token_keys(local_rows(x, EIGHT, rank), table_of(tokens, batch, SMALL), world.weights, SMALL)
        for mine, theirs in zip((*own.keys, own.index_keys), (*due.keys, due.index_keys), strict=True):
            assert_double(mine, theirs[tokens])


def test_flow_3b_gathered_keys_are_put_in_logical_order() -> None:
    """Says: gathered keys lie as T0, T4, T1, T5, ..; they must be put back as T0, T1, T2, .. before top-k."""
    gathered = all_gather(list(EIGHT.token_indices))[1]
    assert gathered.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert restored_rows(gathered, EIGHT).tolist() == list(range(8))


def test_flow_3b_keys_that_stay_in_rank_order_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, left out: queries then choose and see other tokens' keys."""
    world, x, batch = eight()
    due = mla_attention_layer(x, world.weights, world.cache, batch, SMALL)
    monkeypatch.setattr(layer_module, "gathered_in_order", lambda shards, partition: all_gather(shards))
    wrong = rows_over_ranks(world, x, batch)
    assert np.abs(wrong.outputs[1] - due.output[[1, 5]]).max() > 1e-3


def test_flow_3c_own_queries_attend_to_all_keys() -> None:
    """Says: rank 1 asks all keys, K0 to K7, with its queries Q1 and Q5, and gets O1 and O5.

    Of all keys a query sees those up to itself, as on one device.
    """
    world, x, batch = eight()
    due = mla_attention_layer(x, world.weights, world.cache, batch, SMALL)
    got = rows_over_ranks(world, x, batch)
    for rank in range(4):
        assert_same(got.topk_indices[rank], due.topk_indices[[rank, rank + 4]])
        assert_double(got.outputs[rank], due.output[[rank, rank + 4]])
    assert got.topk_indices[1].max(axis=1).tolist() <= [1, 5]


def test_flow_3d_global_keys_are_kept() -> None:
    """Says: global keys are dropped after attention; rank 1 keeps K1 and K5 for decode.

    The code writes all keys on every rank, and that is the default here: the next token may be anyone's.
    """
    world, x, batch = eight()
    due = mla_attention_layer(x, world.weights, world.cache, batch, SMALL)
    for cache in rows_over_ranks(world, x, batch).caches:
        for part, whole in zip(cache, due.cache, strict=True):
            assert_double(part, whole)


def test_flow_3d_own_keys_alone_end_the_request() -> None:
    """The same as an option, kept_keys "own": the step's results are right, and rank 1 then has K1 and K5 only.

    A later token sees K0 to K7, of which no rank has all: the step that needs them is refused, not computed wrongly.
    """
    world = world_of(np.random.default_rng(9), [9])
    x, batch = world.step([0], [8])
    due = mla_attention_layer(x, world.weights, world.cache, batch, SMALL)
    got = rows_over_ranks(world, x, batch, kept_keys="own")
    block_size = world.cache.latent_cache.shape[1]
    slots = [int(world.table[0][p // block_size]) * block_size + p % block_size for p in range(8)]
    for rank, cache in enumerate(got.caches):
        assert_double(got.outputs[rank], due.output[[rank, rank + 4]])
        for part, whole in zip(cache, due.cache, strict=True):
            rows = flat_cache(part)
            kept = np.flatnonzero(~np.isnan(rows).any(axis=1)).tolist()
            assert kept == sorted([slots[rank], slots[rank + 4]])
            assert_double(rows[kept], flat_cache(whole)[kept])
    x, batch = world.step([8], [9])
    shards = [x, x[:0], x[:0], x[:0]]
    with pytest.raises(UnsupportedError, match="ranks that keep own keys only cannot go on"):
        mla_over_ranks(shards, world.weights, got.caches, batch, SMALL, split="zigzag", kept_keys="own")


def test_flow_4_logits_are_gathered_or_argmax_is_taken_where_they_lie() -> None:
    """Says: rank 0 has logits 0 and 4; before sampling they are gathered in order, or argmax runs on them distributed.

    Of a prefill only each request's last row is sampled from, so only it, or its token id, travels; a head that is cut
    by vocabulary sends one value and one id a row.
    """
    stack = stack_world_of(np.random.default_rng(10), [8])
    ids, batch = stack.step([0], [8])
    due = mla_decoder_stack(ids, stack.weights, stack.caches, batch, SMALL)
    got = mla_stack_over_ranks(ids, stack.weights, [stack.caches] * 4, batch, SMALL, split="round-robin-split")
    logits = [rows @ stack.weights.head.T for rows in got.hidden]
    assert_double(gathered_in_order(logits, EIGHT)[2], due.hidden @ stack.weights.head.T)
    token = int32([due.logits[0].argmax()])
    assert_same(rows_argmax(logits, EIGHT, batch.query_start_loc), [token] * 4)
    assert_same(vocab_argmax(np.array_split(got.logits[0], 4, axis=1)), [token] * 4)


@pytest.mark.parametrize(
    ("experts", "of_experts"),
    [("whole", []), ("split", ["all_gather", "reduce_scatter"]), ("sliced", ["all_gather", "all_reduce"])],
)
def test_flow_what_travels_in_all(experts: str, of_experts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Says, all stages together: scatter once, gather keys in each attention layer, gather once at the end.

    With experts whose weights the ranks share, their rows go out and back in each layer as well.
    """
    stack = stack_world_of(np.random.default_rng(11), [8])
    ids, batch = stack.step([0], [8])
    made: list[str] = []
    noting(monkeypatch, stack_module, ("mla_over_ranks", "gathered_last_rows"), made)
    noting(monkeypatch, block_module, COLLECTIVES, made)
    options = {"split": "round-robin-split", "experts": experts}
    mla_stack_over_ranks(ids, stack.weights, [stack.caches] * 4, batch, SMALL, **options)
    assert made == ["mla_over_ranks", *of_experts] * 3 + ["gathered_last_rows", "all_gather"]
