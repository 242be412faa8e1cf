"""Groups of layers that see the same keys: which layer is in which, and how many positions a block of each has.

All groups take blocks from one pool, so their blocks have the same size in bytes: a group of few layers has more
positions a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from untorch.export.errors import CompileError
from untorch.export.lm.attention import Layer
from untorch.llm.blocks import BlockGroup
from untorch.ops.kv_pages import ALIGNMENT

__all__ = ["place_layers", "pool_elements"]

_MOST_POSITIONS = 256  # of a block: a sequence wastes half a block, and prefixes are known by whole blocks


def place_layers(
    layers: Sequence[Layer], block: int, max_positions: int | None, grouped: bool = True
) -> tuple[list[Layer], tuple[BlockGroup, ...]]:
    """The layers with their group and their place in its blocks, and the groups: those that see most come first.

    block: positions a block of the group that needs most elements a position. max_positions: what reaches as far is no
    window; None: unknown. grouped: False: all layers are one group.
    """
    if len({layer.dtype for layer in layers}) > 1:
        raise CompileError("the layers' keys have several dtypes: convert the model to one")
    reaches = [_reach(layer, max_positions) if grouped else (0, 0) for layer in layers]
    kinds = sorted(set(reaches), key=lambda reach: [-part if part else -math.inf for part in reach])
    needs = [
        sum(layer.elements(block) for layer, reach in zip(layers, reaches, strict=True) if reach == kind)
        for kind in kinds
    ]
    sizes = _block_sizes(needs, block)
    placed, ends = [], [0] * len(kinds)
    for layer, reach in zip(layers, reaches, strict=True):
        group = kinds.index(reach)
        placed.append(replace(layer, group=group, block=sizes[group], offset=ends[group]))
        ends[group] += layer.elements(sizes[group])
    return placed, tuple(BlockGroup(size, *kind) for size, kind in zip(sizes, kinds, strict=True))


def pool_elements(layers: Sequence[Layer]) -> int:
    """Of a block of the pool: what the largest group needs, in rows of every layer's width."""
    needed = max(layer.offset + layer.elements(layer.block) for layer in layers)
    if len({layer.group for layer in layers}) == 1:
        return needed
    row = math.lcm(ALIGNMENT, *(layer.width for layer in layers))
    # Kernels that load rows by TMA want blocks of whole rows; odd widths are not worth the room.
    return -(-needed // row) * row if row <= needed // 16 else needed


def _reach(layer: Layer, max_positions: int | None) -> tuple[int, int]:
    """Window and chunk, 0 where they are as long as the longest sequence."""
    longest = math.inf if max_positions is None else max_positions
    return layer.window if layer.window < longest else 0, layer.chunk if layer.chunk < longest else 0


def _block_sizes(needs: Sequence[int], block: int) -> list[int]:
    """Positions a block of each group, which needs so many elements for ``block``.

    As many as fit into the largest group's blocks, so that each is a multiple of the next smaller one: prefixes are
    known where the blocks of all groups end.
    """
    largest, parts = max(needs), 1
    sizes = [block] * len(needs)
    for i in sorted(range(len(needs)), key=lambda i: -needs[i]):
        fitting = min(largest // needs[i], max(_MOST_POSITIONS // block, 1))
        parts = max(fitting // parts * parts, parts)
        sizes[i] = block * parts
    return sizes
