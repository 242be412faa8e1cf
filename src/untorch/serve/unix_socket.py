"""A Unix domain socket that listens: in place of a dead server's, and removed when it is closed."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

from untorch.runtime.errors import SystemResourceError

__all__ = ["UnixSocket", "listen_on_path"]

_CONNECT_SECONDS = 1.0


class UnixSocket(socket.socket):
    """Removes its file when it is closed, unless the file has become another server's."""

    _identity: tuple[int, int] | None = None
    _path = ""

    def bind_path(self, path: str) -> None:
        """Binds, and remembers which file it is. Raises OSError."""
        self.bind(path)
        self._path = os.path.abspath(path)
        self._identity = _identity(self._path)

    def close(self) -> None:
        """Closes it, and removes the file first: while the socket is open, no other file gets its inode."""
        identity, self._identity = self._identity, None
        if identity is not None:
            with contextlib.suppress(OSError):
                if _identity(self._path) == identity:
                    os.unlink(self._path)
        super().close()


def listen_on_path(path: str, backlog: int) -> UnixSocket:
    """A socket that listens at a path. The file's permissions are those of the umask. Raises SystemResourceError."""
    made = UnixSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(os.path.dirname(os.path.abspath(path))):
            _make_room(path)
            made.bind_path(path)
            made.listen(backlog)
        made.setblocking(False)
    except OSError as error:
        made.close()
        if isinstance(error, SystemResourceError):
            raise
        raise SystemResourceError(
            f"HTTP cannot listen on the Unix socket {path}: {error.strerror or error}", error.errno
        ) from None
    return made


def _make_room(path: str) -> None:
    """Removes a socket file that nobody listens on. Raises SystemResourceError, or OSError."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise SystemResourceError(
            f"HTTP cannot listen on the Unix socket {path}: a file of another kind is there: choose another --uds",
            errno.EEXIST,
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_SECONDS)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except FileNotFoundError:  # its server has just ended
            return
        except (BlockingIOError, TimeoutError):  # it listens, and its backlog is full
            pass
    raise SystemResourceError(
        f"HTTP cannot listen on the Unix socket {path}: another server listens there: end it, or choose another --uds",
        errno.EADDRINUSE,
    )


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Of two servers that begin at the same time, the second one finds the first one's socket."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino
