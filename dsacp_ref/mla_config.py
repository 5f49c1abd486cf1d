"""The constants of DeepSeek-V3.2's attention: MLA over latents, with an indexer that chooses tokens.

Plain Python, no arithmetic on data, so both packages read the same words, as they do in `dsacp_ref.config`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsacp_ref.config import _json_in, _mapping, _needed
from dsacp_ref.spec import UnsupportedError, check_int, check_number, contract_error

__all__ = ["MLAConfig", "v32"]

# Our field -> the checkpoint's key, where they differ; the second five stand inside "rope_scaling".
_KEYS = {"num_heads": "num_attention_heads", "nope_head_dim": "qk_nope_head_dim", "rope_head_dim": "qk_rope_head_dim"}
_ROPE_KEYS = {
    "rope_factor": "factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_original_max_position": "original_max_position_embeddings",
    "mscale_all_dim": "mscale_all_dim",
}
_NO_YARN = {"factor": 1, "beta_fast": 32, "beta_slow": 1, "mscale_all_dim": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """The constants of a V3.2 model's attention, one field per checkpoint key.

    Args:
        nope_head_dim, rope_head_dim: ints, channels of a query head that do not turn, and that do.
        kv_lora_rank: int, channels of the latent that stands for all heads' keys and values.
        v_head_dim: int, channels of a value head.
        index_n_heads, index_head_dim, index_topk: ints, of the indexer; it chooses index_topk tokens.
        rope_theta, rope_factor, rope_beta_fast, rope_beta_slow, rope_original_max_position: base and YaRN of every
            layer; a factor of 1 is no YaRN.
        mscale_all_dim: float >= 0; with YaRN it raises the scale of the attention logits, see `softmax_scale`.
        (others): ints >= 1 and the float ``rms_norm_eps`` > 0, named as in the checkpoint.

    Raises:
        ContractError: a value out of range, or values that do not fit each other.

    Source: DeepSeek-V3.2 ``config.json``; transformers ``DeepseekV32Config``.

    >>> v32().num_heads, v32().kv_lora_rank, v32().index_topk
    (128, 512, 2048)
    """

    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_max_position: int
    mscale_all_dim: float
    max_position_embeddings: int
    rms_norm_eps: float

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            key = (_KEYS | _ROPE_KEYS).get(name, name)
            label = name if key == name else f"{name} ({key})"
            if field.type == "int":
                object.__setattr__(self, name, check_int(label, value, 1))
            elif name == "mscale_all_dim":
                object.__setattr__(self, name, check_number(label, value))
            else:
                object.__setattr__(self, name, check_number(label, value, above=0.0))
        rope, index = self.rope_head_dim, self.index_head_dim
        if rope % 2:
            raise contract_error("rope_head_dim (qk_rope_head_dim)", "be even", rope, "channels turn in pairs")
        if index & (index - 1) or index < rope:
            hint = "the Hadamard rotation needs the power"
            raise contract_error("index_head_dim", f"be a power of two >= rope_head_dim {rope}", index, hint)
        if self.rope_factor < 1:
            raise contract_error("rope_factor (factor)", "be >= 1", self.rope_factor, "1 is no YaRN")
        if self.rope_beta_fast < self.rope_beta_slow:
            raise contract_error("rope_beta_fast", f"be >= rope_beta_slow {self.rope_beta_slow}", self.rope_beta_fast)
        if self.mscale_all_dim < 0:
            raise contract_error("mscale_all_dim", "be >= 0", self.mscale_all_dim, "0 leaves the logits' scale alone")
        if self.rope_factor > 1 and self.mscale_all_dim == 0:
            # Without it YaRN would put the amplitude into cos and sin, which keep amplitude 1 here.
            hint = "the released checkpoints have mscale and mscale_all_dim 1"
            raise contract_error("mscale_all_dim", "be above 0 with YaRN", self.mscale_all_dim, hint)

    @property
    def softmax_scale(self) -> float:
        """What attention logits are multiplied with; the indexer's scores are not.

        Returns:
            float: ``(nope_head_dim + rope_head_dim) ** -0.5``, with YaRN times the square of
            ``0.1 * mscale_all_dim * ln(rope_factor) + 1``.

        >>> f"{v32().softmax_scale:.6f}"
        '0.135234'
        """
        mscale = 0.1 * self.mscale_all_dim * math.log(self.rope_factor) + 1
        return mscale * mscale / math.sqrt(self.nope_head_dim + self.rope_head_dim)

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> MLAConfig:
        """The constants in a checkpoint's ``config.json``, as DeepSeek or as transformers writes it.

        Args:
            mapping: the parsed JSON object; other keys are ignored. transformers' ``rope_parameters`` stands for
                ``rope_theta`` and ``rope_scaling``.

        Returns:
            MLAConfig.

        Raises:
            ContractError: a missing key or a bad value.
            UnsupportedError: projections with a bias, queries without a latent, or a rotary scaling that V3.2 does not
                have: another type, or one whose cos and sin change their amplitude.

        Source: DeepSeek-V3.2 ``config.json``; transformers ``DeepseekV32Config``.

        >>> MLAConfig.from_json(v32().to_json()) == v32()
        True
        >>> MLAConfig.from_json(v32().to_json() | {"attention_bias": True})
        Traceback (most recent call last):
        dsacp_ref.spec.UnsupportedError: attention_bias: V3.2's projections have no bias, got True
        """
        mapping = _mapping("config", mapping)
        if mapping.get("attention_bias", False):
            raise UnsupportedError(f"attention_bias: V3.2's projections have no bias, got {mapping['attention_bias']}")
        if mapping.get("q_lora_rank", 0) is None:
            raise UnsupportedError("q_lora_rank: V3.2's queries and its indexer come from a latent, got None")
        values = _rope(mapping)
        for field in fields(cls):
            if field.name not in values:
                values[field.name] = _needed(mapping, _KEYS.get(field.name, field.name))
        return cls(**values)

    @classmethod
    def from_json_file(cls, path: str | Path) -> MLAConfig:
        """`from_json` of a file.

        Args:
            path: of the checkpoint's ``config.json``.

        Returns:
            MLAConfig.

        Raises:
            ContractError, UnsupportedError: as `from_json`; ContractError also when the file is not JSON.

        >>> import json
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     size = Path(folder, "config.json").write_text(json.dumps(v32().to_json()))
        ...     MLAConfig.from_json_file(Path(folder, "config.json")) == v32()
        True
        """
        return cls.from_json(_json_in(path))

    def to_json(self) -> dict[str, Any]:
        """The checkpoint's keys, in DeepSeek's spelling.

        Returns:
            dict that `from_json` reads back to an equal record.

        >>> v32().to_json()["rope_scaling"]["factor"], v32().to_json()["qk_nope_head_dim"]
        (40.0, 128)
        """
        values = {_KEYS.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}
        scaling = {"type": "yarn"} | {key: values.pop(name) for name, key in _ROPE_KEYS.items()}
        return values | {"rope_scaling": scaling | {"mscale": scaling["mscale_all_dim"]}}


def _rope(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields, from ``rope_theta`` and ``rope_scaling`` or from transformers' ``rope_parameters``."""
    given = mapping.get("rope_parameters")
    if given is not None:
        scaled = _mapping("rope_parameters", given)
        theta = _needed(scaled, "rope_theta", "rope_parameters")
        kind = scaled.get("rope_type", "default")
    else:
        given = _needed(mapping, "rope_scaling")
        scaled = {"type": "default"} if given is None else _mapping("rope_scaling", given)  # null is no scaling
        theta = _needed(mapping, "rope_theta")
        kind = scaled["rope_type"] if "rope_type" in scaled else _needed(scaled, "type", "rope_scaling")
    if kind not in ("yarn", "default"):
        raise UnsupportedError(f"rope_scaling type: V3.2 has 'yarn', and 'default' is no scaling, got {kind!r}")
    if kind == "default":
        scaled = _NO_YARN | {"original_max_position_embeddings": _needed(mapping, "max_position_embeddings")}
    elif scaled.get("factor", 1) != 1 and scaled.get("mscale") != scaled.get("mscale_all_dim"):
        got = f"{scaled.get('mscale')} and {scaled.get('mscale_all_dim')}"
        raise UnsupportedError(f"mscale: V3.2 has it equal to mscale_all_dim, so that cos and sin keep 1, got {got}")
    if scaled.get("attention_factor") not in (None, 1.0):
        raise UnsupportedError(f"attention_factor: V3.2's YaRN keeps amplitude 1, got {scaled['attention_factor']}")
    yarn = {name: _needed(scaled, key, "rope_scaling") for name, key in _ROPE_KEYS.items()}
    return {"rope_theta": theta, **yarn}


def v32() -> MLAConfig:
    """DeepSeek-V3.2: 61 layers, each with an indexer over 128-channel keys that chooses 2048 tokens.

    Returns:
        MLAConfig.

    Source: the released ``config.json``; its YaRN constants are those of DeepSeek-V3.

    >>> v32().nope_head_dim + v32().rope_head_dim
    192
    """
    return MLAConfig(
        hidden_size=7168,
        num_hidden_layers=61,
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_head_dim=128,
        rope_head_dim=64,
        v_head_dim=128,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=2048,
        rope_theta=10000,
        rope_factor=40,
        rope_beta_fast=32,
        rope_beta_slow=1,
        rope_original_max_position=4096,
        mscale_all_dim=1,
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
    )
