"""Attention against the oracle, which sums over exactly the rows that a query sees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.attention import AttentionOutput, gathered_attention, window_attention
from dsacp_ref.spec import ContractError
from tests.compare import assert_double, assert_same, assert_within_budget
from tests.laws.attention_forms import FORMS, expected, plain_orders, plainly, seen, selected, window, with_rows
from tests.maths_strategies import call_of, calls, dtypes, int32, normal, operator_rows, seeds
from tests.oracles import attention as oracle
from tests.strategies import read_only

forms = st.sampled_from(list(FORMS))
doubles = calls(dtype=np.float64)
# Enough numbers that the plain computation cannot be right in all of them by luck.
singles = calls(dtype=np.float32, num_heads=3, head_dim=6, rows=operator_rows(first=4))
every_form = pytest.mark.parametrize("form", FORMS)


# Lists of keys without pages.


@st.composite
def gathers(draw, dtype=np.float64, least: int = 0):
    """(q, keys, key_indices, scale): -1 anywhere, lists of no key, keys twice over queries."""
    rng = np.random.default_rng(draw(seeds))
    num_queries, num_keys, width = (draw(st.integers(least, most)) for most in (4, 6, 5))
    heads, d = draw(st.integers(1 + least, 3)), draw(st.sampled_from([1, 4] if least == 0 else [4, 6]))
    indices = np.full((num_queries, width), -1, np.int32)
    for query in range(num_queries):
        chosen = rng.permutation(num_keys)[: int(rng.integers(0, width + 1))]
        indices[query, rng.permutation(width)[: len(chosen)]] = chosen
    q, keys = normal(rng, num_queries, heads, d, dtype=dtype), normal(rng, num_keys, d, dtype=dtype)
    return q, keys, read_only(indices), draw(st.sampled_from([1.0, 0.5, d**-0.5, 9.0]))


def gathered(case) -> AttentionOutput:
    q, keys, indices, scale = case
    return gathered_attention(q, keys, indices, softmax_scale=scale)


def gathered_oracle(case) -> AttentionOutput:
    q, keys, indices, scale = case
    found = [oracle.attend(one, keys[row[row >= 0]], None, scale) for one, row in zip(q, indices, strict=True)]
    out, lse = ([pair[i] for pair in found] for i in (0, 1))
    return AttentionOutput(np.array(out).reshape(q.shape), np.array(lse).reshape(q.shape[:2]))


@given(gathers())
def test_a_list_of_keys_is_attended_as_the_oracle_does(case):
    got, want = gathered(case), gathered_oracle(case)
    assert_double(got.out, want.out, "out")
    assert_double(got.lse, want.lse, "lse")


@given(gathers(np.float32, least=2))
def test_float32_over_a_list_of_keys_is_within_budget(case):
    q, keys, indices, scale = case
    got, want = gathered(case), gathered_oracle(case)
    rows = [keys[row[row >= 0]] for row in indices]
    low = plain_orders(q, rows, np.full(q.shape[1], -np.inf, q.dtype), scale)
    assert_within_budget(got.out, want.out, [each.out for each in low], "out")
    assert_within_budget(got.lse, want.lse, [each.lse for each in low], "lse")


@given(gathers(), seeds)
def test_where_a_list_holds_minus_one_does_not_matter(case, seed):
    """vllm#48364: front, middle or back."""
    q, keys, indices, scale = case
    want = gathered(case)
    width = indices.shape[1]
    padded = np.concatenate([np.full((len(q), 2), -1, np.int32), indices, np.full((len(q), 1), -1, np.int32)], axis=1)
    order = np.random.default_rng(seed).permutation(width + 3)
    for moved in (padded, padded[:, ::-1], padded[:, order]):
        got = gathered((q, keys, np.ascontiguousarray(moved), scale))
        assert_double(got.out, want.out)
        assert_double(got.lse, want.lse)


@given(gathers())
def test_a_key_that_no_list_names_may_be_anything(case):
    q, keys, indices, scale = case
    poked = keys.copy()
    poked[[key for key in range(len(keys)) if key not in indices]] = np.nan
    assert_same(gathered((q, poked, indices, scale)), gathered(case))


def test_sixteen_empty_places_before_one_key_give_its_value():
    """vllm#48364, and a list of nothing but -1."""
    keys = np.array([[1.0], [2.0], [3.0], [7.0]])
    indices = int32([[-1] * 16 + [3], [-1] * 17])
    got = gathered_attention(np.ones((2, 1, 1)), keys, indices, softmax_scale=1.0)
    assert got.out.tolist() == [[[7.0]], [[0.0]]]
    assert got.lse.tolist() == [[7.0], [-math.inf]]


