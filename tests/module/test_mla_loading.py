"""Loading V3.2's attention: every weight gets where it belongs, in FP8 too, and what is wrong is told at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dsacp_npu.loading import load_attention
from dsacp_npu.mla_module import MLAttention
from dsacp_npu.module import DSAttention
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import ContractError
from tests.compare import assert_same
from tests.layer_strategies import SMALL as V4
from tests.mla_strategies import SMALL
from tests.module.checkpoints import float8, plain_float8, write_files

# Two layers and a draft layer. "wide" has matrices of several blocks, none of them whole; a head's are cut inside one.
TWO = replace(SMALL, num_hidden_layers=2)
WIDE = replace(TWO, hidden_size=300, q_lora_rank=140, kv_lora_rank=136, nope_head_dim=50, v_head_dim=40)
LAYERS = (0, 1, 2)
RULE = "source must hold exactly the attention weights of these layers, got "
# Written apart from the package's: our name of a weight -> the checkpoint's.
KEYS = {
    "wq_a": "q_a_proj.weight",
    "q_norm": "q_a_layernorm.weight",
    "wq_b": "q_b_proj.weight",
    "wkv_a": "kv_a_proj_with_mqa.weight",
    "kv_norm": "kv_a_layernorm.weight",
    "wkv_b": "kv_b_proj.weight",
    "wo": "o_proj.weight",
    **{f"indexer.{name}": f"indexer.{name}.weight" for name in ("wq_b", "wk", "k_norm", "weights_proj")},
    "indexer.k_norm_bias": "indexer.k_norm.bias",
}
MATRICES = ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo", "indexer.wq_b", "indexer.wk")


def full_shapes(c: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Our name of each weight -> its shape in a checkpoint."""
    width = c.index_head_dim
    return {
        "wq_a": (c.q_lora_rank, c.hidden_size),
        "q_norm": (c.q_lora_rank,),
        "wq_b": (c.num_heads * (c.nope_head_dim + c.rope_head_dim), c.q_lora_rank),
        "wkv_a": (c.kv_lora_rank + c.rope_head_dim, c.hidden_size),
        "kv_norm": (c.kv_lora_rank,),
        "wkv_b": (c.num_heads * (c.nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "wo": (c.hidden_size, c.num_heads * c.v_head_dim),
        "indexer.wq_b": (c.index_n_heads * width, c.q_lora_rank),
        "indexer.wk": (width, c.hidden_size),
        "indexer.k_norm": (width,),
        "indexer.k_norm_bias": (width,),
        "indexer.weights_proj": (c.index_n_heads, c.hidden_size),
    }


def drawn_weights(config: MLAConfig, layer_idx: int) -> dict[str, torch.Tensor]:
    """Our name of each weight of a layer -> float32 numbers as a checkpoint has them, no two weights alike."""
    drawn = torch.Generator().manual_seed(layer_idx)
    return {name: torch.randn(shape, generator=drawn) for name, shape in full_shapes(config).items()}


def key_of(name: str, layer_idx: int = 0, root: str = "model.") -> str:
    """The key of a weight; draft layers are numbered on."""
    return f"{root}layers.{layer_idx}.self_attn.{KEYS[name]}"


def checkpoint(config: MLAConfig, layers: Any = LAYERS, root: str = "model.") -> dict[str, torch.Tensor]:
    """These layers among keys that are none of attention's business."""
    tensors = {
        f"{root}embed_tokens.weight": torch.zeros(2, dtype=torch.uint8),
        f"{root}layers.1.input_layernorm.weight": torch.zeros(3),
        f"{root}layers.11.self_attn.o_proj.weight": torch.zeros(1),
        f"{root}layers.2.eh_proj.weight": torch.zeros(1),
        f"{root}layers.0.mlp.gate_proj.weight_scale_inv": torch.zeros(4, 4),
    }
    for layer_idx in layers:
        tensors |= {key_of(name, layer_idx, root): w for name, w in drawn_weights(config, layer_idx).items()}
    return tensors


def layers_of(config: MLAConfig = TWO, layers: Any = LAYERS, dtype: str = "float32") -> list[MLAttention]:
    return [MLAttention(config, layer_idx, dtype=dtype) for layer_idx in layers]


def assert_loaded(layer: MLAttention, weights: Mapping[str, torch.Tensor]) -> None:
    """The layer has each of these weights and misses none; w_uk and w_uv are each head's own."""
    config = layer.config
    assert set(weights) == set(layer.held())
    assert not layer._missing
    for name, weight in weights.items():
        got = layer.get_parameter(name)
        assert_same(got.data, weight.reshape(got.shape).to(got.dtype), name)
    record, nope, both = layer.weights(), config.nope_head_dim, config.nope_head_dim + config.v_head_dim
    for head in range(config.num_heads):
        rows = weights["wkv_b"][head * both : (head + 1) * both].to(record.w_uk.dtype)
        assert_same(record.w_uk[head].detach(), rows[:nope])
        assert_same(record.w_uv[head].detach(), rows[nope:])


def refuse(layers: Any, source: Any, text: str, **options: Any) -> None:
    """Refused with exactly this text, before any layer got anything."""
    with pytest.raises(ContractError, match=f"^{re.escape(text)}$"):
        load_attention(layers, source, **options)
    for layer in layers:
        assert layer._missing == set(layer.held())


# --- where weights come from ---


@pytest.mark.parametrize("root", ["", "model.", "language.", "language.model."])
def test_every_weight_is_found_with_and_without_model(root: str) -> None:
    """A draft layer too, which V3.2's checkpoint numbers on behind the model's own."""
    layers = layers_of()
    load_attention(layers, checkpoint(TWO, root=root), prefix="language." if root.startswith("language.") else "")
    for layer in layers:
        assert_loaded(layer, drawn_weights(TWO, layer.layer_idx))


@pytest.mark.parametrize("files, index", [(1, False), (1, True), (3, False), (3, True)])
def test_every_weight_is_found_in_files(tmp_path: Path, files: int, index: bool) -> None:
    folder = write_files(tmp_path / "model", checkpoint(TWO), files, index)
    layers = layers_of()
    load_attention(layers, folder)
    for layer in layers:
        assert_loaded(layer, drawn_weights(TWO, layer.layer_idx))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_weights_are_cast_to_the_modules_dtypes(dtype: str) -> None:
    layers = layers_of(dtype=dtype)
    load_attention(torch.nn.ModuleList(layers), checkpoint(TWO))
    for layer in layers:
        assert_loaded(layer, drawn_weights(TWO, layer.layer_idx))


def test_some_layers_of_a_model_load_alone_and_may_be_spelled_apart() -> None:
    source = checkpoint(TWO, [1], "") | checkpoint(TWO, [2], "model.")
    layers = layers_of(layers=(2, 1))
    load_attention(layers, source)
    for layer in layers:
        assert_loaded(layer, drawn_weights(TWO, layer.layer_idx))


def test_what_transformers_saves_is_loaded(tmp_path: Path) -> None:
    """Its state_dict and its files, under the names of its own modules."""
    surroundings = {"intermediate_size": 8, "moe_intermediate_size": 4, "n_routed_experts": 2, "num_experts_per_tok": 1}
    surroundings |= {"n_group": 1, "topk_group": 1, "vocab_size": 8, "num_key_value_heads": TWO.num_heads}
    theirs = transformers.DeepseekV32Config(**TWO.to_json(), **surroundings)
    with torch.random.fork_rng(devices=[]):
        model = transformers.DeepseekV32ForCausalLM(theirs)
    for name, weight in model.named_parameters():
        if "norm" in name:  # which start all alike
            weight.data.copy_(torch.linspace(0, len(name), weight.numel()))
    assert MLAConfig.from_json(model.config.to_dict()) == TWO
    model.save_pretrained(tmp_path)
    for source in (tmp_path, model.state_dict()):
        layers = layers_of(layers=(0, 1))
        load_attention(layers, source)
        for layer in layers:
            block = model.model.layers[layer.layer_idx].self_attn.state_dict()
            assert_loaded(layer, {name: block.pop(KEYS[name]) for name in full_shapes(TWO)})
            assert not block, "every weight of the block was looked at"


def test_both_families_load_from_one_mapping() -> None:
    """Each by its own spellings: V4's "self_attn" keys are not V3.2's."""
    theirs = DSAttention(replace(V4, compress_ratios=(1,), num_hidden_layers=1), 0, dtype="float32")
    drawn = {name: torch.randn(held.shape) for name, held in theirs.held().items()}
    names = {"attn_sink": "attn_sink"} | {name: f"{name}.weight" for name in drawn if name != "attn_sink"}
    source = {f"layers.0.attn.{names[name]}": w.flatten(0, -2) if w.ndim == 3 else w for name, w in drawn.items()}
    ours = MLAttention(TWO, 1, dtype="float32")
    load_attention([ours, theirs], source | checkpoint(TWO, [1], ""))
    assert_loaded(ours, drawn_weights(TWO, 1))
    for name, weight in drawn.items():
        assert_same(theirs.get_parameter(name).data, weight, name)


# --- float8 ---


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32], ids=["e8m0", "float32"])
def test_float8_blocks_are_scaled(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    """Every matrix in blocks of 128 x 128 of which none but the first are whole; kv_b_proj, seen head by head, too."""
    tensors, meant = checkpoint(WIDE, [1]), drawn_weights(WIDE, 1)
    for name in MATRICES:
        key = key_of(name, 1)
        tensors[key], scales = float8(tensors[key], scale_dtype)
        tensors[f"{key}_scale_inv"] = scales
        meant[name] = plain_float8(tensors[key], scales)
        assert scales.numel() > 1
    for source in (tensors, write_files(tmp_path / "model", tensors, 2)):
        (layer,) = layers_of(WIDE, [1])
        load_attention([layer], source)
        assert_loaded(layer, meant)


def test_float8_without_scales_or_with_wrong_ones_is_refused() -> None:
    tensors = checkpoint(TWO, [0])
    for name in ("wq_b", "wkv_b", "wo"):
        tensors[key_of(name)] = tensors[key_of(name)].to(torch.float8_e4m3fn)
    tensors[key_of("wkv_b") + "_scale_inv"] = torch.ones(3, 1)
    tensors[key_of("wo") + "_scale_inv"] = torch.ones(1, 1, dtype=torch.int32)
    stem = "model.layers.0.self_attn."
    refuse(
        layers_of(layers=[0]),
        tensors,
        RULE + f"1 missing: {stem}q_b_proj.weight_scale_inv; 1 of a wrong shape: {stem}kv_b_proj.weight_scale_inv is "
        f"[3, 1] in place of [1, 1]; 1 of a wrong dtype: {stem}o_proj.weight_scale_inv is int32 in place of "
        "float8_e8m0fnu or float32; float8 and int8 weights need their scales",
    )


def test_scales_of_a_float_weight_are_refused() -> None:
    """Whether they are in the weight already, nobody can tell."""
    key = key_of("wo") + "_scale_inv"
    refuse(layers_of(layers=[0]), checkpoint(TWO, [0]) | {key: torch.ones(1, 1)}, RULE + f"1 unexpected: {key}")


def test_int8_is_refused_without_a_way_that_is_not_there() -> None:
    """No V3.2 module keeps int8 weights: building it otherwise is no way out."""
    tensors = checkpoint(TWO, [0])
    key = key_of("wq_a")
    tensors[key], tensors[f"{key}_scale"] = tensors[key].to(torch.int8), torch.ones(len(tensors[key]))
    refuse(layers_of(layers=[0]), tensors, RULE + f"1 of a wrong dtype: {key} is int8; load float weights")


# --- keys that are wrong ---


def test_every_kind_of_fault_of_every_layer_is_in_one_error() -> None:
    tensors = checkpoint(TWO, [0, 1])
    del tensors[key_of("indexer.k_norm_bias", 0)], tensors[key_of("wkv_a", 1)]
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(1)
    tensors[key_of("wkv_b", 0)] = torch.zeros(3, 8, 8)  # by head already
    tensors[key_of("wq_a", 1)] = tensors[key_of("wq_a", 1)].to(torch.float8_e5m2)
    stem = "model.layers.{}.self_attn."
    refuse(
        layers_of(layers=[0, 1]),
        tensors,
        RULE + f"1 of a wrong shape: {stem.format(0)}kv_b_proj.weight is [3, 8, 8] in place of [24, 8]; "
        f"2 missing: {stem.format(0)}indexer.k_norm.bias, {stem.format(1)}kv_a_proj_with_mqa.weight; "
        f"1 of a wrong dtype: {stem.format(1)}q_a_proj.weight is float8_e5m2; "
        f"1 unexpected: {stem.format(1)}q_proj.weight; weights are float, float8 matrices with block scales, or int8",
    )


def test_a_checkpoint_of_another_prefix_says_so() -> None:
    keys = ", ".join(key_of(name, root="") for name in full_shapes(TWO))
    hint = "no key at all is of these layers: prefix is what stands before 'layers.' in the keys"
    refuse(layers_of(layers=[0]), checkpoint(TWO, [0], "language."), RULE + f"12 missing: {keys}; {hint}")


def test_a_checkpoint_of_v4_is_none_of_v32() -> None:
    keys = ", ".join(key_of(name, root="") for name in full_shapes(TWO))
    hint = "no key at all is of these layers: prefix is what stands before 'layers.' in the keys"
    refuse(
        layers_of(layers=[0]), {"layers.0.attn.wq_a.weight": torch.zeros(7, 9)}, RULE + f"12 missing: {keys}; {hint}"
    )


def test_a_layer_in_two_spellings_is_refused() -> None:
    both = f"{key_of('wq_a', root='')} and {key_of('wq_a')}"
    text = f"source must spell the keys of layer 0 in one way, got {both}; remove those that are not of this model"
    refuse(layers_of(layers=[0]), checkpoint(TWO, [0]) | checkpoint(TWO, [0], ""), text)
