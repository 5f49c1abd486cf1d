"""`dsacp_npu.mla_stack` gives what `dsacp_ref.mla_stack` gives: blocks, stacks, what goes in and what comes out."""

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

import dsacp_npu.mla_stack
from dsacp_npu import backend
from dsacp_ref import mla_stack as ref
from dsacp_ref.mla_layer import MLABatch, MLACache
from dsacp_ref.partition import Partition, local_rows, partition_tokens
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_same
from tests.layer_strategies import chunkings, frozen
from tests.maths_strategies import seeds
from tests.mirror.common import (
    TORCH_DTYPES,
    WAYS,
    Case,
    assert_mirrors,
    assert_runs_without_values,
    case,
    compare_floats,
    int32,
    on_device,
    to_torch,
)
from tests.mirror.common import untouched as unchanged
from tests.mirror.test_mla_layer import CODES, every_cache, in_bytes, recoded
from tests.mla_strategies import SMALL, Cut, StackWorld, configs, run_stack, stack_world_of
from tests.strategies import EVERY_SPLIT, FLAT_SPLITS, Step, fewer, read_only, steps

EXPERTS = ("whole", "split", "sliced")
INTER = 12  # every group of 1 to 4 ranks divides it


def as_on_a_device() -> Any:
    """No tensor's values may be read, as if all lay on a device."""
    return patch("dsacp_npu._tensors.readable", lambda tensor: False)


def records(value: Any) -> list[Any]:
    """The caches in lists of lists."""
    return [value] if hasattr(value, "latent_cache") else [cache for item in value for cache in records(item)]


def called(mirror: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The mirror's result; none of its inputs was written to, or the caches that it wrote into come back."""
    if not mirror.__name__.endswith("_"):
        return unchanged(mirror, args, kwargs)
    got = mirror(*args, **kwargs)
    after = records(got.cache if hasattr(got, "cache") else got.caches)
    assert all(mine is given_cache for mine, given_cache in zip(after, records(args[2]), strict=True))
    return got


@st.composite
def stacks(draw: st.DrawFn, *, max_steps: int = 3) -> tuple[StackWorld, list[list[int]]]:
    """Two layers with any kind of cache, and a way to feed them."""
    codes, new = draw(st.sampled_from(list(CODES.values()))), draw(chunkings(1, max_steps=max_steps))
    stack = stack_world_of(
        np.random.default_rng(draw(seeds)),
        [sum(part) for part in zip(*new, strict=True)],
        num_layers=2,
        inter=INTER,
        config=draw(configs(**(in_bytes if "fp8" in codes else {}))),
        block_size=draw(st.integers(1, 5)),
    )
    return stack._replace(world=recoded(stack.world, codes)), new


@st.composite
def stacks_over_ranks(draw: st.DrawFn) -> tuple[StackWorld, list[list[int]], Cut, str]:
    """A stack, how it is cut, and how its ranks share experts."""
    stack, new = draw(stacks(max_steps=2))
    cut = Cut(draw(st.integers(1, 4)), draw(st.sampled_from(EVERY_SPLIT)))
    if cut.split in FLAT_SPLITS:
        cut = cut._replace(padding=draw(st.integers(0, 3)))
    if len(new) == 1:
        cut = cut._replace(kept_keys=draw(st.sampled_from(["all", "own"])))
    return stack, new, cut, draw(st.sampled_from(EXPERTS))


# --- the way in ---


def split_of(step: Step) -> Partition:
    """The layout of a step."""
    return partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)


@given(step=steps(), seed=seeds, rank=st.integers(0, 7))
def test_local_inputs_mirrors(step: Step, seed: int, rank: int) -> None:
    ids, labels = np.random.default_rng(seed).integers(0, 99, (2, step.batch.num_tokens)).astype(np.int32)
    lengths = (step.batch.query_start_loc, step.batch.key_lens)
    assert_mirrors("mla_stack", "local_inputs", ids, labels, *lengths, split_of(step), rank % step.cp_size)


