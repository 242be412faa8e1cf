"""Static int8 from calibration batches: what becomes int8, which values are bytes, what stays, errors, and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import untorch
from tests.unit.export.passes.pass_graphs import unlift
from untorch.archive import ArchiveReader
from untorch.export import CompileError, export
from untorch.export.options import ExportOptions
from untorch.export.passes import PassReport, run_passes
from untorch.export.passes.calibration import PLAN, CalibrationPlan
from untorch.export.passes.calls import arguments_of
from untorch.ops import byte_max_pool, int8, int8_convolution, packed_convolution
from untorch.quant import quantize
from untorch.quant.options import QuantizeOptions

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports

X = (torch.randn(2, 3, 16, 16),)


class Block(nn.Module):
    """A stem with pooling, a residual block with a projection, a depthwise layer, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.norm.running_mean = torch.randn(16)
        self.first, self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Conv2d(32, 32, 1)
        self.projection = nn.Conv2d(16, 32, 1, stride=2)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = F.relu(self.second(F.relu(self.first(x))) + self.projection(x))
        x = F.hardswish(self.depthwise(x))
        y: torch.Tensor = self.fc(x.mean((2, 3)))
        return y


def run(
    module: nn.Module,
    args: tuple[Any, ...] = X,
    batches: Any = None,
    excluded: dict[str, str] | None = None,
    **how: Any,
) -> tuple[fx.GraphModule, PassReport, CalibrationPlan]:
    graph = unlift(module, *args)
    batches = [args] if batches is None else batches
    plan = CalibrationPlan(QuantizeOptions("int8", calibration=batches, **how), excluded or {})
    graph.meta[PLAN] = plan
    [report] = [r for r in run_passes(graph, ExportOptions()) if r.name == "quantize_activations"]
    return graph, report, plan


def calls(graph: fx.GraphModule, target: Any = int8_convolution.OPERATOR) -> list[dict[str, Any]]:
    return [arguments_of(node) for node in graph.graph.nodes if node.target == target]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("observer", ["minmax", "percentile", "mse"])
def test_a_chain_stays_in_bytes(observer: str) -> None:
    module = Block().eval()
    want = module(*X)
    quantize(module, "int8", progress=False)
    graph, report, plan = run(module, observer=observer)
    convolutions = calls(graph)
    assert len(convolutions) == 5
    assert not calls(graph, packed_convolution.OPERATOR)
    assert len(calls(graph, byte_max_pool.OPERATOR)) == 1
    # All but the last give bytes; only the first reads float32.
    assert [given["output_scale"] > 0 for given in convolutions] == [True, True, True, True, False]
    assert [given["x"].meta["val"].dtype for given in convolutions] == [torch.float32] + [torch.uint8] * 4
    [residual] = [given["residual"] for given in convolutions if given["residual"] is not None]
    assert residual.meta["val"].dtype == torch.uint8
    [linear] = calls(graph, int8.OPERATOR)
    assert linear["input_range"] == "static"
    assert linear["input_scale"] > 0
    assert len(report.changed) == 6
    assert [layer.names[0] for layer in plan.layers] == ["stem", "first", "projection", "second", "depthwise"]
    assert all(0 < layer.error < 0.02 for layer in plan.layers)
    with torch.no_grad():
        assert relative(graph(*X), want) < 0.05


class Readers(nn.Module):
    """Values of a convolution that others than convolutions read."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 1)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        match self.form:
            case "returned":
                return self.b(y), y
            case "scaled":
                return self.b(y) * y.mean((2, 3), keepdim=True)
            case "sine between":
                return self.b(torch.sin(y))
            case "pooled twice":
                pooled = F.max_pool2d(y, 2)
                return self.b(pooled) + torch.sigmoid(pooled)
        raise AssertionError(self.form)


@pytest.mark.parametrize(
    ("form", "is_bytes"), [("returned", False), ("scaled", True), ("sine between", False), ("pooled twice", True)]
)
def test_other_readers(form: str, is_bytes: bool) -> None:
    module = Readers(form).eval()
    want = module(*X)
    graph, _, _ = run(module)
    first, _ = calls(graph)
    assert (first["output_scale"] > 0) == is_bytes
    got = graph(*X)
    for a, b in zip(
        got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
    ):
        assert a.dtype == torch.float32
        assert relative(a, b) < 0.05
        assert a.stride() == b.stride()


def test_one_dimension_and_a_shared_weight() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(16, 16, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.conv(F.relu(self.conv(x)))
            return y

    x = (torch.randn(1, 16, 30),)
    module = Twice().eval()
    graph, _, plan = run(module, x)
    first, second = calls(graph)
    assert first["weight"].target == second["weight"].target
    assert first["output_scale"] > 0
    assert len(plan.layers) == 1
    assert relative(graph(*x), module(*x)) < 0.05


def test_what_stays() -> None:
    graph, report, plan = run(Block(), excluded={"first": "in exclude"})
    assert plan.skipped == {"first": "in exclude"}
    assert list(report.skipped.values()) == ["in exclude"]
    assert len(calls(graph, packed_convolution.OPERATOR)) == 1
    module = Block()
    with torch.no_grad():
        module.second.weight[0, 0] = float("inf")
    _, _, plan = run(module)
    assert plan.skipped == {"second": "its weight has values that are not finite"}


def test_without_a_plan_nothing_runs() -> None:
    graph = unlift(Block(), *X)
    [report] = [r for r in run_passes(graph, ExportOptions()) if r.name == "quantize_activations"]
    assert (report.changed, report.skipped) == ([], {})
    assert not calls(graph)


def test_sizes_that_vary() -> None:
    """Batches of other sizes than the example's."""
    batch = torch.export.Dim("batch", max=16)
    graph = unlift(Block().eval(), *X, dynamic=({0: batch},))
    plan = CalibrationPlan(QuantizeOptions("int8", calibration=[(torch.randn(n, 3, 16, 16),) for n in (1, 5)]))
    graph.meta[PLAN] = plan
    run_passes(graph, ExportOptions())
    assert [given["output_scale"] > 0 for given in calls(graph)] == [True] * 4 + [False]
    x = torch.randn(7, 3, 16, 16)
    assert relative(graph(x), Block().eval()(x)) < 0.05


