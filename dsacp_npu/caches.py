"""What attention keeps between steps: one paged cache a layer, and one book of requests for all layers of a model.

The book is plain Python on the host. Blocks are taken as requests grow, and raw keys behind the window are given back.
No call waits for a device; what a call refuses, it refuses before it changes anything.

A step goes: `Caches.batches` makes room and tells where everything lies; every layer runs, and notes in its
`PagedCache` how far it came (`advance`). What a request's length is, the layers say: there is no second count of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from dsacp_npu._cache_book import Blocks, Progress, blocks_for, int32, progress_of, window_blocks_for
from dsacp_npu._index_calls import parts_of
from dsacp_npu._layer_records import LayerBatch, LayerCache
from dsacp_npu._request_book import RAW, LayerPages, RequestBook
from dsacp_npu._tensors import Float, computing_dtype, torch
from dsacp_npu.compressor import CompressorState
from dsacp_npu.quant import QuantizedVectors
from dsacp_ref.config import AttentionConfig
from dsacp_ref.spec import INT32_MAX, check_bool, check_choice, check_int, check_record, contract_error

__all__ = ["CacheMemory", "Caches", "PagedCache"]

DTYPES = ("bfloat16", "float16", "float32", "float64")
OVERLAP_RATIO = 4  # the ratio whose entries overlap, and are chosen by an indexer


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


class PagedCache(LayerPages):
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
        super().__init__(layer_idx, len(tensors.cmp_state.num_tokens))
        self.compress_ratio = compress_ratio
        self.tensors = tensors
        self.ring_starts = [0] * len(self.lengths)

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
        self.check_progress(progress_of(batch), names, plan)

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
        super().advance_to(steps)
        num_rows = self.tensors.cmp_state.kv.shape[1]
        for slot, start, end in steps:
            if end > start:
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
        super().roll_back(slot, num_tokens)
        self.ring_starts[slot] = min(self.ring_starts[slot], num_tokens)
        for state in self.states():
            state.held_start[slot] = self.ring_starts[slot]
            state.num_tokens[slot] = num_tokens

    def copy_state(self, source: int, slot: int) -> None:
        """Give a slot what another one holds."""
        for state in self.states():
            for part in state:
                part[slot] = part[source]
        super().copy_state(source, slot)
        self.ring_starts[slot] = self.ring_starts[source]

    def copy_block(self, kind: int, source: int, target: int) -> None:
        """Copy a block of raw keys, or of the entries of this ratio and their index keys."""
        if kind not in (RAW, self.compress_ratio):
            return
        entries = (self.tensors.cmp_cache, *parts_of(self.tensors.index_cache))
        for part in (self.tensors.swa_cache,) if kind == RAW else entries:
            if len(part):  # a layer without an indexer has no index keys
                part[target] = part[source]


class Caches(RequestBook[PagedCache]):
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
        blocks = {ratio: self._blocks_of(ratio, size, max_step_tokens) for ratio, size in sizes.items()}
        kind: Any = {"dtype": getattr(torch, check_choice("dtype", dtype, DTYPES)), "device": torch.device(device)}
        check_bool("int8_index_cache", int8_index_cache)
        caches = {}
        for layer, ratio in ratios.items():
            raw, entries = blocks[RAW], blocks[ratio]
            num_blocks = (len(raw.num_holders), len(entries.num_holders))
            block_sizes = (raw.block_size, cmp_block_size)
            tensors = empty_tensors(config, ratio, num_blocks, block_sizes, self.max_requests, self.spare_rows, **kind)
            caches[layer] = PagedCache(layer, ratio, in_int8(tensors) if int8_index_cache else tensors)
        super().__init__(self.num_tokens, self.max_requests, blocks, caches)

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
        planned = self._planned(new_tokens, num_slots, max_seq_len)
        nothing = torch.empty(len(planned.slots), 0, dtype=torch.int32)
        return {
            ratio: LayerBatch(
                planned.query_start_loc,
                planned.seq_lens,
                planned.tables[RAW],
                nothing if ratio == 1 else planned.tables[ratio],
                int32(planned.slots),
            )
            for ratio in sorted({cache.compress_ratio for cache in self})
        }

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

    def _release(self) -> None:
        """Give back raw keys that nothing to come can see."""
        for slot in self._slots.values():
            reached = min(cache.lengths[slot] for cache in self)
            self._blocks[RAW].release(slot, max(0, reached - self._kept_rows))

    @property
    def _kept_rows(self) -> int:
        """Raw keys before a request's end that a token to come may see, after a rollback too."""
        return self.window_size - 1 + self.spare_rows

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
