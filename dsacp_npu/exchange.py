"""Mirror of `dsacp_ref.exchange` over torch: one process plays all ranks. Never waits for a device.

Nothing is moved, so nothing is padded either: a share is cut from each shard and the cuts laid end to end. The same
collectives between processes are `dsacp_npu.distributed`.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsacp_npu._tensors import (
    Float,
    Int32,
    check_tensor,
    check_torch,
    computing_dtype,
    dtype_name,
    torch,
    values_known,
)
from dsacp_npu.partition import Partition, restored_rows
from dsacp_ref.spec import check_int, check_record, contract_error

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


def all_gather(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Mirror of `dsacp_ref.exchange.all_gather`."""
    check_shards(shards)
    gathered = torch.cat(tuple(shards))
    return [gathered.clone() for _ in shards]


def all_reduce(shards: Sequence[Float]) -> list[Float]:
    """Mirror of `dsacp_ref.exchange.all_reduce`. bfloat16 and float16 are added in float32 and rounded once."""
    check_shards(shards, equal_rows=True)
    total = sum_of(shards)
    return [total.clone() for _ in shards]


def sum_of(shards: Sequence[Float]) -> Float:
    """The sum in rank order, in the shards' dtype."""
    first = shards[0]
    total = first.to(computing_dtype(first.dtype)) if first.is_floating_point() else first
    for shard in shards[1:]:
        total = total + shard.to(total.dtype)
    return total.to(first.dtype)


def reduce_scatter(shards: Sequence[Float], rows_per_rank: Sequence[int]) -> list[Float]:
    """Mirror of `dsacp_ref.exchange.reduce_scatter`. bfloat16 and float16 are added in float32 and rounded once."""
    check_shards(shards, equal_rows=True)
    counts = checked_counts(rows_per_rank, len(shards), len(shards[0]))
    return [rows.clone() for rows in sum_of(shards).split(counts)]


