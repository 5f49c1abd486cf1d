"""`dsacp_npu.mla_layer` gives what `dsacp_ref.mla_layer` gives: on one device and over ranks, with any cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsacp_npu.mla_layer
from dsacp_npu import backend
from dsacp_ref import mla_layer as ref
from dsacp_ref.mla import mla_frequencies
from dsacp_ref.partition import partition_tokens
from dsacp_ref.rope import rope_table
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_same, assert_same_selection, assert_within_budget, scoring_noise
from tests.maths_strategies import seeds
from tests.mirror.common import (
    WAYS,
    assert_runs_without_values,
    case,
    compare_floats,
    int32,
    on_device,
    to_numpy,
    to_torch,
)
from tests.mirror.common import untouched as unchanged
from tests.mla_strategies import (
    SMALL,
    Cut,
    World,
    oracle_config,
    oracle_layer,
    oracle_weights,
    plain_scores,
    poisoned,
    run,
    world_of,
    worlds,
)
from tests.strategies import EVERY_SPLIT, FLAT_SPLITS, fewer, read_only

Made = tuple[World, list[list[int]]]
CODES: dict[str, dict[str, bool]] = {"floats": {}, "int8": {"int8_index_cache": True}, "fp8": {"fp8": True}}
every_cache = pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
in_bytes = {"kv_lora_rank": 128}  # a whole group of FP8


def as_on_a_device() -> Any:
    """No tensor's values may be read, as if all lay on a device."""
    return patch("dsacp_npu._tensors.readable", lambda tensor: False)


def recoded(world: World, codes: dict[str, bool]) -> World:
    """The same world with another kind of cache, of NaN as well."""
    num_blocks, block_size = world.cache.latent_cache.shape[:2]
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "dtype": world.dtype.name}
    return world._replace(cache=poisoned(ref.empty_mla_cache(world.config, **sizes, **codes)))


