"""Sizes zero and one of dynamic dimensions, which torch.export never sees: tried on fake tensors.

torch.export traces with two or more, and the program that it makes runs with any size. Compiled code would read beyond
a tensor where the traced shapes hold from two on alone, as x[1] and x[:2] do.
"""

from __future__ import annotations

import warnings
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import ValueRanges

from untorch.export.example_sizes import Examples, dynamic_dims

__all__ = ["allow_small_sizes", "input_symbols", "keeps_shapes", "shape_environment", "symbol_names", "user_inputs"]

_SPECIAL = 2  # torch.export takes dynamic sizes for this, or more


def allow_small_sizes(
    program: torch.export.ExportedProgram, model: torch.nn.Module | None = None, examples: Examples | None = None
) -> None:
    """The program takes sizes below two where its shapes are right for them, and no others.

    A minimum that the caller wrote stays. Warns where the example has the size one, and the model is not of that form.
    model, examples: what the program was traced with, if it was traced here.
    """
    kept = _written_minima(program, model, examples) if model is not None and examples is not None else set()
    bounds = program.range_constraints
    symbols = [
        symbol
        for symbol in input_symbols(program)
        if symbol in bounds and bounds[symbol].lower <= _SPECIAL <= bounds[symbol].upper and symbol not in kept
    ]
    if not symbols:
        return
    hints = _hints(program)
    ones = {symbol for symbol, _ in _sizes_of_one(program, examples)}
    lowest = dict.fromkeys(symbols, _SPECIAL)
    for size in (1, 0):
        # A minimum of one that the caller wrote stays, whatever the shapes for none are.
        asked = [
            symbol
            for symbol in symbols
            if lowest[symbol] == size + 1 and (bounds[symbol].lower in (0, _SPECIAL) or size > 0)
        ]
        if not asked:
            break
        together = keeps_shapes(program, hints | dict.fromkeys(asked, size))
        for symbol in asked:
            alone = together if together or len(asked) == 1 else keeps_shapes(program, hints | {symbol: size})
            # What cannot be told is as torch.export and the caller have it.
            if alone or (alone is None and (bounds[symbol].lower <= size or (size == 1 and symbol in ones))):
                lowest[symbol] = size
    for symbol in symbols:
        lower, upper = bounds[symbol].lower, bounds[symbol].upper
        # A minimum below two that the caller wrote is more than ours, if the shapes are right for it.
        begins = lowest[symbol] if lower == _SPECIAL else max(lowest[symbol], int(lower))
        bounds[symbol] = ValueRanges(begins, upper)
    refused = [place for symbol, place in _sizes_of_one(program, examples) if bounds[symbol].lower > 1]
    if refused:
        warnings.warn(
            f"export: {', '.join(refused)}: the example has the size one, and the model has other shapes for it than "
            f"for more: the file takes two and more. Leave the dimension out of dynamic_shapes to export the model for "
            f"one",
            UserWarning,
            stacklevel=2,
        )


