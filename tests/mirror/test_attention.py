"""`dsacp_npu.attention` gives what `dsacp_ref.attention` gives."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import dsacp_npu.attention
from dsacp_ref import attention as ref
from dsacp_ref.spec import ContractError
from tests.compare import assert_same
from tests.laws.attention_forms import key_rows, plain_orders, with_rows
from tests.maths_strategies import Call, call_of, calls, fewer, normal, operator_rows, seeds
from tests.mirror.common import (
    TORCH_DTYPES,
    WAYS,
    Case,
    assert_refusal_mirrors,
    assert_runs_without_values,
    case,
    compare_floats,
    functions,
    int32,
    outcome,
    to_numpy,
    to_torch,
    untouched,
)
from tests.strategies import read_only

DTYPES = st.sampled_from(list(TORCH_DTYPES))
FORMS = {"window": "window_attention", "all_entries": "all_entries_attention", "selected": "selected_attention"}
every_form = pytest.mark.parametrize("form", FORMS)
COSTS = {
    "lists": 0,
    "blocks": 10**9,
}  # of gathering a key: no block of selections is dense, or all that share a key are
at_both_costs = pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
on_both = pytest.mark.parametrize("on_a_device", [False, True], ids=["known values", "unknown values"])


def form_case(call: Call, form: str) -> Case:
    """The call of one form of attention."""
    options = {"window_size": call.window, "softmax_scale": call.scale}
    if form == "window":
        return case(FORMS[form], call.q, *call.swa_args, *call.row_args, **options)
    chosen = (call.topk,) if form == "selected" else ()
    options["compress_ratio"] = call.ratio
    return case(FORMS[form], call.q, *call.swa_args, *call.cmp_args, *chosen, *call.row_args, **options)


def wide(dtype: str) -> str:
    """The dtype of `lse`, and the one to compute in."""
    return "float64" if dtype == "float64" else "float32"


def unread(on_a_device: bool):
    """Values cannot be read, as on a device."""
    return patch("dsacp_npu._tensors.readable", lambda tensor: not on_a_device)


def gathering_costs(cost: int):
    """What a block of selections weighs its path with."""
    return patch("dsacp_npu.attention.GATHER_COST", cost)


def dense_blocks():
    """Notes the dense blocks that are computed."""
    return patch("dsacp_npu.attention.dense_block", wraps=dsacp_npu.attention.dense_block)


def rounded(result: Any, dtype: str) -> ref.AttentionOutput:
    """The output rounded to the dtype of the queries, the lse wide."""
    return ref.AttentionOutput(to_torch(result.out, dtype), to_torch(result.lse, wide(dtype)))


def assert_attention_mirrors(call: Case, dtype: str, lists: list[np.ndarray], sink: np.ndarray | None = None) -> None:
    """To rounding in float64, within the budget below it, for inputs that the dtype holds exactly.

    `lists` holds the key rows of each query, for the plain computation in several orders of summation: one can be right
    by luck.
    """
    reference, mirror = functions("attention", call.function)
    got = untouched(mirror, to_torch(call.args, dtype), call.kwargs)
    assert (got.out.dtype, got.lse.dtype) == (TORCH_DTYPES[dtype], TORCH_DTYPES[wide(dtype)])
    exact = reference(*call.args, **call.kwargs)
    if dtype == "float64":
        compare_floats(got, exact, exact, call.function)
        return
    sink = np.full(call.args[0].shape[1], -np.inf) if sink is None else sink
    q, sink, *lists = (each.astype(np.float32) for each in (call.args[0], sink, *lists))
    orders = plain_orders(q, lists, sink, call.kwargs["softmax_scale"])
    for field in ref.AttentionOutput._fields:
        plain = [getattr(rounded(each, dtype), field) for each in orders]
        compare_floats(getattr(got, field), getattr(exact, field), plain, f"{call.function}.{field}")


def held(call: Call, dtype: str) -> Call:
    """The call with numbers that the dtype holds."""

    def short(array: np.ndarray) -> np.ndarray:
        return read_only(to_numpy(to_torch(array, dtype), "float64"))

    call = with_rows(call, [short(rows) for rows in call.raw], [short(rows) for rows in call.entries])
    return call._replace(q=short(call.q), sink=short(call.sink))


def assert_form_mirrors(call: Call, form: str, dtype: str, on_a_device: bool) -> None:
    """One form on one path."""
    call = held(call, dtype)
    lists = [key_rows(call, form, query) for query in range(len(call.q))]
    with unread(on_a_device):
        assert_attention_mirrors(form_case(call, form), dtype, lists, call.sink)


# Enough numbers that the plain computation cannot be right in all of them by luck.
short_calls = calls(dtype=np.float64, num_heads=3, head_dim=6, rows=operator_rows(first=4))


@st.composite
def typed_calls(draw: st.DrawFn) -> tuple[Call, str]:
    """A call, and the dtype to hand it over in."""
    dtype = draw(DTYPES)
    return draw(calls(dtype=np.float64) if dtype == "float64" else short_calls), dtype


@fewer
@given(typed_calls(), st.booleans())
def test_window_attention_mirrors(typed, on_a_device) -> None:
    assert_form_mirrors(typed[0], "window", typed[1], on_a_device)


@fewer
@given(typed_calls(), st.booleans())
def test_all_entries_attention_mirrors(typed, on_a_device) -> None:
    assert_form_mirrors(typed[0], "all_entries", typed[1], on_a_device)


@fewer
@given(typed_calls(), st.booleans())
def test_selected_attention_mirrors(typed, on_a_device) -> None:
    assert_form_mirrors(typed[0], "selected", typed[1], on_a_device)


@fewer
@given(typed_calls(), st.sampled_from(list(COSTS.values())))
def test_selected_attention_mirrors_on_either_path(typed, cost) -> None:
    with gathering_costs(cost):
        assert_form_mirrors(typed[0], "selected", typed[1], False)


@given(seeds, st.integers(0, 4), st.integers(0, 6), st.integers(0, 5), DTYPES, st.booleans())
def test_gathered_attention_mirrors(seed, num_queries, num_keys, width, dtype, on_a_device) -> None:
    """-1 anywhere, lists of no key; keys that no list names are NaN."""
    rng = np.random.default_rng(seed)
    indices = np.full((num_queries, width), -1, np.int32)
    for query in range(num_queries):
        chosen = rng.permutation(num_keys)[: int(rng.integers(0, width + 1))]
        indices[query, rng.permutation(width)[: len(chosen)]] = chosen
    q, keys = to_numpy(to_torch((normal(rng, num_queries, 3, 6), normal(rng, num_keys, 6)), dtype), "float64")
    keys[np.setdiff1d(np.arange(num_keys), indices)] = np.nan
    call = case("gathered_attention", q, keys, indices, softmax_scale=6**-0.5)
    with unread(on_a_device):
        assert_attention_mirrors(call, dtype, [keys[row[row >= 0]] for row in indices])


def parts_of(rng: np.random.Generator, num_parts: int, dtype: str, *sizes: int) -> tuple[np.ndarray, np.ndarray]:
    """(outs, lses) that the dtypes hold; some parts have no key: -inf, and NaN for an output."""
    outs = to_numpy(to_torch(normal(rng, num_parts, *sizes, 6), dtype), "float64")
    lses = to_numpy(to_torch(normal(rng, num_parts, *sizes, scale=3), wide(dtype)), "float64")
    empty = rng.random(lses.shape) < 0.3
    outs[empty], lses[empty] = np.nan, -np.inf
    return outs, lses


def assert_parts_mirror(name: str, dtype: str, values: np.ndarray, lses: np.ndarray, *others: np.ndarray) -> None:
    """A function of outputs and lses, whose plain computation is the reference in float32, rounded once."""
    reference, mirror = functions("attention", name)
    typed = (to_torch(values, dtype), to_torch(lses, wide(dtype)), *to_torch(others, dtype))
    got, exact = untouched(mirror, typed, {}), reference(values, lses, *others)
    plain = reference(*to_numpy((values, lses, *others), wide(dtype)))
    plain = rounded(plain, dtype) if name == "merge_partials" else to_torch(plain, dtype)
    compare_floats(got, exact, exact if dtype == "float64" else plain, name)


@given(seeds, st.integers(1, 3), st.integers(0, 3), DTYPES)
def test_merge_partials_mirrors(seed, num_parts, num_queries, dtype) -> None:
    outs, lses = parts_of(np.random.default_rng(seed), num_parts, dtype, num_queries, 4)
    assert_parts_mirror("merge_partials", dtype, outs, lses)


@given(seeds, st.integers(0, 3), DTYPES, st.sampled_from([0.0, -np.inf]))
def test_apply_sink_mirrors(seed, num_queries, dtype, first) -> None:
    rng = np.random.default_rng(seed)
    outs, lses = parts_of(rng, 1, dtype, num_queries, 4)
    sink = to_numpy(to_torch(normal(rng, 4), dtype), "float64")
    sink[0] = first
    assert_parts_mirror("apply_sink", dtype, outs[0], lses[0], sink)


# What lies in the caches, and how the work is cut.

ROWS = [(6, 20), (0, 5), (1, 12), (3, 0), (9, 9)]
HERE = call_of(np.random.default_rng(0), ROWS, ratio=2, window=5, beyond=2, num_heads=3, head_dim=6)


def spoiled(call: Call, value: float) -> Call:
    """Rows that some queries see and others do not hold a value that is no number to compute with."""
    raw, entries = [rows.copy() for rows in call.raw], [rows.copy() for rows in call.entries]
    raw[0][16, 0] = raw[4][3, 1] = entries[0][8, 2] = entries[4][2, 3] = value
    return with_rows(call, raw, entries)


@on_both
@every_form
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_reaches_only_those_that_see_it(form, value, on_a_device) -> None:
    call = form_case(spoiled(HERE, value), form)
    reference, mirror = functions("attention", call.function)
    with np.errstate(invalid="ignore"):
        want = reference(*call.args, **call.kwargs)
    with unread(on_a_device):
        compare_floats(untouched(mirror, to_torch(call.args), call.kwargs), want, want, form)
    assert np.isnan(want.out).any()
    assert np.isfinite(want.out).any()


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of queries and of keys, several lists."""
    sizes = {"QUERY_BLOCK": 4, "KEY_BLOCK": 3, "TAKEN_NUMBERS": 100, "LISTED_NUMBERS": 40, "GATHERED_NUMBERS": 200}
    for name, size in sizes.items():
        monkeypatch.setattr(dsacp_npu.attention, name, size)


