"""Bad vectors, codes and rows of FP8 are refused, in the same words by both packages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dsacp_npu.fp8
import dsacp_npu.indexer
from dsacp_ref import fp8, indexer
from dsacp_ref.fp8 import FP8Vectors
from dsacp_ref.quant import QuantizedVectors
from dsacp_ref.spec import ContractError
from tests.errors.test_maths_errors import LEGAL
from tests.maths_strategies import normal

RNG = np.random.default_rng(0)
X, LATENT, ROPE_KEY, KV = normal(RNG, 2, 3), normal(RNG, 2, 256), normal(RNG, 2, 4), normal(RNG, 2, 132)
CODES = fp8.quantized_fp8(X)
Q_CODES, WEIGHTS = fp8.quantized_fp8(X[None]), np.ones((1, 2), np.float32)
ROWS = fp8.encoded_latents(LATENT, ROPE_KEY)
KEY_ROWS = {layout: fp8.encoded_keys(KV, rope_head_dim=4, layout=layout) for layout in ("gpu", "ascend")}
NO_CODE = "inf and NaN have no code"
WIDE, HOW = {"kv_lora_rank": 256, "dtype": "float32"}, {"rope_head_dim": 4, "layout": "gpu"}
BACK = {**HOW, "head_dim": 132, "dtype": "float32"}
CALL, STEP = LEGAL[indexer.lightning_indexer], LEGAL[indexer.select_qli]
CACHE = fp8.quantized_fp8(np.ones((2, 2, 3)))


def with_bad(x: np.ndarray, value: float, channel: int = -1) -> np.ndarray:
    """Vectors of which one number is this one."""
    bad = x.copy()
    bad[1, channel] = value
    return bad


def spoiled(array: np.ndarray, value: float) -> np.ndarray:
    """An array of queries of which one that sees keys has this value."""
    bad = array.copy()
    bad[2, 1] = value
    return bad


def choosing(**changed: Any) -> dict[str, Any]:
    """A call of the indexer with FP8 keys, changed."""
    return {**CALL, "index_cache": CACHE, **changed}


FAULTS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("quantized_fp8", (X.tolist(),), {}, "x must have shape [..., d] with d >= 1, got list"),
    ("quantized_fp8", (X[:, :0],), {}, "x must have shape [..., d] with d >= 1, got (2, 0)"),
    ("quantized_fp8", (X > 0,), {}, "x must have dtype float32 or float64, got bool; cast x first"),
    ("quantized_fp8", (with_bad(X, np.nan),), {}, f"x must be finite in float32, got nan; {NO_CODE}"),
    ("quantized_fp8", (with_bad(X, -np.inf),), {}, f"x must be finite in float32, got inf; {NO_CODE}"),
    ("quantized_fp8", (with_bad(X, 1e39),), {}, f"x must be finite in float32, got inf; {NO_CODE}"),
    ("dequantized_fp8", (None,), {}, "coded must be of type FP8Vectors, got NoneType"),
    (
        "dequantized_fp8",
        (QuantizedVectors(np.ones((2, 3), np.int8), np.ones(2, np.float16)),),
        {},
        "coded must be of type FP8Vectors, got QuantizedVectors",
    ),
    (
        "dequantized_fp8",
        (CODES._replace(values=X),),
        {},
        "coded.values must have dtype float8_e4m3fn, got float64; cast coded.values first",
    ),
    (
        "dequantized_fp8",
        (CODES._replace(scales=CODES.scales[:1]),),
        {},
        "coded.scales must have shape [2], got [1]; one scale a vector",
    ),
    (
        "dequantized_fp8",
        (CODES._replace(scales=CODES.scales.astype(np.float16)),),
        {},
        "coded.scales must have dtype float32, got float16; cast coded.scales first",
    ),
    (
        "fp8_index_scores",
        (CODES, WEIGHTS, CODES),
        {},
        "index_q must hold [tokens, heads, d] against keys [keys, d], got [2, 3] and [2, 3]",
    ),
    (
        "fp8_index_scores",
        (Q_CODES, WEIGHTS, fp8.quantized_fp8(X[:, :2])),
        {},
        "index_q must hold [tokens, heads, d] against keys [keys, d], got [1, 2, 3] and [2, 2]",
    ),
    (
        "fp8_index_scores",
        (Q_CODES, WEIGHTS.astype(np.float64), CODES),
        {},
        "index_weights must have dtype float32, got float64; cast index_weights first",
    ),
    (
        "fp8_index_scores",
        (Q_CODES, WEIGHTS[:, :1], CODES),
        {},
        "index_weights must have shape [1, 2], got [1, 1]; one weight a head",
    ),
    ("fp8_index_scores", (Q_CODES, WEIGHTS, None), {}, "index_keys must be of type FP8Vectors, got NoneType"),
    (
        "encoded_latents",
        (LATENT[:, :200], ROPE_KEY),
        {},
        "latent must have a multiple of 128 channels, got 200; a scale for so many",
    ),
    (
        "encoded_latents",
        (with_bad(LATENT, np.nan), ROPE_KEY),
        {},
        f"latent must be finite in float32, got nan; {NO_CODE}",
    ),
    (
        "encoded_latents",
        (LATENT, ROPE_KEY[:1]),
        {},
        "rope_key must have shape [2, rope_head_dim], got [1, 4]; one rope key a latent",
    ),
    (
        "encoded_latents",
        (LATENT, ROPE_KEY.astype(np.float32)),
        {},
        "rope_key must have dtype float64, got float32; cast rope_key first",
    ),
    ("encoded_latents", (LATENT, ROPE_KEY[:, :0]), {}, "rope_key must have shape [..., d] with d >= 1, got (2, 0)"),
    (
        "encoded_latents",
        (LATENT, with_bad(ROPE_KEY, np.inf)),
        {},
        f"rope_key must be finite in float32, got inf; {NO_CODE}",
    ),
    (
        "encoded_latents",
        (LATENT, with_bad(ROPE_KEY, -3.4e38)),
        {},
        "rope_key must be finite in bfloat16, got inf; its largest number is 3.39e38",
    ),
    ("decoded_latents", (LATENT,), WIDE, "rows must have dtype uint8, got float64; cast rows first"),
    ("decoded_latents", (ROWS.tolist(),), WIDE, "rows must be an array, got list; dtype uint8"),
    ("decoded_latents", (ROWS[0, 0],), WIDE, "rows must have shape [row bytes], got []"),
    (
        "decoded_latents",
        (ROWS,),
        {**WIDE, "kv_lora_rank": 200},
        "kv_lora_rank must be a multiple of 128, got 200; a scale for so many channels",
    ),
    ("decoded_latents", (ROWS,), {**WIDE, "kv_lora_rank": 0}, "kv_lora_rank must be an int >= 1, got 0"),
    ("decoded_latents", (ROWS,), {**WIDE, "kv_lora_rank": "256"}, "kv_lora_rank must be an int >= 1, got str '256'"),
    (
        "decoded_latents",
        (ROWS[:, :264],),
        WIDE,
        "rows must have 264 bytes and 2 more for each rope channel, got 264; as encoded_latents lays them out",
    ),
    (
        "decoded_latents",
        (ROWS[:, :267],),
        WIDE,
        "rows must have 264 bytes and 2 more for each rope channel, got 267; as encoded_latents lays them out",
    ),
    ("encoded_keys", (KV,), {**HOW, "layout": "cpu"}, "layout must be one of 'gpu', 'ascend', got 'cpu'"),
    ("encoded_keys", (KV,), {**HOW, "rope_head_dim": 0}, "rope_head_dim must be an int >= 1, got 0"),
    ("encoded_keys", (KV,), {**HOW, "rope_head_dim": True}, "rope_head_dim must be an int >= 1, got bool True"),
    (
        "encoded_keys",
        (KV,),
        {**HOW, "rope_head_dim": 5},
        "kv must leave a multiple of 64 channels beside 5 of rope, got 127; a scale for so many",
    ),
    (
        "encoded_keys",
        (KV[:, :4],),
        HOW,
        "kv must leave a multiple of 64 channels beside 4 of rope, got 0; a scale for so many",
    ),
    ("encoded_keys", (with_bad(KV, np.nan, 0),), HOW, f"kv must be finite in float32, got nan; {NO_CODE}"),
    (
        "encoded_keys",
        (with_bad(KV, 3.4e38),),
        HOW,
        "the rope channels of kv must be finite in bfloat16, got inf; its largest number is 3.39e38",
    ),
    (
        "decoded_keys",
        (KEY_ROWS["gpu"],),
        {**BACK, "layout": "ascend"},
        "rows must have 256 bytes a row, got 144; as encoded_keys lays them out",
    ),
    (
        "decoded_keys",
        (KEY_ROWS["ascend"],),
        BACK,
        "rows must have 144 bytes a row, got 256; as encoded_keys lays them out",
    ),
    (
        "decoded_keys",
        (KEY_ROWS["gpu"],),
        {**BACK, "head_dim": 131},
        "head_dim must leave a multiple of 64 channels beside 4 of rope, got 127; a scale for so many",
    ),
    ("decoded_keys", (KEY_ROWS["gpu"],), {**BACK, "layout": None}, "layout must be one of 'gpu', 'ascend', got None"),
    (
        "lightning_indexer",
        (),
        choosing(index_cache=CACHE._replace(values=np.ones((2, 2, 3), np.int8))),
        "index_cache.values must have dtype float8_e4m3fn, got int8; cast index_cache.values first",
    ),
    (
        "lightning_indexer",
        (),
        choosing(index_cache=CACHE._replace(values=CACHE.values[:, :, :2])),
        "index_cache.values must have shape [num_blocks, block_size, 3], got [2, 2, 2]; as wide as the queries",
    ),
    (
        "lightning_indexer",
        (),
        choosing(index_cache=CACHE._replace(scales=CACHE.scales.astype(np.float16))),
        "index_cache.scales must have dtype float32, got float16; cast index_cache.scales first",
    ),
    (
        "lightning_indexer",
        (),
        choosing(index_cache=CACHE._replace(scales=CACHE.scales[:, :1])),
        "index_cache.scales must have shape [2, 2], got [2, 1]; one scale a vector",
    ),
    (
        "lightning_indexer",
        (),
        choosing(index_q=spoiled(CALL["index_q"], np.nan)),
        f"index_q must be finite in float32, got nan; {NO_CODE}",
    ),
    (
        "lightning_indexer",
        (),
        choosing(index_weights=spoiled(CALL["index_weights"], -1e39)),
        "index_weights must be of a size that float32 holds, got -1e+39; the FP8 operator's dtype",
    ),
    (
        "select_qli",
        (),
        {**STEP, "index_cache": CACHE},
        "index_cache.values must have shape [num_blocks, block_size, 4], got [2, 2, 3]; as wide as the queries",
    ),
]


def tensors(value: Any) -> Any:
    """The same call for the mirror."""
    if isinstance(value, dict):
        return {name: tensors(item) for name, item in value.items()}
    if isinstance(value, FP8Vectors):
        return dsacp_npu.fp8.FP8Vectors(*(tensors(part) for part in value))
    if isinstance(value, QuantizedVectors):
        return dsacp_npu.indexer.QuantizedVectors(*(tensors(part) for part in value))
    if isinstance(value, tuple):
        record = getattr(dsacp_npu.indexer, type(value).__name__, None)
        items = [tensors(item) for item in value]
        return record(*items) if record else tuple(items)
    if isinstance(value, np.generic):
        return torch.tensor(value)
    if not isinstance(value, np.ndarray):
        return value
    if str(value.dtype) == "float8_e4m3fn":
        return torch.tensor(value.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.tensor(value)


def refusal(packages: tuple[Any, Any], function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The text with which one of a package's modules refuses a call."""
    module = next(module for module in packages if function in module.__all__)
    with pytest.raises(ContractError) as caught:
        getattr(module, function)(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(("function", "args", "kwargs", "text"), FAULTS, ids=range(len(FAULTS)))
def test_a_fault_is_named_in_a_sentence(function, args, kwargs, text) -> None:
    assert refusal((fp8, indexer), function, args, kwargs) == text
    assert refusal((dsacp_npu.fp8, dsacp_npu.indexer), function, tensors(args), tensors(kwargs)) == text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", None])
@pytest.mark.parametrize(
    ("function", "rows", "how"), [("decoded_latents", ROWS, WIDE), ("decoded_keys", KEY_ROWS["gpu"], BACK)]
)
def test_the_reference_gives_wide_floats_only(function, rows, how, dtype) -> None:
    text = refusal((fp8,) * 2, function, (rows,), {**how, "dtype": dtype})
    assert text == f"dtype must be one of 'float32', 'float64', got {dtype!r}"


@pytest.mark.parametrize("dtype", ["int8", "half", None])
@pytest.mark.parametrize(
    ("function", "rows", "how"), [("decoded_latents", ROWS, WIDE), ("decoded_keys", KEY_ROWS["gpu"], BACK)]
)
def test_the_mirror_gives_floats_only(function, rows, how, dtype) -> None:
    text = refusal((dsacp_npu.fp8,) * 2, function, (torch.tensor(rows),), {**how, "dtype": dtype})
    assert text == f"dtype must be one of 'float32', 'float64', 'bfloat16', 'float16', got {dtype!r}"


@pytest.mark.parametrize(
    ("function", "args", "name"), [("quantized_fp8", (X,), "x"), ("decoded_keys", (KEY_ROWS["gpu"],), "rows")]
)
def test_the_mirror_takes_no_numpy_array(function, args, name) -> None:
    text = refusal((dsacp_npu.fp8,) * 2, function, args, BACK if function == "decoded_keys" else {})
    assert text == f"{name} must be a torch tensor, got ndarray; dsacp_ref is for numpy arrays"


def test_what_no_query_sees_may_be_anything() -> None:
    """NaN in queries and weights that choose nothing is no fault, nor is it in rows that are not written."""
    q, weights = CALL["index_q"].copy(), CALL["index_weights"].copy()
    q[0], weights[0] = np.nan, np.inf
    blind = {"seqused_kv": np.array([3, 0], np.int32)}  # at ratio 2, the first query is at position 0
    got = indexer.lightning_indexer(**choosing(index_q=q, index_weights=weights, **blind))
    assert (got[[0, 3]] == -1).all()
    assert got[1, 0] == 0
