"""Makes ``untorch::w4a8_linear``, which multiplies in integers, from ``untorch::int4_linear`` with constant weights,
and ``untorch::nvfp4_int8_linear`` from ``untorch::nvfp4_linear``; ``untorch::int4_moe`` and ``untorch::nvfp4_moe`` get
their weights in that layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from untorch.export.mutations import find_mutations
from untorch.export.passes.attributes import add_constant, attribute, remove_unused
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.report import PassReport
from untorch.ops import int4, int4_moe, nvfp4, nvfp4_int8, nvfp4_moe, w4a8
from untorch.ops.int4_layout import unpack_int4
from untorch.ops.nvfp4_layout import BLOCK_SIZE, unpack_nvfp4
from untorch.ops.w4a8_layout import pack_nvfp4_w4a8, pack_w4a8

__all__ = ["REPACKED", "quantize_int4_activations"]

# In the module's meta: pairs of names, of a weight with its scales, and of the tensors that the pass made.
REPACKED = "untorch_repacked_int4"

# Of an operator's weights the names of the arguments, packed values first.
_WEIGHTS = {
    int4.OPERATOR: (("weight", "scale_and_zero"),),
    int4_moe.OPERATOR: (("w13", "w13_scale_and_zero"), ("w2", "w2_scale_and_zero")),
    nvfp4.OPERATOR: (("weight_packed", "block_scale", "global_scale"),),
    nvfp4_moe.OPERATOR: (("w13", "w13_scale"), ("w2", "w2_scale")),
}


def quantize_int4_activations(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place. Weights that nothing else reads are removed from the module."""
    report = PassReport("quantize_int4_activations")
    repacker = _Repacker(module)
    for node in [node for node in module.graph.nodes if node.target in _WEIGHTS]:
        given = arguments_of(node)
        x = value_of(given["x"] if "x" in given else given["hidden_states"])
        weights = _WEIGHTS[node.target]
        if reason := repacker.reason_to_skip([given[name] for names in weights for name in names], x):
            report.skipped[node.name] = reason
            continue
        inputs = 0 if x is None else int(x.shape[-1])
        with module.graph.inserting_before(node):
            operator, arguments = _MAKERS[node.target](repacker, given, inputs, node)
            result = add_call(module.graph, node, operator, arguments)
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
        report.changed.append(node.name)
    if repacker.packed:
        module.meta[REPACKED] = [(names, made) for (*names, _), made in repacker.packed.items()]
        remove_unused(module)
    return report


def _int4_linear(repacker: _Repacker, given: dict[str, Any], inputs: int, node: fx.Node) -> _Call:
    made = repacker.repacked(given["weight"], given["scale_and_zero"], given["group_size"], inputs)
    outputs = node.meta["val"].shape[-1]
    return w4a8.OPERATOR, (given["x"], *made, given["group_size"], outputs, given["bias"])


def _int4_experts(repacker: _Repacker, given: dict[str, Any], inputs: int, _: fx.Node) -> _Call:
    for names, width in zip(_WEIGHTS[int4_moe.OPERATOR], (inputs, int(given["intermediate"])), strict=True):
        made = repacker.repacked(given[names[0]], given[names[1]], given["group_size"], width)
        given |= dict(zip(names, made, strict=True))
    return int4_moe.OPERATOR, tuple(given.values())


def _nvfp4_linear(repacker: _Repacker, given: dict[str, Any], inputs: int, node: fx.Node) -> _Call:
    made = repacker.repacked_nvfp4([given[name] for name in _WEIGHTS[nvfp4.OPERATOR][0]], inputs)
    return nvfp4_int8.OPERATOR, (given["x"], *made, node.meta["val"].shape[-1], given["bias"])


def _nvfp4_experts(repacker: _Repacker, given: dict[str, Any], inputs: int, _: fx.Node) -> _Call:
    width = int(given["w13"].meta["val"].shape[1]) // 2
    for names, columns in zip(_WEIGHTS[nvfp4_moe.OPERATOR], (inputs, width), strict=True):
        made = repacker.repacked_nvfp4([given[name] for name in names], columns)
        given |= dict(zip(names, made, strict=True))
    return nvfp4_moe.OPERATOR, tuple(given.values())


