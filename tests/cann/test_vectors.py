"""Row-wise operators give what the reference gives: rotation, projections, int8 rows and products, cache writes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import cann, paging, rope
from dsacp_npu import quant as mirror_quant
from dsacp_ref import compressor as ref_compressor
from dsacp_ref import layer as ref_layer
from dsacp_ref import quant as ref_quant
from dsacp_ref import rope as ref_rope
from dsacp_ref.paging import scattered_rows
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.cann.common import WAYS, assert_near, assert_runs_without_values
from tests.compare import assert_same
from tests.laws.test_w8a8 import factors, matrices
from tests.maths_strategies import normal, seeds
from tests.mirror.common import case, int32, to_numpy, to_torch, untouched
from tests.strategies import fewer

pytestmark = pytest.mark.usefixtures("emulated")

DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])
FREQUENCIES = ref_rope.rope_frequencies(10000.0, 64)


def turning(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, ...]:
    """Vectors, and their table rows, a pad row among the positions."""
    positions = rng.integers(-1, 10**6, shape[0]).astype(np.int32)
    return normal(rng, *shape), *ref_rope.rope_table(positions, FREQUENCIES)


SHAPES = st.sampled_from([(3, 512), (2, 4, 512), (5, 64, 128), (2, 1, 3, 64), (0, 4, 512), (2, 0, 512)])


@given(SHAPES, DTYPES, seeds)
@fewer(2)
def test_apply_rope_on_the_emulator(shape: tuple[int, ...], dtype: str, seed: int) -> None:
    x, *table = turning(np.random.default_rng(seed), *shape)
    args = (to_torch(x, dtype), *to_torch(tuple(table)))
    assert_near(untouched(cann.apply_rope, args, {}), ref_rope.apply_rope, args, {})


@given(SHAPES, DTYPES, seeds)
@fewer(2)
def test_apply_inverse_rope_on_the_emulator(shape: tuple[int, ...], dtype: str, seed: int) -> None:
    x, *table = turning(np.random.default_rng(seed), *shape)
    args = (to_torch(x, dtype), *to_torch(tuple(table)))
    assert_near(untouched(cann.apply_inverse_rope, args, {}), ref_rope.apply_inverse_rope, args, {})


def test_a_view_is_turned_in_a_copy() -> None:
    """The operator writes in place, and needs the channels side by side."""
    x, cos, sin = to_torch(turning(np.random.default_rng(0), 2, 8, 512), "bfloat16")
    cos, sin = cos.float(), sin.float()
    for view in (x.transpose(0, 1)[:2], x[:, ::2], x.flip(1)):
        before = view.clone()
        assert torch.equal(cann.apply_rope(view, cos, sin), rope.apply_rope(view, cos, sin))
        assert torch.equal(view, before)


def projecting(rng: np.random.Generator, num_tokens: int, groups: int) -> tuple[np.ndarray, ...]:
    """Attention output of 2 heads a group, and both weights."""
    lora, hidden, width = 8, 24, 128
    return (
        normal(rng, num_tokens, 2 * groups, width // 2),
        normal(rng, groups, lora, width, scale=width**-0.5),
        normal(rng, hidden, groups * lora, scale=0.1),
    )


def rounded_between(out: np.ndarray, wo_a: np.ndarray, wo_b: np.ndarray, dtype: str) -> np.ndarray:
    """The plain computation: the low rank is rounded to the dtype, as any two products are."""
    grouped = out.reshape(len(out), len(wo_a), wo_a.shape[2])
    low = to_torch(np.einsum("tgd,grd->tgr", grouped, wo_a), dtype)
    return to_numpy(low, "float32").reshape(len(out), wo_b.shape[1]) @ wo_b.T


@given(st.integers(0, 5), st.sampled_from([1, 2, 8]), st.sampled_from(["bfloat16", "float16"]), seeds)
@fewer(2)
def test_projected_output_on_the_emulator(num_tokens: int, groups: int, dtype: str, seed: int) -> None:
    args = to_torch(projecting(np.random.default_rng(seed), num_tokens, groups), dtype)

    def reference(*arrays: np.ndarray) -> np.ndarray:
        exact = arrays[0].dtype == np.float64
        return ref_layer.projected_output(*arrays) if exact else rounded_between(*arrays, dtype)

    assert_near(untouched(cann.projected_output, args, {}), reference, args, {})


@given(matrices(), st.sampled_from(["bfloat16", "float16"]))
@fewer(2)
def test_quantized_rows_on_the_emulator(x: np.ndarray, dtype: str) -> None:
    """Of the emulator's operator, which rounds as the reference does."""
    x = to_torch(np.clip(x, -6e4, 6e4), dtype)
    got = untouched(cann.quantized_rows, (x,), {})
    assert_same(got, ref_quant.quantized_rows(to_numpy(x, "float32")))


