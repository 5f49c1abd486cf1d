"""Choices that hold for a whole run: split rules, model constants, parallel options, the grid of ranks.

Plain Python, no arithmetic on data, so both packages read the same words. Every record is frozen and hashable and
refuses at construction what could not work later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsacp_ref.spec import (
    ContractError,
    UnsupportedError,
    check_bool,
    check_choice,
    check_int,
    check_number,
    contract_error,
)

__all__ = [
    "SPLITS",
    "AttentionConfig",
    "ParallelConfig",
    "SplitRule",
    "Topology",
    "check_combination",
    "model_side_partition",
    "split_rule",
    "topology",
    "v4_flash",
    "v4_pro",
]

_CONTIGUOUS, _ZIGZAG = ("contiguous", "contiguous_request"), ("zigzag", "zigzag_ceil", "zigzag_padded")
SPLITS = (*_CONTIGUOUS, *_ZIGZAG, "round_robin", "round_robin_page")
_SPLIT_ALIASES = {"in-seq-split": "zigzag", "round-robin-split": "round_robin"}  # SGLang's words for the same rules
_SPLIT_HINT = f"a page size is written round_robin_page(128); aliases: {', '.join(_SPLIT_ALIASES)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """One rule that hands token rows to ranks; ``str()`` gives the text that `split_rule` reads.

    Args:
        name: one of `SPLITS`.
        page_size: int >= 1, tokens that stay together; 1 except for ``round_robin_page``.

    Raises:
        ContractError: another name, or a page size where there is none.

    >>> str(SplitRule(name="round_robin_page", page_size=16))
    'round_robin_page(16)'
    """

    name: str
    page_size: int = 1

    def __post_init__(self) -> None:
        check_choice("split", self.name, SPLITS, _SPLIT_HINT)
        size = check_int("split page size", self.page_size, 1, 2**31 - 1, _SPLIT_HINT)
        object.__setattr__(self, "page_size", size)
        if self.name != "round_robin_page" and size != 1:
            raise contract_error("split", "have a page size only as round_robin_page", f"{self.name} with {size}")

    def __str__(self) -> str:
        return f"{self.name}({self.page_size})" if self.name == "round_robin_page" else self.name


def split_rule(text: str) -> SplitRule:
    """The split rule that a text names.

    Args:
        text: one of `SPLITS`, with a size in tokens for pages (``"round_robin_page(16)"``), or an alias:
            ``"in-seq-split"`` is ``zigzag``, ``"round-robin-split"`` is ``round_robin``.

    Returns:
        SplitRule.

    Raises:
        ContractError: no such rule; a page size that is missing, out of range or not wanted.

    >>> split_rule("in-seq-split").name, split_rule("round_robin_page(16)").page_size
    ('zigzag', 16)
    """
    if not isinstance(text, str):
        raise contract_error("split", "be a str", f"{type(text).__name__} {text!r}", f"one of {', '.join(SPLITS)}")
    return _parsed_split(text)


@lru_cache(maxsize=256)
def _parsed_split(text: str) -> SplitRule:
    if text == "round_robin_page":
        raise contract_error("split", "carry a page size", repr(text), "write round_robin_page(128)")
    if paged := re.fullmatch(r"round_robin_page\(([0-9]{1,12})\)", text):
        return SplitRule(name="round_robin_page", page_size=int(paged[1]))
    return SplitRule(name=_SPLIT_ALIASES.get(text, text))


# Our field -> the checkpoint's key, where they differ; the second four stand inside "rope_scaling".
_KEYS = {"num_heads": "num_attention_heads", "rope_head_dim": "qk_rope_head_dim", "window_size": "sliding_window"}
_ROPE_KEYS = {
    "rope_factor": "factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_original_max_position": "original_max_position_embeddings",
}
_INDEX_FIELDS = ("index_n_heads", "index_head_dim", "index_topk")
_LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The constants of a model's attention, one field per checkpoint key.

    Args:
        compress_ratios: an int per layer, then one per draft stage; 0 and 1 both mean window only, stored as 1.
            The constructor takes any ratio; `from_json` refuses what V4 does not have.
        window_size: int, keys visible to a query, itself included.
        index_n_heads, index_head_dim, index_topk: ints; may be 0 in a model without a ratio-4 layer.
        rope_theta: float, base of window-only layers, which have no YaRN.
        compress_rope_theta, rope_factor, rope_beta_fast, rope_beta_slow, rope_original_max_position: base and YaRN of
            compressed layers; a factor of 1 is no YaRN.
        (others): ints >= 1 and the float ``rms_norm_eps`` > 0, named as in the checkpoint.

    Raises:
        ContractError: a value out of range, or values that do not fit each other.

    Source: DeepSeek-V4 ``config.json`` and ``inference/model.py``.

    >>> v4_flash().num_heads, v4_flash().compress_ratios[:4]
    (64, (1, 1, 4, 128))
    """

    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_max_position: int
    max_position_embeddings: int
    rms_norm_eps: float
    compress_ratios: tuple[int, ...]

    def __post_init__(self) -> None:
        ratios = tuple(ratio or 1 for ratio in _ratio_list(self.compress_ratios))
        object.__setattr__(self, "compress_ratios", ratios)
        has_indexer = 4 in ratios
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            key = (_KEYS | _ROPE_KEYS).get(name, name)
            label = name if key == name else f"{name} ({key})"
            if field.type == "int":
                least = 0 if name in _INDEX_FIELDS and not has_indexer else 1
                object.__setattr__(self, name, check_int(label, value, least))
            elif field.type == "float":
                object.__setattr__(self, name, check_number(label, value, above=0.0))

        layers, rope, index = self.num_hidden_layers, self.rope_head_dim, self.index_head_dim
        if len(ratios) < layers:
            raise contract_error("compress_ratios", f"have an entry for each of {layers} layers", list(ratios))
        if any(ratio != 1 for ratio in ratios[layers:]):
            hint = f"entries beyond num_hidden_layers {layers} are draft layers, which are window only"
            raise contract_error("compress_ratios", "be 0 or 1 for draft layers", list(ratios[layers:]), hint)
        if self.num_heads % self.o_groups:
            raise contract_error("o_groups", f"divide num_heads {self.num_heads}", self.o_groups)
        if rope % 2 or rope > self.head_dim:
            raise contract_error("rope_head_dim (qk_rope_head_dim)", f"be even and <= head_dim {self.head_dim}", rope)
        if has_indexer and (index & (index - 1) or index < rope):
            hint = "the Hadamard rotation needs the power"
            raise contract_error("index_head_dim", f"be a power of two >= rope_head_dim {rope}", index, hint)
        if self.rope_factor < 1:
            raise contract_error("rope_factor (factor)", "be >= 1", self.rope_factor, "1 is no YaRN")
        if self.rope_beta_fast < self.rope_beta_slow:
            raise contract_error("rope_beta_fast", f"be >= rope_beta_slow {self.rope_beta_slow}", self.rope_beta_fast)

    def compress_ratio(self, layer_idx: int) -> int:
        """Raw tokens per compressed entry in a layer; 1 is window only.

        Args:
            layer_idx: int >= 0; from ``num_hidden_layers`` on these are draft (MTP) layers, always 1.

        Returns:
            int >= 1.

        Raises:
            ContractError: a negative index.

        >>> [v4_pro().compress_ratio(layer) for layer in (0, 1, 2, 60, 61, 62)]
        [128, 128, 4, 4, 1, 1]
        """
        layer_idx = check_int("layer_idx", layer_idx, 0)
        return self.compress_ratios[layer_idx] if layer_idx < self.num_hidden_layers else 1

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> AttentionConfig:
        """The constants in a checkpoint's ``config.json``, as DeepSeek or as transformers writes it.

        Args:
            mapping: the parsed JSON object; other keys are ignored. transformers' ``rope_parameters`` with ``main`` and
                ``compress`` stands for the thetas and ``rope_scaling``, its ``layer_types`` for ``compress_ratios``.
                The ``index_*`` keys may be absent when no layer has ratio 4.

        Returns:
            AttentionConfig.

        Raises:
            ContractError: a missing key or a bad value.
            UnsupportedError: V4.1, or a ratio, a layer type or a rotary scaling that V4 does not have.

        Source: DeepSeek-V4 ``config.json``; transformers ``DeepseekV4Config``.

        >>> AttentionConfig.from_json(v4_flash().to_json()) == v4_flash()
        True
        >>> AttentionConfig.from_json({"kv_source_layer_ids": [2]})
        Traceback (most recent call last):
        dsacp_ref.spec.UnsupportedError: kv_source_layer_ids: this is a V4.1 checkpoint, another design; V4 only
        """
        mapping = _mapping("config", mapping)
        for key, value in mapping.items():
            v41 = key in ("kv_source_layer_ids", "index_source_layer_ids") or str(key).startswith("candidate_")
            if v41 and value is not None:
                raise UnsupportedError(f"{key}: this is a V4.1 checkpoint, another design; V4 only")
        check_int("num_key_value_heads", _needed(mapping, "num_key_value_heads"), 1, 1, "K and V are one shared vector")
        ratios = _checkpoint_ratios(mapping)
        if 4 not in ratios:
            mapping = dict.fromkeys(_INDEX_FIELDS, 0) | dict(mapping)
        values = {"compress_ratios": ratios, **_checkpoint_rope(mapping)}
        for field in fields(cls):
            if field.name not in values:
                values[field.name] = _needed(mapping, _KEYS.get(field.name, field.name))
        return cls(**values)

    @classmethod
    def from_json_file(cls, path: str | Path) -> AttentionConfig:
        """`from_json` of a file.

        Args:
            path: of the checkpoint's ``config.json``.

        Returns:
            AttentionConfig.

        Raises:
            ContractError, UnsupportedError: as `from_json`; ContractError also when the file is not JSON.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     size = Path(folder, "config.json").write_text(json.dumps(v4_pro().to_json()))
        ...     AttentionConfig.from_json_file(Path(folder, "config.json")) == v4_pro()
        True
        """
        return cls.from_json(_json_in(path))

    def to_json(self) -> dict[str, Any]:
        """The checkpoint's keys, in DeepSeek's spelling; window-only layers are written as 0.

        Returns:
            dict that `from_json` reads back to an equal record.

        >>> v4_flash().to_json()["rope_scaling"]["factor"], v4_flash().to_json()["compress_ratios"][:4]
        (16.0, [0, 0, 4, 128])
        """
        values = {_KEYS.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}
        scaling = {"type": "yarn"} | {key: values.pop(name) for name, key in _ROPE_KEYS.items()}
        ratios = [0 if ratio == 1 else ratio for ratio in self.compress_ratios]
        return values | {"num_key_value_heads": 1, "rope_scaling": scaling, "compress_ratios": ratios}


