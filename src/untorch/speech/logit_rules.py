"""Which tokens of Whisper may follow: tokens that are suppressed, and the grammar of its times.

The rules are those of Whisper's decoding (Radford et al., "Robust Speech Recognition via Large-Scale Weak
Supervision", 2022): text comes between two times, times never fall, and a time is taken where all times together are
likelier than any other token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from untorch.speech.seq2seq_settings import Seq2SeqSettings

__all__ = ["LogitRules", "log_softmax"]

_NEVER = np.float32(-np.inf)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of one row [vocabulary]; -inf stays."""
    largest = logits.max()
    found: NDArray[np.float32] = logits - (largest + np.log(np.exp(logits - largest).sum()))
    return found


class LogitRules:
    """with_times: The output has times."""

    def __init__(self, settings: Seq2SeqSettings, with_times: bool) -> None:
        self._settings, self._with_times = settings, with_times
        self._suppress = np.asarray(settings.suppress, np.int64)
        self._first = np.asarray(settings.suppress_first, np.int64)

    def apply(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
        """logits [vocabulary] of what follows ``tokens``, which were generated: what may not follow has -inf."""
        found = logits.astype(np.float32, copy=True)
        if not tokens:
            found[self._first] = _NEVER
        found[self._suppress] = _NEVER
        if self._with_times:
            self._apply_times(found, tokens)
        else:
            found[self._settings.first_time :] = _NEVER
        return found

    def _apply_times(self, found: NDArray[np.float32], tokens: Sequence[int]) -> None:
        settings, first = self._settings, self._settings.first_time
        found[settings.no_timestamps] = _NEVER
        if not tokens:
            found[:first] = _NEVER
            if settings.max_first_time is not None:
                found[first + settings.max_first_time + 1 :] = _NEVER
        else:
            self._apply_pairs(found, tokens)
        logprobs = log_softmax(found)
        times, text = logprobs[first:], logprobs[:first].max(initial=_NEVER)
        largest = times.max(initial=_NEVER)
        if largest > _NEVER and largest + np.log(np.exp(times - largest).sum()) > text:
            found[:first] = _NEVER

    def _apply_pairs(self, found: NDArray[np.float32], tokens: Sequence[int]) -> None:
        """A segment's end is followed by the next one's start or by the end of all."""
        settings, first = self._settings, self._settings.first_time
        last_is_time = tokens[-1] >= first
        before_is_time = len(tokens) < 2 or tokens[-2] >= first
        if last_is_time and before_is_time:
            found[first:] = _NEVER
        elif last_is_time:
            found[: settings.end] = _NEVER
        latest = next((token for token in reversed(tokens) if token >= first), None)
        if latest is not None:
            # The time that ends a segment may begin the next one.
            found[first : latest + (0 if last_is_time and not before_is_time else 1)] = _NEVER
