"""A loop that is known to be small runs on one thread; one whose size is open may run on several."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

from untorch.export import export, torch_patches


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


def source(path: Path, size: int, dynamic_shapes: Any = None) -> str:
    export(Double(), (torch.zeros(size),), path, dynamic_shapes=dynamic_shapes, keep_sources=True, progress=False)
    with zipfile.ZipFile(path) as archive:
        return "".join(archive.read(name).decode() for name in archive.namelist() if name.endswith(".cpp"))


@pytest.mark.filterwarnings("ignore")
def test_small_loops_are_serial_and_open_ones_parallel(tmp_path: Path) -> None:
    assert "#pragma omp parallel" not in source(tmp_path / "small.pt2", 64)
    assert "#pragma omp parallel" in source(tmp_path / "open.pt2", 64, ({0: Dim("n", min=2, max=1 << 24)},))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_torch_still_parallelises_small_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when the patch in torch_patches.py is no longer needed."""
    import contextlib

    monkeypatch.setattr(torch_patches, "_small_loops", contextlib.nullcontext)
    assert "#pragma omp parallel" in source(tmp_path / "small.pt2", 64)
