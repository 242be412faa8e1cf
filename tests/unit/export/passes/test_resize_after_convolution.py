"""Tests of resize_after_convolution: before, after, what stays and why; results are those of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import fx, nn
from torch.export import Dim

from untorch.export.passes import PassReport
from untorch.export.passes.drop_dead_code import drop_dead_code
from untorch.export.passes.resize_after_convolution import resize_after_convolution

Function = Callable[..., torch.Tensor]


class Decoder(nn.Module):
    """``function`` of three images of 16 channels: [2, 16, 8, 12], [2, 16, 4, 6] and [2, 16, 2, 3]."""

    def __init__(self, function: Function, bias: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.conv = nn.Conv2d(48, 20, 1, bias=bias, **options)
        self.single = nn.Conv2d(16, 20, 1)
        self.wide = nn.Conv2d(16, 20, 3, padding=1)
        self.norm = nn.BatchNorm2d(20)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    def forward(self, *images: torch.Tensor) -> Any:
        return self.function(self, *images)


def images(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, 16, 8 // n, 12 // n, generator=generator).to(dtype) for n in (1, 2, 4))


def run(
    function: Function, dtype: torch.dtype = torch.float32, dynamic: Any = None, **options: Any
) -> tuple[fx.GraphModule, PassReport]:
    model, args = Decoder(function, **options).to(dtype).eval().requires_grad_(False), images(dtype)
    module = unlift(model, *args, dynamic=dynamic)
    report = resize_after_convolution(module)
    drop_dead_code(module)
    close(module)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert_same(module(*args), model(*args), rtol=tolerance, atol=tolerance)
    return module, report


def bilinear(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, size=(8, 12), mode="bilinear", align_corners=False)


def decoder(m: Decoder, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """As SegFormer's: also the largest is resized, to its own size."""
    return m.norm(m.conv(torch.cat([bilinear(x) for x in (c, b, a)], 1))).relu()


def sizes(module: fx.GraphModule) -> list[tuple[int, ...]]:
    """Channels and height that each convolution reads."""
    found = [node for node in module.graph.nodes if node.target == torch.ops.aten.conv2d.default]
    return [tuple(node.args[0].meta["val"].shape[1:3]) for node in found]


def test_before_and_after() -> None:
    module, report = run(decoder)
    assert report.changed == ["conv2d"]
    assert sizes(module) == [(16, 8), (16, 2), (16, 4)]
    after = targets(module)
    assert after.count("upsample_bilinear2d.vec") == 2
    assert "cat" not in after
    assert "batch_norm" not in after
    assert after[-2:] == ["add.Tensor", "relu"]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("corners", [False, True])
def test_ways_to_resize(mode: str, corners: bool) -> None:
    options = {"align_corners": corners} if mode in ("bilinear", "bicubic") else {}

    def function(m: Decoder, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        wide = F.interpolate(c, scale_factor=4, mode=mode, **options)
        return m.conv(torch.cat([a, F.interpolate(b, (8, 12), mode=mode, **options), wide], 1))

    module, report = run(function)
    assert report.changed == ["conv2d"]
    assert sizes(module) == [(16, 8), (16, 4), (16, 2)]


def test_one_image_alone() -> None:
    module, report = run(lambda m, a, b, c: m.single(bilinear(c)))
    assert report.changed == ["conv2d"]
    assert targets(module)[-2:] == ["conv2d", "upsample_bilinear2d.vec"]


def test_one_after_another() -> None:
    """What the first convolution gives is enlarged for the second."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(F.interpolate(self.first(F.interpolate(x, scale_factor=2.0)), scale_factor=3.0))

    model, x = Twice().eval().requires_grad_(False), images()[2]
    module = unlift(model, x)
    assert len(resize_after_convolution(module).changed) == 2
    drop_dead_code(module)
    close(module)
    assert_same(module(x), model(x), rtol=1e-5, atol=1e-5)


def test_what_is_not_enlarged_stays_together() -> None:
    module, _ = run(lambda m, a, b, c: m.conv(torch.cat([a, bilinear(c), a + 1], 1)), bias=False)
    assert sizes(module) == [(32, 8), (16, 2)]


def test_half_types_keep_their_batch_norm() -> None:
    module, report = run(decoder, torch.bfloat16)
    assert report.changed == ["conv2d"]
    assert "batch_norm" in targets(module)


def test_a_batch_that_varies() -> None:
    batch = Dim("batch")
    module, report = run(decoder, dynamic={"images": ({0: batch}, {0: batch}, {0: batch})})
    assert report.changed == ["conv2d"]
    assert module(*(x[:1].repeat(3, 1, 1, 1) for x in images())).shape == (3, 20, 8, 12)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, a, b, c: m.wide(bilinear(c)), "its kernel is not 1 x 1, or it has groups"),
        (lambda m, a, b, c: F.conv2d(bilinear(c), m.single.weight, stride=2), "it has a stride or padding"),
        (lambda m, a, b, c: F.conv2d(bilinear(c), m.single.weight * a.sum()), "the weight is computed"),
        (lambda m, a, b, c: m.single(F.interpolate(a, (8, 15))), "nothing before it is enlarged much"),
        (lambda m, a, b, c: (lambda y: m.single(y) + y.mean())(bilinear(c)), "nothing before it is enlarged much"),
        (lambda m, a, b, c: m.single(bilinear(c)).add_(1), "the model writes into its input or its result"),
    ],
)
def test_what_stays(function: Function, reason: str) -> None:
    _, report = run(function)
    assert not report.changed
    [said] = report.skipped.values()
    assert reason in said


def test_sizes_that_vary_stay() -> None:
    height = Dim("height", min=2, max=64)
    shapes = {"images": ({2: 2 * height}, {2: height}, None)}

    for function in (
        lambda m, a, b, c: m.single(F.interpolate(b, size=a.shape[2:])),
        lambda m, a, b, c: m.single(F.interpolate(b, scale_factor=2)) + a.mean(),
    ):
        _, report = run(function, dynamic=shapes)
        assert not report.changed
        assert list(report.skipped) == ["conv2d"]


def test_other_convolutions_are_not_looked_at() -> None:
    _, report = run(lambda m, a, b, c: m.single(a))
    assert report == PassReport("resize_after_convolution")


@pytest.mark.slow
def test_one_file(tmp_path: Path) -> None:
    model, args = Decoder(decoder).eval().requires_grad_(False), images()
    results, method = exported(model, args, tmp_path)
    assert_same(results, model(*args), rtol=1e-5, atol=1e-5)
    reports = {report.name: report for report in method.passes}
    assert reports["resize_after_convolution"].changed == ["conv2d"]
    assert len(reports["pack_convolutions"].changed) == 3
    assert any(" + " in chain for chain in reports["pack_convolutions"].changed), "the sum is one's residual"
