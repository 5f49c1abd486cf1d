"""The sink, and merging partial results: the sink joins once, after the merge."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.attention import AttentionOutput, apply_sink, gathered_attention, merge_partials
from tests import plain
from tests.compare import assert_double, assert_same, assert_within_budget
from tests.laws.attention_forms import FORMS, expected, with_rows
from tests.maths_strategies import calls, normal, seeds
from tests.oracles import attention as oracle
from tests.strategies import read_only

every_form = pytest.mark.parametrize("form", FORMS)
doubles = calls(dtype=np.float64)


def with_sink(call, sink: float):
    return call._replace(sink=np.full(call.sink.shape, sink))


@every_form
@given(call=doubles)
def test_a_sink_of_minus_infinity_is_no_sink(form, call):
    got = FORMS[form](with_sink(call, -np.inf))
    want = expected(with_sink(call, -np.inf), form)
    assert_double(got.out, want.out)
    assert_double(got.lse, want.lse)


@every_form
@given(call=doubles)
def test_the_lse_leaves_the_sink_out(form, call):
    want = FORMS[form](with_sink(call, -np.inf)).lse
    for sink in (0.0, 50.0, -1e4):
        assert_same(FORMS[form](with_sink(call, sink)).lse, want)


@every_form
@given(call=doubles, sink=st.sampled_from([-700.0, -5.0, 3.0, 40.0, 600.0]))
def test_a_sink_of_any_size_is_the_oracles(form, call, sink):
    got, want = FORMS[form](with_sink(call, sink)), expected(with_sink(call, sink), form)
    assert_double(got.out, want.out)


@every_form
@given(call=calls(), sink=st.sampled_from([1e4, 1e30, np.inf]))
def test_a_dominating_sink_takes_everything_without_overflow(form, call, sink):
    assert (FORMS[form](with_sink(call, sink)).out == 0).all()


@every_form
@given(call=doubles)
def test_the_output_fades_smoothly_as_the_sink_grows(form, call):
    sizes = [np.abs(FORMS[form](with_sink(call, sink)).out) for sink in (-np.inf, -2.0, 0.0, 2.0, 30.0)]
    for larger, smaller in pairwise(sizes):
        assert (smaller <= larger).all()


@every_form
@given(call=doubles)
def test_very_negative_logits_with_a_sink_give_zero_not_nan(form, call):
    """Keys all equal and opposite to the queries, far out: every logit is about -1e6."""
    far = np.ones(call.q.shape[2]) * 1e3
    raw, entries = ([np.tile(-far, (len(x), 1)) for x in rows] for rows in (call.raw, call.entries))
    call = with_rows(call._replace(q=np.tile(far, (*call.q.shape[:2], 1))), raw, entries)
    got = FORMS[form](call)
    assert (got.out == 0).all()
    seen = [place is not None for place in call.places]
    assert np.isfinite(got.lse[seen]).all()
    assert (got.lse[seen] < -1e5).all()
    assert_double(FORMS[form](with_sink(call, -np.inf)).out, expected(with_sink(call, -np.inf), form).out)


@st.composite
def partials(draw, dtype=np.float64):
    """(q, keys, parts, scale): keys dealt to parts; some parts, some queries get none."""
    rng = np.random.default_rng(draw(seeds))
    num_queries, num_keys, num_parts = draw(st.integers(0, 3)), draw(st.integers(0, 6)), draw(st.integers(1, 4))
    owner = rng.integers(-1, num_parts, (num_queries, num_keys))  # -1: nobody's
    everything = np.broadcast_to(np.arange(num_keys, dtype=np.int32), owner.shape)
    parts = [read_only(np.where(owner == part, everything, np.int32(-1))) for part in range(num_parts)]
    scale = draw(st.sampled_from([1.0, 30.0]))
    return normal(rng, num_queries, 2, 3, dtype=dtype), normal(rng, num_keys, 3, dtype=dtype), parts, scale


def outs_and_lses(case, poison: float = np.nan) -> tuple[np.ndarray, np.ndarray]:
    """Stacked results of all parts; what a part without keys holds is poison."""
    q, keys, parts, scale = case
    results = [gathered_attention(q, keys, part, softmax_scale=scale) for part in parts]
    outs, lses = (np.stack([each[i] for each in results]) for i in (0, 1))
    return read_only(np.where((lses == -np.inf)[..., None], q.dtype.type(poison), outs)), read_only(lses)


def whole(case) -> AttentionOutput:
    q, keys, parts, scale = case
    return gathered_attention(q, keys, read_only(np.max(parts, axis=0)), softmax_scale=scale)


@given(partials())
def test_merged_parts_are_the_whole(case):
    """ROCm/ATOM#1832: a part without keys holds NaN and is not looked at."""
    got, want = merge_partials(*outs_and_lses(case)), whole(case)
    assert_double(got.out, want.out)
    assert_double(got.lse, want.lse)


@given(partials(np.float32))
def test_merged_float32_parts_are_within_budget(case):
    q, keys, parts, scale = case
    outs, lses = outs_and_lses(case)
    got, want = merge_partials(outs, lses), whole((q.astype(np.float64), keys.astype(np.float64), parts, scale))
    low = AttentionOutput(np.zeros_like(q), np.full(q.shape[:2], -np.inf, q.dtype))
    for at in np.ndindex(q.shape[:2]):
        some = np.isfinite(lses[(slice(None), *at)])
        if some.any():
            low.out[at], low.lse[at] = plain.merged(outs[(some, *at)], lses[(some, *at)])
    assert_within_budget(got.out, want.out, low.out, "out")
    assert_within_budget(got.lse, want.lse, low.lse, "lse")


