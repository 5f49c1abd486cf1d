"""Worlds for attention over latents: tiny configs, weights, paged caches full of NaN, calls, and requests cut in steps.

As in `tests.layer_strategies`, whatever must not be read is NaN or garbage, and arrays come out read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.mla_layer import (
    MLABatch,
    MLACache,
    MLAIndexerWeights,
    MLAWeights,
    empty_mla_cache,
    mla_attention_layer,
    mla_over_ranks,
)
from dsacp_ref.mla_stack import MLABlockWeights, StackWeights, mla_decoder_stack, mla_stack_over_ranks
from dsacp_ref.partition import partition_tokens
from tests import plain
from tests.block_strategies import expert_of
from tests.compare import assert_same
from tests.layer_strategies import SPARE_SLOTS, as_sets, cached_rows, chunkings, frozen
from tests.maths_strategies import GARBAGE, Call, Paged, dtypes, int32, normal, operator_rows, paged, seeds
from tests.oracles import mla as oracle
from tests.oracles import mla_stack as stack_oracle
from tests.oracles import rope
from tests.plain_layer import latent as plain_query_latent
from tests.plain_layer import normed as plain_normed
from tests.strategies import read_only

# Few tokens chosen of many, every rotary pair turning, and YaRN with an amplitude that shows in the logits.
SMALL = MLAConfig(
    hidden_size=9,
    num_hidden_layers=2,
    num_heads=3,
    q_lora_rank=7,
    kv_lora_rank=8,
    nope_head_dim=5,
    rope_head_dim=4,
    v_head_dim=3,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=3,
    rope_theta=50.0,
    rope_factor=4.0,
    rope_beta_fast=2.0,
    rope_beta_slow=0.5,
    rope_original_max_position=64,
    mscale_all_dim=1.0,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
)
Forward = Callable[[np.ndarray, MLABatch, Any], tuple[np.ndarray, np.ndarray, Any]]


def weights_of(rng: np.random.Generator, config: MLAConfig, dtype: Any = np.float64) -> MLAWeights:
    """Weights wide enough that softmax and top-k make real choices."""

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])).astype(dtype)

    def gain(size: int) -> np.ndarray:
        return (1 + 0.3 * rng.standard_normal(size)).astype(dtype)

    c = config
    index_width = c.index_head_dim
    return frozen(
        MLAWeights(
            wq_a=matrix(c.q_lora_rank, c.hidden_size),
            q_norm=gain(c.q_lora_rank),
            wq_b=matrix(c.num_heads * (c.nope_head_dim + c.rope_head_dim), c.q_lora_rank),
            wkv_a=matrix(c.kv_lora_rank + c.rope_head_dim, c.hidden_size),
            kv_norm=gain(c.kv_lora_rank),
            w_uk=matrix(c.num_heads, c.nope_head_dim, c.kv_lora_rank),
            w_uv=matrix(c.num_heads, c.v_head_dim, c.kv_lora_rank),
            wo=matrix(c.hidden_size, c.num_heads * c.v_head_dim),
            indexer=MLAIndexerWeights(
                wq_b=matrix(c.index_n_heads * index_width, c.q_lora_rank),
                wk=matrix(index_width, c.hidden_size),
                k_norm=gain(index_width),
                k_norm_bias=(0.5 * rng.standard_normal(index_width)).astype(dtype),
                weights_proj=matrix(c.index_n_heads, c.hidden_size),
            ),
        )
    )


def poisoned(part: Any) -> Any:
    """An empty cache that holds NaN everywhere, in numbers and in codes; where codes have none, the largest."""
    if isinstance(part, tuple):
        return frozen(type(part)(*map(poisoned, part)))
    if part is None:
        return None
    return np.full_like(part, 0x7F if part.dtype.kind in "iu" else np.nan)


class World(NamedTuple):
    """Some requests, whole, and a layer with room for them."""

    config: MLAConfig
    weights: MLAWeights
    x: list[np.ndarray]  # [tokens, hidden] of each request
    table: np.ndarray  # the requests' rows, then rows of garbage for padded graph slots
    cache: MLACache  # before the first step

    @property
    def lengths(self) -> list[int]:
        return [len(rows) for rows in self.x]

    @property
    def dtype(self) -> np.dtype:
        return self.weights.wq_a.dtype

    def step(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        order: Sequence[int] | None = None,
        idle: Sequence[int] = (),
        beyond: int = 0,
    ) -> tuple[np.ndarray, MLABatch]:
        """Rows [start, end) of each request; then padded graph slots of ``idle`` rows each, then rows of nobody."""
        order = range(len(self.x)) if order is None else order
        query_lens = [ends[b] - starts[b] for b in order] + list(idle)
        poison = np.full((sum(idle) + beyond, self.config.hidden_size), np.nan)
        rows = np.concatenate([*(self.x[b][starts[b] : ends[b]] for b in order), poison]).astype(self.dtype)
        pick = [*order, *range(len(self.x), len(self.x) + len(idle))]
        batch = MLABatch(
            int32(np.concatenate([[0], np.cumsum(query_lens)])),
            int32([ends[b] for b in order] + [0] * len(idle)),
            read_only(self.table[pick]),
        )
        return read_only(rows), batch


def world_of(
    rng: np.random.Generator,
    lengths: Sequence[int],
    *,
    config: MLAConfig = SMALL,
    dtype: Any = np.float64,
    block_size: int = 4,
    weights: MLAWeights | None = None,
    x: list[np.ndarray] | None = None,
    **codes: bool,
) -> World:
    """Random contents in shuffled blocks, other blocks left over; ``codes`` as `empty_mla_cache` takes them."""
    if weights is None:
        weights = weights_of(rng, config, dtype)
    if x is None:
        x = [normal(rng, length, config.hidden_size, dtype=dtype) for length in lengths]
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + int(rng.integers(1, 4))
    blocks = rng.permutation(num_blocks).tolist()
    width = max(counts, default=0) + int(rng.integers(0, 3))
    table = rng.choice(GARBAGE, (len(counts) + SPARE_SLOTS, width)).astype(np.int32)
    for row, count in zip(table, counts, strict=False):
        row[:count] = [blocks.pop() for _ in range(count)]
    cache = empty_mla_cache(config, num_blocks=num_blocks, block_size=block_size, dtype=np.dtype(dtype).name, **codes)
    return World(config, weights, x, read_only(table), poisoned(cache))


class Run(NamedTuple):
    """All steps of all requests."""

    outputs: list[np.ndarray]  # [tokens, hidden] of each request
    topk: list[np.ndarray]
    cache: Any


def one_device(world: World) -> Forward:
    """A step on one device."""

    def forward(x: np.ndarray, batch: MLABatch, cache: MLACache) -> tuple[np.ndarray, np.ndarray, MLACache]:
        out = mla_attention_layer(x, world.weights, cache, batch, world.config)
        return out.output, out.topk_indices, frozen(out.cache)

    return forward


def run(
    world: World,
    steps: Iterable[Sequence[int]],
    forward: Forward | None = None,
    **step_options: Any,
) -> Run:
    """The requests fed step by step; a step says how many new tokens each request brings."""
    forward = one_device(world) if forward is None else forward
    cache: Any = world.cache
    done = [0] * len(world.x)
    outputs = [[np.zeros((0, world.config.hidden_size), world.dtype)] for _ in world.x]
    topk = [[np.zeros((0, world.config.index_topk), np.int32)] for _ in world.x]
    for new in steps:
        ends = [a + b for a, b in zip(done, new, strict=True)]
        x, batch = world.step(done, ends, **step_options)
        rows, chosen, cache = forward(x, batch, cache)
        at = 0
        for request, count in enumerate(new):
            outputs[request].append(rows[at : at + count])
            topk[request].append(chosen[at : at + count])
            at += count
        assert not rows[at:].any()
        assert (chosen[at:] == -1).all()
        done = ends
    return Run([np.concatenate(parts) for parts in outputs], [np.concatenate(parts) for parts in topk], cache)


class Cut(NamedTuple):
    """How a layer is spread over ranks."""

    cp_size: int
    split: str = "zigzag"
    padding: int = 0  # rows of the stream beyond the real ones
    kept_keys: str = "all"


def over_ranks(world: World, cut: Cut) -> Forward:
    """A step over ranks, put together; rows of nobody go in as NaN."""

    def forward(x: np.ndarray, batch: MLABatch, caches: Any) -> tuple[np.ndarray, np.ndarray, list[MLACache]]:
        caches = [world.cache] * cut.cp_size if isinstance(caches, MLACache) else caches
        num_tokens = int(batch.query_start_loc[-1])
        num_rows = num_tokens + cut.padding if cut.padding else None
        partition = partition_tokens(batch.query_start_loc, cut.cp_size, split=cut.split, num_input_tokens=num_rows)
        with_nan = np.concatenate([x, np.full((1, x.shape[1]), np.nan, x.dtype)])
        out = mla_over_ranks(
            [read_only(with_nan[tokens]) for tokens in partition.token_indices],
            world.weights,
            caches,
            batch,
            world.config,
            split=cut.split,
            num_input_tokens=num_rows,
            kept_keys=cut.kept_keys,
        )
        output = np.full((num_tokens, x.shape[1]), np.nan, x.dtype)
        topk = np.full((num_tokens, world.config.index_topk), -2, np.int32)
        for rank, tokens in enumerate(partition.token_indices):
            real = tokens >= 0
            output[tokens[real]], topk[tokens[real]] = out.outputs[rank][real], out.topk_indices[rank][real]
            assert not out.outputs[rank][~real].any()
            assert (out.topk_indices[rank][~real] == -1).all()
        return output, topk, frozen(out.caches)

    return forward


def request_rows(cache: MLACache, world: World, request: int) -> MLACache:
    """The cached rows of one whole request, in order."""
    length = world.lengths[request]
    return MLACache(*(cached_rows(part, world.table[request], 0, length) for part in cache))


# --- the slow oracle, and the plain low-precision computation ---


def frequencies_of(config: MLAConfig) -> list[np.float32]:
    """The oracle's own table."""
    yarn = {
        "factor": config.rope_factor,
        "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow,
        "original": config.rope_original_max_position,
    }
    return rope.frequencies(config.rope_theta, config.rope_head_dim, yarn if config.rope_factor > 1 else None)


