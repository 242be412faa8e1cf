"""Makes one operator of each layer of RNN, LSTM and GRU modules, which Inductor unrolls, for one length.

On CPUs ``untorch::recurrent_layer`` for a direction, with packed weights; half types are computed in float32. On GPUs
a linear layer for the inputs of all steps, and ``untorch::recurrent_steps`` for both directions. A module that stays
is refused if its length is dynamic.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from untorch.export.coverage import source_line
from untorch.export.errors import CompileError
from untorch.export.mutations import find_mutations
from untorch.export.passes.attributes import add_constant, add_dense_constant, attribute, remove_attribute
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.merged_weights import merge_tensors
from untorch.export.passes.report import PassReport
from untorch.ops import recurrent_steps
from untorch.ops.packed_linear import pack_weight
from untorch.ops.recurrent import CELLS, MODULE_OPERATOR, OPERATOR

__all__ = ["serve_recurrent"]

_aten = torch.ops.aten
_CELLS: dict[Any, str] = {
    _aten.rnn_tanh.input: "tanh", _aten.rnn_relu.input: "relu", _aten.lstm.input: "lstm", _aten.gru.input: "gru",
}  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serve_recurrent(module: fx.GraphModule, device: str) -> PassReport:
    """Runs the pass in place. Raises CompileError for a module of dynamic length that stays."""
    report = PassReport("serve_recurrent")
    mutated = find_mutations(module.graph).attributes
    weights: set[str] = set()
    for node in list(module.graph.nodes):
        if node.op != "call_function" or (node.target not in _CELLS and node.target != MODULE_OPERATOR):
            continue
        given = arguments_of(node)
        if reason := _reason_to_skip(module, node, given, mutated, device):
            _refuse_dynamic_length(node, given, reason)
            report.skipped[node.name] = reason
            continue
        weights |= {str(source.target) for source in given["params"]}
        with module.graph.inserting_before(node):
            results = (_steps if device == "cuda" else _layers)(module, _Module(node, given))
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
        f"{node.name}{f' ({where})' if where else ''}: the length of its sequences is dynamic, which needs the "
        f"recurrent operators of untorch, and they do not take it: {reason}. Leave this dimension out of dynamic_shapes"
    )


def _reason_to_skip(
    module: fx.GraphModule, node: fx.Node, given: dict[str, Any], mutated: frozenset[str], device: str
) -> str | None:
    params = given["params"]
    for source in params:
        if source.op != "get_attr":
            return "a weight is computed, not a constant"
        if str(source.target) in mutated:
            return f"the model writes into the weight {source.target}"
        tensor = attribute(module, str(source.target))
        if tensor.dtype not in _DTYPES or (device == "cpu" and tensor.device.type != "cpu"):
            return f"a weight is {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"
    if given.get("train") and given.get("dropout"):
        return "it trains, with dropout"
    directions = 2 if given["bidirectional"] else 1
    if len(params) != given["num_layers"] * directions * (4 if given["has_biases"] else 2):
        return "it projects its hidden state (proj_size)"
    if any(user.target is not operator.getitem for user in node.users):
        return "its results are used as a whole"
    return None


class _Module:
    """A call of a recurrent module: ``input`` with time first, and what it is made of."""

    def __init__(self, node: fx.Node, given: dict[str, Any]) -> None:
        self.node, self.graph, self.given = node, node.graph, given
        ragged = node.target == MODULE_OPERATOR
        self.cell: str = given["cell"] if ragged else _CELLS[node.target]
        self.batch_first: bool = not ragged and given["batch_first"]
        self.states: list[fx.Node] = list(given["hx"]) if self.cell == "lstm" or ragged else [given["hx"]]
        self.lengths: fx.Node | None = given.get("lengths")
        self.layers: int = given["num_layers"]
        self.directions = 2 if given["bidirectional"] else 1
        self.input = self.turned(given["input"])

    def params(self, layer: int, direction: int) -> list[fx.Node]:
        """The weights of the input and of the hidden state, and their biases if there are any."""
        each = 4 if self.given["has_biases"] else 2
        first = (layer * self.directions + direction) * each
        return list(self.given["params"][first : first + each])

    def call(self, target: Any, *args: Any) -> fx.Node:
        return add_call(self.graph, self.node, target, args)

    def turned(self, x: fx.Node) -> fx.Node:
        """From the module's order of dimensions to time first, and back."""
        return self.call(_aten.transpose.int, x, 0, 1) if self.batch_first else x


def _layers(module: fx.GraphModule, given: _Module) -> list[fx.Node]:
    """The nodes that give the module's results: the outputs, the hidden states, and an LSTM's cell states."""
    call, states, lstm = given.call, given.states, given.cell == "lstm"
    x, dtype = given.input, given.input.meta["val"].dtype
    if dtype != torch.float32:
        x = call(_aten.to.dtype, x, torch.float32)
        states = [call(_aten.to.dtype, state, torch.float32) for state in states]
    last: list[list[fx.Node]] = [[], []]
    for layer in range(given.layers):
        outs = []
        for direction in range(given.directions):
            params = given.params(layer, direction)
            own = [_stored(module, source, packed=i < 2, hidden=i == 1) for i, source in enumerate(params)]
            first, second = own[2:] or (None, None)
            h, *c = (call(_aten.select.int, state, 0, layer * given.directions + direction) for state in states)
            results = call(
                OPERATOR, x, own[0], own[1], first, second, h, c[0] if c else None, given.lengths, given.cell,
                direction == 1,
            )  # fmt: skip
            out, *rest = (call(operator.getitem, results, i) for i in range(3))
            outs.append(out)
            for values, value in zip(last, rest, strict=True):
                values.append(value)
        x = outs[0] if given.directions == 1 else call(_aten.cat.default, outs, -1)
    found = [given.turned(x), *(call(_aten.stack.default, values) for values in last[: 1 + lstm])]
    return found if dtype == torch.float32 else [call(_aten.to.dtype, value, dtype) for value in found]


def _steps(module: fx.GraphModule, given: _Module) -> list[fx.Node]:
    """The same on a GPU."""
    call = given.call
    x = call(_aten.contiguous.default, given.input)  # else Inductor makes a GEMM a step
    last: list[list[fx.Node]] = [[], []]
    for layer in range(given.layers):
        params = [given.params(layer, direction) for direction in range(given.directions)]
        w_input, w_hidden, *biases = (_joined(module, sources) for sources in zip(*params, strict=True))
        first, second = biases or (None, None)
        gates = call(_aten.linear.default, x, w_input, first)
        begin, end = layer * given.directions, (layer + 1) * given.directions
        h, *c = (call(_aten.slice.Tensor, state, 0, begin, end) for state in given.states)
        weight = call(_aten.unflatten.int, w_hidden, 0, (given.directions, -1))
        bias = None if second is None else call(_aten.unflatten.int, second, 0, (given.directions, -1))
        results = call(recurrent_steps.OPERATOR, gates, weight, bias, h, c[0] if c else None, given.lengths, given.cell)
        x, *rest = (call(operator.getitem, results, i) for i in range(3))
        for values, value in zip(last, rest, strict=True):
            values.append(value)
    return [given.turned(x), *(call(_aten.cat.default, values) for values in last[: 1 + (given.cell == "lstm")])]


def _joined(module: fx.GraphModule, sources: Sequence[fx.Node]) -> fx.Node:
    """The constant of a parameter of all directions, one behind the other."""
    if len(sources) == 1:
        return sources[0]
    merged = merge_tensors([attribute(module, str(source.target)) for source in sources], 0)
    return add_dense_constant(module, f"{sources[0].target}_both", merged, sources[0])


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
