"""Chooses tokens from logits for all rows of a step together: on the host, or on the GPU where the logits are.

Penalties, bias, stop tokens that are held back, and grammar change the logits; then come temperature, min-p, top-k and
top-p. Each token takes one uniform random number from the sequence's own Philox generator, which the inverse of the
cumulative distribution maps to a token id. So a sequence's tokens depend on its logits and its seed alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from untorch.llm.logits import Choice, Draws, HostChoice, Logits
from untorch.llm.params import SamplingParams
from untorch.llm.processors import Changes, LogitsProcessor, apply_changes, gather_changes

if TYPE_CHECKING:
    from untorch.llm.structured import Matcher

__all__ = ["SampledToken", "Sampler", "SamplerState", "TokenLogprobs", "token_logprobs", "uniform_numbers"]

_NO_TOKEN = "the model's logits are not numbers, or no token is allowed"
_BELOW_ONE = 1 - 2**-24  # the largest float32 below 1: rounding would give 1
_BLOCK = 256  # weights that are accumulated together
_SORTED = 2048  # values that are simply sorted
_MOST_TOKENS = (1 << 31) - 1  # of any vocabulary
_NUMBERS = 16  # random ones that are drawn together
_MOST_LOGPROBS = 20  # of a token, that a package's method computes
_THRESHOLDS = (1e-2, 1e-4, 1e-6)  # of the weight of the most likely token

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one position: the token, its logprob, its rank from 1 on, and the most likely tokens by falling logprob."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """token: -1 where ``problem`` says why there is none."""

    token: int
    logprobs: TokenLogprobs | None = None
    problem: str | None = None


@dataclass
class SamplerState:
    """What the choice of a sequence's tokens depends on. stop_ids: those that min_tokens holds back.

    distribution: That tokens are drawn from: temperature (0: greedy), top_k (0: all), top_p, min_p.
    """

    params: SamplingParams
    prompt: frozenset[int] = frozenset()
    stop_ids: tuple[int, ...] = ()
    index: int = 0
    matcher: Matcher | None = None
    generated: int = 0
    entropy: int = -1
    _generator: np.random.Generator | None = None
    _upcoming: list[float] = field(default_factory=list)
    distribution: tuple[float, int, float, float] = field(init=False)
    processor: LogitsProcessor | None = field(init=False)

    def __post_init__(self) -> None:
        if self.entropy < 0:
            given = self.params.seed
            self.entropy = int.from_bytes(os.urandom(8), "little") if given is None else given
        params = self.params
        top_k = min(max(params.top_k, 0), _MOST_TOKENS)
        self.distribution = 0.0 if params.greedy else params.temperature, top_k, params.top_p, params.min_p
        processor = LogitsProcessor(params, self.prompt, self.stop_ids)
        self.processor = processor if processor.is_active else None

    def uniform(self) -> float:
        """The next random number, from 0 up to 1."""
        if not self._upcoming:
            self._draw()
        return self._upcoming.pop(0)

    def upcoming(self, count: int) -> list[float]:
        """The next random numbers, which ``uniform`` gives later."""
        while len(self._upcoming) < count:
            self._draw()
        return self._upcoming[:count]

    def _draw(self) -> None:
        """Several at a time: they are those of as many calls."""
        if self._generator is None:
            self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.entropy, self.index])))
        self._upcoming += self._generator.random(_NUMBERS).tolist()

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the most likely tokens' logprobs; None: not even the chosen one's."""
        if self.params.logprobs is None and self.params.samples > self.params.n:
            return 0
        return self.params.logprobs

    @property
    def changes_logits(self) -> bool:
        """Whether the next token is chosen from other logits than the model's."""
        return self.matcher is not None or (self.processor is not None and self.processor.is_active)

    @property
    def is_plain(self) -> bool:
        """Whether the next token is chosen from the model's logits, and nothing else is wanted of them."""
        return not self.changes_logits and self.wanted_logprobs is None

    def append(self, token: int) -> None:
        """A token was chosen."""
        self.generated += 1
        if self.processor is not None:
            self.processor.append(token)
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

    def sample(
        self, given: Logits, states: Sequence[SamplerState], rows: Sequence[int] | None = None
    ) -> list[SampledToken]:
        """A token for each state, from the row of the logits [rows, width] that ``rows`` names.

        The logits stay as they are.
        """
        places = list(range(len(states))) if rows is None else list(rows)
        if self.chooses_on_device(given, states):
            return self.finish(self.choose(given, states, self.draws(states, places)), states)
        logits = given.numpy()
        width = self.vocabulary
        tokens, usable = np.empty(len(states), np.intp), np.empty(len(states), bool)
        # Most rows are greedy without anything else: those are not copied.
        plain = [i for i, state in enumerate(states) if state.params.greedy and not state.changes_logits]
        if plain:
            own = (
                logits if [places[i] for i in plain] == list(range(len(logits))) else logits[[places[i] for i in plain]]
            )
            own = own[:, :width]
            best = own.argmax(axis=1)
            tokens[plain], usable[plain] = best, np.isfinite(own[np.arange(len(plain)), best])
        others = sorted(set(range(len(states))) - set(plain))
        if others:
            scores = np.array(logits[[places[i] for i in others], :width], dtype=np.float32)
            tokens[others], usable[others] = _choose(scores, [states[i] for i in others])
        found = []
        for i, state in enumerate(states):
            if not usable[i]:
                found.append(_no_token(state))
                continue
            wanted = state.wanted_logprobs
            logprobs = None if wanted is None else token_logprobs(logits[places[i], :width], int(tokens[i]), wanted)
            found.append(SampledToken(int(tokens[i]), logprobs))
        return found

    def chooses_on_device(self, given: Logits, states: Sequence[SamplerState]) -> bool:
        """Whether all tokens can be chosen where the logits are."""
        if not given.can_choose or self.are_plain(states):
            return given.can_choose
        return given.can_process and all((state.wanted_logprobs or 0) <= _MOST_LOGPROBS for state in states)

    def are_plain(self, states: Sequence[SamplerState]) -> bool:
        """Whether all tokens are chosen from the model's logits, and nothing else is wanted of them."""
        return all(state.is_plain for state in states)

    def choose(self, given: Logits, states: Sequence[SamplerState | None], draws: Draws) -> Choice:
        """Starts to choose on the device a token for each draw, from logits that its state changes.

        None: it has ended, and any token will do.
        """
        live = [state for state in states if state is not None]
        changes = (
            _changes(states, given.width, self.vocabulary) if any(state.changes_logits for state in live) else None
        )
        wanted = None
        if any(state.wanted_logprobs is not None for state in live):
            wanted = np.array([0 if state is None else state.wanted_logprobs or 0 for state in states], np.int64)
            wanted = np.minimum(wanted, self.vocabulary)
        return given.choose(draws, changes, wanted)

    def draws(self, states: Sequence[SamplerState], rows: Sequence[int]) -> Draws:
        """Of a step in which they choose on the device."""
        return _draws(states, rows, _uniform(states))

    def draws_ahead(self, states: Sequence[SamplerState], rows: Sequence[int], counts: Sequence[int]) -> Draws:
        """Of a step with drafts: ``counts`` tokens for each state, from its row on.

        How many of them it takes is not known yet, so its random numbers stay: ``SamplerState.uniform`` gives them.
        """
        uniform = [
            number
            for state, count in zip(states, counts, strict=True)
            for number in ([0.0] * count if state.params.greedy else state.upcoming(count))
        ]
        each = [(state, row + i) for state, row, n in zip(states, rows, counts, strict=True) for i in range(n)]
        return _draws(
            [state for state, _ in each], [row for _, row in each],
            np.minimum(np.array(uniform), _BELOW_ONE).astype(np.float32),
        )  # fmt: skip

    def draft(self, given: Logits, states: Sequence[SamplerState], place: int) -> Choice:
        """A proposal for each state and row, by a draft model's logits: of the token ``place`` behind the next one.

        By temperature, min-p, top-k and top-p alone, with the random number of that token.
        """
        uniform = [0.0 if state.params.greedy else state.upcoming(place + 1)[place] for state in states]
        if given.can_choose:
            numbers = np.minimum(np.array(uniform), _BELOW_ONE).astype(np.float32)
            return given.choose(_draws(states, range(len(states)), numbers))
        scores = np.array(given.numpy()[:, : self.vocabulary], dtype=np.float32)
        tokens = scores.argmax(axis=1)
        usable = np.isfinite(scores[np.arange(len(scores)), tokens])
        random = [i for i, state in enumerate(states) if usable[i] and not state.params.greedy]
        if random:
            tokens[random] = _draw(scores[random], [states[i] for i in random], [uniform[i] for i in random])
        return HostChoice(tokens)

    def take_numbers(self, states: Sequence[SamplerState]) -> None:
        """Each takes a token of ``draws_ahead``, and the random number that chose it."""
        _uniform(states)

    def finish(self, choice: Choice, states: Sequence[SamplerState]) -> list[SampledToken]:
        """Waits for the tokens, and for the logprobs that are wanted."""
        return self.taken(choice.wait(), choice, states)

    def taken(
        self, tokens: NDArray[np.int64], choice: Choice, states: Sequence[SamplerState]
    ) -> list[SampledToken]:  # fmt: skip
        """The choice's tokens, with the logprobs that are wanted."""
        found = []
        logprobs = choice.logprobs() if any(state.wanted_logprobs is not None for state in states) else None
        for row, (token, state) in enumerate(zip(tokens.tolist(), states, strict=True)):
            wanted = state.wanted_logprobs
            if not 0 <= token < self.vocabulary:
                found.append(_no_token(state))
            elif wanted is None or logprobs is None:
                found.append(SampledToken(token))
            else:
                most = min(wanted, self.vocabulary)
                found.append(SampledToken(token, _row_logprobs(token, most, *(array[row] for array in logprobs))))
        return found

    def chosen(self, token: int) -> SampledToken:
        """Of a token that the device chose, for a state that is plain."""
        return SampledToken(token) if 0 <= token < self.vocabulary else SampledToken(-1, problem=_NO_TOKEN)


