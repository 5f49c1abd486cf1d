"""Attention over latents: every function against the oracle, both forms alike, and what must not matter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from dsacp_ref import mla as mla_module
from dsacp_ref.attention import AttentionOutput
from dsacp_ref.fp8 import decoded_latents, encoded_latents
from dsacp_ref.indexer import index_head_weights, lightning_indexer
from dsacp_ref.mla import (
    absorbed_queries,
    causal_picks,
    expanded_attention,
    key_ranges,
    latent_attention,
    latent_keys,
    latent_queries,
    layer_norm,
    mla_frequencies,
    packed_topk,
    paged_topk,
    token_index_keys,
    token_index_queries,
    value_heads,
)
from dsacp_ref.mla_config import MLAConfig, v32
from dsacp_ref.mla_layer import MLAWeights
from dsacp_ref.partition import partition_tokens
from dsacp_ref.rope import RopeTable, rope_table
from dsacp_ref.spec import ContractError
from tests import plain
from tests.compare import assert_double, assert_same, assert_same_selection, assert_within_budget
from tests.maths_strategies import int32, normal, paged, seeds
from tests.mla_strategies import (
    SMALL,
    LatentCall,
    configs,
    frequencies_of,
    latent_calls,
    plain_half_rotated,
    weights_of,
)
from tests.oracles import compressor, extents, indexer, splits
from tests.oracles import mla as oracle
from tests.plain_layer import normed as plain_normed
from tests.strategies import EVERY_SPLIT, Step, cuts, each, fewer, read_only

# --- the numbers of the released model ---


@given(configs())
def test_frequencies_and_scale_are_the_oracles(config: MLAConfig) -> None:
    assert [np.float32(f) for f in mla_frequencies(config)] == frequencies_of(config)
    due = oracle.softmax_scale(config.nope_head_dim, config.rope_head_dim, config.rope_factor, config.mscale_all_dim)
    assert config.softmax_scale == pytest.approx(due, rel=1e-15)


def test_released_frequencies_and_scale() -> None:
    """YaRN of factor 40 over 4096: the ramp runs from pair 10 to pair 23; 192^-0.5 * (0.1 ln 40 + 1)^2 = 0.13523."""
    got, plain_ones = mla_frequencies(v32()), [10000 ** (-i / 32) for i in range(32)]
    for pair in range(11):
        assert got[pair] == np.float32(plain_ones[pair])
    for pair in range(23, 32):
        assert got[pair] == np.float32(plain_ones[pair] / 40)
    assert got[16] == np.float32(plain_ones[16] * (7 / 13 + 6 / 13 / 40))
    assert v32().softmax_scale == pytest.approx(0.1352337788608801, rel=1e-12)
    assert replace(v32(), rope_factor=1).softmax_scale == pytest.approx(0.07216878364870323, rel=1e-15)


# --- projections ---


class Rows(NamedTuple):
    """Rows of tokens at positions of their own, with what projects them."""

    config: MLAConfig
    weights: MLAWeights
    x: np.ndarray
    qr: np.ndarray
    positions: np.ndarray

    @property
    def table(self) -> RopeTable:
        return rope_table(self.positions, mla_frequencies(self.config))


@st.composite
def token_rows(draw: st.DrawFn, dtype: type = np.float64, least: int = 0) -> Rows:
    # Where the plain computation is the measure there are too many numbers for it to be right in all by luck.
    wide = {"num_heads": 4, "kv_lora_rank": 32, "index_n_heads": 4, "index_head_dim": 16} if least else {}
    rng, config = np.random.default_rng(draw(seeds)), draw(configs(**wide))
    count = draw(st.integers(least, 5))
    return Rows(
        config,
        weights_of(rng, config, dtype),
        normal(rng, count, config.hidden_size, dtype=dtype),
        normal(rng, count, config.q_lora_rank, dtype=dtype),
        int32(rng.integers(0, draw(st.sampled_from([3, 200, 160000])), count)),
    )


def projected(rows: Rows) -> dict[str, np.ndarray]:
    """What our functions make of the rows."""
    w, config, table = rows.weights, rows.config, rows.table
    keys = latent_keys(rows.x, w.wkv_a, w.kv_norm, *table, eps=config.rms_norm_eps)
    queries = latent_queries(rows.qr, w.wq_b, *table, nope_head_dim=config.nope_head_dim)
    key_parts = w.indexer.wk, w.indexer.k_norm, w.indexer.k_norm_bias
    return {
        "latent": keys.latent,
        "rope_key": keys.rope_key,
        "q_nope": queries.q_nope,
        "q_rope": queries.q_rope,
        "index_keys": token_index_keys(rows.x, *key_parts, *table, eps=oracle.LAYER_NORM_EPS),
        "index_queries": token_index_queries(rows.qr, w.indexer.wq_b, *table, index_head_dim=config.index_head_dim),
        "head_weights": index_head_weights(rows.x, w.indexer.weights_proj, index_head_dim=config.index_head_dim),
    }


def projected_by_oracle(rows: Rows) -> dict[str, np.ndarray]:
    w, config, freqs = rows.weights, rows.config, frequencies_of(rows.config)
    wide = {
        name: np.asarray(part, np.float64)
        for name, part in (w._asdict() | w.indexer._asdict()).items()
        if name in ("wkv_a", "kv_norm", "wk", "k_norm", "k_norm_bias", "weights_proj")
    }
    main_q, index_q = np.asarray(w.wq_b, np.float64), np.asarray(w.indexer.wq_b, np.float64)
    found: dict[str, list] = {name: [] for name in projected(rows)}
    for x, qr, position in zip(rows.x.astype(np.float64), rows.qr.astype(np.float64), rows.positions, strict=True):
        p = int(position)
        latent, rope_key = oracle.latent_key(x, p, wide["wkv_a"], wide["kv_norm"], freqs, config.rms_norm_eps)
        heads = oracle.query_heads(qr, p, main_q, config.nope_head_dim, freqs)
        found["latent"].append(latent)
        found["rope_key"].append(rope_key)
        found["q_nope"].append([plain_part for plain_part, _ in heads])
        found["q_rope"].append([turned for _, turned in heads])
        index_key = oracle.token_index_key(x, p, wide["wk"], wide["k_norm"], wide["k_norm_bias"], freqs)
        found["index_keys"].append(index_key)
        found["index_queries"].append(oracle.token_index_heads(qr, p, index_q, config.index_head_dim, freqs))
        shrink = math.sqrt(config.index_n_heads) * math.sqrt(config.index_head_dim)
        found["head_weights"].append([oracle.dot(row, x) / shrink for row in wide["weights_proj"]])
    return {name: np.array(values, np.float64).reshape(projected(rows)[name].shape) for name, values in found.items()}


def projected_plainly(rows: Rows, order: np.random.Generator) -> dict[str, np.ndarray]:
    """The plain computation in the rows' dtype, sums over channels in some order."""
    w, config, freqs = rows.weights, rows.config, frequencies_of(rows.config)
    hidden, low_rank = order.permutation(config.hidden_size), order.permutation(config.q_lora_rank)
    x, qr, rank = rows.x[:, hidden], rows.qr[:, low_rank], config.kv_lora_rank

    def at(position: int) -> list[np.float32]:
        # The plain rotation stands at position 1, its frequencies being the angles of this row.
        return [np.float32(position) * np.float32(f) for f in freqs]

    def turned(vectors: np.ndarray) -> np.ndarray:
        return np.stack([plain.rotated(v, 1, at(p)) for v, p in zip(vectors, rows.positions, strict=True)])

    def half_turned(vectors: np.ndarray) -> np.ndarray:
        both = [np.stack([np.zeros_like(v), v]) for v in vectors]
        return np.stack([plain_half_rotated(v, at(p))[1] for v, p in zip(both, rows.positions, strict=True)])

    def spun(vectors: np.ndarray) -> np.ndarray:
        matrix = np.array(oracle.sylvester(config.index_head_dim)).astype(x.dtype)
        channels = order.permutation(len(matrix))
        return vectors[..., channels] @ matrix[channels]

    both = x @ w.wkv_a[:, hidden].T
    q = (qr @ w.wq_b[:, low_rank].T).reshape(len(qr), config.num_heads, -1)
    raw = x @ w.indexer.wk[:, hidden].T
    centred = raw - raw.mean(axis=1, keepdims=True)
    index_keys = plain_normed(centred, oracle.LAYER_NORM_EPS) * w.indexer.k_norm + w.indexer.k_norm_bias
    index_q = (qr @ w.indexer.wq_b[:, low_rank].T).reshape(len(qr), config.index_n_heads, -1)
    shrink = np.sqrt(x.dtype.type(config.index_n_heads * config.index_head_dim))
    return {
        "latent": plain_normed(both[:, :rank], config.rms_norm_eps) * w.kv_norm,
        "rope_key": turned(both[:, rank:]),
        "q_nope": q[..., : config.nope_head_dim],
        "q_rope": np.stack([turned(q[:, h, config.nope_head_dim :]) for h in range(config.num_heads)], axis=1),
        "index_keys": spun(half_turned(index_keys)),
        "index_queries": spun(half_turned(index_q)),
        "head_weights": x @ w.indexer.weights_proj[:, hidden].T / shrink,
    }


