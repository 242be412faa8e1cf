"""Speculative decoding: tokens are proposed cheaply, and one step of the model verifies several of them.

A step gets a sequence's last token and its draft, and gives logits behind each of them. The tokens are chosen from
those one after the other, as without a draft: the first one that is not the draft's ends the sequence's step. So a
token that is proposed with certainty is accepted with the probability that the model gives it, which is rejection
sampling, and equal seeds give equal tokens with and without drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.llm.request import Sample
from untorch.llm.scheduler import Plan
from untorch.llm.sequence import Sequence as TokenSequence
from untorch.runtime.errors import InvalidArgumentError

__all__ = [
    "METHODS", "NgramSpeculator", "Pace", "PromptLookup", "SpeculativeOptions", "Speculator",
    "read_speculative",
]  # fmt: skip

METHODS = ("ngram", "draft")
_MOST_TOKENS = 64
_SHORTEST_PAUSE, _LONGEST_PAUSE = 4, 64  # tokens


@dataclass(frozen=True)
class SpeculativeOptions:
    """method: "ngram" (prompt lookup) or "draft" (a draft model). The names are those of vLLM.

    num_speculative_tokens: the most tokens of a draft. prompt_lookup_min, prompt_lookup_max: the tokens at a sequence's
    end that are looked for before it, for "ngram".
    """

    method: str
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5


def read_speculative(method: Any, tokens: Any, lookup_min: Any, lookup_max: Any) -> SpeculativeOptions | None:
    """Of the engine's arguments. Raises InvalidArgumentError."""
    if method is not None and (not isinstance(method, str) or method not in METHODS):
        raise InvalidArgumentError(f"Engine: speculative: expected 'ngram', 'draft' or None, got {method!r}")
    for name, value, least, most in (
        ("num_speculative_tokens", tokens, 1, _MOST_TOKENS),
        ("prompt_lookup_min", lookup_min, 1, _MOST_TOKENS),
        ("prompt_lookup_max", lookup_max, lookup_min, _MOST_TOKENS),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            what = " (prompt_lookup_min)" if name == "prompt_lookup_max" else ""
            raise InvalidArgumentError(
                f"Engine: {name}: expected an integer from {least}{what} to {most}, got {value!r}"
            )  # fmt: skip
    return None if method is None else SpeculativeOptions(method, tokens, lookup_min, lookup_max)


class Pace:
    """How many tokens to propose for one sequence, by how many were accepted before.

    The draft's length doubles when all of it was accepted, becomes one more than what was accepted, and halves when
    nothing was. When a single token is rejected, nothing is proposed for some tokens: 4, then 8, 16, 32 and 64.
    """

    def __init__(self, most: int) -> None:
        self._most = self._length = most
        self._pause = self._until = 0

    def length(self, generated: int) -> int:
        """For a sequence with that many output tokens; 0: a pause."""
        return self._length if generated >= self._until else 0

    def update(self, generated: int, drafted: int, accepted: int) -> None:
        """What became of a draft; ``generated`` is counted afterwards."""
        if accepted == drafted:
            self._length = min(self._most, max(self._length, 2 * drafted))
        elif accepted:
            self._length = min(self._most, accepted + 1)
        elif self._length > 1:
            self._length = max(1, min(self._length, drafted) // 2)
        else:
            self._pause = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, 2 * self._pause))
            self._until = generated + self._pause
        if accepted:
            self._pause = 0


