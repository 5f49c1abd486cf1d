"""What the compiler planned for on-chip memory, read from what it wrote, and what a chip has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["FUNCTION", "SPACES", "TARGETS", "Chip", "available", "overflow", "planned", "retries"]

SPACES = {"ub": "ub", "cbuf": "l1", "cc": "l0c"}  # the compiler's names -> the names on the chip's data sheet
LIMITS = {"ub": "UB_SIZE", "l1": "L1_SIZE", "l0c": "L0C_SIZE"}
ALIGNMENT = {"ub": 32, "l1": 32, "l0c": 512}  # bytes; the same on every chip of the table
BITS = {"bf16": 16, "index": 64}  # of types whose name does not say it

FUNCTION = re.compile(r"^  func\.func @\w+\(.*?^  \}", re.MULTILINE | re.DOTALL)
# Constants are named after their value on A2 and A3, numbered on A5: both are read where they are defined.
CONSTANT = re.compile(r"(%[\w#]+) = (?:arith\.constant (\d+) : i64|llvm\.mlir\.constant\((\d+) : i64\))")
BUFFER = re.compile(
    r"hivm\.hir\.pointer_cast\(([^)]*)\)\s*(?:\[[^\]]*\])?\s*:\s*memref<([\w?]+)[^\n]*?address_space<(\w+)>"
)
OVERFLOW = re.compile(r"error: (\w+) overflow, requires (\d+) bits while (\d+) bits avail")
PRINTED_UB = re.compile(r"Allocated UB size = (\d+) bits")


class Chip(NamedTuple):
    """Cores of a chip, and the bytes of on-chip memory that each core has."""

    cube_cores: int
    vector_cores: int
    ub: int
    l1: int
    l0c: int


def chips(ub: int, l1: int, l0c: int, cube_cores: dict[str, int]) -> Iterator[tuple[str, Chip]]:
    """Chips that differ in their number of cores only; two vector cores stand beside every cube core."""
    for names, cores in cube_cores.items():
        for name in names.split():
            yield f"Ascend{name}", Chip(cores, 2 * cores, ub << 10, l1 << 10, l0c << 10)


# From the headers that ascendnpu-ir 1.2.0 writes into its modules.
TARGETS = {
    **dict(
        chips(
            192,
            512,
            128,
            {
                "910B1 910B2 910B2C 910_9381 910_9382 910_9391 910_9392": 24,
                "910B3 910B4 910B4-1 910_9362 910_9372": 20,
            },
        )
    ),
    **dict(
        chips(
            248,
            512,
            256,
            {
                "910_950z 950PR_950z": 4,
                "950DT_950x 950DT_950y": 8,
                "910_9579 910_957b 910_957d 950PR_9579 950PR_957a 950PR_957b 950PR_957c 950PR_957d": 28,
                "950DT_9571 950DT_9572 950DT_9573 950DT_9574 950DT_9575 950DT_9576 950DT_9577 950DT_9578": 28,
                "910_9581 910_9589 910_958a 910_958b 950PR_9589 950PR_958a 950PR_958b 950PR_958c 950PR_958d": 32,
                "950DT_9581 950DT_9582 950DT_9583 950DT_9584 950DT_9585 950DT_9586 950DT_9587 950DT_9588": 32,
                "910_9599 950PR_9599 950PR_959a 950PR_959b": 36,
                "950DT_9591 950DT_9592 950DT_9595 950DT_9596 950DT_95A1 950DT_95A2": 36,
            },
        )
    ),
}


def available(module: str, target: str) -> dict[str, int]:
    """The bytes of each space: as the module's header has it, else as the table of chips."""
    header = dict(re.findall(r'dl_entry<"(\w+)", (\d+) : i32>', module[: module.find("func.func")]))
    chip = TARGETS[target]
    return {
        space: int(header[entry]) // 8 if entry in header else int(getattr(chip, space))
        for space, entry in LIMITS.items()
    }


def planned(hivm: str, log: str = "") -> dict[str, int]:
    """The bytes that a kernel uses of each space: of its functions, which run on cores of their own, the largest.

    >>> planned('''module {
    ...   func.func @kernel() {
    ...     %c64_i64 = arith.constant 64 : i64
    ...     %0 = hivm.hir.pointer_cast(%c64_i64) : memref<8x4xf32, #hivm.address_space<ub>>
    ...   }
    ... }''')
    {'ub': 192, 'l1': 0, 'l0c': 0}
    """
    use = dict.fromkeys(LIMITS, 0)
    for function in FUNCTION.finditer(hivm):
        body = function[0]
        offsets = {name: int(first or second) for name, first, second in CONSTANT.findall(body)}
        for names, shape, space in BUFFER.findall(body):
            if space in SPACES:
                key = SPACES[space]
                size = padded(bytes_of(shape), ALIGNMENT[key])
                # A buffer with several addresses is there several times, for loads ahead of their use.
                starts = [offsets[name.strip()] for name in names.split(",") if name.strip() in offsets]
                use[key] = max([use[key], *(start + size for start in starts)])
    printed = PRINTED_UB.findall(log)
    return {**use, "ub": int(printed[-1]) // 8} if printed else use


def bytes_of(shape: str) -> int:
    """The bytes of a buffer: ``"16x512xbf16"``; of one whose size is known at run time only, none."""
    *sizes, kind = shape.split("x")
    if not all(size.isdigit() for size in sizes):
        return 0
    elements = 1
    for size in sizes:
        elements *= int(size)
    return (elements * bits_of(kind) + 7) // 8


def bits_of(kind: str) -> int:
    """The bits of one element: ``"i1"``, ``"bf16"``, ``"f8E4M3FN"``."""
    found = re.match(r"[a-z]+(\d+)", kind)
    return BITS[kind] if kind in BITS else int(found[1]) if found else 32


def padded(size: int, unit: int) -> int:
    """A size as the planner rounds it."""
    return -(-size // unit) * unit


def overflow(log: str) -> dict[str, tuple[int, int]]:
    """Bytes needed and bytes there, of each space that did not suffice; of several tries the last."""
    return {SPACES.get(space, space): (int(need) // 8, int(have) // 8) for space, need, have in OVERFLOW.findall(log)}


def retries(log: str) -> tuple[str, ...]:
    """What the compiler gave up to make a kernel fit, in its own words."""
    return tuple(dict.fromkeys(note.strip() for note in re.findall(r"\[NOTE\] (.*)", log)))
