"""The collectives of `dsacp_npu.exchange`, and a layer, between processes: one rank's view over a real process group.

A function takes this rank's shard where its namesake takes the list of all, and returns what the namesake returns for
this rank: rank r holds ``exchange.f(shards, ...)[r]``, exactly where rows only move. Sums are added by the transport:
in the shards' dtype, in an order of its own, so they agree to rounding (``cp_size - 1`` additions).

What every rank knows is not asked for again: row counts, shapes and wanted tokens come from planning, which gives the
same numbers everywhere, so no call carries a second collective. It is the caller's duty that every rank makes the same
calls, with rows of the same shape and dtype and with the same counts: no rank can see another's mistake. A rank without
rows calls like the rest. Nothing waits for a device.

Counts may differ between ranks. all-to-all moves them as they are; all-gather and reduce-scatter want equal sizes
(gloo refuses others), so rows are padded to the largest count and cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsacp_npu import exchange, layer
from dsacp_npu._geometry import rows_of
from dsacp_npu._layer_checks import check_reads, check_step, check_weights
from dsacp_npu._layer_parts import copied
from dsacp_npu._layer_records import LayerBatch, LayerCache, LayerOutput, LayerWeights
from dsacp_npu._rank_layer import Exchanged, Modes, run_alone
from dsacp_npu._ranks import Ranks, connect, ranks_of
from dsacp_npu._tensors import Float, Int32, check_host, check_tensor, dtype_name, torch
from dsacp_npu.partition import Partition, counted, restored_rows
from dsacp_ref.config import AttentionConfig
from dsacp_ref.spec import check_int, check_record, contract_error

if TYPE_CHECKING:
    from dsacp_npu.backend import Backend

__all__ = [
    "Ranks",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "connect",
    "gathered_in_order",
    "head_parallel_layer",
    "head_parallel_layer_",
    "head_shards",
    "layer_over_ranks",
    "layer_over_ranks_",
    "ranks_of",
    "reduce_scatter",
    "requested_rows",
    "token_shards",
]

dist = torch.distributed


def all_gather(shard: torch.Tensor, ranks: Ranks, rows_per_rank: Sequence[int]) -> torch.Tensor:
    """All ranks' rows, end to end in rank order.

    Args:
        shard: any dtype [rows of this rank, ...].
        ranks: the group.
        rows_per_rank: ints, the rows of every rank.

    Returns:
        array [rows of all ranks, ...].

    Raises:
        ContractError: counts that are not one a rank, or not this rank's rows.
    """
    counts = counts_of(rows_per_rank, ranks)
    check_own_count(shard, ranks, counts)
    row, total, most = shard.shape[1:], sum(counts), max(counts)
    if total * row.numel() == 0:  # on every rank: none has anything to send
        return shard.new_empty(total, *row)
    gathered = shard.new_empty(ranks.cp_size, most, *row)
    dist.all_gather(list(gathered), padded(shard, most), group=ranks.group)
    if total == ranks.cp_size * most:
        return gathered.flatten(0, 1)
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def all_reduce(shard: Float, ranks: Ranks) -> Float:
    """The sum of all ranks' arrays, added by the transport. Every rank's shard has the same shape.

    Args:
        shard: float [rows, ...].
        ranks: the group.

    Returns:
        array like the shard.

    Raises:
        ContractError: no array with a row axis.
    """
    check_record("ranks", ranks, Ranks)
    exchange.check_shard(shard, ranks.cp_rank)
    total = shard.clone(memory_format=torch.contiguous_format)
    if total.numel():
        dist.all_reduce(total, group=ranks.group)
    return total


def reduce_scatter(shard: Float, ranks: Ranks, rows_per_rank: Sequence[int]) -> Float:
    """This rank's rows of the sum of all ranks' arrays, added by the transport.

    Args:
        shard: float [rows of all ranks, ...], rows in rank order.
        ranks: the group.
        rows_per_rank: ints, how many of the rows each rank keeps; they sum to the rows.

    Returns:
        array [rows of this rank, ...].

    Raises:
        ContractError: counts that do not sum to the rows.
    """
    check_record("ranks", ranks, Ranks)
    exchange.check_shard(shard, ranks.cp_rank)
    counts = exchange.checked_counts(rows_per_rank, ranks.cp_size, len(shard))
    own = shard.new_empty(max(counts), *shard.shape[1:])
    if own.numel():
        dist.reduce_scatter(own, [padded(rows, len(own)) for rows in shard.split(counts)], group=ranks.group)
    return own[: counts[ranks.cp_rank]].clone()


def all_to_all(blocks: Sequence[torch.Tensor], ranks: Ranks, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The block that each rank has for this one.

    Shapes are not sent: a rank that had to learn them from a device would wait for it, and planning knows them.

    Args:
        blocks: one block for every rank, any shapes, one dtype.
        ranks: the group.
        shapes: the shape of the block that comes from each rank.

    Returns:
        list of arrays of these shapes, in rank order.

    Raises:
        ContractError: not one block and one shape a rank, several dtypes, or a block for oneself of another shape.
    """
    check_record("ranks", ranks, Ranks)
    exchange.check_blocks(blocks, ranks.cp_size, ranks.cp_rank)
    exchange.check_sequence("shapes", shapes)
    if len(shapes) != ranks.cp_size:
        raise contract_error("shapes", f"hold one shape for each of {ranks.cp_size} ranks", len(shapes))
    due = [tuple(check_int("shapes", size, 0) for size in shape) for shape in shapes]
    dtypes = sorted({dtype_name(block) for block in blocks})
    if len(dtypes) > 1:
        raise contract_error("blocks", "be of one dtype", " and ".join(dtypes), "exchange each dtype in its own call")
    own = list(blocks[ranks.cp_rank].shape)
    if own != list(due[ranks.cp_rank]):
        hint = "shapes are those of the blocks that come in"
        raise contract_error("shapes", f"have {own} at this rank {ranks.cp_rank}", list(due[ranks.cp_rank]), hint)
    sizes = [torch.Size(shape).numel() for shape in due]
    received = exchanged(list(blocks), ranks, sizes).split(sizes)
    return [block.view(shape) for block, shape in zip(received, due, strict=True)]


