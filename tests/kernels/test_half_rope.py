"""The rotation in halves of backend `triton` against the reference, and its refusals against the mirror's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from dsacp_npu import _triton_rows, rope
from dsacp_ref import rope as ref
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.cann.common import assert_near
from tests.kernels.test_rope import DTYPES, turns
from tests.mirror.common import to_torch, untouched
from tests.strategies import fewer


@given(turns(), DTYPES)
@fewer(3)
def test_it_turns_as_the_reference(call: tuple[np.ndarray, ...], dtype: str) -> None:
    x, *table = call
    args = (to_torch(x, dtype), *to_torch(tuple(table)))
    assert_near(untouched(_triton_rows.apply_half_rope, args, {}), ref.apply_half_rope, args, {})


def test_a_view_is_turned_in_a_copy() -> None:
    x, cos, sin = torch.randn(2, 8, 70), torch.rand(2, 4), torch.rand(2, 4)
    for view in (x.transpose(0, 1)[:2], x[:, ::2], x[..., 5:], x.flip(1)):
        before = view.clone()
        want = _triton_rows.apply_half_rope(before, cos, sin)
        assert torch.equal(_triton_rows.apply_half_rope(view, cos, sin), want)
        assert torch.equal(view, before)


X, TABLE = torch.ones(2, 3, 8), torch.ones(2, 4)
REFUSED = {
    "a longer table": (X, TABLE[:1], TABLE[:1]),
    "more pairs than channels": (X[..., :7], TABLE, TABLE),
    "halves of two tables": (X, TABLE, TABLE[:, :2]),
    "integers": (X.int(), TABLE, TABLE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_in_the_words_of_the_mirror(name: str) -> None:
    with pytest.raises(ContractError) as theirs:
        rope.apply_half_rope(*REFUSED[name])
    with pytest.raises(ContractError) as mine:
        _triton_rows.apply_half_rope(*REFUSED[name])
    assert str(mine.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((X.double(), TABLE, TABLE), "apply_half_rope on triton: x must have dtype float32 or bfloat16 or float16"),
        ((X, TABLE, TABLE.double()), "apply_half_rope on triton: sin must have dtype float32, got float64"),
    ],
)
def test_a_limit_is_named(args: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        _triton_rows.apply_half_rope(*args)
