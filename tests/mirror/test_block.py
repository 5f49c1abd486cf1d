"""`dsacp_npu.block` gives what `dsacp_ref.block` gives: experts, blocks on one device and over ranks, last rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsacp_npu.block
from dsacp_npu import backend
from dsacp_ref import block as ref
from dsacp_ref.partition import local_rows, partition_tokens
from dsacp_ref.spec import UnsupportedError
from tests.block_strategies import LIMITS, Stack, expert_of, stack_of, stacks_over_ranks, step_inputs
from tests.compare import assert_within_budget
from tests.layer_strategies import CSA, EVERY_KIND, SMALL, WINDOW, Cut, chunkings, frozen
from tests.maths_strategies import normal, seeds
from tests.mirror.common import (
    TORCH_DTYPES,
    WAYS,
    Case,
    assert_floats_mirror,
    assert_mirrors,
    assert_runs_without_values,
    case,
    compare_floats,
    int32,
    on_device,
    to_numpy,
    to_torch,
)
from tests.mirror.common import untouched as unchanged
from tests.strategies import Step, fewer, steps, token_rows

# --- experts ---


def plain_expert(dtype: str) -> Callable[..., np.ndarray]:
    """The gated MLP as anybody writes it in torch, every operation in this dtype."""

    def output(x: np.ndarray, weights: ref.ExpertWeights) -> np.ndarray:
        rows, (w1, w3, w2, limit) = to_torch((x, weights), dtype)
        gate, up = rows @ w1.T, rows @ w3.T
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return ((torch.nn.functional.silu(gate) * up) @ w2.T).float().numpy()

    return output


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
@given(seeds, st.integers(0, 5), st.integers(1, 7), st.sampled_from(LIMITS))
def test_expert_output_mirrors(dtype: str, seed: int, num_rows: int, inter: int, limit: float | None) -> None:
    rng = np.random.default_rng(seed)
    args = (normal(rng, num_rows, 6, scale=3.0), expert_of(rng, inter, 6, limit=limit))
    assert_floats_mirror("block", "expert_output", dtype, *args, baseline=plain_expert(dtype))


@given(seeds, st.integers(1, 8), st.integers(0, 3), st.data())
def test_expert_share_mirrors(seed: int, cp_size: int, per_rank: int, data: st.DataObject) -> None:
    weights = expert_of(np.random.default_rng(seed), cp_size * per_rank, 4, limit=data.draw(st.sampled_from(LIMITS)))
    assert_mirrors("block", "expert_share", weights, data.draw(st.integers(0, cp_size - 1)), cp_size)


def scattered(step: Step, rows: np.ndarray, poison: float = np.nan) -> tuple[list[np.ndarray], Any]:
    """The ranks' rows of a step, with garbage in the pad rows, and their partition."""
    partition = partition_tokens(step.batch.query_start_loc, step.cp_size, **step.cut)
    shards = [local_rows(rows, partition, rank) for rank in range(step.cp_size)]
    for shard, tokens in zip(shards, partition.token_indices, strict=True):
        shard[tokens < 0] = poison
    return frozen(shards), partition


