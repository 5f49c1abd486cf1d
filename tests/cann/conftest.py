"""The emulated operators, for whole modules: a test that draws examples cannot take a fixture for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsacp_npu.emulator import installed


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    """Operators of an Ascend library, emulated, for the length of a module."""
    with installed() as done:
        if not done:
            pytest.skip("the real library is here: these tests compare against the emulator")
        yield
