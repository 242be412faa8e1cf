"""How near the memory's speed does one stream decode on a GPU? Published sizes, random weights; beside torch.compile.

    UNTORCH_LIBRARY=build/gpu/native/libuntorch.so python benchmarks/gpu_llm.py --models qwen3-8b --formats int4 \\
      [--contexts 128 4096] [--no-torch] [--quick]

Each package is measured in a process without torch: milliseconds of a decoding step whose graphs are enqueued one
behind the other, tokens a second that a Python loop over ``engine.generate`` gets, and the time of prompts. Bytes are
those of the weights that a token needs (all experts that it chooses, no table of embeddings but a tied one) and of its
keys and values. A run adds its packages to those in the JSON file. ``--models tiny --device cpu`` tries the script.

Compiling takes longer than measuring, and needs no GPU: ``--cross-compile FOLDER`` compiles elsewhere for sm_90, and
leaves packages there without their weights (``weightless.py``), which ``--packages FOLDER`` measures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

from common import RESULTS, WORK, Report, Table
from gpu_common import answer, child, describe_gpu, memory_bandwidth, note_of, random_language_model
from weightless import pack, unpack

PACKAGES = WORK / "llm"
FORMATS = ("bfloat16", "int4", "nvfp4")
CONTEXTS = (128, 4096, 32768)
PROMPTS = (128, 512, 2048, 8192)
NEW = 128  # tokens behind a context
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "float8_e4m3fn": 1}
MATRIX_RATE = 790e12  # of an H200 in bfloat16, as cuBLAS reaches it
_QWEN3 = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-8b": ("qwen3", {
        **_QWEN3, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 12_288, "tie_word_embeddings": False,
    }),
    "llama-3.2-1b": ("llama", {
        "head_dim": 64, "vocab_size": 128_256, "max_position_embeddings": 40_960, "hidden_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
        "tie_word_embeddings": True,
    }),
    "qwen3-0.6b": ("qwen3", {
        **_QWEN3, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "intermediate_size": 3072, "tie_word_embeddings": True,
    }),
    # 16 of its 48 layers: the file of all in bfloat16 has 61 GB.
    "qwen3-30b-a3b": ("qwen3_moe", {
        **_QWEN3, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "tie_word_embeddings": False,
    }),
    "tiny": ("qwen3", {
        "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 4096, "hidden_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
        "tie_word_embeddings": True,
    }),
}  # fmt: skip


def build(name: str, kind: str, device: str, arch: str | None, path: pathlib.Path) -> None:
    """In a process of its own: it imports torch. Weights are rounded to the nearest: no figure here depends on it."""
    from untorch.export import causal_lm

    options: dict[str, Any] = {"arch": arch} if arch else {}
    if kind != "bfloat16":
        options["quantize"] = {"dtype": "int4", "method": "rtn"} if kind == "int4" else kind
    causal_lm(random_language_model(*SIZES[name]), path, device=device, token_counts=(256, 2048), **options)


def bytes_of(program: Any, name: str, kind: str) -> dict[str, int]:
    """Bytes of weights that a token reads, and bytes of keys and values a position.

    A tied table of embeddings is read as the head, unless that has a quantised copy.
    """
    config, manifest = SIZES[name][1], program.manifest
    share = config.get("num_experts_per_tok", 1) / config.get("num_experts", 1)
    method = manifest["methods"][manifest["llm"]["methods"][0]["name"]]
    weights = 0.0
    for constant in {(one["weight"], one["storage_offset"]): one for one in method["constants"]}.values():
        if "embed_tokens" not in constant["fqn"] or (config["tie_word_embeddings"] and kind == "bfloat16"):
            nbytes = math.prod(constant["shape"]) * ITEM_BYTES[constant["dtype"]]
            weights += nbytes * (share if "experts" in constant["fqn"] else 1)
    layers = config["num_hidden_layers"] * config["num_key_value_heads"]
    return {"weights": round(weights), "position": layers * config["head_dim"] * 2 * 2}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """All figures of one package, in a process without torch."""
    import numpy

    from untorch.llm import Engine, SamplingParams
    from untorch.llm.graphs import StepGraphs

    step: dict[str, Any] = {}
    replay = StepGraphs.replay

    def recording(self: StepGraphs, *given: Any, **named: Any) -> Any:
        step["run"] = lambda: replay(self, *given, **named)
        return replay(self, *given, **named)

    StepGraphs.replay = recording  # type: ignore[method-assign]
    random = numpy.random.default_rng(0)
    values: dict[str, Any] = {"contexts": {}, "prompts": {}}
    with Engine(request["file"], max_sequences=1, max_batch_tokens=2048, text=False, prefix_cache=False) as engine:
        program = engine._runner._program  # type: ignore[attr-defined]
        values["bytes"] = bytes_of(program, request["model"], request["format"])
        vocabulary = engine.settings.vocabulary

        def seconds(length: int, new: int) -> float:
            params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
            prompt = random.integers(0, vocabulary, length).tolist()
            begin = time.perf_counter()
            engine.generate(prompt, params)
            return time.perf_counter() - begin

        seconds(16, 4)
        for context in request["contexts"]:
            whole = statistics.median(seconds(context, 1 + NEW) - seconds(context, 1) for _ in range(request["rounds"]))
            values["contexts"][str(context)] = found = {"end_to_end_s": whole / NEW}
            if "run" in step:
                found["graph_s"] = _seconds_a_step(step["run"], request["rounds"])
        for length in request["prompts"]:
            values["prompts"][str(length)] = statistics.median(seconds(length, 1) for _ in range(request["rounds"]))
    return values


def _seconds_a_step(run: Any, rounds: int) -> float:
    """Of a step's graph: many more of them, one behind the other, without those that begin and end them."""

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            logits = run()
        logits.numpy()
        return time.perf_counter() - begin

    seconds(4)
    return statistics.median((seconds(72) - seconds(8)) / 64 for _ in range(rounds))


