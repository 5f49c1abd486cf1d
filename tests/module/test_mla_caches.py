"""V3.2's caches: a request may be cut back or forked at any length, and ends as one run at once would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsacp_npu._mla_parts import cache_parts
from dsacp_npu.mla_caches import MLACaches, PagedMLACache, PlannedBatch
from dsacp_npu.mla_layer import empty_mla_cache
from dsacp_ref.mla_config import v32
from dsacp_ref.spec import ContractError
from tests.compare import assert_same
from tests.mla_strategies import SMALL
from tests.module.mla_worlds import CODED, Event, Model, assert_told, bytes_of, caches_of, layers_of, model_of, tell

SIZES: dict[str, Any] = {"num_tokens": 64, "max_requests": 3, "block_size": 4, "dtype": "float64"}


def small_caches(**options: Any) -> MLACaches:
    """Caches of two layers."""
    return MLACaches(SMALL, [0, 1], **{**SIZES, **options})


def ran(caches: MLACaches, new_tokens: dict[str, int]) -> None:
    """A step of which only the lengths are noted."""
    planned = caches.planned(new_tokens)
    for cache in caches:
        cache.advance_to(planned.progress)


# --- stories with real layers ---


def poisoned(caches: MLACaches) -> None:
    """NaN, or its bytes, in every free block: what nobody holds must not be read."""
    for blocks in caches._blocks.values():
        for cache in caches:
            for part in cache_parts(cache.tensors):
                part[blocks.free] = float("nan") if part.is_floating_point() else 0x7F


def assert_story(model: Model, events: list[Event], **codes: bool) -> MLACaches:
    """The rows of every step are the definition's, with nothing to read in blocks that nobody holds."""
    layers, caches = layers_of(model), caches_of(model, **codes)
    story = []
    for event in events:
        poisoned(caches)
        story += tell(model, layers, caches, [event])
    assert_told([story], model, **codes)
    return caches


@pytest.mark.parametrize("codes", [{}, {"fp8": True}, {"int8_index_cache": True}], ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 3, 4, 8, 13, 14])
def test_a_fork_at_any_length_goes_on_and_nobody_notices(prefix: int, codes: dict[str, bool]) -> None:
    """In front, in the middle and at the end of blocks, and at all tokens; the source goes on, ends, and is gone."""
    model = model_of(3, {"first": 20, "second": 25}, CODED if codes else SMALL, {"second": ("first", prefix)})
    events: list[Event] = [
        {"first": 14},
        ("fork", "second", "first", prefix),
        {"first": 3},
        {"second": 20 - prefix, "first": 1},
        {"first": 2},
        ("close", "first"),
        {"second": 5},
    ]
    assert_story(model, events, **codes)


@pytest.mark.parametrize("length", range(0, 14, 2))
def test_a_request_goes_back_to_any_length(length: int) -> None:
    """Beside a fork that holds all its blocks: what the fork has is copied before it is written over."""
    model = model_of(4, {"a": 18, "fork": 18}, prefixes={"fork": ("a", 13)})
    events: list[Event] = [("fork", "fork", "a"), ("roll_back", "a", length), {"a": 18 - length}, {"fork": 5}]
    model.x["a"][length:13] += 1.0  # other tokens than the fork's
    layers, caches = layers_of(model), caches_of(model)
    tell(model._replace(x={**model.x, "a": model.x["fork"]}), layers, caches, [{"a": 13}])
    poisoned(caches)
    assert_told([tell(model, layers, caches, events)], model)


@pytest.mark.parametrize("again", ["reset", "close"])
def test_a_slot_used_anew_is_as_good_as_new(again: str) -> None:
    model = model_of(5, {"a": 30, "b": 7})
    events: list[Event] = [{"a": 30}, (again, "a"), {"b": 7, "a": 21}]
    caches = assert_story(model, events)
    caches.reset("a")
    caches.reset("b")
    caches.planned({})
    assert caches.num_free_tokens == caches_of(model).num_free_tokens


