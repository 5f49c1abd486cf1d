"""Public faults in DeepSeek-V3.2's terms: chosen tokens, latents, a stack whose rows stay on their ranks."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from dsacp_ref import block as block_module
from dsacp_ref import mla_layer as layer_module
from dsacp_ref.block import expert_output, experts_over_ranks
from dsacp_ref.compressor import rms_norm
from dsacp_ref.exchange import all_gather, all_reduce
from dsacp_ref.extents import local_extents, query_positions, token_positions
from dsacp_ref.indexer import lightning_indexer
from dsacp_ref.mla import causal_picks, key_ranges, latent_attention, packed_topk
from dsacp_ref.mla_layer import MLABatch, mla_attention_layer
from dsacp_ref.mla_stack import (
    local_inputs,
    mla_block_over_ranks,
    rows_argmax,
    vocab_argmax,
)
from dsacp_ref.partition import (
    local_rows,
    local_token_indices,
    padded_restore_indices,
    partition_tokens,
    round_robin_lengths,
)
from dsacp_ref.rope import rope_table
from dsacp_ref.spec import ContractError
from tests.block_strategies import expert_of
from tests.compare import assert_double, assert_same
from tests.maths_strategies import int32, normal
from tests.mla_strategies import (
    SMALL,
    Cut,
    World,
    frequencies_of,
    one_device,
    over_ranks,
    run,
    run_stack,
    stack_over_ranks,
    stack_world_of,
    world_of,
)
from tests.oracles import rope
from tests.strategies import EVERY_SPLIT, read_only

EXPERTS = ("whole", "split", "sliced")


def assert_ranks_equal(world: World, steps: list[list[int]], cut: Cut) -> None:
    """Choices exactly, outputs to rounding."""
    due, got = run(world, steps), run(world, steps, over_ranks(world, cut))
    assert_same(got.topk, due.topk)
    for mine, theirs in zip(got.outputs, due.outputs, strict=True):
        assert_double(mine, theirs)


# --- local rows with global lengths, or the reverse -------------------------------------------------------------------


def test_a_global_key_length_would_show_later_tokens_to_the_first_rank() -> None:
    """xLLM-AI/xllm#2097 (A08): 145 tokens on 2 ranks; row 0 of rank 0 sees itself, with 145 keys it would see 73."""
    extents = local_extents(int32([0, 145]), int32([145]), 2, 0, split="contiguous_request")
    assert (extents.cu_seqlens_q.tolist(), extents.seqused_kv.tolist()) == ([0, 73], [73])
    keys = normal(np.random.default_rng(0), 145, 1, 4)
    q, weights = normal(np.random.default_rng(1), 73, 2, 4), np.ones((73, 2))
    table = np.arange(145, dtype=np.int32)[None]
    for used, seen in ((extents.seqused_kv, 1), (int32([145]), 73)):
        picks = lightning_indexer(q, weights, keys, table, extents.cu_seqlens_q, used, compress_ratio=1, index_topk=145)
        assert np.count_nonzero(picks[0] >= 0) == seen


def test_global_query_offsets_on_local_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#38603 (A05): 10 tokens round robin over 4 ranks; offsets that end at 10 do not fit 3 rows."""
    world = world_of(np.random.default_rng(2), [10])
    assert_ranks_equal(world, [[10]], Cut(4, "round_robin"))
    right = layer_module.local_extents

    def wrong(query_start_loc, seq_lens, *args, **options):
        return right(query_start_loc, seq_lens, *args, **options)._replace(
            cu_seqlens_q=query_start_loc, seqused_kv=seq_lens, request_indices=int32([0])
        )

    monkeypatch.setattr(layer_module, "local_extents", wrong)
    with pytest.raises(ContractError, match=r"^num_rows must be an int in \[10, 2147483647\], got 3; "):
        run(world, [[10]], over_ranks(world, Cut(4, "round_robin")))


# --- prefix and positions ---------------------------------------------------------------------------------------------


