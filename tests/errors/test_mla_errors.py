"""What attention over latents, its layer and its stack refuse, in the same words by both packages, before any write."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_ref import mla, mla_layer, mla_stack
from dsacp_ref.mla_layer import MLACache, empty_mla_cache
from dsacp_ref.partition import partition_tokens
from dsacp_ref.quant import quantized_int8
from dsacp_ref.rope import rope_table
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.block_strategies import expert_of
from tests.layer_strategies import frozen
from tests.maths_strategies import int32
from tests.mirror.common import tensors_of, to_torch
from tests.mla_strategies import SMALL, poisoned, stack_world_of
from tests.strategies import read_only

MODULES = {"mla": mla, "mla_layer": mla_layer, "mla_stack": mla_stack}
FLOAT = "float32 or float64"
CONFIG = replace(SMALL, kv_lora_rank=128)
STACK = stack_world_of(np.random.default_rng(0), [5, 3], num_layers=2, inter=6, config=CONFIG)
WORLD, WEIGHTS = STACK.world, STACK.world.weights
PART, BLOCK = WEIGHTS.indexer, STACK.weights.blocks[0]
X, BATCH = WORLD.step([0, 0], [5, 3])
LATER = WORLD.step([3, 0], [5, 3])[1]
IDS, _ = STACK.step([0, 0], [5, 3])
CACHE, LOC = WORLD.cache, BATCH.query_start_loc
SHARDS = frozen([X[:4].copy(), X[4:].copy()])
SPLIT = partition_tokens(LOC, 2, split="contiguous")
TABLE = dict(zip(("cos", "sin"), rope_table(int32([0, 7]), mla.mla_frequencies(CONFIG)), strict=True))
ROWS, QR, Q = np.ones((2, 9)), np.ones((2, 7)), np.ones((2, 3, 5))
TOPK = read_only(np.array([[1, -1, 0], [2, 1, -1]], np.int32))
READ = {
    "q_rope": np.ones((2, 3, 4)),
    "latent_cache": np.ones((3, 4, 128)),
    "rope_cache": np.ones((3, 4, 4)),
    "block_table": read_only(np.array([[2, 0]], np.int32)),
    "topk_indices": TOPK,
    "cu_seqlens_q": int32([0, 2]),
    "seqused_kv": int32([5]),
    "softmax_scale": 0.5,
}
STEP = {"batch": BATCH, "config": CONFIG}
RANKS = {"split": "contiguous", "num_input_tokens": None, "kept_keys": "all"}
SIZES = {"num_blocks": 2, "block_size": 2, "dtype": "float64", "fp8": False, "int8_index_cache": False}

LEGAL: dict[str, dict[str, Any]] = {
    "mla_frequencies": {"config": CONFIG},
    "layer_norm": {"x": ROWS, "weight": np.ones(9), "bias": np.ones(9), "eps": 1e-6},
    "latent_keys": {"x": ROWS, "wkv_a": WEIGHTS.wkv_a, "kv_norm": WEIGHTS.kv_norm, "eps": 1e-6, **TABLE},
    "latent_queries": {"qr": QR, "wq_b": WEIGHTS.wq_b, "nope_head_dim": 5, **TABLE},
    "absorbed_queries": {"q_nope": Q, "w_uk": WEIGHTS.w_uk},
    "value_heads": {"out": np.ones((2, 3, 128)), "w_uv": WEIGHTS.w_uv},
    "token_index_keys": {
        "x": ROWS,
        "wk": PART.wk,
        "k_norm": PART.k_norm,
        "k_norm_bias": PART.k_norm_bias,
        "eps": 1e-6,
        **TABLE,
    },
    "token_index_queries": {"qr": QR, "wq_b": PART.wq_b, "index_head_dim": 8, **TABLE},
    "key_ranges": {"token_indices": int32([1, 6, -1]), "query_start_loc": LOC, "seq_lens": BATCH.seq_lens},
    "packed_topk": {"topk_indices": TOPK, "starts": int32([0, 5])},
    "paged_topk": {
        "topk_indices": TOPK,
        "request_indices": int32([0, 0]),
        "block_table": READ["block_table"],
        "block_size": 4,
    },
    "causal_picks": {"topk_indices": TOPK, "positions": int32([1, 2])},
    "latent_attention": {"q_latent": np.ones((2, 3, 128)), **READ},
    "expanded_attention": {"q_nope": Q, "w_uk": WEIGHTS.w_uk, "w_uv": WEIGHTS.w_uv, **READ},
    "empty_mla_cache": {"config": CONFIG, **SIZES},
    "mla_attention_layer": {"x": X, "weights": WEIGHTS, "cache": CACHE, "given_topk": None, **STEP},
    "mla_over_ranks": {
        "shards": SHARDS,
        "weights": WEIGHTS,
        "caches": [CACHE] * 2,
        "given_topk": None,
        **STEP,
        **RANKS,
    },
    "local_inputs": {
        "token_ids": IDS,
        "labels": IDS,
        "query_start_loc": LOC,
        "seq_lens": BATCH.seq_lens,
        "partition": SPLIT,
        "cp_rank": 1,
    },
    "mla_block": {"x": X, "weights": BLOCK, "cache": CACHE, "given_topk": None, **STEP},
    "mla_block_over_ranks": {
        "shards": SHARDS,
        "weights": BLOCK,
        "caches": [CACHE] * 2,
        "given_topk": None,
        "experts": "sliced",
        **STEP,
        **RANKS,
    },
    "mla_decoder_stack": {"token_ids": IDS, "weights": STACK.weights, "caches": STACK.caches, **STEP},
    "mla_stack_over_ranks": {
        "token_ids": IDS,
        "weights": STACK.weights,
        "caches": [STACK.caches] * 2,
        "experts": "sliced",
        **STEP,
        **RANKS,
    },
    "rows_argmax": {"logits": SHARDS, "partition": SPLIT, "query_start_loc": LOC},
    "vocab_argmax": {"logits": [np.ones((2, 3)), np.ones((2, 1))]},
}
LAYERS = ("mla_attention_layer", "mla_over_ranks")
BLOCKS = ("mla_block", "mla_block_over_ranks")
STACKS = ("mla_decoder_stack", "mla_stack_over_ranks")
OVER_RANKS = ("mla_over_ranks", "mla_block_over_ranks")
STEPS = (*LAYERS, *BLOCKS, *STACKS)
WRITING = [name for name in LEGAL if name.startswith("mla_") and name != "mla_frequencies"]


def forms(name: str) -> list[tuple[Callable[..., Any], bool]]:
    """The function of both packages, and the mirror's that writes into its argument; whether each takes tensors."""
    module = next(each for each, reference in MODULES.items() if name in reference.__all__)
    mirror = importlib.import_module(f"dsacp_npu.{module}")
    in_place = [(getattr(mirror, f"{name}_"), True)] if hasattr(mirror, f"{name}_") else []
    return [(getattr(MODULES[module], name), False), (getattr(mirror, name), True), *in_place]


