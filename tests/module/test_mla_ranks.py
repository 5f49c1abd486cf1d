"""The V3.2 module with a process for every rank: the definition's rows, the same caches everywhere, few collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from dsacp_ref.block import ExpertWeights
from dsacp_ref.mla_layer import mla_attention_layer
from dsacp_ref.mla_stack import MLABlockWeights, mla_block
from tests.compare import assert_double, assert_same
from tests.distributed.pool import run
from tests.layer_strategies import frozen
from tests.mla_strategies import SMALL, world_of
from tests.module.mla_worlds import CODED, Event, Model, Told, any_choice, assert_told, defined, model_of
from tests.strategies import EVERY_SPLIT

pytestmark = pytest.mark.xdist_group("processes")

LENGTHS = {"a": 37, "b": 11, "c": 23, "d": 31}
PREFIXES = {"c": ("a", 17), "d": ("a", 16)}  # in the middle of a block, and at its end
# Prefill of two; prefix hits beside a decode and a chunk; decodes; a chunk that is taken back and run again; a request
# that begins anew; decodes behind all that.
EVENTS: list[Event] = [
    {"a": 19, "b": 3},
    ("fork", "c", "a", 17),
    ("fork", "d", "a", 16),
    {"c": 4, "a": 1, "b": 8, "d": 9},
    {"a": 1, "c": 1},
    {"a": 12},
    ("roll_back", "a", 26),
    {"a": 8, "d": 5},
    ("reset", "b"),
    {"b": 10, "a": 0},
    {"b": 1, "d": 1, "c": 1},
]
SPLIT = [True, True, False, True, True, True, False]


def modes(rows: str = "full", split: str = "zigzag", **more: Any) -> dict[str, Any]:
    """Options of a V3.2 model with the switch on."""
    ways = {"dsa_cp_key_mode": "gather_kv", "dsa_cp_output_mode": "replicated_weight"}
    return {"enable_dsa_cp": True, "dsa_cp_rows": rows, "prefill_cp_mode": split, **ways, **more}


def stories_of(size: int, model: Model, stories: Sequence[tuple[Any, ...]]) -> list[list[list[Told]]]:
    """What every rank told, story by story, once all ranks are found to have ended with the same bytes."""
    full = [(*story, *[{}] * (5 - len(story))) for story in stories]
    found = run(size, "tests.module.mla_work:told", [(model, full)] * size, timeout=300)
    for i, (options, *_) in enumerate(stories):
        for rank in range(1, size):
            assert found[rank][i][1] == found[0][i][1], f"{options}: rank {rank} has other caches"
    return [[rank[i][0] for rank in found] for i in range(len(stories))]


def assert_collectives(told: list[list[Told]], rows: str) -> None:
    """Keys once a layer, and once its output where every rank is to have all rows; nothing in an unsplit step."""
    for rank in told:
        for step in rank:
            due = ["all_gather"] * (2 if rows == "full" else 1) if step.splits else []
            assert step.collectives == [due, due]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_both_modes_with_rows_full_and_scattered(size: int) -> None:
    """Several requests, chunks, prefix hits, decode after prefill, tokens taken back; with pad rows and without."""
    model = model_of(size, LENGTHS, prefixes=PREFIXES)
    ways = [modes(*way) for way in product(("full", "scattered"), ("zigzag", "round_robin"))]
    padded = {"zigzag": {}, "round_robin": {"padding": 3}}  # zigzag cuts requests, and no padding
    stories = [(way, EVENTS, {}, {}, padded[way["prefill_cp_mode"]]) for way in ways]
    stories.append((modes("full", "contiguous"), EVENTS, {}, {}, {"padding": 6}))
    for (way, *_), told in zip(stories, stories_of(size, model, stories), strict=True):
        for rank in told:
            assert [step.splits for step in rank] == SPLIT
        assert_told(told, model, str(way))
        assert_collectives(told, way["dsa_cp_rows"])


@pytest.mark.slow
@pytest.mark.parametrize("codes", [{"fp8": True}, {"int8_index_cache": True}], ids=str)
def test_coded_caches(codes: dict[str, bool]) -> None:
    """Rows travel as they are kept, so that all ranks and one device keep the same codes."""
    model = model_of(5, LENGTHS, CODED, PREFIXES)
    ways = [modes("full", "zigzag"), modes("scattered", "round_robin")]
    for way, told in zip(ways, stories_of(2, model, [(way, EVENTS, {}, codes) for way in ways]), strict=True):
        assert_told(told, model, str(way), **codes)
        assert_collectives(told, way["dsa_cp_rows"])


@pytest.mark.slow
def test_the_other_rules_over_three_processes() -> None:
    """No rule is special to this model; three ranks do not divide three heads' anything."""
    model = model_of(6, LENGTHS, prefixes=PREFIXES)
    rules = [split for split in EVERY_SPLIT if split not in ("zigzag", "round_robin")]
    ways = [modes(rows, split) for split, rows in zip(rules, ["full", "scattered"] * len(rules), strict=False)]
    for way, told in zip(ways, stories_of(3, model, [(way, EVENTS) for way in ways]), strict=True):
        assert any(step.splits for step in told[0])
        assert_told(told, model, str(way))
        assert_collectives(told, way["dsa_cp_rows"])


