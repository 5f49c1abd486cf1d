"""The book behind `dsacp_npu.caches`: which request holds which block, and what a step brings. Python on the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from dsacp_npu._layer_records import LayerBatch
from dsacp_npu._tensors import Int32, check_host, torch
from dsacp_npu.extents import check_batch
from dsacp_ref.spec import check_record

RELEASED = -1  # in a table: given back behind the window, or never taken


class Progress(NamedTuple):
    """One request's part of a step: tokens [start, end) of the request in this state slot."""

    slot: int
    start: int
    end: int


class Blocks:
    """The blocks of one kind, raw keys or the entries of one ratio, and the columns of every state slot's request.

    A block may be held by several requests as long as none of them writes into it: a prefix in common. Rows of a step
    never fall into such a block, because `resize` hands out an own copy of the open one, the block that is partly full.

    Fields:
        name: what the blocks hold, for error texts.
        num_holders: requests that hold each block; 0 for a free one.
        columns: for each slot, the block of each run of ``block_size`` rows; RELEASED where it was given back.
        table: the same as int32[num_slots, columns], for the batches.
    """

    def __init__(
        self, name: str, num_blocks: int, *, block_size: int, compress_ratio: int, num_slots: int, num_tokens: int
    ) -> None:
        self.name = name
        self.block_size = block_size
        self.compress_ratio = compress_ratio
        self.num_holders = [0] * num_blocks
        self.free = list(range(num_blocks))[::-1]
        self.columns: list[list[int]] = [[] for _ in range(num_slots)]
        self.num_released = [0] * num_slots
        self.table: Int32 = torch.full((num_slots, self.num_columns(num_tokens)), RELEASED, dtype=torch.int32)

    @property
    def tokens_per_block(self) -> int:
        """Raw tokens that fill a block."""
        return self.block_size * self.compress_ratio

    def num_columns(self, num_tokens: int) -> int:
        """Blocks of a request of this length."""
        return -(-(num_tokens // self.compress_ratio) // self.block_size)

    def open_column(self, num_tokens: int) -> int | None:
        """The column that a request of this length goes on in; None where it goes on in a new one."""
        column, row = divmod(num_tokens // self.compress_ratio, self.block_size)
        return column if row else None

    def num_needed(self, slot: int, start: int, end: int) -> int:
        """Free blocks that `resize` would need, less those that it would give back."""
        held, want, column = self.columns[slot], self.num_columns(end), self.open_column(start)
        given_back = sum(block != RELEASED and self.num_holders[block] == 1 for block in held[want:])
        own_copy = column is not None and not self.is_own(held[column])
        return max(0, want - len(held)) + own_copy - given_back

    def is_own(self, block: int) -> bool:
        """Whether only one request holds the block, so that it may be written."""
        return block != RELEASED and self.num_holders[block] == 1

    def resize(self, slot: int, start: int, end: int) -> list[tuple[int, int]]:
        """Make the columns those of ``end`` tokens, writable from token ``start`` on.

        Returns:
            The open block's (old block, new block), whose rows must be copied, if it was held by others too.
        """
        held, want, column = self.columns[slot], self.num_columns(end), self.open_column(start)
        own_copy = column is not None and not self.is_own(held[column])
        if len(held) == want and not own_copy:
            return []
        self.drop(held[want:])
        del held[want:]
        self.num_released[slot] = min(self.num_released[slot], want)
        first_new, copies = len(held), list[tuple[int, int]]()
        held += [self.take() for _ in range(want - len(held))]
        if column is not None and own_copy:
            old, held[column] = held[column], self.take()
            self.drop([old])
            first_new = min(first_new, column)
            # A released open block has no row that anybody will read: nothing to copy.
            copies = [(old, held[column])] if old != RELEASED else []
            self.num_released[slot] = min(self.num_released[slot], column)
        self.table[slot, first_new:want] = torch.tensor(held[first_new:], dtype=torch.int32)
        self.table[slot, want:] = RELEASED
        return copies

    def share(self, source: int, slot: int, num_tokens: int) -> None:
        """Let an empty slot hold the source's columns of so many tokens too."""
        held = self.columns[source][: self.num_columns(num_tokens)]
        for block in held:
            if block != RELEASED:
                self.num_holders[block] += 1
        self.columns[slot] = held
        self.num_released[slot] = min(self.num_released[source], len(held))
        self.table[slot, : len(held)] = self.table[source, : len(held)]

    def release(self, slot: int, first_row: int) -> None:
        """Give back the blocks that lie wholly before this row."""
        first, stop = self.num_released[slot], min(first_row // self.block_size, len(self.columns[slot]))
        if stop <= first:
            return
        self.drop(self.columns[slot][first:stop])
        self.columns[slot][first:stop] = [RELEASED] * (stop - first)
        self.table[slot, first:stop] = RELEASED
        self.num_released[slot] = stop

    def take(self) -> int:
        """A free block, now held once."""
        block = self.free.pop()
        self.num_holders[block] = 1
        return block

    def drop(self, blocks: list[int]) -> None:
        """One holder less of each of these; free without any."""
        for block in blocks:
            if block != RELEASED:
                self.num_holders[block] -= 1
                if self.num_holders[block] == 0:
                    self.free.append(block)


def blocks_for(num_tokens: int, max_requests: int, *, block_size: int, compress_ratio: int) -> int:
    """Blocks that hold any ``max_requests`` requests of ``num_tokens`` tokens in all, whatever is left open.

    Every request with an entry has one open block; so many tokens cannot make more requests with an entry than that.
    """
    requests = min(max_requests, num_tokens // compress_ratio)
    return (num_tokens - requests * compress_ratio) // (block_size * compress_ratio) + requests


def window_blocks_for(kept_rows: int, max_step_tokens: int, max_requests: int, *, block_size: int) -> int:
    """Blocks for the last ``kept_rows`` rows of every request and the new rows of one step.

    A run of n rows that starts anywhere touches at most (n - 2) // block_size + 2 blocks.
    """
    return max(0, max_requests * (kept_rows - 2) + max_step_tokens) // block_size + 2 * max_requests


def progress_of(batch: LayerBatch) -> list[Progress]:
    """What a batch brings each request; slots without tokens stay where they are."""
    check_record("batch", batch, LayerBatch)
    for name in ("query_start_loc", "seq_lens", "state_indices"):
        check_host(f"batch.{name}", getattr(batch, name))
    check_batch(batch.query_start_loc, batch.seq_lens)
    starts, ends = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    lengths = [max(0, stop - start) for start, stop in pairwise(starts)]
    return [
        Progress(slot, max(0, end - length), end)
        for slot, end, length in zip(batch.state_indices.tolist(), ends, lengths, strict=True)
    ]


def padded_table(table: Int32, slots: Sequence[int], num_rows: int, num_columns: int) -> Int32:
    """The columns of these slots, then rows of -1."""
    rows = table[int32(slots).long(), :num_columns]
    return torch.cat([rows, rows.new_full((num_rows - len(slots), num_columns), RELEASED)])


def int32(values: Sequence[int]) -> Int32:
    """A host tensor."""
    return torch.tensor(values, dtype=torch.int32)
