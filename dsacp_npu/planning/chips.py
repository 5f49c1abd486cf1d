"""What a device does a second: presets, or a JSON file of the same form, with a source for each figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import json

from dsacp_ref.config import _json_in
from dsacp_ref.spec import check_number, contract_error

__all__ = ["Chip", "chip_of", "chip_of_json", "presets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One device of the ranks; what it reaches is a peak times an efficiency.

    Args:
        name: str.
        matmul_16, matmul_8: floats, peak TFLOP/s on 16-bit and 8-bit numbers.
        matmul_efficiency, attention_efficiency, index_efficiency: floats in (0, 1], of projections and experts, of
            attention (16 bits), and of the indexer's scores.
        memory: float, GB.
        memory_bandwidth, memory_efficiency: float, TB/s, and float in (0, 1].
        cache: float, MB of the cache that gathered keys are read from once they fit.
        link, link_efficiency: float, GB/s that a device receives from the others, and float in (0, 1].
        latency: float, microseconds of a collective of any size.
        sources: tuple of (figure, text), where each figure is from.

    Raises:
        ContractError: a figure that is no positive number, or an efficiency above 1.

    >>> chip_of("910c").memory, dict(chip_of("910c").sources)["memory"]
    (64.0, 'GB of one die: 128 a chip; CloudMatrix384 paper')
    """

    name: str
    matmul_16: float
    matmul_8: float
    matmul_efficiency: float
    attention_efficiency: float
    index_efficiency: float
    memory: float
    memory_bandwidth: float
    memory_efficiency: float
    cache: float
    link: float
    link_efficiency: float
    latency: float
    sources: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        for name in FIGURES:
            object.__setattr__(self, name, check_number(name, getattr(self, name), above=0.0))
            if name.endswith("_efficiency") and getattr(self, name) > 1:
                raise contract_error(name, "be at most 1", getattr(self, name), "it is a part of the peak")

    def matmul_rate(self, num_bytes: int) -> float:
        """Operations a second of projections and experts with numbers of so many bytes."""
        return self._peak(num_bytes) * self.matmul_efficiency

    def attention_rate(self) -> float:
        """Operations a second of attention."""
        return self._peak(2) * self.attention_efficiency

    def index_rate(self, num_bytes: int) -> float:
        """Operations a second of index scores on keys of so many bytes a channel."""
        return self._peak(num_bytes) * self.index_efficiency

    def _peak(self, num_bytes: int) -> float:
        return (self.matmul_8 if num_bytes == 1 else self.matmul_16) * 1e12

    @property
    def memory_rate(self) -> float:
        """Bytes a second from memory."""
        return self.memory_bandwidth * self.memory_efficiency * 1e12

    @property
    def link_rate(self) -> float:
        """Bytes a second from other ranks."""
        return self.link * self.link_efficiency * 1e9


FIGURES = tuple(field.name for field in fields(Chip) if field.name not in ("name", "sources"))


def presets() -> dict[str, Chip]:
    """The chips that have a name here.

    Returns:
        dict from name to Chip.

    >>> sorted(presets())
    ['910b3', '910c', '950pr', 'h200']
    """
    text = files("dsacp_npu.planning").joinpath("chips.json").read_text(encoding="utf-8")
    return {name: chip_of_json(name, figures) for name, figures in json.loads(text).items()}


def chip_of(name: str) -> Chip:
    """The chip of a preset's name, or of a JSON file with an object of figures as in ``chips.json``.

    Args:
        name: one of `presets`, or the path of a file.

    Returns:
        Chip.

    Raises:
        ContractError: neither, a figure that is missing or unknown, or one that is out of range.
    """
    known = presets()
    if name in known:
        return known[name]
    if not Path(name).is_file():
        raise contract_error("--chip", f"be {', '.join(known)}, or a JSON file", repr(name), "no such file")
    return chip_of_json(Path(name).stem, _json_in(name))


def chip_of_json(name: str, figures: Any) -> Chip:
    """The chip that an object of figures describes.

    Args:
        name: str.
        figures: a mapping from each figure of `Chip` to a pair of the number and its source.

    Returns:
        Chip.

    Raises:
        ContractError: a figure that is missing, unknown, out of range or without a source.
    """
    if not isinstance(figures, Mapping):
        raise contract_error(f"chip {name}", "be a JSON object", type(figures).__name__, "see dsacp_npu/planning/chips.json")
    hint = "one of " + ", ".join(FIGURES)
    for key in figures:
        if key not in FIGURES:
            raise contract_error(f"chip {name}: {key}", "be a figure of a chip", "an unknown name", hint)
    for key in FIGURES:
        if key not in figures:
            raise contract_error(f"chip {name}: {key}", "be given", "no such key", "every figure, as in chips.json")
        pair = figures[key]
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[1], str) and pair[1].strip()):
            raise contract_error(f"chip {name}: {key}", "be a pair of a number and its source", repr(pair))
    values = {key: figures[key][0] for key in FIGURES}
    return Chip(name=name, **values, sources=tuple((key, figures[key][1]) for key in FIGURES))
