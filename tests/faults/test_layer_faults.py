"""Public faults that show in a whole layer: the smallest input that exposes each, on one device and over ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from dsacp_ref import layer as layer_module
from dsacp_ref.layer import attention_layer, empty_cache, layer_frequencies, layer_over_ranks
from dsacp_ref.spec import ContractError
from tests.compare import assert_double, assert_same
from tests.layer_strategies import (
    CSA,
    KINDS,
    SMALL,
    WINDOW,
    Cut,
    Kind,
    World,
    as_sets,
    frozen,
    one_device,
    oracle_layer,
    over_ranks,
    run,
    world_of,
)
from tests.maths_strategies import int32
from tests.oracles import attention, compressor, rope
from tests.strategies import EVERY_SPLIT, read_only

WIDE = replace(SMALL, num_heads=8, o_groups=8)


def with_null_rows(table: np.ndarray, count: int) -> np.ndarray:
    """The block table with rows that name no block."""
    return read_only(np.concatenate([table, np.full((count, table.shape[1]), -1, np.int32)]))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_graph_slot_across_a_rank_border_gives_zeros(kind: Kind) -> None:
    """vllm-project/vllm-ascend#12840: 8 ranks, 20 slots of 4 rows, 9 of them live; rank 6 cuts a padded slot."""
    world = world_of(np.random.default_rng(0), [4] * 9, kind=kind, config=WIDE)
    sizes = {"num_blocks": 40, "block_size": 4, "num_cmp_blocks": 40, "cmp_block_size": 3, "num_slots": 20}
    padded = world._replace(
        swa_table=with_null_rows(world.swa_table[:9], 11),
        cmp_table=with_null_rows(world.cmp_table[:9], 11),
        state_slots=int32(range(20)),
        cache=frozen(empty_cache(world.weights, **sizes)),
    )
    x, batch = padded.step([0] * 9, [4] * 9, idle=[4] * 11)
    assert len(x) == 80
    due = run(world, [[4] * 9]).outputs
    for split in ("contiguous", "round_robin", "zigzag"):
        output, topk, _ = over_ranks(padded, Cut(8, split))(x, batch, padded.cache)
        assert_double(output[:36], np.concatenate(due))
        assert not output[36:].any()
        assert (topk[36:] == -1).all()


def tied(lengths: list[int], index_topk: int) -> World:
    """A layer whose index weights are 0: every score of every entry is the same."""
    world = world_of(np.random.default_rng(1), lengths, kind=CSA, config=replace(SMALL, index_topk=index_topk))
    indexer = world.weights.indexer
    nothing = indexer._replace(weights_proj=np.zeros_like(indexer.weights_proj))
    return world._replace(weights=world.weights._replace(indexer=nothing))


