"""The bytes that a token stands for, by tokenizer.json: byte-level BPE, byte fallback, SentencePiece's spaces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["ByteLevel", "TokenBytes"]

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Of one tokenizer.

    Args:
        data: The contents of its tokenizer.json.
        token: A token's entry in the vocabulary by id; None where there is none.
        added: The texts of the added tokens by id.
    """

    def __init__(self, data: bytes, token: Callable[[int], str | None], added: Mapping[int, str]) -> None:
        self._token, self._added = token, added
        decoders = list(_decoders(json.loads(data).get("decoder")))
        kinds = {decoder.get("type") for decoder in decoders}
        self._table = _byte_level() if "ByteLevel" in kinds else None
        self._fallback = "ByteFallback" in kinds
        self._space = next(filter(None, map(_space, decoders)), None)

    def __call__(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not have."""
        if (text := self._added.get(token_id)) is not None:
            return text.encode()
        entry = self._token(token_id)
        if entry is None:
            return b""
        table = self._table
        if table is not None and all(character in table for character in entry):
            return bytes(table[character] for character in entry)
        if self._fallback and (found := _FALLBACK.fullmatch(entry)):
            return bytes([int(found[1], 16)])
        return (entry if self._space is None else entry.replace(self._space, " ")).encode()


class ByteLevel(dict[int, bytes]):
    """What a decoder that is byte-level alone makes of each token, by id; found when it is asked for.

    Args:
        token: A token's entry, also of an added one; None where there is none.
        skipped: Whether the token is left out.
    """

    def __init__(self, token: Callable[[int], str | None], skipped: Callable[[int], bool]) -> None:
        super().__init__()
        self._token, self._skipped, self._table = token, skipped, _byte_level()

    def __missing__(self, token_id: int) -> bytes:
        entry = self._token(token_id)
        if entry is None or self._skipped(token_id):
            found = b""
        elif all(character in self._table for character in entry):
            found = bytes(self._table[character] for character in entry)
        else:
            found = entry.encode()
        self[token_id] = found
        return found


def _decoders(decoder: Any) -> Iterator[dict[str, Any]]:
    if isinstance(decoder, dict):
        yield decoder
        for inner in decoder.get("decoders", ()):
            yield from _decoders(inner)


def _space(decoder: Mapping[str, Any]) -> str | None:
    """The character that the decoder makes a space of."""
    if decoder.get("type") == "Metaspace":
        return str(decoder.get("replacement", "▁"))
    if decoder.get("type") == "Replace" and decoder.get("content") == " ":
        pattern = decoder.get("pattern")
        return str(pattern["String"]) if isinstance(pattern, dict) and pattern.get("String") else None
    return None


def _byte_level() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are their own characters, the others come from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
