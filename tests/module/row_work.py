"""A small model whose rows stay on their rank, for worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from dsacp_npu.block import ExpertWeights, expert_output, expert_share
from dsacp_npu.compressor import rms_norm
from dsacp_npu.distributed import Ranks
from dsacp_npu.parallel import parallel_of
from dsacp_npu.rows import gathered_rows, last_rows, own_rows, split_experts
from dsacp_npu.step import step_metadata
from tests.mirror.common import to_torch
from tests.module.worlds import Model, Steps, caches_of, layers_of


class Blocks(NamedTuple):
    """Attention layers, and what stands around each."""

    model: Model
    norms: list[list[np.ndarray]]
    experts: list[Any]


class Story(NamedTuple):
    """How the model runs, and what it is told."""

    options: Mapping[str, Any]
    split: bool  # the experts' weights, over the same ranks
    steps: Steps


def stack(ranks: Ranks, blocks: Blocks, stories: list[Story]) -> list[list[tuple[np.ndarray, np.ndarray, int]]]:
    """Every step's rows after the last block: all of them, each request's last, and how many this rank had."""
    return [stacked(ranks, blocks, story) for story in stories]


def stacked(ranks: Ranks, blocks: Blocks, story: Story) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """One story."""
    model, parallel = blocks.model, parallel_of(story.options, tp=ranks)
    layers, caches = layers_of(model, parallel), caches_of(model)
    for request in model.x:
        caches.open(request)
    found, eps = [], model.config.rms_norm_eps
    for new_tokens in story.steps:
        done = {request: caches.num_computed_tokens(request) for request in new_tokens}
        step = step_metadata(layers, caches, new_tokens)
        stream = np.concatenate([model.x[r][done[r] : done[r] + n] for r, n in new_tokens.items()])
        x = own_rows(torch.tensor(stream), step)
        for i, layer in enumerate(layers):
            attn_norm, ffn_norm = (torch.tensor(norm) for norm in blocks.norms[i])
            x = x + layer(rms_norm(x, attn_norm, eps), step, caches[i])
            weights: ExpertWeights = to_torch(blocks.experts[i])
            normed = rms_norm(x, ffn_norm, eps)
            if story.split:
                share = expert_share(weights, ranks.cp_rank, ranks.cp_size)
                x = x + split_experts(normed, step, parallel, lambda rows, share=share: expert_output(rows, share))
            else:
                x = x + expert_output(normed, weights)
        every, last = gathered_rows(x, step, parallel), last_rows(x, step, parallel)
        found.append((every.numpy(), last.numpy(), step.num_rows))
    return found
