"""`dsacp_npu.layer` gives what `dsacp_ref.layer` gives: on one device, by heads, and over ranks in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsacp_npu.layer
from dsacp_npu import backend
from dsacp_ref import layer as ref
from dsacp_ref.config import v4_flash
from dsacp_ref.partition import partition_tokens
from tests.compare import assert_same
from tests.layer_strategies import (
    CSA,
    EVERY_KIND,
    HCA,
    KINDS,
    Cut,
    World,
    legal_cut,
    run,
    world_of,
    worlds,
    worlds_over_ranks,
)
from tests.maths_strategies import seeds
from tests.mirror.common import (
    WAYS,
    Case,
    assert_mirrors,
    assert_refusal_mirrors,
    assert_runs_without_values,
    case,
    compare_floats,
    int32,
    on_device,
    tensors_of,
    to_torch,
)
from tests.mirror.common import untouched as unchanged
from tests.strategies import batches, cp_sizes, fewer

REAL = [pytest.param(kind, id=f"ratio {kind.ratio}") for kind in KINDS]


def as_on_a_device() -> Any:
    """No tensor's values may be read, as if all lay on a device."""
    return patch("dsacp_npu._tensors.readable", lambda tensor: False)


def int8_world(world: World) -> World:
    """The same world with index keys in int8."""
    index_cache = ref.QuantizedVectors(
        np.zeros(world.cache.index_cache.shape, np.int8), np.full(world.cache.index_cache.shape[:2], np.nan, np.float16)
    )
    return world._replace(cache=world.cache._replace(index_cache=index_cache))


