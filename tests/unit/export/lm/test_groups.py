"""Groups of layers: which window has which block table, and how large the blocks are."""

from __future__ import annotations

import pytest
import torch

from untorch.export.lm.attention import Layer
from untorch.export.lm.groups import place_layers, pool_elements
from untorch.llm.blocks import BlockGroup


def layers(*reaches: tuple[int, int], width: int = 8, dtype: torch.dtype = torch.float32) -> list[Layer]:
    return [Layer("Attention", 2, width, width, window, chunk, dtype) for window, chunk in reaches]


def test_layers_of_one_kind_are_one_group() -> None:
    placed, groups = place_layers(layers((6, 0), (6, 0)), 16, 128)
    assert groups == (BlockGroup(16, 6),)
    assert [(layer.group, layer.block, layer.offset) for layer in placed] == [(0, 16, 0), (0, 16, 512)]
    assert pool_elements(placed) == 1024


def test_a_group_of_few_layers_has_larger_blocks() -> None:
    """As Gemma 3: five windows, one layer that sees all; blocks have the same bytes."""
    placed, groups = place_layers(layers(*[(6, 0)] * 5, (0, 0), *[(6, 0)] * 5, (0, 0)), 16, 128)
    assert groups == (BlockGroup(80), BlockGroup(16, 6))
    assert [(layer.group, layer.block) for layer in placed] == [*[(1, 16)] * 5, (0, 80), *[(1, 16)] * 5, (0, 80)]
    assert [layer.offset for layer in placed if layer.group == 1] == [i * 512 for i in range(10)]
    assert [layer.offset for layer in placed if layer.group == 0] == [0, 5 * 512]
    assert pool_elements(placed) == 10 * 512
    # Codes have scales behind them.
    placed, groups = place_layers(layers(*[(6, 0)] * 3, (0, 0), dtype=torch.int8), 32, 128)
    assert groups == (BlockGroup(96), BlockGroup(32, 6)) and pool_elements(placed) == 3 * 2 * 32 * 20


@pytest.mark.parametrize(
    ("reaches", "expected"),
    [
        ([(0, 0), (6, 0), (0, 8), (40, 0)], [(0, 0), (40, 0), (6, 0), (0, 8)]),
        ([(128, 0), (0, 0)], [(0, 0)]),  # as long as the longest sequence
        ([(0, 500), (6, 0)], [(0, 0), (6, 0)]),
    ],
)
def test_groups_that_see_most_come_first(reaches: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    placed, groups = place_layers(layers(*reaches), 16, 128)
    assert sorted((group.window, group.chunk) for group in groups) == sorted(expected)
    assert (groups[0].window, groups[0].chunk) == expected[0]
    assert [layer.window for layer in placed] == [window for window, _ in reaches]
    _, (only,) = place_layers(layers(*reaches), 16, 128, grouped=False)
    assert only == BlockGroup(16)


def test_sizes_divide_each_other() -> None:
    """Prefixes are known where blocks of all groups end."""
    _, groups = place_layers(layers(*[(6, 0)] * 12, *[(9, 0)] * 5, (0, 0)), 16, 128)
    assert groups == (BlockGroup(192), BlockGroup(32, 9), BlockGroup(16, 6))
    _, groups = place_layers(layers(*[(6, 0)] * 40, (0, 0)), 16, 128)
    assert groups == (BlockGroup(256), BlockGroup(16, 6))
    _, groups = place_layers(layers(*[(6, 0)] * 3, (0, 0)), 512, 1024)
    assert groups == (BlockGroup(512), BlockGroup(512, 6))


def test_blocks_are_whole_rows_of_all_widths() -> None:
    mixed = [*layers(*[(6, 0)] * 5, width=24), *layers((0, 0), width=32)]
    placed, groups = place_layers(mixed, 16, 128)
    assert groups == (BlockGroup(48), BlockGroup(16, 6))
    assert pool_elements(placed) == 5 * 2 * 16 * 48 == 80 * 96
    mixed = [*layers(*[(6, 0)] * 5, width=40), *layers((0, 0), width=64)]
    placed, _ = place_layers(mixed, 16, 128)
    assert pool_elements(placed) % 320 == 0
