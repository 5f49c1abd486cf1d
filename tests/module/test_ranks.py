"""The module with a process for every rank: every legal mode gives the definition's rows; off is bitwise off."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compare import assert_same
from tests.distributed.pool import run
from tests.layer_strategies import SMALL
from tests.module.worlds import FOUR_GROUPS, Model, Told, assert_told, model_of

pytestmark = pytest.mark.xdist_group("processes")

LENGTHS = {"a": 37, "b": 11, "c": 22}
# Prefill; a mixed step that goes on from a prefix; a chunk of one request; decode of one and of two.
STEPS = [{"a": 16, "b": 3}, {"c": 20, "a": 1, "b": 8}, {"a": 19}, {"c": 1}, {"a": 1, "c": 1}]
SPLIT = [True, True, True, False, False]
ON = {"enable_dsa_cp": True}
KEYS = {
    "full": ("replicate", "gather_kv", "gather_compressed"),
    "scattered": ("gather_hidden", "gather_kv", "gather_compressed"),
}
OUTPUTS = ("all_to_all", "gather_weight", "replicated_weight")
SPLITS = ("contiguous", "zigzag", "contiguous_request", "round_robin_page(8)", "zigzag_ceil", "zigzag_padded")


def modes(rows: str, keys: str, output: str, split: str = "contiguous", **more: Any) -> dict[str, Any]:
    """Options with the switch on."""
    ways = {"dsa_cp_rows": rows, "dsa_cp_key_mode": keys, "dsa_cp_output_mode": output, "prefill_cp_mode": split}
    return {**ON, **ways, **more}


def stories_of(size: int, model: Model, stories: list[tuple[Any, ...]], grid: Any = None) -> list[list[list[Told]]]:
    """What every rank told, story by story."""
    found = run(size, "tests.module.work:told", [(model, stories, grid)] * size, timeout=300)
    return [[rank[i] for rank in found] for i in range(len(stories))]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_mode(size: int) -> None:
    model = model_of(size, LENGTHS)
    ways = [
        modes(rows, keys, output, SPLITS[i % len(SPLITS)])
        for i, (rows, output, j) in enumerate(product(KEYS, OUTPUTS, range(3)))
        for keys in [KEYS[rows][j]]
    ]
    stories = [(way, STEPS, {}, {}) for way in ways]
    for way, told in zip(ways, stories_of(size, model, stories), strict=True):
        for rank in told:
            assert [step.splits for step in rank] == SPLIT
        assert_told(told, model, STEPS, str(way))


def test_padded_streams_and_mixed_off() -> None:
    """The proposal's flat split of a padded stream; merged xLLM's rule for mixed steps."""
    model = model_of(3, LENGTHS)
    padded, off = modes("full", "replicate", "all_to_all"), modes("full", "replicate", "all_to_all", dsa_cp_mixed="off")
    scattered = modes("scattered", "gather_hidden", "all_to_all")
    stories = [(padded, STEPS, {}, {"padding": 3}), (off, STEPS, {}, {}), (scattered, STEPS, {}, {"padding": 5})]
    told = stories_of(2, model, stories)
    for story in told:
        assert_told(story, model, STEPS)
    assert [step.splits for step in told[1][0]] == [True, False, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("output", OUTPUTS)
def test_steps_by_heads_are_bitwise_what_a_module_with_the_switch_off_gives(output: str) -> None:
    """Decode, and prefill that does not use context parallelism. So are the caches that a split step leaves."""
    model = model_of(4, LENGTHS, replace(SMALL, num_heads=8, head_dim=8, q_lora_rank=8, o_groups=4, o_lora_rank=4))
    by_heads = {"decode_query_len": 100}  # so that even the chunks after the first count as decode
    steps = [{"a": 17}, {"a": 15}, {"a": 3}, {"a": 1}, {"a": 1}]
    on = modes("full", "replicate", output, dsa_cp_mixed="off")
    for dtype in ("float64", "float32", "bfloat16"):
        built = {"dtype": dtype}
        told = stories_of(2, model, [(on, steps, built, by_heads), ({}, steps, built, by_heads)])
        for rank in range(2):
            switched, off = (story[rank] for story in told)
            assert [step.splits for step in switched] == [True, False, False, False, False]
            for mine, theirs in zip(switched[1:], off[1:], strict=True):
                for layer, (got, want) in enumerate(zip(mine.outputs, theirs.outputs, strict=True)):
                    assert_same(got, want, f"{output} {dtype} rank {rank} layer {layer}")


def test_on_against_off_in_bfloat16() -> None:
    """The proposal's own criterion: relative error below 1e-2 given the same selection (here: every entry)."""
    config = replace(FOUR_GROUPS, head_dim=64, rope_head_dim=8, hidden_size=64, q_lora_rank=32, o_lora_rank=16)
    model = model_of(8, LENGTHS, replace(config, index_topk=16))
    way = modes("full", "replicate", "all_to_all")
    on, off = stories_of(2, model, [(way, STEPS, {"dtype": "bfloat16"}, {}), ({}, STEPS, {"dtype": "bfloat16"}, {})])
    for mine, theirs in zip(on[0], off[0], strict=True):
        for got, want in zip(mine.outputs, theirs.outputs, strict=True):
            assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_heads() -> None:
    """Three ranks, four heads, two groups: weights are gathered, or whole, in decode as well."""
    model = model_of(5, LENGTHS, SMALL)
    ways = [modes(rows, KEYS[rows][-1], output, "zigzag") for rows, output in product(KEYS, OUTPUTS[1:])]
    for way, told in zip(ways, stories_of(3, model, [(way, STEPS, {}, {}) for way in ways]), strict=True):
        assert_told(told, model, STEPS, str(way))


@pytest.mark.slow
def test_independent_groups(tmp_path: Path) -> None:
    """Merged xLLM: two CP groups of two across two TP groups of two, the switch off."""
    model = model_of(6, LENGTHS)
    ways = [
        {**modes(rows, keys, output, "contiguous_request"), "enable_dsa_cp": False, "cp_size": 2}
        for rows, keys, output in (
            ("scattered", "gather_hidden", "replicated_weight"),
            ("scattered", "gather_compressed", "gather_weight"),
            ("full", "replicate", "all_to_all"),
            ("full", "gather_kv", "replicated_weight"),
        )
    ]
    for i, way in enumerate(ways):
        (tmp_path / str(i)).mkdir()
        told = stories_of(4, model, [(way, STEPS, {}, {})], (str(tmp_path / str(i)), 2, 2))
        assert_told(told[0], model, STEPS, str(way))


def test_what_a_rank_keeps() -> None:
    """All heads with the switch on, its share with it off; of the output weights its groups, unless they are whole."""
    model = model_of(7, {"a": 1}, FOUR_GROUPS)
    config = model.config
    heads, groups = config.num_heads, config.o_groups
    rows, columns = heads * config.head_dim * config.q_lora_rank, config.hidden_size * groups * config.o_lora_rank
    cases = {
        "off": ({}, rows // 2, columns // 2),
        "on": (ON, rows, columns // 2),
        "gathered": (modes("full", "replicate", "gather_weight"), rows, columns // 2),
        "whole": (modes("full", "replicate", "replicated_weight"), rows, columns),
    }
    for name, (options, wq_b, wo_b) in cases.items():
        for layers in run(2, "tests.module.work:kept", [(model, options)] * 2):
            assert [(kept["wq_b"], kept["wo_b"]) for kept in layers] == [(wq_b, wo_b)] * 3, name
            assert layers[0]["attn_sink"] == (heads // 2 if name == "off" else heads), name