@given(matrices(), st.sampled_from(["bfloat16", "float16"]), seeds)
@fewer(2)
def test_rms_norm_quantized_on_the_emulator(x: np.ndarray, dtype: str, seed: int) -> None:
    """A float32 norm is off by d / 2 + 5 roundings, a scale by 2 more; a number by half a step and 127 times as much.

    The reference is in float64, but its scales are float32 as well.
    """
    gains = 1 + normal(np.random.default_rng(seed), x.shape[1], scale=0.3)
    args = to_torch((np.clip(x, -6e4, 6e4), gains), dtype)
    got = untouched(cann.rms_norm_quantized, (*args, 1e-6), {})
    want = ref_quant.rms_norm_quantized(*to_numpy(args, "float64"), 1e-6)
    assert (got.values.dtype, got.scales.dtype) == (torch.int8, torch.float32)
    assert (got.values.shape, got.scales.shape) == (x.shape, x.shape[:1])
    error = (x.shape[1] / 2 + 5 + 2 + 2) * 2.0**-24
    scales = want.scales.astype(np.float64)
    assert (np.abs(got.scales.numpy() - scales) <= error * scales).all()
    steps = ref_compressor.rms_norm(*to_numpy(args, "float64"), 1e-6) / np.where(scales > 0, scales, 1)[:, None]
    assert (np.abs(got.values.numpy() - steps) <= 0.5 + 127 * 2 * error).all()


LAYOUTS = {
    "rows": torch.clone,
    "columns": lambda values: values.T.contiguous().T,
    "with gaps": lambda values: values.repeat_interleave(2, dim=1)[:, ::2],
}


@given(factors(), st.sampled_from(["bfloat16", "float16"]), st.sampled_from(sorted(LAYOUTS)))
@fewer(2)
def test_quant_matmul_on_the_emulator(drawn: tuple[Any, ...], dtype: str, layout: str) -> None:
    """Bit for bit, whichever way the codes lie in memory."""
    rows, weight = to_torch(drawn)
    want = torch.tensor(ref_quant.quant_matmul(*drawn, dtype="float32")).to(getattr(torch, dtype))
    rows, weight = (part._replace(values=LAYOUTS[layout](part.values)) for part in (rows, weight))
    assert_same(untouched(cann.quant_matmul, (rows, weight), {"dtype": dtype}), want)


