"""The command ``untorch``. Only this file runs without typer and rich; it says how to get them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

_NEEDED = ("typer", "rich", "click")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line on ``arguments`` (default: the process's) and exit with its code."""
    try:
        import rich  # noqa: F401  (imported where something is printed; typer alone does not need it)

        from untorch.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _NEEDED:
            raise
        print("untorch: the command line needs typer and rich: pip install 'untorch[cli]'", file=sys.stderr)
        sys.exit(1)
    app(args=None if arguments is None else list(arguments), prog_name="untorch")
