"""Calls of legal sizes for the operators, made of what context parallelism hands them, and how results are compared."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dsacp_npu import cann
from dsacp_ref.extents import local_extents
from tests.compare import assert_same, assert_within_budget
from tests.maths_strategies import Call, call_of, seeds
from tests.mirror.common import Case, mapped, on_device, tensors_of, to_numpy, to_torch, untouched
from tests.strategies import cp_sizes, int32, read_only, splits

HALVES = st.sampled_from(["bfloat16", "bfloat16", "float16"])
BLOCKS = st.sampled_from([16, 32, 64, 128])
HEADS = st.sampled_from([4, 4, 8, 12, 64])
WAYS = ("fake", "compiled")
HEAD_DIM, WINDOW, TOPK = 512, 128, 512


@st.composite
def rank_rows(draw: st.DrawFn, prefixes: st.SearchStrategy[int], *, max_query: int = 6) -> list[tuple[int, int]]:
    """(queries, key extent) of one rank's operator rows: every split rule, padded slots, empty requests.

    Usually of a rank that has queries; sometimes of any rank, and of a batch without requests.
    """
    query_lens, seq_lens = [], []
    for _ in range(draw(st.sampled_from([1, 2, 3, 2, 0]))):
        query_lens.append(draw(st.one_of(st.integers(1, max_query), st.integers(0, 1))))
        seq_lens.append(query_lens[-1] + draw(prefixes))
    if draw(st.booleans()):
        query_lens.append(draw(st.integers(1, 2)))
        seq_lens.append(0)
    cp_size, split = draw(cp_sizes), draw(splits())
    lengths = int32(0, *np.cumsum(query_lens)), int32(*seq_lens)
    options = {"split": split, "empty_extent": draw(st.sampled_from(["zero", "prefix"]))}
    ranks = [local_extents(*lengths, cp_size, rank, **options) for rank in range(cp_size)]
    busy = [extents for extents in ranks if extents.seqused_kv.any() and extents.cu_seqlens_q[-1]]
    extents = draw(st.sampled_from(busy if busy and draw(st.integers(0, 4)) else ranks))
    counts = (extents.cu_seqlens_q[1:] - extents.cu_seqlens_q[:-1]).tolist()
    return list(zip(counts, extents.seqused_kv.tolist(), strict=True))


def legal_topk(call: Call, index_topk: int, rng: np.random.Generator) -> np.ndarray:
    """As many visible entries as fit a row of each query, in any order; then -1."""
    topk = np.full((len(call.q), index_topk), -1, np.int32)
    for query, place in enumerate(call.places):
        if place is not None:
            visible = (place[1] + 1) // call.ratio
            chosen = rng.permutation(visible)[:index_topk]
            topk[query, : len(chosen)] = chosen
    return read_only(topk)


@st.composite
def attention_calls(draw: st.DrawFn, ratio: int, prefixes: st.SearchStrategy[int]) -> Call:
    """A call that the attention operator takes; what no query may see is NaN, unused table entries are garbage."""
    rng = np.random.default_rng(draw(seeds))
    call = call_of(
        rng,
        draw(rank_rows(prefixes)),
        ratio=ratio,
        window=draw(st.sampled_from([WINDOW, WINDOW, 16])),
        num_heads=draw(HEADS),
        head_dim=HEAD_DIM,
        swa_block=draw(BLOCKS),
        cmp_block=draw(BLOCKS),
        beyond=draw(st.sampled_from([0, 0, 2])),
    )
    return with_legal_pages(call._replace(topk=legal_topk(call, TOPK, rng)))


def with_legal_pages(call: Call) -> Call:
    """Without rows there are caches of 2 rows a block, which no operator takes: give them a legal size."""
    if call.swa.cache.shape[1] >= 16:
        return call
    pages = read_only(np.full((1, 16, HEAD_DIM), np.nan))
    return call._replace(swa=call.swa._replace(cache=pages), cmp=call.cmp._replace(cache=pages))


def assert_attends(function: str, dtype: str, *args: Any, **kwargs: Any) -> None:
    """The output is the reference's, within the error of the plain computation in this dtype; there is no lse."""
    reference = getattr(importlib.import_module("dsacp_ref.attention"), function)
    args = to_torch(args, dtype)
    got = untouched(getattr(cann, function), args, kwargs)
    assert got.lse is None
    assert_near(got.out, reference, args, kwargs, lambda result: result.out)


def assert_near(
    got: torch.Tensor,
    reference: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    part: Callable[[Any], Any] = lambda result: result,
) -> None:
    """A result against the reference in float64; the measure is the reference in float32, rounded once."""
    dtype = str(got.dtype).removeprefix("torch.")
    exact = part(reference(*to_numpy(args, "float64"), **kwargs))
    plain = part(reference(*to_numpy(args, "float32"), **kwargs))
    assert_within_budget(got, exact, to_torch(plain, dtype))


def assert_runs_without_values(way: str, call: Case) -> None:
    """The function, of tensors, runs where no value can be read, and gives shapes, dtypes and numbers as it must."""
    function = getattr(cann, call.function)
    args, kwargs = mapped((call.args, call.kwargs), torch.clone)
    want = function(*mapped(call.args, torch.clone), **mapped(call.kwargs, torch.clone))
    if way == "compiled":
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
        assert_same(compiled(*args, **kwargs), want, call.function)
        return
    with FakeTensorMode() if way == "fake" else nullcontext():
        got = function(*on_device(args, "cpu"), **on_device(kwargs, "cpu"))
    signs = [(tensor.dtype, tensor.shape) for tensor in tensors_of(want)]
    assert [(tensor.dtype, tensor.shape) for tensor in tensors_of(got)] == signs
