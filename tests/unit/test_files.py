"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from untorch.files import replacing, umask, write_text
from untorch.runtime.errors import FileMissingError


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old µ")
    assert path.read_text(encoding="utf-8") == "old µ"
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()

    def half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half of the")
            assert path.read_text(encoding="utf-8") == "old µ"
            raise KeyError

    with pytest.raises(KeyError):
        half()
    write_text(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.json"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none" / "a.json"
    with pytest.raises(FileMissingError) as caught:
        write_text(path, "")
    assert str(caught.value) == f"cannot write {path}: No such file or directory"
