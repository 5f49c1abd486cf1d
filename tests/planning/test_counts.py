"""Work and bytes in closed form against what plans and real calls count, and against counting token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from dsacp_npu import distributed
from dsacp_npu.commands.counted import (
    NoGroup,
    Shapes,
    counted_transport,
    empty_weights,
    mla_received_bytes,
    mla_work_of_ranks,
    one_prompt,
    received_bytes,
    work_of_ranks,
)
from dsacp_npu.distributed import Ranks
from dsacp_npu.partition import partition_tokens
from dsacp_npu.planning.costs import key_side_flop, output_flop, query_flop
from dsacp_npu.planning.flows import layer_flows
from dsacp_npu.planning.models import LayerKind, Model, model_of, v4_kind, v32_kind
from dsacp_npu.planning.schemes import SPLITS, Scheme, schemes_of
from dsacp_npu.planning.shares import Shares, batch_of, shares_of
from dsacp_ref.config import AttentionConfig, v4_flash, v4_pro
from dsacp_ref.mla_config import v32
from tests.oracles.splits import owned_tokens

FLASH, PRO = v4_flash(), v4_pro()
# Sizes as small as they may be, so that windows, choices and pools end inside short prompts.
SMALL = replace(FLASH, hidden_size=32, num_heads=8, window_size=5, index_topk=3, index_n_heads=2)

each_split = pytest.mark.parametrize("split", [*SPLITS, "round_robin_page(2)", "round_robin_page(4)"])
each_ratio = pytest.mark.parametrize("ratio", [1, 4, 128])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """New and cached tokens of a few requests; some long enough for entries of ratio 128."""
    lengths = draw(st.lists(st.integers(1, 40) | st.integers(120, 300), min_size=1, max_size=4))
    return lengths, [draw(st.integers(0, 40) | st.integers(120, 270)) for _ in lengths]


# --- work ---


@each_split
@each_ratio
@given(batches(), st.integers(1, 5))
def test_work_is_that_of_the_plan(split: str, ratio: int, batch: Any, cp_size: int) -> None:
    """Keys and scores of every rank are what `parity` and `bench` count query by query, on Flash and in small."""
    lengths, computed = batch
    loc = torch.tensor([0, *np.cumsum(lengths)]).int()
    seq_lens = torch.tensor([new + before for new, before in zip(lengths, computed, strict=True)]).int()
    shares = shares_of(batch_of(lengths, computed), cp_size, split)
    for config in (SMALL, FLASH):
        kind = v4_kind(config, ratio, 1)
        want = work_of_ranks(loc, seq_lens, cp_size, config, split=split, compress_ratio=ratio)
        assert (shares.keys(kind).tolist(), shares.scores(kind).tolist()) == want
    latent = replace(v32(), index_topk=7)
    got = shares.keys(v32_kind(latent)).tolist(), shares.scores(v32_kind(latent)).tolist()
    assert got == mla_work_of_ranks(loc, seq_lens, cp_size, latent, split=split)


@each_split
@given(batches(), st.integers(1, 5))
def test_rows_are_those_of_the_partition(split: str, batch: Any, cp_size: int) -> None:
    lengths, computed = batch
    partition = partition_tokens(torch.tensor([0, *np.cumsum(lengths)]).int(), cp_size, split=split)
    shares = shares_of(batch_of(lengths, computed), cp_size, split)
    assert shares.rows.tolist() == [len(tokens) for tokens in partition.token_indices]
    assert shares.tokens.tolist() == [int((tokens >= 0).sum()) for tokens in partition.token_indices]


@pytest.mark.slow
@each_split
@each_ratio
@given(batches(), st.integers(1, 5))
def test_rows_of_others_are_those_of_counting_token_by_token(split: str, ratio: int, batch: Any, cp_size: int) -> None:
    """Windows and pools reach back to new tokens of other ranks; the next step goes on from every request's last."""
    lengths, computed = batch
    kind = v4_kind(SMALL, ratio, 1)
    shares = shares_of(batch_of(lengths, computed), cp_size, split)
    places = [  # (first token of the request, the step's tokens of it, cached before) of every flat token
        (sum(lengths[:request]), length, computed[request])
        for request, length in enumerate(lengths)
        for _ in range(length)
    ]
    for rank, tokens in enumerate(owned_tokens(lengths, cp_size, split)):
        own = {token for token in tokens if token >= 0}
        windows, pools, closed = set(), set(), 0
        for token in own:
            first, _, before = places[token]
            windows |= set(range(max(first, token - 4), token + 1))
            if ratio > 1 and (before + token - first + 1) % ratio == 0:
                closed += 1
                pools |= set(range(max(first, token - kind.pool_rows + 1), token + 1))
        for first, length, _ in set(places):
            windows |= set(range(max(first, first + length - 4), first + length))
            pools |= set(range(max(first, first + length - kind.pool_rows), first + length))
        assert shares.window_halo(kind)[rank] == len(windows - own)
        assert shares.entries(kind)[rank] == closed or ratio == 1
        if ratio > 1:
            assert shares.pool_halo(kind)[rank] == len(pools - own)


