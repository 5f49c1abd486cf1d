"""Worlds for the layer: weights, whole requests, poisoned paged caches, and steps cut from the requests.

Whatever must not be read is NaN: unused slots, rings that hold nothing yet, rows of padded graph slots. Tables hold
garbage beyond the used part. Arrays come out read-only, so a function that changes its input fails loudly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from hypothesis import strategies as st

from dsacp_ref.compressor import CompressorState, CompressorWeights, rolled_back_state
from dsacp_ref.config import AttentionConfig
from dsacp_ref.indexer import IndexerWeights
from dsacp_ref.layer import LayerBatch, LayerCache, LayerWeights, attention_layer, empty_cache, layer_over_ranks
from dsacp_ref.partition import partition_tokens
from tests.maths_strategies import GARBAGE, int32, seeds
from tests.oracles import layer as oracle
from tests.oracles import rope
from tests.strategies import read_only

# Every choice is real after a few tokens: a short window, few entries chosen, all rotary pairs turning.
SMALL = AttentionConfig(
    hidden_size=8,
    num_hidden_layers=3,
    num_heads=4,
    head_dim=6,
    rope_head_dim=4,
    q_lora_rank=5,
    o_groups=2,
    o_lora_rank=3,
    window_size=5,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=2,
    rope_theta=50.0,
    compress_rope_theta=90.0,
    rope_factor=4.0,
    rope_beta_fast=2.0,
    rope_beta_slow=0.5,
    rope_original_max_position=64,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    compress_ratios=(1, 4, 8),
)
SPARE_SLOTS = 4  # state slots beyond the requests', for padded graph slots


class Kind(NamedTuple):
    """What sort of layer: any ratio may have any form."""

    ratio: int
    overlap: bool
    indexer: bool


WINDOW, CSA, HCA = Kind(1, False, False), Kind(4, True, True), Kind(8, False, False)
KINDS = (WINDOW, CSA, HCA)
OTHER_KINDS = (Kind(2, True, True), Kind(3, True, False), Kind(5, False, True), Kind(2, False, False))
EVERY_KIND = (*KINDS, *OTHER_KINDS)
Forward = Callable[[np.ndarray, LayerBatch, Any], tuple[np.ndarray, np.ndarray, Any]]
Tree = TypeVar("Tree")


def frozen(value: Tree) -> Tree:
    """The same records, lists and arrays, the arrays refusing writes."""
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif isinstance(value, (tuple, list)):
        for part in value:
            frozen(part)
    return value


def weights_of(rng: np.random.Generator, config: AttentionConfig, kind: Kind, dtype: Any = np.float64) -> LayerWeights:
    """Weights wide enough that softmax, gates and top-k make real choices."""

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])).astype(dtype)

    def gain(size: int) -> np.ndarray:
        return (1 + 0.3 * rng.standard_normal(size)).astype(dtype)

    def compressor(d: int) -> CompressorWeights:
        width = 2 * d if kind.overlap else d
        bias = rng.standard_normal((kind.ratio, width)).astype(dtype)
        return CompressorWeights(matrix(width, config.hidden_size), matrix(width, config.hidden_size), bias, gain(d))

    heads, groups, hidden = config.num_heads, config.o_groups, config.hidden_size
    indexer = None
    if kind.indexer:
        queries = matrix(config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        indexer = IndexerWeights(queries, matrix(config.index_n_heads, hidden), compressor(config.index_head_dim))
    return frozen(
        LayerWeights(
            matrix(config.q_lora_rank, hidden),
            gain(config.q_lora_rank),
            matrix(heads * config.head_dim, config.q_lora_rank),
            matrix(config.head_dim, hidden),
            gain(config.head_dim),
            (2 * rng.standard_normal(heads)).astype(dtype),
            matrix(groups, config.o_lora_rank, heads // groups * config.head_dim),
            matrix(hidden, groups * config.o_lora_rank),
            compressor(config.head_dim) if kind.ratio > 1 else None,
            indexer,
        )
    )


def poisoned(cache: LayerCache) -> LayerCache:
    """An empty cache with NaN wherever it holds nothing yet."""

    def ring(state: CompressorState) -> CompressorState:
        return state._replace(kv=np.full_like(state.kv, np.nan), score=np.full_like(state.score, np.nan))

    floats = [np.full_like(part, np.nan) for part in (cache.swa_cache, cache.cmp_cache, cache.index_cache)]
    return frozen(LayerCache(*floats, ring(cache.cmp_state), ring(cache.index_state)))


class World(NamedTuple):
    """Some requests, whole, and a layer with room for them."""

    config: AttentionConfig
    kind: Kind
    weights: LayerWeights
    x: list[np.ndarray]  # [tokens, hidden] of each request
    swa_table: np.ndarray
    cmp_table: np.ndarray
    state_slots: np.ndarray  # the requests' slots, then spare ones
    cache: LayerCache  # before the first step

    @property
    def lengths(self) -> list[int]:
        return [len(rows) for rows in self.x]

    def step(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        order: Sequence[int] | None = None,
        idle: Sequence[int] = (),
        beyond: int = 0,
    ) -> tuple[np.ndarray, LayerBatch]:
        """Rows [start, end) of each request; then padded graph slots of ``idle`` rows each, then rows of nobody."""
        order = range(len(self.x)) if order is None else order
        query_lens = [ends[b] - starts[b] for b in order] + list(idle)
        poison = np.full((sum(idle) + beyond, self.config.hidden_size), np.nan)
        dtype = self.cache.swa_cache.dtype
        rows = np.concatenate([*(self.x[b][starts[b] : ends[b]] for b in order), poison]).astype(dtype)
        pick = [*order, *range(len(self.x), len(self.x) + len(idle))]  # tables have garbage rows for idle slots
        batch = LayerBatch(
            int32(np.concatenate([[0], np.cumsum(query_lens)])),
            int32([ends[b] for b in order] + [0] * len(idle)),
            read_only(self.swa_table[pick]),
            read_only(self.cmp_table[pick]),
            read_only(self.state_slots[pick]),
        )
        return read_only(rows), batch


def world_of(
    rng: np.random.Generator,
    lengths: Sequence[int],
    *,
    config: AttentionConfig = SMALL,
    kind: Kind = CSA,
    dtype: Any = np.float64,
    swa_block: int = 4,
    cmp_block: int = 3,
    spare_rows: int = 0,
    weights: LayerWeights | None = None,
    x: list[np.ndarray] | None = None,
) -> World:
    """Random contents in shuffled blocks and state slots, other blocks and slots left over."""
    if weights is None:
        weights = weights_of(rng, config, kind, dtype)
    if x is None:
        x = [read_only(rng.standard_normal((length, config.hidden_size)).astype(dtype)) for length in lengths]

    def table(counts: list[int]) -> tuple[np.ndarray, int]:
        num_blocks = sum(counts) + int(rng.integers(1, 4))
        blocks = rng.permutation(num_blocks).tolist()
        width = max(counts, default=0) + int(rng.integers(0, 3))
        rows = rng.choice(GARBAGE, (len(counts) + SPARE_SLOTS, width)).astype(np.int32)
        for row, count in zip(rows, counts, strict=False):
            row[:count] = [blocks.pop() for _ in range(count)]
        return read_only(rows), num_blocks

    swa_table, num_blocks = table([-(-length // swa_block) for length in lengths])
    entries = [length // kind.ratio if kind.ratio > 1 else 0 for length in lengths]
    cmp_table, num_cmp_blocks = table([-(-count // cmp_block) for count in entries])
    num_slots = len(lengths) + SPARE_SLOTS + 1
    cache = empty_cache(
        weights,
        num_blocks=num_blocks,
        block_size=swa_block,
        num_cmp_blocks=num_cmp_blocks,
        cmp_block_size=cmp_block,
        num_slots=num_slots,
        spare_rows=spare_rows,
    )
    slots = read_only(rng.permutation(num_slots)[:-1].astype(np.int32))
    return World(config, kind, weights, x, swa_table, cmp_table, slots, poisoned(cache))


class Run(NamedTuple):
    """All steps of all requests."""

    outputs: list[np.ndarray]  # [tokens, hidden] of each request
    topk: list[np.ndarray]
    cache: Any


def one_device(world: World) -> Forward:
    """A step on one device."""

    def forward(x: np.ndarray, batch: LayerBatch, cache: LayerCache) -> tuple[np.ndarray, np.ndarray, LayerCache]:
        out = attention_layer(x, world.weights, cache, batch, world.config, compress_ratio=world.kind.ratio)
        return out.output, out.topk_indices, frozen(out.cache)

    return forward


def run(
    world: World,
    steps: Iterable[Sequence[int]],
    forward: Forward | None = None,
    *,
    starts: Sequence[int] | None = None,
    cache: Any = None,
    **step_options: Any,
) -> Run:
    """The requests fed step by step; a step says how many new tokens each request brings."""
    forward = one_device(world) if forward is None else forward
    cache = world.cache if cache is None else cache
    done = [0] * len(world.x) if starts is None else list(starts)
    outputs: list[list[np.ndarray]] = [[] for _ in world.x]
    topk: list[list[np.ndarray]] = [[] for _ in world.x]
    for new in steps:
        ends = [a + b for a, b in zip(done, new, strict=True)]
        x, batch = world.step(done, ends, **step_options)
        rows, chosen, cache = forward(x, batch, cache)
        at = 0
        for request, count in enumerate(new):
            outputs[request].append(rows[at : at + count])
            topk[request].append(chosen[at : at + count])
            at += count
        done = ends
    empty = np.zeros((0, world.config.hidden_size), world.cache.swa_cache.dtype)
    nothing = np.zeros((0, world.config.index_topk if world.kind.indexer else 0), np.int32)
    return Run(
        [np.concatenate([empty, *parts]) for parts in outputs],
        [np.concatenate([nothing, *parts]) for parts in topk],
        cache,
    )


class Cut(NamedTuple):
    """How a layer is spread over ranks."""

    cp_size: int
    split: str = "contiguous"
    rows: str = "full"
    key_mode: str = "replicate"
    output_mode: str = "all_to_all"
    padding: int = 0  # rows of the stream beyond the real ones

    @property
    def modes(self) -> dict[str, str]:
        return {"split": self.split, "rows": self.rows, "key_mode": self.key_mode, "output_mode": self.output_mode}


def over_ranks(world: World, cut: Cut) -> Forward:
    """A step over ranks, put together; what no row of the model may depend on goes in as NaN."""

    def forward(x: np.ndarray, batch: LayerBatch, caches: Any) -> tuple[np.ndarray, np.ndarray, list[LayerCache]]:
        caches = [world.cache] * cut.cp_size if isinstance(caches, LayerCache) else caches
        num_tokens = int(batch.query_start_loc[-1])
        num_rows = num_tokens + cut.padding if cut.padding else None
        partition = partition_tokens(batch.query_start_loc, cut.cp_size, split=cut.split, num_input_tokens=num_rows)
        padded = np.concatenate([x, np.full((cut.padding, x.shape[1]), np.nan, x.dtype)])
        if cut.rows == "full":
            inputs = [read_only(padded)] * cut.cp_size
        else:
            nan_row = np.full((1, x.shape[1]), np.nan, x.dtype)
            inputs = [read_only(np.concatenate([x, nan_row])[tokens]) for tokens in partition.token_indices]
        out = layer_over_ranks(
            inputs,
            world.weights,
            caches,
            batch,
            world.config,
            compress_ratio=world.kind.ratio,
            num_input_tokens=num_rows,
            **cut.modes,
        )
        output = np.zeros((num_tokens, x.shape[1]), x.dtype)
        topk = np.full((num_tokens, out.topk_indices[0].shape[1]), -2, np.int32)
        for rank, tokens in enumerate(partition.token_indices):
            real = tokens >= 0
            topk[tokens[real]] = out.topk_indices[rank][real]
            assert (out.topk_indices[rank][~real] == -1).all()
            if cut.rows == "full":
                assert out.outputs[rank].shape == padded.shape
                assert np.array_equal(out.outputs[rank], out.outputs[0])
                assert not out.outputs[rank][num_tokens:].any()
                output = out.outputs[rank][:num_tokens]
            else:
                output[tokens[real]] = out.outputs[rank][real]
                assert not out.outputs[rank][~real].any()
        return output, topk, frozen(out.caches)

    return forward


def rolled_back(cache: LayerCache, keep: dict[int, int], kind: Kind) -> LayerCache:
    """The cache with these slots' states ending at these tokens."""

    def taken_back(state: CompressorState) -> CompressorState:
        tokens = state.num_tokens.copy()
        for slot, count in keep.items():
            tokens[slot] = count
        return rolled_back_state(state, tokens, compress_ratio=kind.ratio, overlap=kind.overlap)

    if kind.ratio == 1:
        return cache
    cache = cache._replace(cmp_state=taken_back(cache.cmp_state))
    return frozen(cache._replace(index_state=taken_back(cache.index_state)) if kind.indexer else cache)


