"""Which of these tests run: kernels are interpreted in one process and compiled in another, never both."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.harness import mode

ELSEWHERE = {"compiled": {"test_lowered.py", "test_compiled.py"}, "cuda": {"test_cuda.py"}}  # the rest is interpreted
ALWAYS = {"test_environment.py", "__init__.py", "conftest.py"}
MODE = mode()

if MODE == "interpreted":
    from dsacp_npu.ascend.interpreter import repair

    repair()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what cannot run here; without Triton everything, because every module imports it."""
    name = collection_path.name
    if not name.endswith(".py") or name in ALWAYS:
        return None
    if MODE == "missing":
        return True
    if not name.startswith("test_"):
        return None
    here = next((mode for mode, names in ELSEWHERE.items() if name in names), "interpreted")
    return None if here == MODE else True
