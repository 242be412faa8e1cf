"""``untorch bench``: load time, latency, throughput and memory of a method, and its cold start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from untorch.cli.options import (
    CudaGraphsOption,
    DebugOption,
    DequantizeWeightsOption,
    DeviceOption,
    DimOption,
    FileArgument,
    InputOption,
    JsonOption,
    MethodOption,
    NumRunnersOption,
    NumThreadsOption,
    SeedOption,
    SpinUsOption,
    Tf32Option,
    TrustOption,
    WeightsOption,
)
from untorch.cli.output import bytes_text, emit, make_table, print_fields, seconds_text, shape_text
from untorch.cli.run import pick_method

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

    from untorch.cli.measure import Plan

__all__ = ["bench"]

_CALL_NOTE = (
    "On the CPU a call computes and returns: there is no queue, so the time to enqueue is the time of the call. It "
    "includes input checks and making output arrays (Method.run)."
)
_GPU_NOTE = (
    "Latency is a call on arrays that lie on the GPU, until its stream is done; enqueue is the part of it after which "
    "the call returns. From the CPU: numpy arrays in and out, copies included."
)


def bench(
    file: FileArgument,
    method: MethodOption = None,
    inputs: InputOption = None,
    dims: DimOption = None,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Calls before measuring.")] = 10,
    iterations: Annotated[
        int | None,
        typer.Option(
            "--iterations", metavar="N", min=1, help="Calls of each calling thread. Default: what fits --seconds."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", min=0.0, help="Duration of each measurement.")
    ] = 2.0,
    num_threads: NumThreadsOption = 0,
    sweep_threads: Annotated[
        str | None,
        typer.Option("--sweep-threads", metavar="N,N…", help="Measure once for each number of threads: 1,2,4."),
    ] = None,
    spin_us: SpinUsOption = None,
    num_runners: NumRunnersOption = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, help="Threads that call the method concurrently.")
    ] = 1,
    cold: Annotated[bool, typer.Option("--cold", help="Also time new processes up to their first output.")] = False,
    cold_runs: Annotated[int, typer.Option("--cold-runs", metavar="N", min=1, help="New processes for --cold.")] = 3,
    device: DeviceOption = None,
    cuda_graph: Annotated[bool, typer.Option("--cuda-graph", help="Replay a CUDA graph of the call.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PATH", help="Plot the figures to a file: .svg; errors also to .png and .pdf."),
    ] = None,
    cuda_graphs: CudaGraphsOption = 0,
    dequantize_weights: DequantizeWeightsOption = False,
    tf32: Tf32Option = None,
    weights: WeightsOption = None,
    trust: TrustOption = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure a method: load, latency, throughput, memory.

    Inputs that are not given are random. There are as many runners as calling threads, unless --num-runners says
    otherwise. The device is the one that the file was compiled for, unless --device names another.
    """
    import untorch
    from untorch.cli.measure import Plan
    from untorch.runtime.errors import InvalidArgumentError

    counts = _thread_counts(num_threads, sweep_threads)
    if cuda_graph and concurrency > 1:
        raise InvalidArgumentError("--cuda-graph: a graph runs one call at a time: leave --concurrency out")
    if plot is not None:
        from untorch.cli.bench_plot import check_plot

        check_plot(plot)
    plan = Plan(warmup, iterations, seconds, concurrency)
    latencies: list[list[float]] = []
    texts, dim_texts = list(inputs or ()), list(dims or ())
    measured = [
        _measure_one(
            file, method, texts, dim_texts, seed, plan, cuda_graph, latencies,
            {"device": device, "num_runners": num_runners or concurrency, "num_threads": count,
             "spin_us": spin_us, "cuda_graphs": cuda_graphs, "dequantize_weights": dequantize_weights, "tf32": tf32,
             "weights": weights, "trust": trust},
        )
        for count in counts
    ]  # fmt: skip
    first = measured[0]
    document: dict[str, Any] = {
        "file": str(file),
        "file_bytes": file.stat().st_size,
        "method": first["method"],
        "device": first["device"],
        "graph": cuda_graph,
        "cuda_graphs": cuda_graphs,
        "dequantize_weights": dequantize_weights,
        "tf32": tf32,
        "spin_us": spin_us,
        "untorch": untorch.__version__,
        "cpu_level": untorch._core.cpu_level(),
        "inputs": first["inputs"],
        "warmup": warmup,
        "concurrency": concurrency,
        "runners": num_runners or concurrency,
        "results": [{k: v for k, v in item.items() if k not in ("method", "inputs", "device")} for item in measured],
        "note": _CALL_NOTE if first["device"] == "cpu" else _GPU_NOTE,
        "cold": None,
        "plot": None if plot is None else str(plot),
    }
    if cold:
        from untorch.cli.cold import measure_cold

        with untorch.load(file, device=device, weights=weights, trust=trust) as program:
            chosen = pick_method(program, method)
            specs = program.manifest.get("methods", {}).get(chosen.name, {}).get("inputs")
            number = chosen.num_inputs
        request = {
            "file": str(file), "method": document["method"], "inputs": specs, "count": number, "texts": texts,
            "dims": dim_texts, "seed": seed, "threads": counts[0], "spin_us": spin_us,
            "dequantize_weights": dequantize_weights, "tf32": tf32, "trust": None if trust is None else str(trust),
            "weights": None if weights is None else str(weights),
        }  # fmt: skip
        document["cold"] = measure_cold(request, cold_runs)
    if plot is not None:
        from untorch.cli.bench_plot import plot_latencies, title_of

        labels = [f"{count} threads" if count else "default threads" for count in counts]
        plot_latencies(plot, title_of(document), list(zip(labels, latencies, strict=True)))
    emit(document, json, lambda console: _render(console, document))


