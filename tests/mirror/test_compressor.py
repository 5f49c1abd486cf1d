"""`dsacp_npu.compressor` gives what `dsacp_ref.compressor` gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import dsacp_npu.compressor
from dsacp_ref import compressor as ref
from tests.compare import assert_same
from tests.maths_strategies import compressor_of, normal, seeds
from tests.mirror.common import (
    TORCH_DTYPES,
    WAYS,
    Case,
    assert_floats_mirror,
    assert_mirrors,
    assert_refusal_mirrors,
    assert_runs_without_values,
    case,
    compare_floats,
    functions,
    int32,
    on_device,
    outcome,
    tensors_of,
    to_numpy,
    to_torch,
    untouched,
)

DTYPES = st.sampled_from(list(TORCH_DTYPES))


class Step(NamedTuple):
    """One step of a compressor, mid-way: what no function may read is NaN."""

    x: np.ndarray
    weights: ref.CompressorWeights
    query_start_loc: np.ndarray
    num_computed_tokens: np.ndarray
    state: ref.CompressorState
    frequencies: tuple[float, ...]
    eps: float
    overlap: bool

    @property
    def ratio(self) -> int:
        return len(self.weights.ape)

    @property
    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        return self.query_start_loc, self.num_computed_tokens

    @property
    def positions(self) -> np.ndarray:
        return ref.row_positions(*self.batch, len(self.x))

    @property
    def rows(self) -> ref.ProjectedRows:
        return ref.projected_rows(self.x, self.positions, self.weights)

    @property
    def after(self) -> tuple:
        """The arguments of pooling that follow the entries."""
        return *self.batch, self.state, self.weights.norm_weight, self.frequencies

    @property
    def options(self) -> dict:
        return {"compress_ratio": self.ratio, "eps": self.eps}


def step_of(
    rng: np.random.Generator,
    lengths: list[tuple[int, int]],  # (tokens before, new tokens); negative before for a padded graph slot
    *,
    ratio: int,
    overlap: bool,
    pairs: int = 1,
    spare: int = 0,
    beyond: int = 0,
) -> Step:
    """A step whose state comes from the tokens before it."""
    parts = compressor_of(rng, ratio, overlap, pairs=pairs)
    weights = ref.CompressorWeights(*parts.weights)
    empty = ref.empty_state(weights, len(lengths), num_rows=(2 if overlap else 1) * ratio + spare)
    state = empty._replace(kv=np.full_like(empty.kv, np.nan), score=np.full_like(empty.score, np.nan))
    before = int32(0, *np.cumsum([max(length[0], 0) for length in lengths]))
    old = normal(rng, int(before[-1]), 3)
    state = ref.compress(old, weights, before, np.zeros(len(lengths), np.int32), state, (), eps=1.0).state
    # Counts of a ring's last user mean nothing to a request that starts, and are handed on where no token comes.
    fresh = before[1:] == before[:-1]
    ends = {
        name: np.where(fresh, count, getattr(state, name)) for name, count in (("held_start", 70), ("num_tokens", 75))
    }
    state = state._replace(**{name: values.astype(np.int32) for name, values in ends.items()})
    loc = int32(0, *np.cumsum([length[1] for length in lengths]))
    x = np.concatenate([normal(rng, int(loc[-1]), 3), np.full((beyond, 3), np.nan)])
    starts = int32(*(length[0] for length in lengths))
    return Step(x, weights, loc, starts, state, parts.freqs, parts.eps, overlap)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Requests that start, go on, rest or are padded slots; rows beyond the last request; spare rows in the rings."""
    length = st.one_of(st.sampled_from([0, 1]), st.integers(0, 11))
    lengths = draw(st.lists(st.tuples(length, length), max_size=3))
    lengths += draw(st.lists(st.tuples(st.integers(-3, -1), st.integers(1, 3)), max_size=1))
    return step_of(
        np.random.default_rng(draw(seeds)),
        lengths,
        ratio=draw(st.integers(1, 5)),
        overlap=draw(st.booleans()),
        pairs=draw(st.integers(0, 2)),
        spare=draw(st.integers(0, 3)),
        beyond=draw(st.integers(0, 3)),
    )


