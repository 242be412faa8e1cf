"""The run half of the demo: embeds sentences with numpy and untorch alone, in an environment without torch."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import resource
import sys
import time

import numpy

import untorch


def since_process_start() -> float:
    """Seconds since the operating system started this process."""
    fields = pathlib.Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def resident_mib() -> float:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    directory = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo")
    # The time to the first result is the model's: text is tokenised afterwards, with a library of its own.
    program = untorch.load(directory / "minilm.pt2")
    program.forward(numpy.full((1, 16), 2000, numpy.int64), numpy.ones((1, 16), numpy.int64))
    first = since_process_start()
    memory = resident_mib()

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(256)
    sentences = sys.argv[2:] or json.loads((directory / "sentences.json").read_text())
    encoded = tokenizer.encode_batch(sentences)
    ids = numpy.array([item.ids for item in encoded], dtype=numpy.int64)
    mask = numpy.array([item.attention_mask for item in encoded], dtype=numpy.int64)
    embeddings = program.forward(ids, mask)

    times = []
    for _ in range(50):
        start = time.perf_counter()
        program.forward(ids, mask)
        times.append(time.perf_counter() - start)

    width = max(len(sentence) for sentence in sentences)
    print("cosine similarity")
    for i, sentence in enumerate(sentences):
        row = " ".join(f"{value:6.3f}" for value in embeddings @ embeddings[i])
        print(f"  {i + 1}. {sentence:<{width}}  {row}")
    package = directory / "minilm.pt2"
    print(f"\ntorch installed here:            {'yes' if importlib.util.find_spec('torch') else 'no'}")
    print(f"package:                         {package.stat().st_size / 2**20:.1f} MiB in one file")
    print(f"process start to first result:   {first:.3f} s")
    print(f"a call of {ids.shape[0]} sentences × {ids.shape[1]} tokens: {numpy.median(times) * 1e3:.2f} ms")
    print(f"memory after the first result:   {memory:.0f} MiB resident")
    print(f"peak memory:                     {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    if not sys.argv[2:]:
        expected = numpy.load(directory / "reference.npz")["expected"]
        print(f"largest difference from eager:   {numpy.abs(embeddings - expected).max():.1e}")


if __name__ == "__main__":
    main()
