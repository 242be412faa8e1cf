"""Errors of the server, and which status each exception gets over HTTP and gRPC."""

from __future__ import annotations

from untorch.runtime.errors import (
    ClosedError,
    DeviceLostError,
    InvalidArgumentError,
    InvalidFileError,
    OutOfMemoryError,
    SystemResourceError,
    UnsupportedError,
    UntorchError,
)

__all__ = ["BodyTooLargeError", "DeadlineError", "ModelNotFoundError", "NotReadyError", "QueueFullError", "status_of"]


class ModelNotFoundError(InvalidArgumentError, LookupError):
    """No model of that name or version is served."""


class QueueFullError(UntorchError, RuntimeError):
    """As many calls of the method wait as may: the client should try again later."""


class DeadlineError(UntorchError, TimeoutError):
    """The call was not computed within its time."""


class NotReadyError(UntorchError, RuntimeError):
    """The model, or the server, does not take calls at the moment."""


class BodyTooLargeError(InvalidArgumentError):
    """The request's body is larger than the server takes."""


# By HTTP status; gRPC's name. The first match counts.
_STATUS: tuple[tuple[type[BaseException], int, str], ...] = (
    (ModelNotFoundError, 404, "NOT_FOUND"),
    (BodyTooLargeError, 413, "RESOURCE_EXHAUSTED"),
    (QueueFullError, 429, "RESOURCE_EXHAUSTED"),
    (DeadlineError, 504, "DEADLINE_EXCEEDED"),
    (NotReadyError, 503, "UNAVAILABLE"),
    (ClosedError, 503, "UNAVAILABLE"),
    (OutOfMemoryError, 503, "RESOURCE_EXHAUSTED"),
    (SystemResourceError, 503, "RESOURCE_EXHAUSTED"),
    (DeviceLostError, 500, "INTERNAL"),
    (InvalidArgumentError, 400, "INVALID_ARGUMENT"),
    (InvalidFileError, 500, "INTERNAL"),
    (UnsupportedError, 501, "UNIMPLEMENTED"),
    (MemoryError, 503, "RESOURCE_EXHAUSTED"),
)


def status_of(error: BaseException) -> tuple[int, str]:
    """HTTP's status and gRPC's status name for an exception."""
    for kind, http, grpc in _STATUS:
        if isinstance(error, kind):
            return http, grpc
    return 500, "INTERNAL"
