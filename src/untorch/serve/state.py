"""What the endpoints of one server process share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import untorch
from untorch.serve.metrics import Metrics
from untorch.serve.options import ServeOptions
from untorch.serve.repository import Engines, Repository
from untorch.serve.tracing import Tracer

__all__ = ["ServerState"]

T = TypeVar("T")
Change = Callable[[str, str], Awaitable[None]]


class ServerState:
    """Options, packages, metrics, and whether the server takes requests.

    Attributes:
        ready: Everything that was asked for is loaded, and the server does not drain.
        draining: The server ends.
        engines: The language models, for the OpenAI API.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.metrics = Metrics()
        self.tracer = Tracer()
        self.repository = Repository(options, self.metrics)
        self.engines = Engines(self.repository, self.metrics)
        self.version = untorch.__version__
        self.loaded = False
        self.draining = False
        self.forward_change: Change | None = None
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="untorch-serve")
        # Loads and unloads wait for calls, and nothing else is to wait for them; a few at a time are enough.
        self._changes = ThreadPoolExecutor(4, thread_name_prefix="untorch-serve-load")

    @property
    def ready(self) -> bool:
        """Whether the server takes requests."""
        return self.loaded and not self.draining

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls what takes its time in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def load_all(self) -> None:
        """Loads what the options name. Raises what a load raises."""
        await self.call(self.repository.load_all)
        self.loaded = True

    async def change(self, action: str, name: str) -> None:
        """Loads or unloads a package: in all workers, if there are several."""
        if self.forward_change is not None:
            await self.forward_change(action, name)
        else:
            await self.apply(action, name)

    async def apply(self, action: str, name: str) -> None:
        """Loads or unloads a package in this process."""
        await self._change(self.repository.load if action == "load" else self.repository.unload, name)

    async def keep_up(self) -> None:
        """Refreshes metrics, and looks at the packages' files and folder. Runs until it is cancelled."""
        await asyncio.gather(self._refresh(), self._poll(), self._check_files())

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.call(self.metrics.refresh, self.repository)

    async def _poll(self) -> None:
        while self.options.poll:
            await asyncio.sleep(self.options.poll)
            if self.loaded:
                await self._change(self.repository.poll)

    async def _check_files(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.loaded:
                await self._change(self.repository.check_files)

    async def _change(self, function: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._changes, function, *arguments)

    async def close(self) -> None:
        """Unloads everything."""
        await self.call(self.repository.close)
        self._threads.shutdown(wait=False)
        self._changes.shutdown(wait=False)
