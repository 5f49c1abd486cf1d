"""Backend `triton` as a whole: what it has, what it refuses, and that its table of kernels is true."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from dsacp_npu import backend, triton_ops
from dsacp_ref.spec import UnsupportedError
from tests.kernels.harness import kernel_modules

W8A8 = ("quant_matmul", "quantized_rows", "rms_norm_quantized")
# What a step or an engine asks of the kernels alone.
ALONE = {"apply_inverse_rope_", "apply_rope_", "attention_lists", "packed_heads", "rms_norm", "unpacked_heads"}


def test_the_backend_has_what_its_table_says() -> None:
    found = backend.get("triton")
    assert found is backend.get("triton")
    assert sorted(found.functions) == sorted(triton_ops.FUNCTIONS) == sorted(triton_ops.KERNEL_FILES)
    files = {file for files in triton_ops.KERNEL_FILES.values() for file in files}
    assert files <= set(kernel_modules())
    assert {*triton_ops.FUNCTIONS} - {*backend.get("torch").functions} <= ALONE


@pytest.mark.parametrize("name", sorted({*triton_ops.FUNCTIONS} & {*backend.get("torch").functions}))
def test_a_function_takes_what_its_twin_takes(name: str) -> None:
    """Attention takes a bound of logits and lists of slots beside it."""
    mine = inspect.signature(getattr(backend.get("triton"), name)).parameters
    theirs = inspect.signature(getattr(backend.get("torch"), name)).parameters
    assert [*mine][: len(theirs)] == [*theirs]
    more = [mine[extra] for extra in [*mine][len(theirs) :]]
    assert all(parameter.default is None for parameter in more)
    assert not more or name.endswith("_attention")


@pytest.mark.parametrize("name", [*W8A8, "merge_partials", "attention_layer"])
def test_what_has_no_kernel_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"backend 'triton' has no {name}; it supports all_entries_attention, "):
        getattr(backend.get("triton"), name)


def test_a_cpu_tensor_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    x, table = torch.zeros(2, 1, 64, dtype=torch.bfloat16), torch.zeros(2, 32)
    with pytest.raises(UnsupportedError, match="CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1"):
        backend.get("triton").apply_rope(x, table, table)


def test_a_family_without_a_tile_is_named() -> None:
    launch = importlib.import_module("dsacp_npu._triton_launch")
    text = "no tile of attention for 7 on family 'a2'; it has: 3, 5; use backend 'torch' or 'cann'"
    with pytest.raises(UnsupportedError, match=text):
        launch.tile_for({"a2": {3: 1, 5: 2}}, torch.zeros(1), "attention", 7)


@pytest.mark.parametrize(
    ("name", "family"), [("Ascend910B3", "a2"), ("Ascend910_9391", "a2"), ("Ascend950PR_9579", "a5")]
)
def test_a_chip_has_a_family(name: str, family: str) -> None:
    assert importlib.import_module("dsacp_npu._triton_launch").family_of_npu(name) == family
