"""Our layer over latents against an implementation that nobody here wrote: transformers' deepseek_v32, on the CPU.

Both are fed the same rows with the same chunk plan, the other model through its own rotary table, mask and cache.
Compared are cached keys, index scores, choices and outputs. The mutants show that the comparison sees each detail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from dsacp_ref import indexer as indexer_module
from dsacp_ref import mla as mla_module
from dsacp_ref import mla_layer as layer_module
from dsacp_ref.mla_config import MLAConfig, v32
from dsacp_ref.mla_layer import MLAIndexerWeights, MLAWeights
from dsacp_ref.rope import apply_rope, rope_frequencies
from tests.compare import assert_within_budget
from tests.layer_strategies import as_sets, frozen
from tests.mla_strategies import World, oracle_layer, request_rows, run, world_of
from tests.oracles.mla import sylvester
from tests.strategies import read_only

# Errors over a part's largest value. float32 noise is below 1.4e-6 here; the weakest wrong detail moves 5e-2.
NOISE = 4e-6
SIGNAL = 1e-2
DTYPES = {"float32": np.float32, "float64": np.float64}

TINY = MLAConfig(
    hidden_size=48,
    num_hidden_layers=1,
    num_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    nope_head_dim=12,
    rope_head_dim=8,
    v_head_dim=12,
    index_n_heads=8,
    index_head_dim=16,
    index_topk=6,
    rope_theta=50.0,
    rope_factor=4.0,
    rope_beta_fast=2.0,
    rope_beta_slow=0.5,
    rope_original_max_position=64,
    mscale_all_dim=1.0,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
)
# The released head sizes and rotary constants, over fewer hidden channels.
REAL = replace(v32(), hidden_size=512, num_hidden_layers=1, num_heads=16, index_topk=16)
NO_YARN = {"rope_factor": 1.0, "mscale_all_dim": 0.0}
SIZES = {
    "tiny": TINY,
    "tiny, no YaRN": replace(TINY, **NO_YARN),
    "tiny, one token": replace(TINY, index_topk=1),
    "tiny, another mscale": replace(TINY, rope_factor=40.0, max_position_embeddings=2560, mscale_all_dim=0.7),
    "real": REAL,
    "real, no YaRN": replace(REAL, **NO_YARN),
    "real, all visible": replace(REAL, index_topk=2048),
}
TOKENS = 48
PLANS = {"one shot": [TOKENS], "ragged": [1, 2, 20, 1, 17, 7], "decode": [40] + [1] * 8}


class Parts(NamedTuple):
    """What a layer makes of one request, in the order in which it makes it."""

    latent: np.ndarray
    rope_key: np.ndarray
    index_key: np.ndarray
    scores: np.ndarray  # [tokens, tokens], 0 where a token is not visible
    selections: list[set[int]]
    output: np.ndarray


# --- theirs ---


def rope_parameters(config: MLAConfig) -> dict[str, Any]:
    if config.rope_factor == 1:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {
        "rope_type": "yarn",
        "rope_theta": config.rope_theta,
        "factor": config.rope_factor,
        "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow,
        "original_max_position_embeddings": config.rope_original_max_position,
        "mscale": config.mscale_all_dim,
        "mscale_all_dim": config.mscale_all_dim,
    }


@lru_cache(maxsize=2)  # they are large
def model(size: str, attention: str = "eager") -> Any:
    """One block with wide random weights, so that softmax and top-k make real choices; its MLP is a dense stub."""
    import torch
    import transformers

    config = SIZES[size]
    named = {key: value for key, value in config.to_json().items() if not key.startswith("rope_")}
    theirs = transformers.DeepseekV32Config(
        **named,
        rope_parameters=rope_parameters(config),
        num_key_value_heads=config.num_heads,
        vocab_size=8,
        intermediate_size=4,
        first_k_dense_replace=1,
        attn_implementation=attention,
    )
    assert MLAConfig.from_json(theirs.to_dict()) == expected_config(config)
    with torch.random.fork_rng(devices=[]):
        built = transformers.DeepseekV32Model(theirs).to(torch.float32)
    rng = np.random.default_rng(0)
    for name, weight in built.named_parameters():
        drawn = rng.standard_normal(tuple(weight.shape), np.float32)
        if weight.ndim > 1:
            drawn *= 1.5 / np.sqrt(np.float32(weight.shape[-1]))
        elif name.endswith("bias"):
            drawn *= 0.5
        else:
            drawn = 1 + np.float32(0.3) * drawn
        weight.data.copy_(torch.from_numpy(drawn))
    return built.eval().requires_grad_(False)


def expected_config(config: MLAConfig) -> MLAConfig:
    """Without scaling the other model's configuration names no YaRN constants."""
    if config.rope_factor > 1:
        return config
    length = config.max_position_embeddings
    return replace(config, rope_beta_fast=32, rope_beta_slow=1, rope_original_max_position=length)


