"""Vision-language models with multimodal rotary positions: images of any size, tokens equal to ``generate``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.language_models import CHOOSE, DEVICE
from tests.conformance.test_language_models import StepRunner
from tests.vision_models import (
    IMAGE,
    VOCABULARY,
    generated,
    image_processor,
    make_images,
    make_model,
    make_prompts,
    make_tokenizer,
)  # fmt: skip
from untorch.export import causal_lm
from untorch.export.lm.check import check_chunks, check_model
from untorch.export.lm.embeddings import EmbeddingStep
from untorch.export.lm.images import ImagePart, read_images
from untorch.export.lm.step import Step
from untorch.export.lm.text import check_embeddings, check_outputs, position_rows, take_text_model
from untorch.llm import Engine, Prompt, SamplingParams
from untorch.llm.logits import Logits
from untorch.llm.paged_model import Batch, plan_embeddings
from untorch.llm.scheduler import Plan
from untorch.llm.settings import Settings
from untorch.llm.vision.encoder import ImageEncoder

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 8

RUN = """
import base64, io, json, sys
sys.modules["torch"] = None
import numpy
from PIL import Image
from untorch.llm import Engine, Prompt, SamplingParams
job, arrays = json.load(open(sys.argv[1])), numpy.load(sys.argv[2])
images = [arrays[f"image_{i}"] for i in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True)
prompts = [Prompt(tokens, images=[images[i] for i in which]) if which else tokens for tokens, which in job["prompts"]]
def tokens(results):
    assert not any(r.error for r in results), [r.error for r in results]
    return [r.token_ids for r in results]
def message(image):
    return [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]
out = {}
with Engine(job["model"], max_batch_tokens=16, max_sequences=8, kv_memory="4MiB") as engine:
    out["batched"] = tokens(engine.generate(prompts, GREEDY))
    again = engine.generate(prompts, GREEDY)
    out["again"], out["cached"] = tokens(again), [r.usage.cached_tokens for r in again]
    out["lengths"] = [r.usage.prompt_tokens for r in again]
    out["chat"] = engine.chat(message({"type": "image", "image": images[0]}), GREEDY).token_ids
    file = io.BytesIO()
    Image.fromarray(images[0]).save(file, "png")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    same = engine.chat(message({"type": "image_url", "image_url": {"url": url}}), GREEDY)
    out["url"], out["url_cached"] = same.token_ids, same.usage.cached_tokens
with Engine(job["model"], max_batch_tokens=16, max_sequences=8, kv_memory=job["small"]) as engine:
    out["preempted"] = tokens(engine.generate(prompts, GREEDY))
    out["preemptions"] = engine.stats().preemptions
with Engine(job["model"], max_batch_tokens=16, max_sequences=8, kv_memory="4MiB", speculative="ngram") as engine:
    out["speculative"] = tokens(engine.generate(prompts, GREEDY))
