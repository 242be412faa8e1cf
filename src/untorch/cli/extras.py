"""The extras of the package untorch, and which of what they bring is installed. Nothing is imported."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

__all__ = ["EXTRAS", "installed_extras", "wheel_tags"]

# As in pyproject.toml, without versions; a source tree has no metadata that says so.
EXTRAS: dict[str, tuple[str, ...]] = {
    "cli": ("typer", "rich"),
    "export": ("torch", "rich", "typer"),
    "checkpoints": ("torch", "safetensors"),
    "plot": ("matplotlib",),
    "cuda": ("nvidia-cublas", "nvidia-cudnn-cu13", "cuda-pathfinder"),
    "cuda-build": ("triton", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl"),
    "bf16": ("ml_dtypes",),
    "serve": (
        "starlette", "uvicorn", "httptools", "uvloop", "grpcio", "protobuf", "prometheus_client", "ml_dtypes",
        "python-multipart",
    ),
    "speech": ("soundfile", "tokenizers"),
    "pipeline": ("tokenizers", "pillow", "soundfile"),
    "llm": ("tokenizers", "jinja2", "llguidance", "pillow"),
    "ray": ("ray",),
    "sign": ("model-signing", "pyOpenSSL"),
}  # fmt: skip


def installed_extras() -> dict[str, dict[str, Any]]:
    """{"cli": {"installed": True, "missing": []}, …}: packages by name, whatever their version."""
    found = {}
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if not _is_installed(package)]
        found[extra] = {"installed": not missing, "missing": missing}
    return found


def wheel_tags() -> list[str] | None:
    """Of the wheel that untorch was installed from; None: from a source tree."""
    try:
        found = importlib.metadata.distribution("untorch")
    except importlib.metadata.PackageNotFoundError:
        return None
    text = found.read_text("WHEEL")
    # Another installation than the one that runs says nothing of it.
    if text is None or Path(str(found.locate_file("untorch"))).resolve() != Path(__file__).resolve().parents[1]:
        return None
    return [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("Tag:")]


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
