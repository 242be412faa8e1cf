"""Packages of models with recurrent layers, in a process without torch: token for token what ``generate`` says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.conformance.language_models import DEVICE, greedy, make_model
from untorch import InvalidArgumentError
from untorch.export import causal_lm
from untorch.llm import Engine

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 10
# The convolution and the delta rule; with experts; a convolution alone; Mamba-2; decays by channel.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3_5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "Qwen3Next": {}, "Qwen3_5Moe": {}, "Lfm2": {}, "GraniteMoeHybrid": {}, "KimiLinear": {},
}  # fmt: skip

RUN = """
import json, sys
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
job = json.load(sys.stdin)
prompts, new, out = job["prompts"], job["new"], {}
GREEDY = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
def tokens(results):
    return [[c.token_ids for c in r.completions] for r in results]

with Engine(job["path"], max_batch_tokens=16, max_sequences=8, text=False, kv_memory="64MiB") as engine:
    out["batched"] = tokens(engine.generate(prompts, GREEDY))
    again = engine.generate(prompts, GREEDY)
    out["again"], out["cached"] = tokens(again), [r.usage.cached_tokens for r in again]
    out["samples"] = tokens(engine.generate(prompts, SamplingParams(n=3, temperature=0, max_tokens=new, ignore_eos=True)))
small = {"max_batch_tokens": 16, "max_sequences": 4, "text": False}
with Engine(job["path"], **small, kv_memory=job["small"], snapshot_memory=0) as engine:
    out["preempted"] = tokens(engine.generate(prompts, GREEDY))
    out["preemptions"], out["blocks"] = engine.stats().preemptions, engine.stats().blocks
with Engine(job["path"], **small, kv_memory=job["small"] + 2 * job["state"], snapshot_memory=2 * job["state"]) as engine:
    out["few_snapshots"] = [tokens(engine.generate(prompts, GREEDY)) for _ in range(2)]
    out["snapshots"], out["blocks_beside"] = engine.stats().state_snapshots, engine.stats().blocks
out["modules"] = sorted({name.partition(".")[0] for name, module in sys.modules.items() if module})
print(json.dumps(out))
"""


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, int(n)).tolist() for n in (19, 2, 40, 7, 33, 1)]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("Qwen3_5", "Lfm2", "GraniteMoeHybrid") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in MODELS
    ],
)
def test_the_engine_says_what_generate_says(name: str, tmp_path: Any) -> None:
    model = make_model(name, **MODELS[name])
    expected = [[greedy(model, prompt, NEW)] for prompt in prompts()]
    path = tmp_path / "model.pt2"
    causal_lm(model, path, token_counts=(16,), device=DEVICE, progress=False)
    from untorch import load

    with load(path) as program:
        section = program.manifest["llm"]
    assert section["state_elements"] > 0
    states, block = 4 * 4 * section["state_elements"], 4 * section["block_elements"]
    job = {"path": str(path), "prompts": prompts(), "new": NEW, "small": states + 4 * block, "state": states // 4}
    done = subprocess.run(
        [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-c", RUN], input=json.dumps(job), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["batched"] == expected
    assert (found["again"], found["cached"]) == (expected, [16, 0, 32, 0, 32, 0])
    assert found["samples"] == [one * 3 for one in expected]
    assert (found["preempted"], found["blocks"]) == (expected, 4)
    assert found["preemptions"] > 0
    assert found["few_snapshots"] == [expected] * 2
    # Four blocks keep the last prompt's snapshot alone, though there is room for two.
    assert (found["snapshots"], found["blocks_beside"]) == (1, 4)
    assert not {"torch", "transformers", "scipy"} & set(found["modules"])
    command = [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-m", "untorch", "generate", str(path), "ids:1,2"]
    for value, code in (("0", 0), (str(states), 0), (str(states // 4 - 1), 1)):
        words = [
            *command,
            "--max-tokens",
            "2",
            "--max-sequences",
            "4",
            "--kv-memory",
            "64MiB",
            "--snapshot-memory",
            value,
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
    assert f"snapshot_memory: expected 0, or at least {states // 4} bytes" in done.stderr
    with pytest.raises(InvalidArgumentError) as caught:
        Engine(path, kv_memory=states, max_sequences=4)
    assert str(caught.value) == (
        f"Engine: kv_memory: expected at least {states + block} bytes, one block of 16 positions, and {states} for "
        f"the states of 4 sequences, got {states}"
    )
