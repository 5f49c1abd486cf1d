"""A layer over ranks is the layer on one device: every split, every choice of what travels, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from dsacp_ref import layer as layer_module
from dsacp_ref.exchange import all_reduce, gathered_in_order
from dsacp_ref.extents import LocalExtents
from dsacp_ref.layer import (
    LayerCache,
    attention_layer,
    head_parallel_layer,
    layer_over_ranks,
    share_of_output,
    uses_context_parallel,
)
from dsacp_ref.partition import partition_tokens
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_double, assert_same
from tests.layer_checks import assert_ranks_equal_one_device
from tests.layer_strategies import (
    CSA,
    EVERY_KIND,
    KINDS,
    POOLING_SPLITS,
    SMALL,
    WINDOW,
    Cut,
    Kind,
    Run,
    World,
    as_sets,
    frozen,
    over_ranks,
    rolled_back,
    run,
    weights_of,
    world_of,
    worlds_over_ranks,
)
from tests.maths_strategies import int32, seeds
from tests.strategies import Batch, batches, fewer, read_only

ROWS = ("full", "scattered")
KEY_MODES = ("replicate", "gather_hidden", "gather_kv", "gather_compressed")
OUTPUT_MODES = ("all_to_all", "gather_weight", "replicated_weight")


@fewer(2)
@given(worlds_over_ranks(), st.lists(st.integers(1, 4), max_size=2))
def test_ranks_equal_one_device(cases: list[tuple[World, list[list[int]], Cut]], idle: list[int]) -> None:
    for world, steps, cut in cases:
        note(repr(cut))
        assert_ranks_equal_one_device(world, steps, cut, tuple(idle))


# --- every combination, legal or not ---


def refusal(cut: Cut, ratio: int, num_heads: int, o_groups: int) -> str | None:
    """Why a combination does not work, or None, from the table of design.md."""
    allowed = {"replicate": ["full"], "gather_hidden": ["scattered"]}.get(cut.key_mode, ["full", "scattered"])
    if cut.rows not in allowed:
        why = {"replicate": "no rank has all hidden rows", "gather_hidden": "there is nothing to gather"}[cut.key_mode]
        use = {"replicate": "gather_hidden", "gather_hidden": "replicate"}[cut.key_mode]
        return (
            f"key_mode must not be '{cut.key_mode}' when rows is '{cut.rows}', because {why}, "
            f"got '{cut.key_mode}'; use key_mode='{use}'"
        )
    pooled_by_rank = cut.split in POOLING_SPLITS or ratio == 1
    if cut.split.startswith("round_robin_page("):
        pooled_by_rank = int(cut.split[17:-1]) % ratio == 0
    if cut.key_mode == "gather_compressed" and not pooled_by_rank:
        return (
            f"split must be 'round_robin_page(n)' with n a multiple of compress_ratio {ratio}, or contiguous or "
            f"zigzag, when key_mode is 'gather_compressed', got '{cut.split}'; "
            f"use split='round_robin_page({ratio})' or key_mode='gather_kv'"
        )
    if cut.output_mode == "all_to_all" and (num_heads % cut.cp_size != 0 or o_groups % cut.cp_size != 0):
        return (
            f"cp_size must divide num_heads {num_heads} and o_groups {o_groups} when output_mode is 'all_to_all', "
            f"got {cut.cp_size}; use output_mode='gather_weight' or 'replicated_weight'"
        )
    return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"ratio{kind.ratio}")
@pytest.mark.parametrize("split", [*POOLING_SPLITS, "round_robin", "round_robin_page(4)", "round_robin_page(8)"])
def test_every_combination_works_or_is_refused_by_name(kind: Kind, split: str) -> None:
    """A chunk that ends inside a window, then one token of one request and a chunk of the other."""
    config = replace(SMALL, num_heads=6, o_groups=3)
    world = world_of(np.random.default_rng(kind.ratio), [22, 13], kind=kind, config=config)
    steps = [[21, 6], [1, 7]]
    for cp_size in (3, 4):
        for rows in ROWS:
            for key_mode in KEY_MODES:
                for output_mode in OUTPUT_MODES:
                    cut = Cut(cp_size, split, rows, key_mode, output_mode)
                    text = refusal(cut, kind.ratio, 6, 3)
                    if text is None:
                        assert_ranks_equal_one_device(world, steps, cut)
                    else:
                        with pytest.raises(UnsupportedError, match=f"^{re.escape(text)}$"):
                            run(world, steps, over_ranks(world, cut))


@pytest.mark.slow
@pytest.mark.parametrize("key_mode", ["replicate", "gather_kv", "gather_compressed"])
@pytest.mark.parametrize("cp_size", [2, 5, 8])
def test_three_tokens_over_more_ranks(cp_size: int, key_mode: str) -> None:
    """vllm-ascend#17097: ranks without queries take part, in the first step and in those that follow."""
    config = replace(SMALL, num_heads=cp_size, o_groups=cp_size)
    for kind in EVERY_KIND:
        world = world_of(np.random.default_rng(0), [8], kind=kind, config=config)
        assert_ranks_equal_one_device(world, [[3], [1], [0], [4]], Cut(cp_size, key_mode=key_mode))


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
def test_a_step_without_tokens_over_ranks(kind: Kind) -> None:
    for lengths, idle in (([], ()), ([0, 0], ()), ([0], (3,))):
        world = world_of(np.random.default_rng(1), lengths, kind=kind, config=replace(SMALL, num_heads=2))
        for cut in (Cut(2), Cut(2, "zigzag", "scattered", "gather_kv"), Cut(2, key_mode="gather_compressed")):
            got = run(world, [lengths], over_ranks(world, cut), idle=idle)
            assert_same(got.cache, [world.cache] * 2)