def step(**options) -> Step:
    lengths = [(5, 6), (0, 9), (3, 0), (-2, 2)]
    return step_of(np.random.default_rng(0), lengths, **{"ratio": 4, "overlap": True, "beyond": 3, **options})


HERE, PLAIN, NOBODY = (
    step(),
    step(overlap=False),
    step_of(np.random.default_rng(0), [], ratio=2, overlap=True, beyond=5),
)
PLAN = ref.emitted_entries(*HERE.batch, 4, num_rows=20)
HALF = HERE._replace(x=HERE.x[:17]).rows

STATIC = [
    case("rms_norm", HERE.x, None, 1e-6),
    case("rms_norm", HERE.x, HERE.x[0], 0.0),
    case("empty_state", HERE.weights, 3),
    case("projected_rows", HERE.x, HERE.positions, HERE.weights),
    case("emitted_entries", *HERE.batch, 4, num_rows=20),
    case("compressed_entries", HERE.rows, *HERE.after, **HERE.options),
    case("compressed_entries", PLAIN.rows, *PLAIN.after, **PLAIN.options),
    case("pooled_entries", HERE.rows, *PLAN[:2], *HERE.after, **HERE.options),
    case("updated_state", HERE.rows, *HERE.batch, HERE.state),
    case("rolled_back_state", HERE.state, int32(4, 0, 1, 0), compress_ratio=4, overlap=True),
    case("compress", *HERE[:6], eps=1e-6),
    case("compress", *NOBODY[:6], eps=1e-6),
    case("compress", *step_of(np.random.default_rng(0), [(3, 0)], ratio=2, overlap=True)[:6], eps=1e-6),
]


def changed(record, **fields):
    return record._replace(**fields)


W, S = HERE.weights, HERE.state
OTHER_RING = changed(S, kv=S.kv[:, :7], score=S.score[:, :7])

