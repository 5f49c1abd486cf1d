"""Attention over the operator gives what the reference gives, for what context parallelism hands a rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import attention as mirror
from dsacp_npu import cann
from dsacp_npu.emulator import StaleMetadataError
from dsacp_ref import attention as reference
from dsacp_ref.extents import build_cp_local_metadata
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.cann.common import (
    HALVES,
    HEAD_DIM,
    TOPK,
    WAYS,
    WINDOW,
    assert_attends,
    assert_near,
    assert_runs_without_values,
    attention_calls,
    legal_topk,
)
from tests.maths_strategies import Call, call_of, seeds
from tests.mirror.common import case, int32, to_torch
from tests.strategies import fewer, read_only

pytestmark = pytest.mark.usefixtures("emulated")

SHORT = st.one_of(st.just(0), st.integers(0, 300))
LONG = st.one_of(
    st.integers(2040, 2300), SHORT, st.integers(2040, 2300)
)  # from 2051 on there are more entries than a selection takes
SCALE = HEAD_DIM**-0.5


def options(call: Call, *, ratio: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {"window_size": call.window, "softmax_scale": call.scale}
    return {**found, "compress_ratio": call.ratio} if ratio else found


@given(attention_calls(1, SHORT), HALVES)
@fewer(2)
def test_window_attention_on_the_emulator(call: Call, dtype: str) -> None:
    assert_attends("window_attention", dtype, call.q, *call.swa_args, *call.row_args, **options(call, ratio=False))


@given(st.sampled_from([4, 128]).flatmap(lambda ratio: attention_calls(ratio, SHORT)), HALVES)
@fewer(2)
def test_all_entries_attention_on_the_emulator(call: Call, dtype: str) -> None:
    args = (call.q, *call.swa_args, *call.cmp_args, *call.row_args)
    assert_attends("all_entries_attention", dtype, *args, **options(call))


@given(attention_calls(4, LONG), HALVES)
@fewer(2)
def test_selected_attention_on_the_emulator(call: Call, dtype: str) -> None:
    args = (call.q, *call.swa_args, *call.cmp_args, call.topk, *call.row_args)
    assert_attends("selected_attention", dtype, *args, **options(call))


@given(attention_calls(4, SHORT), HALVES)
@fewer(5)
def test_attention_on_the_emulator_as_on_a_device(call: Call, dtype: str) -> None:
    """Where nothing may be read the same calls go out."""
    with mock.patch("dsacp_npu._tensors.readable", return_value=False):
        args = (call.q, *call.swa_args, *call.cmp_args, call.topk, *call.row_args)
        assert_attends("selected_attention", dtype, *args, **options(call))


@st.composite
def packed_calls(draw: st.DrawFn, ratio: int, prefixes: st.SearchStrategy[int]) -> tuple[Call, int]:
    """One rank of the flat contiguous split, as `build_cp_local_metadata` has it, and rows of keys beyond the last."""
    lengths = draw(st.lists(st.integers(0, 5), max_size=3))
    seq_lens = [length + draw(prefixes) for length in lengths] + [0] * draw(st.integers(0, 1))
    lengths += [1] * (len(seq_lens) - len(lengths))
    cp_size = draw(st.integers(1, 8))
    rank = draw(st.integers(0, cp_size - 1))
    local = build_cp_local_metadata(int32(0, *np.cumsum(lengths)), int32(*seq_lens), cp_size, rank, None, None)
    queries = np.diff(local.local_query_start_loc).tolist()
    rows = list(zip(queries, local.local_seq_lens.tolist(), strict=True))
    rng = np.random.default_rng(draw(seeds))
    call = call_of(rng, rows, ratio=ratio, window=WINDOW, num_heads=4, head_dim=HEAD_DIM, swa_block=16, cmp_block=16)
    assert np.array_equal(np.cumsum([0, *map(len, call.raw)]), local.local_kv_start_loc)
    return call._replace(topk=legal_topk(call, TOPK, rng)), draw(st.integers(0, 2))


@given(
    st.one_of(packed_calls(1, SHORT), packed_calls(128, SHORT), packed_calls(4, LONG)),
    st.booleans(),
    HALVES,
)
@fewer(2)
def test_packed_attention_on_the_emulator(drawn: tuple[Call, int], given_metadata: bool, dtype: str) -> None:
    """Packed keys give what the same keys give in pages."""
    call, spare = drawn
    nothing = np.full((spare, HEAD_DIM), np.nan)
    keys, entries = (read_only(np.concatenate([*rows, nothing])) for rows in (call.raw, call.entries))
    kv_start_loc = int32(*np.cumsum([0, *map(len, call.raw)]))
    selected = call.ratio == 4
    q, keys, sink, entries = to_torch((call.q, keys, call.sink, entries), dtype)
    cu, loc = to_torch((call.cu_seqlens_q, kv_start_loc))
    extra = {"entries": entries, "compress_ratio": call.ratio} if call.ratio > 1 else {}
    if selected:
        extra["topk_indices"] = to_torch(call.topk)
    if given_metadata and len(entries) and len(call.q):
        extra["metadata"] = cann.attention_metadata(
            cu,
            None,
            num_heads=4,
            compress_ratio=call.ratio,
            window_size=call.window,
            index_topk=TOPK if selected else 0,
            kv_start_loc=loc,
        )
    got = cann.packed_attention(q, keys, sink, cu, loc, window_size=call.window, softmax_scale=call.scale, **extra)
    assert got.lse is None
    form, pages, kwargs = "window_attention", call.swa_args, options(call, ratio=False)
    if call.ratio > 1:
        form, pages, kwargs = "all_entries_attention", (*call.swa_args, *call.cmp_args), options(call)
    if selected:
        form, pages = "selected_attention", (*pages, call.topk)
    args = to_torch((call.q, *pages, *call.row_args), dtype)
    assert_near(got.out, getattr(reference, form), args, kwargs, lambda result: result.out)


def small(rows: list[tuple[int, int]], **changes: Any) -> Call:
    """One call with a query that really chooses, a padded slot, a row without queries, and a query of no row."""
    rng = np.random.default_rng(0)
    sizes = {
        "ratio": 4,
        "window": WINDOW,
        "num_heads": 4,
        "head_dim": HEAD_DIM,
        "swa_block": 16,
        "cmp_block": 16,
        "beyond": 1,
    }
    call = call_of(rng, rows, **{**sizes, **changes})
    return call._replace(topk=legal_topk(call, TOPK, rng))


def changed(args: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*args[:at], value, *args[at + 1 :])


CALL = small([(2, 2060), (1, 0), (0, 0), (3, 40)])
Q, SWA, CMP = (to_torch(part, "bfloat16") for part in (CALL.q, CALL.swa_args, CALL.cmp_args))
CHOICE, CU, USED, SINK = to_torch((CALL.topk, *CALL.row_args), "float32")
ROWS = (CU, USED, SINK)
WINDOWED = (Q, *SWA, *ROWS)
ALL = (Q, *SWA, *CMP, *ROWS)
CHOSEN = (Q, *SWA, *CMP, CHOICE, *ROWS)
PLAIN_OPTIONS, RATIO_OPTIONS = options(CALL, ratio=False), options(CALL)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        ("window_attention", WINDOWED, PLAIN_OPTIONS),
        ("all_entries_attention", ALL, {**RATIO_OPTIONS, "compress_ratio": 128}),
        ("selected_attention", CHOSEN, RATIO_OPTIONS),
        (
            "packed_attention",
            (Q, SWA[0].flatten(0, 1).nan_to_num(), ROWS[2], ROWS[0], torch.tensor([0, 9, 9, 9, 50]).int()),
            PLAIN_OPTIONS,
        ),
        (
            "attention_metadata",
            ROWS[:2],
            {"num_heads": 4, "compress_ratio": 4, "window_size": 128, "index_topk": TOPK},
        ),
    ],
)
def test_it_runs_without_values(function: str, args: Any, kwargs: Any, way: str) -> None:
    assert_runs_without_values(way, case(function, *args, **kwargs))


def test_one_metadata_serves_all_layers_of_a_ratio() -> None:
    metadata = cann.attention_metadata(*ROWS[:2], num_heads=4, compress_ratio=4, window_size=WINDOW, index_topk=TOPK)
    own = cann.selected_attention(*CHOSEN, **RATIO_OPTIONS).out
    shared = cann.selected_attention(*CHOSEN, **RATIO_OPTIONS, metadata=metadata).out
    assert torch.equal(own, shared)
    stale = cann.attention_metadata(*ROWS[:2], num_heads=4, compress_ratio=1, window_size=WINDOW)
    later = changed(WINDOWED, 4, ROWS[1] - (ROWS[1] == 40).int())
    with pytest.raises(StaleMetadataError, match="key lengths"):
        cann.window_attention(*later, **PLAIN_OPTIONS, metadata=stale)


def test_no_entries_at_all_is_the_window_alone() -> None:
    """A cache without blocks, or a table without columns, never reaches the operator as entries."""
    short = small([(2, 50), (1, 0), (3, 40)], ratio=128, beyond=0)
    q, swa, rest = (to_torch(part, "bfloat16") for part in (short.q, short.swa_args, short.row_args))
    want = cann.window_attention(q, *swa, *rest, **options(short, ratio=False)).out
    no_blocks = (swa[0].new_empty(0, 16, 512), torch.zeros(3, 2, dtype=torch.int32))
    no_columns = (swa[0], torch.zeros(3, 0, dtype=torch.int32))
    for cmp in (no_blocks, no_columns):
        got = cann.all_entries_attention(q, *swa, *cmp, *rest, **options(short)).out
        assert torch.equal(got, want)
        topk = torch.full((len(q), TOPK), -1, dtype=torch.int32)
        assert torch.equal(cann.selected_attention(q, *swa, *cmp, topk, *rest, **options(short)).out, want)


def test_nothing_to_attend_from_or_to_needs_no_operator() -> None:
    q, swa, nobody = Q, SWA, torch.zeros(1, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    with mock.patch("dsacp_npu._cann_attention.operator", side_effect=AssertionError("called")):
        out = cann.window_attention(q[:0], swa[0], swa[1][:0], nobody, none, ROWS[2], **PLAIN_OPTIONS).out
        assert out.shape == (0, 4, 512)
        out = cann.window_attention(q, swa[0], swa[1][:0], nobody, none, ROWS[2], **PLAIN_OPTIONS).out
        assert torch.equal(out, torch.zeros_like(q))
        unseen = (ROWS[0], torch.zeros_like(ROWS[1]), ROWS[2])
        out = cann.window_attention(q, swa[0][:0], swa[1], *unseen, **PLAIN_OPTIONS).out
        assert torch.equal(out, torch.zeros_like(q))
        out = cann.packed_attention(
            q, q.new_empty(0, 512), ROWS[2], ROWS[0], torch.zeros_like(ROWS[0]), **PLAIN_OPTIONS
        ).out
        assert torch.equal(out, torch.zeros_like(q))


LIMITS = [
    ("q must have dtype bfloat16 or float16", "window_attention", (Q.float(), SWA[0].float(), *WINDOWED[2:]), {}),
    ("head_dim must be 512", "window_attention", (Q[..., :64], SWA[0][..., :64], *WINDOWED[2:]), {}),
    (
        "num_heads must be a multiple of 4 in 4..128",
        "window_attention",
        (*changed(WINDOWED, 0, Q[:, :3])[:-1], ROWS[2][:3]),
        {},
    ),
    ("block size of swa_cache must be a multiple of 16", "window_attention", changed(WINDOWED, 1, SWA[0][:, :8]), {}),
    ("block size of cmp_cache must be a multiple of 16", "all_entries_attention", changed(ALL, 3, CMP[0][:, :8]), {}),
    ("compress_ratio must be 4 or 128, got 2", "all_entries_attention", ALL, {"compress_ratio": 2}),
    ("index_topk must be 512 or 1024, got 511", "selected_attention", changed(CHOSEN, 5, CHOSEN[5][:, :511]), {}),
    ("attn_sink must have dtype float32", "window_attention", changed(WINDOWED, 5, ROWS[2].double()), {}),
]


@pytest.mark.parametrize(("words", "function", "args", "change"), LIMITS, ids=[limit[0] for limit in LIMITS])
def test_a_limit_is_named(words: str, function: str, args: Any, change: dict[str, Any]) -> None:
    kwargs = PLAIN_OPTIONS if function == "window_attention" else {**RATIO_OPTIONS, **change}
    with pytest.raises(UnsupportedError, match=f"{function} on cann: {words}"):
        getattr(cann, function)(*args, **kwargs)


def test_no_entry_before_the_last_is_refused() -> None:
    """Legal for the reference, which skips it; the operator would shift rows."""
    topk = CHOSEN[5].clone()
    topk[1, 3] = -1
    with pytest.raises(UnsupportedError, match="512 entries before its first -1 for query 1, got -1 in column 3"):
        cann.selected_attention(*changed(CHOSEN, 5, topk), **RATIO_OPTIONS)


SHORTER = torch.tensor([2060, 0, 0, 2], dtype=torch.int32)
BROKEN = [
    ("window_attention", changed(WINDOWED, 4, SHORTER), PLAIN_OPTIONS),
    ("window_attention", changed(WINDOWED, 2, SWA[1][:, :100]), PLAIN_OPTIONS),
    ("window_attention", changed(WINDOWED, 2, torch.full_like(SWA[1], -1)), PLAIN_OPTIONS),
    ("window_attention", changed(WINDOWED, 2, SWA[1][:3]), PLAIN_OPTIONS),
    ("window_attention", changed(WINDOWED, 1, SWA[0][:5]), PLAIN_OPTIONS),
    ("all_entries_attention", changed(ALL, 4, CMP[1][:, :30]), RATIO_OPTIONS),
    ("selected_attention", changed(CHOSEN, 4, CMP[1][:, :30]), RATIO_OPTIONS),
    ("selected_attention", changed(CHOSEN, 5, CHOSEN[5] * 0 + 5), RATIO_OPTIONS),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), BROKEN)
def test_a_broken_contract_has_the_words_of_the_mirror(function: str, args: Any, kwargs: Any) -> None:
    with pytest.raises(ContractError) as theirs:
        getattr(mirror, function)(*args, **kwargs)
    with pytest.raises(ContractError) as mine:
        getattr(cann, function)(*args, **kwargs)
    assert str(mine.value) == str(theirs.value)


def test_packed_keys_that_are_not_there_are_refused() -> None:
    keys, loc = SWA[0].flatten(0, 1)[:49].nan_to_num(), torch.tensor([0, 9, 9, 9, 50]).int()
    with pytest.raises(ContractError, match="kv_start_loc must end at or before the 49 rows it indexes, got 50"):
        cann.packed_attention(Q, keys, ROWS[2], ROWS[0], loc, **PLAIN_OPTIONS)
