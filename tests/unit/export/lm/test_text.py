"""Text models of multimodal ones, of embedding models and rerankers: what is taken out, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.conformance.language_models import make_model
from untorch.export import CompileError
from untorch.export.lm.source import read_task
from untorch.export.lm.text import TextModel, check_embeddings, check_outputs, position_rows, take_text_model

pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 24,
    "patch_size": 8,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def make(name: str) -> Any:
    t: Any = transformers
    torch.manual_seed(0)
    configs = {
        "Llava": lambda: t.LlavaConfig(
            text_config={"model_type": "llama", **TEXT}, vision_config={"model_type": "clip_vision_model", **VISION}
        ),
        "SmolVLM": lambda: t.SmolVLMConfig(text_config={"model_type": "llama", **TEXT}, vision_config=VISION),
        "Gemma3": lambda: t.Gemma3Config(text_config={**TEXT, "head_dim": 8}, vision_config=VISION),
        "Qwen2VL": lambda: t.Qwen2VLConfig(
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4},
        ),
        "Voxtral": lambda: t.VoxtralConfig(
            text_config={"model_type": "llama", **TEXT},
            audio_config={
                "model_type": "voxtral_encoder", "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1,
                "num_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 32,
            },
        ),
    }  # fmt: skip
    return getattr(t, f"{name}ForConditionalGeneration")(configs[name]()).eval()


@pytest.mark.parametrize("name", ["Llava", "SmolVLM", "Gemma3", "Qwen2VL", "Voxtral"])
def test_multimodal_models(name: str) -> None:
    model = make(name)
    assert read_task(model, None) == "generate"
    text = take_text_model(model, "generate", None, name not in ("Gemma3", "Qwen2VL"))
    assert isinstance(text, TextModel)
    assert text.architecture == f"{name}ForConditionalGeneration"
    assert text.get_output_embeddings() is model.lm_head
    assert text.generation_config is model.generation_config
    assert text.model is model.get_decoder()
    check_outputs(model, text, "generate")
    check_embeddings(text)
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(text(tokens, logits_to_keep=torch.tensor([2])).logits, model(tokens).logits[:, -1:])


def test_embeddings_that_are_not_all() -> None:
    with pytest.raises(CompileError) as caught:
        take_text_model(make("Gemma3"), "generate", None, True)
    assert str(caught.value) == (
        "causal_lm: inputs_embeds: Gemma3ForConditionalGeneration reads token_type_ids, by which the tokens of an "
        "image see each other in both directions: attention over pages is causal"
    )


def test_rows_of_positions() -> None:
    assert position_rows(make("Llava")) == 1
    model = make("Qwen2VL")
    assert position_rows(model) == 3
    check_embeddings(take_text_model(model, "generate", None, True))
    model.config.text_config.rope_parameters["mrope_section"] = [1, 1, 1, 1]
    with pytest.raises(CompileError) as caught:
        position_rows(model)
    assert str(caught.value) == (
        "causal_lm: inputs_embeds: Qwen2VLForConditionalGeneration has positions of 4 dimensions: expected one, or "
        "time, height and width"
    )


def test_embeddings_of_each_layer() -> None:
    model = make_model("Gemma3n")
    assert take_text_model(model, "generate", None, False) is model
    with pytest.raises(CompileError) as caught:
        take_text_model(model, "generate", None, True)
    assert str(caught.value) == (
        "causal_lm: inputs_embeds: Gemma3nForCausalLM has embeddings of the tokens in each layer, which its inputs' "
        "embeddings do not replace"
    )


def test_tokens_that_are_read_in_other_places() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model("Llama")

        def get_input_embeddings(self) -> Any:
            return self.model.get_input_embeddings()

        def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **given: Any) -> Any:
            found = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **given)
            if input_ids is not None:
                found.logits = found.logits + input_ids[..., None]
            return found

    check_embeddings(make_model("Llama"))
    with pytest.raises(CompileError) as caught:
        check_embeddings(Other())
    assert str(caught.value).startswith("causal_lm: inputs_embeds: Other gives outputs that differ by 4 for tokens and")


def test_a_head_that_is_not_all() -> None:
    model = make("Llava")
    model.lm_head.register_forward_hook(lambda module, args, out: 2 * out if out.shape[1] == 4 else out)
    text = take_text_model(model, "generate", None, False)
    original = text.forward
    text.forward = lambda *args, **given: original(*args, **given)
    check_outputs(model, text, "generate")
    text.forward = lambda *args, **given: type("Out", (), {"logits": original(*args, **given).logits * 2})
    with pytest.raises(CompileError) as caught:
        check_outputs(model, text, "generate")
    assert str(caught.value).startswith(
        "causal_lm: model: LlavaForConditionalGeneration: its outputs for text differ by "
    )  # fmt: skip


def test_a_decoder_that_is_not_told() -> None:
    model = make("Llava")
    model.get_decoder = lambda: model
    with pytest.raises(CompileError) as caught:
        take_text_model(model, "generate", None, False)
    assert str(caught.value) == (
        "causal_lm: model: LlavaForConditionalGeneration does not tell its text model by get_decoder(): pass the text "
        "model itself"
    )


def test_decoders_with_a_head_of_their_own() -> None:
    """BLIP-2's kind: its language model is a …ForCausalLM."""
    model, inner = make("Llava"), make_model("Llama")
    model.get_decoder = lambda: inner
    assert take_text_model(model, "generate", None, False) is inner
    assert take_text_model(model, "embed", None, False).model is inner.model


