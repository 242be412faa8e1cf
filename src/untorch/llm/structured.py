"""Output that follows a JSON schema, a regular expression or a grammar, by llguidance: which tokens may come next."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.llm.extras import import_extra
from untorch.llm.params import SamplingParams
from untorch.llm.tokenizer import Tokenizer
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

__all__ = ["Grammars", "Matcher", "compact_schema", "compute_masks"]

# As Python's json.dumps writes JSON. With white space of any length, models that prefer it never come to an end.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# llguidance follows references and rules by recursion: a chain of 1500 references, or of 3000 rules, overflows the
# stack, which ends the process.
_MOST_REFERENCES = 500
_MOST_RULES = 1000
_RULE = re.compile(r"^[ \t]*[?!]?\w[^:\n\"/]*:", re.MULTILINE)
# An escaped ASCII character may be part of "$ref".
_REFERENCE = re.compile(r'"\$ref"|\\u00')


def compact_schema(schema: Any) -> Any:
    """The JSON schema, without white space but one behind colons and commas, unless its "x-guidance" says otherwise."""
    if schema is True:
        schema = {}
    return {"x-guidance": _COMPACT, **schema} if isinstance(schema, Mapping) else schema


class Matcher:
    """Where one sequence is in its grammar."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._failed: str | None = None

    def fill(self, mask: NDArray[np.int32]) -> None:
        """A bit of the mask for each token, 1 where it may come next."""
        try:
            self._core.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except BaseException as error:  # a panic is no Exception
            self._failed = f"{type(error).__name__}: {error}"
        if self._failed is not None:
            mask[:] = 0

    def append(self, token: int) -> None:
        """A token was chosen."""
        self._core.consume_token(token)

    @property
    def done(self) -> bool:
        """Nothing may follow."""
        return bool(self._core.is_stopped())

    @property
    def problem(self) -> str | None:
        """What went wrong, if anything did."""
        return str(self._core.get_error()) if self._core.is_error() else self._failed

    def copy(self) -> Matcher:
        """At the same place, independent from now on."""
        return Matcher(self._core.deep_copy())


def compute_masks(matchers: Sequence[Matcher], vocabulary: int) -> NDArray[np.int32]:
    """A row for each matcher, with a bit for each token, behind a row that allows everything."""
    masks = np.full((len(matchers) + 1, -(-vocabulary // 32)), -1, np.int32)
    for row, matcher in enumerate(matchers, 1):
        matcher.fill(masks[row])
    return masks


class Grammars:
    """Makes matchers for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary, self._stop_ids = tokenizer, vocabulary, list(stop_ids)
        self._core: Any = None

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """For the request's schema, expression or grammar; None if it has none. Raises InvalidArgumentError."""
        structure = params.structure
        if structure is None:
            return None
        kind, description = structure
        if self._tokenizer is None:
            raise InvalidArgumentError(f"SamplingParams: {kind}: the package has no tokenizer, which this needs")
        if not self._stop_ids:
            raise InvalidArgumentError(f"SamplingParams: {kind}: the package has no stop token, which this needs")
        llguidance = import_extra("llguidance", f"SamplingParams: {kind}")
        if self._core is None:
            try:
                self._core = llguidance.LLTokenizer(
                    self._tokenizer.data.decode(), n_vocab=self._vocabulary, eos_token=self._stop_ids
                )
            except Exception as error:
                raise UnsupportedError(
                    f"SamplingParams: {kind}: llguidance cannot use the package's tokenizer: {error}"
                ) from None
        core = llguidance.LLMatcher
        try:
            if kind == "json_schema":
                schema = json.loads(description) if isinstance(description, str) else description
                text = json.dumps(compact_schema(schema), ensure_ascii=False)
                _limit(kind, "references", len(_REFERENCE.findall(text)), _MOST_REFERENCES)
                grammar = core.grammar_from_json_schema(text)
            elif kind == "regex":
                grammar = core.grammar_from_regex(description)
            else:
                _limit(kind, "references", len(_REFERENCE.findall(description)), _MOST_REFERENCES)
                _limit(kind, "rules", len(_RULE.findall(description)), _MOST_RULES)
                grammar = core.grammar_from_lark(description)
        except InvalidArgumentError:
            raise
        except Exception as error:  # llguidance raises ValueError, json TypeError
            raise InvalidArgumentError(f"SamplingParams: {kind}: {error}") from None
        matcher = Matcher(core(self._core, grammar, log_level=0))
        if problem := matcher.problem:
            raise InvalidArgumentError(f"SamplingParams: {kind}: {problem}")
        return matcher


def _limit(kind: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidArgumentError(f"SamplingParams: {kind}: expected at most {most} {what}, got {count}")
