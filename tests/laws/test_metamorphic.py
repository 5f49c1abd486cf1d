"""Laws between two runs: what may change about a call without changing its result.

Blocks renamed, requests permuted, NaN beyond an extent, -1 in odd places, parts merged in any order, no sink, later
tokens: these stand beside the functions that they are about. Here are the laws that join modules.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.attention import AttentionOutput, apply_sink, gathered_attention, merge_partials
from dsacp_ref.extents import local_extents
from dsacp_ref.indexer import lightning_indexer
from dsacp_ref.paging import block_table_rows
from dsacp_ref.partition import interleave_owners, partition_tokens
from tests.compare import assert_double, assert_same
from tests.laws.attention_forms import FORMS, all_entries, key_rows, seen, selected
from tests.maths_strategies import Call, Paged, call_of, fewer, index_calls, int32, operator_tokens, seeds
from tests.strategies import Batch, batches, cp_sizes, read_only, splits

every_form = pytest.mark.parametrize("form", FORMS)


@st.composite
def batch_calls(draw) -> tuple[Batch, Call]:
    """A batch and its call on one device: an operator row a request."""
    batch = draw(batches(max_reqs=4, max_query=9))
    sizes = {"ratio": draw(st.sampled_from([1, 2, 4])), "window": draw(st.sampled_from([1, 3, 8]))}
    rows = list(zip(*batch[:2], strict=True))
    return batch, call_of(np.random.default_rng(draw(seeds)), rows, head_dim=3, **sizes)


def row_of(side: Paged, requests: np.ndarray) -> Paged:
    """The same cache with the tables of these requests."""
    return side._replace(table=block_table_rows(side.table, requests))


def rank_call(batch: Batch, call: Call, cp_size: int, cp_rank: int, split: str) -> tuple[np.ndarray, Call]:
    """(its tokens, its call) of one rank: local queries and extents, everybody's keys."""
    loc, lens = batch.query_start_loc, batch.key_lens
    tokens = operator_tokens(partition_tokens(loc, cp_size, split=split).token_indices[cp_rank])
    extents = local_extents(loc, lens, cp_size, cp_rank, split=split)
    real = tokens >= 0
    q, topk = np.zeros((len(tokens), *call.q.shape[1:])), np.full((len(tokens), call.topk.shape[1]), -1, np.int32)
    q[real], topk[real] = call.q[tokens[real]], call.topk[tokens[real]]
    return tokens, call._replace(
        q=read_only(q),
        topk=read_only(topk),
        swa=row_of(call.swa, extents.request_indices),
        cmp=row_of(call.cmp, extents.request_indices),
        cu_seqlens_q=extents.cu_seqlens_q,
        seqused_kv=extents.seqused_kv,
    )


@every_form
@fewer
@given(case=batch_calls(), split=splits())
def test_one_rank_is_the_identity(form, case, split):
    """cp_size 1 goes through the same code and computes what no partition at all computes."""
    batch, call = case
    tokens, local = rank_call(batch, call, 1, 0, split)
    got, want = FORMS[form](local), FORMS[form](call)
    order = tokens[tokens >= 0]
    assert sorted(order.tolist()) == list(range(batch.num_tokens))
    assert_double(got.out[tokens >= 0], want.out[order])
    assert_double(got.lse[tokens >= 0], want.lse[order])


@every_form
@fewer
@given(case=batch_calls(), cp_size=cp_sizes, split=splits())
def test_the_ranks_outputs_together_are_one_devices(form, case, cp_size, split):
    batch, call = case
    out, lse = np.full(call.q.shape, np.nan), np.full(call.q.shape[:2], np.nan)
    for cp_rank in range(cp_size):
        tokens, local = rank_call(batch, call, cp_size, cp_rank, split)
        got = FORMS[form](local)
        out[tokens[tokens >= 0]], lse[tokens[tokens >= 0]] = got.out[tokens >= 0], got.lse[tokens >= 0]
        assert (got.out[tokens < 0] == 0).all()
    want = FORMS[form](call)
    assert_double(out, want.out)
    assert_double(lse, want.lse)


