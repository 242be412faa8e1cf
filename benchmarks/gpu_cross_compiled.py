"""Are cross-compiled files as fast as files compiled on the GPU? µs of the GPU for a call.

    python benchmarks/gpu_cross_compiled.py [--quick] [--models mlp cnn] [--build] [--matmul auto]

"native" is ``export(..., device="cuda")``, which times kernel configurations on this machine's GPU. "cross-compiled" is
``export(..., device="cuda", arch=...)`` for its architecture, as a machine without a GPU does it. "tuned" adds the
tuning file that "native" recorded. All are CUDA graphs of the same call, whose replays alternate. Above 1 in the last
columns, the cross-compiled file is faster. With --matmul auto, Triton GEMM templates compete with the runtime's GEMMs
in all three; "library" is a native build without templates.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import RESULTS, WORK, Report, Table
from gpu_common import describe_gpu

PLACE = WORK / "cross"
SIDES = ("native", "cross", "tuned")  # with matmul="auto" native-auto and so on
REPLAYS = 10  # of a graph per measurement; two where each fills a third of a cache


def block(width: int, length: int, causal: bool) -> tuple[Any, tuple[Any, ...]]:
    """A transformer block: attention without rotary embeddings, and a gated MLP, with RMS norms."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = width // 64
            self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
            self.down = nn.Linear(3 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, n, _ = x.shape
            q, k, v = self.qkv(self.first(x)).view(b, n, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            x = x + self.out(mixed.transpose(1, 2).reshape(b, n, width))
            y = self.second(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    return Block().bfloat16(), (torch.randn(1, length, width).bfloat16(),)


def mlp() -> tuple[Any, tuple[Any, ...]]:
    import torch
    from torch import nn

    layers = [
        nn.Linear(1024, 4096),
        nn.GELU(),
        nn.LayerNorm(4096),
        nn.Linear(4096, 1024),
        nn.GELU(),
        nn.LayerNorm(1024),
    ]
    return nn.Sequential(*layers, nn.Linear(1024, 10), nn.Softmax(-1)), (torch.randn(64, 1024),)


def cnn() -> tuple[Any, tuple[Any, ...]]:
    import torch
    from torch import nn

    def step(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    layers = [*step(3, 32, 2), *step(32, 64, 1), *step(64, 128, 2), *step(128, 128, 1), *step(128, 256, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000)]
    return nn.Sequential(*layers, *head), (torch.randn(8, 3, 224, 224),)


def minilm() -> tuple[Any, tuple[Any, ...]]:
    import torch
    import transformers

    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522
    )

    class Embedder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(config)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask[:, :, None].to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)

    ids = torch.randint(0, 30522, (16, 64))
    return Embedder(), (ids, torch.ones_like(ids))


def voxtral(device: str, method: str, positions: int = 0) -> tuple[Any, tuple[Any, ...]]:
    """The published sizes with four layers: more of them are the same again."""
    import torch
    import voxtral_model

    model = voxtral_model.build_model(layers=4).to(device)  # the cache that is made for it does not move with it
    if method == "audio_encoder":
        made: tuple[Any, tuple[Any, ...]] = voxtral_model.methods(model, 1024)["audio_encoder"]
        return made
    hidden = model.config.text_config.hidden_size
    return voxtral_model.decoder(model, 1024), (torch.randn(1, positions, hidden).bfloat16(),)


# Of the device on which the model is to be exported.
MODELS: dict[str, Callable[[str], tuple[Any, tuple[Any, ...]]]] = {
    "mlp": lambda _: mlp(),
    "cnn": lambda _: cnn(),
    "minilm": lambda _: minilm(),
    "block, 512 wide, 128 tokens": lambda _: block(512, 128, False),
    "block, 1024 wide, 512 tokens": lambda _: block(1024, 512, False),
    "block, 2048 wide, 2048 tokens": lambda _: block(2048, 2048, True),
    "block, 4096 wide, 1 token": lambda _: block(4096, 1, False),
    "Voxtral's encoder, 4 layers": lambda device: voxtral(device, "audio_encoder"),
    "Voxtral's decoder, 4 layers, 388 tokens": lambda device: voxtral(device, "text_decoder", 388),
    "Voxtral's decoder, 4 layers, 1 token": lambda device: voxtral(device, "text_decoder", 1),
}
# One file with a dynamic number of tokens serves both.
DECODER, DECODER_AGAIN = list(MODELS)[-2:]


def file_of(name: str, side: str) -> pathlib.Path:
    number = list(MODELS).index(DECODER if name == DECODER_AGAIN else name)
    return PLACE / f"{number}_{side}.pt2"


def tuning_of(name: str, side: str) -> pathlib.Path:
    """What the native build of the same kind records."""
    return file_of(name, side.replace("tuned", "native")).with_suffix(".json")


def build(name: str, side: str) -> None:
    """Compiles in this process."""
    import torch

    from untorch.export import export

    PLACE.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    how, _, matmul = side.partition("-")
    model, args = MODELS[name]("cuda" if how == "native" else "cpu")
    model = model.eval()
    major, minor = torch.cuda.get_device_capability()
    given: dict[str, Any] = {"arch": f"sm_{major}{minor}"}
    if how == "tuned":
        given["tuning"] = tuning_of(name, side)
    if how == "native":
        given = {"record_tuning": tuning_of(name, side)}
        model, args = model.cuda(), tuple(arg.cuda() for arg in args)
    if name == DECODER:
        given["dynamic_shapes"] = ({1: torch.export.Dim("n", min=1, max=1024)},)
    if matmul:
        given["matmul"] = matmul
    path = file_of(name, side)
    made = path.with_name(f"new-{path.name}")
    with torch.no_grad():
        export(model, args, made, device="cuda", progress=False, **given)
    made.rename(path)


def build_all(names: list[str], sides: list[str]) -> None:
    """Builds missing files, several at a time; a tuned file after its native one."""
    natives, tuned = ([side for side in sides if side.startswith(how)] for how in ("native", "tuned"))

    def one(name: str, side: str) -> str | None:
        if file_of(name, side).exists():
            return None
        command = [sys.executable, __file__, "--child", name, side]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return None if done.returncode == 0 else f"{name}, {side}: {done.stderr[-2000:]}"

    names = list(dict.fromkeys(DECODER if name == DECODER_AGAIN else name for name in names))
    with ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) // 2, 1)) as pool:
        native = {name: [pool.submit(one, name, side) for side in natives] for name in names}
        others = [pool.submit(one, name, side) for name in names for side in sides if side.startswith("cross")]
        failures = []
        for name, builds in native.items():
            failed = [made.result() for made in builds]
            failures += failed
            others += [] if any(failed) else [pool.submit(one, name, side) for side in tuned]
        failures += [made.result() for made in others]
    if any(failures):
        raise SystemExit("\n".join(filter(None, failures)))


def measure(name: str, sides: list[str], rounds: int) -> dict[str, float]:
    """Seconds a call of each side, and the largest difference of results, relative to the largest value."""
    import torch

    import untorch

    torch.manual_seed(0)
    args = tuple(arg.cuda() for arg in MODELS[name]("cpu")[1])
    stream = torch.cuda.current_stream()
    with untorch.stream(stream):
        programs = {side: untorch.load(file_of(name, side)) for side in sides}
        graphs = {side: program.forward.graph(*args) for side, program in programs.items()}
        for program in programs.values():
            program.reset()
        results = {side: torch.from_dlpack(graph(*args)).float().clone() for side, graph in graphs.items()}
        times: dict[str, list[float]] = {side: [] for side in sides}
        replays = 2 if name == DECODER else REPLAYS
        for _ in range(rounds):
            for side, graph in graphs.items():
                programs[side].reset()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(stream)
                for _ in range(replays):
                    graph(*args)
                end.record(stream)
                end.synchronize()
                times[side].append(begin.elapsed_time(end) / 1e3 / replays)
        want = results[sides[0]]
        difference = max(float((result - want).abs().max() / want.abs().max()) for result in results.values())
    for program in programs.values():
        program.close()
    return {f"{side}_seconds": statistics.median(samples[1:]) for side, samples in times.items()} | {
        "difference": difference
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        build(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL", help="which"
    )
    parser.add_argument("--matmul", choices=["library", "auto"], default="library", help="the option of export")
    parser.add_argument("--build", action="store_true", help="build missing files, and stop")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    options = parser.parse_args()
    auto = options.matmul == "auto"
    compared = [f"{side}-auto" if auto else side for side in SIDES]
    sides = ["native", *compared] if auto else compared
    build_all(options.models, sides)
    if options.build:
        return
    label = "gpu_cross_compiled_auto" if auto else "gpu_cross_compiled"
    report = Report(label, options.quick)
    gpu = describe_gpu(report)
    rows = []
    ratios: dict[str, list[float]] = {side: [] for side in compared[1:]}
    for name in options.models:
        found = measure(name, sides, 5 if options.quick else 51)
        report.values[name] = found
        for side, values in ratios.items():
            values.append(found[f"{compared[0]}_seconds"] / found[f"{side}_seconds"])
        times = [f"{found[f'{side}_seconds'] * 1e6:.1f}" for side in sides]
        rows.append([name, *times, *(f"{values[-1]:.2f}" for values in ratios.values())])
    means = {side: math.exp(statistics.fmean(map(math.log, values))) for side, values in ratios.items()}
    report.values["geometric_mean"] = means
    cross, tuned = (f"{means[side]:.2f}, least: {min(ratios[side]):.2f}" for side in ratios)
    note = (
        f"Medians of CUDA graph replays on {gpu}. Geometric mean of native / cross-compiled: {cross}; of native / "
        f"tuned: {tuned}."
    )
    header = [
        "model",
        *(["library µs"] if auto else []),
        "native µs",
        "cross-compiled µs",
        "tuned µs",
        "native / cross-compiled",
        "native / tuned",
    ]
    report.tables[label] = Table(header, rows, note)
    report.write(options.output or (WORK / "results" if options.quick else RESULTS))


if __name__ == "__main__":
    main()
