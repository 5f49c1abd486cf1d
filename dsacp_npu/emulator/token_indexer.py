"""V3.2's indexers, which choose tokens: bfloat16 or float16 vectors, and the int8 form without metadata.

Limits, with their sources; the narrower one holds where sources differ, and what none of them settles is refused:

* 64 query heads of 128 channels, one key head. Older host code and MindSpore's page ask for 64, torch_npu's page and
  newer host code take up to 64;
* vectors in bfloat16 or float16, weights in the same dtype. float32 weights, on torch_npu's page, are not in older host
  code;
* pages of a multiple of 16 rows up to 1024 (all sources). Keys in TND and BSND are not emulated;
* contiguous queries, keys and weights (torch_npu's page, for A2 and A3);
* sparse_count in 1..2048. Multiples of 1024 up to 8192 are in newer host code only;
* sparse_mode 0 or 3, pre_tokens and next_tokens 2^63 - 1 (all sources);
* query lengths of TND as prefix sums without the leading 0, as many as key lengths and table rows (host code). Padded
  queries are emulated without padding only: all lengths are that of the axis;
* return_value False: torch_npu's page has it for training and keys without pages only;
* nothing empty (all sources).

Scores are float32: relu of the dot, times the weight, summed over heads (kernel of A2 and A3; ops-transformer's own
test computes the same). Best first, then -1; rows that see nothing are all -1 (kernel). Taken on: equal scores go to
the lower token, as that test sorts; rows beyond the last offset are not written; a NaN score leaves the row undefined.
"""

from __future__ import annotations

from dsacp_npu._tensors import torch
from dsacp_npu.emulator.checks import (
    HALVES,
    check_block_size,
    check_contiguous,
    check_one_of,
    check_tensor,
    lengths_of,
    required,
)
from dsacp_npu.emulator.errors import refusal
from dsacp_npu.emulator.indexer import (
    HEADS,
    NO_LIMIT,
    WIDTH,
    best_keys,
    check_inputs,
    check_modes,
    ends_of_queries,
    selection,
)

__all__ = ["coded_token_indexer", "token_indexer", "token_indexer_fake"]

NAME, CODED_NAME = "npu_lightning_indexer", "npu_lightning_indexer_quant"
Tensor = torch.Tensor


def token_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """`npu_lightning_indexer`: the tokens of highest score, within the request, for every query row."""
    check_one_of(NAME, "return_value", return_value, (False,))
    check_modes(NAME, 0, 0, sparse_count, sparse_mode, pre_tokens, next_tokens, 1)
    check_one_of(NAME, "layout_query", layout_query, ("TND", "BSND"))
    check_one_of(NAME, "layout_key", layout_key, ("PA_BSND",), "others are not emulated")
    rows = query.shape[:1] if layout_query == "TND" else query.shape[:2]
    check_tensor(NAME, "query", query, HALVES, (*rows, HEADS, WIDTH))
    check_tensor(NAME, "key", key, (query.dtype,), ("blocks", "block_size", 1, WIDTH))
    check_tensor(NAME, "weights", weights, (query.dtype,), (*rows, HEADS))
    for name, tensor in (("query", query), ("key", key)):
        if 0 in tensor.shape:
            raise refusal(NAME, name, "have no empty axis", list(tensor.shape), "skip the call")
    check_block_size(NAME, "key", key)
    check_contiguous(NAME, query=query, key=key, weights=weights)
    lengths = required(NAME, "actual_seq_lengths_key", actual_seq_lengths_key)
    key_lengths = lengths_of(NAME, "actual_seq_lengths_key", lengths, lengths.shape[0])
    starts = ends_of_queries(NAME, query, layout_query, actual_seq_lengths_query, len(key_lengths))
    table = required(NAME, "block_table", block_table)
    check_tensor(NAME, "block_table", table, (torch.int32,), (len(key_lengths), "columns"))
    queries, gains = query.reshape(-1, HEADS, WIDTH), weights.reshape(-1, HEADS)

    def scores_of(rows: slice, place: tuple[Tensor, Tensor]) -> Tensor:
        return token_scores(queries[rows], gains[rows], key[place][:, 0])

    chosen = best_keys(NAME, (query, key), (starts, key_lengths, table), scores_of, sparse_count, sparse_mode, 1)
    return chosen, query.new_empty(0)


def token_scores(queries: Tensor, gains: Tensor, keys: Tensor) -> Tensor:
    """float32 [rows, keys]: relu(q . k) times the weight, summed over heads."""
    total = torch.zeros(len(queries), len(keys))
    transposed = keys.float().T
    for head in range(HEADS):
        total = total + (queries[:, head].float() @ transposed).clamp(min=0) * gains[:, head, None].float()
    return total


def coded_token_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
) -> Tensor:
    """`npu_lightning_indexer_quant`: the same choice by the int8 scores of `npu_vllm_quant_lightning_indexer`.

    int8 vectors, float16 weights and scales (its host code); 64 heads, as the other int8 operators have them.
    """
    check_modes(CODED_NAME, query_quant_mode, key_quant_mode, sparse_count, sparse_mode, NO_LIMIT, NO_LIMIT, 1)
    if actual_seq_lengths_key is not None:
        batch = len(actual_seq_lengths_key)
        ends_of_queries(CODED_NAME, query, layout_query, actual_seq_lengths_query, batch)
    tensors = (query, key, weights, query_dequant_scale, key_dequant_scale)
    lengths = (actual_seq_lengths_query, actual_seq_lengths_key, block_table)
    extents = check_inputs(CODED_NAME, tensors, lengths, (layout_query, layout_key))
    return selection(CODED_NAME, tensors, extents, sparse_count, sparse_mode, 1)


def token_indexer_fake(*, query: Tensor, sparse_count: int, **_: object) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the operator's results."""
    chosen = query.new_empty((*query.shape[:-2], 1, sparse_count), dtype=torch.int32)
    return chosen, query.new_empty(0)
