"""V3.2's layer and stack on the kernels: on one device, and over ranks by both of SGLang's splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu import backend, mla_layer, mla_stack
from dsacp_npu.block import ExpertWeights
from dsacp_npu.fp8 import quantized_fp8
from dsacp_npu.mla_layer import MLABatch, MLACache, MLAIndexerWeights, MLAWeights, empty_mla_cache
from dsacp_npu.mla_stack import MLABlockWeights, StackWeights
from dsacp_npu.partition import local_rows, partition_tokens, restored_rows
from dsacp_ref.mla_config import MLAConfig, v32
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_within_budget
from tests.kernels.test_layer import Spy

CONFIG = replace(
    v32(),
    hidden_size=48,
    num_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    nope_head_dim=16,
    rope_head_dim=16,
    v_head_dim=16,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=8,
    rope_original_max_position=16,
)
FIRST, NEW = [4, 0, 6], [9, 3, 2]  # tokens of each request in two steps


def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape) / np.sqrt(shape[-1])).bfloat16()


def layer_weights(rng: np.random.Generator, config: MLAConfig = CONFIG) -> MLAWeights:
    hidden, heads, lora, rank, d = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank, 128
    indexer = MLAIndexerWeights(
        normal(rng, config.index_n_heads * d, lora), normal(rng, d, hidden), torch.ones(d), torch.zeros(d),
        normal(rng, config.index_n_heads, hidden),
    )  # fmt: skip
    return MLAWeights(
        normal(rng, lora, hidden), torch.ones(lora), normal(rng, heads * 32, lora), normal(rng, rank + 16, hidden),
        torch.ones(rank), normal(rng, heads, 16, rank), normal(rng, heads, 16, rank), normal(rng, hidden, heads * 16),
        indexer,
    )  # fmt: skip


def batch(before: list[int], new: list[int]) -> MLABatch:
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    lens = np.array([b + n for b, n in zip(before, new, strict=True)], np.int32)
    table = torch.tensor([[7, 2], [0, 5], [3, 6]], dtype=torch.int32)
    return MLABatch(torch.from_numpy(starts), torch.from_numpy(lens), table)


def empty() -> MLACache:
    cache = empty_mla_cache(CONFIG, num_blocks=8, block_size=16, dtype="float32")
    return MLACache(*(part.bfloat16() for part in cache))


def close(got: torch.Tensor, due: torch.Tensor) -> bool:
    """Alike to a few roundings of bfloat16: sums were added in another order."""
    return bool((got - due).abs().max() <= 2**-5 * due.abs().max())


def steps() -> list[MLABatch]:
    return [batch([0, 0, 0], FIRST), batch(FIRST, NEW)]


@pytest.mark.parametrize("seed", range(2))
def test_mla_attention_layer_on_the_kernels(seed: int) -> None:
    """What the indexer chooses is looked at as it is made (`Spy`); the output is compared given that choice."""
    rng = np.random.default_rng(seed)
    weights, caches, spy = layer_weights(rng), [empty(), empty()], Spy()
    for step in steps():
        x = normal(rng, int(step.query_start_loc[-1]), CONFIG.hidden_size)
        before = doubled(caches[1])
        mine = mla_layer.mla_attention_layer_(x, weights, caches[0], step, CONFIG, backend=spy.backend)
        given = mine.topk_indices
        theirs = mla_layer.mla_attention_layer_(x, weights, caches[1], step, CONFIG, given_topk=given)
        exact = mla_layer.mla_attention_layer(
            x.double(), doubled(weights), before, step, CONFIG, given_topk=given
        ).output
        assert_within_budget(mine.output, exact, theirs.output)
        for got, due in zip(mine.cache, theirs.cache, strict=True):
            assert close(got, due)


def doubled(value: Any) -> Any:
    return type(value)(*(doubled(part) if isinstance(part, tuple) else part.double() for part in value))


@pytest.mark.parametrize("split", ["zigzag", "round_robin"])
def test_mla_over_ranks_on_the_kernels(split: str) -> None:
    rng = np.random.default_rng(5)
    weights, whole, ranks = layer_weights(rng), empty(), [empty() for _ in range(3)]
    kernels = backend.get("triton")
    for step in steps():
        x = normal(rng, int(step.query_start_loc[-1]), CONFIG.hidden_size)
        due = mla_layer.mla_attention_layer_(x, weights, whole, step, CONFIG, backend=kernels)
        partition = partition_tokens(step.query_start_loc, 3, split=split)
        shards = [local_rows(x, partition, rank) for rank in range(3)]
        got = mla_layer.mla_over_ranks_(shards, weights, ranks, step, CONFIG, split=split, backend=kernels)
        assert close(restored_rows(torch.cat(got.outputs), partition), due.output)
        chosen = restored_rows(torch.cat(got.topk_indices), partition)
        assert torch.equal(chosen.sort(dim=1).values, due.topk_indices.sort(dim=1).values)
        for cache in got.caches:
            for mine, theirs in zip(cache, due.cache, strict=True):
                assert close(mine, theirs)


def small_stack() -> tuple[StackWeights, torch.Tensor, MLABatch, list[MLACache]]:
    """Weights of two layers, token ids, a step, and empty caches."""
    rng = np.random.default_rng(6)
    hidden = CONFIG.hidden_size

    def block() -> MLABlockWeights:
        expert = ExpertWeights(normal(rng, 8, hidden), normal(rng, 8, hidden), normal(rng, hidden, 8))
        return MLABlockWeights(torch.ones(hidden), layer_weights(rng), torch.ones(hidden), expert)

    weights = StackWeights(normal(rng, 20, hidden), (block(), block()), torch.ones(hidden), normal(rng, 20, hidden))
    ids = torch.from_numpy(rng.integers(0, 20, sum(NEW)).astype(np.int32))
    return weights, ids, batch([0, 0, 0], NEW), [empty(), empty()]


@pytest.mark.parametrize(("split", "experts"), [("zigzag", "split"), ("round_robin", "sliced")])
def test_mla_stack_over_ranks_on_the_kernels(split: str, experts: str) -> None:
    weights, ids, step, whole = small_stack()
    kernels = backend.get("triton")
    due = mla_stack.mla_decoder_stack_(ids, weights, whole, step, CONFIG, backend=kernels)
    caches = [[empty(), empty()] for _ in range(2)]
    got = mla_stack.mla_stack_over_ranks_(
        ids, weights, caches, step, CONFIG, split=split, experts=experts, backend=kernels
    )
    for logits in got.logits:
        assert close(logits, due.logits)


def test_fp8_index_keys_are_refused_by_name() -> None:
    keys = quantized_fp8(torch.zeros(1, 16, 128))
    table, loc, used = torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    with pytest.raises(UnsupportedError, match="FP8Vectors of index_cache on an NVIDIA GPU only"):
        backend.get("triton").lightning_indexer(
            torch.zeros(1, 64, 128), torch.zeros(1, 64), keys, table, loc, used, compress_ratio=1, index_topk=8
        )


def test_mla_block_on_the_kernels() -> None:
    """Pure and in place, on one device and over ranks: one result."""
    (weights, _, step, caches), kernels = small_stack(), backend.get("triton")
    x = normal(np.random.default_rng(7), sum(NEW), CONFIG.hidden_size)
    block, cache = weights.blocks[0], caches[0]
    due = mla_stack.mla_block(x, block, cache, step, CONFIG, backend=kernels)
    assert not any(part.any() for part in cache)
    in_place = mla_stack.mla_block_(x, block, empty(), step, CONFIG, backend=kernels)
    assert torch.equal(in_place.output, due.output)
    partition = partition_tokens(step.query_start_loc, 2, split="round_robin")
    shards = [local_rows(x, partition, rank) for rank in range(2)]
    options = {"split": "round_robin", "experts": "sliced", "backend": kernels}
    for over_ranks in (mla_stack.mla_block_over_ranks, mla_stack.mla_block_over_ranks_):
        got = over_ranks(shards, block, [empty(), empty()], step, CONFIG, **options)
        assert close(restored_rows(torch.cat(got.outputs), partition), due.output)