REFUSED = [
    case("rms_norm", [1.0], None, 0.0),
    case("rms_norm", HERE.x > 0, None, 0.0),
    case("rms_norm", HERE.x[:, :0], None, 0.0),
    case("rms_norm", HERE.x, HERE.x[0, :2], 0.0),
    case("rms_norm", HERE.x, None, -1.0),
    case("empty_state", changed(W, wkv=W.wkv[:, 0]), 1),
    case("empty_state", changed(W, wgate=W.wgate[1:]), 1),
    case("empty_state", changed(W, ape=W.ape[:, 1:]), 1),
    case("empty_state", changed(W, ape=W.ape[:0]), 1),
    case("empty_state", changed(W, norm_weight=W.norm_weight[:3]), 1),
    case("empty_state", changed(W, norm_weight=W.norm_weight.astype(int)), 1),
    case("empty_state", W, -1),
    case("empty_state", W, 1, num_rows=7),
    case("projected_rows", HERE.x[:, :2], HERE.positions, W),
    case("projected_rows", HERE.x, HERE.positions[1:], W),
    case("projected_rows", HERE.x, HERE.positions - 1, W),
    case("emitted_entries", *HERE.batch, 0, num_rows=20),
    case("emitted_entries", *HERE.batch, 4, num_rows=16),
    case("emitted_entries", *HERE.batch, 4, num_rows=-1),
    case("emitted_entries", *HERE.batch, 4, num_rows=20.0),
    case("emitted_entries", HERE.batch[0] + np.int32(1), HERE.batch[1], 4, num_rows=20),
    case("emitted_entries", HERE.batch[0], HERE.batch[1][1:], 4, num_rows=20),
    case("emitted_entries", int32(0, 5), int32(2**31 - 5), 4, num_rows=20),
    case("compressed_entries", HALF._replace(kv=HALF.kv[:, :7]), *HERE.after, **HERE.options),
    case("compressed_entries", HALF._replace(kv=HALF.kv[:, :7], score=HALF.score[:, :7]), *HERE.after, **HERE.options),
    case("compressed_entries", HALF._replace(score=HALF.score.astype(np.float32)), *HERE.after, **HERE.options),
    case("compressed_entries", HALF, *HERE.batch, OTHER_RING, *HERE.after[3:], **HERE.options),
    case("compressed_entries", HALF, *HERE.batch, changed(S, kv=S.kv[0]), *HERE.after[3:], **HERE.options),
    case("compressed_entries", HALF, *HERE.batch, changed(S, score=S.score[1:]), *HERE.after[3:], **HERE.options),
    case("compressed_entries", HALF, *HERE.batch, to_numpy(S, "float32"), *HERE.after[3:], **HERE.options),
    case("compressed_entries", HALF, *HERE.batch, changed(S, num_tokens=S.held_start), *HERE.after[3:], **HERE.options),
    case("compressed_entries", HALF, *HERE.after, compress_ratio=4, eps=-1.0),
    case("compressed_entries", HALF, *HERE.after, compress_ratio=2**30, eps=0.0),
    case("compressed_entries", to_numpy(HALF, "float16"), *HERE.after, **HERE.options),
    case("compressed_entries", HALF, *HERE.batch, to_numpy(S, "float16"), *HERE.after[3:], **HERE.options),
    case("pooled_entries", HALF, int32(0), int32(0, 1), *HERE.after, **HERE.options),
    case("pooled_entries", HALF, int32(4), int32(0), *HERE.after, **HERE.options),
    case("pooled_entries", HALF, int32(-1, 0), int32(9, 0), *HERE.after, **HERE.options),
    case("pooled_entries", HALF, int32(1, 3), int32(0, 0), *HERE.after, **HERE.options),
    case("updated_state", to_numpy(HALF, "float16"), *HERE.batch, to_numpy(S, "float16")),
    case("updated_state", HALF, *HERE.batch, changed(S, kv=S.kv[..., 1:])),
    case("updated_state", HALF, *HERE.batch, changed(S, kv=S.kv[:, :0], score=S.score[:, :0])),
    case("updated_state", HALF, *HERE.batch, changed(S, num_tokens=S.num_tokens[1:])),
    case("updated_state", HALF, HERE.batch[0][:2], HERE.batch[1][:1], S),
    case("updated_state", HALF, *HERE.batch, changed(S, num_tokens=S.num_tokens + np.int32(1))),
    case("rolled_back_state", S, int32(5, 0, 3), compress_ratio=4, overlap=True),
    case("rolled_back_state", S, int32(5, 0, 4, 0), compress_ratio=4, overlap=True),
    case("rolled_back_state", S, int32(-1, 0, 3, 0), compress_ratio=4, overlap=True),
    case("rolled_back_state", S, S.num_tokens, compress_ratio=4, overlap=None),
    case("rolled_back_state", changed(S, held_start=int32(4, 0, 0, 0)), S.num_tokens, compress_ratio=4, overlap=True),
    case("rolled_back_state", changed(S, held_start=S.held_start[:1]), S.num_tokens, compress_ratio=4, overlap=True),
    case("compress", HERE.x[0], *HERE[1:6], eps=0.0),
    case("compress", HERE.x[:9], *HERE[1:6], eps=0.0),
    case("compress", HERE.x, *HERE[1:5], ("x",), eps=0.0),
]


def wide(dtype: str) -> str:
    """The dtype that rows and state are in."""
    return "float64" if dtype == "float64" else "float32"


def half(record: Any, dtype: str) -> Any:
    """Weights as a model may hold them: `dtype`, but a float32 bias."""
    weights = to_torch(record, dtype)
    return weights._replace(ape=to_torch(record.ape, wide(dtype)))


def assert_wide_mirror(
    name: str, dtype: str, *args: Any, handed_out: Callable[[Any], Any] = lambda result: result, **kwargs: Any
) -> None:
    """Within the budget of the reference in float32, on inputs that are tensors already; `handed_out` rounds it."""
    reference, mirror = functions("compressor", name)
    got = untouched(mirror, args, kwargs)
    exact, plain = (reference(*to_numpy(args, each), **kwargs) for each in ("float64", "float32"))
    compare_floats(got, exact, handed_out(to_torch(plain, wide(dtype))), name)


@given(seeds, st.lists(st.integers(0, 3), max_size=2), st.integers(1, 9), st.booleans(), DTYPES)
def test_rms_norm_mirrors(seed, rows, width, weighted, dtype) -> None:
    rng = np.random.default_rng(seed)
    weight = normal(rng, width) if weighted else None
    assert_floats_mirror("compressor", "rms_norm", dtype, normal(rng, *rows, width), weight, 1e-6)