def user_inputs(program: torch.export.ExportedProgram) -> list[Any]:
    """What stands for the flat inputs of a call: fake tensors, symbols, constants."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    return [values.get(getattr(spec.arg, "name", "")) for spec in specs if spec.kind == InputKind.USER_INPUT]


def _sizes(value: Any) -> list[Any]:
    """The symbolic sizes of an input, None where one is static."""
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return [size.node.expr if isinstance(size, torch.SymInt) else None for size in sizes]


def input_symbols(program: torch.export.ExportedProgram) -> list[Any]:
    """The symbols that are sizes of inputs themselves."""
    found = [expression for value in user_inputs(program) for expression in _sizes(value)]
    return list(dict.fromkeys(expression for expression in found if isinstance(expression, sympy.Symbol)))


def _written_minima(program: torch.export.ExportedProgram, model: torch.nn.Module, examples: Examples) -> set[Any]:
    """The symbols of dimensions for which the caller wrote a minimum of two or more."""
    found, _ = dynamic_dims(model, examples.args, examples.kwargs, examples.dynamic_shapes)
    dims = {id(tensor): entries for _, tensor, entries in found}
    kept: set[Any] = set()
    for value, leaf in zip(user_inputs(program), _leaves(examples), strict=True):
        sizes = _sizes(value)
        for index, dim in dims.get(id(leaf), {}).items():
            least = getattr(getattr(dim, "root", dim), "min", None)
            if least is not None and least >= _SPECIAL and index < len(sizes):
                kept.add(sizes[index])
    return kept


def _sizes_of_one(program: torch.export.ExportedProgram, examples: Examples | None) -> list[tuple[Any, str]]:
    """The symbols of dimensions whose example has the size one, and was traced with two; each with its name."""
    if examples is None or not examples.doubled:
        return []
    originals = {id(grown): before for before, grown in examples.grown}
    names = symbol_names(program)
    found: dict[Any, str] = {}
    for value, leaf in zip(user_inputs(program), _leaves(examples), strict=True):
        if (before := originals.get(id(leaf))) is None:
            continue
        for symbol, size in zip(_sizes(value), before.shape, strict=True):
            if size == 1 and symbol in names and symbol in program.range_constraints:
                found[symbol] = names[symbol]
    return list(found.items())


def _leaves(examples: Examples) -> list[Any]:
    """The examples of the flat inputs."""
    return pytree.tree_leaves((examples.args, examples.kwargs or {}))


def shape_environment(program: torch.export.ExportedProgram) -> Any:
    """What torch knows of the symbols; None where all sizes are static."""
    for value in user_inputs(program):
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def symbol_names(program: torch.export.ExportedProgram) -> dict[Any, str]:
    """How each size and number that varies is found: "x.shape[0]", "n"."""
    specs = program.graph_signature.input_specs
    names = [getattr(spec.arg, "name", "") for spec in specs if spec.kind == InputKind.USER_INPUT]
    found: dict[Any, str] = {}
    for name, value in zip(names, user_inputs(program), strict=True):
        if isinstance(value, torch.SymInt):
            found.setdefault(value.node.expr, name)
        for index, symbol in enumerate(_sizes(value)):
            found.setdefault(symbol, f"{name}.shape[{index}]")
    return found


def _hints(program: torch.export.ExportedProgram) -> dict[Any, int]:
    """The examples' value of each symbol."""
    environment = shape_environment(program)
    return {symbol: int(hint) for symbol, hint in environment.backed_var_to_val.items()}


def keeps_shapes(program: torch.export.ExportedProgram, values: dict[Any, int]) -> bool | None:
    """Whether every tensor of the program has the traced shape where the symbols have these values.

    None where that cannot be told: a graph may have operators that run on real tensors alone.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    try:
        with mode, torch.no_grad():
            given = [
                _concrete(node.meta.get("val"), values) for node in program.graph.nodes if node.op == "placeholder"
            ]
            _Shapes(program.graph_module, values).run(*given)
    except (_DiffersError, IndexError, ValueError):
        return False
    except RuntimeError as error:
        # What an operator says about sizes; of its kinds those that say something about tracing.
        return False if type(error) is RuntimeError else None
    except Exception:
        return None
    return True


def _concrete(value: Any, values: dict[Any, int]) -> Any:
    """A fake tensor, or a number, with numbers for symbols."""
    if isinstance(value, torch.Tensor):
        shape, strides = ([_number(size, values) for size in sizes] for sizes in (value.shape, value.stride()))
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    return _number(value, values) if isinstance(value, torch.SymInt) else value


def _number(size: Any, values: dict[Any, int]) -> Any:
    """A size as a number; None where it depends on what is computed."""
    if not isinstance(size, torch.SymInt):
        return size
    found = size.node.expr.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    return int(found) if found.is_Integer else None


class _DiffersError(Exception):
    """A tensor has not the traced shape."""


class _Shapes(fx.Interpreter):
    """Runs the graph, and compares the shape of each result."""

    def __init__(self, module: fx.GraphModule, values: dict[Any, int]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._values = values

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            traced = pytree.tree_leaves(n.meta.get("val"))
            found = pytree.tree_leaves(result)
            if len(traced) == len(found):
                for one, other in zip(traced, found, strict=True):
                    self._compare(one, other)
        return result

    def _compare(self, traced: Any, found: Any) -> None:
        if not isinstance(traced, torch.Tensor) or not isinstance(found, torch.Tensor):
            return
        if traced.dim() != found.dim():
            raise _DiffersError
        for size, now in zip(traced.shape, found.shape, strict=True):
            expected = _number(size, self._values)
            if expected is not None and isinstance(now, int) and now != expected:
                raise _DiffersError
