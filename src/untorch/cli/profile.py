"""``untorch profile``: where the time of a call goes, as a table and as a trace."""

from __future__ import annotations

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
from untorch.cli.output import bytes_text, emit, make_table, print_fields, seconds_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["profile"]

_MAX_LINES = 2  # of a row; --json has all
_MAX_NAME = 48  # characters, likewise


def profile(
    file: FileArgument,
    method: MethodOption = None,
    inputs: InputOption = None,
    dims: DimOption = None,
    output: OutputOption = None,
    runs: Annotated[int, typer.Option("--runs", metavar="N", min=1, help="Calls to record.")] = 10,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Calls before measuring.")] = 10,
    cuda_graph: Annotated[bool, typer.Option("--cuda-graph", help="Replay a CUDA graph of the call.")] = False,
    roofline: Annotated[
        bool, typer.Option("--roofline/--no-roofline", help="Measure this machine's bandwidth and GEMM rate.")
    ] = True,
    num_threads: NumThreadsOption = 0,
    device: DeviceOption = None,
    weights: WeightsOption = None,
    trust: TrustOption = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show where the time of a call goes: operators, kernels and the gaps.

    --output writes a trace (Chrome's JSON) that https://ui.perfetto.dev opens. Inputs that are not given are random.
    """
    from untorch.cli.inputs import make_inputs
    from untorch.profiler import profile as measure

    def make(chosen: Any) -> Any:
        return make_inputs(chosen.inputs, chosen.num_inputs, inputs or (), dims or (), seed, fill_missing=True)

    found = measure(
        file, make, method=method, runs=runs, warmup=warmup, graph=cuda_graph, roofline=roofline, device=device,
        num_threads=num_threads, weights=weights, trust=trust,
    )  # fmt: skip
    if output is not None:
        found.save(output)
    document = found.to_json() | {"trace": None if output is None else str(output)}
    emit(document, json, lambda console: _render(console, document))


def _render(console: Console, document: dict[str, Any]) -> None:
    on_gpu = document["device"] != "cpu"
    limits = document["roofline"]
    roofline = "not measured"
    if limits is not None:
        rates = f"{limits['bytes_per_second'] / 1e9:.3g} GB/s, {limits['operations_per_second'] / 1e9:.4g} GFLOP/s"
        roofline = f"{rates} in {limits['dtype']} (measured here)"
    print_fields(
        console,
        [
            ("file", document["file"]),
            ("method", f"{document['method']} on {document['device']}" + (", as a graph" if document["graph"] else "")),
            ("time of a run", f"{seconds_text(document['seconds'])} (medians of {document['runs']} runs)"),
            *([("until it is done", seconds_text(document["wall_s"]))] if on_gpu else []),
            ("roofline", roofline),
            *([("trace", document["trace"])] if document["trace"] is not None else []),
        ],
    )
    host = (">host",) if on_gpu else ()
    columns = ("kernel or function", ">calls", ">time", ">share", *host, ">bytes", ">operations", ">roofline", "source")
    rows = []
    for row in document["rows"]:
        calls = "" if row["kind"] == "other" else f"{row['calls']:g}"
        share = f"{100 * row['share']:.1f} %"
        host_text = (seconds_text(row["host_s"]) if row["host_s"] is not None else "",) if on_gpu else ()
        size = "" if row["bytes"] is None else bytes_text(row["bytes"])
        operations = "" if row["operations"] is None else _count(row["operations"])
        limit = "" if row["roofline"] is None else f"{100 * row['roofline']:.0f} %"
        rows.append(
            (_short(row), calls, seconds_text(row["seconds"]), share, *host_text, size, operations, limit, _source(row))
        )
    console.print(make_table(None, columns, rows))
    if not document["matched"]:
        console.print(
            "Source lines are incomplete: the file does not say what its code calls (it was exported by an older "
            "version, or is a stock package), or calls depend on values.",
            soft_wrap=True,
        )
    if document["dropped"]:
        console.print(f"{document['dropped']} ranges were dropped: there were too many")


def _short(row: dict[str, Any]) -> str:
    """Names of fused loops are lists of operators: their ends tell them apart."""
    name: str = row["name"].removeprefix("aoti_torch_")
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 13]}…{name[-12:]}"


def _source(row: dict[str, Any]) -> str:
    """The lines, with their files' names alone; and the modules, if that says more."""
    lines = [line.rpartition("/")[2] for line in row["lines"]]
    text = ", ".join(lines[:_MAX_LINES]) + (f", … ({len(lines)})" if len(lines) > _MAX_LINES else "")
    modules: list[str] = row["modules"]
    if modules:
        where = modules[0] if len(modules) == 1 else _span(modules[0], modules[-1])
        text = f"{text} ({where})" if text else where
    return text


def _span(first: str, last: str) -> str:
    """blocks.0.norm, blocks.2.norm → "blocks.0…2.norm"."""
    one, other = first.split("."), last.split(".")
    differing = [index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    if len(one) != len(other) or len(differing) != 1:
        return f"{first} … {last}"
    (place,) = differing
    return ".".join([*one[:place], f"{one[place]}…{other[place]}", *one[place + 1 :]])


def _count(number: int) -> str:
    """1234567 → "1.23 M"."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)
