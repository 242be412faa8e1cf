"""Mutable buffers: which methods of a file share them. A session has one copy of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from untorch.export.errors import CompileError
from untorch.export.method import Method
from untorch.export.mutations import WRITTEN_ELSEWHERE, find_mutations
from untorch.export.passes.attributes import attribute

__all__ = ["MutableBuffers", "share_buffers"]


def share_buffers(methods: Sequence[Method]) -> None:
    """Tells every traced method which of its buffers others write: those of the same name, dtype and shape.

    A method that only reads such a buffer must not take it for a constant.
    """
    written: dict[str, set[tuple[torch.dtype, tuple[int, ...]]]] = {}
    own = [find_mutations(method.module.graph).attributes for method in methods]
    for method, names in zip(methods, own, strict=True):
        for name in names:
            written.setdefault(name, set()).add(_kind(attribute(method.module, name)))
    for method, names in zip(methods, own, strict=True):
        read = {str(node.target) for node in method.module.graph.nodes if node.op == "get_attr"} - names
        method.module.meta[WRITTEN_ELSEWHERE] = frozenset(
            name for name in read & written.keys() if _kind(attribute(method.module, name)) in written[name]
        )


def _kind(tensor: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


@dataclass
class _Buffer:
    weight: int
    shapes: dict[str, tuple[str, tuple[int, ...]]]
    device: str
    codes: list[tuple[str, str | None]] = field(default_factory=list)  # methods, each with what it is for

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self.codes))


class MutableBuffers:
    """The mutable buffers of a file. Methods are added in turn; buffers of one name, dtype and shape are one."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    @property
    def entries(self) -> list[dict[str, Any]]:
        """As the manifest has them: the name, the initial value, and the methods that share it."""
        return [{"fqn": min(b.shapes), "weight": b.weight, "methods": b.methods} for b in self._buffers]

    def add_method(
        self, method: str, device: str, constants: list[dict[str, Any]], storages: Sequence[int],
        code_name: str | None = None,
    ) -> None:  # fmt: skip
        """Gives every changed constant (a manifest entry) its buffer. ``storages``: the constants' memory, by identity.

        ``code_name``: tells this code of the method from its others, which have the same buffers.
        Raises CompileError when methods name a buffer alike and give it different initial values.
        """
        groups: dict[int, list[dict[str, Any]]] = {}
        for constant, storage in zip(constants, storages, strict=True):
            if constant["mutated"]:
                groups.setdefault(storage, []).append(constant)
        for group in groups.values():
            shapes = {c["fqn"]: (c["dtype"], tuple(c["shape"])) for c in group}
            where = group[0].get("device", device)
            code = (method, code_name)
            index = self._find(code, shapes, group[0]["weight"], where)
            buffer = self._buffers[index]
            buffer.shapes |= shapes
            buffer.codes.append(code)
            for constant in group:
                constant["state"] = index

    def _find(
        self, code: tuple[str, str | None], shapes: dict[str, tuple[str, tuple[int, ...]]], weight: int, device: str
    ) -> int:
        for index, buffer in enumerate(self._buffers):
            common = [name for name, shape in shapes.items() if buffer.shapes.get(name) == shape]
            if not common or code in buffer.codes:
                continue
            if buffer.device != device:
                raise CompileError(
                    f"methods {buffer.methods[0]!r} and {code[0]!r} share the mutable buffer {common[0]!r}, "
                    f"which the first has on {buffer.device} and the second on {device}: keep it on one device"
                )
            if buffer.weight != weight:
                raise CompileError(
                    f"methods {buffer.methods[0]!r} and {code[0]!r} both have a mutable buffer {common[0]!r}, with "
                    f"different values: a session has one; give both modules the same values, or other names"
                )
            return index
        self._buffers.append(_Buffer(weight, shapes, device))
        return len(self._buffers) - 1
