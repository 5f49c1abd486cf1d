"""Fills attention modules from a checkpoint: a folder, one file, or a mapping of names to tensors.

        source ── stored_tensors ── {key: Stored}, unread ──┐
        layers ── held() ── what each rank keeps of what ───┴── Weight ── checked, all of them ── read ── assign()

Keys are spelled as in the released checkpoint or as in transformers, with or without "model." in front. What is wrong
with any key of any layer is found before the first module changes, and told in one error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dsacp_npu._tensors import FLOATS, LOW_PRECISION, Float, check_torch, dtype_name, torch
from dsacp_npu.quant import QuantizedWeight, quantized_weight
from dsacp_ref.config import AttentionConfig
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import ContractError, contract_error

__all__ = ["Held", "load_attention"]

INDEX_FILE = "model.safetensors.index.json"
BLOCK = 128  # rows and columns of a float8 weight that share a scale
FLOAT8 = "float8_e4m3fn"
FLOAT8_SCALES = ("float8_e8m0fnu", "float32")
CHANNEL_SCALES = ("float32", *LOW_PRECISION)
INT8_WEIGHTS = ("wq_a", "wkv", "wq_b", "wo_b", "indexer.wq_b")  # of a w8a8 module
FILE_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I8": "int8",
    "F8_E4M3": FLOAT8,
    "F8_E8M0": "float8_e8m0fnu",
}

# Our name of a weight -> its key inside an attention block: the checkpoint's, then transformers'.
POOL = {
    "wkv": ("wkv.weight", "kv_proj.weight"),
    "wgate": ("wgate.weight", "gate_proj.weight"),
    "ape": ("ape", "position_bias"),
    "norm_weight": ("norm.weight", "kv_norm.weight"),
}
KEYS = {
    "wq_a": ("wq_a.weight", "q_a_proj.weight"),
    "q_norm": ("q_norm.weight", "q_a_norm.weight"),
    "wq_b": ("wq_b.weight", "q_b_proj.weight"),
    "wkv": ("wkv.weight", "kv_proj.weight"),
    "kv_norm": ("kv_norm.weight", "kv_norm.weight"),
    "attn_sink": ("attn_sink", "sinks"),
    "wo_a": ("wo_a.weight", "o_a_proj.weight"),
    "wo_b": ("wo_b.weight", "o_b_proj.weight"),
    **{f"compressor.{ours}": (f"compressor.{own}", f"compressor.{hf}") for ours, (own, hf) in POOL.items()},
    "indexer.wq_b": ("indexer.wq_b.weight", "compressor.indexer.q_b_proj.weight"),
    "indexer.weights_proj": ("indexer.weights_proj.weight", "compressor.indexer.scorer.weights_proj.weight"),
    **{
        f"indexer.compressor.{ours}": (f"indexer.compressor.{own}", f"compressor.indexer.{hf}")
        for ours, (own, hf) in POOL.items()
    },
}
# V3.2's checkpoint and transformers spell alike; wkv_b is w_uk and w_uv of each head one after the other.
MLA_KEYS = {
    "wq_a": "q_a_proj.weight",
    "q_norm": "q_a_layernorm.weight",
    "wq_b": "q_b_proj.weight",
    "wkv_a": "kv_a_proj_with_mqa.weight",
    "kv_norm": "kv_a_layernorm.weight",
    "wkv_b": "kv_b_proj.weight",
    "wo": "o_proj.weight",
    "indexer.wq_b": "indexer.wq_b.weight",
    "indexer.wk": "indexer.wk.weight",
    "indexer.k_norm": "indexer.k_norm.weight",
    "indexer.k_norm_bias": "indexer.k_norm.bias",
    "indexer.weights_proj": "indexer.weights_proj.weight",
}


@dataclass(frozen=True)
class Held:
    """What one rank keeps of one weight.

    Args:
        shape: of the whole weight, all heads and groups, under our name: wo_a is [groups, lora, width].
        index: a contiguous slice for each axis.

    >>> Held((8, 4), (slice(4, 8), slice(None))).shape
    (8, 4)
    """

    shape: tuple[int, ...]
    index: tuple[slice, ...]

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """The shape of what is kept.

        >>> Held((8, 4), (slice(4, 8), slice(None))).kept_shape
        (4, 4)
        """
        return tuple(len(range(size)[part]) for size, part in zip(self.shape, self.index, strict=True))


class AttentionLayer(Protocol):
    """What `load_attention` asks of a module. `assign` copies into the parameter, and casts to its dtype."""

    config: AttentionConfig | MLAConfig
    layer_idx: int
    w8a8: bool

    def held(self) -> Mapping[str, Held]: ...

    def assign(self, name: str, tensor: Float | QuantizedWeight) -> None: ...


class Stored(NamedTuple):
    """One tensor of a checkpoint, unread: `read` gives a part of it."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[slice, ...]], torch.Tensor]


