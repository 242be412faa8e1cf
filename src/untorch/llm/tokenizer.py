"""The package's tokenizer and chat template, by tokenizers and Jinja."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from untorch.llm.detokenizer import ByteDetokenizer, Detokenizer
from untorch.llm.extras import import_extra
from untorch.llm.token_bytes import ByteLevel, TokenBytes
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, UnsupportedError

__all__ = ["ChatTemplate", "Tokenizer"]


class Tokenizer:
    """data: the contents of a tokenizer.json. Raises UnsupportedError without the package tokenizers.

    Attributes:
        max_characters: Of a text; longer ones are refused. Tokens take a hundred bytes each while a text is read: a
            server has to bound texts before it knows how many tokens they have. None: no bound.
    """

    max_characters: int | None = None

    def __init__(self, data: bytes) -> None:
        self.data = data
        tokenizers = import_extra("tokenizers", "text instead of token ids")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # tokenizers raises plain Exception
            raise InvalidFileError(f"the package's tokenizer.json is damaged: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._is_byte_level = isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises InvalidArgumentError for a text that is too long, or has a lone surrogate."""
        self._check_length(text)
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            _check_text(text)
            raise
        return ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts, as the tokenizer's post-processor joins them. Raises as ``encode``."""
        self._check_length(first + second)
        try:
            ids: list[int] = self._tokenizer.encode(first, second).ids
        except TypeError:
            _check_text(first)
            _check_text(second)
            raise
        return ids

    def _check_length(self, text: str) -> None:
        if self.max_characters is not None and len(text) > self.max_characters:
            raise InvalidArgumentError(f"prompt: expected at most {self.max_characters} characters, got {len(text)}")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text, with U+FFFD for bytes that are no characters."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, before: Sequence[int], skip_special_tokens: bool = True) -> Detokenizer | ByteDetokenizer:
        """Of the tokens behind these."""
        if self._is_byte_level:
            return ByteDetokenizer(self._byte_level[skip_special_tokens], before)
        return Detokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens), before)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for: part of a character, perhaps. A special token's own text."""
        return self._token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` skips it."""
        added = self._added.get(token_id)
        return added is not None and bool(added.special)

    def added_id(self, text: str) -> int | None:
        """The id of the added token with this text, special or not: it is never made of other tokens."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._added else None

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> dict[bool, ByteLevel]:
        """The bytes of tokens, by whether special ones are skipped."""
        token = self._tokenizer.id_to_token
        return {False: ByteLevel(token, lambda _: False), True: ByteLevel(token, self.is_special)}

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        texts = {token_id: str(token.content) for token_id, token in self._added.items()}
        return TokenBytes(self.data, self._tokenizer.id_to_token, texts)


class ChatTemplate:
    """A Jinja template in a sandbox, with what templates of language models use.

    source: The template's text. special_tokens: bos_token, eos_token, and the like.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self._special = source, dict(special_tokens)

    @cached_property
    def _template(self) -> Any:
        jinja2 = import_extra("jinja2", "a chat template")
        sandbox = import_extra("jinja2.sandbox", "a chat template")

        def refuse(text: str) -> None:
            raise jinja2.TemplateError(text)

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise InvalidFileError(f"the package's chat template is damaged: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt that the messages make. Raises InvalidArgumentError if the template refuses them."""
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidArgumentError(
                'chat: messages: expected a list of dictionaries such as {"role": "user", "content": "…"}, '
                f"got {messages!r}"
            )
        template = self._template
        given = {"add_generation_prompt": True, **self._special, **variables}
        try:
            text: str = template.render(messages=list(messages), **given)
        except UnsupportedError:
            raise
        except Exception as error:  # whatever the template's expressions raise
            raise InvalidArgumentError(f"chat: the chat template refuses the messages: {error}") from None
        return text


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"prompt: expected Unicode text, got a lone surrogate, {text[error.start]!r}, at {error.start}: decode "
            'bytes with errors="replace"'
        ) from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
