"""Whole models on the GPU: as a stock package and by untorch's own export, beside torch's loader.

Each model of gpu_zoo.py is compiled twice, by aoti_compile_and_package and by untorch.export. Both loaders then run in
one process, on one stream, alternately; outputs are compared with eager's. A call's time ends when the GPU is done.

    gpu_models.py --models resnet50 swin_t --dtypes float32 --builders 4

With several GPUs the models are spread over them. ``--stage build`` and ``--stage measure`` do one half each; what was
measured before is kept beside the packages, and goes into the report with the rest. A run replaces its rows in the JSON
file, and each row says its GPU: numbers of one row are of one process.

``--stage compile`` adds torch.compile to rows of the same kind of GPU that lack it, from processes of its own: all
compile at once, then each measures alone.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from common import RESULTS, WORK, Report, Table
from gpu_common import describe_gpu

PACKAGES = WORK / "gpu_models"
DTYPES = ("float32", "bfloat16")
KINDS = ("stock", "own")
# Of the largest value of eager's output: what another order of sums, TF32 and bfloat16 may change.
TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-2}
CONTESTANTS = {
    "torch": "torch's loader",
    "stock": "untorch, stock package",
    "own": "untorch, own export",
    "stock_graph": "untorch, stock package, CUDA graph",
    "own_graph": "untorch, own export, CUDA graph",
    "own_replayed": "untorch, own export, cuda_graphs=1",
    "compiled": "torch.compile(mode='reduce-overhead')",
}


def package(name: str, dtype: str, kind: str) -> pathlib.Path:
    return PACKAGES / f"{name}.{dtype}.{kind}.pt2"


def example(name: str, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """The module and its inputs on the GPU, the same ones in every process."""
    import torch
    from gpu_zoo import MODELS

    torch.manual_seed(0)
    model, args = MODELS[name]()
    kind = getattr(torch, dtype)
    model = model.eval().requires_grad_(False).to("cuda", kind)
    return model, tuple(a.cuda().to(kind) if a.is_floating_point() else a.cuda() for a in args)


def build(name: str, dtype: str, compiled: bool) -> dict[str, Any]:
    """Seconds of each export, or why it failed."""
    import torch

    found: dict[str, Any] = {}
    model, args = example(name, dtype)
    for kind in KINDS:
        path = package(name, dtype, kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        try:
            if kind == "stock":
                with torch.no_grad():
                    program = torch.export.export(model, args, strict=False)
                    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
            else:
                from untorch.export import export

                export(model, args, path, device="cuda", progress=False)
            found[kind] = {"seconds": time.perf_counter() - begin, "bytes": path.stat().st_size}
        except Exception as error:
            # A compiler's error goes on with its command: paths of the machine.
            text = str(error).split("\n\nCommand:")[0]
            found[kind] = {"error": f"{type(error).__name__}: {text[:600]}"}
    if compiled:  # what it compiles lies in Inductor's cache then
        with contextlib.suppress(Exception), torch.no_grad():
            torch.compile(model, mode="reduce-overhead")(*args)
        torch._dynamo.reset()
    return found


def warm_up() -> dict[str, Any]:
    """Fills Inductor's cache of precompiled headers, which the first model to be compiled would pay for."""
    import torch

    model, args = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda(), (torch.randn(8, 64).cuda(),)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(model, args, strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/warm.pt2")
    return {}


def leaves(outputs: Any) -> list[Any]:
    """The tensors of a tuple, list or single result, in order."""
    if isinstance(outputs, tuple | list):
        return [leaf for part in outputs for leaf in leaves(part)]
    return [outputs]


def difference(outputs: Any, expected: Any) -> float:
    """The largest difference, as a share of the expected output's largest value."""
    import torch

    worst = 0.0
    for got, want in zip(leaves(outputs), leaves(expected), strict=True):
        got = got if isinstance(got, torch.Tensor) else torch.from_dlpack(got)
        if got.shape != want.shape:
            return math.inf
        if want.numel():
            scale = max(want.double().abs().max().item(), 1e-6)
            worst = max(worst, (got.double() - want.double()).abs().max().item() / scale)
    return worst


def where_and_when() -> dict[str, str]:
    """The GPU and the day, for a row."""
    import torch

    name = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0]
    return {"gpu": name, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def measure(name: str, dtype: str, kinds: list[str], seconds: float) -> dict[str, Any]:
    """Median seconds of a call and of its enqueueing by contestant, and their differences from eager."""
    import torch
    from torch._inductor.package.package import AOTICompiledModel

    import untorch

    model, args = example(name, dtype)
    result: dict[str, Any] = {**where_and_when(), "differences": {}, "errors": {}}
    calls: dict[str, Callable[[], Any]] = {}
    with contextlib.ExitStack() as stack, torch.no_grad():
        stream = torch.cuda.Stream()
        stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(untorch.stream(stream))
        expected = model(*args)
        stream.synchronize()

        def add(key: str, make: Callable[[], Callable[[], Any]]) -> None:
            try:
                call = make()
                off = difference(call(), expected)
                for _ in range(5):
                    call()
                stream.synchronize()
                result["differences"][key] = off
                calls[key] = call
            except Exception as error:
                text = str(error).replace(f"{PACKAGES}/", "")  # no path of the machine in results
                result["errors"][key] = f"{type(error).__name__}: {text[:600]}"

        def by_torch() -> Callable[[], Any]:
            loader = torch._C._aoti.AOTIModelPackageLoader(str(package(name, dtype, "stock")), "model", False, 1, -1)
            loaded = AOTICompiledModel(loader)
            return lambda: loaded(*args)

        def by_untorch(kind: str, cuda_graphs: int = 0) -> Callable[[], Any]:
            program = stack.enter_context(untorch.load(package(name, dtype, kind), cuda_graphs=cuda_graphs))
            method = program[next(iter(program))]
            return lambda: method(*args)

        def by_graph(kind: str) -> Callable[[], Any]:
            program = stack.enter_context(untorch.load(package(name, dtype, kind)))
            graph = stack.enter_context(program[next(iter(program))].graph(*args))
            return lambda: graph(*args)

        def compiled() -> Callable[[], Any]:
            made = torch.compile(model, mode="reduce-overhead")
            return lambda: made(*args)

        makers: dict[str, Callable[[], Callable[[], Any]]] = {
            "torch": by_torch,
            "stock": lambda: by_untorch("stock"),
            "own": lambda: by_untorch("own"),
            "stock_graph": lambda: by_graph("stock"),
            "own_graph": lambda: by_graph("own"),
            "own_replayed": lambda: by_untorch("own", 1),
            "compiled": compiled,
        }
        for key in kinds:
            add(key, makers[key])
        result["times"] = alternate(calls, stream.synchronize, seconds)
        calls.clear()
    return result


def measure_compiled(name: str, dtype: str, seconds: float) -> dict[str, Any]:
    """Median seconds of a call of torch.compile's, when no process compiles any more."""
    import torch

    PACKAGES.mkdir(parents=True, exist_ok=True)
    model, args = example(name, dtype)
    result: dict[str, Any] = where_and_when()
    with (PACKAGES / "compile.lock").open("a") as lock, torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            expected = model(*args)
            made = torch.compile(model, mode="reduce-overhead")
            result["difference"] = difference(made(*args), expected)
            for _ in range(5):
                made(*args)
            torch.cuda.synchronize()
        except Exception as error:
            return result | {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)
        wait = torch.cuda.current_stream().synchronize
        return result | {"times": alternate({"compiled": lambda: made(*args)}, wait, seconds)["compiled"]}


def with_compiled(measured: list[dict[str, Any]], compiled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with torch.compile's time on the same kind of GPU where they have none."""
    found = {(entry["name"], entry["dtype"], entry.get("gpu")): entry for entry in compiled}
    rows = []
    for row in measured:
        entry = found.get((row["name"], row["dtype"], row.get("gpu")))
        if entry is None or "compiled" in row.get("times", {}):
            rows.append(row)
            continue
        row = {**row, "compiled_apart": entry["date"]}
        if "times" in entry:
            row["times"] = {**row["times"], "compiled": entry["times"]}
            row["differences"] = {**row["differences"], "compiled": entry["difference"]}
        else:
            row["errors"] = {**row["errors"], "compiled": entry.get("error") or entry.get("failed")}
        rows.append(row)
    return rows


def alternate(
    calls: dict[str, Callable[[], Any]], wait: Callable[[], object], seconds: float
) -> dict[str, dict[str, float]]:
    """Medians over rounds in which all contestants take turns, a few calls each."""
    enqueue: dict[str, list[float]] = {key: [] for key in calls}
    total: dict[str, list[float]] = {key: [] for key in calls}
    end = time.perf_counter() + seconds * max(1, len(calls))
    keys = list(calls)
    while time.perf_counter() < end:
        for key in keys:
            for number in range(6):
                start = time.perf_counter()
                calls[key]()
                enqueued = time.perf_counter()
                wait()
                if number:  # the first one after another contestant is colder
                    enqueue[key].append(enqueued - start)
                    total[key].append(time.perf_counter() - start)
        keys = keys[1:] + keys[:1]
    return {
        key: {"call": statistics.median(total[key]), "enqueue": statistics.median(enqueue[key])}
        for key in calls
        if total[key]
    }


def run_child(request: dict[str, Any]) -> None:
    """Answers a request, a line of JSON for each model."""
    for name, dtype in request["models"]:
        try:
            if request["do"] == "warm_up":
                values = warm_up()
            elif request["do"] == "build":
                values = build(name, dtype, "compiled" in request["kinds"])
            elif request["do"] == "compile":
                values = measure_compiled(name, dtype, request["seconds"])
            else:
                values = measure(name, dtype, request["kinds"], request["seconds"])
        except Exception:
            values = {"failed": traceback.format_exc()[-1500:]}
        sys.stdout.write("\n@" + json.dumps({"name": name, "dtype": dtype, **values}) + "\n")
        sys.stdout.flush()


class Watch:
    """Ends a child and what it started when ``again`` is not called for a while."""

    def __init__(self, child: subprocess.Popen[str], limit: float) -> None:
        self.child, self.limit, self.expired = child, limit, False
        self.again()

    def again(self) -> None:
        """Begin the time anew."""
        self.stop()
        self.timer = threading.Timer(self.limit, self.end)
        self.timer.daemon = True
        self.timer.start()

    def stop(self) -> None:
        """End nothing any more."""
        if hasattr(self, "timer"):
            self.timer.cancel()

    def end(self) -> None:
        """The time is over."""
        self.expired = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)


def ask(request: dict[str, Any], limit: float, gpu: str | None = None) -> list[dict[str, Any]]:
    """The answers of a child process. When it dies, a second one goes on behind the model that ended it.

    One that gives no answer for ``limit`` seconds is ended with all that it started.
    """
    answers: list[dict[str, Any]] = []
    models = request["models"]
    environment = dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="4", PYTHONWARNINGS="ignore")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    while len(answers) < len(models):
        rest = dict(request, models=models[len(answers) :])
        command = [sys.executable, __file__, "--child", json.dumps(rest)]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
            ) as child,
        ):
            assert child.stdout is not None
            watch = Watch(child, limit)
            for line in child.stdout:
                if line.startswith("@"):
                    watch.again()
                    answers.append(json.loads(line[1:]))
                    keep(request["do"], answers[-1])
            code = child.wait()
            watch.stop()
            errors.seek(0)
            ended = f"no answer in {limit:.0f} s" if watch.expired else f"exit code {code}"
            reason = f"{ended}: {errors.read()[-800:]}"
        if len(answers) < len(models):
            name, dtype = models[len(answers)]
            answers.append({"name": name, "dtype": dtype, "failed": reason})
            keep(request["do"], answers[-1])
    return answers


