"""Every kernel, every case and every compilation, found by where they lie."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import dsacp_npu.kernels
from dsacp_npu.kernels._records import Compilation
from tests.kernels.case import Case, signature_of

TARGETS = {"Ascend910B3": "a2", "Ascend910_9391": "a2", "Ascend950PR_9579": "a5"}  # a chip of A2, A3 and A5
INSTALL = "no triton-ascend: make ascend, then .venv-ascend/bin/python -m pytest tests/kernels"
HERE = Path(__file__).parent
KERNELS = Path(dsacp_npu.kernels.__file__).parent


def mode() -> str:
    """What kernels are in this process: ``"interpreted"``, ``"compiled"``, run on ``"cuda"``, or ``"missing"``."""
    if importlib.util.find_spec("triton") is None:
        return "missing"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted"
    if importlib.util.find_spec("triton.backends.ascend"):
        return "compiled"
    return "cuda" if torch.cuda.is_available() else "missing"


def kernel_modules() -> dict[str, ModuleType]:
    """The modules of kernels, by their concept."""
    names = sorted(path.stem for path in KERNELS.glob("*.py") if not path.stem.startswith("_"))
    return {name: importlib.import_module(f"dsacp_npu.kernels.{name}") for name in names}


def kernels() -> set[str]:
    """The names of all kernels: jitted functions of these modules that are called so."""
    found = set()
    for module in kernel_modules().values():
        for name, value in vars(module).items():
            if name.endswith("_kernel") and getattr(value, "fn", None) and value.fn.__module__ == module.__name__:
                found.add(name)
    return found


def cases() -> dict[str, Callable[[], Case]]:
    """What builds each case, by the concept and the name of the case."""
    found = {}
    for path in sorted(HERE.glob("*_cases.py")):
        module = importlib.import_module(f"tests.kernels.{path.stem}")
        concept = path.stem.removesuffix("_cases")
        found.update({f"{concept}/{name}": build for name, build in module.CASES.items()})
    return found


def gpu_cases() -> dict[str, Callable[[], Case]]:
    """Cases of kernels that no NPU can run: interpreted and run on a GPU, not lowered."""
    found = {}
    for path in sorted(HERE.glob("*_cases.py")):
        module = importlib.import_module(f"tests.kernels.{path.stem}")
        concept = path.stem.removesuffix("_cases")
        found.update({f"{concept}/{name}": build for name, build in getattr(module, "GPU_CASES", {}).items()})
    return found


def compilations(family: str) -> list[Compilation]:
    """Every way in which a launch compiles a kernel for a family of targets; modules of helpers have none."""
    modules = kernel_modules().values()
    return [made for module in modules if hasattr(module, "compilations") for made in module.compilations(family)]


def interpret(case: Case) -> None:
    """Run a case in the interpreter, and check what it computed."""
    case.kernel[(case.programs,)](**case.arguments, **case.constexprs)
    case.check()


def execute(case: Case, level: str) -> None:
    """Run a case on the CPU as it is at this level of lowering, and check what it computed."""
    signature, constexprs = signature_of(case), dict(case.constexprs)
    order = [name for name in case.kernel.arg_names if name in signature]
    function = lowered(case.kernel, tuple((name, signature[name]) for name in order), tuple(constexprs.items()), level)
    function([case.arguments[name] for name in order], case.programs)
    case.check()


@cache
def lowered(kernel: Any, signature: tuple[tuple[str, str], ...], constexprs: tuple[tuple[str, Any], ...], level: str):
    """The lowered kernel, made once a process: cases that differ only in sizes share it."""
    from dsacp_npu.ascend.execute import lowered_function

    return lowered_function(kernel, dict(signature), dict(constexprs), level=level)
