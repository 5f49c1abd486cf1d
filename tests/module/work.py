"""What worker processes do for the tests of the module; each function gets this rank's `Ranks` first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dsacp_npu.distributed import Ranks, connect
from dsacp_npu.module import DSAttention
from dsacp_npu.parallel import Parallel, parallel_of
from tests.module.worlds import Model, Steps, Told, caches_of, layers_of, tell

Options = Mapping[str, Any]


def parallel_in(ranks: Ranks, options: Options, grid: tuple[str, int, int] | None) -> tuple[Parallel, list[Ranks]]:
    """This rank's place: all processes one TP group, or a grid (directory, cp, tp) of groups that are made here."""
    if grid is None:
        return parallel_of(options, tp=ranks), []
    directory, cp_size, tp_size = grid
    cp_rank, tp_rank = divmod(ranks.cp_rank, tp_size)
    cp = connect(f"file://{directory}/cp of {tp_rank}", cp_size, cp_rank)
    tp = connect(f"file://{directory}/tp of {cp_rank}", tp_size, tp_rank)
    return parallel_of(options, cp=cp, tp=tp), [cp, tp]


def told(
    ranks: Ranks,
    model: Model,
    stories: list[tuple[Options, Steps, Options, Options]],
    grid: tuple[str, int, int] | None = None,
) -> list[list[Told]]:
    """One story after the other: (parallel options, steps, what layers are built with, what steps are told with)."""
    found, made = [], []
    for options, steps, built, telling in stories:
        parallel, groups = parallel_in(ranks, options, grid)
        made += groups
        layers = layers_of(model, parallel, **built)
        caches = caches_of(model, dtype=layers[0].dtype_name)
        found.append(tell(model, layers, caches, steps, **telling))
    for group in made:
        group.close()
    return found


def kept(ranks: Ranks, model: Model, options: Options) -> list[dict[str, int]]:
    """How many numbers of each weight this rank keeps."""
    layers = layers_of(model, parallel_of(options, tp=ranks))
    return [{name: int(np.prod(held.kept_shape)) for name, held in layer.held().items()} for layer in layers]


def refused(ranks: Ranks, model: Model, options: Options, built: Options) -> str:
    """What building a layer says."""
    try:
        DSAttention(model.config, 1, parallel_of(options, tp=ranks), **built)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def over_nccl(ranks: Ranks, model: Model, ways: list[Options], steps: Steps, meeting: str) -> list[list[Told]]:
    """A story in each way, every rank on a device of its own."""
    torch.cuda.set_device(ranks.cp_rank)
    group = connect(meeting, ranks.cp_size, ranks.cp_rank, transport="nccl")
    try:
        found = []
        for options in ways:
            layers = layers_of(model, parallel_of(options, tp=group), device=f"cuda:{ranks.cp_rank}")
            caches = caches_of(model, device=f"cuda:{ranks.cp_rank}")
            found.append(tell(model, layers, caches, steps))
        return found
    finally:
        group.close()
