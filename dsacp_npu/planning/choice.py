"""The best scheme for a batch, and the lengths from which one way beats another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from dsacp_npu.planning.chips import Chip
from dsacp_npu.planning.costs import GB, Cost, Planner
from dsacp_npu.planning.flows import output_flows
from dsacp_npu.planning.models import Model
from dsacp_npu.planning.schemes import Refused, Scheme, schemes_of, tensor_parallel, why_not
from dsacp_npu.planning.shares import Batch, Shares, batch_of, shares_of
from dsacp_ref.spec import UnsupportedError

__all__ = ["BreakEven", "Plan", "break_even", "pays_from", "plan_of"]

LONGEST = 1 << 20  # tokens that V4 is made for: no break-even is looked for beyond
# For one request without a prefix, which the other rules split as one of these does, or less evenly.
SPLITS_OF_ONE = ("contiguous", "zigzag", "round_robin_page(128)")


class Plan(NamedTuple):
    """All schemes for one batch.

    Fields:
        batch: Batch.
        chip: Chip.
        costs: list of Cost, fastest first: those that fit into the chip's memory, then those that do not.
        refused: list of Refused.
    """

    batch: Batch
    chip: Chip
    costs: list[Cost]
    refused: list[Refused]

    def fits(self, cost: Cost) -> bool:
        """Whether the peak is within the chip's memory."""
        return cost.memory.total <= self.chip.memory * GB

    @property
    def best(self) -> Cost:
        """The fastest scheme that fits.

        Returns:
            Cost.

        Raises:
            UnsupportedError: none fits.
        """
        if not self.fits(self.costs[0]):
            least = min(self.costs, key=lambda cost: cost.memory.total)
            raise UnsupportedError(
                f"no scheme fits into {self.chip.memory:g} GB of {self.chip.name}; the least needs "
                f"{least.memory.total / GB:.1f} GB ({least.scheme.topology}); use more ranks, or fewer tokens a step"
            )
        return self.costs[0]

    @property
    def tensor_parallel(self) -> Cost | None:
        """Plain TP; None where it is refused."""
        return next((cost for cost in self.costs if cost.scheme.cp_size == 1), None)


def plan_of(planner: Planner, batch: Batch, num_ranks: int, schemes: Iterable[Scheme] | None = None) -> Plan:
    """The cost of a batch under every scheme.

    Args:
        planner: Planner of a model and a chip.
        batch: Batch.
        num_ranks: int >= 1.
        schemes: the schemes to compare; None for all.

    Returns:
        Plan.

    Raises:
        ContractError: no ranks.
        UnsupportedError: no scheme works on so many ranks.
    """
    known: dict[tuple[int, str], Shares] = {}
    found, refused = schemes_of(planner.model, num_ranks) if schemes is None else (list(schemes), [])
    if not found:
        raise UnsupportedError(f"no scheme of {planner.model.name} works on {num_ranks} ranks: {refused[0].reason}")
    costs = [planner.cost(batch, scheme, known) for scheme in found]
    capacity = planner.chip.memory * GB
    costs.sort(key=lambda cost: (cost.memory.total > capacity, cost.seconds))
    return Plan(batch, planner.chip, costs, refused)


def pays_from(planner: Planner, num_ranks: int) -> int | None:
    """From how many tokens of one request without a prefix splitting tokens is faster than plain TP.

    All ranks split tokens, in the best of the ways that fit for each length. Looked for by doubling and then halving:
    the gain is taken to stay once it is there.

    Args:
        planner: Planner.
        num_ranks: int >= 2.

    Returns:
        int, the first number of tokens; None where plain TP is refused, or wins up to 1M tokens.
    """
    tp = tensor_parallel(num_ranks)
    if any(why_not(tp, kind) for kind in planner.model.kinds):
        return None
    rivals = [
        scheme
        for scheme in schemes_of(planner.model, num_ranks)[0]
        if scheme.cp_size == num_ranks and scheme.split in SPLITS_OF_ONE
    ]

    def pays(tokens: int) -> bool:
        batch = batch_of([tokens])
        best = plan_of(planner, batch, num_ranks, rivals).costs[0]
        return best.seconds < planner.cost(batch, tp).seconds

    return first_that(pays, LONGEST)


class BreakEven(NamedTuple):
    """Where gathering the output weights overtakes moving heads for tokens; tokens of one request, None for never.

    Fields:
        heads_alone: int, by bytes of the all-to-all without the sum that ends it: ``cp_size * W / (2 * H * D)``, W the
            bytes of a layer's output weights.
        num_bytes: int, by all bytes that a layer's output brings.
        seconds: int, by the time of the whole prefill.
    """

    heads_alone: int | None
    num_bytes: int | None
    seconds: int | None


def break_even(planner: Planner, scheme: Scheme) -> BreakEven | None:
    """The first token count at which ``gather_weight`` beats ``all_to_all``, all else as in a scheme.

    Args:
        planner: Planner.
        scheme: Scheme; its output mode does not matter.

    Returns:
        BreakEven; None where ranks cannot exchange heads.
    """
    gathers, moves = (scheme._replace(output_mode=mode) for mode in ("gather_weight", "all_to_all"))
    model, weight = planner.model, planner.precision.weights
    if scheme.cp_size == 1 or any(why_not(each, kind) for each in (gathers, moves) for kind in model.kinds):
        return None
    kind = model.kinds[0]  # the output side is the same in all

    def brings(which: Scheme, shares: Shares, names: tuple[str, ...] = ()) -> int:
        flows = output_flows(kind, which, shares, model.hidden, weight)
        return sum(flow.most for flow in flows if not names or flow.name in names)

    def fewer_alone(tokens: int) -> bool:
        shares = shares_of(batch_of([tokens]), scheme.cp_size, scheme.split)
        weights = brings(gathers, shares, ("output weights",))
        return weights < brings(moves, shares, ("heads for tokens",))

    def fewer(tokens: int) -> bool:
        shares = shares_of(batch_of([tokens]), scheme.cp_size, scheme.split)
        return brings(gathers, shares) < brings(moves, shares)

    def faster(tokens: int) -> bool:
        batch = batch_of([tokens])
        return planner.cost(batch, gathers).seconds < planner.cost(batch, moves).seconds

    return BreakEven(*(first_that(test, LONGEST) for test in (fewer_alone, fewer, faster)))


def first_that(holds: Callable[[int], bool], most: int) -> int | None:
    """The first number from 1 to ``most`` that a condition holds for, if it goes on to hold; None for none."""
    high = 1
    while not holds(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = high // 2  # it does not hold there
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
