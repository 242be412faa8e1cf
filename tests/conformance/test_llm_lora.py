"""Adapters beside the weights, in a process without torch: token for token what models say that they are merged into."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.language_models import CHOOSE, DEVICE, greedy, make_model, round_inputs
from tests.lora_adapters import add_hooks, make_pairs, merged, write_adapter
from untorch.export import causal_lm
from untorch.quant import quantize

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 10
PROMPTS = [[3, 7, 1, 9, 30, 11], list(range(40, 70)), [5], [9, 9, 8, 2, 4, 60, 61], list(range(80, 99)), [17, 3]]
NAMES = [None, "attention", "all", "all", None, "attention"]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

RUN = """
import json, sys
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
job = json.load(sys.stdin)
greedy = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True)
out = {}
def tokens(results):
    return [r.token_ids for r in results]
with Engine(job["path"], loras=job["loras"], kv_memory="64MiB", max_batch_tokens=16, max_sequences=8, text=False) as engine:
    out["mixed"] = tokens(engine.generate(job["prompts"], greedy, lora=job["names"]))
    again = engine.generate(job["prompts"], greedy, lora=job["names"])
    out["again"], out["cached"] = tokens(again), [r.usage.cached_tokens for r in again]
    out["alone"] = [engine.generate(p, greedy, lora=n).token_ids for p, n in zip(job["prompts"], job["names"])]
    out["base"] = tokens(engine.generate(job["prompts"], greedy))
    # Loaded while another request runs, whose adapter moves to other columns when its name goes.
    handle = engine.submit(job["prompts"][1], greedy, lora="all")
    engine.load_lora("late", job["loras"]["attention"])
    engine.unload_lora("all")
    out["late"] = engine.generate(job["prompts"][1], greedy, lora="late").token_ids
    out["moved"] = handle.result(60).token_ids
with Engine(job["path"], loras=job["loras"], kv_memory="64MiB", max_batch_tokens=16, max_sequences=8, text=False, speculative="ngram") as engine:
    out["speculative"] = tokens(engine.generate(job["prompts"], greedy, lora=job["names"]))
print(json.dumps(out))
"""


def run(path: Path, loras: dict[str, Path]) -> dict[str, Any]:
    job = {
        "path": str(path), "prompts": PROMPTS, "names": NAMES, "new": NEW,
        "loras": {name: str(folder) for name, folder in loras.items()},
    }  # fmt: skip
    python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
    done = subprocess.run([python, "-c", RUN], input=json.dumps(job), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any], models: dict[str | None, Any]) -> None:
    expected = [greedy(models[name], prompt, NEW) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    base = [greedy(models[None], prompt, NEW) for prompt in PROMPTS]
    assert found["base"] == base
    for kind in ("mixed", "again", "alone", "speculative"):
        assert found[kind] == expected, kind
    assert found["cached"][1] >= 16
    assert found["late"] == greedy(models["attention"], PROMPTS[1], NEW)
    assert found["moved"] == greedy(models["all"], PROMPTS[1], NEW)
    # The adapters do something.
    assert all((a == b) == (name is None) for a, b, name in zip(expected, base, NAMES, strict=True))


@pytest.mark.parametrize(
    "quantized",
    [pytest.param(False, marks=pytest.mark.exhaustive), pytest.param(True, marks=pytest.mark.slow)],
    ids=["float32", "int4"],
)
def test_adapters(quantized: bool, tmp_path: Path) -> None:
    if quantized and DEVICE != "cpu":
        pytest.skip("the expected tokens are those of CPUs, whose int4 layers round their inputs")
    model = make_model("Llama", num_hidden_layers=3 if quantized else 2)  # equal layers are compiled once from 3 on
    options = {"quantize": {"dtype": "int4", "group_size": 32, "method": "rtn"}} if quantized else {}
    path = tmp_path / "m.pt2"
    report = causal_lm(model, path, lora=True, token_counts=(16,), device=DEVICE, progress=False, **options)  # type: ignore[arg-type]
    assert list(report.methods) == ["step_16", "step_16_lora", *CHOOSE]
    pairs = {
        "attention": make_pairs(model, ("q_proj", "v_proj"), 4, 1),
        "all": make_pairs(model, ALL, 20, 2),
    }
    loras = {
        "attention": write_adapter(tmp_path / "attention", pairs["attention"], alpha=12),
        "all": write_adapter(tmp_path / "all", pairs["all"], alpha=10, use_rslora=True),
    }
    scales = {"attention": 12 / 4, "all": 10 / 20**0.5}
    base = copy.deepcopy(model)
    if quantized:
        quantize(base, "int4", group_size=32, method="rtn", progress=False)
        round_inputs(base)
    models: dict[str | None, Any] = {None: base}
    for name, own in pairs.items():
        models[name] = copy.deepcopy(base) if quantized else merged(base, own, scales[name])
        if quantized:
            add_hooks(models[name], own, scales[name])
    check(run(path, loras), models)


@pytest.mark.slow
def test_peft_writes_what_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = make_model("Llama")
    causal_lm(
        model,
        tmp_path / "m.pt2",
        lora=["q_proj", "v_proj", "down_proj"],
        token_counts=(16,),
        device=DEVICE,
        progress=False,
    )
    loras, models = {}, {None: model}
    for name, fields in {
        "attention": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
        "all": {
            "r": 20, "lora_alpha": 10, "target_modules": ["q_proj", "down_proj"], "use_rslora": True,
            "rank_pattern": {"down_proj": 3}, "alpha_pattern": {"layers.1.mlp.down_proj": 30},
        },
    }.items():  # fmt: skip
        torch.manual_seed(1)
        config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **fields)
        adapted = peft.get_peft_model(copy.deepcopy(model), config)
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.data *= 4
        adapted.save_pretrained(tmp_path / name)
        loras[name], models[name] = tmp_path / name, adapted.merge_and_unload()
    check(run(tmp_path / "m.pt2", loras), models)
