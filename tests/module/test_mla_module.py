"""The V3.2 module on one device: any way to cut requests into steps gives the definition's rows, choices first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import backend
from dsacp_npu import mla_layer as mirror
from dsacp_npu._mla_parts import copied
from dsacp_npu._ranks import Ranks
from dsacp_npu.backend import Backend
from dsacp_npu.emulator import installed
from dsacp_npu.mla_caches import MLACaches
from dsacp_npu.mla_layer import MLACache
from dsacp_npu.mla_module import MLAttention
from dsacp_npu.mla_step import mla_metadata_of_batch, mla_step_metadata
from dsacp_npu.parallel import check_mla_model, parallel_of
from dsacp_ref import mla_layer as ref
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.compare import assert_double, assert_same, assert_within_budget
from tests.layer_strategies import as_sets, frozen
from tests.maths_strategies import seeds
from tests.mirror.common import to_numpy, to_torch
from tests.mla_strategies import SMALL, oracle_config, oracle_weights, plain_layer, world_of
from tests.module.mla_worlds import (
    CODED,
    Event,
    Model,
    Steps,
    any_choice,
    assert_told,
    bytes_of,
    caches_of,
    defined,
    held_rows,
    kind_of,
    layers_of,
    model_of,
    named,
    next_step,
    tell,
)
from tests.strategies import fewer

LENGTHS = {"a": 37, "b": 11, "c": 22}
STEPS = [{"a": 16, "b": 3}, {"c": 20, "a": 1, "b": 8}, {"a": 19}, {"a": 1, "c": 1}, {"c": 1}]
ON = {"enable_dsa_cp": True, "dsa_cp_key_mode": "gather_kv", "dsa_cp_output_mode": "replicated_weight"}
CODES: list[dict[str, bool]] = [{}, {"fp8": True}, {"int8_index_cache": True}]


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


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_prefill_chunks_a_mixed_step_and_decode(codes: dict[str, bool]) -> None:
    model = model_of(0, LENGTHS, CODED)
    story = tell(model, layers_of(model), caches_of(model, **codes), STEPS)
    assert not any(step.splits for step in story)
    assert_told([story], model, **codes)


@fewer(5)
@given(steps=stories(), seed=seeds, padding=st.sampled_from([0, 0, 3]), codes=st.sampled_from(CODES))
def test_every_way_to_cut_requests_gives_the_definitions_rows(
    steps: Steps, seed: int, padding: int, codes: dict[str, bool]
) -> None:
    lengths = lengths_of(steps)
    model = model_of(seed, lengths, CODED if codes else SMALL)
    caches = caches_of(model, num_tokens=sum(lengths.values()) + 1, **codes)
    assert_told([tell(model, layers_of(model), caches, steps, padding=padding)], model, **codes)


def test_codes_change_a_choice_here() -> None:
    """What the tests above compare is not what float keys choose."""
    model = model_of(4, {"a": 60}, CODED)
    chosen = [[as_sets(layer["a"][1]) for layer in defined(model, **codes)] for codes in CODES]
    assert chosen[0] != chosen[1] != chosen[2] != chosen[0]


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_steps_without_requests_and_pad_rows(codes: dict[str, bool]) -> None:
    """They leave the caches alone; pad rows come out as zero, whatever they hold."""
    model = model_of(7, LENGTHS, CODED)
    layers, caches = layers_of(model), caches_of(model, **codes)
    tell(model, layers, caches, STEPS[:2])
    before = bytes_of(caches)
    for new_tokens in ({}, {"a": 0, "c": 0}):
        step, stream, _ = next_step(model, layers, caches, new_tokens, padding=3)
        assert stream.isnan().all()
        for i, layer in enumerate(layers):
            found = layer.attend(held_rows(stream, step, layer), step, caches[i])
            assert not found.output.any()
            assert (found.topk_indices == -1).all()
    assert bytes_of(caches) == before


def test_what_comes_between_changes_no_row() -> None:
    """Requests that are forked, rolled back, reset, closed and opened beside others, blocks that changed hands."""
    model = model_of(1, {"a": 37, "b": 11, "c": 22, "d": 30}, prefixes={"d": ("a", 18)})
    events: list[Event] = [
        {"a": 16, "b": 11},
        {"a": 5, "c": 20},
        ("fork", "d", "a", 18),
        ("roll_back", "a", 14),
        {"d": 3, "a": 6},
        ("reset", "b"),
        ("close", "c"),
        {"a": 17, "c": 22},
        ("roll_back", "c", 1),
        {"b": 11, "d": 9, "c": 21},
    ]
    assert_told([tell(model, layers_of(model), caches_of(model), events)], model)


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_an_engines_own_tensors_and_table_give_the_same_bits(codes: dict[str, bool]) -> None:
    """`mla_metadata_of_batch` and a bare MLACache; the engine writes its next batch into the same host tensors."""
    model = model_of(2, LENGTHS, CODED)
    layers, caches, others = layers_of(model), caches_of(model, **codes), caches_of(model, **codes)
    for new_tokens in STEPS:
        step, stream, _ = next_step(model, layers, caches, new_tokens)
        rows = held_rows(stream, step, layers[0])
        want = [layer(rows, step, caches[i]) for i, layer in enumerate(layers)]
        for name in new_tokens.keys() - set(others.requests):
            others.open(name)
        planned = others.planned(new_tokens)
        tensors = {i: others[i].tensors for i in range(2)}
        own = mla_metadata_of_batch(layers, tensors, planned.batch)
        assert (own.requests, own.progress, own.plan) == ((), (), None)
        for tensor in planned.batch:
            tensor.fill_(-7)  # reused for something else before any layer ran
        assert_same(own.batch, step.batch)
        assert_same([layer(rows, own, tensors[i]) for i, layer in enumerate(layers)], want)
        for cache in others:
            cache.advance_to(planned.progress)
    assert bytes_of(caches) == bytes_of(others)


def test_an_engines_graph_slots() -> None:
    """Rows of a request without keys are nobody's: zero, and nothing is written for them."""
    model = model_of(3, {"a": 6})
    layers, caches = layers_of(model), caches_of(model, num_tokens=16)
    tensors = {cache.layer_idx: cache.tensors for cache in caches}
    batch = mirror.MLABatch(
        *(torch.tensor(part, dtype=torch.int32) for part in ([0, 6, 8], [6, 0], [[3, 1], [-1, -1]]))
    )
    step = mla_metadata_of_batch(layers, tensors, batch)
    rows = torch.cat([torch.tensor(model.x["a"]), torch.full((2, SMALL.hidden_size), float("nan"))])
    for i, layer in enumerate(layers):
        found = layer.attend(rows, step, tensors[i])
        output, topk = defined(model)[i]["a"]
        assert_same(found.topk_indices[:6], topk)
        assert_double(found.output[:6].numpy(), output)
        assert not found.output[6:].any()
        assert (found.topk_indices[6:] == -1).all()
        latents = tensors[i].latent_cache
        written = latents.any(-1)
        assert written.nonzero().tolist() == [[1, 0], [1, 1], [3, 0], [3, 1], [3, 2], [3, 3]]


