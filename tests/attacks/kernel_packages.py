"""The packages of kernel_models.py, compiled once and kept under build/test-cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = pathlib.Path(__file__).with_name("kernel_models.py")


def compiled(kind: str) -> pathlib.Path:
    """The package ``kind``; compiled in a process of its own, so that this one stays without PyTorch."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs PyTorch to compile the test's model")
    sources = [MODELS, *sorted((ROOT / "src/untorch/export").rglob("*.py")), ROOT / "src/untorch/archive.py"]
    key = hashlib.blake2b(digest_size=8)
    for part in (version, kind, *(source.read_text() for source in sources)):
        key.update(part.encode())
    path = ROOT / "build" / "test-cache" / key.hexdigest() / f"kernels_{kind}.pt2"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{kind}.{os.getpid()}.pt2")
        subprocess.run([sys.executable, str(MODELS), kind, str(part)], check=True, stdout=subprocess.DEVNULL)
        part.replace(path)
    return path
