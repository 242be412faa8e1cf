"""How fast are language models on this CPU? untorch's int4 and int8 beside llama.cpp and OpenVINO, one and two threads.

The sizes of Qwen3-0.6B, Llama-3.2-1B and some layers of a mixture of experts with random weights, which all files are
made from: untorch packages (int4 with groups of 32, int8 but for experts), GGUF files in Q4_0 and Q8_0 for llama.cpp
(by llama-cpp-python), and OpenVINO's IR of these, but for experts. Greedy
decoding of one stream: 64 tokens behind a prompt of 32; prefill: the first token behind a prompt of 512. Beside tokens
a second stands the share of the read bandwidth that the weights take: another process reads an array in turns with the
contestants. Every contestant has its own process. Only one computes at a time, and they alternate, so that a slow
minute of the machine hits all. Logits are compared with those of eager float32 with each file's dequantised weights.

A runtime that is not installed is left out. UNTORCH_BENCH_LLM_PYTHON is an interpreter that has llama-cpp-python and
openvino-genai, by default this one. UNTORCH_BENCH_MODELS names some of the sizes: qwen3_0.6b, llama3.2_1b, qwen3_moe.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import llm_models
import numpy
from common import Contestant, Report, Table, Workers, arguments, summarise
from llm_models import DECODE, GGUF, PREFILL, PROMPT, PYTHON, SIZES, TOKENS
from llm_runtimes import READ_BYTES
from llm_worker import cosine_distance

THREADS = tuple(number for number in (1, 2) if number <= len(os.sched_getaffinity(0)))
# Cosine distance of logits. Swapping two of 32 tokens gives 0.055, a shift of all positions 0.5; activations in 8 bits
# 0.004. Behind 512 tokens, eager bfloat16 with the unrounded weights of Llama-3.2-1B is at 0.016 itself.
TOLERANCE = {DECODE: 0.01, PREFILL: 0.04}
READ = "read"
PEERS = {"llama.cpp": ("llama_cpp", "llama.cpp"), "openvino": ("openvino_genai", "OpenVINO")}
WORKER = "llm_worker.py"


def missing() -> dict[str, str]:
    """Runtimes that are not installed, with what is said of them."""
    found = {}
    for runtime, (module, label) in PEERS.items():
        if not llm_models.has_module(module):
            found[runtime] = f"{label} is left out: {PYTHON} has no module {module}"
    return found


def contestants(size: str, without: dict[str, str]) -> dict[str, tuple[Contestant, str]]:
    """The runtimes with their files of one size, and the name of each file's reference."""
    found: dict[str, tuple[Contestant, str]] = {}

    def add(runtime: str, label: str, file: str, reference: str, python: str) -> None:
        if runtime not in without:
            key = runtime if runtime == READ else f"{runtime}_{reference}"
            options = {} if runtime == READ else {"reference": str(llm_models.reference_file(size, reference))}
            found[key] = Contestant(key, label, runtime, file, options, WORKER, python), reference

    for name, variant in llm_models.variants(size).items():
        add("untorch", variant.label, llm_models.package_file(size, name), name, sys.executable)
    for form, kind in GGUF.items():
        add("llama.cpp", f"llama.cpp, {kind}", llm_models.gguf_file(size, form), form, PYTHON)
        if not SIZES[size].share_of_experts:
            add("openvino", f"OpenVINO, IR of {kind}", llm_models.openvino_folder(size, form), form, PYTHON)
    add(READ, "numpy, reading", "", "", sys.executable)
    return found


def lost(size: str, reference: str) -> float:
    """Of eager's logits behind the longer prompt: the cosine distance that a file's rounded weights cost."""
    with (
        numpy.load(llm_models.reference_file(size, reference)) as ours,
        numpy.load(llm_models.reference_file(size, "float32")) as whole,
    ):
        return cosine_distance(ours[PREFILL], whole[PREFILL])


