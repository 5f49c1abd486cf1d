"""The module on one device: any way to cut requests into steps gives the definition's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import layer as mirror
from dsacp_npu._layer_parts import copied
from dsacp_npu.caches import Caches
from dsacp_npu.module import DSAttention
from dsacp_npu.step import StepMetadata, metadata_of_batches, step_metadata
from dsacp_ref import layer as ref
from tests.compare import assert_double, assert_same, assert_within_budget
from tests.layer_strategies import CSA, SMALL, as_sets, frozen, oracle_config, oracle_weights, world_of
from tests.layer_strategies import run as run_definition
from tests.maths_strategies import seeds
from tests.mirror.common import to_numpy, to_torch
from tests.module.worlds import (
    KINDS,
    Model,
    Steps,
    assert_told,
    caches_of,
    kind_of,
    layers_of,
    model_of,
    tell,
)
from tests.plain_layer import layer as plain_layer
from tests.strategies import fewer

LENGTHS = {"a": 37, "b": 11, "c": 22}
STEPS = [{"a": 16, "b": 3}, {"c": 20, "a": 1, "b": 8}, {"a": 19}, {"a": 1, "c": 1}, {"c": 1}]


def lengths_of(steps: Steps) -> dict[str, int]:
    """Tokens of every request of a story."""
    return {name: sum(step.get(name, 0) for step in steps) for name in dict.fromkeys(n for step in steps for n in step)}


@st.composite
def stories(draw: st.DrawFn) -> Steps:
    """Steps of one to three requests in any order: chunks, decode, requests without new tokens."""
    count = st.one_of(st.sampled_from([0, 1, 1, 4, 8]), st.integers(0, 14))
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        names = draw(st.lists(st.sampled_from("abc"), unique=True, min_size=1, max_size=3))
        steps.append({name: draw(count) for name in names})
    return steps


# --- float64 ---


def test_prefill_chunks_a_mixed_step_and_decode() -> None:
    model = model_of(0, LENGTHS)
    story = tell(model, layers_of(model), caches_of(model), STEPS)
    assert not any(step.splits for step in story)
    assert_told([story], model, STEPS)


@fewer(5)
@given(steps=stories(), seed=seeds, padding=st.sampled_from([0, 0, 3]))
def test_every_way_to_cut_requests_gives_the_definitions_rows(steps: Steps, seed: int, padding: int) -> None:
    lengths = lengths_of(steps)
    model = model_of(seed, lengths)
    sizes = {"num_tokens": sum(lengths.values()) + 1}
    assert_told([tell(model, layers_of(model), caches_of(model, **sizes), steps, padding=padding)], model, steps)


def test_steps_without_requests_and_pad_rows() -> None:
    """They leave the caches alone; pad rows come out as zero, whatever they hold."""
    model = model_of(7, LENGTHS)
    layers, caches = layers_of(model), caches_of(model)
    tell(model, layers, caches, STEPS[:2])
    before = [copied(cache.tensors) for cache in caches]
    for new_tokens in ({}, {"a": 0, "c": 0}):
        _, step = rows_and_step(model, layers, caches, new_tokens, num_input_tokens=3)
        for i, layer in enumerate(layers):
            assert not layer(torch.full((3, 8), float("nan"), dtype=torch.float64), step, caches[i]).any()
    for cache, due in zip(caches, before, strict=True):
        assert_same(cache.tensors, due)


def test_what_comes_between_changes_no_row() -> None:
    """A request that is rolled back, reset or opened beside others, and small blocks that went through other hands."""
    model = model_of(1, LENGTHS)
    layers, caches = layers_of(model), caches_of(model, spare_rows=4)
    steps = [{"a": 16, "b": 11}, {"a": 5, "c": 20}]
    assert_told([tell(model, layers, caches, steps)], model, steps)
    caches.roll_back("a", 18)
    caches.reset("b")
    caches.close("c")
    after = [{"a": 19, "c": 22}, {"b": 11}]
    told = tell(model, layers, caches, after)
    # What was run before is counted by `due` as a step of its own.
    whole = [{"a": 18}, *after]
    assert_told([[told[0]._replace(tokens=np.arange(18), outputs=first_rows(model)), *told]], model, whole)


def first_rows(model: Model) -> list[np.ndarray]:
    """The first 18 rows of request a, as a module that does nothing else gives them."""
    return tell(model, layers_of(model), caches_of(model), [{"a": 18}])[0].outputs


def test_an_engines_own_tensors_and_tables_give_the_same_bits() -> None:
    """`metadata_of_batches` and a bare LayerCache; the engine writes its next batch into the same host tensors."""
    model = model_of(2, LENGTHS)
    layers, caches, others = layers_of(model), caches_of(model), caches_of(model)

    def with_own_tables(new_tokens: Mapping[str, int], rows: torch.Tensor, step: StepMetadata) -> list[torch.Tensor]:
        for name in new_tokens.keys() - set(others.requests):
            others.open(name)
        batches = others.batches(new_tokens)
        tensors = {i: others[i].tensors for i in range(3)}
        own = metadata_of_batches(layers, tensors, batches)
        for batch in batches.values():
            for tensor in batch:
                tensor.fill_(-7)  # reused for something else before any layer ran
        for ratio, batch in own.batches.items():
            assert_same(batch, step.batches[ratio])
        outputs = [layer(rows, own, tensors[i]) for i, layer in enumerate(layers)]
        others.advance(step.batches[1])
        return outputs

    for new_tokens in STEPS:
        rows, step = rows_and_step(model, layers, caches, new_tokens)
        want = [layer(rows, step, caches[i]) for i, layer in enumerate(layers)]
        assert_same(with_own_tables(new_tokens, rows, step), want)
    for mine, theirs in zip(caches, others, strict=True):
        assert_same(mine.tensors, theirs.tensors, f"layer {mine.layer_idx}")


def rows_and_step(
    model: Model, layers: Sequence[DSAttention], caches: Caches, new_tokens: Mapping[str, int], **options: Any
) -> tuple[torch.Tensor, StepMetadata]:
    """The next rows of some requests, and their step."""
    for name in new_tokens.keys() - set(caches.requests):
        caches.open(name)
    done = {name: caches.num_computed_tokens(name) for name in new_tokens}
    rows = [np.zeros((0, model.config.hidden_size))]
    rows += [model.x[name][done[name] : done[name] + count] for name, count in new_tokens.items()]
    step = step_metadata(layers, caches, new_tokens, **options)
    return torch.tensor(np.concatenate(rows)).to(kind_of(layers[0])), step


def test_draft_layers_beside_the_models_own() -> None:
    """A layer from num_hidden_layers on is window only, and may share a step with the others or have its own."""
    model = model_of(3, LENGTHS)
    layers, caches = layers_of(model), caches_of(model)
    draft = DSAttention(model.config, 3, dtype="float64")
    assert draft.compress_ratio == 1
    draft.load_state_dict(layers[0].state_dict())
    together = Caches(model.config, range(4), num_tokens=70, max_requests=3, block_size=4, dtype="float64")
    for new_tokens in STEPS:
        rows, step = rows_and_step(model, [*layers, draft], together, new_tokens)
        outputs = [layer(rows, step, together[i]) for i, layer in enumerate([*layers, draft])]
        assert_same(outputs[3], outputs[0])
        rows, step = rows_and_step(model, layers, caches, new_tokens)
        assert_same(outputs[0], layers[0](rows, step, caches[0]))
        for i in (1, 2):
            layers[i](rows, step, caches[i])


# --- int8 index keys ---


@fewer(5)
@given(steps=stories(), seed=seeds)
def test_int8_index_keys_give_the_definitions_rows_and_choice(steps: Steps, seed: int) -> None:
    lengths = lengths_of(steps)
    model = model_of(seed, lengths)
    layers = layers_of(model)
    caches = caches_of(model, int8_index_cache=True, num_tokens=sum(lengths.values()) + 1)
    want = int8_definition(model)
    done = dict.fromkeys(lengths, 0)
    for new_tokens in steps:
        rows, step = rows_and_step(model, layers, caches, new_tokens)
        for i in (0, 2):
            layers[i](rows, step, caches[i])
        got = layers[1].attend(rows, step, caches[1])
        at = 0
        for name, count in new_tokens.items():
            mine, due = slice(at, at + count), slice(done[name], done[name] + count)
            output, topk = want[name]
            if count:
                assert_double(got.output[mine].numpy(), output[due], name)
                assert_same(got.topk_indices[mine], topk[due], name)
            at, done[name] = mine.stop, due.stop


def int8_definition(model: Model) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(rows, choice) of every request of the ratio-4 layer, whole, with an int8 index cache."""
    x = list(model.x.values())
    shared = {"config": model.config, "kind": CSA, "weights": model.weights[1], "x": x}
    world = world_of(np.random.default_rng(0), list(map(len, x)), **shared)
    cache, slots = world.cache, len(world.cache.cmp_state.num_tokens)
    sizes = dict(zip(("num_blocks", "block_size"), cache.swa_cache.shape, strict=False))
    sizes |= dict(zip(("num_cmp_blocks", "cmp_block_size"), cache.cmp_cache.shape, strict=False))
    coded = frozen(ref.empty_cache(world.weights, num_slots=slots, int8_index_cache=True, **sizes))
    found = run_definition(world._replace(cache=coded), [world.lengths])
    return dict(zip(model.x, zip(found.outputs, found.topk, strict=True), strict=True))


