"""The launchers of `dsacp_npu._triton_attention` give what `dsacp_ref.attention` gives, or refuse as it does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import _triton_attention, _triton_attention_slots, _triton_launch
from dsacp_npu.kernels._records import FAMILIES
from dsacp_npu.kernels.attention_tiles import LIST_MULTIPLE, TILES, counted, tile_key
from dsacp_ref import attention as reference
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.compare import assert_same
from tests.laws.attention_forms import key_rows, plain_orders, with_rows
from tests.maths_strategies import Call, call_of, calls, operator_rows
from tests.mirror.common import Case, compare_floats, outcome, to_torch, untouched
from tests.mirror.test_attention import FORMS, REFUSED, form_case, held, rounded
from tests.strategies import fewer

DTYPES = st.sampled_from(["bfloat16", "float16"])
every_form = pytest.mark.parametrize("form", FORMS)
ROWS = [(2, 40), (1, 0), (4, 4), (0, 3), (1, 60)]
SIZES = {"ratio": 4, "window": 9, "num_heads": 3, "head_dim": 32, "index_topk": 5, "cmp_block": 4, "beyond": 1}
HERE = held(call_of(np.random.default_rng(0), ROWS, **SIZES), "bfloat16")
MANY_HEADS = held(call_of(np.random.default_rng(0), ROWS, **{**SIZES, "num_heads": 70}), "bfloat16")


@st.composite
def short_calls(draw: st.DrawFn) -> Call:
    """A call that kernels take: pages of a power of two, and enough numbers that none is right by luck."""
    sizes = {"num_heads": draw(st.sampled_from([3, 17])), "cmp_block": draw(st.sampled_from([1, 2, 4]))}
    return draw(calls(dtype=np.float64, head_dim=32, rows=operator_rows(first=4), **sizes))


def launched(call: Call, form: str, dtype: str = "bfloat16", **options: Any) -> Any:
    """What the launcher gives, once no input was written to."""
    made = form_case(call, form)
    return untouched(getattr(_triton_attention, made.function), to_torch(made.args, dtype), {**made.kwargs, **options})


def assert_attends(call: Call, form: str, dtype: str = "bfloat16", **options: Any) -> None:
    """Within the budget of the plain computation, for inputs that the dtype holds."""
    made = form_case(call, form)
    got = launched(call, form, dtype, **options)
    assert (got.out.dtype, got.lse.dtype) == (getattr(torch, dtype), torch.float32)
    exact = getattr(reference, made.function)(*made.args, **made.kwargs)
    lists = [key_rows(call, form, query).astype(np.float32) for query in range(len(call.q))]
    orders = plain_orders(call.q.astype(np.float32), lists, call.sink.astype(np.float32), call.scale)
    for field in exact._fields:
        plain = [getattr(rounded(each, dtype), field) for each in orders]
        compare_floats(getattr(got, field), getattr(exact, field), plain, f"{form}.{field}")


@given(short_calls(), st.sampled_from(list(FORMS)), DTYPES)
@fewer(3)
def test_attention_with_a_running_maximum(call, form, dtype) -> None:
    assert_attends(held(call, dtype), form, dtype)


@given(short_calls(), st.sampled_from(list(FORMS)))
@fewer(3)
def test_attention_without_one(call, form) -> None:
    assert_attends(held(call, "bfloat16"), form, logit_bound=70.0)


@every_form
@pytest.mark.parametrize("bound", [None, 70.0])
def test_logits_up_to_the_bound(form, bound) -> None:
    """All large, or all small: where sums of exponentials are closest to overflow and to vanishing."""
    raw, entries = ([np.abs(rows) for rows in side] for side in (HERE.raw, HERE.entries))
    largest = HERE.scale * np.max(np.abs(HERE.q) @ np.concatenate([*raw, *entries]).T)
    for logit in (69.0, -69.0):
        q = np.abs(HERE.q) * (logit / largest)
        call = held(with_rows(HERE, raw, entries)._replace(q=q), "bfloat16")
        assert_attends(call, form, logit_bound=bound)


@every_form
def test_the_form_of_a_gpu(form) -> None:
    """One loop over both caches, halves of channels, powers of two."""
    with ExitStack() as patches:
        for module in (_triton_attention, _triton_attention_slots, _triton_launch):
            patches.enter_context(mock.patch.object(module, "family_of", return_value="cuda"))
        for call in (HERE, MANY_HEADS):
            for bound in (None, 70.0):
                assert_attends(call, form, logit_bound=bound)


@every_form
def test_values_that_nobody_may_read_change_nothing(form) -> None:
    """As on a device; and a step's slots serve every form."""
    want = launched(HERE, form)
    made = form_case(HERE, form)
    q, cache, table = to_torch(made.args[:3], "bfloat16")
    places = to_torch(HERE.row_args[:2])
    with mock.patch("dsacp_npu._tensors.readable", return_value=False):
        cmp_cache, cmp_table = to_torch(HERE.cmp_args)
        options = _triton_attention.attention_lists(
            table,
            cmp_table if form == "all_entries" else None,
            *places,
            num_queries=len(q),
            block_sizes=(cache.shape[1], cmp_cache.shape[1]),
            window_size=HERE.window,
            compress_ratio=HERE.ratio,
        )
        assert ("entries" in options) == (form == "all_entries")
        assert_same(launched(HERE, form), want)
        assert_same(launched(HERE, form, **options), want)


