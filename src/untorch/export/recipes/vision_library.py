"""Image classification by models of timm and torchvision, with the preprocessing that they were evaluated with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.recipes.hub import import_library
from untorch.export.recipes.image import ImageLogits, check_steps, image_inputs
from untorch.export.recipes.source import Made
from untorch.runtime.errors import InvalidArgumentError, file_error

__all__ = ["write_library_model"]

# Pillow's numbers.
_FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
_RANDOM = "random"


class TensorLogits(ImageLogits):
    """The same of a model that takes and returns tensors."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The model's own logits."""
        logits: torch.Tensor = self.model(pixel_values.to(self.dtype))
        return logits.float()


def write_library_model(
    library: str, name: str, state_dict: str | os.PathLike[str] | None, dtype: torch.dtype | None
) -> tuple[Made, str]:
    """What a package has, and the architecture. The batch is dynamic; height and width are those of the evaluation.

    state_dict: a file with a state dict (safetensors, or torch's), "random", or None for the library's own, which it
    downloads.

    Raises CompileError if the library has no such model, its preprocessing is unknown, or nothing can be downloaded.
    """
    module = import_library(library)
    given = None if state_dict is None or os.fspath(state_dict) == _RANDOM else Path(state_dict)
    build = _build_timm if library == "timm" else _build_torchvision
    model, transform, steps, labels = build(module, name, state_dict is None)
    if given is not None:
        _load_weights(model, given)
    model = model.eval()
    shape = check_steps(transform, steps, f"{library}/{name}")
    logits = TensorLogits(model if dtype is None else model.to(dtype))
    with torch.no_grad():
        width = logits(torch.zeros(1, *shape)).shape[-1]
    if len(labels) != width:
        labels = [f"LABEL_{i}" for i in range(width)]
    section = {"labels": labels, "activation": "softmax", "image_steps": steps}
    return Made({"forward": image_inputs(logits, shape)}, section), type(model).__name__


def _build_timm(timm: Any, name: str, pretrained: bool) -> tuple[nn.Module, Any, list[list[Any]], list[str]]:
    if not timm.is_model(name.partition(".")[0]):
        close = timm.list_models(f"{name.partition('.')[0][:6]}*")[:5]
        raise _unknown("timm", name, close)
    model: Any = _download(f"timm/{name}", lambda: timm.create_model(name, pretrained=pretrained), pretrained)
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    labels: list[str] = []
    if (subset := timm.data.infer_imagenet_subset(model)) is not None:
        known = timm.data.ImageNetInfo(subset)
        labels = [str(known.index_to_description(i)) for i in range(int(model.num_classes))]
    return model, transform, _steps_of(transform.transforms, f"timm/{name}"), labels


def _build_torchvision(
    torchvision: Any, name: str, pretrained: bool
) -> tuple[nn.Module, Any, list[list[Any]], list[str]]:
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise _unknown("torchvision", name, [one for one in known if one.startswith(name[:4])][:5])
    weights = torchvision.models.get_model_weights(name).DEFAULT
    own = weights if pretrained else None
    # Inception's auxiliary classifier is for training; without weights it has to be said.
    model = _download(f"torchvision/{name}", lambda: torchvision.models.get_model(name, weights=own), pretrained)
    preset = weights.transforms()
    number = _FILTERS[preset.interpolation.value]
    steps: list[list[Any]] = [
        _resize(preset.resize_size, number),
        ["center_crop_even", *(preset.crop_size * 2)[:2]],
        ["rescale", 1 / 255],
        ["normalize", [*preset.mean], [*preset.std]],
    ]
    return model, preset, steps, [*weights.meta["categories"]]


def _steps_of(transforms: Any, name: str) -> list[list[Any]]:
    """Of torchvision's classes, and timm's that are like them. Raises CompileError for others."""
    steps: list[list[Any]] = []
    for one in transforms:
        kind = type(one).__name__
        if kind == "Resize":
            steps.append(_resize(one.size, _FILTERS[one.interpolation.value]))
        elif kind == "CenterCrop":
            steps.append(["center_crop_even", int(one.size[0]), int(one.size[1])])
        elif kind in ("ToTensor", "MaybeToTensor"):
            steps.append(["rescale", 1 / 255])
        elif kind == "Normalize":
            steps.append(["normalize", [*map(float, one.mean)], [*map(float, one.std)]])
        else:
            raise CompileError(
                f"export_folder: {name}: its preprocessing has the step {kind}: expected Resize, CenterCrop, ToTensor "
                "and Normalize: write a script for untorch export SCRIPT:FUNCTION"
            )
    return steps


def _resize(size: Any, number: int) -> list[Any]:
    sizes = [size] if isinstance(size, int) else [int(one) for one in size]
    return ["resize_shortest", sizes[0], number] if len(sizes) == 1 else ["resize", *sizes, number]


def _unknown(library: str, name: str, close: list[str]) -> CompileError:
    hint = f", such as {', '.join(close)}" if close else ""
    return CompileError(
        f"export_folder: {library}/{name}: {library} has no model for image classification of that name{hint}"
    )


def _download(name: str, create: Any, pretrained: bool) -> nn.Module:
    try:
        found: nn.Module = create()
        return found
    except Exception as error:
        if not pretrained:
            raise
        # Errors of the network are those of whatever client the library uses.
        text = " ".join(str(error).split())
        raise CompileError(
            f"export_folder: {name}: its weights cannot be downloaded: {type(error).__name__}: {text:.200}: pass "
            'state_dict= (--state-dict), a file with them or "random"'
        ) from error


def _load_weights(model: nn.Module, file: Path) -> None:
    if not file.is_file():
        raise file_error(f"export_folder: state_dict: there is no file {file}", 2, str(file))
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            model.load_state_dict(load_file(file))
        else:
            model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:
        text = " ".join(str(error).split())
        raise InvalidArgumentError(
            f"export_folder: state_dict: {file}: expected a state dict of {type(model).__name__}: {text:.300}"
        ) from error
