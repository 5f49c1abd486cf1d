"""The functions of `dsacp_npu.mla_layer` and `mla_stack` over ranks, between processes: one rank's view.

A function takes this rank's shard and caches where its namesake takes the list of all, and returns what the namesake
returns for this rank. What `dsacp_npu.distributed` says of collectives holds here: every rank makes the same calls, and
counts follow from the layout, which is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsacp_npu import distributed
from dsacp_npu._mla_parts import MLACall, Torch, copied, mla_program
from dsacp_npu._rank_layer import Program, run_alone
from dsacp_npu._ranks import Ranks
from dsacp_npu._tensors import Float, Int32
from dsacp_npu.block import check_expert_mode
from dsacp_npu.mla_layer import MLABatch, MLACache, MLAOutput, MLAWeights, planned_mla_step, rank_step_of
from dsacp_npu.mla_stack import (
    MLABlockWeights,
    StackOptions,
    StackOutput,
    StackWeights,
    block_program,
    check_mla_block,
    check_stack,
    check_vocab,
    planned_stack,
    rows_program,
    stack_program,
    vocab_program,
)
from dsacp_npu.partition import Partition
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import check_int, check_record, contract_error

if TYPE_CHECKING:
    from dsacp_npu.backend import Backend

__all__ = [
    "mla_block_over_ranks",
    "mla_block_over_ranks_",
    "mla_over_ranks",
    "mla_over_ranks_",
    "mla_stack_over_ranks",
    "mla_stack_over_ranks_",
    "rows_argmax",
    "vocab_argmax",
]


def with_answers(program: Program, ranks: Ranks) -> Any:
    """What a rank's program gives, its exchanges made with the other processes."""
    return run_alone(program, lambda wish: distributed.answered(wish, ranks))


# --- a layer ---


