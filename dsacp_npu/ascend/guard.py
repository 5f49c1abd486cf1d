"""Tensors copied in front of memory that nobody may touch, and a process that may crash on it."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from dsacp_npu._tensors import torch

__all__ = ["TRIES", "Copies", "MemoryFaultError", "StuckError", "in_child"]

PAGE = mmap.PAGESIZE
FILL = 0xA5  # of the bytes in front of a copy
FORBIDDEN = 0  # PROT_NONE
LIMIT_S = 300.0
STUCK_S = 5.0  # a program computes all the time; a child that sleeps so long waits for a lock
TRIES = 4


class MemoryFaultError(RuntimeError):
    """A program read or wrote outside of its arguments, or did not come to an end."""


class StuckError(RuntimeError):
    """A child that waits for ever: a lock of another thread was held when it was forked. Fork again."""


class Copies:
    """Copies of tensors in memory shared with children, each with a page behind its end that may not be touched.

    Fields:
        addresses: list[int], where each copy begins.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy; the last byte of each copy is the last before the forbidden page."""
        self.tensors = tensors
        self.maps: list[mmap.mmap] = []
        self.addresses: list[int] = []
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            room = -(-size // PAGE) * PAGE + PAGE  # at least a page in front of it
            area = mmap.mmap(-1, room + PAGE)
            start = ctypes.addressof(ctypes.c_char.from_buffer(area))
            ctypes.memset(start, FILL, room - size)
            ctypes.memmove(start + room - size, tensor.data_ptr(), size)
            protect(start + room, FORBIDDEN)
            self.maps.append(area)
            self.addresses.append(start + room - size)

    def __enter__(self) -> Copies:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the memory go."""
        self.maps.clear()

    def write_back(self, name: str) -> None:
        """Copy into the tensors what stands in the copies; refuse if something was written in front of one."""
        for number, (tensor, area, address) in enumerate(zip(self.tensors, self.maps, self.addresses, strict=True)):
            size = tensor.numel() * tensor.element_size()
            room = len(area) - PAGE
            if area[: room - size] != bytes([FILL]) * (room - size):
                raise MemoryFaultError(f"{name}: wrote in front of tensor {number} of its arguments")
            ctypes.memmove(tensor.data_ptr(), address, size)


def protect(address: int, rights: int) -> None:
    """Change what may be done with one page."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), rights):
        raise OSError(ctypes.get_errno(), "mprotect")


def in_child(work: Callable[[], Any], name: str, limit_s: float = LIMIT_S) -> None:
    """Do the work in a child process; MemoryFaultError if it crashes, or takes longer than the limit.

    StuckError if it sleeps: what it has written until then is of no use.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child calls machine code and leaves
        child = os.fork()
    if child == 0:
        status = 1
        try:
            faulthandler.disable()
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    ended = waited(child, limit_s)
    if ended is None:
        raise MemoryFaultError(f"{name}: did not end within {limit_s:g} s")
    if ended < 0:
        how = signal.Signals(-ended).name
        raise MemoryFaultError(f"{name}: {how}, a program read or wrote outside of its arguments")
    if ended:
        raise MemoryFaultError(f"{name}: the process of its own ended with status {ended}")


def waited(child: int, limit_s: float) -> int | None:
    """The exit status of a child, negative for a signal; None if it had to be killed."""
    end = time.monotonic() + limit_s
    pause, busy, used = 0.0005, time.monotonic(), ("", -1)
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        before, used = used, sleep_and_time(child)
        if used != before or used[0] != "S":
            busy = time.monotonic()
        elif time.monotonic() - busy > STUCK_S:
            end_child(child)
            raise StuckError(f"a child slept for {STUCK_S:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    end_child(child)
    return None


def sleep_and_time(child: int) -> tuple[str, int]:
    """Whether a child runs (``"R"``) or sleeps (``"S"``), and the processor time that it has used, in ticks."""
    with open(f"/proc/{child}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def end_child(child: int) -> None:
    """Kill a child and forget it."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