def _no_token(state: SamplerState) -> SampledToken:
    failed = None if state.matcher is None else state.matcher.problem
    return SampledToken(-1, problem=failed or _NO_TOKEN)


def _row_logprobs(token: int, wanted: int, logprob: Any, rank: Any, top: Any, top_ids: Any) -> TokenLogprobs:
    """Of what the device computed."""
    best = zip(top_ids[:wanted].tolist(), top[:wanted].tolist(), strict=True)
    return TokenLogprobs(token, float(logprob), int(rank), tuple(best))


def uniform_numbers(states: Sequence[SamplerState]) -> NDArray[np.float32]:
    """The next random number of each, from 0 to below 1."""
    return np.minimum([state.uniform() for state in states], _BELOW_ONE).astype(np.float32)


def _draws(states: Sequence[SamplerState], rows: Sequence[int], uniform: NDArray[np.float32]) -> Draws:
    temperature, top_k, top_p, min_p = np.array([state.distribution for state in states]).T
    return Draws(
        np.array(rows, np.int64), temperature.astype(np.float32), top_k.astype(np.int64), top_p.astype(np.float32),
        min_p.astype(np.float32), uniform,
    )  # fmt: skip


def _uniform(states: Sequence[SamplerState]) -> NDArray[np.float32]:
    return np.array([0.0 if s.params.greedy else min(s.uniform(), _BELOW_ONE) for s in states], np.float32)


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


