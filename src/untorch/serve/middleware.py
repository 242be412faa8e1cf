"""ASGI middleware: request ids, logs, API keys, limits of bodies, and an answer for every exception.

What has nothing to do behind the application returns the application's own coroutine: of coroutines that await each
other each takes its time when an answer comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from untorch.serve.endpoint import error_document, error_response
from untorch.serve.errors import BodyTooLargeError, NotReadyError
from untorch.serve.metrics import soon

if TYPE_CHECKING:
    from untorch.serve.state import ServerState

__all__ = ["PAGE_FILES", "Access", "Authorize", "LimitBody", "is_authorized"]

_log = logging.getLogger("untorch.serve.access")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# The page's files, by path. They are the same in every server; the page asks its user for a key.
PAGE_FILES = {
    "/": "index.html", "/page/app.js": "app.js", "/page/front_ends.js": "front_ends.js",
    "/page/tensors.js": "tensors.js", "/page/style.css": "style.css",
}  # fmt: skip
_OPEN = frozenset({"/v2/health/live", "/v2/health/ready", *PAGE_FILES})
# A client that sends a body that is refused should see why, before the connection is closed.
_LINGER_SECONDS, _LINGER_BYTES = 2.0, 16 * 2**20


class Access:
    """The outermost: an id for each request, a record of its end in logs and metrics, an answer if all else fails."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        given = _header(scope, b"x-request-id")
        request_id = given.decode() if given and _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()
        scope["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if self._state.tracer.enabled:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
                with self._state.tracer.server_span(
                    f"{scope['method']} {scope['path']}", headers, **{"http.request.method": scope["method"]}
                ):
                    await self._app(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = status or 499
        except asyncio.CancelledError:
            if not self._state.draining:
                raise
            # The drain limit is over. A response that has begun has been ended by its endpoint, or is cut off.
            if status:
                return
            response = error_response(NotReadyError("the server is shutting down"), scope)
            await response(scope, receive, send_with_id)
        except Exception as error:
            if status:
                raise  # a response has begun: the connection is closed
            await error_response(error, scope)(scope, receive, send_with_id)
        finally:
            self._record(scope, status or 499, time.perf_counter() - begin)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or "other"
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._state.metrics.later(self._state.metrics.count_response, method, route, status, seconds)
        if _log.isEnabledFor(logging.INFO):
            soon(_write_log, scope, status, seconds)


class Authorize:
    """Asks for ``Authorization: Bearer KEY``; without keys, refuses calls of pages of other origins than these."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], origins: Iterable[str] = ()) -> None:
        self._app = app
        self._keys = tuple(keys)
        self._origins = frozenset(origin.encode() for origin in origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serves a request."""
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            status, text = self._refusal(scope)
            if text:
                headers = {"connection": "close"} | ({"www-authenticate": "Bearer"} if status == 401 else {})
                document = error_document(scope["path"], status, text)
                return JSONResponse(document, status_code=status, headers=headers)(scope, receive, send)
        return self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str]:
        if self._keys:
            value = (_header(scope, b"authorization") or b"").decode("latin-1")
            if not is_authorized(value, self._keys):
                return 401, "Authorization: expected 'Bearer KEY' with a key of this server"
            return 200, ""
        # Without a key, a web page of anybody could have its visitors' browsers call a server on their machine.
        origin = _header(scope, b"origin")
        if origin is None or origin in self._origins or b"*" in self._origins:
            return 200, ""
        if origin.partition(b"://")[2] != (_header(scope, b"host") or b""):
            return 403, "Origin: expected a page of this server: name others by --cors-origin"
        return 200, ""


def is_authorized(value: str, keys: Iterable[str]) -> bool:
    """Whether an Authorization header has one of the keys. Takes as long whatever differs."""
    scheme, _, given = value.partition(" ")
    found = False
    for key in keys:
        found |= hmac.compare_digest(given.strip().encode(), key.encode())
    return found and scheme.lower() == "bearer"


class LimitBody:
    """Refuses bodies that are too large, by their Content-Length or while they come."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serves a request."""
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        length = _header(scope, b"content-length")
        if length is None:
            return self._count(scope, receive, send)
        if not length.isdigit() or int(length[:20]) > self._limit:
            return self._refuse(scope, receive, send)
        return self._app(scope, receive, send)  # the HTTP parser takes no more bytes for the body than it says

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        received, started, exceeded = 0, False, False

        async def limited() -> Message:
            nonlocal received, exceeded
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                exceeded = not started
                raise BodyTooLargeError(self._text())
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            if not exceeded:  # else the answer is ours, whatever the application makes of it
                started = True
                await send(message)

        try:
            await self._app(scope, limited, watched)
        except BodyTooLargeError:
            if not exceeded:
                raise
        if exceeded:
            await self._refuse(scope, receive, send)

    def _text(self) -> str:
        return f"expected a body of at most {self._limit} bytes (--max-body)"

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers at once, and takes some of what still comes: a client may read only when it has sent."""
        body = json.dumps(error_document(scope["path"], 413, self._text())).encode()
        headers = [
            (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]  # fmt: skip
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_discard(receive), _LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    count = 0
    while count < _LINGER_BYTES:
        message = await receive()
        count += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


def _write_log(scope: Scope, status: int, seconds: float) -> None:
    client = (scope.get("client") or [None])[0]
    _log.info(
        "%s %s %d %.1f ms", scope["method"], scope["path"], status, seconds * 1e3,
        extra={
            "request_id": scope["request_id"], "method": scope["method"], "path": scope["path"],
            "status": status, "seconds": round(seconds, 6), "client": client,
        },
    )  # fmt: skip


def _header(scope: Scope, name: bytes) -> bytes | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for key, value in headers:
        if key == name:
            return bytes(value)
    return None
