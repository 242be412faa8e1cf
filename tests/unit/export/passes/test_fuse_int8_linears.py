"""The pass that gives int8 linear layers their epilogue: what is fused, what is not, and the exported file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.export.passes.pass_graphs import assert_same, close, exported, targets, unlift
from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.export.passes.calls import arguments_of
from untorch.export.passes.fuse_int8_linears import fuse_int8_linears
from untorch.ops.activations import ACTIVATIONS, activate
from untorch.ops.int8 import OPERATOR
from untorch.quant import quantize

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports


class Layer(nn.Module):
    """activation(linear(x)) + x, or a variant that cannot be fused whole."""

    def __init__(self, activation: str = "none", form: str = "residual") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.activation, self.form = nn.Linear(32, 32), activation, form
        quantize(self, "int8", progress=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z = activate(y, self.activation)
        match self.form:
            case "residual":
                return z + x
            case "read twice":
                return z * y
            case "broadcast":
                return z + x[:1]
            case "scaled":
                return torch.add(z, x, alpha=2)
        return z


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_residual(activation: str) -> None:
    model, x = Layer(activation), torch.randn(3, 32)
    module = unlift(model, x)
    report = fuse_int8_linears(module)
    close(module)
    [node] = [node for node in module.graph.nodes if node.target == OPERATOR]
    given = arguments_of(node)
    assert (given["activation"], given["residual"].name) == (activation, "x")
    assert len([node for node in module.graph.nodes if node.op == "call_function"]) == 1
    assert report.changed[0].startswith("int8_linear + ")
    assert_same(module(x), model(x), rtol=1e-5, atol=1e-5)
    assert fuse_int8_linears(module).changed == []  # once


@pytest.mark.parametrize(
    ("form", "activation", "residual"),
    [("read twice", "none", False), ("broadcast", "relu", False), ("scaled", "relu", False), ("alone", "silu", False)],
)
def test_what_is_fused_in_part(form: str, activation: str, residual: bool) -> None:
    model, x = Layer("silu" if form == "alone" else "relu", form), torch.randn(3, 32)
    module = unlift(model, x)
    fuse_int8_linears(module)
    close(module)
    [node] = [node for node in module.graph.nodes if node.target == OPERATOR]
    given = arguments_of(node)
    assert (given["activation"], given["residual"] is not None) == (activation, residual)
    assert_same(module(x), model(x), rtol=1e-5, atol=1e-5)


def test_it_runs_for_cpus_alone() -> None:
    module = unlift(Layer("relu"), torch.randn(3, 32))
    before = targets(module)
    reports = run_passes(module, ExportOptions(passes={"fuse_int8_linears": False}), "cpu", "forward", None)
    found = {report.name: report for report in reports}["fuse_int8_linears"]
    assert found.not_run == "it is switched off by the option passes"
    assert targets(module) == before


@pytest.mark.slow
def test_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 100), nn.GELU(), nn.Linear(100, 40), nn.ReLU(), nn.Linear(40, 24)).eval()
    x = torch.randn(5, 40)
    [got], report = exported(model, (x,), tmp_path, quantize="int8")
    quantised = model
    quantize(quantised, "int8", progress=False)
    assert_same(got, quantised(x).detach(), rtol=1e-5, atol=1e-5)
    assert report.quantization is not None
    assert [layer.names for layer in report.quantization.layers] == [("0",), ("2",), ("4",)]
    fused = {entry.name: entry.changed for entry in report.passes}["fuse_int8_linears"]
    assert fused == ["int8_linear + gelu", "int8_linear_1 + relu"]
    assert "aoti_torch_cpu_int8_linear" in report.operators
