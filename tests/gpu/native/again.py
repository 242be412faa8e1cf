"""Runs a file's tests again with other kernels, which environment variables select once per process."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.native.shim import ROOT, library_path


def run_again(file: str, selected: str, **variables: int) -> None:
    """``file``'s tests that ``selected`` names, as pytest's -k does, with UNTORCH_{variable} set; they must pass."""
    # A run of its own, not a part of one that several processes share.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Queues are few on a GPU that many processes use, and one with none left says that it is out of memory.
    env |= {
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "UNTORCH_LIBRARY": library_path(),
        **{f"UNTORCH_{name}": str(value) for name, value in variables.items()},
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", selected, file]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
