"""The grid of `parity`: a cell is one way to run a layer over ranks, in one scenario.

::

    ratio=4,ranks=3,split=zigzag,rows=full,keys=replicate,output=all_to_all,scenario=prefix

Most of the grid repeats itself, so by default a covering set runs: every two values that can meet do meet in some
cell, and so do every ratio and key mode with every split (who owns a window) and with every scenario (what is carried
on). Cells that must be refused are part of it. In the short form of that, pairs alone have to meet, and there are fewer
values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from dsacp_npu.planning import schemes
from dsacp_ref.config import split_rule
from dsacp_ref.spec import ContractError, check_choice, check_int, contract_error

NUM_HEADS = 48  # all rank counts below but 5 divide heads and groups; two heads a group, so that wrong grouping shows
O_GROUPS = 24

# Pages of 128 hold whole windows of both ratios, pages of 8 those of ratio 4, pages of 6 of neither.
SPLITS = (*schemes.SPLITS, "round_robin_page(8)", "round_robin_page(6)")
RATIOS = (1, 4, 128)
RANKS = (1, 2, 3, 4, 8, 5)
ROWS = ("full", "scattered")
KEYS = ("replicate", "gather_hidden", "gather_kv", "gather_compressed")
OUTPUTS = schemes.OUTPUT_MODES

REFUSED_OF_EACH = 5  # cells of every kind of refusal in the covering set; 1 in the short one

# What the short form has of them, and what of the operators is refused by any split alike.
SHORT_RANKS = (2, 3, 4)
SHORT_SCENARIOS = ("short", "prefix", "mixed", "padded")
CANN_SPLITS = ("contiguous", "contiguous_request", "zigzag", "round_robin", "round_robin_page(128)")


class Cell(NamedTuple):
    """One way to run a layer over ranks, in one scenario; ``str(cell)`` is what `parsed_cell` reads."""

    ratio: int
    ranks: int
    split: str
    rows: str
    keys: str
    output: str
    scenario: str

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self._asdict().items())


def parsed_cell(text: str, scenarios: Sequence[str] | None) -> Cell:
    """The cell that a text names; all seven names must be there, in any order. None takes any scenario.

    >>> text = "ratio=4,ranks=3,split=zigzag,rows=full,keys=replicate,output=all_to_all,scenario=long"
    >>> str(parsed_cell(text, ["long"])) == text
    True
    """
    values = named_values(text, Cell._fields)
    numbers = {name: int_of(name, values[name], most) for name, most in (("ratio", RATIOS[-1]), ("ranks", 64))}
    if numbers["ratio"] not in RATIOS:
        raise contract_error("--cell ratio", f"be one of {RATIOS}", numbers["ratio"])
    for name, words in (("rows", ROWS), ("keys", KEYS), ("output", OUTPUTS), ("scenario", scenarios)):
        check_choice(f"--cell {name}", values[name], words if words is not None else [values[name]])
    return Cell(
        numbers["ratio"],
        numbers["ranks"],
        split_of(values["split"]),
        *(values[name] for name in ("rows", "keys", "output", "scenario")),
    )


def named_values(text: str, names: Sequence[str]) -> dict[str, str]:
    """The values of a cell's text, once each name is found to be there once."""
    values: dict[str, str] = {}
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        check_choice("--cell", name, names, "write name=value, parted by commas")
        if not equals or name in values:
            raise contract_error("--cell", f"give {name} once, as {name}=value", repr(text))
        values[name] = value
    missing = [name for name in names if name not in values]
    if missing:
        raise contract_error("--cell", f"give {', '.join(missing)}", repr(text), "a failing row prints its whole cell")
    return values


def int_of(name: str, text: str, most: int) -> int:
    """A number of a cell's text."""
    if not text.isdecimal():
        raise contract_error(f"--cell {name}", "be an int", repr(text))
    return check_int(f"--cell {name}", int(text), 1, most)


def split_of(text: str) -> str:
    """The split rule of a cell's text, by its own name."""
    try:
        return str(split_rule(text))
    except ContractError as error:
        raise ContractError(f"--cell {error}") from None


# --- what must be refused: the tables of docs/design.md, section 4, written down a second time ---

KEYS_OF_ROWS = {
    "full": ("replicate", "gather_kv", "gather_compressed"),
    "scattered": ("gather_hidden", "gather_kv", "gather_compressed"),
}
# The compressor operator projects and pools in one call: there is nothing between them to gather.
NOT_IN_CANN = ("gather_kv", "gather_compressed")


def refusals(cell: Cell, backend: str = "numpy") -> tuple[str, ...]:
    """The names of the arguments that may be refused in this cell; none in a cell that must run.

    This must not ask `dsacp_ref.config.check_combination`, which it is compared with.

    >>> cell = Cell(4, 2, "round_robin", "full", "gather_compressed", "all_to_all", "long")
    >>> refusals(cell), refusals(cell._replace(ratio=1)), refusals(cell._replace(rows="scattered", keys="replicate"))
    (('split',), (), ('key_mode',))
    """
    return tuple(str(name) for name, *_ in refused_kinds(cell, backend))


