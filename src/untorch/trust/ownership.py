"""Who may change a file: its owner and mode, and those of every folder above it."""

from __future__ import annotations

import os
import stat

from untorch.runtime.errors import UntrustedError

__all__ = ["check_ownership", "ownership_problem"]


def ownership_problem(path: str) -> str | None:
    """Why others than this user and root could change or exchange the file at this real path; None if they cannot.

    Goes from the root down, so that what was checked cannot be exchanged any more when its entries are checked. In a
    folder with the sticky bit, such as /tmp, only an entry's owner can rename it. Raises OSError.
    """
    trusted = {0, os.geteuid()}
    parts = path.split("/")
    for end in range(1, len(parts) + 1):
        name = "/".join(parts[:end]) or "/"
        status = os.lstat(name)
        if stat.S_ISLNK(status.st_mode):
            return f"{name} has become a symbolic link"
        if status.st_uid not in trusted:
            return f"{name} belongs to the user {status.st_uid}: chown it to this user ({os.geteuid()}) or to root"
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_mode & 0o022 and not sticky:
            return f"{name} may be written by others (mode {stat.S_IMODE(status.st_mode):04o}): chmod go-w"
    return None


def check_ownership(path: str, what: str) -> str:
    """The real path of a file that decides what is trusted. Raises UntrustedError if others may change it; OSError."""
    real = os.path.realpath(path, strict=True)
    if problem := ownership_problem(real):
        raise UntrustedError(f"{what} is not used: {problem}")
    return real