@given(partials(), st.data())
def test_merging_in_groups_equals_merging_at_once(case, data):
    outs, lses = outs_and_lses(case)
    cut = data.draw(st.integers(0, len(outs)))
    groups = [merge_partials(outs[part], lses[part]) for part in (slice(0, cut), slice(cut, None)) if len(outs[part])]
    got, want = merge_partials(*(np.stack([g[i] for g in groups]) for i in (0, 1))), merge_partials(outs, lses)
    assert_double(got.out, want.out)
    assert_double(got.lse, want.lse)


@given(partials(), seeds)
def test_the_order_of_parts_does_not_matter(case, seed):
    outs, lses = outs_and_lses(case)
    order = np.random.default_rng(seed).permutation(len(outs))
    got, want = merge_partials(outs[order], lses[order]), merge_partials(outs, lses)
    assert_double(got.out, want.out)
    assert_double(got.lse, want.lse)


@given(partials(), st.integers(1, 3))
def test_empty_parts_change_nothing(case, count):
    outs, lses = outs_and_lses(case)
    more = np.concatenate([np.full((count, *outs.shape[1:]), np.nan), outs])
    silent = np.concatenate([np.full((count, *lses.shape[1:]), -np.inf), lses])
    assert_same(merge_partials(more, silent), merge_partials(outs, lses))


@given(partials())
def test_one_part_merges_to_itself(case):
    q, keys, parts, scale = case
    one = gathered_attention(q, keys, parts[0], softmax_scale=scale)
    assert_same(merge_partials(one.out[None], one.lse[None]), one)


@given(partials(), st.sampled_from([-np.inf, -3.0, 0.0, 2.0, 500.0]))
def test_the_sink_joins_once_after_the_merge(case, sink):
    """vllm#43809: with the sink in every part it would count once a part."""
    q, keys, parts, scale = case
    out, lse = merge_partials(*outs_and_lses(case))
    got = apply_sink(out, lse, np.full(2, sink))
    sinks = None if sink == -np.inf else [sink] * 2
    chosen = np.max(parts, axis=0)
    want = [oracle.attend(one, keys[row[row >= 0]], sinks, scale)[0] for one, row in zip(q, chosen, strict=True)]
    assert_double(got, np.array(want).reshape(q.shape))


@given(partials(), st.sampled_from([-np.inf, 0.0, np.inf]))
def test_where_nothing_is_visible_the_output_is_zero_whatever_the_sink(case, sink):
    """A rank without keys may hold NaN; both at minus infinity is 0, not 0/0."""
    outs, lses = outs_and_lses(case)
    got = apply_sink(outs[0], lses[0], np.full(2, sink))
    assert (got[lses[0] == -np.inf] == 0).all()
    assert not np.isnan(got).any()


def test_two_ranks_with_one_key_each_and_a_sink_give_four_thirds():
    """vllm#43809: logits 0, values 1 and 3, sink logit 0; the sink on each rank would give 1."""
    out, lse = merge_partials(np.array([[[[1.0]]], [[[3.0]]]]), np.zeros((2, 1, 1)))
    assert apply_sink(out, lse, np.zeros(1))[0, 0, 0] == pytest.approx(4 / 3, rel=1e-15)
    each = [apply_sink(np.array([[[v]]]), np.zeros((1, 1)), np.zeros(1)) for v in (1.0, 3.0)]
    twice, _ = merge_partials(np.array(each), np.full((2, 1, 1), math.log(2)))
    assert twice[0, 0, 0] == pytest.approx(1)


def test_a_rank_that_owns_no_selected_key_adds_nothing():
    """ROCm/ATOM#1832; and where no rank owns one the output is zero."""
    outs = np.array([[[[5.0]], [[np.nan]]], [[[np.nan]], [[np.nan]]]])
    lses = np.array([[[0.3], [-np.inf]], [[-np.inf], [-np.inf]]])
    got = merge_partials(outs, lses)
    assert got.out.tolist() == [[[5.0]], [[0.0]]]
    assert got.lse.tolist() == [[0.3], [-math.inf]]


def test_far_apart_parts_merge_without_overflow():
    outs = np.array([[[[1.0]]], [[[2.0]]]])
    for lses in ([[[1e4]], [[-1e4]]], [[[1e4]], [[1e4]]], [[[-1e4]], [[-1e4]]]):
        got = merge_partials(outs, np.array(lses))
        assert np.isfinite(got.out).all()
        assert got.lse[0, 0] == pytest.approx(max(lses)[0][0] + (math.log(2) if lses[0] == lses[1] else 0))


@given(seeds)
def test_each_head_has_its_own_sink(seed):
    rng = np.random.default_rng(seed)
    out, lse, sink = normal(rng, 3, 2, 4), normal(rng, 3, 2), normal(rng, 2)
    got = apply_sink(out, lse, sink)
    for head in range(2):
        assert_same(
            got[:, head : head + 1], apply_sink(out[:, head : head + 1], lse[:, head : head + 1], sink[head : head + 1])
        )


def test_the_sink_may_have_another_float_width_than_the_queries():
    out, lse = np.ones((1, 1, 1), np.float32), np.zeros((1, 1), np.float32)
    assert apply_sink(out, lse, np.zeros(1, np.float64)).dtype == np.float32