@every_form
def test_pages_may_lie_apart(form) -> None:
    """Caches that share their memory with another: a page begins a whole number of rows behind the last."""
    made = form_case(HERE, form)
    args = to_torch(made.args, "bfloat16")
    want = getattr(_triton_attention, made.function)(*args, **made.kwargs)
    for place in (1,) if form == "window" else (1, 3):
        apart = torch.full((args[place].shape[0], 7, args[place].shape[2]), torch.nan, dtype=torch.bfloat16)
        apart[:, : args[place].shape[1]] = args[place]
        moved = apart[:, : args[place].shape[1]]
        args = (*args[:place], moved, *args[place + 1 :])
    assert_same(getattr(_triton_attention, made.function)(*args, **made.kwargs), want)


def test_a_nan_reaches_only_those_that_chose_it() -> None:
    topk = HERE.topk.copy()
    topk[:2] = [-1, 2, 0, -1, 1], [0, -1, 3, 1, -1]
    call = HERE._replace(topk=topk)
    entries = [rows.copy() for rows in HERE.entries]
    entries[0][2, 1] = np.nan
    got, want = launched(with_rows(call, None, entries), "selected"), launched(call, "selected")
    for query in range(len(HERE.q)):
        bad = query == 0
        for mine, theirs in zip(got, want, strict=True):
            assert bool(mine[query].isnan().any()) == bad
            if not bad:
                assert_same(mine[query], theirs[query])


@every_form
def test_nothing_to_attend_to(form) -> None:
    """No query; no row; no room in any table; an empty choice."""
    nobody = call_of(np.random.default_rng(0), [], **{**SIZES, "beyond": 2})
    nothing = HERE._replace(topk=HERE.topk[:, :0]) if form == "selected" else nobody
    for call in (nobody, nobody._replace(q=nobody.q[:0], topk=nobody.topk[:0]), nothing):
        assert_attends(held(call, "bfloat16"), form)
    sides = {name: getattr(HERE, name) for name in ("swa", "cmp")}
    no_room = {name: side._replace(cache=side.cache[:0], table=side.table[:, :0]) for name, side in sides.items()}
    call = HERE._replace(**no_room, seqused_kv=np.zeros(len(ROWS), np.int32), topk=np.full_like(HERE.topk, -1))
    got = launched(call, form)
    assert (bool((got.out == 0).all()), bool((got.lse == -torch.inf).all())) == (True, True)