@given(steps(), st.integers(-1, 3), st.one_of(st.none(), st.integers(0, 12)), DTYPES)
def test_empty_state_mirrors(step, num_reqs, num_rows, dtype) -> None:
    reference, mirror = functions("compressor", "empty_state")
    want = outcome(lambda: reference(to_numpy(step.weights, wide(dtype)), num_reqs, num_rows=num_rows))
    got = outcome(lambda: mirror(to_torch(step.weights, dtype), num_reqs, num_rows=num_rows))
    assert_same(got, want)


@given(steps(), DTYPES, st.booleans())
def test_projected_rows_mirrors(step, dtype, mixed) -> None:
    weights = half(step.weights, dtype) if mixed else to_torch(step.weights, dtype)
    assert_wide_mirror("projected_rows", dtype, to_torch(step.x, dtype), to_torch(step.positions), weights)


@given(steps(), st.integers(1, 9))
def test_emitted_entries_mirrors(step, ratio) -> None:
    assert_mirrors("compressor", "emitted_entries", *step.batch, ratio, num_rows=len(step.x))


@given(st.lists(st.tuples(st.integers(-1, 9), st.integers(-2, 9)), max_size=4), st.integers(0, 4), st.integers(-1, 12))
def test_emitted_entries_mirrors_on_any_integers(rows, ratio, num_rows) -> None:
    loc, starts = int32(0, *(row[0] for row in rows)), int32(*(row[1] for row in rows))
    assert_mirrors("compressor", "emitted_entries", loc, starts, ratio, num_rows=num_rows)


def pool_arguments(step: Step, dtype: str) -> tuple[Any, ...]:
    """Rows, and what follows the entries: all wide, but for the norm's weight."""
    rows, (*before, norm_weight, frequencies) = to_torch((step.rows, step.after), wide(dtype))
    return rows, (*before, norm_weight.to(TORCH_DTYPES[dtype]), frequencies)


@given(steps(), DTYPES)
def test_compressed_entries_mirrors(step, dtype) -> None:
    rows, after = pool_arguments(step, dtype)
    assert_wide_mirror("compressed_entries", dtype, rows, *after, **step.options)


@given(steps(), seeds, DTYPES, st.booleans())
def test_pooled_entries_mirrors(step, seed, dtype, on_a_device) -> None:
    """Some of the step's entries, in any order, between rows that ask for none; values known and unknown."""
    rng = np.random.default_rng(seed)
    plan = ref.emitted_entries(*step.batch, step.ratio, num_rows=len(step.x))
    chosen = rng.permutation(len(plan.entry_requests))[: rng.integers(0, 9)]
    entries = to_torch((plan.entry_requests[chosen], plan.entry_indices[chosen]))
    rows, after = pool_arguments(step, dtype)
    with patch("dsacp_npu._tensors.readable", lambda tensor: not on_a_device):
        assert_wide_mirror("pooled_entries", dtype, rows, *entries, *after, **step.options)


@given(steps(), DTYPES)
def test_updated_state_mirrors(step, dtype) -> None:
    """Rows are only moved, so exactly."""
    rows, state = (to_numpy(to_torch(value, dtype), wide(dtype)) for value in (step.rows, step.state))
    assert_mirrors("compressor", "updated_state", rows, *step.batch, state)


@given(steps(), st.data())
def test_rolled_back_state_mirrors(step, data) -> None:
    state = ref.updated_state(step.rows, *step.batch, step.state)
    kept = int32(*(max(0, end - data.draw(st.integers(-1, 6))) for end in state.num_tokens.tolist()))
    options = {"compress_ratio": step.ratio, "overlap": step.overlap}
    assert_mirrors("compressor", "rolled_back_state", state, kept, **options)


def step_arguments(step: Step, dtype: str, *, mixed: bool = False) -> tuple[Any, ...]:
    """The arguments of `compress`: rows and weights in the dtype, the state wide."""
    weights = half(step.weights, dtype) if mixed else to_torch(step.weights, dtype)
    return to_torch(step.x, dtype), weights, *to_torch(step.batch), to_torch(step.state, wide(dtype)), step.frequencies


