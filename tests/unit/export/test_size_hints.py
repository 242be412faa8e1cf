"""Methods that differ in their examples' sizes are traced once, and their files are those of two traces, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ShapesCollection

import untorch
from tests.conformance.language_models import make_model
from untorch.export import causal_lm, export, tracing
from untorch.export.method import Method
from untorch.export.options import ExportOptions
from untorch.export.size_hints import describe_dynamic_shapes, with_hints_of
from untorch.export.tracing import trace_method, trace_methods
from untorch.progress import Progress

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


class Model(nn.Module):
    def __init__(self, fn: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.fn = fn
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        if self.fn is not None:
            return self.fn(x, y)
        pairs = torch.softmax(self.linear(x) @ self.linear(x).mT, -1)
        return torch.cat([pairs.sum(-1), x.new_zeros(x.shape[0] * 2)]) + x.shape[0]


def rows(count: int, **kinds: Any) -> tuple[torch.Tensor]:
    return (torch.randn(count, 4, **kinds),)


def method(args: tuple[Any, ...], model: nn.Module, shapes: Any = ..., kwargs: Any = None, **options: Any) -> Method:
    shapes = ({0: Dim("n", max=64)}, *({0: Dim("m")} for _ in args[1:])) if shapes is ... else shapes
    return Method("f", model, args, kwargs, shapes, options=ExportOptions(**options))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Method]:
    """The methods that torch.export traces."""
    found: list[Method] = []

    def counted(method: Method, progress: Progress | None = None) -> Method:
        found.append(method)
        return trace_method(method, progress)

    monkeypatch.setattr(tracing, "trace_method", counted)
    return found


def test_traced_once(traces: list[Method]) -> None:
    model = Model().eval()
    first, second = methods = [method(rows(count), model) for count in (5, 40)]
    assert trace_methods(methods, Progress(False)) == methods
    assert traces == [first]
    again = trace_method(method(second.args or (), model))
    for made, size in ((first, 5), (second, 40), (again, 40)):
        (x,) = (node.meta["val"] for node in made.module.graph.nodes if node.op == "placeholder")
        environment = x.shape[0].node.shape_env
        assert environment.backed_var_to_val[x.shape[0].node.expr] == size == x.shape[0].node.hint
        assert all(
            value.fake_mode.shape_env is environment
            for node in made.module.graph.nodes
            if isinstance(value := node.meta.get("val"), torch._subclasses.FakeTensor)
        )
    assert str(second.program.graph) == str(again.program.graph)
    assert second.program.range_constraints == again.program.range_constraints
    assert second.program.range_constraints is not first.program.range_constraints
    assert str(second.module.code) == str(again.module.code)
    x = torch.randn(7, 4)
    torch.testing.assert_close(second.program.module()(x), model(x))


def branches(x: torch.Tensor, y: Any) -> torch.Tensor:
    return x.sin() if x.shape[0] > 8 else x.cos()


def nested(x: torch.Tensor, y: Any) -> torch.Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def added(x: torch.Tensor, y: Any) -> torch.Tensor:
    return x + y


@pytest.mark.parametrize(
    ("fn", "first", "second", "shapes"),
    [
        (branches, rows(5), rows(40), ({0: Dim.DYNAMIC},)),
        (nested, rows(5), rows(40), ({0: Dim("n")},)),
        (None, rows(5), rows(1), ({0: Dim("n")},)),
        (None, rows(5), (torch.randn(4, 40).mT,), ({0: Dim("n")},)),
        (added, (*rows(5), 2), (*rows(40), 3), ({0: Dim("n")}, None)),
        (added, (*rows(5), torch.ones(4)), (*rows(40), torch.ones(1)), ({0: Dim("n")}, None)),
    ],
    ids=["a condition", "graphs in the graph", "one", "strides", "a number", "a static size"],
)
def test_traced_again(fn: Any, first: Any, second: Any, shapes: Any, traces: list[Method]) -> None:
    """What may be another program is another trace."""
    model = Model(fn).eval()
    methods = [method(args, model, shapes) for args in (first, second)]
    for made in trace_methods(methods, Progress(False)):
        args: Any = made.args
        torch.testing.assert_close(made.program.module()(*args), model(*args))
    assert traces == methods


def test_sizes_that_a_condition_makes_equal(traces: list[Method]) -> None:
    """The graph has one symbol for them, which the other example's sizes must agree with."""
    model, shapes = Model(added).eval(), ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    methods = [method((*rows(count), *rows(count)), model, shapes) for count in (5, 40)]
    trace_methods(methods, Progress(False))
    assert traces == methods[:1]
    program = methods[0].program
    assert with_hints_of((*rows(7), *rows(7)), None, program) is not None
    assert with_hints_of((*rows(7), *rows(8)), None, program) is None


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (rows(70), None),
        (rows(9, dtype=torch.float64), None),
        ((torch.randn(9, 5),), None),
        ((torch.randn(9, 4, 1),), None),
        (rows(9, requires_grad=True), None),
        ((nn.Parameter(torch.randn(9, 4)),), None),
        ((), {"x": torch.randn(9, 4)}),
        ((3,), None),
    ],
    ids=["range", "dtype", "width", "rank", "gradient", "parameter", "by name", "type"],
)
def test_examples_of_another_kind(args: Any, kwargs: Any) -> None:
    program = trace_method(method(rows(5), Model().eval())).program
    assert with_hints_of(args, kwargs, program) is None