def head_shards(shard: Float, ranks: Ranks, rows_per_rank: Sequence[int]) -> Float:
    """All rows of this rank's share of the heads, from all heads of its share of the rows.

    Args:
        shard: float [rows of this rank, num_heads, head_dim]; ranks divide the heads.
        ranks: the group.
        rows_per_rank: ints, the rows of every rank.

    Returns:
        array [rows of all ranks, num_heads / cp_size, head_dim], rank-major.

    Raises:
        ContractError: counts that are not one a rank, or not this rank's rows, or heads that ranks do not divide.
    """
    counts = counts_of(rows_per_rank, ranks)
    check_own_count(shard, ranks, counts)
    exchange.check_heads(shard, ranks.cp_size)
    share = shard.chunk(ranks.cp_size, dim=1)
    row = share[0].shape[1:]
    received = exchanged(list(share), ranks, [count * row.numel() for count in counts])
    return received.view(sum(counts), *row)


def token_shards(shard: Float, ranks: Ranks, rows_per_rank: Sequence[int]) -> Float:
    """All heads of this rank's share of the rows: the way back from `head_shards`.

    Args:
        shard: float [rows of all ranks, num_heads / cp_size, head_dim], rank-major.
        ranks: the group.
        rows_per_rank: ints, how many of the rows each rank gets; they sum to the rows.

    Returns:
        array [rows of this rank, num_heads, head_dim].

    Raises:
        ContractError: counts that do not sum to the rows.
    """
    check_record("ranks", ranks, Ranks)
    exchange.check_shard(shard, ranks.cp_rank)
    check_tensor("shards", shard, (dtype_name(shard),), ("rows", "heads", "head_dim"))
    counts = exchange.checked_counts(rows_per_rank, ranks.cp_size, len(shard))
    rows, heads, head_dim = counts[ranks.cp_rank], *shard.shape[1:]
    received = exchanged(list(shard.split(counts)), ranks, [rows * heads * head_dim] * ranks.cp_size)
    by_rank = received.view(ranks.cp_size, rows, heads, head_dim)
    return by_rank.transpose(0, 1).reshape(rows, ranks.cp_size * heads, head_dim)


def gathered_in_order(shard: torch.Tensor, ranks: Ranks, partition: Partition) -> torch.Tensor:
    """All rows in global token order, pad rows dropped.

    Args:
        shard: any dtype [local rows, ...], laid out by ``partition``, pad rows included.
        ranks: the group.
        partition: Partition over the same ranks.

    Returns:
        array [num_tokens, ...].

    Raises:
        ContractError: another number of ranks or rows than the partition has.
    """
    check_layout(shard, ranks, partition)
    return restored_rows(all_gather(shard, ranks, partition_counts(partition)), partition)


