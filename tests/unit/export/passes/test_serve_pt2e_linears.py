"""Linear layers that PT2E quantised: which become int8_linear, which stay and why, and the exported file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators that convert_pt2e leaves
from torch import nn

from tests.unit.export.passes.pass_graphs import assert_same, close, exported, targets, unlift
from untorch.export.passes.serve_pt2e_linears import serve_pt2e_linears
from untorch.quant import quantize_int8

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports

Q = torch.ops.quantized_decomposed
STATIC = (0.03, 120, 0, 255, torch.uint8)


class Layer(nn.Module):
    """linear(quantise and dequantise x, dequantise the weight), as convert_pt2e writes it."""

    def __init__(self, form: str = "static") -> None:
        super().__init__()
        torch.manual_seed(0)
        values, scales = quantize_int8(torch.randn(40, 24))
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.zeros(40, dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(40))
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        static: tuple[Any, ...] = STATIC
        match self.form:
            case "int8":
                static = (0.03, -8, -128, 127, torch.int8)
            case "seven bits":
                static = (0.03, 60, 0, 127, torch.uint8)
        if "dynamic" in self.form:
            ranged = x if self.form == "dynamic" else x * 2
            scale, zero = Q.choose_qparams.tensor(ranged, 0, 255, 1e-6, torch.uint8)
            x = Q.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
            x = Q.dequantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
        elif self.form != "weight":
            x = Q.quantize_per_tensor.default(x, *static)
            x = Q.dequantize_per_tensor.default(x, *static)
        zeros = self.zeros + 1 if self.form == "zero points" else self.zeros
        values = self.values.abs() if self.form == "computed" else self.values
        if self.form == "sum":
            return torch.relu(x)
        if self.form == "one scale":
            weight = Q.dequantize_per_tensor.default(values, 0.02, 0, -128, 127, torch.int8)
        elif self.form == "float weight":
            weight = values * self.scales.unsqueeze(1)
        else:
            weight = Q.dequantize_per_channel.default(values, self.scales, zeros, 0, -128, 127, torch.int8)
        return nn.functional.linear(x, weight, self.bias)


@pytest.mark.parametrize("form", ["static", "int8", "one scale", "computed", "dynamic"])
def test_it_becomes_one_product_of_integers(form: str) -> None:
    model, x = Layer(form), torch.randn(5, 24) * 3
    module = unlift(model, x)
    report = serve_pt2e_linears(module)
    close(module)
    module.graph.eliminate_dead_code()
    assert report.changed == ["linear"]
    assert report.skipped == {}
    calls = [name for name in targets(module) if not name.startswith("self.")]
    assert [name for name in calls if name != "_assert_tensor_metadata"] == ["untorch.int8_linear"]
    # What is quantised may round differently where a value lies between two steps.
    assert_same(module(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("another dynamic", "its activations have a dynamic range that choose_qparams does not give"),
        ("weight", "its activations are not quantised with a range for the whole tensor"),
        ("seven bits", "its activations have the range 0 to 127, expected 0 to 255 or -128 to 127"),
        ("zero points", "its weight has zero points, expected a symmetric range"),
        ("float weight", "its weight is not quantised"),
        ("sum", "only linear layers and convolutions are computed in integers"),
    ],
)
def test_what_stays_is_in_the_report(form: str, reason: str) -> None:
    model, x = Layer(form), torch.randn(5, 24)
    module = unlift(model, x)
    before = targets(module)
    report = serve_pt2e_linears(module)
    assert report.changed == []
    [(name, text)] = report.skipped.items()
    assert name == ("relu" if form == "sum" else "linear")
    assert text.startswith(f"it is computed in floating point: {reason}")
    assert targets(module) == before


def test_a_graph_without_quantisation_is_left_alone() -> None:
    module = unlift(nn.Linear(8, 16), torch.randn(2, 8))
    report = serve_pt2e_linears(module)
    assert (report.changed, report.skipped) == ([], {})


@pytest.mark.slow
def test_the_file(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(), Layer("weight")

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.relu(self.first(x)), self.second(x)

    model, x = Two().eval(), torch.randn(3, 24)
    got, report = exported(model, (x,), tmp_path)
    assert_same(got, list(model(x)), rtol=1e-4, atol=1e-4)
    passes = {entry.name: entry for entry in report.passes}
    assert passes["serve_pt2e_linears"].changed == ["linear"]
    assert list(passes["serve_pt2e_linears"].skipped) == ["linear_1"]
    assert passes["fuse_int8_linears"].changed == ["int8_linear_default + relu"]
    assert "aoti_torch_cpu_int8_linear" in report.operators
