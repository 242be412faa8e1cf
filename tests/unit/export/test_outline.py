"""Equal layers become calls of one function: the graph computes what it did, with any sizes that vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from untorch.export.outline import (
    FEWEST_CALLS,
    MAY_BE_UNALIGNED,
    OWN_NUMBERS,
    WRITTEN_OPERANDS,
    Outlined,
    outline_layers,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
aten = torch.ops.aten


class Block(nn.Module):
    """Norm, GEMMs and activations, about as many nodes as a small decoder layer."""

    def __init__(self, width: int, mask: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)
        self.mixer = nn.Linear(width, width)
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mixer(self.norm(x))
        y = self.down(torch.sigmoid(self.gate(y)) * torch.tanh(self.up(y)))
        if self.mask:
            y = y.clamp(-0.5, 0.5).abs()
        return x + y


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module], every: bool = False) -> None:
        super().__init__()
        self.layers, self.every = nn.ModuleList(layers), every

    def forward(self, x: torch.Tensor) -> Any:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return states if self.every else x * 2


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "symbolic") -> fx.GraphModule:
    """As Inductor has it: operators, values in the nodes' metadata, constants as attributes."""
    with torch.no_grad():
        module = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            fake = next(
                n.meta["val"].fake_mode for n in module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)
            )
            node.meta["val"] = fake.from_tensor(getattr(module, node.target).detach(), static_shapes=True)
    module.graph.eliminate_dead_code()
    return module


def calls(module: fx.GraphModule) -> list[str]:
    return [n.args[1] for n in module.graph.nodes if n.target is torch.ops.higher_order.invoke_subgraph]


def check(function: Callable[..., Any], x: torch.Tensor, other: torch.Tensor, mode: str = "symbolic") -> fx.GraphModule:
    """The outlined graph, which gives the function's results for two inputs."""
    module = graph_of(function, x, mode=mode)
    check.found = outline_layers(module)  # type: ignore[attr-defined]
    with torch.no_grad():
        for value in (x, other):
            torch.testing.assert_close(module(value.clone()), function(value.clone()))
    return module


def found() -> list[Outlined]:
    return check.found  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("mode", ["symbolic", "fake"])
def test_equal_layers(mode: str) -> None:
    torch.manual_seed(0)
    stack = Stack([Block(16) for _ in range(7)])
    other = torch.randn(5 if mode == "symbolic" else 3, 16)
    module = check(stack, torch.randn(3, 16), other, mode)
    [layer] = found()
    assert layer.name == "layer_0" and layer.calls >= 6
    assert calls(module) == ["layer_0"] * layer.calls
    # The sum that ends a layer is computed with the norm of the next: the function ends with a GEMM.
    function: Any = module.layer_0
    added, last = next(n for n in function.graph.nodes if n.op == "output").args[0]
    assert added.target is aten.add.Tensor and last.target in (aten.addmm.default, aten.mm.default)
    assert function.meta[WRITTEN_OPERANDS] == frozenset()


@pytest.mark.slow
def test_two_kinds_of_layers() -> None:
    """Gemma's order: several of one kind, one of the other."""
    torch.manual_seed(0)
    kinds = [False, False, False, True] * 4
    module = check(Stack([Block(16, mask) for mask in kinds]), torch.randn(3, 16), torch.randn(8, 16))
    assert len(found()) >= 1
    saved = sum((layer.calls - 1) * layer.nodes for layer in found())
    nodes = sum(1 for n in graph_of(Stack([Block(16, m) for m in kinds]), torch.randn(3, 16)).graph.nodes
                if n.op == "call_function")  # fmt: skip
    assert saved > nodes * 0.6
    assert len(calls(module)) == sum(layer.calls for layer in found())


def test_results_that_others_read() -> None:
    """All hidden states are outputs: each call gives its own."""
    torch.manual_seed(0)
    module = check(Stack([Block(16) for _ in range(6)], every=True), torch.randn(3, 16), torch.randn(4, 16))
    assert calls(module)


def test_layers_that_differ_stay() -> None:
    torch.manual_seed(0)
    check(Stack([Block(16), Block(16), Block(16, True)]), torch.randn(3, 16), torch.randn(4, 16))
    assert found() == []
    assert FEWEST_CALLS == 3
    check(nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))), torch.randn(3, 8), torch.randn(4, 8))
    assert found() == []  # too short


def test_views_are_made_outside() -> None:
    """Two views of one tensor, and a transposed one, are read by what follows."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.linear = Block(16), nn.Linear(16, 16)

        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(self.block(pair[0] + pair[1]))
            return y.view(-1, 2, 8).transpose(0, 1).flatten(1).view(-1, 16), y[:, :16]

    torch.manual_seed(0)
    layers = [Heads() for _ in range(5)]

    def run(x: torch.Tensor) -> Any:
        pair = (x, x)
        for layer in layers:
            pair = layer(pair)
        return pair

    module = check(run, torch.randn(4, 16), torch.randn(6, 16))
    assert calls(module)
    for node in module.layer_0.graph.nodes:  # type: ignore[union-attr]
        if node.op == "output":
            assert all(result.target not in (aten.view.default, aten.transpose.int) for result in node.args[0])


def test_convolutions_stay() -> None:
    """Inductor decides on the layout of the whole graph."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.norm(self.conv(x)))
            return x + torch.sigmoid(y) * y.clamp(-1, 1).abs()

    check(Stack([Residual() for _ in range(6)]), torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8), "fake")
    assert found() == []