@contextmanager
def heard(block: Any, patch: pytest.MonkeyPatch) -> Iterator[dict[str, list]]:
    """What the block's parts say while it runs: rows in, scores, indices and rows out."""
    import torch

    said: dict[str, list] = {"rows": [], "scores": [], "indices": [], "output": []}
    right = torch.Tensor.topk

    def topk(scores: Any, *args: Any, **options: Any) -> Any:
        said["scores"].append(scores[0])
        return right(scores, *args, **options)

    patch.setattr(torch.Tensor, "topk", topk)
    hooks = [
        block.input_layernorm.register_forward_hook(lambda _, args, out: said["rows"].append(out[0])),
        block.self_attn.indexer.register_forward_hook(lambda _, args, out: said["indices"].append(out[0])),
        block.self_attn.register_forward_hook(lambda _, args, out: said["output"].append(out[0][0])),
    ]
    yield said
    for hook in hooks:
        hook.remove()


@cache
def theirs(size: str, plan: str = "one shot", attention: str = "eager") -> tuple[np.ndarray, Parts]:
    """(the block's normed rows, what it makes of them)."""
    import torch
    import transformers

    built, config = model(size, attention), SIZES[size]
    embeddings = np.random.default_rng(3).standard_normal((TOKENS, config.hidden_size), np.float32)
    kept, at = transformers.DynamicCache(config=built.config), 0
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch, heard(built.layers[0], patch) as said:
        for count in PLANS[plan]:
            chunk = torch.from_numpy(embeddings[at : at + count])[None]
            built(inputs_embeds=chunk, cache=kept, use_cache=True)
            at += count
    scores, selections = np.zeros((TOKENS, TOKENS), np.float32), []
    for p, row in enumerate(row for part in said["scores"] for row in part.numpy()):
        scores[p, : p + 1] = row[: p + 1]
    for p, row in enumerate(row for part in said["indices"] for row in part.tolist()):
        # It picks among all tokens that there are; the causal mask hides those after the query later.
        assert len(set(row)) == len(row)
        selections.append({token for token in row if token <= p})
    rows, output = (torch.cat(said[name]).numpy() for name in ("rows", "output"))
    layer = kept.layers[0]
    keys = layer.keys[0, 0].numpy(), layer.values[0, 0].numpy(), layer.indexer_keys[0].numpy()
    return rows, Parts(*keys, scores, selections, output)


# --- ours ---


@lru_cache(maxsize=4)
def our_weights(size: str, dtype: str) -> MLAWeights:
    """Its weights as ours: wkv_b's rows of a head are those of its keys, then those of its values."""
    config = SIZES[size]
    block = model(size).layers[0].self_attn
    named = {name: weight.numpy().astype(DTYPES[dtype]) for name, weight in block.named_parameters()}
    per_head = named["kv_b_proj.weight"].reshape(config.num_heads, -1, config.kv_lora_rank)
    return frozen(
        MLAWeights(
            wq_a=named["q_a_proj.weight"],
            q_norm=named["q_a_layernorm.weight"],
            wq_b=named["q_b_proj.weight"],
            wkv_a=named["kv_a_proj_with_mqa.weight"],
            kv_norm=named["kv_a_layernorm.weight"],
            w_uk=per_head[:, : config.nope_head_dim],
            w_uv=per_head[:, config.nope_head_dim :],
            wo=named["o_proj.weight"],
            indexer=MLAIndexerWeights(
                wq_b=named["indexer.wq_b.weight"],
                wk=named["indexer.wk.weight"],
                k_norm=named["indexer.k_norm.weight"],
                k_norm_bias=named["indexer.k_norm.bias"],
                weights_proj=named["indexer.weights_proj.weight"],
            ),
        )
    )


