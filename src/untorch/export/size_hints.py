"""A program traced for one example's sizes, with the sizes of another: its size hints.

Methods of a language model are the same step, tuned for few and for many tokens. What torch.export makes of them
differs in the hints alone, the sizes that Inductor tunes kernels for, and it takes longest of all before Inductor.
"""

from __future__ import annotations

import copy
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.dynamic_shapes import _DimHint
from torch.fx.experimental.sym_node import SymNode
from torch.utils import _pytree as pytree

from untorch.export.small_sizes import shape_environment, user_inputs

__all__ = ["describe_dynamic_shapes", "with_hints_of"]

_SPECIAL = 2  # torch.export takes dynamic sizes for this, or more


def describe_dynamic_shapes(dynamic_shapes: Any) -> Any:
    """What compares equal for equal dynamic shapes: dimensions by name and range, as they are objects of their own."""
    if isinstance(dynamic_shapes, dict):
        return tuple((key, describe_dynamic_shapes(value)) for key, value in dynamic_shapes.items())
    if isinstance(dynamic_shapes, list | tuple):
        return tuple(map(describe_dynamic_shapes, dynamic_shapes))
    if isinstance(dynamic_shapes, torch.export.Dim) and not hasattr(dynamic_shapes, "root"):
        return dynamic_shapes.__name__, dynamic_shapes.min, dynamic_shapes.max
    if isinstance(dynamic_shapes, int | torch.export.Dim | _DimHint | None):
        return dynamic_shapes
    return object()  # a collection knows tensors by identity


def with_hints_of(
    args: tuple[Any, ...], kwargs: dict[str, Any] | None, program: torch.export.ExportedProgram
) -> torch.export.ExportedProgram | None:
    """A copy of ``program`` as if it was traced with these example inputs; the two share tensors alone.

    None where tracing them might give another program: other static sizes, dtypes, strides or values, sizes of one or
    zero, sizes for which a condition of the trace does not hold, or a graph with graphs in it.
    """
    environment = shape_environment(program)
    given = args, kwargs or {}
    if environment is None or any(isinstance(part, fx.GraphModule) for part in program.graph_module.children()):
        return None
    leaves, structure = pytree.tree_flatten(given)
    before, structure_before = pytree.tree_flatten(program.example_inputs)
    if structure != structure_before:
        return None
    hints = _hints(user_inputs(program), before, leaves)
    if hints is None or environment.deferred_runtime_asserts:
        return None
    numbers = dict(environment.backed_var_to_val) | hints
    # Sizes that are equal by a condition are one symbol in the graph.
    numbers |= {symbol: environment.replace(symbol).xreplace(numbers) for symbol in numbers}
    ranges = environment.var_to_range
    holds = all(guard.expr.xreplace(numbers) == sympy.true for guard in environment.guards)
    if not holds or not all(number in ranges[symbol] for symbol, number in hints.items()):
        return None
    return _copy(program, environment, numbers, given)


def _hints(inputs: list[Any], before: list[Any], now: list[Any]) -> dict[Any, Any] | None:
    """The inputs' symbols with their sizes now; None for what a symbol does not explain."""
    if not len(inputs) == len(before) == len(now):
        return None
    hints: dict[Any, Any] = {}
    for traced, old, new in zip(inputs, before, now, strict=True):
        if not isinstance(traced, torch.Tensor):
            if type(old) is not type(new) or old != new:
                return None
            continue
        if not isinstance(new, torch.Tensor) or not _are_alike(old, new):
            return None
        for size, wanted in zip(traced.shape, new.shape, strict=True):
            if not isinstance(size, torch.SymInt):
                if size != wanted:
                    return None
                continue
            symbol = size.node.expr
            if not symbol.is_Symbol or wanted < _SPECIAL or hints.setdefault(symbol, sympy.Integer(wanted)) != wanted:
                return None
    return hints


def _are_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether they differ in sizes and values alone."""
    return (
        type(old) is type(new) and old.dtype == new.dtype and old.device == new.device and old.dim() == new.dim()
        and old.layout == new.layout == torch.strided and old.requires_grad == new.requires_grad
        and old.is_contiguous() and new.is_contiguous()
    )  # fmt: skip


def _copy(
    program: torch.export.ExportedProgram, environment: Any, hints: dict[Any, Any], examples: Any
) -> torch.export.ExportedProgram:
    own = _copy_environment(environment, hints)
    mode = FakeTensorMode(shape_env=own, allow_non_fake_inputs=True)
    made: dict[int, torch.Tensor] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return type(value)(SymNode(value.node.expr, own, value.node.pytype, None))
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            with mode:
                fake: torch.Tensor = torch.empty_strided(
                    [moved(size) for size in value.shape], [moved(stride) for stride in value.stride()],
                    dtype=value.dtype, device=value.device,
                )  # fmt: skip
            if isinstance(value, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=value.requires_grad)
            made[id(value)] = fake
        return made[id(value)]

    module = fx.GraphModule(program.graph_module, copy.deepcopy(program.graph))
    module.meta.update(program.graph_module.meta)
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
    copied: Any = copy.copy(program)
    copied._graph_module = module
    copied._range_constraints = dict(program.range_constraints)
    copied._example_inputs = examples
    return copied  # type: ignore[no-any-return]


def _copy_environment(environment: Any, hints: dict[Any, Any]) -> Any:
    """What torch knows of the symbols, for itself, with other hints."""
    copied = copy.copy(environment)
    for name, value in vars(environment).items():
        if isinstance(value, dict | list | set):
            setattr(copied, name, copy.copy(value))
    copied.backed_var_to_val.update(hints)
    copied.fake_tensor_cache = {}
    return copied
