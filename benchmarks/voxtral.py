"""Voxtral-Mini-3B in three methods: file size, load time and latency, beside torch's loader.

    python benchmarks/voxtral.py [--quick] [--tiny] [--device cpu] [--quantize int4]

Random weights in the published sizes, nothing is downloaded; bfloat16 on the GPU. The text decoder runs a prefill of
388 tokens, of which 375 are audio, and one decode step. Load times are those of fresh processes, with the files in the
page cache. Latencies come from one process, in which all sides alternate, each first equally often, and end when the
device is done. With --quantize linear layers are in int4 (RTN: random weights gain nothing from a better method):
as they are in the file, and on a GPU also loaded with dequantize_weights; beside them stand our own file in bfloat16
and torch's.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from common import RESULTS, WORK, Report, Table

METHODS = ("audio_encoder", "token_embedding", "text_decoder")
CACHE = 1024
ROUNDS = 43  # the first is not counted; 42 is a multiple of 2, 3 and 7 sides


def folder(tiny: bool, device: str) -> pathlib.Path:
    return WORK / f"voxtral-{'tiny' if tiny else 'mini'}-{device}"


def ours(quantize: str | None) -> str:
    return "untorch.pt2" if quantize is None else f"untorch-{quantize}.pt2"


def sides(quantize: str | None, device: str) -> dict[str, tuple[str, bool]]:
    """Our files, and whether to load them with dequantize_weights, by what the report calls them."""
    if quantize is None:
        return {"untorch": (ours(None), False)}
    dequantized = {} if device == "cpu" else {"dequantized": (ours(quantize), True)}
    return {"untorch": (ours(quantize), False), **dequantized, "unquantised": (ours(None), False)}


def missing(tiny: bool, device: str, quantize: str | None) -> list[str]:
    """The files that are to be built: ours with all methods, and a stock package for each."""
    place = folder(tiny, device)
    place.mkdir(parents=True, exist_ok=True)
    wanted = dict.fromkeys([*(file for file, _ in sides(quantize, device).values()), *(f"{n}.pt2" for n in METHODS)])
    return [name for name in wanted if not (place / name).exists()]


def build(tiny: bool, device: str, quantize: str | None, file: str) -> None:
    """One of them."""
    import torch
    from voxtral_model import build_model, methods

    from untorch.export import export

    path = folder(tiny, device) / file
    found = methods(build_model(tiny, "float32" if device == "cpu" else "bfloat16", device), 448 if tiny else CACHE)
    if file in (ours(quantize), ours(None)):
        options = None if file == ours(None) else {"dtype": quantize, "method": "rtn"}
        export(methods=found, path=path, device=device, quantize=options, progress=False)
        return
    entry = found[path.stem]
    entry = entry if isinstance(entry, dict) else {"model": entry[0], "args": entry[1]}
    with torch.no_grad():
        program = torch.export.export(entry["model"], entry["args"], dynamic_shapes=entry.get("dynamic_shapes"))
        made = path.with_name(f"new-{file}")
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(made),
            inductor_configs={
                "aot_inductor.check_lowerbound": False,
                "aot_inductor.package_constants_in_so": False,
                "aot_inductor.package_constants_on_disk_format": "binary_blob",
            },
        )
        made.rename(path)


def stock(path: pathlib.Path) -> Any:
    """What aoti_load_package makes, without its search for compilers."""
    import torch
    from torch._inductor.package.package import AOTICompiledModel

    return AOTICompiledModel(torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1))


def rewind(model: Any, device: str) -> None:
    """Puts a stock package's position back to the start of its cache."""
    import torch

    names = [name for name in model.loader.get_constant_fqns() if name.startswith("position_")]
    if names:
        start = torch.zeros((), dtype=torch.int64, device=device)
        model.loader.load_constants({name: start.clone() for name in names}, False, False)


def start_cuda() -> None:
    """The driver and its context on the first GPU: both sides have them before the clock starts."""
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0):
        raise SystemExit("CUDA cannot be started")


def load_untorch(tiny: bool, device: str, file: str, dequantize: bool) -> dict[str, float]:
    import untorch

    seconds = {}
    if device != "cpu":
        start_cuda()
    start = time.perf_counter()
    program = untorch.load(folder(tiny, device) / file, dequantize_weights=dequantize)
    for name in METHODS:
        begin = time.perf_counter()
        program[name]
        seconds[name] = time.perf_counter() - begin
    seconds["all"] = time.perf_counter() - start
    return seconds


