"""Streams that the server's end interrupts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from untorch.serve.openai.streaming import EventStream, event


@pytest.mark.parametrize("reads", [True, False])
def test_the_last_event_of_a_stream_that_is_cut_off(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, for a client that reads; one that does not read holds nothing up."""
    monkeypatch.setattr("untorch.serve.openai.streaming._LAST_EVENT_SECONDS", 0.05)
    sent: list[Any] = []
    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield event({"text": "a"})
        await asyncio.Event().wait()

    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 2 and not reads:
            await asyncio.Event().wait()

    async def main() -> None:
        stream = EventStream(events(), lambda: closed.append(True))
        task = asyncio.create_task(stream({"type": "http"}, receive, send))
        while len(sent) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)

    asyncio.run(main())
    assert closed == [True]
    last = json.loads(sent[2]["body"].removeprefix(b"data: "))
    assert last["error"]["message"] == "the server is shutting down"
    assert [message.get("more_body") for message in sent[2:]] == ([True, False] if reads else [True])
