"""Every test of this folder runs with the emulated operators, unless the real ones are here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsacp_npu.emulator import installed, real_library


@pytest.fixture(autouse=True)
def emulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """The operators, installed for one test."""
    if request.path.name == "test_real_library.py":
        yield
        return
    if real_library() is not None:
        pytest.skip(f"the real operators are here: {real_library()}")
    with installed():
        yield