@every_form
def test_the_size_of_blocks_changes_nothing_but_rounding(form, monkeypatch) -> None:
    """And the same with values unknown."""
    lists = [key_rows(HERE, form, query) for query in range(len(HERE.q))]
    small_blocks(monkeypatch)
    for on_a_device in (False, True):
        with unread(on_a_device):
            assert_attention_mirrors(form_case(HERE, form), "float64", lists, HERE.sink)


# Selections by dense blocks or by lists.

# Four queries at positions 4 to 7, a window of one, every entry visible to all.
FOUR = call_of(np.random.default_rng(0), [(4, 8)], ratio=1, window=1, num_heads=3, head_dim=6)


def choosing(call: Call, *lists: list[int]) -> Call:
    """The call with these selections."""
    return call._replace(topk=read_only(np.array(lists, np.int32)))


def assert_selects_like_the_reference(call: Call) -> None:
    """In float64."""
    assert_attention_mirrors(form_case(call, "selected"), "float64", [])


@pytest.mark.parametrize(
    ("lists", "break_even"),
    [
        # In common 4 + 3 keys, own 1 + 3: 7 * (4 * 3 + cost) = 4 * 4 * (3 + cost).
        ([[0, 1, 2], [2, 0, 1], [0, 1, 2], [1, 0, 2]], 4),
        # In common 4 + 4, own 1 + 3, -1 anywhere: 8 * (12 + cost) = 16 * (3 + cost).
        ([[-1, 1, -1, 2], [3, 0, -1, 1], [-1, -1, -1, -1], [1, -1, 0, 2]], 6),
    ],
)
def test_a_block_is_dense_where_that_costs_less(lists, break_even) -> None:
    call = choosing(FOUR, *lists)
    for cost in (break_even - 1, break_even, break_even + 1):
        with gathering_costs(cost), dense_blocks() as dense:
            assert_selects_like_the_reference(call)
        assert dense.call_count == (cost > break_even)


