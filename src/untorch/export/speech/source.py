"""What a speech model's package is made from: a module or a Hugging Face folder, its feature extractor, languages."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.folder import check_folder
from untorch.export.streaming import load_weights
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["load_speech_model", "read_feature_extractor", "read_languages"]


def load_speech_model(source: Any, dtype: torch.dtype | None) -> tuple[nn.Module, Path | None]:
    """The module, and the folder that it came from. Nothing is downloaded."""
    if isinstance(source, nn.Module):
        if dtype is not None:
            raise InvalidArgumentError("speech_to_text: dtype: is for a folder; convert a module with model.to(dtype)")
        return source, None
    if not isinstance(source, str | os.PathLike):
        raise ArgumentTypeError(
            "speech_to_text: model: expected a module or the path of a Hugging Face folder, got "
            + type(source).__name__
        )
    folder = Path(source)
    check_folder("speech_to_text: model", folder)
    import transformers

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = str((config.get("architectures") or [""])[0])
    kind = getattr(transformers, name, None)
    if kind is None or not hasattr(kind, "from_pretrained"):
        raise CompileError(f"speech_to_text: model: {folder}: its config names {name!r}, which transformers has not")
    model: nn.Module = load_weights(
        lambda: kind.from_pretrained(folder, dtype="auto" if dtype is None else dtype, local_files_only=True)
    )
    return model.eval(), folder


def read_feature_extractor(given: Any, folder: Path | None) -> Any:
    """An object of transformers; None: the folder's. Raises InvalidArgumentError if there is none."""
    if given is None and folder is not None and (folder / "preprocessor_config.json").is_file():
        from transformers import AutoFeatureExtractor

        kind: Any = AutoFeatureExtractor
        given = kind.from_pretrained(folder, local_files_only=True)
    if not hasattr(given, "sampling_rate") or not hasattr(given, "feature_size"):
        got = "none" if given is None else type(given).__name__
        raise InvalidArgumentError(
            f"speech_to_text: feature_extractor: expected one of transformers, such as Wav2Vec2FeatureExtractor, got "
            f"{got}"
        )
    return given


def read_languages(given: Any) -> tuple[str, ...]:
    """Codes of ISO 639-1. Raises InvalidArgumentError."""
    codes = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else (given,)
    for code in codes:
        if not isinstance(code, str) or not re.fullmatch(r"[a-z]{2,3}", code):
            raise InvalidArgumentError(
                f'speech_to_text: languages: expected codes of ISO 639-1 such as "en", got {code!r:.80}'
            )
    return codes
