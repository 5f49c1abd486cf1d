"""What these tests need, said once; and that nothing is left out of them."""

from __future__ import annotations

import pytest

from tests.kernels import harness

if harness.mode() == "missing":
    pytest.skip(harness.INSTALL, allow_module_level=True)


def test_every_kernel_has_a_case() -> None:
    """Kernels of a GPU alone have cases of their own, which are not lowered."""
    with_cases = {build().kernel.fn.__name__ for build in [*harness.cases().values(), *harness.gpu_cases().values()]}
    assert harness.kernels() <= with_cases


def test_every_kernel_has_a_compilation() -> None:
    """For an NPU, unless it is a GPU's alone; and for a GPU."""
    names = {
        family: {made.kernel.fn.__name__ for made in harness.compilations(family)} for family in ("a2", "a5", "cuda")
    }
    alone = {build().kernel.fn.__name__ for build in harness.gpu_cases().values()}
    assert names["cuda"] == harness.kernels()
    assert names["a2"] == names["a5"] == harness.kernels() - alone


@pytest.mark.parametrize("family", ["a2", "a5", "cuda"])
def test_a_compilation_has_a_name_of_its_own_and_every_argument(family) -> None:
    made = harness.compilations(family)
    assert len({compilation.name for compilation in made}) == len(made)
    for compilation in made:
        given = [*compilation.signature, *compilation.constexprs]
        assert sorted(given) == sorted(compilation.kernel.arg_names), compilation.name
