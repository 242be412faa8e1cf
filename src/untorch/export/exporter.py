"""``export``: one model, or several methods, into one .pt2 file; whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from untorch.archive import FORMAT_VERSION, MANIFEST, ArchiveWriter
from untorch.export.compile import CompiledMethod, compile_method, temporary_folder, trace_method
from untorch.export.cuda import ptxas_version
from untorch.export.kernel_choice import read_tuning, write_tuning
from untorch.export.library import find_runtime_library
from untorch.export.methods import MethodPlan, Movers, plan_methods, read_methods, read_path
from untorch.export.options import ExportOptions, resolve_options
from untorch.export.passes import PassReport
from untorch.export.progress import Progress
from untorch.export.quantize import describe_quantized, quantize_methods
from untorch.export.states import StateTable, share_states
from untorch.export.targets import CpuTarget
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
    arch: str | Sequence[str] | None = None,
    options: ExportOptions | None = None,
    **option_fields: Any,
) -> ExportReport:
    """Compile ``model`` and write it to ``path``, a .pt2 file that ``untorch.load`` runs without PyTorch.

    ``export(module, (x,), "model.pt2")`` makes one method, "forward". For several methods give a dictionary:
    ``export({"encode": (encoder, (a,)), "decode": {"model": decoder, "args": (b,), "dynamic_shapes": …}}, path)``;
    equal weights are stored once. An entry may also have a "device", an "arch" and "options" (fields of ExportOptions)
    of its own. An ExportedProgram brings its own inputs, so args stays None for it.

    Args:
        model: A module, an exported program, or a dictionary of methods.
        args: Example inputs, a tuple.
        path: The file to write. A file that is there is replaced at the end, and only if everything worked.
        kwargs: Example keyword inputs.
        dynamic_shapes: As for ``torch.export.export``.
        device: "cpu", or "cuda" ("cuda:1"): compiled on that GPU, for its architecture. The model and its example
            inputs are copied there; a model that has parameters on a GPU already is taken as it is, with its inputs.
        arch: For device="cuda": the GPU to compile for, as an architecture ("sm_90") or a name ("H200"), or a list of
            them: the file has code for each, and ``load`` takes what is for its GPU. This machine needs no GPU then,
            and none is used: the model is traced on the CPU, and no kernel is timed.
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
    if isinstance(model, Mapping) and path is None and isinstance(args, str | os.PathLike):
        args, path = None, args
    requests, target_path = read_methods(model, args, kwargs, dynamic_shapes), read_path(path)
    wanted = resolved.quantize_methods([request.method.name for request in requests])
    plans = plan_methods(requests, device, arch, resolved)
    _check_tuning(plans)
    find_runtime_library()
    progress = Progress(resolved.progress)
    store = WeightStore()
    # The writer is opened first: a path that cannot be written is an error before minutes of compiling.
    with ArchiveWriter(target_path) as writer, temporary_folder(str(target_path.resolve())) as folder:
        compiled: list[tuple[str, CompiledMethod]] = []
        entries: dict[str, Any] = {}
        states = StateTable()
        homes = {None if gpu is None or gpu.home == "cpu" else gpu.home for plan in plans for gpu in plan.gpus}
        methods, quantized = quantize_methods(
            [plan.method for plan in plans], wanted, progress, homes.pop() if len(homes) == 1 else None,
            by_name=resolved.quantizes_by_name,
        )  # fmt: skip
        movers = Movers()
        traced = []
        for method, plan in zip(methods, plans, strict=True):
            for gpu in plan.gpus:
                moved = method
                if gpu is not None and gpu.absent is None:
                    with progress.step(f"{method.name}: move"):
                        moved = movers.move(method, gpu)
                traced.append((plan, gpu, trace_method(moved, plan.target, plan.options, progress, gpu)))
        share_states([graph for _, _, graph in traced])
        for plan, gpu, graph in traced:
            name = graph.method.name
            is_variant = name in entries
            quantized_weights = describe_quantized(graph)
            place = folder / (f"{name}.{gpu.architecture}" if gpu is not None and is_variant else name)
            place.mkdir()
            result = compile_method(graph, plan.target, plan.options, place, progress, gpu)
            compiled.append((place.name, result))
            constants, storages = store.add_method(
                result.constants, result.tensors, result.mutations.attributes, result.device, result.on_gpu
            )
            states.add_method(name, result.device, constants, storages, result.gpu_architecture)
            if is_variant:
                entries[name].setdefault("variants", []).append(_code_entry(place.name, result, constants))
                continue
            entries[name] = _method_entry(result, constants, plan.target, plan.options)
            if quantized_weights:
                entries[name]["quantization"] = quantized_weights
        with progress.step("write"):
            _write(writer, compiled, store, states, entries)
            finished = writer.finish()
        differences: dict[str, list[OutputDifference]] = {}
        if resolved.verify:
            with progress.step("verify"), torch.no_grad():
                for (plan, _, _), (_, result) in zip(traced, compiled, strict=True):
                    differences[result.name] = verify_file(
                        finished, result.name, result.program, result.outputs, plan.options.verify_tolerance
                    )
    for (plan, _, _), (_, result) in zip(traced, compiled, strict=True):
        if plan.options.record_tuning is not None:
            write_tuning(plan.options.record_tuning, result.choices)
    reports: dict[str, MethodReport] = {}
    for _, r in compiled:
        operators = sorted({*r.operators, *(reports[r.name].operators if r.name in reports else ())})
        reports[r.name] = MethodReport(
            r.name, r.inputs, r.outputs, operators, r.passes, differences.get(r.name, []), quantized.get(r.name)
        )
    return ExportReport(target_path, target_path.stat().st_size, store.nbytes, reports, progress.seconds)


