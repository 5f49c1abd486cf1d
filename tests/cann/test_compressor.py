"""The compressor over the operator gives what the reference gives, in both forms of the operator, chunk by chunk."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import cann
from dsacp_npu import compressor as mirror
from dsacp_npu.emulator import installed
from dsacp_ref import compressor as ref
from dsacp_ref.paging import slot_mapping
from dsacp_ref.rope import rope_frequencies, rope_table
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.cann.common import BLOCKS, HALVES, WAYS, assert_runs_without_values
from tests.compare import assert_same, assert_within_budget
from tests.maths_strategies import normal, seeds
from tests.mirror.common import case, int32, mapped, to_numpy, to_torch
from tests.strategies import fewer

FORMS = ("current", "two_state")
TRIPLES = [(4, 2, 512), (4, 2, 128), (128, 1, 512)]
FREQUENCIES = rope_frequencies(10000.0, 64)
EPS = 1e-6
HIDDEN = 1024


class Step(NamedTuple):
    """One step; what the state does not hold is NaN."""

    x: Any
    weights: Any
    query_start_loc: Any
    num_computed_tokens: Any
    state: Any

    def args(self) -> tuple[Any, ...]:
        return *self, FREQUENCIES


def step_of(
    rng: np.random.Generator,
    triple: tuple[int, int, int],
    lengths: list[tuple[int, int]],  # (tokens before, new tokens); negative before for a padded graph slot
    *,
    spare: int = 0,
    beyond: int = 0,
    dtype: str = "bfloat16",
) -> Step:
    """A step of legal sizes in a dtype, mid-way: the rings hold random rows of the last tokens before it."""
    ratio, c, d = triple
    width, num_rows, num_reqs = c * d, c * ratio + spare, len(lengths)
    weights = ref.CompressorWeights(
        *(normal(rng, width, HIDDEN, scale=HIDDEN**-0.5) for _ in range(2)),
        normal(rng, ratio, width),
        1 + normal(rng, d, scale=0.3),
    )
    before = np.array([max(length[0], 0) for length in lengths], np.int32)
    rings = np.full((2, num_reqs, num_rows, width), np.nan, np.float32)
    for request, end in enumerate(before.tolist()):
        for position in range(max(end - num_rows, 0), end):
            rings[:, request, position % num_rows] = rng.standard_normal((2, width))
    fresh = before == 0
    held, ends = np.maximum(before - num_rows, 0), before
    # Counts of a ring's last user mean nothing to a request that starts.
    state = ref.CompressorState(*rings, np.where(fresh, 70, held).astype("i4"), np.where(fresh, 75, ends).astype("i4"))
    loc = int32(0, *np.cumsum([length[1] for length in lengths]))
    x = np.concatenate([normal(rng, int(loc[-1]), HIDDEN), np.full((beyond, HIDDEN), np.nan)])
    x, weights = to_torch((x, weights), dtype)
    weights = weights._replace(ape=weights.ape.float())
    starts = int32(*(length[0] for length in lengths))
    return Step(x, weights, *to_torch((loc, starts, state)))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Requests that start, go on anywhere in a window, rest, or are padded slots; long prefixes; few new tokens."""
    triple = draw(st.sampled_from(TRIPLES))
    ratio = triple[0]
    before = st.one_of(st.just(0), st.integers(0, 2 * ratio + 3), st.integers(0, 10**6))
    new = st.one_of(st.sampled_from([0, 1, ratio, ratio + 1]), st.integers(0, 2 * ratio + 3))
    lengths = draw(st.lists(st.tuples(before, new), min_size=draw(st.sampled_from([1, 2, 0])), max_size=3))
    lengths += draw(st.lists(st.tuples(st.integers(-3, -1), st.integers(1, 3)), max_size=1))
    lengths = draw(st.permutations(lengths))
    return step_of(
        np.random.default_rng(draw(seeds)),
        triple,
        lengths,
        spare=draw(st.sampled_from([0, 0, 1, 5])),
        beyond=draw(st.sampled_from([0, 0, 2])),
        dtype=draw(HALVES),
    )


def held_rows(state: ref.CompressorState) -> list[np.ndarray]:
    """The ring rows that hold a token, requests in order, values and scores."""
    found = []
    for request, (first, end) in enumerate(zip(state.held_start.tolist(), state.num_tokens.tolist(), strict=True)):
        rows = [position % state.kv.shape[1] for position in range(first, end)]
        found += [state.kv[request, rows], state.score[request, rows]]
    return found