def test_forks_of_forks_share_full_blocks_and_copy_the_open_one() -> None:
    """Every part of every layer, codes and their scales too."""
    model = model_of(6, {"a": 20}, CODED)
    for codes in ({}, {"fp8": True}, {"int8_index_cache": True}):
        caches = caches_of(model, max_requests=4, num_tokens=40, **codes)
        tell(model, layers_of(model), caches, [{"a": 20}])
        caches.fork("b", "a", 10)
        caches.fork("c", "b", 9)
        (blocks,) = caches._blocks.values()
        a, b, c = (blocks.columns[caches._slots[name]] for name in "abc")
        assert (len(a), len(b), len(c)) == (5, 3, 3)
        assert a[:2] == b[:2] == c[:2]
        assert len({a[2], b[2], c[2]}) == 3
        for cache in caches:
            for part in cache_parts(cache.tensors):
                bits = part.view(torch.uint8)
                assert torch.equal(bits[a[2], :2], bits[b[2], :2])
                assert torch.equal(bits[a[2], :1], bits[c[2], :1])
        assert [caches.num_computed_tokens(name) for name in "abc"] == [20, 10, 9]


# --- plans ---


def test_plans_are_rows_in_the_order_of_the_mapping() -> None:
    caches = small_caches()
    for name in "abc":
        caches.open(name)
    assert caches.plan == 0
    planned = caches.planned({"c": 9, "a": 0, "b": 17})
    batch = planned.batch
    assert batch.query_start_loc.tolist() == [0, 9, 9, 26]
    assert batch.seq_lens.tolist() == [9, 0, 17]
    assert {part.dtype for part in batch} == {torch.int32}
    assert {part.device.type for part in batch} == {"cpu"}
    assert ((batch.block_table >= 0).sum(1).tolist(), batch.block_table.shape) == ([3, 0, 5], (3, 5))
    assert len(set(batch.block_table[batch.block_table >= 0].tolist())) == 8
    assert (planned.requests, planned.progress) == (("c", "a", "b"), ((2, 0, 9), (0, 0, 0), (1, 0, 17)))
    assert (planned.plan, caches.plan) == (1, 1)
    assert caches.planned({}).batch.block_table.shape == (0, 0)
    assert caches.plan == 2


def test_room_of_a_step_that_was_not_run_is_given_up() -> None:
    """All room is planned for one request, then for the other one, then shared by both in either order."""
    caches = small_caches(num_tokens=24, max_requests=2)
    caches.open("a")
    caches.open("b")
    for new in ({"a": 24}, {"b": 24}, {"a": 12, "b": 12}, {"b": 23, "a": 1}, {"b": 1, "a": 23}, {"a": 1}):
        caches.planned(new)
    (blocks,) = caches._blocks.values()
    assert sum(map(len, blocks.columns)) == 1
    ran(caches, {"a": 24})
    assert caches.num_computed_tokens("a") == 24


# --- memory ---


