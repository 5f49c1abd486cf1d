"""Mirror of `dsacp_ref.mla_stack` over torch, on the device of its arguments.

One process plays all ranks by each rank's own program, as in `dsacp_npu.mla_layer`; `distributed_mla` runs the same
programs between processes. A step over ranks is planned on the host, so its batch must be CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dsacp_npu._mla_parts import MLACall, MLARankStep, Torch, copied, mla_program
from dsacp_npu._rank_layer import Exchanged, Program, run_together
from dsacp_npu._tensors import Float, Int32, check_floats, check_tensor, dtype_name, torch, values_known
from dsacp_npu.block import (
    ExpertWeights,
    by_request,
    check_around,
    check_expert_mode,
    expert_output,
    expert_share,
    kept_rows,
    last_places,
)
from dsacp_npu.compressor import rms_norm
from dsacp_npu.exchange import check_group, check_sequence, check_shards
from dsacp_npu.extents import check_batch, token_positions
from dsacp_npu.mla_layer import (
    MLABatch,
    MLACache,
    MLAOutput,
    MLARanksOutput,
    MLAWeights,
    check_mla_layer,
    mla_attention_layer,
    mla_attention_layer_,
    planned_mla_step,
    rank_step_of,
)
from dsacp_npu.partition import Partition, check_rows, checked_ranks, counted, local_rows, partition_tokens
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import check_int, check_record, contract_error

if TYPE_CHECKING:
    from dsacp_npu.backend import Backend

__all__ = [
    "LocalInputs",
    "MLABlockWeights",
    "StackOutput",
    "StackRanksOutput",
    "StackWeights",
    "local_inputs",
    "mla_block",
    "mla_block_over_ranks",
    "mla_decoder_stack",
    "mla_stack_over_ranks",
    "rows_argmax",
    "vocab_argmax",
    "mla_block_",
    "mla_block_over_ranks_",
    "mla_decoder_stack_",
    "mla_stack_over_ranks_",
]

NO_LABEL = -100  # what torch's cross entropy leaves out


class MLABlockWeights(NamedTuple):
    """Mirror of `dsacp_ref.mla_stack.MLABlockWeights`."""

    attn_norm: Float
    attention: MLAWeights
    ffn_norm: Float
    experts: ExpertWeights


class StackWeights(NamedTuple):
    """Mirror of `dsacp_ref.mla_stack.StackWeights`."""

    embed: Float
    blocks: tuple[MLABlockWeights, ...]
    norm: Float
    head: Float


class LocalInputs(NamedTuple):
    """Mirror of `dsacp_ref.mla_stack.LocalInputs`."""

    token_ids: Int32
    positions: Int32
    labels: Int32


class StackOutput(NamedTuple):
    """Mirror of `dsacp_ref.mla_stack.StackOutput`."""

    hidden: Float
    logits: Float
    caches: list[MLACache]


class StackRanksOutput(NamedTuple):
    """Mirror of `dsacp_ref.mla_stack.StackRanksOutput`."""

    hidden: list[Float]
    logits: list[Float]
    caches: list[list[MLACache]]


# --- the way in ---


def local_inputs(
    token_ids: Int32, labels: Int32, query_start_loc: Int32, seq_lens: Int32, partition: Partition, cp_rank: int
) -> LocalInputs:
    """Mirror of `dsacp_ref.mla_stack.local_inputs`."""
    check_record("partition", partition, Partition)
    _, cp_rank = checked_ranks(len(partition.token_indices), cp_rank)
    check_batch(query_start_loc, seq_lens)
    count = len(partition.restore_indices)
    if values_known(query_start_loc):
        check_rows(
            "query_start_loc", counted(int(query_start_loc[-1]), token_ids), count, "the tokens of the partition"
        )
    check_tensor("token_ids", token_ids, ("int32",), (count,), "one a token of the step")
    check_tensor("labels", labels, ("int32",), (count,), "one a token of the step")
    tokens = partition.token_indices[cp_rank].to(token_ids.device)
    own_labels = local_rows(labels, partition, cp_rank).masked_fill(tokens < 0, NO_LABEL)
    positions = token_positions(tokens, query_start_loc, seq_lens)
    return LocalInputs(local_rows(token_ids, partition, cp_rank), positions, own_labels)


# --- a block ---


def mla_block(
    x: Float,
    weights: MLABlockWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    *,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLAOutput:
    """Mirror of `dsacp_ref.mla_stack.mla_block`."""
    return one_device(mla_attention_layer, x, weights, cache, batch, config, given_topk, backend)


def mla_block_(
    x: Float,
    weights: MLABlockWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    *,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLAOutput:
    """`mla_block`, written into the cache, which is returned in the output."""
    return one_device(mla_attention_layer_, x, weights, cache, batch, config, given_topk, backend)


def one_device(
    layer: Any,
    x: Float,
    weights: MLABlockWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    given_topk: Int32 | None,
    backend: Backend | None,
) -> MLAOutput:
    """The step of a block around the layer's, which may write into the cache."""
    check_mla_block(weights, config)
    check_record("batch", batch, MLABatch)
    check_floats("x", x, ("num_tokens", config.hidden_size), "the residual stream")
    x = live_rows(x, counted(len(x), batch.seq_lens), batch)
    normed = rms_norm(x, weights.attn_norm, config.rms_norm_eps)
    attended: MLAOutput = layer(normed, weights.attention, cache, batch, config, given_topk=given_topk, backend=backend)
    x = x + attended.output
    fed = expert_output(rms_norm(x, weights.ffn_norm, config.rms_norm_eps), weights.experts)
    return attended._replace(output=x + fed)