def test_buffers_stay_as_they_are() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)  # type: ignore[operator]
            y: torch.Tensor = self.conv(x)
            return y + self.count

    graph, _, _ = run(Counts(), batches=[X, X, X])
    assert graph.count.item() == 0  # type: ignore[union-attr, operator]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = self.conv(x) + y
        return z


BATCHES: list[tuple[Any, str]] = [
    ([], "expected at least one batch, got none"),
    ([(torch.randn(2, 3, 8, 8),)], r"batch 1: expected 2 inputs \(x, y\), got 1"),
    ([(torch.randn(2, 3, 8, 8), torch.ones(1)), (torch.randn(2, 3, 9, 8), torch.ones(1))],
     r"batch 2: x: expected torch.float32 \[2, 3, 8, 8\], got torch.float32 \[2, 3, 9, 8\]"),
    ([(torch.randn(2, 3, 8, 8), torch.ones(1)), (torch.full((2, 3, 8, 8), float("nan")), torch.ones(1))],
     r"batch 2: x: expected finite values, of which a range can be made, got none in \[2, 3, 8, 8\]: check the batch"),
    ([(torch.randn(2, 3, 8, 8), 4.0)], r"batch 1: y: expected torch.float32 \[1\], got float"),
]  # fmt: skip


@pytest.mark.parametrize(("batches", "text"), BATCHES)
def test_batches_that_do_not_fit(batches: Any, text: str) -> None:
    with pytest.raises(CompileError, match=f"option quantize: calibration: {text}"):
        run(Two(), (torch.randn(2, 3, 8, 8), torch.ones(1)), batches)


def test_batches_as_tensors_and_by_name() -> None:
    args = (torch.randn(2, 3, 8, 8), torch.ones(1))
    seen = []
    for batch in (args, list(args), {"x": args[0], "y": args[1]}):
        graph, _, _ = run(Two(), args, [batch])
        seen.append(calls(graph)[0]["input_scale"])
    graph, _, _ = run(Readers("scaled"), X, [X[0]])
    assert len(set(seen)) == 1


@pytest.mark.slow
def test_from_end_to_end(tmp_path: Path) -> None:
    """The file gives the integers of the graph, and the report has convolutions and linear layers."""
    module, path = Block().eval(), tmp_path / "int8.pt2"
    options = {"dtype": "int8", "calibration": [X], "observer": "mse"}
    report = export(module, X, path, quantize=options, verify=True, progress=False)
    quantised = report.methods["forward"].quantization
    assert quantised is not None
    assert [layer.names[0] for layer in quantised.layers] == [
        "fc", "stem", "first", "projection", "second", "depthwise",
    ]  # fmt: skip
    assert quantised.skipped == {}
    assert quantised.module_nbytes_after < quantised.module_nbytes_before
    with ArchiveReader(path) as archive:
        entries = archive.manifest()["methods"]["forward"]["quantization"]
    assert [entry["name"] for entry in entries] == ["fc", "stem", "first", "projection", "second", "depthwise"]
    assert (entries[1]["shape"], entries[1]["packed_shape"]) == ([16, 27], [16, 36])  # words of four channels
    assert (entries[1]["activations"], entries[2]["activations"]) == ("float32", "uint8")
    assert entries[5]["shape"] == [32, 9]
    got = torch.from_numpy(untorch.load(path)["forward"](X[0].numpy()))
    assert relative(got, module(*X)) < 0.05
    assert isinstance(module.fc, nn.Linear)  # a copy was quantised
