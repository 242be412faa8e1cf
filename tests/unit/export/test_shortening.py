"""Graphs of many equal layers without most of them, and with them again: nothing is computed otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.unit.export.test_outline import Block, Stack, graph_of
from untorch.export.outline import LengthenError, lengthen, shorten
from untorch.export.outline.shortening import KEPT
from untorch.export.patches.layers import EqualLayers

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

LAYERS = 12


@torch.library.custom_op("untorch_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


@scaled.register_fake
def _(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def stack(layers: int = LAYERS) -> Stack:
    torch.manual_seed(0)
    return Stack([Block(16) for _ in range(layers)])


def shortened_and_back(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[fx.GraphModule, int]:
    """The module as it is behind both, and how many layers were left out between them."""
    module = graph_of(function, *inputs)
    before, code = len(module.graph.nodes), module.code
    shortened = shorten(module.graph)
    assert shortened is not None
    assert module.code == code and len(module.graph.nodes) == before  # a copy was made
    module.graph = shortened.graph
    assert len(module.graph.nodes) < before
    lengthen(module, shortened)
    return module, shortened.left_out


def check_equal(module: nn.Module, model: Callable[..., Any]) -> None:
    with torch.no_grad():
        for rows in (1, 3, 8):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(module(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("layers", [7, 8, LAYERS, 40])
def test_the_layers_come_back(layers: int) -> None:
    model = stack(layers)
    module, left_out = shortened_and_back(model, torch.randn(3, 16))
    assert left_out >= layers - KEPT - 1
    check_equal(module, model)


def test_a_shortened_graph_is_the_model_with_few_layers() -> None:
    model = stack()
    module = graph_of(model, torch.randn(3, 16))
    shortened = shorten(module.graph)
    assert shortened is not None and shortened.left_out >= LAYERS - KEPT - 1
    module.graph = shortened.graph
    check_equal(module, Stack([*model.layers[: LAYERS - shortened.left_out - 1], model.layers[-1]]))


@pytest.mark.slow
def test_two_kinds_of_layers() -> None:
    torch.manual_seed(0)
    model = Stack([Block(16, mask) for mask in [False, False, True] * 8])
    module, left_out = shortened_and_back(model, torch.randn(3, 16))
    assert left_out >= 3
    check_equal(module, model)


def test_other_operators_in_the_place_of_each_layers_own() -> None:
    """What is in between may rewrite the graph, as AOTAutograd does; layers are found by what they read."""
    model = stack()
    module = graph_of(model, torch.randn(3, 16))
    shortened = shorten(module.graph)
    assert shortened is not None
    module.graph = shortened.graph
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.sigmoid.default:
            with module.graph.inserting_before(node):
                parts = [module.graph.call_function(torch.ops.aten.neg.default, (node.args[0],))]
                parts.append(module.graph.call_function(torch.ops.aten.exp.default, (parts[-1],)))
                parts.append(module.graph.call_function(torch.ops.aten.add.Tensor, (parts[-1], 1)))
                parts.append(module.graph.call_function(torch.ops.aten.reciprocal.default, (parts[-1],)))
            for part in parts:
                part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(parts[-1])
            module.graph.erase_node(node)
    lengthen(module, shortened)
    assert sum(node.target is torch.ops.aten.exp.default for node in module.graph.nodes) == LAYERS
    x = torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(module(x), model(x))


def parts_of(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Dimension, index and offset of each part of a constant, once where it is read as it is made."""
    parts = [node for node in graph.nodes if node.target is torch.ops.aten.select.int]
    ends = [node for node in parts if not any(user in parts for user in node.users)]
    return sorted((node.args[1], node.args[2], node.meta["val"].storage_offset()) for node in ends)


@pytest.mark.slow
def test_parts_of_constants_and_numbers_of_operators() -> None:
    """``table[i, 0]``, and rows of a cache that each layer writes at its own place."""
    torch.manual_seed(0)
    blocks, table = [Block(16) for _ in range(LAYERS)], torch.randn(LAYERS, 2, 16)
    rows = [5, 2, 9, 11, 0, 1, 3, 4, 6, 7, 8, 10]

    def run(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(blocks):
            y = torch.tanh(block(x * table[i, 0]) + table[i, 1])
            x = torch.ops.untorch_tests.write_row(y, cache, rows[i])
        return x * 2

    module, _ = shortened_and_back(run, torch.randn(3, 16), torch.zeros(LAYERS, 16))
    # No part that a layer reads is made twice, and each says where it lies.
    assert parts_of(module.graph) == parts_of(graph_of(run, torch.randn(3, 16), torch.zeros(LAYERS, 16)).graph)
    written = [n.args[2] for n in module.graph.nodes if n.target is torch.ops.untorch_tests.write_row.default]
    assert written == rows
    x, cache, expected = torch.randn(5, 16), torch.zeros(LAYERS, 16), torch.zeros(LAYERS, 16)
    with torch.no_grad():
        torch.testing.assert_close(module(x, cache), run(x, expected), rtol=0, atol=0)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0)


def test_reports_name_the_layer_of_a_copy() -> None:
    model = stack()
    module = graph_of(model, torch.randn(3, 16))
    names = iter(range(1000))
    for node in module.graph.nodes:
        node.meta["nn_module_stack"] = {"": (f"place {next(names)}", Block)}
    shortened = shorten(module.graph)
    assert shortened is not None
    full = [n.meta["nn_module_stack"] for n in module.graph.nodes if n.target is torch.ops.aten.tanh.default]
    module.graph = shortened.graph
    for node in module.graph.nodes:
        node.meta["from_node"] = [fx.traceback.NodeSource(node)]
    lengthen(module, shortened)
    assert [n.meta["nn_module_stack"] for n in module.graph.nodes if n.target is torch.ops.aten.tanh.default] == full