@pytest.mark.parametrize(("head_block", "sizes"), [(1024, [32, 32, 32, 4]), (160, [20] * 5)])
def test_blocks_are_dense_where_all_that_is_visible_is_chosen(head_block, sizes, monkeypatch) -> None:
    """There a dense block meets no key in vain but those of its window. Many heads make it short."""
    monkeypatch.setattr(dsacp_npu.attention, "HEAD_BLOCK", head_block)
    call = call_of(np.random.default_rng(0), [(100, 100)], ratio=4, window=64, num_heads=8, index_topk=25)
    lists = [[entry if entry < (query + 1) // 4 else -1 for entry in range(25)] for query in range(100)]
    with dense_blocks() as dense:
        assert_selects_like_the_reference(choosing(call, *lists))
    assert [len(each.args[0]) for each in dense.call_args_list] == sizes


def test_more_heads_than_a_block_may_have(monkeypatch) -> None:
    """Each query is a block then, of every form."""
    monkeypatch.setattr(dsacp_npu.attention, "HEAD_BLOCK", 2)
    for form in FORMS:
        with dense_blocks() as dense:
            assert_form_mirrors(HERE, form, "float64", False)
        with_keys = sum(place is not None for place in HERE.places)
        assert dense.call_count == (0 if form == "selected" else with_keys)


def test_queries_that_share_no_key_are_not_a_dense_block() -> None:
    """However much gathering costs; a query alone is not even asked about."""
    apart = choosing(FOUR, [0, -1], [-1, 3], [2, -1], [-1, 5])
    alone = call_of(np.random.default_rng(0), [(1, 8), (1, 12), (0, 0), (1, 3)], ratio=2, window=5)
    for call, asked in ((apart, 1), (alone, 0)):
        with (
            gathering_costs(10**9),
            dense_blocks() as dense,
            patch("dsacp_npu.attention.sharing_pays", wraps=dsacp_npu.attention.sharing_pays) as asking,
        ):
            assert_selects_like_the_reference(call)
        assert (dense.call_count, asking.call_count) == (0, asked)


@pytest.mark.parametrize("turn", [0, 1])
def test_dense_blocks_and_lists_may_take_turns(turn, monkeypatch) -> None:
    """Spans of lists before, between and behind dense blocks, with queries of no row and rows without keys."""
    rows = [(6, 20), (2, 0), (9, 9), (0, 5), (1, 12), (7, 30)]
    call = call_of(np.random.default_rng(1), rows, ratio=2, window=5, beyond=2, num_heads=3, head_dim=6)
    small_blocks(monkeypatch)
    turns = [(number + turn) % 2 == 0 for number in range(6)]  # 2, 3 and 2 blocks, of which one is a query alone
    monkeypatch.setattr(dsacp_npu.attention, "sharing_pays", lambda *args: turns.pop())
    spans = []

    def filled(*args: Any) -> None:
        spans.append(args[4])
        fill_from_lists(*args)

    fill_from_lists = dsacp_npu.attention.fill_from_lists
    monkeypatch.setattr(dsacp_npu.attention, "fill_from_lists", filled)
    with dense_blocks() as dense:
        assert_selects_like_the_reference(call)
    assert turns == []
    # No query is computed twice.
    by_lists = sum(span.stop - span.start for span in spans)
    assert by_lists + sum(len(each.args[0]) for each in dense.call_args_list) == len(call.q)


@at_both_costs
@pytest.mark.parametrize("width", [0, 2])
def test_nothing_may_be_chosen(width, cost) -> None:
    """The window is all there is then."""
    with gathering_costs(cost):
        assert_selects_like_the_reference(choosing(FOUR._replace(window=3), *[[-1] * width] * 4))


@at_both_costs
def test_a_nan_reaches_only_those_that_chose_it(cost, monkeypatch) -> None:
    """Not those of the same block that see it as well."""
    chosen = choosing(FOUR, [0, 1, 4], [1, 2, -1], [3, 0, -1], [-1, 2, 1])
    for key_block in (1024, 2):
        monkeypatch.setattr(dsacp_npu.attention, "KEY_BLOCK", key_block)
        for entry, struck in ((3, [2]), (2, [1, 3]), (5, [])):
            entries = [FOUR.entries[0].copy()]
            entries[0][entry, 1] = np.nan
            call = form_case(with_rows(chosen, None, entries), "selected")
            with gathering_costs(cost), dense_blocks() as dense:
                got = dsacp_npu.attention.selected_attention(*to_torch(call.args), **call.kwargs)
            assert dense.called == (cost > 0)
            for part in got:
                bad = part.isnan().flatten(1)
                assert bad.any(dim=1).nonzero().flatten().tolist() == struck
            want = ref.selected_attention(*call.args, **call.kwargs)
            compare_floats(got, want, want, "selected")


@at_both_costs
def test_blocks_that_nobody_chose_from_are_not_looked_up(cost) -> None:
    """A table may hold anything there, though the entries are visible."""
    changed = FOUR.cmp.table.copy()
    changed[0, 1] = -7  # entries 3 to 5
    call = choosing(FOUR._replace(cmp=FOUR.cmp._replace(table=read_only(changed))), [0, 2], [1, 0], [2, 6], [0, 7])
    with gathering_costs(cost):
        assert_selects_like_the_reference(call)


def test_the_cost_of_gathering_is_nothing_to_unknown_values() -> None:
    """Every query gathers its own list there."""
    call = form_case(HERE, "selected")
    results = []
    for cost in COSTS.values():
        with gathering_costs(cost), unread(True), dense_blocks() as dense:
            results.append(dsacp_npu.attention.selected_attention(*to_torch(call.args), **call.kwargs))
        assert not dense.called
    assert_same(*results)


@every_form
def test_keys_whose_sum_overflows_are_numbers(form) -> None:
    """Every number of a row is finite, the sum of the row is not."""
    rng = np.random.default_rng(0)
    large = [[rng.uniform(4e307, 8e307, rows.shape) for rows in side] for side in (HERE.raw, HERE.entries)]
    call = with_rows(HERE._replace(q=read_only(HERE.q * 1e-307)), *large)
    with gathering_costs(10**9), dense_blocks() as dense:
        assert_form_mirrors(call, form, "float64", False)
    assert dense.called


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_numbers_are_rounded_once(dtype, monkeypatch) -> None:
    """However the keys are cut into parts: no part is rounded, nor what the sink is still to join.

    What float32 sums in another order falls to the other side of a tie now and then.
    """
    call = form_case(held(HERE, dtype), "all_entries")
    args = to_torch(call.args, dtype)
    with unread(True):
        want = dsacp_npu.attention.all_entries_attention(*args, **call.kwargs)
    for size in (1024, 2):
        monkeypatch.setattr(dsacp_npu.attention, "KEY_BLOCK", size)
        got = dsacp_npu.attention.all_entries_attention(*args, **call.kwargs)
        assert (got.out != want.out).double().mean() < 0.02


@on_both
def test_a_query_without_keys_may_be_anything(on_a_device) -> None:
    q = torch.tensor([[[torch.inf]], [[torch.nan]], [[1.0]]])
    indices = to_torch(np.array([[-1], [-1], [0]], np.int32))
    with unread(on_a_device):
        got = dsacp_npu.attention.gathered_attention(q, torch.tensor([[2.0]]), indices, softmax_scale=1.0)
    assert (got.out.flatten().tolist(), got.lse.flatten().tolist()) == ([0, 0, 2], [-np.inf, -np.inf, 2])


@on_both
@every_form
def test_what_a_table_has_room_for_beyond_the_extents_does_not_matter(form, on_a_device) -> None:
    """Columns of garbage, for a table as wide as the longest context."""
    wider = np.full((len(ROWS), 40), 2**31 - 1, np.int32)
    call = HERE._replace(
        **{
            name: side._replace(table=read_only(np.concatenate([side.table, wider], axis=1)))
            for name, side in (("swa", HERE.swa), ("cmp", HERE.cmp))
        }
    )
    assert_form_mirrors(call, form, "float64", on_a_device)


@on_both
@every_form
def test_strides_do_not_matter_and_nothing_carries_gradients(form, on_a_device) -> None:
    call = form_case(HERE, form)
    args = to_torch(call.args)
    _, mirror = functions("attention", call.function)
    with unread(on_a_device):
        want = mirror(*args, **call.kwargs)
        strided = [torch.stack([each, each], dim=-1)[..., 0] for each in args]
        tracked = [each.requires_grad_(each.is_floating_point()) for each in strided]
        got = mirror(*tracked, **call.kwargs)
    assert_same(got, want)
    assert not got.out.requires_grad


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor made that is not as large as the output."""

    def __init__(self, output: tuple[int, ...]) -> None:
        super().__init__()
        self.output, self.size = torch.Size(output), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if any(told.alias_info for told in function._schema.returns):  # a view, or written into what there was
            return made
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.shape != self.output:
                self.size = max(self.size, tensor.numel())
        return made


@on_both
@every_form
def test_working_memory_stays_small_beside_the_output(form, on_a_device, monkeypatch) -> None:
    """The output has 25600 numbers, a selection 3200 integers."""
    limits = {"QUERY_BLOCK": 4, "TAKEN_NUMBERS": 4096, "LISTED_NUMBERS": 1024, "GATHERED_NUMBERS": 6000}
    for name, size in limits.items():
        monkeypatch.setattr(dsacp_npu.attention, name, size)
    sizes = {"ratio": 4, "window": 16, "num_heads": 8, "head_dim": 8, "index_topk": 8}
    call = form_case(call_of(np.random.default_rng(0), [(400, 500)], **sizes), form)
    args = to_torch(call.args)
    for cost in COSTS.values():
        with gathering_costs(cost), unread(on_a_device), Largest(call.args[0].shape) as largest:
            functions("attention", call.function)[1](*args, **call.kwargs)
        assert 0 < largest.size <= 6000


# Refusals, and runs without values.

LEGAL = {form: form_case(HERE, form) for form in FORMS}


def spoilt(form: str, place: int | str, value: Any) -> Case:
    """The legal call with another argument."""
    call = LEGAL[form]
    if isinstance(place, str):
        return call._replace(kwargs={**call.kwargs, place: value})
    place %= len(call.args)
    return call._replace(args=(*call.args[:place], value, *call.args[place + 1 :]))


def table(form: str, place: int, value: int) -> Case:
    """The legal call with another block id for the first rows of the first request."""
    changed = LEGAL[form].args[place].copy()
    changed[0, :] = value
    return spoilt(form, place, changed)


def topk(query: int, *entries: int) -> Case:
    """The legal call with another choice of one query."""
    changed = HERE.topk.copy()
    changed[query] = entries
    return spoilt("selected", 5, changed)


Q, KEYS, LISTS = HERE.q[:2], HERE.raw[0], int32(0, 1, -1, 2).reshape(2, 2)
LIST_CALL = {"softmax_scale": 1.0}
OUTS, LSES = np.ones((2, 3, 2, 4)), np.zeros((2, 3, 2))
REFUSED = [
    case("gathered_attention", Q[0], KEYS, LISTS, **LIST_CALL),
    case("gathered_attention", Q[:, :0], KEYS, LISTS, **LIST_CALL),
    case("gathered_attention", Q[..., :0], KEYS[:, :0], LISTS, **LIST_CALL),
    case("gathered_attention", Q.astype(np.int32), KEYS, LISTS, **LIST_CALL),
    case("gathered_attention", Q, KEYS[:, :2], LISTS, **LIST_CALL),
    case("gathered_attention", Q, KEYS.astype(np.float32), LISTS, **LIST_CALL),
    case("gathered_attention", Q, KEYS, LISTS[:1], **LIST_CALL),
    case("gathered_attention", Q, KEYS, LISTS.astype(np.int64), **LIST_CALL),
    case("gathered_attention", Q, KEYS, LISTS + np.int32(18), **LIST_CALL),
    case("gathered_attention", Q, KEYS, LISTS - np.int32(1), **LIST_CALL),
    case("gathered_attention", Q, KEYS, LISTS, softmax_scale=0.0),
    case("gathered_attention", Q, KEYS, LISTS, softmax_scale=np.nan),
    *(spoilt(form, 0, HERE.q.astype(np.float32)) for form in FORMS),
    *(spoilt(form, 1, HERE.swa.cache[..., :2]) for form in FORMS),
    *(spoilt(form, 2, HERE.swa.table[1:]) for form in FORMS),
    *(spoilt(form, 2, HERE.swa.table[:, :2]) for form in FORMS),
    *(table(form, 2, -1) for form in FORMS),
    *(table(form, 2, 10**6) for form in FORMS),
    *(table(form, 2, 2**31 - 1) for form in FORMS),
    *(spoilt(form, -1, HERE.sink[1:]) for form in FORMS),
    *(spoilt(form, "window_size", 0) for form in FORMS),
    *(spoilt(form, "softmax_scale", -1.0) for form in FORMS),
    *(spoilt(form, -2, int32(20, 5, 12, 0, 8)) for form in FORMS),
    *(spoilt(form, -3, int32(0, 6, 6, 7, 10, 99)) for form in FORMS),
    *(spoilt(form, 3, HERE.cmp.cache.astype(np.float32)) for form in ("all_entries", "selected")),
    *(spoilt(form, 4, HERE.cmp.table[1:]) for form in ("all_entries", "selected")),
    *(spoilt(form, "compress_ratio", 0) for form in ("all_entries", "selected")),
    *(table(form, 4, -5) for form in ("all_entries", "selected")),
    *(table(form, 4, 999) for form in ("all_entries", "selected")),
    spoilt("all_entries", "compress_ratio", 2**31),
    spoilt("selected", 5, HERE.topk[1:]),
    topk(2, 0, 1, 99),
    topk(2, -2, 1, 0),
    topk(3, 4, -1, 4),
    case("merge_partials", OUTS[0], LSES),
    case("merge_partials", OUTS[:0], LSES[:0]),
    case("merge_partials", OUTS, LSES[..., :1]),
    case("merge_partials", OUTS, LSES.astype(np.float32)),
    case("apply_sink", OUTS, LSES[0], np.zeros(2)),
    case("apply_sink", OUTS[0], LSES[1, :2], np.zeros(2)),
    case("apply_sink", OUTS[0], LSES[0].astype(np.float32), np.zeros(2)),
    case("apply_sink", OUTS[0], LSES[0], np.zeros(3)),
]


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.function)
def test_refusals_mirror(bad: Case) -> None:
    assert_refusal_mirrors("attention", bad)


@at_both_costs
@pytest.mark.parametrize("bad", [bad for bad in REFUSED if bad.function == "selected_attention"])
def test_refusals_of_selections_mirror_on_either_path(bad: Case, cost) -> None:
    with gathering_costs(cost):
        assert_refusal_mirrors("attention", bad)


@given(calls(dtype=np.float64), seeds)
def test_a_broken_selection_is_refused_alike(call, seed) -> None:
    """Any integers near the legal ones: the same refusal, or the same numbers."""
    rng = np.random.default_rng(seed)
    call = call._replace(topk=read_only(call.topk + rng.choice([0, 0, 0, 1, -1], call.topk.shape).astype(np.int32)))
    spoilt_call = form_case(call, "selected")
    reference, mirror = functions("attention", "selected_attention")
    want_text, want = outcome(lambda: reference(*spoilt_call.args, **spoilt_call.kwargs))
    got_text, got = outcome(lambda: mirror(*to_torch(spoilt_call.args), **spoilt_call.kwargs))
    assert got_text == want_text
    if not want_text:
        compare_floats(got, want, want, "selected_attention")


def test_short_numbers_want_a_wide_lse() -> None:
    outs = torch.ones(1, 2, 2, 4, dtype=torch.bfloat16)
    with pytest.raises(ContractError, match="lses must have dtype float32, got bfloat16"):
        dsacp_npu.attention.merge_partials(outs, outs[..., 0])
    with pytest.raises(ContractError, match="lse must have dtype float32, got bfloat16"):
        dsacp_npu.attention.apply_sink(outs[0], outs[0, ..., 0], torch.zeros(2))


NOBODY = call_of(np.random.default_rng(0), [], ratio=2, window=5, beyond=3)
NO_ROOM = HERE._replace(
    **{
        name: side._replace(cache=side.cache[:0], table=side.table[:, :0])
        for name, side in (("swa", HERE.swa), ("cmp", HERE.cmp))
    },
    seqused_kv=int32(0, 0, 0, 0, 0),
    topk=np.full_like(HERE.topk, -1),
)
STATIC = [
    *(form_case(call, form) for call in (HERE, NOBODY, NO_ROOM) for form in FORMS),
    *(form_case(NOBODY._replace(q=NOBODY.q[:0], topk=NOBODY.topk[:0]), form) for form in FORMS),
    case("gathered_attention", Q, KEYS, LISTS, **LIST_CALL),
    case("gathered_attention", Q, KEYS[:0], np.full_like(LISTS, -1), **LIST_CALL),
    case("gathered_attention", Q, KEYS, LISTS[:, :0], **LIST_CALL),
    case("merge_partials", OUTS, LSES),
    case("apply_sink", OUTS[0], LSES[0], np.zeros(2)),
]


@pytest.mark.parametrize("call", STATIC, ids=lambda call: call.function)
@pytest.mark.parametrize("way", WAYS)
def test_runs_without_values(call: Case, way: str) -> None:
    """Compared with what the same operations give outside of a compiler; the other path may round differently."""
    with unread(True):
        assert_runs_without_values("attention", way, call)


@pytest.mark.parametrize("call", STATIC[:12], ids=lambda call: call.function)
def test_both_paths_agree_at_the_edges(call: Case) -> None:
    want = getattr(ref, call.function)(*call.args, **call.kwargs)
    for on_a_device in (False, True):
        with unread(on_a_device):
            got = getattr(dsacp_npu.attention, call.function)(*to_torch(call.args), **call.kwargs)
        compare_floats(got, want, want, call.function)
