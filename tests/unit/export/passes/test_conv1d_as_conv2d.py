"""Tests of conv1d_as_conv2d: before, after, what stays and why; results are those of the graph on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_graphs import assert_same, close, targets, unlift
from torch import nn

from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.export.passes.conv1d_as_conv2d import conv1d_as_conv2d


class Raw(nn.Module):
    """aten.convolution itself, as in a decomposed program."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.weight, self.arguments = nn.Parameter(torch.randn(6, 4, 3)), arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.convolution.default(x, self.weight, None, *self.arguments)


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        (nn.Conv1d(4, 6, 3), "conv1d", "conv2d"),
        (nn.Conv1d(4, 6, 3, stride=2, padding=1), "conv1d", "conv2d"),
        (nn.Conv1d(4, 6, 3, padding="same", bias=False), "conv1d.padding", "conv2d.padding"),
        (nn.Conv1d(4, 6, 3, groups=2), "conv1d", "conv2d"),
        (Raw([2], [1], [1], False, [0], 1), "convolution", "convolution"),
    ],
)
def test_before_and_after(model: nn.Module, before: str, after: str) -> None:
    x = torch.randn(2, 4, 10)
    module = unlift(model, x, dynamic=({0: torch.export.Dim("batch", min=2, max=8)},))
    tensors = [t for t in targets(module) if t.startswith("self.")]
    assert targets(module) == [*tensors, before]
    report = conv1d_as_conv2d(module)
    close(module)
    assert targets(module) == [*tensors, "unsqueeze", "unsqueeze", after, "squeeze.dim"]
    assert len(report.changed) == 1
    assert_same(module(x), model(x), rtol=1e-5, atol=1e-5)
    result = module.graph.output_node().all_input_nodes[0].meta["val"]
    assert result.shape[1:] == model(x).shape[1:]


def test_the_new_dimension_has_size_one_in_every_argument() -> None:
    module = unlift(nn.Conv1d(4, 6, 3, stride=2, padding=1), torch.randn(2, 4, 10))
    conv1d_as_conv2d(module)
    [node] = [n for n in module.graph.nodes if n.target is torch.ops.aten.conv2d.default]
    assert node.args[3:] == ([1, 2], [0, 1], [1, 1], 1)


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (nn.Conv1d(4, 6, 3, dilation=2), (2, 4, 10), "it is dilated: Inductor has no Triton convolution for it"),
        (nn.Conv1d(4, 4, 3, groups=4), (2, 4, 10), "it is depthwise: Inductor has a Triton convolution for it as it is"),
        (nn.Conv1d(4, 6, 3), (4, 10), "the input has no batch dimension"),
        (
            Raw([1], [0], [1], True, [0], 1), (2, 6, 10),
            "it is transposed: Inductor has no Triton convolution for it",
        ),
        (nn.Conv2d(4, 6, 3), (2, 4, 10, 10), None),
        (nn.ConvTranspose1d(4, 6, 3), (2, 4, 10), None),
    ],
)  # fmt: skip
def test_what_stays(model: nn.Module, shape: tuple[int, ...], reason: str | None) -> None:
    module = unlift(model, torch.randn(shape))
    before = targets(module)
    report = conv1d_as_conv2d(module)
    assert targets(module) == before
    assert list(report.skipped.values()) == ([reason] if reason else [])


def test_it_is_for_cuda() -> None:
    for device, reason in (("cpu", "it is for cuda, and the method is for cpu"), ("cuda", None)):
        module = unlift(nn.Conv1d(4, 6, 3), torch.randn(2, 4, 10))
        [report] = [r for r in run_passes(module, ExportOptions(), device) if r.name == "conv1d_as_conv2d"]
        assert report.not_run == reason
        assert ("conv2d" in targets(module)) is (device == "cuda")
