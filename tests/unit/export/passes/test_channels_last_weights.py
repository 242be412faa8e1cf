"""Tests of channels_last_weights: which weights are stored anew, what stays and why; results stay the same."""

from __future__ import annotations

import pytest
import torch
from pass_graphs import assert_same, close, unlift
from torch import nn

from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.export.passes.attributes import attribute
from untorch.export.passes.channels_last_weights import channels_last_weights
from untorch.export.passes.conv1d_as_conv2d import conv1d_as_conv2d
from untorch.ops.channels_last_weight import OPERATOR


def stored(module: torch.fx.GraphModule) -> list[torch.Tensor]:
    """The weights of the graph's convolutions that are stored channels last."""
    return [
        attribute(module, str(node.args[1].args[0].target))
        for node in module.graph.nodes
        if node.op == "call_function" and "conv" in str(node.target) and node.args[1].target is OPERATOR
    ]


def convolutions(module: torch.fx.GraphModule) -> int:
    return sum("conv" in str(node.target) for node in module.graph.nodes if node.op == "call_function")


def strides(module: torch.fx.GraphModule) -> list[tuple[int, ...]]:
    return [node.meta["val"].stride() for node in module.graph.output_node().all_input_nodes]


@pytest.mark.parametrize(
    "model",
    [
        nn.Conv2d(4, 6, 3),
        nn.Conv2d(4, 6, 3, padding="same", bias=False),
        nn.ConvTranspose2d(4, 6, 2, stride=2),
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)),
    ],
)
def test_a_constant_weight_is_stored_channels_last(model: nn.Module) -> None:
    x = torch.randn(2, 4, 10, 12)
    module = unlift(model, x, dynamic=({0: torch.export.Dim("batch", min=2, max=8)},))
    before = strides(module)
    report = channels_last_weights(module)
    close(module)
    assert len(report.changed) == len(stored(module)) == convolutions(module)
    assert strides(module) == before
    assert_same(module(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_shared_weight_is_stored_once_and_its_other_uses_stay() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.conv(self.conv(x)), self.conv.weight * 2

    model, x = Shared(), torch.randn(2, 4, 5, 6)
    module = unlift(model, x)
    report = channels_last_weights(module)
    close(module)
    first, second = stored(module)
    assert first is second
    assert len(report.changed) == 2
    for got, expected in zip(module(x), model(x), strict=True):
        assert_same(got, expected, rtol=1e-5, atol=1e-5)
        assert got.stride() == expected.stride()


def test_the_operator() -> None:
    torch.library.opcheck(OPERATOR, (torch.randn(6, 3, 2, 4),))
    weight = torch.randn(6, 4, 3, 2)
    assert torch.equal(OPERATOR(weight.permute(0, 2, 3, 1).contiguous()), weight)


def test_a_1d_convolution_that_became_an_image() -> None:
    model, x = nn.Conv1d(4, 6, 3), torch.randn(2, 4, 10)
    module = unlift(model, x)
    conv1d_as_conv2d(module)
    assert len(channels_last_weights(module).changed) == 1
    close(module)
    assert [weight.shape for weight in stored(module)] == [(6, 1, 3, 4)]
    assert_same(module(x), model(x), rtol=1e-5, atol=1e-5)


class Computed(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, weight * 2)


def test_a_computed_weight_stays() -> None:
    module = unlift(Computed(), torch.randn(2, 4, 5, 6), torch.randn(6, 4, 3, 3))
    report = channels_last_weights(module)
    assert list(report.skipped.values()) == ["the weight is computed, not a constant"]
    assert not report.changed


@pytest.mark.parametrize("model", [nn.Conv2d(4, 6, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv3d(4, 6, 3)])
def test_what_is_the_same_in_both_layouts_stays(model: nn.Module) -> None:
    module = unlift(model, torch.randn(2, 4, 5, *[6] * (model.weight.dim() - 3)))
    report = channels_last_weights(module)
    assert not report.changed
    assert not report.skipped


def test_grouped_convolutions_keep_the_graph_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 6, 3, groups=2))
    module = unlift(model, torch.randn(2, 4, 9, 9))
    report = channels_last_weights(module)
    assert not report.changed
    assert set(report.skipped.values()) == {
        "the graph has a grouped convolution (conv2d_1), for which Inductor chooses the layout"
    }


@pytest.mark.parametrize(("device", "options", "runs"), [("cuda", {}, True), ("cpu", {}, False),
                                                         ("cuda", {"channels_last_weights": False}, False)])  # fmt: skip
def test_it_is_for_cuda_and_has_a_switch(device: str, options: dict[str, bool], runs: bool) -> None:
    module = unlift(nn.Conv2d(4, 6, 3), torch.randn(2, 4, 5, 6))
    reports = {report.name: report for report in run_passes(module, ExportOptions(passes=options), device)}
    assert (reports["channels_last_weights"].not_run is None) is runs
    assert bool(stored(module)) is runs
