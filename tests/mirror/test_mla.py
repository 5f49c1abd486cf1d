"""`dsacp_npu.mla` gives what `dsacp_ref.mla` gives: projections, ranges and picks, attention over latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsacp_npu.mla
from dsacp_ref import mla as ref
from dsacp_ref.attention import AttentionOutput
from dsacp_ref.compressor import rms_norm
from dsacp_ref.fp8 import decoded_latents, encoded_latents
from dsacp_ref.mla_config import MLAConfig, v32
from dsacp_ref.partition import local_token_indices
from dsacp_ref.rope import apply_rope, rope_table
from tests.laws.attention_forms import plain_orders
from tests.maths_strategies import Paged, normal, paged, seeds
from tests.mirror.common import (
    TORCH_DTYPES,
    WAYS,
    Case,
    assert_floats_mirror,
    assert_mirrors,
    assert_runs_without_values,
    case,
    compare_floats,
    functions,
    int32,
    to_numpy,
    to_torch,
    untouched,
)
from tests.mla_strategies import SMALL, LatentCall, configs, latent_calls, weights_of
from tests.strategies import Step, cuts, each, fewer, read_only

DTYPES = st.sampled_from(list(TORCH_DTYPES))
FORMS = ("latent_attention", "expanded_attention")
every_form = pytest.mark.parametrize("form", FORMS)
on_both = pytest.mark.parametrize("on_a_device", [False, True], ids=["known values", "unknown values"])


def unread(on_a_device: bool) -> Any:
    """Values cannot be read, as on a device."""
    return patch("dsacp_npu._tensors.readable", lambda tensor: not on_a_device)


def wide(dtype: str) -> str:
    """The dtype to compute in."""
    return "float64" if dtype == "float64" else "float32"


def rounded(rows: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers of float32 that a dtype keeps of these."""
    return to_numpy(to_torch(rows, dtype), "float32")


# --- projections ---


@given(configs())
def test_mla_frequencies_mirrors(config: MLAConfig) -> None:
    for each_config in (config, v32()):
        assert_mirrors("mla", "mla_frequencies", each_config)


@given(seeds, st.lists(st.integers(0, 3), max_size=2), st.integers(1, 9), DTYPES, st.sampled_from([0, 1e-6, 0.5]))
def test_layer_norm_mirrors(seed: int, shape: list[int], d: int, dtype: str, eps: float) -> None:
    rng = np.random.default_rng(seed)
    x = normal(rng, *shape, d + 1, scale=3.0) + 1
    assert_floats_mirror("mla", "layer_norm", dtype, x, normal(rng, d + 1), normal(rng, d + 1), eps)