@pytest.mark.parametrize("experts", ["whole", "split", "sliced"])
@given(steps(), seeds, st.sampled_from(LIMITS))
@fewer(2)
def test_experts_over_ranks_mirrors(experts: str, step: Step, seed: int, limit: float | None) -> None:
    rng = np.random.default_rng(seed)
    weights = expert_of(rng, 2 * step.cp_size, 3, limit=limit)
    shards, partition = scattered(step, normal(rng, step.batch.num_tokens, 3))
    assert_floats_mirror("block", "experts_over_ranks", "float64", shards, weights, partition, experts=experts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@given(seed=seeds, cp_size=st.sampled_from([1, 2, 4]), experts=st.sampled_from(["split", "sliced"]))
@fewer(2)
def test_shared_experts_in_short_dtypes(dtype: str, seed: int, cp_size: int, experts: str) -> None:
    """No worse than the summands as anybody writes and adds them in this dtype."""
    rng = np.random.default_rng(seed)
    weights, x = to_torch((expert_of(rng, 8, 6), normal(rng, 9, 6)), dtype)
    partition = partition_tokens(int32(0, 9), cp_size, split="zigzag")
    shards = [x[torch.from_numpy(tokens)] for tokens in partition.token_indices]
    got = torch.cat(dsacp_npu.block.experts_over_ranks(shards, weights, to_torch(partition), experts=experts))
    rows, low = torch.cat(shards), to_numpy(weights, "float32")
    exact = ref.expert_output(*to_numpy((rows, weights), "float64"))
    summands = [
        to_torch(plain_expert(dtype)(*to_numpy((rows, ref.expert_share(low, rank, cp_size)), "float32")), dtype)
        for rank in range(cp_size)
    ]
    assert_within_budget(got, exact, sum(summands[1:], summands[0]), f"{cp_size} ranks")


# --- the block ---


def untouched(mirror: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The mirror's result; none of its inputs was written to, unless it is made to write into its caches."""
    return mirror(*args, **kwargs) if mirror.__name__.endswith("_") else unchanged(mirror, args, kwargs)


def beside(stack: Stack, new: list[list[int]], mirror: Callable[..., Any], **options: Any) -> None:
    """Every block of every step on one device in both packages, on the reference's rows and caches."""
    done, caches = [0] * len(new[0]), stack.caches
    for counts in new:
        ends = [a + b for a, b in zip(done, counts, strict=True)]
        x = stack.worlds[0].step(done, ends, idle=(1,), beyond=1)[0]
        for layer, (world, weights) in enumerate(zip(stack.worlds, stack.weights, strict=True)):
            batch = world.step(done, ends, idle=(1,), beyond=1)[1]
            args = (x, weights, caches[layer], batch, world.config)
            want = ref.decoder_block(*args, compress_ratio=world.kind.ratio)
            mine = to_torch(args)
            got = untouched(mirror, mine, {"compress_ratio": world.kind.ratio, **options})
            assert not mirror.__name__.endswith("_") or got.cache is mine[2]
            compare_floats(got, want, want, "decoder_block")
            x, caches[layer] = want.output, want.cache
        done = ends


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Stack, list[list[int]]]:
    """Two blocks of any kind, and steps."""
    kinds, new = draw(st.lists(st.sampled_from(EVERY_KIND), min_size=2, max_size=2)), draw(chunkings(4, max_steps=3))
    lengths = [sum(part) for part in zip(*new, strict=True)]
    return stack_of(np.random.default_rng(draw(seeds)), lengths, kinds, limit=draw(st.sampled_from(LIMITS))), new


@fewer(3)
@given(made=stacks())
def test_decoder_block_mirrors(made: tuple[Stack, list[list[int]]]) -> None:
    """Chunked prefill, decode, padded graph slots and rows of nobody, all of them NaN."""
    beside(*made, dsacp_npu.block.decoder_block)


@fewer(6)
@given(made=stacks())
def test_decoder_block_mirrors_as_on_a_device(made: tuple[Stack, list[list[int]]]) -> None:
    with patch("dsacp_npu._tensors.readable", lambda tensor: False):
        beside(*made, dsacp_npu.block.decoder_block, backend=backend.get("torch"))


@fewer(6)
@given(made=stacks())
def test_decoder_block_in_place_mirrors(made: tuple[Stack, list[list[int]]]) -> None:
    beside(*made, dsacp_npu.block.decoder_block_)


def ranks_beside(stack: Stack, new: list[list[int]], cut: Cut, mirror: Callable[..., Any], **options: Any) -> None:
    """Every block of every step over ranks in both packages, on the reference's rows and caches."""
    done = [0] * len(new[0])
    caches = [[cache] * cut.cp_size for cache in stack.caches]
    for counts in new:
        ends = [a + b for a, b in zip(done, counts, strict=True)]
        stream, _, num_rows = step_inputs(stack, done, ends, cut, (1,))
        for layer, (world, weights) in enumerate(zip(stack.worlds, stack.weights, strict=True)):
            batch = world.step(done, ends, idle=(1,))[1]
            args = (stream, weights, caches[layer], batch, world.config)
            kwargs = {"compress_ratio": world.kind.ratio, "num_input_tokens": num_rows, "experts": stack.experts}
            want = ref.block_over_ranks(*args, **kwargs, **cut.modes)
            mine = to_torch(args)
            got = untouched(mirror, mine, {**kwargs, **cut.modes, **options})
            if mirror.__name__.endswith("_"):
                assert all(cache is given for cache, given in zip(got.caches, mine[2], strict=True))
            compare_floats(got, want, want, "block_over_ranks")
            stream, caches[layer] = want.outputs, want.caches
        done = ends


@pytest.mark.slow
@fewer(12)
@given(cases=stacks_over_ranks())
def test_block_over_ranks_mirrors(cases: list[tuple[Stack, list[list[int]], Cut]]) -> None:
    for case_of_ranks in cases:
        ranks_beside(*case_of_ranks, dsacp_npu.block.block_over_ranks)


@pytest.mark.slow
@fewer(20)
@given(cases=stacks_over_ranks(num_cuts=2))
def test_block_over_ranks_in_place_mirrors(cases: list[tuple[Stack, list[list[int]], Cut]]) -> None:
    for case_of_ranks in cases:
        ranks_beside(*case_of_ranks, dsacp_npu.block.block_over_ranks_, backend=backend.get("torch"))


@fewer(8)
@given(cases=stacks_over_ranks(num_cuts=2, num_blocks=1, max_steps=1))
def test_context_parallelism_changes_a_bf16_block_by_less_than_a_hundredth(
    cases: list[tuple[Stack, list[list[int]], Cut]],
) -> None:
    """One step, given the selection of one device; the residual stream, relative Frobenius distance."""
    for stack, new, cut in cases:
        world, ends = stack.worlds[0], new[0]
        stream, partition, num_rows = step_inputs(stack, [0] * len(ends), ends, cut)
        x, batch = world.step([0] * len(ends), ends)
        weights = to_torch(stack.weights[0], "bfloat16")
        sizes = {"num_blocks": world.cache.swa_cache.shape[0], "block_size": world.cache.swa_cache.shape[1]}
        sizes |= {"num_cmp_blocks": world.cache.cmp_cache.shape[0], "cmp_block_size": world.cache.cmp_cache.shape[1]}
        cache = dsacp_npu.layer.empty_cache(weights.attention, num_slots=len(world.state_slots) + 1, **sizes)
        rest = (to_torch(batch), world.config)
        ratio = {"compress_ratio": world.kind.ratio}
        off = dsacp_npu.block.decoder_block(to_torch(x, "bfloat16"), weights, cache, *rest, **ratio)
        given_topk = None
        if world.kind.indexer:
            beyond = off.topk_indices.new_full(
                (cut.padding if cut.rows == "full" else 0, off.topk_indices.shape[1]), -1
            )
            given_topk = torch.cat([off.topk_indices, beyond])
        options = {"given_topk": given_topk, "experts": stack.experts, "num_input_tokens": num_rows, **cut.modes}
        on = dsacp_npu.block.block_over_ranks(
            to_torch(stream, "bfloat16"), weights, [cache] * cut.cp_size, *rest, **ratio, **options
        )
        for tokens, output in zip(partition.token_indices, on.outputs, strict=True):
            assert output.dtype == torch.bfloat16
            assert output.isfinite().all()
            real = torch.from_numpy(tokens)[tokens >= 0]
            due = (off.output if cut.rows == "full" else off.output[real]).double()
            mine = (output[: len(x)] if cut.rows == "full" else output[torch.from_numpy(tokens >= 0)]).double()
            assert (mine - due).norm() <= 1e-2 * due.norm()


# --- the end of the model ---


@given(step=steps(), data=st.data())
def test_last_rows_mirrors(step: Step, data: st.DataObject) -> None:
    shards, partition = scattered(step, data.draw(token_rows(step.batch.num_tokens)), 77)
    assert_mirrors("block", "last_rows", shards, partition, step.batch.query_start_loc)


@given(step=steps(), data=st.data())
def test_gathered_last_rows_mirrors(step: Step, data: st.DataObject) -> None:
    shards, partition = scattered(step, data.draw(token_rows(step.batch.num_tokens)), 77)
    assert_mirrors("block", "gathered_last_rows", shards, partition, step.batch.query_start_loc)


LOC = int32(0, 3, 3, 8)
SPLIT = partition_tokens(LOC, 3, split="round_robin")
OWN = frozen([np.arange(6.0).reshape(3, 2) + rank for rank in range(3)])


def test_last_rows_of_shards_elsewhere_and_lengths_on_the_host() -> None:
    shards, partition, loc = to_torch((OWN, SPLIT, LOC))
    rows = [shard.to("meta") for shard in shards]
    found = dsacp_npu.block.last_rows(rows, partition, loc)
    assert {own.rows.device.type for own in found} == {"meta"}
    assert {own.request_indices.device.type for own in found} == {"cpu"}
    gathered = dsacp_npu.block.gathered_last_rows(rows, partition, loc)
    assert {(rows.device.type, tuple(rows.shape)) for rows in gathered} == {("meta", (3, 2))}


@pytest.mark.parametrize("name", ["last_rows", "gathered_last_rows"])
@pytest.mark.parametrize("what", ["partition", "query_start_loc"])
def test_what_is_planned_must_be_on_the_host(name: str, what: str) -> None:
    args = dict(zip(("shards", "partition", "query_start_loc"), to_torch((OWN, SPLIT, LOC)), strict=True))
    args[what] = on_device(args[what], "meta")
    text = f"^{what} must be a CPU tensor, got a tensor on meta; plan on the CPU"
    with pytest.raises(UnsupportedError, match=text):
        getattr(dsacp_npu.block, name)(**args)


@pytest.mark.parametrize("what", ["query_start_loc", "seq_lens"])
def test_the_lengths_of_a_block_over_ranks_must_be_on_the_host(what: str) -> None:
    stack = stack_of(np.random.default_rng(0), [5], [CSA])
    x, batch = stack.worlds[0].step([0], [5])
    x, weights, cache, batch = to_torch((x, stack.weights[0], stack.worlds[0].cache, batch))
    batch = batch._replace(**{what: getattr(batch, what).to("meta")})
    with pytest.raises(UnsupportedError, match=rf"^batch\.{what} must be a CPU tensor, got a tensor on meta"):
        dsacp_npu.block.block_over_ranks([x] * 2, weights, [cache] * 2, batch, SMALL, compress_ratio=4)


# --- without values ---

EXPERT = expert_of(np.random.default_rng(1), 6, 2, limit=0.5)
CALLS = [
    case("expert_output", np.ones((3, 2)), EXPERT),
    case("expert_share", EXPERT, 1, 3),
    case("experts_over_ranks", OWN, EXPERT, SPLIT, experts="whole"),
    case("experts_over_ranks", OWN, EXPERT, SPLIT, experts="split"),
    case("experts_over_ranks", OWN, EXPERT, SPLIT, experts="sliced"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.function} {call.kwargs}")
def test_experts_run_without_values(call: Case, way: str) -> None:
    assert_runs_without_values("block", way, call)


@pytest.mark.parametrize("way", WAYS)
def test_decoder_block_runs_without_values(way: str) -> None:
    """Around the shortest layer: the tests of the layer take every kind."""
    stack = stack_of(np.random.default_rng(2), [9, 5], [WINDOW])
    x, batch = stack.worlds[0].step([0, 0], [9, 5], beyond=1)
    args = (x, stack.weights[0], stack.worlds[0].cache, batch, SMALL)
    assert_runs_without_values("block", way, case("decoder_block", *args, compress_ratio=1))


@pytest.mark.parametrize("experts", ["whole", "split", "sliced"])
@pytest.mark.parametrize("rows", ["full", "scattered"])
def test_ranks_run_on_a_device_without_values(rows: str, experts: str) -> None:
    """Lengths on the host, all else where nothing can be read: shapes alone are enough."""
    stack = stack_of(np.random.default_rng(3), [9, 5], [CSA], experts=experts)
    world, cut = stack.worlds[0], Cut(2, "zigzag", rows, "gather_kv")
    stream, *_ = step_inputs(stack, [0, 0], [9, 5], cut)
    batch = world.step([0, 0], [9, 5])[1]
    inputs, weights, caches, batch = to_torch((stream, stack.weights[0], [world.cache] * 2, batch))
    options = {"compress_ratio": 4, "experts": experts, **cut.modes}
    want = dsacp_npu.block.block_over_ranks(inputs, weights, caches, batch, SMALL, **options)
    elsewhere = (on_device(value, "meta") for value in (inputs, weights, caches))
    there = dsacp_npu.block.block_over_ranks(*elsewhere, batch, SMALL, **options)
    assert [out.shape for out in there.outputs] == [out.shape for out in want.outputs]
    assert {out.device.type for out in there.outputs} == {"meta"}