@pytest.mark.parametrize("codes", [{}, {"fp8": True}, {"int8_index_cache": True}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_tensors_are_those_of_empty_mla_cache(dtype: str, codes: dict[str, bool]) -> None:
    """In the layers' dtype, except codes and scales; FP8 rows are bytes, whatever the layers compute in."""
    caches = MLACaches(CODED, [0, 3], **{**SIZES, "dtype": dtype}, **codes)
    assert [cache.layer_idx for cache in caches] == [0, 3]
    kind = getattr(torch, dtype)
    wide = "float64" if dtype == "float64" else "float32"
    due = empty_mla_cache(CODED, num_blocks=15 + 3, block_size=4, dtype=wide, **codes)
    for cache in caches:
        tensors = cache.tensors
        if codes != {"fp8": True}:
            assert_same([tensors.latent_cache, tensors.rope_cache], [part.to(kind) for part in due[:2]])
        else:
            assert_same(tensors.latent_cache.shape, due.latent_cache.shape)
            assert (tensors.latent_cache.dtype, tensors.rope_cache) == (torch.uint8, None)
        if codes:
            got, want = tensors.index_cache, due.index_cache
            assert type(got) is type(want)
            assert [(part.dtype, part.shape) for part in got] == [(part.dtype, part.shape) for part in want]
        else:
            assert_same(tensors.index_cache, due.index_cache.to(kind))
        assert cache.num_bytes == sum(part.numel() * part.element_size() for part in cache_parts(tensors))


def test_layers_share_no_memory() -> None:
    parts = [part for cache in small_caches() for part in cache_parts(cache.tensors)]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == len(parts) == 6


def test_memory_is_what_the_formula_says() -> None:
    """V3.2, a million tokens: 656 bytes a token in FP8 where bfloat16 takes 1152, and 132 where its keys take 256."""
    num_tokens, slots = 1 << 20, 4
    sizes: dict[str, Any] = {"num_tokens": num_tokens, "max_requests": slots, "device": "meta"}
    rows = 61 * 64 * (num_tokens // 64 - 1 + slots)  # a request with one token takes a block too
    kinds: dict[str, tuple[dict[str, bool], tuple[int, int, int]]] = {
        "bfloat16": ({}, (1024, 128, 256)),
        "fp8": ({"fp8": True}, (656, 0, 132)),
        "int8": ({"int8_index_cache": True}, (1024, 128, 130)),
    }
    for name, (codes, widths) in kinds.items():
        caches = MLACaches(v32(), range(61), **sizes, **codes)
        due = dict(zip(("latent_cache", "rope_cache", "index_cache"), (rows * width for width in widths), strict=True))
        assert caches.memory() == due, name
        assert sum(due.values()) == sum(cache.num_bytes for cache in caches)


# --- refusals ---


def filled() -> MLACaches:
    """Requests of 20 and 9 tokens."""
    caches = small_caches()
    caches.open("a")
    caches.open("b")
    ran(caches, {"a": 20, "b": 9})
    return caches


REFUSALS: dict[str, tuple[Callable[[MLACaches], Any], str]] = {
    "open twice": (
        lambda caches: caches.open("a"),
        "request must not be open yet, got 'a'; close it first, or reset it",
    ),
    "open too many": (
        lambda caches: (caches.open("c"), caches.open("d")),
        "request must find one of 3 state slots free, got 'd' beside ['a', 'b', 'c']; close one of them, or make "
        "MLACaches with more max_requests",
    ),
    "close unknown": (
        lambda caches: caches.close("x"),
        "request must be one of the 2 open ones, got 'x'; open it first",
    ),
    "reset unknown": (
        lambda caches: caches.reset("x"),
        "request must be one of the 2 open ones, got 'x'; open it first",
    ),
    "length unknown": (
        lambda caches: caches.num_computed_tokens("x"),
        "request must be one of the 2 open ones, got 'x'; open it first",
    ),
    "step unknown": (
        lambda caches: caches.planned({"a": 1, "x": 1}),
        "request must be one of the 2 open ones, got 'x'; open it first",
    ),
    "layer unknown": (
        lambda caches: caches[3],
        "layer_idx must be one of [0, 1], got 3; name it when MLACaches is made",
    ),
    "no mapping": (
        lambda caches: caches.planned(["a"]),  # type: ignore[arg-type]
        "new_tokens must be a mapping from requests to counts, got list",
    ),
    "negative": (lambda caches: caches.planned({"a": -1}), "new_tokens['a'] must be an int >= 0, got -1"),
    "a truth": (lambda caches: caches.planned({"a": True}), "new_tokens['a'] must be an int >= 0, got bool True"),
    "longer than all": (
        lambda caches: caches.planned({"a": 45}),
        "new_tokens must keep request 'a' within num_tokens 64, got 45 after 20; make MLACaches with more num_tokens",
    ),
    "no room": (
        lambda caches: caches.planned({"a": 44, "b": 55}),
        "new_tokens must fit into the free blocks, which hold 40 tokens, got 99 tokens, 24 blocks of keys where 10 are "
        "free; close a request, or make MLACaches with more num_tokens",
    ),
    "roll forward": (
        lambda caches: caches.roll_back("b", 10),
        "num_tokens must be an int in [0, 9], got 10; a rollback only takes back",
    ),
    "roll back unknown": (
        lambda caches: caches.roll_back("x", 1),
        "request must be one of the 2 open ones, got 'x'; open it first",
    ),
    "fork unknown": (
        lambda caches: caches.fork("c", "x"),
        "request must be one of the 2 open ones, got 'x'; open it first",
    ),
    "fork onto open": (
        lambda caches: caches.fork("b", "a"),
        "request must not be open yet, got 'b'; close it first, or reset it",
    ),
    "fork beyond": (
        lambda caches: caches.fork("c", "b", 10),
        "num_tokens must be an int in [0, 9], got 10; request 'b' holds 9",
    ),
}


def book_of(caches: MLACaches) -> Any:
    """All that is written down about requests, without what only waits for a step."""
    (blocks,) = caches._blocks.values()
    lengths = [list(cache.lengths) for cache in caches]
    return [list(held) for held in blocks.columns], list(blocks.num_holders), sorted(blocks.free), lengths


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_rule_and_change_nothing(name: str) -> None:
    caches = filled()
    call, text = REFUSALS[name]
    before = book_of(caches), bytes_of(caches)
    with pytest.raises(ContractError) as error:
        call(caches)
    assert str(error.value) == text
    assert (book_of(caches), bytes_of(caches)) == before


def test_no_block_for_the_copy_that_a_rollback_needs() -> None:
    """Three blocks: a full one that two requests hold, and two of a third request."""
    caches = small_caches(num_tokens=5)
    caches.open("a")
    ran(caches, {"a": 4})
    caches.fork("b", "a")
    caches.open("c")
    ran(caches, {"c": 5})
    (blocks,) = caches._blocks.values()
    blocks.free.clear()  # as if somebody else had taken the rest
    before = book_of(caches)
    with pytest.raises(ContractError) as error:
        caches.roll_back("b", 3)
    assert str(error.value) == (
        "num_tokens must fit into the free blocks, which hold 0 tokens, got 0 tokens, 1 blocks of keys where 0 are "
        "free; close a request, or make MLACaches with more num_tokens"
    )
    assert book_of(caches) == before
    caches.close("c")
    caches.roll_back("b", 3)
    assert blocks.columns[1] != blocks.columns[0] == before[0][0]


def test_no_block_for_the_open_block_of_a_fork() -> None:
    caches = small_caches(num_tokens=4, max_requests=2)
    caches.open("a")
    ran(caches, {"a": 3})
    (blocks,) = caches._blocks.values()
    blocks.free.clear()
    with pytest.raises(ContractError, match=r"^num_tokens must fit into the free blocks, which hold 0 tokens, got 0"):
        caches.fork("b", "a")
    with pytest.raises(ContractError, match=r"^request must be one of the 1 open ones, got 'b'; open it first$"):
        caches.close("b")


BAD_SIZES = [
    ({"num_tokens": 0}, "num_tokens must be an int in [1, 2147483647], got 0"),
    ({"max_requests": 0}, "max_requests must be an int >= 1, got 0"),
    ({"block_size": 0}, "block_size must be an int >= 1, got 0"),
    ({"dtype": "int8"}, "dtype must be one of 'bfloat16', 'float16', 'float32', 'float64', got 'int8'"),
    ({"int8_index_cache": 1}, "int8_index_cache must be true or false, got int 1"),
    ({"fp8": "yes"}, "fp8 must be true or false, got str 'yes'"),
    (
        {"fp8": True, "int8_index_cache": True},
        "int8_index_cache must be False with fp8, got True; index keys are kept in one of the two",
    ),
]


@pytest.mark.parametrize(("options", "text"), BAD_SIZES, ids=[" ".join(options) for options, _ in BAD_SIZES])
def test_bad_sizes_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ContractError) as error:
        small_caches(**options)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([], "layers must be a sequence of layer indices, not empty, got []"),
        (3, "layers must be a sequence of layer indices, not empty, got 3"),
        ([0, 1, 0], "layers must name every layer once, got [0, 1, 0]"),
        ([-1], "layers must be an int >= 0, got -1"),
    ],
)
def test_bad_layers_are_refused(layers: Any, text: str) -> None:
    with pytest.raises(ContractError) as error:
        MLACaches(SMALL, layers, **SIZES)
    assert str(error.value) == text


