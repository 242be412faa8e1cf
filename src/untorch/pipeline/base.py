"""``Pipeline``: a package with its front end, called with one input or a list of them."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch._core import Tensor
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError
from untorch.runtime.program import Program

__all__ = ["Pipeline", "numbered", "read_count", "renumbered"]

_INPUTS = "pipeline: inputs: "
_PLACE = re.compile(r"pipeline: inputs\[(\d+)\]")


class Pipeline:
    """What tasks have in common. Use it as a context manager, or call ``close()``.

    task: the name of the task, as transformers has it. options: what a call may say beside its inputs.
    """

    options: tuple[str, ...] = ()

    def __init__(self, program: Program, settings: Settings, owned: bool) -> None:
        self.program, self.settings, self._owned = program, settings, owned
        self.task: str = settings.get("task", str)
        self.architecture: str = settings.get("architecture", str)

    def __call__(self, inputs: Any, *, batch_size: int = 8, **options: Any) -> Any:
        """The result of one input, a list with those of a list of inputs, or an iterator over those of an iterator.

        An iterator (a generator, ``map``) is read ``batch_size`` inputs at a time, as its results are taken.

        Raises InvalidArgumentError and ArgumentTypeError for inputs and options that the task does not take.
        """
        if unknown := sorted(options.keys() - set(self.options)):
            known = ("batch_size", *self.options)
            near = difflib.get_close_matches(unknown[0], known, n=1)
            raise ArgumentTypeError(
                f"pipeline: unknown option {unknown[0]!r}{f'; did you mean {near[0]!r}?' if near else ':'} {self.task} "
                f"takes {', '.join(known)}"
            )
        read_count("batch_size", batch_size)
        if isinstance(inputs, Iterator) and not hasattr(inputs, "read"):  # an open file is an iterator, too
            return self._stream(inputs, batch_size, options)
        if not isinstance(inputs, list | tuple):
            return self.run([inputs], options, is_list=False)[0]
        results: list[Any] = []
        for begin in range(0, len(inputs), batch_size):
            results += self._run_batch(inputs[begin : begin + batch_size], options, begin)
        return results

    def _stream(self, inputs: Iterator[Any], batch_size: int, options: Mapping[str, Any]) -> Iterator[Any]:
        begin = 0
        while batch := list(itertools.islice(inputs, batch_size)):
            yield from self._run_batch(batch, options, begin)
            begin += len(batch)

    def _run_batch(self, inputs: Sequence[Any], options: Mapping[str, Any], begin: int) -> list[Any]:
        """Of the inputs from ``begin`` on. Errors have the places of inputs among all of them."""
        with renumbered(begin, len(inputs)):
            return self.run(inputs, options, is_list=True)

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """A result for each input of one batch."""
        raise NotImplementedError

    def invoke(self, method: str, arguments: Mapping[str, NDArray[Any]]) -> list[Any]:
        """The method's outputs. A server, which joins calls of several clients, puts its own function here."""
        found = self.program[method](**arguments)
        return [*found] if isinstance(found, list | tuple) else [found]

    def call(self, method: str, arguments: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """The method's one output, float32."""
        return _float32(self.invoke(method, arguments)[0])

    def call_all(self, method: str, arguments: Mapping[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
        """The method's outputs, float32."""
        return [_float32(found) for found in self.invoke(method, arguments)]

    def labels(self, width: int) -> list[str]:
        """The package's labels. Raises InvalidFileError if they are not as many as the model's outputs."""
        labels = self.settings.texts("labels")
        if len(labels) != width:
            raise self.settings.damaged(f"labels: expected {width}, got {len(labels)}")
        return labels

    def close(self) -> None:
        """Closes the package, unless it was opened by the caller."""
        if self._owned:
            self.program.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<untorch pipeline {self.task}: {self.architecture}, {self.program.path}>"


def _float32(found: Any) -> NDArray[np.float32]:
    array = found.numpy() if isinstance(found, Tensor) else np.asarray(found)
    return array.astype(np.float32, copy=False)


@contextlib.contextmanager
def numbered(index: int | None, begins: tuple[str, ...] = ("",)) -> Iterator[None]:
    """Errors of one input of several say which it is.

    Args:
        index: None: it is the only one.
        begins: What texts of errors about the input begin with; others are about options.
    """
    try:
        yield
    except InvalidArgumentError as error:
        if index is None or not str(error).startswith(begins):
            raise
        text = str(error).removeprefix(_INPUTS).removeprefix("pipeline: ")
        raise _with_text(error, f"pipeline: inputs[{index}]: {text}") from error.__cause__


@contextlib.contextmanager
def renumbered(begin: int, count: int) -> Iterator[None]:
    """Errors of a batch of ``count`` inputs, the first of which is at ``begin``, have the places among all of them."""
    try:
        yield
    except InvalidArgumentError as error:
        text = str(error)
        if place := _PLACE.match(text):
            text = f"pipeline: inputs[{int(place[1]) + begin}]{text[place.end() :]}"
        elif text.startswith(_INPUTS) and count == 1:
            text = f"pipeline: inputs[{begin}]: {text.removeprefix(_INPUTS)}"
        else:
            raise
        raise _with_text(error, text) from error.__cause__


def _with_text(error: InvalidArgumentError, text: str) -> InvalidArgumentError:
    return type(error)(text).with_traceback(error.__traceback__)


def read_count(name: str, value: Any) -> int:
    """A positive integer. Raises InvalidArgumentError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(f"pipeline: {name}: expected a positive integer, got {value!r:.80}")
    return value
