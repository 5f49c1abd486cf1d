"""The launchers of `dsacp_npu._triton_compressor` give what `dsacp_ref.compressor` gives, in place and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dsacp_npu import _triton_compressor
from dsacp_npu import compressor as mirror
from dsacp_npu.rope import rope_frequencies
from dsacp_ref import compressor as ref
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_same
from tests.maths_strategies import normal, seeds
from tests.mirror.common import TORCH_DTYPES, Case, compare_floats, outcome, tensors_of, to_numpy, to_torch, untouched
from tests.mirror.test_compressor import HERE, REFUSED, pool_arguments, step, step_arguments, steps
from tests.strategies import fewer

DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])
LAUNCHED = [
    (name, bad) for bad in REFUSED for name in (bad.function, bad.function + "_") if name in _triton_compressor.__all__
]


def unread(on_a_device: bool) -> Any:
    """Values that may be read, or may not, as on a device."""
    return mock.patch("dsacp_npu._tensors.readable", return_value=not on_a_device)


def assert_launches(
    name: str, args: tuple[Any, ...], handed_out: Callable[[Any], Any] = lambda result: result, **kwargs: Any
) -> None:
    """Within the budget of the reference in float32, on tensors; `handed_out` rounds what that gives."""
    got = untouched(getattr(_triton_compressor, name), args, kwargs)
    exact, plain = (getattr(ref, name)(*to_numpy(args, kind), **kwargs) for kind in ("float64", "float32"))
    compare_floats(got, exact, handed_out(to_torch(plain, "float32")), name)


@given(steps(), DTYPES, st.booleans(), st.booleans())
@fewer(8)
def test_compress(step, dtype, mixed, on_a_device) -> None:
    def handed_out(result):
        return result._replace(compressed=rounded(result.compressed, dtype))

    args = step_arguments(step, dtype, mixed=mixed)
    with unread(on_a_device):
        assert_launches("compress", args, handed_out, eps=step.eps)


def rounded(compressed: mirror.CompressedEntries, dtype: str) -> mirror.CompressedEntries:
    """The entries in this dtype."""
    return compressed._replace(entries=compressed.entries.to(TORCH_DTYPES[dtype]))


@given(steps(), seeds, DTYPES)
@fewer(8)
def test_pooled_entries(step, seed, dtype) -> None:
    """Some of the step's entries, in any order, between rows that ask for none."""
    rng = np.random.default_rng(seed)
    plan = ref.emitted_entries(*step.batch, step.ratio, num_rows=len(step.x))
    chosen = rng.permutation(len(plan.entry_requests))[: rng.integers(0, 9)]
    entries = to_torch((plan.entry_requests[chosen], plan.entry_indices[chosen]))
    rows, after = pool_arguments(step, dtype)
    assert_launches("pooled_entries", (rows, *entries, *after), **step.options)


@given(steps(), DTYPES)
@fewer(8)
def test_compressed_entries(step, dtype) -> None:
    rows, after = pool_arguments(step, dtype)
    assert_launches("compressed_entries", (rows, *after), **step.options)


def test_weights_of_the_norm_in_float64() -> None:
    rows, after = pool_arguments(HERE, "float32")
    assert_launches("compressed_entries", (rows, *after[:3], after[3].double(), after[4]), **HERE.options)
    assert_launches("rms_norm", (rows.kv[:-3], rows.kv[0].double(), 1e-6))


@given(steps(), st.booleans())
@fewer(8)
def test_updated_state(step, on_a_device) -> None:
    """Rows are only moved, so exactly."""
    args = to_torch((step.rows, *step.batch, step.state), "float32")
    want = to_torch(ref.updated_state(*to_numpy(args, "float32")))
    with unread(on_a_device):
        assert_same(untouched(_triton_compressor.updated_state, args, {}), want)
        got = _triton_compressor.updated_state_(*args)
    assert got is args[-1]
    assert_same(got, want)


@given(steps(), DTYPES)
@fewer(8)
def test_compress_in_place(step, dtype) -> None:
    """The pure twin's result, held by the state's own tensors; nothing else is written to."""
    args = step_arguments(step, dtype)
    want = _triton_compressor.compress(*args, eps=step.eps)
    others = [(tensor, tensor.clone()) for tensor in tensors_of((*args[:4], *args[5:]))]
    got = _triton_compressor.compress_(*args, eps=step.eps)
    assert_same(got, want)
    assert all(mine is given for mine, given in zip(got.state, args[4], strict=True))
    for tensor, copy in others:
        assert_same(tensor, copy)


def test_lengths_may_be_the_counts_of_the_state_itself() -> None:
    rows, loc, starts, state = to_torch((HERE.rows, *HERE.batch, HERE.state), "float32")
    state = state._replace(num_tokens=starts)
    want = mirror.updated_state(rows, loc, starts, state)
    assert_same(_triton_compressor.updated_state_(rows, loc, state.num_tokens, state), want)


@given(seeds, st.lists(st.integers(0, 19), max_size=2), st.integers(1, 9), st.booleans(), DTYPES)
@fewer(8)
def test_rms_norm(seed, rows, width, weighted, dtype) -> None:
    rng = np.random.default_rng(seed)
    weight = to_torch(normal(rng, width), dtype) if weighted else None
    args = (to_torch(normal(rng, *rows, width), dtype), weight, 1e-6)
    assert_launches("rms_norm", args, lambda plain: plain.to(TORCH_DTYPES[dtype]))


