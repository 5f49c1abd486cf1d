"""What a captured graph needs of the module: tensors that stay, shapes that do not change, values that nobody reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsacp_npu._index_calls import parts_of
from dsacp_npu._layer_parts import copied
from dsacp_npu._layer_records import LayerCache
from dsacp_npu._ranks import Ranks
from dsacp_npu.caches import Caches
from dsacp_npu.module import DSAttention
from dsacp_npu.parallel import parallel_of
from dsacp_npu.step import StepMetadata, step_metadata, tensors_in
from dsacp_ref.spec import ContractError
from tests.compare import assert_double, assert_same
from tests.mirror.common import mapped, tensors_of
from tests.module.worlds import Model, caches_of, kind_of, layers_of, model_of

LENGTHS = {"a": 26, "b": 20, "c": 19, "d": 24}
SLOTS = 3
FIXED = {"num_slots": SLOTS, "num_input_tokens": SLOTS, "max_seq_len": 26}
PREFILL = {"a": 9, "b": 13, "c": 16, "d": 3}
# Decode while requests come and go; request d is open and idle until it joins.
STORY: Sequence[Mapping[str, int]] = [
    {"a": 1, "b": 1, "c": 1},
    {"c": 1, "a": 1},
    {"b": 1},
    {},
    {"d": 1, "b": 1, "a": 1},
    {"a": 1, "d": 1},
    {"c": 1, "d": 1, "b": 1},
]
EXTRA: dict[str, Any] = {"float": {}, "int8 index keys": {"int8_index_cache": True}}


class Run:
    """A model whose requests have been prefilled; every step runs all layers."""

    def __init__(self, seed: int = 0, *, built: Mapping[str, Any] | None = None, **cache_options: Any) -> None:
        self.model: Model = model_of(seed, LENGTHS)
        self.layers = layers_of(self.model, **(built or {}))
        self.caches: Caches = caches_of(self.model, dtype=self.layers[0].dtype_name, **cache_options)
        for name in LENGTHS:
            self.caches.open(name)
        rows = self.rows(PREFILL, 0)
        step = step_metadata(self.layers, self.caches, PREFILL)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            layer(rows, step, cache)

    def rows(self, new_tokens: Mapping[str, int], pad_rows: int) -> torch.Tensor:
        """The next rows of these requests, and pad rows that hold NaN."""
        done = {name: self.caches.num_computed_tokens(name) for name in new_tokens}
        parts = [self.model.x[name][done[name] : done[name] + count] for name, count in new_tokens.items()]
        poison = np.full((pad_rows, self.model.config.hidden_size), np.nan)
        return torch.tensor(np.concatenate([*parts, poison])).to(kind_of(self.layers[0]))

    def fixed_rows(self, new_tokens: Mapping[str, int]) -> torch.Tensor:
        """The same, as many as a graph has."""
        return self.rows(new_tokens, SLOTS - sum(new_tokens.values()))

    def step(self, new_tokens: Mapping[str, int], **options: Any) -> StepMetadata:
        """The step's metadata; fixed sizes unless others are given."""
        return step_metadata(self.layers, self.caches, new_tokens, **(options or FIXED))

    @property
    def tensors(self) -> list[LayerCache]:
        """Every layer's cache."""
        return [cache.tensors for cache in self.caches]

    def forward(self, rows: torch.Tensor, step: StepMetadata) -> list[torch.Tensor]:
        """Every layer's rows, the lengths noted afterwards, as beside a graph."""
        outputs = [layer(rows, step, tensors) for layer, tensors in zip(self.layers, self.tensors, strict=True)]
        self.caches.advance(step.batches[1])
        return outputs


def addresses(step: StepMetadata) -> list[int]:
    """Where all tensors of a step lie that layers read."""
    return [tensor.data_ptr() for tensor in tensors_in(step._by_ratio)]


def storages(step: StepMetadata) -> set[int]:
    """Where the memory of all tensors of a step lies, those on the host too; empty ones have none."""
    named = [step.token_indices, step.positions, *tensors_in(step._by_ratio), *tensors_in(step.batches)]
    return {tensor.untyped_storage().data_ptr() for tensor in named if tensor.numel()}