def _json_in(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise contract_error("path", "hold JSON", path, str(error)) from None


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise contract_error(name, "be a mapping (a JSON object)", type(value).__name__)
    return value


def _needed(mapping: Mapping[str, Any], key: str, where: str = "config.json") -> Any:
    if key not in mapping:
        raise contract_error(key, f"be in {where}", "no such key")
    return mapping[key]


def _list(name: str, value: object) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise contract_error(name, "be a list with an entry per layer", f"{type(value).__name__} {value!r}")
    return value


def _ratio_list(value: object) -> list[int]:
    return [check_int("compress_ratios entry", ratio, 0) for ratio in _list("compress_ratios", value)]


def _checkpoint_ratios(mapping: Mapping[str, Any]) -> list[int]:
    """The ratio list from ``compress_ratios``, or from transformers' ``layer_types`` and ``compress_rates``."""
    if "compress_ratios" in mapping or "layer_types" not in mapping:
        ratios = _ratio_list(_needed(mapping, "compress_ratios"))
    else:
        types = _list("layer_types", mapping["layer_types"])
        ratios = [_LAYER_TYPES[check_choice("layer_types entry", word, tuple(_LAYER_TYPES))] for word in types]
        rates = _mapping("compress_rates", _needed(mapping, "compress_rates"))
        # A layer type says how entries are pooled and whether there is an indexer; here the ratio alone must say it.
        for word, ratio in _LAYER_TYPES.items():
            if ratio and word in types and _needed(rates, word, "compress_rates") != ratio:
                raise UnsupportedError(f"compress_rates: V4 has {ratio} for {word}, got {rates[word]}")
    for ratio in sorted(set(ratios) - {0, 1, 4, 128}):
        which = "ratio 2 is V4.1, another design; " if ratio == 2 else ""
        raise UnsupportedError(f"compress_ratios: {which}V4 has 0 (or 1), 4 and 128, got {ratio}")
    return ratios


def _checkpoint_rope(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields, from ``rope_scaling`` and two thetas or from transformers' nested ``rope_parameters``."""
    given = mapping.get("rope_parameters")
    if isinstance(given, Mapping) and "compress" in given:
        # transformers' model reads the nested thetas, not the top-level ones, so they win.
        plain = _mapping("rope_parameters.main", given.get("main"))
        scaled = _mapping("rope_parameters.compress", given["compress"])
        if plain.get("rope_type", "default") != "default":
            raise UnsupportedError(f"rope_parameters.main: V4 has 'default', got {plain['rope_type']!r}")
        theta = _needed(plain, "rope_theta", "rope_parameters.main")
        compress_theta = _needed(scaled, "rope_theta", "rope_parameters.compress")
    else:
        given = given if given is not None else _needed(mapping, "rope_scaling")
        scaled = {"type": "default"} if given is None else _mapping("rope_scaling", given)  # null is no scaling
        theta, compress_theta = _needed(mapping, "rope_theta"), _needed(mapping, "compress_rope_theta")
    kind = scaled["rope_type"] if "rope_type" in scaled else _needed(scaled, "type", "rope_scaling")
    if kind not in ("yarn", "default"):
        raise UnsupportedError(f"rope_scaling type: V4 has 'yarn', and 'default' is no scaling, got {kind!r}")
    if scaled.get("attention_factor", 1.0) != 1.0:
        raise UnsupportedError(f"attention_factor: V4's YaRN keeps amplitude 1, got {scaled['attention_factor']}")
    if kind == "default":
        scaled = dict(zip(_ROPE_KEYS.values(), (1, 32, 1, _needed(mapping, "max_position_embeddings")), strict=True))
    yarn = {name: _needed(scaled, key, "rope_scaling") for name, key in _ROPE_KEYS.items()}
    return {"rope_theta": theta, "compress_rope_theta": compress_theta, **yarn}


def _v4(**own: Any) -> AttentionConfig:
    """What Flash and Pro share, and their own figures."""
    own |= {"head_dim": 512, "rope_head_dim": 64, "o_lora_rank": 1024, "window_size": 128}
    own |= {"index_n_heads": 64, "index_head_dim": 128, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6}
    own |= {"rope_factor": 16, "rope_beta_fast": 32, "rope_beta_slow": 1, "rope_original_max_position": 65536}
    return AttentionConfig(rope_theta=10000, compress_rope_theta=160000, **own)


def v4_flash() -> AttentionConfig:
    """DeepSeek-V4-Flash: 43 layers, the first two window only, and one draft stage.

    Returns:
        AttentionConfig.

    Source: the released ``config.json``.

    >>> [v4_flash().compress_ratios.count(ratio) for ratio in (1, 4, 128)]
    [3, 21, 20]
    """
    ratios = (0, 0) + (4, 128) * 20 + (4,) + (0,)
    size = {"hidden_size": 4096, "num_hidden_layers": 43, "num_heads": 64, "q_lora_rank": 1024}
    return _v4(**size, o_groups=8, index_topk=512, compress_ratios=ratios)


def v4_pro() -> AttentionConfig:
    """DeepSeek-V4-Pro: 61 layers, none of them window only, and one draft stage.

    Returns:
        AttentionConfig.

    Source: the released ``config.json``.

    >>> [v4_pro().compress_ratios.count(ratio) for ratio in (1, 4, 128)]
    [1, 30, 31]
    """
    ratios = (128, 128) + (4, 128) * 29 + (4,) + (0,)
    size = {"hidden_size": 7168, "num_hidden_layers": 61, "num_heads": 128, "q_lora_rank": 1536}
    return _v4(**size, o_groups=16, index_topk=1024, compress_ratios=ratios)


_CHOICES = {
    "rows": ("full", "scattered"),
    "key_mode": ("replicate", "gather_hidden", "gather_kv", "gather_compressed"),
    "output_mode": ("all_to_all", "gather_weight", "replicated_weight"),
    "mixed": ("cp", "off"),
    "profile": ("none", "in_seq_split"),
}
# What SGLang's first prefill mode set at start, whatever had been asked for, in an engine's words. It also chose DeepEP
# for the experts: that names a library, not a limit, so it is left to the engine.
_IN_SEQ_SPLIT_SETTINGS = {"max_running_requests": 1, "kv_cache_dtype": "bfloat16", "moe_dense_tp_size": 1}
_DTYPE_ALIASES = {"bf16": "bfloat16"}
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How a layer runs over ranks, as a configuration file or command line gives it; the default is the xLLM proposal.

    Args:
        enable_dsa_cp: bool, the switch; on, the CP group is the TP group (see `topology`).
        dsa_cp_kv_interleave_size: int >= 1, tokens; stored only, reserved for decode with sharded KV.
        prefill_cp_mode: a split rule as `split_rule` reads it; stored under its own name, never as an alias.
        cp_size: int >= 1, the configured size, which counts while the switch is off.
        dsa_cp_rows: ``full`` or ``scattered``, the hidden rows a rank holds between layers.
        dsa_cp_key_mode: ``replicate``, ``gather_hidden``, ``gather_kv`` or ``gather_compressed``, how keys become
            global.
        dsa_cp_output_mode: ``all_to_all``, ``gather_weight`` or ``replicated_weight``, how o_proj meets its rows.
        dsa_cp_mixed: ``cp`` or ``off``, what a batch with both prefill and decode does.
        dsa_cp_profile: ``none``, or ``in_seq_split`` for the limits that the first zigzag mode had (`forced_settings`):
            one running request, a bfloat16 cache, dense feed-forward layers unsplit. Nothing here needs them.

    Raises:
        ContractError: a wrong type or an unknown word.
        UnsupportedError: rows and key_mode that exclude each other (`check_combination`); the profile of zigzag with
            another split.

    Source: xLLM ``parallel_config``; SGLang's prefill CP modes.

    >>> ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="in-seq-split").prefill_cp_mode
    'zigzag'
    """

    enable_dsa_cp: bool = False
    dsa_cp_kv_interleave_size: int = 1
    prefill_cp_mode: str = "contiguous"
    cp_size: int = 1
    # Prefixed: these words share a file and a command line with an engine's own.
    dsa_cp_rows: str = "full"
    dsa_cp_key_mode: str = "replicate"
    dsa_cp_output_mode: str = "all_to_all"
    dsa_cp_mixed: str = "cp"
    dsa_cp_profile: str = "none"

    def __post_init__(self) -> None:
        check_bool("enable_dsa_cp", self.enable_dsa_cp)
        for name in ("dsa_cp_kv_interleave_size", "cp_size"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), 1))
        for name, words in _CHOICES.items():
            check_choice(f"dsa_cp_{name}", getattr(self, f"dsa_cp_{name}"), words)
        try:
            split = str(split_rule(self.prefill_cp_mode))
        except ContractError as error:
            raise ContractError(f"prefill_cp_mode: {error}") from None
        object.__setattr__(self, "prefill_cp_mode", split)
        _check_rows_and_keys(self.dsa_cp_rows, self.dsa_cp_key_mode)
        if self.dsa_cp_profile == "in_seq_split" and split != "zigzag":
            rule = "prefill_cp_mode must be 'zigzag' when dsa_cp_profile is 'in_seq_split'"
            raise UnsupportedError(f"{rule}, got {split!r}; no other split had its limits: use dsa_cp_profile='none'")

    @property
    def asks_for_cp(self) -> bool:
        """Whether these options ask for context parallelism at all, by the switch or by a size of its own.

        Returns:
            bool. With the switch on and one rank in the TP group it is true, and nothing is split.

        >>> ParallelConfig().asks_for_cp, ParallelConfig(cp_size=2).asks_for_cp
        (False, True)
        """
        return self.enable_dsa_cp or self.cp_size > 1

    def forced_settings(self) -> dict[str, Any]:
        """What the profile fixes in an engine's configuration; a caller lays it over its own.

        Returns:
            dict: ``max_running_requests`` 1, ``kv_cache_dtype`` bfloat16 and ``moe_dense_tp_size`` 1 (every rank has
            the whole weights of dense feed-forward layers) with profile ``in_seq_split``. Empty without a profile, and
            where nobody asks for context parallelism.

        Source: SGLang ``server_args``, prefill context parallelism in mode ``in-seq-split``.

        >>> options = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="in-seq-split", dsa_cp_profile="in_seq_split")
        >>> {"kv_cache_dtype": "auto", "port": 80} | options.forced_settings()
        {'kv_cache_dtype': 'bfloat16', 'port': 80, 'max_running_requests': 1, 'moe_dense_tp_size': 1}
        >>> ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="in-seq-split").forced_settings()
        {}
        """
        return dict(_IN_SEQ_SPLIT_SETTINGS) if self.dsa_cp_profile != "none" and self.asks_for_cp else {}

    def check_settings(self, mapping: Mapping[str, Any]) -> None:
        """Refuse an engine's configuration that asks for other than what the profile fixes.

        Args:
            mapping: the parsed JSON object; keys that `forced_settings` does not name are ignored, and a key that is
                absent or None asks for nothing.

        Raises:
            ContractError: not a mapping.
            UnsupportedError: another value; the text has the key, both values and the way out.

        >>> options = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="in-seq-split", dsa_cp_profile="in_seq_split")
        >>> options.check_settings({"kv_cache_dtype": "bfloat16", "port": 80})
        >>> options.check_settings({"max_running_requests": 32})
        Traceback (most recent call last):
        dsacp_ref.spec.UnsupportedError: max_running_requests must be 1 when dsa_cp_profile is 'in_seq_split', got 32; \
