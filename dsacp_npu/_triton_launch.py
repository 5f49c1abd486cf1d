"""What launching a kernel needs to know of a device: its family of tile tables, and how many programs fill it."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from dsacp_npu._tensors import torch
from dsacp_ref.spec import UnsupportedError

__all__ = ["check_runs", "family_of", "has_hopper", "programs_for", "tile_for"]

GLUON = (3, 6)  # the first Triton whose Gluon the kernels for Hopper GPUs are written for

INTERPRETED_PROGRAMS = 2  # as many as show that a task loop is right


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_runs(tensor: torch.Tensor) -> None:
    """Refuse a device that no kernel runs on."""
    if tensor.device.type == "cpu" and not interpreted():
        raise UnsupportedError(
            "backend 'triton' runs on an NPU or a GPU; CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 "
            "before Python starts, or use backend 'torch'"
        )
    if tensor.device.type not in ("cpu", "cuda", "npu"):
        raise UnsupportedError(f"backend 'triton' runs on an NPU or a GPU, not on {tensor.device.type}")
    if tensor.device.type != "cpu" and tensor.device.index != (current := current_device(tensor.device.type)):
        raise UnsupportedError(
            f"Triton launches on the current device, {tensor.device.type}:{current}, and the tensor lies on "
            f"{tensor.device}; call torch.{tensor.device.type}.set_device({tensor.device.index}) first"
        )


def current_device(kind: str) -> int:
    """The number of the device on which torch works now."""
    index: int = getattr(torch, kind).current_device()
    return index


def family_of(tensor: torch.Tensor) -> str:
    """The family of tile tables for the device of this tensor; the interpreter runs what A2 and A3 run."""
    check_runs(tensor)
    if tensor.device.type == "cuda":
        return "cuda"
    if tensor.device.type == "cpu":
        return "a2"
    return family_of_npu(device_name(tensor.device.index))


def family_of_npu(name: str) -> str:
    """The family of an Ascend chip by the name that its driver gives."""
    return "a5" if name.startswith(("Ascend950", "Ascend910_95")) else "a2"


@cache
def device_name(index: int | None) -> str:
    """What the driver calls this NPU."""
    name: str = torch.npu.get_device_name(index)
    return name


def programs_for(tensor: torch.Tensor, *, cube: bool, waves: int = 1) -> int:
    """How many programs fill the device: its physical cores, a few times over where several share one.

    Args:
        tensor: its device is asked.
        cube: whether the kernel multiplies matrices; an NPU has two vector cores beside every cube core.
        waves: programs a multiprocessor of a GPU.
    """
    check_runs(tensor)
    if tensor.device.type == "cpu":
        return INTERPRETED_PROGRAMS
    return core_count(tensor.device.type, tensor.device.index, cube) * (waves if tensor.device.type == "cuda" else 1)


@cache
def has_hopper(index: int | None) -> bool:
    """Whether this CUDA device is a Hopper GPU and Triton has the language for its warps' roles."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return torch.cuda.get_device_capability(index) == (9, 0) and version >= GLUON


@cache
def core_count(kind: str, index: int | None, cube: bool) -> int:
    """The physical cores of a device."""
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(index).multi_processor_count)
    import triton

    properties = triton.runtime.driver.active.utils.get_device_properties(index or 0)
    return int(properties["num_aicore" if cube else "num_vectorcore"])


def tile_for(table: dict[str, dict[Any, Any]], tensor: torch.Tensor, what: str, key: Any) -> Any:
    """The tile that passed the compile check for this device and these sizes; without one the call is refused."""
    family = family_of(tensor)
    tiles = table.get(family, {})
    if key not in tiles:
        have = ", ".join(map(str, tiles)) or "nothing"
        raise UnsupportedError(
            f"backend 'triton' has no tile of {what} for {key} on family {family!r}; it has: {have}; "
            "use backend 'torch' or 'cann'"
        )
    return tiles[key]