# --- one rank is one device, bit for bit ---


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("split", ["contiguous", "contiguous_request"])
def test_one_rank_is_one_device_bit_for_bit(kind: Kind, dtype: type, split: str) -> None:
    world = world_of(np.random.default_rng(2), [40, 0, 9], kind=kind, dtype=dtype)
    steps = [[33, 0, 2], [1, 0, 1], [6, 0, 6]]
    due = run(world, steps)
    for rows, key_mode, output_mode in (
        ("full", "replicate", "all_to_all"),
        ("full", "replicate", "replicated_weight"),
        ("scattered", "gather_hidden", "all_to_all"),
        ("full", "gather_kv", "all_to_all"),
        ("scattered", "gather_compressed", "replicated_weight"),
    ):
        got = run(world, steps, over_ranks(world, Cut(1, split, rows, key_mode, output_mode)))
        assert_same(got.outputs, due.outputs)
        assert_same(got.topk, due.topk)
        assert_same(got.cache, [due.cache])


def by_heads(world: World, cp_size: int):
    def forward(x: np.ndarray, batch, caches):
        caches = [world.cache] * cp_size if isinstance(caches, LayerCache) else caches
        out = head_parallel_layer(x, world.weights, caches, batch, world.config, compress_ratio=world.kind.ratio)
        for rank in range(cp_size):
            assert_same(out.outputs[rank], out.outputs[0])
            assert_same(out.topk_indices[rank], out.topk_indices[0])
        return out.outputs[0], out.topk_indices[0], frozen(out.caches)

    return forward


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_a_share_of_the_heads_on_every_rank_is_one_device(kind: Kind, cp_size: int) -> None:
    """Pure decode, and prefill without context parallelism, run so; one rank gives the same bits."""
    config = replace(SMALL, num_heads=2 * cp_size, o_groups=cp_size)
    world = world_of(np.random.default_rng(3), [21, 10], kind=kind, config=config)
    steps = [[18, 9], [1, 1], [1, 0], [1, 0]]
    due, got = run(world, steps, idle=(2,)), run(world, steps, by_heads(world, cp_size), idle=(2,))
    for mine, theirs in zip(got.outputs, due.outputs, strict=True):
        assert_double(mine, theirs)
    assert_same(got.topk, due.topk)
    assert_same(got.cache, [due.cache] * cp_size)
    if cp_size == 1:
        assert_same(got.outputs, due.outputs)


