"""Launches of attention over chosen latents: few heads and many, gaps, lists of nothing, NaN in what nobody chose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from dsacp_npu.kernels.latents import TILES, latents_kernel, switches, tile_key
from dsacp_ref.attention import AttentionOutput
from dsacp_ref.mla import latent_attention
from tests.compare import assert_within_budget
from tests.kernels.attention_cases import WIDTH, chosen_lists, short
from tests.kernels.case import Case
from tests.laws.attention_forms import plain_orders, with_rows
from tests.maths_strategies import Call, call_of

ROWS = [(2, 150), (1, 0), (3, 3), (0, 4), (1, 200)]
UNTOUCHED = 77


def choosing_call(rows: list[tuple[int, int]], rank: int, rope: int, **sizes: Any) -> Call:
    """A call whose rows are a latent and its rope key side by side; the first query chose nothing.

    What no query chose is NaN. The window, of which there is none here, is one token.
    """
    options = {"ratio": 1, "window": 1, "head_dim": rank + rope, "beyond": 1, **sizes}
    call = call_of(np.random.default_rng(rank + rope), rows, **options)
    topk = call.topk.copy()
    topk[:1] = -1
    call = call._replace(topk=topk)
    tokens = [np.full_like(each, np.nan) for each in call.entries]
    for place, chosen in zip(call.places, topk, strict=True):
        if place is not None:
            mine = chosen[chosen >= 0]
            tokens[place[0]][mine] = call.entries[place[0]][mine]
    return with_rows(call, None, tokens)


def parts(call: Call, rank: int) -> tuple[np.ndarray, ...]:
    """q_latent, q_rope, latent_cache, rope_cache."""
    return tuple(part for both in (call.q, call.cmp.cache) for part in (both[..., :rank], both[..., rank:]))


def exact_and_plain(call: Call, rank: int) -> tuple[AttentionOutput, list[AttentionOutput]]:
    """The reference in float64; the plain computation in float32, in several orders."""
    lengths = call.row_args[:2]
    exact = latent_attention(*parts(call, rank), call.cmp.table, call.topk, *lengths, softmax_scale=call.scale)
    rows = []
    for place, chosen in zip(call.places, call.topk, strict=True):
        mine = call.entries[0][:0] if place is None else call.entries[place[0]][chosen[chosen >= 0]]
        rows.append(mine.astype(np.float32))
    no_sink = np.full(call.q.shape[1], -np.inf, np.float32)
    orders = plain_orders(call.q.astype(np.float32), rows, no_sink, call.scale)
    return exact, [AttentionOutput(each.out[..., :rank], each.lse) for each in orders]


def attending(
    heads: int,
    *,
    rank: int = 64,
    rope: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    family: str = "a2",
    wide: bool = False,
) -> Case:
    """Every query over its own list, up to two tiles of it."""
    call = short(choosing_call(ROWS, rank, rope, num_heads=heads, index_topk=100, cmp_block=4), dtype)
    lists, counts = chosen_lists(call)
    q_latent, q_rope, latent, rope_keys = (torch.tensor(part).to(dtype).contiguous() for part in parts(call, rank))
    out, lse = torch.full_like(q_latent, UNTOUCHED), torch.full(q_latent.shape[:2], UNTOUCHED, dtype=torch.float32)

    def check() -> None:
        exact, plain = exact_and_plain(call, rank)
        assert_within_budget(out, exact.out, [torch.from_numpy(each.out).to(dtype) for each in plain], "out")
        assert_within_budget(lse, exact.lse, [each.lse for each in plain], "lse")
        unchosen = (call.topk < 0).all(axis=1)
        assert unchosen[0]
        assert (out[unchosen] == 0).all()

    tile = TILES[family][tile_key(heads, q_latent.element_size())]
    base = np.log2(np.e) if family == "cuda" else 1.0
    return Case(
        kernel=latents_kernel,
        arguments={
            "q_ptr": q_latent,
            "q_rope_ptr": q_rope,
            "latent_ptr": latent,
            "rope_ptr": rope_keys,
            "slot_ptr": torch.from_numpy(lists),
            "count_ptr": torch.from_numpy(counts),
            "out_ptr": out,
            "lse_ptr": lse,
            "num_tasks": len(q_latent) * -(-heads // tile.heads),
            "list_stride": WIDTH,
            "scale": float(call.scale * base),
        },
        constexprs=switches(family, tile, H=heads, D=rank, ROPE=rope, WIDE=wide),
        programs=2,
        check=check,
    )


CASES: dict[str, Callable[[], Case]] = {
    "8 heads": partial(attending, 8),
    "3 heads, 16 + 64 channels": partial(attending, 3, rank=16, rope=64),
    "16 heads, float16": partial(attending, 16, dtype=torch.float16),
    "20 heads, float32": partial(attending, 20, dtype=torch.float32),
    "40 heads in float32, wide": partial(attending, 40, dtype=torch.float32, wide=True),
    "40 heads of 256 in halves, wide": partial(attending, 40, rank=256, rope=32, wide=True),
    "32 heads of 512 in halves": partial(attending, 32, rank=512, rope=64),
    "8 heads of 512": partial(attending, 8, rank=512, rope=64),
    "64 heads, A5": partial(attending, 64, family="a5"),
}
