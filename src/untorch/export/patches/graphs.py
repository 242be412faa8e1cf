"""Patches of what torch does to graphs: buffers that the model writes, decompositions, copies of programs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from untorch.export.patches.registry import patch, replaced
from untorch.ops.proxy_result import CHECK_RESULT

__all__ = [
    "changing_scalars", "checked_results", "checks_of_values", "clones_of_buffers", "constants_in_loops",
    "decomposed_index_add", "generated_only", "lstm_hidden_state", "one_copy_of_buffers", "treespec_warning",
]  # fmt: skip


@patch(
    "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._deduce_value",
    versions="2.11–2.15",
    why="Inductor takes a buffer of one element for a constant, also when the model writes into it: a step counter "
    "would keep its first value. Where another method of the file writes, it also writes small ones into the code.",
    test="test_graphs.py::test_torch_still_folds_changing_scalars",
)
@contextlib.contextmanager
def changing_scalars(reads_shared_buffers: bool) -> Iterator[None]:
    """Buffers that the model writes are no constants; nor is any, if the method reads what other methods write."""
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    original = UniformValueConstantFolder._deduce_value

    def patched(self: Any, node: torch.fx.Node) -> Any:
        # After functionalisation a write is a copy_ back into the buffer. Another method's is not seen here, and names
        # are not what they were.
        if node.op == "get_attr" and (
            reads_shared_buffers
            or any(user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users)
        ):
            return self.unknown_value
        return original(self, node)

    # Small tensors become numbers in the code, but for those that the method itself writes.
    keep: Any = contextlib.nullcontext()
    if reads_shared_buffers:
        keep = config.patch(always_keep_tensor_constants=True)
    with keep, replaced(UniformValueConstantFolder, "_deduce_value", patched):
        yield


def _kept_clone(*_: Any) -> None:
    """Stands in for a clone while no-ops are dropped."""


@patch(
    "torch._inductor.fx_passes.post_grad.remove_noop_ops",
    versions="2.11–2.15",
    why="A clone of a buffer that is written afterwards is dropped as a no-op, and an output that should have the old "
    "value has the new one.",
    test="test_graphs.py::test_torch_still_drops_clones",
)
@contextlib.contextmanager
def clones_of_buffers() -> Iterator[None]:
    """Clones of buffers that the graph writes stay."""
    from torch._inductor.fx_passes import post_grad

    original = post_grad.remove_noop_ops

    def written(node: Any) -> bool:
        if not isinstance(node, torch.fx.Node) or node.op != "get_attr":
            return False
        return any(user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users)

    def patched(graph: torch.fx.Graph) -> None:
        kept = [n for n in graph.nodes if n.target is torch.ops.aten.clone.default and written(n.args[0])]
        for node in kept:
            node.target = _kept_clone
        try:
            original(graph)
        finally:
            for node in kept:
                node.target = torch.ops.aten.clone.default

    with replaced(post_grad, "remove_noop_ops", patched):
        yield


@patch(
    "torch._inductor.compile_fx._unlift_graph",
    "torch._inductor.compile_fx.clone_preserve_strides",
    versions="2.11–2.15",
    why="AOTInductor keeps copies of all buffers for the file, as the model may write into them while it is compiled. "
    "Quantised weights are buffers: they are in memory twice, and once more for each method.",
    test="test_graphs.py::test_torch_still_copies_buffers",
)
@contextlib.contextmanager
def one_copy_of_buffers() -> Iterator[None]:
    """Buffers whose memory the graph does not write are not copied."""
    from torch._inductor import compile_fx

    original: Any = compile_fx._unlift_graph
    clone: Any = compile_fx.clone_preserve_strides  # type: ignore[attr-defined]

    def unlift(module: Any, graph: Any, signature: Any) -> Any:
        named = dict(module.named_buffers(remove_duplicate=False))
        written = {_storage(named[name]) for name in signature.buffers_to_mutate.values() if name in named}

        def copied(buffer: torch.Tensor) -> Any:
            return clone(buffer) if _storage(buffer) in written else buffer

        with replaced(compile_fx, "clone_preserve_strides", copied):
            return original(module, graph, signature)

    with replaced(compile_fx, "_unlift_graph", unlift):
        yield


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@patch(
    "torch._decomp.decompositions.one_layer_lstm",
    versions="< 2.13",
    why="The decomposition of an LSTM gives its last hidden states one dimension too many.",
    test="test_graphs.py::test_torch_gives_an_lstms_hidden_state_its_shape",
)
@contextlib.contextmanager
def lstm_hidden_state() -> Iterator[None]:
    """An LSTM's last hidden states have two dimensions."""
    from torch._decomp import decompositions

    original: Any = decompositions.one_layer_lstm

    def one_layer_lstm(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        out, states = original(*args, **kwargs)
        hidden, cell = (state.squeeze(0) if state.dim() == 3 else state for state in states)
        return out, (hidden, cell)

    with replaced(decompositions, "one_layer_lstm", one_layer_lstm):
        yield


@patch(
    "torch._inductor.decomposition.is_fbcode",
    versions="2.11–2.15",
    why="Inductor decomposes index_add into index_put, but not in bfloat16: it calls the operator there, which has no "
    "C function. index_put has one.",
    test="test_graphs.py::test_torch_still_calls_index_add_in_bfloat16",
)
@contextlib.contextmanager
def decomposed_index_add() -> Iterator[None]:
    """index_add is decomposed in every dtype."""
    from torch._inductor import decomposition

    # index_add alone asks there.
    with replaced(decomposition, "is_fbcode", lambda: True):
        yield


@patch(
    "torch._inductor.fx_utils._is_fake_tensor_same",
    "torch._inductor.decomposition.decompositions",
    versions="2.11–2.15",
    why="torch._check of a tensor's values, as RT-DETRv2 has it: Inductor subtracts two truth values to learn whether "
    "they are equal, and fails (from 2.13 on); and it calls _is_all_true, which has no C function.",
    test="test_graphs.py::test_torch_still_fails_to_compile_checks_of_values",
)
@contextlib.contextmanager
def checks_of_values() -> Iterator[None]:
    """Truth values are compared as expressions; that all of a tensor are true is a reduction."""
    from torch._inductor import decomposition, fx_utils

    original: Any = getattr(fx_utils, "_is_fake_tensor_same", None)

    def is_same(new: Any, old: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(new, torch.SymBool) and isinstance(old, torch.SymBool):
            return new.node.expr == old.node.expr
        return original(new, old, *args, **kwargs)

    table: Any = decomposition.decompositions
    own = {torch.ops.aten._is_all_true.default: torch.all, torch.ops.aten._is_any_true.default: torch.any}
    own = {operator: function for operator, function in own.items() if operator not in table}
    table.update(own)
    decomposition.fast_random_decomps.cache_clear()  # a copy of the table
    try:
        with replaced(fx_utils, "_is_fake_tensor_same", is_same) if original else contextlib.nullcontext():
            yield
    finally:
        for operator in own:
            del table[operator]
        decomposition.fast_random_decomps.cache_clear()


@patch(
    "warnings.filters",
    versions="< 2.14",
    why="Copying a program's tree specs warns about a class that torch itself uses.",
    test="test_graphs.py::test_copying_a_program_still_warns",
)
@contextlib.contextmanager
def treespec_warning() -> Iterator[None]:
    """For copying a program."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*", category=FutureWarning)
        yield


@patch(
    "torch._inductor.ir.MultiOutput.codegen",
    "torch._inductor.ir.FallbackKernel.export_extern_kernel_node",
    versions="2.11–2.15",
    why="Generated code takes what a proxy kernel returns for what the operator's fake implementation declares, and "
    "addresses memory by it. The extern nodes' JSON does not have the dtypes.",
    test="test_graphs.py::test_torch_still_believes_proxy_kernels",
)
@contextlib.contextmanager
def checked_results() -> Iterator[None]:
    """The generated code checks each result of a proxy call, and its node's metadata has their dtypes."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    codegen = ir.MultiOutput.codegen
    export_node: Any = ir.FallbackKernel.export_extern_kernel_node

    def checked_codegen(self: Any, wrapper: Any) -> None:
        call: Any = self.inputs[0]
        if isinstance(call, ir.FallbackKernel) and call.use_runtime_dispatch and V.graph.cpp_wrapper:
            check_result(self, call, wrapper)  # before torch's own check, as it mends the layout
        codegen(self, wrapper)

    def check_result(self: Any, call: Any, wrapper: Any) -> None:
        operator: Any = call.op_overload
        rank = len(self.get_size())
        sizes, strides = (wrapper.codegen_shape_tuple(dims) for dims in (self.get_size(), self.get_stride()))
        index = next((i for i, output in enumerate(_flat_outputs(call)) if output is self), 0)
        wrapper.writeline(
            f"AOTI_TORCH_ERROR_CODE_CHECK({CHECK_RESULT}({self.get_name()}, {wrapper.codegen_dtype(self.get_dtype())}, "
            f"{rank}, std::array<int64_t, {rank}>{sizes if rank else '{}'}.data(), "
            f"std::array<int64_t, {rank}>{strides if rank else '{}'}.data(), "
            f'"{operator.name()}", {index}));'
        )

    def export_with_dtypes(self: Any) -> Any:
        result = export_node(self)
        if V.graph.aot_mode:
            dtypes = (str(output.get_dtype()).removeprefix("torch.") for output in _flat_outputs(self))
            V.extern_kernel_nodes[-1].node.metadata["untorch_dtypes"] = ",".join(dtypes)
        return result

    with (
        replaced(ir.MultiOutput, "codegen", checked_codegen),
        replaced(ir.FallbackKernel, "export_extern_kernel_node", export_with_dtypes),
    ):
        yield


def _flat_outputs(call: Any) -> list[Any]:
    """The tensors that a call through the proxy executor gives, in order."""
    from torch._inductor import ir
    from torch.utils import _pytree as pytree

    return [output for output in pytree.tree_leaves(call.outputs) if isinstance(output, ir.MultiOutput)]


class _Generated(Exception):  # noqa: N818
    """Ends a compile when its code is there."""


@patch(
    "torch._inductor.codecache.AotCodeCompiler.compile",
    versions="2.11–2.15",
    why="There is no option to generate the code without compiling it, which a forecast needs. In force for check() "
    "only.",
    test="test_graphs.py::test_torch_still_compiles_what_it_generates",
)
@contextlib.contextmanager
def generated_only() -> Iterator[list[tuple[str, str | None]]]:
    """Compiles stop when their code is generated: the wrapper and the extern nodes' JSON are added to the list."""
    from torch._inductor.codecache import AotCodeCompiler

    generated: list[tuple[str, str | None]] = []

    def patched(graph: Any, wrapper: str, kernels: str, extern_nodes: str | None, *_: Any, **__: Any) -> Any:
        generated.append((wrapper, extern_nodes))
        raise _Generated

    with replaced(AotCodeCompiler, "compile", patched):
        yield generated


@patch(
    "torch._inductor.ir.WhileLoop.create",
    versions="2.11–2.15",
    why="A loop that begins with a constant of the model, torch.tensor(0) for one, ends in NotImplementedError. Where "
    "it begins with a weight and makes no step, later kernels may write into the weight.",
    test="test_graphs.py::test_torch_still_refuses_constants_in_loops",
)
@contextlib.contextmanager
def constants_in_loops() -> Iterator[None]:
    """torch.while_loop begins with copies of the model's constants."""
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings

    original: Any = ir.WhileLoop.create

    def copied(value: Any) -> Any:
        inner = value.data if isinstance(value, ir.TensorBox) else value
        inner = inner.data if isinstance(inner, ir.StorageBox) else inner
        if not isinstance(value, ir.Constant) and not isinstance(inner, ir.ConstantBuffer):
            return value
        copy: Any = lowerings[torch.ops.aten.clone.default](value)
        copy.realize()
        return copy

    def create(cond_fn: Any, body_fn: Any, carried_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return original(cond_fn, body_fn, [copied(value) for value in carried_inputs], *args, **kwargs)

    with replaced(ir.WhileLoop, "create", staticmethod(create)):
        yield
