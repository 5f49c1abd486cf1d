"""`npu_sparse_flash_attention`: one query row at a time over the latents that it chose, in float32, rounded once.

Limits, with their sources; the narrower one holds where sources differ, and what none of them settles is refused:

* 1, 2, 4, 8, 16, 32, 64 or 128 query heads (torch_npu's page; newer host code takes all of 1..64), one key head;
* 512 channels and 64 rope channels, both parts given (torch_npu's page; newer host code also takes neither rope part);
* one dtype, bfloat16 or float16 (all sources);
* pages of a multiple of 16 rows up to 1024 (all sources). Keys in TND and BSND are not emulated;
* contiguous tensors (torch_npu's page);
* attention_mode 2: key and value are the same data (torch_npu's page). The kernel of A2 and A3 reads the key for both;
  a value that differs is refused;
* sparse_block_size 1. Powers of 2 up to 128 are documented for A2 and A3, and not emulated;
* sparse_mode 0 or 3, pre_tokens and next_tokens 2^63 - 1 (all sources); sinks None, which no page explains;
* at most 2048 indices a row: no source has a bound, and the indexers give no more;
* query lengths of TND as prefix sums without the leading 0, as many as key lengths and table rows (host code). Padded
  queries are emulated without padding only: all lengths are that of the axis;
* a table with a column for every page of the longest request (all pages; the kernel looks up chosen tokens only). Held
  against requests with queries;
* return_softmax_lse False: torch_npu's page has it for training and keys without pages only, vllm-ascend's also for
  inference with pages;
* nothing empty (all sources).

A row of indices: tokens first, then -1 (all sources). Queries are right-aligned to the keys; in mode 3 a row at
position p reads the first ``min(K, p + 1)`` columns, and skips tokens after p among them (kernel). Such tokens never
count, but may push others out of what is read: sgl-kernel-npu's test attends to those, the kernel does not, so such a
row is NaN here. NaN also: a token behind a -1, a token twice, no token at all (vllm-ascend's newest page promises 0, in
mode 0), and rows beyond the last offset, which are not written. Rows before position 0 are zeros (kernel). A token that
the request does not have is an error, and so is a negative number other than -1 in what is read.
"""

from __future__ import annotations

from itertools import pairwise

from dsacp_npu._tensors import torch
from dsacp_npu.emulator.checks import (
    HALVES,
    KeyRows,
    check_block_size,
    check_contiguous,
    check_one_of,
    check_tensor,
    lengths_of,
    required,
)
from dsacp_npu.emulator.errors import out_of_range, refusal
from dsacp_npu.emulator.indexer import NO_LIMIT, ends_of_queries

__all__ = ["latent_attention", "latent_attention_fake", "plain_latent_attention"]

NAME = "npu_sparse_flash_attention"
WIDTH, ROPE_WIDTH = 512, 64
HEAD_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
MOST = 2048
Tensor = torch.Tensor


def latent_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    attention_mode: int = 2,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """vllm-ascend's operator: ``softmax(scale * (q . latent + q_rope . rope key)) latent`` over the chosen tokens."""
    check_modes(sparse_block_size, sparse_mode, pre_tokens, next_tokens, attention_mode, return_softmax_lse)
    query_rope = required(NAME, "query_rope", query_rope, "attention_mode 2 has the rope parts apart")
    key_rope = required(NAME, "key_rope", key_rope, "attention_mode 2 has the rope parts apart")
    check_queries(query, query_rope, sparse_indices, layout_query)
    check_keys(query, key, value, key_rope, layout_kv)
    check_contiguous(NAME, query=query, query_rope=query_rope, sparse_indices=sparse_indices)
    lengths = required(NAME, "actual_seq_lengths_kv", actual_seq_lengths_kv)
    kv_lengths = lengths_of(NAME, "actual_seq_lengths_kv", lengths, lengths.shape[0])
    starts = ends_of_queries(NAME, query, layout_query, actual_seq_lengths_query, len(kv_lengths))
    table = required(NAME, "block_table", block_table)
    check_tensor(NAME, "block_table", table, (torch.int32,), (len(kv_lengths), "columns"))
    latents, rope_keys = (
        KeyRows(NAME, name, cache, layout_kv, table=("block_table", table))
        for name, cache in (("key", key), ("key_rope", key_rope))
    )
    out = torch.full_like(query, torch.nan)
    queries = torch.cat([query, query_rope], dim=-1).reshape(-1, query.shape[-2], WIDTH + ROPE_WIDTH)
    results, picks = out.view(-1, *query.shape[-2:]), sparse_indices.reshape(-1, sparse_indices.shape[-1])
    for request, (start, stop) in enumerate(pairwise(starts)):
        held = kv_lengths[request]
        if start < stop:
            check_reach(table, request, held, key.shape[1])
        for row in range(start, stop):
            limit = held if sparse_mode == 0 else held - (stop - row) + 1
            if limit <= 0:
                results[row] = 0
                continue
            tokens = counted_tokens(picks[row].long(), request, limit, held)
            if tokens is not None:
                rows = torch.cat([part.read(request, tokens)[:, 0].float() for part in (latents, rope_keys)], dim=1)
                logits = (queries[row].float() @ rows.T) * scale_value
                results[row] = (torch.softmax(logits, dim=1) @ rows[:, :WIDTH]).to(query.dtype)
    nothing = query.new_empty(0, dtype=torch.float32)
    return out, nothing, nothing.clone()


