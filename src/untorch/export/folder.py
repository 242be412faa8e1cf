"""Hugging Face folders: what all exports of one check first."""

from __future__ import annotations

import errno
from pathlib import Path

from untorch.runtime.errors import file_error

__all__ = ["check_folder"]


def check_folder(argument: str, folder: Path) -> None:
    """Raises FileMissingError if there is no such folder, or if it has no config.json. argument: for the message."""
    if not folder.exists():
        raise file_error(f"{argument}: there is no folder {folder}", errno.ENOENT, str(folder))
    if not (folder / "config.json").is_file():
        raise file_error(f"{argument}: {folder} has no config.json", errno.ENOENT, str(folder))
