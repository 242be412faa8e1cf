"""NVFP4 checkpoints of others: files made here, byte by byte, from a weight that is known exactly."""

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

from untorch.quant import NVFP4Linear, NVFP4Weight, concatenate_nvfp4, reconcile_nvfp4
from untorch.quant.checkpoints import load_checkpoint
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, UnsupportedError

save_file = pytest.importorskip("safetensors.torch").save_file

VALUES = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FORMS = ["modelopt", "nvfp4-pack-quantized"]


def value_of_e4m3(byte: int) -> float:
    """By the bits: four of exponent with a bias of 7, three of mantissa; no sign here."""
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


class Weight:
    """Codes and scales of a layer [n, k], and what each weight is, in float64."""

    def __init__(self, n: int, k: int, seed: int = 0, divisor: float | None = None) -> None:
        random = numpy.random.default_rng(seed)
        self.n, self.k = n, k
        self.codes = random.integers(0, 16, (n, k))
        self.scales = random.integers(0, 127, (n, k // 16))
        self.divisor = numpy.float32(random.uniform(100, 30000) if divisor is None else divisor)
        self.multiplier = numpy.float32(1) / self.divisor
        scale = numpy.vectorize(value_of_e4m3)(self.scales)[:, numpy.arange(k) // 16]
        self.exact = VALUES[self.codes] * scale * numpy.float64(self.multiplier)

    def tensors(self, name: str, form: str, shape: tuple[int, ...] = (1,)) -> dict[str, torch.Tensor]:
        rows = [[int(row[at]) | int(row[at + 1]) << 4 for at in range(0, self.k, 2)] for row in self.codes]
        packed = torch.tensor(rows, dtype=torch.uint8).reshape(self.n, self.k // 2)
        scales = torch.from_numpy(self.scales.astype(numpy.uint8)).view(torch.float8_e4m3fn)
        if form == "modelopt":
            return {
                f"{name}.weight": packed, f"{name}.weight_scale": scales,
                f"{name}.weight_scale_2": torch.tensor(self.multiplier).reshape(shape),
                f"{name}.input_scale": torch.tensor(0.01).reshape(shape),
            }  # fmt: skip
        return {
            f"{name}.weight_packed": packed, f"{name}.weight_scale": scales,
            f"{name}.weight_global_scale": torch.tensor(self.divisor).reshape(shape),
            f"{name}.input_global_scale": torch.tensor(100.0).reshape(shape),
        }  # fmt: skip


def compressed(**weights: Any) -> dict[str, Any]:
    stated = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": stated | weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    return {"quantization_config": config | {"ignore": ["lm_head", "re:.*visual.*"]}}


def modelopt(**quantization: Any) -> dict[str, Any]:
    """A config.json."""
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", **quantization}}


def hf_quant_config(**quantization: Any) -> dict[str, Any]:
    """A hf_quant_config.json."""
    base = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.33"}, "quantization": base | quantization}


def model_of(weight: Weight, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.inner = nn.Sequential(nn.Linear(weight.k, weight.n, bias=bias), nn.ReLU())
    return model.to(dtype)


def write(folder: Path, tensors: dict[str, torch.Tensor], config: Any = None, name: str = "config.json") -> Path:
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / name).write_text(json.dumps(config))
    return folder


def assert_exact(layer: nn.Module, weight: Weight) -> None:
    assert isinstance(layer, NVFP4Linear)
    numpy.testing.assert_array_equal(layer.dequantize(torch.float64).numpy(), weight.exact)
    numpy.testing.assert_array_equal(layer.dequantize().numpy(), weight.exact.astype(numpy.float32))


@hypothesis.given(
    n=st.integers(1, 30),
    blocks=st.integers(1, 20),
    form=st.sampled_from(FORMS),
    shape=st.sampled_from([(), (1,)]),
    configured=st.booleans(),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(deadline=None, max_examples=50)
def test_weights_come_over_as_they_are(
    n: int, blocks: int, form: str, shape: tuple[int, ...], configured: bool, seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    weight = Weight(n, 16 * blocks, seed)
    config = (hf_quant_config() if form == "modelopt" else compressed()) if configured else None
    path = write(
        tmp_path_factory.mktemp("nvfp4"), weight.tensors("inner.0", form, shape), config,
        "hf_quant_config.json" if form == "modelopt" else "config.json",
    )  # fmt: skip
    model = model_of(weight)
    bias = model.inner[0].bias.detach().clone()
    report = load_checkpoint(model, path, progress=False)
    layer = model.inner[0]
    assert_exact(layer, weight)
    assert torch.equal(layer.bias[:n], bias)
    [entry] = report.layers
    assert (entry.names, entry.method, entry.group_size) == (("inner.0",), form, 16)
    assert entry.packed_shape == (-(-n // 8) * 8, -(-16 * blocks // 128) * 128)
    assert entry.nbytes_after == layer.weight_nbytes
    assert "unknown" in report.table()
    x = torch.randn(2, weight.k).bfloat16()
    y = model.inner[0](x).double()
    size = x.double().abs() @ torch.from_numpy(numpy.abs(weight.exact)).T + bias.double().abs()
    expected = x.double() @ torch.from_numpy(weight.exact).T + bias.double()
    assert ((y - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * size).all()


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (modelopt(), "config.json"),
        (modelopt(quant_method="modelopt_fp4"), "config.json"),
        (modelopt(config_groups={"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}), "config.json"),
        ({"quantization_config": None}, "config.json"),
        (hf_quant_config(), "hf_quant_config.json"),
    ],
)  # fmt: skip
def test_where_modelopt_says_what_it_is(config: Any, name: str, tmp_path: Path) -> None:
    weight = Weight(8, 32)
    model = model_of(weight, bias=False)
    report = load_checkpoint(
        model, write(tmp_path, weight.tensors("inner.0", "modelopt"), config, name), progress=False
    )
    assert_exact(model.inner[0], weight)
    assert report.layers[0].method == "modelopt"


@pytest.mark.parametrize("form", FORMS)
def test_prefixes_biases_and_what_the_file_leaves_out(form: str, tmp_path: Path) -> None:
    first, second = Weight(16, 48), Weight(8, 16, 1)
    tensors = first.tensors("model.a", form) | second.tensors("model.b", form)
    tensors |= {"model.a.bias": torch.arange(16.0), "model.lm_head.weight": torch.zeros(4, 4)}
    excludes = ["model.lm_head", "model.vision*", "model.tower"]
    config, name = hf_quant_config(exclude_modules=excludes), "hf_quant_config.json"
    if form != "modelopt":
        config, name = compressed(), "config.json"
        config["quantization_config"]["ignore"] = [excludes[0], r"re:model\.vision.*", excludes[2]]
    model = nn.ModuleDict({
        "a": nn.Linear(48, 16), "b": nn.Linear(16, 8, bias=False), "lm_head": nn.Linear(4, 4),
        "vision_x": nn.Linear(4, 4), "tower": nn.ModuleDict({"x": nn.Linear(4, 4)}), "towers": nn.Linear(4, 4),
    })  # fmt: skip
    report = load_checkpoint(
        model, write(tmp_path, tensors, config, name), prefix="model.", prefill="fp8", progress=False
    )
    assert_exact(model["a"], first)
    assert_exact(model["b"], second)
    assert (model["a"].prefill, report.layers[0].prefill) == ("fp8", "fp8")
    assert torch.equal(model["a"].bias, torch.arange(16.0))
    vision = "model.vision*" if form == "modelopt" else r"re:model\.vision.*"
    assert report.skipped == {
        "lm_head": "not in the file, which leaves out 'model.lm_head'",
        "vision_x": f"not in the file, which leaves out {vision!r}",
        "tower.x": "not in the file, which leaves out 'model.tower'",
        "towers": "not in the file",
    }


def test_a_module_without_weights_yet(tmp_path: Path) -> None:
    weight = Weight(16, 128)
    with torch.device("meta"):
        model = model_of(weight, bias=False)
    load_checkpoint(model, write(tmp_path, weight.tensors("inner.0", "modelopt")), progress=False)
    assert_exact(model.inner[0], weight)


@pytest.mark.parametrize("form", FORMS)
def test_gate_and_up_with_global_scales_of_their_own(form: str, tmp_path: Path) -> None:
    gate, up = Weight(24, 64, 0, divisor=1000.0), Weight(24, 64, 1, divisor=3000.0)
    model = nn.ModuleDict({"gate_proj": nn.Linear(64, 24, bias=False), "up_proj": nn.Linear(64, 24, bias=False)})
    tensors = gate.tensors("gate_proj", form) | up.tensors("up_proj", form)
    load_checkpoint(model, write(tmp_path, tensors), progress=False)
    parts = []
    for weight, name in ((gate, "gate_proj"), (up, "up_proj")):
        assert_exact(model[name], weight)
        own = weight.tensors(name, "modelopt", ())
        parts.append(NVFP4Weight(*(own[f"{name}.{key}"] for key in ("weight", "weight_scale", "weight_scale_2"))))
    both = NVFP4Linear.from_weight(concatenate_nvfp4(parts), None, in_features=64, method=form)
    exact = numpy.concatenate((gate.exact, up.exact))
    numpy.testing.assert_array_equal(both.dequantize(torch.float64).numpy(), exact)
    one, other = reconcile_nvfp4(parts)
    assert torch.equal(one.global_scale, other.global_scale)
    numpy.testing.assert_array_equal(one.dequantize(torch.float64).numpy(), gate.exact)
    # An E4M3 scale is rounded by up to 1/16, and by half of the smallest where it is subnormal.
    wrong = numpy.abs(other.dequantize(torch.float64).numpy() - up.exact)
    assert (wrong <= numpy.abs(up.exact) / 16 * 1.001 + 6 * 2.0**-10 * float(one.global_scale)).all()
    assert wrong.any()


def changed(tensors: dict[str, torch.Tensor], **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    result = dict(tensors)
    for name, value in changes.items():
        if value is None:
            del result[f"inner.0.{name}"]
        else:
            result[f"inner.0.{name}"] = value
    return result


ONE = Weight(16, 128)
MODELOPT, PACKED = (ONE.tensors("inner.0", form) for form in FORMS)
BROKEN = torch.full((16, 8), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # E4M3's NaN
NEGATIVE = torch.full((16, 8), 0xB8, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "config", "error", "text"),
    [
        (changed(MODELOPT, weight_scale=None), None, InvalidFileError, "there is no tensor 'inner.0.weight_scale'"),
        (changed(MODELOPT, weight_scale_2=None), modelopt(), InvalidFileError, "is no tensor 'inner.0.weight_scale_2'"),
        (changed(PACKED, weight_global_scale=None), compressed(), InvalidFileError, "'inner.0.weight_global_scale'"),
        (
            changed(MODELOPT, weight=torch.zeros(16, 128)), None, InvalidFileError,
            "inner.0.weight: expected uint8 [any, any], got float32 [16, 128]",
        ),
        (
            changed(MODELOPT, weight=torch.zeros(16, 60, dtype=torch.uint8)), None, InvalidFileError,
            "inner.0.weight: expected a multiple of 8 bytes an output, got uint8 [16, 60]",
        ),
        (
            changed(MODELOPT, weight=torch.zeros(16, 56, dtype=torch.uint8)), None, InvalidFileError,
            "inner.0.weight_scale: expected float8_e4m3fn [16, 7], got float8_e4m3fn [16, 8]",
        ),
        (
            changed(MODELOPT, weight_scale=torch.ones(16, 8)), None, InvalidFileError,
            "inner.0.weight_scale: expected float8_e4m3fn [16, 8], got float32 [16, 8]",
        ),
        (changed(MODELOPT, weight_scale=BROKEN), None, InvalidFileError, "inner.0: it has scales that are not finite, or"),
        (changed(PACKED, weight_scale=NEGATIVE), None, InvalidFileError, "inner.0: it has scales that are not finite, or"),
        (
            changed(MODELOPT, weight_scale_2=torch.ones(2)), None, InvalidFileError,
            "inner.0.weight_scale_2: expected float32 [1], got float32 [2]",
        ),
        (
            changed(MODELOPT, weight_scale_2=torch.ones(()).half()), None, InvalidFileError,
            "inner.0.weight_scale_2: expected float32 [], got float16 []",
        ),
        (
            changed(MODELOPT, weight_scale_2=torch.tensor(float("nan"))), None, InvalidFileError,
            "inner.0.weight_scale_2: expected a finite number, 0 or more, got nan",
        ),
        (changed(MODELOPT, weight_scale_2=torch.tensor(-1.0)), None, InvalidFileError, "0 or more, got -1"),
        (
            changed(PACKED, weight_global_scale=torch.zeros(1)), None, InvalidFileError,
            "inner.0.weight_global_scale: expected a divisor above 0, got 0",
        ),
        (changed(PACKED, weight_global_scale=torch.tensor([1e-45])), None, InvalidFileError, "expected a divisor above 0"),
        (
            changed(MODELOPT, pre_quant_scale=torch.ones(128)), None, UnsupportedError,
            "inner.0: its activations are scaled (pre_quant_scale), which is not read: take a checkpoint with the algori",
        ),
        (
            MODELOPT, modelopt(quant_algo="FP8_PB_WO"), UnsupportedError,
            "ModelOpt's algorithm 'FP8_PB_WO' is not read, only 'NVFP4' and 'FP8' are",
        ),
        (MODELOPT, modelopt(quant_algo="NVFP4_AWQ"), UnsupportedError, "ModelOpt's algorithm 'NVFP4_AWQ' is not read"),
        (
            MODELOPT, modelopt(group_size=32), UnsupportedError,
            "the configuration: expected group_size 16 for NVFP4, it says 32",
        ),
        (PACKED, compressed(num_bits=8), UnsupportedError, "group_0: expected num_bits 4 for NVFP4, it says 8"),
        (PACKED, compressed(type="int"), UnsupportedError, "group_0: expected type 'float' for NVFP4, it says 'int'"),
        (PACKED, compressed(group_size=32), UnsupportedError, "group_0: expected group_size 16 for NVFP4, it says 32"),
        (
            Weight(16, 112).tensors("inner.0", "modelopt"), None, InvalidArgumentError,
            "inner.0 has 112 → 16 features, the module's layer 128 → 16",
        ),
        (changed(PACKED, bias=torch.zeros(3)), None, InvalidFileError, "inner.0.bias: expected floating point [16], got"),
        (
            {"inner.0.weight": torch.zeros(2)}, modelopt(), InvalidFileError,
            "it is a modelopt checkpoint and has no quantised layer",
        ),
        (
            {"inner.0.weight": torch.zeros(2)}, None, UnsupportedError,
            "expected compressed-tensors (pack-quantized, nvfp4-pack-quantized, float-quantized, int-quantized, "
            "naive-quantized), gptq, awq, fp8, fbgemm_fp8 or modelopt (NVFP4, FP8)",
        ),
        (
            ONE.tensors("inner.7", "modelopt"), None, InvalidArgumentError,
            "the module has no linear layer inner.7; it has inner.0, other; prefix is what",
        ),
        (MODELOPT, modelopt(ignore=["re:("]), InvalidFileError, "its pattern 're:(' cannot be read: "),
    ],
)  # fmt: skip
def test_errors(
    tensors: dict[str, torch.Tensor], config: Any, error: type[Exception], text: str, tmp_path: Path
) -> None:
    model = model_of(ONE)
    model.other = nn.Linear(2, 2)
    with pytest.raises(error) as caught:
        load_checkpoint(model, write(tmp_path, tensors, config), progress=False)
    assert text in str(caught.value)
    assert type(model.inner[0]) is nn.Linear
