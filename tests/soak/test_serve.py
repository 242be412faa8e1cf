"""Twelve seconds of requests of all kinds; ``make soak-serve`` is the same for 20 minutes."""

from __future__ import annotations

import pathlib

import pytest

from .serve import LIMITS, grown, soak

pytest.importorskip("soundfile")


def test_some_seconds_of_requests(tmp_path: pathlib.Path) -> None:
    seen, problems = soak(tmp_path, 12)
    assert not problems, seen


@pytest.mark.parametrize("name", LIMITS)
def test_growth_is_found(name: str) -> None:
    """Of what is level, of what goes up and down, and of what grows with each round."""
    level = [dict.fromkeys(LIMITS, 1 << 30)] * 8
    assert grown(level) == []
    assert grown([{**one, name: one[name] + 5 * LIMITS[name] * (i % 2)} for i, one in enumerate(level)]) == []
    step = LIMITS[name] // 3 + 1
    [problem] = grown([{**one, name: one[name] + i * step} for i, one in enumerate(level)])
    assert problem.startswith(f"{name} grew from ")