def mla_block_over_ranks(
    shards: Sequence[Float],
    weights: MLABlockWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    *,
    split: str = "zigzag",
    experts: str = "whole",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLARanksOutput:
    """Mirror of `dsacp_ref.mla_stack.mla_block_over_ranks`.

    Limits: plans on the host, so the batch must be CPU tensors; shards, weights and caches may lie on a device.
    """
    options = StackOptions(split, experts, num_input_tokens, kept_keys)
    partition = planned_block(shards, weights, caches, batch, config, options, given_topk)
    own = [copied(cache) for cache in caches]
    return all_ranks(shards, weights, own, batch, config, partition, options, given_topk, backend)


def mla_block_over_ranks_(
    shards: Sequence[Float],
    weights: MLABlockWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    *,
    split: str = "zigzag",
    experts: str = "whole",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLARanksOutput:
    """`mla_block_over_ranks`, written into the caches, which are returned in the output."""
    options = StackOptions(split, experts, num_input_tokens, kept_keys)
    partition = planned_block(shards, weights, caches, batch, config, options, given_topk)
    return all_ranks(shards, weights, caches, batch, config, partition, options, given_topk, backend)


class StackOptions(NamedTuple):
    """How a block or a stack runs over ranks."""

    split: str
    experts: str
    num_input_tokens: int | None
    kept_keys: str


def planned_block(
    shards: Sequence[Float],
    weights: MLABlockWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    options: StackOptions,
    given_topk: Int32 | None,
) -> Partition:
    """The split of a block's step over ranks, once everything is found legal."""
    check_mla_block(weights, config)
    check_sequence("shards", shards)
    check_sequence("caches", caches)
    cp_size = check_int("cp_size", len(shards), 1, hint="one shard a rank")
    check_expert_mode(options.experts, weights.experts, cp_size)
    if len(caches) != cp_size:
        raise contract_error("caches", f"hold one cache for each of {cp_size} ranks", len(caches))
    return planned_mla_step(
        dict(enumerate(zip(shards, caches, strict=True))), cp_size, weights.attention, batch, config, options.split,
        options.num_input_tokens, options.kept_keys, given_topk, rows_are="the residual stream",
    )  # fmt: skip


def all_ranks(
    shards: Sequence[Float],
    weights: MLABlockWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    partition: Partition,
    options: StackOptions,
    given_topk: Int32 | None,
    backend: Backend | None,
) -> MLARanksOutput:
    """Every rank's step of a block, written into its cache."""
    programs = []
    for rank, (x, cache) in enumerate(zip(shards, caches, strict=True)):
        step = rank_step_of(x, cache, batch, config, partition, rank, options.split, options.num_input_tokens)
        programs.append(block_program(x, weights, cache, step, config, options, given_topk, backend))
    outputs, topks, after = zip(*run_together(programs), strict=True)
    return MLARanksOutput(list(outputs), list(topks), list(after))


def block_program(
    x: Float,
    weights: MLABlockWeights,
    cache: MLACache,
    step: MLARankStep,
    config: MLAConfig,
    options: StackOptions,
    given_topk: Int32 | None,
    backend: Backend | None,
) -> Program:
    """One rank's step of a block; writes into its cache."""
    x = live_rows(x, step.local.tokens, step.geometry.batch)
    normed = rms_norm(x, weights.attn_norm, config.rms_norm_eps)
    call = MLACall(config, weights.attention, Torch if backend is None else backend)
    attended = yield from mla_program(normed, cache, step, call, given_topk, kept_keys=options.kept_keys)
    x = x + attended.output
    normed = rms_norm(x, weights.ffn_norm, config.rms_norm_eps)
    fed = yield from expert_program(normed, weights.experts, step, options.experts)
    return attended._replace(output=x + fed)


def expert_program(x: Float, weights: ExpertWeights, step: MLARankStep, experts: str) -> Program:
    """The expert's output for one rank's rows."""
    own = kept_rows(x, step.local.tokens >= 0)
    if experts == "whole":
        return expert_output(own, weights)
    counts = [len(tokens) for tokens in step.partition.token_indices]
    rows = yield Exchanged("all_gather", own, (counts,))
    summand = expert_output(rows, expert_share(weights, step.cp_rank, len(counts)))
    if experts == "split":
        return (yield Exchanged("reduce_scatter", summand, (counts,)))
    total = yield Exchanged("all_reduce", summand)
    return total.split(counts)[step.cp_rank]


def live_rows(x: Float, tokens: Int32, batch: MLABatch) -> Float:
    """The rows of these tokens, zero where they belong to no request: what they held goes no further."""
    return kept_rows(x, token_positions(tokens, batch.query_start_loc, batch.seq_lens) >= 0)


# --- from token ids to logits ---


def mla_decoder_stack(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    *,
    backend: Backend | None = None,
) -> StackOutput:
    """Mirror of `dsacp_ref.mla_stack.mla_decoder_stack`."""
    check_whole_stack(token_ids, weights, caches, batch, config)
    return whole_stack(token_ids, weights, [copied(cache) for cache in caches], batch, config, backend)


def mla_decoder_stack_(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    *,
    backend: Backend | None = None,
) -> StackOutput:
    """`mla_decoder_stack`, written into the caches, which are returned in the output."""
    check_whole_stack(token_ids, weights, caches, batch, config)
    return whole_stack(token_ids, weights, caches, batch, config, backend)


def check_whole_stack(
    token_ids: Int32, weights: StackWeights, caches: Sequence[MLACache], batch: MLABatch, config: MLAConfig
) -> None:
    """Refuse a stack that cannot run, before any layer writes."""
    check_stack(token_ids, weights, caches, batch, config)
    for block, cache in zip(weights.blocks, caches, strict=True):
        check_mla_block(block, config)
        x = weights.embed.new_empty(len(token_ids), config.hidden_size)
        check_mla_layer(x, block.attention, cache, batch, config, None)


def whole_stack(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    backend: Backend | None,
) -> StackOutput:
    """The step of a device that has all rows, written into the caches."""
    x = weights.embed[token_ids]
    for block, cache in zip(weights.blocks, caches, strict=True):
        x = mla_block_(x, block, cache, batch, config, backend=backend).output
    hidden = rms_norm(x, weights.norm, config.rms_norm_eps)
    return StackOutput(hidden, own_last_rows(hidden, batch.query_start_loc) @ weights.head.T, list(caches))


def own_last_rows(hidden: Float, query_start_loc: Int32) -> Float:
    """Each request's last row where all rows are here, which needs no plan; zero for requests without one."""
    ends = query_start_loc[1:]
    if len(hidden) == 0:
        return hidden.new_zeros(len(ends), hidden.shape[1])
    absent = ends == query_start_loc[:-1]
    return hidden[ends.masked_fill(absent, 1) - 1].masked_fill(absent[:, None], 0)


def mla_stack_over_ranks(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[Sequence[MLACache]],
    batch: MLABatch,
    config: MLAConfig,
    *,
    split: str = "zigzag",
    experts: str = "whole",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    backend: Backend | None = None,
) -> StackRanksOutput:
    """Mirror of `dsacp_ref.mla_stack.mla_stack_over_ranks`.

    Limits: plans on the host, so the batch must be CPU tensors; weights and caches may lie on a device.
    """
    options = StackOptions(split, experts, num_input_tokens, kept_keys)
    check_stack_over_ranks(token_ids, weights, caches, batch, config, options)
    own = [[copied(cache) for cache in layers] for layers in caches]
    return stack_of_ranks(token_ids, weights, own, batch, config, options, backend)


def mla_stack_over_ranks_(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[Sequence[MLACache]],
    batch: MLABatch,
    config: MLAConfig,
    *,
    split: str = "zigzag",
    experts: str = "whole",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    backend: Backend | None = None,
) -> StackRanksOutput:
    """`mla_stack_over_ranks`, written into the caches, which are returned in the output."""
    options = StackOptions(split, experts, num_input_tokens, kept_keys)
    check_stack_over_ranks(token_ids, weights, caches, batch, config, options)
    return stack_of_ranks(token_ids, weights, caches, batch, config, options, backend)


def check_stack_over_ranks(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[Sequence[MLACache]],
    batch: MLABatch,
    config: MLAConfig,
    options: StackOptions,
) -> None:
    """Refuse a stack over ranks that cannot run, before any layer writes."""
    check_sequence("caches", caches)
    cp_size = check_int("cp_size", len(caches), 1, hint="one list of caches a rank")
    for own in caches:
        check_stack(token_ids, weights, own, batch, config)
    planned_stack(token_ids, weights, dict(enumerate(caches)), cp_size, batch, config, options)


def planned_stack(
    token_ids: Int32,
    weights: StackWeights,
    caches: dict[int, Sequence[MLACache]],
    cp_size: int,
    batch: MLABatch,
    config: MLAConfig,
    options: StackOptions,
) -> Partition:
    """The split of a stack's step over ranks, once every layer of the ranks here is found legal."""
    partition = partition_tokens(
        batch.query_start_loc, cp_size, split=options.split, num_input_tokens=options.num_input_tokens
    )
    check_rows("token_ids", token_ids, len(partition.restore_indices), "one a token of the step")
    for layer, block in enumerate(weights.blocks):
        check_mla_block(block, config)
        check_expert_mode(options.experts, block.experts, cp_size)
        members = {
            rank: (weights.embed.new_empty(len(partition.token_indices[rank]), config.hidden_size), own[layer])
            for rank, own in caches.items()
        }
        planned_mla_step(
            members, cp_size, block.attention, batch, config, options.split, options.num_input_tokens,
            options.kept_keys, None,
        )  # fmt: skip
    return partition


def stack_of_ranks(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[Sequence[MLACache]],
    batch: MLABatch,
    config: MLAConfig,
    options: StackOptions,
    backend: Backend | None,
) -> StackRanksOutput:
    """Every rank's step of a stack, written into its caches."""
    cp_size = len(caches)
    partition = partition_tokens(
        batch.query_start_loc, cp_size, split=options.split, num_input_tokens=options.num_input_tokens
    )
    programs = [
        stack_program(token_ids, weights, own, batch, config, partition, rank, options, backend)
        for rank, own in enumerate(caches)
    ]
    hidden, logits, after = zip(*run_together(programs), strict=True)
    return StackRanksOutput(list(hidden), list(logits), list(after))


def stack_program(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    partition: Partition,
    cp_rank: int,
    options: StackOptions,
    backend: Backend | None,
) -> Program:
    """One rank's step of a stack; writes into its caches."""
    x = weights.embed[local_rows(token_ids, partition, cp_rank)]
    step = None
    for block, cache in zip(weights.blocks, caches, strict=True):
        if step is None:  # one plan for all layers: they have one block table
            step = rank_step_of(x, cache, batch, config, partition, cp_rank, options.split, options.num_input_tokens)
        x = (yield from block_program(x, block, cache, step, config, options, None, backend)).output
    hidden = rms_norm(x, weights.norm, config.rms_norm_eps)
    requests, rows = zip(*last_places(partition, batch.query_start_loc), strict=True)
    own = hidden[rows[cp_rank].to(hidden.device)]
    gathered = yield Exchanged("all_gather", own, ([len(owned) for owned in requests],))
    last = by_request(gathered, torch.cat(requests), len(batch.seq_lens))
    return StackOutput(hidden, last @ weights.head.T, list(caches))


# --- the way out, where logits stay with their ranks ---


def rows_argmax(logits: Sequence[Float], partition: Partition, query_start_loc: Int32) -> list[Int32]:
    """Mirror of `dsacp_ref.mla_stack.rows_argmax`.

    Limits: plans on the host, so partition and offsets must be CPU tensors, and not while compiling.
    """
    check_group(logits, partition)
    check_vocab(logits)
    return run_together([rows_program(own, partition, query_start_loc, rank) for rank, own in enumerate(logits)])


def rows_program(logits: Float, partition: Partition, query_start_loc: Int32, cp_rank: int) -> Program:
    """One rank's part of `rows_argmax`."""
    requests, rows = zip(*last_places(partition, query_start_loc), strict=True)
    mine, _ = best_tokens(logits[rows[cp_rank].to(logits.device)])
    ids = yield Exchanged("all_gather", mine, ([len(owned) for owned in requests],))
    tokens = ids.new_full((len(query_start_loc) - 1,), -1)
    tokens[torch.cat(requests).to(ids.device)] = ids
    return tokens


def vocab_argmax(logits: Sequence[Float]) -> list[Int32]:
    """Mirror of `dsacp_ref.mla_stack.vocab_argmax`."""
    check_sequence("logits", logits)
    check_vocab(logits)
    check_shards([rows.T for rows in logits])
    starts = [sum(rows.shape[1] for rows in logits[:rank]) for rank in range(len(logits))]
    return run_together([vocab_program(rows, start, len(logits)) for rows, start in zip(logits, starts, strict=True)])


def vocab_program(logits: Float, first_token: int, cp_size: int) -> Program:
    """One rank's part of `vocab_argmax`, from its share of the vocabulary and the token that the share starts at."""
    tokens, highest = best_tokens(logits)
    ids = yield Exchanged("all_gather", (tokens + first_token)[None], ([1] * cp_size,))
    values = yield Exchanged("all_gather", highest[None], ([1] * cp_size,))
    # argmax takes the first among equals: the lowest rank, which has the lowest tokens.
    return ids.gather(0, first_argmax(values, 0)[None])[0]


def best_tokens(logits: Float) -> tuple[Int32, Float]:
    """Each row's most likely token and its logit."""
    comparable = logits.masked_fill(logits.isnan(), -torch.inf)
    return first_argmax(comparable, 1).int(), comparable.amax(dim=1)


def first_argmax(values: Float, dim: int) -> torch.Tensor:
    """Where the first of the highest values stands; torch's own argmax promises no order among equals."""
    hit = values == values.amax(dim=dim, keepdim=True)
    places = torch.arange(values.shape[dim], device=values.device).reshape(-1, *(1,) * (values.ndim - 1 - dim))
    return places.expand(values.shape).masked_fill(~hit, values.shape[dim]).amin(dim=dim)


# --- checks ---


def check_mla_block(weights: MLABlockWeights, config: MLAConfig) -> None:
    """Refuse norms and experts of another model; the layer checks its own weights."""
    check_record("weights", weights, MLABlockWeights)
    check_record("config", config, MLAConfig)
    check_around(weights, config.hidden_size)


def check_stack(
    token_ids: Int32, weights: StackWeights, caches: Sequence[MLACache], batch: MLABatch, config: MLAConfig
) -> None:
    """Refuse tokens, weights and caches that do not belong together; blocks check their own."""
    check_record("weights", weights, StackWeights)
    check_record("config", config, MLAConfig)
    check_record("batch", batch, MLABatch)
    check_batch(batch.query_start_loc, batch.seq_lens)
    check_floats("weights.embed", weights.embed, ("vocab", config.hidden_size))
    shape = tuple(weights.embed.shape)
    check_tensor("weights.head", weights.head, (dtype_name(weights.embed),), shape, "like embed")
    check_floats("weights.norm", weights.norm, (config.hidden_size,), "one weight a channel")
    check_sequence("weights.blocks", weights.blocks)
    check_sequence("caches", caches)
    if len(caches) != len(weights.blocks):
        raise contract_error("caches", f"hold one cache for each of {len(weights.blocks)} layers", len(caches))
    check_tensor("token_ids", token_ids, ("int32",), ("num_tokens",))
    vocab = len(weights.embed)
    if values_known(token_ids) and ((token_ids < 0) | (token_ids >= vocab)).any():
        wrong = token_ids[(token_ids < 0) | (token_ids >= vocab)]
        raise contract_error("token_ids", f"be in [0, {vocab})", int(wrong[0]), "embed has one row a token id")


def check_vocab(logits: Sequence[Float]) -> None:
    """Refuse logits without a vocabulary to choose from."""
    for rank, rows in enumerate(logits):
        check_floats("logits", rows, ("num_rows", "vocab"), f"rank {rank}")
        check_int("vocab", rows.shape[1], 1, hint=f"rank {rank} has nothing to choose from")