def measure(report: Report, threads: int, rounds: int, without: dict[str, str]) -> None:
    """All sizes at one number of threads."""
    label = f"{threads} thread{'s' if threads > 1 else ''}"
    rows, bandwidths = [], []
    for size in llm_models.wanted():
        entries = contestants(size, without)
        facts = json.loads(llm_models.facts_file(size).read_text())
        cases = {work: llm_models.llm_case(size, work) for work in (DECODE, PREFILL)}
        operations = 2 * (facts["layers"] * PROMPT[PREFILL] + facts["head"])
        with Workers([contestant for contestant, _ in entries.values()], threads) as workers:
            differences = workers.check([cases[DECODE]], TOLERANCE[DECODE])
            if threads == THREADS[-1]:  # prompts of 512 tokens take long: compared once, with the most threads
                for key, found in workers.check([cases[PREFILL]], TOLERANCE[PREFILL]).items():
                    differences[key] |= found
            times = workers.rounds(list(cases.values()), rounds, 0.0)
            values: dict[str, Any] = {"idle_share": workers.idle_share}
            loading = {worker.contestant.key: worker.load_seconds for worker in workers.workers}
        results = {
            key: {work: summarise(times[key][case]) for work, case in cases.items()} for key in entries
        }  # fmt: skip
        bandwidth = READ_BYTES / results.pop(READ)[DECODE]["median"]
        bandwidths.append(bandwidth)
        values["bandwidth"] = bandwidth
        for key, result in results.items():
            contestant, reference = entries[key]
            decode, prefill = result[DECODE]["median"], result[PREFILL]["median"]
            read = facts["bytes"][reference]
            difference = max(differences[key].values())  # of both prompts, where both were compared
            values[key] = {
                **result, "bytes": read, "share_of_bandwidth": read / decode / bandwidth,
                "differences": {case.rpartition("_")[2]: value for case, value in differences[key].items()},
                "gflops": operations / prefill / 1e9, "quantization": lost(size, reference),
                "load_seconds": loading[key],
            }  # fmt: skip
            rows.append([
                f"{SIZES[size].label}: {contestant.label}", f"{read / 1e6:.0f}", f"{1 / decode:.1f}",
                f"{read / decode / bandwidth:.2f}", f"{PROMPT[PREFILL] / prefill:.0f}",
                f"{operations / prefill / 1e9:.0f}", f"{difference:.0e}",
            ])  # fmt: skip
        report.values[f"{size}_{threads}"] = values
    compared = PROMPT.values() if threads == THREADS[-1] else (PROMPT[DECODE],)
    note = (
        f"One stream with {label}: median of {TOKENS[DECODE]} tokens behind {PROMPT[DECODE]}, and of a prompt of "
        f"{PROMPT[PREFILL]}; higher is better. Read bandwidth in turns with them: "
        f"{' and '.join(f'{value / 1e9:.1f}' for value in bandwidths)} GB/s. Difference: the larger cosine distance "
        f"of logits, behind {' and '.join(map(str, compared))} tokens, from eager float32 with the dequantised weights."
    )
    if without:
        note += f" Not installed: {', '.join(PEERS[runtime][1] for runtime in without)}."
    columns = [
        "Model and runtime", "MB of weights", "Decode, tokens/s", "Share of read bandwidth", "Prefill, tokens/s",
        "Prefill, GFLOP/s", "Difference",
    ]  # fmt: skip
    report.tables[f"cpu_llm_{threads}_thread{'s' if threads > 1 else ''}"] = Table(columns, rows, note)


def main() -> None:
    options = arguments(__doc__)
    without = missing()
    for text in without.values():
        print(text, file=sys.stderr)
    llm_models.build()
    report = Report("cpu_llm", options.quick)
    for name in ("llama_cpp_python", "openvino", "openvino_genai"):
        report.machine["versions"][name] = llm_models.version(name)
    for threads in THREADS:
        measure(report, threads, 1 if options.quick else 3, without)
    report.write(options.output)


if __name__ == "__main__":
    main()
