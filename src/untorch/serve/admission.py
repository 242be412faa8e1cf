"""Admission: how many prompts of a model, or inputs of a front end, run and wait, by all protocols together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from untorch.runtime.errors import InvalidArgumentError
from untorch.serve.errors import QueueFullError

__all__ = ["Admission"]


class Admission:
    """Counts prompts by the model's name. Any thread may call it.

    most: Prompts of a model that run and wait together. None: no bound. what: The word for them in errors.
    """

    def __init__(self, most: int | None, what: str = "prompts") -> None:
        self.most, self._what = most, what
        self._lock = threading.Lock()
        self._live: Counter[str] = Counter()

    def enter(self, model: str, count: int) -> Callable[[], None]:
        """Room for that many prompts, until the result is called, once.

        Raises:
            InvalidArgumentError: These are more than may ever be there.
            QueueFullError: There is no room now.
        """
        if self.most is not None and count > self.most:
            raise InvalidArgumentError(
                f"model '{model}': expected at most {self.most} {self._what}, which is the server's limit, got {count}"
            )
        with self._lock:
            if self.most is not None and self._live[model] + count > self.most:
                raise QueueFullError(
                    f"model '{model}': {self._live[model]} of {self.most} {self._what} run and wait already: "
                    "try again later"
                )
            self._live[model] += count

        def leave() -> None:
            with self._lock:
                self._live[model] -= count

        return leave
