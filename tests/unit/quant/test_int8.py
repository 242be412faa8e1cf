"""int8 weights: rounding, ``Int8Linear``, and ``quantize`` with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from untorch.quant import Int8Linear, quantize, quantize_int8, unpack_int8
from untorch.quant.int8 import int8_error
from untorch.runtime.errors import InvalidArgumentError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.tiny = nn.Linear(96, 200), nn.Linear(200, 96, bias=False), nn.Linear(96, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tiny(self.down(torch.relu(self.up(x))) + x)


def test_each_output_is_rounded_to_255_steps() -> None:
    torch.manual_seed(0)
    weight = torch.randn(9, 50) * torch.logspace(-3, 3, 9).unsqueeze(1)
    weight[4] = 0
    weight[5] = torch.full((50,), 1e-45)
    values, scales = quantize_int8(weight)
    assert values.dtype == torch.int8
    assert values.min() >= -127
    assert torch.equal(values.abs().amax(1)[[0, 1, 2, 3, 6, 7, 8]], torch.full((7,), 127, dtype=torch.int8))
    assert not values[4].any()
    back = values * scales.unsqueeze(1)
    assert torch.all((back - weight).abs() <= scales.unsqueeze(1) * 0.5001 + 1e-44)
    assert 0 < int8_error(weight, values, scales) < 0.01
    assert int8_error(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int8), torch.zeros(2)) == 0.0
    assert int8_error(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.int8), torch.ones(2)) == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    x = torch.randn(7, 96).to(dtype)
    expected = model(x).detach().float()
    report = quantize(model, "int8", progress=False)
    assert isinstance(model.up, Int8Linear)
    assert isinstance(model.down, Int8Linear)
    assert [layer.names for layer in report.layers] == [("up",), ("down",)]
    assert report.skipped == {"tiny": f"it would grow from {96 * 3 * dtype.itemsize} to {16 * 96 + 16 * 8} bytes"}
    up, down = report.layers
    assert (up.shape, up.packed_shape, up.group_size, up.method) == ((200, 96), (208, 96), 96, "rtn")
    assert up.nbytes_after == 208 * 96 + 208 * 8 == model.up.weight_nbytes
    assert up.error < 0.01
    assert down.packed_shape == (96, 200)
    y = model(x)
    assert y.dtype == dtype
    difference = (y.float() - expected).norm() / expected.norm()
    assert difference < 0.02
    assert "padded to 208 × 96" in report.table()


def test_padded_inputs_and_a_layer_that_is_named() -> None:
    model = Model()
    report = quantize(model, "int8", include="tiny", progress=False)
    assert isinstance(model.tiny, Int8Linear)
    assert report.skipped == {"up": "not in include", "down": "not in include"}
    assert report.layers[0].packed_shape == (16, 96)


def test_layers_with_too_many_inputs_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(65540, 16, bias=False), nn.Linear(16, 64))
    report = quantize(model, "int8", progress=False)
    assert report.skipped == {"0": "it has 65540 inputs, and the sums of more than 65536 do not fit int32"}
    with pytest.raises(InvalidArgumentError, match="nothing to quantise: 0: it has 65540 inputs"):
        quantize(nn.Sequential(nn.Linear(65540, 16, bias=False)), "int8", include="0", progress=False)


def test_a_weight_that_is_not_finite() -> None:
    model = Model()
    model.up.weight.data[0, 0] = torch.inf
    with pytest.raises(InvalidArgumentError, match="quantize: up: its weight has values that are not finite"):
        quantize(model, "int8", progress=False)


def layer(**changed: Any) -> Int8Linear:
    torch.manual_seed(0)
    linear = nn.Linear(10, 20)
    values, scales = quantize_int8(linear.weight.detach())
    return Int8Linear.from_values(values, scales, linear.bias, **{"method": "rtn"} | changed)


def test_the_layer() -> None:
    made = layer()
    assert not hasattr(made, "weight")
    assert made.packed_weight.shape == (2, 3, 16, 4)
    assert repr(made) == "Int8Linear(in_features=10, out_features=20, bias=True, method='rtn')"
    linear = nn.Linear(10, 20)
    linear.weight.data, linear.bias.data = made.dequantize(), made.bias.data
    x = torch.randn(2, 3, 10)
    torch.testing.assert_close(made(x), linear(x).detach(), rtol=0, atol=0.02)
    torch.testing.assert_close(layer(input_range="symmetric")(x), linear(x).detach(), rtol=0, atol=0.03)
    assert made(x.transpose(0, 1)).is_contiguous()
    assert made.dequantize(torch.bfloat16).dtype == torch.bfloat16
    values = unpack_int8(made.packed_weight, 20, 10)
    assert torch.equal(made.column_sums[:20], values.sum(1, dtype=torch.int32))
    half = layer().bfloat16()
    assert half.scale.dtype == torch.float32
    assert half.bias is not None
    assert half.bias.dtype == torch.bfloat16
    assert half(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"packed_weight": torch.ones(2, 3, 16, 4)}, "packed_weight: expected int8 [2, 3, 16, 4] for 10 → 20 features"),
        (
            {"in_features": 13},
            "packed_weight: expected int8 [2, 4, 16, 4] for 13 → 20 features, got int8 [2, 3, 16, 4]",
        ),
        ({"scale": torch.ones(20)}, "scale: expected float32 [32] for 10 → 20 features, got float32 [20]"),
        ({"column_sums": torch.ones(32)}, "column_sums: expected int32 [32] for 10 → 20 features, got float32 [32]"),
        ({"bias": torch.ones(32)}, "bias: expected [20], got [32]"),
        (
            {"input_range": "none"},
            "input_range: expected one of 'asymmetric', 'symmetric', 'static', 'tensor', got 'none'",
        ),
    ],
)
def test_refusals(changed: dict[str, Any], text: str) -> None:
    made = layer()
    given = {
        "packed_weight": made.packed_weight, "scale": made.scale, "column_sums": made.column_sums, "bias": made.bias,
        "in_features": 10, "out_features": 20, "method": "rtn",
    }  # fmt: skip
    with pytest.raises(InvalidArgumentError) as error:
        Int8Linear(**(given | changed))
    assert f"Int8Linear: {text}" in str(error.value)


def test_another_number_of_features() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"Int8Linear: expected 10 features in the last dimension, got \(2, 11\)"
    ):
        layer()(torch.ones(2, 11))