def test_zigzag_extents_hold_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#23415 (A02): 1 cached token, 7 new ones on 2 ranks, which is no multiple of 4.

    Blocks of 2, 2, 2 and 1 end at 3, 5, 7 and 8 keys. Without the prefix each would see one token fewer.
    """
    extents = [local_extents(int32([0, 7]), int32([8]), 2, rank, split="zigzag") for rank in range(2)]
    assert [part.seqused_kv.tolist() for part in extents] == [[3, 8], [5, 7]]
    world = world_of(np.random.default_rng(3), [8])
    assert_ranks_equal(world, [[1], [7]], Cut(2, "zigzag"))
    right = layer_module.local_extents

    def without_prefix(query_start_loc, seq_lens, *args, **options):
        return right(query_start_loc, query_start_loc[1:] - query_start_loc[:-1], *args, **options)

    monkeypatch.setattr(layer_module, "local_extents", without_prefix)
    with pytest.raises(AssertionError):
        assert_ranks_equal(world, [[1], [7]], Cut(2, "zigzag"))


def test_a_strided_shard_turns_by_its_own_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#28463 (A04): 5 and 3 tokens behind 0 and 6, rank 1 of 4: positions 1 and 6, not 1 and 2."""
    loc, lens = int32([0, 5, 8]), int32([5, 9])
    tokens = local_token_indices(loc, 4, 1, split="round_robin")
    assert token_positions(tokens, loc, lens).tolist() == [1, 6]
    ranges = key_ranges(tokens, loc, lens)
    assert (ranges.starts.tolist(), ranges.ends.tolist()) == ([0, 5], [2, 12])
    world = world_of(np.random.default_rng(4), [5, 9])
    assert_ranks_equal(world, [[0, 6], [5, 3]], Cut(4, "round_robin"))

    def consecutive(tokens, batch, config):
        positions = token_positions(tokens, batch.query_start_loc, batch.seq_lens)
        run_on = positions[:1] + np.arange(len(positions), dtype=np.int32)
        return rope_table(np.where(positions < 0, positions, run_on), layer_module.mla_frequencies(config))

    due = run(world, [[0, 6], [5, 3]])
    monkeypatch.setattr(layer_module, "table_of", consecutive)
    got = run(world, [[0, 6], [5, 3]], over_ranks(world, Cut(4, "round_robin")))
    assert max(np.abs(a - b).max() for a, b in zip(got.outputs, due.outputs, strict=True)) > 1e-3


@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_rows_positions_and_labels_of_a_rank_are_of_one_number(split: str) -> None:
    """sgl-project/sglang#19367 (A03), verl-project/verl#7297 (A41): 8 tokens, 4 ranks; in turn, rank 3 has 3 and 7."""
    loc, ids = int32([0, 8]), np.arange(8, dtype=np.int32)
    partition = partition_tokens(loc, 4, split=split)
    for rank, tokens in enumerate(partition.token_indices):
        own = local_inputs(ids, ids, loc, int32([8]), partition, rank)
        assert {len(part) for part in own} == {len(tokens)}
        assert own.positions[tokens >= 0].tolist() == tokens[tokens >= 0].tolist() == own.labels[tokens >= 0].tolist()
    if split == "round_robin":
        assert local_inputs(ids, ids, loc, int32([8]), partition, 3).positions.tolist() == [3, 7]


def test_ids_padded_before_the_split_are_refused() -> None:
    """sgl-project/sglang#19820 (A39): 3670 tokens, 3672 ids; labels of another length neither."""
    loc, ids = int32([0, 3670]), np.zeros(3672, np.int32)
    partition = partition_tokens(loc, 4, num_input_tokens=3672)
    for name, args in (("token_ids", (ids, ids[:3670])), ("labels", (ids[:3670], ids))):
        text = f"{name} must have shape [3670], got [3672]; one a token of the step"
        with pytest.raises(ContractError, match=f"^{re.escape(text)}$"):
            local_inputs(*args, loc, int32([3670]), partition, 0)


