"""Draft steps: lengths of their own in memory of their own, local metadata, and a window-only layer over ranks."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.layer import attention_layer, draft_batches, draft_metadata, layer_frequencies, layer_over_ranks
from dsacp_ref.partition import partition_tokens
from tests.compare import assert_double, assert_same
from tests.layer_strategies import SMALL, WINDOW, config_for, frozen, legal_cut, world_of
from tests.maths_strategies import int32, seeds
from tests.oracles import rope
from tests.strategies import Batch, batches, cp_sizes, fewer, read_only

num_steps_drawn = st.integers(1, 4)


def lengths_by_request(batch: Batch, step: int) -> list[tuple[int, int]]:
    """(queries, keys) of each request in one draft step."""
    if step == 0:
        return list(zip(batch.query_lens, batch.seq_lens, strict=True))
    found = []
    for new, total in zip(batch.query_lens, batch.seq_lens, strict=True):
        if new == 0:
            found.append((0, total))
        else:
            found.append((1, total + step if total else 0))
    return found


@given(batches(), num_steps_drawn)
def test_a_later_step_has_one_token_and_one_key_more(batch: Batch, num_steps: int) -> None:
    steps = draft_batches(batch.query_start_loc, batch.key_lens, num_steps)
    assert len(steps) == num_steps
    for step, (loc, lens) in enumerate(steps):
        due = lengths_by_request(batch, step)
        assert_same(loc, int32(np.concatenate([[0], np.cumsum([new for new, _ in due])])), f"step {step}")
        assert_same(lens, int32([total for _, total in due]), f"step {step}")


@given(batches(), num_steps_drawn, cp_sizes, st.booleans())
def test_metadata_of_a_draft_step_is_local(batch: Batch, num_steps: int, cp_size: int, causal: bool) -> None:
    """Token by token: which rank, which request, which key extent, which angle."""
    frequencies = (1.0, 0.25)
    ranks = [
        draft_metadata(batch.query_start_loc, batch.key_lens, cp_size, rank, num_steps, frequencies, causal=causal)
        for rank in range(cp_size)
    ]
    for step in range(num_steps):
        lengths = lengths_by_request(batch, step)
        tokens = [(b, j) for b, (new, _) in enumerate(lengths) for j in range(new)]
        per_rank = -(-len(tokens) // cp_size)
        for rank in range(cp_size):
            mine = tokens[rank * per_rank : (rank + 1) * per_rank]
            local = ranks[rank][step]
            counts = [sum(1 for b, _ in mine if b == request) for request in range(len(lengths))]
            assert_same(local.local_query_start_loc, int32(np.concatenate([[0], np.cumsum(counts)])))
            for request, (new, total) in enumerate(lengths):
                last = max((j for b, j in mine if b == request), default=None)
                due = 0 if last is None or total == 0 else total - new + last + 1 if causal else total
                assert local.local_seq_lens[request] == due
            assert local.local_query_start_loc[-1] <= local.tokens_per_rank == per_rank
            for row in range(per_rank):
                b, j = mine[row] if row < len(mine) else (None, 0)
                real = b is not None and lengths[b][1] > 0
                position = lengths[b][1] - lengths[b][0] + j if real else 0
                for pair, frequency in enumerate(frequencies):
                    cos, sin = rope.cos_sin(position, np.float32(frequency))
                    assert (local.local_cos[row, pair], local.local_sin[row, pair]) == (cos, sin)


@given(batches(), st.integers(2, 4), cp_sizes)
def test_no_two_steps_share_memory(batch: Batch, num_steps: int, cp_size: int) -> None:
    """vllm-ascend#10878: a step that was built stays as it is when the next one is built, or written into."""
    inputs = [batch.query_start_loc, batch.key_lens]
    steps = [list(step) for step in draft_batches(*inputs, num_steps)]
    metadata = draft_metadata(*inputs, cp_size, cp_size - 1, num_steps, (1.0,))
    local = [[part for part in step if isinstance(part, np.ndarray)] for step in metadata]
    for group in ([inputs, *steps], [inputs, *local]):
        for one, other in combinations(group, 2):
            assert not any(np.shares_memory(a, b) for a in one for b in other)


