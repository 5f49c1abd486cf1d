"""A kernel executed on the CPU as the Ascend compiler has it: after the adapter, or after HFusion.

The interpreter shows that a kernel's Python is right. These two show that it still is once pointers and masks have been
analysed, and once integers, comparisons and bf16 have been brought into the chip's terms. MLIR 19 lowers the text,
LLVM compiles it, and the programs of the grid run one after another: a race between programs is not seen, and what the
last step of the compiler does is not either. Needs triton-ascend, ascendnpu-ir, llvmlite and mlir-19-tools.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsacp_npu._tensors import torch
from dsacp_npu.ascend import guard, toolchain
from dsacp_npu.ascend.cpu_forms import cpu_form
from dsacp_npu.ascend.lowering import hfusion_of, lowered
from dsacp_ref.spec import UnsupportedError, check_choice, contract_error

__all__ = ["LEVELS", "TARGET", "LoweredFunction", "lowered_function"]

LEVELS = ("adapter", "hfusion")
TARGET = "Ascend910B3"
SCALARS: dict[str, Any] = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
}
DTYPES = {
    "i1": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
OPTIMISATION = 1  # of LLVM; level 3 takes up to 20 s for a kernel that runs no faster

ENTRY = re.compile(r"func\.func @(\w+)\(")
STRUCTURE = ["--linalg-generalize-named-ops", "--convert-elementwise-to-linalg", "--linalg-fuse-elementwise-ops"]
# Buffers are never freed: the passes that would do so free aliases as well. Hence a process of its own for every run.
BUFFERS = [
    "--allow-unregistered-dialect",
    "--one-shot-bufferize=bufferize-function-boundaries=true function-boundary-type-conversion=identity-layout-map "
    "unknown-type-conversion=identity-layout-map allow-return-allocs-from-loops=true",
    "--convert-bufferization-to-memref",
]
LOOPS = [
    "--allow-unregistered-dialect",
    "--llvm-request-c-wrappers",
    "--convert-linalg-to-loops",
    "--arith-expand=include-bf16=true",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-vector-to-llvm",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--finalize-memref-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-func-to-llvm",
    "--reconcile-unrealized-casts",
]


def lowered_function(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    level: str = "adapter",
    target: str = TARGET,
) -> LoweredFunction:
    """A kernel, lowered to a level and compiled for this CPU.

    Args:
        kernel: a function under ``triton.jit``.
        signature: every argument that is not a constexpr, in order, with its type: ``"*bf16"``, ``"i32"``, ``"fp32"``.
        constexprs: every other argument with its value.
        level: ``"adapter"``, or ``"hfusion"`` for what the compiler proper has before it goes to HIVM.
        target: a chip by its full name.

    Returns:
        LoweredFunction: to be called with the arguments and the size of the grid.

    Raises:
        LoweringError: the adapter or the compiler refuses the kernel.
        UnsupportedError: an operation that has no CPU form, by its name; or mlir-19-tools are missing.
        ImportError: a package is missing.
    """
    check_choice("level", level, LEVELS)
    text = lowered(kernel, signature, constexprs, target)
    if level == "hfusion":
        text = hfusion_of(text, target)
    return LoweredFunction(text, dict(signature), level)


class LoweredFunction:
    """A kernel that runs on CPU tensors, as it is at one level of lowering.

    Fields:
        name: str, the kernel's name.
        level: str, ``"adapter"`` or ``"hfusion"``.
        signature: dict[str, str], the types of its arguments, in order.
        text: str, the module at that level.
    """

    def __init__(self, text: str, signature: dict[str, str], level: str) -> None:
        """Lower the text to machine code."""
        found = ENTRY.search(text)
        if found is None:
            raise UnsupportedError("the module has no function")
        self.name, self.level, self.signature, self.text = found[1], level, signature, text
        # After HFusion one argument comes in front: where cores wait for each other. Nobody waits here.
        self.leading = [ctypes.c_int64(0)] if "ffts_base_address" in text else []
        self.engine, self.address = machine_code(self.name, llvm_of(text))

    def __call__(self, arguments: Sequence[Any], programs: int, *, guarded: bool = True) -> None:
        """Run every program of the grid on these arguments, in place.

        Args:
            arguments: in the order of the signature: contiguous CPU tensors, ints, floats.
            programs: the size of the grid.
            guarded: run in a process of its own, with the arguments in front of memory that nobody may touch. Without,
                an access out of range takes this process down or changes what it should not; and memory is lost.

        Raises:
            MemoryFaultError: a program read or wrote outside of its arguments.
        """
        self.check(arguments)
        if not guarded:
            self.launch([tensor_or_scalar(a) for a in arguments], programs)
            return
        for tries in range(guard.TRIES):
            try:
                self.launch_guarded(arguments, programs)
                return
            except guard.StuckError:  # nothing was written back
                if tries == guard.TRIES - 1:
                    raise

    def launch_guarded(self, arguments: Sequence[Any], programs: int) -> None:
        """Run in a child, on copies in front of forbidden pages, and take over what it wrote."""
        with guard.Copies([a for a in arguments if isinstance(a, torch.Tensor)]) as copies:
            guard.in_child(lambda: self.launch(placed(arguments, copies.addresses), programs), self.name)
            copies.write_back(self.name)

    def check(self, arguments: Sequence[Any]) -> None:
        """Refuse arguments of another number, type or layout than the signature's."""
        if len(arguments) != len(self.signature):
            raise contract_error("arguments", f"be {len(self.signature)}, as in the signature", len(arguments))
        for (name, kind), value in zip(self.signature.items(), arguments, strict=True):
            if not kind.startswith("*"):
                if isinstance(value, torch.Tensor) or kind not in SCALARS:
                    raise contract_error(name, f"be a number of type {kind}", type(value).__name__)
                continue
            if not isinstance(value, torch.Tensor) or value.dtype != DTYPES.get(kind[1:]):
                got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
                raise contract_error(name, f"be a tensor of {kind[1:]}", got)
            if not value.is_contiguous() or value.device.type != "cpu":
                raise contract_error(name, "be contiguous, on the CPU", f"{tuple(value.stride())} on {value.device}")

    def launch(self, values: Sequence[Any], programs: int) -> None:
        """Call the machine code once for every program."""
        empty = (ctypes.c_int64 * 8)()  # for locks and workspace, which nothing uses here
        spare = (ctypes.addressof(empty), 8 * 8)
        words = [SCALARS.get(kind) for kind in self.signature.values()]
        held = [vector(*spare), vector(*spare)]
        for value, word in zip(values, words, strict=True):
            held.append(vector(*value) if word is None else word(value))
        passed = [*self.leading, *(ctypes.pointer(h) if isinstance(h, Vector) else h for h in held)]
        function = ctypes.CFUNCTYPE(None, *map(type, passed), *[ctypes.c_int32] * 6)(self.address)
        for program in range(programs):
            function(*passed, programs, 1, 1, program, 0, 0)


