"""Fills the tables in README.md and docs/*.md from the benchmarks' result files.

A document marks a place with ``<!-- table: NAME -->`` and ``<!-- end -->`` on lines of their own; the text between
them is replaced. ``--check`` writes nothing and fails if a document is not up to date.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

from common import RESULTS, ROOT, machine_line

_START = re.compile(r"<!--\s*table:\s*(\S+)\s*-->")
_END = re.compile(r"<!--\s*end\s*-->")


class RenderError(Exception):
    """A document or a result file that cannot be used; the text says where and why."""


def load_tables(folder: pathlib.Path) -> dict[str, str]:
    """The result files' tables as Markdown, by name. Raises RenderError for a --quick run or a name used twice."""
    tables: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if document["quick"]:
            raise RenderError(f"{path.name}: made with --quick, which gives no numbers to quote")
        for name, table in document["tables"].items():
            if name in tables:
                raise RenderError(f"{path.name}: the table '{name}' is in another result file as well")
            tables[name] = markdown(table, document)
    return tables


def markdown(table: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """A table with the line below it that says what was measured, by which script and where."""
    columns = [_cell(text) for text in table["columns"]]
    lines = [
        f"| {' | '.join(columns)} |",
        f"|{'|'.join(['---', *['---:'] * (len(columns) - 1)])}|",
        *(f"| {' | '.join(_cell(text) for text in row)} |" for row in table["rows"]),
        "",
        f"{table['note']} `{document['script']}`; {machine_line(document['machine'])}.".strip(),
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def render(text: str, tables: Mapping[str, str], document: str) -> str:
    """``text`` with every marked place filled. Raises RenderError for an unknown table or a marker without its end."""
    lines: list[str] = []
    opened: str | None = None
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```") and opened is None:
            fenced = not fenced
        start = None if fenced else _START.fullmatch(line.strip())
        if start is not None:
            if opened is not None:
                raise RenderError(f"{document}:{number}: the table '{opened}' has no <!-- end --> before this marker")
            opened = start.group(1)
            if opened not in tables:
                known = ", ".join(sorted(tables)) or "none"
                raise RenderError(f"{document}:{number}: no result has a table '{opened}'; there are: {known}")
            lines += [line, tables[opened]]
        elif opened is None:
            lines.append(line)
        elif _END.fullmatch(line.strip()):
            lines.append(line)
            opened = None
    if opened is not None:
        raise RenderError(f"{document}: the table '{opened}' has no <!-- end -->")
    return "\n".join(lines)


def documents(root: pathlib.Path) -> list[pathlib.Path]:
    """README.md and the pages directly below docs."""
    return [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.exists()]


def run(root: pathlib.Path, results: pathlib.Path, check: bool) -> list[str]:
    """Renders all documents; names those that changed, or with ``check`` would change."""
    tables = load_tables(results)
    rendered = {}
    for path in documents(root):
        text = path.read_text()
        rendered[path] = text, render(text, tables, str(path.relative_to(root)))
    changed = []
    # Written only after all went well: no half of the documents is new.
    for path, (old, new) in rendered.items():
        if old != new:
            changed.append(str(path.relative_to(root)))
            if not check:
                path.write_text(new)
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a document is not up to date")
    options = parser.parse_args()
    try:
        changed = run(ROOT, RESULTS, options.check)
    except RenderError as error:
        print(f"render: {error}", file=sys.stderr)
        return 1
    for name in changed:
        print(f"not up to date: {name}" if options.check else f"rendered: {name}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