def test_another_config_is_refused() -> None:
    with pytest.raises(ContractError, match=r"^config must be of type MLAConfig, got dict$"):
        MLACaches({}, [0], **SIZES)  # type: ignore[arg-type]


# --- every request finds its own, whatever happens ---

tokens_to_bring = st.one_of(st.integers(0, 3), st.integers(1, 3), st.integers(0, 20))


class Books(RuleBasedStateMachine):
    """Requests come, grow, are forked, taken back and go, in any order; every token is known by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, list[int]] = {}  # the numbers of each request's tokens
        self.names, self.numbers = count(), count(1)

    @initialize(block_size=st.integers(1, 4), sizes=st.tuples(st.integers(8, 60), st.integers(2, 5)))
    def make(self, block_size: int, sizes: tuple[int, int]) -> None:
        self.caches = MLACaches(
            SMALL,
            [2, 0],
            num_tokens=sizes[0],
            max_requests=sizes[1],
            block_size=block_size,
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
        self.model[name] = []

    @rule(data=st.data(), run=st.sampled_from([True, True, True, False]))
    def step(self, data: Any, run: bool) -> None:
        """Some requests bring tokens; a step that was planned may also never run."""
        new = data.draw(st.dictionaries(st.sampled_from(sorted(self.model)), tokens_to_bring, min_size=1))
        if data.draw(st.booleans()):  # as many as there must be room for
            *others, last = new
            room = self.caches.num_tokens - sum(map(len, self.model.values()))
            new[last] = max(0, room - sum(new[name] for name in others))
        planned = self.planned(new)
        if planned and run:
            brought = {name: [next(self.numbers) for _ in range(more)] for name, more in new.items()}
            for cache in self.caches:
                self.write(cache, planned, brought)
            for name, more in brought.items():
                self.model[name] += more

    @rule(data=st.data())
    def stop_half_way(self, data: Any) -> None:
        """One layer runs and the other does not: no step goes on, a rollback to any length mends it."""
        name, more = data.draw(st.sampled_from(sorted(self.model))), data.draw(st.integers(1, 6))
        planned = self.planned({name: more})
        if not planned:
            return
        self.write(next(iter(self.caches)), planned, {name: [next(self.numbers) for _ in range(more)]})
        for call in (self.caches.num_computed_tokens, lambda request: self.caches.planned({request: 1})):
            assert refused(lambda call=call: call(name)).startswith(
                f"request {name} must have one length in all layers"
            )
        length = data.draw(st.integers(0, len(self.model[name])))
        if refused(lambda: self.caches.roll_back(name, length)):  # no block for a copy
            self.caches.reset(name)
            length = 0
        del self.model[name][length:]

    @rule(data=st.data())
    def roll_back(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.integers(0, len(self.model[name])))
        before = self.book()
        error = refused(lambda: self.caches.roll_back(name, length))
        if not error:
            del self.model[name][length:]
            return
        assert self.book() == before
        assert error.startswith("num_tokens must fit into the free blocks")

    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        """Of any request at any length, into a new slot or in the place of another request."""
        source, name = data.draw(st.sampled_from(sorted(self.model))), next(self.names)
        if len(self.model) == self.caches.max_requests:
            gone = next(other for other in self.model if other != source)
            self.caches.close(gone)
            del self.model[gone]
        length = data.draw(st.one_of(st.none(), st.integers(0, len(self.model[source]))))
        before = self.book()
        error = refused(lambda: self.caches.fork(name, source, length))
        if not error:
            self.model[name] = self.model[source][:length]
            return
        assert self.book() == before
        assert error.startswith("num_tokens must fit into the free blocks")

    @rule(data=st.data())
    def reset(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.caches.reset(name)
        self.model[name] = []

    @precondition(lambda self: len(self.model) > 1)  # one stays: most rules need one
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.caches.close(name)
        del self.model[name]

    # --- a step without arithmetic ---

    def planned(self, new: dict[int, int]) -> PlannedBatch | None:
        """The plan, if there is room; there must be for what the caches were made for."""
        ends = {name: len(tokens) + new.get(name, 0) for name, tokens in self.model.items()}
        self.caches.planned({})  # what an earlier plan made room for is given up, whatever comes of this one
        before = self.book()
        made: list[PlannedBatch] = []
        error = refused(lambda: made.append(self.caches.planned(new)))
        if error:
            assert sum(ends.values()) > self.caches.num_tokens, error
            assert self.book() == before
            return None
        (planned,) = made
        assert planned.batch.seq_lens.tolist() == [ends[name] for name in new]
        assert planned.batch.query_start_loc.diff().tolist() == list(new.values())
        assert planned.progress == tuple((self.caches._slots[name], ends[name] - new[name], ends[name]) for name in new)
        return planned

    def write(self, cache: PagedMLACache, planned: PlannedBatch, brought: dict[int, list[int]]) -> None:
        """The tokens' numbers into every part of a layer's cache; never into a block that two requests hold."""
        cache.check_progress(planned.progress, planned.requests, planned.plan)
        (blocks,) = self.caches._blocks.values()
        for row, (_, start, _), numbers in zip(
            planned.batch.block_table, planned.progress, brought.values(), strict=True
        ):
            for position, number in enumerate(numbers, start):
                block, place = int(row[position // blocks.block_size]), position % blocks.block_size
                assert blocks.num_holders[block] == 1, "a step writes into a block that another request holds"
                for part in cache_parts(cache.tensors):
                    part[block, place] = number if part.is_floating_point() else number % 128
        cache.advance_to(planned.progress)

    def book(self) -> Any:
        """All that is written down about requests."""
        return book_of(self.caches), dict(self.caches._slots), sorted(self.caches._free_slots)

    # --- what must hold ---

    @invariant()
    def every_block_is_counted(self) -> None:
        (blocks,) = self.caches._blocks.values()
        held = Counter(block for columns in blocks.columns for block in columns)
        assert [held[block] for block in range(len(blocks.num_holders))] == blocks.num_holders
        assert sorted([*held, *blocks.free]) == list(range(len(blocks.num_holders)))
        for columns, row in zip(blocks.columns, blocks.table.tolist(), strict=True):
            assert row == columns + [-1] * (len(row) - len(columns))
        assert sorted([*self.caches._slots.values(), *self.caches._free_slots]) == list(range(self.caches.max_requests))
        for slot in self.caches._free_slots:
            assert not blocks.columns[slot]
            assert not any(cache.lengths[slot] for cache in self.caches)

    @invariant()
    def every_request_finds_its_own(self) -> None:
        (blocks,) = self.caches._blocks.values()
        for name, numbers in self.model.items():
            columns = blocks.columns[self.caches._slots[name]]
            assert self.caches.num_computed_tokens(name) == len(numbers)
            at = [(columns[i // blocks.block_size], i % blocks.block_size) for i in range(len(numbers))]
            for part in (part for cache in self.caches for part in cache_parts(cache.tensors)):
                due = [number if part.is_floating_point() else number % 128 for number in numbers]
                found = [part[place].reshape(-1) for place in at]
                assert all((row == row[0]).all() for row in found)
                assert [row[0].item() for row in found] == due


def refused(call: Any) -> str:
    """The text of the refusal, empty without one."""
    try:
        call()
    except ContractError as error:
        return str(error)
    return ""


TestBooks = Books.TestCase
TestBooks.settings = settings(stateful_step_count=25)
