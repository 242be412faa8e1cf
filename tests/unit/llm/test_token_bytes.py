"""Bytes of tokens: byte-level BPE, byte fallback, SentencePiece's spaces, added tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.llm.fake import byte_tokenizer
from untorch.llm.token_bytes import TokenBytes
from untorch.llm.tokenizer import Tokenizer

pytest.importorskip("tokenizers")


def test_every_byte_of_a_byte_level_tokenizer() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert sorted(tokenizer.token_bytes(i)[0] for i in range(256)) == list(range(256))
    for text in ("Grüße 😀\n", "\x00\x7f"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(257) == b"</s>"
    assert tokenizer.token_bytes(999) == b""


def test_added_tokens() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert (tokenizer.added_id("</s>"), tokenizer.added_id("a"), tokenizer.added_id("none")) == (257, None, None)
    assert (tokenizer.is_special(257), tokenizer.is_special(3), tokenizer.is_special(999)) == (True, False, False)


@pytest.mark.parametrize(
    ("decoder", "entry", "expected"),
    [
        ({"type": "ByteFallback"}, "<0xE2>", b"\xe2"),
        ({"type": "Metaspace", "replacement": "▁"}, "▁a", b" a"),
        (
            {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                                              {"type": "ByteFallback"}]},
            "▁▁b", b"  b",
        ),
        ({"type": "Replace", "pattern": {"Regex": "x"}, "content": " "}, "x", b"x"),
        (None, "<0xE2>", b"<0xE2>"),
    ],
)  # fmt: skip
def test_decoders(decoder: Any, entry: str, expected: bytes) -> None:
    assert TokenBytes(json.dumps({"decoder": decoder}).encode(), {5: entry}.get, {})(5) == expected
