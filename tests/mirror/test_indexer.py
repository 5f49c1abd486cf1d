"""`dsacp_npu.indexer` gives what `dsacp_ref.indexer` gives: its numbers, and its choices but for near ties."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import dsacp_npu.indexer as npu
from dsacp_npu import _index_calls, compressor
from dsacp_npu.quant import coded_vectors
from dsacp_ref import indexer as ref
from dsacp_ref.quant import QuantizedVectors, int8_index_scores, quantized_int8
from dsacp_ref.rope import rope_table
from tests.compare import assert_double, assert_same, assert_same_selection, scoring_noise
from tests.errors.test_maths_errors import LEGAL
from tests.laws.test_indexer import choices
from tests.laws.test_int8_indexer import EMPTY, coded_cache, int8_args, oracle_row
from tests.laws.test_select_qli import Stream, oracle_choices, streams
from tests.maths_strategies import index_calls, normal, seeds
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
    int32,
    on_device,
    outcome,
    tensors_of,
    to_numpy,
    to_torch,
    untouched,
)

DTYPES = st.sampled_from(list(TORCH_DTYPES))


def unreadable(wanted: bool):
    """Values as on a device, where no function may look at them."""
    return patch("dsacp_npu._tensors.readable", lambda tensor: not wanted)


def wide(dtype: str) -> str:
    """The dtype that scores are in."""
    return "float64" if dtype == "float64" else "float32"


# Queries, weights, scores.


@given(seeds, st.integers(0, 7), st.sampled_from([(), (0,), (3,), (2, 2)]), DTYPES)
def test_hadamard_mirrors(seed, log2, shape, dtype) -> None:
    x = normal(np.random.default_rng(seed), *shape, 2**log2)
    assert_floats_mirror("indexer", "hadamard", dtype, x)
    assert_mirrors("indexer", "hadamard", x.astype(np.float32))  # the same additions in the same order


@given(seeds, st.integers(0, 3), st.integers(0, 3), st.integers(1, 3), DTYPES, st.data())
def test_index_queries_mirrors(seed, num_tokens, num_heads, log2, dtype, data) -> None:
    rng, d = np.random.default_rng(seed), 2**log2
    positions = int32(*rng.integers(-1, 99, num_tokens))
    table = rope_table(positions, [0.3**i for i in range(data.draw(st.integers(0, d // 2)))])
    args = normal(rng, num_tokens, 5), normal(rng, num_heads * d, 5), *table
    assert_floats_mirror("indexer", "index_queries", dtype, *args, index_head_dim=d)


@given(seeds, st.integers(0, 3), st.integers(1, 4), st.sampled_from([1, 4, 128]), DTYPES)
def test_index_head_weights_mirrors(seed, num_tokens, num_heads, d, dtype) -> None:
    rng = np.random.default_rng(seed)
    args = normal(rng, num_tokens, 6), normal(rng, num_heads, 6)
    assert_floats_mirror("indexer", "index_head_weights", dtype, *args, index_head_dim=d)


@st.composite
def scorings(draw, most: int = 6) -> tuple[np.ndarray, ...]:
    """(queries, weights, keys), more keys than a tile among them."""
    rng = np.random.default_rng(draw(seeds))
    num_tokens, num_heads = draw(st.integers(0, most)), draw(st.sampled_from([0, 1, 2, 3, 33]))
    num_keys, d = draw(st.one_of(st.integers(0, most), st.sampled_from([192, 200]))), draw(st.sampled_from([1, 3, 8]))
    return normal(rng, num_tokens, num_heads, d), normal(rng, num_tokens, num_heads), normal(rng, num_keys, d)


def assert_scores_mirror(scoring: tuple[np.ndarray, ...], dtype: str) -> None:
    args = to_torch(scoring, dtype)
    got = untouched(npu.index_scores, args, {})
    exact, plain = (ref.index_scores(*to_numpy(args, each)) for each in ("float64", wide(dtype)))
    compare_floats(got, exact, to_torch(plain), "scores")


@given(scorings(), DTYPES, st.booleans())
def test_index_scores_mirrors(scoring, dtype, on_a_device) -> None:
    with unreadable(on_a_device):
        assert_scores_mirror(scoring, dtype)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_scores_at_the_models_own_sizes_mirror(dtype) -> None:
    rng = np.random.default_rng(0)
    assert_scores_mirror((normal(rng, 3, 64, 128), normal(rng, 3, 64), normal(rng, 1200, 128)), dtype)


@given(scorings(most=45), DTYPES, seeds)
def test_a_score_is_the_same_number_wherever_it_stands(scoring, dtype, seed) -> None:
    (q, weights, keys), rng = to_torch(scoring, dtype), np.random.default_rng(seed)
    scores = npu.index_scores(q, weights, keys)
    rows, columns = (np.sort(rng.integers(0, n + 1, 2)) for n in scores.shape)
    part = slice(*rows), slice(*columns)
    strided = torch.stack([keys, keys], dim=-1)[..., 0]
    assert_same(npu.index_scores(q[part[0]], weights[part[0]], strided[part[1]]), scores[part])
    order = torch.tensor(rng.permutation(len(keys)))
    assert_same(npu.index_scores(q, weights, keys[order]), scores[:, order])


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "num_keys"), [(1, 1, 1), (3, 2, 13), (40, 64, 300), (2, 5, 1500)])
def test_equal_keys_score_equally(dtype, num_tokens, num_heads, num_keys) -> None:
    rng = np.random.default_rng(0)
    parts = normal(rng, num_tokens, num_heads, 128), normal(rng, num_tokens, num_heads), normal(rng, 1, 128)
    q, weights, key = to_torch(parts, dtype)
    scores = npu.index_scores(q, weights, key.repeat(num_keys, 1))
    assert_same(scores, scores[:, :1].expand_as(scores))


def test_scores_in_parts_are_joined_without_a_seam(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    args = to_torch((normal(rng, 70, 2, 4), normal(rng, 70, 2), normal(rng, 900, 4)))
    whole = npu.index_scores(*args)
    monkeypatch.setattr(_index_calls, "SCORED_NUMBERS", 3000)
    monkeypatch.setattr(_index_calls, "KEY_BLOCK", 192)
    assert_same(npu.index_scores(*args), whole)


def test_scores_have_gradients() -> None:
    args = [torch.rand(2, 3, 4, requires_grad=True), torch.rand(2, 3, requires_grad=True), torch.rand(5, 4)]
    npu.index_scores(*args).sum().backward()
    assert (args[0].grad != 0).all()
    assert (args[1].grad != 0).all()


# The choice.


@given(choices(), st.booleans())
@example((np.full((1, 12), 0.0), int32(12), 5), True)
@example((np.array([[np.nan, 1, -np.inf, np.nan]]), int32(4), 4), True)
@example((np.array([[-np.inf, -np.inf, 5.0, 5.0]]), int32(2), 3), True)
def test_selected_entries_mirrors(choice, on_a_device) -> None:
    """Ties, NaN and infinities, exactly; NaN also where nothing may be read."""
    with unreadable(on_a_device):
        assert_mirrors("indexer", "selected_entries", *choice)


@given(seeds, st.integers(1, 60), st.integers(1, 6), DTYPES)
def test_choices_from_many_entries_mirror(seed, num_entries, index_topk, dtype) -> None:
    """Far more entries than are chosen, few distinct scores, infinities and NaN among them."""
    rng = np.random.default_rng(seed)
    scores = rng.choice([0.0, -0.0, 1.0, 2.0, -1.0, np.nan, np.inf, -np.inf], (4, num_entries))
    visible = int32(*rng.integers(0, num_entries + 1, 4))
    got = npu.selected_entries(*to_torch((scores, visible), dtype), index_topk)
    assert_same(got, ref.selected_entries(scores, visible, index_topk))


def test_a_long_tie_is_chosen_in_order() -> None:
    got = npu.selected_entries(torch.zeros(3, 3000), torch.tensor([3000, 2, 0], dtype=torch.int32), 600)
    assert_same(got[0], torch.arange(600, dtype=torch.int32))


# Over a paged cache.


def assert_choices_mirror(call, args: tuple[Any, ...], got: torch.Tensor, dtype: str) -> None:
    """Each query's choice against the reference's float64 one, on the same rounded inputs."""
    q, weights, cache = to_numpy(args[:3], "float64")
    want = ref.lightning_indexer(q, weights, cache, *call.args[3:], **call.options)
    for query, place in enumerate(call.places):
        one = slice(query, query + 1)
        if place is None:
            assert (got[query] == -1).all()
            continue
        slots = call.side.slots[place[0]][: (place[1] + 1) // call.ratio]
        keys = cache.reshape(-1, cache.shape[2])[slots]
        exact = ref.index_scores(q[one], weights[one], keys)
        low = ref.index_scores(*(part.astype(wide(dtype)) for part in (q[one], weights[one], keys)))
        noise = scoring_noise(exact, low) if dtype != "float64" else 1e-14 * np.abs(exact).max(initial=1)
        assert_same_selection(got[one], want[one], exact, noise)


@given(index_calls(dtype=np.float64), DTYPES, st.booleans())
def test_lightning_indexer_mirrors(call, dtype, on_a_device) -> None:
    """Shuffled blocks, garbage in tables, NaN keys that no query sees yet, queries beyond the last row."""
    args = to_torch(call.args, dtype)
    with unreadable(on_a_device):
        got = untouched(npu.lightning_indexer, args, call.options)
    assert got.dtype == torch.int32
    assert_choices_mirror(call, args, got, dtype)


@given(index_calls(dtype=np.float64), DTYPES, st.booleans(), st.booleans())
def test_values_known_or_not_the_choice_is_the_same(call, dtype, int8, in_parts) -> None:
    """Exactly, whatever the scores: both ways add up in the same order."""
    args = to_torch(call.args, dtype)
    args = (*args[:2], to_torch(coded_cache(call)), *args[3:]) if int8 else args
    want = npu.lightning_indexer(*args, **call.options)
    with unreadable(True), patch.object(_index_calls, "GATHERED_NUMBERS", 100 if in_parts else 1 << 24):
        assert_same(npu.lightning_indexer(*args, **call.options), want)


@given(index_calls(), st.booleans())
def test_small_integers_are_chosen_exactly(call, on_a_device) -> None:
    """All sums are exact, so ties are ties and the choice has one answer."""
    args = [np.nan_to_num(np.rint(part)) for part in call.args[:2]]
    cache = np.rint(call.side.cache)
    with unreadable(on_a_device):
        assert_mirrors("indexer", "lightning_indexer", *args, cache, *call.args[3:], **call.options)


@given(index_calls(dtype=np.float64), st.sampled_from(["float64", "float32", "bfloat16"]), st.booleans())
def test_int8_keys_are_chosen_as_by_the_reference(call, dtype, on_a_device) -> None:
    args = to_torch(int8_args(call)[:2], dtype)
    plain = to_numpy(args, wide(dtype))
    call = call._replace(q=plain[0], weights=plain[1])
    want = ref.lightning_indexer(*plain, coded_cache(call), *call.args[3:], **call.options)
    with unreadable(on_a_device):
        got = npu.lightning_indexer(*args, *to_torch((coded_cache(call), *call.args[3:])), **call.options)
    for query, place in enumerate(call.places):
        one, visible = slice(query, query + 1), 0 if place is None else (place[1] + 1) // call.ratio
        if not visible:
            assert (got[query] == -1).all()
            continue
        scores, size = oracle_row(call, query, place[0], visible)
        noise = 2 * call.q.shape[1] * 2.0**-23 * size
        assert_same_selection(got[one], want[one], np.array([scores]), noise)


def long_call(rng: np.random.Generator, num_heads: int, d: int) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Two requests at the real ratio and top-k, long enough that the choice is one."""
    lengths, blocks = (40, 2600), np.arange(12, dtype=np.int32)
    q, weights = normal(rng, 48, num_heads, d), normal(rng, 48, num_heads)
    table = rng.permutation(blocks).reshape(2, 6).astype(np.int32)
    args = q, weights, normal(rng, 12, 128, d), table, int32(0, 40, 48), int32(*lengths)
    return args, {"compress_ratio": 4, "index_topk": 512}


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_long_requests_choose_as_the_reference(dtype) -> None:
    args, options = long_call(np.random.default_rng(0), 64, 128)
    tensors = to_torch(args, dtype)
    got = npu.lightning_indexer(*tensors, **options)
    with unreadable(True):
        assert_same(npu.lightning_indexer(*tensors, **options), got)
    plain = to_numpy(tensors, "float64")
    want = ref.lightning_indexer(*plain, **options)
    keys = plain[2][args[3][1]].reshape(-1, 128)[:650]
    exact = ref.index_scores(plain[0][40:], plain[1][40:], keys)
    low = ref.index_scores(*(part.astype(wide(dtype)) for part in (plain[0][40:], plain[1][40:], keys)))
    assert_same_selection(got[40:], want[40:], exact, scoring_noise(exact, low))
    assert_same(torch.sort(got[:40]).values, torch.sort(torch.tensor(want[:40])).values)