@given(token_rows())
def test_projections_are_the_oracles(rows: Rows) -> None:
    due = projected_by_oracle(rows)
    for name, got in projected(rows).items():
        assert_double(got, due[name], name)


@given(token_rows(np.float32, least=4))
@fewer(2)
def test_float32_projections_are_within_budget(rows: Rows) -> None:
    due = projected_by_oracle(rows)
    low = [projected_plainly(rows, np.random.default_rng(seed)) for seed in range(8)]
    for name, got in projected(rows).items():
        assert_within_budget(got, due[name], [each_order[name] for each_order in low], name)


@given(seeds, st.integers(0, 4), st.sampled_from([1, 2, 5, 16]), st.sampled_from([0.0, 1e-6, 0.5]))
def test_layer_norm_is_the_oracles(seed: int, count: int, d: int, eps: float) -> None:
    rng = np.random.default_rng(seed)
    x, weight, bias = normal(rng, count, d, scale=3.0) + 2.0, normal(rng, d), normal(rng, d)
    if d == 1 and eps == 0:
        return  # nothing over nothing
    got = layer_norm(x, weight, bias, eps)
    assert_double(got, np.array([oracle.layer_norm(row, weight, bias, eps) for row in x]).reshape(x.shape))
    assert_double(layer_norm(x[:, None], weight, bias, eps)[:, 0], got)


