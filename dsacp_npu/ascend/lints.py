"""What compiles but costs speed or exactness, found in the compiler's own texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dsacp_npu.ascend.plan import FUNCTION

__all__ = ["EXPLANATIONS", "Lint", "lints_of"]

FULL = 0.95  # of a space: another compiler release, or one more argument, may not fit

EXPLANATIONS = {
    "scalar_loop": "writes a tile element by element on the scalar unit: int32 %, int64 arithmetic, 1-D cumsum",
    "idle_vector_core": "both vector cores of a cube core compute the same, and one of them stores it",
    "inexact_division": "// of int32 tensors is a float32 division here: wrong from 2^24 on; use >> and &, or scalars",
    "element_access": "reads or writes global memory one element at a time; rows of 512 bytes or more are better",
    "nearly_full": f"uses more than {FULL:.0%} of a space: the next compiler release may not fit it",
    "crashed": "a tool of the compiler crashed, and took the same text when it was run again",
    "retries": "the compiler gave something up to make it fit; without multi-buffering, loads wait for arithmetic",
}

SCALAR_STORE = re.compile(r"^\s*memref\.store %[\w#]+, %[\w#]+\[([^\]]*)\] : memref<[^\n]*address_space<ub>", re.M)
CONSTANT = re.compile(r"(%[\w#]+) = (?:arith|llvm\.mlir)\.constant")
RENAMED = re.compile(r"(%[\w#]+) = builtin\.unrealized_conversion_cast (%[\w#]+) : i64 to index")
# The attribute is how the A2 and A3 compiler limits a store to one core; the A5 compiler says it in its log.
ONE_CORE, ONE_CORE_LOGGED = "limit_sub_block_id0", re.compile(r"\[hivm-bind-sub-block\] revert")
INTEGER_DIVISION = re.compile(r"arith\.div[su]i [^\n]*: tensor<")
TENSOR = r"(%\w+) : tensor<[\dx?]*x(\w+)>"
CAST = re.compile(rf"(%\w+) = hfusion\.cast [^\n]*ins\({TENSOR}\) outs\({TENSOR}\)")
DIVISION = re.compile(r"(%\w+) = linalg\.elemwise_binary \{fun = #linalg\.binary_fn<div\w*>\} ins\((%\w+), (%\w+) :")
ELEMENT = re.compile(r"memref\.reinterpret_cast .* sizes: \[1(?:, 1)*\],")


class Lint(NamedTuple):
    """A finding: its name, how often it is there, and what it means."""

    name: str
    times: int
    text: str


def lints_of(
    linalg: str,
    hfusion: str,
    hivm: str,
    log: str,
    planned: Mapping[str, int],
    available: Mapping[str, int],
    retries: int,
    crashes: int,
) -> tuple[Lint, ...]:
    """Every finding in the texts of one compilation."""
    counts = {
        "scalar_loop": scalar_loops(hivm),
        "idle_vector_core": int(ONE_CORE in hivm or bool(ONE_CORE_LOGGED.search(log))),
        "inexact_division": inexact_divisions(linalg, hfusion),
        "element_access": element_accesses(linalg),
        "nearly_full": sum(planned[space] > FULL * available[space] for space in planned),
        "crashed": crashes,
        "retries": retries,
    }
    return tuple(Lint(name, times, EXPLANATIONS[name]) for name, times in counts.items() if times)


def scalar_loops(hivm: str) -> int:
    """Stores into a tile at an index that runs; at a fixed index one scalar is stored, and nothing is repeated."""
    return sum(1 for indices, constants in scalar_stores(hivm) if indices - constants)


def scalar_stores(hivm: str) -> Iterator[tuple[set[str], set[str]]]:
    """The indices of every store of a scalar into the unified buffer, and the constants around it."""
    for function in FUNCTION.finditer(hivm):
        constants = set(CONSTANT.findall(function[0]))
        constants |= {name for name, origin in RENAMED.findall(function[0]) if origin in constants}
        for indices in SCALAR_STORE.findall(function[0]):
            yield {word.strip() for word in indices.split(",") if word.strip()}, constants


def inexact_divisions(linalg: str, hfusion: str) -> int:
    """Integer divisions of tensors that go through float32: cast, division and cast back.

    >>> inexact_divisions("%2 = arith.divsi %0, %1 : tensor<8xi32>", '''
    ... %3 = hfusion.cast {} ins(%0 : tensor<8xi32>) outs(%2 : tensor<8xf32>) -> tensor<8xf32>
    ... %4 = linalg.elemwise_binary {fun = #linalg.binary_fn<div>} ins(%3, %cst : tensor<8xf32>, f32) outs(%2)
    ... %5 = hfusion.cast {} ins(%4 : tensor<8xf32>) outs(%1 : tensor<8xi32>) -> tensor<8xi32>
    ... ''')
    1
    """
    if not INTEGER_DIVISION.search(linalg):
        return 0
    casts = CAST.findall(hfusion)
    integers = {result for result, _, source, _, target in casts if source == "i32" and target == "f32"}
    truncated = {operand for _, operand, source, _, target in casts if source == "f32" and target == "i32"}
    return sum(
        result in truncated and bool({left, right} & integers) for result, left, right in DIVISION.findall(hfusion)
    )


def element_accesses(linalg: str) -> int:
    """Innermost loops of the adapter that move one element of global memory a turn."""
    found, elements = 0, [False]
    for line in linalg.splitlines():
        if line.rstrip().endswith("{") and "scf.for" in line:
            elements.append(False)
        elif "ExtractedLoadOrStore" in line and len(elements) > 1:
            found += elements.pop()
        elif ELEMENT.search(line):
            elements[-1] = True
    return found
