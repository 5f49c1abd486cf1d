"""A V3.2 step's metadata: what is split, who holds which rows, and what is refused before anything is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsacp_npu import backend
from dsacp_npu._geometry import moved
from dsacp_npu._ranks import Ranks
from dsacp_npu.mla_layer import MLABatch
from dsacp_npu.mla_module import MLAttention
from dsacp_npu.mla_step import MLAStep, mla_metadata_of_batch, mla_step_metadata
from dsacp_npu.parallel import Parallel, parallel_of
from dsacp_npu.partition import partition_tokens
from dsacp_npu.rows import gathered_rows, last_rows, own_rows, split_experts
from dsacp_ref.prefill import step_split
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_same
from tests.mla_strategies import SMALL
from tests.module.mla_worlds import CODED, caches_of, layers_of, model_of
from tests.module.test_mla_module import ON, World, refused
from tests.strategies import EVERY_SPLIT


def parallels(size: int = 2, **options: Any) -> list[Parallel]:
    """Every rank's place, zigzag unless told otherwise; nobody talks to anybody while a step is made."""
    return [parallel_of({**ON, "prefill_cp_mode": "zigzag", **options}, tp=Ranks(None, size, r)) for r in range(size)]


def steps_of(new_tokens: dict[str, int], computed: dict[str, int], places: list[Parallel], **options: Any) -> list[Any]:
    """Every rank's step of requests that have so many tokens already."""
    model, found = model_of(0, {"a": 30, "b": 30, "c": 30}), []
    for parallel in places:
        caches = caches_of(model)
        for name in new_tokens:
            caches.open(name)
        planned = caches.planned(computed)
        for cache in caches:
            cache.advance_to(planned.progress)
        found.append(mla_step_metadata(layers_of(model, parallel), caches, new_tokens, **options))
    return found


# --- what is split ---


@pytest.mark.parametrize(
    "new_tokens, computed, options, splits",
    [
        ({"a": 4}, {}, {}, True),
        ({"a": 3}, {}, {}, False),  # fewer than two blocks a rank
        ({"a": 3, "b": 3}, {}, {}, False),
        ({"a": 3, "b": 4}, {}, {}, True),
        ({"a": 2}, {}, {"prefill_cp_mode": "round_robin"}, True),
        ({"a": 1}, {}, {"prefill_cp_mode": "round_robin"}, False),
        ({"a": 1, "b": 1}, {}, {"prefill_cp_mode": "round_robin"}, True),
        ({"a": 1, "b": 1}, {"a": 5, "b": 5}, {"prefill_cp_mode": "round_robin"}, False),  # decode
        ({"a": 1, "b": 8}, {"a": 5}, {}, True),
        ({"a": 1, "b": 8}, {"a": 5}, {"dsa_cp_mixed": "off"}, False),
        ({"a": 8, "b": 0}, {"a": 5}, {}, True),
        ({"a": 0, "b": 0}, {}, {}, False),
        ({"a": 8, "b": 8}, {}, {"dsa_cp_profile": "none"}, True),
    ],
)
def test_what_a_step_splits(
    new_tokens: dict[str, int], computed: dict[str, int], options: dict[str, Any], splits: bool
) -> None:
    """As `step_split` says, on all ranks alike."""
    places = parallels(**options)
    done = [computed.get(name, 0) for name in new_tokens]
    assert (step_split(list(new_tokens.values()), done, 2, places[0].options) is not None) == splits
    for step in steps_of(new_tokens, computed, places):
        assert step.splits is splits
        assert (step.partition is not None) == splits
    off = steps_of(new_tokens, computed, [parallel_of()])[0]
    assert not off.splits


def test_how_long_a_decode_is() -> None:
    for length, splits in ((1, True), (3, True), (4, False), (9, False)):
        for step in steps_of({"a": 4}, {"a": 9}, parallels(), decode_query_len=length):
            assert step.splits is splits


@pytest.mark.parametrize("rows", ["full", "scattered"])
@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_rows_and_positions(split: str, rows: str) -> None:
    """Which token a row holds, and where that stands in its request; -1 in pad rows."""
    size, new_tokens, computed = 3, {"a": 13, "b": 0, "c": 9}, {"a": 4, "c": 2}
    places = parallels(size, prefill_cp_mode=split, dsa_cp_rows=rows)
    steps: list[MLAStep] = steps_of(new_tokens, computed, places)
    positions = [*range(4, 17), *range(2, 11)]
    partition = partition_tokens(torch.tensor([0, 13, 13, 22], dtype=torch.int32), size, split=split)
    held = []
    for rank, step in enumerate(steps):
        assert step.splits
        assert (step.num_tokens, step.requests) == (22, ("a", "b", "c"))
        assert step.query_start_loc.tolist() == [0, 13, 13, 22]
        assert_same(step.partition, partition)
        tokens = step.token_indices.tolist()
        assert step.num_rows == len(tokens)
        assert tokens == (partition.token_indices[rank].tolist() if rows == "scattered" else list(range(22)))
        assert step.positions.tolist() == [positions[token] if token >= 0 else -1 for token in tokens]
        held += tokens
    assert sorted(token for token in held if token >= 0) == sorted([*range(22)] * (1 if rows == "scattered" else size))