# --- blocks ---


def block_beside(stack: StackWorld, mirror: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A step of every block on one device in both packages, on the reference's rows and caches."""

    def forward(token_ids: np.ndarray, batch: MLABatch, caches: list[MLACache]) -> tuple[Any, ...]:
        x, after = stack.weights.embed[token_ids], []
        for weights, cache in zip(stack.weights.blocks, caches, strict=True):
            args = (x, weights, cache, batch, stack.world.config)
            want = ref.mla_block(*args)
            compare_floats(called(mirror, to_torch(args), options), want, want, "mla_block")
            x, after = want.output, [*after, want.cache]
        return x, np.zeros((0, 0)), after

    return forward


@fewer(3)
@given(made=stacks())
def test_mla_block_mirrors(made: tuple[StackWorld, list[list[int]]]) -> None:
    """Chunked prefill, decode and padded graph slots, whose rows are NaN."""
    stack, new = made
    run_stack(stack, new, block_beside(stack, dsacp_npu.mla_stack.mla_block), idle=(1,))


@fewer(5)
@given(made=stacks())
def test_mla_block_mirrors_as_on_a_device(made: tuple[StackWorld, list[list[int]]]) -> None:
    stack, new = made
    with as_on_a_device():
        forward = block_beside(stack, dsacp_npu.mla_stack.mla_block, backend=backend.get("torch"))
        run_stack(stack, new, forward, idle=(1,))


@fewer(5)
@given(made=stacks())
def test_mla_block_in_place_mirrors(made: tuple[StackWorld, list[list[int]]]) -> None:
    stack, new = made
    run_stack(stack, new, block_beside(stack, dsacp_npu.mla_stack.mla_block_), idle=(1,))


def layout(cut: Cut, batch: MLABatch) -> tuple[Partition, dict[str, Any]]:
    """A step's split, and the arguments that name it."""
    num_tokens = int(batch.query_start_loc[-1])
    options = {"split": cut.split, "num_input_tokens": num_tokens + cut.padding if cut.padding else None}
    return partition_tokens(batch.query_start_loc, cut.cp_size, **options), {**options, "kept_keys": cut.kept_keys}


def block_ranks_beside(
    stack: StackWorld, cut: Cut, experts: str, mirror: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
    """A step of every block over ranks in both packages, on the reference's rows and caches."""

    def forward(token_ids: np.ndarray, batch: MLABatch, caches: Any) -> tuple[Any, ...]:
        caches = [[cache] * cut.cp_size if isinstance(cache, MLACache) else cache for cache in caches]
        partition, kwargs = layout(cut, batch)
        rows = stack.weights.embed[np.append(token_ids, 0)]  # pad rows as well are NaN
        x, after = frozen([rows[tokens] for tokens in partition.token_indices]), []
        for weights, own in zip(stack.weights.blocks, caches, strict=True):
            args = (x, weights, own, batch, stack.world.config)
            want = ref.mla_block_over_ranks(*args, **kwargs, experts=experts)
            got = called(mirror, to_torch(args), {**kwargs, "experts": experts, **options})
            compare_floats(got, want, want, "mla_block_over_ranks")
            x, after = want.outputs, [*after, want.caches]
        return np.zeros((len(token_ids), stack.world.config.hidden_size)), np.zeros((0, 0)), after

    return forward


@fewer(2)
@given(made=stacks_over_ranks())
def test_mla_block_over_ranks_mirrors(made: tuple[StackWorld, list[list[int]], Cut, str]) -> None:
    stack, new, cut, experts = made
    run_stack(stack, new, block_ranks_beside(stack, cut, experts, dsacp_npu.mla_stack.mla_block_over_ranks), idle=(1,))


@fewer(5)
@given(made=stacks_over_ranks())
def test_mla_block_over_ranks_in_place_mirrors(made: tuple[StackWorld, list[list[int]], Cut, str]) -> None:
    stack, new, cut, experts = made
    mirror, torch_backend = dsacp_npu.mla_stack.mla_block_over_ranks_, backend.get("torch")
    run_stack(stack, new, block_ranks_beside(stack, cut, experts, mirror, backend=torch_backend))


# --- stacks ---


def stack_beside(stack: StackWorld, mirror: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A step on one device in both packages, compared in all it gives."""

    def forward(token_ids: np.ndarray, batch: MLABatch, caches: list[MLACache]) -> tuple[Any, ...]:
        args = (token_ids, stack.weights, caches, batch, stack.world.config)
        want = ref.mla_decoder_stack(*args)
        compare_floats(called(mirror, to_torch(args), options), want, want, "mla_stack")
        return want

    return forward


@fewer(3)
@given(made=stacks())
def test_mla_decoder_stack_mirrors(made: tuple[StackWorld, list[list[int]]]) -> None:
    stack, new = made
    run_stack(stack, new, stack_beside(stack, dsacp_npu.mla_stack.mla_decoder_stack), idle=(2,))


@fewer(5)
@given(made=stacks())
def test_mla_decoder_stack_mirrors_as_on_a_device(made: tuple[StackWorld, list[list[int]]]) -> None:
    """One device plans nothing, so no length need be on the host."""
    stack, new = made
    with as_on_a_device():
        forward = stack_beside(stack, dsacp_npu.mla_stack.mla_decoder_stack, backend=backend.get("torch"))
        run_stack(stack, new, forward, idle=(1,))


@fewer(5)
@given(made=stacks())
def test_mla_decoder_stack_in_place_mirrors(made: tuple[StackWorld, list[list[int]]]) -> None:
    stack, new = made
    run_stack(stack, new, stack_beside(stack, dsacp_npu.mla_stack.mla_decoder_stack_), idle=(1,))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
def test_a_step_without_tokens_mirrors(lengths: list[int]) -> None:
    stack = stack_world_of(np.random.default_rng(0), lengths, num_layers=1)
    run_stack(stack, [lengths], stack_beside(stack, dsacp_npu.mla_stack.mla_decoder_stack))
    with as_on_a_device():
        run_stack(stack, [lengths], stack_beside(stack, dsacp_npu.mla_stack.mla_decoder_stack))


def stack_ranks_beside(
    stack: StackWorld, cut: Cut, experts: str, mirror: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
    """A step over ranks in both packages, compared in all it gives."""

    def forward(token_ids: np.ndarray, batch: MLABatch, caches: Any) -> tuple[Any, ...]:
        caches = [caches] * cut.cp_size if isinstance(caches[0], MLACache) else caches
        args = (token_ids, stack.weights, caches, batch, stack.world.config)
        kwargs = {**layout(cut, batch)[1], "experts": experts}
        want = ref.mla_stack_over_ranks(*args, **kwargs)
        compare_floats(called(mirror, to_torch(args), {**kwargs, **options}), want, want, "mla_stack_over_ranks")
        return np.zeros((len(token_ids), stack.world.config.hidden_size)), want.logits[0], want.caches

    return forward


@fewer(2)
@given(made=stacks_over_ranks())
def test_mla_stack_over_ranks_mirrors(made: tuple[StackWorld, list[list[int]], Cut, str]) -> None:
    stack, new, cut, experts = made
    run_stack(stack, new, stack_ranks_beside(stack, cut, experts, dsacp_npu.mla_stack.mla_stack_over_ranks), idle=(1,))


@fewer(5)
@given(made=stacks_over_ranks())
def test_mla_stack_over_ranks_in_place_mirrors(made: tuple[StackWorld, list[list[int]], Cut, str]) -> None:
    stack, new, cut, experts = made
    mirror, torch_backend = dsacp_npu.mla_stack.mla_stack_over_ranks_, backend.get("torch")
    run_stack(stack, new, stack_ranks_beside(stack, cut, experts, mirror, backend=torch_backend))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@fewer(5)
@given(made=stacks_over_ranks())
def test_context_parallelism_changes_a_short_block_by_less_than_a_hundredth(
    dtype: str, made: tuple[StackWorld, list[list[int]], Cut, str]
) -> None:
    """All tokens in one step, given the selection of one device."""
    stack, _, cut, experts = made
    ids, batch = stack.step([0] * len(stack.token_ids), [len(own) for own in stack.token_ids])
    partition, kwargs = layout(cut, batch)
    weights, config = to_torch(stack.weights, dtype), stack.world.config
    x, block = weights.embed[to_torch(ids)], weights.blocks[0]
    floats = to_torch(recoded(stack.world, CODES["floats"]).cache, dtype)
    off = dsacp_npu.mla_stack.mla_block(x, block, floats, to_torch(batch), config)
    shards = [torch.cat([x, x.new_full((1, x.shape[1]), np.nan)])[tokens] for tokens in partition.token_indices]
    on = dsacp_npu.mla_stack.mla_block_over_ranks(
        *(shards, block, [floats] * cut.cp_size, to_torch(batch), config),
        **{**kwargs, "experts": experts, "given_topk": off.topk_indices},
    )
    for tokens, output in zip(partition.token_indices, on.outputs, strict=True):
        assert output.dtype == TORCH_DTYPES[dtype]
        assert output.isfinite().all()
        mine, due = (rows.double() for rows in (output[tokens >= 0], off.output[tokens[tokens >= 0]]))
        assert (mine - due).norm() <= 1e-2 * due.norm()


# --- the way out ---


def logits_of(seed: int, *shape: int) -> np.ndarray:
    """Few different numbers, NaN and -inf among them: ties everywhere."""
    rng = np.random.default_rng(seed)
    return rng.choice([0.0, 1.0, 2.0, np.nan, -np.inf], shape, p=[0.3, 0.3, 0.2, 0.1, 0.1])


@given(step=steps(), seed=seeds, vocab=st.integers(1, 5), dtype=st.sampled_from([np.float32, np.float64]))
def test_rows_argmax_mirrors(step: Step, seed: int, vocab: int, dtype: Any) -> None:
    partition = split_of(step)
    rows = logits_of(seed, step.batch.num_tokens, vocab).astype(dtype)
    shards = [local_rows(rows, partition, rank) for rank in range(step.cp_size)]
    for shard, tokens in zip(shards, partition.token_indices, strict=True):
        shard[tokens < 0] = np.inf
    assert_mirrors("mla_stack", "rows_argmax", frozen(shards), partition, step.batch.query_start_loc)


@given(seeds, st.integers(0, 4), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_vocab_argmax_mirrors(seed: int, num_rows: int, widths: list[int]) -> None:
    rows = logits_of(seed, num_rows, sum(widths))
    shards = [read_only(part.copy()) for part in np.split(rows, np.cumsum(widths)[:-1], axis=1)]
    assert_mirrors("mla_stack", "vocab_argmax", shards)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_argmax_of_short_logits(dtype: str) -> None:
    """Equal once they are rounded: the lowest token, on whichever rank it is."""
    logits = to_torch([np.array([[1.0, 3.0]]), np.array([[3.0 + 1e-6, 0.0]])], dtype)
    assert [ids.tolist() for ids in dsacp_npu.mla_stack.vocab_argmax(logits)] == [[1], [1]]
    partition = partition_tokens(int32(0, 1), 1)
    whole = [torch.cat(logits, dim=1)]
    assert_same(dsacp_npu.mla_stack.rows_argmax(whole, to_torch(partition), torch.tensor(int32(0, 1))), [int32(1)])


# --- without values, and elsewhere ---


def small_stack(codes: dict[str, bool], num_layers: int = 2) -> StackWorld:
    """Two requests, and any kind of cache."""
    config = replace(SMALL, **in_bytes)
    stack = stack_world_of(np.random.default_rng(3), [9, 5], num_layers=num_layers, inter=INTER, config=config)
    return stack._replace(world=recoded(stack.world, codes))


LOC = int32(0, 3, 3, 8)
SPLIT = partition_tokens(LOC, 3, split="round_robin")
IDS = int32(*range(8))


# The layer inside compiles with every kind of cache in its own tests.
BLOCK_WAYS = [(kind, way) for kind in CODES for way in WAYS if way != "compiled" or kind == "floats"]
STACK_WAYS = [(kind, way) for kind in CODES for way in WAYS if way != "compiled" or kind == "fp8"]


@pytest.mark.parametrize(("kind", "way"), BLOCK_WAYS)
def test_mla_block_runs_without_values(kind: str, way: str) -> None:
    stack = small_stack(CODES[kind])
    ids, batch = stack.step([0, 0], [9, 5], beyond=1)
    args = (read_only(stack.weights.embed[ids]), stack.weights.blocks[0], stack.world.cache, batch, stack.world.config)
    assert_runs_without_values("mla_stack", way, case("mla_block", *args))


@pytest.mark.parametrize(("kind", "way"), STACK_WAYS)
def test_mla_decoder_stack_runs_without_values(kind: str, way: str) -> None:
    stack = small_stack(CODES[kind], num_layers=1 if way == "compiled" else 2)
    ids, batch = stack.step([0, 0], [9, 5])
    args = (ids, stack.weights, stack.caches, batch, stack.world.config)
    assert_runs_without_values("mla_stack", way, case("mla_decoder_stack", *args))


CALLS = [
    case("local_inputs", IDS, IDS, LOC, int32(5, 0, 9), SPLIT, 1),
    case("vocab_argmax", [np.ones((3, 2)), np.zeros((3, 1))]),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.function)
def test_ends_run_without_values(call: Case, way: str) -> None:
    assert_runs_without_values("mla_stack", way, call)


@pytest.mark.parametrize("experts", EXPERTS)
@every_cache
def test_ranks_run_on_a_device_without_values(codes: dict[str, bool], experts: str) -> None:
    """Lengths on the host, all else where nothing can be read: shapes alone are enough."""
    stack = small_stack(codes)
    ids, batch = stack.step([0, 0], [9, 5])
    args = to_torch((ids, stack.weights, [stack.caches] * 2, batch, stack.world.config))
    mirror = dsacp_npu.mla_stack.mla_stack_over_ranks
    want = mirror(*args, split="zigzag", experts=experts)
    there = mirror(*on_device(args[:3], "meta"), *args[3:], split="zigzag", experts=experts)
    for field in ("hidden", "logits"):
        mine, due = getattr(there, field), getattr(want, field)
        assert [out.shape for out in mine] == [out.shape for out in due]
        assert {out.device.type for out in mine} == {"meta"}


def test_logits_elsewhere_and_lengths_on_the_host() -> None:
    rows = [torch.empty(3, 2, device="meta") for _ in range(3)]
    found = dsacp_npu.mla_stack.rows_argmax(rows, to_torch(SPLIT), torch.tensor(LOC))
    assert {(ids.device.type, tuple(ids.shape)) for ids in found} == {("meta", (3,))}


@pytest.mark.parametrize("what", ["partition", "query_start_loc"])
def test_what_is_planned_must_be_on_the_host(what: str) -> None:
    args = to_torch({"logits": [np.ones((3, 2))] * 3, "partition": SPLIT, "query_start_loc": LOC})
    args[what] = on_device(args[what], "meta")
    with pytest.raises(UnsupportedError, match=f"^{what} must be a CPU tensor, got a tensor on meta; plan on the CPU"):
        dsacp_npu.mla_stack.rows_argmax(**args)
