"""The whole layer on the operators' call path, emulated: one device, by heads, and over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import backend, layer
from dsacp_npu._layer_parts import copied
from dsacp_npu.backend import Backend
from dsacp_npu.layer import LayerCache
from dsacp_npu.quant import QuantizedVectors
from dsacp_ref import indexer as ref_indexer
from dsacp_ref import layer as ref
from dsacp_ref.partition import partition_tokens
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_same, assert_within_budget
from tests.layer_strategies import SMALL, Cut, Kind, World, world_of
from tests.maths_strategies import seeds
from tests.mirror.common import tensors_of, to_numpy, to_torch
from tests.strategies import fewer

pytestmark = pytest.mark.usefixtures("emulated")

# The sizes that the operators ask for, with few heads and a narrow latent; two chunks of a request fill an HCA entry.
LEGAL = replace(
    SMALL,
    hidden_size=1024,
    num_heads=8,
    head_dim=512,
    rope_head_dim=64,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    window_size=40,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
)
KINDS = (Kind(1, False, False), Kind(4, True, True), Kind(128, False, False))
by_ratio = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"ratio {kind.ratio}")


def legal_world(seed: int, lengths: list[int], kind: Kind) -> World:
    """Requests in blocks of 16, 32, 64 or 128 rows."""
    rng = np.random.default_rng(seed)
    swa_block, cmp_block = (int(size) for size in rng.choice([16, 32, 64, 128], 2))
    return world_of(rng, lengths, config=LEGAL, kind=kind, dtype=np.float32, swa_block=swa_block, cmp_block=cmp_block)


def on_operators(cache: ref.LayerCache) -> LayerCache:
    """The cache as the operators keep it: bfloat16 keys and entries, int8 index keys, float32 states."""
    shape = cache.index_cache.shape
    index_cache = to_torch(cache.index_cache, "bfloat16")
    if cache.index_cache.shape[2]:
        scales = torch.full(shape[:2], float("nan"), dtype=torch.float16)
        index_cache = QuantizedVectors(torch.full(shape, -128, dtype=torch.int8), scales)
    halves = [to_torch(part, "bfloat16") for part in cache[:2]]
    return LayerCache(*halves, index_cache, *(to_torch(state) for state in cache[3:]))


class Spy:
    """Indexer calls, and what they chose."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]] = []

    @property
    def backend(self) -> Backend:
        """The operators, listened to."""
        functions = dict(backend.get("cann").functions)
        inner = functions["lightning_indexer"]

        def listening(*args: Any, **kwargs: Any) -> torch.Tensor:
            chosen = inner(*args, **kwargs)
            self.calls.append((args, kwargs, chosen))
            return chosen

        return Backend("cann", {**functions, "lightning_indexer": listening})

    def check(self) -> None:
        """Every choice is, to the entry and its place, the int8 definition's for the same queries and codes."""
        for args, kwargs, chosen in self.calls:
            index_q, weights, codes, *rest = args
            floats = to_numpy((index_q, weights), "float64")
            assert "metadata" in kwargs, "made once for the step"
            sizes = {name: value for name, value in kwargs.items() if name != "metadata"}
            cache = ref_indexer.QuantizedVectors(*(part.numpy() for part in codes))
            want = ref_indexer.lightning_indexer(*floats, cache, *to_numpy(tuple(rest), "float64"), **sizes)
            assert_same(chosen, want, "lightning_indexer")


def float64_step(
    x: torch.Tensor, weights: Any, cache: LayerCache, batch: Any, kind: Kind, topk: torch.Tensor | None
) -> np.ndarray:
    """The definition's output of the same step from the same rounded numbers, given the selection."""
    args = to_numpy((x, weights, without_codes(cache), batch), "float64")
    given_topk = None if topk is None else topk.numpy()
    return ref.attention_layer(*args, LEGAL, compress_ratio=kind.ratio, given_topk=given_topk).output


def without_codes(cache: LayerCache) -> LayerCache:
    """The cache with float index keys, which nothing reads when the selection is given."""
    if not isinstance(cache.index_cache, QuantizedVectors):
        return cache
    return cache._replace(index_cache=torch.zeros(cache.index_cache.values.shape, dtype=torch.bfloat16))


