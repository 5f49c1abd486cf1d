"""The records of `dsacp_npu.mla_layer`, apart so that its pieces can name them."""

from __future__ import annotations

from typing import NamedTuple

from dsacp_npu._tensors import Float, Int32
from dsacp_npu.fp8 import FP8Vectors
from dsacp_npu.mla import UInt8
from dsacp_npu.quant import QuantizedVectors


class MLAIndexerWeights(NamedTuple):
    """Mirror of `dsacp_ref.mla_layer.MLAIndexerWeights`."""

    wq_b: Float
    wk: Float
    k_norm: Float
    k_norm_bias: Float
    weights_proj: Float


class MLAWeights(NamedTuple):
    """Mirror of `dsacp_ref.mla_layer.MLAWeights`."""

    wq_a: Float
    q_norm: Float
    wq_b: Float
    wkv_a: Float
    kv_norm: Float
    w_uk: Float
    w_uv: Float
    wo: Float
    indexer: MLAIndexerWeights


class MLACache(NamedTuple):
    """Mirror of `dsacp_ref.mla_layer.MLACache`."""

    latent_cache: Float | UInt8
    rope_cache: Float | None
    index_cache: Float | FP8Vectors | QuantizedVectors


class MLABatch(NamedTuple):
    """Mirror of `dsacp_ref.mla_layer.MLABatch`."""

    query_start_loc: Int32
    seq_lens: Int32
    block_table: Int32


class MLAOutput(NamedTuple):
    """Mirror of `dsacp_ref.mla_layer.MLAOutput`."""

    output: Float
    topk_indices: Int32
    cache: MLACache


class MLARanksOutput(NamedTuple):
    """Mirror of `dsacp_ref.mla_layer.MLARanksOutput`."""

    outputs: list[Float]
    topk_indices: list[Int32]
    caches: list[MLACache]
