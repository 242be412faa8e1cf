"""Endpoints whose exceptions become JSON: ``{"error": "…"}`` with the status that fits."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from untorch.runtime.errors import UntorchError
from untorch.runtime.text import escape_controls
from untorch.serve.errors import BodyTooLargeError, QueueFullError, status_of

__all__ = ["endpoint", "error_document", "error_response"]

_log = logging.getLogger("untorch.serve")


def endpoint(function: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The function, with an answer for every exception but those that the middleware answers."""

    async def call(request: Request) -> Response:
        try:
            return await function(request)
        except (HTTPException, BodyTooLargeError, ClientDisconnect):
            raise
        except Exception as error:
            return error_response(error, request.scope)

    return call


def error_document(path: str, status: int, text: str) -> dict[str, Any]:
    """An error's body: below /v1 in OpenAI's envelope, which the clients of those paths read."""
    text = escape_controls(text)
    if not path.startswith("/v1/"):
        return {"error": text}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = {401: "invalid_api_key", 429: "rate_limit_exceeded"}.get(status)
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


def error_response(error: Exception, scope: Mapping[str, Any]) -> Response:
    """The answer for an exception. What is no error of ours is logged, and told only by the request's id."""
    status, _ = status_of(error)
    request_id = scope.get("request_id", "")
    if isinstance(error, UntorchError):
        text = str(error)
    elif isinstance(error, MemoryError):
        text = "there is not enough memory for this request"
    else:
        _log.error("request %s failed", request_id, exc_info=error)
        text = f"internal error; request id {request_id}"
    headers = {"retry-after": "1"} if isinstance(error, QueueFullError) else None
    return JSONResponse(error_document(scope["path"], status, text), status_code=status, headers=headers)
