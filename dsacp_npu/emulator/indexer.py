"""The int8 lightning indexers and their metadata: scores with the operator's roundings, one request at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from dsacp_npu._tensors import torch
from dsacp_npu.emulator.checks import (
    check_block_size,
    check_one_of,
    check_tensor,
    lengths_of,
    prefix_sums,
    required,
    table_slots,
)
from dsacp_npu.emulator.errors import refusal
from dsacp_npu.emulator.fingerprint import check_metadata, metadata_tensor

__all__ = [
    "POISON",
    "indexer",
    "indexer_fake",
    "indexer_metadata",
    "plain_indexer",
    "plain_indexer_fake",
]

NAME = "npu_vllm_quant_lightning_indexer"
PLAIN_NAME = "npu_quant_lightning_indexer"
HEADS, WIDTH = 64, 128
NO_LIMIT = 2**63 - 1
POISON = -(2**31) + 7  # an index that no cache has: what an unwritten integer may be
RATIOS = (1, 2, 4, 8, 16, 32, 64, 128)
Tensor = torch.Tensor


def indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    metadata: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    cmp_ratio: int = 1,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operator as it is on A2 and A3: descending scores, ties to the lower entry, then -1.

    `actual_seq_lengths_key` counts raw tokens. Rows beyond the last query, and rows with a NaN score, are POISON.
    """
    check_one_of(NAME, "return_value", return_value, (False,))
    check_modes(NAME, query_quant_mode, key_quant_mode, sparse_count, sparse_mode, pre_tokens, next_tokens, cmp_ratio)
    starts, key_lengths, table = check_inputs(
        NAME,
        (query, key, weights, query_dequant_scale, key_dequant_scale),
        (actual_seq_lengths_query, actual_seq_lengths_key, block_table),
        (layout_query, layout_key),
    )
    metadata = required(NAME, "metadata", metadata, f"from {NAME}_metadata, for the same lengths")
    fields = metadata_fields(query.shape[-2], query.shape[-1], layout_query, layout_key, sparse_count, sparse_mode)
    check_metadata(NAME, metadata, {**fields, "cmp_ratio": cmp_ratio}, named_lengths(starts, key_lengths))
    selected = selection(
        NAME,
        (query, key, weights, query_dequant_scale, key_dequant_scale),
        (starts, key_lengths, table),
        sparse_count,
        sparse_mode,
        cmp_ratio,
    )
    return selected, query.new_empty(0, dtype=torch.float32)


def plain_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
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
    query_dtype: int | None = None,
    key_dtype: int | None = None,
) -> Tensor:
    """torch_npu's operator: the same scores without compression: one key a token, no metadata.

    Its limits are taken to be those of the other operator; only PA_BSND keys are emulated.
    """
    for name, value in (("query_dtype", query_dtype), ("key_dtype", key_dtype)):
        check_one_of(PLAIN_NAME, name, value, (None,), "only int8 is emulated")
    check_modes(PLAIN_NAME, query_quant_mode, key_quant_mode, sparse_count, sparse_mode, pre_tokens, next_tokens, 1)
    tensors = (query, key, weights, query_dequant_scale, key_dequant_scale)
    rows = check_inputs(
        PLAIN_NAME,
        tensors,
        (actual_seq_lengths_query, actual_seq_lengths_key, block_table),
        (layout_query, layout_key),
    )
    return selection(PLAIN_NAME, tensors, rows, sparse_count, sparse_mode, 1)


def check_modes(
    operator: str,
    query_quant_mode: int,
    key_quant_mode: int,
    sparse_count: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    cmp_ratio: int,
) -> None:
    """Refuse scalars that the operator does not take."""
    check_one_of(operator, "query_quant_mode", query_quant_mode, (0,))
    check_one_of(operator, "key_quant_mode", key_quant_mode, (0,))
    check_one_of(operator, "sparse_mode", sparse_mode, (0, 3))
    check_one_of(operator, "pre_tokens", pre_tokens, (NO_LIMIT,))
    check_one_of(operator, "next_tokens", next_tokens, (NO_LIMIT,))
    check_one_of(operator, "cmp_ratio", cmp_ratio, RATIOS)
    if not 1 <= sparse_count <= 2048:
        raise refusal(operator, "sparse_count", "be in 1..2048", sparse_count)


