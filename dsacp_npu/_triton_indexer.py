"""The lightning indexer over Triton: scores and choices of a slice of queries at a time, so that memory stays bounded.

Lengths stay on the device. How many queries a slice has follows from how many entries the tables can name, which the
host knows.
"""

from __future__ import annotations

from dsacp_npu._index_calls import check_call, coded_queries, parts_of, slots_of_rows
from dsacp_npu._layer_parts import Torch
from dsacp_npu._tensors import Float, Int32, check_floats, torch, values_known
from dsacp_npu._triton_hadamard import hadamard
from dsacp_npu._triton_launch import check_runs
from dsacp_npu._triton_metadata import query_rows_and_positions
from dsacp_npu._triton_rows import apply_rope
from dsacp_npu._triton_scores import index_scores_slice, score_columns
from dsacp_npu._triton_topk import chosen_of_slice
from dsacp_npu.fp8 import FP8Vectors
from dsacp_npu.quant import QuantizedVectors
from dsacp_npu.visibility import visible_entries
from dsacp_ref.spec import INT32_MAX, UnsupportedError, check_int, contract_error

__all__ = ["index_queries", "lightning_indexer", "projected_output"]

SLICE_NUMBERS = 1 << 25  # scores of a slice: enough queries to fill a device, 128 MB

projected_output = Torch.projected_output  # two matrix products


def index_queries(qr: Float, wq_b: Float, cos: Float, sin: Float, *, index_head_dim: int) -> Float:
    """`dsacp_npu.indexer.index_queries`, turned and rotated by kernels; its product is in the dtype of ``qr``.

    Limits: those of `apply_rope` and `hadamard`.
    """
    check_floats("qr", qr, ("num_tokens", "q_lora_rank"))
    check_floats("wq_b", wq_b, ("index_n_heads * index_head_dim", qr.shape[1]), "as wide as the query latent")
    index_head_dim = check_int("index_head_dim", index_head_dim, 1)
    if wq_b.shape[0] % index_head_dim:
        raise contract_error("wq_b", f"have a multiple of {index_head_dim} rows", wq_b.shape[0], "one block a head")
    heads = (qr @ wq_b.T.to(qr.dtype)).reshape(len(qr), len(wq_b) // index_head_dim, index_head_dim)
    return hadamard(apply_rope(heads, cos, sin))


def lightning_indexer(
    index_q: Float,
    index_weights: Float,
    index_cache: Float | QuantizedVectors | FP8Vectors,
    cmp_block_table: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    *,
    compress_ratio: int,
    index_topk: int,
) -> Int32:
    """`dsacp_npu.indexer.lightning_indexer` by the kernels of scores and of top-k.

    Limits: those of both, and FP8 keys on an NVIDIA GPU only; scores of float and FP8 keys differ from torch's in the
    last bits, so entries that score nearly alike may change places.
    """
    check_runs(index_q)
    if isinstance(index_cache, FP8Vectors) and not index_q.is_cuda:
        raise UnsupportedError(
            "backend 'triton' scores FP8Vectors of index_cache on an NVIDIA GPU only, got a tensor on "
            f"{index_q.device.type}; the Ascend front end has no float8: use floats or int8, or backend 'torch'"
        )
    block_size = check_call(index_q, index_weights, index_cache, cmp_block_table, seqused_kv)
    rows, positions = query_rows_and_positions(cu_seqlens_q, seqused_kv, num_rows=len(index_q))
    num_visible = visible_entries(positions, compress_ratio)
    index_topk = check_int("index_topk", index_topk, 1, INT32_MAX)
    if values_known(cmp_block_table, cu_seqlens_q, seqused_kv):  # refused if a table does not reach what is seen
        num_slots = parts_of(index_cache)[0].shape[0] * block_size
        slots_of_rows(num_visible, cmp_block_table, cu_seqlens_q, block_size, num_slots)
    queries, weights = index_q.detach(), index_weights.detach()
    if isinstance(index_cache, (QuantizedVectors, FP8Vectors)):
        queries, weights = coded_queries(queries, weights, num_visible, type(index_cache))
        # The kernel tells codes by the dtype of their values.
        queries, index_cache = QuantizedVectors(*queries), QuantizedVectors(*index_cache)
    columns = score_columns(index_cache, cmp_block_table)
    if columns == 0 or len(index_q) == 0:
        return num_visible.new_full((len(index_q), index_topk), -1)
    return chosen_in_slices(queries, weights, index_cache, cmp_block_table, rows, num_visible, index_topk, columns)


def chosen_in_slices(
    queries: Float | QuantizedVectors,
    weights: Float,
    index_cache: Float | QuantizedVectors,
    block_table: Int32,
    rows: Int32,
    num_visible: Int32,
    index_topk: int,
    columns: int,
) -> Int32:
    """The choice of every query, from arguments that are known to be right (`index_scores_slice`)."""
    chosen = num_visible.new_empty(len(rows), index_topk)
    step = max(1, min(len(rows), SLICE_NUMBERS // columns))
    scores = torch.empty(step, columns, dtype=torch.float32, device=rows.device)
    for first in range(0, len(rows), step):
        count = min(step, len(rows) - first)
        some = slice(first, first + count)
        index_scores_slice(queries, weights, index_cache, block_table, rows, num_visible, first, count, scores)
        chosen_of_slice(scores[:count], num_visible[some], index_topk, chosen[some])
    return chosen