def world_like(size: str, rows: np.ndarray, dtype: str = "float64") -> World:
    """The same layer with the same request, in a paged cache full of NaN."""
    return world_of(
        np.random.default_rng(2),
        [TOKENS],
        config=SIZES[size],
        dtype=DTYPES[dtype],
        block_size=16,
        weights=our_weights(size, dtype),
        x=[read_only(rows.astype(DTYPES[dtype]))],
    )


def evens_then_odds(rope_key: np.ndarray) -> np.ndarray:
    """The order in which the other model keeps turned channels."""
    return np.concatenate([rope_key[:, 0::2], rope_key[:, 1::2]], axis=1)


def unrotated(index_key: np.ndarray) -> np.ndarray:
    """Without the Hadamard rotation, which the other model leaves out: the matrix is its own inverse."""
    return index_key @ np.array(sylvester(index_key.shape[1]), index_key.dtype)


def ours(world: World, plan: str = "one shot") -> Parts:
    """What our layer makes of the request, in the other's words."""
    blocks: list[tuple[np.ndarray, np.ndarray]] = []
    with pytest.MonkeyPatch.context() as patch:
        right = indexer_module.selected_entries

        def selected(scores: np.ndarray, num_visible: np.ndarray, index_topk: int) -> np.ndarray:
            blocks.append((scores, num_visible))
            return right(scores, num_visible, index_topk)

        patch.setattr(indexer_module, "selected_entries", selected)
        got = run(world, [[count] for count in PLANS[plan]])
    scores, p = np.zeros((TOKENS, TOKENS), world.dtype), 0
    for block, num_visible in blocks:
        for row, visible in zip(block, num_visible.tolist(), strict=True):
            scores[p, :visible] = row[:visible]
            p += 1
    latent, rope_key, index_key = request_rows(got.cache, world, 0)
    return Parts(
        latent,
        evens_then_odds(rope_key),
        unrotated(index_key),
        scores,
        as_sets(got.topk[0]),
        got.outputs[0],
    )


FLOATS = [name for name in Parts._fields if name != "selections"]


def moved(mine: Parts, their: Parts) -> dict[str, float]:
    """Largest error of every part over the part's largest value."""
    pairs = {name: (getattr(mine, name), getattr(their, name)) for name in FLOATS}
    return {name: float(np.abs(a - b).max() / np.abs(b).max()) for name, (a, b) in pairs.items()}


# --- they agree ---


CASES = [(size, plan, "eager") for size in SIZES for plan in (PLANS if size in ("tiny", "real") else ["ragged"])]
CASES += [("tiny", "ragged", "sdpa"), ("real", "one shot", "sdpa")]


@pytest.mark.slow
@pytest.mark.parametrize("size, plan, attention", CASES)
def test_transformers_agrees(size: str, plan: str, attention: str) -> None:
    rows, their = theirs(size, plan, attention)
    exact, single = (ours(world_like(size, rows, dtype), plan) for dtype in ("float64", "float32"))
    assert exact.selections == their.selections
    assert single.selections == their.selections
    for got in (exact, single):
        errors = moved(got, their)
        assert max(errors.values()) < NOISE, errors
    for name in FLOATS:
        # Since float64 says that the other model is right, its own rounding is what plain float32 loses.
        assert_within_budget(getattr(single, name), getattr(exact, name), getattr(their, name), name)


def test_the_oracle_agrees_as_well() -> None:
    """Three derivations: the slow loops against the other model, without our array code between them."""
    rows, their = theirs("tiny")
    due = oracle_layer(world_like("tiny", rows), 0)
    latent, rope_key, index_key = (np.array(part) for part in zip(*due.keys, strict=True))
    scores = np.zeros((TOKENS, TOKENS))
    for p, row in enumerate(due.scores):
        scores[p, : p + 1] = row
    chosen = [set(row) - {-1} for row in due.chosen]
    assert chosen == their.selections
    mine = Parts(latent, evens_then_odds(rope_key), unrotated(index_key), scores, chosen, np.array(due.outputs))
    assert max(moved(mine, their).values()) < NOISE