def run_beside(
    world: World,
    chunks: list[list[int]],
    step: Callable[..., list[Any]],
    *,
    spy_on: Callable[[], Any] = Spy,
    cache_of: Callable[[ref.LayerCache], LayerCache] = on_operators,
) -> None:
    """Every chunk on a backend (by ``step``), in plain bfloat16 torch and in float64, given one selection.

    ``spy_on`` makes what listens to the backend, ``cache_of`` the cache as the backend keeps it.
    """
    kind, done = world.kind, [0] * len(world.x)
    weights, cache = to_torch(world.weights, "bfloat16"), cache_of(world.cache)
    for new in chunks:
        ends = [a + b for a, b in zip(done, new, strict=True)]
        x, batch = world.step(done, ends, idle=(1,))
        x, batch = to_torch(x, "bfloat16"), to_torch(batch)
        spy = spy_on()
        alone = layer.attention_layer(x, weights, cache, batch, LEGAL, compress_ratio=kind.ratio, backend=spy.backend)
        spy.check()
        topk = alone.topk_indices if kind.indexer else None
        plain = layer.attention_layer(x, weights, cache, batch, LEGAL, compress_ratio=kind.ratio, given_topk=topk)
        exact = float64_step(x, weights, cache, batch, kind, topk)
        num_tokens = int(batch.query_start_loc[-1])
        assert_within_budget(alone.output, exact, plain.output, "one device")
        for rank, (rows, output) in enumerate(step(x, weights, cache, batch, topk)):
            real = rows >= 0
            mine = output[: len(rows)][torch.from_numpy(real)]
            if num_tokens and real.any():
                assert_within_budget(mine, exact[rows[real]], plain.output[rows[real]], f"rank {rank}")
        cache, done = alone.cache, ends


def by_cut(cut: Cut, kind: Kind, ops: Backend) -> Callable[..., list[tuple[np.ndarray, torch.Tensor]]]:
    """A step over ranks on a backend: each rank's token of every output row, and its rows. Pad rows come in as NaN."""

    def over_ranks(x: torch.Tensor, weights: Any, cache: LayerCache, batch: Any, topk: Any) -> Any:
        partition = partition_tokens(batch.query_start_loc.numpy(), cut.cp_size, split=cut.split)
        own = [np.where(tokens < 0, len(x), tokens) for tokens in partition.token_indices]
        padded = torch.cat([x, x.new_full((1, x.shape[1]), float("nan"))])
        out = layer.layer_over_ranks(
            [x] * cut.cp_size if cut.rows == "full" else [padded[index] for index in own],
            weights,
            [cache] * cut.cp_size,
            batch,
            LEGAL,
            compress_ratio=kind.ratio,
            given_topk=topk,
            backend=ops,
            **cut.modes,
        )
        every = np.arange(int(batch.query_start_loc[-1]))
        return [
            (every if cut.rows == "full" else tokens, output)
            for tokens, output in zip(partition.token_indices, out.outputs, strict=True)
        ]

    return over_ranks


def by_heads(kind: Kind, ops: Backend) -> Callable[..., list[tuple[np.ndarray, torch.Tensor]]]:
    """A step by heads over two ranks on a backend."""

    def halves(x: torch.Tensor, weights: Any, cache: LayerCache, batch: Any, topk: Any) -> Any:
        out = layer.head_parallel_layer(x, weights, [cache] * 2, batch, LEGAL, compress_ratio=kind.ratio, backend=ops)
        every = np.arange(int(batch.query_start_loc[-1]))
        return [(every, output) for output in out.outputs]

    return halves


@st.composite
def chunks_of(draw: st.DrawFn) -> list[list[int]]:
    """Two requests: a chunk, perhaps a second one, then decode; enough tokens for an HCA entry in some."""
    first = [draw(st.sampled_from([3, 30, 126, 130])), draw(st.sampled_from([0, 1, 9]))]
    rest = draw(st.lists(st.sampled_from([[1, 1], [2, 0], [7, 3]]), min_size=1, max_size=2))
    return [first, *rest]


@pytest.mark.slow
@fewer(15)
@given(seed=seeds, chunks=chunks_of())
def test_attention_layer_on_the_emulator(seed: int, chunks: list[list[int]]) -> None:
    for kind in KINDS:
        world = legal_world(seed, [sum(new) for new in zip(*chunks, strict=True)], kind)
        run_beside(world, chunks, lambda *args: [])


