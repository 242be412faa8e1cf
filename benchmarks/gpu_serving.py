"""How fast does the engine serve a language model on a GPU? Qwen3-8B's sizes with random weights, bfloat16 and int4.

    UNTORCH_LIBRARY=build/gpu/native/libuntorch.so python benchmarks/gpu_serving.py [--quick] [--formats bfloat16]

Each figure is a run of ``untorch bench-llm``, a process without torch: 128 tokens in, 1,024 out, random prompts, by the
number of streams; then prompts of 2,048 tokens, one at a time, and the time from a process's start to a first token.
``--model tiny`` is a model of a few megabytes, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from common import RESULTS, WORK, Report, Table
from gpu_common import describe_gpu, note_of, random_language_model

PACKAGES = WORK / "serving"
FORMATS = ("bfloat16", "int4")
STREAMS = (1, 8, 64, 128, 256)
INPUT, OUTPUT, LONG_PROMPT = 128, 1024, 2048
SIZES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 512, "vocab_size": 4096, "max_position_embeddings": 4096,
    },
}  # fmt: skip
FIRST_TOKEN = """
import json, sys, time
from untorch.llm import Engine, SamplingParams
with Engine(sys.argv[1], max_sequences=1, text=False) as engine:
    opened = time.time()
    engine.generate([1, 2, 3], SamplingParams(max_tokens=1, temperature=0))
    print(json.dumps([opened, time.time()]))
"""


def build(name: str, kind: str, path: pathlib.Path) -> None:
    """In a process of its own: it imports torch."""
    from untorch.export import causal_lm

    options = {"quantize": "int4"} if kind == "int4" else {}
    causal_lm(random_language_model("qwen3", SIZES[name]), path, device="cuda", token_counts=(256, 2048), **options)


def bench(path: pathlib.Path, *options: str) -> dict[str, Any]:
    """What bench-llm measures."""
    command = [sys.executable, "-m", "untorch", "bench-llm", str(path), "--json", *options]
    result: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    del result["file"]
    return result


def first_token(path: pathlib.Path) -> dict[str, float]:
    """Seconds from a process's start, and from an engine that is open."""
    begin = time.time()
    done = subprocess.run([sys.executable, "-c", FIRST_TOKEN, str(path)], stdout=subprocess.PIPE, check=True)
    opened, end = json.loads(done.stdout)
    return {"open_s": opened - begin, "total_s": end - begin}


def measure(path: pathlib.Path, streams: tuple[int, ...], output: int) -> dict[str, Any]:
    """All figures of one package."""
    values: dict[str, Any] = {"bytes": path.stat().st_size, "first_token": first_token(path)}
    for count in streams:
        run = values[f"streams_{count}"] = bench(
            path, "--num-prompts", str(count), "--max-concurrency", str(count), "--input-len", str(INPUT),
            "--output-len", str(output), "--max-batch-tokens", "2048",
        )  # fmt: skip
        ttft, tpot = run["ttft_s"]["p50"] * 1e3, run["tpot_s"]["p50"] * 1e3
        print(
            f"{path.stem} {count}: {run['output_throughput']:.0f} tokens/s, TTFT p50 {ttft:.0f} ms, "
            f"TPOT p50 {tpot:.2f} ms, host {run['host_step_s'] * 1e3:.2f} ms a step",
            flush=True,
        )
    values["long_prompt"] = bench(
        path, "--num-prompts", "8", "--max-concurrency", "1", "--input-len", str(LONG_PROMPT), "--output-len", "2",
        "--max-batch-tokens", "2048",
    )  # fmt: skip
    return values


def table(values: dict[str, Any], streams: tuple[int, ...]) -> Table:
    """A row a package and number of streams."""
    rows = []
    for kind, found in values.items():
        for count in streams:
            run = found[f"streams_{count}"]
            rows.append(
                [
                    kind, str(count), f"{run['output_throughput']:,.0f}", f"{run['ttft_s']['p50'] * 1e3:.0f}",
                    f"{run['tpot_s']['p50'] * 1e3:.2f}", f"{run['tpot_s']['p99'] * 1e3:.2f}",
                    f"{run['host_step_s'] * 1e3:.2f}",
                ]
            )  # fmt: skip
    columns = ["Weights", "Streams", "Tokens/s", "TTFT p50, ms", "TPOT p50, ms", "TPOT p99, ms", "Host a step, ms"]
    return Table(columns, rows)


def prompt_table(values: dict[str, Any]) -> Table:
    """A row a package."""
    rows = [
        [kind, f"{found['bytes'] / 1e9:.1f} GB", f"{found['long_prompt']['ttft_s']['p50'] * 1e3:.1f}",
         f"{found['first_token']['total_s']:.2f}"]
        for kind, found in values.items()
    ]  # fmt: skip
    columns = ["Weights", "File", f"TTFT of {LONG_PROMPT:,} tokens, ms", "Process start to first token, s"]
    return Table(columns, rows, "Prompts one at a time; the file is in the page cache.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer streams and tokens")
    parser.add_argument("--model", choices=list(SIZES), default="qwen3-8b")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--build", nargs=2, metavar=("FORMAT", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    if options.build:
        build(options.model, options.build[0], pathlib.Path(options.build[1]))
        return
    streams, output = (STREAMS[:3], 64) if options.quick else (STREAMS, OUTPUT)
    PACKAGES.mkdir(parents=True, exist_ok=True)
    report = Report("gpu_serving", options.quick)
    describe_gpu(report)
    for kind in options.formats:
        path = PACKAGES / f"{options.model}.{kind}.pt2"
        if not path.exists():
            command = [sys.executable, __file__, "--model", options.model, "--build", kind, str(path)]
            subprocess.run(command, check=True, env=dict(os.environ, PYTHONWARNINGS="ignore"))
        report.values[kind] = measure(path, streams, output)
    made = table(report.values, streams)
    model = f"{options.model.capitalize()}'s sizes with random weights"
    text = f"{model}, {INPUT} tokens in and {output:,} out, greedy, by `untorch bench-llm`."
    report.tables["gpu_serving"] = Table(made.columns, made.rows, note_of(report, text))
    report.tables["gpu_serving_prompt"] = prompt_table(report.values)
    report.write(options.output)


if __name__ == "__main__":
    main()