def test_labels_are_rolled_before_the_split() -> None:
    """NVIDIA-NeMo/Automodel#3543, #3544, #3570: 4 tokens on 2 ranks; the label of token 1 is on the other rank."""
    ids, loc = int32([10, 11, 12, 13]), int32([0, 4])
    rolled = int32([11, 12, 13, -100])
    partition = partition_tokens(loc, 2)
    first = local_inputs(ids, rolled, loc, int32([4]), partition, 0)
    assert first.token_ids.tolist() == [10, 11]
    assert first.labels.tolist() == [11, 12]
    assert np.roll(first.token_ids, -1).tolist() == [11, 10]  # what a local roll gives


# --- padding and zero-length slots ------------------------------------------------------------------------------------


def graph_world(seed: int) -> World:
    """9 live requests of 4 tokens, and 11 rows of a block table that names no block."""
    world = world_of(np.random.default_rng(seed), [4] * 9)
    nothing = np.full((11, world.table.shape[1]), -1, np.int32)
    return world._replace(table=read_only(np.concatenate([world.table[:9], nothing])))


@pytest.mark.parametrize("split", ["contiguous", "zigzag", "round_robin"])
def test_a_graph_slot_across_a_rank_border_gives_zeros(split: str) -> None:
    """vllm-project/vllm-ascend#12840 (A01): 8 ranks, 20 slots of 4 rows, 9 of them live; rank 6 cuts a padded slot."""
    world = graph_world(5)
    x, batch = world.step([0] * 9, [4] * 9, idle=[4] * 11)
    assert len(x) == 80
    for rank in range(8):
        extents = local_extents(batch.query_start_loc, batch.seq_lens, 8, rank, split=split)
        assert (extents.seqused_kv >= 0).all()
    output, topk, _ = over_ranks(world, Cut(8, split))(x, batch, world.cache)
    assert_double(output[:36], np.concatenate(run(world, [[4] * 9]).outputs))
    assert not output[36:].any()
    assert (topk[36:] == -1).all()


def test_an_idle_step_with_stale_tables_writes_nothing() -> None:
    """vllm-project/vllm-ascend#9818 (A21): after a finished request, 0 real tokens and 4 padded ones on its tables."""
    world = world_of(np.random.default_rng(6), [8])
    cache = run(world, [[8]]).cache
    stale = world.step([0], [4])[1]._replace(seq_lens=int32([0]))
    nan_rows = read_only(np.full((4, SMALL.hidden_size), np.nan))
    for forward, before in ((one_device(world), cache), (over_ranks(world, Cut(2)), [cache] * 2)):
        output, topk, after = forward(nan_rows, stale, before)
        assert not output.any()
        assert (topk == -1).all()
        assert_same(after, before)


def test_rows_padded_to_a_capture_size_are_nobody_s() -> None:
    """ROCm/ATOM#1595 (A31): 342 decode rows, 352 in the buffer, on one device and as 4 equal shares."""
    config = replace(SMALL, index_topk=2)
    world = world_of(np.random.default_rng(7), [2] * 342, config=config, block_size=2)
    before = run(world, [[1] * 342])
    x, batch = world.step([1] * 342, [2] * 342, beyond=10)
    due = mla_attention_layer(x[:342], world.weights, before.cache, batch, config)
    got = mla_attention_layer(x, world.weights, before.cache, batch, config)
    assert_same(got.cache, due.cache)
    assert_double(got.output[:342], due.output)
    assert not got.output[342:].any()
    output, topk, _ = over_ranks(world, Cut(4, "round_robin", 10))(x[:342], batch, [before.cache] * 4)
    assert_double(output, due.output)
    assert_same(topk, due.topk_indices)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_ranks_without_rows_stay_in_every_layer(split: str, experts: str) -> None:
    """vllm-project/vllm-ascend#17097, HYGON-AI/sglang-das#393 (A33): 3 tokens on 8 ranks; norms of no rows."""
    stack = stack_world_of(np.random.default_rng(8), [3], num_layers=2, inter=8)
    due, got = (run_stack(stack, [[3]], way) for way in (None, stack_over_ranks(stack, Cut(8, split), experts)))
    assert_double(got.hidden[0], due.hidden[0])
    assert_double(got.logits[0], due.logits[0])
    nothing = np.zeros((0, SMALL.hidden_size))
    assert rms_norm(nothing, stack.weights.norm, 1e-6).shape == nothing.shape


