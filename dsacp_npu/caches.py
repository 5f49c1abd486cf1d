"""What attention keeps between steps: one paged cache a layer, and one book of requests for all layers of a model.

The book is plain Python on the host. Blocks are taken as requests grow, and raw keys behind the window are given back.
No call waits for a device; what a call refuses, it refuses before it changes anything.

A step goes: `Caches.batches` makes room and tells where everything lies; every layer runs, and notes in its
`PagedCache` how far it came (`advance`). What a request's length is, the layers say: there is no second count of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dsacp_npu._cache_book import (
    Blocks,
    Progress,
    blocks_for,
    int32,
    padded_table,
    progress_of,
    window_blocks_for,
)
from dsacp_npu._index_calls import parts_of
from dsacp_npu._layer_records import LayerBatch, LayerCache
from dsacp_npu._tensors import Float, computing_dtype, torch
from dsacp_npu.compressor import CompressorState
from dsacp_npu.quant import QuantizedVectors
from dsacp_ref.config import AttentionConfig
from dsacp_ref.spec import INT32_MAX, check_bool, check_choice, check_int, check_record, contract_error

__all__ = ["CacheMemory", "Caches", "PagedCache"]

DTYPES = ("bfloat16", "float16", "float32", "float64")
OVERLAP_RATIO = 4  # the ratio whose entries overlap, and are chosen by an indexer
RAW = 1  # key of the raw keys' blocks among those of the ratios


class CacheMemory(NamedTuple):
    """Bytes that one rank holds.

    Fields:
        num_bytes: all of them.
        parts: by field of LayerCache: raw keys, entries, index keys, and the states of both compressors.
        ratios: by compress ratio of the layers.
    """

    num_bytes: int
    parts: dict[str, int]
    ratios: dict[int, int]


class PagedCache:
    """What one layer keeps, and how far each request came in it.

    Fields:
        layer_idx, compress_ratio: which layer, and its ratio.
        tensors: the LayerCache that the layer writes into; its tensors stay where they are.
        lengths: tokens that the layer holds of the request in each state slot. On the host.
        ring_starts: the first row that each slot's compressor ring still holds; ``held_start`` of the states, on the
            host.
        plan: the number of the last plan over these caches; blocks that an earlier one made room in may be others'.
    """

    def __init__(self, layer_idx: int, compress_ratio: int, tensors: LayerCache) -> None:
        self.layer_idx = layer_idx
        self.compress_ratio = compress_ratio
        self.tensors = tensors
        self.lengths = [0] * len(tensors.cmp_state.num_tokens)
        self.ring_starts = [0] * len(self.lengths)
        self.plan = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.memory().values())

    def memory(self) -> dict[str, int]:
        """Bytes of each part of the cache.

        Returns:
            dict from a LayerCache field to bytes.
        """
        return {name: num_bytes(part) for name, part in self.tensors._asdict().items()}

    def check_continues(self, batch: LayerBatch, names: Sequence[Hashable], plan: int | None = None) -> None:
        """Refuse a step that does not go on where this layer stopped: the rows between would pass for keys.

        Args:
            batch: LayerBatch on the host.
            names: the requests of the batch in order; without one, a request goes by its state slot.
            plan: int or None, the number of the plan that made room for the step (`Caches.plan`); None where an engine
                makes room by itself.

        Raises:
            ContractError: a request's earlier tokens are not those that the layer holds, or the step's blocks were
                given up for a later plan.
            UnsupportedError: the batch lies on a device.
        """
        if plan is not None and plan != self.plan:
            hint = "run a step, or give it up, before the next one over these caches is planned"
            raise contract_error("step", f"be of plan {self.plan}, the last over these caches", plan, hint)
        for i, (slot, start, end) in enumerate(progress_of(batch)):
            if end > start and self.lengths[slot] != start:
                name = repr(names[i]) if i < len(names) else f"in state slot {slot}"
                raise contract_error(
                    f"state of request {name}",
                    f"hold {start} tokens in layer {self.layer_idx}",
                    f"{self.lengths[slot]}: state missing",
                    "take lengths from Caches.batches; after a forward that stopped, roll the request back or reset it",
                )

    def advance(self, batch: LayerBatch) -> None:
        """Note that the layer holds the step's tokens.

        Args:
            batch: LayerBatch on the host, the one that was run.

        Raises:
            UnsupportedError: the batch lies on a device.
        """
        self.advance_to(progress_of(batch))

    def advance_to(self, steps: Sequence[Progress]) -> None:
        """Note that the layer holds these tokens."""
        num_rows = self.tensors.cmp_state.kv.shape[1]
        for slot, start, end in steps:
            if end > start:
                self.lengths[slot] = end
                self.ring_starts[slot] = max(self.ring_starts[slot] if start else 0, end - num_rows)

    def ring_need(self, num_tokens: int) -> int:
        """The first row that pooling needs of a request that goes on after so many tokens."""
        open_window = num_tokens // self.compress_ratio * self.compress_ratio
        return max(0, open_window - self.compress_ratio) if self.compress_ratio == OVERLAP_RATIO else open_window

    def holds_state(self, slot: int, num_tokens: int) -> bool:
        """Whether the compressor of this slot can go on after so many tokens."""
        need = self.ring_need(num_tokens)
        return self.compress_ratio == 1 or need == num_tokens or self.ring_starts[slot] <= need

    def states(self) -> list[CompressorState]:
        """The compressor states that this kind of layer has."""
        states = [self.tensors.cmp_state, self.tensors.index_state]
        return states[: 0 if self.compress_ratio == 1 else 2 if self.compress_ratio == OVERLAP_RATIO else 1]

    def roll_back(self, slot: int, num_tokens: int) -> None:
        """Make so many tokens, whose state is held, all that the layer holds of a request.

        What `dsacp_npu.compressor.rolled_back_state` gives; the host knows both numbers, so they are only written.
        """
        self.lengths[slot] = num_tokens
        self.ring_starts[slot] = min(self.ring_starts[slot], num_tokens)
        for state in self.states():
            state.held_start[slot] = self.ring_starts[slot]
            state.num_tokens[slot] = num_tokens

    def copy_state(self, source: int, slot: int) -> None:
        """Give a slot what another one holds."""
        for state in self.states():
            for part in state:
                part[slot] = part[source]
        self.lengths[slot], self.ring_starts[slot] = self.lengths[source], self.ring_starts[source]

    def copy_block(self, kind: int, source: int, target: int) -> None:
        """Copy a block of raw keys, or of the entries of this ratio and their index keys."""
        if kind not in (RAW, self.compress_ratio):
            return
        entries = (self.tensors.cmp_cache, *parts_of(self.tensors.index_cache))
        for part in (self.tensors.swa_cache,) if kind == RAW else entries:
            if len(part):  # a layer without an indexer has no index keys
                part[target] = part[source]


class Caches:
    """The caches of some layers, and the book of the requests that they hold.

    Args:
        config: AttentionConfig.
        layers: the layers' indices, distinct; from ``num_hidden_layers`` on they are draft layers. All of them run in
            every step.
        num_tokens: int >= 1, tokens that all requests together may hold; also the longest request.
        max_requests: int >= 1, open requests, and state slots.
        block_size, cmp_block_size: int >= 1, raw keys and entries per block.
        spare_rows: int >= 0, tokens that may be rolled back, or forked before the end.
        max_step_tokens: int >= 1 or None. None keeps blocks for ``num_tokens`` raw keys; given, only for every
            request's window and so many new tokens a step, which is much less in a long context.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float64"``, of keys and entries.
        device: where the tensors lie, as torch names it.
        int8_index_cache: bool; index keys as int8 values with float16 scales.

    Raises:
        ContractError: a value does not hold.

    >>> from dsacp_ref.config import v4_flash
    >>> caches = Caches(v4_flash(), [0, 2], num_tokens=1024, max_requests=2)
    >>> caches.open("a")
    >>> batch = caches.batches({"a": 200})[4]
    >>> batch.seq_lens.tolist(), batch.swa_block_table.tolist(), batch.cmp_block_table.tolist()
    ([200], [[0, 1]], [[0]])
    >>> caches.advance(batch)
    >>> caches.num_computed_tokens("a"), len(caches), caches[2].compress_ratio
    (200, 2, 4)
    """

    def __init__(
        self,
        config: AttentionConfig,
        layers: Sequence[int],
        *,
        num_tokens: int,
        max_requests: int,
        block_size: int = 128,
        cmp_block_size: int = 128,
        spare_rows: int = 0,
        max_step_tokens: int | None = None,
        dtype: str = "bfloat16",
        device: str | torch.device = "cpu",
        int8_index_cache: bool = False,
    ) -> None:
        check_record("config", config, AttentionConfig)
        ratios = {layer: config.compress_ratio(layer) for layer in checked_layers(layers)}
        self.num_tokens = check_int("num_tokens", num_tokens, 1, INT32_MAX)
        self.max_requests = check_int("max_requests", max_requests, 1)
        self.spare_rows = check_int("spare_rows", spare_rows, 0)
        self.window_size = config.window_size
        sizes = {RAW: check_int("block_size", block_size, 1)}
        cmp_block_size = check_int("cmp_block_size", cmp_block_size, 1)
        sizes |= dict.fromkeys(sorted(set(ratios.values()) - {1}), cmp_block_size)
        self._blocks = {ratio: self._blocks_of(ratio, size, max_step_tokens) for ratio, size in sizes.items()}
        kind: Any = {"dtype": getattr(torch, check_choice("dtype", dtype, DTYPES)), "device": torch.device(device)}
        check_bool("int8_index_cache", int8_index_cache)
        self._caches = {}
        for layer, ratio in ratios.items():
            raw, entries = self._blocks[RAW], self._blocks[ratio]
            num_blocks = (len(raw.num_holders), len(entries.num_holders))
            block_sizes = (raw.block_size, cmp_block_size)
            tensors = empty_tensors(config, ratio, num_blocks, block_sizes, self.max_requests, self.spare_rows, **kind)
            self._caches[layer] = PagedCache(layer, ratio, in_int8(tensors) if int8_index_cache else tensors)
        self._slots: dict[Hashable, int] = {}
        self._free_slots = list(range(self.max_requests))[::-1]

    def _blocks_of(self, ratio: int, block_size: int, max_step_tokens: int | None) -> Blocks:
        """All blocks of one kind, free."""
        count = blocks_for(self.num_tokens, self.max_requests, block_size=block_size, compress_ratio=ratio)
        if ratio == RAW and max_step_tokens is not None:
            step = check_int("max_step_tokens", max_step_tokens, 1)
            windows = window_blocks_for(self._kept_rows, step, self.max_requests, block_size=block_size)
            count = min(count, windows)
        return Blocks(
            "raw keys" if ratio == RAW else f"entries of ratio {ratio}",
            count,
            block_size=block_size,
            compress_ratio=ratio,
            num_slots=self.max_requests,
            num_tokens=self.num_tokens,
        )

    # --- the layers ---

    def __len__(self) -> int:
        """Layers, not requests."""
        return len(self._caches)

    def __iter__(self) -> Iterator[PagedCache]:
        """The layers' caches, in the order they were named."""
        return iter(self._caches.values())

    def __getitem__(self, layer_idx: int) -> PagedCache:
        """The cache of a layer, by its index in the model.

        Args:
            layer_idx: int, one of those given.

        Returns:
            PagedCache.

        Raises:
            ContractError: no such layer here.
        """
        if layer_idx not in self._caches:
            raise contract_error(
                "layer_idx", f"be one of {list(self._caches)}", layer_idx, "name it when Caches is made"
            )
        return self._caches[layer_idx]

    def memory(self) -> CacheMemory:
        """Bytes that this rank holds: raw keys and entries are the same on all ranks, so each holds all of them.

        Returns:
            CacheMemory.
        """
        parts = dict.fromkeys(LayerCache._fields, 0)
        ratios = dict.fromkeys(sorted({cache.compress_ratio for cache in self}), 0)
        for cache in self:
            ratios[cache.compress_ratio] += cache.num_bytes
            for name, size in cache.memory().items():
                parts[name] += size
        return CacheMemory(sum(parts.values()), parts, ratios)

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
            num_tokens: int >= 0, tokens that remain; ``spare_rows`` less than were there can always be reached.

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
            num_tokens: int >= 0, tokens of the prefix; None takes all that the source holds. Fewer can be had only as
                far back as the source's state reaches: ``spare_rows`` tokens.

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

    def batches(
        self, new_tokens: Mapping[Any, int], *, num_slots: int | None = None, max_seq_len: int | None = None
    ) -> dict[int, LayerBatch]:
        """Room for a step, and where its tokens and those before them lie.

        What an earlier call made room for is given up unless its tokens were run. Every open request's raw keys that
        no token to come can see are given back, but for those that a rollback of ``spare_rows`` tokens would need.

        For a graph that is replayed, shapes must not change: give ``num_slots`` and, unless it is ``num_tokens``,
        ``max_seq_len``. Slots beyond the requests then have ``seq_lens`` 0, no queries, a table of -1 and a state slot
        that no request of the step has, whose content stays as it is.

        Args:
            new_tokens: for each request of the step, in the order of its rows, an int >= 0.
            num_slots: int or None, rows of the batch; None takes as many as there are requests.
            max_seq_len: int or None, tokens of a request that the tables have columns for; None takes the longest
                request's, and ``num_tokens`` when ``num_slots`` is given.

        Returns:
            dict from each compress ratio of the layers to its LayerBatch, int32 on the host. Columns that hold nothing,
            and those behind the window, are -1.

        Raises:
            ContractError: a request that is not open or whose layers do not agree, a count that does not hold, or no
                room. Nothing was changed then.
        """
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
        return self._batches_of(steps, rows, columns)

    def advance(self, batch: LayerBatch) -> None:
        """Note that all layers hold the step's tokens: after a replayed graph, where no layer's Python runs.

        Args:
            batch: any LayerBatch of the step, on the host.

        Raises:
            UnsupportedError: it lies on a device.
        """
        steps = progress_of(batch)
        for cache in self:
            cache.advance_to(steps)

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
                "make Caches with more num_tokens",
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
        """Give back raw keys that nothing to come can see."""
        for slot in self._slots.values():
            reached = min(cache.lengths[slot] for cache in self)
            self._blocks[RAW].release(slot, max(0, reached - self._kept_rows))

    @property
    def _kept_rows(self) -> int:
        """Raw keys before a request's end that a token to come may see, after a rollback too."""
        return self.window_size - 1 + self.spare_rows

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
                    "close a request, or make Caches with more num_tokens",
                )

    def _batches_of(self, steps: Sequence[Progress], rows: int, max_seq_len: int) -> dict[int, LayerBatch]:
        """One record a ratio; the lengths and the raw table are the same tensors in all."""
        used = [step.slot for step in steps]
        slots = used + self._idle_slots(used)[: rows - len(used)]
        idle = rows - len(steps)
        starts = [0]
        for step in steps:
            starts.append(starts[-1] + step.end - step.start)
        query_start_loc = int32(starts + starts[-1:] * idle)
        seq_lens = int32([step.end for step in steps] + [0] * idle)
        tables = {
            ratio: padded_table(blocks.table, used, rows, blocks.num_columns(max_seq_len))
            for ratio, blocks in self._blocks.items()
        }
        nothing = torch.empty(rows, 0, dtype=torch.int32)
        return {
            ratio: LayerBatch(
                query_start_loc, seq_lens, tables[RAW], nothing if ratio == 1 else tables[ratio], int32(slots)
            )
            for ratio in sorted({cache.compress_ratio for cache in self})
        }

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
                "close one of them, or make Caches with more max_requests",
            )

    def _check_state(self, request: Hashable, num_tokens: int) -> None:
        """Refuse to go on from a length whose state is gone."""
        slot, raw = self._slots[request], self._blocks[RAW]
        first = max(0, num_tokens - self.window_size + 1)
        missing = [
            f"layer {cache.layer_idx} pools rows from {cache.ring_need(num_tokens)}, and holds them from "
            f"{cache.ring_starts[slot]}"
            for cache in self
            if not cache.holds_state(slot, num_tokens)
        ][:1]
        held_from = raw.num_released[slot] * raw.block_size
        if first < min(held_from, num_tokens):
            missing.append(f"the window begins at row {first}, and raw keys are held from {held_from}")
        if missing:
            raise contract_error(
                "num_tokens",
                f"be a length of request {request!r} whose state is still held",
                f"{num_tokens} ({'; '.join(missing)})",
                "make Caches with as many spare_rows as tokens may be taken back, or reset the request and run it anew",
            )


