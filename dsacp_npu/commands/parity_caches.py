"""The caches of a `parity` scenario: copied between steps as an engine does, guarded during steps.

During a step everything that belongs to other requests, blocks and state alike, is NaN: it can be neither read nor
written unnoticed. After the step it is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dsacp_npu.commands.parity_compare import MismatchError
from dsacp_npu.commands.parity_scenarios import Scenario, Step
from dsacp_ref.compressor import CompressorState
from dsacp_ref.layer import LayerCache, LayerWeights, empty_cache
from dsacp_ref.quant import QuantizedVectors


def mapped(function: Callable[..., Any], *records: Any) -> Any:
    """The record of what a function makes of every array in it, nested records and plain tuples included."""
    if isinstance(records[0], tuple):
        made = tuple(mapped(function, *parts) for parts in zip(*records, strict=True))
        return type(records[0])(*made) if hasattr(records[0], "_fields") else made
    return function(*records)


def arrays_of(part: Any) -> tuple[np.ndarray, ...]:
    """The arrays of a cache: one, or the codes and scales of int8 keys."""
    return tuple(part) if isinstance(part, QuantizedVectors) else (part,)


def with_dtype(record: Any, dtype: type) -> Any:
    """The record with its floats in this precision; integers and None stay."""
    return mapped(
        lambda part: part.astype(dtype) if getattr(part, "dtype", None) in (np.float32, np.float64) else part, record
    )


def fresh_cache(scenario: Scenario, weights: LayerWeights, *, int8_index_cache: bool = False) -> LayerCache:
    """A cache that holds nothing: NaN everywhere; int8 index keys have scales that are NaN."""
    empty = empty_cache(
        weights,
        num_blocks=scenario.num_blocks,
        block_size=scenario.block_size,
        num_cmp_blocks=scenario.num_cmp_blocks,
        cmp_block_size=scenario.cmp_block_size,
        num_slots=scenario.num_slots,
        int8_index_cache=int8_index_cache,
    )
    return guarded(empty, mapped(lambda part: np.ones(len(part), np.bool_), empty))


def foreign(step: Step, cache: LayerCache, ratio: int) -> Any:
    """A cache record of masks, one for each array: the blocks and state slots that no request of the step may touch."""
    batch = step.batch
    block_size, cmp_block_size = cache.swa_cache.shape[1], cache.cmp_cache.shape[1]
    blocks, cmp_blocks = (np.ones(len(part), np.bool_) for part in (cache.swa_cache, cache.cmp_cache))
    slots = np.ones(len(cache.cmp_state.num_tokens), np.bool_)
    slots[batch.state_indices] = False
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        blocks[batch.swa_block_table[row, : -(-seq_len // block_size)]] = False
        if ratio > 1:
            cmp_blocks[batch.cmp_block_table[row, : -(-(seq_len // ratio) // cmp_block_size)]] = False
    per_slot: Any = slots
    rings: Any = CompressorState(per_slot, per_slot, per_slot, per_slot)
    index_blocks = mapped(lambda part: cmp_blocks[: len(part)], cache.index_cache)
    masks: list[Any] = [blocks, cmp_blocks, index_blocks, rings, rings]
    return LayerCache(*masks)


def guarded(cache: LayerCache, masks: Any) -> LayerCache:
    """The cache with NaN where the masks say so; counts stay."""

    def hidden(part: np.ndarray, mask: np.ndarray) -> np.ndarray:
        part = part.copy()
        if part.dtype.kind == "f":
            part[mask] = np.nan
        return part

    guarded: LayerCache = mapped(hidden, cache, masks)
    return guarded


def unguarded(after: LayerCache, before: LayerCache, masks: Any) -> LayerCache:
    """The cache after a step with what was hidden put back, once it is found untouched."""

    def restored(part: np.ndarray, old: np.ndarray, mask: np.ndarray) -> np.ndarray:
        untouched = np.isnan(part[mask]) if part.dtype.kind == "f" else part[mask] == old[mask]
        if not untouched.all():
            raise MismatchError("the step wrote into blocks or state of other requests")
        part = part.copy()
        part[mask] = old[mask]
        return part

    restored_cache: LayerCache = mapped(restored, after, before, masks)
    return restored_cache


def with_block_copies(cache: LayerCache, step: Step) -> LayerCache:
    """The cache before the step: forks have copied the blocks that their prefix ends in."""
    parts = {"swa": ["swa_cache"], "cmp": ["cmp_cache", "index_cache"]}
    cache = mapped(np.copy, cache)
    for kind, source, target in step.block_copies:
        for part in (part for name in parts[kind] for part in arrays_of(getattr(cache, name)) if len(part)):
            part[target] = part[source]
    return cache


def with_state_copies(cache: LayerCache, step: Step) -> LayerCache:
    """The cache after the step: forks have copied their parent's state."""
    cache = mapped(np.copy, cache)
    for source, target in step.state_copies:
        for part in (*cache.cmp_state, *cache.index_state):
            part[target] = part[source]
    return cache