@every_form
@fewer
@given(case=batch_calls(), slots=st.lists(st.integers(1, 3), max_size=2), beyond=st.integers(0, 3), seed=seeds)
def test_padding_changes_nothing(form, case, slots, beyond, seed):
    """Padded graph slots behind the batch, and queries that no row counts; they hold anything."""
    _, call = case
    count = sum(slots) + beyond
    junk = np.random.default_rng(seed).choice([np.nan, 1e300, 0.0], (count, *call.q.shape[1:]))
    null = np.zeros((len(slots), 1), np.int32)
    padded = call._replace(
        q=np.concatenate([call.q, junk]),
        topk=np.concatenate([call.topk, np.full((count, call.topk.shape[1]), -1, np.int32)]),
        swa=call.swa._replace(table=np.concatenate([call.swa.table, np.repeat(null, call.swa.table.shape[1], axis=1)])),
        cmp=call.cmp._replace(table=np.concatenate([call.cmp.table, np.repeat(null, call.cmp.table.shape[1], axis=1)])),
        cu_seqlens_q=int32(np.concatenate([call.cu_seqlens_q, call.cu_seqlens_q[-1] + np.cumsum(slots)])),
        seqused_kv=int32(np.concatenate([call.seqused_kv, [0] * len(slots)])),
    )
    got, want = FORMS[form](padded), FORMS[form](call)
    real = len(call.q)
    assert_double(got.out[:real], want.out)
    assert_double(got.lse[:real], want.lse)
    assert (got.out[real:] == 0).all()
    assert (got.lse[real:] == -np.inf).all()


@every_form
@fewer
@given(case=batch_calls(), data=st.data())
def test_cutting_a_prefill_into_chunks_changes_nothing(form, case, data):
    """Every request's queries in two calls: the first ones end at the keys that exist by then."""
    batch, call = case
    heads = [data.draw(st.integers(0, n)) if total else 0 for n, total in zip(*batch[:2], strict=True)]
    loc = batch.query_start_loc.tolist()
    chunks = {
        "first": (heads, [total - n + head for head, n, total in zip(heads, *batch[:2], strict=True)]),
        "second": ([n - head for head, n in zip(heads, batch.query_lens, strict=True)], batch.seq_lens),
    }
    out = np.full(call.q.shape, np.nan)
    for name, (lengths, lens) in chunks.items():
        offsets = [0] * len(heads) if name == "first" else heads
        rows = [loc[b] + offsets[b] + i for b in range(len(heads)) for i in range(lengths[b])]
        used = [max(total, 0) for total in lens]
        part = call._replace(
            q=call.q[rows],
            topk=call.topk[rows],
            cu_seqlens_q=int32(np.concatenate([[0], np.cumsum(lengths)])),
            seqused_kv=int32(used),
        )
        out[rows] = FORMS[form](part).out
    assert_double(out, FORMS[form](call).out)


@every_form
@fewer
@given(case=batch_calls())
def test_a_request_alone_gives_what_it_gives_in_a_batch(form, case):
    batch, call = case
    want, loc = FORMS[form](call), batch.query_start_loc.tolist()
    for b in range(len(batch.query_lens)):
        rows = slice(loc[b], loc[b + 1])
        alone = call._replace(
            q=call.q[rows],
            topk=call.topk[rows],
            swa=call.swa._replace(table=call.swa.table[b : b + 1]),
            cmp=call.cmp._replace(table=call.cmp.table[b : b + 1]),
            cu_seqlens_q=int32([0, loc[b + 1] - loc[b]]),
            seqused_kv=call.seqused_kv[b : b + 1],
        )
        assert_double(FORMS[form](alone).out, want.out[rows])


