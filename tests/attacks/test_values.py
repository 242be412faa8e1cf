"""No value of an input ends the process: indices out of range and integer divisions by zero, in serial and parallel
loops, in files of ``untorch.export`` and of PyTorch."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
INDICES = (
    "embedding", "gather", "index", "index_put", "accumulate", "scatter", "scatter_add", "scatter_reduce", "bag",
)  # fmt: skip
DIVISORS = ("divide", "floor_divide", "remainder", "fmod")
KINDS = ("own dynamic", "own static", "stock dynamic", "stock static")
BAD = (100, 1 << 40, -101)


def arguments(length: int) -> dict[str, np.ndarray[Any, Any]]:
    """Valid values for every argument of value_models.Values."""
    generator = np.random.default_rng(0)
    names = (*INDICES[:8], "take_along", "select", "bag", *DIVISORS)
    return {name: np.asarray(5) if name == "select" else generator.integers(1, 100, length) for name in names}


def serve(path: str, length: int) -> None:
    """In a process of its own: one bad value at a time, and a good call after each."""
    import untorch

    with untorch.load(path) as program:
        method = program[program.methods[0]]
        want = {key: np.array(value) for key, value in method(*arguments(length).values()).items()}
        cases = [(name, bad) for name in INDICES for bad in BAD] + [(name, 0) for name in DIVISORS]
        for name, bad in cases:
            bent = arguments(length)
            bent[name][length // 2] = bad
            try:
                method(*bent.values())
                text = "no error"
            except untorch.UntorchError as error:
                text = f"{type(error).__name__}: {error}"
            again = method(*arguments(length).values())
            right = all(np.array_equal(again[key], value) for key, value in want.items())
            print(json.dumps([name, bad, text, right]), flush=True)


@pytest.fixture(scope="module", params=KINDS)
def answers(request: pytest.FixtureRequest, compiled_values: Any) -> dict[tuple[str, int], tuple[str, bool]]:
    maker, sizes = request.param.split()
    length = 40_000 if sizes == "dynamic" else 6
    result = subprocess.run(
        [sys.executable, __file__, str(compiled_values(maker, sizes)), str(length)],
        capture_output=True, text=True, timeout=300, check=False, env=child_environment(),
    )  # fmt: skip
    assert result.returncode == 0, f"the process ended: {result.returncode}\n{result.stdout}\n{result.stderr[-2000:]}"
    return {(name, bad): (text, right) for name, bad, text, right in map(json.loads, result.stdout.splitlines())}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", INDICES)
def test_an_index_out_of_range_is_an_error(name: str, bad: int, answers: dict[Any, Any]) -> None:
    text, right = answers[name, bad]
    assert right, "the next call is wrong"
    assert text.startswith("ModelError: method '"), text
    assert "' failed while running: " in text
    assert any(words in text for words in ("out of bounds", "out of range", "is outside of the table"))


@pytest.mark.parametrize("name", DIVISORS)
def test_an_integer_division_by_zero_is_an_error(name: str, answers: dict[Any, Any]) -> None:
    text, right = answers[name, 0]
    assert right, "the next call is wrong"
    assert text.startswith("ModelError: method '"), text
    assert "integer division by zero" in text or "ZeroDivisionError" in text


def child_environment() -> dict[str, str]:
    # More threads than most test machines have CPUs: regions are parallel everywhere.
    return dict(os.environ, OMP_NUM_THREADS="4")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