def _changes(states: Sequence[SamplerState | None], width: int, vocabulary: int) -> Changes:
    """Of the logits' rows, one a state; None: it has ended."""
    processors = [None if state is None else state.processor for state in states]
    matchers = [None if state is None else state.matcher for state in states]
    return gather_changes(processors, matchers, width, vocabulary)


def _choose(scores: Floats, states: Sequence[SamplerState]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """The tokens, and whether there are any. Changes the scores."""
    if any(state.changes_logits for state in states):
        apply_changes(scores, _changes(states, scores.shape[1], scores.shape[1]))
    tokens = scores.argmax(axis=1)
    usable = np.isfinite(scores[np.arange(len(scores)), tokens])  # the largest; not a number if any is none
    random = [i for i, state in enumerate(states) if usable[i] and not state.params.greedy]
    if random:
        own = [states[i] for i in random]
        tokens[random] = _draw(scores[random], own, [state.uniform() for state in own])
    return tokens, usable


def _draw(scores: Floats, states: Sequence[SamplerState], numbers: Sequence[float]) -> NDArray[np.intp]:
    params, uniform = [state.params for state in states], np.array(numbers)
    temperature = np.array([p.temperature for p in params], np.float32)
    weights = scores / temperature[:, None]
    weights -= weights.max(axis=1, keepdims=True)
    np.exp(weights, out=weights)  # the most likely token has 1
    least = np.array([p.min_p for p in params], np.float32)
    if least.any():
        weights[weights < least[:, None]] = 0.0
    width = scores.shape[1]
    tokens = np.empty(len(params), np.intp)
    free = [i for i, p in enumerate(params) if p.top_p == 1.0 and not 0 < p.top_k < width]
    if free:
        tokens[free] = _inverse(weights if len(free) == len(params) else weights[free], uniform[free])
    for i, p in enumerate(params):
        if p.top_p < 1.0 or 0 < p.top_k < width:
            ids, kept = _nucleus(weights[i], p.top_k if p.top_k > 0 else width, p.top_p)
            tokens[i] = ids[_inverse(kept[None], uniform[i : i + 1])[0]]
    return tokens


def _nucleus(weights: Floats, top_k: int, top_p: float) -> tuple[NDArray[np.intp], Floats]:
    """Of one row the token ids that stay, ascending, and their weights."""
    width = len(weights)
    total = float(weights.sum(dtype=np.float64))
    # Most tokens are far below the most likely one: those are looked at only if they are needed.
    ids, found = np.arange(width), weights
    for threshold in _THRESHOLDS:
        mask = weights >= threshold
        enough = np.count_nonzero(mask) >= top_k
        if enough or (top_k >= width and weights[mask].sum(dtype=np.float64) >= top_p * total):
            ids = np.flatnonzero(mask)
            found = weights[ids]
            break
    if top_k < width:
        kept = _largest(found, top_k, None)
        ids, found = ids[kept], found[kept]
        total = float(found.sum(dtype=np.float64))
    if top_p < 1.0:
        kept = _largest(found, None, top_p * total)
        ids, found = ids[kept], found[kept]
    return ids, found


def _largest(values: Floats, count: int | None, mass: float | None) -> NDArray[np.intp]:
    """Indices, ascending: of the ``count`` largest values, or of the fewest whose sum is ``mass`` or more.

    Of equal values the first ones stay. Many values are counted by their leading bits, and only those are sorted among
    which the border lies.
    """
    above, members = np.zeros(len(values), bool), np.arange(len(values))
    counted, summed = 0, 0.0
    if len(values) > _SORTED:
        # The bits of positive floats are ordered as the floats are.
        keys = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
        counts = np.bincount(keys)[::-1].cumsum()
        sums = np.bincount(keys, weights=values)[::-1].cumsum()
        reached = counts >= count if count is not None else sums >= mass
        at = int(reached.argmax()) if reached.any() else len(counts) - 1
        border = len(counts) - 1 - at
        above, members = keys > border, np.flatnonzero(keys == border)
        if at:
            counted, summed = int(counts[at - 1]), float(sums[at - 1])
    order = members[np.argsort(-values[members], kind="stable")]
    if count is not None:
        stay = count - counted
    else:
        assert mass is not None
        # The value that takes the sum to ``mass`` is the last one that stays.
        stay = int(np.searchsorted(summed + values[order].cumsum(dtype=np.float64), mass)) + 1
    above[order[:stay]] = True
    return np.flatnonzero(above)


def _inverse(weights: Floats, uniform: Floats) -> NDArray[np.intp]:
    """For each row the first index whose cumulative weight is above the part ``uniform`` of the whole.

    By sums of blocks first, so that only one block's weights are accumulated.
    """
    rows, width = weights.shape
    if width % _BLOCK:
        weights = np.pad(weights, ((0, 0), (0, -width % _BLOCK)))
    blocks = weights.reshape(rows, -1, _BLOCK)
    ends = blocks.sum(axis=2, dtype=np.float64).cumsum(axis=1)
    # Below the whole, so there is one; its weight is not 0, as the sum grows there.
    target = np.minimum(uniform * ends[:, -1], np.nextafter(ends[:, -1], 0.0))
    block = (ends > target[:, None]).argmax(axis=1)
    every = np.arange(rows)
    before = np.where(block > 0, ends[every, block - 1], 0.0)
    inside = blocks[every, block].astype(np.float64)
    running = before[:, None] + inside.cumsum(axis=1)
    # Rounding may put the block's end a little lower than its sum: then it is the last one with a weight.
    above = (running > target[:, None]) & (inside > 0)
    last = _BLOCK - 1 - (inside[:, ::-1] > 0).argmax(axis=1)
    found: NDArray[np.intp] = block * _BLOCK + np.where(above.any(axis=1), above.argmax(axis=1), last)
    return found
