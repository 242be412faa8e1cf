"""SamplingParams: how a request's tokens are chosen, and when it ends. The words and meanings are those of vLLM."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["SamplingParams"]

_GREEDY_BELOW = 1e-5
_MOST_SAMPLES = 1024
# Logits are float32: beyond these, what they are divided by or multiplied with makes them infinite.
_HOTTEST = 3.4e38
_LARGEST_PENALTY = 1e30


@dataclass(frozen=True)
class SamplingParams:
    """The logits of a token go through these in turn; logprobs are those of the model's own logits.

    Attributes:
        n: Completions of the prompt.
        best_of: Completions to make; the n with the highest mean logprob are returned. Not with stream.
        repetition_penalty: Above 1, tokens of prompt and output become less likely: a positive logit is divided by it,
            a negative one multiplied. From 1e-30 to 1e30.
        frequency_penalty: Subtracted from a logit for each time that the output has the token. From -2 to 2.
        presence_penalty: Subtracted once if the output has the token. From -2 to 2.
        logit_bias: Added to the logits of these token ids, from -100 to 100.
        temperature: Logits are divided by it; 0: the most likely token. At most 3.4e38.
        min_p: Tokens less likely than this part of the most likely one are left out. From 0 to 1.
        top_k: The most likely tokens that stay; 0 or -1: all.
        top_p: The smallest set of tokens with this probability stays. Above 0, to 1.
        seed: Of the request's own random numbers; equal seeds give equal tokens, whatever else runs. None: random.
        stop: Strings that end the text; they are not part of it.
        stop_token_ids: Token ids that end it, besides the model's own.
        include_stop_str_in_output: The stop string is part of the text.
        ignore_eos: The model's own stop tokens do not end it.
        min_tokens: No stop before that many tokens.
        max_tokens: The most tokens; None: as many as fit.
        logprobs: For each token its logprob, and those of that many of the most likely tokens. None: none.
        prompt_logprobs: The same for the prompt's tokens, which are then all computed.
        skip_special_tokens: Special tokens are no part of the text.
        speculative: Tokens may be proposed and verified several at a time, if the engine speculates. They are the same.
        json_schema: The text is JSON of this schema (a dictionary or a string), compact. ``"x-guidance":
            {"whitespace_flexible": True}`` in the schema allows white space of any length.
        regex: The text matches this regular expression.
        grammar: The text is of this Lark grammar, in llguidance's dialect.

    Raises:
        ArgumentTypeError: A field has the wrong type. Also a TypeError.
        InvalidArgumentError: A field has a wrong value. Also a ValueError.
    """

    n: int = 1
    best_of: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    speculative: bool = True
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._integer("n", 1, _MOST_SAMPLES)
        if self.best_of is not None:
            self._integer("best_of", self.n, _MOST_SAMPLES)
        self._number("repetition_penalty", 1 / _LARGEST_PENALTY, _LARGEST_PENALTY)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("temperature", 0.0, _HOTTEST)
        self._number("min_p", 0.0, 1.0)
        self._number("top_p", 0.0, 1.0, above=True)
        self._integer("top_k", -1, None)
        if self.seed is not None:
            self._integer("seed", 0, (1 << 64) - 1)
        self._integer("min_tokens", 0, None)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, None)
            if self.min_tokens > self.max_tokens:
                raise InvalidArgumentError(
                    f"SamplingParams: min_tokens: expected at most max_tokens ({self.max_tokens}), got "
                    f"{self.min_tokens}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, None)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "speculative"):
            if not isinstance(getattr(self, name), bool):
                raise self._type(name, "True or False")
        self._strings()
        self._ids()
        self._structure()

    @property
    def samples(self) -> int:
        """Sequences that are made of the prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < _GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def structure(self) -> tuple[str, Any] | None:
        """The kind of structured output, and its description."""
        for name in ("json_schema", "regex", "grammar"):
            if (value := getattr(self, name)) is not None:
                return name, value
        return None

    def _type(self, name: str, expected: str) -> ArgumentTypeError:
        return ArgumentTypeError(f"SamplingParams: {name}: expected {expected}, got {getattr(self, name)!r}")

    def _integer(self, name: str, least: int, most: int | None) -> None:
        value = getattr(self, name)
        expected = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise self._type(name, expected)
        number = int(value)  # NumPy's integers, too
        if number < least or (most is not None and number > most):
            raise InvalidArgumentError(f"SamplingParams: {name}: expected {expected}, got {value}")
        object.__setattr__(self, name, number)

    def _number(self, name: str, least: float, most: float, above: bool = False) -> None:
        value = getattr(self, name)
        expected = f"a finite number {'above' if above else 'from'} {least:g} to {most:g}"
        if not _is_number(value):
            raise self._type(name, expected)
        if not least <= value <= most or (above and value == least):
            raise InvalidArgumentError(f"SamplingParams: {name}: expected {expected}, got {value}")
        object.__setattr__(self, name, float(value))

    def _strings(self) -> None:
        given = self.stop
        stop = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else None
        if stop is None or not all(isinstance(text, str) for text in stop):
            raise self._type("stop", "a string or a list of strings")
        if "" in stop:
            raise InvalidArgumentError("SamplingParams: stop: expected strings that are not empty")
        object.__setattr__(self, "stop", stop)

    def _ids(self) -> None:
        ids = self.stop_token_ids
        if hasattr(ids, "tolist"):  # an array
            ids = ids.tolist()
        if not isinstance(ids, Sequence) or not all(_is_id(value) for value in ids):
            raise self._type("stop_token_ids", "a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(map(int, ids)))
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, Mapping) or not all(_is_id(key) for key in bias):
            raise self._type("logit_bias", "a dictionary of numbers by token id")
        for key, value in bias.items():
            if not _is_number(value) or not -100 <= value <= 100:
                raise InvalidArgumentError(
                    f"SamplingParams: logit_bias[{key}]: expected a number from -100 to 100, got {value!r}"
                )
        object.__setattr__(self, "logit_bias", {int(key): float(value) for key, value in bias.items()})

    def _structure(self) -> None:
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidArgumentError(
                f"SamplingParams: expected one of json_schema, regex and grammar, got {' and '.join(given)}"
            )
        if self.json_schema is not None and not isinstance(self.json_schema, Mapping | str):
            raise self._type("json_schema", "a dictionary or a string")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise self._type(name, "a string")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0
