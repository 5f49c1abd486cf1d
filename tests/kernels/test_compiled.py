"""Every way in which a launch compiles a kernel, on a chip of each generation: it fits, and divides exactly."""

from __future__ import annotations

import pytest

from dsacp_npu.ascend import compile_check
from tests.kernels.harness import TARGETS, compilations

COMPILATIONS = [(target, made) for target, family in TARGETS.items() for made in compilations(family)]


@pytest.mark.parametrize("target, made", COMPILATIONS, ids=[f"{target}-{made.name}" for target, made in COMPILATIONS])
def test_a_kernel_compiles_and_fits(target, made) -> None:
    report = compile_check(made.kernel, made.signature, made.constexprs, target=target)
    assert report.ok, f"{report.stage}: {report.error}"
    assert report.planned
    over = {space: used for space, used in report.planned.items() if used > report.available[space]}
    assert not over, f"planned more than there is: {over} of {report.available}"
    assert "inexact_division" not in {lint.name for lint in report.lints}
