"""The pass that packs convolutions and its operator: what is fused, what stays, and values and strides against eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from tests.unit.export.passes.pass_graphs import close, exported, targets, unlift
from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.export.passes.pack_convolutions import pack_convolutions
from untorch.export.passes.report import PassReport
from untorch.export.passes.widen_half_convolutions import widen_half_convolutions
from untorch.ops.activations import ACTIVATIONS, activate
from untorch.ops.packed_convolution import (
    OPERATOR,
    is_depthwise,
    pack_bfloat16_weight,
    pack_weight,
    pack_winograd_weight,
    packed_convolution,
    unpack_weight,
    unpack_winograd_weight,
)

X = torch.randn(2, 8, 9, 9)
ARGUMENTS: dict[str, Any] = {
    "x": X, "weight": pack_weight(torch.randn(20, 8, 3, 3), 1), "bias": None, "residual": None, "out_channels": 20,
    "kernel": [3, 3], "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1, "activation": "none",
    "residual_first": False, "channels_last": False, "winograd": False,
}  # fmt: skip


class Functional(nn.Module):
    """A convolution and what a function makes of it."""

    def __init__(self, function: Callable[..., Any], convolution: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = convolution or nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        _randomise(self.norm)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def _randomise(norm: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (norm.running_mean, norm.weight, norm.bias):
            tensor.normal_()  # type: ignore[union-attr, operator]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr, operator]


def run(model: nn.Module, *args: torch.Tensor, dynamic: Any = None) -> tuple[fx.GraphModule, PassReport]:
    """The module after the pass, whose values and strides are those of before."""
    module = unlift(model, *args, dynamic=dynamic)
    with torch.no_grad():
        expected = module(*args)
        report = pack_convolutions(module)
        close(module)
        got = module(*args)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return module, report


def only_call(module: fx.GraphModule) -> fx.Node:
    (found,) = (node for node in module.graph.nodes if node.target is OPERATOR)
    return found


@given(
    st.integers(1, 40), st.integers(1, 20), st.sampled_from([1, 2, 3]), st.tuples(st.integers(1, 3), st.integers(1, 3))
)
@settings(max_examples=40, deadline=None)
def test_pack_and_unpack(outputs: int, inputs: int, groups: int, kernel: tuple[int, int]) -> None:
    weight = torch.randn(groups * outputs, inputs, *kernel)
    packed = pack_weight(weight, groups)
    assert packed.is_contiguous()
    if is_depthwise(groups * inputs, groups * outputs, groups):
        assert packed.shape == (-(-groups // 16), kernel[0] * kernel[1], 16)
    else:
        assert packed.shape == (groups, -(-outputs // 16), kernel[0] * kernel[1] * inputs, 16)
    assert torch.equal(unpack_weight(packed, groups * outputs, list(kernel)), weight)


def test_pack_and_unpack_for_winograd() -> None:
    weight = torch.randn(48, 16, 3, 3)
    packed = pack_winograd_weight(weight)
    assert packed.shape == (16, 3, 16, 16)
    torch.testing.assert_close(unpack_winograd_weight(packed), weight)


@pytest.mark.parametrize(
    ("convolution", "size", "winograd"),
    [
        (nn.Conv2d(16, 32, 3, padding=1), 12, True),
        (nn.Conv2d(16, 32, 3, padding=1), 11, False),
        (nn.Conv2d(16, 32, 3, padding=1, stride=2), 24, False),
        (nn.Conv2d(16, 32, 3, padding=2, dilation=2), 12, False),
        (nn.Conv2d(32, 32, 3, padding=1, groups=2), 12, False),
        (nn.Conv2d(24, 32, 3, padding=1), 12, False),
        (nn.Conv2d(16, 24, 3, padding=1), 12, False),
        (nn.Conv2d(16, 32, 5, padding=2), 12, False),
    ],
)
def test_which_convolutions_use_winograd(convolution: nn.Conv2d, size: int, winograd: bool) -> None:
    x = torch.randn(1, convolution.in_channels, size, size)
    module, _ = run(nn.Sequential(convolution, nn.SiLU()), x)
    assert only_call(module).args[13] is winograd


@pytest.mark.parametrize(
    ("convolution", "small"),
    [
        (nn.Conv2d(32, 32, 3, padding=1, groups=8), True),
        (nn.Conv2d(32, 32, 3, padding=1, groups=4, stride=2), True),
        (nn.Conv2d(32, 32, 3, padding=1, groups=2), False),
        (nn.Conv2d(40, 40, 3, padding=1, groups=10), False),
        (nn.Conv2d(32, 64, 3, padding=1, groups=8), False),
        (nn.Conv2d(32, 32, 3, padding=2, groups=8, dilation=2), False),
        (nn.Conv2d(32, 32, 3, padding=1, groups=8, stride=(1, 2)), False),
        (nn.Conv2d(32, 32, 5, padding=2, groups=8), False),
    ],
)
def test_which_groups_lie_side_by_side(convolution: nn.Conv2d, small: bool) -> None:
    x = torch.randn(2, convolution.in_channels, 9, 10)
    module, _ = run(nn.Sequential(convolution, nn.SiLU()), x)
    source = only_call(module).args[1]
    assert isinstance(source, fx.Node)
    packed = getattr(module, str(source.target))
    assert (packed.shape[0] == 1) is small
    assert torch.equal(
        unpack_weight(packed, convolution.out_channels, list(convolution.kernel_size)), convolution.weight
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("residual_first", [False, True])
def test_reference(activation: str, residual_first: bool) -> None:
    weight, bias, residual = torch.randn(20, 4, 3, 3), torch.randn(20), torch.randn(2, 20, 9, 9)
    changes = {"weight": pack_weight(weight, 2), "bias": bias, "residual": residual, "groups": 2}
    y = packed_convolution(**(ARGUMENTS | changes | {"activation": activation, "residual_first": residual_first}))
    conv = F.conv2d(X, weight, bias, padding=1, groups=2)
    expected = activate(conv + residual, activation) if residual_first else activate(conv, activation) + residual
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_reference_with_a_bfloat16_weight(groups: int) -> None:
    """The input is rounded, too; bias and result are float32."""
    x, weight, bias = torch.randn(2, 20, 9, 9), torch.randn(6, 20 // groups, 3, 3), torch.randn(6)
    packed = pack_bfloat16_weight(weight, groups)
    assert packed.shape == (groups, 1, 9 * 10 // groups, 16, 2) and packed.dtype == torch.bfloat16
    plain = weight.bfloat16()
    assert torch.equal(unpack_weight(packed, 6, [3, 3]), plain)
    y = packed_convolution(
        **(ARGUMENTS | {"x": x, "weight": packed, "bias": bias, "out_channels": 6, "groups": groups})
    )
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, F.conv2d(x.bfloat16().float(), plain.float(), bias, padding=1, groups=groups))


@pytest.mark.parametrize(
    ("convolution", "form"),
    [
        (nn.Conv2d(24, 20, 1), torch.bfloat16),
        (nn.Conv2d(10, 20, 3, stride=2, padding=1), torch.bfloat16),
        (nn.Conv2d(20, 20, 3, groups=2), torch.bfloat16),
        (nn.Conv1d(10, 20, 3), torch.bfloat16),
        (nn.Conv2d(22, 20, 1), torch.float32),  # few products
        (nn.Conv2d(4, 20, 3), torch.float32),  # few channels: the image is padded beforehand
        (nn.Conv2d(25, 20, 1), torch.float32),  # odd
        (nn.Conv2d(20, 20, 3, groups=20), torch.float32),  # depthwise
        (nn.Conv2d(16, 16, 3, padding=1), torch.float32),  # Winograd
    ],
)
def test_weights_of_bfloat16_models(convolution: nn.Module, form: torch.dtype) -> None:
    dims = 1 if isinstance(convolution, nn.Conv1d) else 2
    x = torch.randn(2, convolution.in_channels, *[14] * dims)  # type: ignore[call-overload]
    model = nn.Sequential(convolution, nn.ReLU())
    expected = model(x.bfloat16().float())
    module = unlift(model.bfloat16().eval(), x.bfloat16())
    widen_half_convolutions(module)
    pack_convolutions(module)
    close(module)
    weight = only_call(module).args[1]
    assert isinstance(weight, fx.Node) and weight.meta["val"].dtype == form
    with torch.no_grad():
        torch.testing.assert_close(module(x.bfloat16()).float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_with_amx_no_weight_of_bfloat16_becomes_one_of_winograd(dtype: torch.dtype) -> None:
    module = unlift(nn.Conv2d(16, 16, 3, padding=1).to(dtype).eval(), torch.randn(1, 16, 14, 14, dtype=dtype))
    widen_half_convolutions(module)
    pack_convolutions(module, amx=True)
    call = only_call(module)
    weight = call.args[1]
    assert isinstance(weight, fx.Node) and weight.meta["val"].dtype == dtype
    assert call.args[13] is (dtype == torch.float32)


def test_float16_models_keep_float32_weights() -> None:
    module = unlift(nn.Conv2d(16, 16, 1).half().eval(), torch.randn(1, 16, 5, 5).half())
    widen_half_convolutions(module)
    pack_convolutions(module)
    weight = only_call(module).args[1]
    assert isinstance(weight, fx.Node) and weight.meta["val"].dtype == torch.float32


@pytest.mark.parametrize("changes", [{}, {"channels_last": True}, {"bias": torch.randn(20), "activation": "gelu"}])
def test_opcheck(changes: dict[str, Any]) -> None:
    torch.library.opcheck(OPERATOR, tuple((ARGUMENTS | changes).values()))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"activation": "elu"}, "activation: expected one of none, relu"),
        ({"x": X[0]}, r"x: expected 4 dimensions, got shape \(8, 9, 9\)"),
        ({"out_channels": 33}, r"weight: expected the packed shape \(1, 3, 72, 16\), got \(1, 2, 72, 16\)"),
        (
            {"weight": pack_weight(torch.randn(20, 8, 3, 3), 1).bfloat16()},
            "weight: expected float32, got bfloat16: it needs",
        ),
        ({"winograd": True}, "winograd: expected a 3 x 3 kernel, stride and dilation 1, no groups and multiples of 16"),
        ({"bias": torch.randn(19)}, r"bias: expected the shape \(20,\), got \(19,\)"),
        ({"residual": torch.randn(20)}, r"residual: expected the shape \(2, 20, 9, 9\), got \(20,\)"),
    ],
)
def test_errors(changes: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=text):
        packed_convolution(**(ARGUMENTS | changes))


def _block(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.norm(m.conv(x))
    y += x
    return F.relu(y, inplace=True)


@pytest.mark.parametrize(
    ("function", "activation", "residual", "first", "nodes"),
    [
        (lambda m, x: m.conv(x), "none", False, False, 1),
        (lambda m, x: m.norm(m.conv(x)), "none", False, False, 2),
        (lambda m, x: F.relu(m.norm(m.conv(x)), inplace=True), "relu", False, False, 3),
        (lambda m, x: F.hardtanh(m.conv(x), 0, 6), "relu6", False, False, 2),
        (lambda m, x: F.relu6(m.conv(x)), "relu6", False, False, 2),
        (lambda m, x: m.conv(x).clamp(0, 6), "relu6", False, False, 2),
        (lambda m, x: F.hardtanh(m.conv(x)), "none", False, False, 1),
        (lambda m, x: F.gelu(m.conv(x), approximate="tanh"), "gelu_tanh", False, False, 2),
        (lambda m, x: F.hardswish(m.norm(m.conv(x))), "hardswish", False, False, 3),
        (lambda m, x: x + m.norm(m.conv(x)), "none", True, False, 3),
        (lambda m, x: x + F.silu(m.norm(m.conv(x))), "silu", True, False, 4),
        (_block, "relu", True, True, 4),
        (lambda m, x: torch.add(m.conv(x), x, alpha=2), "none", False, False, 1),
        (lambda m, x: m.conv(x) + x[:1], "none", False, False, 1),
        (lambda m, x: (lambda y: y + y)(m.conv(x)), "none", False, False, 1),
        (lambda m, x: (lambda y: F.relu(y) * y)(m.conv(x)), "none", False, False, 1),
    ],
)
def test_what_is_fused(function: Any, activation: str, residual: bool, first: bool, nodes: int) -> None:
    module, report = run(Functional(function), X)
    call = only_call(module)
    assert call.args[10:12] == (activation, first)
    assert (call.args[3] is not None) is residual
    assert len(report.changed[0].split(" + ")) == nodes


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(8, 12, 3, stride=2, padding=(2, 1), bias=False),
        nn.Conv2d(8, 12, (1, 3), padding="same", dilation=2),
        nn.Conv2d(8, 8, 3, padding="valid", groups=8),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Conv2d(8, 4, 1),
    ],
)
def test_kinds_of_convolutions(convolution: nn.Module) -> None:
    module, _ = run(Functional(lambda m, x: m.conv(x), convolution), X)
    assert "conv2d" not in str(targets(module))
    assert "conv.weight" not in dict(module.named_parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_transposed_without_overlap(bias: bool) -> None:
    model = nn.ConvTranspose2d(8, 5, (2, 3), (2, 3), bias=bias)
    module, report = run(model, X)
    assert len(report.changed) == 1
    assert "weight" not in dict(module.named_parameters())
    got, expected = module(X), model(X)
    assert got.stride() == expected.stride()


def test_one_dimension() -> None:
    model = nn.Sequential(nn.Conv1d(8, 8, 3, stride=2, padding=1), nn.GELU())
    module, _ = run(model, torch.randn(2, 8, 11))
    assert [name for name in targets(module) if not name.startswith("self.")] == [
        "unsqueeze", "untorch.packed_convolution", "squeeze.dim",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (nn.Conv3d(2, 2, 3), torch.randn(1, 2, 5, 5, 5), "it has three spatial dimensions"),
        (nn.ConvTranspose2d(8, 4, 3, 2), X, "it is transposed, and its windows overlap"),
        (
            nn.Conv2d(8, 4, 3).double(),
            X.double(),
            "the weight is float64 on cpu, expected float32 on cpu",
        ),
        (nn.Conv2d(8, 4, 3), X[0], "the input has no batch dimension"),
        (
            Functional(lambda m, x: F.conv2d(x, m.conv.weight * x.mean())),
            X,
            "the weight is computed, or the model writes into it: it is no constant",
        ),
    ],
)
def test_what_stays(model: nn.Module, x: torch.Tensor, reason: str) -> None:
    module, report = run(model, x)
    assert not report.changed
    assert next(iter(report.skipped.values())).startswith(reason)
    assert OPERATOR not in {node.target for node in module.graph.nodes}


def test_batch_norm_in_training_stays() -> None:
    class Model(Functional):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return F.batch_norm(y, self.norm.running_mean.clone(), self.norm.running_var.clone(), training=True)

    module, report = run(Model(lambda m, x: x), X)
    assert report.changed == ["conv2d"]
    assert "batch_norm" in str(targets(module))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.gelu(m.conv(x).flatten(2).transpose(1, 2), approximate="tanh"),
        lambda m, x: F.gelu(m.conv(x).permute(0, 2, 3, 1), approximate="tanh"),
        lambda m, x: F.gelu(m.conv(x).view(2, 8, 81), approximate="tanh").transpose(1, 2),
    ],
)
def test_an_activation_behind_views_moves_before_them(function: Any) -> None:
    module, report = run(Functional(function), X)
    assert only_call(module).args[10] == "gelu_tanh"
    assert report.changed == ["conv2d + gelu_default"]
    assert "gelu" not in str(targets(module))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (lambda y: F.gelu(y) + y)(m.conv(x).flatten(2)),  # the view has another reader
        lambda m, x: (lambda y: (F.gelu(y.flatten(2)), y))(m.conv(x)),
        lambda m, x: F.relu_(m.conv(x).flatten(2)),  # it writes
        lambda m, x: F.gelu(m.conv(x)[:, :4].flatten(2)),  # it reads a part only
    ],
)
def test_activations_behind_views_that_stay(function: Any) -> None:
    _, report = run(Functional(function), X)
    assert report.changed == ["conv2d"]


def test_writes_in_between_keep_nodes_apart() -> None:
    """The input is written behind the convolution: it cannot be computed where the activation is."""

    def function(m: Any, x: torch.Tensor) -> Any:
        x = x + 1
        y = m.conv(x)
        x.mul_(2)
        return F.relu(y), x

    _, report = run(Functional(function), X)
    assert report.changed == ["conv2d"]


def test_a_shared_weight_is_packed_once() -> None:
    module, report = run(Functional(lambda m, x: m.conv(F.relu(m.conv(x)))), X)
    assert len(report.changed) == 2
    assert len([name for name, _ in module.named_buffers() if "packed" in name]) == 1


def test_strides_of_a_channels_last_model_stay() -> None:
    x = X.to(memory_format=torch.channels_last)
    module, _ = run(Functional(lambda m, x: F.relu(m.conv(x))).to(memory_format=torch.channels_last), x)  # type: ignore[call-overload]
    assert only_call(module).args[12] is True
    assert module(x).is_contiguous(memory_format=torch.channels_last)


def test_dynamic_sizes() -> None:
    dynamic = {"x": {0: torch.export.Dim("n"), 2: torch.export.Dim("h", min=4), 3: torch.export.Dim("w", min=4)}}
    module, _ = run(Functional(lambda m, x: F.relu(m.norm(m.conv(x)) + x)), X, dynamic=dynamic)
    other = torch.randn(3, 8, 6, 12)
    assert module(other).shape == other.shape


def test_dynamic_sizes_with_winograd() -> None:
    dynamic = {0: torch.export.Dim("n"), 2: torch.export.Dim("h", min=4), 3: torch.export.Dim("w", min=4)}
    module, _ = run(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)), torch.randn(2, 16, 14, 15), dynamic=(dynamic,))
    assert only_call(module).args[13] is True
    assert module(torch.randn(3, 16, 5, 8)).shape == (3, 16, 5, 8)


def test_it_is_in_the_table() -> None:
    report = next(
        r for r in run_passes(unlift(nn.Conv2d(8, 8, 3), X), ExportOptions()) if r.name == "pack_convolutions"
    )
    assert report.changed == ["conv2d"]


class Network(nn.Module):
    """Layouts at both ends and in between: pooling, concatenation, a view, a depthwise and a strided convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6(inplace=True))
        self.depthwise = nn.Sequential(nn.Conv2d(24, 24, 5, 1, 2, groups=24), nn.BatchNorm2d(24), nn.Hardswish())
        self.block = nn.Sequential(nn.Conv2d(24, 24, 3, 1, 1), nn.BatchNorm2d(24), nn.ReLU(inplace=True))
        self.last = nn.Conv2d(48, 20, 1)
        self.head = nn.Linear(20, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        y = y + self.depthwise(y)
        z = F.max_pool2d(self.block(y) + y, 2)
        z = torch.cat([z, F.avg_pool2d(y, 2)], 1)
        z = self.last(z)
        return self.head(F.adaptive_avg_pool2d(z, 1).flatten(1)), z


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_exported(dynamic: bool, tmp_path: Path) -> None:
    model, x = Network().eval(), torch.randn(2, 3, 32, 32)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            _randomise(module)
    shapes = {"x": {0: torch.export.Dim("n", min=2)}} if dynamic else None
    options = {"dynamic_shapes": shapes} if dynamic else {}
    got, report = exported(model, (x,), tmp_path, **options)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(got, list(expected), rtol=1e-4, atol=1e-4)
    assert any("packed_convolution" in name for name in report.operators)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
            self.norm, self.third = nn.BatchNorm2d(8), nn.Conv1d(8, 4, 3)
            _randomise(self.norm)

        def forward(self, x: torch.Tensor) -> Any:
            y = torch.relu(self.norm(self.second(torch.relu(self.first(x)))) + x)
            return y, self.third(F.max_pool2d(y, 3).flatten(2))

    x = X.to(dtype)
    module = unlift(Block().to(dtype), x)
    with torch.no_grad():
        expected = module(x)
        widen_half_convolutions(module)
        report = pack_convolutions(module)
        close(module)
        got = module(x)
    assert len(report.changed) == 3
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)
    calls = [node for node in module.graph.nodes if node.target == OPERATOR]
    assert [call.meta["val"].dtype for call in calls] == [torch.float32] * 3
    assert calls[1].args[0] is calls[0]  # nothing is rounded in between
    assert {tensor.dtype for name, tensor in module.state_dict().items() if "packed" in name} == {torch.float32}


@pytest.mark.slow
def test_a_half_type_exported(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU6()
    )  # fmt: skip
    model, x = model.half().eval(), torch.randn(1, 3, 20, 20).half()
    [got], _ = exported(model, (x,), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(got, model(x), rtol=3e-2, atol=3e-2)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_uneven_padding_stays() -> None:
    _, report = run(Functional(lambda m, x: m.conv(x), nn.Conv2d(8, 8, (3, 4), padding="same")), X)
    assert list(report.skipped.values()) == ["it pads one side more than the other (padding='same' of an even kernel)"]
