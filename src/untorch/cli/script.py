"""Finds ``SCRIPT:FUNCTION`` for ``untorch export``, calls it, and reads what it returns as arguments of export()."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from untorch.runtime.errors import InvalidArgumentError, ModelError

__all__ = ["export_arguments", "load_models"]

_FORMS = (
    "(model, args), (model, args, kwargs), a dictionary with 'model' and 'args' (and kwargs, dynamic_shapes, options), "
    "or a dictionary of methods"
)


def load_models(spec: str) -> Any:
    """What the function returns. Raises InvalidArgumentError, or ModelError when the script itself fails."""
    script, colon, name = spec.rpartition(":")
    if not colon or not script or not name.isidentifier():
        raise InvalidArgumentError(f"{spec}: expected SCRIPT:FUNCTION, such as model.py:build or package.module:build")
    module = _import(script)
    function = getattr(module, name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InvalidArgumentError(f"{script} has no function '{name}', there are: {', '.join(names) or 'none'}")
    if not callable(function):
        raise InvalidArgumentError(f"{script}: '{name}' is no function, it has the type {type(function).__name__}")
    try:
        return function()
    except Exception as error:
        raise ModelError(f"{spec} failed{_place(error)}: {type(error).__name__}: {error}") from error


def export_arguments(value: Any, spec: str) -> tuple[Any, dict[str, Any]]:
    """The model and the keyword arguments of export() in what a function returned; methods are one of these."""
    if isinstance(value, tuple) and len(value) in (2, 3):
        keywords = dict(zip(("args", "kwargs"), value[1:], strict=False))
        return value[0], {key: item for key, item in keywords.items() if item is not None}
    # A method may be called "model" as well; then its entry is a tuple or a dictionary.
    if isinstance(value, Mapping) and "model" in value and not isinstance(value["model"], tuple | Mapping):
        return value["model"], {str(key): item for key, item in value.items() if key != "model" and item is not None}
    if isinstance(value, Mapping) and value:
        # Methods as (model, args, kwargs) too, which export() itself does not take.
        return None, {"methods": {name: _method(entry) for name, entry in value.items()}}
    if type(value).__name__ == "ExportedProgram":
        return value, {}
    raise InvalidArgumentError(f"{spec} returned {_describe(value)}, expected {_FORMS}")


def _method(entry: Any) -> Any:
    if isinstance(entry, tuple) and len(entry) == 3:
        return {"model": entry[0], "args": entry[1], "kwargs": entry[2]}
    return entry


def _describe(value: Any) -> str:
    if isinstance(value, tuple | Mapping):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a value of type {type(value).__name__}"


def _import(script: str) -> ModuleType:
    path = Path(script)
    if path.suffix != ".py":
        # A module, found as Python finds it, the working directory included.
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            return importlib.import_module(script)
        except ModuleNotFoundError as error:
            if error.name is not None and (script == error.name or script.startswith(f"{error.name}.")):
                raise InvalidArgumentError(f"{script}: there is no such module (a file's name ends in .py)") from None
            raise ModelError(f"{script} failed{_place(error)}: {error}") from error
        except Exception as error:
            raise ModelError(f"{script} failed{_place(error)}: {type(error).__name__}: {error}") from error
    if not path.is_file():
        raise InvalidArgumentError(f"{script}: there is no such file")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise InvalidArgumentError(f"{script}: Python cannot import it")
    module = importlib.util.module_from_spec(module_spec)
    # As for a script that is run: its own folder comes first, and its classes can be found by name.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ModelError(f"{script} failed{_place(error)}: {type(error).__name__}: {error}") from error
    return module


def _place(error: BaseException) -> str:
    """Where in the user's files an error came from: " at model.py:12"."""
    library = sysconfig.get_path("stdlib")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = frame.filename
        if not (name.startswith(("<", library)) or "-packages/" in name or "untorch/cli/" in name):
            return f" at {name}:{frame.lineno}"
    return ""
