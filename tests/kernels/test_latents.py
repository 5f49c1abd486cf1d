"""`dsacp_npu._triton_latents` gives what `dsacp_ref.mla` gives, or refuses; and the choice of tokens before it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import _triton_attention_slots, _triton_indexer, _triton_latents, _triton_launch
from dsacp_npu.fp8 import encoded_latents
from dsacp_npu.kernels._records import FAMILIES
from dsacp_npu.kernels.attention_tiles import LIST_MULTIPLE
from dsacp_npu.kernels.latents import TILES, tile_key
from dsacp_ref import indexer as ref_indexer
from dsacp_ref import mla as reference
from dsacp_ref.extents import query_positions
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_same, assert_same_selection, assert_within_budget, scoring_noise
from tests.kernels.attention_cases import short
from tests.kernels.latents_cases import choosing_call, exact_and_plain, parts
from tests.laws.attention_forms import with_rows
from tests.maths_strategies import Call, call_of, int32, normal, operator_rows, paged, seeds
from tests.mirror.common import TORCH_DTYPES, outcome, to_numpy, to_torch, untouched
from tests.strategies import fewer

DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])
RANK, ROPE = 16, 16
ROWS = [(2, 90), (1, 0), (4, 4), (0, 3), (1, 60)]
SIZES = {"num_heads": 3, "index_topk": 70, "cmp_block": 4}


def held(call: Call, dtype: str) -> Call:
    """The call with numbers that the dtype holds."""
    return short(call, TORCH_DTYPES[dtype])


HERE = held(choosing_call(ROWS, RANK, ROPE, **SIZES), "bfloat16")
MANY_HEADS = held(choosing_call(ROWS, RANK, ROPE, **{**SIZES, "num_heads": 70}), "bfloat16")


def arguments(call: Call, rank: int = RANK) -> tuple[Any, ...]:
    """The arguments of the call, in order; numpy."""
    return *parts(call, rank), call.cmp.table, call.topk, *call.row_args[:2]


def launched(call: Call, dtype: str = "bfloat16", rank: int = RANK) -> Any:
    """What the launcher gives, once no input was written to."""
    made = tuple(part.contiguous() for part in to_torch(arguments(call, rank), dtype))
    return untouched(_triton_latents.latent_attention, made, {"softmax_scale": call.scale})


def assert_attends(call: Call, dtype: str = "bfloat16", rank: int = RANK) -> None:
    """Within the budget of the plain computation, for inputs that the dtype holds."""
    got = launched(call, dtype, rank)
    assert (got.out.dtype, got.lse.dtype) == (TORCH_DTYPES[dtype], torch.float32)
    exact, plain = exact_and_plain(call, rank)
    assert_within_budget(got.out, exact.out, [torch.from_numpy(each.out).to(got.out.dtype) for each in plain], "out")
    assert_within_budget(got.lse, exact.lse, [each.lse for each in plain], "lse")


@given(operator_rows(first=4), st.sampled_from([3, 17, 40]), st.sampled_from([1, 2, 4, 64]), st.integers(1, 9), DTYPES)
@fewer(3)
def test_latent_attention(rows, num_heads, block_size, index_topk, dtype) -> None:
    sizes = {"num_heads": num_heads, "cmp_block": block_size, "index_topk": index_topk}
    assert_attends(held(choosing_call(rows, RANK, ROPE, **sizes), dtype), dtype)


def test_the_model_s_sizes() -> None:
    """128 heads, latents of 512 and rope keys of 64, 2048 chosen tokens."""
    call = choosing_call([(2, 2300)], 512, 64, num_heads=128, index_topk=2048, cmp_block=64, beyond=0)
    topk = np.full_like(call.topk, -1)
    topk[0, :300] = call.topk[1, :300] = np.arange(2298, 1998, -1)
    topk[1] = np.random.default_rng(0).permutation(2300)[:2048]
    entries = [normal(np.random.default_rng(1), 2300, 576)]
    assert_attends(held(with_rows(call._replace(topk=topk), None, entries), "bfloat16"), rank=512)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_form_of_a_gpu(dtype) -> None:
    """Powers of two; and latents in halves where they are long."""
    long = choosing_call(ROWS, 256, ROPE, **{**SIZES, "num_heads": 70})
    with ExitStack() as patches:
        for module in (_triton_latents, _triton_attention_slots, _triton_launch):
            patches.enter_context(mock.patch.object(module, "family_of", return_value="cuda"))
        for call, rank in ((HERE, RANK), (MANY_HEADS, RANK), (long, 256)):
            assert_attends(held(call, dtype), dtype, rank)


@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_logits_of_any_size(logit) -> None:
    """The running maximum keeps what no exponential holds."""
    large = np.abs(HERE.q) * logit
    call = with_rows(HERE._replace(q=large), None, [np.abs(tokens) for tokens in HERE.entries])
    assert_attends(held(call, "float32"), "float32")


def test_values_that_nobody_may_read_change_nothing() -> None:
    """As on a device."""
    want = launched(HERE)
    with mock.patch("dsacp_npu._tensors.readable", return_value=False):
        assert_same(launched(HERE), want)


def test_pages_may_lie_apart_if_they_do_in_both_caches() -> None:
    """A page begins a whole number of rows behind the last."""
    args = to_torch(arguments(HERE), "bfloat16")
    args, options = tuple(part.contiguous() for part in args), {"softmax_scale": HERE.scale}
    want = _triton_latents.latent_attention(*args, **options)
    moved = []
    for cache in args[2:4]:
        apart = torch.full((len(cache), 7, cache.shape[2]), torch.nan, dtype=torch.bfloat16)
        apart[:, : cache.shape[1]] = cache
        moved.append(apart[:, : cache.shape[1]])
    assert_same(_triton_latents.latent_attention(*args[:2], *moved, *args[4:], **options), want)
    with pytest.raises(UnsupportedError, match="pages must lie alike in both caches"):
        _triton_latents.latent_attention(*args[:3], moved[1], *args[4:], **options)


def test_a_nan_reaches_only_those_that_chose_it() -> None:
    """In a latent or in a rope key; and all heads of them."""
    topk = np.full_like(HERE.topk, -1)
    topk[:2, :5] = [-1, 2, 0, -1, 1], [0, -1, 3, 1, -1]
    tokens = [normal(np.random.default_rng(0), len(rows), RANK + ROPE) for rows in HERE.entries]
    call = held(with_rows(HERE._replace(topk=topk), None, tokens), "bfloat16")
    want = launched(call)
    for channel in (1, RANK + 1):
        spoilt = [rows.copy() for rows in call.entries]
        spoilt[0][2, channel] = np.nan
        got = launched(with_rows(call, None, spoilt))
        assert got.lse[0].isnan().all()
        assert got.out[0].isnan().any(dim=1).all()
        for mine, theirs in zip(got, want, strict=True):
            assert_same(mine[1:], theirs[1:])


def test_nothing_to_attend_to() -> None:
    """No query; no row; no room in the table; lists of nothing, and empty ones."""
    sizes = {"ratio": 1, "window": 1, "head_dim": RANK + ROPE, **SIZES}
    nobody = call_of(np.random.default_rng(0), [], **sizes, beyond=2)
    nothing = HERE._replace(topk=np.full_like(HERE.topk, -1))
    no_room = nothing._replace(
        cmp=HERE.cmp._replace(cache=HERE.cmp.cache[:0], table=HERE.cmp.table[:, :0]),
        seqused_kv=np.zeros(len(ROWS), np.int32),
    )
    empty = (nobody, nobody._replace(q=nobody.q[:0], topk=nobody.topk[:0]), nothing, no_room)
    for call in (*empty, HERE._replace(topk=HERE.topk[:, :0])):
        got = launched(call)
        assert (got.out.shape, got.lse.shape) == ((*call.q.shape[:2], RANK), call.q.shape[:2])
        assert (bool((got.out == 0).all()), bool((got.lse == -torch.inf).all())) == (True, True)


def spoilt(place: int, value: Any) -> tuple[Any, ...]:
    """The legal arguments with another one."""
    args = arguments(HERE)
    return *args[:place], value, *args[place + 1 :]


def table(value: int) -> tuple[Any, ...]:
    """The legal arguments with another block id throughout the first row."""
    changed = HERE.cmp.table.copy()
    changed[0] = value
    return spoilt(4, changed)


def choice(query: int, *tokens: int) -> tuple[Any, ...]:
    """The legal arguments with another choice of one query."""
    changed = np.full_like(HERE.topk, -1)
    changed[query, : len(tokens)] = tokens
    return spoilt(5, changed)


Q, Q_ROPE, LATENT, ROPE_KEYS, *_ = arguments(HERE)
REFUSED = {
    "queries of two axes": spoilt(0, Q[0]),
    "queries of integers": spoilt(0, Q.astype(np.int32)),
    "no heads": (Q[:, :0], Q_ROPE[:, :0], *arguments(HERE)[2:]),
    "rope queries of other heads": spoilt(1, Q_ROPE[:, :1]),
    "rope queries in another dtype": spoilt(1, Q_ROPE.astype(np.float32)),
    "narrow latents": spoilt(2, LATENT[..., :2]),
    "latents in another dtype": spoilt(2, LATENT.astype(np.float32)),
    "fewer rope keys": spoilt(3, ROPE_KEYS[1:]),
    "bytes beside a rope cache": spoilt(2, np.zeros(LATENT.shape, np.uint8)),
    "floats without a rope cache": spoilt(3, None),
    "a table of other rows": spoilt(4, HERE.cmp.table[1:]),
    "a table that is too short": spoilt(4, HERE.cmp.table[:, :2]),
    "no block": table(-1),
    "a block that is not there": table(10**6),
    "lists of other queries": spoilt(5, HERE.topk[1:]),
    "a token after the query": choice(0, 0, 89),
    "less than none": choice(0, -2),
    "a token twice": choice(1, 4, -1, 4),
    "offsets beyond the queries": spoilt(6, int32([0, 2, 3, 7, 7, 99])),
    "extents of fewer rows": spoilt(7, HERE.seqused_kv[1:]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_the_reference_s(name: str) -> None:
    args = REFUSED[name]
    want, _ = outcome(lambda: reference.latent_attention(*args, softmax_scale=1.0))
    got, _ = outcome(lambda: _triton_latents.latent_attention(*to_torch(args), softmax_scale=1.0))
    assert want
    assert got == want


def test_a_scale_is_positive() -> None:
    args = to_torch(arguments(HERE))
    for scale in (0.0, float("nan")):
        want, _ = outcome(lambda scale=scale: reference.latent_attention(*arguments(HERE), softmax_scale=scale))
        got, _ = outcome(lambda scale=scale: _triton_latents.latent_attention(*args, softmax_scale=scale))
        assert want
        assert got == want


def sized(rank: int, rope: int, **sizes: int) -> tuple[Any, ...]:
    """Legal arguments of other sizes, in bfloat16."""
    call = choosing_call([(1, 9)], rank, rope, **{**SIZES, "index_topk": 3, **sizes})
    return tuple(part.contiguous() for part in to_torch(arguments(call, rank), "bfloat16"))


def side_by_side() -> tuple[Any, ...]:
    """Legal arguments with latents and rope keys in the rows of one tensor."""
    q, q_rope, *caches = sized(16, 16)
    both = torch.cat(caches[:2], dim=2)
    return q, q_rope, both[..., :16], both[..., 16:], *caches[2:]


def in_bytes() -> tuple[Any, ...]:
    """Legal arguments with latents and rope keys coded in one row."""
    q, q_rope, latent, rope_keys, *others = sized(128, 64)
    return q, q_rope, encoded_latents(latent.nan_to_num(), rope_keys.nan_to_num()), None, *others


LIMITS = [
    (lambda: to_torch(arguments(HERE)), "in bfloat16, float16 or float32, not float64"),
    (lambda: sized(24, 16), "kv_lora_rank .* not 24"),
    (lambda: sized(16, 8), "rope_head_dim .* not 8"),
    (lambda: sized(16, 16, cmp_block=3), "pages of a power of two, not of 3 entries"),
    (lambda: sized(16, 16, index_topk=4097), "at most 4096 keys of a selection, not 4097"),
    (side_by_side, "latent_cache has strides"),
    (in_bytes, "reads latents that are floats, not bytes"),
]


@pytest.mark.parametrize(("make", "text"), LIMITS, ids=[text for _, text in LIMITS])
def test_what_no_kernel_does_is_refused_by_name(make, text) -> None:
    with pytest.raises(UnsupportedError, match=text):
        _triton_latents.latent_attention(*make(), softmax_scale=1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_tile_for_every_call(family) -> None:
    for num_heads in (1, 8, 16, 17, 32, 64, 96, 128):
        for size in (2, 4):
            assert LIST_MULTIPLE % TILES[family][tile_key(num_heads, size)].keys == 0


# The choice before it: V3.2's indexer scores tokens themselves.


@given(seeds, st.sampled_from(["bfloat16", "float16"]), st.sampled_from([64, 16, 4]))
@fewer(5)
def test_tokens_are_chosen_as_by_the_reference(seed, dtype, block_size) -> None:
    """compress_ratio 1, the model's 64 heads of 128 and 2048 tokens; -1 behind where fewer are visible."""
    rng = np.random.default_rng(seed)
    rows = [(3, 5), (1, 0), (2, int(rng.integers(2, 300)))]
    cu, used = int32([0, 3, 4, 6]), int32([extent for _, extent in rows])
    side = paged(rng, [normal(rng, extent, 128) for _, extent in rows], block_size)
    args = (
        *to_torch((normal(rng, 7, 64, 128), normal(rng, 7, 64), side.cache), dtype),
        *to_torch((side.table, cu, used)),
    )
    assert_chooses(args, compress_ratio=1, index_topk=2048)


