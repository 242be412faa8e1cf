"""TensorSpec: what a method takes and gives, one tensor each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from untorch.runtime.errors import InvalidFileError

__all__ = ["SymbolicDim", "TensorSpec", "parse_specs"]


@dataclass(frozen=True)
class SymbolicDim:
    """A size that may vary: a symbol from ``min`` to ``max`` (None: no limit), or an expression over symbols.

    ``rpn`` is an expression in postfix order, such as ``("s0", 2, "*")``; None if it has no such form.
    """

    name: str
    min: int = 0
    max: int | None = None
    is_expression: bool = False
    rpn: tuple[str | int, ...] | None = None

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        if self.is_expression:
            return self.name
        return f"{self.name}≥{self.min}" if self.max is None else f"{self.name}={self.min}..{self.max}"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, its shape (ints, and ``SymbolicDim`` where a size may vary), its dtype's name.

    Of inputs also the memory layout: ``contiguous`` (row-major), else ``strides`` in elements, if they are known;
    ``mutated`` if the model writes into it; ``device`` where it is another than the method's.
    """

    name: str
    shape: tuple[int | SymbolicDim, ...]
    dtype: str
    contiguous: bool = True
    strides: tuple[int | SymbolicDim, ...] | None = None
    mutated: bool = False
    device: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"

    def __repr__(self) -> str:
        return f"TensorSpec({self.name}: {self.dtype}[{', '.join(map(repr, self.shape))}])"


def parse_specs(items: Any) -> tuple[TensorSpec | None, ...]:
    """The specs of a manifest's ``inputs`` or ``outputs``; None for a None. Python values (constants) are left out.

    Raises InvalidFileError for what is no such list.
    """
    try:
        return tuple(_parse(item) for item in items or () if item is None or "constant" not in item)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidFileError(f"the manifest's inputs or outputs are damaged: {error!r}") from None


def _parse(item: Mapping[str, Any] | None) -> TensorSpec | None:
    if item is None:
        return None
    strides = item.get("strides")
    return TensorSpec(
        name=str(item["name"]),
        shape=_dims(item["shape"]),
        dtype=str(item["dtype"]),
        contiguous=bool(item.get("contiguous", True)),
        strides=None if strides is None else _dims(strides),
        mutated=bool(item.get("mutated", False)),
        device=item.get("device"),
    )


def _dims(values: Any) -> tuple[int | SymbolicDim, ...]:
    return tuple(value if isinstance(value, int) else _dim(value) for value in values)


def _dim(value: Any) -> SymbolicDim:
    if not isinstance(value, Mapping):
        return SymbolicDim("?", is_expression=True)
    rpn = value.get("rpn")
    if "symbol" not in value:
        return SymbolicDim(str(value.get("expr") or "?"), is_expression=True, rpn=None if rpn is None else tuple(rpn))
    low = value.get("min")
    return SymbolicDim(str(value["symbol"]), 0 if low is None else int(low), value.get("max"))
