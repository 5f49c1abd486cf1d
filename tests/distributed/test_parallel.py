"""Groups of four real processes: the right ones work, a wrong one is refused on every member alike, nobody waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import run

pytestmark = pytest.mark.xdist_group("processes")
WORK = "tests.distributed.parallel_work"
GRID = "build the topology with the sizes and the enable_dsa_cp that the groups were made with"
ELSE = "one rank's place in the other axis can be the same; leave topology out if torch counts otherwise"


def place_of(rank: int) -> tuple[int, int, list[int], list[int]]:
    """Row and column of a grid of two by two, and who is in them."""
    row, column = divmod(rank, 2)
    return row, column, [2 * row, 2 * row + 1], [column, column + 2]


def test_two_copies_of_cp_that_is_tp(tmp_path: Path) -> None:
    for rank, found in enumerate(run(4, f"{WORK}:two_copies", [(str(tmp_path),)] * 4)):
        given, derived, exchanged, whole, beside, cut, collective, last = found
        row, column, row_members, column_members = place_of(rank)
        assert given == derived == [2, column, 1, 0, row_members, None]
        # The data-parallel group in its place: on the diagonal its size and this rank's number in it are the same.
        if rank in (0, 3):
            text = f"cp must have the members {row_members} of the topology, got {column_members}; {ELSE}"
        else:
            text = f"topology.cp_rank must be {row}, as in the groups handed in, got {column}; {GRID}"
        assert exchanged == f"ContractError: {text}"
        assert whole == f"ContractError: topology.cp_size must be 4, as in the groups handed in, got 2; {GRID}"
        rule = (
            "ContractError: cp must be the TP group with enable_dsa_cp, got another group of 2 beside a TP group of 2"
        )
        assert beside == f"{rule}; leave cp out, and hand the TP group in as tp"
        # A07: tokens cut by 2, gathered over 4.
        rule = "ContractError: cp_size must be 1 or the TP size 4 with enable_dsa_cp, got 2"
        assert cut == f"{rule}; the CP group is the TP group, and an independent cp_size 2 mismatches a group of 4"
        assert collective.startswith("ContractError: cp_size must be 4 on each of the group's 4 members, got [2, 2, 2,")
        assert last == [0, 1, 2, 3]


def test_cp_beside_tp(tmp_path: Path) -> None:
    for rank, found in enumerate(run(4, f"{WORK}:square", [(str(tmp_path),)] * 4)):
        given, derived, exchanged, same, overlapping, other_size, made_up, last = found
        row, column, row_members, column_members = place_of(rank)
        assert given == derived == [2, row, 2, column, column_members, row_members]
        # Rows and columns exchanged: neither size nor rank shows it on the diagonal.
        if rank in (0, 3):
            text = f"cp must have the members {column_members} of the topology, got {row_members}; {ELSE}"
        else:
            text = f"topology.cp_rank must be {column}, as in the groups handed in, got {row}; {GRID}"
        assert exchanged == f"ContractError: {text}"
        rule = "ContractError: cp must share this rank only with tp while enable_dsa_cp is off, got"
        fix = f"beside {row_members}; set enable_dsa_cp to split tokens over the TP group"
        assert same == f"{rule} {row_members} {fix}"
        assert overlapping == f"{rule} [0, 1, 2, 3] {fix}"
        # A07 with the switch off, and the same with a record that hides it.
        rule = "ContractError: cp_size must be 4, the size of the CP group, while enable_dsa_cp is off, got 2"
        hint = "tokens are cut by the size of the group that gathers, or set enable_dsa_cp to split over TP"
        assert other_size == f"{rule}; {hint}"
        text = f"ContractError: cp must be rank {rank} of 4, as in its process group, got rank {rank // 2} of 2"
        assert made_up == f"{text}; make it by ranks_of"
        assert last == [0, 1, 2, 3]


def test_groups_that_torch_does_not_keep(tmp_path: Path) -> None:
    """The same two grids, met at files."""
    copies, square = tmp_path / "copies", tmp_path / "square"
    copies.mkdir()
    square.mkdir()
    on, off = {"enable_dsa_cp": True}, {"cp_size": 2}
    for rank, found in enumerate(run(4, f"{WORK}:met", [(str(copies), on, {"dp_size": 2, **on})] * 4)):
        _, column, row_members, _ = place_of(rank)
        assert found == [[2, column, 1, 0, row_members, None]]
    for rank, found in enumerate(run(4, f"{WORK}:met", [(str(square), off, {"tp_size": 2, **off})] * 4)):
        row, column, row_members, column_members = place_of(rank)
        rule = "ContractError: cp must share this rank only with tp while enable_dsa_cp is off"
        fix = "set enable_dsa_cp to split tokens over the TP group"
        assert found == [
            [2, row, 2, column, column_members, row_members],
            f"{rule}, got the same group beside it; {fix}",
        ]
