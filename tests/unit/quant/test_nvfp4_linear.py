"""``quantize(module, "nvfp4")`` and ``NVFP4Linear``: replaced layers, sizes that do not fit, reports, casts, errors."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

from untorch.quant import (
    Int4Linear,
    NVFP4Linear,
    NVFP4Weight,
    concatenate_nvfp4,
    quantize,
    quantize_nvfp4,
    unpack_nvfp4,
    unpack_nvfp4_tiles,
)
from untorch.quant.quantizer import Quantizer
from untorch.runtime.errors import InvalidArgumentError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def net(k: int = 256, n: int = 40) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, n), nn.ReLU(), nn.Linear(n, 200, bias=False)).eval()


@pytest.mark.parametrize("method", ["search", "rtn"])
def test_a_model_is_replaced_in_place_and_computes_nearly_the_same(method: str) -> None:
    model = net()
    before = copy.deepcopy(model)
    report = quantize(model, "nvfp4", method=method, progress=False)
    x = torch.randn(5, 256)
    with torch.no_grad():
        expected, got = before(x), model(x)
    assert 0 < torch.linalg.vector_norm(got - expected) < 0.2 * torch.linalg.vector_norm(expected)
    assert [layer.names for layer in report.layers] == [("0",), ("2",)]
    for layer in report.layers:
        old, new = before.get_submodule(layer.names[0]), model.get_submodule(layer.names[0])
        assert isinstance(new, NVFP4Linear)
        weight = old.weight.detach()
        direct = quantize_nvfp4(weight, search=method == "search").dequantize()
        assert torch.equal(new.dequantize(), direct[:, : old.in_features])
        error = torch.linalg.vector_norm(new.dequantize() - weight) / torch.linalg.vector_norm(weight)
        assert layer.error == pytest.approx(float(error), rel=1e-4)
        assert (layer.method, layer.group_size, layer.dtype) == (method, 16, "float32")
        n, k = layer.packed_shape
        assert layer.nbytes_after == new.weight_nbytes == n * k // 2 + n * k // 16 + 4 * n
        assert not new.training
        assert layer.to_json()["rtn_error"] == layer.rtn_error
        if method == "search":
            assert layer.rtn_error is not None
            assert 0.05 < layer.error < 0.95 * layer.rtn_error
        else:
            assert layer.rtn_error is None
    assert report.module_nbytes_before - report.module_nbytes_after == report.nbytes_before - report.nbytes_after


def test_the_errors_of_both_methods_are_those_of_either() -> None:
    searched, plain = net(), net()
    errors = [layer.rtn_error for layer in quantize(searched, "nvfp4", progress=False).layers]
    assert errors == [layer.error for layer in quantize(plain, "nvfp4", method="rtn", progress=False).layers]


def test_the_table_compares_with_rounding_to_nearest() -> None:
    lines = quantize(net(), "nvfp4", progress=False, include="0").table().splitlines()
    assert lines[0].split() == ["layer", "shape", "group", "method", "error", "rtn", "error", "before", "after", "note"]
    error, rtn = (float(cell) for cell in lines[1].split()[6:8])
    assert 0.05 < error < rtn < 0.12
    assert lines[1].split()[:6] == ["0", "40", "×", "256", "16", "search"]
    assert lines[2].split() == ["sum", "0.04", "MiB", "0.01", "MiB"]
    assert lines[1].index("MiB") == lines[2].index("MiB") == lines[3].index("MiB")
    assert "rtn" not in quantize(net(), "nvfp4", method="rtn", progress=False).table().splitlines()[0]


@hypothesis.given(
    k=st.integers(1, 300),
    n=st.integers(1, 40),
    rows=st.sampled_from([(), (3,), (2, 0), (2, 3)]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    transposed=st.booleans(),
)
@hypothesis.settings(deadline=None, max_examples=50)
def test_sizes_that_do_not_fit_and_dtypes(
    k: int, n: int, rows: tuple[int, ...], dtype: torch.dtype, biased: bool, transposed: bool
) -> None:
    torch.manual_seed(k * n)
    model = nn.Sequential(nn.Linear(k, n, bias=biased)).to(dtype)
    bias = None if model[0].bias is None else model[0].bias.detach()
    report = quantize(model, "nvfp4", method="rtn", include="0", progress=False)
    layer = model[0]
    assert isinstance(layer, NVFP4Linear)
    assert layer.dequantize().shape == (n, k)
    whole, scales = unpack_nvfp4(unpack_nvfp4_tiles(layer.packed_weight)), layer.block_scale.view(torch.uint8)
    assert not whole[n:].any() and not whole[:, k:].any()
    assert not scales[n:].any() and not scales[:, -(-k // 16) :].any()
    x = torch.randn(*rows, k).to(dtype)
    if transposed and len(rows) == 2:
        x = x.mT.contiguous().mT
    y = model(x)
    assert y.shape == (*rows, n)
    assert y.dtype == dtype
    assert y.is_contiguous()
    expected = nn.functional.linear(x.float(), layer.dequantize(), None if bias is None else bias.float())
    torch.testing.assert_close(y.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert report.layers[0].shape == (n, k)
    assert report.layers[0].packed_shape == (-(-n // 8) * 8, -(-k // 128) * 128)
    with pytest.raises(InvalidArgumentError, match=f"NVFP4Linear: expected {k} features in the last dimension, got"):
        model(torch.randn(2, k + 1).to(dtype))


def test_what_pays_what_is_shared_and_what_is_not_finite() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128, bias=False), nn.Linear(4, 8))
    model[1].weight = model[0].weight
    report = quantize(model, "nvfp4", progress=False)
    assert model[0].packed_weight is model[1].packed_weight
    assert model[0].block_scale is model[1].block_scale
    assert report.layers[0].names == ("0", "1")
    assert report.skipped == {"2": "it would grow from 128 to 608 bytes"}
    broken = net()
    with torch.no_grad():
        broken[2].weight[3, 5] = float("inf")
    with pytest.raises(InvalidArgumentError, match="quantize: 2: its weight has values that are not finite"):
        quantize(broken, "nvfp4", progress=False)
    assert type(broken[0]) is nn.Linear


def test_both_dtypes_in_one_module() -> None:
    model = net()
    quantize(model, "nvfp4", include="0", progress=False)
    quantize(model, "int4", method="rtn", progress=False)
    assert isinstance(model[0], NVFP4Linear)
    assert isinstance(model[2], Int4Linear)
    assert model(torch.randn(3, 256)).shape == (3, 200)
    quantizer = Quantizer("nvfp4")
    linear = nn.Linear(128, 16)
    quantizer.apply(linear)
    assert isinstance(quantizer.replacement(linear), NVFP4Linear)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_leave_the_scales_as_they_are(dtype: torch.dtype) -> None:
    model = net()
    quantize(model, "nvfp4", progress=False)
    before = model[0].dequantize()
    model.to(dtype)
    layer = model[0]
    assert layer.block_scale.dtype == torch.float8_e4m3fn
    assert layer.global_scale.dtype == torch.float32
    assert layer.packed_weight.dtype == torch.int32
    assert layer.bias.dtype == dtype
    assert torch.equal(layer.dequantize(), before)
    assert model(torch.randn(2, 256, dtype=dtype)).dtype == dtype
    model.to("meta")
    assert (layer.block_scale.device.type, layer.block_scale.dtype) == ("meta", torch.float8_e4m3fn)


def test_state_dicts_and_copies() -> None:
    model, other = net(), net()
    quantize(model, "nvfp4", method="rtn", progress=False)
    quantize(other, "nvfp4", progress=False)
    state = model.state_dict()
    assert {name for name in state if name.startswith("0.")} == {
        "0.packed_weight", "0.block_scale", "0.global_scale", "0.bias",
    }  # fmt: skip
    other.load_state_dict(state)
    x = torch.randn(3, 256)
    with torch.no_grad():
        assert torch.equal(model(x), other(x))
        assert torch.equal(model(x), copy.deepcopy(model)(x))
    assert not hasattr(model[0], "weight")
    assert "in_features=256, out_features=40, bias=True, method='rtn'" in repr(model)


@pytest.mark.parametrize("prefill", ["fp8", "fp4"])
def test_prefill(prefill: str) -> None:
    """It is a property of the layer and says so; values here, where it asks for nothing, are the same."""
    exact, model = net(), net()
    assert {layer.prefill for layer in quantize(exact, "nvfp4", method="rtn", progress=False).layers} == {"exact"}
    report = quantize(model, "nvfp4", method="rtn", prefill=prefill, progress=False)
    assert [layer.prefill for layer in report.layers] == [prefill, prefill]
    assert report.layers[0].note == f"prefill in {prefill}"
    assert report.layers[0].to_json()["prefill"] == prefill
    assert (model[0].prefill, exact[0].prefill) == (prefill, "exact")
    assert f"method='rtn', prefill={prefill!r}" in repr(model)
    assert "prefill" not in repr(exact)
    x = torch.randn(500, 256)
    with torch.no_grad():
        assert torch.equal(model(x), exact(x))
    program = torch.export.export(model, (x,))
    asked = [node.args[5] for node in program.graph.nodes if "nvfp4_linear" in str(node.target)]
    assert asked == [prefill, prefill]


@pytest.mark.parametrize(
    ("dtype", "prefill", "text"),
    [
        ("nvfp4", "fp16", "quantize: prefill: expected one of 'exact', 'fp8', 'fp4', got 'fp16'"),
        ("nvfp4", None, "quantize: prefill: expected one of 'exact', 'fp8', 'fp4', got None"),
        (
            "int4",
            "fp8",
            "quantize: prefill: int4 has 'exact' alone, which need not be given; nvfp4 has others; got 'fp8'",
        ),
    ],
)
def test_unknown_prefill(dtype: str, prefill: Any, text: str) -> None:
    model = net()
    with pytest.raises(InvalidArgumentError) as error:
        quantize(model, dtype, prefill=prefill, progress=False)
    assert str(error.value) == text
    assert type(model[0]) is nn.Linear


def test_gate_and_up_as_one_layer() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(24, 48), 0.1 * torch.randn(17, 48)
    parts = [quantize_nvfp4(gate), quantize_nvfp4(up)]
    layer = NVFP4Linear.from_weight(concatenate_nvfp4(parts), torch.randn(41), in_features=48, method="search")
    expected = torch.cat([part.dequantize(torch.float64) for part in parts])
    assert torch.equal(layer.dequantize(torch.float64), expected)
    assert layer(torch.randn(2, 48)).shape == (2, 41)


def fields(**changed: Any) -> dict[str, Any]:
    base = {
        "packed_weight": torch.zeros(1, 1, 32, 4, dtype=torch.int32),
        "block_scale": torch.zeros(8, 8, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "global_scale": torch.ones(8), "bias": torch.zeros(7), "in_features": 100, "out_features": 7, "method": "rtn",
    }  # fmt: skip
    return base | changed


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"packed_weight": torch.zeros(1, 1, 32, 4)},
            "packed_weight: expected int32 [n / 8][k / (16 · inner_k_tiles)]",
        ),
        ({"packed_weight": torch.zeros(8, 64, dtype=torch.uint8)}, "got uint8 [8, 64]"),
        ({"out_features": 9}, "packed_weight: it holds 8 × 128 values, which do not fit 9 × 100 features"),
        ({"in_features": 129}, "which do not fit 7 × 129 features"),
        ({"in_features": 0}, "which do not fit 7 × 0 features"),
        ({"block_scale": torch.zeros(8, 8)}, "block_scale: expected float8_e4m3fn [8, 8], got float32 [8, 8]"),
        ({"block_scale": fields()["block_scale"][:7]}, "expected float8_e4m3fn [8, 8], got float8_e4m3fn [7, 8]"),
        ({"global_scale": torch.ones(())}, "global_scale: expected float32 [8], got float32 []"),
        ({"global_scale": torch.ones(8).half()}, "global_scale: expected float32 [8], got float16 [8]"),
        ({"bias": torch.zeros(8)}, "bias: expected [7], got [8]"),
        ({"prefill": "fp16"}, "prefill: expected one of 'exact', 'fp8', 'fp4', got 'fp16'"),
    ],
)
def test_a_layer_refuses_what_does_not_fit(changed: dict[str, Any], text: str) -> None:
    NVFP4Linear(**fields())
    with pytest.raises(InvalidArgumentError) as error:
        NVFP4Linear(**fields(**changed))
    assert str(error.value).startswith("NVFP4Linear: ")
    assert text in str(error.value)


def test_weights_that_are_no_matrix_of_bytes() -> None:
    made = quantize_nvfp4(torch.randn(2, 8, 32))
    with pytest.raises(
        InvalidArgumentError, match=r"NVFP4Linear: weight: expected packed uint8 \[n, k / 2\], got uint8 \[2, 8, 16\]"
    ):
        NVFP4Linear.from_weight(made, None, in_features=32, method="rtn")
    wrong = NVFP4Weight(made.packed[0], made.block_scale[0], torch.ones(3))
    with pytest.raises(
        InvalidArgumentError,
        match=r"NVFP4Linear: global_scale: expected float32 \[\] or \[1\] or \[8\], got float32 \[3\]",
    ):
        NVFP4Linear.from_weight(wrong, None, in_features=32, method="rtn")
