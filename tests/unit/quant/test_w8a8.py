"""``W8A8Linear``, int8 and FP8 for GPUs: layers, their accuracy, what ``quantize`` makes for which target."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from untorch.ops.w8a8 import block_scale_shape
from untorch.quant import (
    Int8Embedding,
    Int8Linear,
    QuantizeOptions,
    W8A8Linear,
    W8Embedding,
    layer_sensitivity,
    quantize,
    quantize_fp8,
    quantize_int8,
)
from untorch.quant.by_rules import Quantizers, quantizer_for
from untorch.quant.modules import device_type
from untorch.quant.options import OptionError
from untorch.quant.schemes import make_scheme
from untorch.runtime.errors import InvalidArgumentError

FP8 = torch.float8_e4m3fn
DTYPES = ["int8", "fp8"]
TOLERANCE = {"int8": 0.01, "fp8": 0.04}


def linear(n: int = 300, k: int = 500, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=bias).to(dtype)


def quantised(layer: nn.Linear, dtype: str, **options: Any) -> W8A8Linear:
    model = nn.Sequential(copy.deepcopy(layer))
    quantize(model, dtype, target="cuda", progress=False, **options)
    made = model[0]
    assert isinstance(made, W8A8Linear)
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(300, 500), (16, 16), (1, 33)])
def test_a_layer_computes_nearly_the_same(dtype: str, given: torch.dtype, n: int, k: int) -> None:
    layer = linear(n, k, dtype=given)
    made = quantised(layer, dtype, include="0")
    x = torch.randn(4, 3, k).to(given)
    expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    y = made(x)
    assert (y.dtype, y.shape, y.is_contiguous()) == (given, (4, 3, n), True)
    rounding = 0 if given == torch.float32 else torch.finfo(given).eps
    tolerance = TOLERANCE[dtype] * (3 if n == 1 else 1)  # one output has no mean of errors
    assert (y.double() - expected).norm() / expected.norm() < tolerance + rounding
    assert made.weight_values.shape == (-(-n // 16) * 16, -(-k // 16) * 16)
    assert made.weight_values.dtype == (torch.int8 if dtype == "int8" else FP8)
    assert (made.dtype, made.group_size) == (dtype, k)
    assert made.weight_nbytes == made.weight_values.numel() + 4 * made.scale.numel()
    assert f"dtype={dtype!r}, method='rtn'" in repr(made)


def test_fp8_is_rounded_to_nearest() -> None:
    weight = torch.randn(9, 40)
    weight[2] = 0
    weight[3] *= 1e-42
    values, scales = quantize_fp8(weight)
    assert torch.equal(scales, weight.abs().amax(1) / 448)
    assert not values[2].float().any()
    assert torch.isfinite(values.float()).all()
    for row in (0, 1, 8):
        assert values[row].float().abs().max() == 448
        assert torch.equal(values[row].float(), (weight[row] / scales[row]).to(FP8).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_report(dtype: str) -> None:
    model = nn.Sequential(linear(), nn.Linear(300, 30))
    report = quantize(model, dtype, target="cuda", progress=False)
    first, second = report.layers
    assert (first.shape, first.packed_shape, first.group_size) == ((300, 500), (304, 512), 500)
    assert (first.method, first.quantized_dtype, first.nbytes_after) == ("rtn", dtype, 304 * 512 + 304 * 4)
    assert first.error < (0.006 if dtype == "int8" else 0.03)
    assert second.note == "padded to 32 × 304"
    assert report.skipped == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_moves_casts_and_state_dicts(dtype: str) -> None:
    made = quantised(linear(), dtype)
    values, scale = made.weight_values.clone(), made.scale.clone()
    made = made.half()
    assert (made.scale.dtype, made.weight_values.dtype) == (torch.float32, values.dtype)
    assert torch.equal(made.scale, scale)
    assert made.bias is not None
    assert made.bias.dtype == torch.float16
    assert made(torch.randn(2, 500).half()).dtype == torch.float16
    other = quantised(linear(), dtype).half()
    other.scale.zero_()
    other.load_state_dict(made.state_dict())
    assert torch.equal(other.scale, scale)
    assert not hasattr(made, "weight")
    assert made.to("meta").scale.device.type == "meta"


def test_inputs() -> None:
    made = quantised(linear(), "int8")
    x = torch.randn(500, 6)
    assert torch.equal(made(x.T), made(x.T.contiguous()))
    with pytest.raises(InvalidArgumentError, match="W8A8Linear: expected 500 features in the last dimension, got"):
        made(torch.randn(2, 499))


def test_blocks_are_dequantised_as_by_hand() -> None:
    torch.manual_seed(0)
    values, scale = torch.randn(200, 300).to(FP8), torch.rand(2, 3) + 0.1
    made = W8A8Linear.from_values(values, scale, torch.randn(200), method="fp8")
    expected = values.double().numpy()
    for i in range(200):
        for j in range(300):
            expected[i, j] *= float(scale[i // 128, j // 128])
    assert torch.equal(made.dequantize(torch.float64), torch.from_numpy(expected))
    assert (made.group_size, made.scale.shape) == (128, block_scale_shape(208, 304))
    assert "scales of 128 × 128" in repr(made)
    x = torch.randn(5, 300)
    y = nn.functional.linear(x.double(), made.dequantize(torch.float64))
    assert made.bias is not None
    y = y + made.bias[:200].double()
    assert (made(x).double() - y).norm() / y.norm() < 0.04


@pytest.mark.parametrize(
    ("values", "scale", "bias", "text"),
    [
        (
            torch.zeros(32, 32),
            torch.ones(32),
            None,
            "weight_values: expected int8 or float8_e4m3fn [32, 32] for 20 → 30",
        ),
        (torch.zeros(32, 48, dtype=torch.int8), torch.ones(32), None, "features, got int8 [32, 48]"),
        (torch.zeros(32, 32, dtype=torch.int8), torch.ones(30), None, "scale: expected float32 [32], got float32 [30]"),
        (torch.zeros(32, 32, dtype=torch.int8), torch.ones(1, 4), None, "scale: expected float32 [32], got"),
        (
            torch.zeros(32, 32).to(FP8),
            torch.ones(1, 1),
            None,
            "scale: expected float32 [32] or [1, 4], got float32 [1, 1]",
        ),
        (torch.zeros(32, 32).to(FP8), torch.ones(32), torch.ones(32), "bias: expected [30], got float32 [32]"),
    ],
)
def test_a_layer_refuses_what_does_not_fit(
    values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, text: str
) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        W8A8Linear(values, scale, bias, in_features=20, out_features=30, method="rtn")
    assert text in str(error.value)


def test_the_target_decides_about_int8() -> None:
    model = nn.Sequential(linear())
    assert device_type(model) == "cpu"
    quantize(model, "int8", progress=False)
    assert isinstance(model[0], Int8Linear)
    gpu = nn.Sequential(linear())
    quantize(gpu, "int8", target="cuda", progress=False)
    assert isinstance(gpu[0], W8A8Linear)
    values, scales = quantize_int8(linear().weight.detach())
    assert torch.equal(gpu[0].weight_values[:300, :500], values)
    assert torch.equal(gpu[0].scale[:300], scales)
    assert torch.equal(gpu[0].dequantize(), model[0].dequantize())


def test_rules_of_layers_for_gpus() -> None:
    model = nn.ModuleDict({"a": linear(), "b": linear(), "c": linear(), "d": linear()})
    rules = {"a": "int8", "b": "fp8", "c": None, "*": "int4"}
    report = quantize(model, rules, target="cuda", progress=False)
    assert [layer.quantized_dtype for layer in report.layers] == ["int8", "fp8", "int4"]
    assert isinstance(model["a"], W8A8Linear)
    assert isinstance(model["b"], W8A8Linear)
    with pytest.raises(InvalidArgumentError, match="quantize: dtype: fp8 is for GPUs, and the module is for CPUs"):
        quantize(nn.ModuleDict({"a": linear()}), {"*": "fp8"}, progress=False)


def test_quantizers_are_shared_by_target() -> None:
    quantizers = Quantizers()
    options = QuantizeOptions("int8")
    made = [quantizer_for(quantizers, options, target=target) for target in ("cpu", "cuda", "cpu")]
    assert made[0] is made[2]
    assert made[0] is not made[1]


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_in_int8_for_gpus(tied: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(50, 40), "head": nn.Linear(40, 50, bias=False)})
    if tied:
        model["head"].weight = model["embed"].weight
    plain = copy.deepcopy(model)
    report = quantize(model, "int8", embeddings=True, target="cuda", progress=False)
    table, head = model["embed"], model["head"]
    assert isinstance(table, W8Embedding)
    assert isinstance(head, W8A8Linear)
    assert len(report.layers) == (1 if tied else 2)
    assert (table.weight_values.data_ptr() == head.weight_values.data_ptr()) == tied
    ids = torch.tensor([[0, 49, 7]])
    expected = plain["embed"](ids)
    assert ((table(ids) - expected).norm() / expected.norm()) < 0.01
    assert torch.equal(table(ids), table.dequantize()[ids])
    on_cpu = copy.deepcopy(plain)
    quantize(on_cpu, "int8", embeddings=True, progress=False)
    assert isinstance(on_cpu["embed"], Int8Embedding)
    assert torch.equal(on_cpu["embed"](ids), table(ids))
    assert table.half()(ids).dtype == torch.float16
    assert table.scale.dtype == torch.float32
    with pytest.raises(IndexError):
        table(torch.tensor([50]))


def test_fp8_is_not_for_embeddings_and_experts() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(50, 40), "head": nn.Linear(40, 50)})
    report = quantize(model, "fp8", embeddings=True, target="cuda", progress=False)
    assert report.skipped == {"embed": "fp8 is not for embeddings: take int8 or int4"}
    with pytest.raises(OptionError, match="embeddings: fp8 is not for embeddings: take int8 or int4 for them"):
        QuantizeOptions("fp8", embeddings=True)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = (
                nn.Parameter(torch.zeros(2, 32, 16)),
                nn.Parameter(torch.zeros(2, 16, 16)),
            )

    for dtype in DTYPES:
        model = nn.ModuleDict({"experts": Experts(), "head": nn.Linear(40, 50)})
        report = quantize(model, dtype, target="cuda", progress=False)
        assert report.skipped == {
            "experts": "experts stay in floating point: on GPUs only int4 and nvfp4 have GEMMs for them"
        }


def test_sums_that_do_not_fit() -> None:
    scheme = make_scheme("int8", None, None, target="cuda")
    layer = nn.Linear(132105, 1, device="meta")
    assert scheme.obstacle(layer) == "it has 132105 inputs, and the sums of more than 132104 do not fit int32"
    assert make_scheme("fp8", None, None, target="cuda").obstacle(layer) == ""


def test_weights_that_are_not_finite() -> None:
    model = nn.Sequential(linear())
    model[0].weight.data[0, 0] = torch.nan
    with pytest.raises(InvalidArgumentError, match="quantize: 0: its weight has values that are not finite"):
        quantize(model, "fp8", target="cuda", progress=False)


def test_sensitivity() -> None:
    model = nn.Sequential(linear(64, 32), nn.ReLU(), linear(32, 64))
    batches = [((torch.randn(3, 32),), {})]
    for dtype in DTYPES:
        found = layer_sensitivity(model, dtype, batches, target="cuda")
        assert list(found) == ["0", "2"]
        assert all(0 < value < TOLERANCE[dtype] for value in found.values())
    with pytest.raises(InvalidArgumentError, match="fp8 is for GPUs"):
        layer_sensitivity(model, "fp8", batches)
    with pytest.raises(InvalidArgumentError, match="target: expected 'cpu' or 'cuda', got 'gpu'"):
        layer_sensitivity(model, "fp8", batches, target="gpu")  # type: ignore[arg-type]
