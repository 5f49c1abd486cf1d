"""Mirror of `dsacp_ref.block` over torch: one process plays all ranks. Never waits for a device.

Who holds which row is planned on the host: partitions and lengths must be CPU tensors, rows and weights may lie on a
device. With bfloat16 or float16 rows the matrix products are made in that dtype, the gate in float32. ``backend`` is
handed on to the layer; norms, residual and experts are torch code on any of them.

A function whose name ends in ``_`` writes into its caches. What can be refused is refused before the first write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dsacp_npu._tensors import Float, Int32, check_floats, check_host, computing_dtype, torch
from dsacp_npu.compressor import rms_norm
from dsacp_npu.exchange import all_gather, all_reduce, check_group, check_sequence, reduce_scatter
from dsacp_npu.extents import token_positions
from dsacp_npu.layer import (
    LayerBatch,
    LayerCache,
    LayerOutput,
    LayerWeights,
    RanksOutput,
    attention_layer,
    attention_layer_,
    layer_over_ranks,
    layer_over_ranks_,
)
from dsacp_npu.partition import Partition, check_query_start_loc, checked_ranks, counted, partition_tokens
from dsacp_ref.config import AttentionConfig
from dsacp_ref.spec import UnsupportedError, check_choice, check_int, check_number, check_record, contract_error

if TYPE_CHECKING:
    from dsacp_npu.backend import Backend

__all__ = [
    "BlockWeights",
    "ExpertWeights",
    "LastRows",
    "block_over_ranks",
    "decoder_block",
    "expert_output",
    "expert_share",
    "experts_over_ranks",
    "gathered_last_rows",
    "last_rows",
    "block_over_ranks_",
    "decoder_block_",
]


class ExpertWeights(NamedTuple):
    """Mirror of `dsacp_ref.block.ExpertWeights`."""

    w1: Float
    w3: Float
    w2: Float
    swiglu_limit: float | None = None


class BlockWeights(NamedTuple):
    """Mirror of `dsacp_ref.block.BlockWeights`."""

    attn_norm: Float
    attention: LayerWeights
    ffn_norm: Float
    experts: ExpertWeights


class LastRows(NamedTuple):
    """Mirror of `dsacp_ref.block.LastRows`. The indices are on the host, the rows where the shards are."""

    request_indices: Int32
    rows: torch.Tensor


# --- experts ---


def expert_output(x: Float, weights: ExpertWeights) -> Float:
    """Mirror of `dsacp_ref.block.expert_output`."""
    check_experts("weights", weights)
    check_floats("x", x, ("num_rows", weights.w1.shape[1]), "as wide as w1 takes them")
    wide = computing_dtype(x.dtype)
    gate, up = (x @ weights.w1.T.to(x.dtype)).to(wide), (x @ weights.w3.T.to(x.dtype)).to(wide)
    if weights.swiglu_limit is not None:
        limit = float(weights.swiglu_limit)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    gated = torch.nn.functional.silu(gate) * up
    return gated.to(x.dtype) @ weights.w2.T.to(x.dtype)


def expert_share(weights: ExpertWeights, cp_rank: int, cp_size: int) -> ExpertWeights:
    """Mirror of `dsacp_ref.block.expert_share`."""
    check_experts("weights", weights)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    size = share_size(weights, cp_size)
    mine = slice(cp_rank * size, (cp_rank + 1) * size)
    return ExpertWeights(weights.w1[mine], weights.w3[mine], weights.w2[:, mine], weights.swiglu_limit)


def experts_over_ranks(
    shards: Sequence[Float], weights: ExpertWeights, partition: Partition, *, experts: str = "whole"
) -> list[Float]:
    """Mirror of `dsacp_ref.block.experts_over_ranks`. Short summands are added in float32 and rounded once."""
    check_group(shards, partition)
    check_experts("weights", weights)
    check_floats("shards", shards[0], ("local_rows", weights.w1.shape[1]), "as wide as w1 takes them")
    check_expert_mode(experts, weights, len(shards))
    # Pad rows go in as zero, so they come out as zero.
    own = [kept_rows(x, tokens >= 0) for x, tokens in zip(shards, partition.token_indices, strict=True)]
    if experts == "whole":
        return [expert_output(x, weights) for x in own]
    summands = [expert_output(rows, expert_share(weights, rank, len(own))) for rank, rows in enumerate(all_gather(own))]
    if experts == "split":
        return reduce_scatter(summands, [len(x) for x in own])
    totals = all_reduce(summands)
    return [total.split([len(x) for x in own])[rank] for rank, total in enumerate(totals)]


def experts_of_full_rows(inputs: Sequence[Float], weights: ExpertWeights, experts: str) -> list[Float]:
    """The expert's output where every rank has all rows: nothing to gather, and nothing to keep back."""
    if experts == "whole":
        return [expert_output(x, weights) for x in inputs]
    return all_reduce([expert_output(x, expert_share(weights, rank, len(inputs))) for rank, x in enumerate(inputs)])


