"""A small model reads a text over ranks and writes on: what each rank owned, said, kept and received.

The work of every process behind `notebooks/04_module_in_a_transformers_model.ipynb`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from dsacp_npu._tensors import torch
from dsacp_npu.commands.counted import counted_transport
from dsacp_npu.commands.transformers_demo import BYTES, CONFIG, build_causal_model
from dsacp_npu.distributed import Ranks
from dsacp_npu.integrations.transformers import Session, disable, enable
from dsacp_npu.parallel import parallel_of
from dsacp_ref.partition import Int32


class Walk(NamedTuple):
    """One rank's account.

    Fields:
        tokens: int32 array, the tokens of the text that were its own.
        logits: float32[len(text) + num_new, vocabulary], of every token that was read.
        split: bools, for each step whether its tokens were split over the ranks.
        received: for each step, name of a collective -> bytes that came from other ranks.
        weights: name of an attention weight -> bytes of it that this rank needs, all layers together.
        caches: part of the caches -> bytes, all layers together.
    """

    tokens: Int32
    logits: np.ndarray
    split: list[bool]
    received: list[dict[str, int]]
    weights: dict[str, int]
    caches: dict[str, int]


def walks(ranks: Ranks, text: bytes, num_new: int, ways: Mapping[str, Mapping[str, Any]]) -> dict[str, Walk]:
    """The account of one rank for each way to split, by its name; a way is options of `ParallelConfig`."""
    model = build_causal_model(CONFIG, vocab_size=BYTES)
    return {name: walk(model, ranks, text, num_new, options) for name, options in ways.items()}


def walk(model: Any, ranks: Ranks, text: bytes, num_new: int, options: Mapping[str, Any]) -> Walk:
    """Read the text in one step, then write bytes one by one, each the likeliest, and read them."""
    parallel = parallel_of({"enable_dsa_cp": True, **options}, tp=ranks)
    session = enable(model, num_tokens=len(text) + num_new, max_requests=1, parallel=parallel)
    ids, tokens, said, split, received = torch.tensor([list(text)]), [], [], [], []
    for _ in range(1 + num_new):
        with counted_transport(torch.distributed) as calls, session.step({"text": ids.shape[1]}) as step:
            said.append(model(ids, position_ids=step.position_ids).logits[0])
        ids = said[-1][-1:].argmax(dim=-1)[None]
        partition = step.metadata.partition  # None in a step that is not split
        split.append(partition is not None)
        if partition is not None:
            tokens.append(partition.token_indices[ranks.cp_rank])
        arrived: Counter[str] = Counter()
        for call in calls:
            arrived[call.name] += call.num_bytes
        received.append(dict(arrived))
    weights, caches = weight_bytes(session), session.caches.memory().parts
    disable(model)
    return Walk(np.concatenate(tokens), torch.cat(said).numpy(), split, received, weights, caches)


def weight_bytes(session: Session) -> dict[str, int]:
    """Bytes of every attention weight that this rank needs, by the end of its name."""
    needed: Counter[str] = Counter()
    for attention in session.attentions:
        for name, held in attention.held().items():
            needed[name] += prod(held.kept_shape) * torch.float32.itemsize
    return dict(needed)
