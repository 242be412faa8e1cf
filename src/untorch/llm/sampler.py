"""Chooses tokens from logits, on the host, for all rows of a step together.

Penalties, bias, tokens that may not come yet, grammar; then temperature, min-p, top-k, top-p, and one uniform random
number a token from the sequence's own Philox generator, which the inverse of the cumulative distribution takes to a
token. So a sequence's tokens depend on its logits and its seed alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from untorch.llm.params import SamplingParams

if TYPE_CHECKING:
    from untorch.llm.structured import Matcher

__all__ = ["SampledToken", "Sampler", "SamplerState", "TokenLogprobs", "token_logprobs"]

_CANDIDATES = 512  # the most likely tokens that top-p looks at first

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one position: the token, its logprob, its rank from 1 on, and the most likely tokens by falling logprob."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SampledToken:
    """token: -1 where ``problem`` says why there is none."""

    token: int
    logprobs: TokenLogprobs | None = None
    problem: str | None = None


@dataclass
class SamplerState:
    """What the choice of a sequence's tokens depends on. stop_ids: those that min_tokens holds back."""

    params: SamplingParams
    prompt: frozenset[int] = frozenset()
    stop_ids: tuple[int, ...] = ()
    index: int = 0
    matcher: Matcher | None = None
    counts: dict[int, int] = field(default_factory=dict)
    generated: int = 0
    entropy: int = -1
    _generator: np.random.Generator | None = None

    def __post_init__(self) -> None:
        if self.entropy < 0:
            given = self.params.seed
            self.entropy = int.from_bytes(os.urandom(8), "little") if given is None else given

    def uniform(self) -> float:
        """The next random number, from 0 up to 1."""
        if self._generator is None:
            self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.entropy, self.index])))
        return float(self._generator.random())

    def append(self, token: int) -> None:
        """A token was chosen."""
        self.generated += 1
        if self.params.has_penalties:
            self.counts[token] = self.counts.get(token, 0) + 1
        if self.matcher is not None:
            self.matcher.append(token)

    def fork(self, index: int) -> SamplerState:
        """For another sample of the same prompt; nothing is generated yet."""
        matcher = None if self.matcher is None else self.matcher.copy()
        return SamplerState(self.params, self.prompt, self.stop_ids, index, matcher, entropy=self.entropy)


class Sampler:
    """vocabulary: token ids below it may be chosen; the logits may be wider."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def sample(self, logits: Floats, states: Sequence[SamplerState]) -> list[SampledToken]:
        """One token for each row of the logits [rows, width], which stay as they are."""
        width = self.vocabulary
        scores = np.array(logits[:, :width], dtype=np.float32)
        _penalise(scores, states)
        _bias(scores, states)
        _hold_back_stops(scores, states)
        _mask(scores, states)
        with np.errstate(invalid="ignore"):
            usable = np.isfinite(scores.max(axis=1)) if len(scores) else np.zeros(0, bool)
        tokens = scores.argmax(axis=1)
        random = [i for i, state in enumerate(states) if usable[i] and not state.params.greedy]
        if random:
            tokens[random] = _draw(scores[random], [states[i] for i in random])
        found = []
        for i, state in enumerate(states):
            if not usable[i]:
                found.append(SampledToken(-1, problem="the model's logits are not numbers, or no token is allowed"))
                continue
            wanted = state.params.logprobs
            if wanted is None and state.params.samples > state.params.n:
                wanted = 0
            logprobs = None if wanted is None else token_logprobs(logits[i, :width], int(tokens[i]), wanted)
            found.append(SampledToken(int(tokens[i]), logprobs))
        return found


def token_logprobs(logits: Floats, token: int, count: int) -> TokenLogprobs:
    """Of one row of the model's own logits."""
    row = logits.astype(np.float64)
    highest = row.max()
    logprobs = row - highest - np.log(np.exp(row - highest).sum())
    own = float(logprobs[token])
    count = min(count, len(row))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        best = np.argpartition(-logprobs, count - 1)[:count]
        best = best[np.lexsort((best, -logprobs[best]))]
        top = tuple((int(i), float(logprobs[i])) for i in best)
    return TokenLogprobs(token, own, int((logprobs > own).sum()) + 1, top)


