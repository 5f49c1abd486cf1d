"""What the tables and the pictures of `plan` show, and in which words."""

from __future__ import annotations

from dsacp_npu.planning.choice import Plan
from dsacp_npu.planning.costs import Cost
from dsacp_npu.planning.schemes import Scheme, engine_of

MOST = 8  # schemes that are shown, besides those that have a name

# A column of the table of layers, and the parts of a layer's time that stand in it.
PARTS = {
    "projections": ("query projections", "key side", "output projection"),
    "attention": ("attention",),
    "index": ("index scores",),
    "experts": ("experts",),
    "residual": ("residual",),
    "exchange": (),
}


def shown_of(plan: Plan) -> list[Cost]:
    """The fastest few that differ, and those that have a name, in order."""
    shown: list[Cost] = []
    for cost in plan.costs:
        fast = len(shown) < MOST and not (shown and alike(cost, shown[-1]))
        if fast or engine_of(cost.scheme):
            shown.append(cost)
    return shown


def alike(cost: Cost, other: Cost) -> bool:
    """Whether two schemes differ in their split alone, and that by nothing."""
    same_words = cost.scheme._replace(split="") == other.scheme._replace(split="")
    return same_words and (cost.seconds, cost.memory) == (other.seconds, other.memory)


def words(scheme: Scheme) -> str:
    """A scheme on one line, with the engine that runs it."""
    text = scheme.topology if scheme.cp_size == 1 else f"{scheme.topology}, {scheme.modes}"
    engine = engine_of(scheme)
    return f"{text} ({engine})" if engine else text
