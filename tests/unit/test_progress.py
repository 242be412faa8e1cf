"""What a terminal shows of steps and bars, and that nothing is shown anywhere else."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from untorch import progress
from untorch.archive import ArchiveWriter
from untorch.progress import Progress, large_file


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In the test itself: pytest's capture replaces sys.stderr between a fixture and its test."""
    made = Terminal()
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    return made


def test_a_bar_is_as_full_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    shown = Progress()
    with shown.bar("write", 4 << 20) as advance:
        advance(1 << 20)
        advance(3 << 20)
    text = terminal.getvalue()
    assert "4.0/4.0 MiB" in text and "✓" in text and "write" in text
    assert shown.seconds["write"] > 0


def test_no_terminal_gets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress()
    with shown.bar("write", 10) as advance, shown.step("compile") as say:
        advance(10)
        say("1 of 2")
    assert capsys.readouterr() == ("", "")
    assert shown.seconds.keys() == {"write", "compile"}


def test_a_bar_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    shown = Progress()
    with pytest.raises(ValueError, match="inside"), shown.bar("write", 10):
        raise ValueError("inside")
    assert "✓" not in terminal.getvalue() and "write" in shown.seconds


def test_large_files_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = terminal_of(monkeypatch)
    small, large = tmp_path / "small.pt2", tmp_path / "large.pt2"
    small.write_bytes(b"x")
    with large.open("wb") as file:
        os.ftruncate(file.fileno(), progress._LARGE_FILE)
    with large_file("loading", small), large_file("loading", tmp_path / "missing.pt2"):
        pass
    assert terminal.getvalue() == ""
    with large_file("loading", large):
        pass
    assert "loading large.pt2 (0.2 GiB)" in terminal.getvalue()


def test_the_writer_tells_of_every_part(tmp_path: Path) -> None:
    told: list[int] = []
    with ArchiveWriter(tmp_path / "m.pt2") as writer:
        writer.on_bytes = told.append
        writer.write("a", bytes(10))
        writer.write("b", bytes((16 << 20) + 3))
        writer.on_bytes = None
    assert told == [10, 16 << 20, 3]
