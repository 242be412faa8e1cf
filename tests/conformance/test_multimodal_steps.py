"""Vision-language models of transformers, their steps eager: images in prompts, tokens equal to ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.conformance.test_language_models import StepRunner, as_tensors
from untorch.export.lm.check import check_chunks, check_model
from untorch.export.lm.embeddings import EmbeddingStep
from untorch.export.lm.source import read_task
from untorch.export.lm.step import Step
from untorch.export.lm.text import check_embeddings, check_outputs, take_text_model
from untorch.llm import Engine, Prompt, SamplingParams
from untorch.llm.logits import Logits
from untorch.llm.paged_model import Batch, plan_embeddings
from untorch.llm.scheduler import Plan
from untorch.llm.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 8
IMAGE = 24
_TEXT = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAVA = {
    "vision_config": {"model_type": "siglip_vision_model", **_VISION, "image_size": 24, "patch_size": 8},
    "image_token_index": IMAGE, "vision_feature_select_strategy": "full",
}  # fmt: skip

# By name: the model's class and configuration, and the shape of an image.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "Llava of Qwen2 and SigLIP": ("Llava", {"text_config": {"model_type": "qwen2", **_TEXT}, **_LLAVA}, (3, 24, 24)),
    "Llava of Gemma": ("Llava", {
        "text_config": {"model_type": "gemma", **_TEXT, "head_dim": 8}, **_LLAVA}, (3, 24, 24)),
    "SmolVLM": ("SmolVLM", {
        "text_config": {"model_type": "llama", **_TEXT, "pad_token_id": 0},
        "vision_config": {**_VISION, "image_size": 32, "patch_size": 8}, "image_token_id": IMAGE, "scale_factor": 2,
    }, (1, 3, 32, 32)),
    "InternVL": ("InternVL", {
        "text_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": {**_VISION, "image_size": [32, 32], "patch_size": [8, 8]}, "image_token_id": IMAGE,
    }, (3, 32, 32)),
}  # fmt: skip


class EmbeddingRunner(StepRunner):
    """Both steps, not compiled."""

    def __init__(self, step: Step, blocks: int) -> None:
        super().__init__(step, blocks)
        size = min(group.size for group in step.groups)
        self.settings = Settings(99, 128, size, embeds=((16, "embeds"),), hidden=32, groups=step.groups)
        self.twin = EmbeddingStep(step)

    def run(self, plan: Plan, rows: Sequence[int], *rest: Any) -> Logits:
        found = plan_embeddings(plan, 32)
        if found is None:
            return super().run(plan, rows, *rest)
        for source, target in plan.copies:
            self.pool[target] = self.pool[source]
        batch = Batch(plan, [group.size for group in self.step.groups])
        arrays = (
            batch.tokens, batch.positions, np.array(rows or [0]), batch.block_table, batch.cu_seqlens_q,
            batch.seqlens_k, batch.slot_mapping,
        )  # fmt: skip
        with torch.no_grad():
            logits = self.twin(*map(as_tensors, arrays), self.pool, *map(torch.from_numpy, found))
        return Logits(logits.numpy()[: len(rows)])


@pytest.mark.parametrize("name", MODELS)
def test_images_in_prompts(name: str) -> None:
    kind, fields, shape = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**fields)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.generation_config.eos_token_id = None
    pixels = [torch.randn(1, *shape, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    with torch.no_grad():
        images = [torch.cat(list(model.get_image_features(x).pooler_output)).reshape(-1, 32).numpy() for x in pixels]
    prompts = [[50, 60, IMAGE, 61, 70], [50, 60, IMAGE, 61, 70], [50, 60, 61, 70], [IMAGE, *range(30, 45)]]
    which = [[0], [1], [], [1]]
    expected = []
    for tokens, own in zip(prompts, which, strict=True):
        ids = [i for token in tokens for i in ([IMAGE] * len(images[0]) if token == IMAGE else [token])]
        given = {"pixel_values": pixels[own[0]]} if own else {}
        out = model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), **given,
            max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        expected.append(out[0, len(ids) :].tolist())
    assert expected[0] != expected[1] != expected[2], "what is seen matters"

    text = take_text_model(model, read_task(model, None), None, True)
    check_outputs(model, text, "generate")
    check_embeddings(text)
    step = Step(text)
    check_chunks(step, 99)
    check_model(step, 99, 64)
    asked = [Prompt.expand(tokens, IMAGE, [images[i] for i in own]) for tokens, own in zip(prompts, which, strict=True)]
    with Engine(EmbeddingRunner(step, 5), max_batch_tokens=7, max_sequences=4) as engine:
        results = engine.generate(asked, SamplingParams(temperature=0, max_tokens=NEW))
    assert [result.error for result in results] == [None] * 4
    assert [result.token_ids for result in results] == expected
