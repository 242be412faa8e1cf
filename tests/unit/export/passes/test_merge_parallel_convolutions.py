"""Tests of merge_parallel_convolutions: which sums become one convolution, and which stay; results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_graphs import assert_same, close, unlift
from torch import nn

from untorch.export.passes.merge_parallel_convolutions import merge_parallel_convolutions

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SIZES = (9, 8, 7)


def norm(channels: int, n: int = 2) -> nn.Module:
    made = NORMS[n](channels)
    with torch.no_grad():
        made.weight.uniform_(0.5, 1.5)
        made.bias.normal_()
        made.running_mean.normal_()
        made.running_var.uniform_(0.5, 1.5)
    return made.eval()


class Sum(nn.Module):
    """The sum of modules of one input, and an activation."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.parts[0](x)
        for part in list(self.parts)[1:]:
            total = total + part(x)
        return torch.relu(total)


def names(module: torch.fx.GraphModule) -> list[str]:
    return [
        node.target._schema.name.partition("::")[2] for node in module.graph.nodes if node.op == "call_function"
    ]  # fmt: skip


def merged(model: nn.Module, x: torch.Tensor, keep: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """The graph's operators and what the report says; results are compared."""
    model.eval().requires_grad_(False)
    module = unlift(model, x)
    report = merge_parallel_convolutions(module, keep)
    close(module)
    assert_same(module(x), model(x), rtol=1e-4, atol=1e-4)
    assert module(x).stride() == model(x).stride()
    return names(module), report.changed


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_blocks_of_repvgg(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 999)))
    n, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 8]))
    stride, dilation = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    parts: list[nn.Module] = []
    for kernel in [draw(st.sampled_from([3, 5])), *draw(st.lists(st.sampled_from([1, 3, 5]), min_size=1, max_size=3))]:
        step = 1 if kernel == 1 else dilation
        padding = step * (kernel - 1) // 2
        made = CONVOLUTIONS[n](8, 8, kernel, stride, padding, step, groups, bias=draw(st.booleans()))
        parts.append(nn.Sequential(made, norm(8, n)) if draw(st.booleans()) else made)
    if stride == 1 and draw(st.booleans()):
        parts.append(norm(8, n))
    parts = draw(st.permutations(parts))
    operators, changed = merged(Sum(*parts), torch.randn(2, 8, *SIZES[:n]))
    assert operators == [f"conv{n}d", "relu"]
    assert len(changed) == 1
    assert changed[0].count(" + ") == len(parts) - 1


def test_sums_in_place() -> None:
    class InPlace(nn.Module):
        """As timm writes it."""

        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8))
            self.small = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), norm(8))
            self.identity = norm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            identity = self.identity(x)
            out = self.small(x) + self.large(x)
            out += identity
            return torch.relu_(out)

    assert merged(InPlace(), torch.randn(2, 8, 9, 8))[0] == ["conv2d", "relu_"]


def test_a_sum_that_begins_with_zero() -> None:
    class Loop(nn.Module):
        """As MobileOne has it."""

        def __init__(self) -> None:
            super().__init__()
            self.identity, self.parts = norm(8), nn.ModuleList([conv(1, 0), conv(1, 0)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = 0 + self.identity(x)
            for part in self.parts:
                out += part(x)
            return torch.relu(out)

    assert merged(Loop(), torch.randn(2, 8, 9, 8))[0] == ["conv2d", "relu"]


def test_bfloat16_sums_weights_in_float64() -> None:
    model = Sum(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)).to(torch.bfloat16).eval().requires_grad_(False)
    module = unlift(model, torch.randn(2, 8, 9, 8, dtype=torch.bfloat16))
    merge_parallel_convolutions(module)
    (weight, _) = [value for name, value in module.named_buffers() if "merged" in name]
    large, small = (part.weight.double() for part in model.parts)  # type: ignore[union-attr, operator]
    large[:, :, 1, 1] += small[:, :, 0, 0]
    assert torch.equal(weight, large.to(torch.bfloat16))


class Broadcast(nn.Module):
    """The sum of two convolutions, and of a value for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = Sum(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.parts.parts
        return first(x) + second(x) + x.mean((2, 3), keepdim=True)


class Residual(nn.Module):
    """Something else is in the middle of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + x + self.second(x)


@pytest.mark.parametrize(
    ("model", "operators"),
    [
        (Broadcast(), ["mean", "conv2d", "add"]),
        (Residual(), ["conv2d", "add"]),
    ],
)
def test_the_rest_of_a_sum_stays(model: nn.Module, operators: list[str]) -> None:
    found, changed = merged(model, torch.randn(2, 8, 9, 8))
    assert sorted(found) == sorted(operators)
    assert len(changed) == 1


def conv(kernel: Any = 3, padding: Any = 1, **options: Any) -> nn.Module:
    return nn.Conv2d(8, 8, kernel, padding=padding, **options)


class TwoInputs(nn.Module):
    """The second convolution reads another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(), conv(1, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x * 2)


class ReadTwice(nn.Module):
    """One result is read elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(), conv(1, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(x)
        return (self.first(x) + y) * y


class Overwritten(nn.Module):
    """The input is overwritten between the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(), conv(1, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        y = self.first(x)
        x.relu_()
        return y + self.second(x)


class Twice(nn.Module):
    """One of the addends counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(), conv(1, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(self.first(x), self.second(x), alpha=2)


STAY: dict[str, Callable[[], nn.Module]] = {
    "two inputs": TwoInputs,
    "read twice": ReadTwice,
    "overwritten input": Overwritten,
    "a factor": Twice,
    "kernels that do not contain each other": lambda: Sum(conv((1, 3), (0, 1)), conv((3, 1), (1, 0))),
    "another place": lambda: Sum(conv(3, 0), nn.Sequential(nn.ZeroPad2d(-1), conv(1, 0))),
    "groups": lambda: Sum(conv(), conv(1, 0, groups=2)),
    "dilation": lambda: Sum(conv(5, 2), conv(3, 2, dilation=2)),
    "batch norm of the input alone, with a stride": lambda: nn.Sequential(conv(1, 0), Sum(norm(8), norm(8))),
    "a transposed one": lambda: Sum(conv(), nn.ConvTranspose2d(8, 8, 3, padding=1)),
    "one convolution and the input": lambda: Sum(conv(), nn.Identity()),
    "an even kernel": lambda: Sum(conv(3, 1), nn.Conv2d(8, 8, 2, padding="same")),
}


@pytest.mark.parametrize("case", STAY)
@pytest.mark.filterwarnings("ignore:Using padding=")
def test_what_stays(case: str) -> None:
    model = STAY[case]().eval()
    x = torch.randn(2, 8, 9, 8)
    before = names(unlift(model, x))
    found, changed = merged(model, x)
    assert (found, changed) == (before, [])


def test_kept_weights_stay() -> None:
    model = Sum(conv(), conv(1, 0), nn.Sequential(conv(), norm(8)))
    found, changed = merged(model, torch.randn(2, 8, 9, 8), ("parts.0.weight",))
    assert found.count("conv2d") == 2
    assert len(changed) == 1
    model = Sum(conv(), nn.Sequential(conv(1, 0), norm(8)))
    assert merged(model, torch.randn(2, 8, 9, 8), ("*.running_mean",))[1] == []