@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_ties_do_not_depend_on_the_slice_a_row_is_in(split: str) -> None:
    """vllm-project/vllm-ascend#15053: 12 equal scores, 5 places, 8 queries at the end; lowest entries win."""
    world = tied([52], 5)
    whole = run(world, [[48], [4]])
    assert whole.topk[0][48:].tolist() == [[0, 1, 2, 3, 4]] * 4
    for steps in ([[44], [8]], [[52]], [[48], [1], [3]]):
        for cp_size in (2, 3):
            cut = Cut(cp_size, split, output_mode="replicated_weight")
            assert_same(run(world, steps, over_ranks(world, cut)).topk, whole.topk)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_short_request_between_two_long_ones_keeps_its_state(kind: Kind) -> None:
    """vllm-project/vllm-ascend#11807: new tokens [128, 0, 128]; request 1 stays as it was."""
    world = world_of(np.random.default_rng(2), [131, 5, 130], kind=kind)
    before = run(world, [[3, 4, 2]])
    for forward, cache in (
        (one_device(world), before.cache),
        (over_ranks(world, Cut(2, key_mode="gather_kv")), [before.cache] * 2),
        (over_ranks(world, Cut(2, key_mode="gather_compressed")), [before.cache] * 2),
    ):
        after = run(world, [[128, 0, 128]], forward, starts=[3, 4, 2], cache=cache).cache
        slot = world.state_slots[1]
        for each in after if isinstance(after, list) else [after]:
            for part in ("cmp_state", "index_state"):
                for new, old in zip(getattr(each, part), getattr(before.cache, part), strict=True):
                    assert_same(new[slot], old[slot])
        due = run(world, [[3, 4, 2], [128, 0, 128], [0, 1, 0]]).outputs[1]
        got = run(world, [[0, 1, 0]], forward, starts=[131, 4, 130], cache=after).outputs[1]
        assert_double(got, due[4:])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_idle_step_with_stale_tables_writes_nothing(kind: Kind) -> None:
    """vllm-project/vllm-ascend#9818: after a finished request, 0 real tokens and 4 padded ones on its old tables."""
    world = world_of(np.random.default_rng(3), [8], kind=kind)
    cache = run(world, [[8]]).cache
    stale = world.step([0], [4])[1]._replace(seq_lens=int32([0]))
    nan_rows = read_only(np.full((4, SMALL.hidden_size), np.nan))
    for forward, before in ((one_device(world), cache), (over_ranks(world, Cut(2)), [cache] * 2)):
        output, topk, after = forward(nan_rows, stale, before)
        assert not output.any()
        assert (topk == -1).all()
        assert_same(after, before)


def test_the_fourth_token_completes_the_first_entry() -> None:
    """GDzhu01/vllm-ascend-deepseekv4#76: prompts of 3 and of 4 tokens at ratio 4: no entry, then exactly one."""
    for length, entries in ((3, 0), (4, 1)):
        world = world_of(np.random.default_rng(4), [length], kind=CSA)
        got = run(world, [[length]])
        assert_double(got.outputs[0], oracle_layer(world, 0)[0])
        assert np.isfinite(got.cache.cmp_cache).all(axis=2).sum() == entries
        assert np.isfinite(got.cache.index_cache).all(axis=2).sum() == entries
        assert as_sets(got.topk[0]) == [set(), set(), set(), {0}][:length]


def test_a_query_attends_to_its_own_selection_only() -> None:
    """huggingface/transformers#45758: 8 tokens, one place; another entry 1 moves row 7 at most, never rows 0 to 6."""
    config = replace(SMALL, index_topk=1, window_size=1)
    world = world_of(np.random.default_rng(5), [8], kind=CSA, config=config)
    given = read_only(np.array([[-1]] * 3 + [[0]] * 4 + [[1]], np.int32))
    x, batch = world.step([0], [8])
    out = attention_layer(x, world.weights, world.cache, batch, config, compress_ratio=4, given_topk=given)
    changed = x.copy()
    changed[7] *= -2  # its own row, and the last token of entry 1
    after = attention_layer(changed, world.weights, world.cache, batch, config, compress_ratio=4, given_topk=given)
    assert_same(after.output[:7], out.output[:7])
    assert np.abs(after.output[7] - out.output[7]).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_padded_to_a_capture_size_are_nobody_s(kind: Kind) -> None:
    """ROCm/ATOM#1595: 342 real rows, 352 in the buffer, on one device and as 4 equal shares."""
    world = world_of(np.random.default_rng(6), [300, 42], kind=kind)
    due = np.concatenate(run(world, [[300, 42]]).outputs)
    x, batch = world.step([0, 0], [300, 42], beyond=10)
    output, topk, _ = one_device(world)(x, batch, world.cache)
    assert_double(output[:342], due)
    assert not output[342:].any()
    assert (topk[342:] == -1).all()
    options = {"compress_ratio": kind.ratio, "num_input_tokens": 352, "output_mode": "replicated_weight"}
    ranks = layer_over_ranks([x] * 4, world.weights, [world.cache] * 4, batch, SMALL, **options)
    assert [len(topk) for topk in ranks.topk_indices] == [88] * 4
    for output in ranks.outputs:
        assert_double(output[:342], due)
        assert not output[342:].any()


