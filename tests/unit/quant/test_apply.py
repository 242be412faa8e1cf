"""``quantize``: which layers it replaces, what it says about them, tied weights, and its errors."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

from untorch.quant import Int4Linear, quantize
from untorch.quant.quantizer import Quantizer
from untorch.runtime.errors import InvalidArgumentError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 128)
        self.layers = nn.ModuleList([Block(128), Block(128)])
        self.head = nn.Linear(128, 100, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


NAMES = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"]


def quantised(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, Int4Linear)]


@pytest.mark.parametrize("method", ["hqq", "rtn", "symmetric"])
def test_a_model_is_replaced_in_place_and_computes_nearly_the_same(method: str) -> None:
    model = Model().eval()
    before = copy.deepcopy(model)
    ids = torch.randint(0, 100, (2, 7))
    report = quantize(model, group_size=32, method=method, progress=False)
    assert quantised(model) == NAMES
    assert [layer.names for layer in report.layers] == [(name,) for name in NAMES]
    with torch.no_grad():
        expected, got = before(ids), model(ids)
    assert 0 < torch.linalg.vector_norm(got - expected) < 0.15 * torch.linalg.vector_norm(expected)
    for layer in report.layers:
        old, new = before.get_submodule(layer.names[0]), model.get_submodule(layer.names[0])
        weight = old.weight.detach()
        error = torch.linalg.vector_norm(new.dequantize() - weight) / torch.linalg.vector_norm(weight)
        assert layer.error == pytest.approx(float(error), rel=1e-4)
        assert 0.01 < layer.error < 0.1
        assert layer.nbytes_before == old.weight.numel() * 4
        assert (
            layer.nbytes_after
            == new.weight_nbytes
            == sum(t.numel() * t.element_size() for t in (new.packed_weight, new.scale_and_zero))
        )
        assert (layer.method, layer.group_size, layer.dtype) == (method, 32, "float32")
        assert not new.training
    assert torch.equal(model.layers[0].up.bias, before.layers[0].up.bias)
    # 100 outputs are padded to 104.
    packed = sum(n * 128 // 2 + n * 128 // 32 * 8 for n in (256, 256, 256, 256, 104))
    assert report.nbytes_after == packed
    assert report.nbytes_before == 4 * 128 * (4 * 256 + 100)
    assert report.module_nbytes_before - report.module_nbytes_after == report.nbytes_before - packed
    assert report.worst.error == max(layer.error for layer in report.layers)


@hypothesis.given(
    k=st.integers(1, 300),
    n=st.integers(1, 40),
    rows=st.sampled_from([(), (3,), (2, 0), (2, 3)]),
    group=st.sampled_from([32, 64, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    biased=st.booleans(),
    transposed=st.booleans(),
)
@hypothesis.settings(deadline=None, max_examples=50)
def test_sizes_that_do_not_fit_and_dtypes(
    k: int, n: int, rows: tuple[int, ...], group: int, dtype: torch.dtype, biased: bool, transposed: bool
) -> None:
    torch.manual_seed(k * n)
    model = nn.Sequential(nn.Linear(k, n, bias=biased)).to(dtype)
    bias = None if model[0].bias is None else model[0].bias.detach()
    report = quantize(model, group_size=group, method="rtn", include="0", progress=False)
    layer = model[0]
    assert isinstance(layer, Int4Linear)
    assert layer.dequantize().shape == (n, k)
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
    assert report.layers[0].packed_shape == (-(-n // 8) * 8, -(-k // max(group, 128)) * max(group, 128))
    with pytest.raises(InvalidArgumentError, match=f"expected {k} features in the last dimension, got"):
        model(torch.randn(2, k + 1).to(dtype))


@pytest.mark.parametrize(
    ("options", "chosen", "reason"),
    [
        ({"include": "layers.*"}, NAMES[:4], {"head": "not in include"}),
        ({"include": ["*.up", "head"]}, [NAMES[0], NAMES[2], NAMES[4]], {"layers.0.down": "not in include"}),
        ({"exclude": "head"}, NAMES[:4], {"head": "in exclude"}),
        ({"include": "layers.*", "exclude": "*.0.*"}, NAMES[2:4], {"layers.0.up": "in exclude"}),
        ({"include": lambda name, part: part.out_features == 128}, [NAMES[1], NAMES[3]], {"head": "not in include"}),
        ({"exclude": ["head", lambda name, _: name.endswith("up")]}, [NAMES[1], NAMES[3]], {"head": "in exclude"}),
    ],
)
def test_include_and_exclude(options: dict[str, Any], chosen: list[str], reason: dict[str, str]) -> None:
    model = Model()
    report = quantize(model, method="rtn", progress=False, **options)
    assert quantised(model) == chosen
    assert set(report.skipped) == set(NAMES) - set(chosen)
    assert reason.items() <= report.skipped.items()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"include": "layer.*"},
            "include: 'layer.*' matches no linear layer; there are: layers.0.up, layers.0.down, layers.1.up, "
            "layers.1.down, head",
        ),
        ({"exclude": ["head", "x"]}, "exclude: 'x' matches no linear layer; there are: layers.0.up,"),
        ({"include": [3]}, "include: expected name patterns or functions of (name, module), got int"),
        ({"exclude": "*"}, "quantize: nothing to quantise: layers.0.up: in exclude; layers.0.down: in exclude;"),
        ({"dtype": "fp4"}, "quantize: dtype: expected 'int4', 'int8', 'fp8' or 'nvfp4', got 'fp4'"),
        (
            {"dtype": "fp8"},
            "quantize: dtype: fp8 is for GPUs, and the module is for CPUs: take 'int8', which they multiply in integers, "
            "or give target='cuda' for a module that will run on a GPU",
        ),
        (
            {"dtype": "fp8", "target": "cuda", "group_size": 64},
            "quantize: group_size: fp8 has a scale an output, no groups: leave it out, got 64",
        ),
        (
            {"dtype": "fp8", "target": "cuda", "prefill": "fp8"},
            "quantize: prefill: fp8 has 'exact' alone, which need not be given; nvfp4 has others; got 'fp8'",
        ),
        ({"dtype": "fp8", "target": "cuda", "method": "hqq"}, "quantize: method: expected one of 'rtn', got 'hqq'"),
        ({"target": "gpu"}, "quantize: target: expected 'cpu' or 'cuda', got 'gpu'"),
        (
            {"dtype": "int8", "group_size": 64},
            "quantize: group_size: int8 has a scale an output, no groups: leave it out, got 64",
        ),
        ({"dtype": "int8", "method": "hqq"}, "quantize: method: expected one of 'rtn', got 'hqq'"),
        ({"dtype": "int8", "prefill": "fp8"}, "quantize: prefill: int8 has 'exact' alone, which need not be given;"),
        ({"group_size": 16}, "quantize: group_size: expected 32, 64, 128 or 256, got 16"),
        ({"group_size": True}, "quantize: group_size: expected 32, 64, 128 or 256, got True"),
        ({"device": "meta"}, "quantize: device: 'meta' cannot be used here: "),
        ({"device": "nowhere"}, "quantize: device: 'nowhere' cannot be used here: "),
        ({"method": "gptq"}, "quantize: method: expected one of 'hqq', 'rtn', 'symmetric', got 'gptq'"),
        (
            {"dtype": "nvfp4", "group_size": 32},
            "quantize: group_size: nvfp4 has blocks of 16, which cannot be chosen: leave it out, got 32",
        ),
        ({"dtype": "nvfp4", "method": "hqq"}, "quantize: method: expected one of 'search', 'rtn', got 'hqq'"),
    ],
)
def test_errors_leave_the_module_as_it_was(options: dict[str, Any], text: str) -> None:
    model = Model()
    with pytest.raises(InvalidArgumentError) as error:
        quantize(model, progress=False, **options)
    assert text in str(error.value)
    assert not quantised(model)


def test_modules_that_cannot_be_quantised() -> None:
    with pytest.raises(InvalidArgumentError, match=r"module: expected a torch.nn.Module, got Tensor"):
        quantize(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"an nn.Linear cannot be replaced in place: put it into another"):
        quantize(nn.Linear(128, 128))
    with pytest.raises(InvalidArgumentError, match="nothing to quantise: the module has no linear layer"):
        quantize(nn.Conv2d(3, 3, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float) -> None:
    model = Model()
    with torch.no_grad():
        model.layers[1].down.weight[3, 5] = value
    with pytest.raises(InvalidArgumentError, match=r"layers\.1\.down: its weight has values that are not finite"):
        quantize(model, method="rtn", progress=False)
    assert not quantised(model)


class OwnAttention(nn.MultiheadAttention):
    pass


class OwnLayer(nn.TransformerEncoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)


class AsksForDtype(nn.Module):
    """As T5's feed-forward layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.wo(self.wi(x).to(self.wo.weight.dtype))
        return y