def _check_tuning(plans: Sequence[MethodPlan]) -> None:
    """Raises InvalidArgumentError before minutes of compiling."""
    for plan in plans:
        name, options = plan.method.name, plan.options
        if options.tuning is not None:
            read_tuning(options.tuning)
            if all(gpu is None or gpu.absent is None for gpu in plan.gpus):
                raise InvalidArgumentError(
                    f"method {name!r}: option tuning: a tuning file is for a GPU that is not here, arch='sm_90': on a "
                    f"GPU kernels are timed, and a CPU has none of them"
                )
        if options.record_tuning is not None:
            if plan.gpus == (None,):
                raise InvalidArgumentError(
                    f"method {name!r}: option record_tuning: there is nothing to record of kernels for the CPU: "
                    f"device='cuda' has configurations to choose from"
                )
            if Path(options.record_tuning).exists():
                read_tuning(options.record_tuning)


def _method_entry(
    method: CompiledMethod, constants: list[dict[str, Any]], target: CpuTarget, options: ExportOptions
) -> dict[str, Any]:
    code = _code_entry(method.name, method, constants)
    return {
        "library": code.pop("library"),
        "extern_nodes": code.pop("extern_nodes"),
        "device": method.device,
        **{key: code.pop(key) for key in ("gpu_architecture", "ptxas") if key in code},
        "cpu": {"target": target.name, "architecture": target.architecture, "features": method.features},
        "inputs": method.inputs,
        "outputs": method.outputs,
        "constants": code.pop("constants"),
        "options": options.to_json(),
        **code,
    }


def _code_entry(folder: str, method: CompiledMethod, constants: list[dict[str, Any]]) -> dict[str, Any]:
    """What differs between architectures."""
    place = f"data/aotinductor/{folder}"
    gpu: dict[str, Any] = {}
    if method.gpu_architecture is not None:
        gpu = {"gpu_architecture": method.gpu_architecture, "ptxas": ptxas_version(method.gpu_architecture)}
    return {
        **gpu,
        "library": f"{place}/{method.library}",
        "extern_nodes": f"{place}/{method.extern_nodes}" if method.extern_nodes else None,
        "constants": constants,
        "operators": method.operators,
    }


def _write(
    writer: ArchiveWriter,
    compiled: list[tuple[str, CompiledMethod]],
    store: WeightStore,
    states: StateTable,
    entries: dict[str, Any],
) -> None:
    from untorch import __version__

    for folder, method in compiled:
        for name, data in sorted(method.files.items()):
            writer.write(f"data/aotinductor/{folder}/{name}", data)
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
