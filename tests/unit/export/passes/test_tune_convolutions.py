"""Tests of tune_convolutions, with a stand-in for the timing: what is timed, once, and what a call gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_graphs import close, unlift
from torch import nn

from untorch.export.passes import tune_convolutions as module_of_the_pass
from untorch.export.passes.fuse_convolutions import fuse_convolutions
from untorch.export.passes.tune_convolutions import tune_convolutions
from untorch.ops.fused_convolution import OPERATOR, Tuning


def plans(module: torch.fx.GraphModule) -> list[str]:
    return [node.args[-1] for node in module.graph.nodes if node.op == "call_function" and node.target is OPERATOR]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The shapes and other arguments that are timed; the weights count as lying on a GPU."""
    calls: list[tuple[Any, ...]] = []

    def tune(*arguments: Any) -> Tuning:
        x, weight, bias, residual, *rest = arguments
        assert x.is_contiguous(memory_format=torch.channels_last)
        calls.append(([None if t is None else list(t.shape) for t in (x, weight, bias, residual)], *rest))
        return Tuning(f"plan {len(calls)}" if rest[-2] == "relu" else "", 9.04, 7.0)

    monkeypatch.setattr(module_of_the_pass, "tune", tune)
    monkeypatch.setattr(module_of_the_pass, "_gpu_of", lambda value: torch.device("cpu"))
    return calls


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x))
        x = torch.relu(self.third(x) + x)
        return self.last(self.depthwise(x))


def test_each_problem_is_timed_once(timed: list[tuple[Any, ...]]) -> None:
    dynamic = ({0: torch.export.Dim("batch", min=1, max=8)},)
    module = unlift(Model(), torch.randn(2, 8, 6, 5), dynamic=dynamic)
    fuse_convolutions(module)
    report = tune_convolutions(module)
    close(module)
    lists = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    image = [2, 8, 6, 5]
    tf32 = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    assert timed == [
        ([image, [8, 3, 3, 8], [8], None], *lists, "relu", tf32),
        ([image, [8, 3, 3, 8], [8], image], *lists, "relu", tf32),
        ([image, [4, 1, 1, 8], [4], None], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, "none", tf32),
    ]
    assert plans(module) == ["plan 1", "plan 1", "plan 2", "", ""]
    assert report.changed == [
        "fused_convolution_default: 9.0 to 7.0 µs", "fused_convolution_default_1: 9.0 to 7.0 µs",
        "fused_convolution_default_2: 9.0 to 7.0 µs",
    ]  # fmt: skip
    assert list(report.skipped.values()) == [
        "it is depthwise: its kernel is not cuDNN's", "cuDNN has one algorithm for it",
    ]  # fmt: skip
    x = torch.randn(3, 8, 6, 5)
    torch.testing.assert_close(module(x).shape, (3, 4, 6, 5))


def test_without_a_gpu_nothing_is_timed() -> None:
    module = unlift(Model(), torch.randn(2, 8, 6, 5))
    fuse_convolutions(module)
    report = tune_convolutions(module)
    assert not report.changed
    assert set(report.skipped.values()) == {
        "there is no GPU to time it on", "it is depthwise: its kernel is not cuDNN's",
    }  # fmt: skip
    assert plans(module) == [""] * 5
