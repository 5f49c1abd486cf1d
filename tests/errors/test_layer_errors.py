"""What the exchange and the layer refuse: which argument, which rule, what was got, what to try."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dsacp_ref import exchange, layer
from dsacp_ref.config import SPLITS
from dsacp_ref.partition import partition_tokens
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.layer_strategies import CSA, SMALL, WINDOW, frozen, world_of
from tests.maths_strategies import int32
from tests.strategies import read_only

MOST = 2**31 - 1
SHARDS = frozen([np.ones((2, 2, 1)), np.ones((2, 2, 1))])
THREE = partition_tokens(int32([0, 3]), 2)  # 2 rows a rank, the last one a pad row
WORLD = world_of(np.random.default_rng(0), [5, 3], kind=CSA)
BARE = world_of(np.random.default_rng(1), [5, 3], kind=WINDOW)
X, BATCH = WORLD.step([0, 0], [5, 3])
STEP = {"weights": WORLD.weights, "batch": BATCH, "config": SMALL, "compress_ratio": 4}
LENGTHS = {"query_start_loc": int32([0, 3]), "seq_lens": int32([5])}
SIZES = {"num_blocks": 2, "block_size": 2, "num_cmp_blocks": 1, "cmp_block_size": 1, "num_slots": 1, "spare_rows": 0}
MODES = {"split": "contiguous", "rows": "full", "key_mode": "replicate", "output_mode": "all_to_all"}

LEGAL: dict[Callable[..., Any], dict[str, Any]] = {
    exchange.all_gather: {"shards": SHARDS},
    exchange.all_reduce: {"shards": SHARDS},
    exchange.reduce_scatter: {"shards": SHARDS, "rows_per_rank": [1, 1]},
    exchange.all_to_all: {"blocks": [[np.ones(1)] * 2] * 2},
    exchange.head_shards: {"shards": SHARDS},
    exchange.token_shards: {"shards": SHARDS, "rows_per_rank": [1, 1]},
    exchange.gathered_in_order: {"shards": SHARDS, "partition": THREE},
    exchange.requested_rows: {"shards": SHARDS, "partition": THREE, "wanted": [int32([0]), int32([])]},
    layer.attention_layer: {"x": X, "cache": WORLD.cache, "given_topk": None, **STEP},
    layer.head_parallel_layer: {"x": X, "caches": [WORLD.cache] * 2, **STEP},
    layer.layer_over_ranks: {"inputs": [X] * 2, "caches": [WORLD.cache] * 2, "given_topk": None, **MODES, **STEP},
    layer.draft_batches: {**LENGTHS, "num_steps": 2},
    layer.draft_metadata: {**LENGTHS, "cp_size": 2, "cp_rank": 1, "num_steps": 2, "frequencies": (1.0,)},
    layer.empty_cache: {"weights": WORLD.weights, **SIZES},
    layer.layer_frequencies: {"config": SMALL, "compress_ratio": 4},
    layer.projected_output: {"out": np.ones((2, 4, 6)), "wo_a": WORLD.weights.wo_a, "wo_b": WORLD.weights.wo_b},
    layer.uses_context_parallel: {**LENGTHS, "mixed": "cp", "decode_query_len": 1},
}


def arrays_of(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    return [array for part in value for array in arrays_of(part)] if isinstance(value, (list, tuple)) else []


def refuse(function: Callable[..., Any], text: str, kind: type[Exception] = ContractError, **bad: Any) -> None:
    """The legal call with these arguments instead is refused with exactly this text, its inputs as they were."""
    arguments = {**LEGAL[function], **bad}
    before = [array.tobytes() for array in arrays_of(list(arguments.values()))]
    with pytest.raises(kind, match=f"^{re.escape(text)}$") as caught:
        function(**arguments)
    assert type(caught.value) is kind
    assert [array.tobytes() for array in arrays_of(list(arguments.values()))] == before


@pytest.mark.parametrize("function", LEGAL, ids=lambda function: function.__name__)
def test_the_call_that_the_tables_spoil_is_legal(function: Callable[..., Any]) -> None:
    function(**LEGAL[function])


def test_every_public_function_is_here() -> None:
    records = {"KeyRows", "LayerBatch", "LayerCache", "LayerOutput", "LayerWeights", "RanksOutput"}
    assert {*exchange.__all__, *layer.__all__} - records == {function.__name__ for function in LEGAL}


# --- exchange ---------------------------------------------------------------------------------------------------------

COLLECTIVES = tuple(function for function in LEGAL if function.__module__ == exchange.__name__)
LIKE_RANK_0 = (
    "shards must be alike: rank 0 has float64 [2, 2, 1], got {got} on rank 1; every rank sends the same kind of rows"
)
EXCHANGE: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *(
        (function, {"shards": [SHARDS[0], bad]}, text)
        for function in COLLECTIVES
        if "shards" in LEGAL[function]
        for bad, text in (
            (np.ones((2, 2, 1), np.float32), LIKE_RANK_0.format(got="float32 [2, 2, 1]")),
            (np.ones((2, 2, 2)), LIKE_RANK_0.format(got="float64 [2, 2, 2]")),
            (np.ones((2, 2)), LIKE_RANK_0.format(got="float64 [2, 2]")),
            ([[[1.0]]], "shards must be arrays with a row axis, got list; rank 1"),
            (None, "shards must be arrays with a row axis, got NoneType; rank 1"),
            (np.float64(1.0), "shards must be arrays with a row axis, got float64; rank 1"),
        )
    ),
    *(
        (function, {"shards": [SHARDS[0], np.ones((3, 2, 1))]}, LIKE_RANK_0.format(got="float64 [3, 2, 1]"))
        for function in (exchange.all_reduce, exchange.reduce_scatter, exchange.token_shards)
    ),
    *(
        (
            function,
            {"rows_per_rank": counts},
            f"rows_per_rank must split 2 rows over 2 ranks, got {counts}; one count a rank",
        )
        for function in (exchange.reduce_scatter, exchange.token_shards)
        for counts in ([1, 2], [0, 0], [2], [1, 1, 0])
    ),
    *(
        (function, {"rows_per_rank": [1, bad]}, f"rows_per_rank must be an int >= 0, got {got}")
        for function in (exchange.reduce_scatter, exchange.token_shards)
        for bad, got in ((-1, "-1"), (1.0, "float 1.0"), (True, "bool True"), (None, "NoneType None"))
    ),
    (
        exchange.token_shards,
        {"shards": [np.ones((2, 3))] * 2},
        "shards must have shape [rows, heads, head_dim], got [2, 3]",
    ),
    (exchange.all_to_all, {"blocks": []}, "cp_size must be an int >= 1, got 0"),
    (
        exchange.all_to_all,
        {"blocks": [[np.ones(1)] * 2, [np.ones(1)]]},
        "blocks must hold 2 blocks on every rank, got 1 on rank 1",
    ),
    (
        exchange.all_to_all,
        {"blocks": [[np.ones(1)] * 2, [np.ones(1), [1.0]]]},
        "blocks must be arrays, got list; rank 1",
    ),
    *(
        (
            exchange.head_shards,
            {"shards": [np.ones((2, *shape)) for _ in range(3)]},
            f"shards must have [rows, heads, head_dim] with heads a multiple of cp_size 3, got {[2, *shape]}; "
            "output modes gather_weight and replicated_weight need no such multiple",
        )
        for shape in ((4, 1), (0, 1), (3,), ())
    ),
    *(
        (
            function,
            {"shards": [SHARDS[0]] * 4},
            "shards must come from the 2 ranks of the partition, got 4 ranks; split and gather over the same group",
        )
        for function in (exchange.gathered_in_order, exchange.requested_rows)
    ),
    *(
        (
            function,
            {"shards": [SHARDS[0], np.ones((1, 2, 1))]},
            "shards must have 2 rows on rank 1, got 1; pad rows travel with the rest",
        )
        for function in (exchange.gathered_in_order, exchange.requested_rows)
    ),
    (exchange.requested_rows, {"wanted": [int32([0])]}, "wanted must hold one list for each of 2 ranks, got 1"),
    *(
        (exchange.requested_rows, {"wanted": [int32([]), bad]}, text)
        for bad, text in (
            (int32([3]), "wanted must name tokens in [0, 3), got [3]"),
            (int32([0, -1]), "wanted must name tokens in [0, 3), got [0, -1]"),
            (np.array([0]), "wanted must have dtype int32, got int64; cast wanted first"),
            ([0], "wanted must be an array, got list; dtype int32"),
            (int32([[0]]), "wanted must have shape [count], got [1, 1]; rank 1"),
        )
    ),
]

# --- the layer --------------------------------------------------------------------------------------------------------

LAYERS = (layer.attention_layer, layer.head_parallel_layer, layer.layer_over_ranks)
FLOAT = "float32 or float64"
AT_LEAST = "seq_lens counts all keys of the request, this step's tokens included"


def part(record: Any, path: str, value: Any) -> Any:
    """The record with one part, named by its path, replaced."""
    name, _, rest = path.partition(".")
    return record._replace(**{name: part(getattr(record, name), rest, value) if rest else value})


WEIGHTS: list[tuple[str, Any, str]] = [
    (name, bad, text.format(name=f"weights.{name}"))
    for name in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "attn_sink", "wo_a", "wo_b", "indexer.wq_b")
    for bad, text in (
        (None, "{name} must be an array, got NoneType; dtype " + FLOAT),
        ([1.0], "{name} must be an array, got list; dtype " + FLOAT),
        (np.ones(2, np.float16), "{name} must have dtype " + FLOAT + ", got float16; cast {name} first"),
        (np.ones(2, np.int32), "{name} must have dtype " + FLOAT + ", got int32; cast {name} first"),
    )
] + [
    ("wq_b", np.ones((12, 5)), "weights.wq_b must have shape [24, 5], got [12, 5]; the shapes follow from config"),
    ("attn_sink", np.ones(2), "weights.attn_sink must have shape [4], got [2]; the shapes follow from config"),
    ("wo_a", np.ones((6, 12)), "weights.wo_a must have shape [2, 3, 12], got [6, 12]; the shapes follow from config"),
    ("wo_b", np.ones((6, 8)), "weights.wo_b must have shape [8, 6], got [6, 8]; the shapes follow from config"),
    ("indexer.wq_b", np.ones((8, 5)), "weights.indexer.wq_b must have shape [16, 5], got [8, 5]"),
    ("indexer.weights_proj", np.ones((3, 8)), "weights.indexer.weights_proj must have shape [2, 8], got [3, 8]"),
    (
        "compressor",
        None,
        "weights.compressor must be there exactly when compress_ratio is above 1, got none at compress_ratio 4; "
        "compress_ratio 1 is a window-only layer",
    ),
    ("compressor.wgate", np.ones((6, 8)), "wgate must have shape [12, 8], got [6, 8]; like wkv"),
    (
        "compressor.norm_weight",
        np.ones(5),
        "wkv must have 5 or, with overlap, 10 rows, got 12; norm_weight has 5 channels",
    ),
    (
        "compressor.ape",
        np.ones((8, 12)),
        "weights.compressor must pool 4 tokens of 8 into 6 channels, got 8 tokens of 8 into 6; "
        "ape has one row a token of the window",
    ),
    (
        "compressor",
        WORLD.weights.indexer.compressor,
        "weights.compressor must pool 4 tokens of 8 into 6 channels, got 4 tokens of 8 into 8; "
        "ape has one row a token of the window",
    ),
    (
        "indexer.compressor",
        WORLD.weights.compressor,
        "weights.indexer.compressor must pool 4 tokens of 8 into 8 channels, got 4 tokens of 8 into 6; "
        "ape has one row a token of the window",
    ),
]
TABLE = "batch.{side}_block_table must have shape [2, max_{kind}blocks], got [1, 1]"
BATCHES: list[tuple[str, Any, str]] = [
    ("query_start_loc", int32([5, 8]), "query_start_loc must start at 0, got 5; prepend the leading zero"),
    (
        "query_start_loc",
        np.array([0, 5, 8]),
        "query_start_loc must have dtype int32, got int64; cast query_start_loc first",
    ),
    (
        "seq_lens",
        int32([4, 3]),
        "seq_lens must be 0 (padded slot) or at least the request's query length, got 4 keys for 5 queries of "
        f"request 0; {AT_LEAST}",
    ),
    (
        "seq_lens",
        int32([5]),
        "seq_lens must have shape [2], got [1]; one entry per request (query_start_loc has 3 entries)",
    ),
    ("swa_block_table", int32([[0]]), TABLE.format(side="swa", kind="")),
    ("cmp_block_table", int32([[0]]), TABLE.format(side="cmp", kind="cmp_")),
    (
        "swa_block_table",
        np.zeros((2, 2)),
        "batch.swa_block_table must have dtype int32, got float64; cast batch.swa_block_table first",
    ),
    ("state_indices", int32([0]), "batch.state_indices must have shape [2], got [1]; one slot a request"),
    ("state_indices", [0, 1], "batch.state_indices must be an array, got list; dtype int32"),
    *(
        (
            "state_indices",
            int32(slots),
            f"batch.state_indices must be distinct and in [0, 7), got {slots}; one slot a request",
        )
        for slots in ([1, 1], [0, 7], [-1, 0])
    ),
]
CACHES: list[tuple[str, Any, str]] = [
    ("swa_cache", np.ones((2, 4, 5)), "cache.swa_cache must have shape [num_blocks, block_size, 6], got [2, 4, 5]"),
    (
        "swa_cache",
        np.ones((2, 4, 6), np.float32),
        "cache.swa_cache must have dtype float64, got float32; cast cache.swa_cache first",
    ),
    (
        "cmp_cache",
        np.ones((2, 4, 6), np.float32),
        "cache.cmp_cache must have dtype float64, got float32; cast cache.cmp_cache first",
    ),
    ("cmp_cache", None, "cache.cmp_cache must be an array, got NoneType; dtype float64"),
    (
        "cmp_cache",
        np.ones((2, 4, 8)),
        "cache.cmp_cache must have shape [num_cmp_blocks, cmp_block_size, 6], got [2, 4, 8]; "
        "entries and index keys share a block table",
    ),
    (
        "index_cache",
        np.ones((9, 2, 8)),
        f"cache.index_cache must have shape [{WORLD.cache.cmp_cache.shape[0]}, 3, 8], got [9, 2, 8]; "
        "entries and index keys share a block table",
    ),
    *(
        (f"{name}_state.{field}", bad, text.format(name=f"cache.{name}_state.{field}"))
        for name, width in (("cmp", 12), ("index", 16))
        for field in ("kv", "score")
        for bad, text in (
            (None, "{name} must be an array, got NoneType; dtype float64"),
            (np.ones((7, 8, width), np.float32), "{name} must have dtype float64, got float32; cast {name} first"),
            (
                np.ones((6, 8, width)),
                "{name} must have shape "
                + ("[7, num_rows, " if field == "kv" else "[7, 8, ")
                + f"{width}], got [6, 8, {width}]; use empty_cache",
            ),
        )
    ),
    *(
        (f"{name}_state.held_start", bad, text.format(name=f"cache.{name}_state.held_start"))
        for name in ("cmp", "index")
        for bad, text in (
            (np.zeros(7), "{name} must have dtype int32, got float64; cast {name} first"),
            (int32([0]), "{name} must have shape [7], got [1]; one a state slot"),
        )
    ),
    (
        "index_state.num_tokens",
        int32([0] * 6),
        "cache.index_state.num_tokens must have shape [7], got [6]; one a state slot",
    ),
    ("cmp_state.num_tokens", 7, "cache.cmp_state.num_tokens must be an array, got int; dtype int32"),
]
X_RULE = "; the block input after its norm"
ROWS_OF_X: list[tuple[Any, str]] = [
    (X[:7], "x must have at least 8 rows, got 7; query_start_loc counts global rows"),
    (X[:, :7], f"x must have shape [num_tokens, 8], got [8, 7]{X_RULE}"),
    (X[0], f"x must have shape [num_tokens, 8], got [8]{X_RULE}"),
    (X.astype(np.float16), "x must have dtype float32 or float64, got float16; cast x first"),
    (X.astype(np.float32), "cache.swa_cache must have dtype float32, got float64; cast cache.swa_cache first"),
    (X.tolist(), "x must be an array, got list; dtype float32 or float64"),
    (None, "x must be an array, got NoneType; dtype float32 or float64"),
]
RATIO = "compress_ratio must be an int >= 1, got "
OWN: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *((function, {"weights": part(WORLD.weights, *bad)}, text) for function in LAYERS for *bad, text in WEIGHTS),
    *((function, {"batch": part(BATCH, *bad)}, text) for function in LAYERS for *bad, text in BATCHES),
    *((layer.attention_layer, {"cache": part(WORLD.cache, *bad)}, text) for *bad, text in CACHES),
    *(
        (function, {"caches": [WORLD.cache, part(WORLD.cache, *bad)]}, text)
        for function in (layer.head_parallel_layer, layer.layer_over_ranks)
        for *bad, text in CACHES
    ),
    *((function, {"x": bad}, text) for function in LAYERS[:2] for bad, text in ROWS_OF_X),
    *(
        (function, {"compress_ratio": bad}, RATIO + got)
        for function in (*LAYERS, layer.layer_frequencies)
        for bad, got in (
            (0, "0"),
            (-4, "-4"),
            (4.0, "float 4.0"),
            (True, "bool True"),
            (None, "NoneType None"),
            ("4", "str '4'"),
            (np.ones(2), "ndarray array([1., 1.])"),
        )
    ),
    (
        layer.attention_layer,
        {"compress_ratio": 1},
        "weights.compressor must be there exactly when compress_ratio is above 1, got one at compress_ratio 1; "
        "compress_ratio 1 is a window-only layer",
    ),
    (
        layer.attention_layer,
        {"compress_ratio": 8},
        "weights.compressor must pool 8 tokens of 8 into 6 channels, got 4 tokens of 8 into 6; "
        "ape has one row a token of the window",
    ),
    (
        layer.attention_layer,
        {"weights": BARE.weights._replace(indexer=WORLD.weights.indexer), "cache": BARE.cache, "compress_ratio": 1},
        "weights.indexer must be None in a window-only layer, got one; it chooses among entries",
    ),
    (
        layer.attention_layer,
        {"weights": BARE.weights, "cache": BARE.cache, "compress_ratio": 1, "given_topk": int32([[-1, -1]] * 8)},
        "given_topk must be None in a layer without an indexer, got a selection",
    ),
    *(
        (function, {"given_topk": bad}, text)
        for function in (layer.attention_layer, layer.layer_over_ranks)
        for bad, text in (
            (int32([[-1, -1]] * 7), "given_topk must have shape [8, 2], got [7, 2]; one row a token of x"),
            (int32([[-1]] * 8), "given_topk must have shape [8, 2], got [8, 1]; one row a token of x"),
            (np.zeros((8, 2)), "given_topk must have dtype int32, got float64; cast given_topk first"),
            ([[-1, -1]] * 8, "given_topk must be an array, got list; dtype int32"),
        )
    ),
    (
        layer.attention_layer,
        {"given_topk": int32([[-1, -1]] * 4 + [[1, 0]] + [[-1, -1]] * 3)},
        "topk_indices must be -1 or below the 1 entries that query 4 sees, got 1; "
        "entries count within the request, and only complete ones are visible",
    ),
    (
        layer.attention_layer,
        {"given_topk": int32([[-1, -1]] * 4 + [[0, 0]] + [[-1, -1]] * 3)},
        "topk_indices must be distinct in a row, got entry 0 twice; query 4",
    ),
    # Going on from what is not there.
    (
        layer.attention_layer,
        {"batch": BATCH._replace(seq_lens=int32([5, 4]))},
        "state must hold rows 0 to 1 of request 1, got rows 0 to 0; "
        "keep the state with the prefix, or restart the request at 0",
    ),
    (
        layer.attention_layer,
        {"batch": BATCH._replace(swa_block_table=int32([[0], [1]]))},
        "block_table must reach row 4 of request 0, got 2 requests of 1 blocks of 4; "
        "allocate the block before it is used",
    ),
    (
        layer.attention_layer,
        {"batch": BATCH._replace(cmp_block_table=int32([[-1], [-1]]))},
        "block_table must name a block for row 0 of request 0, got -1; the used part of a table holds block ids only",
    ),
    (
        layer.attention_layer,
        {"batch": BATCH._replace(swa_block_table=int32([[0, 1], [1, 0]]))},
        "slots must be distinct, got slot 4 twice; one row a slot",
    ),
    # Over ranks.
    (layer.layer_over_ranks, {"inputs": []}, "cp_size must be an int >= 1, got 0; one input a rank"),
    (layer.head_parallel_layer, {"caches": []}, "cp_size must be an int >= 1, got 0; one cache a rank"),
    (layer.layer_over_ranks, {"caches": [WORLD.cache]}, "caches must hold one cache for each of 2 ranks, got 1"),
    (
        layer.layer_over_ranks,
        {"inputs": [X[:7]] * 2},
        "inputs must have 8 rows on rank 0 with rows 'full', got 7; the split says which rows",
    ),
    (
        layer.layer_over_ranks,
        {"inputs": [X, np.concatenate([X, X])]},
        "inputs must have shape [8, 8], got [16, 8]; rank 1 must be like rank 0",
    ),
    (
        layer.layer_over_ranks,
        {"inputs": [X, X.astype(np.float32)]},
        "inputs must have dtype float64, got float32; cast inputs first",
    ),
    (
        layer.layer_over_ranks,
        {"inputs": [X.astype(np.float16)] * 2},
        "inputs must have dtype float32 or float64, got float16; cast inputs first",
    ),
    (layer.layer_over_ranks, {"inputs": [X.tolist()] * 2}, f"inputs must be an array, got list; dtype {FLOAT}"),
    (layer.layer_over_ranks, {"inputs": [X, None]}, f"inputs must be an array, got NoneType; dtype {FLOAT}"),
    (layer.layer_over_ranks, {"inputs": [X[0]] * 2}, "inputs must have shape [num_rows, hidden], got [8]; rank 0"),
    (
        layer.layer_over_ranks,
        {"inputs": [X[:, :7]] * 2},
        f"x must have shape [num_tokens, 8], got [8, 7]{X_RULE}",
    ),
    *(
        (
            layer.layer_over_ranks,
            {"inputs": inputs, "rows": "scattered", "key_mode": "gather_hidden"},
            f"inputs must have 4 rows on rank {rank} with rows 'scattered', got {got}; the split says which rows",
        )
        for inputs, rank, got in (([X] * 2, 0, 8), ([X[:4], X[:5]], 1, 5), ([X[:3], X[:5]], 0, 3))
    ),
    *(
        (layer.layer_over_ranks, {name: bad}, f"{name} must be one of {words}, got {bad!r}")
        for name, words in (
            ("rows", "'full', 'scattered'"),
            ("key_mode", "'replicate', 'gather_hidden', 'gather_kv', 'gather_compressed'"),
            ("output_mode", "'all_to_all', 'gather_weight', 'replicated_weight'"),
        )
        for bad in ("", "Full", None, 1)
    ),
    (
        layer.layer_over_ranks,
        {"split": "zig-zag"},
        f"split must be one of {', '.join(map(repr, SPLITS))}, got 'zig-zag'; a page size is written "
        "round_robin_page(128); aliases: in-seq-split, round-robin-split",
    ),
    (
        layer.layer_over_ranks,
        {"num_input_tokens": 7},
        f"num_input_tokens must be an int in [8, {MOST - 4}], got 7; "
        "query_start_loc ends at 8; padding may add rows, never remove them",
    ),
    (
        layer.layer_over_ranks,
        {"num_input_tokens": 9, "split": "zigzag"},
        "num_input_tokens must equal the 8 tokens of query_start_loc for split 'zigzag', got 9; rows beyond the last "
        "request belong to no request; only contiguous and round_robin pad the flat stream",
    ),
    # The output projection.
    *(
        (layer.projected_output, {name: bad}, text)
        for name, bad, text in (
            ("out", np.ones((2, 24)), "out must have shape [num_tokens, num_heads, head_dim], got [2, 24]"),
            ("out", np.ones((2, 4, 6), np.int32), f"out must have dtype {FLOAT}, got int32; cast out first"),
            (
                "out",
                np.ones((2, 2, 6)),
                "wo_a must take the 2 heads of 6 channels of out, got 2 groups of 12; "
                "cut wo_a and wo_b to the groups of these heads",
            ),
            ("wo_a", np.ones((6, 12)), "wo_a must have shape [o_groups, o_lora_rank, group_width], got [6, 12]"),
            ("wo_b", np.ones((8, 3)), "wo_b must have shape [hidden, 6], got [8, 3]; o_groups * o_lora_rank columns"),
            ("wo_b", None, f"wo_b must be an array, got NoneType; dtype {FLOAT}"),
        )
    ),
    # Sizes.
    *(
        (layer.empty_cache, {name: bad}, f"{name} must be an int >= {least}, got {got}")
        for name, least in zip(SIZES, (0, 1, 0, 1, 0, 0), strict=True)
        for bad, got in ((least - 1, least - 1), (2.0, "float 2.0"), (True, "bool True"), (None, "NoneType None"))
    ),
    (
        layer.empty_cache,
        {"weights": WORLD.weights._replace(wkv=None)},
        f"weights.wkv must be an array, got NoneType; dtype {FLOAT}",
    ),
    # Drafts, and which steps split.
    *(
        (function, {"num_steps": bad}, f"num_steps must be an int >= 1, got {got}")
        for function in (layer.draft_batches, layer.draft_metadata)
        for bad, got in ((0, "0"), (1.0, "float 1.0"), (None, "NoneType None"), (True, "bool True"))
    ),
    *(
        (
            function,
            {"seq_lens": int32([MOST - 1]), "num_steps": 3},
            f"num_steps must keep seq_lens below 2**31, got 3; a request has {MOST - 1} keys",
        )
        for function in (layer.draft_batches, layer.draft_metadata)
    ),
    *(
        (
            function,
            {"seq_lens": int32([2])},
            "seq_lens must be 0 (padded slot) or at least the request's query length, got 2 keys for 3 queries of "
            f"request 0; {AT_LEAST}",
        )
        for function in (layer.draft_batches, layer.draft_metadata, layer.uses_context_parallel)
    ),
    (
        layer.draft_metadata,
        {"cp_rank": 2},
        "cp_rank must be an int in [0, 1], got 2; ranks count from 0 within cp_size 2",
    ),
    (layer.draft_metadata, {"cp_size": 0, "cp_rank": 0}, f"cp_size must be an int in [1, {1 << 20}], got 0"),
    (layer.draft_metadata, {"causal": 0}, "causal must be true or false, got int 0"),
    (layer.draft_metadata, {"frequencies": ("a",)}, "frequencies must be a finite number, got str 'a'"),
    (layer.draft_metadata, {"frequencies": (np.nan,)}, "frequencies must be a finite number, got nan"),
    *(
        (layer.uses_context_parallel, {"mixed": bad}, f"mixed must be one of 'cp', 'off', got {bad!r}")
        for bad in ("on", None, True)
    ),
    *(
        (layer.uses_context_parallel, {"decode_query_len": bad}, f"decode_query_len must be an int >= 1, got {got}")
        for bad, got in ((0, "0"), (1.0, "float 1.0"), (True, "bool True"))
    ),
]


@pytest.mark.parametrize(
    ("function", "bad", "text"),
    [pytest.param(*case, id=f"{case[0].__name__}-{'-'.join(case[1])}-{i}") for i, case in enumerate([*EXCHANGE, *OWN])],
)
def test_a_broken_rule_is_refused(function: Callable[..., Any], bad: dict[str, Any], text: str) -> None:
    refuse(function, text, **bad)


@pytest.mark.parametrize("cp_size", [3, 4])
def test_heads_that_ranks_cannot_share_are_unsupported(cp_size: int) -> None:
    """4 heads in 2 groups: 3 divides neither, 4 divides the heads only."""
    text = (
        f"cp_size must divide num_heads 4 and o_groups 2 when output_mode is 'all_to_all', got {cp_size}; "
        "use output_mode='gather_weight' or 'replicated_weight'"
    )
    ranks = {"caches": [WORLD.cache] * cp_size}
    refuse(layer.head_parallel_layer, text, UnsupportedError, **ranks)
    refuse(layer.layer_over_ranks, text, UnsupportedError, inputs=[X] * cp_size, **ranks)


def test_a_ring_that_is_too_short_is_refused() -> None:
    """8 rows are pooled into one entry of a ratio-4 layer."""
    state = WORLD.cache.cmp_state
    short = state._replace(kv=read_only(state.kv[:, :7]), score=read_only(state.score[:, :7]))
    refuse(
        layer.attention_layer,
        "state.kv must hold at least 8 rows a request, got 7; use empty_state",
        cache=WORLD.cache._replace(cmp_state=short),
    )
