"""Caches with real layers on them: whatever happens to a request in between, it ends as one run at once would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu.caches import Caches
from dsacp_npu.compressor import CompressorState, rolled_back_state
from dsacp_npu.layer import LayerBatch, attention_layer_, empty_cache
from dsacp_ref.config import v4_flash
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.compare import assert_double, assert_same
from tests.layer_strategies import KINDS, SMALL, weights_of
from tests.mirror.common import to_torch

CONFIG = replace(SMALL, compress_ratios=(1, 4, 8))
WEIGHTS = {layer: to_torch(weights_of(np.random.default_rng(layer), CONFIG, kind)) for layer, kind in enumerate(KINDS)}
SIZES: dict[str, Any] = {"num_tokens": 120, "max_requests": 3, "block_size": 4, "cmp_block_size": 2, "dtype": "float64"}


def caches_of(**options: Any) -> Caches:
    """Small float64 caches of three layers, one of each kind."""
    return Caches(CONFIG, [0, 1, 2], **{**SIZES, **options})


def tokens_of(seed: int, count: int) -> torch.Tensor:
    """Hidden rows of a request."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((count, CONFIG.hidden_size)))


class Engine:
    """Three layers that all see the same rows, on caches in which nothing free may be read."""

    def __init__(self, **options: Any) -> None:
        self.caches = caches_of(**options)
        self.outputs: dict[tuple[Any, int], torch.Tensor] = {}  # of a request and a layer, in the last step
        self.topk: dict[Any, torch.Tensor] = {}

    def step(self, new: Mapping[Any, torch.Tensor], layers: tuple[int, ...] = (0, 1, 2), **options: Any) -> None:
        """Run some rows of some requests, with NaN wherever no request holds anything."""
        batches = self.caches.batches({name: len(rows) for name, rows in new.items()}, **options)
        self.poison()
        x = torch.cat(list(new.values()))
        for cache in (self.caches[layer] for layer in layers):
            batch = batches[cache.compress_ratio]
            cache.check_continues(batch, list(new))
            weights = WEIGHTS[cache.layer_idx]
            out = attention_layer_(x, weights, cache.tensors, batch, CONFIG, compress_ratio=cache.compress_ratio)
            cache.advance(batch)
            at = 0
            for name, rows in new.items():
                self.outputs[name, cache.layer_idx] = out.output[at : at + len(rows)]
                if cache.compress_ratio == 4:
                    self.topk[name] = out.topk_indices[at : at + len(rows)]
                at += len(rows)

    def poison(self) -> None:
        """NaN in free blocks, except where codes have none."""
        for ratio, blocks in self.caches._blocks.items():
            for cache in self.caches:
                tensors = cache.tensors
                own = (tensors.cmp_cache, tensors.index_cache) if cache.compress_ratio == ratio else ()
                for part in (tensors.swa_cache,) if ratio == 1 else own:
                    values = part if isinstance(part, torch.Tensor) else part.scales
                    if len(values):
                        values[blocks.free] = torch.nan


def assert_ends_as_at_once(engine: Engine, name: Any, rows: torch.Tensor, num_last: int, **options: Any) -> None:
    """The last rows of a request came out as if it had been run whole, alone, in caches of its own."""
    alone = Engine(**options)
    alone.caches.open(name)
    alone.step({name: rows})
    for layer in range(3):
        due = alone.outputs[name, layer][len(rows) - num_last :]
        assert torch.isfinite(due).all()
        assert_double(engine.outputs[name, layer][-num_last:].numpy(), due.numpy(), f"layer {layer}")
    assert_same(engine.topk[name][-num_last:], alone.topk[name][len(rows) - num_last :])
    assert engine.caches.num_computed_tokens(name) == len(rows)


# --- stories ---