def measure_torch(request: dict[str, Any]) -> dict[str, Any]:
    """torch.compile with reduce-overhead: a static cache of the context, a token chosen on the GPU, read by Python."""
    import torch
    from static_cache import with_cache

    model = random_language_model(*SIZES[request["model"]]).cuda()
    values: dict[str, Any] = {"contexts": {}}
    for context in request["contexts"]:
        torch._dynamo.reset()
        module = with_cache(model, context + NEW + 8).cuda()
        for name, buffer in module.named_buffers():
            if name.startswith("position_"):
                buffer.fill_(context)
        decode = torch.compile(module, mode="reduce-overhead", fullgraph=True, dynamic=False)
        token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")

        def step(token: Any, decode: Any = decode) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return decode(token).argmax(-1, keepdim=True)

        with torch.no_grad():
            for _ in range(4):
                token = step(token)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(NEW):
                token = step(token)
                token.item()
        values["contexts"][str(context)] = {"end_to_end_s": (time.perf_counter() - begin) / NEW}
        del module, decode
    return values


def tables(report: Report) -> None:
    """A row a package and context; a row a package and prompt."""
    bandwidth = memory_bandwidth(report.machine["gpu"]["name"]) if "gpu" in report.machine else float("nan")
    decode, prefill = [], []
    for key, found in report.values.items():
        name, kind = key.split("/")
        theirs = found.get("torch", {}).get("contexts", {})
        for context, times in found["contexts"].items():
            read = found["bytes"]["weights"] + found["bytes"]["position"] * (int(context) + NEW / 2)
            graph = times.get("graph_s", times["end_to_end_s"])
            peer = theirs.get(context)
            decode.append(
                [name, kind, f"{int(context):,}", f"{graph * 1e3:.3f}", f"{1 / times['end_to_end_s']:.0f}",
                 f"{read / graph / bandwidth:.2f}", f"{1 / peer['end_to_end_s']:.0f}" if peer else "–"]
            )  # fmt: skip
        for length, seconds in found["prompts"].items():
            share = 2 * found["multiplied"] * int(length) / seconds / MATRIX_RATE
            prefill.append([name, kind, f"{int(length):,}", f"{seconds * 1e3:.1f}", f"{share:.2f}"])
    columns = ["Model", "Weights", "Context", "Graph, ms", "Tokens/s", "Share of the memory", "torch.compile, tokens/s"]
    text = "Random weights, one stream, greedy. Share: bytes that must be read, by the data sheet's rate."
    note = note_of(report, text) if "gpu" in report.machine else text
    report.tables["gpu_llm"] = Table(columns, decode, note)
    text = "First token of one prompt, with the engine. Share of 790 TFLOP/s: products of weights alone."
    report.tables["gpu_llm_prefill"] = Table(["Model", "Weights", "Tokens", "ms", "Share"], prefill, text)


