"""Checkpoints of other projects: files made here, nibble by nibble, from a weight that is known exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest
import torch
from torch import nn

from untorch.ops.int4_layout import pack_int4
from untorch.quant import Int4Linear
from untorch.quant.checkpoints import convert_torchao, load_checkpoint
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, UnsupportedError

save_file = pytest.importorskip("safetensors.torch").save_file

SYMMETRIC = 8


class Weight:
    """q, scales and zero points of a layer [n, k], and what each weight is, in float64."""

    def __init__(self, n: int, k: int, group: int, zero: int | None, dtype: torch.dtype, seed: int = 0) -> None:
        random = numpy.random.default_rng(seed)
        self.n, self.k, self.group = n, k, group
        groups = -(-k // group)
        self.q = random.integers(0, 16, (n, k))
        self.zero = numpy.full((n, groups), zero) if zero is not None else random.integers(0, 16, (n, groups))
        self.scale = torch.from_numpy(random.uniform(0.001, 0.1, (n, groups))).to(dtype)
        which = numpy.arange(k) // group
        self.exact = (self.q - self.zero[:, which]) * self.scale.double().numpy()[:, which]


def words(rows: Any) -> torch.Tensor:
    """Each row's values, eight to an int32, the first in the lowest bits; zeros behind a row that does not fill one."""
    packed = []
    for row in rows:
        row = [int(value) for value in row] + [0] * (-len(row) % 8)
        line = [sum(row[at + i] << (4 * i) for i in range(8)) for at in range(0, len(row), 8)]
        packed.append([word - (1 << 32) if word >= 1 << 31 else word for word in line])
    return torch.tensor(packed, dtype=torch.int32)


def pack_quantized(name: str, weight: Weight, asymmetric: bool) -> dict[str, torch.Tensor]:
    tensors = {
        f"{name}.weight_packed": words(weight.q),
        f"{name}.weight_scale": weight.scale,
        f"{name}.weight_shape": torch.tensor([weight.n, weight.k]),
    }
    if asymmetric:
        tensors[f"{name}.weight_zero_point"] = words(weight.zero.T).T.contiguous()
    return tensors


def gptq(name: str, weight: Weight, version: int = 1) -> dict[str, torch.Tensor]:
    stored = (weight.zero - 1) % 16 if version == 1 else weight.zero
    return {
        f"{name}.qweight": words(weight.q).T.contiguous(),
        f"{name}.qzeros": words(stored.T),
        f"{name}.scales": weight.scale.T.contiguous(),
        f"{name}.g_idx": torch.arange(weight.k, dtype=torch.int32) // weight.group,
    }


