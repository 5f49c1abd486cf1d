"""Repairs of the interpreter that comes with triton-ascend 3.2.0, applied from outside.

`TRITON_INTERPRET=1` runs a kernel in numpy, without a device. The interpreter of triton-ascend 3.2.0 is wrong in
several ways, some of them silent. Each function below repairs one, and says what was seen. Other versions are left as
they are. Upstream 3.6 shares one fault, and only with numpy 2.4 or newer: no int of an array with one element.
"""

from __future__ import annotations

import importlib.util
import operator
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from dsacp_ref.spec import UnsupportedError

__all__ = ["REPAIRS", "repair"]

VERSION = "3.2.0"
done: list[str] = []


def repair() -> tuple[str, ...]:
    """Repair the interpreter of triton-ascend 3.2.0; a second call changes nothing.

    Returns:
        tuple[str, ...]: names of the repairs that are in force; empty for any other Triton, which is left alone.

    Raises:
        UnsupportedError: kernels are compiled in this process, because TRITON_INTERPRET=1 was not set in time.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError("kernels are compiled in this process; set TRITON_INTERPRET=1 before Python starts")
    import triton
    from triton.runtime import interpreter

    if not isinstance(triton.language.sum, interpreter.InterpretedFunction):
        raise UnsupportedError("triton was imported before TRITON_INTERPRET=1 was set; set it before Python starts")
    if not done and triton.__version__ == VERSION and importlib.util.find_spec("triton.triton_patch"):
        for name, function in REPAIRS.items():
            function(interpreter, triton.language)
            done.append(name)
    return tuple(done)


# bfloat16 lies in memory as the upper half of a float32, and the interpreter holds it as uint16.


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers whose upper halves these are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: np.ndarray) -> np.ndarray:
    """The bfloat16 bits nearest to these numbers, ties to even; NaN stays NaN."""
    bits = np.array(numbers, np.float32).view(np.uint32)
    nearest = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), nearest.astype(np.uint16))


def repair_bf16_dot(interpreter: ModuleType, tl: ModuleType) -> None:
    """`tl.dot` of bf16 multiplied the bit patterns: results of 1e10 and more, silently."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    original = builder.create_dot

    def as_float(operand: Any) -> Any:
        return handle(widened(operand.data), tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
        return original(self, as_float(a), as_float(b), accumulator, *options)

    builder.create_dot = create_dot


def repair_bf16_rounding(interpreter: ModuleType, tl: ModuleType) -> None:
    """A cast to bf16 dropped the lower half: half of the results one unit off. Casts of integers kept their bits."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    original = builder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        have, want = source.dtype.scalar, target.scalar
        if have == tl.bfloat16 and want != tl.bfloat16:
            return cast_impl(self, handle(widened(source.data), tl.float32), target)
        if want == tl.bfloat16 and have != tl.bfloat16:
            return handle(rounded(source.data), want)
        return original(self, source, target)

    builder.cast_impl = cast_impl
    builder.get_bf16 = lambda self, value: handle(rounded(np.array([value])), tl.bfloat16)


def repair_bf16_arithmetic(interpreter: ModuleType, tl: ModuleType) -> None:
    """Every product and sum of bf16 tensors came from the bit patterns; now it raises: cast to fp32 after the load."""
    builder = interpreter.InterpreterBuilder

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(self: Any, *arguments: Any) -> Any:
            if any(getattr(a, "dtype", None) is not None and a.dtype.scalar == tl.bfloat16 for a in arguments):
                raise TypeError("arithmetic on bf16 outside of tl.dot; cast to tl.float32 after the load")
            return original(self, *arguments)

        return operation

    for name in ("binary_op", "unary_op", "create_fma", "create_clampf"):
        setattr(builder, name, refusing(getattr(builder, name)))


def repair_sums(interpreter: ModuleType, tl: ModuleType) -> None:
    """numpy widens sums of int32 to int64; the store then wrote 8 bytes an element, over its neighbours.

    A sum of int1 wraps around on the device, so it is refused.
    """
    reductions = interpreter.ReduceScanOpIneterface  # spelled so in 3.2.0
    to_tensor, apply = reductions.to_tensor, reductions.apply

    def narrowed(self: Any, result: Any, dtype: Any) -> Any:
        return to_tensor(self, np.asarray(result).astype(interpreter._get_np_dtype(dtype.scalar), copy=False), dtype)

    def checked(self: Any, operands: Any) -> Any:
        first = operands[0] if isinstance(operands, tuple) else operands
        if self.combine_fn == tl.standard._sum_combine and first.dtype.scalar == tl.int1:
            raise TypeError("a sum of int1 wraps around; cast to tl.int32 first")
        return apply(self, operands)

    reductions.to_tensor, reductions.apply = narrowed, checked


def repair_extremes(interpreter: ModuleType, tl: ModuleType) -> None:
    """`tl.max` and `tl.min` went through Python element by element; `tl.maximum` passed NaN on where it should not."""
    builder, reduction = interpreter.InterpreterBuilder, interpreter.ReduceOps
    apply = reduction.apply_impl
    arrays = {
        "_elementwise_max_default": np.fmax.reduce,
        "_elementwise_max_propagate_nan": np.max,
        "_elementwise_min": np.fmin.reduce,
    }

    def apply_impl(self: Any, operands: Any) -> Any:
        function = arrays.get(self.combine_fn.__name__)
        return apply(self, operands) if function is None else self.min_max(operands[0], function)

    reduction.apply_impl = apply_impl
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


def repair_scalars(interpreter: ModuleType, tl: ModuleType) -> None:
    """numpy 2.4 makes no int of an array with one element, so `range(tl.program_id(0), n)` raised TypeError."""
    original = interpreter._patch_lang_tensor

    def truth(tensor: Any) -> bool:
        data = np.asarray(tensor.handle.data)
        return bool(data.item()) if data.size == 1 else True

    def patch(tensor: Any) -> None:
        original(tensor)
        tensor.__index__ = lambda self: operator.index(np.asarray(self.handle.data).item())
        tensor.__bool__ = truth

    interpreter._patch_lang_tensor = patch


def repair_warnings(interpreter: ModuleType, tl: ModuleType) -> None:
    """numpy warns where a device computes on: inf - inf, exp of a large number, a NaN cast to int."""
    original = interpreter.GridExecutor.__call__

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        with np.errstate(all="ignore"):
            return original(self, *arguments, **options)

    interpreter.GridExecutor.__call__ = call


def repair_builtins(interpreter: ModuleType, tl: ModuleType) -> None:
    """What Ascend adds to the language had no interpreted side: AttributeError on create_sort and others."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def like(data: np.ndarray, source: Any) -> Any:
        return handle(np.ascontiguousarray(data), source.dtype.scalar)

    def ordered(source: Any, descending: bool) -> np.ndarray:
        keys = widened(source.data) if source.dtype.scalar == tl.bfloat16 else source.data
        order = np.argsort(keys, axis=-1, kind="stable")
        return np.take_along_axis(source.data, order[..., ::-1] if descending else order, -1)

    def slices(offsets: Any, sizes: Any, strides: Any) -> tuple[slice, ...]:
        starts = [operator.index(np.asarray(offset.data).item()) for offset in offsets]
        return tuple(slice(a, a + n * s, s) for a, n, s in zip(starts, sizes, strides, strict=True))

    def insert_slice(self: Any, whole: Any, part: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
        data = whole.data.copy()
        data[slices(offsets, sizes, strides)] = part.data
        return like(data, whole)

    def element(self: Any, source: Any, index: Any) -> Any:
        return handle(np.array([source.data[tuple(np.asarray(i.data).item() for i in index)]]), source.dtype.scalar)

    builder.create_sort = lambda self, source, dim, descending: like(ordered(source, descending), source)
    builder.create_flip = lambda self, source, dim: like(np.flip(source.data, dim), source)
    builder.create_gather = lambda self, source, index, axis: like(
        np.take_along_axis(source.data, index.data.astype(np.int64), axis), source
    )
    builder.create_extract_slice = lambda self, source, offsets, sizes, strides: like(
        source.data[slices(offsets, sizes, strides)], source
    )
    builder.create_insert_slice, builder.create_extract_scalar = insert_slice, element
    for name in ("get_unit_attr", "get_bool_attr", "get_int32_attr", "get_str_attr", "get_i64_array_attr"):
        setattr(builder, name, lambda self, *value: None)
    for name in ("create_annotation", "create_custom_op_for_inter_core_sync"):  # hints and waits compute nothing
        setattr(builder, name, lambda self, *arguments: None)
    repair_calls(interpreter, tl)


def repair_calls(interpreter: ModuleType, tl: ModuleType) -> None:
    """Plain ints as offsets of a slice are constants to the compiler; `tl.parallel` is a range; `tl.topk` is a sort."""
    from triton.triton_patch.language import core

    def with_constants(function: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(*arguments: Any, _builder: Any = None, _generator: Any = None) -> Any:
            values = list(arguments)
            values[position] = [tl.constexpr(v) if isinstance(v, int) else v for v in values[position]]
            return function(*values, _builder=_builder)

        return tl.core.builtin(call)

    def topk(source: Any, k: int, dim: int = -1, _builder: Any = None) -> Any:
        largest = _builder.create_sort(source.handle, dim, True).data[..., :k]
        kind = tl.block_type(source.dtype, list(largest.shape))
        return tl.core.tensor(interpreter.TensorHandle(np.ascontiguousarray(largest), source.dtype), kind)

    def parallel(start: Any, stop: Any = None, step: Any = 1, **options: Any) -> range:
        return range(0, start, step) if stop is None else range(start, stop, step)

    tl.extract_slice, tl.insert_slice = with_constants(core.extract_slice, 1), with_constants(core.insert_slice, 2)
    tl.get_element, tl.topk = with_constants(core.get_element, 1), tl.core.builtin(topk)
    tl.parallel = parallel


REPAIRS: dict[str, Callable[[ModuleType, ModuleType], None]] = {
    "bf16 dot": repair_bf16_dot,
    "bf16 rounding": repair_bf16_rounding,
    "bf16 arithmetic": repair_bf16_arithmetic,
    "sums": repair_sums,
    "extremes": repair_extremes,
    "scalars": repair_scalars,
    "warnings": repair_warnings,
    "builtins": repair_builtins,
}