prefill_cp_mode='round_robin' with dsa_cp_profile='none' has no such limits
        """
        mapping = _mapping("config", mapping)
        for key, value in self.forced_settings().items():
            got = mapping.get(key)
            same = got == value or (isinstance(got, str) and _DTYPE_ALIASES.get(got) == value)
            if got is not None and (isinstance(got, bool) or not same):  # True equals 1, and is no count
                rule = f"{key} must be {value!r} when dsa_cp_profile is {self.dsa_cp_profile!r}"
                fix = "prefill_cp_mode='round_robin' with dsa_cp_profile='none' has no such limits"
                raise UnsupportedError(f"{rule}, got {got!r}; {fix}")

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> ParallelConfig:
        """The options in a larger JSON configuration; keys that are not fields are ignored.

        Args:
            mapping: the parsed JSON object.

        Returns:
            ParallelConfig, with defaults for absent keys.

        Raises:
            ContractError, UnsupportedError: as the constructor.

        >>> ParallelConfig.from_json({"enable_dsa_cp": True, "model": "v4"}).enable_dsa_cp
        True
        """
        mapping = _mapping("config", mapping)
        return cls(**{field.name: mapping[field.name] for field in fields(cls) if field.name in mapping})

    def to_json(self) -> dict[str, Any]:
        """The options as JSON values, own keys only.

        Returns:
            dict that `from_json` reads back to an equal record.

        >>> ParallelConfig().to_json()["prefill_cp_mode"]
        'contiguous'
        """
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def append_json(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """A larger configuration with the own keys set.

        Args:
            mapping: the parsed JSON object; it is not changed.

        Returns:
            dict: every other key untouched, every own key from this record.

        Raises:
            ContractError: not a mapping.

        >>> ParallelConfig(cp_size=2).append_json({"model": "v4", "cp_size": 1})["cp_size"]
        2
        """
        return {**_mapping("config", mapping), **self.to_json()}

    @classmethod
    def from_flags(cls, flags: Sequence[str]) -> tuple[ParallelConfig, list[str]]:
        """The options on a command line, and the words that belong to somebody else.

        ``--name=value`` or ``--name value``, with dashes or underscores in the name; a later flag wins. Booleans are
        true/false, 1/0 or yes/no, and the bare flag is true. Nothing after ``--`` is read.

        Args:
            flags: the words, without the program's name.

        Returns:
            (ParallelConfig, list of the other words in order).

        Raises:
            ContractError, UnsupportedError: a flag without its value, or as the constructor.

        >>> config, rest = ParallelConfig.from_flags(["--enable-dsa-cp", "--port=80", "--prefill_cp_mode", "zigzag"])
        >>> config.enable_dsa_cp, config.prefill_cp_mode, rest
        (True, 'zigzag', ['--port=80'])
        """
        if not isinstance(flags, (list, tuple)) or not all(isinstance(word, str) for word in flags):
            raise contract_error("flags", "be a list of str", repr(flags), "one entry per word")
        kinds = {field.name: str(field.type) for field in fields(cls)}
        values: dict[str, Any] = {}
        rest: list[str] = []
        words = list(flags)
        while words:
            word = words.pop(0)
            if word == "--":
                return cls(**values), [*rest, word, *words]
            name, equals, text = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            if not word.startswith("--") or name not in kinds:
                rest.append(word)
                continue
            if not equals:
                if kinds[name] == "bool" and not (words and words[0].lower() in _BOOLEANS):
                    text = "true"
                elif words and not words[0].startswith("--"):
                    text = words.pop(0)
                else:
                    raise contract_error(f"--{name}", "have a value", "none", f"write --{name}=...")
            values[name] = _flag_value(f"--{name}", kinds[name], text)
        return cls(**values), rest

    def to_flags(self) -> list[str]:
        """The options as command-line words, one per field.

        Returns:
            list of ``--name=value`` that `from_flags` reads back.

        >>> ParallelConfig(enable_dsa_cp=True).to_flags()[:3]
        ['--enable_dsa_cp=true', '--dsa_cp_kv_interleave_size=1', '--prefill_cp_mode=contiguous']
        """
        return [f"--{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in self.to_json().items()]


def _flag_value(flag: str, kind: str, text: str) -> bool | int | str:
    if kind == "bool":
        return _BOOLEANS[check_choice(flag, text.lower(), tuple(_BOOLEANS))]
    if kind == "int" and not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise contract_error(flag, "be an int", repr(text))
    return int(text) if kind == "int" else text


def _check_rows_and_keys(rows: str, key_mode: str) -> None:
    fix = {("scattered", "replicate"): "gather_hidden", ("full", "gather_hidden"): "replicate"}.get((rows, key_mode))
    if fix:
        why = "no rank has all hidden rows" if rows == "scattered" else "there is nothing to gather"
        rule = f"key_mode must not be {key_mode!r} when rows is {rows!r}, because {why}"
        raise UnsupportedError(f"{rule}, got {key_mode!r}; use key_mode={fix!r}")


def check_combination(
    *,
    split: str,
    rows: str,
    key_mode: str,
    output_mode: str,
    compress_ratio: int,
    cp_size: int,
    num_heads: int,
    o_groups: int,
) -> None:
    """Refuse by name what one layer over ranks cannot do together.

        key_mode            rows full            rows scattered
        replicate           yes                  no: use gather_hidden
        gather_hidden       no: use replicate    yes
        gather_kv           yes                  yes
        gather_compressed   yes for ratio 1; above it not round_robin, and pages of a multiple of the ratio

    A combination is refused at ``cp_size`` 1 too, so that a setting does not start to fail when ranks are added.

    Args:
        split: as `split_rule` reads it.
        rows, key_mode, output_mode: words, as in `ParallelConfig`.
        compress_ratio: int >= 1, the layer's.
        cp_size: int >= 1, the ranks that split the tokens.
        num_heads, o_groups: ints >= 1, of the whole model; ``all_to_all`` needs ``cp_size`` to divide both.

    Raises:
        ContractError: a wrong type or an unknown word.
        UnsupportedError: known words that exclude each other.

    >>> legal = dict(split="contiguous", rows="full", key_mode="replicate", output_mode="all_to_all", compress_ratio=4)
    >>> check_combination(**legal, cp_size=8, num_heads=64, o_groups=8)
    >>> check_combination(**{**legal, "rows": "scattered"}, cp_size=8, num_heads=64, o_groups=8)
    Traceback (most recent call last):
    dsacp_ref.spec.UnsupportedError: key_mode must not be 'replicate' when rows is 'scattered', because no rank has \
