"""Checkpoints of others in eight bits for CPUs: files written here bit by bit, and the layers beside their integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.quant.test_w8_checkpoints import compressed, write
from untorch.ops.int8 import quantize_activations
from untorch.quant import Int4Linear, Int8Linear
from untorch.quant.checkpoints import load_checkpoint
from untorch.runtime.errors import InvalidFileError, UnsupportedError

pytest.importorskip("safetensors.torch")

N, K = 24, 128


def model(k: int = K, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, N), nn.ReLU()).to(dtype)


def loaded(folder: Path, tensors: dict[str, Any], config: Any, k: int = K) -> Int8Linear:
    made = model(k)
    report = load_checkpoint(made, write(folder, tensors, config), target="cpu", progress=False)
    layer = made[0]
    assert isinstance(layer, Int8Linear)
    assert report.layers[0].quantized_dtype == "int8"
    assert report.layers[0].group_size == layer.group_size
    return layer


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[a, b] of values below 2^bits as int32 [a, b · bits / 32], the first in the lowest bits."""
    count = 32 // bits
    parts = values.long().reshape(values.shape[0], -1, count) << (bits * torch.arange(count))
    return parts.sum(-1).to(torch.uint32).view(torch.int32)


def check(layer: Int8Linear, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> None:
    """The layer's integers are the file's, and its results are sums of them, each group's exact."""
    k = q.shape[1]
    groups = scale.shape[1]
    x = torch.randn(7, k) * 2
    u, steps, zeros = quantize_activations(x, layer.input_range, layer.input_scale, layer.input_zero)
    parts = (u.long() - zeros).reshape(7, groups, -1).double(), q.double().reshape(len(q), groups, -1)
    sums = torch.einsum("mgs,ngs->mng", *parts)
    want = (sums * scale.double()).sum(-1) * steps.double() + layer.bias.double()  # type: ignore[union-attr]
    if zero is not None:
        want = want - x.double().reshape(7, groups, -1).sum(-1) @ (zero.double() * scale.double()).T
    got = layer(x).double()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    assert int((layer(x) != 0).sum()) == got.numel()
    shifted = q.double().reshape(len(q), groups, -1) - (0 if zero is None else zero.double().unsqueeze(-1))
    exact = (shifted * scale.double().unsqueeze(-1)).reshape(q.shape)
    torch.testing.assert_close(layer.dequantize().double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        ({"strategy": "token", "dynamic": True, "symmetric": True}, "symmetric"),
        ({"strategy": "token", "dynamic": True, "symmetric": False}, "asymmetric"),
        ({"strategy": "tensor", "dynamic": True, "symmetric": False}, "tensor"),
        ({"strategy": "tensor", "dynamic": False, "symmetric": True}, "static"),
        ({"strategy": "tensor", "dynamic": False, "symmetric": False}, "static"),
        (None, "asymmetric"),
    ],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_compressed_tensors(inputs: dict[str, Any] | None, kind: str, zeros: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    q, scale = torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N, 1) / 100
    tensors: dict[str, Any] = {"0.weight": q, "0.weight_scale": scale}
    zero = torch.randint(-20, 20, (N, 1), dtype=torch.int8) if zeros else None
    if zero is not None:
        tensors["0.weight_zero_point"] = zero
    if kind == "static":
        tensors["0.input_scale"] = torch.tensor([0.03])
        if inputs is not None and not inputs["symmetric"]:
            tensors["0.input_zero_point"] = torch.tensor([-7], dtype=torch.int8)
    config = compressed("int-quantized", symmetric=not zeros)
    stated = None if inputs is None else {"num_bits": 8, "type": "int", **inputs}
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = stated
    layer = loaded(tmp_path, tensors, config)
    assert layer.input_range == kind
    if kind == "static":
        assert (round(layer.input_scale, 6), layer.input_zero) == (0.03, 128 if inputs and inputs["symmetric"] else 121)
    assert (layer.weight_zero is None) == (zero is None)
    check(layer, q, scale, zero)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq(group: int, version: str, symmetric: bool, tmp_path: Path) -> None:
    torch.manual_seed(2)
    q = torch.randint(0, 256, (N, K))
    zero = torch.full((N, K // group), 128) if symmetric else torch.randint(1, 256, (N, K // group))
    scale = (torch.rand(N, K // group) / 100).half()
    stored = zero.T if version == "gptq_v2" else zero.T - 1
    tensors = {
        "0.qweight": words(q, 8).view(N, -1).T.contiguous(),
        "0.qzeros": words(stored, 8),
        "0.scales": scale.T.contiguous(),
        "0.g_idx": (torch.arange(K) // group).int(),
    }
    config = {"quant_method": "gptq", "bits": 8, "group_size": group if group < K else -1, "checkpoint_format": version}
    layer = loaded(tmp_path, tensors, {"quantization_config": config})
    assert layer.group_size == group
    check(layer, q - 128, scale, None if symmetric else zero - 128)


@pytest.mark.parametrize("zeros", [False, True])
def test_pack_quantized(zeros: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    q, scale = torch.randint(-128, 128, (N, K)), torch.rand(N, 4) / 100
    zero = torch.randint(-128, 128, (N, 4))
    tensors = {
        "0.weight_packed": words(q + 128, 8), "0.weight_scale": scale, "0.weight_shape": torch.tensor([N, K]),
        **({"0.weight_zero_point": words((zero + 128).T, 8).T.contiguous()} if zeros else {}),
    }  # fmt: skip
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": not zeros}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    layer = loaded(tmp_path, tensors, {"quantization_config": config})
    check(layer, q, scale, zero if zeros else None)


def test_four_bits_are_the_same_for_both(tmp_path: Path) -> None:
    torch.manual_seed(4)
    q, scale = torch.randint(0, 16, (N, K)), torch.rand(N, 4) / 10
    tensors = {"0.weight_packed": words(q, 4), "0.weight_scale": scale, "0.weight_shape": torch.tensor([N, K])}
    for target in ("cpu", "cuda"):
        made = model()
        load_checkpoint(made, write(tmp_path, tensors), target=target, progress=False)  # type: ignore[arg-type]
        assert isinstance(made[0], Int4Linear)
        want = (q.double() - 8) * scale.double().repeat_interleave(32, 1)
        torch.testing.assert_close(made[0].dequantize().double(), want, rtol=1e-6, atol=0)


def test_what_is_refused(tmp_path: Path) -> None:
    q, scale = torch.ones(N, K, dtype=torch.int8), torch.ones(N, 1)
    config = compressed("int-quantized")
    stated = config["quantization_config"]["config_groups"]["group_0"]
    folder = write(tmp_path, {"0.weight": q, "0.weight_scale": scale}, config)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"num_bits": 4, "type": "int"}, UnsupportedError, "expected activations of 8 bits and type 'int'"),
        ({"strategy": "group", "dynamic": True}, UnsupportedError, "expected activations with a range a token"),
        ({"strategy": "tensor", "dynamic": True}, UnsupportedError, "expected activations with a range a token"),
        ({"strategy": "tensor", "dynamic": False}, InvalidFileError, "there is no tensor '0.input_scale'"),
    ]
    for inputs, error, text in cases:
        stated["input_activations"] = inputs
        write(folder, {"0.weight": q, "0.weight_scale": scale}, config)
        with pytest.raises(error, match=text):
            load_checkpoint(model(), folder, target="cpu", progress=False)
    stated["input_activations"] = {"strategy": "tensor", "dynamic": False}
    write(folder, {"0.weight": q, "0.weight_scale": scale, "0.input_scale": torch.zeros(1)}, config)
    with pytest.raises(InvalidFileError, match="expected one input_scale above 0"):
        load_checkpoint(model(), folder, target="cpu", progress=False)
    gptq = {"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 64}}
    tensors = {
        "0.qweight": torch.zeros(K // 4, N, dtype=torch.int32), "0.qzeros": torch.zeros(2, N // 4, dtype=torch.int32),
        "0.scales": torch.ones(2, N),
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match="gptq in 8 bits is read for CPUs alone"):
        load_checkpoint(model(), write(tmp_path, tensors, gptq), progress=False)
