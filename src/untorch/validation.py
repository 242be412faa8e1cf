"""Checks of option values, with messages that name the option, what was expected, and the nearest known name."""

from __future__ import annotations

import difflib
import errno
import os
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from untorch.runtime.errors import FileOpenError, InvalidArgumentError, file_error

__all__ = ["OptionError", "check_option", "hint", "missing_file", "refuse_url"]

_LONGEST_PATH = 4096  # Linux's PATH_MAX
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|data:")  # pathlib makes one slash of two


class OptionError(InvalidArgumentError):
    """An option has an unknown name, a wrong type or a wrong value."""


def hint(name: str, known: Sequence[str]) -> str:
    """ "did you mean 'x'?", or the list of what is known."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def refuse_url(where: str, path: Any) -> None:
    """Raises InvalidArgumentError if what should be the path of a file is a URL."""
    if isinstance(path, str) and _URL.match(path):
        raise InvalidArgumentError(
            f"{where}: expected a file, got the URL {path:.200}, which is not fetched: download it, and pass its "
            "path or bytes"
        )


def missing_file(where: str, path: Any) -> FileOpenError:
    """The error for a path that is no file's: FileMissingError."""
    text = str(path)
    if not text:
        problem = "'': the path is empty"
    elif len(text) > _LONGEST_PATH:  # the contents of one, perhaps
        problem = f"{text:.80}…: expected a path, got {len(text)} characters: pass the contents of a file as bytes"
    else:
        problem = f"{text}: it is a folder, pass its files" if os.path.isdir(text) else text
    return file_error(f"{where}: there is no file {problem}", errno.ENOENT, text)


def check_option(name: str, value: Any, kind: Any) -> None:
    """Raises OptionError if ``value`` is not of the type hint ``kind``.

    A hint is a type, a Literal, a Literal or a Sequence of it, another union, or a Mapping.
    """
    origin = get_origin(kind)
    if origin is Literal:
        if value not in get_args(kind):
            expected = ", ".join(repr(v) for v in get_args(kind))
            near = difflib.get_close_matches(str(value), [str(v) for v in get_args(kind)], n=1)
            nearest = f" (did you mean {near[0]!r}?)" if near else ""
            raise OptionError(f"option {name}: expected one of {expected}, got {value!r}{nearest}")
        return
    if origin is Union:  # a Literal, and a Sequence of it
        one, *_ = get_args(kind)
        several = isinstance(value, Sequence) and not isinstance(value, str)
        for item in value if several else (value,):
            check_option(name, item, one)
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