def called(mirror: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The mirror's result; none of its inputs was written to, or the caches that it wrote into come back."""
    if not mirror.__name__.endswith("_"):
        return unchanged(mirror, args, kwargs)
    got, given_caches = mirror(*args, **kwargs), args[2]
    if isinstance(given_caches, list):
        assert all(mine is given_cache for mine, given_cache in zip(got.caches, given_caches, strict=True))
    else:
        assert got.cache is given_caches
    return got


# --- one device ---


def beside(world: World, mirror: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A step on one device in both packages, compared in all it gives; the run goes on with the reference's cache."""

    def forward(x: np.ndarray, batch: ref.MLABatch, cache: ref.MLACache) -> tuple[Any, ...]:
        args = (x, world.weights, cache, batch, world.config)
        want = ref.mla_attention_layer(*args)
        compare_floats(called(mirror, to_torch(args), options), want, want, "mla_layer")
        return want.output, want.topk_indices, want.cache

    return forward


@fewer(2)
@given(made=worlds(), idle=st.sampled_from([(), (2,), (1, 1)]), beyond=st.integers(0, 2))
def test_mla_attention_layer_mirrors(made: Made, idle: tuple[int, ...], beyond: int) -> None:
    """Chunked prefill, decode, padded graph slots and rows of nobody."""
    world, steps = made
    run(world, steps, beside(world, dsacp_npu.mla_layer.mla_attention_layer), idle=idle, beyond=beyond)


@fewer(4)
@given(made=worlds(**in_bytes), codes=st.sampled_from(list(CODES.values())))
def test_mla_attention_layer_mirrors_as_on_a_device(made: Made, codes: dict[str, bool]) -> None:
    world = recoded(made[0], codes)
    with as_on_a_device():
        run(world, made[1], beside(world, dsacp_npu.mla_layer.mla_attention_layer), idle=(1,), beyond=1)


@fewer(3)
@given(made=worlds(**in_bytes), codes=st.sampled_from(list(CODES.values())))
def test_mla_attention_layer_in_place_mirrors(made: Made, codes: dict[str, bool]) -> None:
    world = recoded(made[0], codes)
    run(world, made[1], beside(world, dsacp_npu.mla_layer.mla_attention_layer_), idle=(1,))


@pytest.mark.parametrize("codes", [CODES["int8"], CODES["fp8"]], ids=["int8", "fp8"])
@fewer(3)
@given(made=worlds(**in_bytes))
def test_mla_attention_layer_with_codes_mirrors(codes: dict[str, bool], made: Made) -> None:
    """Every code and scale, and every byte that was not written."""
    world = recoded(made[0], codes)
    run(world, made[1], beside(world, dsacp_npu.mla_layer.mla_attention_layer), idle=(2,), beyond=1)


def given_for(rng: np.random.Generator, world: World) -> np.ndarray:
    """A selection for all tokens in one step, in any order, -1 anywhere."""
    positions = [p for length in world.lengths for p in range(length)]
    topk = np.full((len(positions), world.config.index_topk), -1, np.int32)
    for row, p in zip(topk, positions, strict=True):
        chosen = rng.permutation(p + 1)[: rng.integers(0, len(row) + 1)]
        row[rng.permutation(len(row))[: len(chosen)]] = chosen
    return read_only(topk)


@fewer(4)
@given(made=worlds(max_steps=1, **in_bytes), codes=st.sampled_from(list(CODES.values())), seed=seeds)
def test_a_given_selection_mirrors(made: Made, codes: dict[str, bool], seed: int) -> None:
    world = recoded(made[0], codes)
    topk = given_for(np.random.default_rng(seed), world)
    x, batch = world.step([0] * len(world.x), world.lengths)
    args = (x, world.weights, world.cache, batch, world.config)
    want = ref.mla_attention_layer(*args, given_topk=topk)
    got = called(dsacp_npu.mla_layer.mla_attention_layer, to_torch(args), {"given_topk": to_torch(topk)})
    compare_floats(got, want, want, "mla_layer")
    assert_same(got.topk_indices, topk)


def test_an_explicit_torch_backend_is_the_same() -> None:
    world = world_of(np.random.default_rng(0), [13])
    run(world, [[9], [4]], beside(world, dsacp_npu.mla_layer.mla_attention_layer, backend=backend.get("torch")))


@every_cache
def test_empty_mla_cache_mirrors(codes: dict[str, bool]) -> None:
    config = replace(SMALL, **in_bytes)
    for dtype in ("float32", "float64"):
        options = {"num_blocks": 3, "block_size": 2, "dtype": dtype, **codes}
        assert_same(
            dsacp_npu.mla_layer.empty_mla_cache(config, **options), to_torch(ref.empty_mla_cache(config, **options))
        )


# --- short dtypes ---


def short(world: World, dtype: str) -> World:
    """The world with numbers that a dtype holds."""
    weights, x = to_numpy(to_torch((world.weights, world.x), dtype), "float64")
    return world._replace(weights=weights, x=x)


def plain_outputs(x: torch.Tensor, w: Any, config: Any, topk: np.ndarray, *, absorbed: bool) -> torch.Tensor:
    """One request from position 0 over the tokens chosen, as anybody writes it in torch, all in the dtype of x."""
    rank, nope = config.kv_lora_rank, config.nope_head_dim
    cos, sin = (part.to(x.dtype) for part in to_torch(rope_table(int32(*range(len(x))), mla_frequencies(config))))

    def normed(rows: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return rows * (rows.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * gain

    def turned(rows: torch.Tensor) -> torch.Tensor:
        c, s = (part.reshape(len(x), *(1,) * (rows.ndim - 2), -1) for part in (cos, sin))
        even, odd = rows[..., 0::2], rows[..., 1::2]
        return torch.stack([even * c - odd * s, odd * c + even * s], dim=-1).flatten(-2)

    both = x @ w.wkv_a.T
    latents, rope_keys = normed(both[:, :rank], w.kv_norm), turned(both[:, rank:])
    q = (normed(x @ w.wq_a.T, w.q_norm) @ w.wq_b.T).reshape(len(x), config.num_heads, -1)
    q_nope, q_rope = q[..., :nope].transpose(0, 1), turned(q[..., nope:]).transpose(0, 1)
    logits = q_nope @ w.w_uk @ latents.T if absorbed else q_nope @ (latents @ w.w_uk.transpose(1, 2)).transpose(1, 2)
    chosen = torch.zeros(len(x), len(x), dtype=torch.bool)
    for query, row in enumerate(topk.tolist()):
        chosen[query, [token for token in row if token >= 0]] = True
    logits = (logits + q_rope @ rope_keys.T) * config.softmax_scale
    weights = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
    w_uv = w.w_uv.transpose(1, 2)
    values = weights @ latents @ w_uv if absorbed else weights @ (latents @ w_uv)
    return values.transpose(0, 1).reshape(len(x), -1) @ w.wo.T


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@given(seed=seeds, lengths=st.lists(st.integers(8, 20), min_size=1, max_size=2), cut=st.integers(1, 7))
@fewer(4)
def test_short_dtypes_stay_within_the_budget_given_the_selection(
    dtype: str, seed: int, lengths: list[int], cut: int
) -> None:
    """In two steps, so that the second one attends to rows that the cache has rounded."""
    world = short(world_of(np.random.default_rng(seed), lengths), dtype)
    x, batch = world.step([0] * len(lengths), lengths)
    exact = ref.mla_attention_layer(x, world.weights, world.cache, batch, world.config)
    weights, parts = to_torch(world.weights, dtype), np.cumsum([0, *lengths])
    plain = [
        torch.cat(
            [
                plain_outputs(to_torch(rows, dtype), weights, world.config, exact.topk_indices[a:b], absorbed=absorbed)
                for rows, a, b in zip(world.x, parts, parts[1:], strict=False)
            ]
        )
        for absorbed in (False, True)
    ]
    cache, got = to_torch(world.cache, dtype), torch.empty(x.shape, dtype=plain[0].dtype)
    for starts, ends in (([0] * len(lengths), [cut] * len(lengths)), ([cut] * len(lengths), lengths)):
        tokens = np.concatenate([np.arange(a, b) + at for a, b, at in zip(starts, ends, parts, strict=False)])
        rows, batch = world.step(starts, ends)
        args = (to_torch(rows, dtype), weights, cache, to_torch(batch), world.config)
        out = called(
            dsacp_npu.mla_layer.mla_attention_layer, args, {"given_topk": to_torch(exact.topk_indices[tokens])}
        )
        assert out.output.dtype == out.cache.latent_cache.dtype == got.dtype
        got[tokens], cache = out.output, out.cache
    assert_within_budget(got, exact.output, plain, dtype)


@given(seed=seeds, length=st.integers(1, 20))
@fewer(4)
def test_float32_chooses_the_same_but_for_near_ties(seed: int, length: int) -> None:
    world = world_of(np.random.default_rng(seed), [length], dtype=np.float32)
    x, batch = world.step([0], [length])
    got = dsacp_npu.mla_layer.mla_attention_layer(*to_torch((x, world.weights, world.cache, batch)), world.config)
    due = oracle_layer(world, 0)
    exact = np.full((length, length), -np.inf)
    for p, scores in enumerate(due.scores):
        exact[p, : p + 1] = scores
    noise = scoring_noise(exact, plain_scores(world.x[0], oracle_weights(world.weights), oracle_config(world.config)))
    assert_same_selection(got.topk_indices, int32(*np.ravel(due.chosen)).reshape(length, -1), exact, noise)


# --- over ranks ---


def step_of(
    world: World, cut: Cut, x: np.ndarray, batch: ref.MLABatch, caches: list[ref.MLACache]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one step over ranks; rows that belong to no token are NaN."""
    num_rows = int(batch.query_start_loc[-1]) + cut.padding if cut.padding else None
    partition = partition_tokens(batch.query_start_loc, cut.cp_size, split=cut.split, num_input_tokens=num_rows)
    with_nan = np.concatenate([x, np.full((1, x.shape[1]), np.nan, x.dtype)])
    shards = [read_only(with_nan[tokens]) for tokens in partition.token_indices]
    kwargs = {"split": cut.split, "num_input_tokens": num_rows, "kept_keys": cut.kept_keys}
    return (shards, world.weights, caches, batch, world.config), kwargs


def ranks_beside(world: World, cut: Cut, mirror: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A step over ranks in both packages, compared in all it gives."""

    def forward(x: np.ndarray, batch: ref.MLABatch, caches: Any) -> tuple[Any, ...]:
        caches = [world.cache] * cut.cp_size if isinstance(caches, ref.MLACache) else caches
        args, kwargs = step_of(world, cut, x, batch, caches)
        want = ref.mla_over_ranks(*args, **kwargs)
        compare_floats(called(mirror, to_torch(args), {**kwargs, **options}), want, want, "mla_over_ranks")
        num_tokens = int(batch.query_start_loc[-1])
        nobody = np.full((num_tokens, world.config.index_topk), -1, np.int32)
        return np.zeros((num_tokens, x.shape[1])), nobody, want.caches

    return forward


@st.composite
def worlds_over_ranks(draw: st.DrawFn) -> tuple[World, list[list[int]], Cut]:
    """A world with any kind of cache, and how it is cut; ``"own"`` where nobody has earlier tokens."""
    codes = draw(st.sampled_from(list(CODES.values())))
    world, steps = draw(worlds(max_steps=2, max_reqs=3, **(in_bytes if "fp8" in codes else {})))
    cut = Cut(draw(st.integers(1, 5)), draw(st.sampled_from(EVERY_SPLIT)))
    if cut.split in FLAT_SPLITS:
        cut = cut._replace(padding=draw(st.integers(0, 3)))
    if len(steps) == 1:
        cut = cut._replace(kept_keys=draw(st.sampled_from(["all", "own"])))
    return recoded(world, codes), steps, cut


@fewer(2)
@given(made=worlds_over_ranks())
def test_mla_over_ranks_mirrors(made: tuple[World, list[list[int]], Cut]) -> None:
    world, steps, cut = made
    run(world, steps, ranks_beside(world, cut, dsacp_npu.mla_layer.mla_over_ranks), idle=(1,))


@fewer(3)
@given(made=worlds_over_ranks())
def test_mla_over_ranks_in_place_mirrors(made: tuple[World, list[list[int]], Cut]) -> None:
    world, steps, cut = made
    mirror, torch_backend = dsacp_npu.mla_layer.mla_over_ranks_, backend.get("torch")
    run(world, steps, ranks_beside(world, cut, mirror, backend=torch_backend))


@fewer(4)
@given(made=worlds_over_ranks(), seed=seeds)
def test_a_given_selection_over_ranks_mirrors(made: tuple[World, list[list[int]], Cut], seed: int) -> None:
    world, _, cut = made
    topk = given_for(np.random.default_rng(seed), world)
    x, batch = world.step([0] * len(world.x), world.lengths)
    args, kwargs = step_of(world, cut, x, batch, [world.cache] * cut.cp_size)
    want = ref.mla_over_ranks(*args, **kwargs, given_topk=topk)
    got = called(dsacp_npu.mla_layer.mla_over_ranks, to_torch(args), {**kwargs, "given_topk": to_torch(topk)})
    compare_floats(got, want, want, "mla_over_ranks")


@fewer(4)
@given(made=worlds_over_ranks(), dtype=st.sampled_from(["bfloat16", "float16"]))
def test_context_parallelism_changes_short_outputs_by_less_than_a_hundredth(
    made: tuple[World, list[list[int]], Cut], dtype: str
) -> None:
    """All tokens in one step, given the selection of one device."""
    world, _, cut = made
    coded = world.cache.rope_cache is None or isinstance(world.cache.index_cache, tuple)
    cache = to_torch(world.cache) if coded else to_torch(world.cache, dtype)
    if coded and cache.rope_cache is not None:
        floats = (to_torch(part, dtype) for part in (world.cache.latent_cache, world.cache.rope_cache))
        cache = type(cache)(*floats, cache.index_cache)
    x, batch = world.step([0] * len(world.x), world.lengths)
    weights, here = to_torch(world.weights, dtype), to_torch(batch)
    off = dsacp_npu.mla_layer.mla_attention_layer(to_torch(x, dtype), weights, cache, here, world.config)
    args, kwargs = step_of(world, cut, x, batch, [])
    shards = to_torch(args[0], dtype)
    on = dsacp_npu.mla_layer.mla_over_ranks(
        shards, weights, [cache] * cut.cp_size, here, world.config, **kwargs, given_topk=off.topk_indices
    )
    partition = partition_tokens(
        batch.query_start_loc, cut.cp_size, split=cut.split, num_input_tokens=kwargs["num_input_tokens"]
    )
    for tokens, output in zip(partition.token_indices, on.outputs, strict=True):
        mine, due = output[torch.from_numpy(tokens >= 0)].double(), off.output[torch.from_numpy(tokens[tokens >= 0])]
        assert output.isfinite().all()
        assert (mine - due.double()).norm() <= 1e-2 * due.double().norm()


@pytest.mark.parametrize("what", ["query_start_loc", "seq_lens"])
def test_the_lengths_of_a_step_over_ranks_must_be_on_the_host(what: str) -> None:
    world = world_of(np.random.default_rng(0), [5])
    args, _ = step_of(world, Cut(2), *world.step([0], [5]), [world.cache] * 2)
    shards, weights, caches, batch, config = to_torch(args)
    batch = batch._replace(**{what: getattr(batch, what).to("meta")})
    with pytest.raises(UnsupportedError, match=rf"^batch\.{what} must be a CPU tensor, got a tensor on meta"):
        dsacp_npu.mla_layer.mla_over_ranks(shards, weights, caches, batch, config)


# --- without values ---


def small_world(codes: dict[str, bool]) -> World:
    """Two requests, and any kind of cache."""
    return world_of(np.random.default_rng(2), [9, 5], config=replace(SMALL, **in_bytes), **codes)


@pytest.mark.parametrize("way", WAYS)
@every_cache
def test_mla_attention_layer_runs_without_values(codes: dict[str, bool], way: str) -> None:
    world = small_world(codes)
    x, batch = world.step([0, 0], [9, 5], beyond=1)
    call = case("mla_attention_layer", x, world.weights, world.cache, batch, world.config)
    assert_runs_without_values("mla_layer", way, call)


@pytest.mark.slow
@pytest.mark.parametrize("kept_keys", ["all", "own"])
@every_cache
def test_ranks_run_on_a_device_without_values(codes: dict[str, bool], kept_keys: str) -> None:
    """Lengths on the host, all else where nothing can be read: shapes alone are enough."""
    world = small_world(codes)
    for split in EVERY_SPLIT:
        args, kwargs = step_of(world, Cut(2, split, 0, kept_keys), *world.step([0, 0], [9, 5]), [world.cache] * 2)
        shards, weights, caches, batch, config = to_torch(args)
        want = dsacp_npu.mla_layer.mla_over_ranks(shards, weights, caches, batch, config, **kwargs)
        elsewhere = (on_device(value, "meta") for value in (shards, weights, caches))
        there = dsacp_npu.mla_layer.mla_over_ranks(*elsewhere, batch, config, **kwargs)
        assert [out.shape for out in there.outputs] == [out.shape for out in want.outputs]
        assert {out.device.type for out in (*there.outputs, *there.topk_indices)} == {"meta"}
