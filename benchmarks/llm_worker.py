"""A language model's process: opens it, then answers requests on stdin, one JSON document a line, to its end."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

import numpy
from llm_runtimes import OPEN, Array, Model

_WARM_UP = 16  # tokens of a prompt before one that is timed


def load_case(case: str) -> tuple[list[int], int]:
    """A prompt, and how many tokens are generated behind it."""
    with numpy.load(pathlib.Path(case)) as file:
        return [int(token) for token in file["prompt"]], int(file["tokens"])


def cosine_distance(found: Array, expected: Array) -> float:
    """1 minus the cosine of the angle between two rows of logits without their means: a softmax does not see these."""
    a, b = (row.astype(numpy.float64) - row.mean(dtype=numpy.float64) for row in (found, expected))
    return float(1 - a @ b / numpy.sqrt((a @ a) * (b @ b)))


def measure(model: Model, prompt: list[int], count: int, seconds: float) -> list[float]:
    """Seconds of the prompt's step with one token, or between tokens with more; of as many prompts as the time takes.

    Each prompt begins with another token, so no runtime finds it in a cache.
    """
    times: list[float] = []
    end = time.perf_counter() + seconds
    model.generate(prompt[-_WARM_UP:], 2)  # caches and threads have been idle
    shift = 1
    while True:
        found = model.generate(prompt[shift:] + prompt[:shift], count)
        if len(found) != count:
            raise SystemExit(f"expected {count} tokens, got {len(found)}")
        times += numpy.diff(found).tolist() if count > 1 else found
        shift += 1
        if time.perf_counter() >= end:
            return times


def difference(model: Model, case: str, prompt: list[int], reference: str | None) -> float:
    """The cosine distance from eager's logits; 0 for what has none."""
    if reference is None:
        return 0.0
    with numpy.load(reference) as file:
        return cosine_distance(model.logits(prompt), file[pathlib.Path(case).stem.rpartition("_")[2]])


def main() -> None:
    # Libraries print to stdout: what they say goes to stderr, the answers keep the pipe.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = json.loads(sys.argv[1])
    start = time.perf_counter()
    model = OPEN[given["runtime"]](given["file"], given["threads"])
    reply: dict[str, Any] = {"load_seconds": time.perf_counter() - start}
    while True:
        channel.write(json.dumps(reply) + "\n")
        channel.flush()
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        prompt, count = load_case(request["case"])
        if request["do"] == "time":
            reply = {"times": measure(model, prompt, count, request["seconds"])}
        else:
            reply = {"difference": difference(model, request["case"], prompt, given["options"].get("reference"))}


if __name__ == "__main__":
    main()
