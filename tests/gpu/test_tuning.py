"""Autotuning on this GPU: while a model is compiled, and from the kernel sources in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import untorch
from tests.gpu.built_elsewhere import Gemms
from untorch.export import export
from untorch.export.kernel_choice import read_tuning
from untorch.export.kernel_sources import tune_file

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q = (self.norm(x).t() * y).reshape(1, 8, 128, 128)
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


def test_gemms_are_timed_beside_templates(tmp_path: Path) -> None:
    """Each has an entry; a build without looking at the GPU takes the same by the file."""
    torch.manual_seed(0)
    model, x = Gemms().bfloat16(), torch.randn(128, 512).bfloat16()
    recorded, again = tmp_path / "recorded.json", tmp_path / "again.json"
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}"
    with torch.no_grad():
        expected = model(x)
        export(
            model.cuda(), (x.cuda(),), tmp_path / "native.pt2", device="cuda", matmul="auto", record_tuning=recorded,
            progress=False,
        )  # fmt: skip
        export(
            model.cpu(), (x,), tmp_path / "tuned.pt2", device="cuda", arch=arch, matmul="auto", tuning=recorded,
            record_tuning=again, progress=False,
        )  # fmt: skip
    found = [
        {name: choice["config"] for name, choice in read_tuning(file)[arch].items() if name.startswith("gemm ")}
        for file in (recorded, again)
    ]
    assert len(found[0]) == 3
    assert found[1] == found[0]
    for file in ("native.pt2", "tuned.pt2"):
        with untorch.load(tmp_path / file) as program:
            for got, wanted in zip(program(x.cuda()), expected, strict=True):
                result = torch.from_dlpack(got).cpu().float()
                assert float((result - wanted.float()).abs().max()) <= 2e-2 * float(wanted.float().abs().max())
