"""The exceptions that untorch raises. Each also derives from the built-in exception that Python code catches."""

from __future__ import annotations

import errno
import os
from typing import Any

from untorch.runtime.text import escape_controls

__all__ = [
    "ArgumentTypeError",
    "ClosedError",
    "DeviceLostError",
    "FileIsDirectoryError",
    "FileMissingError",
    "FileOpenError",
    "FilePermissionError",
    "InvalidArgumentError",
    "InvalidFileError",
    "ModelError",
    "OutOfMemoryError",
    "SystemResourceError",
    "UnknownMethodError",
    "UnsupportedError",
    "UntorchError",
    "UntrustedError",
    "file_error",
]


class UntorchError(Exception):
    """Base of every error that untorch raises on purpose. Its text has control characters as escapes."""

    def __str__(self) -> str:
        return escape_controls(super().__str__())


class InvalidArgumentError(UntorchError, ValueError):
    """An argument has the wrong count, type, dtype, shape, device or value."""


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument has the wrong Python type: a string for an integer, a list for an array."""


class UnknownMethodError(InvalidArgumentError, KeyError):
    """``program[name]``: the file has no method of that name."""

    def __str__(self) -> str:
        return escape_controls(str(self.args[0])) if self.args else ""  # KeyError's own is the repr


class InvalidFileError(UntorchError, ValueError):
    """A file cannot be opened, is damaged, truncated, or not of the expected format."""


class _ErrnoError(UntorchError, OSError):
    """Has its own message, and ``errno``, ``strerror`` and ``filename`` as Python's are."""

    def __init__(self, text: object, number: int | None = None, filename: Any = None) -> None:
        OSError.__init__(self, *((text,) if number is None else (number, os.strerror(number), filename)))
        self._text = str(text)

    def __str__(self) -> str:
        return escape_controls(self._text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._text, self.errno, self.filename)


class FileOpenError(InvalidFileError, _ErrnoError, OSError):
    """The operating system does not open the file. ``errno``, ``strerror`` and ``filename`` are set as Python's are."""


class FileMissingError(FileOpenError, FileNotFoundError):
    """There is no file of that name."""


class FilePermissionError(FileOpenError, PermissionError):
    """The file may not be read or written by this user."""


class FileIsDirectoryError(FileOpenError, IsADirectoryError):
    """The path is a directory."""


class UntrustedError(UntorchError, RuntimeError):
    """A trust policy does not accept a file, or a signature does not hold. No OSError: nobody tries again by chance."""


class UnsupportedError(UntorchError, NotImplementedError):
    """The request is valid, but this build or this machine does not support it."""


class ClosedError(UntorchError, RuntimeError):
    """A program, session, graph or stream was used after it had been closed."""


class OutOfMemoryError(UntorchError, MemoryError):
    """Host or device memory ran out."""


class SystemResourceError(_ErrnoError, OSError):
    """The operating system refused something for now: file descriptors or threads. ``errno`` tells which."""


class ModelError(UntorchError, RuntimeError):
    """The compiled model itself reported a failure while it ran."""


class DeviceLostError(UntorchError, RuntimeError):
    """A kernel destroyed the context of a GPU (a failed assertion): the process cannot use that GPU any more."""


_BY_ERRNO: dict[int, type[FileOpenError]] = {
    errno.ENOENT: FileMissingError,
    errno.EACCES: FilePermissionError,
    errno.EPERM: FilePermissionError,
    errno.EISDIR: FileIsDirectoryError,
}


def file_error(text: object, number: int | None, filename: Any) -> FileOpenError:
    """The exception for the system's error ``number``; its message is ``text``, or that of an exception."""
    number = number or errno.EIO
    return _BY_ERRNO.get(number, FileOpenError)(text, number, filename)
