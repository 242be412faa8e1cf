"""Tests of fold_channel_factors: constant factors and summands of channels go into the convolution before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import assert_same, close, unlift
from torch import nn

from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.export.passes.fold_channel_factors import fold_channel_factors
from untorch.export.passes.fold_constants import fold_constants


class FrozenBatchNorm(nn.Module):
    """As torchvision and transformers write it."""

    def __init__(self, channels: int, ndim: int = 2) -> None:
        super().__init__()
        self.shape = (1, -1, *[1] * ndim)
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, mean, variance = (
            getattr(self, name).reshape(self.shape) for name in ("weight", "bias", "running_mean", "running_var")
        )
        scale = weight * (variance + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


class Residual(nn.Module):
    """The sum with another tensor is not part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), FrozenBatchNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


class Scale(nn.Module):
    """The convolution's result by ``of``."""

    def __init__(self, of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.conv, self.of = nn.Conv2d(8, 8, 3, padding=1), of
        self.register_buffer("scale", torch.rand(shape) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(self.conv(x), self.scale)


class InTurn(nn.Module):
    """Nothing between a norm and the next convolution, as in D-FINE's backbone; one is read by two."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(FrozenBatchNorm(8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three, four = (lambda x, c=c, n=n: n(c(x)) for c, n in zip(self.convs, self.norms, strict=True))
        middle = two(one(x))
        return three(middle) + four(middle)


def names(module: torch.fx.GraphModule) -> list[str]:
    return [node.target._schema.name.partition("::")[2] for node in module.graph.nodes if node.op == "call_function"]


def folded(model: nn.Module, x: torch.Tensor, keep: tuple[str, ...] = ()) -> tuple[list[str], int]:
    model.eval().requires_grad_(False)
    module = unlift(model, x)
    fold_constants(module, 1 << 20)
    report = fold_channel_factors(module, keep)
    close(module)
    assert_same(module(x), model(x), rtol=1e-4, atol=1e-4)
    return names(module), len(report.changed)


IMAGE = torch.randn(2, 8, 9, 10)


@pytest.mark.parametrize(
    ("model", "x", "operators"),
    [
        (nn.Sequential(nn.Conv2d(8, 6, 3, 2), FrozenBatchNorm(6), nn.ReLU()), IMAGE, ["conv2d", "relu"]),
        (nn.Sequential(nn.Conv2d(8, 8, 3, groups=8, bias=False), FrozenBatchNorm(8)), IMAGE, ["conv2d"]),
        (nn.Sequential(nn.Conv2d(8, 6, 3, padding="same"), FrozenBatchNorm(6)), IMAGE, ["conv2d"]),
        (nn.Sequential(nn.Conv1d(8, 6, 3), FrozenBatchNorm(6, 1)), IMAGE[:, :, 0], ["conv1d"]),
        (nn.Sequential(nn.Conv3d(8, 6, 3), FrozenBatchNorm(6, 3)), IMAGE[:, :, None].expand(-1, -1, 4, -1, -1), ["conv3d"]),
        (Residual(), IMAGE, ["conv2d", "add", "relu"]),
        (Scale(lambda y, s: s * y, 8, 1, 1), IMAGE, ["conv2d"]),
        (Scale(lambda y, s: y.mul_(s).add_(s), 1, 8, 1, 1), IMAGE, ["conv2d"]),
        (Scale(lambda y, s: (y + s) * s + s, 8, 1, 1), IMAGE, ["conv2d"]),
    ],
)  # fmt: skip
def test_they_go_into_the_convolution(model: nn.Module, x: torch.Tensor, operators: list[str]) -> None:
    assert folded(model, x) == (operators, 1)


def test_one_after_another() -> None:
    assert folded(InTurn(), IMAGE) == (["conv2d"] * 4 + ["add"], 4)


@pytest.mark.parametrize(
    "model",
    [
        Scale(lambda y, s: y * s, 9, 10),  # a factor for each pixel
        Scale(lambda y, s: y * s, 2, 1, 1, 1),  # for each image
        Scale(lambda y, s: torch.add(y, s, alpha=2), 8, 1, 1),
        Scale(lambda y, s: y * s + y, 8, 1, 1),
        Scale(lambda y, s: y.double() * s, 8, 1, 1),
        nn.Sequential(nn.ConvTranspose2d(8, 6, 3), FrozenBatchNorm(6)),
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), FrozenBatchNorm(8)),
    ],
)
def test_what_stays(model: nn.Module) -> None:
    before = names(unlift(model.eval(), IMAGE))
    found, changed = folded(model, IMAGE)
    assert changed == 0
    assert len(found) <= len(before)
    assert "mul" in found or "add" in found


def test_an_input_that_is_overwritten_in_between() -> None:
    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)
            self.register_buffer("scale", torch.rand(8, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            y = self.conv(x) * self.scale
            x.zero_()
            return y + self.scale + x

    found, changed = folded(Overwritten(), IMAGE)
    assert changed == 1
    assert found == ["mul", "conv2d", "zero_", "add", "add"]


def test_kept_weights_stay() -> None:
    model = nn.Sequential(nn.Conv2d(8, 6, 3), FrozenBatchNorm(6))
    assert folded(model, IMAGE, ("0.weight",))[1] == 0


def test_the_other_passes_see_a_convolution_alone() -> None:
    block: Any = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), FrozenBatchNorm(8), nn.ReLU()).eval()
    module = unlift(block, IMAGE)
    run_passes(module, ExportOptions())
    assert names(module) == ["packed_convolution"]
    assert_same(module(IMAGE), block(IMAGE), rtol=1e-4, atol=1e-4)
