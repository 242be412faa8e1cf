"""What a package's manifest says of its front end, and how the package is called, for people. Runs nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from untorch.pipeline.settings import Settings, read_settings
from untorch.runtime.errors import UntorchError

__all__ = ["Calls", "describe_calls", "describe_pipeline"]

_TEXT, _IMAGE, _AUDIO = "some text", "cat.jpg", "speech.wav"
# What stands for an input, in a shell and in Python, with the options that a call needs.
_INPUTS: dict[str, tuple[str, str]] = {
    "text-classification": (f'"{_TEXT}"', '"…"'),
    "reranking": ("""'{"query": "…", "documents": ["…"]}'""", '{"query": "…", "documents": ["…"]}'),
    "token-classification": (f'"{_TEXT}"', '"…"'),
    "text-embedding": (f'"{_TEXT}"', '"…"'),
    "image-classification": (_IMAGE, f'"{_IMAGE}"'),
    "zero-shot-image-classification": (
        f"""{_IMAGE} --call-option 'candidate_labels=["a cat", "a dog"]'""",
        f'"{_IMAGE}", candidate_labels=["a cat", "a dog"]',
    ),
    "object-detection": (_IMAGE, f'"{_IMAGE}"'),
    "image-segmentation": (_IMAGE, f'"{_IMAGE}"'),
    "text-to-image": ('"a cat" -o images', '"a cat"'),
    "class-to-image": ('"a label" -o images', '"a label"'),
    "audio-classification": (_AUDIO, f'"{_AUDIO}"'),
    "automatic-speech-recognition": (_AUDIO, f'"{_AUDIO}"'),
}


@dataclass(frozen=True)
class Calls:
    """How a package is called: in Python, and by a command (None: only with arrays)."""

    python: str
    command: str | None


def describe_pipeline(manifest: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """Task, architecture, labels (None: none) and front end; {"error": …} if damaged; None without a pipeline."""
    try:
        if "pipeline" in manifest:
            settings = read_settings(manifest, path)
            labels = settings.texts("labels") if settings.optional("labels", list) is not None else None
            return {
                "task": settings.get("task", str),
                "architecture": settings.get("architecture", str),
                "labels": labels,
                "front_end": "; ".join(_front_end(settings)),
            }
        if "speech" in manifest:
            from untorch.speech.settings import read_settings as read_speech

            speech = read_speech(manifest, path)
            seconds = speech.chunk_samples / speech.sampling_rate
            return {
                "task": "automatic-speech-recognition",
                "architecture": speech.architecture,
                "labels": None,
                "front_end": f"audio at {speech.sampling_rate} Hz, {seconds:g} s a call",
            }
    except UntorchError as error:
        return {"error": str(error)}
    return None


def _front_end(settings: Settings) -> list[str]:
    parts = []
    if settings.optional("image_steps", list):
        steps = [step for step in settings.get("image_steps", list) if isinstance(step, list) and step]
        parts.append(f"image: {', '.join(_step(step) for step in steps)}")
    if settings.optional("text_inputs", list):
        parts.append(f"tokenizer, at most {settings.get('max_length', int)} tokens")
    if settings.optional("sampling_rate", int):
        parts.append(f"audio at {settings.get('sampling_rate', int)} Hz")
    return parts


def _step(step: list[Any]) -> str:
    name = str(step[0]).replace("_", " ")
    sizes = [str(size) for size in step[1:3] if isinstance(size, int) and not isinstance(size, bool)]
    return f"{name} to {' × '.join(sizes)}" if name in ("resize", "center crop") and len(sizes) == 2 else name


def describe_calls(manifest: Mapping[str, Any], path: str) -> Calls | None:
    """Of a manifest that the reader has checked; None if the package's task is unknown, or its front end damaged."""
    text, word = json.dumps(path, ensure_ascii=False), shlex.quote(path)
    package = f"untorch.pipeline({text})"
    if (found := describe_pipeline(manifest, path)) is not None:
        task = found.get("task")
        if task == "fill-mask":
            masked = f'"some {manifest["pipeline"].get("mask_token")}"'
            return Calls(f"{package}({masked})", f"untorch run {word} {masked}")
        if task not in _INPUTS:
            return None
        shell, python = _INPUTS[task]
        return Calls(f"{package}({python})", f"untorch run {word} {shell}")
    if "llm" in manifest:
        from untorch.llm.settings import read_settings as read_model

        try:
            task = read_model(manifest, path).task
        except UntorchError:
            return None
        if task == "generate":
            return Calls(f'{package}("…")', f'untorch generate {word} "…"')
        return Calls(f'untorch.llm.Engine({text}).{task}("…")', None)
    name, method = next(iter(manifest["methods"].items()))
    inputs = [spec for spec in method["inputs"] if "constant" not in spec]
    names = [str(spec["name"]) for spec in inputs]
    call = f".{name}" if name.isidentifier() else f"[{json.dumps(name, ensure_ascii=False)}]"
    arguments = ", ".join(names) if all(one.isidentifier() for one in names) else "…"  # of a tree: d['a'][0]
    method_option = f" --method {shlex.quote(name)}" if len(manifest["methods"]) > 1 else ""
    given = "".join(f" --input {shlex.quote(f'{one}=random')}" for one in names)
    return Calls(f"untorch.load({text}){call}({arguments})", f"untorch run {word}{method_option}{given}")
