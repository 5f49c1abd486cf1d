"""Mirror of `dsacp_ref.mla_layer` over torch, on the device of its arguments.

One process plays all ranks of a layer over ranks, by each rank's own program. A step over ranks is planned on the host,
so its batch must be CPU tensors; shards, weights and caches may lie on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsacp_npu._index_calls import check_index_cache, parts_of
from dsacp_npu._layer_checks import check_range
from dsacp_npu._mla_parts import (
    MLACall,
    MLARankStep,
    Torch,
    copied,
    mla_program,
    mla_rank_step,
    whole_mla_geometry,
    whole_step,
)
from dsacp_npu._mla_records import (
    MLABatch,
    MLACache,
    MLAIndexerWeights,
    MLAOutput,
    MLARanksOutput,
    MLAWeights,
)
from dsacp_npu._rank_layer import run_together
from dsacp_npu._tensors import (
    FLOATS,
    Float,
    Int32,
    check_floats,
    check_host,
    check_tensor,
    dtype_name,
    torch,
    values_known,
)
from dsacp_npu.attention import TOKENS, check_topk
from dsacp_npu.exchange import check_group, check_own_rows, check_sequence, check_shard
from dsacp_npu.extents import check_batch, token_positions
from dsacp_npu.fp8 import FP8Vectors, encoded_latents, quantized_fp8
from dsacp_npu.mla import check_latent_cache, mla_frequencies
from dsacp_npu.partition import Partition, counted, partition_tokens
from dsacp_npu.quant import QuantizedVectors, quantized_int8
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import (
    UnsupportedError,
    check_bool,
    check_choice,
    check_int,
    check_record,
    contract_error,
)

if TYPE_CHECKING:
    from dsacp_npu.backend import Backend

__all__ = [
    "MLABatch",
    "MLACache",
    "MLAIndexerWeights",
    "MLAOutput",
    "MLARanksOutput",
    "MLAWeights",
    "empty_mla_cache",
    "mla_attention_layer",
    "mla_over_ranks",
    "mla_attention_layer_",
    "mla_over_ranks_",
]


def empty_mla_cache(
    config: MLAConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: str,
    fp8: bool = False,
    int8_index_cache: bool = False,
) -> MLACache:
    """Mirror of `dsacp_ref.mla_layer.empty_mla_cache`.

    Limits: on the CPU, or the default device; bfloat16 and float16 caches are made by changing the dtype of its parts.
    """
    check_record("config", config, MLAConfig)
    blocks = check_int("num_blocks", num_blocks, 0), check_int("block_size", block_size, 1)
    check_choice("dtype", dtype, FLOATS)
    both = check_bool("fp8", fp8), check_bool("int8_index_cache", int8_index_cache)
    if all(both):
        raise contract_error("int8_index_cache", "be False with fp8", True, "index keys are kept in one of the two")
    widths = (config.kv_lora_rank, config.rope_head_dim, config.index_head_dim)
    latents, rope_keys, index_keys = (torch.zeros(*blocks, width, dtype=getattr(torch, dtype)) for width in widths)
    if fp8:
        return MLACache(encoded_latents(latents, rope_keys), None, quantized_fp8(index_keys))
    return MLACache(latents, rope_keys, quantized_int8(index_keys) if int8_index_cache else index_keys)


# --- one device ---


def mla_attention_layer(
    x: Float,
    weights: MLAWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    *,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLAOutput:
    """Mirror of `dsacp_ref.mla_layer.mla_attention_layer`."""
    check_mla_layer(x, weights, cache, batch, config, given_topk)
    return one_device(x, weights, copied(cache), batch, config, given_topk, backend)


def mla_attention_layer_(
    x: Float,
    weights: MLAWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    *,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLAOutput:
    """`mla_attention_layer`, written into the cache, which is returned in the output."""
    check_mla_layer(x, weights, cache, batch, config, given_topk)
    return one_device(x, weights, cache, batch, config, given_topk, backend)


def check_mla_layer(
    x: Float, weights: MLAWeights, cache: MLACache, batch: MLABatch, config: MLAConfig, given_topk: Int32 | None
) -> None:
    """Refuse arguments that do not belong together, before anything is written."""
    check_mla_weights(weights, config)
    check_floats("x", x, ("num_tokens", config.hidden_size), "the block input after its norm")
    check_mla_step(dtype_name(x), len(x), batch, cache, config)
    check_given(given_topk, len(x), config)
    check_mla_reads(len(x), batch, cache, given_topk)


def one_device(
    x: Float,
    weights: MLAWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    given_topk: Int32 | None,
    backend: Backend | None,
) -> MLAOutput:
    """The step of a device that has all rows, written into its cache."""
    call = MLACall(config, weights, Torch if backend is None else backend)
    geometry = whole_mla_geometry(batch, len(x), cache.latent_cache.shape[1], mla_frequencies(config))
    return whole_step(x, cache, geometry, call, given_topk)


# --- over ranks ---


def mla_over_ranks(
    shards: Sequence[Float],
    weights: MLAWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    *,
    split: str = "zigzag",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLARanksOutput:
    """Mirror of `dsacp_ref.mla_layer.mla_over_ranks`.

    Limits: plans on the host, so the batch must be CPU tensors; shards, weights and caches may lie on a device.
    """
    check_lists(shards, caches)
    partition = planned_mla_step(
        dict(enumerate(zip(shards, caches, strict=True))), len(shards), weights, batch, config, split,
        num_input_tokens, kept_keys, given_topk,
    )  # fmt: skip
    own = [copied(cache) for cache in caches]
    return all_ranks(
        shards, weights, own, batch, config, partition, split, num_input_tokens, kept_keys, given_topk, backend
    )


def mla_over_ranks_(
    shards: Sequence[Float],
    weights: MLAWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    *,
    split: str = "zigzag",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLARanksOutput:
    """`mla_over_ranks`, written into the caches, which are returned in the output."""
    check_lists(shards, caches)
    partition = planned_mla_step(
        dict(enumerate(zip(shards, caches, strict=True))), len(shards), weights, batch, config, split,
        num_input_tokens, kept_keys, given_topk,
    )  # fmt: skip
    return all_ranks(
        shards, weights, caches, batch, config, partition, split, num_input_tokens, kept_keys, given_topk, backend
    )


def check_lists(shards: Sequence[Float], caches: Sequence[MLACache]) -> None:
    """Refuse anything but one shard and one cache a rank."""
    check_sequence("shards", shards)
    check_sequence("caches", caches)
    cp_size = check_int("cp_size", len(shards), 1, hint="one shard a rank")
    if len(caches) != cp_size:
        raise contract_error("caches", f"hold one cache for each of {cp_size} ranks", len(caches))


def planned_mla_step(
    members: dict[int, tuple[Float, MLACache]],
    cp_size: int,
    weights: MLAWeights,
    batch: MLABatch,
    config: MLAConfig,
    split: str,
    num_input_tokens: int | None,
    kept_keys: str,
    given_topk: Int32 | None,
    *,
    rows_are: str = "the block input after its norm",
) -> Partition:
    """The split of a step, once everything that the ranks here hold is found legal.

    ``members`` are the ranks that this process plays, with the shard and the cache of each.
    """
    check_mla_weights(weights, config)
    check_record("batch", batch, MLABatch)
    check_batch(batch.query_start_loc, batch.seq_lens)
    check_host("batch.query_start_loc", batch.query_start_loc)
    check_host("batch.seq_lens", batch.seq_lens)
    partition = partition_tokens(batch.query_start_loc, cp_size, split=split, num_input_tokens=num_input_tokens)
    check_kept_keys(kept_keys, batch)  # what all ranks share comes before what each brings
    num_tokens = len(partition.restore_indices)
    if len(members) == cp_size:
        check_group([x for x, _ in members.values()], partition)
    for rank, (x, _) in members.items():
        check_shard(x, rank)
        check_own_rows(x, partition, rank)
        check_floats("shards", x, ("local_rows", config.hidden_size), rows_are)
    for x, cache in members.values():
        check_mla_step(dtype_name(x), num_tokens, batch, cache, config)
    check_alike([cache for _, cache in members.values()])
    check_given(given_topk, num_tokens, config)
    for _, cache in members.values():
        check_mla_reads(num_tokens, batch, cache, given_topk)
    return partition


def rank_step_of(
    x: Float,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    partition: Partition,
    cp_rank: int,
    split: str,
    num_input_tokens: int | None,
) -> MLARankStep:
    """One rank's step on the device of its shard."""
    return mla_rank_step(
        batch,
        partition,
        cp_rank,
        split,
        num_input_tokens,
        cache.latent_cache.shape[1],
        mla_frequencies(config),
        x.device,
    )