def assert_step(got: ref.Compression, step: Step, name: str = "step") -> None:
    """Entries and held rows within the error of the plain computation; numbers exactly."""
    args = to_numpy(step.args(), "float64"), to_numpy(step.args(), "float32")
    exact, plain = (ref.compress(*each, eps=EPS) for each in args)
    assert_same(got.compressed[1:], exact.compressed[1:], name)
    entries = to_torch(plain.compressed.entries, str(step.x.dtype).removeprefix("torch."))
    assert_within_budget(got.compressed.entries, exact.compressed.entries, entries, f"{name}.entries")
    beyond = exact.compressed.entry_requests < 0
    assert not got.compressed.entries[torch.from_numpy(beyond)].any()
    assert_same(got.state[2:], exact.state[2:], name)
    assert got.state.kv.dtype == got.state.score.dtype == torch.float32
    mine = mapped(got.state, lambda tensor: tensor.numpy(), "dsacp_ref")
    for rows in zip(*map(held_rows, (mine, exact.state, plain.state)), strict=True):
        assert_within_budget(*rows, f"{name}.state")


@given(steps(), st.sampled_from(FORMS))
@fewer(2)
def test_compress_on_the_emulator(step: Step, form: str) -> None:
    before = mapped(step.state, torch.clone)
    with installed(compressor=form):
        got = cann.compress(*step.args(), eps=EPS)
    assert_same(step.state, before)
    assert_step(got, step)


@given(steps(), st.sampled_from(FORMS))
@fewer(4)
def test_compress_in_place_on_the_emulator(step: Step, form: str) -> None:
    """As on a device, where no value may be read; the state is the same object and holds what the pure one returns."""
    with installed(compressor=form), mock.patch("dsacp_npu._tensors.readable", return_value=False):
        want = cann.compress(*step.args(), eps=EPS)
        mine = mapped(step.state, torch.clone)
        got = cann.compress_(*step._replace(state=mine).args(), eps=EPS)
    assert all(kept is given for kept, given in zip(got.state, mine, strict=True))
    assert_same(got, want)


