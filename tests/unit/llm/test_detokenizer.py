"""Streaming text: characters stay whole, and stop strings are found across tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from untorch.llm.detokenizer import ByteDetokenizer, Detokenizer, StopStrings

TEXTS = ["plain text", "größe 世界 🌍🧑‍🚀 end", "🌍", "\ufffd real \ufffd\ufffd\ufffd\ufffd", "a" * 100 + "é" * 60]


def lossy(ids: Sequence[int]) -> str:
    """One byte a token."""
    return bytes(ids).decode(errors="replace")


def by_byte(ids: Sequence[int]) -> str:
    """As decoders with a byte fallback: bytes that make no character are U+FFFD each."""
    text, pending = "", b""
    for byte in ids:
        pending += bytes([byte])
        try:
            text += pending.decode()
            pending = b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                text += "\ufffd" * len(pending)
                pending = b""
    return text + "\ufffd" * len(pending)


@pytest.mark.parametrize("decode", [lossy, by_byte])
@pytest.mark.parametrize("text", TEXTS)
def test_characters_are_whole(text: str, decode: object) -> None:
    made = Detokenizer(decode)  # type: ignore[arg-type]
    pieces = [made.append(byte) for byte in text.encode()]
    assert "".join(pieces) + made.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == text


def test_bytes_that_are_no_text() -> None:
    ids = [random.Random(3).randrange(256) for _ in range(500)]
    made = Detokenizer(lossy)
    assert "".join(made.append(byte) for byte in ids) + made.finish() == lossy(ids)


def test_a_character_that_never_ends() -> None:
    made = Detokenizer(lossy)
    assert [made.append(byte) for byte in b"a\xf0\x9f"] == ["a", "", ""]
    assert made.finish() == "\ufffd"
    assert made.finish() == ""


BYTES = {i: bytes([i]) for i in range(256)}


@pytest.mark.parametrize("text", TEXTS)
def test_characters_of_tokens_that_are_bytes(text: str) -> None:
    made = ByteDetokenizer(BYTES)
    pieces = [made.append(byte) for byte in text.encode()]
    assert "".join(pieces) == text and made.finish() == ""


def test_tokens_that_are_bytes() -> None:
    ids = [random.Random(3).randrange(256) for _ in range(500)]
    made = ByteDetokenizer(BYTES)
    assert "".join(made.append(byte) for byte in ids) + made.finish() == lossy(ids)
    made = ByteDetokenizer(BYTES, b"ab\xe4\xb8")
    assert [made.append(0x96), made.append(0xF0), made.append(0x9F)] == ["世", "", ""]
    assert [made.finish(), made.finish()] == ["\ufffd", ""]


def test_a_prompt_before_it() -> None:
    """Decoders strip the space of a text's first word."""

    def words(ids: Sequence[int]) -> str:
        return "".join(f" w{i}" for i in ids).removeprefix(" ")

    made = Detokenizer(words, list(range(20)))
    assert made.append(20) == " w20"
    assert Detokenizer(words).append(20) == "w20"


def test_a_prompt_that_ends_within_a_character() -> None:
    made = Detokenizer(lossy, b"ab\xe4\xb8")
    assert made.append(0x96) == "世"


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(include: bool) -> None:
    made = StopStrings(["END", "stop!"], include)
    assert made.append("text E") == ("text ", None)
    assert made.append("N") == ("", None)
    assert made.append("E st") == ("ENE ", None)
    assert made.append("op!rest") == ("stop!" if include else "", "stop!")


def test_the_first_stop_string_wins() -> None:
    assert StopStrings(["b", "ab"]).append("xxabyy") == ("xx", "ab")


def test_text_that_was_held_back() -> None:
    made = StopStrings(["\n\n"])
    assert made.append("a\n") == ("a", None)
    assert made.finish() == "\n"
    assert made.finish() == ""


def test_any_cut() -> None:
    text, rng = "aababab ababc abab", random.Random(0)
    for _ in range(200):
        made, given, at, found = StopStrings(["ababc"]), "", 0, None
        while at < len(text) and found is None:
            size = rng.randrange(1, 5)
            piece, found = made.append(text[at : at + size])
            given, at = given + piece, at + size
        assert (given, found) == ("aababab ", "ababc")
