"""Recipes for images: classification, and zero-shot classification with a method for images and one for texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.recipes.source import Made, Source
from untorch.export.recipes.text import MAX_BATCH, text_front_end, text_inputs
from untorch.pipeline.image_steps import apply_steps
from untorch.runtime.errors import InvalidArgumentError

__all__ = [
    "check_steps",
    "image_inputs",
    "image_steps",
    "write_image_classification",
    "write_zero_shot_image_classification",
]

_TOLERANCE = 1e-4  # of pixels that were normalised
_SIGLIP_LENGTH = 64  # that the models were trained with


class ImageModule(nn.Module):
    """A method of a model of images: pixels are float32, in whatever dtype the model computes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.train(model.training)


class ImageLogits(ImageModule):
    """forward(pixel_values [batch, 3, height, width] float32) → logits [batch, labels] float32."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The model's own logits."""
        logits: torch.Tensor = self.model(pixel_values=pixel_values.to(self.dtype)).logits
        return logits.float()


class ImageEmbedding(ImageModule):
    """forward(pixel_values [batch, 3, height, width] float32) → normalised embeddings [batch, width] float32."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """In the space that texts share."""
        return _embedding(self.model.get_image_features(pixel_values=pixel_values.to(self.dtype)))  # type: ignore[operator]


class TextSpaceEmbedding(nn.Module):
    """forward(input_ids, attention_mask; each [batch, sequence] int64) → normalised embeddings, float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """In the space that images share."""
        given = {} if attention_mask is None else {"attention_mask": attention_mask}
        return _embedding(self.model.get_text_features(input_ids=input_ids, **given))  # type: ignore[operator]


def _embedding(found: Any) -> torch.Tensor:
    features = (found if isinstance(found, torch.Tensor) else found.pooler_output).float()
    normalized: torch.Tensor = features / features.norm(dim=-1, keepdim=True)
    return normalized


def write_image_classification(source: Source) -> Made:
    """…ForImageClassification. The batch is dynamic; height and width are those that the processor makes."""
    steps, shape = image_steps(source)
    section = {"labels": source.labels(), "activation": source.activation(), "image_steps": steps}
    return Made({"forward": image_inputs(ImageLogits(source.model), shape)}, section)


def write_zero_shot_image_classification(source: Source) -> Made:
    """CLIP and SigLIP: encode_image and encode_text."""
    model, is_siglip = source.model, source.architecture.lower().startswith("siglip")
    if not is_siglip and source.architecture != "CLIPModel":
        raise CompileError(
            f"export_folder: zero-shot-image-classification: expected CLIPModel or SiglipModel, got "
            f"{source.architecture}"
        )
    steps, shape = image_steps(source)
    front, files = text_front_end(source, model.text_model)
    limit = int(model.config.text_config.max_position_embeddings)
    front["max_length"] = min(limit, front["max_length"], _SIGLIP_LENGTH if is_siglip else limit)
    # SigLIP was trained without a mask: texts have one length.
    length = front["max_length"] if is_siglip else None
    # As the tokenizer says: SigLIP's own names no mask.
    names = source.tokenizer.model_input_names
    front["text_inputs"] = [name for name in ("input_ids", "attention_mask") if name in names]
    section = {
        "activation": "sigmoid" if is_siglip else "softmax",
        "logit_scale": float(model.logit_scale.detach().float().exp()),
        "logit_bias": float(model.logit_bias.detach().float()) if is_siglip else 0.0,
        "fixed_length": length, "image_steps": steps, **front,
    }  # fmt: skip
    methods = {
        "encode_image": image_inputs(ImageEmbedding(model), shape),
        "encode_text": text_inputs(TextSpaceEmbedding(model), front, length),
    }
    return Made(methods, section, files)


def image_inputs(module: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    """A method with example pixels and the axis batch."""
    from torch.export import Dim

    example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return {
        "model": module,
        "args": (example,),
        "dynamic_shapes": ({0: Dim("batch", min=1, max=MAX_BATCH)},),
    }


def image_steps(source: Source, is_fixed: bool = True, **changes: Any) -> tuple[list[list[Any]], tuple[int, ...]]:
    """The processor's work as steps, and the shape [3, height, width] that they make.

    changes: members of the processor in the place of the folder's.

    Raises CompileError if the steps do not make what the processor makes of a picture, or is_fixed and pictures do not
    get one height and width.
    """
    if source.read_json("preprocessor_config.json") is None and source.read_json("processor_config.json") is None:
        raise InvalidArgumentError(
            f"export_folder: {source.folder}: expected a preprocessor_config.json for a task on images, got none"
        )
    from transformers import AutoImageProcessor

    kind: Any = AutoImageProcessor
    processor: Any = kind.from_pretrained(source.folder, local_files_only=True, backend="pil", **changes)
    steps = _read_steps(processor, source)
    shape = check_steps(
        lambda image: processor(images=[image], return_tensors="np")["pixel_values"][0], steps,
        f"{source.folder}: {type(processor).__name__}",
        f"{source.folder}: its processor's size {processor.size!r}" if is_fixed else None,
    )  # fmt: skip
    return steps, shape


def check_steps(transform: Any, steps: list[list[Any]], name: str, size: str | None = "") -> tuple[int, ...]:
    """The shape [3, height, width] that steps make of pictures.

    transform: What they stand for: a Pillow image to an array. size: what sets the size, for an error; None: pictures
    may get different ones.

    Raises CompileError if the steps do not make what the transform makes of a picture, or sizes differ.
    """
    from PIL import Image

    rng, shapes = np.random.default_rng(0), []
    for sizes in ((90, 61, 3), (57, 120, 3), (700, 500, 3)):
        picture = rng.integers(0, 256, sizes, np.uint8)
        expected = np.asarray(transform(Image.fromarray(picture)))
        found = apply_steps(Image.fromarray(picture), steps)
        if expected.shape != found.shape or np.abs(expected - found).max() > _TOLERANCE:
            raise CompileError(
                f"export_folder: {name} does more than resize, crop, rescale and normalise: write a script for untorch "
                "export SCRIPT:FUNCTION, and prepare the images yourself"
            )
        shapes.append(found.shape)
    if size is not None and len(set(shapes)) > 1:
        raise CompileError(
            f"export_folder: {size or name} leaves the height and width open: expected "
            '"height" and "width", or "shortest_edge" with a crop'
        )
    return shapes[-1]


def _read_steps(processor: Any, source: Source) -> list[list[Any]]:
    steps: list[list[Any]] = []
    size, resample = processor.size, int(processor.resample) if processor.resample is not None else 2
    if processor.do_resize:
        if size.height and size.width:
            steps.append(["resize", size.height, size.width, resample])
        elif size.shortest_edge and getattr(processor, "crop_pct", None) is not None:  # ConvNeXt
            edge = int(size.shortest_edge)
            if edge < 384:
                steps += [["resize_shortest", int(edge / processor.crop_pct), resample], ["center_crop", edge, edge]]
            else:
                steps.append(["resize", edge, edge, resample])
        elif size.shortest_edge and size.longest_edge:
            multiple = 16 if "Yolos" in type(processor).__name__ else 1
            steps.append(["resize_edges", int(size.shortest_edge), int(size.longest_edge), multiple, resample])
        elif size.shortest_edge:
            steps.append(["resize_shortest", int(size.shortest_edge), resample])
        else:
            raise CompileError(
                f'export_folder: {source.folder}: its processor\'s size {size!r}: expected "height" and "width", or '
                '"shortest_edge" with or without "longest_edge"'
            )
    if getattr(processor, "do_center_crop", False):
        steps.append(["center_crop", int(processor.crop_size.height), int(processor.crop_size.width)])
    if processor.do_rescale:
        steps.append(["rescale", float(processor.rescale_factor)])
    if processor.do_normalize:
        steps.append(["normalize", [*map(float, processor.image_mean)], [*map(float, processor.image_std)]])
    return steps