@pytest.mark.parametrize("num_queries", [64, 65])
def test_lanes_set_to_minus_one_take_no_part_beyond_64_queries(num_queries):
    """flashinfer#5095: 10 of 128 lanes used."""
    rng = np.random.default_rng(0)
    q, keys = normal(rng, num_queries, 1, 2), normal(rng, 200, 2)
    used = np.stack([rng.permutation(200)[:10] for _ in range(num_queries)]).astype(np.int32)
    lanes = np.concatenate([used, np.full((num_queries, 118), -1, np.int32)], axis=1)
    assert_double(
        gathered_attention(q, keys, lanes, softmax_scale=1.0).out,
        gathered_attention(q, keys, used, softmax_scale=1.0).out,
    )


@pytest.mark.parametrize("index", [4, -2])
def test_a_key_that_does_not_exist_is_refused(index):
    with pytest.raises(ContractError, match=r"key_indices must be -1 or in \[0, 4\)"):
        gathered_attention(np.ones((1, 1, 1)), np.ones((4, 1)), int32([[index]]), softmax_scale=1.0)


# The paged forms.


@every_form
@given(call=doubles)
def test_a_paged_form_is_the_oracle_over_what_each_query_sees(form, call):
    got, want = FORMS[form](call), expected(call, form)
    assert_double(got.out, want.out, "out")
    assert_double(got.lse, want.lse, "lse")


@every_form
@given(call=singles)
def test_a_paged_form_in_float32_is_within_budget(form, call):
    got, want, low = FORMS[form](call), expected(call, form), plainly(call, form)
    assert_within_budget(got.out, want.out, [each.out for each in low], "out")
    assert_within_budget(got.lse, want.lse, [each.lse for each in low], "lse")


@every_form
@given(call=doubles)
def test_a_paged_form_is_the_gathered_form_over_lists(form, call):
    """Without a sink; one array of all rows, one list a query."""
    quiet = call._replace(sink=np.full(call.sink.shape, -np.inf))
    raw_at = np.cumsum([0, *map(len, call.raw)])
    keys = np.concatenate([np.empty((0, call.q.shape[2])), *call.raw, *call.entries])
    entry_at = raw_at[-1] + np.cumsum([0, *map(len, call.entries)])
    lists = []
    for query in range(len(call.q)):
        row, raw, entries = seen(call, form, query) or (0, [], [])
        lists.append([raw_at[row] + p for p in raw] + [entry_at[row] + w for w in entries])
    width = max(map(len, lists), default=0)
    indices = int32([each + [-1] * (width - len(each)) for each in lists]).reshape(len(lists), width)
    want = gathered_attention(call.q, keys, indices, softmax_scale=call.scale)
    got = FORMS[form](quiet)
    assert_double(got.out, want.out)
    assert_double(got.lse, want.lse)


@every_form
@given(call=calls())
def test_queries_without_keys_give_zero_and_minus_infinity(form, call):
    """Padded graph slots, and queries beyond the last row; nothing else is empty, for a query sees itself."""
    got = FORMS[form](call)
    empty = [place is None for place in call.places]
    assert (got.out[empty] == 0).all()
    assert (got.lse[empty] == -np.inf).all()
    assert np.isfinite(got.lse[[not none for none in empty]]).all()
    assert (got.out.dtype, got.lse.dtype, got.out.shape) == (call.q.dtype, call.q.dtype, call.q.shape)


@every_form
@given(call=doubles)
def test_rows_that_no_query_sees_may_hold_nan(form, call):
    """Raw rows before every window, entries that no list names; slots beyond the extent are NaN in every test."""
    raw, entries = [np.full_like(x, np.nan) for x in call.raw], [np.full_like(x, np.nan) for x in call.entries]
    for query in range(len(call.q)):
        if view := seen(call, form, query):
            row, positions, chosen = view
            raw[row][positions], entries[row][chosen] = call.raw[row][positions], call.entries[row][chosen]
    got, want = FORMS[form](with_rows(call, raw, entries)), FORMS[form](call)
    assert_double(got.out, want.out)
    assert_double(got.lse, want.lse)


