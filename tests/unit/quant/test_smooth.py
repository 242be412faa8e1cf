"""SmoothQuant: the factors, layers that share them, and that the exported graph gains accuracy with outliers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import untorch
from untorch.export import export
from untorch.quant import Int8Linear, QuantizeOptions
from untorch.quant.observers import scale_and_zero
from untorch.quant.quantizer import Quantizer
from untorch.quant.smooth import smoothing_factors
from untorch.runtime.errors import InvalidArgumentError
from untorch.validation import OptionError


class Attention(nn.Module):
    """Post-norm, as BERT: the norm's result has other readers than linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.q, self.k = nn.LayerNorm(64), nn.Linear(64, 48), nn.Linear(64, 48)
        self.out, self.unused = nn.Linear(48, 64), nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()))
        with torch.no_grad():  # channels of outliers, as trained norms have them
            self.norm.weight[:3] *= 60
            self.q.weight[:, :3] /= 60
            self.k.weight[:, :3] /= 60

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # type: ignore[operator]
        x = self.norm(x)
        return self.out(torch.tanh(self.q(x)) * self.k(x)) + x * 1e-3


def batches(count: int = 4) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 64, generator=generator),) for _ in range(count)]


def test_factors_are_those_of_the_paper() -> None:
    model = Attention().train()
    shown: list[str] = []
    found = smoothing_factors(model, 0.7, batches(64), shown.append)
    assert shown[:2] == ["smooth: batch 1", "smooth: batch 2"]
    assert model.training
    assert float(model.calls) == 0
    assert not model.q._forward_pre_hooks
    assert set(found) == {id(model.q), id(model.k), id(model.out)}
    assert found[id(model.q)] is found[id(model.k)]
    with torch.no_grad():
        x = torch.cat([model.norm(x) for (x,) in batches(64)]).abs().amax(0)
        w = torch.cat((model.q.weight, model.k.weight)).abs().amax(0)
    torch.testing.assert_close(found[id(model.q)], x**0.7 / w**0.3)


def static_error(model: nn.Sequential, x: torch.Tensor, factors: dict[int, torch.Tensor], seen: torch.Tensor) -> float:
    """The relative error of a linear layer with a static range of the rows that were seen, for other rows."""
    layer = model[1]
    assert isinstance(layer, nn.Linear)
    factor = factors.get(id(layer), torch.ones(layer.in_features))
    with torch.no_grad():
        scale, zero = scale_and_zero(*(float(value) for value in torch.aminmax(model[0](seen) / factor)))
        values = ((model[0](x) / factor / scale).round() + zero).clamp(0, 255).sub(zero) * scale * factor
        expected = model(x)
        return float((layer(values) - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [4, 16, 64])
def test_few_rows_do_not_shrink_the_range_for_others(rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 256), nn.GELU()), nn.Linear(256, 64))
    seen, other = torch.randn(rows, 64), torch.randn(500, 64)
    with pytest.warns(UserWarning, match=f"smooth: the calibration batches give a layer {rows} rows, which is too few"):
        factors = smoothing_factors(model, 0.5, [seen])
    assert static_error(model, other, factors, seen) < 2.5 * static_error(model, other, {}, seen)


def test_few_rows_still_move_outliers() -> None:
    model = Attention()
    with pytest.warns(UserWarning, match="32 rows"):
        factor = smoothing_factors(model, 0.5, batches())[id(model.q)]
    assert float(factor[:3].min() / factor[3:].max()) > 10


@pytest.mark.filterwarnings("ignore:option quantize. smooth")
def test_channels_of_zeros_and_shared_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    with torch.no_grad():
        model[0].weight[:, 1] = 0
    [factor] = smoothing_factors(model, 0.5, [torch.tensor([[0.0, 1.0, 2.0, 3.0]])]).values()  # the first layer's
    assert factor[:2].tolist() == [1.0, 1.0]
    assert smoothing_factors(model, 0.5, [{"input": torch.ones(0, 4)}]).keys() == {id(model[0])}
    with pytest.raises(InvalidArgumentError, match="calibration: batch 1 does not run through the model: RuntimeError"):
        smoothing_factors(model, 0.5, [torch.ones(3)])


@pytest.mark.filterwarnings("ignore:option quantize. smooth")
def test_a_smoothed_layer_stands_for_the_same_weight() -> None:
    model = Attention()
    weight, factors = model.q.weight.detach().clone(), smoothing_factors(model, 0.5, batches())
    report = Quantizer("int8").apply(model, smooth=factors)
    layer, other = model.q, model.k
    assert isinstance(layer, Int8Linear)
    assert isinstance(other, Int8Linear)
    assert layer.input_factor is other.input_factor
    assert model.unused.input_factor is None
    assert {each.names[0]: each.method for each in report.layers}["q"] == "rtn, smooth"
    assert float((layer.dequantize() - weight).norm() / weight.norm()) < 0.1
    with pytest.raises(InvalidArgumentError, match=r"Int8Linear: input_factor: expected \[64\], got \[3\]"):
        Int8Linear(
            layer.packed_weight, layer.scale, layer.column_sums, None, in_features=64, out_features=48, method="rtn",
            input_factor=torch.ones(3),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"smooth": 0.5}, "option quantize: smooth: it needs batches of inputs"),
        ({"smooth": 1.5, "calibration": []}, "option quantize: smooth: expected a number from 0 to 1, got 1.5"),
        ({"smooth": True, "calibration": []}, "option quantize: smooth: expected a number from 0 to 1, got True"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        QuantizeOptions("int8", **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
def test_static_ranges_of_outliers_gain_from_it(tmp_path: Path) -> None:
    model, errors = Attention().eval(), {}
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(x)
    for smooth in (None, 0.5):
        path = tmp_path / f"{smooth}.pt2"
        options = {"dtype": "int8", "calibration": [(torch.cat([b for (b,) in batches()]),)], "smooth": smooth}
        report = export(model, (x,), path, quantize=options, progress=False)
        quantization = report.methods["forward"].quantization
        assert quantization is not None
        assert ("smooth" in quantization.layers[0].method) == (smooth is not None)
        y = torch.from_numpy(untorch.load(path)(x.numpy()))
        errors[smooth] = float((y - expected).norm() / expected.norm())
    assert errors[0.5] < 0.6 * errors[None]
