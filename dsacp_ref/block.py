"""A decoder block around the layer: norms, residual and experts on rows that stay scattered; and the end of the model.

::

    x --> attn_norm -> attention layer -+-> ffn_norm -> experts -+->
      \\________________________________/ \\_____________________/

Norms and residual are the same on a rank's own rows as on the whole stream, so between layers nothing has to travel.
Experts are too, where every rank has all of their weights. Where ranks share the weights, each has a summand of every
row, so all of them must work on the same rows: gather, run, sum, and keep the own rows.

DeepSeek-V4 keeps several residual streams and mixes them (mHC); that too goes row by row. Here there is one stream.
Routing is the caller's: an expert here is what one row meets once it is chosen, as the shared expert always is.

A stream is cut into shards by `dsacp_ref.partition.local_rows` and put together by `gathered_in_order`. After the last
layer only the last row of each request is needed; every rank knows from the layout which of them it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.compressor import rms_norm
from dsacp_ref.config import AttentionConfig
from dsacp_ref.exchange import all_gather, all_reduce, check_group, check_sequence, reduce_scatter
from dsacp_ref.extents import FLOATS, Float, token_positions
from dsacp_ref.layer import (
    LayerBatch,
    LayerCache,
    LayerOutput,
    LayerWeights,
    RanksOutput,
    attention_layer,
    layer_over_ranks,
)
from dsacp_ref.partition import Int32, Partition, check_query_start_loc, checked_ranks, partition_tokens
from dsacp_ref.spec import (
    UnsupportedError,
    check_array,
    check_choice,
    check_int,
    check_number,
    check_record,
    contract_error,
)

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
]

Row = TypeVar("Row", bound=np.generic)


class ExpertWeights(NamedTuple):
    """One expert's weights, by the checkpoint's names.

    Fields:
        w1: float[inter, hidden], the gate.
        w3: float[inter, hidden], what it gates.
        w2: float[hidden, inter], the way back.
        swiglu_limit: float > 0 or None: the gate is cut above it, what it gates on both sides (DeepSeek-V4: 10).

    >>> ExpertWeights._fields[:3]
    ('w1', 'w3', 'w2')
    """

    w1: Float
    w3: Float
    w2: Float
    swiglu_limit: float | None = None


class BlockWeights(NamedTuple):
    """One decoder block's weights.

    Fields:
        attn_norm: float[hidden], before the attention layer.
        attention: LayerWeights.
        ffn_norm: float[hidden], before the experts.
        experts: ExpertWeights.

    >>> BlockWeights._fields
    ('attn_norm', 'attention', 'ffn_norm', 'experts')
    """

    attn_norm: Float
    attention: LayerWeights
    ffn_norm: Float
    experts: ExpertWeights


class LastRows(NamedTuple):
    """The last new rows of the requests whose last token one rank owns.

    Fields:
        request_indices: int32[count], ascending.
        rows: the dtype of the shards [count, ...].

    >>> LastRows._fields
    ('request_indices', 'rows')
    """

    request_indices: Int32
    rows: NDArray[np.generic]


# --- experts ---


def expert_output(x: Float, weights: ExpertWeights) -> Float:
    """What one expert makes of some rows: ``w2 (silu(w1 x) * w3 x)``, each row for itself.

    With a share of the weights (`expert_share`) the result is that share's summand.

    Args:
        x: float32 or float64 [num_rows, hidden], after the norm.
        weights: ExpertWeights.

    Returns:
        dtype of ``x`` [num_rows, hidden].

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: DeepSeek-V4 inference model, the shared expert; transformers' DeepseekV4MLP.

    >>> ones = ExpertWeights(np.ones((1, 2)), np.ones((1, 2)), np.ones((2, 1)))
    >>> expert_output(np.array([[1.0, 1.0], [0.0, 0.0]]), ones).round(4).tolist()
    [[3.5232, 3.5232], [0.0, 0.0]]
    """
    check_experts("weights", weights)
    check_array("x", x, FLOATS, ("num_rows", weights.w1.shape[1]), "as wide as w1 takes them")
    gate, up = x @ weights.w1.T.astype(x.dtype), x @ weights.w3.T.astype(x.dtype)
    if weights.swiglu_limit is not None:
        limit = x.dtype.type(weights.swiglu_limit)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    decay = np.exp(-np.abs(gate))  # at most 1, where exp(-gate) would overflow
    sigmoid = np.where(gate < 0, decay, x.dtype.type(1)) / (1 + decay)
    output: Float = (gate * sigmoid * up) @ weights.w2.T.astype(x.dtype)
    return output


def expert_share(weights: ExpertWeights, cp_rank: int, cp_size: int) -> ExpertWeights:
    """One rank's part of an expert: rows of w1 and w3, and the columns of w2 that meet them.

    Args:
        weights: ExpertWeights, whole.
        cp_rank: int, this rank, in [0, cp_size).
        cp_size: int, ranks that share the expert; it divides the rows of w1.

    Returns:
        ExpertWeights: views. The outputs of all shares add up to the whole expert's.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        UnsupportedError: ranks that do not divide the rows of w1.

    Source: tensor-parallel MLP, column-parallel then row-parallel.

    >>> whole = ExpertWeights(np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]]), np.array([[5.0, 6.0]]))
    >>> [part.tolist() for part in expert_share(whole, 1, 2)[:3]]
    [[[2.0]], [[4.0]], [[6.0]]]
    """
    check_experts("weights", weights)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    size = share_size(weights, cp_size)
    mine = slice(cp_rank * size, (cp_rank + 1) * size)
    return ExpertWeights(weights.w1[mine], weights.w3[mine], weights.w2[:, mine], weights.swiglu_limit)


def experts_over_ranks(
    shards: Sequence[Float], weights: ExpertWeights, partition: Partition, *, experts: str = "whole"
) -> list[Float]:
    """The expert's output for rows that are scattered over ranks; the result is that of one device.

    ::

        experts   each rank has    it works on    what travels
        whole     all weights      own rows       nothing
        split     its share        all rows       rows, before; summands, after, of which each rank keeps its rows
        sliced    its share        all rows       rows, before; summands of all rows, after: the rank takes its rows

    Args:
        shards: float32 or float64 [local rows, hidden], one per rank, laid out by ``partition``; pad rows hold
            anything.
        weights: ExpertWeights, whole; unless experts are ``"whole"``, rank r uses the r-th share.
        partition: Partition over the same ranks.
        experts: ``"whole"``, ``"split"`` (which ends in a reduce-scatter) or ``"sliced"`` (in an all-reduce).

    Returns:
        one array [local rows, hidden] per rank, pad rows zero.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        UnsupportedError: ranks that do not divide the rows of w1, unless experts are ``"whole"``.

    Source: SGLang communicator_nsa_cp: reduce-scatter with in-seq-split, a slice with round-robin-split; #24947; the
        case of xLLM #2097, where summands of different rows were added.

    >>> partition = partition_tokens(np.array([0, 3], np.int32), 2)
    >>> ones = ExpertWeights(np.ones((2, 1)), np.ones((2, 1)), np.ones((1, 2)))
    >>> own = [np.array([[1.0], [2.0]]), np.array([[3.0], [np.nan]])]
    >>> [rows.round(2).ravel().tolist() for rows in experts_over_ranks(own, ones, partition, experts="split")]
    [[1.46, 7.05], [17.15, 0.0]]
    """
    check_group(shards, partition)
    check_experts("weights", weights)
    check_array("shards", shards[0], FLOATS, ("local_rows", weights.w1.shape[1]), "as wide as w1 takes them")
    check_expert_mode(experts, weights, len(shards))
    # Pad rows go in as zero, so they come out as zero.
    own = [kept_rows(x, tokens >= 0) for x, tokens in zip(shards, partition.token_indices, strict=True)]
    if experts == "whole":
        return [expert_output(x, weights) for x in own]
    summands = [expert_output(rows, expert_share(weights, rank, len(own))) for rank, rows in enumerate(all_gather(own))]
    if experts == "split":
        return reduce_scatter(summands, [len(x) for x in own])
    starts = np.cumsum([0, *(len(x) for x in own)])
    return [total[start : start + len(x)] for total, start, x in zip(all_reduce(summands), starts, own, strict=False)]


def experts_of_full_rows(inputs: Sequence[Float], weights: ExpertWeights, experts: str) -> list[Float]:
    """The expert's output where every rank has all rows: nothing to gather, and nothing to keep back."""
    if experts == "whole":
        return [expert_output(x, weights) for x in inputs]
    return all_reduce([expert_output(x, expert_share(weights, rank, len(inputs))) for rank, x in enumerate(inputs)])


