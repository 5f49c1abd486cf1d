"""Loading a checkpoint: every weight gets where it belongs, a rank gets its part, and what is wrong is told at once."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import transformers
from safetensors.torch import save_file

from dsacp_npu.commands import outside
from dsacp_npu.loading import Held, load_attention
from dsacp_npu.quant import QuantizedWeight, quantized_weight
from dsacp_ref.config import AttentionConfig
from dsacp_ref.spec import ContractError
from tests.compare import assert_same
from tests.module.checkpoints import (
    LAYERS,
    SPELLINGS,
    TINY,
    WIDE,
    drawn_weights,
    float8,
    full_shapes,
    key_of,
    layer_checkpoint,
    plain_float8,
    write_files,
)

INT8 = ("wq_a", "wkv", "wq_b", "wo_b", "indexer.wq_b")
RULE = "source must hold exactly the attention weights of these layers, got "
INDEX = "model.safetensors.index.json"


class Layer(torch.nn.Module):
    """What loading asks of a module: rank `rank` of `size` that split the heads, and what was assigned to it."""

    def __init__(
        self, layer_idx: int, config: AttentionConfig = TINY, *, rank: int = 0, size: int = 1, w8a8: bool = False
    ) -> None:
        super().__init__()
        self.layer_idx, self.config, self.w8a8 = layer_idx, config, w8a8
        self.rank, self.size = rank, size
        self.got: dict[str, Any] = {}

    def share(self, count: int) -> slice:
        part = count // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def held(self) -> dict[str, Held]:
        whole, config = slice(None), self.config
        split = {
            "attn_sink": (self.share(config.num_heads),),
            "wq_b": (self.share(config.num_heads * config.head_dim), whole),
            "wo_a": (self.share(config.o_groups), whole, whole),
            "wo_b": (whole, self.share(config.o_groups * config.o_lora_rank)),
        }
        shapes = full_shapes(config, self.layer_idx)
        return {name: Held(shape, split.get(name, (whole,) * len(shape))) for name, shape in shapes.items()}

    def assign(self, name: str, tensor: Any) -> None:
        assert name not in self.got, f"{name} was assigned twice"
        self.got[name] = (
            type(tensor)(*(part.clone() for part in tensor)) if isinstance(tensor, tuple) else tensor.clone()
        )


def layers_of(config: AttentionConfig = TINY, **options: Any) -> list[Layer]:
    return [Layer(layer_idx, config, **options) for layer_idx in LAYERS]


def assert_loaded(layer: Layer, weights: Mapping[str, Any]) -> None:
    """The layer got its part of each of these weights, and nothing else."""
    held = layer.held()
    assert set(layer.got) == set(weights)
    for name, weight in weights.items():
        assert_same(layer.got[name], weight[held[name].index], name)


def refuse(layers: Any, source: Any, text: str, **options: Any) -> None:
    """Refused with exactly this text, before any layer got anything."""
    with pytest.raises(ContractError, match=f"^{re.escape(text)}$"):
        load_attention(layers, source, **options)
    if isinstance(layers, list):
        assert not any(layer.got for layer in layers)


def one_layer(layer_idx: int = 0, config: AttentionConfig = TINY) -> dict[str, torch.Tensor]:
    return layer_checkpoint(config, [layer_idx])


# --- where weights come from ---


@pytest.mark.parametrize("root", ["", "model.", "language.", "language.model."])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_weight_is_found_in_every_spelling(spelling: str, root: str) -> None:
    layers = layers_of()
    prefix = "language." if root.startswith("language.") else ""
    load_attention(layers, layer_checkpoint(TINY, LAYERS, spelling, root), prefix=prefix)
    for layer in layers:
        assert_loaded(layer, drawn_weights(TINY, layer.layer_idx))


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_weight_is_found_in_files(tmp_path: Path, spelling: str, files: int, index: bool) -> None:
    folder = write_files(tmp_path / "model", layer_checkpoint(TINY, LAYERS, spelling), files, index)
    layers = layers_of()
    load_attention(layers, folder)
    for layer in layers:
        assert_loaded(layer, drawn_weights(TINY, layer.layer_idx))


def test_a_file_alone_is_a_source_by_path_or_text(tmp_path: Path) -> None:
    file = write_files(tmp_path / "model", one_layer()) / "model.safetensors"
    for source in (file, str(file)):
        layer = Layer(0)
        load_attention([layer], source)
        assert_loaded(layer, drawn_weights(TINY, 0))


def test_an_index_decides_which_files_are_of_the_checkpoint(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "model", one_layer(), 2, index=True)
    save_file(one_layer(), folder / "consolidated.safetensors")
    layer = Layer(0)
    load_attention([layer], folder)
    assert_loaded(layer, drawn_weights(TINY, 0))


def test_some_layers_of_a_model_load_alone_and_may_be_spelled_apart() -> None:
    source = layer_checkpoint(TINY, [0, 1]) | layer_checkpoint(TINY, [2], "transformers", "model.")
    layers = torch.nn.ModuleList([Layer(2), Layer(1)])  # the usual container, and no Sequence
    load_attention(layers, source)
    for layer in layers:
        assert_loaded(layer, drawn_weights(TINY, layer.layer_idx))


def test_dtypes_stay_and_parameters_are_taken(tmp_path: Path) -> None:
    source = one_layer()
    source[key_of("wkv", TINY, 0)] = source[key_of("wkv", TINY, 0)].bfloat16()
    source[key_of("wq_a", TINY, 0)] = source[key_of("wq_a", TINY, 0)].half()
    as_parameters = {
        key: torch.nn.Parameter(t, t.is_floating_point()) for key, t in source.items() if t.is_floating_point()
    }
    for given in (as_parameters, write_files(tmp_path / "model", source)):
        layer = Layer(0)
        load_attention([layer], given)
        assert (layer.got["wkv"].dtype, layer.got["wq_a"].dtype) == (torch.bfloat16, torch.float16)
        assert not layer.got["wkv"].requires_grad


@pytest.mark.parametrize("save_original_format", [True, False])
def test_what_transformers_saves_is_loaded(tmp_path: Path, save_original_format: bool) -> None:
    """save_original_format writes kv_norm as norm, which is taken for it."""
    config = replace(TINY, compress_ratios=(1, 4, 128))
    theirs = transformers.DeepseekV4Config(**config.to_json(), **outside.SURROUNDINGS)
    with torch.random.fork_rng(devices=[]):
        model = transformers.DeepseekV4ForCausalLM(theirs)
    for name, weight in model.named_parameters():
        if name.endswith(("sinks", "position_bias", "norm.weight")):  # which start all alike
            weight.data.copy_(torch.linspace(0, len(name), weight.numel()).reshape(weight.shape))
    model.save_pretrained(tmp_path, save_original_format=save_original_format)
    for source in (tmp_path, model.state_dict()):
        layers = [Layer(layer_idx, config) for layer_idx in range(3)]
        load_attention(layers, source)
        for layer in layers:
            block = model.model.layers[layer.layer_idx].self_attn.state_dict()
            expected = {}
            for name, shape in full_shapes(config, layer.layer_idx).items():
                key = key_of(name, config, layer.layer_idx, "transformers").partition("self_attn.")[2]
                expected[name] = block.pop(key).reshape(shape)
            assert not block, "every weight of the block was looked at"
            assert_loaded(layer, expected)


# --- a rank's part ---


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("from_file", [False, True])
def test_each_rank_gets_its_part(tmp_path: Path, from_file: bool, size: int) -> None:
    tensors = layer_checkpoint(TINY)
    source = write_files(tmp_path / "model", tensors, 2) if from_file else tensors
    for rank in range(size):
        layers = layers_of(rank=rank, size=size)
        load_attention(layers, source)
        for layer in layers:
            assert_loaded(layer, drawn_weights(TINY, layer.layer_idx))


class Counted:
    """An open file that notes how many numbers were read under each key."""

    def __init__(self, handle: Any, read: dict[str, int], key: str = "") -> None:
        self.handle, self.read, self.key = handle, read, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def get_slice(self, key: str) -> Counted:
        return Counted(self.handle.get_slice(key), self.read, key)

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.handle[index]
        self.read[self.key] = self.read.get(self.key, 0) + part.numel()
        return part


@pytest.mark.parametrize("w8a8", [False, True])
def test_a_rank_reads_what_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, w8a8: bool) -> None:
    """Each weight is read once, and of a split one the rank's part; only the scales of wo_b need its other columns."""
    folder = write_files(tmp_path / "model", one_layer())
    read: dict[str, int] = {}
    real = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda *args: Counted(real(*args), read))
    load_attention([Layer(0, rank=1, size=2, w8a8=w8a8)], folder)
    expected = {key_of(name, TINY, 0): weight.numel() for name, weight in drawn_weights(TINY, 0).items()}
    for name in ("attn_sink", "wq_b", "wo_a") if w8a8 else ("attn_sink", "wq_b", "wo_a", "wo_b"):
        expected[key_of(name, TINY, 0)] //= 2
    assert read == expected


