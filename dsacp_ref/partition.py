"""Token stream -> ranks: which rows each rank owns, in which order, and how a gather is put back in order.

Everything follows from one idea. A split rule cuts the new tokens of every request into *pieces*, runs of consecutive
tokens, and gives each piece to a rank::

    one request of 9 new tokens, cp_size 2                      rank 0   rank 1
    contiguous, contiguous_request   0 0 0 0 0 1 1 1 1          [0,5)    [5,9)
    zigzag        (blocks 3 2 2 2)   0 0 0 1 1 1 1 0 0          [0,3) [7,9)    [3,5) [5,7)
    zigzag_ceil   (blocks 3 3 3 0)   0 0 0 1 1 1 1 1 1          [0,3) [9,9)    [3,6) [6,9)
    round_robin                      0 1 0 1 0 1 0 1 0          one piece a token
    round_robin_page(4)              0 0 0 0 1 1 1 1 0          [0,4) [8,9)    [4,8)

A rank's local order is the order of its pieces: request by request, ascending. Rows that a rule adds to make counts
equal are *pad rows*, token index -1. Partitions are planned on the host: they read the values of their arguments.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.config import SPLITS, SplitRule, split_rule
from dsacp_ref.spec import INT32_MAX, check_array, check_int, check_record, contract_error

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

Int32 = NDArray[np.int32]
Row = TypeVar("Row", bound=np.generic)

MAX_CP_SIZE = 1 << 20


class Pieces(NamedTuple):
    """One rank's runs of consecutive new tokens, in local order.

    Fields:
        request_indices: int32[num_pieces], the piece's request; -1 for a round-robin pad row.
        piece_starts: int32[num_pieces], tokens, offset in the request's new tokens, inclusive.
        piece_ends: int32[num_pieces], tokens, exclusive; equal to the start for an empty piece.
        piece_rows: int32[num_pieces], rows, local rows the piece takes: its tokens, then pad rows.

    >>> Pieces._fields
    ('request_indices', 'piece_starts', 'piece_ends', 'piece_rows')
    """

    request_indices: Int32
    piece_starts: Int32
    piece_ends: Int32
    piece_rows: Int32


class Partition(NamedTuple):
    """Which global token every local row of every rank holds, and the way back.

    Fields:
        token_indices: one int32[rows of the rank] per rank; the flat global token, or -1 for a pad row.
        restore_indices: int32[num_tokens]; where each token lies in the ranks' rows laid end to end.

    >>> Partition._fields
    ('token_indices', 'restore_indices')
    """

    token_indices: tuple[Int32, ...]
    restore_indices: Int32


class RoundRobinLengths(NamedTuple):
    """What one rank of a round robin holds of each request.

    Fields:
        request_indices: int32[count], the requests of which the rank has a token, ascending.
        query_lens: int32[count], how many, each >= 1.
        carries: int32[num_reqs], the running carry behind each request; it may be negative.

    >>> RoundRobinLengths._fields
    ('request_indices', 'query_lens', 'carries')
    """

    request_indices: Int32
    query_lens: Int32
    carries: Int32


def check_query_start_loc(query_start_loc: Int32) -> None:
    """Refuse offsets that do not start at 0 or that decrease."""
    check_array("query_start_loc", query_start_loc, ("int32",), ("num_reqs + 1",))
    if len(query_start_loc) == 0:
        raise contract_error("query_start_loc", "have num_reqs + 1 entries", 0, "an empty batch is [0]")
    if query_start_loc[0] != 0:
        raise contract_error("query_start_loc", "start at 0", int(query_start_loc[0]), "prepend the leading zero")
    decreasing = query_start_loc[1:] < query_start_loc[:-1]
    if decreasing.any():
        request = int(decreasing.argmax())
        raise contract_error(
            "query_start_loc",
            "not decrease",
            f"{query_start_loc[request : request + 2].tolist()} at request {request}",
            "it is cumulative: one offset a request, not one length",
        )


def checked_size(cp_size: int) -> int:
    """The group size as a Python int; small enough that its products with token counts stay in 32 bits."""
    return check_int("cp_size", cp_size, 1, MAX_CP_SIZE)


def checked_ranks(cp_size: int, cp_rank: int) -> tuple[int, int]:
    """The group size and a rank inside it, as Python ints."""
    cp_size = checked_size(cp_size)
    return cp_size, check_int("cp_rank", cp_rank, 0, cp_size - 1, f"ranks count from 0 within cp_size {cp_size}")


def padded_token_count(query_start_loc: Int32, cp_size: int, rule: SplitRule, num_input_tokens: int | None) -> int:
    """The rows of the stream that the flat rules cut, a multiple of ``cp_size``."""
    num_tokens, most = int(query_start_loc[-1]), INT32_MAX - 2 * cp_size  # room to round up to 2 * cp_size blocks
    if num_tokens > most:
        hint = "split the batch: token indices are int32"
        raise contract_error("query_start_loc", f"end at or before {most}", num_tokens, hint)
    if num_input_tokens is None:
        num_input_tokens = num_tokens
    hint = f"query_start_loc ends at {num_tokens}; padding may add rows, never remove them"
    num_input_tokens = check_int("num_input_tokens", num_input_tokens, num_tokens, most, hint)
    if num_input_tokens > num_tokens and rule.name not in ("contiguous", "round_robin"):
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
    """The runs of new tokens that one rank owns under a split rule.

    ::

        q tokens of one request over R ranks                              pieces per request
        contiguous          flat stream in R equal slices, tail padded    1
        contiguous_request  slices of ceil(q/R)                           1
        zigzag              2R blocks, the first q mod 2R one longer;     2: blocks r and 2R-1-r
        zigzag_ceil         2R blocks of ceil(q/2R), trailing ones short  2
        zigzag_padded       the same, every block padded to ceil(q/2R)    2
        round_robin         flat token t to rank t mod R, tail padded     1 a token
        round_robin_page(P) page b (tokens bP .. bP+P-1) to rank b mod R  ceil(ceil(q/P)/R), padded to P rows

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, non-decreasing from 0.
        cp_size: int, ranks that share the stream, >= 1.
        cp_rank: int, this rank, in [0, cp_size).
        split: str, a rule of `SPLITS`, ``"round_robin_page(16)"`` with its page size in tokens.
        num_input_tokens: int, rows of the stream with its graph padding, >= ``query_start_loc[-1]``; None for no
            padding. Only `contiguous` and `round_robin` cut a padded stream.

    Returns:
        Pieces: in local order. Empty pieces are kept, so `contiguous` always has one piece a request.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: vllm-ascend dsa_cp (contiguous); xLLM #2097 (contiguous_request); SGLang #12065, #13959 (zigzag,
        round_robin); vLLM PCPManager (zigzag_ceil); xLLM NpuCpPlan (zigzag_padded); rtp-llm #871 (round_robin_page).

    >>> pieces = rank_pieces(np.array([0, 5], np.int32), 2, 0, split="zigzag")
    >>> pieces.piece_starts.tolist(), pieces.piece_ends.tolist()
    ([0, 4], [2, 5])
    >>> pieces = rank_pieces(np.array([0, 5], np.int32), 2, 0, split="zigzag_ceil")
    >>> pieces.piece_starts.tolist(), pieces.piece_ends.tolist()
    ([0, 5], [2, 5])
    """
    check_query_start_loc(query_start_loc)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    return pieces_of_rule(query_start_loc, cp_size, cp_rank, split_rule(split), num_input_tokens)


def pieces_of_rule(
    query_start_loc: Int32, cp_size: int, cp_rank: int, rule: SplitRule, num_input_tokens: int | None
) -> Pieces:
    """The pieces of one rank, once batch and group are found legal."""
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


def contiguous_pieces(query_start_loc: Int32, local_start: int, local_end: int) -> Pieces:
    """Each request's overlap with one slice of the flat stream."""
    clipped = np.minimum(np.maximum(query_start_loc, np.int32(local_start)), np.int32(local_end))
    starts = query_start_loc[:-1]
    # Clipping the offsets and subtracting the request's start keeps an empty piece inside its request: at its first
    # token when the slice lies before the request, at its end when the slice lies behind it.
    lengths = query_start_loc[1:] - starts
    piece_ends = np.minimum(np.maximum(clipped[1:] - starts, 0), lengths)
    piece_starts = np.minimum(np.maximum(clipped[:-1] - starts, 0), piece_ends)
    requests = np.arange(len(starts), dtype=np.int32)
    return Pieces(requests, piece_starts, piece_ends, piece_ends - piece_starts)