def test_2048_tokens_of_more() -> None:
    rng = np.random.default_rng(0)
    side = paged(rng, [normal(rng, 2500, 128)], 64)
    args = to_torch((normal(rng, 2, 64, 128), normal(rng, 2, 64), side.cache), "bfloat16")
    assert_chooses((*args, *to_torch((side.table, int32([0, 2]), int32([2500])))), compress_ratio=1, index_topk=2048)


def assert_chooses(args: tuple[torch.Tensor, ...], **options: int) -> None:
    """The reference's choice in float64, but for scores that float32 cannot tell apart."""
    got = untouched(_triton_indexer.lightning_indexer, args, options)
    exact, plain = (to_numpy(args, dtype) for dtype in ("float64", "float32"))
    want = ref_indexer.lightning_indexer(*exact, **options)
    q, _, cache, block_table, cu, used = exact
    scores, low = [], []
    positions = query_positions(cu, used, num_rows=len(q))
    width = max(int(positions.max()) + 1, 1)
    for query, position in enumerate(positions.tolist()):
        row = int(np.searchsorted(cu[1:], query, side="right"))
        for found, (each_q, each_weights, each_cache) in ((scores, exact[:3]), (low, plain[:3])):
            line = np.full(width, -np.inf, each_q.dtype)
            if position >= 0:
                keys = each_cache[block_table[row, : -(-(position + 1) // cache.shape[1])]].reshape(-1, q.shape[2])
                mine = slice(query, query + 1)
                line[: position + 1] = ref_indexer.index_scores(each_q[mine], each_weights[mine], keys[: position + 1])[
                    0
                ]
            found.append(line)
    assert_same_selection(got, want, np.stack(scores), scoring_noise(np.stack(scores), np.stack(low)))
