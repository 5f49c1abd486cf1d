"""One rank of a dump beside the definition of its step; what is compared, and what explains a difference.

A cause is found by testing hypotheses: each known fault is a function that computes what an implementation with this
fault would have produced from the same step. It is named when that is what was got, and differs from what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.validation.kinds import KINDS
from dsacp_npu.validation.reading import Item
from dsacp_ref.config import SPLITS
from dsacp_ref.extents import LocalExtents, local_extents, token_positions, token_requests
from dsacp_ref.partition import Int32, Partition, local_token_indices, partition_tokens
from dsacp_ref.spec import ContractError

__all__ = [
    "Cause",
    "Check",
    "Fault",
    "Finding",
    "Place",
    "Skipped",
    "View",
    "exact_finding",
    "explained",
    "finding_at",
    "fits",
    "same",
]

Array = NDArray[Any]
Made = TypeVar("Made")
MOST_RANKS = 64  # of other ranks, and other sizes, that a layout is compared with
SPREAD = {"positions": -1, "cos": 1, "sin": 0}  # what pad rows hold
SHOWN = 12  # numbers of a list in a text


class Skipped(Exception):  # it is no error
    """A comparison that cannot be made, and what it lacks."""


class Place(NamedTuple):
    """Where an element belongs; None where that has no meaning."""

    request: int | None = None
    token: int | None = None


@dataclass(frozen=True)
class Cause:
    """A known fault that gives exactly what was got.

    Args:
        kind: str, a key of `kinds.KINDS`.
        sentence, fix: str.
        detail: str, which of several forms of it; may be empty.
    """

    kind: str
    sentence: str
    fix: str
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """Where a tensor of one rank first parts from the definition.

    Args:
        check: str, its name.
        tensor: str, ours.
        rank: int.
        request, token: of the first differing element; None where there is none.
        index: its place in the tensor; empty where shapes differ.
        expected, got: the two numbers, or the two shapes in words.
        differing, size: how many elements differ, of how many that count.
        causes: tuple of Cause; empty for none of the known kinds.
    """

    check: str
    tensor: str
    rank: int
    request: int | None
    token: int | None
    index: tuple[int, ...]
    expected: Any
    got: Any
    differing: int
    size: int
    causes: tuple[Cause, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"index": list(self.index), "causes": [asdict(cause) for cause in self.causes]}


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
        """This rank's operator rows."""
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


class Fault(NamedTuple):
    """A known fault of one check.

    Fields:
        kind: str, a key of `kinds.KINDS`.
        made: what an implementation with the fault gives, from the step and what was got: an array, or a list of the
            forms that it may take; None where the fault has no meaning.
    """

    kind: str
    made: Callable[[View, Array], Array | list[Array] | None]


class Check(NamedTuple):
    """One tensor beside its definition.

    Fields:
        name: str.
        tensor: str, the tensor that is compared.
        title: str, a sentence for people.
        needs: names of tensors and settings without which it is skipped.
        expected: what is right.
        place: where an element belongs.
        faults: tuple of Fault, likely ones first.
        free: a mask of elements that may be anything; None for none.
        local: bool, whether what is right depends on the rank, so that another layout may explain it.
    """

    name: str
    tensor: str
    title: str
    needs: tuple[str, ...]
    expected: Callable[[View], Array]
    place: Callable[[View, tuple[int, ...]], Place]
    faults: tuple[Fault, ...] = ()
    free: Callable[[View], Array] | None = None
    local: bool = True


def same(got: Array, due: Array, free: Array | None) -> bool:
    """Whether two arrays of integers are the same where it counts."""
    if got.shape != due.shape:
        return False
    different = got != due
    return not (different & ~free if free is not None and free.shape == different.shape else different).any()


def exact_finding(view: View, check: Check) -> Finding | None:
    """Where an integer tensor first differs, and what explains it; None where it is right."""
    got, due = view.got(check.tensor), check.expected(view)
    free = check.free(view) if check.free is not None else None
    if same(got, due, free):
        return None

    def equal(candidate: Array) -> bool:
        return same(got, candidate, free if candidate.shape == due.shape else None)

    def right(candidate: Array) -> bool:
        return same(candidate, due, free)

    causes = explained(view, check, got, equal, right)
    if got.shape != due.shape:
        return shape_finding(view, check, got, due, causes)
    different = got != due if free is None else (got != due) & ~free
    return finding_at(
        view, check, different, due, got, causes, int(different.size - (0 if free is None else free.sum()))
    )


def finding_at(
    view: View,
    check: Check,
    different: Array,
    due: Array,
    got: Array,
    causes: tuple[Cause, ...],
    size: int,
    index: tuple[int, ...] | None = None,
) -> Finding:
    """The finding at the first differing element, or at a given one."""
    if index is None:
        index = tuple(int(i) for i in np.argwhere(different)[0])
    place = check.place(view, index)
    return Finding(
        check.name,
        check.tensor,
        view.cp_rank,
        *place,
        index,
        due[index].item() if due[index].ndim == 0 else due[index].tolist(),
        got[index].item() if got[index].ndim == 0 else got[index].tolist(),
        int(np.count_nonzero(different)),
        size,
        causes,
    )


def shape_finding(view: View, check: Check, got: Array, due: Array, causes: tuple[Cause, ...]) -> Finding:
    """The finding of a tensor of another shape."""
    size = int(due.size)
    place = Place()
    if got.ndim == due.ndim == 1 and len(got) and len(due):
        most = min(len(got), len(due))
        apart = np.flatnonzero(got[:most] != due[:most])
        place = check.place(view, (int(apart[0]) if len(apart) else most,))
    return Finding(check.name, check.tensor, view.cp_rank, *place, (), told(due), told(got), size, size, causes)


def told(array: Array) -> str:
    """An array in a few words."""
    if array.ndim != 1 or array.dtype.kind == "f":
        return f"shape {list(array.shape)}"
    numbers = " ".join(map(str, array[:SHOWN].tolist()))
    return f"{len(array)} numbers: {numbers}{' ...' if len(array) > SHOWN else ''}"


Test = Callable[[Array], bool]


def explained(view: View, check: Check, got: Array, equal: Test, right: Test) -> tuple[Cause, ...]:
    """The known faults that give what was got. Another layout is named only where no fault of the check explains it."""
    found: dict[str, Cause] = {}
    for fault in check.faults:
        if fault.kind not in found and fits(lambda f=fault: f.made(view, got), equal, right):
            found[fault.kind] = cause(fault.kind)
    if found or not check.local:
        return tuple(found.values())
    details: dict[str, list[str]] = {}
    for kind, detail, other in other_layouts(view):
        if fits(lambda v=other: check.expected(v), equal, right):
            details.setdefault(kind, []).append(detail)
    return tuple(cause(kind, ", ".join(dict.fromkeys(words))) for kind, words in details.items())


def fits(made: Callable[[], Array | list[Array] | None], equal: Test, right: Test) -> bool:
    """Whether a hypothesis can be computed, gives what was got, and is not what is right."""
    try:
        candidate = made()
    except (ContractError, IndexError, Skipped, ValueError):
        return False  # an implementation with this fault would have failed instead
    forms = candidate if isinstance(candidate, list) else [] if candidate is None else [candidate]
    return any(equal(form) and not right(form) for form in forms)


def cause(kind: str, detail: str = "") -> Cause:
    """The cause of a kind."""
    return Cause(kind, KINDS[kind].sentence, KINDS[kind].fix, detail)


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
