"""A record of another type, or none, is refused by name before anything of it is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import dsacp_npu.compressor
import dsacp_npu.partition
import dsacp_ref as ref
from dsacp_ref.spec import ContractError
from tests.layer_strategies import CSA, world_of

X, ZERO, LOC = np.ones((2, 3)), np.zeros(2, np.int32), np.array([0, 2], np.int32)
SPLIT = ref.partition_tokens(LOC, 2)
SHARDS = [np.ones((1, 3)), np.ones((1, 3))]
WORLD = world_of(np.random.default_rng(0), [5, 3], kind=CSA)
ROWS, BATCH = WORLD.step([0, 0], [5, 3])
SIZES = {"num_blocks": 1, "block_size": 1, "num_cmp_blocks": 1, "cmp_block_size": 1, "num_slots": 1}
ROLLED = {"compress_ratio": 4, "overlap": True}


def one_device(**changed: object) -> ref.LayerOutput:
    legal = {"x": ROWS, "weights": WORLD.weights, "cache": WORLD.cache, "batch": BATCH, "config": WORLD.config}
    return ref.attention_layer(**legal | changed, compress_ratio=4)


def two_ranks(**changed: object) -> ref.RanksOutput:
    legal = {"inputs": [ROWS, ROWS], "weights": WORLD.weights, "caches": [WORLD.cache] * 2, "batch": BATCH}
    return ref.layer_over_ranks(**legal | {"config": WORLD.config} | changed, compress_ratio=4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ref.padded_restore_indices(None), "partition must be of type Partition, got NoneType"),
        (lambda: ref.local_rows(X, tuple(SPLIT), 0), "partition must be of type Partition, got tuple"),
        (lambda: ref.restored_rows(X, []), "partition must be of type Partition, got list"),
        (lambda: ref.converted_rows(X, None, SPLIT), "source must be of type Partition, got NoneType"),
        (lambda: ref.converted_rows(X, SPLIT, "zigzag"), "target must be of type Partition, got str"),
        (lambda: ref.empty_state(None, 1), "weights must be of type CompressorWeights, got NoneType"),
        (lambda: ref.projected_rows(X, ZERO, X), "weights must be of type CompressorWeights, got ndarray"),
        (lambda: ref.rolled_back_state(None, ZERO, **ROLLED), "state must be of type CompressorState, got NoneType"),
        (lambda: ref.updated_state((X, X), LOC, ZERO[:1], None), "rows must be of type ProjectedRows, got tuple"),
        (lambda: ref.dequantized_int8((X, X)), "coded must be of type QuantizedVectors, got tuple"),
        (lambda: ref.all_gather(X), "shards must be a list with one item a rank, got ndarray"),
        (lambda: ref.all_to_all([X, X]), "blocks must be a list with one item a rank, got ndarray"),
        (lambda: ref.gathered_in_order(SHARDS, None), "partition must be of type Partition, got NoneType"),
        (lambda: ref.requested_rows(SHARDS, SPLIT, None), "wanted must be a list with one item a rank, got NoneType"),
        (lambda: ref.layer_frequencies({}, 4), "config must be of type AttentionConfig, got dict"),
        (lambda: ref.empty_cache(None, **SIZES), "weights must be of type LayerWeights, got NoneType"),
        (lambda: one_device(weights=None), "weights must be of type LayerWeights, got NoneType"),
        (lambda: one_device(cache=(1, 2)), "cache must be of type LayerCache, got tuple"),
        (lambda: one_device(batch=None), "batch must be of type LayerBatch, got NoneType"),
        (lambda: one_device(config={}), "config must be of type AttentionConfig, got dict"),
        (lambda: two_ranks(caches=[1, 2]), "cache must be of type LayerCache, got int"),
        (lambda: two_ranks(inputs=ROWS), "inputs must be a list with one item a rank, got ndarray"),
        (lambda: two_ranks(batch=[]), "batch must be of type LayerBatch, got list"),
        (lambda: two_ranks(config=None), "config must be of type AttentionConfig, got NoneType"),
        (lambda: dsacp_npu.partition.padded_restore_indices(None), "partition must be of type Partition, got NoneType"),
        (lambda: dsacp_npu.compressor.empty_state(None, 1), "weights must be of type CompressorWeights, got NoneType"),
    ],
)
def test_another_type_is_refused_by_name(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ContractError) as refused:
        call()
    assert str(refused.value) == text