@pytest.mark.parametrize("options", [{}, {"int8_index_cache": True}, {"max_step_tokens": 20}], ids=str)
def test_chunks_and_decode_beside_another_request(options: dict[str, Any]) -> None:
    """The window moves on through many blocks, which the other request takes over."""
    engine, rows, others = Engine(**options), tokens_of(1, 61), tokens_of(2, 40)
    engine.caches.open("a")
    engine.caches.open("b")
    done, other = 0, 0
    for size in (13, 1, 16, 4, 1, 1, 17, 7, 1):
        new = {"b": others[other : other + 4], "a": rows[done : done + size]}
        engine.step(new)
        done, other = done + size, min(40, other + 4)
        assert_ends_as_at_once(engine, "a", rows[:done], size, int8_index_cache="int8_index_cache" in options)
        assert_ends_as_at_once(engine, "b", others[:other], 4, int8_index_cache="int8_index_cache" in options)
    raw = engine.caches._blocks[1]
    assert sum(block >= 0 for block in raw.columns[0]) <= 4, "raw keys behind the window were kept"
    assert raw.columns[0][0] == -1


@pytest.mark.parametrize("prefix", [0, 3, 8, 16, 21])
def test_a_fork_goes_on_from_the_prefix_and_nobody_notices(prefix: int) -> None:
    engine, common = Engine(), tokens_of(3, prefix)
    first, second = (torch.cat([common, tokens_of(seed, 19)]) for seed in (4, 5))
    engine.caches.open("first")
    engine.step({"first": common})
    engine.caches.fork("second", "first")
    engine.step({"first": first[prefix : prefix + 9]})
    engine.step({"second": second[prefix:]})
    assert_ends_as_at_once(engine, "second", second, 19)
    engine.step({"first": first[prefix + 9 :]})
    assert_ends_as_at_once(engine, "first", first, 10)
    engine.caches.close("first")
    more = torch.cat([second, tokens_of(6, 3)])
    engine.step({"second": more[-3:]})
    assert_ends_as_at_once(engine, "second", more, 3)


def test_a_fork_before_the_end_needs_spare_rows() -> None:
    engine, rows = Engine(spare_rows=3), tokens_of(7, 26)
    engine.caches.open("long")
    engine.step({"long": rows[:18]})
    engine.step({"long": rows[18:22]})
    engine.caches.fork("short", "long", 19)
    other = torch.cat([rows[:19], tokens_of(8, 6)])
    engine.step({"short": other[19:], "long": rows[22:]})
    assert_ends_as_at_once(engine, "short", other, 6)
    assert_ends_as_at_once(engine, "long", rows, 4)
    with pytest.raises(ContractError, match="be a length of request 'long' whose state is still held"):
        engine.caches.fork("early", "long", 13)


@pytest.mark.parametrize("rejected", [1, 2, 3])
@pytest.mark.parametrize("length", [16, 17, 20, 23, 24])
def test_rejected_tokens_were_never_there(length: int, rejected: int) -> None:
    engine, rows = Engine(spare_rows=3), tokens_of(9, length + 5)
    engine.caches.open("a")
    engine.step({"a": rows[: length - 3]})
    engine.step({"a": torch.cat([rows[length - 3 : length - rejected], tokens_of(10, rejected)])})
    engine.caches.roll_back("a", length - rejected)
    engine.step({"a": rows[length - rejected :]})
    assert_ends_as_at_once(engine, "a", rows, 5 + rejected)


def test_a_rollback_behind_a_fork_copies_the_block_that_it_goes_on_in() -> None:
    """Block 3 of raw keys is full and held by both; the source goes back into its middle and writes there."""
    engine, rows = Engine(spare_rows=2), tokens_of(11, 30)
    engine.caches.open("source")
    engine.step({"source": rows[:16]})
    engine.caches.fork("fork", "source")
    engine.caches.roll_back("source", 14)
    other = torch.cat([rows[:14], tokens_of(12, 8)])
    engine.step({"source": other[14:]})
    assert_ends_as_at_once(engine, "source", other, 8)
    engine.step({"fork": rows[16:]})
    assert_ends_as_at_once(engine, "fork", rows, 14)


