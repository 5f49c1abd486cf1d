"""Attention over chosen latents against a loop over tokens, every edge of the operator, and the mistakes of callers.

A scale without mscale is no mistake that an operator can see: it is a number like another. The tests of layers find it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu.emulator import OperatorError, OutOfRangeError
from tests.compare import assert_same, assert_within_budget
from tests.emulator.common import attend_latents, int32, latent_case, positions_of

NAMESPACES = ("_C_ascend", "npu")
CASE = latent_case([2, 3], [40, 90])
QUERIES, KEYS = [2, 3], [40, 90]


def attended(case: dict[str, Any], request: int, row: int, tokens: list[int], dtype: type) -> np.ndarray:
    """One query row [heads, 512] over some tokens, looked up one by one."""
    block_size = case["key"].shape[1]
    rows, turned = [], []
    for token in tokens:
        place = int(case["block_table"][request, token // block_size]), token % block_size, 0
        rows.append(case["key"][place].double().numpy().astype(dtype))
        turned.append(case["key_rope"][place].double().numpy().astype(dtype))
    out = []
    for head, head_rope in zip(case["query"][row], case["query_rope"][row], strict=True):
        q, q_rope = (part.double().numpy().astype(dtype) for part in (head, head_rope))
        logits = [
            case["scale_value"] * (float(q @ latent) + float(q_rope @ rope))
            for latent, rope in zip(rows, turned, strict=True)
        ]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        out.append(sum(weight / sum(weights) * latent for weight, latent in zip(weights, rows, strict=True)))
    return np.stack(out)


def expected(case: dict[str, Any], queries: list[int], keys: list[int], dtype: type, *, causal: bool = True) -> Any:
    """Every query row over the tokens of its list that it may see."""
    requests = [request for request, count in enumerate(queries) for _ in range(count)]
    out = []
    for row, (request, position) in enumerate(zip(requests, positions_of(queries, keys), strict=True)):
        limit = position + 1 if causal else keys[request]
        tokens = [token for token in case["sparse_indices"][row, 0].tolist() if 0 <= token < limit]
        out.append(attended(case, request, row, tokens, dtype) if tokens else np.zeros((case["query"].shape[1], 512)))
    return np.stack(out)


def assert_attends(
    got: torch.Tensor, case: dict[str, Any], queries: list[int], keys: list[int], **options: Any
) -> None:
    """Within the error of float32, rounded once."""
    plain = torch.tensor(expected(case, queries, keys, np.float32, **options)).to(got.dtype)
    assert_within_budget(got, expected(case, queries, keys, np.float64, **options), plain)


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "topk", "block_size"), [(1, 1, 16), (2, 64, 32), (16, 20, 1024)])
def test_the_output(namespace: str, dtype: torch.dtype, heads: int, topk: int, block_size: int) -> None:
    queries, keys = [2, 1, 3], [14, 33, 3]
    case = latent_case(queries, keys, heads=heads, topk=topk, block_size=block_size, dtype=dtype)
    assert_attends(attend_latents(case, namespace), case, queries, keys)


def test_there_is_no_lse() -> None:
    _, highest, total = torch.ops._C_ascend.npu_sparse_flash_attention(**CASE)
    assert [(part.dtype, part.numel()) for part in (highest, total)] == [(torch.float32, 0)] * 2


def test_mode_0_counts_all_tokens_of_the_request() -> None:
    case = latent_case([2], [6], topk=6)
    case["sparse_indices"][:] = torch.randperm(6, generator=torch.Generator().manual_seed(1)).int()
    assert_attends(attend_latents(case, sparse_mode=0), case, [2], [6], causal=False)


def test_the_order_of_a_list_is_free() -> None:
    case = latent_case([1], [40], topk=8)
    case["sparse_indices"][0, 0] = int32(3, 39, 0, 17, 5, 8, 21, 2)
    other = case["sparse_indices"].flip(-1).contiguous()
    torch.testing.assert_close(attend_latents(case), attend_latents(case, sparse_indices=other), atol=0.01, rtol=0.01)


def test_a_value_with_equal_numbers_is_the_key() -> None:
    """As in torch_npu's example; NaN where nobody looks is equal to itself."""
    case = latent_case([2], [20])
    case["key"][0] = torch.nan
    assert_same(attend_latents(case, value=case["key"].clone()), attend_latents(case))


