"""Tests of quantize_int4_activations: the values, weights that are shared, computed or written, and an exported file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pass_graphs import close, targets, unlift
from torch import nn
from torch.export import Dim

import untorch
from tests.unit.quant.test_experts import Experts as MakeExperts
from untorch.export import ExportOptions, OptionError, export
from untorch.export.passes import run_passes
from untorch.export.passes.quantize_int4_activations import quantize_int4_activations
from untorch.ops.int4 import OPERATOR
from untorch.ops.int4_moe import OPERATOR as MOE
from untorch.ops.nvfp4 import OPERATOR as NVFP4
from untorch.ops.nvfp4_moe import OPERATOR as NVFP4_MOE
from untorch.ops.w4a8 import w4a8_linear_reference
from untorch.ops.w4a8_layout import unpack_nvfp4_w4a8, unpack_w4a8
from untorch.quant import Int4Linear, NVFP4Linear, dequantize_nvfp4, pack_nvfp4, quantize


class Layers(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(200, 99, bias), nn.Linear(99, 40, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


def quantized(model: nn.Module, group_size: int = 32, method: str = "rtn") -> nn.Module:
    quantize(model, "int4", group_size=group_size, method=method, progress=False)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("bias", [True, False])
def test_before_and_after(dtype: torch.dtype, group: int, bias: bool) -> None:
    model, x = quantized(Layers(bias).to(dtype), group), torch.randn(5, 200, dtype=dtype)
    before = model(x)
    module = unlift(model, x)
    report = quantize_int4_activations(module)
    close(module)
    assert len(report.changed) == 2
    assert [name for name in targets(module) if name.startswith("untorch.")] == ["untorch.w4a8_linear"] * 2
    assert not any(name.endswith("packed_weight") for name in dict(module.named_buffers()))
    up = model.up
    assert isinstance(up, Int4Linear)
    values, scales = unpack_w4a8(
        module.get_buffer("up_packed_weight_w4a8"), module.get_buffer("up_scale_and_zero_w4a8"), 104
    )
    matrix = (values.float().reshape(104, -1, group) - 8) * scales.float()[..., 0].T.unsqueeze(-1)
    matrix = (matrix + scales.float()[..., 1].T.unsqueeze(-1)).reshape(104, -1)[:99, :200]
    torch.testing.assert_close(matrix, up.dequantize())
    # Activations are rounded to 1/127 of their part's largest.
    assert torch.nn.functional.cosine_similarity(module(x).float(), before.float(), dim=-1).min() > 0.999


def test_symmetric_weights_have_no_zeros() -> None:
    """Of linear layers and of experts."""
    for model, x in ((Layers(), torch.randn(5, 200)), (Routed(), torch.randn(3, 64))):
        before = quantized(model, method="symmetric")(x)
        module = unlift(model, x)
        assert quantize_int4_activations(module).changed
        close(module)
        scales = [value for name, value in module.named_buffers() if name.endswith("scale_and_zero_w4a8")]
        assert [tensor.shape[2] for tensor in scales] == [1, 1]
        assert torch.nn.functional.cosine_similarity(module(x), before, dim=-1).min() > 0.999


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.linear(x))
        return y


def test_a_weight_of_two_layers_is_stored_once() -> None:
    module = unlift(quantized(Shared()), torch.randn(3, 64))
    assert len(quantize_int4_activations(module).changed) == 2
    close(module)
    names = [name for name in dict(module.named_buffers()) if "w4a8" in name]
    assert sorted(names) == ["linear_packed_weight_w4a8", "linear_scale_and_zero_w4a8"]


class Computed(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = OPERATOR(x, weight + 0, scales, 32)
        return y


class Written(nn.Module):
    def __init__(self, layer: Int4Linear) -> None:
        super().__init__()
        self.register_buffer("weight", layer.packed_weight.clone())
        self.register_buffer("scales", layer.scale_and_zero.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = OPERATOR(x, self.weight, self.scales, 32)
        self.scales.mul_(2)
        return y


def test_weights_that_are_no_constants_stay() -> None:
    layer = quantized(Shared()).linear
    assert isinstance(layer, Int4Linear)
    computed = unlift(Computed(), torch.randn(3, 64), layer.packed_weight, layer.scale_and_zero)
    assert list(quantize_int4_activations(computed).skipped.values()) == ["the weight is computed, not a constant"]
    written = unlift(Written(layer), torch.randn(3, 64))
    assert list(quantize_int4_activations(written).skipped.values()) == ["the model writes into the weight scales"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_nvfp4(dtype: torch.dtype, bias: bool) -> None:
    model, x = Layers(bias).to(dtype), torch.randn(5, 200, dtype=dtype)
    quantize(model, "nvfp4", progress=False)
    before = model.eval()(x)
    module = unlift(model, x)
    report = quantize_int4_activations(module)
    close(module)
    assert len(report.changed) == 2
    assert [name for name in targets(module) if name.startswith("untorch.")] == ["untorch.nvfp4_int8_linear"] * 2
    assert not any(name.endswith("packed_weight") for name in dict(module.named_buffers()))
    up = model.up
    assert isinstance(up, NVFP4Linear)
    parts = [module.get_buffer(f"up_{name}_w4a8") for name in ("packed_weight", "block_scale", "global_scale")]
    codes, scales = unpack_nvfp4_w4a8(parts[0], parts[1], parts[2].shape[0])
    matrix = dequantize_nvfp4(pack_nvfp4(codes), scales, parts[2])[:99, :200]
    torch.testing.assert_close(matrix, up.dequantize().float(), rtol=2**-8, atol=0)
    assert torch.nn.functional.cosine_similarity(module(x).float(), before.float(), dim=-1).min() > 0.999


class Nvfp4(nn.Module):
    """A weight as files have it, of an odd number of blocks."""

    def __init__(self, k: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("weight", pack_nvfp4(torch.randint(0, 16, (24, k))))
        self.register_buffer("scale", torch.rand(24, k // 16).to(torch.float8_e4m3fn))
        self.register_buffer("world", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = NVFP4(x, self.weight, self.scale, self.world)
        return y


@pytest.mark.parametrize(("k", "width"), [(48, 48), (48, 41), (96, 96), (96, 60)])
def test_nvfp4_as_files_have_it(k: int, width: int) -> None:
    model, x = Nvfp4(k), torch.randn(7, width)
    module = unlift(model, x)
    assert len(quantize_int4_activations(module).changed) == 1
    close(module)
    assert torch.nn.functional.cosine_similarity(module(x), model(x), dim=-1).min() > 0.999


def test_scales_that_are_nan_stay() -> None:
    model = Nvfp4(64)
    assert isinstance(model.scale, torch.Tensor)
    model.scale[3, 1] = torch.nan
    report = quantize_int4_activations(unlift(model, torch.randn(2, 64)))
    assert list(report.skipped.values()) == ["scales of scale are NaN"]


class Routed(nn.Module):
    """Experts in int4 behind fixed routing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts: nn.Module = MakeExperts(4, 64, 48)
        self.register_buffer("index", torch.tensor([[0, 1], [3, 3], [2, 0]]))
        self.register_buffer("factors", torch.rand(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(x, self.index, self.factors)
        return y


class RoutedNvfp4(Routed):
    """Experts in NVFP4 behind the same routing."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.experts = MakeExperts(4, k, 48)
        quantize(self, "nvfp4", progress=False)
        self.eval()


@pytest.mark.parametrize("group", [32, 128])
def test_experts(group: int) -> None:
    model, x = quantized(Routed(), group), torch.randn(3, 64)
    before = model(x)
    module = unlift(model, x)
    report = quantize_int4_activations(module)
    close(module)
    assert report.changed == ["int4_moe"]
    [node] = [node for node in module.graph.nodes if node.target == MOE]
    names = [str(part.target) for part in node.args[3:7]]
    assert names == [f"experts_{name}_w4a8" for name in ("w13", "w13_scale_and_zero", "w2", "w2_scale_and_zero")]
    weight, scales = (module.get_buffer(name) for name in names[2:])
    k = -(-48 // group) * group
    assert (weight.shape, scales.shape) == ((16, k // 8, 16), (16, k // group, 2, 16))
    assert not [name for name, _ in module.named_buffers() if name.startswith("experts.")]
    out = module(x)
    assert 0 < float((out - before).abs().max()) < 0.02 * float(before.abs().max())
    again = quantize_int4_activations(module)
    assert again.skipped == {node.name: "its weights are packed for integers already"}


@pytest.mark.parametrize("k", [64, 48])
def test_experts_of_nvfp4(k: int) -> None:
    torch.manual_seed(1)
    model, x = RoutedNvfp4(k), torch.randn(3, k)
    before = model(x)
    module = unlift(model, x)
    report = quantize_int4_activations(module)
    close(module)
    assert report.changed == ["nvfp4_moe"]
    [node] = [node for node in module.graph.nodes if node.target == NVFP4_MOE]
    names = [str(part.target) for part in node.args[3:9]]
    moe = "experts_moe"
    assert names[:4] == [f"{moe}_{name}_w4a8" for name in ("w13", "w13_scale", "w2", "w2_scale")]
    assert names[4:] == ["experts.moe.w13_global", "experts.moe.w2_global"]
    shapes = [tuple(module.get_buffer(name).shape) for name in names[:4]]
    # 48 inputs of the second GEMM, and k of the first, are padded to 64.
    assert shapes == [(24, 8, 16), (24, 4, 16), (4 * k // 16, 8, 16), (4 * k // 16, 4, 16)]
    assert not [name for name, _ in module.named_buffers() if name in ("experts.moe.w13", "experts.moe.w2_scale")]
    out = module(x)
    assert 0 < float((out - before).abs().max()) < 0.02 * float(before.abs().max())
    again = quantize_int4_activations(module)
    assert again.skipped == {node.name: "its weights are packed for integers already"}


def test_experts_of_nvfp4_with_a_scale_that_is_nan_stay() -> None:
    model = RoutedNvfp4(64)
    model.experts.moe.w2_scale.view(torch.uint8)[1, 3, 0] = 0xFF
    report = quantize_int4_activations(unlift(model, torch.randn(3, 64)))
    assert list(report.skipped.values()) == ["scales of experts.moe.w2_scale are NaN"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it exports
def test_an_exported_file_of_experts_in_nvfp4(tmp_path: Path) -> None:
    model, x = RoutedNvfp4(64), torch.randn(3, 64)
    report = export(model, (x,), tmp_path / "m.pt2", int8_activations=True, progress=False)
    assert "aoti_torch_cpu_nvfp4_moe" in report.methods["forward"].operators
    module = unlift(model, x)
    quantize_int4_activations(module)
    close(module)
    with untorch.load(tmp_path / "m.pt2") as program:
        np.testing.assert_allclose(program.forward(x.numpy()), module(x), rtol=1e-4, atol=1e-4)
        entries = program.manifest["methods"]["forward"]["quantization"]
    assert [entry["name"] for entry in entries] == ["experts.moe.w13", "experts.moe.w2"]
    assert entries[1] == {
        "name": "experts.moe.w2", "dtype": "nvfp4", "group_size": 16, "operator": "nvfp4_moe", "activations": "float32",
        "tensors": ["experts_moe_w2_w4a8", "experts_moe_w2_scale_w4a8", "experts.moe.w2_global"],
        "packed_shape": [256, 64], "int8_activations": True, "nbytes": 256 * 64 // 2 + 256 * 4 + 4 * 4,
    }  # fmt: skip
    command = [sys.executable, "-m", "untorch", "inspect", str(tmp_path / "m.pt2")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    assert "activations in int8" in shown.stdout


def test_the_option_switches_it_on() -> None:
    module = unlift(quantized(Shared()), torch.randn(3, 64))
    reports = {report.name: report for report in run_passes(module, ExportOptions(), "cpu")}
    assert reports["quantize_int4_activations"].not_run == "it is switched off by the option int8_activations"
    reports = {report.name: report for report in run_passes(module, ExportOptions(int8_activations=True), "cpu")}
    assert len(reports["quantize_int4_activations"].changed) == 2


def test_other_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as error:
        export(Shared(), (torch.ones(1, 64),), tmp_path / "m.pt2", device="cuda", arch="sm_90", int8_activations=True)
    assert str(error.value) == (
        "export: method 'forward': option int8_activations: it is for device='cpu', got 'cuda': leave it out, or give "
        "it in the options of methods for CPUs"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it exports
def test_an_exported_file(tmp_path: Path) -> None:
    model, x = Layers().eval(), torch.randn(5, 200)
    report = export(
        model, (x,), tmp_path / "m.pt2", quantize={"dtype": "int4", "group_size": 32, "method": "rtn"},
        dynamic_shapes={"x": {0: Dim("rows", max=64)}}, int8_activations=True, progress=False,
    )  # fmt: skip
    assert "aoti_torch_cpu_w4a8_linear" in report.methods["forward"].operators
    assert "aoti_torch_cpu_int4_linear" not in report.methods["forward"].operators
    layers = unlift(quantized(Layers()), x)
    quantize_int4_activations(layers)

    def expected(rows: torch.Tensor) -> torch.Tensor:
        def linear(name: str, rows: torch.Tensor, outputs: int, bias: Any) -> torch.Tensor:
            weight, scales = (layers.get_buffer(f"{name}_{part}_w4a8") for part in ("packed_weight", "scale_and_zero"))
            padded = torch.nn.functional.pad(bias, (0, -outputs % 8))
            return w4a8_linear_reference(rows, weight, scales, 32, padded.shape[0], padded)[:, :outputs].contiguous()

        hidden = torch.relu(linear("up", rows, 99, model.up.bias.detach()))
        return linear("down", hidden, 40, model.down.bias.detach())

    with untorch.load(tmp_path / "m.pt2") as program:
        for rows in (5, 1, 30):  # fewer than AMX multiplies in bfloat16
            given = torch.randn(rows, 200)
            np.testing.assert_allclose(program.forward(given.numpy()), expected(given), rtol=1e-4, atol=1e-4)
        entries = program.manifest["methods"]["forward"]["quantization"]
    assert entries[0] == {
        "name": "up", "dtype": "int4", "group_size": 32, "operator": "w4a8_linear", "activations": "float32",
        "tensors": ["up_packed_weight_w4a8", "up_scale_and_zero_w4a8"], "packed_shape": [112, 224], "int8_activations": True,
        "shape": [99, 200], "method": "rtn", "nbytes": 112 * 224 // 2 + 7 * 112 * 2 * 4,
    }  # fmt: skip
    command = [sys.executable, "-m", "untorch", "inspect", str(tmp_path / "m.pt2")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    assert "groups of 32, rtn, activations in int8" in shown.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it exports
def test_an_exported_file_of_nvfp4(tmp_path: Path) -> None:
    model, x = Layers().eval(), torch.randn(5, 200)
    report = export(
        model, (x,), tmp_path / "m.pt2", quantize="nvfp4", dynamic_shapes={"x": {0: Dim("rows", max=64)}},
        int8_activations=True, progress=False,
    )  # fmt: skip
    assert "aoti_torch_cpu_nvfp4_int8_linear" in report.methods["forward"].operators
    assert "aoti_torch_cpu_nvfp4_linear" not in report.methods["forward"].operators
    layers = Layers().eval()
    quantize(layers, "nvfp4", progress=False)
    module = unlift(layers, x)
    quantize_int4_activations(module)
    close(module)
    with untorch.load(tmp_path / "m.pt2") as program:
        given = torch.randn(5, 200)
        np.testing.assert_allclose(program.forward(given.numpy()), module(given), rtol=1e-4, atol=1e-4)
        for rows in (1, 64):
            given = torch.randn(rows, 200)
            found = torch.from_numpy(program.forward(given.numpy()))
            assert torch.nn.functional.cosine_similarity(found, layers(given), dim=-1).min() > 0.999
        entries = program.manifest["methods"]["forward"]["quantization"]
    assert entries[0] == {
        "name": "up", "dtype": "nvfp4", "group_size": 16, "operator": "nvfp4_int8_linear", "activations": "float32",
        "tensors": ["up_packed_weight_w4a8", "up_block_scale_w4a8", "up_global_scale_w4a8"], "packed_shape": [112, 224], "int8_activations": True,
        "shape": [99, 200], "method": "search", "nbytes": 112 * 224 // 2 + 112 * 14 + 104 * 4,
    }  # fmt: skip
    command = [sys.executable, "-m", "untorch", "inspect", str(tmp_path / "m.pt2")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    assert "activations in int8" in shown.stdout