def mla_over_ranks(
    shard: Float,
    weights: MLAWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    ranks: Ranks,
    *,
    split: str = "zigzag",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLAOutput:
    """This rank's part of one step of a layer: `dsacp_npu.mla_layer.mla_over_ranks` with a process for every rank.

    Args:
        shard: float [local rows, hidden], laid out by the split, pad rows included.
        weights: MLAWeights, all heads.
        cache: MLACache of this rank; not changed.
        batch: MLABatch, global, the same on every rank, CPU tensors.
        config: MLAConfig.
        ranks: the group.
        split, num_input_tokens, kept_keys, given_topk, backend: as there, the same on every rank.

    Returns:
        MLAOutput: output and topk_indices of the local rows, cache after the step.

    Raises:
        ContractError: a shape, dtype or value does not hold. What all ranks share (batch, split, config) is refused by
            all of them; a rank that alone refuses its own input leaves the others waiting until their timeout.
        UnsupportedError: a combination that cannot work, by name.
    """
    options = StackOptions(split, "whole", num_input_tokens, kept_keys)
    partition = planned_layer(shard, weights, cache, batch, config, ranks, options, given_topk)
    return own_layer(shard, weights, copied(cache), batch, config, ranks, partition, options, given_topk, backend)


def mla_over_ranks_(
    shard: Float,
    weights: MLAWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    ranks: Ranks,
    *,
    split: str = "zigzag",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLAOutput:
    """`mla_over_ranks`, written into the cache, which is returned in the output."""
    options = StackOptions(split, "whole", num_input_tokens, kept_keys)
    partition = planned_layer(shard, weights, cache, batch, config, ranks, options, given_topk)
    return own_layer(shard, weights, cache, batch, config, ranks, partition, options, given_topk, backend)


def planned_layer(
    shard: Float,
    weights: MLAWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    ranks: Ranks,
    options: StackOptions,
    given_topk: Int32 | None,
) -> Partition:
    """The split of a step, once what this rank holds is found legal."""
    check_record("ranks", ranks, Ranks)
    members = {ranks.cp_rank: (shard, cache)}
    return planned_mla_step(
        members, ranks.cp_size, weights, batch, config, options.split, options.num_input_tokens, options.kept_keys,
        given_topk,
    )  # fmt: skip


def own_layer(
    shard: Float,
    weights: MLAWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    ranks: Ranks,
    partition: Partition,
    options: StackOptions,
    given_topk: Int32 | None,
    backend: Backend | None,
) -> MLAOutput:
    """This rank's step, written into its cache."""
    call = MLACall(config, weights, Torch if backend is None else backend)
    where = (partition, ranks.cp_rank, options.split, options.num_input_tokens)
    step = rank_step_of(shard, cache, batch, config, *where)
    output: MLAOutput = with_answers(
        mla_program(shard, cache, step, call, given_topk, kept_keys=options.kept_keys), ranks
    )
    return output


# --- a block ---


def mla_block_over_ranks(
    shard: Float,
    weights: MLABlockWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    ranks: Ranks,
    *,
    split: str = "zigzag",
    experts: str = "whole",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLAOutput:
    """This rank's part of one step of a block: `dsacp_npu.mla_stack.mla_block_over_ranks` with a process a rank.

    Args:
        shard: float [local rows, hidden], the residual stream, laid out by the split, pad rows included.
        weights: MLABlockWeights, whole.
        cache: MLACache of this rank; not changed.
        batch: MLABatch, global, the same on every rank, CPU tensors.
        config: MLAConfig.
        ranks: the group.
        split, experts, num_input_tokens, kept_keys, given_topk, backend: as there, the same on every rank.

    Returns:
        MLAOutput: output, the residual stream of the local rows after the block; topk_indices; cache after the step.

    Raises:
        ContractError, UnsupportedError: as `mla_over_ranks`.
    """
    options = StackOptions(split, experts, num_input_tokens, kept_keys)
    return own_block(shard, weights, cache, batch, config, ranks, options, given_topk, backend, in_place=False)


def mla_block_over_ranks_(
    shard: Float,
    weights: MLABlockWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    ranks: Ranks,
    *,
    split: str = "zigzag",
    experts: str = "whole",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> MLAOutput:
    """`mla_block_over_ranks`, written into the cache, which is returned in the output."""
    options = StackOptions(split, experts, num_input_tokens, kept_keys)
    return own_block(shard, weights, cache, batch, config, ranks, options, given_topk, backend, in_place=True)


def own_block(
    shard: Float,
    weights: MLABlockWeights,
    cache: MLACache,
    batch: MLABatch,
    config: MLAConfig,
    ranks: Ranks,
    options: StackOptions,
    given_topk: Int32 | None,
    backend: Backend | None,
    *,
    in_place: bool,
) -> MLAOutput:
    """This rank's step of a block."""
    check_mla_block(weights, config)
    check_record("ranks", ranks, Ranks)
    check_expert_mode(options.experts, weights.experts, ranks.cp_size)
    partition = planned_layer(shard, weights.attention, cache, batch, config, ranks, options, given_topk)
    own = cache if in_place else copied(cache)
    where = (partition, ranks.cp_rank, options.split, options.num_input_tokens)
    step = rank_step_of(shard, own, batch, config, *where)
    output: MLAOutput = with_answers(
        block_program(shard, weights, own, step, config, options, given_topk, backend), ranks
    )
    return output


# --- a stack ---


def mla_stack_over_ranks(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    ranks: Ranks,
    *,
    split: str = "zigzag",
    experts: str = "whole",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    backend: Backend | None = None,
) -> StackOutput:
    """This rank's part of one step of a stack: `dsacp_npu.mla_stack.mla_stack_over_ranks` with a process a rank.

    Args:
        token_ids: int32[num_tokens], of all tokens, the same on every rank.
        weights: StackWeights, whole.
        caches: one MLACache a layer, of this rank; not changed.
        batch: MLABatch, global, the same on every rank, CPU tensors.
        config: MLAConfig.
        ranks: the group.
        split, experts, num_input_tokens, kept_keys, backend: as there, the same on every rank.

    Returns:
        StackOutput: hidden of the local rows, logits of all requests, caches after the step.

    Raises:
        ContractError, UnsupportedError: as `mla_over_ranks`.
    """
    options = StackOptions(split, experts, num_input_tokens, kept_keys)
    partition = planned_own_stack(token_ids, weights, caches, batch, config, ranks, options)
    own = [copied(cache) for cache in caches]
    return own_stack(token_ids, weights, own, batch, config, ranks, partition, options, backend)


def mla_stack_over_ranks_(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    ranks: Ranks,
    *,
    split: str = "zigzag",
    experts: str = "whole",
    num_input_tokens: int | None = None,
    kept_keys: str = "all",
    backend: Backend | None = None,
) -> StackOutput:
    """`mla_stack_over_ranks`, written into the caches, which are returned in the output."""
    options = StackOptions(split, experts, num_input_tokens, kept_keys)
    partition = planned_own_stack(token_ids, weights, caches, batch, config, ranks, options)
    return own_stack(token_ids, weights, caches, batch, config, ranks, partition, options, backend)


def planned_own_stack(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    ranks: Ranks,
    options: StackOptions,
) -> Partition:
    """The split of a stack's step, once what this rank holds is found legal in every layer."""
    check_record("ranks", ranks, Ranks)
    check_stack(token_ids, weights, caches, batch, config)
    return planned_stack(token_ids, weights, {ranks.cp_rank: caches}, ranks.cp_size, batch, config, options)


def own_stack(
    token_ids: Int32,
    weights: StackWeights,
    caches: Sequence[MLACache],
    batch: MLABatch,
    config: MLAConfig,
    ranks: Ranks,
    partition: Partition,
    options: StackOptions,
    backend: Backend | None,
) -> StackOutput:
    """This rank's step of a stack, written into its caches."""
    program = stack_program(token_ids, weights, caches, batch, config, partition, ranks.cp_rank, options, backend)
    output: StackOutput = with_answers(program, ranks)
    return output


# --- the way out ---


def rows_argmax(logits: Float, ranks: Ranks, partition: Partition, query_start_loc: Int32) -> Int32:
    """Each request's most likely token, from logits of this rank's rows. Only token ids travel, in one all-gather.

    Args:
        logits: float [local rows, vocab], laid out by ``partition``, pad rows included.
        ranks: the group.
        partition: Partition over the same ranks, on the host.
        query_start_loc: int32[num_reqs + 1], on the host, the offsets that the partition was made from.

    Returns:
        int32[num_reqs]; -1 for a request without new tokens.

    Raises:
        ContractError: another number of ranks, rows or tokens than the partition has, or no vocabulary.
        UnsupportedError: a partition or offsets on a device.
    """
    distributed.check_layout(logits, ranks, partition)
    check_vocab([logits])
    tokens: Int32 = with_answers(rows_program(logits, partition, query_start_loc, ranks.cp_rank), ranks)
    return tokens


def vocab_argmax(logits: Float, ranks: Ranks, vocab_sizes: Sequence[int]) -> Int32:
    """Each row's most likely token, from this rank's share of the vocabulary. Two small all-gathers.

    Args:
        logits: float [num_rows, vocab of this rank], of the same rows on every rank.
        ranks: the group.
        vocab_sizes: ints, the share of every rank, the same on every rank.

    Returns:
        int32[num_rows].

    Raises:
        ContractError: shares that are not one a rank, or not this rank's.
    """
    check_record("ranks", ranks, Ranks)
    check_vocab([logits])
    sizes = [check_int("vocab_sizes", size, 1) for size in vocab_sizes]
    if len(sizes) != ranks.cp_size or sizes[ranks.cp_rank] != logits.shape[1]:
        rule = f"hold a share for each of {ranks.cp_size} ranks, and {logits.shape[1]} for rank {ranks.cp_rank}"
        raise contract_error("vocab_sizes", rule, sizes, "as the head's weights are cut")
    tokens: Int32 = with_answers(vocab_program(logits, sum(sizes[: ranks.cp_rank]), ranks.cp_size), ranks)
    return tokens
