"""The public parts of the Ascend compiler, each found where its package puts it, or named with the command to get it.

Needed are triton-ascend (front end and adapter) and ascendnpu-ir (everything down to the last step). The last step,
`hivmc`, is part of CANN and not public; a stand-in that does nothing takes its place, because lowering, planning of
on-chip memory and splitting over cores all come before it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from dsacp_ref.spec import UnsupportedError

__all__ = [
    "TIMEOUT",
    "Ran",
    "adapter",
    "check_mode",
    "check_toolchain",
    "compiler",
    "llvm",
    "mlir",
    "optimiser",
    "ran",
    "triton_ascend",
    "versions",
    "write_stand_ins",
]

TRITON_VERSION = "3.2.0"  # of triton-ascend: the newest on PyPI, and what the lowering here was written for
INSTALL = "pip install 'dsacp[ascend]' in an environment of its own (from a checkout: make ascend)"
PACKAGES = ("triton-ascend", "ascendnpu-ir")
TIMEOUT = 300  # seconds for one tool; the slowest kernel seen took 5


class Ran(NamedTuple):
    """A tool's exit status and what it wrote."""

    status: int
    output: str
    errors: str


def check_mode() -> None:
    """Refuse a process in which kernels are interpreted: there is nothing to compile in it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UnsupportedError(
            "under TRITON_INTERPRET=1 triton makes interpreted functions, which no compiler takes; "
            "compile in a process of its own, without TRITON_INTERPRET"
        )


def check_toolchain() -> None:
    """Refuse a process that cannot compile kernels and execute what they become, with the command that helps."""
    adapter()
    compiler(a5=False)
    compiler(a5=True)
    optimiser()
    mlir("mlir-opt")
    mlir("mlir-translate")
    llvm()


def triton_ascend() -> Any:
    """The module `triton.backends.ascend.compiler` of the triton-ascend that the lowering was written for."""
    check_mode()
    need("triton", "triton-ascend")
    triton = import_module("triton")
    if triton.__version__ != TRITON_VERSION:
        raise ImportError(f"triton is {triton.__version__}, not triton-ascend {TRITON_VERSION}; {INSTALL}")
    try:
        module = import_module("triton.backends.ascend.compiler")
        module.AscendBackend  # noqa: B018 -- a half overwritten package has the module without it
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"triton {triton.__version__} is installed but not triton-ascend ({error}): both packages write into one "
            f"directory, so the last one installed wins; {INSTALL}"
        ) from error
    return module


def adapter() -> Path:
    """The tool that turns Triton's dialect into linalg, of triton-ascend."""
    return existing(Path(triton_ascend().__file__).parent / "triton-adapter-opt", "triton-ascend")


def compiler(*, a5: bool) -> Path:
    """The compiler of ascendnpu-ir for a generation of chips."""
    return ascend_ir("bishengir-compile-a5" if a5 else "bishengir-compile")


def optimiser() -> Path:
    """The tool of ascendnpu-ir that runs single passes."""
    return ascend_ir("bishengir-opt")


def ascend_ir(name: str) -> Path:
    """A tool of ascendnpu-ir."""
    spec = need("ascendnpuir", "ascendnpu-ir")
    return existing(Path(spec.origin).parent / "bin" / name, "ascendnpu-ir")


def need(module: str, package: str) -> Any:
    """The spec of a module, refused with the package that has it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"{package} is not installed; {INSTALL}")
    return spec


def existing(path: Path, package: str) -> Path:
    """A tool's path, refused where its package does not have it."""
    if not path.is_file():
        raise ImportError(f"{package} has no {path.name}; reinstall: {INSTALL}")
    return path


def mlir(name: str) -> Path:
    """A tool of MLIR 19, which is the version that the Ascend tools are built on: ``"mlir-opt"``."""
    path = shutil.which(f"{name}-19")
    if path is None:
        raise UnsupportedError(f"{name}-19 is not on PATH; apt-get install mlir-19-tools")
    return Path(path)


def llvm() -> Any:
    """llvmlite's binding to LLVM."""
    need("llvmlite", "llvmlite")
    return import_module("llvmlite.binding")


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {package: installed(package) for package in PACKAGES}


def installed(package: str) -> str:
    """An installed version, or that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def write_stand_ins(directory: Path) -> None:
    """Executables in the place of CANN's last step: they answer with a version, and do nothing."""
    for name in ("hivmc", "hivmc-a5"):
        path = directory / name
        # The compiler reads this version, and writes for an older last step if it is lower than its own.
        path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{name} {installed("ascendnpu-ir")}"\nexit 0\n')
        path.chmod(0o755)


def ran(command: Sequence[str | Path], first_on_path: Path | None = None, timeout: float = TIMEOUT) -> Ran:
    """Run a tool to its end; one that takes too long counts as failed with the status of `timeout`."""
    environment = dict(os.environ)
    if first_on_path is not None:
        environment["PATH"] = f"{first_on_path}{os.pathsep}{environment.get('PATH', '')}"
    try:
        done = subprocess.run(
            [str(word) for word in command],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ran(124, "", f"error: {Path(command[0]).name} did not end within {timeout:g} s")
    return Ran(done.returncode, done.stdout, done.stderr)
