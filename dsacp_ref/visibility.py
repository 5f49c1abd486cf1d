"""Which raw keys and which compressed entries a query may see, and which rows a rank needs to make its share.

Entry w covers the raw tokens [r*w, r*w + r) of its request; it exists once its last token does, and a query at that
very token already sees it::

    compress_ratio 4       position  0 1 2 3 4 5 6 7 8
    visible entries        n         0 0 0 1 1 1 1 2 2         n = (position + 1) // 4

Visible entries and the window overlap in raw tokens; nothing is removed from either.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.partition import Int32
from dsacp_ref.spec import INT32_MAX, check_array, check_bool, check_int, contract_error

__all__ = [
    "entry_mask",
    "owned_entries",
    "pool_row_starts",
    "visible_entries",
    "window_mask",
    "window_starts",
]


def check_positions(positions: Int32, axis: str, *, lowest: int) -> None:
    """Refuse what no token can have as its position: position p needs p + 1 keys, and key counts are int32."""
    check_array("positions", positions, ("int32",), (axis,))
    bad = (positions < lowest) | (positions == INT32_MAX)
    if bad.any():
        hint = "-1 stands for no position" if lowest < 0 else "a run starts at a token"
        raise contract_error("positions", f"be in [{lowest}, {INT32_MAX - 1}]", int(positions[bad.argmax()]), hint)


def window_starts(positions: Int32, window_size: int) -> Int32:
    """The first raw key that each query sees; the last one is its own.

    ::

        window_size 3      keys  0 1 2 3 4
        position 1               1 1 . . .     starts at 0
        position 4               . . 1 1 1     starts at 2

    Args:
        positions: int32[num_tokens], tokens, absolute positions; -1 where there is none.
        window_size: int, tokens, keys visible including the query itself, >= 1.

    Returns:
        int32[num_tokens]: ``max(0, position - window_size + 1)``; 0 where there is no position, whose window
        [0, position + 1) is empty.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: DeepSeek-V4 inference model; operator arguments ori_win_left = window_size - 1, ori_win_right = 0.

    >>> window_starts(np.array([0, 127, 128, -1], np.int32), 128).tolist()
    [0, 0, 1, 0]
    """
    check_positions(positions, "num_tokens", lowest=-1)
    window_size = check_int("window_size", window_size, 1, INT32_MAX)
    starts: Int32 = np.maximum(positions - np.int32(window_size - 1), np.int32(0))
    return starts


def visible_entries(positions: Int32, compress_ratio: int) -> Int32:
    """How many compressed entries of its request each query sees: the first n, always.

    Args:
        positions: int32[num_tokens], tokens, absolute positions; -1 where there is none.
        compress_ratio: int, tokens per entry, >= 1.

    Returns:
        int32[num_tokens]: ``(position + 1) // compress_ratio``; 0 where there is no position.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: DeepSeek-V4 inference model; the case of vllm-project/tpu-inference#3536.

    >>> visible_entries(np.arange(9, dtype=np.int32), 4).tolist()
    [0, 0, 0, 1, 1, 1, 1, 2, 2]
    """
    check_positions(positions, "num_tokens", lowest=-1)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1, INT32_MAX)
    return (positions + np.int32(1)) // np.int32(compress_ratio)


def window_mask(positions: Int32, num_keys: int, window_size: int) -> NDArray[np.bool_]:
    """The window as a dense mask, for small cases and pictures.

    Args:
        positions: int32[num_tokens], tokens, absolute positions; -1 where there is none.
        num_keys: int, tokens, raw keys of the request, >= 0.
        window_size: int, tokens, keys visible including the query itself, >= 1.

    Returns:
        bool[num_tokens, num_keys]: True where the query sees the raw key.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: as `window_starts`.

    >>> window_mask(np.array([1, 3], np.int32), 5, 2).astype(int).tolist()
    [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0]]
    """
    starts = window_starts(positions, window_size)
    keys = np.arange(check_int("num_keys", num_keys, 0, INT32_MAX), dtype=np.int32)
    return (keys >= starts[:, None]) & (keys <= positions[:, None])


def entry_mask(positions: Int32, num_entries: int, compress_ratio: int) -> NDArray[np.bool_]:
    """The causal rule on entries as a dense mask, for small cases and pictures.

    Args:
        positions: int32[num_tokens], tokens, absolute positions; -1 where there is none.
        num_entries: int, entries of the request, >= 0.
        compress_ratio: int, tokens per entry, >= 1.

    Returns:
        bool[num_tokens, num_entries]: True where the query may see the entry.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: as `visible_entries`.

    >>> entry_mask(np.array([2, 3, 7], np.int32), 2, 4).astype(int).tolist()
    [[0, 0], [1, 0], [1, 1]]
    """
    entries = np.arange(check_int("num_entries", num_entries, 0, INT32_MAX), dtype=np.int32)
    return entries < visible_entries(positions, compress_ratio)[:, None]


def owned_entries(starts: Int32, ends: Int32, compress_ratio: int) -> tuple[Int32, Int32]:
    """The entries that the owner of a run of positions makes: those whose last token lies in the run.

    ::

        compress_ratio 4, runs [0,6) and [6,9)    tokens   0 1 2 3 4 5 | 6 7 8
                                                  entries  0 0 0 0 1 1   1 1 2      entry 1 belongs to the second run

    Args:
        starts: int32[num_runs], tokens, absolute position of the run's first token.
        ends: int32[num_runs], tokens, exclusive, >= ``starts``.
        compress_ratio: int, tokens per entry, >= 1.

    Returns:
        (int32[num_runs], int32[num_runs]): first owned entry and one past the last. Over the runs that tile a request
        every complete entry is owned exactly once.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: DeepSeek-V4 pooling: an entry is complete with its last token.

    >>> first, stop = owned_entries(np.array([0, 6], np.int32), np.array([6, 9], np.int32), 4)
    >>> first.tolist(), stop.tolist()
    ([0, 1], [1, 2])
    """
    check_array("starts", starts, ("int32",), ("num_runs",))
    check_array("ends", ends, ("int32",), starts.shape)
    bad = (starts < 0) | (ends < starts)
    if bad.any():
        run = int(bad.argmax())
        got = f"[{int(starts[run])}, {int(ends[run])}) as run {run}"
        rule = "be runs [start, end) with 0 <= start <= end"
        raise contract_error("starts and ends", rule, got, "ends are exclusive")
    ratio = np.int32(check_int("compress_ratio", compress_ratio, 1, INT32_MAX))
    return starts // ratio, ends // ratio


def pool_row_starts(positions: Int32, compress_ratio: int, *, overlap: bool) -> Int32:
    """The first raw row that pooling needs to go on from each position.

    ::

        compress_ratio 4, overlap, going on at position 6        tokens  0 1 2 3 | 4 5 . .
                                                                         a a a a   b b        rows 0..5 are needed

    Args:
        positions: int32[num_runs], tokens, absolute position of the next token, >= 0.
        compress_ratio: int, tokens per entry, >= 1.
        overlap: bool, whether an entry also pools the previous window (DeepSeek-V4 at ratio 4).

    Returns:
        int32[num_runs]: rows [start, position) are the open window and, with overlap, the one before: at most
        ``2 * compress_ratio - 1`` rows with overlap, ``compress_ratio - 1`` without.

    Raises:
        ContractError: a shape, dtype or value above does not hold.

    Source: the state that DeepSeek-V4's compressor carries.

    >>> pool_row_starts(np.array([6, 8, 3], np.int32), 4, overlap=True).tolist()
    [0, 4, 0]
    """
    check_positions(positions, "num_runs", lowest=0)
    check_bool("overlap", overlap)
    ratio = np.int32(check_int("compress_ratio", compress_ratio, 1, INT32_MAX // 2))
    open_window = positions // ratio * ratio
    return np.maximum(open_window - ratio, np.int32(0)) if overlap else open_window