@pytest.mark.slow
@fewer(15)
@given(seed=seeds, chunks=chunks_of())
def test_layer_over_ranks_on_the_emulator(seed: int, chunks: list[list[int]]) -> None:
    """Every output mode over 1 to 8 ranks, every split; the key modes that its compressor can serve."""
    rng = np.random.default_rng(seed)
    splits = ("contiguous", "zigzag", "round_robin", "contiguous_request", "zigzag_ceil", "round_robin_page(4)")
    for kind in KINDS:
        world = legal_world(seed, [sum(new) for new in zip(*chunks, strict=True)], kind)

        output_mode = ("all_to_all", "gather_weight", "replicated_weight")[int(rng.integers(3))]
        rows, key_mode = [("full", "replicate"), ("scattered", "gather_hidden")][int(rng.integers(2))]
        # Shares of heads must be a multiple of 4, which the operator asks for.
        size = int(rng.choice([1, 2])) if output_mode == "all_to_all" else int(rng.integers(1, 9))
        cut = Cut(size, str(rng.choice(splits)), rows, key_mode, output_mode)
        run_beside(world, chunks, by_cut(cut, kind, backend.get("cann")))


@by_ratio
def test_head_parallel_layer_on_the_emulator(kind: Kind) -> None:
    """Decode: each rank runs its share of the heads on the operators."""
    world = legal_world(kind.ratio, [131, 5], kind)
    run_beside(world, [[130, 4], [1, 1]], by_heads(kind, backend.get("cann")))


@by_ratio
def test_in_place_layers_on_the_emulator(kind: Kind) -> None:
    """They give the bits of the pure ones, and leave them in the caches."""
    world = legal_world(6, [9, 5], kind)
    x, batch = world.step([0, 0], [9, 5])
    weights, cache = to_torch(world.weights, "bfloat16"), on_operators(world.cache)
    rest = (to_torch(batch), LEGAL)
    options = {"compress_ratio": kind.ratio, "backend": backend.get("cann")}

    def same_bits(pure: Callable[..., Any], in_place: Callable[..., Any], rows: Any, size: int) -> None:
        caches = [copied(cache) for _ in range(size)]
        want = pure(rows, weights, caches if size > 1 else caches[0], *rest, **options)
        got = in_place(rows, weights, caches if size > 1 else caches[0], *rest, **options)
        for mine, due in zip(tensors_of(tuple(got)), tensors_of(tuple(want)), strict=True):
            assert torch.equal(bits(mine), bits(due))
        for mine, handed_in in zip(tensors_of(got[2]), tensors_of(caches), strict=True):
            assert mine is handed_in

    x = to_torch(x, "bfloat16")
    same_bits(layer.attention_layer, layer.attention_layer_, x, 1)
    same_bits(layer.head_parallel_layer, layer.head_parallel_layer_, x, 2)
    same_bits(layer.layer_over_ranks, layer.layer_over_ranks_, [x, x], 2)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, NaN among them."""
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)


@by_ratio
def test_a_step_without_tokens_or_requests(kind: Kind) -> None:
    """No operator takes an empty call, and none is made."""
    world = legal_world(1, [3], kind)
    for chunk in ([[0]], [[3], [0]]):
        run_beside(world, chunk, lambda *args: [])
    x = torch.zeros(0, LEGAL.hidden_size, dtype=torch.bfloat16)
    table = torch.zeros(0, 1, dtype=torch.int32)
    loc, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    batch = layer.LayerBatch(loc, none, table, table.clone(), none.clone())
    args = (x, to_torch(world.weights, "bfloat16"), on_operators(world.cache), batch, LEGAL)
    out = layer.attention_layer(*args, compress_ratio=kind.ratio, backend=backend.get("cann"))
    assert out.output.shape == (0, LEGAL.hidden_size)


@pytest.mark.slow
def test_a_real_choice_on_the_emulator() -> None:
    """2080 tokens hold 520 entries: the operator leaves some out, and its choice is the int8 definition's."""
    world = legal_world(2, [2090], KINDS[1])
    run_beside(world, [[2080], [10]], lambda *args: [])


@pytest.mark.parametrize("key_mode", ["gather_kv", "gather_compressed"])
def test_key_modes_that_the_compressor_cannot_serve_are_refused(key_mode: str) -> None:
    """It takes hidden rows, not projections: refused by name, and no cache is touched."""
    world = legal_world(3, [9], KINDS[1])
    x, batch = world.step([0], [9])
    caches = [on_operators(world.cache) for _ in range(2)]
    args = ([to_torch(x, "bfloat16")] * 2, to_torch(world.weights, "bfloat16"), caches, to_torch(batch), LEGAL)
    with pytest.raises(UnsupportedError, match="backend 'cann' has no projected_rows"):
        layer.layer_over_ranks_(*args, compress_ratio=4, key_mode=key_mode, backend=backend.get("cann"))
    assert not caches[0].cmp_state.num_tokens.any()
    assert caches[0].swa_cache.isnan().all()