# --- the switch ---


def test_too_few_tokens_and_decode_run_whole_and_are_bitwise_what_the_switch_off_gives() -> None:
    """One rank of four, alone: nobody is asked. Eight new tokens of one request are enough, seven are not."""
    model = model_of(5, LENGTHS)
    one_of_four = parallel_of(ON | {"prefill_cp_mode": "zigzag"}, tp=Ranks(None, 4, 0))
    events = [{"a": 7, "b": 7}, {"a": 1}, {"a": 5, "b": 1}, {"b": 1, "a": 1}, {"c": 7, "b": 1}, {"c": 1}]
    for dtype in ("float64", "float32", "bfloat16"):
        told = []
        for parallel in (one_of_four, parallel_of()):
            layers, caches = layers_of(model, parallel, dtype=dtype), caches_of(model, dtype=dtype)
            told.append((tell(model, layers, caches, events, padding=2), bytes_of(caches)))
            told[-1][0][:] = [step._replace(own=step.tokens) for step in told[-1][0]]
            assert next_step(model, layers, caches, {"a": 8})[0].splits == (parallel is one_of_four)
        assert not any(step.splits for step in told[0][0])
        assert_same(told[0], told[1])


# --- a selection handed in ---


@pytest.mark.parametrize("padding", [0, 3])
def test_a_given_selection_is_used(padding: int) -> None:
    """By token of the step: the layer's own gives the same bits, another one the definition's rows for it."""
    model = model_of(5, LENGTHS)
    runs = [(layers_of(model)[:1], caches_of(model)) for _ in range(3)]
    rng, x = np.random.default_rng(5), list(model.x.values())
    world = world_of(rng, list(map(len, x)), config=model.config, weights=model.weights[0], x=x)
    cache, done = world.cache, dict.fromkeys(model.x, 0)
    for new_tokens in STEPS:
        choice, outputs = any_choice(rng, done, new_tokens), []
        handed_in: list[torch.Tensor | None] = [None, None, torch.tensor(choice)]
        for i, (layers, caches) in enumerate(runs):
            step, stream, _ = next_step(model, layers, caches, new_tokens, padding)
            rows, chosen = held_rows(stream, step, layers[0]), handed_in[i]
            found = layers[0].attend(rows, step, caches[0], given_topk=chosen)
            caches[1].advance_to(step.progress)
            picks = found.topk_indices[: step.num_tokens]
            if i == 0:
                handed_in[1] = picks
            else:
                assert_same(picks, chosen)
            outputs.append(found.output[: step.num_tokens])
        assert_same(outputs[1], outputs[0])
        starts = list(done.values())
        for name, new in new_tokens.items():
            done[name] += new
        order = [list(model.x).index(name) for name in new_tokens]
        part, batch = world.step(starts, list(done.values()), order=order)
        out = ref.mla_attention_layer(part, world.weights, cache, batch, model.config, given_topk=choice)
        assert_double(outputs[2].numpy(), out.output)
        cache = frozen(out.cache)