def test_mixed_off_and_the_first_modes_profile() -> None:
    """A step with a decode in it runs whole; so does one of several requests under the profile of one request."""
    off, profile = modes(dsa_cp_mixed="off"), modes(dsa_cp_profile="in_seq_split")
    model = model_of(7, LENGTHS, prefixes=PREFIXES)
    (mixed,) = stories_of(2, model, [(off, EVENTS)])
    assert [step.splits for step in mixed[0]] == [True, False, False, True, True, True, False]
    assert_told(mixed, model)
    # Every token is chosen: in bfloat16 a choice is another choice.
    model = model_of(7, LENGTHS, replace(SMALL, index_topk=64), PREFIXES)
    limited, free = stories_of(2, model, [(way, EVENTS, {"dtype": "bfloat16"}) for way in (profile, modes())])
    assert [step.splits for step in limited[0]] == [False, False, False, True, False, True, False]
    assert [step.splits for step in free[0]] == SPLIT
    assert_collectives(limited, "full")
    for mine, theirs in zip(limited[0], free[0], strict=True):
        for got, want in zip(mine.outputs, theirs.outputs, strict=True):
            assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


def test_a_group_of_its_own() -> None:
    """The switch off and a CP group beside no TP group, as merged xLLM has it."""
    model = model_of(12, LENGTHS, prefixes=PREFIXES)
    ways = [{**modes(*way), "enable_dsa_cp": False, "cp_size": 2} for way in (("full",), ("scattered", "round_robin"))]
    for way, told in zip(ways, stories_of(2, model, [(way, EVENTS) for way in ways]), strict=True):
        assert [step.splits for step in told[0]] == SPLIT
        assert_told(told, model, str(way))
        assert_collectives(told, way["dsa_cp_rows"])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_unsplit_steps_behind_a_split_one_are_bitwise_what_the_switch_off_gives(dtype: str) -> None:
    """Decode, and prefill that is too short, on the keys that a split step left; no rank asks for anything."""
    model = model_of(8, {"a": 30, "b": 20, "c": 3})
    events = [{"a": 1}, {"b": 3}, {"a": 1, "b": 1, "c": 2}, {"c": 1}]
    for on, off in run(4, "tests.module.mla_work:went_on", [(model, modes(), {"a": 24}, events, dtype)] * 4):
        assert not any(step.splits for step in on)
        for got, want in zip(on, off, strict=True):
            assert_same([got.outputs, got.topk], [want.outputs, want.topk])
            assert got.collectives == [[], []]


def test_an_engines_graph_slot() -> None:
    """Rows of a request without keys are split like any, come out as zero, and write nothing."""
    model = model_of(13, {"a": 11, "b": 6})
    ways = [modes(rows, split) for rows, split in product(("full", "scattered"), ("zigzag", "round_robin"))]
    found = run(2, "tests.module.mla_work:with_graph_slot", [(model, ways, {"a": 11, "b": 6}, 5)] * 2)
    due = [np.concatenate([layer["a"][0], layer["b"][0]]) for layer in defined(model)]
    for i, way in enumerate(ways):
        for layer, whole_rows in enumerate(due):
            seen: set[int] = set()
            for rank in range(2):
                output, tokens = found[rank][i][layer]
                assert_double(output[tokens >= 0], whole_rows[tokens[tokens >= 0]], f"{way} rank {rank}")
                assert not output[tokens < 0].any()
                seen |= set(tokens[tokens >= 0].tolist())
            assert seen == set(range(17))