def plain_latent_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch_npu's operator of the same name, whose default attention_mode 0 is refused."""
    if sinks is not None:
        raise refusal(NAME, "sinks", "be None", "a tensor", "not emulated")
    return latent_attention(
        query,
        key,
        required(NAME, "value", value, "the key once more"),
        sparse_indices,
        scale_value,
        block_table=block_table,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
        query_rope=query_rope,
        key_rope=key_rope,
        sparse_block_size=sparse_block_size,
        layout_query=layout_query,
        layout_kv=layout_kv,
        sparse_mode=sparse_mode,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        attention_mode=attention_mode,
        return_softmax_lse=return_softmax_lse,
    )


def check_modes(
    sparse_block_size: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    return_softmax_lse: bool,
) -> None:
    """Refuse scalars that the operator does not take."""
    check_one_of(NAME, "attention_mode", attention_mode, (2,), "absorbed MLA")
    check_one_of(NAME, "sparse_block_size", sparse_block_size, (1,), "others are not emulated")
    check_one_of(NAME, "sparse_mode", sparse_mode, (0, 3))
    check_one_of(NAME, "pre_tokens", pre_tokens, (NO_LIMIT,))
    check_one_of(NAME, "next_tokens", next_tokens, (NO_LIMIT,))
    check_one_of(NAME, "return_softmax_lse", return_softmax_lse, (False,), "with pages the sources differ")


def check_queries(query: Tensor, query_rope: Tensor, sparse_indices: Tensor, layout_query: str) -> None:
    """Refuse queries and indices of a shape, dtype or layout that the operator does not take."""
    check_one_of(NAME, "layout_query", layout_query, ("TND", "BSND"))
    axes = ("T", "N1") if layout_query == "TND" else ("B", "S", "N1")
    check_tensor(NAME, "query", query, HALVES, (*axes, WIDTH))
    if 0 in query.shape:
        raise refusal(NAME, "query", "have no empty axis", list(query.shape), "skip the call")
    check_one_of(NAME, "query heads", query.shape[-2], HEAD_COUNTS)
    check_tensor(NAME, "query_rope", query_rope, (query.dtype,), (*query.shape[:-1], ROPE_WIDTH))
    check_tensor(NAME, "sparse_indices", sparse_indices, (torch.int32,), (*query.shape[:-2], 1, "K"))
    if not 1 <= sparse_indices.shape[-1] <= MOST:
        raise refusal(NAME, "sparse_indices", f"have 1..{MOST} columns", sparse_indices.shape[-1])


def check_keys(query: Tensor, key: Tensor, value: Tensor, key_rope: Tensor, layout_kv: str) -> None:
    """Refuse caches of a shape, dtype or layout that the operator does not take, and a value of its own."""
    check_one_of(NAME, "layout_kv", layout_kv, ("PA_BSND",), "others are not emulated")
    check_tensor(NAME, "key", key, (query.dtype,), ("blocks", "block_size", 1, WIDTH))
    if 0 in key.shape:
        raise refusal(NAME, "key", "have no empty axis", list(key.shape), "skip the call")
    check_block_size(NAME, "key", key)
    check_tensor(NAME, "value", value, (query.dtype,), tuple(key.shape))
    check_tensor(NAME, "key_rope", key_rope, (query.dtype,), (*key.shape[:3], ROPE_WIDTH))
    check_contiguous(NAME, key=key, value=value, key_rope=key_rope)
    same = value.data_ptr() == key.data_ptr() or torch.equal(value.view(torch.int16), key.view(torch.int16))
    if not same:
        raise refusal(NAME, "value", "be the key", "other numbers", "both are the latents")


def check_reach(table: Tensor, request: int, held: int, block_size: int) -> None:
    """Refuse a table that does not reach a request's last key."""
    if held > table.shape[1] * block_size:
        why = f"needs column {(held - 1) // block_size} of block_table, which has {table.shape[1]}"
        raise out_of_range(NAME, "key", request, held - 1, why)


def counted_tokens(picks: Tensor, request: int, limit: int, held: int) -> Tensor | None:
    """The tokens of a row that count, in the order of the row; None where the result is undefined."""
    read = min(limit, len(picks))
    strange = (picks[:read] < -1).nonzero()
    if len(strange):
        column = int(strange[0, 0])
        raise out_of_range(NAME, "sparse_indices", request, column, f"{int(picks[column])} is neither a token nor -1")
    ended = (picks < 0).nonzero()
    end = int(ended[0, 0]) if len(ended) else len(picks)
    outside = (picks[:end] >= held).nonzero()
    if len(outside):
        column = int(outside[0, 0])
        raise out_of_range(NAME, "sparse_indices", request, column, f"token {int(picks[column])} of {held}")
    seen = (picks >= 0) & (picks < limit)
    tokens = picks[:read][seen[:read]]
    lost = bool(seen[read:].any() or seen[end:].any())
    if lost or len(tokens) == 0 or len(tokens.unique()) < len(tokens):
        return None
    return tokens


def latent_attention_fake(*, query: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of the operator's results."""
    nothing = query.new_empty(0, dtype=torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), nothing, nothing.clone()
