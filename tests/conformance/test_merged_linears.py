"""Language models whose linear layers are merged: the engine gives generate's tokens, and weights are stored once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.language_models import greedy, make_model
from untorch import load
from untorch.export import causal_lm
from untorch.llm import Engine, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 10
PROMPTS = [[5, 9, 200, 31], [7] * 20, [250]]
# Merged calls of a layer; GPT-2's q, k and v are one layer in the model.
MODELS = [
    pytest.param("Llama", {}, (8, 48), 2, id="Llama"),
    pytest.param(
        "Llama", {"quantize": {"dtype": "int4", "group_size": 32}}, (8,), 2, id="int4", marks=pytest.mark.exhaustive
    ),
    pytest.param("Qwen3", {}, (8,), 2, id="Qwen3", marks=pytest.mark.exhaustive),
    pytest.param("OPT", {}, (8,), 1, id="OPT", marks=pytest.mark.exhaustive),
    pytest.param("GPT2LMHead", {}, (8,), 0, id="GPT2", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("name", "options", "counts", "merged"), MODELS)
def test_tokens(name: str, options: dict[str, Any], counts: tuple[int, ...], merged: int, tmp_path: Path) -> None:
    model = make_model(name)
    expected = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    layers = model.config.num_hidden_layers
    nbytes: dict[bool, int] = {}
    found: dict[bool, list[list[int]]] = {}
    for merges in (True, False) if options or len(counts) == 1 else (True,):
        path = tmp_path / f"{merges}.pt2"
        report = causal_lm(
            model, path, token_counts=counts, passes={"merge_linears": merges}, progress=False, **options
        )  # fmt: skip
        for method in report.methods.values():
            [done] = [done for done in method.passes if done.name == "merge_linears"]
            assert len(done.changed) == merged * layers * merges
        nbytes[merges] = report.weight_nbytes
        with Engine(path, max_batch_tokens=16, max_sequences=4, text=False) as engine:
            results = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
        found[merges] = [result.token_ids for result in results]
        if len(counts) > 1:  # both methods over one copy
            with load(path) as program:
                methods = program.manifest["methods"].values()
            first, second = ({c["fqn"]: c["weight"] for c in method["constants"]} for method in methods)
            assert first == second and any("q_proj_k_proj_v_proj" in name for name in first), json.dumps(first)
    assert all(tokens == found[True] for tokens in found.values())
    if not options:
        assert found[True] == expected
    if len(nbytes) == 2:
        assert abs(nbytes[True] - nbytes[False]) < 1024  # three equal biases are one; weights are padded to blocks