def test_a_given_selection_is_split_as_its_tokens() -> None:
    """By token of the step, the same on all ranks; behind it the definition's rows for it."""
    lengths = {"a": 20, "b": 9}
    steps: list[dict[str, int]] = [{"a": 9, "b": 4}, {"b": 5, "a": 10}, {"a": 1}]
    model, rng = model_of(11, lengths), np.random.default_rng(11)
    x = list(model.x.values())
    world = world_of(rng, list(map(len, x)), weights=model.weights[0], x=x)
    cache, done, due, choices = world.cache, dict.fromkeys(lengths, 0), [], []
    for new_tokens in steps:
        choices.append(any_choice(rng, done, new_tokens))
        starts = list(done.values())
        for name, new in new_tokens.items():
            done[name] += new
        rows, batch = world.step(starts, list(done.values()), order=[list(lengths).index(name) for name in new_tokens])
        out = mla_attention_layer(rows, world.weights, cache, batch, model.config, given_topk=choices[-1])
        due.append(out.output)
        cache = frozen(out.cache)
    ways = [modes(rows, split) for rows, split in product(("full", "scattered"), ("zigzag", "round_robin"))]
    for rank, stories in enumerate(run(2, "tests.module.mla_work:given", [(model, ways, steps, choices)] * 2)):
        for way, story in zip(ways, stories, strict=True):
            for i, (tokens, output, topk) in enumerate(story):
                where = f"{way} step {i} rank {rank}"
                assert_double(output[tokens >= 0], due[i][tokens[tokens >= 0]], where)
                if i < 2 and way["dsa_cp_rows"] == "scattered":
                    assert_same(topk[tokens >= 0], choices[i][tokens[tokens >= 0]], where)


# --- a model around the layers ---


@pytest.mark.slow
def test_a_model_on_own_rows_gives_what_one_device_gives() -> None:
    """Norms, residual and experts on own rows; experts whole and split; the end gathered, or the last rows alone."""
    lengths = {"a": 19, "b": 7}
    steps = [{"a": 10, "b": 3}, {"b": 4, "a": 8}, {"a": 1}]
    rng, model = np.random.default_rng(9), model_of(9, lengths)
    hidden = SMALL.hidden_size
    norms = [1 + 0.3 * rng.standard_normal((2, hidden)) for _ in model.weights]
    experts = [ExpertWeights(*(rng.standard_normal(shape) / 3 for shape in shapes_of(hidden))) for _ in model.weights]
    due = {name: whole(model, x, norms, experts) for name, x in model.x.items()}
    ways = [modes("scattered", "zigzag"), modes("scattered", "round_robin"), modes("full", "zigzag")]
    stories = [(way, split, steps) for way in ways for split in (False, True)]
    for size in (2, 4):
        found = run(size, "tests.module.mla_work:stack", [(model, norms, experts, stories)] * size, timeout=300)
        for i, (way, split, _) in enumerate(stories):
            done = dict.fromkeys(lengths, 0)
            for j, new_tokens in enumerate(steps):
                rows = [due[name][done[name] : done[name] + n] for name, n in new_tokens.items()]
                for name, n in new_tokens.items():
                    done[name] += n
                total = sum(map(len, rows))
                for rank in range(size):
                    every, last, num_rows = found[rank][i][j]
                    where = f"{way} experts split {split} step {j} rank {rank} of {size}"
                    assert_double(every, np.concatenate(rows), where)
                    assert_same(last, np.stack([every[end - 1] for end in np.cumsum(list(map(len, rows)))]), where)
                    scattered = j < 2 and way["dsa_cp_rows"] == "scattered"
                    assert (num_rows < total) == scattered, where


def shapes_of(hidden: int) -> list[tuple[int, int]]:
    """Of an expert's weights; the inner width divides among the ranks."""
    return [(12, hidden), (12, hidden), (hidden, 12)]


def whole(model: Model, x: np.ndarray, norms: list[np.ndarray], experts: list[ExpertWeights]) -> np.ndarray:
    """The definition's blocks on one device, a request in one step."""
    for weights, (attn_norm, ffn_norm), expert in zip(model.weights, norms, experts, strict=True):
        world = world_of(np.random.default_rng(1), [len(x)], config=model.config, weights=weights, x=[x])
        _, batch = world.step([0], [len(x)])
        x = mla_block(x, MLABlockWeights(attn_norm, weights, ffn_norm, expert), world.cache, batch, model.config).output
    return x


# --- refusals ---


@pytest.mark.parametrize("spoiled", ["rows", "cache", "plan"])
def test_all_ranks_refuse_alike_and_go_on(spoiled: str) -> None:
    """Before any of them sends: nobody waits for one that was refused, and the right step works afterwards."""
    model = model_of(10, {"a": 9, "b": 3})
    due = {
        "rows": "hidden_states must have shape [12, 9], got [11, 9]; the rows that the step was made for",
        "cache": "cache must be of layer {0}, got that of layer {1}; take caches[{0}]",
        "plan": "step must be of plan {2}, the last over these caches, got 1; run a step, or give it up, before the "
        "next one over these caches is planned",
    }
    found = run(2, "tests.module.mla_work:refused", [(model, modes(), {"a": 9, "b": 3}, spoiled)] * 2)
    texts = [f"ContractError: {due[spoiled].format(layer, 1 - layer, layer + 2)}" for layer in range(2)]
    assert found == [[*texts, "a has 9", "b has 3"]] * 2
