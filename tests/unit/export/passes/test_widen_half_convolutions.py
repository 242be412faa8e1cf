"""The pass that computes convolutions of half types in float32: what belongs to it, what stays, and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.unit.export.passes.pass_graphs import close, unlift
from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.export.passes.widen_half_convolutions import widen_half_convolutions

BFLOAT16 = torch.bfloat16


class Net(nn.Module):
    """Two convolutions and a linear layer, with a function between the convolutions."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.linear = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.between(self.norm(self.first(x)))
        y = torch.relu(self.second(y))
        return self.linear(y.mean((2, 3)))


def widened(model: nn.Module, *args: torch.Tensor, dtype: torch.dtype = BFLOAT16) -> tuple[fx.GraphModule, list[str]]:
    module = unlift(model.to(dtype).eval(), *args)
    report = widen_half_convolutions(module)
    close(module)
    return module, report.changed


def conversions(module: fx.GraphModule) -> list[torch.dtype]:
    return [node.args[1] for node in module.graph.nodes if node.target == torch.ops.aten.to.dtype]  # type: ignore[misc]


def x_of(dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.randn(2, 4, 12, 12, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operators_between_convolutions(dtype: torch.dtype) -> None:
    # torch.export makes an alias of the last slice.
    model = Net(lambda y: torch.cat([torch.relu(y[:, :4]), y[:, 4:].sigmoid()], 1)[:, :8] * 2)
    module, changed = widened(model, x_of(dtype), dtype=dtype)
    # Into it once, and out of it once: the mean and the linear layer are in the half type.
    assert conversions(module) == [torch.float32, dtype]
    assert {name.rstrip("_0123456789") for name in changed} >= {"conv2d", "batch_norm", "cat", "sigmoid", "relu"}
    types = {node.name: node.meta["val"].dtype for node in module.graph.nodes if node.op == "call_function"}
    assert types["mean"] == types["linear"] == dtype
    with torch.no_grad():
        got = module(x_of(dtype))
        expected = model.float()(x_of(dtype).float())
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)


def test_activations_in_place() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.conv(x)).relu_()
            y = self.norm(self.conv(y))
            y += x
            return self.last(y.relu_())

    torch.manual_seed(0)
    model = Residual()
    module, changed = widened(model, x_of())
    assert conversions(module).count(torch.float32) == 1 and conversions(module)[-1] == BFLOAT16
    assert sum("relu" in name for name in changed) == 2 and any("add" in name for name in changed)
    with torch.no_grad():
        torch.testing.assert_close(module(x_of()).float(), model.float()(x_of().float()), rtol=2e-2, atol=2e-2)


def test_what_is_written_later_stays() -> None:
    """A view of a result is written, and the result is read again."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            y.view(-1).mul_(2)
            return self.second(y)

    torch.manual_seed(0)
    model = Written()
    module, changed = widened(model, x_of())
    assert changed == ["conv2d_1"]
    with torch.no_grad():
        torch.testing.assert_close(module(x_of()).float(), model.float()(x_of().float()), rtol=2e-2, atol=2e-2)


def test_a_stem_before_other_layers_stays_small() -> None:
    """What follows the last convolution, and no activation, is in the half type."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(4, 8, 4, 4), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x).flatten(2).transpose(1, 2)
            return y + self.linear(y)

    module, changed = widened(Stem(), x_of())
    assert changed == ["conv2d"] and conversions(module) == [torch.float32, BFLOAT16]


def test_an_activation_behind_views() -> None:
    """SegFormer's depthwise convolution: its result becomes tokens before GELU."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(nn.functional.gelu(self.conv(x).flatten(2).transpose(1, 2)))

    module, changed = widened(Tokens(), x_of())
    assert changed == ["conv2d", "gelu_default"]
    assert conversions(module) == [torch.float32, BFLOAT16]


def test_weights_become_float32_once() -> None:
    module, _ = widened(Net(), x_of())
    dtypes = {name: tensor.dtype for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    assert {dtypes[name] for name in dtypes if "linear" in name} == {BFLOAT16}
    assert all(dtype == torch.float32 for name, dtype in dtypes.items() if "linear" not in name and "num" not in name)


def test_float32_stays_as_it_is() -> None:
    module, changed = widened(Net(), x_of(torch.float32), dtype=torch.float32)
    assert changed == [] and conversions(module) == []


def test_it_runs_before_convolutions_are_packed() -> None:
    module = unlift(Net().to(BFLOAT16).eval(), x_of())
    reports: dict[str, Any] = {report.name: report for report in run_passes(module, ExportOptions())}
    assert len(reports["widen_half_convolutions"].changed) == 5
    packed = [node for node in module.graph.nodes if "packed_convolution" in str(node.target)]
    assert len(packed) == 2 and all(node.meta["val"].dtype == torch.float32 for node in packed)
    assert conversions(module) == [torch.float32, BFLOAT16]
