"""A persistent batch: the samples of steps that decode one behind the other.

What such a step needs to know of each sample is gathered once, into arrays: how its token is chosen, which tokens end
it, and how many it may have. As long as the samples are the same, a step costs a few array operations, and for each
sample only what its token changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from untorch.llm.logits import Draws
from untorch.llm.request import Sample
from untorch.llm.sampler import uniform_numbers

__all__ = ["DecodeBatch"]

_NO_STOP = -2  # neither a token nor -1, which is none


class DecodeBatch:
    """Samples whose next tokens are chosen on the device, one each a step.

    is_plain: They are chosen from the model's logits alone. What changes logits depends on the tokens before.

    draws: Of the first step. vocabulary: token ids below it are tokens. max_positions: of a sequence.
    """

    def __init__(self, samples: Sequence[Sample], draws: Draws, vocabulary: int, max_positions: int) -> None:
        self.samples = list(samples)
        self._vocabulary = vocabulary
        params = [sample.state.params for sample in samples]
        self._random = [row for row, own in enumerate(params) if not own.greedy]
        self._random_states = [samples[row].state for row in self._random]
        self._draws = draws.behind(np.zeros(len(samples), np.float32))
        self._left = np.array([sample.tokens_left(max_positions) for sample in samples])
        self._fewest_left = int(self._left.min())
        self._searched = np.array([sample.has_stop_strings for sample in samples])
        self._stops = _stops(samples)
        self._enqueued, self._given = 1, 0
        self.is_plain = all(sample.state.is_plain for sample in samples)

    @property
    def goes_on(self) -> bool:
        """Whether each sample may have a token more than the steps give that are enqueued."""
        return self._enqueued < self._fewest_left

    def draws_behind(self) -> Draws:
        """Of the step behind, with a row of the logits for each sample."""
        self._enqueued += 1
        if self._random:
            uniform = np.zeros(len(self.samples), np.float32)
            uniform[self._random] = uniform_numbers(self._random_states)
            self._draws = self._draws.behind(uniform)
        return self._draws

    def count_given(self) -> None:
        """A step's tokens were taken, one sample after the other; those behind may be plain from now on."""
        self._given += 1
        self.is_plain = all(sample.state.is_plain for sample in self.samples)

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For the tokens of the next step that has run: where one may be a sample's last, or is no token.

        Where not, ``Sample.extend`` takes it. Only if they are plain.
        """
        self._given += 1
        found: NDArray[np.bool_] = (tokens < 0) | (tokens >= self._vocabulary) | self._searched
        if self._stops is not None:
            found |= (tokens[:, None] == self._stops).any(axis=1)
        if self._given >= self._fewest_left:
            found |= self._left <= self._given
        return found


def _stops(samples: Sequence[Sample]) -> NDArray[np.int64] | None:
    """The tokens that end each sample, [samples, most of one]; None: no sample has any."""
    ids = [sample.ending_ids for sample in samples]
    most = max(map(len, ids))
    if most == 0:
        return None
    return np.array([[*own, *[_NO_STOP] * (most - len(own))] for own in ids], np.int64)
