"""What runs a cell of `parity --model v32`: the definition, or `dsacp_npu` in one process or in one for every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsacp_npu.commands.parity_engines import Way, called
from dsacp_ref.mla_layer import MLACache, MLAOutput, MLARanksOutput, MLAWeights
from dsacp_ref.mla_stack import StackRanksOutput, StackWeights, mla_stack_over_ranks


def stack_over_ranks(
    way: Way,
    token_ids: np.ndarray,
    weights: StackWeights,
    caches: Sequence[list[MLACache]],
    *args: Any,
    **modes: Any,
) -> StackRanksOutput:
    """One step of the stack, from token ids to logits."""
    if way.backend == "numpy":
        return mla_stack_over_ranks(token_ids, weights, caches, *args, **modes)
    modes = modes | backend_of(way)
    if way.processes:
        tasks = [("distributed_mla.mla_stack_over_ranks", token_ids, own, *args, modes) for own in caches]
        return StackRanksOutput(*answered_by_ranks(way, weights, tasks))
    made: StackRanksOutput = called(
        way, "mla_stack", "mla_stack_over_ranks", token_ids, weights, list(caches), *args, **modes
    )
    return made


def layer_over_ranks(
    way: Way, shards: list[np.ndarray], weights: MLAWeights, caches: list[MLACache], *args: Any, **modes: Any
) -> MLARanksOutput:
    """One step of one layer of `dsacp_npu`."""
    modes = modes | backend_of(way)
    if way.processes:
        name = "distributed_mla.mla_over_ranks"
        tasks = [(name, x, cache, *args, modes) for x, cache in zip(shards, caches, strict=True)]
        return MLARanksOutput(*answered_by_ranks(way, weights, tasks))
    made: MLARanksOutput = called(way, "mla_layer", "mla_over_ranks", shards, weights, caches, *args, **modes)
    return made


def mirror_layer(way: Way, *args: Any, **options: Any) -> MLAOutput:
    """One step of one layer of the mirror on one device, in the way's dtype, without a backend."""
    made: MLAOutput = called(way, "mla_layer", "mla_attention_layer", *args, backend=None, **options)
    return made


def backend_of(way: Way) -> dict[str, None]:
    """The option that leaves a layer to the mirror's own functions, where no other backend is asked for."""
    return {"backend": None} if way.backend == "torch" else {}


def answered_by_ranks(way: Way, weights: Any, tasks: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """One list for each field of what the ranks' processes give."""
    from dsacp_npu.commands import parity_processes

    return list(map(list, zip(*parity_processes.outputs(way, weights, tasks), strict=True)))