def test_early_rows_pick_tokens_that_the_causal_mask_hides() -> None:
    """Their lists hold index_topk distinct tokens from the first row on; trusting them would read the future."""
    import torch

    built, config = model("tiny"), SIZES["tiny"]
    embeddings = np.random.default_rng(3).standard_normal((1, TOKENS, config.hidden_size), np.float32)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch, heard(built.layers[0], patch) as said:
        built(inputs_embeds=torch.from_numpy(embeddings), use_cache=False)
    indices = said["indices"][0].numpy()
    assert indices.shape == (TOKENS, config.index_topk)
    positions = np.arange(TOKENS, dtype=np.int32)
    assert (indices[: config.index_topk - 1].max(axis=1) > positions[: config.index_topk - 1]).all()
    rows, their = theirs("tiny")
    world = world_like("tiny", rows)
    x, batch = world.step([0], [TOKENS])
    picks = mla_module.causal_picks(indices, positions)
    assert as_sets(picks) == their.selections
    out = layer_module.mla_attention_layer(x, world.weights, world.cache, batch, config, given_topk=picks)
    assert np.abs(out.output - their.output).max() < NOISE * np.abs(their.output).max()


# --- each detail broken ---


class Mutant(NamedTuple):
    """How to break our side, and every part in which that shows."""

    break_it: Callable[[pytest.MonkeyPatch, World], World | None]
    parts: tuple[str, ...]


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, *parts: str) -> Callable[..., Any]:
    """Enter a mutant under its name. It patches our functions, or returns a world with other weights."""

    def enter(break_it: Callable[[pytest.MonkeyPatch, World], World | None]) -> Callable[..., Any]:
        MUTANTS[name] = Mutant(break_it, parts)
        return break_it

    return enter


def wrapped(patch: pytest.MonkeyPatch, module: Any, name: str, change: Callable[..., Any]) -> None:
    """module.name(*args) becomes change(the old function, *args)."""
    right = getattr(module, name)
    patch.setattr(module, name, lambda *args, **options: change(right, *args, **options))


def turned_pairs(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, first: slice, second: slice) -> np.ndarray:
    """Pairs made of these channels."""
    rows = (len(x),) + (1,) * (x.ndim - 2) + (cos.shape[1],)
    c, s = cos.reshape(rows).astype(x.dtype), sin.reshape(rows).astype(x.dtype)
    out, a, b = x.copy(), x[..., first], x[..., second]
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def scale_with(patch: pytest.MonkeyPatch, power: int) -> None:
    def scale(config: MLAConfig) -> float:
        mscale = 0.1 * config.mscale_all_dim * math.log(config.rope_factor) + 1
        return mscale**power / math.sqrt(config.nope_head_dim + config.rope_head_dim)

    patch.setattr(MLAConfig, "softmax_scale", property(scale))


def mscale_of(world: World) -> float:
    return 0.1 * world.config.mscale_all_dim * math.log(world.config.rope_factor) + 1


@mutant("unnormed latent cached", "latent", "output")
def unnormed(patch, world):
    wrapped(patch, mla_module, "rms_norm", lambda _, x, weight, eps: x)


@mutant("half-split RoPE on the main path", "rope_key", "output")
def half_split(patch, world):
    half = world.config.rope_head_dim // 2

    def change(_, x, cos, sin):
        return turned_pairs(x, cos, sin, slice(-2 * half, -half), slice(x.shape[-1] - half, None))

    wrapped(patch, mla_module, "apply_rope", change)


@mutant("interleaved RoPE in the indexer", "index_key", "scores", "output")
def interleaved(patch, world):
    width = world.config.rope_head_dim

    def change(_, x, cos, sin):
        return turned_pairs(x, cos, sin, slice(0, width, 2), slice(1, width, 2))

    wrapped(patch, mla_module, "apply_half_rope", change)


