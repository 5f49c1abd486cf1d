"""What every mirror test does: hand both packages the same input, and compare what comes back.

Inputs are made as numpy arrays. `to_torch` copies arrays into tensors and the reference's records into the mirror's
records of the same name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsacp_ref.spec import ContractError
from tests.compare import assert_double, assert_same, assert_within_budget, numpy_array

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
LOW_PRECISION = ("float32", "bfloat16", "float16")
# Where records are looked for, in the order of the imports.
MODULES = (
    *("partition", "extents", "rope", "quant", "fp8", "compressor", "indexer", "attention", "layer", "block"),
    *("mla", "mla_layer", "mla_stack"),
)
WAYS = ("fake", "fake on another device", "meta", "compiled")
CODED = ("QuantizedVectors", "FP8Vectors")  # codes and their scales, exact in every dtype of what is coded


class Case(NamedTuple):
    """One call with numpy inputs."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def case(function: str, *args: Any, **kwargs: Any) -> Case:
    """A call, written like one."""
    return Case(function, args, kwargs)


def int32(*values: int) -> np.ndarray:
    """A row of integers."""
    return np.array(values, np.int32)


@cache
def record(package: str, name: str) -> type:
    """A package's record of this name."""
    modules = (importlib.import_module(f"{package}.{module}") for module in MODULES)
    return next(getattr(module, name) for module in modules if name in module.__all__)


def mapped(value: Any, leaf: Callable[[Any], Any], package: str = "dsacp_npu") -> Any:
    """The value with `leaf` applied to every array or tensor; records become those of a package."""
    if isinstance(value, dict):
        return {name: mapped(item, leaf, package) for name, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, leaf, package) for item in value]
    if isinstance(value, tuple):
        items = [mapped(item, leaf, package) for item in value]
        if not hasattr(value, "_fields"):
            return tuple(items)
        return record(package, type(value).__name__)(*items)
    return leaf(value) if isinstance(value, (np.ndarray, torch.Tensor)) else value


def to_torch(value: Any, dtype: str | None = None) -> Any:
    """Arrays as tensors of their own memory, floats in a dtype of choice, FP8 as it is."""

    def leaf(array: np.ndarray) -> torch.Tensor:
        if array.dtype.name == "float8_e4m3fn":
            return torch.tensor(array.view(np.uint8)).view(torch.float8_e4m3fn)
        tensor = torch.tensor(array)
        return tensor.to(TORCH_DTYPES[dtype]) if dtype and tensor.is_floating_point() else tensor

    return mapped(value, leaf)


def to_numpy(value: Any, dtype: str) -> Any:
    """Floats as numpy arrays of a dtype, from tensors or arrays; records become the reference's."""

    def leaf(array: Any) -> np.ndarray:
        array = numpy_array(array)
        return array.astype(dtype) if array.dtype.kind == "f" else array

    return mapped(value, leaf, "dsacp_ref")


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, records and dicts."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def functions(module: str, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The function of the reference and the one of the mirror."""
    packages = ("dsacp_ref", "dsacp_npu")
    reference, mirror = (getattr(importlib.import_module(f"{package}.{module}"), name) for package in packages)
    return reference, mirror


