"""Trees of arguments and results, from the specification that PyTorch stores in a package.

A specification is the JSON text that ``torch.utils._pytree.treespec_dumps`` makes: nested nodes with a ``type``, a
``context`` and ``children_spec``; a leaf has no type.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword
from typing import Any

from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError, UnsupportedError

__all__ = ["Struct", "TreeSpec", "flatten", "parse_spec", "unflatten"]

PROTOCOL = 1


class Struct(dict[str, Any]):
    """A result of a class that this machine does not have (a transformers ``ModelOutput``, say): its fields by name.

    Works as a dict and by attribute: ``out["logits"]``, ``out.logits``.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no field '{name}', there are: {', '.join(self)}") from None


@dataclass(frozen=True)
class TreeSpec:
    """One node: ``kind`` is "leaf", "tuple", "list", "dict", "namedtuple", "struct" …; ``keys`` name the children."""

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple[TreeSpec, ...] = ()
    name: str = ""

    @property
    def num_leaves(self) -> int:
        """Leaves below this node."""
        return 1 if self.kind == "leaf" else sum(child.num_leaves for child in self.children)


_KINDS = {
    "builtins.tuple": "tuple",
    "builtins.list": "list",
    "builtins.dict": "dict",
    "collections.OrderedDict": "ordered_dict",
    "collections.defaultdict": "default_dict",
    "collections.deque": "deque",
    "collections.namedtuple": "namedtuple",
    "torch.Size": "tuple",
    "torch.fx.immutable_collections.immutable_list": "list",
    "torch.fx.immutable_collections.immutable_dict": "dict",
}


def parse_spec(text: str) -> TreeSpec:
    """The tree of a specification. Raises InvalidFileError for text that is none."""
    try:
        document = json.loads(text)
        protocol, root = document
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidFileError(f"the package's call specification is damaged: {error}") from None
    if protocol != PROTOCOL:
        raise UnsupportedError(f"call specification of protocol {protocol}; this untorch reads {PROTOCOL}")
    return _parse_node(root, 0)


def _parse_node(node: Any, depth: int) -> TreeSpec:
    if not isinstance(node, dict) or not isinstance(node.get("children_spec"), list) or depth > 64:
        raise InvalidFileError("the package's call specification is damaged: a node is malformed")
    children = tuple(_parse_node(child, depth + 1) for child in node["children_spec"])
    type_name = node.get("type")
    if type_name is not None and not isinstance(type_name, str):
        raise InvalidFileError("the package's call specification is damaged: a node's type is no text")
    if type_name is None:
        if children:
            raise InvalidFileError("the package's call specification is damaged: a leaf has children")
        return TreeSpec("leaf")
    kind = _KINDS.get(type_name, "struct")
    context = _context(node.get("context"))
    keys: tuple[Any, ...] = ()
    name = str(type_name)
    if kind in ("dict", "ordered_dict", "struct") and isinstance(context, list):
        keys = tuple(_key(key) for key in context)
    elif kind == "default_dict" and isinstance(context, dict):
        keys = tuple(_key(key) for key in _list(context.get("dict_context")))
    elif kind == "namedtuple" and isinstance(context, dict):
        keys = tuple(str(field) for field in _list(context.get("fields")))
        name = str(context.get("class_name") or context.get("type") or type_name)
    elif kind == "namedtuple" and isinstance(context, str):
        name = context
    elif kind == "struct" and isinstance(context, dict):
        keys = tuple(context)
    if kind in ("dict", "ordered_dict", "default_dict") and len(keys) != len(children):
        raise InvalidFileError("the package's call specification is damaged: a dict has other keys than children")
    if len(keys) != len(children):
        keys = ()
    return TreeSpec(kind, keys, children, name)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _context(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _key(key: Any) -> Any:
    # A key that is no string is stored as {"__enum__": …} and the like, or plainly.
    return key if isinstance(key, str | int | float | bool) or key is None else json.dumps(key)


def _children_of(value: Any, spec: TreeSpec, path: str) -> Sequence[Any]:
    count = len(spec.children)
    if spec.kind in ("dict", "ordered_dict", "default_dict") or (spec.kind == "struct" and spec.keys):
        if hasattr(value, "keys"):
            got = set(value.keys())
            if got != set(spec.keys):
                raise InvalidArgumentError(_key_difference(path, spec.keys, got))
            return [value[key] for key in spec.keys]
        if spec.kind == "struct" and all(hasattr(value, str(key)) for key in spec.keys):
            return [getattr(value, str(key)) for key in spec.keys]
        raise ArgumentTypeError(f"{path}: expected a dict with {_names(spec.keys)}, got {type(value).__name__}")
    accepted: tuple[type[Sequence[Any]], ...] = (tuple,)
    if spec.kind not in ("tuple", "namedtuple"):
        accepted = (list, tuple, deque)
    if isinstance(value, accepted):
        if len(value) == count:
            return list(value)
        given = f"{type(value).__name__} of {len(value)}"
        raise InvalidArgumentError(f"{path}: expected a {spec.kind} of {count}, got {given}")
    raise ArgumentTypeError(f"{path}: expected a {spec.kind} of {count}, got {type(value).__name__}")


def _names(keys: Sequence[Any]) -> str:
    return ", ".join(repr(key) for key in keys) or "no keys"


def _key_difference(path: str, expected: Sequence[Any], got: set[Any]) -> str:
    parts = [f"{path}: expected a dict with {_names(expected)}"]
    if missing := [key for key in expected if key not in got]:
        parts.append(f"missing {_names(missing)}")
    if unknown := [key for key in got if key not in expected]:
        parts.append(f"unknown {_names(sorted(unknown, key=str))}")
    return "; ".join(parts)


def flatten(value: Any, spec: TreeSpec, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of ``value`` in the order of ``spec``, each with its path for messages.

    Raises InvalidArgumentError naming the path where the value has another form.
    """
    if spec.kind == "leaf":
        yield path, value
        return
    for key, child, item in zip(_labels(spec), spec.children, _children_of(value, spec, path), strict=True):
        yield from flatten(item, child, f"{path}{key}")


def _labels(spec: TreeSpec) -> list[str]:
    if spec.keys and spec.kind != "namedtuple":
        return [f"[{key!r}]" for key in spec.keys]
    return [f"[{i}]" for i in range(len(spec.children))]


def _identifier(name: str) -> str:
    return name if name.isidentifier() and not iskeyword(name) else "Result"


@lru_cache(maxsize=64)
def _namedtuple_class(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(_identifier(name.rsplit(".", 1)[-1]), fields, rename=True)


def unflatten(leaves: Iterator[Any], spec: TreeSpec) -> Any:
    """The tree of ``spec`` with the given leaves; containers of classes unknown here become a Struct or a tuple."""
    if spec.kind == "leaf":
        return next(leaves)
    items = [unflatten(leaves, child) for child in spec.children]
    if spec.kind == "tuple":
        return tuple(items)
    if spec.kind == "list":
        return items
    if spec.kind == "deque":
        return deque(items)
    if spec.kind == "dict":
        return dict(zip(spec.keys, items, strict=True))
    if spec.kind == "ordered_dict":
        return OrderedDict(zip(spec.keys, items, strict=True))
    if spec.kind == "default_dict":
        return defaultdict(None, zip(spec.keys, items, strict=True))
    if spec.kind == "namedtuple" and spec.keys:
        return _namedtuple_class(spec.name, spec.keys)(*items)
    if spec.keys:
        return Struct(zip((str(key) for key in spec.keys), items, strict=True))
    return tuple(items)
