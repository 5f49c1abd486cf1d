"""The whole layer on the kernels: one device, by heads, and over ranks."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu import backend, layer
from dsacp_npu.backend import Backend
from dsacp_npu.layer import LayerCache
from dsacp_ref import indexer as ref_indexer
from dsacp_ref import layer as ref
from tests.cann import test_layer as stories
from tests.cann.test_layer import LEGAL, by_cut, by_heads, by_ratio, legal_world
from tests.compare import assert_same_selection, scoring_noise
from tests.layer_strategies import Cut, Kind
from tests.mirror.common import to_numpy, to_torch


class Spy:
    """The kernels, listened to: what the indexer chose, beside the definition's choice from the same numbers."""

    def __init__(self) -> None:
        functions = dict(backend.get("triton").functions)
        self.inner = functions["lightning_indexer"]
        self.backend = Backend("triton", {**functions, "lightning_indexer": self.choose})

    def choose(self, *args: Any, **sizes: Any) -> torch.Tensor:
        chosen: torch.Tensor = self.inner(*args, **sizes)
        exact = to_numpy(args, "float64")
        due = ref_indexer.lightning_indexer(*exact, **sizes)
        scores64, plain = whole_scores(exact), whole_scores(to_numpy(args, "float32"))
        assert_same_selection(chosen, due, scores64, scoring_noise(scores64, plain) if scores64.size else 0.0)
        return chosen

    def check(self) -> None:
        """Every choice was looked at as it was made."""


def whole_scores(args: tuple[Any, ...]) -> np.ndarray:
    """Every query's scores of all that its operator row's table names, whatever it sees."""
    q, weights, cache, table, cu_seqlens_q, _ = args
    found = np.zeros((len(q), table.shape[1] * cache.shape[1]), q.dtype)
    for row, (start, stop) in enumerate(pairwise(cu_seqlens_q)):
        keys = np.nan_to_num(cache[table[row].clip(0, len(cache) - 1)].reshape(-1, cache.shape[2]))
        found[start:stop] = ref_indexer.index_scores(q[start:stop], weights[start:stop], keys)
    return found


def on_kernels(cache: ref.LayerCache) -> LayerCache:
    """The cache in bfloat16, its states in float32."""
    return LayerCache(*(to_torch(part, "bfloat16") for part in cache[:3]), *(to_torch(state) for state in cache[3:]))


run_beside = partial(stories.run_beside, spy_on=Spy, cache_of=on_kernels)


@pytest.mark.parametrize("seed", range(2))
@by_ratio
def test_attention_layer_on_the_kernels(kind: Kind, seed: int) -> None:
    chunks = [[126, 3], [7, 2], [1, 1]] if kind.ratio == 128 else [[30, 3], [7, 2], [1, 1]]
    world = legal_world(seed, [sum(new) for new in zip(*chunks, strict=True)], kind)
    run_beside(world, chunks, lambda *args: [])


@pytest.mark.parametrize("seed", range(4))
@by_ratio
def test_layer_over_ranks_on_the_kernels(kind: Kind, seed: int) -> None:
    """Every output mode, every split, and every key mode: pooled entries and gathered projections among them."""
    rng = np.random.default_rng(seed)
    output_mode = ("all_to_all", "gather_weight", "replicated_weight")[int(rng.integers(3))]
    modes = [("full", "replicate"), ("scattered", "gather_hidden"), ("scattered", "gather_kv"), ("full", "gather_kv")]
    splits = ["contiguous", "zigzag", "contiguous_request"]
    rows, key_mode = [*modes, ("scattered", "gather_compressed")][int(rng.integers(5))]
    if key_mode != "gather_compressed":
        splits += ["round_robin", "zigzag_ceil", "round_robin_page(4)"]
    size = 2 if output_mode == "all_to_all" else int(rng.integers(1, 5))
    cut = Cut(size, str(rng.choice(splits)), rows, key_mode, output_mode)
    world = legal_world(seed, [18, 4], kind)
    run_beside(world, [[17, 3], [1, 1]], by_cut(cut, kind, backend.get("triton")))


@by_ratio
def test_head_parallel_layer_on_the_kernels(kind: Kind) -> None:
    """Decode: each rank runs its share of the heads."""
    world = legal_world(kind.ratio, [31, 5], kind)
    run_beside(world, [[30, 4], [1, 1]], by_heads(kind, backend.get("triton")))


@by_ratio
def test_a_step_without_tokens_or_requests(kind: Kind) -> None:
    world = legal_world(1, [3], kind)
    for chunk in ([[0]], [[3], [0]]):
        run_beside(world, chunk, lambda *args: [])
    x = torch.zeros(0, LEGAL.hidden_size, dtype=torch.bfloat16)
    table = torch.zeros(0, 1, dtype=torch.int32)
    loc, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    batch = layer.LayerBatch(loc, none, table, table.clone(), none.clone())
    args = (x, to_torch(world.weights, "bfloat16"), on_kernels(world.cache), batch, LEGAL)
    out = layer.attention_layer(*args, compress_ratio=kind.ratio, backend=backend.get("triton"))
    assert out.output.shape == (0, LEGAL.hidden_size)
