"""How long an export takes: ``untorch.export.export`` beside torch's own. Needs torch and torchvision.

``--device cuda`` is for the GPU of this machine, with models of gpu_zoo.py; ``--models`` names some.

Each export is a process of its own, whose imports and model are not counted; contestants alternate, or run at once with
``--at-once``, each with half of the cores and a GPU of its own. A round begins with empty caches, which the first model
fills (precompiled headers of torch's, an object of ours): its row says so. The file is written after every model.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from common import RESULTS, ROOT, WORK, Report, Table

LABELS = {"untorch": "untorch", "torch": "torch.export and aoti_compile_and_package"}
# The first fills the caches; its second export is the small model's.
FIRST = "mlp"
MODELS = {
    "cpu": (
        "resnet50", "mobilenet_v3_large", "swin_t", "segformer_b0", "bert_base", "t5_small_encoder", "gpt2",
        "llama_135m", "whisper_tiny_encoder",
    ),
    "cuda": ("resnet50", "mobilenet_v3_large", "bert_base", "whisper_encoder", "qwen3_0_6b", "qwen3_8b"),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a contestant's exports run: all of the machine, or a half with a GPU."""

    folder: str  # of its caches
    half: int | None = None

    def environment(self) -> dict[str, str]:
        """Of its processes."""
        changed = {"TORCHINDUCTOR_CACHE_DIR": f"{self.folder}/torch", "UNTORCH_CACHE": f"{self.folder}/untorch"}
        if self.half is not None:
            changed["CUDA_VISIBLE_DEVICES"] = str(self.half)
        return {name: value for name, value in os.environ.items() if name not in ("UNTORCH_HEADERS", "CXX")} | changed

    def cores(self) -> list[int]:
        """Of the cores of this process, its own."""
        cores = sorted(os.sched_getaffinity(0))
        middle = len(cores) // 2
        return cores if self.half is None else cores[middle:] if self.half else cores[:middle]


def export_once(contestant: str, model: str, place: Place, device: str, limit: float | None) -> dict[str, float] | None:
    """Seconds, and CPU seconds with the compilers', in a fresh process; ``None`` if ``limit`` was too short."""
    script = str(ROOT / "benchmarks" / "export_time.py")
    command = ["taskset", "--cpu-list", ",".join(map(str, place.cores()))]
    command += [sys.executable, script, "--child", contestant, model, place.folder, device]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, env=place.environment(), timeout=limit
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        raise SystemExit(f"{model}, {contestant}: its process ended with exit code {done.returncode}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def load(name: str, device: str) -> tuple[Any, Any]:
    """The model and its example inputs on the device."""
    import torch

    if name == FIRST:
        layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        return layers.eval().to(device), (torch.randn(8, 64, device=device),)
    if device == "cpu":
        from cpu_zoo import load_model

        return load_model(name)
    if name != "qwen3_8b":
        from gpu_models import example

        return example(name, "float32" if name in MODELS["cuda"][:2] else "bfloat16")
    from gpu_common import random_language_model
    from gpu_llm import SIZES

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = random_language_model(*SIZES["qwen3-8b"])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(tokens, use_cache=False).logits
            return logits

    return Logits().eval().requires_grad_(False).cuda(), (torch.arange(256, device="cuda")[None],)


def child(contestant: str, name: str, folder: str, device: str) -> None:
    """One export, with its time on the last line of the output."""
    import torch

    model, example = load(name, device)
    path = f"{folder}/{contestant}.pt2"
    if contestant == "untorch":
        from untorch.export import export
    else:
        import torch._inductor
    begin, used = time.perf_counter(), cpu_seconds()
    if contestant == "untorch":
        export(model, example, path, device=device, progress=False)
    else:
        with torch.no_grad():
            program = torch.export.export(model, example)
            torch._inductor.aoti_compile_and_package(program, package_path=path)
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "cpu": cpu_seconds() - used, "bytes": os.path.getsize(path)}))
    os.unlink(path)


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, whose))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(MODELS), default="cpu")
    parser.add_argument("--models", nargs="*", help="those alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", action="store_true", help="both contestants, each on its half of the machine")
    parser.add_argument("--limit", type=float, help="seconds for an export with its imports and its model")
    parser.add_argument("--quick", action="store_true", help="one round of the first model")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    options = parser.parse_args()
    output = options.output or (WORK / "results" if options.quick else RESULTS)
    title = "export_time" if options.device == "cpu" else "gpu_export_time"
    report = Report(title, options.quick, script="benchmarks/export_time.py")
    if options.device == "cuda":
        from gpu_common import describe_gpu

        describe_gpu(report)
    models = options.models or MODELS[options.device]
    rounds, models = (1, models[:1]) if options.quick else (options.rounds, models)
    cases = [(f"{FIRST}, caches empty", FIRST), (FIRST, FIRST), *((model, model) for model in models)]
    results: dict[str, dict[str, list[dict[str, float] | None]]] = {}
    halves = dict(zip(LABELS, (0, 1) if options.at_once else (None, None), strict=True))
    for _ in range(rounds):
        places = {key: Place(tempfile.mkdtemp(prefix="untorch-bench-"), half) for key, half in halves.items()}
        try:
            for case, model in cases:

                def run(key: str, model: str = model, places: dict[str, Place] = places) -> dict[str, float] | None:
                    return export_once(key, model, places[key], options.device, options.limit)

                with concurrent.futures.ThreadPoolExecutor(len(LABELS) if options.at_once else 1) as pool:
                    for key, found in zip(LABELS, pool.map(run, LABELS), strict=True):
                        results.setdefault(case, {name: [] for name in LABELS})[key].append(found)
                        seconds = "not done" if found is None else f"{found['seconds']:.1f} s"
                        print(f"{case}, {key}: {seconds}", file=sys.stderr, flush=True)
                write(report, title, results, options, output)
        finally:
            for place in places.values():
                shutil.rmtree(place.folder)


def write(
    report: Report,
    title: str,
    results: dict[str, dict[str, list[dict[str, float] | None]]],
    options: argparse.Namespace,
    output: pathlib.Path,
) -> None:
    """What is there so far."""
    rows = []
    for case, found in results.items():
        median: dict[str, dict[str, float] | None] = {}
        for key, runs in found.items():
            done = [run for run in runs if run is not None]
            whole = len(done) == len(runs)
            median[key] = {name: statistics.median(run[name] for run in done) for name in done[0]} if whole else None
        times = [f"{m['seconds']:.1f} ({m['cpu']:.1f})" if m else f"above {options.limit:.0f}" for m in median.values()]
        ours, theirs = median["untorch"], median["torch"]
        rows.append([case, *times, f"{theirs['seconds'] / ours['seconds']:.2f}" if ours and theirs else "–"])
        report.values[case] = {"median": median, "runs": found}
    rounds = max(len(runs) for found in results.values() for runs in found.values())
    note = (
        f"Seconds of an export, median of {rounds} (CPU seconds, with the compiler's). Last column: higher is better."
    )
    if options.at_once:
        note += " Both at once, each with half of the cores and a GPU of its own."
    report.tables[title] = Table(["Model", *LABELS.values(), "torch's : untorch's"], rows, note)
    report.write(output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
