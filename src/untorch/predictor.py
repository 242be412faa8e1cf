"""``untorch.Predictor``: a method of a file, for other processes: pickles as its path, loads at its first call."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from untorch.runtime.columns import as_array, input_names, run_columns
from untorch.runtime.errors import ArgumentTypeError, ClosedError
from untorch.runtime.method import Method
from untorch.runtime.process import Lock
from untorch.runtime.program import Program, _load_once, load
from untorch.runtime.source import check_load_options

__all__ = ["Predictor"]


class Predictor:
    """A method of a ``.pt2`` file, for data frames, pools of processes and clusters.

    It is made where the work is planned, and pickled to where it is done. It loads at its first call; all predictors
    of a file with the same options share one program in a process. Any thread may call it.

    - ``predictor(x)``: as the method is called.
    - ``predictor({"x": x, …})``, or a data frame: columns by the names of the inputs; gives a dict of columns by the
      names of the outputs. Lists, Series and Arrow columns become arrays; dtypes are converted by numpy's rule
      "same_kind" (float64 to float32, int32 to int64). More rows than a call takes are computed in several calls.

    Args:
        path: The file. It need not exist yet in this process; a relative path is made absolute.
        method: The method's name. ``"forward"`` is also the only method under another name.
        **load_options: As for ``untorch.load``.

    Raises:
        ArgumentTypeError: An argument has the wrong type, or there is no such option. Also a TypeError.
        InvalidArgumentError: An option has a wrong value. Also a ValueError.

    Calls raise what ``untorch.load`` and the method raise.
    """

    __slots__ = ("__weakref__", "_lock", "_method", "_name", "_options", "_path", "_program")

    def __init__(self, path: str | os.PathLike[str], method: str = "forward", **load_options: Any) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(
                f"Predictor: path: expected a path (str or os.PathLike), got {type(path).__name__}: a predictor is "
                "pickled as the path of its file; write contents into one"
            )
        if not isinstance(method, str):
            raise ArgumentTypeError(f"Predictor: method: expected a method's name as a string, got {method!r}")
        known = load.__kwdefaults__ or {}
        for name in load_options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ArgumentTypeError(
                    f"Predictor: expected options of untorch.load, got {name!r}"
                    + (f": did you mean {near[0]!r}?" if near else f": there are {', '.join(known)}")
                )
        options = {**known, **load_options}
        trust = options["trust"]
        check_load_options(**{name: value for name, value in options.items() if name != "trust"})
        options["trust"] = os.path.abspath(trust) if isinstance(trust, str | os.PathLike) else trust
        options["weights"] = os.path.abspath(options["weights"]) if options["weights"] is not None else None
        self._path = os.path.abspath(os.fsdecode(path))
        self._name = method
        self._options = options
        self._lock = Lock()
        self._program: Program | None = None
        self._method: Method | None = None

    @property
    def path(self) -> str:
        """The file, absolute."""
        return self._path

    @property
    def method(self) -> Method:
        """The method of this process; loads the file if that has not been done."""
        method, program = self._method, self._program
        if method is not None and program is not None and not program._closed:
            return method
        with self._lock:
            if self._method is None or self._program is None or self._program._closed:
                program = _load_once(self._path, self._options)
                self._method = program.forward if self._name == "forward" and len(program) == 1 else program[self._name]
                self._program = program
            return self._method

    @property
    def program(self) -> Program:
        """The program of this process; loads the file if that has not been done."""
        method = self.method
        if (program := self._program) is None:
            raise ClosedError(f"method '{method.name}': the program is closed")
        return program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method on arrays, or on columns."""
        method = self.method
        if len(args) == 1 and not kwargs:
            (given,) = args
            if isinstance(given, Mapping):
                return run_columns(method, given)
            if hasattr(given, "to_numpy") and hasattr(given, "columns"):  # a data frame may have other columns, too
                return run_columns(method, {name: given[name] for name in input_names(method) if name in given.columns})
        if any(hasattr(value, "to_numpy") for value in args):
            specs = method.inputs if len(method.inputs) == len(args) else [None] * len(args)
            names = input_names(method) if len(method.inputs) == len(args) else [str(i) for i in range(len(args))]
            args = tuple(
                as_array(value, method.name, name, spec) if hasattr(value, "to_numpy") else value
                for value, name, spec in zip(args, names, specs, strict=True)
            )
        return method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._path, self._name, self._options)

    def __repr__(self) -> str:
        given = {name: value for name, value in self._options.items() if value != (load.__kwdefaults__ or {})[name]}
        options = "".join(f", {name}={value!r}" for name, value in given.items())
        return f"untorch.Predictor({self._path!r}, {self._name!r}{options})"


def _unpickle(path: str, method: str, options: dict[str, Any]) -> Predictor:
    return Predictor(path, method, **options)
