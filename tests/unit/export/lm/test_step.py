"""A model as a step over pages: its layers, its attention's refusals, and rotary embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.language_models import make_model
from untorch.export import CompileError
from untorch.export.lm import attention
from untorch.export.lm.attention import NAME, Layer, Recorder, _attention, _Mask, _mask, current_step
from untorch.export.lm.groups import place_layers
from untorch.export.lm.rotary import fix_rotary_embeddings
from untorch.export.lm.step import Step

pytestmark = pytest.mark.filterwarnings("ignore")


def test_layers_lie_one_behind_the_other() -> None:
    step = Step(make_model("Mistral"), 32)
    assert [(layer.offset, layer.window, layer.heads_kv) for layer in step.layers] == [
        (i * 2 * 32 * 16, 6, 2) for i in range(3)
    ]  # fmt: skip
    assert step.elements == 3 * 2 * 32 * 16
    assert step.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_pages_of_codes(dtype: torch.dtype) -> None:
    step = Step(make_model("Mistral"), 32)
    step.quantize_pages(dtype)
    assert [(layer.offset, layer.window) for layer in step.layers] == [(i * 2 * 32 * 20, 6) for i in range(3)]
    assert step.elements == 3 * 2 * 32 * 20
    assert step.dtype == dtype


def test_layers_that_share_their_keys_have_one_place() -> None:
    assert len(Step(make_model("Gemma3n")).layers) == 5


def test_chunks_are_found() -> None:
    assert {layer.chunk for layer in Step(make_model("Llama4")).layers} >= {8}


class Attention(nn.Module):
    is_causal = True


def attend(**changes: Any) -> None:
    x = torch.zeros(1, 2, 3, 8)
    given = {"module": Attention(), "query": x, "key": x, "value": x, "attention_mask": None, **changes}
    recorder = Recorder()
    with current_step(recorder):
        recorder.begin(None)
        _attention(**given)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention_mask": torch.zeros(1)}, "Attention: it makes a mask of its own, which pages cannot follow"),
        ({"is_causal": False}, "Attention: its attention is not causal"),
        ({"bias": torch.zeros(1), "rope": 1}, "Attention: its attention has arguments that are not known: bias, rope"),
        ({"attention_mask": _Mask(4, 0), "sliding_window": 5}, "Attention: its window is 5, and 4 in its mask"),
    ],
)
def test_what_attention_refuses(changes: dict[str, Any], text: str) -> None:
    attend(attention_mask=_Mask(4, 0), sliding_window=4, dropout=0.0)
    with pytest.raises(CompileError) as caught:
        attend(**changes)
    assert str(caught.value) == text


def test_attention_outside_of_a_step() -> None:
    with pytest.raises(CompileError, match=f"the attention implementation '{NAME}' works inside of a step only"):
        _attention(Attention(), *[torch.zeros(1, 2, 3, 8)] * 3, None)


def causal_mask_function(*args: Any) -> bool:
    return True


def prefix_overlay(*args: Any) -> bool:
    return True


def test_masks_of_other_functions() -> None:
    assert _mask(mask_function=causal_mask_function).window == 0
    with pytest.raises(CompileError) as caught:
        _mask(mask_function=prefix_overlay)
    assert str(caught.value) == (
        "the model's mask is made of prefix_overlay: only causal masks, windows and chunks work"
    )  # fmt: skip


def test_an_encoder_by_its_config() -> None:
    """Its modules say that they are causal; its masks do not."""
    with pytest.raises(CompileError) as caught:
        Step(make_model("Qwen3", is_causal=False))
    assert str(caught.value) == (
        "the model has bidirectional attention, so it is an encoder: compile it with untorch.export.export"
    )


def longrope(**changes: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 16, **changes,
    }  # fmt: skip


@pytest.mark.parametrize("length", [16, 128])
def test_longrope_is_fixed_for_the_length(length: int) -> None:
    model = make_model("Phi3", rope_parameters=longrope(), original_max_position_embeddings=16)
    short, long = torch.arange(10)[None] + 20, torch.arange(60)[None] + 20
    with torch.no_grad():
        expected = model(short if length == 16 else long).logits[0, :10]
        fix_rotary_embeddings(model, length)
        # Neither the batch nor its positions matter any more.
        found = model(short).logits[0]
        again = model(long).logits[0, :10]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)


def test_dynamic_ntk_is_refused() -> None:
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = make_model("Llama", rope_parameters=scaled)
    with pytest.raises(CompileError) as caught:
        fix_rotary_embeddings(model, 128)
    assert str(caught.value).startswith("model.rotary_emb: its rotary embedding is scaled by dynamic NTK")
    module = nn.Module()
    module.part = nn.Module()
    module.part.rope_type = {"full_attention": "default", "sliding_attention": "dynamic"}  # type: ignore[assignment]
    with pytest.raises(CompileError, match="part: its rotary embedding is scaled by dynamic NTK"):
        fix_rotary_embeddings(module, 128)


def test_dtypes_that_differ() -> None:
    layers = [Layer("Attention", 2, 8, 8, 0, 0, dtype) for dtype in (torch.float32, torch.bfloat16)]
    with pytest.raises(CompileError, match="the layers' keys have several dtypes: convert the model to one"):
        place_layers(layers, 16, None)


def test_a_model_without_the_interface() -> None:
    model = make_model("Bloom")
    with pytest.raises(CompileError) as caught:
        Step(model)
    assert str(caught.value) == (
        "BloomForCausalLM: it does not call transformers' attention interface, so its cache cannot be paged"
    )


def test_a_mask_that_is_read() -> None:
    """Doge makes another mask of it."""
    mask = attention._Mask(window=4, chunk=0)
    with pytest.raises(CompileError, match=r"the model reads its mask \(dtype\), which pages cannot follow"):
        _ = mask.dtype
    assert mask.window == 4 and not hasattr(mask, "__array__")
