"""Recurrent layers as operators over a state pool: what takes whose place, what is recorded, what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.language_models import make_model
from untorch.export import CompileError
from untorch.export.lm.states import StateRecorder, state_operators
from untorch.export.lm.step import Step

pytestmark = pytest.mark.filterwarnings("ignore")
FILE = "transformers.models.qwen3_next.modeling_qwen3_next"


def test_layers_lie_one_behind_the_other() -> None:
    step = Step(make_model("Qwen3Next"))
    conv, rule = 3 * (2 * 2 * 8 + 4 * 8), 4 * 8 * 8
    assert [(layer.function, layer.elements) for layer in step.state_layers] == [
        ("causal_conv1d_fn", conv), ("torch_chunk_gated_delta_rule", rule),
    ] * 3  # fmt: skip
    assert [layer.offset for layer in step.state_layers] == [
        i * (conv + rule) + extra for i in range(3) for extra in (0, conv)
    ]
    assert step.state_elements == 3 * (conv + rule)
    assert Step(make_model("Llama")).state_elements == 0


def test_rows_are_multiples_of_16() -> None:
    recorder = StateRecorder()
    assert recorder.elements == 0
    recorder.layer("a", 5, 3)
    recorder.layer("b", 20, 3)
    assert [layer.offset for layer in recorder.layers] == [0, 16]
    assert recorder.elements == 48


def test_functions_are_what_they_were() -> None:
    model = make_model("Qwen3Next")
    file = sys.modules[FILE]
    before = dict(vars(file))
    with state_operators(model, StateRecorder()):
        assert file.causal_conv1d_fn is not before["causal_conv1d_fn"]
    assert vars(file) == before
    with pytest.raises(IndexError), state_operators(model, StateRecorder()):
        model(torch.tensor([999]))
    assert vars(file) == before
    Step(model)
    assert vars(file) == before


class Older(nn.Module):
    """A layer that has its function as an attribute, as in older versions of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.causal_conv1d_fn: Any = None

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        assert self.causal_conv1d_fn is not None
        out: torch.Tensor = self.causal_conv1d_fn(x=x, weight=torch.ones(2, 3), bias=None, **given)
        return out


def test_attributes_of_modules() -> None:
    model, recorder = nn.Sequential(Older(), Older()), StateRecorder()
    with state_operators(model, recorder):
        out = model(torch.ones(1, 2, 4))
    assert out[0, 0].tolist() == [1, 3, 6, 8]
    assert [layer.elements for layer in recorder.layers] == [4, 4]
    assert model[0].causal_conv1d_fn is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"activation": "gelu"}, "activation: expected silu or none, got 'gelu'"),
        ({"seq_idx": torch.zeros(1)}, "arguments that are not known: seq_idx"),
        ({"initial_states": torch.zeros(1)}, "initial_states: the model keeps a state of its own, which a pool cannot "
                                             "follow"),
        ({"return_final_states": True}, "return_final_states: the model keeps a state of its own, which a pool cannot "
                                        "follow"),
    ],
)  # fmt: skip
def test_refusals(given: dict[str, Any], text: str) -> None:
    layer = Older()
    known: dict[str, Any] = {"use_cache": True, "return_final_states": False, "seq_idx": None}
    with state_operators(layer, StateRecorder()):
        layer(torch.ones(1, 2, 4), **known)
        with pytest.raises(CompileError) as caught:
            layer(torch.ones(1, 2, 4), **{**known, **given})
    assert str(caught.value) == f"causal_conv1d_fn: {text}"


def test_a_function_that_means_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Qwen3Next")
    file = sys.modules[FILE]
    own = file.causal_conv1d_fn

    def other(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = own(*args, **kwargs)
        return out + 1

    other.__module__ = FILE
    monkeypatch.setattr(file, "causal_conv1d_fn", other)
    with pytest.raises(CompileError) as caught:
        Step(model)
    assert str(caught.value).startswith(
        "causal_conv1d_fn: the model's own function and untorch's operator differ by 1, expected at most "
    )
    assert str(caught.value).endswith(": this version of transformers means something else by it")


def test_a_model_of_recurrent_layers_alone() -> None:
    with pytest.raises(CompileError) as caught:
        Step(make_model("Mamba2"))
    assert str(caught.value) == (
        "Mamba2ForCausalLM: all of its layers are recurrent: it does not call transformers' attention interface, so "
        "its cache cannot be paged"
    )
