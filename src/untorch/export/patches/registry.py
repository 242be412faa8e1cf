"""The table of patches: what each replaces in torch, the versions it is for, why, and the test that retires it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["PATCHES", "Patch", "patch", "replaced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One patch.

    replaces: what it replaces, as dotted names of torch or Triton.
    versions: the versions of torch that need it.
    why: what happens without it.
    test: the test that fails when it is no longer needed, as pytest names it, below tests/unit/export/patches.
    """

    name: str
    replaces: tuple[str, ...]
    versions: str
    why: str
    test: str


PATCHES: dict[str, Patch] = {}


def patch(*replaces: str, versions: str, why: str, test: str) -> Callable[[_Function], _Function]:
    """Registers a context manager, under its own name, as the patch that replaces these names."""

    def register(function: _Function) -> _Function:
        name = function.__name__
        assert name not in PATCHES, f"two patches are called {name}"
        PATCHES[name] = Patch(name, replaces, versions, why, test)
        return function

    return register


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets the attribute of a module or class meanwhile; one that is new is removed again."""
    # vars: a staticmethod or a property has to be put back as such.
    old = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if old is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
