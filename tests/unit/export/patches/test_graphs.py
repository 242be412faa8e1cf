"""Patches of what torch does to graphs: buffers that the model writes, a decomposition, copies of programs."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import untorch
from untorch.export import CompileError, export, patches
from untorch.export.patches.cpu import torch_version
from untorch.export.patches.graphs import checks_of_values, decomposed_index_add, lstm_hidden_state
from untorch.export.patches.registry import replaced


class Steps(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return x + self.steps


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_step_counter_counts(tmp_path: Path) -> None:
    export(Steps(), (torch.zeros(2),), tmp_path / "steps.pt2", progress=False)
    with untorch.load(tmp_path / "steps.pt2") as program:
        x = numpy.zeros(2, numpy.float32)
        assert [program.forward(x).tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]


def test_torch_still_folds_changing_scalars() -> None:
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

    graph = torch.fx.Graph()
    steps = graph.get_attr("steps")
    steps.meta["val"] = torch.zeros(())
    more = graph.call_function(torch.ops.aten.add.Tensor, (steps, 1))
    more.meta["val"] = torch.zeros(())
    written = graph.call_function(torch.ops.aten.copy_.default, (steps, more))
    written.meta["val"] = torch.zeros(())
    graph.output((more,))
    folder = UniformValueConstantFolder(torch.fx.GraphModule(Root(), graph))
    folder.run()
    assert more in folder.node_replacements


class Before(torch.nn.Module):
    """Gives a buffer as it was before the call changed it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.count.clone()
        self.count += x
        return before


@pytest.mark.parametrize("shape", [(), (3,), (40, 40)])
@pytest.mark.slow
def test_a_clone_has_the_value_of_before(tmp_path: Path, shape: tuple[int, ...]) -> None:
    export(Before(shape), (torch.ones(shape),), tmp_path / "before.pt2", progress=False)
    with untorch.load(tmp_path / "before.pt2") as program:
        x = numpy.ones(shape, numpy.float32)
        assert [numpy.unique(program(x)).tolist() for _ in range(3)] == [[0], [1], [2]]


def test_torch_still_drops_clones() -> None:
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    graph = torch.fx.Graph()
    count = graph.get_attr("count")
    before = graph.call_function(torch.ops.aten.clone.default, (count,))
    more = graph.call_function(torch.ops.aten.add.Tensor, (count, 1))
    written = graph.call_function(torch.ops.aten.copy_.default, (count, more))
    with torch._subclasses.FakeTensorMode():
        for node in (count, before, more, written):
            node.meta["val"] = torch.zeros(3)
    graph.output((before, written))
    remove_noop_ops(graph)
    assert before not in graph.nodes


class Buffers(torch.nn.Module):
    """One is read, one is written through a view of its memory, one is written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(64.0))
        self.register_buffer("row", torch.arange(8.0).reshape(2, 4)[1])
        self.register_buffer("count", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(x)
        self.row.mul_(2)
        return self.table + self.count + self.row.sum()


def copies_of(model: torch.nn.Module, x: torch.Tensor, path: Path) -> list[tuple[int, ...]]:
    """The shapes of buffers that torch copies while the model is exported."""
    from torch._inductor import compile_fx

    seen: list[tuple[int, ...]] = []
    clone: Any = compile_fx.clone_preserve_strides  # type: ignore[attr-defined]

    def noted(tensor: torch.Tensor) -> Any:
        seen.append(tuple(tensor.shape))
        return clone(tensor)

    with replaced(compile_fx, "clone_preserve_strides", noted):
        export(model, (x,), path, progress=False)
    return sorted(seen)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_buffers_that_are_written_alone_are_copied(tmp_path: Path) -> None:
    model = Buffers().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert copies_of(model, torch.ones(64), tmp_path / "buffers.pt2") == [(4,), (64,)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with untorch.load(tmp_path / "buffers.pt2") as program:
        x = numpy.ones(64, numpy.float32)
        for _ in range(3):
            assert numpy.array_equal(program(x), model(torch.ones(64)).numpy())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torch_still_copies_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "one_copy_of_buffers", nullcontext)
    assert copies_of(Buffers().eval(), torch.ones(64), tmp_path / "buffers.pt2") == [(4,), (64,), (64,)]


@pytest.mark.skipif(torch_version() >= (2, 14), reason="it no longer does")
def test_copying_a_program_still_warns() -> None:
    program = torch.export.export(torch.nn.Linear(16, 16), (torch.ones(16),))
    with pytest.warns(FutureWarning, match=r"isinstance\(treespec, LeafSpec\)"):
        copy.deepcopy(program.call_spec)


def test_torch_gives_an_lstms_hidden_state_its_shape() -> None:
    """From 2.13 on; the patch for older ones changes nothing there, and gives them the shape."""
    from torch._decomp import decompositions

    parameters = [torch.randn(16, 3), torch.randn(16, 4), torch.randn(16), torch.randn(16)]
    arguments = (torch.randn(5, 2, 3), (torch.zeros(2, 4), torch.zeros(2, 4)), parameters, True)
    out, states = decompositions.one_layer_lstm(*arguments)
    assert (states[0].dim() == 2) == (torch_version() >= (2, 13))
    with lstm_hidden_state():
        patched, fixed = decompositions.one_layer_lstm(*arguments)
    assert torch.equal(out, patched) and torch.equal(states[0].reshape(2, 4), fixed[0])
    assert [tuple(state.shape) for state in fixed] == [(2, 4), (2, 4)]


class Sums(torch.nn.Module):
    """Rows summed by their experts, as mixtures of experts sum tokens; columns with a factor."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.zeros_like(x).index_add_(0, places, x * 2)
        columns = x.t().index_add(1, places, x.t().flip(0), alpha=0.5)
        return rows, columns


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_index_add_in_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=2, max=64)
    x, places = torch.randn(9, 40).to(dtype), torch.randint(0, 2, (9,))
    export(Sums(), (x, places), tmp_path / "sums.pt2", dynamic_shapes=({0: batch}, {0: batch}), progress=False)
    with untorch.load(tmp_path / "sums.pt2") as program:
        for rows in (9, 2, 33):
            x, places = torch.randn(rows, 40).to(dtype), torch.randint(0, 2, (rows,))
            for found, expected in zip(program.forward(x, places), Sums()(x, places), strict=True):
                found = torch.from_dlpack(found)
                assert found.dtype == dtype and found.shape == expected.shape
                # Sums round to their dtype as eager's do; fused code rounds what is added less often.
                assert (found.double() - expected.double()).abs().max() <= 4 * torch.finfo(dtype).eps * 32


