"""One rank of a dump beside the definition of its step: what is got, what is due, and where an element belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.validation.reading import Item
from dsacp_ref.config import SPLITS
from dsacp_ref.extents import LocalExtents, local_extents, token_positions, token_requests
from dsacp_ref.partition import Int32, Partition, local_token_indices, partition_tokens
from dsacp_ref.spec import check_array

__all__ = ["Array", "Place", "Skipped", "View", "other_layouts"]

Array = NDArray[Any]
Made = TypeVar("Made")
MOST_RANKS = 64  # of other ranks, and other sizes, that a layout is compared with
SPREAD = {"positions": -1, "cos": 1, "sin": 0}  # what pad rows hold


class Skipped(Exception):  # it is no error
    """A comparison that cannot be made, and what it lacks."""


class Place(NamedTuple):
    """Where an element belongs; None where that has no meaning."""

    request: int | None = None
    token: int | None = None


@dataclass(frozen=True)
class View:
    """One rank's tensors, and what the definition says of its step.

    Args:
        query_start_loc, seq_lens: of the whole step.
        cp_size, cp_rank, split, num_input_tokens, causal, empty_extent: how it is cut.
        settings: all settings of the dump.
        tensors: this rank's, by our name.
        ranks: every rank's tensors.
    """

    query_start_loc: Int32
    seq_lens: Int32
    cp_size: int
    cp_rank: int
    split: str
    num_input_tokens: int | None
    causal: bool
    empty_extent: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Item]
    ranks: Mapping[int, Mapping[str, Item]]
    memo: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, name: str, made: Callable[[View], Made]) -> Made:
        """What is worked out of this view once, whoever asks for it."""
        if name not in self.memo:
            self.memo[name] = made(self)
        found: Made = self.memo[name]
        return found

    def seen_as(self, **changes: Any) -> View:
        """The same tensors beside another step or place."""
        return replace(self, **changes)

    def got(self, name: str) -> Array:
        """A tensor of the dump; what may be written without pad rows comes with them."""
        if name not in self.tensors:
            raise Skipped(name)
        array = self.tensors[name].array
        if name in SPREAD and len(array) == len(self.own) < len(self.tokens):
            rows = np.full((len(self.tokens), *array.shape[1:]), SPREAD[name], array.dtype)
            rows[self.tokens >= 0] = array
            return rows
        return array

    def setting(self, name: str) -> Any:
        """A setting of the dump."""
        if name not in self.settings:
            raise Skipped(name)
        return self.settings[name]

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return int(self.query_start_loc[-1])

    @property
    def num_reqs(self) -> int:
        """Requests of the step."""
        return len(self.seq_lens)

    @property
    def query_lens(self) -> Int32:
        """New tokens of each request."""
        return np.diff(self.query_start_loc)

    @property
    def computed(self) -> Int32:
        """Tokens of each request before the step; negative for a padded graph slot."""
        return self.seq_lens - self.query_lens

    @cached_property
    def partition(self) -> Partition:
        """Every rank's rows."""
        return partition_tokens(
            self.query_start_loc, self.cp_size, split=self.split, num_input_tokens=self.num_input_tokens
        )

    @cached_property
    def tokens(self) -> Int32:
        """The token of each of this rank's rows, -1 in pad rows."""
        return local_token_indices(
            self.query_start_loc,
            self.cp_size,
            self.cp_rank,
            split=self.split,
            num_input_tokens=self.num_input_tokens,
        )

    @property
    def own(self) -> Int32:
        """The tokens of this rank, without pad rows."""
        return self.tokens[self.tokens >= 0]

    @cached_property
    def extents(self) -> LocalExtents:
        """This rank's operator rows; without the pad rows at their end where the dump leaves these out."""
        every = self.every_row
        real = int(np.count_nonzero(every.request_indices >= 0))
        entries = {"seqused_kv": real, "cu_seqlens_q": real + 1, "request_indices": real}
        lengths = {name: len(self.tensors[name].array) for name in entries if name in self.tensors}
        if lengths and all(entries[name] == length for name, length in lengths.items()):
            return LocalExtents(every.cu_seqlens_q[: real + 1], *(part[:real] for part in every[1:]))
        return every

    @property
    def every_row(self) -> LocalExtents:
        """This rank's operator rows, pad rows at the end."""
        return local_extents(
            self.query_start_loc,
            self.seq_lens,
            self.cp_size,
            self.cp_rank,
            split=self.split,
            num_input_tokens=self.num_input_tokens,
            causal=self.causal,
            empty_extent=self.empty_extent,
        )

    def positions_of(self, tokens: Int32) -> Int32:
        """The position of each token."""
        return token_positions(tokens, self.query_start_loc, self.seq_lens)

    def requests_of(self, tokens: Int32) -> Int32:
        """The request of each token."""
        return token_requests(tokens, self.query_start_loc)

    @property
    def everything(self) -> Int32:
        """All tokens of the step in order."""
        return np.arange(self.num_tokens, dtype=np.int32)

    def own_rows(self, name: str) -> Array:
        """A row-aligned tensor of this rank without its pad rows, whether they were written or not."""
        array = self.got(name)
        if len(array) == len(self.tokens):
            return array[self.tokens >= 0]
        return array

    def own_queries(self, name: str, shape: tuple[int | str, ...]) -> Array:
        """A tensor of one row an own query, once it is found to be of this shape; in float64."""
        rows = self.own_rows(name)
        rule = f"one row a query: {len(self.own)}, or {len(self.tokens)} with pad rows"
        check_array(name, rows, (str(rows.dtype),), (len(self.own), *shape), rule)
        return rows.astype(np.float64)

    # --- places ---

    def place_of_token(self, token: int) -> Place:
        """The request of a token."""
        if not 0 <= token < self.num_tokens:
            return Place()
        return Place(int(self.requests_of(np.array([token], np.int32))[0]), token)

    def place_of_row(self, index: tuple[int, ...]) -> Place:
        """Of a local row, pad rows counted."""
        return self.place_of_token(int(self.tokens[index[0]])) if index[0] < len(self.tokens) else Place()

    def place_of_own(self, index: tuple[int, ...]) -> Place:
        """Of a local row, pad rows left out."""
        return self.place_of_token(int(self.own[index[0]])) if index[0] < len(self.own) else Place()

    def place_of_operator_row(self, index: tuple[int, ...]) -> Place:
        """Of an operator row, and its first query."""
        requests, loc = self.extents.request_indices, self.extents.cu_seqlens_q
        if index[0] >= len(requests):
            return Place()
        request, first = int(requests[index[0]]), int(loc[index[0]])
        has_queries = loc[index[0] + 1] > first
        return Place(request if request >= 0 else None, int(self.own[first]) if has_queries else None)

    def place_of_offset(self, index: tuple[int, ...]) -> Place:
        """Of the operator row that an offset ends."""
        return self.place_of_operator_row((max(index[0] - 1, 0),))

    def place_of_request(self, index: tuple[int, ...]) -> Place:
        """Of a request."""
        return Place(index[0]) if index[0] < self.num_reqs else Place()