def awq(name: str, weight: Weight) -> dict[str, torch.Tensor]:
    def shuffled(rows: Any) -> Any:
        eights = rows.reshape(rows.shape[0], -1, 8)
        return eights[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(rows.shape)

    return {
        f"{name}.qweight": words(shuffled(weight.q.T)),
        f"{name}.qzeros": words(shuffled(weight.zero.T)),
        f"{name}.scales": weight.scale.T.contiguous(),
    }


def model_of(weight: Weight, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.embed, model.inner = nn.Embedding(10, 4), nn.Sequential(nn.Linear(weight.k, weight.n, bias=bias), nn.ReLU())
    return model.to(dtype)


def write(folder: Path, tensors: dict[str, torch.Tensor], config: Any = None, name: str = "config.json") -> Path:
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / name).write_text(json.dumps(config))
    return folder


def test_prefill_is_not_for_int4(tmp_path: Path) -> None:
    weight = Weight(8, 128, 128, SYMMETRIC, torch.float16)
    path = write(tmp_path, pack_quantized("inner.0", weight, False))
    model = model_of(weight)
    for prefill, text in [
        ("fp8", f"prefill: {path} is in int4 (pack-quantized), which has 'exact' alone; got 'fp8'"),
        ("fp9", "prefill: expected one of 'exact', 'fp8', 'fp4', got 'fp9'"),
    ]:
        with pytest.raises(InvalidArgumentError) as error:
            load_checkpoint(model, path, prefill=prefill, progress=False)
        assert str(error.value) == f"load_checkpoint: {text}"
    assert type(model.inner[0]) is nn.Linear


def assert_exact(layer: nn.Module, weight: Weight) -> None:
    assert isinstance(layer, Int4Linear)
    numpy.testing.assert_array_equal(layer.dequantize(torch.float64).numpy(), weight.exact)
    numpy.testing.assert_array_equal(layer.dequantize().double().numpy(), weight.exact)


@hypothesis.given(
    n=st.integers(1, 30),
    groups=st.integers(1, 3),
    cut=st.integers(0, 31),
    group=st.sampled_from([32, 64, 96, 128, 256, 512]),
    zero=st.sampled_from([SYMMETRIC, None]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_pack_quantized(
    n: int, groups: int, cut: int, group: int, zero: int | None, dtype: torch.dtype, seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    weight = Weight(n, groups * group - cut, group, zero, dtype, seed)
    path = write(tmp_path_factory.mktemp("ct"), pack_quantized("inner.0", weight, zero is None))
    # Without a configuration, groups that do not divide k cannot be told; one for each output can.
    if cut and groups > 1:
        stated = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": zero is not None}
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {}}}
        config["config_groups"]["group_0"]["weights"] = stated  # type: ignore[index]
        write(path, pack_quantized("inner.0", weight, zero is None), {"quantization_config": config})
    model = model_of(weight)
    bias = model.inner[0].bias.detach().clone()
    report = load_checkpoint(model, path, progress=False)
    layer = model.inner[0]
    assert_exact(layer, weight)
    assert torch.equal(layer.bias[:n], bias)
    if zero == SYMMETRIC:
        assert layer.scale_and_zero.dtype == dtype
        assert not layer.scale_and_zero[..., 1].any()
    assert [item.names for item in report.layers] == [("inner.0",)]
    assert report.layers[0].method == "pack-quantized"
    assert "unknown" in report.table()
    assert report.to_json()["layers"][0]["error"] is None
    x = torch.randn(2, weight.k).bfloat16()
    expected = x.double() @ torch.from_numpy(weight.exact).T + bias.double()
    torch.testing.assert_close(model.inner[0](x).double(), expected, rtol=2**-7, atol=1e-3)


@hypothesis.given(
    n8=st.integers(1, 5),
    groups=st.integers(1, 3),
    group=st.sampled_from([32, 64, 128, 1024]),
    kind=st.sampled_from(["gptq", "gptq_v2", "awq"]),
    zero=st.sampled_from([SYMMETRIC, None]),
    configured=st.booleans(),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_gptq_and_awq(
    n8: int, groups: int, group: int, kind: str, zero: int | None, configured: bool, seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    weight = Weight(8 * n8, groups * group, group, zero, torch.float16, seed)
    config: dict[str, Any] | None = {"quant_method": kind.removesuffix("_v2"), "bits": 4, "group_size": group}
    assert config is not None
    if kind == "gptq_v2":
        config["checkpoint_format"] = "gptq_v2"
    elif kind == "awq":
        config |= {"version": "gemm", "zero_point": True}
    tensors = awq("inner.0", weight) if kind == "awq" else gptq("inner.0", weight, 2 if kind == "gptq_v2" else 1)
    if not configured and kind != "gptq_v2":
        config = None
    name = "config.json" if configured else "quantize_config.json"
    path = write(
        tmp_path_factory.mktemp("other"), tensors, {"quantization_config": config} if configured else config, name
    )
    model = model_of(weight, bias=False)
    report = load_checkpoint(model, path / "model.safetensors", progress=False)
    assert_exact(model.inner[0], weight)
    assert report.layers[0].method == kind.removesuffix("_v2")
    assert model.inner[0].bias is None


def test_zeros_that_the_scales_dtype_does_not_hold_are_stored_in_float32(tmp_path: Path) -> None:
    weight = Weight(8, 128, 64, None, torch.bfloat16)
    weight.zero[:] = 3
    weight.scale[:] = 1 + 2**-7  # 5·scale needs ten bits, bfloat16 has eight
    weight.exact = (weight.q - 3) * (1 + 2**-7)
    model = model_of(weight)
    load_checkpoint(model, write(tmp_path, pack_quantized("inner.0", weight, True)), progress=False)
    assert model.inner[0].scale_and_zero.dtype == torch.float32
    assert_exact(model.inner[0], weight)


def test_biases_prefixes_several_files_and_what_is_left_alone(tmp_path: Path) -> None:
    first, second = Weight(16, 128, 64, SYMMETRIC, torch.float16), Weight(8, 16, 32, SYMMETRIC, torch.float16, 1)
    tensors = pack_quantized("model.a", first, False)
    tensors["model.a.bias"] = torch.arange(16.0)
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    other = pack_quantized("model.b", second, False)
    other["model.b.bias"] = torch.zeros(8)
    save_file(other, tmp_path / "model-00002-of-00002.safetensors")
    model = nn.ModuleDict({"a": nn.Linear(128, 16), "b": nn.Linear(16, 8, bias=False), "c": nn.Linear(4, 4)})
    report = load_checkpoint(model, tmp_path, prefix="model.", progress=False)
    assert_exact(model["a"], first)
    assert_exact(model["b"], second)
    assert torch.equal(model["a"].bias, torch.arange(16.0))
    assert model["b"].bias is None  # zeros, and the module has none
    assert report.skipped == {"c": "not in the file"}


def test_a_module_without_weights_yet(tmp_path: Path) -> None:
    weight = Weight(16, 128, 64, SYMMETRIC, torch.float16)
    with torch.device("meta"):
        model = model_of(weight, bias=False)
    load_checkpoint(model, write(tmp_path, pack_quantized("inner.0", weight, False)), progress=False)
    assert_exact(model.inner[0], weight)


def changed(tensors: dict[str, torch.Tensor], **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    result = dict(tensors)
    for name, value in changes.items():
        if value is None:
            del result[f"inner.0.{name}"]
        else:
            result[f"inner.0.{name}"] = value
    return result


ONE = Weight(16, 128, 64, SYMMETRIC, torch.float16)
PACKED, GPTQ, AWQ = pack_quantized("inner.0", ONE, False), gptq("inner.0", ONE), awq("inner.0", ONE)


def compressed(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 64, **weights}}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("tensors", "config", "error", "text"),
    [
        (changed(PACKED, weight_scale=None), None, InvalidFileError, "there is no tensor 'inner.0.weight_scale'"),
        (
            changed(PACKED, weight_packed=torch.zeros(16, 15).int()), None, InvalidFileError,
            "inner.0.weight_packed: expected int32 [16, 16], got int32 [16, 15]",
        ),
        (
            changed(PACKED, weight_scale=torch.zeros(15, 2)), None, InvalidFileError,
            "inner.0.weight_scale: expected float16 or bfloat16 or float32 [16, any], got float32 [15, 2]",
        ),
        (changed(PACKED, weight_scale=torch.zeros(16, 3)), None, InvalidFileError, "3 scales an output do not fit 128"),
        (changed(PACKED, weight_scale=torch.ones(16, 8)), None, UnsupportedError, "groups of 16 cannot be held"),
        (
            changed(PACKED, weight_scale=torch.full((16, 2), float("nan"))), None, InvalidFileError,
            "inner.0: it has scales that are not finite",
        ),
        (
            changed(PACKED, weight_shape=torch.tensor([16, 127])), None, InvalidFileError,
            "inner.0: 2 scales an output do not fit 127 inputs",
        ),
        (
            changed(PACKED, weight_shape=torch.tensor([16, 126])), None, InvalidArgumentError,
            "inner.0 has 126 → 16 features, the module's layer 128 → 16",
        ),
        (changed(PACKED, weight_g_idx=torch.arange(128).flip(0) // 64), None, UnsupportedError, "not of neighbouring"),
        (changed(PACKED, bias=torch.zeros(3)), None, InvalidFileError, "inner.0.bias: expected floating point [16], got"),
        (PACKED, compressed(num_bits=3), UnsupportedError, "inner.0: expected 4 or 8 bits, the configuration says 3"),
        (PACKED, compressed(type="float"), UnsupportedError, "expected integers, got the type 'float'"),
        (PACKED, compressed(group_size=32), InvalidFileError, "2 scales an output do not fit 128 inputs"),
        (
            PACKED, {**compressed(), "format": "marlin-24"}, UnsupportedError,
            "compressed-tensors' format 'marlin-24' is not read, only 'pack-quantized', 'nvfp4-pack-quantized', "
            "'float-quantized', 'int-quantized', 'naive-quantized' are",
        ),
        (PACKED, {"quant_method": "bitsandbytes"}, UnsupportedError, "quantisation by 'bitsandbytes' is not read, expect"),
        (GPTQ, {"quant_method": "gptq", "bits": 3}, UnsupportedError, "expected 4 or 8 bits, the configuration says 3"),
        (
            changed(GPTQ, g_idx=torch.arange(128, dtype=torch.int32) % 2), None, UnsupportedError,
            "take a checkpoint without desc_act, or with static groups",
        ),
        (changed(GPTQ, qzeros=torch.zeros(2, 1).int()), None, InvalidFileError, "qzeros: expected int32 [2, 2], got"),
        (AWQ, {"quant_method": "awq", "version": "gemv"}, UnsupportedError, "AWQ's version 'gemv' is not read, only"),
        ({"inner.0.weight": torch.zeros(2)}, None, UnsupportedError, "it has no weights in four or eight bits that are"),
        (
            {"inner.0.weight": torch.zeros(2)}, {"quant_method": "gptq", "bits": 4}, InvalidFileError,
            "it is a gptq checkpoint and has no quantised layer",
        ),
        (
            pack_quantized("inner.7", ONE, False), None, InvalidArgumentError,
            "the module has no linear layer inner.7; it has inner.0; prefix is what",
        ),
    ],
)  # fmt: skip
def test_errors(
    tensors: dict[str, torch.Tensor], config: Any, error: type[Exception], text: str, tmp_path: Path
) -> None:
    model = model_of(ONE)
    write(tmp_path, tensors, None if config is None else {"quantization_config": config})
    with pytest.raises(error) as caught:
        load_checkpoint(model, tmp_path, progress=False)
    assert text in str(caught.value)
    assert type(model.inner[0]) is nn.Linear


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected a .safetensors file or a folder that holds some, found"):
        load_checkpoint(model_of(ONE), tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"x\.safetensors: expected a .safetensors file or a folder"):
        load_checkpoint(model_of(ONE), tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InvalidFileError, match=r"model\.safetensors: it is no safetensors file: "):
        load_checkpoint(model_of(ONE), tmp_path)
    write(tmp_path, PACKED)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidFileError, match=r"config\.json: it is not valid JSON"):
        load_checkpoint(model_of(ONE), tmp_path)
    (tmp_path / "config.json").unlink()
    save_file(PACKED, tmp_path / "twice.safetensors")
    with pytest.raises(InvalidFileError, match=r"two files have a tensor 'inner\.0\.weight_"):
        load_checkpoint(model_of(ONE), tmp_path)


def test_without_safetensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UnsupportedError, match=r"checkpoints need safetensors: pip install 'untorch\[checkpoints\]'"):
        load_checkpoint(model_of(ONE), tmp_path)


class Tiles:
    """The attributes of torchao's Int4TilePackedTo4dTensor."""

    act_pre_scale: torch.Tensor | None = None

    def __init__(self, qdata: torch.Tensor, scale_and_zero: torch.Tensor, group: int) -> None:
        self.qdata, self.scale_and_zero, self.block_size = qdata, scale_and_zero, [1, group]


class Affine:
    """Those of its older affine quantised tensor in tensor-core tiles."""

    def __init__(self, qdata: torch.Tensor, scale_and_zero: torch.Tensor, group: int) -> None:
        self.tensor_impl = Tiles(qdata, scale_and_zero, group)
        self.tensor_impl.packed_weight = self.tensor_impl.__dict__.pop("qdata")  # type: ignore[attr-defined]
        del self.tensor_impl.block_size
        self.block_size = (1, group)


def with_weight(weight: Any, out_features: int, in_features: int) -> nn.Module:
    """A model with one linear layer of that weight; torchao's are parameters, which a made-up class cannot be."""
    model = nn.Sequential(nn.Linear(in_features, out_features), nn.Linear(4, 4))
    del model[0]._parameters["weight"]
    object.__setattr__(model[0], "weight", weight)
    return model


@pytest.mark.parametrize("kind", [Tiles, Affine])
def test_torchao(kind: type) -> None:
    # It pads k to 1024 and n to 8.
    values = torch.randint(0, 16, (24, 1024))
    scale_and_zero = torch.rand(8, 24, 2).bfloat16()
    model = with_weight(kind(pack_int4(values), scale_and_zero, 128), 21, 900)
    bias = model[0].bias.detach().clone()
    report = convert_torchao(model)
    layer = model[0]
    assert isinstance(layer, Int4Linear)
    scale, zero = scale_and_zero.double().permute(2, 1, 0).repeat_interleave(128, -1)
    expected = ((values - 8) * scale + zero)[:21, :900]
    assert torch.equal(layer.dequantize(torch.float64), expected)
    assert torch.equal(layer.bias[:21], bias)
    assert layer(torch.randn(2, 900)).shape == (2, 21)
    assert (report.layers[0].names, report.layers[0].packed_shape) == (("0",), (24, 1024))
    assert report.skipped == {"1": "its weight is a Parameter, not torchao's in int4 tiles"}


def test_torchao_errors() -> None:
    with pytest.raises(InvalidArgumentError, match="no linear layer has torchao's tile-packed int4 weight"):
        convert_torchao(nn.Sequential(nn.Linear(4, 4)))
    weight = Tiles(torch.zeros(1, 1, 32, 4).int(), torch.zeros(1, 8, 2), 128)
    with pytest.raises(InvalidArgumentError, match="convert_torchao: 0: Int4Linear: packed_weight: it holds 8 × 128"):
        convert_torchao(with_weight(weight, 9, 128))
    weight.act_pre_scale = torch.ones(128)
    with pytest.raises(UnsupportedError, match="convert_torchao: 0: its activations are scaled"):
        convert_torchao(with_weight(weight, 8, 128))
