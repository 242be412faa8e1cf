"""Compiling a traced method: the passes, AOTInductor, and the check that the runtime serves what it calls."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from untorch.export.collector import rare_collections
from untorch.export.coverage import (
    find_missing,
    kernel_targets,
    raise_if_missing,
    refuse_complex_convolutions,
    refuse_custom_operators,
    refuse_other_devices,
)
from untorch.export.dimension_names import dimension_names, rename_dimensions
from untorch.export.errors import CompileError
from untorch.export.host_cpu import compiler_features
from untorch.export.inductor import begin_inductor
from untorch.export.kernel_calls import CALLS_FILE, read_calls
from untorch.export.kernel_sources import SUFFIX
from untorch.export.library import runtime_functions
from untorch.export.method import Compiled, Method, MethodReport
from untorch.export.mutations import WRITTEN_ELSEWHERE, Mutations, find_mutations
from untorch.export.passes import run_passes
from untorch.export.passes.calibration import PLAN
from untorch.export.passes.report import PassReport
from untorch.export.patches import called_layers, checked_sizes, generated_only, interface_table, varying_numbers
from untorch.export.signature import describe_inputs, describe_outputs
from untorch.export.target import InductorRun, Produced
from untorch.export.tracing import refuse_fused_attention, trace_method
from untorch.export.weights import parse_constants
from untorch.progress import Progress
from untorch.quant.report import QuantizationReport
from untorch.runtime.coverage import needed_functions
from untorch.runtime.elf import parse_elf
from untorch.runtime.log import INFO, log

__all__ = ["Compilation", "GeneratedCode", "begin_compile", "generate_code", "temporary_folder"]


@dataclass(frozen=True)
class GeneratedCode:
    """What Inductor wrote for a method, before the host's part is compiled; ``nodes`` are the graph's, by name."""

    wrapper: str
    extern_nodes: str | None
    nodes: dict[str, fx.Node]


@dataclass(frozen=True)
class Compilation:
    """A method that AOTInductor compiles, perhaps beside this process: that run, and what is known of the method."""

    method: Method
    run: InductorRun
    _folder: Path
    _progress: Progress
    _mutations: Mutations
    _inputs: list[dict[str, Any]]
    _outputs: list[dict[str, Any] | None]
    _passes: list[PassReport]
    _nodes: dict[str, fx.Node]
    _features: list[str]

    def finish(self) -> None:
        """Waits for it, and sets the method's ``compiled`` and ``report``.

        Raises CompileError, UnsupportedOperatorsError or UnsupportedError.
        """
        with _inductor_step(self.method, self._progress, waits=True):
            produced = self.run.finish()
        _complete(self, produced)


@rare_collections()
def begin_compile(method: Method, folder: Path, progress: Progress) -> Compilation:
    """Begins to compile a traced method with its files below ``folder``.

    Raises CompileError, UnsupportedOperatorsError or UnsupportedError.
    """
    program, module, target = method.program, method.module, method.target
    with target.compile_context(reads_shared_buffers=bool(module.meta.get(WRITTEN_ELSEWHERE))):
        model = method.model if isinstance(method.model, torch.nn.Module) else None
        mutations = find_mutations(module.graph)
        # Entries name a device only where it is not that of most tensors.
        inputs = describe_inputs(program, model, mutations, target.tensor_device)
        outputs = describe_outputs(program, target.tensor_device)
        rename_dimensions([*inputs, *outputs], dimension_names(method))
        with progress.step(f"{method.name}: passes") as show:
            passes = _run_passes(method, show)
        refuse_custom_operators(module.graph, f"method {method.name!r}", target.device)
        nodes = {node.name: node for node in module.graph.nodes}
        has_numbers = any(entry.get("scalar") for entry in inputs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_inductor_step(method, progress, waits=False))
            stack.enter_context(varying_numbers() if has_numbers else contextlib.nullcontext())
            stack.enter_context(checked_sizes(method.traced.guards))
            stack.enter_context(interface_table(inputs, mutations.attributes))
            from torch._inductor.cpp_builder import get_cpp_compiler

            features = compiler_features(target.host, get_cpp_compiler())
            run = begin_inductor(method, folder)  # last: what fails behind it would leave a process
    return Compilation(method, run, folder, progress, mutations, inputs, outputs, passes, nodes, features)


@contextlib.contextmanager
def _inductor_step(method: Method, progress: Progress, waits: bool) -> Iterator[None]:
    """Where this process works or waits: while AOTInductor begins, or until it has ended beside it."""
    if method.target.compiles_beside != waits:
        yield
        return
    with progress.step(f"{method.name}: AOTInductor"):
        yield


def _complete(begun: Compilation, produced: Produced) -> None:
    method, passes = begun.method, begun._passes
    target, options = method.target, method.options
    paths = {Path(file).name: Path(file) for file in produced.paths}
    library = _one(paths, ".so", method.name)
    wrapper = _one(paths, ".wrapper.cpp", method.name)
    stem = library.removesuffix(".so")
    _check_device(method.name, paths.get(stem + "_metadata.json"), target.device)
    nodes_name = stem + ".json"
    extern_nodes = paths[nodes_name].read_text() if nodes_name in paths else None
    if extern_nodes is not None and not json.loads(extern_nodes).get("nodes"):
        extern_nodes = None
    source = paths[wrapper].read_text()
    data = paths[library].read_bytes()
    operators = needed_functions(parse_elf(data, library))
    available = runtime_functions()
    missing = find_missing(operators, extern_nodes, available, wrapper=source, nodes=begun._nodes, device=target.device)
    raise_if_missing(missing, f"method {method.name!r}")
    packed = {
        name: _without_commands(path.read_bytes()) if path.suffix == ".cpp" else path.read_bytes()
        for name, path in paths.items()
        if name == library
        or name == stem + "_metadata.json"
        or (name == nodes_name and extern_nodes is not None)
        or (options.keep_sources and path.suffix in (".cpp", ".h", ".json"))
    }
    if options.keep_sources:
        packed |= {f"{stem}.{i}{SUFFIX}": text.encode() for i, text in enumerate(produced.sources)}
    if layers := called_layers(source):
        changed = [f"{name}: {count} calls" for name, count in layers.items()]
        passes.append(PassReport("outline_layers", changed=changed))
    method.compiled = Compiled(
        files=packed,
        library=library,
        extern_nodes=nodes_name if extern_nodes is not None else None,
        constants=parse_constants(source),
        mutations=begun._mutations,
        features=begun._features,
        produced=produced,
        kernel_calls=read_calls(begun._folder / CALLS_FILE, dimension_names(method), passes),
    )
    kernels = ", ".join(dict.fromkeys(kernel_targets(extern_nodes))) or "none"
    log(INFO, "compiled method %s for %s: %d functions of the runtime, kernels by name: %s",
        method.name, target.device, len(operators), kernels)  # fmt: skip
    method.report = MethodReport(
        method.name, begun._inputs, begun._outputs, operators, passes, quantization=_quantization(method)
    )


def generate_code(method: Method, folder: Path) -> GeneratedCode:
    """Traces a method and does what begin_compile does up to the generated code.

    Raises CompileError or UnsupportedError.
    """
    trace_method(method)
    with method.target.compile_context(), generated_only() as generated:
        _run_passes(method)
        nodes = {node.name: node for node in method.module.graph.nodes}
        wrapper, extern_nodes = begin_inductor(method, folder, generated).finish().paths
    return GeneratedCode(wrapper, extern_nodes or None, nodes)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="untorch-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _without_commands(data: bytes) -> bytes:
    """Generated C++ without the compiler's commands that Inductor adds at its end: they hold paths of this machine."""
    return re.sub(rb"^// (?:Compile|Link) cmd\n// .*\n?", b"", data, flags=re.MULTILINE)