def table_of(rng: np.random.Generator, count: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """The RoPE rows of far and near tokens, and of rows of nobody."""
    return rope_table(rng.integers(-1, 2**18, count).astype(np.int32), [0.3**i for i in range(pairs)])


sizes = st.tuples(
    st.integers(0, 5), st.integers(1, 3), st.integers(1, 6), st.integers(1, 9)
)  # tokens, pairs, width, in


@given(seeds, sizes, DTYPES)
def test_latent_keys_mirrors(seed: int, size: tuple[int, int, int, int], dtype: str) -> None:
    rng, (tokens, pairs, lora, hidden) = np.random.default_rng(seed), size
    args = (
        *(normal(rng, tokens, hidden), normal(rng, lora + 2 * pairs, hidden), normal(rng, lora)),
        *table_of(rng, tokens, pairs),
    )

    def plain(x: np.ndarray, wkv_a: np.ndarray, kv_norm: np.ndarray, *table: np.ndarray, eps: float) -> ref.LatentKeys:
        both = rounded(x @ wkv_a.T, dtype)
        return ref.LatentKeys(rms_norm(both[:, :lora], kv_norm, eps), apply_rope(both[:, lora:], *table))

    assert_floats_mirror("mla", "latent_keys", dtype, *args, baseline=plain, eps=1e-6)


@given(seeds, sizes, st.integers(0, 3), DTYPES)
def test_latent_queries_mirrors(seed: int, size: tuple[int, int, int, int], heads: int, dtype: str) -> None:
    rng, (tokens, pairs, nope, lora) = np.random.default_rng(seed), size
    args = normal(rng, tokens, lora), normal(rng, heads * (nope + 2 * pairs), lora), *table_of(rng, tokens, pairs)

    def plain(qr: np.ndarray, wq_b: np.ndarray, *table: np.ndarray, nope_head_dim: int) -> ref.LatentQueries:
        both = rounded(qr @ wq_b.T, dtype).reshape(tokens, heads, nope + 2 * pairs)
        return ref.LatentQueries(both[..., :nope_head_dim], apply_rope(both[..., nope_head_dim:], *table))

    assert_floats_mirror("mla", "latent_queries", dtype, *args, baseline=plain, nope_head_dim=nope)


@given(seeds, st.integers(0, 5), st.integers(0, 3), st.integers(1, 5), st.integers(1, 9), DTYPES)
def test_absorbed_queries_mirrors(seed: int, tokens: int, heads: int, nope: int, lora: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    args = normal(rng, tokens, heads, nope), normal(rng, heads, nope, lora)
    assert_floats_mirror("mla", "absorbed_queries", dtype, *args)


@given(seeds, st.integers(0, 5), st.integers(0, 3), st.integers(1, 5), st.integers(1, 9), DTYPES)
def test_value_heads_mirrors(seed: int, tokens: int, heads: int, width: int, lora: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    assert_floats_mirror("mla", "value_heads", dtype, normal(rng, tokens, heads, lora), normal(rng, heads, width, lora))


@given(seeds, st.integers(0, 5), st.integers(1, 4), st.integers(1, 9), DTYPES, st.data())
def test_token_index_keys_mirrors(
    seed: int, tokens: int, log2: int, hidden: int, dtype: str, data: st.DataObject
) -> None:
    """Nothing is rounded before the end."""
    rng, d = np.random.default_rng(seed), 2**log2
    table = table_of(rng, tokens, data.draw(st.integers(0, d // 2)))
    args = normal(rng, tokens, hidden), normal(rng, d, hidden), normal(rng, d), normal(rng, d), *table
    assert_floats_mirror("mla", "token_index_keys", dtype, *args, eps=1e-6)


@given(seeds, st.integers(0, 5), st.integers(0, 3), st.integers(0, 4), DTYPES, st.data())
def test_token_index_queries_mirrors(
    seed: int, tokens: int, heads: int, log2: int, dtype: str, data: st.DataObject
) -> None:
    rng, d = np.random.default_rng(seed), 2**log2
    table = table_of(rng, tokens, data.draw(st.integers(0, d // 2)))
    args = normal(rng, tokens, 5), normal(rng, heads * d, 5), *table
    assert_floats_mirror("mla", "token_index_queries", dtype, *args, index_head_dim=d)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["token_index_keys", "token_index_queries"])
def test_index_vectors_are_rounded_once(name: str, dtype: str) -> None:
    """Which token is chosen hangs on them. float32's own rounding falls to the other side of a tie now and then."""
    rng = np.random.default_rng(0)
    table = table_of(rng, 30, 4)
    args = normal(rng, 30, 40), normal(rng, 32, 40), normal(rng, 32), normal(rng, 32), *table
    options: dict[str, Any] = {"eps": 1e-6}
    if name == "token_index_queries":
        args, options = (normal(rng, 30, 40), normal(rng, 96, 40), *table), {"index_head_dim": 32}
    reference, mirror = functions("mla", name)
    args = held(args, dtype)
    got = mirror(*to_torch(args, dtype), **options)
    assert (got != to_torch(reference(*args, **options), dtype)).double().mean() < 0.02


# --- key ranges and picks ---


@given(cuts(), st.integers(0, 7))
@fewer(2)
def test_key_ranges_mirrors(every_split: list[Step], rank: int) -> None:
    for step in each(every_split):
        loc = step.batch.query_start_loc
        tokens = local_token_indices(loc, step.cp_size, rank % step.cp_size, **step.cut)
        assert_mirrors("mla", "key_ranges", tokens, loc, step.batch.key_lens)


@pytest.mark.parametrize("last", [2**31 - 2**30 - 1, 2**31 - 2**30], ids=["fits", "one too many"])
def test_key_ranges_count_beyond_int32(last: int) -> None:
    assert_mirrors("mla", "key_ranges", int32(0, 1, -1), int32(0, 1, 2), int32(2**30, last))


picks = st.lists(st.lists(st.integers(-1, 20), min_size=3, max_size=3), max_size=4).map(
    lambda rows: np.array(rows, np.int32).reshape(-1, 3)
)
numbers = st.one_of(st.integers(-1, 30), st.just(2**31 - 5))


@given(picks, st.data())
def test_packed_topk_mirrors(topk: np.ndarray, data: st.DataObject) -> None:
    """Sums beyond int32 among them."""
    starts = data.draw(st.lists(numbers.filter(lambda start: start >= 0), min_size=len(topk), max_size=len(topk)))
    assert_mirrors("mla", "packed_topk", topk, int32(*starts))


@given(picks, st.integers(1, 6), st.data())
def test_paged_topk_mirrors(topk: np.ndarray, block_size: int, data: st.DataObject) -> None:
    """Tables that do not reach a pick among them."""
    requests = data.draw(st.lists(st.integers(-1, 2), min_size=len(topk), max_size=len(topk)))
    columns = data.draw(st.integers(0, 21))
    block = st.one_of(st.integers(0, 99), st.just(-1)) if data.draw(st.booleans()) else st.integers(0, 99)
    row = st.lists(block, min_size=columns, max_size=columns)
    table = np.array(data.draw(st.lists(row, min_size=3, max_size=3)), np.int32).reshape(3, columns)
    assert_mirrors("mla", "paged_topk", topk, int32(*requests), table, block_size)


@given(picks, st.data())
def test_causal_picks_mirrors(topk: np.ndarray, data: st.DataObject) -> None:
    positions = data.draw(st.lists(numbers, min_size=len(topk), max_size=len(topk)))
    assert_mirrors("mla", "causal_picks", topk, int32(*positions))


# --- attention ---


def form_case(call: LatentCall, form: str, caches: tuple[Any, Any] | None = None) -> Case:
    """The call of one form, over its own caches or over others."""
    caches = call.caches if caches is None else caches
    if form == "expanded_attention":
        args = (call.q_nope, call.q_rope, *caches, call.w_uk, call.w_uv, *call.rows)
    else:
        args = (ref.absorbed_queries(call.q_nope, call.w_uk), call.q_rope, *caches, *call.rows)
    return case(form, *args, softmax_scale=call.scale)


def plainly(form: str, args: tuple[Any, ...], lists: list[np.ndarray], scale: float) -> list[AttentionOutput]:
    """The plain computation in float32, each query over rows ``[latent | rope key]`` of its own, in several orders."""
    q, q_rope = (part.astype(np.float32) for part in args[:2])
    lists = [rows.astype(np.float32) for rows in lists]
    no_sink, rank = np.array([-np.inf], np.float32), 0
    if form == "latent_attention":
        rank, both = q.shape[2], np.concatenate([q, q_rope], axis=2)
        orders = plain_orders(both, lists, np.repeat(no_sink, q.shape[1]), scale)
        return [AttentionOutput(found.out[..., :rank], found.lse) for found in orders]
    return expanded_plainly(q, q_rope, *(part.astype(np.float32) for part in args[4:6]), lists, scale)


def expanded_plainly(
    q: np.ndarray, q_rope: np.ndarray, w_uk: np.ndarray, w_uv: np.ndarray, lists: list[np.ndarray], scale: float
) -> list[AttentionOutput]:
    """`plainly` of the expanded form: its first sums, over latent channels, in several orders as well."""
    rng, rank, width = np.random.default_rng(0), w_uk.shape[2], q.shape[2] + q_rope.shape[2]
    no_sink, no_value = np.array([-np.inf], np.float32), np.zeros((len(q), w_uv.shape[1]), np.float32)
    orders = []
    for latents in (np.arange(rank), *(rng.permutation(rank) for _ in range(3))):
        by_head = []
        for head, (uk, uv) in enumerate(zip(w_uk[..., latents], w_uv[..., latents], strict=True)):
            one = np.concatenate([q[:, head], q_rope[:, head], no_value], axis=1)[:, None]
            rows = [
                np.concatenate([rows[:, latents] @ uk.T, rows[:, rank:], rows[:, latents] @ uv.T], axis=1)
                for rows in lists
            ]
            by_head.append(plain_orders(one, rows, no_sink, scale))
        orders += [
            AttentionOutput(
                np.concatenate([found.out[..., width:] for found in heads], axis=1),
                np.concatenate([found.lse for found in heads], axis=1),
            )
            for heads in zip(*by_head, strict=True)
        ]
    return orders


def assert_attention_mirrors(call: Case, dtype: str, lists: list[np.ndarray]) -> None:
    """To rounding in float64, within the budget below it, for inputs that the dtype holds exactly."""
    reference, mirror = functions("mla", call.function)
    got = untouched(mirror, to_torch(call.args, dtype), call.kwargs)
    assert (got.out.dtype, got.lse.dtype) == (TORCH_DTYPES[dtype], TORCH_DTYPES[wide(dtype)])
    exact = reference(*call.args, **call.kwargs)
    if dtype == "float64":
        compare_floats(got, exact, exact, call.function)
        return
    orders = plainly(call.function, call.args, lists, call.kwargs["softmax_scale"])
    for field, kept in (("out", dtype), ("lse", "float32")):
        plain = [to_torch(getattr(found, field), kept) for found in orders]
        compare_floats(getattr(got, field), getattr(exact, field), plain, f"{call.function}.{field}")


def held(value: Any, dtype: str) -> Any:
    """The same arrays with numbers that the dtype holds."""
    return to_numpy(to_torch(value, dtype), "float64")


# Enough numbers that the plain computation cannot be right in all of them by luck.
typed_calls = st.tuples(latent_calls(dtype=np.float64, first=4), DTYPES)


def assert_form_mirrors(call: LatentCall, form: str, dtype: str, on_a_device: bool) -> None:
    """One form over caches of floats."""
    made = form_case(call, form)
    made = made._replace(args=held(made.args, dtype))
    lists = [held(call.picked(query), dtype) for query in range(len(call.q))]
    with unread(on_a_device):
        assert_attention_mirrors(made, dtype, lists)


@fewer(2)
@given(typed_calls, st.booleans())
def test_latent_attention_mirrors(typed: tuple[LatentCall, str], on_a_device: bool) -> None:
    assert_form_mirrors(typed[0], "latent_attention", typed[1], on_a_device)


@fewer(2)
@given(typed_calls, st.booleans())
def test_expanded_attention_mirrors(typed: tuple[LatentCall, str], on_a_device: bool) -> None:
    assert_form_mirrors(typed[0], "expanded_attention", typed[1], on_a_device)


@st.composite
def coded_calls(draw: st.DrawFn) -> tuple[LatentCall, np.ndarray]:
    """A call over a whole group of latent channels, and its cache in bytes, NaN where nothing may be read."""
    call, rng = draw(latent_calls(dtype=np.float64, first=4)), np.random.default_rng(draw(seeds))
    heads, rope = call.q_rope.shape[1:]
    keys = [encoded_latents(normal(rng, len(rows), 128), normal(rng, len(rows), rope)) for rows in call.keys]
    side = paged(rng, keys, draw(st.integers(1, 5)), poison=0x7F)
    decoded = [np.concatenate(decoded_latents(rows, kv_lora_rank=128, dtype="float64"), axis=1) for rows in keys]
    weights = {name: normal(rng, heads, getattr(call, name).shape[1], 128, scale=0.1) for name in ("w_uk", "w_uv")}
    return call._replace(keys=decoded, side=side, **weights), side.cache


@every_form
@fewer(2)
@given(made=coded_calls(), dtype=DTYPES, on_a_device=st.booleans())
def test_attention_over_bytes_mirrors(
    form: str, made: tuple[LatentCall, np.ndarray], dtype: str, on_a_device: bool
) -> None:
    call, cache = made
    bytes_case = form_case(call, form, (cache, None))
    bytes_case = bytes_case._replace(args=held(bytes_case.args, dtype))
    lists = [call.picked(query) for query in range(len(call.q))]
    with unread(on_a_device):
        assert_attention_mirrors(bytes_case, dtype, lists)


# What lies in the caches, and how the work is cut.


def call_of(rng: np.random.Generator, rows: list[tuple[int, int]], index_topk: int, beyond: int = 0) -> LatentCall:
    """A call of these (queries, extent), every query choosing some of what it sees, -1 anywhere."""
    keys = [normal(rng, used, 12) for _, used in rows]
    cu = int32(*np.cumsum([0, *(length for length, _ in rows)]))
    count = int(cu[-1]) + beyond
    call = LatentCall(
        *(normal(rng, count, 3, 5), normal(rng, count, 3, 4), normal(rng, 3, 5, 8), normal(rng, 3, 2, 8)),
        *(keys, paged(rng, keys, 4), np.empty(0, np.int32), cu, int32(*(used for _, used in rows)), 1 / 3),
    )
    topk = np.full((count, index_topk), -1, np.int32)
    for row, place in zip(topk, call.places, strict=True):
        if place is not None:
            chosen = rng.permutation(place[1] + 1)[: int(rng.integers(0, index_topk + 1))]
            row[rng.permutation(index_topk)[: len(chosen)]] = chosen
    return call._replace(topk=read_only(topk))


ROWS = [(6, 20), (0, 5), (1, 12), (3, 0), (9, 9)]
HERE = call_of(np.random.default_rng(0), ROWS, 6, beyond=2)


def with_keys(call: LatentCall, keys: list[np.ndarray]) -> LatentCall:
    """The call over other rows at the same slots."""
    cache = call.side.cache.copy()
    flat = cache.reshape(-1, cache.shape[2])
    for slots, rows in zip(call.side.slots, keys, strict=True):
        flat[slots] = rows
    return call._replace(keys=keys, side=call.side._replace(cache=read_only(cache)))


@on_both
@every_form
@pytest.mark.parametrize("channel", [0, 9], ids=["latent", "rope key"])
def test_a_nan_reaches_only_those_that_chose_it(form: str, channel: int, on_a_device: bool) -> None:
    keys = [rows.copy() for rows in HERE.keys]
    keys[0][3, channel] = keys[4][2, channel] = np.nan
    call = form_case(with_keys(HERE, keys), form)
    reference, mirror = functions("mla", form)
    want = reference(*call.args, **call.kwargs)
    struck = [place is not None and (place[0], token) in {(0, 3), (4, 2)} for place, token in due_tokens()]
    with unread(on_a_device):
        got = mirror(*to_torch(call.args), **call.kwargs)
    compare_floats(got, want, want, form)
    assert got.lse.isnan().any(dim=1).tolist() == by_query(struck)
    assert 0 < sum(by_query(struck)) < len(HERE.q)


def due_tokens() -> list[tuple[tuple[int, int] | None, int]]:
    """(place, token) of every pick of `HERE`."""
    return [(place, int(token)) for place, row in zip(HERE.places, HERE.topk, strict=True) for token in row]


def by_query(picked: list[bool]) -> list[bool]:
    """Whether any pick of a query is one of these."""
    return np.array(picked).reshape(HERE.topk.shape).any(axis=1).tolist()


@on_both
@every_form
def test_the_size_of_blocks_changes_nothing_but_rounding(
    form: str, on_a_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TAKEN_NUMBERS", "GATHERED_NUMBERS"):
        monkeypatch.setattr(dsacp_npu.mla, name, 200)
    with patch("dsacp_npu.mla.attended", wraps=dsacp_npu.mla.attended) as blocks:
        assert_form_mirrors(HERE, form, "float64", on_a_device)
    assert blocks.call_count > 3


@on_both
@every_form
def test_nothing_may_be_chosen(form: str, on_a_device: bool) -> None:
    for width in (0, 2):
        call = HERE._replace(topk=np.full((len(HERE.q), width), -1, np.int32))
        with unread(on_a_device):
            got = functions("mla", form)[1](*to_torch(form_case(call, form).args), softmax_scale=1.0)
        assert not got.out.any()
        assert (got.lse == -np.inf).all()
        assert_form_mirrors(call, form, "float64", on_a_device)


@on_both
@every_form
def test_what_a_table_holds_beyond_the_picks_does_not_matter(form: str, on_a_device: bool) -> None:
    """Garbage in columns that nobody chose from, though their tokens are visible, and beyond the extents."""
    table = np.concatenate([HERE.side.table, np.full((len(ROWS), 40), 2**31 - 1, np.int32)], axis=1)
    topk = HERE.topk.copy()
    topk[(topk >= 4) & (topk < 8)] = -1
    table[:, 1] = -7
    call = HERE._replace(topk=read_only(topk), side=HERE.side._replace(table=read_only(table)))
    assert (topk >= 8).any()
    assert_form_mirrors(call, form, "float64", on_a_device)


@on_both
@every_form
def test_strides_do_not_matter_and_nothing_carries_gradients(form: str, on_a_device: bool) -> None:
    call = form_case(HERE, form)
    _, mirror = functions("mla", form)
    with unread(on_a_device):
        want = mirror(*to_torch(call.args), **call.kwargs)
        strided = [torch.stack([part, part], dim=-1)[..., 0] for part in to_torch(call.args)]
        got = mirror(*(part.requires_grad_(part.is_floating_point()) for part in strided), **call.kwargs)
    due = to_numpy(want, "float64")
    compare_floats(got, due, due, form)  # what is projected may be summed in another order
    assert not got.out.requires_grad


# --- without values ---

WEIGHTS = weights_of(np.random.default_rng(1), SMALL)
TABLE = rope_table(int32(0, -1, 70), ref.mla_frequencies(SMALL))
X, QR = np.ones((3, SMALL.hidden_size)), np.ones((3, SMALL.q_lora_rank))
PART = WEIGHTS.indexer
TOPK = np.array([[0, 2, -1], [5, -1, 1]], np.int32)


def coded_case(form: str) -> Case:
    """A call over bytes."""
    keys = [encoded_latents(np.ones((5, 128)), np.ones((5, 4)))]
    weights = {"w_uk": np.ones((3, 5, 128)), "w_uv": np.ones((3, 2, 128))}
    side: Paged = paged(np.random.default_rng(2), keys, 4, poison=0x7F)
    call = LatentCall(
        *(np.ones((2, 3, 5)), np.ones((2, 3, 4)), weights["w_uk"], weights["w_uv"], keys, side),
        *(np.array([[0, 2, -1], [4, -1, 1]], np.int32), int32(0, 2), int32(5), 0.5),
    )
    return form_case(call, form, (side.cache, None))


CALLS: dict[str, Callable[[], Case]] = {
    "layer_norm": lambda: case("layer_norm", X, np.ones(9), np.ones(9), 1e-6),
    "latent_keys": lambda: case("latent_keys", X, WEIGHTS.wkv_a, WEIGHTS.kv_norm, *TABLE, eps=1e-6),
    "latent_queries": lambda: case("latent_queries", QR, WEIGHTS.wq_b, *TABLE, nope_head_dim=SMALL.nope_head_dim),
    "absorbed_queries": lambda: case("absorbed_queries", np.ones((3, 3, 5)), WEIGHTS.w_uk),
    "value_heads": lambda: case("value_heads", np.ones((3, 3, 8)), WEIGHTS.w_uv),
    "token_index_keys": lambda: case("token_index_keys", X, PART.wk, PART.k_norm, PART.k_norm_bias, *TABLE, eps=1e-6),
    "token_index_queries": lambda: case("token_index_queries", QR, PART.wq_b, *TABLE, index_head_dim=8),
    "key_ranges": lambda: case("key_ranges", int32(1, 5, -1), int32(0, 5, 8), int32(5, 9)),
    "packed_topk": lambda: case("packed_topk", TOPK, int32(0, 5)),
    "paged_topk": lambda: case("paged_topk", TOPK, int32(0, 1), np.array([[7, 2], [1, 0]], np.int32), 4),
    "causal_picks": lambda: case("causal_picks", TOPK, int32(1, -1)),
    "latent_attention": lambda: form_case(HERE, "latent_attention"),
    "expanded_attention": lambda: form_case(HERE, "expanded_attention"),
    "latent_attention over bytes": lambda: coded_case("latent_attention"),
    "expanded_attention over bytes": lambda: coded_case("expanded_attention"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_runs_without_values(name: str, way: str) -> None:
    assert_runs_without_values("mla", way, CALLS[name]())


def test_every_function_runs_without_values() -> None:
    """All but the one that takes no tensor."""
    names = {name for name in ref.__all__ if name.islower()}
    assert {name.split()[0] for name in CALLS} == names - {"mla_frequencies"}
