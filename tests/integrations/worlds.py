"""Models of transformers with random weights, what they say untouched, and what their own code says in float64."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode

from dsacp_npu.commands import outside
from dsacp_npu.commands.transformers_demo import build_causal_model
from dsacp_npu.integrations.transformers import disable, enable
from dsacp_npu.parallel import Parallel
from dsacp_ref.config import AttentionConfig

VOCAB = 64
# The first six ratios of V4-Flash, and a window-only layer behind them, so that every kind follows every kind.
RATIOS = (1, 1, 4, 128, 4, 128, 1)
_SMALL = replace(outside.SIZES["tiny"], num_hidden_layers=len(RATIOS), compress_ratios=RATIOS, num_heads=8, o_groups=4)
_SMALL = replace(_SMALL, index_n_heads=64)  # with few of them many index scores are exactly 0, and tie
# "big" has the released head sizes.
CONFIGS: dict[str, AttentionConfig] = {
    "tiny": _SMALL,
    "big": replace(outside.SIZES["big"], num_hidden_layers=3, compress_ratios=(1, 4, 128)),
}
WIDE = {torch.float32: torch.float64}


class InDouble(TorchFunctionMode):
    """Code that rounds to float32 on its way, and makes float32 constants, does all that in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call, with float64 wherever it says float32."""
        kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **kwargs)


def wide(value: Any) -> Any:
    """float64 for float32, else the same."""
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def fresh_model(size: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of its own for a test that changes it."""
    model = build_causal_model(CONFIGS[size], vocab_size=VOCAB, seed=1)
    return model if dtype == torch.float32 else reloaded(model, dtype)


def reloaded(model: Any, dtype: torch.dtype, folder: str | None = None) -> Any:
    """The model as from_pretrained gives it."""
    from tempfile import TemporaryDirectory

    with nullcontext(folder) if folder else TemporaryDirectory() as place:
        model.save_pretrained(place)
        return transformers.DeepseekV4ForCausalLM.from_pretrained(
            place, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).requires_grad_(False)


@cache
def untouched(size: str) -> Any:
    """The model that nobody enables."""
    return fresh_model(size)


@cache
def in_double(size: str) -> Any:
    """`untouched` in float64."""
    return widened(untouched(size))


def widened(model: Any) -> Any:
    """The same weights in float64; the constants are computed in float64, not widened from float32."""
    with InDouble():
        double = type(model)(model.config).double()
    double.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return double.eval().requires_grad_(False)


def prompt(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Token ids int64[1, num_tokens]."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, (1, num_tokens)))


def logits_of(model: Any, ids: torch.Tensor, chunks: Sequence[int] | None = None) -> torch.Tensor:
    """One request alone, chunk by chunk through a cache of transformers: [num_tokens, vocab]."""
    past = transformers.DynamicCache(config=model.config)
    parts = ids.split(list(chunks) if chunks else ids.shape[1], dim=1)
    return torch.cat([model(part, cache=past, use_cache=True).logits[0] for part in parts])


def exact_logits(size: str, ids: torch.Tensor) -> torch.Tensor:
    """One request alone, by transformers' own code in float64."""
    with InDouble():
        return logits_of(in_double(size), ids)


def exact_logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same of any model that is not enabled."""
    with InDouble():
        return logits_of(widened(model), ids)


def packed_logits(
    model: Any, parallel: Parallel | None, steps: Sequence[dict[str, int]], prompts: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The enabled model's logits of every request, whose tokens come step after step: [num_tokens, vocab] each."""
    num_tokens = sum(ids.shape[1] for ids in prompts.values())
    # Small blocks and more of them than fit exactly: requests lie scattered.
    session = enable(
        model, num_tokens=num_tokens, max_requests=len(prompts), parallel=parallel, block_size=16, cmp_block_size=8
    )
    done, parts = dict.fromkeys(prompts, 0), {name: [] for name in prompts}
    for new_tokens in steps:
        row = torch.cat([prompts[name][:, done[name] : done[name] + new] for name, new in new_tokens.items()], dim=1)
        with session.step(new_tokens) as step:
            logits = model(input_ids=row, position_ids=step.position_ids).logits[0]
        for name, rows in step.rows.items():
            parts[name].append(logits[rows])
            done[name] += new_tokens[name]
    disable(model)
    assert done == {name: ids.shape[1] for name, ids in prompts.items()}, "the steps must feed every token"
    return {name: torch.cat(rows) for name, rows in parts.items()}
