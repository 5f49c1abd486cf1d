"""What the block and its parts refuse: which argument, which rule, what was got, what to try; both packages alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dsacp_npu.block
from dsacp_ref import block
from dsacp_ref.block import ExpertWeights
from dsacp_ref.partition import partition_tokens
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.block_strategies import expert_of, stack_of
from tests.layer_strategies import CSA, SMALL, frozen
from tests.maths_strategies import int32
from tests.mirror.common import tensors_of, to_torch
from tests.strategies import read_only

FLOAT = "float32 or float64"
STACK = stack_of(np.random.default_rng(0), [5, 3], [CSA])
WORLD, WEIGHTS = STACK.worlds[0], STACK.weights[0]
X, BATCH = WORLD.step([0, 0], [5, 3])
EXPERT = expert_of(np.random.default_rng(1), 6, 8)
LOC = BATCH.query_start_loc
THREE = partition_tokens(int32([0, 3]), 2)  # 2 rows a rank, the last one a pad row
SHARDS = frozen([np.ones((2, 8)), np.ones((2, 8))])
STEP = {"weights": WEIGHTS, "batch": BATCH, "config": SMALL, "compress_ratio": 4, "given_topk": None}
MODES = {"split": "contiguous", "rows": "full", "key_mode": "replicate", "output_mode": "all_to_all"}

LEGAL: dict[str, dict[str, Any]] = {
    "expert_output": {"x": X, "weights": EXPERT},
    "expert_share": {"weights": EXPERT, "cp_rank": 1, "cp_size": 3},
    "experts_over_ranks": {"shards": SHARDS, "weights": EXPERT, "partition": THREE, "experts": "split"},
    "decoder_block": {"x": X, "cache": WORLD.cache, **STEP},
    "block_over_ranks": {"inputs": [X] * 2, "caches": [WORLD.cache] * 2, "experts": "split", **MODES, **STEP},
    "last_rows": {"shards": SHARDS, "partition": THREE, "query_start_loc": int32([0, 3])},
    "gathered_last_rows": {"shards": SHARDS, "partition": THREE, "query_start_loc": int32([0, 3])},
}
WITH_EXPERTS = {
    "expert_output": "weights",
    "expert_share": "weights",
    "experts_over_ranks": "weights",
    "decoder_block": "weights.experts",
    "block_over_ranks": "weights.experts",
}


def refuse(name: str, text: str, kind: type[Exception] = ContractError, **bad: Any) -> None:
    """Both packages refuse the legal call with these arguments instead, with exactly this type and text."""
    arguments = {**LEGAL[name], **bad}
    in_torch = to_torch(arguments)
    before = [tensor._version for tensor in tensors_of(in_torch)]
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (getattr(block, name), arguments),
        (getattr(dsacp_npu.block, name), in_torch),
    ]
    if hasattr(dsacp_npu.block, f"{name}_"):
        calls.append((getattr(dsacp_npu.block, f"{name}_"), in_torch))
    for function, given in calls:
        with pytest.raises(kind, match=f"^{re.escape(text)}$") as caught:
            function(**given)
        assert type(caught.value) is kind
    assert [tensor._version for tensor in tensors_of(in_torch)] == before, "a refused call has written"


@pytest.mark.parametrize("name", LEGAL)
def test_the_call_that_the_tables_spoil_is_legal(name: str) -> None:
    getattr(block, name)(**LEGAL[name])
    getattr(dsacp_npu.block, name)(**to_torch(LEGAL[name]))


def test_every_public_function_is_here() -> None:
    assert {*block.__all__} - {"BlockWeights", "ExpertWeights", "LastRows"} == {*LEGAL}


def spoiled(name: str, field: str, value: Any) -> dict[str, Any]:
    """The argument `weights` of this function with one field of its expert changed."""
    weights = LEGAL[name]["weights"]
    if isinstance(weights, ExpertWeights):
        return {"weights": weights._replace(**{field: value})}
    return {"weights": weights._replace(experts=weights.experts._replace(**{field: value}))}


BAD_EXPERTS = [
    ("w1", None, "w1 must be an array, got NoneType; dtype " + FLOAT),
    ("w1", np.ones((6, 8), np.int32), f"w1 must have dtype {FLOAT}, got int32; cast {{}}.w1 first"),
    ("w1", np.ones(8), "w1 must have shape [inter, hidden], got [8]"),
    ("w3", np.ones((5, 8)), "w3 must have shape [6, 8], got [5, 8]; w1 and w3 are alike"),
    ("w3", None, "w3 must be an array, got NoneType; dtype " + FLOAT),
    ("w2", np.ones((6, 8)), "w2 must have shape [8, 6], got [6, 8]; w2 leads back from the rows of w1"),
    ("swiglu_limit", 0, "swiglu_limit must be a finite number > 0.0, got 0; None for no limit"),
    ("swiglu_limit", float("inf"), "swiglu_limit must be a finite number > 0.0, got inf; None for no limit"),
    ("swiglu_limit", "10", "swiglu_limit must be a finite number > 0.0, got str '10'; None for no limit"),
]


@pytest.mark.parametrize(
    ("field", "bad", "text"), BAD_EXPERTS, ids=[f"{f}-{i}" for i, (f, *_) in enumerate(BAD_EXPERTS)]
)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_that_do_not_fit_are_refused(name: str, field: str, bad: Any, text: str) -> None:
    place = WITH_EXPERTS[name]
    refuse(name, f"{place}.{text.format(place)}", **spoiled(name, field, bad))


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_another_record_than_the_weights_is_refused(name: str) -> None:
    kind = "ExpertWeights" if WITH_EXPERTS[name] == "weights" else "BlockWeights"
    refuse(name, f"weights must be of type {kind}, got tuple", weights=tuple(LEGAL[name]["weights"]))


UNEVEN = "cp_size must divide the 6 rows of w1 unless experts is 'whole', got {}; use experts='whole'"


def test_ranks_that_cannot_share_an_expert_are_unsupported() -> None:
    """6 rows over 4 ranks; over ranks the same expert runs whole."""
    partition = partition_tokens(int32([0, 3]), 4)
    shards = frozen([np.ones((1, 8))] * 4)
    refuse("expert_share", UNEVEN.format(4), UnsupportedError, cp_size=4)
    refuse("experts_over_ranks", UNEVEN.format(4), UnsupportedError, shards=shards, partition=partition)
    many = {"inputs": [X] * 4, "caches": [WORLD.cache] * 4, "output_mode": "replicated_weight"}
    refuse("block_over_ranks", UNEVEN.format(4), UnsupportedError, **many)
    block.experts_over_ranks(shards, EXPERT, partition, experts="whole")
    block.block_over_ranks(**{**LEGAL["block_over_ranks"], **many, "experts": "whole"})


RANK = "cp_rank must be an int in [0, 2], got {}; ranks count from 0 within cp_size 3"
LIKE = "; every rank sends the same kind of rows"
OTHER_GROUP = "shards must come from the 2 ranks of the partition, got 1 ranks; split and gather over the same group"
OFFSETS = "query_start_loc must end at the 3 tokens of the partition, got {}; build both from the same lengths"
ON_SHARDS = ("experts_over_ranks", "last_rows", "gathered_last_rows")
ON_BLOCKS = ("decoder_block", "block_over_ranks")
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("expert_output", {"x": X[:, :7]}, "x must have shape [num_rows, 8], got [8, 7]; as wide as w1 takes them"),
    ("expert_output", {"x": X[0]}, "x must have shape [num_rows, 8], got [8]; as wide as w1 takes them"),
    ("expert_output", {"x": int32([[1] * 8])}, f"x must have dtype {FLOAT}, got int32; cast x first"),
    ("expert_output", {"x": None}, f"x must be an array, got NoneType; dtype {FLOAT}"),
    *(("expert_share", {"cp_rank": bad}, RANK.format(got)) for bad, got in ((3, "3"), (-1, "-1"), (1.0, "float 1.0"))),
    ("expert_share", {"cp_size": 0}, f"cp_size must be an int in [1, {1 << 20}], got 0"),
    # Shards.
    *((name, {"shards": []}, "cp_size must be an int >= 1, got 0; one shard a rank") for name in ON_SHARDS),
    *((name, {"shards": SHARDS[:1]}, OTHER_GROUP) for name in ON_SHARDS),
    *((name, {"shards": 3}, "shards must be a list with one item a rank, got int") for name in ON_SHARDS),
    *(
        (
            name,
            {"shards": [SHARDS[0], np.ones((2, 8), np.float32)]},
            f"shards must be alike: rank 0 has float64 [2, 8], got float32 [2, 8] on rank 1{LIKE}",
        )
        for name in ON_SHARDS
    ),
    *(
        (
            name,
            {"shards": [SHARDS[0], np.ones((1, 8))]},
            "shards must have 2 rows on rank 1, got 1; pad rows travel with the rest",
        )
        for name in ON_SHARDS
    ),
    *((name, {"partition": None}, "partition must be of type Partition, got NoneType") for name in ON_SHARDS),
    (
        "experts_over_ranks",
        {"shards": [np.ones((2, 7))] * 2},
        "shards must have shape [local_rows, 8], got [2, 7]; as wide as w1 takes them",
    ),
    (
        "experts_over_ranks",
        {"shards": [np.ones((2, 8), np.int32)] * 2},
        f"shards must have dtype {FLOAT}, got int32; cast shards first",
    ),
    *(
        (name, {"experts": bad}, f"experts must be one of 'whole', 'split', 'sliced', got {bad!r}")
        for name in ("experts_over_ranks", "block_over_ranks")
        for bad in ("", "Split", None, 2)
    ),
    # Offsets.
    *((name, {"query_start_loc": int32([0, bad])}, OFFSETS.format(bad)) for name in ON_SHARDS[1:] for bad in (2, 4)),
    *((name, {"query_start_loc": int32([0])}, OFFSETS.format(0)) for name in ON_SHARDS[1:]),
    *(
        (
            name,
            {"query_start_loc": int32([0, 4, 3])},
            "query_start_loc must not decrease, got [4, 3] at request 1; it is cumulative: one offset a request, not "
            "one length",
        )
        for name in ON_SHARDS[1:]
    ),
    *(
        (
            name,
            {"query_start_loc": np.zeros(2)},
            "query_start_loc must have dtype int32, got float64; cast query_start_loc first",
        )
        for name in ON_SHARDS[1:]
    ),
    # Blocks.
    *(
        (name, {"weights": WEIGHTS._replace(**{field: bad})}, f"weights.{field} must {text}")
        for name in ON_BLOCKS
        for field in ("attn_norm", "ffn_norm")
        for bad, text in (
            (np.ones(7), "have shape [8], got [7]; one weight a channel"),
            (None, f"be an array, got NoneType; dtype {FLOAT}"),
        )
    ),
    *(
        (
            name,
            {"weights": WEIGHTS._replace(experts=expert_of(np.random.default_rng(2), 6, 7))},
            "weights.experts must take and give the 8 channels of hidden_size, got 7; the shapes follow from config",
        )
        for name in ON_BLOCKS
    ),
    *(
        (name, {"weights": WEIGHTS._replace(attention=None)}, "weights must be of type LayerWeights, got NoneType")
        for name in ON_BLOCKS
    ),
    *((name, {"config": None}, "config must be of type AttentionConfig, got NoneType") for name in ON_BLOCKS),
    *((name, {"batch": tuple(BATCH)}, "batch must be of type LayerBatch, got tuple") for name in ON_BLOCKS),
    *((name, {"compress_ratio": 0}, "compress_ratio must be an int >= 1, got 0") for name in ON_BLOCKS),
    ("decoder_block", {"x": None}, f"x must be an array, got NoneType; dtype {FLOAT}"),
    ("decoder_block", {"x": X[:, :7]}, "x must have shape [num_tokens, 8], got [8, 7]; the residual stream"),
    (
        "decoder_block",
        {"x": X[:7]},
        "x must have at least 8 rows, got 7; query_start_loc counts global rows",
    ),
    (
        "decoder_block",
        {"cache": WORLD.cache._replace(swa_cache=np.ones((2, 4, 5)))},
        "cache.swa_cache must have shape [num_blocks, block_size, 6], got [2, 4, 5]",
    ),
    ("block_over_ranks", {"inputs": []}, "cp_size must be an int >= 1, got 0; one input a rank"),
    ("block_over_ranks", {"inputs": 2}, "inputs must be a list with one item a rank, got int"),
    ("block_over_ranks", {"caches": [WORLD.cache]}, "caches must hold one cache for each of 2 ranks, got 1"),
    (
        "block_over_ranks",
        {"inputs": [X, X[:, :7]]},
        "inputs must have shape [num_rows, 8], got [8, 7]; rank 1; the split says which rows",
    ),
    ("block_over_ranks", {"inputs": [X, None]}, f"inputs must be an array, got NoneType; dtype {FLOAT}"),
    (
        "block_over_ranks",
        {"inputs": [X[:7]] * 2},
        "inputs must have 8 rows on rank 0 with rows 'full', got 7; the split says which rows",
    ),
    (
        "block_over_ranks",
        {"inputs": [X] * 2, "rows": "scattered", "key_mode": "gather_kv"},
        "inputs must have shape [4, 8], got [8, 8]; rank 0; the split says which rows",
    ),
    ("block_over_ranks", {"rows": "Full"}, "rows must be one of 'full', 'scattered', got 'Full'"),
    (
        "block_over_ranks",
        {"key_mode": "all"},
        "key_mode must be one of 'replicate', 'gather_hidden', 'gather_kv', 'gather_compressed', got 'all'",
    ),
]


@pytest.mark.parametrize(
    ("name", "bad", "text"),
    [pytest.param(*case, id=f"{case[0]}-{'-'.join(case[1])}-{i}") for i, case in enumerate(CASES)],
)
def test_a_broken_rule_is_refused(name: str, bad: dict[str, Any], text: str) -> None:
    refuse(name, text, **bad)


def test_a_combination_that_cannot_work_is_unsupported() -> None:
    text = (
        "key_mode must not be 'replicate' when rows is 'scattered', because no rank has all hidden rows, got "
        "'replicate'; use key_mode='gather_hidden'"
    )
    refuse("block_over_ranks", text, UnsupportedError, inputs=[read_only(X[:4]), read_only(X[4:])], rows="scattered")
