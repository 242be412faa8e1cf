"""Tests of compose_linears: before, after, what stays and why; results are those of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import fx, nn
from torch.export import Dim

from untorch.export.passes import PassReport
from untorch.export.passes.compose_linears import compose_linears
from untorch.export.passes.drop_dead_code import drop_dead_code

Function = Callable[..., Any]


class Layers(nn.Module):
    """``function`` of a sequence [2, 12, 8]: 12 positions of 8 channels, which are an image of 3 x 4 pixels, too."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.wide = nn.Linear(8, 32)
        self.plain = nn.Linear(8, 32, bias=False)
        self.tied = nn.Linear(8, 32)
        self.tied.weight = self.wide.weight
        self.narrow = nn.Linear(8, 4)
        self.one = nn.Linear(1, 1)
        self.of_one = nn.Conv2d(1, 3, 1)
        self.back = nn.Linear(4, 8)
        self.again = nn.Linear(32, 32)
        self.other = nn.Linear(32, 32, bias=False)
        self.image = nn.Conv2d(32, 24, 1)
        self.image_wide = nn.Conv2d(8, 32, 1)
        self.image_3 = nn.Conv2d(32, 24, 3, padding=1)
        self.groups = nn.Conv2d(32, 32, 1, groups=2)
        self.strided = nn.Conv2d(32, 24, 1, stride=2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def example(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def run(
    function: Function, dtype: torch.dtype = torch.float32, dynamic: Any = None, keep: tuple[str, ...] = ()
) -> tuple[fx.GraphModule, PassReport]:
    model, x = Layers(function).to(dtype).eval().requires_grad_(False), example(dtype)
    module = unlift(model, x, dynamic=dynamic)
    report = compose_linears(module, keep)
    drop_dead_code(module)
    close(module)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for size in (2,) if dynamic is None else (2, 5):
        given = x.repeat(3, 1, 1)[:size]
        assert_same(module(given), model(given), rtol=tolerance, atol=tolerance)
    return module, report


def to_image(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], -1, 3, 4)


def layers(module: fx.GraphModule) -> list[str]:
    return [name for name in targets(module) if name in ("linear", "conv2d")]


CHAINS = [
    (lambda m, x: m.again(m.wide(x)).relu(), "linear"),
    (lambda m, x: m.other(m.wide(x)).relu(), "linear"),
    (lambda m, x: m.again(m.plain(x)).relu(), "linear"),
    (lambda m, x: m.other(m.plain(x)).relu(), "linear"),
    (lambda m, x: m.again(m.wide(x).view(-1, 3, 4, 32)).relu(), "linear"),
    (lambda m, x: m.again(m.wide(x).flatten(0, 1)).relu(), "linear"),
    (lambda m, x: m.again(m.wide(x).unsqueeze(1).transpose(1, 2)).relu(), "linear"),
    (lambda m, x: m.again(m.wide(x)), "linear"),
    (lambda m, x: m.again(m.wide(x)).view(-1, 3, 4, 32).transpose(1, 2), "linear"),
    (lambda m, x: m.image(to_image(m.wide(x))).relu(), "linear"),
    (lambda m, x: m.image(m.wide(x).permute(0, 2, 1).view(-1, 32, 3, 4)).relu(), "linear"),
    (lambda m, x: m.image(m.wide(x).view(-1, 3, 4, 32).permute(0, 3, 1, 2).contiguous()).relu(), "linear"),
    (lambda m, x: m.image(m.image_wide(to_image(x))).relu(), "conv2d"),
    (lambda m, x: m.again(m.image_wide(to_image(x)).flatten(2).transpose(1, 2)).relu(), "conv2d"),
]


@pytest.mark.parametrize(("function", "left"), CHAINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_layers_become_one(function: Function, left: str, dtype: torch.dtype) -> None:
    module, report = run(function, dtype)
    assert layers(module) == [left] and len(report.changed) == 1 and not report.skipped
    (weight,) = [node for node in module.graph.nodes if str(node.target).endswith("composed_weight")]
    assert weight.meta["val"].dtype == dtype == getattr(module, weight.target).dtype


def test_three_layers_become_one() -> None:
    module, report = run(lambda m, x: m.image(to_image(m.other(m.wide(x)))).relu())
    assert layers(module) == ["linear"] and len(report.changed) == 2


def test_sizes_may_vary() -> None:
    for function in (lambda m, x: m.image(to_image(m.wide(x))).relu(), lambda m, x: m.again(m.wide(x)).relu()):
        module, _ = run(function, dynamic=({0: Dim("batch", min=2, max=64)},))
        assert layers(module) == ["linear"]


UNRELATED = [
    lambda m, x: m.again(m.wide(x).relu()),
    lambda m, x: m.again(m.wide(x)[:, :1].squeeze(1)).relu(),
    lambda m, x: m.image_3(to_image(m.wide(x))).relu(),
    lambda m, x: m.groups(to_image(m.wide(x))).relu(),
    lambda m, x: m.of_one(m.one(x.mean((1, 2))[:, None]).unsqueeze(1).unsqueeze(3)).relu(),
    lambda m, x: m.strided(to_image(m.wide(x))).relu(),
    lambda m, x: (y := m.wide(x), m.again(y).relu() + y)[1],
    lambda m, x: (y := to_image(m.wide(x)), m.image(y).relu(), y.relu())[1:],
    lambda m, x: m.again(m.wide(x).view(-1, 32, 12).transpose(1, 2)).relu(),  # 32 again, but others
    lambda m, x: m.again(m.wide(x).view(-1, 32)[:, None].view(2, 2, 6, 32).flip(3)).relu(),
]


@pytest.mark.parametrize("function", UNRELATED)
def test_what_is_between_others_stays(function: Function) -> None:
    module = unlift(Layers(function).eval().requires_grad_(False), example())
    before = layers(module)
    report = compose_linears(module)
    assert layers(module) == before and not report.changed and not report.skipped


ELSEWHERE = "a weight is used elsewhere, too: it would be stored as well"
SEEN = "its strides are seen: its result is one of the model's, or viewed"


@pytest.mark.parametrize(
    ("function", "keep", "reason"),
    [
        (lambda m, x: m.back(m.narrow(x)).relu(), (), "one layer would be as much work as both"),
        (lambda m, x: m.again(m.wide(x)).relu(), ("wide",), "the option keep_weights names one of the weights"),
        (lambda m, x: m.again(m.wide(x)).relu(), ("again.weight",), "the option keep_weights names one of the weights"),
        (lambda m, x: m.image(to_image(m.wide(x))), (), SEEN),
        (lambda m, x: m.image(to_image(m.wide(x))).flatten(2).relu(), (), SEEN),
        (lambda m, x: m.again(m.wide(x).transpose(0, 1)), (), SEEN),
        (lambda m, x: torch.nn.functional.linear(m.wide(x), m.again.weight * x.sum()).relu(), (),
         "a weight or bias is computed, or the model writes into it: it is no constant"),
        (lambda m, x: m.again(m.wide(x)).relu() + m.wide.weight.sum(), (), ELSEWHERE),
        (lambda m, x: m.again(m.wide(x)).relu() + m.again(m.tied(x).relu()), (), ELSEWHERE),
        (lambda m, x: m.again(m.wide(x).add_(1)).relu(), (), None),
        (lambda m, x: (y := m.wide(x), z := m.again(y.view(2, 12, 32)), y.add_(1), z.relu())[3], (), None),
    ],
)  # fmt: skip
def test_reasons(function: Function, keep: tuple[str, ...], reason: str | None) -> None:
    model, x = Layers(function).eval().requires_grad_(False), example()
    module = unlift(model, x)
    before = layers(module)
    report = compose_linears(module, keep)
    assert layers(module) == before
    assert list(report.skipped.values()) == ([reason] if reason else [])


@pytest.mark.slow
def test_an_exported_file_has_one_layer(tmp_path: Path) -> None:
    model, x = Layers(lambda m, x: m.image(to_image(m.wide(x))).relu() + 1), example()
    (got,), report = exported(model, (x,), tmp_path)
    assert_same(torch.as_tensor(got), model(x), rtol=1e-5, atol=1e-5)
    (found,) = [entry for entry in report.passes if entry.name == "compose_linears"]
    assert len(found.changed) == 1
    _, report = exported(model, (x,), tmp_path, keep_weights="wide")
    (found,) = [entry for entry in report.passes if entry.name == "compose_linears"]
    assert not found.changed and len(found.skipped) == 1