def test_weights_that_a_module_says_it_reads() -> None:
    model = nn.Sequential(Block(128))
    model.weights_read = ("0.down",)  # type: ignore[assignment]
    report = quantize(model, method="rtn", progress=False)
    assert quantised(model) == ["0.up"]
    assert report.skipped == {"0.down": "Sequential reads its weight without calling it"}


def test_a_weight_that_forward_reads_stays() -> None:
    model = nn.Sequential(type("Version2", (AsksForDtype,), {})())
    report = quantize(model, method="rtn", progress=False)
    assert quantised(model) == ["0.wi"]
    assert report.skipped == {"0.wo": "Version2 reads its weight without calling it"}
    assert model(torch.randn(2, 128)).shape == (2, 128)


def test_layers_that_are_left_alone_say_why() -> None:
    hooked = nn.Linear(128, 128)
    hooked.register_forward_hook(lambda *_: None)
    encoder = OwnLayer(128, 4, 256, batch_first=True)
    encoder.self_attn.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "attention": OwnAttention(128, 4),
            "encoder": encoder,
            "hooked": hooked,
            "wide": nn.Linear(128, 128).double(),
            "small": nn.Linear(4, 8),
            "meta": nn.Linear(128, 128, device="meta"),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(128, 128)),
            "plain": nn.Linear(128, 128),
        }
    )
    report = quantize(model, method="rtn", progress=False)
    assert quantised(model) == ["plain"]
    in_proj = "it is a parameter of a {}, which has forward hooks or extends its forward"
    assert report.skipped == {
        "attention.in_proj": in_proj.format("OwnAttention"),
        "encoder.self_attn.in_proj": in_proj.format("MultiheadAttention"),
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear, not an nn.Linear: something may read its "
        "weight or extend its forward",
        "encoder.self_attn.out_proj": "it is a NonDynamicallyQuantizableLinear, not an nn.Linear: something may read "
        "its weight or extend its forward",
        "encoder.linear1": "OwnLayer reads its weight without calling it",
        "encoder.linear2": "OwnLayer reads its weight without calling it",
        "hooked": "it has forward hooks, which a replacement would lose",
        "wide": "its weight is float64, expected float32, bfloat16 or float16",
        "small": "it would grow from 128 to 576 bytes",
        "meta": "its weight is on the meta device: load it first",
        "normed": "it is a ParametrizedLinear, not an nn.Linear: something may read its weight or extend its forward",
    }
    x = torch.randn(2, 5, 128)
    model.eval()["encoder"](x)  # its fast path still finds the weights
    assert "left alone: small: it would grow from 128 to 576 bytes" in str(report)


