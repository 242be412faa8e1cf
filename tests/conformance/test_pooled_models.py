"""Embedding models and rerankers of transformers: eager steps, and compiled packages in a process without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.conformance.language_models import DEVICE, VOCABULARY, tokenizer
from tests.conformance.test_language_models import StepRunner
from untorch.export import causal_lm
from untorch.export.lm.check import check_chunks, check_model
from untorch.export.lm.step import Step
from untorch.export.lm.text import check_outputs, take_text_model
from untorch.llm import Engine

pytestmark = pytest.mark.filterwarnings("ignore")

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128, "head_dim": 8,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": None,
    "eos_token_id": None, "attn_implementation": "eager",
}  # fmt: skip

RUN = """
import asyncio, json, sys
sys.modules["torch"] = None
from untorch.llm import Engine
job = json.load(sys.stdin)
out = {}
with Engine(job["embed"], max_batch_tokens=16, max_sequences=8, kv_memory="1MiB") as engine:
    found = engine.embed(job["prompts"])
    out["embed"], out["dtype"] = found.tolist(), str(found.dtype)
    out["async"] = asyncio.run(engine.aembed(job["prompts"])).tolist()
    out["text"] = engine.embed(["hello", "world"], prompt_name="query").tolist()
    try:
        engine.generate("hello")
    except Exception as error:
        out["error"] = str(error)
with Engine(job["classify"], max_batch_tokens=16, max_sequences=8, kv_memory="1MiB") as engine:
    out["classify"] = engine.classify(job["prompts"]).tolist()
    out["again"] = engine.classify(job["prompts"]).tolist()
    out["cached"] = engine.stats().cached_tokens
    out["score"] = engine.score("who?", ["me", "you", "nobody at all"], template=job["template"]).tolist()
    out["pair"] = engine.score("who?", "me", sigmoid=False).tolist()