# --- float8 ---


def with_float8(tensors: dict[str, torch.Tensor], key: str, end: str, scale_dtype: torch.dtype) -> torch.Tensor:
    """Put a key's weight into float8, and give what it then means."""
    values, scales = float8(tensors[key], scale_dtype)
    tensors[key], tensors[key.removesuffix(".weight") + end] = values, scales
    return plain_float8(values, scales)


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32], ids=["e8m0", "float32"])
@pytest.mark.parametrize("spelling, end", [("checkpoint", ".scale"), ("transformers", ".weight_scale_inv")])
def test_float8_blocks_are_scaled(tmp_path: Path, spelling: str, end: str, scale_dtype: torch.dtype) -> None:
    """Every matrix in blocks of which none but the first are whole, cut for ranks inside a block."""
    tensors = layer_checkpoint(WIDE, [1], spelling)
    meant = drawn_weights(WIDE, 1)
    for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b"):
        meaning = with_float8(tensors, key_of(name, WIDE, 1, spelling), end, scale_dtype)
        meant[name] = meaning.reshape(meant[name].shape)
    folder = write_files(tmp_path / "model", tensors, 2)
    for rank in range(2):
        for source in (tensors, folder):
            layer = Layer(1, WIDE, rank=rank, size=2)
            load_attention([layer], source)
            assert_loaded(layer, meant)