def test_pad_rows_are_left_out_when_rows_are_put_back() -> None:
    """sgl-project/sglang#13959, cp/interleave: 7 tokens in a stream of 12 on 4 ranks; real rows are not padded ones.

    The transpose of ranks and turns gives 12 rows. Of these the first 7 are tokens; the others are read by nobody, and
    their keys are written nowhere.
    """
    partition = partition_tokens(int32([0, 7]), 4, split="round_robin", num_input_tokens=12)
    gathered = np.concatenate(partition.token_indices)
    transposed = gathered.reshape(4, 3).T.ravel()
    assert transposed.tolist() == [*range(7), *[-1] * 5]
    assert gathered[partition.restore_indices].tolist() == list(range(7))
    assert_same(padded_restore_indices(partition), partition.restore_indices)
    world = world_of(np.random.default_rng(9), [7])
    due = run(world, [[7]])
    got = run(world, [[7]], over_ranks(world, Cut(4, "round_robin", 5)))
    assert_same(got.topk, due.topk)
    for cache in got.cache:
        for part, whole in zip(cache, due.cache, strict=True):
            assert_same(np.isnan(part), np.isnan(whole))
            assert_double(part, whole)


# --- lengths and cuts that hold for one request only ------------------------------------------------------------------


def test_the_running_carry_may_be_negative() -> None:
    """sgl-project/sglang#13959: requests of 1, 1 and 3 tokens on 4 ranks; rank 0 has the first and the last but one."""
    lengths = round_robin_lengths(int32([0, 1, 2, 5]), 4, 0)
    assert lengths.carries.tolist() == [-3, -2, -3]
    assert (lengths.request_indices.tolist(), lengths.query_lens.tolist()) == ([0, 2], [1, 1])
    held = [[0, 4], [1], [2], [3]]
    for rank, tokens in enumerate(held):
        rows = local_token_indices(int32([0, 1, 2, 5]), 4, rank, split="round_robin")
        assert rows[rows >= 0].tolist() == tokens
        # A carry that was floored at 0 would give rank 0 the second request as well.
        assert round_robin_lengths(int32([0, 1, 2, 5]), 4, rank).query_lens.sum() == len(tokens)