def check_inputs(
    operator: str,
    tensors: tuple[Tensor, ...],
    lengths: tuple[Tensor | None, Tensor | None, Tensor | None],
    layouts: tuple[str, str],
) -> tuple[list[int], list[int], Tensor]:
    """(query starts in the flat rows, raw key lengths, block table), once every tensor fits."""
    query, key, weights, query_scale, key_scale = tensors
    lengths_query, lengths_key, block_table = lengths
    check_one_of(operator, "layout_query", layouts[0], ("TND", "BSND"))
    check_one_of(operator, "layout_key", layouts[1], ("PA_BSND",))
    rows = query.shape[:1] if layouts[0] == "TND" else query.shape[:2]
    check_tensor(operator, "query", query, (torch.int8,), (*rows, HEADS, WIDTH))
    check_tensor(operator, "key", key, (torch.int8,), ("blocks", "block_size", 1, WIDTH))
    for name, tensor in (("query", query), ("key", key)):
        if 0 in tensor.shape:
            raise refusal(operator, name, "have no empty axis", list(tensor.shape), "skip the call")
    check_block_size(operator, "key", key)
    check_tensor(operator, "weights", weights, (torch.float16,), (*rows, HEADS))
    check_tensor(operator, "query_dequant_scale", query_scale, (torch.float16,), (*rows, HEADS))
    check_tensor(operator, "key_dequant_scale", key_scale, (torch.float16,), (*key.shape[:2], 1))
    lengths_key = required(operator, "actual_seq_lengths_key", lengths_key)
    key_lengths = lengths_of(operator, "actual_seq_lengths_key", lengths_key, lengths_key.shape[0])
    starts = query_starts(operator, query, layouts[0], lengths_query, len(key_lengths))
    block_table = required(operator, "block_table", block_table)
    check_tensor(operator, "block_table", block_table, (torch.int32,), (len(key_lengths), "columns"))
    return starts, key_lengths, block_table


def query_starts(
    operator: str, query: Tensor | None, layout_query: str, lengths: Tensor | None, batch: int, longest: int = 0
) -> list[int]:
    """Where the queries of each request start; the prefix sums may come with or without the leading 0."""
    if layout_query == "BSND":
        longest = longest if query is None else query.shape[1]
        if query is not None and query.shape[0] != batch:
            raise refusal(operator, "actual_seq_lengths_key", f"have shape [{query.shape[0]}]", [batch])
        if lengths is not None:
            used = lengths_of(operator, "actual_seq_lengths_query", lengths, batch)
            if any(length != longest for length in used):
                raise refusal(operator, "actual_seq_lengths_query", f"all be {longest}", used, "use TND for others")
        return [request * longest for request in range(batch + 1)]
    lengths = required(operator, "actual_seq_lengths_query", lengths, "with TND queries")
    if lengths.shape != (batch + 1,):
        check_tensor(operator, "actual_seq_lengths_query", lengths, (torch.int32,), (batch,))
        lengths = torch.cat([lengths.new_zeros(1), lengths])
    return prefix_sums(operator, "actual_seq_lengths_query", lengths, 2**31 if query is None else len(query), "query")


def ends_of_queries(operator: str, query: Tensor, layout_query: str, lengths: Tensor | None, batch: int) -> list[int]:
    """`query_starts` for operators that take the prefix sums without the leading 0 only: with it they see one more."""
    if batch == 0:
        raise refusal(operator, "actual_seq_lengths_query", "name at least one request", [0], "skip the call")
    if layout_query == "TND" and lengths is not None and lengths.shape == (batch + 1,):
        hint = "prefix sums without the leading 0"
        raise refusal(operator, "actual_seq_lengths_query", f"have shape [{batch}]", [batch + 1], hint)
    return query_starts(operator, query, layout_query, lengths, batch)


def selection(
    operator: str,
    tensors: tuple[Tensor, ...],
    extents: tuple[list[int], list[int], Tensor],
    sparse_count: int,
    sparse_mode: int,
    cmp_ratio: int,
) -> Tensor:
    """int32[..., 1, sparse_count]: the best entries of every query row, by int8 scores."""
    query, key, weights, query_scale, key_scale = tensors
    queries, gains = query.reshape(-1, HEADS, WIDTH), (weights * query_scale).reshape(-1, HEADS)  # both fp16

    def scores_of(rows: slice, place: tuple[Tensor, Tensor]) -> Tensor:
        return index_scores(queries[rows], gains[rows], key[place][:, 0], key_scale[place][:, 0])

    return best_keys(operator, (query, key), extents, scores_of, sparse_count, sparse_mode, cmp_ratio)


