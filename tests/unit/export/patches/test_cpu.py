"""Patches of C++ code generation: the vector ISA, -march, and which loops run in parallel."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

from untorch.export import export, patches
from untorch.export.library import find_runtime_library
from untorch.export.patches.cpu import has_cpp_march, torch_version


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
    monkeypatch.setattr(patches, "small_loops", contextlib.nullcontext)
    assert "#pragma omp parallel" in source(tmp_path / "small.pt2", 64)


def test_the_isa_probe_still_fails_with_custom_op_libs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import config, cpu_vec_isa

    (tmp_path / "libuntorch.so").symlink_to(find_runtime_library())
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    code = (
        'extern "C" int aoti_torch_device_type_cpu(); extern "C" int probe() { return aoti_torch_device_type_cpu(); }'
    )
    with config.patch({"aot_inductor.custom_op_libs": ["untorch"], "aot_inductor.link_libtorch": False}):
        assert not cpu_vec_isa.VecAVX2().check_build(code)


def test_torch_has_cpp_march() -> None:
    assert has_cpp_march() == (torch_version() >= (2, 13))
