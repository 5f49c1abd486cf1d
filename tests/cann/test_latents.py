"""Attention over latents on the emulated operator gives what the reference gives, in sizes that the operator takes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import _operators, cann
from dsacp_npu import mla as mirror
from dsacp_ref import mla as ref
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.cann.common import BLOCKS, HALVES, WAYS, assert_near, assert_runs_without_values, rank_rows
from tests.compare import assert_same
from tests.maths_strategies import Paged, normal, paged, seeds
from tests.mirror.common import case, int32, to_torch, untouched
from tests.strategies import fewer, read_only

pytestmark = pytest.mark.usefixtures("emulated")

RANK, ROPE = 512, 64
SCALE = 192**-0.5
SHORT = st.one_of(st.just(0), st.integers(0, 300))
PREFIXES = st.one_of(st.integers(2040, 2200), SHORT, SHORT)


def call_of(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],
    *,
    heads: int = 2,
    index_topk: int = 24,
    block_size: int = 16,
    beyond: int = 0,
) -> tuple[Any, ...]:
    """A call whose lists hold visible tokens in any order and -1 anywhere; what nobody may see is NaN or garbage."""
    keys = [normal(rng, used, RANK + ROPE) for _, used in rows]
    side = paged(rng, keys, block_size)
    if not rows:
        side = Paged(np.full((1, block_size, RANK + ROPE), np.nan), side.table, [])
    counts = [count for count, _ in rows]
    cu, used = int32(0, *np.cumsum(counts)), int32(*(extent for _, extent in rows))
    num_queries = int(cu[-1]) + beyond
    topk = np.full((num_queries, index_topk), -1, np.int32)
    positions = [extent - count + i if extent else -1 for count, extent in rows for i in range(count)]
    for query, position in enumerate(positions):
        tokens = rng.permutation(position + 1)[: int(rng.integers(0, index_topk + 1))]
        topk[query, np.sort(rng.permutation(index_topk)[: len(tokens)])] = tokens
    caches = (read_only(side.cache[..., :RANK].copy()), read_only(side.cache[..., RANK:].copy()))
    q = (normal(rng, num_queries, heads, RANK), normal(rng, num_queries, heads, ROPE))
    return (*q, *caches, side.table, read_only(topk), cu, used)


@given(
    rank_rows(PREFIXES),
    st.sampled_from([1, 2, 4, 16]),
    st.sampled_from([1, 24, 24, 2048]),
    BLOCKS,
    st.sampled_from([0, 0, 2]),
    HALVES,
    st.booleans(),
    seeds,
)
@fewer(2)
def test_latent_attention_on_the_emulator(
    rows: list[tuple[int, int]],
    heads: int,
    index_topk: int,
    block_size: int,
    beyond: int,
    dtype: str,
    blind: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    args = call_of(rng, rows, heads=heads, index_topk=index_topk, block_size=block_size, beyond=beyond)
    tensors, options = to_torch(args, dtype), {"softmax_scale": SCALE}
    with mock.patch("dsacp_npu._tensors.readable", return_value=not blind):
        got = untouched(cann.latent_attention, tensors, options)
    assert got.lse is None
    assert_near(got.out, ref.latent_attention, tensors, options, lambda result: result.out)


ARGS = call_of(np.random.default_rng(0), [(2, 60), (1, 0), (0, 0), (3, 40)], beyond=1)
TENSORS = to_torch(ARGS, "bfloat16")
OPTIONS = {"softmax_scale": SCALE}
Q, Q_ROPE, LATENTS, ROPES, TABLE, TOPK, CU, USED = TENSORS


def changed(at: int, value: Any) -> tuple[Any, ...]:
    return (*TENSORS[:at], value, *TENSORS[at + 1 :])


@pytest.mark.parametrize("way", WAYS)
def test_it_runs_without_values(way: str) -> None:
    assert_runs_without_values(way, case("latent_attention", *TENSORS, **OPTIONS))


def test_torch_npus_operator_does_as_well() -> None:
    """Its attention_mode has another default, and there is one argument more."""
    want = cann.latent_attention(*TENSORS, **OPTIONS).out
    with mock.patch.object(_operators, "NAMESPACES", ("npu",)):
        assert_same(cann.latent_attention(*TENSORS, **OPTIONS).out, want)


def test_queries_that_lie_apart_are_copied_together() -> None:
    apart = [torch.stack([part, part], dim=2)[:, :, 0] for part in (Q, Q_ROPE)]
    assert not any(part.is_contiguous() for part in apart)
    want = cann.latent_attention(*TENSORS, **OPTIONS).out
    assert_same(cann.latent_attention(*apart, *TENSORS[2:], **OPTIONS).out, want)


def test_a_choice_among_all_keys_once_later_tokens_are_taken_out() -> None:
    """`causal_picks` leaves -1 in front of tokens; the operator alone would not find these."""
    args = call_of(np.random.default_rng(1), [(6, 8)], index_topk=8)
    every = np.stack([np.random.default_rng(i).permutation(8) for i in range(6)]).astype(np.int32)
    picks = ref.causal_picks(every, int32(2, 3, 4, 5, 6, 7))
    assert any((row[: int((row >= 0).sum())] < 0).any() for row in picks)
    tensors = to_torch((*args[:5], read_only(picks), *args[6:]), "bfloat16")
    got = cann.latent_attention(*tensors, **OPTIONS).out
    assert_near(got, ref.latent_attention, tensors, OPTIONS, lambda result: result.out)
    with pytest.raises(ContractError, match="topk_indices must be -1 or below the 3 tokens that query 0 sees"):
        cann.latent_attention(*tensors[:5], torch.tensor(every), *tensors[6:], **OPTIONS)


def test_queries_that_choose_nothing_are_zero() -> None:
    """Also where a query has keys: the operator's row is undefined there."""
    topk = TOPK.clone()
    topk[1] = -1
    out = cann.latent_attention(*changed(5, topk), **OPTIONS).out
    assert not out[1].any()
    assert not out.isnan().any()


