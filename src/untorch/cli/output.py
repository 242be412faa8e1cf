"""Prints a command's result: JSON or tables, and units."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from untorch.runtime.text import escape_controls

if TYPE_CHECKING:
    from rich.console import Console

_MAX_ROWS, _MAX_CELL = 200, 4000  # a table is for people

__all__ = ["bytes_text", "emit", "make_table", "one_line", "print_fields", "seconds_text", "shape_text"]


def emit(document: dict[str, Any], as_json: bool, render: Callable[[Console], None]) -> None:
    """Prints the document as JSON, or lets ``render`` show it on a console."""
    if as_json:
        json.dump(_finite(document), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return
    from rich.console import Console

    class SafeConsole(Console):
        """Names from files may hold escape sequences: the terminal gets them as text."""

        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(escape_controls(o) if isinstance(o, str) else o for o in objects), **options)

    if sys.stdout.isatty():
        render(SafeConsole(highlight=False, emoji=False, markup=False))
        return
    # Wide enough that nothing is cut when the output goes to a file or a pipe.
    file: Any = _Trimmed(sys.stdout)
    render(SafeConsole(highlight=False, emoji=False, markup=False, width=200, file=file))


class _Trimmed:
    """A text file that gets lines without the spaces that fill up a table's last column."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return int(self._file.write(re.sub(r" +(?=\n)", "", text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def make_table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Any:
    """A plain table; columns whose name starts with ">" are aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    for index, row in enumerate(rows):
        if index == _MAX_ROWS:
            table.add_row(f"… only the first {_MAX_ROWS} rows are shown; --json has all", *[""] * (len(columns) - 1))
            break
        table.add_row(*(_cell(cell) for cell in row))
    return table


def _cell(value: object) -> str:
    text = escape_controls(str(value).replace("\n", "\\n"))
    return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}… ({len(text)} characters)"


def print_fields(console: Console, fields: Iterable[tuple[str, object]]) -> None:
    """Lines of a name and a value, the values in one column."""
    items = list(fields)
    width = max((len(name) for name, _ in items), default=0)
    for name, value in items:
        console.print(f"{name:<{width}}  {_cell(value)}", soft_wrap=True)


def bytes_text(count: int | None) -> str:
    """1536 → "1.5 KiB"."""
    if count is None:
        return "unknown"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def seconds_text(seconds: float | None) -> str:
    """0.00123 → "1.23 ms"."""
    if seconds is None:
        return "unknown"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds / scale:.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def shape_text(shape: Iterable[Any]) -> str:
    """A shape with its symbols and their ranges: "[s0: 1..16, 64]"."""
    return "[" + ", ".join(_dimension_text(dimension) for dimension in shape) + "]"


def _dimension_text(dimension: Any) -> str:
    if not isinstance(dimension, dict):
        return str(dimension)
    if "symbol" not in dimension:
        return str(dimension.get("expr", "?"))
    low, high = dimension.get("min"), dimension.get("max")
    return f"{dimension['symbol']}: {0 if low is None else low}..{'' if high is None else high}"


def _finite(value: Any) -> Any:
    # JSON has no NaN and no infinity: they become strings.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def one_line(text: str) -> str:
    """The text without line breaks; a list under a heading that ends with a colon is joined with semicolons."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    out = ""
    for line in lines:
        out += line if not out else f" {line}" if out.endswith(":") else f"; {line}"
    return out
