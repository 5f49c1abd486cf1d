"""`dsacp_npu.fp8` gives what `dsacp_ref.fp8` gives, byte for byte but for the order of a sum in a score."""

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

import dsacp_npu.fp8 as npu
import dsacp_npu.indexer
from dsacp_npu import _index_calls
from dsacp_npu.quant import SCORED_NUMBERS
from dsacp_ref import fp8 as ref
from dsacp_ref import indexer as ref_indexer
from tests.compare import assert_same, assert_same_selection
from tests.errors.test_maths_errors import LEGAL
from tests.laws.test_fp8 import coded_cache, fp8_args, fp8_numbers, key_rows, latent_rows, numbers, oracle_row, vectors
from tests.maths_strategies import index_calls, normal, seeds
from tests.mirror.common import TORCH_DTYPES, WAYS, to_numpy, to_torch

SHORT = st.sampled_from(["bfloat16", "float16"])


def unreadable(wanted: bool):
    """Values as on a device, where no function may look at them."""
    return patch("dsacp_npu._tensors.readable", lambda tensor: not wanted)


def tensor(array: np.ndarray) -> torch.Tensor:
    """The array as a tensor; FP8 by its bytes."""
    if str(array.dtype) == "float8_e4m3fn":
        return torch.tensor(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.tensor(array)


def vectors_of(coded: ref.FP8Vectors) -> npu.FP8Vectors:
    """The mirror's record of the same codes."""
    return npu.FP8Vectors(tensor(coded.values), tensor(np.asarray(coded.scales)))


def assert_same_codes(got: npu.FP8Vectors, want: ref.FP8Vectors) -> None:
    """The same dtypes, bytes and scales."""
    assert isinstance(got, npu.FP8Vectors)
    assert (got.values.dtype, got.scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert_same(got.values.view(torch.uint8), want.values.view(np.uint8))
    assert_same(got.scales, np.asarray(want.scales))


def shortened(x: np.ndarray, dtype: str) -> torch.Tensor:
    """The numbers in a short dtype, none of them infinite there."""
    most = float(torch.finfo(TORCH_DTYPES[dtype]).max)
    return torch.tensor(np.clip(x, -most, most)).to(TORCH_DTYPES[dtype])


# Codes and scores.


@given(vectors(), st.booleans())
@example(np.array([448.0, 1.0625 + 1e-12]), False)
@example(np.array([2.0**-107, -(2.0**-130)], np.float32), False)
@example(np.array([np.nextafter(2.0**-107, 0), 0]), True)
def test_quantized_fp8_mirrors(x, on_a_device) -> None:
    with unreadable(on_a_device):
        assert_same_codes(npu.quantized_fp8(torch.tensor(x)), ref.quantized_fp8(x))


@given(vectors(), SHORT, st.booleans())
def test_short_vectors_are_coded_from_float32(x, dtype, on_a_device) -> None:
    x = shortened(x, dtype)
    with unreadable(on_a_device):
        got = npu.quantized_fp8(x)
    assert_same_codes(got, ref.quantized_fp8(to_numpy(x, "float32")))


def test_every_float_of_many_is_coded_as_the_reference_does() -> None:
    """Vectorised casts and their rests: all lengths, all exponents, steps and midpoints."""
    rng = np.random.default_rng(0)
    steps = np.arange(127, dtype=np.uint8).view(ref.narrow_floats().float8_e4m3fn).astype(np.float32)
    middles = (steps[1:] + steps[:-1]) / 2
    sides = [np.nextafter(middles, np.float32(side)) for side in (0, 500)]
    x = np.concatenate([steps, middles, *sides, rng.uniform(-448, 448, 100_000).astype(np.float32)])
    x = np.concatenate([x, -x, np.ldexp(rng.uniform(-1, 1, 100_000), rng.integers(-40, 9, 100_000)).astype(np.float32)])
    x = np.concatenate([[np.float32(448)], x])
    assert_same_codes(npu.quantized_fp8(torch.tensor(x)), ref.quantized_fp8(x))
    for length in range(1, 70):
        assert_same_codes(npu.quantized_fp8(torch.tensor(x[:length])), ref.quantized_fp8(x[:length]))


@given(vectors(), st.booleans())
def test_dequantized_fp8_mirrors(x, on_a_device) -> None:
    coded = ref.quantized_fp8(x)
    with unreadable(on_a_device):
        assert_same(npu.dequantized_fp8(vectors_of(coded)), ref.dequantized_fp8(coded))


def test_every_code_is_decoded_as_by_the_reference() -> None:
    codes = ref.FP8Vectors(fp8_numbers(range(256)), np.array(0.3, np.float32))
    assert_same(npu.dequantized_fp8(vectors_of(codes)), ref.dequantized_fp8(codes))


@st.composite
def scorings(draw) -> tuple[ref.FP8Vectors, np.ndarray, ref.FP8Vectors]:
    """(queries, weights, keys) in codes, more keys than a tile among them, zero vectors too."""
    rng = np.random.default_rng(draw(seeds))
    num_tokens, num_keys = draw(st.integers(0, 5)), draw(st.one_of(st.integers(0, 6), st.sampled_from([192, 200])))
    num_heads, d = draw(st.sampled_from([0, 1, 2, 3, 33])), draw(st.sampled_from([1, 3, 8, 128]))
    k = numbers(rng, num_keys, d) * (rng.random((num_keys, 1)) < 0.8)
    weights = normal(rng, num_tokens, num_heads, scale=0.1, dtype=np.float32)
    return ref.quantized_fp8(numbers(rng, num_tokens, num_heads, d)), weights, ref.quantized_fp8(k)


def sum_noise(q: ref.FP8Vectors, weights: np.ndarray, keys: ref.FP8Vectors) -> np.ndarray:
    """What float32 sums of these scores may lose: a rounding for each channel and head, of the sum of magnitudes."""
    sizes = [np.abs(part.values.astype(np.float64)) for part in (q, keys)]
    gains = np.abs(weights.astype(np.float64) * q.scales)
    total = np.einsum("th,thd,kd->tk", gains, *sizes) * keys.scales
    return (sum(q.values.shape[1:]) + 2) * 2.0**-24 * total


@given(scorings(), st.booleans())
def test_fp8_index_scores_mirrors(scoring, on_a_device) -> None:
    q, weights, keys = scoring
    want = ref.fp8_index_scores(*scoring)
    with unreadable(on_a_device):
        got = npu.fp8_index_scores(vectors_of(q), torch.tensor(weights), vectors_of(keys))
    assert (got.dtype, got.shape) == (torch.float32, want.shape)
    assert (np.abs(got.numpy().astype(np.float64) - want) <= sum_noise(*scoring)).all()


@pytest.mark.parametrize("num_heads", [1, 3])
def test_sums_that_float32_holds_are_the_references_exactly(num_heads) -> None:
    rng = np.random.default_rng(0)
    q, keys = (rng.integers(-8, 9, shape).astype(np.float64) for shape in ((5, num_heads, 128), (200, 128)))
    q[..., 0], keys[:, 0] = 448, 448  # scales of 1
    scoring = ref.quantized_fp8(q), rng.integers(-2, 3, (5, num_heads)).astype(np.float32), ref.quantized_fp8(keys)
    got = npu.fp8_index_scores(vectors_of(scoring[0]), torch.tensor(scoring[1]), vectors_of(scoring[2]))
    assert_same(got, ref.fp8_index_scores(*scoring))


@given(seeds, st.integers(1, 40), st.integers(1, 250), st.sampled_from([1, 2, 5, 64]))
def test_equal_keys_score_equally_and_a_row_scores_the_same_in_any_slice(seed, num_tokens, num_keys, num_heads) -> None:
    rng = np.random.default_rng(seed)
    q, key = (vectors_of(ref.quantized_fp8(normal(rng, *shape))) for shape in ((num_tokens, num_heads, 8), (1, 8)))
    weights = torch.tensor(normal(rng, num_tokens, num_heads, dtype=np.float32))
    keys = npu.FP8Vectors(*(part.repeat_interleave(num_keys, 0) for part in key))
    scores = npu.fp8_index_scores(q, weights, keys)
    assert_same(scores, scores[:, :1].expand_as(scores))
    row, width = int(rng.integers(num_tokens)), int(rng.integers(num_keys)) + 1
    alone = npu.FP8Vectors(*(part[row : row + 1] for part in q))
    fewer = npu.FP8Vectors(*(part[:width] for part in keys))
    assert_same(npu.fp8_index_scores(alone, weights[row : row + 1], fewer), scores[row : row + 1, :width])


def test_scoring_in_parts_changes_nothing(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    q, keys = (vectors_of(ref.quantized_fp8(normal(rng, *shape))) for shape in ((9, 2, 8), (500, 8)))
    weights = torch.tensor(normal(rng, 9, 2, dtype=np.float32))
    whole = npu.fp8_index_scores(q, weights, keys)
    assert SCORED_NUMBERS == npu.SCORED_NUMBERS
    monkeypatch.setattr(npu, "SCORED_NUMBERS", 1000)
    monkeypatch.setattr(npu, "KEY_BLOCK", 192)
    assert_same(npu.fp8_index_scores(q, weights, keys), whole)


# Rows in bytes.


@given(latent_rows(), st.booleans())
def test_encoded_latents_mirrors(drawn, on_a_device) -> None:
    with unreadable(on_a_device):
        assert_same(npu.encoded_latents(*to_torch(drawn)), ref.encoded_latents(*drawn))


@given(latent_rows(), st.sampled_from(["float32", "float64"]), st.booleans())
def test_decoded_latents_mirrors(drawn, dtype, on_a_device) -> None:
    rows, sizes = ref.encoded_latents(*drawn), {"kv_lora_rank": drawn[0].shape[-1], "dtype": dtype}
    with unreadable(on_a_device):
        assert_same(npu.decoded_latents(torch.tensor(rows), **sizes), ref.decoded_latents(rows, **sizes))


@given(key_rows(), st.booleans())
def test_encoded_keys_mirrors(drawn, on_a_device) -> None:
    kv, how = drawn
    with unreadable(on_a_device):
        assert_same(npu.encoded_keys(torch.tensor(kv), **how), ref.encoded_keys(kv, **how))


@given(key_rows(), st.sampled_from(["float32", "float64"]), st.booleans())
def test_decoded_keys_mirrors(drawn, dtype, on_a_device) -> None:
    kv, how = drawn
    rows, how = ref.encoded_keys(kv, **how), {**how, "head_dim": kv.shape[-1], "dtype": dtype}
    with unreadable(on_a_device):
        assert_same(npu.decoded_keys(torch.tensor(rows), **how), ref.decoded_keys(rows, **how))


@given(latent_rows(), key_rows(), SHORT)
def test_short_rows_are_coded_from_float32_and_decoded_with_one_rounding_more(latents, keys, dtype) -> None:
    short = [shortened(part, dtype) for part in latents]
    wide = [to_numpy(part, "float32") for part in short]
    rows = npu.encoded_latents(*short)
    assert_same(rows, ref.encoded_latents(*wide))
    sizes = {"kv_lora_rank": wide[0].shape[-1]}
    got, want = (
        npu.decoded_latents(rows, dtype=dtype, **sizes),
        ref.decoded_latents(rows.numpy(), dtype="float32", **sizes),
    )
    assert_same(got, tuple(torch.tensor(part).to(TORCH_DTYPES[dtype]) for part in want))
    kv, how = keys
    rows = npu.encoded_keys(shortened(kv, dtype), **how)
    assert_same(rows, ref.encoded_keys(to_numpy(shortened(kv, dtype), "float32"), **how))
    sizes = {**how, "head_dim": kv.shape[-1]}
    got, want = npu.decoded_keys(rows, dtype=dtype, **sizes), ref.decoded_keys(rows.numpy(), dtype="float32", **sizes)
    assert_same(got, torch.tensor(want).to(TORCH_DTYPES[dtype]))


@given(seeds)
def test_bytes_that_nobody_wrote_are_decoded_alike(seed) -> None:
    """Every scale byte among them: 0 is 2**-127 and 255 is NaN."""
    rows = np.random.default_rng(seed).integers(0, 256, (40, 656)).astype(np.uint8)
    rows[:36, 576:583] = np.arange(252).reshape(36, 7)
    rows[36:37, 576:583] = [252, 253, 254, 255, 0, 1, 2]
    sizes = {"kv_lora_rank": 512, "dtype": "float32"}
    assert_same(npu.decoded_latents(torch.tensor(rows), **sizes), ref.decoded_latents(rows, **sizes))
    how = {"head_dim": 512, "rope_head_dim": 64, "layout": "gpu", "dtype": "float32"}
    assert_same(npu.decoded_keys(torch.tensor(rows)[:, :584], **how), ref.decoded_keys(rows[:, :584], **how))


def test_every_power_of_two_is_found_at_its_edge() -> None:
    """Each exponent, at 448 times the power, a hair more and a hair less."""
    edges = np.ldexp(np.float32(448), np.arange(-40, 120))
    amax = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])
    got = npu.power_bytes(torch.tensor(amax))
    assert_same(got, (ref.power_exponents(amax) + 127).astype(np.uint8))
    assert_same(npu.powers(got), np.ldexp(np.float32(1), got.numpy().astype(np.int32) - 127))


@pytest.mark.parametrize("rope", [1, 2])
def test_rows_that_lie_apart_are_coded_as_those_that_do_not(rope) -> None:
    kv = torch.tensor(normal(np.random.default_rng(0), 128 + rope, 5, dtype=np.float32)).T
    how = {"rope_head_dim": rope, "layout": "ascend"}
    rows = npu.encoded_keys(kv, **how)
    assert_same(rows, npu.encoded_keys(kv.clone(memory_format=torch.contiguous_format), **how))
    latents = npu.encoded_latents(kv[:, :128], kv[:, 128:])
    assert_same(latents, ref.encoded_latents(kv.numpy()[:, :128], kv.numpy()[:, 128:]))
    spread = torch.stack([rows, rows], dim=-1)[..., 0]
    sizes = {**how, "head_dim": 128 + rope, "dtype": "float32"}
    assert_same(npu.decoded_keys(spread, **sizes), npu.decoded_keys(rows, **sizes))
    spread = torch.stack([latents, latents], dim=-1)[..., 0]
    sizes = {"kv_lora_rank": 128, "dtype": "float32"}
    assert_same(npu.decoded_latents(spread, **sizes), npu.decoded_latents(latents, **sizes))


# Choosing from a cache of FP8 keys.


@given(index_calls(dtype=np.float64), st.sampled_from(["float64", "float32", "bfloat16"]), st.booleans())
def test_fp8_keys_are_chosen_as_by_the_reference(call, dtype, on_a_device) -> None:
    args = to_torch(fp8_args(call)[:2], dtype)
    plain = to_numpy(args, "float64" if dtype == "float64" else "float32")
    call = call._replace(q=plain[0], weights=plain[1])
    cache = coded_cache(call)
    want = ref_indexer.lightning_indexer(*plain, cache, *call.args[3:], **call.options)
    rest = to_torch(call.args[3:])
    with unreadable(on_a_device):
        got = dsacp_npu.indexer.lightning_indexer(*args, vectors_of(cache), *rest, **call.options)
    assert got.dtype == torch.int32
    for query, place in enumerate(call.places):
        one, visible = slice(query, query + 1), 0 if place is None else (place[1] + 1) // call.ratio
        if not visible:
            assert (got[query] == -1).all()
            continue
        keys = ref.quantized_fp8(call.keys[place[0]][:visible])
        noise = sum_noise(ref.quantized_fp8(call.q[one]), call.weights[one].astype(np.float32), keys)
        scores = np.array([oracle_row(call, query, place[0], visible)])
        assert_same_selection(got[one], want[one], scores, 2 * noise.max(axis=1))


@given(index_calls(dtype=np.float64), st.sampled_from(list(TORCH_DTYPES)), st.booleans())
def test_values_known_or_not_the_choice_is_the_same(call, dtype, in_parts) -> None:
    args = (*to_torch(call.args[:2], dtype), vectors_of(coded_cache(call)), *to_torch(call.args[3:]))
    want = dsacp_npu.indexer.lightning_indexer(*args, **call.options)
    with unreadable(True), patch.object(_index_calls, "GATHERED_NUMBERS", 100 if in_parts else 1 << 24):
        assert_same(dsacp_npu.indexer.lightning_indexer(*args, **call.options), want)


STEP = LEGAL[ref_indexer.select_qli]
HELD = ref.FP8Vectors(fp8_numbers(np.full((3, 2, 4), 0x11)), np.full((3, 2), 9, np.float32))


@pytest.mark.parametrize("name", ["select_qli", "select_qli_"])
@pytest.mark.parametrize("on_a_device", [False, True])
def test_a_step_writes_the_codes_of_the_reference(name, on_a_device) -> None:
    want = ref_indexer.select_qli(**{**STEP, "index_cache": HELD})
    cache = vectors_of(HELD)
    with unreadable(on_a_device):
        got = getattr(dsacp_npu.indexer, name)(**{**to_torch(STEP), "index_cache": cache})
    assert_same_codes(got.index_cache, want.index_cache)
    assert_same(got.topk_indices, want.topk_indices)
    written_in_place = (cache.values.view(torch.uint8) != 0x11).any() or (cache.scales != 9).any()
    assert written_in_place == name.endswith("_")
    if name.endswith("_"):
        assert got.index_cache is cache


# Refusals are in tests/errors/test_fp8_errors.py. Running where no value can be read:

X = np.array([[0.5, -1, 0.25], [0, 0, 0]])
CODES = ref.quantized_fp8(X)
LATENT, ROPE_KEY, KV = np.ones((2, 128)), np.ones((2, 3)), np.ones((2, 67))
ROWS, KEY_ROWS = ref.encoded_latents(LATENT, ROPE_KEY), ref.encoded_keys(KV, rope_head_dim=3, layout="gpu")
WIDE = {"kv_lora_rank": 128, "dtype": "bfloat16"}
HOW = {"rope_head_dim": 3, "layout": "gpu"}
CALL = LEGAL[ref_indexer.lightning_indexer]
CACHE = ref.FP8Vectors(fp8_numbers(np.full((2, 2, 3), 0x38)), np.ones((2, 2), np.float32))

STATIC: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("quantized_fp8", (X,), {}),
    ("quantized_fp8", (X[:0],), {}),
    ("dequantized_fp8", (CODES,), {}),
    ("fp8_index_scores", (ref.quantized_fp8(X[None]), np.ones((1, 2), np.float32), CODES), {}),
    ("fp8_index_scores", (ref.quantized_fp8(X[:0, None]), np.ones((0, 1), np.float32), CODES), {}),
    ("encoded_latents", (LATENT, ROPE_KEY), {}),
    ("encoded_latents", (LATENT[:0], ROPE_KEY[:0]), {}),
    ("decoded_latents", (ROWS,), WIDE),
    ("decoded_latents", (ROWS[:0],), WIDE),
    ("encoded_keys", (KV,), HOW),
    ("encoded_keys", (KV,), {**HOW, "layout": "ascend"}),
    ("decoded_keys", (KEY_ROWS,), {**HOW, "head_dim": 67, "dtype": "float16"}),
    ("lightning_indexer", (), {**CALL, "index_cache": CACHE}),
    ("select_qli", (), {**STEP, "index_cache": HELD}),
]


