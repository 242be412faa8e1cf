"""Files that are there whole or not at all: written under a temporary name, and renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from untorch.runtime.errors import file_error

__all__ = ["replacing", "umask", "write_text"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path``, renamed to it at the end, or removed on an error."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise file_error(f"cannot write {path}: {error.strerror}", error.errno, str(path)) from None
    temporary = Path(name)
    os.fchmod(descriptor, 0o666 & ~umask())
    os.close(descriptor)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise file_error(f"cannot write {path}: {error.strerror}", error.errno, str(path)) from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """The file, in UTF-8. Raises FileOpenError."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def umask() -> int:
    """The process's, which can only be read by setting it."""
    current = os.umask(0o077)
    os.umask(current)
    return current
