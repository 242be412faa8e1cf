"""A checkpoint's tensors by name, from one .safetensors file or a folder of them, and its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, UnsupportedError

__all__ = ["Checkpoint", "open_checkpoint", "read_configuration"]

_MODELOPT = "hf_quant_config.json"
_CONFIGURATIONS = ("config.json", _MODELOPT, "quantize_config.json", "quant_config.json")


class Checkpoint:
    """Tensors are read when they are asked for. ``config`` is the quantisation's configuration, empty without one."""

    def __init__(self, path: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.path, self.config = path, config
        self._files = tensors

    @property
    def names(self) -> list[str]:
        """All tensors' names."""
        return list(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor. Raises InvalidFileError if there is none."""
        if name not in self._files:
            raise InvalidFileError(f"{self.path}: there is no tensor {name!r}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def kind(self, name: str) -> str:
        """The dtype as safetensors writes it, "F8_E4M3", without reading the tensor; "" if there is none."""
        return str(self._files[name].get_slice(name).get_dtype()) if name in self._files else ""

    def expect(self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]) -> torch.Tensor:
        """The tensor, if it has one of the dtypes and the shape; None in it is any size. Raises InvalidFileError."""
        tensor = self.tensor(name)
        fits = tensor.dim() == len(shape) and all(
            wanted in (None, size) for size, wanted in zip(tensor.shape, shape, strict=True)
        )
        if tensor.dtype not in dtypes or not fits:
            kinds = " or ".join(_name(dtype) for dtype in dtypes)
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise InvalidFileError(
                f"{self.path}: {name}: expected {kinds} [{sizes}], got {_name(tensor.dtype)} {list(tensor.shape)}"
            )
        return tensor


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a .safetensors file, or a folder with such files and its configuration. Raises InvalidFileError."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UnsupportedError("checkpoints need safetensors: pip install 'untorch[checkpoints]'") from error
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise InvalidArgumentError(
            f"load_checkpoint: {path}: expected a .safetensors file or a folder that holds some, found none"
        )
    tensors: dict[str, Any] = {}
    for file in files:
        try:
            opened: Any = safe_open(file, "pt")
        except (SafetensorError, OSError) as error:
            raise InvalidFileError(f"{file}: it is no safetensors file: {error}") from error
        for name in opened.keys():  # noqa: SIM118 - it is no dictionary
            if name in tensors:
                raise InvalidFileError(f"{path}: two files have a tensor {name!r}")
            tensors[name] = opened
    return Checkpoint(path, tensors, read_configuration(folder))


def read_configuration(folder: Path) -> Mapping[str, Any]:
    """What the folder's configuration says about quantisation; those of their own are older than config.json's."""
    for name in _CONFIGURATIONS:
        file = folder / name
        if not file.is_file():
            continue
        try:
            document = json.loads(file.read_text())
        except (ValueError, RecursionError) as error:
            raise InvalidFileError(f"{file}: it is not valid JSON: {error}") from error
        if name == "config.json" and isinstance(document, dict):
            text_model = document.get("text_config")
            document = document.get("quantization_config") or (
                text_model.get("quantization_config") if isinstance(text_model, dict) else None
            )
        if name == _MODELOPT and isinstance(document, dict) and isinstance(document.get("quantization"), dict):
            document = {"quant_method": "modelopt", **document["quantization"]}
        if isinstance(document, dict):
            return document
    return {}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
