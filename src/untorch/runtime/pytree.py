"""Classes of results that have no class of their own on this machine."""

from __future__ import annotations

from collections import namedtuple
from functools import lru_cache
from keyword import iskeyword
from typing import Any

__all__ = ["Struct", "namedtuple_class"]


class Struct(dict[str, Any]):
    """A result of a class that this machine does not have (a transformers ``ModelOutput``, say): its fields by name.

    Works as a dict and by attribute: ``out["logits"]``, ``out.logits``.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no field '{name}', there are: {', '.join(self)}") from None


@lru_cache(maxsize=64)
def namedtuple_class(name: str, fields: tuple[str, ...]) -> Any:
    """A namedtuple class for a result that was one when the model was exported; ``name`` may be qualified."""
    last = name.rsplit(".", 1)[-1]
    return namedtuple(last if last.isidentifier() and not iskeyword(last) else "Result", fields, rename=True)