def test_rows_before_position_0_and_without_keys_are_zeros() -> None:
    case = latent_case([2, 3], [0, 2])
    out = attend_latents(case)
    assert not out[:3].any()
    assert_attends(out, case, [2, 3], [0, 2])


def test_requests_without_queries_and_padding_rows() -> None:
    """Skipped requests are not looked up; padding rows are not written."""
    case = latent_case(QUERIES, KEYS, padding=2)
    table = torch.cat([case["block_table"][:1], torch.full_like(case["block_table"][:1], -9), case["block_table"][1:]])
    more = {"actual_seq_lengths_query": int32(2, 2, 5), "actual_seq_lengths_kv": int32(40, 7777, 90)}
    out = attend_latents(case, **more, block_table=table)
    assert_same(out[:5], attend_latents(case)[:5])
    assert out[5:].isnan().all()


def test_only_chosen_rows_are_read() -> None:
    case = latent_case([1], [40], topk=2)
    case["sparse_indices"][0, 0] = int32(39, 17)
    want = attend_latents(case)
    bare = {name: torch.full_like(case[name], torch.nan) for name in ("key", "key_rope")}
    for token in (39, 17):
        place = int(case["block_table"][0, token // 16]), token % 16
        for name, cache in bare.items():
            cache[place] = case[name][place]
    assert_same(attend_latents({**case, **bare, "value": bare["key"]}), want)


def test_padded_queries() -> None:
    case = latent_case([2, 2], KEYS)
    padded = {**case, "layout_query": "BSND", "actual_seq_lengths_query": None}
    for name in ("query", "query_rope", "sparse_indices"):
        padded[name] = case[name].reshape(2, 2, *case[name].shape[1:])
    assert_same(attend_latents(padded).flatten(0, 1), attend_latents(case))


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("attention_mode must be one of 2, got 0", {"attention_mode": 0}),
        ("sparse_block_size must be one of 1, got 64; others are not emulated", {"sparse_block_size": 64}),
        ("sparse_mode must be one of 0, 3, got 4", {"sparse_mode": 4}),
        ("pre_tokens", {"pre_tokens": 128}),
        ("next_tokens", {"next_tokens": 0}),
        ("return_softmax_lse must be one of False", {"return_softmax_lse": True}),
        ("layout_query must be one of TND, BSND", {"layout_query": "PA_BSND"}),
        ("layout_kv must be one of PA_BSND, got BSND", {"layout_kv": "BSND"}),
        ("query_rope must be given", {"query_rope": None}),
        ("key_rope must be given", {"key_rope": None}),
        ("block_table must be given", {"block_table": None}),
        ("actual_seq_lengths_kv must be given", {"actual_seq_lengths_kv": None}),
        ("actual_seq_lengths_query must be given", {"actual_seq_lengths_query": None}),
        (r"actual_seq_lengths_query must have shape \[2\]", {"actual_seq_lengths_query": int32(5)}),
        ("must never fall", {"actual_seq_lengths_query": int32(4, 2)}),
        (
            "must name at least one request",
            {"actual_seq_lengths_query": int32(), "actual_seq_lengths_kv": int32(), "block_table": int32()[:, None]},
        ),
    ],
)
def test_a_bad_argument_is_refused(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(OperatorError, match=pattern):
        attend_latents(CASE, **changes)


def test_what_only_torch_npus_schema_has_is_refused() -> None:
    with pytest.raises(OperatorError, match="value must be given, got None; the key once more"):
        attend_latents(CASE, "npu", value=None)
    with pytest.raises(OperatorError, match="sinks must be None"):
        attend_latents(CASE, "npu", sinks=torch.zeros(2))
    without_mode = {name: value for name, value in CASE.items() if name != "attention_mode"}
    with pytest.raises(OperatorError, match="attention_mode must be one of 2, got 0"):
        attend_latents(without_mode, "npu")
    assert_same(attend_latents(without_mode), attend_latents(CASE))


BFLOAT16 = torch.bfloat16
BLOCKS = len(CASE["key"])


@pytest.mark.parametrize(
    ("pattern", "name", "shape", "dtype"),
    [
        ("query heads must be one of 1, 2, 4, 8, 16, 32, 64, 128, got 3", "query", (5, 3, 512), BFLOAT16),
        ("query heads must be one of 1, 2, 4, 8, 16, 32, 64, 128, got 12", "query", (5, 12, 512), BFLOAT16),
        (r"query must have shape \[T, N1, 512\]", "query", (5, 2, 576), BFLOAT16),
        ("query must have dtype", "query", (5, 2, 512), torch.float32),
        ("query must have no empty axis.*skip the call", "query", (0, 2, 512), BFLOAT16),
        (r"query_rope must have shape \[5, 2, 64\]", "query_rope", (5, 2, 32), BFLOAT16),
        ("query_rope must have dtype torch.bfloat16", "query_rope", (5, 2, 64), torch.float16),
        (r"sparse_indices must have shape \[5, 1, K\]", "sparse_indices", (5, 32), torch.int32),
        ("sparse_indices must have dtype torch.int32", "sparse_indices", (5, 1, 32), torch.int64),
        ("sparse_indices must have 1..2048 columns, got 0", "sparse_indices", (5, 1, 0), torch.int32),
        ("sparse_indices must have 1..2048 columns, got 2049", "sparse_indices", (5, 1, 2049), torch.int32),
        ("key must have dtype torch.bfloat16", "key", (BLOCKS, 16, 1, 512), torch.float16),
        ("key must have shape", "key", (BLOCKS, 16, 512), BFLOAT16),
        ("key must have no empty axis.*skip the call", "key", (0, 16, 1, 512), BFLOAT16),
        ("key block size must be a multiple of 16", "key", (BLOCKS, 8, 1, 512), BFLOAT16),
        (r"value must have shape \[\d+, 16, 1, 512\]", "value", (BLOCKS, 16, 1, 128), BFLOAT16),
        (r"key_rope must have shape \[\d+, 16, 1, 64\]", "key_rope", (BLOCKS, 16, 1, 128), BFLOAT16),
        (r"block_table must have shape \[2, columns\]", "block_table", (3, 9), torch.int32),
    ],
)
def test_a_bad_shape_or_dtype_is_refused(pattern: str, name: str, shape: Any, dtype: torch.dtype) -> None:
    with pytest.raises(OperatorError, match=pattern):
        attend_latents(CASE, **{name: torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize("name", ["query", "query_rope", "sparse_indices", "key", "value", "key_rope"])
def test_gaps_are_refused(name: str) -> None:
    apart = torch.stack([CASE[name], CASE[name]], dim=1)[:, 0]
    with pytest.raises(OperatorError, match=f"{name} must be contiguous"):
        attend_latents(CASE, **{name: apart})


def with_picks(row: int, *tokens: int) -> dict[str, Any]:
    """The case with other tokens in front of one row's list, and -1 behind them."""
    picks = CASE["sparse_indices"].clone()
    picks[row] = -1
    picks[row, 0, : len(tokens)] = int32(*tokens)
    return {**CASE, "sparse_indices": picks}


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("query, request 1, position 5: actual_seq_lengths_query ends at 6", {"actual_seq_lengths_query": int32(2, 6)}),
        ("actual_seq_lengths_kv, request 0, position -4", {"actual_seq_lengths_kv": int32(-4, 90)}),
        ("key, request 0, position \\d+: block_table names block 999", {"block_table": torch.full((2, 7), 999).int()}),
        ("key, request 0, position \\d+: block_table names block -1", {"block_table": torch.full((2, 7), -1).int()}),
    ],
)
def test_out_of_range(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(OutOfRangeError, match=pattern):
        attend_latents(CASE, **changes)


def test_a_token_that_the_request_does_not_have() -> None:
    with pytest.raises(OutOfRangeError, match="sparse_indices, request 0, position 1: token 40 of 40") as refusal:
        attend_latents(with_picks(0, 3, 40))
    assert (refusal.value.tensor, refusal.value.request, refusal.value.position) == ("sparse_indices", 0, 1)


def test_a_negative_number_that_is_not_minus_one() -> None:
    """Such as the indexer leaves in rows that it does not write."""
    with pytest.raises(OutOfRangeError, match="request 1, position 2: -2147483641 is neither a token nor -1"):
        attend_latents(with_picks(4, 3, 5, -(2**31) + 7))


def is_undefined(case: dict[str, Any], row: int, **changes: Any) -> bool:
    """Whether this row alone is NaN."""
    out = attend_latents(case, **changes)
    assert not torch.cat([out[:row], out[row + 1 :]]).isnan().any()
    return bool(out[row].isnan().all())


def test_no_token_at_all() -> None:
    assert is_undefined(with_picks(3), 3)


# The mistakes of callers.


def test_lengths_with_the_leading_zero() -> None:
    with pytest.raises(OperatorError, match=r"must have shape \[2\], got \[3\]; prefix sums without the leading 0"):
        attend_latents(CASE, actual_seq_lengths_query=int32(0, 2, 5))
    out = attend_latents(latent_case([2, 3], [90, 90]), actual_seq_lengths_query=int32(0, 2))  # the last one dropped
    assert out[2:].isnan().all()


def test_the_length_of_the_whole_request_on_a_rank() -> None:
    """Queries are right-aligned to the keys: row 0 of rank 0 is taken for position 72, and later tokens count."""
    split, total = 73, 145
    case = latent_case([total], [total], topk=8)
    names = ("query", "query_rope", "sparse_indices")
    local = {**case, **{name: case[name][:split] for name in names}, "actual_seq_lengths_query": int32(split)}
    assert_same(attend_latents(local, actual_seq_lengths_kv=int32(split)), attend_latents(case)[:split])
    with pytest.raises(OutOfRangeError, match="query, request 0, position 144"):
        attend_latents(local, actual_seq_lengths_query=int32(total))
    local["sparse_indices"] = local["sparse_indices"].clone()
    local["sparse_indices"][9, 0] = int32(0, 3, 9, 12, -1, -1, -1, -1)  # a choice made for the wrong position
    right = attend_latents(local, actual_seq_lengths_kv=int32(split))[9]
    wrong = attend_latents(local, actual_seq_lengths_kv=int32(total))[9]
    assert not torch.allclose(right.float(), wrong.float(), atol=0.1)


def test_a_token_twice() -> None:
    assert is_undefined(with_picks(1, 4, 7, 4), 1)


def test_a_token_behind_a_minus_one() -> None:
    """Also behind the columns that the operator reads, which it would miss: row 0 of a short request."""
    assert is_undefined(with_picks(1, 4, -1, 7), 1)
    short = latent_case([2], [3], topk=8)
    short["sparse_indices"][0, 0] = int32(-1, -1, -1, -1, -1, 0, 1, -1)
    assert is_undefined(short, 0)


def test_tokens_beyond_the_causal_bound_never_count() -> None:
    """The first of two queries stands at position 38."""
    assert_same(attend_latents(with_picks(0, 4, 39, 7)), attend_latents(with_picks(0, 4, 7)))
    assert is_undefined(with_picks(0, 39), 0)


def test_tokens_beyond_the_causal_bound_push_others_out_of_what_is_read() -> None:
    """A choice among all keys: two columns are read, and 0 stands in the third."""
    short = latent_case([3], [4], topk=4)
    short["sparse_indices"][0, 0] = int32(3, 1, 0, 2)
    assert is_undefined(short, 0)
    short["sparse_indices"][0, 0] = int32(0, 1, 3, 2)
    assert_attends(attend_latents(short), short, [3], [4])


def test_a_table_that_is_too_short() -> None:
    """Also where no chosen token needs the column that is missing."""
    case = with_picks(2, 0)
    for row in (3, 4):
        case["sparse_indices"][row, 0] = case["sparse_indices"][2, 0]
    with pytest.raises(
        OutOfRangeError, match="key, request 1, position 89: needs column 5 of block_table, which has 5"
    ):
        attend_latents(case, block_table=case["block_table"][:, :5].contiguous())


@pytest.mark.parametrize("name", ["query", "key"])
def test_rope_parts_of_one_side_swapped(name: str) -> None:
    """Halves for pairs: the numbers are there, in another order. The output is another."""
    other = CASE[f"{name}_rope"].unflatten(-1, (2, 32)).transpose(-1, -2).flatten(-2).contiguous()
    got, want = attend_latents(CASE, **{f"{name}_rope": other}), attend_latents(CASE)
    assert not torch.allclose(got.float(), want.float(), atol=0.1)


def test_rope_parts_of_query_and_key_for_one_another() -> None:
    with pytest.raises(OperatorError, match="query_rope must have shape"):
        attend_latents(CASE, query_rope=CASE["key_rope"], key_rope=CASE["query_rope"])


def test_a_value_that_is_not_the_latent() -> None:
    with pytest.raises(OperatorError, match="value must be the key, got other numbers; both are the latents"):
        attend_latents(CASE, value=CASE["value"] * 2)