@pytest.mark.parametrize("again", ["reset", "close and open"])
def test_a_slot_used_anew_is_as_good_as_new(again: str) -> None:
    engine, rows = Engine(), tokens_of(13, 21)
    engine.caches.open("a")
    engine.step({"a": tokens_of(14, 33)})
    if again == "reset":
        engine.caches.reset("a")
    else:
        engine.caches.close("a")
        engine.caches.open("a")
    assert engine.caches.num_free_tokens == caches_of().num_free_tokens
    for cache in engine.caches:
        for state in (cache.tensors.cmp_state, cache.tensors.index_state):
            assert not state.num_tokens.any()
            assert not state.held_start.any()
    engine.step({"a": rows})
    assert_ends_as_at_once(engine, "a", rows, 21)


def test_a_forward_that_stopped_half_way_is_named_and_mended() -> None:
    engine, rows = Engine(spare_rows=4), tokens_of(15, 20)
    engine.caches.open("a")
    engine.step({"a": rows[:12]})
    engine.step({"a": tokens_of(16, 4)}, layers=(0, 2))
    text = (
        r"^request 'a' must have one length in all layers, got 12 in layers \[1\], 16 in layers \[0, 2\]; "
        r"a forward stopped half-way: roll_back\(request, 12\), or reset\(request\)$"
    )
    for call in (engine.caches.num_computed_tokens, lambda name: engine.caches.batches({name: 1})):
        with pytest.raises(ContractError, match=text):
            call("a")
    engine.caches.roll_back("a", 12)
    engine.step({"a": rows[12:]})
    assert_ends_as_at_once(engine, "a", rows, 8)


def test_slots_of_a_graph_leave_other_requests_alone() -> None:
    """Every state slot is in the batch, that of a waiting request too."""
    engine, rows, waiting = Engine(), tokens_of(17, 20), tokens_of(18, 15)
    engine.caches.open("waits")
    engine.caches.open("runs")
    engine.step({"waits": waiting[:11]})
    shapes = []
    for start, stop in ((0, 13), (13, 14), (14, 20)):
        batches = engine.caches.batches({"runs": stop - start}, num_slots=3)
        shapes.append([[tuple(part.shape) for part in batch] for batch in batches.values()])
        engine.step({"runs": rows[start:stop]}, num_slots=3)
        assert_ends_as_at_once(engine, "runs", rows[:stop], stop - start)
    assert shapes[0] == shapes[1] == shapes[2]
    engine.step({"waits": waiting[11:]})
    assert_ends_as_at_once(engine, "waits", waiting, 4)


def test_advance_of_all_is_that_of_each_layer() -> None:
    caches = caches_of()
    caches.open("a")
    caches.open("idle")
    caches.advance(caches.batches({"a": 19, "idle": 0}, num_slots=3)[8])
    assert [cache.lengths for cache in caches] == [[19, 0, 0]] * 3
    assert [cache.ring_starts[0] for cache in caches][1:] == [19 - 8, 19 - 8]
    caches.advance(caches.batches({"idle": 0, "a": 2})[1])
    assert [cache.lengths for cache in caches] == [[21, 0, 0]] * 3


def test_a_rollback_leaves_the_states_that_the_compressor_would() -> None:
    engine = Engine(spare_rows=5)
    engine.caches.open("a")
    engine.step({"a": tokens_of(19, 23)})
    due = []
    for cache in (engine.caches[1], engine.caches[2]):
        before = CompressorState(*(part.clone() for part in cache.tensors.cmp_state))
        wanted = before.num_tokens.clone()
        wanted[0] = 18
        due.append(
            rolled_back_state(before, wanted, compress_ratio=cache.compress_ratio, overlap=cache.compress_ratio == 4)
        )
    engine.caches.roll_back("a", 18)
    assert_same([engine.caches[1].tensors.cmp_state, engine.caches[2].tensors.cmp_state], due)


# --- what the batches look like ---


