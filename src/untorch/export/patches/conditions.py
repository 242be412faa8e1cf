"""Patches of tracing: conditions on values that a model only checks, as ``assert (x > 0).all()`` does."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from untorch.export.patches.registry import patch, replaced

__all__ = ["checked_conditions", "unchecked_distributions"]

# They ask for the truth of what they are given.
_BUILTINS = ("any", "all", "max", "min", "sorted", "filter", "next", "list", "tuple", "set", "sum")
# Between a tensor and the code that asks for its truth.
_BETWEEN = ("_export/non_strict_utils.py", "overrides.py", "utils/_device.py", "_tensor.py")


@patch(
    "torch._export.non_strict_utils._NonStrictTorchFunctionHandler.__torch_function__",
    versions="2.11–2.15",
    why="`assert (x > 0).all()` and `if x.isnan().any(): raise` are branches on values for torch.export, which refuses "
    "them, though one side of them ends the call.",
    test="test_conditions.py::test_torch_still_refuses_assertions",
)
@contextlib.contextmanager
def checked_conditions() -> Iterator[None]:
    """A condition whose other side raises is taken to hold, and the traced model checks it at each call."""
    from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler

    original: Any = _NonStrictTorchFunctionHandler.__torch_function__

    def torch_function(self: Any, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__bool__" and isinstance(args[0], torch.Tensor):
            frame = _asking_frame()
            if frame is not None and (required := required_truth(frame)) is not None:
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                value = args[0].to(torch.int64).item()
                torch.ops.aten._assert_scalar.default(value == 1 if required else value == 0, f"{place}: {text}")
                return required
        return original(self, func, types, args, kwargs)

    with replaced(_NonStrictTorchFunctionHandler, "__torch_function__", torch_function):
        yield


@patch(
    "torch.distributions.Distribution._validate_args",
    versions="2.11–2.15",
    why="torch.distributions compares its parameters with their supports, and branches on the values.",
    test="test_conditions.py::test_torch_still_validates_distributions",
)
@contextlib.contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Distributions are made without validation, unless the model asks for it."""
    with replaced(torch.distributions.Distribution, "_validate_args", False):
        yield


def required_truth(frame: FrameType) -> bool | None:
    """What the condition at the frame's line has to be for the call to go on; None where both sides go on."""
    statement = _statement(frame.f_code.co_filename, frame.f_lineno)
    if isinstance(statement, ast.Assert):
        asked = _operands(statement.test, True)
    elif isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise):
        asked = _operands(statement.test, False)
    else:
        return None
    # Which of several operands it is that the frame asks for is not known.
    return asked.pop() if len(asked) == 1 else None


def _operands(test: ast.expr, truth: bool) -> set[bool | None]:
    """What each operand of not, and, or has to be for the whole to be ``truth``; None where that is open."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _operands(test.operand, not truth)
    if isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) != truth:
            return {None}
        return {asked for operand in test.values for asked in _operands(operand, truth)}
    return {None if _asks_inside(test, truth) else truth}


def _asks_inside(leaf: ast.expr, truth: bool) -> bool:
    """Whether the truth of something else than the operand may be asked for on its way."""
    for node in ast.walk(leaf):
        if isinstance(node, ast.IfExp | ast.BoolOp | ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
            return True
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BUILTINS:
            return True
        if isinstance(node, ast.Compare):
            asks = any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops)
            if asks or (len(node.ops) > 1 and not truth):
                return True
    return False


def _statement(path: str, line: int) -> ast.stmt | None:
    """The innermost if or assert whose condition has the line."""
    found = None
    for node in _statements(path):
        if node.test.lineno <= line <= (node.test.end_lineno or 0):
            found = node
    return found


@functools.lru_cache(maxsize=64)
def _statements(path: str) -> list[ast.If | ast.Assert]:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert)]


def _asking_frame() -> FrameType | None:
    """The frame that asked the caller's caller for the tensor's truth, without what torch puts between."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        frame = frame.f_back
    return frame
