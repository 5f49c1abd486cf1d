"""What worker processes do for the tests of `dsacp_npu.parallel`: four ranks, in groups as an engine makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dsacp_npu import distributed
from dsacp_npu.distributed import Ranks, connect, ranks_of
from dsacp_npu.parallel import Parallel, parallel_of
from dsacp_ref.config import Topology, topology
from tests.distributed.work import told

ROWS, COLUMNS, WORLD = [(0, 1), (2, 3)], [(0, 2), (1, 3)], (0, 1, 2, 3)
COPIES = {"dp_size": 2, "enable_dsa_cp": True}
SQUARE = {"cp_size": 2, "tp_size": 2}
Groups = dict[tuple[int, ...], Any]


@contextmanager
def engine(ranks: Ranks, directory: str) -> Iterator[Groups]:
    """Torch's default group and every pair that a grid of two by two has, made on every rank in one order."""
    place = {"world_size": ranks.cp_size, "rank": ranks.cp_rank}
    dist.init_process_group("gloo", init_method=f"file://{directory}/engine", **place)
    try:
        yield {WORLD: dist.group.WORLD} | {members: dist.new_group(list(members)) for members in (*ROWS, *COLUMNS)}
    finally:
        dist.destroy_process_group()


def group_of(rank: int, cut: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The one with this rank."""
    return next(members for members in cut if rank in members)


def own(groups: Groups, members: tuple[int, ...], rank: int) -> Ranks:
    """The group as `Ranks`, checked between its members."""
    return ranks_of(groups[members], len(members), members.index(rank))


def seen(one: Parallel, rank: int) -> list[Any]:
    """Place on each axis, and the global ranks that an exchange over each group reaches."""
    reached = []
    for ranks in (one.cp, one.tp):
        numbers = torch.tensor([rank], dtype=torch.int64)
        reached.append(distributed.all_gather(numbers, ranks, [1] * ranks.cp_size).tolist() if ranks else None)
    return [one.cp_size, one.cp_rank, one.tp_size, one.tp_rank, *reached]


def in_step(groups: Groups, rank: int) -> list[int]:
    """All ranks, if all come here: none is left in a collective of its own."""
    numbers = torch.tensor([rank], dtype=torch.int64)
    return distributed.all_gather(numbers, own(groups, WORLD, rank), [1] * len(WORLD)).tolist()


def two_copies(ranks: Ranks, directory: str) -> list[Any]:
    """DP 2 x (CP == TP 2): the right groups, then wrong ones, then what shows that nobody waits."""
    rank, options = ranks.cp_rank, {"enable_dsa_cp": True}
    grid = topology(4, rank=rank, **COPIES)
    with engine(ranks, directory) as groups:
        row, column = (own(groups, group_of(rank, cut), rank) for cut in (ROWS, COLUMNS))
        whole = own(groups, WORLD, rank)
        return [
            seen(parallel_of(options, tp=row, topology=grid), rank),
            seen(parallel_of(options, tp=row, cp=row), rank),
            told(lambda: parallel_of(options, tp=column, topology=grid)),
            told(lambda: parallel_of(options, tp=whole, topology=grid)),
            told(lambda: parallel_of(options, tp=row, cp=column, topology=grid)),
            told(lambda: parallel_of({**options, "cp_size": 2}, tp=whole)),
            told(lambda: ranks_of(groups[WORLD], grid.tp_size, grid.tp_rank)),
            in_step(groups, rank),
        ]


def square(ranks: Ranks, directory: str) -> list[Any]:
    """CP 2 x TP 2 with the switch off: the same."""
    rank, options = ranks.cp_rank, {"cp_size": 2}
    grid = topology(4, rank=rank, **SQUARE)
    with engine(ranks, directory) as groups:
        row, column = (own(groups, group_of(rank, cut), rank) for cut in (ROWS, COLUMNS))
        whole = own(groups, WORLD, rank)
        return [
            seen(parallel_of(options, cp=column, tp=row, topology=grid), rank),
            seen(parallel_of(options, cp=column, tp=row), rank),
            told(lambda: parallel_of(options, cp=row, tp=column, topology=grid)),
            told(lambda: parallel_of(options, cp=row, tp=row)),
            told(lambda: parallel_of({"cp_size": 4}, cp=whole, tp=row)),
            told(lambda: parallel_of(options, cp=whole, tp=row)),
            told(lambda: parallel_of(options, cp=Ranks(groups[WORLD], 2, rank // 2), tp=row)),
            in_step(groups, rank),
        ]


def met(ranks: Ranks, directory: str, options: dict[str, Any], grid_options: dict[str, Any]) -> list[Any]:
    """The right groups, made by `connect` without an engine: torch does not keep their members."""
    rank = ranks.cp_rank
    grid: Topology = topology(4, rank=rank, **grid_options)
    made = {}
    for axis in ("tp",) if grid.cp_group == grid.tp_group else ("tp", "cp"):
        members = getattr(grid, f"{axis}_group")
        place = f"file://{directory}/{axis}-{members[0]}"
        made[axis] = connect(place, len(members), members.index(rank), timeout=30.0)
    try:
        found = [seen(parallel_of(options, **made, topology=grid), rank)]
        if "cp" in made:
            found.append(told(lambda: parallel_of(options, cp=made["cp"], tp=made["cp"])))
        return found
    finally:
        for group in made.values():
            group.close()