_Call = tuple[Any, tuple[Any, ...]]
_MAKERS: dict[Any, Callable[..., _Call]] = {
    int4.OPERATOR: _int4_linear,
    int4_moe.OPERATOR: _int4_experts,
    nvfp4.OPERATOR: _nvfp4_linear,
    nvfp4_moe.OPERATOR: _nvfp4_experts,
}


class _Repacker:
    """Repacks weights of a module, each once for a number of inputs."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._mutated = find_mutations(module.graph).attributes
        # By the names of a weight's tensors and its inputs, padded.
        self.packed: dict[tuple[Any, ...], tuple[str, ...]] = {}

    def reason_to_skip(self, tensors: list[Any], x: torch.Tensor | None) -> str:
        """Why a call stays as it is, or ""."""
        if x is None or any(not isinstance(part, fx.Node) or part.op != "get_attr" for part in tensors):
            return "the weight is computed, not a constant"
        if written := [str(part.target) for part in tensors if str(part.target) in self._mutated]:
            return f"the model writes into the weight {written[0]}"
        for part in tensors:
            value = value_of(part)
            if value is not None and value.dim() == 3 and value.dtype == torch.int32:
                return "its weights are packed for integers already"
            if value is not None and value.dtype == torch.float8_e4m3fn and self._has_nan(str(part.target)):
                return f"scales of {part.target} are NaN"
        return ""

    def repacked(self, weight: fx.Node, scales: fx.Node, group_size: int, inputs: int) -> list[fx.Node]:
        """Nodes of the weight and its scales for w4a8_linear, where the graph inserts at the moment."""
        k = -(-inputs // group_size) * group_size

        def pack(values: torch.Tensor, scale_and_zero: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return pack_w4a8(unpack_int4(values)[:, :k], scale_and_zero[: k // group_size])

        return self._nodes([weight, scales], k, pack)

    def repacked_nvfp4(self, parts: list[fx.Node], inputs: int) -> list[fx.Node]:
        """Nodes of the weight and its block scales for nvfp4_int8_linear, likewise; and of its global scale, if that is
        one of the parts. Matrices of experts get below each other.
        """
        k = -(-inputs // w4a8.W4A8_PART) * w4a8.W4A8_PART

        def pack(packed: torch.Tensor, blocks: torch.Tensor, *scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
            codes = unpack_int4(packed) if packed.dtype == torch.int32 else unpack_nvfp4(packed).flatten(0, -2)
            missing = max(k - codes.shape[1], 0)  # a weight of an odd number of blocks
            codes = torch.nn.functional.pad(codes[:, :k], (0, missing))
            blocks = blocks.view(torch.uint8).flatten(0, -2)[:, : k // BLOCK_SIZE]
            scales = torch.nn.functional.pad(blocks, (0, missing // BLOCK_SIZE))
            whole = [one.reshape(-1).expand(codes.shape[0]).contiguous() for one in scale]
            return (*pack_nvfp4_w4a8(codes, scales.view(torch.float8_e4m3fn)), *whole)

        return self._nodes(parts, k, pack)

    def _nodes(self, parts: list[fx.Node], k: int, pack: Callable[..., tuple[torch.Tensor, ...]]) -> list[fx.Node]:
        module, names = self._module, [str(part.target) for part in parts]
        key = *names, k
        if key not in self.packed:
            made = pack(*(attribute(module, name).detach() for name in names))
            nodes = [
                add_constant(module, f"{name.replace('.', '_')}_w4a8", tensor, like)
                for name, tensor, like in zip(names, made, parts, strict=True)
            ]
            self.packed[key] = tuple(str(node.target) for node in nodes)
        else:
            nodes = [module.graph.get_attr(name) for name in self.packed[key]]
        for part, like in zip(nodes, parts, strict=True):
            stored = attribute(module, str(part.target))
            fake = value_of(like)
            if fake is not None:
                part.meta["val"] = fake.new_empty(stored.shape, dtype=stored.dtype)
        return nodes

    def _has_nan(self, name: str) -> bool:
        return bool(((attribute(self._module, name).detach().view(torch.uint8) & 127) == 127).any())