def test_embedders_and_classifiers() -> None:
    base = transformers.Qwen3Model(transformers.Qwen3Config(**TEXT, head_dim=8))
    dense = nn.Linear(32, 5)
    assert read_task(base, None) == "embed"
    text = take_text_model(base, "embed", dense, False)
    assert text.get_output_embeddings() is None
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(text(tokens).logits, dense(base(tokens).last_hidden_state))
    assert take_text_model(make("Llava"), "embed", None, False).model.config.model_type == "llama"
    ranker = transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**TEXT, head_dim=8, num_labels=3))
    assert read_task(ranker, None) == "classify"
    text = take_text_model(ranker, "classify", None, False)
    check_outputs(ranker, text, "classify")
    with torch.no_grad():
        torch.testing.assert_close(text(tokens).logits[:, -1], ranker(tokens).logits)
    ranker.score.register_forward_hook(lambda module, args, out: out[..., :2])
    taken = TextModel(ranker.model, nn.Linear(32, 3), "classify", ranker)
    with pytest.raises(CompileError, match=r"for text differ by their shapes, \[1, 2\] and \[1, 3\]"):
        check_outputs(ranker, taken, "classify")


BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}
REFUSED: dict[str, tuple[Any, str | None, str]] = {
    "BertModel": (lambda: transformers.BertModel(transformers.BertConfig(**BERT)), None,
                  "BertModel has bidirectional attention, so it is an encoder: compile it with untorch.export.export"),
    "BertForSequenceClassification": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**BERT)), None,
        "BertForSequenceClassification has bidirectional attention, so it is an encoder: compile it with "
        "untorch.export.export"),
    "EmbeddingGemma": (
        lambda: transformers.Gemma3TextModel(transformers.Gemma3TextConfig(
            **TEXT, head_dim=8, use_bidirectional_attention=True)), None,
        "Gemma3TextModel has bidirectional attention, so it is an encoder: compile it with untorch.export.export"),
    "questions": (
        lambda: transformers.LlamaForQuestionAnswering(transformers.LlamaConfig(**TEXT)), None,
        "expected a causal language model (…ForCausalLM), a base model (AutoModel) or one that classifies sequences "
        "(…ForSequenceClassification), got LlamaForQuestionAnswering"),
    "no head": (
        lambda: transformers.LlamaModel(transformers.LlamaConfig(**TEXT)), "generate",
        "expected a causal language model (…ForCausalLM), got LlamaModel, which has no head over a vocabulary: use "
        'task="embed" for its hidden states'),
    "no scores": (
        lambda: transformers.LlamaModel(transformers.LlamaConfig(**TEXT)), "classify",
        'task="classify" expects a …ForSequenceClassification with a layer named score, got LlamaModel'),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_serve_no_task(name: str) -> None:
    create, task, text = REFUSED[name]
    with pytest.raises(CompileError) as caught:
        read_task(create(), task)
    assert str(caught.value) == f"causal_lm: model: {text}"
