"""The comparisons accept what they should and can fail at everything else."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.compare import assert_double, assert_same, assert_same_selection, assert_within_budget, scoring_noise, ulp


class Pair(NamedTuple):
    first: object
    second: object


class Couple(NamedTuple):
    first: object
    second: object


I32 = np.array([1, 2], np.int32)


@pytest.mark.parametrize(
    "value",
    [3, "a", None, I32, np.array([np.nan, np.inf]), Pair(I32, 4), [I32, (1, 2)], torch.tensor([1.0], dtype=torch.half)],
)
def test_a_value_is_the_same_as_itself(value):
    assert_same(value, value)


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (3, 4, "3, expected 4"),
        (3, 3.0, "int, expected float"),
        (True, 1, "bool, expected int"),
        (I32, np.array([1, 3], np.int32), r"\[1\]: 2, expected 3 \(1 of 2 differ\)"),
        (I32, I32.astype(np.int64), "dtype int32, expected int64"),
        (I32, I32[None], "shape"),
        ([1, 2], I32, "no array"),
        (np.array([np.nan]), np.array([1.0]), "nan, expected 1"),
        (np.array([1.0]), np.array([np.nan]), "1.0, expected nan"),
        (Pair(I32, 4), Couple(I32, 4), "is not"),
        (Pair(I32, 4), Pair(I32, 5), r"value\.second: 4, expected 5"),
        ([1], [1, 2], "1 items, expected 2"),
        (1, [1], "no sequence"),
    ],
)
def test_any_difference_is_reported(actual, expected, text):
    with pytest.raises(AssertionError, match=text):
        assert_same(actual, expected)


def rows(*lists):
    return np.array(lists, np.int32)


SCORES = np.array([[3.0, 1.0, 1.0 + 1e-9, 0.5, np.nan]])


@pytest.mark.parametrize(
    "actual", [rows([0, 2]), rows([2, 0]), rows([0, 1])], ids=["same", "another order", "swap of a near tie"]
)
def test_a_choice_may_reorder_and_swap_near_ties(actual):
    assert_same_selection(actual, rows([0, 2]), SCORES, 1e-8)


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (rows([0, 1]), rows([0, 3]), "entry 1 scores 1.0, entry 3 0.5"),
        (rows([0, 4]), rows([0, 3]), "entry 4 scores -inf"),
        (rows([0, 0]), rows([0, 2]), "twice"),
        (rows([0, -1]), rows([0, 2]), "1 entries, expected 2"),
        (rows([0, 2]), rows([0, -1]), "2 entries, expected 1"),
        (rows([-1, 0]), rows([0, -1]), "comes last"),
        (rows([0, -2]), rows([0, -1]), "nothing below"),
        (rows([0, 9]), rows([0, 2]), "no such entry"),
        (rows([0, 2]).astype(np.int64), rows([0, 2]), "dtype"),
        (rows([0, 2, -1]), rows([0, 2]), "shape"),
    ],
)
def test_another_choice_is_reported(actual, expected, text):
    with pytest.raises(AssertionError, match=text):
        assert_same_selection(actual, expected, SCORES, 1e-8)


def test_one_near_tie_does_not_excuse_another_swap():
    with pytest.raises(AssertionError, match=r"entry 1 scores 1\.0, entry 0 3\.0"):
        assert_same_selection(rows([1, 3]), rows([0, 2]), SCORES, 1e-8)


def test_the_noise_grows_with_the_plain_error():
    exact = np.array([[1.0, 2.0], [1.0, -np.inf]])
    low = np.array([[1.0, 2.5], [1.0, -np.inf]], np.float32)
    two_ulps = np.array([2 * 2.0**-22, 2 * 2.0**-23])
    assert_same(scoring_noise(exact, low), 2 * (two_ulps + np.array([1.0, 0.0])))


@pytest.mark.parametrize(("dtype", "next_number"), [("float64", 2.0**-52), ("bfloat16", 2.0**-7)])
def test_an_ulp_is_the_step_to_the_next_number(dtype, next_number):
    assert ulp(1.0, dtype) == next_number
    assert ulp(1.99, dtype) == next_number
    assert ulp(4.0, dtype) == 4 * next_number
    assert ulp(0.0, dtype) == 0


ORACLE = np.array([[1.0, -2.0], [np.inf, np.nan]])
LOW = np.array([[1.0, -2.0 + 1e-3], [np.inf, np.nan]], np.float32)


@pytest.mark.parametrize("error", [0.0, 1.9e-3, -1.9e-3])
def test_twice_the_plain_error_is_within_budget(error):
    assert_within_budget(np.array([[1.0, -2.0 + error], [np.inf, np.nan]], np.float32), ORACLE, LOW)


def test_two_ulps_are_within_budget_of_an_exact_baseline():
    assert_within_budget(np.array([1 + 2**-22], np.float32), [1.0], np.ones(1, np.float32))
    with pytest.raises(AssertionError, match="over budget"):
        assert_within_budget(np.array([1 + 3 * 2**-23], np.float32), [1.0], np.ones(1, np.float32))


def test_where_the_oracle_is_zero_so_must_the_output_be():
    assert_within_budget(np.zeros(2, np.float32), np.zeros(2), np.zeros(2, np.float32))
    with pytest.raises(AssertionError, match="over budget"):
        assert_within_budget(np.array([0, 1e-30], np.float32), np.zeros(2), np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("actual", "text"),
    [
        ([[1.0, -2.01], [np.inf, np.nan]], r"largest error 0.01 over budget .* worst at \[0, 1\]"),
        ([[np.nan, -2.0], [np.inf, np.nan]], r"\[0, 0\]: nan, expected 1.0: NaN sits elsewhere"),
        ([[1.0, -2.0], [-np.inf, np.nan]], "inf sits elsewhere"),
        ([[1.0, -2.0], [np.inf, 0.0]], "NaN sits elsewhere"),
        ([[1.0, -np.inf], [np.inf, np.nan]], "-inf sits elsewhere"),
        ([[1.0, -2.0]], "shape"),
    ],
)
def test_an_error_over_budget_is_reported(actual, text):
    with pytest.raises(AssertionError, match=text):
        assert_within_budget(np.array(actual, np.float32), ORACLE, LOW)


def test_many_small_errors_break_the_frobenius_budget():
    exact = np.ones(100)
    low = np.ones(100, np.float32)
    low[0] += 0.01
    with pytest.raises(AssertionError, match="Frobenius"):
        assert_within_budget((exact + 0.01).astype(np.float32), exact, low)


def test_the_baseline_must_be_finite_and_of_the_same_dtype():
    with pytest.raises(AssertionError, match="plain computation is not finite"):
        assert_within_budget(np.ones(1, np.float32), [1.0], np.array([np.inf], np.float32))
    with pytest.raises(AssertionError, match="dtype"):
        assert_within_budget(np.ones(1, np.float64), [1.0], np.ones(1, np.float32))


def test_the_worst_of_several_plain_orders_counts():
    exact, low = np.ones(1), np.ones(1, np.float32)
    orders = [low, low + np.float32(0.01), low]
    assert_within_budget(low + np.float32(0.015), exact, orders)
    with pytest.raises(AssertionError, match=r"over budget .* plain \[1\.0, 1\.00\d*, 1\.0\]"):
        assert_within_budget(low + np.float32(0.03), exact, orders)
    with pytest.raises(AssertionError, match="not finite"):
        assert_within_budget(low, exact, [low, low * np.float32(np.nan)])


def test_a_torch_bfloat16_tensor_has_wide_ulps():
    exact, low = np.array([1.0]), torch.ones(1, dtype=torch.bfloat16)
    assert_within_budget(torch.tensor([1 + 2**-6], dtype=torch.bfloat16), exact, low)
    with pytest.raises(AssertionError, match="over budget"):
        assert_within_budget(torch.tensor([1 + 2**-5], dtype=torch.bfloat16), exact, low)


@pytest.mark.parametrize("actual", [[1.0 + 1e-11, -np.inf], [1.0, 0.0], [np.nan, -np.inf]])
def test_a_double_off_by_more_than_rounding_is_reported(actual):
    assert_double(np.array([1.0 + 1e-13, -np.inf]), [1.0, -np.inf])
    with pytest.raises(AssertionError):
        assert_double(np.array(actual), [1.0, -np.inf])