def kept_rows(x: Float, kept: NDArray[np.bool_]) -> Float:
    """The rows, zero where they are not kept."""
    return np.where(kept[:, None], x, x.dtype.type(0))


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
) -> LayerOutput:
    """One step of a decoder block on one device.

    Args:
        x: float32 or float64 [num_tokens, hidden], the residual stream; rows beyond ``batch.query_start_loc[-1]`` are
            padding.
        weights: BlockWeights.
        cache: LayerCache before the step, in the dtype of ``x``; not changed.
        batch: LayerBatch.
        config: AttentionConfig.
        compress_ratio: int, 1 for a window-only layer.
        given_topk: int32[num_tokens, index_topk], a selection to use instead of the indexer's; or None.

    Returns:
        LayerOutput: output [num_tokens, hidden], the residual stream after the block; topk_indices, cache.

    Raises:
        ContractError: a shape, dtype or value does not hold.

    Source: DeepSeek-V4 inference model, with one residual stream and one expert.

    >>> LayerOutput._fields[0]
    'output'
    """
    check_block(weights, config)
    check_record("batch", batch, LayerBatch)
    check_array("x", x, FLOATS, ("num_tokens", config.hidden_size), "the residual stream")
    x = live_rows(x, np.arange(len(x), dtype=np.int32), batch)
    attended = attention_layer(
        rms_norm(x, weights.attn_norm, config.rms_norm_eps),
        weights.attention,
        cache,
        batch,
        config,
        compress_ratio=compress_ratio,
        given_topk=given_topk,
    )
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
) -> RanksOutput:
    """One step of a decoder block over ranks; the result is that of one device.

    With rows ``"scattered"`` the outputs are laid out like the inputs, so they are the next block's inputs.

    Args:
        inputs: the residual stream, one array per rank. Rows ``"full"``: float32 or float64 [num_tokens, hidden] each.
            ``"scattered"``: [local rows, hidden], laid out by the split, pad rows included.
        weights: BlockWeights, whole; each rank uses what its modes give it.
        caches: one LayerCache per rank, before the step; not changed.
        batch: LayerBatch, global, the same on every rank.
        config: AttentionConfig.
        compress_ratio: int, 1 for a window-only layer.
        split, rows, key_mode, output_mode: str, as in `layer_over_ranks`.
        experts: ``"whole"``, ``"split"`` or ``"sliced"``, as in `experts_over_ranks`. With rows ``"full"`` nothing is
            gathered before, and both of the last end in an all-reduce.
        num_input_tokens: int or None, rows of the padded stream (see `rank_pieces`).
        given_topk: int32[num_tokens, index_topk] by global token, a selection to use instead of the indexer's; or
            None.

    Returns:
        RanksOutput: outputs, the residual stream after the block, zero in rows that belong to no request.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        UnsupportedError: a combination that cannot work, by name.

    Source: SGLang communicator_nsa_cp (scattered from start to end); xLLM #2097, vllm-ascend dsa_cp (full).

    >>> RanksOutput._fields[0]
    'outputs'
    """
    check_block(weights, config)
    check_sequence("inputs", inputs)
    cp_size = check_int("cp_size", len(inputs), 1, hint="one input a rank")
    check_expert_mode(experts, weights.experts, cp_size)
    check_record("batch", batch, LayerBatch)
    partition = partition_tokens(batch.query_start_loc, cp_size, split=split, num_input_tokens=num_input_tokens)
    scattered = check_choice("rows", rows, ("full", "scattered")) == "scattered"
    stream = []
    for rank, (x, own) in enumerate(zip(inputs, partition.token_indices, strict=True)):
        shape = (len(own) if scattered else "num_rows", config.hidden_size)
        check_array("inputs", x, FLOATS, shape, f"rank {rank}; the split says which rows")
        stream.append(live_rows(x, own if scattered else np.arange(len(x), dtype=np.int32), batch))
    attended = layer_over_ranks(
        [rms_norm(x, weights.attn_norm, config.rms_norm_eps) for x in stream],
        weights.attention,
        caches,
        batch,
        config,
        compress_ratio=compress_ratio,
        split=split,
        rows=rows,
        key_mode=key_mode,
        output_mode=output_mode,
        num_input_tokens=num_input_tokens,
        given_topk=given_topk,
    )
    stream = [x + output for x, output in zip(stream, attended.outputs, strict=True)]
    normed = [rms_norm(x, weights.ffn_norm, config.rms_norm_eps) for x in stream]
    if scattered:
        fed = experts_over_ranks(normed, weights.experts, partition, experts=experts)
    else:
        fed = experts_of_full_rows(normed, weights.experts, experts)
    return attended._replace(outputs=[x + output for x, output in zip(stream, fed, strict=True)])


