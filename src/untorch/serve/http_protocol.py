"""uvicorn's HTTP protocol with the limits that it lacks: time for a head, for a body, and for reading a response."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from untorch.serve.options import ServeOptions

__all__ = ["limited_protocol"]

_HEAD_BYTES = 64 * 2**10
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
_REST = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"


class _LimitedProtocol(HttpToolsProtocol):
    """A connection. One timer at a time runs for what the client has to send, one for what it has to read."""

    max_connections: int
    header_timeout: float
    body_timeout: float
    write_timeout: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = "idle"
        self._head_bytes = 0
        self._is_upgrade = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._read_seconds: float | None = None  # of a timer that is to be started
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin("new", self.header_timeout)
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_read()
        self._cancel_write()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._phase == "head":
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self._refuse(_TOO_LARGE, b'{"error": "the head of the request has more than 64 KiB"}')
        self._start_read_timer()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("CONNECT")
                return
            # No other protocol is spoken. The parser takes the body for that protocol's data: it has to read the head
            # again without the offer, which Java's client makes with every first request.
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self._is_upgrade = False
            self._feed(head + data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = [
                    option for option in value.split(b",") if option.strip().lower() in (b"close", b"keep-alive")
                ]
                lines += [b"connection: " + b",".join(options)] if options else []
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"\r\n"])

    def send_400_response(self, msg: str) -> None:
        """The connection ends with it, as nobody knows where the next request would begin."""
        self._refuse(_BAD_REQUEST, b'{"error": "expected a request of HTTP/1.1"}')

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._phase != "new":  # a connection's first head has its time from the connection on
            self._begin("head", self.header_timeout)
        self._phase = "head"

    def on_headers_complete(self) -> None:
        self._is_upgrade = self.parser.should_upgrade()
        if self._is_upgrade:
            return
        self._begin("body", self.body_timeout)
        if len(self.connections) > self.max_connections:
            self.app = _too_many
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._phase = "idle"
        self._cancel_read()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_write()
        self._write_timer = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_write()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Also ends a connection whose last response the client does not read."""
        super().timeout_keep_alive_handler()
        self._cancel_write()
        self._write_timer = self.loop.call_later(self.write_timeout, self.transport.abort)

    def _begin(self, phase: str, seconds: float) -> None:
        """The timer starts when all data that is there has been read: most requests need none."""
        self._cancel_read()
        self._phase = phase
        self._read_seconds = seconds

    def _start_read_timer(self) -> None:
        if self._read_seconds is not None:
            self._read_timer = self.loop.call_later(self._read_seconds, self._too_slow)
            self._read_seconds = None

    def _too_slow(self) -> None:
        if self._phase == "new":
            self.transport.close()
        elif self._phase == "head":
            self._refuse(_TOO_SLOW, b'{"error": "the head of the request did not come in time"}')
        elif self.cycle is not None and not self.cycle.response_started:
            self.cycle.disconnected = True  # what the application answers is not sent any more
            self.cycle.message_event.set()
            self._refuse(_TOO_SLOW, b'{"error": "the body of the request did not come in time"}')
        else:
            self.transport.abort()

    def _refuse(self, status: bytes, text: bytes) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(status + _REST % (len(text), text))
        self.transport.close()
        self._cancel_write()
        self._write_timer = self.loop.call_later(self.write_timeout, self.transport.abort)

    def _cancel_read(self) -> None:
        self._read_seconds = None
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _cancel_write(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


async def _too_many(scope: Any, receive: Any, send: Any) -> None:
    headers = {"connection": "close", "retry-after": "1"}
    await JSONResponse({"error": "the server has too many connections"}, 503, headers)(scope, receive, send)


def limited_protocol(options: ServeOptions) -> type[asyncio.Protocol]:
    """The protocol's class with the limits of the options."""
    return type(
        "LimitedProtocol",
        (_LimitedProtocol,),
        {
            "max_connections": options.max_connections,
            "header_timeout": options.header_timeout,
            "body_timeout": options.body_timeout,
            "write_timeout": options.write_timeout,
        },
    )