def test_steps_of_a_loop_stay() -> None:
    """They have the same weights, and are many."""
    torch.manual_seed(0)
    block = Block(16)
    check(Stack([block] * 9), torch.randn(3, 16), torch.randn(4, 16))
    assert found() == []


def test_elementwise_operators_stay() -> None:
    """Inductor fuses it."""

    class Pointwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.randn(16)), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x * self.scale)
            for _ in range(4):
                y = torch.tanh(y * self.scale).abs() + 1
            return x + y

    check(Stack([Pointwise() for _ in range(6)]), torch.randn(3, 16), torch.randn(4, 16))
    assert found() == []


def test_networks_of_convolutions_stay() -> None:
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.blocks = nn.Conv1d(16, 16, 1), nn.ModuleList(Block(16) for _ in range(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](self.conv(x.transpose(0, 1)).transpose(0, 1))

    check(Stack([Mixed() for _ in range(6)]), torch.randn(3, 16), torch.randn(3, 16), "fake")
    assert found() == []
    one = nn.Sequential(Mixed(), *(Block(16) for _ in range(6)))
    check(one, torch.randn(3, 16), torch.randn(3, 16), "fake")
    assert found()


@pytest.mark.parametrize("width", [16, 17])
def test_a_part_of_a_constant_for_each_layer(width: int) -> None:
    """``table[i]`` is another place for each: a call's operand, which may lie at any address."""
    torch.manual_seed(0)
    blocks, table = [Block(16) for _ in range(5)], torch.randn(5, 2, width)[:, :, :16]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(blocks)
            self.register_buffer("table", table)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, block in enumerate(self.blocks):
                x = torch.tanh(block(x * self.table[i, 0]) + self.table[i, 1])
            return x

    module = check(Scaled(), torch.randn(3, 16), torch.randn(4, 16))
    assert calls(module)
    assert len(module.layer_0.meta[MAY_BE_UNALIGNED]) == (0 if width == 16 else 2)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("width", [16, 17])
def test_a_part_of_a_tensor_for_each_layer(width: int) -> None:
    """Made before the layers, as embeddings a layer: they may lie at any address, too."""
    torch.manual_seed(0)
    blocks, mix = [Block(16) for _ in range(5)], torch.nn.Linear(16, 5 * width)

    def run(x: torch.Tensor) -> torch.Tensor:
        parts = mix(x).view(-1, 5, width).unbind(1)
        for part, block in zip(parts, blocks, strict=True):
            x = torch.tanh(block(x) + part[:, :16])
        return x

    module = check(run, torch.randn(3, 16), torch.randn(4, 16))
    assert calls(module)
    assert len(module.layer_0.meta[MAY_BE_UNALIGNED]) == (0 if width == 16 else 1)  # type: ignore[union-attr,arg-type]


@torch.library.custom_op("untorch_tests::write_row", mutates_args=("cache",))
def write_row(x: torch.Tensor, cache: torch.Tensor, row: int) -> torch.Tensor:
    cache[row] = x.sum(0)
    return x + cache[row]


@write_row.register_fake
def _(x: torch.Tensor, cache: torch.Tensor, row: int) -> torch.Tensor:
    assert row < cache.shape[0]
    return torch.empty_like(x)


def test_a_cache_that_each_layer_writes_at_its_own_place() -> None:
    """The offset of an operator of a library is a number of each call, and Inductor is told what is written."""
    torch.manual_seed(0)
    blocks = [Block(16) for _ in range(6)]

    def run(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(blocks):
            x = torch.ops.untorch_tests.write_row(block(x), cache, 2 * i)
        return x * 2

    module = graph_of(run, torch.randn(3, 16), torch.zeros(12, 16))
    [layer] = outline_layers(module)
    assert layer.calls >= 5
    function: Any = module.layer_0
    placeholders = [n for n in function.graph.nodes if n.op == "placeholder"]
    [written] = function.meta[WRITTEN_OPERANDS]
    assert tuple(placeholders[written].meta["val"].shape)[1] == 16
    [number] = function.meta[OWN_NUMBERS]
    assert placeholders[-1].meta["val"] is number
    numbers = [n.args[-1] for n in module.graph.nodes if n.target is torch.ops.higher_order.invoke_subgraph]
    assert numbers == sorted(set(numbers)) and set(numbers) <= set(range(0, 12, 2))


def test_sizes_are_taken_from_inputs() -> None:
    """A size of a tensor inside of a layer would make that tensor a result."""
    torch.manual_seed(0)

    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.block(x)
            z = torch.tanh(y.reshape(y.shape[0] * 2, 8)) * (y.shape[0] + 1)
            return z.reshape(-1, 16)

    module = check(Stack([Reshaped() for _ in range(6)]), torch.randn(3, 16), torch.randn(7, 16))
    [layer] = found()
    assert layer.calls >= 5
    sizes = [n for n in module.graph.nodes if n.target is aten.sym_size.int]
    assert len(sizes) == 1 and sizes[0].args[0].op == "placeholder"


@pytest.mark.slow
def test_sizes_that_depend_on_values_stay() -> None:
    blocks = [Block(16) for _ in range(6)]

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = x[mask]
            for block in self.blocks:
                x = block(x)
            return x

    program = torch.export.export(Chosen(), (torch.randn(4, 16), torch.tensor([True, False, True, True])))
    module = program.run_decompositions().module()
    assert isinstance(module, fx.GraphModule)
    assert outline_layers(module) == []