def test_the_middle_of_the_local_rows_is_no_border_of_blocks_of_several_requests() -> None:
    """sgl-project/sglang#12065: local queries cut at (rows + 1) // 2, one key length for each half.

    Right for one request of 7 tokens on 2 ranks: 2 and 1 rows. With a second request of 5 each rank has four blocks.
    """
    one = local_extents(int32([0, 7]), int32([7]), 2, 0, split="zigzag")
    assert one.cu_seqlens_q.tolist() == [0, (3 + 1) // 2, 3]
    two = local_extents(int32([0, 7, 12]), int32([7, 5]), 2, 0, split="zigzag")
    assert two.cu_seqlens_q.tolist() == [0, 2, 3, 5, 6]
    assert two.seqused_kv.tolist() == [2, 7, 2, 5]
    at = query_positions(two.cu_seqlens_q, two.seqused_kv, num_rows=6)
    assert at.tolist() == [0, 1, 6, 0, 1, 4]
    world = world_of(np.random.default_rng(10), [7, 5])
    assert_ranks_equal(world, [[7, 5]], Cut(2, "zigzag"))


def test_the_middle_of_the_local_rows_is_no_border_of_filled_chunks() -> None:
    """vLLM PCPManager's chunks of ceil(q / 2R): 6 tokens on 2 ranks are 2, 2, 2 and 0: rank 1 has 4 rows, not 3."""
    extents = [local_extents(int32([0, 6]), int32([6]), 2, rank, split="zigzag_ceil") for rank in range(2)]
    assert [part.cu_seqlens_q.tolist() for part in extents] == [[0, 2, 2], [0, 2, 4]]
    assert [part.seqused_kv.tolist() for part in extents] == [[2, 0], [4, 6]]
    assert_ranks_equal(world_of(np.random.default_rng(11), [6]), [[6]], Cut(2, "zigzag_ceil"))


# --- the group, full and scattered rows -------------------------------------------------------------------------------


def test_the_group_that_splits_is_the_group_that_gathers() -> None:
    """sgl-project/sglang#24560 (A06), xLLM-AI/xllm#1997 (A07): 16 tokens over 8; a gather over 1 or 4 is refused."""
    loc = int32([0, 16])
    partition = partition_tokens(loc, 8, split="round_robin")
    logits = [np.eye(4)[tokens % 4] for tokens in partition.token_indices]
    assert [len(rows) for rows in logits] == [2] * 8
    assert [found.tolist() for found in rows_argmax(logits, partition, loc)] == [[3]] * 8
    for members in (1, 4):
        with pytest.raises(
            ContractError, match=rf"^shards must come from the 8 ranks of the partition, got {members} "
        ):
            rows_argmax(logits[:members], partition, loc)
        with pytest.raises(
            ContractError, match=rf"^shards must come from the 8 ranks of the partition, got {members} "
        ):
            experts_over_ranks(logits[:members], expert_of(np.random.default_rng(0), 4, 4), partition)


@pytest.mark.parametrize("split", ["zigzag", "round_robin"])
def test_full_rows_are_scattered_again_though_the_groups_are_equal(split: str) -> None:
    """sgl-project/sglang#13959, communicator: full to scattered comes before the shortcut for groups of equal size.

    8 tokens on 2 ranks: after the experts each rank has all rows in rank-major order, and must take its own. All rows
    handed on to the next block are refused; the rows of another rank, or of token order, are other rows.
    """
    rng = np.random.default_rng(12)
    weights, x = expert_of(rng, 4, SMALL.hidden_size), normal(rng, 8, SMALL.hidden_size)
    partition = partition_tokens(int32([0, 8]), 2, split=split)
    shards = [local_rows(x, partition, rank) for rank in range(2)]
    due, full = expert_output(x, weights), expert_output(all_gather(shards)[0], weights)
    for experts in ("split", "sliced"):
        found = experts_over_ranks(shards, weights, partition, experts=experts)
        for rank, rows in enumerate(found):
            assert_double(rows, local_rows(due, partition, rank))
            assert_double(rows, full[4 * rank : 4 * rank + 4])
            assert np.abs(rows - due[4 * rank : 4 * rank + 4]).max() > 0.1
    stack = stack_world_of(rng, [8], num_layers=1)
    _, batch = stack.step([0], [8])
    text = "shards must have 4 rows on rank 0, got 8; pad rows travel with the rest"
    with pytest.raises(ContractError, match=f"^{re.escape(text)}$"):
        mla_block_over_ranks([full] * 2, stack.weights.blocks[0], stack.caches * 2, batch, SMALL, split=split)


def test_the_wrong_sum_is_seen_in_a_whole_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """xLLM-AI/xllm#2097 (A12): experts summed over ranks whose rows differ; the law of the stack sees it."""
    stack = stack_world_of(np.random.default_rng(13), [8], num_layers=2, inter=4)
    due = run_stack(stack, [[8]])
    forward = stack_over_ranks(stack, Cut(2, "round_robin"), "split")
    assert_double(run_stack(stack, [[8]], forward).hidden[0], due.hidden[0])
    monkeypatch.setattr(block_module, "reduce_scatter", lambda summands, counts: all_reduce(summands))
    monkeypatch.setattr(block_module, "all_gather", lambda rows: list(rows) if len(rows[0]) == 4 else all_gather(rows))
    assert np.abs(run_stack(stack, [[8]], forward).hidden[0] - due.hidden[0]).max() > 1e-3


def test_a_selected_row_is_looked_for_in_the_layout_that_the_rows_have() -> None:
    """xLLM-AI/xllm cp_input_partition (A38): lengths 5 and 8 on 2 ranks; token 12 is rank 0's row 7, not 5."""
    loc = int32([0, 5, 13])
    partition = partition_tokens(loc, 2, split="zigzag_padded")
    assert padded_restore_indices(partition)[12] == 7
    logits = [np.eye(14)[tokens] for tokens in partition.token_indices]  # of a pad row, token 13
    assert [found.tolist() for found in rows_argmax(logits, partition, loc)] == [[4, 12]] * 2


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_ties_do_not_depend_on_the_slice_a_row_is_in(split: str) -> None:
    """vllm-project/vllm-ascend#15053 (A14): 12 equal keys, 5 places, 8 queries at the end; lowest tokens win."""
    world = world_of(np.random.default_rng(14), [12], config=replace(SMALL, index_topk=5))
    nothing = np.zeros_like(world.weights.indexer.weights_proj)
    indexer = world.weights.indexer._replace(weights_proj=nothing)
    world = world._replace(weights=world.weights._replace(indexer=indexer))
    whole = run(world, [[4], [8]])
    assert whole.topk[0][4:].tolist() == [[0, 1, 2, 3, 4]] * 8
    for steps in ([[8], [4]], [[12]]):
        for cp_size in (2, 3):
            assert_same(run(world, steps, over_ranks(world, Cut(cp_size, split))).topk, whole.topk)


def test_early_queries_choose_no_later_token() -> None:
    """huggingface/transformers#45820 (A24): scores that grow with the token; query p chooses the last it may see.

    A top-k that ran over all keys is cut afterwards: of its picks those beyond the query become -1.
    """
    keys = np.arange(1.0, 9.0)[:, None, None]
    q, ones, table = np.ones((8, 1, 1)), np.ones((8, 1)), np.arange(8, dtype=np.int32)[None]
    picks = lightning_indexer(q, ones, keys, table, int32([0, 8]), int32([8]), compress_ratio=1, index_topk=3)
    assert picks.tolist()[:4] == [[0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 2, 1]]
    unmasked = int32([[7, 6, 5]] * 8)
    cut = causal_picks(unmasked, np.arange(8, dtype=np.int32))
    assert cut.tolist()[4:] == [[-1, -1, -1], [-1, -1, 5], [-1, 6, 5], [7, 6, 5]]
    assert (cut[:5] == -1).all()


def test_a_query_attends_to_its_own_selection_only() -> None:
    """huggingface/transformers#45758 (A25): 8 tokens, one place each; another token 5 moves those that chose it."""
    world = world_of(np.random.default_rng(15), [8])
    x, batch = world.step([0], [8])
    given_topk = np.full((8, SMALL.index_topk), -1, np.int32)
    given_topk[:, 1] = [0, 0, 0, 3, 0, 5, 5, 3]
    due = mla_attention_layer(x, world.weights, world.cache, batch, SMALL, given_topk=given_topk).output
    other = x.copy()
    other[5] += 1
    got = mla_attention_layer(other, world.weights, world.cache, batch, SMALL, given_topk=given_topk).output
    moved = np.abs(got - due).max(axis=1) > 1e-6
    assert moved.tolist() == [False, False, False, False, False, True, True, False]


def attended(topk: list[list[int]], seed: int = 16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(latents of 12 tokens, out, lse) of as many queries at the end, all with these picks."""
    rng = np.random.default_rng(seed)
    latents, ropes, count = normal(rng, 12, 1, 8), normal(rng, 12, 1, 2), len(topk)
    q = np.repeat(normal(rng, 1, 2, 8), count, axis=0), np.repeat(normal(rng, 1, 2, 2), count, axis=0)
    # Each query is an operator row of its own, at position 11.
    table = np.repeat(np.arange(12, dtype=np.int32)[None], count, axis=0)
    loc = np.arange(count + 1, dtype=np.int32)
    used = np.full(count, 12, np.int32)
    out = latent_attention(*q, latents, ropes, table, int32(topk), loc, used, softmax_scale=0.5)
    return latents[:, 0], out.out, out.lse


def test_a_pick_behind_a_tile_of_none_is_seen() -> None:
    """vllm-project/vllm#48364 (A26): sixteen times -1, then token 3; and -1 alone, which gives zero and never NaN."""
    latents, out, lse = attended([[-1] * 16 + [3], [-1] * 17])
    assert_double(out[0], np.stack([latents[3]] * 2))
    assert np.isfinite(lse[0]).all()
    assert not out[1].any()
    assert np.isneginf(lse[1]).all()


@pytest.mark.parametrize("num_rows", [64, 65])
def test_lanes_past_the_length_of_a_list_are_not_used(num_rows: int) -> None:
    """flashinfer-ai/flashinfer#5095 (A27): lists of 10 in 128 lanes; the others are -1 and change nothing."""
    ten = [7, 2, 11, 0, 5, 9, 1, 3, 10, 4]
    _, short, _ = attended([ten] * num_rows)
    _, wide, _ = attended([ten + [-1] * 118] * num_rows)
    assert_same(wide, short)
    _, other, _ = attended([[*ten, 6, *[-1] * 117]] * num_rows)
    assert (np.abs(other - short).max(axis=(1, 2)) > 1e-6).all(), "a lane that is used shows"


def test_nan_scores_give_picks_that_are_tokens() -> None:
    """vllm-project/vllm#49896 (A30): a query of NaN, and one NaN key of 10, 4 places: distinct tokens, NaN last."""
    keys = np.arange(10.0, 0.0, -1)[:, None, None].copy()
    keys[2] = np.nan
    q = np.array([[[np.nan]], [[1.0]]])
    table = np.arange(10, dtype=np.int32)[None].repeat(2, axis=0)
    picks = lightning_indexer(
        q, np.ones((2, 1)), keys, table, int32([0, 1, 2]), int32([10, 10]), compress_ratio=1, index_topk=4
    )
    assert picks.tolist() == [[0, 1, 2, 3], [0, 1, 3, 4]]
    logits = np.array([[np.nan] * 4, [np.nan, 1.0, np.nan, 1.0]])
    assert [found.tolist() for found in vocab_argmax([logits[:, :1], logits[:, 1:]])] == [[0, 1]] * 2


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_packed_keys_beyond_int32_are_refused() -> None:
    """NVIDIA-NeMo/Automodel#3802 (A29): two requests of 2**30 keys sum to 2**31; one key less fits."""
    loc, tokens = int32([0, 1, 2]), int32([0, 1])
    with pytest.raises(ContractError, match=r"^seq_lens must sum to less than 2\*\*31, got 2147483648"):
        key_ranges(tokens, loc, int32([2**30, 2**30]))
    ranges = key_ranges(tokens, loc, int32([2**30, 2**30 - 1]))
    assert ranges.ends.tolist() == [2**30, 2**31 - 1]
    picks = int32([[2**30 - 1], [2**30 - 2]])
    assert packed_topk(picks, ranges.starts).tolist() == [[2**30 - 1], [2**31 - 2]]
    with pytest.raises(ContractError, match=r"^starts must give rows below 2\*\*31, got 2147483648"):
        packed_topk(int32([[2**30]]), int32([2**30]))


@pytest.mark.parametrize(("last", "in_bf16"), [(257, 256), (70_001, 70_144)])
def test_positions_and_angles_keep_all_their_bits(last: int, in_bf16: int) -> None:
    """vllm-project/vllm-ascend#9739 (A36): a token far out; a cast to bf16 turns 257 into 256, and 70001 into 70144."""
    world = world_of(np.random.default_rng(17), [1])
    weights, rank = world.weights, SMALL.kv_lora_rank
    table = np.zeros((1, last // 4 + 1), np.int32)
    batch = MLABatch(int32([0, 1]), int32([last + 1]), read_only(table))
    picks = int32([[last, -1, -1]])
    got = mla_attention_layer(world.x[0], weights, world.cache, batch, SMALL, given_topk=picks).cache.rope_cache[
        0, last % 4
    ]
    raw = np.dot(weights.wkv_a, world.x[0][0])[rank:]
    due, wrong = (np.array(rope.rotate(raw, at, frequencies_of(SMALL))) for at in (last, in_bf16))
    assert_double(got, due)
    assert np.abs(got - wrong).max() > 0.1 * np.abs(due).max()
