"""Calls of models over HTTP.

They are an ASGI application of their own: Starlette's router, request and response take as long as all else that the
server does for a call of a small model.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from untorch.serve.endpoint import error_response
from untorch.serve.errors import BodyTooLargeError
from untorch.serve.inference.binary import HEADER_LENGTH, decompress, split
from untorch.serve.inference.http_header import RequestHeader, encode_response, parse_header
from untorch.serve.inference.infer import InferRequest, InferResponse, infer

if TYPE_CHECKING:
    from untorch.serve.state import ServerState

__all__ = ["Infer", "InferFirst"]

_HEADER_LENGTH = HEADER_LENGTH.encode()
_PATH = re.compile("/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")


class Infer:
    """The endpoint of calls. In its scope, ``path_params`` has a name and, perhaps, a version.

    Attributes:
        routes: For the router, which answers other methods, and for ``/openapi.json``; the second is with a version.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        paths = ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer")
        self.routes = [Route(path, self, methods=["POST"]) for path in paths]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        try:
            request, header = self._request(scope, await _body(receive))
            headers, body = _response(await infer(self._state, request, "http"), header)
        except (BodyTooLargeError, ClientDisconnect):
            raise  # the middleware answers
        except Exception as error:
            await error_response(error, scope)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _request(self, scope: Scope, body: bytes) -> tuple[InferRequest, RequestHeader]:
        encoding, header_length = "", None
        for key, value in scope["headers"]:
            if key == b"content-encoding":
                encoding = value.decode("latin-1").lower()
            elif key == _HEADER_LENGTH:
                header_length = value.decode("latin-1")
        body = decompress(body, encoding, self._state.options.max_body)
        text, reader = split(body, header_length)
        header = parse_header(text, header_length is not None)
        parameters = scope["path_params"]
        request = InferRequest(
            parameters["name"], parameters.get("version") or "", header.id, header.read(reader), header.outputs,
            header.parameters,
        )  # fmt: skip
        return request, header


class InferFirst:
    """Middleware: takes calls of models past the router, which tries one path after the other."""

    def __init__(self, app: ASGIApp, infer: Infer) -> None:
        self._app = app
        self._infer = infer

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serves a request."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        # Below another application's path the router takes that off.
        match = _PATH.fullmatch(scope["path"]) if is_post and not scope.get("root_path") else None
        if match is None:
            return self._app(scope, receive, send)
        scope["path_params"] = match.groupdict()
        scope["route"] = self._infer.routes[match["version"] is not None]
        return self._infer(scope, receive, send)


def _response(response: InferResponse, header: RequestHeader) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body."""
    head, parts = encode_response(response, header)
    if not parts:
        return [(b"content-length", b"%d" % len(head)), (b"content-type", b"application/json")], head
    body = b"".join((head, *parts))
    return [
        (_HEADER_LENGTH, b"%d" % len(head)), (b"content-length", b"%d" % len(body)),
        (b"content-type", b"application/octet-stream"),
    ], body  # fmt: skip


async def _body(receive: Receive) -> bytes:
    """All of it. Raises ClientDisconnect."""
    parts: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
    raise ClientDisconnect()
