"""What the tests of compiled kernels need, and how they are skipped where it is missing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dsacp_npu.ascend import toolchain
from dsacp_ref.spec import UnsupportedError


def missing() -> str:
    """Why nothing can be compiled in this process; empty if it can."""
    try:
        toolchain.adapter()
        toolchain.compiler(a5=False)
    except (ImportError, UnsupportedError) as error:
        return str(error)
    return ""


MISSING = missing()
# Doctests are looked for in every file, and these cannot be imported without Triton.
NEED_TRITON = ("kernels.py", "executed.py", "interpreted.py")
collect_ignore = [str(Path(__file__).with_name(name)) for name in NEED_TRITON] if MISSING else []


def kernels_or_skip() -> Any:
    """The module of small kernels; where they cannot be compiled, the calling module is skipped with the reason."""
    if MISSING:
        pytest.skip(MISSING, allow_module_level=True)
    return import_module("tests.ascend.kernels")
