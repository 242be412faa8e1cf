"""``export_folder``: a Hugging Face folder into one package that ``untorch.pipeline`` runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from untorch.export.errors import CompileError
from untorch.export.exporter import ExportReport, write_package
from untorch.export.lm.build import causal_lm
from untorch.export.methods import read_methods, read_path
from untorch.export.options import ExportOptions, resolve_options
from untorch.export.recipes.source import read_source
from untorch.export.recipes.table import ENGINE_TASKS, RECIPES, SPEECH_TASK, find_task, is_engine_task, task_names
from untorch.export.speech.build import speech_to_text
from untorch.pipeline.settings import FORMAT_VERSION
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["export_folder"]


def export_folder(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    arch: str | Sequence[str] | None = None,
    options: ExportOptions | None = None,
    **option_fields: Any,
) -> ExportReport:
    """Compile the model of a Hugging Face folder and write it to ``path`` with its front end.

    ``untorch.pipeline(path)`` runs it: tokenizer, image steps and labels are in the file. Language models
    (text-generation, feature-extraction, and text-classification by decoders) are written by ``causal_lm``, speech to
    text by ``speech_to_text``, for ``untorch.llm`` and ``untorch.speech``.

    Args:
        folder: With config.json, safetensors, and the files of its tokenizer or processor. Nothing is downloaded.
        path: The file to write.
        task: As transformers names it; ``untorch export --list-tasks`` lists them. Default: by the config's
            architecture.
        dtype: What the weights are converted to. Default: what the config says.
        device, arch, options, option_fields: As for ``export``. A language model takes arguments of ``causal_lm``, too.

    Raises:
        CompileError: The architecture is none that the task serves, or what ``export`` raises.
        InvalidArgumentError: The task is unknown, or the folder lacks a file.
        FileMissingError: There is no such folder.
    """
    known = task_names()
    if task is not None and task not in known:
        raise InvalidArgumentError(f"export_folder: task: expected {', '.join(known)}, got {task!r:.80}")
    target, source = read_path(path), read_source(folder, dtype)
    if (chosen := task or find_task(source)) is None:
        raise CompileError(
            f"export_folder: {source.folder}: no task is known for {source.architecture}: pass task= (--task), one of "
            f"{', '.join(known)}, or write a script for untorch export SCRIPT:FUNCTION"
        )
    given: dict[str, Any] = {"device": device, "arch": arch, "options": options, "dtype": dtype, **option_fields}
    if is_engine_task(source, chosen):
        return causal_lm(source.folder, target, task=ENGINE_TASKS[chosen], **given)
    if engine := sorted({"kv_dtype", "draft"} & option_fields.keys()):
        raise InvalidArgumentError(f"export_folder: {engine[0]}: is for language models, and {chosen} is another task")
    if chosen == SPEECH_TASK:
        return speech_to_text(source.folder, target, **given)
    resolved = resolve_options(options, option_fields)
    made = RECIPES[chosen].write(source)
    section = {"format_version": FORMAT_VERSION, "task": chosen, "architecture": source.architecture, **made.section}
    requests = read_methods(methods=made.methods)
    # transformers views sizes that torch.export cannot tell apart from others: they always hold.
    requests = [replace(request, method=replace(request.method, defers_guards=True)) for request in requests]
    return write_package(requests, target, device, arch, resolved, {"pipeline": section}, made.files)