def test_a_pad_row_is_turned_by_nothing_and_harms_no_other() -> None:
    rng = np.random.default_rng(0)
    weights, x = weights_of(rng, SMALL), normal(rng, 3, SMALL.hidden_size).copy()
    x[1] = np.nan
    table = rope_table(int32([4, -1, 5]), mla_frequencies(SMALL))
    got = latent_keys(x, weights.wkv_a, weights.kv_norm, *table, eps=1e-6)
    alone = latent_keys(x[[0, 2]], weights.wkv_a, weights.kv_norm, *(part[[0, 2]] for part in table), eps=1e-6)
    assert_double(got.latent[[0, 2]], alone.latent)
    assert_double(got.rope_key[[0, 2]], alone.rope_key)


@given(latent_calls(dtype=np.float64))
@fewer(2)
def test_an_absorbed_query_meets_a_latent_as_the_query_meets_its_key(call: LatentCall) -> None:
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((4, call.rank))
    keys = np.einsum("hdr,kr->hkd", call.w_uk, latents)
    absorbed = absorbed_queries(call.q_nope, call.w_uk)
    assert_double(np.einsum("thr,kr->thk", absorbed, latents), np.einsum("thd,hkd->thk", call.q_nope, keys))
    values = np.einsum("hdr,kr->hkd", call.w_uv, latents)
    shares = rng.standard_normal((len(call.q_nope), len(call.w_uv), 4))
    mixed = np.einsum("thk,kr->thr", shares, latents)
    assert_double(value_heads(mixed, call.w_uv), np.einsum("thk,hkd->thd", shares, values))


# --- attention ---


def absorbed_form(call: LatentCall) -> AttentionOutput:
    q = absorbed_queries(call.q_nope, call.w_uk)
    out, lse = latent_attention(q, call.q_rope, *call.caches, *call.rows, softmax_scale=call.scale)
    assert out.shape == q.shape
    return AttentionOutput(value_heads(out, call.w_uv), lse)


def expanded_form(call: LatentCall) -> AttentionOutput:
    weights = call.w_uk, call.w_uv
    return expanded_attention(call.q_nope, call.q_rope, *call.caches, *weights, *call.rows, softmax_scale=call.scale)