def refuse(name: str, text: str, kind: type[Exception] = ContractError, **bad: Any) -> None:
    """Both packages refuse the legal call with these arguments instead, with exactly this type and text."""
    arguments = {**LEGAL[name], **bad}
    in_torch = to_torch(arguments)
    before = [tensor._version for tensor in tensors_of(in_torch)]
    for function, takes_tensors in forms(name):
        with pytest.raises(kind, match=f"^{re.escape(text)}$") as caught:
            function(**(in_torch if takes_tensors else arguments))
        assert type(caught.value) is kind
    assert [tensor._version for tensor in tensors_of(in_torch)] == before, "a refused call has written"


@pytest.mark.parametrize("name", LEGAL)
def test_the_call_that_the_tables_spoil_is_legal(name: str) -> None:
    for function, takes_tensors in forms(name):
        function(**(to_torch(LEGAL[name]) if takes_tensors else LEGAL[name]))


def test_every_public_function_is_here() -> None:
    names = {name for module in MODULES.values() for name in module.__all__ if name.islower()}
    assert names == {*LEGAL}
    assert {*WRITING} == {*STEPS}


# --- arrays ---

TURNED = ("latent_keys", "latent_queries", "token_index_keys", "token_index_queries")
PICKED = ("packed_topk", "paged_topk", "causal_picks")
FORMS = ("latent_attention", "expanded_attention")
QUERY = {"latent_attention": "q_latent", "expanded_attention": "q_nope"}
ATTENTION: list[tuple[dict[str, Any], str]] = [
    (
        {"q_rope": np.ones((2, 2, 4))},
        "q_rope must have shape [2, 3, rope_head_dim], got [2, 2, 4]; the other part of {q}",
    ),
    (
        {"q_rope": np.ones((2, 3, 4), np.float32)},
        "q_rope must have dtype float64, got float32; cast q_rope first",
    ),
    (
        {"softmax_scale": 0},
        "softmax_scale must be a finite number > 0.0, got 0; head_dim ** -0.5; the operator's default is not it",
    ),
    (
        {"latent_cache": np.ones((3, 4, 127))},
        "latent_cache must have shape [num_blocks, block_size, 128], got [3, 4, 127]; as the queries",
    ),
    (
        {"latent_cache": np.ones((3, 4, 128), np.float32)},
        "latent_cache must have dtype float64, got float32; cast latent_cache first",
    ),
    (
        {"rope_cache": np.ones((3, 5, 4))},
        "rope_cache must have shape [3, 4, 4], got [3, 5, 4]; the same blocks as latent_cache",
    ),
    ({"rope_cache": None}, "latent_cache must have dtype uint8, got float64; cast latent_cache first"),
    (
        {"rope_cache": None, "latent_cache": np.zeros((3, 4, 139), np.uint8)},
        "latent_cache must have shape [num_blocks, block_size, 140], got [3, 4, 139]; without a rope_cache",
    ),
    (
        {"block_table": np.zeros((2, 2), np.int32)},
        "block_table must have shape [1, max_blocks], got [2, 2]; one row an operator row",
    ),
    (
        {"block_table": np.array([[2]], np.int32), "topk_indices": np.array([[1], [4]], np.int32)},
        "block_table must reach row 4 of request 0, got 1 requests of 1 blocks of 4; allocate the block before it is "
        "used",
    ),
    (
        {"block_table": np.array([[-1, 0]], np.int32)},
        "block_table must name a block for row 1 of request 0, got -1; the used part of a table holds block ids only",
    ),
    (
        {"block_table": np.array([[3, 0]], np.int32)},
        "slots must be -1 or in [0, 12), got 13; the cache has no such row",
    ),
    (
        {"topk_indices": TOPK[:1]},
        "topk_indices must have shape [2, index_topk], got [1, 3]; one list a query",
    ),
    (
        {"topk_indices": TOPK.astype(np.int64)},
        "topk_indices must have dtype int32, got int64; cast topk_indices first",
    ),
    (
        {"topk_indices": np.array([[4], [0]], np.int32)},
        "topk_indices must be -1 or below the 4 tokens that query 0 sees, got 4; tokens count within the request, and "
        "none after the query is visible",
    ),
    (
        {"topk_indices": np.array([[0], [-2]], np.int32)},
        "topk_indices must be -1 or below the 5 tokens that query 1 sees, got -2; tokens count within the request, and "
        "none after the query is visible",
    ),
    (
        {"topk_indices": np.array([[0, 1], [3, 3]], np.int32)},
        "topk_indices must be distinct in a row, got token 3 twice; query 1",
    ),
    (
        {"seqused_kv": int32([1])},
        "seqused_kv must be 0 or at least the row's query length, got 1 keys for 2 queries of row 0; an extent is "
        "right-aligned: it ends with the row's last query",
    ),
    ({"cu_seqlens_q": int32([1, 2])}, "cu_seqlens_q must start at 0, got [1]; prepend the leading zero"),
]
ARRAYS: list[tuple[str, dict[str, Any], str]] = [
    ("mla_frequencies", {"config": None}, "config must be of type MLAConfig, got NoneType"),
    ("layer_norm", {"x": ROWS.astype(int)}, f"x must have dtype {FLOAT}, got int64; cast x first"),
    ("layer_norm", {"x": np.ones((2, 0)), "weight": np.ones(0), "bias": np.ones(0)}, "d must be an int >= 1, got 0"),
    ("layer_norm", {"weight": np.ones(8)}, "weight must have shape [9], got [8]; one weight a channel"),
    ("layer_norm", {"bias": np.ones((9, 1))}, "bias must have shape [9], got [9, 1]; one bias a channel"),
    *(("layer_norm", {"eps": bad}, f"eps must be a finite number >= 0.0, got {bad}") for bad in (-1, float("nan"))),
    *(
        (
            name,
            {"cos": np.ones((3, 2))},
            "cos must have shape [2, rope_head_dim / 2], got [3, 2]; one row of the table a token",
        )
        for name in TURNED[:2]
    ),
    ("latent_keys", {"x": ROWS[0]}, "x must have shape [num_tokens, hidden], got [9]"),
    ("latent_keys", {"kv_norm": None}, f"kv_norm must be an array, got NoneType; dtype {FLOAT}"),
    (
        "latent_keys",
        {"wkv_a": WEIGHTS.wkv_a[1:]},
        "wkv_a must have shape [132, 9], got [131, 9]; kv_lora_rank + rope_head_dim rows",
    ),
    ("latent_queries", {"qr": QR[0]}, "qr must have shape [num_tokens, q_lora_rank], got [7]"),
    (
        "latent_queries",
        {"wq_b": WEIGHTS.wq_b[1:]},
        "wq_b must have a multiple of 9 rows, got 26; nope and rope channels of a head",
    ),
    (
        "latent_queries",
        {"wq_b": WEIGHTS.wq_b[:, 1:]},
        "wq_b must have shape [num_heads * head width, 7], got [27, 6]; as wide as the query latent",
    ),
    ("latent_queries", {"nope_head_dim": 0}, "nope_head_dim must be an int >= 1, got 0"),
    ("absorbed_queries", {"q_nope": Q[0]}, "q_nope must have shape [num_tokens, num_heads, nope_head_dim], got [3, 5]"),
    (
        "absorbed_queries",
        {"w_uk": WEIGHTS.w_uk[1:]},
        "w_uk must have shape [3, 5, kv_lora_rank], got [2, 5, 128]; cut it with the heads",
    ),
    ("value_heads", {"out": int32([[[1]]])}, f"out must have dtype {FLOAT}, got int32; cast out first"),
    (
        "value_heads",
        {"w_uv": WEIGHTS.w_uv[:, :, 1:]},
        "w_uv must have shape [3, v_head_dim, 128], got [3, 3, 127]; cut it with the heads",
    ),
    ("token_index_keys", {"wk": PART.wk[:, 1:]}, "wk must have shape [index_head_dim, 9], got [8, 8]; as wide as x"),
    ("token_index_keys", {"k_norm": np.ones(7)}, "weight must have shape [8], got [7]; one weight a channel"),
    (
        "token_index_queries",
        {"wq_b": PART.wq_b[1:]},
        "wq_b must have a multiple of 8 rows, got 15; one block a head",
    ),
    ("token_index_queries", {"index_head_dim": "8"}, "index_head_dim must be an int >= 1, got str '8'"),
    (
        "key_ranges",
        {"seq_lens": int32([2**31 - 1, 3])},
        f"seq_lens must sum to less than 2**31, got {2**31 + 2}; ranges are int32",
    ),
    (
        "key_ranges",
        {"token_indices": np.zeros(3)},
        "token_indices must have dtype int32, got float64; cast token_indices first",
    ),
    *(
        (
            name,
            {"topk_indices": TOPK[0]},
            "topk_indices must have shape [num_rows, index_topk], got [3]; one list a row",
        )
        for name in PICKED
    ),
    ("packed_topk", {"starts": int32([0])}, "starts must have shape [2], got [1]; one start a row"),
    (
        "packed_topk",
        {"starts": int32([0, 2**31 - 2])},
        f"starts must give rows below 2**31, got {2**31}; packed rows are int32",
    ),
    ("causal_picks", {"positions": int32([0])}, "positions must have shape [2], got [1]; one position a row"),
    ("paged_topk", {"block_size": 0}, f"block_size must be an int in [1, {2**31 - 1}], got 0"),
    *((name, bad, text.format(q=QUERY[name])) for name in FORMS for bad, text in ATTENTION),
    (
        "expanded_attention",
        {"w_uk": WEIGHTS.w_uk[:2]},
        "w_uk must have shape [3, 5, kv_lora_rank], got [2, 5, 128]; cut it with the heads",
    ),
    (
        "expanded_attention",
        {"w_uv": WEIGHTS.w_uv[:2]},
        "w_uv must have shape [3, v_head_dim, 128], got [2, 3, 128]; cut it with the heads",
    ),
    # Caches to start with.
    ("empty_mla_cache", {"config": None}, "config must be of type MLAConfig, got NoneType"),
    ("empty_mla_cache", {"num_blocks": -1}, "num_blocks must be an int >= 0, got -1"),
    ("empty_mla_cache", {"block_size": 0}, "block_size must be an int >= 1, got 0"),
    ("empty_mla_cache", {"dtype": "bfloat16"}, "dtype must be one of 'float32', 'float64', got 'bfloat16'"),
    ("empty_mla_cache", {"fp8": 1}, "fp8 must be true or false, got int 1"),
    (
        "empty_mla_cache",
        {"fp8": True, "int8_index_cache": True},
        "int8_index_cache must be False with fp8, got True; index keys are kept in one of the two",
    ),
    # The way in and the way out.
    ("local_inputs", {"partition": None}, "partition must be of type Partition, got NoneType"),
    ("local_inputs", {"cp_rank": 2}, "cp_rank must be an int in [0, 1], got 2; ranks count from 0 within cp_size 2"),
    ("local_inputs", {"token_ids": IDS[1:]}, "token_ids must have shape [8], got [7]; one a token of the step"),
    ("local_inputs", {"labels": np.ones(8)}, "labels must have dtype int32, got float64; cast labels first"),
    (
        "local_inputs",
        {"query_start_loc": int32([0, 5, 7])},
        "query_start_loc must have 8 rows, got 7; the tokens of the partition",
    ),
    (
        "rows_argmax",
        {"logits": SHARDS[:1]},
        "shards must come from the 2 ranks of the partition, got 1 ranks; split and gather over the same group",
    ),
    (
        "rows_argmax",
        {"logits": [SHARDS[0], SHARDS[1][:3]]},
        "shards must have 4 rows on rank 1, got 3; pad rows travel with the rest",
    ),
    (
        "rows_argmax",
        {"logits": [np.ones((4, 0))] * 2},
        "vocab must be an int >= 1, got 0; rank 0 has nothing to choose from",
    ),
    (
        "rows_argmax",
        {"query_start_loc": int32([0, 7])},
        "query_start_loc must end at the 8 tokens of the partition, got 7; build both from the same lengths",
    ),
    ("vocab_argmax", {"logits": 3}, "logits must be a list with one item a rank, got int"),
    ("vocab_argmax", {"logits": []}, "cp_size must be an int >= 1, got 0; one shard a rank"),
    (
        "vocab_argmax",
        {"logits": [np.ones((2, 3)), np.ones((2, 0))]},
        "vocab must be an int >= 1, got 0; rank 1 has nothing to choose from",
    ),
    (
        "vocab_argmax",
        {"logits": [np.ones((2, 3)), np.ones((3, 1))]},
        "shards must be alike: rank 0 has float64 [3, 2], got float64 [1, 3] on rank 1; every rank sends the "
        "same kind of rows",
    ),
    ("vocab_argmax", {"logits": [int32([[1]])]}, f"logits must have dtype {FLOAT}, got int32; cast logits first"),
]


