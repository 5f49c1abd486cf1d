"""Hypothesis profiles, and the guard that keeps inputs unchanged."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# `ci` is the default: the same examples on every run, so that a red build can be repeated.
settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", parent=settings.get_profile("ci"), max_examples=25)
settings.register_profile("fast", parent=settings.get_profile("ci"), max_examples=3)
settings.register_profile("deep", parent=settings.get_profile("ci"), max_examples=2000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Slow as a whole: processes, whole models of others, the tables of parity and of benchmarks.
SLOW = re.compile(r"distributed/.*|integrations/.*|module/test_(mla_)?ranks\.py|test_(parity|bench|counted)\w*\.py")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is slow by its place, and what traces a function once more, on tensors without values."""
    here = Path(__file__).parent
    for item in items:
        place = item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else ""
        if SLOW.fullmatch(place) or "without_values" in item.name:
            item.add_marker(pytest.mark.slow)
