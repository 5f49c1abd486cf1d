"""What worker processes do for the tests of the V3.2 module; each function gets this rank's `Ranks` first."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dsacp_npu.block import ExpertWeights, expert_output, expert_share
from dsacp_npu.compressor import rms_norm
from dsacp_npu.distributed import Ranks
from dsacp_npu.mla_layer import MLABatch
from dsacp_npu.mla_step import mla_metadata_of_batch
from dsacp_npu.parallel import Parallel, parallel_of
from dsacp_npu.rows import gathered_rows, last_rows, own_rows, split_experts
from tests.mirror.common import to_torch
from tests.module.mla_worlds import (
    Event,
    Model,
    Steps,
    Told,
    bytes_of,
    caches_of,
    layers_of,
    next_step,
    tell,
)

Options = Mapping[str, Any]
Story = tuple[Options, Sequence[Event], Options, Options, Options]


def place_of(ranks: Ranks, options: Options) -> Parallel:
    """With the switch on the processes are the TP group; with it off a CP group of its own."""
    on = options.get("enable_dsa_cp", False)
    return parallel_of(options, tp=ranks) if on else parallel_of(options, cp=ranks)


def told(ranks: Ranks, model: Model, stories: list[Story]) -> list[tuple[list[Told], list[bytes]]]:
    """One story after the other: (parallel options, events, how layers are built, caches made, steps told).

    Of each what was told, and what lies in the caches at its end.
    """
    found = []
    for options, events, built, kept, telling in stories:
        layers = layers_of(model, place_of(ranks, options), **built)
        caches = caches_of(model, dtype=layers[0].dtype_name, **kept)
        found.append((tell(model, layers, caches, events, **telling), bytes_of(caches)))
    return found


def with_graph_slot(
    ranks: Ranks, model: Model, ways: list[Options], new_tokens: Mapping[str, int], idle: int
) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """An engine's batch with rows of nobody behind it, in each way: every layer's rows, and their tokens."""
    found = []
    for options in ways:
        layers, caches = layers_of(model, parallel_of(options, tp=ranks)), caches_of(model)
        planned, stream, _ = next_step(model, layers, caches, new_tokens)
        lens, table = planned.query_start_loc, planned.batch.block_table
        batch = MLABatch(
            torch.cat([lens, lens[-1:] + idle]),
            torch.cat([planned.batch.seq_lens, lens.new_zeros(1)]),
            torch.cat([table, table.new_full((1, table.shape[1]), -1)]),
        )
        tensors = {cache.layer_idx: cache.tensors for cache in caches}
        step = mla_metadata_of_batch(layers, tensors, batch)
        real = step.token_indices.masked_fill(step.token_indices >= planned.num_tokens, -1)
        outputs = [layer(stream[real], step, tensors[layer.layer_idx]).numpy() for layer in layers]
        found.append([(output, real.numpy()) for output in outputs])
    return found


def given(
    ranks: Ranks, model: Model, ways: list[Options], steps: Steps, choices: list[np.ndarray]
) -> list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """The first layer's rows for selections handed in, in each way, with their tokens; and what it says it chose."""
    found = []
    for options in ways:
        layer = layers_of(model, parallel_of(options, tp=ranks))[0]
        caches, story = caches_of(model), []
        for new_tokens, choice in zip(steps, choices, strict=True):
            step, stream, _ = next_step(model, [layer], caches, new_tokens)
            out = layer.attend(stream[step.token_indices], step, caches[0], given_topk=torch.tensor(choice))
            caches[1].advance_to(step.progress)
            story.append((step.token_indices.numpy(), out.output.numpy(), out.topk_indices.numpy()))
        found.append(story)
    return found


def went_on(
    ranks: Ranks, model: Model, options: Options, first: Mapping[str, int], events: Sequence[Event], dtype: str
) -> tuple[list[Told], list[Told]]:
    """After a split step, the same events by its layers and by layers of a single device, on equal caches."""
    on, off = (layers_of(model, place, dtype=dtype) for place in (parallel_of(options, tp=ranks), parallel_of()))
    caches = caches_of(model, dtype=dtype)
    (split,) = tell(model, on, caches, [first])
    assert split.splits
    others = copy.deepcopy(caches)
    return tell(model, on, caches, events), tell(model, off, others, events)


def refused(ranks: Ranks, model: Model, options: Options, new_tokens: Mapping[str, int], spoiled: str) -> list[str]:
    """What each layer says of a step that cannot be, on every rank alike, and of the right one afterwards."""
    layers, caches = layers_of(model, parallel_of(options, tp=ranks)), caches_of(model)
    step, stream, _ = next_step(model, layers, caches, new_tokens)
    rows = stream[step.token_indices]
    found = []
    for layer in layers:
        cache: Any = caches[layer.layer_idx]
        if spoiled == "rows":
            call = (rows[:-1], step, cache)
        elif spoiled == "cache":
            call = (rows, step, caches[1 - layer.layer_idx])
        else:
            next_step(model, layers, caches, new_tokens)  # its room was given up
            call = (rows, step, cache)
        try:
            layer(*call)
        except ValueError as error:
            found.append(f"{type(error).__name__}: {error}")
    step, stream, _ = next_step(model, layers, caches, new_tokens)
    for layer in layers:
        layer(stream[step.token_indices], step, caches[layer.layer_idx])
    return [*found, *(f"{request} has {caches.num_computed_tokens(request)}" for request in new_tokens)]


def stack(
    ranks: Ranks,
    model: Model,
    norms: list[np.ndarray],
    experts: list[ExpertWeights],
    stories: list[tuple[Options, bool, Steps]],
) -> list[list[tuple[np.ndarray, np.ndarray, int]]]:
    """A small model on own rows: every step's rows after the last block, each request's last, and how many it had."""
    return [stacked(ranks, model, norms, experts, *story) for story in stories]


def stacked(
    ranks: Ranks,
    model: Model,
    norms: list[np.ndarray],
    experts: list[ExpertWeights],
    options: Options,
    split: bool,
    steps: Steps,
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """One story."""
    parallel, eps = parallel_of(options, tp=ranks), model.config.rms_norm_eps
    layers, caches = layers_of(model, parallel), caches_of(model)
    found = []
    for new_tokens in steps:
        step, stream, _ = next_step(model, layers, caches, new_tokens)
        x = own_rows(stream[: step.num_tokens], step)
        for i, layer in enumerate(layers):
            attn_norm, ffn_norm = torch.tensor(norms[i])
            x = x + layer(rms_norm(x, attn_norm, eps), step, caches[i])
            weights: ExpertWeights = to_torch(experts[i])
            normed = rms_norm(x, ffn_norm, eps)
            if split:
                share = expert_share(weights, ranks.cp_rank, ranks.cp_size)
                x = x + split_experts(normed, step, parallel, lambda rows, share=share: expert_output(rows, share))
            else:
                x = x + expert_output(normed, weights)
        every, last = gathered_rows(x, step, parallel), last_rows(x, step, parallel)
        found.append((every.numpy(), last.numpy(), step.num_rows))
    return found