def ids_of(cases: list[tuple[str, dict[str, Any], str]]) -> list[Any]:
    """The cases under readable names."""
    return [pytest.param(*case, id=f"{case[0]}-{'-'.join(case[1])}-{i}") for i, case in enumerate(cases)]


@pytest.mark.parametrize(("name", "bad", "text"), ids_of(ARRAYS))
def test_a_broken_rule_is_refused(name: str, bad: dict[str, Any], text: str) -> None:
    refuse(name, text, **bad)


# --- steps ---


def weights_with(name: str, **fields: Any) -> dict[str, Any]:
    """The weights of a step, those of its last attention layer with other fields."""
    attention = WEIGHTS._replace(**fields)
    if name in LAYERS:
        return {"weights": attention}
    if name in BLOCKS:
        return {"weights": BLOCK._replace(attention=attention)}
    return {"weights": STACK.weights._replace(blocks=(BLOCK, BLOCK._replace(attention=attention)))}


def caches_with(name: str, **fields: Any) -> dict[str, Any]:
    """The caches of a step, that of the last rank and the last layer with other fields."""
    bad = CACHE._replace(**fields)
    whole = {
        "mla_attention_layer": bad,
        "mla_block": bad,
        "mla_decoder_stack": [CACHE, bad],
        "mla_stack_over_ranks": [[CACHE] * 2, [CACHE, bad]],
    }
    return {"caches" if isinstance(LEGAL[name].get("caches"), list) else "cache": whole.get(name, [CACHE, bad])}


