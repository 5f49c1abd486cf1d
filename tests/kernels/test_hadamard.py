"""The Hadamard rotation of backend `triton` against the reference, and its refusals against the mirror's."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import _triton_hadamard as launcher
from dsacp_npu import indexer as mirror
from dsacp_npu._triton_indexer import index_queries
from dsacp_npu.kernels.hadamard import TILES
from dsacp_ref import indexer as ref
from dsacp_ref.rope import rope_table
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_same, assert_within_budget
from tests.kernels.hadamard_cases import in_order
from tests.maths_strategies import normal, seeds
from tests.mirror.common import Case, outcome, to_numpy, to_torch, untouched
from tests.mirror.test_indexer import REFUSED
from tests.strategies import fewer

DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])
SHAPES = st.sampled_from([(), (0,), (1,), (3,), (65,), (2, 2), (3, 64), (2, 0, 4)])
FAMILIES = st.sampled_from(["a2", "a5"])  # at once, and by factors


@given(seeds, SHAPES, st.sampled_from([32, 64, 128]), DTYPES, FAMILIES)
@fewer(3)
def test_it_rotates_as_the_reference(seed: int, shape: tuple[int, ...], d: int, dtype: str, family: str) -> None:
    x = to_torch(normal(np.random.default_rng(seed), *shape, d), dtype)
    with mock.patch("dsacp_npu._triton_launch.family_of", return_value=family):
        got = untouched(launcher.hadamard, (x,), {})
    assert_within_budget(got, ref.hadamard(to_numpy(x, "float64")), plains(x))


def plains(x: torch.Tensor) -> list[torch.Tensor]:
    """The rotation in float32 in two orders of summation, rounded once."""
    source = to_numpy(x, "float32")
    return [torch.tensor(plain).to(x.dtype) for plain in (ref.hadamard(source), in_order(source))]


@given(seeds, st.integers(0, 3), st.sampled_from([0, 1, 3]), DTYPES)
@fewer(5)
def test_index_queries_as_the_mirrors(seed: int, num_tokens: int, num_heads: int, dtype: str) -> None:
    """The product is in the dtype of the latent here, which is one rounding more than the reference has."""
    rng = np.random.default_rng(seed)
    table = rope_table(rng.integers(0, 99, num_tokens).astype(np.int32), [0.3**i for i in range(32)])
    args = *to_torch((normal(rng, num_tokens, 5), normal(rng, num_heads * 128, 5)), dtype), *to_torch(tuple(table))
    got = untouched(index_queries, args, {"index_head_dim": 128})
    exact = ref.index_queries(*to_numpy(args, "float64"), index_head_dim=128)
    turned = mirror.apply_rope((args[0] @ args[1].T).reshape(num_tokens, num_heads, 128), *args[2:])
    assert_within_budget(got, exact, plains(turned))


@given(seeds, DTYPES, FAMILIES)
@fewer(10)
def test_what_is_no_number_stays_in_its_vector(seed: int, dtype: str, family: str) -> None:
    rng = np.random.default_rng(seed)
    x = to_torch(normal(rng, 70, 128), dtype)
    spoilt = x.clone()
    rows = rng.choice(70, 3, replace=False)
    spoilt[rows, rng.integers(0, 128, 3)] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=x.dtype)
    with mock.patch("dsacp_npu._triton_launch.family_of", return_value=family):
        want, got = launcher.hadamard(x), launcher.hadamard(spoilt)
    want[rows] = mirror.hadamard(spoilt[rows])
    assert_same(got, want)


def test_a_view_is_read_as_it_lies() -> None:
    x = to_torch(normal(np.random.default_rng(0), 8, 6, 128), "bfloat16")
    for view in (x.transpose(0, 1), x[:, ::2], x[:, :, :64], x[..., ::2]):
        before = view.clone()
        assert_same(launcher.hadamard(view), launcher.hadamard(before))
        assert_same(view, before)


BAD = [bad for bad in REFUSED if bad.function == "hadamard"]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_it_refuses_in_the_words_of_the_mirror(bad: Case) -> None:
    args = to_torch(bad.args)
    want, _ = outcome(mirror.hadamard, *args)
    got, _ = outcome(launcher.hadamard, *args)
    assert got == want != ""


def test_a_limit_is_named() -> None:
    with pytest.raises(UnsupportedError, match="'triton' has no hadamard in float64; use backend 'torch'"):
        launcher.hadamard(torch.ones(2, 128, dtype=torch.float64))
    for d in (1, 16, 256):
        with pytest.raises(UnsupportedError, match=rf"no tile of hadamard for \({d}, 4\) on family 'a2'"):
            launcher.hadamard(torch.ones(2, d))
    assert {d for tiles in TILES.values() for d, _ in tiles} == {32, 64, 128}