def load_torch(tiny: bool, device: str) -> dict[str, float]:
    import torch

    if device != "cpu":
        torch.zeros(1, device=device)
    seconds, models = {}, []
    start = time.perf_counter()
    for name in METHODS:
        begin = time.perf_counter()
        models.append(stock(folder(tiny, device) / f"{name}.pt2"))
        seconds[name] = time.perf_counter() - begin
    seconds["all"] = time.perf_counter() - start
    return seconds


def run(tiny: bool, device: str, quantize: str | None, rounds: int) -> dict[str, Any]:
    """Medians of all sides, alternating; and how far each of our sides' first result is from torch's at most."""
    import torch
    from voxtral_model import PROMPT, build_model, examples

    import untorch

    place = folder(tiny, device)
    model = build_model(tiny, "float32" if device == "cpu" else "bfloat16", device) if tiny else None
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if model is not None:
        features, hidden, vocabulary = examples(model)[0], model.config.text_config.hidden_size, 99
    else:
        features, hidden, vocabulary = torch.randn(1, 128, 3000, generator=generator).to(dtype), 3072, 131072
    inputs = {
        "audio_encoder": features.to(device),
        "token_embedding": torch.randint(0, vocabulary, (1, PROMPT), generator=generator).to(device),
        "text_decoder": torch.randn(1, PROMPT, hidden, generator=generator).to(dtype).to(device),
        "text_decoder, one token": torch.randn(1, 1, hidden, generator=generator).to(dtype).to(device),
    }
    wait: Callable[[], object] = torch.cuda.synchronize if device != "cpu" else (lambda: None)
    memory: dict[str, Any] = {}

    def measured(who: str, make: Callable[[], Any]) -> Any:
        before = torch.cuda.mem_get_info()[0] if device != "cpu" else 0
        made = make()
        if device != "cpu":
            memory[f"device_{who}"] = before - torch.cuda.mem_get_info()[0]
        return made

    def opened(file: str, dequantize: bool) -> Any:
        program = untorch.load(place / file, dequantize_weights=dequantize)
        for name in METHODS:
            program[name]
        return program

    # The packed weights of a file are shared: what dequantising costs is what its side takes on top.
    programs = {who: measured(who, functools.partial(opened, *how)) for who, how in sides(quantize, device).items()}
    theirs = measured("torch", lambda: {name: stock(place / f"{name}.pt2") for name in METHODS})
    results: dict[str, Any] = {}
    memory |= programs["untorch"].memory()
    with torch.no_grad():
        for label, x in inputs.items():
            name = label.partition(",")[0]
            sessions = {who: program.session() for who, program in programs.items()}
            calls: dict[str, Callable[[], Any]] = {
                who: functools.partial(session[name], x) for who, session in sessions.items()
            }
            calls["torch"] = functools.partial(theirs[name], x)
            with untorch.stream(torch.cuda.current_stream() if device != "cpu" else None):
                if device != "cpu":
                    for who, session in sessions.items():
                        calls[f"{who} graph"] = functools.partial(session[name].graph(x), x)
                first: dict[str, Any] = {}
                times: dict[str, list[float]] = {who: [] for who in calls}
                order = list(calls.items())
                for turn in range(rounds):
                    leader = turn % len(order)
                    for who, call in order[leader:] + order[:leader]:
                        for session in sessions.values():
                            session.reset()
                        rewind(theirs[name], device)
                        wait()
                        begin = time.perf_counter()
                        result = call()
                        wait()
                        times[who].append(time.perf_counter() - begin)
                        if who not in first:
                            first[who] = torch.from_dlpack(result).float().cpu()
            results[label] = {
                **{who: statistics.median(values[1:]) for who, values in times.items()},
                "difference": {who: float((first[who] - first["torch"]).abs().max()) for who in first},
                "largest": float(first["torch"].abs().max()),
            }
            for session in sessions.values():
                session.close()
    return {"run": results, "memory": memory}


def children(requests: list[dict[str, Any]]) -> list[Any]:
    """The results of child processes that run concurrently."""
    commands = [
        [sys.executable, "-X", "faulthandler", __file__, "--child", json.dumps(request)] for request in requests
    ]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    answers = []
    for request, process in zip(requests, running, strict=True):
        out, _ = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"{request}: its process ended with exit code {process.returncode}")
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