def test_views_are_read_as_they_are_written() -> None:
    rows, after = pool_arguments(HERE, "float32")
    turned = mirror.ProjectedRows(*(part.T.contiguous().T for part in rows))
    state = after[2]._replace(kv=after[2].kv.transpose(0, 1).contiguous().transpose(0, 1))
    assert_launches("compressed_entries", (turned, *after[:2], state, *after[3:]), **HERE.options)
    assert_launches("updated_state", (turned, *after[:2], state))
    assert_launches("rms_norm", (turned.kv[:-3], None, 1e-6))


@pytest.mark.parametrize("name, bad", LAUNCHED, ids=[name for name, _ in LAUNCHED])
def test_what_the_mirror_refuses(name: str, bad: Case) -> None:
    """In the same words, and nothing is written."""
    args, kwargs = to_torch(bad.args), to_torch(bad.kwargs)
    before = [tensor.clone() for tensor in tensors_of((args, kwargs))]
    want, _ = outcome(lambda: getattr(mirror, name)(*args, **kwargs))
    got, _ = outcome(lambda: getattr(_triton_compressor, name)(*args, **kwargs))
    assert got == want != ""
    assert_same(tensors_of((args, kwargs)), before)


def assert_unsupported(match: str, name: str, *args: Any, **kwargs: Any) -> None:
    """Legal, but beyond a kernel: refused with the limit, and nothing is written."""
    before = [tensor.clone() for tensor in tensors_of((args, kwargs))]
    with pytest.raises(UnsupportedError, match=match):
        getattr(_triton_compressor, name)(*args, **kwargs)
    assert_same(tensors_of((args, kwargs)), before)


def test_float64_is_beyond_the_kernels() -> None:
    rows, loc, starts, state = args = to_torch((HERE.rows, *HERE.batch, HERE.state))
    for name in ("updated_state", "updated_state_"):
        assert_unsupported("rows.kv in float32, got float64", name, *args)
    for name in ("compress", "compress_"):
        assert_unsupported("rows.kv in float32, got float64", name, *step_arguments(HERE, "float64"), eps=1e-6)
    after = (loc, starts, state, torch.ones(4, dtype=torch.float64), ())
    assert_unsupported("float64", "compressed_entries", rows, *after, **HERE.options)
    assert_unsupported("no norm in float64", "rms_norm", rows.kv, None, 1e-6)


def test_a_table_wider_than_an_entry_is_refused_as_by_the_mirror() -> None:
    rows, after = pool_arguments(step(), "float32")
    args = (rows, *after[:-1], (1.0,) * 3)
    want, _ = outcome(lambda: mirror.compressed_entries(*args, **HERE.options))
    got, _ = outcome(lambda: _triton_compressor.compressed_entries(*args, **HERE.options))
    assert got == want != ""


@pytest.mark.parametrize("channels, match", [(3, r"2\*\*n channels, got 3"), (1024, "no tile of pooled entries for")])
def test_sizes_beyond_the_kernels(channels: int, match: str) -> None:
    ring = torch.zeros(1, 2, channels)
    rows, count = mirror.ProjectedRows(ring[0], ring[0]), torch.zeros(1, dtype=torch.int32)
    state, loc = mirror.CompressorState(ring, ring, count, count), torch.tensor([0, 2], dtype=torch.int32)
    options = {"compress_ratio": 2, "eps": 0.0}
    assert_unsupported(match, "pooled_entries", rows, count, count, loc, count, state, ring[0, 0], (), **options)


def test_rows_too_wide_for_the_state_and_the_norm() -> None:
    ring, count = torch.zeros(1, 2, 1025), torch.zeros(1, dtype=torch.int32)
    rows, loc = mirror.ProjectedRows(ring[0], ring[0]), torch.tensor([0, 2], dtype=torch.int32)
    state = mirror.CompressorState(ring, ring, count, count)
    assert_unsupported("no tile of a compressor state for 1025", "updated_state_", rows, loc, count, state)
    assert_unsupported("no tile of rms_norm for 8193", "rms_norm", torch.zeros(1, 8193), None, 0.0)


def test_a_state_in_pieces_is_not_written_to() -> None:
    rows, loc, starts, state = to_torch((HERE.rows, *HERE.batch, HERE.state), "float32")
    pieces = state._replace(kv=state.kv.transpose(0, 1).contiguous().transpose(0, 1))
    assert_unsupported("contiguous state.kv", "updated_state_", rows, loc, starts, pieces)


def test_frequencies_lie_on_a_device_once() -> None:
    """On a pretended one nothing is kept; the numbers are the float32 ones of the tuple."""
    frequencies = rope_frequencies(10000.0, 8)
    made = _triton_compressor.filled(frequencies, torch.device("cpu"))
    assert made.dtype == torch.float32
    assert made.tolist() == list(frequencies)
    assert _triton_compressor.frequencies_beside(torch.zeros(1, dtype=torch.int32), frequencies) is frequencies
    kept = _triton_compressor.kept_frequencies
    assert kept(frequencies, torch.device("cpu")) is kept(frequencies, torch.device("cpu"))
    before = kept.cache_info().currsize
    with FakeTensorMode():
        positions = torch.zeros(3, dtype=torch.int32, device="cuda")
        found = _triton_compressor.frequencies_beside(positions, frequencies)
    assert (found.device.type, found.shape) == ("cuda", (4,))
    assert kept.cache_info().currsize == before
