"""Errors of torch.export: what, where in the model, and what to write instead; nothing on the terminal."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.export import Dim

import untorch
from untorch.export import ExportOptions, export
from untorch.export.errors import CompileError
from untorch.export.explain import explain, shorten
from untorch.export.method import Method
from untorch.export.torch_logs import quiet_logs, recorded_guards
from untorch.export.tracing import export_program

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports


class Fn(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


def refusal(fn: Callable[..., Any], *args: Any, shapes: Any = None) -> str:
    dynamic_shapes = {"args": shapes} if shapes is not None else None
    with pytest.raises(CompileError) as caught:
        export_program(Method("forward", Fn(fn), args, None, dynamic_shapes), False)
    assert caught.value.__cause__ is not None
    return str(caught.value)


def branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x + 1
    return x


def loop(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    for _ in range(n.item()):  # type: ignore[arg-type]
        x = x + 1
    return x


def repeat(x: torch.Tensor) -> torch.Tensor:
    while x.norm() > 1:
        x = x / 2
    return x


def count(x: torch.Tensor) -> torch.Tensor:
    return x if len(x.nonzero()) > 3 else x + 1


def table(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(5)


def shifted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y[1:]


def fours(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 4).sum(0)


def first(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(0) + x.reshape(8)


class Box:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


X = torch.randn(2, 8)
CASES: list[tuple[Callable[[], str], str, tuple[str, ...]]] = [
    (
        lambda: refusal(branch, X), "branch: if x.sum() > 0:",
        ("Could not guard on data-dependent expression Eq(u0, 1)\n", "Write torch.cond(predicate, true_fn, false_fn", "for a loop, torch.while_loop("),
    ),
    (
        lambda: refusal(repeat, X), "repeat: while x.norm() > 1:",
        ("How often the loop runs depends on", "Write torch.while_loop(condition, body, operands)"),
    ),
    (
        lambda: refusal(loop, X, torch.tensor(3)), "loop: for _ in range(n.item()):",
        ("Could not extract specialized integer from data-dependent expression u0\n", "with torch.while_loop"),
    ),
    (
        lambda: refusal(count, X), "count: return x if len(x.nonzero()) > 3 else x + 1",
        ("len() of what nonzero or a mask gives", "x.shape[0] for len(x)", "branches on it with torch.cond"),
    ),
    (
        lambda: refusal(table, torch.randn(5), shapes=({0: Dim("n")},)), "table: return x + torch.ones(5)",
        ("The model works for the size 5 alone: Eq(", "or leave n out of dynamic_shapes. Dim.AUTO instead of n"),
    ),
    (
        lambda: refusal(shifted, torch.randn(5), torch.randn(6), shapes=({0: Dim("n")}, {0: Dim("m")})),
        "shifted: return x + y[1:]",
        ("The model needs that here: Eq(", "Write m = n + 1 in dynamic_shapes, or Dim.AUTO"),
    ),
    (
        lambda: refusal(fours, torch.randn(8), shapes=({0: Dim("n")},)), "fours: return x.view(-1, 4).sum(0)",
        ("n = 4*_n in dynamic_shapes, or Dim.AUTO for these sizes",),
    ),
    (
        lambda: refusal(lambda x: x @ torch.ones(3, 3), X), "refusal(lambda x: x @ torch.ones(3, 3), X)",
        ("a and b must have same reduction dim, but got [2, 8] X [3, 3].",),
    ),
    (
        lambda: refusal(Box, X), "",
        ("in output, which is not a known type.\n", "dicts, namedtuples or dataclasses of them"),
    ),
    (
        lambda: refusal(lambda box: box.x + 1, Box(X)), "",
        ("Unsupported input type", "or in a dict, list or tuple; or register its class: torch.export.register_data"),
    ),
    (
        lambda: refusal(lambda x, n: x * n, X, 3, shapes=(None, Dim("n"))), "",
        ("Write Dim.DYNAMIC for a number that varies",),
    ),
    (
        lambda: refusal(first, torch.randn(1, 8), shapes=({0: Dim("batch")},)), "first: return x.squeeze(0) + x.reshape(8)",
        ("two was traced instead: args[0].shape[0] (batch). If the model takes one alone, leave the dimension out",),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("refused", "line", "parts"), CASES)
def test_answers(refused: Callable[[], str], line: str, parts: tuple[str, ...]) -> None:
    text = refused()
    assert text.startswith("method 'forward': torch.export failed: ")
    assert line in text
    if line:
        assert "test_explain.py:" in text
    for part in parts:
        assert part in text
    for noise in ("TORCH_LOGS", "docs.google", "draft_export", "Caused by", "mark_dynamic"):
        assert noise not in text


class Advised(nn.Module):
    """What the answers say about values of tensors: loops, branches, numbers, lengths."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k = n.item()
        torch._check(k <= x.shape[0])
        (halved,) = torch.while_loop(lambda x: x.norm() > 1, lambda x: (x / 2,), (x,))
        _, counted = torch.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x + 1), (torch.zeros_like(n), x))
        branched = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        found = x.nonzero()
        branched_on_size = torch.cond(found.shape[0] > 3, lambda x: x + 1, lambda x: x - 1, (x,))
        return (
            halved, counted, branched, branched_on_size, torch.where(x.sum() > 0, x + 1, x - 1), x[:k] * 2,
            x * found.shape[0], torch.arange(k) + 1,
        )  # fmt: skip


