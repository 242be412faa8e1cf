"""The exceptions untorch raises; each is also the built-in exception that a caller would expect."""

__all__ = [
    "ClosedError",
    "InvalidArgumentError",
    "InvalidFileError",
    "ModelError",
    "OutOfMemoryError",
    "UnsupportedError",
    "UntorchError",
]


class UntorchError(Exception):
    """Base of every error that untorch raises on purpose."""


class InvalidArgumentError(UntorchError, ValueError):
    """An argument has the wrong count, type, dtype, shape, device or value."""


class InvalidFileError(UntorchError, ValueError):
    """A file is damaged, truncated, or not what its name says."""


class UnsupportedError(UntorchError, NotImplementedError):
    """The request is valid, but this build has no implementation for it."""


class ClosedError(UntorchError, RuntimeError):
    """A program, session or stream was used after it had been closed."""


class OutOfMemoryError(UntorchError, MemoryError):
    """Host or device memory ran out."""


class ModelError(UntorchError, RuntimeError):
    """The compiled model itself reported a failure while it ran."""