def test_padded_streams() -> None:
    for step in steps_of({"a": 5}, {"a": 9}, parallels(prefill_cp_mode="round_robin"), num_input_tokens=8):
        assert (step.num_rows, step.num_tokens, step.splits) == (8, 5, True)
        assert step.token_indices.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
        assert step.positions.tolist() == [9, 10, 11, 12, 13, -1, -1, -1]


def test_rows_of_one_device() -> None:
    """The functions around layers take this step as they take V4's."""
    (step,) = steps_of({"a": 4, "b": 0}, {}, [parallel_of()])
    parallel, x = parallel_of(), torch.arange(10.0).reshape(5, 2)
    assert own_rows(x, step).tolist() == x[:4].tolist()
    assert gathered_rows(x[:4], step, parallel).tolist() == x[:4].tolist()
    assert last_rows(x[:4], step, parallel).tolist() == [[6, 7], [0, 0]]
    assert split_experts(x[:4], step, parallel, lambda rows: 2 * rows).tolist() == (2 * x[:4]).tolist()


# --- the first zigzag mode ---


@pytest.mark.parametrize(
    "kept, got",
    [({"dtype": "float32"}, "float32"), ({"dtype": "bfloat16", "fp8": True}, "float8_e4m3fn"), ({}, "float64")],
)
def test_the_profile_keeps_bfloat16_alone(kept: dict[str, Any], got: str) -> None:
    model = model_of(0, {"a": 9}, CODED)
    caches = caches_of(model, **kept)
    caches.open("a")
    text = (
        f"kv_cache_dtype must be 'bfloat16' when dsa_cp_profile is 'in_seq_split', got {got!r}; "
        "prefill_cp_mode='round_robin' with dsa_cp_profile='none' has no such limits"
    )
    for parallel in parallels(dsa_cp_profile="in_seq_split"):
        layers = layers_of(model, parallel, dtype=kept.get("dtype", "float64"))
        with refused(text, caches, kind=UnsupportedError):
            mla_step_metadata(layers, caches, {"a": 9})
        short = caches_of(model, dtype="bfloat16")
        short.open("a")
        assert mla_step_metadata(layers, short, {"a": 9}).splits
    # Who turns the switch off asks for no profile.
    off = parallel_of({"dsa_cp_profile": "in_seq_split", "prefill_cp_mode": "zigzag"})
    assert not mla_step_metadata(layers_of(model, off), caches, {"a": 9}).splits


def test_the_profile_runs_two_requests_whole() -> None:
    model = model_of(0, {"a": 9, "b": 9})
    caches = caches_of(model, dtype="bfloat16")
    for name in model.x:
        caches.open(name)
    for parallel in parallels(dsa_cp_profile="in_seq_split"):
        layers = layers_of(model, parallel, dtype="bfloat16")
        assert not mla_step_metadata(layers, caches, {"a": 9, "b": 9}).splits
        assert mla_step_metadata(layers, caches, {"a": 9, "b": 0}).splits


# --- refusals ---


def test_layers_that_do_not_belong_together() -> None:
    world = World()
    first, hint = world.layers[0], "build all layers alike"
    other_config = MLAttention(replace(SMALL, index_topk=4), 1, dtype="float64")
    other_backend = MLAttention(SMALL, 1, backend=backend.get("cann"), dtype="float64")
    other_parallel = MLAttention(SMALL, 1, parallels()[0], dtype="float64")
    cases: list[tuple[Any, str]] = [
        ([], "layers must hold at least one attention layer, got none; all layers that run the step"),
        (None, "layers must hold at least one attention layer, got NoneType; all layers that run the step"),
        ([first, 3], "layers must be of type MLAttention, got int"),
        ([first, other_config], f"layers must share one config, got two, in layer 1 and layer 0; {hint}"),
        ([first, other_backend], f"layers must share one backend, got two, in layer 1 and layer 0; {hint}"),
        ([first, other_parallel], f"layers must share one parallel, got two, in layer 1 and layer 0; {hint}"),
    ]
    tensors = {cache.layer_idx: cache.tensors for cache in world.caches}
    batch = world.caches.planned({"a": 9}).batch
    for layers, text in cases:
        with refused(text, world.caches):
            mla_step_metadata(layers, world.caches, {"a": 9})
        with refused(text, world.caches):
            mla_metadata_of_batch(layers, tensors, batch)
    assert mla_step_metadata(torch.nn.ModuleList(world.layers), world.caches, {"a": 9}).num_tokens == 9


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"caches": {}}, "caches must be of type MLACaches, got dict"),
        ({"new_tokens": {"c": 1}}, "request must be one of the 2 open ones, got 'c'; open it first"),
        ({"new_tokens": {"a": -1}}, "new_tokens['a'] must be an int >= 0, got -1"),
        ({"num_input_tokens": 8}, "num_input_tokens must be an int >= 9, got 8"),
        ({"num_input_tokens": True}, "num_input_tokens must be an int >= 9, got bool True"),
        ({"decode_query_len": 0}, "decode_query_len must be an int >= 1, got 0"),
    ],
)
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_a_step_of_wrong_arguments(on: bool, arguments: dict[str, Any], text: str) -> None:
    world = World(parallel=parallels()[0] if on else parallel_of())
    with refused(text, world.caches):
        mla_step_metadata(world.layers, **{"caches": world.caches, "new_tokens": {"a": 9}, **arguments})


