"""Control characters in text from files, in Python and in the loader's messages."""

from __future__ import annotations

import unicodedata

import pytest

import untorch
from untorch import _core
from untorch.runtime.text import escape_controls


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain text, ümläut 漢字 🙂", "plain text, ümläut 漢字 🙂"),
        ("a\x1b[31mb", r"a\x1b[31mb"),
        ("\x00\x7f\x9b", r"\x00\x7f\x9b"),
        ("a\tb\nc", "a\tb\nc"),
        ("\r", r"\x0d"),
        ("\u202e\u2066\ufeff", r"\u202e\u2066\ufeff"),
        ("\U000e0041", r"\U000e0041"),
        ("\udc9b", "\udc9b"),  # a byte of a path that is no UTF-8
    ],
)
def test_escape_controls(text: str, escaped: str) -> None:
    assert escape_controls(text) == escaped
    assert str(untorch.InvalidFileError(text)) == escaped
    assert str(untorch.UnknownMethodError(text)) == escaped


def test_the_loader_escapes_the_same_characters() -> None:
    for code in [*range(1, 0x3000), *range(0xFE00, 0x10000), *range(0xE0000, 0xE0200)]:
        char = chr(code)
        if unicodedata.category(char) == "Cs":
            continue
        with pytest.raises(untorch.InvalidFileError) as caught:
            _core.read_elf(b"", char)
        name = caught.value.args[0].removesuffix(" is no usable shared library: it has no ELF header")
        assert name == (escape_controls(char) if char not in "\t\n" else f"\\x{code:02x}"), hex(code)
