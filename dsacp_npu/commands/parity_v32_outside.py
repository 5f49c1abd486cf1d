"""The `deepseek_v32` model of transformers beside our layers: a second opinion that nobody here wrote.

A request's token ids go through the whole model on the CPU in one call; each attention block's rows, choices and output
are recorded. Our layers get the same rows, step by step from paged caches, and the same weights. torch and transformers
are imported when a function needs them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dsacp_npu.commands.outside import _torch_and_transformers
from dsacp_npu.commands.parity_v32_cells import INTER
from dsacp_npu.commands.parity_v32_scenarios import VOCAB
from dsacp_npu.commands.parity_v32_weights import CONFIG, stack_weights
from dsacp_ref.mla import causal_picks
from dsacp_ref.mla_layer import MLAWeights

# Our name of a weight -> the model's, inside one attention block; what is ours by head is apart.
WEIGHTS = {
    "wq_a": "q_a_proj.weight",
    "q_norm": "q_a_layernorm.weight",
    "wq_b": "q_b_proj.weight",
    "wkv_a": "kv_a_proj_with_mqa.weight",
    "kv_norm": "kv_a_layernorm.weight",
    "wo": "o_proj.weight",
}
INDEXER = {
    "wq_b": "indexer.wq_b.weight",
    "wk": "indexer.wk.weight",
    "k_norm": "indexer.k_norm.weight",
    "k_norm_bias": "indexer.k_norm.bias",
    "weights_proj": "indexer.weights_proj.weight",
}


class BlockRun(NamedTuple):
    """What one attention block read, chose and wrote over a whole request.

    inputs float32[tokens, hidden]: the rows after the block's RMS norm; outputs float32[tokens, hidden];
    selections int32[tokens, index_topk]: tokens chosen for each query, then -1.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    selections: np.ndarray


@lru_cache(maxsize=1)
def model(seed: int) -> Any:
    """The transformers model (DeepseekV32Model) with our weights, float32, on the CPU, with its eager attention.

    Its feed-forward layers are dense. torch's generator stays as it was.

    Raises:
        ImportError: torch or transformers is missing or too old.
    """
    torch, transformers = _torch_and_transformers()
    sizes = {key: value for key, value in CONFIG.to_json().items() if not key.startswith("rope_")}
    scaling = CONFIG.to_json()["rope_scaling"]
    theirs = transformers.DeepseekV32Config(
        **sizes,
        rope_parameters={"rope_type": scaling.pop("type"), "rope_theta": CONFIG.rope_theta, **scaling},
        num_key_value_heads=CONFIG.num_heads,
        vocab_size=VOCAB,
        intermediate_size=INTER,
        first_k_dense_replace=CONFIG.num_hidden_layers,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        made = transformers.DeepseekV32Model(theirs).to(torch.float32)
    named = {name: torch.from_numpy(weight) for name, weight in named_weights(seed).items()}
    made.load_state_dict(named, strict=True)
    return made.eval().requires_grad_(False)


def named_weights(seed: int) -> dict[str, np.ndarray]:
    """Our weights under the model's names; it has no head."""
    weights = stack_weights(seed)
    named = {"embed_tokens.weight": weights.embed, "norm.weight": weights.norm}
    for i, block in enumerate(weights.blocks):
        experts = {"gate_proj": block.experts.w1, "up_proj": block.experts.w3, "down_proj": block.experts.w2}
        norms = {"input_layernorm": block.attn_norm, "post_attention_layernorm": block.ffn_norm}
        named |= {f"layers.{i}.mlp.{name}.weight": weight for name, weight in experts.items()}
        named |= {f"layers.{i}.{name}.weight": weight for name, weight in norms.items()}
        named |= {f"layers.{i}.self_attn.{name}": w for name, w in named_layer(block.attention).items()}
    return named


def named_layer(weights: MLAWeights) -> dict[str, np.ndarray]:
    """One attention block's; of a head's rows of kv_b_proj those of its keys come first, then those of its values."""
    named = {name: getattr(weights, ours) for ours, name in WEIGHTS.items()}
    named |= {name: getattr(weights.indexer, ours) for ours, name in INDEXER.items()}
    per_head = np.concatenate([weights.w_uk, weights.w_uv], axis=1)
    return named | {"kv_b_proj.weight": per_head.reshape(-1, per_head.shape[2])}


def model_blocks(seed: int, token_ids: np.ndarray) -> list[BlockRun]:
    """The whole model on one request: one BlockRun for each layer."""
    torch, _ = _torch_and_transformers()
    theirs = model(seed)
    blocks = [layer.self_attn for layer in theirs.layers]
    said: dict[Any, Any] = {}
    handles = [
        layer.input_layernorm.register_forward_hook(keep(said, "rows", layer.self_attn)) for layer in theirs.layers
    ]
    handles += [block.indexer.register_forward_hook(keep(said, "chosen", block)) for block in blocks]
    handles += [block.register_forward_hook(keep(said, "output", block)) for block in blocks]
    try:
        with torch.no_grad():
            theirs(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    positions = np.arange(len(token_ids), dtype=np.int32)
    return [
        BlockRun(said[block, "rows"], said[block, "output"], tokens_first(said[block, "chosen"], positions))
        for block in blocks
    ]


def keep(said: dict[Any, Any], what: str, block: Any) -> Any:
    """A hook that keeps what a module of a block gives."""

    def hook(_: Any, args: Any, output: Any) -> None:
        rows = output[0] if isinstance(output, tuple) else output
        said[block, what] = rows[0].numpy().copy()

    return hook


def tokens_first(chosen: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Its choice, which its causal mask cuts later, cut here: tokens up to the query, then -1, index_topk wide."""
    picks = np.full((len(chosen), CONFIG.index_topk), -1, np.int32)
    picks[:, : chosen.shape[1]] = causal_picks(chosen.astype(np.int32), positions)
    return np.take_along_axis(picks, np.argsort(picks < 0, axis=1, kind="stable"), axis=1)
