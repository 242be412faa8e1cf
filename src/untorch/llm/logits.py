"""The logits of a step: on the host, or on a GPU, where tokens can be chosen without them coming here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["DeviceLogits", "Draws", "Logits"]


@dataclass(frozen=True)
class Draws:
    """What tokens are chosen by, an element a token. rows: of the logits; top_k 0: all."""

    rows: NDArray[np.int64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float32]


class Logits:
    """On the host: [rows, width]."""

    can_choose = False

    def __init__(self, values: NDArray[np.float32]) -> None:
        self._values = values

    def numpy(self) -> NDArray[np.float32]:
        """All of them."""
        return self._values

    def choose(self, draws: Draws) -> NDArray[np.int64]:
        """A token for each draw, -1 where there is none; only if ``can_choose``."""
        raise NotImplementedError


class DeviceLogits(Logits):
    """On a GPU. They are overwritten by the next step.

    count: those rows count. method: the package's that chooses.
    """

    can_choose = True

    def __init__(self, values: Any, count: int, method: Any) -> None:
        self._tensor, self._count, self._method = values, count, method
        self._here: NDArray[np.float32] | None = None

    def numpy(self) -> NDArray[np.float32]:
        """All of them; waits for the step."""
        if self._here is None:
            self._here = self._tensor.numpy()[: self._count]
        return self._here

    def choose(self, draws: Draws) -> NDArray[np.int64]:
        """A token for each draw, -1 where there is none."""
        tokens = self._method(
            self._tensor, draws.rows, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform
        )  # fmt: skip
        found: NDArray[np.int64] = tokens.numpy()
        return found