out["modules"] = sorted({name.partition(".")[0] for name, module in sys.modules.items() if module})
print(json.dumps(out))
"""


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, int(n)).tolist() for n in (19, 2, 40, 7, 33, 1)]


def make(name: str, config: Any, **fields: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, name)(config(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model


def hidden(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return found


def scores(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return found


def eager(model: Any, task: str, pooling: str = "last") -> np.ndarray:
    text = take_text_model(model, task, None, False)
    check_outputs(model, text, task)
    step = Step(text)
    check_chunks(step, VOCABULARY)
    check_model(step, VOCABULARY, 128)
    runner = StepRunner(step, 24)
    runner.settings = replace(
        runner.settings, task=task, pooling=pooling, width=step.width, labels=("a",) * step.width
    )  # fmt: skip
    with Engine(runner, max_batch_tokens=7, max_sequences=4) as engine:
        found: np.ndarray = engine.embed(prompts()) if task == "embed" else engine.classify(prompts())
        assert engine.stats().blocks_free == 24
    return found


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    ("name", "config", "fields"),
    [
        ("Qwen3Model", "Qwen3Config", _BASE),
        ("MistralModel", "MistralConfig", {**_BASE, "sliding_window": 6}),
        ("Gemma2Model", "Gemma2Config", {**_BASE, "sliding_window": 6}),
        ("GPT2Model", "GPT2Config", _GPT2),
        ("Qwen3ForCausalLM", "Qwen3Config", _BASE),  # its decoder, without the head
    ],
)
def test_embeddings(name: str, config: str, fields: dict[str, Any], pooling: str) -> None:
    model = make(name, getattr(transformers, config), **fields)
    rows = [hidden(model.base_model, prompt) for prompt in prompts()]
    expected = torch.stack([row[-1] if pooling == "last" else row.mean(0) for row in rows])
    np.testing.assert_allclose(eager(model, "embed", pooling), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "config", "fields"),
    [
        ("Qwen3ForSequenceClassification", "Qwen3Config", {**_BASE, "num_labels": 1}),
        ("LlamaForSequenceClassification", "LlamaConfig", {**_BASE, "num_labels": 3}),
        ("GemmaForSequenceClassification", "GemmaConfig", {**_BASE, "num_labels": 1}),
        ("GPT2ForSequenceClassification", "GPT2Config", {**_GPT2, "num_labels": 2}),
    ],
)
def test_scores(name: str, config: str, fields: dict[str, Any]) -> None:
    model = make(name, getattr(transformers, config), **fields)
    expected = torch.stack([scores(model, prompt) for prompt in prompts()])
    np.testing.assert_allclose(eager(model, "classify"), expected, rtol=1e-3, atol=1e-4)


def sentence_transformer(folder: Path, dense: nn.Linear) -> Any:
    """A folder as sentence-transformers writes it: mean, a layer with tanh, length 1."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer

    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_buffer(tokenizer()), eos_token="</s>", bos_token="<s>"
    )
    words.save_pretrained(folder)
    model = make("Qwen3ForCausalLM", transformers.Qwen3Config, **_BASE)
    model.save_pretrained(folder)
    for part in ("1_Pooling", "2_Dense", "3_Normalize"):
        (folder / part).mkdir()
    kind = "sentence_transformers.models."
    files = {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{kind}Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kind}Pooling"},
            {"idx": 2, "name": "2", "path": "2_Dense", "type": f"{kind}Dense"},
            {"idx": 3, "name": "3", "path": "3_Normalize", "type": f"{kind}Normalize"},
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True,
            "include_prompt": True,
        },
        "2_Dense/config.json": {
            "in_features": 32, "out_features": 12, "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
        "sentence_bert_config.json": {"max_seq_length": 100, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": "Q: "}, "default_prompt_name": None},
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    save_file(
        {"linear.weight": dense.weight.data, "linear.bias": dense.bias.data}, folder / "2_Dense/model.safetensors"
    )
    return model


def test_packages(tmp_path: Path) -> None:
    torch.manual_seed(1)
    dense = nn.Linear(32, 12)
    (tmp_path / "st").mkdir()
    embedder = sentence_transformer(tmp_path / "st", dense)
    report = causal_lm(tmp_path / "st", tmp_path / "embed.pt2", token_counts=(16,), device=DEVICE, progress=False)
    assert list(report.methods) == ["step_16", "dense"]
    reranker = make(
        "Qwen3ForSequenceClassification", transformers.Qwen3Config, **{**_BASE, "num_labels": 1, "pad_token_id": 257}
    )
    causal_lm(
        reranker, tmp_path / "classify.pt2", tokenizer=tmp_path / "st" / "tokenizer.json", token_counts=(16,),
        device=DEVICE, progress=False,
    )  # fmt: skip
    job = {
        "embed": str(tmp_path / "embed.pt2"), "classify": str(tmp_path / "classify.pt2"), "prompts": prompts(),
        "template": "Q: {query} D: {document}",
    }  # fmt: skip
    done = subprocess.run(
        [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-c", RUN], input=json.dumps(job), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert not {"torch", "transformers"} & set(out["modules"])

    from tokenizers import Tokenizer

    words = Tokenizer.from_buffer(tokenizer())

    def embedding(prompt: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return nn.functional.normalize(dense(hidden(embedder.base_model, prompt).mean(0)).tanh(), dim=0)

    close = {"rtol": 1e-3, "atol": 1e-4}
    assert out["dtype"] == "float32"
    np.testing.assert_allclose(out["embed"], torch.stack([embedding(prompt) for prompt in prompts()]), **close)
    np.testing.assert_allclose(out["async"], out["embed"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        out["text"], torch.stack([embedding(words.encode(f"Q: {text}").ids) for text in ("hello", "world")]), **close
    )
    assert out["error"] == "generate: the package makes embeddings: call embed"
    np.testing.assert_allclose(
        out["classify"], torch.stack([scores(reranker, prompt) for prompt in prompts()]), **close
    )
    np.testing.assert_allclose(out["again"], out["classify"], **close)
    assert out["cached"] == sum((len(prompt) - 1) // 16 * 16 for prompt in prompts())
    pairs = [f"Q: who? D: {document}" for document in ("me", "you", "nobody at all")]
    expected = torch.stack([scores(reranker, words.encode(text).ids)[0] for text in pairs]).sigmoid()
    np.testing.assert_allclose(out["score"], expected, **close)
    np.testing.assert_allclose(out["pair"], scores(reranker, words.encode("who?", "me").ids), **close)