out["modules"] = sorted({name.partition(".")[0] for name, module in sys.modules.items() if module})
print(json.dumps(out))
"""


class ImageRunner(StepRunner):
    """Both steps and the encoder, not compiled."""

    def __init__(self, step: Step, twin: EmbeddingStep, part: ImagePart, blocks: int) -> None:
        super().__init__(step, blocks)
        hidden = 32 * (part.levels + 1)
        self.settings = Settings(
            VOCABULARY, 256, step.block, state_elements=step.state_elements, embeds=((16, "embeds"),), hidden=hidden,
            position_rows=step.position_rows,
        )  # fmt: skip
        self.twin = twin

        def encode(*arrays: Any) -> np.ndarray:
            with torch.no_grad():
                found: np.ndarray = part.encoder(*map(torch.from_numpy, arrays)).numpy()
            return found

        self.vision = ImageEncoder(part.settings, encode, step.position_rows)

    def run(self, plan: Plan, rows: Sequence[int], *rest: Any) -> Logits:
        for source, target in plan.copies:
            self.pool[target] = self.pool[source]
        for source, target in plan.state_copies:
            self.states[target] = self.states[source]
        batch = Batch(plan, self.step.block, position_rows=self.step.position_rows)
        arrays = (
            batch.tokens, batch.positions, np.array(rows or [0]), batch.block_table, batch.cu_seqlens_q,
            batch.seqlens_k, batch.slot_mapping,
        )  # fmt: skip
        states = (torch.from_numpy(batch.state_slots), self.states) if self.step.state_elements else ()
        embeddings = plan_embeddings(plan, self.settings.hidden)
        step: Any = self.step if embeddings is None else self.twin
        given = () if embeddings is None else embeddings
        with torch.no_grad():
            logits = step(*map(torch.from_numpy, arrays), self.pool, *map(torch.from_numpy, given), *states)
        return Logits(logits.numpy()[: len(rows)])


def expected(model: Any) -> list[list[int]]:
    images = make_images()
    wanted = [generated(model, tokens, [images[i] for i in which], NEW) for tokens, which in make_prompts()]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted), "what is seen matters"
    return wanted


def check_images_greedy(name: str) -> Step:
    """The step of a model, which gives the tokens of ``generate`` for prompts with images."""
    model = make_model(name)
    wanted = expected(model)
    text = take_text_model(model, "generate", None, True)
    check_outputs(model, text, "generate")
    check_embeddings(text)
    part = read_images(model, image_processor(), None, 32, VOCABULARY)
    with part.attention():
        step = Step(text, position_rows=position_rows(model))
        check_chunks(step, VOCABULARY)
        check_model(step, VOCABULARY, 64)
        twin = EmbeddingStep(step, part.levels)
        part.check(twin)
        images = make_images()
        asked = [Prompt(tokens, images=[images[i] for i in which]) for tokens, which in make_prompts()]
        # Chunks of prompts beside decoding; pages for three of the sequences.
        with Engine(ImageRunner(step, twin, part, 9), max_batch_tokens=7, max_sequences=4) as engine:
            results = engine.generate(asked, SamplingParams(temperature=0, max_tokens=NEW))
    assert [result.error for result in results] == [None] * len(asked)
    assert [result.token_ids for result in results] == wanted
    return step


MORE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("Qwen2VL", "Qwen3VLMoe", "Qwen3_5")]


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL", *MORE])
def test_images_in_prompts(name: str) -> None:
    check_images_greedy(name)


@pytest.mark.parametrize("name", ["Qwen3VL", pytest.param("Qwen2_5_VL", marks=pytest.mark.exhaustive)])
def test_package(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    wanted, images = expected(model), make_images()
    tokenizer = make_tokenizer()
    report = causal_lm(
        model, tmp_path / "model.pt2", images=True, image_processor=image_processor(), tokenizer=tokenizer,
        token_counts=(16,), device=DEVICE, progress=False,
    )  # fmt: skip
    assert list(report.methods) == ["step_16", "step_16_embeds", *CHOOSE, "encode_image"]
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    chat = tokenizer.encode(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
    assert chat.count(IMAGE) == 1
    np.savez(tmp_path / "images.npz", **{f"image_{i}": image for i, image in enumerate(images)})
    job = {
        "model": str(tmp_path / "model.pt2"), "new": NEW, "prompts": make_prompts(), "small": 5 * 16 * 2 * 2 * 2 * 8 * 4,
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-c", RUN, str(tmp_path / "job.json"),
         str(tmp_path / "images.npz")], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert not {"torch", "transformers"} & set(out["modules"])
    assert out["batched"] == wanted
    assert out["again"] == wanted
    assert out["cached"] == [(length - 1) // 16 * 16 for length in out["lengths"]]
    assert out["chat"] == out["url"] == generated(model, chat, images[:1], NEW)
    assert out["url_cached"] > 0
    assert out["preempted"] == wanted
    assert out["preemptions"] > 0
    assert out["speculative"] == wanted
