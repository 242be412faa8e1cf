"""Shows which step runs and how far it is, with rich. Silent when stderr is no terminal, or without rich."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Progress", "large_file"]

_LARGE_FILE = 256 << 20  # bytes: what is read in less than a moment shows nothing


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
    def bar(self, name: str, nbytes: int) -> Iterator[Callable[[int], None]]:
        """Runs the block as the step ``name``, with a bar. What it yields adds bytes; the bar is full at ``nbytes``."""
        start = time.perf_counter()
        try:
            with self._bar(name, nbytes) as advance:
                yield advance
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def _bar(self, name: str, nbytes: int) -> Iterator[Callable[[int], None]]:
        with self._shown(name) as console:
            if console is None:
                yield _silent
                return
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bars

            columns = (
                TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
                TimeRemainingColumn(),
            )  # fmt: skip
            with Bars(*columns, console=console, transient=True) as bars:
                task = bars.add_task(name, total=nbytes)
                yield lambda more: bars.advance(task, more)

    @contextlib.contextmanager
    def _spinner(self, name: str) -> Iterator[Callable[[str], None]]:
        with self._shown(name) as console:
            if console is None:
                yield _silent
                return
            with console.status(name) as status:
                yield lambda where: status.update(f"{name} [dim]{where}[/]")

    @contextlib.contextmanager
    def _shown(self, name: str) -> Iterator[Any]:
        """rich's console, which says afterwards that the step is done; None where nothing is shown."""
        console_type = _console_type() if self._enabled else None
        if console_type is None:
            yield None
            return
        console = console_type(stderr=True)
        start = time.perf_counter()
        yield console
        console.print(f"[green]✓[/] {name} [dim]{time.perf_counter() - start:.1f} s[/]", highlight=False)


@contextlib.contextmanager
def large_file(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Names the step while a large file is read: "loading model.pt2 (12.3 GiB)". Small ones show nothing."""
    try:
        size = os.stat(path).st_size
    except OSError:  # opening it says why
        size = 0
    with Progress(size >= _LARGE_FILE).step(f"{what} {os.path.basename(path)} ({size / (1 << 30):.1f} GiB)"):
        yield


def _console_type() -> Any:
    """rich's; None without rich."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console


def _silent(_: object) -> None:
    pass
