"""Class to image: diffusion of a label that the model was trained with."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np

from untorch.pipeline.diffusion import Conditions, Diffusion
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError
from untorch.runtime.program import Program

__all__ = ["ClassToImage"]


class ClassToImage(Diffusion):
    """An image of a label, or of its number, as of all diffusion.

    A label with commas has several names, each of which stands for it: "great white shark, white shark".
    """

    def __init__(self, program: Program, settings: Settings, owned: bool) -> None:
        super().__init__(program, settings, owned)
        self._no_class = settings.get("no_class", int)  # what stands for none, in guidance
        labels = settings.texts("labels")
        if len(labels) > self._no_class:
            raise settings.damaged(f"labels: expected at most {self._no_class}, got {len(labels)}")
        self._ids: dict[str, int] = {}
        for index, label in enumerate(labels):
            for name in (label, *label.split(",")):
                self._ids[name.strip()] = index

    def conditions(self, one: Any, options: Mapping[str, Any], is_guided: bool) -> Conditions:
        """Of a label or a number."""
        found = self._read(one)
        return {"class_labels": np.asarray([self._no_class, found] if is_guided else [found], np.int64)}

    def _read(self, one: Any) -> int:
        if isinstance(one, str) and one.isdecimal():  # from a command line
            one = int(one)
        if isinstance(one, str):
            if one not in self._ids:
                near = difflib.get_close_matches(one, self._ids, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidArgumentError(f"pipeline: inputs: expected a label of the model, got {one!r:.80}{hint}")
            return self._ids[one]
        if isinstance(one, bool) or not isinstance(one, int | np.integer):
            raise ArgumentTypeError(f"pipeline: inputs: expected a label or its number, got {type(one).__name__}")
        if not 0 <= one < self._no_class:
            raise InvalidArgumentError(
                f"pipeline: inputs: expected a label's number from 0 to {self._no_class - 1}, got {one}"
            )
        return int(one)
