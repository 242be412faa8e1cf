"""``export``: one model, or several methods, into one .pt2 file; whole or not at all."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from untorch.archive import EXTERNAL_VERSION, FORMAT_VERSION, ArchiveWriter
from untorch.export.compile import Compilation, begin_compile, temporary_folder
from untorch.export.coverage import kernel_targets
from untorch.export.errors import VerificationError
from untorch.export.external import open_weights
from untorch.export.kernel_choice import write_tuning
from untorch.export.library import find_runtime_library
from untorch.export.method import Method, MethodReport
from untorch.export.methods import MethodRequest, plan_methods, read_methods, read_path
from untorch.export.move import Movers
from untorch.export.mutable_buffers import MutableBuffers, share_buffers
from untorch.export.options import ExportOptions, resolve_options
from untorch.export.quantize import (
    describe_convolutions,
    describe_merged,
    describe_quantized,
    describe_repacked,
    quantize_methods,
)
from untorch.export.streaming import stream_weights
from untorch.export.torchao import convert_methods, join_reports
from untorch.export.tracing import trace_methods
from untorch.export.training_mode import warn_if_training
from untorch.export.verify import OutputDifference, verify_file
from untorch.export.weights import WeightStore
from untorch.progress import Progress
from untorch.runtime.registry import find_registration

__all__ = ["ExportReport", "export", "write_package"]

_MOST_AT_A_TIME = 8  # processes that compile: each holds a graph, and code that is being written


@dataclass(frozen=True)
class ExportReport:
    """What was written: the path, its size, the distinct weights' bytes, the methods, and the seconds of each step.

    external_files, external_nbytes: the .safetensors files that weights are taken from, and the bytes of those weights.
    """

    path: Path
    nbytes: int
    weight_nbytes: int
    methods: dict[str, MethodReport]
    seconds: dict[str, float]
    external_files: tuple[str, ...] = ()
    external_nbytes: int = 0


def export(
    model: torch.nn.Module | torch.export.ExportedProgram | None = None,
    args: tuple[Any, ...] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    methods: Mapping[str, Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    device: str = "cpu",
    arch: str | Sequence[str] | None = None,
    options: ExportOptions | None = None,
    **option_fields: Any,
) -> ExportReport:
    """Compile ``model`` and write it to ``path``, a .pt2 file that ``untorch.load`` runs without PyTorch.

    ``export(module, (x,), "model.pt2")`` makes one method, "forward". Several methods are given by name:
    ``export(methods={"encode": (encoder, (a,)), "decode": {"model": decoder, "args": (b,), "dynamic_shapes": …}},
    path="model.pt2")``; equal weights are stored once. An entry may also have a "device", an "arch" and "options"
    (fields of ExportOptions) of its own. An ExportedProgram brings its own inputs, so args stays None for it.

    Args:
        model: A module or an exported program.
        args: Example inputs, a tuple.
        path: The file to write. An existing file is replaced at the end, and only if everything worked.
        methods: Instead of model and args: a dictionary of (model, args), exported programs or dictionaries by name.
        kwargs: Example keyword inputs.
        dynamic_shapes: As for ``torch.export.export``.
        device: "cpu", or "cuda" ("cuda:1"): compiled on that GPU, for its architecture. The model and its example
            inputs are copied there; a model that has parameters on a GPU already is taken as it is, with its inputs.
        arch: For device="cuda": the cross-compilation target, as an architecture ("sm_90") or a GPU's name ("H200"), or
            a list of them: the file has code for each, and ``load`` takes the one for its GPU. This machine needs no
            GPU: the model is traced on the CPU, and no kernel is timed.
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
    requests, target_path = read_methods(model, args, kwargs, dynamic_shapes, methods), read_path(path)
    return write_package(requests, target_path, device, arch, resolved)


@dataclass(frozen=True)
class _Placed:
    """A compiled method, the name of its folder in the archive, and what the manifest says of quantised weights."""

    method: Method
    place: str
    quantized_weights: list[dict[str, Any]]


def _compile_methods(
    traced: Sequence[Method], folder: Path, progress: Progress, meanwhile: Callable[[], None]
) -> Generator[_Placed, None, None]:
    """The methods in turn, compiled.

    Those that are compiled beside this process are as many at a time as there are cores. ``meanwhile`` is called once,
    before the first is waited for.
    """
    most = min(len(os.sched_getaffinity(0)), _MOST_AT_A_TIME)
    names: set[str] = set()
    running: deque[tuple[str, Compilation, list[dict[str, Any]]]] = deque()
    waited = False

    def first() -> _Placed:
        nonlocal waited
        if not waited:
            waited = True
            meanwhile()
        place, begun, quantized_weights = running.popleft()
        begun.finish()
        return _Placed(begun.method, place, quantized_weights)

    try:
        for method in traced:
            place = f"{method.name}.{method.target.code_name}" if method.name in names else method.name
            names.add(method.name)
            (folder / place).mkdir()
            quantized_weights = describe_quantized(method)  # the passes change the graph
            running.append((place, begin_compile(method, folder / place, progress), quantized_weights))
            while running and (len(running) >= most or running[0][1].run.is_done()):
                yield first()
        while running:
            yield first()
    finally:
        for _, begun, _ in running:
            begun.run.stop()