def all_to_all(blocks: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Mirror of `dsacp_ref.exchange.all_to_all`."""
    check_sequence("blocks", blocks)
    size = check_int("cp_size", len(blocks), 1)
    for rank, row in enumerate(blocks):
        check_blocks(row, size, rank)
    return [[row[destination].clone() for row in blocks] for destination in range(size)]


def head_shards(shards: Sequence[Float]) -> list[Float]:
    """Mirror of `dsacp_ref.exchange.head_shards`."""
    check_shards(shards)
    size = len(shards)
    check_heads(shards[0], size)
    shares = [shard.chunk(size, dim=1) for shard in shards]
    return [torch.cat([share[rank] for share in shares]) for rank in range(size)]


def token_shards(shards: Sequence[Float], rows_per_rank: Sequence[int]) -> list[Float]:
    """Mirror of `dsacp_ref.exchange.token_shards`."""
    check_shards(shards, equal_rows=True)
    check_tensor("shards", shards[0], (dtype_name(shards[0]),), ("rows", "heads", "head_dim"))
    counts = checked_counts(rows_per_rank, len(shards), len(shards[0]))
    shares = [shard.split(counts) for shard in shards]
    return [torch.cat([share[rank] for share in shares], dim=1) for rank in range(len(shards))]


def gathered_in_order(shards: Sequence[torch.Tensor], partition: Partition) -> list[torch.Tensor]:
    """Mirror of `dsacp_ref.exchange.gathered_in_order`."""
    check_group(shards, partition)
    rows = restored_rows(torch.cat(tuple(shards)), partition)
    return [rows.clone() for _ in shards]


def requested_rows(shards: Sequence[torch.Tensor], partition: Partition, wanted: Sequence[Int32]) -> list[torch.Tensor]:
    """Mirror of `dsacp_ref.exchange.requested_rows`."""
    check_group(shards, partition)
    check_wanted(wanted, partition)
    gathered = torch.cat(tuple(shards))
    restore = partition.restore_indices.to(gathered.device)
    return [gathered[restore[tokens.to(gathered.device)]] for tokens in wanted]


def checked_counts(rows_per_rank: Sequence[int], size: int, num_rows: int) -> list[int]:
    """How many rows each rank gets, once they are found to be all of them."""
    counts = [check_int("rows_per_rank", count, 0) for count in rows_per_rank]
    if len(counts) != size or sum(counts) != num_rows:
        raise contract_error("rows_per_rank", f"split {num_rows} rows over {size} ranks", counts, "one count a rank")
    return counts


def check_sequence(name: str, items: object) -> None:
    """Refuse anything that does not have one item a rank."""
    if not isinstance(items, (list, tuple)):
        raise contract_error(name, "be a list with one item a rank", type(items).__name__)


def check_shard(shard: torch.Tensor, rank: int) -> None:
    """Refuse what has no rows."""
    if not hasattr(shard, "shape") or len(shard.shape) < 1:
        raise contract_error("shards", "be arrays with a row axis", type(shard).__name__, f"rank {rank}")
    check_torch("shards", shard)


def check_shards(shards: Sequence[torch.Tensor], *, equal_rows: bool = False) -> None:
    """Refuse shards that no collective could take together."""
    check_sequence("shards", shards)
    check_int("cp_size", len(shards), 1, hint="one shard a rank")
    start = 0 if equal_rows else 1
    for rank, shard in enumerate(shards):
        check_shard(shard, rank)
        if shard.shape[start:] != shards[0].shape[start:] or shard.dtype != shards[0].dtype:
            raise contract_error(
                "shards",
                f"be alike: rank 0 has {dtype_name(shards[0])} {list(shards[0].shape)}",
                f"{dtype_name(shard)} {list(shard.shape)} on rank {rank}",
                "every rank sends the same kind of rows",
            )


def check_blocks(row: Sequence[torch.Tensor], size: int, rank: int) -> None:
    """Refuse a rank that does not have one block for every rank."""
    check_sequence("blocks", row)
    if len(row) != size:
        raise contract_error("blocks", f"hold {size} blocks on every rank", f"{len(row)} on rank {rank}")
    for block in row:
        if not hasattr(block, "shape"):
            raise contract_error("blocks", "be arrays", type(block).__name__, f"rank {rank}")
        check_torch("blocks", block)


def check_heads(shard: torch.Tensor, size: int) -> None:
    """Refuse heads that the ranks cannot share evenly."""
    num_heads = shard.shape[1] if len(shard.shape) == 3 else 0
    if num_heads == 0 or num_heads % size:
        raise contract_error(
            "shards",
            f"have [rows, heads, head_dim] with heads a multiple of cp_size {size}",
            list(shard.shape),
            "output modes gather_weight and replicated_weight need no such multiple",
        )


def check_group(shards: Sequence[torch.Tensor], partition: Partition) -> None:
    """Refuse a group that is not the one the tokens were split over."""
    check_shards(shards)
    check_split(partition, len(shards))
    for rank, shard in enumerate(shards):
        check_own_rows(shard, partition, rank)


def check_split(partition: Partition, size: int) -> None:
    """Refuse a partition over another number of ranks."""
    check_record("partition", partition, Partition)
    if size != len(partition.token_indices):
        raise contract_error(
            "shards",
            f"come from the {len(partition.token_indices)} ranks of the partition",
            f"{size} ranks",
            "split and gather over the same group",
        )


def check_own_rows(shard: torch.Tensor, partition: Partition, rank: int) -> None:
    """Refuse a shard that is not as long as the partition says."""
    due = len(partition.token_indices[rank])
    if len(shard) != due:
        raise contract_error("shards", f"have {due} rows on rank {rank}", len(shard), "pad rows travel with the rest")


def check_wanted(wanted: Sequence[Int32], partition: Partition) -> None:
    """Refuse anything but one list a rank of tokens that exist."""
    check_sequence("wanted", wanted)
    size, num_tokens = len(partition.token_indices), len(partition.restore_indices)
    if len(wanted) != size:
        raise contract_error("wanted", f"hold one list for each of {size} ranks", len(wanted))
    for rank, tokens in enumerate(wanted):
        check_tensor("wanted", tokens, ("int32",), ("count",), f"rank {rank}")
        if values_known(tokens) and ((tokens < 0) | (tokens >= num_tokens)).any():
            raise contract_error("wanted", f"name tokens in [0, {num_tokens})", tokens.tolist())