def test_static_programs() -> None:
    program = trace_method(method(rows(5), Model().eval(), None)).program
    assert with_hints_of(rows(9), None, program) is None


def test_methods_of_another_kind(traces: list[Method]) -> None:
    model, x = Model().eval(), torch.randn(5, 4)
    methods = [
        method((x,), model),
        method(rows(9), Model().eval()),
        method(rows(9), model, ({0: Dim("n", max=32)},)),
        method(rows(9), model, attention="math"),
        method((model.linear.weight,), model),
    ]
    trace_methods(methods, Progress(False))
    assert traces == methods


def test_dynamic_shapes_are_compared_by_names_and_ranges() -> None:
    n = Dim("n", max=8)
    makers: list[Callable[[], Any]] = [
        lambda: {"x": {0: Dim("n", max=8)}}, lambda: ({0: Dim.AUTO}, None), lambda: [(Dim("n"), 4)],
    ]  # fmt: skip
    for same in makers:
        assert describe_dynamic_shapes(same()) == describe_dynamic_shapes(same())
    for other in ({"x": {0: Dim("m", max=8)}}, {"x": {0: Dim("n", max=9)}}, {"x": {0: Dim.AUTO}}, {"y": {0: n}}):
        assert describe_dynamic_shapes({"x": {0: n}}) != describe_dynamic_shapes(other)
    doubled = 2 * n
    assert describe_dynamic_shapes([doubled]) == describe_dynamic_shapes([doubled])
    collection = ShapesCollection()
    assert describe_dynamic_shapes(collection) != describe_dynamic_shapes(collection)


@pytest.mark.slow
def test_files_are_those_of_two_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traces: list[Method]) -> None:
    torch.manual_seed(0)
    model = Model().eval()

    def write(name: str) -> bytes:
        methods = {
            f"f{count}": {"model": model, "args": rows(count), "dynamic_shapes": ({0: Dim("n", max=64)},)}
            for count in (5, 40)
        }
        export(methods=methods, path=tmp_path / name, progress=False)
        return (tmp_path / name).read_bytes()

    once = write("once.pt2")
    assert len(traces) == 1
    monkeypatch.setattr(tracing, "with_hints_of", lambda *_: None)
    assert write("twice.pt2") == once
    assert len(traces) == 3
    x = torch.randn(33, 4)
    with untorch.load(tmp_path / "once.pt2") as program:
        for name in program:
            torch.testing.assert_close(torch.from_numpy(program[name](x.numpy())), model(x))


@pytest.mark.slow
def test_steps_of_a_language_model(tmp_path: Path, traces: list[Method]) -> None:
    causal_lm(make_model("Llama"), tmp_path / "model.pt2", token_counts=(4, 64), progress=False)
    assert [method.name for method in traces] == ["step_4"]
