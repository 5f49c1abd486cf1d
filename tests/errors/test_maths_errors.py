"""Bad tables, states, scores and keys are refused: the text names the argument, its rule, what was got, what to try."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dsacp_ref import attention, compressor, indexer, paging, quant, rope
from dsacp_ref.spec import ContractError
from tests.maths_strategies import int32, normal
from tests.strategies import read_only

RNG = np.random.default_rng(0)
MOST = 2**31 - 1


def floats(*shape: int) -> np.ndarray:
    return normal(RNG, *shape)


def halves(*shape: int) -> np.ndarray:
    return normal(RNG, *shape, dtype=np.float16)


# Two requests of 5 and 2 new tokens after 3 and 0; ratio 2 with overlap, 4 channels, hidden size 3.
WEIGHTS = compressor.CompressorWeights(floats(8, 3), floats(8, 3), floats(2, 8), floats(4))
LOC, STARTS = int32([0, 5, 7]), int32([3, 0])
STATE = compressor.CompressorState(floats(2, 4, 8), floats(2, 4, 8), int32([0, 0]), int32([3, 0]))
ROWS = compressor.ProjectedRows(floats(7, 8), floats(7, 8))
FREQS = (1.0,)
# Two operator rows of 3 and 1 queries over 5 and 2 keys; blocks of 2, ratio 2.
CU, USED = int32([0, 3, 4]), int32([5, 2])
TABLE, CMP_TABLE = int32([[4, 0, 2], [3, -1, -1]]), int32([[1], [0]])
Q, CACHE, CMP_CACHE, SINK = floats(4, 2, 3), floats(5, 2, 3), floats(2, 2, 3), floats(2)
SWA = {"swa_cache": CACHE, "swa_block_table": TABLE}
CMP = {"cmp_cache": CMP_CACHE, "cmp_block_table": CMP_TABLE}
LENGTHS = {"cu_seqlens_q": CU, "seqused_kv": USED}
SCALE = {"window_size": 2, "softmax_scale": 1.0}
YARN = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position": 65536}
CODES = quant.QuantizedVectors(read_only(np.ones((3, 4), np.int8)), halves(3))
Q_CODES = quant.QuantizedVectors(read_only(np.ones((2, 2, 4), np.int8)), halves(2, 2))
ROW_CODES = quant.QuantizedRows(read_only(np.ones((2, 4), np.int8)), normal(RNG, 2, dtype=np.float32))
STEP = {"query_start_loc": LOC, "num_computed_tokens": STARTS}

LEGAL: dict[Callable[..., Any], dict[str, Any]] = {
    rope.rope_frequencies: {"theta": 1e4, "rope_head_dim": 4},
    rope.yarn_frequencies: {"theta": 1e4, "rope_head_dim": 4, **YARN},
    rope.rope_table: {"positions": int32([0, -1]), "frequencies": FREQS},
    rope.apply_rope: {"x": floats(2, 3), "cos": floats(2, 1), "sin": floats(2, 1)},
    rope.apply_inverse_rope: {"x": floats(2, 3), "cos": floats(2, 1), "sin": floats(2, 1)},
    rope.apply_half_rope: {"x": floats(2, 3), "cos": floats(2, 1), "sin": floats(2, 1)},
    paging.slot_mapping: {
        "logical_indices": int32([4, -1]),
        "request_indices": int32([0, -1]),
        "block_table": TABLE,
        "block_size": 2,
    },
    paging.gathered_rows: {"cache": CACHE, "slots": int32([9, -1])},
    paging.scattered_rows: {"cache": CACHE, "rows": floats(2, 3), "slots": int32([9, -1])},
    paging.block_table_rows: {"block_table": TABLE, "request_indices": int32([1, -1])},
    quant.quantized_int8: {"x": floats(2, 3)},
    quant.dequantized_int8: {"coded": CODES},
    quant.int8_index_scores: {"index_q": Q_CODES, "index_weights": halves(2, 2), "index_keys": CODES},
    quant.quantized_rows: {"x": floats(2, 3)},
    quant.quantized_weight: {"weight": floats(2, 3)},
    quant.rms_norm_quantized: {"x": floats(2, 3), "weight": floats(3), "eps": 1e-6},
    quant.quant_matmul: {"rows": ROW_CODES, "weight": quant.QuantizedWeight(*ROW_CODES), "dtype": "float32"},
    compressor.rms_norm: {"x": floats(2, 3), "weight": floats(3), "eps": 1e-6},
    compressor.empty_state: {"weights": WEIGHTS, "num_reqs": 2, "num_rows": 4},
    compressor.projected_rows: {"x": floats(2, 3), "positions": int32([0, -1]), "weights": WEIGHTS},
    compressor.emitted_entries: {**STEP, "compress_ratio": 2, "num_rows": 7},
    compressor.compressed_entries: {
        "rows": ROWS,
        **STEP,
        "state": STATE,
        "norm_weight": floats(4),
        "frequencies": FREQS,
        "compress_ratio": 2,
        "eps": 1e-6,
    },
    compressor.pooled_entries: {
        "rows": ROWS,
        "entry_requests": int32([0, -1]),
        "entry_indices": int32([3, -1]),
        **STEP,
        "state": STATE,
        "norm_weight": floats(4),
        "frequencies": FREQS,
        "compress_ratio": 2,
        "eps": 1e-6,
    },
    compressor.updated_state: {"rows": ROWS, **STEP, "state": STATE},
    compressor.rolled_back_state: {"state": STATE, "num_tokens": int32([2, 0]), "compress_ratio": 2, "overlap": True},
    compressor.compress: {
        "x": floats(7, 3),
        "weights": WEIGHTS,
        **STEP,
        "state": STATE,
        "frequencies": FREQS,
        "eps": 1e-6,
    },
    indexer.hadamard: {"x": floats(2, 4)},
    indexer.index_queries: {
        "qr": floats(2, 3),
        "wq_b": floats(8, 3),
        "cos": floats(2, 1),
        "sin": floats(2, 1),
        "index_head_dim": 4,
    },
    indexer.index_head_weights: {"x": floats(2, 3), "weights_proj": floats(2, 3), "index_head_dim": 4},
    indexer.index_scores: {"index_q": floats(2, 2, 4), "index_weights": floats(2, 2), "index_keys": floats(3, 4)},
    indexer.selected_entries: {"scores": floats(2, 3), "num_visible": int32([3, 0]), "index_topk": 2},
    indexer.lightning_indexer: {
        "index_q": Q,
        "index_weights": floats(4, 2),
        "index_cache": CMP_CACHE,
        "cmp_block_table": CMP_TABLE,
        **LENGTHS,
        "compress_ratio": 2,
        "index_topk": 2,
    },
    indexer.select_qli: {
        "x": floats(4, 3),
        "qr": floats(4, 3),
        "cos": floats(4, 1),
        "sin": floats(4, 1),
        "weights": indexer.IndexerWeights(floats(8, 3), floats(2, 3), WEIGHTS),
        "index_cache": floats(3, 2, 4),
        "cmp_block_table": int32([[1, 2], [0, -1]]),
        "state": STATE,
        "cu_seqlens_q": int32([0, 3, 4]),
        "seqused_kv": int32([8, 2]),
        "request_indices": int32([0, 1]),
        "num_computed_tokens": STARTS,
        "frequencies": FREQS,
        "index_topk": 2,
        "eps": 1e-6,
        "compress_x": floats(7, 3),
        "compress_cu_seqlens": LOC,
    },
    attention.gathered_attention: {
        "q": Q,
        "keys": floats(3, 3),
        "key_indices": int32([[0, -1]] * 4),
        "softmax_scale": 1.0,
    },
    attention.window_attention: {"q": Q, **SWA, **LENGTHS, "attn_sink": SINK, **SCALE},
    attention.all_entries_attention: {
        "q": Q,
        **SWA,
        **CMP,
        **LENGTHS,
        "attn_sink": SINK,
        "compress_ratio": 2,
        **SCALE,
    },
    attention.selected_attention: {
        "q": Q,
        **SWA,
        **CMP,
        "topk_indices": int32([[-1, 0], [0, 1], [1, 0], [0, -1]]),
        **LENGTHS,
        "attn_sink": SINK,
        "compress_ratio": 2,
        **SCALE,
    },
    attention.merge_partials: {"outs": floats(2, 4, 2, 3), "lses": floats(2, 4, 2)},
    attention.apply_sink: {"out": Q, "lse": floats(4, 2), "attn_sink": SINK},
}


def refused(function: Callable[..., Any], **bad: Any) -> str:
    """The text with which the legal call with these arguments instead is refused; its inputs stay as they were."""
    arguments = {**LEGAL[function], **bad}
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    before = {name: array.tobytes() for name, array in arrays.items()}
    with pytest.raises(ContractError) as caught:
        function(**arguments)
    assert {name: array.tobytes() for name, array in arrays.items()} == before
    return str(caught.value)


@pytest.mark.parametrize("function", LEGAL, ids=lambda function: function.__name__)
def test_the_call_that_the_tables_spoil_is_legal(function):
    function(**LEGAL[function])


def test_every_public_function_is_here():
    modules = (rope, paging, quant, compressor, indexer, attention)
    public = {getattr(module, name) for module in modules for name in module.__all__}
    assert {item for item in public if not isinstance(item, type)} == set(LEGAL)


# Every array: no array, of another dtype, with an axis more. Every number: of another type, not finite.

ANY_DTYPE = {(paging.gathered_rows, "cache"), (paging.scattered_rows, "cache")}
ANY_AXES = {
    (rope.apply_rope, "x"),
    (rope.apply_inverse_rope, "x"),
    (rope.apply_half_rope, "x"),
    (paging.gathered_rows, "cache"),
    (paging.gathered_rows, "slots"),
    (paging.scattered_rows, "cache"),
    (quant.quantized_int8, "x"),
    (compressor.rms_norm, "x"),
    (indexer.hadamard, "x"),
}
ALIAS = {"compress_x": "x", "compress_cu_seqlens": "query_start_loc"}  # as the compressor calls them
INTS = {"rope_head_dim", "original_max_position", "block_size", "num_reqs", "num_rows", "compress_ratio"}
INTS |= {"index_head_dim", "index_topk", "window_size"}


def spoiled() -> Iterator[Any]:
    """(function, argument, bad value) of every kind that needs no knowledge of the argument."""
    for function, arguments in LEGAL.items():
        for name, value in arguments.items():
            for kind, bad in bad_values(function, name, value):
                yield pytest.param(function, name, bad, id=f"{function.__name__}-{name}-{kind}")


def bad_values(function: Callable[..., Any], name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, np.ndarray):
        yield "list", value.tolist()
        if name not in {"weight", "compress_x", "compress_cu_seqlens"}:  # None has a meaning there
            yield "none", None
        if (function, name) not in ANY_DTYPE:
            yield "dtype", value.astype(np.int64 if value.dtype == np.int32 else np.complex64)
            yield "bool", value.astype(bool)
        if (function, name) not in ANY_AXES:
            yield "axis more", value[None]
    elif isinstance(value, int) and not isinstance(value, bool) and name in INTS:
        yield from (("float", 1.5), ("bool", True), ("text", "2"), ("negative", -1), ("array", LOC))
        if (function, name) != (compressor.empty_state, "num_rows"):  # None asks for the default
            yield "none", None
        if name not in {"num_reqs", "num_rows"}:
            yield "zero", 0
    elif isinstance(value, float):
        yield from (("nan", np.nan), ("infinite", np.inf), ("text", "1"), ("none", None), ("bool", True))
        yield "negative", -1.0


@pytest.mark.parametrize(("function", "name", "bad"), list(spoiled()))
def test_an_argument_of_another_kind_is_refused_by_name(function, name, bad):
    text = refused(function, **{name: bad})
    assert re.match(rf"({ALIAS.get(name, name)})\b.* must .*, got ", text), text


# What only this argument can get wrong, with the whole sentence.

POSITIONS = "be -1 or a position, got -2; -1 alone marks a pad row"
RING = compressor.CompressorState(floats(2, 3, 8), floats(2, 3, 8), int32([0, 0]), int32([3, 0]))
OTHER_WIDTH = compressor.CompressorWeights(floats(7, 3), floats(7, 3), floats(2, 7), floats(4))
NO_BLOCK = int32([[4, -1, 2], [3, -1, -1]])
FAULTS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (rope.rope_frequencies, {"theta": 1.0}, "theta must be a finite number > 1.0, got 1.0"),
    (rope.rope_frequencies, {"rope_head_dim": 5}, "rope_head_dim must be even, got 5; channels turn in pairs"),
    (rope.rope_frequencies, {"rope_head_dim": 0}, "rope_head_dim must be an int >= 2, got 0"),
    (rope.yarn_frequencies, {"factor": 0}, "factor must be a finite number > 0.0, got 0"),
    (rope.yarn_frequencies, {"beta_fast": 0.0}, "beta_fast must be a finite number > 0.0, got 0.0"),
    (rope.yarn_frequencies, {"beta_slow": -1}, "beta_slow must be a finite number > 0.0, got -1"),
    (rope.rope_table, {"positions": int32([-2])}, f"positions must {POSITIONS}"),
    (rope.rope_table, {"frequencies": (1.0, np.nan)}, "frequencies must be a finite number, got nan"),
    (rope.rope_table, {"frequencies": "1"}, "frequencies must be a finite number, got str '1'"),
    (
        rope.apply_rope,
        {"cos": floats(3, 1), "sin": floats(3, 1)},
        "cos must have shape [2, rope_head_dim / 2], got [3, 1]; one row of the table a token",
    ),
    (rope.apply_rope, {"sin": floats(2, 2)}, "sin must have shape [2, 1], got [2, 2]; cos and sin are one table"),
    (
        rope.apply_inverse_rope,
        {"cos": floats(2, 2), "sin": floats(2, 2)},
        "x must have at least 4 channels, got 3; the table has one column a pair",
    ),
    (rope.apply_rope, {"x": floats(2)}, "x must have shape [num_tokens, ..., head_dim], got [2]"),
    (
        paging.slot_mapping,
        {"logical_indices": int32([6, -1])},
        "block_table must reach row 6 of request 0, got 2 requests of 3 blocks of 2; "
        "allocate the block before it is used",
    ),
    (
        paging.slot_mapping,
        {"request_indices": int32([2, 0])},
        "block_table must reach row 4 of request 2, got 2 requests of 3 blocks of 2; "
        "allocate the block before it is used",
    ),
    (
        paging.slot_mapping,
        {"request_indices": int32([1, 0])},
        "block_table must name a block for row 4 of request 1, got -1; the used part of a table holds block ids only",
    ),
    (
        paging.slot_mapping,
        {"block_size": MOST},
        "block_table must give slots below 2**31, got 4; garbage in the used part?",
    ),
    (
        paging.slot_mapping,
        {"logical_indices": int32([0, -2])},
        "logical_indices must be -1 or a row, got -2; -1 alone means none",
    ),
    (paging.gathered_rows, {"slots": int32([10])}, "slots must be -1 or in [0, 10), got 10; the cache has no such row"),
    (
        paging.gathered_rows,
        {"cache": floats(3)},
        "cache must have shape [num_blocks, block_size, ...], got (3,)",
    ),
    (paging.scattered_rows, {"slots": int32([9, 9])}, "slots must be distinct, got slot 9 twice; one row a slot"),
    (
        paging.scattered_rows,
        {"slots": int32([9, -2])},
        "slots must be -1 or in [0, 10), got -2; the cache has no such row",
    ),
    (
        paging.scattered_rows,
        {"rows": floats(1, 3)},
        "rows must have shape [2, 3], got [1, 3]; one row a slot, as the cache's rows",
    ),
    (
        paging.scattered_rows,
        {"rows": LEGAL[paging.scattered_rows]["rows"].astype(np.float32)},
        "rows must have dtype float64, got float32; cast rows first",
    ),
    (
        paging.block_table_rows,
        {"request_indices": int32([0, 2])},
        "request_indices must be -1 or below 2, got [0, 2]; the table has one row a request",
    ),
    (
        paging.block_table_rows,
        {"request_indices": int32([-2])},
        "request_indices must be -1 or below 2, got [-2]; the table has one row a request",
    ),
    (quant.quantized_int8, {"x": floats(2, 0)}, "x must have shape [..., d] with d >= 1, got (2, 0)"),
    (
        quant.quantized_int8,
        {"x": np.array([[1.0, np.nan]])},
        "x must be finite, with scales that float16 holds, got nan; norm it first",
    ),
    (
        quant.quantized_int8,
        {"x": np.array([[1e300]])},
        "x must be finite, with scales that float16 holds, got inf; norm it first",
    ),
    (
        quant.quantized_int8,
        {"x": np.array([[127 * 65536.0]])},
        "x must be finite, with scales that float16 holds, got 8323072.0; norm it first",
    ),
    (
        quant.dequantized_int8,
        {"coded": CODES._replace(values=CODES.values.astype(np.int16))},
        "coded.values must have dtype int8, got int16; cast coded.values first",
    ),
    (
        quant.dequantized_int8,
        {"coded": CODES._replace(scales=halves(2))},
        "coded.scales must have shape [3], got [2]; one scale a vector",
    ),
    (
        quant.dequantized_int8,
        {"coded": CODES._replace(scales=floats(3))},
        "coded.scales must have dtype float16, got float64; cast coded.scales first",
    ),
    (
        quant.int8_index_scores,
        {"index_q": CODES},
        "index_q must hold [tokens, heads, d] against keys [keys, d], got [3, 4] and [3, 4]",
    ),
    (
        quant.int8_index_scores,
        {"index_weights": halves(2, 3)},
        "index_weights must have shape [2, 2], got [2, 3]; one weight a head",
    ),
    (compressor.rms_norm, {"weight": floats(2)}, "weight must have shape [3], got [2]; one weight a channel"),
    (
        compressor.rms_norm,
        {"x": np.ones((2, 3), np.int32)},
        "x must have dtype float32 or float64, got int32; cast x first",
    ),
    (compressor.rms_norm, {"x": floats(2, 0)}, "d must be an int >= 1, got 0"),
    (compressor.empty_state, {"num_rows": 3}, "num_rows must be an int >= 4, got 3; an entry pools that many"),
    (
        compressor.empty_state,
        {"weights": OTHER_WIDTH},
        "wkv must have 4 or, with overlap, 8 rows, got 7; norm_weight has 4 channels",
    ),
    (
        compressor.empty_state,
        {"weights": WEIGHTS._replace(wgate=floats(4, 3))},
        "wgate must have shape [8, 3], got [4, 3]; like wkv",
    ),
    (
        compressor.empty_state,
        {"weights": WEIGHTS._replace(ape=floats(2, 4))},
        "ape must have shape [compress_ratio, 8], got [2, 4]; one bias a place in the window",
    ),
    (
        compressor.empty_state,
        {"weights": WEIGHTS._replace(ape=floats(0, 8))},
        "compress_ratio must be an int >= 1, got 0",
    ),
    (compressor.projected_rows, {"positions": int32([0])}, "positions must have shape [2], got [1]; one a row of x"),
    (compressor.projected_rows, {"positions": int32([0, -2])}, f"positions must {POSITIONS}"),
    (
        compressor.projected_rows,
        {"x": floats(2, 4)},
        "x must have shape [num_tokens, 3], got [2, 4]; hidden size of wkv",
    ),
    (
        compressor.emitted_entries,
        {"query_start_loc": int32([5, 2])},
        "query_start_loc must start at 0, got [5]; prepend the leading zero",
    ),
    (
        compressor.emitted_entries,
        {"query_start_loc": int32([0, 5, 2])},
        "query_start_loc must not decrease, got [0, 5, 2]; it is cumulative, not one length a row",
    ),
    (
        compressor.emitted_entries,
        {"num_rows": 6},
        "query_start_loc must end at or before the 6 rows it indexes, got 7; "
        "the compressor's rows are global: local rows need local offsets",
    ),
    (
        compressor.emitted_entries,
        {"num_computed_tokens": int32([3])},
        "num_computed_tokens must have shape [2], got [1]; one entry per request",
    ),
    (
        compressor.emitted_entries,
        {"num_computed_tokens": int32([MOST - 4, 0])},
        f"num_computed_tokens must keep positions below 2**31, got {MOST - 4}",
    ),
    (
        compressor.compressed_entries,
        {"rows": ROWS._replace(score=floats(7, 4))},
        "rows.score must have shape [7, 8], got [7, 4]; like rows.kv",
    ),
    (
        compressor.compressed_entries,
        {"norm_weight": floats(3)},
        "rows.kv must have 3 or, with overlap, 6 columns, got 8; norm_weight has 3",
    ),
    (
        compressor.compressed_entries,
        {"state": RING},
        "state.kv must hold at least 4 rows a request, got 3; use empty_state",
    ),
    (
        compressor.compressed_entries,
        {"state": STATE._replace(num_tokens=int32([4, 0]))},
        "state must hold rows 0 to 3 of request 0, got rows 0 to 4; "
        "keep the state with the prefix, or restart the request at 0",
    ),
    (
        compressor.compress,
        {"state": STATE._replace(held_start=int32([1, 0]))},
        "state must hold rows 0 to 3 of request 0, got rows 1 to 3; "
        "keep the state with the prefix, or restart the request at 0",
    ),
    (
        compressor.compress,
        {"state": compressor.CompressorState(*(part[:1] for part in STATE))},
        "state must hold 2 requests, got 1; one ring a request",
    ),
    (
        compressor.compress,
        {"x": floats(7, 3).astype(np.float32)},
        "state.kv must have dtype float32, got float64; cast state.kv first",
    ),
    (
        compressor.compress,
        {"frequencies": (1.0,) * 3},
        "x must have at least 6 channels, got 4; the table has one column a pair",
    ),
    (
        compressor.updated_state,
        {"state": STATE._replace(score=floats(2, 4, 4))},
        "state.score must have shape [2, 4, 8], got [2, 4, 4]; like state.kv",
    ),
    (
        compressor.updated_state,
        {"state": STATE._replace(held_start=int32([0]))},
        "state.held_start must have shape [2], got [1]; one entry per request",
    ),
    (
        compressor.updated_state,
        {"state": STATE._replace(num_tokens=int32([2, 0]))},
        "state must hold rows 3 to 3 of request 0, got rows 0 to 2; "
        "keep the state with the prefix, or restart the request at 0",
    ),
    (
        compressor.pooled_entries,
        {"entry_indices": int32([4, -1])},
        "entry_indices must name entries that this step completes, got entry 4 of request 0; "
        "its new positions are 3 to 7",
    ),
    (
        compressor.pooled_entries,
        {"entry_indices": int32([0, -1])},
        "entry_indices must name entries that this step completes, got entry 0 of request 0; "
        "its new positions are 3 to 7",
    ),
    (compressor.pooled_entries, {"entry_requests": int32([2, -1])}, "entry_requests must be below 2, got 2"),
    (
        compressor.rolled_back_state,
        {"num_tokens": int32([4, 0])},
        "num_tokens must be in 0 .. [3, 0], got [4, 0]; a rollback only takes back",
    ),
    (
        compressor.rolled_back_state,
        {"num_tokens": int32([-1, 0])},
        "num_tokens must be in 0 .. [3, 0], got [-1, 0]; a rollback only takes back",
    ),
    (
        compressor.rolled_back_state,
        {"state": STATE._replace(held_start=int32([1, 0]))},
        "state must still hold rows 0 to 2 of request 0, got rows from 1; "
        "give empty_state as many spare num_rows as tokens may be rejected",
    ),
    (
        indexer.hadamard,
        {"x": floats(2, 3)},
        "x must have a power of two as its last size, got 3; the Sylvester matrix has no other sizes",
    ),
    (
        indexer.index_queries,
        {"index_head_dim": 3},
        "wq_b must have a multiple of 3 rows, got 8; one block a head",
    ),
    (
        indexer.index_queries,
        {"wq_b": floats(8, 2)},
        "wq_b must have shape [index_n_heads * index_head_dim, 3], got [8, 2]; as wide as the query latent",
    ),
    (
        indexer.index_head_weights,
        {"weights_proj": floats(2, 2)},
        "weights_proj must have shape [index_n_heads, 3], got [2, 2]; as wide as x",
    ),
    (
        indexer.index_scores,
        {"index_weights": floats(3, 2)},
        "index_weights must have shape [2, 2], got [3, 2]; one weight a head",
    ),
    (
        indexer.index_scores,
        {"index_keys": floats(3, 4).astype(np.float32)},
        "index_keys must have dtype float64, got float32; cast index_keys first",
    ),
    (
        indexer.selected_entries,
        {"num_visible": int32([4, 0])},
        "num_visible must be in [0, 3], got [4, 0]; scores has a column each",
    ),
    (
        indexer.selected_entries,
        {"num_visible": int32([-1, 0])},
        "num_visible must be in [0, 3], got [-1, 0]; scores has a column each",
    ),
    (
        indexer.lightning_indexer,
        {"seqused_kv": int32([2, 2])},
        "seqused_kv must be 0 or at least the row's query length, got 2 keys for 3 queries of row 0; "
        "an extent is right-aligned: it ends with the row's last query",
    ),
    (
        indexer.lightning_indexer,
        {"cu_seqlens_q": int32([0, 3, 5])},
        f"num_rows must be an int in [5, {MOST}], got 4; cu_seqlens_q is local to the queries",
    ),
    (
        indexer.lightning_indexer,
        {"index_weights": floats(5, 2)},
        "index_weights must have shape [4, 2], got [5, 2]; one weight a head",
    ),
    (
        indexer.lightning_indexer,
        {"cmp_block_table": int32([[1], [0], [0]])},
        "cmp_block_table must have shape [2, max_blocks], got [3, 1]; one row an operator row",
    ),
    (
        indexer.lightning_indexer,
        {"seqused_kv": int32([8, 2])},
        "block_table must reach row 2 of request 0, got 2 requests of 1 blocks of 2; "
        "allocate the block before it is used",
    ),
    (
        indexer.select_qli,
        {"compress_x": None},
        "compress_x and compress_cu_seqlens must be given together, got one of the two; rows and their own offsets",
    ),
    (
        indexer.select_qli,
        {"compress_cu_seqlens": int32([0, 5, 8])},
        "query_start_loc must end at or before the 7 rows it indexes, got 8; "
        "the compressor's rows are global: local rows need local offsets",
    ),
    (
        indexer.select_qli,
        {"request_indices": int32([0, 2])},
        "request_indices must be -1 or below 2, got [0, 2]; the table has one row a request",
    ),
    (
        attention.gathered_attention,
        {"key_indices": int32([[3]] * 4)},
        "key_indices must be -1 or in [0, 3), got 3; keys has no such row",
    ),
    (
        attention.gathered_attention,
        {"keys": floats(3, 2)},
        "keys must have shape [num_keys, 3], got [3, 2]; as wide as the queries",
    ),
    (
        attention.gathered_attention,
        {"softmax_scale": 0.0},
        "softmax_scale must be a finite number > 0.0, got 0.0; head_dim ** -0.5; the operator's default is not it",
    ),
    (attention.gathered_attention, {"q": floats(4, 0, 3)}, "num_heads must be an int >= 1, got 0"),
    (
        attention.window_attention,
        {"attn_sink": floats(3)},
        "attn_sink must have shape [2], got [3]; one sink a query head; slice it with the heads",
    ),
    (
        attention.window_attention,
        {"seqused_kv": int32([2, 2])},
        "seqused_kv must be 0 or at least the row's query length, got 2 keys for 3 queries of row 0; "
        "an extent is right-aligned: it ends with the row's last query",
    ),
    (
        attention.window_attention,
        {"swa_block_table": TABLE[:1]},
        "swa_block_table must have shape [2, max_blocks], got [1, 3]; one row an operator row",
    ),
    (
        attention.window_attention,
        {"seqused_kv": int32([7, 2])},
        "block_table must reach row 6 of request 0, got 2 requests of 3 blocks of 2; "
        "allocate the block before it is used",
    ),
    (
        attention.window_attention,
        {"swa_block_table": NO_BLOCK},
        "block_table must name a block for row 2 of request 0, got -1; the used part of a table holds block ids only",
    ),
    (
        attention.window_attention,
        {"swa_block_table": int32([[4, 5, 2], [3, 0, 0]])},
        "slots must be -1 or in [0, 10), got 10; the cache has no such row",
    ),
    (
        attention.window_attention,
        {"swa_cache": floats(5, 2, 4)},
        "swa_cache must have shape [num_blocks, block_size, 3], got [5, 2, 4]; rows as wide as the queries",
    ),
    (
        attention.all_entries_attention,
        {"cmp_cache": CMP_CACHE.astype(np.float32)},
        "cmp_cache must have dtype float64, got float32; cast cmp_cache first",
    ),
    (
        attention.all_entries_attention,
        {"cmp_block_table": int32([[-1], [0]])},
        "block_table must name a block for row 0 of request 0, got -1; the used part of a table holds block ids only",
    ),
    (
        attention.selected_attention,
        {"topk_indices": int32([[0, 0], [0, 1], [1, 0], [0, -1]])},
        "topk_indices must be distinct in a row, got entry 0 twice; query 0",
    ),
    (
        attention.selected_attention,
        {"topk_indices": int32([[-1, 1], [0, 1], [1, 0], [0, -1]])},
        "topk_indices must be -1 or below the 1 entries that query 0 sees, got 1; "
        "entries count within the request, and only complete ones are visible",
    ),
    (
        attention.selected_attention,
        {"topk_indices": int32([[-2, 0], [0, 1], [1, 0], [0, -1]])},
        "topk_indices must be -1 or below the 1 entries that query 0 sees, got -2; "
        "entries count within the request, and only complete ones are visible",
    ),
    (
        attention.selected_attention,
        {"topk_indices": int32([[0]])},
        "topk_indices must have shape [4, index_topk], got [1, 1]; one list a query",
    ),
    (
        attention.merge_partials,
        {"outs": floats(0, 4, 2, 3), "lses": floats(0, 4, 2)},
        "num_parts must be an int >= 1, got 0",
    ),
    (
        attention.merge_partials,
        {"lses": floats(2, 4, 1)},
        "lses must have shape [2, 4, 2], got [2, 4, 1]; one number a part, query and head",
    ),
    (
        attention.apply_sink,
        {"lse": floats(4, 1)},
        "lse must have shape [4, 2], got [4, 1]; one number a query and head",
    ),
]


@pytest.mark.parametrize(("function", "bad", "sentence"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_rule_is_named_with_what_was_got_and_what_to_try(function, bad, sentence):
    assert refused(function, **bad) == sentence
