"""Models by name: folders of the Hugging Face Hub, models of timm and torchvision."""

from __future__ import annotations

import glob
import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from untorch.export.errors import CompileError
from untorch.runtime.errors import UnsupportedError

__all__ = ["LIBRARIES", "import_library", "is_model_name", "library_model", "read_folder", "unread_weights"]

LIBRARIES = ("timm", "torchvision")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What recipes read. Weights of other formats are left where they are.
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*/config.json", "*/model.safetensors")
# model.fp16.safetensors, model.non_ema-00001-of-00002.safetensors
_VARIANT = re.compile(r"(.*/)?([^/.]+)\.[^/.]+?(-\d+-of-\d+)?\.safetensors")


def is_model_name(given: Any) -> bool:
    """Whether it is ``owner/name`` and no path that exists, nor a script."""
    return (
        isinstance(given, str)
        and _NAME.fullmatch(given) is not None
        and not given.endswith((".py", ".pt2"))
        and not os.path.exists(given)
    )


def library_model(given: Any) -> tuple[str, str] | None:
    """("timm", "resnet18") of "timm/resnet18"; None: it is no model of a library."""
    if not is_model_name(given):
        return None
    library, _, name = str(given).partition("/")
    return (library, name) if library in LIBRARIES else None


def import_library(name: str) -> Any:
    """Raises UnsupportedError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(f"export_folder: {name}/…: models of {name} need it: pip install {name}") from error


def read_folder(given: Any) -> Any:
    """The path; of a name on the Hugging Face Hub, a local copy of its files, downloaded by huggingface_hub.

    Raises CompileError if it cannot be downloaded, UnsupportedError without huggingface_hub.
    """
    if not is_model_name(given):
        return given
    try:
        import huggingface_hub
    except ImportError as error:
        raise UnsupportedError(
            f"export_folder: {given}: there is no such folder, and names of the Hugging Face Hub need the package "
            "huggingface_hub: pip install huggingface_hub"
        ) from error
    try:
        unread = unread_weights(huggingface_hub.list_repo_files(given))
    except Exception:  # without a network there may be a copy all the same
        unread = []
    try:
        # Errors of the network are those of whatever client it uses.
        ignored = [glob.escape(name) for name in unread]
        return Path(huggingface_hub.snapshot_download(given, allow_patterns=[*_FILES], ignore_patterns=ignored))
    except Exception as error:
        text = " ".join(str(error).split())
        raise CompileError(
            f"export_folder: {given}: there is no such folder, and it cannot be downloaded: {type(error).__name__}: "
            f"{text:.200}: pass the path of a folder"
        ) from error


def unread_weights(names: Sequence[str]) -> list[str]:
    """Of a repository's files, weights that lie there a second time.

    Those are variants in another dtype or without averaging beside the plain file, Mistral's consolidated checkpoint
    beside transformers' own, and a diffusion model in one file beside the folders of its parts.
    """
    known = {name for name in names if name.endswith(".safetensors")}
    own = {_folder(name) for name in known if not _is_consolidated(name)}
    in_parts = "model_index.json" in names

    def is_variant(name: str) -> bool:
        parts = _VARIANT.fullmatch(name)
        return parts is not None and f"{parts[1] or ''}{parts[2]}{parts[3] or ''}.safetensors" in known

    return [
        name
        for name in names
        if name in known
        and (is_variant(name) or (in_parts and not _folder(name)) or (_is_consolidated(name) and _folder(name) in own))
    ]


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _is_consolidated(name: str) -> bool:
    return name.rpartition("/")[2].startswith("consolidated")
