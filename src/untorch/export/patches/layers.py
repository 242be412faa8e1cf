"""What compiles equal layers once: the hook before Inductor lowers a graph, and a C++ function for each layer."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import fx

from untorch.export.outline import (
    MAY_BE_UNALIGNED,
    OWN_NUMBERS,
    WRITTEN_OPERANDS,
    Shortened,
    lengthen,
    outline_layers,
    shorten,
)
from untorch.export.patches.origins import layer_call, layer_function
from untorch.export.patches.registry import patch, replaced
from untorch.runtime.log import INFO, log

__all__ = ["EqualLayers", "called_layers", "equal_layers"]

_T = TypeVar("_T")

# An operand as generated code takes a tensor: it belongs to the caller, so freeing it does nothing.
_OPERAND = "struct UntorchOperand : ConstantHandle { using ConstantHandle::ConstantHandle; void reset() {} };"


class EqualLayers:
    """The layers of a graph of which only a few go through AOTAutograd and Inductor's passes."""

    def __init__(self) -> None:
        self._shortened: Shortened | None = None

    def compile(self, module: fx.GraphModule, compile_module: Callable[[], _T]) -> _T:
        """What ``compile_module`` gives, which compiles the module: with few layers, else as a whole."""
        whole, modules = module.graph, dict(module._modules)
        self._shortened = shorten(whole)
        if self._shortened is None:
            return compile_module()
        module.graph = self._shortened.graph
        try:
            result = compile_module()
            if self._shortened is None:
                return result
            reason = "Inductor's passes did not run"
        except Exception as error:
            if self._shortened is None:
                raise
            reason = str(error)
        finally:
            module._modules.update(modules)  # AOTInductor removes guards
            module.graph, self._shortened = whole, None
        log(INFO, "compiled with all layers, since it failed with a few of them: %s", reason)
        return compile_module()

    def put_back(self, module: fx.GraphModule) -> None:
        """The layers that were left out. Raises LengthenError."""
        if self._shortened is not None:
            lengthen(module, self._shortened)
            self._shortened = None


@patch(
    "torch._inductor.compile_fx._recursive_post_grad_passes",
    "torch._inductor.graph.GraphLowering.make_subgraph",
    "torch._inductor.ir.InvokeSubgraph.create",
    "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.codegen_invoke_subgraph",
    versions="2.11–2.15",
    why="Inductor lowers and compiles each layer of a model, also when they are equal, and its C++ code has no "
    "functions for graphs that are called: invoke_subgraph is not implemented there, nor may it write its operands.",
    test="test_layers.py::test_torch_compiles_no_called_graphs",
)
@contextlib.contextmanager
def equal_layers(*, outlined: bool) -> Iterator[EqualLayers]:
    """Few of many equal layers go through the passes.

    outlined: they are lowered once, too, and become calls of one C++ function.
    """
    from torch._inductor import compile_fx, graph, ir
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    original_passes: Any = compile_fx._recursive_post_grad_passes
    original_subgraph: Any = graph.GraphLowering.make_subgraph
    original_create: Any = ir.InvokeSubgraph.create
    layers, depth = EqualLayers(), 0

    def passes(module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            result = original_passes(module, *args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:
            layers.put_back(module)
            if outlined:
                outline_layers(module)
        return result

    def make_subgraph(self: Any, gm: Any, example_inputs: Any, subgraph_name: str) -> Any:
        made = original_subgraph(self, gm, example_inputs, subgraph_name)
        unaligned = gm.meta.get(MAY_BE_UNALIGNED, ())
        operands = [node.target for node in gm.graph.nodes if node.op == "placeholder"]
        made.unaligned_buffers |= {made.qualify_name(operands[index]) for index in unaligned}
        return made

    def create(subgraph: Any, *operands: Any) -> Any:
        results = original_create(subgraph, *operands)
        written = subgraph.graph_module.meta.get(WRITTEN_OPERANDS, ())
        call = results[0].inputs[0]
        layout = ir.NoneLayout(device=call.get_device())
        call.mutation_outputs = [ir.MutationOutput(layout, call.inputs[index], call) for index in sorted(written)]
        return results

    with (
        replaced(compile_fx, "_recursive_post_grad_passes", passes),
        replaced(graph.GraphLowering, "make_subgraph", make_subgraph),
        replaced(ir.InvokeSubgraph, "create", staticmethod(create)),
        replaced(CppWrapperCpu, "codegen_invoke_subgraph", _write_call),
    ):
        yield layers


def called_layers(source: str) -> dict[str, int]:
    """How often generated C++ calls the functions of layers, by their names."""
    return dict(Counter(re.findall(r"^\s*call_(layer_\d+)\(", source, re.MULTILINE)))


def _write_call(self: Any, call: Any) -> None:
    """A C++ function where the graph is called first, and the call."""
    from torch._inductor.codegen.wrapper import EnterSubgraphLine, ExitSubgraphLine

    subgraph, name = call.subgraph, f"call_{call.subgraph.graph.name}"
    written = self.__dict__.setdefault("_untorch_functions", set())
    if name not in written:
        if not written:
            self.writeline(_OPERAND)
        written.add(name)
        with layer_function(name):
            _write_function(self, name, subgraph, EnterSubgraphLine, ExitSubgraphLine)
    pairs = zip(call.inputs, subgraph.graph.graph_inputs.values(), strict=True)
    layer_call(name, [operand.get_name() for operand, inner in pairs if _is_tensor(inner)])
    numbers = _own_numbers(subgraph)
    operands = [
        operand.codegen_reference()
        for operand, inner in zip(call.inputs, subgraph.graph.graph_inputs.values(), strict=True)
        if _is_tensor(inner) or inner in numbers
    ]
    results = [result.get_name() for result in call.outputs]
    for result in results:
        self.writeline(f"RAIIAtenTensorHandle {result};")
    self.writeline(f"{name}({', '.join(operands + results)});")


def _write_function(self: Any, name: str, subgraph: Any, enter: Any, leave: Any) -> None:
    from torch._inductor.virtualized import V

    graph = subgraph.graph
    tensors = [operand for operand, inner in graph.graph_inputs.items() if _is_tensor(inner)]
    numbers = _own_numbers(subgraph)
    results = [f"result_{index}" for index in range(len(graph.graph_outputs))]
    parameters = [
        f"AtenTensorHandle {operand}_handle" if _is_tensor(inner) else f"int64_t {inner}"
        for operand, inner in graph.graph_inputs.items()
        if _is_tensor(inner) or inner in numbers
    ]
    parameters += [f"RAIIAtenTensorHandle& {result}" for result in results]
    self.writeline(f"auto {name} = [&]({', '.join(parameters)}) {{")
    self.writeline(enter(self, graph))
    self.push_codegened_graph(graph)
    try:
        for operand in tensors:
            self.writeline(f"UntorchOperand {operand}({operand}_handle);")
        parent = V.graph
        with V.set_graph_handler(graph):
            graph.codegen_subgraph(parent_graph=parent)
        self.codegen_subgraph_suffix(subgraph, [], results)
    finally:
        self.pop_codegened_graph()
    self.writeline(leave(self))
    self.writeline("};")


def _own_numbers(subgraph: Any) -> list[Any]:
    """The symbols of numbers that each call brings; others are variables of the function around."""
    return [symbol.node.expr for symbol in subgraph.graph_module.meta.get(OWN_NUMBERS, ())]


def _is_tensor(value: Any) -> bool:
    from torch._inductor.ir import TensorBox

    return isinstance(value, TensorBox)
