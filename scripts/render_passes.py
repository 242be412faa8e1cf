"""Writes the table of graph passes in docs/export.md from the table that registers them.

Usage: python scripts/render_passes.py [--check]

With --check nothing is written; the exit code is 1 when the page is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "export.md"
BEGIN, END = "<!-- passes: written by scripts/render_passes.py -->", "<!-- passes: end -->"


def replaced(page: str, generated: str) -> str:
    """The page with ``generated`` between its markers. Raises ValueError when it does not have both."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the marker {END if begin else BEGIN!r}")
    return f"{before}{BEGIN}\n\n{generated}\n{END}{after}"


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    from untorch.export.passes.table import render_table

    old = PAGE.read_text()
    new = replaced(old, render_table())
    if arguments:
        if new != old:
            print("docs/export.md is out of date: run python scripts/render_passes.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