def best_keys(
    operator: str,
    tensors: tuple[Tensor, Tensor],
    extents: tuple[list[int], list[int], Tensor],
    scores_of: Callable[[slice, tuple[Tensor, Tensor]], Tensor],
    sparse_count: int,
    sparse_mode: int,
    cmp_ratio: int,
) -> Tensor:
    """int32[..., 1, sparse_count]: the keys of highest score of every query row, then -1."""
    query, key = tensors
    starts, key_lengths, table = extents
    out = query.new_full((*query.shape[:-2], 1, sparse_count), POISON, dtype=torch.int32)
    results = out.view(-1, sparse_count)
    for request, (start, stop) in enumerate(pairwise(starts)):
        if start == stop:
            continue
        held = key_lengths[request] // cmp_ratio
        entries = torch.arange(held)
        place = table_slots(operator, ("key", key), ("block_table", table), request, entries)
        scores = scores_of(slice(start, stop), place)
        for row in range(start, stop):
            position = key_lengths[request] - (stop - row)
            visible = held if sparse_mode == 0 else max((position + 1) // cmp_ratio, 0)
            seen = scores[row - start, :visible]
            count = min(sparse_count, visible)
            results[row, count:] = -1
            if not seen.isnan().any():  # else the order is undefined
                results[row, :count] = seen.argsort(descending=True, stable=True)[:count].int()
    return out


def index_scores(queries: Tensor, gains: Tensor, keys: Tensor, key_scales: Tensor) -> Tensor:
    """float32 [rows, keys]: int32 dots, relu(q . k) / 1024 in float16, summed over heads in float32."""
    total = torch.zeros(len(queries), len(keys))
    transposed = keys.float().T  # products of 128 int8 pairs are exact in float32
    for head in range(HEADS):
        dots = queries[:, head].float() @ transposed
        hits = (dots.clamp(min=0) / 1024).half()
        total = total + hits.float() * gains[:, head, None].float()
    return total * key_scales.float()


def metadata_fields(
    heads: int, width: int, layout_query: str, layout_key: str, sparse_count: int, sparse_mode: int
) -> dict[str, int | str]:
    """What the work split depends on, beside lengths and ratio."""
    return {
        "num_heads_q": heads,
        "head_dim": width,
        "layout_query": layout_query,
        "layout_key": layout_key,
        "sparse_count": sparse_count,
        "sparse_mode": sparse_mode,
    }


def named_lengths(starts: list[int], key_lengths: list[int]) -> dict[str, list[int]]:
    """Query and key lengths under the names of an error text."""
    return {"query lengths": [end - start for start, end in pairwise(starts)], "key lengths": key_lengths}


def indexer_metadata(
    num_heads_q: int,
    num_heads_k: int,
    head_dim: int,
    query_quant_mode: int,
    key_quant_mode: int,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    batch_size: int = 0,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    cmp_ratio: int = 1,
    device: str = "npu",
) -> Tensor:
    """The metadata operator: int32[1024] that fits one set of lengths, heads, layouts and counts."""
    operator = f"{NAME}_metadata"
    check_one_of(operator, "num_heads_k", num_heads_k, (1,))
    check_one_of(operator, "layout_query", layout_query, ("TND", "BSND"))
    check_one_of(operator, "layout_key", layout_key, ("PA_BSND",))
    check_modes(
        operator, query_quant_mode, key_quant_mode, sparse_count, sparse_mode, pre_tokens, next_tokens, cmp_ratio
    )
    keys = required(operator, "actual_seq_lengths_key", actual_seq_lengths_key)
    key_lengths = lengths_of(operator, "actual_seq_lengths_key", keys, keys.shape[0])
    starts = query_starts(
        operator, None, layout_query, actual_seq_lengths_query, len(key_lengths), longest=max_seqlen_q
    )
    fields = metadata_fields(num_heads_q, head_dim, layout_query, layout_key, sparse_count, sparse_mode)
    return metadata_tensor(NAME, {**fields, "cmp_ratio": cmp_ratio}, named_lengths(starts, key_lengths))


def indexer_fake(*, query: Tensor, sparse_count: int, **_: object) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the operator's results."""
    return plain_indexer_fake(query=query, sparse_count=sparse_count), query.new_empty(0, dtype=torch.float32)


def plain_indexer_fake(*, query: Tensor, sparse_count: int, **_: object) -> Tensor:
    """Shape and dtype of torch_npu's result."""
    return query.new_empty((*query.shape[:-2], 1, sparse_count), dtype=torch.int32)
