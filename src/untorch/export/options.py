"""Every export option, once: one frozen dataclass with types that are checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from untorch.export.errors import OptionError

__all__ = [
    "PASS_NAMES", "Attention", "Cpu", "ExportOptions", "Matmul", "OptimisationLevel", "QuantizeOptions",
    "resolve_options",
]  # fmt: skip

# In the order in which they run. What computes constants comes first, so that the others see them; dead code goes
# before the last, which fuses a node into the only one that reads it.
PASS_NAMES = (
    "drop_inference_dropout", "cond_predicates_to_host", "restore_views", "fold_constants", "exact_floor_division",
    "conv1d_as_conv2d", "choose_attention", "repack_int4", "drop_dead_code", "pack_linears",
)  # fmt: skip

Attention = Literal["auto", "triton", "native", "math"]
Matmul = Literal["library", "auto"]
Cpu = Literal["native", "x86-64-v2", "x86-64-v3", "x86-64-v4"]
OptimisationLevel = Literal["O0", "O1", "O2", "O3"]


# What says nothing about the file.
_OF_THE_MACHINE = ("progress", "tuning", "record_tuning")
# The group sizes, the methods and the ways to multiply many rows (prefill) of each dtype.
_QUANTIZE_OPTIONS = {
    "int4": (Literal[32, 64, 128, 256], Literal["hqq", "rtn"], Literal["exact"]),
    "nvfp4": (Literal[16], Literal["search", "rtn"], Literal["exact", "fp8", "fp4"]),
}
_QUANTIZE_DEFAULTS = {
    "int4": {"group_size": 128, "method": "hqq"},
    "nvfp4": {"group_size": 16, "method": "search"},
}


@dataclass(frozen=True)
class QuantizeOptions:
    """How the linear layers of a method are quantised: the arguments of ``untorch.quant.quantize``.

    None for group_size and method becomes the dtype's default.
    """

    dtype: Literal["int4", "nvfp4"]
    group_size: int | None = None
    method: str | None = None
    include: Any = None
    exclude: Any = None
    prefill: str = "exact"

    def __post_init__(self) -> None:
        _check("quantize: dtype", self.dtype, typing.get_type_hints(type(self))["dtype"])
        if self.dtype == "nvfp4" and self.group_size not in (None, 16):
            raise OptionError(
                f"option quantize: group_size: nvfp4 has blocks of 16, which cannot be chosen: leave it out, got "
                f"{self.group_size!r}"
            )
        if self.dtype == "int4" and self.prefill != "exact":
            raise OptionError(
                f"option quantize: prefill: int4 has 'exact' alone, which need not be given; nvfp4 has others; got "
                f"{self.prefill!r}"
            )
        sizes, methods, prefills = _QUANTIZE_OPTIONS[self.dtype]
        for name, kind in (("group_size", sizes), ("method", methods)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, _QUANTIZE_DEFAULTS[self.dtype][name])
            _check(f"quantize: {name}", getattr(self, name), kind)
        _check("quantize: prefill", self.prefill, prefills)


@dataclass(frozen=True)
class ExportOptions:
    """How a model is exported.

    cpu: the oldest CPU that the file has to run on. "native" uses everything that the build machine has; "x86-64-v4"
        needs AVX-512, "x86-64-v3" AVX2 and FMA; "x86-64-v2" generates scalar code and is slow.
    pack_linears: pack the weights of linear layers for the matrix kernels (float32 only).
    attention: what computes scaled dot-product attention. "triton": kernels that are compiled into the file (CUDA only;
        an error where they cannot serve a call); "native": PyTorch's fused operators, as the runtime has them; "math":
        matrix products and a softmax; "auto": "triton" on CUDA where it can, else "native".
    matmul: what multiplies matrices on CUDA. "library": the runtime's operators (cuBLAS, and kernels of its own for few
        rows); "auto": those or Triton templates that are compiled into the file, whichever is the fastest: timed on the
        GPU, by ``tuning``, or estimated for a GPU that is not there.
    quantize: what becomes of linear layers: "int4", "nvfp4", or a dictionary of options ({"dtype": "int4",
        "group_size": 64, "method": "rtn", "include": …, "exclude": …}, see ``untorch.quant.quantize``), or a dictionary
        of methods with either of these ({"decoder": "int4"}). A copy is quantised; the module stays as it is. Methods
        without a linear layer are left as they are, unless they are named.
    passes: which passes run, by name (see PASS_NAMES): {"fold_constants": False} leaves that one out.
    fold_limit: the largest result, in bytes, that fold_constants stores, and how much larger it may make a method.
    verify: run the written file in a process without torch and compare its results to eager's.
    verify_tolerance: the largest difference that verify accepts, relative to the largest value of each output.
    strict: use torch.export's strict mode.
    keep_sources: pack the generated C++ as well, and for a GPU the kernels' sources, which `untorch tune FILE` times.
    tuning: for a GPU that is not there: a file of `untorch tune` with the fastest configurations of kernels on such a
        GPU. Kernels that it does not have are estimated.
    record_tuning: the file to write the configurations to that this export takes, beside those that it has already.
    wrapper_optimisation: optimisation level of the code that calls the kernels; the kernels have their own.
    inductor: raw Inductor configuration, applied last: a way out, with no promise.
    progress: show the running step when stderr is a terminal.

    The number of threads is not an option: the machine that runs the file decides.
    """

    cpu: Cpu = "native"
    pack_linears: bool = True
    attention: Attention = "auto"
    matmul: Matmul = "library"
    quantize: str | Mapping[str, Any] | None = None
    passes: Mapping[str, bool] = field(default_factory=dict)
    fold_limit: int = 16 << 20
    verify: bool = False
    verify_tolerance: float = 1e-3
    strict: bool = False
    keep_sources: bool = False
    tuning: str | os.PathLike[str] | None = None
    record_tuning: str | os.PathLike[str] | None = None
    wrapper_optimisation: OptimisationLevel = "O1"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    progress: bool = True

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for option in dataclasses.fields(self):
            _check(option.name, getattr(self, option.name), hints[option.name])
        _check_passes(self.passes)
        self._quantize()
        if self.fold_limit < 0:
            raise OptionError(f"option fold_limit: expected a number of bytes, 0 or more, got {self.fold_limit!r}")
        if not self.verify_tolerance > 0:
            raise OptionError(f"option verify_tolerance: expected a number above 0, got {self.verify_tolerance!r}")

    @property
    def quantizes_by_name(self) -> bool:
        """Whether ``quantize`` names the methods; else it is for all of them."""
        return isinstance(self.quantize, Mapping) and "dtype" not in self.quantize

    def quantize_methods(self, names: Sequence[str]) -> dict[str, QuantizeOptions]:
        """Which of the methods are quantised, and how. Raises OptionError for a method that is not there."""
        found = self._quantize()
        if isinstance(found, QuantizeOptions):
            return dict.fromkeys(names, found)
        for name in found:
            if name not in names:
                raise OptionError(f"option quantize: there is no method {name!r}: {_hint(name, names)}")
        return {name: options for name, options in found.items() if options is not None}

    def _quantize(self) -> QuantizeOptions | dict[str, QuantizeOptions | None]:
        """One for all methods, or one for each that is named."""
        if self.quantize is None:
            return {}
        if isinstance(self.quantize, str) or "dtype" in self.quantize:
            return _quantize_options(self.quantize)
        found: dict[str, QuantizeOptions | None] = {}
        for name, value in self.quantize.items():
            if not isinstance(value, str | Mapping | None):
                raise OptionError(
                    f"option quantize: {name}: expected 'int4', 'nvfp4', a dictionary of options or None for the "
                    f"method, got {type(value).__name__} ({value!r}); a dictionary of options has the key 'dtype'"
                )
            found[name] = None if value is None else _quantize_options(value)
        return found

    def to_json(self) -> dict[str, Any]:
        """The options as the manifest records them; values that JSON does not have become their repr."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _OF_THE_MACHINE}
        values["passes"] = dict(self.passes)
        values["inductor"] = {
            key: value if isinstance(value, bool | int | float | str | None) else repr(value)
            for key, value in self.inductor.items()
        }
        values["quantize"] = _plain(self.quantize)
        return values


