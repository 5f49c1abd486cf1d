"""What worker processes do for the tests of V3.2 stacks: each function gets this rank's `Ranks` first."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from dsacp_npu import distributed_mla
from dsacp_npu.distributed import Ranks

Call = tuple[str, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all_single")


def calls(ranks: Ranks, wanted: list[Call]) -> list[Any]:
    """One call after the other, (function, what stands before the group, what behind it, options); or its refusal."""
    found: list[Any] = []
    for name, own, known, options in wanted:
        try:
            found.append(getattr(distributed_mla, name)(*own, ranks, *known, **options))
        except (NotImplementedError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def collectives(ranks: Ranks, wanted: list[Call]) -> list[list[str]]:
    """The collectives that each call makes, by name."""
    made: list[str] = []

    def noted(name: str) -> Any:
        right = getattr(dist, name)

        def collective(*args: Any, **options: Any) -> Any:
            made.append(name)
            return right(*args, **options)

        return collective

    found = []
    with patch.multiple(dist, **{name: noted(name) for name in COLLECTIVES}):
        for call in wanted:
            made.clear()
            (result,) = calls(ranks, [call])
            found.append([result] if isinstance(result, str) else list(made))
    return found


def stack_steps(
    ranks: Ranks, weights: Any, caches: list[Any], config: Any, steps: list[tuple[Any, Any, dict[str, Any]]]
) -> list[Any]:
    """A stack's steps one after the other, every second one written in place; the caches go from step to step."""
    found = []
    for place, (token_ids, batch, options) in enumerate(steps):
        before = [[part.clone() for part in cache] for cache in caches]
        if place % 2:
            out = distributed_mla.mla_stack_over_ranks_(token_ids, weights, caches, batch, config, ranks, **options)
            for cache, own in zip(out.caches, caches, strict=True):
                assert all(new is old for new, old in zip(cache, own, strict=True)), "written elsewhere"
        else:
            out = distributed_mla.mla_stack_over_ranks(token_ids, weights, caches, batch, config, ranks, **options)
            for cache, kept, new in zip(caches, before, out.caches, strict=True):
                for part, copy, fresh in zip(cache, kept, new, strict=True):
                    assert torch.equal(part.nan_to_num(7.0), copy.nan_to_num(7.0)), "an input was written to"
                    assert part.untyped_storage().data_ptr() != fresh.untyped_storage().data_ptr()
        caches = out.caches
        found.append((out.hidden, out.logits, [tuple(part.clone() for part in cache) for cache in caches]))
    return found