def kept(do: str) -> pathlib.Path:
    """Where the answers lie, a line each."""
    return PACKAGES / f"{do}.jsonl"


def keep(do: str, answer: dict[str, Any]) -> None:
    kept(do).parent.mkdir(parents=True, exist_ok=True)
    with kept(do).open("a") as file:
        file.write(json.dumps(answer) + "\n")


def known(do: str, wanted: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The last answer for each of the models, in their order."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    if kept(do).exists():
        for line in kept(do).read_text().splitlines():
            answer = json.loads(line)
            found[answer["name"], answer["dtype"]] = answer
    return [found[key] for key in wanted if key in found]


def visible_gpus() -> list[str]:
    """The GPUs that models are measured on, as CUDA_VISIBLE_DEVICES has them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def table(measured: list[dict[str, Any]], dtype: str) -> Table:
    """A row a model: microseconds of a call, and torch's loader's time over ours."""
    rows = []
    ratios: dict[str, list[float]] = {key: [] for key in CONTESTANTS}
    for entry in measured:
        if entry["dtype"] != dtype:
            continue
        times = {key: value["call"] for key, value in entry.get("times", {}).items()}
        cells = [entry["name"], entry.get("gpu", "")]
        for key in CONTESTANTS:
            if key not in times:
                cells.append("error" if key in entry.get("errors", {}) or "failed" in entry else "")
                continue
            text = f"{times[key] * 1e6:.0f}"
            if key != "torch" and "torch" in times:
                ratios[key].append(times["torch"] / times[key])
                text += f" ({ratios[key][-1]:.2f})"
            cells.append(text)
        rows.append(cells)
    means = [f"{geometric_mean(ratios[key]):.2f}" if ratios[key] else "" for key in CONTESTANTS]
    rows.append(["geometric mean", "", *means])
    return Table(["Model", "GPU", *CONTESTANTS.values()], rows)


def report_of(built: list[dict[str, Any]], measured: list[dict[str, Any]]) -> Report:
    """The report of all rows, in the order of the models."""
    report = Report("gpu_models", quick=False)
    describe_gpu(report)
    report.values = {"built": built, "measured": measured}
    for dtype in DTYPES:
        days: dict[str, set[str]] = {}
        for entry in measured:
            if entry["dtype"] == dtype:
                days.setdefault(entry.get("gpu", ""), set()).add(entry.get("date", ""))
        text = (
            f"Microseconds of a call, median, {dtype}, TF32 in convolutions as PyTorch's default has it; in brackets "
            f"how many times as fast as torch's loader. "
            + ", ".join(f"{gpu}: {' and '.join(sorted(dates))}" for gpu, dates in sorted(days.items()))
            + "."
        )
        made = table(measured, dtype)
        report.tables[f"gpu_models_{dtype}"] = Table(made.columns, made.rows, text)
    return report


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """The newer row for each model and dtype, in the order of ``names``."""
    rows = {(entry["name"], entry["dtype"]): entry for entry in (*old, *new)}
    return [rows[name, dtype] for dtype in DTYPES for name in names if (name, dtype) in rows]


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        run_child(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", help="those alone")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--contestants", nargs="*", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--builders", type=int, default=5, help="models that are compiled at a time")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring for each contestant")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds in which a model is built or measured")
    parser.add_argument("--stage", choices=("build", "measure", "compile"), help="that part alone")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    from gpu_zoo import MODELS

    names = options.models or list(MODELS)
    wanted = [(name, dtype) for dtype in options.dtypes for name in names]
    kinds = {"kinds": options.contestants, "seconds": options.seconds}
    if options.stage == "compile":
        gpus = visible_gpus()
        with concurrent.futures.ThreadPoolExecutor(options.builders) as pool:
            for i, key in enumerate(wanted):
                pool.submit(ask, {"do": "compile", "models": [key], **kinds}, options.limit, gpus[i % len(gpus)])
        file = options.output / "gpu_models.json"
        before = json.loads(file.read_text())["values"]
        report_of(before["built"], with_compiled(before["measured"], known("compile", wanted))).write(options.output)
        return
    if options.stage != "measure":
        missing = [key for key in wanted if not all(package(*key, kind).exists() for kind in KINDS)]
        if missing:
            ask({"do": "warm_up", "models": missing[:1]}, options.limit)
        with concurrent.futures.ThreadPoolExecutor(options.builders) as pool:
            for done in pool.map(lambda key: ask({"do": "build", "models": [key], **kinds}, options.limit), missing):
                print(json.dumps(done), flush=True)
    if options.stage == "build":
        return
    gpus = visible_gpus()
    with concurrent.futures.ThreadPoolExecutor(len(gpus)) as pool:
        for i, gpu in enumerate(gpus):
            pool.submit(ask, {"do": "measure", "models": wanted[i :: len(gpus)], **kinds}, options.limit, gpu)
    built, measured = known("build", wanted), known("measure", wanted)
    file = options.output / "gpu_models.json"
    before = json.loads(file.read_text())["values"] if file.exists() else {"built": [], "measured": []}
    report_of(
        *(merged(before[key], new, list(MODELS)) for key, new in (("built", built), ("measured", measured)))
    ).write(options.output)
    for entry in measured:
        problems = dict(entry.get("errors", {}))
        problems |= {"failed": entry["failed"]} if "failed" in entry else {}
        for key, off in entry.get("differences", {}).items():
            if not off <= TOLERANCE[entry["dtype"]]:
                problems[key] = f"differs from eager by {off:.2e}"
        for key, text in problems.items():
            print(f"{entry['name']}, {entry['dtype']}, {key}: {text}")


if __name__ == "__main__":
    main()
