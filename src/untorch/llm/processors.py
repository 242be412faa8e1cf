"""What changes logits before a token is chosen: penalties, bias, stop tokens that are held back, and grammars.

A sequence's processor knows for each token that it concerns how its logit changes; a batch's changes are arrays, which
the host or a package's method on the GPU applies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from untorch.llm.params import SamplingParams

if TYPE_CHECKING:
    from untorch.llm.structured import Matcher

__all__ = ["Changes", "LogitsProcessor", "apply_changes", "gather_changes"]

_FEWEST = 2  # changes of a batch, as the method on the GPU takes them


@dataclass(frozen=True)
class Changes:
    """Of the logits [rows, width], a row for each token that is chosen.

    at: row * width + token, each once, or again with the same change. A logit above 0 is divided by its ``factor``,
    another one multiplied, and ``shift`` is added. masks: a bit a token, 0 where it may not follow; mask_rows: of each
    row its mask, 0 where all may.
    """

    masks: NDArray[np.int32]
    mask_rows: NDArray[np.int64]
    at: NDArray[np.int64]
    factor: NDArray[np.float32]
    shift: NDArray[np.float32]

    def arrays(self, count: int) -> tuple[NDArray[Any], ...]:
        """All of them, for that many rows: those behind stay as they are."""
        rows = np.zeros(count, np.int64)
        rows[: len(self.mask_rows)] = self.mask_rows
        return self.masks, rows, self.at, self.factor, self.shift


class LogitsProcessor:
    """Of one sequence. prompt: its tokens, which the repetition penalty counts. stop_ids: those that min_tokens holds
    back.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int], stop_ids: Iterable[int]) -> None:
        self._params = params
        bias = params.logit_bias or {}
        seen = frozenset(prompt) if params.has_penalties else frozenset()
        self._held = sorted(set(stop_ids)) if params.min_tokens else []
        ids = sorted({*seen, *bias, *self._held})
        self._places = {token: place for place, token in enumerate(ids)}
        self._ids = np.array(ids, np.int64)
        self._factor = np.array([params.repetition_penalty if token in seen else 1.0 for token in ids], np.float32)
        self._counts = np.zeros(len(ids), np.int64)
        self._bias = np.array([bias.get(token, 0.0) for token in ids], np.float32)
        self._shift = self._bias.copy()
        self._shift[[self._places[token] for token in self._held]] = -np.inf
        self._generated = 0

    @property
    def is_active(self) -> bool:
        """Whether a logit changes."""
        return self._params.has_penalties or self._params.logit_bias is not None or bool(self._held)

    def append(self, token: int) -> None:
        """A token was chosen."""
        self._generated += 1
        if self._params.has_penalties:
            self._count(token)
        if self._held and self._generated >= self._params.min_tokens:
            released, self._held = self._held, []
            for one in released:
                self._set_shift(self._places[one])

    def changes(self) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """The tokens, each once, their factors and their shifts."""
        count = len(self._places)
        return self._ids[:count], self._factor[:count], self._shift[:count]

    def _count(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            for name in ("_ids", "_factor", "_counts", "_bias", "_shift"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros(max(64, len(array)), array.dtype)]))
        self._ids[place] = token
        self._counts[place] += 1
        self._factor[place] = self._params.repetition_penalty
        if token not in self._held:
            self._set_shift(place)

    def _set_shift(self, place: int) -> None:
        count, params = int(self._counts[place]), self._params
        penalty = params.frequency_penalty * count + (params.presence_penalty if count else 0.0)
        self._shift[place] = self._bias[place] - penalty


def gather_changes(
    processors: Sequence[LogitsProcessor | None], matchers: Sequence[Matcher | None], width: int, vocabulary: int
) -> Changes:
    """Of a batch whose logits have that width, of which the first ``vocabulary`` are of tokens."""
    from untorch.llm.structured import compute_masks

    own = [(row, one.changes()) for row, one in enumerate(processors) if one is not None and one.is_active]
    at = np.concatenate([np.zeros(0, np.int64), *(row * width + ids for row, (ids, _, _) in own)])
    factor = np.concatenate([np.zeros(0, np.float32), *(factors for _, (_, factors, _) in own)])
    shift = np.concatenate([np.zeros(0, np.float32), *(shifts for _, (_, _, shifts) in own)])
    if len(at) == 0:
        at, factor, shift = np.zeros(1, np.int64), np.ones(1, np.float32), np.zeros(1, np.float32)
    if len(at) < _FEWEST:
        at, factor, shift = (array.repeat(_FEWEST) for array in (at, factor, shift))
    rows = np.zeros(len(matchers), np.int64)
    constrained = [row for row, matcher in enumerate(matchers) if matcher is not None]
    rows[constrained] = np.arange(1, len(constrained) + 1)
    masks = compute_masks([matcher for matcher in matchers if matcher is not None], vocabulary)
    return Changes(masks, rows, at, factor, shift)


def apply_changes(logits: NDArray[np.floating[Any]], changes: Changes) -> None:
    """To the rows [rows, width], in place, as the package's method does."""
    flat = logits.reshape(-1)
    values = flat[changes.at]
    flat[changes.at] = np.where(values > 0, values / changes.factor, values * changes.factor) + changes.shift
    for row, mask in enumerate(changes.mask_rows.tolist()):
        if mask:
            bits = np.unpackbits(changes.masks[mask].view(np.uint8), bitorder="little")[: logits.shape[1]]
            logits[row, : len(bits)][bits == 0] = -np.inf