all hidden rows, got 'replicate'; use key_mode='gather_hidden'
    """
    rule = split_rule(split)
    for name, word in {"rows": rows, "key_mode": key_mode, "output_mode": output_mode}.items():
        check_choice(name, word, _CHOICES[name])
    ratio, cp_size = check_int("compress_ratio", compress_ratio, 1), check_int("cp_size", cp_size, 1)
    num_heads, o_groups = check_int("num_heads", num_heads, 1), check_int("o_groups", o_groups, 1)
    _check_rows_and_keys(rows, key_mode)
    # A window of `ratio` tokens must not be spread over ranks token by token: then nobody could pool it.
    if key_mode == "gather_compressed" and rule.name.startswith("round_robin") and rule.page_size % ratio:
        wanted = f"be 'round_robin_page(n)' with n a multiple of compress_ratio {ratio}, or contiguous or zigzag,"
        fix = f"use split='round_robin_page({ratio})' or key_mode='gather_kv'"
        raise UnsupportedError(f"split must {wanted} when key_mode is 'gather_compressed', got '{rule}'; {fix}")
    if output_mode == "all_to_all" and (num_heads % cp_size or o_groups % cp_size):
        wanted = f"divide num_heads {num_heads} and o_groups {o_groups} when output_mode is 'all_to_all'"
        fix = "use output_mode='gather_weight' or 'replicated_weight'"
        raise UnsupportedError(f"cp_size must {wanted}, got {cp_size}; {fix}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where one rank stands: its coordinate, size and group (global ranks, ascending) on each axis.

    Built by `topology`. A group is in coordinate order: ``cp_group[cp_rank] == rank``.

    >>> topology(4, rank=2, enable_dsa_cp=True).cp_group
    (0, 1, 2, 3)
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    dp_group: tuple[int, ...]
    cp_rank: int
    cp_size: int
    cp_group: tuple[int, ...]
    tp_rank: int
    tp_size: int
    tp_group: tuple[int, ...]

    @property
    def cp_active(self) -> bool:
        """Whether tokens are split at all: more than one rank in the CP group.

        Returns:
            bool.

        >>> topology(2, rank=0).cp_active, topology(2, rank=0, enable_dsa_cp=True).cp_active
        (False, True)
        """
        return self.cp_size > 1


def topology(
    world_size: int,
    *,
    rank: int,
    dp_size: int = 1,
    cp_size: int = 1,
    tp_size: int | None = None,
    enable_dsa_cp: bool = False,
) -> Topology:
    """The groups one rank belongs to.

        switch off, 8 ranks, dp 2, cp 2                     switch on, 8 ranks, dp 2
        rank = dp_rank*(cp*tp) + cp_rank*tp + tp_rank       rank = dp_rank*tp + tp_rank

        dp 0: cp 0: [0 1]     tp group: a row               dp 0: [0 1 2 3]   tp group = cp group: a row
              cp 1: [2 3]     cp group: a column,
        dp 1: cp 0: [4 5]     such as (4, 6)                dp 1: [4 5 6 7]
              cp 1: [6 7]

    With the switch on, CP takes size, rank and group from TP, so the ranks that split tokens are the ranks that split
    heads; an independent ``cp_size`` would cut by one size and gather over another group.

    Args:
        world_size: int >= 1, all ranks.
        rank: int, global, below ``world_size``.
        dp_size: int >= 1.
        cp_size: int >= 1, the configured size; with the switch on 1, or the TP size.
        tp_size: int >= 1, or None for what is left: world / dp / cp, with the switch on world / dp.
        enable_dsa_cp: bool, the switch.

    Returns:
        Topology.

    Raises:
        ContractError: a value out of range, a world that the sizes do not fill, or an independent ``cp_size`` with
            the switch on.

    Source: xLLM pull requests 1997 (switch on) and 2097 (switch off).

    >>> topology(8, rank=6, dp_size=2, cp_size=2).cp_group
    (4, 6)
    >>> topology(4, rank=0, cp_size=2, enable_dsa_cp=True)
    Traceback (most recent call last):
    dsacp_ref.spec.ContractError: cp_size must be 1 or the TP size 4 with enable_dsa_cp, got 2; the CP group is the TP \