class PromptLookup:
    """Finds a sequence's last tokens earlier in it; what followed them there is the draft.

    The longest match of ``least`` to ``most`` tokens counts, of equal ones the latest.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._tokens = np.empty(256, np.int32)
        self._count = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Behind these tokens, which are those of the last call and more: ``count`` tokens, or none."""
        self._extend(tokens)
        end = self._match(self._tokens[: self._count])
        if end == 0 or count < 1:
            return []
        found: list[int] = self._tokens[end : min(end + count, self._count)].tolist()
        # A match that reaches the end repeats itself.
        period = self._count - end
        while len(found) < count:
            found.append(found[len(found) - period])
        return found

    def _extend(self, tokens: Sequence[int]) -> None:
        total = len(tokens)
        if total > len(self._tokens):
            grown = np.empty(max(total, 2 * len(self._tokens)), np.int32)
            grown[: self._count] = self._tokens[: self._count]
            self._tokens = grown
        self._tokens[self._count : total] = tokens[self._count :]
        self._count = total

    def _match(self, known: NDArray[np.int32]) -> int:
        """The position behind the earlier occurrence; 0: there is none."""
        total, length, best = len(known), 1, 0
        if total < 2:
            return 0
        ends = np.flatnonzero(known[:-1] == known[-1]) + 1
        while len(ends):
            if length >= self._least:
                best = int(ends[-1])
            if length == self._most or length + 1 >= total:
                break
            ends = ends[ends > length]
            ends = ends[known[ends - 1 - length] == known[total - 1 - length]]
            length += 1
        return best


@dataclass
class _Progress:
    """Of one sample."""

    pace: Pace
    lookup: PromptLookup | None = None


class Speculator(ABC):
    """Proposes tokens for sequences that decode. It belongs to the engine's thread."""

    def __init__(self, options: SpeculativeOptions, max_positions: int) -> None:
        self.options, self._max_positions = options, max_positions

    @abstractmethod
    def prepare(self, running: Iterable[TokenSequence]) -> None:
        """Before a step is scheduled: sets ``wanted`` of the sequences, the tokens to verify, and maybe ``draft``."""

    def fill(self, plan: Plan) -> None:  # noqa: B027 - a speculator may have all tokens already
        """After it was scheduled: sets ``draft`` of the sequences that got room for some."""

    @abstractmethod
    def expects_drafts(self, samples: Iterable[Sample]) -> bool:
        """Whether a step that is enqueued ahead, without drafts, would be worse than one with drafts later."""

    def update(self, sample: Sample, drafted: int, accepted: int) -> None:
        """What became of a draft."""
        sample.draft_tokens += drafted
        sample.accepted_tokens += accepted
        self._progress(sample).pace.update(sample.state.generated, drafted, accepted)

    def length(self, sample: Sample) -> int:
        """The most tokens of the sample's next draft."""
        params, sequence, generated = sample.request.params, sample.sequence, sample.state.generated
        if not params.speculative or generated == 0 or sequence.samples != 1:
            return 0
        length = min(self._progress(sample).pace.length(generated), self._max_positions - len(sequence.tokens) - 1)
        return length if params.max_tokens is None else min(length, params.max_tokens - generated - 1)

    def _progress(self, sample: Sample) -> _Progress:
        found = sample.speculation
        if not isinstance(found, _Progress):
            found = sample.speculation = _Progress(Pace(self.options.num_speculative_tokens))
        return found


class NgramSpeculator(Speculator):
    """Prompt lookup: what followed a sequence's last tokens when they came before."""

    def prepare(self, running: Iterable[TokenSequence]) -> None:
        """Sets ``draft`` and ``wanted``."""
        for sequence in running:
            sequence.draft = self._propose(sequence.owner) if sequence.remaining == 1 else []
            sequence.wanted = len(sequence.draft)

    def expects_drafts(self, samples: Iterable[Sample]) -> bool:
        """Whether one of them has a match now: it is likely to go on."""
        return any(self._propose(sample) for sample in samples)

    def _propose(self, sample: Sample) -> list[int]:
        length = self.length(sample)
        if length < 1:
            return []
        progress = self._progress(sample)
        if progress.lookup is None:
            progress.lookup = PromptLookup(self.options.prompt_lookup_min, self.options.prompt_lookup_max)
        return progress.lookup.propose(sample.sequence.tokens, length)
