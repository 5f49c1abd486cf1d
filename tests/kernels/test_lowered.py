"""Every case of every kernel, on the CPU as the Ascend compiler has it: after the adapter, and after HFusion."""

from __future__ import annotations

import pytest

from dsacp_npu.ascend.execute import LEVELS
from dsacp_ref.spec import UnsupportedError
from tests.kernels.harness import cases, execute

# Cases that cannot be executed at a level, with the operation that stands in the way. The last test sees to it that
# each is still refused for that reason.
REFUSED: dict[tuple[str, str], str] = {}

CASES = cases()
RUNNABLE = [(name, level) for name in CASES for level in LEVELS if (name, level) not in REFUSED]


@pytest.mark.parametrize("name, level", RUNNABLE)
def test_a_lowered_kernel_is_right(name, level) -> None:
    execute(CASES[name](), level)


def test_what_cannot_be_executed_is_refused_for_the_reason_given() -> None:
    for (name, level), reason in REFUSED.items():
        with pytest.raises(UnsupportedError, match=reason):
            execute(CASES[name](), level)
