"""Errors for paths that are no files."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from untorch.runtime.errors import FileMissingError
from untorch.validation import missing_file


def test_missing_files(tmp_path: Path) -> None:
    for path, text in (
        ("a.png", "a.png"),
        ("", "'': the path is empty"),
        (tmp_path, f"{tmp_path}: it is a folder, pass its files"),
        ("QUJD" * 2000, f"{'QUJD' * 20}…: expected a path, got 8000 characters: pass the contents of a file as bytes"),
    ):
        error = missing_file("pipeline: inputs", path)
        assert str(error) == f"pipeline: inputs: there is no file {text}"
        assert (error.errno, error.filename) == (errno.ENOENT, str(path))
        with pytest.raises(FileMissingError):
            raise error
