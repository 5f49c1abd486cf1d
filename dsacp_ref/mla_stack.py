"""A stack of DeepSeek-V3.2 blocks whose rows stay on their rank from the first layer to the last, and what comes after.

::

    token ids -> own rows -> embed -> [ norm, attention, residual, norm, experts, residual ] * layers -> norm
                                        keys of all      experts of all
                                        rows gathered    rows gathered, where ranks share their weights
    -> each request's last row, found from the layout -> head -> logits in request order, or argmax where they lie

Norms and residual go row by row, so on own rows they need nobody; a rank without rows takes part in every exchange all
the same. Routing is the caller's: an expert here is what one row meets once it is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.block import (
    ExpertWeights,
    check_around,
    check_expert_mode,
    expert_output,
    experts_over_ranks,
    gathered_last_rows,
    kept_rows,
    last_rows,
)
from dsacp_ref.compressor import rms_norm
from dsacp_ref.exchange import all_gather, check_group, check_sequence, check_shards
from dsacp_ref.extents import FLOATS, Float, check_batch, token_positions
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.mla_layer import (
    MLABatch,
    MLACache,
    MLAOutput,
    MLARanksOutput,
    MLAWeights,
    mla_attention_layer,
    mla_over_ranks,
)
from dsacp_ref.partition import Int32, Partition, check_rows, checked_ranks, local_rows, partition_tokens
from dsacp_ref.spec import check_array, check_int, check_record, contract_error

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
]

NO_LABEL = -100  # what torch's cross entropy leaves out


class MLABlockWeights(NamedTuple):
    """One decoder block's weights.

    Fields:
        attn_norm: float[hidden], before the attention layer.
        attention: MLAWeights.
        ffn_norm: float[hidden], before the experts.
        experts: ExpertWeights.

    >>> MLABlockWeights._fields
    ('attn_norm', 'attention', 'ffn_norm', 'experts')
    """

    attn_norm: Float
    attention: MLAWeights
    ffn_norm: Float
    experts: ExpertWeights


class StackWeights(NamedTuple):
    """The weights from token ids to logits.

    Fields:
        embed: float[vocab, hidden].
        blocks: one MLABlockWeights a layer.
        norm: float[hidden], after the last block.
        head: float[vocab, hidden].

    >>> StackWeights._fields
    ('embed', 'blocks', 'norm', 'head')
    """

    embed: Float
    blocks: tuple[MLABlockWeights, ...]
    norm: Float
    head: Float


class LocalInputs(NamedTuple):
    """One rank's rows of what every rank has for all tokens.

    Fields:
        token_ids: int32[local rows], 0 in pad rows.
        positions: int32[local rows], absolute, -1 in pad rows and padded graph slots.
        labels: int32[local rows], -100 in pad rows.

    >>> LocalInputs._fields
    ('token_ids', 'positions', 'labels')
    """

    token_ids: Int32
    positions: Int32
    labels: Int32


class StackOutput(NamedTuple):
    """One step of a stack on one device.

    Fields:
        hidden: float[num_tokens, hidden], after the last norm.
        logits: float[num_reqs, vocab], of each request's last new token; zero for requests without one.
        caches: one MLACache a layer, after the step.

    >>> StackOutput._fields
    ('hidden', 'logits', 'caches')
    """

    hidden: Float
    logits: Float
    caches: list[MLACache]


class StackRanksOutput(NamedTuple):
    """One step of a stack over ranks; every field has one item a rank.

    Fields:
        hidden: float[local rows, hidden], after the last norm, zero in pad rows.
        logits: float[num_reqs, vocab], as on one device.
        caches: one MLACache a layer, after the step.

    >>> StackRanksOutput._fields
    ('hidden', 'logits', 'caches')
    """

    hidden: list[Float]
    logits: list[Float]
    caches: list[list[MLACache]]


# --- the way in ---


def local_inputs(
    token_ids: Int32, labels: Int32, query_start_loc: Int32, seq_lens: Int32, partition: Partition, cp_rank: int
) -> LocalInputs:
    """One rank's token ids, positions and labels, cut by one split.

    Labels are shifted before they are cut: the next token of a local row may lie on another rank.

    Args:
        token_ids: int32[num_tokens], of the step's tokens in global order.
        labels: int32[num_tokens], what each token is to predict.
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, first 0.
        seq_lens: int32[num_reqs], tokens, all keys with this step's.
        partition: Partition of the same tokens.
        cp_rank: int, this rank.

    Returns:
        LocalInputs.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: SGLang cp_split_and_rebuild_data and _position.

    >>> loc, lens = np.array([0, 5], np.int32), np.array([9], np.int32)
    >>> partition = partition_tokens(loc, 2, split="round_robin")
    >>> ids = np.array([10, 11, 12, 13, 14], np.int32)
    >>> [part.tolist() for part in local_inputs(ids, ids + 1, loc, lens, partition, 1)]
    [[11, 13, 0], [5, 7, -1], [12, 14, -100]]
    """
    check_record("partition", partition, Partition)
    _, cp_rank = checked_ranks(len(partition.token_indices), cp_rank)
    check_batch(query_start_loc, seq_lens)
    count = len(partition.restore_indices)
    check_rows("query_start_loc", np.zeros(int(query_start_loc[-1])), count, "the tokens of the partition")
    check_array("token_ids", token_ids, ("int32",), (count,), "one a token of the step")
    check_array("labels", labels, ("int32",), (count,), "one a token of the step")
    tokens = partition.token_indices[cp_rank]
    own_labels = np.where(tokens >= 0, local_rows(labels, partition, cp_rank), np.int32(NO_LABEL))
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
) -> MLAOutput:
    """One step of a decoder block on one device.

    Args:
        x: float32 or float64 [num_tokens, hidden], the residual stream; rows beyond ``batch.query_start_loc[-1]`` are
            padding.
        weights: MLABlockWeights.
        cache: MLACache before the step; not changed.
        batch: MLABatch.
        config: MLAConfig.
        given_topk: int32[num_tokens, index_topk], a selection to use instead of the indexer's; or None.

    Returns:
        MLAOutput: output [num_tokens, hidden], the residual stream after the block; topk_indices, cache.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: DeepSeek-V3.2 inference model, with one expert.

    >>> MLAOutput._fields[0]
    'output'
    """
    check_mla_block(weights, config)
    check_record("batch", batch, MLABatch)
    check_array("x", x, FLOATS, ("num_tokens", config.hidden_size), "the residual stream")
    x = live_rows(x, np.arange(len(x), dtype=np.int32), batch)
    normed = rms_norm(x, weights.attn_norm, config.rms_norm_eps)
    attended = mla_attention_layer(normed, weights.attention, cache, batch, config, given_topk=given_topk)
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
) -> MLARanksOutput:
    """One step of a decoder block over ranks that hold own rows only; the result is that of one device.

    The outputs are laid out like the inputs, so they are the next block's inputs.

    Args:
        shards: float32 or float64 [local rows, hidden], the residual stream, one per rank, laid out by the split, pad
            rows included.
        weights: MLABlockWeights, whole; each rank uses what its modes give it.
        caches: one MLACache per rank, before the step; not changed.
        batch: MLABatch, global, the same on every rank.
        config: MLAConfig.
        split, num_input_tokens, kept_keys, given_topk: as in `mla_over_ranks`.
        experts: ``"whole"``, ``"split"`` or ``"sliced"``, as in `experts_over_ranks`.

    Returns:
        MLARanksOutput: outputs, the residual stream after the block, zero in rows that belong to no request.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        UnsupportedError: a combination that cannot work, by name.

    Source: SGLang communicator_nsa_cp: attention's input, its output and the residual are always scattered.

    >>> MLARanksOutput._fields[0]
    'outputs'
    """
    check_mla_block(weights, config)
    check_sequence("shards", shards)
    cp_size = check_int("cp_size", len(shards), 1, hint="one shard a rank")
    check_expert_mode(experts, weights.experts, cp_size)
    check_record("batch", batch, MLABatch)
    check_batch(batch.query_start_loc, batch.seq_lens)
    partition = partition_tokens(batch.query_start_loc, cp_size, split=split, num_input_tokens=num_input_tokens)
    check_group(shards, partition)
    check_array("shards", shards[0], FLOATS, ("local_rows", config.hidden_size), "the residual stream")
    stream = [live_rows(x, tokens, batch) for x, tokens in zip(shards, partition.token_indices, strict=True)]
    attended = mla_over_ranks(
        [rms_norm(x, weights.attn_norm, config.rms_norm_eps) for x in stream],
        weights.attention,
        caches,
        batch,
        config,
        split=split,
        num_input_tokens=num_input_tokens,
        kept_keys=kept_keys,
        given_topk=given_topk,
    )
    stream = [x + output for x, output in zip(stream, attended.outputs, strict=True)]
    normed = [rms_norm(x, weights.ffn_norm, config.rms_norm_eps) for x in stream]
    fed = experts_over_ranks(normed, weights.experts, partition, experts=experts)
    return attended._replace(outputs=[x + output for x, output in zip(stream, fed, strict=True)])


def live_rows(x: Float, tokens: Int32, batch: MLABatch) -> Float:
    """The rows of these tokens, zero where they belong to no request: what they held goes no further."""
    return kept_rows(x, token_positions(tokens, batch.query_start_loc, batch.seq_lens) >= 0)


# --- from token ids to logits ---


def mla_decoder_stack(
    token_ids: Int32, weights: StackWeights, caches: Sequence[MLACache], batch: MLABatch, config: MLAConfig
) -> StackOutput:
    """One step of a stack on one device, from token ids to each request's logits.

    Args:
        token_ids: int32[num_tokens], in [0, vocab).
        weights: StackWeights.
        caches: one MLACache a layer, before the step; not changed.
        batch: MLABatch.
        config: MLAConfig; its num_hidden_layers is not read.

    Returns:
        StackOutput.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: DeepSeek-V3.2 inference model, with one expert a block.

    >>> StackOutput._fields
    ('hidden', 'logits', 'caches')
    """
    check_stack(token_ids, weights, caches, batch, config)
    x = weights.embed[token_ids]
    after: list[MLACache] = []
    for block, cache in zip(weights.blocks, caches, strict=True):
        step = mla_block(x, block, cache, batch, config)
        x, after = step.output, [*after, step.cache]
    hidden = rms_norm(x, weights.norm, config.rms_norm_eps)
    partition = partition_tokens(batch.query_start_loc, 1)
    last = gathered_last_rows([hidden[: len(partition.restore_indices)]], partition, batch.query_start_loc)[0]
    return StackOutput(hidden, last @ weights.head.T, after)


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
) -> StackRanksOutput:
    """One step of a stack over ranks, rows scattered from the first layer to the last; the result is one device's.

    Token ids are the same on every rank, and cut once. Between layers nothing travels but what a block exchanges; at
    the end each request's last row goes to every rank.

    Args:
        token_ids: int32[num_tokens], in [0, vocab), in global order.
        weights: StackWeights, whole.
        caches: for each rank one MLACache a layer, before the step; not changed.
        batch: MLABatch, global, the same on every rank.
        config: MLAConfig; its num_hidden_layers is not read.
        split, num_input_tokens, kept_keys: as in `mla_over_ranks`.
        experts: ``"whole"``, ``"split"`` or ``"sliced"``, as in `experts_over_ranks`.

    Returns:
        StackRanksOutput.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        UnsupportedError: a combination that cannot work, by name.

    Source: SGLang's deepseek_v2 model under prefill context parallelism.

    >>> StackRanksOutput._fields
    ('hidden', 'logits', 'caches')
    """
    check_sequence("caches", caches)
    cp_size = check_int("cp_size", len(caches), 1, hint="one list of caches a rank")
    for own in caches:
        check_stack(token_ids, weights, own, batch, config)
    partition = partition_tokens(batch.query_start_loc, cp_size, split=split, num_input_tokens=num_input_tokens)
    check_rows("token_ids", token_ids, len(partition.restore_indices), "one a token of the step")
    x = [weights.embed[local_rows(token_ids, partition, rank)] for rank in range(cp_size)]
    after: list[list[MLACache]] = [[] for _ in caches]
    for layer, block in enumerate(weights.blocks):
        step = mla_block_over_ranks(
            x,
            block,
            [own[layer] for own in caches],
            batch,
            config,
            split=split,
            experts=experts,
            num_input_tokens=num_input_tokens,
            kept_keys=kept_keys,
        )
        x, after = step.outputs, [[*own, cache] for own, cache in zip(after, step.caches, strict=True)]
    hidden = [rms_norm(rows, weights.norm, config.rms_norm_eps) for rows in x]
    last = gathered_last_rows(hidden, partition, batch.query_start_loc)
    return StackRanksOutput(hidden, [rows @ weights.head.T for rows in last], after)


# --- the way out, where logits stay with their ranks ---


def rows_argmax(logits: Sequence[Float], partition: Partition, query_start_loc: Int32) -> list[Int32]:
    """Every rank holds each request's most likely token, from logits that stay with the rank of their row.

    Only token ids travel.

    Args:
        logits: float32 or float64 [local rows, vocab], one per rank, laid out by ``partition``, pad rows included.
        partition: Partition over the same ranks.
        query_start_loc: int32[num_reqs + 1], tokens, the offsets that the partition was made from.

    Returns:
        int32[num_reqs] per rank: of equal logits the lowest token, NaN counting as -inf; -1 for a request without new
        tokens.

    Raises:
        ContractError: a shape or dtype does not hold, or another number of ranks, rows or tokens than the partition's.

    Source: the second founding document, 4: "argmax on the distributed logits".

    >>> loc = np.array([0, 2, 3], np.int32)
    >>> partition = partition_tokens(loc, 2, split="round_robin")  # rank 0: tokens 0 2; rank 1: token 1, a pad row
    >>> logits = [np.array([[9.0, 0.0], [1.0, 2.0]]), np.array([[3.0, 3.0], [0.0, 0.0]])]
    >>> [ids.tolist() for ids in rows_argmax(logits, partition, loc)]
    [[0, 1], [0, 1]]
    """
    check_group(logits, partition)
    check_vocab(logits)
    owned = last_rows(logits, partition, query_start_loc)
    requests = np.concatenate([part.request_indices for part in owned])
    found = []
    rows: list[Float] = [part.rows for part in owned]  # type: ignore[misc]  # of logits
    for ids in all_gather([best_tokens(own)[0] for own in rows]):
        tokens = np.full(len(query_start_loc) - 1, -1, np.int32)
        tokens[requests] = ids
        found.append(tokens)
    return found


def vocab_argmax(logits: Sequence[Float]) -> list[Int32]:
    """Every rank holds each row's most likely token, from logits whose vocabulary is split over the ranks.

    Only one value and one token id a row and rank travel.

    Args:
        logits: float32 or float64 [num_rows, vocab of the rank], one per rank, the shares in rank order; widths may
            differ.

    Returns:
        int32[num_rows] per rank: of equal logits the lowest token, NaN counting as -inf.

    Raises:
        ContractError: a shape or dtype does not hold.

    Source: tensor-parallel heads; ours.

    >>> [ids.tolist() for ids in vocab_argmax([np.array([[1.0, 5.0]]), np.array([[5.0]])])]
    [[1], [1]]
    """
    check_sequence("logits", logits)
    check_vocab(logits)
    check_shards([rows.T for rows in logits])
    starts = np.cumsum([0, *(rows.shape[1] for rows in logits)])
    best = [best_tokens(rows) for rows in logits]
    ids = all_gather([(tokens + np.int32(start))[None] for (tokens, _), start in zip(best, starts, strict=False)])
    values = all_gather([highest[None] for _, highest in best])
    # argmax takes the first among equals: the lowest rank, which has the lowest tokens.
    return [
        np.take_along_axis(tokens, highest.argmax(axis=0)[None], axis=0)[0]
        for tokens, highest in zip(ids, values, strict=True)
    ]


def best_tokens(logits: Float) -> tuple[Int32, Float]:
    """Each row's most likely token and its logit."""
    comparable = np.where(np.isnan(logits), logits.dtype.type(-np.inf), logits)
    return comparable.argmax(axis=1).astype(np.int32), comparable.max(axis=1)


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
    check_array("weights.embed", weights.embed, FLOATS, ("vocab", config.hidden_size))
    check_array("weights.head", weights.head, (str(weights.embed.dtype),), weights.embed.shape, "like embed")
    check_array("weights.norm", weights.norm, FLOATS, (config.hidden_size,), "one weight a channel")
    check_sequence("weights.blocks", weights.blocks)
    check_sequence("caches", caches)
    if len(caches) != len(weights.blocks):
        raise contract_error("caches", f"hold one cache for each of {len(weights.blocks)} layers", len(caches))
    check_array("token_ids", token_ids, ("int32",), ("num_tokens",))
    vocab = len(weights.embed)
    if (token_ids < 0).any() or (token_ids >= vocab).any():
        wrong = token_ids[(token_ids < 0) | (token_ids >= vocab)]
        raise contract_error("token_ids", f"be in [0, {vocab})", int(wrong[0]), "embed has one row a token id")


def check_vocab(logits: Sequence[NDArray[np.floating]]) -> None:
    """Refuse logits without a vocabulary to choose from."""
    for rank, rows in enumerate(logits):
        check_array("logits", rows, FLOATS, ("num_rows", "vocab"), f"rank {rank}")
        check_int("vocab", rows.shape[1], 1, hint=f"rank {rank} has nothing to choose from")
