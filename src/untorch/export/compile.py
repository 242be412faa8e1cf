"""One method: torch.export, the passes, AOTInductor, and what came out of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from untorch.export.absent_gpu import refuse_native_attention
from untorch.export.coverage import find_missing, needed_symbols, raise_if_missing
from untorch.export.cuda import CudaTarget
from untorch.export.errors import CompileError
from untorch.export.inductor import run_inductor
from untorch.export.kernel_choice import Choices
from untorch.export.kernel_sources import SUFFIX
from untorch.export.library import find_runtime_library
from untorch.export.mutations import WRITTEN_ELSEWHERE, Mutations, find_mutations
from untorch.export.options import ExportOptions
from untorch.export.passes import PassReport, run_passes
from untorch.export.progress import Progress
from untorch.export.signature import describe_inputs, describe_outputs
from untorch.export.targets import CpuTarget, compiler_features
from untorch.export.torch_patches import compile_patches, generated_only
from untorch.export.tracing import export_program, refuse_fused_attention
from untorch.export.weights import Constant, parse_constants
from untorch.runtime.elf import parse_elf, read_elf

__all__ = [
    "CompiledMethod", "GeneratedCode", "MethodInput", "TracedMethod", "compile_method", "generate_code",
    "temporary_folder", "trace_method",
]  # fmt: skip


@dataclass
class MethodInput:
    """What the caller gave for one method."""

    name: str
    model: torch.nn.Module | torch.export.ExportedProgram
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any] | None = None
    dynamic_shapes: Any = None


@dataclass
class TracedMethod:
    """A method as a graph, with its tensors as attributes.

    ``refusal``: what torch.export said with PyTorch's fused attention, where it refused the method for that.
    """

    method: MethodInput
    program: torch.export.ExportedProgram
    module: fx.GraphModule
    refusal: str | None = None


@dataclass
class CompiledMethod:
    """A compiled method, ready to be packed."""

    name: str
    program: torch.export.ExportedProgram
    files: dict[str, bytes]
    library: str
    extern_nodes: str | None
    constants: list[Constant]
    tensors: dict[str, torch.Tensor]
    on_gpu: frozenset[str]  # tensors that are for the GPU and lie on the CPU, as it is not there
    mutations: Mutations
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any] | None]
    operators: list[str]
    features: list[str]
    passes: list[PassReport] = field(default_factory=list)
    device: str = "cpu"
    gpu_architecture: str | None = None
    choices: Choices = field(default_factory=dict)


@dataclass(frozen=True)
class GeneratedCode:
    """What Inductor wrote for a method, before the host's part is compiled; ``nodes`` are the graph's, by name."""

    wrapper: str
    extern_nodes: str | None
    nodes: dict[str, fx.Node]


def trace_method(
    method: MethodInput, target: CpuTarget, options: ExportOptions, progress: Progress, gpu: CudaTarget | None = None
) -> TracedMethod:
    """torch.export of one method, on ``gpu`` if there is one. Raises CompileError or InvalidArgumentError."""
    on_gpu = _on(gpu)
    with torch.no_grad(), on_gpu, compile_patches(target, gpu is not None):
        with progress.step(f"{method.name}: torch.export"):
            program, refusal = export_program(method, options, _is_on(gpu))
        module = program.module()
    assert isinstance(module, fx.GraphModule)
    return TracedMethod(method, program, module, refusal)


def compile_method(
    traced: TracedMethod,
    target: CpuTarget,
    options: ExportOptions,
    folder: Path,
    progress: Progress,
    gpu: CudaTarget | None = None,
) -> CompiledMethod:
    """Compiles one method with its files below ``folder``; for ``gpu``, if there is one, on which it lies.

    Raises CompileError, UnsupportedOperatorsError or UnsupportedError.
    """
    method, program, module = traced.method, traced.program, traced.module
    if options.matmul == "auto" and gpu is None:
        raise CompileError(
            f"method {method.name!r}: option matmul: 'auto' is for CUDA, and this method is for the CPU: leave it out"
        )
    device = "cpu" if gpu is None else "cuda"
    on_gpu = _on(gpu)
    reads_states = bool(module.meta.get(WRITTEN_ELSEWHERE))
    with torch.no_grad(), on_gpu, compile_patches(target, gpu is not None, reads_states):
        model = method.model if isinstance(method.model, torch.nn.Module) else None
        mutations = find_mutations(module.graph)
        # Where the program's tensors lie now; for a GPU that is absent that is the CPU, and all of them go to the GPU.
        home = "cuda" if _is_on(gpu) else "cpu"
        inputs, outputs = describe_inputs(program, model, mutations, home), describe_outputs(program, home)
        with progress.step(f"{method.name}: passes"):
            passes = _run_passes(traced, options, gpu)
        if gpu is not None and gpu.absent is not None:
            refuse_native_attention(module, passes, method.name, gpu.absent)
        nodes = {node.name: node for node in module.graph.nodes}
        with progress.step(f"{method.name}: AOTInductor"):
            produced = run_inductor(method.name, program, module, target, options, folder, gpu)
            from torch._inductor.cpp_builder import get_cpp_compiler

            features = compiler_features(target, get_cpp_compiler())
    paths = {Path(file).name: Path(file) for file in produced.paths}
    library = _one(paths, ".so", method.name)
    wrapper = _one(paths, ".wrapper.cpp", method.name)
    _check_device(method.name, paths.get(library.removesuffix(".so") + "_metadata.json"), device)
    nodes_name = library.removesuffix(".so") + ".json"
    extern_nodes = paths[nodes_name].read_text() if nodes_name in paths else None
    if extern_nodes is not None and not json.loads(extern_nodes).get("nodes"):
        extern_nodes = None
    source = paths[wrapper].read_text()
    data = paths[library].read_bytes()
    operators = needed_symbols(parse_elf(data, library))
    available = read_elf(find_runtime_library()).exported()
    missing = find_missing(operators, extern_nodes, available, wrapper=source, nodes=nodes, device=device)
    raise_if_missing(missing, f"method {method.name!r}")
    packed = {
        name: path.read_bytes()
        for name, path in paths.items()
        if name == library
        or name == library.removesuffix(".so") + "_metadata.json"
        or (name == nodes_name and extern_nodes is not None)
        or (options.keep_sources and path.suffix in (".cpp", ".h", ".json"))
    }
    if options.keep_sources and gpu is not None:
        stem = library.removesuffix(".so")
        packed |= {f"{stem}.{i}{SUFFIX}": text.encode() for i, text in enumerate(produced.sources)}
    return CompiledMethod(
        name=method.name,
        program=program,
        files=packed,
        library=library,
        extern_nodes=nodes_name if extern_nodes is not None else None,
        constants=parse_constants(source),
        tensors=produced.tensors,
        on_gpu=produced.on_gpu,
        mutations=mutations,
        inputs=inputs,
        outputs=outputs,
        operators=operators,
        features=features,
        passes=passes,
        device=device,
        gpu_architecture=None if gpu is None else gpu.architecture,
        choices=produced.choices,
    )


def generate_code(
    method: MethodInput, target: CpuTarget, options: ExportOptions, folder: Path, gpu: CudaTarget | None = None
) -> GeneratedCode:
    """Does what compile_method does up to the generated code. Raises CompileError or UnsupportedError."""
    on_gpu = _on(gpu)
    with torch.no_grad(), on_gpu, compile_patches(target, gpu is not None), generated_only() as generated:
        program, refusal = export_program(method, options, _is_on(gpu))
        module = program.module()
        assert isinstance(module, fx.GraphModule)
        passes = _run_passes(TracedMethod(method, program, module, refusal), options, gpu)
        if gpu is not None and gpu.absent is not None:
            refuse_native_attention(module, passes, method.name, gpu.absent)
        nodes = {node.name: node for node in module.graph.nodes}
        wrapper, extern_nodes = run_inductor(
            method.name, program, module, target, options, folder, gpu, generated
        ).paths
    return GeneratedCode(wrapper, extern_nodes or None, nodes)


@contextlib.contextmanager
def temporary_folder(key: str) -> Iterator[Path]:
    """A folder that is removed at the end.

    Its name depends on ``key`` only, because the generated code holds paths: equal exports give equal bytes. While
    another export uses the same key, a random name is taken.
    """
    import hashlib

    base = (
        Path(tempfile.gettempdir())
        / f"untorch-{os.getuid()}-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    )
    try:
        base.mkdir(mode=0o700)
        folder = base
    except FileExistsError:
        folder = Path(tempfile.mkdtemp(prefix="untorch-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_device(name: str, metadata: Path | None, device: str) -> None:
    """Inductor takes the device from the graph: one that touches no GPU becomes a model for the CPU."""
    compiled = json.loads(metadata.read_text()).get("AOTI_DEVICE_KEY") if metadata is not None else None
    if compiled not in (None, device):
        raise CompileError(
            f"method {name!r}: device {device!r} was asked for, and AOTInductor compiled it for {compiled!r}: the "
            f"model has no tensor on {device}"
        )


def _run_passes(traced: TracedMethod, options: ExportOptions, gpu: CudaTarget | None) -> list[PassReport]:
    name, module = traced.method.name, traced.module
    passes = run_passes(module, options, "cpu" if gpu is None else "cuda", name)
    if traced.refusal is None:
        return passes
    refuse_fused_attention(name, module, passes, traced.refusal)
    why = traced.refusal.splitlines()[0]
    text = f"traced with plain attention: with PyTorch's fused operators torch.export said: {why}"
    return [PassReport("torch_export", changed=[text]), *passes]


def _is_on(gpu: CudaTarget | None) -> bool:
    """Whether the method's tensors lie on a GPU while it is compiled."""
    return gpu is not None and gpu.absent is None


def _on(gpu: CudaTarget | None) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(gpu.device) if gpu is not None and _is_on(gpu) else contextlib.nullcontext()


def _one(paths: dict[str, Path], suffix: str, method: str) -> str:
    names = [name for name in paths if name.endswith(suffix)]
    if len(names) != 1:
        raise CompileError(
            f"method {method!r}: AOTInductor gave {len(names)} files with {suffix}, expected one: {names}"
        )
    return names[0]
