"""Hypothesis profiles, and the guard that keeps inputs unchanged."""

from __future__ import annotations

import os

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
settings.register_profile("deep", parent=settings.get_profile("ci"), max_examples=2000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
