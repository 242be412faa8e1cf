"""Takes int4 weights that PyTorch packed for this CPU's vectors to the layout that runs anywhere.

``aten._weight_int4pack_mm_for_cpu`` multiplies with weights in the order of the CPU that packed them, AVX-512's, AVX2's
or another, which neither their shape nor their bytes tell. On the machine that exports, PyTorch reads them in its own
order; so it is asked for that order, and the file has ``untorch::int4_linear`` with the same values.
"""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.errors import CompileError
from untorch.export.passes.attributes import set_attribute, unused_name
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.report import PassReport
from untorch.ops.int4 import OPERATOR
from untorch.ops.int4_layout import INNER_K_TILES, K_TILE, pack_int4

__all__ = ["repack_int4"]

_aten = torch.ops.aten

# Packed together, and apart from others: a multiple of the columns that any CPU's vectors have.
_ROWS = 512


def repack_int4(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place. The weights as they were stay in the module, where dead code is dropped later."""
    report = PassReport("repack_int4")
    nodes = [node for node in module.graph.nodes if node.target is _aten._weight_int4pack_mm_for_cpu.default]
    constants = Constants(module) if nodes else None
    stored: dict[fx.Node, str] = {}
    for node in nodes:
        assert constants is not None
        x, packed, group_size, scale_and_zero = arguments_of(node).values()
        if not constants.is_known(packed):
            report.skipped[node.name] = "the weight is computed, not a constant"
            continue
        if packed not in stored:
            stored[packed] = unused_name(module, f"{packed.name}_values")
            set_attribute(module, stored[packed], _repacked(constants.value(packed)))
        with module.graph.inserting_before(node):
            weight = module.graph.get_attr(stored[packed])
            tensor = getattr(module, stored[packed])
            weight.meta["val"] = packed.meta["val"].new_empty(tensor.shape, dtype=tensor.dtype)
            result = add_call(module.graph, node, OPERATOR, (x, weight, scale_and_zero, group_size))
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
        report.changed.append(node.name)
    return report


def _repacked(packed: torch.Tensor) -> torch.Tensor:
    """What pack_int4 gives for the values of uint8 [n, k / 2]."""
    values = _values(packed)
    tiles = max(tiles for tiles in INNER_K_TILES if values.shape[1] % (K_TILE * tiles) == 0)
    return pack_int4(values, tiles)


def _values(packed: torch.Tensor) -> torch.Tensor:
    """The values from 0 to 15 that they stand for here, uint8 [n, k].

    PyTorch packs every value's number, four bits of it at a time: what lies where is read off that. Some rows at a
    time, as that takes many bytes a value.
    """
    values = torch.cat([_values_of_rows(part) for part in torch.split(packed, _ROWS)])
    if not torch.equal(_aten._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), 1), packed):
        raise CompileError(
            "PyTorch packs int4 weights in an order that depends on n, which untorch cannot "
            "read: quantise with untorch.quant"
        )
    return values


def _values_of_rows(packed: torch.Tensor) -> torch.Tensor:
    n, k = packed.shape[0], 2 * packed.shape[1]
    numbers = torch.arange(n * k, dtype=torch.int64).reshape(n, k)
    low, high = torch.zeros(packed.numel(), dtype=torch.int64), torch.zeros(packed.numel(), dtype=torch.int64)
    for shift in range(0, (n * k - 1).bit_length(), 4):
        digits = ((numbers >> shift) & 15).to(torch.int32)
        found = _aten._convert_weight_to_int4pack_for_cpu(digits, 1).flatten().to(torch.int64)
        low |= (found & 15) << shift
        high |= (found >> 4) << shift
    values = torch.empty(n * k, dtype=torch.uint8)
    values[low], values[high] = packed.flatten() & 15, packed.flatten() >> 4
    return values.reshape(n, k)
