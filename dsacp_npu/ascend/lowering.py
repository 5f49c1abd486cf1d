"""A kernel on its way to the chip: Triton's dialect, linalg after the adapter, HFusion, and the planned HIVM."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsacp_npu.ascend import toolchain
from dsacp_ref.spec import contract_error

__all__ = [
    "A5",
    "Compiled",
    "LoweringError",
    "compiled",
    "hfusion_of",
    "is_a5",
    "linalg_of",
    "lowered",
    "mix_of",
    "ttir_of",
]

A5 = ("Ascend950", "Ascend910_95")  # how the names of chips of this generation begin
# The pass before which HFusion is complete, and how the compiler announces a module that it prints.
HFUSION_END = "convert-hfusion-to-hivm"
PRINTED = re.compile(r"^// -----// IR Dump Before [^\n]*\n(.*?^\}\n)", re.MULTILINE | re.DOTALL)
# Some kernels make the adapter crash in a few of a hundred runs on the very same text, and take it in the others.
TRIES = 4
MIX = re.compile(r',? mix_mode\s*=\s*"([^"]+)"')
MIXES = {"aiv": "vector", "mix": "mixed", "aic": "cube"}


class LoweringError(RuntimeError):
    """A step that did not take the kernel.

    Fields:
        stage: str, ``"front end"``, ``"adapter"`` or ``"compiler"``.
        text: str, what that step wrote, shortened to what says why.
    """

    def __init__(self, stage: str, text: str) -> None:
        """Both fields are in the message."""
        super().__init__(f"{stage}: {text}")
        self.stage, self.text = stage, text


class Compiled(NamedTuple):
    """What the compiler made of a kernel.

    Fields:
        ok: bool, whether it came as far as a device binary would be written.
        hfusion: str, the module after HFusion; empty if it did not come so far.
        hivm: str, the module with planned memory; empty if it did not come so far.
        log: str, everything else that it wrote.
        crashes: int, how often it crashed before it came to this result.
    """

    ok: bool
    hfusion: str
    hivm: str
    log: str
    crashes: int


def is_a5(target: str) -> bool:
    """Whether a target is of the generation that has a compiler of its own."""
    return target.startswith(A5)


def lowered(kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], target: str) -> str:
    """The linalg text of a kernel, from its source."""
    return linalg_of(ttir_of(kernel, signature, constexprs, target), target)


def ttir_of(kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], target: str) -> str:
    """The kernel in Triton's dialect, after Triton's own passes; LoweringError where the front end refuses it."""
    ascend = toolchain.triton_ascend()
    check_kernel(kernel, signature, constexprs)
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource

    backend, options, metadata = backend_for(ascend, target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=kernel, signature=dict(signature), constants=dict(constexprs))
    try:
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        return str(ascend.make_ttir(module, metadata, options))
    except Exception as error:  # the front end raises whatever the kernel's own expressions raise
        raise LoweringError("front end", f"{type(error).__name__}: {error}") from error


def check_kernel(kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any]) -> None:
    """Refuse what is no kernel, and arguments that do not name every parameter once."""
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):
        hint = "of an autotuned kernel give .fn" if hasattr(kernel, "fn") else ""
        raise contract_error("kernel", "be a function under triton.jit", type(kernel).__name__, hint)
    given = sorted([*signature, *constexprs])
    if given != sorted(kernel.arg_names):
        rule = f"name every argument of the kernel once: {', '.join(kernel.arg_names)}"
        raise contract_error("signature and constexprs", rule, ", ".join(given))


def backend_for(ascend: Any, target: str) -> tuple[Any, Any, dict[str, Any]]:
    """The backend for a target, its options, and the metadata that its functions read."""
    from triton.backends.compiler import GPUTarget

    chip = GPUTarget("npu", target, 0)
    backend = ascend.AscendBackend(chip)
    options = backend.parse_options({"compile_on_910_95": is_a5(target)})
    return backend, options, {**vars(options), "target": chip}


def linalg_of(ttir: str, target: str) -> str:
    """The text after the adapter; LoweringError where it refuses the kernel."""
    return adapted(ttir, target)[0]


def adapted(ttir: str, target: str) -> tuple[str, int]:
    """The text after the adapter, and how often the adapter crashed before it wrote that."""
    ascend = toolchain.triton_ascend()
    toolchain.adapter()
    _, options, metadata = backend_for(ascend, target)
    for crashes in range(TRIES):
        try:
            return ascend.ttir_to_linalg(ttir, metadata, options, named_ops=True), crashes
        except subprocess.CalledProcessError as error:
            if error.returncode >= 0 or crashes == TRIES - 1:
                text = reason(error.stderr.decode(errors="replace"), error.returncode)
                raise LoweringError("adapter", text) from error
    raise AssertionError("the last try returns or raises")


def mix_of(linalg: str) -> str:
    """Which cores a kernel is for: ``"vector"``, ``"cube"``, or ``"mixed"`` for both."""
    found = MIX.search(linalg)
    return MIXES.get(found[1], found[1]) if found else ""


def hfusion_of(linalg: str, target: str) -> str:
    """The module after HFusion; LoweringError where the compiler does not come so far."""
    done = compiled(linalg, target)
    if not done.hfusion:
        raise LoweringError("compiler", reason(done.log))
    return done.hfusion


def compiled(linalg: str, target: str, *, multibuffer: bool = True) -> Compiled:
    """Compile down to the last step, which belongs to CANN; what crashes is tried again.

    Args:
        linalg: what `linalg_of` returned.
        target: a chip by its full name.
        multibuffer: whether loads and stores are buffered twice, as on a device by default.
    """
    crashes = 0
    done, status = compiled_once(linalg, target, multibuffer)
    while status < 0 and crashes < TRIES - 1:
        crashes += 1
        done, status = compiled_once(linalg, target, multibuffer)
    return done._replace(crashes=crashes)


def compiled_once(linalg: str, target: str, multibuffer: bool) -> tuple[Compiled, int]:
    """What one run of the compiler made, and its exit status, which is negative after a crash."""
    a5 = is_a5(target)
    with tempfile.TemporaryDirectory(prefix="dsacp-ascend-") as name:
        directory = Path(name)
        source, kept = directory / "kernel.mlir", directory / "kept"
        # The backend takes this attribute out as well before it calls the compiler.
        source.write_text(MIX.sub("", linalg))
        kept.mkdir()
        toolchain.write_stand_ins(directory)
        command: list[str | Path] = [
            toolchain.compiler(a5=a5),
            source,
            f"--target={target}",
            f"--enable-auto-multi-buffer={multibuffer}",
            "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true",
            "--enable-print-memory-allocated-size" if a5 else "--enable-auto-bind-sub-block=True",
            f"--mlir-print-ir-before={HFUSION_END}",
            "--mlir-print-ir-module-scope",
            "--mlir-disable-threading",
            f"--save-temps={kept}",
            "-o",
            directory / "kernel.o",
        ]
        done = toolchain.ran(command, first_on_path=directory)
        # Every retry prints the module again; the first is the one that nothing was changed for.
        printed = PRINTED.findall(done.errors)
        log = (done.output + PRINTED.sub("", done.errors)).replace(name, "")
        files = [path.read_text() for path in kept.rglob("*.mlir")]
    hivm = max(files, key=len, default="")
    return Compiled(done.status == 0 and bool(hivm), printed[0] if printed else "", hivm, log, 0), done.status


def reason(log: str, status: int = 1) -> str:
    """The lines of a log that say why a tool failed; of an assertion not the stack."""
    lines = [line.strip() for line in log.splitlines() if not re.match(r"\s*#\d+ 0x", line)]
    telling = [line for line in lines if re.search(r"error|assertion|signal|abort", line, re.IGNORECASE)]
    if not telling and status < 0:
        return f"crashed by signal {-status}, without an assertion or an error"
    return "\n".join(dict.fromkeys(telling)) or "\n".join(lines)[-1000:] or f"failed without a word, status {status}"