FORMS = {"absorbed": absorbed_form, "expanded": expanded_form}
every_form = pytest.mark.parametrize("form", FORMS)


def expected(call: LatentCall) -> AttentionOutput:
    """The oracle over the rows that each query picked."""
    found = []
    for query, (nope, turning) in enumerate(zip(call.q_nope, call.q_rope, strict=True)):
        keys = [(row[: call.rank], row[call.rank :]) for row in call.picked(query)]
        heads = list(zip(nope, turning, strict=True))
        found.append(oracle.attend(heads, keys, call.w_uk, call.w_uv, call.scale))
    shape = (*call.q_nope.shape[:2], call.w_uv.shape[1])
    out = np.array([out for out, _ in found], np.float64).reshape(shape)
    return AttentionOutput(out, np.array([lse for _, lse in found], np.float64).reshape(shape[:2]))


def plainly(call: LatentCall, absorbed: bool, order: np.random.Generator) -> AttentionOutput:
    """The plain computation of either form in the call's dtype, its sums in some order."""
    dtype = call.q_nope.dtype
    ranks, nopes = order.permutation(call.rank), order.permutation(call.q_nope.shape[2])
    w_uk, w_uv = call.w_uk[:, nopes][:, :, ranks], call.w_uv[:, :, ranks]
    out = np.zeros((*call.q_nope.shape[:2], w_uv.shape[1]), dtype)
    lse = np.full(out.shape[:2], -np.inf, dtype)
    for query in range(len(out)):
        rows = order.permutation(call.picked(query))
        latents, rope_keys = rows[:, : call.rank][:, ranks], rows[:, call.rank :]
        for h in range(out.shape[1] if len(rows) else 0):
            nope = call.q_nope[query, h, nopes]
            met = latents @ (nope @ w_uk[h]) if absorbed else (latents @ w_uk[h].T) @ nope
            logits = (met + rope_keys @ call.q_rope[query, h]) * dtype.type(call.scale)
            weights = np.exp(logits - logits.max())
            share = weights / weights.sum()
            out[query, h] = w_uv[h] @ (share @ latents) if absorbed else share @ (latents @ w_uv[h].T)
            lse[query, h] = logits.max() + np.log(weights.sum())
    return AttentionOutput(out, lse)


@every_form
@given(call=latent_calls(dtype=np.float64))
def test_both_forms_are_the_oracle(form: str, call: LatentCall) -> None:
    got, due = FORMS[form](call), expected(call)
    assert_double(got.out, due.out, "out")
    assert_double(got.lse, due.lse, "lse")


@given(latent_calls(dtype=np.float32, first=4))
@fewer(2)
def test_float32_absorbed_and_expanded_are_within_budget(call: LatentCall) -> None:
    """One budget for both: what the plain computation loses, in either form and in any order of its sums."""
    due = expected(call)
    low = [plainly(call, absorbed, np.random.default_rng(seed)) for absorbed in (True, False) for seed in range(8)]
    for form, attend in FORMS.items():
        got = attend(call)
        assert_within_budget(got.out, due.out, [plain_one.out for plain_one in low], f"{form} out")
        assert_within_budget(got.lse, due.lse, [plain_one.lse for plain_one in low], f"{form} lse")


@given(latent_calls(dtype=np.float64))
def test_attention_over_latents_needs_no_weights(call: LatentCall) -> None:
    """With the identity as both matrices the latents themselves are keys and values."""
    heads = call.q_nope.shape[1]
    eye = np.broadcast_to(np.eye(call.rank), (heads, call.rank, call.rank))
    q = normal(np.random.default_rng(1), len(call.q_nope), heads, call.rank)
    got = latent_attention(q, call.q_rope, *call.caches, *call.rows, softmax_scale=call.scale)
    due = expected(call._replace(q_nope=q, w_uk=eye, w_uv=eye))
    assert_double(got.out, due.out, "out")
    assert_double(got.lse, due.lse, "lse")


