"""The logits of a step: on the host, or on a GPU, where tokens can be chosen without them coming here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Choice", "DeviceChoice", "DeviceLogits", "Draws", "HostChoice", "Logits"]


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


class DeviceChoice(Choice):
    """On a GPU. The copy to the host begins now, so steps that are enqueued later do not delay it."""

    def __init__(self, tokens: Any, count: int) -> None:
        self.device, self._count = tokens, count
        tokens.copy_to_host_async()

    def wait(self) -> NDArray[np.int64]:
        """A token for each draw, -1 where there is none."""
        found: NDArray[np.int64] = self.device.numpy()
        return found[: self._count]


class HostChoice(Choice):
    """Tokens that are there."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self.device, self._tokens = None, tokens

    def wait(self) -> NDArray[np.int64]:
        """A token for each draw."""
        return self._tokens


class Logits:
    """On the host: [rows, width]."""

    can_choose = False

    def __init__(self, values: NDArray[np.float32]) -> None:
        self._values = values

    def numpy(self) -> NDArray[np.float32]:
        """All of them."""
        return self._values

    def choose(self, draws: Draws) -> Choice:
        """Starts to choose a token for each draw; only if ``can_choose``."""
        raise NotImplementedError


class DeviceLogits(Logits):
    """On a GPU. They are overwritten by the next step.

    count: those rows count. method: the package's that chooses. padded: the number of tokens that a step for that many
    sequences takes.
    """

    can_choose = True

    def __init__(
        self, values: Any, count: int, method: Any, padded: Callable[[int], int] = lambda count: count
    ) -> None:
        self._tensor, self._count, self._method, self._padded = values, count, method, padded
        self._here: NDArray[np.float32] | None = None

    def numpy(self) -> NDArray[np.float32]:
        """All of them; waits for the step."""
        if self._here is None:
            self._here = self._tensor.numpy()[: self._count]
        return self._here

    def choose(self, draws: Draws) -> Choice:
        """Starts to choose a token for each draw; those of padding are behind them."""
        count = len(draws.rows)
        return DeviceChoice(self._method(self._tensor, *draws.arrays(self._padded(count))), count)


def _padded(array: NDArray[Any], count: int) -> NDArray[Any]:
    longer = np.zeros(count, array.dtype)
    longer[: len(array)] = array
    return longer
