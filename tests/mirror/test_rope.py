"""`dsacp_npu.rope` gives what `dsacp_ref.rope` gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsacp_npu.rope
from dsacp_ref.rope import rope_frequencies, rope_table
from tests.compare import assert_same, ulp
from tests.maths_strategies import normal, seeds
from tests.mirror.common import (
    TORCH_DTYPES,
    WAYS,
    Case,
    assert_floats_mirror,
    assert_mirrors,
    assert_refusal_mirrors,
    assert_runs_without_values,
    case,
    functions,
    int32,
    outcome,
    untouched,
)

HERE, STEPS = int32(0, -1, 70), rope_frequencies(10000.0, 4)
X, TABLE = np.ones((3, 2, 6), np.float32), rope_table(HERE, STEPS)
YARN = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position": 65536}

STATIC = [
    case("rope_table", HERE, STEPS),
    case("rope_table", HERE, ()),
    case("apply_rope", X, *TABLE),
    case("apply_inverse_rope", X.astype(np.float64), *TABLE),
    case("apply_half_rope", X, *TABLE),
    case("apply_half_rope", X, TABLE.cos[:, :0], TABLE.sin[:, :0]),
]
REFUSED = [
    case("rope_frequencies", 1.0, 4),
    case("rope_frequencies", "1e4", 4),
    case("rope_frequencies", 1e4, 5),
    case("rope_frequencies", 1e4, 0),
    case("yarn_frequencies", 1e4, 4, **{**YARN, "factor": 0}),
    case("yarn_frequencies", 1e4, 4, **{**YARN, "beta_fast": -1}),
    case("yarn_frequencies", 1e4, 4, **{**YARN, "beta_slow": float("nan")}),
    case("yarn_frequencies", 1e4, 4, **{**YARN, "original_max_position": 0}),
    case("rope_table", HERE.astype(np.int64), STEPS),
    case("rope_table", HERE[None], STEPS),
    case("rope_table", int32(-2), STEPS),
    case("rope_table", HERE, (1.0, float("inf"))),
    case("rope_table", HERE, ("1",)),
    case("apply_rope", 3, *TABLE),
    case("apply_rope", X.astype(int), *TABLE),
    case("apply_rope", X[:2], *TABLE),
    case("apply_rope", X[..., :3], *TABLE),
    case("apply_rope", X, TABLE.cos, TABLE.sin[:, :1]),
    case("apply_rope", X, TABLE.cos.astype(int), TABLE.sin),
    case("apply_inverse_rope", X, TABLE.cos, [0.0]),
    case("apply_inverse_rope", X, TABLE.cos[0], TABLE.sin),
    case("apply_half_rope", None, *TABLE),
    case("apply_half_rope", X[:2], *TABLE),
    case("apply_half_rope", X[..., :3], *TABLE),
    case("apply_half_rope", X, TABLE.cos, TABLE.sin.astype(int)),
]

THETAS = st.sampled_from([10000.0, 160000.0, 1.5, 500000])


@given(THETAS, st.integers(-1, 80))
def test_rope_frequencies_mirrors(theta, rope_head_dim) -> None:
    assert_mirrors("rope", "rope_frequencies", theta, rope_head_dim)


@given(
    THETAS,
    st.integers(1, 40),
    st.floats(0.1, 64),
    st.floats(0.1, 64),
    st.floats(0.1, 64),
    st.integers(1, 2**20),
)
def test_yarn_frequencies_mirrors(theta, half, factor, fast, slow, original) -> None:
    options = {"factor": factor, "beta_fast": fast, "beta_slow": slow, "original_max_position": original}
    assert_mirrors("rope", "yarn_frequencies", theta, 2 * half, **options)


@given(st.lists(st.integers(-2, 2**31 - 1), max_size=6), st.lists(st.floats(-2, 2), max_size=32))
def test_rope_table_mirrors(positions, steps) -> None:
    """Both round float64 cosines once; two libraries' float64 may fall on either side of the middle."""
    reference, mirror = functions("rope", "rope_table")
    want_text, want = outcome(lambda: reference(int32(*positions), steps))
    got_text, got = outcome(lambda: untouched(mirror, (torch.tensor(int32(*positions)), steps), {}))
    assert got_text == want_text
    if want is not None:
        for mine, theirs in zip(got, want, strict=True):
            assert (mine.dtype, mine.shape) == (torch.float32, theirs.shape)
            assert np.abs(mine.numpy() - theirs).max(initial=0) <= ulp(0.5, "float32")


@st.composite
def turns(draw: st.DrawFn):
    """Vectors and their table: heads or none, channels that do not turn or none, a table of either dtype."""
    rng = np.random.default_rng(draw(seeds))
    tokens, pairs, plain = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.integers(0, 3))
    heads = draw(st.lists(st.integers(0, 3), max_size=2))
    table = rope_table(rng.integers(-1, 2**20, tokens).astype(np.int32), (1.0, 0.5, 0.1, 1e-6)[:pairs])
    return normal(rng, tokens, *heads, 2 * pairs + plain), *table


@given(turns(), st.sampled_from(list(TORCH_DTYPES)))
def test_apply_rope_mirrors(call, dtype) -> None:
    assert_floats_mirror("rope", "apply_rope", dtype, *call)


@given(turns(), st.sampled_from(list(TORCH_DTYPES)))
def test_apply_inverse_rope_mirrors(call, dtype) -> None:
    assert_floats_mirror("rope", "apply_inverse_rope", dtype, *call)


@given(turns(), st.sampled_from(list(TORCH_DTYPES)))
def test_apply_half_rope_mirrors(call, dtype) -> None:
    assert_floats_mirror("rope", "apply_half_rope", dtype, *call)


def test_a_float32_table_is_not_rounded_to_the_dtype_of_the_vectors() -> None:
    """1 + 6/1024 is nearer to bfloat16's 1 + 8/1024 than to 1; a cosine rounded to 1 would leave 1 + 3/1024."""
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    cos, sin = torch.tensor([[1 + 3 / 1024]]), torch.tensor([[-3 / 1024]])
    assert dsacp_npu.rope.apply_rope(x, cos, sin).tolist() == [[1 + 8 / 1024, 1.0]]


def test_frequencies_may_lie_on_the_device_already() -> None:
    steps = torch.tensor(STEPS)
    assert_same(
        dsacp_npu.rope.rope_table(torch.tensor(HERE), steps), dsacp_npu.rope.rope_table(torch.tensor(HERE), STEPS)
    )


def test_frequencies_do_not_depend_on_the_default_device() -> None:
    with torch.device("meta"):
        assert dsacp_npu.rope.rope_frequencies(10000.0, 4) == STEPS


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.function)
def test_refusals_mirror(bad: Case) -> None:
    assert_refusal_mirrors("rope", bad)


@pytest.mark.parametrize("call", STATIC, ids=lambda call: call.function)
@pytest.mark.parametrize("way", WAYS)
def test_runs_without_values(call: Case, way: str) -> None:
    assert_runs_without_values("rope", way, call)