@given(steps(), DTYPES, st.booleans(), st.booleans())
def test_compress_mirrors(step, dtype, mixed, on_a_device) -> None:
    def handed_out(result):
        compressed = result.compressed._replace(entries=result.compressed.entries.to(TORCH_DTYPES[dtype]))
        return result._replace(compressed=compressed)

    args = step_arguments(step, dtype, mixed=mixed)
    with patch("dsacp_npu._tensors.readable", lambda tensor: not on_a_device):
        assert_wide_mirror("compress", dtype, *args, handed_out=handed_out, eps=step.eps)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_long_windows_mirror(dtype) -> None:
    """The longest window of the checkpoints, in every precision."""
    long = step_of(np.random.default_rng(0), [(100, 160), (0, 300)], ratio=128, overlap=False, pairs=2)
    rows, after = pool_arguments(long, dtype)
    assert_wide_mirror("compressed_entries", dtype, rows, *after, **long.options)


def cut_steps(weights, x, cuts, frequencies, ratio) -> tuple[torch.Tensor, dsacp_npu.compressor.CompressorState]:
    """Entries and state of one request whose rows come in steps that end at `cuts`."""
    state, parts = dsacp_npu.compressor.empty_state(weights, 1), []
    for start, end in pairwise([0, *cuts]):
        lengths = to_torch((int32(0, end - start), int32(start)))
        compressed, state = dsacp_npu.compressor.compress(x[start:end], weights, *lengths, state, frequencies, eps=1e-6)
        parts.append(compressed.entries[: end // ratio - start // ratio])
    return torch.cat(parts), state


@given(st.data(), seeds, st.integers(1, 5), st.booleans(), st.sampled_from(["bfloat16", "float16"]))
def test_cutting_a_short_stream_into_steps_changes_nothing(data, seed, ratio, overlap, dtype) -> None:
    """Products of small binary fractions are exact in any order: what differs would have been rounded on the way."""
    rng = np.random.default_rng(seed)
    parts = compressor_of(rng, ratio, overlap)
    weights, x = to_torch((parts.weights, rng.integers(-64, 65, (24, 3)) / 32), dtype)
    grid = torch.tensor(rng.integers(-64, 65, (2, *weights[0].shape)) / 32).to(x.dtype)
    weights = dsacp_npu.compressor.CompressorWeights(*grid, *weights[2:])
    length = data.draw(st.integers(0, 24))
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=5)))
    want, whole = cut_steps(weights, x, [length], parts.freqs, ratio)
    got, state = cut_steps(weights, x, [*cuts, length], parts.freqs, ratio)
    assert_same(state, whole)
    assert got.dtype == x.dtype
    assert_same(got, want)


@given(steps(), st.booleans())
def test_updated_state_in_place(step, on_a_device) -> None:
    args = to_torch((step.rows, *step.batch, step.state))
    with patch("dsacp_npu._tensors.readable", lambda tensor: not on_a_device):
        assert_in_place("updated_state", args, args[-1])


@given(steps(), DTYPES, st.booleans())
def test_compress_in_place(step, dtype, on_a_device) -> None:
    args = step_arguments(step, dtype)
    with patch("dsacp_npu._tensors.readable", lambda tensor: not on_a_device):
        assert_in_place("compress", args, args[4], eps=step.eps)


def assert_in_place(name: str, args: tuple[Any, ...], state: Any, **kwargs: Any) -> None:
    """The pure twin's result, held by the state's own tensors; nothing else is written to."""
    want = getattr(dsacp_npu.compressor, name)(*args, **kwargs)
    others = [tensor for tensor in tensors_of(args) if not any(tensor is field for field in state)]
    versions = [tensor._version for tensor in others]
    got = getattr(dsacp_npu.compressor, f"{name}_")(*args, **kwargs)
    assert_same(got, want)
    assert_same(state, want if name == "updated_state" else want.state)
    assert all(mine is given for mine, given in zip(got if name == "updated_state" else got.state, state, strict=True))
    assert [tensor._version for tensor in others] == versions


