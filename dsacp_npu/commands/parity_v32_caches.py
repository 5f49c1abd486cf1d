"""The caches of a `parity --model v32` scenario, a list with one for each layer: copied and guarded as in v4's.

During a step every block of other requests is poison: NaN in numbers, and in bytes the code of NaN. It can be neither
read nor written unnoticed. After the step it is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from dsacp_npu.commands.parity_caches import mapped
from dsacp_npu.commands.parity_compare import MismatchError
from dsacp_npu.commands.parity_v32_scenarios import StackStep
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.mla_layer import MLACache, empty_mla_cache

Layers = list[MLACache]
Said = TypeVar("Said")
NAN_BYTE = 0x7F  # NaN in FP8 (e4m3fn)


def fresh_layers(
    config: MLAConfig, num_layers: int, num_blocks: int, block_size: int, dtype: str, cache: str
) -> Layers:
    """Caches that hold poison alone."""
    empty = empty_mla_cache(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype, fp8=cache == "fp8")
    return [poisoned(empty, np.ones(num_blocks, np.bool_)) for _ in range(num_layers)]


def foreign_blocks(step: StackStep, num_blocks: int, block_size: int) -> np.ndarray:
    """bool[num_blocks]: the blocks that no request of the step may touch."""
    foreign = np.ones(num_blocks, np.bool_)
    for row, seq_len in enumerate(step.batch.seq_lens.tolist()):
        foreign[step.batch.block_table[row, : -(-seq_len // block_size)]] = False
    return foreign


def raw(part: np.ndarray) -> np.ndarray:
    """What can be compared and filled: a view of codes as bytes, numbers as they are."""
    return part if part.dtype.kind == "f" else part.view(np.uint8)


def poisoned(cache: MLACache, blocks: np.ndarray) -> MLACache:
    """The cache with poison in these blocks."""

    def hidden(part: np.ndarray | None) -> np.ndarray | None:
        if part is None:
            return None
        part = part.copy()
        raw(part)[blocks] = np.nan if part.dtype.kind == "f" else NAN_BYTE
        return part

    made: MLACache = mapped(hidden, cache)
    return made


def restored(after: MLACache, before: MLACache, blocks: np.ndarray) -> MLACache:
    """The cache after a step with what was hidden put back, once it is found untouched."""

    def shown(part: np.ndarray | None, old: np.ndarray | None) -> np.ndarray | None:
        if part is None or old is None:
            return None
        hidden = raw(part)[blocks]
        if not (np.isnan(hidden) if hidden.dtype.kind == "f" else hidden == NAN_BYTE).all():
            raise MismatchError("the step wrote into blocks of other requests")
        part = part.copy()
        part[blocks] = old[blocks]
        return part

    made: MLACache = mapped(shown, after, before)
    return made


def with_copies(layers: Sequence[MLACache], step: StackStep) -> Layers:
    """The caches before the step: forks have copied the blocks that their prefix ends in."""

    def copied(part: np.ndarray | None) -> np.ndarray | None:
        if part is None:
            return None
        part = part.copy()
        for source, target in step.copies:
            part[target] = part[source]
        return part

    return [mapped(copied, cache) for cache in layers]


def guarded_step(step: StackStep, layers: Layers, run: Callable[[Layers], tuple[Layers, Said]]) -> tuple[Layers, Said]:
    """A step of some caches, with other requests' blocks hidden from it; and what it says beside."""
    layers = with_copies(layers, step)
    foreign = foreign_blocks(step, *layers[0].latent_cache.shape[:2])
    after, said = run([poisoned(cache, foreign) for cache in layers])
    return [restored(new, old, foreign) for new, old in zip(after, layers, strict=True)], said


def leaves(cache: MLACache) -> list[tuple[str, np.ndarray]]:
    """Every array of a cache, with its name."""
    latents, rope_keys, index_keys = cache
    named = [("latent_cache", latents), ("rope_cache", rope_keys)]
    if isinstance(index_keys, np.ndarray):
        named.append(("index_cache", index_keys))
    else:
        named += [(f"index_cache.{name}", part) for name, part in zip(index_keys._fields, index_keys, strict=True)]
    return [(name, part) for name, part in named if part is not None]
