"""Compiles for a GPU that this machine does not have: in a process of its own, where torch is made to see it.

The model is traced and changed on the CPU. In the child process its tensors become fake ones on the GPU, which have a
shape and no memory, and AOTInductor compiles the graph: Triton and ptxas need no GPU. Which of several configurations
of a kernel is taken says kernel_choice, as none can be timed. The values go from the parent straight into the file.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from untorch.export.absent_driver import DEVICE, forget_the_machine, pretend
from untorch.export.coverage import source_line
from untorch.export.errors import CompileError
from untorch.export.gpus import GpuModel
from untorch.export.kernel_choice import Choices, recording
from untorch.export.kernel_sources import keeping_sources
from untorch.export.matmul_choice import choosing
from untorch.export.passes import PassReport
from untorch.runtime.errors import UnsupportedError, UntorchError

__all__ = ["Produced", "compile_elsewhere", "refuse_native_attention", "require_triton"]


@dataclass
class Produced:
    """What AOTInductor made: its files, the constants' values by FQN, which of them lie on the GPU, the kernels'
    configurations and sources.
    """

    paths: list[str]
    tensors: dict[str, torch.Tensor]
    on_gpu: frozenset[str]
    choices: Choices = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)


@dataclass
class _Failure:
    """An error of torch's or Triton's in the child: many cannot be pickled."""

    reason: str
    trace: str


class _ChildError(Exception):
    """Shows where in the child it was."""


Compile = Callable[[fx.GraphModule, tuple[Any, ...], dict[str, Any]], list[Any]]


def require_triton() -> None:
    """Raises UnsupportedError where Triton, or torch's version of it, is missing."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "export: arch: kernels for a GPU that is not there are compiled by Triton, which is not installed: "
            "install the triton that belongs to this torch (3.6 for torch 2.11 to 2.13)"
        ) from error


def _tensors_by_name(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """All parameters, buffers and other tensors of a module and its submodules, by their FQN."""
    found: dict[str, torch.Tensor] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for values in (owner._parameters, owner._buffers, vars(owner)):
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    found[f"{prefix}.{name}" if prefix else name] = value
    return found


def refuse_native_attention(module: fx.GraphModule, passes: list[PassReport], method: str, gpu: GpuModel) -> None:
    """Raises CompileError for attention that is left to torch.

    Its choice among the fused operators asks the GPU, and without one it would be plain math without a word.
    """
    for node in module.graph.nodes:
        if node.target != torch.ops.aten.scaled_dot_product_attention.default:
            continue
        where = source_line(node)
        skipped = [report.skipped.get(node.name) for report in passes if report.name == "choose_attention"]
        reason = next((text for text in skipped if text), "native: the pass choose_attention was switched off")
        raise CompileError(
            f"method {method!r}: {node.name}{f' ({where})' if where else ''} would be left to PyTorch's fused "
            f"operators, which are chosen on the GPU, and {gpu.name} is not here ({reason}): use attention='math' for "
            f"plain matrix products, or compile on such a GPU"
        )


def compile_elsewhere(
    name: str,
    module: fx.GraphModule,
    example: tuple[Any, dict[str, Any]],
    gpu: GpuModel,
    compile_graph: Compile,
    tuning: Mapping[str, Mapping[str, Any]],
) -> Produced:
    """``compile_graph(module, args, kwargs)`` in a child process that takes ``gpu`` for its own.

    tuning: the configurations that are known for kernels on it, see ``kernel_choice``.

    Raises CompileError, or what the call raised if that is an error of untorch's.
    """
    values = _tensors_by_name(module)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="untorch-") as folder:
        path = Path(folder) / "produced"
        child = context.Process(target=_child, args=(path, module, example, gpu, compile_graph, tuning))
        with warnings.catch_warnings():
            # The child uses one thread, and neither locks nor the GPU of its parent.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            child.start()
        try:
            child.join()
        finally:
            if child.is_alive():
                child.kill()
                child.join()
        if not path.exists():
            raise CompileError(
                f"method {name!r}: the process that compiles for {gpu.name} ended with exit code {child.exitcode}"
            )
        result = torch.load(path, weights_only=False)
    if isinstance(result, UntorchError):
        raise result
    if isinstance(result, _Failure):
        raise CompileError(f"method {name!r}: AOTInductor failed: {result.reason}") from _ChildError(result.trace)
    paths, on_gpu, made, choices, sources = result
    missing = [fqn for fqn, source in on_gpu.items() if source not in values]
    if missing:
        raise CompileError(f"method {name!r}: AOTInductor made constants whose values are not known: {missing}")
    tensors = {fqn: values[source] for fqn, source in on_gpu.items()} | made
    return Produced(paths, tensors, frozenset(on_gpu), choices, sources)