@every_form
@given(call=latent_calls(dtype=np.float64), seed=seeds)
@fewer(2)
def test_order_and_place_of_picks_do_not_matter(form: str, call: LatentCall, seed: int) -> None:
    """-1 in front, between and behind; the same tokens in another order."""
    due = FORMS[form](call)
    nothing = np.full((len(call.topk), 2), -1, np.int32)
    padded = np.concatenate([nothing, call.topk, nothing[:, :1]], axis=1)
    order = np.random.default_rng(seed).permutation(padded.shape[1])
    for moved in (padded, padded[:, ::-1], padded[:, order], np.sort(padded, axis=1)):
        got = FORMS[form](call._replace(topk=np.ascontiguousarray(moved)))
        assert_double(got.out, due.out)
        assert_double(got.lse, due.lse)


@every_form
@given(call=latent_calls(dtype=np.float64, full=True))
@fewer(2)
def test_choosing_every_visible_token_is_dense_causal_attention(form: str, call: LatentCall) -> None:
    got = FORMS[form](call)
    for row, keys in enumerate(call.keys):
        queries = slice(int(call.cu_seqlens_q[row]), int(call.cu_seqlens_q[row + 1]))
        count = queries.stop - queries.start
        if count == 0 or len(keys) == 0:
            continue
        latents, rope_keys = keys[:, : call.rank], keys[:, call.rank :]
        logits = np.einsum("thd,hdr,kr->htk", call.q_nope[queries], call.w_uk, latents)
        logits = call.scale * (logits + np.einsum("thd,kd->htk", call.q_rope[queries], rope_keys))
        causal = np.tri(count, len(keys), len(keys) - count, dtype=bool)
        weights = np.where(causal, np.exp(logits - logits.max(axis=2, keepdims=True)), 0)
        share = weights / weights.sum(axis=2, keepdims=True)
        dense = np.einsum("htk,kr,hdr->thd", share, latents, call.w_uv)
        assert_double(got.out[queries], dense, f"row {row}")


@every_form
def test_a_token_that_nobody_chose_may_be_anything(form: str) -> None:
    """Unused slots are NaN in every call; here the tokens that were not chosen are as well."""
    call = drawn_call(5, [(3, 9), (1, 4)])
    due = FORMS[form](call)
    cache = call.side.cache.copy()
    flat = cache.reshape(-1, cache.shape[2])
    for row, slots in enumerate(call.side.slots):
        queries = slice(int(call.cu_seqlens_q[row]), int(call.cu_seqlens_q[row + 1]))
        flat[[slot for token, slot in enumerate(slots) if token not in call.topk[queries]]] = np.nan
    assert np.isnan(flat).sum() > np.isnan(call.side.cache).sum()
    assert_same(FORMS[form](call._replace(side=call.side._replace(cache=read_only(cache)))), due)


def drawn_call(seed: int, rows: list[tuple[int, int]], dtype: type = np.float64, rank: int = 8) -> LatentCall:
    """A call of 2 heads whose queries choose 2 tokens each, as far as they see so many."""
    rng = np.random.default_rng(seed)
    keys = [normal(rng, used, rank + 4, dtype=dtype) for _, used in rows]
    cu = int32(np.concatenate([[0], np.cumsum([count for count, _ in rows])]))
    q_nope, q_rope = (normal(rng, int(cu[-1]), *width, dtype=dtype) for width in ((2, 3), (2, 4)))
    w_uk, w_uv = normal(rng, 2, 3, rank, dtype=dtype), normal(rng, 2, 5, rank, dtype=dtype)
    topk = np.full((int(cu[-1]), 3), -1, np.int32)
    used = int32([extent for _, extent in rows])
    call = LatentCall(q_nope, q_rope, w_uk, w_uv, keys, paged(rng, keys, 2), topk, cu, used, 0.4)
    for row, place in zip(topk, call.places, strict=True):
        picks = rng.permutation(place[1] + 1)[:2]
        row[-len(picks) :] = picks
    return call._replace(topk=read_only(topk))


@every_form
@given(call=latent_calls(dtype=np.float64))
@fewer(2)
def test_every_query_may_be_a_row_of_its_own(form: str, call: LatentCall) -> None:
    """How a request is cut into rows does not matter: a strided shard gives each query its own extent."""
    whole = FORMS[form](call)
    real = [query for query, place in enumerate(call.places) if place is not None]
    places = [call.places[query] for query in real]
    alone = call._replace(
        q_nope=call.q_nope[real],
        q_rope=call.q_rope[real],
        side=call.side._replace(table=call.side.table[[row for row, _ in places]]),
        topk=call.topk[real],
        cu_seqlens_q=int32(range(len(real) + 1)),
        seqused_kv=int32([position + 1 for _, position in places]),
    )
    got = FORMS[form](alone)
    assert_double(got.out, whole.out[real])
    assert_double(got.lse, whole.lse[real])
    nobody = [query for query, place in enumerate(call.places) if place is None]
    assert not whole.out[nobody].any()
    assert (whole.lse[nobody] == -np.inf).all()


