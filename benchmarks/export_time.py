"""How long an export takes: ``untorch.export.export`` beside torch's own, for CPUs. Needs torch and torchvision.

Each export is a process of its own, whose imports and model are not counted; contestants alternate. A round begins with
empty caches, which the first model fills (precompiled headers of torch's, an object of ours): its row says so.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from common import ROOT, Report, Table, arguments

LABELS = {"untorch": "untorch", "torch": "torch.export and aoti_compile_and_package"}
# The first fills the caches; its second export is the small model's.
FIRST = "mlp"
MODELS = (
    "resnet50", "mobilenet_v3_large", "swin_t", "segformer_b0", "bert_base", "t5_small_encoder", "gpt2", "llama_135m",
    "whisper_tiny_encoder",
)  # fmt: skip


def export_once(contestant: str, model: str, folder: str) -> dict[str, float]:
    """Seconds, and CPU seconds with the compilers', in a fresh process that keeps its caches in ``folder``."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch", "UNTORCH_CACHE": f"{folder}/untorch"}
    for name in ("UNTORCH_HEADERS", "CXX"):
        environment.pop(name, None)
    command = [sys.executable, str(ROOT / "benchmarks" / "export_time.py"), "--child", contestant, model, folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{model}, {contestant}: its process ended with exit code {done.returncode}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def child(contestant: str, name: str, folder: str) -> None:
    """One export, with its time on the last line of the output."""
    import torch
    from cpu_zoo import load_model

    if name == FIRST:
        layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        model, example = layers.eval(), (torch.randn(8, 64),)
    else:
        model, example = load_model(name)
    path = f"{folder}/{contestant}.pt2"
    if contestant == "untorch":
        from untorch.export import export
    else:
        import torch._inductor
    begin, used = time.perf_counter(), cpu_seconds()
    if contestant == "untorch":
        export(model, example, path, progress=False)
    else:
        with torch.no_grad():
            program = torch.export.export(model, example)
            torch._inductor.aoti_compile_and_package(program, package_path=path)
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "cpu": cpu_seconds() - used, "bytes": os.path.getsize(path)}))


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, whose))


def main() -> None:
    options = arguments(__doc__)
    report = Report("export_time", options.quick)
    rounds, models = (1, MODELS[:1]) if options.quick else (3, MODELS)
    cases = [(f"{FIRST}, caches empty", FIRST), (FIRST, FIRST), *((model, model) for model in models)]
    results: dict[str, dict[str, list[dict[str, float]]]] = {case: {key: [] for key in LABELS} for case, _ in cases}
    for _ in range(rounds):
        folders = {key: tempfile.mkdtemp(prefix="untorch-bench-") for key in LABELS}
        try:
            for case, model in cases:
                for key, folder in folders.items():
                    results[case][key].append(export_once(key, model, folder))
        finally:
            for folder in folders.values():
                shutil.rmtree(folder)
    rows = []
    for case, found in results.items():
        median: dict[str, dict[str, Any]] = {
            key: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for key, runs in found.items()
        }
        ours, theirs = median["untorch"], median["torch"]
        times = [f"{median[key]['seconds']:.1f} ({median[key]['cpu']:.1f})" for key in LABELS]
        rows.append([case, *times, f"{theirs['seconds'] / ours['seconds']:.2f}"])
        report.values[case] = {"median": median, "runs": found}
    note = (
        f"Seconds of an export, median of {rounds} (CPU seconds, with the compiler's). Last column: higher is better."
    )
    report.tables["export_time"] = Table(["Model", *LABELS.values(), "torch's : untorch's"], rows, note)
    report.write(options.output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
