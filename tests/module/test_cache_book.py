"""The book of requests against a model that knows every token by a number: who holds what, and what it holds.

A step writes the numbers of its tokens where the batches say: into raw keys, entries, index keys and rings of every
layer. After every call each request must find its own numbers wherever a token to come may look.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsacp_npu._cache_book import RELEASED
from dsacp_npu.caches import Caches, PagedCache
from dsacp_npu.layer import LayerBatch
from dsacp_ref.spec import ContractError
from tests.layer_strategies import SMALL

tokens_to_bring = st.one_of(st.integers(0, 3), st.integers(1, 3), st.integers(0, 20))


class Books(RuleBasedStateMachine):
    """Requests come, grow, are forked, taken back and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, list[int]] = {}  # the numbers of each request's tokens
        self.reached: dict[int, int] = {}  # the longest that its state ever was
        self.names = count()
        self.given = 0  # tokens that were ever numbered

    @initialize(
        window=st.sampled_from([1, 2, 5]),
        blocks=st.tuples(st.integers(1, 4), st.integers(1, 3)),
        spare=st.integers(0, 3),
        sizes=st.tuples(st.integers(8, 60), st.integers(2, 5)),
        max_step=st.one_of(st.none(), st.integers(4, 20)),
    )
    def make(
        self, window: int, blocks: tuple[int, int], spare: int, sizes: tuple[int, int], max_step: int | None
    ) -> None:
        self.max_step = max_step
        self.caches = Caches(
            replace(SMALL, window_size=window, compress_ratios=(1, 4, 8)),
            [2, 0, 1],
            num_tokens=sizes[0],
            max_requests=sizes[1],
            block_size=blocks[0],
            cmp_block_size=blocks[1],
            spare_rows=spare,
            max_step_tokens=max_step,
            dtype="float32",
            int8_index_cache=True,
        )
        self.open()

    # --- what may happen ---

    @precondition(lambda self: len(self.model) < self.caches.max_requests)
    @rule()
    def open(self) -> None:
        name = next(self.names)
        self.caches.open(name)
        self.model[name], self.reached[name] = [], 0

    @rule(data=st.data(), run=st.sampled_from([True, True, True, False]))
    def step(self, data: Any, run: bool) -> None:
        """Some requests bring tokens; a step that was planned may also never run."""
        new = data.draw(st.dictionaries(st.sampled_from(sorted(self.model)), tokens_to_bring, min_size=1))
        if data.draw(st.booleans()):  # as many as there must be room for
            *others, last = new
            room = self.caches.num_tokens - sum(map(len, self.model.values()))
            room = min(room, self.max_step or room) - sum(new[name] for name in others)
            new[last] = max(0, room)
        slots = data.draw(st.sampled_from([None, len(new), self.caches.max_requests]))
        batches = self.planned(new, slots)
        if batches and run:
            for cache in self.caches:
                self.write(cache, batches, new)
            self.caches.advance(batches[4])
            self.note(new)

    @rule(data=st.data())
    def stop_half_way(self, data: Any) -> None:
        """Some layers run and others do not: no step goes on, a rollback or a reset mends it."""
        name, more = data.draw(st.sampled_from(sorted(self.model))), data.draw(st.integers(1, 6))
        batches = self.planned({name: more}, None)
        if not batches:
            return
        first = next(iter(self.caches))
        before = len(self.model[name])
        self.write(first, batches, {name: more})
        first.advance(batches[first.compress_ratio])
        for call in (self.caches.num_computed_tokens, lambda request: self.caches.batches({request: 1})):
            assert refused(lambda call=call: call(name)).startswith(
                f"request {name} must have one length in all layers"
            )
        if refused(lambda: self.caches.roll_back(name, before)):
            assert more > self.caches.spare_rows
            self.caches.reset(name)
            self.model[name], self.reached[name] = [], 0
        else:
            self.reached[name] = max(self.reached[name], before + more)

    @rule(data=st.data())
    def roll_back(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.integers(max(0, len(self.model[name]) - 6), len(self.model[name])))
        before = self.book()
        error = refused(lambda: self.caches.roll_back(name, length))
        if not error:
            del self.model[name][length:]
            return
        assert self.book() == before
        gone = error.startswith(f"num_tokens must be a length of request {name} whose state is still held")
        assert gone or error.startswith("num_tokens must fit into the free blocks")
        assert not gone or length < self.reached[name] - self.caches.spare_rows

    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        """Of any request, into a new slot or in the place of another request."""
        source, name = data.draw(st.sampled_from(sorted(self.model))), next(self.names)
        if len(self.model) == self.caches.max_requests:
            gone = next(other for other in self.model if other != source)
            self.caches.close(gone)
            del self.model[gone], self.reached[gone]
        held = len(self.model[source])
        length = data.draw(st.one_of(st.none(), st.integers(max(0, held - 6), held)))
        prefix = self.model[source][:length]
        before = self.book()
        error = refused(lambda: self.caches.fork(name, source, length))
        if not error:
            self.model[name], self.reached[name] = list(prefix), self.reached[source]
            return
        assert self.book() == before
        gone = error.startswith(f"num_tokens must be a length of request {source} whose state is still held")
        assert gone or error.startswith("num_tokens must fit into the free blocks")
        assert not gone or len(prefix) < self.reached[source] - self.caches.spare_rows

    @rule(data=st.data())
    def reset(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.caches.reset(name)
        self.model[name], self.reached[name] = [], 0

    @precondition(lambda self: len(self.model) > 1)  # one stays: most rules need one
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.caches.close(name)
        del self.model[name], self.reached[name]

    # --- a step without arithmetic ---

    def planned(self, new: dict[int, int], num_slots: int | None) -> dict[int, LayerBatch] | None:
        """The batches, if there is room; there must be for what the caches were made for."""
        ends = {name: len(tokens) + new.get(name, 0) for name, tokens in self.model.items()}
        self.caches.batches({})  # raw keys behind the windows go, whatever comes of the step
        before = self.book()
        made: list[dict[int, LayerBatch]] = []
        error = refused(lambda: made.append(self.caches.batches(new, num_slots=num_slots)))
        if error:
            fits = sum(ends.values()) <= self.caches.num_tokens
            assert not fits or (self.max_step and sum(new.values()) > self.max_step), error
            assert self.book() == before
            return None
        (batches,) = made
        lens = [ends[name] for name in new]
        idle = (num_slots or len(new)) - len(new)
        for ratio, batch in batches.items():
            assert batch.seq_lens.tolist() == lens + [0] * idle
            assert batch.query_start_loc.diff().tolist() == list(new.values()) + [0] * idle
            assert len(set(batch.state_indices.tolist())) == len(lens) + idle
            assert batch.state_indices.tolist()[: len(lens)] == [self.caches._slots[name] for name in new]
            assert (batch.swa_block_table[len(lens) :] == -1).all()
            assert (batch.cmp_block_table[len(lens) :] == -1).all()
            assert ratio > 1 or batch.cmp_block_table.shape[1] == 0
        return batches

    def write(self, cache: PagedCache, batches: dict[int, LayerBatch], new: dict[int, int]) -> None:
        """The tokens' numbers into every part of a layer's cache; never into a block that two requests hold."""
        batch, ratio = batches[cache.compress_ratio], cache.compress_ratio
        first = 1 + self.given
        for row, (name, more) in enumerate(new.items()):
            start = len(self.model[name])
            numbers = self.model[name] + list(range(first, first + more))
            first += more
            slot = int(batch.state_indices[row])
            for position in range(start, start + more):
                block, place = self.place(1, batch.swa_block_table[row], position)
                cache.tensors.swa_cache[block, place] = numbers[position]
            for entry in range(start // ratio, (start + more) // ratio) if ratio > 1 else ():
                block, place = self.place(ratio, batch.cmp_block_table[row], entry)
                number = numbers[(entry + 1) * ratio - 1]
                cache.tensors.cmp_cache[block, place] = number
                if ratio == 4:
                    cache.tensors.index_cache.values[block, place] = number % 128
                    cache.tensors.index_cache.scales[block, place] = number
            for state in cache.states() if more else ():
                ring_rows = state.kv.shape[1]
                for position in range(start, start + more):
                    state.kv[slot, position % ring_rows] = numbers[position]
                    state.score[slot, position % ring_rows] = numbers[position]
                held = int(state.held_start[slot]) if start else 0
                state.held_start[slot] = max(held, start + more - ring_rows)
                state.num_tokens[slot] = start + more

    def place(self, ratio: int, columns: torch.Tensor, row: int) -> tuple[int, int]:
        """Block and row of something that a step writes."""
        blocks = self.caches._blocks[ratio]
        block = int(columns[row // blocks.block_size])
        assert blocks.num_holders[block] == 1, "a step writes into a block that another request holds"
        return block, row % blocks.block_size

    def note(self, new: dict[int, int]) -> None:
        """The model after a step that all layers ran."""
        for name, more in new.items():
            self.model[name] += range(1 + self.given, 1 + self.given + more)
            self.given += more
            self.reached[name] = max(self.reached[name], len(self.model[name]))

    def book(self) -> Any:
        """All that is written down about requests."""
        kinds = [
            (list(b.num_holders), sorted(b.free), [list(c) for c in b.columns], b.table.tolist())
            for b in self.caches._blocks.values()
        ]
        return kinds, dict(self.caches._slots), sorted(self.caches._free_slots), [list(c.lengths) for c in self.caches]

    # --- what must hold ---

    @invariant()
    def every_block_is_counted(self) -> None:
        for blocks in self.caches._blocks.values():
            held = Counter(block for columns in blocks.columns for block in columns if block != RELEASED)
            assert [held[block] for block in range(len(blocks.num_holders))] == blocks.num_holders
            assert sorted([*held, *blocks.free]) == list(range(len(blocks.num_holders)))
            for columns, row, released in zip(blocks.columns, blocks.table.tolist(), blocks.num_released, strict=True):
                assert row == columns + [-1] * (len(row) - len(columns))
                assert columns.count(RELEASED) == released
                assert columns[:released] == [RELEASED] * released
        slots = [*self.caches._slots.values(), *self.caches._free_slots]
        assert sorted(slots) == list(range(self.caches.max_requests))
        for slot in self.caches._free_slots:
            assert not any(blocks.columns[slot] for blocks in self.caches._blocks.values())
            assert not any(cache.lengths[slot] or cache.ring_starts[slot] for cache in self.caches)

    @invariant()
    def blocks_in_common_hold_a_common_prefix(self) -> None:
        for ratio, blocks in self.caches._blocks.items():
            holders: dict[int, list[tuple[int, int]]] = {}
            for name in self.model:
                for column, block in enumerate(blocks.columns[self.caches._slots[name]]):
                    holders.setdefault(block, []).append((name, column))
            holders.pop(RELEASED, None)
            for users in holders.values():
                first, column = users[0]
                stop = (column + 1) * blocks.block_size * ratio
                for name, other in users[1:]:
                    assert other == column
                    assert len(self.model[name]) >= stop <= len(self.model[first]), "an open block in common"
                    assert self.model[name][:stop] == self.model[first][:stop]

    @invariant()
    def every_request_finds_its_own(self) -> None:
        for name, numbers in self.model.items():
            slot, length = self.caches._slots[name], len(numbers)
            assert self.caches.num_computed_tokens(name) == length
            for cache in self.caches:
                ratio, tensors = cache.compress_ratio, cache.tensors
                first = max(0, length - self.caches.window_size + 1)
                raw = self.rows(1, slot, tensors.swa_cache, first, length)
                assert raw == numbers[first:]
                if ratio == 1:
                    continue
                due = numbers[ratio - 1 :: ratio]
                assert self.rows(ratio, slot, tensors.cmp_cache, 0, length // ratio) == due
                if ratio == 4:
                    values, scales = tensors.index_cache
                    assert self.rows(ratio, slot, values, 0, length // ratio) == [number % 128 for number in due]
                    assert self.rows(ratio, slot, scales[..., None], 0, length // ratio) == due
                open_window = length // ratio * ratio
                need = max(0, open_window - ratio) if ratio == 4 else open_window
                for state in cache.states():
                    assert int(state.num_tokens[slot]) == length
                    assert int(state.held_start[slot]) == cache.ring_starts[slot]
                    assert need == length or cache.ring_starts[slot] <= need
                    rows = [position % state.kv.shape[1] for position in range(need, length)]
                    for ring in (state.kv, state.score):
                        assert ring[slot, rows].amin(1).tolist() == ring[slot, rows].amax(1).tolist() == numbers[need:]

    def rows(self, ratio: int, slot: int, part: torch.Tensor, start: int, stop: int) -> list[float]:
        """What a request reads in these rows of a part; every channel holds the same."""
        blocks = self.caches._blocks[ratio]
        at = [(blocks.columns[slot][row // blocks.block_size], row % blocks.block_size) for row in range(start, stop)]
        assert all(block != RELEASED for block, _ in at), "a row that is still needed was given back"
        found = [part[block, place] for block, place in at]
        assert all((row == row[0]).all() for row in found)
        return [row[0].item() for row in found]


def refused(call: Any) -> str:
    """The text of the refusal, empty without one."""
    try:
        call()
    except ContractError as error:
        return str(error)
    return ""


TestBooks = Books.TestCase
TestBooks.settings = settings(stateful_step_count=25)