def test_the_scale_is_that_of_the_logits_and_of_both_parts() -> None:
    """Twice the scale is twice both parts of the query; half of the rope part would be seen."""
    call = drawn_call(6, [(4, 9)])
    twice = absorbed_form(call._replace(scale=2 * call.scale))
    longer = absorbed_form(call._replace(q_nope=2 * call.q_nope, q_rope=2 * call.q_rope))
    assert_double(twice.out, longer.out)
    assert_double(twice.lse, longer.lse)
    one_part = absorbed_form(call._replace(q_nope=2 * call.q_nope))
    assert np.abs(one_part.out - twice.out).max() > 1e-3


@pytest.mark.parametrize("rows", [[(3, 5), (2, 7)]], ids=str)
def test_a_cache_in_bytes_is_attended_as_the_numbers_that_it_holds(rows: list[tuple[int, int]]) -> None:
    pytest.importorskip("ml_dtypes")
    call = drawn_call(7, rows, np.float32, rank=128)
    latent_cache, rope_cache = (np.nan_to_num(part) for part in call.caches)
    coded = encoded_latents(latent_cache, rope_cache)
    numbers = decoded_latents(coded, kv_lora_rank=128, dtype="float32")
    q = absorbed_queries(call.q_nope, call.w_uk)
    got = latent_attention(q, call.q_rope, coded, None, *call.rows, softmax_scale=call.scale)
    due = latent_attention(q, call.q_rope, *numbers, *call.rows, softmax_scale=call.scale)
    assert_same(got, due)
    exact = latent_attention(q, call.q_rope, latent_cache, rope_cache, *call.rows, softmax_scale=call.scale)
    error = np.linalg.norm(got.out - exact.out) / np.linalg.norm(exact.out)
    print("ERR", error)
    assert 1e-4 < error < 0.3


# --- picks of a top-k that ran over all keys ---


@st.composite
def eager_picks(draw: st.DrawFn) -> tuple[LatentCall, np.ndarray]:
    """A call, and lists that a top-k over all keys of the request gave, some of them after the query."""
    call = draw(latent_calls(dtype=np.float64))
    rng, width = np.random.default_rng(draw(seeds)), draw(st.integers(1, 8))
    picks = np.full((len(call.topk), width), -1, np.int32)
    for row, place in zip(picks, call.places, strict=True):
        if place is not None:
            chosen = rng.permutation(int(call.seqused_kv[place[0]]))[:width]
            row[: len(chosen)] = chosen
    return call, read_only(picks)


@every_form
@given(case=eager_picks())
def test_picks_after_the_query_never_count(form: str, case: tuple[LatentCall, np.ndarray]) -> None:
    call, picks = case
    positions = int32([-1 if place is None else place[1] for place in call.places])
    causal = causal_picks(picks, positions)
    wanted = [[t if t <= p else -1 for t in row] for row, p in zip(picks.tolist(), positions.tolist(), strict=True)]
    assert causal.dtype == np.int32
    assert causal.tolist() == wanted
    clean = call._replace(topk=causal)
    assert_double(FORMS[form](clean).out, expected(clean).out)
    if (causal != picks).any():
        with pytest.raises(ContractError, match=r"^topk_indices must be -1 or below"):
            FORMS[form](call._replace(topk=picks))
    else:
        FORMS[form](call._replace(topk=picks))


@every_form
def test_the_first_token_after_the_query_is_refused(form: str) -> None:
    """Queries at 2 and 3 of four tokens; a padded slot sees nothing at all."""
    call = drawn_call(9, [(2, 4)])
    FORMS[form](call._replace(topk=int32([[2], [3]])))
    for used, topk, query, visible in ((4, [3, 3], 0, 3), (4, [2, 4], 1, 4), (0, [0, -1], 0, 0)):
        wrong = call._replace(seqused_kv=int32([used]), topk=int32(topk)[:, None])
        rule = rf"^topk_indices must be -1 or below the {visible} \w+ that query {query} sees, got {visible};"
        with pytest.raises(ContractError, match=rule):
            FORMS[form](wrong)