FOLLOW = "; the shapes follow from config"
BAD_WEIGHTS: list[tuple[dict[str, Any], str]] = [
    ({"wq_a": WEIGHTS.wq_a[1:]}, f"weights.wq_a must have shape [7, 9], got [6, 9]{FOLLOW}"),
    ({"q_norm": None}, f"weights.q_norm must be an array, got NoneType; dtype {FLOAT}"),
    ({"w_uv": int32([1])}, f"weights.w_uv must have dtype {FLOAT}, got int32; cast weights.w_uv first"),
    ({"wo": WEIGHTS.wo[1:]}, f"weights.wo must have shape [9, 9], got [8, 9]{FOLLOW}"),
    ({"indexer": None}, "weights.indexer must be of type MLAIndexerWeights, got NoneType"),
    (
        {"indexer": PART._replace(k_norm_bias=np.ones(7))},
        f"weights.indexer.k_norm_bias must have shape [8], got [7]{FOLLOW}",
    ),
]
INT8 = empty_mla_cache(CONFIG, num_blocks=len(CACHE.latent_cache), block_size=4, dtype="float64", int8_index_cache=True)
FP8 = empty_mla_cache(CONFIG, num_blocks=len(CACHE.latent_cache), block_size=4, dtype="float64", fp8=True)
COUNT = len(CACHE.latent_cache)
BAD_CACHES: list[tuple[dict[str, Any], str]] = [
    (
        {"latent_cache": CACHE.latent_cache[..., 1:].copy()},
        "latent_cache must have shape [num_blocks, block_size, 128], got [{n}, 4, 127]; as the queries",
    ),
    (
        {"rope_cache": CACHE.rope_cache.astype(np.float32)},
        "rope_cache must have dtype float64, got float32; cast rope_cache first",
    ),
    ({"rope_cache": None}, "latent_cache must have dtype uint8, got float64; cast latent_cache first"),
    (
        {"rope_cache": None, "latent_cache": FP8.latent_cache[..., 1:].copy()},
        "latent_cache must have shape [num_blocks, block_size, 140], got [{n}, 4, 139]; without a rope_cache",
    ),
    (
        {"index_cache": CACHE.index_cache[..., 1:].copy()},
        "index_cache must have shape [num_blocks, block_size, 8], got [{n}, 4, 7]; of config",
    ),
    (
        {"index_cache": CACHE.index_cache[1:].copy()},
        "cache.index_cache must have {n} blocks of 4, got {less} blocks of 4; one block table serves all parts",
    ),
    (
        {"index_cache": INT8.index_cache._replace(scales=np.ones((COUNT, 4), np.float32))},
        "index_cache.scales must have dtype float16, got float32; cast index_cache.scales first",
    ),
    (
        {"index_cache": FP8.index_cache._replace(scales=np.ones((COUNT, 3), np.float32))},
        "index_cache.scales must have shape [{n}, 4], got [{n}, 3]; one scale a vector",
    ),
]