@pytest.mark.slow
def test_the_answers_about_values_work(tmp_path: Path) -> None:
    model = Advised()
    export(model, (torch.randn(9), torch.tensor(4)), tmp_path / "advised.pt2", progress=False)
    with untorch.load(tmp_path / "advised.pt2") as program:
        for x, n in ((torch.randn(9) * 10, 4), (torch.zeros(9), 0), (-torch.rand(9), 9)):
            got = program.forward(x.numpy(), numpy.int64(n))
            for one, other in zip(got, model(x, torch.tensor(n)), strict=True):
                numpy.testing.assert_allclose(one, other, rtol=1e-6)


@dataclasses.dataclass
class Known:
    x: torch.Tensor


def traced(fn: Callable[..., Any], *args: Any, shapes: Any = None, strict: bool = False) -> Any:
    """What the exported program gives for other arguments is what the function gives."""
    dynamic_shapes = {"args": shapes} if shapes is not None else None
    method = Method("forward", Fn(fn), args, None, dynamic_shapes, ExportOptions(strict=strict))
    return export_program(method, False).program.module()


def test_the_answers_about_sizes_work() -> None:
    auto = traced(table, torch.randn(5), shapes=({0: Dim.AUTO},))
    torch.testing.assert_close(auto(torch.zeros(5)), torch.ones(5))
    n = Dim("n", min=2, max=9)
    related = traced(shifted, torch.randn(5), torch.randn(6), shapes=({0: n}, {0: n + 1}))
    torch.testing.assert_close(related(torch.ones(3), torch.ones(4)), 2 * torch.ones(3))
    related = traced(shifted, torch.randn(5), torch.randn(6), shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    torch.testing.assert_close(related(torch.ones(3), torch.ones(4)), 2 * torch.ones(3))
    multiple = traced(fours, torch.randn(8), shapes=({0: 4 * Dim("_n", min=1, max=9)},))
    torch.testing.assert_close(multiple(torch.ones(12)), 3 * torch.ones(4))
    number = traced(lambda x, n: x * n, X, 3, shapes=(None, Dim.DYNAMIC))
    torch.testing.assert_close(number(X, 5), X * 5)


def test_the_answer_about_halving_and_doubling_works() -> None:
    def unet(x: torch.Tensor) -> torch.Tensor:
        small = nn.functional.max_pool2d(x, 4)
        return torch.cat([nn.functional.interpolate(small, scale_factor=4), x], 1)

    text = refusal(unet, torch.ones(2, 3, 34, 8), shapes=({2: Dim("n", max=64)},))
    assert "4 * Dim('height', max=256)" in text
    shapes = {"args": ({2: 4 * Dim("n", min=2, max=64)},)}
    export_program(Method("forward", Fn(unet), (torch.ones(2, 3, 32, 8),), None, shapes), False)


def test_the_answers_about_classes_and_operators_work() -> None:
    torch.export.register_dataclass(Known, serialized_type_name="tests.Known")
    torch.testing.assert_close(traced(lambda box: box.x + 1, Known(X))(Known(X)), X + 1)
    torch.testing.assert_close(traced(lambda x: torch.from_numpy(numpy.sin(x.numpy())), X, strict=True)(X), X.sin())
    scripted = torch.jit.trace(nn.Linear(8, 3).eval(), X)
    with pytest.raises(CompileError, match=r"Export the module that torch\.jit\.script or torch\.jit\.trace was given"):
        export_program(Method("forward", scripted, (X,)), False)
    library = torch.library.Library("explained", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    with pytest.raises(CompileError, match=r"Register a function that does: @torch\.library\.register_fake"):
        traced(lambda x: torch.ops.explained.twice(x), X)
    torch.library.register_fake("explained::twice", torch.empty_like)
    torch.testing.assert_close(traced(lambda x: torch.ops.explained.twice(x), X)(X), X * 2)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    refusal(branch, X)
    refusal(lambda x: x @ torch.ones(3, 3), X)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_strict_mode_where_it_helps() -> None:
    def padded(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max().item())
        return x * (torch.arange(longest).expand(2, longest) < lengths[:, None])

    args = (torch.randn(2, 6), torch.tensor([6, 4]))
    traced = export_program(Method("forward", Fn(padded), args), False)
    (note,) = traced.notes
    assert note.startswith("traced in strict mode: Could not extract specialized integer")
    torch.testing.assert_close(traced.program.module()(*args), padded(*args))


def test_long_messages_are_cut() -> None:
    text = shorten("\n".join(["first"] + ["x" * 1000] * 500))
    assert text.startswith("first\nxxx")
    assert text.endswith("more lines; the cause has all)")
    assert len(text) < 6000
    assert explain(ValueError("short")) == "short"
    assert explain(ValueError()) == "ValueError"


def test_guards_have_lines_and_logs_come_back(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level, filters = logger.level, list(logger.filters)
    with recorded_guards() as guards, pytest.raises(Exception, match="Constraints violated"):
        torch.export.export(Fn(table), (torch.randn(5),), dynamic_shapes={"args": ({0: Dim("n")},)})
    assert any("Eq(" in guard and "return x + torch.ones(5)" in guard for guard in guards)
    with quiet_logs():
        assert not logger.filter(logging.LogRecord(logger.name, logging.ERROR, "", 0, "graph", None, None))
    assert (logger.level, logger.filters) == (level, filters)


class Counts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bincount(x, minlength=5)


@pytest.mark.slow
def test_operators_that_libtorch_has_no_c_function_for(tmp_path: Path) -> None:
    """torch's log tells of each on the terminal; the runtime has a kernel for them."""
    script = f"""
import torch
from tests.unit.export.test_explain import Counts
from untorch.export import export
export(Counts(), (torch.tensor([1, 2, 2]),), {str(tmp_path / "m.pt2")!r}, progress=False)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "c-shim" not in done.stderr
