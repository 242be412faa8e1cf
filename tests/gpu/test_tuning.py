"""Configurations of kernels that were timed on this GPU: while a model is compiled, and from a file's sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from untorch.export import export
from untorch.export.kernel_choice import read_tuning
from untorch.export.kernel_sources import tune_file

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q = (self.norm(x).t() * y).reshape(1, 8, 64, 256)
        return nn.functional.scaled_dot_product_attention(q, q, q).softmax(-1)


def test_a_files_kernels_are_timed(tmp_path: Path) -> None:
    """The same kernels as in a build on the GPU; those of a build for it without looking at it, too."""
    args = (torch.randn(256, 512), torch.randn(512, 256))
    major, minor = torch.cuda.get_device_capability()
    recorded, files = tmp_path / "recorded.json", [tmp_path / "native.pt2", tmp_path / "cross.pt2"]
    on_gpu = tuple(arg.cuda() for arg in args)
    export(Normed().cuda(), on_gpu, files[0], device="cuda", record_tuning=recorded, keep_sources=True, progress=False)
    arch = f"sm_{major}{minor}"
    export(Normed(), args, files[1], device="cuda", arch=arch, keep_sources=True, progress=False)
    kernels = read_tuning(recorded)[arch].keys()
    for file in files:
        output = tmp_path / f"{file.stem}.json"
        tune_file(file, output)
        [(found, choices)] = read_tuning(output).items()
        assert found == arch
        assert choices.keys() == kernels
        assert all(choice["config"]["num_warps"] for choice in choices.values())
    again = tmp_path / "again.json"
    export(
        Normed(), args, tmp_path / "tuned.pt2", device="cuda", arch=arch, tuning=tmp_path / "cross.json",
        record_tuning=again, progress=False,
    )  # fmt: skip
    assert read_tuning(again)[arch] == read_tuning(tmp_path / "cross.json")[arch]
