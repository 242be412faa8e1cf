"""Results that torch.export refuses: dataclasses become their fields by name, key-value caches are left out.

A forward hook changes what the module returns while it is traced. The file gives an ``untorch.Struct`` for a dataclass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from untorch.export.errors import CompileError

__all__ = ["Fields", "drop_constant_results", "plain_results"]


class Fields(dict[str, Any]):
    """The fields of a dataclass, by name."""


def _flatten(fields: Fields) -> tuple[list[Any], list[str]]:
    return list(fields.values()), list(fields)


def _flatten_with_keys(fields: Fields) -> tuple[list[tuple[Any, Any]], list[str]]:
    return [(pytree.MappingKey(name), value) for name, value in fields.items()], list(fields)


def _unflatten(values: Any, names: list[str]) -> Fields:
    return Fields(zip(names, values, strict=True))


pytree.register_pytree_node(
    Fields,
    _flatten,
    _unflatten,
    serialized_type_name="untorch.Struct",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=json.dumps,
    from_dumpable_context=json.loads,
)


@contextlib.contextmanager
def plain_results(name: str, model: torch.nn.Module, kwargs: dict[str, Any] | None) -> Iterator[None]:
    """Method ``name``'s module returns what torch.export takes, meanwhile.

    Raises CompileError while tracing for a key-value cache that the call asks for; warns where it is the default.
    """
    asked = bool((kwargs or {}).get("use_cache"))
    dropped: list[str] = []

    def hook(module: torch.nn.Module, args: Any, result: Any) -> Any:
        return _plain(result, name, asked, dropped)

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
    if dropped:
        warnings.warn(
            f"export: method {name!r}: the model returns a key-value cache ({dropped[0]}), which is no tensor: it is "
            f"left out. Say so by kwargs={{'use_cache': False}} or model.config.use_cache = False. {_WITH_A_CACHE}",
            UserWarning,
            stacklevel=4,
        )


def drop_constant_results(module: fx.GraphModule) -> None:
    """None in the place of numbers, texts and bools that the graph returns: the manifest has them."""
    output = module.graph.output_node()
    values = output.args[0]
    if isinstance(values, tuple | list) and any(not isinstance(value, fx.Node | None) for value in values):
        output.args = (type(values)(value if isinstance(value, fx.Node) else None for value in values),)
        module.recompile()


_WITH_A_CACHE = (
    "To decode with a cache, keep it in buffers that calls change (transformers' StaticCache in a module of yours) and "
    "export prefill and decode as two methods: docs/runtime.md, sessions"
)


def _plain(value: Any, name: str, asked: bool, dropped: list[str]) -> Any:
    """The value with its dataclasses as Fields; itself, where nothing changes."""
    kind = type(value)
    if _is_cache(kind):
        if asked:
            raise CompileError(
                f"method {name!r}: the model returns a key-value cache ({kind.__name__}), which is no tensor: export "
                f"it with kwargs={{'use_cache': False}}. {_WITH_A_CACHE}"
            )
        dropped.append(kind.__name__)
        return None
    if isinstance(value, torch.Tensor) or value is None:
        return value
    registered = pytree.SUPPORTED_NODES.get(kind)
    if dataclasses.is_dataclass(value) and not isinstance(value, dict):
        if registered is not None and _has_name(kind):
            return value
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return Fields({key: _plain(item, name, asked, dropped) for key, item in fields.items()})
    if isinstance(value, dict):
        items = {key: _plain(item, name, asked, dropped) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()) and registered is not None and _has_name(kind):
            return value
        if kind is dict or not all(isinstance(key, str) for key in items):
            return items
        return Fields(items)  # a ModelOutput
    if kind in (list, tuple):
        parts = [_plain(item, name, asked, dropped) for item in value]
        return value if all(map(_same, parts, value)) else kind(parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [_plain(item, name, asked, dropped) for item in value]
        return value if all(map(_same, parts, value)) else kind(*parts)
    return value


def _same(one: Any, other: Any) -> bool:
    return one is other


def _is_cache(kind: type) -> bool:
    """Whether it is one of transformers' caches."""
    return any(
        base.__name__ in ("Cache", "EncoderDecoderCache") and base.__module__.startswith("transformers.")
        for base in kind.__mro__
    )


def _has_name(kind: type) -> bool:
    """Whether a file can name the class: registered with serialized_type_name."""
    entry = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    return entry is not None and entry.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND
