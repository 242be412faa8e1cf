"""What a package says of an encoder-decoder speech model: its methods, special tokens and the rules of its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Seq2SeqSettings", "read_seq2seq"]

_MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Seq2SeqSettings:
    """The manifest's member "speech.seq2seq".

    Attributes:
        decode: The method that decodes: tokens and their position in, logits of the last one out.
        tokenizer: Names a file of the package: a tokenizer.json.
        max_tokens: Positions of the decoder.
        vocabulary: Tokens that the decoder gives logits of.
        start, end, no_timestamps: Special tokens. Those after ``no_timestamps`` are times.
        previous: The token before a prompt's text; None: prompts are not served.
        no_speech: The token whose probability at the start says that nobody speaks; None: there is none.
        transcribe, translate: The tokens of the tasks; None: the model has one language.
        languages: Tokens by ISO 639-1; empty: the model has one language.
        suppress, suppress_first: Tokens that never come, and those that do not come first.
        seconds_per_token: Between two times.
        max_first_time: The largest first time, in steps; None: any.
    """

    decode: str
    tokenizer: str
    max_tokens: int
    vocabulary: int
    start: int
    end: int
    no_timestamps: int
    seconds_per_token: float
    previous: int | None = None
    no_speech: int | None = None
    transcribe: int | None = None
    translate: int | None = None
    languages: Mapping[str, int] = field(default_factory=dict)
    suppress: tuple[int, ...] = ()
    suppress_first: tuple[int, ...] = ()
    max_first_time: int | None = None

    @property
    def first_time(self) -> int:
        """The token of 0 seconds."""
        return self.no_timestamps + 1

    def to_json(self) -> dict[str, Any]:
        """JSON's types alone."""
        return {
            **vars(self), "languages": {**self.languages}, "suppress": [*self.suppress],
            "suppress_first": [*self.suppress_first],
        }  # fmt: skip


def read_seq2seq(section: Any) -> Seq2SeqSettings:
    """Of a manifest. Raises KeyError, TypeError or ValueError for one that is damaged."""
    if not isinstance(section, Mapping):
        raise TypeError(f"seq2seq: expected a dictionary, got {section!r:.80}")
    vocabulary = int(section["vocabulary"])
    if not 1 <= vocabulary <= _MOST_TOKENS:
        raise ValueError(f"vocabulary: {vocabulary}")

    def token(value: Any) -> int:
        found = int(value)
        if not 0 <= found < vocabulary:
            raise ValueError(f"token {found} of {vocabulary}")
        return found

    def optional(name: str) -> int | None:
        return None if section[name] is None else token(section[name])

    found = Seq2SeqSettings(
        decode=str(section["decode"]),
        tokenizer=str(section["tokenizer"]),
        max_tokens=int(section["max_tokens"]),
        vocabulary=vocabulary,
        start=token(section["start"]),
        end=token(section["end"]),
        no_timestamps=token(section["no_timestamps"]),
        seconds_per_token=float(section["seconds_per_token"]),
        previous=optional("previous"),
        no_speech=optional("no_speech"),
        transcribe=optional("transcribe"),
        translate=optional("translate"),
        languages={str(name): token(value) for name, value in section["languages"].items()},
        suppress=tuple(map(token, section["suppress"])),
        suppress_first=tuple(map(token, section["suppress_first"])),
        max_first_time=None if section["max_first_time"] is None else int(section["max_first_time"]),
    )
    # A prompt's start, language, task, no_timestamps, and a token behind them.
    if not 8 <= found.max_tokens <= _MOST_TOKENS:
        raise ValueError(f"max_tokens: {found.max_tokens}")
    if not 0 < found.seconds_per_token < 60 or (found.max_first_time is not None and found.max_first_time < 0):
        raise ValueError(f"seconds_per_token: {found.seconds_per_token}, max_first_time: {found.max_first_time}")
    if found.languages and found.transcribe is None:
        raise ValueError("languages without a token transcribe")
    return found