def all_ranks(
    shards: Sequence[Float],
    weights: MLAWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    partition: Partition,
    split: str,
    num_input_tokens: int | None,
    kept_keys: str,
    given_topk: Int32 | None,
    backend: Backend | None,
) -> MLARanksOutput:
    """Every rank's step, written into its cache."""
    call = MLACall(config, weights, Torch if backend is None else backend)
    programs = []
    for rank, (x, cache) in enumerate(zip(shards, caches, strict=True)):
        step = rank_step_of(x, cache, batch, config, partition, rank, split, num_input_tokens)
        programs.append(mla_program(x, cache, step, call, given_topk, kept_keys=kept_keys))
    outputs, topks, after = zip(*run_together(programs), strict=True)
    return MLARanksOutput(list(outputs), list(topks), list(after))


# --- checks ---


def check_mla_weights(weights: MLAWeights, config: MLAConfig) -> None:
    """Refuse weights of another model."""
    check_record("weights", weights, MLAWeights)
    check_record("config", config, MLAConfig)
    check_record("weights.indexer", weights.indexer, MLAIndexerWeights)
    heads, hidden, lora = config.num_heads, config.hidden_size, config.kv_lora_rank
    d = config.index_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a": (config.q_lora_rank, hidden),
        "q_norm": (config.q_lora_rank,),
        "wq_b": (heads * (config.nope_head_dim + config.rope_head_dim), config.q_lora_rank),
        "wkv_a": (lora + config.rope_head_dim, hidden),
        "kv_norm": (lora,),
        "w_uk": (heads, config.nope_head_dim, lora),
        "w_uv": (heads, config.v_head_dim, lora),
        "wo": (hidden, heads * config.v_head_dim),
        "indexer.wq_b": (config.index_n_heads * d, config.q_lora_rank),
        "indexer.wk": (d, hidden),
        "indexer.k_norm": (d,),
        "indexer.k_norm_bias": (d,),
        "indexer.weights_proj": (config.index_n_heads, hidden),
    }
    for name, shape in shapes.items():
        owner, _, part = name.rpartition(".")
        weight = getattr(weights.indexer if owner else weights, part)
        check_floats(f"weights.{name}", weight, shape, "the shapes follow from config")