@pytest.mark.parametrize(
    "bad", [bad for bad in REFUSED if bad.function in FORMS.values()], ids=lambda bad: bad.function
)
def test_refusals_are_the_reference_s(bad: Case) -> None:
    want, _ = outcome(lambda: getattr(reference, bad.function)(*bad.args, **bad.kwargs))
    got, _ = outcome(lambda: getattr(_triton_attention, bad.function)(*to_torch(bad.args), **to_torch(bad.kwargs)))
    assert want
    assert got == want


WIDE_ROWS = held(call_of(np.random.default_rng(0), ROWS, **{**SIZES, "head_dim": 6}), "bfloat16")
THREES = held(call_of(np.random.default_rng(0), ROWS, **{**SIZES, "cmp_block": 3}), "bfloat16")


@pytest.mark.parametrize(
    "call, dtype, options, text",
    [
        (HERE, "float32", {}, "attends in bfloat16 or float16, not float32"),
        (WIDE_ROWS, "bfloat16", {}, "has head_dim .* not 6"),
        (THREES, "bfloat16", {}, "pages of a power of two, not of 3 entries"),
        (HERE, "bfloat16", {"logit_bound": 70.5}, "logits stay within 70.0, logit_bound is 70.5"),
        (HERE, "float16", {"logit_bound": 8.0}, "float16 does not hold weights"),
    ],
)
def test_what_no_kernel_does_is_refused_by_name(call, dtype, options, text) -> None:
    with pytest.raises(UnsupportedError, match=text):
        launched(call, "selected", dtype, **options)


def test_strides_that_no_kernel_reads_are_refused_by_name() -> None:
    made = form_case(HERE, "window")
    q, cache, *others = to_torch(made.args, "bfloat16")
    strided = torch.stack([cache, cache], dim=-1)[..., 0]
    with pytest.raises(UnsupportedError, match="swa_cache has strides"):
        _triton_attention.window_attention(q, strided, *others, **made.kwargs)


def test_a_bound_is_a_positive_number() -> None:
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ContractError, match="logit_bound"):
            launched(HERE, "window", logit_bound=bad)


def test_slots_of_another_call_are_refused() -> None:
    made = form_case(HERE, "window")
    args = to_torch(made.args, "bfloat16")
    sizes = {"block_sizes": (args[1].shape[1],) * 2, "window_size": HERE.window, "compress_ratio": 4}
    cmp_table = to_torch(HERE.cmp.table)
    lists, longer = (
        _triton_attention.attention_lists(args[2], cmp_table, *args[3:5], num_queries=len(HERE.q) + more, **sizes)
        for more in (0, 1)
    )
    slots, found = lists["slots"], lists["entries"]
    for wrong in (longer["slots"], slots._replace(window_size=3)):
        with pytest.raises(ContractError, match="slots"):
            launched(HERE, "window", slots=wrong)
    elsewhere = slots._replace(pages=_triton_attention.Pages(4, 5), window=slots.window * 0)
    assert_same(launched(HERE, "window", slots=elsewhere), launched(HERE, "window"))  # made anew
    for wrong in (found._replace(kind="selected"), found._replace(slots=found.slots[1:])):
        with pytest.raises(ContractError, match="entries"):
            launched(HERE, "all_entries", entries=wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_tile_for_every_call(family) -> None:
    for num_heads in (1, 8, 16, 17, 32, 64, 96, 128):
        for bound in (None, 70.0):
            tile = TILES[family][tile_key(num_heads, bound)]
            assert LIST_MULTIPLE % tile.keys == 0


def test_what_a_tile_costs() -> None:
    """64 heads in tiles of 64 and of 32: keys are read once or twice, products are the same."""
    wide, narrow = TILES["cuda"][64, "fixed"], TILES["a2"][64, "fixed"]
    assert counted(wide, 64, 640) == (2 * 512 * (128 + 640), 4 * 64 * 512 * 640)
    assert counted(narrow, 64, 640) == (2 * 512 * (128 + 1280), 4 * 64 * 512 * 640)