def requested_rows(shard: torch.Tensor, ranks: Ranks, partition: Partition, wanted: Sequence[Int32]) -> torch.Tensor:
    """The rows of the tokens that this rank asked for. Only those move, in one all-to-all.

    Args:
        shard: any dtype [local rows, ...], laid out by ``partition``.
        ranks: the group.
        partition: Partition over the same ranks, on the host.
        wanted: int32[count of the rank], global tokens, on the host: the lists of all ranks, the same everywhere.

    Returns:
        array [count of this rank, ...], in the order asked for.

    Raises:
        ContractError: another number of ranks or rows than the partition has, or no such token.
        UnsupportedError: a partition or lists on a device; who sends what is planned on the host.
    """
    check_layout(shard, ranks, partition)
    exchange.check_wanted(wanted, partition)
    for name, tensor in (("partition", partition.restore_indices), *(("wanted", tokens) for tokens in wanted)):
        check_host(name, tensor)
    row = shard.shape[1:]
    if not sum(map(len, wanted)) * row.numel():  # on every rank: none sends anything
        return shard.new_empty(len(wanted[ranks.cp_rank]), *row)
    places = [owners_and_rows(tokens, partition) for tokens in wanted]
    sent = [rows[owners == ranks.cp_rank] for owners, rows in places]
    owners, _ = places[ranks.cp_rank]
    arrival = owners.argsort(stable=True)  # each source sends its rows in the order of the list
    counts = owners.bincount(minlength=ranks.cp_size).tolist()
    received = exchanged(
        [shard[rows.to(shard.device)] for rows in sent], ranks, [count * row.numel() for count in counts]
    )
    return received.view(-1, *row)[arrival.argsort().to(shard.device)]