def checked_layers(layers: Sequence[int]) -> list[int]:
    """The layer indices, at least one and none twice."""
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise contract_error("layers", "be a sequence of layer indices, not empty", repr(layers))
    checked = [check_int("layers", layer, 0) for layer in layers]
    if len(set(checked)) != len(checked):
        raise contract_error("layers", "name every layer once", checked)
    return checked


def empty_tensors(
    config: AttentionConfig,
    ratio: int,
    num_blocks: tuple[int, int],
    block_sizes: tuple[int, int],
    num_slots: int,
    spare_rows: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerCache:
    """Zeros of the shapes of `dsacp_npu.layer.empty_cache`, which knows them from a layer's weights.

    ``num_blocks`` and ``block_sizes`` are of raw keys, then of entries.
    """

    def part(d: int, windows: int) -> tuple[Float, CompressorState]:
        """Entries of ``d`` channels that pool so many windows each; of none, empty."""
        ring_shape = (num_slots, windows * ratio + spare_rows, windows * d)
        ring = torch.zeros(ring_shape, dtype=computing_dtype(dtype), device=device)
        count = torch.zeros(num_slots, dtype=torch.int32, device=device)
        cache = torch.zeros(num_blocks[1] if windows else 0, block_sizes[1], d, dtype=dtype, device=device)
        return cache, CompressorState(ring, ring.clone(), count, count.clone())

    swa_cache = torch.zeros(num_blocks[0], block_sizes[0], config.head_dim, dtype=dtype, device=device)
    overlap = ratio == OVERLAP_RATIO
    cmp_cache, cmp_state = part(0, 0) if ratio == 1 else part(config.head_dim, 2 if overlap else 1)
    index_cache, index_state = part(config.index_head_dim, 2) if overlap else part(0, 0)
    return LayerCache(swa_cache, cmp_cache, index_cache, cmp_state, index_state)


def in_int8(cache: LayerCache) -> LayerCache:
    """The same empty cache with index keys as int8 and scales."""
    (keys,) = parts_of(cache.index_cache)
    scales = keys.new_zeros(keys.shape[:2], dtype=torch.float16)
    return cache._replace(index_cache=QuantizedVectors(keys.to(torch.int8), scales))


def num_bytes(part: torch.Tensor | tuple[torch.Tensor, ...]) -> int:
    """Bytes of a tensor, or of all tensors of a record."""
    return sum(map(num_bytes, part)) if isinstance(part, tuple) else part.numel() * part.element_size()