def multiplied(name: str) -> int:
    """Weights that a token of a prompt is multiplied by: not the last layer's, which one row needs."""
    config = SIZES[name][1]
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, heads_kv = config["num_attention_heads"], config["num_key_value_heads"]
    inner = config["intermediate_size"]
    if "num_experts" in config:
        inner = config["moe_intermediate_size"] * config["num_experts_per_tok"]
    return int(config["num_hidden_layers"] * hidden * (2 * heads * width + 2 * heads_kv * width + 3 * inner))


def compile_package(name: str, kind: str, path: pathlib.Path, *arguments: str) -> None:
    command = [sys.executable, __file__, *arguments, "--build", name, kind, str(path)]
    subprocess.run(command, check=True, env=dict(os.environ, PYTHONWARNINGS="ignore"))


def cross_compile(options: argparse.Namespace) -> None:
    """Each package, packed; one at a time, so that there is one whole file."""
    options.cross_compile.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        for kind in options.formats:
            path = PACKAGES / f"{name}.{kind}.pt2"
            compile_package(name, kind, path, "--cross-compile", str(options.cross_compile))
            pack(path, options.cross_compile / f"{path.stem}.xz")
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--models", nargs="*", choices=list(SIZES), default=[name for name in SIZES if name != "tiny"])
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--contexts", nargs="*", type=int, default=list(CONTEXTS))
    parser.add_argument("--prompts", nargs="*", type=int, default=list(PROMPTS))
    parser.add_argument("--no-torch", action="store_true", help="leave torch.compile out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--cross-compile", type=pathlib.Path, metavar="FOLDER", help="compile for sm_90 alone")
    parser.add_argument("--packages", type=pathlib.Path, metavar="FOLDER", help="what --cross-compile left")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--build", nargs=3, metavar=("MODEL", "FORMAT", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        request = json.loads(options.child)
        answer(**(measure_torch(request) if request["torch"] else measure(request)))
        return
    if options.build:
        arch = "sm_90" if options.cross_compile else None
        build(options.build[0], options.build[1], options.device, arch, pathlib.Path(options.build[2]))
        return
    PACKAGES.mkdir(parents=True, exist_ok=True)
    if options.cross_compile:
        cross_compile(options)
        return
    report = Report("gpu_llm", options.quick)
    if options.device == "cuda":
        describe_gpu(report)
    earlier = options.output / "gpu_llm.json"
    if earlier.exists():
        report.values.update(json.loads(earlier.read_text())["values"])
    for name in options.models:
        request = {"model": name, "contexts": options.contexts, "prompts": options.prompts}
        request["rounds"] = 1 if options.quick else 3
        theirs = {}
        if not options.no_torch and options.device == "cuda":
            theirs = child(__file__, {**request, "torch": True})
        for kind in options.formats:
            path = PACKAGES / f"{name}.{kind}.pt2"
            if options.packages:
                unpack(options.packages / f"{path.stem}.xz", path)
            elif not path.exists():
                compile_package(name, kind, path, "--device", options.device)
            found = child(__file__, {**request, "torch": False, "file": str(path), "format": kind})
            del found["started"]
            found["multiplied"] = multiplied(name)
            if kind == "bfloat16" and theirs:
                found["torch"] = {"contexts": theirs["contexts"]}
            report.values[f"{name}/{kind}"] = found
            tables(report)
            report.write(options.output)  # what is measured is kept, whatever comes
            if options.packages:
                path.unlink()


if __name__ == "__main__":
    main()
