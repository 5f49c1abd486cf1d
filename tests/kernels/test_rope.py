"""The rotation of backend `triton` against the reference, and its refusals against the mirror's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import _triton_rows as rows
from dsacp_npu import rope
from dsacp_ref import rope as ref
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.cann.common import assert_near
from tests.compare import assert_same
from tests.maths_strategies import normal, seeds
from tests.mirror.common import case, to_torch, untouched
from tests.mirror.test_rope import HERE, REFUSED, STEPS, TABLE, X
from tests.strategies import fewer

DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])
FUNCTIONS = ("apply_rope", "apply_inverse_rope")


@st.composite
def turns(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    """Vectors and their table: no heads, several axes of heads, more than a tile; channels that do not turn or none."""
    rng = np.random.default_rng(draw(seeds))
    tokens, pairs = draw(st.integers(0, 5)), draw(st.sampled_from([0, 1, 3, 4, 32]))
    plain = draw(st.sampled_from([0, 1, 3, 64, 600]))
    heads = draw(st.sampled_from([(), (1,), (3,), (8,), (33,), (2, 3), (0,)]))
    steps = ref.rope_frequencies(10000.0, 64)[:pairs]
    table = ref.rope_table(rng.integers(-1, 10**6, tokens).astype(np.int32), steps)
    return normal(rng, tokens, *heads, 2 * pairs + plain), *table


@given(turns(), DTYPES, st.sampled_from(FUNCTIONS))
@fewer(3)
def test_it_turns_as_the_reference(call: tuple[np.ndarray, ...], dtype: str, function: str) -> None:
    x, *table = call
    args = (to_torch(x, dtype), *to_torch(tuple(table)))
    assert_near(untouched(getattr(rows, function), args, {}), getattr(ref, function), args, {})


@given(turns(), DTYPES, st.sampled_from(FUNCTIONS))
@fewer(5)
def test_in_place_it_gives_the_same(call: tuple[np.ndarray, ...], dtype: str, function: str) -> None:
    x, *table = to_torch(call)
    x, table = x.to(getattr(torch, dtype)), tuple(table)
    want = getattr(rows, function)(x, *table)
    assert getattr(rows, f"{function}_")(x, *table) is x
    assert_same(x, want)


def test_a_view_is_turned_in_a_copy() -> None:
    x, cos, sin = torch.randn(2, 8, 70), torch.rand(2, 4), torch.rand(2, 4)
    for view in (x.transpose(0, 1)[:2], x[:, ::2], x[..., 5:], x.flip(1)):
        before = view.clone()
        assert torch.equal(rows.apply_rope(view, cos, sin), rows.apply_rope(before, cos, sin))
        assert torch.equal(view, before)


@pytest.mark.parametrize("bad", [bad for bad in REFUSED if bad.function in FUNCTIONS], ids=lambda bad: bad.function)
@pytest.mark.parametrize("form", ["", "_"])
def test_it_refuses_in_the_words_of_the_mirror(bad: Any, form: str) -> None:
    args = to_torch(bad.args)
    with pytest.raises(ContractError) as theirs:
        getattr(rope, bad.function)(*args)
    with pytest.raises(ContractError) as mine:
        getattr(rows, bad.function + form)(*args)
    assert str(mine.value) == str(theirs.value)


HALF, COS, SIN = (part.clone() for part in to_torch((X, TABLE.cos, TABLE.sin)))
MANY = ref.rope_table(HERE, STEPS * 70)
LIMITS = [
    (case("apply_rope", HALF.double(), COS, SIN), "x must have dtype float32 or bfloat16 or float16, got float64"),
    (case("apply_rope", HALF, COS.double(), SIN.double()), "cos must have dtype float32, got float64"),
    (case("apply_inverse_rope", HALF, COS, SIN.bfloat16()), "sin must have dtype float32, got bfloat16"),
    (case("apply_rope_", HALF.mT, COS[:, :1], SIN[:, :1]), "x must be contiguous"),
    (case("apply_rope", torch.ones(3, 300), *map(torch.from_numpy, MANY)), "no tile of apply_rope for"),
]


@pytest.mark.parametrize(("call", "words"), LIMITS, ids=range(len(LIMITS)))
def test_a_limit_is_named(call: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        getattr(rows, call.function)(*call.args)
