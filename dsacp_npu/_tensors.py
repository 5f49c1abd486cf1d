"""What the mirror asks of tensors: whether their values may be read, and checks in the reference's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsacp_ref.spec import UnsupportedError, check_array, contract_error

try:  # here only: every module of the mirror takes torch from this one, so that all say alike what is missing
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
except ImportError as error:
    raise ImportError(f"dsacp_npu computes with torch ({error}); pip install 'dsacp[torch]'") from error

__all__ = [
    "FLOATS",
    "Float",
    "Int32",
    "check_floats",
    "check_host",
    "check_tensor",
    "check_torch",
    "computing_dtype",
    "dtype_name",
    "first_true",
    "torch",
    "traced",
    "unread",
    "values_known",
]

# The reference's annotations name dtypes; the same words here keep the two signatures comparable as text.
Int32 = torch.Tensor
Float = torch.Tensor

FLOATS = ("float32", "float64")
LOW_PRECISION = ("bfloat16", "float16")


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype's bare name, as the reference writes it; without the cache of `spec`, which compilers warn about."""
    return str(tensor.dtype).removeprefix("torch.")


def values_known(*tensors: torch.Tensor) -> bool:
    """Whether values may be read without waiting for a device: plain CPU tensors, outside of any tracing."""
    if torch.compiler.is_compiling():
        return False
    return all(readable(tensor) for tensor in tensors)


def readable(tensor: torch.Tensor) -> bool:
    """Whether this tensor lies in the host's memory and has values."""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


def traced(tensor: torch.Tensor) -> bool:
    """Whether this tensor stands for others: code is being compiled, or tried out without values."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)


def unread(tensor: torch.Tensor) -> str:
    """Why the values of this tensor are not known, for an error text."""
    if traced(tensor):
        return "a traced tensor without values"
    return f"a tensor on {tensor.device.type}"


def check_host(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that planning cannot read: reading it would wait for the device, or has no answer at all."""
    if not values_known(tensor):
        raise UnsupportedError(
            f"{name} must be a CPU tensor, got {unread(tensor)}; plan on the CPU, from the lengths that the scheduler "
            "holds there, and move the result"
        )


def check_torch(name: str, value: Any) -> None:
    """Refuse another library's array; what is no array at all is left to the shared checks."""
    if hasattr(value, "dtype") and not isinstance(value, torch.Tensor):
        raise contract_error(name, "be a torch tensor", type(value).__name__, "dsacp_ref is for numpy arrays")


def check_tensor(name: str, tensor: Any, dtypes: Sequence[str], shape: Sequence[int | str], hint: str = "") -> None:
    """`check_array`, for torch tensors only. Only what it refuses reaches it, so that compilers can trace the rest."""
    check_torch(name, tensor)
    if isinstance(tensor, torch.Tensor) and dtype_name(tensor) in dtypes and tensor.ndim == len(shape):
        for want, size in zip(shape, tensor.shape, strict=True):
            if not isinstance(want, str) and want != size:
                break
        else:
            return
    check_array(name, tensor, dtypes, shape, hint)


def check_floats(name: str, tensor: Any, shape: Sequence[int | str], hint: str = "") -> None:
    """The reference's check of a float array, which lets bfloat16 and float16 through as well."""
    low = isinstance(tensor, torch.Tensor) and dtype_name(tensor) in LOW_PRECISION
    check_tensor(name, tensor, LOW_PRECISION if low else FLOATS, shape, hint)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for itself, float32 for everything shorter."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def first_true(mask: torch.Tensor) -> int:
    """The index of the first True of a host mask that has one."""
    return int(mask.nonzero()[0, 0])