def refused_kinds(cell: Cell, backend: str = "numpy") -> Iterator[tuple[object, ...]]:
    """Every reason to refuse this cell: the argument's name, then the values that exclude each other."""
    if cell.keys not in KEYS_OF_ROWS[cell.rows]:
        yield "key_mode", cell.rows, cell.keys
    name, _, size = cell.split.rstrip(")").partition("(")
    strided = {"round_robin": 1, "round_robin_page": int(size or 1)}.get(name)
    if cell.keys == "gather_compressed" and strided and strided % cell.ratio:
        yield "split", cell.split, cell.ratio
    if cell.output == "all_to_all" and (NUM_HEADS % cell.ranks or O_GROUPS % cell.ranks):
        yield "cp_size", cell.ranks, cell.output
    if backend == "cann" and cell.keys in NOT_IN_CANN:
        yield "backend", cell.keys


# --- which cells run ---


def all_cells(scenarios: Sequence[str], backend: str = "numpy", *, short: bool = False) -> list[Cell]:
    """The whole grid; of the short form, all that it may choose from."""
    ranks = SHORT_RANKS if short else RANKS
    splits = CANN_SPLITS if short and backend == "cann" else SPLITS
    if short:
        scenarios = [name for name in scenarios if name in SHORT_SCENARIOS] or scenarios
    return [Cell(*values) for values in product(RATIOS, ranks, splits, ROWS, KEYS, OUTPUTS, scenarios)]


def covering_set(scenarios: Sequence[str], seed: int, backend: str = "numpy", *, short: bool = False) -> list[Cell]:
    """Few cells in which every legal pair of values meets, the ways of engines, and some of every kind of refusal.

    Greedy: the cell with most new meetings is next; the seed decides between equals.
    """
    rng = np.random.default_rng(seed)
    grid = all_cells(scenarios, backend, short=short)
    grid = [grid[i] for i in rng.permutation(len(grid))]
    legal = [cell for cell in grid if not refusals(cell, backend)]
    triples = tuple(("ratio", "keys", third) for third in ("split", "scenario") if not short or backend == "cann")
    groups = [
        [i for i, cell in enumerate(legal) if (cell.ratio, cell[2:6]) == (ratio, way)]
        for ratio, way in product(RATIOS, schemes.ENGINES.values())
    ]
    chosen = [legal[i] for i in greedy_cover(meetings(legal, triples), [group for group in groups if group])]
    count: dict[tuple[object, ...], int] = {}
    for cell in grid:
        kinds = list(refused_kinds(cell, backend))
        if len(kinds) == 1 and count.setdefault(kinds[0], 0) < (
            1 if short else REFUSED_OF_EACH
        ):  # one reason: its text is known
            count[kinds[0]] += 1
            chosen.append(cell)
    return chosen


def greedy_cover(met: np.ndarray, first: Sequence[Sequence[int]] = ()) -> list[int]:
    """Which rows of `meetings` are enough for all of them: one of each of the first groups, then the best of all."""
    open_meetings = np.zeros(int(met.max()) + 1, np.bool_)
    open_meetings[met] = True
    chosen: list[int] = []

    def choose(candidates: np.ndarray) -> None:
        best = candidates[int(open_meetings[met[candidates]].sum(axis=1).argmax())]
        open_meetings[met[best]] = False
        chosen.append(int(best))

    for group in first:
        choose(np.array(group))
    while open_meetings.any():
        choose(np.arange(len(met)))
    return chosen


def meetings(cells: Sequence[Any], triples: Sequence[tuple[str, ...]] = ()) -> np.ndarray:
    """One number for each pair of values, and for each triple of these fields, that meet in a cell."""
    columns = [np.unique(np.array(column), return_inverse=True) for column in zip(*cells, strict=True)]
    sizes = [len(values) for values, _ in columns]
    place = {name: i for i, name in enumerate(cells[0]._fields)}
    more = [tuple(place[name] for name in triple) for triple in triples]
    numbers, first = [], 0
    for group in (*combinations(range(len(sizes)), 2), *more):
        shape = [sizes[i] for i in group]
        numbers.append(first + np.ravel_multi_index([columns[i][1] for i in group], shape))
        first += math.prod(shape)
    return np.stack(numbers, axis=1)


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """The cells in the order in which the factors name their values, scenarios by the alphabet."""

    def key(cell: Cell) -> tuple[object, ...]:
        choices = ROWS.index(cell.rows), KEYS.index(cell.keys), OUTPUTS.index(cell.output)
        split = SPLITS.index(cell.split) if cell.split in SPLITS else len(SPLITS)  # --cell takes other pages too
        return cell.ratio, cell.ranks, split, *choices, cell.scenario

    return sorted(cells, key=key)
