"""Rows that stay where they are from the first layer to the last: a whole small model on own rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu.parallel import parallel_of
from dsacp_npu.rows import gathered_rows, last_rows, own_rows, split_experts
from dsacp_npu.step import step_metadata
from dsacp_ref.block import BlockWeights, ExpertWeights, decoder_block
from dsacp_ref.spec import ContractError
from tests.compare import assert_double, assert_same
from tests.distributed.pool import run
from tests.layer_strategies import SMALL, world_of
from tests.module.row_work import Blocks, Story
from tests.module.worlds import FOUR_GROUPS, KINDS, caches_of, layers_of, model_of

LENGTHS = {"a": 19, "b": 7}
STEPS = [{"a": 10, "b": 3}, {"b": 4, "a": 8}, {"a": 1}]


def scattered(keys: str, output: str, split: str = "contiguous") -> dict[str, Any]:
    """Options with own rows between layers."""
    modes = {"dsa_cp_key_mode": keys, "dsa_cp_output_mode": output, "prefill_cp_mode": split}
    return {"enable_dsa_cp": True, "dsa_cp_rows": "scattered", **modes}


WAYS = [
    scattered("gather_hidden", "all_to_all"),
    scattered("gather_compressed", "gather_weight", "zigzag"),
    scattered("gather_kv", "replicated_weight", "zigzag_padded"),
    {"enable_dsa_cp": True},
]


def blocks_of(seed: int) -> Blocks:
    """Three blocks around a window-only, a ratio-4 and a ratio-8 layer."""
    rng, hidden = np.random.default_rng(seed), SMALL.hidden_size
    experts = [
        ExpertWeights(
            rng.standard_normal((12, hidden)), rng.standard_normal((12, hidden)), rng.standard_normal((hidden, 12)) / 12
        )
        for _ in KINDS
    ]
    norms = [[1 + 0.3 * rng.standard_normal(hidden) for _ in range(2)] for _ in KINDS]
    return Blocks(model_of(seed, LENGTHS), norms, experts)


def whole(blocks: Blocks) -> dict[str, np.ndarray]:
    """The definition's stack on one device, each request in one step."""
    model, found = blocks.model, {}
    for name, x in model.x.items():
        for i, kind in enumerate(KINDS):
            shared = {"config": model.config, "kind": kind, "weights": model.weights[i]}
            world = world_of(np.random.default_rng(1), [len(x)], x=[x], **shared)
            _, batch = world.step([0], [len(x)])
            attn_norm, ffn_norm = blocks.norms[i]
            weights = BlockWeights(attn_norm, model.weights[i], ffn_norm, blocks.experts[i])
            x = decoder_block(x, weights, world.cache, batch, model.config, compress_ratio=kind.ratio).output
        found[name] = x
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("size", [2, 4])
def test_a_model_on_own_rows_gives_what_one_device_gives(size: int) -> None:
    """Norms, residual and experts on own rows; experts whole and split; the end gathered, or the last rows alone."""
    blocks = blocks_of(size)
    due = whole(blocks)
    stories = [Story(way, split, STEPS) for way in WAYS for split in (False, True)]
    results = run(size, "tests.module.row_work:stack", [(blocks, stories)] * size, timeout=300)
    for i, story in enumerate(stories):
        done = dict.fromkeys(LENGTHS, 0)
        for j, new_tokens in enumerate(STEPS):
            rows = [due[name][done[name] : done[name] + n] for name, n in new_tokens.items()]
            for name, n in new_tokens.items():
                done[name] += n
            for rank in range(size):
                every, last, num_rows = results[rank][i][j]
                name = f"{story} step {j} rank {rank}"
                assert_double(every, np.concatenate(rows), name)
                assert_same(last, np.stack([every[end - 1] for end in np.cumsum(list(map(len, rows)))]), name)
                total = sum(map(len, rows))
                if j < 2 and "dsa_cp_rows" in story.options:
                    assert num_rows < total, f"{name}: a rank has all rows"
                else:
                    assert num_rows == total, name


def one_step() -> Any:
    """A step on one device."""
    model = model_of(0, {"a": 5, "b": 3}, FOUR_GROUPS)
    caches = caches_of(model)
    for name in model.x:
        caches.open(name)
    return step_metadata(layers_of(model), caches, {"a": 4, "b": 0})


def test_one_device() -> None:
    """The same calls where nothing is split; a request without new tokens has no last row."""
    step, parallel = one_step(), parallel_of()
    x = torch.arange(10.0).reshape(5, 2)
    assert own_rows(x, step).tolist() == x[:4].tolist()
    assert gathered_rows(x[:4], step, parallel).tolist() == x[:4].tolist()
    assert last_rows(x[:4], step, parallel).tolist() == [[6, 7], [0, 0]]
    assert split_experts(x[:4], step, parallel, lambda rows: 2 * rows).tolist() == (2 * x[:4]).tolist()


FOUR, ROWS = torch.ones(4, 2), "rows must be this rank's 4, got {}; rows of the step that the layers run"
REFUSALS: Sequence[tuple[Callable[[Any, Any], Any], str]] = [
    (
        lambda step, one: own_rows(FOUR[:3], step),
        "stream must have the step's 4 tokens, got 3; every rank has the whole stream here",
    ),
    (lambda step, one: own_rows(FOUR, None), "step must be of type RowLayout, got NoneType"),
    (lambda step, one: gathered_rows(FOUR[:3], step, one), ROWS.format(3)),
    (lambda step, one: last_rows(torch.ones(5, 2), step, one), ROWS.format(5)),
    (lambda step, one: last_rows(FOUR, step, None), "parallel must be of type Parallel, got NoneType"),
    (
        lambda step, one: split_experts(FOUR, step, one, lambda rows: rows[:1]),
        "expert's output must have shape [4, 2], got [1, 2]; a row for each that it gets",
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSALS)
def test_refusals(call: Any, text: str) -> None:
    with pytest.raises(ContractError) as error:
        call(one_step(), parallel_of())
    assert str(error.value) == text
