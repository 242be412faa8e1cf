"""Makes a function of equal layers, and a call of each."""

from __future__ import annotations

from operator import getitem
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic

from untorch.export.outline.equal import Layer

__all__ = ["MAY_BE_UNALIGNED", "OWN_NUMBERS", "WRITTEN_OPERANDS", "make_calls"]

# In the meta of a layer's module: the places of the operands it writes and of those that may lie at any address, and
# the numbers that each call brings.
WRITTEN_OPERANDS, MAY_BE_UNALIGNED = "untorch_written_operands", "untorch_may_be_unaligned"
OWN_NUMBERS = "untorch_own_numbers"

_ALIGNMENT = 16  # bytes


def make_calls(module: fx.GraphModule, name: str, layers: list[Layer]) -> set[fx.Node]:
    """Makes the function and its calls; gives the new nodes."""
    differing = [
        index for index in range(len(layers[0].numbers)) if len({layer.numbers[index][2] for layer in layers}) > 1
    ]
    symbols = [
        _symbol(f"{name}_number_{index}", layers[0], max(layer.numbers[index][2] for layer in layers))
        for index in differing
    ]
    function = _function(layers[0], dict(zip(differing, symbols, strict=True)))
    function.meta[MAY_BE_UNALIGNED] = frozenset(
        index for layer in layers for index, operand in enumerate(layer.operands) if not _is_aligned(operand)
    )
    setattr(module, name, function)
    made: set[fx.Node] = set()
    replaced: dict[fx.Node, fx.Node] = {}
    for layer in layers:
        numbers = [layer.numbers[index][2] for index in differing]
        operands = [replaced.get(operand, operand) for operand in layer.operands]
        made |= _call(module.graph, name, layer, operands, numbers, symbols, replaced)
    return made


def _function(layer: Layer, symbols: dict[int, torch.SymInt]) -> fx.GraphModule:
    """symbols: for the layer's numbers that are operands, by their places."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, operand in enumerate(layer.operands):
        copies[operand] = graph.placeholder(f"operand_{index}")
        copies[operand].meta["val"] = operand.meta["val"]
    numbers: dict[tuple[int, int], fx.Node] = {}
    for index, symbol in symbols.items():
        made = graph.placeholder(f"operand_{len(layer.operands) + len(numbers)}")
        made.meta["val"] = symbol
        numbers[layer.numbers[index][:2]] = made
    for place, node in enumerate(layer.nodes):
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        copy.args = tuple(numbers.get((place, index), value) for index, value in enumerate(copy.args))
    output = graph.output(tuple(copies[node] for node in layer.results))
    # Results have the strides that callers were promised.
    output.meta["user_visible_output_idxs"] = list(range(len(layer.results)))
    output.meta["original_output_strides"] = [list(node.meta["val"].stride()) for node in layer.results]
    function = fx.GraphModule(torch.nn.Module(), graph)
    function.meta[WRITTEN_OPERANDS] = layer.written
    function.meta[OWN_NUMBERS] = tuple(symbols.values())
    return function


def _is_aligned(operand: fx.Node) -> bool:
    """Whether Inductor may rely on the address: parts of tensors lie at other places in each layer."""
    value = operand.meta["val"]
    if not isinstance(value, torch.Tensor):
        return True
    begin = value.storage_offset()
    return isinstance(begin, int) and begin * value.element_size() % _ALIGNMENT == 0


def _symbol(name: str, layer: Layer, hint: int) -> torch.SymInt:
    """A number that each call brings. ``hint``: the largest, which checks of the operator are made with."""
    from torch._dynamo.source import ConstantSource

    values = (node.meta.get("val") for node in layer.nodes)
    environment: Any = next(
        value.fake_mode.shape_env for value in values if isinstance(value, torch._subclasses.FakeTensor)
    )
    source = ConstantSource(name)
    symbol = environment.create_symbol(
        hint, source, DimDynamic.DYNAMIC, None, positive=None, do_not_specialize_zero_one=True
    )
    return cast(torch.SymInt, environment.create_symintnode(symbol, hint=hint, source=source))


def _call(
    graph: fx.Graph,
    name: str,
    layer: Layer,
    operands: list[fx.Node],
    numbers: list[int],
    symbols: list[torch.SymInt],
    replaced: dict[fx.Node, fx.Node],
) -> set[fx.Node]:
    """replaced: gets the nodes that stand for the layer's own."""
    inside = set(layer.nodes)
    made: list[fx.Node] = []
    with graph.inserting_after(layer.nodes[-1]):
        function = graph.get_attr(name)
    with graph.inserting_after(function):
        call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (function, name, *operands, *numbers))
    call.meta["val"] = tuple(node.meta["val"] for node in layer.results)
    values = [operand.meta["val"] for operand in operands]
    call.meta["eager_input_vals"] = ((None, name, *values, *symbols), {})
    made.append(call)
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(layer.results):
        with graph.inserting_after(made[-1]):
            copies[node] = graph.call_function(getitem, (call, index))
        copies[node].meta.update(node.meta)
        made.append(copies[node])
    for node in layer.nodes:  # views of results
        if node in copies or not any(user not in inside for user in node.users):
            continue
        chain = [node]
        while (base := chain[-1].all_input_nodes[0]) not in copies:
            chain.append(base)
        for view in reversed(chain):
            with graph.inserting_after(made[-1]):
                copies[view] = graph.node_copy(view, lambda operand: copies.get(operand, operand))
            made.append(copies[view])
    for node, copy in copies.items():
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user not in inside)
        replaced[node] = copy
    for node in reversed(layer.nodes):
        graph.erase_node(node)
    return {call, function, *(copy for copy in made if copy.target is getitem)}
