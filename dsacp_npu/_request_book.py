"""The requests of a model's paged caches: opened, grown, taken back, forked. Python on the host.

What differs between models is what a layer keeps (`LayerPages`) and what must be there to go on from an earlier token
(`RequestBook._check_state`). No call waits for a device; what a call refuses, it refuses before it changes anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from dsacp_npu._cache_book import Blocks, Progress, int32, padded_table
from dsacp_npu._tensors import Int32
from dsacp_ref.spec import check_int, contract_error

RAW = 1  # key of the blocks of raw keys: those of a ratio go by it


class LayerPages(ABC):
    """How far each request came in one layer, and what must be copied when requests part.

    Fields:
        layer_idx: which layer.
        lengths: tokens that the layer holds of the request in each slot. On the host.
        plan: the number of the last plan over these caches; blocks that an earlier one made room in may be others'.
    """

    planner = "Caches.batches"  # what plans steps over these caches, for error texts

    def __init__(self, layer_idx: int, num_slots: int) -> None:
        self.layer_idx = layer_idx
        self.lengths = [0] * num_slots
        self.plan = 0

    def check_progress(self, steps: Sequence[Progress], names: Sequence[Hashable], plan: int | None) -> None:
        """Refuse a step that does not go on where this layer stopped: the rows between would pass for keys."""
        if plan is not None and plan != self.plan:
            hint = "run a step, or give it up, before the next one over these caches is planned"
            raise contract_error("step", f"be of plan {self.plan}, the last over these caches", plan, hint)
        for i, (slot, start, end) in enumerate(steps):
            if end > start and self.lengths[slot] != start:
                name = repr(names[i]) if i < len(names) else f"in state slot {slot}"
                raise contract_error(
                    f"state of request {name}",
                    f"hold {start} tokens in layer {self.layer_idx}",
                    f"{self.lengths[slot]}: state missing",
                    f"take lengths from {self.planner}; after a forward that stopped, roll the request back or reset "
                    "it",
                )

    def advance_to(self, steps: Sequence[Progress]) -> None:
        """Note that the layer holds these tokens."""
        for slot, start, end in steps:
            if end > start:
                self.lengths[slot] = end

    def roll_back(self, slot: int, num_tokens: int) -> None:
        """Make so many tokens all that the layer holds of a request."""
        self.lengths[slot] = num_tokens

    def copy_state(self, source: int, slot: int) -> None:
        """Give a slot what another one holds."""
        self.lengths[slot] = self.lengths[source]

    @abstractmethod
    def copy_block(self, kind: int, source: int, target: int) -> None:
        """Copy a block of this kind."""


Pages = TypeVar("Pages", bound=LayerPages)


class Planned(NamedTuple):
    """Where a step's tokens lie; on the host.

    Fields:
        steps: Progress of each request.
        slots: the state slot of every row, the requests' first.
        query_start_loc, seq_lens: int32, of all rows.
        tables: int32[rows, columns] for each kind of blocks.
    """

    steps: list[Progress]
    slots: list[int]
    query_start_loc: Int32
    seq_lens: Int32
    tables: dict[int, Int32]


class RequestBook(Generic[Pages]):
    """The open requests of some layers, which hold blocks of each kind in common."""

    num_tokens: int
    max_requests: int

    def __init__(self, num_tokens: int, max_requests: int, blocks: dict[int, Blocks], caches: dict[int, Pages]) -> None:
        self.num_tokens, self.max_requests = num_tokens, max_requests
        self._blocks, self._caches = blocks, caches
        self._slots: dict[Hashable, int] = {}
        self._free_slots = list(range(max_requests))[::-1]

    # --- the layers ---

    def __len__(self) -> int:
        """Layers, not requests."""
        return len(self._caches)

    def __iter__(self) -> Iterator[Pages]:
        """The layers' caches, in the order they were named."""
        return iter(self._caches.values())

    def __getitem__(self, layer_idx: int) -> Pages:
        """The cache of a layer, by its index in the model.

        Args:
            layer_idx: int, one of those given.

        Returns:
            the layer's pages.

        Raises:
            ContractError: no such layer here.
        """
        if layer_idx not in self._caches:
            hint = f"name it when {type(self).__name__} is made"
            raise contract_error("layer_idx", f"be one of {list(self._caches)}", layer_idx, hint)
        return self._caches[layer_idx]

    # --- requests ---

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """The open requests, in the order they were opened."""
        return tuple(self._slots)

    def open(self, request: Hashable) -> None:
        """Take up a request without tokens.

        Args:
            request: any hashable name, not open yet.

        Raises:
            ContractError: it is open, or no state slot is free.
        """
        self._check_new(request)
        self._slots[request] = self._free_slots.pop()

    def close(self, request: Hashable) -> None:
        """Forget a request; its blocks and its state slot are free.

        Args:
            request: an open request.

        Raises:
            ContractError: it is not open.
        """
        self.reset(request)
        self._free_slots.append(self._slots.pop(request))

    def reset(self, request: Hashable) -> None:
        """Make a request as if it had never run; it stays open.

        Args:
            request: an open request.

        Raises:
            ContractError: it is not open.
        """
        slot = self._slot(request)
        for blocks in self._blocks.values():
            blocks.resize(slot, 0, 0)
        for cache in self:
            cache.roll_back(slot, 0)

    def num_computed_tokens(self, request: Hashable) -> int:
        """The tokens of a request that every layer holds.

        Args:
            request: an open request.

        Returns:
            int.

        Raises:
            ContractError: it is not open, or its layers do not agree.
        """
        slot = self._slot(request)
        lengths = {cache.lengths[slot] for cache in self}
        if len(lengths) == 1:
            return lengths.pop()
        found = {
            length: [cache.layer_idx for cache in self if cache.lengths[slot] == length] for length in sorted(lengths)
        }
        raise contract_error(
            f"request {request!r}",
            "have one length in all layers",
            ", ".join(f"{length} in layers {where}" for length, where in found.items()),
            f"a forward stopped half-way: roll_back(request, {min(lengths)}), or reset(request)",
        )

    @property
    def plan(self) -> int:
        """The number of the last plan: how often `batches` has made room."""
        return next(iter(self)).plan

    @property
    def num_free_tokens(self) -> int:
        """Tokens that the free blocks hold, of the kind that is scarcest."""
        return min(len(blocks.free) * blocks.tokens_per_block for blocks in self._blocks.values())

    def roll_back(self, request: Hashable, num_tokens: int) -> None:
        """Take back the last tokens of a request in every layer: rejected drafts, or a step that stopped half-way.

        Args:
            request: an open request.
            num_tokens: int >= 0, tokens that remain. Where layers carry state, ``spare_rows`` less than were there can
                always be reached.

        Raises:
            ContractError: it is not open, a layer holds fewer tokens, their state is gone, or a block that must be
                copied from a fork finds no free one.
        """
        slot = self._slot(request)
        least = min(cache.lengths[slot] for cache in self)
        num_tokens = check_int("num_tokens", num_tokens, 0, least, "a rollback only takes back")
        self._check_state(request, num_tokens)
        self._resize([Progress(slot, num_tokens, num_tokens)], "num_tokens", 0)
        for cache in self:
            cache.roll_back(slot, num_tokens)

    def fork(self, request: Hashable, source: Hashable, num_tokens: int | None = None) -> None:
        """Open a request that begins with the tokens of another one: a prefix in common is computed once.

        Full blocks are held by both, the open ones and the state are copied. Neither notices what the other does.

        Args:
            request: any hashable name, not open yet.
            source: an open request.
            num_tokens: int >= 0, tokens of the prefix; None takes all that the source holds. Where layers carry state,
                fewer can be had only as far back as it reaches: ``spare_rows`` tokens.

        Raises:
            ContractError: one is open or the other is not, the source has no such state, or slots or blocks run out.
        """
        self._check_new(request)
        length = self.num_computed_tokens(source)
        wanted = length if num_tokens is None else num_tokens
        num_tokens = check_int("num_tokens", wanted, 0, length, f"request {source!r} holds {length}")
        self._check_state(source, num_tokens)
        needed = {ratio: int(blocks.open_column(num_tokens) is not None) for ratio, blocks in self._blocks.items()}
        self._check_room(needed, "num_tokens", 0)
        self.open(request)
        slot, from_slot = self._slots[request], self._slots[source]
        for blocks in self._blocks.values():
            blocks.share(from_slot, slot, num_tokens)
        self._resize([Progress(slot, num_tokens, num_tokens)], "num_tokens", 0)
        for cache in self:
            cache.copy_state(from_slot, slot)
            cache.roll_back(slot, num_tokens)

    # --- steps ---

    def _planned(self, new_tokens: Mapping[Any, int], num_slots: int | None, max_seq_len: int | None) -> Planned:
        """Room for a step, and where its tokens and those before them lie."""
        steps = [self._next(request, count) for request, count in self._counts(new_tokens)]
        longest = max((step.end for step in steps), default=0)
        rows = check_int(
            "num_slots",
            len(steps) if num_slots is None else num_slots,
            len(steps),
            self.max_requests,
            f"the step has {len(steps)} requests, and max_requests {self.max_requests} state slots",
        )
        if max_seq_len is not None:
            hint = f"the longest request has {longest} tokens, and num_tokens is {self.num_tokens}"
            columns = check_int("max_seq_len", max_seq_len, longest, self.num_tokens, hint)
        else:
            columns = longest if num_slots is None else self.num_tokens
        self._release()
        num_new = sum(step.end - step.start for step in steps)
        for cache in self:
            cache.plan += 1
        self._resize([*steps, *self._others(new_tokens)], "new_tokens", num_new)
        used = [step.slot for step in steps]
        idle = rows - len(steps)
        starts = [0]
        for step in steps:
            starts.append(starts[-1] + step.end - step.start)
        tables = {
            kind: padded_table(blocks.table, used, rows, blocks.num_columns(columns))
            for kind, blocks in self._blocks.items()
        }
        return Planned(
            steps,
            used + self._idle_slots(used)[:idle],
            int32(starts + starts[-1:] * idle),
            int32([step.end for step in steps] + [0] * idle),
            tables,
        )

    def _counts(self, new_tokens: Mapping[Any, int]) -> list[tuple[Hashable, int]]:
        """Requests and their new tokens, in order."""
        if not isinstance(new_tokens, Mapping):
            raise contract_error("new_tokens", "be a mapping from requests to counts", type(new_tokens).__name__)
        return [(request, check_int(f"new_tokens[{request!r}]", count, 0)) for request, count in new_tokens.items()]

    def _next(self, request: Hashable, count: int) -> Progress:
        """What a request's next tokens are."""
        start = self.num_computed_tokens(request)
        if start + count > self.num_tokens:
            raise contract_error(
                "new_tokens",
                f"keep request {request!r} within num_tokens {self.num_tokens}",
                f"{count} after {start}",
                f"make {type(self).__name__} with more num_tokens",
            )
        return Progress(self._slots[request], start, start + count)

    def _others(self, new_tokens: Mapping[Any, int]) -> list[Progress]:
        """The open requests that a step leaves out, where they are; one that stopped half-way keeps its room."""
        found = []
        for request, slot in self._slots.items():
            lengths = {cache.lengths[slot] for cache in self}
            if request not in new_tokens and len(lengths) == 1:
                found.append(Progress(slot, *lengths, *lengths))
        return found

    def _release(self) -> None:
        """Give back what nothing to come can see; a model whose tokens all stay visible has nothing to give."""

    def _check_state(self, request: Hashable, num_tokens: int) -> None:
        """Refuse to go on from a length whose state is gone; a model without state can always go on."""

    def _resize(self, steps: Sequence[Progress], name: str, num_new: int) -> None:
        """Make every table fit, and copy what must not be written in common; refused before anything is changed."""
        needs = {
            ratio: [blocks.num_needed(step.slot, step.start, step.end) for step in steps]
            for ratio, blocks in self._blocks.items()
        }
        self._check_room({ratio: sum(counts) for ratio, counts in needs.items()}, name, num_new)
        for ratio, blocks in self._blocks.items():
            # Those that give blocks back go first, so that no other one finds none.
            for _, step in sorted(zip(needs[ratio], steps, strict=True)):
                for source, target in blocks.resize(*step):
                    for cache in self:
                        cache.copy_block(ratio, source, target)

    def _check_room(self, needed: Mapping[int, int], name: str, num_new: int) -> None:
        """Refuse what takes more blocks than are free."""
        for ratio, count in needed.items():
            blocks = self._blocks[ratio]
            if count > len(blocks.free):
                raise contract_error(
                    name,
                    f"fit into the free blocks, which hold {self.num_free_tokens} tokens",
                    f"{num_new} tokens, {count} blocks of {blocks.name} where {len(blocks.free)} are free",
                    f"close a request, or make {type(self).__name__} with more num_tokens",
                )

    def _idle_slots(self, used: Sequence[int]) -> list[int]:
        """State slots that a step does not use, free ones first."""
        taken = set(used)
        return self._free_slots[::-1] + [slot for slot in self._slots.values() if slot not in taken]

    def _slot(self, request: Hashable) -> int:
        """The state slot of an open request."""
        if request not in self._slots:
            raise contract_error(
                "request", f"be one of the {len(self._slots)} open ones", repr(request), "open it first"
            )
        return self._slots[request]

    def _check_new(self, request: Hashable) -> None:
        """Refuse a request that is open, and one too many."""
        if request in self._slots:
            raise contract_error("request", "not be open yet", repr(request), "close it first, or reset it")
        if not self._free_slots:
            raise contract_error(
                "request",
                f"find one of {self.max_requests} state slots free",
                f"{request!r} beside {list(self._slots)}",
                f"close one of them, or make {type(self).__name__} with more max_requests",
            )
