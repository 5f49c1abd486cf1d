"""What the module and its steps refuse: by type and by full text, and nothing is written when they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsacp_npu import backend
from dsacp_npu._geometry import moved
from dsacp_npu._layer_parts import copied
from dsacp_npu._ranks import Ranks
from dsacp_npu.caches import Caches
from dsacp_npu.module import DSAttention
from dsacp_npu.parallel import parallel_of
from dsacp_npu.quant import QuantizedWeight, quantized_weight
from dsacp_npu.step import metadata_of_batches, step_metadata
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.compare import assert_double, assert_same
from tests.layer_strategies import SMALL
from tests.mirror.common import tensors_of
from tests.module.worlds import FOUR_GROUPS, Model, caches_of, due, layers_of, model_of

LENGTHS = {"a": 12, "b": 7}
ON = {"enable_dsa_cp": True}


class World:
    """Layers, caches with two open requests, and a step of one of them."""

    def __init__(self, **built: Any) -> None:
        self.model: Model = model_of(0, LENGTHS)
        self.layers = layers_of(self.model, **built)
        self.caches: Caches = caches_of(self.model)
        for name in LENGTHS:
            self.caches.open(name)
        self.rows = torch.tensor(self.model.x["a"][:9])
        self.step = step_metadata(self.layers, self.caches, {"a": 9})


@contextmanager
def refused(text: str, *caches: Caches, kind: type[Exception] = ContractError) -> Iterator[None]:
    """The block is refused with this type and text, and no tensor or length of these caches changed."""
    before = [(copied(cache.tensors), list(cache.lengths)) for some in caches for cache in some]
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    assert str(caught.value) == text
    after = [(cache.tensors, cache.lengths) for some in caches for cache in some]
    for (tensors, lengths), (old_tensors, old_lengths) in zip(after, before, strict=True):
        assert_same(tensors_of(tensors), tensors_of(old_tensors))
        assert lengths == old_lengths


# --- building a layer ---


@pytest.mark.parametrize(
    "change, text",
    [
        ({"config": None}, "config must be of type AttentionConfig, got NoneType"),
        ({"layer_idx": -1}, "layer_idx must be an int >= 0, got -1"),
        ({"layer_idx": 0.0}, "layer_idx must be an int >= 0, got float 0.0"),
        ({"parallel": {"enable_dsa_cp": True}}, "parallel must be of type Parallel, got dict"),
        ({"backend": "cann"}, "backend must be of type Backend, got str"),
        ({"dtype": "int8"}, "dtype must be one of 'bfloat16', 'float16', 'float32', 'float64', got 'int8'"),
        (
            {"dtype": torch.bfloat16},
            "dtype must be one of 'bfloat16', 'float16', 'float32', 'float64', got torch.bfloat16",
        ),
        ({"w8a8": "False"}, "w8a8 must be true or false, got str 'False'"),
    ],
)
def test_a_layer_of_wrong_arguments(change: dict[str, Any], text: str) -> None:
    arguments = {"config": SMALL, "layer_idx": 0, **change}
    with refused(text):
        DSAttention(**arguments)


def test_a_layer_that_ranks_cannot_run() -> None:
    """`check_model` refuses when a layer is built, not at its first step."""
    text = "tp_size must divide num_heads 4 and o_groups 2, got 4; a rank keeps whole groups of heads"
    with refused(text, kind=UnsupportedError):
        DSAttention(SMALL, 0, parallel_of(tp=Ranks(None, 4, 0)))
    on = parallel_of({**ON, "dsa_cp_key_mode": "gather_kv"}, tp=Ranks(None, 2, 0))
    text = (
        "dsa_cp_key_mode 'gather_kv' needs projected_rows, pooled_entries, updated_state_ of a backend, got backend "
        "'cann' without projected_rows, pooled_entries, updated_state_; use dsa_cp_key_mode='replicate'"
    )
    with refused(text, kind=UnsupportedError):
        DSAttention(SMALL, 1, on, backend=backend.get("cann"))


# --- weights ---


def test_assign_refuses() -> None:
    model = model_of(1, LENGTHS)
    layer, coded = (DSAttention(FOUR_GROUPS, 1, dtype="float64", w8a8=w8a8) for w8a8 in (False, True))
    whole = torch.tensor(model.weights[1].wq_a)
    codes = quantized_weight(whole)
    names = ", ".join(map(repr, layer.held()))
    cases: list[tuple[DSAttention, str, Any, str]] = [
        (layer, "wq", whole, f"name must be one of {names}, got 'wq'"),
        (layer, "wq_a", whole[:4], "wq_a must have shape [5, 8], got [4, 8]; this rank's part"),
        (
            layer,
            "wq_a",
            whole.int(),
            "wq_a must have dtype bfloat16 or float16 or float32 or float64, got int32; cast wq_a first",
        ),
        (layer, "wq_a", whole.numpy(), "wq_a must be a torch tensor, got ndarray; dsacp_ref is for numpy arrays"),
        (layer, "wq_a", codes, "wq_a must be a float tensor, got QuantizedWeight; build the layer with w8a8=True"),
        (
            coded,
            "wq_a",
            whole,
            "wq_a must be a QuantizedWeight, got Tensor; use dsacp_npu.quant.quantized_weight",
        ),
        (
            coded,
            "wq_a",
            codes._replace(values=codes.values.short()),
            "wq_a.values must have dtype int8, got int16; cast wq_a.values first",
        ),
        (
            coded,
            "wq_a",
            codes._replace(values=codes.values[:, :4]),
            "wq_a.values must have shape [5, 8], got [5, 4]; this rank's part",
        ),
        (
            coded,
            "wq_a",
            codes._replace(scales=codes.scales[:4]),
            "wq_a.scales must have shape [5], got [4]; one scale a channel",
        ),
        (
            coded,
            "wq_a",
            codes._replace(scales=codes.scales.double()),
            "wq_a.scales must have dtype float32, got float64; cast wq_a.scales first",
        ),
        # Norms and what pools stay floats where matrices are int8.
        (
            coded,
            "q_norm",
            QuantizedWeight(codes.values, codes.scales),
            "q_norm must be a float tensor, got QuantizedWeight; build the layer with w8a8=True",
        ),
    ]
    for built, name, tensor, text in cases:
        before = {key: value.clone() for key, value in built.state_dict().items()}
        with refused(text):
            built.assign(name, tensor)
        for key, value in built.state_dict().items():
            assert_same(value, before[key], key)
        assert built._missing == set(built.held())


def missing(layer: DSAttention, names: str) -> str:
    """What a forward says of weights that are not there."""
    return (
        f"weights of layer {layer.layer_idx} must be loaded before the first step, got none for {names}; "
        "use dsacp_npu.loading.load_attention"
    )


def test_a_forward_before_loading() -> None:
    world = World()
    layer = DSAttention(FOUR_GROUPS, 0, dtype="float64")
    text = missing(layer, "attn_sink, kv_norm, q_norm, wkv, wo_a, wo_b, wq_a, wq_b")
    with refused(text, world.caches):
        layer(world.rows, world.step, world.caches[0])
    for name in ("attn_sink", "q_norm", "wkv", "wo_a", "wo_b", "wq_a", "wq_b"):
        layer.assign(name, torch.tensor(getattr(world.model.weights[0], name)))
    with refused(missing(layer, "kv_norm"), world.caches):
        layer(world.rows, world.step, world.caches[0])


def loaded(layer: DSAttention) -> bool:
    """Whether a forward would run."""
    return not layer._missing


@pytest.mark.parametrize("w8a8", [False, True])
def test_a_state_dict_goes_round(w8a8: bool) -> None:
    """What it holds counts as loaded, in a layer alone and in a model around it; the outputs are the same bits."""
    world = World(w8a8=w8a8)
    for source in world.layers:
        made = [DSAttention(FOUR_GROUPS, source.layer_idx, dtype="float64", w8a8=w8a8) for _ in range(3)]
        made[0].load_state_dict(source.state_dict())
        around = torch.nn.ModuleDict({"0": torch.nn.ModuleDict({"attn": made[1]})})
        around.load_state_dict({f"0.attn.{name}": tensor for name, tensor in source.state_dict().items()})
        made[2].load_state_dict(made[0].state_dict(), assign=True)
        want = source(world.rows, world.step, copied(world.caches[source.layer_idx].tensors))
        for layer in made:
            assert loaded(layer)
            assert_same(layer(world.rows, world.step, copied(world.caches[source.layer_idx].tensors)), want)


@pytest.mark.parametrize("w8a8, parts", [(False, ["wq_a"]), (True, ["wq_a.values"]), (True, ["wq_a.scales"])])
def test_a_partial_state_dict_marks_only_what_it_holds(w8a8: bool, parts: list[str]) -> None:
    """Codes without scales are no weight; in a model around the layer every name counted as loaded once."""
    source = World(w8a8=w8a8).layers[1]
    some = {name: tensor for name, tensor in source.state_dict().items() if name not in parts}
    alone, inside = (DSAttention(FOUR_GROUPS, 1, dtype="float64", w8a8=w8a8) for _ in range(2))
    alone.load_state_dict(some, strict=False)
    around = torch.nn.ModuleDict({"attn": inside})
    around.load_state_dict({f"attn.{name}": tensor for name, tensor in some.items()}, strict=False)
    for layer in (alone, inside):
        assert layer._missing == {"wq_a"}
        layer.load_state_dict({name: source.state_dict()[name] for name in parts}, strict=False)
        assert layer._missing == (set() if not w8a8 else {"wq_a"})  # half of a weight is not remembered
        layer.load_state_dict(source.state_dict())
        assert loaded(layer)


def test_a_state_dict_of_other_shapes_marks_nothing_that_it_did_not_load() -> None:
    source = World().layers[0]
    layer = DSAttention(FOUR_GROUPS, 0, dtype="float64")
    wrong = {**source.state_dict(), "wkv": torch.zeros(2, 2)}
    with pytest.raises(RuntimeError, match="size mismatch for wkv"):
        layer.load_state_dict(wrong)
    assert layer._missing == {"wkv"}


# --- a forward ---


def test_rows_that_are_not_the_steps() -> None:
    world = World()
    hint = "the rows that the step was made for"
    cases = [
        (world.rows[:8], f"hidden_states must have shape [9, 8], got [8, 8]; {hint}"),
        (world.rows[:, :7], f"hidden_states must have shape [9, 8], got [9, 7]; {hint}"),
        (world.rows.float(), "hidden_states must have dtype float64, got float32; cast hidden_states first"),
        (world.rows.numpy(), "hidden_states must be a torch tensor, got ndarray; dsacp_ref is for numpy arrays"),
    ]
    for rows, text in cases:
        for layer in world.layers:
            with refused(text, world.caches):
                layer(rows, world.step, world.caches[layer.layer_idx])
    for layer in world.layers:
        with refused("step must be of type StepMetadata, got NoneType", world.caches):
            layer(world.rows, None, world.caches[layer.layer_idx])


def test_caches_that_are_not_the_steps_or_the_layers() -> None:
    """A cache of another layer of the same sizes was written into once."""
    world = World()
    others = caches_of(world.model, num_tokens=30)
    three = Caches(FOUR_GROUPS, [0, 3], num_tokens=19, max_requests=4, block_size=4, cmp_block_size=3, dtype="float64")
    layer = world.layers[0]
    with refused("cache must be of type LayerCache, got NoneType", world.caches):
        layer(world.rows, world.step, None)
    text = (
        "cache must have blocks and state slots [(7, 4), (0, 3), (4,)], as the step's, got [(10, 4), (0, 3), (4,)]; "
        "make the step with the caches that it will run on"
    )
    with refused(text, world.caches, others):
        layer(world.rows, world.step, others[0])
    with refused("cache must be of layer 0, got that of layer 3; take caches[0]", three):
        layer(world.rows, world.step, three[3])
    with refused("cache must be of layer 0, got that of layer 2; take caches[0]", world.caches):
        layer(world.rows, world.step, world.caches[2])
    # An engine's own tensors have no number; those of another ratio do not fit.
    text = "cache.cmp_cache must have shape [num_cmp_blocks, cmp_block_size, 6], got [0, 3, 0]; "
    text += "entries and index keys share a block table"
    with refused(text, world.caches):
        world.layers[1](world.rows, world.step, world.caches[0].tensors)
    short = caches_of(world.model, dtype="float32")
    with refused("cache.swa_cache must have dtype float64, got float32; cast cache.swa_cache first", short):
        layer(world.rows, world.step, short[0])


def test_a_step_without_the_layers_ratio() -> None:
    world = World()
    step = step_metadata(world.layers[:1], world.caches, {"a": 9})
    text = "step must be made for layers of compress_ratio 4, got ratios [1]; "
    text += "hand all layers of the model to step_metadata"
    with refused(text, world.caches):
        world.layers[1](world.rows, step, world.caches[1])


def test_a_selection_that_cannot_be() -> None:
    """Wrong entries were found only after the caches had been written."""
    world = World()
    nothing = torch.full((9, 2), -1, dtype=torch.int32)
    with refused("given_topk must be None in a layer without an indexer, got a selection", world.caches):
        world.layers[2](world.rows, world.step, world.caches[2], given_topk=nothing)
    future, twice = nothing.clone(), nothing.clone()
    future[3, 1], twice[8] = 1, 0
    hint = "entries count within the request, and only complete ones are visible"
    cases = [
        (nothing[:8], "given_topk must have shape [9, 2], got [8, 2]; one row a token of x"),
        (nothing.long(), "given_topk must have dtype int32, got int64; cast given_topk first"),
        (future, f"topk_indices must be -1 or below the 1 entries that query 3 sees, got 1; {hint}"),
        (twice, "topk_indices must be distinct in a row, got entry 0 twice; query 8"),
    ]
    for given_topk, text in cases:
        with refused(text, world.caches):
            world.layers[1](world.rows, world.step, world.caches[1], given_topk=given_topk)


def gone(layer: int, start: int, held: int, name: str = "a") -> str:
    """What a layer says of a request that goes on from elsewhere."""
    return (
        f"state of request {name!r} must hold {start} tokens in layer {layer}, got {held}: state missing; take lengths "
        "from Caches.batches; after a forward that stopped, roll the request back or reset it"
    )


def test_a_request_whose_state_is_missing() -> None:
    """A step run twice; one that a layer left out; and the way back."""
    world = World()
    for layer in world.layers[:2]:
        layer(world.rows, world.step, world.caches[layer.layer_idx])
    with refused(gone(0, 0, 9), world.caches):
        world.layers[0](world.rows, world.step, world.caches[0])
    text = (
        "request 'a' must have one length in all layers, got 0 in layers [2], 9 in layers [0, 1]; "
        "a forward stopped half-way: roll_back(request, 0), or reset(request)"
    )
    with refused(text, world.caches):
        step_metadata(world.layers, world.caches, {"a": 1})
    # With an engine's own lengths nothing agrees on them before: the layer that was left out finds out.
    ahead = caches_of(world.model)
    ahead.open("a")
    for batch in [ahead.batches({"a": 9})]:
        ahead.advance(batch[1])
    tensors = {cache.layer_idx: cache.tensors for cache in ahead}
    step = metadata_of_batches(world.layers, tensors, ahead.batches({"a": 1}), requests=("a",))
    with refused(gone(2, 9, 0), world.caches):
        world.layers[2](world.rows[:1], step, world.caches[2])
    world.caches.roll_back("a", 0)
    step = step_metadata(world.layers, world.caches, {"a": 9})
    for layer in world.layers:
        layer(world.rows, step, world.caches[layer.layer_idx])
    assert world.caches.num_computed_tokens("a") == 9


# --- steps ---


def test_layers_that_do_not_belong_together() -> None:
    world = World()
    first = world.layers[0]
    hint = "build all layers alike"
    other_config = DSAttention(replace(FOUR_GROUPS, index_topk=3), 1, dtype="float64")
    other_backend = DSAttention(FOUR_GROUPS, 1, backend=backend.get("cann"), dtype="float64")
    other_parallel = DSAttention(FOUR_GROUPS, 1, parallel_of(ON, tp=Ranks(None, 2, 0)), dtype="float64")
    cases: list[tuple[Any, str]] = [
        ([], "layers must hold at least one attention layer, got none; all layers that run the step"),
        (None, "layers must hold at least one attention layer, got NoneType; all layers that run the step"),
        ([first, 3], "layers must be of type DSAttention, got int"),
        ([first, other_config], f"layers must share one config, got two, in layer 1 and layer 0; {hint}"),
        ([first, other_backend], f"layers must share one backend, got two, in layer 1 and layer 0; {hint}"),
        ([first, other_parallel], f"layers must share one parallel, got two, in layer 1 and layer 0; {hint}"),
    ]
    tensors = {cache.layer_idx: cache.tensors for cache in world.caches}
    batches = world.caches.batches({"a": 9})
    for layers, text in cases:
        with refused(text, world.caches):
            step_metadata(layers, world.caches, {"a": 9})
        with refused(text, world.caches):
            metadata_of_batches(layers, tensors, batches)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"caches": {}}, "caches must be of type Caches, got dict"),
        ({"new_tokens": {"c": 1}}, "request must be one of the 2 open ones, got 'c'; open it first"),
        ({"new_tokens": {"a": -1}}, "new_tokens['a'] must be an int >= 0, got -1"),
        ({"num_input_tokens": 8}, "num_input_tokens must be an int >= 9, got 8"),
        ({"num_input_tokens": True}, "num_input_tokens must be an int >= 9, got bool True"),
        ({"decode_query_len": 0}, "decode_query_len must be an int >= 1, got 0"),
        (
            {"num_slots": 0},
            "num_slots must be an int in [1, 4], got 0; the step has 1 requests, and max_requests 4 state slots",
        ),
        (
            {"max_seq_len": 8},
            "max_seq_len must be an int in [9, 19], got 8; the longest request has 9 tokens, and num_tokens is 19",
        ),
    ],
)
@pytest.mark.parametrize("options", [{}, ON], ids=["off", "on"])
def test_a_step_of_wrong_arguments(options: dict[str, Any], arguments: dict[str, Any], text: str) -> None:
    world = World(parallel=parallel_of(options, tp=Ranks(None, 2, 0)))
    given = {"caches": world.caches, "new_tokens": {"a": 9}, **arguments}
    with refused(text, world.caches):
        step_metadata(world.layers, **given)


def test_an_engines_batches_that_do_not_fit() -> None:
    """Each would have led a layer to rows that are not the request's."""
    world = World()
    batches = world.caches.batches({"a": 9, "b": 3})
    tensors = {cache.layer_idx: cache.tensors for cache in world.caches}
    meta = torch.device("meta")

    def changed(ratio: int, **parts: Any) -> dict[int, Any]:
        return {**batches, ratio: batches[ratio]._replace(**parts)}

    def ints(*values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    cases: list[tuple[Any, str]] = [
        ({1: batches[1]}, "batches must hold compress_ratio 4, got [1]; one LayerBatch a ratio"),
        ({**batches, 4: None}, "batch must be of type LayerBatch, got NoneType"),
        (
            changed(4, seq_lens=ints(8, 3), query_start_loc=ints(0, 8, 11)),
            "batches must have the same query_start_loc in every ratio, got several; "
            "all layers of a step run the same tokens",
        ),
        (
            changed(8, seq_lens=ints(10, 3)),
            "batches must have the same seq_lens in every ratio, got several; all layers of a step run the same tokens",
        ),
        (
            changed(1, state_indices=ints(1, 1)),
            "batch.state_indices must be distinct and in [0, 4), got [1, 1]; one slot a request",
        ),
        (
            changed(1, state_indices=ints(1, 4)),
            "batch.state_indices must be distinct and in [0, 4), got [1, 4]; one slot a request",
        ),
        (
            changed(4, cmp_block_table=batches[4].cmp_block_table[:1]),
            "batch.cmp_block_table must have shape [2, max_cmp_blocks], got [1, 1]",
        ),
    ]
    for given, text in cases:
        with refused(text, world.caches):
            metadata_of_batches(world.layers, tensors, given)
    text = "caches must hold layer 1, got [0]; one LayerCache a layer"
    with refused(text, world.caches):
        metadata_of_batches(world.layers, {0: tensors[0]}, batches)
    text = (
        "batch.query_start_loc must be a CPU tensor, got a tensor on meta; plan on the CPU, from the lengths that the "
        "scheduler holds there, and move the result"
    )
    with refused(text, world.caches, kind=UnsupportedError):
        metadata_of_batches(world.layers, tensors, {ratio: moved(batch, meta) for ratio, batch in batches.items()})


@pytest.mark.parametrize("options", [{}, ON], ids=["off", "on"])
def test_tables_that_lead_nowhere(options: dict[str, Any]) -> None:
    """A window or an entry whose block is -1, or not in the cache: refused before anything is sent or written."""
    world = World(parallel=parallel_of(options, tp=Ranks(None, 2, 0)))
    batches = world.caches.batches({"a": 9, "b": 3})
    tensors = {cache.layer_idx: cache.tensors for cache in world.caches}
    unnamed = (
        "block_table must name a block for row 0 of request 0, got -1; the used part of a table holds block ids only"
    )
    beyond = "slots must be -1 or in [0, {}), got {}; the cache has no such row"
    cases = [
        (1, "swa_block_table", -1, unnamed),
        (1, "swa_block_table", 99, beyond.format(28, 99 * 4)),
        (4, "cmp_block_table", -1, unnamed),
        (4, "cmp_block_table", 99, beyond.format(12, 99 * 3)),
    ]
    for ratio, name, block, text in cases:
        table = getattr(batches[ratio], name).clone()
        table[0, 0] = block
        with refused(text, world.caches):
            metadata_of_batches(world.layers, tensors, {**batches, ratio: batches[ratio]._replace(**{name: table})})


def test_a_step_whose_room_was_given_up() -> None:
    """Its blocks may be another request's by now: run as planned, it would write over that request's keys."""
    model = model_of(12, {"a": 4, "b": 4})
    layers, caches = layers_of(model), caches_of(model)
    for request in model.x:
        caches.open(request)
    stale = step_metadata(layers, caches, {"a": 4})
    current = step_metadata(layers, caches, {"b": 4})
    hint = "run a step, or give it up, before the next one over these caches is planned"
    with refused(f"step must be of plan 2, the last over these caches, got 1; {hint}", caches):
        layers[0](torch.tensor(model.x["a"]), stale, caches[0])
    outputs = [layer(torch.tensor(model.x["b"]), current, caches[layer.layer_idx]) for layer in layers]
    for layer, (got, want) in enumerate(zip(outputs, due(model, [{"b": 4}])[0], strict=True)):
        assert_double(got.numpy(), want, f"layer {layer}")
