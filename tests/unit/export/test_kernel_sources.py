"""Sources of kernels in a file. That they are timed is tested on a GPU: tests/gpu/test_tuning.py."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from untorch.archive import MANIFEST, ArchiveReader, ArchiveWriter
from untorch.export import CompileError, export
from untorch.export.kernel_sources import SUFFIX, tune_file
from untorch.runtime.errors import UnsupportedError
from untorch.validation import OptionError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own


class Turned(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.t() * y


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources") / "model.pt2"
    args = (torch.zeros(64, 128), torch.zeros(128, 64))
    export(Turned(), args, path, device="cuda", arch=["sm_80", "sm_90"], keep_sources=True, progress=False)
    return path


def sources_of(path: Path) -> dict[str, str]:
    with ArchiveReader(path) as archive:
        return {entry.name: archive.read(entry.name).decode() for entry in archive if entry.name.endswith(SUFFIX)}


def rewritten(path: Path, to: Path, **changed: Any) -> Path:
    """The file with other values in its manifest, and other sources if they are given."""
    sources = changed.pop("sources", None)
    with ArchiveReader(path) as archive, ArchiveWriter(to) as writer:
        for entry in archive:
            if not entry.name.startswith(("data/", "extra/")):
                continue  # the writer's own
            data = archive.read(entry.name)
            if entry.name == MANIFEST:
                continue
            if entry.name.endswith(SUFFIX) and sources is not None:
                data = sources.encode()
            writer.write(entry.name, data)
        writer.write_manifest({**archive.manifest(), **changed})
    return to


def test_kernels_are_launched_dependent_where_the_gpu_can(file: Path) -> None:
    with ArchiveReader(file) as archive:
        for entry in archive:
            if entry.name.endswith((".wrapper.cpp", SUFFIX)):
                text = archive.read(entry.name).decode()
                dependent = "launchDependentKernel(kernels_" in text or "tl.extra.cuda.gdc_wait()" in text
                assert dependent == ("forward.sm_90" in entry.name), entry.name


@pytest.mark.parametrize("device", [{"device": "cuda", "arch": "sm_80"}, {}])
def test_where_it_cannot(device: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="option pdl") as caught:
        export(Turned(), (torch.zeros(4, 8), torch.zeros(8, 4)), tmp_path / "m.pt2", pdl=True, progress=False, **device)
    what = device.get("arch", "CPUs")
    assert str(caught.value) == f"option pdl: sm_90 and newer GPUs have it, not {what}: leave it out"


def test_without_it(tmp_path: Path) -> None:
    export(
        Turned(), (torch.zeros(4, 8), torch.zeros(8, 4)), tmp_path / "m.pt2", device="cuda", arch="sm_90", pdl=False,
        keep_sources=True, progress=False,
    )  # fmt: skip
    assert "gdc_wait" not in "".join(sources_of(tmp_path / "m.pt2").values())


def test_each_architecture_has_its_kernels(file: Path) -> None:
    sources = sources_of(file)
    assert len({Path(name).parent for name in sources}) == len(sources) == 2
    for text in sources.values():
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute) and node.attr == "run"]
        assert calls, "a kernel is defined and called"
        assert "triton_poi_fused_mul" in text
        assert str(file.parent) not in text
        assert "kernel path" not in text
    assert {cc for cc in (80, 90) for text in sources.values() if f"cc={cc}" in text} == {80, 90}


def test_files_that_cannot_be_timed(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "gpu.json"
    other = rewritten(file, tmp_path / "other.pt2", torch_version="2.1.0")
    with pytest.raises(UnsupportedError, match=r"are for torch 2\.1\.0, which made them, and this is .*install that"):
        tune_file(other, output)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="torch finds no GPU to time kernels on"):
        tune_file(file, output)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    with pytest.raises(UnsupportedError, match="has kernels for sm_80, sm_90, and this GPU is sm_120"):
        tune_file(file, output)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    broken = rewritten(file, tmp_path / "broken.pt2", sources="raise ValueError('out of order')")
    with pytest.raises(CompileError, match=r"the kernels of .*broken\.pt2' cannot be timed: out of order"):
        tune_file(broken, output)
    assert not output.exists()
