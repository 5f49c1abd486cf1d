"""The records of `dsacp_npu.layer`, which names them in public."""

from __future__ import annotations

from typing import NamedTuple

from dsacp_npu._tensors import Float, Int32
from dsacp_npu.compressor import CompressorState, CompressorWeights, ProjectedRows
from dsacp_npu.indexer import IndexerWeights
from dsacp_npu.quant import QuantizedVectors


class LayerWeights(NamedTuple):
    """Mirror of `dsacp_ref.layer.LayerWeights`."""

    wq_a: Float
    q_norm: Float
    wq_b: Float
    wkv: Float
    kv_norm: Float
    attn_sink: Float
    wo_a: Float
    wo_b: Float
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


class LayerCache(NamedTuple):
    """Mirror of `dsacp_ref.layer.LayerCache`. The states are float32 where the caches are shorter."""

    swa_cache: Float
    cmp_cache: Float
    index_cache: Float | QuantizedVectors
    cmp_state: CompressorState
    index_state: CompressorState


class LayerBatch(NamedTuple):
    """Mirror of `dsacp_ref.layer.LayerBatch`."""

    query_start_loc: Int32
    seq_lens: Int32
    swa_block_table: Int32
    cmp_block_table: Int32
    state_indices: Int32


class KeyRows(NamedTuple):
    """Mirror of `dsacp_ref.layer.KeyRows`. Projections are float32 where the keys are shorter."""

    kv: Float
    cmp_rows: ProjectedRows
    index_rows: ProjectedRows


class LayerOutput(NamedTuple):
    """Mirror of `dsacp_ref.layer.LayerOutput`."""

    output: Float
    topk_indices: Int32
    cache: LayerCache


class RanksOutput(NamedTuple):
    """Mirror of `dsacp_ref.layer.RanksOutput`."""

    outputs: list[Float]
    topk_indices: list[Int32]
    caches: list[LayerCache]


class Rows(NamedTuple):
    """Some tokens of a step, with what follows from their place."""

    tokens: Int32
    requests: Int32
    positions: Int32
