"""Makes ``untorch::int8_linear`` from linear layers that PT2E quantised with static ranges.

``convert_pt2e`` (torchao, X86InductorQuantizer, XNNPACKQuantizer) leaves a linear layer in floating point between
operators that quantise and dequantise:

    linear(dequantize_per_tensor(quantize_per_tensor(x, s, z)), dequantize_per_channel(int8 constant, scales), bias)

Inductor would compute that in float32, from a weight that constant folding has widened. Here it becomes one product of
integers. What is left in floating point is in the report, by name and with the reason.
"""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.passes.attributes import add_constant
from untorch.export.passes.calls import arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.report import PassReport
from untorch.ops.int8 import OPERATOR
from untorch.ops.int8_layout import INT8_MAX_K, pack_int8, padded_outputs

__all__ = ["serve_pt2e_linears"]

_LINEAR = torch.ops.aten.linear.default
_NAMESPACE = "quantized_decomposed."
# The ranges of uint8 and int8, and what takes their zero points to uint8's.
_RANGES = {(0, 255, torch.uint8): 0, (-128, 127, torch.int8): 128}


class _LeftError(Exception):
    """Why a layer stays in floating point."""


def serve_pt2e_linears(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place. What quantised and dequantised stays in the graph, where dead code is dropped later."""
    report = PassReport("serve_pt2e_linears")
    if not any(_name(node).startswith("dequantize") for node in module.graph.nodes):
        return report
    constants = Constants(module)
    stored: dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]] = {}
    for node in list(module.graph.nodes):
        sources = [_name(source) for source in node.all_input_nodes]
        if _name(node) or not any(name.startswith("dequantize") for name in sources):
            continue
        try:
            if node.target != _LINEAR:
                raise _LeftError("only linear layers are computed in integers")
            _serve(module, node, constants, stored)
        except _LeftError as reason:
            report.skipped[node.name] = f"it is computed in floating point: {reason}"
        else:
            report.changed.append(node.name)
    return report


def _serve(
    module: fx.GraphModule,
    node: fx.Node,
    constants: Constants,
    stored: dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]],
) -> None:
    x, weight, bias = arguments_of(node).values()
    source, scale, zero = _activations(x)
    value = value_of(source)
    if value is None or value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise _LeftError("its activations are not float32, bfloat16 or float16")
    added = value_of(bias)
    if bias is not None and (added is None or added.dtype != value.dtype or added.dim() != 1):
        raise _LeftError("its bias has another dtype than its activations")
    if weight not in stored:
        values, scales = _weight(weight, constants)
        packed, sums = pack_int8(values)
        padded = torch.nn.functional.pad(scales.float(), (0, padded_outputs(len(scales)) - len(scales)))
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            made = [
                add_constant(module, f"{weight.name}_{name}", tensor, weight)
                for name, tensor in (("packed", packed), ("scale", padded), ("column_sums", sums))
            ]
        for entry, tensor in zip(made, (packed, padded, sums), strict=True):
            entry.meta["val"] = value.new_empty(tensor.shape, dtype=tensor.dtype)
        stored[weight] = made[0], made[1], made[2]
    out_features = value_of(weight).shape[0]  # type: ignore[union-attr]
    with module.graph.inserting_before(node):
        given = (source, *stored[weight], bias, None, "none", out_features, "static", scale, zero)
        fused = module.graph.call_function(OPERATOR, given)
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    module.graph.erase_node(node)


def _activations(node: fx.Node) -> tuple[fx.Node, float, int]:
    """What is quantised, with its scale and its zero point in uint8."""
    if _name(node) == "dequantize_per_tensor.tensor":
        raise _LeftError(
            "its activations have a dynamic range for the whole tensor, and int8_linear has one a row: export the "
            "model that is not quantised with quantize='int8'"
        )
    if _name(node) != "dequantize_per_tensor.default":
        raise _LeftError("its activations are not quantised with a static range for the whole tensor")
    given = list(arguments_of(node).values())
    quantize = given[0]
    if _name(quantize) != "quantize_per_tensor.default" or list(arguments_of(quantize).values())[1:6] != given[1:6]:
        raise _LeftError("its activations are dequantised otherwise than they were quantised")
    scale, zero, low, high, dtype = given[1:6]
    if (low, high, dtype) not in _RANGES:
        raise _LeftError(f"its activations have the range {low} to {high}, expected 0 to 255 or -128 to 127")
    return quantize.args[0], float(scale), int(zero) + _RANGES[low, high, dtype]


def _weight(node: fx.Node, constants: Constants) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [n, k] and its scales [n]."""
    if _name(node) not in ("dequantize_per_channel.default", "dequantize_per_tensor.default"):
        raise _LeftError("its weight is not quantised")
    given = arguments_of(node)
    if not constants.is_known(given["input"]):
        raise _LeftError("its weight is computed, not a constant")
    values = constants.value(given["input"])
    if values.dtype != torch.int8 or values.dim() != 2 or values.shape[1] > INT8_MAX_K:
        raise _LeftError(
            f"its weight is {values.dtype} {tuple(values.shape)}, expected int8 with at most {INT8_MAX_K} inputs"
        )
    zeros: torch.Tensor | None
    if "axis" not in given:
        scales = torch.full((values.shape[0],), float(given["scale"]))
        zeros = torch.tensor(given["zero_point"])
    else:
        if given["axis"] != 0:
            raise _LeftError(f"the scales of its weight are along the axis {given['axis']}, expected 0")
        parts = [given["scales"], given["zero_points"]]
        if not all(part is None or constants.is_known(part) for part in parts):
            raise _LeftError("the scales of its weight are computed, not constants")
        scales = constants.value(given["scales"])
        zeros = None if given["zero_points"] is None else constants.value(given["zero_points"])
    if zeros is not None and bool(zeros.any()):
        raise _LeftError("its weight has zero points, expected a symmetric range")
    return values, scales


def _name(node: object) -> str:
    """The operator of PT2E without its namespace, or ""."""
    target = str(node.target) if isinstance(node, fx.Node) and node.op == "call_function" else ""
    return target.removeprefix(_NAMESPACE) if target.startswith(_NAMESPACE) else ""
