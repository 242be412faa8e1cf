"""Compiles the small models of the tests, once: packages are kept under build/test-cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import pathlib

import pytest

from tests.warm_process import run_warm

ROOT = pathlib.Path(__file__).resolve().parents[1]


def compiled(models: pathlib.Path, kind: str) -> pathlib.Path:
    """The package that ``python models kind path`` makes, in another process: this one stays without PyTorch."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs PyTorch to compile the test's model")
    sources = [models, *sorted((ROOT / "src/untorch/export").rglob("*.py")), ROOT / "src/untorch/archive.py"]
    key = hashlib.blake2b(digest_size=8)
    for part in (version, kind, *(source.read_text() for source in sources)):
        key.update(part.encode())
    path = ROOT / "build" / "test-cache" / key.hexdigest() / f"{kind}.pt2"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Workers of pytest-xdist ask for the same package at the same time.
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                part = path.with_name(f"{kind}.{os.getpid()}.pt2")
                done = run_warm([models, kind, part])
                assert done.returncode == 0, done.stderr[-3000:]
                part.replace(path)
    return path