@pytest.mark.parametrize(
    ("fields", "text"), BAD_WEIGHTS, ids=[f"{i}-{'-'.join(f)}" for i, (f, _) in enumerate(BAD_WEIGHTS)]
)
@pytest.mark.parametrize("name", STEPS)
def test_weights_of_another_model_are_refused(name: str, fields: dict[str, Any], text: str) -> None:
    refuse(name, text, **weights_with(name, **fields))


@pytest.mark.parametrize(
    ("fields", "text"), BAD_CACHES, ids=[f"{i}-{'-'.join(f)}" for i, (f, _) in enumerate(BAD_CACHES)]
)
@pytest.mark.parametrize("name", STEPS)
def test_caches_that_do_not_fit_are_refused(name: str, fields: dict[str, Any], text: str) -> None:
    """In place, that of the last layer before the first one writes."""
    refuse(name, text.format(n=COUNT, less=COUNT - 1), **caches_with(name, **fields))


GIVEN = tuple(name for name in STEPS if "given_topk" in LEGAL[name])
BAD_BATCHES: list[tuple[Any, str]] = [
    (tuple(BATCH), "batch must be of type MLABatch, got tuple"),
    (
        BATCH._replace(seq_lens=int32([4, 3])),
        "seq_lens must be 0 (padded slot) or at least the request's query length, got 4 keys for 5 queries of request "
        "0; seq_lens counts all keys of the request, this step's tokens included",
    ),
    (
        BATCH._replace(query_start_loc=int32([1, 5, 8])),
        "query_start_loc must start at 0, got 1; prepend the leading zero",
    ),
    (
        BATCH._replace(block_table=BATCH.block_table[:1]),
        f"batch.block_table must have shape [2, max_blocks], got [1, {BATCH.block_table.shape[1]}]; one row a request",
    ),
    (
        BATCH._replace(block_table=BATCH.block_table[:, :1].copy()),
        "block_table must reach row 4 of request 0, got 2 requests of 1 blocks of 4; allocate the block before it is "
        "used",
    ),
    (
        BATCH._replace(block_table=np.full_like(BATCH.block_table, -1)),
        "block_table must name a block for row 0 of request 0, got -1; the used part of a table holds block ids only",
    ),
]
MODES = {"split": "stripes", "kept_keys": "none"}
STEP_CASES: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"batch": bad}, text) for name in STEPS for bad, text in BAD_BATCHES),
    *((name, {"config": None}, "config must be of type MLAConfig, got NoneType") for name in STEPS),
    *((name, {"weights": None}, "weights must be of type MLAWeights, got NoneType") for name in LAYERS),
    *((name, {"weights": WEIGHTS}, "weights must be of type MLABlockWeights, got MLAWeights") for name in BLOCKS),
    *((name, {"weights": BLOCK}, "weights must be of type StackWeights, got MLABlockWeights") for name in STACKS),
    *(
        (name, {"weights": BLOCK._replace(attention=None)}, "weights must be of type MLAWeights, got NoneType")
        for name in BLOCKS
    ),
    *(
        (
            name,
            {"weights": BLOCK._replace(**{field: np.ones(8)})},
            f"weights.{field} must have shape [9], got [8]; one weight a channel",
        )
        for name in BLOCKS
        for field in ("attn_norm", "ffn_norm")
    ),
    *(
        (
            name,
            {"weights": BLOCK._replace(experts=expert_of(np.random.default_rng(2), 6, 8))},
            "weights.experts must take and give the 9 channels of hidden_size, got 8; the shapes follow from config",
        )
        for name in BLOCKS
    ),
    # Selections.
    *(
        (
            name,
            {"given_topk": np.zeros((8, 4), np.int32)},
            "given_topk must have shape [8, 3], got [8, 4]; one row a token of x",
        )
        for name in GIVEN
    ),
    *(
        (name, {"given_topk": np.zeros((8, 3))}, "given_topk must have dtype int32, got float64; cast given_topk first")
        for name in GIVEN
    ),
    # Rows of one device.
    ("mla_attention_layer", {"x": X[:7]}, "x must have at least 8 rows, got 7; query_start_loc counts global rows"),
    ("mla_block", {"x": X[:7]}, "x must have at least 8 rows, got 7; query_start_loc counts global rows"),
    (
        "mla_attention_layer",
        {"x": X[:, 1:]},
        "x must have shape [num_tokens, 9], got [8, 8]; the block input after its norm",
    ),
    ("mla_block", {"x": X[:, 1:]}, "x must have shape [num_tokens, 9], got [8, 8]; the residual stream"),
    (
        "mla_attention_layer",
        {"x": X.astype(np.float32)},
        "latent_cache must have dtype float32, got float64; cast latent_cache first",
    ),
    *(
        (name, {"x": None}, f"x must be an array, got NoneType; dtype {FLOAT}")
        for name in ("mla_attention_layer", "mla_block")
    ),
    # Rows of ranks.
    *((name, {"shards": []}, "cp_size must be an int >= 1, got 0; one shard a rank") for name in OVER_RANKS),
    *((name, {"shards": 2}, "shards must be a list with one item a rank, got int") for name in OVER_RANKS),
    *(
        (name, {"shards": [SHARDS[0], None]}, "shards must be arrays with a row axis, got NoneType; rank 1")
        for name in OVER_RANKS
    ),
    *(
        (
            name,
            {"shards": [SHARDS[0], SHARDS[1][:3]]},
            "shards must have 4 rows on rank 1, got 3; pad rows travel with the rest",
        )
        for name in OVER_RANKS
    ),
    *(
        (
            name,
            {"shards": [SHARDS[0], SHARDS[1].astype(np.float32)]},
            "shards must be alike: rank 0 has float64 [4, 9], got float32 [4, 9] on rank 1; every rank sends the same "
            "kind of rows",
        )
        for name in OVER_RANKS
    ),
    *(
        (
            name,
            {"shards": [rows[:, 1:] for rows in SHARDS]},
            f"shards must have shape [local_rows, 9], got [4, 8]; {hint}",
        )
        for name, hint in zip(OVER_RANKS, ("the block input after its norm", "the residual stream"), strict=True)
    ),
    *((name, {"caches": [CACHE]}, "caches must hold one cache for each of 2 ranks, got 1") for name in OVER_RANKS),
    *(
        (name, {"caches": 2}, "caches must be a list with one item a rank, got int")
        for name in (*OVER_RANKS, STACKS[0])
    ),
    *(
        (name, {"kept_keys": "none"}, "kept_keys must be one of 'all', 'own', got 'none'")
        for name in (*OVER_RANKS, STACKS[1])
    ),
    *(
        (name, {"experts": "sharded"}, "experts must be one of 'whole', 'split', 'sliced', got 'sharded'")
        for name in (BLOCKS[1], STACKS[1])
    ),
    *(
        (
            name,
            {"num_input_tokens": 7},
            f"num_input_tokens must be an int in [8, {2**31 - 5}], got 7; query_start_loc ends at 8; "
            "padding may add rows, never remove them",
        )
        for name in (*OVER_RANKS, STACKS[1])
    ),
    # Stacks.
    *(
        (name, {"token_ids": IDS.astype(np.int64)}, "token_ids must have dtype int32, got int64; cast token_ids first")
        for name in STACKS
    ),
    *(
        (
            name,
            {"token_ids": int32([0, 1, 11, -1, 0, 0, 0, 0])},
            "token_ids must be in [0, 11), got 11; embed has one row a token id",
        )
        for name in STACKS
    ),
    (
        "mla_decoder_stack",
        {"token_ids": IDS[:7]},
        "x must have at least 8 rows, got 7; query_start_loc counts global rows",
    ),
    ("mla_stack_over_ranks", {"token_ids": IDS[:7]}, "token_ids must have 8 rows, got 7; one a token of the step"),
    *(
        (
            name,
            {"weights": STACK.weights._replace(head=np.ones((10, 9)))},
            "weights.head must have shape [11, 9], got [10, 9]; like embed",
        )
        for name in STACKS
    ),
    *(
        (
            name,
            {"weights": STACK.weights._replace(norm=np.ones(8))},
            "weights.norm must have shape [9], got [8]; one weight a channel",
        )
        for name in STACKS
    ),
    *(
        (
            name,
            {"weights": STACK.weights._replace(embed=np.ones((11, 8)))},
            "weights.embed must have shape [vocab, 9], got [11, 8]",
        )
        for name in STACKS
    ),
    ("mla_decoder_stack", {"caches": [CACHE]}, "caches must hold one cache for each of 2 layers, got 1"),
    (
        "mla_stack_over_ranks",
        {"caches": [[CACHE] * 2, [CACHE]]},
        "caches must hold one cache for each of 2 layers, got 1",
    ),
    ("mla_stack_over_ranks", {"caches": []}, "cp_size must be an int >= 1, got 0; one list of caches a rank"),
    ("mla_stack_over_ranks", {"caches": 2}, "caches must be a list with one item a rank, got int"),
    *(
        (
            name,
            {"weights": STACK.weights._replace(blocks=(BLOCK, BLOCK._replace(ffn_norm=np.ones(8))))},
            "weights.ffn_norm must have shape [9], got [8]; one weight a channel",
        )
        for name in STACKS
    ),
]