def resolve_options(options: ExportOptions | None, fields: Mapping[str, Any]) -> ExportOptions:
    """``options`` (or the defaults) with ``fields`` replaced. An unknown field names the nearest known one."""
    if options is not None and not isinstance(options, ExportOptions):
        raise OptionError(f"options: expected ExportOptions, got {type(options).__name__}")
    known = [f.name for f in dataclasses.fields(ExportOptions)]
    for name in fields:
        if name not in known:
            raise OptionError(f"unknown option {name!r}: {_hint(name, known)}")
    return dataclasses.replace(options or ExportOptions(), **fields)


def _quantize_options(value: str | Mapping[str, Any]) -> QuantizeOptions:
    if isinstance(value, str):
        value = {"dtype": value}
    known = [f.name for f in dataclasses.fields(QuantizeOptions)]
    for name in value:
        if name not in known:
            raise OptionError(f"option quantize: unknown option {name!r}: {_hint(name, known)}")
    if "dtype" not in value:
        raise OptionError("option quantize: a dictionary of options needs 'dtype', such as {'dtype': 'int4'}")
    return QuantizeOptions(**value)


def _plain(value: Any) -> Any:
    """As JSON has it; what it does not have, such as a function, becomes its repr."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def _check_passes(passes: Mapping[str, bool]) -> None:
    for name, value in passes.items():
        if name not in PASS_NAMES:
            raise OptionError(f"option passes: unknown pass {name!r}: {_hint(name, PASS_NAMES)}")
        if not isinstance(value, bool):
            raise OptionError(f"option passes: {name}: expected bool, got {type(value).__name__} ({value!r})")


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
        accepted: tuple[type, ...] = tuple(get_origin(part) or part for part in get_args(kind))
    elif origin is not None:
        accepted = (origin,)
    else:
        accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        expected = " or ".join(t.__name__ for t in accepted)
        raise OptionError(f"option {name}: expected {expected}, got {type(value).__name__} ({value!r})")
    if isinstance(value, Mapping) and any(not isinstance(key, str) for key in value):
        raise OptionError(f"option {name}: expected names as keys, got {list(value)!r}")
