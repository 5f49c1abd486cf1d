"""What `npu_sparse_attn_sharedkv` and its metadata refuse, and what lies out of range."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsacp_npu.emulator import OperatorError, OutOfRangeError, StaleMetadataError
from tests.emulator.common import (
    attend,
    attention_case,
    attention_metadata,
    indexer_case,
    indexer_metadata,
    int32,
    ops,
    sums,
)

CASE = {ratio: attention_case(ratio, [2, 3], [40, 300]) for ratio in (1, 4, 128)}


def refused(pattern: str, ratio: int = 4, kind: type[Exception] = OperatorError, **changes: Any) -> None:
    """A call with good metadata and one bad argument is refused, in these words."""
    metadata = attention_metadata(CASE[ratio])
    with pytest.raises(kind, match=pattern):
        attend(CASE[ratio], **{"metadata": metadata, **changes})


@pytest.mark.parametrize(
    "name", ["sinks", "metadata", "ori_kv", "ori_block_table", "cmp_block_table", "cu_seqlens_q", "seqused_kv"]
)
def test_a_missing_tensor_is_refused(name: str) -> None:
    refused(f"{name} must be given", **{name: None})


def test_indices_without_entries_are_refused() -> None:
    refused("cmp_kv must be given with cmp_sparse_indices", cmp_kv=None)


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("cmp_ratio must be one of 4, 128, got 2", {"cmp_ratio": 2}),
        ("ori_mask_mode must be one of 4, got 3", {"ori_mask_mode": 3}),
        ("cmp_mask_mode must be one of 3, got 0", {"cmp_mask_mode": 0}),
        ("ori_win_left and ori_win_right must be >= 0", {"ori_win_left": -1}),
        ("ori_win_left and ori_win_right must be >= 0", {"ori_win_right": -1}),
        ("layout_q must be one of TND, BSND", {"layout_q": "BNSD"}),
        ("layout_kv must be PA_ND or TND with TND queries, got BSND", {"layout_kv": "BSND"}),
        ("return_softmax_lse must be False", {"return_softmax_lse": True}),
        ("seqused_q must be None with TND queries", {"seqused_q": int32(2, 3)}),
        ("ori_sparse_indices must be None", {"ori_sparse_indices": torch.zeros(5, 1, 128, dtype=torch.int32)}),
        ("cu_seqlens_q must start at 0", {"cu_seqlens_q": int32(2, 2, 5)}),
        ("cu_seqlens_q must never fall, got 4 then 3 at request 1", {"cu_seqlens_q": int32(0, 4, 3)}),
        (r"ori_block_table must have shape \[3, columns\]", {"cu_seqlens_q": int32(0, 2, 4, 5)}),
        (r"seqused_kv must have shape \[2\]", {"seqused_kv": int32(40, 300, 1)}),
        ("seqused_kv must have dtype", {"seqused_kv": torch.tensor([40, 300])}),
        (r"sinks must have shape \[4\]", {"sinks": torch.zeros(3)}),
        ("sinks must have dtype torch.float32", {"sinks": torch.zeros(4, dtype=torch.bfloat16)}),
        (r"metadata must have shape \[1024\]", {"metadata": torch.ones(8, dtype=torch.int32)}),
    ],
)
def test_a_bad_argument_is_refused(pattern: str, changes: dict[str, Any]) -> None:
    refused(pattern, **changes)


@pytest.mark.parametrize(
    ("pattern", "name", "shape", "dtype"),
    [
        ("q must have no empty axis.*skip the call", "q", (0, 4, 512), torch.bfloat16),
        ("q heads must be a multiple of 4 up to 128, got 6", "q", (5, 6, 512), torch.bfloat16),
        ("q heads must be a multiple of 4 up to 128, got 132", "q", (5, 132, 512), torch.bfloat16),
        (r"q must have shape \[T, N1, 512\]", "q", (5, 4, 256), torch.bfloat16),
        ("q must have dtype", "q", (5, 4, 512), torch.float32),
        ("ori_kv must have dtype torch.bfloat16", "ori_kv", (40, 16, 1, 512), torch.float16),
        (r"ori_kv must have shape \[blocks, block_size, 1, 512\]", "ori_kv", (40, 16, 512), torch.bfloat16),
        ("ori_kv block size must be a multiple of 16", "ori_kv", (40, 24, 1, 512), torch.bfloat16),
        ("cmp_kv block size must be a multiple of 16", "cmp_kv", (2, 1040, 1, 512), torch.bfloat16),
        ("cmp_kv must have dtype torch.bfloat16", "cmp_kv", (40, 16, 1, 512), torch.float16),
        (r"cmp_sparse_indices must have shape \[5, 1, K\]", "cmp_sparse_indices", (4, 1, 512), torch.int32),
        ("cmp_sparse_indices must have dtype torch.int32", "cmp_sparse_indices", (5, 1, 512), torch.int64),
        (r"cmp_block_table must have shape \[2, columns\]", "cmp_block_table", (3, 9), torch.int32),
    ],
)
def test_a_bad_shape_or_dtype_is_refused(pattern: str, name: str, shape: Any, dtype: torch.dtype) -> None:
    refused(pattern, **{name: torch.zeros(shape, dtype=dtype)})


def test_gaps_within_a_block_are_refused() -> None:
    gaps = torch.stack([CASE[1]["ori_kv"]] * 2, dim=2)[:, :, 0]
    refused("ori_kv must be contiguous within a block", 1, ori_kv=gaps)


def test_offsets_with_padded_queries_are_refused() -> None:
    case = attention_case(1, [2], [9])
    with pytest.raises(OperatorError, match="cu_seqlens_q must be None with BSND queries"):
        attend(case, q=case["q"][None], layout_q="BSND", metadata=attention_metadata(case))


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("num_heads_kv must be one of 1", {"num_heads_kv": 2}),
        ("ori_mask_mode", {"ori_mask_mode": 0}),
        ("cmp_mask_mode", {"cmp_mask_mode": 4}),
        ("must be >= 0", {"ori_win_left": -1}),
        ("cmp_topk must be one of 0, 512, 1024, got 256", {"cmp_topk": 256}),
        ("cmp_ratio must be one of 4, 128, got 8", {"cmp_ratio": 8}),
        ("cu_seqlens_q must be given", {"cu_seqlens_q": None}),
        ("seqused_kv must be given", {"seqused_kv": None}),
        ("layout_kv must be PA_ND or TND", {"layout_kv": "BSND"}),
        ("num_heads_q must be one of 32, 64, got 4", {"layout_kv": "BSND", "layout_q": "BSND"}),
    ],
)
def test_bad_metadata_arguments_are_refused(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(OperatorError, match=pattern):
        attention_metadata(CASE[4], **changes)


def test_metadata_needs_no_tensor() -> None:
    """Then there is no device to choose an operator by."""
    metadata = ops().npu_sparse_attn_sharedkv_metadata(64, 1, 512, layout_kv="BSND", has_cmp_kv=False, batch_size=1)
    assert (metadata.shape, metadata.dtype) == ((1024,), torch.int32)


@pytest.mark.parametrize(
    ("tensor", "request_", "position", "changes"),
    [
        ("q", 1, 5, {"cu_seqlens_q": int32(0, 2, 6)}),
        ("ori_kv", 1, 320, {"seqused_kv": int32(40, 400)}),
        ("seqused_kv", 0, -1, {"seqused_kv": int32(-1, 300)}),
    ],
)
def test_lengths_out_of_range(tensor: str, request_: int, position: int, changes: dict[str, Any]) -> None:
    """The metadata is that of the wrong lengths, too: nothing but the range tells."""
    with pytest.raises(OutOfRangeError, match=rf"{tensor}, request {request_}, position {position}") as caught:
        attend(CASE[1], metadata=attention_metadata({**CASE[1], **changes}), **changes)
    assert (caught.value.tensor, caught.value.request, caught.value.position) == (tensor, request_, position)


@pytest.mark.parametrize("block", [-1, 10_000])
@pytest.mark.parametrize(("ratio", "prefix", "position"), [(1, "ori", 288), (4, "cmp", 64), (128, "cmp", 0)])
def test_a_block_outside_of_the_cache(ratio: int, prefix: str, position: int, block: int) -> None:
    case = CASE[ratio]
    table = case[f"{prefix}_block_table"].clone()
    table[1, position // 16] = block
    with pytest.raises(OutOfRangeError, match=f"{prefix}_kv, request 1, .*names block {block}, and there are"):
        attend(case, **{f"{prefix}_block_table": table})


def test_a_table_that_is_too_short() -> None:
    table = CASE[128]["cmp_block_table"][:, :0]
    refused(
        r"cmp_kv, request 1, position 0: needs column 0 of cmp_block_table, which has 0", 128, cmp_block_table=table
    )


@pytest.mark.parametrize("length", [41, 30])
def test_packed_keys_end_with_their_request(length: int) -> None:
    case = {**CASE[1], "ori_kv": torch.zeros(340, 1, 512, dtype=torch.bfloat16), "layout_kv": "TND"}
    case |= {"cu_seqlens_ori_kv": sums([length, 300]), "seqused_kv": int32(41, 300)}
    if length == 41:
        with pytest.raises(OutOfRangeError, match="ori_kv, request 1, position 340: cu_seqlens_ori_kv ends at 341"):
            attend(case)
    else:
        with pytest.raises(OutOfRangeError, match="request 0, position 30: cu_seqlens_ori_kv gives it 30 rows"):
            attend(case)


@pytest.mark.parametrize("entry", [-1, -2, 75, 2**30])
def test_an_index_outside_of_the_request_within_the_prefix(entry: int) -> None:
    """-1 is no mask there: on the device the rows behind it move up, or stale data is read."""
    picks = CASE[4]["cmp_sparse_indices"].clone()
    picks[4, 0, 3] = entry
    refused(
        f"cmp_sparse_indices, request 1, position 3: entry {entry} of 75", 4, OutOfRangeError, cmp_sparse_indices=picks
    )


@pytest.mark.parametrize("kind", ["future", "repeated"])
def test_a_future_or_repeated_entry_is_undefined(kind: str) -> None:
    picks = CASE[4]["cmp_sparse_indices"].clone()
    picks[2, 0, 0] = 74 if kind == "future" else int(picks[2, 0, 1])  # position 297 sees 74 entries, 299 sees 75
    out = attend(CASE[4], cmp_sparse_indices=picks)
    assert out[2].isnan().all()
    assert not out[torch.arange(5) != 2].isnan().any()


STALE = [
    (r"key lengths\[1\] 301, got 300", {"seqused_kv": int32(40, 301)}),
    (r"query lengths\[0\] 1, got 2; query lengths\[1\]|query lengths\[0\] 1, got 2", {"cu_seqlens_q": int32(0, 1, 5)}),
    ("1 query lengths, got 2; 1 key lengths, got 2", {"cu_seqlens_q": int32(0, 5), "seqused_kv": int32(300)}),
    ("num_heads_q 8, got 4", {"num_heads_q": 8}),
    ("head_dim 576, got 512", {"head_dim": 576}),
    ("cmp_topk 1024, got 512", {"cmp_topk": 1024}),
    ("cmp_topk 0, got 512", {"cmp_topk": 0}),
    ("cmp_ratio 128, got 4", {"cmp_ratio": 128}),
    ("has_cmp_kv 0, got True", {"has_cmp_kv": False}),
    ("ori_win_left 128, got 127", {"ori_win_left": 128}),
    ("ori_win_right 1, got 0", {"ori_win_right": 1}),
]


@pytest.mark.parametrize(("pattern", "changes"), STALE)
def test_stale_metadata_says_what_differs(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(StaleMetadataError, match=pattern):
        attend(CASE[4], metadata=attention_metadata(CASE[4], **changes))


def test_metadata_of_another_layout_is_stale() -> None:
    changes = {"layout_kv": "TND", "cu_seqlens_ori_kv": int32(0, 40, 340)}
    with pytest.raises(StaleMetadataError, match="layout_kv TND, got PA_ND"):
        attend(CASE[4], metadata=attention_metadata(CASE[4], **changes))


def test_zeros_are_stale_metadata() -> None:
    """What a fallback gives that has no metadata operator."""
    refused("all zeros", kind=StaleMetadataError, metadata=torch.zeros(1024, dtype=torch.int32))


def test_metadata_of_the_indexer_is_stale() -> None:
    metadata = indexer_metadata(indexer_case([2, 3], [40, 300]))
    refused("metadata is not from npu_sparse_attn_sharedkv_metadata", kind=StaleMetadataError, metadata=metadata)


def test_many_requests_are_told_apart() -> None:
    """Also where the 1024 words do not hold all lengths."""
    keys = [1 + request % 3 for request in range(420)]
    case = attention_case(1, [1] * 420, keys)
    metadata = attention_metadata(case)
    assert not attend(case, metadata=metadata).isnan().any()
    lengths = case["seqused_kv"].clone()
    lengths[410] += 1
    with pytest.raises(StaleMetadataError, match="other key lengths after request 399"):
        attend(case, metadata=metadata, seqused_kv=lengths)


def test_metadata_serves_all_layers_of_a_step() -> None:
    metadata = attention_metadata(CASE[4])
    other = attention_case(4, [2, 3], [40, 300], seed=9)
    assert not attend(CASE[4], metadata=metadata).isnan().any()
    assert not attend(other, metadata=metadata).isnan().any()
