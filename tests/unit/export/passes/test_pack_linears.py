"""Tests of the packed linear operator and of the pass that puts it into a graph: before, after, and what is skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from untorch.export.options import ExportOptions
from untorch.export.passes import PassReport, run_passes
from untorch.ops.activations import ACTIVATIONS
from untorch.ops.packed_linear import OPERATOR, pack_weight, packed_linear, unpack_weight

Activate = {
    "none": lambda y: y, "relu": torch.relu, "gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu6": F.relu6, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}  # fmt: skip


@given(st.integers(1, 50), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_pack_and_unpack(n: int, k: int) -> None:
    weight = torch.randn(n, k)
    packed = pack_weight(weight)
    assert packed.shape == (-(-n // 16), k, 16)
    assert packed.is_contiguous()
    assert torch.equal(unpack_weight(packed, n, k), weight)
    for j in range(packed.shape[0]):
        for i in range(16):
            row = weight[16 * j + i] if 16 * j + i < n else torch.zeros(k)
            assert torch.equal(packed[j, :, i], row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(st.integers(1, 50), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_pack_and_unpack_pairs(dtype: torch.dtype, n: int, k: int) -> None:
    weight = torch.randn(n, k).to(dtype)
    packed = pack_weight(weight)
    assert packed.shape == (-(-n // 16), -(-k // 2), 16, 2)
    assert packed.dtype == dtype
    assert packed.is_contiguous()
    assert torch.equal(unpack_weight(packed, n, k), weight)
    for j in range(packed.shape[0] * 16):
        for kk in range(packed.shape[1] * 2):
            expected = weight[j, kk] if j < n and kk < k else 0.0
            assert packed[j // 16, kk // 2, j % 16, kk % 2] == expected


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 0, 5), (2, 3, 5)])
def test_reference(activation: str, shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(20, 5), torch.randn(20)
    residual = torch.randn(*shape[:-1], 20)
    y = packed_linear(x, pack_weight(weight), bias, residual, activation, 20)
    torch.testing.assert_close(y, Activate[activation](F.linear(x, weight, bias)) + residual)


def test_opcheck() -> None:
    args = (torch.randn(3, 8), pack_weight(torch.randn(20, 8)), torch.randn(20), torch.randn(3, 20), "gelu", 20)
    torch.library.opcheck(OPERATOR, args)
    torch.library.opcheck(OPERATOR, (args[0], args[1], None, None, "none", 20))
    x, weight = torch.randn(3, 7).bfloat16(), torch.randn(20, 7).bfloat16()
    torch.library.opcheck(OPERATOR, (x, pack_weight(weight), None, None, "relu", 20))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"activation": "elu"}, "activation: expected one of none, relu"),
        ({"x": torch.randn(3, 7)}, r"weight: expected the packed shape \(2, 7, 16\), got \(2, 8, 16\)"),
        ({"x": torch.randn(3, 8).double()}, r"weight: expected torch.float64, as x, got torch.float32"),
        ({"bias": torch.randn(19)}, r"bias: expected the shape \(20,\), got \(19,\)"),
        ({"residual": torch.randn(20)}, r"residual: expected the shape \(3, 20\), got \(20,\)"),
    ],
)
def test_errors(changes: dict[str, object], text: str) -> None:
    arguments: dict[str, object] = {
        "x": torch.randn(3, 8), "weight": pack_weight(torch.randn(20, 8)), "bias": None, "residual": None,
        "activation": "none", "out_features": 20,
    }  # fmt: skip
    with pytest.raises((ValueError, RuntimeError), match=text):
        packed_linear(**(arguments | changes))  # type: ignore[arg-type]


def run(model: nn.Module, *args: torch.Tensor, dynamic: object = None) -> tuple[fx.GraphModule, PassReport, str]:
    """The module after the passes, the report of pack_linears, and the graph before."""
    model.eval()
    with torch.no_grad():
        module = torch.export.export(model, args, dynamic_shapes=dynamic).module()
        before = str(module.graph)
        expected = model(*args)
        report = run_passes(module, ExportOptions())[-1]
        got = module(*args)
    for a, b in zip(_flat(got), _flat(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    return module, report, before


def _flat(value: object) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]  # type: ignore[list-item]


def calls(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "call_function" and n.target == OPERATOR]


class Block(nn.Module):
    def __init__(self, activation: nn.Module | None = None, residual: str = "none") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
        self.activation, self.residual, self.dropout = activation or nn.Identity(), residual, nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.down(self.activation(self.up(x))))
        if self.residual == "right":
            return x + y
        if self.residual == "left":
            return y + x
        if self.residual == "inplace":
            y += x
        if self.residual == "scaled":
            return torch.add(x, y, alpha=2)
        if self.residual == "broadcast":
            return y + x[:1]
        if self.residual == "itself":
            return y + y
        return y


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.ReLU(), "relu"), (nn.ReLU(inplace=True), "relu"), (nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"), (nn.Tanh(), "tanh"), (nn.Sigmoid(), "sigmoid"), (nn.ELU(), "none"),
    ],
)  # fmt: skip
def test_activations_are_fused(layer: nn.Module, name: str) -> None:
    module, report, before = run(Block(layer), torch.randn(4, 32))
    first, second = calls(module)
    assert "aten.linear.default" in before
    assert "untorch" not in before
    assert "aten.linear.default" not in str(module.graph)
    assert first.args[4:] == (name, 48)
    assert second.args[2:] == (None, None, "none", 32)
    assert len(report.changed) == 2
    assert not report.skipped


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_packed(dtype: torch.dtype) -> None:
    model = Block(nn.GELU(), "right").to(dtype).eval()
    x = torch.randn(4, 32).to(dtype)
    with torch.no_grad():
        module = torch.export.export(model, (x,)).module()
        expected = model(x)
        report = run_passes(module, ExportOptions())[-1]
        got = module(x)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert len(report.changed) == 2
    assert not report.skipped
    first, second = calls(module)
    assert first.args[4] == "gelu"
    assert second.args[3] is not None
    assert module.state_dict()["up.weight_packed"].shape == (3, 16, 16, 2)


@pytest.mark.parametrize("residual", ["right", "left", "inplace"])
def test_a_residual_is_fused(residual: str) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    module, _, _ = run(Block(nn.GELU(), residual), torch.randn(4, 32), dynamic={"x": {0: batch}})
    _, second = calls(module)
    assert second.args[3] is not None
    assert second.args[3].op == "placeholder"
    assert "aten.add" not in str(module.graph)


@pytest.mark.parametrize("residual", ["scaled", "broadcast", "itself"])
def test_other_sums_stay(residual: str) -> None:
    module, _, _ = run(Block(nn.ELU(), residual), torch.randn(4, 32))
    assert calls(module)[1].args[3] is None
    assert "aten.add" in str(module.graph)


def test_a_linear_used_twice_does_not_fuse_its_activation() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x)
            return y, torch.relu(y)

    module, _, _ = run(Twice(), torch.randn(4, 32))
    assert calls(module)[0].args[4] == "none"


def test_weights_are_replaced_and_a_tied_one_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.own, self.head = nn.Embedding(20, 32), nn.Linear(32, 32), nn.Linear(32, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.head(self.own(self.own(self.embedding(i))))

    model = Tied()
    module, report, _ = run(model, torch.tensor([1, 2, 3]))
    state = module.state_dict()
    assert "own.weight" not in state
    assert state["own.weight_packed"].shape == (2, 32, 16)
    assert len(report.changed) == 3
    assert any(name.endswith("weight_packed") and value.shape == (2, 32, 16) for name, value in state.items())
    assert any(value.shape == (20, 32) for value in state.values())
    assert model.own.weight.shape == (32, 32)


def test_skipped_linears_say_why() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.narrow = nn.Linear(32, 4), nn.Linear(2, 32)
            self.wide = nn.Linear(32, 32).double()
            self.register_buffer("moving", torch.randn(32, 32))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            moved = F.linear(x, self.moving)
            self.moving.mul_(0.5)
            return self.small(x), self.narrow(x[:, :2]), self.wide(x.double()), moved, F.linear(x, x)

    model = Skips().eval()
    with torch.no_grad():
        module = torch.export.export(model, (torch.randn(4, 32),)).module()
    report = run_passes(module, ExportOptions())[-1]
    assert not report.changed
    reasons = list(report.skipped.values())
    for part in (
        "32 → 4 features, packing starts at 4 → 16", "2 → 32 features", "the weight is float64, expected float32",
        "the model writes into the weight moving", "the weight is computed, not a constant",
    ):  # fmt: skip
        assert any(part in reason for reason in reasons), part


def test_a_write_in_between_stops_the_residual() -> None:
    class Write(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = x * 2
            y = self.linear(a)
            a.zero_()
            return y + x

    module, _, _ = run(Write(), torch.randn(4, 32))
    assert calls(module)[0].args[3] is None


def test_dropout_in_training_mode_stays() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)).train()
    module = torch.export.export(model, (torch.randn(4, 32),)).module()
    reports = run_passes(module, ExportOptions(pack_linears=False))
    report = next(report for report in reports if report.name == "drop_inference_dropout")
    assert list(report.skipped.values()) == ["the dropout is active: the model was exported in training mode"]


class Gemms(nn.Module):
    """Layers as GPT-2 has them, and products that are written out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(12, 20)), nn.Parameter(torch.randn(20))
        self.back = nn.Parameter(torch.randn(20, 12))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(torch.addmm(self.bias, x, self.weight))
        twice = torch.mm(x, self.weight) + torch.matmul(x[None], self.back.t()) + x @ self.back.transpose(0, 1)
        return y, twice, torch.addmm(y, x, self.weight), torch.addmm(self.bias, x, self.weight, alpha=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemms_with_a_constant_on_the_right(dtype: torch.dtype) -> None:
    model, x = Gemms().to(dtype).eval(), torch.randn(3, 12).to(dtype)
    module: Any = torch.export.export(model, (x,)).module()
    with torch.no_grad():
        expected = model(x)
        report = {one.name: one for one in run_passes(module, ExportOptions())}["pack_linears"]
        got = module(x)
    # What is added is a matrix, or scaled: those stay, and so do transposed weights.
    assert len(report.changed) == 2 and sum("relu" in name for name in report.changed) == 1
    targets = [n.target for n in module.graph.nodes]
    assert targets.count(torch.ops.aten.addmm.default) == targets.count(torch.ops.aten.matmul.default) == 2
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-1)
    names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    assert not any("transposed" in name and "packed" not in name for name in names)