@given(st.sampled_from(TRIPLES), st.lists(st.integers(1, 9), min_size=2, max_size=4), st.sampled_from(FORMS), seeds)
@fewer(4)
def test_compress_on_the_emulator_does_not_depend_on_the_steps(
    triple: tuple[int, int, int], chunks: list[int], form: str, seed: int
) -> None:
    """A prompt in one step, and in several that hand the state on: the same entries to the last bit, and held rows."""
    chunks = [chunks[0] * triple[0] // 2, *chunks[1:]]
    whole = step_of(np.random.default_rng(seed), triple, [(0, sum(chunks))])
    with installed(compressor=form):
        want = cann.compress(*whole.args(), eps=EPS)
        state, found, first = whole.state, [], 0
        for length in chunks:
            loc, start = to_torch((int32(0, length), int32(first)))
            part = whole._replace(x=whole.x[first : first + length], query_start_loc=loc, num_computed_tokens=start)
            compressed, state = cann.compress(*part._replace(state=state).args(), eps=EPS)
            found.append(compressed.entries[: int(compressed.entry_start_loc[-1])])
            first += length
    entries = want.compressed.entries[: int(want.compressed.entry_start_loc[-1])]
    assert_within_budget(torch.cat(found), entries.double(), entries)
    assert_same(state[2:], want.state[2:])


@given(
    st.sampled_from([4, 128]),
    st.lists(st.tuples(st.integers(-2, 600), st.integers(0, 9)), max_size=4),
    BLOCKS,
    seeds,
)
@fewer(4)
def test_entry_rope_and_slots_on_the_emulator(
    ratio: int, lengths: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    loc, starts = int32(0, *np.cumsum([new for _, new in lengths])), int32(*(before for before, _ in lengths))
    num_rows = int(loc[-1]) + int(rng.integers(0, 3))
    table = rng.permutation(len(lengths) * 12).reshape(len(lengths), 12).astype(np.int32)
    positions = np.arange(700, dtype=np.int32)
    plan = ref.emitted_entries(loc, starts, ratio, num_rows=num_rows)
    slots = slot_mapping(plan.entry_indices, plan.entry_requests, table, block_size)
    rope = rope_table(np.where(plan.entry_requests < 0, -1, plan.entry_indices * ratio).astype(np.int32), FREQUENCIES)
    options = {"block_size": block_size, "compress_ratio": ratio, "num_rows": num_rows}
    with installed():
        got = cann.entry_rope_and_slots(*to_torch((*rope_table(positions, FREQUENCIES), loc, starts, table)), **options)
    assert_same(tuple(got), (*rope, slots))


HERE = [(5, 6), (0, 9), (3, 0), (-2, 2), (10**6, 3)]
STEP = step_of(np.random.default_rng(0), TRIPLES[1], HERE, beyond=3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("triple", TRIPLES[1:])
def test_it_runs_without_values(triple: tuple[int, int, int], form: str, way: str) -> None:
    step = step_of(np.random.default_rng(0), triple, HERE, beyond=3)
    step = step._replace(state=step.state._replace(kv=step.state.kv.nan_to_num(), score=step.state.score.nan_to_num()))
    with installed(compressor=form):
        assert_runs_without_values(way, case("compress", *step.args(), eps=EPS))
        if triple == TRIPLES[1]:
            assert_runs_without_values(way, case("compress_", *step.args(), eps=EPS))


@pytest.mark.parametrize("way", WAYS)
def test_entry_rope_and_slots_runs_without_values(way: str) -> None:
    rope = rope_table(np.arange(40, dtype=np.int32), FREQUENCIES)
    args = (*rope, int32(0, 6, 9), int32(5, 0), int32(3, 1).reshape(2, 1))
    with installed():
        assert_runs_without_values(
            way, case("entry_rope_and_slots", *to_torch(args), block_size=16, compress_ratio=4, num_rows=11)
        )


def test_nothing_to_compress_needs_no_operator() -> None:
    for lengths, beyond in (([], 0), ([], 5), ([(3, 0)], 0)):
        step = step_of(np.random.default_rng(0), TRIPLES[0], lengths, beyond=beyond)
        got = cann.compress(*step.args(), eps=EPS)
        want = mirror.compress(*step.args(), eps=EPS)
        assert_same(got, want)


def with_weights(**fields: Any) -> Step:
    return STEP._replace(weights=STEP.weights._replace(**fields))


WIDE = STEP.weights
OTHER_RATIO = with_weights(ape=WIDE.ape[:2])
LIMITS = [
    ("x must have dtype bfloat16 or float16", STEP._replace(x=STEP.x.float()), FREQUENCIES),
    (
        "hidden must be a multiple of 512 in 1024..10240, got 1000",
        STEP._replace(x=STEP.x[:, :1000], weights=WIDE._replace(wkv=WIDE.wkv[:, :1000], wgate=WIDE.wgate[:, :1000])),
        FREQUENCIES,
    ),
    (r"\(compress_ratio, c, d\) must be \(4, 2, 512\) or .*, got \(2, 2, 128\)", OTHER_RATIO, FREQUENCIES),
    ("rope_head_dim must be 64, got 32", STEP, FREQUENCIES[:16]),
]


@pytest.mark.parametrize(("words", "step", "frequencies"), LIMITS, ids=range(len(LIMITS)))
def test_a_limit_is_named(words: str, step: Step, frequencies: tuple[float, ...]) -> None:
    with pytest.raises(UnsupportedError, match=f"compress on cann: {words}"):
        cann.compress(*step, frequencies, eps=EPS)


BROKEN = [
    STEP._replace(state=STEP.state._replace(num_tokens=STEP.state.num_tokens - 1)),
    STEP._replace(state=STEP.state._replace(held_start=STEP.state.num_tokens)),
    STEP._replace(state=STEP.state._replace(kv=STEP.state.kv[:, :7], score=STEP.state.score[:, :7])),
    STEP._replace(state=STEP.state._replace(kv=STEP.state.kv.double())),
    STEP._replace(x=STEP.x[:10]),
    STEP._replace(x=STEP.x[:, :512]),
]


@pytest.mark.parametrize("step", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_contract_has_the_words_of_the_mirror(step: Step) -> None:
    before = mapped(step.state, torch.clone)
    with pytest.raises(ContractError) as theirs:
        mirror.compress(*step.args(), eps=EPS)
    with pytest.raises(ContractError) as mine:
        cann.compress_(*step.args(), eps=EPS)
    assert str(mine.value) == str(theirs.value)
    assert_same(step.state, before)
