"""Convolutions that PT2E quantised: what becomes int8_convolution, which values are bytes, what stays, and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators that convert_pt2e leaves
import torch.nn.functional as F
from torch import fx, nn

from tests.unit.export.passes.pass_graphs import close, exported, targets, unlift
from untorch.export.passes.calls import arguments_of
from untorch.export.passes.serve_pt2e_convolutions import serve_pt2e_convolutions
from untorch.ops.byte_max_pool import OPERATOR as POOL
from untorch.ops.int8_convolution import OPERATOR
from untorch.quant import quantize_int8

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports

Q = torch.ops.quantized_decomposed
X = torch.randn(2, 3, 12, 12)


def between(x: torch.Tensor, scale: float, zero: int, signed: bool) -> torch.Tensor:
    """Quantised and dequantised, as the quantiser writes it: X86's in uint8, XNNPACK's in int8."""
    how = (scale, zero - 128, -128, 127, torch.int8) if signed else (scale, zero, 0, 255, torch.uint8)
    y: torch.Tensor = Q.dequantize_per_tensor.default(Q.quantize_per_tensor.default(x, *how), *how)
    return y


class Quantised(nn.Module):
    """A convolution with an int8 weight, dequantised."""

    def __init__(self, channels: int, out: int, size: int, groups: int = 1, **how: Any) -> None:
        super().__init__()
        weight = torch.randn(out, channels // groups, size, size) / size
        values, scales = quantize_int8(weight.flatten(1))
        self.register_buffer("values", values.reshape(weight.shape))
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.zeros(out, dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(out))
        self.groups, self.how = groups, how

    def forward(self, x: torch.Tensor, zero: int = 0) -> torch.Tensor:
        weight = Q.dequantize_per_channel.default(self.values, self.scales, self.zeros + zero, 0, -128, 127, torch.int8)
        return F.conv2d(x, weight, self.bias, groups=self.groups, **self.how)


class Block(nn.Module):
    """A stem with pooling, a residual sum with a projection, a depthwise layer, and a reader in floating point."""

    def __init__(self, signed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.signed = signed
        self.stem = Quantised(3, 16, 3, padding=1)
        self.first, self.projection = Quantised(16, 32, 3, padding=1, stride=2), Quantised(16, 32, 1, stride=2)
        self.depthwise = Quantised(32, 32, 3, groups=32, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = between(x, 0.03, 120, self.signed)
        x = between(F.relu(self.stem(x)), 0.03, 0, self.signed)
        x = between(F.max_pool2d(x, 2), 0.03, 0, self.signed)
        other = between(self.projection(x), 0.08, 128, self.signed)
        x = between(F.relu(self.first(x) + other), 0.08, 0, self.signed)
        y: torch.Tensor = self.depthwise(x)
        return y.mean((2, 3)) + x.mean((2, 3))


def calls(module: fx.GraphModule, target: Any = OPERATOR) -> list[dict[str, Any]]:
    return [arguments_of(node) for node in module.graph.nodes if node.target == target]


@pytest.mark.parametrize("signed", [False, True])
def test_a_chain_of_bytes(signed: bool) -> None:
    model = Block(signed).eval()
    want = model(X)
    module = unlift(model, X)
    report = serve_pt2e_convolutions(module)
    close(module)
    assert len(report.changed) == 4
    assert report.skipped == {}
    stem, projection, first, depthwise = calls(module)
    assert stem["activation"] == "relu"
    assert (stem["output_scale"], stem["output_zero"]) == (0.03, 0)
    assert len(calls(module, POOL)) == 1
    assert (projection["output_scale"], projection["output_zero"]) == (0.08, 128)
    assert (first["residual_scale"], first["residual_zero"]) == (0.08, 128)
    assert first["residual_first"]
    assert first["residual"].target == OPERATOR
    assert (first["output_scale"], depthwise["output_scale"]) == (0.08, 0.0)
    assert (depthwise["padding"], depthwise["input_scale"]) == ([1, 1], 0.08)
    assert not any("conv2d" in name for name in targets(module))
    # Values between two steps may round differently.
    assert (module(X) - want).norm() < 0.01 * want.norm()


class Left(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.form = Quantised(3, 16, 2 if form == "uneven" else 3), form
        if form == "uneven":
            self.conv.how = {"padding": "same"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "seven bits":
            how = (0.03, 60, 0, 127, torch.uint8)
            x = Q.dequantize_per_tensor.default(Q.quantize_per_tensor.default(x, *how), *how)
        elif self.form != "weight alone":
            x = between(x, 0.03, 120, False)
        y: torch.Tensor = self.conv(x, int(self.form == "zero points"))
        return y


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("seven bits", "its activations have the range 0 to 127, expected 0 to 255 or -128 to 127"),
        ("weight alone", "its activations are not quantised with a range for the whole tensor"),
        ("zero points", "its weight has zero points, expected a symmetric range"),
        ("uneven", "it pads one side more than the other (padding='same' of an even kernel)"),
    ],
)
def test_what_stays_is_in_the_report(form: str, reason: str) -> None:
    module = unlift(Left(form), X)
    report = serve_pt2e_convolutions(module)
    assert report.changed == []
    assert list(report.skipped.values()) == [f"it is computed in floating point: {reason}"]
    assert not calls(module)


class Transposed(nn.Module):
    """conv_transpose2d of an int8 weight, with an activation and the quantising operator behind it."""

    def __init__(self, kernel: tuple[int, int], by_output: bool, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("values", torch.randint(-127, 128, (3, 5, *kernel), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(5) / 100)
        self.register_buffer("zeros", torch.zeros(5, dtype=torch.int64))
        self.bias, self.by_output, self.how = nn.Parameter(torch.randn(5)), by_output, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_output:
            given = self.values, self.scales, self.zeros, 1, -127, 127, torch.int8
            weight = Q.dequantize_per_channel.default(*given)
        else:
            weight = Q.dequantize_per_tensor.default(self.values, 0.01, 0, -127, 127, torch.int8)
        y = F.conv_transpose2d(between(x, 0.03, 120, True), weight, self.bias, **self.how)
        return between(F.relu(y), 0.05, 0, True)


@pytest.mark.parametrize(
    ("kernel", "how"),
    [
        ((2, 2), {"stride": 2}),
        ((3, 3), {"stride": 2, "padding": 1}),
        ((4, 1), {"stride": (2, 3), "padding": (1, 0)}),
        ((5, 3), {"stride": (3, 1), "padding": (2, 1), "output_padding": (1, 0)}),
    ],
)
def test_transposed(kernel: tuple[int, int], how: dict[str, Any]) -> None:
    """Windows that touch, overlap, and lie apart."""
    model, x = Transposed(kernel, kernel[0] != 3, **how), torch.randn(2, 3, 5, 7)
    module = unlift(model, x)
    report = serve_pt2e_convolutions(module)
    close(module)
    assert report.skipped == {}
    [given] = calls(module)
    assert (given["activation"], given["output_scale"]) == ("relu", 0.05)
    assert not any("transpose" in name for name in targets(module))
    want, got = model(x), module(x)
    assert (got - want).abs().max() <= 0.0501
    assert ((got - want).abs() > 0.01).float().mean() < 0.01


def test_transposed_that_stays() -> None:
    for how, reason in (
        ({"stride": 2, "dilation": 2}, "with groups or dilation"),
        ({"stride": 4, "output_padding": 3}, "with more output padding than its kernel covers"),
    ):
        module = unlift(Transposed((3, 3), True, **how), torch.randn(2, 3, 5, 7))
        report = serve_pt2e_convolutions(module)
        assert list(report.skipped.values()) == [f"it is computed in floating point: it is transposed, {reason}"]


class Line(nn.Module):
    """A chain of 1-D convolutions; the first one's range may be dynamic."""

    def __init__(self, dynamic: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Quantised(3, 16, 3, padding=1), Quantised(16, 8, 3, stride=2)
        for layer in (self.first, self.second):
            layer.values = layer.values[..., 1].contiguous()
        self.dynamic = dynamic

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dynamic:
            scale, zero = Q.choose_qparams.tensor(x, -128, 127, 1e-6, torch.int8)
            how = scale, zero, -128, 127, torch.int8
            x = Q.dequantize_per_tensor.tensor(Q.quantize_per_tensor.tensor(x, *how), *how)
        else:
            x = between(x, 0.03, 120, True)
        for layer in (self.first, self.second):
            weight = Q.dequantize_per_channel.default(layer.values, layer.scales, layer.zeros, 0, -128, 127, torch.int8)
            x = between(F.relu(F.conv1d(x, weight, layer.bias, **layer.how)), 0.03, 0, True)
        return x


@pytest.mark.parametrize("dynamic", [False, True])
def test_lines(dynamic: bool) -> None:
    model, x = Line(dynamic), torch.randn(2, 3, 20)
    module = unlift(model, x)
    report = serve_pt2e_convolutions(module)
    close(module)
    assert (report.changed, report.skipped) == (["conv1d", "conv1d_1"], {})
    first, second = calls(module)
    assert (first["input_range"], second["input_range"]) == ("tensor" if dynamic else "static", "static")
    assert [given["output_scale"] for given in (first, second)] == [0.03, 0.03]
    assert second["x"].meta["val"].dtype == torch.uint8
    want, got = model(x), module(x)
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 0.0601
    assert ((got - want).abs() > 0.01).float().mean() < 0.02


class Readers(nn.Module):
    """Results that must not become bytes, or not with what follows in the epilogue."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.form = Quantised(3, 16, 3), form

    def forward(self, x: torch.Tensor) -> Any:
        y = self.conv(between(x, 0.03, 120, False))
        match self.form:
            case "read twice":
                return between(y, 0.05, 128, False), y
            case "other range":
                return between(F.max_pool2d(between(y, 0.05, 128, False), 2), 0.04, 128, False)
            case "two activations":
                return F.hardswish(F.relu(y))
        raise AssertionError(self.form)


@pytest.mark.parametrize("form", ["read twice", "other range", "two activations"])
def test_what_is_not_fused(form: str) -> None:
    model = Readers(form).eval()
    module = unlift(model, X)
    serve_pt2e_convolutions(module)
    close(module)
    [given] = calls(module)
    assert not calls(module, POOL)
    assert (given["output_scale"] > 0) == (form == "other range")
    got, want = module(X), model(X)
    for a, b in zip(
        got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
    ):
        assert (a - b).norm() < 0.01 * b.norm()


@pytest.mark.slow
def test_the_file(tmp_path: Path) -> None:
    model = Block().eval()
    [got], report = exported(model, (X,), tmp_path)
    want = model(X)
    assert (got - want).norm() < 0.01 * want.norm()
    passes = {entry.name: entry for entry in report.passes}
    assert len(passes["serve_pt2e_convolutions"].changed) == 4
    assert passes["serve_pt2e_linears"].skipped == {} or not any(
        "conv" in name for name in passes["serve_pt2e_linears"].skipped
    )
    assert "aoti_torch_cpu_untorch_int8_convolution" in report.operators
    assert "aoti_torch_cpu_untorch_byte_max_pool" in report.operators
