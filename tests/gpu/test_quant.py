"""Quantising with a GPU: the packed layout bit for bit against PyTorch's, and weights that are quantised there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import untorch
from untorch.export import export
from untorch.ops.int4 import OPERATOR, dequantize_int4
from untorch.ops.int4_layout import pack_int4, unpack_int4, values_to_nibbles
from untorch.quant import Int4Linear, quantize


@pytest.mark.parametrize("inner_k_tiles", [2, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(8, 128), (16, 256), (24, 384), (104, 1024), (4096, 2048)])
def test_the_layout_is_pytorchs_bit_for_bit(n: int, k: int, inner_k_tiles: int) -> None:
    values = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    theirs = torch.ops.aten._convert_weight_to_int4pack(values_to_nibbles(values), inner_k_tiles)
    ours = pack_int4(values, inner_k_tiles)
    assert ours.shape == theirs.shape
    assert torch.equal(ours, theirs)
    assert torch.equal(pack_int4(values.cpu(), inner_k_tiles), theirs.cpu())
    assert torch.equal(unpack_int4(theirs), values)


@pytest.mark.parametrize("inner_k_tiles", [2, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_weights_mean_what_pytorchs_operator_takes_them_for(group_size: int, inner_k_tiles: int) -> None:
    n, k = 64, 512
    weight = pack_int4(torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda"), inner_k_tiles)
    scale_and_zero = torch.randn(k // group_size, n, 2, device="cuda", dtype=torch.bfloat16)
    # Rows of the identity give the weight itself, rounded to bfloat16 as the operator rounds it.
    identity = torch.eye(k, device="cuda", dtype=torch.bfloat16)
    theirs = torch.ops.aten._weight_int4pack_mm(identity, weight, group_size, scale_and_zero)
    ours = dequantize_int4(weight, scale_and_zero, group_size)
    torch.testing.assert_close(theirs.T.float(), ours, rtol=2**-7, atol=2**-7)
    reference = OPERATOR(identity, weight, scale_and_zero, group_size, None)
    torch.testing.assert_close(reference.T.float(), ours, rtol=2**-8, atol=0)


@pytest.mark.parametrize("method", ["hqq", "rtn", "symmetric"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantising_on_the_gpu_is_as_good(method: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(1000, 301).to(dtype)
    errors = []
    for where, device in (("cpu", None), ("cpu", "cuda"), ("cuda", None)):
        model = nn.Sequential(nn.Linear(1000, 301).to(dtype)).to(where)
        model[0].load_state_dict(linear.state_dict())
        report = quantize(model, group_size=64, method=method, device=device, progress=False)
        assert isinstance(model[0], Int4Linear)
        assert model[0].packed_weight.device.type == where
        errors.append(report.layers[0].error)
        x = torch.randn(3, 1000, device=where, dtype=dtype)
        assert model(x).shape == (3, 301)
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "group_size"), [("int4", 64), ("nvfp4", 16)])
def test_a_file_computes_what_the_quantised_module_does(
    kind: str, group_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 301), nn.GELU(), nn.Linear(301, 256, bias=False)).to(dtype).eval()
    x = torch.randn(4, 1000, dtype=dtype)
    report = export(
        model, (x,), tmp_path / "model.pt2", device="cuda", dynamic_shapes=({0: Dim("rows", min=1, max=4096)},),
        quantize={"dtype": kind, "group_size": group_size, "method": "rtn"}, progress=False,
    )  # fmt: skip
    assert f"aoti_torch_cuda_{kind}_linear" in report.methods["forward"].operators
    assert type(model[0]) is nn.Linear
    reference = nn.Sequential(*model)
    # As export does it: on the GPU, from weights that lie on the CPU.
    quantize(reference, kind, group_size=group_size, method="rtn", device="cuda", progress=False)
    reference = reference.cuda()
    with untorch.load(tmp_path / "model.pt2") as program:
        for rows in (1, 5, 16, 100, 1000):
            x = torch.randn(rows, 1000, dtype=dtype, device="cuda")
            with torch.no_grad():
                expected = reference(x)
            got = torch.from_dlpack(program.forward(x))
            tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_file_computes_what_the_module_in_eight_bits_does(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 301), nn.GELU(), nn.Linear(301, 256, bias=False)).to(dtype).eval()
    report = export(
        model, (torch.randn(4, 1000, dtype=dtype),), tmp_path / "model.pt2", device="cuda", quantize=kind,
        dynamic_shapes=({0: Dim("rows", min=1, max=4096)},), progress=False,
    )  # fmt: skip
    assert "aoti_torch_cuda_w8a8_linear" in report.methods["forward"].operators
    reference = nn.Sequential(*model)
    quantize(reference, kind, target="cuda", progress=False)
    reference = reference.cuda()
    with untorch.load(tmp_path / "model.pt2") as program:
        for rows in (1, 5, 16, 100, 1000):
            x = torch.randn(rows, 1000, dtype=dtype, device="cuda")
            with torch.no_grad():
                expected = reference(x)
            got = torch.from_dlpack(program.forward(x))
            # What lies on the border between two roundings may go either way.
            tolerance = 3e-2 if kind == "fp8" or dtype == torch.bfloat16 else 1e-2
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "group_size", "values"),
    [
        ("int4", 64, 304 * 1024 + 256 * 384),
        ("nvfp4", 16, 304 * 1024 + 256 * 384),
    ],
)
def test_dequantized_weights(kind: str, group_size: int, values: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Large M uses them, small M does not; programs of one file share one copy, freed with the last of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 301), nn.GELU(), nn.Linear(301, 256, bias=False)).to(dtype).eval()
    file = tmp_path / "model.pt2"
    export(
        model, (torch.randn(4, 1000, dtype=dtype),), file, device="cuda", progress=False,
        dynamic_shapes=({0: Dim("rows", min=1, max=4096)},),
        quantize={"dtype": kind, "group_size": group_size, "method": "rtn"},
    )  # fmt: skip
    quantize(model, kind, group_size=group_size, method="rtn", device="cuda", progress=False)
    model = model.cuda()
    with untorch.load(file) as packed:
        with (
            untorch.load(file, dequantize_weights=True) as program,
            untorch.load(file, dequantize_weights=True) as second,
        ):
            for m in (1, 8, 9, 100, 1000):
                x = torch.randn(m, 1000, dtype=dtype, device="cuda")
                with torch.no_grad():
                    expected = model(x)
                got = torch.from_dlpack(program(x))
                tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3
                torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
                if m <= 8 and dtype != torch.float32:
                    assert torch.equal(got, torch.from_dlpack(packed(x)))
            assert program.memory()["dequantized"] == values * dtype.itemsize
            with program.forward.graph(x) as graph:
                assert torch.equal(torch.from_dlpack(graph(x)), got)
            assert torch.equal(torch.from_dlpack(second(x)), got)
            assert second.memory()["dequantized"] == values * dtype.itemsize
        assert packed.memory()["dequantized"] == 0


def test_dequantized_weights_with_the_same_bytes_and_other_scales(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)).bfloat16()
    with torch.no_grad():
        model[1].weight.copy_(model[0].weight * 4)
    file, x = tmp_path / "model.pt2", torch.randn(100, 256).bfloat16()
    export(model, (x,), file, device="cuda", quantize={"dtype": "int4", "method": "rtn"}, progress=False)
    quantize(model, "int4", method="rtn", progress=False)
    assert torch.equal(model[0].packed_weight, model[1].packed_weight)
    with torch.no_grad():
        expected = model.cuda()(x.cuda())
    with untorch.load(file, dequantize_weights=True) as program:
        torch.testing.assert_close(torch.from_dlpack(program(x.cuda())), expected, rtol=2e-2, atol=2e-2)


def test_dequantized_weights_of_a_file_without_any(mlp: tuple[Path, nn.Module]) -> None:
    with pytest.raises(untorch.InvalidArgumentError, match="expected a file with int4 or NVFP4 linear layers on a GPU"):
        untorch.load(mlp[0], dequantize_weights=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_with_prefill_in_float8(dtype: torch.dtype, tmp_path: Path) -> None:
    """Small M is exact. Large M is a W8A8 GEMM, with the rounding errors of E4M3's four significant bits."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8 GEMMs")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 301), nn.GELU(), nn.Linear(301, 256, bias=False)).to(dtype).eval()
    x = torch.randn(4, 1000, dtype=dtype)
    export(
        model, (x,), tmp_path / "model.pt2", device="cuda", dynamic_shapes=({0: Dim("rows", min=1, max=4096)},),
        quantize={"dtype": "nvfp4", "method": "rtn", "prefill": "fp8"}, progress=False,
    )  # fmt: skip
    quantize(model, "nvfp4", method="rtn", device="cuda", progress=False)
    model = model.cuda()
    with untorch.load(tmp_path / "model.pt2") as program:
        for m in (1, 16, 512, 513, 1000):
            x = torch.randn(m, 1000, dtype=dtype, device="cuda")
            with torch.no_grad():
                expected = model(x).float()
            got = torch.from_dlpack(program.forward(x)).float()
            apart = float(torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected))
            if m <= 512:
                assert apart < 1e-2
            else:
                assert (1e-2 if dtype != torch.float32 else 1e-3) < apart < 0.1
