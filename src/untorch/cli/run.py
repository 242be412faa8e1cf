"""``untorch run``: one call of a method, its outputs written as .npy files; or of a package's pipeline."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from untorch.cli.options import (
    DebugOption,
    DeviceOption,
    DimOption,
    FileArgument,
    InputOption,
    JsonOption,
    MethodOption,
    NumThreadsOption,
    OutputOption,
    SeedOption,
    TrustOption,
    WeightsOption,
)
from untorch.cli.output import emit, make_table, seconds_text

if TYPE_CHECKING:
    from rich.console import Console

    from untorch.runtime.method import Method
    from untorch.runtime.program import Program

__all__ = ["pick_method", "run"]


def run(
    file: FileArgument,
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INPUT]...",
            help="What the package's front end takes: texts, image files or audio files. Or .npy files, like --input.",
            show_default=False,
        ),
    ] = None,
    call_options: Annotated[
        list[str] | None,
        typer.Option(
            "--call-option",
            metavar="NAME=VALUE",
            help="An option of the front end's call, repeatable: top_k=3. Values are JSON, or else text.",
        ),
    ] = None,
    method: MethodOption = None,
    inputs: InputOption = None,
    dims: DimOption = None,
    output: OutputOption = None,
    num_threads: NumThreadsOption = 0,
    device: DeviceOption = None,
    weights: WeightsOption = None,
    trust: TrustOption = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run a method once, and save its outputs as .npy files in the folder --output; or the package's front end, for
    a text, an image or an audio file.

    The device is the one that the file was compiled for, unless --device names another.
    """
    import time

    import untorch
    from untorch.cli.inputs import make_inputs
    from untorch.cli.run_pipeline import are_arrays, parse_call_options, render_pipeline, run_pipeline
    from untorch.pipeline.describe import describe_calls
    from untorch.progress import large_file
    from untorch.runtime.errors import InvalidArgumentError

    texts, options = list(given or ()), parse_call_options(call_options or ())
    arrays_alone = are_arrays(texts) and not options
    if not arrays_alone and (inputs or dims or method):
        flag = "--input" if inputs else "--dim" if dims else "--method"
        raise typer.BadParameter("is for arrays: leave it out, or INPUT", param_hint=flag)
    with contextlib.ExitStack() as stack:
        with large_file("loading", file):
            program = stack.enter_context(
                untorch.load(file, device=device, num_threads=num_threads, weights=weights, trust=trust)
            )
            calls = describe_calls(program.manifest, program.path) if program.manifest else None
            python = None if calls is None else calls.python
            if arrays_alone:
                chosen = pick_method(program, method)
                chosen.open()
        if not arrays_alone:
            if not texts:
                raise typer.BadParameter("is for an INPUT, and there is none", param_hint="--call-option")
            ran = run_pipeline(program, texts, options, output)
            emit(ran, json, lambda console: render_pipeline(console, ran, python))
            return
        try:
            arrays = make_inputs(chosen.inputs, chosen.num_inputs, [*(inputs or ()), *texts], dims or (), seed)
        except InvalidArgumentError as error:
            if inputs or texts or calls is None or not program.manifest.keys() & {"pipeline", "speech", "llm"}:
                raise
            raise InvalidArgumentError(
                f"{error}; or use its front end: {calls.command or calls.python}"
                + (f", in Python {calls.python}" if calls.command else "")
            ) from None
        start = time.perf_counter()
        results = chosen.run(arrays)
        seconds = time.perf_counter() - start
        entries = _describe(chosen, results)
        if output is not None:
            _save(output, entries, results)
        where = chosen.device
    document = {"file": str(file), "method": chosen.name, "device": where, "seconds": seconds, "outputs": entries}
    emit(document, json, lambda console: _render(console, document, python))


def pick_method(program: Program, name: str | None) -> Method:
    """The named method, else "forward", else the only one. Raises InvalidArgumentError."""
    from untorch.runtime.errors import InvalidArgumentError

    if name is not None:
        return program[name]
    if len(program.methods) == 1:
        return program[program.methods[0]]
    if "forward" in program.methods:
        return program["forward"]
    names = ", ".join(program.methods)
    raise InvalidArgumentError(f"{program.path} has several methods, choose one with --method: {names}")


def _describe(method: Method, results: list[Any]) -> list[dict[str, Any]]:
    specs = method.outputs
    if len(specs) != len(results):
        # A None that was known when the model was compiled is no output of the library.
        specs = tuple(spec for spec in specs if spec is not None)
    entries: list[dict[str, Any]] = []
    for i, result in enumerate(results):
        spec = specs[i] if len(specs) == len(results) else None
        name = spec.name if spec is not None else f"output_{i}"
        entries.append({"name": name, "file": None, **_statistics(result)})
    return entries


def _statistics(array: Any) -> dict[str, Any]:
    """dtype, shape, and least, largest and mean value; for complex numbers of their magnitude."""
    import numpy

    if array is None:
        return {"dtype": None, "shape": None, "min": None, "max": None, "mean": None}
    basic = {"dtype": array.dtype.name, "shape": list(array.shape)}
    if array.size == 0:
        return {**basic, "min": None, "max": None, "mean": None}
    if array.dtype.kind == "c":
        values = numpy.abs(array)
    elif array.dtype.kind in "biuf":
        values = array
    else:  # a dtype of ml_dtypes
        values = array.astype(numpy.float32)
    with numpy.errstate(all="ignore"):
        mean = float(numpy.mean(values, dtype=numpy.float64))
    return {**basic, "min": values.min().item(), "max": values.max().item(), "mean": mean}


def _save(folder: Path, entries: list[dict[str, Any]], results: list[Any]) -> None:
    import numpy

    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for entry, result in zip(entries, results, strict=True):
        if result is None:
            continue
        # Names may hold a path in the tree of outputs: out["a"][0]. Letters, digits, _ - . are left as they are.
        stem = re.sub(r"[^\w.-]+", "_", entry["name"]).strip("_.") or "output"
        name = stem
        for number in range(1, len(entries) + 1):
            if name not in taken:
                break
            name = f"{stem}_{number}"
        taken.add(name)
        # .npy has no bfloat16 and no float8; float32 holds their values exactly.
        plain = result if result.dtype.kind in "biufc" else result.astype(numpy.float32)
        path = folder / f"{name}.npy"
        numpy.save(path, plain, allow_pickle=False)
        entry["file"] = str(path)
        entry["saved_dtype"] = plain.dtype.name


def _render(console: Console, document: dict[str, Any], python: str | None) -> None:
    rows = []
    for entry in document["outputs"]:
        dtype = entry["dtype"] or "None"
        if entry.get("saved_dtype", dtype) != dtype:
            dtype = f"{dtype} (saved as {entry['saved_dtype']})"
        shape = "" if entry["shape"] is None else entry["shape"]
        values = ["" if entry[key] is None else f"{entry[key]:.6g}" for key in ("min", "max", "mean")]
        rows.append((entry["name"], dtype, shape, *values, entry["file"] or ""))
    console.print(make_table(None, ("output", "dtype", "shape", ">min", ">max", ">mean", "file"), rows))
    time_text = f"{document['file']}: {document['method']} ran in {seconds_text(document['seconds'])} (first call)"
    console.print(time_text + (f"; in Python: {python}" if python else ""), soft_wrap=True)