# --- short floats ---

WIDE = replace(SMALL, hidden_size=32, q_lora_rank=16, kv_lora_rank=32, nope_head_dim=8, rope_head_dim=8, v_head_dim=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_short_floats_are_within_the_error_of_a_plain_computation(dtype: str) -> None:
    """Against the float64 definition of the same rounded numbers, given one selection.

    The measure in float32 is textbook array code; in halves, which numpy lacks, the mirror's layer on whole requests.
    """
    model = model_of(6, LENGTHS, WIDE)
    layers, caches = layers_of(model, dtype=dtype), caches_of(model, dtype=dtype)
    story = tell(model, layers, caches, STEPS)
    for i, layer in enumerate(layers):
        weights = layer.weights()
        for name, x in model.x.items():
            got, picks = (torch.cat(parts_of(story, name, i, part)) for part in ("outputs", "topk"))
            got = got.to(kind_of(layer))
            rows = torch.tensor(x[: len(got)]).to(kind_of(layer))
            exact = whole(ref.mla_attention_layer, to_numpy(rows, "float64"), to_numpy(weights, "float64"), picks)
            if dtype == "float32":
                constants = oracle_config(WIDE)
                plain = torch.tensor(
                    plain_layer(
                        rows.numpy(), oracle_weights(to_numpy(weights, dtype)), constants, as_sets(picks.numpy())
                    )
                )
            else:
                plain = whole(mirror.mla_attention_layer, rows, weights, picks)
            assert_within_budget(got, exact, plain, f"layer {i} {name}")


def parts_of(story: list[Any], name: str, layer: int, part: str) -> list[torch.Tensor]:
    """A request's rows of every step, in order."""
    found = []
    for step in story:
        ends = np.cumsum([0, *(end - start for start, end in step.rows.values())])
        if name in step.rows:
            at = list(step.rows).index(name)
            found.append(torch.tensor(getattr(step, part)[layer][ends[at] : ends[at + 1]]))
    return found


def whole(function: Callable[..., Any], x: Any, weights: Any, picks: torch.Tensor, config: MLAConfig = WIDE) -> Any:
    """A request's rows in one step of a layer of either package, given a selection."""
    ints = [np.array(part, np.int32) for part in ([0, len(x)], [len(x)], [[0]])]
    batch, given_topk = ref.MLABatch(*ints), picks.numpy()
    shapes = [(1, len(x), width) for width in (config.kv_lora_rank, config.rope_head_dim, config.index_head_dim)]
    cache = ref.MLACache(*(np.zeros(shape) for shape in shapes))
    if isinstance(x, torch.Tensor):
        kind = str(x.dtype).removeprefix("torch.")
        batch, given_topk, cache = to_torch(batch), picks, to_torch(cache, kind)
    return function(x, weights, cache, batch, config, given_topk=given_topk).output


# --- what a layer refuses ---


class World:
    """Layers, caches with two open requests, and a step of one of them."""

    def __init__(self, **built: Any) -> None:
        self.model: Model = model_of(0, {"a": 12, "b": 7})
        self.layers = layers_of(self.model, **built)
        self.caches = caches_of(self.model)
        for name in self.model.x:
            self.caches.open(name)
        self.rows = torch.tensor(self.model.x["a"][:9])
        self.step = mla_step_metadata(self.layers, self.caches, {"a": 9})


@contextmanager
def refused(text: str, *caches: MLACaches, kind: type[Exception] = ContractError) -> Iterator[None]:
    """The block is refused with this type and text, and no tensor or length of these caches changed."""
    before = [(bytes_of(some), [list(cache.lengths) for cache in some]) for some in caches]
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    assert str(caught.value) == text
    assert [(bytes_of(some), [cache.lengths for cache in some]) for some in caches] == before


@pytest.mark.parametrize(
    "change, text",
    [
        ({"config": None}, "config must be of type MLAConfig, got NoneType"),
        ({"layer_idx": -1}, "layer_idx must be an int >= 0, got -1"),
        ({"layer_idx": 0.0}, "layer_idx must be an int >= 0, got float 0.0"),
        ({"parallel": {"enable_dsa_cp": True}}, "parallel must be of type Parallel, got dict"),
        ({"backend": "cann"}, "backend must be of type Backend, got str"),
        ({"dtype": "int8"}, "dtype must be one of 'bfloat16', 'float16', 'float32', 'float64', got 'int8'"),
        ({"kept_keys": "mine"}, "kept_keys must be one of 'all', 'own', got 'mine'"),
    ],
)
def test_a_layer_of_wrong_arguments(change: dict[str, Any], text: str) -> None:
    arguments = {"config": SMALL, "layer_idx": 0, **change}
    with refused(text):
        MLAttention(**arguments)


def test_own_keys_are_refused_with_the_reason() -> None:
    text = (
        "kept_keys must be 'all' in a model, got 'own'; the next chunk and decode attend to all keys, and a rank that "
        "dropped the others' would have nowhere to take them from"
    )
    with refused(text, kind=UnsupportedError):
        MLAttention(SMALL, 0, kept_keys="own")


HEADS = (
    "tp_size must be 1 for a V3.2 model, got 2; its attention has whole weights on every rank: set enable_dsa_cp to "
    "split tokens over these ranks"
)
KEYS = "dsa_cp_key_mode must be 'gather_kv' for a V3.2 model, got {!r}; every rank projects the keys of its own rows"
OUTPUT = (
    "dsa_cp_output_mode must be 'replicated_weight' for a V3.2 model, got {!r}; every rank has the whole output weight"
)


@pytest.mark.parametrize(
    "options, text",
    [
        ({}, HEADS),
        ({"enable_dsa_cp": True}, KEYS.format("replicate")),
        (ON | {"dsa_cp_key_mode": "gather_compressed"}, KEYS.format("gather_compressed")),
        (ON | {"dsa_cp_rows": "scattered", "dsa_cp_key_mode": "gather_hidden"}, KEYS.format("gather_hidden")),
        (ON | {"dsa_cp_output_mode": "all_to_all"}, OUTPUT.format("all_to_all")),
        (ON | {"dsa_cp_output_mode": "gather_weight"}, OUTPUT.format("gather_weight")),
    ],
)
def test_options_that_a_model_cannot_do_name_the_flags(options: dict[str, Any], text: str) -> None:
    """When a layer is built, not at its first step; at one rank like at many where the switch is on."""
    parallel = parallel_of(options, tp=Ranks(None, 2, 1))
    for call in (lambda: check_mla_model(parallel, SMALL), lambda: MLAttention(SMALL, 0, parallel)):
        with refused(text, kind=UnsupportedError):
            call()
    if options:
        with refused(text, kind=UnsupportedError):
            MLAttention(SMALL, 0, parallel_of(options))


def test_options_that_a_model_can_do() -> None:
    """With the switch off nothing is looked at but ranks that split heads; an independent CP group is asked for too."""
    check_mla_model(parallel_of(ON, tp=Ranks(None, 2, 1)), SMALL, backend.get("cann"))
    check_mla_model(parallel_of({"dsa_cp_key_mode": "replicate"}), SMALL)
    apart = {**ON, "enable_dsa_cp": False, "cp_size": 2}
    check_mla_model(parallel_of(apart, cp=Ranks(None, 2, 0)), SMALL)
    with refused(KEYS.format("replicate"), kind=UnsupportedError):
        check_mla_model(parallel_of({"cp_size": 2}, cp=Ranks(None, 2, 0)), SMALL)
    for arguments, text in (
        ((None, SMALL), "parallel must be of type Parallel, got NoneType"),
        ((parallel_of(), None), "config must be of type MLAConfig, got NoneType"),
        ((parallel_of(), SMALL, "cann"), "backend must be of type Backend, got str"),
    ):
        with refused(text):
            check_mla_model(*arguments)


# --- weights ---


def test_assign_refuses() -> None:
    whole = torch.tensor(model_of(1, LENGTHS).weights[1].wq_a)
    layer = MLAttention(SMALL, 1, dtype="float64")
    names = ", ".join(map(repr, layer.held()))
    floats = "bfloat16 or float16 or float32 or float64"
    cases: list[tuple[str, Any, str]] = [
        ("wq", whole, f"name must be one of {names}, got 'wq'"),
        ("wq_a", whole[:4], "wq_a must have shape [7, 9], got [4, 9]; the whole weight"),
        ("wq_a", whole.int(), f"wq_a must have dtype {floats}, got int32; cast wq_a first"),
        ("wq_a", whole.numpy(), "wq_a must be a torch tensor, got ndarray; dsacp_ref is for numpy arrays"),
        ("wkv_b", torch.zeros(24, 8), "wkv_b must have shape [3, 8, 8], got [24, 8]; the whole weight"),
    ]
    for name, tensor, text in cases:
        before = {key: value.clone() for key, value in layer.state_dict().items()}
        with refused(text):
            layer.assign(name, tensor)
        for key, value in layer.state_dict().items():
            assert_same(value, before[key], key)
        assert layer._missing == set(layer.held())


def missing(layer: MLAttention, names: str) -> str:
    """What a forward says of weights that are not there."""
    return (
        f"weights of layer {layer.layer_idx} must be loaded before the first step, got none for {names}; "
        "use dsacp_npu.loading.load_attention"
    )


def test_a_forward_before_loading() -> None:
    world = World()
    layer = MLAttention(SMALL, 0, dtype="float64")
    with refused(missing(layer, ", ".join(sorted(layer.held()))), world.caches):
        layer(world.rows, world.step, world.caches[0])
    for name, weight in named(world.model.weights[0]).items():
        if name not in ("indexer.k_norm_bias", "wkv_b"):
            layer.assign(name, torch.tensor(weight))
    with refused(missing(layer, "indexer.k_norm_bias, wkv_b"), world.caches):
        layer(world.rows, world.step, world.caches[0])


def test_dtypes_of_short_models() -> None:
    """Norms and what weighs the index heads stay float32; the rest is short."""
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        layer = MLAttention(SMALL, 0, dtype=dtype)
        wide = {name for name, weight in layer.named_parameters() if weight.dtype != getattr(torch, dtype)}
        short = {"q_norm", "kv_norm", "indexer.k_norm", "indexer.k_norm_bias", "indexer.weights_proj"}
        assert wide == (short if dtype in ("bfloat16", "float16") else set())
        assert {weight.dtype for weight in layer.parameters()} <= {getattr(torch, dtype), torch.float32}


def test_a_state_dict_goes_round() -> None:
    """What it holds counts as loaded, in a layer alone and in a model around it; the outputs are the same bits."""
    world = World()
    for source in world.layers:
        made = [MLAttention(SMALL, source.layer_idx, dtype="float64") for _ in range(3)]
        made[0].load_state_dict(source.state_dict())
        around = torch.nn.ModuleDict({"0": torch.nn.ModuleDict({"attn": made[1]})})
        around.load_state_dict({f"0.attn.{name}": tensor for name, tensor in source.state_dict().items()})
        made[2].load_state_dict(made[0].state_dict(), assign=True)
        assert set(source.state_dict()) == set(source.held())
        want = source(world.rows, world.step, copied(world.caches[source.layer_idx].tensors))
        for layer in made:
            assert not layer._missing
            assert_same(layer(world.rows, world.step, copied(world.caches[source.layer_idx].tensors)), want)


def test_a_partial_state_dict_marks_only_what_it_holds() -> None:
    source = World().layers[1]
    part = {name: tensor for name, tensor in source.state_dict().items() if name != "indexer.wk"}
    alone, inside = (MLAttention(SMALL, 1, dtype="float64") for _ in range(2))
    alone.load_state_dict(part, strict=False)
    around = torch.nn.ModuleDict({"attn": inside})
    around.load_state_dict({f"attn.{name}": tensor for name, tensor in part.items()}, strict=False)
    for layer in (alone, inside):
        assert layer._missing == {"indexer.wk"}
        with pytest.raises(RuntimeError, match="size mismatch for indexer"):
            layer.load_state_dict({"indexer.wk": torch.zeros(2, 2)}, strict=False)
        assert layer._missing == {"indexer.wk"}
        layer.load_state_dict(source.state_dict())
        assert not layer._missing


# --- a forward ---


def test_rows_that_are_not_the_steps() -> None:
    world = World()
    hint = "the rows that the step was made for"
    cases = [
        (world.rows[:8], f"hidden_states must have shape [9, 9], got [8, 9]; {hint}"),
        (world.rows[:, :7], f"hidden_states must have shape [9, 9], got [9, 7]; {hint}"),
        (world.rows.float(), "hidden_states must have dtype float64, got float32; cast hidden_states first"),
        (world.rows.numpy(), "hidden_states must be a torch tensor, got ndarray; dsacp_ref is for numpy arrays"),
    ]
    for layer in world.layers:
        for rows, text in cases:
            with refused(text, world.caches):
                layer(rows, world.step, world.caches[layer.layer_idx])
        with refused("step must be of type MLAStep, got NoneType", world.caches):
            layer(world.rows, None, world.caches[layer.layer_idx])


def test_caches_that_are_not_the_steps_or_the_layers() -> None:
    world = World()
    layer, others = world.layers[0], caches_of(world.model, num_tokens=30)
    with refused("cache must be of type MLACache, got NoneType", world.caches):
        layer(world.rows, world.step, None)
    blocks = [len(caches[0].tensors.latent_cache) for caches in (world.caches, others)]
    text = (
        f"cache must have blocks ({blocks[0]}, 4), as the step's, got ({blocks[1]}, 4); "
        "make the step with the caches that it will run on"
    )
    with refused(text, world.caches, others):
        layer(world.rows, world.step, others[0])
    with refused("cache must be of layer 0, got that of layer 1; take caches[0]", world.caches):
        layer(world.rows, world.step, world.caches[1])
    short = caches_of(world.model, dtype="float32")
    with refused("latent_cache must have dtype float64, got float32; cast latent_cache first", short):
        layer(world.rows, world.step, short[0])
    tensors: MLACache = world.caches[0].tensors
    text = f"cache.index_cache must have {blocks[0]} blocks of 4, got {blocks[0] - 1} blocks of 4; "
    with refused(text + "one block table serves all parts", world.caches):
        layer(world.rows, world.step, tensors._replace(index_cache=tensors.index_cache[1:]))


def test_a_selection_that_cannot_be() -> None:
    world = World()
    nothing = torch.full((9, 3), -1, dtype=torch.int32)
    future, twice = nothing.clone(), nothing.clone()
    future[3, 1], twice[8, :2] = 4, 0
    hint = "tokens count within the request, and none after the query is visible"
    cases = [
        (nothing[:8], "given_topk must have shape [9, 3], got [8, 3]; one row a token of x"),
        (nothing.long(), "given_topk must have dtype int32, got int64; cast given_topk first"),
        (future, f"topk_indices must be -1 or below the 4 tokens that query 3 sees, got 4; {hint}"),
        (twice, "topk_indices must be distinct in a row, got token 0 twice; query 8"),
    ]
    for given_topk, text in cases:
        with refused(text, world.caches):
            world.layers[1](world.rows, world.step, world.caches[1], given_topk=given_topk)


def gone(layer: int, start: int, held: int, name: str = "a") -> str:
    """What a layer says of a request that goes on from elsewhere."""
    return (
        f"state of request {name!r} must hold {start} tokens in layer {layer}, got {held}: state missing; take lengths "
        "from MLACaches.planned; after a forward that stopped, roll the request back or reset it"
    )


@pytest.mark.parametrize("way", ["roll_back", "reset"])
def test_a_forward_that_stopped_half_way(way: str) -> None:
    """A step run twice in a layer, and one that the other layer left out; and the ways back."""
    world = World()
    world.layers[0](world.rows, world.step, world.caches[0])
    with refused(gone(0, 0, 9), world.caches):
        world.layers[0](world.rows, world.step, world.caches[0])
    text = (
        "request 'a' must have one length in all layers, got 0 in layers [1], 9 in layers [0]; "
        "a forward stopped half-way: roll_back(request, 0), or reset(request)"
    )
    with refused(text, world.caches):
        mla_step_metadata(world.layers, world.caches, {"a": 1})
    world.caches.roll_back("a", 0) if way == "roll_back" else world.caches.reset("a")
    assert_told([tell(world.model, world.layers, world.caches, [{"b": 3, "a": 9}, {"a": 3}])], world.model)


def test_a_step_that_goes_on_from_tokens_that_are_not_there() -> None:
    """An engine's own lengths, told to the layer: the one that was left out finds out, by the request's name."""
    world = World()
    world.layers[0](world.rows, world.step, world.caches[0])
    world.caches[1].advance_to(world.step.progress)
    step = mla_step_metadata(world.layers, world.caches, {"b": 0, "a": 1})
    world.caches[1].roll_back(world.step.progress[0].slot, 4)
    with refused(gone(1, 9, 4), world.caches):
        world.layers[1](world.rows[:1], step, world.caches[1])


def test_a_step_whose_room_was_given_up() -> None:
    """Its blocks may be another request's by now: run as planned, it would write over that request's keys."""
    model = model_of(12, {"a": 4, "b": 4})
    layers, caches = layers_of(model), caches_of(model)
    for request in model.x:
        caches.open(request)
    stale = mla_step_metadata(layers, caches, {"a": 4})
    current = mla_step_metadata(layers, caches, {"b": 4})
    hint = "run a step, or give it up, before the next one over these caches is planned"
    with refused(f"step must be of plan 2, the last over these caches, got 1; {hint}", caches):
        layers[0](torch.tensor(model.x["a"]), stale, caches[0])
    for i, layer in enumerate(layers):
        found = layer(torch.tensor(model.x["b"]), current, caches[i])
        assert_double(found.numpy(), defined(model)[i]["b"][0], f"layer {i}")


# --- devices ---


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_a_forward_asks_no_device_for_a_value(codes: dict[str, bool]) -> None:
    """On the meta device there is none to ask for; what must be known is known on the host."""
    model = model_of(9, {"a": 12}, CODED)
    place = {"device": "meta", "dtype": "bfloat16"}
    layers, caches = layers_of(model, **place), caches_of(model, **place, **codes)
    for count, padding in ((9, 0), (1, 2), (2, 0)):
        step, stream, _ = next_step(model, layers, caches, {"a": count}, padding)
        for i, layer in enumerate(layers):
            found = layer.attend(held_rows(stream, step, layer), step, caches[i])
            assert (found.output.device.type, found.output.shape) == ("meta", (count + padding, SMALL.hidden_size))
            assert found.topk_indices.shape == (count + padding, SMALL.index_topk)
    assert caches.num_computed_tokens("a") == 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no CUDA device")
@pytest.mark.parametrize("codes", CODES[1:], ids=str)
def test_codes_on_the_device(codes: dict[str, bool]) -> None:
    model = model_of(0, LENGTHS, CODED)
    story = tell(model, layers_of(model, device="cuda"), caches_of(model, device="cuda", **codes), STEPS)
    assert_told([story], model, **codes)


# --- a backend ---


def counted_backend(name: str, calls: set[str]) -> Backend:
    """The backend of this name, each of whose calls is noted."""

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            calls.add(name)
            return function(*args, **options)

        return counting

    functions = backend.get(name).functions
    return Backend("counted", {name: counted(name, function) for name, function in functions.items()})


CALLED = {"latent_attention", "lightning_indexer", "apply_rope", "scattered_rows_"}


def test_a_backends_functions_are_called() -> None:
    """Those that it has; the rest is the mirror's. The outputs are the same bits."""
    calls: set[str] = set()
    model = model_of(11, LENGTHS)
    found = []
    for chosen in (None, counted_backend("torch", calls)):
        story = tell(model, layers_of(model, backend=chosen), caches_of(model), STEPS)
        found.append([(step.outputs, step.topk) for step in story])
    assert_same(found[1], found[0])
    assert calls == CALLED | {"apply_half_rope", "hadamard", "rms_norm"}


# Sizes that an Ascend NPU's operators take; every token is chosen, because in bfloat16 a choice is another choice.
LEGAL = replace(
    SMALL,
    hidden_size=64,
    num_heads=4,
    q_lora_rank=32,
    kv_lora_rank=512,
    nope_head_dim=16,
    rope_head_dim=64,
    v_head_dim=16,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=2048,
)


@pytest.mark.parametrize("codes", [{}, {"int8_index_cache": True}], ids=str)
def test_the_operators_call_path(codes: dict[str, bool]) -> None:
    """Emulated: prefill, a chunk beside a second request, decode, within the error of the same module on torch."""
    steps = [{"a": 40}, {"b": 9, "a": 5}, {"a": 1, "b": 1}, {"b": 2, "a": 14}]
    model = model_of(13, {"a": 60, "b": 12}, LEGAL)
    with installed() as done:
        if not done:
            pytest.skip("the real library is here: these tests compare against the emulator")
        stories, calls = [], set[str]()
        for chosen in (counted_backend("cann", calls), None):
            layers = layers_of(model, backend=chosen, dtype="bfloat16")
            stories.append(tell(model, layers, caches_of(model, dtype="bfloat16", block_size=16, **codes), steps))
    assert calls == CALLED
    for i, layer in enumerate(layers):
        for name, x in model.x.items():
            (got, plain), (picks, same) = (
                [torch.cat(parts_of(story, name, i, part)) for story in stories] for part in ("outputs", "topk")
            )
            assert as_sets(picks.numpy()) == as_sets(same.numpy()) == [set(range(p + 1)) for p in range(len(x))]
            rows = to_numpy(torch.tensor(x).bfloat16(), "float64")
            exact = whole(ref.mla_attention_layer, rows, to_numpy(layer.weights(), "float64"), picks, LEGAL)
            assert_within_budget(got.bfloat16(), exact, plain.bfloat16(), f"layer {i} {name}")