def contiguous_request_pieces(query_start_loc: Int32, cp_size: int, cp_rank: int) -> Pieces:
    """Each request's own slice of ``ceil(q / cp_size)`` tokens."""
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    sizes = -(-lengths // cp_size)
    piece_starts = np.minimum(sizes * cp_rank, lengths)
    piece_ends = np.minimum(sizes * (cp_rank + 1), lengths)
    requests = np.arange(len(lengths), dtype=np.int32)
    return Pieces(requests, piece_starts, piece_ends, piece_ends - piece_starts)


def zigzag_pieces(query_start_loc: Int32, cp_size: int, cp_rank: int, name: str) -> Pieces:
    """Blocks r and 2R-1-r of every request, side by side."""
    lengths = (query_start_loc[1:] - query_start_loc[:-1]).repeat(2)
    num_blocks = np.int32(2 * cp_size)
    block = np.empty_like(lengths)
    block[::2], block[1::2] = cp_rank, 2 * cp_size - 1 - cp_rank
    if name == "zigzag":
        size = lengths // num_blocks
        longer = lengths - size * num_blocks  # the first so many blocks hold one token more

        def start_of(block: Int32) -> Int32:
            return size * block + np.minimum(longer, block)

    else:
        size = -(-lengths // num_blocks)

        def start_of(block: Int32) -> Int32:
            start: Int32 = np.minimum(size * block, lengths)
            return start

    piece_starts, piece_ends = start_of(block), start_of(block + 1)
    piece_rows = size if name == "zigzag_padded" else piece_ends - piece_starts
    requests = np.arange(len(query_start_loc) - 1, dtype=np.int32).repeat(2)
    return Pieces(requests, piece_starts, piece_ends, piece_rows)


def round_robin_pieces(query_start_loc: Int32, cp_size: int, cp_rank: int, num_rows: int) -> Pieces:
    """One piece a local row: flat tokens cp_rank, cp_rank + cp_size, ..."""
    tokens = np.arange(num_rows, dtype=np.int32) * cp_size + cp_rank
    requests = requests_of_tokens(tokens, query_start_loc)
    real = requests >= 0
    piece_starts = np.where(real, tokens - query_start_loc[requests], 0).astype(np.int32)
    return Pieces(requests, piece_starts, piece_starts + real, np.ones(num_rows, np.int32))


def round_robin_page_pieces(query_start_loc: Int32, cp_size: int, cp_rank: int, page_size: int) -> Pieces:
    """Every cp_size-th page of each request; all ranks carry the same number of pages."""
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    pages = -(-lengths // page_size)
    pages_per_rank = -(-pages // cp_size)
    requests = np.repeat(np.arange(len(lengths), dtype=np.int32), pages_per_rank)
    first_piece = np.cumsum(pages_per_rank) - pages_per_rank
    turn = np.arange(len(requests)) - first_piece[requests]
    page = turn * cp_size + cp_rank
    length = lengths[requests]
    piece_starts = np.minimum(page * page_size, length).astype(np.int32)
    piece_ends = np.minimum((page + 1) * page_size, length).astype(np.int32)
    return Pieces(requests, piece_starts, piece_ends, np.full(len(requests), page_size, np.int32))


def requests_of_tokens(token_indices: Int32, query_start_loc: Int32) -> Int32:
    """The request of each flat token; -1 for a pad row or a row beyond the last request."""
    requests = np.searchsorted(query_start_loc, token_indices, side="right").astype(np.int32) - np.int32(1)
    real = (token_indices >= 0) & (token_indices < query_start_loc[-1])
    return np.where(real, requests, np.int32(-1))


def local_token_indices(
    query_start_loc: Int32,
    cp_size: int,
    cp_rank: int,
    *,
    split: str = "contiguous",
    num_input_tokens: int | None = None,
) -> Int32:
    """The flat global token of each local row of one rank.

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, non-decreasing from 0.
        cp_size: int, ranks that share the stream, >= 1.
        cp_rank: int, this rank, in [0, cp_size).
        split: str, a rule of `SPLITS`.
        num_input_tokens: int or None, rows of the padded stream (see `rank_pieces`).

    Returns:
        int32[local rows]: the token, or -1 for a pad row.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: the rules of `rank_pieces`.

    >>> local_token_indices(np.array([0, 3, 7], np.int32), 2, 1).tolist()
    [4, 5, 6, -1]
    >>> local_token_indices(np.array([0, 3, 7], np.int32), 2, 0, split="zigzag_padded").tolist()
    [0, -1, 3, 6]
    """
    pieces = rank_pieces(query_start_loc, cp_size, cp_rank, split=split, num_input_tokens=num_input_tokens)
    first_row = np.cumsum(pieces.piece_rows, dtype=np.int64) - pieces.piece_rows
    piece = np.repeat(np.arange(len(first_row)), pieces.piece_rows)
    offset = np.arange(len(piece)) - first_row[piece] + pieces.piece_starts[piece]
    real = offset < pieces.piece_ends[piece]
    tokens = np.where(real, query_start_loc[pieces.request_indices[piece]] + offset, -1).astype(np.int32)
    rule = split_rule(split)
    if rule.name != "contiguous":
        return tokens
    # The tail of the flat stream belongs to no request, so no piece holds its pad rows.
    num_rows = padded_token_count(query_start_loc, cp_size, rule, num_input_tokens) // cp_size
    return np.concatenate([tokens, np.full(num_rows - len(tokens), -1, np.int32)])


def partition_tokens(
    query_start_loc: Int32,
    cp_size: int,
    *,
    split: str = "contiguous",
    num_input_tokens: int | None = None,
) -> Partition:
    """The rows of every rank and the permutation that puts a rank-major gather back in token order.

    ::

        7 tokens, cp_size 2, zigzag          rank 0: 0 1 6     rank 1: 2 3 4 5
        ranks laid end to end                0 1 6 2 3 4 5
        restore_indices                      0 1 3 4 5 6 2     gathered[restore_indices] = 0 1 2 3 4 5 6

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, non-decreasing from 0.
        cp_size: int, ranks that share the stream, >= 1.
        split: str, a rule of `SPLITS`.
        num_input_tokens: int or None, rows of the padded stream (see `rank_pieces`).

    Returns:
        Partition: token_indices per rank, restore_indices int32[num_tokens].

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: the rules of `rank_pieces`; SGLang cp_reverse_index; xLLM #2097 restore permutation.

    >>> partition = partition_tokens(np.array([0, 7], np.int32), 2, split="zigzag")
    >>> [rows.tolist() for rows in partition.token_indices], partition.restore_indices.tolist()
    ([[0, 1, 6], [2, 3, 4, 5]], [0, 1, 3, 4, 5, 6, 2])
    """
    cp_size = checked_size(cp_size)
    token_indices = tuple(
        local_token_indices(query_start_loc, cp_size, cp_rank, split=split, num_input_tokens=num_input_tokens)
        for cp_rank in range(cp_size)
    )
    return Partition(token_indices, inverse_of(np.concatenate(token_indices), int(query_start_loc[-1])))


def round_robin_lengths(query_start_loc: Int32, cp_size: int, cp_rank: int) -> RoundRobinLengths:
    """One rank's tokens of each request under `round_robin`, found request by request without listing tokens.

    ::

        lengths 5 2 3, cp_size 4    token   0 1 2 3 4 | 5 6 | 7 8 9      rank 1 holds  1 | 5 | 9
                                    rank    0 1 2 3 0 | 1 2 | 3 0 1
        behind request   0: 5 - 1 * 4 = 1      1: 1 + 2 - 1 * 4 = -1     2: -1 + 3 - 1 * 4 = -2

    The carry is how many tokens the stream is ahead of ``cp_size`` times this rank's own: negative once the rank has
    had its turn of a round that is not over.

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, non-decreasing from 0.
        cp_size: int, ranks that share the stream, >= 1.
        cp_rank: int, this rank, in [0, cp_size).

    Returns:
        RoundRobinLengths: requests of which the rank has no token are left out, so request_indices picks page tables.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: SGLang #13959, nsa_cp_round_robin_split_q_seqs.

    >>> lengths = round_robin_lengths(np.array([0, 5, 7, 10], np.int32), 4, 1)
    >>> lengths.request_indices.tolist(), lengths.query_lens.tolist(), lengths.carries.tolist()
    ([0, 1, 2], [1, 1, 1], [1, -1, -2])
    """
    check_query_start_loc(query_start_loc)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    # Tokens cp_rank, cp_rank + cp_size, ... lie before an offset: so many, counted in 64 bits.
    held = (query_start_loc.astype(np.int64) + (cp_size - 1 - cp_rank)) // cp_size
    query_lens = (held[1:] - held[:-1]).astype(np.int32)
    present = np.flatnonzero(query_lens > 0).astype(np.int32)
    carries = (query_start_loc[1:] - held[1:] * cp_size).astype(np.int32)
    return RoundRobinLengths(present, query_lens[present], carries)


def inverse_of(token_indices: Int32, num_tokens: int) -> Int32:
    """Where each token stands in a list of rows that holds every token once, pad rows aside."""
    restore = np.empty(num_tokens, np.int32)
    rows = np.flatnonzero(token_indices >= 0).astype(np.int32)
    restore[token_indices[rows]] = rows
    return restore


def padded_restore_indices(partition: Partition) -> Int32:
    """Where each token lies when every rank's rows are padded to the largest rank's count before they are gathered.

    Args:
        partition: Partition, as `partition_tokens` returns it.

    Returns:
        int32[num_tokens]: row of the padded rank-major buffer.

    Source: xLLM LM-head index remap; collectives that take equal shapes only (gloo, hccl).

    >>> padded_restore_indices(partition_tokens(np.array([0, 7], np.int32), 2, split="zigzag")).tolist()
    [0, 1, 4, 5, 6, 7, 2]
    """
    check_record("partition", partition, Partition)
    most = max(len(rows) for rows in partition.token_indices)
    padded = [np.concatenate([rows, np.full(most - len(rows), -1, np.int32)]) for rows in partition.token_indices]
    return inverse_of(np.concatenate(padded), len(partition.restore_indices))


def local_rows(rows: NDArray[Row], partition: Partition, cp_rank: int) -> NDArray[Row]:
    """One rank's share of a row-aligned global array; pad rows are zero.

    Args:
        rows: any dtype [num_tokens, ...], one row a global token.
        partition: Partition of the same tokens.
        cp_rank: int, this rank.

    Returns:
        same dtype [local rows, ...].

    Raises:
        ContractError: another number of rows than the partition has tokens, or no such rank.

    Source: SGLang cp_split_and_rebuild_data; every per-token array (hidden, positions, labels) goes this one way.

    >>> partition = partition_tokens(np.array([0, 7], np.int32), 2)
    >>> local_rows(np.arange(10, 17), partition, 1).tolist()
    [14, 15, 16, 0]
    """
    check_record("partition", partition, Partition)
    _, cp_rank = checked_ranks(len(partition.token_indices), cp_rank)
    check_rows("rows", rows, len(partition.restore_indices), "one row a token of the partition, without padding")
    return spread_rows(rows, partition.token_indices[cp_rank])


def restored_rows(gathered: NDArray[Row], partition: Partition) -> NDArray[Row]:
    """A rank-major gather put back in global token order, pad rows dropped.

    Args:
        gathered: any dtype [rows of all ranks, ...], the ranks' rows end to end.
        partition: Partition that cut them.

    Returns:
        same dtype [num_tokens, ...].

    Raises:
        ContractError: another number of rows than the partition's ranks have together.

    Source: SGLang cp_all_gather_rerange_output; xLLM #2097.

    >>> partition = partition_tokens(np.array([0, 7], np.int32), 2, split="zigzag")
    >>> restored_rows(np.array([0, 1, 6, 2, 3, 4, 5]), partition).tolist()
    [0, 1, 2, 3, 4, 5, 6]
    """
    check_record("partition", partition, Partition)
    total = sum(len(rows) for rows in partition.token_indices)
    check_rows("gathered", gathered, total, "the ranks' rows end to end, each with its pad rows")
    return gathered[partition.restore_indices]


def converted_rows(gathered: NDArray[Row], source: Partition, target: Partition) -> NDArray[Row]:
    """Rank-major rows of one partition in the order of another; the target's pad rows are zero.

    Args:
        gathered: any dtype [rows of all ranks, ...], laid out by ``source``.
        source: Partition that ``gathered`` is in.
        target: Partition of the same tokens, possibly over another number of ranks.

    Returns:
        same dtype [rows of all ranks of ``target``, ...].

    Raises:
        ContractError: row counts do not fit, or the partitions have different numbers of tokens.

    Source: ours; every pair of rules goes through global token order.

    >>> zigzag = partition_tokens(np.array([0, 7], np.int32), 2, split="zigzag")
    >>> robin = partition_tokens(np.array([0, 7], np.int32), 2, split="round_robin")
    >>> converted_rows(np.array([0, 1, 6, 2, 3, 4, 5]), zigzag, robin).tolist()
    [0, 2, 4, 6, 1, 3, 5, 0]
    """
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
    return spread_rows(tokens, np.concatenate(target.token_indices))


def check_rows(name: str, rows: NDArray[Row], count: int, hint: str) -> None:
    """Refuse a row-aligned array of another length: it was cut by another rule, or not at all."""
    if not hasattr(rows, "shape") or len(rows.shape) < 1:
        got = list(rows.shape) if hasattr(rows, "shape") else type(rows).__name__
        raise contract_error(name, "be an array with a row axis", got, hint)
    if rows.shape[0] != count:
        raise contract_error(name, f"have {count} rows", rows.shape[0], hint)


def spread_rows(rows: NDArray[Row], token_indices: Int32) -> NDArray[Row]:
    """``rows[token_indices]`` with zeros where the index is -1."""
    spread = np.zeros((len(token_indices), *rows.shape[1:]), rows.dtype)
    real = token_indices >= 0
    spread[real] = rows[token_indices[real]]
    return spread


def interleave_owners(positions: Int32, cp_size: int, interleave_size: int) -> Int32:
    """The rank that stores each key position when decode spreads the cache over ranks.

    ::

        interleave_size 2, cp_size 2     position  0 1 2 3 4 5 6 7
                                         owner     0 0 1 1 0 0 1 1
                                         local     0 1 0 1 2 3 2 3

    Args:
        positions: int32[...], tokens, absolute positions, >= 0; -1 stays -1 (nothing there).
        cp_size: int, ranks that share the cache, >= 1.
        interleave_size: int, consecutive tokens a rank stores, >= 1.

    Returns:
        int32[...]: ``(position // interleave_size) % cp_size``, or -1.

    Raises:
        ContractError: dtype, or a value out of range.

    Source: vLLM, vllm-ascend, SGLang, ATOM decode context parallelism.

    >>> interleave_owners(np.array([0, 1, 5, 8, -1], np.int32), 2, 4).tolist()
    [0, 0, 1, 0, -1]
    """
    size = checked_granule(positions, "positions", cp_size, interleave_size, lowest=-1)
    owners = positions // size % np.int32(cp_size)
    return np.where(positions < 0, np.int32(-1), owners)


def interleave_local_indices(positions: Int32, cp_size: int, interleave_size: int) -> Int32:
    """The place of each key position among the keys that its owner stores.

    Args:
        positions: int32[...], tokens, absolute positions, >= 0; -1 stays -1.
        cp_size: int, ranks that share the cache, >= 1.
        interleave_size: int, consecutive tokens a rank stores, >= 1.

    Returns:
        int32[...]: logical row on the owner, to be looked up in the owner's own block table; or -1.

    Raises:
        ContractError: dtype, or a value out of range.

    Source: as `interleave_owners`.

    >>> interleave_local_indices(np.array([1, 5, 8], np.int32), 2, 1).tolist()
    [0, 2, 4]
    """
    size = checked_granule(positions, "positions", cp_size, interleave_size, lowest=-1)
    local = positions // (size * np.int32(cp_size)) * size + positions % size
    return np.where(positions < 0, np.int32(-1), local)


def interleave_lengths(lengths: Int32, cp_size: int, cp_rank: int, interleave_size: int) -> Int32:
    """How many of each request's first ``length`` keys one rank stores.

    A bound on global keys is localised by this function; subtracting from another local bound is not the same.

    Args:
        lengths: int32[...], tokens, global key counts, >= 0.
        cp_size: int, ranks that share the cache, >= 1.
        cp_rank: int, this rank, in [0, cp_size).
        interleave_size: int, consecutive tokens a rank stores, >= 1.

    Returns:
        int32[...]: local key counts; they sum to ``lengths`` over the ranks.

    Raises:
        ContractError: dtype, or a value out of range.

    Source: vLLM decode context parallelism; the case of vllm#46076.

    >>> [interleave_lengths(np.array([8, 9, 10], np.int32), 2, rank, 1).tolist() for rank in (0, 1)]
    [[4, 5, 5], [4, 4, 5]]
    """
    size = checked_granule(lengths, "lengths", cp_size, interleave_size, lowest=0)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    whole, rest = np.divmod(lengths, size * np.int32(cp_size))
    return whole * size + np.clip(rest - size * np.int32(cp_rank), 0, size)


def checked_granule(values: Int32, name: str, cp_size: int, interleave_size: int, lowest: int) -> np.int32:
    """The granule that one rank stores at a time, once group, granule and values are found legal."""
    check_array(name, values, ("int32",), getattr(values, "shape", ()))
    interleave_size = check_int("interleave_size", interleave_size, 1, INT32_MAX // checked_size(cp_size))
    if (values < lowest).any():
        hint = "-1 stands for nothing" if lowest < 0 else "a key count is never negative"
        raise contract_error(name, f"be >= {lowest}", int(values.min()), hint)
    return np.int32(interleave_size)
