"""Logprobs in the two forms of the API: objects with bytes for chats, parallel lists for completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from untorch.llm import TokenLogprobs
from untorch.llm.tokenizer import Tokenizer

__all__ = ["CompletionLogprobs", "chat_logprobs", "token_text"]


def token_text(tokenizer: Tokenizer | None, token: int) -> tuple[str, bytes]:
    """The token as text, and its bytes. Part of a character is written ``bytes:\\xe2\\x82``."""
    if tokenizer is None:
        return f"token_id:{token}", b""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode(), data
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def chat_logprobs(tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """``choices[].logprobs.content``."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, data = token_text(tokenizer, token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    return [
        {**one(item.token, item.logprob), "top_logprobs": [one(token, logprob) for token, logprob in item.top]}
        for item in tokens
    ]


class CompletionLogprobs:
    """``choices[].logprobs`` of one completion, which may come in pieces: offsets go on.

    top: whether the most likely tokens were asked for. skip_special_tokens: special tokens are no part of the text.
    """

    def __init__(self, tokenizer: Tokenizer | None, top: bool, skip_special_tokens: bool) -> None:
        self._tokenizer, self._top, self._skips = tokenizer, top, skip_special_tokens
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The lists of these tokens. A prompt's first token has no logprob."""
        texts, offsets, own, top = [], [], [], []
        for token, item in zip(tokens, logprobs, strict=True):
            text, data = token_text(self._tokenizer, token)
            texts.append(text)
            offsets.append(self._offset)
            if not (self._skips and self._tokenizer is not None and self._tokenizer.is_special(token)):
                self._offset += len(self._decoder.decode(data))
            own.append(None if item is None else _finite(item.logprob))
            top.append(None if item is None else self._best(item))
        return {
            "text_offset": offsets, "token_logprobs": own, "tokens": texts,
            "top_logprobs": top if self._top else None,
        }  # fmt: skip

    def _best(self, item: TokenLogprobs) -> dict[str, float]:
        """With the token itself, as OpenAI has it."""
        pairs = dict([*item.top, (item.token, item.logprob)])
        return {token_text(self._tokenizer, token)[0]: _finite(logprob) for token, logprob in pairs.items()}


def _finite(logprob: float) -> float:
    """JSON has no infinity: -9999 stands for it, as in OpenAI's API."""
    return max(logprob, -9999.0)
