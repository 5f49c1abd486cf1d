"""Files of tensors, as plain numpy arrays and words: npz, safetensors, torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_ref.spec import contract_error

__all__ = ["SUFFIXES", "Value", "values_in"]

SUFFIXES = (".npz", ".safetensors", ".pt", ".pth")

# What safetensors calls the dtypes that numpy has.
NUMPY_NAMES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1"}


class Value(NamedTuple):
    """One thing in a file.

    Fields:
        array: numpy array; bfloat16 is widened to float32.
        dtype: str, of what was written.
    """

    array: NDArray[Any]
    dtype: str


def values_in(path: Path) -> dict[str, Value | str]:
    """Everything in a file by its name there.

    Args:
        path: a file that ends in one of `SUFFIXES`.

    Returns:
        dict of Value; of str for words.

    Raises:
        ContractError: another kind of file, or one that holds what no check can read.
        OSError: no such file.
        ImportError: the library that reads it is not installed.
    """
    if path.suffix == ".npz":
        return npz_values(path)
    if path.suffix == ".safetensors":
        return safetensors_values(path)
    if path.suffix in SUFFIXES:
        return torch_values(path)
    hint = "numpy.savez writes npz; dsacp_npu.record.write_dump writes npz and safetensors"
    raise contract_error("dump", f"end in {', '.join(SUFFIXES)}", path.name, hint)


def npz_values(path: Path) -> dict[str, Value | str]:
    """The arrays of an npz file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: plain(name, arrays[name]) for name in arrays.files}
    except (ValueError, EOFError) as error:
        if isinstance(error, type(contract_error("", "", ""))):
            raise
        raise contract_error("dump", "be an npz file of plain arrays", path.name, str(error)) from error
    except Exception as error:
        if type(error).__name__ == "BadZipFile":
            raise contract_error("dump", "be an npz file", path.name, str(error)) from error
        raise


def plain(name: str, array: NDArray[Any]) -> Value | str:
    """An array as it is; a word as a str."""
    if array.dtype.kind == "U" and array.ndim == 0:
        return str(array)
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # what numpy makes of a bfloat16 that it does not know
        return Value(widened(array.view(np.uint16)), "bfloat16")
    if array.dtype.kind not in "iufb":
        raise contract_error(name, "be numbers, or one word", f"dtype {array.dtype}", "write plain arrays")
    return Value(array, str(array.dtype))


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 from its bits, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def safetensors_values(path: Path) -> dict[str, Value | str]:
    """The tensors of a safetensors file, and the words in its metadata."""
    try:
        from safetensors import SafetensorError, deserialize, safe_open
    except ImportError as error:
        raise ImportError("a .safetensors dump is read with safetensors; pip install 'dsacp[torch]'") from error
    found: dict[str, Value | str] = {}
    data = path.read_bytes()
    try:
        for name, part in deserialize(data):
            bits, shape, kind = bytes(part["data"]), part["shape"], part["dtype"]
            if kind == "BF16":
                found[name] = Value(widened(np.frombuffer(bits, np.uint16).reshape(shape)), "bfloat16")
            elif kind in NUMPY_NAMES:
                array = np.frombuffer(bits, NUMPY_NAMES[kind]).reshape(shape)
                found[name] = Value(array, str(array.dtype))
            elif kind == "BOOL":
                found[name] = Value(np.frombuffer(bits, np.bool_).reshape(shape), "bool")
            else:
                raise contract_error(name, f"be one of {', '.join(NUMPY_NAMES)}, BF16, BOOL", kind, "cast it first")
        with safe_open(path, "numpy") as file:
            return found | dict(file.metadata() or {})
    except SafetensorError as error:
        raise contract_error("dump", "be a safetensors file", path.name, str(error)) from error


def torch_values(path: Path) -> dict[str, Value | str]:
    """The tensors, numbers and words of a mapping that torch saved."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"a {path.suffix} dump is read with torch; pip install torch, or write npz") from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # what is no torch file shows in many ways
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "torch.save a dict of tensors, numbers and words"
        raise contract_error("dump", f"be a torch file of plain tensors ({hint})", path.name, first) from error
    if not isinstance(loaded, Mapping):
        raise contract_error("dump", "hold a dict by name", type(loaded).__name__, path.name)
    found: dict[str, Value | str] = {}
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor):
            kind = str(value.dtype).removeprefix("torch.")
            value = value.float() if kind == "bfloat16" else value
            found[str(name)] = plain(str(name), value.numpy(force=True))
            if kind == "bfloat16":
                found[str(name)] = Value(value.numpy(force=True), kind)
        elif isinstance(value, (bool, int, float)):
            found[str(name)] = Value(np.array(value), type(value).__name__)
        elif isinstance(value, str):
            found[str(name)] = value
        else:
            raise contract_error(str(name), "be a tensor, a number or a word", type(value).__name__, path.name)
    return found
