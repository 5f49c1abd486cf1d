"""`npu_sparse_attn_sharedkv`: its numbers against a loop over rows, and what it ignores, zeroes and leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compare import assert_same, assert_within_budget
from tests.emulator.common import (
    SCALE,
    attend,
    attention_case,
    attention_metadata,
    int32,
    normal,
    ops,
    positions_of,
    sums,
)
from tests.oracles.attention import attend as oracle
from tests.oracles.attention import visible_entries, window_positions


def row_at(cache: torch.Tensor, table: torch.Tensor, request: int, position: int) -> list[float]:
    """A row of a paged cache, found through the table alone."""
    block = int(table[request, position // cache.shape[1]])
    return cache[block, position % cache.shape[1], 0].double().tolist()


def expected(case: dict[str, Any], queries: list[int], keys: list[int]) -> torch.Tensor:
    """float64 outputs of the real query rows."""
    requests = [request for request, count in enumerate(queries) for _ in range(count)]
    out = []
    for row, (request, position) in enumerate(zip(requests, positions_of(queries, keys), strict=True)):
        seen = [row_at(case["ori_kv"], case["ori_block_table"], request, t) for t in window_positions(position, 128)]
        if case["cmp_ratio"] > 1:
            entries = visible_entries(position, case["cmp_ratio"])
            if "cmp_sparse_indices" in case:
                picks = case["cmp_sparse_indices"][row, 0].tolist()
                entries = picks[: min(len(picks), len(entries))]
            seen += [row_at(case["cmp_kv"], case["cmp_block_table"], request, entry) for entry in entries]
        heads, _ = oracle(case["q"][row].double().tolist(), seen, case["sinks"].double().tolist(), SCALE)
        out.append(heads)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("ratio", "queries", "keys"),
    [
        (1, [3, 1, 2], [3, 1, 150]),
        (4, [5, 1], [7, 90]),
        (4, [1], [4 * 520]),  # more entries than index columns
        (128, [2, 1], [129, 300]),
        (128, [3], [40]),  # no entry yet
    ],
)
def test_numbers(ratio: int, queries: list[int], keys: list[int], dtype: torch.dtype) -> None:
    case = attention_case(ratio, queries, keys, dtype=dtype)
    want = expected(case, queries, keys)
    assert_within_budget(attend(case), want, want.to(dtype))


def test_requests_without_queries_are_skipped() -> None:
    """Nothing of them is looked up: their table rows and lengths may hold anything."""
    case = attention_case(4, [2, 2], [30, 40])
    want = attend(case)
    more = {
        "cu_seqlens_q": int32(0, 2, 2, 4),
        "seqused_kv": int32(30, 9999, 40),
        **{
            name: torch.cat([case[name][:1], torch.full_like(case[name][:1], -5), case[name][1:]])
            for name in ("ori_block_table", "cmp_block_table")
        },
    }
    assert_same(attend(case, **more), want)


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_no_keys_gives_zeros_and_so_do_rows_before_position_0(ratio: int) -> None:
    case = attention_case(ratio, [3, 2], [3, 2])
    out = attend(case, seqused_kv=int32(0, 0))
    assert_same(out, torch.zeros_like(out))
    out = attend(case, seqused_kv=int32(1, 2))
    assert not out[:2].any()
    assert out[2].any()


def test_padding_rows_are_not_written() -> None:
    case = attention_case(1, [3], [9], padding=2)
    out = attend(case)
    assert out[3:].isnan().all()
    assert not out[:3].isnan().any()


@pytest.mark.parametrize("name", ["cu_seqlens_ori_kv", "cu_seqlens_cmp_kv"])
def test_packed_offsets_are_ignored_with_paged_keys(name: str) -> None:
    case = attention_case(4, [2, 1], [9, 20])
    assert_same(attend(case, **{name: int32(3, 1)}), attend(case))


def test_columns_after_the_prefix_are_ignored() -> None:
    case = attention_case(4, [1], [21])
    picks = case["cmp_sparse_indices"].clone()
    picks[0, 0, 5:] = 99999
    assert_same(attend(case, cmp_sparse_indices=picks), attend(case))


def test_the_order_of_indices_is_free() -> None:
    case = attention_case(4, [1], [400], dtype=torch.float16)
    picks = case["cmp_sparse_indices"].clone()
    picks[0, 0, :100] = picks[0, 0, :100].flip(0)
    assert torch.allclose(attend(case, cmp_sparse_indices=picks).float(), attend(case).float(), atol=2e-3)


def test_tables_are_not_looked_at_before_the_window_and_beyond_the_extent() -> None:
    case = attention_case(1, [1], [300])
    table = case["ori_block_table"].clone()
    table[0, : (300 - 128) // 16] = -1
    table[0, -(-300 // 16) :] = 2**30
    assert_same(attend(case, ori_block_table=table), attend(case))


def test_blocks_may_lie_apart() -> None:
    """Pages of a cache that holds more than these keys: strided in its first axis."""
    case = attention_case(128, [2], [260])
    wide = torch.stack([case["cmp_kv"], torch.full_like(case["cmp_kv"], torch.nan)], dim=1)
    assert_same(attend(case, cmp_kv=wide[:, 0]), attend(case))


def test_an_empty_cache_of_entries_does_while_there_is_none() -> None:
    case = attention_case(128, [2], [100])
    assert_same(attend(case, cmp_kv=case["cmp_kv"][:0]), attend(case))


def test_keys_that_nobody_sees_do_not_matter() -> None:
    case = attention_case(4, [2], [140])
    want = attend(case)
    block, offset = int(case["ori_block_table"][0, 0]), 11  # position 11 is seen by position 138 and not by 139
    case["ori_kv"][block, offset] = torch.nan
    out = attend(case)
    assert out[0].isnan().all()
    assert_same(out[1], want[1])


def test_the_default_scale_weighs_all_alike() -> None:
    """softmax_scale 0 is what a caller gets who leaves it out."""
    case = attention_case(1, [1], [3])
    del case["softmax_scale"]
    case["sinks"] = torch.full((4,), -torch.inf)
    rows = torch.tensor([row_at(case["ori_kv"], case["ori_block_table"], 0, t) for t in range(3)]).double()
    assert torch.allclose(attend(case)[0].double(), rows.mean(0).expand(4, -1), atol=1e-2)


def test_a_window_to_the_right_ends_with_the_keys() -> None:
    case = attention_case(1, [4], [4])
    whole = attend(case, ori_win_right=9, ori_win_left=9)
    assert_same(whole[:3], attend(case, ori_win_right=3, ori_win_left=9)[:3])
    alone = attend(case, q=case["q"][:1].repeat(4, 1, 1), ori_win_right=3, ori_win_left=3)
    assert all(torch.equal(alone[0], other) for other in alone)


def test_packed_keys_equal_paged_ones() -> None:
    case = attention_case(4, [2, 3], [20, 37])
    packed = dict(case)
    for prefix, counts in (("ori", [20, 37]), ("cmp", [5, 9])):
        cache, table = packed.pop(f"{prefix}_kv"), packed.pop(f"{prefix}_block_table")
        rows = [row_at(cache, table, request, t) for request, count in enumerate(counts) for t in range(count)]
        packed[f"{prefix}_kv"] = torch.tensor(rows).to(cache.dtype)[:, None]
        packed[f"cu_seqlens_{prefix}_kv"] = sums(counts)
    packed["layout_kv"] = "TND"
    assert_same(attend(packed), attend(case))
    del packed["seqused_kv"]  # then the offsets say the lengths
    assert_same(attend(packed), attend(case))


def test_padded_queries_equal_packed_ones_and_ignore_seqused_q() -> None:
    case = attention_case(4, [2, 2], [20, 37])
    want = attend(case)
    padded = {name: value for name, value in case.items() if name != "cu_seqlens_q"} | {"layout_q": "BSND"}
    for name in ("q", "cmp_sparse_indices"):
        padded[name] = case[name].reshape(2, 2, *case[name].shape[1:])
    assert_same(attend(padded), want.reshape(2, 2, 4, 512))
    assert_same(attend(padded, seqused_q=int32(1, 0)), want.reshape(2, 2, 4, 512))


def test_padded_keys() -> None:
    generator = torch.Generator().manual_seed(3)
    case = attention_case(1, [2, 2], [20, 20], heads=32)
    keys = normal(generator, 2, 20, 1, 512)
    padded = {"q": case["q"].reshape(2, 2, 32, 512), "ori_kv": keys, "sinks": case["sinks"], "softmax_scale": SCALE}
    padded |= {"ori_win_left": 127, "layout_kv": "BSND"}
    packed = case | {"ori_kv": keys.reshape(40, 1, 512), "layout_kv": "TND", "cu_seqlens_ori_kv": int32(0, 20, 40)}
    lengths = {"max_seqlen_q": 2, "max_seqlen_kv": 20, "batch_size": 2}
    metadata = ops().npu_sparse_attn_sharedkv_metadata(
        32, 1, 512, **lengths, ori_win_left=127, layout_kv="BSND", has_cmp_kv=False
    )
    assert_same(attend(padded, metadata=metadata).reshape(4, 32, 512), attend(packed))


@pytest.mark.parametrize("heads", [4, 12, 64, 128])
def test_heads(heads: int) -> None:
    case = attention_case(1, [1], [9], heads=heads)
    want = expected(case, [1], [9])
    assert_within_budget(attend(case), want, want.bfloat16())


def test_the_lse_is_empty() -> None:
    case = attention_case(1, [1], [9])
    metadata = attention_metadata(case)
    _, lse = ops().npu_sparse_attn_sharedkv(case.pop("q"), **case, metadata=metadata)
    assert (lse.dtype, lse.numel()) == (torch.float32, 0)
