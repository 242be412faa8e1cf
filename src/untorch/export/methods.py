"""What ``export`` is asked to compile: its arguments, read and planned as methods."""

from __future__ import annotations

import keyword
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from untorch.export.errors import OptionError
from untorch.export.host_cpu import resolve_host_cpus
from untorch.export.method import Method
from untorch.export.options import ExportOptions, resolve_options
from untorch.export.target import resolve_targets
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.names import reserved_method_names

__all__ = ["MethodRequest", "plan_methods", "read_methods", "read_path"]

# Of the file as a whole: its check, what is printed, and what is decided for all methods together.
_OF_THE_FILE = ("verify", "progress", "quantize", "weights")
_KEYS = ("model", "args", "kwargs", "dynamic_shapes", "device", "arch", "options")
_CALLS = "the call is export(model, args, path), or export(methods={…}, path=path) for several methods"


@dataclass(frozen=True)
class MethodRequest:
    """A method as the caller gave it, and what it says for itself alone."""

    method: Method
    device: Any = None
    arch: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)


def plan_methods(requests: Sequence[MethodRequest], device: str, arch: Any, options: ExportOptions) -> list[Method]:
    """The methods with their options, one for each of their targets: their own choices, else those of the call.

    Raises what export raises for them.
    """
    methods = []
    for request in requests:
        name = request.method.name
        for key in request.options:
            if key in _OF_THE_FILE:
                of_methods = f": options.{key} has names of methods" if key == "quantize" else ""
                raise OptionError(f"export: method {name!r}: {key} is an option of the whole file{of_methods}")
        try:
            own = resolve_options(options, request.options)
        except OptionError as error:
            raise OptionError(f"export: method {name!r}: {error}") from error
        # A method with a device of its own ignores the call's arch.
        own_arch = request.arch if request.arch is not None or request.device is not None else arch
        own_device = device if request.device is None else request.device
        hosts = resolve_host_cpus(own.cpu)
        if len(hosts) > 1 and own_device != "cpu":
            raise OptionError(f"export: method {name!r}: option cpu: several levels are for device='cpu': give one")
        for option in ("int8_activations", "bfloat16_attention"):
            if getattr(own, option) and own_device != "cpu":
                raise OptionError(
                    f"export: method {name!r}: option {option}: it is for device='cpu', got {own_device!r}: leave "
                    f"it out, or give it in the options of methods for CPUs"
                )
        for target in (target for host in hosts for target in resolve_targets(own_device, own_arch, host)):
            method = replace(request.method, options=own, target=target)
            target.check_request(method)
            methods.append(method)
    return methods


def read_methods(
    model: Any = None, args: Any = None, kwargs: Any = None, dynamic_shapes: Any = None, methods: Any = None
) -> list[MethodRequest]:
    """export's arguments as methods. Raises InvalidArgumentError."""
    if methods is None:
        _check_order(model, args)
        return [MethodRequest(_checked(Method("forward", model, args, kwargs, dynamic_shapes)))]
    given = {"model": model, "args": args, "kwargs": kwargs, "dynamic_shapes": dynamic_shapes}
    if extra := [name for name, value in given.items() if value is not None]:
        raise InvalidArgumentError(f"export: with methods=, leave out {', '.join(extra)}: each entry has its own")
    if not isinstance(methods, Mapping):
        raise InvalidArgumentError(
            f"export: methods: expected a dictionary of methods by name, got {type(methods).__name__}"
        )
    if not methods:
        raise InvalidArgumentError("export: methods: expected at least one method, got an empty dictionary")
    return [_method(name, entry) for name, entry in methods.items()]


