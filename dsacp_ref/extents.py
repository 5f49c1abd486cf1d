"""Right-aligned KV extents: the rows that one rank hands an attention operator.

An operator places a row's queries at the *end* of the key extent given for that row: local query j of a row with
``q_len`` queries and extent K stands at position ``K - q_len + j``. So a piece that ends (exclusive) at offset e of its
request gets the extent ``num_computed_tokens + e``, never the request's full length::

    5 keys, 3 of them new; the rank owns the first 2 queries        keys  0 1 2 3 4
                                                        position 2        1 1 1 . .
                                                        position 3        1 1 1 1 .     seqused_kv = 4

The read side (queries, extents, top-k) is local and made here. The write side (slot mapping, block tables, compressor
start and lengths) stays global.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.config import split_rule
from dsacp_ref.partition import (
    Int32,
    Pieces,
    check_query_start_loc,
    checked_ranks,
    contiguous_pieces,
    padded_token_count,
    pieces_of_rule,
    requests_of_tokens,
)
from dsacp_ref.spec import INT32_MAX, check_array, check_bool, check_choice, check_int, contract_error

__all__ = [
    "CPLocalMetadata",
    "LocalExtents",
    "build_cp_local_metadata",
    "local_extents",
    "query_positions",
    "query_rows",
    "token_positions",
    "token_requests",
]

Float = NDArray[np.floating]
FLOATS = ("float32", "float64")
EMPTY_EXTENTS = ("zero", "prefix")


class LocalExtents(NamedTuple):
    """The operator rows of one rank.

    Fields:
        cu_seqlens_q: int32[num_rows + 1], tokens, local query offsets, first 0.
        seqused_kv: int32[num_rows], tokens, right-aligned key extent of each row, never negative.
        request_indices: int32[num_rows], the request whose block table the row reads; -1 for a round-robin pad row.

    >>> LocalExtents._fields
    ('cu_seqlens_q', 'seqused_kv', 'request_indices')
    """

    cu_seqlens_q: Int32
    seqused_kv: Int32
    request_indices: Int32


class CPLocalMetadata(NamedTuple):
    """The proposal's view of one rank of a flat contiguous split.

    Fields:
        local_query_start_loc: int32[num_reqs + 1], tokens, the rank's query offsets.
        local_seq_lens: int32[num_reqs], tokens, right-aligned key extents.
        local_kv_start_loc: int32[num_reqs + 1], tokens, ``[0] + cumsum(local_seq_lens)``, for packed keys.
        local_start: int, tokens, first row of the padded stream that the rank owns.
        local_end: int, tokens, exclusive; not cut to the real tokens.
        tokens_per_rank: int, rows.
        num_tokens_pad: int, rows, ``tokens_per_rank * cp_size``.
        local_cos: float[tokens_per_rank, R'], the rank's rows of the table, 1 beyond it.
        local_sin: float[tokens_per_rank, R'], likewise, 0 beyond it.

    >>> CPLocalMetadata._fields[:3]
    ('local_query_start_loc', 'local_seq_lens', 'local_kv_start_loc')
    """

    local_query_start_loc: Int32
    local_seq_lens: Int32
    local_kv_start_loc: Int32
    local_start: int
    local_end: int
    tokens_per_rank: int
    num_tokens_pad: int
    local_cos: Float
    local_sin: Float


def check_batch(query_start_loc: Int32, seq_lens: Int32) -> None:
    """Refuse a batch whose lengths cannot be: too few keys for the queries, or counts that overflow."""
    check_query_start_loc(query_start_loc)
    num_reqs = len(query_start_loc) - 1
    check_array(
        "seq_lens",
        seq_lens,
        ("int32",),
        (num_reqs,),
        f"one entry per request (query_start_loc has {num_reqs + 1} entries)",
    )
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    short = seq_lens < query_lens  # query lengths are not negative, so this finds negative counts too
    if not short.any():
        return
    bad = short & (seq_lens != 0)
    if bad.any():
        request = int(bad.argmax())
        raise contract_error(
            "seq_lens",
            "be 0 (padded slot) or at least the request's query length",
            f"{int(seq_lens[request])} keys for {int(query_lens[request])} queries of request {request}",
            "seq_lens counts all keys of the request, this step's tokens included",
        )


def checked_offsets(name: str, lengths: Int32) -> Int32:
    """``[0] + cumsum(lengths)`` in int32, refused when the sum does not fit."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > INT32_MAX:
        raise contract_error(name, "sum to less than 2**31", int(offsets[-1]), "split the batch: offsets are int32")
    return offsets.astype(np.int32)


def extents_of_pieces(
    pieces: Pieces, query_start_loc: Int32, seq_lens: Int32, *, causal: bool, empty_extent: str
) -> LocalExtents:
    """The operator row of every piece."""
    check_choice("empty_extent", empty_extent, EMPTY_EXTENTS)
    if not check_bool("causal", causal) and empty_extent == "prefix":
        raise contract_error(
            "empty_extent", "be 'zero' when causal is False", repr(empty_extent), "a draft row without queries reads 0"
        )
    query_lens = pieces.piece_ends - pieces.piece_starts
    cu_seqlens_q = np.zeros(len(query_lens) + 1, np.int32)
    np.cumsum(query_lens, dtype=np.int32, out=cu_seqlens_q[1:])  # at most query_start_loc[-1]: it fits
    if len(seq_lens) == 0:
        return LocalExtents(cu_seqlens_q, np.zeros(len(query_lens), np.int32), pieces.request_indices)
    if causal:
        # Keys behind the piece lie in its future. A padded slot computes to at most 0: it has fewer keys than queries.
        num_computed_tokens = seq_lens - (query_start_loc[1:] - query_start_loc[:-1])
        seqused_kv = np.maximum(num_computed_tokens.take(pieces.request_indices) + pieces.piece_ends, np.int32(0))
    else:
        seqused_kv = seq_lens.take(pieces.request_indices)
    seqused_kv *= query_lens > 0 if empty_extent == "zero" else pieces.request_indices >= 0
    return LocalExtents(cu_seqlens_q, seqused_kv, pieces.request_indices)


def local_extents(
    query_start_loc: Int32,
    seq_lens: Int32,
    cp_size: int,
    cp_rank: int,
    *,
    split: str = "contiguous",
    num_input_tokens: int | None = None,
    causal: bool = True,
    empty_extent: str = "zero",
) -> LocalExtents:
    """The operator rows of one rank under any split rule: one row a piece.

    ::

        one request: 4 cached keys, 5 new tokens at positions 4..8, cp_size 2, zigzag blocks of 2 1 1 1
        rank 0   block 0: queries 4 5  extent 6        block 3: query 8  extent 9
        rank 1   block 1: query  6     extent 7        block 2: query 7  extent 8

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, non-decreasing from 0.
        seq_lens: int32[num_reqs], tokens, all keys of the request with this step's: at least its query length, or 0
            for a padded graph slot, whose rows count but see nothing.
        cp_size: int, ranks that share the stream, >= 1.
        cp_rank: int, this rank, in [0, cp_size).
        split: str, a rule of `SPLITS`.
        num_input_tokens: int or None, rows of the padded stream (see `rank_pieces`).
        causal: bool; False gives every row with queries its whole request (block-parallel draft).
        empty_extent: ``"zero"`` or ``"prefix"``: the extent of a row without queries, 0 or
            ``num_computed_tokens`` plus the piece's clamped end.

    Returns:
        LocalExtents: rows in local order. Their query lengths sum to the rank's share of ``query_start_loc[-1]``: an
        operator takes the rank's queries without pad rows, which `zigzag_padded` and `round_robin_page` put between
        pieces (``local_token_indices >= 0`` picks them).

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: vllm-ascend dsa_cp; xLLM #2097 (``"prefix"``); SGLang zigzag.py and interleave.py.

    >>> extents = local_extents(np.array([0, 5], np.int32), np.array([9], np.int32), 2, 0, split="zigzag")
    >>> extents.cu_seqlens_q.tolist(), extents.seqused_kv.tolist()
    ([0, 2, 3], [6, 9])
    """
    check_batch(query_start_loc, seq_lens)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    pieces = pieces_of_rule(query_start_loc, cp_size, cp_rank, split_rule(split), num_input_tokens)
    return extents_of_pieces(pieces, query_start_loc, seq_lens, causal=causal, empty_extent=empty_extent)


def token_requests(token_indices: Int32, query_start_loc: Int32) -> Int32:
    """The request that each flat token belongs to.

    Args:
        token_indices: int32[num_rows], flat global tokens; -1 for a pad row.
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, non-decreasing from 0.

    Returns:
        int32[num_rows]: the request, or -1 for a pad row or a row beyond ``query_start_loc[-1]``.

    Raises:
        ContractError: a shape or dtype above does not hold.

    Source: vLLM token_to_req_indices.

    >>> token_requests(np.array([0, 2, 3, -1], np.int32), np.array([0, 2, 2, 4], np.int32)).tolist()
    [0, 2, 2, -1]
    """
    check_array("token_indices", token_indices, ("int32",), ("num_rows",))
    check_query_start_loc(query_start_loc)
    return requests_of_tokens(token_indices, query_start_loc)


def token_positions(token_indices: Int32, query_start_loc: Int32, seq_lens: Int32) -> Int32:
    """The absolute position of each flat token in its request.

    Args:
        token_indices: int32[num_rows], flat global tokens; -1 for a pad row.
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, non-decreasing from 0.
        seq_lens: int32[num_reqs], tokens, all keys of the request with this step's.

    Returns:
        int32[num_rows]: the position; -1 for a pad row and for a padded graph slot (``seq_lens == 0``).

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: sgl-project/sglang#28463: a strided shard has no consecutive positions.

    >>> tokens = np.array([1, 5], np.int32)  # rank 1 of round_robin over 4
    >>> token_positions(tokens, np.array([0, 5, 8], np.int32), np.array([5, 9], np.int32)).tolist()
    [1, 6]
    """
    check_batch(query_start_loc, seq_lens)
    requests = token_requests(token_indices, query_start_loc)
    if len(seq_lens) == 0:
        return requests
    positions = seq_lens[requests] - (query_start_loc[requests + 1] - token_indices)
    return np.where((requests >= 0) & (seq_lens[requests] > 0), positions, np.int32(-1))


def query_rows(cu_seqlens_q: Int32, *, num_rows: int) -> Int32:
    """The operator row that each local query belongs to.

    Args:
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        num_rows: int, tokens, length of the query array, >= ``cu_seqlens_q[-1]``.

    Returns:
        int32[num_rows]: the row, or -1 for a query beyond the last row.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: FlashAttention varlen; ROCm/ATOM#1595 (queries padded beyond their metadata).

    >>> query_rows(np.array([0, 2, 2, 3], np.int32), num_rows=4).tolist()
    [0, 0, 2, -1]
    """
    check_offsets("cu_seqlens_q", cu_seqlens_q)
    num_rows = check_int("num_rows", num_rows, int(cu_seqlens_q[-1]), INT32_MAX, "cu_seqlens_q is local to the queries")
    return requests_of_tokens(np.arange(num_rows, dtype=np.int32), cu_seqlens_q)


def query_positions(cu_seqlens_q: Int32, seqused_kv: Int32, *, num_rows: int) -> Int32:
    """The position of each local query by right alignment: what the operator believes.

    Args:
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        seqused_kv: int32[rows], tokens, key extent of each row: 0, or at least the row's query length.
        num_rows: int, tokens, length of the query array, >= ``cu_seqlens_q[-1]``.

    Returns:
        int32[num_rows]: ``seqused_kv - q_len + j``; -1 where the extent is 0 or the query lies beyond the last row.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: npu_sparse_attn_sharedkv, mask modes 3 and 4; FlashAttention 2.1 bottom-right alignment.

    >>> query_positions(np.array([0, 2, 3], np.int32), np.array([6, 9], np.int32), num_rows=3).tolist()
    [4, 5, 8]
    """
    rows = query_rows(cu_seqlens_q, num_rows=num_rows)
    check_extents(cu_seqlens_q, seqused_kv)
    if len(seqused_kv) == 0:
        return rows
    queries = np.arange(num_rows, dtype=np.int32)
    positions = seqused_kv[rows] - (cu_seqlens_q[rows + 1] - queries)
    return np.where((rows >= 0) & (seqused_kv[rows] > 0), positions, np.int32(-1))


def check_offsets(name: str, offsets: Int32) -> None:
    """Refuse cumulative offsets without their leading zero, or that decrease."""
    check_array(name, offsets, ("int32",), ("rows + 1",))
    if len(offsets) == 0 or offsets[0] != 0:
        raise contract_error(name, "start at 0", offsets[:1].tolist(), "prepend the leading zero")
    if (offsets[1:] < offsets[:-1]).any():
        raise contract_error(name, "not decrease", offsets.tolist(), "it is cumulative, not one length a row")


def check_extents(cu_seqlens_q: Int32, seqused_kv: Int32) -> None:
    """Refuse an extent that is shorter than its row's queries."""
    num_rows = len(cu_seqlens_q) - 1
    check_array("seqused_kv", seqused_kv, ("int32",), (num_rows,), f"cu_seqlens_q has {num_rows + 1} entries")
    query_lens = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    bad = (seqused_kv < 0) | ((seqused_kv > 0) & (seqused_kv < query_lens))
    if bad.any():
        row = int(bad.argmax())
        raise contract_error(
            "seqused_kv",
            "be 0 or at least the row's query length",
            f"{int(seqused_kv[row])} keys for {int(query_lens[row])} queries of row {row}",
            "an extent is right-aligned: it ends with the row's last query",
        )


def build_cp_local_metadata(
    query_start_loc: Int32,
    seq_lens: Int32,
    cp_size: int,
    cp_rank: int,
    full_cos: Float | None,
    full_sin: Float | None,
    *,
    num_input_tokens: int | None = None,
    causal: bool = True,
    empty_extent: str = "zero",
) -> CPLocalMetadata:
    """One rank's lengths, offsets and RoPE rows of the flat contiguous split.

    ::

        cp_size 3, 9 requests of 1..9 tokens, 15 flat tokens a rank
        requests  |0|1 1|2 2 2|3 3 3 3|4 4 4 4 4|5 5 5 5 5 5|6 6 6 6 6 6 6|7 7 ..|8 ..
        ranks     |0 0 0 0 0 0 0 0 0 0 0 0 0 0 0|1 1 1 1 1 1 1 1 1 1 1 1 1 1 1|2 ..
                                                                          ^ request 7 has 2 queries on rank 1: 2 keys

    Args:
        query_start_loc: int32[num_reqs + 1], tokens, global query offsets, non-decreasing from 0.
        seq_lens: int32[num_reqs], tokens, all keys of the request with this step's: at least its query length, or 0
            for a padded graph slot.
        cp_size: int, ranks that share the stream, >= 1. 1 gives the input back.
        cp_rank: int, this rank, in [0, cp_size).
        full_cos: float32 or float64 [n, R'], one row per flat token, not per position; rows for padding may be left
            off. None when no table is wanted: local_cos and local_sin are then [tokens_per_rank, 0].
        full_sin: like ``full_cos``.
        num_input_tokens: int, rows of the stream with its graph padding; None takes the rows of ``full_cos``, or the
            real count without a table.
        causal: bool; False gives every request with local queries its whole length (block-parallel draft).
        empty_extent: ``"zero"`` or ``"prefix"``: see `local_extents`.

    Returns:
        CPLocalMetadata: rows of the tables beyond those given are cos 1, sin 0.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: xLLM #1997; vllm-ascend dsa_cp `_build_local_token_metadata`.

    >>> query_start_loc = np.array([0, 1, 3, 6, 10, 15, 21, 28, 36, 45], np.int32)
    >>> seq_lens = np.arange(1, 10, dtype=np.int32)
    >>> for cp_rank in range(3):
    ...     local = build_cp_local_metadata(query_start_loc, seq_lens, 3, cp_rank, None, None)
    ...     print(*local.local_query_start_loc, "|", *local.local_seq_lens, "|", *local.local_kv_start_loc)
    0 1 3 6 10 15 15 15 15 15 | 1 2 3 4 5 0 0 0 0 | 0 1 3 6 10 15 15 15 15 15
    0 0 0 0 0 0 6 13 15 15 | 0 0 0 0 0 6 7 2 0 | 0 0 0 0 0 0 6 13 15 15
    0 0 0 0 0 0 0 0 6 15 | 0 0 0 0 0 0 0 8 9 | 0 0 0 0 0 0 0 0 8 17
    """
    check_batch(query_start_loc, seq_lens)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    rule = split_rule("contiguous")
    if num_input_tokens is not None:  # a wrong count is named as such, not as tables that do not fit it
        padded_token_count(query_start_loc, cp_size, rule, num_input_tokens)
    cos_rows = check_tables(full_cos, full_sin, int(query_start_loc[-1]), num_input_tokens)
    n = cos_rows if num_input_tokens is None else num_input_tokens
    num_tokens_pad = padded_token_count(query_start_loc, cp_size, rule, n)
    tokens_per_rank = num_tokens_pad // cp_size
    local_start = cp_rank * tokens_per_rank
    local_end = local_start + tokens_per_rank
    pieces = contiguous_pieces(query_start_loc, local_start, local_end)
    extents = extents_of_pieces(pieces, query_start_loc, seq_lens, causal=causal, empty_extent=empty_extent)
    return CPLocalMetadata(
        extents.cu_seqlens_q,
        extents.seqused_kv,
        checked_offsets("local_seq_lens", extents.seqused_kv),
        local_start,
        local_end,
        tokens_per_rank,
        num_tokens_pad,
        table_rows(full_cos, local_start, tokens_per_rank, 1.0),
        table_rows(full_sin, local_start, tokens_per_rank, 0.0),
    )


def check_tables(
    full_cos: Float | None, full_sin: Float | None, num_tokens: int, num_input_tokens: int | None
) -> int | None:
    """The number of rows of the RoPE tables, once they are found to fit each other and the stream."""
    if full_cos is None or full_sin is None:
        if full_cos is full_sin:
            return None
        raise contract_error("full_cos and full_sin", "be given together", "one of the two", "or None for both")
    check_array("full_cos", full_cos, FLOATS, ("n", "rope_width"))
    check_array("full_sin", full_sin, (str(full_cos.dtype),), full_cos.shape, "cos and sin are one table")
    rows: int = full_cos.shape[0]
    if rows < num_tokens or (num_input_tokens is not None and rows > num_input_tokens):
        most = "" if num_input_tokens is None else f" and at most num_input_tokens {num_input_tokens}"
        raise contract_error(
            "full_cos",
            f"have one row per flat token, at least {num_tokens}{most}",
            rows,
            "the table is by token of the stream, not by position: gather it with the tokens' positions first",
        )
    return rows


def table_rows(table: Float | None, local_start: int, tokens_per_rank: int, beyond: float) -> Float:
    """The rank's rows of a RoPE table, filled up with the identity rotation."""
    if table is None:
        return np.zeros((tokens_per_rank, 0), np.float32)
    rows = table[local_start : local_start + tokens_per_rank]
    missing = np.full((tokens_per_rank - len(rows), table.shape[1]), beyond, table.dtype)
    return np.concatenate([rows, missing])