class Scaled(nn.Module):
    """Layers that differ in a number."""

    def __init__(self, different: bool) -> None:
        super().__init__()
        self.blocks, self.different = nn.ModuleList(Block(16) for _ in range(LAYERS)), different

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x) * (0.5 + i * self.different)
        return x


def test_what_differs_in_anything_else_stays() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    assert shorten(graph_of(Scaled(False), x).graph) is not None
    assert shorten(graph_of(Scaled(True), x).graph) is None


@pytest.mark.slow
def test_constants_of_one_element_stay() -> None:
    """Inductor computes with their values, unless an operator of a library reads them."""
    torch.manual_seed(0)
    blocks = [Block(16) for _ in range(LAYERS)]
    scales = [torch.tensor([float(i)]) for i in range(LAYERS)]

    def run(operator: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            for block, scale in zip(blocks, scales, strict=True):
                x = operator(block(x), scale)
            return x

        return function

    x = torch.randn(3, 16)
    assert shorten(graph_of(run(torch.mul), x).graph) is None
    module, _ = shortened_and_back(run(torch.ops.untorch_tests.scaled), x)
    check_equal(module, run(torch.ops.untorch_tests.scaled))


def test_results_that_others_read_stay() -> None:
    model = stack()
    model.every = True
    assert shorten(graph_of(model, torch.randn(3, 16)).graph) is None


@pytest.mark.slow
def test_layers_that_share_their_weights_stay() -> None:
    """The steps of a loop; and two blocks in turns, whose weights are in every other layer."""
    torch.manual_seed(0)
    one, other = Block(16), Block(16)
    assert shorten(graph_of(Stack([one] * LAYERS), torch.randn(3, 16)).graph) is None
    assert shorten(graph_of(Stack([one, other] * 6), torch.randn(3, 16)).graph) is None


@pytest.mark.parametrize("layers", [1, 4, 5])
def test_few_layers_stay(layers: int) -> None:
    assert shorten(graph_of(stack(layers), torch.randn(3, 16)).graph) is None


def test_layers_that_are_not_found_again() -> None:
    module = graph_of(stack(), torch.randn(3, 16))
    shortened = shorten(module.graph)
    assert shortened is not None
    other = graph_of(lambda x: x + 1, torch.randn(3, 16))
    with pytest.raises(LengthenError, match="not found again"):
        lengthen(other, shortened)
    # The layer in front of the last one is another: the ones between them might be either.
    module.graph = copy.deepcopy(shortened.graph)
    tanh = [node for node in module.graph.nodes if node.target is torch.ops.aten.tanh.default]
    tanh[-2].target = torch.ops.aten.sin.default
    with pytest.raises(LengthenError, match="not found again"):
        lengthen(module, shortened)


def test_a_constant_that_is_gone() -> None:
    model = stack()
    module = graph_of(model, torch.randn(3, 16))
    shortened = shorten(module.graph)
    assert shortened is not None
    module.graph = shortened.graph
    code = module.code
    name: Any = shortened.parts[0][5]
    delattr(module, name[0])
    with pytest.raises(LengthenError, match=f"the constant {name[0]} is no longer there"):
        lengthen(module, shortened)
    assert module.code == code


class Compiler:
    """Counts the nodes that it is given."""

    def __init__(self, module: fx.GraphModule, layers: EqualLayers, *, puts_back: bool = True) -> None:
        self.module, self.layers, self.puts_back = module, layers, puts_back
        self.nodes: list[int] = []

    def __call__(self) -> str:
        self.nodes.append(len(self.module.graph.nodes))
        if self.puts_back:
            self.layers.put_back(self.module)
        return "compiled"


def test_a_module_keeps_its_graph() -> None:
    module, layers = graph_of(stack(), torch.randn(3, 16)), EqualLayers()
    whole = module.graph
    compiler = Compiler(module, layers)
    assert layers.compile(module, compiler) == "compiled"
    assert module.graph is whole and len(compiler.nodes) == 1 and compiler.nodes[0] < len(whole.nodes)


def test_what_fails_with_few_layers_is_compiled_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    module, layers = graph_of(stack(), torch.randn(3, 16)), EqualLayers()
    whole = module.graph
    # Inductor's passes did not run.
    compiler = Compiler(module, layers, puts_back=False)
    assert layers.compile(module, compiler) == "compiled"
    assert compiler.nodes[1:] == [len(whole.nodes)]

    def fail(*arguments: Any) -> None:
        raise LengthenError("no")

    monkeypatch.setattr("untorch.export.patches.layers.lengthen", fail)
    compiler = Compiler(module, layers)
    assert layers.compile(module, compiler) == "compiled"
    assert compiler.nodes[1:] == [len(whole.nodes)] and module.graph is whole


def test_what_fails_behind_it_is_not_compiled_twice() -> None:
    module, layers = graph_of(stack(), torch.randn(3, 16)), EqualLayers()
    whole = module.graph
    calls = []

    def compile_module() -> None:
        calls.append(len(module.graph.nodes))
        layers.put_back(module)
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        layers.compile(module, compile_module)
    assert len(calls) == 1 and module.graph is whole


def test_few_layers_are_compiled_as_they_are() -> None:
    module, layers = graph_of(stack(3), torch.randn(3, 16)), EqualLayers()
    compiler = Compiler(module, layers)
    assert layers.compile(module, compiler) == "compiled"
    assert compiler.nodes == [len(module.graph.nodes)]