def test_long_requests_choose_from_int8_as_the_reference() -> None:
    args, options = long_call(np.random.default_rng(1), 8, 64)
    args = (*args[:2], quantized_int8(args[2]), *args[3:])
    got = npu.lightning_indexer(*to_torch(args), **options)
    with unreadable(True):
        assert_same(npu.lightning_indexer(*to_torch(args), **options), got)
    keys = QuantizedVectors(*(part[args[3][1]].reshape(-1, *part.shape[2:])[:650] for part in args[2]))
    coded, weights = quantized_int8(args[0][40:]), args[1][40:].astype(np.float16)
    exact = int8_index_scores(coded, weights, keys).astype(np.float64)
    noise = 2 * 8 * 2.0**-23 * int8_index_scores(coded, np.abs(weights), keys).max(axis=1)
    assert_same_selection(got[40:], ref.lightning_indexer(*args, **options)[40:], exact, noise)


@given(index_calls(unseen=0.0), st.sampled_from([np.nan, np.inf, -np.inf, 1e30]), st.booleans())
def test_keys_that_are_not_visible_yet_change_nothing(call, garbage, on_a_device) -> None:
    cache = call.side.cache.copy()
    for row, used in enumerate(call.seqused_kv.tolist()):
        for slot in call.side.slots[row][used // call.ratio :]:
            cache.reshape(-1, cache.shape[2])[slot] = garbage
    want = npu.lightning_indexer(*to_torch(call.args), **call.options)
    with unreadable(on_a_device):
        got = npu.lightning_indexer(*to_torch((*call.args[:2], cache, *call.args[3:])), **call.options)
    assert_same(got, want)


# A whole step.


def step_arguments(stream: Stream, dtype: str, *, int8: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of one device's step: the state wide, the rest in a dtype."""
    batch, made = stream.batch, stream.made
    loc, lens = batch.query_start_loc, batch.key_lens
    positions = ref.query_positions(loc, lens, num_rows=batch.num_tokens)
    table = rope_table(positions, made.freqs)
    cache = stream.cache if dtype == "float64" else np.nan_to_num(stream.cache)
    cache = quantized_int8(np.nan_to_num(cache)) if int8 else cache
    floats = to_torch((stream.new_x, stream.qr, *table, stream.weights), dtype)
    rest = to_torch((stream.table, loc, lens, int32(*range(len(lens))), stream.starts))
    cache = to_torch(cache) if int8 else to_torch(cache, dtype)
    state = to_torch(stream.state, wide(dtype))
    return [*floats, cache, rest[0], state, *rest[1:], made.freqs], {"index_topk": stream.index_topk, "eps": made.eps}


def reference_arguments(args: list[Any], dtype: str) -> list[Any]:
    """The same numbers for the reference; an int8 cache stays one."""
    coded = isinstance(args[5], npu.QuantizedVectors)
    plain = list(to_numpy(tuple(args), dtype))
    return [*plain[:5], QuantizedVectors(*(part.numpy() for part in args[5])), *plain[6:]] if coded else plain


@given(streams(), st.booleans())
def test_select_qli_mirrors(stream, on_a_device) -> None:
    args, options = step_arguments(stream, "float64")
    want = ref.select_qli(*reference_arguments(args, "float64"), **options)
    with unreadable(on_a_device):
        got = untouched(npu.select_qli, tuple(args), options)
    assert_double(got.index_cache.numpy(), want.index_cache, "index_cache")
    compare_floats(got.state, want.state, want.state, "state")
    _, scores = oracle_choices(stream)
    noise = 1e-12 * np.nanmax(np.abs(scores), axis=1, initial=1)
    assert_same_selection(got.topk_indices, want.topk_indices, scores, noise)


@given(streams(), DTYPES, st.booleans(), st.booleans())
def test_a_step_is_made_of_its_parts(stream, dtype, int8, on_a_device) -> None:
    """In every precision, with float and int8 keys: what is written, and the choice from it."""
    args, options = step_arguments(stream, dtype, int8=int8)
    with unreadable(on_a_device):
        got = npu.select_qli(*args, **options)
    x, qr, cos, sin, weights, cache, table, state, cu, used, _, starts, freqs = args
    step = compressor.compress(x, weights.compressor, cu, starts, state, freqs, eps=options["eps"])
    assert_same(got.state, step.state)
    entries, requests, indices, _ = step.compressed
    keys, block_size = npu.hadamard(entries), table.shape[1] and tensors_of((cache,))[0].shape[1]
    stored = tensors_of((coded_vectors("keys", keys),)) if int8 else [keys]
    for part, before, values in zip(tensors_of((got.index_cache,)), tensors_of((cache,)), stored, strict=True):
        want = before.clone()
        for value, request, index in zip(values, requests.tolist(), indices.tolist(), strict=True):
            if request >= 0:
                want[table[request, index // block_size], index % block_size] = value
        assert_same(part, want)
    d = len(weights.compressor.norm_weight)
    q = npu.index_queries(qr, weights.wq_b, cos, sin, index_head_dim=d)
    gains = npu.index_head_weights(x, weights.weights_proj, index_head_dim=d)
    sizes = {"compress_ratio": len(weights.compressor.ape), "index_topk": options["index_topk"]}
    assert_same(got.topk_indices, npu.lightning_indexer(q, gains, got.index_cache, table, cu, used, **sizes))


@given(streams(), DTYPES, st.booleans(), st.booleans())
def test_select_qli_in_place(stream, dtype, int8, on_a_device) -> None:
    args, options = step_arguments(stream, dtype, int8=int8)
    held = tensors_of((args[5], args[7]))
    others = [tensor for tensor in tensors_of(tuple(args)) if not any(tensor is mine for mine in held)]
    versions = [tensor._version for tensor in others]
    with unreadable(on_a_device):
        want = npu.select_qli(*args, **options)
        got = npu.select_qli_(*args, **options)
    assert_same(got, want)
    assert_same((args[5], args[7]), (want.index_cache, want.state))
    assert all(mine is given for mine, given in zip(tensors_of((got.index_cache, got.state)), held, strict=True))
    assert [tensor._version for tensor in others] == versions


# Refusals, and running where no value can be read.

STEP, CALL = LEGAL[ref.select_qli], LEGAL[ref.lightning_indexer]
CODED = QuantizedVectors(np.ones((2, 2, 3), np.int8), np.ones((2, 2), np.float16))
X = normal(np.random.default_rng(0), 3, 4)
Q, GAINS = normal(np.random.default_rng(1), 3, 2, 4), X[:, :2]
UNFIT = QuantizedVectors(CODED.values, CODED.scales[:, :1])


def with_(legal: dict[str, Any], function: str, **changed: Any) -> Case:
    """A legal call with these arguments instead."""
    return case(function, **{**legal, **changed})


def step(**changed: Any) -> Case:
    return with_(STEP, "select_qli", **changed)


def call(**changed: Any) -> Case:
    return with_(CALL, "lightning_indexer", **changed)


STATIC = [
    case("hadamard", X),
    case("index_queries", X, np.ones((4, 4)), X[:, :1], X[:, :1], index_head_dim=2),
    case("index_head_weights", X, X, index_head_dim=2),
    case("index_scores", Q, GAINS, X),
    case("index_scores", Q[:0], GAINS[:0], X),
    case("selected_entries", X, int32(4, 0, 2), 2),
    case("selected_entries", X, int32(4, 0, 2), 7),
    case("selected_entries", np.tile(X, 3), int32(4, 0, 12), 2),
    call(),
    call(index_cache=CODED),
    call(cmp_block_table=np.empty((2, 0), np.int32), seqused_kv=int32(0, 0)),
    step(),
    step(index_cache=EMPTY),
    step(compress_x=None, compress_cu_seqlens=None, seqused_kv=int32(6, 1)),
]

REFUSED = [
    case("hadamard", X[:, :3]),
    case("hadamard", X[:, :0]),
    case("hadamard", X > 0),
    case("hadamard", [1.0]),
    case("index_queries", X[0], X, X[:, :1], X[:, :1], index_head_dim=2),
    case("index_queries", X, X[:, :3], X[:, :1], X[:, :1], index_head_dim=2),
    case("index_queries", X, X, X[:, :1], X[:, :1], index_head_dim=2),
    case("index_queries", X, X, X[:, :1], X[:, :1], index_head_dim=3),
    case("index_queries", X, X, X[:, :1], X[:, :1], index_head_dim=0),
    case("index_queries", X, X, X[:2, :1], X[:2, :1], index_head_dim=1),
    case("index_head_weights", X[0], X, index_head_dim=2),
    case("index_head_weights", X, X[:, :3], index_head_dim=2),
    case("index_head_weights", X, X, index_head_dim=0.5),
    case("index_scores", Q[0], GAINS, X),
    case("index_scores", Q, GAINS[:2], X),
    case("index_scores", Q, GAINS.astype(np.float32), X),
    case("index_scores", Q, GAINS, X[:, :3]),
    case("index_scores", Q, GAINS, X.astype(np.float32)),
    case("selected_entries", X[0], int32(1), 2),
    case("selected_entries", X > 0, int32(4, 0, 2), 2),
    case("selected_entries", X, int32(4, 0), 2),
    case("selected_entries", X, int32(4, 0, 5), 2),
    case("selected_entries", X, int32(4, -1, 2), 2),
    case("selected_entries", X, int32(4, 0, 2), 0),
    call(index_q=CALL["index_q"][0]),
    call(index_weights=CALL["index_weights"][1:]),
    call(index_cache=CALL["index_cache"][:, :, :2]),
    call(index_cache=CALL["index_cache"].astype(np.float32)),
    call(index_cache=CODED._replace(values=CODED.values[:, :, :2])),
    call(index_cache=CODED._replace(values=CODED.values.astype(np.int16))),
    call(index_cache=UNFIT),
    call(index_cache=CODED, index_q=CALL["index_q"] * 1e9),
    call(index_cache=CODED, index_weights=CALL["index_weights"] * 1e9),
    call(index_cache=tuple(CODED)),
    call(cmp_block_table=CALL["cmp_block_table"][1:]),
    call(cmp_block_table=int32(-1, 0).reshape(2, 1)),
    call(cmp_block_table=int32(0, 2).reshape(2, 1)),
    call(seqused_kv=int32(5, 9)),
    call(seqused_kv=int32(2, 2)),
    call(cu_seqlens_q=int32(0, 3, 5)),
    call(cu_seqlens_q=int32(1, 3, 4)),
    call(compress_ratio=0),
    call(index_topk=0),
]

REFUSED_STEPS = [
    step(compress_x=None),
    step(weights=None),
    step(state=None),
    step(x=STEP["x"][0]),
    step(x=STEP["x"][1:]),
    step(qr=STEP["qr"][:, 1:]),
    step(qr=STEP["qr"].astype(np.float32)),
    step(cos=STEP["cos"][1:]),
    step(index_cache=STEP["index_cache"][:, :, 1:]),
    step(index_cache=STEP["index_cache"].astype(np.float32)),
    step(index_cache=EMPTY._replace(scales=EMPTY.scales[1:])),
    step(index_cache=EMPTY, qr=STEP["qr"] * np.inf),
    step(index_cache=EMPTY, x=STEP["x"] * 1e9),
    step(cmp_block_table=STEP["cmp_block_table"][0]),
    step(cmp_block_table=int32(1, 1, 1, -1).reshape(2, 2)),
    step(cmp_block_table=int32(1, -1, 0, -1).reshape(2, 2)),
    step(cmp_block_table=int32(1, 3, 0, -1).reshape(2, 2)),
    step(  # an entry of an earlier step: read, not written
        cmp_block_table=int32(7, 2, 0, -1).reshape(2, 2),
        num_computed_tokens=int32(4, 0),
        state=STEP["state"]._replace(num_tokens=int32(4, 0)),
        seqused_kv=int32(9, 2),
    ),
    step(cu_seqlens_q=int32(1, 3, 4)),
    step(seqused_kv=int32(1, 2)),
    step(seqused_kv=int32(9, 9)),
    step(request_indices=int32(0)),
    step(request_indices=int32(0, 2)),
    step(num_computed_tokens=int32(3, 1)),
    step(index_topk=0),
    step(eps=-1.0),
]


@pytest.mark.parametrize("bad", REFUSED + REFUSED_STEPS, ids=lambda bad: bad.function)
def test_refusals_mirror(bad: Case) -> None:
    with np.errstate(invalid="ignore"):
        assert_refusal_mirrors("indexer", bad)


@pytest.mark.parametrize("bad", REFUSED_STEPS, ids=lambda bad: bad.function)
def test_a_refused_step_leaves_cache_and_state_as_they_were(bad: Case) -> None:
    kwargs = to_torch(bad.kwargs)
    before = [(tensor._version, tensor.clone()) for tensor in tensors_of(kwargs)]
    text, _ = outcome(lambda: npu.select_qli_(**kwargs))
    assert text
    for tensor, (version, copy) in zip(tensors_of(kwargs), before, strict=True):
        assert tensor._version == version
        assert_same(tensor, copy)


@pytest.mark.parametrize("call", STATIC, ids=lambda call: call.function)
@pytest.mark.parametrize("way", WAYS)
def test_runs_without_values(call: Case, way: str) -> None:
    assert_runs_without_values("indexer", way, call)


@pytest.mark.parametrize("call", [step(), step(index_cache=EMPTY)], ids=["float", "int8"])
@pytest.mark.parametrize("way", WAYS)
def test_in_place_runs_without_values(call: Case, way: str) -> None:
    """As above, with a cache and a state of its own, since they are written to."""
    kwargs = to_torch(call.kwargs)
    want = npu.select_qli(**kwargs)
    if way == "compiled":
        torch._dynamo.reset()
        compiled = torch.compile(npu.select_qli_, fullgraph=True, backend="aot_eager", dynamic=False)
        assert_same(compiled(**kwargs), want)
        assert_same((kwargs["index_cache"], kwargs["state"]), (want.index_cache, want.state))
        return
    with FakeTensorMode() if way.startswith("fake") else nullcontext():
        got = npu.select_qli_(**on_device(kwargs, "cpu" if way == "fake" else "meta"))
    signs = [(tensor.dtype, tensor.shape) for tensor in tensors_of(want)]
    assert [(tensor.dtype, tensor.shape) for tensor in tensors_of(got)] == signs
