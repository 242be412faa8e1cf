"""Errors of torch.export: what, where in the model, and what to write instead; nothing on the terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

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
        ("Could not guard on data-dependent expression Eq(u0, 1)\n", "Write torch.cond(predicate, true_fn, false_fn"),
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
