"""The oracle of the block against numbers worked out on paper."""

from __future__ import annotations

import math

from tests.oracles import block


def test_one_row_through_two_inner_channels() -> None:
    """Gates 0 and ln 3: the first is shut, the second gives ln 3 * 3/4 * 2, times 4."""
    row = [math.log(3.0), 2.0]
    output = block.expert(row, [[0, 0], [1, 0]], [[1, 1], [0, 1]], [[5, 4]])
    assert math.isclose(output[0], math.log(3.0) * 0.75 * 2 * 4)


def test_a_limit_cuts_the_gate_above_and_its_partner_on_both_sides() -> None:
    half = 1 / (1 + math.exp(-1.0))
    assert math.isclose(block.expert([1.0], [[9]], [[-7]], [[1]], 1.0)[0], -half)
    assert math.isclose(block.expert([1.0], [[-2]], [[7]], [[1]], 1.0)[0], -2 / (1 + math.exp(2.0)))
    assert block.expert([-1e4], [[1]], [[1]], [[1]]) == [0.0]


def test_who_owns_the_last_rows() -> None:
    """Zigzag, requests of 5, 0 and 3: rank 0 has 0 1 4 5, rank 1 has 2 3 6 7; and a pad row is nobody's."""
    assert block.last_rows([5, 0, 3], [[0, 1, 4, 5], [2, 3, 6, 7]]) == [[(0, 2)], [(2, 3)]]
    assert block.last_rows([1], [[-1], [0, -1]]) == [[], [(0, 0)]]