def check_mla_step(dtype: str, num_rows: int, batch: MLABatch, cache: MLACache, config: MLAConfig) -> None:
    """Refuse a step whose rows, table and caches do not belong together."""
    check_record("batch", batch, MLABatch)
    check_batch(batch.query_start_loc, batch.seq_lens)
    shape = (len(batch.seq_lens), "max_blocks")
    check_tensor("batch.block_table", batch.block_table, ("int32",), shape, "one row a request")
    check_record("cache", cache, MLACache)
    check_latent_cache(cache.latent_cache, cache.rope_cache, config.kv_lora_rank, config.rope_head_dim, dtype)
    index_cache = cache.index_cache
    block_size = check_index_cache(index_cache, dtype, config.index_head_dim, "of config")
    num_blocks = len(parts_of(index_cache)[0])
    if (num_blocks, block_size) != tuple(cache.latent_cache.shape[:2]):
        blocks = "{} blocks of {}".format(*cache.latent_cache.shape[:2])
        got = f"{num_blocks} blocks of {block_size}"
        raise contract_error("cache.index_cache", f"have {blocks}", got, "one block table serves all parts")
    if values_known(batch.query_start_loc) and num_rows < batch.query_start_loc[-1]:
        needed = int(batch.query_start_loc[-1])
        raise contract_error("x", f"have at least {needed} rows", num_rows, "query_start_loc counts global rows")


def check_alike(caches: Sequence[MLACache]) -> None:
    """Refuse ranks that keep their keys in different ways: rows travel as the caches hold them."""
    kinds = []
    for cache in caches:
        check_record("caches", cache, MLACache)
        latents = "floats" if cache.rope_cache is not None else "bytes"
        coded = isinstance(cache.index_cache, FP8Vectors | QuantizedVectors)
        index_keys = type(cache.index_cache).__name__ if coded else "floats"
        kinds.append(f"latents in {latents} and index keys in {index_keys}")
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            rule = f"be alike: rank 0 has {kinds[0]}"
            raise contract_error("caches", rule, f"{kind} on rank {rank}", "rows travel as the caches hold them")


def check_given(given_topk: Int32 | None, num_rows: int, config: MLAConfig) -> None:
    """Refuse a handed-in selection of another shape."""
    if given_topk is not None:
        check_tensor("given_topk", given_topk, ("int32",), (num_rows, config.index_topk), "one row a token of x")


def check_kept_keys(kept_keys: str, batch: MLABatch) -> None:
    """Refuse to go on from keys that nobody has."""
    check_choice("kept_keys", kept_keys, ("all", "own"))
    computed = batch.seq_lens - (batch.query_start_loc[1:] - batch.query_start_loc[:-1])
    if kept_keys == "own" and (computed > 0).any():
        request = int((computed > 0).int().argmax())
        raise UnsupportedError(
            f"kept_keys must be 'all' where a request has earlier tokens, got 'own' with {int(computed[request])} of "
            f"request {request}; ranks that keep own keys only cannot go on: chunks and decode need all keys"
        )


def check_mla_reads(num_rows: int, batch: MLABatch, cache: MLACache, given_topk: Int32 | None) -> None:
    """Refuse tables and selections that attention could not read: in place, it would find out after the writes."""
    if not values_known(*batch):
        return
    real = (batch.seq_lens > 0) & (batch.query_start_loc[1:] > batch.query_start_loc[:-1])
    check_range(torch.zeros_like(batch.seq_lens), batch.seq_lens, real, batch.block_table, cache.latent_cache)
    if given_topk is not None and values_known(given_topk):
        tokens = counted(num_rows, batch.seq_lens)
        check_topk(given_topk, token_positions(tokens, batch.query_start_loc, batch.seq_lens) + 1, TOKENS)
