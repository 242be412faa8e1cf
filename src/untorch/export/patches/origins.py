"""The hook that tells of every kernel call that Inductor generates: which graph nodes it came from."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from untorch.export.patches.registry import patch, replaced

__all__ = ["CallSequence", "LayerCall", "kernel_origins", "layer_call", "layer_function"]

_FUNCTION = "set_kernel_post_grad_provenance_tracing"
_MODULES = ("torch._inductor.debug", "torch._inductor.codegen.cpp", "torch._inductor.codegen.triton")


@dataclass(frozen=True)
class LayerCall:
    """A call of the layer of that name, with the names of the tensors that it gets."""

    name: str
    operands: tuple[str, ...]


@dataclass
class CallSequence:
    """What the generated code calls, in its order.

    wrapper: of the code; a graph whose code is generated twice is told of twice, and the last counts.
    """

    calls: list[Any] = field(default_factory=list)
    layers: dict[str, list[Any]] = field(default_factory=dict)
    wrapper: Any = None


# The sequence that is being recorded, and the list that calls go to.
_current: CallSequence | None = None
_target: list[Any] | None = None


@patch(
    *(f"{module}.{_FUNCTION}" for module in _MODULES),
    versions="2.11–2.15",
    why="Inductor keeps which graph nodes a kernel came from only with provenance tracking, which turns its caches off "
    "and writes files, and then without sizes.",
    test="test_origins.py::test_torch_still_keeps_no_origins_by_itself",
)
@contextlib.contextmanager
def kernel_origins(describe: Callable[[Any, str, bool], Any]) -> Iterator[CallSequence]:
    """``describe(node_schedule, name, is_extern)`` makes the record of each kernel call; None: there is none."""
    global _current, _target
    from torch._inductor.virtualized import V

    sequence = CallSequence()

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        def told(node_schedule: Any, kernel_name: str, is_extern: bool = False) -> Any:
            if not _in_layer and V.graph.wrapper_code is not sequence.wrapper:
                sequence.wrapper = V.graph.wrapper_code
                sequence.calls.clear()
            record = describe(node_schedule, kernel_name, is_extern)
            if record is not None and _target is not None:
                _target.append(record)
            return original(node_schedule, kernel_name, is_extern)

        return told

    before = _current, _target
    with contextlib.ExitStack() as stack:
        for name in _MODULES:
            module = importlib.import_module(name)
            if (original := getattr(module, _FUNCTION, None)) is not None:
                stack.enter_context(replaced(module, _FUNCTION, patched(original)))
        _current, _target = sequence, sequence.calls
        try:
            yield sequence
        finally:
            _current, _target = before


_in_layer = 0


@contextlib.contextmanager
def layer_function(name: str) -> Iterator[None]:
    """The calls that are generated meanwhile belong to the layer's function."""
    global _target, _in_layer
    if _current is None:
        yield
        return
    before, _target = _target, _current.layers.setdefault(name, [])
    _target.clear()
    _in_layer += 1
    try:
        yield
    finally:
        _in_layer -= 1
        _target = before


def layer_call(name: str, operands: list[str]) -> None:
    """A call of the layer is generated."""
    if _target is not None:
        _target.append(LayerCall(name, tuple(operands)))
