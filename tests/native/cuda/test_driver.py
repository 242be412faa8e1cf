"""Errors for an NVIDIA driver that does not start. Needs no GPU: the driver is fake_driver.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.shim import library_path

SCRIPT = """
import ctypes, sys
devices = ctypes.CDLL(sys.argv[1]).untorch_cuda_devices
devices.restype = ctypes.c_char_p
print(devices().decode())
"""


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (100, "NVIDIA's driver is installed, but reports no GPU (CUDA_ERROR_NO_DEVICE)"),
        (999, "NVIDIA's driver cannot be started: CUDA_ERROR (999)"),
    ],
)
def test_a_driver_that_does_not_start(driver: Path, code: int, text: str) -> None:
    env = os.environ | {"LD_LIBRARY_PATH": str(driver), "FAKE_GPU_INIT": str(code)}
    command = [sys.executable, "-c", SCRIPT, str(Path(library_path()).resolve())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == {"error": text}
