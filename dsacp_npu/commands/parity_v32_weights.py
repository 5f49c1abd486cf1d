"""The stack that `parity --model v32` runs: its constants, and random weights from a seed alone."""

from __future__ import annotations

import numpy as np

from dsacp_npu.commands.parity_v32_cells import INTER
from dsacp_npu.commands.parity_v32_scenarios import NOBODY, VOCAB
from dsacp_ref.block import ExpertWeights
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.mla_layer import MLAIndexerWeights, MLAWeights
from dsacp_ref.mla_stack import MLABlockWeights, StackWeights

# Every choice is real after a few tokens, rotary pairs turn, and YaRN raises the logits by its mscale. Latents fill one
# group of an FP8 row.
CONFIG = MLAConfig(
    hidden_size=48,
    num_hidden_layers=3,
    num_heads=4,
    q_lora_rank=24,
    kv_lora_rank=128,
    nope_head_dim=12,
    rope_head_dim=8,
    v_head_dim=12,
    index_n_heads=8,
    index_head_dim=16,
    index_topk=6,
    rope_theta=50.0,
    rope_factor=32.0,
    rope_beta_fast=2.0,
    rope_beta_slow=0.5,
    rope_original_max_position=64,
    mscale_all_dim=1.0,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
)


def stack_weights(seed: int) -> StackWeights:
    """Weights of three blocks in float32; NOBODY's embedding is NaN."""
    rng = np.random.default_rng(seed)
    hidden = CONFIG.hidden_size

    def block() -> MLABlockWeights:
        experts = ExpertWeights(matrix(rng, INTER, hidden), matrix(rng, INTER, hidden), matrix(rng, hidden, INTER))
        return MLABlockWeights(gain(rng, hidden), layer_weights(rng, CONFIG), gain(rng, hidden), experts)

    embed = rng.standard_normal((VOCAB, hidden), dtype=np.float32)
    embed[NOBODY] = np.nan
    blocks = tuple(block() for _ in range(CONFIG.num_hidden_layers))
    return StackWeights(embed, blocks, gain(rng, hidden), matrix(rng, VOCAB, hidden))


def layer_weights(rng: np.random.Generator, config: MLAConfig) -> MLAWeights:
    """Weights of one attention layer, wide enough that softmax and top-k make real choices."""
    hidden, lora, d = config.hidden_size, config.kv_lora_rank, config.index_head_dim
    return MLAWeights(
        wq_a=matrix(rng, config.q_lora_rank, hidden),
        q_norm=gain(rng, config.q_lora_rank),
        wq_b=matrix(rng, config.num_heads * (config.nope_head_dim + config.rope_head_dim), config.q_lora_rank),
        wkv_a=matrix(rng, lora + config.rope_head_dim, hidden),
        kv_norm=gain(rng, lora),
        w_uk=matrix(rng, config.num_heads, config.nope_head_dim, lora),
        w_uv=matrix(rng, config.num_heads, config.v_head_dim, lora),
        wo=matrix(rng, hidden, config.num_heads * config.v_head_dim),
        indexer=MLAIndexerWeights(
            wq_b=matrix(rng, config.index_n_heads * d, config.q_lora_rank),
            wk=matrix(rng, d, hidden),
            k_norm=gain(rng, d),
            k_norm_bias=np.float32(0.5) * rng.standard_normal(d, dtype=np.float32),
            weights_proj=matrix(rng, config.index_n_heads, hidden),
        ),
    )


def matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """A matrix, or one for each head, of std 1.5 / sqrt(fan-in)."""
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(1.5 / shape[-1] ** 0.5)


def gain(rng: np.random.Generator, width: int) -> np.ndarray:
    """The weight of a norm, 1 +- 0.3."""
    return 1 + np.float32(0.3) * rng.standard_normal(width, dtype=np.float32)
