"""Small checkpoints of attention weights, in every spelling that `load_attention` reads.

The spellings are written here apart from the package's: the checkpoint's by rule, transformers' from the table of the
bridge to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsacp_npu.commands import outside
from dsacp_ref.config import AttentionConfig

# Three layers, one of each kind, and a draft layer. "wide" has matrices of several blocks, none of them whole.
TINY = replace(outside.SIZES["tiny"], compress_ratios=(1, 4, 128, 1))
WIDE = replace(TINY, hidden_size=300, q_lora_rank=140, o_lora_rank=75)
LAYERS = (0, 1, 2, 3)
SPELLINGS = ("checkpoint", "transformers")


def full_shapes(config: AttentionConfig, layer_idx: int) -> dict[str, tuple[int, ...]]:
    """Our name of each weight of a layer -> its shape with all heads and groups."""
    heads, d, hidden, ratio = config.num_heads, config.head_dim, config.hidden_size, config.compress_ratio(layer_idx)
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a": (config.q_lora_rank, hidden),
        "q_norm": (config.q_lora_rank,),
        "wq_b": (heads * d, config.q_lora_rank),
        "wkv": (d, hidden),
        "kv_norm": (d,),
        "attn_sink": (heads,),
        "wo_a": (config.o_groups, config.o_lora_rank, heads // config.o_groups * d),
        "wo_b": (hidden, config.o_groups * config.o_lora_rank),
    }

    def pool(prefix: str, width: int) -> None:
        wide = width * (2 if ratio == 4 else 1)
        parts = {"wkv": (wide, hidden), "wgate": (wide, hidden), "ape": (ratio, wide), "norm_weight": (width,)}
        shapes.update({prefix + part: shape for part, shape in parts.items()})

    if ratio > 1:
        pool("compressor.", d)
    if ratio == 4:
        shapes["indexer.wq_b"] = (config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        shapes["indexer.weights_proj"] = (config.index_n_heads, hidden)
        pool("indexer.compressor.", config.index_head_dim)
    return shapes


def drawn_weights(config: AttentionConfig, layer_idx: int) -> dict[str, torch.Tensor]:
    """Our name of each weight of a layer -> float32 numbers, no two weights alike."""
    drawn = torch.Generator().manual_seed(layer_idx)
    return {name: torch.randn(shape, generator=drawn) for name, shape in full_shapes(config, layer_idx).items()}


def key_of(name: str, config: AttentionConfig, layer_idx: int, spelling: str = "checkpoint") -> str:
    """The key of a weight."""
    drafts_from = config.num_hidden_layers
    layer = f"layers.{layer_idx}" if layer_idx < drafts_from else f"mtp.{layer_idx - drafts_from}"
    if spelling == "transformers":
        theirs = name.replace("indexer.", "idx_").replace("compressor.", "cmp_").replace("norm_weight", "norm")
        return f"{layer}.self_attn.{outside.WEIGHTS[theirs]}"
    bare = name.endswith(("attn_sink", "ape"))
    return f"{layer}.attn." + (name if bare else f"{name.removesuffix('_weight')}.weight")


def layer_checkpoint(
    config: AttentionConfig, layers: Sequence[int] = LAYERS, spelling: str = "checkpoint", root: str = ""
) -> dict[str, torch.Tensor]:
    """Float weights of these layers as a checkpoint has them, among keys that are none of attention's business."""
    tensors = {
        "embed.weight": torch.zeros(2, dtype=torch.uint8),
        "layers.1.attn_norm.weight": torch.zeros(3),
        "layers.11.attn.wq_a.weight": torch.zeros(1),
        "mtp.7.self_attn.sinks": torch.zeros(1),
        "layers.0.ffn.experts.0.w1.weight": torch.zeros(4, 4, dtype=torch.int8),
    }
    for layer_idx in layers:
        for name, weight in drawn_weights(config, layer_idx).items():
            tensors[key_of(name, config, layer_idx, spelling)] = weight.flatten(0, 1) if name == "wo_a" else weight
    return {root + key: tensor.contiguous() for key, tensor in tensors.items()}


def float8(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales) of a matrix in blocks of 128 x 128, the scales powers of two or any float32."""
    blocks = [-(-size // 128) for size in weight.shape]
    scales = 2.0 ** torch.arange(-3, -3 + blocks[0] * blocks[1]).reshape(blocks)
    if scale_dtype == torch.float32:
        scales = scales * 1.3
    return weight.to(torch.float8_e4m3fn), scales.to(scale_dtype)


def plain_float8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What the values mean, one by one."""
    wide, factors = values.float().tolist(), scales.float().tolist()
    meant = [[x * factors[i // 128][j // 128] for j, x in enumerate(row)] for i, row in enumerate(wide)]
    return torch.tensor(meant, dtype=torch.float64).float()  # the products are exact in float64


def write_files(folder: Path, tensors: Mapping[str, torch.Tensor], files: int = 1, index: bool = False) -> Path:
    """The checkpoint as a folder: its keys dealt out over files, with an index if wanted."""
    names = ["model.safetensors"] if files == 1 else [f"model-{i + 1}-of-{files}.safetensors" for i in range(files)]
    places = {key: names[i % files] for i, key in enumerate(sorted(tensors))}
    folder.mkdir()
    for name in names:
        save_file({key: tensors[key] for key in places if places[key] == name}, folder / name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