def test_a_weight_tied_to_an_embedding_stays_there_and_the_report_says_so() -> None:
    model = Model(tied=True)
    table = model.embed.weight
    report = quantize(model, progress=False)
    assert model.embed.weight is table
    head = report.layers[-1]
    assert head.names == ("head",)
    assert head.kept_by == ("embed.weight",)
    assert head.note == "the float32 weight stays too: embed.weight reads it; padded to 104 × 128"
    assert head.note in report.table()
    # The module's bytes know it: the head's int4 weight came on top.
    saved = sum(layer.nbytes_before - layer.nbytes_after for layer in report.layers[:-1])
    assert report.module_nbytes_before - report.module_nbytes_after == saved - head.nbytes_after


def test_linear_layers_that_share_a_weight_share_the_packed_one() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128, bias=False), nn.Linear(128, 128))
    model[2].weight = model[0].weight
    model[3].weight = model[0].weight
    report = quantize(model, exclude="3", progress=False)
    assert len(report.layers) == 1
    assert report.layers[0].names == ("0", "2")
    assert report.layers[0].kept_by == ("3.weight",)
    assert report.layers[0].note == "one weight, also in 2; the float32 weight stays too: 3.weight reads it"
    assert model[0].packed_weight is model[2].packed_weight
    assert model[0].bias is not None
    assert model[2].bias is None
    assert type(model[3]) is nn.Linear