def live_rows(x: Float, tokens: Int32, batch: LayerBatch) -> Float:
    """The rows of these tokens, zero where they belong to no request: what they held goes no further."""
    return kept_rows(x, token_positions(tokens, batch.query_start_loc, batch.seq_lens) >= 0)


# --- the end of the model ---


def last_rows(shards: Sequence[NDArray[Row]], partition: Partition, query_start_loc: Int32) -> list[LastRows]:
    """The last new row of every request, each on the rank that owns it: nothing travels.

    ::

        requests of 5 and 3 new tokens, cp_size 2, zigzag    rank 0: 0 1 4 5     rank 1: 2 3 6 7
        last rows                                            request 0: row 2    request 1: row 3

    Args:
        shards: any dtype [local rows, ...], one per rank, laid out by ``partition``, pad rows included.
        partition: Partition over the same ranks.
        query_start_loc: int32[num_reqs + 1], tokens, the offsets that the partition was made from.

    Returns:
        one LastRows per rank. Requests without new tokens are on none; a padded graph slot is a request like others.

    Raises:
        ContractError: another number of ranks, rows or tokens than the partition has.

    Source: xLLM #2097 gathers all rows before the head; the case of xLLM's cp_input_partition, whose index came from
        another layout than the rows.

    >>> loc = np.array([0, 5, 8], np.int32)
    >>> partition = partition_tokens(loc, 2, split="zigzag")
    >>> shards = [10 * tokens for tokens in partition.token_indices]
    >>> [(owned.request_indices.tolist(), owned.rows.tolist()) for owned in last_rows(shards, partition, loc)]
    [([0], [40]), ([1], [70])]
    """
    check_group(shards, partition)
    check_offsets(query_start_loc, partition)
    request_indices = np.flatnonzero(query_start_loc[1:] > query_start_loc[:-1]).astype(np.int32)
    places = partition.restore_indices[query_start_loc[1:][request_indices] - 1]  # in the ranks' rows end to end
    found, start = [], 0
    for shard in shards:
        owned = (places >= start) & (places < start + len(shard))
        found.append(LastRows(request_indices[owned], shard[places[owned] - start]))
        start += len(shard)
    return found


