"""Conditions on dynamic sizes that a trace depends on, and that the sizes' ranges do not say.

torch.export follows one side of ``if height % 4:``, the one of the example. With Dim.DYNAMIC and Dim.AUTO it keeps the
condition as a guard, which its own module checks and AOTInductor drops. The compiled code checks those that matter:
conditions of Python code, and those without which tensors of the program have other shapes.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from untorch.export.explain import Frame
from untorch.export.small_sizes import keeps_shapes, shape_environment, symbol_names

__all__ = ["SizeGuard", "find_size_guards"]

_TORCH = Path(torch.__file__).parent
# Where torch computes shapes and strides; elsewhere its code, torch.nn for one, branches as a model does.
_SHAPES = ("_prims_common", "_refs", "_decomp", "_meta_registrations", "_subclasses", "_prims", "_ops.py", "_library",
           "fx", "_higher_order_ops", "_dynamo", "_functorch", "_export", "export")  # fmt: skip
_ASKS = re.compile(
    r"\b(if|elif|while|assert|and|or|not|in|min|max|bool|any|all|sorted|int|float|round|range|match|case)\b|[<>]|==|!="
)
_SMALL, _LARGE, _DRAWN, _TRIALS, _LONGEST = 24, 1 << 16, 60, 6, 300


@dataclass(frozen=True)
class SizeGuard:
    """A condition on sizes, also in the inputs' names, and the line of the model that asks for it, if any."""

    expression: Any
    text: str
    frame: Frame | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.frame})" if self.frame is not None else self.text

    @property
    def brief(self) -> str:
        """Without folders, for the file: it holds no paths of the machine that made it."""
        if self.frame is None:
            return self.text
        return f"{self.text} ({dataclasses.replace(self.frame, path=Path(self.frame.path).name)}: {self.frame.text})"


def find_size_guards(program: torch.export.ExportedProgram) -> list[SizeGuard]:
    """The conditions that sizes within the program's ranges may break, and that its results depend on."""
    environment = shape_environment(program)
    names = symbol_names(program)
    symbols = {symbol for symbol in names if isinstance(symbol, sympy.Symbol)}
    if environment is None or not symbols:
        return []
    known = {symbol: int(value) for symbol, value in environment.backed_var_to_val.items() if symbol in symbols}
    ranges = {symbol: program.range_constraints[symbol] for symbol in symbols if symbol in program.range_constraints}
    found: list[SizeGuard] = []
    others: list[tuple[Any, list[dict[Any, int]]]] = []
    drawn = list(_draw(ranges, known))
    for guard in {guard.expr: guard for guard in environment.guards}.values():
        expression = environment.replace(guard.expr)
        if not expression.free_symbols or not expression.free_symbols <= ranges.keys():
            continue
        holds = _compiled(expression)
        broken = [sizes for sizes in drawn if not holds(sizes)]
        if not broken:
            continue
        frame = _frame(guard)
        if frame is not None and not _computes_shapes(frame.path) and _may_branch(frame.text):
            found.append(SizeGuard(expression, _text(expression, names), frame))
        else:
            others.append((expression, broken))
    known_to_differ: dict[frozenset[Any], bool] = {}

    def differs(sizes: dict[Any, int]) -> bool:
        key = frozenset(sizes.items())
        if key not in known_to_differ:
            known_to_differ[key] = keeps_shapes(program, sizes) is False
        return known_to_differ[key]

    for expression, broken in others:
        enforced = [_compiled(guard.expression) for guard in found]
        allowed = [sizes for sizes in broken if all(holds(sizes) for holds in enforced)]
        if any(differs(sizes) for sizes in allowed[:_TRIALS]):
            found.append(SizeGuard(expression, _text(expression, names)))
    return list({guard.expression: guard for guard in found}.values())


def _draw(ranges: dict[Any, Any], known: dict[Any, int]) -> Iterable[dict[Any, int]]:
    """Sizes within the ranges: each dimension alone with every small size, then all together at random."""
    limits = {
        symbol: (
            max(int(bounds.lower) if bounds.lower.is_Integer else 0, 0),
            min(int(bounds.upper) if bounds.upper.is_Integer else _LARGE, _LARGE),
        )
        for symbol, bounds in ranges.items()
    }
    limits = {symbol: (min(low, high), high) for symbol, (low, high) in limits.items()}
    for symbol, (low, high) in limits.items():
        for size in range(low, min(high, low + _SMALL) + 1):
            yield known | {symbol: size}
    generator = random.Random(0)
    for _ in range(_DRAWN):
        yield {
            symbol: generator.randint(low, min(high, low + generator.choice((_SMALL, 256, _LARGE))))
            for symbol, (low, high) in limits.items()
        }


def _compiled(expression: Any) -> Callable[[dict[Any, int]], bool]:
    """Whether the condition holds for sizes, as Python code: sympy takes a hundred times as long."""
    from torch.utils._sympy.printers import PythonPrinter

    code = compile(PythonPrinter().doprint(expression), "<sizes>", "eval")

    def holds(sizes: dict[Any, int]) -> bool:
        try:
            return bool(eval(code, {"math": math}, {symbol.name: size for symbol, size in sizes.items()}))
        except ZeroDivisionError:  # nothing that can be decided
            return True

    return holds


def _frame(guard: Any) -> Frame | None:
    """The line that asked for the guard."""
    place: Any = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    return Frame(place.filename, place.lineno or 0, place.name) if hasattr(place, "filename") else None


def _computes_shapes(path: str) -> bool:
    parts = Path(path).parts
    root = _TORCH.parts
    return parts[: len(root)] == root and len(parts) > len(root) and parts[len(root)] in _SHAPES


def _may_branch(line: str) -> bool:
    """Whether a line of Python may ask for a size itself; others call operators, which ask for theirs."""
    return not line or _ASKS.search(line) is not None


def _text(expression: Any, names: dict[Any, str]) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    symbols = {symbol: sympy.Symbol(names[symbol]) for symbol in expression.free_symbols if symbol in names}
    text = str(PythonPrinter().doprint(expression.xreplace(symbols)))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
