"""Mirror of `dsacp_ref.partition` over torch.

Partitions are planned on the host: they read the values of CPU tensors and refuse others. Rows may be on any device;
a partition that lies elsewhere than the rows is copied to them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsacp_npu._tensors import Int32, check_host, check_tensor, check_torch, torch, unread, values_known
from dsacp_ref.config import SPLITS, SplitRule, split_rule
from dsacp_ref.spec import INT32_MAX, UnsupportedError, check_int, check_record, contract_error

__all__ = [
    "SPLITS",
    "Partition",
    "Pieces",
    "RoundRobinLengths",
    "converted_rows",
    "interleave_lengths",
    "interleave_local_indices",
    "interleave_owners",
    "local_rows",
    "local_token_indices",
    "padded_restore_indices",
    "partition_tokens",
    "rank_pieces",
    "restored_rows",
    "round_robin_lengths",
]

MAX_CP_SIZE = 1 << 20
FLAT_RULES = ("contiguous", "round_robin")  # they cut the padded stream, so their row counts follow from its length


class Pieces(NamedTuple):
    """Mirror of `dsacp_ref.partition.Pieces`."""

    request_indices: Int32
    piece_starts: Int32
    piece_ends: Int32
    piece_rows: Int32


class Partition(NamedTuple):
    """Mirror of `dsacp_ref.partition.Partition`."""

    token_indices: tuple[Int32, ...]
    restore_indices: Int32


class RoundRobinLengths(NamedTuple):
    """Mirror of `dsacp_ref.partition.RoundRobinLengths`."""

    request_indices: Int32
    query_lens: Int32
    carries: Int32


def check_query_start_loc(query_start_loc: Int32) -> None:
    """Refuse offsets that do not start at 0 or that decrease."""
    checked_offsets_on_host(query_start_loc)


def checked_offsets_on_host(query_start_loc: Int32) -> Any:
    """The offsets as a numpy view, once they are found to start at 0 and not to decrease; None if they are not known.

    Lengths of a batch are few: there an operation of numpy's costs a fraction of one of torch's.
    """
    if not is_row(query_start_loc):
        check_tensor("query_start_loc", query_start_loc, ("int32",), ("num_reqs + 1",))
    if query_start_loc.shape[0] == 0:
        raise contract_error("query_start_loc", "have num_reqs + 1 entries", 0, "an empty batch is [0]")
    if not values_known(query_start_loc):
        return None
    offsets = query_start_loc.numpy()
    if offsets[0] != 0:
        raise contract_error("query_start_loc", "start at 0", int(offsets[0]), "prepend the leading zero")
    request = first_on_host(offsets[1:] < offsets[:-1])
    if request is not None:
        raise contract_error(
            "query_start_loc",
            "not decrease",
            f"{offsets[request : request + 2].tolist()} at request {request}",
            "it is cumulative: one offset a request, not one length",
        )
    return offsets


def is_row(row: Any, size: int | None = None) -> bool:
    """Whether this is an int32 row of that size: says sooner than `check_tensor` that there is nothing to refuse."""
    if not isinstance(row, torch.Tensor) or row.dtype is not torch.int32 or row.ndim != 1:
        return False
    return size is None or row.shape[0] == size


def first_on_host(mask: Any) -> int | None:
    """The index of the first True of a numpy row, if any; ``mask.any()`` alone takes several times as long."""
    if len(mask) == 0:
        return None
    first = int(mask.argmax())
    return first if mask[first] else None


def checked_size(cp_size: int) -> int:
    """The group size as a Python int; small enough that its products with token counts stay in 32 bits."""
    return check_int("cp_size", cp_size, 1, MAX_CP_SIZE)


def checked_ranks(cp_size: int, cp_rank: int) -> tuple[int, int]:
    """The group size and a rank inside it, as Python ints."""
    cp_size = checked_size(cp_size)
    return cp_size, check_int("cp_rank", cp_rank, 0, cp_size - 1, f"ranks count from 0 within cp_size {cp_size}")


def padded_token_count(query_start_loc: Int32, cp_size: int, rule: SplitRule, num_input_tokens: int | None) -> int:
    """The rows of the stream that the flat rules cut, a multiple of ``cp_size``."""
    if not values_known(query_start_loc):
        if num_input_tokens is None:
            raise UnsupportedError(
                f"num_input_tokens must be given for split {str(rule)!r} when query_start_loc is "
                f"{unread(query_start_loc)}, got None; the number of rows would have to be read from it"
            )
        num_input_tokens = check_int("num_input_tokens", num_input_tokens, 0, INT32_MAX - 2 * cp_size)
        return -(-num_input_tokens // cp_size) * cp_size
    return padded_known_count(int(query_start_loc[-1]), cp_size, rule, num_input_tokens)


def padded_known_count(num_tokens: int, cp_size: int, rule: SplitRule, num_input_tokens: int | None) -> int:
    """The same, once the number of tokens is known."""
    most = INT32_MAX - 2 * cp_size  # room to round up to 2 * cp_size blocks
    if num_tokens > most:
        hint = "split the batch: token indices are int32"
        raise contract_error("query_start_loc", f"end at or before {most}", num_tokens, hint)
    if num_input_tokens is None:
        num_input_tokens = num_tokens
    hint = f"query_start_loc ends at {num_tokens}; padding may add rows, never remove them"
    num_input_tokens = check_int("num_input_tokens", num_input_tokens, num_tokens, most, hint)
    if num_input_tokens > num_tokens and rule.name not in FLAT_RULES:
        raise contract_error(
            "num_input_tokens",
            f"equal the {num_tokens} tokens of query_start_loc for split {str(rule)!r}",
            num_input_tokens,
            "rows beyond the last request belong to no request; only contiguous and round_robin pad the flat stream",
        )
    return -(-num_input_tokens // cp_size) * cp_size


def rank_pieces(
    query_start_loc: Int32,
    cp_size: int,
    cp_rank: int,
    *,
    split: str = "contiguous",
    num_input_tokens: int | None = None,
) -> Pieces:
    """Mirror of `dsacp_ref.partition.rank_pieces`.

    Limits: plans on the host, so CPU tensors only and not while compiling.
    """
    check_query_start_loc(query_start_loc)
    check_host("query_start_loc", query_start_loc)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    return pieces_of_rule(query_start_loc, cp_size, cp_rank, split_rule(split), num_input_tokens)


def pieces_of_rule(
    query_start_loc: Int32, cp_size: int, cp_rank: int, rule: SplitRule, num_input_tokens: int | None
) -> Pieces:
    """The pieces of one rank, once batch and group are found legal; reads values only where the rule needs them."""
    if rule.name == "round_robin_page":
        check_host(f"query_start_loc of split {str(rule)!r}", query_start_loc)  # the number of pages follows from it
    num_rows = 0  # the other rules take their row counts from the number of requests
    if rule.name in FLAT_RULES or num_input_tokens is not None or values_known(query_start_loc):
        num_rows = padded_token_count(query_start_loc, cp_size, rule, num_input_tokens) // cp_size
    if rule.name == "contiguous":
        return contiguous_pieces(query_start_loc, num_rows * cp_rank, num_rows * (cp_rank + 1))
    if rule.name == "contiguous_request":
        return contiguous_request_pieces(query_start_loc, cp_size, cp_rank)
    if rule.name == "round_robin":
        return round_robin_pieces(query_start_loc, cp_size, cp_rank, num_rows)
    if rule.name == "round_robin_page":
        return round_robin_page_pieces(query_start_loc, cp_size, cp_rank, rule.page_size)
    return zigzag_pieces(query_start_loc, cp_size, cp_rank, rule.name)


def counted(num_rows: int, like: torch.Tensor) -> Int32:
    """int32 ``0 .. num_rows - 1`` on the device of another tensor."""
    return torch.arange(num_rows, dtype=torch.int32, device=like.device)


def contiguous_pieces(query_start_loc: Int32, local_start: int, local_end: int) -> Pieces:
    """Each request's overlap with one slice of the flat stream."""
    clipped = query_start_loc.clamp(local_start, local_end)
    starts = query_start_loc[:-1]
    # Clipping the offsets and subtracting the request's start keeps an empty piece inside its request: at its first
    # token when the slice lies before the request, at its end when the slice lies behind it.
    lengths = query_start_loc[1:] - starts
    piece_ends = torch.minimum((clipped[1:] - starts).clamp(min=0), lengths)
    piece_starts = torch.minimum((clipped[:-1] - starts).clamp(min=0), piece_ends)
    return Pieces(counted(len(starts), starts), piece_starts, piece_ends, piece_ends - piece_starts)