def write_package(
    requests: Sequence[MethodRequest],
    target_path: Path,
    device: str,
    arch: str | Sequence[str] | None,
    resolved: ExportOptions,
    sections: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    checks: Sequence[Callable[[], None]] = (),
) -> ExportReport:
    """What ``export`` does once its arguments are read. Raises the same.

    sections: further members of the manifest. files: further entries of the archive, by name. checks: are called
    while methods are compiled beside this process; what they raise ends the export.
    """
    wanted = resolved.quantize_methods([request.method.name for request in requests])
    planned = plan_methods(requests, device, arch, resolved)
    find_runtime_library()
    for request in requests:
        warn_if_training(request.method.name, request.method.model)
    progress = Progress(resolved.progress)
    external = open_weights(resolved.weights) if resolved.weights is not None else None
    store, buffers = WeightStore(external), MutableBuffers()
    # The writer is opened first: a path that cannot be written is an error before minutes of compiling.
    with (
        ArchiveWriter(target_path) as writer, temporary_folder() as folder,
        stream_weights(resolved.stream_weights, target_path), contextlib.ExitStack() as stack,
    ):  # fmt: skip
        converted = convert_methods(planned, progress)
        quantised = quantize_methods(
            converted, wanted, progress, _common_gpu(planned), by_name=resolved.quantizes_by_name
        )
        quantised = join_reports(quantised, converted)
        movers = Movers()
        traced = trace_methods((movers.move(method, progress) for method in quantised), progress)
        share_buffers(traced)

        def meanwhile() -> None:
            """Checks, and writes what is known of the file, while others compile."""
            with ThreadPoolExecutor(1) as pool:
                checked = pool.submit(_call_beside, checks, len(traced)) if checks else None
                # The order of weights depends neither on the number of cores nor on how long a method takes.
                if traced[0].target.compiles_beside:
                    store.add_early(traced[0].module)
                if store.files:
                    with progress.bar("write weights", store.nbytes) as writer.on_bytes:
                        _write_weights(writer, store)
                    writer.sync()
                if checked is not None:
                    with progress.step("check"):
                        checked.result()

        entries: dict[str, Any] = {}
        placed: list[_Placed] = []
        for one in stack.enter_context(contextlib.closing(_compile_methods(traced, folder, progress, meanwhile))):
            _add_method(one, store, buffers, entries)
            placed.append(one)
        if store.has_unused:
            writer.restart()
            store, buffers, entries = WeightStore(external), MutableBuffers(), {}
            for one in placed:
                _add_method(one, store, buffers, entries)
        with progress.bar("write", sum(len(file.data) for file in store.files)) as writer.on_bytes:
            for name, data in sorted((files or {}).items()):
                writer.write(name, data)
            _write(writer, placed, store, buffers, entries, sections or {})
            finished = writer.finish()
        differences: dict[str, list[OutputDifference]] = {}
        if resolved.verify:
            with progress.step("verify"), torch.no_grad():
                for method in traced:
                    kernels = kernel_targets(
                        method.compiled.files[method.compiled.extern_nodes].decode()
                        if method.compiled.extern_nodes else None
                    )  # fmt: skip
                    _check_verifiable(method, kernels)
                    differences[method.name] = verify_file(
                        finished, method.name, method.program, method.report.outputs, method.options.verify_tolerance,
                        kernels, method.module if method.calibration is not None else None,
                        external.where if external is not None and external.files else None,
                    )  # fmt: skip
    if external is not None and not external.files:
        warnings.warn(
            f"option weights: none of the {len(store.entries)} weights is in {external.where} byte for byte, and all "
            f"are stored: is it this model's, and in the same dtype? What is packed (pack_linears), merged or "
            f"quantised is stored as well",
            stacklevel=3,
        )
    for method in traced:
        if method.options.record_tuning is not None:
            write_tuning(method.options.record_tuning, method.compiled.produced.choices)
    reports: dict[str, MethodReport] = {}
    for method in traced:
        name, report = method.name, method.report
        before = reports[name].operators if name in reports else []
        operators = sorted({*report.operators, *before})
        reports[name] = replace(report, operators=operators, differences=differences.get(name, []))
    beside = tuple(external.files) if external is not None else ()
    return ExportReport(
        target_path, target_path.stat().st_size, store.nbytes, reports, progress.seconds, beside,
        external.nbytes if external is not None else 0,
    )  # fmt: skip


