"""Shows which step of an export runs, with rich. Silent when stderr is no terminal, or when rich is not installed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

__all__ = ["Progress"]


class Progress:
    """Names the steps and keeps the seconds that each took in ``seconds``."""

    def __init__(self, enabled: bool = True) -> None:
        self.seconds: dict[str, float] = {}
        self._enabled = enabled and sys.stderr.isatty()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """Runs the block as the step ``name``. What it yields shows where the step is: "3 of 12: encoder.fc"."""
        start = time.perf_counter()
        try:
            with self._spinner(name) as update:
                yield update
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def _spinner(self, name: str) -> Iterator[Callable[[str], None]]:
        if not self._enabled:
            yield _silent
            return
        try:
            from rich.console import Console
        except ImportError:
            yield _silent
            return
        console = Console(stderr=True)
        start = time.perf_counter()
        with console.status(name) as status:
            yield lambda where: status.update(f"{name} [dim]{where}[/]")
        console.print(f"[green]✓[/] {name} [dim]{time.perf_counter() - start:.1f} s[/]", highlight=False)


def _silent(where: str) -> None:
    del where
