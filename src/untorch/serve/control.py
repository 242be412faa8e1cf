"""The connection between the supervisor and a worker: JSON lines over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

from untorch.runtime import errors as runtime_errors
from untorch.runtime.errors import ModelError, UntorchError
from untorch.serve import errors as serve_errors
from untorch.serve.errors import NotReadyError

__all__ = ["Control"]


class Control:
    """A worker's end.

    ``changes``: what was loaded and unloaded since the supervisor began, by name.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[None]] = {}
        self.changes: dict[str, bool] = {}

    @classmethod
    async def open(cls, end: socket.socket) -> Control:
        """Over one end of a socket pair."""
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end))

    async def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. Nothing happens if the other side has ended."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None: the other side has ended."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    async def close(self) -> None:
        """Closes this end."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def ask(self, action: str, name: str) -> None:
        """Has all workers load or unload a package. Raises what one of them raised."""
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await self.send({"ask": number, "action": action, "name": name})
            await future
        finally:
            del self._asked[number]

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Messages but answers, until the other side ends."""
        while (message := await self.receive()) is not None:
            if "answer" not in message:
                yield message
                continue
            future = self._asked.get(message["answer"])
            if future is not None and not future.done():
                if message["error"] is None:
                    future.set_result(None)
                else:
                    future.set_exception(_error(*message["error"]))
        for future in self._asked.values():
            if not future.done():
                future.set_exception(NotReadyError("the server is shutting down"))


def _error(kind: str, text: str) -> Exception:
    """An exception of another process."""
    for module in (serve_errors, runtime_errors):
        found = getattr(module, kind, None)
        if isinstance(found, type) and issubclass(found, UntorchError):
            return found(text)
    return ModelError(f"{kind}: {text}")
