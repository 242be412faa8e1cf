"""Tests of fuse_convolutions: what becomes one operator, what stays and why; results and strides stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_graphs import assert_same, close, unlift
from torch import nn

from untorch.export.passes.attributes import attribute
from untorch.export.passes.fuse_convolutions import fuse_convolutions
from untorch.ops.fused_convolution import OPERATOR


def calls(module: torch.fx.GraphModule) -> list[dict[str, Any]]:
    """The arguments of the fused calls, by name."""
    names = [argument.name for argument in OPERATOR._schema.arguments]
    return [
        dict(zip(names, node.args, strict=True))
        for node in module.graph.nodes
        if node.op == "call_function" and node.target is OPERATOR
    ]


def operators(module: torch.fx.GraphModule) -> list[str]:
    return [
        node.target._schema.name.partition("::")[2] for node in module.graph.nodes if node.op == "call_function"
    ]  # fmt: skip


def strides(module: torch.fx.GraphModule) -> list[tuple[int, ...]]:
    return [node.meta["val"].stride() for node in module.graph.output_node().all_input_nodes]


def batch_norm(channels: int, kind: type[nn.Module] = nn.BatchNorm2d, **options: Any) -> nn.Module:
    norm: Any = kind(channels, **options)
    with torch.no_grad():
        for tensor in (norm.weight, norm.running_var):
            if tensor is not None:
                tensor.uniform_(0.5, 1.5)
        for tensor in (norm.bias, norm.running_mean):
            if tensor is not None:
                tensor.normal_()
    return norm


class Residual(nn.Module):
    """relu(norm(conv(y)) + norm(conv(x))), in place as torchvision writes it."""

    def __init__(self, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), batch_norm(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(
            nn.Conv2d(8, 16, 3, stride, 1, groups=groups, bias=False), batch_norm(16)
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(8, 16, 1, stride, bias=False), batch_norm(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.second(self.first(x))
        out += self.shortcut(x)
        return torch.relu_(out)


CASES: dict[str, tuple[nn.Module, list[str]]] = {
    "relu": (nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), ["fused_convolution"]),
    "norm": (nn.Sequential(nn.Conv2d(8, 8, 3), batch_norm(8), nn.ReLU()), ["fused_convolution"]),
    "norm without factors": (
        nn.Sequential(nn.Conv2d(8, 8, 3), batch_norm(8, affine=False), nn.ReLU()), ["fused_convolution"],
    ),
    "residual": (Residual(), ["fused_convolution"] * 3),
    "grouped residual": (Residual(2, 4), ["fused_convolution"] * 3),
    "transposed": (
        nn.Sequential(nn.ConvTranspose2d(8, 6, 3, 2, 1, 1), nn.ReLU(), nn.Conv2d(6, 4, 1)), ["fused_convolution"] * 2,
    ),
    "transposed norm": (
        nn.Sequential(nn.ConvTranspose2d(8, 6, 2, 2), batch_norm(6), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.ReLU()),
        ["fused_convolution", "batch_norm", "relu", "fused_convolution"],
    ),
    "same padding": (nn.Sequential(nn.Conv2d(8, 8, 3, padding="same"), nn.ReLU()), ["fused_convolution"]),
    "depthwise": (
        nn.Sequential(nn.Conv2d(8, 8, 3, groups=8, bias=False), batch_norm(8), nn.SiLU()), ["fused_convolution"],
    ),
    "depthwise of any size": (
        nn.Sequential(nn.Conv2d(8, 8, (1, 9), dilation=(2, 1), groups=8), nn.Conv2d(8, 5, 1), nn.Conv2d(5, 5, 3, 3, groups=5)),
        ["fused_convolution"] * 3,
    ),
    "depthwise alone": (nn.Conv2d(8, 8, 7, padding=3, groups=8), ["fused_convolution"]),
    "silu behind a dense one": (
        nn.Sequential(nn.Conv2d(8, 8, 1), batch_norm(8), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.ReLU()),
        ["fused_convolution", "silu", "fused_convolution"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_follows_is_fused(case: str, layout: torch.memory_format) -> None:
    model, expected = CASES[case]
    model.eval().requires_grad_(False)
    x = torch.randn(2, 8, 11, 12).to(memory_format=layout)
    module = unlift(model, x, dynamic=({0: torch.export.Dim("batch", min=2, max=8)},))
    before = strides(module)
    report = fuse_convolutions(module)
    close(module)
    assert operators(module) == expected
    assert len(report.changed) == expected.count("fused_convolution")
    assert not report.skipped
    assert strides(module) == before
    got = module(x)
    assert_same(got, model(x), rtol=1e-4, atol=1e-4)
    assert got.stride() == model(x).stride()


@pytest.mark.parametrize("groups", [1, 4])
def test_volumes(groups: int) -> None:
    convolution = nn.Conv3d(4, 4, 3, groups=groups)
    model = nn.Sequential(convolution, batch_norm(4, nn.BatchNorm3d), nn.ReLU()).eval().requires_grad_(False)
    x = torch.randn(2, 4, 5, 6, 7)
    module = unlift(model, x)
    fuse_convolutions(module)
    close(module)
    assert operators(module) == ["fused_convolution"]
    assert_same(module(x), model(x), rtol=1e-4, atol=1e-4)


def test_arguments_and_stored_weights() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 4, (3, 5), (1, 2), (0, 1), (2, 1), groups=2, bias=False), nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.Hardswish(),
    ).eval()  # fmt: skip
    module = unlift(model, torch.randn(2, 8, 11, 12))
    fuse_convolutions(module)
    dense, depthwise = calls(module)
    assert [dense[name] for name in ("stride", "padding", "dilation", "output_padding", "groups", "activation")] == [
        [1, 2], [0, 1], [2, 1], [0, 0], 2, "relu",
    ]  # fmt: skip
    weight = attribute(module, str(dense["weight"].target))
    assert torch.equal(weight, model[0].weight.permute(0, 2, 3, 1))
    assert weight.is_contiguous()
    assert attribute(module, str(dense["bias"].target)).tolist() == [0.0] * 4  # cuDNN's compiled kernels have one
    assert depthwise["activation"] == "hardswish"
    assert torch.equal(attribute(module, str(depthwise["weight"].target)), model[2].weight[:, 0].permute(1, 2, 0))
    assert not hasattr(module, "0.weight")
    assert len(list(module.parameters())) == 0


def test_a_shared_weight_is_stored_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.conv(torch.relu(self.conv(x))))

    module = unlift(Shared(), torch.randn(2, 4, 5, 6))
    fuse_convolutions(module)
    first, second = calls(module)
    assert first["weight"] is second["weight"]
    assert first["bias"] is second["bias"]


def test_an_activation_behind_views_of_a_depthwise_convolution() -> None:
    class Tokens(nn.Module):
        """As SegFormer has it."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(self.conv(x).flatten(2).transpose(1, 2))

    model, x = Tokens(), torch.randn(2, 4, 5, 6)
    module = unlift(model, x)
    fuse_convolutions(module)
    close(module)
    assert operators(module) == ["fused_convolution", "flatten", "transpose"]
    assert calls(module)[0]["activation"] == "gelu"
    assert_same(module(x), model(x), rtol=1e-5, atol=1e-5)