def layer_over_ranks(
    x: Float,
    weights: LayerWeights,
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
    num_input_tokens: int | None = None,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> LayerOutput:
    """This rank's part of one step of a layer: `dsacp_npu.layer.layer_over_ranks` with a process for every rank.

    Args:
        x: float [num_tokens, hidden] with rows ``"full"``, else [local rows, hidden], pad rows included.
        weights: LayerWeights, all heads and groups.
        cache: LayerCache of this rank; not changed.
        batch: LayerBatch, global, the same on every rank, CPU tensors.
        config: AttentionConfig.
        ranks: the group.
        compress_ratio, split, rows, key_mode, output_mode, num_input_tokens, given_topk, backend: as there, the same
            on every rank.

    Returns:
        LayerOutput: output, topk_indices of the local rows, cache after the step.

    Raises:
        ContractError: a shape, dtype or value does not hold. What all ranks share (batch, modes, config) is refused by
            all of them; a rank that alone refuses its own input leaves the others waiting until their timeout.
        UnsupportedError: a combination that cannot work, by name.
    """
    modes = Modes(split, rows, key_mode, output_mode, num_input_tokens)
    return over_ranks(
        x, weights, cache, batch, config, ranks, compress_ratio, modes, given_topk, backend, in_place=False
    )


def layer_over_ranks_(
    x: Float,
    weights: LayerWeights,
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
    num_input_tokens: int | None = None,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> LayerOutput:
    """`layer_over_ranks`, written into the cache, which is returned in the output."""
    modes = Modes(split, rows, key_mode, output_mode, num_input_tokens)
    return over_ranks(
        x, weights, cache, batch, config, ranks, compress_ratio, modes, given_topk, backend, in_place=True
    )


def over_ranks(
    x: Float,
    weights: LayerWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    ranks: Ranks,
    compress_ratio: int,
    modes: Modes,
    given_topk: Int32 | None,
    backend: Backend | None,
    *,
    in_place: bool,
) -> LayerOutput:
    """This rank's step."""
    check_record("ranks", ranks, Ranks)
    members = {ranks.cp_rank: (x, cache)}
    plan, call = layer.planned_step(
        members, ranks.cp_size, weights, batch, config, compress_ratio, modes, given_topk, backend
    )
    own = cache if in_place else copied(cache)
    program = layer.program_of(x, own, ranks.cp_rank, plan, modes, call, given_topk)
    output: LayerOutput = run_alone(program, lambda wish: answered(wish, ranks))
    return output


def answered(wish: Exchanged, ranks: Ranks) -> Any:
    """What a collective that a rank's program waits for gives it."""
    return globals()[wish.name](wish.shard, ranks, *wish.arguments)


def head_parallel_layer(
    x: Float,
    weights: LayerWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    ranks: Ranks,
    *,
    compress_ratio: int,
    backend: Backend | None = None,
) -> LayerOutput:
    """This rank's part of one step by heads: `dsacp_npu.layer.head_parallel_layer` with a process for every rank.

    Args:
        x: float [num_tokens, hidden], the same on every rank.
        weights: LayerWeights, all heads and groups; the rank's share is used.
        cache: LayerCache of this rank; not changed.
        batch: LayerBatch, the same on every rank.
        config: AttentionConfig.
        ranks: the group.
        compress_ratio: int, 1 for a window-only layer.
        backend: the functions to use; None is torch.

    Returns:
        LayerOutput: the whole output [num_tokens, hidden], topk_indices, cache after the step.

    Raises:
        ContractError: a shape, dtype or value does not hold.
        UnsupportedError: ranks that do not divide heads and o_groups.
    """
    check_heads_step(x, weights, cache, batch, config, ranks, compress_ratio)
    return heads_step(x, weights, copied(cache), batch, config, ranks, compress_ratio, backend)


def head_parallel_layer_(
    x: Float,
    weights: LayerWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    ranks: Ranks,
    *,
    compress_ratio: int,
    backend: Backend | None = None,
) -> LayerOutput:
    """`head_parallel_layer`, written into the cache, which is returned in the output."""
    check_heads_step(x, weights, cache, batch, config, ranks, compress_ratio)
    return heads_step(x, weights, cache, batch, config, ranks, compress_ratio, backend)


def check_heads_step(
    x: Float,
    weights: LayerWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    ranks: Ranks,
    compress_ratio: int,
) -> None:
    """Refuse arguments that do not belong together, before anything is written or sent."""
    check_record("ranks", ranks, Ranks)
    layer.check_heads_divide(ranks.cp_size, config, compress_ratio)
    check_weights(weights, config, compress_ratio)
    check_step(x, batch, cache, weights, config)
    positions = rows_of(counted(len(x), batch.seq_lens), batch).positions
    check_reads(positions, batch, cache, None, compress_ratio, config)


def heads_step(
    x: Float,
    weights: LayerWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    ranks: Ranks,
    compress_ratio: int,
    backend: Backend | None,
) -> LayerOutput:
    """This rank's step by heads, written into the cache."""
    call = layer.call_of(weights, config, compress_ratio, backend)
    partial, chosen = layer.by_heads(x, cache, ranks.cp_rank, ranks.cp_size, batch, call)
    return LayerOutput(all_reduce(partial, ranks), chosen, cache)


def owners_and_rows(tokens: Int32, partition: Partition) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank that holds each token, and the token's row there."""
    ends = torch.tensor(partition_counts(partition)).cumsum(0)
    places = partition.restore_indices[tokens].long()
    owners = torch.bucketize(places, ends, right=True)
    starts = torch.cat([ends.new_zeros(1), ends])
    return owners, places - starts[owners]


def exchanged(blocks: list[torch.Tensor], ranks: Ranks, received_sizes: list[int]) -> torch.Tensor:
    """The numbers that the ranks have for this one, end to end; blocks go as they are, whatever their sizes."""
    flat = torch.cat([block.reshape(-1) for block in blocks])
    received = flat.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, flat, received_sizes, [block.numel() for block in blocks], group=ranks.group)
    return received


def padded(shard: torch.Tensor, rows: int) -> torch.Tensor:
    """The shard, contiguous, with zero rows at its end: what a transport sends must have a value."""
    if len(shard) == rows:
        return shard.contiguous()
    return torch.cat([shard, shard.new_zeros(rows - len(shard), *shard.shape[1:])])


def partition_counts(partition: Partition) -> list[int]:
    """The rows of every rank, pad rows included."""
    return [len(tokens) for tokens in partition.token_indices]


def counts_of(rows_per_rank: Sequence[int], ranks: Ranks) -> list[int]:
    """One row count a rank, as Python ints."""
    check_record("ranks", ranks, Ranks)
    counts = [check_int("rows_per_rank", count, 0) for count in rows_per_rank]
    if len(counts) != ranks.cp_size:
        raise contract_error("rows_per_rank", f"hold one count for each of {ranks.cp_size} ranks", counts)
    return counts


def check_own_count(shard: torch.Tensor, ranks: Ranks, counts: list[int]) -> None:
    """Refuse a shard that is not as long as all ranks were told."""
    exchange.check_shard(shard, ranks.cp_rank)
    if len(shard) != counts[ranks.cp_rank]:
        due, hint = counts[ranks.cp_rank], "the other ranks expect what rows_per_rank says"
        raise contract_error("shards", f"have {due} rows on rank {ranks.cp_rank}", len(shard), hint)


def check_layout(shard: torch.Tensor, ranks: Ranks, partition: Partition) -> None:
    """Refuse a group that is not the one the tokens were split over, and a shard of another length."""
    check_record("ranks", ranks, Ranks)
    exchange.check_shard(shard, ranks.cp_rank)
    exchange.check_split(partition, ranks.cp_size)
    exchange.check_own_rows(shard, partition, ranks.cp_rank)
