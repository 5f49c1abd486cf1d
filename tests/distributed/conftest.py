"""The pools end with the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import close_all


@pytest.fixture(scope="session", autouse=True)
def pools() -> Iterator[None]:
    """Worker processes start when a test first asks for them."""
    yield
    close_all()