def kept_rows(x: Float, kept: torch.Tensor) -> Float:
    """The rows, zero where they are not kept."""
    return x.masked_fill(~kept.to(x.device)[:, None], 0)


# --- the block ---


def decoder_block(
    x: Float,
    weights: BlockWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> LayerOutput:
    """Mirror of `dsacp_ref.block.decoder_block`."""
    options = {"compress_ratio": compress_ratio, "given_topk": given_topk, "backend": backend}
    return one_device(attention_layer, x, weights, cache, batch, config, options)


def decoder_block_(
    x: Float,
    weights: BlockWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> LayerOutput:
    """`decoder_block`, written into the cache, which is returned in the output."""
    options = {"compress_ratio": compress_ratio, "given_topk": given_topk, "backend": backend}
    return one_device(attention_layer_, x, weights, cache, batch, config, options)


def one_device(
    attention: Callable[..., LayerOutput],
    x: Float,
    weights: BlockWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    options: dict[str, Any],
) -> LayerOutput:
    """The step of a block around the layer's, which may write into the cache."""
    check_block(weights, config)
    check_record("batch", batch, LayerBatch)
    check_floats("x", x, ("num_tokens", config.hidden_size), "the residual stream")
    x = live_rows(x, counted(len(x), batch.seq_lens), batch)
    normed = rms_norm(x, weights.attn_norm, config.rms_norm_eps)
    attended = attention(normed, weights.attention, cache, batch, config, **options)
    x = x + attended.output
    fed = expert_output(rms_norm(x, weights.ffn_norm, config.rms_norm_eps), weights.experts)
    return attended._replace(output=x + fed)


def block_over_ranks(
    inputs: Sequence[Float],
    weights: BlockWeights,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
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
) -> RanksOutput:
    """Mirror of `dsacp_ref.block.block_over_ranks`.

    Limits: plans on the host, so the batch must be CPU tensors; inputs, weights and caches may lie on a device.
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
    return all_ranks(layer_over_ranks, inputs, weights, caches, batch, config, experts, options)


def block_over_ranks_(
    inputs: Sequence[Float],
    weights: BlockWeights,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
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
) -> RanksOutput:
    """`block_over_ranks`, written into the caches, which are returned in the output."""
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
    return all_ranks(layer_over_ranks_, inputs, weights, caches, batch, config, experts, options)


def all_ranks(
    attention: Callable[..., RanksOutput],
    inputs: Sequence[Float],
    weights: BlockWeights,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
    experts: str,
    options: dict[str, Any],
) -> RanksOutput:
    """Every rank's step of a block around the layer's, which may write into the caches."""
    check_block(weights, config)
    check_sequence("inputs", inputs)
    cp_size = check_int("cp_size", len(inputs), 1, hint="one input a rank")
    check_expert_mode(experts, weights.experts, cp_size)
    partition, scattered = planned_rows(batch, cp_size, options)
    eps = config.rms_norm_eps
    stream = [stream_rows(x, rank, partition, batch, config, scattered) for rank, x in enumerate(inputs)]
    normed = [rms_norm(x, weights.attn_norm, eps) for x in stream]
    attended = attention(normed, weights.attention, caches, batch, config, **options)
    stream = [x + output for x, output in zip(stream, attended.outputs, strict=True)]
    normed = [rms_norm(x, weights.ffn_norm, eps) for x in stream]
    if scattered:
        fed = experts_over_ranks(normed, weights.experts, partition, experts=experts)
    else:
        fed = experts_of_full_rows(normed, weights.experts, experts)
    return attended._replace(outputs=[x + output for x, output in zip(stream, fed, strict=True)])


def planned_rows(batch: LayerBatch, cp_size: int, options: dict[str, Any]) -> tuple[Partition, bool]:
    """The split of a step's tokens, and whether ranks hold nothing but their own between layers."""
    check_record("batch", batch, LayerBatch)
    check_host("batch.query_start_loc", batch.query_start_loc)
    check_host("batch.seq_lens", batch.seq_lens)
    partition = partition_tokens(
        batch.query_start_loc, cp_size, split=options["split"], num_input_tokens=options["num_input_tokens"]
    )
    return partition, check_choice("rows", options["rows"], ("full", "scattered")) == "scattered"


def stream_rows(
    x: Float, rank: int, partition: Partition, batch: LayerBatch, config: AttentionConfig, scattered: bool
) -> Float:
    """One rank's rows of the residual stream, zero where they belong to no request."""
    own = partition.token_indices[rank]
    shape = (len(own) if scattered else "num_rows", config.hidden_size)
    check_floats("inputs", x, shape, f"rank {rank}; the split says which rows")
    return live_rows(x, own if scattered else counted(len(x), batch.seq_lens), batch)


def live_rows(x: Float, tokens: Int32, batch: LayerBatch) -> Float:
    """The rows of these tokens, zero where they belong to no request: what they held goes no further."""
    return kept_rows(x, token_positions(tokens, batch.query_start_loc, batch.seq_lens) >= 0)


# --- the end of the model ---


def last_rows(shards: Sequence[torch.Tensor], partition: Partition, query_start_loc: Int32) -> list[LastRows]:
    """Mirror of `dsacp_ref.block.last_rows`.

    Limits: plans on the host, so partition and offsets must be CPU tensors, and not while compiling.
    """
    check_group(shards, partition)
    owned = last_places(partition, query_start_loc)
    return [
        LastRows(requests, shard[rows.to(shard.device)]) for shard, (requests, rows) in zip(shards, owned, strict=True)
    ]


def gathered_last_rows(
    shards: Sequence[torch.Tensor], partition: Partition, query_start_loc: Int32
) -> list[torch.Tensor]:
    """Mirror of `dsacp_ref.block.gathered_last_rows`.

    Limits: plans on the host, so partition and offsets must be CPU tensors, and not while compiling.
    """
    owned = last_rows(shards, partition, query_start_loc)
    requests = torch.cat([part.request_indices for part in owned])
    gathered = all_gather([part.rows for part in owned])
    return [by_request(rows, requests, len(query_start_loc) - 1) for rows in gathered]


def last_places(partition: Partition, query_start_loc: Int32) -> list[tuple[Int32, Int32]]:
    """For every rank: the requests whose last token it owns, and the local rows of these tokens; on the host."""
    check_query_start_loc(query_start_loc)
    check_host("query_start_loc", query_start_loc)
    check_host("partition", partition.restore_indices)
    if query_start_loc[-1] != len(partition.restore_indices):
        raise contract_error(
            "query_start_loc",
            f"end at the {len(partition.restore_indices)} tokens of the partition",
            int(query_start_loc[-1]),
            "build both from the same lengths",
        )
    request_indices = (query_start_loc[1:] > query_start_loc[:-1]).nonzero()[:, 0].int()
    places = partition.restore_indices[query_start_loc[1:][request_indices] - 1]  # in the ranks' rows end to end
    found, start = [], 0
    for tokens in partition.token_indices:
        owned = (places >= start) & (places < start + len(tokens))
        found.append((request_indices[owned], places[owned] - start))
        start += len(tokens)
    return found


def by_request(gathered: torch.Tensor, request_indices: Int32, num_reqs: int) -> torch.Tensor:
    """One row a request, zero where there is none."""
    rows = gathered.new_zeros(num_reqs, *gathered.shape[1:])
    rows[request_indices.to(gathered.device)] = gathered
    return rows


# --- checks ---


def check_experts(name: str, weights: ExpertWeights) -> None:
    """Refuse weights that do not fit each other."""
    check_record(name, weights, ExpertWeights)
    check_floats(f"{name}.w1", weights.w1, ("inter", "hidden"))
    inter, hidden = weights.w1.shape
    check_floats(f"{name}.w3", weights.w3, (inter, hidden), "w1 and w3 are alike")
    check_floats(f"{name}.w2", weights.w2, (hidden, inter), "w2 leads back from the rows of w1")
    if weights.swiglu_limit is not None:
        check_number(f"{name}.swiglu_limit", weights.swiglu_limit, above=0.0, hint="None for no limit")


def check_expert_mode(experts: str, weights: ExpertWeights, cp_size: int) -> None:
    """Refuse an unknown word, and a sharing that does not come out even."""
    if check_choice("experts", experts, ("whole", "split", "sliced")) != "whole":
        share_size(weights, cp_size)


def share_size(weights: ExpertWeights, cp_size: int) -> int:
    """The rows of w1 on each rank, once the ranks are found to divide them."""
    inter = len(weights.w1)
    if inter % cp_size:
        raise UnsupportedError(
            f"cp_size must divide the {inter} rows of w1 unless experts is 'whole', got {cp_size}; use experts='whole'"
        )
    return inter // cp_size


def check_block(weights: BlockWeights, config: AttentionConfig) -> None:
    """Refuse norms and experts of another model; the layer checks its own weights."""
    check_record("weights", weights, BlockWeights)
    check_record("config", config, AttentionConfig)
    check_around(weights, config.hidden_size)


def check_around(weights: Any, hidden_size: int) -> None:
    """Refuse norms and experts of another width, whatever layer they stand around."""
    for name in ("attn_norm", "ffn_norm"):
        check_floats(f"weights.{name}", getattr(weights, name), (hidden_size,), "one weight a channel")
    check_experts("weights.experts", weights.experts)
    if weights.experts.w1.shape[1] != hidden_size:
        raise contract_error(
            "weights.experts",
            f"take and give the {hidden_size} channels of hidden_size",
            weights.experts.w1.shape[1],
            "the shapes follow from config",
        )
