"""V3.2 attention layers beside the definition of each, and the same story told to both; as `tests.module.worlds`.

A story is a list of steps, and of what happens to requests between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from dsacp_npu._mla_parts import cache_parts
from dsacp_npu.mla_caches import MLACaches
from dsacp_npu.mla_module import MLAttention
from dsacp_npu.mla_step import MLAStep, mla_step_metadata
from dsacp_npu.parallel import Parallel
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.mla_layer import MLAWeights
from tests.compare import assert_double, assert_same
from tests.distributed.mla_work import COLLECTIVES
from tests.mla_strategies import SMALL, Run, run, weights_of, world_of

CODED = replace(SMALL, kv_lora_rank=128)  # FP8 latents have a scale for each 128 channels
Steps = Sequence[Mapping[str, int]]
Event = Mapping[str, int] | tuple[Any, ...]  # a step; or a method of the caches and its arguments


class Model(NamedTuple):
    """Constants and weights of two layers, and whole requests."""

    config: MLAConfig
    weights: list[MLAWeights]
    x: dict[str, np.ndarray]


def model_of(
    seed: int,
    lengths: Mapping[str, int],
    config: MLAConfig = SMALL,
    prefixes: Mapping[str, tuple[str, int]] | None = None,
) -> Model:
    """Random weights and rows; a request with a prefix begins with so many rows of another one."""
    rng = np.random.default_rng(seed)
    weights = [weights_of(rng, config) for _ in range(2)]
    rows = {name: rng.standard_normal((length, config.hidden_size)) for name, length in lengths.items()}
    for name, (source, length) in (prefixes or {}).items():
        rows[name][:length] = rows[source][:length]
    return Model(config, weights, rows)


def named(weights: MLAWeights) -> dict[str, np.ndarray]:
    """A layer's weights under the names of the module's parameters."""
    found = {name: part for name, part in weights._asdict().items() if name not in ("w_uk", "w_uv", "indexer")}
    found["wkv_b"] = np.concatenate([weights.w_uk, weights.w_uv], axis=1)
    return found | {f"indexer.{name}": part for name, part in weights.indexer._asdict().items()}


def layers_of(model: Model, parallel: Parallel | None = None, **options: Any) -> list[MLAttention]:
    """The module of every layer, on one rank."""
    options = {"dtype": "float64", **options}
    made = [MLAttention(model.config, i, parallel, **options) for i in range(len(model.weights))]
    for layer, weights in zip(made, model.weights, strict=True):
        for name, weight in named(weights).items():
            layer.assign(name, torch.tensor(weight))
    return made


def caches_of(model: Model, **options: Any) -> MLACaches:
    """Small pages, so that requests spread over many."""
    sizes = {"num_tokens": sum(map(len, model.x.values())), "max_requests": len(model.x) + 2, "block_size": 4}
    return MLACaches(model.config, range(len(model.weights)), **{**sizes, "dtype": "float64", **options})


class Told(NamedTuple):
    """What one rank made of a step.

    Fields:
        rows: for each request of the step its first new token and the one behind its last.
        splits: whether the step split tokens.
        tokens: the token of the step that each row of hidden states held.
        own: the same of the rows whose choice a layer tells.
        outputs, topk: of every layer.
        collectives: by name, of every layer.
    """

    rows: dict[str, tuple[int, int]]
    splits: bool
    tokens: np.ndarray
    own: np.ndarray
    outputs: list[np.ndarray]
    topk: list[np.ndarray]
    collectives: list[list[str]]


def tell(
    model: Model, layers: Sequence[MLAttention], caches: MLACaches, events: Sequence[Event], *, padding: int = 0
) -> list[Told]:
    """Every step of a story, through every layer."""
    story = []
    for event in events:
        if isinstance(event, tuple):
            getattr(caches, event[0])(*event[1:])
            continue
        step, stream, rows = next_step(model, layers, caches, event, padding)
        mine, outputs, topk, made = held_rows(stream, step, layers[0]), [], [], []
        for i, layer in enumerate(layers):
            with noted_collectives() as names:
                found = layer.attend(mine, step, caches[i])
            outputs.append(as_numpy(found.output))
            topk.append(found.topk_indices.numpy(force=True))
            made.append(names)
        own = step.partition.token_indices[layers[0].parallel.cp_rank] if step.splits else step.token_indices
        story.append(Told(rows, step.splits, step.token_indices.numpy(), own.numpy(), outputs, topk, made))
    return story


def next_step(
    model: Model,
    layers: Sequence[MLAttention],
    caches: MLACaches,
    new_tokens: Mapping[str, int],
    padding: int = 0,
    **options: Any,
) -> tuple[MLAStep, torch.Tensor, dict[str, tuple[int, int]]]:
    """A step; its rows of all ranks with NaN behind them; which rows of its request each part of them is."""
    for request in new_tokens.keys() - set(caches.requests):
        caches.open(request)
    starts = {request: caches.num_computed_tokens(request) for request in new_tokens}
    rows = {request: (starts[request], starts[request] + count) for request, count in new_tokens.items()}
    assert all(end <= len(model.x[request]) for request, (_, end) in rows.items()), "a story beyond its rows"
    if padding:
        options["num_input_tokens"] = sum(new_tokens.values()) + padding
    step = mla_step_metadata(layers, caches, new_tokens, **options)
    parts = [model.x[request][start:end] for request, (start, end) in rows.items()]
    return step, torch.tensor(np.concatenate([*parts, np.full((1, model.config.hidden_size), np.nan)])), rows


def held_rows(stream: torch.Tensor, step: MLAStep, layer: MLAttention) -> torch.Tensor:
    """This rank's rows in the layer's dtype; -1, a pad row, takes the last one."""
    return stream[step.token_indices].to(kind_of(layer)).to(layer.q_norm.device)


@contextmanager
def noted_collectives() -> Iterator[list[str]]:
    """The names of the collectives that torch is asked for within."""
    made: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        right = getattr(dist, name)

        def collective(*args: Any, **options: Any) -> Any:
            made.append(name)
            return right(*args, **options)

        return collective

    with patch.multiple(dist, **{name: noted(name) for name in COLLECTIVES}):
        yield made


def kind_of(layer: MLAttention) -> torch.dtype:
    """The dtype of the layer's rows."""
    kind: torch.dtype = getattr(torch, layer.dtype_name)
    return kind


