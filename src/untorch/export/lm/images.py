"""What a package with images has beside its language model: the encoder's method, its settings, and their check."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from untorch.export.errors import CompileError
from untorch.export.lm.embeddings import EmbeddingStep
from untorch.export.lm.image_processor import read_image_processor, vision_settings
from untorch.export.lm.vision import METHOD, VisionEncoder, encoder_method, encoder_of, segment_attention, tables_of
from untorch.export.lm.vision_check import ImageReference, check_images, image_reference
from untorch.llm.vision.settings import VisionSettings

__all__ = ["ImagePart", "read_images"]


@dataclass(frozen=True)
class ImagePart:
    """levels: features behind each embedding, as ``EmbeddingStep`` has them."""

    encoder: VisionEncoder
    settings: VisionSettings
    method: dict[str, Any]
    levels: int
    reference: ImageReference

    @property
    def methods(self) -> dict[str, Any]:
        """As ``export`` takes them."""
        return {METHOD: self.method}

    def attention(self) -> AbstractContextManager[None]:
        """The encoder's attention works for images of any size meanwhile."""
        return segment_attention(self.encoder.visual)

    def check(self, step: EmbeddingStep) -> None:
        """Raises CompileError if encoder and step do not give the logits of the model's own forward."""
        check_images(self.reference, self.encoder, step, self.settings)


def read_images(model: Any, processor: Any, folder: Path | None, hidden: int, vocabulary: int) -> ImagePart:
    """Of a vision-language model, with the attention that it has. hidden: width of its text model.

    Raises CompileError for a model whose encoder is not known to work for images of any size; InvalidArgumentError.
    """
    visual = encoder_of(model)
    tables = tables_of(visual)
    settings = vision_settings(model, visual, read_image_processor(processor, folder), tables)
    reference = image_reference(model, settings, vocabulary)
    encoder = VisionEncoder(visual, tables).eval()
    method = encoder_method(encoder, settings)
    with segment_attention(encoder.visual), torch.no_grad():
        width = encoder(*method["args"]).shape[1]
    if width != hidden * (encoder.levels + 1):
        raise CompileError(
            f"causal_lm: images: {type(model).__name__}: its encoder gives embeddings of {width} values, expected "
            f"{encoder.levels + 1} × {hidden}"
        )
    return ImagePart(encoder, settings, method, encoder.levels, reference)