def test_batches_are_rows_in_the_order_of_the_mapping() -> None:
    caches = caches_of()
    for name in "abc":
        caches.open(name)
    batches = caches.batches({"c": 9, "a": 0, "b": 17})
    assert list(batches) == [1, 4, 8]
    for batch in batches.values():
        assert batch.query_start_loc.tolist() == [0, 9, 9, 26]
        assert batch.seq_lens.tolist() == [9, 0, 17]
        assert batch.state_indices.tolist() == [2, 0, 1]
        assert {part.dtype for part in batch} == {torch.int32}
        assert {part.device.type for part in batch} == {"cpu"}
    raw = batches[1].swa_block_table
    assert ((raw >= 0).sum(1).tolist(), raw.shape) == ([3, 0, 5], (3, 5))
    assert len(set(raw[raw >= 0].tolist())) == 8
    assert [batch.cmp_block_table.shape[1] for batch in batches.values()] == [0, 2, 1]


@pytest.mark.parametrize(("max_seq_len", "columns"), [(None, (30, 0, 15, 8)), (64, (16, 0, 8, 4))])
def test_a_graph_gets_the_same_shapes_whatever_the_lengths(max_seq_len: int | None, columns: tuple[int, ...]) -> None:
    caches = caches_of()
    caches.open("a")
    batches = caches.batches({"a": 5}, num_slots=3, max_seq_len=max_seq_len)
    widths = [batches[1].swa_block_table.shape[1], *(batch.cmp_block_table.shape[1] for batch in batches.values())]
    assert widths == list(columns)
    assert batches[4].state_indices.tolist() == [0, 1, 2]
    assert batches[4].seq_lens.tolist() == [5, 0, 0]
    assert batches[4].query_start_loc.tolist() == [0, 5, 5, 5]
    assert (batches[4].swa_block_table[1:] == -1).all()


def test_draft_layers_have_caches_of_their_own() -> None:
    caches = Caches(CONFIG, [3, 4], **SIZES)
    caches.open("a")
    assert list(caches.batches({"a": 3})) == [1]
    assert [cache.layer_idx for cache in caches] == [3, 4]
    assert caches[4].tensors.cmp_state.kv.shape == (3, 0, 0)


# --- memory ---


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_tensors_are_those_of_empty_cache(dtype: str, int8: bool) -> None:
    caches = caches_of(dtype=dtype, spare_rows=2, int8_index_cache=int8)
    for layer, kind in enumerate(KINDS):
        weights = to_torch(weights_of(np.random.default_rng(0), CONFIG, kind), dtype)
        due = empty_cache(
            weights,
            num_blocks=29 + 3,
            block_size=4,
            num_cmp_blocks={1: 0, 4: 13 + 3, 8: 6 + 3}[kind.ratio],
            cmp_block_size=2,
            num_slots=3,
            spare_rows=2,
            int8_index_cache=int8,
        )
        assert_same(caches[layer].tensors, due)