def test_torch_still_calls_index_add_in_bfloat16() -> None:
    from torch._inductor import decomposition

    x, places = torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([1, 0])
    assert decomposition.index_add(x, 0, places, x) is NotImplemented
    with decomposed_index_add():
        assert torch.equal(decomposition.index_add(x, 0, places, x), x + x)


class Checked(torch.nn.Module):
    """As transformers' torch_compilable_check of a tensor."""

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(sizes.sum() == 6, lambda: "the sizes are six together")  # type: ignore[attr-defined]
        return x * sizes.sum()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_checks_of_values(tmp_path: Path) -> None:
    x, sizes = torch.randn(3, 4), torch.tensor([1, 2, 3])
    export(Checked(), (x, sizes), tmp_path / "m.pt2", progress=False)
    with untorch.load(tmp_path / "m.pt2") as program:
        numpy.testing.assert_allclose(program(x.numpy(), sizes.numpy()), (x * 6).numpy())
        with pytest.raises(untorch.ModelError, match="Expected"):
            program(x.numpy(), sizes.numpy() + 1)
        numpy.testing.assert_allclose(program(x.numpy(), sizes.numpy()), (x * 6).numpy())


def test_torch_still_fails_to_compile_checks_of_values() -> None:
    from torch._inductor import decomposition, fx_utils
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    assert torch.ops.aten._is_all_true.default not in decomposition.select_decomp_table()
    if torch_version() < (2, 13):
        return  # it compares them in a function that cannot be replaced
    number = ShapeEnv().create_unbacked_symint()
    truths: list[Any] = [number == 1, number == 2]
    with pytest.raises(TypeError, match="unsupported operand"):
        fx_utils._is_fake_tensor_same(*truths, {})
    with checks_of_values():
        assert not fx_utils._is_fake_tensor_same(*truths, {})
        assert fx_utils._is_fake_tensor_same(truths[0], truths[0], {})
        assert torch.ops.aten._is_all_true.default in decomposition.select_decomp_table()
    assert torch.ops.aten._is_all_true.default not in decomposition.select_decomp_table()


def test_torch_still_compiles_what_it_generates() -> None:
    """When torch has an option that stops behind the generated code, generated_only is no longer needed."""
    from torch._inductor import config

    options = [name for name in config.get_config_copy() if name.startswith("aot_inductor")]
    assert not [name for name in options if "codegen_only" in name or "generate_only" in name or "skip_compile" in name]


def test_torch_still_believes_proxy_kernels() -> None:
    """Its own check is behind an environment variable, and lets other dtypes and empty results through."""
    import inspect

    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    if (write := getattr(CppWrapperCpu, "_codegen_assert_size_stride", None)) is not None:
        text = inspect.getsource(write)
        assert "_check_aoti_runtime_check_inputs_env" in text and "dtype" not in text


class Root(torch.nn.Module):
    """Newton's square root, whose counter is a constant of the model."""

    def forward(self, x: torch.Tensor) -> Any:
        def go_on(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (i < 20) & ((y * y - x).abs().max() > 1e-5)

        def step(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, (y + x / y) / 2

        return torch.while_loop(go_on, step, (torch.tensor(0), x.clone()))


@pytest.mark.filterwarnings("ignore")
def test_torch_still_refuses_constants_in_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "constants_in_loops", nullcontext)
    with pytest.raises(CompileError, match="NotImplementedError"):
        export(Root(), (torch.ones(3),), tmp_path / "model.pt2", progress=False)


@pytest.mark.slow
def test_a_loop_that_begins_with_a_constant(tmp_path: Path) -> None:
    x = torch.tensor([2.0, 9.0, 0.5])
    export(Root(), (x,), tmp_path / "model.pt2", progress=False)
    steps, root = untorch.load(tmp_path / "model.pt2")(x.numpy())
    expected = Root()(x)
    assert steps == expected[0]
    numpy.testing.assert_allclose(root, expected[1], rtol=1e-6)