def with_tensors(value: Any) -> Any:
    """Arrays as tensors and records as the mirror's, wherever they are."""
    if isinstance(value, ref.FP8Vectors):
        return vectors_of(value)
    if isinstance(value, dict):
        return {name: with_tensors(item) for name, item in value.items()}
    return to_torch(value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_of(item)]


def moved(value: Any, device: str) -> Any:
    """Tensors of the same shapes and dtypes, elsewhere."""
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, tuple):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=device)


@pytest.mark.parametrize(("name", "args", "kwargs"), STATIC, ids=[name for name, *_ in STATIC])
@pytest.mark.parametrize("way", WAYS)
def test_runs_without_values(way, name, args, kwargs) -> None:
    module = npu if hasattr(npu, name) else dsacp_npu.indexer
    mirror = getattr(module, name)
    args, kwargs = tuple(with_tensors(arg) for arg in args), with_tensors(kwargs)
    want = tensors_of(mirror(*args, **kwargs))
    if way == "compiled":
        torch._dynamo.reset()
        got = tensors_of(torch.compile(mirror, fullgraph=True, backend="aot_eager", dynamic=False)(*args, **kwargs))
        assert_same(got, want)
        return
    device = "cpu" if way == "fake" else "meta"
    with FakeTensorMode() if way.startswith("fake") else nullcontext():
        got = tensors_of(mirror(*moved(args, device), **moved(kwargs, device)))
    assert [(tensor.dtype, tensor.shape) for tensor in got] == [(tensor.dtype, tensor.shape) for tensor in want]
    assert {tensor.device.type for tensor in got} == {device}
