"""20 seconds of 32 threads on several models; ``make soak MINUTES=60`` is the same for an hour."""

from __future__ import annotations

import os

import pytest

from .run import soak

SECONDS = float(os.environ.get("UNTORCH_SOAK_SECONDS", "20"))


@pytest.mark.slow
def test_many_threads() -> None:
    seen, problems = soak(SECONDS)
    assert not problems, seen