@given(index_calls(unseen=0.0), st.integers(0, 3), st.data())
def test_room_for_every_entry_makes_the_choice_all_of_them(index, spare, data):
    """index_topk at least the visible entries: the indexed layer is the layer that sees all of them."""
    rows = list(zip(np.diff(index.cu_seqlens_q).tolist(), index.seqused_kv.tolist(), strict=True))
    most = max([used // index.ratio for _, used in rows], default=0)
    chosen = lightning_indexer(*index.args, compress_ratio=index.ratio, index_topk=max(1, most) + spare)
    call = call_of(
        np.random.default_rng(data.draw(seeds)),
        rows,
        ratio=index.ratio,
        window=3,
        beyond=len(index.q) - sum(n for n, _ in rows),
    )
    got, want = selected(call._replace(topk=chosen)), all_entries(call)
    assert_double(got.out, want.out)
    assert_double(got.lse, want.lse)


@given(index_calls(), seeds)
def test_permuting_operator_rows_permutes_choices(index, seed):
    order = np.random.default_rng(seed).permutation(len(index.seqused_kv))
    cu = index.cu_seqlens_q.tolist()
    queries = [q for row in order for q in range(cu[row], cu[row + 1])] + list(range(cu[-1], len(index.q)))
    moved = index._replace(
        q=index.q[queries],
        weights=index.weights[queries],
        side=index.side._replace(table=index.side.table[order]),
        cu_seqlens_q=int32(np.concatenate([[0], np.cumsum(np.diff(cu)[order])])),
        seqused_kv=index.seqused_kv[order],
    )
    assert_same(
        lightning_indexer(*moved.args, **index.options), lightning_indexer(*index.args, **index.options)[queries]
    )


@given(index_calls(), st.integers(1, 4))
def test_rows_without_keys_choose_nothing_and_disturb_nobody(index, count):
    """Padded graph slots."""
    junk = np.full((count, *index.q.shape[1:]), np.nan, index.q.dtype)
    real, null = int(index.cu_seqlens_q[-1]), np.zeros((1, index.side.table.shape[1]), np.int32)
    padded = index._replace(
        q=np.concatenate([index.q[:real], junk]),
        weights=np.concatenate([index.weights[:real], junk[:, :, 0]]),
        side=index.side._replace(table=np.concatenate([index.side.table, null])),
        cu_seqlens_q=int32([*index.cu_seqlens_q, real + count]),
        seqused_kv=int32([*index.seqused_kv, 0]),
    )
    got = lightning_indexer(*padded.args, **index.options)
    assert_same(got[:real], lightning_indexer(*index.args, **index.options)[:real])
    assert (got[real:] == -1).all()


@every_form
@fewer
@given(case=batch_calls(), cp_size=st.integers(1, 4), interleave=st.integers(1, 3))
def test_keys_dealt_to_ranks_and_merged_are_all_keys(form, case, cp_size, interleave):
    """Each rank attends to the keys it owns, without the sink; the sink joins after the merge."""
    _, call = case
    want = FORMS[form](call)
    for query in range(len(call.q)):
        view = seen(call, form, query)
        keys = key_rows(call, form, query)
        where = int32(view[1] + view[2]) if view else int32([])  # raw positions and entries, dealt alike
        owners = interleave_owners(where, cp_size, interleave)
        everything = np.arange(len(keys), dtype=np.int32)
        one = read_only(call.q[query : query + 1].copy())
        parts = [
            gathered_attention(
                one, keys, np.where(owners == rank, everything, np.int32(-1))[None], softmax_scale=call.scale
            )
            for rank in range(cp_size)
        ]
        out, lse = merge_partials(*(np.stack([part[i] for part in parts]) for i in (0, 1)))
        got = AttentionOutput(apply_sink(out, lse, call.sink), lse)
        assert_double(got.out[0], want.out[query])
        assert_double(got.lse[0], want.lse[query])
