"""Scripts that run with a fake CUDA driver (fake_driver.cpp), in a process without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

# What every script of a test begins with; it ends by printing what it leaves in `found`.
PROLOGUE = """
import ctypes, json, sys
import numpy as np
import untorch
assert "torch" not in sys.modules
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_launches.restype = fake.fake_events.restype = fake.fake_tensor_maps.restype = ctypes.c_char_p
fake.fake_live_bytes.restype = fake.fake_block.restype = ctypes.c_size_t
path, found = sys.argv[1], {}
def dequantizing():
    return sum("dequantize" in name for name in fake.fake_launches().decode().split())
"""
EPILOGUE = """
print(json.dumps(found))
"""


def found(driver: Path, path: Path, script: str, **fake: object) -> dict[str, Any]:
    """What a script finds, in a process without torch and with that driver, whose FAKE_GPU_… ``fake`` sets."""
    env = os.environ | {"LD_LIBRARY_PATH": str(driver)}
    env |= {f"FAKE_GPU_{name}": str(value) for name, value in fake.items()}
    python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
    command = [python, "-X", "faulthandler", "-c", PROLOGUE + script + EPILOGUE, str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def build_driver(folder: Path) -> Path:
    """Compiles libcuda.so.1 into the folder. Skips the test where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source = Path(__file__).with_name("fake_driver.cpp")
    flags = ["-std=c++20", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
    command = [compiler, *flags, f"-I{ROOT / 'native'}", str(source), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)
    return folder