def _penalise(scores: Floats, states: Sequence[SamplerState]) -> None:
    rows = [(i, state) for i, state in enumerate(states) if state.params.has_penalties]
    if not rows:
        return
    seen_rows, seen = _flat([(i, state.prompt | state.counts.keys()) for i, state in rows])
    factor = np.ones(len(states), np.float32)
    factor[[i for i, _ in rows]] = [state.params.repetition_penalty for _, state in rows]
    values, factors = scores[seen_rows, seen], factor[seen_rows]
    scores[seen_rows, seen] = np.where(values > 0, values / factors, values * factors)
    out_rows, out = _flat([(i, state.counts) for i, state in rows])
    counts = np.array([count for _, state in rows for count in state.counts.values()], np.float32)
    frequency, presence = np.zeros(len(states), np.float32), np.zeros(len(states), np.float32)
    for i, state in rows:
        frequency[i], presence[i] = state.params.frequency_penalty, state.params.presence_penalty
    scores[out_rows, out] -= frequency[out_rows] * counts + presence[out_rows]


def _bias(scores: Floats, states: Sequence[SamplerState]) -> None:
    rows = [(i, state.params.logit_bias) for i, state in enumerate(states) if state.params.logit_bias]
    if rows:
        at, ids = _flat([(i, bias) for i, bias in rows])
        scores[at, ids] += np.array([value for _, bias in rows for value in bias.values()], np.float32)


def _hold_back_stops(scores: Floats, states: Sequence[SamplerState]) -> None:
    early = [(i, state.stop_ids) for i, state in enumerate(states) if state.generated < state.params.min_tokens]
    if early:
        scores[_flat(early)] = -np.inf


def _mask(scores: Floats, states: Sequence[SamplerState]) -> None:
    for i, state in enumerate(states):
        if state.matcher is not None:
            scores[i, ~state.matcher.allowed(scores.shape[1])] = -np.inf


def _flat(rows: Sequence[tuple[int, Any]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices (row, id) of all ids of all rows."""
    at = np.repeat([i for i, _ in rows], [len(ids) for _, ids in rows]).astype(np.intp)
    return at, np.array([token for _, ids in rows for token in ids], np.intp)


def _draw(scores: Floats, states: Sequence[SamplerState]) -> NDArray[np.intp]:
    params = [state.params for state in states]
    uniform = np.array([state.uniform() for state in states])
    temperature = np.array([p.temperature for p in params])
    weights = scores.astype(np.float64) / temperature[:, None]
    weights = np.exp(weights - weights.max(axis=1, keepdims=True))  # the most likely token has 1
    least = np.array([p.min_p for p in params])
    if least.any():
        weights[weights < least[:, None]] = 0.0
    width = scores.shape[1]
    top_k = np.array([p.top_k if 0 < p.top_k < width else width for p in params])
    top_p = np.array([p.top_p for p in params])
    tokens = np.empty(len(params), np.intp)
    limited = (top_k < width) | (top_p < 1.0)
    if (free := np.flatnonzero(~limited)).size:
        tokens[free] = _inverse(weights[free], uniform[free])
    if (rows := np.flatnonzero(limited)).size:
        ids, kept = _nucleus(weights[rows], top_k[rows], top_p[rows])
        chosen = _inverse(kept, uniform[rows])
        tokens[rows] = np.take_along_axis(ids, chosen[:, None], 1)[:, 0]
    return tokens


def _nucleus(weights: Floats, top_k: NDArray[np.intp], top_p: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Token ids by falling weight, and their weights, 0 for those that are left out."""
    width = weights.shape[1]
    sums = weights.sum(axis=1)
    bounded = top_k < width
    count = min(width, max(_CANDIDATES, int(top_k[bounded].max()) if bounded.any() else 0))
    while True:
        if count < width:
            ids = np.argpartition(-weights, count - 1, axis=1)[:, :count]
            ids.sort(axis=1)  # of equal weights the lower id comes first
        else:
            ids = np.broadcast_to(np.arange(width), weights.shape)
        found = np.take_along_axis(weights, ids, 1)
        order = np.argsort(-found, axis=1, kind="stable")
        ids, found = np.take_along_axis(ids, order, 1), np.take_along_axis(found, order, 1)
        found = np.where(np.arange(count) < top_k[:, None], found, 0.0)
        running = found.cumsum(axis=1)
        total = np.where(bounded, running[:, -1], sums)
        needed = top_p * total
        # A row without top-k may need more tokens than the most likely ones.
        if count == width or bool((bounded | (running[:, -1] >= needed)).all()):
            break
        count = min(width, count * 8)
    before = running - found
    return ids, np.where((before < needed[:, None]) | (np.arange(count) == 0), found, 0.0)


def _inverse(weights: Floats, uniform: Floats) -> NDArray[np.intp]:
    """For each row the first index whose cumulative weight is above the part ``uniform`` of the whole."""
    running = weights.cumsum(axis=1)
    # Below the whole, so there is one; its weight is not 0, as the sum grows there.
    target = np.minimum(uniform * running[:, -1], np.nextafter(running[:, -1], 0.0))
    found: NDArray[np.intp] = (running > target[:, None]).argmax(axis=1)
    return found
