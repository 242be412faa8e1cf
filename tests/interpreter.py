"""Runs a file of tests in Triton's interpreter: without a GPU, as Triton's kernels are Python there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

__all__ = ["INTERPRETED", "run_interpreted"]

# Triton reads the variable when it is imported, so such tests run in a process of their own.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton 3.6's interpreter needs a NumPy older than 2.4: `make test` puts one here.
OLDER_NUMPY = Path(__file__).resolve().parents[1] / "build" / "interpreter"


def run_interpreted(file: str, marks: str = "not exhaustive") -> None:
    """The tests of the file with these marks, of which those that are for the interpreter run."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        if not OLDER_NUMPY.is_dir():
            pytest.skip("Triton 3.6's interpreter needs a NumPy older than 2.4: make build/stamps/interpreter")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OLDER_NUMPY), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--override-ini=addopts=--import-mode=importlib", "-m", marks,
         file],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
