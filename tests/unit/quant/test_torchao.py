"""Weights of torchao's ``quantize_``: what becomes ours bit for bit, what stays and why, and exported files.

The classes here have the names and attributes of torchao 0.18. Where torchao is installed, its own are taken as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import untorch
from tests.torchao_library import torchao
from untorch.export import export
from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.quant import Int4Linear, Int8Linear, W8A8Linear, quantize_fp8, quantize_int8
from untorch.quant.checkpoints import convert_torchao
from untorch.runtime.errors import InvalidArgumentError

from .test_checkpoints import with_weight


class PerRow:
    pass


class PerTensor:
    pass


def dynamic(granularity: Any = None, mapping: str = "MappingType.SYMMETRIC") -> Any:
    return SimpleNamespace(granularity=granularity or PerRow(), mapping_type=mapping)


@dataclass
class Int8Tensor:
    qdata: torch.Tensor
    scale: torch.Tensor
    block_size: list[int]
    zero_point: torch.Tensor | None = None
    act_quant_kwargs: Any = field(default_factory=dynamic)
    act_quant_scale: torch.Tensor | None = None
    act_pre_scale: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32


@dataclass
class IntxUnpackedToInt8Tensor:
    qdata: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    block_size: tuple[int, int]
    target_dtype: Any
    activation_quantization: str | None = None
    dtype: torch.dtype = torch.float32


@dataclass
class Float8Tensor:
    qdata: torch.Tensor
    scale: torch.Tensor | None = None
    block_size: list[int] = field(default_factory=list)
    act_quant_kwargs: Any = None
    act_quant_scale: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32


def int8(**fields: Any) -> Int8Tensor:
    torch.manual_seed(0)
    values, scales = quantize_int8(torch.randn(21, 90))
    return Int8Tensor(**{"qdata": values, "scale": scales.unsqueeze(1), "block_size": [1, 90], **fields})


@pytest.mark.parametrize(("mapping", "expected"), [("SYMMETRIC", "symmetric"), ("ASYMMETRIC", "asymmetric")])
def test_int8_with_dynamic_rows(mapping: str, expected: str) -> None:
    weight = int8(act_quant_kwargs=dynamic(mapping=f"MappingType.{mapping}"))
    model = with_weight(weight, 21, 90)
    report = convert_torchao(model)
    layer = model[0]
    assert isinstance(layer, Int8Linear)
    assert layer.input_range == expected
    assert torch.equal(layer.dequantize(), weight.qdata.float() * weight.scale)
    assert (report.layers[0].quantized_dtype, report.layers[0].packed_shape) == ("int8", (32, 92))


@pytest.mark.parametrize("activations", [None, "int8_asym_per_token"])
@pytest.mark.parametrize("zeros", [False, True])
def test_int4_in_groups(activations: str | None, zeros: bool) -> None:
    torch.manual_seed(0)
    values, scale = torch.randint(-8, 8, (21, 96), dtype=torch.int8), torch.rand(21, 3)
    zero = torch.randint(-8, 8, (21, 3), dtype=torch.int8) if zeros else None
    model = with_weight(IntxUnpackedToInt8Tensor(values, scale, zero, (1, 32), "torch.int4", activations), 21, 96)
    convert_torchao(model)
    layer = model[0]
    assert isinstance(layer, Int4Linear)
    shift = torch.zeros(21, 3) if zero is None else zero.float()
    expected = (values.float().reshape(21, 3, 32) - shift.unsqueeze(-1)) * scale.unsqueeze(-1)
    torch.testing.assert_close(layer.dequantize(), expected.reshape(21, 96), rtol=1e-5, atol=1e-5)


def test_int8_of_intx() -> None:
    weight = int8()
    intx = IntxUnpackedToInt8Tensor(weight.qdata, weight.scale, None, (1, 90), torch.int8, "int8_asym_per_token")
    model = with_weight(intx, 21, 90)
    convert_torchao(model)
    assert isinstance(model[0], Int8Linear)
    assert model[0].input_range == "asymmetric"


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (int8(act_quant_kwargs=None), "its weight is int8 and its activations are not (weight-only): torchao's"),
        (int8(act_quant_kwargs=dynamic(PerTensor())), "its activations have one range for the whole tensor"),
        (int8(act_quant_scale=torch.ones(1)), "its activations have static ranges"),
        (int8(act_pre_scale=torch.ones(1)), "its activations are scaled (act_pre_scale)"),
        (int8(zero_point=torch.ones(21, 1)), "its weight has zero points, expected a symmetric range"),
        (int8(block_size=[1, 45]), "its weight has scales for blocks of [1, 45], expected one an output"),
        (Float8Tensor(torch.zeros(21, 90)), "its weight is float8: torchao's operators stay"),
        (
            IntxUnpackedToInt8Tensor(int8().qdata, int8().scale, None, (1, 90), torch.int8),
            "its weight is int8 and its activations are not quantised a row",
        ),
        (
            IntxUnpackedToInt8Tensor(int8().qdata, int8().scale, None, (1, 90), "torch.int3"),
            "its weight is int3, expected int4 or int8",
        ),
        (
            IntxUnpackedToInt8Tensor(int8().qdata, int8().scale, None, (1, 90), "torch.int4"),
            "its weight has blocks of [1, 90], expected [1, 32], 64, 128 or 256",
        ),
    ],
)
def test_what_stays(weight: Any, reason: str) -> None:
    model = with_weight(weight, 21, 90)
    report = convert_torchao(model, allow_nothing=True)
    assert report.layers == ()
    assert report.skipped["0"].startswith(reason)
    assert type(model[0]) is nn.Linear


def test_int8_for_gpus() -> None:
    weight = int8()
    model = with_weight(weight, 21, 90)
    report = convert_torchao(model, target="cuda")
    layer = model[0]
    assert isinstance(layer, W8A8Linear)
    assert torch.equal(layer.dequantize(), weight.qdata.float() * weight.scale)
    assert (report.layers[0].quantized_dtype, report.layers[0].packed_shape) == ("int8", (32, 96))
    asymmetric = int8(act_quant_kwargs=dynamic(mapping="MappingType.ASYMMETRIC"))
    with pytest.raises(
        InvalidArgumentError, match="converted: 0: its activations have asymmetric ranges, which are for"
    ):
        convert_torchao(with_weight(asymmetric, 21, 90), target="cuda")
    with pytest.raises(InvalidArgumentError, match="target: expected 'cpu' or 'cuda', got 'gpu'"):
        convert_torchao(model, target="gpu")  # type: ignore[arg-type]


def float8(**fields: Any) -> Float8Tensor:
    torch.manual_seed(0)
    values, scales = quantize_fp8(torch.randn(21, 90))
    given = {"qdata": values, "scale": scales.unsqueeze(1), "block_size": [1, 90], "act_quant_kwargs": dynamic()}
    return Float8Tensor(**{**given, **fields})


@pytest.mark.parametrize("whole", [False, True])
def test_float8_for_gpus(whole: bool) -> None:
    weight = float8(**({"scale": torch.full((1, 1), 0.5), "block_size": [21, 90]} if whole else {}))
    model = with_weight(weight, 21, 90)
    report = convert_torchao(model, target="cuda")
    layer = model[0]
    assert isinstance(layer, W8A8Linear)
    assert weight.scale is not None
    assert torch.equal(layer.dequantize(), weight.qdata.float() * weight.scale)
    assert (report.layers[0].quantized_dtype, report.layers[0].packed_shape) == ("fp8", (32, 96))


def test_float8_for_old_gpus() -> None:
    report = convert_torchao(with_weight(float8(), 21, 90), target="cuda", float8=False, allow_nothing=True)
    assert report.skipped["0"] == "its weight is float8, which needs sm_89 or newer: torchao's operators stay"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"act_quant_kwargs": None}, "its weight is float8 and its activations are not (weight-only): torchao's"),
        ({"act_quant_kwargs": dynamic(PerTensor())}, "its activations have one range for the whole tensor"),
        ({"act_quant_scale": torch.ones(1)}, "its activations have static ranges"),
        ({"scale": torch.ones(21, 2), "block_size": [1, 45]}, "its weight has scales for blocks of [1, 45], expected"),
        ({"qdata": torch.zeros(21, 90).to(torch.float8_e5m2)}, "its weight is float8_e5m2, expected float8_e4m3fn"),
    ],
)
def test_float8_that_stays(fields: dict[str, Any], reason: str) -> None:
    model = with_weight(float8(**fields), 21, 90)
    report = convert_torchao(model, target="cuda", allow_nothing=True)
    assert report.skipped["0"].startswith(reason)
    assert type(model[0]) is nn.Linear


CONFIGS: list[tuple[str, dict[str, str], str | None]] = [
    ("Int8DynamicActivationInt8WeightConfig", {}, "int8"),
    ("Int8WeightOnlyConfig", {}, None),
    ("Int8DynamicActivationIntxWeightConfig", {"weight": "int8", "granularity": "PerAxis"}, "int8"),
    ("Int8DynamicActivationIntxWeightConfig", {"weight": "int4", "granularity": "PerGroup"}, "int4"),
    ("IntxWeightOnlyConfig", {"weight": "int4", "granularity": "PerGroup"}, "int4"),
    ("IntxWeightOnlyConfig", {"weight": "int8", "granularity": "PerAxis"}, None),
    ("Float8WeightOnlyConfig", {}, None),
]


def torchaos_model(config: str, how: dict[str, str]) -> nn.Module:
    """A layer behind torchao's own quantize_."""
    quantization = torchao("quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.LayerNorm(128)).eval()
    given: dict[str, Any] = {}
    if how:
        axis = quantization.PerGroup(32) if how["granularity"] == "PerGroup" else quantization.PerAxis(0)
        name = "weight_granularity" if "Dynamic" in config else "granularity"
        given = {"weight_dtype": getattr(torch, how["weight"]), name: axis}
    quantization.quantize_(model, getattr(quantization, config)(**given))
    return model


@pytest.mark.filterwarnings("ignore")  # torch's and torchao's own
@pytest.mark.parametrize(("config", "how", "layer"), CONFIGS)
def test_layers_of_torchao(config: str, how: dict[str, str], layer: str | None) -> None:
    """Each becomes ours, with the same weights, or is named with the reason."""
    model = torchaos_model(config, how)
    x = torch.randn(4, 256)
    with torch.no_grad():
        expected = model(x)
        weight = model[0].weight.dequantize() if layer is not None else None  # type: ignore[operator]
    found = convert_torchao(model, allow_nothing=True)
    assert [each.quantized_dtype for each in found.layers] == ([] if layer is None else [layer])
    assert list(found.skipped) == (["0"] if layer is None else [])
    if layer is None:
        return
    torch.testing.assert_close(model[0].dequantize(), weight, rtol=1e-5, atol=1e-6)  # type: ignore[operator]
    torch.testing.assert_close(model(x), expected, rtol=0.0, atol=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's and torchao's own
@pytest.mark.parametrize(
    ("config", "layer"), [("Int8DynamicActivationInt8WeightConfig", "int8"), ("Int8WeightOnlyConfig", None)]
)
def test_models_of_torchao(config: str, layer: str | None, tmp_path: Path) -> None:
    model = torchaos_model(config, {})
    x, path = torch.randn(4, 256), tmp_path / "model.pt2"
    with torch.no_grad():
        expected = model(x).numpy()
    report = export(model, (x,), path, progress=False)
    found = report.methods["forward"].quantization
    assert found is not None
    assert [each.quantized_dtype for each in found.layers] == ([] if layer is None else [layer])
    assert list(found.skipped) == (["0"] if layer is None else [])
    numpy.testing.assert_allclose(untorch.load(path)(x.numpy()), expected, atol=0.05)
    [named] = [each for each in report.methods["forward"].passes if each.name == "name_torchao_weights"]
    assert list(named.skipped) == (["0.weight"] if layer is None else [])
    assert type(model[0].weight).__module__.startswith("torchao")  # the caller's model stays as it was


@pytest.mark.filterwarnings("ignore")  # torch's and torchao's own
def test_programs_of_torchao_are_named() -> None:
    model, x = torchaos_model("Int8DynamicActivationInt8WeightConfig", {}), torch.randn(4, 256)
    module: Any = torch.export.export(model, (x,)).module()
    reports = run_passes(module, ExportOptions(), "cpu", "forward", None)
    [named] = [each for each in reports if each.name == "name_torchao_weights"]
    assert list(named.skipped) == ["0.weight"]
