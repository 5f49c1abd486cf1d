"""Every case of every kernel, in the interpreter."""

from __future__ import annotations

import pytest

from tests.kernels.harness import cases, interpret

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_right_in_the_interpreter(name) -> None:
    interpret(CASES[name]())
