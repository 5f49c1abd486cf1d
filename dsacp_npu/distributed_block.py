"""The functions of `dsacp_npu.block` between processes: one rank's view over a real process group.

A function takes this rank's shard where its namesake takes the list of all, and returns what the namesake returns for
this rank. What `dsacp_npu.distributed` says of collectives holds here: every rank makes the same calls, and counts
follow from the layout, which is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dsacp_npu import distributed
from dsacp_npu._ranks import Ranks
from dsacp_npu._tensors import Float, Int32, check_floats, torch
from dsacp_npu.block import (
    BlockWeights,
    ExpertWeights,
    LastRows,
    by_request,
    check_block,
    check_expert_mode,
    check_experts,
    expert_output,
    expert_share,
    kept_rows,
    last_places,
    planned_rows,
    stream_rows,
)
from dsacp_npu.compressor import rms_norm
from dsacp_npu.layer import LayerBatch, LayerCache, LayerOutput
from dsacp_npu.partition import Partition
from dsacp_ref.config import AttentionConfig
from dsacp_ref.spec import check_record

if TYPE_CHECKING:
    from dsacp_npu.backend import Backend

__all__ = ["block_over_ranks", "block_over_ranks_", "experts_over_ranks", "gathered_last_rows", "last_rows"]


def experts_over_ranks(
    shard: Float, weights: ExpertWeights, ranks: Ranks, partition: Partition, *, experts: str = "whole"
) -> Float:
    """The expert's output for this rank's rows.

    Args:
        shard: float [local rows, hidden], laid out by ``partition``; pad rows hold anything.
        weights: ExpertWeights, whole; unless experts are ``"whole"``, this rank's share is used.
        ranks: the group.
        partition: Partition over the same ranks.
        experts: ``"whole"`` (nothing travels), ``"split"`` (all-gather before, reduce-scatter after) or ``"sliced"``
            (all-gather before, all-reduce after, of which the rank takes its rows).

    Returns:
        array [local rows, hidden], pad rows zero.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        UnsupportedError: ranks that do not divide the rows of w1, unless experts are ``"whole"``.
    """
    distributed.check_layout(shard, ranks, partition)
    check_experts("weights", weights)
    check_floats("shards", shard, ("local_rows", weights.w1.shape[1]), "as wide as w1 takes them")
    check_expert_mode(experts, weights, ranks.cp_size)
    # Pad rows go in as zero, so they come out as zero.
    own = kept_rows(shard, partition.token_indices[ranks.cp_rank] >= 0)
    if experts == "whole":
        return expert_output(own, weights)
    counts = [len(tokens) for tokens in partition.token_indices]
    share = expert_share(weights, ranks.cp_rank, ranks.cp_size)
    summand = expert_output(distributed.all_gather(own, ranks, counts), share)
    if experts == "split":
        return distributed.reduce_scatter(summand, ranks, counts)
    return distributed.all_reduce(summand, ranks).split(counts)[ranks.cp_rank]


def block_over_ranks(
    x: Float,
    weights: BlockWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    ranks: Ranks,
    *,
    compress_ratio: int,
    split: str = "contiguous",
    rows: str = "full",
    key_mode: str = "replicate",
    output_mode: str = "all_to_all",
    experts: str = "whole",
    num_input_tokens: int | None = None,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> LayerOutput:
    """This rank's part of one step of a block: `dsacp_npu.block.block_over_ranks` with a process for every rank.

    Args:
        x: float, the residual stream: [num_tokens, hidden] with rows ``"full"``, else [local rows, hidden].
        weights: BlockWeights, whole.
        cache: LayerCache of this rank; not changed.
        batch: LayerBatch, global, the same on every rank, CPU tensors.
        config: AttentionConfig.
        ranks: the group.
        compress_ratio, split, rows, key_mode, output_mode, experts, num_input_tokens, given_topk, backend: as there,
            the same on every rank.

    Returns:
        LayerOutput: output, topk_indices of the local rows, cache after the step.

    Raises:
        ContractError: a shape, dtype or value does not hold. What all ranks share (batch, modes, config) is refused by
            all of them; a rank that alone refuses its own input leaves the others waiting until their timeout.
        UnsupportedError: a combination that cannot work, by name.
    """
    options = {
        "compress_ratio": compress_ratio,
        "split": split,
        "rows": rows,
        "key_mode": key_mode,
        "output_mode": output_mode,
        "num_input_tokens": num_input_tokens,
        "given_topk": given_topk,
        "backend": backend,
    }
    return own_step(distributed.layer_over_ranks, x, weights, cache, batch, config, ranks, experts, options)


def block_over_ranks_(
    x: Float,
    weights: BlockWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    ranks: Ranks,
    *,
    compress_ratio: int,
    split: str = "contiguous",
    rows: str = "full",
    key_mode: str = "replicate",
    output_mode: str = "all_to_all",
    experts: str = "whole",
    num_input_tokens: int | None = None,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> LayerOutput:
    """`block_over_ranks`, written into the cache, which is returned in the output."""
    options = {
        "compress_ratio": compress_ratio,
        "split": split,
        "rows": rows,
        "key_mode": key_mode,
        "output_mode": output_mode,
        "num_input_tokens": num_input_tokens,
        "given_topk": given_topk,
        "backend": backend,
    }
    return own_step(distributed.layer_over_ranks_, x, weights, cache, batch, config, ranks, experts, options)


def own_step(
    attention: Callable[..., LayerOutput],
    x: Float,
    weights: BlockWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    ranks: Ranks,
    experts: str,
    options: dict[str, Any],
) -> LayerOutput:
    """This rank's step of a block around the layer's, which may write into the cache."""
    check_record("ranks", ranks, Ranks)
    check_block(weights, config)
    check_expert_mode(experts, weights.experts, ranks.cp_size)
    partition, scattered = planned_rows(batch, ranks.cp_size, options)
    x = stream_rows(x, ranks.cp_rank, partition, batch, config, scattered)
    normed = rms_norm(x, weights.attn_norm, config.rms_norm_eps)
    attended = attention(normed, weights.attention, cache, batch, config, ranks, **options)
    x = x + attended.output
    normed = rms_norm(x, weights.ffn_norm, config.rms_norm_eps)
    if scattered:
        fed = experts_over_ranks(normed, weights.experts, ranks, partition, experts=experts)
    elif experts == "whole":
        fed = expert_output(normed, weights.experts)
    else:
        share = expert_share(weights.experts, ranks.cp_rank, ranks.cp_size)
        fed = distributed.all_reduce(expert_output(normed, share), ranks)
    return attended._replace(output=x + fed)


def last_rows(shard: torch.Tensor, ranks: Ranks, partition: Partition, query_start_loc: Int32) -> LastRows:
    """The last new rows of the requests whose last token this rank owns. No collective.

    Args:
        shard: any dtype [local rows, ...], laid out by ``partition``, pad rows included.
        ranks: the group.
        partition: Partition over the same ranks, on the host.
        query_start_loc: int32[num_reqs + 1], on the host, the offsets that the partition was made from.

    Returns:
        LastRows.

    Raises:
        ContractError: another number of ranks, rows or tokens than the partition has.
        UnsupportedError: a partition or offsets on a device.
    """
    distributed.check_layout(shard, ranks, partition)
    request_indices, rows = last_places(partition, query_start_loc)[ranks.cp_rank]
    return LastRows(request_indices, shard[rows.to(shard.device)])


def gathered_last_rows(shard: torch.Tensor, ranks: Ranks, partition: Partition, query_start_loc: Int32) -> torch.Tensor:
    """The last new row of every request. Only these rows travel, in one all-gather.

    Args:
        shard: any dtype [local rows, ...], laid out by ``partition``, pad rows included.
        ranks: the group.
        partition: Partition over the same ranks, on the host.
        query_start_loc: int32[num_reqs + 1], on the host, the offsets that the partition was made from.

    Returns:
        array [num_reqs, ...], zero for requests without new tokens.

    Raises:
        ContractError: another number of ranks, rows or tokens than the partition has.
        UnsupportedError: a partition or offsets on a device.
    """
    distributed.check_layout(shard, ranks, partition)
    requests, rows = zip(*last_places(partition, query_start_loc), strict=True)
    own = shard[rows[ranks.cp_rank].to(shard.device)]
    gathered = distributed.all_gather(own, ranks, [len(owned) for owned in requests])
    return by_request(gathered, torch.cat(requests), len(query_start_loc) - 1)
