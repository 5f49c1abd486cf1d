"""A second opinion that nobody here wrote: the `deepseek_v4` model of transformers, run on the CPU.

`parity` and the tests feed one attention block's input rows to this model and to our definition, and compare. The model
runs through its own cache and mask builder, so chunked prefill and decode are tried as well.

        config ── build_model ──┬── layer_weights ── our layer ──────────┐
                                └── block_output / model_blocks ── rows ─┴── compare

torch and transformers are imported when a function needs them, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dsacp_ref.compressor import CompressorWeights
from dsacp_ref.config import AttentionConfig, v4_flash
from dsacp_ref.indexer import IndexerWeights
from dsacp_ref.layer import LayerWeights
from dsacp_ref.spec import UnsupportedError, check_array, check_choice, check_int, contract_error

INSTALL = "pip install transformers==5.24.0"

# "tiny" makes every choice real after a few tokens, "big" has the released head sizes. Two heads share an output group,
# so that a wrong grouping shows. Rotary constants and eps are the released ones.
_BASE = replace(v4_flash(), num_hidden_layers=3, compress_ratios=(1, 4, 128))
_BIG = replace(_BASE, hidden_size=256, num_heads=8, q_lora_rank=96, o_groups=4, o_lora_rank=64, index_topk=64)
_SMALL = replace(_BIG, hidden_size=96, num_heads=4, head_dim=48, rope_head_dim=16, q_lora_rank=40, o_groups=2)
_TINY = replace(_SMALL, o_lora_rank=24, window_size=24, index_n_heads=8, index_head_dim=32, index_topk=5)
SIZES = {"tiny": _TINY, "big": _BIG}
# What lies around the attention block, as small as the model allows.
_EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hash_layers": 0}
SURROUNDINGS = {"vocab_size": 8, "hc_mult": 2, **_EXPERTS}

# Chunk lengths of one request. What is left over comes as one last chunk, and what does not fit is cut.
CHUNK_PLANS: dict[str, tuple[int, ...]] = {
    "one_shot": (),
    "ragged": (1, 2, 5, 120, 1, 127, 3, 1, 1, 128, 64, 4, 7),
    "aligned": (128, 128, 128, 128),
    "decode": (1,) * 9,  # after one long prefill
}

# Our name of a weight -> the model's, inside one attention block; a block without compressor or indexer has fewer.
POOL = {"wkv": "kv_proj.weight", "wgate": "gate_proj.weight", "ape": "position_bias", "norm": "kv_norm.weight"}
WEIGHTS = {
    "wq_a": "q_a_proj.weight",
    "q_norm": "q_a_norm.weight",
    "wq_b": "q_b_proj.weight",
    "wkv": "kv_proj.weight",
    "kv_norm": "kv_norm.weight",
    "attn_sink": "sinks",
    "wo_a": "o_a_proj.weight",
    "wo_b": "o_b_proj.weight",
    "idx_wq_b": "compressor.indexer.q_b_proj.weight",
    "idx_weights_proj": "compressor.indexer.scorer.weights_proj.weight",
    **{f"cmp_{ours}": f"compressor.{theirs}" for ours, theirs in POOL.items()},
    **{f"idx_cmp_{ours}": f"compressor.indexer.{theirs}" for ours, theirs in POOL.items()},
}


class BlockRun(NamedTuple):
    """What one attention block read and wrote over a whole request.

    inputs float32[tokens, hidden]: the rows after the block's RMS norm; outputs float32[tokens, hidden];
    selections int32[tokens, index_topk]: entries chosen for each query, then -1; None where there is no indexer.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    selections: np.ndarray | None


