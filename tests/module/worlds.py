"""A model's attention layers beside the definition of each, and the same story told to both.

The layers do not stand on one another: each gets the same rows, so that every one is compared on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from dsacp_npu.caches import Caches
from dsacp_npu.module import DSAttention
from dsacp_npu.parallel import Parallel
from dsacp_npu.quant import quantized_weight
from dsacp_npu.step import StepMetadata, step_metadata
from dsacp_ref.config import AttentionConfig
from dsacp_ref.layer import LayerWeights
from tests.compare import assert_double
from tests.layer_strategies import CSA, HCA, SMALL, WINDOW, run, weights_of, world_of

FOUR_GROUPS = replace(SMALL, o_groups=4)
KINDS = (WINDOW, CSA, HCA)
Steps = Sequence[Mapping[str, int]]


class Model(NamedTuple):
    """Constants and weights of a window-only, a ratio-4 and a ratio-8 layer, and whole requests."""

    config: AttentionConfig
    weights: list[LayerWeights]
    x: dict[str, np.ndarray]


def model_of(seed: int, lengths: Mapping[str, int], config: AttentionConfig = FOUR_GROUPS) -> Model:
    """Random weights and rows."""
    rng = np.random.default_rng(seed)
    weights = [weights_of(rng, config, kind) for kind in KINDS]
    rows = {name: rng.standard_normal((length, config.hidden_size)) for name, length in lengths.items()}
    return Model(config, weights, rows)


def named(weights: LayerWeights) -> dict[str, np.ndarray]:
    """A layer's weights under the names of the module's parameters."""
    found = {name: part for name, part in weights._asdict().items() if isinstance(part, np.ndarray)}
    parts = {"compressor": weights.compressor}
    if weights.indexer is not None:
        found |= {f"indexer.{name}": getattr(weights.indexer, name) for name in ("wq_b", "weights_proj")}
        parts["indexer.compressor"] = weights.indexer.compressor
    for prefix, part in parts.items():
        if part is not None:
            found |= {f"{prefix}.{name}": value for name, value in part._asdict().items()}
    return found


def filled(layer: DSAttention, weights: LayerWeights) -> DSAttention:
    """The layer with its rank's part of the weights."""
    for name, held in layer.held().items():
        whole = torch.tensor(named(weights)[name])
        if layer.w8a8 and name in ("wq_a", "wkv", "wq_b", "wo_b", "indexer.wq_b"):
            coded = quantized_weight(whole)
            scales = coded.scales[held.index[0]]
            layer.assign(name, coded._replace(values=coded.values[held.index], scales=scales))
        else:
            layer.assign(name, whole[held.index])
    return layer


def layers_of(model: Model, parallel: Parallel | None = None, **options: Any) -> list[DSAttention]:
    """The module of every layer, on one rank."""
    options = {"dtype": "float64", **options}
    made = (DSAttention(model.config, i, parallel, **options) for i in range(len(model.weights)))
    return [filled(layer, weights) for layer, weights in zip(made, model.weights, strict=True)]


def caches_of(model: Model, **options: Any) -> Caches:
    """Small pages, so that requests spread over many."""
    total = sum(map(len, model.x.values()))
    sizes = {"num_tokens": total, "max_requests": len(model.x) + 2, "block_size": 4, "cmp_block_size": 3}
    return Caches(model.config, range(len(model.weights)), **{**sizes, "dtype": "float64", **options})


class Told(NamedTuple):
    """What one rank made of a step: which tokens its rows are, and every layer's rows."""

    splits: bool
    tokens: np.ndarray
    outputs: list[np.ndarray]


def tell(
    model: Model,
    layers: Sequence[DSAttention],
    caches: Caches,
    steps: Steps,
    *,
    padding: int = 0,
    after: Callable[[StepMetadata], None] | None = None,
    **step_options: Any,
) -> list[Told]:
    """Every step of a story, through every layer."""
    story = []
    for new_tokens in steps:
        for request in new_tokens.keys() - set(caches.requests):
            caches.open(request)
        done = {request: caches.num_computed_tokens(request) for request in new_tokens}
        count = sum(new_tokens.values())
        options = {**step_options, **({"num_input_tokens": count + padding} if padding else {})}
        step = step_metadata(layers, caches, new_tokens, **options)
        rows = [model.x[request][done[request] : done[request] + n] for request, n in new_tokens.items()]
        stream = torch.tensor(np.concatenate([*rows, np.full((1, model.config.hidden_size), np.nan)]))
        tokens = step.token_indices
        mine = stream[tokens].to(kind_of(layers[0])).to(layers[0].q_norm.device)  # -1, a pad row, takes the last one
        outputs = [layer(mine, step, caches[i]) for i, layer in enumerate(layers)]
        story.append(Told(step.splits, tokens.numpy(), [as_numpy(output) for output in outputs]))
        if after is not None:
            after(step)
    return story


def kind_of(layer: DSAttention) -> torch.dtype:
    """The dtype of the layer's rows."""
    kind: torch.dtype = getattr(torch, layer.dtype_name)
    return kind


def as_numpy(rows: torch.Tensor) -> np.ndarray:
    """The rows; short floats, which numpy lacks, widened."""
    array: np.ndarray = (rows if rows.dtype in (torch.float32, torch.float64) else rows.float()).numpy(force=True)
    return array


def due(model: Model, steps: Steps) -> list[list[np.ndarray]]:
    """Every step's rows, by every layer's definition: each request run whole, on one device."""
    whole = []
    for kind, weights in zip(KINDS, model.weights, strict=True):
        x = list(model.x.values())
        shared = {"config": model.config, "kind": kind, "weights": weights, "x": x}
        world = world_of(np.random.default_rng(0), list(map(len, x)), **shared)
        whole.append(dict(zip(model.x, run(world, [world.lengths]).outputs, strict=True)))
    done, rows = dict.fromkeys(model.x, 0), []
    for new_tokens in steps:
        parts = [[layer[name][done[name] : done[name] + n] for name, n in new_tokens.items()] for layer in whole]
        rows.append([np.concatenate(part) for part in parts])
        for request, n in new_tokens.items():
            done[request] += n
    return rows


def assert_told(ranks: Sequence[Sequence[Told]], model: Model, steps: Steps, name: str = "") -> None:
    """Every row of every step, on whichever rank it is, equals the definition's; pad rows are zero."""
    for i, rows in enumerate(due(model, steps)):
        found = set()
        for rank, story in enumerate(ranks):
            tokens = story[i].tokens
            real = (tokens >= 0) & (tokens < len(rows[0]))
            found |= set(tokens[real].tolist())
            for layer, (mine, exact) in enumerate(zip(story[i].outputs, rows, strict=True)):
                where = f"{name} step {i} layer {layer} rank {rank}"
                assert_double(mine[real], exact[tokens[real]], where)
                if story[i].splits:
                    assert not mine[~real].any(), f"{where}: pad rows"
        assert found == set(range(len(rows[0]))), f"{name} step {i}: rows of nobody"