@pytest.mark.parametrize(("name", "bad", "text"), ids_of(STEP_CASES))
def test_a_broken_rule_of_a_step_is_refused(name: str, bad: dict[str, Any], text: str) -> None:
    """A bad second layer, too, before the first one writes."""
    refuse(name, text, **bad)


# --- combinations that cannot work ---


@pytest.mark.parametrize("name", [*OVER_RANKS, "mla_stack_over_ranks"])
def test_own_keys_behind_computed_tokens_are_unsupported(name: str) -> None:
    shards = {"shards": [X[:3], X[3:6]]} if name in OVER_RANKS else {"token_ids": IDS[:5]}
    text = (
        "kept_keys must be 'all' where a request has earlier tokens, got 'own' with 3 of request 0; ranks that keep "
        "own keys only cannot go on: chunks and decode need all keys"
    )
    refuse(name, text, UnsupportedError, batch=LATER, kept_keys="own", **shards)


@pytest.mark.parametrize("experts", ["split", "sliced"])
@pytest.mark.parametrize("name", ["mla_block_over_ranks", "mla_stack_over_ranks"])
def test_experts_that_ranks_cannot_share_are_unsupported(name: str, experts: str) -> None:
    """6 rows over 4 ranks; in a stack, of the second layer alone."""
    ranks = {"experts": experts, "caches": [CACHE] * 4, "shards": [X[i : i + 2] for i in range(0, 8, 2)]}
    if name == "mla_stack_over_ranks":
        even = BLOCK._replace(experts=expert_of(np.random.default_rng(3), 4, 9))
        weights = STACK.weights._replace(blocks=(even, BLOCK))
        ranks = {"experts": experts, "caches": [STACK.caches] * 4, "weights": weights}
    text = "cp_size must divide the 6 rows of w1 unless experts is 'whole', got 4; use experts='whole'"
    refuse(name, text, UnsupportedError, **ranks)


