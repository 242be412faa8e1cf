"""A tiny Voxtral and a tiny LLaVA, torch-free: their encoders' embeddings in prompts, tokens equal to ``generate``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.conformance.language_models import CHOOSE, DEVICE
from untorch.export import causal_lm, export

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
NEW = 8
PLACEHOLDER = 24
_TEXT = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
_VISION = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": 40, "patch_size": 8,
}  # fmt: skip

RUN = """
import asyncio, json, sys
sys.modules["torch"] = None
import numpy, untorch
from untorch.llm import Engine, Prompt, SamplingParams
job, inputs = json.load(open(sys.argv[1])), numpy.load(sys.argv[2])
GREEDY = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True)
out = {}
with untorch.load(job["encoder"]) as encoder:
    arrays = [encoder(inputs[f"features_{i}"]) for i in range(2)]
# Placeholders are equal; a prompt may have none, or several.
prompts = [Prompt.expand(tokens, job["placeholder"], [arrays[i] for i in which]) for tokens, which in job["prompts"]]
def tokens(results):
    return [r.token_ids for r in results]
with Engine(job["model"], max_batch_tokens=16, max_sequences=8, kv_memory="4MiB") as engine:
    out["batched"] = tokens(engine.generate(prompts, GREEDY))
    again = engine.generate(prompts, GREEDY)
    out["again"], out["cached"] = tokens(again), [r.usage.cached_tokens for r in again]
    out["samples"] = [c.token_ids for c in engine.generate(
        prompts[0], SamplingParams(n=3, temperature=0, max_tokens=job["new"], ignore_eos=True)).completions]
    out["lengths"] = [len(p.tokens) for p in prompts]
    async def stream():
        return [t async for chunk in engine.stream(prompts[1], GREEDY) for t in chunk.token_ids]
    out["stream"] = asyncio.run(stream())
with Engine(job["model"], max_batch_tokens=16, max_sequences=8, kv_memory=job["small"]) as engine:
    out["preempted"] = tokens(engine.generate(prompts, GREEDY))
    out["preemptions"] = engine.stats().preemptions
out["modules"] = sorted({name.partition(".")[0] for name, module in sys.modules.items() if module})
print(json.dumps(out))
"""


class AudioEncoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.audio_tower, self.multi_modal_projector = model.model.audio_tower, model.model.multi_modal_projector

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.audio_tower(features).last_hidden_state
        found: torch.Tensor = self.multi_modal_projector(hidden.reshape(-1, self.audio_tower.config.intermediate_size))
        return found


class VisionEncoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision_tower, self.multi_modal_projector = model.model.vision_tower, model.model.multi_modal_projector
        self.layer = model.config.vision_feature_layer

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.vision_tower(pixels, output_hidden_states=True).hidden_states[self.layer]
        found: torch.Tensor = self.multi_modal_projector(hidden[0, 1:])
        return found


def voxtral(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, nn.Module, tuple[int, ...], str]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from voxtral_model import build_model

    model = build_model(tiny=True, dtype="float32")
    return model, AudioEncoder(model), (1, model.config.audio_config.num_mel_bins, 64), "input_features"


def llava(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, nn.Module, tuple[int, ...], str]:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **_TEXT}, vision_config=_VISION, image_token_index=PLACEHOLDER
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    return model, VisionEncoder(model), (1, 3, 40, 40), "pixel_values"


def prompts() -> list[tuple[list[int], list[int]]]:
    """Tokens with a placeholder for each array, and which array it is."""
    rng = np.random.default_rng(0)
    before, after = rng.integers(30, 99, 12).tolist(), rng.integers(30, 99, 3).tolist()
    return [
        ([*before, PLACEHOLDER, *after], [0]),
        ([*before, PLACEHOLDER, *after], [1]),
        ([*before, *after], []),
        ([PLACEHOLDER], [0]),
        ([PLACEHOLDER, *after, PLACEHOLDER, 40], [1, 0]),
    ]


def expected(model: Any, features: list[torch.Tensor], name: str, count: int) -> list[list[int]]:
    found = []
    for tokens, which in prompts():
        ids = [i for token in tokens for i in ([PLACEHOLDER] * count if token == PLACEHOLDER else [token])]
        given = {name: torch.cat([features[i] for i in which])} if which else {}
        out = model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), **given,
            max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        found.append(out[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize("make", [pytest.param(voxtral, marks=pytest.mark.exhaustive), llava])
def test_tokens_of_generate(
    make: Callable[..., tuple[Any, nn.Module, tuple[int, ...], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, encoder, shape, name = make(monkeypatch)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    features = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    with torch.no_grad():
        count = len(encoder(features[0]))
        wanted = expected(model, features, name, count)
    assert wanted[0] != wanted[1] != wanted[2], "what is seen or heard matters"
    assert 12 + count > 16, "it reaches into another page"

    export(encoder.eval(), (features[0],), tmp_path / "encoder.pt2", progress=False)
    report = causal_lm(
        model, tmp_path / "model.pt2", inputs_embeds=True, token_counts=(16,), device=DEVICE, progress=False
    )
    assert list(report.methods) == ["step_16", "step_16_embeds", *CHOOSE]
    # The steps have one copy of the weights, and none of the encoder's.
    text = sum(parameter.nbytes for part in (model.get_decoder(), model.lm_head) for parameter in part.parameters())
    assert report.weight_nbytes < 1.2 * text

    np.savez(tmp_path / "inputs.npz", **{f"features_{i}": value.numpy() for i, value in enumerate(features)})
    job = {
        "encoder": str(tmp_path / "encoder.pt2"), "model": str(tmp_path / "model.pt2"), "new": NEW,
        "placeholder": PLACEHOLDER, "prompts": prompts(), "small": 4 * 16 * 2 * 2 * 2 * 8 * 4,
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-c", RUN, str(tmp_path / "job.json"),
         str(tmp_path / "inputs.npz")], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert not {"torch", "transformers"} & set(out["modules"])
    assert out["batched"] == wanted
    assert out["again"] == wanted
    assert out["cached"] == [(length - 1) // 16 * 16 for length in out["lengths"]]
    assert out["samples"] == [wanted[0]] * 3
    assert out["stream"] == wanted[1]
    assert out["preempted"] == wanted
    assert out["preemptions"] > 0