def untouched(mirror: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The mirror's result; none of its inputs was written to, unless it is made to write into its caches."""
    in_place = mirror.__name__.startswith("in_place") or mirror.__name__.endswith("_")
    return mirror(*args, **kwargs) if in_place else unchanged(mirror, args, kwargs)


# --- one device ---


def beside(world: World, mirror: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A step on one device in both packages, compared in all it gives; the run goes on with the reference's cache."""

    def forward(x: np.ndarray, batch: ref.LayerBatch, cache: ref.LayerCache) -> tuple[Any, ...]:
        args = (x, world.weights, cache, batch, world.config)
        want = ref.attention_layer(*args, compress_ratio=world.kind.ratio)
        got = untouched(mirror, to_torch(args), {"compress_ratio": world.kind.ratio, **options})
        compare_floats(got, want, want, "attention_layer")
        return want.output, want.topk_indices, want.cache

    return forward


@fewer(2)
@given(made=worlds(kinds=EVERY_KIND, spare_rows=2), data=st.data())
def test_attention_layer_mirrors(made: tuple[World, list[list[int]]], data: st.DataObject) -> None:
    """Chunked prefill, decode, padded graph slots and rows of nobody."""
    world, steps = made
    idle = data.draw(st.sampled_from([(), (2,)]))
    run(world, steps, beside(world, dsacp_npu.layer.attention_layer), idle=idle, beyond=data.draw(st.integers(0, 2)))


@fewer(4)
@given(made=worlds(kinds=EVERY_KIND))
def test_attention_layer_mirrors_as_on_a_device(made: tuple[World, list[list[int]]]) -> None:
    world, steps = made
    with as_on_a_device():
        run(world, steps, beside(world, dsacp_npu.layer.attention_layer), idle=(1,), beyond=1)


@fewer(4)
@given(made=worlds(kinds=EVERY_KIND))
def test_attention_layer_in_place_mirrors(made: tuple[World, list[list[int]]]) -> None:
    world, steps = made

    def in_place(x: Any, weights: Any, cache: Any, *rest: Any, **options: Any) -> Any:
        out = dsacp_npu.layer.attention_layer_(x, weights, cache, *rest, **options)
        assert out.cache is cache
        return out

    run(world, steps, beside(world, in_place), idle=(1,))


@fewer(4)
@given(made=worlds(kinds=[CSA], window_size=3))
def test_attention_layer_with_int8_index_keys_mirrors(made: tuple[World, list[list[int]]]) -> None:
    world, steps = int8_world(made[0]), made[1]
    run(world, steps, beside(world, dsacp_npu.layer.attention_layer))


def test_an_explicit_torch_backend_is_the_same() -> None:
    world = world_of(np.random.default_rng(0), [13])
    run(world, [[9], [4]], beside(world, dsacp_npu.layer.attention_layer, backend=backend.get("torch")))


# --- over ranks ---


def ranks_beside(world: World, cut: Cut, mirror: Callable[..., Any]) -> Callable[..., Any]:
    """A step over ranks in both packages, compared in all it gives."""

    def forward(x: np.ndarray, batch: ref.LayerBatch, caches: Any) -> tuple[Any, ...]:
        caches = [world.cache] * cut.cp_size if isinstance(caches, ref.LayerCache) else caches
        args, kwargs = step_of(world, cut, x, batch, caches)
        want = ref.layer_over_ranks(*args, **kwargs)
        got = untouched(mirror, to_torch(args), kwargs)
        compare_floats(got, want, want, "layer_over_ranks")
        num_tokens, width = int(batch.query_start_loc[-1]), want.topk_indices[0].shape[1]
        return np.zeros((num_tokens, x.shape[1])), np.zeros((num_tokens, width), np.int32), want.caches

    return forward


def step_of(
    world: World, cut: Cut, x: np.ndarray, batch: ref.LayerBatch, caches: list[ref.LayerCache]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one step over ranks; rows that belong to no token are NaN."""
    num_rows = len(x) + cut.padding if cut.padding else None
    padded = np.concatenate([x, np.full((cut.padding + 1, x.shape[1]), np.nan, x.dtype)])
    inputs = [padded[: len(x) + cut.padding]] * cut.cp_size
    if cut.rows == "scattered":
        partition = partition_tokens(batch.query_start_loc, cut.cp_size, split=cut.split, num_input_tokens=num_rows)
        inputs = [padded[np.where(tokens < 0, len(x), tokens)] for tokens in partition.token_indices]
    kwargs = {"compress_ratio": world.kind.ratio, "num_input_tokens": num_rows, **cut.modes}
    return (inputs, world.weights, caches, batch, world.config), kwargs


@fewer(3)
@given(cases=worlds_over_ranks())
def test_layer_over_ranks_mirrors(cases: list[tuple[World, list[list[int]], Cut]]) -> None:
    for world, steps, cut in cases:
        run(world, steps, ranks_beside(world, cut, dsacp_npu.layer.layer_over_ranks))


@fewer(5)
@given(cases=worlds_over_ranks(num_cuts=2))
def test_layer_over_ranks_in_place_mirrors(cases: list[tuple[World, list[list[int]], Cut]]) -> None:
    for world, steps, cut in cases:

        def in_place(inputs: Any, weights: Any, caches: Any, *rest: Any, **kwargs: Any) -> Any:
            out = dsacp_npu.layer.layer_over_ranks_(inputs, weights, caches, *rest, **kwargs)
            assert all(mine is given for mine, given in zip(out.caches, caches, strict=True))
            return out

        run(world, steps, ranks_beside(world, cut, in_place))


def heads_beside(world: World, size: int, mirror: Callable[..., Any]) -> Callable[..., Any]:
    """A step by heads in both packages, compared in all it gives."""

    def forward(x: np.ndarray, batch: ref.LayerBatch, caches: Any) -> tuple[Any, ...]:
        caches = [world.cache] * size if isinstance(caches, ref.LayerCache) else caches
        args = (x, world.weights, caches, batch, world.config)
        want = ref.head_parallel_layer(*args, compress_ratio=world.kind.ratio)
        got = untouched(mirror, to_torch(args), {"compress_ratio": world.kind.ratio})
        compare_floats(got, want, want, "head_parallel_layer")
        return want.outputs[0], want.topk_indices[0], want.caches

    return forward


SIX = {"num_heads": 6, "o_groups": 6}  # 1, 2 and 3 ranks divide them


@fewer(4)
@given(made=worlds(kinds=EVERY_KIND, **SIX), size=st.sampled_from([1, 2, 3]))
def test_head_parallel_layer_mirrors(made: tuple[World, list[list[int]]], size: int) -> None:
    world, steps = made
    run(world, steps, heads_beside(world, size, dsacp_npu.layer.head_parallel_layer), idle=(1,))


@fewer(6)
@given(made=worlds(kinds=KINDS, **SIX), size=st.sampled_from([1, 2, 3]))
def test_head_parallel_layer_in_place_mirrors(made: tuple[World, list[list[int]]], size: int) -> None:
    world, steps = made
    run(world, steps, heads_beside(world, size, dsacp_npu.layer.head_parallel_layer_))


# --- bfloat16: context parallelism on against off ---


def rounded(world: World) -> tuple[Any, Any, Any]:
    """Weights, cache and rows of a world in bfloat16; states stay float32."""
    weights = to_torch(world.weights, "bfloat16")
    sizes = {"num_blocks": world.cache.swa_cache.shape[0], "block_size": world.cache.swa_cache.shape[1]}
    sizes |= {"num_cmp_blocks": world.cache.cmp_cache.shape[0], "cmp_block_size": world.cache.cmp_cache.shape[1]}
    cache = dsacp_npu.layer.empty_cache(weights, num_slots=len(world.state_slots) + 1, **sizes)
    return weights, cache, [to_torch(rows, "bfloat16") for rows in world.x]


def bf16_error(world: World, steps: list[list[int]], cut: Cut) -> float:
    """Relative Frobenius distance of all outputs over ranks from those of one device, given its selection."""
    weights, cache, _ = rounded(world)
    caches = [cache] * cut.cp_size
    done, wrong, size = [0] * len(world.x), 0.0, 0.0
    options = {"compress_ratio": world.kind.ratio}
    for new in steps:
        ends = [a + b for a, b in zip(done, new, strict=True)]
        x, batch = world.step(done, ends)
        args, kwargs = step_of(world, cut, x, batch, [])
        rows, batch = to_torch(x, "bfloat16"), to_torch(batch)
        off = dsacp_npu.layer.attention_layer(rows, weights, cache, batch, world.config, **options)
        given_topk = None
        if world.kind.indexer:
            num_rows = len(x) + cut.padding if cut.rows == "full" else len(x)
            given_topk = torch.full((num_rows, world.config.index_topk), -1, dtype=torch.int32)
            given_topk[: len(x)] = off.topk_indices
        on = dsacp_npu.layer.layer_over_ranks(
            to_torch(args[0], "bfloat16"), weights, caches, batch, world.config, **kwargs, given_topk=given_topk
        )
        partition = partition_tokens(
            batch.query_start_loc.numpy(), cut.cp_size, split=cut.split, num_input_tokens=kwargs["num_input_tokens"]
        )
        for rank, (tokens, output) in enumerate(zip(partition.token_indices, on.outputs, strict=True)):
            real = tokens >= 0
            mine, due = output[: len(x)], off.output
            if cut.rows == "scattered":
                mine, due = output[torch.from_numpy(real)], off.output[torch.from_numpy(tokens[real])]
            assert mine.isfinite().all(), f"rank {rank}"
            wrong += float((mine.double() - due.double()).square().sum())
            size += float(due.double().square().sum())
        cache, caches, done = off.cache, on.caches, ends
    return (wrong / size) ** 0.5 if size else 0.0


@fewer(6)
@given(made=worlds(kinds=KINDS, max_steps=3), seed=seeds)
def test_context_parallelism_changes_bf16_outputs_by_less_than_a_hundredth(
    made: tuple[World, list[list[int]]], seed: int
) -> None:
    world, steps = made
    rng = np.random.default_rng(seed)
    for _ in range(3):
        cut = legal_cut(rng, world.kind.ratio)
        if cut.output_mode == "all_to_all":
            cut = cut._replace(cp_size=int(rng.integers(1, 3)))  # what divides the world's 4 heads in 2 groups
        assert bf16_error(world, steps, cut) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL)
def test_bf16_at_real_ratios_window_and_top_k(kind: Any) -> None:
    """Long enough that ratio 128 has entries and top-k 512 leaves some out: 2300 tokens in two chunks."""
    flash = v4_flash()
    fields = {name: getattr(flash, name) for name in flash.__slots__}
    small = {"hidden_size": 64, "num_heads": 2, "head_dim": 32, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16}
    small |= {"rope_head_dim": 16, "index_n_heads": 2, "index_head_dim": 32}
    config = type(flash)(**fields | small)
    kind = kind._replace(ratio=128) if kind == HCA else kind
    rng = np.random.default_rng(kind.ratio)
    world = world_of(rng, [2300, 40], config=config, kind=kind, swa_block=128, cmp_block=64)
    cut = Cut(4, "zigzag", "scattered", "gather_compressed", "replicated_weight")
    assert bf16_error(world, [[2110, 0], [190, 40]], cut) < 1e-2
    cut = Cut(2, "contiguous", "full", "replicate", "all_to_all", padding=3)
    assert bf16_error(world, [[2110, 0], [190, 40]], cut) < 1e-2


# --- small functions ---


@given(batch=batches(), size=cp_sizes, data=st.data())
def test_draft_metadata_mirrors(batch: Any, size: int, data: st.DataObject) -> None:
    args = (batch.query_start_loc, batch.key_lens, size, data.draw(st.integers(0, size - 1)))
    num_steps, causal = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    assert_mirrors("layer", "draft_metadata", *args, num_steps, (1.0, 0.25), causal=causal)


@given(batch=batches(), num_steps=st.integers(1, 4))
def test_draft_batches_mirrors(batch: Any, num_steps: int) -> None:
    assert_mirrors("layer", "draft_batches", batch.query_start_loc, batch.key_lens, num_steps)


@given(batch=batches(), mixed=st.sampled_from(["cp", "off"]), decode_query_len=st.integers(1, 3))
def test_uses_context_parallel_mirrors(batch: Any, mixed: str, decode_query_len: int) -> None:
    lengths = (batch.query_start_loc, batch.key_lens)
    assert_mirrors("layer", "uses_context_parallel", *lengths, mixed=mixed, decode_query_len=decode_query_len)


def test_layer_frequencies_mirrors() -> None:
    for ratio in (1, 4, 128):
        assert dsacp_npu.layer.layer_frequencies(v4_flash(), ratio) == ref.layer_frequencies(v4_flash(), ratio)


@given(seed=seeds, groups=st.integers(1, 3), heads=st.integers(1, 2))
def test_projected_output_mirrors(seed: int, groups: int, heads: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, d, lora, hidden = (int(size) for size in rng.integers(1, 5, 4))
    args = (
        rng.standard_normal((tokens, groups * heads, d)),
        rng.standard_normal((groups, lora, heads * d)),
        rng.standard_normal((hidden, groups * lora)),
    )
    got = dsacp_npu.layer.projected_output(*to_torch(args))
    want = ref.projected_output(*args)
    compare_floats(got, want, want, "projected_output")


@pytest.mark.parametrize("int8_index_cache", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_empty_cache_mirrors(kind: Any, int8_index_cache: bool) -> None:
    world = world_of(np.random.default_rng(1), [3], kind=kind)
    sizes = {"num_blocks": 2, "block_size": 4, "num_cmp_blocks": 3, "cmp_block_size": 2, "num_slots": 2}
    options = sizes | {"spare_rows": 1, "int8_index_cache": int8_index_cache}
    assert_same(
        dsacp_npu.layer.empty_cache(to_torch(world.weights), **options), ref.empty_cache(world.weights, **options)
    )


# --- without values ---


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["attention_layer", "head_parallel_layer"])
def test_layers_run_without_values(name: str, kind: Any, way: str) -> None:
    world = world_of(np.random.default_rng(2), [9, 5], kind=kind)
    x, batch = world.step([0, 0], [9, 5], beyond=1)
    caches = world.cache if name == "attention_layer" else [world.cache] * 2
    call = case(name, x, world.weights, caches, batch, world.config, compress_ratio=kind.ratio)
    assert_runs_without_values("layer", way, call)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_ranks_run_on_a_device_without_values(kind: Any) -> None:
    """Lengths on the host, all else where nothing can be read: shapes alone are enough."""
    world = world_of(np.random.default_rng(3), [9, 5], kind=kind)
    x, batch = world.step([0, 0], [9, 5])
    for key_mode in ("replicate", "gather_kv", "gather_compressed"):
        args, kwargs = step_of(world, Cut(2, "contiguous", "full", key_mode), x, batch, [world.cache] * 2)
        inputs, weights, caches, batch_here, config = to_torch(args)
        want = dsacp_npu.layer.layer_over_ranks(inputs, weights, caches, batch_here, config, **kwargs)
        there = dsacp_npu.layer.layer_over_ranks(
            *(on_device(value, "meta") for value in (inputs, weights, caches)), batch_here, config, **kwargs
        )
        assert [out.shape for out in there.outputs] == [out.shape for out in want.outputs]
        assert {out.device.type for out in there.outputs} == {"meta"}


# --- refusals ---


def step_case(**changes: Any) -> Case:
    """One legal step, some arguments changed."""
    world = world_of(np.random.default_rng(4), [9, 5])
    x, batch = world.step([0, 0], [9, 5])
    args = {"x": x, "weights": world.weights, "cache": world.cache, "batch": batch, "config": world.config}
    options = {"compress_ratio": 4}
    for name, change in changes.items():
        target = options if name in ("compress_ratio", "given_topk") else args
        target[name] = change(world, args) if callable(change) else change
    return Case("attention_layer", tuple(args.values()), options)


REFUSED = {
    "fewer rows than tokens": {"x": lambda world, args: args["x"][:-1]},
    "float16 where float64 is due": {"x": lambda world, args: args["x"].astype(np.float32)},
    "another width": {"x": lambda world, args: args["x"][:, :-1]},
    "another ratio": {"compress_ratio": 8},
    "a window-only layer with a compressor": {"compress_ratio": 1},
    "no batch record": {"batch": lambda world, args: tuple(args["batch"])},
    "a slot twice": {"batch": lambda world, args: args["batch"]._replace(state_indices=int32(1, 1))},
    "a slot that is not there": {"batch": lambda world, args: args["batch"]._replace(state_indices=int32(0, 99))},
    "fewer keys than queries": {"batch": lambda world, args: args["batch"]._replace(seq_lens=int32(3, 5))},
    "a table of other requests": {
        "batch": lambda world, args: args["batch"]._replace(cmp_block_table=args["batch"].cmp_block_table[:1])
    },
    "a block that is not there": {
        "batch": lambda world, args: args["batch"]._replace(
            swa_block_table=np.full_like(args["batch"].swa_block_table, 99)
        )
    },
    "a selection of another width": {"given_topk": np.zeros((14, 5), np.int32)},
    "rings of another size": {"cache": lambda world, args: args["cache"]._replace(cmp_state=args["cache"].index_state)},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_refusals_mirror(change: dict[str, Any]) -> None:
    assert_refusal_mirrors("layer", step_case(**change))


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_a_refused_step_leaves_its_cache_alone(change: dict[str, Any]) -> None:
    bad = step_case(**change)
    args = to_torch(bad.args)
    before = [tensor.clone() for tensor in tensors(args[2])]
    with pytest.raises(ValueError):
        dsacp_npu.layer.attention_layer_(*args, **to_torch(bad.kwargs))
    for old, new in zip(before, tensors(args[2]), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_a_table_that_no_read_may_follow_is_refused_before_anything_is_written() -> None:
    """The block of an earlier chunk is gone: only attention reads it, after the step has written its rows."""
    world = world_of(np.random.default_rng(5), [9, 5])
    x, batch = world.step([0, 0], [8, 5])
    cache = ref.attention_layer(x, world.weights, world.cache, batch, world.config, compress_ratio=4).cache
    x, batch = world.step([8, 5], [9, 5])
    table = batch.swa_block_table.copy()
    table[0, 1] = -1  # rows 4 to 7: of the window of position 8
    args = to_torch((x, world.weights, cache, batch._replace(swa_block_table=table), world.config))
    before = [tensor.clone() for tensor in tensors(args[2])]
    with pytest.raises(ValueError, match="block_table"):
        dsacp_npu.layer.attention_layer_(*args, compress_ratio=4)
    for old, new in zip(before, tensors(args[2]), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor of a record, contiguous."""
    return [tensor.contiguous() for tensor in tensors_of(value)]
