"""Server-sent events, and answers whose client may leave: then the request in the engine is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from untorch.llm import Chunk
from untorch.serve.openai.errors import ApiError, from_exception
from untorch.serve.openai.service import Timed

__all__ = ["DONE", "EventStream", "Reply", "event", "merge", "results"]

DONE = b"data: [DONE]\n\n"
_LAST_EVENT_SECONDS = 0.5  # that a client may hold up the server's end


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class _Leavable(Response):
    """Runs ``_answer`` until it ends or the client leaves; then, in any case, calls ``close``."""

    def __init__(self, close: Callable[[], None]) -> None:
        super().__init__()
        self._close = close
        self._is_interrupted = False

    async def _answer(self, send: Send) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.ensure_future(self._answer(send))
        left = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server ends
            self._is_interrupted = True
            raise
        finally:
            self._close()
            left.cancel()
            finished = answer.done()
            answer.cancel()
            await asyncio.gather(answer, left, return_exceptions=True)
        if finished:
            with contextlib.suppress(OSError):  # the connection is gone
                answer.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(_Leavable):
    """events: each is sent as it comes. An error becomes an event, as the status is sent already."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(close)
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [item for item in self.raw_headers if item[0] != b"content-length"]

    async def _answer(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except OSError:
            raise
        except asyncio.CancelledError:
            if self._is_interrupted:
                error = ApiError(503, "the server is shutting down", kind="server_error", code="unavailable")
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    await asyncio.wait_for(self._end(send, event(error.body)), _LAST_EVENT_SECONDS)
            raise
        except Exception as error:
            await self._end(send, event(from_exception(error).body))
            return
        await self._end(send)

    async def _end(self, send: Send, last: bytes = b"") -> None:
        if last:
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Reply(_Leavable):
    """answer: makes the whole answer, or raises what is an error in OpenAI's envelope."""

    def __init__(self, answer: Callable[[], Awaitable[Response]], close: Callable[[], None]) -> None:
        super().__init__(close)
        self._make = answer

    async def _answer(self, send: Send) -> None:
        try:
            response = await self._make()
        except Exception as error:
            response = from_exception(error).response()
        await response({"type": "http"}, _nothing, send)


async def _nothing() -> Any:
    return {"type": "http.disconnect"}


async def results(generations: Sequence[Timed]) -> list[Any]:
    """Their outputs, when all have ended. Raises what made one fail."""

    async def one(generation: Timed) -> Any:
        async for _ in generation:
            pass
        output = generation.result()
        for completion in output.completions:
            check_end(completion.finish_reason)
        return output

    return list(await asyncio.gather(*map(one, generations)))


async def merge(generations: Sequence[Timed]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """All their chunks as they come, with the generation's index. Raises what made one fail."""
    if len(generations) == 1:
        async for chunk in generations[0]:
            check_end(chunk.finish_reason)
            yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue()

    async def read(index: int) -> None:
        try:
            async for chunk in generations[index]:
                queue.put_nowait((index, chunk))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.ensure_future(read(index)) for index in range(len(generations))]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
                continue
            check_end(item.finish_reason)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_end(reason: str | None) -> None:
    """Raises ApiError if it was not the model, nor a limit of the request, that ended it."""
    if reason == "cancelled":
        raise ApiError(503, "the model is not served any more", kind="server_error", code="unavailable")
    if reason == "timeout":
        raise ApiError(504, "the request took longer than the server allows", kind="server_error", code="timeout")
    if reason == "error":
        raise ApiError(500, "the model failed", kind="server_error", code="model_error")
