"""Exported convolutional networks: what follows a convolution in its kernel, and algorithms chosen by timing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import untorch
from untorch.archive import ArchiveReader
from untorch.export import export

TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 4e-2, torch.float16: 5e-3}  # of the largest value; TF32


class Block(nn.Module):
    """An inverted residual and a bottleneck: expansion, depthwise, grouped, shortcut with a stride."""

    def __init__(self, channels: int, out: int, stride: int, groups: int, activation: nn.Module) -> None:
        super().__init__()
        wide = 2 * channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), activation,
            nn.Conv2d(wide, wide, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(wide), activation,
            nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return torch.relu_(out)


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Block(32, 64, 1, 1, nn.ReLU()), Block(64, 64, 2, 128, nn.SiLU()), Block(64, 64, 1, 8, nn.Hardswish()),
        nn.ConvTranspose2d(64, 32, 2, 2), nn.ReLU(), nn.Conv2d(32, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_network(dtype: torch.dtype, tmp_path: Path) -> None:
    model = network().cuda().to(dtype)
    batch = torch.export.Dim("batch", min=1, max=16)
    x = torch.randn(2, 3, 96, 80, device="cuda").to(dtype)
    report = export(
        model, (x,), tmp_path / "m.pt2", device="cuda", progress=False, dynamic_shapes=({0: batch},)
    )  # fmt: skip
    changed: Any = {entry.name: entry.changed for entry in report.methods["forward"].passes}
    assert len(changed["fuse_convolutions"]) == 15
    assert 0 < len(changed["tune_convolutions"]) <= 14
    with ArchiveReader(report.path) as archive:
        library = b"".join(archive.read(entry.name) for entry in archive if entry.name.endswith(".so"))
    assert b"input=2x1x96x80 fused algorithm=" in library
    with untorch.load(report.path) as program, untorch.stream(torch.cuda.current_stream()):
        for count in (2, 1, 5, 2):
            images = torch.randn(count, 3, 96, 80, device="cuda").to(dtype)
            got, want = torch.from_dlpack(program.forward(images)), model(images)
            off = (got.double() - want.double()).abs().max() / want.double().abs().max()
            assert off < TOLERANCE[dtype], count
        with program.forward.graph(x) as graph:
            numpy.testing.assert_array_equal(
                torch.from_dlpack(graph(x)).float().cpu(), torch.from_dlpack(program.forward(x)).float().cpu()
            )
