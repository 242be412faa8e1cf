"""Speculative decoding on compiled packages, in a process without torch: the greedy tokens of transformers' generate."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.language_models import DEVICE, greedy, make_model
from untorch.export import causal_lm

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 30
LAYERS = 3 * 2 * 8 * 2 * 4  # bytes a position

RUN = """
import json, random, sys, time
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
job = json.load(sys.stdin)
prompts, new, out = job["prompts"], job["new"], {}
GREEDY = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
SAMPLED = [SamplingParams(temperature=0.7, seed=i, max_tokens=new, ignore_eos=True) for i in range(len(prompts))]
def tokens(results):
    return [r.token_ids for r in results]
def shuffle(engine):
    free = engine._core.scheduler.blocks._free
    order = list(free)
    random.Random(1).shuffle(order)
    free.clear()
    free.update(dict.fromkeys(order))
def options(**fields):
    return {"max_batch_tokens": 24, "max_sequences": 8, "speculative": job["method"], "prompt_lookup_min": 1,
            "text": False, **fields}

with Engine(job["path"], **options(kv_memory="1MiB")) as engine:
    shuffle(engine)
    out["batched"], out["again"] = tokens(engine.generate(prompts, GREEDY)), tokens(engine.generate(prompts, GREEDY))
    out["samples"] = tokens(engine.generate(prompts[0], SamplingParams(
        n=3, temperature=0, max_tokens=new, ignore_eos=True)).completions)
    out["sampled"] = tokens(engine.generate(prompts, SAMPLED))
    real = engine._runner.run
    engine._runner.run = lambda *args: (time.sleep(0.01), real(*args))[1]
    handle = engine.submit(prompts[0], SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
    next(iter(handle))
    handle.cancel()
    out["cancelled"] = handle.result(30).finish_reason
    engine._runner.run = real
    stats = engine.stats()
    out["free"], out["accepted"], out["drafted"] = stats.blocks - stats.blocks_free, stats.accepted_tokens, stats.draft_tokens
with Engine(job["path"], **options(kv_memory=job["small"])) as engine:
    out["preempted"] = tokens(engine.generate(prompts, GREEDY))
    out["preemptions"], out["blocks"] = engine.stats().preemptions, engine.stats().blocks
with Engine(job["path"], **options(kv_memory="1MiB", speculative=None)) as engine:
    out["plain"] = tokens(engine.generate(prompts, SAMPLED))
print(json.dumps(out))
"""


def prompts() -> list[list[int]]:
    """The first two repeat themselves."""
    rng = np.random.default_rng(0)
    return [[5, 6, 7, 8] * 5, [9, 3] * 8, *(rng.integers(0, 256, int(n)).tolist() for n in (19, 2, 30, 1))]


@pytest.mark.parametrize(
    ("name", "method"),
    [("Llama", "draft"), ("Llama", "ngram"), pytest.param("Gemma2", "ngram", marks=pytest.mark.exhaustive)],
)
def test_greedy_tokens(name: str, method: str, package: dict[str, Any]) -> None:
    if name not in package:
        model = make_model(name)
        package[name] = model, package["folder"] / f"{name}.pt2"
        draft = None
        if name == "Llama":  # so close that most of its tokens are right, if its pages are
            draft = copy.deepcopy(model)
            with torch.no_grad():
                draft.lm_head.weight.add_(torch.randn_like(draft.lm_head.weight) * 0.002)
        causal_lm(model, package[name][1], draft=draft, token_counts=(16,), device=DEVICE, progress=False)
    model, path = package[name]
    row = 16 * LAYERS * (2 if method == "draft" else 1)
    if name == "Gemma2":  # two layers with a window, one with larger blocks
        row = 16 * LAYERS * 2 // 3
    job = {"path": str(path), "prompts": prompts(), "new": NEW, "method": method, "small": 6 * row}
    done = subprocess.run(
        [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-c", RUN], input=json.dumps(job), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = package.setdefault((name, "expected"), [greedy(model, prompt, NEW) for prompt in prompts()])
    assert found["batched"] == found["again"] == found["preempted"] == expected
    assert found["samples"] == [expected[0]] * 3
    assert found["sampled"] == found["plain"]
    assert found["cancelled"] == "cancelled"
    assert found["free"] == 0
    assert found["drafted"] >= found["accepted"] > (0.8 * found["drafted"] if method == "draft" else 0)
    assert found["blocks"] == 6 and found["preemptions"] > 0


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return {"folder": Path(tmp_path_factory.mktemp("speculation"))}