@mutant("RoPE on the last channels of index vectors", "index_key", "scores", "output")
def last_channels(patch, world):
    half = world.config.rope_head_dim // 2

    def change(_, x, cos, sin):
        return turned_pairs(x, cos, sin, slice(-2 * half, -half), slice(x.shape[-1] - half, None))

    wrapped(patch, mla_module, "apply_half_rope", change)


@mutant("the main path's RoPE on index vectors", "index_key", "scores", "output")
def same_rope(patch, world):
    wrapped(patch, mla_module, "apply_half_rope", lambda _, x, cos, sin: apply_rope(x, cos, sin))


@mutant("RMS norm instead of LayerNorm", "index_key", "scores", "output")
def rms_for_layer_norm(patch, world):
    def change(_, x, weight, bias, eps):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight + bias

    wrapped(patch, mla_module, "layer_norm", change)


@mutant("LayerNorm without its bias", "index_key", "scores", "output")
def no_bias(patch, world):
    indexer = world.weights.indexer
    indexer = indexer._replace(k_norm_bias=np.zeros_like(indexer.k_norm_bias))
    return world._replace(weights=world.weights._replace(indexer=indexer))


@mutant("amplitude mscale on the indexer's cos and sin", "index_key", "scores", "output")
def index_amplitude(patch, world):
    mscale = mscale_of(world)
    wrapped(patch, mla_module, "apply_half_rope", lambda right, x, cos, sin: right(x, mscale * cos, mscale * sin))


@mutant("Hadamard on keys alone", "scores", "output")
def one_sided(patch, world):
    matrix = np.array(sylvester(world.config.index_head_dim))

    def change(right, *args, **options):
        return right(*args, **options) @ matrix

    wrapped(patch, layer_module, "token_index_queries", change)


# A factor common to all scores of a query changes no choice, so the scores themselves have to tell.
@mutant("mscale squared in the indexer", "scores")
def index_mscale(patch, world):
    factor = mscale_of(world) ** 2
    wrapped(patch, layer_module, "index_head_weights", lambda right, *args, **options: factor * right(*args, **options))


@mutant("no mscale", "output")
def no_mscale(patch, world):
    scale_with(patch, 0)


@mutant("mscale once instead of squared", "output")
def mscale_once(patch, world):
    scale_with(patch, 1)


@mutant("softmax over all keys", "output")
def softmax_over_all(patch, world):
    def change(right, q_latent, q_rope, latents, ropes, table, topk, *rows, **options):
        everything = np.arange(TOKENS, dtype=np.int32)[None]
        seen = np.where(everything <= np.arange(len(topk))[:, None], everything, np.int32(-1))
        return right(q_latent, q_rope, latents, ropes, table, seen, *rows, **options)

    wrapped(patch, layer_module, "latent_attention", change)


@mutant("logits without the rope part", "output")
def no_rope_part(patch, world):
    def change(right, q_latent, q_rope, *args, **options):
        return right(q_latent, np.zeros_like(q_rope), *args, **options)

    wrapped(patch, layer_module, "latent_attention", change)


@mutant("w_uk and w_uv in the other order", "output")
def exchanged(patch, world):
    return world._replace(weights=world.weights._replace(w_uk=world.weights.w_uv, w_uv=world.weights.w_uk))


@mutant("no YaRN", "rope_key", "index_key", "scores", "output")
def no_yarn(patch, world):
    wrapped(patch, mla_module, "yarn_frequencies", lambda _, theta, dim, **stretch: rope_frequencies(theta, dim))


@pytest.mark.parametrize("size", ["tiny", "real"])
def test_nothing_broken_moves_nothing(size: str) -> None:
    rows, their = theirs(size)
    assert max(moved(ours(world_like(size, rows)), their).values()) < NOISE


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "real"])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_detail_is_seen(name: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every part that depends on it, far above the noise, and in no other."""
    rows, their = theirs(size)
    world = world_like(size, rows)
    break_it, parts = MUTANTS[name]
    errors = moved(ours(break_it(monkeypatch, world) or world), their)
    assert {part: error for part, error in errors.items() if error > NOISE}.keys() == set(parts), errors
    assert min(errors[part] for part in parts) > SIGNAL, errors
