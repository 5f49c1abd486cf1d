"""Collectives as pure functions on the list of all ranks' shards: each returns what every rank would hold.

One process plays all ranks, so a step over ranks is ordinary data flow. Row counts may differ between ranks and may be
0; a rank without rows still takes part. The number of shards is the group: it must be the group that the tokens were
split over, or a gather scrambles them.

The heads/tokens exchange, 2 ranks, 3 + 2 rows, 4 heads::

    before    rank 0: rows 0 1 2, heads 0 1 2 3        after    rank 0: rows 0 .. 4, heads 0 1
              rank 1: rows 3 4,   heads 0 1 2 3                 rank 1: rows 0 .. 4, heads 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.extents import Float
from dsacp_ref.partition import Int32, Partition, restored_rows
from dsacp_ref.spec import check_array, check_int, check_record, contract_error

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "gathered_in_order",
    "head_shards",
    "reduce_scatter",
    "requested_rows",
    "token_shards",
]

Row = TypeVar("Row", bound=np.generic)


def all_gather(shards: Sequence[NDArray[Row]]) -> list[NDArray[Row]]:
    """Every rank holds all ranks' rows, end to end in rank order.

    Args:
        shards: any dtype [rows of the rank, ...], one per rank; counts may differ.

    Returns:
        one array [rows of all ranks, ...] per rank.

    Raises:
        ContractError: no shard, or shards whose rows differ in shape or dtype.

    Source: all_gather with uneven counts, as collectives that take equal shapes do it by padding and cutting.

    >>> [rows.tolist() for rows in all_gather([np.array([1, 2]), np.array([3])])]
    [[1, 2, 3], [1, 2, 3]]
    """
    check_shards(shards)
    gathered = np.concatenate(shards)
    return [gathered.copy() for _ in shards]


def all_reduce(shards: Sequence[Float]) -> list[Float]:
    """Every rank holds the sum of all ranks' arrays, added in rank order.

    Args:
        shards: float [...], one per rank, equal shapes.

    Returns:
        one array per rank.

    Raises:
        ContractError: no shard, or shapes or dtypes that differ.

    Source: the end of a row-parallel projection.

    >>> [total.tolist() for total in all_reduce([np.array([1.0]), np.array([2.0])])]
    [[3.0], [3.0]]
    """
    check_shards(shards, equal_rows=True)
    total = shards[0].copy()
    for shard in shards[1:]:
        total += shard
    return [total.copy() for _ in shards]


def reduce_scatter(shards: Sequence[Float], rows_per_rank: Sequence[int]) -> list[Float]:
    """Every rank holds its own rows of the sum of all ranks' arrays.

    Args:
        shards: float [rows of all ranks, ...], one per rank, equal shapes, rows in rank order.
        rows_per_rank: ints, how many of the rows each rank keeps; they sum to the rows.

    Returns:
        one array [rows of the rank, ...] per rank.

    Raises:
        ContractError: no shard, shapes that differ, or counts that do not sum to the rows.

    Source: reduce_scatter with uneven counts.

    >>> [rows.tolist() for rows in reduce_scatter([np.array([1.0, 2.0, 3.0])] * 2, [2, 1])]
    [[2.0, 4.0], [6.0]]
    """
    check_shards(shards, equal_rows=True)
    bounds = np.cumsum([0, *checked_counts(rows_per_rank, shards)])
    total = all_reduce(shards)[0]
    return [total[bounds[rank] : bounds[rank + 1]].copy() for rank in range(len(shards))]


def all_to_all(blocks: Sequence[Sequence[NDArray[Row]]]) -> list[list[NDArray[Row]]]:
    """Every rank holds the block that each rank has for it: the transpose of the table of blocks.

    Args:
        blocks: ``blocks[source][destination]``, any dtype and shape.

    Returns:
        ``received[destination][source]``.

    Raises:
        ContractError: a rank that does not have one block for every rank.

    Source: all_to_all.

    >>> all_to_all([[np.array([0]), np.array([1])], [np.array([10]), np.array([11])]])[1]
    [array([1]), array([11])]
    """
    check_sequence("blocks", blocks)
    size = check_int("cp_size", len(blocks), 1)
    for rank, row in enumerate(blocks):
        check_sequence("blocks", row)
        if len(row) != size:
            raise contract_error("blocks", f"hold {size} blocks on every rank", f"{len(row)} on rank {rank}")
        for block in row:
            if not hasattr(block, "shape"):
                raise contract_error("blocks", "be arrays", type(block).__name__, f"rank {rank}")
    return [[blocks[source][destination].copy() for source in range(size)] for destination in range(size)]


def head_shards(shards: Sequence[Float]) -> list[Float]:
    """All rows of a share of the heads on every rank, from all heads of a share of the rows.

    Rows are padded to the largest rank's count for the exchange and cut after it, so the result is rank-major: put it
    in token order with `restored_rows`. Cutting alone is right for a contiguous split only.

    Args:
        shards: float [rows of the rank, num_heads, head_dim], one per rank; ranks divide the heads.

    Returns:
        one array [rows of all ranks, num_heads / cp_size, head_dim] per rank; rank r has the r-th share of the heads.

    Raises:
        ContractError: no shard, rows that differ in shape, or ranks that do not divide the heads.

    Source: xLLM #1997 all_to_all_4D(scatter 2, gather 1); vllm-ascend dsa_cp decode output.

    >>> first, second = head_shards([np.array([[[1.0], [2.0]]]), np.array([[[3.0], [4.0]], [[5.0], [6.0]]])])
    >>> first.ravel().tolist(), second.ravel().tolist()
    ([1.0, 3.0, 5.0], [2.0, 4.0, 6.0])
    """
    check_shards(shards)
    size = len(shards)
    num_heads = shards[0].shape[1] if shards[0].ndim == 3 else 0
    if num_heads == 0 or num_heads % size:
        raise contract_error(
            "shards",
            f"have [rows, heads, head_dim] with heads a multiple of cp_size {size}",
            list(shards[0].shape),
            "output modes gather_weight and replicated_weight need no such multiple",
        )
    most = max(len(shard) for shard in shards)
    blocks = [np.split(padded(shard, most), size, axis=1) for shard in shards]
    received = all_to_all(blocks)
    return [np.concatenate([block[: len(shard)] for block, shard in zip(row, shards, strict=True)]) for row in received]


def token_shards(shards: Sequence[Float], rows_per_rank: Sequence[int]) -> list[Float]:
    """All heads of a share of the rows on every rank: the way back from `head_shards`.

    Args:
        shards: float [rows of all ranks, num_heads / cp_size, head_dim], one per rank, rows rank-major.
        rows_per_rank: ints, how many of the rows each rank gets; they sum to the rows.

    Returns:
        one array [rows of the rank, num_heads, head_dim] per rank.

    Raises:
        ContractError: no shard, shapes that differ, or counts that do not sum to the rows.

    Source: the inverse all-to-all.

    >>> rows = [np.arange(4.0).reshape(2, 2, 1), np.arange(4.0, 6.0).reshape(1, 2, 1)]
    >>> [shard.ravel().tolist() for shard in token_shards(head_shards(rows), [2, 1])]
    [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
    """
    check_shards(shards, equal_rows=True)
    check_array("shards", shards[0], (str(shards[0].dtype),), ("rows", "heads", "head_dim"))
    bounds = np.cumsum(checked_counts(rows_per_rank, shards))[:-1]
    received = all_to_all([np.split(shard, bounds) for shard in shards])
    return [np.concatenate(row, axis=1) for row in received]


def gathered_in_order(shards: Sequence[NDArray[Row]], partition: Partition) -> list[NDArray[Row]]:
    """Every rank holds all rows in global token order, pad rows dropped.

    Args:
        shards: any dtype [local rows, ...], one per rank, laid out by ``partition``, pad rows included.
        partition: Partition over the same ranks.

    Returns:
        one array [num_tokens, ...] per rank.

    Raises:
        ContractError: another number of ranks or rows than the partition has.

    Source: SGLang cp_all_gather_rerange_output; xLLM #2097.

    >>> from dsacp_ref.partition import partition_tokens
    >>> partition = partition_tokens(np.array([0, 3], np.int32), 2, split="round_robin")
    >>> gathered_in_order([np.array([10, 12]), np.array([11, 0])], partition)[0].tolist()
    [10, 11, 12]
    """
    check_group(shards, partition)
    return [restored_rows(gathered, partition) for gathered in all_gather(shards)]


def requested_rows(shards: Sequence[NDArray[Row]], partition: Partition, wanted: Sequence[Int32]) -> list[NDArray[Row]]:
    """Every rank holds the rows of the tokens it asked for, wherever they lie: a halo exchange.

    Args:
        shards: any dtype [local rows, ...], one per rank, laid out by ``partition``.
        partition: Partition over the same ranks.
        wanted: int32[count of the rank], global tokens, one list per rank.

    Returns:
        one array [count of the rank, ...] per rank, in the order asked for.

    Raises:
        ContractError: another number of ranks or rows than the partition has, or no such token.

    Source: CANN recipes' halo exchange for V4; an all-to-all with uneven counts.

    >>> from dsacp_ref.partition import partition_tokens
    >>> partition = partition_tokens(np.array([0, 4], np.int32), 2)
    >>> halo = [np.array([], np.int32), np.array([1], np.int32)]
    >>> [rows.tolist() for rows in requested_rows([np.array([10, 11]), np.array([12, 13])], partition, halo)]
    [[], [11]]
    """
    check_group(shards, partition)
    check_sequence("wanted", wanted)
    if len(wanted) != len(shards):
        raise contract_error("wanted", f"hold one list for each of {len(shards)} ranks", len(wanted))
    num_tokens = len(partition.restore_indices)
    received = []
    for rank, (tokens, gathered) in enumerate(zip(wanted, all_gather(shards), strict=True)):
        check_array("wanted", tokens, ("int32",), ("count",), f"rank {rank}")
        if (tokens < 0).any() or (tokens >= num_tokens).any():
            raise contract_error("wanted", f"name tokens in [0, {num_tokens})", tokens.tolist())
        received.append(gathered[partition.restore_indices[tokens]])
    return received


def checked_counts(rows_per_rank: Sequence[int], shards: Sequence[NDArray[Row]]) -> list[int]:
    """How many rows each rank gets, once they are found to be all of them."""
    counts = [check_int("rows_per_rank", count, 0) for count in rows_per_rank]
    if len(counts) != len(shards) or sum(counts) != len(shards[0]):
        raise contract_error(
            "rows_per_rank", f"split {len(shards[0])} rows over {len(shards)} ranks", counts, "one count a rank"
        )
    return counts


def padded(shard: NDArray[Row], rows: int) -> NDArray[Row]:
    """The shard with zero rows at its end."""
    return np.concatenate([shard, np.zeros((rows - len(shard), *shard.shape[1:]), shard.dtype)])


def check_sequence(name: str, items: object) -> None:
    """Refuse anything that does not have one item a rank."""
    if not isinstance(items, list | tuple):
        raise contract_error(name, "be a list with one item a rank", type(items).__name__)


def check_shards(shards: Sequence[NDArray[Row]], *, equal_rows: bool = False) -> None:
    """Refuse shards that no collective could take together."""
    check_sequence("shards", shards)
    check_int("cp_size", len(shards), 1, hint="one shard a rank")
    for rank, shard in enumerate(shards):
        start = 0 if equal_rows else 1
        if not hasattr(shard, "shape") or len(shard.shape) < 1:
            raise contract_error("shards", "be arrays with a row axis", type(shard).__name__, f"rank {rank}")
        if shard.shape[start:] != shards[0].shape[start:] or shard.dtype != shards[0].dtype:
            raise contract_error(
                "shards",
                f"be alike: rank 0 has {shards[0].dtype} {list(shards[0].shape)}",
                f"{shard.dtype} {list(shard.shape)} on rank {rank}",
                "every rank sends the same kind of rows",
            )


def check_group(shards: Sequence[NDArray[Row]], partition: Partition) -> None:
    """Refuse a group that is not the one the tokens were split over."""
    check_shards(shards)
    check_record("partition", partition, Partition)
    if len(shards) != len(partition.token_indices):
        raise contract_error(
            "shards",
            f"come from the {len(partition.token_indices)} ranks of the partition",
            f"{len(shards)} ranks",
            "split and gather over the same group",
        )
    for rank, (shard, tokens) in enumerate(zip(shards, partition.token_indices, strict=True)):
        if len(shard) != len(tokens):
            raise contract_error(
                "shards", f"have {len(tokens)} rows on rank {rank}", len(shard), "pad rows travel with the rest"
            )