def other_layouts(view: View) -> Iterator[tuple[str, str, View]]:
    """The same step cut in other ways, or seen from another rank."""
    sizes = {view.cp_size * 2, view.cp_size // 2, 2, 4, 8} - {0, 1, view.cp_size}
    for padded in dict.fromkeys((None, view.num_input_tokens)):
        whole = view.seen_as(cp_size=1, cp_rank=0, split="contiguous", num_input_tokens=padded)
        yield "not_split", "one rank has all tokens", whole
    if view.num_input_tokens is not None:
        yield "graph_padding_ignored", "", view.seen_as(num_input_tokens=None)
    for split in other_splits(view):
        yield "other_split", f"it is that of {split}", view.seen_as(split=split, num_input_tokens=None)
    for rank in range(min(view.cp_size, MOST_RANKS)):
        if rank != view.cp_rank:
            yield "wrong_rank", f"it is that of rank {rank}", view.seen_as(cp_rank=rank)
    for size in sorted(sizes):
        for rank in range(min(size, MOST_RANKS)):
            detail = f"it is that of rank {rank} of {size}"
            yield "wrong_cp_size", detail, view.seen_as(cp_size=size, cp_rank=rank)


def other_splits(view: View) -> list[str]:
    """Every rule but the step's; of pages with the sizes that this step could have."""
    pages = {view.settings.get("block_size"), view.settings.get("compress_ratio"), 16, 64, 128} - {None, 1}
    names = [name for name in SPLITS if name != "round_robin_page"]
    names += [f"round_robin_page({page})" for page in sorted(pages, key=int)]
    return [name for name in names if name != view.split]
