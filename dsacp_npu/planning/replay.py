"""A trace batch by batch: what fixed schemes take, and what choosing for each batch would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.planning.choice import plan_of
from dsacp_npu.planning.costs import Planner
from dsacp_npu.planning.schemes import Scheme
from dsacp_npu.planning.shares import Batch
from dsacp_ref.spec import UnsupportedError, contract_error

__all__ = ["Replay", "replayed"]


class Replay(NamedTuple):
    """The batches of a trace under some schemes.

    Fields:
        schemes: the schemes that were compared.
        tokens: int64[batches], new tokens of each.
        seconds: float64[batches, schemes]; inf where a batch does not fit into a chip's memory.
    """

    schemes: tuple[Scheme, ...]
    tokens: NDArray[np.int64]
    seconds: NDArray[np.float64]

    @property
    def fixed(self) -> NDArray[np.float64]:
        """float64[schemes]: seconds of all batches under one scheme."""
        return self.seconds.sum(axis=0)

    @property
    def chosen(self) -> NDArray[np.int64]:
        """int64[batches]: the fastest scheme of each."""
        return self.seconds.argmin(axis=1)

    @property
    def best(self) -> NDArray[np.float64]:
        """float64[batches]: seconds of each under its fastest scheme."""
        return self.seconds.min(axis=1)


def replayed(
    planner: Planner,
    batches: Iterable[Batch],
    schemes: Sequence[Scheme],
) -> Replay:
    """Every batch under every scheme.

    Args:
        planner: Planner of a model and a chip.
        batches: at least one Batch.
        schemes: at least one Scheme; each has to work for the model.

    Returns:
        Replay.

    Raises:
        ContractError: no batch or no scheme.
        UnsupportedError: a batch that fits under none of them.
    """
    if not schemes:
        raise contract_error("schemes", "hold at least one scheme", "none", "see dsacp_npu.planning.schemes")
    tokens, seconds = [], []
    for batch in batches:
        plan = plan_of(planner, batch, schemes[0].cp_size * schemes[0].tp_size, schemes)
        by_scheme = {cost.scheme: cost.seconds for cost in plan.costs if plan.fits(cost)}
        if not by_scheme:
            which = f"batch {len(tokens)} of {batch.num_tokens} tokens fits under no scheme"
            fix = "use more ranks, or fewer tokens a step"
            raise UnsupportedError(f"{which} into {planner.chip.name}'s memory; {fix}")
        seconds.append([by_scheme.get(scheme, np.inf) for scheme in schemes])
        tokens.append(batch.num_tokens)
    if not tokens:
        raise contract_error("batches", "hold at least one batch", "none")
    return Replay(tuple(schemes), np.array(tokens, np.int64), np.array(seconds))
