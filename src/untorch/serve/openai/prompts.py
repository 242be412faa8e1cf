"""Prompts and inputs: a text, texts, token ids, or lists of token ids."""

from __future__ import annotations

from typing import Any

from untorch.llm import Engine
from untorch.serve.openai.errors import expected, invalid
from untorch.serve.openai.fields import Fields

__all__ = ["check_prompts", "read_prompts"]

_WHAT = "a string, an array of strings, of token ids, or of arrays of token ids"
_MOST = 2048


def check_prompts(value: Any, name: str) -> None:
    """Raises ApiError if it is no text, no token ids, and no list of these."""
    if isinstance(value, str):
        return
    if not isinstance(value, list):
        raise expected(name, _WHAT, value, "invalid_type")
    if not value:
        raise expected(name, "at least one", value)
    if all(isinstance(item, int) for item in value):
        return
    if len(value) > _MOST:
        raise invalid(name, f"expected at most {_MOST}, got {len(value)}")
    for at, item in enumerate(value):
        if not isinstance(item, str | list):
            raise expected(f"{name}[{at}]", _WHAT, item, "invalid_type")


def read_prompts(fields: Fields, name: str, engine: Engine) -> list[list[int]]:
    """Token ids of each. An empty text is the model's token for the beginning, if it has one. Raises ApiError."""
    value = fields.required(name)
    check_prompts(value, name)
    if isinstance(value, str):
        return [_encode(value, name, engine)]
    if all(isinstance(item, int) for item in value):
        return [_ids(value, name, engine)]
    found = []
    for at, item in enumerate(value):
        place = f"{name}[{at}]"
        found.append(_encode(item, place, engine) if isinstance(item, str) else _ids(item, place, engine))
    return found


def _encode(text: str, place: str, engine: Engine) -> list[int]:
    if engine.tokenizer is None:
        raise expected(place, "token ids, as the model has no tokenizer", text)
    begin = engine.settings.bos_id
    return engine.tokenizer.encode(text) or ([] if begin is None else [begin])


def _ids(ids: list[Any], place: str, engine: Engine) -> list[int]:
    most = engine.settings.vocabulary - 1
    for at, item in enumerate(ids):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= most:
            raise expected(f"{place}[{at}]", f"a token id from 0 to {most}", item)
    return ids
