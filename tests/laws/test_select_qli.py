"""One whole step of the indexer: local queries against keys that everybody compresses."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.compressor import CompressorState, CompressorWeights, empty_state
from dsacp_ref.extents import local_extents, query_positions, token_positions
from dsacp_ref.indexer import IndexerWeights, IndexSelection, select_qli
from dsacp_ref.partition import partition_tokens
from dsacp_ref.rope import rope_table
from tests.compare import assert_double, assert_same, assert_same_selection
from tests.laws.compressor_runs import kept, oracle_entries
from tests.maths_strategies import Compressor, compressor_of, int32, normal, operator_tokens, paged, seeds
from tests.oracles import indexer as oracle
from tests.oracles import rope as rope_oracle
from tests.strategies import Batch, batches, cp_sizes, read_only, splits

HIDDEN, Q_LORA, HEADS, D = 3, 3, 2, 4


class Stream(NamedTuple):
    """A batch whose prefixes were indexed in an earlier step."""

    batch: Batch
    made: Compressor
    weights: IndexerWeights
    x: list[np.ndarray]  # hidden rows of each request, prefix and new ones; a padded slot has new ones only
    qr: np.ndarray  # query latents of the new rows
    cache: np.ndarray
    table: np.ndarray
    state: CompressorState
    index_topk: int

    @property
    def new_x(self) -> np.ndarray:
        rows = [x[len(x) - n :] for x, n in zip(self.x, self.batch.query_lens, strict=True)]
        return read_only(np.concatenate([np.empty((0, HIDDEN)), *rows]))

    @property
    def starts(self) -> np.ndarray:
        return int32(np.subtract(self.batch.seq_lens, self.batch.query_lens).reshape(-1))

    def step(self, x, qr, positions, cu, used, requests, **key_side) -> IndexSelection:
        return select_qli(
            x,
            qr,
            *rope_table(positions, self.made.freqs),
            self.weights,
            self.cache,
            self.table,
            self.state,
            cu,
            used,
            requests,
            self.starts,
            self.made.freqs,
            index_topk=self.index_topk,
            eps=self.made.eps,
            **key_side,
        )

    def one_device(self) -> IndexSelection:
        loc, lens = self.batch.query_start_loc, self.batch.key_lens
        positions = query_positions(loc, lens, num_rows=self.batch.num_tokens)
        return self.step(self.new_x, self.qr, positions, loc, lens, int32(range(len(lens))))


@st.composite
def streams(draw) -> Stream:
    batch = draw(batches(max_reqs=3, max_query=9, max_prefix=12))
    rng = np.random.default_rng(draw(seeds))
    made = compressor_of(rng, draw(st.sampled_from([1, 2, 4])), draw(st.booleans()), d=D, pairs=draw(st.integers(0, 2)))
    weights = IndexerWeights(
        normal(rng, HEADS * D, Q_LORA), normal(rng, HEADS, HIDDEN), CompressorWeights(*made.weights)
    )
    lengths = [max(n, total) for n, total in zip(batch.query_lens, batch.seq_lens, strict=True)]
    x = [normal(rng, length, HIDDEN) for length in lengths]
    room = [np.full((total // made.ratio, D), np.nan) for total in batch.seq_lens]
    side = paged(rng, room, draw(st.integers(1, 4)))
    cache = side.cache if room else np.full((1, 2, D), np.nan)
    prefixes = [max(0, total - n) for n, total in zip(batch.query_lens, batch.seq_lens, strict=True)]
    qr = normal(rng, batch.num_tokens, Q_LORA)
    stream = Stream(
        batch, made, weights, x, qr, cache, side.table, empty_state(weights.compressor, len(x)), draw(st.integers(1, 4))
    )
    if sum(prefixes):
        before = stream._replace(
            batch=Batch(prefixes, prefixes),
            x=[mine[:n] for mine, n in zip(x, prefixes, strict=True)],
            qr=normal(rng, sum(prefixes), Q_LORA),
        ).one_device()
        stream = stream._replace(cache=read_only(before.index_cache), state=kept(before.state, made))
    return stream


def oracle_choices(stream: Stream) -> tuple[np.ndarray, np.ndarray]:
    """(choices, float64 scores) of every new token, from each request's whole history."""
    most = max([total // stream.made.ratio for total in stream.batch.seq_lens], default=0)
    chosen, scores = [], []
    freqs = [np.float32(f) for f in stream.made.freqs]
    token = 0
    for x, n, total in zip(stream.x, stream.batch.query_lens, stream.batch.seq_lens, strict=True):
        keys = [oracle.hadamard(entry) for entry in oracle_entries(stream.made, x[:total])]
        for position in range(total - n, total):
            q = (stream.weights.wq_b @ stream.qr[token]).reshape(HEADS, D)
            q = [oracle.hadamard(rope_oracle.rotate(head, position, freqs)) for head in q] if total else q
            gains = stream.weights.weights_proj @ x[position] / math.sqrt(D * HEADS) if total else np.zeros(HEADS)
            row = [oracle.score(q, gains, key) for key in keys]
            visible = (position + 1) // stream.made.ratio if total else 0
            chosen.append(oracle.select(row, visible, stream.index_topk))
            scores.append(row + [math.nan] * (most - len(row)))
            token += 1
    return int32(chosen).reshape(-1, stream.index_topk), np.array(scores).reshape(token, most)


@given(streams())
def test_a_step_chooses_as_the_oracle_does_on_the_whole_history(stream):
    """Prefixes were indexed a step earlier; whatever lies in the cache beyond the entries is NaN."""
    want, scores = oracle_choices(stream)
    # cos and sin may be one float32 step off the oracle's.
    noise = 1e-5 * np.nanmax(np.abs(scores), axis=1, initial=1)
    assert_same_selection(stream.one_device().topk_indices, want, scores, noise)


@given(streams())
def test_a_step_writes_the_rotated_entries_and_nothing_else(stream):
    got = stream.one_device()
    flat, before = got.index_cache.reshape(-1, D), stream.cache.reshape(-1, D).copy()
    for request, (x, n, total) in enumerate(zip(stream.x, stream.batch.query_lens, stream.batch.seq_lens, strict=True)):
        entries = [oracle.hadamard(entry) for entry in oracle_entries(stream.made, x[:total])]
        for entry in range(max(0, total - n) // stream.made.ratio, total // stream.made.ratio):
            block_size = stream.cache.shape[1]
            slot = stream.table[request, entry // block_size] * block_size + entry % block_size
            assert np.abs(flat[slot] - entries[entry]).max() <= 1e-5 * np.abs(entries[entry]).max()
            before[slot] = flat[slot]
    assert_same(flat, before)
    held = [n for n, total in zip(stream.state.num_tokens.tolist(), stream.batch.seq_lens, strict=True) if not total]
    ends = [total for total in stream.batch.seq_lens if total]
    assert sorted(got.state.num_tokens.tolist()) == sorted(ends + held)


@given(streams(), cp_sizes, splits())
def test_local_queries_choose_what_one_device_chooses_for_their_rows(stream, cp_size, split):
    """Rows, latents and extents are a rank's; the key side is the whole stream on every rank."""
    want = stream.one_device()
    loc, lens = stream.batch.query_start_loc, stream.batch.key_lens
    partition = partition_tokens(loc, cp_size, split=split)
    chosen = np.full((stream.batch.num_tokens, stream.index_topk), -2, np.int32)
    for cp_rank in range(cp_size):
        tokens = operator_tokens(partition.token_indices[cp_rank])
        extents = local_extents(loc, lens, cp_size, cp_rank, split=split)
        local = stream.step(
            np.where((tokens >= 0)[:, None], stream.new_x[tokens], 0) if len(tokens) else stream.new_x[:0],
            np.where((tokens >= 0)[:, None], stream.qr[tokens], 0) if len(tokens) else stream.qr[:0],
            token_positions(tokens, loc, lens),
            extents.cu_seqlens_q,
            extents.seqused_kv,
            extents.request_indices,
            compress_x=stream.new_x,
            compress_cu_seqlens=loc,
        )
        assert_same(local.index_cache, want.index_cache)
        assert_same(local.state, want.state)
        assert (local.topk_indices[tokens < 0] == -1).all()
        chosen[tokens[tokens >= 0]] = local.topk_indices[tokens >= 0]
    _, scores = oracle_choices(stream)
    noise = 1e-13 * np.nanmax(np.abs(scores), axis=1, initial=1)  # local projections may round differently
    assert_same_selection(chosen, want.topk_indices, scores, noise)


@given(streams())
def test_naming_the_key_side_is_the_same_as_leaving_it_out(stream):
    loc, lens = stream.batch.query_start_loc, stream.batch.key_lens
    positions = query_positions(loc, lens, num_rows=stream.batch.num_tokens)
    requests = int32(range(len(lens)))
    named = stream.step(
        stream.new_x, stream.qr, positions, loc, lens, requests, compress_x=stream.new_x, compress_cu_seqlens=loc
    )
    assert_same(named, stream.one_device())


@given(streams(), st.data())
def test_cutting_a_step_in_two_changes_nothing(stream, data):
    """Chunked prefill: the choices of both parts together are the choices of the whole."""
    firsts = [data.draw(st.integers(0, n)) if total else 0 for n, total in zip(*stream.batch[:2], strict=True)]
    lens = [total - n + first for first, n, total in zip(firsts, *stream.batch, strict=True)]
    lens = [max(0, length) for length in lens]
    real = [total > 0 for total in stream.batch.seq_lens]
    loc = stream.batch.query_start_loc
    head = [t for b, first in enumerate(firsts) for t in range(loc[b], loc[b] + first)]
    tail = [t for b, first in enumerate(firsts) for t in range(loc[b] + first, loc[b + 1]) if real[b]]
    one = stream._replace(
        batch=Batch(firsts, [length if first else 0 for first, length in zip(firsts, lens, strict=True)]),
        x=[x[:length] if first else x[:0] for x, first, length in zip(stream.x, firsts, lens, strict=True)],
        qr=read_only(stream.qr[head]),
    )
    first_part = one.one_device()
    rest = [n - first if ok else 0 for n, first, ok in zip(stream.batch.query_lens, firsts, real, strict=True)]
    two = stream._replace(
        batch=Batch(rest, stream.batch.seq_lens),
        qr=read_only(stream.qr[tail]),
        cache=first_part.index_cache,
        state=first_part.state,
    )
    second_part = two.one_device()
    whole, (_, scores) = stream.one_device(), oracle_choices(stream)
    chosen = np.concatenate([first_part.topk_indices, second_part.topk_indices])
    rows = head + tail
    noise = 1e-12 * np.nanmax(np.abs(scores), axis=1, initial=1)
    assert_same_selection(chosen, whole.topk_indices[rows], scores[rows], noise[rows])
    assert_double(second_part.index_cache, whole.index_cache)
    assert_same(second_part.state.num_tokens[real], whole.state.num_tokens[real])
