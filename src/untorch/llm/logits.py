"""The logits of a step: on the host, or on a GPU, where tokens can be chosen without them coming here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from untorch.llm.processors import Changes

__all__ = ["Choice", "DeviceChoice", "DeviceLogits", "DeviceMethods", "Draws", "HostChoice", "Logits"]


@dataclass(frozen=True)
class Draws:
    """What tokens are chosen by, an element a token. rows: of the logits; top_k 0: all."""

    rows: NDArray[np.int64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float32]

    def behind(self, uniform: NDArray[np.float32]) -> Draws:
        """Of the step behind, which has a row for each of these tokens."""
        return Draws(np.arange(len(uniform)), self.temperature, self.top_k, self.top_p, self.min_p, uniform)

    def arrays(self, count: int) -> tuple[NDArray[Any], ...]:
        """All of them, with zeros behind them up to that many tokens."""
        arrays = self.rows, self.temperature, self.top_k, self.top_p, self.min_p, self.uniform
        return arrays if count == len(self.rows) else tuple(_padded(array, count) for array in arrays)


class Choice(ABC):
    """Tokens that are being chosen. device: them, for the next step's tokens, before they are here."""

    device: Any

    @abstractmethod
    def wait(self) -> NDArray[np.int64]:
        """A token for each draw, -1 where there is none."""

    def logprobs(self) -> tuple[NDArray[Any], ...]:
        """For each draw the token's logprob and rank, and logprobs and ids of the most likely ones; only if wanted."""
        raise NotImplementedError


class DeviceChoice(Choice):
    """On a GPU. The copy to the host begins now, so steps that are enqueued later do not delay it."""

    def __init__(self, tokens: Any, count: int, logprobs: Sequence[Any] = ()) -> None:
        self.device, self._count, self._logprobs = tokens, count, logprobs
        for array in (tokens, *logprobs):
            array.copy_to_host_async()

    def wait(self) -> NDArray[np.int64]:
        """A token for each draw, -1 where there is none."""
        found: NDArray[np.int64] = self.device.numpy()
        return found[: self._count]

    def logprobs(self) -> tuple[NDArray[Any], ...]:
        """For each draw the token's logprob and rank, and logprobs and ids of the most likely ones; only if wanted."""
        return tuple(array.numpy()[: self._count] for array in self._logprobs)


class HostChoice(Choice):
    """Tokens that are there."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self.device, self._tokens = None, tokens

    def wait(self) -> NDArray[np.int64]:
        """A token for each draw."""
        return self._tokens


class DeviceMethods(NamedTuple):
    """Of a package: they choose tokens on the GPU, change logits before, and compute logprobs of the chosen ones."""

    vocabulary: int
    choose: Any
    process: Any = None
    logprobs: Any = None


class Logits:
    """On the host: [rows, width]. can_choose: tokens can be chosen where they are."""

    can_choose = False

    def __init__(self, values: NDArray[np.float32]) -> None:
        self._values = values

    def numpy(self) -> NDArray[np.float32]:
        """All of them."""
        return self._values

    @property
    def can_process(self) -> bool:
        """Whether ``choose`` takes changes, and computes logprobs."""
        return False

    @property
    def width(self) -> int:
        """Of a row."""
        return int(self._values.shape[1])

    def choose(self, draws: Draws, changes: Changes | None = None, wanted: NDArray[np.int64] | None = None) -> Choice:
        """Starts to choose a token for each draw; only if ``can_choose``.

        With changes of the draws' logits, and how many of the most likely tokens' logprobs each wants, only if
        ``can_process``.
        """
        raise NotImplementedError


class DeviceLogits(Logits):
    """On a GPU. They are overwritten by the next step.

    count: those rows count. padded: the number of tokens that a step for that many sequences takes.
    """

    can_choose = True

    def __init__(
        self, values: Any, count: int, methods: DeviceMethods, padded: Callable[[int], int] = lambda count: count
    ) -> None:
        self._tensor, self._count, self._methods, self._padded = values, count, methods, padded
        self._here: NDArray[np.float32] | None = None

    @property
    def can_process(self) -> bool:
        """Whether the package has the methods for it: those of earlier versions have not."""
        return self._methods.process is not None and self._methods.logprobs is not None

    @property
    def width(self) -> int:
        """Of a row."""
        return int(self._tensor.shape[1])

    def numpy(self) -> NDArray[np.float32]:
        """All of them; waits for the step."""
        if self._here is None:
            self._here = self._tensor.numpy()[: self._count]
        return self._here

    def choose(self, draws: Draws, changes: Changes | None = None, wanted: NDArray[np.int64] | None = None) -> Choice:
        """Starts to choose a token for each draw; those of padding are behind them."""
        methods, count = self._methods, len(draws.rows)
        padded = self._padded(count)
        rows, *arrays = draws.arrays(padded)
        if changes is None:
            tokens = methods.choose(self._tensor, rows, *arrays)
        else:
            processed = methods.process(self._tensor, rows, *changes.arrays(padded))
            tokens = methods.choose(processed, np.arange(padded), *arrays)
        if wanted is None:
            return DeviceChoice(tokens, count)
        return DeviceChoice(tokens, count, methods.logprobs(self._tensor, rows, tokens, _padded(wanted, padded)))


def _padded(array: NDArray[Any], count: int) -> NDArray[Any]:
    longer = np.zeros(count, array.dtype)
    longer[: len(array)] = array
    return longer
