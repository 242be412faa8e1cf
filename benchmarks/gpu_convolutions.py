"""What do the passes for convolutions give whole models on a GPU? Own exports with them and without, in one process.

    python benchmarks/gpu_convolutions.py --cross-compile build/convolutions [--models resnet50 --dtypes bfloat16]
    UNTORCH_LIBRARY=build/gpu/native/libuntorch.so python benchmarks/gpu_convolutions.py --packages build/convolutions

Models are those of ``gpu_zoo.py``. Packages are compiled where there is no GPU, for sm_90, and travel without their
weights (``weightless.py``): results are not compared here, the tests do that. Both variants run alternately on one
stream; a call's time ends when the GPU is done. A run replaces its rows in the JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import time
from typing import Any

from common import RESULTS, WORK, Report, Table
from gpu_common import describe_gpu, note_of
from weightless import pack, unpack

MODELS = (
    "resnet50", "regnet_y_400mf", "resnest50d", "deeplabv3_resnet50", "r2plus1d_18", "shufflenet_v2_x1_0",
    "mobilenet_v3_large", "efficientnet_b0", "tf_efficientnetv2_s", "convnext_tiny", "edgenext_small",
    "coatnet_0_rw_224", "segformer_b0",
)  # fmt: skip
PASSES = ("fuse_convolutions", "resize_after_convolution", "compose_linears")
VARIANTS = {"without": dict.fromkeys(PASSES, False), "with": {}}


def packed(folder: pathlib.Path, name: str, dtype: str, variant: str) -> pathlib.Path:
    return folder / f"{name}.{dtype}.{variant}.xz"


def cross_compile(options: argparse.Namespace) -> None:
    """Leaves the packages of each model that are not there yet, without their weights."""
    import cpu_zoo
    import torch
    from gpu_zoo import MODELS as ZOO

    from untorch.export import export

    with contextlib.suppress(SystemExit):  # without torchvision there are models, too
        cpu_zoo._import_torchvision()
    options.cross_compile.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        for dtype in options.dtypes:
            kind = getattr(torch, dtype)
            for variant, passes in VARIANTS.items():
                target = packed(options.cross_compile, name, dtype, variant)
                if target.exists():
                    continue
                torch.manual_seed(0)
                model, args = ZOO[name]()
                model = model.eval().requires_grad_(False).to(kind)
                args = tuple(a.to(kind) if a.is_floating_point() else a for a in args)
                begin = time.perf_counter()
                path = target.with_suffix(".pt2")
                export(model, args, path, device="cuda", arch="sm_90", progress=False, passes=passes)
                pack(path, target)
                path.unlink()
                print(f"{name}, {dtype}, {variant} the passes: {time.perf_counter() - begin:.1f} s", flush=True)


def measure(folder: pathlib.Path, name: str, dtype: str, seconds: float) -> dict[str, float]:
    """Microseconds of a call and of a CUDA graph, by variant."""
    import torch
    from gpu_models import alternate, example

    import untorch

    _, args = example(name, dtype)
    calls: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        stream = torch.cuda.Stream()
        stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(untorch.stream(stream))
        for variant in VARIANTS:
            path = WORK / "convolutions" / f"{name}.{dtype}.{variant}.pt2"
            path.parent.mkdir(parents=True, exist_ok=True)
            unpack(packed(folder, name, dtype, variant), path)
            program = stack.enter_context(untorch.load(path))
            method = program[next(iter(program))]
            method(*args)
            graph = stack.enter_context(method.graph(*args))
            calls[f"call {variant}"] = lambda method=method: method(*args)
            calls[f"graph {variant}"] = lambda graph=graph: graph(*args)
            path.unlink()
        times = alternate(calls, stream.synchronize, seconds)
        calls.clear()
    return {key: round(value["call"] * 1e6, 1) for key, value in times.items()}


def table(measured: dict[str, dict[str, float]]) -> Table:
    rows = []
    for key, times in measured.items():
        name, dtype = key.split(":")
        row = [name, dtype]
        for kind in ("call", "graph"):
            before, after = times[f"{kind} without"], times[f"{kind} with"]
            row += [f"{before:.0f}", f"{after:.0f} ({before / after:.2f})"]
        rows.append(row)
    return Table(["Model", "dtype", "call without", "with", "CUDA graph without", "with"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--cross-compile", type=pathlib.Path, metavar="FOLDER", help="compile into it, measure nothing")
    parser.add_argument("--packages", type=pathlib.Path, metavar="FOLDER", help="what --cross-compile left")
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring for each contestant")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    if options.cross_compile:
        cross_compile(options)
        return
    if options.packages is None:
        parser.error("one of --cross-compile and --packages is needed")
    file = options.output / "gpu_convolutions.json"
    known = json.loads(file.read_text())["values"]["measured"] if file.exists() else {}
    report = Report("gpu_convolutions", quick=False)
    describe_gpu(report)
    for name in options.models:
        for dtype in options.dtypes:
            if all(packed(options.packages, name, dtype, variant).exists() for variant in VARIANTS):
                try:
                    known[f"{name}:{dtype}"] = measure(options.packages, name, dtype, options.seconds)
                except Exception as error:
                    print(f"{name}, {dtype}: {type(error).__name__}: {error}", flush=True)
                    continue
                print(name, dtype, known[f"{name}:{dtype}"], flush=True)
                report.values = {"measured": known}
                text = "Microseconds of a call, median; in brackets how many times as fast with the passes."
                made = table(known)
                report.tables["gpu_convolutions"] = Table(made.columns, made.rows, note_of(report, text))
                report.write(options.output)


if __name__ == "__main__":
    main()