def as_numpy(rows: torch.Tensor) -> np.ndarray:
    """The rows; short floats, which numpy lacks, widened."""
    array: np.ndarray = (rows if rows.dtype in (torch.float32, torch.float64) else rows.float()).numpy(force=True)
    return array


def bytes_of(caches: MLACaches) -> list[bytes]:
    """What lies in every tensor of the caches."""
    parts = [part for cache in caches for part in cache_parts(cache.tensors)]
    return [part.contiguous().view(torch.uint8).numpy(force=True).tobytes() for part in parts]


def any_choice(rng: np.random.Generator, done: Mapping[str, int], new_tokens: Mapping[str, int]) -> np.ndarray:
    """Some tokens that each token sees, in any order, -1 anywhere."""
    rows = []
    for name, count in new_tokens.items():
        for position in range(done[name], done[name] + count):
            row = np.full(SMALL.index_topk, -1, np.int32)
            found = rng.permutation(position + 1)[: int(rng.integers(1, SMALL.index_topk + 1))]
            row[rng.permutation(SMALL.index_topk)[: len(found)]] = found
            rows.append(row)
    return np.array(rows, np.int32)


def defined(model: Model, **codes: bool) -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """(rows, choice) of every request by every layer's definition, run whole on one device."""
    found = []
    for weights in model.weights:
        x = list(model.x.values())
        world = world_of(
            np.random.default_rng(0), list(map(len, x)), config=model.config, weights=weights, x=x, **codes
        )
        out: Run = run(world, [world.lengths])
        found.append(dict(zip(model.x, zip(out.outputs, out.topk, strict=True), strict=True)))
    return found


def assert_told(ranks: Sequence[Sequence[Told]], model: Model, name: str = "", **codes: bool) -> None:
    """Every row of every step, on whichever rank it is, equals the definition's, choices first; pad rows are zero."""
    whole = defined(model, **codes)
    for i, step in enumerate(ranks[0]):
        seen: tuple[set[int], set[int]] = set(), set()
        for rank, story in enumerate(ranks):
            mine = story[i]
            assert mine.rows == step.rows
            for layer, requests in enumerate(whole):
                where = f"{name} step {i} layer {layer} rank {rank}"
                outputs, topk = (
                    np.concatenate([requests[request][part][start:end] for request, (start, end) in step.rows.items()])
                    for part in (0, 1)
                )
                for tokens, rows, due, compare, found in (
                    (mine.own, mine.topk[layer], topk, assert_same, seen[0]),
                    (mine.tokens, mine.outputs[layer], outputs, assert_double, seen[1]),
                ):
                    real = (tokens >= 0) & (tokens < len(due))
                    compare(rows[real], due[tokens[real]], where)
                    empty = -1 if compare is assert_same else 0
                    assert (rows[~real] == empty).all(), f"{where}: pad rows"
                    found |= set(tokens[real].tolist())
        every = set(range(sum(end - start for start, end in step.rows.values())))
        assert seen == (every, every), f"{name} step {i}: rows of nobody"
