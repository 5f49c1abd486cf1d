"""What worker processes do for the tests of blocks: each function gets this rank's `Ranks` first."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from dsacp_npu import distributed_block
from dsacp_npu.distributed import Ranks

Call = tuple[str, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]


def calls(ranks: Ranks, wanted: list[Call]) -> list[Any]:
    """One call after the other, (function, what stands before the group, what behind it, options); or its refusal."""
    found: list[Any] = []
    for name, own, known, options in wanted:
        try:
            found.append(getattr(distributed_block, name)(*own, ranks, *known, **options))
        except (NotImplementedError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def collectives(ranks: Ranks, wanted: Call) -> list[str]:
    """The collectives that a call makes, by name."""
    made: list[str] = []
    names = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all_single")

    def noted(name: str) -> Any:
        right = getattr(dist, name)

        def collective(*args: Any, **options: Any) -> Any:
            made.append(name)
            return right(*args, **options)

        return collective

    with patch.multiple(dist, **{name: noted(name) for name in names}):
        calls(ranks, [wanted])
    return made