# --- a refused step in place ---


def coded(cache: MLACache, kind: str) -> MLACache:
    """A cache of this kind, with bytes that would tell of any write."""
    codes = {"floats": {}, "int8": {"int8_index_cache": True}, "fp8": {"fp8": True}}[kind]
    sizes = {"num_blocks": len(cache.latent_cache), "block_size": 4, "dtype": "float64"}
    return poisoned(empty_mla_cache(CONFIG, **sizes, **codes))


def bytes_of(value: Any) -> list[bytes]:
    """Every tensor's bytes."""
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors_of(value)]


def in_place(name: str, arguments: dict[str, Any], kind: str) -> tuple[str, Any]:
    """What the call that writes into its caches says, once every byte of them is found as it was."""
    given = to_torch(arguments)
    before = bytes_of(given)
    function = forms(name)[2][0]
    with pytest.raises((ContractError, UnsupportedError)) as caught:
        function(**given)
    assert bytes_of(given) == before, f"{name} with {kind}: a refused call has written"
    return str(caught.value), type(caught.value)


def with_caches(name: str, kind: str) -> dict[str, Any]:
    """The legal call over caches of this kind."""
    cache = coded(CACHE, kind)
    whole = {
        "mla_attention_layer": cache,
        "mla_block": cache,
        "mla_decoder_stack": [cache] * 2,
        "mla_stack_over_ranks": [[cache] * 2] * 2,
    }
    return {**LEGAL[name], "caches" if "caches" in LEGAL[name] else "cache": whole.get(name, [cache] * 2)}


