"""Makes one operator a layer and direction of RNN, LSTM and GRU modules, ``untorch::recurrent_layer``.

Inductor unrolls them: compile time grows with the length, which has to be static. The weights are packed at export.
Half types are computed in float32. A module that stays is refused if its length is dynamic.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from untorch.export.coverage import source_line
from untorch.export.errors import CompileError
from untorch.export.mutations import find_mutations
from untorch.export.passes.attributes import add_constant, attribute, remove_attribute
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.report import PassReport
from untorch.ops.packed_linear import pack_weight
from untorch.ops.recurrent import CELLS, MODULE_OPERATOR, OPERATOR

__all__ = ["serve_recurrent"]

_aten = torch.ops.aten
_CELLS: dict[Any, str] = {
    _aten.rnn_tanh.input: "tanh", _aten.rnn_relu.input: "relu", _aten.lstm.input: "lstm", _aten.gru.input: "gru",
}  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serve_recurrent(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place. Raises CompileError for a module of dynamic length that stays."""
    report = PassReport("serve_recurrent")
    mutated = find_mutations(module.graph).attributes
    weights: set[str] = set()
    for node in list(module.graph.nodes):
        if node.op != "call_function" or (node.target not in _CELLS and node.target != MODULE_OPERATOR):
            continue
        given = arguments_of(node)
        if reason := _reason_to_skip(module, node, given, mutated):
            _refuse_dynamic_length(node, given, reason)
            report.skipped[node.name] = reason
            continue
        weights |= {str(source.target) for source in given["params"]}
        with module.graph.inserting_before(node):
            results = _layers(module, node, given)
        for user in list(node.users):
            assert user.target is operator.getitem
            if user.users:  # nothing reads the cell state of a cell that has none
                user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        report.changed.append(node.name)
    for source in weights:
        reading = [n for n in module.graph.nodes if n.op == "get_attr" and n.target == source]
        for unused in [n for n in reading if not n.users]:
            module.graph.erase_node(unused)
        if all(not n.users for n in reading):
            remove_attribute(module, source)
    return report


def _refuse_dynamic_length(node: fx.Node, given: dict[str, Any], reason: str) -> None:
    """Inductor would unroll the module for the length of the example, and no other would be noticed."""
    batch_first = node.target != MODULE_OPERATOR and given["batch_first"]
    if isinstance(given["input"].meta["val"].shape[1 if batch_first else 0], int):
        return
    where = source_line(node)
    raise CompileError(
        f"{node.name}{f' ({where})' if where else ''}: the length of its sequences is dynamic, which needs "
        f"untorch::recurrent_layer, and that does not take it: {reason}. Leave this dimension out of dynamic_shapes"
    )


def _reason_to_skip(
    module: fx.GraphModule, node: fx.Node, given: dict[str, Any], mutated: frozenset[str]
) -> str | None:
    params = given["params"]
    for source in params:
        if source.op != "get_attr":
            return "a weight is computed, not a constant"
        if str(source.target) in mutated:
            return f"the model writes into the weight {source.target}"
        tensor = attribute(module, str(source.target))
        if tensor.dtype not in _DTYPES or tensor.device.type != "cpu":
            return f"a weight is {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"
    if given.get("train") and given.get("dropout"):
        return "it trains, with dropout"
    directions = 2 if given["bidirectional"] else 1
    if len(params) != given["num_layers"] * directions * (4 if given["has_biases"] else 2):
        return "it projects its hidden state (proj_size)"
    if any(user.target is not operator.getitem for user in node.users):
        return "its results are used as a whole"
    return None


def _layers(module: fx.GraphModule, node: fx.Node, given: dict[str, Any]) -> list[fx.Node]:
    """The nodes that give the module's results: the outputs, the hidden states, and an LSTM's cell states."""
    graph = module.graph
    ragged = node.target == MODULE_OPERATOR
    cell = given["cell"] if ragged else _CELLS[node.target]
    lstm = cell == "lstm"
    batch_first = not ragged and given["batch_first"]
    states = list(given["hx"]) if lstm or ragged else [given["hx"]]
    x, dtype = given["input"], given["input"].meta["val"].dtype
    if dtype != torch.float32:
        x = add_call(graph, node, _aten.to.dtype, (x, torch.float32))
        states = [add_call(graph, node, _aten.to.dtype, (state, torch.float32)) for state in states]
    if batch_first:
        x = add_call(graph, node, _aten.transpose.int, (x, 0, 1))
    directions = 2 if given["bidirectional"] else 1
    each = 4 if given["has_biases"] else 2
    last: list[list[fx.Node]] = [[], []]
    for layer in range(given["num_layers"]):
        outs = []
        for direction in range(directions):
            k = layer * directions + direction
            params = given["params"][k * each : (k + 1) * each]
            own = [_stored(module, source, packed=i < 2, hidden=i == 1) for i, source in enumerate(params)]
            first, second = own[2:] or (None, None)
            h, *c = (add_call(graph, node, _aten.select.int, (state, 0, k)) for state in states)
            arguments = (
                x, own[0], own[1], first, second, h, c[0] if c else None, given.get("lengths"), cell, direction == 1,
            )  # fmt: skip
            call = add_call(graph, node, OPERATOR, arguments)
            out, *rest = (add_call(graph, node, operator.getitem, (call, i)) for i in range(3))
            outs.append(out)
            for values, value in zip(last, rest, strict=True):
                values.append(value)
        x = outs[0] if directions == 1 else add_call(graph, node, _aten.cat.default, (outs, -1))
    if batch_first:
        x = add_call(graph, node, _aten.transpose.int, (x, 0, 1))
    results = [x, *(add_call(graph, node, _aten.stack.default, (values,)) for values in last[: 1 + lstm])]
    if dtype != torch.float32:
        results = [add_call(graph, node, _aten.to.dtype, (result, dtype)) for result in results]
    return results


def _stored(module: fx.GraphModule, source: fx.Node, packed: bool, hidden: bool) -> fx.Node:
    """The constant of a parameter in float32, packed if it is a weight.

    The weight of the hidden state, which every step reads, stays bfloat16 if it is.
    """
    name = str(source.target)
    tensor = attribute(module, name).detach()
    if not hidden or tensor.dtype != torch.bfloat16:
        tensor = tensor.to(torch.float32)
    node = add_constant(
        module, f"{name}_{'packed' if packed else 'float'}", pack_weight(tensor) if packed else tensor, source
    )
    value = source.meta["val"]
    stored = attribute(module, str(node.target))
    node.meta["val"] = value.new_empty(stored.shape, dtype=stored.dtype)
    return node


assert set(_CELLS.values()) == set(CELLS)