# --- bytes ---


def all_schemes(model: Model, ranks: int) -> list[Scheme]:
    """Schemes whose ranks all split tokens: for every split each way of keys, and each way of outputs.

    Neither side of a layer knows the other's way, so their products would show nothing more.
    """
    found = [scheme for scheme in schemes_of(model, ranks)[0] if scheme.cp_size == ranks]
    plain = ("replicate", "gather_hidden")
    return [each for each in found if each.output_mode == "replicated_weight" or each.key_mode in plain]


@pytest.mark.slow
@each_ratio
@pytest.mark.parametrize(
    "name, config, tokens, ranks",
    [("v4-flash", FLASH, 1024, 8), ("v4-flash", FLASH, 1000, 3), ("v4-flash", FLASH, 5, 4), ("v4-pro", PRO, 1000, 3)],
)
def test_bytes_are_those_of_the_real_calls(ratio: int, name: str, config: Any, tokens: int, ranks: int) -> None:
    """Every way of keys and outputs, to the byte: shared evenly, unevenly, and with hardly a token a rank."""
    model = model_of(name)
    [kind] = [kind for kind in (*model.kinds, v4_kind(config, 1, 1)) if kind.compress_ratio == ratio][:1]
    model = model._replace(kinds=(kind,))
    schemes = all_schemes(model, ranks)
    assert len(schemes) > 50
    for scheme in schemes:
        shares = shares_of(batch_of([tokens]), ranks, scheme.split)
        flows = layer_flows(kind, scheme, shares, model.hidden, 2)
        for rank in (0, ranks - 1):
            calls = received_bytes(
                tokens, ranks, rank, config, compress_ratio=ratio, dtype=torch.bfloat16, **modes_of(scheme)
            )
            got = [int(flow.received[rank]) for flow in flows]
            assert [size for size in got if size] == [call.num_bytes for call in calls if call.num_bytes], scheme


def modes_of(scheme: Scheme) -> dict[str, str]:
    """The words of a scheme as a layer takes them."""
    return {name: getattr(scheme, name) for name in ("split", "rows", "key_mode", "output_mode")}


@pytest.mark.parametrize("split", ["zigzag", "round_robin"])
@pytest.mark.parametrize("lengths", [[1024], [7, 130, 3]])
def test_bytes_of_latents_are_those_of_the_real_calls(split: str, lengths: list[int]) -> None:
    loc = torch.tensor([0, *np.cumsum(lengths)]).int()
    scheme = Scheme(4, 1, split, "scattered", "gather_kv", "replicated_weight")
    [flow] = layer_flows(v32_kind(v32()), scheme, shares_of(batch_of(lengths), 4, split), v32().hidden_size, 2)
    for rank in range(4):
        keys, *_ = mla_received_bytes(loc, 4, rank, v32(), dtype=torch.bfloat16, split=split, experts="whole")
        assert flow.received[rank] == keys.num_bytes


