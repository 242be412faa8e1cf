"""An image processor of transformers as settings of untorch's own, which needs no torch; compared with each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from untorch.export.errors import CompileError
from untorch.export.lm.vision import METHOD
from untorch.llm.vision.patches import cut_patches
from untorch.llm.vision.settings import VisionSettings
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["read_image_processor", "vision_settings"]

_SIZES = ((90, 61), (37, 200))  # of test images
_TOLERANCE = 8 / 255  # before the normalisation: filters of torchvision and Pillow round in other places


def read_image_processor(given: Any, folder: Path | None) -> Any:
    """Of transformers: from a folder, a processor, or an image processor; None: the model's folder."""
    if isinstance(given, str | os.PathLike):
        folder, given = Path(given), None
    if given is None:
        if folder is None:
            raise InvalidArgumentError(
                "causal_lm: image_processor: expected one of transformers, or its folder, as the model is a module, "
                "got none"
            )
        import transformers

        library: Any = transformers  # not all of it has types
        try:
            return library.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(
                f"causal_lm: image_processor: {folder} has none: {str(error).splitlines()[0]}"
            ) from None
    found = getattr(given, "image_processor", given)
    if not hasattr(found, "patch_size") or not callable(found):
        raise ArgumentTypeError(
            "causal_lm: image_processor: expected a folder, or an image processor of transformers that cuts patches "
            f"(Qwen2VLImageProcessor), got {type(given).__name__}"
        )
    return found


def vision_settings(model: Any, visual: Any, processor: Any, tables: tuple[str, ...]) -> VisionSettings:
    """Raises CompileError for a processor that does more than resize, rescale, normalise and cut."""
    name, config = type(processor).__name__, visual.config
    if not (processor.do_resize and processor.do_rescale and processor.do_normalize):
        raise CompileError(f"causal_lm: image_processor: {name}: expected it to resize, rescale and normalise")
    merge = int(config.spatial_merge_size)
    for own, theirs in (
        ("patch_size", "patch_size"),
        ("temporal_patch_size",) * 2,
        ("merge_size", "spatial_merge_size"),
    ):
        if getattr(processor, own) != getattr(config, theirs):
            raise InvalidArgumentError(
                f"causal_lm: image_processor: {own}: expected the model's {getattr(config, theirs)}, got "
                f"{getattr(processor, own)}"
            )
    settings = VisionSettings(
        method=METHOD,
        placeholder=int(model.config.image_token_id),
        patch_size=int(config.patch_size),
        temporal_patch_size=int(config.temporal_patch_size),
        merge_size=merge,
        min_pixels=int(processor.size["shortest_edge"]),
        max_pixels=int(processor.size["longest_edge"]),
        resample=int(processor.resample),
        rescale=float(processor.rescale_factor),
        mean=tuple(float(value) for value in processor.image_mean),
        deviation=tuple(float(value) for value in processor.image_std),
        tables=tables,
        grid_side=int(visual.num_grid_per_side) if "position_grid" in tables else 0,
        window_side=int(config.window_size) // merge // int(config.patch_size) if "windows" in tables else 0,
    )
    _compare(processor, settings)
    return settings


def _compare(processor: Any, settings: VisionSettings) -> None:
    from PIL import Image

    generator = np.random.default_rng(0)
    for height, width in _SIZES:
        coarse = generator.integers(0, 256, (height // 9 + 1, width // 9 + 1, 3), np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
        found, made = cut_patches(image, settings), processor(images=[image], return_tensors="np")
        grid, expected = np.asarray(made["image_grid_thw"]), np.asarray(made["pixel_values"])
        merge = settings.merge_size
        if grid.tolist() != [[1, found.rows * merge, found.columns * merge]]:
            raise CompileError(
                f"causal_lm: image_processor: {type(processor).__name__} makes a grid of {grid.tolist()} of an image "
                f"of {height} × {width} pixels, expected {found.rows * merge} × {found.columns * merge} patches"
            )
        difference = float(np.abs(found.pixels.reshape(expected.shape) - expected).max()) * min(settings.deviation)
        if not difference <= _TOLERANCE:
            raise CompileError(
                f"causal_lm: image_processor: the patches of {type(processor).__name__} differ by {difference:.3g} "
                "from those of an image that is resized, rescaled and normalised: it does more than that"
            )
