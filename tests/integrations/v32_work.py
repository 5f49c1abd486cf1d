"""V3.2 models of transformers with random weights, and what worker processes do with them.

Each function that a process runs gets its `Ranks` first. What transformers' own code says in float64 is found by
`tests.integrations.worlds`, whatever the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import transformers

from dsacp_npu._ranks import Ranks
from dsacp_npu.commands.transformers_demo import MLA_CONFIG, build_mla_causal_model
from dsacp_npu.integrations.transformers import disable, enable
from dsacp_npu.parallel import Parallel, parallel_of
from dsacp_ref.config import ParallelConfig
from tests.integrations.worlds import VOCAB

# "wide" has latents that FP8 caches take. Both have 64 index heads, as the released model: with few of them ReLU makes
# many index scores exactly 0, and among equal ones transformers chooses by another rule than ours.
CONFIGS = {"tiny": MLA_CONFIG, "wide": replace(MLA_CONFIG, kv_lora_rank=128, num_hidden_layers=2)}
EVENT = dict[str, int] | tuple[Any, ...]


def fresh_model(size: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of its own for a test that changes it."""
    model = build_mla_causal_model(CONFIGS[size], vocab_size=VOCAB, seed=1)
    return model if dtype == torch.float32 else reloaded(model, dtype)


def reloaded(model: Any, dtype: torch.dtype, folder: str | None = None) -> Any:
    """The model as from_pretrained gives it."""
    from tempfile import TemporaryDirectory

    with nullcontext(folder) if folder else TemporaryDirectory() as place:
        model.save_pretrained(place)
        return transformers.DeepseekV32ForCausalLM.from_pretrained(
            place, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).requires_grad_(False)


@cache
def untouched(size: str) -> Any:
    """The model that nobody enables."""
    return fresh_model(size)


def packed_logits(
    model: Any,
    parallel: Parallel | None,
    events: Sequence[EVENT],
    prompts: dict[str, torch.Tensor],
    **cache_options: Any,
) -> dict[str, torch.Tensor]:
    """The enabled model's logits of every request, whose tokens come step after step: [num_tokens, vocab] each.

    An event is a step, or a method of the caches with its arguments. Tokens that are run again replace the first rows.
    """
    total = sum(ids.shape[1] for ids in prompts.values())
    options = {"num_tokens": total, "max_requests": len(prompts), "block_size": 16, **cache_options}
    session = enable(model, parallel=parallel, **options)
    vocab = model.config.vocab_size
    found = {name: torch.full((ids.shape[1], vocab), torch.nan, dtype=model.dtype) for name, ids in prompts.items()}
    for event in events:
        if isinstance(event, tuple):
            getattr(session.caches, event[0])(*event[1:])
            if event[0] == "fork":
                name, source, length = event[1:]
                found[name][:length] = found[source][:length]
            continue
        known = session.caches.requests
        done = {name: session.caches.num_computed_tokens(name) if name in known else 0 for name in event}
        row = torch.cat([prompts[name][:, done[name] : done[name] + new] for name, new in event.items()], dim=1)
        with session.step(event) as step:
            logits = model(input_ids=row, position_ids=step.position_ids).logits[0]
        for name, rows in step.rows.items():
            found[name][done[name] : done[name] + event[name]] = logits[rows]
    disable(model)
    assert not any(logits.isnan().any() for logits in found.values()), "the steps must feed every token"
    return found


# --- what processes run ---


def packed(
    ranks: Ranks,
    size: str,
    options: dict[str, object],
    events: Sequence[EVENT],
    prompts: dict[str, torch.Tensor],
    cache_options: dict[str, object],
) -> dict[str, torch.Tensor]:
    """Every request's logits on this rank."""
    parallel = parallel_of(ParallelConfig(**options), tp=ranks)
    return packed_logits(fresh_model(size), parallel, events, prompts, **cache_options)


def generated(ranks: Ranks, size: str, options: dict[str, object], ids: torch.Tensor, num_new: int) -> torch.Tensor:
    """The tokens of greedy generate()."""
    model = fresh_model(size)
    enable(model, num_tokens=ids.shape[1] + num_new, parallel=parallel_of(ParallelConfig(**options), tp=ranks))
    return model.generate(ids, max_new_tokens=num_new, do_sample=False)


def refused(ranks: Ranks, options: dict[str, object]) -> str:
    """What enabling with these options says."""
    try:
        enable(fresh_model("wide"), num_tokens=8, parallel=parallel_of(ParallelConfig(**options), tp=ranks))
    except NotImplementedError as error:
        return str(error)
    return ""