def test_one_layer_under_two_names_stays_one() -> None:
    model = nn.Module()
    model.a = nn.Linear(128, 128)
    model.inner = nn.Module()
    model.inner.b = model.a
    report = quantize(model, include="inner.b", progress=False)
    assert report.layers[0].names == ("a", "inner.b")
    assert model.a is model.inner.b
    assert isinstance(model.a, Int4Linear)


def test_several_modules_share_what_they_share() -> None:
    a, b = Model(), nn.Sequential(nn.Linear(128, 256))
    b[0].weight = a.layers[0].up.weight
    seen: list[str] = []
    quantizer = Quantizer("int4", group_size=64, method="rtn")
    quantizer.apply(a, on_layer=seen.append)
    quantizer.apply(b, on_layer=seen.append)
    assert seen == [*(f"{i} of 5: {name}" for i, name in enumerate(NAMES, 1)), "1 of 1: 0"]
    assert b[0].packed_weight is a.layers[0].up.packed_weight
    assert b[0].bias is not a.layers[0].up.bias


def test_state_dicts_and_moves() -> None:
    model = Model()
    quantize(model, method="rtn", progress=False)
    state = model.state_dict()
    assert {k for k in state if k.startswith("layers.0.up")} == {
        "layers.0.up.packed_weight", "layers.0.up.scale_and_zero", "layers.0.up.bias",
    }  # fmt: skip
    other = Model()
    quantize(other, method="hqq", progress=False)
    other.load_state_dict(state)
    ids = torch.randint(0, 100, (2, 3))
    with torch.no_grad():
        assert torch.equal(model(ids), other(ids))
        assert model.bfloat16()(ids).dtype == torch.bfloat16
    assert model.layers[0].up.packed_weight.dtype == torch.int32
    assert not hasattr(model.head, "weight")


def test_the_table() -> None:
    report = quantize(Model(), group_size=64, method="rtn", include="head", progress=False)
    lines = report.table().splitlines()
    assert lines[0].split() == ["layer", "shape", "group", "method", "error", "before", "after", "note"]
    error = f"{report.layers[0].error:.4f}"
    cells = ["head", "100", "×", "128", "64", "rtn", error, "0.05", "MiB", "0.01", "MiB", "padded", "to", "104", "×"]
    assert lines[1].split() == [*cells, "128"]
    assert lines[2].split() == ["sum", "0.05", "MiB", "0.01", "MiB"]
    assert lines[-1] == "left alone: layers.1.down: not in include"
    assert report.to_json()["layers"][0]["before_bytes"] == 100 * 128 * 4


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"group_size": 100}, "Int4Linear: group_size: expected 32, 64, 128 or 256, got 100"),
        ({"packed_weight": torch.zeros(1, 1, 32, 4)}, "Int4Linear: packed_weight: expected int32 [n / 8]"),
        ({"out_features": 9}, "it holds 8 × 128 values, which do not fit 9 × 100 features in groups of 64"),
        ({"in_features": 129}, "which do not fit 7 × 129 features in groups of 64"),
        ({"scale_and_zero": torch.zeros(1, 8, 2)}, "scale_and_zero: expected floating point (2, 8, 2), got"),
        ({"bias": torch.zeros(8)}, "Int4Linear: bias: expected (7,), got (8,)"),
    ],
)
def test_a_layer_refuses_what_does_not_fit(changed: dict[str, Any], text: str) -> None:
    fields: dict[str, Any] = {
        "packed_weight": torch.zeros(1, 1, 32, 4, dtype=torch.int32), "scale_and_zero": torch.zeros(2, 8, 2),
        "bias": torch.zeros(7), "in_features": 100, "out_features": 7, "group_size": 64, "method": "rtn",
    }  # fmt: skip
    Int4Linear(**fields)
    with pytest.raises(InvalidArgumentError) as error:
        Int4Linear(**(fields | changed))
    assert text in str(error.value)
