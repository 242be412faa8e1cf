"""Checkpoints of others in int8 and FP8: files made here, byte by byte, from a weight that is known exactly."""

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

from untorch.quant import W8A8Linear
from untorch.quant.checkpoints import load_checkpoint
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, UnsupportedError

save_file = pytest.importorskip("safetensors.torch").save_file

FP8 = torch.float8_e4m3fn
TENSOR, CHANNEL, BLOCK = "tensor", "channel", "block"


def value_of_e4m3(byte: int) -> float:
    """By the bits: a sign, four of exponent with a bias of 7, three of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


class Weight:
    """Bytes and scales of a layer [n, k], and what each weight is, in float64."""

    def __init__(
        self, n: int, k: int, strategy: str, *, int8: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        random = numpy.random.default_rng(seed)
        self.n, self.k = n, k
        shape = {TENSOR: (1, 1), CHANNEL: (n, 1), BLOCK: (-(-n // 128), -(-k // 128))}[strategy]
        self.scale = torch.from_numpy(random.uniform(1e-4, 1e-2, shape)).to(dtype)
        if int8:
            values = random.integers(-128, 128, (n, k))
            self.values = torch.from_numpy(values.astype(numpy.int8))
        else:
            codes = random.integers(0, 127, (n, k)) | random.integers(0, 2, (n, k)) << 7
            values = numpy.vectorize(value_of_e4m3)(codes)
            self.values = torch.from_numpy(codes.astype(numpy.uint8)).view(FP8)
        rows, columns = (numpy.arange(size) // 128 if strategy == BLOCK else numpy.arange(size) for size in (n, k))
        if strategy == TENSOR:
            rows = rows * 0
        if strategy != BLOCK:
            columns = columns * 0
        self.exact = values * self.scale.double().numpy()[rows[:, None], columns]

    def tensors(self, name: str, scale: str = "weight_scale", shape: tuple[int, ...] | None = None) -> dict[str, Any]:
        stored = self.scale if shape is None else self.scale.reshape(shape)
        return {f"{name}.weight": self.values, f"{name}.{scale}": stored, f"{name}.input_scale": torch.tensor(0.01)}


def compressed(form: str = "float-quantized", strategy: str = CHANNEL, **weights: Any) -> dict[str, Any]:
    kind = "int" if form == "int-quantized" else "float"
    stated = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == BLOCK:
        stated["block_structure"] = [128, 128]
    activations = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": stated | weights, "input_activations": activations}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return {"quantization_config": config}


def fp8(**fields: Any) -> dict[str, Any]:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {"quantization_config": config | fields}


FBGEMM = {"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}}


def modelopt(**fields: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", **fields}}


def model_of(weight: Weight, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.embed, model.inner = nn.Embedding(10, 4), nn.Sequential(nn.Linear(weight.k, weight.n, bias=bias), nn.ReLU())
    return model.to(dtype)


def write(folder: Path, tensors: dict[str, Any], config: Any = None, name: str = "config.json") -> Path:
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / name).write_text(json.dumps(config))
    return folder


def assert_exact(layer: nn.Module, weight: Weight) -> None:
    assert isinstance(layer, W8A8Linear)
    assert layer.scale.dtype == torch.float32
    numpy.testing.assert_array_equal(layer.dequantize(torch.float64).numpy(), weight.exact)


@pytest.mark.slow
@hypothesis.given(
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    strategy=st.sampled_from([TENSOR, CHANNEL, BLOCK]),
    form=st.sampled_from(["float-quantized", "naive-quantized"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    configured=st.booleans(),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_float_quantized(
    n: int, k: int, strategy: str, form: str, dtype: torch.dtype, configured: bool, seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    weight = Weight(n, k, strategy, dtype=dtype, seed=seed)
    shape = (1,) if strategy == TENSOR else None
    config = compressed(form, strategy) if configured else None
    path = write(tmp_path_factory.mktemp("w8"), weight.tensors("inner.0", shape=shape), config)
    model = model_of(weight)
    bias = model.inner[0].bias.detach().clone()
    report = load_checkpoint(model, path, progress=False)
    layer = model.inner[0]
    assert_exact(layer, weight)
    assert torch.equal(layer.bias[:n], bias)
    [entry] = report.layers
    assert (entry.names, entry.method) == (("inner.0",), form if configured else "float-quantized")
    assert (entry.quantized_dtype, entry.nbytes_after) == ("fp8", layer.weight_nbytes)
    assert entry.packed_shape == (-(-n // 16) * 16, -(-k // 16) * 16)
    assert "unknown" in report.table()


@pytest.mark.parametrize("strategy", [TENSOR, CHANNEL])
@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized", None])
@pytest.mark.parametrize("zeros", [False, True])
def test_int_quantized(strategy: str, form: str | None, zeros: bool, tmp_path: Path) -> None:
    weight = Weight(40, 72, strategy, int8=True, dtype=torch.bfloat16)
    tensors = weight.tensors("inner.0", shape=() if strategy == TENSOR else None)
    if zeros:
        tensors["inner.0.weight_zero_point"] = torch.zeros(40, 1, dtype=torch.int8)
    config = None if form is None else compressed(form, strategy, symmetric=not zeros)
    model = model_of(weight, bias=False)
    report = load_checkpoint(model, write(tmp_path, tensors, config), progress=False)
    assert_exact(model.inner[0], weight)
    assert model.inner[0].weight_values.dtype == torch.int8
    assert (report.layers[0].quantized_dtype, report.layers[0].group_size) == ("int8", 72)


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_as_deepseek_has_them(configured: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    weight = Weight(200, 300, BLOCK, dtype=dtype)
    tensors = weight.tensors("inner.0", "weight_scale_inv")
    del tensors["inner.0.input_scale"]
    model = model_of(weight)
    report = load_checkpoint(model, write(tmp_path, tensors, fp8() if configured else None), progress=False)
    assert_exact(model.inner[0], weight)
    assert (report.layers[0].method, report.layers[0].group_size) == ("fp8", 128)
    x = torch.randn(3, 300).bfloat16()
    expected = x.double() @ torch.from_numpy(weight.exact).T + model.inner[0].bias[:200].double()
    y = model.inner[0](x).double()
    assert (y - expected).norm() / expected.norm() < 0.04


@pytest.mark.parametrize(
    ("config", "name", "strategy", "scale", "shape", "method"),
    [
        (fp8(weight_block_size=None), "config.json", TENSOR, "weight_scale_inv", (), "fp8"),
        (fp8(weight_block_size=None, activation_scheme="static"), "config.json", TENSOR, "weight_scale", (1,), "fp8"),
        (FBGEMM, "config.json", CHANNEL, "weight_scale", None, "fbgemm_fp8"),
        (modelopt(), "config.json", TENSOR, "weight_scale", (), "modelopt_fp8"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, "hf_quant_config.json", TENSOR,
         "weight_scale", (), "modelopt_fp8"),
        (compressed(strategy=BLOCK, block_structure="128x128"), "config.json", BLOCK, "weight_scale", None,
         "float-quantized"),
    ],
)  # fmt: skip
def test_other_formats(
    config: Any, name: str, strategy: str, scale: str, shape: tuple[int, ...] | None, method: str, tmp_path: Path
) -> None:
    weight = Weight(48, 160, strategy)
    model = model_of(weight)
    report = load_checkpoint(
        model, write(tmp_path, weight.tensors("inner.0", scale, shape), config, name), progress=False
    )
    assert_exact(model.inner[0], weight)
    assert report.layers[0].method == method


def test_layers_that_are_not_quantised_stay(tmp_path: Path) -> None:
    first, second = Weight(32, 48, CHANNEL), Weight(16, 32, CHANNEL, seed=1)
    tensors = first.tensors("model.a") | second.tensors("model.b")
    tensors |= {"model.a.bias": torch.arange(32.0), "model.norm.weight": torch.ones(48)}
    tensors |= {"lm_head.weight": torch.ones(4, 4), "model.c.weight": torch.ones(4, 4).bfloat16()}
    model = nn.ModuleDict({
        "a": nn.Linear(48, 32), "b": nn.Linear(32, 16, bias=False), "c": nn.Linear(4, 4), "lm_head": nn.Linear(4, 4),
    })  # fmt: skip
    config = compressed()
    config["quantization_config"]["ignore"] = ["model.lm_head"]
    report = load_checkpoint(model, write(tmp_path, tensors, config), prefix="model.", progress=False)
    assert_exact(model["a"], first)
    assert_exact(model["b"], second)
    assert torch.equal(model["a"].bias, torch.arange(32.0))
    assert type(model["c"]) is nn.Linear
    assert report.skipped == {"c": "not in the file", "lm_head": "not in the file, which leaves out 'model.lm_head'"}


def test_a_module_without_weights_yet(tmp_path: Path) -> None:
    weight = Weight(32, 48, CHANNEL)
    with torch.device("meta"):
        model = model_of(weight, bias=False)
    load_checkpoint(model, write(tmp_path, weight.tensors("inner.0"), compressed()), progress=False)
    assert_exact(model.inner[0], weight)


W = Weight(144, 256, CHANNEL)
CHANNELS, BLOCKS = W.tensors("inner.0"), Weight(144, 256, BLOCK).tensors("inner.0", "weight_scale_inv")
INT8 = Weight(144, 256, CHANNEL, int8=True).tensors("inner.0")


def changed(tensors: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """With tensors of the layer replaced; None: left out."""
    named = {f"inner.0.{name}": tensor for name, tensor in fields.items()}
    return {name: tensor for name, tensor in (tensors | named).items() if tensor is not None}


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[1, 0] = torch.nan
    return tensor


@pytest.mark.parametrize(
    ("tensors", "config", "kind", "text"),
    [
        (changed(CHANNELS, weight_scale=None), compressed(), InvalidFileError, "there is no tensor 'inner.0.weight_scale'"),
        (changed(CHANNELS, weight=None), compressed(), InvalidFileError, "there is no tensor 'inner.0.weight'"),
        (changed(BLOCKS, weight_scale_inv=None), fp8(), InvalidFileError, "there is no tensor 'inner.0.weight_scale'"),
        (
            changed(CHANNELS, weight_scale=torch.ones(143, 1)), compressed(), InvalidFileError,
            "inner.0.weight_scale: expected float32 or bfloat16 or float16 of a shape of [1], [144, 1], [2, 2], got "
            "float32 [143, 1]",
        ),
        (changed(BLOCKS, weight_scale_inv=torch.ones(2, 3)), fp8(), InvalidFileError, "[2, 2], got float32 [2, 3]"),
        (
            changed(INT8, weight_scale=torch.ones(2, 2)), compressed("int-quantized"), InvalidFileError,
            "of a shape of [1], [144, 1], got float32 [2, 2]",
        ),
        (
            changed(CHANNELS, weight_scale=W.scale.to(torch.float64)), compressed(), InvalidFileError,
            "inner.0.weight_scale: expected float32 or bfloat16 or float16 of",
        ),
        (
            changed(CHANNELS, weight_scale=with_nan(W.scale)), compressed(), InvalidFileError,
            "inner.0.weight_scale: it has scales that are not finite",
        ),
        (
            changed(CHANNELS, weight=with_nan(W.values.float()).to(FP8)), compressed(), InvalidFileError,
            "inner.0: its weight has values that are not finite",
        ),
        (
            changed(CHANNELS, weight=torch.zeros(144, 256)), compressed(), InvalidFileError,
            "inner.0.weight: expected float8_e4m3fn [any, any], got float32 [144, 256]",
        ),
        (INT8, compressed(), InvalidFileError, "inner.0.weight: expected float8_e4m3fn [any, any], got int8"),
        (CHANNELS, compressed("int-quantized"), InvalidFileError, "inner.0.weight: expected int8 [any, any], got float8"),
        (
            changed(CHANNELS, weight=W.values[:, :250].clone()), compressed(), InvalidArgumentError,
            "inner.0 has 250 → 144 features, the module's layer 256 → 144",
        ),
        (
            changed(INT8, weight_zero_point=torch.ones(144, 1, dtype=torch.int8)), compressed("int-quantized"),
            UnsupportedError, "inner.0: its weight has zero points other than 0, expected a symmetric one",
        ),
        (
            INT8, compressed("int-quantized", symmetric=False), InvalidFileError,
            "there is no tensor 'inner.0.weight_zero_point'",
        ),
        (
            CHANNELS, compressed(num_bits=4), UnsupportedError,
            "group_0: expected num_bits 8 for weights, the configuration says 4",
        ),
        (
            CHANNELS, compressed(strategy="group"), UnsupportedError,
            "expected strategy 'tensor' or 'channel' or 'block' for weights, the configuration says 'group'",
        ),
        (
            CHANNELS, compressed(strategy=BLOCK, block_structure=[64, 128]), UnsupportedError,
            "group_0: expected block_structure [128, 128] for weights, the configuration says [64, 128]",
        ),
        (
            BLOCKS, fp8(weight_block_size=[64, 64]), UnsupportedError,
            "expected weight_block_size [128, 128], the configuration says [64, 64]",
        ),
        (BLOCKS, fp8(fmt="e5m2"), UnsupportedError, "expected float8 of the format 'e4m3', it says 'e5m2'"),
        (
            changed(CHANNELS, pre_quant_scale=torch.ones(256)), modelopt(), UnsupportedError,
            "inner.0: its activations are scaled (pre_quant_scale)",
        ),
        (
            {"inner.0.weight": torch.zeros(2, 2)}, compressed(), InvalidFileError,
            "it is a float-quantized checkpoint and has no quantised layer",
        ),
    ],
)  # fmt: skip
def test_errors(tensors: dict[str, Any], config: Any, kind: type[Exception], text: str, tmp_path: Path) -> None:
    model = model_of(W)
    with pytest.raises(kind) as error:
        load_checkpoint(model, write(tmp_path, tensors, config), progress=False)
    assert text in str(error.value)
    assert type(model.inner[0]) is nn.Linear


def test_prefill_is_not_for_eight_bits(tmp_path: Path) -> None:
    path = write(tmp_path, CHANNELS, compressed())
    with pytest.raises(InvalidArgumentError) as error:
        load_checkpoint(model_of(W), path, prefill="fp8", progress=False)
    assert str(error.value) == (
        f"load_checkpoint: prefill: {path} is in eight bits (float-quantized), which has 'exact' alone; got 'fp8'"
    )


def test_sums_that_do_not_fit(tmp_path: Path) -> None:
    tensors = {"inner.0.weight": torch.zeros(1, 132105, dtype=torch.int8), "inner.0.weight_scale": torch.ones(1, 1)}
    path = write(tmp_path, tensors, compressed("int-quantized"))
    with pytest.raises(
        UnsupportedError, match="inner.0: it has 132105 inputs, and the sums of more than 132104 do not"
    ):
        load_checkpoint(nn.ModuleDict({"inner": nn.Sequential(nn.Linear(132105, 1))}), path, progress=False)