def test_int8_index_keys_change_a_choice_here() -> None:
    """What the test above compares is not what float keys choose."""
    model = model_of(4, {"a": 60}, replace(SMALL, o_groups=4, index_n_heads=4))
    steps = [{"a": 60}]
    choices = []
    for int8 in (False, True):
        layers, caches = layers_of(model), caches_of(model, int8_index_cache=int8)
        rows, step = rows_and_step(model, layers, caches, steps[0])
        choices.append(as_sets(layers[1].attend(rows, step, caches[1]).topk_indices.numpy()))
    assert choices[0] != choices[1]


# --- a selection handed in ---


@pytest.mark.parametrize("padding", [0, 3])
def test_a_given_selection_is_used(padding: int) -> None:
    """By token of the step: the layer's own gives the same bits, another one the definition's rows for it.

    With pad rows behind the tokens the selection was refused after the caches had been written.
    """
    model = model_of(5, LENGTHS)
    runs = [(layers_of(model), caches_of(model)) for _ in range(3)]
    rng = np.random.default_rng(5)
    x = list(model.x.values())
    world = world_of(rng, list(map(len, x)), config=model.config, kind=CSA, weights=model.weights[1], x=x)
    cache = world.cache
    for new_tokens in STEPS:
        count = sum(new_tokens.values())
        padded = {"num_input_tokens": count + padding} if padding else {}
        outputs, chosen = [], None
        for i, (layers, caches) in enumerate(runs):
            done = [caches.num_computed_tokens(name) if name in caches.requests else 0 for name in model.x]
            rows, step = rows_and_step(model, layers, caches, new_tokens, **padded)
            rows = torch.cat([rows, torch.full((padding, rows.shape[1]), float("nan"), dtype=rows.dtype)])
            given_topk = chosen
            if i == 2:
                given_topk = torch.tensor(any_choice(rng, done, list(model.x), new_tokens, model.config.index_topk))
            found = layers[1].attend(rows, step, caches[1], given_topk=given_topk)
            chosen = found.topk_indices[:count] if i == 0 else chosen
            outputs.append(found.output[:count])
            for j in (0, 2):
                layers[j](rows, step, caches[j])
        assert_same(outputs[1], outputs[0])
        order = [list(model.x).index(name) for name in new_tokens]
        ends = [start + new_tokens.get(name, 0) for name, start in zip(model.x, done, strict=True)]
        part, batch = world.step(done, ends, order=order)
        out = ref.attention_layer(
            part, world.weights, cache, batch, model.config, compress_ratio=4, given_topk=given_topk.numpy()
        )
        assert_double(outputs[2].numpy(), out.output)
        cache = frozen(out.cache)


