"""``export``: one model, or several methods, into one .pt2 file; whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from untorch.archive import FORMAT_VERSION, MANIFEST, ArchiveWriter
from untorch.export.compile import CompiledMethod, MethodInput, compile_method, temporary_folder, trace_method
from untorch.export.cuda import Mover, resolve_device
from untorch.export.gpus import GpuModel
from untorch.export.library import find_runtime_library
from untorch.export.options import ExportOptions, resolve_options
from untorch.export.passes import PassReport
from untorch.export.progress import Progress
from untorch.export.quantize import describe_quantized, quantize_methods
from untorch.export.states import StateTable, share_states
from untorch.export.targets import CpuTarget, resolve_cpu
from untorch.export.verify import OutputDifference, verify_file
from untorch.export.weights import WeightStore
from untorch.quant.report import QuantizationReport
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["ExportReport", "MethodReport", "export"]


@dataclass(frozen=True)
class MethodReport:
    """What was made of one method. ``differences`` is filled by verify=True, one entry an output.

    ``quantization`` is what the option quantize did to it, None if it did not.
    """

    name: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any] | None]
    operators: list[str]
    passes: list[PassReport]
    differences: list[OutputDifference] = field(default_factory=list)
    quantization: QuantizationReport | None = None


@dataclass(frozen=True)
class ExportReport:
    """What was written: the path, its size, the distinct weights' bytes, the methods, and the seconds of each step."""

    path: Path
    nbytes: int
    weight_nbytes: int
    methods: dict[str, MethodReport]
    seconds: dict[str, float]