def _check_device(name: str, metadata: Path | None, device: str) -> None:
    """Inductor takes the device from the graph: one that touches no GPU becomes a model for the CPU."""
    compiled = json.loads(metadata.read_text()).get("AOTI_DEVICE_KEY") if metadata is not None else None
    if compiled not in (None, device):
        raise CompileError(
            f"method {name!r}: device {device!r} was asked for, and AOTInductor compiled it for {compiled!r}: the "
            f"model has no tensor on {device}"
        )


def _run_passes(method: Method, show: Callable[[str], None] | None = None) -> list[PassReport]:
    refuse_complex_convolutions(method.module.graph, f"method {method.name!r}")
    target = method.target
    refuse_other_devices(method.module.graph, f"method {method.name!r}", target.device, target.architecture)
    if method.calibration is not None:
        if show is not None:
            method.calibration.show = show
        method.module.meta[PLAN] = method.calibration
    passes = run_passes(method.module, method.options, target.device, method.name, target.architecture)
    if method.traced.refusal is not None:
        refuse_fused_attention(method, passes)
    if method.traced.notes:
        passes = [PassReport("torch_export", changed=method.traced.notes), *passes]
    target.check_graph(method, passes)
    return passes


def _quantization(method: Method) -> QuantizationReport | None:
    """What was quantised of the module, and then of the graph."""
    report, plan = method.quantization, method.calibration
    if report is None or plan is None:
        return report
    saved = sum(layer.nbytes_before - layer.nbytes_after for layer in plan.layers)
    return dataclasses.replace(
        report,
        layers=(*report.layers, *plan.layers),
        skipped={**report.skipped, **plan.skipped},
        module_nbytes_after=report.module_nbytes_after - saved,
    )


def _one(paths: dict[str, Path], suffix: str, method: str) -> str:
    names = [name for name in paths if name.endswith(suffix)]
    if len(names) != 1:
        raise CompileError(
            f"method {method!r}: AOTInductor gave {len(names)} files with {suffix}, expected one: {names}"
        )
    return names[0]