# --- operations ---


def linear_flop(kind: LayerKind, scheme: Scheme, shares: Shares) -> Any:
    """Operations of all projections of a layer, on a rank of each share of tokens."""
    return sum(part(kind, scheme, shares) for part in (query_flop, key_side_flop, output_flop))


def counted_flop(tokens: int, scheme: Scheme, cp_rank: int, config: AttentionConfig, ratio: int) -> int:
    """Operations of all matrix products in a rank's program, attention and scores left out."""
    weights = empty_weights(config, ratio, torch.bfloat16)
    cache, batch = one_prompt(tokens, weights, ratio)
    shares = shares_of(batch_of([tokens]), scheme.cp_size, scheme.split)
    rows = tokens if scheme.rows == "full" else int(shares.rows[cp_rank])
    counter, backend = FlopCounterMode(display=False), ShapesOfIndexer
    with counter, counted_transport(None):
        distributed.layer_over_ranks_(
            weights.wkv.new_empty(rows, config.hidden_size),
            weights,
            cache,
            batch,
            config,
            Ranks(NoGroup(scheme.cp_size, cp_rank), scheme.cp_size, cp_rank),
            compress_ratio=ratio,
            backend=backend,  # type: ignore[arg-type]
            **modes_of(scheme),
        )
    return int(counter.get_total_flops())


class ShapesOfIndexer(Shapes):
    """Rotations are sums and differences; that torch makes them as products is its own affair."""

    @staticmethod
    def index_queries(qr: Any, wq_b: Any, cos: Any, sin: Any, *, index_head_dim: int) -> Any:
        """The projection alone."""
        return (qr @ wq_b.T).reshape(len(qr), -1, index_head_dim)

    @staticmethod
    def hadamard(x: Any) -> Any:
        """The same shape."""
        return x


@pytest.mark.slow
@each_ratio
@pytest.mark.parametrize("tokens, ranks", [(1024, 8), (1000, 3)])
def test_operations_are_those_of_the_real_products(ratio: int, tokens: int, ranks: int) -> None:
    """On the first and the last rank: projections of queries, keys, pools and outputs, to the operation."""
    model = model_of("v4-flash")
    [kind] = [kind for kind in model.kinds if kind.compress_ratio == ratio]
    for scheme in all_schemes(model._replace(kinds=(kind,)), ranks):
        shares = shares_of(batch_of([tokens]), ranks, scheme.split)
        got = linear_flop(kind, scheme, shares)
        for rank in (0, ranks - 1):
            assert got[rank] == counted_flop(tokens, scheme, rank, FLASH, ratio), scheme


@pytest.mark.parametrize("split", ["zigzag", "round_robin"])
@pytest.mark.parametrize("lengths", [[1024], [7, 130, 3]])
def test_operations_on_latents_are_those_of_the_real_products(split: str, lengths: list[int]) -> None:
    """A stack of one layer, less its experts and its head, which are made narrow there."""
    config, ranks = v32(), 4
    loc = torch.tensor([0, *np.cumsum(lengths)]).int()
    scheme = Scheme(ranks, 1, split, "scattered", "gather_kv", "replicated_weight")
    shares = shares_of(batch_of(lengths), ranks, split)
    for rank in (0, 3):
        counter = FlopCounterMode(display=False)
        with counter:
            mla_received_bytes(loc, ranks, rank, config, dtype=torch.bfloat16, split=split, experts="whole")
        rows = int(shares.rows[rank])
        narrow = 2 * config.hidden_size * (3 * ranks * rows + len(lengths))
        got = linear_flop(v32_kind(config), scheme, shares)[rank]
        assert got == counter.get_total_flops() - narrow