def test_prefill_by_tokens_then_decode_by_heads() -> None:
    """The caches that context parallelism leaves serve decode on any rank's heads."""
    for kind in EVERY_KIND:
        world = world_of(np.random.default_rng(4), [17, 12], kind=kind)
        due = run(world, [[14, 11], [1, 1], [2, 0]])
        for key_mode in ("replicate", "gather_kv", "gather_compressed"):
            prefill = run(world, [[14, 11]], over_ranks(world, Cut(2, "zigzag", key_mode=key_mode)))
            decode = run(world, [[1, 1], [2, 0]], by_heads(world, 2), starts=[14, 11], cache=prefill.cache)
            for request, start in enumerate((14, 11)):
                assert_double(decode.outputs[request], due.outputs[request][start:])
                assert_same(decode.topk[request], due.topk[request][start:])


# --- the proposal's criterion ---


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, nearest even, widened again."""
    bits = x.astype(np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)


def rounded(value):
    """Weights in bfloat16."""
    if isinstance(value, np.ndarray):
        return to_bf16(value)
    return None if value is None else type(value)(*map(rounded, value))


def relative_error(mine: np.ndarray, due: np.ndarray) -> float:
    """Frobenius."""
    return float(np.linalg.norm(mine.astype(np.float64) - due) / np.linalg.norm(due))


BF16 = replace(
    SMALL,
    hidden_size=48,
    head_dim=24,
    rope_head_dim=8,
    q_lora_rank=32,
    o_lora_rank=16,
    window_size=16,
    index_topk=6,
)


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
@pytest.mark.parametrize("cp_size, split", [(2, "contiguous"), (2, "zigzag"), (4, "round_robin")])
def test_on_against_off_in_bf16_stays_below_one_percent(
    kind: Kind, cp_size: int, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, inputs and outputs in bfloat16, given the same selection. Global key lengths would not stay below."""
    rng = np.random.default_rng(5)
    config = replace(BF16, num_heads=8, o_groups=4)
    weights = rounded(weights_of(rng, config, kind, np.float32))
    x = [to_bf16(rng.standard_normal((length, config.hidden_size))) for length in (70, 41)]
    world = world_of(rng, [70, 41], kind=kind, config=config, dtype=np.float32, weights=weights, x=x)
    rows, batch = world.step([0, 0], world.lengths)
    off = attention_layer(rows, weights, world.cache, batch, config, compress_ratio=kind.ratio)
    options = {"compress_ratio": kind.ratio, "split": split}
    options["given_topk"] = off.topk_indices if kind.indexer else None

    def on() -> np.ndarray:
        out = layer_over_ranks([rows] * cp_size, weights, [world.cache] * cp_size, batch, config, **options)
        return to_bf16(out.outputs[0])

    assert relative_error(on(), to_bf16(off.output)) < 1e-2
    monkeypatch.setattr(layer_module, "local_extents", with_global_lengths(layer_module.local_extents))
    options["given_topk"] = None
    assert not relative_error(on(), to_bf16(off.output)) < 1e-2


def with_global_lengths(right):
    """Local queries against the whole request's key length: the fault that right alignment turns into wrong rows."""

    def wrong(query_start_loc, seq_lens, *args, **options) -> LocalExtents:
        extents = right(query_start_loc, seq_lens, *args, **options)
        whole = np.where(extents.request_indices >= 0, seq_lens[extents.request_indices], np.int32(0))
        return extents._replace(seqused_kv=whole)

    return wrong


# --- which steps use it ---


@given(batches(), st.sampled_from(["cp", "off"]), st.integers(1, 5))
def test_uses_context_parallel_request_by_request(batch: Batch, mixed: str, decode_query_len: int) -> None:
    prefills = decodes = 0
    for new, total in zip(batch.query_lens, batch.seq_lens, strict=True):
        if new == 0 or total == 0:
            continue
        if total > new and new <= decode_query_len:
            decodes += 1
        else:
            prefills += 1
    due = prefills > 0 if mixed == "cp" or decodes == 0 else False
    got = uses_context_parallel(batch.query_start_loc, batch.key_lens, mixed=mixed, decode_query_len=decode_query_len)
    assert got is due


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "cp", "off"),
    [
        ([6], [6], True, True),  # prefill
        ([6], [20], True, True),  # a later chunk
        ([1], [1], True, True),  # a prompt of one token
        ([1, 1], [9, 30], False, False),  # decode only
        ([6, 1], [6, 9], True, False),  # mixed
        ([1, 0, 6], [9, 5, 9], True, False),
        ([0, 0], [3, 4], False, False),  # nobody has queries
        ([4], [0], False, False),  # a padded slot is nobody
        ([1, 4], [9, 0], False, False),
        ([], [], False, False),
    ],
)
def test_uses_context_parallel_table(query_lens: list[int], seq_lens: list[int], cp: bool, off: bool) -> None:
    batch = Batch(query_lens, seq_lens)
    assert uses_context_parallel(batch.query_start_loc, batch.key_lens) is cp
    assert uses_context_parallel(batch.query_start_loc, batch.key_lens, mixed="cp") is cp
    assert uses_context_parallel(batch.query_start_loc, batch.key_lens, mixed="off") is off