def contiguous_request_pieces(query_start_loc: Int32, cp_size: int, cp_rank: int) -> Pieces:
    """Each request's own slice of ``ceil(q / cp_size)`` tokens."""
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    sizes = -(-lengths // cp_size)
    piece_starts = torch.minimum(sizes * cp_rank, lengths)
    piece_ends = torch.minimum(sizes * (cp_rank + 1), lengths)
    return Pieces(counted(len(lengths), lengths), piece_starts, piece_ends, piece_ends - piece_starts)


def zigzag_pieces(query_start_loc: Int32, cp_size: int, cp_rank: int, name: str) -> Pieces:
    """Blocks r and 2R-1-r of every request, side by side."""
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    num_blocks = 2 * cp_size
    size = lengths // num_blocks if name == "zigzag" else -(-lengths // num_blocks)
    longer = lengths - size * num_blocks
    starts, ends = [], []
    for block in (cp_rank, num_blocks - 1 - cp_rank):
        if name == "zigzag":  # the first `longer` blocks hold one token more
            starts.append(size * block + longer.clamp(max=block))
            ends.append(starts[-1] + size + (longer > block))
        else:
            starts.append(torch.minimum(size * block, lengths))
            ends.append(torch.minimum(size * (block + 1), lengths))
    piece_starts, piece_ends = torch.stack(starts, dim=1).flatten(), torch.stack(ends, dim=1).flatten()
    rows = torch.stack([size, size], dim=1).flatten() if name == "zigzag_padded" else piece_ends - piece_starts
    return Pieces(counted(2 * len(lengths), lengths) // 2, piece_starts, piece_ends, rows)


def round_robin_pieces(query_start_loc: Int32, cp_size: int, cp_rank: int, num_rows: int) -> Pieces:
    """One piece a local row: flat tokens cp_rank, cp_rank + cp_size, ..."""
    tokens = counted(num_rows, query_start_loc) * cp_size + cp_rank
    requests = requests_of_tokens(tokens, query_start_loc)
    real = requests >= 0
    piece_starts = (tokens - query_start_loc[requests]).masked_fill(~real, 0)
    return Pieces(requests, piece_starts, piece_starts + real, torch.ones_like(requests))


def round_robin_page_pieces(query_start_loc: Int32, cp_size: int, cp_rank: int, page_size: int) -> Pieces:
    """Every cp_size-th page of each request; all ranks carry the same number of pages."""
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    pages = -(-lengths // page_size)
    pages_per_rank = -(-pages // cp_size)
    requests = counted(len(lengths), lengths).repeat_interleave(pages_per_rank)
    first_piece = pages_per_rank.cumsum(0) - pages_per_rank  # int64 from here on: a page may end beyond 2**31
    turn = torch.arange(len(requests)) - first_piece[requests]
    page = turn * cp_size + cp_rank
    length = lengths[requests]
    piece_starts = torch.minimum(page * page_size, length).int()
    piece_ends = torch.minimum((page + 1) * page_size, length).int()
    return Pieces(requests, piece_starts, piece_ends, torch.full_like(requests, page_size))


def requests_of_tokens(token_indices: Int32, query_start_loc: Int32) -> Int32:
    """The request of each flat token; -1 for a pad row or a row beyond the last request."""
    offsets, tokens = query_start_loc.contiguous(), token_indices.contiguous()  # searchsorted warns about others
    requests = torch.searchsorted(offsets, tokens, right=True, out_int32=True) - 1
    real = (tokens >= 0) & (tokens < offsets[-1])
    return requests.masked_fill(~real, -1)


def local_token_indices(
    query_start_loc: Int32,
    cp_size: int,
    cp_rank: int,
    *,
    split: str = "contiguous",
    num_input_tokens: int | None = None,
) -> Int32:
    """Mirror of `dsacp_ref.partition.local_token_indices`.

    Limits: plans on the host, so CPU tensors only and not while compiling.
    """
    pieces = rank_pieces(query_start_loc, cp_size, cp_rank, split=split, num_input_tokens=num_input_tokens)
    first_row = pieces.piece_rows.cumsum(0) - pieces.piece_rows
    piece = torch.arange(len(first_row)).repeat_interleave(pieces.piece_rows)
    offset = torch.arange(len(piece)) - first_row[piece] + pieces.piece_starts[piece]
    real = offset < pieces.piece_ends[piece]
    tokens = (query_start_loc[pieces.request_indices[piece]] + offset).masked_fill(~real, -1).int()
    rule = split_rule(split)
    if rule.name != "contiguous":
        return tokens
    # The tail of the flat stream belongs to no request, so no piece holds its pad rows.
    num_rows = padded_token_count(query_start_loc, cp_size, rule, num_input_tokens) // cp_size
    return filled_up(tokens, num_rows)


def filled_up(token_indices: Int32, num_rows: int) -> Int32:
    """The rows with pad rows behind them, up to a count."""
    return torch.cat([token_indices, token_indices.new_full((num_rows - len(token_indices),), -1)])


def partition_tokens(
    query_start_loc: Int32,
    cp_size: int,
    *,
    split: str = "contiguous",
    num_input_tokens: int | None = None,
) -> Partition:
    """Mirror of `dsacp_ref.partition.partition_tokens`.

    Limits: plans on the host, so CPU tensors only and not while compiling.
    """
    cp_size = checked_size(cp_size)
    token_indices = tuple(
        local_token_indices(query_start_loc, cp_size, cp_rank, split=split, num_input_tokens=num_input_tokens)
        for cp_rank in range(cp_size)
    )
    return Partition(token_indices, inverse_of(torch.cat(token_indices), int(query_start_loc[-1])))


def inverse_of(token_indices: Int32, num_tokens: int) -> Int32:
    """Where each token stands in a list of rows that holds every token once, pad rows aside."""
    # One place more than tokens takes the pad rows, so that no shape depends on how many there are.
    restore = token_indices.new_full((num_tokens + 1,), -1)
    place = token_indices.masked_fill(token_indices < 0, num_tokens)
    restore[place] = counted(len(place), place)
    return restore[:num_tokens]


def padded_restore_indices(partition: Partition) -> Int32:
    """Mirror of `dsacp_ref.partition.padded_restore_indices`."""
    check_record("partition", partition, Partition)
    most = max(len(rows) for rows in partition.token_indices)
    padded = torch.cat([filled_up(rows, most) for rows in partition.token_indices])
    return inverse_of(padded, len(partition.restore_indices))


def local_rows(rows: torch.Tensor, partition: Partition, cp_rank: int) -> torch.Tensor:
    """Mirror of `dsacp_ref.partition.local_rows`."""
    check_record("partition", partition, Partition)
    _, cp_rank = checked_ranks(len(partition.token_indices), cp_rank)
    check_rows("rows", rows, len(partition.restore_indices), "one row a token of the partition, without padding")
    return spread_rows(rows, partition.token_indices[cp_rank])


def restored_rows(gathered: torch.Tensor, partition: Partition) -> torch.Tensor:
    """Mirror of `dsacp_ref.partition.restored_rows`."""
    check_record("partition", partition, Partition)
    total = sum(len(rows) for rows in partition.token_indices)
    check_rows("gathered", gathered, total, "the ranks' rows end to end, each with its pad rows")
    return gathered[partition.restore_indices.to(gathered.device)]


def converted_rows(gathered: torch.Tensor, source: Partition, target: Partition) -> torch.Tensor:
    """Mirror of `dsacp_ref.partition.converted_rows`."""
    check_record("source", source, Partition)
    check_record("target", target, Partition)
    tokens = restored_rows(gathered, source)
    if len(target.restore_indices) != len(source.restore_indices):
        raise contract_error(
            "target",
            f"partition the {len(source.restore_indices)} tokens of source",
            len(target.restore_indices),
            "build both from the same query_start_loc",
        )
    return spread_rows(tokens, torch.cat(target.token_indices))


def check_rows(name: str, rows: torch.Tensor, count: int, hint: str) -> None:
    """Refuse a row-aligned array of another length: it was cut by another rule, or not at all."""
    if not hasattr(rows, "shape") or len(rows.shape) < 1:
        got = list(rows.shape) if hasattr(rows, "shape") else type(rows).__name__
        raise contract_error(name, "be an array with a row axis", got, hint)
    check_torch(name, rows)
    if rows.shape[0] != count:
        raise contract_error(name, f"have {count} rows", rows.shape[0], hint)


def spread_rows(rows: torch.Tensor, token_indices: Int32) -> torch.Tensor:
    """``rows[token_indices]`` with zeros where the index is -1."""
    if rows.shape[0] == 0:  # nothing to take, even for the pad rows that are thrown away below
        return rows.new_zeros(len(token_indices), *rows.shape[1:])
    token_indices = token_indices.to(rows.device)
    pad = (token_indices < 0).reshape(-1, *[1] * (rows.ndim - 1))
    return rows[token_indices].masked_fill(pad, 0)


def round_robin_lengths(query_start_loc: Int32, cp_size: int, cp_rank: int) -> RoundRobinLengths:
    """Mirror of `dsacp_ref.partition.round_robin_lengths`.

    Limits: how many requests are present depends on values, so CPU tensors only and not while compiling.
    """
    check_query_start_loc(query_start_loc)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    check_host("query_start_loc", query_start_loc)
    # Tokens cp_rank, cp_rank + cp_size, ... lie before an offset: so many, counted in 64 bits.
    held = (query_start_loc.long() + (cp_size - 1 - cp_rank)) // cp_size
    query_lens = (held[1:] - held[:-1]).int()
    present = query_lens.nonzero()[:, 0].int()
    return RoundRobinLengths(present, query_lens[present], (query_start_loc[1:] - held[1:] * cp_size).int())


def interleave_owners(positions: Int32, cp_size: int, interleave_size: int) -> Int32:
    """Mirror of `dsacp_ref.partition.interleave_owners`."""
    size = checked_granule(positions, "positions", cp_size, interleave_size, lowest=-1)
    owners = positions // size % checked_size(cp_size)
    return owners.masked_fill(positions < 0, -1)


def interleave_local_indices(positions: Int32, cp_size: int, interleave_size: int) -> Int32:
    """Mirror of `dsacp_ref.partition.interleave_local_indices`."""
    size = checked_granule(positions, "positions", cp_size, interleave_size, lowest=-1)
    local = positions // (size * checked_size(cp_size)) * size + positions % size
    return local.masked_fill(positions < 0, -1)


def interleave_lengths(lengths: Int32, cp_size: int, cp_rank: int, interleave_size: int) -> Int32:
    """Mirror of `dsacp_ref.partition.interleave_lengths`."""
    size = checked_granule(lengths, "lengths", cp_size, interleave_size, lowest=0)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    whole, rest = lengths // (size * cp_size), lengths % (size * cp_size)
    return whole * size + (rest - size * cp_rank).clamp(0, size)


def checked_granule(values: Int32, name: str, cp_size: int, interleave_size: int, lowest: int) -> int:
    """The granule that one rank stores at a time, once group, granule and values are found legal."""
    check_tensor(name, values, ("int32",), tuple(getattr(values, "shape", ())))
    interleave_size = check_int("interleave_size", interleave_size, 1, INT32_MAX // checked_size(cp_size))
    if values_known(values) and (values < lowest).any():
        hint = "-1 stands for nothing" if lowest < 0 else "a key count is never negative"
        raise contract_error(name, f"be >= {lowest}", int(values.min()), hint)
    return interleave_size