@pytest.mark.parametrize("key_mode", ["replicate", "gather_kv", "gather_compressed"])
def test_requests_without_new_tokens_complete_nothing(key_mode: str) -> None:
    """sgl-project/sglang#35848: new [5, 0, 3, 0] of [133, 0, 128, 0] at ratio 128: request 2 alone gets entry 0."""
    kind = Kind(128, False, False)
    world = world_of(np.random.default_rng(7), [133, 0, 128, 0], kind=kind, cmp_block=1)
    steps = [[128, 0, 125, 0], [5, 0, 3, 0]]
    due = run(world, steps)
    first = run(world, steps[:1], over_ranks(world, Cut(2, key_mode=key_mode))).cache
    got = run(world, steps[1:], over_ranks(world, Cut(2, key_mode=key_mode)), starts=[128, 0, 125, 0], cache=first)
    assert_double(got.outputs[2], due.outputs[2][125:])
    for before, after in zip(first, got.cache, strict=True):
        written = ~np.isnan(after.cmp_cache).any(axis=(1, 2)) & np.isnan(before.cmp_cache).any(axis=(1, 2))
        assert np.flatnonzero(written).tolist() == [int(world.cmp_table[2, 0])]


def test_global_query_offsets_on_local_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#38603: 10 tokens round robin over 4 ranks; offsets that end at 10 do not fit."""
    world = world_of(np.random.default_rng(8), [10], kind=WINDOW)
    cut = Cut(4, "round_robin", output_mode="replicated_weight")
    assert_double(run(world, [[10]], over_ranks(world, cut)).outputs[0], run(world, [[10]]).outputs[0])
    batch = world.step([0], [10])[1]

    def whole_batch(*_, **__):
        return layer_module.LocalExtents(batch.query_start_loc, batch.seq_lens, int32([0]))

    monkeypatch.setattr(layer_module, "local_extents", whole_batch)
    with pytest.raises(ContractError, match=r"^num_rows must be an int in"):
        run(world, [[10]], over_ranks(world, cut))


@pytest.mark.parametrize("last", [257, 65_537, 1_000_000])
def test_positions_and_angles_keep_all_their_bits(last: int) -> None:
    """vllm-project/vllm-ascend#9739: two tokens far out, the second sees both; a cast to bf16 turns 257 into 256."""
    config = replace(SMALL, window_size=2, rope_theta=10000.0)
    world = world_of(np.random.default_rng(9), [2], kind=WINDOW, config=config)
    block_size = 4096
    num_blocks = last // block_size + 1
    cache = empty_cache(
        world.weights, num_blocks=2, block_size=block_size, num_cmp_blocks=0, cmp_block_size=1, num_slots=1
    )
    table = np.full((1, num_blocks), -1, np.int32)
    table[0, -2:] = [0, 1][-min(num_blocks, 2) :]
    batch = world.step([0], [2])[1]._replace(
        seq_lens=int32([last + 1]), swa_block_table=read_only(table), state_indices=int32([0])
    )
    got = attention_layer(world.x[0], world.weights, cache, batch, config, compress_ratio=1).output[1]

    freqs, eps, w = [np.float32(f) for f in layer_frequencies(config, 1)], config.rms_norm_eps, world.weights
    normed = [compressor.rms_norm(w.wkv @ row, w.kv_norm, eps) for row in world.x[0]]
    rows = [rope.rotate(row, last - 1 + i, freqs) for i, row in enumerate(normed)]
    latent = compressor.rms_norm(w.wq_a @ world.x[0][1], w.q_norm, eps)
    heads = (w.wq_b @ latent).reshape(config.num_heads, config.head_dim)
    queries = [rope.rotate(compressor.rms_norm(head, None, eps), last, freqs) for head in heads]
    out, _ = attention.attend(queries, rows, w.attn_sink, 1 / math.sqrt(config.head_dim))
    back = np.array([rope.rotate_back(head, last, freqs) for head in out]).reshape(config.o_groups, -1)
    assert_double(got, w.wo_b @ np.concatenate([w.wo_a[group] @ part for group, part in enumerate(back)]))
