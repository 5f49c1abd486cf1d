"""Whether a Triton kernel compiles for an Ascend chip and fits it, found out without the chip."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dsacp_npu.ascend import lowering, toolchain
from dsacp_npu.ascend.lints import Lint, lints_of
from dsacp_npu.ascend.plan import TARGETS, available, overflow, planned, retries
from dsacp_ref.spec import check_bool, check_choice

__all__ = ["CompileReport", "Texts", "compile_check"]


class Texts(NamedTuple):
    """A kernel at every level, as far as it came; an empty text was not reached.

    Fields:
        ttir: str, Triton's dialect.
        linalg: str, after the adapter.
        hfusion: str, after the vendor's fusion and normalisation.
        hivm: str, with planned memory, split over cores, and synchronised.
        log: str, what the compiler wrote besides.
    """

    ttir: str = ""
    linalg: str = ""
    hfusion: str = ""
    hivm: str = ""
    log: str = ""


@dataclass(frozen=True)
class CompileReport:
    """What compiling one kernel for one chip found.

    Fields:
        kernel: str, the kernel's name.
        target: str, the chip.
        ok: bool, whether it compiles and fits.
        stage: str, ``"done"``, or the step that failed: ``"front end"`` (Triton's), ``"adapter"`` (to linalg),
            ``"compiler"`` (fusion, planning of memory, splitting).
        mix: str, ``"vector"``, ``"cube"`` or ``"mixed"``; empty where that is not known yet.
        planned: bytes that it uses of ``"ub"``, ``"l1"`` and ``"l0c"``, of one core; empty unless ok.
        available: bytes that a core of the chip has of each.
        overflow: of each space that did not suffice, the bytes needed (in the last retry) and the bytes there.
        retries: what the compiler gave up to make it fit, in its words.
        lints: findings that do not fail it.
        error: str, why it failed; empty if ok.
        seconds: float, how long it took.
        versions: of the packages that did it.
        texts: the kernel at every level.
    """

    kernel: str
    target: str
    ok: bool
    stage: str
    mix: str
    planned: Mapping[str, int]
    available: Mapping[str, int]
    overflow: Mapping[str, tuple[int, int]]
    retries: tuple[str, ...]
    lints: tuple[Lint, ...]
    error: str
    seconds: float
    versions: Mapping[str, str]
    texts: Texts = field(repr=False)


def compile_check(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    target: str = "Ascend910B3",
    multibuffer: bool = True,
) -> CompileReport:
    """Compile a kernel down to the step that needs CANN, and tell what the compiler planned.

    Memory, cores and synchronisation are planned by the compiler that a device uses, though perhaps in another version.
    Not checked: the last step to a binary, and speed. Arguments count as not divisible by anything, so that a launch
    whose arguments are may be planned a little better.

    Args:
        kernel: a function under ``triton.jit``; of an autotuned one its ``.fn``.
        signature: every argument that is not a constexpr, with its type: ``{"x": "*bf16", "n": "i32"}``.
        constexprs: every other argument with its value.
        target: a chip by its full name, one of `TARGETS`.
        multibuffer: whether loads and stores are buffered twice, which is a device's default.

    Returns:
        CompileReport: a kernel that is refused is a report too, with ``ok`` False.

    Raises:
        ContractError: no such target, no kernel, or arguments that the kernel does not have.
        ImportError: triton-ascend or ascendnpu-ir is missing; the text has the command that gets it.
        UnsupportedError: the process interprets kernels (``TRITON_INTERPRET=1``).
    """
    check_choice("target", target, tuple(TARGETS))
    check_bool("multibuffer", multibuffer)
    toolchain.adapter()  # what is missing is told before any work
    toolchain.compiler(a5=lowering.is_a5(target))
    lowering.check_kernel(kernel, signature, constexprs)
    start = time.perf_counter()
    texts, stage, error, crashes = Texts(), "done", "", 0
    try:
        texts = texts._replace(ttir=lowering.ttir_of(kernel, signature, constexprs, target))
        linalg, crashes = lowering.adapted(texts.ttir, target)
        texts = texts._replace(linalg=linalg)
        done = lowering.compiled(texts.linalg, target, multibuffer=multibuffer)
        texts = texts._replace(hfusion=done.hfusion, hivm=done.hivm, log=done.log)
        crashes += done.crashes
        if not done.ok:
            stage, error = "compiler", lowering.reason(done.log)
    except lowering.LoweringError as refusal:
        stage, error = refusal.stage, refusal.text
    return report_of(kernel.__name__, target, texts, stage, error, crashes, time.perf_counter() - start)


def report_of(
    kernel: str, target: str, texts: Texts, stage: str, error: str, crashes: int, seconds: float
) -> CompileReport:
    """The report that the texts of a compilation make."""
    ok = stage == "done"
    notes = retries(texts.log)
    use = planned(texts.hivm, texts.log) if ok else {}
    have = available(texts.hivm or texts.hfusion, target)
    return CompileReport(
        kernel=kernel,
        target=target,
        ok=ok,
        stage=stage,
        mix=lowering.mix_of(texts.linalg),
        planned=use,
        available=have,
        overflow={} if ok else overflow(texts.log),
        retries=notes,
        lints=lints_of(texts.linalg, texts.hfusion, texts.hivm, texts.log, use, have, len(notes), crashes if ok else 0),
        error=error,
        seconds=seconds,
        versions=toolchain.versions(),
        texts=texts,
    )