# --- named cases ---


def test_queries_of_a_rank_see_their_own_past_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """xLLM#2097: 145 tokens over 2 ranks by request. Rank 0 has extent 73; the global 145 is seen."""
    config = replace(SMALL, window_size=128, index_topk=64)
    world = world_of(np.random.default_rng(7), [145], kind=CSA, config=config)
    cut = Cut(2, "contiguous_request")
    x, batch = world.step([0], [145])
    out = layer_over_ranks([x] * 2, world.weights, [world.cache] * 2, batch, config, compress_ratio=4, **cut.modes)
    assert as_sets(out.topk_indices[0])[0] == set()  # 18 entries with the global length
    assert as_sets(out.topk_indices[1])[0] == set(range(18))
    assert_ranks_equal_one_device(world, [[145]], cut)

    monkeypatch.setattr(layer_module, "local_extents", with_global_lengths(layer_module.local_extents))
    with pytest.raises(AssertionError):
        assert_ranks_equal_one_device(world, [[145]], cut)


def test_the_last_rank_chooses_among_all_entries() -> None:
    """xLLM#1997: 64 tokens over 2 ranks, more places than entries: each row has exactly what it sees."""
    config = replace(SMALL, index_topk=20)
    world = world_of(np.random.default_rng(8), [64], kind=CSA, config=config)
    x, batch = world.step([0], [64])
    out = layer_over_ranks([x] * 2, world.weights, [world.cache] * 2, batch, config, compress_ratio=4)
    assert as_sets(out.topk_indices[1]) == [set(range((position + 1) // 4)) for position in range(32, 64)]


def test_heads_are_summed_over_the_same_tokens() -> None:
    """xLLM#2097: after the exchange every rank has its heads of all tokens; summing before it mixes tokens."""
    rng = np.random.default_rng(9)
    world = world_of(rng, [6], kind=WINDOW)
    outs = [rng.standard_normal((3, SMALL.num_heads, SMALL.head_dim)) for _ in range(2)]
    due = layer_module.projected_output(np.concatenate(outs), world.weights.wo_a, world.weights.wo_b)
    partition = partition_tokens(int32([0, 6]), 2)
    right = layer_module.outputs_of_ranks(outs, world.weights, partition, "full", "all_to_all", 6)
    assert_double(right[0], due)
    own = [out[:, 2 * rank : 2 * rank + 2] for rank, out in enumerate(outs)]
    wrong = all_reduce([share_of_output(out, world.weights, rank, 2) for rank, out in enumerate(own)])[0]
    assert not np.allclose(wrong, due[:3])
    assert not np.allclose(wrong, due[3:])


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
def test_every_output_route_gives_the_same_rows_and_publishes_the_same_keys(kind: Kind) -> None:
    """vllm-ascend#12683: a role that takes another route, producer or not, changes neither outputs nor caches."""
    config = replace(SMALL, num_heads=8, o_groups=4)
    world = world_of(np.random.default_rng(10), [19, 7], kind=kind, config=config)
    steps = [[15, 7], [4, 0]]
    due = run(world, steps)
    for rows, key_mode in (("full", "replicate"), ("scattered", "gather_hidden")):
        runs: list[Run] = [
            run(world, steps, over_ranks(world, Cut(4, "zigzag", rows, key_mode, output_mode)))
            for output_mode in OUTPUT_MODES
        ]
        for each in [*runs, run(world, steps, by_heads(world, 4))]:
            for mine, theirs in zip(each.outputs, due.outputs, strict=True):
                assert_double(mine, theirs)
            assert_same(each.cache, [due.cache] * 4)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("output_mode", OUTPUT_MODES)
@pytest.mark.parametrize("split", ["contiguous", "round_robin"])
def test_the_sink_counts_once_however_the_keys_lie(split: str, output_mode: str, cp_size: int) -> None:
    """vllm#43809: two keys of logit 0 with values 1 and 3, sink logit 0, one key made by each rank: 4 / 3."""
    config = replace(SMALL, num_heads=2, o_groups=2, o_lora_rank=1, head_dim=4, rope_head_dim=2, hidden_size=4)
    blank = world_of(np.random.default_rng(11), [2], kind=WINDOW, config=config)
    value = 2.0  # the norm leaves a mean square of 1, so a channel reaches 2, and with this weight 4
    weights = blank.weights._replace(
        wq_b=np.zeros_like(blank.weights.wq_b),
        attn_sink=np.zeros(2),
        wkv=np.eye(4),
        kv_norm=np.full(4, value),
        wo_a=np.array([[[1.0, 0, 0, 0]], [[1.0, 0, 0, 0]]]),
        wo_b=np.array([[1.0, 0], [0, 1.0], [0, 0], [0, 0]]),
    )
    x = [read_only(np.array([[0.5, np.sqrt(3.75), 0, 0], [1.5, np.sqrt(1.75), 0, 0]]))]
    world = blank._replace(weights=weights, x=x)
    got = run(world, [[2]], over_ranks(world, Cut(cp_size, split, output_mode=output_mode)))
    assert np.allclose(got.outputs[0], [[0.5, 0.5, 0, 0], [4 / 3, 4 / 3, 0, 0]], atol=1e-5)


@fewer(3)
@given(worlds_over_ranks(spare_rows=6), seeds)
def test_rejected_tokens_were_never_there_on_any_rank(
    cases: list[tuple[World, list[list[int]], Cut]], seed: int
) -> None:
    """Up to as many as the rings can spare, of a step of any length."""
    rng = np.random.default_rng(seed)
    for world, steps, cut in cases:
        note(repr(cut))
        due, forward = run(world, [world.lengths]), over_ranks(world, cut)
        back = [int(rng.integers(0, min(6, new) + 1)) for new in steps[-1]]
        kept = [length - count for length, count in zip(world.lengths, back, strict=True)]
        keep = {int(slot): count for slot, count in zip(world.state_slots, kept, strict=False)}
        caches = [rolled_back(cache, keep, world.kind) for cache in run(world, steps, forward).cache]
        after = run(world, [back], forward, starts=kept, cache=caches)
        for request, start in enumerate(kept):
            assert_double(after.outputs[request], due.outputs[request][start:], f"request {request}")
            assert_same(after.topk[request], due.topk[request][start:])


@fewer(3)
@given(worlds_over_ranks(kinds=[CSA]))
def test_a_given_selection_goes_by_global_token(cases: list[tuple[World, list[list[int]], Cut]]) -> None:
    for world, _, cut in cases:
        note(repr(cut))
        x, batch = world.step([0] * len(world.x), world.lengths)
        one = (x, world.weights, world.cache, batch, world.config)
        own = attention_layer(*one, compress_ratio=4)
        reverse = read_only(own.topk_indices[:, ::-1].copy())
        due = attention_layer(*one, compress_ratio=4, given_topk=reverse)
        partition = partition_tokens(batch.query_start_loc, cut.cp_size, split=cut.split)
        inputs = [x] * cut.cp_size
        if cut.rows == "scattered":
            nan_row = np.full((1, x.shape[1]), np.nan)
            inputs = [np.concatenate([x, nan_row])[tokens] for tokens in partition.token_indices]
        caches = [world.cache] * cut.cp_size
        options = {"compress_ratio": 4, "given_topk": reverse, **cut.modes}
        out = layer_over_ranks(inputs, world.weights, caches, batch, world.config, **options)
        full = out.outputs[0] if cut.rows == "full" else gathered_in_order(out.outputs, partition)[0]
        assert_double(full, due.output)
        assert_same(gathered_in_order(out.topk_indices, partition)[0], reverse)
