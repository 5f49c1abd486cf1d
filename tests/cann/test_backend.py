"""Backends by name: what they have, what they refuse, and how a missing operator is reported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch

from dsacp_npu import _operators, backend, cann
from dsacp_npu.emulator import installed
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.cann.test_vectors import CACHE, COS, HALF, OUTPUT, ROWS, SIN, SLOTS

LAYER_CALLS = (
    "apply_rope",
    "apply_inverse_rope",
    "compress_",
    "projected_rows",
    "pooled_entries",
    "updated_state_",
    "index_queries",
    "lightning_indexer",
    "window_attention",
    "all_entries_attention",
    "selected_attention",
    "projected_output",
    "scattered_rows_",
)


def test_torch_is_the_mirror() -> None:
    found = backend.get("torch")
    assert found.name == "torch"
    assert found is backend.get("torch")
    for name in LAYER_CALLS:
        function = getattr(found, name)
        assert function is found.functions[name]
        assert function is getattr(sys.modules[function.__module__], name)
        assert function.__module__.startswith("dsacp_npu.")


def test_cann_is_the_adapters() -> None:
    found = backend.get("cann")
    assert set(found.functions) == set(cann.OPERATORS)
    assert all(getattr(found, name) is getattr(cann, name) for name in cann.OPERATORS)


@pytest.mark.parametrize("name", ["local_extents", "projected_rows", "merge_partials", "attention_layer"])
def test_cann_refuses_what_it_has_not(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"backend 'cann' has no {name}; it supports all_entries_attention, "):
        getattr(backend.get("cann"), name)


def test_what_nobody_has_is_no_attribute() -> None:
    for name in ("torch", "cann"):
        with pytest.raises(AttributeError, match="no attribute 'window_attentoin'"):
            backend.get(name).window_attentoin  # noqa: B018


def test_a_backend_cannot_be_changed() -> None:
    found = backend.get("cann")
    with pytest.raises(AttributeError, match="cannot be changed"):
        found.apply_rope = None
    with pytest.raises(AttributeError, match="cannot be changed"):
        del found.apply_rope
    with pytest.raises(TypeError):
        found.functions["apply_rope"] = None
    assert repr(found) == "backend.get('cann')"


def test_without_triton_the_command_that_helps_is_named() -> None:
    with mock.patch.dict(sys.modules, {"triton": None}), mock.patch.dict(backend.made, clear=True):
        for name in [name for name in sys.modules if name.startswith(("dsacp_npu._triton_", "dsacp_npu.kernels."))]:
            del sys.modules[name]
        with pytest.raises(ImportError, match=r"make ascend\), on an NVIDIA GPU pip install triton"):
            backend.get("triton")


def test_another_name_is_no_backend() -> None:
    with pytest.raises(ContractError, match="backend must be one of 'torch', 'cann', 'triton', got 'cuda'"):
        backend.get("cuda")


def test_compiled_code_may_ask_for_a_backend() -> None:
    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return backend.get("torch").apply_rope(x, cos, sin)

    torch._dynamo.reset()
    compiled = torch.compile(turned, fullgraph=True, backend="aot_eager", dynamic=False)
    assert torch.equal(compiled(HALF, COS, SIN), turned(HALF, COS, SIN))


def test_every_function_names_its_operators() -> None:
    """All of them are registered by the emulator, so the table holds no name that the schemas do not."""
    assert set(cann.OPERATORS) == {name for name in cann.__all__ if name.islower()}
    with installed():
        for names in cann.OPERATORS.values():
            assert all(_operators.namespace_of(name) for name in names)


CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("apply_rope", (HALF, COS, SIN)),
    ("apply_inverse_rope", (HALF, COS, SIN)),
    ("projected_output", OUTPUT),
    ("quantized_rows", (HALF[:, 0],)),
    ("rms_norm_quantized", (HALF[:, 0], HALF[0, 0], 1e-6)),
    ("scattered_rows_", (CACHE, ROWS, SLOTS)),
]


@pytest.mark.parametrize(("function", "args"), CALLS)
def test_a_missing_operator_is_named(function: str, args: tuple[Any, ...]) -> None:
    (name,) = cann.OPERATORS[function]
    if _operators.namespace_of(name):
        pytest.skip(f"{name} is here, so no text says that it is missing")
    with pytest.raises(UnsupportedError) as refusal:
        getattr(backend.get("cann"), function)(*args)
    text = str(refusal.value)
    assert text.startswith(f"operator {name} is not in _C_ascend, npu, custom; torch_npu is not installed; ")
    assert "install torch_npu" in text
    assert "dsacp_npu.emulator.install()" in text


def test_a_device_package_that_does_not_load_is_reported() -> None:
    with (
        mock.patch.dict(_operators.device_package, clear=True),
        mock.patch("importlib.util.find_spec", return_value=object()),
        mock.patch("importlib.import_module", side_effect=OSError("libascendcl.so: cannot open")) as tried,
    ):
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"importing torch_npu failed: OSError\('libascendcl"):
                _operators.operator("no_such_operator")
    assert tried.call_count == 1


def test_an_operator_without_the_argument_does_not_count() -> None:
    """torch_npu's indexer of that name knows no compressed keys."""
    with installed():
        assert _operators.find_operator("npu_quant_lightning_indexer") == ("npu", "npu_quant_lightning_indexer")
        assert _operators.find_operator("npu_quant_lightning_indexer", needing="cmp_ratio") == ("", "")
        with pytest.raises(UnsupportedError, match="npu_quant_lightning_indexer with argument cmp_ratio is not in"):
            _operators.operator("npu_quant_lightning_indexer", needing="cmp_ratio")


@pytest.mark.slow
def test_importing_and_asking_loads_no_device_package() -> None:
    program = """
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
from dsacp_npu import backend
backend.get("cann"), backend.get("torch")
heavy = {"torch_npu", "triton", "dsacp_npu.emulator"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
