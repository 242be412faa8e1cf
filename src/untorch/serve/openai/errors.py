"""Errors in OpenAI's envelope: ``{"error": {"message", "type", "param", "code"}}``, with their HTTP statuses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from untorch.runtime.errors import ClosedError, InvalidArgumentError, OutOfMemoryError, UnsupportedError, UntorchError
from untorch.runtime.log import INFO, log
from untorch.serve.errors import BodyTooLargeError, DeadlineError, QueueFullError

__all__ = [
    "ApiError", "context_length_exceeded", "expected", "from_exception", "invalid", "model_not_found", "not_loaded",
    "not_served", "shown", "too_many_requests",
]  # fmt: skip

_LONGEST = 600  # characters of a message
_SHOWN = 80  # of a value in it
_ENGINE = re.compile(
    r"(?:SamplingParams: |chat: |submit: |embed: |transcribe: |pipeline: |Engine\.\w+: )?(?:(\w+)(\[[^\]]*\])?: )?(.*)",
    re.S,
)


class ApiError(Exception):
    """An answer other than 200. param: the request's parameter that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.message = message if len(message) <= _LONGEST else message[: _LONGEST - 1] + "…"
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The envelope."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status, self.headers)


def shown(value: Any) -> str:
    """A value of the request as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """400: what is wrong with the parameter."""
    return ApiError(400, message if param is None else f"{param}: {message}", param=param, code=code)


def expected(param: str, what: str, got: Any, code: str | None = "invalid_value") -> ApiError:
    """400: the parameter has another type or value than it may have."""
    return invalid(param, f"expected {what}, got {shown(got)}", code)


def not_served(param: str, reason: str) -> ApiError:
    """400: a parameter that would change the answer, and that this server does not follow."""
    return invalid(param, f"not served: {reason}", "unsupported_parameter")


def model_not_found(name: str, known: list[str]) -> ApiError:
    """404."""
    there = ", ".join(known) or "none"
    return ApiError(
        404, f"model: expected one that is served ({there}), got {shown(name)}", param="model", code="model_not_found"
    )


def not_loaded(name: str, reason: str) -> ApiError:
    """503."""
    return ApiError(
        503, f"model {shown(name)} is not loaded: {reason}", kind="server_error", param="model", code="unavailable"
    )  # fmt: skip


def context_length_exceeded(param: str, most: int, got: int) -> ApiError:
    """400: a prompt that does not fit."""
    return invalid(
        param,
        f"expected at most {most} tokens, which is what the model's length and the server's memory allow, got {got}",
        "context_length_exceeded",
    )


def too_many_requests(name: str, most: int) -> ApiError:
    """429."""
    return ApiError(
        429, f"model {shown(name)} has {most} requests already, which is the server's limit: try again",
        kind="rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": "1"},
    )  # fmt: skip


def from_exception(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """What an exception of the engine, or of this package, means to the client.

    names: the request's parameters by the engine's names, where they differ.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=error.headers)
    if isinstance(error, BodyTooLargeError):
        return ApiError(413, str(error))
    if isinstance(error, InvalidArgumentError):
        found = _ENGINE.fullmatch(str(error))
        assert found is not None
        name, at, text = found[1], found[2] or "", found[3]
        if name is None:
            return invalid(None, text)
        param = (names or {}).get(name, name)
        return ApiError(400, f"{param}{at}: {text}", param=param, code="invalid_value")
    if isinstance(error, UnsupportedError):
        return invalid(None, str(error), "unsupported")
    if isinstance(error, QueueFullError):
        return ApiError(
            429, str(error), kind="rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": "1"}
        )  # fmt: skip
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), kind="server_error", code="timeout")
    if isinstance(error, CancelledError):
        return ApiError(503, "the model is not served any more", kind="server_error", code="unavailable")
    if isinstance(error, ClosedError):
        return ApiError(503, f"the model is not served any more: {error}", kind="server_error", code="unavailable")
    if isinstance(error, OutOfMemoryError):
        return ApiError(500, str(error), kind="server_error", code="out_of_memory")
    if isinstance(error, UntorchError):
        return ApiError(500, str(error), kind="server_error", code="model_error")
    if isinstance(error, RecursionError):
        return invalid(None, "the request is nested too deeply")
    log(INFO, "the OpenAI API failed: %r", error)
    return ApiError(500, f"internal error: {type(error).__name__}", kind="server_error", code="internal_error")