def hole(table: np.ndarray, request: int, column: int, block: int) -> np.ndarray:
    """The table with one other block id."""
    changed = table.copy()
    changed[request, column] = block
    return read_only(changed)


@pytest.mark.parametrize("kind", ["floats", "int8", "fp8"])
@pytest.mark.parametrize("name", STEPS)
def test_a_table_that_only_attention_reads_leaves_the_caches_alone(name: str, kind: str) -> None:
    """The block of an earlier chunk is gone: new rows have places, old ones are not there to be read."""
    batch = WORLD.step([4, 0], [5, 3])[1]
    rows = {"x": X[:4]} if "x" in LEGAL[name] else {"token_ids": IDS[:4]}
    rows = {"shards": [X[:2], X[2:4]]} if "shards" in LEGAL[name] else rows
    for block, rule in ((-1, "block_table must name a block for row 0 of request 0"), (99, "slots must")):
        bad = batch._replace(block_table=hole(batch.block_table, 0, 0, block))
        text, kind_of_error = in_place(name, {**with_caches(name, kind), **rows, "batch": bad}, kind)
        assert kind_of_error is ContractError
        assert text.startswith(rule)


@pytest.mark.parametrize("kind", ["floats", "int8", "fp8"])
@pytest.mark.parametrize("name", STEPS)
def test_a_table_with_one_block_twice_leaves_the_caches_alone(name: str, kind: str) -> None:
    """Two rows of the step would go to one slot."""
    table = BATCH.block_table
    bad = BATCH._replace(block_table=hole(table, 1, 0, int(table[0, 0])))
    text, _ = in_place(name, {**with_caches(name, kind), "batch": bad}, kind)
    assert text.startswith("slots must be distinct")


@pytest.mark.parametrize("kind", ["floats", "int8", "fp8"])
@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize(("token", "rule"), [(1, "below the 1 tokens"), (-2, "-1 or below the 1"), (0, "distinct")])
def test_a_given_selection_that_cannot_be_leaves_the_caches_alone(name: str, kind: str, token: int, rule: str) -> None:
    topk = np.full((8, 3), -1, np.int32)
    topk[0] = [0, token, -1]
    text, _ = in_place(name, {**with_caches(name, kind), "given_topk": topk}, kind)
    assert text.startswith("topk_indices must be")
    assert rule in text


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_without_a_code_leave_the_caches_alone(name: str, kind: str, value: float) -> None:
    """Of the last token, on the last rank: every package says so, the mirror before any rank has written."""
    rows = X.copy()
    rows[7, 0] = value
    embed = STACK.weights.embed.copy()
    embed[IDS[7]] = value
    bad: dict[str, Any] = {"weights": STACK.weights._replace(embed=embed)}
    if name not in STACKS:
        bad = {"x": rows} if "x" in LEGAL[name] else {"shards": [rows[:4], rows[4:]]}
    arguments = {**with_caches(name, kind), **bad}
    with np.errstate(invalid="ignore"), pytest.raises(ContractError) as caught:
        forms(name)[0][0](**arguments)
    text, _ = in_place(name, arguments, kind)
    assert text == str(caught.value)
    where = "in float32" if kind == "fp8" else ", with scales that float16 holds"
    assert re.match(rf"(latent|index keys) must be finite ?{where}, got", text)


def test_a_second_layer_whose_table_does_not_fit_leaves_the_first_alone() -> None:
    """Fewer blocks in the second layer's cache than the table names."""
    short = MLACache(*(part[:1] for part in CACHE))
    assert (BATCH.block_table[:, 0] >= 1).any()
    for name, caches in (
        ("mla_decoder_stack", [CACHE, short]),
        ("mla_stack_over_ranks", [[CACHE] * 2, [CACHE, short]]),
    ):
        text, _ = in_place(name, {**LEGAL[name], "caches": caches}, "floats")
        assert text.startswith("slots must")


def test_ranks_keep_their_keys_alike() -> None:
    """Rows travel as the caches hold them, so no rank can take another kind."""
    arguments = LEGAL["mla_over_ranks"]
    floats, coded = arguments["caches"][0], quantized_int8(np.zeros(arguments["caches"][0].index_cache.shape))
    text = (
        "caches must be alike: rank 0 has latents in floats and index keys in floats, got latents in floats and index "
        "keys in QuantizedVectors on rank 1; rows travel as the caches hold them"
    )
    refuse("mla_over_ranks", text, caches=[floats, floats._replace(index_cache=coded)])