def gathered_last_rows(
    shards: Sequence[NDArray[Row]], partition: Partition, query_start_loc: Int32
) -> list[NDArray[Row]]:
    """Every rank holds the last new row of every request: what the language model's head reads.

    Only these rows travel; all rows in order are `gathered_in_order`.

    Args:
        shards: any dtype [local rows, ...], one per rank, laid out by ``partition``, pad rows included.
        partition: Partition over the same ranks.
        query_start_loc: int32[num_reqs + 1], tokens, the offsets that the partition was made from.

    Returns:
        one array [num_reqs, ...] per rank, zero for requests without new tokens.

    Raises:
        ContractError: another number of ranks, rows or tokens than the partition has.

    Source: ours; an all-gather with uneven counts, which follow from the layout.

    >>> loc = np.array([0, 5, 5, 8], np.int32)
    >>> partition = partition_tokens(loc, 2, split="zigzag")
    >>> gathered_last_rows([10 * tokens for tokens in partition.token_indices], partition, loc)[1].tolist()
    [40, 0, 70]
    """
    owned = last_rows(shards, partition, query_start_loc)
    request_indices = np.concatenate([part.request_indices for part in owned])
    found = []
    for gathered in all_gather([part.rows for part in owned]):
        rows = np.zeros((len(query_start_loc) - 1, *gathered.shape[1:]), shards[0].dtype)
        rows[request_indices] = gathered
        found.append(rows)
    return found


# --- checks ---


def check_experts(name: str, weights: ExpertWeights) -> None:
    """Refuse weights that do not fit each other."""
    check_record(name, weights, ExpertWeights)
    check_array(f"{name}.w1", weights.w1, FLOATS, ("inter", "hidden"))
    inter, hidden = weights.w1.shape
    check_array(f"{name}.w3", weights.w3, FLOATS, (inter, hidden), "w1 and w3 are alike")
    check_array(f"{name}.w2", weights.w2, FLOATS, (hidden, inter), "w2 leads back from the rows of w1")
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
        check_array(f"weights.{name}", getattr(weights, name), FLOATS, (hidden_size,), "one weight a channel")
    check_experts("weights.experts", weights.experts)
    if weights.experts.w1.shape[1] != hidden_size:
        raise contract_error(
            "weights.experts",
            f"take and give the {hidden_size} channels of hidden_size",
            weights.experts.w1.shape[1],
            "the shapes follow from config",
        )


def check_offsets(query_start_loc: Int32, partition: Partition) -> None:
    """Refuse offsets of other tokens than the partition's."""
    check_query_start_loc(query_start_loc)
    if query_start_loc[-1] != len(partition.restore_indices):
        raise contract_error(
            "query_start_loc",
            f"end at the {len(partition.restore_indices)} tokens of the partition",
            int(query_start_loc[-1]),
            "build both from the same lengths",
        )
