"""A whole block whose layer runs on the operators' call path, emulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu import backend, block
from dsacp_npu._layer_parts import copied
from dsacp_ref import block as ref
from dsacp_ref.partition import partition_tokens
from tests.block_strategies import expert_of
from tests.cann.test_layer import LEGAL, bits, by_ratio, legal_world, on_operators, without_codes
from tests.compare import assert_within_budget
from tests.layer_strategies import Cut, Kind, World
from tests.mirror.common import tensors_of, to_numpy, to_torch

pytestmark = pytest.mark.usefixtures("emulated")


def weights_around(world: World) -> Any:
    """A block's weights in bfloat16, around the world's layer."""
    rng = np.random.default_rng(0)
    gains = (1 + 0.3 * rng.standard_normal((2, LEGAL.hidden_size))).astype(np.float32)
    experts = expert_of(rng, 8, LEGAL.hidden_size, np.float32, 0.5)
    return to_torch(ref.BlockWeights(gains[0], world.weights, gains[1], experts), "bfloat16")


def assert_right(world: World, step: Any) -> None:
    """Two steps by ``step`` against float64 given the selection, with torch's bfloat16 as the measure of error."""
    kind, weights, cache, done = world.kind, weights_around(world), on_operators(world.cache), [0, 0]
    for ends in ([130, 4], [131, 5]):
        x, batch = to_torch(world.step(done, ends, idle=(1,)))
        x, options = x.bfloat16(), {"compress_ratio": kind.ratio}
        found, topk, after = step(x, weights, cache, batch)
        options["given_topk"] = topk if kind.indexer else None
        plain = block.decoder_block(x, weights, cache, batch, LEGAL, **options).output
        exact = ref.decoder_block(
            *to_numpy((x, weights, without_codes(cache), batch), "float64"),
            LEGAL,
            compress_ratio=kind.ratio,
            given_topk=topk.numpy() if kind.indexer else None,
        ).output
        for tokens, output in found:
            real = tokens >= 0
            assert_within_budget(output[torch.from_numpy(real)], exact[tokens[real]], plain[tokens[real]], str(kind))
        cache, done = after, ends


@by_ratio
def test_decoder_block_on_the_emulator(kind: Kind) -> None:
    def step(x: torch.Tensor, weights: Any, cache: Any, batch: Any) -> Any:
        options = {"compress_ratio": kind.ratio, "backend": backend.get("cann")}
        out = block.decoder_block(x, weights, cache, batch, LEGAL, **options)
        return [(np.arange(len(x)), out.output)], out.topk_indices, out.cache

    assert_right(legal_world(1, [131, 5], kind), step)


@by_ratio
@pytest.mark.parametrize("experts", ["whole", "split"])
def test_block_over_ranks_on_the_emulator(kind: Kind, experts: str) -> None:
    """Scattered over two ranks."""
    cut = Cut(2, "zigzag", "scattered", "gather_hidden", "all_to_all")

    def step(x: torch.Tensor, weights: Any, cache: Any, batch: Any) -> Any:
        partition = partition_tokens(batch.query_start_loc.numpy(), 2, split=cut.split)
        own = [x[torch.from_numpy(tokens)] for tokens in partition.token_indices]
        options = {"compress_ratio": kind.ratio, "backend": backend.get("cann"), "experts": experts, **cut.modes}
        out = block.block_over_ranks(own, weights, [cache] * 2, batch, LEGAL, **options)
        topk = torch.cat(out.topk_indices)[torch.from_numpy(partition.restore_indices)]
        return list(zip(partition.token_indices, out.outputs, strict=True)), topk, out.caches[0]

    assert_right(legal_world(2, [131, 5], kind), step)


@by_ratio
def test_in_place_blocks_on_the_emulator(kind: Kind) -> None:
    """They give the bits of the pure ones, and leave them in the caches."""
    world = legal_world(3, [9, 5], kind)
    x, batch = to_torch(world.step([0, 0], [9, 5]))
    x, weights, cache = x.bfloat16(), weights_around(world), on_operators(world.cache)
    options = {"compress_ratio": kind.ratio, "backend": backend.get("cann")}

    def same_bits(pure: Any, in_place: Any, rows: Any, caches: Any) -> None:
        want = pure(rows, weights, caches, batch, LEGAL, **options)
        got = in_place(rows, weights, caches, batch, LEGAL, **options)
        for mine, due in zip(tensors_of(tuple(got)), tensors_of(tuple(want)), strict=True):
            assert torch.equal(bits(mine), bits(due))
        for mine, handed_in in zip(tensors_of(got[2]), tensors_of(caches), strict=True):
            assert mine is handed_in

    same_bits(block.decoder_block, block.decoder_block_, x, copied(cache))
    same_bits(block.block_over_ranks, block.block_over_ranks_, [x, x], [copied(cache), copied(cache)])
