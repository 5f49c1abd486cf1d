"""Public faults outside of attention: summands of different rows, last rows looked for in another layout."""

from __future__ import annotations

import re

import numpy as np
import pytest

import dsacp_ref
from dsacp_ref.block import (
    block_over_ranks,
    decoder_block,
    expert_output,
    expert_share,
    experts_over_ranks,
    gathered_last_rows,
    last_rows,
)
from dsacp_ref.exchange import all_reduce
from dsacp_ref.partition import local_rows, padded_restore_indices, partition_tokens
from dsacp_ref.spec import ContractError
from tests.block_strategies import expert_of, stack_of
from tests.compare import assert_double, assert_same
from tests.layer_strategies import CSA, SMALL, WINDOW
from tests.maths_strategies import int32, normal
from tests.oracles import block as oracle


def test_experts_are_summed_over_ranks_that_hold_the_same_tokens() -> None:
    """xLLM-AI/xllm#2097 (A12): tokens a on rank 0 and b on rank 1; f0(a)+f1(a) and f0(b)+f1(b) are due."""
    rng = np.random.default_rng(0)
    weights, x = expert_of(rng, 6, 4), normal(rng, 2, 4)
    partition = partition_tokens(int32([0, 2]), 2)
    a, b = (local_rows(x, partition, rank) for rank in range(2))
    f0, f1 = (expert_share(weights, rank, 2) for rank in range(2))
    due_a, due_b = (np.array([oracle.expert(row[0].tolist(), *weights)]) for row in (a, b))
    got_a, got_b = experts_over_ranks([a, b], weights, partition, experts="split")
    assert_double(got_a, due_a)
    assert_double(got_b, due_b)
    assert_double(got_a, expert_output(a, f0) + expert_output(a, f1))
    # What an all-reduce of the ranks' own rows gives instead, to both: neither is right.
    wrong = all_reduce([expert_output(a, f0), expert_output(b, f1)])[0]
    assert_double(wrong, expert_output(a, f0) + expert_output(b, f1))
    for due in (due_a, due_b):
        assert np.abs(wrong - due).max() > 0.1 * np.abs(due).max()


def test_the_wrong_sum_is_seen_in_a_whole_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """xLLM-AI/xllm#2097 (A12): the same, as a decoder layer that reduces its own rows; the law of the stack sees it."""
    stack = stack_of(np.random.default_rng(1), [8], [WINDOW], experts="split")
    world, weights = stack.worlds[0], stack.weights[0]
    x, batch = world.step([0], [8])
    due = decoder_block(x, weights, world.cache, batch, SMALL, compress_ratio=1).output
    partition = partition_tokens(batch.query_start_loc, 2)
    shards = [local_rows(x, partition, rank) for rank in range(2)]

    def stream() -> np.ndarray:
        modes = {"rows": "scattered", "key_mode": "gather_kv", "experts": "split"}
        out = block_over_ranks(shards, weights, [world.cache] * 2, batch, SMALL, compress_ratio=1, **modes)
        return np.concatenate(out.outputs)

    assert_double(stream(), due)
    # 4 rows on each rank: without the gather, the shapes of the sum fit all the same.
    monkeypatch.setattr(dsacp_ref.block, "all_gather", list)
    monkeypatch.setattr(dsacp_ref.block, "reduce_scatter", lambda summands, counts: all_reduce(summands))
    assert np.abs(stream() - due).max() > 1e-3


@pytest.mark.parametrize("cp_rank", range(4))
def test_rows_and_positions_of_a_rank_are_of_one_number(cp_rank: int) -> None:
    """sgl-project/sglang#19367 (A03): round robin over 4 ranks, 8 tokens; 8 rows to a rank that has 2 are refused."""
    stack = stack_of(np.random.default_rng(2), [8], [CSA])
    world, weights = stack.worlds[0], stack.weights[0]
    x, batch = world.step([0], [8])
    partition = partition_tokens(batch.query_start_loc, 4, split="round_robin")
    shards = [local_rows(x, partition, rank) for rank in range(4)]
    modes = {"split": "round_robin", "rows": "scattered", "key_mode": "gather_kv", "output_mode": "replicated_weight"}
    shared = (weights, [world.cache] * 4, batch, SMALL)
    got = block_over_ranks(shards, *shared, compress_ratio=4, **modes).outputs[cp_rank]
    due = decoder_block(x, weights, world.cache, batch, SMALL, compress_ratio=4).output
    assert_double(got, due[[cp_rank, cp_rank + 4]])
    shards[cp_rank] = x
    text = f"inputs must have shape [2, 8], got [8, 8]; rank {cp_rank}; the split says which rows"
    with pytest.raises(ContractError, match=f"^{re.escape(text)}$"):
        block_over_ranks(shards, *shared, compress_ratio=4, **modes)


def test_the_last_rows_are_looked_for_in_the_layout_that_the_rows_have() -> None:
    """xLLM-AI/xllm cp_input_partition (A38): lengths 5 and 8 over 2 ranks: token 12 is rank 0's last row, not row 5."""
    loc = int32([0, 5, 13])
    partition = partition_tokens(loc, 2, split="zigzag_padded")
    assert padded_restore_indices(partition)[12] == 7
    shards = [100 + tokens for tokens in partition.token_indices]
    for rows in gathered_last_rows(shards, partition, loc):
        assert rows.tolist() == [104, 112]
    first, second = last_rows(shards, partition, loc)
    assert (first.request_indices.tolist(), first.rows.tolist()) == ([1], [112])
    assert (second.request_indices.tolist(), second.rows.tolist()) == ([0], [104])
    assert shards[0][7] == 112
    assert shards[0][5] != 112


def test_offsets_of_the_padded_stream_are_refused() -> None:
    """sgl-project/sglang#19820 (A39): 3670 tokens, 3672 padded ones over 4 ranks; offsets and rows must be of one."""
    partition = partition_tokens(int32([0, 3670]), 4, num_input_tokens=3672)
    shards = list(partition.token_indices)
    assert sum(map(len, shards)) == 3672
    assert gathered_last_rows(shards, partition, int32([0, 3670]))[0].tolist() == [3669]
    text = "query_start_loc must end at the 3670 tokens of the partition, got 3672; build both from the same lengths"
    for function in (last_rows, gathered_last_rows):
        with pytest.raises(ContractError, match=f"^{re.escape(text)}$"):
            function(shards, partition, int32([0, 3672]))


def test_rows_of_another_layout_have_other_last_rows() -> None:
    """verl-project/verl#7297 (A41): 8 tokens on 2 ranks; contiguous rows read as zigzag ones give token 3 for 7."""
    loc = int32([0, 8])
    contiguous, zigzag = (partition_tokens(loc, 2, split=split) for split in ("contiguous", "zigzag"))
    rows = np.arange(8)
    shards = [local_rows(rows, contiguous, rank) for rank in range(2)]
    assert gathered_last_rows(shards, contiguous, loc)[0].tolist() == [7]
    assert gathered_last_rows(shards, zigzag, loc)[0].tolist() == [3]  # same counts: no shape can tell
    uneven = partition_tokens(loc, 2, split="zigzag_ceil")
    assert_same(gathered_last_rows([local_rows(rows, uneven, rank) for rank in range(2)], uneven, loc)[1], rows[7:])
    three = partition_tokens(int32([0, 5]), 2, split="zigzag_ceil")  # 2 and 3 rows, where contiguous has 3 and 3
    with pytest.raises(
        ContractError, match=r"^shards must have 2 rows on rank 0, got 3; pad rows travel with the rest$"
    ):
        last_rows([rows[:3], rows[:3]], three, int32([0, 5]))