@every_form
def test_a_token_twice_is_refused(form: str) -> None:
    call = drawn_call(8, [(1, 4)])
    with pytest.raises(ContractError, match=r"^topk_indices must be distinct in a row"):
        FORMS[form](call._replace(topk=int32([[2, -1, 2]])))


# --- where the keys of a strided shard lie ---


def packed_keys(step: Step) -> list[tuple[int, int]]:
    """(request, position) of all keys of the batch, laid end to end."""
    return [(request, s) for request, extent in enumerate(step.batch.seq_lens) for s in range(extent)]


@given(cuts())
@fewer(4)
def test_a_row_is_scored_against_the_keys_up_to_its_own(every: list[Step]) -> None:
    for step in each(every):
        batch, keys = step.batch, packed_keys(step)
        for tokens in splits.owned_tokens(batch.query_lens, step.cp_size, step.split, step.num_input_tokens):
            ranges = key_ranges(int32(tokens), batch.query_start_loc, batch.key_lens)
            assert {part.dtype for part in ranges} == {np.dtype(np.int32)}
            assert len(ranges.starts) == len(ranges.ends) == len(tokens)
            for token, start, end in zip(tokens, ranges.starts.tolist(), ranges.ends.tolist(), strict=True):
                request, position = extents.token_place(batch.query_lens, batch.seq_lens, token)
                if position is None:
                    assert (start, end) == (0, 0)
                else:
                    assert keys[start:end] == [(request, s) for s in range(position + 1)]


@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_ranges_of_all_ranks_cover_every_row_once(split: str) -> None:
    """Prefixes 0, 6 and 1; the second request has one token, the fourth is a padded slot."""
    loc, lens = int32([0, 5, 6, 13, 15]), int32([5, 7, 8, 0])
    due = sorted([(0, p + 1) for p in range(5)] + [(5, 12)] + [(12, 12 + p + 1) for p in range(1, 8)] + [(0, 0)] * 2)
    for cp_size in range(1, 5):
        found = []
        for tokens in partition_tokens(loc, cp_size, split=split).token_indices:
            ranges = key_ranges(tokens[tokens >= 0], loc, lens)
            found += list(zip(ranges.starts.tolist(), ranges.ends.tolist(), strict=True))
        assert sorted(found) == due