def any_choice(
    rng: np.random.Generator, done: list[int], names: list[str], new_tokens: Mapping[str, int], width: int
) -> np.ndarray:
    """Some visible entries of every token, in any order."""
    rows = []
    for name, count in new_tokens.items():
        start = done[names.index(name)]
        for position in range(start, start + count):
            row = np.full(width, -1, np.int32)
            found = rng.permutation((position + 1) // 4)[:width]
            row[: len(found)] = found
            rows.append(row)
    return np.array(rows, np.int32)


# --- short floats ---

WIDE = replace(SMALL, o_groups=4, hidden_size=32, q_lora_rank=16, head_dim=16, o_lora_rank=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_short_floats_are_within_the_error_of_a_plain_computation(dtype: str) -> None:
    """Against the float64 definition of the same rounded numbers, given one selection.

    The measure in float32 is textbook array code; in halves, which numpy lacks, the mirror's layer on whole requests.
    """
    model = model_of(6, LENGTHS, WIDE)
    layers, caches = layers_of(model, dtype=dtype), caches_of(model, dtype=dtype)
    told: list[dict[str, list[torch.Tensor]]] = [{name: [] for name in LENGTHS} for _ in KINDS]
    chosen: dict[str, list[torch.Tensor]] = {name: [] for name in LENGTHS}
    for new_tokens in STEPS:
        rows, step = rows_and_step(model, layers, caches, new_tokens)
        for i, layer in enumerate(layers):
            found = layer.attend(rows, step, caches[i])
            for name, part in zip(new_tokens, found.output.split(list(new_tokens.values())), strict=True):
                told[i][name].append(part)
            for name, part in zip(new_tokens, found.topk_indices.split(list(new_tokens.values())), strict=True):
                chosen[name] += [part] if i == 1 else []
    for i, (kind, layer) in enumerate(zip(KINDS, layers, strict=True)):
        weights = layer.kept_weights()
        for name, x in model.x.items():
            rows = torch.tensor(x[: sum(step.get(name, 0) for step in STEPS)]).to(kind_of(layer))
            given_topk = torch.cat(chosen[name]) if i == 1 else None
            exact = whole(ref.attention_layer, to_numpy(rows, "float64"), to_numpy(weights, "float64"), i, given_topk)
            if dtype == "float32":
                sets = as_sets(given_topk.numpy()) if i == 1 else entries_seen(len(rows), kind.ratio)
                named = oracle_weights(to_numpy(weights, "float32"))
                constants = oracle_config(WIDE, kind.ratio)
                plain = torch.tensor(plain_layer(rows.numpy(), named, constants, kind.ratio, sets))
            else:
                plain = whole(mirror.attention_layer, rows, weights, i, given_topk)
            assert_within_budget(torch.cat(told[i][name]), exact, plain, f"layer {i} {name}")


def entries_seen(num_tokens: int, ratio: int) -> list[set[int]]:
    """Every complete entry of each token; none in a window-only layer."""
    return [set(range((p + 1) // ratio)) if ratio > 1 else set() for p in range(num_tokens)]


def whole(function: Callable[..., Any], x: Any, weights: Any, i: int, given_topk: torch.Tensor | None) -> Any:
    """A request's rows in one step of a layer of either package."""
    package = mirror if isinstance(x, torch.Tensor) else ref
    cache = package.empty_cache(
        weights, num_blocks=1, block_size=len(x), num_cmp_blocks=1, cmp_block_size=len(x), num_slots=1
    )
    ints = [np.array(part, np.int32) for part in ([0, len(x)], [len(x)], [[0]], [[0]], [0])]
    batch = ref.LayerBatch(*ints)
    given_topk = None if given_topk is None else given_topk.numpy()
    if package is mirror:
        batch, given_topk = to_torch(batch), to_torch(given_topk)
    return function(x, weights, cache, batch, WIDE, compress_ratio=KINDS[i].ratio, given_topk=given_topk).output