def test_zigzag_has_no_padding() -> None:
    world = World(parallel=parallels()[0])
    text = (
        "num_input_tokens must equal the 9 tokens of query_start_loc for split 'zigzag', got 12; rows beyond the last "
        "request belong to no request; only contiguous and round_robin pad the flat stream"
    )
    with refused(text, world.caches):
        mla_step_metadata(world.layers, world.caches, {"a": 9}, num_input_tokens=12)
    assert mla_step_metadata(world.layers, world.caches, {"a": 3}, num_input_tokens=12).num_rows == 12


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_an_engines_batch_that_does_not_fit(on: bool) -> None:
    """Each would have led a layer to rows that are not the request's."""
    world = World(parallel=parallels()[0] if on else parallel_of())
    batch = world.caches.planned({"a": 9, "b": 3}).batch
    tensors = {cache.layer_idx: cache.tensors for cache in world.caches}
    num_rows = len(tensors[0].latent_cache) * 4
    table = batch.block_table

    def with_block(block: int) -> torch.Tensor:
        changed = table.clone()
        changed[0, 1] = block
        return changed

    unnamed = (
        "block_table must name a block for row 4 of request 0, got -1; the used part of a table holds block ids only"
    )
    cases: list[tuple[Any, str]] = [
        (None, "batch must be of type MLABatch, got NoneType"),
        (
            batch._replace(block_table=table[:1]),
            "batch.block_table must have shape [2, max_blocks], got [1, 3]; one row a request",
        ),
        (
            batch._replace(block_table=table.long()),
            "batch.block_table must have dtype int32, got int64; cast batch.block_table first",
        ),
        (batch._replace(block_table=with_block(-1)), unnamed),
        (
            batch._replace(block_table=with_block(99)),
            f"slots must be -1 or in [0, {num_rows}), got 396; the cache has no such row",
        ),
    ]
    for given, text in cases:
        with refused(text, world.caches):
            mla_metadata_of_batch(world.layers, tensors, given)
    with refused("caches must hold layer 1, got [0]; one MLACache a layer", world.caches):
        mla_metadata_of_batch(world.layers, {0: tensors[0]}, batch)
    with refused("cache must be of type MLACache, got PagedMLACache", world.caches):
        mla_metadata_of_batch(world.layers, {0: world.caches[0], 1: tensors[1]}, batch)
    text = (
        "batch.query_start_loc must be a CPU tensor, got a tensor on meta; plan on the CPU, from the lengths that the "
        "scheduler holds there, and move the result"
    )
    with refused(text, world.caches, kind=UnsupportedError):
        mla_metadata_of_batch(world.layers, tensors, moved(batch, torch.device("meta")))


def test_a_table_that_is_too_narrow_for_the_tokens() -> None:
    world = World()
    batch = MLABatch(ints(0, 9), ints(9), ints([0, 1]))
    tensors = {cache.layer_idx: cache.tensors for cache in world.caches}
    with pytest.raises(ValueError, match=r"^block_table must"):
        mla_metadata_of_batch(world.layers, tensors, batch)


def test_caches_of_other_blocks_in_other_layers() -> None:
    """Found when the layer runs: its slots would lead elsewhere."""
    world, others = World(), caches_of(model_of(0, {"a": 40}))
    batch = world.caches.planned({"a": 9}).batch
    tensors = {0: world.caches[0].tensors, 1: others[1].tensors}
    step = mla_metadata_of_batch(world.layers, tensors, batch)
    world.layers[0](world.rows, step, tensors[0])
    sizes = [len(tensors[i].latent_cache) for i in range(2)]
    text = (
        f"cache must have blocks ({sizes[0]}, 4), as the step's, got ({sizes[1]}, 4); "
        "make the step with the caches that it will run on"
    )
    with refused(text, others):
        world.layers[1](world.rows, step, tensors[1])
