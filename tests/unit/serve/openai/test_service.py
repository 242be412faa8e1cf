"""Work in threads whose caller leaves, and answers whose client leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.responses import Response

from untorch.serve.openai.service import in_thread
from untorch.serve.openai.streaming import EventStream, Reply


def test_what_nobody_waits_for_is_undone() -> None:
    undone: list[str] = []
    gate = threading.Event()

    def work() -> str:
        gate.wait(10)
        return "made"

    async def run() -> None:
        task = asyncio.create_task(in_thread(work, undone.append))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        for _ in range(200):
            await asyncio.sleep(0.01)
            if undone:
                return

    asyncio.run(run())
    assert undone == ["made"]


def test_errors_of_the_work_are_raised() -> None:
    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(in_thread(work, lambda _: None))


async def call(response: Response, leave: asyncio.Event) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await asyncio.wait_for(response({"type": "http"}, receive, send), 10)
    return sent


def test_a_client_that_leaves_ends_the_work() -> None:
    log: list[str] = []

    async def forever() -> Response:
        try:
            await asyncio.Event().wait()
        finally:
            log.append("reply ended")
        raise AssertionError

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            log.append("events ended")

    async def run() -> None:
        leave = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, leave.set)
        assert await call(Reply(forever, lambda: log.append("closed")), leave) == []
        sent = await call(EventStream(events(), lambda: log.append("closed")), leave)
        assert all(message["type"] == "http.response.start" or message["more_body"] for message in sent)

    asyncio.run(run())
    assert log == ["closed", "reply ended", "closed", "events ended"]


def test_an_answer_closes_once_it_is_there() -> None:
    log: list[str] = []

    async def answer() -> Response:
        return Response(b"x")

    async def run() -> None:
        sent = await call(Reply(answer, lambda: log.append("closed")), asyncio.Event())
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]

    asyncio.run(run())
    assert log == ["closed"]