def test_later_tokens_never_count_and_rows_of_nobody_are_zero() -> None:
    """Where a list can be read it is refused for them; elsewhere it is the operator that leaves them out."""
    right, wrong = TOPK.clone(), TOPK.clone()
    right[0, :3], right[0, 3:] = torch.tensor([4, 7, -1], dtype=torch.int32), -1
    wrong[0, :3], wrong[0, 3:] = torch.tensor([4, 59, 7], dtype=torch.int32), -1
    wrong[2], wrong[6] = 0, 3  # of a padded slot, and beyond the last row
    want = cann.latent_attention(*changed(5, right), **OPTIONS).out
    with mock.patch("dsacp_npu._tensors.readable", return_value=False):
        assert_same(cann.latent_attention(*changed(5, wrong), **OPTIONS).out, want)


LIMITS = [
    ("q_latent must have dtype bfloat16 or float16, got float32", to_torch(ARGS, "float32")),
    ("kv_lora_rank must be 512, got 256", (Q[..., :256], Q_ROPE, LATENTS[..., :256], *TENSORS[3:])),
    ("rope_head_dim must be 64, got 32", (Q, Q_ROPE[..., :32], LATENTS, ROPES[..., :32], *TENSORS[4:])),
    (
        "num_heads must be 1 or 2 or 4 .* got 3",
        (torch.cat([Q, Q[:, :1]], 1), Q_ROPE.repeat(1, 2, 1)[:, :3], *TENSORS[2:]),
    ),
    (
        "block size of latent_cache must be a multiple of 16 in 16..1024, got 8",
        (
            Q,
            Q_ROPE,
            *(part.unflatten(1, (2, 8)).flatten(0, 1) for part in (LATENTS, ROPES)),
            TABLE * 2,
            TOPK * 0 - 1,
            CU,
            USED,
        ),
    ),
    ("latent_cache must be contiguous", changed(2, torch.stack([LATENTS, LATENTS], dim=1)[:, 0])),
    ("rope_cache must be contiguous", changed(3, torch.stack([ROPES, ROPES], dim=1)[:, 0])),
    ("index_topk must be in 0..2048, got 2049", changed(5, TOPK.new_full((len(TOPK), 2049), -1))),
    (
        "block_table must have a column for each page of the 60 tokens of row 0, got 3 columns",
        (*changed(4, TABLE[:, :3].contiguous())[:5], TOPK * 0 - 1, CU, USED),
    ),
    (
        "latent_cache must hold floats beside a rope_cache; bytes would go to npu_kv_quant_sparse_flash_attention",
        (Q, Q_ROPE, torch.zeros(9, 16, 656, dtype=torch.uint8), None, *TENSORS[4:]),
    ),
]


@pytest.mark.parametrize(("words", "args"), LIMITS, ids=range(len(LIMITS)))
def test_a_limit_is_named(words: str, args: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"latent_attention on cann: {words}"):
        cann.latent_attention(*args, **OPTIONS)


BROKEN = [
    changed(4, TABLE[:, :2]),
    changed(4, TABLE[:2]),
    changed(4, torch.full_like(TABLE, -1)),
    changed(7, torch.tensor([60, 0, 0, 2], dtype=torch.int32)),
    changed(6, CU + 1),
    changed(5, TOPK * 0 + 5),
    changed(5, TOPK * 0 + 59),
    changed(5, TOPK[:3]),
    changed(1, Q_ROPE[:, :1]),
    changed(2, LATENTS[:2]),
    changed(2, LATENTS.float()),
    changed(3, ROPES[:, :8]),
    changed(3, None),
    changed(2, torch.zeros(9, 16, 656, dtype=torch.uint8)),
]


@pytest.mark.parametrize("args", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_contract_has_the_words_of_the_mirror(args: Any) -> None:
    with pytest.raises(ContractError) as theirs:
        mirror.latent_attention(*args, **OPTIONS)
    with pytest.raises(ContractError) as mine:
        cann.latent_attention(*args, **OPTIONS)
    assert str(mine.value) == str(theirs.value)


def test_nothing_to_attend_from_or_to_needs_no_operator() -> None:
    no_rows, nobody = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    blind = TOPK * 0 - 1
    with mock.patch("dsacp_npu._cann_latents.operator", side_effect=AssertionError("called")):
        for args in (
            (Q[:0], Q_ROPE[:0], LATENTS, ROPES, TABLE[:0], TOPK[:0], nobody, no_rows),
            (Q, Q_ROPE, LATENTS, ROPES, TABLE[:0], blind, nobody, no_rows),
            (Q, Q_ROPE, LATENTS[:0], ROPES[:0], TABLE, blind, CU, USED * 0),
            (Q, Q_ROPE, LATENTS, ROPES, TABLE[:, :0], blind, CU, USED * 0),
            (Q, Q_ROPE, LATENTS, ROPES, TABLE, TOPK[:, :0], CU, USED),
        ):
            assert_same(cann.latent_attention(*args, **OPTIONS).out, torch.zeros_like(args[0]))


def test_a_missing_operator_is_named() -> None:
    with (
        mock.patch.object(_operators, "NAMESPACES", ()),
        pytest.raises(UnsupportedError, match="operator npu_sparse_flash_attention is not in"),
    ):
        cann.latent_attention(*TENSORS, **OPTIONS)