def test_memory_is_what_the_formula_says() -> None:
    """V4 Flash, a million tokens: raw keys are most of it, until only windows are kept."""
    num_tokens, slots = 1 << 20, 4
    options: dict[str, Any] = {"num_tokens": num_tokens, "max_requests": slots, "device": "meta"}
    memory = Caches(v4_flash(), range(43), **options, int8_index_cache=True).memory()
    layers = {1: 2, 4: 21, 128: 20}
    blocks = {1: 8192 + 3, 4: 2048 + 3, 128: 64 + 3}
    raw = blocks[1] * 128 * 512 * 2
    entries = {ratio: blocks[ratio] * 128 * 512 * 2 for ratio in (4, 128)}
    index_keys = blocks[4] * 128 * (128 + 2)
    counts = 2 * 4 * slots  # held_start and num_tokens of a state
    rings = {4: slots * 8 * 1024 * 2 * 4 + counts, 128: slots * 128 * 512 * 2 * 4 + counts}
    index_ring = slots * 8 * 256 * 2 * 4 + counts
    assert memory.parts == {
        "swa_cache": 43 * raw,
        "cmp_cache": 21 * entries[4] + 20 * entries[128],
        "index_cache": 21 * index_keys,
        "cmp_state": 2 * counts + 21 * rings[4] + 20 * rings[128],
        "index_state": 22 * counts + 21 * index_ring,
    }
    assert memory.ratios == {
        1: layers[1] * (raw + 2 * counts),
        4: layers[4] * (raw + entries[4] + index_keys + rings[4] + index_ring),
        128: layers[128] * (raw + entries[128] + rings[128] + counts),
    }
    assert memory.num_bytes == sum(memory.parts.values()) == sum(memory.ratios.values())
    assert memory.parts["swa_cache"] > memory.num_bytes / 2
    windows = Caches(v4_flash(), range(43), **options, max_step_tokens=8192).memory()
    assert windows.parts["swa_cache"] == 43 * ((4 * 125 + 8192) // 128 + 8) * 128 * 512 * 2
    assert windows.parts["cmp_cache"] == memory.parts["cmp_cache"]


# --- refusals ---


def filled() -> Caches:
    """Requests of 20 and 9 tokens in caches without spare rows."""
    engine = Engine(num_tokens=64)
    engine.caches.open("a")
    engine.caches.open("b")
    engine.step({"a": tokens_of(20, 20), "b": tokens_of(21, 9)})
    engine.caches.batches({})
    return engine.caches


REFUSALS: dict[str, tuple[Callable[[Caches], Any], str]] = {
    "open twice": (
        lambda caches: caches.open("a"),
        "request must not be open yet, got 'a'; close it first, or reset it",
    ),
    "open too many": (
        lambda caches: (caches.open("c"), caches.open("d")),
        "request must find one of 3 state slots free, got 'd' beside ['a', 'b', 'c']; close one of them, or make "
        "Caches with more max_requests",
    ),
    "close unknown": (
        lambda caches: caches.close("x"),
        "request must be one of the 2 open ones, got 'x'; open it first",
    ),
    "reset unknown": (lambda caches: caches.reset("x"), "request must be one of the 2 open ones, got 'x'"),
    "length unknown": (lambda caches: caches.num_computed_tokens("x"), "request must be one of the 2 open ones"),
    "step unknown": (lambda caches: caches.batches({"a": 1, "x": 1}), "request must be one of the 2 open ones"),
    "layer unknown": (
        lambda caches: caches[3],
        "layer_idx must be one of [0, 1, 2], got 3; name it when Caches is made",
    ),
    "no mapping": (
        lambda caches: caches.batches(["a"]),  # type: ignore[arg-type]
        "new_tokens must be a mapping from requests to counts, got list",
    ),
    "negative": (lambda caches: caches.batches({"a": -1}), "new_tokens['a'] must be an int >= 0, got -1"),
    "longer than all": (
        lambda caches: caches.batches({"a": 45}),
        "new_tokens must keep request 'a' within num_tokens 64, got 45 after 20; make Caches with more num_tokens",
    ),
    "no room": (
        lambda caches: caches.batches({"a": 44, "b": 55}),
        "new_tokens must fit into the free blocks, which hold 40 tokens, got 99 tokens, 24 blocks of raw keys where "
        "15 are free; close a request, or make Caches with more num_tokens",
    ),
    "few slots": (
        lambda caches: caches.batches({"a": 1, "b": 1}, num_slots=1),
        "num_slots must be an int in [2, 3], got 1; the step has 2 requests, and max_requests 3 state slots",
    ),
    "many slots": (
        lambda caches: caches.batches({"a": 1}, num_slots=4),
        "num_slots must be an int in [1, 3], got 4; the step has 1 requests, and max_requests 3 state slots",
    ),
    "short tables": (
        lambda caches: caches.batches({"a": 1}, max_seq_len=20),
        "max_seq_len must be an int in [21, 64], got 20; the longest request has 21 tokens, and num_tokens is 64",
    ),
    "roll forward": (
        lambda caches: caches.roll_back("b", 10),
        "num_tokens must be an int in [0, 9], got 10; a rollback only takes back",
    ),
    "roll back unknown": (lambda caches: caches.roll_back("x", 1), "request must be one of the 2 open ones"),
    "roll back too far": (
        lambda caches: caches.roll_back("a", 15),
        "num_tokens must be a length of request 'a' whose state is still held, got 15 (layer 1 pools rows from 8, and "
        "holds them from 12; the window begins at row 11, and raw keys are held from 16); make Caches with as many "
        "spare_rows as tokens may be taken back, or reset the request and run it anew",
    ),
    "fork unknown": (lambda caches: caches.fork("c", "x"), "request must be one of the 2 open ones, got 'x'"),
    "fork onto open": (lambda caches: caches.fork("b", "a"), "request must not be open yet, got 'b'"),
    "fork beyond": (
        lambda caches: caches.fork("c", "b", 10),
        "num_tokens must be an int in [0, 9], got 10; request 'b' holds 9",
    ),
    "fork without state": (
        lambda caches: caches.fork("c", "a", 6),
        "num_tokens must be a length of request 'a' whose state is still held, got 6 (layer 1 pools rows from 0, and "
        "holds them from 12; the window begins at row 2, and raw keys are held from 16)",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_rule_and_change_nothing(name: str) -> None:
    caches = filled()
    call, text = REFUSALS[name]
    lengths = [list(cache.lengths) for cache in caches]
    columns = {ratio: [list(held) for held in blocks.columns] for ratio, blocks in caches._blocks.items()}
    with pytest.raises(ContractError) as error:
        call(caches)
    assert str(error.value).startswith(text)
    assert [cache.lengths for cache in caches] == lengths
    assert {ratio: blocks.columns for ratio, blocks in caches._blocks.items()} == columns


def test_no_block_for_the_copy_that_a_rollback_needs() -> None:
    """Three blocks: a full one that two requests hold, and two of a third request."""
    caches = Caches(CONFIG, [0], num_tokens=5, max_requests=3, block_size=4, spare_rows=4)
    caches.open("a")
    caches.advance(caches.batches({"a": 4})[1])
    caches.fork("b", "a")
    caches.open("c")
    caches.advance(caches.batches({"c": 5})[1])
    columns = [list(held) for held in caches._blocks[1].columns]
    with pytest.raises(ContractError) as error:
        caches.roll_back("b", 3)
    assert str(error.value) == (
        "num_tokens must fit into the free blocks, which hold 0 tokens, got 0 tokens, 1 blocks of raw keys where 0 are "
        "free; close a request, or make Caches with more num_tokens"
    )
    assert (caches._blocks[1].columns, caches.num_computed_tokens("b")) == (columns, 4)
    caches.close("c")
    caches.roll_back("b", 3)
    assert caches._blocks[1].columns[1] != caches._blocks[1].columns[0] == columns[0]


def test_no_block_for_the_open_block_of_a_fork() -> None:
    caches = Caches(CONFIG, [0], num_tokens=4, max_requests=2, block_size=4)
    caches.open("a")
    caches.advance(caches.batches({"a": 3})[1])
    caches._blocks[1].free.clear()
    with pytest.raises(ContractError, match=r"^num_tokens must fit into the free blocks, which hold 0 tokens, got 0"):
        caches.fork("b", "a")
    with pytest.raises(ContractError, match=r"^request must be one of the 1 open ones, got 'b'; open it first$"):
        caches.close("b")


def test_a_step_that_does_not_go_on_where_a_layer_stopped_is_refused() -> None:
    caches = caches_of()
    caches.open("a")
    first = caches.batches({"a": 6}, num_slots=2)[4]
    caches[1].check_continues(first, ["a"])
    caches.advance(first)
    second = caches.batches({"a": 1})[4]
    caches[1].check_continues(second, ["a"])
    late = second._replace(seq_lens=second.seq_lens + 2)
    for batch, start in ((first, 0), (late, 8)):
        with pytest.raises(ContractError) as error:
            caches[1].check_continues(batch, ["a"])
        assert str(error.value) == (
            f"state of request 'a' must hold {start} tokens in layer 1, got 6: state missing; take lengths from "
            "Caches.batches; after a forward that stopped, roll the request back or reset it"
        )


def test_batches_on_a_device_are_refused() -> None:
    caches = caches_of()
    caches.open("a")
    batch = LayerBatch(*(part.to("meta") for part in caches.batches({"a": 2})[4]))
    for call in (caches.advance, caches[0].advance, lambda batch: caches[0].check_continues(batch, ["a"])):
        with pytest.raises(
            UnsupportedError, match=r"^batch\.query_start_loc must be a CPU tensor, got a tensor on meta"
        ):
            call(batch)
    with pytest.raises(ContractError, match=r"^batch must be of type LayerBatch, got tuple$"):
        caches.advance(tuple(batch))  # type: ignore[arg-type]


BAD_SIZES = [
    ({"num_tokens": 0}, "num_tokens must be an int in [1, 2147483647], got 0"),
    ({"max_requests": 0}, "max_requests must be an int >= 1, got 0"),
    ({"block_size": 0}, "block_size must be an int >= 1, got 0"),
    ({"cmp_block_size": 0}, "cmp_block_size must be an int >= 1, got 0"),
    ({"spare_rows": -1}, "spare_rows must be an int >= 0, got -1"),
    ({"max_step_tokens": 0}, "max_step_tokens must be an int >= 1, got 0"),
    ({"dtype": "int8"}, "dtype must be one of 'bfloat16', 'float16', 'float32', 'float64', got 'int8'"),
    ({"int8_index_cache": 1}, "int8_index_cache must be true or false, got int 1"),
]


@pytest.mark.parametrize(("options", "text"), BAD_SIZES, ids=[next(iter(options)) for options, _ in BAD_SIZES])
def test_bad_sizes_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ContractError) as error:
        caches_of(**options)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([], "layers must be a sequence of layer indices, not empty, got []"),
        (3, "layers must be a sequence of layer indices, not empty, got 3"),
        ("01", "layers must be a sequence of layer indices, not empty, got '01'"),
        ([0, 1, 0], "layers must name every layer once, got [0, 1, 0]"),
        ([-1], "layers must be an int >= 0, got -1"),
    ],
)
def test_bad_layers_are_refused(layers: Any, text: str) -> None:
    with pytest.raises(ContractError) as error:
        Caches(CONFIG, layers, **SIZES)
    assert str(error.value) == text


