"""What is read from the compiler's texts, on short ones: no compiler is needed."""

from __future__ import annotations

import pytest

from dsacp_npu.ascend.lints import element_accesses, inexact_divisions, scalar_loops
from dsacp_npu.ascend.lowering import mix_of, reason
from dsacp_npu.ascend.plan import TARGETS, available, bytes_of, overflow, planned, retries

HEADER = """module attributes {dlti.target_system_spec = #dlti.target_system_spec<"NPU" : #hacc.target_device_spec<\
#dlti.dl_entry<"UB_SIZE", 1572864 : i32>, #dlti.dl_entry<"L1_SIZE", 4194304 : i32>>>} {
"""


def buffers(*lines: str, name: str = "kernel") -> str:
    """A function with these lines."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"  func.func @{name}(%arg0: i64) attributes {{}} {{\n{body}\n    return\n  }}\n"


def test_planned_is_the_end_of_the_last_buffer_of_each_space() -> None:
    text = buffers(
        "%c0_i64 = arith.constant 0 : i64",
        "%c1024_i64 = arith.constant 1024 : i64",
        "%0 = hivm.hir.pointer_cast(%c0_i64) : memref<16x16xf32, #hivm.address_space<ub>>",
        "%1 = hivm.hir.pointer_cast(%c1024_i64) : memref<16xbf16, strided<[1]>, #hivm.address_space<ub>>",
        "%2 = hivm.hir.pointer_cast(%c0_i64) : memref<4x1x16x16xbf16, #hivm.address_space<cbuf>>",
        "%3 = hivm.hir.pointer_cast(%c1024_i64) : memref<8xf32, #hivm.address_space<cc>>",
    )
    assert planned(text) == {"ub": 1056, "l1": 2048, "l0c": 1024 + 512}


def test_planned_takes_every_address_of_a_buffer_that_is_there_twice() -> None:
    text = buffers(
        "%1 = llvm.mlir.constant(0 : i64) : i64",
        "%2 = llvm.mlir.constant(4096 : i64) : i64",
        "%3 = hivm.hir.pointer_cast(%1, %2) : memref<32xf32, #hivm.address_space<ub>>",
    )
    assert planned(text)["ub"] == 4096 + 128


def test_planned_is_the_largest_of_functions_on_cores_of_their_own() -> None:
    cast = "%0 = hivm.hir.pointer_cast(%c0_i64) : memref<{}xi8, #hivm.address_space<ub>>"
    texts = [
        buffers("%c0_i64 = arith.constant 0 : i64", cast.format(size), name=f"part_{size}") for size in (64, 512, 32)
    ]
    assert planned("".join(texts))["ub"] == 512


def test_the_compilers_own_word_on_the_unified_buffer_comes_first() -> None:
    assert planned("", "[AscendNPU IR] Allocated UB size = 8448 bits\n")["ub"] == 1056


@pytest.mark.parametrize(
    ("shape", "size"),
    [("8xf32", 32), ("3x5xbf16", 30), ("9xi1", 2), ("4xi64", 32), ("16xf8E4M3FN", 16), ("?x4xf32", 0), ("f32", 4)],
)
def test_bytes_of_a_buffer(shape: str, size: int) -> None:
    assert bytes_of(shape) == size


def test_available_is_what_the_header_says_and_the_table_where_it_says_nothing() -> None:
    chip = TARGETS["Ascend950PR_9579"]
    assert available(HEADER + buffers(), "Ascend950PR_9579") == {"ub": 196608, "l1": 524288, "l0c": chip.l0c}
    assert available("", "Ascend950PR_9579") == {"ub": chip.ub, "l1": chip.l1, "l0c": chip.l0c}


def test_every_chip_has_two_vector_cores_beside_a_cube_core() -> None:
    assert all(chip.vector_cores == 2 * chip.cube_cores > 0 for chip in TARGETS.values())


def test_overflow_is_that_of_the_last_try_in_bytes() -> None:
    log = """
error: ub overflow, requires 8000 bits while 4000 bits available!
loc("/kernel.mlir":2:3): error: ub overflow, requires 4800 bits while 4000 bits available! (possible reason: ...)
loc("/kernel.mlir":2:3): error: cbuf overflow, requires 160 bits while 80 bits available!
"""
    assert overflow(log) == {"ub": (600, 500), "l1": (20, 10)}


def test_retries_are_told_once() -> None:
    note = (
        "[NOTE] Ub overflow detected; automatically set enable-auto-multi-buffer to false and retrying compilation.\n"
    )
    assert retries(note + note) == (note.removeprefix("[NOTE] ").strip(),)


def test_a_store_at_an_index_that_runs_is_a_scalar_loop() -> None:
    store = "memref.store %9, %1[{}] : memref<128xi32, #hivm.address_space<ub>>"
    fixed = ["%c0 = arith.constant 0 : index", store.format("%c0")]
    renamed = [
        "%2 = llvm.mlir.constant(0 : index) : i64",
        "%3 = builtin.unrealized_conversion_cast %2 : i64 to index",
        store.format("%3"),
    ]
    assert scalar_loops(buffers(*fixed)) == scalar_loops(buffers(*renamed)) == 0
    assert scalar_loops(buffers(*fixed, store.format("%arg10"), store.format("%c0, %arg10"))) == 2


def test_a_loop_over_elements_is_told_from_one_over_rows() -> None:
    loop = """
    %0 = scf.for %arg1 = %c0 to %c8 step %c1 iter_args(%arg2 = %3) -> (tensor<8xi32>) {{
      %view = memref.reinterpret_cast %arg4 to offset: [%1], sizes: [{}], strides: [1] : memref<?xi32> to memref<...>
    }} {{ExtractedLoadOrStore}}
"""
    assert element_accesses(loop.format("1") + loop.format("1, 512") + loop.format("1, 1")) == 2


def test_a_division_that_was_of_floats_is_not_inexact() -> None:
    texts = [
        "%3 = hfusion.cast {} ins(%0 : tensor<8xi32>) outs(%2 : tensor<8xf32>) -> tensor<8xf32>",
        "%4 = linalg.elemwise_binary {fun = #linalg.binary_fn<div>} ins(%3, %9 : tensor<8xf32>, f32) outs(%2)",
    ]
    assert inexact_divisions("%1 = arith.divsi %0, %8 : tensor<8xi32>", "\n".join(texts)) == 0
    assert inexact_divisions("%1 = arith.divf %0, %8 : tensor<8xf32>", "\n".join(texts)) == 0


def test_a_failure_is_told_without_the_stack() -> None:
    log = "tool: file.cpp:3: Assertion `x' failed.\n#5 0x00007f abort ./stdlib\nPLEASE submit a bug report\n"
    assert reason(log) == "tool: file.cpp:3: Assertion `x' failed."
    assert reason("", -11) == "crashed by signal 11, without an assertion or an error"


@pytest.mark.parametrize(("word", "mix"), [("aiv", "vector"), ("aic", "cube"), ("mix", "mixed")])
def test_the_cores_that_a_kernel_is_for(word: str, mix: str) -> None:
    assert mix_of(f'func.func @k() attributes {{a = 1, mix_mode = "{word}", b = 2}}') == mix
    assert mix_of("func.func @k()") == ""