class Twice(nn.Module):
    """Something else reads the convolution's result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.conv(x)
        return torch.relu(y), y


class Broadcast(nn.Module):
    """The other operand of the sum has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x) + x.mean((2, 3), keepdim=True))


class ReluFirst(nn.Module):
    """The sum is behind the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)) + x


class Written(nn.Module):
    """The residual is overwritten between the convolution and the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = x * 2
        y = self.conv(x)
        y = y + other
        other.zero_()
        return torch.relu(y) + other


@pytest.mark.parametrize(
    ("model", "fused", "left"),
    [
        (Twice(), 0, ["conv2d", "relu"]),
        (Broadcast(), 0, ["conv2d", "mean", "add", "relu"]),
        (ReluFirst(), 1, ["fused_convolution", "add"]),
        (Written(), 1, ["mul", "fused_convolution", "zero_", "relu", "add"]),
    ],
)
def test_what_cannot_be_fused_stays(model: nn.Module, fused: int, left: list[str]) -> None:
    x = torch.randn(2, 4, 5, 6)
    module = unlift(model.eval().requires_grad_(False), x)
    report = fuse_convolutions(module)
    close(module)
    assert len(report.changed) == fused
    assert operators(module) == left
    got, want = module(x), model(x)
    for each, expected in zip(got, want, strict=True):
        assert_same(each, expected, rtol=1e-5, atol=1e-5)


class Computed(nn.Module):
    """The weight depends on an input."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.conv2d(x, weight * 2))


SKIPPED: list[tuple[nn.Module, tuple[torch.Tensor, ...], str]] = [
    (nn.Sequential(nn.Conv2d(4, 4, 3), nn.GELU()), (torch.randn(1, 4, 8, 8),), "nothing follows that it could compute"),
    (nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU()), (torch.randn(1, 4, 8),), "it has one spatial dimension"),
    (nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()), (torch.randn(4, 8, 8),), "the input has no batch dimension"),
    (
        nn.Sequential(nn.Conv2d(4, 4, 2, padding="same"), nn.ReLU()), (torch.randn(1, 4, 8, 8),),
        "it pads one side more than the other (padding='same' of an even kernel)",
    ),
    (
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).double(), (torch.randn(1, 4, 8, 8).double(),),
        "input and weight are float64 and float64, expected float32, bfloat16 or float16",
    ),
    (
        Computed(), (torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3)),
        "the weight is computed, or the model writes into it: it is no constant",
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding=")
@pytest.mark.parametrize(("model", "args", "reason"), SKIPPED, ids=range(len(SKIPPED)))
def test_reasons(model: nn.Module, args: tuple[torch.Tensor, ...], reason: str) -> None:
    module = unlift(model.eval(), *args)
    report = fuse_convolutions(module)
    assert list(report.skipped.values()) == [reason]
    assert not calls(module)


def test_kept_weights_stay() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()).eval()
    module = unlift(model, torch.randn(1, 4, 8, 8))
    report = fuse_convolutions(module, ("0.weight",))
    assert list(report.skipped.values()) == ["keep_weights names its weight"]
    assert len(report.changed) == 1