def test_float8_without_scales_is_refused() -> None:
    tensors = one_layer()
    key = key_of("wq_b", TINY, 0)
    tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    text = RULE + "1 missing: layers.0.attn.wq_b.scale; float8 and int8 weights need their scales"
    refuse([Layer(0)], tensors, text)


def test_float8_scales_are_checked() -> None:
    tensors = one_layer()
    for name in ("wq_a", "wkv"):
        with_float8(tensors, key_of(name, TINY, 0), ".scale", torch.float32)
    tensors["layers.0.attn.wq_a.scale"] = torch.ones(1, 2)
    tensors["layers.0.attn.wkv.scale"] = torch.ones(1, 1, dtype=torch.int32)
    refuse(
        [Layer(0)],
        tensors,
        RULE + "1 of a wrong shape: layers.0.attn.wq_a.scale is [1, 2] in place of [1, 1]; 1 of a wrong dtype: "
        "layers.0.attn.wkv.scale is int32 in place of float8_e8m0fnu or float32",
    )


def test_scales_of_a_float_weight_are_refused() -> None:
    """Whether they are in the weight already, nobody can tell."""
    tensors = one_layer() | {"layers.0.attn.wq_a.scale": torch.ones(1, 1)}
    refuse([Layer(0)], tensors, RULE + "1 unexpected: layers.0.attn.wq_a.scale")


# --- int8 ---


