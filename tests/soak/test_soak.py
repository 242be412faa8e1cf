"""Two minutes of 32 threads on several models; ``make soak`` is the same for an hour."""

from __future__ import annotations

import pytest

from .run import soak

SECONDS = 120


@pytest.mark.slow
def test_two_minutes_of_many_threads() -> None:
    seen, problems = soak(SECONDS)
    assert not problems, seen
