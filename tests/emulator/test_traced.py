"""Callers run without values: under FakeTensorMode, on "meta", and compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsacp_npu.emulator import install, remove
from tests.compare import assert_same
from tests.emulator.common import (
    attention_case,
    attention_metadata,
    compressor_case,
    halved,
    indexer_case,
    indexer_metadata,
    int32,
    latent_case,
    ops,
    token_case,
)

Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]


def calls() -> dict[str, Call]:
    """One legal call of every operator, by namespace and name: (namespace, name, arguments, keyword arguments)."""
    attention, indexer = attention_case(4, [2, 1], [40, 9]), indexer_case([2, 1], [40, 9])
    plain = {name: value for name, value in indexer_case([2], [9], ratio=1).items() if name != "cmp_ratio"}
    half, table, ones = torch.ones(3, 8).half(), torch.ones(8, 64), torch.ones(8).half()
    lengths = {"layout_query": "TND", "layout_key": "PA_BSND", "actual_seq_lengths_query": int32(2)}
    q, codes = attention.pop("q"), torch.ones(3, 8, dtype=torch.int8)
    native = {
        "npu_sparse_attn_sharedkv": ((q,), {**attention, "metadata": attention_metadata({**attention, "q": q})}),
        "npu_sparse_attn_sharedkv_metadata": (
            (4, 1, 512, int32(0, 2)),
            {"seqused_kv": int32(9), "layout_q": "TND", "has_cmp_kv": False},
        ),
        "npu_vllm_quant_lightning_indexer": ((), {**indexer, "metadata": indexer_metadata(indexer)}),
        "npu_vllm_quant_lightning_indexer_metadata": (
            (64, 1, 128, 0, 0),
            {**lengths, "actual_seq_lengths_key": int32(9), "cmp_ratio": 4},
        ),
        "npu_lightning_indexer": ((), token_case([2, 1], [40, 9])),
        "npu_lightning_indexer_quant": ((), plain),
        "npu_sparse_flash_attention": ((), latent_case([2, 1], [40, 9])),
        "compressor": ((), compressor_case(4, [8, 3], [0, 5])),
        "compressor_metadata": ((table, table, int32(0, 8), int32(0), torch.ones(1, 1).int(), 4, 2, 4, 3, 1), {}),
        "inplace_partial_rotary_mul": (
            (torch.ones(2, 1, 4, 128), torch.ones(2, 1, 1, 64), torch.ones(2, 1, 1, 64), "interleave", [64, 128]),
            {},
        ),
        "npu_rms_norm_dynamic_quant": ((half, ones), {}),
        "npu_scatter_nd_update_v2": ((torch.zeros(4, 8).half(), torch.tensor([[1], [-1], [0]]), half), {}),
    }
    npu = {
        "npu_quant_lightning_indexer": ((), {**plain, "query_quant_mode": 0, "key_quant_mode": 0}),
        "npu_lightning_indexer": ((), token_case([2, 1], [40, 9])),
        "npu_sparse_flash_attention": ((), latent_case([2, 1], [40, 9])),
        "npu_transpose_batchmatmul": ((torch.ones(3, 2, 4), torch.ones(2, 4, 5)), {}),
        "npu_quant_matmul": (
            (codes, codes.T, torch.ones(3)),
            {"pertoken_scale": torch.ones(3), "output_dtype": torch.bfloat16},
        ),
        "npu_dynamic_quant": ((half,), {}),
        "npu_rms_norm": ((half, ones), {}),
        "npu_scatter_nd_update_": ((torch.zeros(4, 8).half(), torch.tensor([[1], [-1], [0]]), half), {}),
    }
    return {
        f"{namespace}.{name}": (namespace, name, *call)
        for namespace, operators in (("_C_ascend", native), ("npu", npu))
        for name, call in operators.items()
    }


NATIVE = (
    "npu_sparse_attn_sharedkv npu_sparse_attn_sharedkv_metadata npu_vllm_quant_lightning_indexer "
    "npu_vllm_quant_lightning_indexer_metadata npu_lightning_indexer npu_lightning_indexer_quant "
    "npu_sparse_flash_attention compressor compressor_metadata inplace_partial_rotary_mul "
    "npu_rms_norm_dynamic_quant npu_scatter_nd_update_v2"
).split()
PLAIN = (
    "npu_quant_lightning_indexer npu_lightning_indexer npu_sparse_flash_attention npu_transpose_batchmatmul "
    "npu_quant_matmul npu_dynamic_quant npu_rms_norm npu_scatter_nd_update_"
).split()
NAMES = [*(f"_C_ascend.{name}" for name in NATIVE), *(f"npu.{name}" for name in PLAIN)]


def each(value: Any, leaf: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with every tensor in it replaced."""
    if isinstance(value, dict):
        return {name: each(item, leaf) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(each(item, leaf) for item in value)
    return leaf(value) if isinstance(value, torch.Tensor) else value


def signs(result: Any) -> list[tuple[Any, ...]]:
    """Shapes and dtypes of what an operator returned."""
    results = result if isinstance(result, (tuple, list)) else [] if result is None else [result]
    return [(tuple(tensor.shape), tensor.dtype) for tensor in results]


def test_there_is_a_call_of_every_operator() -> None:
    from dsacp_npu.emulator.install import OPERATORS

    emulated = {f"{namespace}.{name}" for namespace, operators in OPERATORS.items() for name in operators}
    assert set(NAMES) == set(calls()) == emulated


@pytest.mark.parametrize("way", ["fake", "fake on another device", "meta"])
@pytest.mark.parametrize("name", NAMES)
def test_without_values(name: str, way: str) -> None:
    namespace, operator, args, kwargs = calls()[name]
    function = getattr(ops(namespace), operator)
    want = function(*each(args, torch.clone), **each(kwargs, torch.clone))
    device = "cpu" if way == "fake" else "meta"

    def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    with FakeTensorMode() if way.startswith("fake") else nullcontext():
        got = function(*each(args, elsewhere), **each(kwargs, elsewhere))
    assert signs(got) == signs(want)
    assert {
        tensor.device.type for tensor in (got if isinstance(got, (tuple, list)) else [got]) if tensor is not None
    } <= {device}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled(name: str) -> None:
    """PyTorch cannot compile an operator whose schema returns its own argument: that one is left out of the graph."""
    namespace, operator, args, kwargs = calls()[name]
    backend = "eager" if operator == "npu_scatter_nd_update_" else "aot_eager"

    def step(*args: Any, **kwargs: Any) -> Any:
        result = getattr(getattr(torch.ops, namespace), operator)(*args, **kwargs)
        written = args[0] + 0 if args and isinstance(args[0], torch.Tensor) else None
        return result, written

    want_args, want_kwargs = each(args, torch.clone), each(kwargs, torch.clone)
    want = step(*want_args, **want_kwargs)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=False)
    got_args, got_kwargs = each(args, torch.clone), each(kwargs, torch.clone)
    got = compiled(*got_args, **got_kwargs)
    assert_same(got[0] if got[0] is not None else (), want[0] if want[0] is not None else (), name)
    assert_same(
        [value for value in (got[1], *got_args, *got_kwargs.values()) if isinstance(value, torch.Tensor)],
        [value for value in (want[1], *want_args, *want_kwargs.values()) if isinstance(value, torch.Tensor)],
    )


def test_the_older_compressor_without_values() -> None:
    case = halved(compressor_case(4, [8, 3], [0, 5]))
    remove()
    install(compressor="two_state")
    want = ops().compressor(**each(case, torch.clone))
    with FakeTensorMode():
        got = ops().compressor(**each(case, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype)))
    remove()
    assert signs(got) == signs(want)


def test_padded_rows_without_values() -> None:
    case = compressor_case(4, [8, 8], [0, 3])
    case |= {"x": case["x"].reshape(2, 8, -1), "cu_seqlens": None}
    case |= {name: case[name][:4].reshape(2, 2, 64) for name in ("rope_cos", "rope_sin")}
    with FakeTensorMode():
        got = ops().compressor(**each(case, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype)))
    assert signs(got) == signs(ops().compressor(**case))


def test_metadata_without_any_tensor_and_without_values() -> None:
    with FakeTensorMode():
        metadata = ops().npu_sparse_attn_sharedkv_metadata(64, 1, 512, layout_kv="BSND", has_cmp_kv=False)
    assert signs(metadata) == [((1024,), torch.int32)]