def oracle_config(config: MLAConfig) -> dict[str, Any]:
    """The constants under the oracle's names."""
    names = ("num_heads", "kv_lora_rank", "nope_head_dim", "rope_head_dim", "v_head_dim", "rope_factor")
    names += ("mscale_all_dim", "index_n_heads", "index_head_dim", "index_topk")
    constants = {name: getattr(config, name) for name in names}
    return constants | {"eps": config.rms_norm_eps, "freqs": frequencies_of(config)}


def oracle_weights(weights: MLAWeights) -> dict[str, np.ndarray]:
    """The weights under the oracle's names."""
    named = {name: value for name, value in weights._asdict().items() if name != "indexer"}
    return named | {f"idx_{name}": value for name, value in weights.indexer._asdict().items()}


def oracle_layer(
    world: World, request: int, num_computed: int = 0, given: Sequence[Iterable[int]] | None = None
) -> oracle.Layer:
    """One request's tokens from ``num_computed`` on."""
    weights, constants = oracle_weights(world.weights), oracle_config(world.config)
    return oracle.layer(world.x[request], num_computed, weights, constants, given)


def reordered(
    x: np.ndarray, w: dict[str, np.ndarray], order: np.random.Generator
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The same layer with its hidden channels, query latents and latents in another order: sums come out otherwise."""
    hidden, low_rank, rank = (order.permutation(count) for count in (*w["wq_a"].shape[::-1], len(w["kv_norm"])))
    rows = np.concatenate([rank, np.arange(len(rank), len(w["wkv_a"]))])  # rope channels stay paired
    moved = {
        "wq_a": w["wq_a"][low_rank][:, hidden],
        "q_norm": w["q_norm"][low_rank],
        "wq_b": w["wq_b"][:, low_rank],
        "wkv_a": w["wkv_a"][rows][:, hidden],
        "kv_norm": w["kv_norm"][rank],
        "w_uk": w["w_uk"][:, :, rank],
        "w_uv": w["w_uv"][:, :, rank],
    }
    return x[:, hidden], w | moved


def plain_outputs(world: World, topk: list[np.ndarray], count: int = 4) -> list[np.ndarray]:
    """Outputs [tokens of all requests, hidden] in the world's dtype over the tokens chosen, in several orders."""
    weights, constants, rng = oracle_weights(world.weights), oracle_config(world.config), np.random.default_rng(0)
    orders = []
    for _ in range(count):
        parts = [
            plain_layer(*reordered(x, weights, rng), constants, as_sets(picks))
            for x, picks in zip(world.x, topk, strict=True)
            if len(x)
        ]
        orders.append(np.concatenate([np.zeros((0, world.config.hidden_size), world.dtype), *parts]))
    return orders


def plain_layer(x: np.ndarray, w: dict[str, np.ndarray], config: dict[str, Any], chosen: list[set[int]]) -> np.ndarray:
    """Outputs [L, hidden] of one request from position 0 over the tokens chosen, in the dtype of x."""
    freqs, eps, rank = config["freqs"], config["eps"], config["kv_lora_rank"]
    nope, dtype = config["nope_head_dim"], x.dtype.type
    scale = oracle.softmax_scale(nope, config["rope_head_dim"], config["rope_factor"], config["mscale_all_dim"])
    both = x @ w["wkv_a"].T
    latents = plain_normed(both[:, :rank], eps) * w["kv_norm"]
    turned = np.stack([plain.rotated(row, p, freqs) for p, row in enumerate(both[:, rank:])])
    keys, values = (np.einsum("hdr,tr->htd", w[name], latents) for name in ("w_uk", "w_uv"))
    q = (plain_query_latent(x, w, eps) @ w["wq_b"].T).reshape(len(x), config["num_heads"], -1)
    outputs = []
    for p, heads in enumerate(q):
        seen, out = sorted(chosen[p]), []
        for h, head in enumerate(heads):
            head = plain.rotated(head, p, freqs)
            # BLAS once flagged an invalid operation here on finite numbers; whether one happened, the numbers say.
            with np.errstate(invalid="ignore"):
                logits = (keys[h, seen] @ head[:nope] + turned[seen] @ head[nope:]) * dtype(scale)
            assert np.isfinite(logits).all()
            weights = np.exp(logits - logits.max())
            out.append(weights / weights.sum() @ values[h, seen])
        outputs.append(w["wo"] @ np.concatenate(out))
    return np.stack(outputs)


def plain_half_rotated(x: np.ndarray, freqs: list[np.float32]) -> np.ndarray:
    """Rows [L, ..., d] of positions 0 .. L - 1, their first channels turned in pairs half of them apart."""
    out, half = x.copy(), len(freqs)
    for p, row in enumerate(x):
        angles = np.float32(p) * np.array(freqs, np.float32)
        cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
        first, second = row[..., :half], row[..., half : 2 * half]
        out[p][..., :half], out[p][..., half : 2 * half] = first * cos - second * sin, second * cos + first * sin
    return out


def plain_index_keys(x: np.ndarray, w: dict[str, np.ndarray], config: dict[str, Any]) -> np.ndarray:
    """[L, index_head_dim], without the Hadamard rotation."""
    raw = x @ w["idx_wk"].T
    centred = raw - raw.mean(axis=1, keepdims=True)
    keys = plain_normed(centred, oracle.LAYER_NORM_EPS) * w["idx_k_norm"] + w["idx_k_norm_bias"]
    return plain_half_rotated(keys, config["freqs"])


def plain_scores(x: np.ndarray, w: dict[str, np.ndarray], config: dict[str, Any]) -> np.ndarray:
    """[L, L], -inf where a token is not visible; without the Hadamard rotation: it changes no score."""
    heads, width, dtype = config["index_n_heads"], config["index_head_dim"], x.dtype.type
    q = (plain_query_latent(x, w, config["eps"]) @ w["idx_wq_b"].T).reshape(len(x), heads, width)
    gains = x @ w["idx_weights_proj"].T / np.sqrt(dtype(heads * width))
    scores = plain.index_scores(plain_half_rotated(q, config["freqs"]), gains, plain_index_keys(x, w, config))
    return np.where(np.tri(len(x), dtype=bool), scores, dtype(-np.inf))


# --- strategies ---


@st.composite
def configs(draw: st.DrawFn, **fixed: Any) -> MLAConfig:
    """Tiny constants of legal shape, half of them with YaRN."""
    rope_head_dim = draw(st.sampled_from([2, 4, 8]))
    yarn = draw(st.booleans())
    drawn = {
        "hidden_size": draw(st.integers(8, 24)),
        "num_hidden_layers": 1,
        "num_heads": draw(st.integers(1, 4)),
        "q_lora_rank": draw(st.integers(3, 12)),
        "kv_lora_rank": draw(st.integers(8, 32)),
        "nope_head_dim": draw(st.integers(1, 8)),
        "rope_head_dim": rope_head_dim,
        "v_head_dim": draw(st.integers(1, 8)),
        "index_n_heads": draw(st.integers(1, 4)),
        "index_head_dim": draw(st.sampled_from([d for d in (2, 4, 8, 16) if d >= rope_head_dim])),
        "index_topk": draw(st.one_of(st.integers(1, 4), st.integers(1, 12))),
        "rope_theta": draw(st.sampled_from([50.0, 10000.0])),
        "rope_factor": draw(st.sampled_from([2.0, 40.0])) if yarn else 1.0,
        "rope_beta_fast": 2.0,
        "rope_beta_slow": draw(st.sampled_from([0.5, 1.0])),
        "rope_original_max_position": draw(st.sampled_from([32, 64])),
        "mscale_all_dim": draw(st.sampled_from([1.0, 0.5])) if yarn else draw(st.sampled_from([0.0, 1.0])),
        "max_position_embeddings": 4096,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
    }
    return MLAConfig(**drawn | fixed)


@st.composite
def worlds(
    draw: st.DrawFn, *, dtype: Any = np.float64, max_reqs: int = 4, max_steps: int = 3, **fixed: Any
) -> tuple[World, list[list[int]]]:
    """A world, and a way to feed it: empty requests, late ones, single tokens, chunks behind a prefix."""
    steps = draw(chunkings(1, max_reqs=max_reqs, max_steps=max_steps))
    world = world_of(
        np.random.default_rng(draw(seeds)),
        [sum(new) for new in zip(*steps, strict=True)],
        config=draw(configs(**fixed)),
        dtype=dtype,
        block_size=draw(st.integers(1, 5)),
    )
    return world, steps


class LatentCall(NamedTuple):
    """One attention call on operator rows, and the same without pages."""

    q_nope: np.ndarray
    q_rope: np.ndarray
    w_uk: np.ndarray
    w_uv: np.ndarray
    keys: list[np.ndarray]  # [extent, kv_lora_rank + rope_head_dim] of each operator row's request
    side: Paged  # the same rows in pages
    topk: np.ndarray
    cu_seqlens_q: np.ndarray
    seqused_kv: np.ndarray
    scale: float

    @property
    def q(self) -> np.ndarray:
        return self.q_nope

    @property
    def places(self) -> list[tuple[int, int] | None]:
        """(operator row, position) of every query; None without keys, or beyond the last row."""
        return Call.places.fget(self)

    @property
    def rank(self) -> int:
        return self.w_uk.shape[2]

    @property
    def caches(self) -> tuple[np.ndarray, np.ndarray]:
        cache = self.side.cache
        return read_only(cache[..., : self.rank].copy()), read_only(cache[..., self.rank :].copy())

    @property
    def rows(self) -> tuple[np.ndarray, ...]:
        return self.side.table, self.topk, self.cu_seqlens_q, self.seqused_kv

    def picked(self, query: int) -> np.ndarray:
        """The rows of the cache that a query attends to."""
        place = self.places[query]
        if place is None:
            return np.zeros((0, self.rank + self.q_rope.shape[2]), self.q_nope.dtype)
        return self.keys[place[0]][[token for token in self.topk[query] if token >= 0]]


@st.composite
def latent_calls(draw: st.DrawFn, *, dtype: Any = None, full: bool = False, first: int = 0) -> LatentCall:
    """A call of legal shape; every place of a list may hold -1. ``full`` chooses all visible tokens.

    ``first`` queries make a first row where they are given, and the call is then no narrower than it must be for the
    plain computation not to be right in all numbers by luck.
    """
    rng, rows = np.random.default_rng(draw(seeds)), draw(operator_rows(first=first))
    dtype = draw(dtypes) if dtype is None else dtype
    least, most = (3, 4, 2, 4, 8) if first else (1, 1, 1, 1, 2), (4, 6, 3, 6, 16)
    heads, nope, pairs, v, rank = (draw(st.integers(*bounds)) for bounds in zip(least, most, strict=True))
    keys = [normal(rng, used, rank + 2 * pairs, dtype=dtype) for _, used in rows]
    side = paged(rng, keys, draw(st.integers(1, 5)))
    if not rows:
        side = Paged(read_only(np.full((1, 2, rank + 2 * pairs), np.nan, dtype)), side.table, [])
    cu = int32(np.concatenate([[0], np.cumsum([length for length, _ in rows])]))
    num_queries = int(cu[-1]) + draw(st.sampled_from([0, 0, 2]))
    longest = max([used for _, used in rows], default=0)
    index_topk = max(1, longest) if full else draw(st.integers(1, 6))
    call = LatentCall(
        normal(rng, num_queries, heads, nope, dtype=dtype),
        normal(rng, num_queries, heads, 2 * pairs, dtype=dtype),
        normal(rng, heads, nope, rank, dtype=dtype, scale=rank**-0.5),
        normal(rng, heads, v, rank, dtype=dtype, scale=rank**-0.5),
        keys,
        side,
        np.empty(0, np.int32),
        cu,
        int32([used for _, used in rows]),
        draw(st.sampled_from([1.0, 0.3, (nope + 2 * pairs) ** -0.5])),
    )
    topk = np.full((num_queries, index_topk), -1, np.int32)
    for query, place in enumerate(call.places):
        if place is not None:
            visible = place[1] + 1
            chosen = rng.permutation(visible)[: visible if full else int(rng.integers(0, index_topk + 1))]
            topk[query, rng.permutation(index_topk)[: len(chosen)]] = chosen
    return call._replace(topk=read_only(topk))


# --- stacks ---

VOCAB = 11
NOBODY = 0  # the token id of rows that belong to no request; its embedding is NaN


class StackWorld(NamedTuple):
    """Some requests, whole, as token ids, and a stack with room for them: all layers have one block table."""

    world: World  # of one layer; its cache is every layer's before the first step
    weights: StackWeights
    token_ids: list[np.ndarray]  # of each request, never `NOBODY`

    @property
    def caches(self) -> list[MLACache]:
        """Every layer's, before the first step."""
        return [self.world.cache] * len(self.weights.blocks)

    def step(
        self, starts: Sequence[int], ends: Sequence[int], *, idle: Sequence[int] = (), beyond: int = 0
    ) -> tuple[np.ndarray, MLABatch]:
        """Token ids [start, end) of each request; then padded graph slots of ``idle`` rows each, then of nobody."""
        _, batch = self.world.step(starts, ends, idle=idle)
        own = [ids[start:end] for ids, start, end in zip(self.token_ids, starts, ends, strict=True)]
        return int32(np.concatenate([*own, np.full(sum(idle) + beyond, NOBODY)])), batch


def stack_world_of(
    rng: np.random.Generator,
    lengths: Sequence[int],
    *,
    num_layers: int = 3,
    inter: int = 12,
    config: MLAConfig = SMALL,
    dtype: Any = np.float64,
    **options: Any,
) -> StackWorld:
    """Every layer with weights of its own; ``inter`` is the inner width of the experts."""
    world = world_of(rng, lengths, config=config, dtype=dtype, **options)
    hidden = config.hidden_size

    def gain() -> np.ndarray:
        return read_only((1 + 0.3 * rng.standard_normal(hidden)).astype(dtype))

    embed = normal(rng, VOCAB, hidden, dtype=dtype).copy()
    embed[NOBODY] = np.nan
    blocks = tuple(
        MLABlockWeights(gain(), weights_of(rng, config, dtype), gain(), expert_of(rng, inter, hidden, dtype))
        for _ in range(num_layers)
    )
    weights = StackWeights(read_only(embed), blocks, gain(), normal(rng, VOCAB, hidden, dtype=dtype))
    return StackWorld(world, weights, [int32(rng.integers(NOBODY + 1, VOCAB, length)) for length in lengths])


class StackRun(NamedTuple):
    """All steps of all requests."""

    hidden: list[np.ndarray]  # [tokens, hidden] of each request
    logits: list[np.ndarray]  # [requests, vocab] of each step
    caches: Any


StackForward = Callable[[np.ndarray, MLABatch, Any], tuple[np.ndarray, np.ndarray, Any]]


def stack_on_one_device(stack: StackWorld) -> StackForward:
    """A step on one device."""

    def forward(
        token_ids: np.ndarray, batch: MLABatch, caches: list[MLACache]
    ) -> tuple[np.ndarray, np.ndarray, list[MLACache]]:
        out = mla_decoder_stack(token_ids, stack.weights, caches, batch, stack.world.config)
        return out.hidden, out.logits, frozen(out.caches)

    return forward


def run_stack(
    stack: StackWorld, steps: Iterable[Sequence[int]], forward: StackForward | None = None, idle: Sequence[int] = ()
) -> StackRun:
    """The requests fed step by step; rows of nobody come out zero."""
    forward = stack_on_one_device(stack) if forward is None else forward
    caches: Any = stack.caches
    done = [0] * len(stack.token_ids)
    hidden = [[np.zeros((0, stack.world.config.hidden_size), stack.world.dtype)] for _ in done]
    logits = []
    for new in steps:
        ends = [a + b for a, b in zip(done, new, strict=True)]
        rows, scored, caches = forward(*stack.step(done, ends, idle=idle), caches)
        at = 0
        for request, count in enumerate(new):
            hidden[request].append(rows[at : at + count])
            at += count
        assert not rows[at:].any()
        logits.append(scored)
        done = ends
    return StackRun([np.concatenate(parts) for parts in hidden], logits, caches)


def stack_over_ranks(stack: StackWorld, cut: Cut, experts: str) -> StackForward:
    """A step over ranks, put together; every rank has the same logits, and zero in its pad rows."""

    def forward(token_ids: np.ndarray, batch: MLABatch, caches: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        caches = [caches] * cut.cp_size if isinstance(caches[0], MLACache) else caches
        num_rows = len(token_ids) + cut.padding if cut.padding else None
        out = mla_stack_over_ranks(
            token_ids,
            stack.weights,
            caches,
            batch,
            stack.world.config,
            split=cut.split,
            experts=experts,
            num_input_tokens=num_rows,
            kept_keys=cut.kept_keys,
        )
        partition = partition_tokens(batch.query_start_loc, cut.cp_size, split=cut.split, num_input_tokens=num_rows)
        hidden = np.full((len(token_ids), stack.world.config.hidden_size), np.nan, stack.world.dtype)
        for rows, tokens, logits in zip(out.hidden, partition.token_indices, out.logits, strict=True):
            hidden[tokens[tokens >= 0]] = rows[tokens >= 0]
            assert not rows[tokens < 0].any()
            assert_same(logits, out.logits[0])
        return hidden, out.logits[0], frozen(out.caches)

    return forward


def oracle_stack(stack: StackWorld, request: int) -> stack_oracle.Stack:
    """One request's tokens from position 0 on."""
    w = stack.weights
    blocks = [
        {
            "attn_norm": block.attn_norm,
            "attention": oracle_weights(block.attention),
            "ffn_norm": block.ffn_norm,
            "expert": block.experts,
        }
        for block in w.blocks
    ]
    ids = stack.token_ids[request].tolist()
    return stack_oracle.stack(ids, w.embed, blocks, w.norm, w.head, oracle_config(stack.world.config))


def plain_stack(stack: StackWorld, request: int) -> tuple[np.ndarray, np.ndarray]:
    """(hidden, logits) of every token of one request whose queries see all before them, in the dtype of the weights."""
    w, constants = stack.weights, oracle_config(stack.world.config)
    eps = constants["eps"]
    x = w.embed[stack.token_ids[request]]
    everything = [set(range(p + 1)) for p in range(len(x))]
    for block in w.blocks:
        normed = plain_normed(x, eps) * block.attn_norm
        x = x + plain_layer(normed, oracle_weights(block.attention), constants, everything)
        normed = plain_normed(x, eps) * block.ffn_norm
        gate, up = normed @ block.experts.w1.T, normed @ block.experts.w3.T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ block.experts.w2.T
    hidden = plain_normed(x, eps) * w.norm
    return hidden, hidden @ w.head.T