@given(cuts(), seeds)
@fewer(4)
def test_packed_and_paged_picks_name_the_same_rows(every: list[Step], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for step in each(every):
        batch, keys = step.batch, packed_keys(step)
        block_size = int(rng.integers(1, 5))
        # The key of token s of request r says so.
        rows = [np.array([(r, s) for s in range(n)]).reshape(n, 2) for r, n in enumerate(batch.seq_lens)]
        side = paged(rng, rows, block_size, poison=-7)
        flat = side.cache.reshape(-1, 2) if rows else side.cache
        for tokens in splits.owned_tokens(batch.query_lens, step.cp_size, step.split, step.num_input_tokens):
            places = [extents.token_place(batch.query_lens, batch.seq_lens, token) for token in tokens]
            topk = np.full((len(tokens), 4), -1, np.int32)
            for row, (_, position) in zip(topk, places, strict=True):
                picks = rng.permutation(0 if position is None else position + 1)[: int(rng.integers(0, 5))]
                row[rng.permutation(4)[: len(picks)]] = picks
            ranges = key_ranges(int32(tokens), batch.query_start_loc, batch.key_lens)
            requests = int32([-1 if request is None else request for request, _ in places])
            packed, slots = packed_topk(topk, ranges.starts), paged_topk(topk, requests, side.table, block_size)
            assert {packed.dtype, slots.dtype} == {np.dtype(np.int32)}
            assert packed.shape == slots.shape == topk.shape
            for row, (request, _) in enumerate(places):
                for pick, at, slot in zip(topk[row], packed[row], slots[row], strict=True):
                    if pick < 0:
                        assert at == slot == -1
                    else:
                        assert keys[at] == (request, pick)
                        assert flat[slot].tolist() == [request, pick]
                        assert ranges.starts[row] <= at < ranges.ends[row]


# --- the choice of tokens ---


class Choice(NamedTuple):
    """Index vectors of one request whose first queries stand behind a prefix."""

    qr: np.ndarray
    x: np.ndarray
    weights: MLAWeights
    prefix: int
    index_topk: int
    block_size: int
    seed: int
    config: MLAConfig


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    rng, config = np.random.default_rng(draw(seeds)), draw(configs())
    length = draw(st.integers(1, 20))
    weights, grid = weights_of(rng, config), draw(st.booleans())
    x, qr = rng.standard_normal((length, config.hidden_size)), rng.standard_normal((length, config.q_lora_rank))
    if grid:  # the same few tokens again and again: ties on purpose
        x = x[rng.integers(0, max(1, length // 4), length)]
    prefix = draw(st.integers(0, length - 1))
    return Choice(qr, x, weights, prefix, draw(st.integers(1, 8)), draw(st.integers(1, 5)), draw(seeds), config)


def scores_and_choice(case: Choice, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float64 scores by the oracle of our vectors, our choice) of all queries behind the prefix."""
    w, config = case.weights.indexer, case.config
    table = rope_table(positions, mla_frequencies(config))
    keys = token_index_keys(case.x, w.wk, w.k_norm, w.k_norm_bias, *table, eps=1e-6)
    q = token_index_queries(case.qr, w.wq_b, *table, index_head_dim=config.index_head_dim)[case.prefix :]
    gains = index_head_weights(case.x, w.weights_proj, index_head_dim=config.index_head_dim)[case.prefix :]
    side = paged(np.random.default_rng(case.seed), [keys], case.block_size)
    cu, used = int32([0, len(q)]), int32([len(keys)])
    options = {"compress_ratio": 1, "index_topk": case.index_topk}
    topk = lightning_indexer(q, gains, side.cache, side.table, cu, used, **options)
    scores = [[indexer.score(heads, gain, key) for key in keys] for heads, gain in zip(q, gains, strict=True)]
    return np.array(scores), topk


def noise_of(scores: np.ndarray) -> float:
    return 1e-12 * max(1.0, float(np.abs(scores).max()))


@given(choices())
def test_a_query_chooses_among_itself_and_all_before_it(case: Choice) -> None:
    scores, topk = scores_and_choice(case, int32(range(len(case.x))))
    due = [indexer.select(row, case.prefix + i + 1, case.index_topk) for i, row in enumerate(scores.tolist())]
    visible = np.tri(*scores.shape, case.prefix, dtype=bool)
    assert_same_selection(topk, int32(due), np.where(visible, scores, -np.inf), noise_of(scores))


@given(choices())
@fewer(2)
def test_the_hadamard_rotation_changes_no_choice(case: Choice) -> None:
    positions = int32(range(len(case.x)))
    scores, rotated = scores_and_choice(case, positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla_module, "hadamard", lambda x: x)
        plain_scores, bare = scores_and_choice(case, positions)
    note(f"{rotated.tolist()} {bare.tolist()}")
    assert np.abs(plain_scores - scores).max() <= noise_of(scores)
    visible = np.tri(*scores.shape, case.prefix, dtype=bool)
    assert_same_selection(rotated, bare, np.where(visible, scores, -np.inf), noise_of(scores))


def test_equal_tokens_are_chosen_from_the_front() -> None:
    """All tokens the same and no rotation: every score ties, and the earliest win."""
    weights = weights_of(np.random.default_rng(3), SMALL)
    same = np.ones((9, SMALL.hidden_size)), np.ones((9, SMALL.q_lora_rank))
    case = Choice(same[1], same[0], weights, 0, 4, 2, 0, SMALL)
    _, topk = scores_and_choice(case, np.zeros(9, np.int32))
    assert topk[2].tolist() == [0, 1, 2, -1]
    assert topk[8].tolist() == [0, 1, 2, 3]


def test_the_norm_of_a_key_is_not_an_rms_norm() -> None:
    """A constant added to every channel of the projected key disappears."""
    rng = np.random.default_rng(4)
    one, x = np.ones(8), rng.standard_normal((3, 8))
    assert_double(layer_norm(x + 5.0, one, 0 * one, 0.0), layer_norm(x, one, 0 * one, 0.0))
    rms = np.array([compressor.rms_norm(row, one, 0.0) for row in x])
    assert np.abs(layer_norm(x, one, 0 * one, 0.0) - rms).max() > 1e-2