def test_lengths_may_be_the_counts_of_the_state_itself() -> None:
    args = to_torch((HERE.rows, *HERE.batch, HERE.state._replace(num_tokens=HERE.batch[1])))
    args = (args[0], args[1], args[3].num_tokens, args[3])
    want = dsacp_npu.compressor.updated_state(*args)
    assert_same(dsacp_npu.compressor.updated_state_(*args), want)


IN_PLACE = [bad for bad in REFUSED if bad.function in ("updated_state", "compress")]


@pytest.mark.parametrize("bad", IN_PLACE, ids=lambda bad: bad.function)
def test_a_refused_call_leaves_the_state_as_it_was(bad: Case) -> None:
    args, kwargs = to_torch(bad.args), to_torch(bad.kwargs)
    tensors = tensors_of(args)
    before = [(tensor._version, tensor.clone()) for tensor in tensors]
    pure, in_place = (getattr(dsacp_npu.compressor, bad.function + end) for end in ("", "_"))
    want, _ = outcome(lambda: pure(*args, **kwargs))
    got, _ = outcome(lambda: in_place(*args, **kwargs))
    assert got == want != ""
    for tensor, (version, copy) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert_same(tensor, copy)


def test_short_rows_are_projected_without_rounding() -> None:
    """1 + 3/1024 lies between two neighbours of bfloat16, and so does its sum with a bias of 3/1024."""
    weights = dsacp_npu.compressor.CompressorWeights(*torch.ones(3, 1, 2).bfloat16(), torch.ones(1))
    weights = weights._replace(ape=torch.tensor([[3 / 1024]]))
    x, position = torch.tensor([[1, 3 / 1024]]).bfloat16(), torch.zeros(1, dtype=torch.int32)
    rows = dsacp_npu.compressor.projected_rows(x, position, weights)
    assert (rows.kv.item(), rows.score.item()) == (1 + 3 / 1024, 1 + 6 / 1024)


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.function)
def test_refusals_mirror(bad: Case) -> None:
    assert_refusal_mirrors("compressor", bad)


@pytest.mark.parametrize("call", STATIC, ids=lambda call: call.function)
@pytest.mark.parametrize("way", WAYS)
def test_runs_without_values(call: Case, way: str) -> None:
    assert_runs_without_values("compressor", way, call)


@pytest.mark.parametrize("call", [call for call in STATIC if call.function in ("updated_state", "compress")])
@pytest.mark.parametrize("way", WAYS)
def test_in_place_runs_without_values(call: Case, way: str) -> None:
    """As above; every run has inputs of its own, since they are written to."""
    pure, in_place = (getattr(dsacp_npu.compressor, call.function + end) for end in ("", "_"))
    want = pure(*to_torch(call.args), **call.kwargs)
    if way == "compiled":
        torch._dynamo.reset()
        compiled = torch.compile(in_place, fullgraph=True, backend="aot_eager", dynamic=False)
        args = to_torch(call.args)
        assert_same(compiled(*args, **call.kwargs), want)
        state = args[4] if call.function == "compress" else args[3]
        assert_same(state, want.state if call.function == "compress" else want)
        return
    device = "cpu" if way == "fake" else "meta"
    with FakeTensorMode() if way.startswith("fake") else nullcontext():
        got = in_place(*on_device(to_torch(call.args), device), **call.kwargs)
    signs = [(tensor.dtype, tensor.shape) for tensor in tensors_of(want)]
    assert [(tensor.dtype, tensor.shape) for tensor in tensors_of(got)] == signs


def test_pooling_in_parts_changes_nothing(monkeypatch) -> None:
    args, options = to_torch((HERE.rows, *HERE.after)), HERE.options
    whole = dsacp_npu.compressor.compressed_entries(*args, **options)
    monkeypatch.setattr(dsacp_npu.compressor, "POOLED_NUMBERS", 40)
    assert_same(dsacp_npu.compressor.compressed_entries(*args, **options), whole)


def test_zeroed_rows_leave_no_nan_in_gradients() -> None:
    x, weights, *rest = to_torch(HERE[:6])
    x = x.nan_to_num().requires_grad_()
    dsacp_npu.compressor.compress(x, weights, *rest, eps=1e-6).compressed.entries.sum().backward()
    assert torch.isfinite(x.grad).all()
