"""weightless.py: a package of random weights as a small file, and back."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest

from untorch.archive import ArchiveReader, ArchiveWriter

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
LARGE = 300_001  # bytes, a multiple of no block


@pytest.fixture
def weightless(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("weightless")
    sys.modules.pop("weightless", None)


@pytest.fixture
def package(tmp_path: pathlib.Path) -> pathlib.Path:
    rng = np.random.default_rng(0)
    with ArchiveWriter(tmp_path / "model.pt2") as archive:
        archive.write("data/aotinductor/code.so", rng.bytes(100_000))
        archive.write("data/weights/weight_0", rng.bytes(LARGE))
        archive.write("data/weights/weight_1", rng.bytes(100))
        archive.write("data/weights/weight_2", rng.bytes(LARGE))
    return tmp_path / "model.pt2"


def test_all_but_large_weights_is_as_it_was(
    weightless: types.ModuleType, package: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    small, back = tmp_path / "model.xz", tmp_path / "back.pt2"
    command = [sys.executable, str(BENCHMARKS / "weightless.py")]
    subprocess.run([*command, "pack", str(package), str(small)], check=True)
    subprocess.run([*command, "unpack", str(small), str(back)], check=True)
    assert small.stat().st_size < 130_000 and back.stat().st_size == package.stat().st_size
    with ArchiveReader(package) as before, ArchiveReader(back) as after:
        assert [(one.name, one.offset, one.size) for one in before] == [(x.name, x.offset, x.size) for x in after]
        for entry in before:
            was, now = bytes(before.view(entry.name)), bytes(after.view(entry.name))
            if entry.size == LARGE:
                block = was[: weightless.KEPT]
                assert now == (block * (LARGE // len(block) + 1))[:LARGE] != was
            else:
                assert now == was
