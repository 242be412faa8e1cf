"""A patch of how torch writes the structure of arguments and results: named tuples by the names of their fields."""

from __future__ import annotations

import contextlib
import json
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

from untorch.export.patches.registry import patch

__all__ = ["named_tuples"]

_SERIALISED_AS = "collections.namedtuple"


@patch(
    "torch.utils._pytree.SUPPORTED_SERIALIZED_TYPES",
    versions="2.11–2.15",
    why="torch writes named tuples only if their class was registered, without the fields' names, and its own results "
    "(torch.return_types.max) not at all: a model could not return x.max(1).",
    test="test_specs.py::test_torch_still_refuses_named_tuples",
)
@contextlib.contextmanager
def named_tuples() -> Iterator[None]:
    """Named tuples and torch.return_types are written as ``collections.namedtuple`` with class and field names."""
    from torch.return_types import all_return_types
    from torch.utils import _pytree as pytree

    known: Any = pytree.SUPPORTED_SERIALIZED_TYPES
    tuples: Any = namedtuple  # the type that torch gives the spec of every named tuple; its context is the class
    entries = {tuples: known[tuples]._replace(to_dumpable_context=lambda kind: _names(kind, kind._fields))}
    for result in all_return_types:
        if isinstance(result, type) and result in known:
            entries[result] = known[result]._replace(
                serialized_type_name=_SERIALISED_AS, to_dumpable_context=_namer(result)
            )
    old = {kind: known[kind] for kind in entries}
    known.update(entries)
    try:
        yield
    finally:
        known.update(old)


def _namer(result: Any) -> Any:
    return lambda context: _names(result, result.__match_args__)


def _names(kind: type, fields: tuple[str, ...]) -> str:
    return json.dumps({"class_name": kind.__name__, "fields": list(fields)})