@st.composite
def writes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cache, rows, distinct slots; some rows without a slot, sometimes all, sometimes no blocks."""
    rng = np.random.default_rng(draw(seeds))
    blocks, block_size = draw(st.integers(0, 3)), draw(st.sampled_from([1, 4, 16]))
    shape = draw(st.sampled_from([(), (3,), (1, 128)]))
    num_rows = draw(st.integers(0, 6))
    slots = np.full(num_rows, -1, np.int32)
    real = rng.permutation(blocks * block_size)[:num_rows]
    slots[: len(real)] = real
    if draw(st.booleans()):
        slots[rng.random(num_rows) < 0.5] = -1
    return normal(rng, blocks, block_size, *shape), normal(rng, num_rows, *shape), rng.permutation(slots)


@given(writes(), st.sampled_from(["bfloat16", "float16", "float32", "int8"]), st.booleans())
@fewer(2)
def test_scattered_rows_in_place_on_the_emulator(drawn: tuple[np.ndarray, ...], dtype: str, blind: bool) -> None:
    cache, rows, slots = drawn
    if dtype == "int8":
        cache, rows = ((100 * part).clip(-100, 100).astype(np.int8) for part in (cache, rows))
        args = to_torch((cache, rows, slots))
    else:
        args = to_torch((cache, rows, slots), dtype)
    want = paging.scattered_rows(*args)
    if dtype in ("float32", "int8"):
        plain = [part.numpy() for part in args]
        assert_same(want, scattered_rows(*plain))
    with mock.patch("dsacp_npu._tensors.readable", return_value=not blind):
        got = cann.scattered_rows_(*args)
    assert got is args[0]
    assert_same(got, want)


X, COS, SIN = to_torch(turning(np.random.default_rng(0), 3, 4, 512), "float32")
HALF = X.bfloat16()
OUTPUT = to_torch(projecting(np.random.default_rng(0), 3, 2), "bfloat16")
FLAT, GAINS = HALF[:, 0], HALF[0, 0]
CODES = mirror_quant.quantized_rows(FLAT), mirror_quant.quantized_weight(X[:, 1])
CACHE, ROWS, SLOTS = torch.zeros(2, 4, 3), torch.ones(3, 3), torch.tensor([5, -1, 0], dtype=torch.int32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("apply_rope", (HALF, COS, SIN)),
        ("apply_inverse_rope", (HALF, COS, SIN)),
        ("projected_output", OUTPUT),
        ("quantized_rows", (FLAT,)),
        ("quantized_rows", (FLAT[:0],)),
        ("rms_norm_quantized", (FLAT, GAINS, 1e-6)),
        ("scattered_rows_", (CACHE, ROWS, SLOTS)),
    ],
)
def test_it_runs_without_values(function: str, args: tuple[Any, ...], way: str) -> None:
    assert_runs_without_values(way, case(function, *args))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limit", [3, 2])
def test_a_product_runs_without_values(way: str, limit: int) -> None:
    """In one call, and in chunks; without tokens too."""
    rows, weight = (part._replace(values=part.values[:, :2]) for part in CODES)
    none = rows._replace(values=rows.values[:0], scales=rows.scales[:0])
    with mock.patch("dsacp_npu._cann_vectors.MATMUL_WIDTH", limit):
        for some in (rows, none):
            assert_runs_without_values(way, case("quant_matmul", some, weight, dtype="bfloat16"))


LIMITS = [
    ("apply_rope", "x must have dtype", (X.double(), COS, SIN)),
    ("apply_rope", "rope_head_dim must be 64, got 32", (HALF, COS[:, :16], SIN[:, :16])),
    ("apply_rope", "cos must have dtype float32", (HALF, COS.double(), SIN)),
    ("apply_inverse_rope", "rope_head_dim must be 64, got 32", (HALF, COS[:, :16], SIN[:, :16])),
    ("projected_output", "out must have dtype bfloat16", tuple(part.float() for part in OUTPUT)),
    ("quantized_rows", "x must have dtype bfloat16 or float16, got float32", (X[:, 0],)),
    ("rms_norm_quantized", "x must have dtype bfloat16", (X[:, 0], X[0, 0], 1e-6)),
    ("scattered_rows_", "cache must be contiguous within a block", (CACHE.mT.contiguous().mT, ROWS, SLOTS)),
]


@pytest.mark.parametrize(("function", "words", "args"), LIMITS, ids=range(len(LIMITS)))
def test_a_limit_is_named(function: str, words: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(UnsupportedError, match=f"{function} on cann: {words}"):
        getattr(cann, function)(*args)


BROKEN = [
    ("apply_rope", (HALF[0, 0], COS, SIN)),
    ("apply_rope", (HALF, COS[:2], SIN)),
    ("apply_rope", (HALF, COS, SIN[:2])),
    ("apply_rope", (HALF[..., :32], COS, SIN)),
    ("apply_rope", (HALF.int(), COS, SIN)),
    ("apply_inverse_rope", (HALF, COS, SIN[0])),
]


@pytest.mark.parametrize(("function", "args"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_table_has_the_words_of_the_mirror(function: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(ContractError) as theirs:
        getattr(rope, function)(*args)
    with pytest.raises(ContractError) as mine:
        getattr(cann, function)(*args)
    assert str(mine.value) == str(theirs.value)


BROKEN_CODES = [
    ("quantized_rows", (HALF,), {}),
    ("quantized_rows", (FLAT[:, :0],), {}),
    ("quantized_rows", (FLAT / 0,), {}),
    ("rms_norm_quantized", (HALF, GAINS, 1e-6), {}),
    ("rms_norm_quantized", (FLAT / 0, GAINS, 1e-6), {}),
    ("rms_norm_quantized", (FLAT, GAINS[:3], 1e-6), {}),
    ("rms_norm_quantized", (FLAT, None, 1e-6), {}),
    ("rms_norm_quantized", (FLAT, GAINS, 0.0), {}),
    ("quant_matmul", (CODES[0], CODES[0]), {"dtype": "bfloat16"}),
    ("quant_matmul", (CODES[0]._replace(scales=CODES[0].scales[:1]), CODES[1]), {"dtype": "bfloat16"}),
    ("quant_matmul", CODES, {"dtype": "int8"}),
]


@pytest.mark.parametrize(("function", "args", "options"), BROKEN_CODES, ids=range(len(BROKEN_CODES)))
def test_broken_codes_have_the_words_of_the_mirror(
    function: str, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(ContractError) as theirs:
        getattr(mirror_quant, function)(*args, **options)
    with pytest.raises(ContractError) as mine:
        getattr(cann, function)(*args, **options)
    assert str(mine.value) == str(theirs.value)


def test_rows_without_channels_are_refused_unread() -> None:
    """A shape is known where values are not."""
    with mock.patch("dsacp_npu._tensors.readable", return_value=False):
        for function, args in (("quantized_rows", ()), ("rms_norm_quantized", (GAINS[:0], 1e-6))):
            with pytest.raises(ContractError, match=r"x must have shape \[..., d\] with d >= 1, got \(3, 0\)"):
                getattr(cann, function)(FLAT[:, :0], *args)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_product_in_wide_floats_is_refused(dtype: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        cann.quant_matmul(*CODES, dtype=dtype)
    assert str(caught.value) == (
        f"quant_matmul on cann: dtype must be bfloat16 or float16, got {dtype}; use the torch backend for it"
    )


@pytest.mark.parametrize(
    "args",
    [
        (CACHE, ROWS, int32(5, 8, 0)),
        (CACHE, ROWS, int32(5, 5, 0)),
        (CACHE, ROWS[:2], int32(5, 1, 0)),
        (CACHE, ROWS.double(), int32(5, 1, 0)),
    ],
    ids=range(4),
)
def test_a_refused_write_leaves_the_cache_alone(args: tuple[Any, ...]) -> None:
    args = (args[0].clone(), args[1], to_torch(args[2]))
    with pytest.raises(ContractError) as theirs:
        paging.scattered_rows(*args)
    with pytest.raises(ContractError) as mine:
        cann.scattered_rows_(*args)
    assert str(mine.value) == str(theirs.value)
    assert torch.equal(args[0], CACHE)


def test_an_output_projection_of_other_heads_is_refused() -> None:
    with pytest.raises(ContractError, match="wo_a must take the 4 heads of 64 channels of out, got 1 groups of 128"):
        cann.projected_output(OUTPUT[0], OUTPUT[1][:1], OUTPUT[2])