def _add_method(one: _Placed, store: WeightStore, buffers: MutableBuffers, entries: dict[str, Any]) -> None:
    """A compiled method's weights go to ``store`` and ``buffers``, the method to the manifest's ``entries``."""
    method, compiled = one.method, one.method.compiled
    quantized_weights = [
        *describe_repacked(describe_merged(one.quantized_weights, method), method), *describe_convolutions(method),
    ]  # fmt: skip
    constants, storages = store.add_method(
        compiled.constants, compiled.produced.tensors, compiled.mutations.attributes, method.target.device,
        compiled.produced.on_gpu,
    )  # fmt: skip
    buffers.add_method(method.name, method.target.device, constants, storages, method.target.code_name)
    code = _code_entry(one.place, method, constants)
    if one.place != method.name:  # a variant
        if method.target.device == "cpu":
            code["cpu"] = _cpu_entry(method)
        entries[method.name].setdefault("variants", []).append(code)
        return
    entries[method.name] = _method_entry(method, code)
    if quantized_weights:
        entries[method.name]["quantization"] = quantized_weights


def _call_beside(checks: Sequence[Callable[[], None]], processes: int) -> None:
    """Calls them with fewer threads: a parallel loop waits for its last one, and the other processes need cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2, threads - processes))
    try:
        for check in checks:
            check()
    finally:
        torch.set_num_threads(threads)


def _common_gpu(methods: Sequence[Method]) -> str | None:
    """The GPU that all methods are compiled on, which then quantises as well; None if there are several, or none."""
    homes = {method.target.tensor_home for method in methods}
    return homes.pop() if len(homes) == 1 and homes != {"cpu"} else None


def _method_entry(method: Method, code: dict[str, Any]) -> dict[str, Any]:
    code = dict(code)
    return {
        "library": code.pop("library"),
        "extern_nodes": code.pop("extern_nodes"),
        "device": method.target.device,
        **{key: code.pop(key) for key in method.target.manifest_fields()},
        "cpu": _cpu_entry(method),
        "inputs": method.report.inputs,
        "outputs": method.report.outputs,
        "constants": code.pop("constants"),
        "options": method.options.to_json(),
        **code,
    }


def _cpu_entry(method: Method) -> dict[str, Any]:
    """What the host code asks of the CPU."""
    host = method.target.host
    return {"target": host.name, "architecture": host.architecture, "features": method.compiled.features}


def _code_entry(folder: str, method: Method, constants: list[dict[str, Any]]) -> dict[str, Any]:
    """What differs between architectures, and between levels of CPUs."""
    place, compiled = f"data/aotinductor/{folder}", method.compiled
    return {
        **method.target.manifest_fields(),
        "library": f"{place}/{compiled.library}",
        "extern_nodes": f"{place}/{compiled.extern_nodes}" if compiled.extern_nodes else None,
        "constants": constants,
        "operators": method.report.operators,
        **({"kernel_calls": _calls_entry(folder)} if compiled.kernel_calls is not None else {}),
    }


def _calls_entry(folder: str) -> str:
    return f"extra/kernel_calls/{folder}.json"


def _check_verifiable(method: Method, kernels: Iterable[str]) -> None:
    """Kernels for GPUs are not carried over to the process that verifies."""
    if method.target.device == "cpu":
        return
    own = [target for target in dict.fromkeys(kernels) if find_registration(target, "cuda") is not None]
    if own:
        raise VerificationError(
            f"method '{method.name}' calls {', '.join(own)}, whose kernel for CUDA is registered in this process "
            "alone: verify=True runs the file in another one; export without it"
        )


def _write_weights(writer: ArchiveWriter, store: WeightStore) -> None:
    """Those that are not written yet."""
    for file in store.take_files():
        writer.write(file.name, file.data, file.digest)


def _write(
    writer: ArchiveWriter,
    placed: Iterable[_Placed],
    store: WeightStore,
    buffers: MutableBuffers,
    entries: dict[str, Any],
    sections: Mapping[str, Any],
) -> None:
    from untorch import __version__

    for one in placed:
        compiled = one.method.compiled
        for name, data in sorted(compiled.files.items()):
            writer.write(f"data/aotinductor/{one.place}/{name}", data)
        if compiled.kernel_calls is not None:
            writer.write(_calls_entry(one.place), compiled.kernel_calls)
    _write_weights(writer, store)
    external = store.external.files if store.external is not None else []
    manifest = {
        "format": "untorch",
        "format_version": EXTERNAL_VERSION if external else FORMAT_VERSION,
        "untorch_version": __version__,
        "torch_version": torch.__version__,
        **({"external_files": external} if external else {}),
        "weights": store.entries,
        "states": buffers.entries,
        "methods": entries,
        **sections,
    }
    writer.write_manifest(manifest)
