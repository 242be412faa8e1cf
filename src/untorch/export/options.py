"""Every export option, once: one frozen dataclass with types that are checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from untorch.export.errors import OptionError

__all__ = ["Cpu", "ExportOptions", "OptimisationLevel", "resolve_options"]

Cpu = Literal["native", "x86-64-v2", "x86-64-v3", "x86-64-v4"]
OptimisationLevel = Literal["O0", "O1", "O2", "O3"]


@dataclass(frozen=True)
class ExportOptions:
    """How a model is exported.

    cpu: the oldest CPU that the file has to run on. "native" uses everything that the build machine has; "x86-64-v4"
        needs AVX-512, "x86-64-v3" AVX2 and FMA; "x86-64-v2" generates scalar code and is slow.
    pack_linears: pack the weights of linear layers for the matrix kernels (float32 only).
    verify: run the written file in a process without torch and compare its results to eager's.
    verify_tolerance: the largest difference that verify accepts, relative to the largest value of each output.
    strict: use torch.export's strict mode.
    keep_sources: pack the generated C++ as well.
    wrapper_optimisation: optimisation level of the code that calls the kernels; the kernels have their own.
    inductor: raw Inductor configuration, applied last: a way out, with no promise.
    progress: show the running step when stderr is a terminal.

    The number of threads is not an option: the machine that runs the file decides.
    """

    cpu: Cpu = "native"
    pack_linears: bool = True
    verify: bool = False
    verify_tolerance: float = 1e-3
    strict: bool = False
    keep_sources: bool = False
    wrapper_optimisation: OptimisationLevel = "O1"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    progress: bool = True

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for option in dataclasses.fields(self):
            _check(option.name, getattr(self, option.name), hints[option.name])
        if not self.verify_tolerance > 0:
            raise OptionError(f"option verify_tolerance: expected a number above 0, got {self.verify_tolerance!r}")

    def to_json(self) -> dict[str, Any]:
        """The options as the manifest records them; values that JSON does not have become their repr."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "progress"}
        values["inductor"] = {
            key: value if isinstance(value, bool | int | float | str | None) else repr(value)
            for key, value in self.inductor.items()
        }
        return values


def resolve_options(options: ExportOptions | None, fields: Mapping[str, Any]) -> ExportOptions:
    """``options`` (or the defaults) with ``fields`` replaced. An unknown field names the nearest known one."""
    if options is not None and not isinstance(options, ExportOptions):
        raise OptionError(f"options: expected ExportOptions, got {type(options).__name__}")
    known = [f.name for f in dataclasses.fields(ExportOptions)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise OptionError(f"unknown option {name!r}: {hint}")
    return dataclasses.replace(options or ExportOptions(), **fields)


def _check(name: str, value: Any, kind: Any) -> None:
    origin = get_origin(kind)
    if origin is Literal:
        if value not in get_args(kind):
            expected = ", ".join(repr(v) for v in get_args(kind))
            near = difflib.get_close_matches(str(value), [str(v) for v in get_args(kind)], n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise OptionError(f"option {name}: expected one of {expected}, got {value!r}{hint}")
        return
    if isinstance(kind, types.UnionType):
        accepted: tuple[type, ...] = get_args(kind)
    elif origin is not None:
        accepted = (origin,)
    else:
        accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        expected = " or ".join(t.__name__ for t in accepted)
        raise OptionError(f"option {name}: expected {expected}, got {type(value).__name__} ({value!r})")
    if isinstance(value, Mapping) and any(not isinstance(key, str) for key in value):
        raise OptionError(f"option {name}: expected names as keys, got {list(value)!r}")