def _child(
    path: Path,
    module: fx.GraphModule,
    example: tuple[Any, dict[str, Any]],
    gpu: GpuModel,
    compile_graph: Compile,
    tuning: Mapping[str, Mapping[str, Any]],
) -> None:
    """Writes (paths, the module's tensors by their names there, others, the kernels' configurations, their sources), an
    error, or what is left of a foreign one.
    """
    torch.set_num_threads(1)  # the parent's threads are not here
    forget_the_machine()
    result: Any
    try:
        from torch._inductor.fx_passes import joint_graph

        joint_graph.lazy_init(torch.device("cpu"))
        values: dict[int, torch.Tensor] = {}
        with (
            torch.no_grad(), pretend(gpu, values, tuning), recording(gpu.architecture) as choices,
            choosing(gpu, tuning, choices[gpu.architecture]), keeping_sources() as sources,
        ):  # fmt: skip
            args, kwargs = _place(module, example, values)
            names = {tensor.untyped_storage()._cdata: fqn for fqn, tensor in _tensors_by_name(module).items()}
            on_gpu, made, paths = {}, {}, []
            for item in compile_graph(module, args, kwargs):
                if not isinstance(item, dict):
                    paths.append(item)
                    continue
                for fqn, (tensor, _) in item.items():
                    if isinstance(tensor, torch._subclasses.FakeTensor):
                        # A constant of the code has another name there; the copy of one that is written, other memory.
                        on_gpu[fqn] = names.get(tensor.untyped_storage()._cdata, fqn)
                    else:
                        made[fqn] = tensor
        result = (paths, on_gpu, made, choices, sources)
    except UntorchError as error:
        result = error
    except Exception as error:
        result = _Failure(str(error) or type(error).__name__, traceback.format_exc())
    partial = path.with_suffix(".partial")
    torch.save(result, partial)
    partial.rename(path)


def _place(
    module: fx.GraphModule, example: tuple[Any, dict[str, Any]], values: dict[int, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes the module and its graphs one for the GPU; gives the example inputs there.

    ``values`` gets the values of the fake tensors by their id.
    """
    mode = _fake_mode(module)
    mode.allow_non_fake_inputs = True
    placed: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
        return torch.nn.Parameter(made, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else made

    def moved(value: Any) -> Any:
        return DEVICE if isinstance(value, torch.device) else value

    for owner in module.modules():
        tensors: Any
        for tensors in (owner._parameters, owner._buffers, vars(owner)):
            for name, tensor in list(tensors.items()):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if id(tensor) not in placed:
                    placed[id(tensor)] = fake(tensor)
                    values[id(placed[id(tensor)])] = tensor
                tensors[name] = placed[id(tensor)]
        if isinstance(owner, fx.GraphModule):
            for node in owner.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, moved)
                node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
                if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                    node.meta["val"] = fake(node.meta["val"])
            owner.recompile()
    args, kwargs = pytree.tree_map_only(torch.Tensor, fake, example)
    return tuple(args), dict(kwargs)


def _fake_mode(module: fx.GraphModule) -> Any:
    """The mode whose symbols the graph's sizes are made of."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for node in module.graph.nodes:
        if isinstance(value := node.meta.get("val"), FakeTensor):
            return value.fake_mode
    return FakeTensorMode()