def int8_layer(scale_shape: str = "row", scale_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Layer 1 as a W8A8 checkpoint has it, with -128 among the values."""
    tensors = one_layer(1)
    drawn = torch.Generator().manual_seed(7)
    for name in INT8:
        key = key_of(name, TINY, 1)
        tensors[key] = torch.randint(-128, 128, tensors[key].shape, generator=drawn, dtype=torch.int8)
        scales = torch.rand(len(tensors[key]), generator=drawn).to(scale_dtype)
        tensors[key + "_scale"] = scales[:, None] if scale_shape == "column" else scales
    return tensors


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("scale_shape", ["row", "column"])
def test_int8_weights_go_in_as_they_are(tmp_path: Path, scale_shape: str, scale_dtype: torch.dtype) -> None:
    tensors = int8_layer(scale_shape, scale_dtype)
    for name in ("wq_a", "wo_b"):
        key = key_of(name, TINY, 1)
        tensors[key + "_offset"] = torch.zeros_like(tensors[key + "_scale"])
    folder = write_files(tmp_path / "model", tensors)
    for rank in range(2):
        for source in (tensors, folder):
            layer = Layer(1, rank=rank, size=2, w8a8=True)
            load_attention([layer], source)
            for name in INT8:
                key, (rows, columns) = key_of(name, TINY, 1), layer.held()[name].index
                scales = tensors[key + "_scale"].flatten().float()[rows]
                assert_same(layer.got.pop(name), QuantizedWeight(tensors[key][rows, columns], scales), name)
            assert_loaded(layer, {name: w for name, w in drawn_weights(TINY, 1).items() if name not in INT8})


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8"])
def test_float_weights_are_coded_over_whole_rows(kind: str) -> None:
    """The ranks' codes, side by side, are those of the whole weight, and the scales of wo_b are the same on all."""
    tensors, meant = layer_checkpoint(WIDE, [1]), drawn_weights(WIDE, 1)
    for name in INT8:
        key = key_of(name, WIDE, 1)
        if kind == "float8":
            meant[name] = with_float8(tensors, key, ".scale", torch.float32)
        elif kind == "bfloat16":
            tensors[key] = meant[name] = meant[name].bfloat16()
    for rank in range(2):
        layer = Layer(1, WIDE, rank=rank, size=2, w8a8=True)
        load_attention([layer], tensors)
        for name in INT8:
            rows, columns = layer.held()[name].index
            whole = quantized_weight(meant[name])
            assert_same(layer.got.pop(name), QuantizedWeight(whole.values[rows, columns], whole.scales[rows]), name)
        assert_loaded(layer, {name: weight for name, weight in meant.items() if name not in INT8})


def test_int8_weights_in_a_float_module_are_refused() -> None:
    keys = ", ".join(f"{key_of(name, TINY, 1)} is int8" for name in ("wq_a", "wq_b", "wkv", "wo_b", "indexer.wq_b"))
    text = RULE + f"5 of a wrong dtype: {keys}; build the module with w8a8=True, or load float weights"
    refuse([Layer(1)], int8_layer(), text)


def test_int8_where_a_w8a8_module_has_float_is_refused() -> None:
    tensors = int8_layer()
    key = key_of("wo_a", TINY, 1)
    tensors[key], tensors[key + "_scale"] = tensors[key].to(torch.int8), torch.ones(len(tensors[key]))
    fix = "a w8a8 module has wq_a, wkv, wq_b, wo_b, indexer.wq_b in int8, or load float weights"
    refuse([Layer(1, w8a8=True)], tensors, RULE + f"1 of a wrong dtype: {key} is int8; {fix}")


def test_int8_scales_and_offsets_are_checked() -> None:
    tensors = int8_layer()
    del tensors["layers.1.attn.wq_a.weight_scale"]
    tensors["layers.1.attn.wkv.weight_scale"] = torch.ones(47)
    tensors["layers.1.attn.wo_b.weight_scale"] = torch.ones(96, dtype=torch.float64)
    tensors["layers.1.attn.wo_b.weight_offset"] = torch.eye(96)[:, :1]
    tensors["layers.1.attn.wq_b.weight_offset"] = torch.ones(3)
    refuse(
        [Layer(1, w8a8=True)],
        tensors,
        RULE + "1 missing: layers.1.attn.wq_a.weight_scale; "
        "2 of a wrong shape: layers.1.attn.wq_b.weight_offset is [3] in place of [192] or [192, 1], "
        "layers.1.attn.wkv.weight_scale is [47] in place of [48] or [48, 1]; "
        "1 of a wrong value: layers.1.attn.wo_b.weight_offset is not all zero; "
        "1 of a wrong dtype: layers.1.attn.wo_b.weight_scale is float64 in place of float32 or bfloat16 or float16; "
        "float8 and int8 weights need their scales. int8 weights are symmetric here",
    )


def test_a_value_without_code_is_refused_by_its_key() -> None:
    tensors = one_layer()
    tensors["layers.0.attn.wkv.weight"][3, 1] = float("inf")
    text = "^layers.0.attn.wkv.weight: weight must be finite in float32, got inf; inf and NaN have no code$"
    with pytest.raises(ContractError, match=text):
        load_attention([Layer(0, w8a8=True)], tensors)


# --- keys that are wrong ---


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_all_missing_keys_are_told_as_the_checkpoint_spells_them(spelling: str) -> None:
    tensors = layer_checkpoint(TINY, [0, 1], spelling, "model.")
    gone = [
        "model." + key_of(*place, spelling) for place in (("kv_norm", TINY, 0), ("indexer.compressor.ape", TINY, 1))
    ]
    for key in gone:
        del tensors[key]
    gone += ["model." + key_of(name, TINY, 2, spelling) for name in full_shapes(TINY, 2)]
    refuse([Layer(0), Layer(1), Layer(2)], tensors, RULE + f"14 missing: {', '.join(gone)}")


def test_a_checkpoint_of_another_prefix_says_so() -> None:
    keys = ", ".join(key_of(name, TINY, 0) for name in full_shapes(TINY, 0))
    hint = "no key at all is of these layers: prefix is what stands before 'layers.' in the keys"
    refuse([Layer(0)], layer_checkpoint(TINY, [0], root="language."), RULE + f"8 missing: {keys}; {hint}")


def test_unexpected_keys_are_told() -> None:
    """A compressor in a window-only layer, and a second kv_norm."""
    tensors = layer_checkpoint(TINY, [0, 1])
    extra = ["layers.0.attn.compressor.ape", "layers.0.attn.compressor.wkv.weight", "layers.1.attn.norm.weight"]
    tensors |= {key: torch.zeros(2) for key in extra}
    refuse([Layer(0), Layer(1)], tensors, RULE + f"3 unexpected: {', '.join(extra)}")


def test_wrong_shapes_are_told() -> None:
    """All of them, and wo_a as a checkpoint has it; a scalar too."""
    tensors = layer_checkpoint(TINY, [0, 1])
    tensors["layers.0.attn.wo_a.weight"] = torch.zeros(2, 24, 96)
    tensors["layers.0.attn.attn_sink"] = torch.tensor(1.0)
    tensors["layers.1.attn.wkv.weight"] = torch.zeros(96, 48)
    refuse(
        [Layer(0), Layer(1)],
        tensors,
        RULE + "3 of a wrong shape: layers.0.attn.attn_sink is [] in place of [4], "
        "layers.0.attn.wo_a.weight is [2, 24, 96] in place of [48, 96], "
        "layers.1.attn.wkv.weight is [96, 48] in place of [48, 96]",
    )


def test_wrong_dtypes_are_told(tmp_path: Path) -> None:
    """A dtype that no weight has, and float8 where there are no blocks."""
    tensors = one_layer()
    tensors["layers.0.attn.wkv.weight"] = tensors["layers.0.attn.wkv.weight"].to(torch.float8_e5m2)
    tensors["layers.0.attn.kv_norm.weight"] = tensors["layers.0.attn.kv_norm.weight"].to(torch.float8_e4m3fn)
    hint = "weights are float, float8 matrices with block scales, or int8"
    for source, word in ((tensors, "float8_e5m2"), (write_files(tmp_path / "model", tensors), "F8_E5M2")):
        both = f"layers.0.attn.wkv.weight is {word}, layers.0.attn.kv_norm.weight is float8_e4m3fn"
        refuse([Layer(0)], source, RULE + f"2 of a wrong dtype: {both}; {hint}")


def test_every_kind_of_fault_is_in_one_error() -> None:
    tensors = one_layer()
    del tensors["layers.0.attn.wq_a.weight"]
    tensors["layers.0.attn.wo_c.weight"] = torch.zeros(1)
    tensors["layers.0.attn.attn_sink"] = torch.zeros(5)
    refuse(
        [Layer(0)],
        tensors,
        RULE + "1 missing: layers.0.attn.wq_a.weight; 1 of a wrong shape: layers.0.attn.attn_sink is [5] in place of "
        "[4]; 1 unexpected: layers.0.attn.wo_c.weight",
    )


def test_a_layer_in_two_spellings_is_refused() -> None:
    tensors = one_layer() | {"model.layers.0.self_attn.sinks": torch.zeros(4)}
    both = "layers.0.attn.wq_a.weight and model.layers.0.self_attn.sinks"
    text = f"source must spell the keys of layer 0 in one way, got {both}; remove those that are not of this model"
    refuse([Layer(0)], tensors, text)


# --- sources that are wrong ---


def test_arguments_are_checked() -> None:
    refuse([], {}, "layers must be one attention module or more, got none; put them into a list")
    refuse(Layer(0), {}, "layers must be one attention module or more, got Layer; put them into a list")
    rule = "prefix must be a str that is empty or ends with a dot, got "
    refuse([Layer(0)], {}, rule + "'language'; such as 'language.'", prefix="language")
    refuse([Layer(0)], {}, rule + "None; such as 'language.'", prefix=None)
    rule = "source must be a folder, a .safetensors file or a mapping of keys to tensors, got "
    refuse([Layer(0)], torch.nn.Linear(1, 1), rule + "Linear; of a module, give its state_dict()")


def test_values_of_a_mapping_are_tensors() -> None:
    key = "layers.0.attn.attn_sink"
    text = f"{key} must be a torch tensor, got ndarray; dsacp_ref is for numpy arrays"
    refuse([Layer(0)], one_layer() | {key: np.zeros(4)}, text)
    refuse([Layer(0)], one_layer() | {key: [0.0] * 4}, f"{key} must be a torch tensor, got list")


def test_paths_without_safetensors_are_refused(tmp_path: Path) -> None:
    text = f"source must be a folder with *.safetensors files, got none in {tmp_path}; pickled weights are not read"
    refuse([Layer(0)], tmp_path, text)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuse([Layer(0)], tmp_path, text)
    rule = "source must be a folder or a .safetensors file, got "
    refuse([Layer(0)], tmp_path / "pytorch_model.bin", f"{rule}{tmp_path / 'pytorch_model.bin'}, of another kind")
    refuse([Layer(0)], tmp_path / "none", f"{rule}{tmp_path / 'none'}, nothing there")


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    text = f"^{re.escape(str(file))} must be a safetensors file, got .*header.*; the download may be incomplete$"
    with pytest.raises(ContractError, match=text):
        load_attention([Layer(0)], tmp_path)


def test_a_key_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "model", one_layer(), 2)
    save_file({"layers.0.attn.attn_sink": torch.zeros(4)}, folder / "old.safetensors")
    text = (
        "source must hold layers.0.attn.attn_sink once, got it in model-2-of-2.safetensors and old.safetensors; "
        "remove the file that is not of this checkpoint"
    )
    refuse([Layer(0)], folder, text)


def test_an_index_must_fit_its_files(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "model", one_layer(), 2, index=True)
    index = folder / INDEX
    places = json.loads(index.read_text())["weight_map"]
    key = "layers.0.attn.attn_sink"
    other = "model-1-of-2.safetensors"
    assert places[key] != other
    index.write_text(json.dumps({"weight_map": places | {key: other}}))
    refuse([Layer(0)], folder, f"source must hold {key} in {other}, as {INDEX} says, got no such key there")
    index.write_text(json.dumps({"weight_map": places | {"embed.weight": "gone.safetensors"}}))
    text = f"source must hold the files that {INDEX} names, got no gone.safetensors in {folder}; "
    refuse([Layer(0)], folder, text + "the download may be incomplete")
    for broken in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}'):
        index.write_text(broken)
        rule = "must be a JSON object with a weight_map of keys to files, got something else"
        refuse([Layer(0)], folder, f"{index} {rule}")


def test_a_missing_safetensors_is_told_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_files(tmp_path / "model", one_layer())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    load_attention([Layer(0)], one_layer())
    with pytest.raises(ImportError, match=r"^model.safetensors is read with safetensors .*; pip install safetensors$"):
        load_attention([Layer(0)], folder)