class Spelling(NamedTuple):
    """How a checkpoint writes the keys of a layer."""

    root: str  # in front of "layers." and of ``drafts``
    drafts: str | None  # in front of a draft layer's number among its like; None where it is numbered on in "layers."
    block: str  # the attention block's name in a layer
    keys: Mapping[str, tuple[str, ...]]  # by our name: the key, then others that mean the same
    block_scale: str  # end of the key of a float8 weight's scales


class Weight(NamedTuple):
    """One parameter of one layer, found in a checkpoint; scales for float8 and int8 values."""

    layer: AttentionLayer
    name: str
    key: str
    held: Held
    values: Stored
    scales: Stored | None


class Faults:
    """What is wrong with a checkpoint, key by key."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.hints: dict[str, None] = {}

    def add(self, kind: str, text: str, hint: str = "") -> None:
        """Note a key; hints are told once."""
        self.texts.setdefault(kind, []).append(text)
        if hint:
            self.hints[hint] = None

    def refuse(self) -> None:
        """Raise everything noted, if anything was."""
        if self.texts:
            got = "; ".join(f"{len(texts)} {kind}: {', '.join(texts)}" for kind, texts in self.texts.items())
            rule = "hold exactly the attention weights of these layers"
            raise contract_error("source", rule, got, ". ".join(self.hints))


def _spelling(root: str, transformers: bool) -> Spelling:
    """One of the spellings that are understood."""
    keys: dict[str, tuple[str, ...]] = {ours: (both[transformers],) for ours, both in KEYS.items()}
    if transformers:
        return Spelling(root, "mtp.", "self_attn.", keys, ".weight_scale_inv")
    # transformers 5.24 renames too much in save_pretrained(save_original_format=True), and reads both itself
    keys["kv_norm"] = ("kv_norm.weight", "norm.weight")
    return Spelling(root, "mtp.", "attn.", keys, ".scale")


SPELLINGS = tuple(_spelling(root, transformers) for transformers in (False, True) for root in ("", "model."))
MLA_SPELLINGS = tuple(
    Spelling(root, None, "self_attn.", {ours: (key,) for ours, key in MLA_KEYS.items()}, ".weight_scale_inv")
    for root in ("", "model.")
)


def load_attention(
    layers: Iterable[AttentionLayer], source: str | Path | Mapping[str, torch.Tensor], *, prefix: str = ""
) -> None:
    """Fill the attention modules of a model with their weights; on every rank alike, which reads only what it keeps.

    Every key, shape, dtype and scale of every layer is checked before the first module changes; values are not. Keys
    outside of these layers' attention are ignored.

        weight in the checkpoint          a float module               a w8a8 module
        float                             as it is                     int8 with a scale a row, over the whole row
        float8 and a scale for 128x128    times its scale, in float32  that, then as above
        int8 and a scale a row            refused                      as it is

    Args:
        layers: attention modules of one model, `dsacp_npu.module.DSAttention` or `dsacp_npu.mla_module.MLAttention`,
            each already of its rank's share.
        source: a folder with ``*.safetensors`` files, with or without ``model.safetensors.index.json``; one such file;
            or a mapping of keys to tensors, such as a ``state_dict``.
        prefix: str, what stands before ``layers.`` (or ``model.layers.``) in the keys, with its dot.

    Raises:
        ContractError: a key that is missing, unexpected, or of a wrong shape or dtype, all in one error; a layer that
            is spelled in two ways; a source that cannot be read; a value without int8 code, which may come when some
            modules are filled.
        ImportError: a file is to be read, and safetensors is not installed.

    Source: the keys of the DeepSeek-V4 and V3.2 checkpoints; ``deepseek_v4`` and ``deepseek_v32`` in transformers 5.24.

    >>> load_attention([], {})
    Traceback (most recent call last):
    dsacp_ref.spec.ContractError: layers must be one attention module or more, got none; put them into a list
    """
    modules = checked_layers(layers)
    if not isinstance(prefix, str) or (prefix and not prefix.endswith(".")):
        raise contract_error("prefix", "be a str that is empty or ends with a dot", repr(prefix), "such as 'language.'")
    stored = stored_tensors(source, tuple(block_of(layer, s, prefix) for layer in modules for s in spellings_of(layer)))
    found = [spelling_of(layer, stored, prefix) for layer in modules]
    usual = next((spelling for spelling in found if spelling), None)
    faults = Faults()
    weights = []
    for layer, spelling in zip(modules, found, strict=True):
        weights += LayerKeys(layer, stored, spelling or usual or spellings_of(layer)[0], prefix, faults).weights()
    if not any(found):
        faults.hints["no key at all is of these layers: prefix is what stands before 'layers.' in the keys"] = None
    faults.refuse()
    for weight in weights:
        weight.layer.assign(weight.name, value_of(weight))


def checked_layers(layers: Iterable[AttentionLayer]) -> list[AttentionLayer]:
    """The modules as a list, at least one."""
    # by hand: a ModuleList is no Sequence
    modules = list(layers) if isinstance(layers, Iterable) else None
    if not modules:
        got = "none" if modules is not None else type(layers).__name__
        raise contract_error("layers", "be one attention module or more", got, "put them into a list")
    return modules


# --- keys ---


def spellings_of(layer: AttentionLayer) -> tuple[Spelling, ...]:
    """The ways in which the keys of such a layer are spelled."""
    return MLA_SPELLINGS if isinstance(layer.config, MLAConfig) else SPELLINGS


def block_of(layer: AttentionLayer, spelling: Spelling, prefix: str) -> str:
    """What the keys of a layer's attention begin with."""
    drafts_from = layer.config.num_hidden_layers
    number = layer.layer_idx
    apart = spelling.drafts is not None and number >= drafts_from
    path = f"{spelling.drafts}{number - drafts_from}" if apart else f"layers.{number}"
    return f"{prefix}{spelling.root}{path}.{spelling.block}"