def build_model(config: AttentionConfig, *, seed: int = 0) -> Any:
    """The transformers model (DeepseekV4Model) with random float32 weights, on the CPU, with its eager attention.

    Weights are wide enough that softmax, gates and top-k make real choices: matrices std 1.5 / sqrt(fan-in), sinks
    std 2, norm weights 1 +- 0.3, pool biases std 1. They depend on the seed alone; torch's generator stays as it was.

    Args:
        config: such as SIZES["tiny"]; ratios 1, 4 and 128.
        seed: int >= 0.

    Raises:
        UnsupportedError: a legal config that this model cannot take.
        ImportError: torch or transformers is missing or too old.
    """
    torch, transformers = _torch_and_transformers()
    if not {1, 4, 128}.issuperset(config.compress_ratios):
        raise UnsupportedError(f"compress_ratios: transformers has 1, 4 and 128, got {config.compress_ratios}")
    if config.window_size == 1:
        raise UnsupportedError("window_size: the cache of transformers needs at least 2, got 1")  # it slices from -0
    theirs = transformers.DeepseekV4Config(
        **config.to_json(), **SURROUNDINGS, attn_implementation="eager", experts_implementation="eager"
    )
    if theirs.qk_rope_head_dim != config.rope_head_dim:  # it stores the quotient to head_dim and multiplies back
        raise UnsupportedError(f"rope_head_dim: transformers makes {theirs.qk_rope_head_dim} of {config.rope_head_dim}")
    with torch.random.fork_rng(devices=[]):
        model = transformers.DeepseekV4Model(theirs).to(torch.float32)
    rng = np.random.default_rng(check_int("seed", seed, 0))
    for name, weight in model.named_parameters():
        weight.data.copy_(torch.from_numpy(_drawn_weight(name, tuple(weight.shape), rng)))
    return model.eval().requires_grad_(False)


def layer_weights(model: Any, layer_idx: int) -> dict[str, np.ndarray]:
    """One attention block's weights under our names, as float32 copies.

    Args:
        model, layer_idx: from `build_model`, and an int.

    Returns:
        dict: wq_a [q_lora, hidden], q_norm [q_lora], wq_b [H*D, q_lora], wkv [D, hidden], kv_norm [D], attn_sink [H],
        wo_a [G, o_lora, H/G*D], wo_b [hidden, G*o_lora]; with a compressor cmp_wkv, cmp_wgate [c*D, hidden],
        cmp_ape [ratio, c*D], cmp_norm [D]; with an indexer idx_wq_b [Hi*Di, q_lora], idx_weights_proj [Hi, hidden] and
        its compressor as idx_cmp_wkv, idx_cmp_wgate, idx_cmp_ape, idx_cmp_norm.
    """
    theirs = dict(_block(model, layer_idx).named_parameters())
    weights = {ours: theirs.pop(name).detach().numpy().copy() for ours, name in WEIGHTS.items() if name in theirs}
    if theirs:
        raise contract_error("model", "hold the weights of transformers 5.24", sorted(theirs), INSTALL)
    weights["wo_a"] = weights["wo_a"].reshape(model.config.o_groups, -1, weights["wo_a"].shape[-1])  # group-major
    return weights


def reference_weights(named: dict[str, np.ndarray]) -> LayerWeights:
    """The record that our layer takes, from the names that `layer_weights` gives.

    Args:
        named: as `layer_weights` returns it.
    """

    def compressor(prefix: str) -> CompressorWeights:
        return CompressorWeights(*(named[f"{prefix}_{ours}"] for ours in POOL))

    indexer = None
    if "idx_wq_b" in named:
        indexer = IndexerWeights(named["idx_wq_b"], named["idx_weights_proj"], compressor("idx_cmp"))
    common: dict[str, Any] = {field: named[field] for field in LayerWeights._fields if field in named}
    pooled = compressor("cmp") if "cmp_wkv" in named else None
    return LayerWeights(**common, compressor=pooled, indexer=indexer)


def chunk_lengths(plan: str, num_tokens: int) -> tuple[int, ...]:
    """How many of a request's tokens each call gets: ints >= 1 that sum to num_tokens.

    Args:
        plan: a name in CHUNK_PLANS.
        num_tokens: int >= 1.

    >>> chunk_lengths("ragged", 20), chunk_lengths("decode", 12)
    ((1, 2, 5, 12), (3, 1, 1, 1, 1, 1, 1, 1, 1, 1))
    """
    steps = CHUNK_PLANS[check_choice("plan", plan, tuple(CHUNK_PLANS))]
    total = check_int("num_tokens", num_tokens, 1)
    first = max(total - sum(steps), 0) if plan == "decode" else 0
    ends = np.minimum(np.cumsum([0, first, *steps, total]), total)
    return tuple(length for length in np.diff(ends).tolist() if length)


