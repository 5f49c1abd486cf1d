"""Each repair of the interpreter: a tiny kernel that is wrong without it, and right with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter runs with TRITON_INTERPRET=1 only", allow_module_level=True)

from dsacp_npu.ascend.interpreter import REPAIRS, repair
from tests.ascend import interpreted

# What 3.2.0 gives without repairs. Text stands for an exception.
WRONG: dict[str, Any] = {
    "bf16_product": [4228120576.0, 4228120576.0],  # 16 x 0x3F80 squared: the bits of 1.0, multiplied
    "bf16_rounding": 112,
    "bf16_from_int": 15,
    "bf16_square": 254,
    "int32_sum": [4, 4, 4, 4, 0],  # the seven behind the last sum is overwritten
    "int32_running_sum": [1, 2, 3, 4, 0],
    "int1_sum": 1,
    "larger": [False, False],  # NaN instead of 0, and NaN as the largest
    "task_loop": "only 0-dimensional arrays can be converted",
    "infinite": "invalid value encountered",
    "descending": "create_sort",
    "largest": "has no attribute",
    "gathered": "create_gather",
    "sliced": "has no attribute",
    "parallel": "can only be used in @triton.jit",
}


@pytest.fixture(scope="module")
def without_repairs() -> dict[str, Any]:
    """What the kernels give in a process of their own that repairs nothing."""
    command = [sys.executable, "-m", "tests.ascend.interpreted"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=os.getcwd())
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def agrees(found: Any, expected: Any) -> bool:
    """Equal; a text is contained."""
    return expected in found if isinstance(expected, str) and isinstance(found, str) else bool(found == expected)


@pytest.mark.parametrize("function", interpreted.RIGHT, ids=lambda function: function.__name__)
def test_a_kernel_is_wrong_without_its_repair_and_right_with_it(function, without_repairs) -> None:
    repair()
    assert agrees(without_repairs[function.__name__], WRONG[function.__name__]), "fixed upstream? drop the repair"
    assert agrees(interpreted.seen(function), interpreted.RIGHT[function])


def test_repairs_are_made_once() -> None:
    assert repair() == tuple(REPAIRS)
    assert repair() == tuple(REPAIRS)


@pytest.mark.parametrize(
    "script, text",
    [
        ("del os.environ[NAME]; repair()", "kernels are compiled in this process"),
        ("del os.environ[NAME]; import triton; os.environ[NAME] = '1'; repair()", "before Python starts"),
    ],
)
def test_a_process_that_compiles_is_refused(script, text) -> None:
    start = "import os; from dsacp_npu.ascend.interpreter import repair; NAME = 'TRITON_INTERPRET'"
    done = subprocess.run([sys.executable, "-c", f"{start}; {script}"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "UnsupportedError" in done.stderr
    assert text in done.stderr


def test_another_triton_is_left_alone() -> None:
    script = (
        "import triton; triton.__version__ = '3.6.0'; from dsacp_npu.ascend.interpreter import repair; print(repair())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "()"