@every_form
@given(call=doubles, data=st.data())
def test_a_later_token_never_changes_an_earlier_output(form, call, data):
    """Not even when it is NaN, and not by way of the entry it completes."""
    longest = [row for row, used in enumerate(call.seqused_kv.tolist()) if used]
    if not longest:
        return
    row = data.draw(st.sampled_from(longest))
    token = data.draw(st.integers(0, len(call.raw[row]) - 1))
    raw, entries = list(call.raw), list(call.entries)
    raw[row], entries[row] = raw[row].copy(), entries[row].copy()
    raw[row][token] = np.nan
    entries[row][token // call.ratio :] = np.nan
    got, want = FORMS[form](with_rows(call, raw, entries)), FORMS[form](call)
    for query, place in enumerate(call.places):
        if place is None or place[0] != row or place[1] < token:
            assert_double(got.out[query], want.out[query])
            assert_double(got.lse[query], want.lse[query])
        elif place[1] < token + call.window:
            assert np.isnan(got.out[query]).all(), "a query that sees NaN must say so"


@every_form
@given(call=calls(), seed=seeds)
def test_renaming_blocks_with_their_tables_changes_nothing(form, call, seed):
    rng = np.random.default_rng(seed)
    sides = []
    for side in (call.swa, call.cmp):
        order = rng.permutation(len(side.cache)).astype(np.int32)
        cache, table = np.empty_like(side.cache), side.table.copy()
        cache[order] = side.cache
        known = (table >= 0) & (table < len(order))
        table[known] = order[table[known]]
        sides.append(side._replace(cache=read_only(cache), table=read_only(table)))
    assert_same(FORMS[form](call._replace(swa=sides[0], cmp=sides[1])), FORMS[form](call))


@every_form
@given(call=calls(), seed=seeds)
def test_other_garbage_beyond_the_used_part_of_a_table_changes_nothing(form, call, seed):
    rng = np.random.default_rng(seed)
    sides = []
    for side in (call.swa, call.cmp):
        table = side.table.copy()
        for row, slots in enumerate(side.slots):
            used = -(-len(slots) // side.cache.shape[1])
            table[row, used:] = rng.choice([-1, 0, 10**9, -7], table.shape[1] - used)
        sides.append(side._replace(table=read_only(table)))
    assert_same(FORMS[form](call._replace(swa=sides[0], cmp=sides[1])), FORMS[form](call))


@every_form
@given(call=doubles, seed=seeds)
def test_permuting_operator_rows_permutes_outputs(form, call, seed):
    order = np.random.default_rng(seed).permutation(len(call.seqused_kv))
    cu = call.cu_seqlens_q.tolist()
    queries = [q for row in order for q in range(cu[row], cu[row + 1])] + list(range(cu[-1], len(call.q)))
    moved = call._replace(
        q=call.q[queries],
        topk=call.topk[queries],
        swa=call.swa._replace(table=call.swa.table[order]),
        cmp=call.cmp._replace(table=call.cmp.table[order]),
        cu_seqlens_q=int32(np.concatenate([[0], np.cumsum(np.diff(cu)[order])])),
        seqused_kv=call.seqused_kv[order],
    )
    got, want = FORMS[form](moved), FORMS[form](call)
    assert_double(got.out, want.out[queries])
    assert_double(got.lse, want.lse[queries])


@every_form
@given(call=doubles)
def test_heads_do_not_mix(form, call):
    whole = FORMS[form](call)
    for head in range(call.q.shape[1]):
        one = FORMS[form](call._replace(q=call.q[:, head : head + 1], sink=call.sink[head : head + 1]))
        assert_double(one.out[:, 0], whole.out[:, head])
        assert_double(one.lse[:, 0], whole.lse[:, head])


@given(doubles, seeds)
def test_the_order_of_chosen_entries_and_where_none_stands_do_not_matter(call, seed):
    padded = np.concatenate([call.topk, np.full((len(call.q), 2), -1, np.int32)], axis=1)
    order = np.random.default_rng(seed).permutation(padded.shape[1])
    want = selected(call)
    front = np.take_along_axis(padded, np.argsort(padded >= 0, axis=1, kind="stable"), axis=1)
    for moved in (front, front[:, ::-1], padded[:, order]):
        got = selected(call._replace(topk=np.ascontiguousarray(moved)))
        assert_double(got.out, want.out)
        assert_double(got.lse, want.lse)


@given(doubles)
def test_without_a_chosen_entry_only_the_window_is_left(call):
    got, want = selected(call._replace(topk=np.full_like(call.topk, -1))), window(call)
    assert_double(got.out, want.out)
    assert_double(got.lse, want.lse)


@given(doubles)
def test_a_window_wider_than_the_request_sees_all_of_it(call):
    assert_same(window(call._replace(window=2**31 - 1)), window(call._replace(window=60)))


# Positions.


def test_positions_follow_from_right_alignment():
    """xLLM#2097: rank 0 of 2 owns 73 of 145 queries; with the whole key length its row 0 would stand at 72."""
    rng = np.random.default_rng(0)
    keys = normal(rng, 145, 2)
    q = normal(rng, 145, 1, 2)

    def rows(part: slice, used: int) -> np.ndarray:
        return window_attention(
            q[part],
            keys[None],
            int32([[0]]),
            int32([0, part.stop - part.start]),
            int32([used]),
            np.zeros(1),
            window_size=8,
            softmax_scale=1.0,
        ).out

    whole = rows(slice(0, 145), 145)
    assert_double(rows(slice(0, 73), 73), whole[:73])
    assert_double(rows(slice(73, 145), 145), whole[73:])
    assert np.abs(rows(slice(0, 73), 145) - whole[:73]).max() > 0.1


@pytest.mark.parametrize(("position", "first"), [(0, 0), (127, 0), (128, 1), (300, 173)])
def test_a_window_of_128_holds_the_query_and_127_before_it(position, first):
    """Values are positions and all logits equal, so the output is their mean and lse the log of their number."""
    cache = np.arange(301.0).reshape(7, 43, 1)
    call = (np.zeros((1, 1, 1)), cache, int32([range(7)]), int32([0, 1]), int32([position + 1]), np.array([-np.inf]))
    got = window_attention(*call, window_size=128, softmax_scale=1.0)
    assert got.out[0, 0, 0] == pytest.approx((first + position) / 2)
    assert np.exp(got.lse[0, 0]) == pytest.approx(position + 1 - first)


# Sizes that cross the blocks in which long rows are computed.


def widened(call):
    """The call with the same numbers in float64."""
    raw, entries = ([x.astype(np.float64) for x in rows] for rows in (call.raw, call.entries))
    return call._replace(q=call.q.astype(np.float64), raw=raw, entries=entries)


@every_form
def test_a_long_row_has_no_seam(form):
    """70 queries, more than 1024 entries, an odd window; also with a NaN in the last token's row and entry."""
    sizes = {"num_heads": 1, "head_dim": 4, "index_topk": 40, "swa_block": 16, "cmp_block": 32}
    call = call_of(np.random.default_rng(0), [(3, 5), (70, 2200)], ratio=2, window=37, **sizes)
    got, want = FORMS[form](call), expected(call, form)
    assert_double(got.out, want.out, "out")
    assert_double(got.lse, want.lse, "lse")
    raw, entries = [x.copy() for x in call.raw], [x.copy() for x in call.entries]
    raw[1][-1], entries[1][-1] = np.nan, np.nan
    poked = FORMS[form](with_rows(call, raw, entries))
    assert_double(poked.out[:-1], want.out[:-1], "out")
    assert np.isnan(poked.out[-1]).all()


@every_form
def test_a_long_row_in_float32_is_within_budget(form):
    call = call_of(np.random.default_rng(0), [(70, 2200)], ratio=2, window=37, index_topk=40, dtype=np.float32)
    got, want, low = FORMS[form](call), plainly(widened(call), form, 1)[0], plainly(call, form)
    assert_within_budget(got.out, want.out, [each.out for each in low], "out")
    assert_within_budget(got.lse, want.lse, [each.lse for each in low], "lse")


@every_form
def test_attention_at_the_models_own_sizes_is_within_budget(form):
    sizes = {"num_heads": 4, "head_dim": 512, "index_topk": 64, "swa_block": 128, "cmp_block": 32}
    call = call_of(np.random.default_rng(0), [(4, 300), (2, 600)], ratio=4, window=128, dtype=np.float32, **sizes)
    got, want, low = FORMS[form](call), plainly(widened(call), form, 1)[0], plainly(call, form)
    assert_within_budget(got.out, want.out, [each.out for each in low], "out")
    assert_within_budget(got.lse, want.lse, [each.lse for each in low], "lse")


# Lists that cannot be.


@given(doubles, st.data())
def test_an_entry_twice_or_not_yet_visible_or_below_minus_one_is_refused(call, data):
    call = call._replace(topk=call.topk.copy())
    queries = [q for q, place in enumerate(call.places)]
    if not queries:
        return
    query = data.draw(st.sampled_from(queries))
    place = call.places[query]
    visible = 0 if place is None else (place[1] + 1) // call.ratio
    fault = data.draw(st.sampled_from(["invisible", "below"] + ["twice"] * (visible > 0 and call.topk.shape[1] > 1)))
    if fault == "twice":
        call.topk[query, :2] = data.draw(st.integers(0, visible - 1))
    else:
        call.topk[query, 0] = visible if fault == "invisible" else -2
    with pytest.raises(ContractError, match="topk_indices must be"):
        selected(call)


@given(gathers(), dtypes)
def test_inputs_of_either_dtype_come_out_in_it(case, dtype):
    q, keys, indices, scale = case
    got = gathered((q.astype(dtype), keys.astype(dtype), indices, scale))
    assert got.out.dtype == got.lse.dtype == dtype