group, and an independent cp_size 2 mismatches a group of 4
    """
    world_size, rank = check_int("world_size", world_size, 1), check_int("rank", rank, 0)
    dp_size, cp_size = check_int("dp_size", dp_size, 1), check_int("cp_size", cp_size, 1)
    shared = check_bool("enable_dsa_cp", enable_dsa_cp)
    if rank >= world_size:
        raise contract_error("rank", f"be below world_size {world_size}", rank, "ranks count from 0")
    planes = 1 if shared else cp_size  # with the switch on, CP takes no ranks of its own
    axes, outer = "dp_size" if shared else "dp_size * cp_size", dp_size * planes
    if world_size % outer:
        raise contract_error("world_size", f"be a multiple of {axes} = {outer}", world_size)
    tp = world_size // outer
    wanted_tp = tp if tp_size is None else check_int("tp_size", tp_size, 1)
    if shared and cp_size not in (1, wanted_tp):
        hint = f"the CP group is the TP group, and an independent cp_size {cp_size} mismatches a group of {wanted_tp}"
        raise contract_error("cp_size", f"be 1 or the TP size {wanted_tp} with enable_dsa_cp", cp_size, hint)
    if wanted_tp != tp:
        hint = "with enable_dsa_cp, CP takes no ranks of its own" if shared else ""
        raise contract_error("tp_size", f"be world_size {world_size} / ({axes} = {outer}) = {tp}", wanted_tp, hint)

    dp_rank, inner = divmod(rank, planes * tp)
    cp_rank, tp_rank = divmod(inner, tp)
    tp_group = tuple(range(rank - tp_rank, rank - tp_rank + tp))
    cp_start = rank - cp_rank * tp
    return Topology(
        rank=rank,
        world_size=world_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        dp_group=tuple(range(inner, world_size, planes * tp)),
        cp_rank=tp_rank if shared else cp_rank,
        cp_size=tp if shared else cp_size,
        cp_group=tp_group if shared else tuple(range(cp_start, cp_start + planes * tp, tp)),
        tp_rank=tp_rank,
        tp_size=tp,
        tp_group=tp_group,
    )


def model_side_partition(*, enable_dsa_cp: bool, cp_size: int, supports_model_partition: bool) -> bool:
    """Whether the worker must leave the token stream whole, because the attention layer splits it.

    Every place that would split on the worker's side asks this one function, so that they agree. ``cp_size`` is the
    size of the group that attention splits tokens over, ``Topology.cp_size``: the TP size when the switch is on.
    It is *not* the launcher's configured size: that stays 1 when CP is TP, so a gate on it would never open.

    Args:
        enable_dsa_cp: bool, the switch.
        cp_size: int >= 1, derived (above).
        supports_model_partition: bool, whether the platform has the model-side path.

    Returns:
        bool.

    Raises:
        ContractError: a wrong type, or a size below 1.

    Source: xLLM pull request 1997, the two worker gates.

    >>> grid = topology(4, rank=0, cp_size=1, enable_dsa_cp=True)
    >>> [model_side_partition(enable_dsa_cp=True, cp_size=n, supports_model_partition=True) for n in (grid.cp_size, 1)]
    [True, False]
    """
    enabled = check_bool("enable_dsa_cp", enable_dsa_cp)
    supported = check_bool("supports_model_partition", supports_model_partition)
    return check_int("cp_size", cp_size, 1) > 1 and enabled and supported
