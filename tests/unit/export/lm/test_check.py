"""The build's own check: a step that does something else than its model is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.language_models import VOCABULARY, make_model
from untorch.export import CompileError
from untorch.export.lm import attention, check
from untorch.export.lm.attention import NAME, Recorder
from untorch.export.lm.check import check_chunks, check_model
from untorch.export.lm.step import Step

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_that_are_right(dtype: torch.dtype) -> None:
    step = Step(make_model("Gemma2").to(dtype))
    check_model(step, VOCABULARY, 128)
    assert step.model.config._attn_implementation == NAME


@pytest.mark.slow
def test_values_of_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when layers were told by their keys alone: chunks agree with each other."""
    layer_of = Recorder.layer_of
    monkeypatch.setattr(Recorder, "layer_of", lambda self, key, value: layer_of(self, key, key))
    step = Step(make_model("DiffLlama"))
    check_chunks(step, VOCABULARY)
    with pytest.raises(CompileError) as caught:
        check_model(step, VOCABULARY, 128)
    text = str(caught.value)
    assert text.startswith("DiffLlamaForCausalLM: the logits of 12 tokens over pages differ by ")
    assert text.endswith(
        ": its layers do more than causal attention to the keys and values that they give to transformers' attention "
        "interface"
    )


@pytest.mark.slow
def test_layers_that_differ_from_some_length_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_mask", lambda *args, **named: attention._Mask(40, 0))
    step = Step(make_model("Llama"))
    check_chunks(step, VOCABULARY)
    check_model(step, VOCABULARY, 40)
    with pytest.raises(CompileError, match="the logits of 128 tokens over pages differ by "):
        check_model(step, VOCABULARY, 128)


def test_large_models_are_checked_at_a_smaller_length(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(make_model("Llama"))
    counts: list[int] = []
    own = check._own_logits
    monkeypatch.setattr(
        check, "_own_logits", lambda step, tokens: counts.append(len(tokens)) or own(step, tokens)
    )  # fmt: skip
    parameters = sum(parameter.numel() for parameter in step.model.parameters())
    check_model(step, VOCABULARY, 128)
    monkeypatch.setattr(check, "_MOST_PRODUCTS", 50 * parameters)
    check_model(step, VOCABULARY, 128)
    check_model(step, VOCABULARY, 128, long=False)
    check_model(step, VOCABULARY, 40, long=True)
    monkeypatch.setattr(check, "_MOST_PRODUCTS", 5 * parameters)
    check_model(step, VOCABULARY, 128)
    check_model(step, VOCABULARY, 8)
    assert counts == [12, 128, 12, 50, 12, 40, 12]


@pytest.mark.slow
def test_errors_of_a_model_name_the_layer() -> None:
    with pytest.raises(CompileError) as caught:
        Step(make_model("DeepseekV32"))
    assert str(caught.value) == (
        "DeepseekV32ForCausalLM: model.layers.0.self_attn (DeepseekV32Attention): the model reads a part of its mask, "
        "which pages cannot follow: it makes one of its own"
    )
    step = Step(make_model("DeepseekV4"))
    check_chunks(step, VOCABULARY)
    with pytest.raises(CompileError) as caught:
        check_model(step, VOCABULARY, 512)
    start = "DeepseekV4ForCausalLM: model.layers.0.self_attn (DeepseekV4Attention) fails over pages: IndexError: "
    assert str(caught.value).startswith(start)


def test_a_model_whose_own_forward_fails() -> None:
    step = Step(make_model("Llama"))
    model: Any = step.model

    def forward(*args: Any, **named: Any) -> None:
        raise ValueError("no")

    model.model.norm.forward = forward
    with pytest.raises(CompileError) as caught:
        check_model(step, VOCABULARY, 128)
    assert (
        str(caught.value)
        == "LlamaForCausalLM: model.norm (LlamaRMSNorm) fails in the model's own forward: ValueError: no"
    )
    assert model.config._attn_implementation == NAME