def spelling_of(layer: AttentionLayer, stored: Mapping[str, Stored], prefix: str) -> Spelling | None:
    """How this layer's keys are spelled; None where it has none."""
    firsts: dict[str, Spelling] = {}
    for spelling in spellings_of(layer):
        block = block_of(layer, spelling, prefix)
        if key := next((key for key in stored if key.startswith(block)), None):
            firsts[key] = spelling
    if len(firsts) > 1:
        rule = f"spell the keys of layer {layer.layer_idx} in one way"
        raise contract_error("source", rule, " and ".join(firsts), "remove those that are not of this model")
    return next(iter(firsts.values()), None)


class LayerKeys:
    """The keys of one layer's attention in a checkpoint; what nothing has taken is left."""

    def __init__(
        self, layer: AttentionLayer, stored: Mapping[str, Stored], spelling: Spelling, prefix: str, faults: Faults
    ) -> None:
        self.layer, self.spelling, self.faults = layer, spelling, faults
        self.block = block_of(layer, spelling, prefix)
        self.left = {key: tensor for key, tensor in stored.items() if key.startswith(self.block)}

    def weights(self) -> list[Weight]:
        """The layer's weights as far as they are there; whatever is wrong with its keys goes into the faults."""
        weights = []
        for name, held in self.layer.held().items():
            keys = [self.block + key for key in self.spelling.keys[name]]
            key = next((key for key in keys if key in self.left), keys[0])
            if values := self.taken(key, [stored_shape(held)]):
                weights.append(Weight(self.layer, name, key, held, values, self.scales(name, key, values)))
        for key in self.left:
            self.faults.add("unexpected", key)
        return weights

    def taken(self, key: str, shapes: Sequence[tuple[int, ...]], hint: str = "") -> Stored | None:
        """The tensor under this key, which has one of these shapes."""
        tensor = self.left.pop(key, None)
        if tensor is None:
            self.faults.add("missing", key, hint)
        elif tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            self.faults.add("of a wrong shape", f"{key} is {list(tensor.shape)} in place of {wanted}")
        return tensor

    def scales(self, name: str, key: str, values: Stored) -> Stored | None:
        """The scales that values of this dtype need; None for float."""
        stem = key.removesuffix(".weight")
        if values.dtype in (*FLOATS, *LOW_PRECISION):
            return None
        if values.dtype == FLOAT8 and len(values.shape) == 2:
            blocks = tuple(-(-size // BLOCK) for size in values.shape)
            return self.typed_scales(stem + self.spelling.block_scale, [blocks], FLOAT8_SCALES)
        if values.dtype != "int8":
            hint = "weights are float, float8 matrices with block scales, or int8"
            self.faults.add("of a wrong dtype", f"{key} is {values.dtype}", hint)
            return None
        if self.layer.w8a8 and name in INT8_WEIGHTS:
            one_a_row = [values.shape[:1], (*values.shape[:1], 1)]
            self.check_offsets(f"{stem}.weight_offset", one_a_row)
            return self.typed_scales(f"{stem}.weight_scale", one_a_row, CHANNEL_SCALES)
        for companion in ("weight_scale", "weight_offset"):
            self.left.pop(f"{stem}.{companion}", None)
        ours = f"a w8a8 module has {', '.join(INT8_WEIGHTS)} in int8"
        fix = ours if self.layer.w8a8 else "build the module with w8a8=True"
        hint = "load float weights" if isinstance(self.layer.config, MLAConfig) else f"{fix}, or load float weights"
        self.faults.add("of a wrong dtype", f"{key} is int8", hint)
        return None

    def typed_scales(self, key: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> Stored | None:
        """The scales under this key, of one of these shapes and dtypes."""
        scales = self.taken(key, shapes, "float8 and int8 weights need their scales")
        if scales and scales.dtype not in dtypes:
            self.faults.add("of a wrong dtype", f"{key} is {scales.dtype} in place of {' or '.join(dtypes)}")
        return scales

    def check_offsets(self, key: str, shapes: Sequence[tuple[int, ...]]) -> None:
        """Take an int8 weight's offsets, which quantisers write even where all are zero; others are a fault."""
        offsets = self.taken(key, shapes) if key in self.left else None
        if offsets and offsets.shape in shapes and offsets.read((slice(None),) * len(offsets.shape)).any():
            self.faults.add("of a wrong value", f"{key} is not all zero", "int8 weights are symmetric here")


def stored_shape(held: Held) -> tuple[int, ...]:
    """The shape in a checkpoint, which writes the groups of wo_a below each other."""
    return held.shape if len(held.shape) < 3 else (held.shape[0] * held.shape[1], held.shape[2])


# --- values ---


def value_of(weight: Weight) -> Float | QuantizedWeight:
    """What this rank keeps of a weight."""
    index = weight.held.index
    if weight.layer.w8a8 and weight.name in INT8_WEIGHTS:
        return int8_value(weight, *index)
    if len(index) < 3:
        return float_part(weight, index)
    groups, lora, _ = weight.held.shape
    first, last, _ = index[0].indices(groups)
    rows = float_part(weight, (slice(first * lora, last * lora), index[2]))
    return rows.reshape(last - first, lora, -1)[:, index[1]]


def int8_value(weight: Weight, rows: slice, columns: slice) -> QuantizedWeight:
    """The rank's part of an int8 weight with the scales of its rows."""
    if weight.scales and weight.values.dtype == "int8":
        scales = weight.scales.read((rows, slice(None))[: len(weight.scales.shape)])
        return QuantizedWeight(weight.values.read((rows, columns)), scales.float().reshape(-1))
    # Whole rows are read even where columns are split: all ranks must come to the same scales.
    whole = float_part(weight, (rows, slice(None)))
    try:
        values, scales = quantized_weight(whole)
    except ContractError as error:
        raise ContractError(f"{weight.key}: {error}") from None
    return QuantizedWeight(values[:, columns], scales)


def float_part(weight: Weight, index: tuple[slice, ...]) -> Float:
    """A part of a weight as float: as stored, or float8 values times their scales in float32."""
    part = weight.values.read(index)
    if weight.scales is None:
        return part
    blocks, inside = [], []
    for span, size in zip(index, weight.values.shape, strict=True):
        first, last, _ = span.indices(size)
        origin = first // BLOCK
        blocks.append(slice(origin, -(-last // BLOCK)))
        inside.append(slice(first - origin * BLOCK, last - origin * BLOCK))
    scales = weight.scales.read(tuple(blocks)).float()
    return part.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[tuple(inside)]


# --- sources ---


def stored_tensors(source: str | Path | Mapping[str, torch.Tensor], wanted: tuple[str, ...]) -> dict[str, Stored]:
    """The tensors of a source whose keys begin with one of these, unread."""
    if isinstance(source, Mapping):
        return {key: of_tensor(key, tensor) for key, tensor in source.items() if key.startswith(wanted)}
    if not isinstance(source, (str, Path)):
        rule = "be a folder, a .safetensors file or a mapping of keys to tensors"
        raise contract_error("source", rule, type(source).__name__, "of a module, give its state_dict()")
    return {key: of_file(key, handle) for key, handle in found_in_files(Path(source), wanted).items()}


def found_in_files(path: Path, wanted: tuple[str, ...]) -> dict[str, Any]:
    """Key -> the open file that has it, for keys that begin with one of these."""
    places = index_of(path / INDEX_FILE) if (path / INDEX_FILE).is_file() else {}
    found: dict[str, Any] = {}
    owners: dict[str, Path] = {}
    for file in indexed_files(path, places) if places else files_of(path):
        handle = opened(file)
        for key in handle.keys():  # noqa: SIM118 (a file is no mapping)
            if key in owners:
                both, hint = (
                    f"it in {owners[key].name} and {file.name}",
                    "remove the file that is not of this checkpoint",
                )
                raise contract_error("source", f"hold {key} once", both, hint)
            if key.startswith(wanted):
                found[key], owners[key] = handle, file
    for key, name in places.items():
        if key.startswith(wanted) and owners.get(key) != path / name:
            raise contract_error("source", f"hold {key} in {name}, as {INDEX_FILE} says", "no such key there")
    return found


def of_tensor(key: str, tensor: Any) -> Stored:
    """A tensor that is there already."""
    check_torch(key, tensor)
    if not isinstance(tensor, torch.Tensor):
        raise contract_error(key, "be a torch tensor", type(tensor).__name__)
    return Stored(tuple(tensor.shape), dtype_name(tensor), tensor.detach().__getitem__)


def of_file(key: str, handle: Any) -> Stored:
    """A tensor in an open file; the mapping of the file lives as long as somebody may read from it."""
    part = handle.get_slice(key)
    dtype = part.get_dtype()
    return Stored(tuple(part.get_shape()), FILE_DTYPES.get(dtype, dtype), part.__getitem__)


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint without an index."""
    if path.is_dir():
        if files := sorted(path.glob("*.safetensors")):
            return files
        rule = "be a folder with *.safetensors files"
        raise contract_error("source", rule, f"none in {path}", "pickled weights are not read")
    if not path.is_file() or path.suffix != ".safetensors":
        what = "of another kind" if path.exists() else "nothing there"
        raise contract_error("source", "be a folder or a .safetensors file", f"{path}, {what}")
    return [path]


def index_of(path: Path) -> dict[str, str]:
    """Key -> name of the file, of a checkpoint with an index."""
    try:
        places: dict[str, str] = json.loads(path.read_text())["weight_map"]
        legal = bool(places) and all(isinstance(name, str) for name in places.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        legal = False
    if not legal:
        raise contract_error(str(path), "be a JSON object with a weight_map of keys to files", "something else")
    return places


def indexed_files(folder: Path, places: Mapping[str, str]) -> list[Path]:
    """The files that an index names, all of which must be there."""
    names = sorted(set(places.values()))
    if absent := [name for name in names if not (folder / name).is_file()]:
        rule = f"hold the files that {INDEX_FILE} names"
        raise contract_error("source", rule, f"no {', '.join(absent)} in {folder}", "the download may be incomplete")
    return [folder / name for name in names]


def opened(file: Path) -> Any:
    """The open file, of which only the header is read."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"{file.name} is read with safetensors ({error}); pip install safetensors") from error
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise contract_error(str(file), "be a safetensors file", str(error), "the download may be incomplete") from None
