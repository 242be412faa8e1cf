"""Every monkey-patch of torch that untorch makes, in force only while a model is compiled.

| patch | torch | why | test that fails when it is no longer needed |
|---|---|---|---|
| vector_isa | 2.11–2.15 | Inductor probes a vector ISA by loading a library that it links like the model. With our library among `custom_op_libs` the probe cannot be loaded, and Inductor falls back to scalar code without a word. A target other than the build machine's own cannot be probed at all. | test_compile.py::test_the_isa_probe_still_fails_with_custom_op_libs |
| march | < 2.13 | There is no `cpp.march`: the flag -march=native is fixed. | test_compile.py::test_torch_has_cpp_march |
| changing_scalars | 2.11–2.15 | Inductor takes a buffer of one element for a constant, also when the model writes into it: a step counter would stay at its first value. Where another method of the file writes, it also writes small ones into the code. | test_changing_scalars.py::test_torch_still_folds_them |
| clones_of_buffers | 2.11–2.15 | A clone of a buffer that is written afterwards is dropped as doing nothing, and an output that is to have the value of before has that of after. | test_changing_scalars.py::test_torch_still_drops_clones |
| small_loops | 2.11–2.15 | With `cpp.dynamic_threads` Inductor opens a parallel region for every loop, however small; starting threads costs more than a few thousand elements do. Loops whose size is known and small stay on one thread. | test_small_loops.py::test_torch_still_parallelises_small_loops |
| cuda_home | 2.11–2.15 | torch takes the folder above the first `nvcc` on the PATH for the toolkit, also where that is a link or a script, and then finds no headers. | test_cuda.py::test_torch_still_takes_the_folder_above_nvcc |
| lstm_hidden_state | 2.11 | The decomposition of an LSTM gives its last hidden states a dimension too many. | test_compile.py::test_torch_gives_an_lstms_hidden_state_its_shape |
| generated_only | 2.13 | There is no way to have the code generated and not compiled, which a forecast needs. In force for `check` only. | test_fallbacks.py::test_torch_still_compiles_what_it_generates |
| treespec_warning | 2.13 | Copying a program's tree specs warns about a class that torch itself uses. | test_compile.py::test_copying_a_program_still_warns |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from untorch.export.cuda import cuda_home
from untorch.export.targets import CpuTarget

__all__ = ["compile_patches", "generated_only", "has_cpp_march", "torch_version", "treespec_warning"]


@contextlib.contextmanager
def compile_patches(target: CpuTarget, cuda: bool = False, reads_states: bool = False) -> Iterator[None]:
    """All patches, for one compile for ``target``, for CUDA if so, of a method that reads what others write if so."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(treespec_warning())
        stack.enter_context(_changing_scalars(reads_states))
        stack.enter_context(_clones_of_buffers())
        stack.enter_context(_small_loops())
        stack.enter_context(_lstm_hidden_state())
        if cuda:
            stack.enter_context(_cuda_home())
        if target.vector_bits is not None:
            stack.enter_context(_vector_isa(target.vector_bits))
        if target.march is not None and not has_cpp_march():
            stack.enter_context(_march(target.march))
        yield


def has_cpp_march() -> bool:
    """Whether this torch has the option ``cpp.march``."""
    from torch._inductor import config

    return hasattr(config.cpp, "march")


class _Generated(Exception):  # noqa: N818
    """Ends a compile when its code is there."""


@contextlib.contextmanager
def generated_only() -> Iterator[list[tuple[str, str | None]]]:
    """Compiles stop when their code is generated: the wrapper and the extern nodes' JSON are added to the list."""
    from torch._inductor.codecache import AotCodeCompiler

    generated: list[tuple[str, str | None]] = []

    def patched(graph: Any, wrapper: str, kernels: str, extern_nodes: str | None, *_: Any, **__: Any) -> Any:
        generated.append((wrapper, extern_nodes))
        raise _Generated

    with _replaced(AotCodeCompiler, "compile", patched):
        yield generated


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


@contextlib.contextmanager
def _vector_isa(bits: int) -> Iterator[None]:
    from torch._inductor import cpu_vec_isa

    isas: list[Any] = []
    if bits:
        base: Any = cpu_vec_isa.VecAVX512 if bits == 512 else cpu_vec_isa.VecAVX2

        class Chosen(base):  # type: ignore[misc]
            """The ISA of the target, taken as given instead of being probed."""

            def __bool__(self) -> bool:
                return True

            def __hash__(self) -> int:
                return hash(str(self))

        isas.append(Chosen())
    with _replaced(cpu_vec_isa, "valid_vec_isa_list", lambda: isas):
        yield


@contextlib.contextmanager
def _march(march: str) -> Iterator[None]:
    from torch._inductor import cpp_builder

    original = cpp_builder._get_optimization_cflags

    def patched(*args: Any, **kwargs: Any) -> Any:
        def fixed(flags: list[str]) -> list[str]:
            return [f"march={march}" if flag == "march=native" else flag for flag in flags]

        result = original(*args, **kwargs)
        return (fixed(result[0]), *result[1:]) if isinstance(result, tuple) else fixed(result)

    with _replaced(cpp_builder, "_get_optimization_cflags", patched):
        yield


@contextlib.contextmanager
def _changing_scalars(reads_states: bool) -> Iterator[None]:
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    original = UniformValueConstantFolder._deduce_value

    def patched(self: Any, node: torch.fx.Node) -> Any:
        # After functionalisation a write is a copy_ back into the buffer. Another method's is not seen here, and names
        # are not what they were.
        if node.op == "get_attr" and (
            reads_states
            or any(user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users)
        ):
            return self.unknown_value
        return original(self, node)

    # Small tensors become numbers in the code, but for those that the method itself writes.
    keep: Any = config.patch(always_keep_tensor_constants=True) if reads_states else contextlib.nullcontext()
    with keep, _replaced(UniformValueConstantFolder, "_deduce_value", patched):
        yield


@contextlib.contextmanager
def _small_loops() -> Iterator[None]:
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppKernel

    original: Any = CppKernel.decide_parallel_depth

    def patched(self: Any, max_parallel_depth: Any, threads: int) -> Any:
        if any(not getattr(size, "is_number", True) for size in self.call_ranges):
            return original(self, max_parallel_depth, threads)  # may be large when it runs
        with config.patch({"cpp.dynamic_threads": False}):
            return original(self, max_parallel_depth, threads)

    with _replaced(CppKernel, "decide_parallel_depth", patched):
        yield


@contextlib.contextmanager
def _cuda_home() -> Iterator[None]:
    from torch.utils import cpp_extension

    with _replaced(cpp_extension, "CUDA_HOME", str(cuda_home())):
        yield


@contextlib.contextmanager
def treespec_warning() -> Iterator[None]:
    """For copying a program."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*", category=FutureWarning)
        yield


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _kept_clone(*_: Any) -> None:
    """Stands in for a clone while no-ops are dropped."""


@contextlib.contextmanager
def _clones_of_buffers() -> Iterator[None]:
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

    with _replaced(post_grad, "remove_noop_ops", patched):
        yield


@contextlib.contextmanager
def _lstm_hidden_state() -> Iterator[None]:
    from torch._decomp import decompositions

    original: Any = decompositions.one_layer_lstm

    def one_layer_lstm(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        out, states = original(*args, **kwargs)
        hidden, cell = (state.squeeze(0) if state.dim() == 3 else state for state in states)
        return out, (hidden, cell)

    with _replaced(decompositions, "one_layer_lstm", one_layer_lstm):
        yield