def test_another_config_is_refused() -> None:
    with pytest.raises(ContractError, match=r"^config must be of type AttentionConfig, got dict$"):
        Caches({}, [0], **SIZES)  # type: ignore[arg-type]


def test_room_of_a_step_that_was_not_run_is_given_up() -> None:
    """All room is planned for one request, then for the other one, then shared by both in either order."""
    caches = caches_of(num_tokens=24, max_requests=2)
    caches.open("a")
    caches.open("b")
    for new in ({"a": 24}, {"b": 24}, {"a": 12, "b": 12}, {"b": 23, "a": 1}, {"b": 1, "a": 23}, {"a": 1}):
        caches.batches(new)
    held = [sum(map(len, blocks.columns)) for blocks in caches._blocks.values()]
    assert held == [1, 0, 0]
    caches.advance(caches.batches({"a": 24})[1])
    assert caches.num_computed_tokens("a") == 24


def test_a_fork_of_a_request_whose_window_moved_on() -> None:
    """What the source gave back the fork never had; it gives back the rest as it goes on."""
    engine, rows = Engine(), tokens_of(22, 50)
    engine.caches.open("a")
    engine.step({"a": rows[:38]})
    engine.step({"a": rows[38:40]})
    engine.caches.fork("b", "a")
    engine.caches.close("a")
    engine.step({"b": rows[40:45]})
    engine.step({"b": rows[45:]})
    assert_ends_as_at_once(engine, "b", rows, 5)
    columns = engine.caches._blocks[1].columns[engine.caches._slots["b"]]
    assert [block >= 0 for block in columns] == [False] * 10 + [True] * 3