def child(request: dict[str, Any]) -> Any:
    return children([request])[0]


def answer(request: dict[str, Any]) -> None:
    tiny, device, quantize = request["tiny"], request["device"], request["quantize"]
    result: Any
    if request["what"] == "build":
        result = build(tiny, device, quantize, request["file"])
    elif request["what"] == "run":
        result = run(tiny, device, quantize, request["rounds"])
    elif request["what"] == "torch":
        result = load_torch(tiny, device)
    else:
        result = load_untorch(tiny, device, *sides(quantize, device)[request["what"]])
    sys.stdout.write("\n" + json.dumps(result) + "\n")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        answer(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script; like --quick otherwise")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quantize", choices=["int4"], help="our side's linear layers in this dtype")
    parser.add_argument("--loads", type=int, default=5, help="processes that load each side's files, after a first one")
    parser.add_argument("--build", action="store_true", help="build missing files, and stop")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    options = parser.parse_args()
    quick = options.quick or options.tiny
    name = "voxtral" if options.quantize is None else f"voxtral_{options.quantize}"
    report = Report(name, quick, script="benchmarks/voxtral.py")
    if options.device != "cpu":
        from gpu_common import describe_gpu

        describe_gpu(report)
    base = {"tiny": options.tiny, "device": options.device, "quantize": options.quantize}
    children(
        [{**base, "what": "build", "file": name} for name in missing(options.tiny, options.device, options.quantize)]
    )
    if options.build:
        return
    place = folder(options.tiny, options.device)
    sizes = {path.stem: path.stat().st_size for path in sorted(place.glob("*.pt2"))}
    files = {name: sizes[name] for name in METHODS} | {"untorch": (place / ours(options.quantize)).stat().st_size}
    loads = {}
    who_runs = [*sides(options.quantize, options.device), "torch"]
    for who in who_runs:
        child({**base, "what": who})  # fills the page cache
        found = [child({**base, "what": who}) for _ in range(1 if quick else options.loads)]
        loads[who] = {key: statistics.median(run[key] for run in found) for key in found[0]}
    found = child({**base, "what": "run", "rounds": 3 if quick else ROUNDS})
    runs, memory = found["run"], found["memory"]
    report.values = {"bytes": files, "load_seconds": loads, "run": runs, "memory_bytes": memory}
    three = sum(files[name] for name in METHODS)
    own, mine = who_runs[:-1], sides(options.quantize, options.device)
    rows = [
        ["file", *(f"{(place / mine[who][0]).stat().st_size / 1e9:.2f} GB" for who in own),
         f"{three / 1e9:.2f} GB, three files"],
        *[
            [f"load, {name}", *(f"{loads[who][name] * 1e3:.0f} ms" for who in who_runs)]
            for name in (*METHODS, "all")
        ],
        *[[f"run, {label}", *(f"{runs[label][who] * 1e3:.2f} ms" for who in who_runs)] for label in runs],
        *[
            [f"run, {label}, in a graph", *(f"{runs[label][f'{who} graph'] * 1e3:.2f} ms" for who in own), "–"]
            for label in runs
            if "untorch graph" in runs[label]
        ],
        *[
            [text, *("+ " * (who == "dequantized") + f"{memory[f'device_{who}'] / 1e9:.2f} GB" for who in who_runs)]
            for text in ("device memory",) if "device_torch" in memory
        ],
        ["weights and caches", f"{(memory['weights'] + memory['state']) / 1e9:.2f} GB", *("–" for _ in who_runs[1:])],
    ]  # fmt: skip
    names = {"untorch": "untorch" if options.quantize is None else f"untorch, {options.quantize}",
             "dequantized": f"untorch, {options.quantize}, dequantised", "unquantised": "untorch, unquantised",
             "torch": "torch's loader"}  # fmt: skip
    worst = {
        who: max(run["difference"][side] / max(run["largest"], 1e-30)
                 for run in runs.values() for side in (who, f"{who} graph") if side in run["difference"])
        for who in own
    }  # fmt: skip
    far = "; ".join(f"{names[who]} {share:.1e}" for who, share in worst.items())
    note = f"Medians. The largest difference of a first result from torch's, as a share of the largest value: {far}."
    report.tables[name] = Table(["", *(names[who] for who in who_runs)], rows, note)
    report.write(options.output or (WORK / "results" if quick else RESULTS))


if __name__ == "__main__":
    main()
