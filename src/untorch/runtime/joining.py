"""Whether calls of a method may be joined along dimension 0, by what the manifest says of its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from untorch.runtime.spec import SymbolicDim, TensorSpec

__all__ = ["Joining", "joining_of"]


@dataclass(frozen=True)
class Joining:
    """``reason``: why calls are not joined; empty if they are. ``limit``: the most rows that the method takes.

    ``dim``: the batch dimension; None if there is none.
    """

    reason: str = ""
    limit: int | None = None
    dim: SymbolicDim | None = field(default=None, compare=False)


def joining_of(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec | None], has_state: bool = False
) -> Joining:  # fmt: skip
    """Calls are joined if one symbol is dimension 0 of every input and output, and stands nowhere else.

    A symbol that stands elsewhere, too, relates rows to each other: a matrix of similarities has it twice.
    """
    if not inputs:
        return Joining("the package does not describe the method's inputs")
    if has_state:
        return Joining("the method changes buffers")
    if any(spec.mutated for spec in inputs):
        return Joining("the method writes into an input")
    known = [spec for spec in outputs if spec is not None]
    if not known:
        return Joining("the package does not describe the method's outputs")
    first = inputs[0].shape[0] if inputs[0].shape else None
    if not isinstance(first, SymbolicDim) or first.is_expression:
        return Joining(f"dimension 0 of input '{inputs[0].name}' is not dynamic")
    for kind, specs in (("input", inputs), ("output", known)):
        for spec in specs:
            if not spec.shape or not _is(spec.shape[0], first.name):
                return Joining(f"dimension 0 of {kind} '{spec.name}' is not {first.name}")
            if any(_mentions(size, first.name) for size in (*spec.shape[1:], *(spec.strides or ())[1:])):
                return Joining(f"{first.name} is also another dimension of {kind} '{spec.name}'")
            if spec.strides is not None and not spec.contiguous:
                return Joining(f"{kind} '{spec.name}' is not row-major")
    return Joining(limit=first.max, dim=first)


def _is(size: int | SymbolicDim, symbol: str) -> bool:
    return isinstance(size, SymbolicDim) and not size.is_expression and size.name == symbol


def _mentions(size: int | SymbolicDim, symbol: str) -> bool:
    """An expression that is not known in full may have any symbol."""
    if not isinstance(size, SymbolicDim):
        return False
    if not size.is_expression:
        return size.name == symbol
    return size.rpn is None or symbol in size.rpn
