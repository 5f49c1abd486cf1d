"""The arrays behind a partition's picture: what is drawn is what `dsacp_ref` says, put in the order of the paper."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.extents import local_extents
from dsacp_ref.partition import partition_tokens, rank_pieces
from dsacp_ref.spec import check_int

Int32 = NDArray[np.int32]
HIDDEN, FAR, SEEN = 0, 1, 2  # a key that the query may not see, one before its window, one that it sees


class PictureRows(NamedTuple):
    """The rows of a picture from top to bottom: each request's tokens, then its pad rows; pad rows of none are last.

    Fields:
        token_indices: int32[num_rows], flat global token; -1 for a pad row.
        owners: int32[num_rows], the rank that has the row.
        request_indices: int32[num_rows]; -1 for a pad row of no request.
        last_keys: int32[num_rows], the last key that the row sees; -1 where it sees none.
        boxes: int32[num_boxes, 4], operator rows with queries: first picture row, rows, key extent, rank.
    """

    token_indices: Int32
    owners: Int32
    request_indices: Int32
    last_keys: Int32
    boxes: Int32


def picture_rows(
    query_start_loc: Int32,
    seq_lens: Int32,
    cp_size: int,
    *,
    split: str = "contiguous",
    num_input_tokens: int | None = None,
    causal: bool = True,
) -> PictureRows:
    """All ranks' rows in the order of the paper, with the operator rows of `local_extents` around them.

    >>> rows = picture_rows(np.array([0, 3], np.int32), np.array([5], np.int32), 2, split="zigzag")
    >>> rows.owners.tolist(), rows.last_keys.tolist()
    ([0, 1, 1], [2, 3, 4])
    >>> rows.boxes.tolist()
    [[0, 1, 3, 0], [1, 1, 4, 1], [2, 1, 5, 1]]
    """
    rule = {"split": split, "num_input_tokens": num_input_tokens}
    partition = partition_tokens(query_start_loc, cp_size, **rule)
    counts = [len(tokens) for tokens in partition.token_indices]
    tokens = np.concatenate(partition.token_indices)
    owners = np.repeat(np.arange(cp_size, dtype=np.int32), counts)
    requests, last_keys = np.full(len(tokens), -1, np.int32), np.full(len(tokens), -1, np.int32)
    boxes = []
    for cp_rank, first in enumerate(np.cumsum([0, *counts[:-1]])):
        pieces = rank_pieces(query_start_loc, cp_size, cp_rank, **rule)
        held = np.repeat(pieces.request_indices, pieces.piece_rows)
        requests[first : first + len(held)] = held
        extents = local_extents(query_start_loc, seq_lens, cp_size, cp_rank, **rule, causal=causal)
        queries = first + np.flatnonzero(partition.token_indices[cp_rank] >= 0)
        starts, stops = extents.cu_seqlens_q[:-1], extents.cu_seqlens_q[1:]
        extent = np.repeat(extents.seqused_kv, stops - starts)
        behind = np.repeat(stops, stops - starts) - 1 - np.arange(len(queries))  # queries of the row that follow
        last_keys[queries] = np.maximum(extent - 1 - behind * causal, -1)
        used = stops > starts
        columns = (
            queries[starts[used]],
            (stops - starts)[used],
            extents.seqused_kv[used],
            np.full(used.sum(), cp_rank),
        )
        boxes.append(np.stack(columns, axis=1))
    order = np.lexsort((tokens, tokens < 0, np.where(requests < 0, len(seq_lens), requests)))
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    box = np.concatenate(boxes).astype(np.int32)
    box[:, 0] = place[box[:, 0]]
    box = box[np.argsort(box[:, 0])]
    return PictureRows(tokens[order], owners[order], requests[order], last_keys[order], box)


def visibility(last_keys: Int32, keys: Int32, *, window_size: int | None = None) -> NDArray[np.uint8]:
    """For each row and key: 0 where the row may not see it, 2 where it sees it, 1 where it lies before its window.

    >>> visibility(np.array([1, 3], np.int32), np.arange(5, dtype=np.int32), window_size=2).tolist()
    [[2, 2, 0, 0, 0], [1, 1, 2, 2, 0]]
    """
    state = np.where(keys <= last_keys[:, None], np.uint8(SEEN), np.uint8(HIDDEN))
    if window_size is not None:
        size = check_int("window_size", window_size, 1)
        state[(state == SEEN) & (keys <= last_keys[:, None].astype(np.int64) - size)] = FAR
    return state


def keys_seen(
    rows: PictureRows, cp_size: int, *, window_size: int | None, compress_ratio: int | None
) -> NDArray[np.int64]:
    """How many keys and entries each rank's queries see, all together: its share of attention's work."""
    seen = rows.last_keys.astype(np.int64) + 1
    entries = 0 if compress_ratio is None else seen // compress_ratio
    if window_size is not None:
        seen = np.minimum(seen, window_size)
    return np.bincount(rows.owners, weights=seen + entries, minlength=cp_size).astype(np.int64)