def untouched(mirror: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The mirror's result, once none of its inputs was written to."""
    inputs = tensors_of((args, kwargs))
    before = [tensor._version for tensor in inputs]
    result = mirror(*args, **kwargs)
    assert [tensor._version for tensor in inputs] == before, "an input was written to"
    return result


def outcome(function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """The text of the refusal, or the result."""
    try:
        return "", function(*args)
    except ContractError as error:
        return str(error), None


def assert_mirrors(module: str, name: str, *args: Any, **kwargs: Any) -> None:
    """Both give exactly the same result, or refuse with the same text."""
    reference, mirror = functions(module, name)
    want_text, want = outcome(lambda: reference(*args, **kwargs))
    got_text, got = outcome(lambda: untouched(mirror, to_torch(args), to_torch(kwargs)))
    assert got_text == want_text
    assert_same(got, want, name)


def assert_refusal_mirrors(module: str, bad: Case) -> None:
    """Both refuse, with the same type and text."""
    reference, mirror = functions(module, bad.function)
    want, _ = outcome(lambda: reference(*bad.args, **bad.kwargs))
    got, _ = outcome(lambda: mirror(*to_torch(bad.args), **to_torch(bad.kwargs)))
    assert want, "the reference takes this input"
    assert got == want


def assert_floats_mirror(
    module: str, name: str, dtype: str, *args: Any, baseline: Callable[..., Any] | None = None, **kwargs: Any
) -> None:
    """Integers the same, floats to rounding in float64, and within the error budget below it.

    The inputs are rounded to the dtype first. The plain low-precision computation is the reference in float32, rounded
    once at its end; ``baseline`` is another one, for functions that round in between. It takes the inputs in float32.
    """
    reference, mirror = functions(module, name)
    args, kwargs = to_torch(args, dtype), to_torch(kwargs, dtype)
    got = untouched(mirror, args, kwargs)
    exact = reference(*to_numpy(args, "float64"), **to_numpy(kwargs, "float64"))
    if dtype == "float64":
        return compare_floats(got, exact, exact, name)
    plain = (baseline or reference)(*to_numpy(args, "float32"), **to_numpy(kwargs, "float32"))
    return compare_floats(got, exact, to_torch(plain, dtype), name)


def compare_floats(got: Any, exact: Any, plain: Any, name: str) -> None:
    """A result against the float64 one, with the plain computation's error as the measure."""
    if type(exact).__name__ in CODED:
        assert_same(got, exact, name)
    elif isinstance(exact, (tuple, list)):
        assert type(got).__name__ == type(exact).__name__, name
        for index, items in enumerate(zip(got, exact, plain, strict=True)):
            compare_floats(*items, f"{name}.{getattr(exact, '_fields', range(len(exact)))[index]}")
    elif not isinstance(exact, np.ndarray) or exact.dtype.kind != "f":
        assert_same(got, exact, name)
    elif got.dtype == torch.float64:
        assert_double(got.numpy(), exact, name)
    else:
        assert_within_budget(got, exact, plain, name)


def assert_runs_without_values(module: str, way: str, call: Case) -> None:
    """The mirror runs where no value can be read, and gives the shapes, dtypes, devices and numbers it must."""
    _, mirror = functions(module, call.function)
    args, kwargs = to_torch(call.args), to_torch(call.kwargs)
    want = mirror(*args, **kwargs)
    if way == "compiled":
        torch._dynamo.reset()
        # aot_eager traces what inductor would get, without a C++ compiler's seconds a function.
        compiled = torch.compile(mirror, fullgraph=True, backend="aot_eager", dynamic=False)
        for mine, due in zip(tensors_of(compiled(*args, **kwargs)), tensors_of(want), strict=True):
            if due.dtype == torch.float64:  # without values a function may sum in another order
                assert_double(mine.numpy(), due.numpy(), call.function)
            else:
                assert_same(mine, due, call.function)
        return
    device = "cpu" if way == "fake" else "meta"
    with FakeTensorMode() if way.startswith("fake") else nullcontext():
        got = mirror(*on_device(args, device), **on_device(kwargs, device))
    signs = [(tensor.dtype, tensor.shape) for tensor in tensors_of(want)]
    assert [(tensor.dtype, tensor.shape) for tensor in tensors_of(got)] == signs
    assert {tensor.device.type for tensor in tensors_of(got)} == {device}
    assert mapped(got, lambda _: None) == mapped(want, lambda _: None)


def on_device(value: Any, device: str) -> Any:
    """Tensors of the same shapes and dtypes, elsewhere."""
    return mapped(value, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