def _thread_counts(number: int, text: str | None) -> list[int]:
    from untorch.runtime.errors import InvalidArgumentError

    if text is None:
        return [number]
    if number != 0:
        raise InvalidArgumentError(f"--sweep-threads {text}: leave --num-threads {number} out")
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidArgumentError(f"--sweep-threads {text}: expected numbers separated by commas, such as 1,2,4")
    return [int(part) for part in parts]


def _measure_one(
    file: Path, name: str | None, texts: list[str], dims: list[str], seed: int, plan: Plan, graph: bool,
    latencies: list[list[float]], how: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Load with the options ``how`` and measure calls, whose seconds are added to ``latencies``."""
    import time

    import untorch
    from untorch.cli.inputs import make_inputs
    from untorch.cli.measure import measure, summarise
    from untorch.cli.process import memory
    from untorch.runtime.errors import InvalidArgumentError

    before, _ = memory()
    start = time.perf_counter()
    program = untorch.load(file, **how)
    try:
        method = pick_method(program, name)
        method.open()
        load = time.perf_counter() - start
        arrays = make_inputs(method.inputs, method.num_inputs, texts, dims, seed, fill_missing=True)
        loaded, _ = memory()
        start = time.perf_counter()
        method.run(arrays)
        first_call = time.perf_counter() - start
        on_gpu: dict[str, Any] = {}
        if method.device != "cpu":
            from untorch.cli.measure_gpu import measure_gpu

            times, on_gpu = measure_gpu(method, arrays, plan, graph)
            on_gpu["gpu_memory"] = program.memory()
        elif graph:
            raise InvalidArgumentError(f"--cuda-graph: method {method.name} runs on the CPU")
        else:
            times = measure(lambda: method.run(arrays), plan)
        after, peak = memory()
        latencies.append(times.latencies)
        return {
            "method": method.name,
            "device": method.device,
            "inputs": [_describe(spec_name, array) for spec_name, array in zip(_names(method), arrays, strict=True)],
            "threads": how["num_threads"],
            "load_s": load,
            "first_call_s": first_call,
            **summarise(times),
            **on_gpu,
            "memory": {
                "before_load_bytes": before, "after_load_bytes": loaded, "after_run_bytes": after, "peak_bytes": peak,
            },
        }  # fmt: skip
    finally:
        program.close()


def _names(method: Any) -> list[str]:
    return [spec.name for spec in method.inputs] or [str(i) for i in range(method.num_inputs)]


def _describe(name: str, array: NDArray[Any]) -> dict[str, Any]:
    return {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}


def _render(console: Console, document: dict[str, Any]) -> None:
    inputs = ", ".join(f"{i['name']}: {i['dtype']}{shape_text(i['shape'])}" for i in document["inputs"])
    print_fields(
        console,
        [
            ("file", f"{document['file']} ({bytes_text(document['file_bytes'])})"),
            ("method", f"{document['method']}({inputs})"),
            ("device", document["device"] + (", replayed as a CUDA graph" if document["graph"] else "")),
            ("kernels", document["cpu_level"]),
            ("calling threads", f"{document['concurrency']} ({document['runners']} runners)"),
        ],
    )
    columns = ("threads", ">load", ">first call", ">calls", ">p50", ">p90", ">p99", ">mean", ">calls/s")
    rows = []
    for r in document["results"]:
        times = [seconds_text(r[key]) for key in ("p50_s", "p90_s", "p99_s", "mean_s")]
        rate = f"{r['throughput_per_s']:.0f}" if r["throughput_per_s"] >= 100 else f"{r['throughput_per_s']:.3g}"
        label = r["threads"] or "default"
        rows.append((label, seconds_text(r["load_s"]), seconds_text(r["first_call_s"]), r["calls"], *times, rate))
    console.print(make_table(None, columns, rows))
    memory = [
        (r["threads"] or "default", *(bytes_text(r["memory"][f"{key}_bytes"]) for key in _MEMORY))
        for r in document["results"]
    ]
    if document["plot"] is not None:
        console.print(f"plot written to {document['plot']}", soft_wrap=True)
    console.print(make_table(None, ("threads", *(f">RSS {key.replace('_', ' ')}" for key in _MEMORY)), memory))
    for r in document["results"]:
        if "enqueue" in r:
            parts = [
                (title, *(seconds_text(r[key][field]) for field in ("p50_s", "p90_s", "p99_s", "mean_s")))
                for title, key in _PARTS.items()
            ]
            console.print(make_table(None, ("", ">p50", ">p90", ">p99", ">mean"), parts))
            gpu = ", ".join(f"{key} {bytes_text(value)}" for key, value in r["gpu_memory"].items() if key != "device")
            console.print(f"memory of {document['device']}: {gpu}", soft_wrap=True)
    if (cold := document["cold"]) is not None:
        stages = ", ".join(f"{name.replace('_', ' ')} {seconds_text(s)}" for name, s in cold["stages_s"].items())
        console.print(
            f"cold start: {seconds_text(cold['total_s'])} from process start to first output (best of {cold['runs']}; "
            f"first {seconds_text(cold['first_total_s'])}): {stages}",
            soft_wrap=True,
        )
    console.print(document["note"], soft_wrap=True)


_PARTS = {
    "enqueue": "enqueue",
    "from the CPU": "from_cpu",
    "inputs to the GPU": "to_gpu",
    "outputs to the CPU": "to_cpu",
}
_MEMORY = ("before_load", "after_load", "after_run", "peak")