def numbers(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """The caches as they are now."""
    return [copied(cache) for cache in caches]


@pytest.mark.parametrize("options", EXTRA.values(), ids=EXTRA)
def test_a_filled_step_gives_what_fresh_steps_give(options: Mapping[str, Any]) -> None:
    """One step's tensors for a whole decode story; rows and caches equal those of steps without padding."""
    graph, fresh = Run(**options), Run(**options)
    captured = graph.step({})
    where = addresses(captured)
    for i, new_tokens in enumerate(STORY):
        rows = graph.fixed_rows(new_tokens)
        captured.fill_(graph.step(new_tokens))
        assert addresses(captured) == where
        assert captured.requests == tuple(new_tokens)
        assert captured.num_tokens == len(new_tokens)
        got = graph.forward(rows, captured)
        want = fresh.forward(fresh.rows(new_tokens, 0), fresh.step(new_tokens, num_input_tokens=None))
        for layer, (mine, due) in enumerate(zip(got, want, strict=True)):
            if len(due):
                assert_double(mine[: len(due)].numpy(), due.numpy(), f"step {i} layer {layer}")
            assert not mine[len(due) :].any(), f"step {i} layer {layer}: pad rows"
        for mine, due in zip(tensors_of(graph.tensors), tensors_of(fresh.tensors), strict=True):
            if mine.dtype == torch.float64:
                assert_double(mine.numpy(), due.numpy(), f"cache after step {i}")
            else:
                assert_same(mine, due, f"cache after step {i}")


@pytest.mark.parametrize("options", EXTRA.values(), ids=EXTRA)
def test_padded_slots_leave_every_cache_untouched(options: Mapping[str, Any]) -> None:
    """A step of padding alone changes no bit, poison included; one with a request only what is the request's."""
    run = Run(1, **options)
    for tensor in tensors_of(run.tensors):
        if tensor.is_floating_point():
            tensor[tensor == 0] = float("nan")  # what was never written
    before = numbers(run.tensors)
    run.forward(run.fixed_rows({}), run.step({}))
    assert_same(run.tensors, before)
    step = run.step({"b": 1})
    run.forward(run.fixed_rows({"b": 1}), step)
    for cache, old in zip(run.caches, before, strict=True):
        batch, mine = step.batches[cache.compress_ratio], cache.tensors
        pages = [(mine.swa_cache, old.swa_cache, batch.swa_block_table)]
        entries = [
            (mine.cmp_cache, old.cmp_cache),
            *zip(parts_of(mine.index_cache), parts_of(old.index_cache), strict=True),
        ]
        pages += [(*pair, batch.cmp_block_table) for pair in entries]
        for state, past in zip(mine[3:], old[3:], strict=True):
            pages += [(part, was, batch.state_indices[:1, None]) for part, was in zip(state, past, strict=True)]
        for part, was, owned in pages:
            kept = [i for i in range(len(part)) if i not in owned[0].tolist()]
            assert_same(part[kept], was[kept])


@pytest.mark.parametrize("built", [{}, {"w8a8": True}], ids=["float", "int8"])
def test_a_verify_step_with_fixed_sizes(built: Mapping[str, Any]) -> None:
    """Two rows a slot: one token and a draft; a request may bring one of them, the rest are pad rows."""
    graph, fresh = Run(2, built=built), Run(2, built=built)
    fixed = {"num_slots": 2, "num_input_tokens": 4, "max_seq_len": 26, "decode_query_len": 2}
    captured = graph.step({}, **fixed)
    for new_tokens in ({"a": 2, "c": 1}, {"d": 2, "b": 2}, {"c": 2}):
        rows = graph.rows(new_tokens, 4 - sum(new_tokens.values()))
        captured.fill_(graph.step(new_tokens, **fixed))
        got = graph.forward(rows, captured)
        want = fresh.forward(fresh.rows(new_tokens, 0), fresh.step(new_tokens, decode_query_len=2))
        for mine, due in zip(got, want, strict=True):
            assert_double(mine[: len(due)].numpy(), due.numpy())


# --- steps that own their tensors ---


def test_steps_share_no_memory() -> None:
    """A draft step's tensors are its own: no other step, no layer and no cache can change them."""
    run = Run(3)
    draft_layer = DSAttention(run.model.config, 3, dtype="float64")
    draft_caches = Caches(run.model.config, [3], num_tokens=89, max_requests=4, block_size=4, dtype="float64")
    for name in LENGTHS:
        draft_caches.open(name)
    steps = [
        run.step({"a": 1, "b": 1}),
        run.step({"a": 1, "b": 1}),
        run.step({"a": 1, "b": 1}, num_input_tokens=None),
        step_metadata([draft_layer], draft_caches, {"a": 3}),
    ]
    found = [storages(step) for step in steps]
    cached = {t.untyped_storage().data_ptr() for t in tensors_of(run.tensors) if t.numel()}
    for i, mine in enumerate(found):
        assert mine
        assert not mine & cached
        for other in found[i + 1 :]:
            assert not mine & other


def test_a_split_steps_tensors_are_its_own() -> None:
    layers = layers_of(model_of(4, LENGTHS), parallel_of({"enable_dsa_cp": True}, tp=Ranks(None, 2, 0)))
    caches = caches_of(model_of(4, LENGTHS))
    caches.open("a")
    first, second = (step_metadata(layers, caches, {"a": 9}) for _ in range(2))
    assert first.splits
    assert not storages(first) & storages(second)


def test_a_step_that_was_filled_from_is_free_for_the_next() -> None:
    """Two steps that are filled in turn: filling the second once changed the first's lengths, on a CPU."""
    run = Run(5)
    first, second = run.step({}), run.step({"a": 1})
    first.fill_(second)
    second.fill_(run.step({"b": 1, "c": 1}))
    assert first.requests == ("a",)
    assert first.num_tokens == 1
    assert first.batches[4].query_start_loc.tolist() == [0, 1, 1, 1]
    assert first.geometry(4).batch.query_start_loc.tolist() == [0, 1, 1, 1]
    assert second.num_tokens == 2


# --- refusals of fill_ ---


def refusal(captured: StepMetadata, other: Any) -> str:
    """What filling from it says; nothing was written."""
    before = [tensor.clone() for tensor in tensors_in(captured._by_ratio)]
    batches, requests = captured.batches, captured.requests
    with pytest.raises(ContractError) as caught:
        captured.fill_(other)
    assert_same(tensors_in(captured._by_ratio), before)
    assert (captured.batches, captured.requests) == (batches, requests)
    return str(caught.value)


def wanted(rows: str, got: str) -> str:
    """The text of a refusal."""
    return (
        f"other must be a step by heads of {rows} with this one's tables and caches, got {got}; "
        "make both with the same caches, num_slots, num_input_tokens and max_seq_len"
    )


def test_fill_refuses_steps_of_other_shapes() -> None:
    run = Run(6)
    captured = run.step({"a": 1})
    mine = "3 rows and 3 slots"
    cases = {
        "3 rows and 2 slots": {**FIXED, "num_slots": 2},
        "4 rows and 3 slots": {**FIXED, "num_input_tokens": 4},
        "3 rows and 3 slots": {**FIXED, "max_seq_len": 19},  # other tables
        "1 rows and 1 slots": {"decode_query_len": 1},  # not fixed
    }
    for got, options in cases.items():
        assert refusal(captured, run.step({"b": 1}, **options)) == wanted(mine, got)
    assert refusal(captured, None) == "other must be of type StepMetadata, got NoneType"


def test_fill_refuses_a_step_of_other_caches() -> None:
    """Tables of the same shape, and slots that lead elsewhere."""
    run = Run(7)
    captured = run.step({"a": 1})
    others = caches_of(run.model, num_tokens=200)
    others.open("a")
    other = step_metadata(run.layers, others, {"a": 1}, **FIXED)
    same = "3 rows and 3 slots"
    assert refusal(captured, other) == wanted(same, same)


def test_fill_refuses_split_steps() -> None:
    """A graph is for steps by heads; neither side may split tokens."""
    model = model_of(8, LENGTHS)
    layers = layers_of(model, parallel_of({"enable_dsa_cp": True}, tp=Ranks(None, 2, 0)))
    caches = caches_of(model)
    caches.open("a")
    split, other = (step_metadata(layers, caches, {"a": 9}) for _ in range(2))
    assert split.splits
    rows = "9 rows and 1 slots"
    assert refusal(split, other) == wanted(rows, rows)
    fixed = Run(8).step({})
    assert refusal(fixed, split) == wanted("3 rows and 3 slots", rows)
    with pytest.raises(ContractError) as caught:
        step_metadata(layers, caches, {"a": 9}, num_slots=2)
    assert str(caught.value) == (
        "num_slots must be None in a step that splits tokens, got fixed sizes; "
        "a captured graph is for decode and verify steps; see decode_query_len"
    )


# --- nothing reads a value ---


def test_a_forward_reads_no_value() -> None:
    """Of rows, caches and the step's tensors, as on a device: fake tensors have shapes and no values."""
    run = Run(9, int8_index_cache=True)
    step = run.step({"a": 1, "b": 1})
    rows = run.fixed_rows({"a": 1, "b": 1})
    want = [layer(rows, step, copied(tensors)) for layer, tensors in zip(run.layers, run.tensors, strict=True)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, patch("dsacp_npu._tensors.readable", lambda tensor: False):
        fake = [mapped(tensors, mode.from_tensor) for tensors in run.tensors]
        got = [layer(mode.from_tensor(rows), step, tensors) for layer, tensors in zip(run.layers, fake, strict=True)]
    assert [(mine.shape, mine.dtype) for mine in got] == [(due.shape, due.dtype) for due in want]


def test_values_that_cannot_be_read_change_no_number() -> None:
    """A whole decode story where no function may look at a tensor, beside one where all may."""
    blind, seeing = Run(10), Run(10)
    captured = blind.step({})
    for new_tokens in STORY:
        rows = blind.fixed_rows(new_tokens)
        captured.fill_(blind.step(new_tokens))
        with patch("dsacp_npu._tensors.readable", lambda tensor: False):
            got = [layer(rows, captured, tensors) for layer, tensors in zip(blind.layers, blind.tensors, strict=True)]
        blind.caches.advance(captured.batches[1])
        for mine, due in zip(got, seeing.forward(rows, seeing.step(new_tokens)), strict=True):
            assert_double(mine.numpy(), due.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("layer_idx", [0, 1, 2])
@pytest.mark.parametrize("built", [{}, {"w8a8": True}], ids=["float", "int8"])
def test_one_compilation_serves_a_decode_story(layer_idx: int, built: Mapping[str, Any]) -> None:
    """Compiled as a whole, then replayed with another step's metadata in the same tensors; caches are written."""
    torch._dynamo.reset()
    graph, plain = Run(11, built=built), Run(11, built=built)
    captured, compilations = graph.step({}), []

    def counting(module: torch.fx.GraphModule, inputs: Any) -> Any:
        compilations.append(module)
        return module.forward

    layer = graph.layers[layer_idx]
    compiled = torch.compile(layer.forward, fullgraph=True, backend=counting, dynamic=False)
    for new_tokens in STORY:
        rows = graph.fixed_rows(new_tokens)
        captured.fill_(graph.step(new_tokens))
        got = compiled(rows, captured, graph.tensors[layer_idx])
        graph.caches.advance(captured.batches[1])
        want = plain.forward(rows, plain.step(new_tokens))[layer_idx]
        assert_double(got.numpy(), want.numpy())
    for mine, due in zip(*(tensors_of(run.tensors[layer_idx]) for run in (graph, plain)), strict=True):
        if mine.dtype == torch.float64:
            assert_double(mine.numpy(), due.numpy())
        else:
            assert_same(mine, due)
    assert len(compilations) == 1