class Vector(ctypes.Structure):
    """How MLIR passes a vector: its memory twice, an offset, the number of elements, and the step between them."""

    _fields_ = (
        ("allocated", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


def vector(address: int, count: int) -> Vector:
    """Elements in a row."""
    return Vector(address, address, 0, count, 1)


def tensor_or_scalar(value: Any) -> Any:
    """A tensor as its address and number of elements."""
    return (value.data_ptr(), value.numel()) if isinstance(value, torch.Tensor) else value


def placed(arguments: Sequence[Any], addresses: Sequence[int]) -> list[Any]:
    """The arguments with each tensor at the address of its copy."""
    places = iter(addresses)
    return [(next(places), a.numel()) if isinstance(a, torch.Tensor) else a for a in arguments]


def llvm_of(text: str) -> str:
    """The module in LLVM's language."""
    with tempfile.TemporaryDirectory(prefix="dsacp-execute-") as name:
        work = Path(name) / "module.mlir"
        upstream = [toolchain.mlir("mlir-opt")]
        steps: list[tuple[Callable[[str], str], list[Any]]] = [
            (lambda module: cpu_form(plain(module)), [toolchain.optimiser(), *STRUCTURE]),
            (plain, [*upstream, *BUFFERS]),
            (with_loops_for_copies, [*upstream, *LOOPS]),
            (str, [toolchain.mlir("mlir-translate"), "--mlir-to-llvmir"]),
        ]
        for prepare, command in steps:
            work.write_text(prepare(text))
            done = toolchain.ran([*command, work])
            if done.status:
                error = next((line for line in done.errors.splitlines() if "error:" in line), done.errors[:400])
                raise UnsupportedError(
                    f"{Path(command[0]).name} does not take the module: {error.split('error: ')[-1]}"
                )
            text = done.output
    return text


def plain(text: str) -> str:
    """The module without what only the Ascend compiler reads: hints, and attributes of module and arguments."""
    text = re.sub(r"^module attributes \{.*\} \{$", "module {", text, flags=re.M)
    text = re.sub(r"^( *func\.func .*?)\) attributes \{.*\} \{$", r"\1) {", text, flags=re.M)
    text = re.sub(r"(%arg\d+: (?:memref<[^>]*>|\w+)) \{[^{}]*\}", r"\1", text)
    text = re.sub(r"^ *annotation\.mark .*\n", "", text, flags=re.M)
    text = re.sub(r"(, )?\bh(?:fusion|ivm|acc)\.\w+ = #h(?:fusion|ivm|acc)\.\w+<[^<>]*>", "", text)
    return re.sub(r'(, )?input_precison = "[^"]*"', "", text).replace("{, ", "{")


def with_loops_for_copies(text: str) -> str:
    """Copies as operations that become loops; a strided `memref.copy` calls a library that is not there."""
    copy = re.compile(r"memref\.copy (%[\w#]+), (%[\w#]+) : (.*?) to (memref<.*)$", re.M)
    return copy.sub(r"linalg.copy ins(\1 : \3) outs(\2 : \4)", text)


def machine_code(name: str, text: str) -> tuple[Any, int]:
    """An engine that holds the compiled module, and the address of the kernel in it."""
    llvm = toolchain.llvm()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        opt=OPTIMISATION, cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten()
    )
    options = llvm.create_pipeline_tuning_options(speed_level=OPTIMISATION)
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        module, llvm.create_pass_builder(machine, options)
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine, engine.get_function_address(f"_mlir_ciface_{name}")