def read_path(path: Any) -> Path:
    """The path to write. Raises InvalidArgumentError."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(
            f"export: path: expected a path that ends in .pt2, got {type(path).__name__}: {_CALLS}"
        )
    target = Path(path)
    if target.suffix != ".pt2" or not target.stem:
        raise InvalidArgumentError(f"export: path: expected a path that ends in .pt2, got {str(path)!r}")
    return target


def _check_order(model: Any, args: Any) -> None:
    """Arguments that are swapped, or one place too early."""
    if isinstance(model, Mapping):
        raise InvalidArgumentError(
            f"export: model: expected a torch.nn.Module or an ExportedProgram, got {type(model).__name__}: give "
            f"several methods by name, export(methods={{…}}, path=path)"
        )
    if model is None or isinstance(model, str | os.PathLike | tuple):
        got = f"the path {os.fspath(model)!r}" if isinstance(model, str | os.PathLike) else type(model).__name__
        raise InvalidArgumentError(
            f"export: model: expected a torch.nn.Module or an ExportedProgram, got {got}: {_CALLS}"
        )
    if isinstance(model, type):
        raise InvalidArgumentError(
            f"export: model: expected a torch.nn.Module or an ExportedProgram, got the class {model.__name__}: give an "
            f"object of it"
        )
    if isinstance(args, str | os.PathLike) and isinstance(model, torch.export.ExportedProgram):
        raise InvalidArgumentError(
            f"export: args: an ExportedProgram has its own inputs, got the path {os.fspath(args)!r}: write "
            f"export(program, path={os.fspath(args)!r})"
        )
    if isinstance(args, str | os.PathLike | torch.nn.Module | Mapping):
        got = f"the path {os.fspath(args)!r}" if isinstance(args, str | os.PathLike) else type(args).__name__
        raise InvalidArgumentError(f"export: args: expected a tuple of example inputs, got {got}: {_CALLS}")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidArgumentError(f"export: a method's name must be a Python identifier, got {name!r}")
    if keyword.iskeyword(name):
        raise InvalidArgumentError(
            f"export: method {name!r}: it is a Python keyword, and program.{name} would be a syntax error: use another "
            f"name"
        )
    if name in reserved_method_names():
        raise InvalidArgumentError(
            f"export: method {name!r}: untorch.Program or untorch.Session has an attribute {name!r}, which would hide "
            f"the method: use another name"
        )


def _method(name: Any, entry: Any) -> MethodRequest:
    _check_name(name)
    if isinstance(entry, torch.export.ExportedProgram):
        return MethodRequest(Method(name, entry))
    if isinstance(entry, Mapping):
        if unknown := entry.keys() - set(_KEYS):
            raise InvalidArgumentError(
                f"export: method {name!r}: unknown keys {', '.join(sorted(map(repr, unknown)))}; known are "
                f"{', '.join(_KEYS)}"
            )
        if "model" not in entry:
            raise InvalidArgumentError(f"export: method {name!r}: the key 'model' is missing")
        method = Method(name, entry["model"], entry.get("args"), entry.get("kwargs"), entry.get("dynamic_shapes"))
        options = entry.get("options") or {}
        if not isinstance(options, Mapping):
            raise InvalidArgumentError(
                f"export: method {name!r}: options: expected a dictionary of fields of ExportOptions, got "
                f"{type(options).__name__}"
            )
        return MethodRequest(_checked(method), entry.get("device"), entry.get("arch"), options)
    if isinstance(entry, tuple) and len(entry) == 2:
        return MethodRequest(_checked(Method(name, entry[0], entry[1])))
    raise InvalidArgumentError(
        f"export: method {name!r}: expected (model, args), a dictionary or an ExportedProgram, got "
        f"{type(entry).__name__}"
    )


def _checked(method: Method) -> Method:
    where = f"export: method {method.name!r}"
    if isinstance(method.model, torch.export.ExportedProgram):
        if method.args is not None or method.kwargs is not None or method.dynamic_shapes is not None:
            raise InvalidArgumentError(f"{where}: an ExportedProgram has its own inputs: leave args and the like out")
        return method
    if not isinstance(method.model, torch.nn.Module):
        raise InvalidArgumentError(
            f"{where}: model: expected a torch.nn.Module or an ExportedProgram, got {type(method.model).__name__}"
        )
    if method.args is None and method.kwargs is not None:
        method.args = ()
    if isinstance(method.args, list):
        method.args = tuple(method.args)
    if not isinstance(method.args, tuple):
        raise InvalidArgumentError(
            f"{where}: args: expected a tuple of example inputs, got {type(method.args).__name__}: write (x,) for one"
        )
    return method