def cached_rows(cache: np.ndarray, table_row: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Logical rows [start, stop) of one request, one by one."""
    size = cache.shape[1]
    rows = [cache[table_row[i // size], i % size] for i in range(start, stop)]
    return np.array(rows, cache.dtype).reshape(stop - start, cache.shape[2])


# --- the slow oracle ---


def oracle_weights(weights: LayerWeights) -> dict[str, np.ndarray]:
    """The weights under the oracle's names."""
    named = {name: value for name, value in weights._asdict().items() if isinstance(value, np.ndarray)}
    pools = {"cmp_": weights.compressor, "idx_cmp_": weights.indexer.compressor if weights.indexer else None}
    for prefix, pool in pools.items():
        if pool:
            names = [prefix + name for name in ("wkv", "wgate", "ape", "norm")]
            named |= dict(zip(names, pool, strict=True))
    if weights.indexer:
        named |= {"idx_wq_b": weights.indexer.wq_b, "idx_weights_proj": weights.indexer.weights_proj}
    return named


def oracle_config(config: AttentionConfig, ratio: int) -> dict[str, Any]:
    """The constants under the oracle's names, with the layer's frequencies from the oracle's own table."""
    yarn = {
        "factor": config.rope_factor,
        "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow,
        "original": config.rope_original_max_position,
    }
    theta = config.rope_theta if ratio == 1 else config.compress_rope_theta
    names = ("num_heads", "head_dim", "rope_head_dim", "o_groups", "window_size")
    names += ("index_n_heads", "index_head_dim", "index_topk")
    freqs = rope.frequencies(theta, config.rope_head_dim, None if ratio == 1 else yarn)
    return {name: getattr(config, name) for name in names} | {"eps": config.rms_norm_eps, "freqs": freqs}


def oracle_layer(world: World, request: int, given: np.ndarray | None = None) -> tuple[np.ndarray, list[set[int]]]:
    """(outputs, the set of entries of each token) of one request; only for kinds that the oracle knows."""
    ratio = world.kind.ratio
    assert world.kind == CSA or not (world.kind.overlap or world.kind.indexer)
    rows = world.x[request]
    if len(rows) == 0:
        return np.zeros((0, world.config.hidden_size)), []
    constants = oracle_config(world.config, ratio)
    outputs, chosen = oracle.layer(rows, oracle_weights(world.weights), constants, ratio, given)
    return np.array(outputs), chosen


def as_sets(topk: np.ndarray) -> list[set[int]]:
    return [set(row) - {-1} for row in topk.tolist()]


# --- strategies ---


@st.composite
def chunkings(draw: st.DrawFn, ratio: int, *, max_reqs: int = 3, max_steps: int = 4) -> list[list[int]]:
    """New tokens of each request in each step: none, one, a window, something longer; the first step is often long."""
    num_reqs = draw(st.integers(1, max_reqs))
    length = st.one_of(st.sampled_from([0, 1, 1, ratio]), st.integers(0, 9))
    first = st.one_of(length, st.integers(8, 18), st.integers(12, 24))
    steps = [draw(st.lists(first, min_size=num_reqs, max_size=num_reqs))]
    steps += draw(st.lists(st.lists(length, min_size=num_reqs, max_size=num_reqs), min_size=0, max_size=max_steps - 1))
    return steps


@st.composite
def worlds(
    draw: st.DrawFn,
    *,
    kinds: Sequence[Kind] = KINDS,
    dtype: Any = np.float64,
    max_reqs: int = 3,
    max_steps: int = 4,
    spare_rows: int = 0,
    **fields: Any,
) -> tuple[World, list[list[int]]]:
    """A world, and a way to feed it."""
    kind = draw(st.sampled_from(list(kinds)))
    steps = draw(chunkings(kind.ratio, max_reqs=max_reqs, max_steps=max_steps))
    sizes = {"window_size": draw(st.sampled_from([1, 2, 5, 9, 40])), "index_topk": draw(st.sampled_from([1, 2, 3, 12]))}
    world = world_of(
        np.random.default_rng(draw(seeds)),
        [sum(new) for new in zip(*steps, strict=True)],
        config=replace(SMALL, **sizes | fields),
        kind=kind,
        dtype=dtype,
        swa_block=draw(st.integers(1, 5)),
        cmp_block=draw(st.integers(1, 4)),
        spare_rows=spare_rows,
    )
    return world, steps


# The split rules that can pool on the rank: it holds whole windows but for a halo.
POOLING_SPLITS = ("contiguous", "contiguous_request", "zigzag", "zigzag_ceil", "zigzag_padded")


def legal_cut(rng: np.random.Generator, ratio: int) -> Cut:
    """A combination that works, over 1 to 8 ranks, sometimes with graph padding where the rule can cut it."""

    def pick(*choices: str) -> str:
        return choices[int(rng.integers(len(choices)))]

    rows = pick("full", "scattered")
    key_mode = pick("gather_kv", "gather_compressed", "replicate" if rows == "full" else "gather_hidden")
    page = int(rng.integers(1, 6))
    if key_mode == "gather_compressed" and ratio > 1:
        split = pick(*POOLING_SPLITS, f"round_robin_page({page * ratio})")
    else:
        split = pick(*POOLING_SPLITS, "round_robin", f"round_robin_page({page})")
    padding = int(rng.choice([0, 0, 1, 7])) if split in ("contiguous", "round_robin") else 0
    output_mode = pick("all_to_all", "gather_weight", "replicated_weight")
    return Cut(int(rng.integers(1, 9)), split, rows, key_mode, output_mode, padding)


def config_for(rng: np.random.Generator, config: AttentionConfig, cut: Cut) -> AttentionConfig:
    """Heads and groups that the combination can divide, or any number of them."""
    groups = cut.cp_size * int(rng.integers(1, 3)) if cut.output_mode == "all_to_all" else int(rng.integers(1, 4))
    return replace(config, num_heads=groups * int(rng.integers(1, 3)), o_groups=groups)


@st.composite
def worlds_over_ranks(
    draw: st.DrawFn, *, kinds: Sequence[Kind] = EVERY_KIND, num_cuts: int = 3, **options: Any
) -> list[tuple[World, list[list[int]], Cut]]:
    """The same requests and steps under several combinations, spread evenly: each world has heads to fit its own."""
    world, steps = draw(worlds(kinds=kinds, **options))
    rng = np.random.default_rng(draw(seeds))
    cases = []
    for _ in range(num_cuts):
        cut = legal_cut(rng, world.kind.ratio)
        config = config_for(rng, world.config, cut)
        weights = weights_of(rng, config, world.kind)
        cases.append((world._replace(config=config, weights=weights), steps, cut))
    return cases
