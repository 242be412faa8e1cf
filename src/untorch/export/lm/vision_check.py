"""The build's own check of images: encoder, positions and steps give the logits of the model's own forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.lm.check import tolerance_of_models
from untorch.export.lm.embeddings import EmbeddingStep
from untorch.export.lm.refusal import refusals
from untorch.export.lm.vision import VisionEncoder
from untorch.llm.vision.positions import image_positions
from untorch.llm.vision.settings import VisionSettings
from untorch.llm.vision.tables import encoder_tables

__all__ = ["ImageReference", "check_images", "image_reference"]

_LAST = 8


@dataclass(frozen=True)
class ImageReference:
    """A prompt with two images, and the logits that the whole model has for its last tokens."""

    tokens: torch.Tensor
    images: list[tuple[int, int, int]]  # first token, rows and columns of units
    patches: list[torch.Tensor]
    logits: torch.Tensor


def image_reference(model: Any, settings: VisionSettings, vocabulary: int) -> ImageReference:
    """By the model's own forward, with the attention that it has. Raises CompileError."""
    generator = torch.Generator().manual_seed(0)
    values = 3 * settings.temporal_patch_size * settings.patch_size**2
    sizes = [(settings.window_side + 2, settings.window_side + 3), (3, 2)]
    ids: list[int] = []
    images = []
    for index, (rows, columns) in enumerate(sizes):
        ids += [(3 + 7 * index + i) % vocabulary for i in range(4)]
        images.append((len(ids), rows, columns))
        ids += [settings.placeholder] * (rows * columns)
    ids += [(5 + 11 * i) % vocabulary for i in range(_LAST + 2)]
    tokens = torch.tensor(ids)
    is_image = torch.zeros(len(ids), dtype=torch.long)
    for begin, rows, columns in images:
        is_image[begin : begin + rows * columns] = 1
    tokens = torch.where((tokens == settings.placeholder) & (is_image == 0), settings.placeholder - 1, tokens)
    merge = settings.merge_size
    patches = [
        torch.randn(rows * columns, merge * merge, values, generator=generator) for _, rows, columns in images
    ]  # fmt: skip
    base, training = model.base_model, model.training
    deltas = getattr(base, "rope_deltas", None)
    model.eval()
    try:
        with torch.no_grad(), refusals(model, type(model).__name__, "in the model's own forward"):
            logits = model(
                input_ids=tokens[None],
                pixel_values=torch.cat([one.flatten(0, 1) for one in patches]),
                image_grid_thw=torch.tensor([[1, rows * merge, columns * merge] for _, rows, columns in images]),
                mm_token_type_ids=is_image[None].int(),
                use_cache=False,
                return_dict=True,
            ).logits[0, -_LAST:]
    finally:
        base.rope_deltas = deltas
        model.train(training)
    return ImageReference(tokens, images, patches, logits.float())


def check_images(
    reference: ImageReference, encoder: VisionEncoder, step: EmbeddingStep, settings: VisionSettings
) -> None:
    """Raises CompileError if the step's logits are not those of the reference."""
    tokens, block = reference.tokens, step.block
    count = len(tokens)
    positions = torch.arange(count)
    if step.position_rows > 1:
        positions = torch.from_numpy(image_positions(count, reference.images))
    mask = torch.zeros(count, dtype=torch.bool)
    embeddings: torch.Tensor | None = None
    blocks = -(-count // block)
    pool = torch.zeros(blocks, step.elements, dtype=step.dtype)
    states = (torch.ones(1, dtype=torch.int32), torch.zeros(2, step.state_elements)) if step.state_elements else ()
    found = torch.empty(0)
    with torch.no_grad(), refusals(_both(encoder, step), step.architecture, "with an image"):
        for (begin, rows, columns), patches in zip(reference.images, reference.patches, strict=True):
            tables = [torch.from_numpy(np.asarray(table)) for table in encoder_tables(rows, columns, settings)]
            made = encoder(patches, *tables)
            embeddings = torch.zeros(count, made.shape[1]) if embeddings is None else embeddings
            embeddings[begin : begin + len(made)] = made
            mask[begin : begin + len(made)] = True
        assert embeddings is not None
        # The first chunk ends within an image.
        middle = reference.images[0][0] + 3
        for begin, end in ((0, middle), (middle, count)):
            part = slice(begin, end)
            found = step(
                tokens[part], positions[..., part], torch.arange(max(end - begin - _LAST, 0), end - begin),
                torch.arange(blocks, dtype=torch.int32)[None], torch.tensor([0, end - begin], dtype=torch.int32),
                torch.tensor([end], dtype=torch.int32), torch.arange(begin, end), pool, embeddings[part], mask[part],
                *states,
            )  # fmt: skip
    differences = (found - reference.logits).abs().amax(1)
    difference = (differences.max() if step.dtype == torch.float32 else differences.median()).item()
    tolerance = tolerance_of_models(step.dtype) * max(reference.logits.abs().max().item(), 1e-6)
    if not difference <= tolerance:
        raise CompileError(
            f"causal_lm: images: {step.architecture}: the logits behind two images differ by {difference:.3g} from "
            f"those of the model's own forward, expected at most {tolerance:.3g}: its images are encoded or placed in "
            "another way than is known; use inputs_embeds=True with an encoder and positions of your own"
        )


def _both(encoder: nn.Module, step: nn.Module) -> nn.Module:
    """For names of layers in errors."""
    return nn.ModuleDict({"encoder": encoder, "step": step})