def test_three_steps_built_before_the_first_is_read() -> None:
    """vllm-ascend#10878: kv 10, 11, 12."""
    metadata = draft_metadata(int32([0, 4]), int32([10]), 1, 0, 3, (1.0,))
    assert [step.local_seq_lens.tolist() for step in metadata] == [[10], [11], [12]]
    assert [step.local_query_start_loc.tolist() for step in metadata] == [[0, 4], [0, 1], [0, 1]]
    angles = [rope.cos_sin(position, np.float32(1.0))[0] for position in (6, 7, 8, 9)]
    assert metadata[0].local_cos[:, 0].tolist() == angles


def test_queries_of_a_draft_are_counted_on_the_rank() -> None:
    """xLLM#1997: 2 requests of 4 tokens over 2 ranks; the last offset is never more than the rank's rows."""
    ranks = [draft_metadata(int32([0, 4, 8]), int32([9, 6]), 2, rank, 1, (1.0,))[0] for rank in (0, 1)]
    assert [local.local_query_start_loc.tolist() for local in ranks] == [[0, 4, 4], [0, 0, 4]]
    assert [local.local_seq_lens.tolist() for local in ranks] == [[9, 0], [0, 6]]


@pytest.mark.parametrize("cp_rank", range(4))
def test_rows_and_positions_are_equally_many(cp_rank: int) -> None:
    """sglang#19367: for the target's step and for every draft step."""
    for local in draft_metadata(int32([0, 5, 8]), int32([5, 9]), 4, cp_rank, 3, layer_frequencies(SMALL, 1)):
        assert local.local_cos.shape == local.local_sin.shape == (local.tokens_per_rank, SMALL.rope_head_dim // 2)
        assert local.local_end - local.local_start == local.tokens_per_rank


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """(cached tokens, new tokens, steps, seed)."""
    num_reqs = draw(st.integers(1, 3))
    cached = draw(st.lists(st.integers(0, 9), min_size=num_reqs, max_size=num_reqs))
    new = draw(st.lists(st.sampled_from([5, 1, 2, 0]), min_size=num_reqs, max_size=num_reqs))
    return cached, new, draw(num_steps_drawn), draw(seeds)


@fewer(2)
@given(drafts())
def test_a_draft_layer_over_ranks_is_one_device(case: tuple[list[int], list[int], int, int]) -> None:
    """The target's hidden rows in step 0, then the draft's own output as its next input, on ranks and on one device."""
    cached, new, num_steps, seed = case
    rng = np.random.default_rng(seed)
    cut = legal_cut(rng, 1)._replace(padding=0)
    config = config_for(rng, SMALL, cut)
    lengths = [a + b + (num_steps if b else 0) for a, b in zip(cached, new, strict=True)]
    world = world_of(rng, lengths, kind=WINDOW, config=config)
    prefix, before = world.step([0] * len(lengths), cached)
    options = {"compress_ratio": 1}
    cache = frozen(attention_layer(prefix, world.weights, world.cache, before, config, **options).cache)
    caches = [cache] * cut.cp_size

    x, batch = world.step(cached, [a + b for a, b in zip(cached, new, strict=True)])
    for loc, lens in draft_batches(batch.query_start_loc, batch.seq_lens, num_steps):
        batch = batch._replace(query_start_loc=loc, seq_lens=lens)
        due = attention_layer(x, world.weights, cache, batch, config, **options)
        partition = partition_tokens(loc, cut.cp_size, split=cut.split)
        inputs = [x] * cut.cp_size
        if cut.rows == "scattered":
            nan_row = np.full((1, x.shape[1]), np.nan)
            inputs = [np.concatenate([x, nan_row])[tokens] for tokens in partition.token_indices]
        out = layer_over_ranks(inputs, world.weights, caches, batch, config, **options, **cut.modes)
        for rank, tokens in enumerate(partition.token_indices):
            if cut.rows == "full":
                assert_double(out.outputs[rank], due.output)
            else:
                assert_double(out.outputs[rank][tokens >= 0], due.output[tokens[tokens >= 0]])
        cache, caches = frozen(due.cache), frozen(out.caches)
        ends = loc[1:][loc[1:] > loc[:-1]] - 1
        x = read_only(due.output[ends].copy())