def block_output(model: Any, layer_idx: int, rows: np.ndarray, chunks: Sequence[int] | None = None) -> BlockRun:
    """One attention block alone on one request, with a fresh cache: bitwise what it does inside the model.

    Args:
        model, layer_idx: from `build_model`, and an int.
        rows: float32[tokens, hidden], at least one token; the block's input, after its RMS norm.
        chunks: ints >= 1 with sum tokens; None is one call for all.
    """
    torch, transformers = _torch_and_transformers()
    block, config = _block(model, layer_idx), model.config
    cache = transformers.DynamicCache(config=config)

    def call(start: int, part: Any) -> None:
        positions = torch.arange(start, start + part.shape[1])[None]
        # layer_idx: the other layers of this cache stay empty, so this one must give the mask its size
        mask = transformers.masking_utils.create_sliding_window_causal_mask(
            config, part, attention_mask=None, cache=cache, position_ids=positions, layer_idx=layer_idx
        )
        tables = {kind: model.rotary_emb(part, positions, kind) for kind in ("main", "compress")}
        block(part, position_embeddings=tables, position_ids=positions, attention_mask=mask, cache=cache)

    return _recorded([block], call, rows, chunks)[0]


def model_blocks(model: Any, rows: np.ndarray, chunks: Sequence[int] | None = None) -> list[BlockRun]:
    """The whole model on one request: one BlockRun for each layer.

    Args:
        model: from `build_model`.
        rows: float32[tokens, hidden], at least one token; embeddings in place of token ids.
        chunks: ints >= 1 with sum tokens; None is one call for all.
    """
    _, transformers = _torch_and_transformers()
    cache = transformers.DynamicCache(config=model.config)

    blocks = [layer.self_attn for layer in model.layers]
    return _recorded(blocks, lambda _, part: model(inputs_embeds=part, cache=cache, use_cache=True), rows, chunks)


def _recorded(
    blocks: Sequence[Any], call: Callable[[int, Any], object], rows: np.ndarray, chunks: Sequence[int] | None
) -> list[BlockRun]:
    """Feed the rows to `call` chunk by chunk, and join what the blocks read, wrote and selected."""
    torch, _ = _torch_and_transformers()
    hidden_size: int = blocks[0].config.hidden_size
    check_array("rows", rows, ("float32",), ("tokens", hidden_size))
    num_tokens = check_int("the number of rows", rows.shape[0], 1)
    lengths = [check_int("chunks", length, 1) for length in ((num_tokens,) if chunks is None else chunks)]
    if sum(lengths) != num_tokens:
        raise contract_error("chunks", f"sum to the {num_tokens} rows", lengths)

    indexers = [getattr(block.compressor, "indexer", None) for block in blocks]
    modules = [module for module in (*blocks, *indexers) if module is not None]
    read: dict[Any, list[Any]] = {module: [] for module in modules}
    written: dict[Any, list[Any]] = {module: [] for module in modules}

    def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
        read[module].append(args[0][0])
        written[module].append(output[0][0] if module in blocks else output[0])

    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        with torch.no_grad():
            for start, end in pairwise(np.cumsum([0, *lengths]).tolist()):
                call(start, torch.tensor(rows[start:end])[None])
    finally:
        for handle in handles:
            handle.remove()

    def joined(parts: Sequence[Any], width: int) -> np.ndarray:
        # only index rows are ever narrower: they are as wide as there are entries so far
        wide = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in parts]
        return np.asarray(torch.cat(wide))

    runs = []
    for block, indexer in zip(blocks, indexers, strict=True):
        chosen = None if indexer is None else joined(written[indexer], indexer.index_topk).astype(np.int32)
        runs.append(BlockRun(joined(read[block], hidden_size), joined(written[block], hidden_size), chosen))
    return runs


def _block(model: Any, layer_idx: int) -> Any:
    return model.layers[check_int("layer_idx", layer_idx, 0, len(model.layers) - 1)].self_attn


def _drawn_weight(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    drawn = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("sinks"):
        return 2 * drawn
    if name.endswith("position_bias"):
        return drawn
    if len(shape) == 1:  # norm weights, and the scales and offsets of the residual streams
        return 1 + np.float32(0.3) * drawn
    return drawn * np.float32(1.5 / shape[-1] ** 0.5)


def _torch_and_transformers() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ImportError(f"the outside implementation needs torch and transformers; {INSTALL}") from error
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (5, 24):  # older ones were never compared with
        raise ImportError(f"the outside implementation needs transformers >= 5.24, got {version}; {INSTALL}")
    return torch, transformers
