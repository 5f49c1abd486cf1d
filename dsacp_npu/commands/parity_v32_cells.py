"""The grid of `parity --model v32`: a cell is one way to run a stack of V3.2 blocks over ranks, in one scenario.

::

    split=zigzag,ranks=3,experts=split,cache=fp8,scenario=prefix

As in `parity_cells`, a covering set runs by default: every two values that can meet do meet in some cell, and so do
every split with every scenario and cache (where a strided or a cut piece meets a page and its codes). In the short form
pairs alone have to meet, of fewer values. Cells that must be refused are part of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from dsacp_npu.commands.parity_cells import (
    REFUSED_OF_EACH,
    SHORT_RANKS,
    SPLITS,
    greedy_cover,
    int_of,
    meetings,
    named_values,
    split_of,
)
from dsacp_ref.spec import check_choice

INTER = 48  # rows of an expert's w1: all rank counts below but 5 divide them
RANKS = (1, 2, 3, 4, 8, 5)
EXPERTS = ("whole", "split", "sliced")
CACHES = ("float", "fp8")

SHORT_SPLITS = ("zigzag", "round_robin", "contiguous", "round_robin_page(6)")
SHORT_SCENARIOS = ("few", "prefix", "mixed", "padded")


class StackCell(NamedTuple):
    """One way to run a stack over ranks, in one scenario; ``str(cell)`` is what `parsed_stack_cell` reads."""

    split: str
    ranks: int
    experts: str
    cache: str
    scenario: str

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self._asdict().items())


def parsed_stack_cell(text: str, scenarios: Sequence[str] | None, backend: str = "numpy") -> StackCell:
    """The cell that a text names; all five names must be there, in any order. None takes any scenario.

    >>> str(parsed_stack_cell("ranks=2,split=in-seq-split,experts=whole,cache=float,scenario=long", ["long"]))
    'split=zigzag,ranks=2,experts=whole,cache=float,scenario=long'
    """
    values = named_values(text, StackCell._fields)
    ranks = int_of("ranks", values["ranks"], 64)
    for name, words in (("experts", experts_of(backend)), ("cache", CACHES), ("scenario", scenarios)):
        check_choice(f"--cell {name}", values[name], words if words is not None else [values[name]])
    return StackCell(split_of(values["split"]), ranks, values["experts"], values["cache"], values["scenario"])


def experts_of(backend: str) -> tuple[str, ...]:
    """The expert modes that a backend is tried with: no operator is in them, so on cann the layer alone runs."""
    return EXPERTS[:1] if backend == "cann" else EXPERTS


# --- what must be refused ---


def stack_refusals(cell: StackCell, backend: str = "numpy") -> tuple[str, ...]:
    """What the refusal of this cell may begin with; nothing for a cell that must run.

    >>> cell = StackCell("zigzag", 5, "split", "float", "long")
    >>> stack_refusals(cell), stack_refusals(cell._replace(experts="whole"))
    (('cp_size',), ())
    """
    return tuple(str(name) for name, *_ in refused_kinds(cell, backend))


def refused_kinds(cell: StackCell, backend: str = "numpy") -> Iterator[tuple[object, ...]]:
    """Every reason to refuse this cell: how the refusal begins, then the values that exclude each other."""
    if cell.experts != "whole" and INTER % cell.ranks:
        yield "cp_size", cell.ranks, cell.experts
    if backend == "cann" and cell.cache == "fp8":  # the layout that its operators read is not known
        yield "lightning_indexer", cell.cache


# --- which cells run ---


def all_stack_cells(scenarios: Sequence[str], backend: str = "numpy", *, short: bool = False) -> list[StackCell]:
    """The whole grid; of the short form, all that it may choose from."""
    if short:
        scenarios = [name for name in scenarios if name in SHORT_SCENARIOS] or scenarios
    splits, ranks = (SHORT_SPLITS, SHORT_RANKS) if short else (SPLITS, RANKS)
    return [StackCell(*values) for values in product(splits, ranks, experts_of(backend), CACHES, scenarios)]


def stack_covering_set(
    scenarios: Sequence[str], seed: int, backend: str = "numpy", *, short: bool = False
) -> list[StackCell]:
    """Few cells in which every legal pair of values meets, and some of every kind of refusal."""
    rng = np.random.default_rng(seed)
    grid = all_stack_cells(scenarios, backend, short=short)
    grid = [grid[i] for i in rng.permutation(len(grid))]
    legal = [cell for cell in grid if not stack_refusals(cell, backend)]
    triples = () if short else (("split", "cache", "scenario"),)
    chosen = [legal[i] for i in greedy_cover(meetings(legal, triples))]
    count: dict[tuple[object, ...], int] = {}
    for cell in grid:
        kinds = list(refused_kinds(cell, backend))
        if len(kinds) == 1 and count.setdefault(kinds[0], 0) < (1 if short else REFUSED_OF_EACH):
            count[kinds[0]] += 1
            chosen.append(cell)
    return chosen


def stack_cells_in_order(cells: Sequence[StackCell]) -> list[StackCell]:
    """The cells in the order in which the factors name their values, scenarios by the alphabet."""

    def key(cell: StackCell) -> tuple[object, ...]:
        split = SPLITS.index(cell.split) if cell.split in SPLITS else len(SPLITS)  # --cell takes other pages too
        return split, cell.ranks, EXPERTS.index(cell.experts), CACHES.index(cell.cache), cell.scenario

    return sorted(cells, key=key)
