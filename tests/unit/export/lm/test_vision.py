"""Image encoders for any size: embeddings as the model's own, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.language_models import make_model as make_language_model
from tests.vision_models import VOCABULARY, image_processor, make_model
from untorch.export import CompileError
from untorch.export.lm import vision
from untorch.export.lm.images import ImagePart, read_images
from untorch.export.lm.vision import encoder_of, tables_of
from untorch.llm.vision.tables import encoder_tables

pytestmark = pytest.mark.filterwarnings("ignore")


def embeddings(part: ImagePart, rows: int, columns: int) -> torch.Tensor:
    tables = [torch.from_numpy(array) for array in encoder_tables(rows, columns, part.settings)]
    patches = torch.randn(rows * columns, 4, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), part.attention():
        found: torch.Tensor = part.encoder(patches, *tables)
    return found


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL"])
def test_embeddings_of_any_size(name: str) -> None:
    model: Any = make_model(name)
    part = read_images(model, image_processor(), None, 32, VOCABULARY)
    own = model.base_model.visual
    attention = own.config._attn_implementation
    for rows, columns in ((1, 1), (3, 5), (4, 2), (1, 7)):
        found = embeddings(part, rows, columns)
        patches = torch.randn(rows * columns, 4, 96, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            out = own(patches.flatten(0, 1), grid_thw=torch.tensor([[1, 2 * rows, 2 * columns]]), return_dict=True)
        expected = torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or [])], dim=-1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert own.config._attn_implementation == attention
    assert part.levels == (name == "Qwen3VL")
    # The encoder's weights are the model's: packages and memory have them once.
    assert {p.data_ptr() for p in part.encoder.parameters()} == {p.data_ptr() for p in own.parameters()}


def test_weights_in_half_types() -> None:
    model: Any = make_model("Qwen2_5_VL").to(torch.bfloat16)
    part = read_images(model, image_processor(), None, 32, VOCABULARY)
    assert embeddings(part, 3, 5).dtype == torch.float32


def test_models_without_such_an_encoder() -> None:
    with pytest.raises(CompileError) as caught:
        encoder_of(make_language_model("Llama"))
    assert str(caught.value) == (
        "causal_lm: images: LlamaForCausalLM is none of the models whose image encoder is compiled for any size "
        "(Qwen2-VL, Qwen2.5-VL, Qwen3-VL and those like them): compile its encoder with untorch.export.export for one "
        "size, and use inputs_embeds=True"
    )


def test_other_interpolation() -> None:
    visual: Any = make_model("Qwen3VL").base_model.visual
    assert tables_of(visual) == ("axes", "position_grid")
    visual.interpolation_mode = "bicubic"
    with pytest.raises(CompileError) as caught:
        tables_of(visual)
    assert str(caught.value) == (
        "causal_lm: images: Qwen3VLVisionModel interpolates its positions by bicubic, align_corners=True: expected "
        "bilinear and True; use inputs_embeds=True with an encoder for one size"
    )


def test_attention_with_a_mask() -> None:
    with pytest.raises(CompileError, match=r"^Linear: its attention has a mask or segments of its own"):
        vision._attention(torch.nn.Linear(1, 1), *[torch.zeros(1, 1, 2, 4)] * 3, cu_seq_lens_q=torch.tensor([0, 2]))