def export(
    model: torch.nn.Module | torch.export.ExportedProgram | Mapping[str, Any],
    args: tuple[Any, ...] | str | os.PathLike[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    device: str = "cpu",
    arch: str | None = None,
    options: ExportOptions | None = None,
    **option_fields: Any,
) -> ExportReport:
    """Compile ``model`` and write it to ``path``, a .pt2 file that ``untorch.load`` runs without PyTorch.

    ``export(module, (x,), "model.pt2")`` makes one method, "forward". For several methods give a dictionary:
    ``export({"encode": (encoder, (a,)), "decode": {"model": decoder, "args": (b,), "dynamic_shapes": …}}, path)``;
    equal weights are stored once. An ExportedProgram brings its own inputs, so args stays None for it.

    Args:
        model: A module, an exported program, or a dictionary of methods.
        args: Example inputs, a tuple.
        path: The file to write. A file that is there is replaced at the end, and only if everything worked.
        kwargs: Example keyword inputs.
        dynamic_shapes: As for ``torch.export.export``.
        device: "cpu", or "cuda" ("cuda:1"): compiled on that GPU, for its architecture. The model and its example
            inputs are copied there; a model that has parameters on a GPU already is taken as it is, with its inputs.
        arch: For device="cuda": the GPU to compile for, as an architecture ("sm_90") or a name ("H200"). This machine
            needs no GPU then, and none is used: the model is traced on the CPU, and no kernel is timed.
        options: See ExportOptions; its fields can also be given by name.
        option_fields: Fields of ExportOptions that replace those in ``options``.

    Raises:
        OptionError: An option has an unknown name, a wrong type or value.
        InvalidArgumentError: The arguments do not fit together.
        CompileError: torch.export or AOTInductor failed.
        UnsupportedError: The device is unknown, or this machine cannot compile for it.
        UnsupportedOperatorsError: The runtime lacks operators; all are listed.
        VerificationError: verify=True, and the file does not give eager's results.
    """
    resolved = resolve_options(options, option_fields)
    methods, target_path = _methods(model, args, path, kwargs, dynamic_shapes)
    wanted = resolved.quantize_methods([method.name for method in methods])
    gpu = resolve_device(device, arch)
    if gpu is not None and gpu.absent is not None:
        _check_absent(methods, resolved, gpu.absent)
    target = resolve_cpu(resolved.cpu)
    find_runtime_library()
    progress = Progress(resolved.progress)
    store = WeightStore()
    # The writer is opened first: a path that cannot be written is an error before minutes of compiling.
    with ArchiveWriter(target_path) as writer, temporary_folder(str(target_path.resolve())) as folder:
        compiled: list[CompiledMethod] = []
        entries: dict[str, Any] = {}
        states = StateTable()
        mover = Mover(gpu.device) if gpu is not None and gpu.absent is None else None
        methods, quantized = quantize_methods(
            methods, wanted, progress, None if gpu is None else gpu.home, by_name=resolved.quantizes_by_name
        )
        traced = []
        for method in methods:
            if mover is not None:
                with progress.step(f"{method.name}: move"):
                    method = _move(method, mover)
            traced.append(trace_method(method, target, resolved, progress, gpu))
        share_states(traced)
        for graph in traced:
            name = graph.method.name
            place = folder / name
            place.mkdir()
            int4_weights = describe_quantized(graph)
            result = compile_method(graph, target, resolved, place, progress, gpu)
            compiled.append(result)
            constants, storages = store.add_method(
                result.constants, result.tensors, result.mutations.attributes, result.device, result.on_gpu
            )
            states.add_method(name, result.device, constants, storages)
            entries[name] = _method_entry(result, constants, target, resolved)
            if int4_weights:
                entries[name]["quantization"] = int4_weights
        with progress.step("write"):
            _write(writer, compiled, store, states, entries)
            finished = writer.finish()
        differences: dict[str, list[OutputDifference]] = {}
        if resolved.verify:
            with progress.step("verify"), torch.no_grad():
                for method, result in zip(methods, compiled, strict=True):
                    differences[method.name] = verify_file(
                        finished, method.name, result.program, result.outputs, resolved.verify_tolerance
                    )
    reports = {
        r.name: MethodReport(
            r.name, r.inputs, r.outputs, r.operators, r.passes, differences.get(r.name, []), quantized.get(r.name)
        )
        for r in compiled
    }
    return ExportReport(target_path, target_path.stat().st_size, store.nbytes, reports, progress.seconds)


def _methods(
    model: Any, args: Any, path: Any, kwargs: dict[str, Any] | None, dynamic_shapes: Any
) -> tuple[list[MethodInput], Path]:
    if isinstance(model, Mapping):
        if path is None and isinstance(args, str | os.PathLike):
            args, path = None, args
        if args is not None or kwargs is not None or dynamic_shapes is not None:
            raise InvalidArgumentError(
                "export: with a dictionary of methods, args, kwargs and dynamic_shapes belong into its entries"
            )
        if not model:
            raise InvalidArgumentError("export: the dictionary of methods is empty")
        methods = [_method(name, entry) for name, entry in model.items()]
    else:
        methods = [_checked(MethodInput("forward", model, args, kwargs, dynamic_shapes))]
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(f"export: path: expected a path that ends in .pt2, got {type(path).__name__}")
    target = Path(path)
    if target.suffix != ".pt2" or not target.stem:
        raise InvalidArgumentError(f"export: path: expected a path that ends in .pt2, got {str(path)!r}")
    return methods, target


def _method(name: Any, entry: Any) -> MethodInput:
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidArgumentError(f"export: a method's name must be a Python identifier, got {name!r}")
    if isinstance(entry, torch.export.ExportedProgram):
        return MethodInput(name, entry, None)
    if isinstance(entry, Mapping):
        known = {"model", "args", "kwargs", "dynamic_shapes"}
        if unknown := entry.keys() - known:
            raise InvalidArgumentError(
                f"export: method {name!r}: unknown keys {', '.join(sorted(map(repr, unknown)))}; known are "
                f"{', '.join(sorted(known))}"
            )
        if "model" not in entry:
            raise InvalidArgumentError(f"export: method {name!r}: the key 'model' is missing")
        method = MethodInput(name, entry["model"], entry.get("args"), entry.get("kwargs"), entry.get("dynamic_shapes"))
        return _checked(method)
    if isinstance(entry, tuple) and len(entry) == 2:
        return _checked(MethodInput(name, entry[0], entry[1]))
    raise InvalidArgumentError(
        f"export: method {name!r}: expected (model, args), a dictionary or an ExportedProgram, got "
        f"{type(entry).__name__}"
    )


def _checked(method: MethodInput) -> MethodInput:
    where = f"export: method {method.name!r}"
    if isinstance(method.model, torch.export.ExportedProgram):
        if method.args is not None or method.kwargs is not None or method.dynamic_shapes is not None:
            raise InvalidArgumentError(f"{where}: an ExportedProgram has its own inputs: leave args and the like out")
        return method
    if not isinstance(method.model, torch.nn.Module):
        raise InvalidArgumentError(
            f"{where}: model: expected a torch.nn.Module or an ExportedProgram, got {type(method.model).__name__}"
        )
    if method.args is None and method.kwargs is not None:
        method.args = ()
    if isinstance(method.args, list):
        method.args = tuple(method.args)
    if not isinstance(method.args, tuple):
        raise InvalidArgumentError(
            f"{where}: args: expected a tuple of example inputs, got {type(method.args).__name__}: write (x,) for one"
        )
    return method


def _check_absent(methods: list[MethodInput], options: ExportOptions, gpu: GpuModel) -> None:
    if options.verify:
        raise InvalidArgumentError(
            f"export: verify=True runs the file, and with arch it is compiled for a GPU ({gpu.name}) that is taken to "
            f"be elsewhere: leave verify out, and run it there"
        )
    for method in methods:
        model = method.model
        parts = [*model.state_dict().values()] if isinstance(model, torch.nn.Module) else [*model.state_dict.values()]
        there = {t.device.type for t in parts if isinstance(t, torch.Tensor)} - {"cpu"}
        if there:
            raise InvalidArgumentError(
                f"export: method {method.name!r}: with arch the model is traced on the CPU, and it has tensors on "
                f"{', '.join(sorted(there))}: move it with model.cpu()"
            )


def _move(method: MethodInput, mover: Mover) -> MethodInput:
    if isinstance(method.model, torch.export.ExportedProgram):
        return replace(method, model=mover.program(method.name, method.model))
    model = mover.module(method.name, method.model)
    if model is method.model:
        return method
    return replace(method, model=model, args=mover.tree(method.args), kwargs=mover.tree(method.kwargs))


def _method_entry(
    method: CompiledMethod, constants: list[dict[str, Any]], target: CpuTarget, options: ExportOptions
) -> dict[str, Any]:
    folder = f"data/aotinductor/{method.name}"
    gpu = {} if method.gpu_architecture is None else {"gpu_architecture": method.gpu_architecture}
    return {
        "library": f"{folder}/{method.library}",
        "extern_nodes": f"{folder}/{method.extern_nodes}" if method.extern_nodes else None,
        "device": method.device,
        **gpu,
        "cpu": {"target": target.name, "architecture": target.architecture, "features": method.features},
        "inputs": method.inputs,
        "outputs": method.outputs,
        "constants": constants,
        "options": options.to_json(),
        "operators": method.operators,
    }


def _write(
    writer: ArchiveWriter,
    compiled: list[CompiledMethod],
    store: WeightStore,
    states: StateTable,
    entries: dict[str, Any],
) -> None:
    from untorch import __version__

    for method in compiled:
        for name, data in sorted(method.files.items()):
            writer.write(f"data/aotinductor/{method.name}/{name}", data)
    for name, view in store.files:
        writer.write(name, view)
    manifest = {
        "format": "untorch",
        "format_version": FORMAT_VERSION,
        "untorch_version": __version__,
        "torch_version": torch.__version__,
        "weights": store.entries,
        "states": states.entries,
        "methods": entries,
    }
    writer.write(MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False).encode())
